"""Records of the vision recipe: which trainings are rows of one table, which conversions are of one model.

What the paper printed is in `paper/published.yaml`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from collab.records import RunRecord, read_records

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "paper" / "results"
PUBLISHED = ROOT / "paper" / "published.yaml"

ELSEWHERE = {"data", "cache_folder", "workers", "log_every", "checkpoint_epochs"}
"""Settings that change no result."""

OF_ROWS = {"attention", "key_dim", "seed", "map_images"}
"""Settings in which rows of one table differ."""

WAYS = ("paper", "unshared", "shared", "calibrated", "refined", "sparse")
"""Ways to convert, as tables have them in order."""

SAME = 0.1
"""Points of Acc@1 by which one model may differ from itself, run by run: a device sums in another order."""

Records = Sequence[RunRecord]


def recorded(folder: Path = RESULTS) -> list[RunRecord]:
    """All records of the recipe; of runs with the same settings the last."""
    found: dict[str, RunRecord] = {}
    for path in sorted(folder.glob("vision*.jsonl")) if folder.is_dir() else []:
        for record in read_records(path):
            if record.name == "vision":
                key = _settings_but(record, ELSEWHERE)
                found.pop(key, None)
                found[key] = record
    return list(found.values())


def published(table: str, path: Path = PUBLISHED) -> list[dict[str, str]]:
    """The rows the paper printed, none where they are not at hand."""
    if not path.exists():
        return []
    import yaml

    read = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    rows: list[dict[str, str]] = (read.get(table) or {}).get("rows", [])
    return rows


def trained(records: Records) -> list[RunRecord]:
    """Trainings of DeiT-B3 alike in settings, images and length: of several such sets the one with the most runs."""
    alike: dict[str, list[RunRecord]] = {}
    for record in records:
        if "train" in record.metrics and record.config["model"] == "deit-b3":
            differ = OF_ROWS | ELSEWHERE | {name for name in record.config if name.startswith("convert_")}
            data = record.metrics["data"]
            images = [data[name] for name in ("train_images", "val_images", "classes")]
            alike.setdefault(f"{images} {_settings_but(record, differ)}", []).append(record)
    return max(reversed(alike.values()), key=len, default=[])


def row_of(record: RunRecord) -> tuple[str, int]:
    """Kind of heads and key dimension."""
    width = record.config["width"] or 768
    return record.config["attention"], record.config["key_dim"] or width


def in_rows(records: Records) -> dict[tuple[str, int], list[RunRecord]]:
    """Runs that differ in their seed alone together: ordinary heads first, large sizes first."""
    found: dict[tuple[str, int], list[RunRecord]] = {}
    for record in sorted(trained(records), key=lambda one: (row_of(one)[0] != "concatenate", -row_of(one)[1])):
        found.setdefault(row_of(record), []).append(record)
    return found


@dataclass(frozen=True)
class Converted:
    """One model and everything it was converted to.

    Attributes:
        name: of the model.
        records: what it is known from, the newest last.
        rows: conversions, by size, way and number of images; `change` is of Acc@1, from the original in the same run.
        maps: name of a model -> attention maps.
    """

    name: str
    records: list[RunRecord]
    rows: list[dict[str, Any]]
    maps: dict[str, Any]

    @property
    def original(self) -> dict[str, Any]:
        """What the model scored as it is, and its parameters."""
        return self.records[-1].metrics

    @property
    def full_dim(self) -> int:
        """Heads x head size."""
        size: int = self.original["full_dim"]
        return size


def converted(records: Records) -> list[Converted]:
    """Conversions by model: of the same weights, which score the same, judged on the same number of images."""
    models: list[list[RunRecord]] = []
    for record in records:
        if record.metrics.get("conversions"):
            own = next((group for group in models if _is_same_model(group[0], record)), None)
            if own is None:
                models.append([record])
            else:
                own.append(record)
    found = []
    for own in sorted(models, key=lambda group: model_name(group[0])):
        rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        maps: dict[str, Any] = {}
        for record in own:
            maps |= record.metrics.get("maps", {})
            for row in record.metrics["conversions"]:
                place = (-row["shared_dim"], WAYS.index(row["method"]), row["inputs"], row["dims_per_head"] or 0)
                rows[place] = row | {"change": row["top1"] - record.metrics["top1"]}
        found.append(Converted(model_name(own[0]), own, [rows[place] for place in sorted(rows)], maps))
    return found


def _is_same_model(first: RunRecord, second: RunRecord) -> bool:
    ours, theirs = first.metrics, second.metrics
    return (
        model_name(first) == model_name(second)
        and ours["data"]["val_images"] == theirs["data"]["val_images"]
        and abs(ours["top1"] - theirs["top1"]) <= SAME
    )


def model_name(record: RunRecord) -> str:
    """What a converted model is called."""
    path = Path(record.config["model"])
    name = path.parent.name if path.name == "model" else path.name  # the directory in a run's folder
    return {"concatenated-768": "DeiT-B3, trained here"}.get(name, name)


def side_by_side(own: Records, among: Records) -> int:
    """How many runs, at most, ran while one of `own` did, itself counted."""

    def span(record: RunRecord) -> tuple[float, float]:
        end = datetime.fromisoformat(record.provenance["time"]).timestamp()
        return end - record.metrics["seconds"], end

    spans = [span(record) for record in among]
    most = 0
    for record in own:
        begin, end = span(record)
        starts = [begin, *(start for start, _ in spans if begin < start < end)]
        most = max([most, *(sum(start <= at < stop for start, stop in spans) for at in starts)])
    return most


def _settings_but(record: RunRecord, names: set[str]) -> str:
    return repr(sorted((name, value) for name, value in record.config.items() if name not in names))
