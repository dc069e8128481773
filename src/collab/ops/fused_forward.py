"""Triton kernels: the forward pass of attention whose heads share one query/key space.

Mixing is applied to queries in registers, keys are read as they are, once for all heads of a program, and content
scores are added to the scores as they are made. Softmax is in base two: what scales the scores is folded into the
mixing together with log2(e).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from collab.ops.fused_tiles import Tiles, forward_tiles, split_width

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
    """(rows, padded) tile of columns `start` to `start + width`, zeros beyond them and, where bounded, in rows past
    `count`."""
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
        keep = window + places < heads
        if bounded:
            keep_tile = (rows[:, None] < keys) & keep[None, :]
        else:
            keep_tile = (rows[:, None] >= 0) & keep[None, :]
        tile = tl.load(content + rows[:, None] * stride + places[None, :], mask=keep_tile, other=0.0)
        one = tl.where(places == own, factor, 0.0)
        one = tl.broadcast_to(one[None, :], (block, 16)).to(dtype)
        scores = dot_onto(scores, one, tl.trans(tile), precision)
    return scores


@triton.jit
def _key_block(acc, total, highest, query0, query1, start, key, content, window, own, value, mask, rows, queries, keys,
               key_row, content_row, value_row, mask_row, mask_column, factor,
               heads: tl.constexpr, width0: tl.constexpr, padded0: tl.constexpr, width1: tl.constexpr,
               padded1: tl.constexpr, value_dim: tl.constexpr, value_padded: tl.constexpr, block_rows: tl.constexpr,
               block_keys: tl.constexpr, way: tl.constexpr, kind: tl.constexpr, by_key: tl.constexpr,
               causal: tl.constexpr, bounded: tl.constexpr, precision: tl.constexpr):  # fmt: skip
    """Take in one block of keys and values: the running sum of values, of weights, and the highest score."""
    columns = start + tl.arange(0, block_keys)
    tile = load_rows(key, columns, key_row, keys, 0, width0, padded0, bounded)
    scores = dot(query0, tl.trans(tile), precision)
    if padded1 > 0:
        tile1 = load_rows(key, columns, key_row, keys, padded0, width1, padded1, bounded)
        scores = dot_onto(scores, query1, tl.trans(tile1), precision)
    if way != 0:
        scores = add_content(
            scores, content, window, columns, content_row, keys, own, factor, way, bounded, heads, query0.dtype,
            precision, block_rows,
        )  # fmt: skip
    scores = apply_mask(
        scores, mask, rows, columns, queries, keys, mask_row, mask_column, kind, by_key, causal, bounded
    )
    higher = tl.maximum(highest, tl.max(scores, 1))
    if kind != 0:  # a row may have had nothing to attend to so far
        base = tl.where(higher == -float("inf"), 0.0, higher)
    else:
        base = higher
    shrink = tl.exp2(highest - base)
    weights = tl.exp2(scores - base[:, None])
    total = total * shrink + tl.sum(weights, 1)
    values = load_rows(value, columns, value_row, keys, 0, value_dim, value_padded, bounded)
    acc = dot_onto(acc * shrink[:, None], weights.to(values.dtype), values, precision)
    return acc, total, higher


@triton.jit
def forward_kernel(
    query, key, content, value, mixing, dims, mask, output, statistics,
    query_batch, query_row, key_batch, key_head, key_row, content_batch, content_row, value_batch, value_head,
    value_row, mask_batch, mask_head, mask_row, mask_column, output_batch, output_head, output_row,
    queries, keys, all_rows, factor,
    heads: tl.constexpr, width0: tl.constexpr, padded0: tl.constexpr, width1: tl.constexpr, padded1: tl.constexpr,
    value_dim: tl.constexpr, value_padded: tl.constexpr, block_rows: tl.constexpr, block_keys: tl.constexpr,
    way: tl.constexpr, kind: tl.constexpr, by_key: tl.constexpr, causal: tl.constexpr, sparse: tl.constexpr,
    even_rows: tl.constexpr, even_keys: tl.constexpr, keep_statistics: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """A program is some queries of one head of one batch element; it goes over all keys, a block at a time."""
    row_blocks = tl.cdiv(queries, block_rows)
    program = tl.program_id(0)
    block = program % row_blocks
    if causal:  # the longest first
        block = row_blocks - 1 - block
    head = (program // row_blocks) % heads
    batch = (program // row_blocks // heads).to(tl.int64)
    rows = block * block_rows + tl.arange(0, block_rows)
    query += batch * query_batch
    key += batch * key_batch + head * key_head
    value += batch * value_batch + head.to(tl.int64) * value_head
    mask += batch * mask_batch + head.to(tl.int64) * mask_head
    window = (head // 16) * 16
    content += batch * content_batch + (window if way == 2 else head)
    own = head - window
    mixing += head * (width0 + width1)

    if sparse:
        query0 = load_columns(query, rows, query_row, queries, dims + head * width0, width0, padded0, not even_rows)
    else:
        query0 = load_rows(query, rows, query_row, queries, 0, width0, padded0, not even_rows)
    query0 = mix(query0, mixing, factor, 0, width0, padded0)
    query1 = query0
    if padded1 > 0:
        query1 = load_rows(query, rows, query_row, queries, padded0, width1, padded1, not even_rows)
        query1 = mix(query1, mixing, factor, padded0, width1, padded1)

    acc = tl.zeros((block_rows, value_padded), tl.float32)
    total = tl.zeros((block_rows,), tl.float32)
    highest = tl.full((block_rows,), -float("inf"), tl.float32)
    if causal:
        end = tl.minimum(keys, (block + 1) * block_rows)
        whole = tl.minimum(keys, block * block_rows + 1) // block_keys * block_keys
    else:
        end = keys
        whole = keys // block_keys * block_keys
    for start in range(0, whole, block_keys):
        acc, total, highest = _key_block(
            acc, total, highest, query0, query1, start, key, content, window, own, value, mask, rows, queries, keys,
            key_row, content_row, value_row, mask_row, mask_column, factor, heads, width0, padded0, width1, padded1,
            value_dim, value_padded, block_rows, block_keys, way, kind, by_key, False, False, precision,
        )  # fmt: skip
    if causal or not even_keys:
        for start in range(whole, end, block_keys):
            acc, total, highest = _key_block(
                acc, total, highest, query0, query1, start, key, content, window, own, value, mask, rows, queries,
                keys, key_row, content_row, value_row, mask_row, mask_column, factor, heads, width0, padded0, width1,
                padded1, value_dim, value_padded, block_rows, block_keys, way, kind, by_key, causal, True, precision,
            )  # fmt: skip
    _write(
        acc, total, highest, output + batch * output_batch + head.to(tl.int64) * output_head,
        statistics + (batch * heads + head) * queries, rows, queries, all_rows, output_row, value_dim, value_padded, even_rows,
        keep_statistics,
    )  # fmt: skip


@triton.jit
def _write(acc, total, highest, output, statistics, rows, queries, all_rows, output_row, value_dim: tl.constexpr,
           value_padded: tl.constexpr, even_rows: tl.constexpr, keep_statistics: tl.constexpr):  # fmt: skip
    """Means of the values, and of every row its highest score and the inverse of its sum, zeros where there is none."""
    nothing = total == 0.0
    inverse = tl.where(nothing, 0.0, 1.0 / tl.where(nothing, 1.0, total))
    mean = acc * inverse[:, None]
    columns = tl.arange(0, value_padded)
    pointers = output + rows[:, None] * output_row + columns[None, :]
    if even_rows and value_dim == value_padded:
        tl.store(pointers, mean.to(output.dtype.element_ty))
    else:
        keep = (rows[:, None] < queries) & (columns[None, :] < value_dim)
        tl.store(pointers, mean.to(output.dtype.element_ty), mask=keep)
    if keep_statistics:
        tl.store(statistics + rows, tl.where(nothing, 0.0, highest), mask=rows < queries)
        tl.store(statistics + all_rows + rows, inverse, mask=rows < queries)


@triton.jit
def short_forward_kernel(
    query, key, content, value, mixing, dims, mask, output, statistics,
    query_batch, query_row, key_batch, key_head, key_row, content_batch, content_row, value_batch, value_head,
    value_row, mask_batch, mask_head, mask_row, mask_column, output_batch, output_head, output_row,
    queries, keys, all_rows, factor,
    heads: tl.constexpr, width0: tl.constexpr, padded0: tl.constexpr, width1: tl.constexpr, padded1: tl.constexpr,
    value_dim: tl.constexpr, value_padded: tl.constexpr, block_rows: tl.constexpr, block_keys: tl.constexpr,
    way: tl.constexpr, kind: tl.constexpr, by_key: tl.constexpr, causal: tl.constexpr, sparse: tl.constexpr,
    even_rows: tl.constexpr, even_keys: tl.constexpr, keep_statistics: tl.constexpr, precision: tl.constexpr,
    group: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """All keys are one block: a program reads them and its queries once, and goes over `group` heads."""
    row_blocks = tl.cdiv(queries, block_rows)
    program = tl.program_id(0)
    groups: tl.constexpr = heads // group
    rows = (program % row_blocks) * block_rows + tl.arange(0, block_rows)
    first = (program // row_blocks) % groups * group
    batch = (program // row_blocks // groups).to(tl.int64)
    columns = tl.arange(0, block_keys)
    query += batch * query_batch
    key += batch * key_batch
    bounded: tl.constexpr = not even_keys
    if not sparse:
        plain0 = load_rows(query, rows, query_row, queries, 0, width0, padded0, not even_rows)
        key0 = load_rows(key, columns, key_row, keys, 0, width0, padded0, bounded)
        plain1 = plain0
        key1 = key0
        if padded1 > 0:
            plain1 = load_rows(query, rows, query_row, queries, padded0, width1, padded1, not even_rows)
            key1 = load_rows(key, columns, key_row, keys, padded0, width1, padded1, bounded)
    for place in tl.range(0, group, num_stages=stages):
        head = first + place
        window = (head // 16) * 16
        weights_of = mixing + head * (width0 + width1)
        if sparse:
            plain0 = load_columns(query, rows, query_row, queries, dims + head * width0, width0, padded0, not even_rows)
            key0 = load_rows(key + head * key_head, columns, key_row, keys, 0, width0, padded0, bounded)
        query0 = mix(plain0, weights_of, factor, 0, width0, padded0)
        scores = dot(query0, tl.trans(key0), precision)
        if padded1 > 0:
            query1 = mix(plain1, weights_of, factor, padded0, width1, padded1)
            scores = dot_onto(scores, query1, tl.trans(key1), precision)
        if way != 0:
            scores = add_content(
                scores, content + batch * content_batch + (window if way == 2 else head), window, columns, content_row,
                keys, head - window, factor, way, bounded, heads, query0.dtype, precision, block_rows,
            )  # fmt: skip
        scores = apply_mask(
            scores, mask + batch * mask_batch + head.to(tl.int64) * mask_head, rows, columns, queries, keys, mask_row,
            mask_column, kind, by_key, causal, bounded,
        )  # fmt: skip
        highest = tl.max(scores, 1)
        if kind != 0:
            base = tl.where(highest == -float("inf"), 0.0, highest)
        else:
            base = highest
        weights = tl.exp2(scores - base[:, None])
        total = tl.sum(weights, 1)
        values = load_rows(
            value + batch * value_batch + head.to(tl.int64) * value_head, columns, value_row, keys, 0, value_dim,
            value_padded, bounded,
        )  # fmt: skip
        acc = dot(weights.to(values.dtype), values, precision)
        _write(
            acc, total, highest, output + batch * output_batch + head.to(tl.int64) * output_head,
            statistics + (batch * heads + head) * queries, rows, queries, all_rows, output_row, value_dim, value_padded,
            even_rows, keep_statistics,
        )  # fmt: skip


@triton.jit
def gather_kernel(key, dims, gathered, key_batch, key_row, keys, heads: tl.constexpr, width: tl.constexpr,
                  padded: tl.constexpr, block_keys: tl.constexpr):  # fmt: skip
    """Write the dimensions that each head uses of every key, (batch, key, head, padded), zeros beyond `width`."""
    blocks = tl.cdiv(keys, block_keys)
    program = tl.program_id(0)
    rows = (program % blocks) * block_keys + tl.arange(0, block_keys)
    batch = (program // blocks).to(tl.int64)
    places = tl.arange(0, padded)
    for head in range(heads):
        tile = load_columns(key + batch * key_batch, rows, key_row, keys, dims + head * width, width, padded, True)
        pointers = gathered + (batch * keys + rows[:, None]) * (heads * padded) + head * padded + places[None, :]
        tl.store(pointers, tile, mask=rows[:, None] < keys)


def gather_keys(key: Tensor, dims: Tensor) -> Tensor:
    """(batch, key, head, k padded to a multiple of 16): the dimensions that each head uses, of (batch, key, shared)."""
    batch, keys, _ = key.shape
    heads, width = dims.shape
    padded = max(16, triton.next_power_of_2(width))
    gathered = key.new_empty(batch, keys, heads, padded)
    block_keys = 32
    gather_kernel[(triton.cdiv(keys, block_keys) * batch,)](
        key, dims, gathered, key.stride(0), key.stride(1), keys, heads, width, padded, block_keys, num_warps=4
    )
    return gathered


def mask_arguments(mask: Tensor | None, scores: tuple[int, int, int, int], like: Tensor) -> tuple[Tensor, Any, dict]:
    """The mask as kernels take it: a tensor, its four strides, and what kind it is."""
    if mask is None:
        return like, (0, 0, 0, 0), {"kind": NO_MASK, "by_key": False}
    is_boolean = mask.dtype == torch.bool
    wide = (mask.view(torch.uint8) if is_boolean else mask).expand(scores)
    strides = wide.stride()
    return wide, strides, {"kind": KEEP if is_boolean else ADDEND, "by_key": strides[2] == 0}


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixing: Tensor,
    dims: Tensor | None,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    keep_statistics: bool,
    precision: str,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs (batch, head, query, value_dim), and where they are kept each row's highest score, in base two, and the
    inverse of its sum of exponentials, (2, batch, head, query).

    Shapes as in `collab.ops.attention`. The output lies in memory as (batch, query, head, value_dim).
    """
    batch, queries, shared_dim = query.shape
    heads, own = mixing.shape
    keys, value_dim = value.shape[2:]
    output = value.new_empty(batch, queries, heads, value_dim).transpose(1, 2)
    statistics = torch.empty(
        (2, batch, heads, queries) if keep_statistics else (0,), dtype=torch.float32, device=query.device
    )
    content = key[..., shared_dim:]
    has_content = content.shape[-1] > 0
    key_head = 0
    rows_of_keys = key
    if dims is not None:
        rows_of_keys = gather_keys(key, dims)
        key_head = rows_of_keys.stride(2)
    padded0, padded1 = split_width(own)
    width0 = min(own, padded0)
    if tiles is None:
        tiles = forward_tiles(queries, keys, padded0 + padded1, value_dim, heads, query, is_sparse=dims is not None)
    mask_tensor, mask_strides, mask_kind = mask_arguments(mask, (batch, heads, queries, keys), query)
    arguments = (
        query, rows_of_keys, content if has_content else key, value, mixing.contiguous(),
        query if dims is None else dims.contiguous(), mask_tensor, output, statistics,
        query.stride(0), query.stride(1), rows_of_keys.stride(0), key_head, rows_of_keys.stride(1), key.stride(0),
        key.stride(1), *value.stride()[:3], *mask_strides, *output.stride()[:3], queries, keys,
        batch * heads * queries, scale * LOG2_E,
    )  # fmt: skip
    constants: dict[str, Any] = {
        "heads": heads, "width0": width0, "padded0": padded0, "width1": own - width0, "padded1": padded1,
        "value_dim": value_dim, "value_padded": max(16, triton.next_power_of_2(value_dim)),
        "block_rows": tiles.rows, "block_keys": tiles.keys, "way": tiles.way if has_content else 0, **mask_kind,
        "causal": causal, "sparse": dims is not None, "even_rows": queries % tiles.rows == 0,
        "even_keys": keys % tiles.keys == 0, "keep_statistics": keep_statistics, "precision": precision,
    }  # fmt: skip
    programs = triton.cdiv(queries, tiles.rows) * batch * heads
    if tiles.group:
        short_forward_kernel[(programs // tiles.group,)](
            *arguments, **constants, group=tiles.group, stages=tiles.stages, num_warps=tiles.warps, num_stages=1
        )
    else:
        forward_kernel[(programs,)](*arguments, **constants, num_warps=tiles.warps, num_stages=tiles.stages)
    return output, statistics
