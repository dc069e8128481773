"""Triton kernel: gradients of queries, keys and mixing, which are sums over heads, from those of the scores."""

import triton
import triton.language as tl

from collab.ops.fused_pieces import dot_onto


@triton.jit
def _product(changes_at, tile, tokens, around, others, first, padded_rows, part, causal: tl.constexpr,
             of_keys: tl.constexpr, clean: tl.constexpr, precision: tl.constexpr):  # fmt: skip
    """A block of the scores' gradients, turned for queries, times a tile, added to `part`.

    Unless `clean`, the block may hold what was never written, which may be no number.
    """
    if of_keys:
        changes = tl.load(changes_at + tokens[:, None].to(tl.int64) * padded_rows + around[None, :])
        if causal:
            changes = tl.where(first + around[None, :] >= tokens[:, None], changes, 0.0)
        if not clean:
            changes = tl.where(around[None, :] < others, changes, 0.0)
        return dot_onto(part, changes.to(tile.dtype), tile, precision)
    else:
        changes = tl.load(changes_at + around[:, None].to(tl.int64) * padded_rows + tokens[None, :])
        if causal:
            changes = tl.where(first + tokens[None, :] >= around[:, None], changes, 0.0)
        if not clean:
            changes = tl.where(around[:, None] < others, changes, 0.0)
        return dot_onto(part, tl.trans(changes.to(tile.dtype)), tile, precision)


@triton.jit
def _load_chunk(source, row, rows, count, dims, width: tl.constexpr, chunk_width: tl.constexpr, clean: tl.constexpr):
    """(rows, chunk) tile of some dimensions, zeros past `count` and `width`."""
    pointers = source + rows[:, None] * row + dims[None, :]
    if clean and width % chunk_width == 0:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(rows[:, None] < count) & (dims[None, :] < width), other=0.0)


@triton.jit
def _sum_over_heads(
    score_gradient, other, own, mixing, result, mixing_gradient, batch, block, chunk,
    other_batch, other_row, own_batch, own_row, result_batch, result_row, first, count, others, padded_rows,
    padded_keys,
    heads: tl.constexpr, width: tl.constexpr, block_own: tl.constexpr, block_other: tl.constexpr,
    chunk_width: tl.constexpr, causal: tl.constexpr, of_keys: tl.constexpr, adds: tl.constexpr,
    single: tl.constexpr, clean: tl.constexpr, precision: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """Gradients of some keys (`of_keys`) or queries: over heads, mixing times (scores' gradient times the others).

    The scores' gradients lie as (key, query) in memory. Queries are counted from `first`, which is where `own` (of
    queries) or `other` (of keys) must point to already. `single`: the others are one block, read once for all heads.
    `clean`: all that is read was written, and is whole blocks.
    """
    start = block * block_own
    tokens = start + tl.arange(0, block_own)
    dims = chunk * chunk_width + tl.arange(0, chunk_width)
    others_in_block = tl.arange(0, block_other)
    other += batch * other_batch
    score_gradient += batch * heads * padded_keys * padded_rows
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
    if single:
        tile = _load_chunk(other, other_row, others_in_block, others, dims, width, chunk_width, clean)
    for head in tl.range(0, heads, num_stages=stages if single else 1):
        part = tl.zeros((block_own, chunk_width), tl.float32)
        base = score_gradient + head * padded_keys * padded_rows  # below 2 ** 31: see WORKSPACE
        if single:
            part = _product(base, tile, tokens, others_in_block, others, first, padded_rows, part, causal, of_keys,
                            clean, precision)  # fmt: skip
        else:
            for step in tl.range(low, high, block_other, num_stages=stages):
                around = step + others_in_block
                tile = _load_chunk(other, other_row, around, others, dims, width, chunk_width, clean)
                part = _product(base, tile, tokens, around, others, first, padded_rows, part, causal, of_keys, clean,
                                precision)  # fmt: skip
        weights = tl.load(mixing + head * width + dims, mask=dims < width, other=0.0).to(tl.float32)
        total += part * weights[None, :]
        if not of_keys:
            if not clean:
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
    chunk_width: tl.constexpr, causal: tl.constexpr, adds: tl.constexpr, single: tl.constexpr, clean: tl.constexpr,
    precision: tl.constexpr, stages: tl.constexpr,
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
            padded_keys, heads, width, block, block_other, chunk_width, causal, True, adds, single, clean, precision,
            stages,
        )  # fmt: skip
    else:
        rest = program - of_keys
        chunk = rest % chunks
        place = rest // chunks % row_blocks
        batch = (rest // chunks // row_blocks).to(tl.int64)
        part = mixing_gradient + (batch * row_blocks + place) * heads * width
        _sum_over_heads(
            score_gradient, key, query, mixing, query_gradient, part, batch, place, chunk, key_batch, key_row,
            query_batch, query_row, query_gradient_batch, query_gradient_row, first, rows, keys, padded_rows,
            padded_keys, heads, width, block, block_other, chunk_width, causal, False, False, single, clean, precision,
            stages,
        )  # fmt: skip
