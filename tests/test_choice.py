"""Which implementation runs where: rules by device and by cost, compiled and exported code, and blocks of products."""

import pytest
import torch
from torch import nn

from collab import CollaborativeAttention, ops
from collab.ops import choice, matmul, padded, reference, sdpa
from collab.ops import ranking as ranking_module
from collab.ops.ranking import COMPILED_LENGTH, ORDER, PORTABLE, rank

SCALE = 0.3


def make_inputs(batch, queries, keys, shared=8, heads=3, value_dim=4, *, dtype=torch.float32, device="cpu", own=None):
    """Query, key with content scores, value, mixing; and dims where heads use `own` dimensions."""
    generator = torch.Generator().manual_seed(0)

    def draw(*size):
        if device == "meta":
            return torch.empty(size, dtype=dtype, device="meta")
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    dims = (
        None if own is None else torch.stack([torch.randperm(shared, generator=generator)[:own] for _ in range(heads)])
    )
    inputs = (
        draw(batch, queries, shared), draw(batch, keys, shared + heads), draw(batch, heads, keys, value_dim),
        draw(heads, own or shared),
    )  # fmt: skip
    return inputs, None if dims is None else dims.to(ops.DIMS_DTYPE)


# --- ranking


def test_other_devices_have_the_usual_order():
    ranking = rank(*make_inputs(1, 2, 3, device="meta")[0])
    assert (ranking.names, ranking.costs) == (ORDER, {})
    assert str(ranking) == "the usual order, nothing was measured on meta"
    assert ops.choose(*make_inputs(1, 2, 3, device="meta")[0]) == "sdpa"


class OnCuda:
    """A tensor that says it is on CUDA, where there is no such device."""

    device = torch.device("cuda")
    shape, dtype, requires_grad = (1, 2, 8), torch.float32, False


def test_on_cuda_kernels_for_shared_keys_come_first():
    inputs, _ = make_inputs(1, 2, 3)
    ranking = rank(OnCuda(), *inputs[1:])
    assert ranking.names == ORDER
    assert ranking.names[0] == "fused"
    assert "CUDA" in str(ranking)


