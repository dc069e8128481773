"""Measure the plain implementations of attention on a CPU, and how far the automatic choice is from the best.

    python benchmarks/bench_cpu_paths.py run               # layers of BERT-base's and MiniLM's sizes, what is promised
    python benchmarks/bench_cpu_paths.py run --grid wide   # attention alone: more sizes, batches and masks
    python benchmarks/bench_cpu_paths.py judge             # from the records: how far the choice is from the best

Implementations take turns. On one thread the clock is that thread's own processor time, which other programs on the
machine hardly change; on more it is the wall's. What counts is the least of several rounds. Every case is recorded as
soon as it is done. `judge` asks the present rule: it tells what a change of the rule would mean without measuring.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import collab
from collab import ops
from collab.layer import start_dims
from collab.ops import ranking
from collab.records import RunRecord, append_record, provenance, read_records
from collab.table import format_table

RESULTS = Path(__file__).resolve().parent / "results" / "cpu-paths.jsonl"
PLAIN = ("sdpa", "padded", "matmul", "reference")
LAYERS = {"BERT-base": (12, 64), "MiniLM": (12, 32)}
"""Heads and the size of one; the width is their product."""

SHARED = (32, 64, 128, 192, 256, 384, 768)
LIMIT = 2**32
"""Scores times shared dimensions of a case, beyond which it is left out: it would take minutes."""

PROMISED = 1.1
"""The choice takes at most so many times as long as the best."""


def grid(name: str) -> Iterator[dict[str, Any]]:
    """The cases of a grid, each as the configuration that is recorded."""
    if name == "layers":
        what, sizes, masks = "layer", [(1, 128), (8, 128), (1, 1024)], ["none", "causal"]
    else:
        what, sizes = "attention", list(itertools.product((1, 8, 32), (1, 32, 128, 256, 512, 1024)))
        masks = ["none", "causal", "padding", "square"]
    shapes = list(LAYERS.items()) if name == "layers" else [*LAYERS.items(), ("wide heads", (8, 128))]
    for (layer, (heads, head_dim)), dtype, training in itertools.product(shapes, ("float32", "bfloat16"), (0, 1)):
        for mask, (batch, tokens), shared_dim in itertools.product(masks, sizes, SHARED):
            for own in (None, head_dim):
                fits = shared_dim <= heads * head_dim and (own is None or own < shared_dim)
                if fits and batch * heads * tokens**2 * shared_dim <= LIMIT:
                    yield {
                        "what": what, "layer": layer, "num_heads": heads, "head_dim": head_dim, "dtype": dtype,
                        "pass": "training" if training else "inference", "mask": mask, "batch": batch,
                        "queries": tokens, "keys": tokens, "shared_dim": shared_dim, "dims_per_head": own,
                    }  # fmt: skip


def mask_of(case: dict[str, Any], padding: bool) -> Tensor | None:
    """Which keys hold a token, for each sequence alike (batch, key), or for every query (batch, 1, query, key)."""
    if case["mask"] not in ("padding", "square"):
        return None
    batch, keys = case["batch"], case["keys"]
    lengths = torch.linspace(keys / 2, keys, batch).long()
    present = torch.arange(keys) < lengths[:, None]
    if padding:
        return present
    rows = 1 if case["mask"] == "padding" else case["queries"]
    return present[:, None, None].expand(batch, 1, rows, keys).contiguous()


def attention_call(case: dict[str, Any]) -> tuple[Callable[[str], Tensor], list[Tensor]]:
    """Attention of random queries, keys, values and mixing, by implementation; and what has gradients."""
    batch, heads, shared_dim, own = case["batch"], case["num_heads"], case["shared_dim"], case["dims_per_head"]
    options = {"dtype": getattr(torch, case["dtype"]), "generator": torch.Generator().manual_seed(0)}
    value = torch.randn(batch, case["keys"], heads, case["head_dim"], **options).transpose(1, 2)
    inputs = [
        torch.randn(batch, case["queries"], shared_dim, **options),
        torch.randn(batch, case["keys"], shared_dim + heads, **options),
        value,
        torch.randn(heads, own or shared_dim, **options),
    ]
    for part in inputs:
        part.requires_grad_(case["pass"] == "training")
    dims = None if own is None else start_dims(heads, shared_dim, own).to(ops.DIMS_DTYPE)
    settings = {"dims": dims, "mask": mask_of(case, False), "causal": case["mask"] == "causal"}

    def call(name: str) -> Tensor:
        return ops.attention(*inputs, scale=shared_dim**-0.5, **settings, implementation=name)[0]

    return call, inputs


def layer_call(case: dict[str, Any]) -> tuple[Callable[[str], Tensor], list[Tensor]]:
    """The same for a whole layer, projections and all, which says itself what it is to run."""
    torch.manual_seed(0)
    width = case["num_heads"] * case["head_dim"]
    layer = collab.CollaborativeAttention(
        width, case["num_heads"], case["shared_dim"], dims_per_head=case["dims_per_head"], mixing="normal",
        dtype=getattr(torch, case["dtype"]),
    )  # fmt: skip
    tokens = torch.randn(case["batch"], case["queries"], width, dtype=getattr(torch, case["dtype"]))
    tokens.requires_grad_(case["pass"] == "training")
    padding = mask_of(case, True)

    def call(name: str) -> Tensor:
        layer.implementation = name
        output: Tensor = layer(tokens, padding_mask=padding, causal=case["mask"] == "causal")
        return output

    return call, [tokens, *layer.parameters()]


def measure(case: dict[str, Any], rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Milliseconds of every round, by implementation; those take turns."""
    call, inputs = (attention_call if case["what"] == "attention" else layer_call)(case)

    def run(name: str) -> None:
        if case["pass"] == "training":
            output = call(name)
            torch.autograd.grad(output, inputs, output.detach())
        else:
            with torch.no_grad():
                call(name)

    for name in PLAIN:
        run(name)
    start = clock()
    run("matmul")
    repeats = max(1, int(0.005 / max(clock() - start, 1e-6)))
    times: dict[str, list[float]] = {name: [] for name in PLAIN}
    for _, name in itertools.product(range(rounds), PLAIN):
        start = clock()
        for _ in range(repeats):
            run(name)
        times[name].append((clock() - start) / repeats * 1e3)
    return times


