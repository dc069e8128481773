"""compare: how far a converted model's outputs are from the original's."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from collab.running import Batch, call, device_of, evaluating
from collab.table import format_table

_CHUNK = 2**22
"""Numbers looked at together: what bounds the memory a comparison takes, however large the vocabulary."""


@dataclass(frozen=True)
class Fidelity:
    """How far a converted model's outputs are from the original's, padding left out. Prints as a table.

    Attributes:
        output: what was compared: "logits", "last_hidden_state", ..., or "output" for a bare tensor.
        positions: how many vectors were compared: tokens, patches, or whole inputs where there is one vector each.
        mean_cosine, min_cosine: between the two outputs at a position.
        max_abs: largest difference between two numbers.
        relative: Frobenius norm of the difference over that of the original's outputs.
        kl: KL(original || converted) of the softmax of the logits in nats, mean over positions; None without logits.
        same_top: share of positions whose largest logit is the same one; None without logits.
        pooled_cosine: between outputs averaged over their positions, mean over inputs; None for logits and where
            there is one vector an input.
    """

    output: str
    positions: int
    mean_cosine: float
    min_cosine: float
    max_abs: float
    relative: float
    kl: float | None
    same_top: float | None
    pooled_cosine: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        rows = [
            (name, f"{value:.6g}" if isinstance(value, float) else value)
            for name, value in self.to_dict().items()
            if value is not None
        ]
        return format_table(["measure", "value"], rows)


def compare(original: nn.Module, converted: nn.Module, batches: Iterable[Batch]) -> Fidelity:
    """Run both models on the same batches and measure how far the outputs of the second moved.

    Both run in evaluation mode, without gradients, each on its own device; their modes are restored. Memory is bounded
    by one batch, so `batches` may be a generator.

    Args:
        original: the model to be true to.
        converted: the model to judge.
        batches: keyword arguments of the models as mappings (what a tokenizer gives), a tensor, or a tuple of
            positional arguments. Positions where `attention_mask` is zero do not count; in encoder-decoder models,
            those where `decoder_attention_mask` is zero or `labels` is -100.

    Example:
        >>> import copy, torch, collab
        >>> model = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
        >>> collab.compare(model, copy.deepcopy(model), [torch.randn(3, 5, 16)]).max_abs
        0.0
    """
    tally = _Tally()
    with evaluating(original, converted), torch.no_grad():
        for index, batch in enumerate(batches):
            name, expected = _run(original, batch, index)
            other, found = _run(converted, batch, index)
            if name != other or expected.shape != found.shape:
                raise ValueError(
                    "the two models must give the same output, "
                    f"got {name} {tuple(expected.shape)} from {type(original).__name__} "
                    f"and {other} {tuple(found.shape)} from {type(converted).__name__}"
                )
            tally.add(name, expected, found.to(expected.device), positions_that_count(original, batch, expected))
    return tally.result()


@dataclass
class _Tally:
    """Running sums over the positions seen so far."""

    output: str = ""
    positions: int = 0
    inputs: int = 0
    cosine: float = 0.0
    min_cosine: float = float("inf")
    max_abs: float = 0.0
    squared: float = 0.0
    squared_difference: float = 0.0
    logits: dict[str, float] = field(default_factory=dict)
    pooled: float = 0.0

    def add(self, name: str, expected: Tensor, found: Tensor, counts: Tensor | None) -> None:
        """Take in one batch: outputs (..., feature), and which of the (...) positions count."""
        if self.output not in ("", name):
            raise ValueError(f"every batch must give the same output, got {self.output} and then {name}")
        self.output = name
        features = expected.shape[-1]
        is_logits = name.endswith("logits")
        if expected.dim() == 3 and not is_logits:
            self._add_pooled(expected, found, counts)
        expected, found = expected.reshape(-1, features), found.reshape(-1, features)
        if counts is not None:
            expected, found = expected[counts.reshape(-1)], found[counts.reshape(-1)]
        size = max(1, _CHUNK // features)
        for left, right in zip(expected.split(size), found.split(size), strict=True):
            if len(left):
                self._add_rows(_wide(left), _wide(right), is_logits and features > 1)

    def _add_rows(self, expected: Tensor, found: Tensor, is_logits: bool) -> None:
        """Take in some positions, (position, feature)."""
        for which, rows in (("original", expected), ("converted", found)):
            if not torch.isfinite(rows).all():
                raise ValueError(f"the {self.output} of the {which} model must be finite, got NaN or infinity")
        cosine = _cosine(expected, found)
        difference = found - expected
        self.positions += len(expected)
        self.cosine += float(cosine.sum())
        self.min_cosine = min(self.min_cosine, float(cosine.min()))
        self.max_abs = max(self.max_abs, float(difference.abs().max()))
        self.squared += float(expected.square().sum())
        self.squared_difference += float(difference.square().sum())
        if is_logits:
            log_expected, log_found = expected.log_softmax(-1), found.log_softmax(-1)
            divergence = (log_expected.exp() * (log_expected - log_found)).sum(-1).clamp(min=0)
            same = expected.argmax(-1) == found.argmax(-1)
            self.logits["kl"] = self.logits.get("kl", 0.0) + float(divergence.sum())
            self.logits["same_top"] = self.logits.get("same_top", 0.0) + float(same.sum())

    def _add_pooled(self, expected: Tensor, found: Tensor, counts: Tensor | None) -> None:
        """Take in the cosine of outputs (input, position, feature) averaged over the positions that count."""
        if counts is None:
            counts = torch.ones(expected.shape[:2], dtype=torch.bool, device=expected.device)
        weights = _wide(counts)[:, None]
        means = [(weights @ _wide(part).masked_fill(~counts[..., None], 0))[:, 0] for part in (expected, found)]
        not_empty = counts.any(1)
        self.pooled += float(_cosine(*means)[not_empty].sum())
        self.inputs += int(not_empty.sum())

    def result(self) -> Fidelity:
        """The sums as means."""
        if self.positions == 0:
            raise ValueError("batches must hold at least one position that is not padding, got none")
        return Fidelity(
            output=self.output,
            positions=self.positions,
            mean_cosine=self.cosine / self.positions,
            min_cosine=self.min_cosine,
            max_abs=self.max_abs,
            relative=(self.squared_difference / max(self.squared, torch.finfo(torch.float64).tiny)) ** 0.5,
            kl=self.logits["kl"] / self.positions if self.logits else None,
            same_top=self.logits["same_top"] / self.positions if self.logits else None,
            pooled_cosine=self.pooled / self.inputs if self.inputs else None,
        )


def _run(model: nn.Module, batch: Batch, seed: int) -> tuple[str, Tensor]:
    """One batch's output and its name."""
    name, output = pick_output(call(model, batch, device_of(model), seed), type(model).__name__)
    # timm's classifiers give a bare tensor, and say how many classes they have.
    if name == "output" and getattr(model, "num_classes", None) == output.shape[-1]:
        name = "logits"
    return name, output


