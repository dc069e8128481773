"""Measure what the figures of the documents show on a real sentence encoder, keep the record, and draw them from it.

    python benchmarks/figures.py run       measure, append a record, draw the figures
    python benchmarks/figures.py render    draw the figures from the last record

Figures go to docs/figures as SVG, and into docs/maths.md between markers, with a line that says what they are of.
"""

import argparse
import copy
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from matplotlib import colormaps, rc_context
from matplotlib.figure import Figure

import collab
from collab.analysis_plot import draw
from collab.demo import PACKAGE, demo_folder
from collab.layer import head_blocks
from collab.records import RunRecord, append_record, provenance, read_records
from collab.sources import open_model

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "benchmarks" / "results" / "figures.jsonl"
FOLDER = ROOT / "docs" / "figures"
DOCUMENT = ROOT / "docs" / "maths.md"
END = "<!-- end -->\n"

COST_SIZES = (32, 64, 128, 256)
LENGTHS = tuple(2**power for power in range(4, 15))
MIXING_SIZE = 64
_INK, _GREY = "#222222", "#8a8a8a"
_STYLE: Any = {
    "font.size": 9, "axes.edgecolor": _GREY, "axes.labelcolor": _INK, "text.color": _INK, "xtick.color": _INK,
    "ytick.color": _INK, "svg.fonttype": "none", "svg.hashsalt": "collab", "svg.image_inline": True,
}  # fmt: skip


def measure() -> RunRecord:
    """Everything the figures show, of one model."""
    model = open_model(str(demo_folder()))
    analysis = collab.analyze(model)
    layers = [
        {
            "path": layer.path,
            "metric": layer.metric,
            "similarity": _rounded(layer.similarity),
            **{
                role: _rounded([getattr(layer, role).mean_head, getattr(layer, role).concatenated])
                for role in ("query", "key", "product")
            },
        }
        for layer in analysis.layers
    ]
    rows = collab.cost(model, COST_SIZES, tokens=LENGTHS).rows
    costs = {
        str(size): {
            "ratios": [round(row.after.flops / row.before.flops, 5) for row in rows if row.shared_dim == size],
            "break_even": next(row.break_even.tokens for row in rows if row.shared_dim == size),
        }
        for size in COST_SIZES
    }
    alike = max(analysis.layers, key=lambda layer: layer.mean_similarity).path
    site = next(site for site in collab.find_attention(model) if site.path == alike)
    converted = copy.deepcopy(model)
    collab.collaborate_(converted, collab.CollaborativeConfig(shared_dim={alike: MIXING_SIZE}))
    mixing = converted.get_submodule(alike).mixing.detach()
    config = {
        "model": PACKAGE, "cost_sizes": list(COST_SIZES), "lengths": list(LENGTHS), "mixing_size": MIXING_SIZE,
        "mixing_path": alike, "num_heads": site.num_heads, "head_dim": site.head_dim, "width": site.query_width,
    }  # fmt: skip
    metrics = {"layers": layers, "costs": costs, "mixing": _rounded(mixing.tolist(), 3)}
    return RunRecord(name="figures", config=config, metrics=metrics, provenance=provenance(seed=0))


def _rounded(rows: Any, digits: int = 5) -> list[list[float]]:
    return [[round(value, digits) for value in row] for row in rows]


def draw_energy(record: RunRecord, path: Path) -> None:
    """What `collab analyze MODEL --plot` draws."""
    layers: list[Any] = [
        SimpleNamespace(
            **(layer | {role: SimpleNamespace(mean_head=layer[role][0], concatenated=layer[role][1])
                        for role in ("query", "key", "product")})
        )
        for layer in record.metrics["layers"]
    ]  # fmt: skip
    draw(layers, path)


