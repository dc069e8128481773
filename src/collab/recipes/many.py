"""Many trainings side by side: small ones leave most of a GPU idle, so several share it, each in its own process."""

import contextlib
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from collab.recipes import RECORD_NAME, UNFINISHED_NAME, read_record, recipe_named
from collab.recipes.settings import RecipeConfig, read_config
from collab.records import RunRecord

WAITING, RUNNING, DONE, FAILED = "waiting", "running", "done", "failed"
_PROGRAM = "from collab.cli import main; main()"
_LOOK = 0.2
"""Seconds between two looks at the processes."""


@dataclass
class Run:
    """One training: its config file, settings over it, where it goes, and how it stands."""

    name: str
    recipe: str
    config: Path
    settings: Mapping[str, str]
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


def plan_runs(
    configs: Sequence[Path],
    settings: Mapping[str, str],
    out: Path,
    *,
    split: str | None = None,
    known: Sequence[RunRecord] = (),
) -> list[Run]:
    """The runs that config files mean, in their order; bad settings are refused before any starts.

    A file of the recipe `glue` named `x.yaml` is run in `out`/glue/x.

    Args:
        configs: the files, each in a folder named as its recipe.
        settings: for all of them, over their files.
        out: where to.
        split: a setting with several values, such as `seeds`: each value becomes a run of its own, in `out`/glue/x-0;
            the first of all configs come before the second of any.
        known: records of runs. One with the same settings, or a record in the folder of the run, means that it is done.
    """
    done = [(record.name, record.config) for record in known if not record.metrics.get("unfinished")]
    found: list[tuple[int, Run]] = []
    for path in configs:
        recipe = path.resolve().parent.name
        whole = read_config(recipe_named(recipe).Config, path, settings)
        for place, (ending, own) in enumerate(_split(whole, settings, split)):
            config = read_config(recipe_named(recipe).Config, path, own).to_dict()
            name = path.stem + ending
            run = Run(f"{recipe}/{name}", recipe, path, own, out / recipe / name)
            if any(run.name == other.name for _, other in found):
                raise ValueError(f"configs must have names of their own, got {run.name} twice")
            kept = read_record(run.folder)
            if kept is not None and kept["config"] != config:
                raise ValueError(f"{run.folder} holds a run with other settings than {path}: name another folder")
            if kept is not None or (recipe, config) in done:
                run.state = DONE
            found.append((place, run))
    return [run for _, run in sorted(found, key=lambda both: both[0])]  # a value of all, then the next


def _split(config: RecipeConfig, settings: Mapping[str, str], split: str | None) -> list[tuple[str, dict[str, str]]]:
    """(What is added to a run's name, its settings) of every run that a config means."""
    if split is None:
        return [("", dict(settings))]
    values = getattr(config, split.replace("-", "_"), None)
    if not isinstance(values, tuple):
        several = [name for name, value in vars(config).items() if isinstance(value, tuple)]
        raise ValueError(f"split must be a setting with several values, one of {', '.join(several)}, got {split!r}")
    return [(f"-{value}", {**settings, split.replace("-", "_"): str(value)}) for value in values]


def run_many(
    runs: Sequence[Run],
    *,
    jobs: int,
    retries: int = 1,
    devices: Sequence[str] = (),
    seconds: float = math.inf,
    changed: Callable[[Sequence[Run], Run | None], None] = lambda runs, run: None,
) -> bool:
    """Run what is not done, at most `jobs` at a time; one that fails is started again, and goes on where it was.

    Args:
        runs: from `plan_runs`; their states change.
        jobs: how many at a time.
        retries: how often one may be started again.
        devices: numbers of CUDA devices to spread them over, one for each run; all see all if not given.
        seconds: after so many, those that run are stopped, and no more are started.
        changed: called with all runs and the one whose state changed, and now and then with None.

    Returns:
        Whether all are done.
    """
    threads, end = max(1, (os.cpu_count() or 1) // jobs), time.monotonic() + seconds
    try:
        while any(run.state in (WAITING, RUNNING) for run in runs) and time.monotonic() < end:
            running = [run for run in runs if run.state == RUNNING]
            for run in running:
                if _has_ended(run, retries):
                    changed(runs, run)
            free = jobs - sum(run.state == RUNNING for run in runs)
            for run in [run for run in runs if run.state == WAITING][:free]:
                busy = [other.device for other in runs if other.state == RUNNING]
                run.device = min(devices, key=busy.count) if devices else None
                _start(run, threads)
                changed(runs, run)
            changed(runs, None)
            time.sleep(_LOOK)
    finally:
        left = [run for run in runs if run.process is not None and run.process.poll() is None]
        for run in left:
            assert run.process is not None
            run.process.terminate()
        for run in left:
            assert run.process is not None
            run.process.wait()
            run.state = WAITING
    return all(run.state == DONE for run in runs)


def _start(run: Run, threads: int) -> None:
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    environment: dict[str, str] = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true", **os.environ}
    if run.device is not None:
        environment["CUDA_VISIBLE_DEVICES"] = run.device
    pairs = [f"{key}={value}" for key, value in run.settings.items()]
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


def record_of(run: Run) -> RunRecord | None:
    """The record of a run; of one that was stopped, what it had until then, if it keeps that."""
    for name in (RECORD_NAME, UNFINISHED_NAME):
        if (run.folder / name).is_file():
            return RunRecord.from_dict(read_record(run.folder, name))
    return None
