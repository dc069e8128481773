"""Triton kernel: the forward pass of attention whose heads share one query/key space, and what starts it.

Mixing is applied to queries in registers, keys are read as they are, and content scores are added to the scores as they
are made. Where all keys are one block, `fused_short` has a kernel that reads it once for several heads.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from collab.ops.fused_gather import gather_keys
from collab.ops.fused_pieces import (
    LOG2_E,
    add_content,
    apply_mask,
    dot,
    dot_onto,
    inverse_of,
    load_columns,
    load_rows,
    mask_arguments,
    mix,
    write_rows,
)  # fmt: skip
from collab.ops.fused_short import short_forward_kernel
from collab.ops.fused_tiles import Tiles, forward_tiles, keeps_weights, power_of_two, split_width, value_width


@triton.jit
def _scores_of_block(
    query0, query1, start, key, content, window, own, mask, rows, queries, keys, key_row, content_row, mask_row,
    mask_column, factor,
    heads: tl.constexpr, width0: tl.constexpr, padded0: tl.constexpr, width1: tl.constexpr, padded1: tl.constexpr,
    block_rows: tl.constexpr, block_keys: tl.constexpr, way: tl.constexpr, kind: tl.constexpr, by_key: tl.constexpr,
    causal: tl.constexpr, bounded: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Scores of mixed queries and one block of keys, content added and masked."""
    columns = start + tl.arange(0, block_keys)
    if way == 3:  # on its way while the product is made
        column = tl.load(content + columns, mask=columns < keys, other=0.0) if bounded else tl.load(content + columns)
    tile = load_rows(key, columns, key_row, keys, 0, width0, padded0, bounded)
    scores = dot(query0, tl.trans(tile), precision)
    if padded1 > 0:
        tile1 = load_rows(key, columns, key_row, keys, padded0, width1, padded1, bounded)
        scores = dot_onto(scores, query1, tl.trans(tile1), precision)
    if way == 3:
        scores += column[None, :] * factor
    elif way != 0:
        scores = add_content(
            scores, content, window, columns, content_row, keys, own, factor, way, bounded, heads, query0.dtype,
            precision, block_rows,
        )  # fmt: skip
    return apply_mask(scores, mask, rows, columns, queries, keys, mask_row, mask_column, kind, by_key, causal, bounded)