def pick_output(outputs: Any, model_name: str) -> tuple[str, Tensor]:
    """The output to compare, and its name: logits or else hidden states or else whatever comes first."""
    if isinstance(outputs, Mapping):
        named = dict(outputs)
        candidates = [(name, named.get(name)) for name in ("logits", "last_hidden_state", *named)]
    else:
        candidates = [("output", value) for value in (outputs if isinstance(outputs, tuple | list) else [outputs])]
    for name, value in candidates:
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 2:
            return name, value
    raise ValueError(
        f"{model_name} must give floating point numbers (batch, ..., feature) to compare, "
        f"got {'integers or too few dimensions' if isinstance(outputs, Tensor) else type(outputs).__name__}"
    )


def are_logits(model: nn.Module, name: str, output: Tensor) -> bool:
    """Whether an output is logits of classes, by the name that `pick_output` gives it or the model's own word.

    timm's classifiers return nothing but their logits, without a name.
    """
    is_of_timm = output.dim() == 2 and getattr(model, "pretrained_cfg", None) is not None
    are_classes = is_of_timm and getattr(model, "num_classes", 0) == output.shape[-1]
    return output.shape[-1] > 1 and (are_classes or name.endswith("logits"))


def positions_that_count(model: nn.Module, batch: Any, output: Tensor) -> Tensor | None:
    """Which positions (batch, position) of an output (batch, position, feature) are not padding; None if all count."""
    if not isinstance(batch, Mapping):
        return None
    mask = batch.get("attention_mask")
    is_two = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if is_two and not type(model).__name__.endswith("Encoder"):  # on its own it has the config of the whole model
        labels = batch.get("labels")
        mask = batch.get("decoder_attention_mask", None if labels is None else labels != -100)
    if not isinstance(mask, Tensor) or mask.shape != output.shape[:-1]:
        return None
    return mask.to(output.device) != 0


def _wide(values: Tensor) -> Tensor:
    """In float64, on the CPU where the device has none: differences of 1e-7 are to be seen."""
    return (values.cpu() if values.device.type == "mps" else values).double()


def _cosine(left: Tensor, right: Tensor) -> Tensor:
    """Cosine along the last dimension; of two zero vectors, one."""
    norms = left.norm(dim=-1) * right.norm(dim=-1)
    same = (left == right).all(-1)
    cosine = (left * right).sum(-1) / torch.where(norms == 0, torch.ones_like(norms), norms)
    return torch.where(same, torch.ones_like(cosine), cosine)
