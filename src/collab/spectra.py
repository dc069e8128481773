"""How many dimensions weights use: energies of principal components and likeness of heads, from small Gram matrices."""

from collections.abc import Iterator

import torch
from torch import Tensor

_CHUNK = 2**24
"""Numbers of the weights that are in float64 at once: bounds the memory."""

_SINGLE_PRECISION_FROM = 2**32
"""Multiplications of a product, from which it is made in float32: shares are still right to six digits."""


def head_energies(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Squared singular values of every head's query matrix, key matrix and their product.

    Args:
        query: (head, dim, query_in).
        key: (head, dim, key_in).

    Returns:
        Three of (head, component), in float64, the largest first.
    """
    at_once = max(1, _CHUNK // query[0].numel())
    parts = [energies(*pair) for pair in zip(query.split(at_once), key.split(at_once), strict=True)]
    of_query, of_key, of_product = (torch.cat(part) for part in zip(*parts, strict=True))
    return of_query, of_key, of_product


def energies(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Squared singular values of query (..., dim, query_in), of key (..., dim, key_in) and of queryᵀ key.

    The product (query_in, key_in) is formed only where it is no larger than the factors. Else, with Q Qᵀ = R Rᵀ, its
    squared singular values are the eigenvalues of Rᵀ (K Kᵀ) R, which is (dim, dim).

    Returns:
        Three of (..., component), in float64, the largest first.
    """
    if min(query.shape[-1], key.shape[-1]) <= query.shape[-2]:
        return _own(query), _own(key), _own(_product(query.mT, key))
    values, vectors = torch.linalg.eigh(_product(query, query.mT).double())
    root = vectors * values.clamp(min=0).sqrt()[..., None, :]
    key_gram = _product(key, key.mT).double()
    of_key, of_product = (torch.linalg.eigvalsh(gram) for gram in (key_gram, root.mT @ key_gram @ root))
    return _largest_first(values), _largest_first(of_key), _largest_first(of_product)


def mixed_energies(query: Tensor, key: Tensor, mixing: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """`energies` of every head `mixing[head] * query` and of the keys, one head after the other.

    A head that leaves dimensions out has as many components as it uses, and one at least.

    Args:
        query: (shared, query_in).
        key: (shared, key_in).
        mixing: (head, shared).
    """
    # Where heads differ in their keys, or dimensions are many, there is nothing to make once for all.
    if not mixing.bool().all() or min(query.shape[-1], key.shape[-1]) <= query.shape[-2]:
        for weights in mixing:
            used = weights.nonzero()[:, 0] if weights.any() else slice(0, 1)
            yield energies(weights[used, None] * query[used], key[used])
        return
    query_gram = _product(query, query.mT).double()
    values, vectors = torch.linalg.eigh(_product(key, key.mT).double())
    root, of_key = vectors * values.clamp(min=0).sqrt(), _largest_first(values)
    for weights in mixing.double():
        own = weights[:, None] * query_gram * weights
        of_query, of_product = (torch.linalg.eigvalsh(gram) for gram in (own, root.mT @ own @ root))
        yield _largest_first(of_query), of_key, _largest_first(of_product)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """The product in float64, or in float32 where that takes long."""
    is_large = left.shape[-2] * left.shape[-1] * right.shape[-1] >= _SINGLE_PRECISION_FROM
    dtype = torch.float32 if is_large else torch.float64
    return left.to(dtype) @ right.to(dtype)


def _own(matrix: Tensor) -> Tensor:
    """Squared singular values of (..., row, column), from the smaller of its two Gram matrices."""
    is_wide = matrix.shape[-2] <= matrix.shape[-1]
    gram = _product(matrix, matrix.mT) if is_wide else _product(matrix.mT, matrix)
    return _largest_first(torch.linalg.eigvalsh(gram.double()))


def _largest_first(values: Tensor) -> Tensor:
    return values.clamp(min=0).flip(-1)


def captured(values: Tensor) -> Tensor:
    """Share of the whole that the first components hold, (..., component); of nothing, all."""
    sums = values.cumsum(-1)
    whole = sums[..., -1:]
    return torch.where(whole > 0, sums / whole, 1.0).clamp(max=1.0)


def likeness(query: Tensor, key: Tensor) -> Tensor:
    """(head, head): cosine between the products of any two heads, from query and key (head, dim, in).

    ⟨T_i, T_j⟩ is the sum of the entries of (Q_i Q_jᵀ) ∘ (K_i K_jᵀ). A turn or a scaling of a head's query/key basis
    changes nothing in it.
    """
    num_heads, dim, _ = query.shape
    at_once = max(1, _CHUNK // (dim * num_heads * dim))  # heads whose products with all others are at hand together
    flat_query, flat_key = query.flatten(0, 1), key.flatten(0, 1)
    inner = []
    for queries, keys in zip(flat_query.split(at_once * dim), flat_key.split(at_once * dim), strict=True):
        products = _product(queries, flat_query.mT) * _product(keys, flat_key.mT)
        by_head = products.unflatten(1, (num_heads, dim)).unflatten(0, (-1, dim))
        inner.append(by_head.sum((1, 3), dtype=torch.float64))
    return cosines(torch.cat(inner))


def mixed_likeness(query: Tensor, key: Tensor, mixing: Tensor) -> Tensor:
    """The same of heads that share query and key (shared, in) and differ in mixing (head, shared)."""
    query, key, mixing = query.double(), key.double(), mixing.double()
    return cosines(mixing @ ((query @ query.mT) * (key @ key.mT)) @ mixing.mT)


def cosines(inner: Tensor) -> Tensor:
    """From inner products (head, head) to cosines; with a head of norm zero, zero."""
    norms = inner.diagonal().clamp(min=0).sqrt()
    both = norms[:, None] * norms
    return torch.where(both > 0, inner / both, 0.0).clamp(-1.0, 1.0)


def effective_dims(query: Tensor, key: Tensor, mixing: Tensor) -> Tensor:
    """(head,): how many of the shared dimensions each head uses, as a participation ratio.

    Dimension d has the strength e_d = (mixing_d ‖query_d‖ ‖key_d‖)² in a head, the squared norm of what it adds to the
    head's product; their number is (Σ e)² / Σ e²: k where k dimensions are equally strong.

    Args:
        query: (shared, query_in).
        key: (shared, key_in).
        mixing: (head, shared).
    """
    strength = (mixing.double() * query.double().norm(dim=1) * key.double().norm(dim=1)).square()
    squares = strength.square().sum(1)
    return torch.where(squares > 0, strength.sum(1).square() / squares, 0.0)
