"""analyze: how many dimensions the heads of a model use, and how much they have in common."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from collab.analysis_plot import draw
from collab.calibration import Calibration, check_fits, little_data
from collab.conversion import Metric
from collab.hosts import Collaborative, HeadWeights, weights_problem
from collab.hosts.obstacles import ROTARY
from collab.inspection import AttentionSite, find_attention
from collab.ops.reference import dense_mixing
from collab.running import Progress
from collab.spectra import captured, effective_dims, energies, head_energies, likeness, mixed_energies, mixed_likeness
from collab.structure import host_at
from collab.table import format_table

SHARES = (0.9, 0.95, 0.99)
"""Shares of the energy whose sizes reports tell."""

_ROTARY_NOTE = "rotary positions: products are those of a query and a key at the same position"
_PROJECTIONS = (("q_proj", "k_proj"), ("query", "key"), ("q", "k"), ("wq", "wk"))
"""Names of the query and key projections in classes that have rotary positions and therefore no host."""


@dataclass(frozen=True)
class CapturedEnergy:
    """Share of the squared singular values of a matrix that its first principal components hold.

    Attributes:
        heads: one curve a head: the share of the first component, of the first two, ...
        concatenated: the same for all heads side by side; of products, for their sum over heads, W_Q W_Kᵀ.
    """

    heads: tuple[tuple[float, ...], ...]
    concatenated: tuple[float, ...]

    @property
    def mean_head(self) -> tuple[float, ...]:
        """The mean of the heads' curves; a head with fewer components has all of its energy beyond them."""
        longest = max(map(len, self.heads))
        curves = [curve + (1.0,) * (longest - len(curve)) for curve in self.heads]
        return tuple(sum(values) / len(curves) for values in zip(*curves, strict=True))

    def head_sizes(self, share: float) -> tuple[int, ...]:
        """For each head, the fewest components that hold at least this share."""
        return tuple(_size(curve, share) for curve in self.heads)

    def concatenated_size(self, share: float) -> int:
        """The fewest components that hold at least this share of the concatenation."""
        return _size(self.concatenated, share)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON: curves to six digits, and the sizes for some shares."""
        return {
            "heads": [_rounded(curve) for curve in self.heads],
            "concatenated": _rounded(self.concatenated),
            "head_sizes": {f"{share:g}": list(self.head_sizes(share)) for share in SHARES},
            "concatenated_sizes": {f"{share:g}": self.concatenated_size(share) for share in SHARES},
        }


@dataclass(frozen=True)
class LayerAnalysis:
    """What the weights of one attention layer say of its heads.

    Attributes:
        path: where the layer is.
        num_heads, head_dim: its heads and the size of one.
        metric: "weights" if all directions of the inputs count alike, "inputs" if as much as inputs vary in them.
        query, key, product: captured energy of the query matrices, the key matrices and their products.
        similarity: (head, head) cosines between the products T_i = Wq_i Wk_iᵀ of any two heads. They do not depend on
            the basis of a head's query/key space, as cosines between query matrices would.
        shared_dim: of a converted layer, the dimensions its heads share; None otherwise.
        dims_per_head: of a converted layer whose heads use some of them each, how many; None otherwise.
        effective_dims: of a converted layer, how many shared dimensions each head uses: the participation ratio
            (Σ e)² / Σ e² of e_d = (mixing_d ‖query_d‖ ‖key_d‖)².
        note: what else there is to say, or nothing.
    """

    path: str
    num_heads: int
    head_dim: int
    metric: str
    query: CapturedEnergy
    key: CapturedEnergy
    product: CapturedEnergy
    similarity: tuple[tuple[float, ...], ...]
    shared_dim: int | None = None
    dims_per_head: int | None = None
    effective_dims: tuple[float, ...] | None = None
    note: str = ""

    @property
    def mean_similarity(self) -> float:
        """Mean size of the cosines between two different heads; 0 where there is but one head."""
        others = [abs(cosine) for _, _, cosine in self.closest_pairs()]
        return sum(others) / len(others) if others else 0.0

    def closest_pairs(self, count: int | None = None) -> list[tuple[int, int, float]]:
        """(head, head, cosine) of the pairs that share most: the largest cosines in size, all unless told how many.

        Heads with a cosine near minus one share their dimensions too, with mixing weights of opposite signs.
        """
        pairs = [
            (left, right, row[right])
            for left, row in enumerate(self.similarity)
            for right in range(left + 1, len(row))
        ]  # fmt: skip
        return sorted(pairs, key=lambda pair: -abs(pair[2]))[:count]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        names = ("path", "num_heads", "head_dim", "metric", "shared_dim", "dims_per_head", "mean_similarity", "note")
        values: dict[str, Any] = {name: getattr(self, name) for name in names}
        closest = [{"heads": [left, right], "cosine": cosine} for left, right, cosine in self.closest_pairs(5)]
        return values | {
            "effective_dims": None if self.effective_dims is None else list(self.effective_dims),
            **{role: getattr(self, role).to_dict() for role in ("query", "key", "product")},
            "similarity": [_rounded(row) for row in self.similarity],
            "closest_pairs": closest,
        }


@dataclass(frozen=True)
class Analysis:
    """What `analyze` found, layer by layer. Prints as a table.

    Attributes:
        layers: one for every attention layer that could be read.
        left: path -> reasons, for attention that could not.
        notes: what else there is to say, such as that there was little data.
    """

    layers: list[LayerAnalysis]
    left: dict[str, list[str]]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "shares": list(SHARES),
            "layers": [layer.to_dict() for layer in self.layers],
            "left": self.left,
            "notes": list(self.notes),
        }

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the captured energy and the similarity of heads to a file: .png, .svg or .pdf. Needs matplotlib."""
        draw(self.layers, path)

    def __str__(self) -> str:
        header = ["path", "heads", "head_dim", "a head's product", "all: query", "key", "product", "mean |cosine|",
                  "closest heads"]  # fmt: skip
        is_converted = any(layer.effective_dims is not None for layer in self.layers)
        rows = [_row(layer, is_converted) for layer in self.layers]
        if is_converted:
            header += ["shared_dim", "effective dims, mean (least-most)"]
        shares = "/".join(f"{share:.0%}" for share in SHARES).replace("%", "", len(SHARES) - 1)
        metrics = " and ".join(sorted({layer.metric for layer in self.layers}))
        lines = [
            format_table(header, rows),
            f"sizes: components that hold {shares} of the energy, in the metric of the {metrics}; a head's: mean over "
            "heads; all: of the heads side by side, and of the sum of their products",
        ]
        lines += [f"left out: {path} ({'; '.join(reasons)})" for path, reasons in self.left.items()]
        notes = dict.fromkeys((*self.notes, *(layer.note for layer in self.layers if layer.note)))
        return "\n".join([*lines, *(f"note: {note}" for note in notes)])


