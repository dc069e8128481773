"""Triton kernel: the dimensions of shared keys that every head uses, side by side, for sparse mixing."""

import triton
import triton.language as tl
from torch import Tensor

from collab.ops.fused_pieces import load_columns
from collab.ops.fused_tiles import power_of_two


@triton.jit
def gather_kernel(key, dims, gathered, key_batch, key_row, keys, heads: tl.constexpr, width: tl.constexpr,
                  padded: tl.constexpr, block_keys: tl.constexpr):  # fmt: skip
    """Write the dimensions that a head uses of some keys, (batch, key, head, padded), zeros beyond `width`."""
    blocks = tl.cdiv(keys, block_keys)
    program = tl.program_id(0)
    head = program % heads  # programs that run at a time read the same keys
    rows = (program // heads % blocks) * block_keys + tl.arange(0, block_keys)
    batch = (program // heads // blocks).to(tl.int64)
    places = tl.arange(0, padded)
    tile = load_columns(key + batch * key_batch, rows, key_row, keys, dims + head * width, width, padded, True)
    pointers = gathered + (batch * keys + rows[:, None]) * (heads * padded) + head * padded + places[None, :]
    tl.store(pointers, tile, mask=rows[:, None] < keys)


def gather_keys(key: Tensor, dims: Tensor, block_keys: int = 64, warps: int = 4) -> Tensor:
    """(batch, key, head, k, padded): the dimensions that each head uses, of (batch, key, shared)."""
    batch, keys, _ = key.shape
    heads, width = dims.shape
    padded = power_of_two(width)
    gathered = key.new_empty(batch, keys, heads, padded)
    gather_kernel[(triton.cdiv(keys, block_keys) * batch * heads,)](
        key, dims, gathered, key.stride(0), key.stride(1), keys, heads, width, padded, block_keys, num_warps=warps
    )
    return gathered
