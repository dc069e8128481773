"""Triton kernel: the forward pass over so few keys that they are one block, read once for several heads."""

import triton
import triton.language as tl

from collab.ops.fused_pieces import (
    add_content,
    apply_mask,
    dot,
    dot_onto,
    inverse_of,
    load_columns,
    load_rows,
    mix,
    write_rows,
)  # fmt: skip


@triton.jit
def _scores_by_chunks(query, rows, query_row, queries, key, columns, key_row, keys, mixing, dims, factor,
                      width: tl.constexpr, chunk: tl.constexpr, block_rows: tl.constexpr, block_keys: tl.constexpr,
                      sparse: tl.constexpr, bounded_rows: tl.constexpr, bounded_keys: tl.constexpr,
                      precision: tl.constexpr, stages: tl.constexpr):  # fmt: skip
    """Scores of queries, mixed, and keys: some dimensions at a time, of which the next are on their way."""
    scores = tl.zeros((block_rows, block_keys), tl.float32)
    for start in tl.range(0, width, chunk, num_stages=stages):
        places = start + tl.arange(0, chunk)
        keep_rows = (rows[:, None] < queries) if bounded_rows else (rows[:, None] >= 0)
        keep_keys = (columns[:, None] < keys) if bounded_keys else (columns[:, None] >= 0)
        if width % chunk != 0:
            keep_rows = keep_rows & (places[None, :] < width)
            keep_keys = keep_keys & (places[None, :] < width)
        own = places
        if sparse:
            own = tl.load(dims + places, mask=places < width, other=0)
        plain = tl.load(query + rows[:, None] * query_row + own[None, :], mask=keep_rows, other=0.0)
        tile = tl.load(key + columns[:, None] * key_row + places[None, :], mask=keep_keys, other=0.0)
        weights = tl.load(mixing + places, mask=places < width, other=0.0).to(tl.float32) * factor
        mixed = (plain.to(tl.float32) * weights[None, :]).to(query.dtype.element_ty)
        scores = dot_onto(scores, mixed, tl.trans(tile), precision)
    return scores


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
    group: tl.constexpr, stages: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """All keys are one block: a program reads them and its queries once, and goes over `group` heads.

    With `chunk`, which wants a group of one, it reads so many dimensions at a time.

    What is kept for the gradients are the weights themselves, (batch, head, query, block_keys).
    """
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
    if not sparse and chunk == 0:
        plain0 = load_rows(query, rows, query_row, queries, 0, width0, padded0, not even_rows)
        key0 = load_rows(key, columns, key_row, keys, 0, width0, padded0, bounded)
        plain1 = plain0
        key1 = key0
        if padded1 > 0:
            plain1 = load_rows(query, rows, query_row, queries, padded0, width1, padded1, not even_rows)
            key1 = load_rows(key, columns, key_row, keys, padded0, width1, padded1, bounded)
    for place in tl.range(0, group, num_stages=1 if chunk > 0 else stages):
        head = first + place
        window = (head // 16) * 16
        weights_of = mixing + head * (width0 + width1)
        own = dims + head * (width0 + width1)
        if chunk > 0:
            scores = _scores_by_chunks(
                query, rows, query_row, queries, key + head * key_head, columns, key_row, keys, weights_of, own, factor,
                width0 + width1, chunk, block_rows, block_keys, sparse, not even_rows, bounded, precision, stages,
            )  # fmt: skip
        else:
            if sparse:
                plain0 = load_columns(query, rows, query_row, queries, own, width0, padded0, not even_rows)
                key0 = load_rows(key + head * key_head, columns, key_row, keys, 0, width0, padded0, bounded)
                plain1 = plain0
                key1 = key0
                if padded1 > 0:
                    plain1 = load_columns(
                        query, rows, query_row, queries, own + padded0, width1, padded1, not even_rows
                    )  # fmt: skip
                    key1 = load_rows(key + head * key_head, columns, key_row, keys, padded0, width1, padded1, bounded)
            query0 = mix(plain0, weights_of, factor, 0, width0, padded0)
            scores = dot(query0, tl.trans(key0), precision)
            if padded1 > 0:
                query1 = mix(plain1, weights_of, factor, padded0, width1, padded1)
                scores = dot_onto(scores, query1, tl.trans(key1), precision)
        if way != 0:
            scores = add_content(
                scores, content + batch * content_batch + (window if way == 2 else head), window, columns, content_row,
                keys, head - window, factor, way, bounded, heads, query.dtype.element_ty, precision, block_rows,
            )  # fmt: skip
        scores = apply_mask(
            scores, mask + batch * mask_batch + head.to(tl.int64) * mask_head, rows, columns, queries, keys, mask_row,
            mask_column, kind, by_key, causal, bounded,
        )  # fmt: skip
        highest = tl.max(scores, 1)
        base = highest
        if kind != 0:
            base = tl.where(highest == -float("inf"), 0.0, highest)
        weights = tl.exp2(scores - base[:, None])
        total = tl.sum(weights, 1)
        values = load_rows(
            value + batch * value_batch + head.to(tl.int64) * value_head, columns, value_row, keys, 0, value_dim,
            value_padded, bounded,
        )  # fmt: skip
        weights *= inverse_of(total)[:, None]
        if keep_statistics:
            places = statistics + ((batch * heads + head) * queries + rows[:, None]) * block_keys + columns[None, :]
            tl.store(places, weights.to(statistics.dtype.element_ty), mask=rows[:, None] < queries)
        acc = dot(weights.to(values.dtype), values, precision)
        write_rows(
            acc, output + batch * output_batch + head.to(tl.int64) * output_head, rows, queries, output_row, value_dim,
            value_padded, even_rows,
        )  # fmt: skip
