"""From records of the translation recipe to docs/translation.md: the paper's Table 2, its figures, and conversions.

python paper/render_translation.py

It reads `paper/results/translation*.jsonl`, which `collab train many --results` writes, and the paper's own numbers
from `paper/published.yaml`.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from translation_figures import AGAINST, draw_against, draw_curves

from collab.records import RunRecord, read_records

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "paper" / "results"
PUBLISHED = ROOT / "paper" / "published.yaml"
DOCUMENT = ROOT / "docs" / "translation.md"
FIGURES = ROOT / "docs" / "figures"
END = "<!-- end -->\n"
NOTHING = "Not measured yet.\n"

HOW = {
    "weights": "from the weights, as in the paper", "inputs": "in the metric of its inputs",
    "refined": "and refined on them",
}  # fmt: skip
"""How ways to convert are called."""

Rows = Mapping[tuple[str, int], Sequence[RunRecord]]
"""Heads and key dimension -> the runs of each seed."""


def begin(name: str) -> str:
    """The line before a part."""
    return f"<!-- written by paper/render_translation.py: {name} -->\n"


def recorded(folder: Path = RESULTS) -> list[RunRecord]:
    """All records of trainings; of several of the same settings, the last."""
    records = [record for path in sorted(folder.glob("translation*.jsonl")) for record in read_records(path)]
    trained = [record for record in records if record.name == "translation" and "scores" in record.metrics]
    trained.sort(key=lambda record: record.provenance["time"])
    return list({_identity(record): record for record in trained}.values())


def _identity(record: RunRecord) -> tuple[Any, ...]:
    config = record.config
    return config["variant"], tuple(config["collaborative_in"]), config["key_dim"], config["seed"]


def grouped(records: Sequence[RunRecord]) -> Rows:
    """Runs by heads and key dimension, largest first; of runs of different lengths, those of the longest."""
    longest = max((record.metrics["updates"] for record in records), default=0)
    rows: dict[tuple[str, int], list[RunRecord]] = {}
    for record in sorted(records, key=lambda record: (-record.config["key_dim"], record.config["seed"])):
        everywhere = record.config["variant"] == "concatenated" or len(record.config["collaborative_in"]) == 3
        if everywhere and record.metrics["updates"] == longest:
            rows.setdefault((record.config["variant"], record.config["key_dim"]), []).append(record)
    order = {"concatenated": 0, "collaborative": 1}
    return dict(sorted(rows.items(), key=lambda item: (-item[0][1], order[item[0][0]])))


def published() -> dict[tuple[str, int], Mapping[str, str]]:
    """What the paper printed of a row, where its numbers are at hand."""
    if not PUBLISHED.is_file():
        return {}
    import yaml

    printed = (yaml.safe_load(PUBLISHED.read_text(encoding="utf-8")) or {}).get("table2") or {}
    found = {}
    for row in printed.get("rows") or []:
        if row.get("heads") and str(row.get("key_dim", "")).isdigit():
            found[row["heads"], int(row["key_dim"])] = row
    return found


def table2(rows: Rows) -> str:
    """Every row of the paper's table, measured, and printed numbers in italics."""
    if not rows:
        return NOTHING
    texts = _texts(next(iter(rows.values())))
    printed = published()
    lines = [["key dimension", "heads", "parameters", *texts, "minutes", "memory", "runs"]]
    lines[0] += ["*paper: parameters*", "*BLEU*", "*hours*"] if printed else []
    for (variant, key_dim), runs in rows.items():
        metrics = [run.metrics for run in runs]
        memory = max((one["peak_memory"] or 0 for one in metrics), default=0)
        cells = [
            f"{key_dim}", variant, f"{metrics[0]['parameters'] / 1e6:.1f} M",
            *(_bleu(_of(text, *(one["scores"] for one in metrics))) for text in texts),
            _mean([one["training_seconds"] / 60 for one in metrics], 1),
            f"{memory / 2**30:.1f} GiB" if memory else "", f"{len(runs)}",
        ]  # fmt: skip
        own = printed.get((variant, key_dim), {})
        names = ("parameters", "bleu", "hours") if printed else ()
        lines.append([*cells, *(f"*{own[name]}*" if own.get(name) else "" for name in names)])
    note = (
        "BLEU is that of split compounds, and sacreBLEU in brackets; where there are several runs, the mean over seeds "
        "and how far the furthest is from it."
    )
    return f"{_markdown(lines)}\n{note}\n\n{_origin([run for runs in rows.values() for run in runs])}\n"


def learning(rows: Rows) -> str:
    """Whether models had learned all they could: the development text at the end, and a fifth of the updates before."""
    lines = [["key dimension", "heads", "updates", "epochs", "dev loss", "a fifth before", "averaged", "waiting"]]
    for (variant, key_dim), runs in rows.items():
        metrics = [run.metrics for run in runs if run.metrics["curve"]]
        if not metrics:
            continue
        last, before, averaged = zip(*(_ends(one) for one in metrics), strict=True)
        lines.append([
            f"{key_dim}", variant, f"{metrics[0]['updates']:,}", f"{metrics[0]['epochs']:.1f}", _mean(last, 3),
            _mean(before, 3), _mean(averaged, 3), f"{100 * max(one['waiting'] for one in metrics):.2f} %",
        ])  # fmt: skip
    if len(lines) == 1:
        return NOTHING
    note = (
        "Loss in nats a subword, without smoothing, at the last update, after four fifths of them, and of the averaged "
        "weights; waiting is the share of the training time in which there was no batch yet."
    )
    return f"{_markdown(lines)}\n{note}\n"


