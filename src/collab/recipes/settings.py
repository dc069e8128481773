"""Settings of recipes and of their training loops: frozen, plain values, read from YAML and from the command line."""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

SCHEDULES = ("linear", "cosine", "inverse_sqrt", "constant")
PRECISIONS = ("auto", "fp32", "tf32", "bf16", "fp16")
DEVICES = ("auto", "cpu", "cuda")

ConfigT = TypeVar("ConfigT")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse a value that is none of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def check_at_least(settings: object, least: float, *names: str) -> None:
    """Refuse fields that are numbers below `least`; None is left to whoever allows it."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not least <= value < math.inf:
            raise ValueError(f"{name} must be at least {least:g}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    """What every recipe can be told; each adds fields of its own. All values are plain.

    Attributes:
        seed: of all random numbers.
        device: "auto" is CUDA where there is a device; under torchrun each process takes the one of its own.
        precision: what is computed in; "auto" is bf16 on CUDA devices that have it, else fp32. Weights stay float32.
            "tf32" is float32 whose products CUDA computes in tf32, while training alone.
        threads: of one process on a CPU; as torch chooses if not given.
    """

    seed: int = field(default=0, metadata={"help": "seed of all random numbers"})
    device: str = field(default="auto", metadata={"help": "auto, cpu or cuda"})
    precision: str = field(
        default="auto", metadata={"help": "auto, fp32, tf32, bf16 or fp16; auto is bf16 where CUDA has it"}
    )
    threads: int | None = field(default=None, metadata={"help": "threads of one process on a CPU"})

    def __post_init__(self) -> None:
        check_at_least(self, 0, "seed")
        check_at_least(self, 1, "threads")
        check_choice("device", self.device, DEVICES)
        check_choice("precision", self.precision, PRECISIONS)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON and YAML."""
        return {name: _plain(value) for name, value in dataclasses.asdict(self).items()}


@dataclass(frozen=True, kw_only=True)
class FitSettings:
    """How to train: one of `epochs` and `max_steps` says how long, and if both are given the shorter one.

    Attributes:
        batch_size: examples of a step, over all processes and accumulation; not used where batches are given.
        epochs, max_steps: how long.
        learning_rate: at its highest.
        schedule: what it does after the warm-up: "linear" and "cosine" fall to `final_share` of it, "inverse_sqrt"
            falls with the root of the step, "constant" stays.
        warmup_steps, warmup_share: steps in which it rises from 0, or the share of all steps; the larger one counts.
        final_share: of the learning rate, at the end of "linear" and "cosine".
        adam_betas, adam_eps, weight_decay: of AdamW; biases and norms do not decay.
        max_grad_norm: gradients are scaled down to this norm; 0 leaves them.
        accumulate: parts a process computes a step in, to save memory.
        workers: processes that prepare batches; 0 prepares them between steps.
        log_every: steps whose mean loss is one line of the log.
        checkpoint_every: steps between checkpoints; none are made if not given.
        keep_checkpoints: how many of the newest stay.
        seed, precision, device: as in `RecipeConfig`.
        fsdp: shard parameters, gradients and optimiser over the processes (FSDP2), not only the batches.
    """

    batch_size: int = 32
    epochs: float | None = None
    max_steps: int | None = None
    learning_rate: float = 1e-4
    schedule: str = "linear"
    warmup_steps: int = 0
    warmup_share: float = 0.0
    final_share: float = 0.0
    adam_betas: tuple[float, float] = (0.9, 0.999)
    adam_eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    accumulate: int = 1
    workers: int = 0
    log_every: int = 50
    checkpoint_every: int | None = None
    keep_checkpoints: int = 1
    seed: int = 0
    precision: str = "auto"
    device: str = "auto"
    fsdp: bool = False

    def __post_init__(self) -> None:
        if self.epochs is None and self.max_steps is None:
            raise ValueError("epochs or max_steps must be given, got neither")
        check_choice("schedule", self.schedule, SCHEDULES)
        check_choice("precision", self.precision, PRECISIONS)
        check_choice("device", self.device, DEVICES)
        check_at_least(self, 1, "batch_size", "max_steps", "accumulate", "log_every", "checkpoint_every")
        check_at_least(self, 1, "keep_checkpoints")
        check_at_least(self, 0, "epochs", "learning_rate", "warmup_steps", "warmup_share", "final_share", "adam_eps")
        check_at_least(self, 0, "weight_decay", "max_grad_norm", "workers", "seed")

    def rate_at(self, step: int, total: int) -> float:
        """The learning rate of a step, counted from 0, as a share of the highest."""
        warmup = max(self.warmup_steps, round(self.warmup_share * total))
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if self.schedule == "constant":
            return 1.0
        if self.schedule == "inverse_sqrt":
            return math.sqrt((warmup + 1) / (step + 1))
        done = min(1.0, (step - warmup) / max(1, total - warmup))
        left = 1 - done if self.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return self.final_share + (1 - self.final_share) * left


