"""What a conversion says of itself, in a file beside the weights: written by the conversion, read for its report."""

import json
import math
from pathlib import Path
from typing import Any

import torch

from collab.config import CollaborativeConfig
from collab.records import provenance
from collab.swap import SwapReport

RECORD_NAME = "collab-report.json"


def conversion_record(
    model: str,
    output: Path,
    config: CollaborativeConfig,
    report: SwapReport,
    *,
    calibration: tuple[str, int | None] | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """Plain values: what was converted, how, with what result, and where.

    Args:
        model: directory or hub name of the original.
        output: directory of the converted model.
        config: the settings.
        report: what `collaborate_` said.
        calibration: what it was calibrated on, if it was, and how many inputs that is, if that is known.
        device: where it was computed.
    """
    return {
        "model": model,
        "output": str(output),
        "settings": config.to_dict(),
        "calibration": None if calibration is None else {"from": calibration[0], "inputs": calibration[1]},
        "provenance": provenance(config.seed, device),
        "report": report.to_dict(),
    }


def read_record(folder: Path) -> dict[str, Any]:
    """The record in a directory; that there is none, or another thing, is a ValueError that says so."""
    file = folder / RECORD_NAME
    if not file.is_file():
        raise ValueError(f"there is no {RECORD_NAME}, in which collab convert says what it did")
    try:
        record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        sites = record["report"]["sites"]
        if not all(isinstance(site["path"], str) for site in sites):
            raise TypeError("its layers have no paths")
        _check_kinds(record, sites)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ValueError(f"{RECORD_NAME} is not what collab convert writes: {type(error).__name__}: {error}") from error
    return record


def _check_kinds(record: dict[str, Any], sites: list[dict[str, Any]]) -> None:
    """Refuse values of another kind than the report reads."""
    kinds = [(record, name) for name in ("calibration", "settings", "provenance")]
    kinds += [(record["report"], name) for name in ("left", "refinement")]
    wrong = [name for where, name in kinds if not isinstance(where.get(name) or {}, dict)]
    if wrong:
        raise TypeError(f"{', '.join(wrong)} must be an object")
    if not all(isinstance(site.get(name, ""), str) for site in sites for name in ("method", "metric")):
        raise TypeError("method and metric of its layers must be texts")
    errors = [site.get(name) for site in sites for name in ("error", "unshared_error")]
    if not all(error is None or (isinstance(error, int | float) and math.isfinite(error)) for error in errors):
        raise TypeError("errors of its layers must be finite numbers")
