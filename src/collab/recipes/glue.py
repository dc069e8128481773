"""GLUE, as in the paper's section 4.4: fine-tune a model, make its attention collaborative, fine-tune again.

One run is one model on one task, for several seeds, methods and sizes, and reports the score after each of the three
stages. Data comes from the hub, or from a folder or tar archive of GLUE's files (--data).
"""

import shutil
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

import collab
from collab.ops import IMPLEMENTATIONS
from collab.recipes import processes
from collab.recipes.batches import length_sorted_batches, shuffled_batches
from collab.recipes.fitting_loop import FitResult, fit
from collab.recipes.glue_conversion import EXACT, METHODS, Converter, key_dim_of
from collab.recipes.glue_data import Task, read_examples, task_named
from collab.recipes.glue_metrics import scores
from collab.recipes.glue_models import Encoded, open_with_head, predict, source_of
from collab.recipes.progress import loop_shown
from collab.recipes.settings import FitSettings, RecipeConfig, check_at_least, check_choice
from collab.recipes.work import Work

ORIGINAL = "original"
STAGES = FINE_TUNED, CONVERTED, AGAIN = ("fine-tuned", "converted", "fine-tuned again")

EXAMPLES = [
    "collab train glue --config paper/configs/glue/bert-base-cased-mrpc.yaml --out runs/bert-mrpc",
    "collab train glue --task MRPC --model minilm --data glue.tar.xz --sizes 192,128 --out runs/minilm-mrpc",
    "collab train glue --task RTE --model ./my-bert --methods refined --sizes 0.5 --seeds 0 --out runs/my-rte",
]


