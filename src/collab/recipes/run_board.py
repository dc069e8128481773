"""How many trainings stand: a table that is drawn again and again on a terminal, now and then some lines elsewhere."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from collab.recipes.many import DONE, FAILED, RUNNING, WAITING, Run
from collab.table import format_table

_OFTEN, _SELDOM = 1.0, 30.0
"""Seconds between two tables on a terminal, and elsewhere."""


class RunBoard:
    """Shows runs on the standard error.

    Args:
        runs: all of them.
        out: the folder they are in.
    """

    def __init__(self, runs: Sequence[Run], out: Path) -> None:
        self.runs, self.out = runs, out
        self._begun = self._drawn = time.monotonic()
        self._live: Any = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)
            self._live.start()

    def changed(self, runs: Sequence[Run], run: Run | None) -> None:
        """A run's state changed; or, with None, time has passed."""
        if run is not None:
            tried = f" (attempt {run.attempts})" if run.attempts > 1 else ""
            last = f": {run.last_line()}" if run.state in (FAILED, WAITING) else ""
            self._print(f"{_clock(time.monotonic() - self._begun)} {run.name} {run.state}{tried}{last}")
        pause = _SELDOM if self._live is None else _OFTEN
        if time.monotonic() - self._drawn < pause:
            return
        self._drawn = time.monotonic()
        if self._live is not None:
            self._live.update(self.table(), refresh=True)
        else:
            for one in runs:
                if one.state == RUNNING:
                    self._print(f"  {one.name}: {one.last_line()}")

    def table(self) -> str:
        """Those that run with their last line, and how many there are of each state."""
        now = time.monotonic()
        rows = [
            [run.name, _clock(now - run.started), run.last_line()[:90]] for run in self.runs if run.state == RUNNING
        ]
        counts = ", ".join(f"{self._count(state)} {state}" for state in (DONE, RUNNING, WAITING, FAILED))
        return f"{format_table(['run', 'time', 'last line'], rows)}\n{counts}, {_clock(now - self._begun)} gone"

    def summary(self) -> str:
        """All runs and how they ended."""
        rows = [[run.name, run.state, run.attempts, _clock(run.seconds), str(run.log)] for run in self.runs]
        total = (
            f"{self._count(DONE)} of {len(self.runs)} done in {_clock(time.monotonic() - self._begun)}, in {self.out}"
        )
        return f"{format_table(['run', 'state', 'attempts', 'time', 'log'], rows)}\n{total}"

    def close(self) -> None:
        """Draw no more."""
        if self._live is not None:
            self._live.stop()

    def _count(self, state: str) -> int:
        return sum(run.state == state for run in self.runs)

    def _print(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(text, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}"
