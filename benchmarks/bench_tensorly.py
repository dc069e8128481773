"""Measure the decomposition: against TensorLy's parafac, on a GPU, and as layers grow.

    python benchmarks/bench_tensorly.py tensorly --weights FOLDER --ranks 384 256 128
    python benchmarks/bench_tensorly.py tensorly --layer 2 --ranks 192 128 64
    python benchmarks/bench_tensorly.py gpu --weights FOLDER
    python benchmarks/bench_tensorly.py scaling
    python benchmarks/bench_tensorly.py render

FOLDER holds what `train_base_size.py train` wrote: query and key weights of trained layers, 768 wide with 12 heads of
64. Every case is recorded as soon as it is done; `render` writes the tables and the plot of docs/decomposition.md from
the records, and measures nothing.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import collab
from collab.demo import demo_folder
from collab.records import RunRecord, append_record, provenance, read_records
from collab.sources import open_model
from collab.structure import host_at

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENT = ROOT / "docs" / "decomposition.md"
PICTURE = ROOT / "docs" / "decomposition.png"
END = "<!-- end -->\n"
HEADS = 12
WIDER = ((384, 12, 32, 192), (768, 12, 64, 384), (1536, 12, 128, 768), (3072, 12, 256, 1536))
MORE_HEADS = ((768, 12, 64, 384), (768, 24, 64, 384), (768, 48, 64, 384), (768, 96, 64, 384))
"""(width, heads, head size, rank) of two series: everything grows with the width, or heads alone grow."""

LARGE = (4096, 32, 128, 1024)
"""A layer of a language model of seven billion parameters."""

SWEEPS = (0, 1, 2, 4, 8, 16, 32, 64)
"""Limits on sweeps with which a layer is decomposed again, for the curve of error over seconds."""


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


def trained_layers(folder: Path | None) -> tuple[list[tuple[Tensor, Tensor]], dict[str, Any]]:
    """Query and key weights of every layer, and what they are of: a folder's model, or the demo's."""
    if folder is None:
        model = open_model(str(demo_folder()))
        heads = [host_at(site).read(site.module) for site in collab.find_attention(model)]
        return [(one.query.detach().float(), one.key.detach().float()) for one in heads], {"model": "MiniLM"}
    summary = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    outcome = {name: summary["outcome"][name] for name in ("steps", "seconds", "first_loss", "held_back_loss")}
    layers = layers_in(folder)
    return layers, {
        "model": f"{len(layers)} layers of BERT-base's size",
        "device": summary["provenance"]["device"],
    } | outcome


def against_tensorly(layer: tuple[Tensor, Tensor], rank: int, iterations: int) -> dict[str, Any]:
    """Both on the same layer, one after the other, each with its own settings: seconds, errors, error over seconds."""
    collab.decompose(layer[0][:, :, :64], layer[1][:, :, :64], 8, max_iterations=2)  # what first calls load
    factors, seconds = _timed(layer, rank, 100)
    theirs = tensorly_run(layer, rank, iterations)
    # A look at the clock after every sweep would need a way into `decompose`: instead it is called again, with a limit
    # on its sweeps, and every point of the curve is a whole call that ended there.
    calls = [(limit, *_timed(layer, rank, limit)) for limit in SWEEPS if limit < factors.iterations]
    calls.append((factors.iterations, factors, seconds))
    return {
        "rank": rank,
        "seconds": seconds,
        "error": factors.relative_error,
        "iterations": factors.iterations,
        "converged": factors.converged,
        "condition": factors.condition,
        "curve": [(took, found.relative_error) for _, found, took in calls],
        "as_good": as_good(layer, rank, theirs["error"], factors.history),
        "ratio": theirs["seconds"] / seconds,
        "tensorly": theirs,
    }


def _timed(layer: tuple[Tensor, Tensor], rank: int, limit: int) -> tuple[collab.QueryKeyFactors, float]:
    begin = time.perf_counter()
    factors = collab.decompose(*layer, rank, max_iterations=limit)
    return factors, time.perf_counter() - begin


def as_good(layer: tuple[Tensor, Tensor], rank: int, error: float, history: list[float]) -> dict[str, Any] | None:
    """The call with the fewest sweeps that ends at or below an error: how many, and its seconds."""
    for limit, value in enumerate(history):
        if value <= error:
            factors, seconds = _timed(layer, rank, limit)
            if factors.relative_error <= error:  # a call that ends there has its last sweep in float64
                return {"sweeps": limit, "seconds": seconds, "error": factors.relative_error}
    return None


def tensorly_run(layer: tuple[Tensor, Tensor], rank: int, iterations: int) -> dict[str, Any]:
    """TensorLy's parafac on the whole array, in float32, from random factors; making the array is timed by itself."""
    import tensorly
    from tensorly.decomposition import parafac

    tensorly.set_backend("pytorch")
    begin = time.perf_counter()
    whole = torch.einsum("hdq,hdk->hqk", *layer)
    forming = time.perf_counter() - begin
    curve: list[tuple[float, float]] = []

    def note(_: Any, error: Any) -> None:
        curve.append((time.perf_counter() - begin, float(error)))
        print(f"  rank {rank}: TensorLy {len(curve) - 1}, {curve[-1][0]:.1f} s, error {curve[-1][1]:.4f}", flush=True)

    begin = time.perf_counter()
    parafac(whole, rank, init="random", tol=1e-6, n_iter_max=iterations, random_state=0, callback=note)
    return {
        "seconds": time.perf_counter() - begin,
        "forming_seconds": forming,
        "error": curve[-1][1],
        "iterations": len(curve) - 1,  # it notes the error before the first one too
        "curve": curve,
    }


