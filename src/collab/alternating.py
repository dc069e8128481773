"""Alternating least squares with momentum, for several layers of equal shape at once: the sweeps of the decomposition.

Every tensor has a leading dimension `layer`. The weights are in singular form, their heads one after the other:
query (layer, direction, query_in) and key (layer, direction, key_in), with products of norm one in every layer.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

PENALTY = 3e-4
"""On the dimensions' squared norms, as a share of the squared error: see `descend`."""

_RIDGE = {torch.float64: 1e-9, torch.float32: 1e-7}
"""Pull towards the previous factors, relative to the Gram matrix: too small to slow a sweep, enough to keep the solve
stable when columns become parallel."""

_NOISE = {torch.float64: 0.0, torch.float32: 1e-8}
"""What rounding hides of a change of the squared error."""

_FLOOR = {torch.float64: 0.0, torch.float32: 1e-2}
"""Squared error below which that hides too much for sweeps to be told apart."""

_LOOK_EVERY = 8
"""Sweeps between two looks at whether all layers are done, where looking means waiting for a GPU."""


@dataclass(frozen=True)
class Weights:
    """Heads in singular form: query (layer, direction, query_in), key (layer, direction, key_in)."""

    query: Tensor
    key: Tensor
    num_heads: int

    def to(self, dtype: torch.dtype) -> "Weights":
        """The same in another precision."""
        return Weights(self.query.to(dtype), self.key.to(dtype), self.num_heads)

    def mixed(self, seen: Tensor, mixing: Tensor) -> Tensor:
        """(layer, direction, rank): every head's directions as seen, times that head's mixing."""
        by_head: Tensor = seen.unflatten(1, (self.num_heads, -1))
        return (by_head * mixing[:, :, None]).flatten(1, 2)

    def per_head(self, query_seen: Tensor, key_seen: Tensor) -> Tensor:
        """(layer, head, rank): inner product of every head's product with every dimension's."""
        by_head: Tensor = (query_seen * key_seen).unflatten(1, (self.num_heads, -1))
        return by_head.sum(2)


@dataclass(frozen=True)
class Point:
    """Factors, and the weights along them.

    left (layer, query_in, rank), right (layer, key_in, rank), mixing (layer, head, rank);
    query_seen = query @ left and key_seen = key @ right (layer, direction, rank).
    """

    left: Tensor
    right: Tensor
    mixing: Tensor
    query_seen: Tensor
    key_seen: Tensor

    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """All five tensors."""
        return self.left, self.right, self.mixing, self.query_seen, self.key_seen

    def map(self, function: Callable[..., Tensor], *others: "Point") -> "Point":
        """Apply a function to each of the five tensors, with those of other points beside it."""
        return Point(*(function(*parts) for parts in zip(self.parts(), *(o.parts() for o in others), strict=True)))


@dataclass(frozen=True)
class Descent:
    """What the sweeps did.

    point: the factors they ended with.
    before: those before the last sweep, and age (layer,), sweeps since one was taken back: what momentum goes on from.
    squared: (layer,) squared relative error of those.
    history: for every layer, the squared error after each sweep that lowered it.
    converged: (layer,) whether the tolerance, or the limit of the arithmetic, ended them.
    """

    point: Point
    before: Point
    age: Tensor
    squared: Tensor
    history: list[list[float]]
    converged: Tensor


def at(weights: Weights, left: Tensor, right: Tensor, mixing: Tensor) -> Point:
    """The point of given factors."""
    return Point(left, right, mixing, weights.query @ left, weights.key @ right)


def squared_error(weights: Weights, point: Point) -> Tensor:
    """(layer,): squared relative error, not below zero."""
    grams = gram(point.left) * gram(point.right)
    common = weights.per_head(point.query_seen, point.key_seen)
    return _squared_error(grams, gram(point.mixing), common, point.mixing)


def squared_sizes(left: Tensor, right: Tensor, mixing: Tensor) -> Tensor:
    """(layer, rank): squared norm of each dimension's own product."""
    left, right, mixing = (part.double().square().sum(-2) for part in (left, right, mixing))
    return left * right * mixing


