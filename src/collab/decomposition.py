"""From trained heads to shared ones: a CP decomposition of the stacked query/key products that never forms them."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from collab.alternating import Point, Weights, at, best_mixing, choose, descend, squared_error, squared_sizes
from collab.config import METHODS, is_integer
from collab.layer import head_blocks
from collab.starting import (
    SAFELY_NEW,
    best_start,
    most_useful,
    overlaps,
    random_start,
    singular_form,
    start_from,
    strongest,
)

_SINGLE_PRECISION_FROM = 2**21
"""Numbers a product multiplies, from which float32 is worth its care: smaller layers are swept in float64 alone."""

_BATCH_BYTES = 2**31
"""Of float64 weights that are decomposed together on a GPU."""


@dataclass(frozen=True)
class QueryKeyFactors:
    """`query diag(mixing[head]) keyᵀ`, close to each head's `queryᵀ key`, with the evidence of how close.

    Heads that were concatenated, not approximated, are given back as they came. Otherwise every dimension's largest
    mixing weight is one, and its query and key directions have the same norm.

    Attributes:
        query: (query_in, rank).
        key: (key_in, rank).
        mixing: (head, rank).
        relative_error: Frobenius norm of what is missing over that of the whole, all heads together; rounding hides
            what is below about 1e-8 times `condition`.
        iterations: sweeps that lowered the error.
        converged: whether the tolerance, not the limit on iterations, ended them.
        history: relative error at the start and after every sweep that lowered it.
        condition: root of the summed squares of the dimensions' own norms, over the norm of the whole: how much
            rounding of the factors is magnified. Near one where dimensions add up, large where they cancel.
    """

    query: Tensor
    key: Tensor
    mixing: Tensor
    relative_error: float
    iterations: int
    converged: bool
    history: list[float] = field(repr=False)
    condition: float = 1.0

    def to_tensor(self) -> Tensor:
        """(head, query_in, key_in): the products these factors stand for, for looking at small cases."""
        return torch.einsum("qr,hr,kr->hqk", self.query, self.mixing, self.key)


@dataclass(frozen=True)
class _Settings:
    """What `decompose` was asked for, beside the rank."""

    max_iterations: int
    tolerance: float
    method: str
    dims_per_head: int | None
    seed: int


def decompose(
    query: Tensor,
    key: Tensor,
    rank: int,
    *,
    max_iterations: int = 100,
    tolerance: float = 1e-6,
    method: str = "shared",
    dims_per_head: int | None = None,
    seed: int = 0,
) -> QueryKeyFactors:
    """Find `rank` query and key directions, and each head's weights on them, that give back every head's product.

    Starts from singular directions of the heads, no worse than truncating each head by itself, then improves all three
    factors by alternating least squares with momentum. Every product comes from the heads' own factors; the array
    (head, query_in, key_in) is never formed. The sweeps of large layers are in float32 with sums and solves in
    float64, the last of them and the error in float64. At `rank = heads x head size` the answer is exact and no sweep
    is needed.

    Args:
        query: (head, head_dim, query_in).
        key: (head, head_dim, key_in).
        rank: number of shared dimensions.
        max_iterations: limit on the sweeps that lower the error.
        tolerance: stop when a sweep lowers the relative error by less than this share of it.
        method: "shared"; "unshared", where every head is truncated by itself and no dimension serves two; or "paper",
            plain alternating least squares from random factors.
        dims_per_head: the most dimensions that a head may use: the rest of its mixing is zero.
        seed: of the random numbers that "paper" draws. The others draw none.
    """
    return decompose_many(
        [(query, key)],
        [rank],
        max_iterations=max_iterations,
        tolerance=tolerance,
        method=method,
        dims_per_head=dims_per_head,
        seed=seed,
    )[0]


def decompose_many(
    weights: Sequence[tuple[Tensor, Tensor]],
    ranks: Sequence[int],
    *,
    max_iterations: int = 100,
    tolerance: float = 1e-6,
    method: str = "shared",
    dims_per_head: int | None = None,
    seed: int = 0,
    progress: Callable[[Iterable[Any], int], Iterable[Any]] | None = None,
) -> list[QueryKeyFactors]:
    """`decompose` of several layers; on a GPU those of equal shape and rank together.

    Args:
        weights: query (head, head_dim, query_in) and key (head, head_dim, key_in) of every layer.
        ranks: one for every layer.
        max_iterations: as in `decompose`, and so are the other settings.
        tolerance: see there.
        method: see there.
        dims_per_head: see there.
        seed: see there; every layer starts from it.
        progress: wraps the layers, given with their number, to show how far it is.
    """
    if len(weights) != len(ranks):
        raise ValueError(f"there must be one rank a layer, got {len(weights)} layers and {len(ranks)} ranks")
    settings = _Settings(max_iterations, tolerance, method, dims_per_head, seed)
    for (query, key), rank in zip(weights, ranks, strict=True):
        _check(query, key, rank, settings)
    waiting = _batches(weights, ranks)
    results: dict[int, QueryKeyFactors] = {}
    layers: Iterable[int] = range(len(weights))
    for layer in layers if progress is None else progress(layers, len(weights)):
        if layer not in results:
            batch = waiting[layer]
            found = _decompose([weights[index] for index in batch], ranks[layer], settings)
            results.update(zip(batch, found, strict=True))
    return [results[layer] for layer in range(len(weights))]


@torch.no_grad()
def error_curve(query: Tensor, key: Tensor) -> Tensor:
    """(heads x head_dim + 1,): relative error at every rank from zero, from one pass over the directions of the heads.

    The errors are those that `decompose` starts from or better, before any sweep: its answers are no worse.

    Args:
        query: (head, head_dim, query_in).
        key: (head, head_dim, key_in).
    """
    _check(query, key, 1, _Settings(0, 0.0, "shared", None, 0))
    full_rank = query.shape[0] * query.shape[1]
    weights, values, sizes = _prepare([(query, key)])
    if not sizes[0]:
        return values.new_zeros(full_rank + 1)
    by_sharing = 1 - most_useful(*overlaps(weights), full_rank, SAFELY_NEW)[1][0].cumsum(0)
    alone = values.flatten().sort(descending=True).values.square()
    squared = torch.minimum(by_sharing, 1 - alone.cumsum(0)).clamp(min=0)
    squared = torch.nn.functional.pad(squared, (1, full_rank - len(squared)))
    squared[0], squared[full_rank] = 1.0, 0.0
    return squared.cummin(0).values.sqrt()


def _check(query: Tensor, key: Tensor, rank: int, settings: _Settings) -> None:
    if query.dim() != 3 or key.dim() != 3 or query.shape[:2] != key.shape[:2] or not query.numel() or not key.numel():
        raise ValueError(
            "query and key must be (head, head_dim, in) with the same heads and head size and nothing empty, "
            f"got {tuple(query.shape)} and {tuple(key.shape)}"
        )
    dims_per_head = rank if settings.dims_per_head is None else settings.dims_per_head
    for name, number, smallest in (
        ("rank", rank, 1),
        ("max_iterations", settings.max_iterations, 0),
        ("dims_per_head", dims_per_head, 1),
    ):
        if not is_integer(number) or number < smallest:
            raise ValueError(f"{name} must be an integer >= {smallest}, got {number!r}")
    if not settings.tolerance >= 0:
        raise ValueError(f"tolerance must be >= 0, got {settings.tolerance!r}")
    if settings.method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {settings.method!r}")
    for name, weight in (("query", query), ("key", key)):
        if not torch.isfinite(weight).all():
            raise ValueError(f"{name} weights must be finite, got NaN or infinity")


def _batches(weights: Sequence[tuple[Tensor, Tensor]], ranks: Sequence[int]) -> dict[int, list[int]]:
    """For the first layer of every batch, the layers in it."""
    batches: dict[int, list[int]] = {}
    open_batches: dict[Any, int] = {}
    for index, ((query, key), rank) in enumerate(zip(weights, ranks, strict=True)):
        kind = (query.shape, key.shape, rank, query.device)
        most = max(1, _BATCH_BYTES // (8 * (query.numel() + key.numel()))) if query.device.type != "cpu" else 1
        first = open_batches.get(kind)
        if first is None or len(batches[first]) >= most:
            first = open_batches[kind] = index
            batches[first] = []
        batches[first].append(index)
    return batches


@torch.no_grad()
def _decompose(layers: list[tuple[Tensor, Tensor]], rank: int, settings: _Settings) -> list[QueryKeyFactors]:
    """Layers of equal shape, on one device."""
    num_heads, head_dim, _ = layers[0][0].shape
    if rank >= num_heads * head_dim and (settings.dims_per_head or head_dim) >= head_dim:
        return [_exact(*layer, rank) for layer in layers]
    weights, values, sizes = _prepare(layers)
    keep = [index for index, size in enumerate(sizes) if size]
    if len(keep) < len(layers):
        weights = Weights(weights.query[keep], weights.key[keep], num_heads)
    solved = iter(_solve(weights, values[keep], rank, settings, [sizes[index] for index in keep]) if keep else [])
    return [next(solved) if size else _nothing(*layer, rank) for layer, size in zip(layers, sizes, strict=True)]


def _prepare(layers: list[tuple[Tensor, Tensor]]) -> tuple[Weights, Tensor, list[float]]:
    """Layers in singular form, their products of norm one.

    Returns:
        The weights, singular values (layer, head, direction), and the root of what the products were divided by; zero
        where there is nothing to decompose, or nothing but what rounding left.
    """
    num_heads = layers[0][0].shape[0]
    scales, roundings = [], []
    queries: list[Tensor] = []
    keys: list[Tensor] = []
    all_values: list[Tensor] = []
    for query, key in layers:
        # Products of weights near the ends of the number range would leave it: work on weights of size one.
        query_size, key_size = (float(weight.detach().abs().max()) or 1.0 for weight in (query, key))
        query, key = query.detach().double() / query_size, key.detach().double() / key_size
        roundings.append(4 * torch.finfo(torch.float64).eps * float(query.norm() * key.norm()))
        scales.append(math.sqrt(query_size) * math.sqrt(key_size))
        for kept, part in zip((queries, keys, all_values), singular_form(query, key), strict=True):
            kept.append(part)
    values = torch.stack(all_values)
    sizes = []
    for index, (norm, rounding) in enumerate(zip(values.flatten(1).norm(dim=1).tolist(), roundings, strict=True)):
        sizes.append(scales[index] * math.sqrt(norm) if norm > rounding else 0.0)
        for part, divisor in ((queries[index], math.sqrt(norm or 1.0)), (keys[index], math.sqrt(norm or 1.0))):
            part /= divisor
        values[index] /= norm or 1.0
    stack = [torch.stack(parts) if len(parts) > 1 else parts[0][None] for parts in (queries, keys)]
    return Weights(stack[0].flatten(1, 2), stack[1].flatten(1, 2), num_heads), values, sizes


def _solve(
    weights: Weights, values: Tensor, rank: int, settings: _Settings, sizes: list[float]
) -> list[QueryKeyFactors]:
    """Start, sweep, and give back what was found in the size of the weights."""
    if settings.method == "unshared":
        point = start_from(weights, strongest(values, rank, settings.dims_per_head), rank)
        squared = squared_error(weights, point)
        return _results(point, [[value] for value in squared.tolist()], [True] * len(sizes), sizes)
    if settings.method == "paper":
        point = random_start(weights, rank, settings.seed)
        squared = squared_error(weights, point)
    else:
        point, squared = best_start(weights, values, rank)
    limit = settings.max_iterations
    point, history, converged = _improve(weights, point, squared, limit, settings)
    if settings.dims_per_head is not None and settings.dims_per_head < rank:
        support = _strongest_dims(point, settings.dims_per_head)
        mask = torch.zeros_like(point.mixing).scatter(2, support, 1.0)
        point = best_mixing(weights, at(weights, point.left, point.right, point.mixing * mask), support)
        point, history, converged = _improve(weights, point, squared_error(weights, point), limit, settings, support)
        if settings.method == "shared":
            # Heads with little in common lose more to dimensions chosen from shared ones than to their own.
            alone = start_from(weights, strongest(values, rank, settings.dims_per_head), rank)
            squared = squared_error(weights, alone)
            worse = squared < squared.new_tensor([layer[-1] for layer in history])
            if bool(worse.any()):
                support = _strongest_dims(alone, settings.dims_per_head)
                alone, lower, ended = _improve(weights, alone, squared, limit, settings, support)
                point = choose(worse, alone, point)
                for layer in worse.nonzero().flatten().tolist():
                    history[layer], converged[layer] = lower[layer], ended[layer]
    return _results(point, history, converged, sizes)


def _strongest_dims(point: Point, dims_per_head: int) -> Tensor:
    """(layer, head, k): the dimensions that contribute most to each head's product."""
    lengths = point.left.norm(dim=1) * point.right.norm(dim=1)
    support: Tensor = (point.mixing.abs() * lengths[:, None]).topk(dims_per_head).indices.sort().values
    return support


