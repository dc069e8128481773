"""The figure of an analysis: captured energy per head and of all heads, and how alike the heads of each layer are."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

FORMATS = (".png", ".svg", ".pdf")
_COLOURS = {"query": "#0072B2", "key": "#E69F00", "product": "#C8102E"}
_LABELS = {"query": "query matrix", "key": "key matrix", "product": "their product"}
_INK, _GREY = "#222222", "#8a8a8a"
_HEADING: dict[str, Any] = {"fontsize": 11, "fontweight": "bold", "x": 0.012, "ha": "left"}
_STYLE: Any = {
    "font.size": 9, "axes.edgecolor": _GREY, "axes.labelcolor": _INK, "text.color": _INK, "xtick.color": _INK,
    "ytick.color": _INK, "svg.fonttype": "none",
}  # fmt: skip


class Energy(Protocol):
    """Curves of the captured energy: see `collab.analysis.CapturedEnergy`."""

    @property
    def mean_head(self) -> tuple[float, ...]:
        """Mean over heads."""

    @property
    def concatenated(self) -> tuple[float, ...]:
        """Of all heads side by side."""


class Layer(Protocol):
    """What is drawn of a layer: see `collab.analysis.LayerAnalysis`."""

    @property
    def path(self) -> str:
        """Where it is."""

    @property
    def metric(self) -> str:
        """What energies are measured in."""

    @property
    def similarity(self) -> tuple[tuple[float, ...], ...]:
        """(head, head) cosines."""


def draw(layers: Sequence[Layer], path: str | os.PathLike[str]) -> None:
    """Draw layers to a file whose name ends in one of `FORMATS`."""
    check_figure(path)
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("a plot needs matplotlib: pip install matplotlib", name=error.name) from error
    columns = 8 if len(layers) > 6 else 6  # of maps, also where there are fewer: they keep their size
    rows = math.ceil(len(layers) / columns)
    below = 0.5 + 1.12 * rows * 11.0 / columns  # inches that the maps take
    with rc_context(_STYLE):
        figure = Figure(figsize=(11.5, 4.2 + below), facecolor="white", layout="constrained")
        parts: Any = figure.subfigures(2, 1, height_ratios=[4.2, below])
        top, bottom = parts
        metric = " and ".join(sorted({layer.metric for layer in layers}))
        figure.suptitle(f"Captured energy, in the metric of the {metric}", **_HEADING)
        left, right = top.subplots(1, 2, sharey=True)
        _curves(left, layers, "mean_head", "each head by itself")
        _curves(right, layers, "concatenated", "all heads side by side")
        left.set_ylabel("captured energy (share of squared singular values)")
        _legend(left, len(layers))
        _heat_maps(bottom, layers, rows, columns)
        figure.savefig(path, dpi=160)


def check_figure(path: str | os.PathLike[str]) -> None:
    """Refuse a file that cannot be drawn to."""
    target = Path(path)
    if target.suffix.lower() not in FORMATS:
        raise ValueError(f"a plot's file must end in one of {', '.join(FORMATS)}, got {target.name!r}")
    if not target.parent.is_dir():
        raise ValueError(f"a plot must go to a directory that exists, got {target}")


def _curves(axes: Any, layers: Sequence[Layer], name: str, title: str) -> None:
    """One thin line a layer and the mean of all in bold, for queries, keys and products."""
    by_role: dict[str, list[tuple[float, ...]]] = {
        role: [getattr(getattr(layer, role), name) for layer in layers] for role in _COLOURS
    }
    lengths = {len(curve) for curves in by_role.values() for curve in curves}
    longest = max(lengths)
    is_one_size = len(lengths) == 1
    for role, curves in by_role.items():
        stretched = [_stretch(curve, longest) for curve in curves]
        places = [(place if is_one_size else place / longest) for place in range(longest + 1)]
        for curve in stretched:
            axes.plot(places, curve, color=_COLOURS[role], linewidth=0.7, alpha=0.5)
        mean = [sum(values) / len(values) for values in zip(*stretched, strict=True)]
        axes.plot(places, mean, color=_COLOURS[role], linewidth=2.6)
    for share in (0.9, 0.99):
        axes.axhline(share, color=_GREY, linewidth=0.6, linestyle=(0, (4, 3)), zorder=0)
        axes.annotate(f"{share:.0%}", (0.008, share), xycoords=("axes fraction", "data"), va="bottom", color=_GREY,
                      fontsize=7.5)  # fmt: skip
    axes.set(xlim=(0, longest if is_one_size else 1), ylim=(0, 1.02), title=title)
    axes.set_xlabel("principal components" if is_one_size else "principal components, as a share of all")
    axes.title.set_fontsize(10)
    axes.spines[["top", "right"]].set_visible(False)


def _stretch(curve: tuple[float, ...], size: int) -> list[float]:
    """A curve from zero components on, at `size` + 1 places from its beginning to its end."""
    whole = (0.0, *curve)
    if len(curve) == size:
        return list(whole)
    found = []
    for place in range(size + 1):
        at = place * len(curve) / size
        low = min(int(at), len(curve) - 1)
        found.append(whole[low] + (at - low) * (whole[low + 1] - whole[low]))
    return found


def _legend(axes: Any, count: int) -> None:
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], color=colour, linewidth=2.6) for colour in _COLOURS.values()]
    labels = list(_LABELS.values())
    if count > 1:
        lines.append(Line2D([], [], color=_GREY, linewidth=0.7))
        labels.append("one layer (bold: mean of layers)")
    axes.legend(lines, labels, loc="lower right", frameon=False, fontsize=8.5)


def _heat_maps(figure: Any, layers: Sequence[Layer], rows: int, columns: int) -> None:
    """Cosines between the products of any two heads, a map a layer, all on one scale; the diagonal is left blank."""
    from matplotlib import colormaps

    maps = [
        [[math.nan if i == j else value for j, value in enumerate(row)] for i, row in enumerate(layer.similarity)]
        for layer in layers
    ]
    sizes = [abs(value) for one in maps for row in one for value in row if not math.isnan(value)]
    limit = max(0.05, math.ceil(max(sizes, default=0.0) * 20) / 20)
    palette = colormaps["RdBu_r"].with_extremes(bad="#e9e9e9")
    figure.suptitle("Cosine between the query/key products of two heads (grey: with itself)", **_HEADING)
    grid = figure.subplots(rows, columns, squeeze=False)
    drawn = None
    for axes, layer, values in zip(grid.flat, layers, maps, strict=False):
        drawn = axes.imshow(values, cmap=palette, vmin=-limit, vmax=limit, interpolation="nearest")
        axes.set_title(_short(layer.path), fontsize=7.5)
        last = len(values) - 1
        axes.set_xticks([0, last] if last else [0])
        axes.set_yticks([0, last] if last else [0])
        axes.tick_params(labelsize=7, length=2)
    for axes in grid.flat[len(layers) :]:
        axes.set_visible(False)
    if drawn is not None:
        bar = figure.colorbar(drawn, ax=list(grid.flat), shrink=0.85, aspect=14 * rows, pad=0.01)
        bar.ax.tick_params(labelsize=7.5)
        bar.outline.set_visible(False)


def _short(path: str) -> str:
    """The end of a path, as much as fits above a small map."""
    parts = path.split(".")
    while len(".".join(parts)) > 24 and len(parts) > 1:
        parts = parts[1:]
    return ".".join(parts) or "the module"