def _ends(metrics: Mapping[str, Any]) -> tuple[float, float, float]:
    training = [row for row in metrics["curve"] if row["what"] == "training"]
    averaged = [row["loss"] for row in metrics["curve"] if row["what"] == "averaged"]
    earlier = [row for row in training if row["step"] <= 0.8 * metrics["updates"]] or training
    return training[-1]["loss"], earlier[-1]["loss"], (averaged or [training[-1]["loss"]])[-1]


def conversions(rows: Rows) -> str:
    """A model of concatenated heads, converted after it was trained and not trained again."""
    runs = [run for own in rows.values() for run in own if run.metrics["conversions"]]
    if not runs:
        return NOTHING
    texts = _texts(runs)
    lines = [["shared_dim", "converted", "parameters", *texts, "largest error", "seconds"]]
    for run in runs:
        lines.append([
            f"{run.config['key_dim']}", "not", f"{run.metrics['parameters'] / 1e6:.1f} M",
            *(_bleu(_of(text, run.metrics["scores"])) for text in texts), "", "",
        ])  # fmt: skip
        converted: dict[tuple[int, str], list[Mapping[str, Any]]] = {}
        for row in run.metrics["conversions"]:
            converted.setdefault((row["shared_dim"], row["how"]), []).append(row)
        for (size, how), scores in converted.items():
            one = scores[0]
            lines.append([
                f"{size}", HOW[how], f"{one['parameters'] / 1e6:.1f} M", *(_bleu(_of(text, scores)) for text in texts),
                f"{one['largest_error']:.3f}", f"{one['conversion_seconds']:.0f}",
            ])  # fmt: skip
    return f"{_markdown(lines)}\nErrors are relative, of the query/key products of the worst layer.\n"


def settings(rows: Rows) -> str:
    """What the runs had in common."""
    if not rows:
        return NOTHING
    run = next(iter(rows.values()))[0]
    config, data = run.config, run.metrics["data"]
    sources = ", ".join(f"{name} {count:,}" for name, count in data["sources"].items())
    texts = ", ".join(f"{name} {count:,}" for name, count in data["texts"].items())
    signature = run.metrics["scores"][0]["signature"]
    facts = [
        f"{data['pairs']:,} pairs, {data['tokens'][0]:,} and {data['tokens'][1]:,} subwords (read: {sources}), texts: "
        f"{texts}",
        f"{data['vocabulary']:,} subwords of both languages together",
        f"{config['steps']:,} updates of {config['batch_tokens']:,} subwords, rate {config['learning_rate']:g} after "
        f"{config['warmup_steps']:,} updates, label smoothing {config['label_smoothing']:g}, dropout "
        f"{config['dropout']:g}, gradients clipped to {config['max_grad_norm']:g} (0: not)",
        f"mean of {config['average']} states, {config['average_every']} updates apart; beam {config['beams']}, length "
        f"penalty {config['length_penalty']:g}",
        f"sacreBLEU {signature}",
    ]
    return "".join(f"- {fact}\n" for fact in facts)


def figure(name: str, alt: str) -> Callable[[Rows], str]:
    """The place of a figure, once it is drawn."""

    def place(rows: Rows) -> str:
        return f"![{alt}](figures/translation-{name}.svg)\n" if rows else NOTHING

    return place


PARTS: dict[str, Callable[[Rows], str]] = {
    "table2": table2,
    "parameters": figure("parameters", "BLEU against parameters, a panel a text, a line for each kind of heads"),
    "time": figure("time", "BLEU against minutes of training, a panel a text, a line for each kind of heads"),
    "learning": learning,
    "curves": figure("curves", "Loss and BLEU of the development text along the updates, a line a run"),
    "conversions": conversions,
    "settings": settings,
}
"""Name -> what writes it."""


def _texts(runs: Sequence[RunRecord]) -> list[str]:
    return [score["text"] for score in runs[0].metrics["scores"]]


def _of(text: str, *scores: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [score for own in scores for score in own if score["text"] == text]


def _bleu(scores: Sequence[Mapping[str, Any]]) -> str:
    split, sacre = ([score[name] for score in scores] for name in ("compound_split", "sacrebleu"))
    return f"{_mean(split, 2)} ({statistics.mean(sacre):.2f})"


def _mean(values: Sequence[float], digits: int) -> str:
    mean = statistics.mean(values)
    spread = max(abs(value - mean) for value in values)
    return f"{mean:.{digits}f}" + (f" ± {spread:.{digits}f}" if len(values) > 1 else "")


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    heading, *rows = lines
    return "".join("| " + " | ".join(cells) + " |\n" for cells in (heading, ["---"] * len(heading), *rows))


def _origin(records: Sequence[RunRecord]) -> str:
    origins = [record.provenance for record in records]
    commits = sorted({_short(origin["commit"] or "unknown") for origin in origins})
    versions = sorted({f"{name} {version}" for origin in origins for name, version in origin["versions"].items()})
    return f"{'; '.join(sorted({origin['device'] for origin in origins}))}; commit {', '.join(commits)}; " + (
        f"{', '.join(versions)}."
    )


def _short(commit: str) -> str:
    """A commit by its first letters, and whether the sources differed from it."""
    number, changed, _ = commit.partition("+changes")
    return number[:12] + changed


def part_in(document: str, name: str) -> str:
    """What stands between the markers of one part."""
    return document.split(begin(name))[1].split(END)[0]


def main() -> None:
    """Draw the figures and put everything between its markers."""
    rows = grouped(recorded())
    if rows:
        for name in AGAINST:
            draw_against(rows, name, FIGURES / f"translation-{name}.svg")
        draw_curves(rows, FIGURES / "translation-curves.svg")
    text = DOCUMENT.read_text(encoding="utf-8")
    for name, render in PARTS.items():
        text = text.replace(begin(name) + part_in(text, name) + END, begin(name) + render(rows) + END)
    DOCUMENT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
