"""The figure of measured layers: time beside ordinary attention's, along the shared size, and the floor below it."""

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from collab.analysis_plot import check_figure
from collab.records import RunRecord
from collab.speed_records import case_of, groups, latest, series

_GREY, _INK = "#8a8a8a", "#222222"
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_STYLE: Any = {
    "font.size": 9, "axes.edgecolor": _GREY, "axes.labelcolor": _INK, "text.color": _INK, "xtick.color": _INK,
    "ytick.color": _INK, "svg.fonttype": "none", "svg.hashsalt": "collab",
}  # fmt: skip
_COLUMNS = 3


def draw_speed(records: Sequence[RunRecord], path: str | os.PathLike[str]) -> None:
    """Draw records of `sweep` to a .png, .svg or .pdf file: a panel a case, a line for whatever was measured."""
    check_figure(path)
    shown = [record for record in latest(records) if record.config["shared_dim"]]
    if not shown:
        raise ValueError("a plot needs records of collaborative layers, got none")
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("a plot needs matplotlib: pip install matplotlib", name=error.name) from error
    panels = groups(shown, case_of)
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    colours = _Colours()
    with rc_context(_STYLE):
        figure = Figure(figsize=(1.2 + 3.4 * columns, 0.7 + 2.9 * rows), facecolor="white", layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes, (case, group) in zip(grid.flat, panels.items(), strict=False):
            _panel(axes, case, group, colours)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for row in grid:
            row[0].set_ylabel("time / ordinary attention's")
        figure.legend(**_legend(colours), loc="outside lower center", ncols=3, frameon=False, fontsize=8.5)
        drawn = io.BytesIO()
        figure.savefig(drawn, format=Path(path).suffix[1:].lower(), dpi=160)
    Path(path).write_bytes(drawn.getvalue())


class _Colours:
    """One a name, in every panel the same."""

    def __init__(self) -> None:
        self.by_name: dict[str, str] = {}

    def __getitem__(self, name: str) -> str:
        return self.by_name.setdefault(name, _COLOURS[len(self.by_name) % len(_COLOURS)])


def _panel(axes: Any, case: tuple[str, int, int], records: Sequence[RunRecord], colours: _Colours) -> None:
    """Lines over sizes: solid what was measured, dashed of the same colour the operations."""
    floors: dict[int, dict[int, float]] = {}
    for name, figures in series(records):
        for own, points in groups(figures, lambda record: record.config["dims_per_head"] or 0).items():
            title = _title(name) + (f", {own} dimensions a head" if own else "")
            line = sorted((record.config["shared_dim"], record) for record in points)
            sizes = [size for size, _ in line]
            ratios = [record.metrics["ratio"] for _, record in line]
            width = 2.2 if name == "auto" else 1.1
            axes.plot(sizes, ratios, "o-" if name == "auto" else ".-", color=colours[title], linewidth=width)
            floors.setdefault(own, {}).update({size: record.metrics["flop_ratio"] for size, record in line})
    for own, floor in floors.items():
        sizes = sorted(floor)
        dashes = (0, (1, 1.5)) if own else (0, (4, 2))
        axes.plot(sizes, [floor[size] for size in sizes], color=_INK, linewidth=1.2, linestyle=dashes, zorder=1)
    axes.axhline(1, color=_GREY, linewidth=0.8, zorder=0)
    step, batch, tokens = case
    axes.set_title(f"{batch} x {tokens:,} tokens, {step}", fontsize=9.5, loc="left")
    axes.set_xscale("log", base=2)
    ticks = sorted({size for floor in floors.values() for size in floor})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("shared_dim")
    axes.spines[["top", "right"]].set_visible(False)


def _title(name: str) -> str:
    return "collaborative attention" if name == "auto" else name


def _legend(colours: _Colours) -> dict[str, Any]:
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], color=colour, linewidth=2) for colour in colours.by_name.values()]
    floors = [
        Line2D([], [], color=_INK, linewidth=1.2, linestyle=(0, (4, 2))),
        Line2D([], [], color=_INK, linewidth=1.2, linestyle=(0, (1, 1.5))),
    ]
    labels = [*colours.by_name, "operations: the floor", "operations of sparse mixing"]
    return {"handles": [*lines, *floors], "labels": labels}
