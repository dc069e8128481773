"""How the recipe for GLUE makes a fine-tuned model smaller: shared heads found in several ways, or fewer heads."""

import copy
import statistics
import time
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import collab
from collab.recipes.glue_models import Encoded
from collab.running import Progress

METHODS = ("paper", "unshared", "shared", "calibrated", "refined", "pruned")
EXACT = "shared"
"""Method of the rows at full size, where all that share give the same model, and there is nothing to prune."""


class Settings(Protocol):
    """What conversions read of the recipe's settings."""

    @property
    def max_iterations(self) -> int:
        """Of a decomposition."""

    @property
    def tolerance(self) -> float:
        """Of a decomposition."""

    @property
    def calibration_examples(self) -> int:
        """Training examples that conversions look at."""

    @property
    def refine_steps(self) -> int | None:
        """Of the joint refinement."""

    @property
    def refine_batch_size(self) -> int:
        """Examples of such a step."""

    @property
    def seed(self) -> int:
        """To which that of a repetition is added."""


def key_dim_of(model: nn.Module, sizes: Iterable[int | float]) -> int:
    """Dimensions of all heads together; what could not be converted is refused before it is trained."""
    sites = collab.find_attention(model)
    found = [site.full_dim for site in sites if not site.why_not]
    if not found:
        reasons = "; ".join(f"{site.path} ({', '.join(site.why_not)})" for site in sites) or "nothing"
        raise collab.NoAttentionFound(f"no attention to swap in {type(model).__name__}; looked at: {reasons}")
    if wrong := [size for size in sizes if size > min(found)]:
        raise ValueError(f"sizes must be at most {min(found)}, heads x head size, got {', '.join(map(str, wrong))}")
    return max(found)


class Converter:
    """Converts copies of one model; what is measured of it serves all conversions.

    Args:
        config: the recipe's.
        seed: which of its seeds.
        original: the fine-tuned model.
        encoded: training examples, of which only pruning sees the labels.
    """

    def __init__(self, config: Settings, seed: int, original: nn.Module, encoded: Encoded) -> None:
        self.config, self.seed = config, config.seed + seed
        self.original, self.encoded = original, encoded
        self.statistics: collab.Calibration | None = None
        self.importance: dict[str, Tensor] | None = None

    def convert(self, method: str, size: int | float, progress: Progress) -> tuple[nn.Module, dict[str, Any]]:
        """A smaller copy, and what there is to say of how it was made."""
        model = copy.deepcopy(self.original)
        start = _now(model)
        convert_ = self._prune_ if method == "pruned" else self._collaborate_
        told = convert_(model, method, size, progress)
        return model, {"seconds": _now(model) - start, **told}

    def _collaborate_(self, model: nn.Module, method: str, size: int | float, progress: Progress) -> dict[str, Any]:
        """Let the heads share dimensions."""
        config = self.config
        settings = collab.CollaborativeConfig(
            shared_dim=size, method=method if method in ("paper", "unshared") else "shared",
            max_iterations=config.max_iterations, tolerance=config.tolerance, seed=self.seed,
        )  # fmt: skip
        given: dict[str, Any] = {}
        if method == "calibrated":
            if self.statistics is None:
                self.statistics = collab.calibrate(self.original, self._inputs(), progress=progress)
            given = {"calibration": self.statistics}
        elif method == "refined":
            refine = collab.Refinement(
                joint_steps=config.refine_steps, batch_size=config.refine_batch_size, seed=self.seed
            )
            given = {"calibration": self._inputs(), "refine": refine}
        report = collab.collaborate_(model, settings, progress=progress, **given)
        told = {"mean_error": statistics.fmean(site.error for site in report.sites if site.error is not None)}
        if report.refinement is not None:
            told |= {"output_error_before": report.refinement.before, "output_error": report.refinement.after}
        return told

    def _prune_(self, model: nn.Module, method: str, size: int | float, progress: Progress) -> dict[str, Any]:
        """Take the least important heads away until attention has no more parameters than shared heads of a size."""
        shared = copy.deepcopy(model)
        collab.collaborate_(shared, collab.CollaborativeConfig(shared_dim=size, weights="fresh"))
        most = collab.attention_parameters(shared)
        if most >= collab.attention_parameters(model):
            return {"heads_removed": 0}
        if self.importance is None:
            self.importance = collab.head_importance(model, self._inputs(labelled=True), progress=progress)
        report = collab.prune_heads_(model, parameters=most, importance=self.importance)
        return {"heads_removed": sum(len(heads) for heads in report.removed.values())}

    def _inputs(self, labelled: bool = False) -> list[dict[str, Tensor]]:
        """Training examples, without their labels unless they are asked for, in batches of like length."""
        encoded = self.encoded
        count = min(self.config.calibration_examples, len(encoded))
        chosen = [index * len(encoded) // count for index in range(count)]
        size = min(self.config.refine_batch_size, -(-count // 8))  # refinement holds some of eight batches back
        return [encoded.batch(batch, labelled) for batch in encoded.by_length(size, chosen)]


def _now(model: nn.Module) -> float:
    """The time when a device has done what it was told."""
    if any(parameter.is_cuda for parameter in model.parameters()):
        torch.cuda.synchronize()
    return time.perf_counter()
