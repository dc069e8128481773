"""From records of the translation recipe to docs/translation.md: the paper's Table 2, its figures, and conversions.

python paper/render_translation.py

It reads `paper/results/translation*.jsonl`, which `paper/translation.sh` writes, and the paper's own numbers from
`paper/published.yaml`. The README's example of `collab translate` is written from there, too.
"""

import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from translation_claims import chance_of, claims, ends, flattened
from translation_figures import AGAINST, draw_against, draw_curves
from translation_records import BASELINE, ROOT, Found, found, published

from collab.records import RunRecord

DOCUMENT = ROOT / "docs" / "translation.md"
README = ROOT / "README.md"
FIGURES = ROOT / "docs" / "figures"
END = "<!-- end -->\n"
NOTHING = "Not measured yet.\n"

HOW = {
    "weights": "from the weights, as in the paper", "inputs": "in the metric of its inputs",
    "refined": "and refined on them",
}  # fmt: skip
"""How ways to convert are called."""


def begin(name: str) -> str:
    """The line before a part."""
    return f"<!-- written by paper/render_translation.py: {name} -->\n"


def table2(shown: Found) -> str:
    """Every row of the paper's table, measured, and printed numbers in italics."""
    if not shown.rows:
        return NOTHING
    printed = published()
    is_timed = any(shown.seconds(kind) is not None for kind in shown.rows)
    lines = [["key dimension", "heads", "parameters", *shown.texts, "converted"]]
    lines[0] += [*(["minutes alone"] if is_timed else []), "minutes", "memory", "runs"]
    lines[0] += ["*paper: parameters*", "*BLEU*", "*hours*"] if printed else []
    for (variant, key_dim), runs in shown.rows.items():
        metrics = [run.metrics for run in runs]
        memory = max((one["peak_memory"] or 0 for one in metrics), default=0)
        alone = shown.seconds((variant, key_dim))
        cells = [
            f"{key_dim}", variant, f"{metrics[0]['parameters'] / 1e6:.1f} M",
            *(_bleu(_of(text, *(one["scores"] for one in metrics))) for text in shown.texts),
            _converted(shown, key_dim) if variant == "collaborative" else "",
            *([f"{alone / 60:.1f}" if alone is not None else ""] if is_timed else []),
            _mean([one["training_seconds"] / 60 for one in metrics], 1),
            f"{memory / 2**30:.1f} GiB" if memory else "", f"{len(runs)}",
        ]  # fmt: skip
        own = printed.get((variant, key_dim), {})
        names = ("parameters", "bleu", "hours") if printed else ()
        lines.append([*cells, *(f"*{own[name]}*" if own.get(name) else "" for name in names)])
    missing = [f"{variant} {size}" for variant, size in published() if (variant, size) not in shown.rows]
    notes = [
        "BLEU is that of split compounds, and sacreBLEU in brackets; where there are several runs, the mean over seeds "
        "and how far the furthest is from it. *Converted*: the same BLEU, text by text, of the concatenated heads of "
        f"{BASELINE[1]}, converted to collaborative ones of this size and not trained again.",
        *([_alone(shown)] if is_timed else []),
        *([f"Not measured yet: {', '.join(missing)}."] if missing else []),
        *([_left_out(shown.others)] if shown.others else []),
        _origin([run for runs in shown.rows.values() for run in runs]),
    ]
    return f"{_markdown(lines)}\n" + "\n\n".join(notes) + "\n"


def _converted(shown: Found, size: int) -> str:
    """BLEU of the baseline converted to a size, by the best way that there is without refining."""
    for how in ("inputs", "weights"):
        scores = shown.conversions.get((size, how))
        if scores:
            return " / ".join(f"{score['compound_split']:.2f}" for text in shown.texts for score in _of(text, scores))
    return ""


def _alone(shown: Found) -> str:
    assert shown.speed is not None
    tokens = shown.speed.metrics["rows"][0]["batch_tokens"]
    return (
        f"*Minutes alone*: what so many updates take with the device to themselves, by the time of some of {tokens:,} "
        f"subwords ({_origin([shown.speed])[:-1]}). *Minutes* are those of the training itself, beside the others."
    )


def _left_out(runs: Sequence[RunRecord]) -> str:
    names = "; ".join(
        f"{run.config['variant']} {run.config['key_dim']} seed {run.config['seed']}: {run.metrics['updates']:,} updates"
        for run in runs
    )
    return f"Not shown, since they had other data or updates, or share in some places only: {names}."


def answers(shown: Found) -> str:
    """The paper's claims, each with its answer and the figures."""
    if not shown.rows:
        return NOTHING
    chance = chance_of(shown)
    measure = (
        f"Differences of up to {chance:.2f} count as none: so far apart are two seeds of one row, at most."
        if chance
        else "No row was trained with two seeds, so that nothing is known of what chance does."
    )
    listed = "".join(f"- {line}\n" for line in (*claims(shown), flattened(shown)))
    return f"{listed}\nIn BLEU of split compounds, of which the mean over texts decides. {measure}\n"


