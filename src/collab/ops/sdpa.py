"""Collaborative attention through `torch.nn.functional.scaled_dot_product_attention`.

The content scores ride inside the key as one extra dimension per head, where head i's query has a one. No
per-head additive mask is needed then, so boolean masks and `is_causal` reach the kernels as they are.
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
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    need_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Mix the queries, give every head the one shared key, and let SDPA do the rest. Shapes as in `ops.attention`."""
    num_heads, shared_dim = mixing.shape
    mixed_query = query[:, None] * mixing.to(query.dtype)[:, None]  # (batch, head, query, shared)
    if key.shape[-1] > shared_dim:
        own_content = torch.eye(num_heads, dtype=query.dtype, device=query.device)[:, None]
        own_content = own_content.expand(query.shape[0], -1, query.shape[1], -1)
        mixed_query = torch.cat((mixed_query, own_content), dim=-1)
    if causal and mask is not None:  # SDPA takes one or the other
        allowed = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool, device=query.device).tril()
        mask = mask & allowed if mask.dtype == torch.bool else mask.masked_fill(~allowed, -torch.inf)
        causal = False
    shared_key = key[:, None].expand(-1, num_heads, -1, -1)
    output = functional.scaled_dot_product_attention(
        mixed_query, shared_key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale
    )
    return output, None
