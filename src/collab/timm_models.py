"""How a timm model is made again: its architecture and the arguments that differ from the architecture's own."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from collab.hosts.heads import heads_before
from collab.structure import build_structure_, structure_of

_ARGUMENTS: dict[str, Callable[[Any], Any]] = {
    "num_classes": lambda model: model.num_classes,
    "global_pool": lambda model: model.global_pool,
    "in_chans": lambda model: model.patch_embed.proj.in_channels,
    "img_size": lambda model: list(model.patch_embed.img_size),
    "patch_size": lambda model: list(model.patch_embed.patch_size),
    "dynamic_img_size": lambda model: model.dynamic_img_size,
    "embed_dim": lambda model: model.embed_dim,
    "depth": lambda model: len(model.blocks),
    "num_heads": lambda model: heads_before(model.blocks[0].attn) or model.blocks[0].attn.num_heads,
    "mlp_ratio": lambda model: model.blocks[0].mlp.fc1.out_features / model.embed_dim,
    "class_token": lambda model: model.cls_token is not None,
    "reg_tokens": lambda model: model.num_reg_tokens,
    "drop_rate": lambda model: model.head_drop.p,
    "pos_drop_rate": lambda model: model.pos_drop.p,
    "patch_drop_rate": lambda model: getattr(model.patch_drop, "prob", 0.0),
    "proj_drop_rate": lambda model: model.blocks[0].attn.proj_drop.p,
    "attn_drop_rate": lambda model: model.blocks[0].attn.attn_drop.p,
    "drop_path_rate": lambda model: getattr(model.blocks[-1].drop_path1, "drop_prob", 0.0),
}
"""Arguments of `timm.create_model` and where a model shows them; one that it does not show is left to its default."""


def is_timm(model: nn.Module) -> bool:
    """Whether timm made this model."""
    return type(model).__module__.partition(".")[0] == "timm"


def how_to_create(model: nn.Module) -> tuple[dict[str, Any], str]:
    """What config.json says of a timm model, in timm's own words, and why it cannot be made from that, or ""."""
    pretrained_cfg = dict(getattr(model, "pretrained_cfg", None) or {})
    pretrained_cfg.pop("state_dict", None)  # weights it was once made from
    architecture = pretrained_cfg.get("architecture")
    if architecture is None:
        return {}, "it does not name its architecture"
    config = {"architecture": architecture, "pretrained_cfg": pretrained_cfg, "model_args": {}}
    try:
        with torch.device("meta"):
            usual = _shown(create(config))
            config["model_args"] = {
                name: value for name, value in _shown(model).items() if name in usual and usual[name] != value
            }
            again = create(config)
            build_structure_(again, structure_of(model))
    except Exception as error:  # whatever an architecture makes of arguments it was not meant for
        return config, str(error)
    return config, _difference(model, again)


def create(config: Mapping[str, Any]) -> nn.Module:
    """The model `how_to_create` described, with ordinary attention and no trained weights."""
    import timm

    model: nn.Module = timm.create_model(
        config["architecture"], pretrained=False, pretrained_cfg=config["pretrained_cfg"], **config["model_args"]
    )
    return model


def _shown(model: nn.Module) -> dict[str, Any]:
    shown = {}
    for name, find in _ARGUMENTS.items():
        with contextlib.suppress(AttributeError, TypeError, IndexError):
            shown[name] = find(model)
    return shown


def _difference(model: nn.Module, again: nn.Module) -> str:
    """What a model made again lacks of the first, or ""."""
    shapes, shapes_again = ({name: value.shape for name, value in m.state_dict().items()} for m in (model, again))
    names = sorted(name for name in shapes | shapes_again if shapes.get(name) != shapes_again.get(name))
    if names:
        return f"{', '.join(names[:3])} would have other shapes"
    # A printed model shows its layers' classes, probabilities and epsilons.
    if _shown(model) != _shown(again) or str(model) != str(again):
        return "its layers would have other settings"
    return ""
