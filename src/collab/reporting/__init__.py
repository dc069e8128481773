"""report: one page that shows what a conversion did, with the numbers and the figures in files beside it."""

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from collab import sources
from collab.checkpoint import read_config, sites_in
from collab.hosts import Collaborative
from collab.inspection import find_attention
from collab.reporting.cells import MINUS, resolve, written
from collab.reporting.facts import gather
from collab.reporting.figures import NAMES, draw_all
from collab.reporting.inputs import Example, Judged, LeftOut, example_input, judged_inputs
from collab.reporting.page import render, to_json
from collab.reporting.pictures import data_uri
from collab.reporting.record import read_record
from collab.reporting.subject import Subject
from collab.running import Progress, device_of
from collab.table import format_table

PAGE_NAME, DATA_NAME = "report.html", "report.json"


@dataclass(frozen=True)
class Report:
    """What `report` wrote. Prints as the first numbers of the page.

    Attributes:
        page: the HTML page.
        data: the JSON file with every number of the page.
        figures: the figures beside it, SVG and PNG.
        facts: what the JSON file holds.
    """

    page: Path
    data: Path
    figures: list[Path]
    facts: dict[str, Any]

    @property
    def left_out(self) -> dict[str, str]:
        """Part of the report -> why it is not there."""
        return {one["part"]: one["reason"] for one in self.facts["left_out"]}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON: where the files are, the first numbers, and what was left out."""
        headline = [{"label": one["label"], "value": resolve(self.facts, one["at"])} for one in self.facts["headline"]]
        files = {"page": str(self.page), "data": str(self.data), "figures": [str(path) for path in self.figures]}
        return files | {"headline": headline, "left_out": self.left_out}

    def __str__(self) -> str:
        # A minus of typographers is not in every terminal's alphabet.
        rows = [
            (one["label"], written(resolve(self.facts, one["at"]), one["kind"]).replace(MINUS, "-"))
            for one in self.facts["headline"]
        ]
        lines = [format_table(["what", "value"], rows)]
        lines += [f"left out: {part} ({reason})" for part, reason in self.left_out.items()]
        return "\n".join([*lines, f"report: {self.page}"])


def report(
    directory: str | os.PathLike[str],
    *,
    original: str | nn.Module | None = None,
    example: str | Path | None = None,
    inputs: Sequence[str] | Sequence[Path] | None = None,
    output: str | os.PathLike[str] | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Report:
    """Write a page that shows what a conversion did: sizes, errors, spectra, mixing, attention, cost and speed.

    The page, report.html, holds all it shows and fetches nothing. Beside it are report.json, with every number, and the
    figures as SVG and PNG. Files take their places when all of them are written. What cannot be shown is left out,
    and the page says why.

    Example:
        >>> import tempfile, transformers, collab
        >>> config = transformers.BertConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1)
        >>> model = transformers.BertModel(config)
        >>> swapped = collab.collaborate_(model, collab.CollaborativeConfig(shared_dim=16))
        >>> directory = tempfile.mkdtemp() + "/bert-16"
        >>> collab.save(model, directory)
        >>> made = collab.report(directory)
        >>> made.page.name, made.left_out["fidelity"][:35]
        ('report.html', 'it takes the original model, and it')

    Args:
        directory: a directory of a converted model of transformers or timm, as `save` and `collab convert` write it.
        original: the model it was converted from, which is left as it was, or its directory or name on the hub. If not
            given, the one that `collab convert` recorded, if it can be opened.
        example: whose attention to draw: a text, or, as a Path, an image. If not given, the first of the inputs.
        inputs: texts, or paths of images, to compare the two models on and to time them with; if not given, sentences
            that come with this library, for models that read English.
        output: directory to write to; "report" in `directory` if not given.
        device: where to compute.
        progress: wraps the loop over the parts of the report, given it and its length: a progress bar.

    Raises:
        FileNotFoundError, CheckpointError: `directory` does not hold a converted model.
        ValueError: `original`, `example` or `inputs` do not fit the model.
    """
    folder = Path(directory)
    sites_in(read_config(folder).get("collaborative"), folder)
    target = folder / "report" if output is None else Path(output)
    check_folder(target)
    converted = sources.open_model(str(folder), device=device)
    why_not: dict[str, str] = {}
    record: dict[str, Any] = {}
    try:
        record = read_record(folder)
    except ValueError as error:
        why_not["record"] = str(error)
    opened = _original(converted, original, record, device, why_not)
    judged, shown = _inputs(converted, folder, example, inputs, record, why_not)
    facts = gather(Subject(folder, converted, opened, record, judged, shown, why_not), progress)
    return _write(target, facts, shown)


def check_folder(folder: Path) -> None:
    """Check that files can be put into a directory, which need not exist yet; nothing is written."""
    existing = next(place for place in (folder, *folder.resolve().parents) if place.exists())
    if not existing.is_dir():
        raise NotADirectoryError(f"{existing} must be a directory to hold the report")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(f"{existing} must be writable to put the report there; or name another directory")


def _original(
    converted: nn.Module,
    given: str | nn.Module | None,
    record: Mapping[str, Any],
    device: torch.device | str,
    why_not: dict[str, str],
) -> nn.Module | None:
    """The original model. One that was asked for must be had and must fit; without the recorded one we can do."""
    if isinstance(given, nn.Module):
        places = [one.type for one in (device_of(given), torch.device(device))]
        if places[0] != places[1]:
            raise ValueError(f"the original must be on {places[1]}, where the report is made, got one on {places[0]}")
        return _fitting(given, converted, type(given).__name__)
    name = given if given is not None else record.get("model")
    if not isinstance(name, str):
        why_not["original"] = "it is not known which one it was; name it (--original MODEL)"
        return None
    dtype = next(converted.parameters()).dtype
    if given is not None:
        return _fitting(sources.open_model(given, dtype=dtype, device=device), converted, given)
    try:
        return _fitting(sources.open_model(name, dtype=dtype, device=device), converted, name)
    except Exception as error:  # of the hub, of a library that is missing, of files that are gone
        why_not["original"] = f"{name} cannot be opened here: {' '.join(str(error).split())}"
        return None


def _fitting(original: nn.Module, converted: nn.Module, name: str) -> nn.Module:
    """The original, if the converted model can have been made from it."""
    theirs = {site.path: site for site in find_attention(original)}
    for site in find_attention(converted):
        if not isinstance(site.module, Collaborative):
            continue
        other = theirs.get(site.path)
        if other is None or isinstance(other.module, Collaborative):
            state = "has no attention there" if other is None else "is converted itself"
            raise ValueError(f"the original must have ordinary attention at {site.path}, but {name} {state}")
        sizes = [(one.num_heads, one.head_dim, one.query_width, one.key_width) for one in (site, other)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"the original must have {site.num_heads} heads of {site.head_dim} and width {site.query_width} at "
                f"{site.path}, got {other.num_heads} of {other.head_dim} and {other.query_width} in {name}"
            )
    return original


def _inputs(
    converted: nn.Module,
    folder: Path,
    example: str | Path | None,
    inputs: Sequence[str] | Sequence[Path] | None,
    record: Mapping[str, Any],
    why_not: dict[str, str],
) -> tuple[Judged | None, Example | None]:
    """What to run the models on. What was given must fit the model; without our own sentences we can do."""
    calibrated_on = (record.get("calibration") or {}).get("from")
    if inputs is None and isinstance(example, Path):
        inputs = [example]
    wanted: tuple[tuple[str, bool, Callable[[], Any]], ...] = (
        ("judged", inputs is not None, lambda: judged_inputs(converted, folder, inputs, calibrated_on)),
        ("example", example is not None, lambda: example_input(converted, folder, example, inputs)),
    )
    made: dict[str, Any] = {}
    for name, is_given, make in wanted:
        try:
            made[name] = make()
        except (LeftOut, ValueError, ImportError) as error:
            if is_given:
                raise
            why_not[name] = str(error)
    return made.get("judged"), made.get("example")


def _write(folder: Path, facts: dict[str, Any], example: Example | None) -> Report:
    """Draw, render, and put every file in its place."""
    try:
        drawings = draw_all(facts)
    except ModuleNotFoundError as error:
        drawings = {}
        facts["left_out"].append({"part": "figures", "reason": str(error)})
    seen = None
    if example is not None and example.pixels is not None:
        seen = data_uri((example.pixels.permute(1, 2, 0) * 255).round().cpu())
    files: dict[str, bytes] = {}
    for name, drawing in drawings.items():
        files |= {f"{name}.svg": drawing.svg.encode(), f"{name}.png": drawing.png}
    figures = list(files)
    files[DATA_NAME] = to_json(facts).encode()
    page = render(facts, {name: drawing.inline for name, drawing in drawings.items()}, seen, DATA_NAME)
    files[PAGE_NAME] = page.encode()
    _put(folder, files)
    return Report(folder / PAGE_NAME, folder / DATA_NAME, [folder / name for name in figures], facts)


def _put(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files beside their places and then rename them all; figures of an earlier report that are none now go."""
    folder.mkdir(parents=True, exist_ok=True)
    unique = uuid.uuid4().hex[:8]
    drafts = {name: folder / f".{name}.{unique}.draft" for name in files}
    try:
        for name, content in files.items():
            drafts[name].write_bytes(content)
        for name, draft in drafts.items():
            draft.replace(folder / name)
    finally:
        for draft in drafts.values():
            draft.unlink(missing_ok=True)
    for name in (f"{figure}.{ending}" for figure in NAMES for ending in ("svg", "png")):
        if name not in files:
            (folder / name).unlink(missing_ok=True)