def test_what_is_exported_runs_on_any_device():
    class Attend(nn.Module):
        def forward(self, query, key, value, mixing):
            seen.append(rank(query, key, value, mixing).names)
            return ops.attention(query, key, value, mixing, scale=SCALE)[0]

    seen = []
    inputs, _ = make_inputs(2, 5, 5)
    exported = torch.export.export(Attend(), inputs)
    assert seen[-1] == PORTABLE
    assert any("scaled_dot_product" in str(node.target) for node in exported.graph.nodes)
    expected, _ = reference.attention(*inputs, scale=SCALE)
    torch.testing.assert_close(exported.module()(*inputs), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("own", [None, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_costs_on_a_cpu_order_the_names(causal, own, dtype, monkeypatch):
    monkeypatch.setattr(ranking_module, "HAS_FLOAT16", True)
    for tokens, shared in ((1, 8), (128, 32), (1024, 128), (4, 700)):
        inputs, dims = make_inputs(1, tokens, tokens, shared, dtype=dtype, own=own)
        ranking = rank(*inputs, dims=dims, causal=causal)
        assert sorted(ranking.names) == sorted(ORDER)
        assert list(ranking.names[: len(ranking.costs)]) == sorted(ranking.costs, key=ranking.costs.get)
        assert set(ranking.costs) == {"matmul", "padded"} | ({"sdpa"} if own else set())
        assert all(f"{name} {cost:,.0f}" in str(ranking) for name, cost in ranking.costs.items())


def test_long_inputs_of_few_dimensions_are_for_flash_attention_and_wide_ones_for_plain_products():
    assert rank(*make_inputs(1, 1024, 1024, 32, 12, 64)[0]).names[0] == "padded"
    assert rank(*make_inputs(1, 128, 128, 384, 6, 32)[0]).names[0] == "matmul"
    inputs, dims = make_inputs(1, 1024, 1024, 384, 6, 32, own=32)
    assert rank(*inputs, dims=dims).names[0] == "sdpa"


def test_float16_is_for_sdpa_where_there_are_no_products_of_it(monkeypatch):
    monkeypatch.setattr(ranking_module, "HAS_FLOAT16", False)
    short, _ = make_inputs(1, 128, 128, 32, 12, 64, dtype=torch.float16)
    long, _ = make_inputs(1, 1024, 1024, 32, 12, 64, dtype=torch.float16)
    sparse, dims = make_inputs(1, 1024, 1024, 64, 12, 64, dtype=torch.float16, own=32)
    assert [rank(*inputs).names[0] for inputs in (short, long)] == ["sdpa", "padded"]
    assert rank(*sparse, dims=dims).names[0] == rank(*long, dropout=0.1).names[0] == "sdpa"
    assert rank(long[0].requires_grad_(), *long[1:]).names[0] == "sdpa"
    assert sorted(rank(*long).names) == sorted(ORDER)
    assert "float16" in str(rank(*short))


def test_half_types_are_for_flash_attention_where_it_has_tiles(monkeypatch):
    inputs, _ = make_inputs(1, 128, 128, 128, 12, 64, dtype=torch.bfloat16)
    for has_tiles, first in ((True, "padded"), (False, "matmul")):
        monkeypatch.setattr(ranking_module, "HAS_TILES", has_tiles)
        assert rank(*inputs).names[0] == first


def test_flash_attention_is_not_counted_on_where_it_cannot_run():
    inputs, _ = make_inputs(1, 1024, 1024, 32, 12, 64)
    assert set(rank(*inputs, dropout=0.1).costs) == {"matmul"}
    mask = torch.zeros(1024, 1024, requires_grad=True)
    assert set(rank(*inputs, mask=mask).costs) == {"matmul"}
    with torch.no_grad():
        assert "padded" in rank(*inputs, mask=mask).costs
    # Sparse heads by SDPA save no passes over the scores either, then, and gain by the operations alone.
    for shared, first in ((128, "matmul"), (700, "sdpa")):
        inputs, dims = make_inputs(1, 1024, 1024, shared, 12, 64, own=64)
        assert rank(*inputs, dims=dims).names[0] == "sdpa"
        assert rank(*inputs, dims=dims, dropout=0.1).names[0] == first


def test_compiled_code_is_compiled_for_all_lengths_at_once():
    layer = CollaborativeAttention(32, 4, 12)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(layer, backend=backend, dynamic=True)
    for tokens in (5, 60, COMPILED_LENGTH + 3):
        x = torch.randn(2, tokens, 32)
        torch.testing.assert_close(compiled(x), layer(x), atol=1e-5, rtol=1e-5)
    assert len(graphs) == 1


# --- choice


def test_a_choice_tells_the_rule_the_name_that_was_asked_for_and_who_forced_it():
    inputs, _ = make_inputs(1, 2, 3)
    made = choice.choice_for(*inputs)
    assert made.why == str(rank(*inputs))
    assert made.name not in made.against
    assert choice.choice_for(*inputs, implementation="sdpa").why == "implementation='sdpa' asks for it"
    with ops.use_implementation("reference"):
        assert choice.choice_for(*inputs).why == "use_implementation('reference') asks for it"
        assert choice.choice_for(*inputs, implementation="sdpa").name == "sdpa"
        assert ops.choose(*inputs) == "reference"


def test_integers_are_refused_by_all_but_the_definition():
    inputs = [part.long() for part in make_inputs(1, 2, 3)[0]]
    assert ops.choose(*inputs) == "reference"
    with pytest.raises(ValueError, match=r"matmul: it needs floating point inputs, got torch\.int64"):
        ops.choose(*inputs, implementation="matmul")


@pytest.mark.parametrize("sizes", [(0, 3, 4), (2, 0, 4), (2, 3, 0)], ids=["batch", "queries", "keys"])
@pytest.mark.parametrize("name", ["auto", "sdpa", "padded", "matmul", "reference"])
def test_nothing_in_gives_zeros_or_nothing_out(name, sizes):
    inputs, _ = make_inputs(*sizes)
    output, _ = ops.attention(*inputs, scale=SCALE, implementation=name)
    assert output.shape == (sizes[0], 3, sizes[1], 4)
    assert not output.any()


# --- plain products in blocks


def expected_of(inputs, **options):
    return reference.attention(*(part.double() for part in inputs), scale=SCALE, **options)[0]


MASKS = {
    "none": None,
    "padding": torch.arange(90) < torch.tensor([90, 70, 50])[:, None, None, None],
    "square": torch.rand(3, 1, 70, 90, generator=torch.Generator().manual_seed(1)) > 0.4,
    "one for each head": torch.randn(1, 3, 70, 90, generator=torch.Generator().manual_seed(1)),
    "a row of nothing": torch.arange(70)[:, None].expand(70, 90) != 33,
}


# Blocks of a few queries of one sequence, of one query, of two whole sequences, and of one.
@pytest.mark.parametrize("block", [90 * 3 * 16, 1, 90 * 3 * 70 * 2, 90 * 3 * 70])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_give_what_the_whole_gives(name, block, causal, monkeypatch):
    inputs, _ = make_inputs(3, 70, 90)
    mask = MASKS[name]
    monkeypatch.setattr(matmul, "BLOCK", block)
    expected = expected_of(inputs, mask=mask, causal=causal)
    with torch.no_grad():  # in place
        output, _ = matmul.attention(*inputs, scale=SCALE, mask=mask, causal=causal)
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)
    leaves = [part.clone().requires_grad_() for part in inputs]
    output, _ = matmul.attention(*leaves, scale=SCALE, mask=mask, causal=causal)
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)
    found = torch.autograd.grad(output.square().sum(), leaves)
    wide = [part.double().requires_grad_() for part in inputs]
    own = reference.attention(*wide, scale=SCALE, mask=mask, causal=causal)[0]
    for mine, exact in zip(found, torch.autograd.grad(own.square().sum(), wide), strict=True):
        torch.testing.assert_close(mine.double(), exact, atol=2e-4, rtol=2e-4)


def test_what_is_really_long_is_done_in_blocks(monkeypatch):
    inputs, _ = make_inputs(1, 600, 700, heads=3)
    assert matmul.BLOCK < 600 * 700 * 3
    sizes = []
    whole = matmul._attend_in_place
    monkeypatch.setattr(
        matmul, "_attend_in_place", lambda query, *rest: sizes.append(len(query[0])) or whole(query, *rest)
    )
    with torch.no_grad():
        output, _ = matmul.attention(*inputs, scale=SCALE)
    assert sum(sizes) == 600
    assert max(sizes) * 700 * 3 <= matmul.BLOCK
    torch.testing.assert_close(output.double(), expected_of(inputs), atol=1e-5, rtol=1e-5)


def test_dropout_in_blocks_drops_each_weight_by_itself(monkeypatch):
    monkeypatch.setattr(matmul, "BLOCK", 60 * 3 * 20)
    (query, key, _, mixing), _ = make_inputs(4, 50, 60)
    value = torch.eye(60).expand(4, 3, 60, 60)  # so the output is the weights themselves
    torch.manual_seed(0)
    with torch.no_grad():
        weights, _ = matmul.attention(query, key, value, mixing, scale=SCALE)
        dropped, _ = matmul.attention(query, key, value, mixing, scale=SCALE, dropout=0.25)
    kept = dropped != 0
    assert abs(kept.float().mean().item() - 0.75) < 0.01
    assert not torch.equal(kept[:, :, :20], kept[:, :, 20:40])
    torch.testing.assert_close(dropped[kept], weights[kept] / 0.75)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block", [1, 2**19])
def test_half_types_err_at_most_twice_as_much_as_the_definition(dtype, block, monkeypatch):
    monkeypatch.setattr(matmul, "BLOCK", block)
    inputs, dims = make_inputs(2, 40, 90, 40, own=9, dtype=dtype)
    exact = expected_of(inputs, dims=dims)
    plain = reference.attention(*inputs, scale=SCALE, dims=dims)[0]
    with torch.no_grad():
        output = matmul.attention(*inputs, scale=SCALE, dims=dims)[0]
    rounding = torch.finfo(dtype).eps * exact.abs().max()
    assert output.dtype == dtype
    assert (output.double() - exact).abs().max() <= 2 * (plain.double() - exact).abs().max() + rounding


@pytest.mark.parametrize("name", ["sdpa", "padded", "matmul", "reference"])
def test_float16_holds_the_mean_of_values_whose_sum_it_does_not(name):
    (query, key, value, mixing), _ = make_inputs(1, 100, 1000, dtype=torch.float16)
    assert matmul.BLOCK // 8 < 3 * 100 * 1000  # in place
    with torch.no_grad():
        output, _ = ops.attention(query * 0, key * 0, value * 0 + 300, mixing, scale=SCALE, implementation=name)
    torch.testing.assert_close(output, torch.full_like(output, 300), atol=0.5, rtol=0)


def test_products_in_place_leave_the_inputs_alone():
    inputs, _ = make_inputs(2, 200, 200)
    mask = torch.randn(2, 1, 200, 200)
    before = [part.clone() for part in (*inputs, mask)]
    with torch.no_grad():
        matmul.attention(*inputs, scale=SCALE, mask=mask)
    assert all(torch.equal(part, was) for part, was in zip((*inputs, mask), before, strict=True))


# --- one width for all


@pytest.mark.parametrize(("shared", "value_dim", "width"), [(8, 4, 16), (13, 16, 16), (14, 16, 32), (4, 33, 48)])
def test_what_is_narrower_is_filled_up_to_a_common_width(shared, value_dim, width, monkeypatch):
    inputs, dims = make_inputs(2, 9, 11, shared, 3, value_dim, own=3)
    assert padded.common_width(inputs[1], inputs[2]) == width
    shapes = []
    attend = sdpa.attend
    monkeypatch.setattr(
        sdpa, "attend", lambda *parts: shapes.extend(part.shape[-1] for part in parts[:3]) or attend(*parts)
    )
    output, _ = padded.attention(*inputs, scale=SCALE, dims=dims)
    assert shapes == [width] * 3
    torch.testing.assert_close(output.double(), expected_of(inputs, dims=dims), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["sdpa", "padded"])
def test_masks_of_three_dimensions_reach_sdpa_in_four(name, monkeypatch):
    inputs, _ = make_inputs(2, 9, 11)
    mask = torch.rand(3, 9, 11, generator=torch.Generator().manual_seed(0)) > 0.3
    seen = []
    attend = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        sdpa.functional, "scaled_dot_product_attention",
        lambda *parts, **options: seen.append(options["attn_mask"].dim()) or attend(*parts, **options),
    )  # fmt: skip
    output, _ = ops.attention(*inputs, scale=SCALE, mask=mask, implementation=name)
    assert seen == [4]
    torch.testing.assert_close(output.double(), expected_of(inputs, mask=mask), atol=1e-5, rtol=1e-5)
