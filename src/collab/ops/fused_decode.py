"""Decoding in Triton: one query or a few over a long cache of keys that all heads share.

What limits it is reading the cache, so a program reads a piece of the shared keys once and uses it for 16 heads: their
scores are one product on the tensor cores, of 16 mixed queries with the piece. It then goes through the heads' values.
Each product with these computes 16 rows, of which one is that head's: what is thrown away costs nothing while memory is
waited for. The cache is split along the tokens, for enough programs to fill the device, and a second kernel merges
what they found.

No gradients: decoding is inference. Where Triton's interpreter is on (TRITON_INTERPRET=1 before Triton is first
imported), everything here runs on the CPU.
"""

import contextlib
import functools
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_QUERIES = 8
MOST_VALUES = 128
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

HEAD_ROWS = tl.constexpr(16)
"""Heads a program serves: the fewest rows that tensor cores multiply."""

LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True, kw_only=True)
class Config:
    """How the work is cut.

    Args:
        block_keys: tokens of a piece of the cache.
        block_dims: shared dimensions of a piece; more are read in several.
        warps: warps of a program.
        stages: pieces on their way while one is used, and that one.
        programs: how many programs a multiprocessor should get in all, at least: a program takes several pieces of
            tokens only where there are more.
        registers: of a thread, at most; fewer let more programs wait for memory at a time.
    """

    block_keys: int
    block_dims: int
    warps: int = 4
    stages: int = 4
    programs: int = 12
    registers: int | None = 168


CONFIGS = (
    Config(block_keys=128, block_dims=64),
    Config(block_keys=128, block_dims=64, stages=3),
    Config(block_keys=128, block_dims=64, stages=3, registers=128),
    Config(block_keys=128, block_dims=128, stages=3),
    Config(block_keys=128, block_dims=64, warps=8, registers=128),
    Config(block_keys=64, block_dims=64),
    Config(block_keys=64, block_dims=64, programs=24),
    Config(block_keys=64, block_dims=64, stages=6),
    Config(block_keys=64, block_dims=64, stages=5, registers=128),
    Config(block_keys=64, block_dims=128),
    Config(block_keys=64, block_dims=128, stages=5, registers=128),
    Config(block_keys=64, block_dims=64, warps=2, registers=None),
    Config(block_keys=32, block_dims=64, warps=2, stages=6, registers=None),
)
"""Those worth measuring on sixteen-bit numbers, the one that runs unless others do better first."""

BY_WIDTH = {
    64: Config(block_keys=128, block_dims=64, stages=3, registers=128),
    128: Config(block_keys=64, block_dims=128, stages=5, registers=128),
}
"""Those that an H200 ran faster, with no mask, by the most shared dimensions."""