def gram(factor: Tensor) -> Tensor:
    """Inner products of the columns, held in float64."""
    return (factor.mT @ factor).double()


def best_mixing(weights: Weights, point: Point, support: Tensor | None = None) -> Point:
    """The same directions with the mixing that fits best, near the one there was."""
    common = weights.per_head(point.query_seen, point.key_seen)
    nothing = torch.zeros(len(common), dtype=torch.float64, device=common.device)
    mixing = _solve_mixing(common, gram(point.left) * gram(point.right), point.mixing, nothing, support)
    return Point(point.left, point.right, mixing, point.query_seen, point.key_seen)


def descend(
    weights: Weights,
    point: Point,
    squared: Tensor,
    *,
    limit: int | Tensor,
    tolerance: float,
    momentum: bool = True,
    support: Tensor | None = None,
    before: Point | None = None,
    age: Tensor | None = None,
) -> Descent:
    """Sweep until a sweep lowers the error by less than `tolerance` of it, or `limit` sweeps have lowered it.

    Each sweep starts from the last point, moved on by a share of the last change (Nesterov's momentum). One that lowers
    the error by less than the tolerance ends the momentum, one that does not lower it is taken back as well, and the
    next goes without: it is a sweep without momentum that has the last word.

    A sweep lowers error² + penalty Σ size², with `size` the norm of each dimension's own product, the whole being one,
    and penalty = PENALTY error². Only one that does so is accepted, which bounds how far dimensions grow and cancel:
    Σ size² ≤ its start + log(error² at the start / error²) / PENALTY.

    Args:
        weights: in singular form.
        point: where to start.
        squared: (layer,) squared relative error there.
        limit: on the sweeps, one for all layers or one each.
        tolerance: see above.
        momentum: False for plain sweeps.
        support: (layer, head, k) the dimensions each head may use; None for all.
        before: to go on from earlier sweeps, as `Descent` has it.
        age: the same.
    """
    noise, floor = _NOISE[point.left.dtype], _FLOOR[point.left.dtype]
    before, age = before or point, torch.zeros_like(squared) if age is None else age
    size = squared_sizes(point.left, point.right, point.mixing).sum(1)
    counted = torch.zeros_like(squared)
    converged = torch.zeros_like(squared, dtype=torch.bool)
    done = (counted >= limit) | (squared < floor)
    trace: list[Tensor] = []
    look_every = 1 if squared.device.type == "cpu" else _LOOK_EVERY
    while len(trace) % look_every or not bool(done.all()):
        share = age / (age + 2) if momentum else torch.zeros_like(age)
        penalty = PENALTY * squared if momentum else torch.zeros_like(squared)
        swept, found, grown = sweep(weights, _move_on(point, before, share), penalty, support)
        lower = (found < squared) & (found + penalty * grown <= squared + penalty * size) & ~done
        trace.append(torch.where(lower, found, torch.nan))
        counted = counted + lower
        slow = ~lower | (squared - found <= 2 * tolerance * squared + noise)
        converged = converged | (slow & (share == 0) & ~done)
        done = done | converged | (counted >= limit) | (found < floor)
        before, point = choose(lower, point, before), choose(lower, swept, point)
        # Taken back: the next sweep starts from where this one should have stayed, at rest.
        before = choose(lower, before, point)
        size = torch.where(lower, grown, size)
        squared, age = torch.where(lower, found, squared), torch.where(slow, torch.zeros_like(age), age + 1)
    steps = torch.stack(trace, 1).tolist() if trace else [[] for _ in squared]
    history = [[step for step in layer if step == step] for layer in steps]
    return Descent(point, before, age, squared, history, converged)


