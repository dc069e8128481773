"""timm's augmentation of whole batches on the device: the same operations and odds, computed for many images at once.

It differs from timm's own pipeline, which works on one PIL image at a time, in this:

- Crops and the operations that move pixels (rotation, shear, translation) are sampled from the pixels around a place,
  bicubically for crops and bilinearly for the others; PIL also averages where an image is made smaller. timm uses the
  crop's interpolation for the others, too.
- A moved image is cut at whole numbers only where timm's is: colours are floats between two operations, rounded to
  whole numbers after each.
- All draws come from torch's random numbers, so images are others than timm's for the same seed.

Each image has operations, magnitudes, signs, crop, mirror and erased rectangle of its own, as in timm.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from collab.recipes.augmentation import Augmentation

_TRIES = 10
"""How often a crop or a rectangle that does not fit is drawn again, as in timm."""

_LAYERS = 2
"""Operations of RandAugment in a row, each done with probability one half."""

_MOVES = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")


class DeviceAugmentation:
    """Crop, mirror, RandAugment, normalise and erase a batch of images where they are.

    Example:
        >>> augment = DeviceAugmentation(Augmentation(image_size=16))
        >>> augment(torch.zeros(2, 20, 20, 3, dtype=torch.uint8)).shape
        torch.Size([2, 3, 16, 16])
    """

    def __init__(self, augmentation: Augmentation) -> None:
        self.settings = augmentation

    @torch.no_grad()
    def __call__(self, pixels: Tensor) -> Tensor:
        """(image, height, width, 3) bytes as normalised (image, 3, size, size)."""
        settings = self.settings
        with torch.autocast(pixels.device.type, enabled=False):
            images = crops(pixels.permute(0, 3, 1, 2).float(), settings)
            if settings.magnitude:
                for _ in range(_LAYERS):
                    images = random_operations(images, settings)
            images = normalised(images, settings)
            return erased(images, settings.erasing) if settings.erasing else images


def normalised(images: Tensor, settings: Augmentation) -> Tensor:
    """Colours (image, 3, height, width) from 0 to 255 with each colour's mean and deviation taken out."""
    mean, deviation = (
        _there(torch.tensor(values), images)[:, None, None] * 255 for values in (settings.mean, settings.deviation)
    )
    return (images - mean) / deviation


def _there(values: Tensor, images: Tensor) -> Tensor:
    """A few numbers where the images are, without waiting for the device."""
    return values.to(images.device, non_blocking=True)


def crops(images: Tensor, settings: Augmentation) -> Tensor:
    """A random part of each image (image, 3, height, width) at the model's size, half of the time mirrored."""
    number, _, height, width = images.shape
    boxes = crop_boxes(number, height, width, settings.crop_scale, settings.crop_ratio)
    top, left, rows, columns = boxes.unbind(1)
    mirror = torch.where(torch.rand(number) < settings.flip, -1.0, 1.0)
    # From the crop's coordinates to the image's, both from -1 to 1.
    place = torch.zeros(number, 2, 3)
    place[:, 0, 0], place[:, 1, 1] = columns / width * mirror, rows / height
    place[:, 0, 2] = (2 * left + columns) / width - 1
    place[:, 1, 2] = (2 * top + rows) / height - 1
    size = [number, 3, settings.image_size, settings.image_size]
    grid = functional.affine_grid(_there(place, images), size, align_corners=False)
    found = functional.grid_sample(
        images, grid, mode=settings.interpolation, padding_mode="border", align_corners=False
    )
    return found.clamp_(0, 255).round_()


