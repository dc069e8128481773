"""`collab report`: a page that shows what a conversion did."""

from pathlib import Path
from typing import Annotated

import typer

import collab
from collab.command_options import REPORT_INPUTS, read_device, read_report_inputs
from collab.commands import Debug, Device, Json, _command, _print_json, _progress


@_command(
    "collab report ./my-bert-384",
    "collab report ./my-bert-384 --text 'The bank raised its rates.' --inputs sentences.txt",
    "collab report ./my-vit-96 --image cat.jpg --inputs ./photos",
    "collab report ./my-bert-384 --original ./my-bert --output ./report --json",
)
def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory that a conversion wrote.")],
    original: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="The model it was converted from: a directory or a name on the hub; if not given, the one that the "
            "conversion recorded.",
        ),
    ] = None,
    text: Annotated[str | None, typer.Option(metavar="TEXT", help="Text whose attention is drawn.")] = None,
    image: Annotated[Path | None, typer.Option(metavar="FILE", help="Image whose attention is drawn.")] = None,
    inputs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE|DIR",
            help="What to compare and time the two models on: a text file, one text a line, or a folder of images; if "
            "not given, everyday English sentences.",
        ),
    ] = None,
    max_inputs: Annotated[int, typer.Option(min=1, help="Texts or images to compare on.")] = REPORT_INPUTS,
    output: Annotated[
        Path | None, typer.Option(metavar="OUT", help="Directory to write to; DIR/report if not given.")
    ] = None,
    device: Device = "cpu",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a page that shows what a conversion did.

    Sizes, errors, spectra, mixing, attention of both models side by side, parameters, cache and speed, on one page that
    fetches nothing, report.html; its numbers in report.json and its figures as files beside it.
    """
    if text is not None and image is not None:
        raise ValueError("give either --text TEXT or --image FILE, not both")
    found = collab.report(
        directory,
        original=original,
        example=image if text is None else text,
        inputs=read_report_inputs(inputs, max_inputs),
        output=output,
        device=read_device(device),
        progress=_progress("reporting"),
    )
    if as_json:
        _print_json(found.to_dict())
    else:
        typer.echo(str(found))