def _set(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class Config(RecipeConfig):
    """Settings; what is not given is as in the paper."""

    task: str = _set("MRPC", "CoLA, SST-2, MRPC, STS-B, QQP, MNLI, QNLI or RTE")
    model: str = _set("bert-base-cased", "a directory, a name on the hub, minilm, or minilm-distilbert")
    data: str = _set("hub", "hub, or a folder or tar archive of GLUE's files")
    methods: tuple[str, ...] = _set(("paper", "refined"), f"how to convert: {', '.join(METHODS)}")
    sizes: tuple[int | float, ...] = _set((0.5, 0.25), "shared sizes: integers, or shares of heads x head size")
    seeds: tuple[int, ...] = _set((0, 1, 2), "one training each; the median is reported; seed is added to each")
    again: bool = _set(True, "fine-tune again after the conversion")
    epochs: float | None = _set(None, "of each fine-tuning; as in the paper if not given: 3, of SST-2 and RTE 10")
    batch_size: int = _set(32, "examples of a step")
    learning_rate: float = _set(2e-5, "at the start; it falls linearly to 0")
    warmup_share: float = _set(0.0, "share of the steps in which the learning rate rises")
    adam_eps: float = _set(1e-8, "Adam's epsilon")
    weight_decay: float = _set(0.0, "of weight matrices")
    max_grad_norm: float = _set(1.0, "gradients are scaled down to this norm")
    max_length: int = _set(128, "tokens to cut an example to")
    sort_lengths: bool = _set(True, "batches of examples of like length, for little padding")
    accumulate: int = _set(1, "parts a step is computed in, to save memory")
    calibration_examples: int = _set(1024, "training examples, without labels, that conversions are calibrated with")
    refine_steps: int | None = _set(None, "steps of the joint fit of refined; as collab convert chooses if not given")
    refine_batch_size: int = _set(16, "examples of a step of that fit, and of a batch of calibration")
    max_iterations: int = _set(100, "limit on the sweeps of a decomposition")
    tolerance: float = _set(1e-6, "a decomposition stops when a sweep gains less")
    implementation: str = _set("auto", "of shared attention; sdpa spares short trainings on CUDA compiling kernels")
    max_train: int | None = _set(None, "use the first training examples only, to try things out")
    max_dev: int | None = _set(None, "use the first development examples only")
    log_every: int = _set(50, "steps between two lines of the log")
    checkpoint_every: int | None = _set(2000, "steps between checkpoints of a fine-tuning; none: no checkpoints")
    fsdp: bool = _set(False, "shard models over the processes too, not only the batches")
    keep_models: bool = _set(False, "keep all models, not only their scores")

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "task", task_named(self.task).name)
        for method in self.methods:
            check_choice("methods", method, METHODS)
        for size in self.sizes:
            if not (isinstance(size, int) and size >= 1) and not 0 < size <= 1:
                raise ValueError(f"sizes must be integers >= 1 or shares in (0, 1], got {size!r}")
        check_choice("implementation", self.implementation, ("auto", *IMPLEMENTATIONS))
        for name in ("sizes", "seeds", "methods"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise ValueError(f"{name} must be given, and each once, got {values!r}")
        check_at_least(self, 1, "batch_size", "max_length", "accumulate", "calibration_examples", "log_every")
        check_at_least(self, 1, "max_train", "max_dev", "checkpoint_every", "refine_batch_size")
        self.fit_settings(0)

    def fit_settings(self, seed: int) -> FitSettings:
        """How each fine-tuning goes."""
        return FitSettings(
            batch_size=self.batch_size, epochs=task_named(self.task).epochs if self.epochs is None else self.epochs,
            learning_rate=self.learning_rate, warmup_share=self.warmup_share, adam_eps=self.adam_eps,
            weight_decay=self.weight_decay, max_grad_norm=self.max_grad_norm, accumulate=self.accumulate,
            log_every=self.log_every, checkpoint_every=self.checkpoint_every, seed=self.seed + seed,
            precision=self.precision, device=self.device, fsdp=self.fsdp,
        )  # fmt: skip


def run(config: Config, work: Work) -> dict[str, Any]:
    """Every seed, and of each every method and size.

    Returns:
        `rows`: flat mappings, one for each task, model, method, size, seed and stage, with the number of parameters and
        every metric as a share of 1; `medians`: the same over the seeds.
    """
    data = _Data(config)
    found: dict[str, Any] = {"train_examples": len(data.train), "rows": []}
    with collab.use_implementation(config.implementation):
        for seed in config.seeds:
            for row in _Seed(config, work, data, seed).rows():
                found["rows"].append(row)
                work.so_far(found)
    return {**found, "medians": medians(found["rows"], data.task)}


def medians(rows: Iterable[dict[str, Any]], task: Task) -> list[dict[str, Any]]:
    """For each method, size and stage the median of every metric over the seeds."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["method"], row["size"], row["stage"]), []).append(row)
    found = []
    for same in groups.values():
        names = [name for name in same[0] if name == "score" or name.partition("_")[0] in task.metrics]
        about = {name: same[0][name] for name in ("task", "model", "method", "size", "stage", "parameters")}
        middle = {name: statistics.median(row[name] for row in same) for name in names}
        found.append({**about, "seeds": len(same), **middle})
    return found


class _Data:
    """A task's examples, read once, and tokenised once for every class of model."""

    def __init__(self, config: Config) -> None:
        self.config, self.task = config, task_named(config.task)
        self.source = source_of(config.model)
        self.train = read_examples(self.task, config.data, "train").first(config.max_train)
        self.dev = {
            split: read_examples(self.task, config.data, split).first(config.max_dev) for split in self.task.dev_splits
        }
        self.encoded: dict[str, Encoded] = {}

    def for_(self, model: nn.Module, split: str) -> Encoded:
        """A split as the model reads it."""
        if split not in self.encoded:
            examples = self.train if split == "train" else self.dev[split]
            is_class = bool(self.task.labels)
            self.encoded[split] = Encoded(model, self.source, examples, self.config.max_length, is_class)
        return self.encoded[split]


class _Seed:
    """All there is to do for one seed. Every stage is a step of the run, so that none is done twice."""

    def __init__(self, config: Config, work: Work, data: _Data, seed: int) -> None:
        self.config, self.work, self.data, self.seed = config, work, data, seed
        self.device = processes.device_named(config.device)
        self.converter: Converter | None = None
        self.converted: nn.Module | None = None

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows of this seed, each when it is known; the full size comes first, and once for all methods."""
        first = f"seed-{self.seed}/fine-tune"
        done = self.work.step(first, lambda: self._fine_tune(first))
        yield self._row(ORIGINAL, None, FINE_TUNED, done)
        sizes = self.config.sizes
        full = [size for size in sizes if size == (done["key_dim"] if isinstance(size, int) else 1)]
        for size in full:
            yield from self._convert_and_train(first, EXACT, size)
        for method in self.config.methods:
            for size in (size for size in sizes if size not in full):
                yield from self._convert_and_train(first, method, size)
        if not self.config.keep_models:
            self._forget(first)

    def _convert_and_train(self, first: str, method: str, size: int | float) -> Iterator[dict[str, Any]]:
        name = f"seed-{self.seed}/{method}-{size}"
        convert, again = f"{name}/convert", f"{name}/fine-tune"
        self.converted = None
        done = self.work.step(convert, lambda: self._convert(first, convert, method, size))
        yield self._row(method, size, CONVERTED, done)
        if self.config.again:
            trained = self.work.step(again, lambda: self._fine_tune(again, convert))
            yield self._row(method, size, AGAIN, trained)
        if not self.config.keep_models:
            self._forget(convert)
            self._forget(again)

    def _row(self, method: str, size: int | float | None, stage: str, result: dict[str, Any]) -> dict[str, Any]:
        config = self.config
        about = {"task": config.task, "model": config.model, "method": method, "size": size}
        return {**about, "seed": config.seed + self.seed, "stage": stage, **result}

    def _fine_tune(self, step: str, convert: str | None = None) -> dict[str, Any]:
        """Train the original, or what a conversion left."""
        config, folder = self.config, self.work.folder_of(step)
        if convert is None:
            model = open_with_head(config.model, self.data.task, config.seed + self.seed)
            key_dim = key_dim_of(model, config.sizes)
        else:
            model = self._open(convert) if self.converted is None else self.converted
        encoded, settings = self.data.for_(model, "train"), config.fit_settings(self.seed)
        if config.sort_lengths:
            batches = length_sorted_batches(encoded.lengths, config.batch_size, settings.seed)
        else:
            batches = shuffled_batches(len(encoded), config.batch_size, settings.seed)
        self.work.say(f"{len(encoded):,} examples, {_shape(model)}")
        done = fit(
            model, encoded, settings, folder, collate=encoded.batch, batches=batches, progress=self.work.progress
        )
        result = {**self._scores(model), **_training(done)}
        if convert is None or config.keep_models:
            self._save(model, step)
        if convert is None:
            self.converter = Converter(config, self.seed, model, encoded)
            result["key_dim"] = key_dim
        return result

    def _convert(self, first: str, step: str, method: str, size: int | float) -> dict[str, Any]:
        """Make the fine-tuned model smaller, without training it."""
        if self.converter is None:
            original = self._open(first)
            self.converter = Converter(self.config, self.seed, original, self.data.for_(original, "train"))
        shown = loop_shown(step, self.work.progress)
        self.converted, result = self.converter.convert(method, size, shown)
        self._save(self.converted, step)
        return {**self._scores(self.converted), **result}

    def _scores(self, model: nn.Module) -> dict[str, Any]:
        """Parameters, every metric of the task, and their mean."""
        task, found = self.data.task, {}
        for split in task.dev_splits:
            encoded = self.data.for_(model, split)
            ending = split.removeprefix("dev")
            for name, value in scores(task.metrics, predict(model, encoded, self.device), encoded.labels).items():
                found[f"{name}{ending}"] = value
        count = sum(parameter.numel() for parameter in model.parameters())
        return {"parameters": count, **found, "score": statistics.fmean(found.values())}

    # Models on disk.

    def _save(self, model: Any, step: str) -> None:
        if processes.is_main():
            folder = self.work.folder_of(step) / "model"
            partial = folder.with_name("model-partial")
            shutil.rmtree(partial, ignore_errors=True)
            model.save_pretrained(partial)
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
        processes.agree(None)

    def _open(self, step: str) -> nn.Module:
        from collab.sources import open_model

        folder: Path = self.work.folder_of(step) / "model"
        return open_model(str(folder), device=self.device).float()

    def _forget(self, step: str) -> None:
        if processes.is_main():
            shutil.rmtree(self.work.folder_of(step) / "model", ignore_errors=True)


def _training(done: FitResult) -> dict[str, Any]:
    """What a training says of itself, for a record."""
    loss = done.losses[-1][1] if done.losses else None
    measured = {"seconds": done.seconds, "steps": done.steps, "loss": loss, "waiting": done.waiting}
    return {**measured, "examples_per_second": done.examples_per_second, "peak_memory": done.peak_memory}


def _shape(model: nn.Module) -> str:
    sites = collab.find_attention(model)
    return f"{type(model).__name__} with {len(sites)} attention layer{'s' * (len(sites) != 1)}"