def chosen(case: dict[str, Any]) -> str:
    """What the present rule chooses for a case on the processor it was measured on; its tensors take no memory."""
    call_options = {"dims": None, "mask": mask_of(case, False), "causal": case["mask"] == "causal"}
    heads, shared_dim, own = case["num_heads"], case["shared_dim"], case["dims_per_head"]
    shapes = [
        (case["batch"], case["queries"], shared_dim),
        (case["batch"], case["keys"], shared_dim + heads),
        (case["batch"], heads, case["keys"], case["head_dim"]),
        (heads, own or shared_dim),
    ]
    number = torch.zeros((), dtype=getattr(torch, case["dtype"]), requires_grad=case["pass"] == "training")
    if own is not None:
        call_options["dims"] = torch.zeros((), dtype=ops.DIMS_DTYPE).expand(heads, own)
    with mock.patch.object(ranking, "HAS_TILES", case["tiles"]):
        return ops.choose(*(number.expand(shape) for shape in shapes), **call_options)


def run(arguments: argparse.Namespace) -> None:
    """Measure every case of a grid and append its record."""
    torch.set_num_threads(arguments.threads)
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    source = provenance(0)
    wanted = set(arguments.only.split(",")) if arguments.only else set()
    for case in grid(arguments.grid):
        if not wanted <= {str(value) for value in case.values()}:
            continue
        case["tiles"] = ranking.HAS_TILES
        times = measure(case, arguments.rounds, clock)
        fastest = {name: min(rounds) for name, rounds in times.items()}
        medians = {name: sorted(rounds)[len(rounds) // 2] for name, rounds in times.items()}
        settings = {"threads": arguments.threads, "clock": "processor" if arguments.threads == 1 else "wall"}
        metrics = {"least_milliseconds": fastest, "median_milliseconds": medians, "chosen": chosen(case)}
        append_record(
            arguments.output, RunRecord(name="cpu-path", config=case | settings, metrics=metrics, provenance=source)
        )
        best = min(fastest.values())
        print(
            " ".join(str(value) for value in case.values()),
            {k: round(v / best, 2) for k, v in fastest.items()},
            flush=True,
        )


def least(records: Sequence[RunRecord]) -> list[tuple[dict[str, Any], dict[str, float]]]:
    """Every case recorded, with the least milliseconds by implementation of all times it was measured."""
    found: dict[str, tuple[dict[str, Any], dict[str, float]]] = {}
    for record in records:
        times = record.metrics["least_milliseconds"]
        case, before = found.setdefault(str(record.config), (record.config, times))
        found[str(record.config)] = case, {name: min(times[name], before[name]) for name in times}
    return list(found.values())


def judge(arguments: argparse.Namespace) -> None:
    """Print how far the present choice is from the best in every case recorded, the furthest first, and a summary."""
    rows, summary = [], {}
    for case, times in least(read_records(arguments.output)):
        name = chosen(case)
        best = min(times, key=lambda each: times[each])
        ratio = times[name] / times[best]
        promised = case["what"] == "layer"
        group = (
            case["what"],
            case["layer"],
            case["dtype"],
            case["pass"],
            "sparse" if case["dims_per_head"] else "dense",
        )
        summary.setdefault(group, []).append(ratio)
        size = f"{case['batch']} x {case['queries']}"
        rows.append([*group, case["mask"], size, case["shared_dim"], name, best, ratio, promised])
    rows.sort(key=lambda row: -float(row[-2]))
    header = [
        "what",
        "layer",
        "dtype",
        "pass",
        "mixing",
        "mask",
        "batch x tokens",
        "shared_dim",
        "runs",
        "best",
        "ratio",
    ]
    print(format_table(header, [row[:-1] for row in rows[: arguments.rows]]), end="\n\n")
    header = [
        "what",
        "layer",
        "dtype",
        "pass",
        "mixing",
        "cases",
        "median",
        "95 of 100",
        "largest",
        f"above {PROMISED}",
    ]
    lines = []
    for group, ratios in summary.items():
        ratios.sort()
        largest, above = ratios[-1], sum(ratio > PROMISED for ratio in ratios)
        lines.append([*group, len(ratios), ratios[len(ratios) // 2], ratios[int(0.95 * len(ratios))], largest, above])
    print(format_table(header, lines))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for action in (run, judge):
        command = commands.add_parser(action.__name__, help=action.__doc__)
        command.set_defaults(action=action)
        command.add_argument("--output", type=Path, default=RESULTS, help="file of records")
    running, judging = (commands.choices[name] for name in ("run", "judge"))
    running.add_argument("--grid", choices=("layers", "wide"), default="layers")
    running.add_argument("--threads", type=int, default=1)
    running.add_argument("--rounds", type=int, default=7)
    running.add_argument("--only", help="cases that have all these values, as BERT-base,float32,training")
    judging.add_argument("--rows", type=int, default=30, help="how many cases to print")
    arguments = parser.parse_args()
    arguments.action(arguments)


if __name__ == "__main__":
    main()
