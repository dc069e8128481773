"""`collab translate`: a trained encoder-decoder on a sentence, a file or the standard input."""

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from collab import sources
from collab.command_options import read_device, read_dtype
from collab.commands import Debug, Device, Dtype, Json, Model, _command, _print_json, _progress
from collab.recipes.translating import translate as translate_

_CHUNK = 10_000
"""Lines of a file that are sorted by length together."""


@_command(
    'collab translate ./run/model --text "The house is small."',
    "collab translate ./run/model newstest.en --save newstest.de",
    "cat newstest.en | collab translate ./run/model -",
)
def translate(
    model: Model,
    file: Annotated[
        str | None, typer.Argument(metavar="[FILE|-]", help="A sentence a line; - is the standard input.")
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option(metavar="SENTENCE", help="Translate this; may be given several times.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write to this file, not to the standard output.")
    ] = None,
    beams: Annotated[int, typer.Option(min=1, help="Hypotheses that are kept; 1 is greedy search.")] = 4,
    length_penalty: Annotated[float, typer.Option(help="Above zero favours long translations.")] = 0.6,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Subwords of a batch.")] = 8192,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Translate with a trained encoder-decoder model.

    A sentence a line, in the order they came; an empty line stays empty. The model's own cache is used, in which
    collaborative heads keep one key for all.
    """
    if (file is None) == (text is None):
        raise ValueError(f"give either a FILE, - or --text, got {'none' if file is None else 'both'}")
    if save is not None and (save.is_dir() or not save.absolute().parent.is_dir()):
        raise ValueError(f"--save must be a file in a directory that is there, got {save}")
    place, numbers = read_device(device), read_dtype(dtype)
    if file not in (None, "-") and not Path(str(file)).is_file():
        raise FileNotFoundError(f"FILE must be there, got {file}")
    opened, tokenizer = _open(model, numbers, place)
    translated: list[str] = []
    bar = _progress("translating")
    with _writer(save) as write:
        for lines in _chunks(file, text):
            found = translate_(
                opened, tokenizer, lines,
                beams=beams, length_penalty=length_penalty, batch_tokens=batch_tokens, progress=bar,
            )  # fmt: skip
            if as_json:
                translated += found
            if save is not None or not as_json:
                for line in found:
                    write(line)
    if as_json:
        _print_json({"model": model, "translations": translated})


@contextlib.contextmanager
def _writer(save: Path | None) -> Iterator[Callable[[str], object]]:
    """What writes a line, to a file that is there when all of it is, or to the standard output."""
    if save is None:
        yield typer.echo
        return
    partial = save.with_name(f".{save.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            yield lambda line: file.write(f"{line}\n")
        partial.replace(save)
    finally:
        partial.unlink(missing_ok=True)


def _open(model: str, dtype: torch.dtype | None, device: torch.device) -> tuple[torch.nn.Module, object]:
    opened = sources.open_model(model, dtype=dtype)
    if not getattr(opened.config, "is_encoder_decoder", False) or not hasattr(opened, "generate"):
        raise ValueError(f"MODEL must be an encoder-decoder that generates text, got a {type(opened).__name__}")
    return opened.to(device), sources.open_tokenizer(model)


def _chunks(file: str | None, text: Sequence[str] | None) -> Iterator[list[str]]:
    """Lines to be sorted together: all that was given; of a person who types, each by itself."""
    if text is not None:
        yield list(text)
        return
    size = 1 if file == "-" and sys.stdin.isatty() else _CHUNK
    with contextlib.nullcontext(sys.stdin) if file == "-" else Path(str(file)).open(encoding="utf-8") as stream:
        try:
            while lines := [line.rstrip("\n") for line in itertools.islice(stream, size)]:
                yield lines
        except UnicodeDecodeError as error:
            raise ValueError(f"{'the standard input' if file == '-' else file} must be UTF-8: {error}") from None
