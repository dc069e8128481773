"""The definition of collaborative attention in plain PyTorch: any dtype, any device, nothing fused.

Tests and benchmarks compare every other implementation with this one.
"""

import torch
from torch import Tensor
from torch.nn import functional

NAME = "reference"


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
    """Reasons to refuse these inputs: none, the definition takes whatever `ops.attention` lets through."""
    return []


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
    """Compute the scores, their softmax and the mean of the values, one after the other.

    Shapes as in `collab.ops.attention`; the weights come back whether asked for or not.
    """
    shared_dim = query.shape[-1]
    mixing = mixing.to(query.dtype)
    if dims is not None:
        mixing = dense_mixing(mixing, dims, shared_dim)
    shared_key, content = key[..., :shared_dim], key[..., shared_dim:]
    mixed_query = query[:, None] * mixing[:, None]  # (batch, head, query, shared)
    scores = mixed_query @ shared_key[:, None].mT
    if content.shape[-1]:
        scores = scores + content.mT[:, :, None]  # one score per head and key, the same for every query
    scores = scores * scale
    if causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    # A row with nothing to attend to gives zeros, and zero gradients, as SDPA does; softmax alone would give NaN.
    nothing = (scores == -torch.inf).all(dim=-1, keepdim=True)
    # Low precision sums its exponentials in float32.
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.masked_fill(nothing, 0.0).softmax(dim=-1, dtype=wide)
    weights = weights.masked_fill(nothing, 0.0).to(value.dtype)
    weights = functional.dropout(weights, dropout)
    return weights @ value, weights


def dense_mixing(mixing: Tensor, dims: Tensor, shared_dim: int) -> Tensor:
    """(head, shared): mixing weights (head, k) at their dimensions (head, k), zeros elsewhere."""
    return mixing.new_zeros(len(mixing), shared_dim).scatter(1, dims.long(), mixing)
