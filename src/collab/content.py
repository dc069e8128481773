"""content: how much of a model's attention looks at keys alone, whoever asks."""

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from collab.hosts import Host
from collab.inspection import AttentionSite, find_attention
from collab.key_bias import key_bias_of
from collab.running import Batch, call, device_of, step_by_step, tokens_that_count
from collab.structure import host_at
from collab.table import format_table

_MASKED = -5000.0
"""What is added to a score to hide a key: at most this. Position biases are not so large, masks not so small."""


@dataclass(frozen=True)
class HeadContent:
    """How one head's attention depends on its terms, as means over queries.

    Distances are total variation, from 0 (the same attention) to 1 (on other keys altogether), from the attention that
    all terms give. Shares are of the variance of a query's scores along the keys it may attend to: the covariance of a
    term with the whole score over the variance of the whole, so that the three add up to one. One may be negative.

    Attributes:
        content_distance: to the attention that the content term alone gives.
        content_kl: the Kullback-Leibler divergence of that attention from the whole one's, in nats.
        context_distance: to what the context term alone gives: how much there is of content.
        flat_distance: to what neither gives, even attention: the size to compare the others with.
        context_share, content_share, other_share: of the variance; other is what the layer adds, such as positions.
    """

    content_distance: float
    content_kl: float
    context_distance: float
    flat_distance: float
    context_share: float
    content_share: float
    other_share: float


_MEASURES = tuple(HeadContent.__dataclass_fields__)


@dataclass(frozen=True)
class LayerContent:
    """How one layer's attention depends on its terms.

    Attributes:
        path: where the layer is.
        heads: head by head.
        vanishing: largest change of any attention weight when the two terms of the key bias are left out: rounding.
        other: largest size of what the layer adds to the four terms at keys that are not masked, such as positions;
            near zero where the four are all there is.
    """

    path: str
    heads: list[HeadContent]
    vanishing: float
    other: float

    def mean(self, measure: str) -> float:
        """Mean over heads of one of the measures of `HeadContent`."""
        values: list[float] = [getattr(head, measure) for head in self.heads]
        return sum(values) / len(values)


@dataclass(frozen=True)
class ContentReport:
    """What `content` found, layer by layer. Prints as a table.

    Attributes:
        layers: one for every layer whose scores were seen.
        left: path -> reasons, for attention of which nothing can be said.
    """

    layers: list[LayerContent]
    left: dict[str, list[str]]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        header = ["path", "content distance", "content kl", "context distance", "flat distance", "context share",
                  "content share", "other share", "nearest to content", "vanishing"]  # fmt: skip
        rows = []
        for layer in self.layers:
            distance, head = min((head.content_distance, place) for place, head in enumerate(layer.heads))
            rows.append([layer.path, *map(layer.mean, _MEASURES), f"head {head}, at {distance:.3f}", layer.vanishing])
        lines = [
            format_table(header, rows),
            "means over heads; distances: total variation between the attention of all terms and that of one alone, or "
            "of none (flat); shares: of the variance of scores along keys; vanishing: what the key bias changes",
        ]
        return "\n".join([*lines, *(f"left out: {path} ({'; '.join(why)})" for path, why in self.left.items())])