def _improve(
    weights: Weights, point: Point, squared: Tensor, limit: int, settings: _Settings, support: Tensor | None = None
) -> tuple[Point, list[list[float]], list[bool]]:
    """Sweep in float32 as far as it goes, where that is worth it, then in float64; squared errors are float64's."""
    options: dict[str, Any] = {
        "tolerance": settings.tolerance, "momentum": settings.method != "paper", "support": support
    }  # fmt: skip
    history = [[value] for value in squared.tolist()]
    numbers = weights.query.shape[1] * weights.query.shape[2] * point.left.shape[2]
    if numbers >= _SINGLE_PRECISION_FROM and limit > 1:
        single = point.map(lambda part: part.float())
        swept = descend(weights.to(torch.float32), single, squared, limit=limit - 1, **options)
        end, before = (at(weights, *(part.double() for part in p.parts()[:3])) for p in (swept.point, swept.before))
        found = squared_error(weights, end)
        better = found < squared  # always, but for layers that were as good as can be
        point = choose(better, end, point)
        options |= {"before": choose(better, before, point), "age": swept.age * better}
        squared = torch.minimum(found, squared)
        history = [
            [*(value for value in (*earlier, *later[:-1]) if value > last), last]
            for earlier, later, last in zip(history, swept.history, squared.tolist(), strict=True)
        ]
    left = torch.tensor([limit + 1 - len(layer) for layer in history], device=squared.device)
    swept = descend(weights, point, squared, limit=left, **options)
    history = [earlier + later for earlier, later in zip(history, swept.history, strict=True)]
    return swept.point, history, swept.converged.tolist()


