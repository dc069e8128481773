"""Images decoded once: a file of bytes that every run and every process maps into memory."""

import contextlib
import json
import uuid
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from collab.recipes.images import ImageList, decoded, find_images, fingerprint

_NAMED = 5
"""Broken images that a message names."""


@dataclass(frozen=True)
class CachedImages:
    """Decoded images of one split.

    Attributes:
        pixels: (image, size, size, 3) bytes, mapped from the file.
        labels: (image,) the place of each one's class in `classes`.
        classes: names of the classes, sorted.
        names: where each image was.
        broken: those that could not be read, and are not here: name and reason.
    """

    pixels: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    names: tuple[str, ...]
    broken: tuple[tuple[str, str], ...]

    def __len__(self) -> int:
        return len(self.labels)


def squared(image: Any, size: int) -> Any:
    """(size, size, 3) bytes: the shorter side made `size` long, then the centre; an image of that size as it is."""
    import numpy

    if image.size != (size, size):
        from PIL import Image

        scale = size / min(image.size)
        image = image.resize([max(size, round(side * scale)) for side in image.size], Image.Resampling.BICUBIC)
        left, top = ((side - size) // 2 for side in image.size)
        image = image.crop((left, top, left + size, top + size))
    return numpy.asarray(image)


def cached_images(
    data: Sequence[str], split: str, folder: Path, *, size: int, limit: int | None = None, refuse_broken: bool = False
) -> CachedImages:
    """The decoded images of a split, from the cache in `folder`, which is filled first where it has not got them.

    Runs that start side by side fill it once: the others wait.

    Args:
        data: as for `find_images`.
        split: as for `find_images`.
        folder: where caches are kept; each set of images, size and limit has its own folder in it.
        size: rows and columns of the images kept; of a larger image the shorter side is made so long and the centre
            kept.
        limit: take at most so many images, as many of each class.
        refuse_broken: whether an image that cannot be read is an error; otherwise it is left out with a warning.
    """
    target = folder / f"{split}-{size}-{fingerprint(data, split)}{'' if limit is None else f'-{limit}'}"
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(target.with_suffix(".lock")):
        if not (target / "index.json").exists():
            _fill(target, find_images(data, split).spread(limit), size)
    index = json.loads((target / "index.json").read_text(encoding="utf-8"))
    broken = tuple((name, reason) for name, reason in index["broken"])
    report_broken(broken, refuse=refuse_broken)
    return CachedImages(
        pixels=torch.from_numpy(_map(target / "pixels.npy", (len(index["labels"]), size, size, 3))),
        labels=torch.tensor(index["labels"]),
        classes=tuple(index["classes"]),
        names=tuple(index["names"]),
        broken=broken,
    )


def report_broken(broken: Sequence[tuple[str, str]], *, refuse: bool) -> None:
    """Warn of images that could not be read, by name; or refuse them."""
    if not broken:
        return
    named = "; ".join(f"{name} ({reason})" for name, reason in broken[:_NAMED])
    more = f" and {len(broken) - _NAMED} more" if len(broken) > _NAMED else ""
    if refuse:
        raise ValueError(f"every image must be one that can be read, but these cannot: {named}{more}")
    warnings.warn(f"left out {len(broken)} images that cannot be read: {named}{more}", stacklevel=3)


def _fill(target: Path, images: ImageList, size: int) -> None:
    """Write a cache to a temporary folder and rename it."""
    import numpy

    if not len(images):
        raise ValueError(f"there must be at least one image to keep in {target}, got none")
    temporary = target.with_name(f"{target.name}.{uuid.uuid4().hex[:8]}")
    temporary.mkdir()
    try:
        pixels = numpy.lib.format.open_memmap(
            temporary / "all.npy", mode="w+", dtype=numpy.uint8, shape=(len(images), size, size, 3)
        )
        errors: dict[int, str] = {}
        for place, found in decoded(images, lambda image: squared(image, size)):
            if isinstance(found, OSError):
                errors[place] = str(found)
            else:
                pixels[place] = found
        kept = [place for place in range(len(images)) if place not in errors]
        if not kept:
            raise ValueError(f"none of the {len(images)} images can be read: {images.names[0]} ({errors[0]})")
        if errors:
            pixels = _without(pixels, kept, temporary / "pixels.npy")
            (temporary / "all.npy").unlink()
        else:
            (temporary / "all.npy").rename(temporary / "pixels.npy")
        pixels.flush()
        index = {
            "classes": images.classes,
            "labels": [images.labels[place] for place in kept],
            "names": [images.names[place] for place in kept],
            "broken": [(images.names[place], reason) for place, reason in sorted(errors.items())],
        }
        (temporary / "index.json").write_text(json.dumps(index), encoding="utf-8")
        temporary.rename(target)
    finally:
        if temporary.exists():
            _remove(temporary.iterdir())
            temporary.rmdir()


def _without(pixels: Any, kept: Sequence[int], path: Path) -> Any:
    """A file of the images that are kept."""
    import numpy

    fewer = numpy.lib.format.open_memmap(path, mode="w+", dtype=numpy.uint8, shape=(len(kept), *pixels.shape[1:]))
    for start in range(0, len(kept), 1024):
        fewer[start : start + 1024] = pixels[kept[start : start + 1024]]
    return fewer


def _map(path: Path, shape: tuple[int, ...]) -> Any:
    """The file in memory; what is written there is not written to the file."""
    import numpy

    pixels = numpy.load(path, mmap_mode="c")
    if pixels.shape != shape:
        raise ValueError(f"{path} must hold {shape} bytes, got {pixels.shape}; remove its folder to have it made again")
    return pixels


def _remove(paths: Iterable[Path]) -> None:
    for path in list(paths):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process at a time; the lock is free again when its holder ends, however it ends."""
    try:
        import fcntl
    except ImportError:  # no such locks on Windows: two runs may decode the same images, and one of them wins
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
