"""transformers' Trainer, made to take batches, losses and random numbers from `fit`, and to leave whole checkpoints."""

import contextlib
import itertools
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainingArguments

from collab.recipes import processes, sharding
from collab.recipes.batches import COUNTED, Batch, Parts, Schedule, seed_from
from collab.recipes.progress import ProgressLine
from collab.recipes.settings import FitSettings
from collab.recipes.work import CHECKPOINTS, write_json, write_text

WHOLE = "whole.json"
"""Written last into a checkpoint: without it, the checkpoint was cut short and does not count."""

WEIGHTS, OPTIMIZER, SCHEDULE = "weights.pt", "optimizer.pt", "scheduler.pt"


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint of a training."""
    whole = [path.parent for path in (folder / CHECKPOINTS).glob(f"checkpoint-*/{WHOLE}")]
    return max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def arguments_for(settings: FitSettings, folder: Path, total: int, device: torch.device) -> TrainingArguments:
    """Trainer's arguments. To it, the training is a single epoch, whose batches `Schedule` gives."""
    precision = settings.precision
    if precision == "auto":
        has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        precision = "bf16" if has_bf16 else "fp32"
    arguments = TrainingArguments(
        output_dir=str(folder / CHECKPOINTS),
        use_cpu=device.type == "cpu",
        max_steps=total,
        learning_rate=settings.learning_rate,
        max_grad_norm=settings.max_grad_norm,
        gradient_accumulation_steps=settings.accumulate,
        per_device_train_batch_size=1,
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        logging_steps=settings.log_every,
        logging_nan_inf_filter=False,  # it would wait for the device at every step
        save_strategy="no" if settings.checkpoint_every is None else "steps",
        save_steps=settings.checkpoint_every or total,
        ignore_data_skip=True,
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
        report_to=[],
        seed=settings.seed % 2**32,
    )
    if arguments.n_gpu > 1:  # one process, one device: several are for torchrun
        arguments._n_gpu = 1
    return arguments