def _results(
    point: Point, history: list[list[float]], converged: list[bool], sizes: list[float]
) -> list[QueryKeyFactors]:
    condition = squared_sizes(point.left, point.right, point.mixing).sum(1).sqrt().tolist()
    results = []
    for index, size in enumerate(sizes):
        left, right, mixing = _balance(point.left[index], point.right[index], point.mixing[index])
        errors = [math.sqrt(value) for value in history[index]]
        results.append(
            QueryKeyFactors(
                left * size,
                right * size,
                mixing,
                relative_error=errors[-1],
                iterations=len(errors) - 1,
                converged=converged[index],
                history=errors,
                condition=condition[index],
            )
        )
    return results


def _exact(query: Tensor, key: Tensor, rank: int) -> QueryKeyFactors:
    """Concatenated heads as they are; dimensions beyond theirs are zero."""
    query, key = query.detach().double(), key.detach().double()
    num_heads, head_dim, _ = query.shape
    full_rank = num_heads * head_dim
    blocks = head_blocks(num_heads, full_rank, dtype=query.dtype, device=query.device)
    factors = (query.flatten(0, 1).mT, key.flatten(0, 1).mT, blocks)
    left, right, mixing = (torch.nn.functional.pad(factor, (0, rank - full_rank)) for factor in factors)
    return QueryKeyFactors(left, right, mixing, 0.0, 0, True, [0.0])


def _nothing(query: Tensor, key: Tensor, rank: int) -> QueryKeyFactors:
    """Heads that compute nothing."""
    options: dict[str, Any] = {"dtype": torch.float64, "device": query.device}
    left, right, mixing = (torch.zeros(size, rank, **options) for size in (query.shape[2], key.shape[2], len(query)))
    return QueryKeyFactors(left, right, mixing, 0.0, 0, True, [0.0])


def _balance(left: Tensor, right: Tensor, mixing: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Give every dimension a largest mixing weight of one, and query and key directions of equal norm."""
    largest = mixing.gather(0, mixing.abs().argmax(0, keepdim=True))[0]
    largest = torch.where(largest == 0, torch.ones_like(largest), largest)
    left, mixing = left * largest, mixing / largest
    left_norm, right_norm = left.norm(dim=0), right.norm(dim=0)
    ratio = torch.where((left_norm > 0) & (right_norm > 0), (right_norm / left_norm).sqrt(), torch.ones_like(left_norm))
    return left * ratio, right / ratio, mixing