def content(model: nn.Module, batch: Batch) -> ContentReport:
    """Split a model's attention scores into context and content, and tell how much of its attention is content.

    With biases, a score is x Wq Wkᵀ yᵀ (context) + b_q Wkᵀ yᵀ (content) + x Wq b_k + b_q b_k, times the scale
    (Cordonnier, Loukas and Jaggi 2020, section 2.2). The last two are the same for every key, so the softmax does not
    see them. Content depends on the key alone: what a head attends to whoever asks. Masks, padding and position biases
    are the model's own: taken from the scores it computes, and kept whichever terms are left out. Queries that are
    padding do not count.

    Args:
        model: any model `find_attention` finds swappable attention in, not converted. It is left as it was, and runs
            in evaluation mode without gradients.
        batch: keyword arguments of the model as a mapping, a tensor, or a tuple of positional arguments.

    Example:
        >>> import torch, collab
        >>> report = collab.content(torch.nn.TransformerEncoderLayer(16, 2, batch_first=True), torch.randn(2, 5, 16))
        >>> report.layers[0].vanishing < 1e-12
        True
    """
    found = find_attention(model)
    left = {site.path: list(site.why_not) for site in found if site.why_not}
    sites = [site for site in found if not site.why_not]
    if not sites:
        raise ValueError(f"no attention to look at in {type(model).__name__}; it must not be converted yet")
    scores = _Scores()
    watches = [_Watch(model, site, batch, scores) for site in sites]
    handles = [handle for watch in watches for handle in watch.start()]
    try:
        # Only plain operations show the scores.
        with step_by_step(model), torch.no_grad(), sdpa_kernel(SDPBackend.MATH), scores:
            call(model, batch, device_of(model))
    finally:
        for handle in handles:
            handle.remove()
    left |= {watch.site.path: [watch.problem or "it did not run"] for watch in watches if watch.tally.rows == 0}
    layers = [watch.tally.result(watch.site.path) for watch in watches if watch.tally.rows]
    if not layers:
        listing = "; ".join(f"{path}: {', '.join(reasons)}" for path, reasons in left.items())
        raise ValueError(f"no scores of {type(model).__name__} could be seen on this batch: {listing}")
    return ContentReport(layers, left)


class _Scores(TorchDispatchMode):
    """Keeps what every softmax is taken of while a layer runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Tensor] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.seen is not None and "softmax" in func.name():
            self.seen.append(args[0])
        return func(*args, **(kwargs or {}))


class _Watch:
    """Takes in what one layer reads and the scores it computes, call by call."""

    def __init__(self, model: nn.Module, site: AttentionSite, batch: Batch, scores: _Scores) -> None:
        self.model, self.site, self.batch, self.scores = model, site, batch, scores
        self.inputs: dict[str, Tensor] = {}
        self.tally = _Tally(site.num_heads)
        self.problem = ""

    def start(self) -> list[RemovableHandle]:
        """Hook to the layer."""
        return [
            self.site.module.register_forward_pre_hook(self._enter),
            *host_at(self.site).watch_inputs(self.site.module, self._see),
            self.site.module.register_forward_hook(self._leave),
        ]

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.inputs, self.scores.seen = {}, []

    def _see(self, role: str, inputs: Tensor) -> None:
        self.inputs[role] = inputs.detach()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        seen, self.scores.seen = self.scores.seen or [], None
        if set(self.inputs) != {"query", "key"}:
            self.problem = "its queries and keys were not seen"
            return
        query, key = self.inputs["query"], self.inputs["key"]
        size = (len(query), self.site.num_heads, query.shape[1], key.shape[1])
        fitting = [one for one in seen if one.shape[-2:] == size[-2:] and one.numel() == torch.Size(size).numel()]
        if not fitting or len(key) != len(query):
            self.problem = "its scores were not seen as (batch, head, query, key)"
            return
        terms = score_terms(host_at(self.site), module, query, key)
        counts = tokens_that_count(self.model, self.batch, self.site.path, query.shape, keys=False)
        if counts is None:
            counts = torch.ones(query.shape[:2], dtype=torch.bool)
        self.tally.add(_wide(fitting[0]).reshape(size), terms, counts.to(query.device))


@dataclass(frozen=True)
class ScoreTerms:
    """The four terms of attention scores, times the scale, in float64.

    Attributes:
        context: (batch, head, query, key): of query and key together.
        content: (batch, head, 1, key): of the key alone, by the query's bias.
        query_only: (batch, head, query, 1): of the query alone, by the key's bias.
        constant: (head, 1, 1): of both biases.
    """

    context: Tensor
    content: Tensor
    query_only: Tensor
    constant: Tensor


def score_terms(host: Host, module: nn.Module, query: Tensor, key: Tensor) -> ScoreTerms:
    """The four terms of an unconverted layer's scores for inputs (batch, query, width) and (batch, key, width)."""
    weights, scale = host.read(module), host.scale(module)
    own_key_bias = key_bias_of(host, module)
    nothing = torch.zeros(weights.num_heads, weights.head_dim)
    query_bias = _wide((nothing if weights.query_bias is None else weights.query_bias).to(query.device))
    key_bias = _wide((nothing if own_key_bias is None else own_key_bias).to(query.device))
    queries, keys = (
        torch.einsum("btw,hdw->bhtd", _wide(inputs), _wide(weight))
        for inputs, weight in ((query, weights.query), (key, weights.key))
    )
    return ScoreTerms(
        context=queries @ keys.mT * scale,
        content=(keys @ query_bias[:, :, None]).mT * scale,
        query_only=queries @ key_bias[:, :, None] * scale,
        constant=(query_bias * key_bias).sum(1)[:, None, None] * scale,
    )