def sweep(
    weights: Weights, point: Point, penalty: Tensor, support: Tensor | None = None
) -> tuple[Point, Tensor, Tensor]:
    """Solve for the query directions, the key directions and the mixing in turn, each with the other two fixed.

    Returns:
        The new point, its squared error (layer,), and the sum of its dimensions' squared norms (layer,).
    """
    mixing, mixing_gram = point.mixing, gram(point.mixing)
    # Heads and their directions are one dimension: the sum over them needs no array of one term per head.
    target = weights.query.mT @ weights.mixed(point.key_seen, mixing)
    left = _solve(target, gram(point.right) * mixing_gram, point.left, penalty)
    query_seen, left_gram = weights.query @ left, gram(left)
    target = weights.key.mT @ weights.mixed(query_seen, mixing)
    right = _solve(target, left_gram * mixing_gram, point.right, penalty)
    key_seen = weights.key @ right
    grams, common = left_gram * gram(right), weights.per_head(query_seen, key_seen)
    mixing = _solve_mixing(common, grams, mixing, penalty, support)
    mixing_gram = gram(mixing)
    sizes = grams.diagonal(dim1=1, dim2=2) * mixing_gram.diagonal(dim1=1, dim2=2)
    swept = Point(left, right, mixing, query_seen, key_seen)
    return swept, _squared_error(grams, mixing_gram, common, mixing), sizes.sum(1)


def _solve(target: Tensor, system: Tensor, previous: Tensor, penalty: Tensor) -> Tensor:
    """Minimise the squared error plus a small pull towards `previous`, so that the error cannot rise.

    The system is factored and inverted in float64; what multiplies it is in the precision of the weights.
    """
    own = system.diagonal(dim1=-2, dim2=-1)
    ridge = _RIDGE[target.dtype] * own.mean(-1) + torch.finfo(system.dtype).tiny
    system = system + torch.diag_embed(penalty.reshape(-1, *[1] * (own.dim() - 1)) * own + ridge[..., None])
    root, _ = torch.linalg.cholesky_ex(system)  # where it fails the error is not a number, and the sweep taken back
    step = target + ridge[..., None, None].to(target.dtype) * previous
    if target.device.type != "cpu":  # where many small triangular solves at once are the fast way
        half = torch.linalg.solve_triangular(root.to(step.dtype), step.mT, upper=False)
        solved: Tensor = torch.linalg.solve_triangular(root.mT.to(step.dtype), half, upper=True)
        return solved.mT
    if target.dtype == torch.float64:
        return torch.cholesky_solve(step.mT, root).mT
    return step @ torch.cholesky_inverse(root).to(target.dtype)


def _solve_mixing(common: Tensor, grams: Tensor, previous: Tensor, penalty: Tensor, support: Tensor | None) -> Tensor:
    """The mixing (layer, head, rank) that fits best, of each head on its own support where there is one."""
    if support is None:
        return _solve(common.double(), grams, previous.double(), penalty).to(previous.dtype)
    layers = torch.arange(len(grams), device=grams.device)[:, None, None, None]
    systems = grams[layers, support[..., :, None], support[..., None, :]]  # (layer, head, k, k)
    target, kept = common.double().gather(2, support), previous.double().gather(2, support)
    solved = _solve(target[:, :, None], systems, kept[:, :, None], penalty)[:, :, 0]
    return torch.zeros_like(previous).scatter(2, support, solved.to(previous.dtype))


def _squared_error(grams: Tensor, mixing_gram: Tensor, common: Tensor, mixing: Tensor) -> Tensor:
    """(layer,) of products of norm one, from inner products alone."""
    modelled = (grams * mixing_gram).sum((1, 2))
    return (1 - 2 * (common.double() * mixing.double()).sum((1, 2)) + modelled).clamp(min=0)


def _move_on(point: Point, before: Point, share: Tensor) -> Point:
    """Further along the last change by a share of it (layer,), in what the next sweep reads."""
    if len(share) == 1 and share.device.type == "cpu" and not bool(share):
        return point
    weight = (1 + share).to(point.left.dtype)[:, None, None]
    pairs = ((before.right, point.right), (before.mixing, point.mixing), (before.key_seen, point.key_seen))
    right, mixing, key_seen = (torch.lerp(then, now, weight) for then, now in pairs)
    return Point(point.left, right, mixing, point.query_seen, key_seen)


def choose(which: Tensor, first: Point, second: Point) -> Point:
    """Of each layer the first point or the second."""
    if len(which) == 1 and which.device.type == "cpu":
        return first if bool(which) else second
    mask = which[:, None, None]
    return first.map(lambda one, other: torch.where(mask, one, other), second)