def on_gpu(layers: list[tuple[Tensor, Tensor]], rank: int) -> dict[str, Any]:
    """All layers at once on the GPU, after a short run to warm up; then the same on the CPU of that machine."""
    moved = [(query.cuda(), key.cuda()) for query, key in layers]
    collab.decompose_many(moved, [rank] * len(moved), max_iterations=3)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    found = collab.decompose_many(moved, [rank] * len(moved))
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    begin = time.perf_counter()
    on_cpu = collab.decompose_many(layers, [rank] * len(layers))
    return {
        "rank": rank,
        "layers": len(layers),
        "seconds": seconds,
        "errors": [one.relative_error for one in found],
        "iterations": [one.iterations for one in found],
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "cpu_seconds": time.perf_counter() - begin,
        "cpu_errors": [one.relative_error for one in on_cpu],
    }


_CASE = """
import json, resource, sys, time, torch, collab
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
width, heads, head_dim, rank, sweeps, threads = map(int, sys.argv[1:])
torch.set_num_threads(threads)
imported = peak()
generator = torch.Generator().manual_seed(0)
scale = torch.arange(1, width + 1) ** -0.5
query, key = (torch.randn(heads, head_dim, width, generator=generator) * scale for _ in range(2))
collab.decompose(query[:, :4, :64], key[:, :4, :64], 8, max_iterations=2)
begin = time.perf_counter()
factors = collab.decompose(query, key, rank, max_iterations=sweeps)
print(json.dumps({"seconds": time.perf_counter() - begin, "sweeps": factors.iterations, "peak_bytes": peak(),
                  "imported_bytes": imported, "error": factors.relative_error}))
"""
"""A process of its own, for its peak of memory to be its own: random weights whose inputs matter less and less."""


def cost(width: int, heads: int, head_dim: int, rank: int, *, sweeps: int = 10, threads: int = 2) -> dict[str, Any]:
    """Seconds and peak resident memory of a process that decomposes one layer of this shape."""
    sizes = map(str, (width, heads, head_dim, rank, sweeps, threads))
    done = subprocess.run([sys.executable, "-c", _CASE, *sizes], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"decomposing a layer of shape {(width, heads, head_dim, rank)} failed:\n{done.stderr}")
    measured: dict[str, Any] = json.loads(done.stdout)
    return {"width": width, "heads": heads, "head_dim": head_dim, "rank": rank} | measured


def exponent(sizes: list[float], values: list[float]) -> float:
    """The power of the size that values grow with: the slope of the least-squares line through their logarithms."""
    x, y = (torch.tensor(part, dtype=torch.float64).log() for part in (sizes, values))
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / x.square().sum())


def record(name: str, config: dict[str, Any], metrics: dict[str, Any], results: Path, device: str = "cpu") -> None:
    """Keep one case."""
    case = RunRecord(name=name, config=config, metrics=metrics, provenance=provenance(seed=0, device=device))
    append_record(results / f"{name}.jsonl", case)


def latest(path: Path) -> list[RunRecord]:
    """The newest record of every configuration, in the order of the first; none where there is no file."""
    if not path.is_file():
        return []
    newest = {json.dumps(one.config, sort_keys=True): one for one in read_records(path)}
    return list(newest.values())


