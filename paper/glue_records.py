"""From records of the GLUE recipe to scores: medians over seeds by model, method, size and stage; the paper's too."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collab.records import RunRecord, read_records

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "paper" / "results" / "glue"
PUBLISHED = ROOT / "paper" / "published.yaml"

TASKS = {
    "CoLA": (("matthews_correlation", "matthews"),),
    "SST-2": (("accuracy",),),
    "MRPC": (("f1",), ("accuracy",)),
    "STS-B": (("pearson", "pearsonr"), ("spearman", "spearmanr")),
    "RTE": (("accuracy",),),
}
"""Task -> what its table cell shows, each by the names it may have in a record."""

OTHER_TASKS = ("QQP", "MNLI", "QNLI")
"""Tasks of the paper's table that are not shown: their training sets are not at hand here."""

METHODS = ("original", "paper", "shared", "calibrated", "refined", "unshared", "pruned")
STAGES = ("fine-tuned", "converted", "fine-tuned again")

Key = tuple[str, str, int | float | None, str]
"""Model, method, key dimension or share of the full one (None for the original), and stage."""


@dataclass(frozen=True)
class Result:
    """Runs of one task that differ in their seed alone.

    Attributes:
        scores: for each number of the task's table cell, those of every run, times 100.
        seeds: of the runs.
        parameters: of the model.
        seconds: of the stage, of every run.
        settings: of every run, as its record has them.
    """

    scores: list[list[float]]
    seeds: list[int]
    parameters: int
    seconds: list[float]
    settings: list[Mapping[str, Any]]

    @property
    def medians(self) -> list[float]:
        """The median over runs of each number."""
        return [statistics.median(runs) for runs in self.scores]

    @property
    def means(self) -> dict[int, float]:
        """Seed -> the mean of a run's numbers, which the task is judged by."""
        return {seed: statistics.fmean(own) for seed, *own in zip(self.seeds, *self.scores, strict=True)}

    @property
    def spread(self) -> tuple[float, float]:
        """Least and greatest of the first number, which figures show."""
        return min(self.scores[0]), max(self.scores[0])


def read_rows(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The rows of all records, of JSON lines and of folders of runs; of several of one run the last counts."""
    records: list[RunRecord] = []
    for path in sorted([*folder.rglob("*.jsonl"), *folder.rglob("record.json")]):
        records += _read(path)
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for record in sorted(records, key=lambda record: record.provenance["time"]):
        for row in record.metrics.get("rows", []):
            checked = _check(row)
            if checked["task"] in OTHER_TASKS:
                continue
            checked["settings"] = record.config
            found[tuple(checked[name] for name in ("task", "model", "method", "size", "seed", "stage"))] = checked
    return list(found.values())


def origins(folder: Path = RESULTS) -> list[Mapping[str, Any]]:
    """Where the records came from."""
    paths = sorted([*folder.rglob("*.jsonl"), *folder.rglob("record.json")])
    return [record.provenance for path in paths for record in _read(path) if record.metrics.get("rows")]


def _read(path: Path) -> list[RunRecord]:
    if path.suffix == ".jsonl":
        # A run also keeps its losses as JSON lines, beside its record.
        return [] if path.name == "losses.jsonl" else read_records(path)
    import json

    return [RunRecord.from_dict(json.loads(path.read_text(encoding="utf-8")))]


def _check(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with its task as the paper spells it; what is not understood is an error."""
    spelled = {name.lower().replace("-", ""): name for name in (*TASKS, *OTHER_TASKS)}
    task = spelled.get(str(row["task"]).lower().replace("-", "").replace("_", ""))
    if task is None or row["method"] not in METHODS or row["stage"] not in STAGES:
        raise ValueError(
            f"a row must have a task of {list(TASKS)}, a method of {METHODS} and a stage of {STAGES}, "
            f"got {row['task']!r}, {row['method']!r} and {row['stage']!r}"
        )
    return dict(row) | {"task": task}


def collect(rows: Iterable[Mapping[str, Any]]) -> dict[Key, dict[str, Result]]:
    """Model, method, size and stage -> task -> result, in the order of tables."""
    runs: dict[Key, dict[str, list[Mapping[str, Any]]]] = {}
    for row in rows:
        key = (row["model"], row["method"], row["size"], row["stage"])
        runs.setdefault(key, {}).setdefault(row["task"], []).append(row)
    results = {key: {task: _result(task, own) for task, own in tasks.items()} for key, tasks in runs.items()}
    placed: dict[Key, dict[str, Result]] = {}
    for key in results:
        placed.setdefault(_placed(key, results), {}).update(results[key])
    return dict(sorted(placed.items(), key=lambda item: _order(item[0])))


def _result(task: str, rows: Sequence[Mapping[str, Any]]) -> Result:
    scores = []
    for names in TASKS[task]:
        # Metrics stand in the row itself, or apart.
        places = [dict(row) | row.get("metrics", {}) for row in rows]
        values = [next((place[name] for name in names if name in place), None) for place in places]
        if None in values:
            raise ValueError(f"rows of {task} must have the metric {names[0]}, got {sorted(places[0])}")
        scores.append([100 * float(value) for value in values if value is not None])
    seeds, seconds = [int(row["seed"]) for row in rows], [float(row["seconds"]) for row in rows]
    return Result(scores, seeds, rows[-1]["parameters"], seconds, [row.get("settings", {}) for row in rows])


def _placed(key: Key, results: Mapping[Key, Mapping[str, Result]]) -> Key:
    """A pruned model that does not say its size stands beside the converted one of most nearly its parameters."""
    model, method, size, stage = key
    if method != "pruned" or size is not None:
        return key
    own = next(iter(results[key].values())).parameters
    others = {
        other_size: next(iter(tasks.values())).parameters
        for (other, other_method, other_size, _), tasks in results.items()
        if other == model and other_method not in ("original", "pruned") and other_size is not None
    }
    nearest = min(others, key=lambda other: abs(others[other] - own), default=None)
    return model, method, nearest, stage


def _order(key: Key) -> tuple[str, float, int, int]:
    model, method, size, stage = key
    return model, -(size or 10**9), METHODS.index(method), STAGES.index(stage)


def differences(result: Result, original: Result) -> list[float]:
    """By how much each run's mean score is above that of the original of the same seed, where there is one."""
    before = original.means
    return [score - before[seed] for seed, score in result.means.items() if seed in before]


def pretraining(folder: Path = RESULTS) -> list[RunRecord]:
    """Records of masked language modelling, the last of each config."""
    records = [record for path in sorted(folder.rglob("*.jsonl")) for record in _read(path) if record.name == "mlm"]
    records.sort(key=lambda record: record.provenance["time"])
    return list({repr(record.config): record for record in records}.values())


def published() -> dict[str, Any]:
    """What the paper printed."""
    import yaml

    read: dict[str, Any] = yaml.safe_load(PUBLISHED.read_text(encoding="utf-8"))
    return read


def published_model(model: str) -> str:
    """The model of the paper that is of the same kind as one measured here."""
    kinds = {"albert": "ALBERT", "distil": "DistilBERT"}
    return next((name for part, name in kinds.items() if part in model.lower()), "BERT-base")


def title_of(model: str) -> str:
    """What to call a model: of one that was trained here, the name of its run."""
    known = {"minilm": "MiniLM", "minilm-distilbert": "MiniLM as a DistilBERT"}
    path = Path(model)
    return known.get(model, path.parent.name if path.name == "model" and path.parent.name else model)
