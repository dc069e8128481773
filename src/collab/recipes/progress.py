"""How a loop goes, on the standard error: one line, written over, on a terminal; now and then a line elsewhere."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_ON_TERMINAL, _ELSEWHERE = 0.2, 15.0
"""Seconds between two lines."""


class ProgressLine:
    """Steps done of all, loss, speed, time left.

    Args:
        name: what is going on.
        shown: whether to show anything.
    """

    def __init__(self, name: str, shown: bool = True) -> None:
        self.name, self.shown = name, shown
        self.loss: float | None = None
        self._first = self._last = self._total = 0
        self._begun = self._said = 0.0
        self._terminal = sys.stderr.isatty()

    def start(self, first: int, total: int) -> None:
        """Begin at step `first` of `total`."""
        self._first = self._last = first
        self._total = total
        self._begun = self._said = time.perf_counter()

    def step(self, done: int) -> None:
        """So many steps are done."""
        self._last = done
        now = time.perf_counter()
        if self.shown and now - self._said >= (_ON_TERMINAL if self._terminal else _ELSEWHERE):
            self._said = now
            self._write(self._text(now), end="" if self._terminal else "\n")

    def say(self, text: str) -> None:
        """A remark on a line of its own."""
        if self.shown:
            self._write(f"{self.name}: {text}", end="\n")

    def end(self) -> None:
        """Leave the last state on a line of its own."""
        if self.shown:
            self._write(self._text(time.perf_counter()), end="\n")

    def _text(self, now: float) -> str:
        seconds = max(now - self._begun, 1e-9)
        speed = (self._last - self._first) / seconds
        left = (self._total - self._last) / speed if speed else 0.0
        loss = "" if self.loss is None else f", loss {self.loss:.4f}"
        return (
            f"{self.name}: step {self._last:,} of {self._total:,}{loss}, {speed:.1f} steps/s, "
            f"{_clock(seconds)} gone, {_clock(left)} left"
        )

    def _write(self, text: str, end: str) -> None:
        before = "\r\x1b[K" if self._terminal else ""
        print(f"{before}{text}", end=end, file=sys.stderr, flush=True)


def loop_shown(name: str, shown: bool = True) -> Callable[[Iterable[Any], int], Iterator[Any]]:
    """What wraps a loop, given it and its length, to show how it goes."""

    def bar(steps: Iterable[Any], total: int) -> Iterator[Any]:
        line = ProgressLine(name, shown and total > 0)
        line.start(0, total)
        for number, step in enumerate(steps):
            yield step
            line.step(number + 1)

    return bar


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
