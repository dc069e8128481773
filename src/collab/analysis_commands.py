"""Commands that look at a model and change nothing: `collab analyze`, `collab cost` and `collab explain`."""

import functools
from pathlib import Path
from typing import Annotated

import torch
import typer

import collab
from collab import ops, sources
from collab.analysis_plot import check_figure
from collab.calibration import Calibration
from collab.command_options import parse_shared_dim, read_device, read_dtype, read_inputs, selection
from collab.commands import (
    BatchSize,
    Calibrate,
    Debug,
    Device,
    Dtype,
    Json,
    MaxInputs,
    MaxLength,
    Model,
    Only,
    SaveCalibration,
    _command,
    _print_json,
    _progress,
    _statistics,
)
from collab.config import CollaborativeConfig
from collab.cost import TOKENS, Size
from collab.running import call


@_command(
    "collab analyze ./my-bert",
    "collab analyze ./my-bert --plot heads.png",
    "collab analyze ./my-bert --calibrate sentences.txt --json",
)
def analyze(
    model: Model,
    only: Only = None,
    calibrate: Calibrate = None,
    max_inputs: MaxInputs = 1024,
    max_length: MaxLength = 128,
    batch_size: BatchSize = 32,
    save_calibration: SaveCalibration = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw it to this .png, .svg or .pdf file, too.")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure how many dimensions heads use and what they share.

    For each layer: how many principal components hold most of the energy of the query and key matrices and of their
    product, head by head and for all heads; which heads are alike; of a converted model, how many of the shared
    dimensions a head uses. With --calibrate, as far as such inputs can tell.
    """
    if plot is not None:
        check_figure(plot)
    inputs = read_inputs(calibrate, max_inputs, CollaborativeConfig(shared_dim=1.0), None, save_calibration)
    opened = sources.open_model(model, dtype=read_dtype(dtype), device=read_device(device))
    if inputs is not None and not isinstance(inputs, Calibration):
        batches = sources.calibration_batches(opened, model, inputs, batch_size=batch_size, max_length=max_length)
        inputs = _statistics(opened, batches, only, save_calibration)
    found = collab.analyze(opened, calibration=inputs, only=selection(only), progress=_progress("analyzing"))
    if plot is not None:
        found.plot(plot)
    if as_json:
        _print_json({"model": model, **found.to_dict(), "plot": None if plot is None else str(plot)})
    else:
        typer.echo(str(found) if plot is None else f"{found}\ndrawn to {plot}")


@_command(
    "collab cost ./my-bert --shared-dim 0.5",
    "collab cost ./my-gpt2 --shared-dim 384,64 --tokens 128,1024,8192",
    "collab cost ./my-bert --shared-dim 384 --dims-per-head 64 --json",
    "collab cost ./my-bert-384",
)
def cost(
    model: Model,
    shared_dim: Annotated[
        str | None,
        typer.Option(
            metavar="SIZES",
            help="Dimensions that all heads share: integers or fractions of each layer's own size with commas between, "
            "or PATH=INTEGER,PATH=INTEGER; not needed for a converted model.",
        ),
    ] = None,
    tokens: Annotated[str, typer.Option(metavar="LENGTHS", help="Tokens of a sequence.")] = ",".join(map(str, TOKENS)),
    dims_per_head: Annotated[
        int | None, typer.Option(help="How many of the shared dimensions a head uses; all if not given.")
    ] = None,
    only: Only = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Count what sharing would save and cost.

    Prints parameters, operations and key cache of a model's queries, keys and scores before and after, and up to which
    length of sequence operations are saved. By formula: nothing is converted, nothing is timed.
    """
    sizes = None if shared_dim is None else _parse_sizes(shared_dim)
    lengths = _parse_lengths(tokens)
    report = collab.cost(
        sources.open_model(model), sizes, tokens=lengths, dims_per_head=dims_per_head, only=selection(only)
    )
    if as_json:
        _print_json({"model": model, **report.to_dict()})
    else:
        typer.echo(str(report))


@_command(
    "collab explain ./my-bert-384 --text sentences.txt",
    "collab explain ./my-bert-384 --text sentences.txt --training --implementation matmul",
    "collab explain ./my-vit-96 --images ./photos --device cuda --json",
)
def explain(
    model: Model,
    text: Annotated[Path | None, typer.Option(metavar="FILE", help="Text file, one text a line.")] = None,
    images: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of images, for vision models.")] = None,
    max_length: MaxLength = 128,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts or images of the batch, at most.")] = 16,
    training: Annotated[
        bool, typer.Option("--training/--inference", help="Run in training mode and for gradients, or as it is used.")
    ] = False,
    implementation: Annotated[
        str, typer.Option(metavar="NAME", help=f"Make it run this one: {', '.join(ops.IMPLEMENTATIONS)}.")
    ] = "auto",
    dtype: Dtype = "auto",
    device: Device = "cpu",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Say which implementation a converted model's attention runs, and why.

    Runs one batch and prints, for each layer, what it was given and what computes it; then the rule that says so, and
    why no other implementation does.
    """
    if (text is None) == (images is None):
        raise ValueError("give either --text FILE or --images DIR")
    ops.check_implementation(implementation)
    texts = sources.read_texts(text)[:batch_size] if text is not None else []
    paths = sources.find_images(images)[:batch_size] if images is not None else []
    place = read_device(device)
    opened = sources.open_model(model, dtype=read_dtype(dtype), device=place).train(training)
    if images is not None:
        batches = sources.image_batches(opened, model, paths, batch_size=batch_size)
    else:
        batches = sources.text_batches(opened, model, texts, batch_size=batch_size, max_length=max_length)
    with torch.set_grad_enabled(training), collab.use_implementation(implementation):
        found = call(functools.partial(collab.explain, opened), next(iter(batches)), place)
    if as_json:
        _print_json({"model": model, **found.to_dict()})
    else:
        typer.echo(str(found))


def _parse_sizes(text: str) -> Size | list[int | float]:
    """`128`, `384,0.5` or `path=64,path=32`."""
    if "=" in text or "," not in text:
        return parse_shared_dim(text)
    sizes = [parse_shared_dim(item) for item in text.split(",")]
    return [size for size in sizes if not isinstance(size, dict)]


def _parse_lengths(text: str) -> list[int]:
    """`128` or `128,512`."""
    try:
        return [int(length) for length in text.split(",")]
    except ValueError:
        raise ValueError(f"--tokens must be integers with commas between, like 128,512, got {text!r}") from None