def learning(shown: Found) -> str:
    """Whether models had learned all they could: the development text at the end, and a fifth of the updates before."""
    lines = [["key dimension", "heads", "updates", "epochs", "dev loss", "a fifth before", "averaged", "waiting"]]
    for (variant, key_dim), runs in shown.rows.items():
        metrics = [run.metrics for run in runs if run.metrics["curve"]]
        if not metrics:
            continue
        last, before, averaged = zip(*(ends(one) for one in metrics), strict=True)
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


def conversions(shown: Found) -> str:
    """A model of concatenated heads, converted after it was trained and not trained again."""
    if not shown.conversions:
        return NOTHING
    texts = list(dict.fromkeys(score["text"] for scores in shown.conversions.values() for score in scores))
    lines = [["shared_dim", "converted", "parameters", *texts, "largest error", "seconds"]]
    for run in shown.rows.get(BASELINE, [])[:1]:
        lines.append([
            f"{run.config['key_dim']}", "not", f"{run.metrics['parameters'] / 1e6:.1f} M",
            *(_bleu(_of(text, run.metrics["scores"])) for text in texts), "", "",
        ])  # fmt: skip
    for (size, how), scores in shown.conversions.items():
        one = scores[0]
        lines.append([
            f"{size}", HOW[how], f"{one['parameters'] / 1e6:.1f} M", *(_bleu(_of(text, scores)) for text in texts),
            f"{one['largest_error']:.3f}", f"{one['conversion_seconds']:.0f}",
        ])  # fmt: skip
    return f"{_markdown(lines)}\nErrors are relative, of the query/key products of the worst layer.\n"


def settings(shown: Found) -> str:
    """What the runs had in common."""
    if not shown.rows:
        return NOTHING
    run = next(iter(shown.rows.values()))[0]
    config, data = run.config, run.metrics["data"]
    sources = ", ".join(f"{name} {count:,}" for name, count in data["sources"].items())
    texts = ", ".join(f"{name} {count:,}" for name, count in data["texts"].items())
    signature = run.metrics["scores"][0]["signature"]
    facts = [
        f"{data['pairs']:,} pairs, {data['tokens'][0]:,} and {data['tokens'][1]:,} subwords (read: {sources}), texts: "
        f"{texts}",
        f"{data['vocabulary']:,} subwords of both languages together",
        f"{run.metrics['updates']:,} updates of {config['batch_tokens']:,} subwords, rate {config['learning_rate']:g} "
        f"after {config['warmup_steps']:,} updates, label smoothing {config['label_smoothing']:g}, dropout "
        f"{config['dropout']:g}, gradients clipped to {config['max_grad_norm']:g} (0: not)",
        f"mean of {config['average']} states, {config['average_every']} updates apart; beam {config['beams']}, length "
        f"penalty {config['length_penalty']:g}",
        f"sacreBLEU {signature}",
    ]
    return "".join(f"- {fact}\n" for fact in facts)


def example(shown: Found) -> str:
    """Sentences that a trained model translated, as one would have it translate them."""
    if shown.example is None:
        return "(An example with a trained model is to come: none has been trained yet.)\n"
    config, told = shown.example.config, shown.example.metrics["translations"]
    asked = " \\\n    ".join(f"--text {shlex.quote(sentence)}" for sentence in config["sentences"])
    told_of = f"{config['variant']} heads, key dimension {config['key_dim']}, {config['updates']:,} updates"
    lines = [f"$ collab translate {config['model']} \\\n    {asked}", *told]
    return "```\n" + "".join(f"{line}\n" for line in lines) + f"```\n\n*{told_of}. {_origin([shown.example])}*\n"


def figure(name: str, alt: str) -> Callable[[Found], str]:
    """The place of a figure, once it is drawn."""

    def place(shown: Found) -> str:
        return f"![{alt}](figures/translation-{name}.svg)\n" if shown.rows else NOTHING

    return place


PARTS: dict[str, Callable[[Found], str]] = {
    "table2": table2,
    "answers": answers,
    "parameters": figure("parameters", "BLEU against parameters, a panel a text, a line for each kind of heads"),
    "time": figure("time", "BLEU against minutes of training, a panel a text, a line for each kind of heads"),
    "learning": learning,
    "curves": figure("curves", "Loss and BLEU of the development text along the updates, a line a run"),
    "conversions": conversions,
    "settings": settings,
}
"""Name -> what writes it."""


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
    shown = found()
    if shown.rows:
        for name in AGAINST:
            draw_against(shown, name, FIGURES / f"translation-{name}.svg")
        draw_curves(shown.rows, FIGURES / "translation-curves.svg")
    for file, parts in ((DOCUMENT, PARTS), (README, {"example": example})):
        text = file.read_text(encoding="utf-8")
        for name, render in parts.items():
            text = text.replace(begin(name) + part_in(text, name) + END, begin(name) + render(shown) + END)
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
