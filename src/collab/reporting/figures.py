"""The figures of a report, drawn from its facts with matplotlib: SVG that takes its page's colours, and PNG."""

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from collab.reporting.pictures import heat

NAMES = ("spectra-heads", "spectra-all", "errors", "sizes", "mixing", "attention")
_INK = "#24292e"
_ROLES = {"query": ("#2680dc", "queries"), "key": ("#c77d0a", "keys"), "product": ("#d64545", "their product")}
_SHARED, _ALONE = "#2680dc", "#c77d0a"
_STYLE: Any = {
    "font.size": 9.5, "axes.edgecolor": _INK, "axes.labelcolor": _INK, "text.color": _INK, "xtick.color": _INK,
    "ytick.color": _INK, "axes.linewidth": 0.6, "svg.fonttype": "none", "svg.hashsalt": "collab",
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "legend.fontsize": 8.5,
}  # fmt: skip
_PANEL = (4.5, 2.9)
"""Inches of one panel: at the width of a phone its text is still read."""

_MOST_LAYERS = 6
"""Layers of the figure of attention, at most."""

_ADAPTIVE = (
    f"<style>svg{{color:{_INK};background:#fff}}@media (prefers-color-scheme:dark)"
    "{svg{color:#d6dae0;background:#15181c}}</style>"
)


@dataclass(frozen=True)
class Drawing:
    """One figure.

    Attributes:
        inline: SVG in the colour of the text around it, to be put into a page.
        svg: the same as a file of its own, light or dark as its reader likes.
        png: the same in black on white.
    """

    inline: str
    svg: str
    png: bytes


def draw_all(facts: Mapping[str, Any]) -> dict[str, Drawing]:
    """Every figure that these facts allow, by its name. Needs matplotlib."""
    try:
        from matplotlib import rc_context
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("figures need matplotlib: pip install matplotlib", name=error.name) from error
    with rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # of tokens in scripts the PNG cannot show
        return {name: _finish(name, figure) for name, figure in _figures(facts)}


def _figures(facts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    if "spectra" in facts:
        yield "spectra-heads", _spectra(facts["spectra"]["curves"], "heads")
        yield "spectra-all", _spectra(facts["spectra"]["curves"], "all")
    layers = facts.get("layers", [])
    if any(row["error"] is not None for row in layers):
        yield "errors", _errors(layers)
    if layers:
        yield "sizes", _sizes(layers)
    if "mixing" in facts:
        yield "mixing", _mixing(facts["mixing"]["layers"])
    if "attention" in facts:
        yield "attention", _attention(facts["attention"]["layers"])


def _finish(name: str, figure: Any) -> Drawing:
    text, image = io.StringIO(), io.BytesIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    figure.savefig(image, format="png", dpi=160, facecolor="white")
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    # Names are unique in a file, not yet in a page of several.
    for pattern in (r'(\bid=")', r'(href="#)', r"(url\(#)"):
        svg = re.sub(pattern, rf"\g<1>{name}-", svg)
    svg = svg.replace(_INK, "currentColor")
    svg = re.sub(r"(font: [\d.]+px) [^;\"]*", r"\1 system-ui, sans-serif", svg)
    head, _, body = svg.partition(">")
    inline = re.sub(r' (width|height)="[^"]*pt"', "", head) + ">" + body
    return Drawing(inline, f"{head}>{_ADAPTIVE}{body}", image.getvalue())


def _figure(size: tuple[float, float] = _PANEL) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=size, layout="constrained")


def _spectra(curves: Mapping[str, Any], kind: str) -> Any:
    """Captured energy against components, mean over layers: before dashed, after in full."""
    figure = _figure()
    axes = figure.subplots()
    for role, (colour, label) in _ROLES.items():
        for when, style in (("before", (0, (2.5, 1.8))), ("after", "-")):
            if curves[when] is not None:
                line = curves[when][role][kind]
                shown = label if when == "after" else None
                axes.plot(line["components"], line["energy"], color=colour, linestyle=style, linewidth=1.7, label=shown)
    for share in (0.9, 1.0):
        axes.axhline(share, color=_INK, linewidth=0.5, alpha=0.35, zorder=0)
    if curves["before"] is not None:
        axes.plot([], [], color=_INK, linestyle=(0, (2.5, 1.8)), linewidth=1.2, label="before")
        axes.plot([], [], color=_INK, linewidth=1.2, label="after")
    longest = max(one[role][kind]["components"][-1] for one in curves.values() if one for role in _ROLES)
    axes.set(xlim=(0, longest), ylim=(0, 1.03), xlabel="principal components", ylabel="captured energy")
    axes.legend(loc="lower right")
    return figure