@dataclass
class _Tally:
    """Running sums over queries, head by head."""

    num_heads: int
    rows: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)
    vanishing: float = 0.0
    other: float = 0.0

    def add(self, scores: Tensor, terms: ScoreTerms, counts: Tensor) -> None:
        """Take in scores (batch, head, query, key), masked as the model does, and which (batch, query) count."""
        rest = scores - (terms.context + terms.content + terms.query_only + terms.constant)
        allowed = rest > _MASKED
        counts = counts[:, None] & allowed.any(-1)  # (batch, head, query)
        if not counts.any():
            return
        rest = rest.masked_fill(~allowed, -torch.inf).masked_fill(~allowed.any(-1, keepdim=True), 0.0)
        visible = rest.masked_fill(~allowed, 0.0)
        kept = terms.context + terms.content
        attention = (kept + rest).softmax(-1)
        with_all = (kept + terms.query_only + terms.constant + rest).softmax(-1)
        alone = {
            name: (term + rest).log_softmax(-1)
            for name, term in (("content", terms.content), ("context", terms.context), ("flat", torch.zeros_like(rest)))
        }
        measured = {
            f"{name}_distance": (attention - one.exp()).abs().sum(-1) / 2 for name, one in alone.items()
        }  # fmt: skip
        logs = (kept + rest).log_softmax(-1)
        measured["content_kl"] = (attention * (logs - alone["content"]).masked_fill(~allowed, 0.0)).sum(-1)
        centred = _centred(kept + visible, allowed)
        for name, term in (("context", terms.context), ("content", terms.content), ("other", visible)):
            measured[f"{name}_share"] = (_centred(term.expand_as(rest), allowed) * centred).sum(-1)
        self.rows += int(counts.any(1).sum())
        self._sum("rows", counts.double(), counts)
        self._sum("variance", centred.square().sum(-1), counts)
        for name, values in measured.items():
            self._sum(name, values, counts)
        self.vanishing = max(self.vanishing, float((attention - with_all).abs().amax(-1)[counts].max()))
        self.other = max(self.other, float(visible.abs().amax(-1)[counts].max()))

    def _sum(self, name: str, values: Tensor, counts: Tensor) -> None:
        total = values.masked_fill(~counts, 0.0).sum((0, 2))
        self.sums[name] = self.sums[name] + total if name in self.sums else total

    def result(self, path: str) -> LayerContent:
        """The sums as means: shares over the variance of all queries together."""
        rows = self.sums["rows"].clamp(min=1)
        variance = self.sums["variance"].clamp(min=torch.finfo(torch.float64).tiny)
        means = {
            name: (self.sums[name] / (variance if name.endswith("share") else rows)).tolist() for name in _MEASURES
        }
        heads = [HeadContent(**{name: means[name][head] for name in _MEASURES}) for head in range(self.num_heads)]
        return LayerContent(path, heads, self.vanishing, self.other)


def _centred(values: Tensor, allowed: Tensor) -> Tensor:
    """Values (..., key) less their mean over the keys allowed, zero at the others."""
    number = allowed.sum(-1, keepdim=True).clamp(min=1)
    hidden = values.masked_fill(~allowed, 0.0)
    return (hidden - hidden.sum(-1, keepdim=True) / number).masked_fill(~allowed, 0.0)


def _wide(values: Tensor) -> Tensor:
    """In float64, on the CPU where the device has none."""
    return (values.cpu() if values.device.type == "mps" else values).detach().double()
