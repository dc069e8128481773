"""Triton kernels: the backward pass over so few keys and queries that they are one block each, from kept weights.

A program goes over some heads of one batch element and makes all their gradients; those of the scores never leave it.
Where heads are shared out among programs their sums are added up afterwards, always in the same order.

This is for no more dimensions than a program makes at once. For more, programs would each make some, and one of them a
head's gradients of values: a branch in the loop over heads. Of a tile that, later than all else, only a branch reads,
Triton's pipelined loops hold one, and the next head's is written over it before the branch has run: gradients were
wrong on Hopper with Triton 3.6, and what 3.9 compiles does the same. Without a pipeline two programs were faster.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from collab.ops.fused_pieces import dot, load_rows
from collab.ops.fused_tiles import power_of_two, shared_memory

WIDTH = 64
"""Dimensions of the tiles, shared ones and those of values: at most so many are taken."""

_LEAST, _MOST = 64, 128
"""Queries, and keys, are more than the one and at most the other: what was measured are blocks of 128."""

_PROCESSORS = 132
"""Of a device that does not tell."""

_OF_A_PART = 1.1e-2
"""What one more part of a batch element costs, written and read, if what a program does of a head is 1."""


@triton.jit
def short_backward_kernel(
    weights, query, key, value, mixing, gradient, query_parts, key_parts, mixing_parts, value_gradient,
    content_gradient,
    query_batch, query_row, key_batch, key_row, value_batch, value_head, value_row, gradient_batch, gradient_head,
    gradient_row, query_part, query_part_row, key_part, key_part_row, value_gradient_batch, value_gradient_head,
    value_gradient_row, content_gradient_batch, content_gradient_row, queries, keys, scale,
    heads: tl.constexpr, group: tl.constexpr, shared: tl.constexpr, padded: tl.constexpr, value_dim: tl.constexpr,
    value_padded: tl.constexpr, block_rows: tl.constexpr, block_keys: tl.constexpr, has_content: tl.constexpr,
    precision: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """All gradients of `group` heads of a batch element: those of queries and keys are summed over these heads.

    Those of the mixing are of one batch element. `weights` are (batch, head, query, block_keys).
    """
    groups: tl.constexpr = heads // group
    program = tl.program_id(0)
    part = program % groups
    batch = (program // groups).to(tl.int64)
    rows = tl.arange(0, block_rows)
    columns = tl.arange(0, block_keys)
    dims = tl.arange(0, padded)
    value_dims = tl.arange(0, value_padded)
    keep_query = (rows[:, None] < queries) & (dims[None, :] < shared)
    keep_key = (columns[:, None] < keys) & (dims[None, :] < shared)
    keep_value = (columns[:, None] < keys) & (value_dims[None, :] < value_dim)
    queries_here = tl.load(query + batch * query_batch + rows[:, None] * query_row + dims[None, :], mask=keep_query,
                           other=0.0)  # fmt: skip
    keys_here = tl.load(key + batch * key_batch + columns[:, None] * key_row + dims[None, :], mask=keep_key, other=0.0)
    of_queries = tl.zeros((block_rows, padded), tl.float32)
    of_keys = tl.zeros((block_keys, padded), tl.float32)
    for number in tl.range(0, group, num_stages=stages):  # see above: no branch in here
        head = part * group + number
        wide = head.to(tl.int64)
        kept = load_rows(weights + (batch * heads + head) * queries * block_keys, rows, block_keys, queries, 0,
                         block_keys, block_keys, True)  # fmt: skip
        out_gradient = load_rows(gradient + batch * gradient_batch + wide * gradient_head, rows, gradient_row, queries,
                                 0, value_dim, value_padded, True)  # fmt: skip
        values = load_rows(value + batch * value_batch + wide * value_head, columns, value_row, keys, 0, value_dim,
                           value_padded, True)  # fmt: skip
        weight_gradient = dot(out_gradient, tl.trans(values), precision)
        wide_weights = kept.to(tl.float32)
        along = tl.sum(wide_weights * weight_gradient, 1)
        changes = wide_weights * (weight_gradient - along[:, None]) * scale
        of_values = dot(tl.trans(kept), out_gradient, precision)
        target = (value_gradient + batch * value_gradient_batch + wide * value_gradient_head
                  + columns[:, None] * value_gradient_row + value_dims[None, :])  # fmt: skip
        tl.store(target, of_values.to(value_gradient.dtype.element_ty), mask=keep_value)
        if has_content:
            tl.store(content_gradient + batch * content_gradient_batch + columns * content_gradient_row + head,
                     tl.sum(changes, 0).to(content_gradient.dtype.element_ty), mask=columns < keys)  # fmt: skip
        rounded = changes.to(queries_here.dtype)
        own = tl.load(mixing + head * shared + dims, mask=dims < shared, other=0.0).to(tl.float32)
        product = dot(rounded, keys_here, precision)
        tl.store(mixing_parts + (batch * heads + head) * shared + dims,
                 tl.sum(product * queries_here.to(tl.float32), 0), mask=dims < shared)  # fmt: skip
        of_queries += product * own[None, :]
        of_keys += dot(tl.trans(rounded), queries_here, precision) * own[None, :]
    target = query_parts + part * query_part + (batch * queries + rows[:, None]) * query_part_row + dims[None, :]
    tl.store(target, of_queries.to(query_parts.dtype.element_ty), mask=keep_query)
    target = key_parts + part * key_part + (batch * keys + columns[:, None]) * key_part_row + dims[None, :]
    tl.store(target, of_keys.to(key_parts.dtype.element_ty), mask=keep_key)


@triton.jit
def add_parts_kernel(parts, query_gradient, key_gradient, of_queries, of_keys, key_row, query_programs,
                     groups: tl.constexpr, shared: tl.constexpr, block: tl.constexpr):  # fmt: skip
    """Sums of the parts (group, queries' numbers and then keys'), in the gradients' dtype; keys' rows are `key_row`."""
    program = tl.program_id(0)
    total = tl.zeros((block,), tl.float32)
    every = of_queries + of_keys
    if program < query_programs:
        numbers = program.to(tl.int64) * block + tl.arange(0, block)
        for group in tl.static_range(groups):
            total += tl.load(parts + group * every + numbers, mask=numbers < of_queries, other=0.0)
        tl.store(query_gradient + numbers, total.to(query_gradient.dtype.element_ty), mask=numbers < of_queries)
    else:
        numbers = (program - query_programs).to(tl.int64) * block + tl.arange(0, block)
        for group in tl.static_range(groups):
            total += tl.load(parts + group * every + of_queries + numbers, mask=numbers < of_keys, other=0.0)
        target = key_gradient + numbers // shared * key_row + numbers % shared
        tl.store(target, total.to(key_gradient.dtype.element_ty), mask=numbers < of_keys)


def takes(query: Tensor, value: Tensor, statistics: Tensor) -> bool:
    """Whether queries and keys are a block each that a program can hold, of few dimensions, and weights were kept."""
    if statistics.dim() != 5 or query.element_size() > 2 or not _LEAST < query.shape[1] <= _MOST:
        return False
    if max(query.shape[2], value.shape[3]) > WIDTH or statistics.shape[-1] <= _LEAST:
        return False
    return stages_of(query) > 0


def stages_of(query: Tensor) -> int:
    """For how many heads at a time a program can hold what it reads, at most two; 0 where for none."""
    of_one = _MOST * _MOST + 2 * _MOST * WIDTH
    most = shared_memory(query.device) // query.element_size()
    return max(0, min(2, most // of_one - 1))  # one for the gradients of the scores, queries and keys


def groups_of(batch: int, heads: int, device: torch.device) -> int:
    """Into how many groups heads are shared out: those with which processors are done first, by estimate."""
    processors = _PROCESSORS
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count

    def cost(groups: int) -> float:
        rounds = -(-batch * groups // processors)
        parts = groups * batch * _OF_A_PART if groups > 1 else 0.0
        return rounds * (heads // groups) + parts

    return min((groups for groups in range(1, heads + 1) if heads % groups == 0), key=cost)


def short_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixing: Tensor,
    statistics: Tensor,
    scale: float,
    precision: str,
    groups: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `fused_backward.backward` gives, where `takes` says so. `groups`: see `groups_of`."""
    batch, queries, shared = query.shape
    heads = len(mixing)
    keys, value_dim = value.shape[2:]
    groups = groups or groups_of(batch, heads, query.device)
    query_gradient, key_gradient = query.new_empty(query.shape), key.new_empty(key.shape)
    value_gradient = value.new_empty(batch, keys, heads, value_dim).transpose(1, 2)
    mixing_parts = query.new_empty(batch, heads, shared, dtype=torch.float32)
    of_queries, of_keys = batch * queries * shared, batch * keys * shared
    query_parts, key_parts = query_gradient, key_gradient
    part_rows: tuple[int, ...] = (0, shared, 0, key.shape[-1])
    if groups > 1:
        query_parts = query.new_empty(groups, of_queries + of_keys, dtype=torch.float32)
        key_parts = query_parts[:, of_queries:]
        part_rows = (of_queries + of_keys, shared, of_queries + of_keys, shared)
    sizes: dict[str, Any] = {
        "shared": shared, "padded": WIDTH, "value_dim": value_dim, "value_padded": WIDTH,
        "block_rows": power_of_two(queries), "block_keys": statistics.shape[-1],
    }  # fmt: skip
    has_content = key.shape[-1] > shared
    of_content = key_gradient[..., shared:] if has_content else key_gradient
    short_backward_kernel[(batch * groups,)](
        statistics, query, key, value, mixing, gradient, query_parts, key_parts, mixing_parts, value_gradient,
        of_content, query.stride(0), query.stride(1), key.stride(0), key.stride(1), *value.stride()[:3],
        *gradient.stride()[:3], *part_rows, *value_gradient.stride()[:3], *key_gradient.stride()[:2], queries, keys,
        scale, heads=heads, group=heads // groups, has_content=has_content, precision=precision,
        stages=stages_of(query), num_stages=1, num_warps=8, **sizes,
    )  # fmt: skip
    if groups > 1:
        block = 1024
        query_programs = triton.cdiv(of_queries, block)
        add_parts_kernel[(query_programs + triton.cdiv(of_keys, block),)](
            query_parts, query_gradient, key_gradient, of_queries, of_keys, key.shape[-1], query_programs,
            groups=groups, shared=shared, block=block, num_warps=4,
        )  # fmt: skip
    return query_gradient, key_gradient, value_gradient, mixing_parts.sum(0).to(mixing.dtype)
