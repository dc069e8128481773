"""What options of the command line mean: read, checked and refused before any work is done."""

import os
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from collab import sources
from collab.calibration import Calibration
from collab.checkpoint import check_target
from collab.config import CollaborativeConfig
from collab.inspection import AttentionSite

Inputs = Calibration | list[str] | list[Path]
"""What calibration is from: statistics, texts, image files."""

REPORT_INPUTS = 64
"""Texts or images that a report compares models on, at most, unless told."""


def read_size(
    shared_dim: str | None, budget: float | None, max_error: float | None, default: float | None = None
) -> dict[str, Any]:
    """The one option that says how small, as the setting it is of `CollaborativeConfig`; else `default`, a budget."""
    values = {"shared_dim": shared_dim, "budget": budget, "max_error": max_error}
    given = [f"--{name.replace('_', '-')}" for name, value in values.items() if value is not None]
    if not given and default is not None:
        return {"budget": default}
    if len(given) != 1:
        raise ValueError(f"give one of --shared-dim, --budget and --max-error, got {' and '.join(given) or 'none'}")
    if shared_dim is not None:
        return {"shared_dim": parse_shared_dim(shared_dim)}
    return {name: value for name, value in (("budget", budget), ("max_error", max_error)) if value is not None}


def read_inputs(
    calibrate: Path | None, max_inputs: int, config: CollaborativeConfig, refine: bool | None, save: Path | None
) -> Inputs | None:
    """What `--calibrate` names, if anything, once it is sure that all options that need it can have it."""
    if config.weights == "fresh" and (calibrate is not None or refine):
        raise ValueError("--weights fresh must come without --calibrate and --refine: there is nothing to be true to")
    inputs = None if calibrate is None else sources.read_calibration(calibrate, max_inputs)
    has_inputs = inputs is not None and not isinstance(inputs, Calibration)
    for option, is_given in (("--refine", refine), ("--save-calibration", save)):
        if is_given and not has_inputs:
            got = "none" if inputs is None else "statistics only"
            raise ValueError(f"{option} needs texts or images: name them with --calibrate, got {got}")
    if save is not None:
        if save.exists():
            raise ValueError(f"{save} exists already; name a file that does not")
        if not save.parent.is_dir() or not os.access(save.parent, os.W_OK):
            raise ValueError(f"--save-calibration must be in a directory that can be written to, got {save}")
        if save.suffix != sources.STATISTICS:
            raise ValueError(f"--save-calibration must end in {sources.STATISTICS}, got {save}")
    return inputs


def images_of(inputs: Inputs | None) -> list[Path] | None:
    """Of the inputs to calibrate with some images, for a report to show; of texts and of statistics none."""
    paths = [one for one in inputs if isinstance(one, Path)] if isinstance(inputs, list) else []
    return paths[:: -(-len(paths) // REPORT_INPUTS)] if paths else None


def read_report_inputs(inputs: Path | None, most: int) -> list[str] | list[Path] | None:
    """What `--inputs` names."""
    found = None if inputs is None else sources.read_calibration(inputs, most)
    if isinstance(found, Calibration):
        raise ValueError(f"--inputs must be a text file or a folder of images, got statistics: {inputs}")
    return found


def selection(only: Sequence[str] | None) -> Callable[[AttentionSite], bool] | None:
    """Which layers `--only` means."""
    if not only:
        return None
    return lambda site: any(fnmatchcase(site.path, glob) for glob in only)


def parse_shared_dim(text: str) -> int | float | dict[str, int]:
    """`128`, `0.5` or `path=64,path=32`."""
    try:
        if "=" in text:
            pairs = [(path.strip(), int(size)) for path, _, size in (item.rpartition("=") for item in text.split(","))]
        else:
            return float(text) if "." in text or "e" in text.lower() else int(text)
    except ValueError:
        raise ValueError(
            f"--shared-dim must be an integer like 128, a fraction like 0.5, or PATH=64,PATH=32, got {text!r}"
        ) from None
    sizes = dict(pairs)
    if len(sizes) < len(pairs):
        raise ValueError(f"--shared-dim must name every layer once, got {text!r}")
    return sizes


def check_output(model: str, out: Path, overwrite: bool) -> None:
    """Say now, not after an hour of work, that nothing could be written."""
    folder = sources.local_folder(model)
    if folder is not None and out.exists() and out.resolve() == folder.resolve():
        raise ValueError(f"OUT must be another directory than MODEL, got {out} for both")
    if out.exists() and not overwrite:
        raise ValueError(f"{out} exists already; name a directory that does not, or replace it with --overwrite")
    check_target(out, overwrite)


def read_device(name: str) -> torch.device:
    """Where to compute."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device must be like cpu, cuda or cuda:1, got {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device must be cpu where there is no CUDA device, got {name!r}")
    return device


def read_dtype(name: str) -> torch.dtype | None:
    """Type of the weights; None for that they were saved with."""
    if name != "auto" and name not in sources.DTYPES:
        raise ValueError(f"--dtype must be auto or one of {', '.join(sources.DTYPES)}, got {name!r}")
    return sources.DTYPES.get(name)
