"""Measure the parts of attention layers by themselves, beside what the device could do: where the time goes, and why.

    python benchmarks/bench_parts.py --output benchmarks/results/parts.jsonl
    python benchmarks/bench_parts.py --output /tmp/try.jsonl --device cpu --quick

Projection of queries, keys and values; attention; output projection; of a BERT-base layer in bfloat16. For each the
least time that its operations and its bytes allow, each input read once and each output written once, at the rates that
a large product and a large copy reach on the same device in the same run. Training is each part forward and backward.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from bench_attention import CASES, DIMS_PER_HEAD, QUICK, QUICK_CASES, QUICK_DIMS, QUICK_SIZES, SIZES, SPARSE_CASES, tell
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import linear

from collab import CollaborativeAttention, ops
from collab.benchmark import Timing, measure, measure_in_turn
from collab.fused_projection import project_together
from collab.records import RunRecord, append_record, provenance
from collab.rivals import Draw, Setting, Size, backends_for, fill_, through
from collab.speed_records import size_of
from collab.sweep import begin_run, device_name
from collab.table import format_table

PASSES = ("inference", "training")
IMPLEMENTATIONS = ("fused", "cudnn")
"""By which our attention is measured on CUDA devices, where they take it, beside the one that is chosen."""

PRODUCT, COPY = 8192, 2**30
"""Rows of the square product, and bytes of the copy, that show what the device can do."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What is measured: a call, its operations (multiplications and additions apart) and the fewest bytes it moves."""

    name: str
    kind: str
    size: Size | None
    run: Callable[[], object]
    flops: int
    bytes: int
    implementation: str = ""

    @property
    def title(self) -> str:
        """What tells it from the others of a case."""
        return f"{self.kind} {self.size or ''} {self.name} {self.implementation}"


@dataclass(frozen=True)
class Rates:
    """What the device can do: operations and bytes a second."""

    flops: float
    bytes: float

    def floor(self, part: Part) -> float:
        """Seconds that a part takes at least."""
        return max(part.flops / self.flops, part.bytes / self.bytes)


