"""Where the sweeps of the decomposition start: singular directions of the heads, the strongest or the most useful.

Every tensor has a leading dimension `layer`, for layers of equal shape.
"""

import torch
from torch import Tensor

from collab.alternating import Point, Weights, at, best_mixing, choose, squared_error, squared_sizes

_CHUNK = 2**23
"""Numbers of the weights that are factored at once: bounds the memory of the start."""

_LEAST_NEW = 1e-10
"""Of a direction's squared norm: what it has beyond those taken must be this much for it to be taken too."""

SAFELY_NEW = 1e-6
"""The same, where all that arithmetic promises is to be had: with less, weights must be large and cancel."""

_MOST_CONDITION = 1e3
"""Of exact factors: heads that are only approached by dimensions that grow and cancel have others without end."""


def singular_form(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same products from orthogonal directions, whatever basis each head came in, in float64.

    Args:
        query: (head, head_dim, query_in); heads of several layers may be one after the other.
        key: (head, head_dim, key_in).

    Returns:
        query (head, direction, query_in) and key (head, direction, key_in), each row as long as the root of its
        singular value, and those values (head, direction), the largest first.
    """
    at_once = max(1, _CHUNK // query[0].numel())
    parts = [_singular_form(*pair) for pair in zip(query.split(at_once), key.split(at_once), strict=True)]
    if len(parts) == 1:
        return parts[0]
    queries, keys, values = zip(*parts, strict=True)
    return torch.cat(queries), torch.cat(keys), torch.cat(values)


def _singular_form(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    query_basis, query_core = torch.linalg.qr(query.double().mT)  # (head, in, dim), (head, dim, dim)
    key_basis, key_core = torch.linalg.qr(key.double().mT)
    # Small matrices: a GPU takes longer over them than it takes to send them to the CPU and back.
    parts = torch.linalg.svd((query_core @ key_core.mT).cpu(), full_matrices=False)
    left, values, right = (part.to(query.device) for part in parts)
    length = values.sqrt()[..., None]
    return (query_basis @ left).mT * length, right @ key_basis.mT * length, values


def strongest(values: Tensor, rank: int, dims_per_head: int | None = None) -> Tensor:
    """(layer, chosen): the directions with the largest singular values (layer, head, direction), over all heads.

    With `dims_per_head`, no more than that of any head.
    """
    directions = values.shape[-1]
    of_each = directions if dims_per_head is None else min(dims_per_head, directions)
    values = values[..., :of_each].flatten(1)
    chosen = values.topk(min(rank, values.shape[1])).indices
    return chosen // of_each * directions + chosen % of_each


def overlaps(weights: Weights) -> tuple[Tensor, Tensor]:
    """Inner products, in float64, between what directions stand for.

    Returns:
        Of the products of any two directions (layer, direction, direction); of every direction's with every head's
        whole product (layer, direction, head).
    """
    query, key = weights.query.double(), weights.key.double()
    overlap = query @ query.mT
    overlap *= key @ key.mT
    by_head: Tensor = overlap.unflatten(2, (weights.num_heads, -1))
    return overlap, by_head.sum(3)


def most_useful(overlap: Tensor, wanted: Tensor, rank: int, least_new: float = _LEAST_NEW) -> tuple[Tensor, Tensor]:
    """Take directions one by one, each the one that lowers the error most when every head may use it.

    Args:
        overlap: as `overlaps` gives it.
        wanted: the same.
        rank: how many to take.
        least_new: share of a direction's squared norm that those taken must leave for it to be taken too.

    Returns:
        (layer, chosen) the directions, and (layer, chosen) by how much each lowers the squared error; when nothing
        more can be gained, directions of no gain.
    """
    missing = wanted  # with what heads still lack
    new = overlap.diagonal(dim1=1, dim2=2).clone()  # squared norm of what each direction has beyond those taken
    negligible = least_new * new
    count = overlap.shape[1]
    taken = overlap.new_zeros(len(overlap), min(rank, count), count)
    chosen, gains = [], []
    for step in range(taken.shape[1]):
        useful = torch.where(new > negligible, missing.square().sum(2) / new, 0.0)
        gain, best = useful.max(1, keepdim=True)  # (layer, 1) each
        at_best = best[:, :, None]
        root = new.gather(1, best).clamp(min=1e-300).sqrt()
        row = overlap.take_along_dim(at_best, 1)[:, 0]
        row = row - (taken[:, :step].take_along_dim(at_best, 2).mT @ taken[:, :step])[:, 0]
        row = torch.where(gain > 0, row / root, 0.0)
        taken[:, step] = row
        missing = missing - row[:, :, None] * (missing.take_along_dim(at_best, 1) / root[:, :, None])
        new = (new - row.square()).scatter(1, best, 0.0)
        chosen.append(best)
        gains.append(gain)
    return torch.cat(chosen, 1), torch.cat(gains, 1)


def total_gain(overlap: Tensor, wanted: Tensor, chosen: Tensor) -> Tensor:
    """(layer,): by how much chosen directions (layer, chosen) together lower the squared error."""
    system = overlap.take_along_dim(chosen[:, :, None], 1).take_along_dim(chosen[:, None], 2)
    own = system.diagonal(dim1=1, dim2=2)
    root, _ = torch.linalg.cholesky_ex(system + torch.diag_embed(1e-10 * own + torch.finfo(own.dtype).tiny))
    reached: Tensor = torch.linalg.solve_triangular(root, wanted.take_along_dim(chosen[:, :, None], 1), upper=False)
    return reached.square().sum((1, 2))


def start_from(weights: Weights, chosen: Tensor, rank: int) -> Point:
    """Factors from chosen directions (layer, chosen), each used by its own head; dimensions beyond those stay zero."""
    directions = weights.query.shape[1] // weights.num_heads
    owner = torch.nn.functional.one_hot(chosen // directions, weights.num_heads).to(weights.query.dtype)
    rows = (weights.query.take_along_dim(chosen[..., None], 1), weights.key.take_along_dim(chosen[..., None], 1), owner)
    extra = rank - chosen.shape[1]
    return at(weights, *(torch.nn.functional.pad(part.mT, (0, extra)) for part in rows))


def best_start(weights: Weights, values: Tensor, rank: int) -> tuple[Point, Tensor]:
    """The better of two choices of `rank` singular directions, with the best mixing for them, and its squared error.

    One takes the strongest of all heads, as truncating each head by itself would; the other those most useful to all
    heads together, which is far better where heads have directions in common. Where `eigen_start` is exact, that.
    """
    overlap, wanted = overlaps(weights)
    first = strongest(values, rank)
    second, gains = most_useful(overlap, wanted, rank)
    better = (total_gain(overlap, wanted, first) >= gains.sum(1))[:, None]
    point, squared = _start_with(weights, torch.where(better, first, second), better | (gains > 0), rank)
    if not bool((squared <= 1 - gains.sum(1) + 1e-9).all()):  # directions too alike to have what they promise
        safe, gains = most_useful(overlap, wanted, rank, SAFELY_NEW)
        other, safely = _start_with(weights, safe, gains > 0, rank)
        lower = squared <= safely
        point, squared = choose(lower, point, other), torch.where(lower, squared, safely)
    for layer in range(len(squared)):
        one = Weights(weights.query[layer, None], weights.key[layer, None], weights.num_heads)
        found = eigen_start(one, rank)
        if found is None or squared_sizes(found.left, found.right, found.mixing).sum() > _MOST_CONDITION**2:
            continue
        # Exact up to rounding, or not what it is for.
        if (error := squared_error(one, found)[0]) < min(1e-6, float(squared[layer])):
            squared[layer] = error
            for part, better_part in zip(point.parts(), found.parts(), strict=True):
                part[layer] = better_part[0]
    return point, squared


def _start_with(weights: Weights, chosen: Tensor, useful: Tensor, rank: int) -> tuple[Point, Tensor]:
    """Chosen directions (layer, chosen) with the best mixing for them, and the squared error of that."""
    point = start_from(weights, chosen, rank)
    # What gains nothing is left out: a second column like another one would stay so.
    kept = torch.nn.functional.pad(useful, (0, rank - useful.shape[1])).to(point.left.dtype)[:, None]
    point = point.map(lambda part: part * kept)
    # Of one length: what keeps the solve stable would else outweigh short directions.
    lengths = (point.left.norm(dim=1) * point.right.norm(dim=1))[:, None]
    lengths = torch.where(lengths > 0, lengths, 1.0)
    even = Point(point.left / lengths, point.right, point.mixing * lengths, point.query_seen / lengths, point.key_seen)
    mixing = best_mixing(weights, even).mixing / lengths
    point = Point(point.left, point.right, mixing, point.query_seen, point.key_seen)
    return point, squared_error(weights, point)


def eigen_start(weights: Weights, rank: int) -> Point | None:
    """Factors of one layer whose heads use no more than `rank` directions between them, from eigenvectors.

    In bases of the spaces that all query and all key directions span, every head's product is C_i = E diag(m_i) Fᵀ with
    square E and F. Two sums X and Y of heads then have X Y⁻¹ = E diag(x / y) E⁻¹, whose eigenvectors are E (Jennrich's
    method). Exact where it applies, as least squares from singular directions often is not; nothing where it does not:
    heads of trained models span more.
    """
    if rank > min(weights.query.shape[2], weights.key.shape[2]):
        return None
    query_basis = _span(weights.query[0], rank)
    key_basis = None if query_basis is None else _span(weights.key[0], rank)
    if query_basis is None or key_basis is None or query_basis.shape[1] != key_basis.shape[1]:
        return None
    heads = (weights.num_heads, -1)
    query, key = (
        (weights.query[0] @ query_basis).unflatten(0, heads),
        (weights.key[0] @ key_basis).unflatten(0, heads),
    )
    first, second = (
        torch.einsum("h,hdq,hdk->qk", draw, query, key).cpu() for draw in _draws(2, weights.num_heads).to(query)
    )
    ratio = torch.linalg.solve_ex(second, first, left=False).result
    if not ratio.isfinite().all():
        return None
    values, vectors = torch.linalg.eig(ratio)
    # Vectors of a complex pair are conjugate: their real and imaginary parts span the same plane.
    left = torch.where(values.imag < 0, vectors.imag, vectors.real)
    right = torch.linalg.lstsq(left, first).solution.mT  # as long as each dimension is strong in this sum
    factors = (query_basis @ left.to(query), key_basis @ right.to(key), query.new_ones(weights.num_heads, len(values)))
    if not all(part.isfinite().all() for part in factors):
        return None
    padded = (torch.nn.functional.pad(part, (0, rank - len(values)))[None] for part in factors)
    return best_mixing(weights, at(weights, *padded))


def _span(rows: Tensor, rank: int) -> Tensor | None:
    """(in, r): orthonormal basis of the space of rows (row, in) if that has no more than `rank` dimensions."""
    if rank < min(rows.shape):
        rough = rows.float()
        basis = torch.linalg.qr(rough.mT @ _draws(len(rows), rank).to(rough))[0]
        if float((rough - (rough @ basis) @ basis.mT).norm()) > 1e-3 * float(rough.norm()):
            return None
    _, lengths, basis = torch.linalg.svd(rows.cpu(), full_matrices=False)
    size = int((lengths > 1e-7 * lengths[0]).sum())
    return basis[:size].mT.to(rows.device) if size <= rank else None


def _draws(*size: int) -> Tensor:
    """Always the same normal numbers."""
    return torch.randn(*size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def random_start(weights: Weights, rank: int, seed: int) -> Point:
    """Uniform random factors, as the textbook method starts; drawn on the CPU, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (weights.query.shape[2], weights.key.shape[2], weights.num_heads)
    layers = len(weights.query)
    factors = [torch.rand(size, rank, generator=generator, dtype=torch.float64) for size in sizes]
    left, right, mixing = (factor.to(weights.query).expand(layers, -1, -1) for factor in factors)
    return at(weights, left, right, mixing)
