"""Vision transformers to train: by the names of timm or transformers, at any size, with heads that share or do not."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import collab
from collab import sources
from collab.classification import Preparation, write_processor
from collab.hosts import Collaborative
from collab.recipes.settings import check_at_least, check_choice
from collab.structure import structure_of

LIBRARIES = ("timm", "transformers")
ATTENTION = ("concatenate", "collaborative")

PRESETS: dict[str, tuple[str, str, dict[str, int]]] = {
    "deit-b3": ("deit_base_patch16_224", "vit", {"depth": 3, "width": 768, "heads": 12}),
    "deit-tiny": ("deit_tiny_patch16_224", "vit", {"depth": 12, "width": 192, "heads": 3}),
    "deit-small": ("deit_small_patch16_224", "vit", {"depth": 12, "width": 384, "heads": 6}),
    "deit-base": ("deit_base_patch16_224", "vit", {"depth": 12, "width": 768, "heads": 12}),
}
"""Name -> timm's architecture, transformers' type of model, and sizes. DeiT-B3 is DeiT-B with 3 layers of 12."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Which model.

    Attributes:
        name: a preset; or what the library knows: an architecture of timm, a type ("vit", "deit") or hub name or
            directory of transformers.
        library: "timm" or "transformers".
        pretrained: whether to start from its trained weights; a directory's model is opened as it is, of either
            library.
        depth, width, heads: layers, features of a token, heads; as the name says if not given.
        image_size, patch_size: rows and columns of an image and of a patch.
        attention: "concatenate", each head by itself, or "collaborative", sharing one query/key space.
        key_dim: dimensions of queries and keys, all heads together; the model's width if not given.
        mixing: how collaborative heads start to mix: "concatenate", "normal", "uniform" or "ones".
        query_key_deviation: standard deviation that query and key weights of heads that are not the model's own are
            drawn with; 0 leaves them as `collab.collaborate_` draws them.
        stochastic_depth: probability of skipping the last layer while training, less for earlier ones; timm only.
        seed: of the weights.
    """

    name: str = "deit-b3"
    library: str = "timm"
    pretrained: bool = False
    depth: int | None = None
    width: int | None = None
    heads: int | None = None
    image_size: int | None = None
    patch_size: int | None = None
    attention: str = "concatenate"
    key_dim: int | None = None
    mixing: str = "concatenate"
    query_key_deviation: float = 0.02
    stochastic_depth: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("library", self.library, LIBRARIES)
        check_choice("attention", self.attention, ATTENTION)
        check_at_least(self, 1, "depth", "width", "heads", "image_size", "patch_size", "key_dim")
        check_at_least(self, 0, "stochastic_depth", "query_key_deviation")
        if self.stochastic_depth and self.library == "transformers":
            raise ValueError(
                f"stochastic_depth must be 0 with library transformers, whose models have none, "
                f"got {self.stochastic_depth}"
            )
        if self.pretrained and (self.attention != "concatenate" or self.key_dim is not None):
            raise ValueError(
                "pretrained must be false where heads start afresh: give convert_sizes to convert a trained model"
            )


def build(architecture: Architecture, classes: tuple[str, ...], preparation: Preparation | None = None) -> nn.Module:
    """A model for these classes, its weights drawn from the seed or trained ones."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(architecture.seed)
        if architecture.pretrained:
            return _pretrained(architecture, len(classes))
        make = _of_timm if architecture.library == "timm" else _of_transformers
        model = make(architecture, classes, preparation)
    heads_(model, architecture)
    return model


def heads_(model: nn.Module, architecture: Architecture) -> None:
    """Give a model whose weights are untrained the heads asked for.

    Heads by themselves with queries and keys of a reduced size are collaborative ones that each use dimensions of
    their own and whose mixing is frozen: blocks of ones, times the scale of their own size. What is trained differs
    in the mixing alone, then.
    """
    sites = [site for site in collab.find_attention(model) if not site.why_not]
    if not sites:
        raise ValueError(f"{type(model).__name__} must have attention that can share, it has none")
    full = max(site.full_dim for site in sites)
    key_dim = architecture.key_dim or full
    if key_dim > full:
        raise ValueError(f"key_dim must be at most heads x head size, {full}, got {key_dim}")
    if architecture.attention == "concatenate" and key_dim == full:
        return
    heads = sites[0].num_heads
    options: dict[str, Any] = {"mixing": architecture.mixing}
    if architecture.attention == "concatenate":
        if key_dim % heads:
            raise ValueError(f"key_dim must be a multiple of the {heads} heads, got {key_dim}")
        size = key_dim // heads
        options = {"mixing": "concatenate", "dims_per_head": size, "scale": size**-0.5}
    config = collab.CollaborativeConfig(shared_dim=key_dim, weights="fresh", seed=architecture.seed, **options)
    collab.collaborate_(model, config)
    _draw_queries_and_keys_(model, architecture)
    if architecture.attention == "concatenate":
        for module in model.modules():
            if isinstance(module, Collaborative):
                module.mixing.requires_grad_(False)


