"""Measure decoding over a cache of shared keys against SDPA over the keys of every head, and every way to cut the work.

    python benchmarks/bench_decode.py --output benchmarks/results/decode-kernel.jsonl
    python benchmarks/bench_decode.py --output /tmp/try.jsonl --cases 64x4096 --sizes 128 --no-compile

Attention of a GPT-2-small-shaped layer (12 heads of 64) in bfloat16, one new token, as CUDA graphs. What it is compared
with is the fastest of all backends of SDPA, eager and compiled, over a cache of 768 numbers a key and value; all take
turns. Needs a CUDA device.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from collab.benchmark import Timing, measure_in_turn
from collab.ops import DIMS_DTYPE, fused_decode, reference
from collab.records import RunRecord, append_record, provenance

DEVICE = "cuda"
HEADS, HEAD_DIM = 12, 64
SCALE = HEAD_DIM**-0.5
CASES = ((64, 4096), (64, 1024), (8, 4096), (1, 32768))
SIZES = (64, 128, 256, 384)
TUNED = 128
"""Of the first case, the shared size that every configuration is measured at."""

SPARSE_SIZES, DIMS_PER_HEAD = (128, 384), 64
FILLED = 1024
"""Of the first case's tokens, how many a static cache holds when it is measured with a mask over the rest."""

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
COMPILED = ("default", "math")
CHECKED = 2
"""Sequences whose output is compared with that of the definition in float32."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is measured: a cache, which part of it holds something (all if None), and how to cut the work."""

    batch: int
    tokens: int
    shared_dim: int
    dims_per_head: int | None = None
    filled: int | None = None
    config: fused_decode.Config | None = None

    @property
    def name(self) -> str:
        """Of the size."""
        own = "" if self.dims_per_head is None else f"/{self.dims_per_head}"
        return f"{self.shared_dim}{own}" + ("" if self.filled is None else f", {self.filled} filled")

    @property
    def cut(self) -> fused_decode.Config:
        """As given, or what runs for anybody."""
        query = torch.empty(self.batch, 1, self.shared_dim, dtype=torch.bfloat16, device="meta")
        value = torch.empty(self.batch, HEADS, self.tokens, HEAD_DIM, dtype=torch.bfloat16, device="meta")
        return self.config or fused_decode.config_for(query, value, None if self.filled is None else value)

    @property
    def bytes_read(self) -> int:
        """Of the cache."""
        return self.batch * (self.filled or self.tokens) * (self.shared_dim + HEADS + HEADS * HEAD_DIM) * 2


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Random ones."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, generator=generator)


def mask_of(case: Case) -> Tensor | None:
    """Over what a static cache does not hold yet."""
    if case.filled is None:
        return None
    return (torch.arange(case.tokens, device=DEVICE) < case.filled).expand(case.batch, 1, 1, case.tokens).contiguous()


def ordinary(case: Case, *, with_compiled: bool) -> dict[str, Callable[[], object]]:
    """SDPA over the whole cache, by the name of what computes it."""
    query = numbers(case.batch, HEADS, 1, HEAD_DIM)
    key, value = (numbers(case.batch, HEADS, case.tokens, HEAD_DIM, seed=seed) for seed in (1, 2))
    mask = mask_of(case)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=SCALE)

    def through(backend: SDPBackend, function: Callable[..., Tensor] = attend) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with sdpa_kernel(backend):
                return function(query, key, value)

        return run

    runs: dict[str, Callable[[], object]] = {"default": lambda: attend(query, key, value)}
    runs |= {name: through(backend) for name, backend in BACKENDS.items()}
    for name in COMPILED if with_compiled else ():
        function = torch.compile(attend, fullgraph=True) if name == "default" else torch.compile(attend)
        runs[f"{name}, compiled"] = (
            (lambda function=function: function(query, key, value))
            if name == "default"
            else through(BACKENDS[name], function)
        )
    return runs


def shared(case: Case) -> Callable[[], Tensor]:
    """Our step, checked."""
    query = numbers(case.batch, 1, case.shared_dim)
    key = numbers(case.batch, case.tokens, case.shared_dim + HEADS, seed=1)
    value = numbers(case.batch, HEADS, case.tokens, HEAD_DIM, seed=2)
    mixing = numbers(HEADS, case.dims_per_head or case.shared_dim, seed=3)
    dims = None
    if case.dims_per_head is not None:
        places = [torch.randperm(case.shared_dim)[: case.dims_per_head] for _ in range(HEADS)]
        dims = torch.stack(places).to(DEVICE, DIMS_DTYPE)
    mask = mask_of(case)

    def run() -> Tensor:
        return fused_decode.launch(query, key, value, mixing, dims, mask, SCALE, case.cut)

    few = [part[:CHECKED].float() for part in (query, key, value)]
    few_masks = mask if mask is None else mask[:CHECKED]
    expected = reference.attention(*few, mixing.float(), scale=SCALE, dims=dims, mask=few_masks)[0].transpose(1, 2)
    error = float((run()[:CHECKED].float() - expected).norm() / expected.norm())
    if not error < 0.02:
        raise ValueError(f"{case} must give what the definition gives, got a relative error of {error:.2g}")
    return run


