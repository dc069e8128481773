"""Collaborative attention as one function with several implementations behind one signature."""

from typing import Any

import torch
from torch import Tensor

from collab.ops.choice import IMPLEMENTATIONS, check_implementation, choice_for, choose, use_implementation, watcher

__all__ = ["IMPLEMENTATIONS", "attention", "check_dims", "check_implementation", "choose", "use_implementation"]

DIMS_DTYPE = torch.int32
"""How layers keep the dimensions of sparse mixing: the smallest type that `index_select` takes, as many bytes as the
weights they are for. It stays what it is when a model is cast, and safetensors and transformers keep it."""


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
    implementation: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Attend with heads that share one query/key space and differ by their mixing row and content score.

    scores[head] = ((query * mixing[head]) @ shared_keyᵀ + content[head]) * scale        without `dims`
    scores[head] = ((query[dims[head]] * mixing[head]) @ shared_key[dims[head]]ᵀ + content[head]) * scale
    output[head] = softmax(scores[head] + mask) @ value[head]

    Args:
        query: (batch, query, shared).
        key: (batch, key, shared), or (batch, key, shared + head) where the last columns are the content scores.
        value: (batch, head, key, value_dim).
        mixing: (head, shared), or (head, k) with `dims`.
        scale: multiplies the scores; it belongs to the model and never depends on the shared size.
        dims: (head, k) integers, for sparse mixing: the shared dimension each mixing weight is for, none twice in a
            head. Their values are not looked at here; `check_dims` does that.
        mask: two to four dimensions, broadcastable to (batch, head, query, key); boolean, True where a query may
            attend, or floating point, added to the scores in the dtype of `query`. A query that may attend to
            nothing gives zeros.
        causal: query i sees keys 0 to i only.
        dropout: probability of dropping an attention weight.
        need_weights: also return the attention weights.
        implementation: "auto" for the fastest that takes these inputs, or a name in `IMPLEMENTATIONS` to force it;
            `use_implementation` forces it from outside, where this is "auto".

    Returns:
        output (batch, head, query, value_dim) and the weights (batch, head, query, key) where asked for, else None.
    """
    _check_shapes(query, key, value, mixing, dims)
    if mask is not None:
        check_mask(mask, (*value.shape[:2], query.shape[1], key.shape[1]))
        mask = mask if mask.dtype == torch.bool else mask.to(query.dtype)
    options: dict[str, Any] = {
        "dims": dims, "mask": mask, "causal": causal, "dropout": dropout, "need_weights": need_weights,
    }  # fmt: skip
    chosen = choose(query, key, value, mixing, **options, implementation=implementation)
    if not torch.compiler.is_compiling() and (watch := watcher.get()) is not None:
        tensors = {"query": query, "key": key, "value": value, "mixing": mixing}
        watch(choice_for(**tensors, **options, implementation=implementation), tensors | options)
    output, weights = IMPLEMENTATIONS[chosen].attention(query, key, value, mixing, scale=scale, **options)
    return output, weights if need_weights else None


def check_dims(dims: Tensor, num_heads: int, shared_dim: int, name: str = "dims") -> None:
    """Refuse dimensions of sparse mixing that are not (head, k) integers below `shared_dim`, no two in a head alike."""
    if dims.dim() != 2 or len(dims) != num_heads or not 1 <= dims.shape[1] <= shared_dim:
        raise ValueError(f"{name} must be ({num_heads}, 1 to {shared_dim} dimensions), got {tuple(dims.shape)}")
    if dims.is_floating_point() or dims.is_complex() or dims.dtype == torch.bool:
        raise ValueError(f"{name} must be integers, got {dims.dtype}")
    low, high = int(dims.min()), int(dims.max())
    if low < 0 or high >= shared_dim:
        raise ValueError(f"{name} must be from 0 to {shared_dim - 1}, got {low if low < 0 else high}")
    ordered = dims.sort(dim=1).values
    repeated = (ordered[:, 1:] == ordered[:, :-1]).nonzero()
    if len(repeated):
        head, place = repeated[0].tolist()
        raise ValueError(f"{name} must differ within a head, got {int(ordered[head, place])} twice in head {head}")


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, mixing: Tensor, dims: Tensor | None) -> None:
    if query.dim() != 3 or key.dim() != 3 or value.dim() != 4 or mixing.dim() != 2:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (query, key, value, mixing))
        raise ValueError(
            "query, key, value and mixing must be (batch, query, shared), (batch, key, shared [+ head]), "
            f"(batch, head, key, value_dim) and (head, shared), got {shapes}"
        )
    num_heads, shared_dim = len(mixing), query.shape[-1]
    if dims is None and mixing.shape[1] != shared_dim:
        raise ValueError(f"query must have mixing's {mixing.shape[1]} shared dimensions, got {shared_dim}")
    if dims is not None and dims.shape != mixing.shape:
        raise ValueError(f"dims must be {tuple(mixing.shape)}, as mixing is, got {tuple(dims.shape)}")
    if dims is not None and mixing.shape[1] > shared_dim:
        raise ValueError(f"mixing must have at most query's {shared_dim} dimensions a head, got {mixing.shape[1]}")
    if key.shape[-1] not in (shared_dim, shared_dim + num_heads):
        raise ValueError(
            f"key must have {shared_dim} shared dimensions, or {shared_dim + num_heads} with the content scores of "
            f"{num_heads} heads, got {key.shape[-1]}"
        )
    if value.shape[1] != num_heads:
        raise ValueError(f"value must have mixing's {num_heads} heads, got {value.shape[1]}")
    if key.shape[0] != query.shape[0] or value.shape[0] != query.shape[0]:
        raise ValueError(
            f"key and value must have query's batch of {query.shape[0]}, got {key.shape[0]} and {value.shape[0]}"
        )
    if value.shape[2] != key.shape[1]:
        raise ValueError(f"value must be as long as key, which has {key.shape[1]} tokens, got {value.shape[2]}")


def check_mask(mask: Tensor, scores: tuple[int, ...]) -> None:
    """Refuse a mask that does not fit scores of shape (batch, head, query, key)."""
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise ValueError(f"mask must be boolean (True where a query may attend) or floating point, got {mask.dtype}")
    sizes = zip(reversed(mask.shape), reversed(scores), strict=False)
    if not 2 <= mask.dim() <= 4 or not all(size in (1, whole) for size, whole in sizes):
        raise ValueError(
            f"mask must be broadcastable to (batch, head, query, key), here {scores}, in its last two to four "
            f"dimensions, got {tuple(mask.shape)}"
        )
