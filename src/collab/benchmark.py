"""measure: how long a call takes and how much memory it needs, on a CPU or a CUDA device; rivals take turns."""

import contextlib
import functools
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

_SAMPLE_SECONDS = {"cpu": 0.005, "cuda": 0.002}
"""How long a sample lasts, at least, unless a call takes longer: what begins and ends it must not count."""

_MOST_CALLS = 40
_PROFILER_LOG = "KINETO_LOG_LEVEL"


@dataclass(frozen=True)
class Timing:
    """How long calls took and what they needed.

    Attributes:
        median: seconds of a call.
        low, high: seconds that a tenth of the samples stayed below, and that a tenth exceeded.
        samples: how many there are.
        calls: in each of them, one after the other.
        peak_memory: bytes that a call holds at once, at most, beyond what was there before it.
        replayed: whether the calls were recorded as a CUDA graph and replayed, so that launching cost nothing.
    """

    median: float
    low: float
    high: float
    samples: int
    calls: int
    peak_memory: int
    replayed: bool

    @property
    def milliseconds(self) -> float:
        """The median."""
        return self.median * 1e3

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        spread = f"{self.low * 1e3:.4g} to {self.high * 1e3:.4g}"
        return f"{self.milliseconds:.4g} ms ({spread}), {self.peak_memory / 2**20:.3g} MiB at most"


def measure(
    run: Callable[[], object],
    *,
    device: torch.device | str = "cpu",
    repeats: int = 25,
    warm_up: int = 3,
    threads: int | None = None,
    replay: bool = True,
) -> Timing:
    """Measure one call, without arguments, of anything that computes on `device`.

    Args:
        run: what is called; what it returns is dropped at once.
        device: where it computes.
        repeats: samples that are taken.
        warm_up: calls before the first sample.
        threads: that a CPU computes with; as many as torch uses now if not given.
        replay: on a CUDA device, record the calls as a graph and time its replays, as inference servers and
            training loops do that are not slowed down by launching; needs calls that never wait for the device.

    Example:
        >>> import torch, collab
        >>> x = torch.randn(64, 64)
        >>> timing = collab.measure(lambda: x @ x, repeats=5)
        >>> timing.low <= timing.median <= timing.high, timing.peak_memory
        (True, 16384)
    """
    options: Any = {"repeats": repeats, "warm_up": warm_up, "threads": threads, "replay": replay}
    return measure_in_turn({"run": run}, device=device, **options)["run"]


def measure_in_turn(
    runs: Mapping[str, Callable[[], object]],
    *,
    device: torch.device | str = "cpu",
    repeats: int = 25,
    warm_up: int = 3,
    threads: int | None = None,
    replay: bool = True,
    failed: Callable[[str, Exception], None] | None = None,
) -> dict[str, Timing]:
    """Measure several calls whose times are to be compared: see `measure`.

    One sample of each is taken after the other, round by round, so that a slow moment of the machine falls on all.

    Args:
        runs: the calls, by name.
        device: where they compute.
        repeats: samples of each.
        warm_up: calls of each before the first sample.
        threads: that a CPU computes with.
        replay: whether to record CUDA graphs.
        failed: told of a call that raised while it was warmed up or recorded; the others are measured nevertheless.
            Not given, such an error is raised.
    """
    device = torch.device(device)
    if repeats < 2 or warm_up < 1:
        raise ValueError(f"repeats must be at least 2 and warm_up at least 1, got {repeats} and {warm_up}")
    with _threads(threads), _on(device):
        samplers: dict[str, _Sampler] = {}
        for name, run in runs.items():
            try:
                samplers[name] = _sampler(run, device, warm_up, replay)
            except Exception as error:
                if failed is None:
                    raise
                failed(name, error)
        with _uncollected():
            for turn in range(repeats):
                # Back and forth, so that nobody always follows the same rival.
                for sampler in list(samplers.values())[:: 1 if turn % 2 == 0 else -1]:
                    sampler.take()
        return {name: _timing(sampler) for name, sampler in samplers.items()}


