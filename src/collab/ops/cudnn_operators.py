"""What feeds cuDNN's attention, as operators of torch: what they return, how they differentiate, what compilers see."""

from typing import Any

import torch
from torch import Tensor

from collab.ops import cudnn_kernels
from collab.ops.fused_operators import EXACT_STRIDES, on_device_of

SPREAD = "collab::spread_heads"
COLLECT = "collab::collect_heads"


@torch.library.custom_op(SPREAD, mutates_args=(), tags=EXACT_STRIDES)
def spread_heads(query: Tensor, key: Tensor, mixing: Tensor, dims: Tensor | None, width: int) -> tuple[Tensor, Tensor]:
    """Mixed queries (batch, query, head, width), and keys (batch, key, 1 or head, width): `cudnn_kernels.spread`."""
    with on_device_of(query):
        return cudnn_kernels.spread(query, key, mixing, dims, width)


@spread_heads.register_fake
def _(query: Tensor, key: Tensor, mixing: Tensor, dims: Tensor | None, width: int) -> tuple[Tensor, Tensor]:
    heads = mixing.shape[0]
    key_heads = 1 if dims is None else heads
    return (
        query.new_empty(query.shape[0], query.shape[1], heads, width),
        key.new_empty(key.shape[0], key.shape[1], key_heads, width),
    )


@torch.library.custom_op(COLLECT, mutates_args=(), tags=EXACT_STRIDES)
def collect_heads(
    query_gradients: Tensor,
    key_gradients: Tensor,
    query: Tensor,
    mixing: Tensor,
    dims: Tensor | None,
    key_width: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key (where `dims` are given) and mixing; see `cudnn_kernels.collect`."""
    parts = [part if part.stride(-1) == 1 else part.contiguous() for part in (query_gradients, key_gradients)]
    with on_device_of(query):
        return cudnn_kernels.collect(parts[0], parts[1], query, mixing, dims, key_width)


@collect_heads.register_fake
def _(
    query_gradients: Tensor,
    key_gradients: Tensor,
    query: Tensor,
    mixing: Tensor,
    dims: Tensor | None,
    key_width: int,
) -> tuple[Tensor, Tensor, Tensor]:
    of_key = (0,) if dims is None else (key_gradients.shape[0], key_gradients.shape[1], key_width)
    return query.new_empty(query.shape), query.new_empty(of_key), mixing.new_empty(mixing.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, mixing, dims, _ = inputs
    ctx.key_width = key.shape[-1]
    ctx.save_for_backward(query, mixing, dims)


def _differentiate(ctx: Any, of_mixed: Tensor, of_head_key: Tensor) -> tuple[Tensor | None, ...]:
    query, mixing, dims = ctx.saved_tensors
    of_query, of_key, of_mixing = collect_heads(of_mixed, of_head_key, query, mixing, dims, ctx.key_width)
    if dims is None:
        of_key = of_head_key[:, :, 0, : ctx.key_width]
    return of_query, of_key, of_mixing, None, None


spread_heads.register_autograd(_differentiate, setup_context=_keep)
