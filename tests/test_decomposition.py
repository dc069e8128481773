"""The decomposition: honest numbers, planted answers found, nothing it cannot take or must not touch."""

import itertools
import math
import subprocess
import sys

import hypothesis
import pytest
import torch
from hypothesis import strategies

from collab import QueryKeyFactors, alternating, decompose, decomposition
from collab.decomposition import decompose_many, error_curve


class Draw:
    """Standard normal float64 numbers from a seed of its own."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *size):
        return torch.randn(*size, generator=self.generator, dtype=torch.float64)


def random_heads(heads=4, head_dim=5, query_in=14, key_in=12, seed=0):
    draw = Draw(seed)
    return draw(heads, head_dim, query_in), draw(heads, head_dim, key_in)


def planted_heads(heads, head_dim, query_in, key_in, rank, noise=0.0, seed=0):
    """Heads that all use the same `rank` directions, each with weights of its own and in a basis of its own."""
    draw = Draw(seed)
    directions, key_directions, mixing = draw(rank, query_in), draw(rank, key_in), draw(heads, rank)
    basis = torch.linalg.qr(draw(heads, head_dim, head_dim))[0][:, :, :rank]
    query, key = basis @ (mixing[:, :, None] * directions), basis @ key_directions.expand(heads, -1, -1)
    return query + noise * draw(*query.shape), key + noise * draw(*key.shape)


def chosen_heads(heads, head_dim, query_in, key_in, rank, seed=0):
    """Heads that each use `head_dim` of `rank` directions, more than any of them has room for, and all between them."""
    draw = Draw(seed)
    directions, key_directions, mixing = draw(rank, query_in), draw(rank, key_in), draw(heads, rank)
    used = torch.stack([(torch.arange(head_dim) + head * rank // heads) % rank for head in range(heads)])
    basis = torch.linalg.qr(draw(heads, head_dim, head_dim))[0]
    return basis @ (mixing.gather(1, used)[..., None] * directions[used]), basis @ key_directions[used]


def whitened_heads(heads=6, head_dim=8, width=40, decay=4.0, seed=0):
    """Heads with something in common, along inputs of which some vary ten to the `decay` times more than others."""
    query, key = planted_heads(heads, head_dim, width, width, head_dim, noise=0.3, seed=seed)
    spread = torch.linalg.qr(Draw(seed + 1)(width, width))[0] * torch.logspace(0, -decay, width, dtype=torch.float64)
    return query @ spread, key @ spread


def falls(history):
    return all(later < earlier for earlier, later in itertools.pairwise(history))


def tensor(query, key):
    return torch.einsum("hdq,hdk->hqk", query.double(), key.double())


def direct_error(query, key, factors):
    """From the products themselves, formed in full."""
    whole = tensor(query, key)
    return ((whole - factors.to_tensor()).norm() / whole.norm()).item()


def per_head_error(query, key, rank):
    """Of keeping the `rank` largest singular values of all heads, each head by itself."""
    values = torch.linalg.svdvals(tensor(query, key)).flatten().sort(descending=True).values
    return (values[rank:].norm() / values.norm()).item()


def random_start_error(query, key, rank, seed, sweeps=100):
    """Plain alternating least squares on the full array from random factors: the textbook method."""
    whole, draw = tensor(query, key), Draw(seed)
    left, right, mixing = draw(whole.shape[1], rank), draw(whole.shape[2], rank), draw(whole.shape[0], rank)
    for _ in range(sweeps):
        gram = (right.T @ right) * (mixing.T @ mixing)
        left = torch.einsum("hqk,kr,hr->qr", whole, right, mixing) @ torch.linalg.pinv(gram)
        gram = (left.T @ left) * (mixing.T @ mixing)
        right = torch.einsum("hqk,qr,hr->kr", whole, left, mixing) @ torch.linalg.pinv(gram)
        gram = (left.T @ left) * (right.T @ right)
        mixing = torch.einsum("hqk,qr,kr->hr", whole, left, right) @ torch.linalg.pinv(gram)
    return ((whole - torch.einsum("qr,hr,kr->hqk", left, mixing, right)).norm() / whole.norm()).item()


# --- how good


@pytest.mark.parametrize("extra", [0, 3], ids=["full rank", "more than full"])
def test_full_rank_is_exact_and_gives_the_heads_back(extra):
    query, key = random_heads()
    factors = decompose(query, key, 20 + extra)
    assert (factors.relative_error, factors.iterations, factors.converged) == (0.0, 0, True)
    assert factors.history == [0.0]
    assert factors.mixing.shape == (4, 20 + extra)
    assert torch.equal(factors.query[:, :20].T, query.flatten(0, 1))
    assert torch.equal(factors.key[:, :20].T, key.flatten(0, 1))
    assert not factors.query[:, 20:].any()
    assert not factors.mixing[:, 20:].any()
    torch.testing.assert_close(factors.to_tensor(), tensor(query, key))


@pytest.mark.parametrize("shape", [(6, 4, 20, 20, 4), (4, 8, 16, 16, 3), (5, 6, 20, 12, 5), (3, 4, 10, 30, 1)], ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_planted_directions_are_found(shape, seed):
    query, key = planted_heads(*shape, seed=seed)
    rank = shape[-1]
    assert rank < shape[0] * shape[1]
    factors = decompose(query, key, rank, max_iterations=1000, tolerance=0.0)
    assert factors.relative_error < 1e-6
    assert direct_error(query, key, factors) < 1e-6
    assert rank == 1 or per_head_error(query, key, rank) > 0.1  # heads by themselves could not


@hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
@hypothesis.given(
    heads=strategies.integers(3, 9),
    head_dim=strategies.integers(2, 6),
    rank=strategies.integers(2, 14),
    wider=strategies.tuples(strategies.integers(0, 9), strategies.integers(0, 9)),
    more=strategies.integers(0, 2),
    size=strategies.sampled_from([1e-12, 1.0, 1e12]),
    seed=strategies.integers(0, 10_000),
)
def test_more_directions_than_a_head_has_are_found_where_inputs_are_as_wide(
    heads, head_dim, rank, wider, more, size, seed
):
    rank = min(rank, heads * (head_dim - 1))  # every direction in two heads or more, or the heads tell nothing of it
    head_dim = min(head_dim, rank)
    query, key = chosen_heads(heads, head_dim, rank + wider[0], rank + wider[1], rank, seed)
    hypothesis.assume(rank + more < heads * head_dim)
    factors = decompose(size * query, key, min(rank + more, *(part.shape[2] for part in (query, key))))
    assert factors.relative_error < 1e-5
    assert direct_error(size * query, key, factors) < 1e-5


@pytest.mark.parametrize("rank", [1, 2, 7, 13, 19])
@pytest.mark.parametrize("widths", [(14, 14), (9, 30), (30, 9)], ids=["self", "narrow queries", "narrow keys"])
def test_the_error_is_the_one_formed_directly_and_never_rises(rank, widths):
    query, key = random_heads(query_in=widths[0], key_in=widths[1])
    factors = decompose(query, key, rank, max_iterations=30)
    assert factors.query.shape == (widths[0], rank)
    assert factors.key.shape == (widths[1], rank)
    assert factors.mixing.shape == (4, rank)
    assert factors.relative_error == pytest.approx(direct_error(query, key, factors), abs=1e-9)
    assert factors.history[-1] == factors.relative_error
    assert len(factors.history) == factors.iterations + 1
    assert falls(factors.history)
    assert factors.history[0] <= per_head_error(query, key, rank) + 1e-12


def test_heads_with_nothing_in_common_start_from_their_own_truncation():
    query, key = torch.zeros(3, 4, 12, dtype=torch.float64), torch.zeros(3, 4, 12, dtype=torch.float64)
    draw = Draw(0)
    for head in range(3):
        query[head, :, 4 * head : 4 * head + 4], key[head, :, 4 * head : 4 * head + 4] = draw(4, 4), draw(4, 4)
    for rank in (1, 5, 11):
        factors = decompose(query, key, rank)
        assert factors.history[0] == pytest.approx(per_head_error(query, key, rank), abs=1e-9)
        assert factors.relative_error == pytest.approx(factors.history[0], abs=1e-7)  # and there is no better


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_structured_heads_come_out_at_least_as_well_as_from_a_random_start(noise, seed):
    query, key = planted_heads(6, 4, 20, 20, 4, noise=noise, seed=seed)
    error = decompose(query, key, 4, tolerance=0.0).relative_error
    assert error < 0.6 * per_head_error(query, key, 4)
    assert error <= 1.01 * random_start_error(query, key, 4, seed) + 1e-5


@pytest.mark.parametrize("rank", [1, 3, 4, 9])
def test_identical_heads_share_one_heads_directions(rank):
    query, key = random_heads(heads=1, head_dim=4)
    query, key = query.expand(5, -1, -1), key.expand(5, -1, -1)
    factors = decompose(query, key, rank)
    # The best a single matrix allows, and so exact from one head's size on.
    assert factors.relative_error == pytest.approx(per_head_error(query[:1], key[:1], rank), abs=1e-7)
    torch.testing.assert_close(factors.mixing, factors.mixing[:1].expand(5, -1), rtol=0, atol=1e-6)


def rounded_error(query, key, factors):
    """Of factors kept in bfloat16, as a model in that precision would keep them."""
    parts = (part.bfloat16().double() for part in (factors.query, factors.mixing, factors.key))
    whole = tensor(query, key)
    return ((whole - torch.einsum("qr,hr,kr->hqk", *parts)).norm() / whole.norm()).item()


def degenerate_heads(seed=5):
    """Close to products of rank 3 that rank 2 approaches without end, by directions that grow and cancel."""
    whole = torch.tensor([[[0.0, 1.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, 0.0]]], dtype=torch.float64)
    return torch.eye(2, dtype=torch.float64).expand(2, -1, -1), whole + 0.01 * Draw(seed)(2, 2, 2)


def test_degenerate_products_do_not_blow_up():
    query, key = degenerate_heads(seed=0)
    factors = decompose(query, key, 2, max_iterations=1000, tolerance=0.0)
    assert factors.relative_error == pytest.approx(direct_error(query, key, factors), abs=1e-6)
    assert factors.relative_error < 0.01
    assert factors.query.abs().max() < 10
    assert factors.key.abs().max() < 10


@pytest.mark.parametrize("width", [2, 4, 12])
@pytest.mark.parametrize("heads", [2, 4])
def test_heads_that_are_only_approached_by_dimensions_that_cancel_are_not_said_to_be_exact(width, heads):
    draw = Draw(width + heads)
    above = torch.diag(torch.ones(width - 1, dtype=torch.float64), 1)
    whole = torch.eye(width, dtype=torch.float64) * draw(heads, 1, 1) + draw(heads, 1, 1) * above  # no eigenvectors
    query, key = whole @ draw(width, width), draw(width, width).expand(heads, -1, -1)
    for max_iterations in (0, 100):
        factors = decompose(query, key, width, max_iterations=max_iterations)
        assert factors.relative_error == pytest.approx(direct_error(query, key, factors), abs=1e-6)
        assert factors.condition < 100


def nearly_parallel_heads(apart):
    """Of two directions all heads could be made, were they not so close that only weights of 1 / apart tell them."""
    one, other = torch.eye(2, dtype=torch.float64)
    nothing = torch.zeros_like(one)
    query = [(one, nothing), (one + apart * other, nothing), (other, one)]
    key = [(one, nothing), (one + apart * other, nothing), (one, other)]
    return tuple(torch.stack([torch.stack(head) for head in heads]) for heads in (query, key))


@pytest.mark.parametrize("apart", [1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6])
def test_directions_that_hardly_differ_are_told_apart_no_further_than_arithmetic_goes(apart):
    query, key = nearly_parallel_heads(apart)
    factors = decompose(query, key, 2)
    assert factors.relative_error < (0.01 if apart >= 1e-4 else 0.51)
    assert factors.relative_error == pytest.approx(direct_error(query, key, factors), abs=1e-8 * factors.condition)
    assert factors.condition < 1000
    assert factors.relative_error <= float(error_curve(query, key)[2]) + 1e-8


@pytest.mark.parametrize("heads", [degenerate_heads, whitened_heads, random_heads], ids=lambda heads: heads.__name__)
@pytest.mark.parametrize("rank", [2, 3])
def test_dimensions_that_cancel_stay_within_the_bound(heads, rank):
    query, key = heads()
    factors = decompose(query, key, rank, max_iterations=2000, tolerance=0.0)
    start = decompose(query, key, rank, max_iterations=0)
    sizes = factors.query.norm(dim=0) * factors.key.norm(dim=0) * factors.mixing.norm(dim=0)
    assert factors.condition == pytest.approx((sizes.norm() / tensor(query, key).norm()).item())
    fell = max(start.relative_error, 1e-8) / max(factors.relative_error, 1e-8)  # rounding hides what is below
    growth = 2 * math.log(fell) / alternating.PENALTY
    assert factors.condition**2 <= start.condition**2 + growth + 1e-6


def test_dimensions_that_cancel_are_kept_from_it_on_the_way_to_the_same_error(monkeypatch):
    query, key = degenerate_heads()
    bounded = decompose(query, key, 2, max_iterations=3000, tolerance=0.0)
    monkeypatch.setattr(alternating, "PENALTY", 0.0)
    free = decompose(query, key, 2, max_iterations=3000, tolerance=0.0)
    assert free.condition > 5 * bounded.condition
    assert bounded.relative_error < 1.1 * free.relative_error < 0.01


def test_the_condition_says_what_rounding_the_factors_costs():
    query, key = whitened_heads()
    factors = decompose(query, key, 12)
    assert factors.condition < 10
    moved = math.sqrt(max(rounded_error(query, key, factors) ** 2 - factors.relative_error**2, 0.0))
    assert moved < 2**-8 * factors.condition


# --- few dimensions a head


@pytest.mark.parametrize("rank", [6, 12, 40])
@pytest.mark.parametrize("dims_per_head", [1, 3, 7])
def test_heads_use_no_more_dimensions_than_they_may(rank, dims_per_head):
    query, key = whitened_heads()
    factors = decompose(query, key, rank, dims_per_head=dims_per_head)
    assert int((factors.mixing != 0).sum(1).max()) <= dims_per_head
    assert factors.relative_error == pytest.approx(direct_error(query, key, factors), abs=1e-9)
    assert falls(factors.history)
    assert len(factors.history) == factors.iterations + 1
    unshared = decompose(query, key, rank, method="unshared", dims_per_head=dims_per_head)
    assert factors.relative_error <= unshared.relative_error + 1e-9


def test_as_many_dimensions_as_there_are_is_no_restriction():
    query, key = random_heads()
    dense = decompose(query, key, 7)
    for dims_per_head in (7, 100):
        assert torch.equal(decompose(query, key, 7, dims_per_head=dims_per_head).mixing, dense.mixing)
    assert decompose(query, key, 20, dims_per_head=5).relative_error == 0  # blocks use that many
    fewer = decompose(query, key, 20, dims_per_head=4)
    assert fewer.relative_error > 0
    assert int((fewer.mixing != 0).sum(1).max()) == 4


def test_the_strongest_dimensions_of_each_head_are_the_ones_kept():
    query, key = whitened_heads()
    dense = decompose(query, key, 12)
    strength = dense.mixing.abs() * dense.query.norm(dim=0) * dense.key.norm(dim=0)
    kept = decompose(query, key, 12, dims_per_head=4).mixing != 0
    weakest_kept = strength.masked_fill(~kept, math.inf).amin(1)
    assert (strength.masked_fill(kept, 0.0).amax(1) <= weakest_kept).all()


# --- the methods to compare with


@pytest.mark.parametrize("rank", [1, 7, 19, 20, 23])
def test_unshared_truncates_every_head_by_itself(rank):
    query, key = random_heads()
    factors = decompose(query, key, rank, method="unshared")
    assert factors.relative_error == pytest.approx(per_head_error(query, key, rank), abs=1e-9)
    assert factors.relative_error == pytest.approx(direct_error(query, key, factors), abs=1e-7)
    assert (factors.iterations, factors.converged) == (0, True)
    assert ((factors.mixing != 0).sum(0) <= 1).all()


@pytest.mark.parametrize("dims_per_head", [1, 3, 5, 9])
def test_unshared_truncates_every_head_to_no_more_than_it_may_use(dims_per_head):
    query, key = random_heads()
    factors = decompose(query, key, 20 - 1, method="unshared", dims_per_head=dims_per_head)
    values = torch.linalg.svdvals(torch.einsum("hdq,hdk->hqk", query.double(), key.double()))
    kept = values[:, :dims_per_head].flatten().topk(min(19, 4 * min(5, dims_per_head))).values
    lost = 1 - float(kept.square().sum() / values.square().sum())
    assert factors.relative_error == pytest.approx(math.sqrt(max(lost, 0.0)), abs=1e-7)
    assert int((factors.mixing != 0).sum(1).max()) <= dims_per_head


def test_the_papers_method_starts_from_the_seed_and_from_nothing_else():
    query, key = random_heads()
    before = torch.get_rng_state()
    first, again, other = (decompose(query, key, 7, method="paper", seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.query, again.query)
    assert first.history != other.history
    assert falls(first.history)
    assert first.relative_error == pytest.approx(direct_error(query, key, first), abs=1e-9)
    assert first.relative_error < 1.1 * random_start_error(query, key, 7, seed=3)


def test_ours_is_ahead_of_both():
    query, key = whitened_heads(decay=1.0)
    ours, alone, paper = (
        decompose(query, key, 12, method=method).relative_error for method in ("shared", "unshared", "paper")
    )
    assert ours < 0.8 * alone
    assert ours <= paper


# --- every rank at once


@hypothesis.settings(max_examples=10, deadline=None, derandomize=True)
@hypothesis.given(
    shape=strategies.tuples(*(strategies.integers(1, most) for most in (5, 6, 20, 20))),
    seed=strategies.integers(0, 10_000),
)
def test_the_error_curve_is_what_decompose_starts_from_or_above(shape, seed):
    query, key = random_heads(*shape, seed=seed)
    full_rank = shape[0] * shape[1]
    curve = error_curve(query, key)
    assert curve.shape == (full_rank + 1,)
    assert (curve[0], curve[-1]) == (1, 0)
    assert (curve.diff() <= 0).all()
    for rank in {1, full_rank // 2, full_rank - 1} - {0, full_rank}:
        start = decompose(query, key, rank, max_iterations=0).relative_error
        assert start <= curve[rank] + 1e-7
        assert curve[rank] <= per_head_error(query, key, rank) + 1e-7
        assert curve[rank] >= decompose(query, key, rank).relative_error - 1e-7


def test_the_error_curve_is_tight_where_heads_are_alike_and_zero_where_there_is_nothing():
    query, key = random_heads(heads=1, head_dim=4)
    curve = error_curve(query.expand(5, -1, -1), key.expand(5, -1, -1))
    assert curve[3] == pytest.approx(per_head_error(query, key, 3), abs=1e-7)
    assert (curve[4:] < 1e-7).all()
    assert not error_curve(torch.zeros(2, 3, 4), torch.ones(2, 3, 4)).any()
    with pytest.raises(ValueError, match="query weights must be finite"):
        error_curve(torch.full((2, 3, 4), math.nan), torch.ones(2, 3, 4))


# --- many layers, and two precisions


@pytest.mark.parametrize("options", [{}, {"dims_per_head": 3}, {"method": "paper"}, {"method": "unshared"}], ids=str)
def test_layers_decomposed_together_come_out_as_each_by_itself(monkeypatch, options):
    layers = [random_heads(seed=0), random_heads(seed=1), random_heads(seed=2), planted_heads(4, 5, 14, 12, 5)]
    layers[1][0].zero_()
    alone = [decompose(*layer, 7, **options) for layer in layers]
    together = {layer: [layer] for layer in range(4)} | {0: [0, 1, 2, 3]}
    monkeypatch.setattr(decomposition, "_batches", lambda weights, ranks: together)
    monkeypatch.setattr(alternating, "_LOOK_EVERY", 3)
    for first, second in zip(alone, decompose_many(layers, [7] * 4, **options), strict=True):
        assert second.iterations == pytest.approx(first.iterations, abs=2)
        assert second.relative_error == pytest.approx(first.relative_error, rel=1e-4, abs=1e-7)
        assert second.history[:5] == pytest.approx(first.history[:5], rel=1e-6)
        assert second.query.shape == first.query.shape


def test_several_layers_keep_their_order_sizes_and_progress():
    shown = []

    def progress(layers, count):
        shown.append(count)
        for layer in layers:
            yield layer
            shown.append(layer)

    layers, ranks = [random_heads(seed=seed, query_in=10 + seed) for seed in range(3)], [3, 5, 20]
    many = decompose_many(layers, ranks, progress=progress)
    assert [factors.query.shape for factors in many] == [(10, 3), (11, 5), (12, 20)]
    assert torch.equal(many[1].query, decompose(*layers[1], 5).query)
    assert shown == [3, 0, 1, 2]
    with pytest.raises(ValueError, match="one rank a layer, got 3 layers and 2 ranks"):
        decompose_many(layers, ranks[:2])


def test_layers_share_a_batch_on_a_gpu_only_when_alike(monkeypatch):
    layers = [tuple(torch.zeros(2, 3, 4, device="meta") for _ in range(2)) for _ in range(5)]
    layers[2] = tuple(torch.zeros(2, 3, 5, device="meta") for _ in range(2))
    assert decomposition._batches(layers, [3, 3, 3, 4, 3]) == {0: [0, 1, 4], 2: [2], 3: [3]}
    monkeypatch.setattr(decomposition, "_BATCH_BYTES", 8 * 2 * 24 * 2)
    assert decomposition._batches(layers, [3] * 5) == {0: [0, 1], 2: [2], 3: [3, 4]}


@pytest.mark.parametrize("decay", [0.0, 2.0, 6.0])
def test_float32_sweeps_end_where_float64_ones_do(monkeypatch, decay):
    query, key = whitened_heads(decay=decay)
    exact = decompose(query, key, 12)
    monkeypatch.setattr(decomposition, "_SINGLE_PRECISION_FROM", 0)
    mixed = decompose(query, key, 12)
    assert mixed.relative_error == pytest.approx(exact.relative_error, rel=1e-3)
    assert mixed.relative_error == pytest.approx(direct_error(query, key, mixed), abs=1e-9)
    assert falls(mixed.history)
    assert len(mixed.history) == mixed.iterations + 1
    assert mixed.iterations <= 100
    assert mixed.query.dtype == torch.float64


def test_float32_sweeps_do_not_hide_what_float64_finds(monkeypatch):
    monkeypatch.setattr(decomposition, "_SINGLE_PRECISION_FROM", 0)
    query, key = planted_heads(6, 4, 20, 20, 4)
    assert direct_error(query, key, decompose(query, key, 4)) < 1e-6


# --- what must not matter


@hypothesis.settings(max_examples=8, deadline=None, derandomize=True)
@hypothesis.given(seed=strategies.integers(0, 10_000), order=strategies.permutations(range(4)))
def test_permuting_heads_permutes_the_mixing(seed, order):
    query, key = random_heads(seed=seed)
    factors, permuted = (decompose(query[o], key[o], 7, max_iterations=5) for o in ([0, 1, 2, 3], order))
    assert permuted.history == pytest.approx(factors.history, rel=1e-8)
    torch.testing.assert_close(permuted.mixing, factors.mixing[order], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(permuted.to_tensor(), factors.to_tensor()[order], rtol=1e-6, atol=1e-8)


@hypothesis.settings(max_examples=8, deadline=None, derandomize=True)
@hypothesis.given(seed=strategies.integers(0, 10_000), scale=strategies.floats(1e-3, 1e3))
def test_the_basis_a_head_came_in_does_not_matter(seed, scale):
    query, key = random_heads(seed=seed)
    basis = torch.linalg.qr(Draw(seed + 1)(4, 5, 5))[0]
    factors = decompose(query, key, 7, max_iterations=5)
    turned = decompose(scale * basis @ query, basis @ key / scale, 7, max_iterations=5)
    assert turned.history == pytest.approx(factors.history, rel=1e-8)
    torch.testing.assert_close(turned.to_tensor(), factors.to_tensor(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("query_scale", "key_scale"), [(1e-30, 1e-30), (1e30, 1e30), (1e300, 1e-300), (1e150, 1e150), (1e-200, 1e-200)]
)
def test_the_size_of_the_weights_does_not_matter(query_scale, key_scale):
    query, key = random_heads()
    plain = decompose(query, key, 7, max_iterations=10)
    scaled = decompose(query * query_scale, key * key_scale, 7, max_iterations=10)
    assert scaled.history == pytest.approx(plain.history, rel=1e-9)
    torch.testing.assert_close(scaled.mixing, plain.mixing, rtol=1e-6, atol=1e-8)
    root = math.sqrt(query_scale) * math.sqrt(key_scale)
    torch.testing.assert_close(scaled.query / root, plain.query, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(scaled.key / root, plain.key, rtol=1e-6, atol=1e-8)


def test_the_answer_is_always_the_same_and_no_random_numbers_are_drawn():
    query, key = random_heads()
    before = torch.get_rng_state()
    first = decompose(query, key, 7)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    second = decompose(query, key, 7)
    assert torch.equal(first.query, second.query)
    assert torch.equal(first.mixing, second.mixing)
    assert first.history == second.history


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_low_precision_weights_are_decomposed_in_float64(dtype):
    query, key = (weight.to(dtype).requires_grad_() for weight in random_heads())
    factors, exact = decompose(query, key, 7), decompose(query.double(), key.double(), 7)
    assert {part.dtype for part in (factors.query, factors.key, factors.mixing)} == {torch.float64}
    assert torch.equal(factors.query, exact.query)
    assert not factors.query.requires_grad


def test_the_weights_are_left_alone():
    query, key = random_heads()
    kept = query.clone(), key.clone()
    for rank in (7, 20):
        decompose(query, key, rank).query.zero_()
        assert torch.equal(query, kept[0])
        assert torch.equal(key, kept[1])


# --- odd heads


def test_columns_are_balanced():
    query, key = random_heads()
    factors = decompose(query, 1e4 * key, 9)
    torch.testing.assert_close(factors.query.norm(dim=0), factors.key.norm(dim=0))
    strongest = factors.mixing.gather(0, factors.mixing.abs().argmax(0, keepdim=True))
    torch.testing.assert_close(strongest, torch.ones(1, 9, dtype=torch.float64))


@pytest.mark.parametrize("which", ["query", "key", "product"])
def test_heads_that_compute_nothing_come_out_as_zeros(which):
    query, key = random_heads()
    if which == "product":  # the parts cancel, up to rounding
        query, key = query[:, :1].expand(-1, 4, -1), key[:, :1] * torch.tensor([1.0, -1.0, 3.0, -3.0])[:, None]
    else:
        (query if which == "query" else key).zero_()
    factors = decompose(query, key, 7)
    assert (factors.relative_error, factors.iterations, factors.converged) == (0.0, 0, True)
    assert not factors.to_tensor().any()
    assert factors.query.shape == (14, 7)
    assert factors.mixing.shape == (4, 7)


def test_one_zero_head_among_others_stays_zero():
    query, key = random_heads()
    query[2] = 0
    factors = decompose(query, key, 15)  # all that the other three need
    assert factors.relative_error < 1e-6
    assert factors.to_tensor()[2].abs().max() < 1e-6


@pytest.mark.parametrize("rank", [1, 5, 12, 23])
def test_heads_larger_than_their_inputs(rank):
    query, key = random_heads(heads=3, head_dim=8, query_in=4, key_in=6)
    factors = decompose(query, key, rank)
    assert factors.query.shape == (4, rank)
    assert factors.relative_error == pytest.approx(direct_error(query, key, factors), abs=1e-7)
    assert rank < 12 or factors.relative_error < 1e-6
    assert all(part.isfinite().all() for part in (factors.query, factors.key, factors.mixing))


# --- when it stops


def test_converged_says_what_ended_the_sweeps():
    query, key = random_heads()
    limited = decompose(query, key, 7, max_iterations=2)
    assert (limited.converged, limited.iterations) == (False, 2)
    loose = decompose(query, key, 7, tolerance=0.5)
    assert (loose.converged, loose.iterations) == (True, 1)
    start = decompose(query, key, 7, max_iterations=0)
    assert (start.converged, start.iterations, len(start.history)) == (False, 0, 1)
    assert start.relative_error == pytest.approx(direct_error(query, key, start), abs=1e-9)


def test_tolerance_zero_goes_on_until_the_error_falls_no_more():
    query, key = planted_heads(4, 5, 14, 12, 2)
    factors = decompose(query, key, 2, max_iterations=10_000, tolerance=0.0)
    assert factors.converged
    assert factors.iterations < 10_000
    assert factors.relative_error < 1e-7


def test_the_full_array_is_never_formed():
    script = """