def crop_boxes(number: int, height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float]) -> Tensor:
    """(image, 4): top, left, rows and columns of a random part of each image, as timm draws them."""
    area = height * width * torch.empty(number, _TRIES).uniform_(*scale)
    shape = torch.exp(torch.empty(number, _TRIES).uniform_(math.log(ratio[0]), math.log(ratio[1])))
    columns, rows = (area * shape).sqrt().round(), (area / shape).sqrt().round()
    fits = (columns >= 1) & (rows >= 1) & (columns <= width) & (rows <= height)
    first = fits.int().argmax(1, keepdim=True)
    columns, rows = columns.gather(1, first)[:, 0], rows.gather(1, first)[:, 0]
    # Where none fits: the largest part of the middle that has an allowed ratio.
    whole_ratio = min(max(width / height, ratio[0]), ratio[1])
    most_columns = float(min(width, round(height * whole_ratio)))
    most_rows = float(min(height, round(width / whole_ratio)))
    found = fits.any(1)
    columns, rows = torch.where(found, columns, most_columns), torch.where(found, rows, most_rows)
    left = (torch.rand(number) * (width - columns + 1)).floor()
    top = (torch.rand(number) * (height - rows + 1)).floor()
    left = torch.where(found, left, ((width - columns) / 2).floor())
    top = torch.where(found, top, ((height - rows) / 2).floor())
    return torch.stack((top, left, rows, columns), dim=1)


def random_operations(images: Tensor, settings: Augmentation) -> Tensor:
    """One operation of RandAugment on every image that is to have one, drawn for each."""
    number = len(images)
    names = list(OPERATIONS)
    drawn = torch.randint(len(names), (number,))
    drawn[torch.rand(number) < 0.5] = len(names)  # none
    levels = (settings.magnitude + settings.magnitude_deviation * torch.randn(number)).clamp_(0, 10)
    signs = torch.where(torch.rand(number) < 0.5, -1.0, 1.0)
    order = drawn.argsort(stable=True)
    counts = torch.bincount(drawn, minlength=len(names) + 1).tolist()
    there = _there(order, images)
    level_groups, sign_groups = levels[order].split(counts), signs[order].split(counts)
    results = []
    fill = _there(torch.tensor([255 * mean for mean in settings.mean]).round(), images)[:, None, None]
    for place, group in enumerate(images[there].split(counts)):
        if place < len(names) and len(group):
            own = (level_groups[place], sign_groups[place])
            group = OPERATIONS[names[place]](group, *own, fill).clamp(0, 255).round()
        results.append(group)
    changed = torch.empty_like(images)
    changed[there] = torch.cat(results)
    return changed


def erased(images: Tensor, probability: float) -> Tensor:
    """A rectangle of noise over some of the images (image, 3, height, width), which are normalised."""
    number, _, height, width = images.shape
    area = height * width * torch.empty(number, _TRIES).uniform_(0.02, 1 / 3)
    shape = torch.exp(torch.empty(number, _TRIES).uniform_(math.log(0.3), math.log(1 / 0.3)))
    rows, columns = (area * shape).sqrt().round(), (area / shape).sqrt().round()
    fits = (rows < height) & (columns < width)
    first = fits.int().argmax(1, keepdim=True)
    rows, columns = rows.gather(1, first)[:, 0], columns.gather(1, first)[:, 0]
    covered = fits.any(1) & (torch.rand(number) < probability)
    top = (torch.rand(number) * (height - rows + 1)).floor()
    left = (torch.rand(number) * (width - columns + 1)).floor()
    box = _there(torch.stack((top, top + rows * covered, left, left + columns), dim=1), images)
    start, end, near, far = (side[:, None] for side in box.unbind(1))
    row, column = torch.arange(height, device=images.device), torch.arange(width, device=images.device)
    inside = ((row >= start) & (row < end))[:, :, None] & ((column >= near) & (column < far))[:, None, :]
    return torch.where(inside[:, None], torch.randn_like(images), images)


# Operations take images (image, 3, height, width) from 0 to 255, levels (image,) up to 10, signs (image,) and a fill.

Operation = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _each(values: Tensor, images: Tensor) -> Tensor:
    """One number an image, where the images are."""
    return _there(values, images)[:, None, None, None]


