"""Train image classifiers by DeiT's recipe, with heads that share or do not, and convert trained ones.

A run goes through steps, each done once however often the run is started again.

`data` reads the images: names, classes, those that cannot be read. Small images and archives are decoded once into a
file that all runs share (`cache`, `cache_folder`).

`train` trains the model of `model` by AdamW with the learning rate `base_learning_rate` x `batch_size` / 512 and
DeiT's augmentation. Heads are ordinary ones (`attention: concatenate`), with queries and keys of a reduced size if
`key_dim` says so, or share one space of `key_dim` dimensions (`attention: collaborative`). With `epochs: 0` nothing
is trained: for models that are.

`evaluate` measures Acc@1 and Acc@5 on the validation images.

`conversions` converts the trained model without training, in every way of `convert_methods` and at every size of
`convert_sizes`, each a step. `map_images` says of how many images it keeps what the class token attends to before and
after.

Augmentation is timm's own on the CPU, one image at a time, unless `augment_on: device` has whole batches of cached
images changed on the device; what differs then is said in `collab.recipes.device_augmentation`. With `data_on: device`
all training images stay there. The record says which it was, and which share of the time training waited for images.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from collab.classification import Accuracy, Preparation, accuracy, number_of_outputs, outputs_for, preparation_of
from collab.hosts import Collaborative
from collab.recipes import processes, vision_conversion, vision_models
from collab.recipes.attention_figure import draw_maps
from collab.recipes.augmentation import Augmentation, Mixing, repeated_batches, soft_loss
from collab.recipes.fitting_loop import fit
from collab.recipes.image_cache import CachedImages, cached_images
from collab.recipes.images import each_class_in_turn, find_images
from collab.recipes.settings import FitSettings, RecipeConfig, check_at_least, check_choice
from collab.recipes.vision_data import Images, JudgedImages, TrainingImages, collate, is_cached, on_device
from collab.recipes.work import Work
from collab.refinement import Refinement
from collab.running import Batch
from collab.swap import count_parameters

EXAMPLES = [
    "collab train vision --config paper/configs/vision/collaborative-384.yaml --out runs/collaborative-384",
    "collab train vision --data imagenet --out runs/deit-b3-192 --attention collaborative --key-dim 192",
    "collab train vision --data tiny-imagenet --out runs/tiny --image-size 64 --patch-size 8 --augment-on device",
    "collab train vision --data imagenet --model deit-base --pretrained true --epochs 0 --convert-sizes 512,384,256 "
    "--out runs/converted",
]


@dataclass(frozen=True, kw_only=True)
class Config(RecipeConfig):
    """Settings of a run; the defaults are the paper's for DeiT-B3 on ImageNet (its appendix)."""

    data: tuple[str, ...] = field(default=(), metadata={"help": "folder, archives, or datasets:NAME"})
    cache: str = field(default="auto", metadata={"help": "auto, always or never decode images once, into a file"})
    cache_folder: str | None = field(default=None, metadata={"help": "where; OUT/cache if not given"})
    cache_size: int | None = field(default=None, metadata={"help": "rows and columns kept; image_size if not given"})
    refuse_broken: bool = field(default=False, metadata={"help": "stop at images that cannot be read"})
    max_train_images: int | None = field(default=None, metadata={"help": "train on so many, of each class alike"})
    max_val_images: int | None = field(default=None, metadata={"help": "judge on so many, of each class alike"})

    model: str = field(
        default="deit-b3", metadata={"help": "deit-b3, deit-tiny, deit-small, deit-base, or a name of the library's"}
    )
    library: str = field(default="timm", metadata={"help": "timm or transformers"})
    pretrained: bool = field(default=False, metadata={"help": "start from trained weights; model may be a directory"})
    depth: int | None = field(default=None, metadata={"help": "layers; the model's own if not given"})
    width: int | None = field(default=None, metadata={"help": "features of a token; the model's own if not given"})
    heads: int | None = field(default=None, metadata={"help": "heads of a layer; the model's own if not given"})
    image_size: int = field(default=224, metadata={"help": "rows and columns of an image"})
    patch_size: int | None = field(default=None, metadata={"help": "of a patch; the model's own if not given"})
    attention: str = field(default="concatenate", metadata={"help": "concatenate or collaborative heads"})
    key_dim: int | None = field(default=None, metadata={"help": "of queries and keys, all heads together"})
    mixing: str = field(default="concatenate", metadata={"help": "how collaborative heads start to mix"})
    query_key_deviation: float = field(
        default=0.02, metadata={"help": "of fresh query and key weights, as timm draws its own; 0 for Xavier's"}
    )

    epochs: float = field(default=300.0, metadata={"help": "0 trains nothing"})
    max_steps: int | None = field(default=None, metadata={"help": "stop after so many steps"})
    batch_size: int = field(default=1024, metadata={"help": "of a step, over all processes"})
    accumulate: int = field(default=1, metadata={"help": "parts a process computes a step in, to save memory"})
    base_learning_rate: float = field(default=5e-4, metadata={"help": "for a batch of 512; larger ones take more"})
    final_rate_share: float = field(default=0.0, metadata={"help": "of the learning rate that is left at the end"})
    warmup_epochs: float = field(default=5.0, metadata={"help": "in which the learning rate rises"})
    weight_decay: float = field(default=0.05, metadata={"help": "of matrices; biases, norms and positions have none"})
    max_grad_norm: float = field(default=0.0, metadata={"help": "scale larger gradients down to it; 0 leaves them"})
    stochastic_depth: float = field(default=0.1, metadata={"help": "probability of skipping the last layer"})
    smoothing: float = field(default=0.1, metadata={"help": "of the labels"})
    magnitude: float = field(default=9.0, metadata={"help": "of RandAugment; 0 for none"})
    magnitude_deviation: float = field(default=0.5, metadata={"help": "of that magnitude"})
    mixup: float = field(default=0.8, metadata={"help": "alpha of mixup; 0 for none"})
    cutmix: float = field(default=1.0, metadata={"help": "alpha of cutmix; 0 for none"})
    erasing: float = field(default=0.25, metadata={"help": "probability of covering a rectangle"})
    repeats: int = field(default=3, metadata={"help": "copies of an image in a batch, each varied in its own way"})
    crop_scale: tuple[float, float] = field(default=(0.08, 1.0), metadata={"help": "share of the area of a crop"})
    augment_on: str = field(default="cpu", metadata={"help": "cpu, by timm's pipeline; or device, whole batches"})
    data_on: str = field(default="host", metadata={"help": "host; or device, which keeps all training images"})
    workers: int = field(default=8, metadata={"help": "processes that prepare images"})
    log_every: int = field(default=50, metadata={"help": "steps between two lines of the log"})
    checkpoint_epochs: float = field(default=5.0, metadata={"help": "epochs between two checkpoints; 0 for none"})
    fsdp: bool = field(default=False, metadata={"help": "shard the model over the processes, too"})

    resize: int | None = field(default=None, metadata={"help": "shorter side before the centre is judged"})
    convert_sizes: tuple[int, ...] = field(default=(), metadata={"help": "shared sizes to convert the model to"})
    convert_methods: tuple[str, ...] = field(
        default=("paper", "shared", "calibrated", "refined", "sparse"), metadata={"help": "ways to convert"}
    )
    convert_inputs: tuple[int, ...] = field(default=(256, 2048), metadata={"help": "training images to look at"})
    convert_dims_per_head: int = field(default=64, metadata={"help": "dimensions of a head, of the sparse way"})
    refine_steps: int | None = field(
        default=None, metadata={"help": "of the joint fit of refined; as collab convert chooses if not given"}
    )
    refine_batch_size: int = field(default=16, metadata={"help": "images of a step of that fit"})
    map_images: int = field(default=0, metadata={"help": "images whose attention is kept"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.data:
            raise ValueError("data must name a folder, archives or datasets:NAME, got nothing")
        check_choice("cache", self.cache, ("auto", "always", "never"))
        check_choice("augment_on", self.augment_on, ("cpu", "device"))
        check_choice("data_on", self.data_on, ("host", "device"))
        check_at_least(self, 1, "cache_size", "max_train_images", "max_val_images", "max_steps", "batch_size")
        check_at_least(self, 1, "accumulate", "repeats", "log_every", "convert_dims_per_head")
        check_at_least(self, 1, "refine_batch_size")
        check_at_least(self, 0, "epochs", "base_learning_rate", "warmup_epochs", "weight_decay", "workers")
        check_at_least(self, 0, "checkpoint_epochs", "map_images", "max_grad_norm", "refine_steps")
        for method in self.convert_methods:
            check_choice("convert_methods", method, vision_conversion.METHODS)
        for name in ("convert_sizes", "convert_inputs"):
            if min(getattr(self, name), default=1) < 1:
                raise ValueError(f"{name} must be at least 1, got {min(getattr(self, name))}")
        parts = 2 * self.accumulate
        if (self.mixup or self.cutmix) and self.batch_size % parts:
            raise ValueError(f"batch_size must be a multiple of {parts}, to mix images in pairs, got {self.batch_size}")
        if not self.epochs and not self.pretrained:
            raise ValueError("epochs must be more than 0 for a model that is not pretrained, got 0")
        _ = self.augmentation, self.architecture  # they check what is theirs

    @cached_property
    def augmentation(self) -> Augmentation:
        """How training images are varied."""
        return Augmentation(
            image_size=self.image_size, crop_scale=self.crop_scale, magnitude=self.magnitude,
            magnitude_deviation=self.magnitude_deviation, erasing=self.erasing, mixup=self.mixup, cutmix=self.cutmix,
            smoothing=self.smoothing,
        )  # fmt: skip

    @cached_property
    def architecture(self) -> vision_models.Architecture:
        """Which model."""
        return vision_models.Architecture(
            name=self.model, library=self.library, pretrained=self.pretrained, depth=self.depth, width=self.width,
            heads=self.heads, image_size=self.image_size, patch_size=self.patch_size, attention=self.attention,
            key_dim=self.key_dim, mixing=self.mixing, query_key_deviation=self.query_key_deviation,
            stochastic_depth=self.stochastic_depth if self.epochs else 0.0, seed=self.seed,
        )  # fmt: skip

    @property
    def preparation(self) -> Preparation:
        """How images are prepared to be judged, for a model that is trained here."""
        resize = self.resize or (self.image_size if self.image_size <= 96 else round(self.image_size / 0.875))
        augmentation = self.augmentation
        return Preparation(
            size=self.image_size, resize=resize, interpolation=augmentation.interpolation,
            mean=augmentation.mean, deviation=augmentation.deviation,
        )  # fmt: skip


def run(config: Config, work: Work) -> dict[str, Any]:
    """Do what the settings say; see the top of this file."""
    device = processes.device_named(config.device)
    train, val = (_images(config, work, split) for split in ("train", "val"))
    if val.classes != train.classes:
        strange = sorted(set(val.classes) ^ set(train.classes))
        raise ValueError(f"train and val must have the same classes, but only one of them has {', '.join(strange[:5])}")
    data = work.step("data", lambda: _about(config, train, val))
    model = vision_models.build(config.architecture, train.classes, config.preparation)
    preparation, note = config.preparation, ""
    if config.pretrained:
        preparation, note = preparation_of(model, config.model)
        if config.resize is not None:
            preparation = Preparation(**{**preparation.to_dict(), "resize": config.resize})
    # What can be wrong with the model is said before it is trained.
    outputs, how = outputs_for(model, train.classes)
    if config.epochs and outputs.tolist() != list(range(number_of_outputs(model))):
        raise ValueError("a trained model must have one output for each class, in the order of names, to be trained on")
    rows = _rows(config, model, len(train))
    model.to(device)
    metrics: dict[str, Any] = {"data": data, "preparation": preparation.to_dict(), "notes": [note] if note else []}
    metrics |= {"labels": how, "parameters": trained_parameters(model)}
    if config.epochs:
        metrics["train"] = work.step("train", lambda: _train(config, work, model, train, device))
        _restore(work, model, preparation)
    judged = JudgedImages(val, preparation, outputs, None)

    def judge(which: nn.Module) -> Accuracy:
        return _judge(which, judged, device)

    found = work.step("evaluate", lambda: judge(model).to_dict())
    metrics |= {"top1": found["top1"], "top5": found["top5"], "evaluation": found}
    work.say(f"Acc@1 {found['top1']:.2f}, Acc@5 {found['top5']:.2f} on {found['images']:,} images")
    if rows:
        metrics |= _conversions(config, work, model, rows, train, judged, judge)
    return metrics


def trained_parameters(model: nn.Module) -> int:
    """Number of parameters; mixing that is frozen is not one: heads by themselves have none."""
    frozen = sum(
        module.mixing.numel()
        for module in model.modules()
        if isinstance(module, Collaborative) and not module.mixing.requires_grad
    )
    return count_parameters(model) - frozen


def _images(config: Config, work: Work, split: str) -> Images:
    """The images of a split, decoded ones or files."""
    limit = config.max_train_images if split == "train" else config.max_val_images
    folder = work.folder / "cache" if config.cache_folder is None else Path(config.cache_folder).expanduser()
    if is_cached(config.cache, config.data, config.image_size):
        if config.pretrained and config.cache_size is None:
            raise ValueError(
                "cache_size must be given for a trained model: the size of the images as they are, got none"
            )
        size = config.cache_size or config.image_size
        if processes.is_main():
            cached_images(config.data, split, folder, size=size, limit=limit, refuse_broken=config.refuse_broken)
        processes.agree(None)
        images: Images = cached_images(config.data, split, folder, size=size, limit=limit)
    else:
        found = find_images(config.data, split)
        if found.paths is None:
            raise ValueError("cache must be auto or always for images that are not files of a folder, got never")
        images = found.spread(limit)
    if len(images.classes) < 2 and split == "train":
        raise ValueError(f"data must have at least two classes to tell apart, got {', '.join(images.classes)} alone")
    return images


def _about(config: Config, train: Images, val: Images) -> dict[str, Any]:
    """What a record says of the images."""
    broken = [one for images in (train, val) if isinstance(images, CachedImages) for one in images.broken]
    return {
        "train_images": len(train), "val_images": len(val), "classes": len(train.classes),
        "cached": isinstance(train, CachedImages), "broken": [list(one) for one in broken],
    }  # fmt: skip


def _train(config: Config, work: Work, model: nn.Module, train: Images, device: torch.device) -> dict[str, Any]:
    """Train in place, keep the weights, and say how it went."""
    resident = None
    if config.data_on == "device":
        if not isinstance(train, CachedImages):
            raise ValueError("data_on must be host for images that are not cached, got 'device'; give cache: always")
        resident = train.pixels.to(device)
    examples = TrainingImages(train, config.augmentation, config.augment_on, resident is not None, config.refuse_broken)
    batches = repeated_batches(len(examples), min(config.batch_size, _even(len(examples))), config.repeats, config.seed)
    steps = len(batches(0))
    total = max(1, round(config.epochs * steps))
    settings = FitSettings(
        batch_size=config.batch_size, epochs=config.epochs, max_steps=config.max_steps,
        learning_rate=config.base_learning_rate * config.batch_size / 512, schedule="cosine",
        final_share=config.final_rate_share, warmup_steps=min(round(config.warmup_epochs * steps), total // 2),
        weight_decay=config.weight_decay, max_grad_norm=config.max_grad_norm, accumulate=config.accumulate,
        workers=0 if resident is not None else config.workers, log_every=config.log_every,
        checkpoint_every=max(1, round(config.checkpoint_epochs * steps)) if config.checkpoint_epochs else None,
        seed=config.seed, precision=config.precision, device=config.device, fsdp=config.fsdp,
    )  # fmt: skip
    mixing = Mixing(config.augmentation, len(train.classes))
    result = fit(
        model, examples, settings, work.folder_of("train"), collate=collate, batches=batches, loss=soft_loss(),
        on_device=on_device(config.augmentation, mixing, resident, config.augment_on),
        parameter_groups=lambda target: parameter_groups(target, config.weight_decay), progress=work.progress,
    )  # fmt: skip
    if processes.is_main():
        _keep(model, _weights_file(work))
    work.say(
        f"{result.seconds:.0f} s, {result.examples_per_second:,.0f} images/s, "
        f"waited for images {100 * result.waiting:.1f} % of the time"
    )
    return {
        "seconds": result.seconds, "steps": result.steps, "steps_per_epoch": steps,
        "images_per_second": result.examples_per_second, "waiting": result.waiting,
        "peak_memory": result.peak_memory, "losses": result.losses[:: max(1, len(result.losses) // 50)],
        "final_loss": result.losses[-1][1] if result.losses else None,
        "augment_on": config.augment_on, "data_on": config.data_on,
    }  # fmt: skip


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups, as timm makes them: biases, norms, positions and the class token do not decay."""
    from timm.optim import param_groups_weight_decay

    kept = set(model.no_weight_decay()) if hasattr(model, "no_weight_decay") else set()  # type: ignore[operator]
    names = [name for name, _ in model.named_parameters()]
    kept |= {name for name in names if name.endswith(("cls_token", "position_embeddings", "pos_embed"))}
    groups: list[dict[str, Any]] = param_groups_weight_decay(model, weight_decay, no_weight_decay_list=kept)
    return groups


def _even(number: int) -> int:
    return max(1, number - number % 2)


def _weights_file(work: Work) -> Path:
    return work.folder_of("train") / "weights.pt"


def _keep(model: nn.Module, path: Path) -> None:
    """Write the weights to a temporary name and rename them."""
    temporary = path.with_suffix(".part")
    torch.save({name: value.cpu() for name, value in model.state_dict().items()}, temporary)
    temporary.replace(path)


def _restore(work: Work, model: nn.Module, preparation: Preparation) -> None:
    """The trained weights, also where they were trained before; and the model as a directory that opens."""
    model.load_state_dict(torch.load(_weights_file(work), map_location="cpu", weights_only=True))
    model.eval()

    def write() -> str:
        if processes.is_main():
            vision_models.save(model, work.folder / "model", preparation)
        return "model"

    work.step("model", write)


def _judge(model: nn.Module, judged: JudgedImages, device: torch.device) -> Accuracy:
    """Accuracy on all images, of which each process judges a part."""
    count = processes.count()
    if count == 1:
        return accuracy(model, judged.batches(device))
    own = JudgedImages(judged.images, judged.preparation, torch.arange(0), [])
    own.places = judged.places[processes.rank() :: count]
    own.labels = judged.labels[processes.rank() :: count]

    def total(values: Tensor) -> Tensor:
        distributed.all_reduce(values)
        return values

    return accuracy(model, own.batches(device), total=total)


def _rows(config: Config, model: nn.Module, images: int) -> list[vision_conversion.Row]:
    """The conversions that are asked for, if the model and the number of training images allow them."""
    if not config.convert_sizes:
        return []
    rows = vision_conversion.rows_of(
        config.convert_sizes, config.convert_methods, config.convert_inputs, config.convert_dims_per_head,
        vision_conversion.full_size(model, config.convert_sizes),
    )  # fmt: skip
    most = max((row.inputs for row in rows), default=0)
    if most > images:
        raise ValueError(f"convert_inputs must be at most the {images} training images, got {most}")
    return rows


def _conversions(
    config: Config,
    work: Work,
    model: nn.Module,
    rows: list[vision_conversion.Row],
    train: Images,
    judged: JudgedImages,
    judge: Callable[[nn.Module], Accuracy],
) -> dict[str, Any]:
    """Convert in every way, judge, and draw what attention became."""
    device, preparation = next(model.parameters()).device, judged.preparation
    turns = each_class_in_turn([int(label) for label in train.labels])
    prepared: dict[int, list[Batch]] = {}

    def batches(count: int) -> list[Batch]:
        if count not in prepared:
            chosen = JudgedImages(train, preparation, torch.arange(len(train.classes)), turns[:count])
            pixels = torch.cat([part for part, _ in chosen.batches(device)])
            is_timm = hasattr(model, "pretrained_cfg")
            views = vision_conversion.training_views(pixels)
            prepared[count] = [view if is_timm else {"pixel_values": view} for view in views]
        return prepared[count]

    pictures: list[Tensor] = []
    if config.map_images:
        shown = each_class_in_turn([int(label) for label in judged.images.labels])[: config.map_images]
        some = JudgedImages(judged.images, preparation, torch.arange(len(train.classes)), shown)
        pictures = [one[None] for part, _ in some.batches(device) for one in part]
    refinement = Refinement(joint_steps=config.refine_steps, batch_size=config.refine_batch_size, seed=config.seed)
    done = vision_conversion.judge_rows(model, rows, batches, judge, work.step, refinement, pictures)
    found: dict[str, Any] = {"full_dim": vision_conversion.full_size(model, config.convert_sizes)}
    found |= {"conversions": [{k: v for k, v in row.items() if k != "maps"} for row in done]}
    if pictures:
        maps = {"original": [vision_conversion.class_map(vision_conversion.last_layer(model, one)) for one in pictures]}
        most = max(config.convert_inputs, default=0)
        maps |= {
            f"{row['method']} {row['shared_dim']}": row["maps"]
            for row in done if "maps" in row and row["inputs"] in (0, most)
        }  # fmt: skip
        found["maps"] = maps
        if processes.is_main():
            _draw(maps, pictures, preparation, work)
    return found


def _draw(maps: dict[str, Any], pictures: list[Tensor], preparation: Preparation, work: Work) -> None:
    mean, deviation = (torch.tensor(values)[:, None, None] for values in (preparation.mean, preparation.deviation))
    shown = [(one[0].cpu() * deviation + mean).clamp(0, 1).permute(1, 2, 0).numpy() for one in pictures]
    try:
        draw_maps(maps, work.folder / "maps.png", shown)
    except ModuleNotFoundError as error:
        work.say(f"no figure of the maps: {error}")