def config_for(query: Tensor, value: Tensor, mask: Tensor | None = None) -> Config:
    """The configuration for these inputs: the fastest measured, in smaller pieces where numbers or rows are larger."""
    config = CONFIGS[0]
    several = triton.next_power_of_2(query.shape[1])
    wider = max(1, triton.next_power_of_2(value.shape[-1]) // 64)
    if several * wider > 1:
        keys, warps = config.block_keys // max(several, wider), 8 if several * wider > 4 else 4
        config = replace(config, block_keys=max(16, keys), block_dims=64, warps=warps, stages=3, registers=None)
    elif mask is None:
        config = next((own for width, own in BY_WIDTH.items() if query.shape[-1] <= width), config)
    if query.dtype == torch.float32:
        config = replace(config, block_keys=16, block_dims=32, stages=min(4, config.stages))
    return config


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
    reasons = []
    if not 1 <= query.shape[1] <= MOST_QUERIES:
        reasons.append(f"decoding takes 1 to {MOST_QUERIES} queries, got {query.shape[1]}")
    if causal:
        reasons.append("decoding takes no causal=True, only a mask")
    if dropout:
        reasons.append("decoding has no dropout")
    if need_weights:
        reasons.append("it never holds the attention weights, and need_weights=True asks for them")
    if query.dtype not in DTYPES or not query.dtype == key.dtype == value.dtype:
        reasons.append(
            "query, key and value must be bfloat16, float16 or float32, all the same, "
            f"got {query.dtype}, {key.dtype} and {value.dtype}"
        )
    if mask is not None and mask.dtype not in (torch.bool, *DTYPES):
        reasons.append(f"mask must be boolean, bfloat16, float16 or float32, got {mask.dtype}")
    if value.shape[-1] > MOST_VALUES:
        reasons.append(f"decoding takes values of at most {MOST_VALUES} dimensions, got {value.shape[-1]}")
    if value.numel() == 0:
        reasons.append("there must be something to attend to, got values of no elements")
    if any(tensor.stride(-1) != 1 and tensor.shape[-1] > 1 for tensor in (query, key, value)):
        reasons.append("the last dimension of query, key and value must be contiguous")
    if query.device.type != "cuda" and not INTERPRETED:
        reasons.append(f"it needs a CUDA device, got {query.device}")
    given = [tensor for tensor in (query, key, value, mixing, mask) if tensor is not None]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        reasons.append("decoding gives no gradients, and some inputs require them")
    return reasons


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixing: Tensor,
    *,
    scale: float,
    dims: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Attend with a query or a few to a cache. Shapes as in `ops.attention`.

    The result (batch, head, query, value_dim) lies in memory as (batch, query, head, value_dim), ready to be joined.
    """
    output: Tensor = torch.ops.collab.decode(query, key, value, mixing, dims, mask, scale)
    return output.transpose(1, 2)


@torch.library.custom_op("collab::decode", mutates_args=())
def _operator(
    query: Tensor, key: Tensor, value: Tensor, mixing: Tensor, dims: Tensor | None, mask: Tensor | None, scale: float
) -> Tensor:
    return launch(query, key, value, mixing, dims, mask, scale, config_for(query, value, mask))


@_operator.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, mixing: Tensor, dims: Tensor | None, mask: Tensor | None, scale: float
) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[1], value.shape[3])


def launch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixing: Tensor,
    dims: Tensor | None,
    mask: Tensor | None,
    scale: float,
    config: Config,
) -> Tensor:
    """Run the kernels with a configuration: (batch, query, head, value_dim)."""
    (batch, queries, shared_dim), (_, heads, tokens, value_dim) = query.shape, value.shape
    groups = triton.cdiv(heads, HEAD_ROWS.value)
    blocks = triton.cdiv(tokens, config.block_keys)
    split_blocks = max(1, blocks * batch * groups // (_multiprocessors(query.device) * config.programs))
    splits = triton.cdiv(blocks, split_blocks)
    output = query.new_empty(batch, queries, heads, value_dim)
    found, summary = output, output
    if splits > 1:
        found = query.new_empty(batch, splits, queries, heads, value_dim, dtype=torch.float32)
        summary = query.new_empty(2, batch, splits, queries, heads, dtype=torch.float32)
    masks, mask_strides = 0, (0, 0, 0, 0)
    if mask is not None:
        masks = 1 if mask.dtype == torch.bool else 2
        mask = mask.view(torch.uint8) if masks == 1 else mask
        batch_stride, head_stride, query_stride, token_stride = mask.expand(batch, heads, queries, tokens).stride()
        mask_strides = (batch_stride, head_stride, query_stride, token_stride)
    key_unit, key_strides = _in_units(key.stride()[:-1], key.element_size())
    value_unit, value_strides = _in_units(value.stride()[:-1], value.element_size())
    with torch.cuda.device(query.device) if query.is_cuda else contextlib.nullcontext():
        if dims is not None:
            mixing = _spread(mixing, dims, shared_dim)
        elif mixing.stride(-1) != 1:
            mixing = mixing.contiguous()
        _attend[(batch * splits * groups,)](
            query, key, value, mixing, query if mask is None else mask, found, summary,
            tokens, splits, split_blocks * config.block_keys, scale,
            query.stride(0), query.stride(1), *key_strides, *value_strides, mixing.stride(0), *mask_strides,
            key_unit=key_unit, value_unit=value_unit, num_queries=queries, num_heads=heads, shared_dim=shared_dim,
            value_dim=value_dim, has_content=key.shape[-1] > shared_dim, masks=masks,
            mask_is_shared=masks != 0 and mask_strides[1] == 0 and queries == 1, is_whole=splits == 1,
            rows=HEAD_ROWS.value * triton.next_power_of_2(queries), block_keys=config.block_keys,
            block_dims=min(config.block_dims, max(16, triton.next_power_of_2(shared_dim))),
            block_values=max(16, triton.next_power_of_2(value_dim)), stages=config.stages, is_interpreted=INTERPRETED,
            num_warps=config.warps, maxnreg=config.registers,
        )  # fmt: skip
        if splits > 1:
            _merge[(batch * queries * heads,)](
                found, summary, output, batch, splits, queries * heads,
                value_dim=value_dim, block_values=triton.next_power_of_2(value_dim), block_splits=32, num_warps=2,
            )  # fmt: skip
    return output


def _in_units(strides: tuple[int, ...], element_size: int) -> tuple[int, list[int]]:
    """The most elements of 16 bytes that divide every stride, and the strides in it: how wide rows can be read.

    Strides of a growing cache change with every token, and must not compile kernels anew; what divides them does not.
    """
    unit = 16 // element_size
    while any(stride % unit for stride in strides):
        unit //= 2
    return unit, [stride // unit for stride in strides]


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _spread(mixing: Tensor, dims: Tensor, shared_dim: int) -> Tensor:
    """(head, shared): sparse mixing weights at their dimensions, as `reference.dense_mixing`, in one small kernel."""
    dense = mixing.new_empty(len(mixing), shared_dim)
    _spread_rows[(len(mixing), triton.cdiv(shared_dim, 128))](
        mixing, dims, dense, *mixing.stride(), *dims.stride(),
        shared_dim=shared_dim, own=mixing.shape[1], block_own=32, block_dims=128, num_warps=4,
    )  # fmt: skip
    return dense


@triton.jit
def _spread_rows(
    mixing, dims, dense, mixing_head, mixing_own, dims_head, dims_own,
    shared_dim: tl.constexpr, own: tl.constexpr, block_own: tl.constexpr, block_dims: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    columns = tl.program_id(1) * block_dims + tl.arange(0, block_dims)
    row = tl.zeros([block_dims], tl.float32)
    for first in range(0, own, block_own):
        place = first + tl.arange(0, block_own)
        weight = tl.load(mixing + head * mixing_head + place * mixing_own, mask=place < own, other=0.0)
        dim = tl.load(dims + head * dims_head + place * dims_own, mask=place < own, other=-1)
        row += tl.sum(tl.where(dim[:, None] == columns[None, :], weight[:, None].to(tl.float32), 0.0), axis=0)
    tl.store(dense + head * shared_dim + columns, row.to(dense.dtype.element_ty), mask=columns < shared_dim)


@triton.jit
def _mixed_query(query, mixing, of_query, of_head, columns, is_real, mixing_head, query_token, shared_dim):
    """(row, dims): each row's query times its head's mixing weights, rounded as the keys are."""
    within = is_real[:, None] & (columns < shared_dim)[None, :]
    rows = tl.load(query + of_query[:, None] * query_token + columns[None, :], mask=within, other=0.0)
    weights = tl.load(mixing + of_head[:, None] * mixing_head + columns[None, :], mask=within, other=0.0)
    return (rows.to(tl.float32) * weights.to(tl.float32)).to(query.dtype.element_ty)


@triton.jit
def _allows(entry, masks: tl.constexpr):
    """Where a mask lets a query attend."""
    return entry != 0 if masks == 1 else entry.to(tl.float32) != float("-inf")


_RUNTIME = (
    "tokens", "splits", "split_tokens", "query_batch", "query_token", "key_batch", "key_token", "value_batch",
    "value_head", "value_token", "mixing_head", "mask_batch", "mask_head", "mask_query", "mask_token",
)  # fmt: skip
"""Numbers that kernels are not compiled anew for."""


@triton.jit(do_not_specialize=_RUNTIME)
def _attend(
    query, key, value, mixing, mask, found, summary,
    tokens, splits, split_tokens, scale,
    query_batch, query_token, key_batch, key_token, value_batch, value_head, value_token, mixing_head,
    mask_batch, mask_head, mask_query, mask_token,
    key_unit: tl.constexpr, value_unit: tl.constexpr, num_queries: tl.constexpr, num_heads: tl.constexpr,
    shared_dim: tl.constexpr, value_dim: tl.constexpr, has_content: tl.constexpr, masks: tl.constexpr,
    mask_is_shared: tl.constexpr, is_whole: tl.constexpr, rows: tl.constexpr, block_keys: tl.constexpr,
    block_dims: tl.constexpr, block_values: tl.constexpr, stages: tl.constexpr, is_interpreted: tl.constexpr,
):  # fmt: skip
    """Softmax over a split of the tokens, for up to 16 heads: maximum, sum of exponentials, and their mean of values.

    `masks`: 0 for none, 1 for boolean, 2 for additive. `mask_is_shared`: there is one, the same for every row.
    `is_whole`: there is one split, and what is found is the output.
    """
    groups: tl.constexpr = (num_heads + HEAD_ROWS - 1) // HEAD_ROWS
    program = tl.program_id(0)
    group = program % groups
    split = program // groups % splits
    batch = program // groups // splits
    row = tl.arange(0, rows)
    in_group, of_query = row % HEAD_ROWS, row // HEAD_ROWS
    of_head = group * HEAD_ROWS + in_group
    is_real = (of_head < num_heads) & (of_query < num_queries)
    slots = tl.arange(0, HEAD_ROWS)
    columns = tl.arange(0, block_values)
    query += batch.to(tl.int64) * query_batch
    key += batch.to(tl.int64) * key_batch * key_unit
    next_head = value_head.to(tl.int64) * value_unit
    value += batch.to(tl.int64) * value_batch * value_unit + group * HEAD_ROWS * next_head
    mask += batch.to(tl.int64) * mask_batch
    heads_here = tl.minimum(num_heads - group * HEAD_ROWS, HEAD_ROWS)
    # The interpreter multiplies the bits of bfloat16 as if they were integers.
    factor: tl.constexpr = tl.float32 if is_interpreted else query.dtype.element_ty
    # Row i takes the content score of its own head as it is.
    own = (in_group[:, None] == slots[None, :]).to(factor)

    highest = tl.full([rows], float("-inf"), tl.float32)
    weight_sum = tl.zeros([rows], tl.float32)
    total = tl.zeros([rows, block_values], tl.float32)
    end = tl.minimum((split + 1) * split_tokens, tokens)
    for start in range(split * split_tokens, end, block_keys):
        token = start + tl.arange(0, block_keys)
        is_seen = token < end
        # Tokens that no row may attend to are not read: the end of a static cache, padding.
        if mask_is_shared:
            entry = tl.load(mask + token * mask_token, mask=is_seen, other=0)
            is_seen = is_seen & _allows(entry, masks)
        elif masks != 0:
            place = of_head[:, None] * mask_head + of_query[:, None] * mask_query + token[None, :] * mask_token
            entry = tl.load(mask + place, mask=is_real[:, None] & is_seen[None, :], other=0)
            allowed = _allows(entry, masks) & is_real[:, None] & is_seen[None, :]
            is_seen = is_seen & (tl.max(allowed.to(tl.int32), axis=0) > 0)

        rows_of_keys = key + token[:, None] * (key_token * key_unit)
        if has_content:
            content_head = group * HEAD_ROWS + slots
            has_head = is_seen[:, None] & (content_head < num_heads)[None, :]
            content = tl.load(rows_of_keys + (shared_dim + content_head)[None, :], mask=has_head, other=0.0)
        scores = tl.zeros([rows, block_keys], tl.float32)
        for first in tl.range(0, shared_dim, block_dims, num_stages=stages):
            dims = first + tl.arange(0, block_dims)
            mixed = _mixed_query(query, mixing, of_query, of_head, dims, is_real, mixing_head, query_token, shared_dim)
            has_dim = is_seen[:, None] & (dims < shared_dim)[None, :]
            keys = tl.load(rows_of_keys + dims[None, :], mask=has_dim, other=0.0)
            scores = tl.dot(mixed.to(factor), tl.trans(keys).to(factor), scores, input_precision="ieee")
        if has_content:
            scores = tl.dot(own, tl.trans(content).to(factor), scores, input_precision="ieee")
        scores *= scale
        if masks == 2:
            scores += (entry[None, :] if mask_is_shared else entry).to(tl.float32)
        scores = tl.where(is_seen[None, :] if masks == 0 or mask_is_shared else allowed, scores, float("-inf"))

        higher = tl.maximum(highest, tl.max(scores, axis=1))
        # With nothing to attend to so far there is nothing to subtract either, and infinities would leave no number.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2((scores - base[:, None]) * LOG2_E)
        shrink = tl.exp2((highest - base) * LOG2_E)
        weight_sum = weight_sum * shrink + tl.sum(weights, axis=1)
        total *= shrink[:, None]
        highest = higher
        weights = weights.to(factor)

        heads_to_read = heads_here
        if masks != 0:
            heads_to_read = tl.where(tl.max(is_seen.to(tl.int32), axis=0) > 0, heads_here, 0)
        has_value = is_seen[:, None] & (columns < value_dim)[None, :]
        rows_of_values = value + token[:, None] * (value_token * value_unit) + columns[None, :]
        for index in tl.range(0, heads_to_read, num_stages=stages):
            values = tl.load(rows_of_values + index * next_head, mask=has_value, other=0.0)
            product = tl.dot(weights, values.to(factor), input_precision="ieee")
            total += tl.where((in_group == index)[:, None], product, 0.0)

    at = ((batch * splits + split) * num_queries + of_query) * num_heads + of_head
    within = is_real[:, None] & (columns < value_dim)[None, :]
    place = at.to(tl.int64)[:, None] * value_dim + columns[None, :]
    if is_whole:
        total /= tl.where(weight_sum == 0.0, 1.0, weight_sum)[:, None]
        tl.store(found + place, total.to(found.dtype.element_ty), mask=within)
    else:
        tl.store(found + place, total, mask=within)
        tl.store(summary + at, highest, mask=is_real)
        count = tl.num_programs(0) // groups * num_queries * num_heads
        tl.store(summary + count + at, weight_sum, mask=is_real)


@triton.jit(do_not_specialize=("batch_size", "splits"))
def _merge(
    found, summary, output, batch_size, splits, rows,
    value_dim: tl.constexpr, block_values: tl.constexpr, block_splits: tl.constexpr,
):  # fmt: skip
    """One row of the output, from what every split found for it. `rows`: queries times heads."""
    program = tl.program_id(0)
    batch, row = program // rows, program % rows
    columns = tl.arange(0, block_values)
    count = batch_size * splits * rows
    highest = tl.full([1], float("-inf"), tl.float32)
    weight_sum = tl.zeros([1], tl.float32)
    total = tl.zeros([block_values], tl.float32)
    for first in range(0, splits, block_splits):
        split = first + tl.arange(0, block_splits)
        at = (batch * splits + split) * rows + row
        own_highest = tl.load(summary + at, mask=split < splits, other=float("-inf"))
        own_sum = tl.load(summary + count + at, mask=split < splits, other=0.0)
        within = (split < splits)[:, None] & (columns < value_dim)[None, :]
        own_total = tl.load(found + at.to(tl.int64)[:, None] * value_dim + columns[None, :], mask=within, other=0.0)
        higher = tl.maximum(highest, tl.max(own_highest, axis=0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2((highest - base) * LOG2_E)
        factor = tl.exp2((own_highest - base) * LOG2_E)
        weight_sum = weight_sum * shrink + tl.sum(own_sum * factor, axis=0)
        total = total * shrink + tl.sum(own_total * factor[:, None], axis=0)
        highest = higher
    total /= tl.where(weight_sum == 0.0, 1.0, weight_sum)
    place = program.to(tl.int64) * value_dim + columns
    tl.store(output + place, total.to(output.dtype.element_ty), mask=columns < value_dim)


INTERPRETED = not isinstance(_attend, triton.runtime.JITFunction)
"""Whether these kernels run in Triton's interpreter, on the CPU."""
