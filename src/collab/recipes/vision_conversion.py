"""A trained classifier converted in several ways without training: what each way and size costs in accuracy."""

import copy
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

import collab
from collab.classification import Accuracy
from collab.reporting.attention import attention_weights, moved
from collab.swap import count_parameters

METHODS = ("paper", "shared", "unshared", "calibrated", "refined", "sparse")
"""Ways to convert: the paper's decomposition (random start), this library's, each head by itself, all three from the
weights alone; from the statistics of inputs; and then refined; and refined with heads that use few dimensions each."""


@dataclass(frozen=True)
class Row:
    """One conversion. `inputs` is how many training images it may look at, 0 for the weights alone."""

    method: str
    shared_dim: int
    inputs: int = 0
    dims_per_head: int | None = None

    @property
    def name(self) -> str:
        """Fit for a file."""
        return f"{self.method}-{self.shared_dim}-{self.inputs}"

    def config(self, seed: int) -> collab.CollaborativeConfig:
        """The library's settings for it."""
        method = self.method if self.method in ("paper", "unshared") else "shared"
        return collab.CollaborativeConfig(
            shared_dim=self.shared_dim, dims_per_head=self.dims_per_head, method=method, seed=seed
        )


def full_size(model: nn.Module, sizes: Sequence[int]) -> int:
    """Heads x head size of a model's attention, which no size to convert it to may exceed."""
    sites = collab.find_attention(model)
    full = max((site.full_dim for site in sites if not site.why_not), default=0)
    if not full:
        why = "; ".join(sorted({reason for site in sites for reason in site.why_not})) or "it has no attention"
        raise ValueError(f"convert_sizes must be left out for a model that cannot be converted: {why}")
    if max(sizes) > full:
        raise ValueError(f"convert_sizes must be at most heads x head size, {full}, got {max(sizes)}")
    return full


def rows_of(
    sizes: Sequence[int], methods: Sequence[str], inputs: Sequence[int], dims_per_head: int, full: int
) -> list[Row]:
    """Every way at every size; those that look at images with every number of them, sparse ones with the most.

    At the full size every way is the same, and exact: there is one row of it.
    """
    rows = []
    for size in sizes:
        if size == full:
            rows.append(Row("shared", size))
            continue
        for method in methods:
            if method in ("calibrated", "refined"):
                rows += [Row(method, size, count) for count in inputs]
            elif method == "sparse":
                rows += [Row(method, size, max(inputs), dims_per_head)] if inputs and dims_per_head < size else []
            else:
                rows.append(Row(method, size))
    return rows


def convert(
    model: nn.Module, row: Row, batches: Callable[[int], Iterable[Any]], refinement: collab.Refinement
) -> tuple[nn.Module, dict[str, Any]]:
    """A converted copy, and what is known of the conversion: seconds, parameters, sizes of its errors."""
    converted = copy.deepcopy(model)
    options: dict[str, Any] = {}
    if row.inputs:
        options = {"calibration": list(batches(row.inputs)), "refine": row.method != "calibrated" and refinement}
    begin = _now(converted)
    report = collab.collaborate_(converted, row.config(refinement.seed), **options)
    seconds = _now(converted) - begin
    errors = [site.error for site in report.sites if site.error is not None]
    return converted, {
        **asdict(row),
        "seconds": seconds,
        "refinement_seconds": None if report.refinement is None else report.refinement.seconds,
        "refinement": None if report.refinement is None else report.refinement.settings,
        "parameters": count_parameters(converted),
        "attention_parameters": sum(site.parameters_after for site in report.sites),
        "error": sum(errors) / len(errors) if errors else None,
    }


def judge_rows(
    model: nn.Module,
    rows: Sequence[Row],
    batches: Callable[[int], Iterable[Any]],
    judge: Callable[[nn.Module], Accuracy],
    step: Callable[[str, Callable[[], Any]], Any],
    refinement: collab.Refinement,
    pictures: Sequence[Tensor] = (),
) -> list[dict[str, Any]]:
    """Convert and judge, each row a step of its own that is not done twice; the last refined ones show attention.

    Args:
        model: the original.
        rows: ways to convert it.
        batches: so many calibration images, as batches of the model.
        judge: what is measured; of single images, which ones a conversion `gained` and which it `lost`.
        step: keeps a result under a name; see `Work.step`.
        refinement: how those that are refined are; its seed is that of all conversions.
        pictures: (1, 3, size, size) each, as the model reads them, whose attention is kept.
    """
    results = []
    before = [last_layer(model, one) for one in pictures]
    original = functools.cache(lambda: judge(model).right)  # not judged again where all rows are done
    for row in rows:

        def done(row: Row = row) -> dict[str, Any]:
            converted, found = convert(model, row, batches, refinement)
            judged = judge(converted)
            found |= {"top1": judged.top1, "top5": judged.top5, "images_per_second": judged.images_per_second}
            was_right = original()
            if was_right is not None and judged.right is not None:
                found |= {
                    "gained": int((judged.right & ~was_right).sum()), "lost": int((was_right & ~judged.right).sum())
                }  # fmt: skip
            if before:
                after = [last_layer(converted, one) for one in pictures]
                pairs = zip(before, after, strict=True)
                found["moved"] = float(torch.stack([moved(one, other) for one, other in pairs]).mean())
                if row.method in ("paper", "refined"):
                    found["maps"] = [class_map(one) for one in after]
            return found

        results.append(step(f"conversions/{row.name}", done))
    return results


def last_layer(model: nn.Module, pixels: Tensor) -> Tensor:
    """(head, query, key): attention of the last layer for one image (1, 3, size, size)."""
    given: Any = pixels if hasattr(model, "pretrained_cfg") else {"pixel_values": pixels}
    return list(attention_weights(model, given).values())[-1]


def class_map(weights: Tensor) -> list[list[float]]:
    """(row, column): what the first token, the class's, attends to in the patches, mean over heads, largest 1."""
    values = weights.mean(0)[0]
    side = int(len(values) ** 0.5)
    grid = values[len(values) - side**2 :].view(side, side)
    scaled: list[list[float]] = (grid / grid.max().clamp(min=1e-12)).tolist()
    return [[round(value, 3) for value in row] for row in scaled]


def training_views(pixels: Tensor, chunk: int = 128) -> Iterator[Tensor]:
    """Parts of prepared images (image, 3, size, size), of a size that refinement can hold some of them back."""
    size = min(chunk, max(1, -(-len(pixels) // 8)))
    yield from pixels.split(size)


def _now(model: nn.Module) -> float:
    if next(model.parameters()).is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()
