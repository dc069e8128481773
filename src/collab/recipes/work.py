"""The folder of a run: named steps whose results are kept, so that a run that was stopped goes on where it was."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from collab.recipes import processes

CHECKPOINTS = "checkpoints"
"""Folder of a step that is deleted when the step is done: nothing goes on from there any more."""


class Work:
    """A run's folder. Only the main process writes; all processes of a run get the same results.

    Args:
        folder: made if it is not there.
        progress: whether to show how steps go.
    """

    def __init__(self, folder: Path, progress: bool = True) -> None:
        self.folder = Path(folder)
        self.so_far: Callable[[dict[str, Any]], Any] = lambda metrics: None
        """What a recipe may call with the metrics it has, for a run that is stopped not to have been for nothing."""
        self.progress = progress and processes.is_main()
        self.folder.mkdir(parents=True, exist_ok=True)

    def step(self, name: str, function: Callable[[], Any]) -> Any:
        """What `function()` gives, which must be fit for JSON; it is not called again once that has been kept.

        Args:
            name: of the step; `a/b` is step `b` of a group `a`.
            function: called by all processes; the main process's result is the result.
        """
        path = self._path(name, ".json")
        kept = processes.agree(json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None)
        if kept is not None:
            self.say(f"{name}: done before")
            return kept["result"]
        self.say(f"{name} ...")
        result = processes.agree(function())
        if processes.is_main():
            write_json(path, {"result": result})
            shutil.rmtree(self.folder_of(name) / CHECKPOINTS, ignore_errors=True)
        return processes.agree({"result": json.loads(json.dumps(result))})["result"]

    def is_done(self, name: str) -> bool:
        """Whether a step's result has been kept."""
        return bool(processes.agree(self._path(name, ".json").is_file()))

    def folder_of(self, name: str) -> Path:
        """Where a step keeps its files; it exists."""
        folder = self._path(name, "")
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def say(self, text: str) -> None:
        """One line to the standard error, where progress is shown."""
        if self.progress:
            print(f"{self.folder.name}: {text}", file=sys.stderr, flush=True)

    def _path(self, name: str, suffix: str) -> Path:
        parts = name.split("/")
        if not all(part and part not in (".", "..") for part in parts):
            raise ValueError(f"a step's name must be like a or a/b, got {name!r}")
        return self.folder.joinpath("steps", *parts[:-1], parts[-1] + suffix)


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Write JSON whole or not at all."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")
