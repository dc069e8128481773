"""The figures of docs/glue-results.md, the same bytes for the same records."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from glue_records import METHODS, TASKS, Key, Result, title_of
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from collab.records import RunRecord

_GREY, _INK = "#8a8a8a", "#222222"
_COLOURS = dict(
    zip(METHODS, ("#222222", "#D55E00", "#56B4E9", "#0072B2", "#009E73", "#E69F00", "#CC79A7"), strict=True)
)
_STYLE: Any = {
    "font.size": 9, "axes.edgecolor": _GREY, "axes.labelcolor": _INK, "text.color": _INK, "xtick.color": _INK,
    "ytick.color": _INK, "svg.fonttype": "none", "svg.hashsalt": "collab",
}  # fmt: skip
_DASHES = {"converted": (0, (4, 2)), "fine-tuned again": "-"}


def draw_recovery(results: Mapping[Key, Mapping[str, Result]], names: Mapping[str, str], path: Path) -> None:
    """A panel a model and task, a line a method: dashed as converted, solid fine-tuned again, bars over seeds."""
    panels = sorted(
        {(key[0], task) for key, tasks in results.items() if key[1] != "original" for task in tasks},
        key=lambda panel: (panel[0], list(TASKS).index(panel[1])),
    )
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    shown: set[str] = set()
    with rc_context(_STYLE):
        figure = Figure(figsize=(1.2 + 3.2 * columns, 0.9 + 2.6 * rows), facecolor="white", layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes, (model, task) in zip(grid.flat, panels, strict=False):
            shown |= _recovery_panel(axes, results, model, task)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        methods = [method for method in METHODS if method in shown]
        lines = [_line(method, names) for method in methods]
        lines += [
            Line2D([], [], color=_GREY, linestyle=dashes, label=stage)  # type: ignore[arg-type]
            for stage, dashes in _DASHES.items()
        ]
        figure.legend(handles=lines, loc="outside lower center", ncols=4, frameon=False, fontsize=8.5)
        _save(figure, path)


def _line(method: str, names: Mapping[str, str]) -> Line2D:
    """A method's entry of the legend."""
    return Line2D([], [], color=_COLOURS[method], label=names[method], linestyle=":" if method == "original" else "-")


def _recovery_panel(axes: Any, results: Mapping[Key, Mapping[str, Result]], model: str, task: str) -> set[str]:
    """One task of one model; the methods it shows."""
    lines: dict[tuple[str, str], list[tuple[float, Result]]] = {}
    shown = set()
    for (own, method, size, stage), tasks in results.items():
        if own != model or task not in tasks:
            continue
        if method == "original" and stage == "fine-tuned":
            axes.axhline(tasks[task].medians[0], color=_COLOURS[method], linewidth=0.9, linestyle=":")
            shown.add(method)
        elif size is not None and stage in _DASHES:
            lines.setdefault((method, stage), []).append((size, tasks[task]))
            shown.add(method)
    for (method, stage), points in lines.items():
        sizes, values = zip(*sorted(points, key=lambda point: point[0]), strict=True)
        medians = [value.medians[0] for value in values]
        below = [value.medians[0] - value.spread[0] for value in values]
        above = [value.spread[1] - value.medians[0] for value in values]
        axes.errorbar(
            sizes, medians, yerr=(below, above), fmt=".", linestyle=_DASHES[stage], color=_COLOURS[method],
            linewidth=1.3, elinewidth=0.7,
        )  # fmt: skip
    ticks = sorted({size for points in lines.values() for size, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_title(f"{task}, {title_of(model)}", fontsize=9.5, loc="left")
    axes.set_xlabel(_size_label(ticks))
    axes.set_ylabel(f"{TASKS[task][0][0].replace('_', ' ')} x 100")
    axes.spines[["top", "right"]].set_visible(False)
    return shown


def draw_decomposition_time(
    tensorly: Sequence[RunRecord], results: Mapping[Key, Mapping[str, Result]], names: Mapping[str, str], path: Path
) -> None:
    """A panel for each layer that TensorLy decomposed too, then one a model of the time its conversion took."""
    layers: dict[str, list[RunRecord]] = {}
    for record in tensorly:
        layers.setdefault(_layer(record), []).append(record)
    timed = {key: tasks for key, tasks in results.items() if key[3] == "converted" and key[1] != "pruned" and key[2]}
    models = list(dict.fromkeys(key[0] for key in timed))
    columns = min(3, len(layers) + len(models))
    rows = -(-(len(layers) + len(models)) // columns)
    with rc_context(_STYLE):
        figure = Figure(figsize=(1.2 + 3.4 * columns, 0.4 + 2.7 * rows), facecolor="white", layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes, (name, records) in zip(grid.flat, layers.items(), strict=False):
            points = sorted((record.metrics["rank"], record) for record in records)
            sizes = [size for size, _ in points]
            ours, theirs = (
                [record.metrics["seconds"] for _, record in points],
                [record.metrics["tensorly"]["seconds"] for _, record in points],
            )
            axes.plot(sizes, theirs, "o-", color=_COLOURS["paper"], label="TensorLy")
            axes.plot(sizes, ours, "o-", color=_COLOURS["shared"], label="ours")
            _time_axes(axes, sizes, f"{name}, one layer")
        for axes, model in zip(list(grid.flat)[len(layers) :], models, strict=False):
            for method in METHODS:
                taken: dict[float, list[float]] = {}
                for (own, its, size, _), tasks in timed.items():
                    if own == model and its == method and size is not None:
                        taken[size] = [seconds for result in tasks.values() for seconds in result.seconds]
                if taken:
                    sizes = sorted(taken)
                    means = [sum(taken[size]) / len(taken[size]) for size in sizes]
                    axes.plot(sizes, means, "o-", color=_COLOURS[method], label=names[method])
            sizes = sorted({key[2] for key in timed if key[0] == model and key[2]})
            _time_axes(axes, sizes, f"{title_of(model)}, whole")
        for axes in list(grid.flat)[len(layers) + len(models) :]:
            axes.set_visible(False)
        _save(figure, path)


def _layer(record: RunRecord) -> str:
    weights = record.config.get("weights") or {}
    return str(weights.get("model") or record.config.get("model", "another model"))


def _size_label(sizes: Sequence[float]) -> str:
    kinds = {type(size) for size in sizes}
    if len(kinds) > 1:
        raise ValueError(f"sizes of a model must be all dimensions or all shares of the full one, got {list(sizes)}")
    return "share of the key dimension" if kinds == {float} else "key dimension"


def _time_axes(axes: Any, sizes: Sequence[float], title: str) -> None:
    axes.set_yscale("log")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axes.set_title(title, fontsize=9.5, loc="left")
    axes.set_xlabel(_size_label(sizes))
    axes.set_ylabel("seconds")
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.minorticks_off()
    axes.legend(frameon=False, fontsize=8.5)


def _save(figure: Figure, path: Path) -> None:
    """Write whole or not at all, without the date and with no blanks at the end of lines."""
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text("\n".join(line.rstrip() for line in drawn.getvalue().splitlines()) + "\n", encoding="utf-8")
    draft.replace(path)
