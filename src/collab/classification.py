"""Image classifiers: how their images are prepared, which output is which class, and how often they are right."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from collab.running import device_of, evaluating
from collab.sources import local_folder

_CROP = 0.875
"""Side of the centre that is read as a share of the side images are brought to, where nothing says otherwise."""

_RESAMPLING = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3}
"""Name -> PIL's number for it, which is also what transformers writes."""


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What is done to an image before a classifier reads it.

    Attributes:
        size: rows and columns that are read.
        resize: the shorter side is made so long first, and the centre read; None squeezes the image into `size`.
        interpolation: "bicubic", "bilinear", "lanczos" or "nearest".
        mean, deviation: of each colour, which pixels from 0 to 1 are normalised with.
    """

    size: int
    resize: int | None
    interpolation: str = "bicubic"
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    deviation: tuple[float, float, float] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        if self.interpolation not in _RESAMPLING:
            raise ValueError(f"interpolation must be one of {', '.join(_RESAMPLING)}, got {self.interpolation!r}")
        if self.size < 1 or (self.resize is not None and self.resize < self.size):
            raise ValueError(f"resize must be at least size, which must be at least 1, got {self.resize}, {self.size}")

    def __call__(self, image: Any) -> Tensor:
        """(3, size, size) bytes of a PIL image in colour."""
        import numpy

        resampling = _RESAMPLING[self.interpolation]
        if self.resize is None:
            if image.size != (self.size, self.size):
                image = image.resize((self.size, self.size), resampling)
        else:
            scale = self.resize / min(image.size)
            if scale != 1:
                image = image.resize([max(self.resize, round(side * scale)) for side in image.size], resampling)
            left, top = (round((side - self.size) / 2) for side in image.size)
            image = image.crop((left, top, left + self.size, top + self.size))
        return torch.from_numpy(numpy.asarray(image).copy()).permute(2, 0, 1)

    def normalised(self, pixels: Tensor) -> Tensor:
        """Bytes (image, 3, size, size) as the model reads them."""
        mean, deviation = (
            torch.tensor(values, device=pixels.device)[:, None, None] for values in (self.mean, self.deviation)
        )
        return (pixels.float() / 255 - mean) / deviation

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)


def preparation_of(model: nn.Module, source: str) -> tuple[Preparation, str]:
    """How images are prepared for a model, and a note where that was assumed, else "".

    Args:
        model: of timm or transformers.
        source: its directory or hub name, where transformers keep an image processor.
    """
    if hasattr(model, "pretrained_cfg"):
        return _of_timm(model), ""
    processor = _processor(source)
    if processor is None:
        size = int(getattr(model.config, "image_size", 224))
        assumed = Preparation(size=size, resize=math.floor(size / _CROP), interpolation="bilinear")
        note = (
            f"{source} does not say how images are prepared: the shorter side is made {assumed.resize}, the centre of "
            f"{size} read, mean and deviation are 0.5; --resize, --interpolation, --mean and --std change that"
        )
        return assumed, note
    return _of_processor(processor), ""


def _of_timm(model: Any) -> Preparation:
    from timm.data import resolve_data_config

    size = getattr(getattr(model, "patch_embed", None), "img_size", None)  # may not be the one it was trained at
    config = resolve_data_config({} if size is None else {"input_size": (3, *size)}, model=model)
    side = int(config["input_size"][-1])
    resize = None if config.get("crop_mode") == "squash" else math.floor(side / config["crop_pct"])
    return Preparation(
        size=side,
        resize=resize,
        interpolation=config["interpolation"] if config["interpolation"] in _RESAMPLING else "bicubic",
        mean=tuple(config["mean"]),
        deviation=tuple(config["std"]),
    )


def _processor(source: str) -> Any:
    """The image processor of a directory or hub name, None where it has none."""
    import transformers

    folder = local_folder(source)
    if folder is not None and not (folder / "preprocessor_config.json").is_file():
        return None
    try:
        return transformers.AutoImageProcessor.from_pretrained(str(folder or source))
    except (OSError, ValueError):
        return None


def _of_processor(processor: Any) -> Preparation:
    def side(value: Any, *names: str) -> int | None:
        found = [value.get(name) if isinstance(value, dict) else getattr(value, name, None) for name in names]
        return next((int(one) for one in found if one), None)

    size, crop = processor.size, getattr(processor, "crop_size", None)
    shortest = side(size, "shortest_edge")
    read = side(crop, "height") if getattr(processor, "do_center_crop", False) else None
    whole = side(size, "height", "shortest_edge")
    numbers = {number: name for name, number in _RESAMPLING.items()}
    resample = getattr(processor, "resample", 2)
    if whole is None:
        raise ValueError(f"the image processor must say to which size images are brought, got {size}")
    return Preparation(
        size=read or whole,
        resize=shortest if shortest is not None else (whole if read else None),
        interpolation=numbers.get(int(getattr(resample, "value", resample)), "bilinear"),
        mean=tuple(processor.image_mean),
        deviation=tuple(processor.image_std),
    )


def outputs_for(model: nn.Module, classes: Sequence[str]) -> tuple[Tensor, str]:
    """(class,) which output of a model each class is, and a note on how that is known.

    A class is looked up by name among the model's own; a model that has no names of its own must have as many outputs
    as there are classes, in the order of their names; or it is one for ImageNet, whose classes are known to timm.
    """
    known, number = _names_of(model), number_of_outputs(model)
    if all(name in known for name in classes):
        return torch.tensor([known[name] for name in classes]), "classes by the model's own names"
    if number == len(classes):
        return torch.arange(number), "the model does not name these classes: taken in the order of their names"
    wordnet = _imagenet() if number == 1000 else {}
    if wordnet and all(name in wordnet for name in classes):
        return torch.tensor([wordnet[name] for name in classes]), "classes by their place in ImageNet"
    strange = next(name for name in classes if name not in known)
    raise ValueError(
        f"the model must name the {len(classes)} classes of the images or have as many outputs, got {number} outputs "
        f"and no class {strange!r}"
    )


def number_of_outputs(model: Any) -> int:
    """How many outputs a classifier of timm or transformers has."""
    config: Any = getattr(model, "config", None)
    return int(config.num_labels if hasattr(config, "label2id") else model.num_classes)


def _names_of(model: Any) -> dict[str, int]:
    """Name -> output."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "label2id"):
        return {str(name): int(place) for name, place in config.label2id.items()}
    names = (getattr(model, "pretrained_cfg", None) or {}).get("label_names") or ()
    return {str(name): place for place, name in enumerate(names)}


