"""Collaborative attention as one function with several implementations behind one signature."""

from types import ModuleType

import torch
from torch import Tensor

from collab.ops import reference, sdpa

IMPLEMENTATIONS: dict[str, ModuleType] = {module.NAME: module for module in (sdpa, reference)}
"""By name, fastest first: the automatic choice is the first that gives no reason against the inputs."""


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
    implementation: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Attend with heads that share one query/key space and differ by their mixing row and content score.

    scores[head] = ((query * mixing[head]) @ shared_keyᵀ + content[head]) * scale
    output[head] = softmax(scores[head] + mask) @ value[head]

    Args:
        query: (batch, query, shared).
        key: (batch, key, shared), or (batch, key, shared + head) where the last columns are the content scores.
        value: (batch, head, key, value_dim).
        mixing: (head, shared).
        scale: multiplies the scores; it belongs to the model and never depends on the shared size.
        mask: broadcastable to (batch, head, query, key); boolean, True where a query may attend, or an addend.
        causal: query i sees keys 0 to i only.
        dropout: probability of dropping an attention weight.
        need_weights: also return the attention weights.
        implementation: "auto", or a name in `IMPLEMENTATIONS` to force it.

    Returns:
        output (batch, head, query, value_dim) and the weights (batch, head, query, key) where asked for, else None.
    """
    _check_shapes(query, key, value, mixing, mask)
    chosen = choose(
        query, key, value, mixing,
        mask=mask, causal=causal, dropout=dropout, need_weights=need_weights, implementation=implementation,
    )  # fmt: skip
    output, weights = IMPLEMENTATIONS[chosen].attention(
        query, key, value, mixing,
        scale=scale, mask=mask, causal=causal, dropout=dropout, need_weights=need_weights,
    )  # fmt: skip
    return output, weights if need_weights else None


def choose(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixing: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    need_weights: bool = False,
    implementation: str = "auto",
) -> str:
    """Name the implementation `attention` would use for these inputs, or raise with every reason against them."""
    if implementation != "auto" and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be 'auto' or one of {list(IMPLEMENTATIONS)}, got {implementation!r}")
    candidates = list(IMPLEMENTATIONS) if implementation == "auto" else [implementation]
    refusals = {}
    for name in candidates:
        refusals[name] = IMPLEMENTATIONS[name].why_not(
            query, key, value, mixing, mask=mask, causal=causal, dropout=dropout, need_weights=need_weights
        )
        if not refusals[name]:
            return name
    listing = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in refusals.items())
    raise ValueError(f"no implementation takes these inputs. {listing}")


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, mixing: Tensor, mask: Tensor | None) -> None:
    if query.dim() != 3 or key.dim() != 3 or value.dim() != 4 or mixing.dim() != 2:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (query, key, value, mixing))
        raise ValueError(
            "query, key, value and mixing must be (batch, query, shared), (batch, key, shared [+ head]), "
            f"(batch, head, key, value_dim) and (head, shared), got {shapes}"
        )
    num_heads, shared_dim = mixing.shape
    if query.shape[-1] != shared_dim:
        raise ValueError(f"query must have mixing's {shared_dim} shared dimensions, got {query.shape[-1]}")
    if key.shape[-1] not in (shared_dim, shared_dim + num_heads):
        raise ValueError(
            f"key must have {shared_dim} shared dimensions, or {shared_dim + num_heads} with the content scores of "
            f"{num_heads} heads, got {key.shape[-1]}"
        )
    if value.shape[1] != num_heads:
        raise ValueError(f"value must have mixing's {num_heads} heads, got {value.shape[1]}")
    if mask is not None and not (mask.dtype.is_floating_point or mask.dtype == torch.bool):
        raise ValueError(f"mask must be boolean (True where a query may attend) or floating point, got {mask.dtype}")
