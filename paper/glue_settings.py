"""What runs of the GLUE recipe were told, in one line a model, with what the paper did where that is something else."""

from collections.abc import Mapping
from typing import Any

from glue_records import TASKS, Key, Result

from collab.recipes.glue import Config
from collab.recipes.glue_data import task_named

ALWAYS = {
    "epochs": "epochs", "learning_rate": "learning rate", "batch_size": "batches of",
    "calibration_examples": "training examples to calibrate with",
}  # fmt: skip
IF_OTHER = {
    "max_train": "first training examples alone", "max_dev": "first development examples alone",
    "warmup_share": "share of warm-up", "weight_decay": "weight decay", "max_grad_norm": "gradient norm",
    "adam_eps": "Adam's epsilon", "max_length": "tokens at most", "refine_steps": "steps of refinement",
    "refine_batch_size": "examples of each",
    "max_iterations": "sweeps at most", "tolerance": "tolerance", "precision": "precision",
}  # fmt: skip
"""Setting -> what to call it: told in any case, and where it is not as it would be unless given."""

OURS = ("calibration_examples", "refine_steps", "refine_batch_size", "precision")
"""Settings of which the paper says nothing."""


def settings_of(results: Mapping[Key, Mapping[str, Result]], model: str) -> str:
    """A paragraph; nothing where records do not tell."""
    found: dict[str, dict[tuple[Any, Any], list[str]]] = {}
    for key, tasks in results.items():
        for task, result in tasks.items() if key[0] == model else ():
            for config in filter(None, result.settings):
                for name in (*ALWAYS, *IF_OTHER):
                    both = _value(config, name, task), _value({}, name, task)
                    of_tasks = found.setdefault(name, {}).setdefault(both, [])
                    if task not in of_tasks:
                        of_tasks.append(task)
    told = [_told(name, values) for name, values in found.items()]
    line = "; ".join(filter(None, told))
    return f"\n*Settings: {line}.*\n" if line else ""


def _value(config: Mapping[str, Any], name: str, task: str) -> Any:
    value = config.get(name, getattr(Config(), name))
    return task_named(task).epochs if name == "epochs" and value is None else value


def _told(name: str, values: Mapping[tuple[Any, Any], list[str]]) -> str:
    """One setting: its values, each with its tasks unless it is that of all, and the paper's."""
    parts = []
    for (value, usual), tasks in sorted(values.items(), key=lambda item: min(map(_place, item[1]))):
        if value == usual and name in IF_OTHER:
            continue
        remarks = [] if len(values) == 1 else [", ".join(sorted(tasks, key=_place))]
        remarks += [] if value == usual or name in OURS else [f"in the paper {_shown(usual)}"]
        parts.append(_shown(value) + (f" ({'; '.join(remarks)})" if remarks else ""))
    return f"{(ALWAYS | IF_OTHER)[name]} {', '.join(parts)}" if parts else ""


def _place(task: str) -> int:
    return list(TASKS).index(task)


def _shown(value: Any) -> str:
    if value is None:
        return "all"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)
