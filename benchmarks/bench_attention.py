"""Measure whole attention layers against the fastest ordinary one, and keep a record a figure.

    python benchmarks/bench_attention.py --output benchmarks/results/attention.jsonl
    python benchmarks/bench_attention.py --output /tmp/try.jsonl --device cpu --quick
    python benchmarks/bench_attention.py --output /tmp/try.jsonl --cases 32x128,8x2048 --passes training --sizes 64,128

A BERT-base layer (768 wide, 12 heads) in bfloat16. Everything is measured in turn with the fastest of ordinary
attention's variants: every backend of SDPA, and the fastest of those made by torch.compile. Records are appended as
soon as they are there. `collaborative, auto` is what the layer chooses, the others what it is told to use, where that
takes the inputs, and `one key head` what ordinary kernels do at one head's width, content scores inside the key.
"""

import argparse
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from collab import CollaborativeAttention
from collab.records import RunRecord, append_record
from collab.rivals import PASSES, Rival, Setting, Size, distance, fill_, rival_of, through
from collab.speed_records import ORDINARY, best, case_of, groups, series, size_of
from collab.sweep import begin_run, sweep

CASES = ((32, 128), (32, 512), (8, 2048))
SIZES = (64, 128, 256, 384)
SPARSE_SIZES = (128, 256, 384)
DIMS_PER_HEAD = 64
SPARSE_CASES = ((32, 512), (8, 2048))
COMPILED = {("training", 32, 128)}
"""Pass, batch and tokens where our layer is measured compiled, too: compiling takes longer than measuring."""

DECODED = (64, 4096)
"""Sequences, and tokens in the cache of each, of a step of decoding."""

QUICK_CASES = ((2, 16), (1, 40))
QUICK = {"width": 48, "num_heads": 3, "repeats": 3}
QUICK_SIZES, QUICK_SPARSE_SIZES, QUICK_DIMS = (16, 24), (24,), 16
ONE_KEY_BACKENDS = (("cudnn", True), ("cudnn", False), ("flash", False), ("default", False))
"""Backend, and whether the key is given once (`enable_gqa`) or to every head, with a stride of zero."""

WIDEST_KEY = 128
"""Of one key head in ordinary kernels: backward passes take no wider one."""


ONE_KEY_HEAD = "one key head"


class OneKeyHead(nn.Module):
    """Collaborative attention through ordinary kernels: one key head for all, its last dimensions the content scores.

    With `heads` of the key's dimensions for content, the query of head i has a one at the i-th of those. Queries get it
    from their bias and from the mixing, so that one product mixes queries and places the ones. The kernel sees a key of
    `shared_dim` + `heads` dimensions; that is as fast as as many shared dimensions with a query bias and no content.
    """

    def __init__(self, layer: CollaborativeAttention, backend: str, is_given_once: bool) -> None:
        super().__init__()
        heads, shared_dim = layer.num_heads, layer.shared_dim
        self.num_heads, self.head_dim, self.backend, self.scale = heads, layer.head_dim, backend, layer.scale
        self.key_dim = shared_dim + heads
        self.is_given_once, width = is_given_once, layer.embed_dim
        options = {"device": layer.query.weight.device, "dtype": layer.query.weight.dtype}
        self.projection = nn.Linear(width, 2 * self.key_dim + heads * layer.head_dim, **options)
        self.mixing = nn.Parameter(torch.zeros(heads, self.key_dim, **options))
        self.out = layer.out
        with torch.no_grad():
            self.projection.weight.zero_()
            self.projection.bias.zero_()
            self.projection.weight[:shared_dim] = layer.query.weight
            self.projection.bias[shared_dim : self.key_dim] = 1
            self.projection.weight[self.key_dim : 2 * self.key_dim] = layer.key.weight
            self.projection.weight[2 * self.key_dim :] = layer.value.weight
            self.projection.bias[2 * self.key_dim :] = layer.value.bias
            self.mixing[:, :shared_dim] = layer.mixing
            self.mixing[:, shared_dim:] = torch.eye(heads, **options)

    def forward(self, inputs: Tensor) -> Tensor:
        """Attend from every token to every token."""
        sizes = (self.key_dim, self.key_dim, self.num_heads * self.head_dim)
        query, key, value = self.projection(inputs).split(sizes, dim=-1)
        mixed_query = (query[:, :, None] * self.mixing).transpose(1, 2)
        head_key = key[:, None] if self.is_given_once else key[:, None].expand(-1, self.num_heads, -1, -1)
        value = value.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        with through(self.backend):
            context = functional.scaled_dot_product_attention(
                mixed_query, head_key, value, scale=self.scale, enable_gqa=self.is_given_once
            )
        return self.out(context.transpose(1, 2).flatten(-2))


