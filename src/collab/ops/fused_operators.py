"""The fused kernels as operators of torch: what they return, how they differentiate, what compilers see."""

from typing import Any

import torch
from torch import Tensor

from collab.ops import fused_backward, fused_forward
from collab.ops.reference import dense_mixing

FORWARD = "collab::fused_attention"
BACKWARD = "collab::fused_attention_backward"

EXACT_STRIDES = (torch._C.Tag.needs_exact_strides,)
"""Compilers hand over tensors as they lie, parts of one projection among them, and copy none."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixing: Tensor,
    dims: Tensor | None,
    mask: Tensor | None,
    scale: float,
    causal: bool,
) -> Tensor:
    """Outputs (batch, head, query, value_dim); shapes as in `collab.ops.attention`."""
    tensors = (query, key, value, mixing)
    differentiates = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    output: Tensor = fused_attention(query, key, value, mixing, dims, mask, scale, causal, differentiates)[0]
    return output


@torch.library.custom_op(FORWARD, mutates_args=(), tags=EXACT_STRIDES)
def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixing: Tensor,
    dims: Tensor | None,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    keep_statistics: bool,
) -> tuple[Tensor, Tensor]:
    """Outputs and, where they are kept, the statistics of rows that the backward pass needs."""
    with on_device_of(query):
        return fused_forward.forward(
            query, key, value, mixing, dims, mask, scale, causal, keep_statistics, _precision(query)
        )


@fused_attention.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixing: Tensor,
    dims: Tensor | None,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    keep_statistics: bool,
) -> tuple[Tensor, Tensor]:
    batch, queries, _ = query.shape
    heads, value_dim = value.shape[1], value.shape[3]
    output = value.new_empty(batch, queries, heads, value_dim).transpose(1, 2)
    shape, dtype = fused_forward.kept_shape(query, value, mixing.shape[1]) if keep_statistics else ((0,), torch.float32)
    return output, query.new_empty(shape, dtype=dtype)


@torch.library.custom_op(BACKWARD, mutates_args=(), tags=EXACT_STRIDES)
def fused_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixing: Tensor,
    mask: Tensor | None,
    output: Tensor,
    statistics: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and mixing (head, shared)."""
    with on_device_of(query):
        return fused_backward.backward(
            gradient, query, key, value, mixing, mask, output, statistics, scale, causal, _precision(query)
        )


@fused_attention_backward.register_fake
def _(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixing: Tensor,
    mask: Tensor | None,
    output: Tensor,
    statistics: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, heads, keys, value_dim = value.shape
    of_value = value.new_empty(batch, keys, heads, value_dim).transpose(1, 2)
    return query.new_empty(query.shape), key.new_empty(key.shape), of_value, mixing.new_empty(mixing.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, mixing, dims, mask, ctx.scale, ctx.causal, _ = inputs
    ctx.save_for_backward(query, key, value, mixing, dims, mask, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, mixing, dims, mask, output, statistics = ctx.saved_tensors
    dense = mixing if dims is None else dense_mixing(mixing, dims, query.shape[-1])
    of_query, of_key, of_value, of_mixing = fused_attention_backward(
        gradient, query, key, value, dense, mask, output, statistics, ctx.scale, ctx.causal
    )
    if dims is not None:
        of_mixing = of_mixing.gather(1, dims.long())
    return of_query, of_key, of_value, of_mixing, None, None, None, None, None


fused_attention.register_autograd(_differentiate, setup_context=_keep)


def on_device_of(tensor: Tensor) -> Any:
    """Kernels start on the current device: make it that of the inputs."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else torch.no_grad()


def _precision(tensor: Tensor) -> str:
    """Products of float32 are in float32, unless torch's own may be in tf32."""
    if tensor.dtype == torch.bfloat16 and not tensor.is_cuda:
        return "emulated"
    return "tf32" if tensor.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"
