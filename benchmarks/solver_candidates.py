"""Methods that could end the slow tail of alternating least squares, for bench_solvers.py to compare.

Each takes weights in singular form and a point, of one layer, and yields a `Step` for every step that it accepts,
without end: whoever asks decides when it is enough. What they lower is the squared relative error and, but for `plain`,
the penalty that the library's sweeps have too, a share of Σ size² over the dimensions: in every formula the products of
Gram matrices are the same with a slightly larger diagonal, which is what `ones` below is for. `gradient` and
`curvature` are those of half the objective, from inner products of the factors, as the sweeps have theirs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from collab.alternating import PENALTY, Point, Weights, at, descend, gram, squared_error, squared_sizes, sweep

Factors = tuple[Tensor, Tensor, Tensor]
"""left (layer, query_in, rank), right (layer, key_in, rank), mixing (layer, head, rank); or a change of them."""

WINDOW = 6
"""Earlier sweeps that Anderson's method combines."""

PRODUCTS = 30
"""The most products with the curvature for one step of Levenberg-Marquardt."""

ACCURACY = 1e-2
"""Of the squared norm of what is left to solve, where its conjugate gradients may stop earlier."""

ITERATIONS = 10
"""Of L-BFGS between two looks at the clock: it evaluates once more whenever it is called."""


@dataclass(frozen=True)
class Step:
    """Where a method is: squared relative error, the factors, and how many sweeps or iterations led there."""

    squared: float
    point: Point
    count: int


Method = Callable[[Weights, Point], Iterator[Step]]


def balanced(weights: Weights, point: Point) -> Point:
    """The same products from columns that have the same norm in all three factors."""
    norms = [part.norm(dim=1, keepdim=True).clamp(min=1e-150) for part in point.parts()[:3]]
    size = (norms[0] * norms[1] * norms[2]) ** (1 / 3)
    return at(weights, *(part * (size / norm) for part, norm in zip(point.parts()[:3], norms, strict=True)))


def ones(penalty: Tensor, rank: int) -> Tensor:
    """(rank, rank) with 1 + penalty on the diagonal, one elsewhere."""
    return 1 + penalty * torch.eye(rank, dtype=penalty.dtype)


def objective(weights: Weights, point: Point, penalty: Tensor) -> float:
    """Squared relative error + penalty Σ size²."""
    return float(squared_error(weights, point) + penalty * squared_sizes(*point.parts()[:3]).sum(1))


def plain(weights: Weights, point: Point) -> Iterator[Step]:
    """Alternating least squares, without the penalty: the textbook's."""
    return sweeps(weights, point, share=0.0)


def sweeps(weights: Weights, point: Point, share: float = PENALTY) -> Iterator[Step]:
    """Alternating least squares."""
    squared, count = squared_error(weights, point), 0
    while True:
        point, squared, _ = sweep(weights, point, share * squared)
        count += 1
        yield Step(float(squared), point, count)


def line_search(weights: Weights, point: Point) -> Iterator[Step]:
    """Sweeps, each followed by the best step along its change (Rajih and others, 2008)."""
    squared, count = squared_error(weights, point), 0
    while True:
        penalty = PENALTY * squared
        swept, _, _ = sweep(weights, point, penalty)
        change = swept.map(torch.sub, point)
        polynomial = objective_along(weights, swept, change, penalty)
        stationary = np.roots((polynomial[1:] * np.arange(1, 7))[::-1])
        steps = np.array([0.0, *(root.real for root in stationary if abs(root.imag) < 1e-9 and root.real > 0)])
        step = float(steps[np.polynomial.polynomial.polyval(steps, polynomial).argmin()])
        point, count = swept.map(lambda part, moved, by=step: part + by * moved, change), count + 1
        squared = squared_error(weights, point)
        yield Step(float(squared), point, count)


def objective_along(weights: Weights, point: Point, change: Point, penalty: Tensor) -> np.ndarray:
    """(7,): coefficients, the constant first, of the objective at `point + step * change`, a polynomial in `step`."""
    grams, weight = [], ones(penalty, point.left.shape[2])
    for part, moved in zip(point.parts()[:3], change.parts()[:3], strict=True):
        cross = part.mT @ moved
        grams.append((gram(part), cross + cross.mT, gram(moved)))
    result = np.zeros(7)
    result[0] = 1.0
    for i in range(3):
        for j in range(3):
            both = grams[0][i] * grams[1][j] * weight
            for k in range(3):
                result[i + j + k] += float((both * grams[2][k]).sum())
    for i, query_seen in enumerate((point.query_seen, change.query_seen)):
        for j, key_seen in enumerate((point.key_seen, change.key_seen)):
            common = weights.per_head(query_seen, key_seen)
            for k, mixing in enumerate((point.mixing, change.mixing)):
                result[i + j + k] -= 2 * float((common * mixing).sum())
    return result