def one_key_rivals(setting: Setting, inputs: Tensor, gradient: Tensor | None, size: Size) -> list[Rival]:
    """`OneKeyHead` with a key as wide as `size` has shared dimensions, through each backend that takes it."""
    shared_dim, dims_per_head = size
    inner = shared_dim - setting.num_heads
    if dims_per_head is not None or shared_dim > WIDEST_KEY or inner < 1:
        return []
    layer = CollaborativeAttention(
        setting.width, setting.num_heads, inner, implementation="reference", device=inputs.device, dtype=inputs.dtype
    )
    fill_(layer, setting.seed)
    found = []
    for backend, is_given_once in ONE_KEY_BACKENDS:
        module = OneKeyHead(layer, backend, is_given_once)
        asked = f"{backend}{', key given once' if is_given_once else ''}"
        rival = rival_of(module, kind=ONE_KEY_HEAD, implementation=backend, asked=asked, shared_dim=shared_dim)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # they say why a backend takes nothing of the kind
                rival.step(inputs, gradient)()
        except RuntimeError as error:
            tell(rival.name, error)
            continue
        with torch.no_grad():
            error = distance(module(inputs).float(), layer(inputs).float())
        if not error < 0.02:
            raise ValueError(f"{rival.name} must give what the definition gives, got a relative error of {error:.2g}")
        found.append(rival.told(error=error))
    return found


def settings_of(options: argparse.Namespace) -> Iterator[tuple[Setting, list[Size], bool]]:
    """What to measure at, the sizes, and whether to compile our layer."""
    cases = [tuple(map(int, case.split("x"))) for case in options.cases.split(",")] if options.cases else None
    sizes = [int(size) for size in options.sizes.split(",")] if options.sizes else None
    dense, sparse = (QUICK_SIZES, QUICK_SPARSE_SIZES) if options.quick else (SIZES, SPARSE_SIZES)
    own = options.dims_per_head or (QUICK_DIMS if options.quick else DIMS_PER_HEAD)
    sparse_cases = QUICK_CASES[1:] if options.quick else SPARSE_CASES
    for step in options.passes.split(","):
        usual = QUICK_CASES if options.quick else (DECODED,) if step == "decode" else CASES
        for batch, tokens in cases or usual:
            chosen: list[Size] = [(size, None) for size in dense if sizes is None or size in sizes]
            if (batch, tokens) in sparse_cases or cases is not None:
                chosen += [(size, own) for size in sparse if sizes is None or size in sizes]
            setting = Setting(
                batch=batch, tokens=tokens, step=step, dtype=options.dtype, device=options.device,
                threads=options.threads, **({"repeats": options.repeats} | (QUICK if options.quick else {})),
            )  # fmt: skip
            yield setting, chosen, options.thorough or (step, batch, tokens) in COMPILED


def usual_implementations(device: str) -> str:
    """What is worth measuring: what a layer chooses, and what it chooses among."""
    return "auto,sdpa" if device == "cpu" else "auto,fused,cudnn"


def tell(name: str, error: Exception) -> None:
    """Say what could not be measured."""
    print(f"  {name} not measured: {type(error).__name__}: {' '.join(str(error).split())[:160]}", flush=True)