def draw_costs(record: RunRecord, path: Path) -> None:
    """Operations after over before along the length of a sequence, one line a size."""
    figure = Figure(figsize=(7.2, 3.6), facecolor="white", layout="constrained")
    axes = figure.subplots()
    lengths = record.config["lengths"]
    palette = colormaps["viridis"]
    for place, (size, cost) in enumerate(record.metrics["costs"].items()):
        colour = palette(0.85 * place / (len(record.metrics["costs"]) - 1))
        axes.plot(lengths, cost["ratios"], color=colour, linewidth=2)
        even = cost["break_even"]
        inside = even is not None and lengths[0] <= even <= lengths[-1]
        if inside:
            axes.plot(even, 1, "o", color=colour, markersize=6, zorder=3)
        label = f"{size}: even at {even:,.0f} tokens" if even is not None else size
        axes.plot([], [], color=colour, linewidth=2, label=label)
    axes.axhline(1, color=_GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    ratios = [0.125, 0.25, 0.5, 1, 2, 4, 8]
    axes.set_yticks(ratios, [f"{ratio:g}" for ratio in ratios])
    axes.minorticks_off()
    axes.set(xlabel="tokens", ylabel="operations, shared / ordinary", xlim=(lengths[0], lengths[-1]))
    axes.legend(title="shared_dim", frameon=False, fontsize=8.5, title_fontsize=8.5, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def draw_mixing(record: RunRecord, path: Path) -> None:
    """The mixing matrix of concatenated heads, and that of the same layer when they share fewer dimensions."""
    config = record.config
    before = head_blocks(config["num_heads"], config["num_heads"] * config["head_dim"])
    after = torch.tensor(record.metrics["mixing"])
    # By the head that uses a dimension most, so that what is a head's own is on the diagonal, as before.
    after = after[:, after.abs().argmax(0).argsort(stable=True)]
    figure = Figure(figsize=(9.6, 3.9), facecolor="white", layout="constrained")
    axes = figure.subplots(2, 1)
    titles = (
        f"before: {before.shape[1]} dimensions in blocks of {config['head_dim']}, each used by one head",
        f"after: {after.shape[1]} dimensions, shared (sorted by the head that uses them most)",
    )
    drawn = None
    for part, mixing, title in zip(axes, (before, after), titles, strict=True):
        drawn = part.imshow(mixing, cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto", interpolation="nearest")
        part.set_title(title, fontsize=9.5, loc="left")
        part.set(ylabel="head", yticks=[0, len(mixing) - 1])
    axes[1].set_xlabel("shared dimension")
    assert drawn is not None
    bar = figure.colorbar(drawn, ax=list(axes), aspect=30, pad=0.01)
    bar.outline.set_visible(False)
    figure.savefig(path)


@dataclass(frozen=True)
class Drawing:
    """One figure: what draws it, and what it shows."""

    draw: Callable[[RunRecord, Path], None]
    alt: str
    caption: str


FIGURES = {
    "mixing": Drawing(
        draw_mixing,
        "Two heat maps of mixing matrices: blocks of ones, and a dense one with a sixth of the columns",
        "The mixing matrix of `{mixing_path}` in `{model}`, the layer whose heads are most alike: of its concatenated "
        "heads, and after it was converted to {mixing_size} shared dimensions from its weights alone. White is not "
        "used at all; signs tell heads apart that use a dimension in opposite ways.",
    ),
    "captured-energy": Drawing(
        draw_energy,
        "Captured energy along principal components, of single heads and of all, and cosines between heads",
        "What `collab analyze MODEL --plot FILE` draws, for `{model}`: Figure 1 of the paper. Left: components of a "
        "head's matrices by themselves, mean over the heads of a layer. Right: of all heads of a layer. Thin lines are "
        "layers, bold ones their mean. Below: the cosines between heads' products.",
    ),
    "break-even": Drawing(
        draw_costs,
        "Ratio of operations over the length of a sequence, one line for each shared size",
        "Operations of queries, keys and scores in `{model}` ({width} wide, {num_heads} heads of {head_dim}) with "
        "shared heads, as a share of those with ordinary ones, by the formulas above. Below the dashed line sharing "
        "saves operations; dots are break-even lengths.",
    ),
}


def begin(name: str) -> str:
    """The line before a figure."""
    return f"<!-- written by benchmarks/figures.py: {name} -->\n"


def digest(record: RunRecord) -> str:
    """What tells a record from others; drawings carry it."""
    text = json.dumps(record.to_dict(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def render(name: str, record: RunRecord) -> str:
    """The figure's place in the document: the image, what it shows, and where it comes from."""
    figure, origin, config = FIGURES[name], record.provenance, record.config
    versions = ", ".join(f"{package} {version}" for package, version in origin["versions"].items() if package != "timm")
    caption = figure.caption.format(**(config | {"model": config["model"].replace("_", "-")}))
    number, changed, _ = (origin["commit"] or "unknown").partition("+changes")
    return (
        f"![{figure.alt}](figures/{name}.svg)\n\n"
        f"*{caption} Commit {number[:12]}{changed}, {origin['device']}, {versions}.*\n"
    )


def figure_in(document: str, name: str) -> str:
    """What stands between the markers of one figure."""
    return document.split(begin(name))[1].split(END)[0]


def draw_to(folder: Path, record: RunRecord) -> None:
    """Draw every figure, each with the digest of the record that it is drawn from."""
    folder.mkdir(exist_ok=True)
    for name, figure in FIGURES.items():
        path = folder / f"{name}.svg"
        with rc_context(_STYLE):
            figure.draw(record, path)
        text = re.sub(r"\s*<metadata>.*?</metadata>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        text = "\n".join(line.rstrip() for line in text.splitlines())
        mark = f"<!-- drawn by benchmarks/figures.py from record {digest(record)} -->"
        path.write_text(text.replace("<svg ", f"{mark}\n<svg ", 1) + "\n", encoding="utf-8")


def write_figures(record: RunRecord) -> None:
    """Draw every figure and put it between its markers."""
    draw_to(FOLDER, record)
    text = DOCUMENT.read_text(encoding="utf-8")
    for name in FIGURES:
        text = text.replace(begin(name) + figure_in(text, name) + END, begin(name) + render(name, record) + END)
    DOCUMENT.write_text(text, encoding="utf-8")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["run", "render"])
    if parser.parse_args().verb == "run":
        torch.set_num_threads(1)
        append_record(RECORDS, measure())
    write_figures(read_records(RECORDS)[-1])


if __name__ == "__main__":
    main()