def _imagenet() -> dict[str, int]:
    try:
        from timm.data import ImageNetInfo
    except ImportError:
        return {}
    return {name: place for place, name in enumerate(ImageNetInfo("imagenet-1k").label_names())}


@dataclass(frozen=True)
class Accuracy:
    """How often a classifier is right.

    Attributes:
        top1, top5: per cent of the images whose class is its first guess, and among its first five.
        images: how many it was asked about.
        seconds: of the model alone.
        images_per_second: of the model alone, the first batch not counted where there are others.
        right: (image,) whether the first guess is right; None where several processes judged a part each.
    """

    top1: float
    top5: float
    images: int
    seconds: float
    images_per_second: float
    right: Tensor | None = field(default=None, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; nothing of single images."""
        values = asdict(self)
        del values["right"]
        return values


class Tally:
    """Counts how often guesses are right."""

    def __init__(self) -> None:
        self.images = 0
        self.first: Tensor | int = 0
        self.among: Tensor | int = 0
        self.right: list[Tensor] = []

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Take in logits (image, output) and labels (image,), without waiting for a device."""
        hits = logits.topk(min(5, logits.shape[-1])).indices == labels[:, None]
        self.first, self.among = self.first + hits[:, 0].sum(), self.among + hits.any(1).sum()
        self.images += len(labels)
        self.right.append(hits[:, 0])

    def combine(self, total: Callable[[Tensor], Tensor], device: torch.device) -> None:
        """Take in what other processes counted."""
        counts = torch.tensor([int(self.first), int(self.among), self.images], device=device)
        first, among, images = total(counts).tolist()
        self.first, self.among, self.images = torch.tensor(first), torch.tensor(among), images

    def shares(self) -> tuple[float, float]:
        """Per cent right at first and within five."""
        if not self.images:
            raise ValueError("there must be at least one image to judge by, got none")
        return 100 * int(self.first) / self.images, 100 * int(self.among) / self.images


def accuracy(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    precision: str = "fp32",
    total: Callable[[Tensor], Tensor] | None = None,
) -> Accuracy:
    """Judge a classifier of timm or transformers.

    Args:
        model: which, on the device where it is to run; its mode is restored.
        batches: normalised pixels (image, 3, size, size) and the right outputs (image,).
        precision: "fp32", or "bf16" to compute in it.
        total: adds up a tensor over all processes, where several judge a part of the images each.
    """
    device = device_of(model)
    tally, times = Tally(), []
    with evaluating(model), torch.no_grad():
        for pixels, labels in batches:
            pixels, labels = pixels.to(device), labels.to(device)
            begin = _now(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                outputs = model(pixels)
            logits = outputs if isinstance(outputs, Tensor) else outputs.logits
            times.append((len(labels), _now(device) - begin))
            tally.add(logits.float(), labels)
    if total is not None:
        tally.combine(total, device)
    first, among = tally.shares()
    steady = times[1:] or times
    return Accuracy(
        top1=first,
        top5=among,
        images=tally.images,
        seconds=sum(seconds for _, seconds in times),
        images_per_second=sum(count for count, _ in steady) / max(sum(seconds for _, seconds in steady), 1e-9),
        right=torch.cat(tally.right).cpu() if total is None else None,
    )


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def write_processor(folder: Path, preparation: Preparation) -> None:
    """Write what transformers need to prepare images so, beside a model."""
    import transformers

    size: Any = {"height": preparation.size, "width": preparation.size}
    options: dict[str, Any] = {"size": size, "do_center_crop": False}
    if preparation.resize not in (None, preparation.size):
        options = {"size": {"shortest_edge": preparation.resize}, "do_center_crop": True, "crop_size": size}
    transformers.ViTImageProcessor(
        **options,
        resample=_RESAMPLING[preparation.interpolation],
        image_mean=list(preparation.mean),
        image_std=list(preparation.deviation),
    ).save_pretrained(folder)