def _move(kind: str) -> Operation:
    """Rotation, shear or translation; what comes from outside has the mean colour."""

    def move(images: Tensor, levels: Tensor, signs: Tensor, fill: Tensor) -> Tensor:
        amount = levels / 10 * signs
        place = torch.eye(2, 3).repeat(len(images), 1, 1)
        if kind == "rotate":
            angle = amount * math.radians(30)
            place[:, 0, 0], place[:, 0, 1] = angle.cos(), -angle.sin()
            place[:, 1, 0], place[:, 1, 1] = angle.sin(), angle.cos()
        elif kind.startswith("shear"):
            place[:, int(kind == "shear_y"), int(kind == "shear_x")] = 0.3 * amount
        else:
            place[:, int(kind == "translate_y"), 2] = 2 * 0.45 * amount  # of the width, which is 2 in coordinates
        if kind == "shear_x":  # PIL shears about the first row, not about the middle
            place[:, 0, 2] = 0.3 * amount
        elif kind == "shear_y":
            place[:, 1, 2] = 0.3 * amount
        grid = functional.affine_grid(_there(place, images), list(images.shape), align_corners=False)
        moved = functional.grid_sample(images - fill, grid, padding_mode="zeros", align_corners=False)
        return moved + fill

    return move


def _enhance(plain: Callable[[Tensor], Tensor]) -> Operation:
    """Away from a plainer image or towards it."""

    def enhance(images: Tensor, levels: Tensor, signs: Tensor, fill: Tensor) -> Tensor:
        factor = _each((1 + 0.9 * levels / 10 * signs).clamp(min=0.1), images)
        base = plain(images)
        return base + factor * (images - base)

    return enhance


def _grey(images: Tensor) -> Tensor:
    """(image, 1, height, width): brightness as PIL weighs colours."""
    weights = _there(torch.tensor([0.299, 0.587, 0.114]), images)[:, None, None]
    return (images * weights).sum(1, keepdim=True).round()


def _smooth(images: Tensor) -> Tensor:
    """PIL's smoothing filter; the outermost pixels stay."""
    kernel = _there(torch.tensor([[1.0, 1.0, 1.0], [1.0, 5.0, 1.0], [1.0, 1.0, 1.0]]) / 13, images)
    inner = functional.conv2d(images, kernel.expand(3, 1, 3, 3), groups=3).round()
    smooth = images.clone()
    smooth[:, :, 1:-1, 1:-1] = inner
    return smooth


def _posterize(images: Tensor, levels: Tensor, signs: Tensor, fill: Tensor) -> Tensor:
    step = 2.0 ** (8 - (4 - (levels / 10 * 4).floor()))
    step = _each(step, images)
    return (images / step).floor() * step


def _solarize(images: Tensor, levels: Tensor, signs: Tensor, fill: Tensor) -> Tensor:
    threshold = _each(256 - (levels / 10 * 256).floor(), images)
    return torch.where(images < threshold, images, 255 - images)


def _solarize_add(images: Tensor, levels: Tensor, signs: Tensor, fill: Tensor) -> Tensor:
    added = _each((levels / 10 * 110).floor().clamp(max=128), images)
    return torch.where(images < 128, images + added, images)


def _library(name: str) -> Operation:
    """An operation without a magnitude, of torchvision."""

    def operation(images: Tensor, levels: Tensor, signs: Tensor, fill: Tensor) -> Tensor:
        from torchvision.transforms.v2 import functional as of_torchvision

        changed: Tensor = getattr(of_torchvision, name)(images.to(torch.uint8))
        return changed.float()

    return operation


OPERATIONS: dict[str, Operation] = {
    "autocontrast": _library("autocontrast"),
    "equalize": _library("equalize"),
    "invert": _library("invert"),
    **{name: _move(name) for name in _MOVES},
    "posterize": _posterize,
    "solarize": _solarize,
    "solarize_add": _solarize_add,
    "color": _enhance(_grey),
    "contrast": _enhance(lambda images: _grey(images).mean((1, 2, 3), keepdim=True).round()),
    "brightness": _enhance(torch.zeros_like),
    "sharpness": _enhance(_smooth),
}
"""RandAugment's operations in timm's increasing form, all equally likely."""