def read_config(config_class: type[ConfigT], file: Path | None, overrides: Mapping[str, Any]) -> ConfigT:
    """A config from a YAML file, if there is one, and values that win over it; text becomes what a field's type asks.

    Raises:
        ValueError: an unknown key, named with the known ones; a value that is not of the field's type, or not allowed.
        FileNotFoundError: there is no such file.
    """
    values: dict[str, Any] = {}
    if file is not None:
        import yaml

        try:
            values = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        except yaml.YAMLError as error:
            raise ValueError(f"{file} must be YAML: {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f"{file} must hold settings as `key: value`, got {type(values).__name__}")
    values = {str(key).replace("-", "_"): value for key, value in {**values, **overrides}.items()}
    hints = typing.get_type_hints(config_class)
    known = [item.name for item in dataclasses.fields(config_class)]  # type: ignore[arg-type]
    unknown = [key for key in values if key not in known]
    if unknown:
        raise ValueError(f"unknown setting {', '.join(unknown)}; known are {', '.join(known)}")
    return config_class(**{key: cast_value(key, value, hints[key]) for key, value in values.items()})


def cast_value(name: str, value: Any, hint: Any) -> Any:
    """A value as its type: "2e-5" is a float where one is asked for, "64,128" a tuple, "none" None."""
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        options = typing.get_args(hint)
        if value is None or (isinstance(value, str) and value.lower() in ("none", "null", "")):
            if type(None) in options:
                return None
            raise ValueError(f"{name} must be given, got {value!r}")
        return _first_that_fits(name, value, [option for option in options if option is not type(None)])
    if origin is tuple:
        parts = [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
        parts = list(parts) if isinstance(parts, list | tuple) else [parts]
        kinds = typing.get_args(hint)
        if kinds[-1] is Ellipsis:
            kinds = (kinds[0],) * len(parts)
        if len(kinds) != len(parts):
            raise ValueError(f"{name} must have {len(kinds)} values, got {value!r}")
        return tuple(cast_value(name, part, kind) for part, kind in zip(parts, kinds, strict=True))
    return _cast_plain(name, value, hint)


def _first_that_fits(name: str, value: Any, options: list[Any]) -> Any:
    if isinstance(value, float) and float in options:  # 1.0 is all of something, where 1 is one of it
        return value
    errors = []
    for option in options:
        try:
            return cast_value(name, value, option)
        except ValueError as error:
            errors.append(error)
    raise errors[-1]


def _cast_plain(name: str, value: Any, kind: Any) -> Any:
    text = value.strip() if isinstance(value, str) else value
    if kind is bool:
        known = {True: True, False: False, "true": True, "false": False, "yes": True, "no": False}
        if isinstance(text, str):
            text = text.lower()
        if isinstance(text, bool | str) and text in known:
            return known[text]
        raise ValueError(f"{name} must be true or false, got {value!r}")
    if kind is str:
        if isinstance(value, dict | list | tuple):
            raise ValueError(f"{name} must be text, got {value!r}")
        return str(value)
    try:
        if isinstance(text, bool):
            raise ValueError
        number = kind(text)
        if kind is int and float(text) != number:
            raise ValueError
    except (TypeError, ValueError):
        wanted = {int: "an integer", float: "a number"}.get(kind, str(kind))
        raise ValueError(f"{name} must be {wanted}, got {value!r}") from None
    return number


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value
