"""Sizes of the blocks that the fused kernels work in: measured on an H200, made smaller until they fit a device."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

_SHARED_MEMORY = 99 * 1024
"""Of one program, where the device does not tell."""


@dataclass(frozen=True)
class Tiles:
    """How a program works.

    Attributes:
        rows: queries of one block.
        keys: keys of one block.
        warps: warps of a program.
        stages: blocks in flight.
        group: heads that a program goes over where all keys are one block; 0 for a program that goes over keys.
        way: how content scores are added: 1 as a column, 2 as a product, 3 as a column of such as lie side by side, of
            programs that go over keys.
        plain: whether to try without the rows' maxima first.
        ahead: whether to make the next block's scores while one is worked on.
        registers: of a thread, at most; as many as the compiler wants unless given.
        chunk: dimensions of queries and keys that a program with a group of one holds at a time, `stages` times; all of
            them where it is 0.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    group: int = 0
    way: int = 1
    plain: bool = True
    ahead: bool = False
    registers: int | None = None
    chunk: int = 0


@dataclass(frozen=True)
class BackwardTiles:
    """How the two programs of the backward pass work.

    Attributes:
        rows, keys, warps, stages, way: of the gradients of the scores, as in `Tiles`.
        own: tokens of a program that sums over heads.
        other: tokens that it takes in at a time.
        chunk: dimensions of the shared space that it makes.
        sum_warps, sum_stages: its warps and blocks in flight.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    own: int
    other: int
    chunk: int
    sum_warps: int
    sum_stages: int
    way: int = 1


def power_of_two(number: int, least: int = 16) -> int:
    """The least power of two that is not below a number."""
    return max(least, 1 << (number - 1).bit_length())


_NARROW, _NARROW_VALUE = 128, 64
"""Dimensions, and those of values, up to which a processor has room for two programs that go over keys."""

_OF_TWO = 128
"""Registers of a thread that leave room for two programs of eight warps: one takes exponentials while the other
multiplies. Left alone the compiler takes more, for two loops of which one is hardly ever run: that with maxima."""

_NARROWEST_HALF = 64
"""Columns of a tile of 16 bit numbers: narrower ones were computed wrongly on Hopper by Triton 3.6."""

_FEW_KEYS = 128
"""Up to so many keys are one block, and training keeps their weights instead of computing them again."""


_WIDE = 192
"""Dimensions from which on few keys are read in chunks."""


def split_width(width: int, number_bytes: int = 4) -> tuple[int, int]:
    """Two powers of two, the second perhaps none, whose sum holds a width: kernels take no other sizes.

    Example:
        >>> split_width(64), split_width(384), split_width(70), split_width(70, number_bytes=2)
        ((64, 0), (256, 128), (64, 16), (128, 0))
    """
    least = 16 if number_bytes > 2 else _NARROWEST_HALF
    whole = power_of_two(width, least)
    half = whole // 2
    if whole == width or half < least:
        return whole, 0
    rest = power_of_two(width - half, least)
    return (whole, 0) if rest == half else (half, rest)


def value_width(value_dim: int, number_bytes: int) -> int:
    """Columns of a tile of values."""
    return power_of_two(value_dim, 16 if number_bytes > 2 else _NARROWEST_HALF)


def keeps_weights(query: Tensor, key_count: int, width: int, value_dim: int) -> bool:
    """Whether attention weights are kept for the backward pass: all keys are one block, which a program can hold."""
    return key_count <= _FEW_KEYS and fits(_short_tiles(query, key_count, width), width, value_dim, query)


_SEVERAL, _SEVERAL_PROGRAMS = 3, 256
"""Heads that a program goes over where keys are few and so many programs are left."""

_TALL = Tiles(rows=256, keys=64, warps=16, stages=2, way=3, registers=_OF_TWO)
"""Reads keys half as often as 128 rows do. It fills a processor: `fits` does not know that registers hold weights."""

_TALL_PROGRAMS, _TALL_MEMORY = 768, 227 * 1024
"""So many programs, each with so much shared memory, is what the tall tiles were measured with."""


def forward_tiles(
    queries: int, keys: int, width: int, value_dim: int, heads: int, like: Tensor, bare: bool = False
) -> Tiles:
    """Blocks of the forward pass. `bare`: nothing but scores of all dimensions, no mask, and nothing kept."""
    if keeps_weights(like, keys, width, value_dim):
        tiles = _short_tiles(like, keys, width)
        programs = -(-queries // tiles.rows) * len(like) * heads
        is_narrow = like.element_size() <= 2 and width <= _NARROW and value_dim <= _NARROW_VALUE
        is_whole = (tiles.rows, tiles.keys) == (64, 128) and heads % _SEVERAL == 0
        if bare and is_narrow and is_whole and programs >= _SEVERAL * _SEVERAL_PROGRAMS:
            tiles = replace(tiles, group=_SEVERAL)
    elif (
        bare
        and like.dtype == torch.bfloat16
        and (width, value_dim) == (256, 64)
        and -(-queries // _TALL.rows) * len(like) * heads >= _TALL_PROGRAMS
        and shared_memory(like.device) >= _TALL_MEMORY
    ):
        return _TALL
    elif like.element_size() > 2:
        tiles = Tiles(rows=128, keys=64, warps=8, stages=3 if width <= 64 else 2, way=2)
    elif width <= _NARROW and value_dim <= _NARROW_VALUE:
        tiles = Tiles(rows=128, keys=64, warps=8, stages=3, way=2, registers=_OF_TWO)
    else:
        # With two stages the next keys are only asked for when these are done with.
        tiles = Tiles(rows=128, keys=64 if width <= 256 else 32, warps=8, stages=3, way=2)
    return fitting(tiles, width, value_dim, like)


def _short_tiles(query: Tensor, keys: int, width: int) -> Tiles:
    tiles = Tiles(rows=min(64, power_of_two(query.shape[1])), keys=power_of_two(keys), warps=4, stages=1, group=1)
    if width < _WIDE or query.element_size() > 2:
        return tiles
    # All of a wide query and key would fill a processor with one program, which waits for what it reads.
    return replace(tiles, chunk=_NARROWEST_HALF, stages=3)


def backward_tiles(queries: int, keys: int, width: int, value_dim: int, like: Tensor) -> BackwardTiles:
    """Blocks of the backward pass."""
    rows, columns = (min(64, power_of_two(length)) for length in (queries, keys))
    # Others that are one block are read once for all heads. It would gain more of wide ones, but no device has shown
    # that their gradients are right then.
    other = 128 if like.element_size() <= 2 and width <= 64 and 64 < max(queries, keys) <= 128 else 64
    return BackwardTiles(
        rows=rows, keys=columns, warps=4, stages=2, own=64, other=other, chunk=64, sum_warps=4, sum_stages=3
    )


def fitting(tiles: Tiles, width: int, value_dim: int, like: Tensor) -> Tiles:
    """The same, or smaller ones where a program would need more memory than the device has."""
    while not fits(tiles, width, value_dim, like):
        if tiles.stages > 1:
            tiles = replace(tiles, stages=tiles.stages - 1)
        elif tiles.rows > 16 and (tiles.rows >= tiles.keys or tiles.group):
            tiles = replace(tiles, rows=tiles.rows // 2)
        elif tiles.keys > 16 and not tiles.group:
            tiles = replace(tiles, keys=tiles.keys // 2)
        else:
            break
    return tiles if tiles.rows >= 64 else replace(tiles, warps=min(4, tiles.warps))


def fits(tiles: Tiles, width: int, value_dim: int, like: Tensor) -> bool:
    """Whether a program has the memory for its queries, its keys and values in flight, and its weights."""
    of_value = value_width(value_dim, like.element_size()) + 16
    if tiles.chunk:
        numbers = max(1, tiles.stages) * (tiles.rows + tiles.keys) * tiles.chunk + tiles.keys * (of_value + tiles.rows)
    else:
        of_key = width + of_value
        numbers = tiles.rows * width + max(1, tiles.stages) * tiles.keys * of_key + tiles.rows * tiles.keys
    return numbers * like.element_size() <= shared_memory(like.device)


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have."""
    if device.type != "cuda":
        return _SHARED_MEMORY
    found = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", None)
    return int(found) if found else _SHARED_MEMORY