def momentum(weights: Weights, point: Point, dtype: torch.dtype = torch.float64) -> Iterator[Step]:
    """What the library does, sweep by sweep: going on from `before` and `age` is the same as not having stopped."""
    squared, count = squared_error(weights, point), 0
    weights, point, before, age = weights.to(dtype), point.map(lambda part: part.to(dtype)), None, None
    while True:
        found = descend(weights, point, squared, limit=1, tolerance=0.0, before=before, age=age)
        point, squared, before, age = found.point, found.squared, found.before, found.age
        if not found.history[0]:
            return
        count += 1
        yield Step(float(squared), point, count)


def momentum_single(weights: Weights, point: Point) -> Iterator[Step]:
    """The same in float32 until that gains nothing more, then in float64; errors are float64's."""
    step = None
    for step in momentum(weights, point, torch.float32):
        yield step
    if step is not None:
        point = at(weights, *(part.double() for part in step.point.parts()[:3]))
    done = 0 if step is None else step.count
    for later in momentum(weights, point):
        yield Step(later.squared, later.point, done + later.count)


def anderson(weights: Weights, point: Point) -> Iterator[Step]:
    """Sweeps from the combination of the last few whose changes cancel best (Walker and Ni, 2011).

    A sweep that does not lower the error is taken back, and the next goes without the earlier ones.
    """
    squared, count = squared_error(weights, point), 0
    starts: list[Point] = []
    ends: list[Point] = []
    start = point
    while True:
        swept, found, _ = sweep(weights, start, PENALTY * squared)
        count += 1
        if not found < squared:
            if start is point:
                return
            starts, ends, start = [], [], point
            continue
        squared, point = found, swept
        starts, ends = [*starts, start][-WINDOW:], [*ends, swept][-WINDOW:]
        yield Step(float(squared), point, count)
        share = _cancelling(starts, ends)
        start = point.map(lambda _, *parts, by=share: sum(s * part for s, part in zip(by, parts, strict=True)), *ends)


def _cancelling(starts: list[Point], ends: list[Point]) -> list[float]:
    """Shares, one in sum, with which the changes from starts to ends, in what a sweep reads, add up to the least."""
    changes = [
        torch.cat([(end.right - start.right).flatten(), (end.mixing - start.mixing).flatten()])
        for start, end in zip(starts, ends, strict=True)
    ]
    stacked = torch.stack(changes)
    products = stacked @ stacked.mT
    products = products + 1e-10 * products.diagonal().mean() * torch.eye(len(products), dtype=products.dtype)
    shares = torch.linalg.solve(products, torch.ones(len(products), dtype=products.dtype))
    return (shares / shares.sum()).tolist()


def gradient(weights: Weights, point: Point, penalty: Tensor) -> Factors:
    """Of half the objective, in the three factors."""
    left, right, mixing = (gram(part) for part in point.parts()[:3])
    weight = ones(penalty, point.left.shape[2])
    return (
        point.left @ (right * mixing * weight) - weights.query.mT @ weights.mixed(point.key_seen, point.mixing),
        point.right @ (left * mixing * weight) - weights.key.mT @ weights.mixed(point.query_seen, point.mixing),
        point.mixing @ (left * right * weight) - weights.per_head(point.query_seen, point.key_seen),
    )


def curvature(factors: Factors, change: Factors, weight: Tensor) -> Factors:
    """Jᵀ J `change`, with J the derivative of all products in the factors (Phan, Tichavský and Cichocki, 2013).

    A dimension's product is linear in each factor. So J change is a sum of three terms, one a factor, and its inner
    products with the columns of J have Gram matrices in the two factors that a term leaves as they are.
    """
    left, right, mixing = (part.mT @ part for part in factors)
    of_left, of_right, of_mixing = (moved.mT @ part for part, moved in zip(factors, change, strict=True))
    return (
        change[0] @ (weight * right * mixing) + factors[0] @ (weight * (of_right * mixing + right * of_mixing)),
        change[1] @ (weight * left * mixing) + factors[1] @ (weight * (of_left * mixing + left * of_mixing)),
        change[2] @ (weight * left * right) + factors[2] @ (weight * (of_left * right + left * of_right)),
    )


