"""Measure the decomposition: against TensorLy's parafac, on a GPU, and as layers grow; write docs/decomposition.md's tables.

    python benchmarks/bench_tensorly.py tensorly --weights FOLDER --ranks 384 256 128
    python benchmarks/bench_tensorly.py gpu --weights FOLDER
    python benchmarks/bench_tensorly.py scaling
    python benchmarks/bench_tensorly.py render

FOLDER holds what `train_base_size.py train` wrote: query and key weights of trained layers 768 wide with 12 heads of 64.
Every case is recorded as soon as it is done.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import collab
from collab.records import RunRecord, append_record, provenance, read_records

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENT = ROOT / "docs" / "decomposition.md"
BEGIN, END = "<!-- written by benchmarks/bench_tensorly.py -->\n", "<!-- end -->\n"
HEADS = 12
SHAPES = ((768, 12), (1536, 12), (3072, 12), (768, 24), (768, 48))
"""(width, heads) whose cost is measured; heads have width / 12 dimensions where the width grows, 64 where heads do."""


def layers_in(folder: Path) -> list[tuple[Tensor, Tensor]]:
    """Query and key weights (head, head_dim, in) of every layer, in float32."""
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("query-key-*.safetensors")):
        tensors |= load_file(file)
    numbers = sorted({int(name.split(".")[1]) for name in tensors})
    if not numbers:
        raise ValueError(f"{folder} must hold files query-key-*.safetensors, got none")
    parts = [
        [tensors[f"layers.{n}.{role}"].float().unflatten(0, (HEADS, -1)) for role in ("query", "key")] for n in numbers
    ]
    return [(query, key) for query, key in parts]


def against_tensorly(layer: tuple[Tensor, Tensor], rank: int, iterations: int) -> dict[str, Any]:
    """Both on the same layer, one after the other: seconds, errors, and error over seconds."""
    import tensorly
    from tensorly.decomposition import parafac

    tensorly.set_backend("pytorch")
    query, key = layer
    collab.decompose(query[:, :, :64], key[:, :, :64], 8, max_iterations=2)  # what first calls load does not count
    begin = time.perf_counter()
    ours = collab.decompose(query, key, rank)
    seconds = time.perf_counter() - begin
    begin = time.perf_counter()
    start = collab.decompose(query, key, rank, max_iterations=0)
    start_seconds = time.perf_counter() - begin
    whole = torch.einsum("hdq,hdk->hqk", query, key)
    curve: list[tuple[float, float]] = []
    begin = time.perf_counter()

    def note(_: Any, error: Any) -> None:
        curve.append((time.perf_counter() - begin, float(error)))
        print(f"  rank {rank}: TensorLy {len(curve)}, {curve[-1][0]:.1f} s, error {curve[-1][1]:.4f}", flush=True)

    parafac(whole, rank, init="random", tol=1e-6, n_iter_max=iterations, random_state=0, callback=note)
    theirs = time.perf_counter() - begin
    step = (seconds - start_seconds) / max(1, ours.iterations)
    return {
        "rank": rank,
        "seconds": seconds,
        "error": ours.relative_error,
        "iterations": ours.iterations,
        "converged": ours.converged,
        "condition": ours.condition,
        "curve": [(start_seconds + step * i, error) for i, error in enumerate(ours.history)],
        "start_error": start.relative_error,
        "tensorly_seconds": theirs,
        "tensorly_error": curve[-1][1],
        "tensorly_iterations": len(curve),
        "tensorly_curve": curve,
        "ratio": theirs / seconds,
    }


def on_gpu(layers: list[tuple[Tensor, Tensor]], rank: int) -> dict[str, Any]:
    """All layers at once on the GPU, after one run to warm up; and the same layers' errors on the CPU's arithmetic."""
    moved = [(query.cuda(), key.cuda()) for query, key in layers]
    collab.decompose_many(moved, [rank] * len(moved), max_iterations=3)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    found = collab.decompose_many(moved, [rank] * len(moved))
    torch.cuda.synchronize()
    return {
        "rank": rank,
        "layers": len(layers),
        "seconds": time.perf_counter() - begin,
        "errors": [one.relative_error for one in found],
        "iterations": [one.iterations for one in found],
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


_CASE = """
import json, resource, sys, time, torch, collab
width, heads, head_dim, rank, sweeps = map(int, sys.argv[1:])
generator = torch.Generator().manual_seed(0)
scale = torch.arange(1, width + 1) ** -0.5
query, key = (torch.randn(heads, head_dim, width, generator=generator) * scale for _ in range(2))
begin = time.perf_counter()
factors = collab.decompose(query, key, rank, max_iterations=sweeps)
seconds = time.perf_counter() - begin
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"width": width, "heads": heads, "head_dim": head_dim, "rank": rank, "sweeps": factors.iterations,
                  "seconds": seconds, "peak_bytes": peak, "error": factors.relative_error}))
