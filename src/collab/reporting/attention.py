"""attention_weights: what every head of a model attends to, as the model itself computes it."""

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from collab.inspection import AttentionSite, find_attention
from collab.running import Batch, call, device_of, step_by_step

_ROUNDING = 0.02
"""How far the weights of a query may be from adding up to one: what low precision makes of them."""


def attention_weights(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Attention weights of every layer for the first input of a batch, none dropped: path -> (head, query, key).

    The model computes them, step by step ("eager" in transformers, without fused attention in timm), and is left as it
    was. A layer that a pass runs several times is there once for each, as "path, run 1" and so on; one whose class
    does not show its weights is not there.
    """
    seen: dict[str, list[Tensor]] = {}
    sites = find_attention(model)
    with step_by_step(model), _eager(model), torch.no_grad(), contextlib.ExitStack() as stack:
        for site in sites:
            for handle in _watch(site, seen.setdefault(site.path, [])):
                stack.callback(handle.remove)
        call(model, _asking(model, batch), device_of(model))
    return {
        path if len(runs) == 1 else f"{path}, run {number}": weights
        for path, runs in seen.items()
        for number, weights in enumerate(runs, 1)
    }


def moved(original: Tensor, converted: Tensor) -> Tensor:
    """(head,): how much of a query's attention went to other keys, mean over queries; from (head, query, key) each.

    The total variation distance: 0 for the same attention, 1 for attention to other keys altogether.
    """
    return (original.double() - converted.double()).abs().sum(-1).mean(-1) / 2


@contextlib.contextmanager
def _eager(model: nn.Module) -> Iterator[None]:
    """Attention in which the weights exist, and afterwards what there was before."""
    owners: list[Any] = [module for module in model.modules() if hasattr(module, "fused_attn")]
    fused = [owner.fused_attn for owner in owners]
    # One config may hold others: outer ones come first, and what they pass on is put right after them.
    configs: dict[int, Any] = {}
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            configs.setdefault(id(config), config)
    kinds = [config._attn_implementation for config in configs.values()]
    for owner in owners:
        owner.fused_attn = False
    for config in configs.values():
        config._attn_implementation = "eager"
    try:
        yield
    finally:
        for owner, value in zip(owners, fused, strict=True):
            owner.fused_attn = value
        for config, kind in zip(configs.values(), kinds, strict=True):
            config._attn_implementation = kind


def _asking(model: nn.Module, batch: Batch) -> Batch:
    """The batch, and a request for the weights where the model takes one: some classes give them only then."""
    parameters = inspect.signature(model.forward).parameters.values()
    takes = any(one.name == "output_attentions" or one.kind is one.VAR_KEYWORD for one in parameters)
    return {**batch, "output_attentions": True} if takes and isinstance(batch, Mapping) else batch


def _watch(site: AttentionSite, seen: list[Tensor]) -> list[RemovableHandle]:
    """Hooks that take in a layer's weights: from what it returns, or from what it gives to its dropout."""

    def take(values: Any) -> None:
        candidates = values if isinstance(values, tuple | list) else [values]
        # The last: T5 returns its position bias, of the same shape, before the weights.
        for value in reversed(candidates):
            if isinstance(value, Tensor) and _are_weights(value, site.num_heads):
                seen.append(value[0].detach().float().cpu())
                return

    dropout = getattr(site.module, "attn_drop", None)
    if hasattr(site.module, "fused_attn") and isinstance(dropout, nn.Module):
        return [dropout.register_forward_pre_hook(lambda module, args: take(args))]
    return [site.module.register_forward_hook(lambda module, args, output: take(output))]


def _are_weights(value: Tensor, num_heads: int) -> bool:
    """Whether these are (batch, head, query, key) and what a query gives to its keys adds up to one, or to nothing."""
    if value.dim() != 4 or value.shape[1] != num_heads or not value.is_floating_point():
        return False
    sums = value.detach().float().sum(-1)
    return bool(((sums - 1).abs() < _ROUNDING).logical_or(sums == 0).all()) and bool((value >= 0).all())
