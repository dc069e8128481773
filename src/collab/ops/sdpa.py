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

MULTIPLE = 16
"""Widths made up here are multiples of it: with half types, kernels are up to twice as fast as at others."""


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
        mixed_query, head_key = all_dims(query, key, mixing)
    else:
        mixed_query, head_key = _own_dims(query, key, value, mixing, dims)
        value = functional.pad(value, (0, head_key.shape[-1] - value_dim))
    return attend(mixed_query, head_key, value, scale, mask, causal, dropout)[..., :value_dim], None


def attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None, causal: bool, dropout: float
) -> Tensor:
    """SDPA of queries, keys and values (batch, head, token, width), under a mask, causal or both."""
    if mask is not None and mask.dim() == 3:  # flash attention for CPUs takes two or four dimensions
        mask = mask[None]
    if causal and mask is not None:  # SDPA takes one or the other
        allowed = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
        mask = mask & allowed if mask.dtype == torch.bool else mask.masked_fill(~allowed, -torch.inf)
        causal = False
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale
    )


def all_dims(query: Tensor, key: Tensor, mixing: Tensor, width: int = 0) -> tuple[Tensor, Tensor]:
    """Mixed queries and the one shared key, (batch, head, token, shared [+ head]), with zeros up to `width`.

    What the mixed queries have beyond the shared dimensions is mixed with them: ones in the query that the mixing keeps
    for the head's own content score, zeros for every other. So they are written once, in one product.
    """
    num_heads, shared_dim = mixing.shape
    if key.shape[-1] > shared_dim:
        query = functional.pad(query, (0, num_heads), value=1.0)
        mixing = torch.cat((mixing, torch.eye(num_heads, dtype=mixing.dtype, device=mixing.device)), dim=1)
    missing = max(0, width - key.shape[-1])
    if missing:
        query, key, mixing = (functional.pad(part, (0, missing)) for part in (query, key, mixing))
    return query[:, None] * mixing[:, None], key[:, None].expand(-1, num_heads, -1, -1)


def own_width(key: Tensor, value: Tensor, mixing: Tensor, shared_dim: int) -> int:
    """Numbers of a token in each head's own queries and keys, where the heads use a few dimensions each."""
    width = max(mixing.shape[1] + (key.shape[-1] > shared_dim), value.shape[-1])
    return width + -width % MULTIPLE


def _own_dims(query: Tensor, key: Tensor, value: Tensor, mixing: Tensor, dims: Tensor) -> tuple[Tensor, Tensor]:
    """Each head's own dimensions of queries and keys, and its content score, (batch, head, token, width).

    The width is that of the values, at least: flash attention wants one width for all (twice as fast on a CPU as
    without). What is left over repeats the first dimension, with a weight of zero in the query.
    """
    (num_heads, own), shared_dim = mixing.shape, query.shape[-1]
    has_content = key.shape[-1] > shared_dim
    width = own_width(key, value, mixing, shared_dim)
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
