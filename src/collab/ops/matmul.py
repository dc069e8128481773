"""Collaborative attention by plain matrix products, ordered for one key that all heads share.

The mixed queries of all heads are the rows of one matrix, so that one product with the shared key scores them all: the
key is neither copied for every head nor read once for each, and neither is its gradient. Long inputs are done in
blocks, so that a block's scores stay in the processor's cache between the product, the softmax and the mean.

Sparse mixing is filled up with zeros here, as in the definition: a product with all shared dimensions costs more
operations than one with a head's own, but gathers nothing.
"""

import torch
from torch import Tensor
from torch.nn import functional

from collab.ops.reference import dense_mixing

NAME = "matmul"

BLOCK = 2**19
"""Scores a block holds at most, unless one query has more: two megabytes of float32, a core's second-level cache."""


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
    return [] if query.is_floating_point() else [f"it needs floating point inputs, got {query.dtype}"]


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
    """Score all heads in one product, block by block. Shapes as in `ops.attention`."""
    mixing = mixing.to(query.dtype)
    shared_dim = query.shape[-1]
    if dims is not None:
        mixing = dense_mixing(mixing, dims, shared_dim)
    wide = torch.promote_types(query.dtype, torch.float32)
    shared_key, content = key[..., :shared_dim].mT, key[..., shared_dim:].to(wide).mT[:, :, None]
    addends = [content * scale] if content.shape[1] else []
    nothing = None
    if mask is not None or causal:
        hidden, nothing = _as_addend(query, key, mask, causal)
        # One pass over the scores instead of two, where the sum has no row for each query.
        addends = [addends[0] + hidden] if addends and hidden.shape[2] == 1 else [*addends, hidden]

    given = (query, shared_key, value, addends, mixing[:, None], scale, dropout)
    if need_weights or torch.compiler.is_compiling():
        output, weights = _attend(*given)
    else:
        output, weights = _in_blocks(*given), None
    if nothing is not None:
        output = output.masked_fill(nothing, 0.0)
        weights = None if weights is None else weights.masked_fill(nothing, 0.0)
    return output, weights


def _attend(
    query: Tensor,
    shared_key: Tensor,
    value: Tensor,
    addends: list[Tensor],
    mixing: Tensor,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """Output and weights of queries (batch, query, shared), key (batch, shared, key) and mixing (head, 1, shared)."""
    scores = _scores(query, shared_key, addends, mixing, scale)
    weights = scores.softmax(dim=-1).to(value.dtype)
    if dropout:
        weights = functional.dropout(weights, dropout)
    return weights @ value, weights


def _attend_in_place(
    query: Tensor,
    shared_key: Tensor,
    value: Tensor,
    addends: list[Tensor],
    mixing: Tensor,
    scale: float,
    dropout: float,
) -> tuple[Tensor, None]:
    """As `_attend`, where nothing is recorded: scores become weights in place, and their sum divides the output."""
    scores = _scores(query, shared_key, addends, mixing, scale)
    weights = scores.sub_(scores.amax(dim=-1, keepdim=True)).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    # A sum of values may be more than float16 holds where their mean is not.
    is_narrow = value.dtype == torch.float16
    weights = (weights.div_(total) if is_narrow else weights).to(value.dtype)
    if dropout:
        weights = functional.dropout(weights, dropout)
    output = weights @ value
    return output if is_narrow else output.div_(total), None


def _scores(query: Tensor, shared_key: Tensor, addends: list[Tensor], mixing: Tensor, scale: float) -> Tensor:
    """(batch, head, query, key), in float32 at least."""
    wide = torch.promote_types(query.dtype, torch.float32)
    mixed_query = query[:, None] * (mixing * scale if wide == query.dtype else mixing)
    scores: Tensor = (mixed_query.flatten(1, 2) @ shared_key).unflatten(1, mixed_query.shape[1:3])
    if wide != query.dtype:  # one rounding, that of the product
        scores = scores.to(wide) * scale
    for addend in addends:
        scores += addend
    return scores


def _in_blocks(
    query: Tensor,
    shared_key: Tensor,
    value: Tensor,
    addends: list[Tensor],
    mixing: Tensor,
    scale: float,
    dropout: float,
) -> Tensor:
    """The output (batch, head, query, value_dim), some sequences at a time, or some of one sequence's queries."""
    tensors = (query, shared_key, value, mixing, *addends)
    is_recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    of_query = value.shape[1] * value.shape[2]
    scores = len(query) * query.shape[1] * of_query
    # What saves memory takes more steps, each of which takes a while to start.
    attend = _attend if is_recorded or scores < BLOCK // 8 else _attend_in_place
    if scores <= BLOCK:
        return attend(query, shared_key, value, addends, mixing, scale, dropout)[0]
    queries = max(1, BLOCK // of_query)
    sequences = max(1, queries // query.shape[1])
    outputs = []
    for number, block in enumerate(zip(*(part.split(sequences) for part in tensors[:3]), strict=True)):
        these = [_part(addend, 0, sequences, number) for addend in addends]
        columns = []
        for place, few in enumerate(block[0].split(queries, dim=1)):
            own = [_part(addend, 2, queries, place) for addend in these]
            columns.append(attend(few, block[1], block[2], own, mixing, scale, dropout)[0])
        outputs.append(columns[0] if len(columns) == 1 else torch.cat(columns, dim=2))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _part(tensor: Tensor, dim: int, size: int, number: int) -> Tensor:
    """The block of this number along a dimension, or all, where there is one for all."""
    if tensor.shape[dim] == 1:
        return tensor
    start = number * size
    return tensor.narrow(dim, start, min(size, tensor.shape[dim] - start))


def _as_addend(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool) -> tuple[Tensor, Tensor | None]:
    """What is added to the scores, and which rows may attend to nothing: softmax gets zeros there, not NaN."""
    allowed = None
    if causal:
        allowed = torch.ones(1, 1, query.shape[1], key.shape[1], dtype=torch.bool, device=query.device).tril()
    addend = torch.zeros((), dtype=torch.promote_types(query.dtype, torch.float32), device=query.device)
    nothing = None
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
        seen = mask if mask.dtype == torch.bool else mask != -torch.inf
        allowed = seen if allowed is None else seen & allowed
        nothing = ~allowed.any(dim=-1, keepdim=True)
        addend = addend if mask.dtype == torch.bool else mask.to(addend.dtype).masked_fill(nothing, 0.0)
        allowed = allowed | nothing
    assert allowed is not None
    return addend.masked_fill(~allowed, -torch.inf), nothing