def _errors(layers: Sequence[Mapping[str, Any]]) -> Any:
    """Error of each layer, with sharing and without."""
    figure = _figure()
    axes = figure.subplots()
    for name, colour, label, face in (
        ("unshared_error", _ALONE, "each head by itself", "none"), ("error", _SHARED, "heads that share", _SHARED),
    ):  # fmt: skip
        known = [(row["layer"], row[name]) for row in layers if row.get(name) is not None]
        if known:
            axes.plot(*zip(*known, strict=True), color=colour, marker="o", markersize=4.5, markerfacecolor=face,
                      linewidth=1.1, label=label)  # fmt: skip
    axes.set(xlabel="layer", ylabel="relative error", xlim=(layers[0]["layer"] - 0.4, layers[-1]["layer"] + 0.4))
    axes.set_ylim(0, max(axes.get_ylim()[1] * 1.25, 1e-6))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(loc="upper left", ncols=2)
    return figure


def _sizes(layers: Sequence[Mapping[str, Any]]) -> Any:
    """Dimensions of each layer: of its heads side by side, shared, and used by a head."""
    figure = _figure()
    axes = figure.subplots()
    at = [row["layer"] for row in layers]
    axes.bar(at, [row["full_dim"] for row in layers], color=_INK, alpha=0.16, width=0.72, label="heads x head size")
    axes.bar(at, [row["shared_dim"] for row in layers], color=_SHARED, width=0.72, label="shared")
    means = [row["effective_dims"]["mean"] for row in layers]
    axes.plot(at, means, color=_INK, marker="D", markersize=4, linestyle="none", label="a head uses, effectively")
    axes.set(xlabel="layer", ylabel="dimensions", xlim=(at[0] - 0.6, at[-1] + 0.6))
    axes.set_ylim(0, 1.28 * max(row["full_dim"] for row in layers))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(loc="upper left", ncols=3, columnspacing=0.9, handletextpad=0.4, handlelength=1.2)
    return figure


def _mixing(layers: Sequence[Mapping[str, Any]]) -> Any:
    """Mixing of each layer, before and after."""
    figure = _figure((9.0, 0.5 + 0.85 * len(layers)))
    ratios = [layers[0]["full_dim"], max(row["shared_dim"] for row in layers)]
    grid = figure.subplots(len(layers), 2, squeeze=False, width_ratios=ratios)
    for row, (left, right) in zip(layers, grid, strict=True):
        for axes, pixels in (
            (left, heat(blocks(row["heads"], row["full_dim"]))),
            (right, heat(torch.tensor(row["weights"]))),
        ):
            _image(axes, pixels, aspect="auto")
        left.set_ylabel(f"layer {row['layer']}", rotation=0, ha="right", va="center")
    grid[0][0].set_title("before: each head in dimensions of its own")
    grid[0][1].set_title("after: shared")
    return figure


def _attention(layers: Sequence[Mapping[str, Any]]) -> Any:
    """Attention of some layers, mean over heads, before and after."""
    count = min(len(layers), _MOST_LAYERS)
    shown = [layers[place * len(layers) // count] for place in range(count)]
    names = [name for name in ("original", "converted") if all(layer[name] is not None for layer in shown)]
    figure = _figure((2.4 * count + 0.6, 2.6 * len(names) + 0.4))
    grid = figure.subplots(len(names), count, squeeze=False)
    for column, layer in enumerate(shown):
        means = [torch.tensor(layer[name]).mean(0) for name in names]
        largest = max(float(mean.max()) for mean in means) or 1.0
        for axes, mean, name in zip(grid[:, column], means, names, strict=True):
            _image(axes, heat(mean / largest), aspect="equal")
            axes.set_title(f"layer {layer['layer']}, {name}", fontsize=8)
    tokens = shown[0].get("queries", [])
    for axes in grid[:, 0]:
        axes.set_yticks(range(len(tokens)), [_plain(token) for token in tokens], fontsize=6)
    return figure


def blocks(heads: int, full_dim: int) -> Tensor:
    """(head, dimension): ones on each head's own block, as ordinary heads are."""
    size = full_dim // heads
    return torch.eye(heads).repeat_interleave(size, dim=1)


def _image(axes: Any, pixels: Tensor, aspect: str) -> None:
    axes.imshow(pixels.numpy().astype("uint8"), aspect=aspect, interpolation="none")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[["top", "right"]].set_visible(True)
    for spine in axes.spines.values():
        spine.set_alpha(0.4)


def _plain(token: str) -> str:
    """A token that matplotlib does not take for mathematics."""
    return token.replace("$", r"\$")[:14]
