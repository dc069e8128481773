"""Trainings that last as long as there is time: they end after so many seconds, and those side by side at one update.

Rows of a table must have had the same number of updates, and how many a device makes in the time there is, while it is
shared, is not known before. Runs that share a folder therefore keep together, none far ahead of the slowest, and when
the time is up the first to notice names the update that all of them end at. A run that comes later trains to that one,
however long it takes.
"""

import contextlib
import os
import time
from pathlib import Path

from collab.recipes import processes
from collab.recipes.work import write_text

SILENT = 120.0
"""Seconds after which a run that has said nothing is waited for no more: it may be gone."""

_BEGUN, _END, _STEP = "begun", "end", ".step"
_PAUSE = 0.05


class Pace:
    """One run's view of the runs that it keeps together with, in a folder of small files.

    Args:
        folder: shared by them, made if it is not there.
        name: of this run, of its own among them.
        seconds: since the first of them began, after which an end is named.
        notice: updates that are still made once it is named.
        every: updates between two looks; the end is a multiple of it.
        lead: how many updates ahead of the slowest one may be.
    """

    def __init__(
        self, folder: Path, name: str, seconds: float, notice: int = 0, every: int = 10, lead: int = 50
    ) -> None:
        self.folder, self.name, self.seconds, self.notice, self.every, self.lead = (
            folder, name, seconds, notice, every, lead,
        )  # fmt: skip
        self.waited = 0.0  # seconds, for slower runs
        self.end: int | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self.begun = float(self._agreed(_BEGUN, str(time.time())))

    def after_step(self, step: int) -> int | None:
        """Wait if this run is too far ahead; the last update of all of them, once it is named."""
        if self.end is None and step % self.every == 0:
            self.end = processes.agree(self._look(step) if processes.is_main() else None)
        return self.end

    def _look(self, step: int) -> int | None:
        write_text(self._own, str(step))
        start = time.perf_counter()
        while not self._named() and not self._is_over() and any(step > other + self.lead for other in self._others()):
            time.sleep(_PAUSE)
        self.waited += time.perf_counter() - start
        if not self._named() and not self._is_over():
            return None
        # Nobody passes it unawares: each looks again before it has made two times `every` more.
        furthest = max((step, *self._others())) + 2 * self.every + self.notice
        return int(self._agreed(_END, str(furthest + -furthest % self.every)))

    def leave(self) -> None:
        """Be waited for no more."""
        self._own.unlink(missing_ok=True)

    @property
    def _own(self) -> Path:
        return self.folder / f"{self.name}{_STEP}"

    def _named(self) -> bool:
        return (self.folder / _END).is_file()

    def _is_over(self) -> bool:
        return time.time() - self.begun >= self.seconds

    def _others(self) -> list[int]:
        """Where the other runs are that are still there."""
        found = []
        for path in self.folder.glob(f"*{_STEP}"):
            with contextlib.suppress(FileNotFoundError):  # it has left meanwhile
                if path != self._own and time.time() - path.stat().st_mtime < SILENT:
                    found.append(int(path.read_text()))
        return found

    def _agreed(self, name: str, value: str) -> str:
        """What is written under a name: this value, unless another run was the first to write one."""
        path, own = self.folder / name, self.folder / f".{name}.{os.getpid()}"
        if not path.is_file():
            own.write_text(value)
            with contextlib.suppress(FileExistsError):  # a link, unlike a file that is being written, is there whole
                os.link(own, path)
            own.unlink()
        return path.read_text()
