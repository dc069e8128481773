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

from collab.ops import fused_short_backward as short
from collab.ops.fused_pieces import LOG2_E, add_content, apply_mask, dot, dot_onto, load_rows, mask_arguments, mix
from collab.ops.fused_sums import inputs_backward_kernel
from collab.ops.fused_tiles import BackwardTiles, backward_tiles, power_of_two, split_width, value_width

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
        # Rows past the last have content scores too: these are nothing beside infinity, but may overflow beside zero.
        highest = tl.load(statistics + rows, mask=rows < last, other=float("inf"))
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
def weights_backward_kernel(
    weights, value, gradient, score_gradient, value_gradient, content_gradient,
    value_batch, value_head, value_row, gradient_batch, gradient_head, gradient_row, value_gradient_batch,
    value_gradient_head, value_gradient_row, content_gradient_batch, content_gradient_row,
    queries, keys, first, last, padded_rows, padded_keys, scale,
    heads: tl.constexpr, value_dim: tl.constexpr, value_padded: tl.constexpr, block_rows: tl.constexpr,
    block_keys: tl.constexpr, has_content: tl.constexpr, bounded: tl.constexpr, adds: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    """The same as `scores_backward_kernel` from kept weights (batch, head, query, block_keys): all keys of a head."""
    program = tl.program_id(0)
    head = program % heads
    batch = (program // heads).to(tl.int64)
    wide = head.to(tl.int64)
    columns = tl.arange(0, block_keys)
    gradient += batch * gradient_batch + wide * gradient_head
    weights += (batch * heads + head) * queries * block_keys
    score_gradient += (batch * heads + head) * padded_keys * padded_rows
    values = load_rows(value + batch * value_batch + wide * value_head, columns, value_row, keys, 0, value_dim,
                       value_padded, bounded)  # fmt: skip
    value_sum = tl.zeros((block_keys, value_padded), tl.float32)
    content_sum = tl.zeros((block_keys,), tl.float32)
    for row in range(first, last, block_rows):
        rows = row + tl.arange(0, block_rows)
        kept = load_rows(weights, rows, block_keys, last, 0, block_keys, block_keys, bounded)
        out_gradient = load_rows(gradient, rows, gradient_row, last, 0, value_dim, value_padded, bounded)
        value_sum = dot_onto(value_sum, tl.trans(kept), out_gradient, precision)
        weight_gradient = dot(out_gradient, tl.trans(values), precision)
        wide_weights = kept.to(tl.float32)
        along = tl.sum(wide_weights * weight_gradient, 1)
        changes = wide_weights * (weight_gradient - along[:, None]) * scale
        if has_content:
            content_sum += tl.sum(changes, 0)
        places = score_gradient + columns[:, None] * padded_rows + (rows - first)[None, :]
        tl.store(places, tl.trans(changes.to(score_gradient.dtype.element_ty)))
    dims = tl.arange(0, value_padded)
    places = (value_gradient + batch * value_gradient_batch + wide * value_gradient_head
              + columns[:, None] * value_gradient_row + dims[None, :])  # fmt: skip
    keep = (columns[:, None] < keys) & (dims[None, :] < value_dim)
    if adds:
        value_sum += tl.load(places, mask=keep, other=0.0).to(tl.float32)
    tl.store(places, value_sum.to(value_gradient.dtype.element_ty), mask=keep)
    if has_content:
        places = content_gradient + batch * content_gradient_batch + columns * content_gradient_row + head
        if adds:
            content_sum += tl.load(places, mask=columns < keys, other=0.0).to(tl.float32)
        tl.store(places, content_sum.to(content_gradient.dtype.element_ty), mask=columns < keys)


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
    if tiles is None and short.takes(query, value, statistics):
        return short.short_backward(gradient, query, key, value, mixing, statistics, scale, precision)
    content = key[..., shared_dim:]
    has_content = content.shape[-1] > 0
    number_bytes = query.element_size()
    padded0, padded1 = split_width(shared_dim, number_bytes)
    width0 = min(shared_dim, padded0)
    has_weights = statistics.dim() == 5
    tiles = tiles or backward_tiles(queries, keys, padded0 + padded1, value_dim, query)
    block_keys = power_of_two(keys) if has_weights else tiles.keys
    mask_tensor, mask_strides, mask_kind = mask_arguments(mask, (batch, heads, queries, keys), query)

    batches, rows = _portion(batch, heads, queries, keys, number_bytes, tiles.rows)
    is_one = batches == batch and rows == queries
    adds = rows < queries
    wide = torch.float32 if adds else key.dtype  # what is added to is kept in float32
    value_gradient = value.new_empty(batch, keys, heads, value_dim, dtype=wide).transpose(1, 2)
    key_gradient = key.new_empty(key.shape, dtype=wide)
    query_gradient = query.new_empty(query.shape)
    padded_keys, padded_rows = -(-keys // _MARGIN) * _MARGIN, -(-rows // _MARGIN) * _MARGIN
    score_gradient = query.new_empty(batches, heads, padded_keys, padded_rows)
    row_blocks = -(-rows // tiles.own)
    # Of every block of queries: summed in the end, always in the same order. Last portions may be smaller than others.
    mixing_parts = (mixing.new_empty if is_one else mixing.new_zeros)(
        -(-batch // batches), -(-queries // rows), batches * row_blocks, *mixing.shape, dtype=torch.float32
    )
    key_blocks = triton.cdiv(keys, block_keys)
    all_rows = batch * heads * queries
    fresh_dots = key_blocks <= 2
    dots = statistics if has_weights else statistics[0]
    if not has_weights and not fresh_dots:
        dots = torch.empty_like(dots)
        block_rows = 64
        row_dots_kernel[(triton.cdiv(queries, block_rows) * batch * heads,)](
            gradient, output, dots, *gradient.stride()[:3], *output.stride()[:3], queries, heads, value_dim,
            power_of_two(value_dim), block_rows, num_warps=4,
        )  # fmt: skip
    sizes: dict[str, Any] = {
        "heads": heads, "value_dim": value_dim, "value_padded": value_width(value_dim, number_bytes),
        "block_rows": tiles.rows, "block_keys": block_keys, "adds": False, "precision": precision,
        "num_warps": tiles.warps, "num_stages": tiles.stages,
    }  # fmt: skip
    chunks = -(-shared_dim // tiles.chunk)
    for batch_place, batch_start in enumerate(range(0, batch, batches)):
        here = slice(batch_start, min(batch, batch_start + batches))
        count = here.stop - here.start
        for row_place, first in enumerate(range(0, queries, rows)):
            last = min(queries, first + rows)
            sizes["adds"] = first > 0
            sizes["bounded"] = bool(last % tiles.rows or first % tiles.rows or keys % block_keys)
            of_content = key_gradient[here][..., shared_dim:] if has_content else key_gradient[here]
            content_strides = key_gradient.stride()[:2]
            if has_weights:
                weights_backward_kernel[(heads * count,)](
                    statistics[0, here], value[here], gradient[here], score_gradient, value_gradient[here], of_content,
                    *value.stride()[:3], *gradient.stride()[:3], *value_gradient.stride()[:3], *content_strides,
                    queries, keys, first, last, padded_rows, padded_keys, scale, has_content=has_content, **sizes,
                )  # fmt: skip
            else:
                scores_backward_kernel[(key_blocks * heads * count,)](
                    query[here], key[here], content[here] if has_content else key[here], value[here], mixing,
                    mask_tensor[here] if mask_strides[0] else mask_tensor, gradient[here], output[here],
                    statistics[:, here], dots[here], score_gradient, value_gradient[here], of_content,
                    query.stride(0), query.stride(1), key.stride(0), key.stride(1), key.stride(0), key.stride(1),
                    *value.stride()[:3], *mask_strides, *gradient.stride()[:3], *output.stride()[:3],
                    *value_gradient.stride()[:3], *content_strides, queries, keys, all_rows, first, last, padded_rows,
                    padded_keys, scale * LOG2_E, scale, width0=width0, padded0=padded0, width1=shared_dim - width0,
                    padded1=padded1, way=tiles.way if has_content else 0, causal=causal, fresh_dots=fresh_dots,
                    **mask_kind, **sizes,
                )  # fmt: skip
            programs = (triton.cdiv(keys, tiles.own) + triton.cdiv(last - first, tiles.own)) * chunks * count
            is_clean = all(
                size % tiles.other == 0 and size % tiles.own == 0 for size in (last - first, keys)
            )  # then no block holds anything but what was written
            inputs_backward_kernel[(programs,)](
                score_gradient, query[here, first:], key[here], mixing, query_gradient[here, first:],
                key_gradient[here], mixing_parts[batch_place, row_place],
                query.stride(0), query.stride(1), key.stride(0), key.stride(1), query_gradient.stride(0),
                query_gradient.stride(1), key_gradient.stride(0), key_gradient.stride(1), first, last - first, keys,
                padded_rows, padded_keys, count, heads=heads, width=shared_dim, block=tiles.own,
                block_other=tiles.other, chunk_width=tiles.chunk, causal=causal, adds=first > 0,
                single=max(last - first, keys) <= tiles.other, clean=is_clean, precision=precision,
                stages=tiles.sum_stages, num_warps=tiles.sum_warps, num_stages=1,
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
