"""From records of `sweep` to the figures that tables and plots show."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from collab.records import RunRecord

COLLABORATIVE, ORDINARY = "collaborative", "ordinary"

_PLACE = ("device", "dtype", "threads", "pass", "batch", "tokens", "width", "num_heads", "head_dim", "causal", "replay")
"""Parts of a config that say what was measured at; the rest says what was measured."""


def place_of(record: RunRecord) -> tuple[Any, ...]:
    """What tells apart the settings that figures are of."""
    return tuple(record.config.get(name) for name in _PLACE)


def case_of(record: RunRecord) -> tuple[str, int, int]:
    """Pass, batch and tokens."""
    return record.config["pass"], record.config["batch"], record.config["tokens"]


def size_of(record: RunRecord) -> tuple[int, int]:
    """shared_dim and dims_per_head, 0 where there is none."""
    return record.config["shared_dim"] or 0, record.config["dims_per_head"] or 0


def size_name(size: tuple[int, int]) -> str:
    """`64`, or `128, 64 a head`."""
    return f"{size[0]}, {size[1]} a head" if size[1] else f"{size[0]}"


def latest(records: Iterable[RunRecord]) -> list[RunRecord]:
    """Of every kind of layer, size and setting, what the last run measured: figures of different runs are not mixed."""
    found: dict[Any, list[RunRecord]] = {}
    for record in records:
        key = (place_of(record), record.config["kind"], size_of(record))
        others = found.get(key, [])
        same_run = others and others[0].config["run"] == record.config["run"]
        found[key] = [*others, record] if same_run else [record]
    return [record for group in found.values() for record in group]


def best(records: Iterable[RunRecord], kind: str, asked: str | None = None) -> list[RunRecord]:
    """Of every setting and size, the fastest record of a kind, eager or compiled.

    Args:
        records: any.
        kind: of the layer.
        asked: the implementation that was asked for; whichever it was if not given.
    """
    found: dict[Any, RunRecord] = {}
    for record in records:
        if record.config["kind"] != kind or (asked is not None and record.config["asked"] != asked):
            continue
        key = (place_of(record), size_of(record))
        if key not in found or record.metrics["ratio"] < found[key].metrics["ratio"]:
            found[key] = record
    return list(found.values())


def series(records: Sequence[RunRecord]) -> list[tuple[str, list[RunRecord]]]:
    """Name -> figures of one line of a table or a plot, for all that was measured beside ordinary attention.

    First what the layer chooses by itself, then the implementations it was told to use, then other layers.
    """
    others = [record for record in records if record.config["kind"] != ORDINARY]
    own = [record for record in others if record.config["kind"] == COLLABORATIVE]
    asked = dict.fromkeys(record.config["asked"] for record in own)
    kinds = dict.fromkeys(record.config["kind"] for record in others if record not in own)
    found = [(name, best(own, COLLABORATIVE, name)) for name in sorted(asked, key=lambda name: name != "auto")]
    return found + [(kind, best(others, kind)) for kind in kinds]


def groups(records: Sequence[RunRecord], key: Callable[[RunRecord], Any]) -> dict[Any, list[RunRecord]]:
    """Records by a key, in the order the keys come up."""
    found: dict[Any, list[RunRecord]] = {}
    for record in records:
        found.setdefault(key(record), []).append(record)
    return found