def render_tensorly(records: list[RunRecord]) -> str:
    """Both side by side, a row a rank."""
    header = [
        "weights",
        "rank",
        "seconds",
        "error",
        "sweeps",
        "seconds to TensorLy's error",
        "TensorLy seconds",
        "its error",
    ]
    header += ["its iterations", "times faster", "seconds to form the array"]
    rows = []
    for one in records:
        ours, theirs = one.metrics, one.metrics["tensorly"]
        met = ours["as_good"]
        rows.append(
            [
                one.config["weights"]["model"],
                *(ours["rank"], f"{ours['seconds']:.2f}", f"{ours['error']:.4f}", ours["iterations"]),
                "" if met is None else f"{met['seconds']:.2f} ({met['sweeps']} sweeps)",
                *(f"{theirs['seconds']:.1f}", f"{theirs['error']:.4f}", theirs["iterations"]),
                f"{ours['ratio']:.0f}",
                "" if met is None else f"{theirs['seconds'] / met['seconds']:.0f}",
                f"{theirs['forming_seconds']:.2f}",
            ]
        )
    said = dict.fromkeys(_training(one.config["weights"]) for one in records if "steps" in one.config["weights"])
    notes = "".join(f"\n{note}\n" for note in said)
    return f"{table(header, rows)}\n![Error over seconds](decomposition.png)\n{notes}{origin(records)}"


def _training(weights: dict[str, Any]) -> str:
    """How a model was trained whose weights these are: what there is to share depends on it."""
    return (
        f"*{weights['model']}*: a language model trained by `train_base_size.py` for {weights['steps']:,} steps, "
        f"{weights['seconds'] / 60:.0f} minutes on {weights['device']}, from a loss of {weights['first_loss']:.2f} to "
        f"{weights['held_back_loss']:.2f} on tokens held back."
    )


def render_gpu(records: list[RunRecord]) -> str:
    """All layers at once, a row a rank."""
    header = ["rank", "layers", "seconds, all layers", "mean error", "peak GiB", "CPU seconds", "errors differ by"]
    rows = []
    for m in (one.metrics for one in records):
        apart = max(abs(one - other) for one, other in zip(m["errors"], m["cpu_errors"], strict=True))
        mean = sum(m["errors"]) / len(m["errors"])
        peak = f"{m['peak_bytes'] / 2**30:.2f}"
        rows.append(
            [
                m["rank"],
                m["layers"],
                f"{m['seconds']:.2f}",
                f"{mean:.4f}",
                peak,
                f"{m['cpu_seconds']:.1f}",
                f"{apart:.1e}",
            ]
        )
    return table(header, rows) + origin(records)


def render_scaling(records: list[RunRecord]) -> str:
    """Cost by shape, and the powers it grows with."""
    header = ["width", "heads", "head size", "rank", "sweeps", "seconds", "peak GiB, whole process", "beyond imports"]
    cases = {tuple(one.config["shape"]): one.metrics for one in records}
    rows = [
        [
            *(m["width"], m["heads"], m["head_dim"], m["rank"], m["sweeps"], f"{m['seconds']:.1f}"),
            *(f"{part / 2**30:.2f}" for part in (m["peak_bytes"], m["peak_bytes"] - m["imported_bytes"])),
        ]
        for m in cases.values()
    ]
    said = []
    for name, series in (("width", WIDER), ("heads", MORE_HEADS)):
        part = [cases[shape] for shape in series if shape in cases]
        if len(part) > 1:
            sizes = [float(m[name]) for m in part]
            costs = ([m["seconds"] for m in part], [m["peak_bytes"] - m["imported_bytes"] for m in part])
            seconds, memory = (exponent(sizes, values) for values in costs)
            # Small layers are bound by other things, which makes the fit look better than what is to come.
            last_seconds, last_memory = (exponent(sizes[-2:], values[-2:]) for values in costs)
            said.append(
                f"seconds as {name}^{seconds:.2f}, memory beyond imports as {name}^{memory:.2f} ({name} from "
                f"{sizes[0]:,.0f} to {sizes[-1]:,.0f}; {last_seconds:.2f} and {last_memory:.2f} over the last step)"
            )
    imports = max(m["imported_bytes"] for m in cases.values()) / 2**30
    text = f"Growth, by least squares on logarithms: {'; '.join(said)}. Imports take {imports:.2f} GiB."
    return f"{table(header, rows)}\n{text}\n{origin(records)}"