import resource, torch
from collab import decompose
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)
query, key = (torch.randn(64, 8, 4096, generator=generator) for _ in range(2))
decompose(query[:2, :, :64], key[:2, :, :64], 5, max_iterations=1)  # what the first call loads does not count
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
decompose(query, key, 256, max_iterations=2)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    # The array (64, 4096, 4096) has 8 GiB; one (64, 4096, 256) has 512 MiB; the factors have 16 MiB each.
    assert int(done.stdout) < 300


# --- what it refuses


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", [0, 1], ids=["query", "key"])
@pytest.mark.parametrize("rank", [7, 20])
def test_weights_that_are_not_finite_are_refused_by_name(which, value, rank):
    weights = random_heads()
    weights[which][1, 2, 3] = value
    with pytest.raises(ValueError, match=f"{('query', 'key')[which]} weights must be finite, got NaN or infinity"):
        decompose(*weights, rank)


@pytest.mark.parametrize(
    ("query_shape", "key_shape"),
    [((4, 12), (4, 12)), ((2, 3, 4, 5), (2, 3, 4, 5)), ((4, 5, 12), (3, 5, 12)), ((4, 5, 12), (4, 6, 12)),
     ((0, 5, 12), (0, 5, 12)), ((4, 5, 0), (4, 5, 12))],
)  # fmt: skip
def test_wrong_shapes_are_refused(query_shape, key_shape):
    with pytest.raises(ValueError, match=r"query and key must be \(head, head_dim, in\) with the same heads.*got \("):
        decompose(torch.zeros(query_shape), torch.zeros(key_shape), 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank must be an integer >= 1, got 0"),
        ({"rank": -2}, "rank must be an integer >= 1, got -2"),
        ({"rank": 2.5}, "rank must be an integer >= 1, got 2.5"),
        ({"max_iterations": -1}, "max_iterations must be an integer >= 0, got -1"),
        ({"tolerance": -0.1}, "tolerance must be >= 0, got -0.1"),
        ({"tolerance": math.nan}, "tolerance must be >= 0, got nan"),
        ({"dims_per_head": 0}, "dims_per_head must be an integer >= 1, got 0"),
        ({"dims_per_head": 1.5}, "dims_per_head must be an integer >= 1, got 1.5"),
        ({"method": "svd"}, "method must be one of shared, unshared, paper, got 'svd'"),
    ],
)
def test_wrong_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        decompose(*random_heads(), **({"rank": 3} | options))


def test_factors_print_without_their_history():
    text = repr(decompose(*random_heads(heads=1, head_dim=1, query_in=2, key_in=2), 1))
    assert isinstance(text, str)
    assert "relative_error=0.0" in text
    assert "history" not in text
    assert QueryKeyFactors.__doc__


@pytest.mark.parametrize("seed", [90, 176, 663])
def test_starts_from_few_inputs_are_as_good_as_the_curve_says(seed):
    draw = Draw(seed)
    query, key = draw(6, 2, 3), draw(6, 2, 2)
    curve = error_curve(query, key)
    for rank in range(1, 12):
        assert decompose(query, key, rank, max_iterations=0).relative_error <= float(curve[rank]) + 1e-4
