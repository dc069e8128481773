"""A figure of what the class token attends to, before a conversion and after."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from collab.reporting.pictures import GLOW


def draw_maps(maps: Mapping[str, Sequence[Any]], path: Path, pictures: Sequence[Any] = ()) -> None:
    """Draw maps side by side, a row an image and a column a model. Needs matplotlib.

    Args:
        maps: name of a model -> for each image (row, column) numbers from 0 to 1.
        path: an .svg, .png or .pdf file.
        pictures: (height, width, 3) from 0 to 1 for each image, shown in a column of their own; they may be left out
            where images must not be passed on.
    """
    try:
        from matplotlib.colors import LinearSegmentedColormap, PowerNorm
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("figures need matplotlib: pip install matplotlib", name=error.name) from error
    if not maps:
        raise ValueError("maps must be of at least one model, got none")
    count = len(next(iter(maps.values())))
    columns = len(maps) + bool(pictures)
    figure = Figure(figsize=(1.35 * columns, 1.35 * count + 0.35), layout="constrained")
    panels = figure.subplots(count, columns, squeeze=False)
    orange = f"#{GLOW[0]:02x}{GLOW[1]:02x}{GLOW[2]:02x}"
    glow = LinearSegmentedColormap.from_list("glow", ["#ffffff", orange])
    norm = PowerNorm(0.5, vmin=0, vmax=1)  # little attention is seen beside much
    for row in range(count):
        cells = list(panels[row])
        for axes in cells:
            axes.set_axis_off()
        if pictures:
            cells.pop(0).imshow(pictures[row])
        for axes, (name, values) in zip(cells, maps.items(), strict=True):
            axes.imshow(values[row], cmap=glow, norm=norm, interpolation="nearest")
            if row == 0:
                axes.set_title(name, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    nothing = {"Date": None} if path.suffix == ".svg" else {}
    figure.savefig(path, dpi=160, metadata=nothing)
