"""Pieces that the fused kernels are made of: products, loading and mixing, content scores, masks, writing.

Softmax is in base two: what scales the scores is folded into the mixing together with log2(e).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

NO_MASK, KEEP, ADDEND = 0, 1, 2
"""Kinds of mask: none, boolean, added."""

LOG2_E = 1.4426950408889634


@triton.jit
def dot(left, right, precision: tl.constexpr):
    """A product in float32. "emulated": of float32 numbers; Triton's interpreter misreads bfloat16 in products."""
    if precision == "emulated":
        return tl.dot(left.to(tl.float32), right.to(tl.float32))
    else:
        return tl.dot(left, right, input_precision=precision)


@triton.jit
def dot_onto(total, left, right, precision: tl.constexpr):
    """The same, added to what there is."""
    if precision == "emulated":
        return tl.dot(left.to(tl.float32), right.to(tl.float32), acc=total)
    else:
        return tl.dot(left, right, acc=total, input_precision=precision)


@triton.jit
def load_rows(base, rows, stride, count, start: tl.constexpr, width: tl.constexpr, padded: tl.constexpr,
              bounded: tl.constexpr):  # fmt: skip
    """(rows, padded) tile of columns `start` to `start + width`, zeros beyond and, where bounded, past `count` rows."""
    columns = tl.arange(0, padded)
    pointers = base + rows[:, None] * stride + (start + columns)[None, :]
    if bounded:
        if width == padded:
            return tl.load(pointers, mask=rows[:, None] < count, other=0.0)
        else:
            return tl.load(pointers, mask=(rows[:, None] < count) & (columns[None, :] < width), other=0.0)
    else:
        if width == padded:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=columns[None, :] < width, other=0.0)


@triton.jit
def load_columns(base, rows, stride, count, dims, width: tl.constexpr, padded: tl.constexpr, bounded: tl.constexpr):
    """(rows, padded) tile of the columns that `dims` names."""
    places = tl.arange(0, padded)
    columns = tl.load(dims + places, mask=places < width, other=0)
    keep = places[None, :] < width
    if bounded:
        keep = keep & (rows[:, None] < count)
    return tl.load(base + rows[:, None] * stride + columns[None, :], mask=keep, other=0.0)


@triton.jit
def mix(query, mixing, factor, start: tl.constexpr, width: tl.constexpr, padded: tl.constexpr):
    """Queries times a head's mixing weights and what scales the scores; rounded once."""
    columns = tl.arange(0, padded)
    weights = tl.load(mixing + start + columns, mask=columns < width, other=0.0).to(tl.float32) * factor
    return (query.to(tl.float32) * weights[None, :]).to(query.dtype)


@triton.jit
def apply_mask(scores, mask, rows, columns, queries, keys, mask_row, mask_column, kind: tl.constexpr,
               by_key: tl.constexpr, causal: tl.constexpr, bounded: tl.constexpr):  # fmt: skip
    """Scores in base two with minus infinity where a query may not attend, and the addend where there is one.

    `by_key`: the mask is the same for all queries.
    """
    if bounded:
        scores = tl.where(columns[None, :] < keys, scores, -float("inf"))
    if causal:
        scores = tl.where(rows[:, None] >= columns[None, :], scores, -float("inf"))
    if kind != 0:
        if by_key:
            values = tl.load(mask + columns * mask_column, mask=columns < keys, other=0)[None, :]
        else:
            pointers = mask + rows[:, None] * mask_row + columns[None, :] * mask_column
            values = tl.load(pointers, mask=(rows[:, None] < queries) & (columns[None, :] < keys), other=0)
        if kind == 1:
            scores = tl.where(values != 0, scores, -float("inf"))
        else:
            addend = values.to(tl.float32)
            # The lowest finite number means "as good as never" and must stay finite; infinity means never.
            finite = tl.maximum(addend, -1e38) * 1.4426950408889634
            scores = scores + tl.where(addend == -float("inf"), addend, finite)
    return scores


@triton.jit
def add_content(scores, content, window, rows, stride, keys, own, factor, way: tl.constexpr, bounded: tl.constexpr,
                heads: tl.constexpr, dtype: tl.constexpr, precision: tl.constexpr, block: tl.constexpr):  # fmt: skip
    """Add a head's content score of every key: `way` 1 as a column, 2 as a product with a one at the head's place."""
    if way == 1:
        if bounded:
            column = tl.load(content + rows * stride, mask=rows < keys, other=0.0)
        else:
            column = tl.load(content + rows * stride)
        scores += column.to(tl.float32)[None, :] * factor
    if way == 2:
        places = tl.arange(0, 16)
        keep = (rows[:, None] >= 0) & (window + places < heads)[None, :]
        if bounded:
            keep = keep & (rows[:, None] < keys)
        tile = tl.load(content + rows[:, None] * stride + places[None, :], mask=keep, other=0.0)
        one = tl.where(places == own, factor, 0.0)
        one = tl.broadcast_to(one[None, :], (block, 16)).to(dtype)
        scores = dot_onto(scores, one, tl.trans(tile), precision)
    return scores


@triton.jit
def inverse_of(total):
    """One over every sum, zero where there was nothing to sum."""
    return tl.where(total == 0.0, 0.0, 1.0 / tl.where(total == 0.0, 1.0, total))


@triton.jit
def write_rows(acc, output, rows, queries, output_row, value_dim: tl.constexpr, value_padded: tl.constexpr,
               even_rows: tl.constexpr):  # fmt: skip
    """Store a tile of outputs."""
    columns = tl.arange(0, value_padded)
    pointers = output + rows[:, None] * output_row + columns[None, :]
    if even_rows and value_dim == value_padded:
        tl.store(pointers, acc.to(output.dtype.element_ty))
    else:
        keep = (rows[:, None] < queries) & (columns[None, :] < value_dim)
        tl.store(pointers, acc.to(output.dtype.element_ty), mask=keep)


def mask_arguments(
    mask: Tensor | None, scores: tuple[int, int, int, int], like: Tensor
) -> tuple[Tensor, Any, dict[str, Any]]:
    """The mask as kernels take it: a tensor, its four strides, and what kind it is."""
    if mask is None:
        return like, (0, 0, 0, 0), {"kind": NO_MASK, "by_key": False}
    is_boolean = mask.dtype == torch.bool
    wide = (mask.view(torch.uint8) if is_boolean else mask).expand(scores)
    strides = wide.stride()
    return wide, strides, {"kind": KEEP if is_boolean else ADDEND, "by_key": strides[2] == 0}