def levenberg_marquardt(weights: Weights, point: Point) -> Iterator[Step]:
    """Gauss-Newton steps, damped as much as they need, from conjugate gradients that the sweeps' solves condition."""
    squared, count, damping = squared_error(weights, point), 0, 1e-3
    while damping < 1e9:
        point, penalty = balanced(weights, point), PENALTY * squared
        factors, now = point.parts()[:3], objective(weights, point, penalty)
        downhill: Factors = tuple(-part for part in gradient(weights, point, penalty))  # type: ignore[assignment]
        ridge = damping * float(gram(point.left).diagonal(dim1=1, dim2=2).mean()) ** 2
        change, promised = _damped_step(factors, downhill, ridge, ones(penalty, point.left.shape[2]))
        moved = at(weights, *(part + by for part, by in zip(factors, change, strict=True)))
        gained = now - objective(weights, moved, penalty)
        count += 1
        damping *= 1 / 3 if gained > 1.5 * promised else 3 if gained < 0.5 * promised else 1
        if gained > 0:
            squared, point = squared_error(weights, moved), moved
            yield Step(float(squared), point, count)


def _damped_step(factors: Factors, downhill: Factors, ridge: float, weight: Tensor) -> tuple[Factors, float]:
    """About the solution of (JᵀJ + ridge) change = downhill, and by how much it should lower half the objective."""
    left, right, mixing = (gram(part) for part in factors)
    pull = ridge * torch.eye(len(weight), dtype=weight.dtype)
    systems = (weight * right * mixing, weight * left * mixing, weight * left * right)
    inverses = [torch.cholesky_inverse(torch.linalg.cholesky(system + pull)) for system in systems]

    def conditioned(parts: Factors) -> Factors:
        return tuple(part @ inverse for part, inverse in zip(parts, inverses, strict=True))  # type: ignore[return-value]

    change: Factors = tuple(torch.zeros_like(part) for part in factors)  # type: ignore[assignment]
    rest, search = downhill, conditioned(downhill)
    size = first = _inner(rest, search)
    for _ in range(PRODUCTS):
        product = _add(curvature(factors, search, weight), ridge, search)
        step = size / _inner(search, product)
        change, rest = _add(change, step, search), _add(rest, -step, product)
        towards = conditioned(rest)
        size, before = _inner(rest, towards), size
        if size < ACCURACY * first:
            break
        search = _add(towards, size / before, search)
    # change (JᵀJ + ridge) change = change (downhill - rest)
    return change, 0.5 * (_inner(change, downhill) + _inner(change, rest))


def _inner(first: Factors, second: Factors) -> float:
    return sum(float((one * other).sum()) for one, other in zip(first, second, strict=True))


def _add(first: Factors, step: float, second: Factors) -> Factors:
    return tuple(one + step * other for one, other in zip(first, second, strict=True))  # type: ignore[return-value]


def lbfgs(weights: Weights, point: Point) -> Iterator[Step]:
    """All factors at once along quasi-Newton directions (Acar, Dunlavy and Kolda, 2011)."""
    factors = [part.clone().requires_grad_() for part in point.parts()[:3]]
    optimizer = torch.optim.LBFGS(
        factors,
        max_iter=ITERATIONS,
        history_size=20,
        tolerance_grad=0,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )

    penalty = PENALTY * squared_error(weights, point)

    def closure() -> float:
        here = at(weights, *(part.detach() for part in factors))
        for part, slope in zip(factors, gradient(weights, here, penalty), strict=True):
            part.grad = slope
        return objective(weights, here, penalty) / 2

    while True:
        optimizer.step(closure)
        here = at(weights, *(part.detach().clone() for part in factors))
        squared = squared_error(weights, here)
        penalty = PENALTY * squared
        yield Step(float(squared), here, optimizer.state[factors[0]]["n_iter"])


METHODS: dict[str, Method] = {
    "plain": plain,
    "penalty": sweeps,
    "line search": line_search,
    "Anderson": anderson,
    "Levenberg-Marquardt": levenberg_marquardt,
    "L-BFGS": lbfgs,
    "momentum": momentum,
    "momentum, float32 first": momentum_single,
}
"""Every method by its name in the tables; the last is what the library does."""
