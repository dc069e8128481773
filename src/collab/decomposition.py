"""From trained heads to shared ones: a CP decomposition of the stacked query/key products that never forms them."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from collab.config import is_integer
from collab.layer import head_blocks

_RIDGE = 1e-9
"""Pull towards the previous factors, relative to the Gram matrix: too small to slow a sweep, enough to keep the
solve stable when columns become parallel."""

_Factors = tuple[Tensor, Tensor, Tensor]
"""Query directions (query_in, rank), key directions (key_in, rank) and mixing (head, rank)."""

_Seen = tuple[Tensor, Tensor]
"""Every head's query and key weights along those directions, (head, direction, rank) each."""


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
            what is below about 1e-8.
        iterations: sweeps done.
        converged: whether the tolerance, not the limit on iterations, ended them.
        history: relative error at the start and after every sweep that lowered it.
    """

    query: Tensor
    key: Tensor
    mixing: Tensor
    relative_error: float
    iterations: int
    converged: bool
    history: list[float] = field(repr=False)

    def to_tensor(self) -> Tensor:
        """(head, query_in, key_in): the products these factors stand for, for looking at small cases."""
        return torch.einsum("qr,hr,kr->hqk", self.query, self.mixing, self.key)


def decompose(
    query: Tensor, key: Tensor, rank: int, *, max_iterations: int = 100, tolerance: float = 1e-6
) -> QueryKeyFactors:
    """Find `rank` query and key directions, and each head's weights on them, that give back every head's product.

    Starts from singular directions of the heads, no worse than truncating each head by itself, then improves all three
    factors by alternating least squares. Every product comes from the heads' own factors, in float64; the array
    (head, query_in, key_in) is never formed. There is no randomness. At `rank = heads x head size` the answer is exact
    and no sweep is needed.

    Args:
        query: (head, head_dim, query_in).
        key: (head, head_dim, key_in).
        rank: number of shared dimensions.
        max_iterations: limit on the sweeps.
        tolerance: stop when a sweep lowers the relative error by less than this share of it.
    """
    _check(query, key, rank, max_iterations, tolerance)
    num_heads, head_dim, _ = query.shape
    query, key = query.detach().double(), key.detach().double()
    if rank >= num_heads * head_dim:
        return _exact(query, key, rank)
    # Products of weights near the ends of the number range would leave it: work on weights of size one.
    query_size, key_size = float(query.abs().max()), float(key.abs().max())
    query, key = query / (query_size or 1.0), key / (key_size or 1.0)
    rounding = torch.finfo(query.dtype).eps * float(query.norm() * key.norm())
    query, key, values = _singular_form(query, key)
    norm = float(values.norm())
    if norm <= 4 * rounding:  # nothing to decompose, or nothing but what rounding left
        left, right = query.new_zeros(query.shape[2], rank), key.new_zeros(key.shape[2], rank)
        return QueryKeyFactors(left, right, query.new_zeros(num_heads, rank), 0.0, 0, True, [0.0])
    query, key, values = query / math.sqrt(norm), key / math.sqrt(norm), values / norm
    factors, seen = _start(query, key, values, rank)
    history = [_error(*factors, *seen)]
    converged = False
    for _ in range(max_iterations):
        swept, swept_seen = _sweep(query, key, *factors, seen[1])
        error = _error(*swept, *swept_seen)
        if not error < history[-1]:  # at the limit of the arithmetic: keep the better factors
            converged = True
            break
        factors, seen = swept, swept_seen
        history.append(error)
        if history[-2] - error < tolerance * history[-2]:
            converged = True
            break
    root = math.sqrt(query_size) * math.sqrt(key_size) * math.sqrt(norm)
    left, right, mixing = _balance(*factors)
    return QueryKeyFactors(left * root, right * root, mixing, history[-1], len(history) - 1, converged, history)


def _check(query: Tensor, key: Tensor, rank: int, max_iterations: int, tolerance: float) -> None:
    if query.dim() != 3 or key.dim() != 3 or query.shape[:2] != key.shape[:2] or not query.numel() or not key.numel():
        raise ValueError(
            "query and key must be (head, head_dim, in) with the same heads and head size and nothing empty, "
            f"got {tuple(query.shape)} and {tuple(key.shape)}"
        )
    for name, number, least in (("rank", rank, 1), ("max_iterations", max_iterations, 0)):
        if not is_integer(number) or number < least:
            raise ValueError(f"{name} must be an integer >= {least}, got {number!r}")
    if not tolerance >= 0:
        raise ValueError(f"tolerance must be >= 0, got {tolerance!r}")
    for name, weight in (("query", query), ("key", key)):
        if not torch.isfinite(weight).all():
            raise ValueError(f"{name} weights must be finite, got NaN or infinity")


def _exact(query: Tensor, key: Tensor, rank: int) -> QueryKeyFactors:
    """Concatenated heads as they are; dimensions beyond theirs are zero."""
    num_heads, head_dim, _ = query.shape
    full_rank = num_heads * head_dim
    blocks = head_blocks(num_heads, full_rank, dtype=query.dtype, device=query.device)
    factors = (query.flatten(0, 1).mT, key.flatten(0, 1).mT, blocks)
    left, right, mixing = (torch.nn.functional.pad(factor, (0, rank - full_rank)) for factor in factors)
    return QueryKeyFactors(left, right, mixing, 0.0, 0, True, [0.0])


def _singular_form(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same products from orthogonal directions, whatever basis each head came in.

    Returns:
        query (head, direction, query_in) and key (head, direction, key_in), each row as long as the root of its
        singular value, and those values (head, direction), the largest first.
    """
    query_basis, query_core = torch.linalg.qr(query.mT)  # (head, in, dim), (head, dim, dim)
    key_basis, key_core = torch.linalg.qr(key.mT)
    left, values, right = torch.linalg.svd(query_core @ key_core.mT, full_matrices=False)
    length = values.sqrt()[..., None]
    return (query_basis @ left).mT * length, right @ key_basis.mT * length, values


