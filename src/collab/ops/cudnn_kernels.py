"""Triton kernels: what cuDNN's attention is fed with, and what is made of the gradients that it gives back.

Heads' queries are written out, mixed; the shared key once, or with sparse mixing the dimensions that each head uses.
Both are as wide as cuDNN wants them. No two programs write to one place, so sums are the same bit by bit every time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from collab.ops.fused_tiles import power_of_two

ROWS = 16
"""Tokens of a program that writes queries or keys."""

SUMMED_ROWS = 32
"""Tokens of a program that sums over heads."""

CHUNK = 64
"""Dimensions that such a program makes."""


@triton.jit
def spread_kernel(
    query, key, mixing, dims, mixed, head_key,
    query_batch, query_row, key_batch, key_row, queries, keys, query_programs,
    heads: tl.constexpr, shared: tl.constexpr, own: tl.constexpr, width: tl.constexpr, padded: tl.constexpr,
    has_content: tl.constexpr, sparse: tl.constexpr, rows_at_once: tl.constexpr, group: tl.constexpr,
):  # fmt: skip
    """Write mixed queries (batch, query, head, width), and keys (batch, key, 1, width), or of each head where sparse.

    A program is some queries of `group` heads, or some keys: of as many heads where sparse. The content score is the
    dimension after those that are mixed, of which each head has a one in its query and the others, if any, zeros.
    """
    groups: tl.constexpr = heads // group
    program = tl.program_id(0)
    places = tl.arange(0, padded)
    if program < query_programs:
        first = program % groups * group
        blocks = tl.cdiv(queries, rows_at_once)
        rows = program // groups % blocks * rows_at_once + tl.arange(0, rows_at_once)
        batch = (program // groups // blocks).to(tl.int64)
        within = rows[:, None] < queries
        source = query + batch * query_batch + rows[:, None] * query_row
        target = mixed + (batch * queries + rows[:, None]) * (heads * width) + places[None, :]
        if not sparse:
            plain = tl.load(source + places[None, :], mask=within & (places[None, :] < own), other=0.0)
        for number in tl.static_range(group):
            head = first + number
            if sparse:
                columns = tl.load(dims + head * own + places, mask=places < own, other=0)
                plain = tl.load(source + columns[None, :], mask=within & (places[None, :] < own), other=0.0)
            weights = tl.load(mixing + head * own + places, mask=places < own, other=0.0).to(tl.float32)
            product = plain.to(tl.float32) * weights[None, :]
            if has_content:
                one = places == (own if sparse else own + head)
                product = tl.where(one[None, :], 1.0, product)
            tl.store(target + head * width, product.to(mixed.dtype.element_ty), mask=within & (places[None, :] < width))
    else:
        rest = program - query_programs
        blocks = tl.cdiv(keys, rows_at_once)
        if sparse:
            first = rest % groups * group
            rest = rest // groups
        rows = rest % blocks * rows_at_once + tl.arange(0, rows_at_once)
        batch = (rest // blocks).to(tl.int64)
        within = rows[:, None] < keys
        source = key + batch * key_batch + rows[:, None] * key_row
        if sparse:
            target = head_key + (batch * keys + rows[:, None]) * (heads * width) + places[None, :]
            for number in tl.static_range(group):
                head = first + number
                columns = tl.load(dims + head * own + places, mask=places < own, other=shared + head)
                keep = within & (places[None, :] < own + has_content)
                plain = tl.load(source + columns[None, :], mask=keep, other=0.0)
                tl.store(target + head * width, plain, mask=within & (places[None, :] < width))
        else:
            target = head_key + (batch * keys + rows[:, None]) * width + places[None, :]
            keep = within & (places[None, :] < shared + heads * has_content)
            plain = tl.load(source + places[None, :], mask=keep, other=0.0)
            tl.store(target, plain, mask=within & (places[None, :] < width))


@triton.jit
def places_kernel(dims, places, shared: tl.constexpr, own: tl.constexpr, padded: tl.constexpr, chunk: tl.constexpr):
    """Where a head has each shared dimension, (head, shared), -1 where it uses it not."""
    head = tl.program_id(0)
    columns = tl.program_id(1) * chunk + tl.arange(0, chunk)
    numbers = tl.arange(0, padded)
    used = tl.load(dims + head * own + numbers, mask=numbers < own, other=-1)
    found = tl.max(tl.where(used[None, :] == columns[:, None], numbers[None, :], -1), 1)
    tl.store(places + head * shared + columns, found, mask=columns < shared)


@triton.jit
def _sum_over_heads(
    gradient, own_rows, mixing, places, result, parts, rows, count, columns, gradient_row, gradient_head, own_row,
    result_row,
    heads: tl.constexpr, shared: tl.constexpr, total_columns: tl.constexpr, own: tl.constexpr, sparse: tl.constexpr,
    of_keys: tl.constexpr, rows_at_once: tl.constexpr, chunk_width: tl.constexpr,
):  # fmt: skip
    """Sum what each head has for some tokens and dimensions; for queries also times the queries, over the tokens."""
    within = rows[:, None] < count
    keep = within & (columns[None, :] < total_columns)
    total = tl.zeros((rows_at_once, chunk_width), tl.float32)
    if not of_keys:
        mine = tl.load(own_rows + rows[:, None] * own_row + columns[None, :], mask=keep, other=0.0).to(tl.float32)
    for head in tl.range(0, heads, num_stages=3):
        place = columns
        is_used = columns < total_columns
        if sparse:
            place = tl.load(places + head * shared + columns, mask=columns < shared, other=-1)
            if of_keys:
                place = tl.where(columns == shared + head, own, place)
            is_used = place >= 0
        pointers = gradient + head * gradient_head + rows[:, None] * gradient_row + place[None, :]
        part = tl.load(pointers, mask=within & is_used[None, :], other=0.0).to(tl.float32)
        if of_keys:
            total += part
        else:
            weights = tl.load(mixing + head * own + place, mask=is_used, other=0.0).to(tl.float32)
            total += part * weights[None, :]
            tl.store(parts + head * own + place, tl.sum(part * mine, 0), mask=is_used)
    tl.store(result + rows[:, None] * result_row + columns[None, :], total.to(result.dtype.element_ty), mask=keep)


@triton.jit
def collect_kernel(
    query_gradients, key_gradients, query, mixing, places, query_gradient, key_gradient, mixing_gradient,
    query_gradients_batch, query_gradients_row, query_gradients_head, key_gradients_batch, key_gradients_row,
    key_gradients_head, query_batch, query_row, queries, keys, query_programs,
    heads: tl.constexpr, shared: tl.constexpr, key_width: tl.constexpr, own: tl.constexpr, sparse: tl.constexpr,
    rows_at_once: tl.constexpr, chunk_width: tl.constexpr,
):  # fmt: skip
    """Gradients of the shared queries, of the mixing by blocks of queries and, where sparse, of the shared keys.

    A program is some tokens and dimensions. Gradients of queries, keys and mixing are written contiguously.
    """
    program = tl.program_id(0)
    if program < query_programs:
        chunks: tl.constexpr = (shared + chunk_width - 1) // chunk_width
        blocks = tl.cdiv(queries, rows_at_once)
        columns = program % chunks * chunk_width + tl.arange(0, chunk_width)
        block = program // chunks
        rows = block % blocks * rows_at_once + tl.arange(0, rows_at_once)
        batch = (block // blocks).to(tl.int64)
        _sum_over_heads(
            query_gradients + batch * query_gradients_batch, query + batch * query_batch, mixing, places,
            query_gradient + batch * queries * shared, mixing_gradient + block.to(tl.int64) * (heads * own), rows,
            queries, columns, query_gradients_row, query_gradients_head, query_row, shared, heads, shared, shared, own,
            sparse, False, rows_at_once, chunk_width,
        )  # fmt: skip
    else:
        rest = program - query_programs
        key_chunks: tl.constexpr = (key_width + chunk_width - 1) // chunk_width
        blocks = tl.cdiv(keys, rows_at_once)
        columns = rest % key_chunks * chunk_width + tl.arange(0, chunk_width)
        rows = rest // key_chunks % blocks * rows_at_once + tl.arange(0, rows_at_once)
        batch = (rest // key_chunks // blocks).to(tl.int64)
        _sum_over_heads(
            key_gradients + batch * key_gradients_batch, key_gradients, mixing, places,
            key_gradient + batch * keys * key_width, mixing_gradient, rows, keys, columns, key_gradients_row,
            key_gradients_head, 0, key_width, heads, shared, key_width, own, sparse, True,
            rows_at_once, chunk_width,
        )  # fmt: skip


def spread(query: Tensor, key: Tensor, mixing: Tensor, dims: Tensor | None, width: int) -> tuple[Tensor, Tensor]:
    """Mixed queries (batch, query, head, width), and keys (batch, key, 1 or head, width), with zeros up to `width`.

    Args:
        query: (batch, query, shared).
        key: (batch, key, shared [+ head]).
        mixing: (head, shared), or (head, k) with `dims`.
        dims: (head, k) integers, for sparse mixing; then every head gets keys of its own.
        width: of what is written, at least what there is.
    """
    batch, queries, shared = query.shape
    heads, own = mixing.shape
    keys = key.shape[1]
    mixed = query.new_empty(batch, queries, heads, width)
    head_key = key.new_empty(batch, keys, 1 if dims is None else heads, width)
    group = max(size for size in (4, 3, 2, 1) if heads % size == 0)
    query_programs = triton.cdiv(queries, ROWS) * batch * (heads // group)
    key_programs = triton.cdiv(keys, ROWS) * batch * (1 if dims is None else heads // group)
    spread_kernel[(query_programs + key_programs,)](
        query, key, mixing.contiguous(), query if dims is None else dims.contiguous(), mixed, head_key,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), queries, keys, query_programs,
        heads=heads, shared=shared, own=own, width=width, padded=power_of_two(width),
        has_content=key.shape[-1] > shared, sparse=dims is not None, rows_at_once=ROWS, group=group, num_warps=4,
    )  # fmt: skip
    return mixed, head_key


def collect(
    query_gradients: Tensor,
    key_gradients: Tensor,
    query: Tensor,
    mixing: Tensor,
    dims: Tensor | None,
    key_width: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the query (batch, query, shared), the key (batch, key, key_width) and the mixing, in their dtypes.

    From those of what `spread` gives, whose numbers of one token lie side by side. Without `dims` that of the key is
    what is given already, and (0,) is returned for it.
    """
    batch, queries, shared = query.shape
    heads, own = mixing.shape
    keys = key_gradients.shape[1]
    query_gradient = query.new_empty(query.shape)
    key_gradient = query.new_empty((0,) if dims is None else (batch, keys, key_width))
    places = query
    if dims is not None:
        places = dims.new_empty(heads, shared, dtype=torch.int32)
        places_kernel[(heads, triton.cdiv(shared, CHUNK))](
            dims.contiguous(), places, shared, own, power_of_two(own), CHUNK, num_warps=4
        )
    blocks = triton.cdiv(queries, SUMMED_ROWS) * batch
    query_programs = blocks * triton.cdiv(shared, CHUNK)
    key_programs = 0
    if dims is not None:
        key_programs = triton.cdiv(keys, SUMMED_ROWS) * batch * triton.cdiv(key_width, CHUNK)
    # Of every block of queries: summed in the end, always in the same order.
    parts = query.new_empty(blocks, heads, own, dtype=torch.float32)
    collect_kernel[(query_programs + key_programs,)](
        query_gradients, key_gradients, query, mixing.contiguous(), places, query_gradient, key_gradient, parts,
        query_gradients.stride(0), query_gradients.stride(1), query_gradients.stride(2), key_gradients.stride(0),
        key_gradients.stride(1), key_gradients.stride(2), query.stride(0), query.stride(1), queries, keys,
        query_programs, heads=heads, shared=shared, key_width=key_width, own=own, sparse=dims is not None,
        rows_at_once=SUMMED_ROWS, chunk_width=CHUNK, num_warps=4,
    )  # fmt: skip
    return query_gradient, key_gradient, parts.sum(0).to(mixing.dtype)