@triton.jit
def _take_in(acc, total, highest, scores, start, value, value_row, keys, value_dim: tl.constexpr,
             value_padded: tl.constexpr, block_keys: tl.constexpr, kind: tl.constexpr, plain: tl.constexpr,
             bounded: tl.constexpr, precision: tl.constexpr):  # fmt: skip
    """Add one block's values, weighted, to the running sums. `plain`: scores are not moved to below zero first."""
    columns = start + tl.arange(0, block_keys)
    values = load_rows(value, columns, value_row, keys, 0, value_dim, value_padded, bounded)
    if plain:
        weights = tl.exp2(scores)
        total += tl.sum(weights, 1)
        return dot_onto(acc, weights.to(values.dtype), values, precision), total, highest
    else:
        higher = tl.maximum(highest, tl.max(scores, 1))
        base = higher
        if kind != 0:  # a row may have had nothing to attend to so far
            base = tl.where(higher == -float("inf"), 0.0, higher)
        shrink = tl.exp2(highest - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * shrink + tl.sum(weights, 1)
        return dot_onto(acc * shrink[:, None], weights.to(values.dtype), values, precision), total, higher


@triton.jit
def _over_keys(
    query0, query1, key, content, window, own, value, mask, rows, queries, keys, whole, end, key_row, content_row,
    value_row, mask_row, mask_column, factor,
    heads: tl.constexpr, width0: tl.constexpr, padded0: tl.constexpr, width1: tl.constexpr, padded1: tl.constexpr,
    value_dim: tl.constexpr, value_padded: tl.constexpr, block_rows: tl.constexpr, block_keys: tl.constexpr,
    way: tl.constexpr, kind: tl.constexpr, by_key: tl.constexpr, causal: tl.constexpr, even: tl.constexpr,
    plain: tl.constexpr, ahead: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """All keys, a block at a time: the sums of values and of weights, and the highest score.

    With `ahead` the next block's scores are made while this one's are worked on.
    """
    acc = tl.zeros((block_rows, value_padded), tl.float32)
    total = tl.zeros((block_rows,), tl.float32)
    highest = tl.full((block_rows,), 0.0 if plain else -float("inf"), tl.float32)
    if ahead:
        if whole > 0:
            scores = _scores_of_block(
                query0, query1, 0, key, content, window, own, mask, rows, queries, keys, key_row, content_row,
                mask_row, mask_column, factor, heads, width0, padded0, width1, padded1, block_rows, block_keys, way,
                kind, by_key, False, False, precision,
            )  # fmt: skip
            for start in range(0, whole - block_keys, block_keys):
                later = _scores_of_block(
                    query0, query1, start + block_keys, key, content, window, own, mask, rows, queries, keys, key_row,
                    content_row, mask_row, mask_column, factor, heads, width0, padded0, width1, padded1, block_rows,
                    block_keys, way, kind, by_key, False, False, precision,
                )  # fmt: skip
                acc, total, highest = _take_in(
                    acc, total, highest, scores, start, value, value_row, keys, value_dim, value_padded, block_keys,
                    kind, plain, False, precision,
                )  # fmt: skip
                scores = later
            acc, total, highest = _take_in(
                acc, total, highest, scores, whole - block_keys, value, value_row, keys, value_dim, value_padded,
                block_keys, kind, plain, False, precision,
            )  # fmt: skip
    else:
        for start in range(0, whole, block_keys):
            scores = _scores_of_block(
                query0, query1, start, key, content, window, own, mask, rows, queries, keys, key_row, content_row,
                mask_row, mask_column, factor, heads, width0, padded0, width1, padded1, block_rows, block_keys, way,
                kind, by_key, False, False, precision,
            )  # fmt: skip
            acc, total, highest = _take_in(
                acc, total, highest, scores, start, value, value_row, keys, value_dim, value_padded, block_keys, kind,
                plain, False, precision,
            )  # fmt: skip
    if not even:
        for start in range(whole, end, block_keys):
            scores = _scores_of_block(
                query0, query1, start, key, content, window, own, mask, rows, queries, keys, key_row, content_row,
                mask_row, mask_column, factor, heads, width0, padded0, width1, padded1, block_rows, block_keys, way,
                kind, by_key, causal, True, precision,
            )  # fmt: skip
            acc, total, highest = _take_in(
                acc, total, highest, scores, start, value, value_row, keys, value_dim, value_padded, block_keys, kind,
                plain, True, precision,
            )  # fmt: skip
    return acc, total, highest


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
    plain: tl.constexpr, ahead: tl.constexpr,
):  # fmt: skip
    """A program is some queries of one head of one batch element; it goes over all keys, a block at a time.

    With `plain`, exponentials are first taken of the scores as they are, without looking for their maximum, which is
    the same softmax wherever no sum of theirs comes near to the ends of what float32 holds. Where one does, all is done
    again with the maximum.
    """
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
    if way == 3:
        content += batch * content_batch + head * content_row
    else:
        content += batch * content_batch + (window if way == 2 else head)
    own = head - window
    mixing += head * (width0 + width1)

    dims += head * (width0 + width1)
    if sparse:
        query0 = load_columns(query, rows, query_row, queries, dims, width0, padded0, not even_rows)
    else:
        query0 = load_rows(query, rows, query_row, queries, 0, width0, padded0, not even_rows)
    query0 = mix(query0, mixing, factor, 0, width0, padded0)
    query1 = query0
    if padded1 > 0:
        if sparse:
            query1 = load_columns(query, rows, query_row, queries, dims + padded0, width1, padded1, not even_rows)
        else:
            query1 = load_rows(query, rows, query_row, queries, padded0, width1, padded1, not even_rows)
        query1 = mix(query1, mixing, factor, padded0, width1, padded1)

    if causal:
        end = tl.minimum(keys, (block + 1) * block_rows)
        whole = tl.minimum(keys, block * block_rows + 1) // block_keys * block_keys
    else:
        end = keys
        whole = keys // block_keys * block_keys
    even: tl.constexpr = even_keys and not causal
    acc, total, highest = _over_keys(
        query0, query1, key, content, window, own, value, mask, rows, queries, keys, whole, end, key_row, content_row,
        value_row, mask_row, mask_column, factor, heads, width0, padded0, width1, padded1, value_dim, value_padded,
        block_rows, block_keys, way, kind, by_key, causal, even, plain, ahead, precision,
    )  # fmt: skip
    if plain:
        # A sum of nothing but the far ends is redone too: its terms, or products with them, may have been lost.
        largest = tl.max(tl.max(tl.abs(acc), 1), 0)
        if not ((tl.min(total, 0) > 1e-18) & (tl.max(total, 0) < 1e18) & (largest < 1e38)):
            acc, total, highest = _over_keys(
                query0, query1, key, content, window, own, value, mask, rows, queries, keys, whole, end, key_row,
                content_row, value_row, mask_row, mask_column, factor, heads, width0, padded0, width1, padded1,
                value_dim, value_padded, block_rows, block_keys, way, kind, by_key, causal, even, False, False,
                precision,
            )  # fmt: skip
    _write(
        acc, total, highest, output + batch * output_batch + head.to(tl.int64) * output_head,
        statistics + (batch * heads + head) * queries, rows, queries, all_rows, output_row, value_dim, value_padded,
        even_rows, keep_statistics,
    )  # fmt: skip


@triton.jit
def _write(acc, total, highest, output, statistics, rows, queries, all_rows, output_row, value_dim: tl.constexpr,
           value_padded: tl.constexpr, even_rows: tl.constexpr, keep_statistics: tl.constexpr):  # fmt: skip
    """Means of the values, and of every row its highest score and the inverse of its sum, zeros where there is none."""
    inverse = inverse_of(total)
    write_rows(acc * inverse[:, None], output, rows, queries, output_row, value_dim, value_padded, even_rows)
    if keep_statistics:
        tl.store(statistics + rows, tl.where(total == 0.0, 0.0, highest), mask=rows < queries)
        tl.store(statistics + all_rows + rows, inverse, mask=rows < queries)


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
    """Outputs (batch, head, query, value_dim), and what `backward` needs of them where it is kept.

    Shapes as in `collab.ops.attention`. The output lies in memory as (batch, query, head, value_dim). What is kept is
    each row's highest score, in base two, and the inverse of its sum of exponentials, or of few keys the weights
    themselves: see `kept_shape`.
    """
    batch, queries, shared_dim = query.shape
    heads, own = mixing.shape
    keys, value_dim = value.shape[2:]
    output = value.new_empty(batch, queries, heads, value_dim).transpose(1, 2)
    shape, dtype = kept_shape(query, value, own) if keep_statistics else ((0,), torch.float32)
    statistics = query.new_empty(shape, dtype=dtype)
    content = key[..., shared_dim:]
    has_content = content.shape[-1] > 0
    key_head = 0
    rows_of_keys = key
    if dims is not None:
        dims = dims.contiguous()
        rows_of_keys = gather_keys(key, dims)
        key_head = rows_of_keys.stride(2)
    padded0, padded1 = split_width(own, query.element_size())
    width0 = min(own, padded0)
    if tiles is None:
        is_bare = dims is None and mask is None and not causal and not keep_statistics
        tiles = forward_tiles(queries, keys, padded0 + padded1, value_dim, heads, query, is_bare)
    mask_tensor, mask_strides, mask_kind = mask_arguments(mask, (batch, heads, queries, keys), query)
    content_strides = key.stride()[:2]
    if has_content and tiles.way == 3 and not tiles.group:
        content = by_head(content)
        content_strides = content.stride()[:2]
    arguments = (
        query, rows_of_keys, content if has_content else key, value, mixing.contiguous(),
        query if dims is None else dims, mask_tensor, output, statistics,
        query.stride(0), query.stride(1), rows_of_keys.stride(0), key_head, rows_of_keys.stride(1), *content_strides,
        *value.stride()[:3], *mask_strides, *output.stride()[:3], queries, keys,
        batch * heads * queries, scale * LOG2_E,
    )  # fmt: skip
    constants: dict[str, Any] = {
        "heads": heads, "width0": width0, "padded0": padded0, "width1": own - width0, "padded1": padded1,
        "value_dim": value_dim, "value_padded": value_width(value_dim, query.element_size()),
        "block_rows": tiles.rows, "block_keys": tiles.keys, "way": tiles.way if has_content else 0, **mask_kind,
        "causal": causal, "sparse": dims is not None, "even_rows": queries % tiles.rows == 0,
        "even_keys": keys % tiles.keys == 0, "keep_statistics": keep_statistics, "precision": precision,
    }  # fmt: skip
    programs = triton.cdiv(queries, tiles.rows) * batch * heads
    if tiles.group:
        short_forward_kernel[(programs // tiles.group,)](
            *arguments, **constants, group=tiles.group, stages=tiles.stages, chunk=tiles.chunk, num_warps=tiles.warps,
            num_stages=1, maxnreg=tiles.registers,
        )  # fmt: skip
    else:
        forward_kernel[(programs,)](
            *arguments, **constants, plain=tiles.plain and query.dtype != torch.float16, ahead=tiles.ahead,
            num_warps=tiles.warps, num_stages=tiles.stages, maxnreg=tiles.registers,
        )  # fmt: skip
    return output, statistics


def by_head(content: Tensor) -> Tensor:
    """Content scores (batch, head, key) in float32, those of a head side by side."""
    batch, keys, heads = content.shape
    return content.new_empty(batch, heads, keys, dtype=torch.float32).copy_(content.transpose(1, 2))


def kept_shape(query: Tensor, value: Tensor, own: int) -> tuple[tuple[int, ...], torch.dtype]:
    """What the forward pass keeps for the backward pass: of few keys the weights, else two numbers a row.

    `own` is how many dimensions a head scores in.
    """
    batch, heads, keys, value_dim = value.shape
    if keeps_weights(query, keys, sum(split_width(own, query.element_size())), value_dim):
        return (1, batch, heads, query.shape[1], power_of_two(keys)), query.dtype
    return (2, batch, heads, query.shape[1]), torch.float32