def _start(query: Tensor, key: Tensor, values: Tensor, rank: int) -> tuple[_Factors, _Seen]:
    """The better of two choices of `rank` singular directions, with the best mixing for them.

    One takes the strongest of all heads, as truncating each head by itself would; the other those most useful to all
    heads together, which is far better where heads have directions in common.
    """
    strongest = values.flatten().topk(min(rank, values.numel())).indices
    starts = [_start_from(query, key, chosen, rank) for chosen in (strongest, _most_useful(query, key, rank))]
    return min(starts, key=lambda start: _error(*start[0], *start[1]))


def _start_from(query: Tensor, key: Tensor, chosen: Tensor, rank: int) -> tuple[_Factors, _Seen]:
    """Factors from chosen singular directions, counted over all heads; dimensions beyond those stay zero."""
    num_heads, directions, _ = query.shape
    owner = torch.nn.functional.one_hot(chosen // directions, num_heads).to(query.dtype)
    left, right, mixing = (
        torch.nn.functional.pad(rows.mT, (0, rank - len(chosen)))
        for rows in (query.flatten(0, 1)[chosen], key.flatten(0, 1)[chosen], owner)
    )
    query_seen, key_seen = query @ left, key @ right
    mixing = _solve((query_seen * key_seen).sum(1), (left.mT @ left) * (right.mT @ right), mixing)
    return (left, right, mixing), (query_seen, key_seen)


def _most_useful(query: Tensor, key: Tensor, rank: int) -> Tensor:
    """Take directions one by one, each the one that lowers the error most when every head may use it."""
    num_heads, directions, _ = query.shape
    query, key = query.flatten(0, 1), key.flatten(0, 1)
    overlap = (query @ query.mT) * (key @ key.mT)  # inner products of the products of any two directions
    missing = overlap.unflatten(1, (num_heads, directions)).sum(2)  # (direction, head): with what heads still lack
    new = overlap.diagonal().clone()  # squared norm of what each direction has beyond those taken
    negligible = 1e-10 * new
    taken = overlap.new_zeros(min(rank, len(overlap)), len(overlap))
    chosen: list[int] = []
    for step in range(len(taken)):
        gain = torch.where(new > negligible, missing.square().sum(1) / new, 0.0)
        best = int(gain.argmax())
        if gain[best] == 0:
            break
        root = new[best].sqrt()
        taken[step] = (overlap[best] - taken[:step, best] @ taken[:step]) / root
        missing = missing - taken[step][:, None] * (missing[best] / root)
        new = new - taken[step].square()
        new[best] = 0.0
        chosen.append(best)
    return torch.tensor(chosen, device=query.device)


def _sweep(
    query: Tensor, key: Tensor, left: Tensor, right: Tensor, mixing: Tensor, key_seen: Tensor
) -> tuple[_Factors, _Seen]:
    """Solve for the query directions, the key directions and the mixing in turn, each with the other two fixed.

    Returns:
        The three factors, and `query @ left` and `key @ right`, which the error and the next sweep need again.
    """
    # Heads and their directions as one dimension: the sum over them needs no array of one term per head.
    target = query.flatten(0, 1).mT @ (key_seen * mixing[:, None]).flatten(0, 1)
    left = _solve(target, (right.mT @ right) * (mixing.mT @ mixing), left)
    query_seen = query @ left
    target = key.flatten(0, 1).mT @ (query_seen * mixing[:, None]).flatten(0, 1)
    right = _solve(target, (left.mT @ left) * (mixing.mT @ mixing), right)
    key_seen = key @ right
    mixing = _solve((query_seen * key_seen).sum(1), (left.mT @ left) * (right.mT @ right), mixing)
    return (left, right, mixing), (query_seen, key_seen)


def _solve(target: Tensor, gram: Tensor, previous: Tensor) -> Tensor:
    """Minimise the squared error plus a small pull towards `previous`, so that the error cannot rise."""
    ridge = _RIDGE * gram.diagonal().mean() + torch.finfo(gram.dtype).tiny
    system = gram + ridge * torch.eye(gram.shape[0], dtype=gram.dtype, device=gram.device)
    step: Tensor = torch.linalg.solve(system, target - previous @ gram, left=False)
    return previous + step


def _error(left: Tensor, right: Tensor, mixing: Tensor, query_seen: Tensor, key_seen: Tensor) -> float:
    """Relative error of the factors for weights whose products have norm one."""
    modelled = ((left.mT @ left) * (right.mT @ right) * (mixing.mT @ mixing)).sum()
    common = (query_seen * key_seen * mixing[:, None]).sum()
    return float((1 - 2 * common + modelled).clamp(min=0).sqrt())


def _balance(left: Tensor, right: Tensor, mixing: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Give every dimension a largest mixing weight of one, and query and key directions of equal norm."""
    largest = mixing.gather(0, mixing.abs().argmax(0, keepdim=True))[0]
    largest = torch.where(largest == 0, torch.ones_like(largest), largest)
    left, mixing = left * largest, mixing / largest
    left_norm, right_norm = left.norm(dim=0), right.norm(dim=0)
    ratio = torch.where((left_norm > 0) & (right_norm > 0), (right_norm / left_norm).sqrt(), torch.ones_like(left_norm))
    return left * ratio, right / ratio, mixing
