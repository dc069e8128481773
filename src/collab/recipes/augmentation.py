"""What images go through before a model learns from them: settings, timm's own pipeline, mixing, and the loss."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from collab.recipes.settings import check_at_least, check_choice

INTERPOLATIONS = ("bicubic", "bilinear")


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """How training images are varied; the defaults are those of DeiT.

    Attributes:
        image_size: rows and columns the model reads.
        crop_scale: share of an image's area that a crop has, at least and at most; a square of it is read.
        crop_ratio: width over height of a crop, at least and at most.
        flip: probability of mirroring.
        magnitude, magnitude_deviation: of RandAugment's two operations, each done with probability one half; a
            magnitude of 0 leaves RandAugment out.
        erasing: probability of covering a rectangle with noise.
        mixup, cutmix: alpha of each; of the two one is drawn for a batch. 0 leaves one out.
        smoothing: of the labels.
        interpolation: "bicubic" or "bilinear".
        mean, deviation: of each colour, which pixels are normalised with.
    """

    image_size: int = 224
    crop_scale: tuple[float, float] = (0.08, 1.0)
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    magnitude: float = 9.0
    magnitude_deviation: float = 0.5
    erasing: float = 0.25
    mixup: float = 0.8
    cutmix: float = 1.0
    smoothing: float = 0.1
    interpolation: str = "bicubic"
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    deviation: tuple[float, float, float] = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        check_at_least(self, 1, "image_size")
        check_at_least(self, 0, "flip", "magnitude", "magnitude_deviation", "erasing", "mixup", "cutmix", "smoothing")
        check_choice("interpolation", self.interpolation, INTERPOLATIONS)
        for name in ("flip", "erasing"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name} must be a probability, got {getattr(self, name)}")
        if self.magnitude > 10:
            raise ValueError(f"magnitude must be from 0 to 10, got {self.magnitude}")
        if self.magnitude != round(self.magnitude):
            raise ValueError(f"magnitude must be a whole number, as in timm's names of policies, got {self.magnitude}")
        if not 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1:
            raise ValueError(f"crop_scale must be two shares of the area, the smaller first, got {self.crop_scale}")
        if self.smoothing >= 1:
            raise ValueError(f"smoothing must be less than 1, got {self.smoothing}")

    @property
    def policy(self) -> str:
        """RandAugment's settings as timm writes them; "" for none."""
        if self.magnitude == 0:
            return ""
        return f"rand-m{round(self.magnitude)}-mstd{self.magnitude_deviation:g}-inc1"


def timm_pipeline(augmentation: Augmentation) -> Any:
    """The transform of timm for one training image, to a normalised (3, size, size) tensor."""
    from timm.data import create_transform

    pipeline: Any = create_transform(
        augmentation.image_size,
        is_training=True,
        scale=augmentation.crop_scale,
        ratio=augmentation.crop_ratio,
        hflip=augmentation.flip,
        color_jitter=0.0,
        auto_augment=augmentation.policy or None,
        interpolation=augmentation.interpolation,
        mean=augmentation.mean,
        std=augmentation.deviation,
        re_prob=augmentation.erasing,
        re_mode="pixel",
        re_count=1,
    )
    for step in pipeline.transforms:
        for operation in getattr(step, "ops", ()):
            if operation.name == "PosterizeIncreasing":
                operation.aug_fn = _posterize
    return pipeline


def _posterize(image: Any, bits: int, **options: Any) -> Any:
    """Keep so many bits of each colour: at the highest level timm asks for none, which newer versions of PIL refuse."""
    from PIL import Image, ImageOps

    return ImageOps.posterize(image, bits) if bits >= 1 else Image.new(image.mode, image.size)


class Mixing:
    """timm's mixup and cutmix of a batch of normalised images, and the soft labels that follow.

    timm draws from numpy's random numbers; they are seeded from torch's, which a training sets at every step.
    """

    def __init__(self, augmentation: Augmentation, classes: int) -> None:
        from timm.data import Mixup

        self.classes, self.smoothing = classes, augmentation.smoothing
        self.mixup: Any = None
        if augmentation.mixup or augmentation.cutmix:
            self.mixup = Mixup(
                mixup_alpha=augmentation.mixup, cutmix_alpha=augmentation.cutmix, prob=1.0, switch_prob=0.5,
                mode="batch", label_smoothing=augmentation.smoothing, num_classes=classes,
            )  # fmt: skip

    def __call__(self, pixels: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(image, 3, size, size) and (image,) labels, mixed: pixels, and targets (image, class)."""
        if self.mixup is None:
            from timm.data.mixup import mixup_target

            return pixels, mixup_target(labels, self.classes, 1.0, self.smoothing)
        import numpy

        if len(pixels) % 2:
            raise ValueError(f"mixup and cutmix must have an even number of images in each part, got {len(pixels)}")
        state = numpy.random.get_state()
        try:
            numpy.random.seed(int(torch.randint(2**31, ())))
            mixed, targets = self.mixup(pixels, labels)
        finally:
            numpy.random.set_state(state)
        return mixed, targets


def soft_loss() -> Callable[[Any, Any, Any], Tensor]:
    """The training loop's loss: timm's cross entropy with soft targets, summed over images, by `num_items`."""
    from timm.loss import SoftTargetCrossEntropy

    mean = SoftTargetCrossEntropy()

    def loss(model: Any, batch: dict[str, Any], num_items: Any) -> Tensor:
        logits = logits_of(model(batch["pixel_values"]))
        value: Tensor = mean(logits.float(), batch["targets"]) * (len(logits) / num_items)
        return value

    return loss


def logits_of(outputs: Any) -> Tensor:
    """What timm's classifiers return, and what those of transformers return it in."""
    logits: Tensor = outputs if isinstance(outputs, Tensor) else outputs.logits
    return logits


def repeated_batches(images: int, batch_size: int, repeats: int, seed: int) -> Callable[[int], list[list[int]]]:
    """For each epoch the batches of timm's sampler for repeated augmentation, `repeats` copies of an image in one.

    As many examples make an epoch as there are images, so of three repeats a third of the images are seen. What does
    not fill a batch is left out.
    """
    from timm.data.distributed_sampler import RepeatAugSampler

    if batch_size > images:
        raise ValueError(f"batch_size must be at most the number of images, {images}, got {batch_size}")
    # timm rounds an epoch down to a multiple of 256 examples; batches are filled here.
    sampler = RepeatAugSampler(range(images), num_replicas=1, rank=0, num_repeats=repeats, selected_round=0)

    def batches(epoch: int) -> list[list[int]]:
        sampler.set_epoch(epoch + 1_000_003 * seed)  # the seed of its order
        order = [int(place) for place in sampler]
        return [order[start : start + batch_size] for start in range(0, len(order) - batch_size + 1, batch_size)]

    return batches
