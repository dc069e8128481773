"""From images to what a training and an evaluation read: examples, batches, and what is done to them on the device."""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from collab.classification import Preparation
from collab.recipes.augmentation import Augmentation, Mixing, timm_pipeline
from collab.recipes.device_augmentation import DeviceAugmentation
from collab.recipes.image_cache import CachedImages
from collab.recipes.images import ImageList, read_image

Images = CachedImages | ImageList

_KEPT = 4 * 2**30
"""Bytes of prepared images that are kept from one evaluation to the next, at most."""

_CHUNK = 250


class TrainingImages(Dataset[tuple[Any, int]]):
    """Training examples: (what is known of the image before the device has it, label).

    With `augment_on` "cpu" that is the image after timm's pipeline; with "device" its bytes, or only its place where
    all images are on the device.

    Args:
        images: decoded ones, or files that are decoded whenever one is asked for.
        augmentation: how they are varied.
        augment_on: "cpu" or "device".
        resident: whether the device has them all.
        refuse_broken: whether a file that cannot be read is an error; otherwise the next one is taken in its place,
            with a warning.
    """

    def __init__(
        self, images: Images, augmentation: Augmentation, augment_on: str, resident: bool, refuse_broken: bool = False
    ) -> None:
        if augment_on == "device" and not isinstance(images, CachedImages):
            raise ValueError("augment_on must be cpu for images that are not cached, got 'device'; give cache: always")
        if resident and augment_on != "device":
            raise ValueError(f"data_on must be host where augmentation is on the CPU, got device and {augment_on!r}")
        self.images, self.resident, self.refuse_broken = images, resident, refuse_broken
        self.transform: Any = timm_pipeline(augmentation) if augment_on == "cpu" else None
        self.labels = [int(label) for label in images.labels]
        self.warned: set[int] = set()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, place: int) -> tuple[Any, int]:
        if self.resident:
            return place, self.labels[place]
        if isinstance(self.images, CachedImages) and self.transform is None:
            return self.images.pixels[place], self.labels[place]
        if isinstance(self.images, CachedImages):
            from PIL import Image

            return self.transform(Image.fromarray(self.images.pixels[place].numpy())), self.labels[place]
        return self._read(place)

    def _read(self, place: int) -> tuple[Any, int]:
        """An image from its file, or the next one that can be read."""
        assert isinstance(self.images, ImageList)
        assert self.images.paths is not None
        for further in range(len(self)):
            at = (place + further) % len(self)
            try:
                return self.transform(read_image(self.images.paths[at])), self.labels[at]
            except OSError as error:
                if self.refuse_broken:
                    raise ValueError(f"{self.images.names[at]} must be an image that can be read: {error}") from error
                if at not in self.warned:
                    self.warned.add(at)
                    warnings.warn(f"passed over {self.images.names[at]}, which cannot be read: {error}", stacklevel=2)
        raise ValueError("none of the images can be read")


def collate(examples: Sequence[tuple[Any, int]]) -> dict[str, Any]:
    """Examples as one batch: `index` (image,) or `pixel_values`, and `labels` (image,)."""
    first = examples[0][0]
    labels = torch.tensor([label for _, label in examples])
    if isinstance(first, int):
        return {"index": torch.tensor([place for place, _ in examples]), "labels": labels}
    return {"pixel_values": torch.stack([pixels for pixels, _ in examples]), "labels": labels}


def on_device(
    augmentation: Augmentation, mixing: Mixing, resident: Tensor | None, augment_on: str
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What becomes of a batch once it is on the device: `pixel_values` (image, 3, size, size) and soft `targets`."""
    augment = DeviceAugmentation(augmentation)

    def change(batch: dict[str, Any]) -> dict[str, Any]:
        pixels = resident[batch["index"]] if resident is not None else batch["pixel_values"]
        if augment_on == "device":
            pixels = augment(pixels)
        pixels, targets = mixing(pixels, batch["labels"])
        return {"pixel_values": pixels, "targets": targets}

    return change


class JudgedImages:
    """Images as an evaluation reads them, prepared once if they are not too many to be kept.

    Args:
        images: which.
        preparation: what is done to each.
        outputs: (class,) the model's output for each class.
        places: some of the images; all if not given.
    """

    def __init__(
        self, images: Images, preparation: Preparation, outputs: Tensor, places: Sequence[int] | None = None
    ) -> None:
        self.images, self.preparation = images, preparation
        self.places = list(range(len(images)) if places is None else places)
        self.labels = outputs[torch.as_tensor(images.labels)[self.places]]
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.broken: list[tuple[str, str]] = []

    def __len__(self) -> int:
        return len(self.places)

    def batches(self, device: torch.device, batch_size: int = _CHUNK) -> Iterator[tuple[Tensor, Tensor]]:
        """Normalised pixels (image, 3, size, size) and outputs (image,)."""
        for start in range(0, len(self.places), batch_size):
            pixels, labels = self._part(start, batch_size, device)
            yield self.preparation.normalised(pixels.to(device)), labels.to(device)

    def _part(self, start: int, batch_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Prepared bytes and outputs of some images."""
        if start not in self.kept:
            places = self.places[start : start + batch_size]
            found = _prepared(self.images, places, self.preparation, self.broken)
            readable = [place for place, pixels in enumerate(found) if pixels is not None]
            size = self.preparation.size
            read = [pixels for pixels in found if pixels is not None]
            pixels = torch.stack(read) if read else torch.empty(0, 3, size, size, dtype=torch.uint8)
            part = (pixels.to(device), self.labels[start : start + batch_size][readable])
            if len(self.places) * 3 * size**2 > _KEPT:
                return part
            self.kept[start] = part
        return self.kept[start]


def _prepared(
    images: Images, places: Sequence[int], preparation: Preparation, broken: list[tuple[str, str]]
) -> list[Tensor | None]:
    """(3, size, size) bytes of each image; None for those that cannot be read, which are named in `broken`."""
    if isinstance(images, CachedImages):
        pixels = images.pixels[list(places)]
        size = preparation.size
        if pixels.shape[1] == size and preparation.resize in (None, size):
            return list(pixels.permute(0, 3, 1, 2))

    def prepare(place: int) -> Tensor | OSError:
        try:
            if isinstance(images, CachedImages):
                from PIL import Image

                return preparation(Image.fromarray(images.pixels[place].numpy()))
            assert images.paths is not None
            return preparation(read_image(images.paths[place]))
        except OSError as error:
            return error

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        found = list(pool.map(prepare, places))
    broken += [(images.names[at], str(one)) for at, one in zip(places, found, strict=True) if isinstance(one, OSError)]
    return [one if isinstance(one, Tensor) else None for one in found]


def is_cached(cache: str, data: Sequence[str], image_size: int, smallest: int = 96) -> bool:
    """Whether images are decoded once into a file: archives and small images are, unless it is said."""
    if cache != "auto":
        return cache == "always"
    return image_size <= smallest or not (len(data) == 1 and Path(data[0]).is_dir())
