"""What records say of the translation recipe: rows of the paper's Table 2, conversions, speeds, an example."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from collab.records import RunRecord, read_records

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "paper" / "results"
PUBLISHED = ROOT / "paper" / "published.yaml"

TRAINED, TIMED, TRANSLATED = "translation", "translation-speed", "translate"
"""Names of records: of the recipe, of `translation_speed.py`, of `translation_example.py`."""

BASELINE = ("concatenated", 512)

Rows = Mapping[tuple[str, int], Sequence[RunRecord]]
"""Heads and key dimension -> the runs of each seed."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """Everything there is to show.

    Attributes:
        rows: the trained rows of the table.
        others: runs that are none of them, for they had fewer updates or other data.
        conversions: (shared_dim, how) -> a score a text, of the baseline converted.
        speed: the record of updates measured alone.
        example: the record of sentences translated.
    """

    rows: Rows = field(default_factory=dict)
    others: Sequence[RunRecord] = ()
    conversions: Mapping[tuple[int, str], Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    speed: RunRecord | None = None
    example: RunRecord | None = None

    @property
    def texts(self) -> list[str]:
        """Names of the texts that were scored."""
        first = next(iter(self.rows.values()), None)
        return [] if first is None else [score["text"] for score in first[0].metrics["scores"]]

    def seconds(self, kind: tuple[str, int]) -> float | None:
        """What the updates of a row take alone on the device; nothing where that was not measured."""
        if self.speed is None or kind not in self.rows:
            return None
        for row in self.speed.metrics["rows"]:
            if (row["variant"], row["key_dim"]) == kind:
                run = self.rows[kind][0]
                tokens = run.metrics["updates"] * run.config["batch_tokens"]
                return float(tokens / row["batch_tokens"] * row["seconds_per_update"])
        return None


def found(folder: Path = RESULTS) -> Found:
    """All records there are; of several of the same run, the last."""
    records = [record for path in sorted(folder.glob("translation*.jsonl")) for record in read_records(path)]
    records.sort(key=lambda record: record.provenance["time"])
    last = {record.name: record for record in records}
    runs = [record for record in records if record.name == TRAINED]
    trained = list({_identity(run): run for run in runs if "scores" in run.metrics}.values())
    rows, others = grouped(trained)
    converted: dict[tuple[int, str], dict[str, Mapping[str, Any]]] = {}
    for run in runs:
        for score in run.metrics.get("conversions", []):
            converted.setdefault((score["shared_dim"], score["how"]), {})[score["text"]] = score
    return Found(
        rows=rows, others=others, speed=last.get(TIMED), example=last.get(TRANSLATED),
        conversions={kind: list(scores.values()) for kind, scores in sorted(converted.items(), reverse=True)},
    )  # fmt: skip


def _identity(record: RunRecord) -> tuple[Any, ...]:
    config = record.config
    return config["variant"], tuple(config["collaborative_in"]), config["key_dim"], config["seed"]


def grouped(records: Sequence[RunRecord]) -> tuple[Rows, list[RunRecord]]:
    """Runs by heads and key dimension, largest first, and those that cannot be compared with most of them."""
    kinds = [_setting(record) for record in records]
    usual = max(kinds, key=lambda kind: (kinds.count(kind), kind), default=None)
    rows: dict[tuple[str, int], list[RunRecord]] = {}
    others = []
    for record in sorted(records, key=lambda record: (-record.config["key_dim"], record.config["seed"])):
        everywhere = record.config["variant"] == "concatenated" or len(record.config["collaborative_in"]) == 3
        if everywhere and _setting(record) == usual:
            rows.setdefault((record.config["variant"], record.config["key_dim"]), []).append(record)
        else:
            others.append(record)
    order = {"concatenated": 0, "collaborative": 1}
    return dict(sorted(rows.items(), key=lambda item: (-item[0][1], order[item[0][0]]))), others


def _setting(record: RunRecord) -> tuple[int, int, int]:
    """Updates, subwords of each, and pairs to learn from: what rows must have in common."""
    return record.metrics["updates"], record.config["batch_tokens"], record.metrics["data"]["pairs"]


def published() -> dict[tuple[str, int], Mapping[str, str]]:
    """What the paper printed of a row, where its numbers are at hand."""
    if not PUBLISHED.is_file():
        return {}
    import yaml

    printed = (yaml.safe_load(PUBLISHED.read_text(encoding="utf-8")) or {}).get("table2") or {}
    rows = {}
    for row in printed.get("rows") or []:
        if row.get("heads") and str(row.get("key_dim", "")).isdigit():
            rows[row["heads"], int(row["key_dim"])] = row
    return rows