def run(options: argparse.Namespace, records: list[RunRecord]) -> None:
    """Measure everything, and append each figure's record to the file and to `records` as soon as it is there."""
    begin, started = time.perf_counter(), begin_run()
    for setting, sizes, compile_ours in settings_of(options):
        seconds = time.perf_counter() - begin
        may_compile = options.compile and seconds < options.seconds
        print(f"{setting.batch} x {setting.tokens}, {setting.step} ({seconds:.0f} s so far)", flush=True)
        torch.compiler.reset()
        for row in sweep(
            setting,
            sizes,
            implementations=(options.implementations or usual_implementations(options.device)).split(","),
            compile_ordinary=may_compile,
            compile_ours=may_compile and compile_ours,
            extra=None if options.only_ours or setting.step == "decode" else one_key_rivals,
            skipped=tell,
        ):
            records.append(row.to_record("attention", run=started, commit=options.commit))
            append_record(options.output, records[-1])
            if options.verbose:
                rival = f"{row.rival.name} [{row.rival.implementation}]"
                print(f"  {rival}: {row.timing}, ratio {row.ratio:.3f}, operations {row.flop_ratio:.2f}", flush=True)


def summary(records: Sequence[RunRecord]) -> str:
    """For every case and pass, ordinary attention's time, and ratios by size with those of operations behind."""
    columns = sorted({size_of(record) for record in records} - {(0, 0)})
    heads = [f"{shared}{f'/{own}' if own else ''}" for shared, own in columns]
    lines = [f"{'ratio (operations)':26}" + "".join(f"{head:>21}" for head in heads)]
    for (step, batch, tokens), own in groups(records, case_of).items():
        (ordinary,) = best(own, ORDINARY)
        name = ordinary.config["asked"] + (", compiled" if ordinary.config["compiled"] else "")
        microseconds = ordinary.metrics["milliseconds"] * 1e3
        lines.append(f"{batch} x {tokens}, {step}: ordinary {microseconds:.1f} us ({name})")
        for title, figures in series(own):
            by_size = {size_of(record): record for record in figures}
            lines.append(f"    {title:22}" + "".join(f"{_cell(by_size.get(size)):>21}" for size in columns))
    return "\n".join(lines)


def _cell(record: RunRecord | None) -> str:
    if record is None:
        return "-"
    metrics, config = record.metrics, record.config
    how = f"{config['implementation'][:7]}{'+c' if config['compiled'] else ''}"
    return f"{metrics['ratio']:.3f} ({metrics['flop_ratio']:.2f}) {how}"


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON lines to append to")
    parser.add_argument("--cases", help="batch x tokens, with commas between: 32x128,8x2048")
    parser.add_argument(
        "--passes", default=",".join(PASSES), help="inference, training, decode, or some of them with commas between"
    )
    parser.add_argument("--sizes", help="only these shared sizes, with commas between")
    parser.add_argument("--dims-per-head", type=int, help=f"of sparse mixing, {DIMS_PER_HEAD} if not given")
    parser.add_argument(
        "--implementations", help="by which our layer is measured: auto,fused,cudnn, or auto,sdpa on a CPU"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, help="of a CPU")
    parser.add_argument("--repeats", type=int, default=25, help="samples of each")
    parser.add_argument("--quick", action="store_true", help="toy sizes, to see that everything runs")
    parser.add_argument("--thorough", action="store_true", help="compile our layer everywhere")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="compile nothing")
    parser.add_argument("--seconds", type=float, default=75, help="after so many, begin no case with compilation")
    parser.add_argument("--only-ours", action="store_true", help="leave out one key head in ordinary kernels")
    parser.add_argument("--commit", help="that the sources are of, where there is no checkout")
    parser.add_argument("--verbose", action="store_true", help="print every figure as it comes")
    options = parser.parse_args()
    unknown = set(options.passes.split(",")) - set(PASSES)
    if unknown:
        parser.error(f"--passes must be of {', '.join(PASSES)}, got {', '.join(sorted(unknown))}")
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device must be cpu where there is no CUDA device, got {options.device}")
    records: list[RunRecord] = []
    try:
        run(options, records)
    finally:  # what was measured counts, whatever came then
        if records:
            print(summary(records))


if __name__ == "__main__":
    main()
