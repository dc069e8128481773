"""Collaborative attention through SDPA with one width for queries, keys and values.

Flash attention for CPUs wants one width for all three; without it SDPA falls back on plain products that copy the
shared key for every head. Here what is narrower is filled up with zeros, which change nothing. Sparse mixing is filled
up as well, over the one shared key, where `sdpa` gathers a key for every head.
"""

from torch import Tensor
from torch.nn import functional

from collab.ops import sdpa
from collab.ops.reference import dense_mixing

NAME = "padded"

why_not = sdpa.why_not


def common_width(key: Tensor, value: Tensor) -> int:
    """What queries, keys and values are filled up to."""
    width = max(key.shape[-1], value.shape[-1])
    return width + -width % sdpa.MULTIPLE


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
    """Fill up what is narrower, and let SDPA do the rest. Shapes as in `ops.attention`."""
    mixing = mixing.to(query.dtype)
    if dims is not None:
        mixing = dense_mixing(mixing, dims, query.shape[-1])
    value_dim = value.shape[-1]
    width = common_width(key, value)
    mixed_query, head_key = sdpa.all_dims(query, key, mixing, width)
    if width > value_dim:
        value = functional.pad(value, (0, width - value_dim))
    return sdpa.attend(mixed_query, head_key, value, scale, mask, causal, dropout)[..., :value_dim], None