def analyze(
    model: nn.Module,
    *,
    calibration: Calibration | None = None,
    only: Callable[[AttentionSite], bool] | None = None,
    progress: Progress | None = None,
) -> Analysis:
    """Measure, from a model's weights, how many dimensions its heads use and how much they have in common.

    These are the curves of Figure 1 of Cordonnier, Loukas and Jaggi (2020), for each layer, and the cosines between
    heads' products. Nothing larger than the weights of a layer is formed. Converted layers are read as heads of
    queries `mixing[head] * query` and keys `key`; layers with rotary positions as if these were not there.

    Args:
        model: any model with attention.
        calibration: statistics from `calibrate`: energies and cosines are then those of scores on such inputs.
        only: look only at layers for which this is true.
        progress: wraps the loop over layers, given it and its length: a progress bar.

    Example:
        >>> import torch, collab
        >>> layer = collab.analyze(torch.nn.TransformerEncoderLayer(16, 2)).layers[0]
        >>> layer.path, len(layer.product.heads[0]), len(layer.product.concatenated)
        ('self_attn', 8, 16)
    """
    sites = [site for site in find_attention(model) if only is None or only(site)]
    if calibration is not None:
        check_fits(calibration, {site.path: site for site in find_attention(model)})
    left = {site.path: reasons for site in sites if (reasons := _why_unread(site))}
    readable = [site for site in sites if site.path not in left]
    if not readable:
        listing = "; ".join(f"{path}: {', '.join(reasons)}" for path, reasons in left.items())
        raise ValueError(f"no attention to analyze in {type(model).__name__}{f': {listing}' if left else ''}")
    steps: Iterable[AttentionSite] = readable if progress is None else progress(readable, len(readable))
    layers, shrinkage = [], 0.0
    for site in steps:
        statistics = None if calibration is None else calibration.sites.get(site.path)
        metric = Metric.of(statistics, next(site.module.parameters()).device)
        shrinkage = max(shrinkage, metric.shrinkage)
        is_converted = isinstance(site.module, Collaborative)
        layers.append(_analyze_shared(site, metric) if is_converted else _analyze_heads(site, metric))
    note = little_data(shrinkage)
    return Analysis(layers, left, () if note is None else (note,))


def _why_unread(site: AttentionSite) -> list[str]:
    """Reasons why nothing can be said of a layer; empty where its heads' products can be read."""
    is_collaborative = isinstance(site.module, Collaborative)
    # That weights are tied, or a forward replaced, forbids a swap and not a look.
    is_plain = site.host is not None and not site.host.why_not(site.module)
    if not is_collaborative and not is_plain:
        if site.why_not != (ROTARY,):
            return list(site.why_not)
        if site.host is None and _rotary_heads(site.module) is None:
            return [*site.why_not, "and its query and key weights are not where they could be read"]
    return weights_problem(site.module)


