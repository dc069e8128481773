"""fit: train a model on one CPU, one GPU or several, with checkpoints that a killed run goes on from."""

import contextlib
import copy
import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from collab.fitting import quick_products
from collab.recipes import processes
from collab.recipes.batches import Batch, Parts, Schedule, shuffled_batches
from collab.recipes.settings import FitSettings


@dataclass(frozen=True)
class FitResult:
    """What a training did.

    Attributes:
        steps: how many.
        seconds: of training alone, checkpoints not counted, over all the times it was started.
        losses: (step, mean loss of the steps since the one before), from the log.
        waiting: share of the seconds spent waiting for the next batch.
        peak_memory: bytes on the CUDA device; None on a CPU.
        examples_per_second: over all processes.
    """

    steps: int
    seconds: float
    losses: list[tuple[int, float]]
    waiting: float
    peak_memory: int | None
    examples_per_second: float


def total_steps(settings: FitSettings, steps_per_epoch: int) -> int:
    """How many steps the settings mean."""
    limits = [settings.max_steps] if settings.max_steps is not None else []
    if settings.epochs is not None:
        limits.append(max(1, round(settings.epochs * steps_per_epoch)))
    return min(limits)


def fit(
    model: nn.Module,
    data: Any,
    settings: FitSettings,
    folder: Path,
    *,
    collate: Callable[[list[Any]], Batch] | None = None,
    batches: Callable[[int], Sequence[Sequence[int]]] | None = None,
    on_device: Callable[[Batch], Batch] | None = None,
    loss: Callable[[nn.Module, Batch, Any], Tensor] | None = None,
    parameter_groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None,
    after_step: Callable[[int, nn.Module], object] | None = None,
    progress: bool = True,
) -> FitResult:
    """Train a model, in place. The same call runs on a CPU, on a GPU, and under torchrun on several (DDP or FSDP2).

    A run that was killed goes on from its newest whole checkpoint in `folder` and ends with the same weights: the order
    of the examples and all random numbers follow from the seed and the step.

    Args:
        model: what to train; it ends up trained, on the training device, in evaluation mode.
        data: has a length, and an example for each index.
        settings: how.
        folder: of this training alone: checkpoints, logs for TensorBoard, losses.jsonl.
        collate: from a list of examples to a batch, a dict of tensors; torch's own if not given.
        batches: the indices of every batch of an epoch, which must follow from the epoch alone; shuffled if not given.
        on_device: changes a batch once it is on the device.
        loss: (model, batch, num_items) -> the sum of the losses of a batch's items, divided by `num_items`: how many
            labels other than -100, or examples where a batch has no `labels`, all parts of the step have. Parts are
            added up. If not given, the model's own `loss`, which must be a mean over such items.
        parameter_groups: groups for the optimiser, whose own `lr` and `weight_decay` win over the settings.
        after_step: called with the number of steps done and the model; under FSDP2 its parameters are shards. If it
            gives true, training ends there, before its time; all processes must be given the same.
        progress: show on the standard error how it goes.
    """
    from collab.recipes.sharding import shard_, whole_state
    from collab.recipes.training_steps import StepTrainer, arguments_for, newest_checkpoint

    folder = Path(folder)
    device = processes.device_named(settings.device)
    processes.start(device)
    if batches is None:
        batches = shuffled_batches(len(data), settings.batch_size, settings.seed)
    total = total_steps(settings, len(batches(0)))
    checkpoint = processes.agree(newest_checkpoint(folder))
    first = 0 if checkpoint is None else int(checkpoint.name.rpartition("-")[2])
    trained = shard_(copy.deepcopy(model).to(device)) if settings.fsdp else model
    config: Any = getattr(model, "config", None)
    cached = getattr(config, "use_cache", None)
    trainer = StepTrainer(
        trained, Parts(data, collate), Schedule(batches, settings, first, total), settings,
        arguments_for(settings, folder, total, device), folder,
        on_device=on_device, loss=loss, parameter_groups=parameter_groups, after_step=after_step,
        progress=progress and processes.is_main(),
    )  # fmt: skip
    forward = vars(trained).get("forward")
    in_tf32 = settings.precision == "tf32" and device.type == "cuda"
    with quick_products("tf32", device) if in_tf32 else contextlib.nullcontext():
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    _unwrap(trained, forward)
    if settings.fsdp:
        model.load_state_dict(whole_state(trained))
        model.to(device)
    if cached is not None:
        config.use_cache = cached
    model.eval()
    result = FitResult(losses=read_losses(folder), **trainer.measured())
    if device.type == "cuda":  # others may share the device
        del trainer
        gc.collect()
        torch.cuda.empty_cache()
    return result


def _unwrap(model: nn.Module, forward: Any) -> None:
    """Take away the autocast that accelerate puts around `forward`: a copy of the model would go on to run this one."""
    for name in ("forward", "_original_forward"):
        vars(model).pop(name, None)
    if forward is not None:
        vars(model)["forward"] = forward


def read_losses(folder: Path) -> list[tuple[int, float]]:
    """(step, loss) of a training's log."""
    path = folder / "losses.jsonl"
    if not path.is_file():
        return []
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(row["step"], row["loss"]) for row in rows]
