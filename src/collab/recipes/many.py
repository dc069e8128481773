"""Many trainings side by side: small ones leave most of a GPU idle, so several share it, each in its own process."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from collab.recipes import RECORD_NAME, read_record, recipe_named
from collab.recipes.settings import read_config

WAITING, RUNNING, DONE, FAILED = "waiting", "running", "done", "failed"
_PROGRAM = "from collab.cli import main; main()"
_LOOK = 0.2
"""Seconds between two looks at the processes."""


@dataclass
class Run:
    """One training: its config file, where it goes, and how it stands."""

    name: str
    recipe: str
    config: Path
    folder: Path
    state: str = WAITING
    attempts: int = 0
    seconds: float = 0.0
    process: "subprocess.Popen[bytes] | None" = field(default=None, repr=False)
    started: float = 0.0
    device: str | None = None

    @property
    def log(self) -> Path:
        """What it prints."""
        return self.folder.with_name(f"{self.folder.name}.log")

    def last_line(self) -> str:
        """The last thing it printed."""
        with contextlib.suppress(OSError):
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - 4096))
                lines = file.read().decode("utf-8", "replace").replace("\r", "\n").split("\n")
            return next((line.strip() for line in reversed(lines) if line.strip()), "")
        return ""


def plan_runs(configs: Sequence[Path], settings: Mapping[str, str], out: Path) -> list[Run]:
    """A run for each config file, whose folder is named as the recipe; bad settings are refused before any starts.

    A file of the recipe `glue` named `x.yaml` is run in `out`/glue/x. What has its record already counts as done.
    """
    runs: list[Run] = []
    for path in configs:
        recipe, folder = path.resolve().parent.name, out / path.resolve().parent.name / path.stem
        config = read_config(recipe_named(recipe).Config, path, settings)
        run = Run(f"{recipe}/{path.stem}", recipe, path, folder)
        if any(run.name == other.name for other in runs):
            raise ValueError(f"configs must have names of their own, got {run.name} twice")
        if (folder / RECORD_NAME).is_file():
            kept = read_record(folder)["config"]
            if kept != config.to_dict():
                raise ValueError(f"{folder} holds a run with other settings than {path}: name another folder")
            run.state = DONE
        runs.append(run)
    return runs


def run_many(
    runs: Sequence[Run],
    settings: Mapping[str, str],
    *,
    jobs: int,
    retries: int = 1,
    devices: Sequence[str] = (),
    changed: Callable[[Sequence[Run], Run | None], None] = lambda runs, run: None,
) -> bool:
    """Run what is not done, at most `jobs` at a time; one that fails is started again, and goes on where it was.

    Args:
        runs: from `plan_runs`; their states change.
        settings: for all of them, over their files.
        jobs: how many at a time.
        retries: how often one may be started again.
        devices: numbers of CUDA devices to spread them over, one for each run; all see all if not given.
        changed: called with all runs and the one whose state changed, and now and then with None.

    Returns:
        Whether all are done.
    """
    threads = max(1, (os.cpu_count() or 1) // jobs)
    try:
        while any(run.state in (WAITING, RUNNING) for run in runs):
            running = [run for run in runs if run.state == RUNNING]
            for run in running:
                if _has_ended(run, retries):
                    changed(runs, run)
            free = jobs - sum(run.state == RUNNING for run in runs)
            for run in [run for run in runs if run.state == WAITING][:free]:
                busy = [other.device for other in runs if other.state == RUNNING]
                run.device = min(devices, key=busy.count) if devices else None
                _start(run, settings, threads)
                changed(runs, run)
            changed(runs, None)
            time.sleep(_LOOK)
    finally:
        for run in runs:
            if run.process is not None and run.process.poll() is None:
                run.process.terminate()
                run.process.wait()
                run.state = WAITING
    return all(run.state == DONE for run in runs)


def _start(run: Run, settings: Mapping[str, str], threads: int) -> None:
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    environment: dict[str, str] = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true", **os.environ}
    if run.device is not None:
        environment["CUDA_VISIBLE_DEVICES"] = run.device
    pairs = [f"{key}={value}" for key, value in settings.items()]
    command = [sys.executable, "-c", _PROGRAM, "train", run.recipe]
    command += ["--config", str(run.config), "--out", str(run.folder), *pairs]
    with run.log.open("ab") as log:
        run.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    run.state, run.attempts, run.started = RUNNING, run.attempts + 1, time.monotonic()


def _has_ended(run: Run, retries: int) -> bool:
    assert run.process is not None
    code = run.process.poll()
    if code is None:
        return False
    run.seconds += time.monotonic() - run.started
    is_done = code == 0 and (run.folder / RECORD_NAME).is_file()
    wrong_input = code == 2  # which trying again does not change
    run.state = DONE if is_done else WAITING if run.attempts <= retries and not wrong_input else FAILED
    return True


def records_of(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The records of those that are done."""
    return [read_record(run.folder) for run in runs if run.state == DONE]