def _rotary_heads(module: Any) -> HeadWeights | None:
    """Query and key weights of a class with rotary positions, each key as often as it has queries; None if unclear."""
    for names in _PROJECTIONS:
        query, key = (getattr(module, name, None) for name in names)
        if type(query) is nn.Linear and type(key) is nn.Linear and "weight" in query._parameters:
            break
    else:
        return None
    head_dim = next((getattr(module, name) for name in ("head_dim", "attention_head_size") if hasattr(module, name)), 0)
    if not isinstance(head_dim, int) or head_dim < 1 or len(query.weight) % head_dim or len(key.weight) % head_dim:
        return None
    num_heads, num_keys = len(query.weight) // head_dim, len(key.weight) // head_dim
    if num_heads % num_keys or num_heads != getattr(getattr(module, "config", None), "num_attention_heads", num_heads):
        return None
    by_head = key.weight.unflatten(0, (num_keys, head_dim)).repeat_interleave(num_heads // num_keys, dim=0)
    return HeadWeights(query.weight.unflatten(0, (num_heads, head_dim)), by_head, None)


@torch.no_grad()
def _analyze_heads(site: AttentionSite, metric: Metric) -> LayerAnalysis:
    """A layer of ordinary heads."""
    weights = _rotary_heads(site.module) if site.host is None else site.host.read(site.module)
    assert weights is not None
    query, key = metric.enter(weights)
    whole = energies(query.flatten(0, 1), key.flatten(0, 1))
    of_query, of_key, of_product = (
        CapturedEnergy(_rows(captured(own)), _rows(captured(together)[None])[0])
        for own, together in zip(head_energies(query, key), whole, strict=True)
    )
    return LayerAnalysis(
        path=site.path,
        num_heads=weights.num_heads,
        head_dim=weights.head_dim,
        metric=metric.name,
        query=of_query,
        key=of_key,
        product=of_product,
        similarity=_rows(likeness(query, key)),
        note=_ROTARY_NOTE if ROTARY in site.why_not else "",
    )


@torch.no_grad()
def _analyze_shared(site: AttentionSite, metric: Metric) -> LayerAnalysis:
    """A converted layer, as heads of queries `mixing[head] * query` and keys `key`."""
    shared = host_at(site).shared_weights(site.module)
    entered = metric.enter(HeadWeights(shared.query[None], shared.key[None], None))
    query, key = (part[0].double() for part in entered)
    mixing = shared.mixing.double()
    if shared.dims is not None:
        mixing = dense_mixing(mixing, shared.dims, shared.shared_dim)
    by_head = [[captured(values) for values in head] for head in mixed_energies(query, key, mixing)]
    # Side by side, queries have the Gram matrix Qᵀ (Σ diag(m_i)²) Q; keys are counted once, since they are stored once;
    # the sum of products is Qᵀ diag(Σ m_i) K.
    of_query, of_key, _ = energies(mixing.square().sum(0).sqrt()[:, None] * query, key)
    _, _, of_product = energies(mixing.sum(0)[:, None] * query, key)
    curves = [
        CapturedEnergy(tuple(tuple(head[role].tolist()) for head in by_head), tuple(captured(whole).tolist()))
        for role, whole in enumerate((of_query, of_key, of_product))
    ]
    return LayerAnalysis(
        path=site.path,
        num_heads=site.num_heads,
        head_dim=site.head_dim,
        metric=metric.name,
        query=curves[0],
        key=curves[1],
        product=curves[2],
        similarity=_rows(mixed_likeness(query, key, mixing)),
        shared_dim=shared.shared_dim,
        dims_per_head=None if shared.dims is None else shared.dims.shape[1],
        effective_dims=tuple(effective_dims(query, key, mixing).tolist()),
    )


def _row(layer: LayerAnalysis, is_converted: bool) -> list[object]:
    """One layer's row of the table."""
    heads = (layer.product.head_sizes(share) for share in SHARES)
    closest = ", ".join(f"{left}~{right} {cosine:+.2f}" for left, right, cosine in layer.closest_pairs(2))
    row: list[object] = [layer.path, layer.num_heads, layer.head_dim, "/".join(f"{_mean(one):.0f}" for one in heads)]
    for energy in (layer.query, layer.key, layer.product):
        row.append("/".join(str(energy.concatenated_size(share)) for share in SHARES))
    row += [layer.mean_similarity, closest]
    if is_converted:
        used = layer.effective_dims
        told = "" if used is None else f"{_mean(used):.1f} ({min(used):.1f}-{max(used):.1f})"
        row += [layer.shared_dim or "", told]
    return row


def _size(curve: tuple[float, ...], share: float) -> int:
    """The first place, from one, at which a curve that rises to 1 reaches a share."""
    if not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1, got {share}")
    return next((place for place, value in enumerate(curve, 1) if value >= share - 1e-12), len(curve))


def _mean(values: tuple[float, ...]) -> float:
    return sum(values) / len(values)


def _rounded(values: tuple[float, ...]) -> list[float]:
    return [round(value, 6) for value in values]


def _rows(values: Tensor) -> tuple[tuple[float, ...], ...]:
    """(row, column) as tuples."""
    return tuple(tuple(row) for row in values.tolist())