def rates(setting: Setting, product: int, copy: int) -> Rates:
    """Measured with a large product and a large copy."""
    draw = Draw(setting)
    left, right = draw(product, product), draw(product, product)
    source = torch.ones(copy // 4, device=setting.device)
    target = torch.empty_like(source)
    with torch.no_grad():
        multiplied = measure(lambda: left @ right, device=setting.device, repeats=5, warm_up=2)
        copied = measure(lambda: target.copy_(source), device=setting.device, repeats=5, warm_up=2)
    return Rates(2 * product**3 / multiplied.median, 2 * copy / copied.median)


def parts_of(setting: Setting, size: Size | None) -> Iterator[Part]:
    """Of one layer: ordinary heads if there is no size. The output projection is the same for all."""
    yield from _ordinary_parts(setting) if size is None else _shared_parts(setting, size)


def _ordinary_parts(setting: Setting) -> Iterator[Part]:
    batch, tokens, width, heads = setting.batch, setting.tokens, setting.width, setting.num_heads
    rows, inner, draw = batch * tokens, heads * setting.size_of_head, Draw(setting)
    bytes_each = draw(1).element_size()
    for name, columns, given in (("projection", 3 * inner, width), ("output", width, inner)):
        tensors = [draw(rows, given), draw(columns, given) * given**-0.5, draw(columns)]
        gradient = draw(rows, columns) if setting.step == "training" else None
        yield _product(setting, name, None, columns, given, bytes_each, _step(linear, tensors, gradient))
    # As the projection leaves them: columns of one array.
    parts = draw(batch, tokens, 3 * inner).unflatten(-1, (3, heads, setting.size_of_head)).unbind(2)
    for backend in backends_for(setting.device):

        def attend(*tensors: Tensor, backend: str = backend) -> Tensor:
            with through(backend):
                return functional.scaled_dot_product_attention(*tensors)

        tensors = [part.transpose(1, 2) for part in parts]
        yield _attention(setting, None, 3 * inner, bytes_each, backend, attend, tensors)


def _shared_parts(setting: Setting, size: Size) -> Iterator[Part]:
    """Of our layer, whose projection is run as the layer runs it, and lays out what attention reads."""
    heads, inner, draw = setting.num_heads, setting.num_heads * setting.size_of_head, Draw(setting)
    inputs = draw(setting.batch, setting.tokens, setting.width)
    layer = CollaborativeAttention(
        setting.width, heads, size[0], dims_per_head=size[1], head_dim=setting.head_dim, mixing="normal",
        device=inputs.device, dtype=inputs.dtype,
    )  # fmt: skip
    fill_(layer, setting.seed)
    linears = (layer.query, layer.key, layer.value)

    def project(given: Tensor) -> list[Tensor]:
        return project_together(linears, given) or [each(given) for each in linears]

    columns = sum(each.out_features for each in linears)
    run = _without_gradients(lambda: project(inputs))
    if setting.step == "training":
        leaf = inputs.detach().requires_grad_()
        learnt = [leaf, *(part for each in linears for part in each.parameters())]
        gradients = [draw(setting.batch, setting.tokens, each.out_features) for each in linears]
        run = lambda: torch.autograd.grad(project(leaf), learnt, gradients)  # noqa: E731
    yield _product(setting, "projection", size, columns, setting.width, inputs.element_size(), run)
    with torch.no_grad():
        query, key, value = project(inputs)
    tensors = [query, key, value.unflatten(-1, (heads, layer.head_dim)).transpose(1, 2), layer.mixing.detach()]
    wanted = [tensor.detach().requires_grad_(setting.step == "training") for tensor in tensors]
    chosen = ops.choose(*wanted, dims=layer.dims)
    others = IMPLEMENTATIONS if inputs.is_cuda else ()
    taken = [name for name in others if not ops.IMPLEMENTATIONS[name].why_not(*wanted, dims=layer.dims)]
    for name in dict.fromkeys((chosen, *taken)):

        def attend(*tensors: Tensor, name: str = name) -> Tensor:
            return ops.attention(*tensors, scale=layer.scale, dims=layer.dims, implementation=name)[0]

        yield _attention(setting, size, columns + inner, inputs.element_size(), name, attend, tensors)


def _product(
    setting: Setting, name: str, size: Size | None, columns: int, width: int, bytes_each: int,
    run: Callable[[], object],
) -> Part:  # fmt: skip
    """Of so many columns from `width`; columns that are only there for alignment are no work that has to be done."""
    rows = setting.batch * setting.tokens
    flops, moved = 2 * rows * width * columns, bytes_each * (rows * width + columns * width + rows * columns)
    times = 3 if setting.step == "training" else 1  # gradients of what is read are a product each
    kind = "ordinary" if size is None else "collaborative"
    return Part(name=name, kind=kind, size=size, run=run, flops=times * flops, bytes=times * moved)


def _attention(
    setting: Setting, size: Size | None, columns: int, bytes_each: int, implementation: str,
    function: Callable[..., Tensor], tensors: Sequence[Tensor],
) -> Part:  # fmt: skip
    """Attention over tensors of so many `columns` together, its output included."""
    batch, tokens, heads, head_dim = setting.batch, setting.tokens, setting.num_heads, setting.size_of_head
    scored = head_dim if size is None else size[1] or size[0]
    flops, moved = 2 * batch * heads * tokens * tokens * (scored + head_dim), bytes_each * batch * tokens * columns
    gradient = None
    if setting.step == "training":
        # Backward computes the scores again, and two products for each of forward's; all is read and written again.
        flops, moved = int(3.5 * flops), 3 * moved
        gradient = Draw(setting)(batch, tokens, heads, head_dim).transpose(1, 2)
    return Part(
        name="attention", kind="ordinary" if size is None else "collaborative", size=size, flops=flops, bytes=moved,
        run=_step(function, tensors, gradient), implementation=implementation,
    )  # fmt: skip


def _without_gradients(function: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        with torch.no_grad():
            return function()

    return run


def _step(function: Callable[..., Tensor], tensors: Sequence[Tensor], gradient: Tensor | None) -> Callable[[], object]:
    """Forward, and backward to all tensors where there is a gradient."""
    wanted = [tensor.detach().requires_grad_(gradient is not None) for tensor in tensors]
    if gradient is not None:
        return lambda: torch.autograd.grad(function(*wanted), wanted, gradient)
    return _without_gradients(lambda: function(*wanted))


def to_record(setting: Setting, part: Part, timing: Timing, most: Rates, options: argparse.Namespace) -> RunRecord:
    """Of one part."""
    origin = provenance(seed=setting.seed, device=setting.device)
    shared_dim, dims_per_head = part.size or (None, None)
    return RunRecord(
        name="parts",
        config={
            "benchmark": "parts", "device": device_name(setting.device), "pass": setting.step, "batch": setting.batch,
            "tokens": setting.tokens, "width": setting.width, "num_heads": setting.num_heads, "dtype": setting.dtype,
            "threads": setting.threads, "kind": part.kind, "part": part.name, "shared_dim": shared_dim,
            "dims_per_head": dims_per_head, "implementation": part.implementation, "run": options.run,
        },
        metrics={
            "milliseconds": timing.milliseconds, "milliseconds_low": timing.low * 1e3,
            "milliseconds_high": timing.high * 1e3, "samples": timing.samples, "flops": part.flops, "bytes": part.bytes,
            "flops_a_second": part.flops / timing.median, "bytes_a_second": part.bytes / timing.median,
            "floor_milliseconds": most.floor(part) * 1e3, "most_flops_a_second": most.flops,
            "most_bytes_a_second": most.bytes,
        },
        provenance=origin | {"commit": options.commit or origin["commit"]},
    )  # fmt: skip


def run(options: argparse.Namespace, records: list[RunRecord]) -> None:
    """Measure all parts, and append each one's record to the file and to `records`."""
    common = {"device": options.device, "dtype": options.dtype, "threads": options.threads} | (
        QUICK if options.quick else {}
    )
    most = rates(Setting(**common), *((256, 2**20) if options.quick else (PRODUCT, COPY)))
    print(f"at most {most.flops / 1e12:.3g} TFLOP/s and {most.bytes / 1e12:.3g} TB/s", flush=True)
    cases = [tuple(map(int, case.split("x"))) for case in options.cases.split(",")] if options.cases else None
    dense, own = (QUICK_SIZES, QUICK_DIMS) if options.quick else (SIZES, DIMS_PER_HEAD)
    for step in options.passes.split(","):
        for batch, tokens in cases or (QUICK_CASES if options.quick else CASES):
            setting = Setting(batch=batch, tokens=tokens, step=step, **common)
            sparse = dense[1:] if (batch, tokens) in (*SPARSE_CASES, *QUICK_CASES) else ()
            sizes = [None, *((size, None) for size in dense), *((size, own) for size in sparse)]
            found = {part.title: part for size in sizes for part in parts_of(setting, size)}
            timings = measure_in_turn(
                {title: part.run for title, part in found.items()}, device=options.device, threads=options.threads,
                repeats=setting.repeats, failed=tell if options.verbose else lambda name, error: None,
            )  # fmt: skip
            for title, timing in timings.items():
                records.append(to_record(setting, found[title], timing, most, options))
                append_record(options.output, records[-1])


def summary(records: Sequence[RunRecord]) -> str:
    """A line a part: time, the least that the device allows, and what it reached."""
    header = ["pass", "batch x tokens", "layer", "part", "by", "us", "least us", "TFLOP/s", "TB/s"]
    lines = []
    for record in records:
        config, metrics = record.config, record.metrics
        size, own = size_of(record)
        layer = f"{config['kind']} {size or ''}{f'/{own}' if own else ''}".strip()
        microseconds = [f"{metrics[name] * 1e3:.1f}" for name in ("milliseconds", "floor_milliseconds")]
        reached = [f"{metrics[name] / 1e12:.3g}" for name in ("flops_a_second", "bytes_a_second")]
        case = [config["pass"], f"{config['batch']} x {config['tokens']}"]
        lines.append([*case, layer, config["part"], config["implementation"], *microseconds, *reached])
    return format_table(header, lines)


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """What every measurement on a device can be told."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON lines to append to")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quick", action="store_true", help="toy sizes, to see that everything runs")
    parser.add_argument("--commit", help="that the sources are of, where there is no checkout")
    return parser


def carry_out(
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace, list[RunRecord]], None],
    summary: Callable[[Sequence[RunRecord]], str],
) -> None:
    """Run with what the command line says, and print what came of it, also of a run that ended early."""
    options = parser.parse_args()
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device must be cpu where there is no CUDA device, got {options.device}")
    options.run = begin_run()
    records: list[RunRecord] = []
    try:
        run(options, records)
    finally:
        if records:
            print(summary(records))


def main() -> None:
    """Entry point."""
    parser = parser_of(__doc__)
    parser.add_argument("--cases", help="batch x tokens, with commas between: 32x128,8x2048")
    parser.add_argument("--passes", default=",".join(PASSES), help="inference, training or both")
    parser.add_argument("--threads", type=int, help="of a CPU")
    parser.add_argument("--verbose", action="store_true", help="say what could not be measured")
    carry_out(parser, run, summary)


if __name__ == "__main__":
    main()