"""


def cost(width: int, heads: int, head_dim: int, rank: int, sweeps: int = 10) -> dict[str, Any]:
    """Seconds and peak resident memory of a process that decomposes one layer of this shape."""
    sizes = map(str, (width, heads, head_dim, rank, sweeps))
    done = subprocess.run([sys.executable, "-c", _CASE, *sizes], capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def record(name: str, config: dict[str, Any], metrics: dict[str, Any], results: Path, device: str = "cpu") -> None:
    """Keep one case."""
    case = RunRecord(name=name, config=config, metrics=metrics, provenance=provenance(seed=0, device=device))
    append_record(results / f"{name}.jsonl", case)


def render(results: Path = RESULTS) -> str:
    """The tables, from the last record of every case."""
    parts = []
    compared = _last(results / "decomposition-tensorly.jsonl")
    if compared:
        rows = [
            [m["rank"], f"{m['seconds']:.2f}", f"{m['error']:.4f}", f"{m['iterations']}", f"{m['tensorly_seconds']:.1f}",
             f"{m['tensorly_error']:.4f}", f"{m['tensorly_iterations']}", f"{m['ratio']:.0f}"]
            for m in (one.metrics for one in compared)
        ]  # fmt: skip
        header = [
            "rank",
            "seconds",
            "error",
            "sweeps",
            "TensorLy seconds",
            "TensorLy error",
            "iterations",
            "times faster",
        ]
        parts.append(_table(header, rows) + _origin(compared[-1]) + "\n![Error over seconds](decomposition.png)\n")
    gpu = _last(results / "decomposition-gpu.jsonl")
    if gpu:
        rows = [
            [m["rank"], m["layers"], f"{m['seconds']:.2f}", f"{sum(m['errors']) / len(m['errors']):.4f}",
             f"{m['peak_bytes'] / 2**30:.2f}"]
            for m in (one.metrics for one in gpu)
        ]  # fmt: skip
        parts.append(_table(["rank", "layers", "seconds, all", "mean error", "GiB"], rows) + _origin(gpu[-1]))
    grown = _last(results / "decomposition-scaling.jsonl")
    if grown:
        rows = [
            [m["width"], m["heads"], m["head_dim"], m["rank"], m["sweeps"], f"{m['seconds']:.1f}",
             f"{m['peak_bytes'] / 2**30:.2f}"]
            for m in (one.metrics for one in grown)
        ]  # fmt: skip
        header = ["width", "heads", "head size", "rank", "sweeps", "seconds", "peak GiB, whole process"]
        parts.append(_table(header, rows) + _exponents([one.metrics for one in grown]) + _origin(grown[-1]))
    return "\n".join(parts)


def _exponents(cases: list[dict[str, Any]]) -> str:
    by = {(case["width"], case["heads"]): case["seconds"] for case in cases}
    wide, many = (by.get(key) for key in ((3072, 12), (768, 48)))
    if wide is None or many is None:
        return ""
    width = math.log(wide / by[1536, 12]) / math.log(2)
    heads = math.log(many / by[768, 24]) / math.log(2)
    return f"\nSeconds grow as width^{width:.1f} (from 1,536 to 3,072, head size in step) and heads^{heads:.1f} (24 to 48).\n"


def draw(results: Path = RESULTS, target: Path = ROOT / "docs" / "decomposition.png") -> None:
    """Error over seconds of both, a panel a rank."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = [one.metrics for one in _last(results / "decomposition-tensorly.jsonl")]
    figure, axes = pyplot.subplots(1, len(cases), figsize=(4 * len(cases), 3.2), squeeze=False)
    for axis, case in zip(axes[0], cases, strict=True):
        axis.plot(*zip(*case["curve"], strict=True), label="collab")
        axis.plot(*zip(*case["tensorly_curve"], strict=True), label="TensorLy parafac")
        axis.set(xscale="log", xlabel="seconds", ylabel="relative error", title=f"rank {case['rank']}")
        axis.legend()
    figure.tight_layout()
    figure.savefig(target, dpi=110)


def _last(path: Path) -> list[RunRecord]:
    """The newest record of every configuration, in the order of the first."""
    if not path.is_file():
        return []
    newest = {json.dumps(one.config, sort_keys=True): one for one in read_records(path)}
    return list(newest.values())


def _table(header: list[str], rows: list[list[Any]]) -> str:
    lines = [header, ["---:"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def _origin(case: RunRecord) -> str:
    origin = case.provenance
    return (
        f"\nCommit {(origin['commit'] or 'unknown')[:12]}, {origin['device']}, torch {origin['versions']['torch']}.\n"
    )


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["tensorly", "gpu", "scaling", "render"])
    parser.add_argument("--weights", type=Path, help="folder of trained weights")
    parser.add_argument("--layer", type=int, default=6, help="which layer TensorLy is compared on")
    parser.add_argument("--ranks", type=int, nargs="+", default=[384, 256, 128])
    parser.add_argument("--iterations", type=int, default=100, help="limit of TensorLy's")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.verb == "tensorly":
        layer = layers_in(options.weights)[options.layer]
        for rank in options.ranks:
            case = against_tensorly(layer, rank, options.iterations)
            print({name: value for name, value in case.items() if "curve" not in name}, flush=True)
            settings = {
                "layer": options.layer,
                "rank": rank,
                "iterations": options.iterations,
                "threads": options.threads,
            }
            record("decomposition-tensorly", settings, case, options.results)
    elif options.verb == "gpu":
        for rank in options.ranks:
            case = on_gpu(layers_in(options.weights), rank)
            print(case, flush=True)
            record("decomposition-gpu", {"rank": rank}, case, options.results, "cuda")
    elif options.verb == "scaling":
        shapes = [(width, heads, 64 if heads != HEADS else width // HEADS, width // 2) for width, heads in SHAPES]
        for shape in [*shapes, (4096, 32, 128, 1024)]:
            case = cost(*shape)
            print(case, flush=True)
            record("decomposition-scaling", {"shape": list(shape)}, case, options.results)
    else:
        text = DOCUMENT.read_text(encoding="utf-8")
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        DOCUMENT.write_text(before + BEGIN + render() + END + after, encoding="utf-8")
        draw()


if __name__ == "__main__":
    main()
