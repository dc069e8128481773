"""The paper's Table 1: parameters, operations and time of one layer, measured here, beside what it printed."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from collab.records import RunRecord
from collab.rivals import Setting, Skipped
from collab.running import Progress
from collab.speed_records import COLLABORATIVE, ORDINARY, best, latest, size_of
from collab.sweep import Row, sweep

PASSES = ("training", "inference")

HEADER = (
    "shared_dim", "parameters", "paper", "FLOPs", "paper", "training ms", "V100, paper", "inference ms", "V100, paper",
    "runs",
)  # fmt: skip


def published() -> dict[str, Any]:
    """What the paper printed: sizes and rows of a V100."""
    text = Path(__file__).with_name("published.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)["table1"]
    return table


def measure_table1(
    setting: Setting,
    *,
    is_compiled: bool = False,
    skipped: Skipped = lambda name, error: None,
    progress: Callable[[str], Progress | None] = lambda step: None,
) -> Iterator[Row]:
    """Measure both passes of every layer of the table.

    Args:
        setting: device, type, threads and repeats; sizes are the paper's.
        is_compiled: also measure layers made by `torch.compile`.
        skipped: told what could not be measured, and why.
        progress: a progress bar for a pass, given its name.
    """
    printed = published()
    sizes = {name: printed[name] for name in ("batch", "tokens", "width", "num_heads")}
    for step in PASSES:
        torch.compiler.reset()
        yield from sweep(
            replace(setting, step=step, head_dim=None, causal=False, **sizes),
            [(row["shared_dim"], None) for row in printed["rows"] if row["shared_dim"]],
            compile_ordinary=is_compiled,
            compile_ours=is_compiled,
            skipped=skipped,
            progress=progress(step),
        )


def table1_cells(records: Sequence[RunRecord]) -> list[list[str]]:
    """Under `HEADER`, a line for every layer of the paper's table, from the records of one device."""
    figures = [*best(latest(records), ORDINARY), *best(latest(records), COLLABORATIVE, "auto")]
    measured = {(record.config["pass"], size_of(record)[0]): record for record in figures}
    rows = published()["rows"]
    lines = []
    for row in rows:
        size = row["shared_dim"] or 0
        here = {step: measured.get((step, size)) for step in PASSES}
        cells = [str(size) if size else "ordinary"]
        for name in ("parameters", "flops"):
            # Operations of one pass forward.
            cells += [_count(here["inference"], measured.get(("inference", 0)), name), _beside(row, name)]
        for step in PASSES:
            cells += [_time(here[step]), _beside(row, step)]
        names = dict.fromkeys(_runs(record) for record in here.values() if record is not None)
        lines.append([*cells, ", ".join(names)])
    return lines


def _count(record: RunRecord | None, ordinary: RunRecord | None, name: str) -> str:
    if record is None or ordinary is None:
        return "-"
    value, whole = record.metrics[name], ordinary.metrics[name]
    return f"{short_count(value)} (x {value / whole:.2f})"


def _beside(row: dict[str, Any], name: str) -> str:
    value, share = row[name]
    return f"{value if name in PASSES else short_count(value)} (x {share:.2f})"


def _time(record: RunRecord | None) -> str:
    return "-" if record is None else f"{record.metrics['milliseconds']:.4g} (x {record.metrics['ratio']:.2f})"


def short_count(value: float) -> str:
    """In thousands of millions, or millions, or thousands."""
    size, unit = next((pair for pair in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if value >= pair[0]), (1, ""))
    return f"{value / size:.{1 if unit == 'G' else 2}f}{unit}"


def _runs(record: RunRecord) -> str:
    """What computed it."""
    return f"{record.config['implementation']}{', compiled' if record.config['compiled'] else ''}"
