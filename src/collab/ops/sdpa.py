"""Collaborative attention through `torch.nn.functional.scaled_dot_product_attention`.

The content scores ride inside the key as one extra dimension per head, where head i's query has a one. No
per-head additive mask is needed then, so boolean masks and `is_causal` reach the kernels as they are.

With sparse mixing every head gets the few dimensions it uses, and its own content score as one more, gathered into a
key of its own: scores cost what those of ordinary heads of that size do.
"""

import torch
from torch import Tensor
from torch.nn import functional

NAME = "sdpa"


def why_not(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixing: Tensor,
    *,
    dims: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    need_weights: bool = False,
) -> list[str]:
    """Reasons to refuse these inputs; empty when they can be computed here."""
    reasons = []
    if need_weights:
        reasons.append("it never holds the attention weights, and need_weights=True asks for them")
    if not query.is_floating_point():
        reasons.append(f"it needs floating point inputs, got {query.dtype}")
    return reasons


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixing: Tensor,
    *,
    scale: float,
    dims: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    need_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Mix the queries, give every head its key, and let SDPA do the rest. Shapes as in `ops.attention`."""
    mixing = mixing.to(query.dtype)
    value_dim = value.shape[-1]
    if dims is None:
        mixed_query, head_key = _all_dims(query, key, mixing)
    else:
        mixed_query, head_key = _own_dims(query, key, mixing, dims, value_dim)
        value = functional.pad(value, (0, head_key.shape[-1] - value_dim))
    if causal and mask is not None:  # SDPA takes one or the other
        allowed = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool, device=query.device).tril()
        mask = mask & allowed if mask.dtype == torch.bool else mask.masked_fill(~allowed, -torch.inf)
        causal = False
    output = functional.scaled_dot_product_attention(
        mixed_query, head_key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale
    )
    return output[..., :value_dim], None


def _all_dims(query: Tensor, key: Tensor, mixing: Tensor) -> tuple[Tensor, Tensor]:
    """Mixed queries and the one shared key, (batch, head, token, shared [+ head])."""
    num_heads, shared_dim = mixing.shape
    mixed_query = query[:, None] * mixing[:, None]
    if key.shape[-1] > shared_dim:
        own_content = torch.eye(num_heads, dtype=query.dtype, device=query.device)[:, None]
        own_content = own_content.expand(query.shape[0], -1, query.shape[1], -1)
        mixed_query = torch.cat((mixed_query, own_content), dim=-1)
    return mixed_query, key[:, None].expand(-1, num_heads, -1, -1)


def _own_dims(query: Tensor, key: Tensor, mixing: Tensor, dims: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
    """Each head's own dimensions of queries and keys, and its content score, (batch, head, token, width).

    The width is that of the values, at least: fused kernels for a CPU, and flash attention, want one width for all
    (twice as fast on a CPU as without); and a multiple of 8, for kernels that load so many numbers at a time. What is
    left over repeats the first dimension, with a weight of zero in the query.
    """
    (num_heads, own), shared_dim = mixing.shape, query.shape[-1]
    has_content = key.shape[-1] > shared_dim
    width = max(own + has_content, value_dim)
    width += -width % 8
    query_columns = functional.pad(dims, (0, width - own))
    weights = functional.pad(mixing, (0, width - own))
    mixed_query = query.index_select(-1, query_columns.flatten()).unflatten(-1, (num_heads, width)) * weights
    key_columns = query_columns
    if has_content:
        heads = torch.arange(num_heads, device=dims.device, dtype=dims.dtype)[:, None]
        key_columns = torch.cat((dims, shared_dim + heads, query_columns[:, own + 1 :]), dim=1)
        at_content = torch.arange(width, device=query.device) == own
        mixed_query = mixed_query + at_content.to(query.dtype)
    head_key = key.index_select(-1, key_columns.flatten()).unflatten(-1, (num_heads, width))
    return mixed_query.transpose(1, 2), head_key.transpose(1, 2)
