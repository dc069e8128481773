"""Triton kernels: the backward pass of attention whose heads share one query/key space.

First the gradients of the scores, and with them those of values and content: one program is some keys of one head.
Then those of queries, keys and mixing, which are sums over heads of products with the gradients of the scores: one
program is some tokens, and goes over the heads in order. No two programs write to one place, so the same inputs give
the same gradients, bit by bit.

The gradients of the scores are held for so many queries and batch elements at a time as fit into `WORKSPACE` bytes.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from collab.ops.fused_forward import (
    LOG2_E,
    add_content,
    apply_mask,
    dot,
    dot_onto,
    load_rows,
    mask_arguments,
    mix,
)
from collab.ops.fused_tiles import BackwardTiles, backward_tiles, power_of_two, split_width

WORKSPACE = 2**29
"""Bytes of gradients of scores that are held at a time, at most."""

_MARGIN = 128
"""The gradients of the scores are padded to multiples of this, so that whole blocks can be read."""


@triton.jit
def row_dots_kernel(gradient, output, dots, gradient_batch, gradient_head, gradient_row, output_batch, output_head,
                    output_row, queries, heads: tl.constexpr, value_dim: tl.constexpr, value_padded: tl.constexpr,
                    block_rows: tl.constexpr):  # fmt: skip
    """Of every row, the product of its output and its output's gradient."""
    blocks = tl.cdiv(queries, block_rows)
    program = tl.program_id(0)
    rows = (program % blocks) * block_rows + tl.arange(0, block_rows)
    head = ((program // blocks) % heads).to(tl.int64)
    batch = (program // blocks // heads).to(tl.int64)
    left = load_rows(gradient + batch * gradient_batch + head * gradient_head, rows, gradient_row, queries, 0,
                     value_dim, value_padded, True)  # fmt: skip
    right = load_rows(output + batch * output_batch + head * output_head, rows, output_row, queries, 0, value_dim,
                      value_padded, True)  # fmt: skip
    sums = tl.sum(left.to(tl.float32) * right.to(tl.float32), 1)
    tl.store(dots + (batch * heads + head) * queries + rows, sums, mask=rows < queries)


@triton.jit
def scores_backward_kernel(
    query, key, content, value, mixing, mask, gradient, output, statistics, dots,
    score_gradient, value_gradient, content_gradient,
    query_batch, query_row, key_batch, key_row, content_batch, content_row, value_batch, value_head, value_row,
    mask_batch, mask_head, mask_row, mask_column, gradient_batch, gradient_head, gradient_row, output_batch,
    output_head, output_row, value_gradient_batch, value_gradient_head, value_gradient_row, content_gradient_batch,
    content_gradient_row,
    queries, keys, all_rows, first, last, padded_rows, padded_keys, factor, scale,
    heads: tl.constexpr, width0: tl.constexpr, padded0: tl.constexpr, width1: tl.constexpr, padded1: tl.constexpr,
    value_dim: tl.constexpr, value_padded: tl.constexpr, block_rows: tl.constexpr, block_keys: tl.constexpr,
    way: tl.constexpr, kind: tl.constexpr, by_key: tl.constexpr, causal: tl.constexpr, bounded: tl.constexpr,
    adds: tl.constexpr, fresh_dots: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Gradients of the scores of queries `first` to `last` and some keys of a head; of those values and contents.

    `score_gradient` is (batch, head, key, query), padded, its queries counted from `first`. With `adds` the gradients
    of values and contents are added to what is there.
    """
    key_blocks = tl.cdiv(keys, block_keys)
    program = tl.program_id(0)
    start = (program % key_blocks) * block_keys
    head = (program // key_blocks) % heads
    batch = (program // key_blocks // heads).to(tl.int64)
    wide = head.to(tl.int64)
    columns = start + tl.arange(0, block_keys)
    query += batch * query_batch
    key += batch * key_batch
    window = (head // 16) * 16
    content += batch * content_batch + (window if way == 2 else head)
    mixing += head * (width0 + width1)
    mask += batch * mask_batch + wide * mask_head
    gradient += batch * gradient_batch + wide * gradient_head
    output += batch * output_batch + wide * output_head
    statistics += (batch * heads + head) * queries
    dots += (batch * heads + head) * queries
    score_gradient += (batch * heads + head) * padded_keys * padded_rows

    key0 = load_rows(key, columns, key_row, keys, 0, width0, padded0, bounded)
    key1 = key0
    if padded1 > 0:
        key1 = load_rows(key, columns, key_row, keys, padded0, width1, padded1, bounded)
    values = load_rows(value + batch * value_batch + wide * value_head, columns, value_row, keys, 0, value_dim,
                       value_padded, bounded)  # fmt: skip
    value_sum = tl.zeros((block_keys, value_padded), tl.float32)
    content_sum = tl.zeros((block_keys,), tl.float32)
    begin = first
    if causal:
        begin = tl.maximum(first, start // block_rows * block_rows)
    for row in range(begin, last, block_rows):
        rows = row + tl.arange(0, block_rows)
        query0 = mix(load_rows(query, rows, query_row, last, 0, width0, padded0, bounded), mixing, factor, 0, width0,
                     padded0)  # fmt: skip
        scores = dot(query0, tl.trans(key0), precision)
        if padded1 > 0:
            query1 = mix(load_rows(query, rows, query_row, last, padded0, width1, padded1, bounded), mixing, factor,
                         padded0, width1, padded1)  # fmt: skip
            scores = dot_onto(scores, query1, tl.trans(key1), precision)
        if way != 0:
            scores = add_content(scores, content, window, columns, content_row, keys, head - window, factor, way,
                                 bounded, heads, query0.dtype, precision, block_rows)  # fmt: skip
        scores = apply_mask(scores, mask, rows, columns, queries, keys, mask_row, mask_column, kind, by_key, causal,
                            bounded)  # fmt: skip
        highest = tl.load(statistics + rows, mask=rows < last, other=0.0)
        inverse = tl.load(statistics + all_rows + rows, mask=rows < last, other=0.0)
        weights = tl.exp2(scores - highest[:, None]) * inverse[:, None]
        out_gradient = load_rows(gradient, rows, gradient_row, last, 0, value_dim, value_padded, bounded)
        value_sum = dot_onto(value_sum, tl.trans(weights.to(out_gradient.dtype)), out_gradient, precision)  # fmt: skip
        if fresh_dots:
            out = load_rows(output, rows, output_row, last, 0, value_dim, value_padded, bounded)
            along = tl.sum(out.to(tl.float32) * out_gradient.to(tl.float32), 1)
        else:
            along = tl.load(dots + rows, mask=rows < last, other=0.0)
        weight_gradient = dot(out_gradient, tl.trans(values), precision)
        changes = weights * (weight_gradient - along[:, None]) * scale
        if way != 0:
            content_sum += tl.sum(changes, 0)
        places = score_gradient + columns[:, None].to(tl.int64) * padded_rows + (rows - first)[None, :]
        tl.store(places, tl.trans(changes.to(score_gradient.dtype.element_ty)))

    dims = tl.arange(0, value_padded)
    places = (value_gradient + batch * value_gradient_batch + wide * value_gradient_head
              + columns[:, None] * value_gradient_row + dims[None, :])  # fmt: skip
    keep = (columns[:, None] < keys) & (dims[None, :] < value_dim)
    if adds:
        value_sum += tl.load(places, mask=keep, other=0.0).to(tl.float32)
    tl.store(places, value_sum.to(value_gradient.dtype.element_ty), mask=keep)
    if way != 0:
        places = content_gradient + batch * content_gradient_batch + columns * content_gradient_row + head
        if adds:
            content_sum += tl.load(places, mask=columns < keys, other=0.0).to(tl.float32)
        tl.store(places, content_sum.to(content_gradient.dtype.element_ty), mask=columns < keys)


@triton.jit
def _sum_over_heads(
    score_gradient, other, own, mixing, result, mixing_gradient, batch, block, chunk,
    other_batch, other_row, own_batch, own_row, result_batch, result_row, first, count, others, padded_rows,
    padded_keys,
    heads: tl.constexpr, width: tl.constexpr, block_own: tl.constexpr, block_other: tl.constexpr,
    chunk_width: tl.constexpr, causal: tl.constexpr, of_keys: tl.constexpr, adds: tl.constexpr,
    precision: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """Gradients of some keys (`of_keys`) or queries: over heads, mixing times (scores' gradient times the others).

    The scores' gradients lie as (key, query) in memory. Queries are counted from `first`, which is where `own` (of
    queries) or `other` (of keys) must point to already.
    """
    start = block * block_own
    tokens = start + tl.arange(0, block_own)
    dims = chunk * chunk_width + tl.arange(0, chunk_width)
    others_in_block = tl.arange(0, block_other)
    total = tl.zeros((block_own, chunk_width), tl.float32)
    keep_own = (tokens[:, None] < count) & (dims[None, :] < width)
    if not of_keys:
        mine = tl.load(own + batch * own_batch + tokens[:, None] * own_row + dims[None, :], mask=keep_own, other=0.0)
    low = 0
    high = others
    if causal:
        if of_keys:
            low = tl.maximum(start - first, 0) // block_other * block_other
        else:
            high = tl.minimum(others, first + start + block_own)
    for head in range(heads):
        part = tl.zeros((block_own, chunk_width), tl.float32)
        base = score_gradient + (batch * heads + head) * padded_keys * padded_rows
        for step in tl.range(low, high, block_other, num_stages=stages):
            around = step + others_in_block
            keep = (around[:, None] < others) & (dims[None, :] < width)
            tile = tl.load(
                other + batch * other_batch + around[:, None] * other_row + dims[None, :], mask=keep, other=0.0
            )
            if of_keys:
                changes = tl.load(base + tokens[:, None].to(tl.int64) * padded_rows + around[None, :])
                if causal:
                    changes = tl.where(first + around[None, :] >= tokens[:, None], changes, 0.0)
                # What was never written, beyond the last query, must not meet zeros of the tile: it may be no number.
                changes = tl.where(around[None, :] < others, changes, 0.0)
                part = dot_onto(part, changes.to(tile.dtype), tile, precision)
            else:
                changes = tl.load(base + around[:, None].to(tl.int64) * padded_rows + tokens[None, :])
                if causal:
                    changes = tl.where(first + tokens[None, :] >= around[:, None], changes, 0.0)
                changes = tl.where(around[:, None] < others, changes, 0.0)
                part = dot_onto(part, tl.trans(changes.to(tile.dtype)), tile, precision)
        weights = tl.load(mixing + head * width + dims, mask=dims < width, other=0.0).to(tl.float32)
        total += part * weights[None, :]
        if not of_keys:
            part = tl.where(tokens[:, None] < count, part, 0.0)
            tl.store(mixing_gradient + head * width + dims, tl.sum(part * mine.to(tl.float32), 0), mask=dims < width)
    places = result + batch * result_batch + tokens[:, None] * result_row + dims[None, :]
    if adds:
        total += tl.load(places, mask=keep_own, other=0.0).to(tl.float32)
    tl.store(places, total.to(result.dtype.element_ty), mask=keep_own)


@triton.jit
def inputs_backward_kernel(
    score_gradient, query, key, mixing, query_gradient, key_gradient, mixing_gradient,
    query_batch, query_row, key_batch, key_row, query_gradient_batch, query_gradient_row, key_gradient_batch,
    key_gradient_row, first, rows, keys, padded_rows, padded_keys, batches,
    heads: tl.constexpr, width: tl.constexpr, block: tl.constexpr, block_other: tl.constexpr,
    chunk_width: tl.constexpr, causal: tl.constexpr, adds: tl.constexpr, precision: tl.constexpr,
    stages: tl.constexpr,
):  # fmt: skip
    """Gradients of queries, keys and mixing from those of the scores. A program is a block of keys, or of queries.

    `query` and `query_gradient` point to the first of the queries here. Every program of queries writes its own part
    of the mixing's gradient, (program, head, shared).
    """
    chunks: tl.constexpr = (width + chunk_width - 1) // chunk_width
    key_blocks = tl.cdiv(keys, block)
    row_blocks = tl.cdiv(rows, block)
    program = tl.program_id(0)
    of_keys = key_blocks * chunks * batches
    if program < of_keys:
        chunk = program % chunks
        place = program // chunks % key_blocks
        batch = (program // chunks // key_blocks).to(tl.int64)
        _sum_over_heads(
            score_gradient, query, key, mixing, key_gradient, mixing_gradient, batch, place, chunk, query_batch,
            query_row, key_batch, key_row, key_gradient_batch, key_gradient_row, first, keys, rows, padded_rows,
            padded_keys, heads, width, block, block_other, chunk_width, causal, True, adds, precision, stages,
        )  # fmt: skip
    else:
        program -= of_keys
        chunk = program % chunks
        place = program // chunks % row_blocks
        batch = (program // chunks // row_blocks).to(tl.int64)
        part = mixing_gradient + (batch * row_blocks + place) * heads * width
        _sum_over_heads(
            score_gradient, key, query, mixing, query_gradient, part, batch, place, chunk, key_batch, key_row,
            query_batch, query_row, query_gradient_batch, query_gradient_row, first, rows, keys, padded_rows,
            padded_keys, heads, width, block, block_other, chunk_width, causal, False, False, precision, stages,
        )  # fmt: skip


def backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixing: Tensor,
    mask: Tensor | None,
    output: Tensor,
    statistics: Tensor,
    scale: float,
    causal: bool,
    precision: str,
    tiles: BackwardTiles | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, keys with their content scores, values and mixing (head, shared), in their dtypes.

    Mixing is dense: sparse mixing is given with its zeros.
    """
    batch, queries, shared_dim = query.shape
    heads = len(mixing)
    keys, value_dim = value.shape[2:]
    gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
    mixing = mixing.contiguous()
    content = key[..., shared_dim:]
    has_content = content.shape[-1] > 0
    padded0, padded1 = split_width(shared_dim)
    width0 = min(shared_dim, padded0)
    tiles = tiles or backward_tiles(queries, keys, padded0 + padded1, value_dim, query)
    mask_tensor, mask_strides, mask_kind = mask_arguments(mask, (batch, heads, queries, keys), query)
    mask_batch = mask_strides[0]

    batches, rows = _portion(batch, heads, queries, keys, query.element_size(), tiles.rows)
    adds = rows < queries
    wide = torch.float32 if adds else key.dtype  # what is added to is kept in float32
    value_gradient = value.new_empty(batch, keys, heads, value_dim, dtype=wide).transpose(1, 2)
    key_gradient = key.new_empty(key.shape, dtype=wide)
    query_gradient = query.new_empty(query.shape)
    padded_keys, padded_rows = -(-keys // _MARGIN) * _MARGIN, -(-rows // _MARGIN) * _MARGIN
    score_gradient = query.new_empty(batches, heads, padded_keys, padded_rows)
    row_blocks = -(-rows // tiles.own)
    # Of every block of queries: summed in the end, always in the same order.
    is_one = batches == batch and rows == queries  # else the last portions may be smaller than the others
    mixing_parts = (mixing.new_empty if is_one else mixing.new_zeros)(
        -(-batch // batches), -(-queries // rows), batches * row_blocks, *mixing.shape, dtype=torch.float32
    )
    all_rows = batch * heads * queries
    key_blocks = triton.cdiv(keys, tiles.keys)
    fresh_dots = key_blocks <= 2
    dots = statistics[0]
    if not fresh_dots:
        dots = torch.empty_like(dots)
        block_rows = 64
        row_dots_kernel[(triton.cdiv(queries, block_rows) * batch * heads,)](
            gradient, output, dots, *gradient.stride()[:3], *output.stride()[:3], queries, heads, value_dim,
            power_of_two(value_dim), block_rows, num_warps=4,
        )  # fmt: skip
    sizes: dict[str, Any] = {
        "heads": heads, "width0": width0, "padded0": padded0, "width1": shared_dim - width0, "padded1": padded1,
        "value_dim": value_dim, "value_padded": power_of_two(value_dim), "block_rows": tiles.rows,
        "block_keys": tiles.keys, "way": tiles.way if has_content else 0, **mask_kind, "causal": causal,
        "fresh_dots": fresh_dots, "precision": precision,
    }  # fmt: skip
    chunks = -(-shared_dim // tiles.chunk)
    for batch_place, batch_start in enumerate(range(0, batch, batches)):
        here = slice(batch_start, min(batch, batch_start + batches))
        count = here.stop - here.start
        for row_place, first in enumerate(range(0, queries, rows)):
            last = min(queries, first + rows)
            is_whole = queries % tiles.rows == 0 and rows % tiles.rows == 0 and keys % tiles.keys == 0
            scores_backward_kernel[(key_blocks * heads * count,)](
                query[here], key[here], content[here] if has_content else key[here], value[here], mixing,
                mask_tensor if mask is None or not mask_batch else mask_tensor[here], gradient[here], output[here],
                statistics[:, here], dots[here], score_gradient, value_gradient[here],
                key_gradient[here][..., shared_dim:] if has_content else key_gradient[here],
                query.stride(0), query.stride(1), key.stride(0), key.stride(1), key.stride(0), key.stride(1),
                *value.stride()[:3], *mask_strides, *gradient.stride()[:3], *output.stride()[:3],
                *value_gradient.stride()[:3], key_gradient.stride(0), key_gradient.stride(1), queries, keys,
                all_rows, first, last, padded_rows, padded_keys, scale * LOG2_E, scale, **sizes, bounded=not is_whole,
                adds=adds and first > 0, num_warps=tiles.warps, num_stages=tiles.stages,
            )  # fmt: skip
            programs = (triton.cdiv(keys, tiles.own) + triton.cdiv(last - first, tiles.own)) * chunks * count
            inputs_backward_kernel[(programs,)](
                score_gradient, query[here, first:], key[here], mixing, query_gradient[here, first:],
                key_gradient[here], mixing_parts[batch_place, row_place],
                query.stride(0), query.stride(1), key.stride(0), key.stride(1), query_gradient.stride(0),
                query_gradient.stride(1), key_gradient.stride(0), key_gradient.stride(1), first, last - first, keys,
                padded_rows, padded_keys, count, heads, shared_dim, tiles.own, tiles.other, tiles.chunk, causal,
                adds and first > 0, precision, tiles.sum_stages, num_warps=tiles.sum_warps, num_stages=tiles.sum_stages,
            )  # fmt: skip
    mixing_gradient = mixing_parts.flatten(0, 2).sum(0).to(mixing.dtype)
    return query_gradient, key_gradient.to(key.dtype), value_gradient.to(value.dtype), mixing_gradient


def _portion(batch: int, heads: int, queries: int, keys: int, number_bytes: int, block: int) -> tuple[int, int]:
    """How many batch elements and queries to hold the scores' gradients of at a time."""
    of_one = heads * (-(-keys // _MARGIN) * _MARGIN) * (-(-queries // _MARGIN) * _MARGIN) * number_bytes
    if of_one <= WORKSPACE:
        return min(batch, WORKSPACE // of_one), queries
    of_rows = heads * (-(-keys // _MARGIN) * _MARGIN) * number_bytes
    step = max(_MARGIN, block)
    return 1, min(queries, max(step, WORKSPACE // of_rows // step * step))