@torch.no_grad()
def _draw_queries_and_keys_(model: nn.Module, architecture: Architecture) -> None:
    """Query and key weights of the deviation that the model's other weights have."""
    if not architecture.query_key_deviation:
        return
    generator = torch.Generator().manual_seed(architecture.seed)
    for site in collab.find_attention(model):
        if isinstance(site.module, Collaborative) and site.host is not None:
            shared = site.host.shared_weights(site.module)
            for weight in (shared.query, shared.key):
                drawn = torch.empty(weight.shape)
                limit = 2 * architecture.query_key_deviation
                nn.init.trunc_normal_(drawn, std=limit / 2, a=-limit, b=limit, generator=generator)
                weight.copy_(drawn)
            parameters = dict(site.module.named_parameters())
            for name, values in site.host.parameters_from(site.module, shared).items():
                if name in parameters:  # which dimensions heads use is not one
                    parameters[name].copy_(values)


def _of_timm(architecture: Architecture, classes: tuple[str, ...], preparation: Preparation | None) -> nn.Module:
    import timm

    preset = PRESETS.get(architecture.name)
    sizes = dict(preset[2]) if preset else {}
    sizes |= {name: getattr(architecture, name) for name in ("depth", "width", "heads") if getattr(architecture, name)}
    arguments: dict[str, Any] = {
        {"width": "embed_dim", "heads": "num_heads"}.get(name, name): size for name, size in sizes.items()
    }
    arguments |= {"img_size": architecture.image_size, "patch_size": architecture.patch_size}
    arguments = {name: value for name, value in arguments.items() if value is not None}
    name = preset[0] if preset else architecture.name
    if not timm.is_model(name):
        near = ", ".join(timm.list_models(f"*{name[:8]}*")[:5])
        raise ValueError(f"model must be {', '.join(PRESETS)}, or an architecture of timm, got {name!r} ({near} ...)")
    try:
        model: Any = timm.create_model(
            name, pretrained=False, num_classes=len(classes), drop_path_rate=architecture.stochastic_depth, **arguments
        )
    except TypeError as error:  # of its constructor
        given = ", ".join(f"{key} {value}" for key, value in arguments.items())
        raise ValueError(f"model must be a vision transformer that takes {given}, got {name!r}: {error}") from error
    model.pretrained_cfg = {**model.pretrained_cfg, "num_classes": len(classes), "label_names": list(classes)}
    if preparation is not None:
        resize = preparation.resize or preparation.size
        model.pretrained_cfg |= {
            "input_size": (3, preparation.size, preparation.size), "crop_pct": preparation.size / resize,
            "interpolation": preparation.interpolation, "mean": preparation.mean, "std": preparation.deviation,
        }  # fmt: skip
    model.model_arguments = arguments | {"drop_path_rate": architecture.stochastic_depth}
    made: nn.Module = model
    return made


def _of_transformers(
    architecture: Architecture, classes: tuple[str, ...], preparation: Preparation | None
) -> nn.Module:
    import transformers

    preset = PRESETS.get(architecture.name)
    sizes = dict(preset[2]) if preset else {}
    sizes |= {name: getattr(architecture, name) for name in ("depth", "width", "heads") if getattr(architecture, name)}
    names = {"depth": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads"}
    values: dict[str, Any] = {names[name]: size for name, size in sizes.items()}
    if "width" in sizes:
        values["intermediate_size"] = 4 * sizes["width"]
    values |= {"image_size": architecture.image_size, "patch_size": architecture.patch_size}
    values |= {"id2label": dict(enumerate(classes)), "label2id": {name: at for at, name in enumerate(classes)}}
    values = {name: value for name, value in values.items() if value is not None}
    name = preset[1] if preset else architecture.name
    if sources.local_folder(name) is None and "/" not in name:
        config = transformers.AutoConfig.for_model(name, **values)
    else:
        config = transformers.AutoConfig.from_pretrained(name, **values)
    config.architectures = config.architectures or []  # of types with several classes, the first is the plain one
    model: nn.Module = transformers.AutoModelForImageClassification.from_config(config)
    return model


def _pretrained(architecture: Architecture, classes: int) -> nn.Module:
    """A trained model as it is."""
    name = PRESETS[architecture.name][0] if architecture.name in PRESETS else architecture.name
    return sources.open_model(name)


def save(model: nn.Module, folder: Path, preparation: Preparation) -> None:
    """Write a trained model for `collab.sources.open_model` and its own library to open."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    plain = copy.deepcopy(model).cpu()
    if structure_of(plain):
        collab.save(plain, folder, overwrite=True)
    elif hasattr(plain, "pretrained_cfg"):
        from timm.models import save_for_hf

        save_for_hf(plain, str(folder), safe_serialization=True, model_args=getattr(model, "model_arguments", None))
    else:
        plain.save_pretrained(folder)  # type: ignore[operator]
    if not hasattr(plain, "pretrained_cfg"):
        write_processor(folder, preparation)
