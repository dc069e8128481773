"""`collab evaluate`: how well a model does its task, original or converted."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from collab import sources
from collab.classification import Preparation, accuracy, outputs_for, preparation_of
from collab.command_options import read_device, read_dtype
from collab.commands import Debug, Device, Dtype, Json, Model, _examples, _print_json, _progress, _reported, app
from collab.recipes.images import SPLITS, ImageList, archives_in, decoded, find_images
from collab.recipes.settings import cast_value
from collab.swap import count_parameters
from collab.table import format_table

evaluations = typer.Typer(
    rich_markup_mode=None, add_completion=False, no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
app.add_typer(evaluations, name="evaluate", help="Measure how well a model does its task, original or converted.")

_NAMED = 5
"""Images that cannot be read and are named."""


def _vision(
    model: Model,
    data: Annotated[
        list[str], typer.Argument(metavar="DATA...", help="Folder of images, archives of them, or datasets:NAME.")
    ],
    split: Annotated[
        str | None,
        typer.Option(help="train or val; val where DATA has such a folder, else the class folders in DATA itself."),
    ] = None,
    max_images: Annotated[int | None, typer.Option(min=1, help="At most so many, of each class alike.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images the model is given at once.")] = 64,
    size: Annotated[int | None, typer.Option(min=1, help="Rows and columns that are read.")] = None,
    resize: Annotated[int | None, typer.Option(min=1, help="Make the shorter side so long before.")] = None,
    interpolation: Annotated[str | None, typer.Option(help="bicubic, bilinear, lanczos or nearest.")] = None,
    mean: Annotated[str | None, typer.Option(metavar="R,G,B", help="Of each colour from 0 to 1.")] = None,
    std: Annotated[str | None, typer.Option(metavar="R,G,B", help="Standard deviation of each colour.")] = None,
    refuse_broken: Annotated[bool, typer.Option("--refuse-broken", help="Stop at images that cannot be read.")] = False,
    precision: Annotated[str, typer.Option(help="What is computed in: fp32 or bf16.")] = "fp32",
    dtype: Dtype = "auto",
    device: Device = "cpu",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Judge an image classifier of transformers or timm: Acc@1, Acc@5 and images a second.

    DATA is laid out as ImageNet (val/CLASS/...) or Tiny-ImageNet (val/images and val/val_annotations.txt). Images are
    prepared as the model says; where it does not, as the options say. Classes are matched to the model's outputs by
    name; a model without names has one output for each class, in the order of their names.
    """
    if precision not in ("fp32", "bf16"):
        raise ValueError(f"--precision must be fp32 or bf16, got {precision!r}")
    images = _find(data, split).spread(max_images)
    opened = sources.open_model(model, dtype=read_dtype(dtype), device=read_device(device))
    prepared, note = preparation_of(opened, model)
    given = {
        "size": size, "resize": resize, "interpolation": interpolation, "mean": _colours("--mean", mean),
        "deviation": _colours("--std", std),
    }  # fmt: skip
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if size is not None and resize is None and prepared.resize is not None:
        changes["resize"] = max(size, round(prepared.resize * size / prepared.size))
    prepared = replace(prepared, **changes)
    outputs, how = outputs_for(opened, images.classes)
    broken: list[str] = []
    begin = time.perf_counter()
    batches = _batches(images, prepared, outputs, batch_size, broken, next(opened.parameters()).dtype)
    shown: Any = _progress("judging")(batches, -(-len(images) // batch_size))
    found = accuracy(opened, shown, precision=precision)
    whole = time.perf_counter() - begin
    if broken:
        named = "; ".join(broken[:_NAMED]) + (f" and {len(broken) - _NAMED} more" if len(broken) > _NAMED else "")
        if refuse_broken:
            raise ValueError(f"every image must be one that can be read, but these cannot: {named}")
        note = "; ".join(filter(None, (note, f"left out {len(broken)} images that cannot be read: {named}")))
    _show(model, opened, prepared, found.to_dict() | {"seconds_with_reading": whole}, [how, note], as_json)


def _show(name: str, model: Any, prepared: Preparation, found: dict[str, Any], notes: list[str], as_json: bool) -> None:
    parameters = count_parameters(model)
    notes = [note for note in notes if note]
    if as_json:
        about = {"model": name, "parameters": parameters, "preparation": prepared.to_dict(), "notes": notes}
        _print_json(about | found)
        return
    rows = [
        ["Acc@1 %", f"{found['top1']:.2f}"],
        ["Acc@5 %", f"{found['top5']:.2f}"],
        ["images", f"{found['images']:,}"],
        ["parameters", f"{parameters:,}"],
        ["images/s, model alone", f"{found['images_per_second']:,.0f}"],
        ["seconds, with reading", f"{found['seconds_with_reading']:.1f}"],
    ]
    typer.echo("\n".join([format_table(["measure", name], rows), *(f"note: {note}" for note in notes)]))


def _find(data: list[str], split: str | None) -> ImageList:
    """The images of the split, or of the folder itself where it has no folder for a split."""
    if split is not None and split not in SPLITS:
        raise ValueError(f"--split must be train or val, got {split!r}")
    path = Path(data[0]).expanduser()
    if split is None and len(data) == 1 and path.is_dir() and not archives_in(path):
        names = {child.name for child in path.iterdir() if child.is_dir()}
        nested = {inner.name for name in names for inner in (path / name).iterdir() if inner.is_dir()}
        if not any(name in names | nested for name in SPLITS["val"]):
            return find_images(data, "")
    return find_images(data, split or "val")


def _colours(option: str, text: str | None) -> tuple[float, float, float] | None:
    """`0.5` or `0.485,0.456,0.406`."""
    if text is None:
        return None
    parts = text.split(",") * (3 if "," not in text else 1)
    values: tuple[float, float, float] = cast_value(option, ",".join(parts), tuple[float, float, float])
    return values


def _batches(
    images: ImageList, prepared: Preparation, outputs: Tensor, batch_size: int, broken: list[str], dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor]]:
    """Normalised pixels and outputs; images that cannot be read are left out and named in `broken`."""
    pixels, labels = [], []
    for place, found in decoded(images, prepared):
        if isinstance(found, OSError):
            broken.append(f"{images.names[place]} ({found})")
            continue
        pixels.append(found)
        labels.append(int(outputs[images.labels[place]]))
        if len(pixels) == batch_size:
            yield prepared.normalised(torch.stack(pixels)).to(dtype), torch.tensor(labels)
            pixels, labels = [], []
    if pixels:
        yield prepared.normalised(torch.stack(pixels)).to(dtype), torch.tensor(labels)


_vision_command: Any = _reported(_vision)
evaluations.command(
    "vision",
    epilog=_examples(
        "collab evaluate vision ./my-vit imagenet",
        "collab evaluate vision deit_base_patch16_224 imagenet --device cuda",
        "collab evaluate vision ./my-vit-96 tiny-imagenet-val.tar.xz --max-images 1000 --json",
    ),
)(_vision_command)
