"""The paper's claims of Table 2, and whether the baseline had flattened, answered from records by fixed rules."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from translation_records import BASELINE, Found

from collab.records import RunRecord

QUARTER, LEAST = 128, 64
"""Of the baseline's key dimension: a quarter, and the smallest of the table."""

FLAT = 0.01
"""Of the loss: a smaller fall over about the last fifth of the updates counts as none."""

Kind = tuple[str, int]


def claims(found: Found) -> list[str]:
    """Each claim with its answer and the figures, or what is missing for one."""
    chance = chance_of(found)
    return [
        _answer(
            found, "Does reducing the key dimension hurt concatenated heads?", ("concatenated", LEAST), BASELINE,
            lambda change: change < -chance,
        ),
        _answer(
            found, "Does sharing keep BLEU at a quarter of the key dimension?", ("collaborative", QUARTER), BASELINE,
            lambda change: change >= -chance,
        ),
        _answer(
            found, f"At {LEAST}, are collaborative heads better than concatenated ones?", ("collaborative", LEAST),
            ("concatenated", LEAST), lambda change: change > chance,
        ),
    ]  # fmt: skip


def chance_of(found: Found) -> float:
    """How far apart two seeds of one row are, at most, in the mean over texts of BLEU; 0 where no row has two."""
    means = [[statistics.mean(_scores(run).values()) for run in runs] for runs in found.rows.values()]
    return max((max(own) - min(own) for own in means), default=0.0)


def _answer(found: Found, question: str, one: Kind, other: Kind, holds: Any) -> str:
    missing = [f"{variant} {size}" for variant, size in (one, other) if (variant, size) not in found.rows]
    if missing:
        return f"**{question}** Not measured: {' and '.join(missing)} is missing."
    left, right = (_mean_scores(found.rows[kind]) for kind in (one, other))
    change = statistics.mean(left.values()) - statistics.mean(right.values())
    figures = "; ".join(f"{text} {left[text]:.2f} and {right[text]:.2f}" for text in left)
    return (
        f"**{question}** {'Yes' if holds(change) else 'No'}: {one[0]} {one[1]} against {other[0]} {other[1]}: "
        f"{figures}; {change:+.2f} in the mean."
    )


def flattened(found: Found) -> str:
    """Whether the baseline had learned all it could, and how that is known."""
    runs = [run for run in found.rows.get(BASELINE, []) if len(set(span(run.metrics))) == 2]
    if not runs:
        return "Whether the baseline had flattened is not known: the development text was not looked at often enough."
    falls = []
    for run in runs:
        last, before, _ = ends(run.metrics)
        falls.append((before - last) / before)
    fall = statistics.mean(falls)
    first, end = span(runs[0].metrics)
    return (
        f"**Had the baseline flattened?** {'Yes' if fall < FLAT else 'No'}: from update {first:,} to {end:,} its loss "
        f"on the development text {'fell' if fall >= 0 else 'rose'} by {100 * abs(fall):.1f} % (less than "
        f"{100 * FLAT:g} % counts as flat)."
    )


def ends(metrics: Mapping[str, Any]) -> tuple[float, float, float]:
    """Loss on the development text at the last update, at four fifths of them, and of the averaged weights."""
    last, earlier = _looks(metrics)
    averaged = [row["loss"] for row in metrics["curve"] if row["what"] == "averaged"]
    return last["loss"], earlier["loss"], (averaged or [last["loss"]])[-1]


def span(metrics: Mapping[str, Any]) -> list[int]:
    """The updates that these were, from which to which; one where there was one look, none where there was none."""
    return [look["step"] for look in reversed(_looks(metrics))] if metrics["curve"] else []


def _looks(metrics: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The last look at the development text, and that at four fifths of the updates or the nearest before."""
    training = [row for row in metrics["curve"] if row["what"] == "training"]
    earlier = [row for row in training if row["step"] <= 0.8 * metrics["updates"]] or training[:1]
    return training[-1], earlier[-1]


def _scores(run: RunRecord) -> dict[str, float]:
    return {score["text"]: score["compound_split"] for score in run.metrics["scores"]}


def _mean_scores(runs: Sequence[RunRecord]) -> dict[str, float]:
    scores = [_scores(run) for run in runs]
    return {text: statistics.mean(own[text] for own in scores) for text in scores[0]}