class _Sampler(Protocol):
    """Takes samples of one call and tells them when all are taken."""

    calls: int
    memory: int
    replayed: bool

    def take(self) -> None:
        """One sample."""

    def seconds(self) -> list[float]:
        """Of all samples taken."""


class _Calls:
    """Samples by the clock of the machine."""

    replayed = False

    def __init__(self, run: Callable[[], object], memory: int, device: torch.device) -> None:
        self.run, self.memory, self.device, self.calls = run, memory, device, 1
        self.taken: list[float] = []
        self.take()
        self.calls = _calls(self.taken.pop(), device.type)

    def take(self) -> None:
        _wait(self.device)
        begin = time.perf_counter()
        for _ in range(self.calls):
            self.run()
        _wait(self.device)
        self.taken.append(time.perf_counter() - begin)

    def seconds(self) -> list[float]:
        return self.taken


class _Replays:
    """Samples by events of a CUDA device around replays of a graph that holds the calls."""

    replayed = True

    def __init__(self, run: Callable[[], object], memory: int) -> None:
        self.memory, self.calls = memory, 1
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.graph = _record(run, 1)
        self.take()
        self.take()
        self.calls = _calls(self.seconds()[1], "cuda")
        if self.calls > 1:
            self.graph = _record(run, self.calls)
            self.graph.replay()
        self.events.clear()

    def take(self) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.graph.replay()
        end.record()
        self.events.append((begin, end))

    def seconds(self) -> list[float]:
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) * 1e-3 for begin, end in self.events]


def _sampler(run: Callable[[], object], device: torch.device, warm_up: int, replay: bool) -> _Sampler:
    memory = _warm(run, device, warm_up)
    return _Replays(run, memory) if device.type == "cuda" and replay else _Calls(run, memory, device)


def _record(run: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return graph


def _calls(seconds: float, kind: str) -> int:
    """How many calls make a sample that is long enough."""
    return max(1, min(_MOST_CALLS, round(_SAMPLE_SECONDS.get(kind, 0.005) / max(seconds, 1e-7))))


def _timing(sampler: _Sampler) -> Timing:
    seconds = [one / sampler.calls for one in sampler.seconds()]
    tenths = statistics.quantiles(seconds, n=10, method="inclusive")
    return Timing(
        median=statistics.median(seconds),
        low=tenths[0],
        high=tenths[-1],
        samples=len(seconds),
        calls=sampler.calls,
        peak_memory=sampler.memory,
        replayed=sampler.replayed,
    )


def _warm(run: Callable[[], object], device: torch.device, warm_up: int) -> int:
    """Call a few times, so that nothing is left to load, choose or compile; the bytes that a call needs."""
    if device.type != "cuda":
        for _ in range(warm_up):
            run()
        return _cpu_peak(run)
    stream = _side_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_up):
            run()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        peak = torch.cuda.max_memory_allocated() - before
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    return peak


@functools.cache
def _side_stream(index: int) -> torch.cuda.Stream:
    """Where calls are warmed up, as graphs want it; one for all, so that their memory is used again."""
    return torch.cuda.Stream(index)


def _cpu_peak(run: Callable[[], object]) -> int:
    """Bytes that tensors made by a call take at once, at most, as torch's profiler sees them come and go."""
    from torch.profiler import ProfilerActivity, profile

    with _quiet_profiler(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    inner: Any = found.profiler
    events = [event for event in inner.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@contextlib.contextmanager
def _quiet_profiler() -> Iterator[None]:
    """The profiler writes to the standard error when it starts, unless told otherwise by this variable."""
    before = os.environ.setdefault(_PROFILER_LOG, "6")
    try:
        yield
    finally:
        if before == "6":
            os.environ.pop(_PROFILER_LOG, None)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without Python looking for garbage in the middle of a sample."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