class StepTrainer(Trainer):
    """Trainer whose steps are those of `fit`."""

    def __init__(
        self,
        model: nn.Module,
        parts: Parts,
        schedule: Schedule,
        settings: FitSettings,
        arguments: TrainingArguments,
        folder: Path,
        *,
        on_device: Callable[[Batch], Batch] | None,
        loss: Callable[[nn.Module, Batch, Any], Tensor] | None,
        parameter_groups: Callable[[nn.Module], list[dict[str, Any]]] | None,
        after_step: Callable[[int, nn.Module], object] | None,
        progress: bool,
    ) -> None:
        super().__init__(model, arguments, train_dataset=parts)
        self.parts, self.schedule, self.settings, self.folder = parts, schedule, settings, folder
        self.on_device, self.own_loss, self.groups = on_device, loss, parameter_groups
        self.target: Any = model
        self.seconds = self.waited = 0.0
        self.examples = self.micro = 0
        self.resumed: float | None = None
        self.was_stopped = False
        if settings.fsdp:
            sharding.leave_whole(self.accelerator)
        self.remove_callback(PrinterCallback)
        self.remove_callback(ProgressCallback)
        self.add_callback(_Steps(self, after_step, progress))

    # Data.

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Every part of this process, as batches; nothing is left for accelerate to share out."""
        workers = self.settings.workers
        return DataLoader(
            self.parts, batch_size=None, sampler=self.schedule, num_workers=workers,
            prefetch_factor=4 if workers else None, pin_memory=self.args.device.type == "cuda",
        )  # fmt: skip

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """The parts of one step, and how many items count in it, over all processes."""
        start = time.perf_counter()
        parts = list(itertools.islice(epoch_iterator, num_batches))
        items: Any = sum(part[COUNTED][0] for part in parts)
        self.waited += time.perf_counter() - start
        if processes.count() > 1:
            items = torch.tensor(float(items), device=self.args.device)
            distributed.all_reduce(items)
        self.micro = 0
        return parts, items

    # Steps.

    def training_step(self, model: nn.Module, inputs: Batch, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of one part. The loss is multiplied by the processes, whose mean is taken."""
        model.train()
        torch.manual_seed(seed_from(self.settings.seed, "step", self.state.global_step, self.micro, processes.rank()))
        self.micro += 1
        counted, examples = inputs.pop(COUNTED)
        batch = {
            name: value.to(self.args.device, non_blocking=True) if isinstance(value, Tensor) else value
            for name, value in inputs.items()
        }
        self.examples += examples
        with self.compute_loss_context_manager():
            batch = batch if self.on_device is None else self.on_device(batch)
            loss: Tensor = self._loss(model, batch, counted, num_items_in_batch) * processes.count()
        self.accelerator.backward(loss)
        return loss.detach()

    def _loss(self, model: nn.Module, batch: Batch, counted: int, items: Any) -> Tensor:
        if self.own_loss is not None:
            loss = self.own_loss(model, batch, items)
            return loss if counted else loss * 0
        outputs = model(**batch)
        if not counted:  # the mean over nothing is not a number
            nothing: Tensor = outputs["logits"].sum() * 0.0
            return nothing
        found: Tensor = outputs["loss"] * (counted / items)
        return found

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted: it would look at every parameter at every step."""
        return 0

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """AdamW over the groups asked for; fused on CUDA."""
        if self.optimizer is None:
            settings = self.settings
            groups = (self.groups or decaying_groups)(self.target)
            self.optimizer = torch.optim.AdamW(
                groups, lr=settings.learning_rate, betas=settings.adam_betas, eps=settings.adam_eps,
                weight_decay=settings.weight_decay, fused=self.args.device.type == "cuda" and not settings.fsdp,
            )  # fmt: skip
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The learning rate of every step."""
        if self.lr_scheduler is None:
            settings = self.settings
            chosen: Any = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                chosen, lambda step: settings.rate_at(step, num_training_steps)
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    # Checkpoints.

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint, say that it is whole, and only then delete older ones."""
        start = time.perf_counter()
        super()._save_checkpoint(model, trial)
        processes.agree(None)
        if processes.is_main():
            folder = Path(str(self.args.output_dir))
            state = {"seconds": self.elapsed(start), "waited": self.waited, "examples": self.examples}
            write_json(folder / f"checkpoint-{self.state.global_step}" / WHOLE, state)
            found = [path.parent for path in folder.glob(f"checkpoint-*/{WHOLE}")]
            found.sort(key=lambda path: int(path.name.rpartition("-")[2]))
            for old in found[: -self.settings.keep_checkpoints]:
                (old / WHOLE).unlink(missing_ok=True)
                shutil.rmtree(old, ignore_errors=True)
        processes.agree(None)
        if self.resumed is not None:  # what a checkpoint takes is not training
            self.resumed += time.perf_counter() - start

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the weights alone, whole."""
        state = sharding.whole_state(self.target) if self.settings.fsdp else self.target.state_dict()
        if processes.is_main():
            folder = Path(output_dir or str(self.args.output_dir))
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(state, folder / WEIGHTS)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.settings.fsdp:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        state = sharding.whole_optimizer_state(self.target, self.inner_optimizer)
        if processes.is_main():
            torch.save(state, Path(output_dir) / OPTIMIZER)
            torch.save(self.schedule_of_rates.state_dict(), Path(output_dir) / SCHEDULE)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        state = torch.load(Path(resume_from_checkpoint) / WEIGHTS, map_location="cpu", weights_only=True)
        if self.settings.fsdp:
            sharding.load_whole_(self.target, state)
        else:
            self.target.load_state_dict(state)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not self.settings.fsdp:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        state = torch.load(Path(checkpoint) / OPTIMIZER, map_location="cpu", weights_only=True)
        sharding.load_whole_optimizer_(self.target, self.inner_optimizer, state)
        self.schedule_of_rates.load_state_dict(torch.load(Path(checkpoint) / SCHEDULE, weights_only=True))

    @property
    def schedule_of_rates(self) -> Any:
        """What sets the learning rate."""
        return self.lr_scheduler

    @property
    def inner_optimizer(self) -> torch.optim.Optimizer:
        """The optimiser itself, without accelerate's wrapper."""
        found: Any = self.optimizer
        while not isinstance(found, torch.optim.Optimizer) or hasattr(found, "optimizer"):
            found = found.optimizer
        return found

    # Time.

    def elapsed(self, now: float) -> float:
        """Seconds of training until `now`, of the runs before too."""
        return self.seconds + (0.0 if self.resumed is None else now - self.resumed)

    def measured(self) -> dict[str, Any]:
        """What `FitResult` says beside the losses, once training has ended."""
        if self.state.global_step != self.state.max_steps and not self.was_stopped:
            raise RuntimeError(f"training must end at step {self.state.max_steps}, got {self.state.global_step}")
        on_cuda = self.args.device.type == "cuda"
        return {
            "steps": self.state.global_step,
            "seconds": self.seconds,
            "waiting": self.waited / max(self.seconds, 1e-9),
            "peak_memory": torch.cuda.max_memory_allocated(self.args.device) if on_cuda else None,
            "examples_per_second": self.examples * processes.count() / max(self.seconds, 1e-9),
        }