def tell(name: str, error: Exception) -> None:
    """Say what could not be measured."""
    print(f"    {name} not measured: {type(error).__name__}: {' '.join(str(error).split())[:120]}", flush=True)


def measure(cases: list[Case], options: argparse.Namespace, *, with_compiled: bool) -> None:
    """Measure cases over one cache in turn with ordinary attention over it; print and record them."""
    runs: dict[str, Callable[[], object]] = {}
    named: dict[str, Case] = {}
    for case in cases:
        name = f"{case.name} {case.cut}"
        try:
            runs[name], named[name] = shared(case), case
        except (RuntimeError, ValueError) as error:
            tell(name, error)
    others = ordinary(cases[0], with_compiled=with_compiled)
    timings = measure_in_turn(others | runs, device=DEVICE, repeats=options.repeats, failed=tell)
    best = min((name for name in others if name in timings), key=lambda name: timings[name].median)
    print(f"{cases[0].batch} x {cases[0].tokens}: ordinary attention, microseconds")
    print("    " + ", ".join(f"{name} {timings[name].median * 1e6:.1f}" for name in others if name in timings))
    for name, case in named.items():
        if name in timings:
            record = record_of(case, timings[name], best, timings[best], options.commit)
            append_record(options.output, record)
            metrics, config = record.metrics, ", ".join(f"{key} {value}" for key, value in asdict(case.cut).items())
            print(
                f"    {case.name:18} {timings[name].median * 1e6:8.1f} us  ratio {metrics['ratio']:.3f}  "
                f"{metrics['bytes_per_second'] / 1e12:.2f} TB/s  {config}",
                flush=True,
            )


def record_of(case: Case, timing: Timing, best: str, best_timing: Timing, commit: str | None) -> RunRecord:
    """What was measured, against what."""
    full = case.batch * case.tokens * 2 * HEADS * HEAD_DIM * 2
    own = case.batch * case.tokens * (case.shared_dim + HEADS + HEADS * HEAD_DIM) * 2
    origin = provenance(0, DEVICE)
    return RunRecord(
        name="decode-kernel",
        config={
            "benchmark": "decode-kernel",
            "pass": "decode",
            "num_heads": HEADS,
            "head_dim": HEAD_DIM,
            "dtype": "bfloat16",
            **asdict(case),
            "config": asdict(case.cut),
        },
        metrics={
            "milliseconds": timing.milliseconds,
            "ratio": timing.median / best_timing.median,
            "ordinary": best,
            "ordinary_milliseconds": best_timing.milliseconds,
            "cache_ratio": own / full,
            "bytes_per_second": case.bytes_read / timing.median,
        },
        provenance=origin | {"commit": commit or origin["commit"]},
    )


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON lines to append to")
    parser.add_argument("--cases", help="batch x tokens, with commas between: 64x4096,8x4096")
    parser.add_argument("--sizes", help="shared sizes, with commas between")
    parser.add_argument("--repeats", type=int, default=25, help="samples of each")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="compile no ordinary attention")
    parser.add_argument("--commit", help="that the sources are of, where there is no checkout")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there must be a CUDA device")
    places = [tuple(map(int, case.split("x"))) for case in options.cases.split(",")] if options.cases else CASES
    sizes = [int(size) for size in options.sizes.split(",")] if options.sizes else SIZES
    for index, (batch, tokens) in enumerate(places):
        cases = [Case(batch=batch, tokens=tokens, shared_dim=size) for size in sizes]
        if index == 0:
            usual = Case(batch=batch, tokens=tokens, shared_dim=TUNED).cut
            others = [config for config in fused_decode.CONFIGS if config != usual]
            cases += [Case(batch=batch, tokens=tokens, shared_dim=TUNED, config=config) for config in others]
            cases += [
                Case(batch=batch, tokens=tokens, shared_dim=size, dims_per_head=DIMS_PER_HEAD) for size in SPARSE_SIZES
            ]
        measure(cases, options, with_compiled=options.compile and index == 0)
        if index == 0 and tokens > FILLED:
            masked = [Case(batch=batch, tokens=tokens, shared_dim=TUNED, filled=FILLED)]
            measure(masked, options, with_compiled=False)


if __name__ == "__main__":
    main()
