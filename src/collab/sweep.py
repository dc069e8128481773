"""sweep: ordinary and collaborative attention layers measured against each other, size by size; records of it."""

import contextlib
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

import torch
from torch import Tensor

from collab.benchmark import Timing, measure_in_turn
from collab.decoding_rivals import ordinary_decoding_rivals, shared_decoding_rivals
from collab.records import RunRecord, provenance
from collab.rivals import DTYPES, Rival, Setting, Size, Skipped, compiled, ordinary_rivals, shared_rivals
from collab.running import Progress


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure.

    Attributes:
        setting: what was measured at.
        rival: what was measured.
        timing: how long it took.
        baseline: the fastest ordinary layer.
        baseline_timing: how long that one took, in turn with this one.
    """

    setting: Setting
    rival: Rival
    timing: Timing
    baseline: Rival
    baseline_timing: Timing

    @property
    def ratio(self) -> float:
        """Time, as a share of that of ordinary attention."""
        return self.timing.median / self.baseline_timing.median

    @property
    def flops(self) -> int:
        """Operations by formula."""
        return self.setting.flops(self.rival.shared_dim, self.rival.dims_per_head)

    @property
    def flop_ratio(self) -> float:
        """Operations, as a share of those of ordinary attention."""
        return self.flops / self.setting.flops()

    @property
    def memory_ratio(self) -> float | None:
        """Peak memory, as a share of that of ordinary attention."""
        theirs = self.baseline_timing.peak_memory
        return self.timing.peak_memory / theirs if theirs else None

    @property
    def cache_bytes(self) -> int | None:
        """Of keys and values, for decoding."""
        setting, rival = self.setting, self.rival
        if setting.step != "decode":
            return None
        contents = setting.num_heads if rival.shared_dim else 0
        inner = setting.num_heads * setting.size_of_head
        numbers = (rival.shared_dim or inner) + contents + inner
        return setting.batch * setting.tokens * numbers * DTYPES[setting.dtype].itemsize

    def to_record(self, benchmark: str, *, run: str, commit: str | None = None) -> RunRecord:
        """For a file of records.

        Args:
            benchmark: the record's name.
            run: what all figures measured together share, such as when that began.
            commit: that the sources are of, where the checkout cannot be asked.
        """
        setting, rival = self.setting, self.rival
        shared = {name: getattr(rival, name) for name in _DESCRIBED}
        common = {name: value for name, value in asdict(setting).items() if name not in ("step", "seed", "device")}
        with _threads_of(setting):
            origin = provenance(seed=setting.seed, device=setting.device)
        if setting.device.startswith("cuda"):
            origin["versions"] |= _gpu_versions()
        origin["commit"] = commit or origin["commit"]
        timing = self.timing
        return RunRecord(
            name=benchmark,
            config={"benchmark": benchmark, "device": device_name(setting.device), "pass": setting.step}
            | common
            | shared
            | {"run": run},
            metrics={
                "ratio": self.ratio,
                "milliseconds": timing.milliseconds,
                "milliseconds_low": timing.low * 1e3,
                "milliseconds_high": timing.high * 1e3,
                "baseline": self.baseline.name,
                "baseline_milliseconds": self.baseline_timing.milliseconds,
                "samples": timing.samples,
                "calls": timing.calls,
                "replayed": timing.replayed,
                "peak_memory": timing.peak_memory,
                "memory_ratio": self.memory_ratio,
                "parameters": rival.parameters,
                "flops": self.flops,
                "flop_ratio": self.flop_ratio,
                "cache_bytes": self.cache_bytes,
                "error": rival.error,
            },
            provenance=origin,
        )


def _gpu_versions() -> dict[str, str | None]:
    """Of what kernels are made with."""
    versions = {"cuda": torch.version.cuda}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["triton"] = importlib.metadata.version("triton")
    return versions


_DESCRIBED = ("kind", "shared_dim", "dims_per_head", "implementation", "asked", "compiled")


def device_name(device: str) -> str:
    """A GPU by its name, a CPU as such."""
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "cpu"


Extra = Callable[[Setting, Tensor, Tensor | None, Size], Sequence[Rival]]
"""More rivals for a size, given setting, input and gradient."""


def sweep(
    setting: Setting,
    sizes: Sequence[Size],
    *,
    implementations: Sequence[str] = ("auto",),
    compile_ordinary: bool = False,
    compile_ours: bool = False,
    extra: Extra | None = None,
    skipped: Skipped = lambda name, error: None,
    progress: Progress | None = None,
) -> Iterator[Row]:
    """Measure ordinary attention every way there is, then our layer at every size, in turn with the fastest of those.

    Args:
        setting: what all have in common.
        sizes: of our layer.
        implementations: by which our layer is measured, each by itself.
        compile_ordinary: also measure the fastest ordinary layer made by `torch.compile`.
        compile_ours: the same for our layer, where the implementation is the automatic choice.
        extra: more rivals.
        skipped: told what could not be measured, and why.
        progress: wraps the loop over sizes, the first of which is ordinary attention: a progress bar.

    Raises:
        WrongResult: if our layer's output or a gradient is not what the definition gives.
    """
    with _matmuls_in_full(), _threads_of(setting):
        inputs, gradient = setting.inputs()
        is_decoding = setting.step == "decode"
        best: Rival
        ordinary = ordinary_decoding_rivals(setting) if is_decoding else ordinary_rivals(setting, inputs, gradient)
        stages: Sequence[Size | None] = [None, *sizes]
        for size in stages if progress is None else progress(stages, len(stages)):
            if size is None:
                timings = _measure(setting, ordinary, inputs, gradient, skipped)
                best = _best(ordinary, timings)
                if compile_ordinary:
                    ordinary.append(compiled(best))
                    timings |= _measure(setting, [best, ordinary[-1]], inputs, gradient, skipped)
                    best = _best(ordinary, timings)
                yield from _rows(setting, ordinary, timings, best)
                continue
            if is_decoding:
                ours = shared_decoding_rivals(setting, size, implementations, skipped)
            else:
                ours = shared_rivals(setting, size, inputs, gradient, implementations, skipped)
            ours += [] if extra is None else extra(setting, inputs, gradient, size)
            ours += [compiled(rival) for rival in ours if compile_ours and rival.asked == "auto"]
            timings = _measure(setting, [best, *ours], inputs, gradient, skipped)
            yield from _rows(setting, ours, timings, best)


def begin_run() -> str:
    """What figures measured together share: when that began."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _measure(
    setting: Setting, rivals: Sequence[Rival], inputs: Tensor, gradient: Tensor | None, skipped: Skipped
) -> dict[str, Timing]:
    runs = {rival.name: rival.step(inputs, gradient) for rival in rivals}
    return measure_in_turn(
        runs, device=setting.device, repeats=setting.repeats, threads=setting.threads, replay=setting.replay,
        failed=skipped,
    )  # fmt: skip


def _best(rivals: Sequence[Rival], timings: Mapping[str, Timing]) -> Rival:
    """The fastest of those that could be measured."""
    measured = [rival for rival in rivals if rival.name in timings]
    return min(measured, key=lambda rival: timings[rival.name].median)


def _rows(setting: Setting, rivals: Sequence[Rival], timings: Mapping[str, Timing], best: Rival) -> Iterator[Row]:
    """One of every rival that could be measured."""
    for rival in rivals:
        if rival.name in timings:
            yield Row(
                setting=setting, rival=rival, timing=timings[rival.name], baseline=best,
                baseline_timing=timings[best.name],
            )  # fmt: skip


@contextlib.contextmanager
def _matmuls_in_full() -> Iterator[None]:
    """Products of float32 numbers as such, so that what is compared with them is compared with the definition."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def _threads_of(setting: Setting) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(setting.threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