def decaying_groups(model: nn.Module) -> list[dict[str, Any]]:
    """All parameters that are trained, in two groups: matrices, and the rest (biases, norms), which does not decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in trained if parameter.dim() > 1]},
        {"params": [parameter for parameter in trained if parameter.dim() <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class _Steps(TrainerCallback):
    """What happens beside the steps: logs, progress, time, what the caller asked for."""

    def __init__(self, trainer: StepTrainer, after_step: Any, progress: bool) -> None:
        self.trainer, self.after_step = trainer, after_step
        self.line = ProgressLine(trainer.folder.name, progress)
        self.board: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        if state.global_step:
            path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / WHOLE
            kept = json.loads(path.read_text(encoding="utf-8"))
            trainer.seconds, trainer.waited, trainer.examples = kept["seconds"], kept["waited"], kept["examples"]
        if processes.is_main():
            trainer.folder.mkdir(parents=True, exist_ok=True)
            _forget_after(trainer.folder / "losses.jsonl", state.global_step)
            self.board = _open_board(trainer.folder / "logs", state.global_step)
            if self.board is None:
                self.line.say("tensorboard is not installed: losses are in losses.jsonl alone")
        if args.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(args.device)
        self.line.start(state.global_step, state.max_steps)
        trainer.resumed = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.after_step is not None and self.after_step(state.global_step, self.trainer.model):
            self.trainer.was_stopped = control.should_training_stop = True
        if state.global_step >= state.max_steps or self.trainer.was_stopped:
            control.should_log = True
            # Trainer would save once more at the end, when whoever trained keeps the model.
            every = self.trainer.settings.checkpoint_every
            control.should_save = every is not None and state.global_step % every == 0
        self.line.step(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not logs or "loss" not in logs:
            return
        loss = float(logs["loss"])
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss must stay finite, got {loss} at step {state.global_step}")
        self.line.loss = loss
        if not processes.is_main():
            return
        row = {"step": state.global_step, "loss": loss, "learning_rate": float(logs["learning_rate"])}
        row["seconds"] = round(self.trainer.elapsed(time.perf_counter()), 3)
        with (self.trainer.folder / "losses.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if self.board is not None:
            for name in ("loss", "learning_rate"):
                self.board.add_scalar(name, row[name], state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.device.type == "cuda":
            torch.cuda.synchronize(args.device)
        trainer = self.trainer
        trainer.seconds, trainer.resumed = trainer.elapsed(time.perf_counter()), None
        self.line.end()
        if self.board is not None:
            self.board.close()


def _forget_after(path: Path, step: int) -> None:
    """Of a log, keep what was written before a checkpoint: what followed it is done again."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):  # the last line may have been cut short
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
    write_text(path, "".join(kept))


def _open_board(folder: Path, step: int) -> Any:
    """A writer for TensorBoard, where that is installed; losses are in losses.jsonl in any case."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=step + 1)
