"""Training recipes: each is one readable file with a `Config` and `run(config, work)`; `train` runs any of them."""

import importlib
import importlib.util
import json
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from collab.recipes import processes
from collab.recipes.settings import RecipeConfig
from collab.recipes.work import Work, write_json, write_text
from collab.records import RunRecord, provenance

RECIPES = {
    "glue": "collab.recipes.glue",
    "mlm": "collab.recipes.mlm",
    "translation": "collab.recipes.translation",
    "vision": "collab.recipes.vision",
}
"""Recipe -> its module."""

CONFIG_NAME, RECORD_NAME, UNFINISHED_NAME = "config.yaml", "record.json", "unfinished.json"


def available() -> list[str]:
    """The recipes that are installed."""
    return [name for name, module in RECIPES.items() if importlib.util.find_spec(module) is not None]


def recipe_named(name: str) -> ModuleType:
    """A recipe's module."""
    if name not in available():
        raise ValueError(f"recipe must be one of {', '.join(available())}, got {name!r}")
    return importlib.import_module(RECIPES[name])


def recipe_of(config: RecipeConfig) -> str:
    """The name of the recipe that a config belongs to."""
    names = {module: name for name, module in RECIPES.items()}
    module = type(config).__module__
    if module not in names:
        raise ValueError(f"config must be the Config of a recipe ({', '.join(RECIPES)}), got {type(config)!r}")
    return names[module]


def train(config: RecipeConfig, folder: Path | str, *, progress: bool = True) -> RunRecord:
    """Run a recipe in a folder of its own; a run that was stopped goes on, one that is done is only read.

    Args:
        config: a recipe's `Config`.
        folder: where everything of the run is kept: config.yaml, the steps, record.json.
        progress: show on the standard error how it goes.

    Returns:
        The record: settings, metrics and where they came from. It is also in record.json. `seconds` among the metrics
        are those since the run was last started.

    Raises:
        ValueError: the folder holds a run with other settings; they are named.
    """
    name, folder = recipe_of(config), Path(folder)
    device = processes.device_named(config.device)
    processes.start(device)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    work = Work(folder, progress)
    if processes.is_main():
        _claim(folder, name, config)
    done = processes.agree(read_record(folder) if processes.is_main() else None)
    if done is not None:
        work.say("done before")
        return RunRecord.from_dict(done)
    start, origin = time.perf_counter(), provenance(config.seed, device)

    def keep(file: str, metrics: dict[str, Any]) -> RunRecord:
        metrics = {**metrics, "seconds": time.perf_counter() - start, "processes": processes.count()}
        record = RunRecord(name=name, config=config.to_dict(), metrics=metrics, provenance=origin)
        if processes.is_main():
            write_json(folder / file, record.to_dict())
        return record

    work.so_far = lambda metrics: keep(UNFINISHED_NAME, {**metrics, "unfinished": True})
    record = keep(RECORD_NAME, importlib.import_module(RECIPES[name]).run(config, work))
    if processes.is_main():
        (folder / UNFINISHED_NAME).unlink(missing_ok=True)
    processes.agree(None)
    return record


def read_record(folder: Path, name: str = RECORD_NAME) -> Any:
    """A run's record as plain values; None if it has none yet."""
    path = folder / name
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _claim(folder: Path, name: str, config: RecipeConfig) -> None:
    """Make the folder this run's, or check that it is."""
    import yaml

    path, values = folder / CONFIG_NAME, {"recipe": name, **config.to_dict()}
    if not path.exists():
        others = [item.name for item in folder.iterdir() if not item.name.startswith(".")]
        if others:
            raise ValueError(f"{folder} must be new, empty or hold a run, got {', '.join(sorted(others)[:5])}")
        write_text(path, yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
        return
    kept = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    keys = list(dict.fromkeys((*values, *kept)))
    other = [f"{key} {kept.get(key)!r}, not {values.get(key)!r}" for key in keys if kept.get(key) != values.get(key)]
    if other:
        raise ValueError(f"{folder} holds a run with other settings: {'; '.join(other)}; name another folder")
