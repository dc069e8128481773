"""The figures of docs/translation.md, the same bytes for the same records."""

import io
import statistics
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from translation_records import Found, Rows

from collab.records import RunRecord

_GREY, _INK = "#8a8a8a", "#222222"
_COLOURS = {"concatenated": "#D55E00", "collaborative": "#0072B2"}
_MARKS = {"concatenated": "x", "collaborative": "+"}
_STYLE: Any = {
    "font.size": 9, "axes.edgecolor": _GREY, "axes.labelcolor": _INK, "text.color": _INK, "xtick.color": _INK,
    "ytick.color": _INK, "svg.fonttype": "none", "svg.hashsalt": "collab",
}  # fmt: skip

AGAINST = {"parameters": "parameters, millions", "time": "minutes of training"}
"""Name of a figure -> its axis."""


def draw_against(shown: Found, name: str, path: Path) -> None:
    """BLEU of split compounds against something else, a panel a text: a line of means over seeds, a mark a run."""
    is_alone = all(shown.seconds(kind) is not None for kind in shown.rows)
    with rc_context(_STYLE):
        figure = Figure(figsize=(1 + 3.1 * len(shown.texts), 3.2), facecolor="white", layout="constrained")
        for axes, text in zip(figure.subplots(1, len(shown.texts), squeeze=False)[0], shown.texts, strict=True):
            for variant, colour in _COLOURS.items():
                points = []
                for (own, key_dim), runs in shown.rows.items():
                    if own != variant:
                        continue
                    across = [_across(shown, name, run, is_alone) for run in runs]
                    scores = [score for run in runs for score in run.metrics["scores"] if score["text"] == text]
                    bleu = [score["compound_split"] for score in scores]
                    axes.plot(across, bleu, _MARKS[variant], color=colour, markersize=7)
                    points.append((key_dim, statistics.mean(across), statistics.mean(bleu)))
                points.sort()
                if points:
                    axes.plot([x for _, x, _ in points], [y for *_, y in points], color=colour, label=variant)
                for key_dim, x, y in points:
                    axes.annotate(f"{key_dim}", (x, y), textcoords="offset points", xytext=(4, 4), fontsize=7.5)
            axes.set_title(text, fontsize=9.5, loc="left")
            axes.set_xlabel(AGAINST[name] + (", alone on the GPU" if name == "time" and is_alone else ""))
            axes.spines[["top", "right"]].set_visible(False)
        figure.axes[0].set_ylabel("BLEU, compounds split")
        _legend(figure)
        _save(figure, path)


def _across(shown: Found, name: str, run: RunRecord, is_alone: bool) -> float:
    """Where a run is along the axis of a figure."""
    if name == "parameters":
        return float(run.metrics["parameters"]) / 1e6
    alone = shown.seconds((run.config["variant"], run.config["key_dim"])) if is_alone else None
    return float(run.metrics["training_seconds"] if alone is None else alone) / 60


def draw_curves(rows: Rows, path: Path) -> None:
    """Loss and greedy BLEU of the development text along the updates, a line a run."""
    panels = (("loss", "loss a subword, nats"), ("sacrebleu", "greedy sacreBLEU of its first sentences"))
    sizes = sorted({key_dim for _, key_dim in rows}, reverse=True)
    dashes = ["-", (0, (5, 1.5)), (0, (2, 1.5)), (0, (1, 1))]
    with rc_context(_STYLE):
        figure = Figure(figsize=(8.4, 3.4), facecolor="white", layout="constrained")
        for axes, (name, label) in zip(figure.subplots(1, 2), panels, strict=True):
            for (variant, key_dim), runs in rows.items():
                for number, run in enumerate(runs):
                    curve = [row for row in run.metrics["curve"] if row["what"] == "training" and row[name] is not None]
                    axes.plot(
                        [row["step"] for row in curve], [row[name] for row in curve], color=_COLOURS[variant],
                        linestyle=dashes[sizes.index(key_dim) % len(dashes)], linewidth=1,
                        label=None if number else f"{variant} {key_dim}",
                    )  # fmt: skip
            if name == "loss":
                axes.set_yscale("log")
            axes.set_xlabel("updates")
            axes.set_ylabel(label)
            axes.spines[["top", "right"]].set_visible(False)
        _legend(figure)
        _save(figure, path)


def _legend(figure: Figure) -> None:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8.5)


def _save(figure: Figure, path: Path) -> None:
    drawn = io.BytesIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    text = "\n".join(line.rstrip() for line in drawn.getvalue().decode().splitlines())
    path.write_text(text + "\n", encoding="utf-8")