RENDERED = {"tensorly": render_tensorly, "gpu": render_gpu, "scaling": render_scaling}
"""What writes the table of each verb."""


def begin_of(verb: str) -> str:
    """The line before a table."""
    return f"<!-- written by benchmarks/bench_tensorly.py: {verb} -->\n"


def put_between(begin: str, text: str, document: Path = DOCUMENT) -> None:
    """Replace what stands between a line of a document and the next end."""
    before, after = document.read_text(encoding="utf-8").split(begin)
    document.write_text(before + begin + text + END + after.split(END, 1)[1], encoding="utf-8")


def render(results: Path = RESULTS) -> None:
    """Write every table that has records, and the plot."""
    for verb, rendered in RENDERED.items():
        records = latest(results / f"decomposition-{verb}.jsonl")
        if records:
            put_between(begin_of(verb), rendered(records))
            if verb == "tensorly":
                draw([one.metrics | {"name": one.config["weights"]["model"]} for one in records])


def draw(cases: list[dict[str, Any]], target: Path = PICTURE) -> None:
    """Error over seconds of both, a panel a rank."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(3, len(cases))
    rows = -(-len(cases) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(4 * columns, 3.2 * rows), squeeze=False)
    for axis in axes.flat[len(cases) :]:
        axis.remove()
    for axis, case in zip(axes.flat, cases, strict=False):
        axis.plot(*zip(*case["curve"], strict=True), marker=".", label="collab")
        # Random factors are worse than none at first, by far: such points would leave no room for the others.
        theirs = [(seconds, error) for seconds, error in case["tensorly"]["curve"] if error < 1]
        axis.plot(*zip(*theirs, strict=True), label="TensorLy parafac")
        axis.set(xscale="log", xlabel="seconds", ylabel="relative error", title=f"{case['name']}, rank {case['rank']}")
        axis.legend()
    figure.tight_layout()
    figure.savefig(target, dpi=90)
    pyplot.close(figure)


def table(header: list[str], rows: list[list[Any]]) -> str:
    """A Markdown table, numbers to the right."""
    lines = [header, ["---:"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def origin(records: list[RunRecord]) -> str:
    """Where the numbers of some records come from, as a line."""
    origins = [one.provenance for one in records]
    commits = sorted({_short(one["commit"]) for one in origins})
    devices = sorted({one["device"] for one in origins})
    versions = sorted({f"torch {one['versions']['torch']}" for one in origins})
    return f"\nCommit {', '.join(commits)}; {'; '.join(devices)}; {', '.join(versions)}.\n"


def _short(commit: str | None) -> str:
    name, changed, _ = (commit or "unknown").partition("+changes")
    return name[:12] + changed


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=[*RENDERED, "render"])
    parser.add_argument("--weights", type=Path, help="folder of trained weights; tensorly without it: the demo's model")
    parser.add_argument("--layer", type=int, default=6, help="which layer TensorLy is compared on")
    parser.add_argument("--ranks", type=int, nargs="+", default=[384, 256, 128])
    parser.add_argument("--iterations", type=int, default=100, help="limit of TensorLy's")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.verb == "gpu" and options.weights is None:
        parser.error(f"{options.verb} needs --weights")
    if options.verb == "render":
        render(options.results)
    elif options.verb == "scaling":
        for shape in dict.fromkeys([*WIDER, *MORE_HEADS, LARGE]):
            case = cost(*shape, threads=options.threads)
            print(case, flush=True)
            settings = {"shape": list(shape), "threads": options.threads}
            record("decomposition-scaling", settings, case, options.results)
    else:
        measure(options)


def measure(options: argparse.Namespace) -> None:
    """The cases that need trained weights, a rank each."""
    layers, weights = trained_layers(options.weights)
    for rank in options.ranks:
        if options.verb == "gpu":
            case, settings = on_gpu(layers, rank), {"rank": rank}
        else:
            case = against_tensorly(layers[options.layer], rank, options.iterations)
            settings = {"layer": options.layer, "rank": rank, "iterations": options.iterations, "weights": weights}
        settings["threads"] = options.threads
        print(f"rank {rank}: {case['seconds']:.2f} s", {k: v for k, v in case.items() if k != "tensorly"}, flush=True)
        record(
            f"decomposition-{options.verb}", settings, case, options.results, "cuda" if options.verb == "gpu" else "cpu"
        )


if __name__ == "__main__":
    main()
