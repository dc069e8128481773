"""From trained heads to shared ones: a CP decomposition of the stacked query/key products that never forms them."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from collab.layer import head_blocks

_RIDGE = 1e-9
"""Pull towards the previous factors, relative to the Gram matrix: too small to slow a sweep, enough to keep the
solve stable when columns become parallel."""


@dataclass(frozen=True)
class QueryKeyFactors:
    """`query diag(mixing[head]) keyᵀ`, close to each head's `queryᵀ key`, with the evidence of how close.

    Attributes:
        query: (query_in, rank).
        key: (key_in, rank).
        mixing: (head, rank).
        relative_error: Frobenius norm of what is missing over that of the whole, all heads together.
        iterations: sweeps done.
        converged: whether the tolerance, not the limit on iterations, ended them.
        history: relative error at the start and after every sweep.
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

    Starts from the largest singular directions over all heads, then improves all three factors by alternating least
    squares. Every product comes from the heads' own factors, in float64; the array (head, query_in, key_in) is never
    formed. There is no randomness. At `rank = heads x head size` the answer is exact and no sweep is needed.

    Args:
        query: (head, head_dim, query_in).
        key: (head, head_dim, key_in).
        rank: number of shared dimensions.
        max_iterations: limit on the sweeps.
        tolerance: stop when a sweep lowers the relative error by less than this share of it.
    """
    _check_weights(query, key, rank)
    num_heads, head_dim, _ = query.shape
    query, key = query.detach().double(), key.detach().double()
    if rank >= num_heads * head_dim:
        return _exact(query, key, rank)
    norm = _norm(query, key)
    if norm == 0:
        left, right = query.new_zeros(query.shape[2], rank), key.new_zeros(key.shape[2], rank)
        return QueryKeyFactors(left, right, query.new_zeros(num_heads, rank), 0.0, 0, True, [0.0])
    # A common scale keeps the ridge and the tolerance meaningful whatever the size of the weights.
    root = norm**0.5
    query, key = query / root, key / root
    left, right, mixing = _strongest_directions(query, key, rank)
    history = [_error(query, key, left, right, mixing)]
    converged = False
    for _ in range(max_iterations):
        swept = _sweep(query, key, left, right, mixing)
        error = _error(query, key, *swept)
        if not error < history[-1]:  # at the limit of the arithmetic: keep the better factors
            converged = True
            break
        left, right, mixing = swept
        history.append(error)
        if history[-2] - error < tolerance * history[-2]:
            converged = True
            break
    left, right, mixing = _balance(left * root, right * root, mixing)
    return QueryKeyFactors(left, right, mixing, history[-1], len(history) - 1, converged, history)


def _check_weights(query: Tensor, key: Tensor, rank: int) -> None:
    if query.dim() != 3 or key.dim() != 3 or query.shape[:2] != key.shape[:2]:
        raise ValueError(
            "query and key must be (head, head_dim, in) with the same heads and head size, "
            f"got {tuple(query.shape)} and {tuple(key.shape)}"
        )
    if rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}")
    for name, weight in (("query", query), ("key", key)):
        if not torch.isfinite(weight).all():
            raise ValueError(f"{name} weights must be finite, got NaN or infinity")


def _exact(query: Tensor, key: Tensor, rank: int) -> QueryKeyFactors:
    """Concatenated heads as they are; dimensions beyond theirs are zero."""
    num_heads, head_dim, _ = query.shape
    padding = rank - num_heads * head_dim
    left, right = (
        torch.cat((weight.flatten(0, 1).mT, weight.new_zeros(weight.shape[2], padding)), dim=1)
        for weight in (query, key)
    )
    blocks = head_blocks(num_heads, num_heads * head_dim, dtype=query.dtype, device=query.device)
    mixing = torch.cat((blocks, blocks.new_zeros(num_heads, padding)), dim=1)
    return QueryKeyFactors(left, right, mixing, 0.0, 0, True, [0.0])


def _norm(query: Tensor, key: Tensor) -> float:
    """Frobenius norm over all heads of queryᵀ key, from products of head size."""
    squared = ((query @ query.mT) * (key @ key.mT)).sum()
    return float(squared.clamp(min=0).sqrt())


def _strongest_directions(query: Tensor, key: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `rank` largest singular triplets among all heads' products, each used by its own head alone."""
    num_heads = len(query)
    query_basis, query_core = torch.linalg.qr(query.mT)  # (head, in, dim), (head, dim, dim)
    key_basis, key_core = torch.linalg.qr(key.mT)
    left, values, right = torch.linalg.svd(query_core @ key_core.mT)
    strongest = values.flatten().topk(rank).indices
    head, direction = strongest // values.shape[1], strongest % values.shape[1]
    strength = values[head, direction].sqrt()
    query_directions = torch.einsum("rid,rd->ir", query_basis[head], left.mT[head, direction])
    key_directions = torch.einsum("rid,rd->ir", key_basis[head], right[head, direction])
    mixing = torch.nn.functional.one_hot(head, num_heads).to(query.dtype).mT
    return query_directions * strength, key_directions * strength, mixing.contiguous()


def _sweep(query: Tensor, key: Tensor, left: Tensor, right: Tensor, mixing: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Solve for the query directions, the key directions and the mixing in turn, each with the other two fixed."""
    key_seen = key @ right  # (head, dim, rank)
    left = _solve((query.mT @ (key_seen * mixing[:, None])).sum(0), (right.mT @ right) * (mixing.mT @ mixing), left)
    query_seen = query @ left
    right = _solve((key.mT @ (query_seen * mixing[:, None])).sum(0), (left.mT @ left) * (mixing.mT @ mixing), right)
    key_seen = key @ right
    mixing = _solve((query_seen * key_seen).sum(1), (left.mT @ left) * (right.mT @ right), mixing)
    return left, right, mixing


def _solve(target: Tensor, gram: Tensor, previous: Tensor) -> Tensor:
    """Minimise the squared error plus a small pull towards `previous`, so that the error cannot rise."""
    ridge = _RIDGE * gram.diagonal().mean() + torch.finfo(gram.dtype).tiny
    system = gram + ridge * torch.eye(gram.shape[0], dtype=gram.dtype, device=gram.device)
    step: Tensor = torch.linalg.solve(system, target - previous @ gram, left=False)
    return previous + step


def _error(query: Tensor, key: Tensor, left: Tensor, right: Tensor, mixing: Tensor) -> float:
    """Relative error of the factors for weights whose products have norm one."""
    modelled = ((left.mT @ left) * (right.mT @ right) * (mixing.mT @ mixing)).sum()
    shared = ((query @ left) * (key @ right) * mixing[:, None]).sum()
    whole = ((query @ query.mT) * (key @ key.mT)).sum()
    return float((whole - 2 * shared + modelled).clamp(min=0).sqrt())


def _balance(left: Tensor, right: Tensor, mixing: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Give every dimension a largest mixing weight of one, and query and key directions of equal norm."""
    largest = mixing.gather(0, mixing.abs().argmax(0, keepdim=True))[0]
    largest = torch.where(largest == 0, torch.ones_like(largest), largest)
    left, mixing = left * largest, mixing / largest
    left_norm, right_norm = left.norm(dim=0), right.norm(dim=0)
    ratio = torch.where((left_norm > 0) & (right_norm > 0), (right_norm / left_norm).sqrt(), torch.ones_like(left_norm))
    return left * ratio, right / ratio, mixing
