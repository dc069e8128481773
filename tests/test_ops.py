"""The operation: every implementation computes what the reference defines, and says why it refuses inputs."""

import itertools

import pytest
import torch

from collab import ops
from collab.ops import reference
from collab.ops.ranking import rank
from collab.tracing import is_exporting

SCALE = 0.3
PORTABLE = [name for name in ops.IMPLEMENTATIONS if name not in ("fused", "cudnn")]
"""Implementations for any device and type; tests/test_fused.py and tests/test_cudnn.py have the same for the others."""

ODD_SHAPES = [
    # batch, query, key, shared, heads, value_dim
    (5, 123, 77, 37, 3, 11),
    (1, 1, 1, 1, 1, 1),
    (2, 1, 33, 8, 4, 8),
    (3, 17, 5, 2, 7, 3),
    (2, 31, 31, 64, 1, 20),
]


def make_inputs(batch, queries, keys, shared, heads, value_dim, *, content=True, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    return (
        draw(batch, queries, shared),
        draw(batch, keys, shared + (heads if content else 0)),
        draw(batch, heads, keys, value_dim),
        draw(heads, shared),
    )


def by_hand(query, key, value, mixing, mask=None, causal=False):
    """One query of one head at a time, from the formula: the check on the reference itself."""
    batch, queries, shared = query.shape
    heads, keys = len(mixing), key.shape[1]
    output = value.new_zeros(batch, heads, queries, value.shape[-1])
    weights = value.new_zeros(batch, heads, queries, keys)
    mask = None if mask is None else mask.expand(batch, heads, queries, keys)
    for b, h, q in itertools.product(range(batch), range(heads), range(queries)):
        scores = []
        for k in range(keys):
            score = sum(query[b, q, d] * mixing[h, d] * key[b, k, d] for d in range(shared))
            if key.shape[-1] > shared:
                score = score + key[b, k, shared + h]
            score = score * SCALE
            if mask is not None:
                addend = mask[b, h, q, k]
                score = score + (addend if mask.dtype != torch.bool else (0.0 if addend else -torch.inf))
            scores.append(-torch.inf if causal and k > q else score)
        scores = torch.as_tensor(scores, dtype=value.dtype)
        if (scores > -torch.inf).any():
            exponentials = (scores - scores.max()).exp()
            weights[b, h, q] = exponentials / exponentials.sum()
        output[b, h, q] = weights[b, h, q] @ value[b, h]
    return output, weights


def masks(batch, heads, queries, keys, dtype=torch.float64):
    """Every kind of mask, by name."""
    generator = torch.Generator().manual_seed(7)
    allowed = torch.rand(batch, heads, queries, keys, generator=generator) > 0.4
    addend = torch.randn(batch, heads, queries, keys, generator=generator, dtype=torch.float64).to(dtype)
    nothing = allowed.clone()
    nothing[0, :, 0] = False
    return {
        "none": None,
        "boolean": allowed,
        "boolean (query, key)": allowed[0, 0],
        "padding (batch, 1, 1, key)": allowed[:, :1, :1],
        "boolean (1, head, query, 1)": allowed[:1, :, :, :1],
        "additive": addend,
        "additive (1, head, query, key)": addend[:1],
        "additive (query, key) with -inf": addend[0, 0].masked_fill(~allowed[0, 0], -torch.inf),
        "boolean with a row of nothing": nothing,
        "additive with a row of nothing": addend.masked_fill(~nothing, -torch.inf),
    }


MASK_NAMES = list(masks(1, 1, 1, 1))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MASK_NAMES)
def test_every_implementation_computes_the_formula_under_every_mask(name, causal):
    inputs = make_inputs(2, 4, 5, 3, 2, 3)
    mask = masks(2, 2, 4, 5)[name]
    expected, expected_weights = by_hand(*inputs, mask=mask, causal=causal)
    output, weights = ops.attention(*inputs, scale=SCALE, mask=mask, causal=causal, need_weights=True)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-12)
    for implementation in PORTABLE:
        fast, none = ops.attention(*inputs, scale=SCALE, mask=mask, causal=causal, implementation=implementation)
        torch.testing.assert_close(fast, expected, rtol=0, atol=1e-12)
        assert none is None


@pytest.mark.parametrize("shape", [(2, 6, 3), (2, 3, 6)], ids=["more queries", "more keys"])
def test_causal_lets_query_i_see_keys_up_to_i_whatever_the_lengths(shape):
    batch, queries, keys = shape
    inputs = make_inputs(batch, queries, keys, 4, 3, 2)
    tril = torch.ones(queries, keys, dtype=torch.bool).tril()
    for implementation in PORTABLE:
        causal, _ = ops.attention(*inputs, scale=SCALE, causal=True, implementation=implementation)
        masked, _ = ops.attention(*inputs, scale=SCALE, mask=tril, implementation=implementation)
        torch.testing.assert_close(causal, masked, rtol=0, atol=1e-12)


FAST = [ops.IMPLEMENTATIONS[name] for name in PORTABLE if name != "reference"]


@pytest.mark.parametrize("content", [True, False], ids=["content", "no content"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", ODD_SHAPES, ids=str)
@pytest.mark.parametrize("module", FAST, ids=lambda module: module.NAME)
def test_every_implementation_equals_the_reference_on_odd_shapes(module, shape, causal, content):
    inputs = make_inputs(*shape, content=content)
    batch, queries, keys, _, heads, value_dim = shape
    for name in ("none", "padding (batch, 1, 1, key)", "additive"):
        mask = masks(batch, heads, queries, keys)[name]
        expected, _ = reference.attention(*inputs, scale=SCALE, mask=mask, causal=causal)
        output, _ = module.attention(*inputs, scale=SCALE, mask=mask, causal=causal)
        assert output.shape == (batch, heads, queries, value_dim)
        torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-12)


def error(output, exact):
    return (output.double() - exact).abs().max().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", ODD_SHAPES, ids=str)
@pytest.mark.parametrize("module", FAST, ids=lambda module: module.NAME)
def test_errs_at_most_twice_as_much_as_the_reference_in_the_same_dtype(module, shape, dtype):
    inputs = make_inputs(*shape, dtype=dtype)
    batch, queries, keys, _, heads, _ = shape
    mask = masks(batch, heads, queries, keys)["padding (batch, 1, 1, key)"]
    exact, _ = reference.attention(*(part.double() for part in inputs), scale=SCALE, mask=mask)
    plain, _ = reference.attention(*inputs, scale=SCALE, mask=mask)
    fast, _ = module.attention(*inputs, scale=SCALE, mask=mask)
    assert fast.dtype == plain.dtype == dtype
    # One rounding of the largest output is what even an exact algorithm may lose.
    rounding = exact.abs().max().item() * torch.finfo(dtype).eps
    assert error(fast, exact) <= 2 * error(plain, exact) + rounding
    assert error(plain, exact) <= 64 * rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("implementation", PORTABLE)
def test_huge_scores_pick_the_largest_key(implementation, dtype):
    query, key, value, mixing = make_inputs(2, 3, 6, 4, 2, 5, dtype=dtype)
    output, _ = ops.attention(query * 1e4, key * 1e4, value, mixing, scale=1.0, implementation=implementation)
    scores = torch.einsum("bqd,hd,bkd->bhqk", query.double() * 1e4, mixing.double(), key[..., :4].double() * 1e4)
    scores = scores + key[..., 4:].double().mT[:, :, None] * 1e4
    expected = torch.gather(value, 2, scores.argmax(-1)[..., None].expand(-1, -1, -1, 5))
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("implementation", PORTABLE)
@pytest.mark.parametrize("name", [name for name in MASK_NAMES if "nothing" in name])
def test_a_row_with_nothing_to_attend_to_gives_zeros_and_finite_gradients(name, implementation):
    inputs = [part.requires_grad_() for part in make_inputs(2, 4, 5, 3, 2, 3)]
    mask = masks(2, 2, 4, 5)[name]
    output, _ = ops.attention(*inputs, scale=SCALE, mask=mask, causal=True, implementation=implementation)
    assert (output[0, :, 0] == 0).all()
    output.square().sum().backward()
    assert all(part.grad.isfinite().all() and part.grad.any() for part in inputs)
    assert (inputs[0].grad[0, 0] == 0).all()


@pytest.mark.parametrize("implementation", PORTABLE)
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_match_finite_differences(implementation, causal):
    inputs = [part.requires_grad_() for part in make_inputs(2, 3, 4, 3, 2, 2)]
    bias = masks(2, 2, 3, 4)["additive (1, head, query, key)"].requires_grad_()  # a position bias is learned, too

    def attend(query, key, value, mixing, mask):
        return ops.attention(
            query, key, value, mixing, scale=SCALE, mask=mask, causal=causal, implementation=implementation
        )[0]

    assert torch.autograd.gradcheck(attend, (*inputs, bias))


@pytest.mark.parametrize("implementation", PORTABLE)
def test_a_mask_of_another_float_type_is_cast(implementation):
    inputs = make_inputs(2, 4, 5, 3, 2, 3, dtype=torch.bfloat16)
    mask = masks(2, 2, 4, 5, dtype=torch.bfloat16)["additive"]
    expected, _ = ops.attention(*inputs, scale=SCALE, mask=mask, implementation=implementation)
    output, _ = ops.attention(*inputs, scale=SCALE, mask=mask.float(), implementation=implementation)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, expected)


@pytest.mark.parametrize("implementation", PORTABLE)
def test_dropout_drops_at_its_rate_and_keeps_the_mean(implementation):
    torch.manual_seed(0)
    query, key, _, mixing = make_inputs(4, 50, 60, 4, 3, 1, dtype=torch.float32)
    value = torch.eye(60).expand(4, 3, 60, 60)  # so the output is the weights themselves
    weights, _ = ops.attention(query, key, value, mixing, scale=SCALE, implementation=implementation)
    dropped, _ = ops.attention(query, key, value, mixing, scale=SCALE, dropout=0.25, implementation=implementation)
    kept = dropped != 0
    assert abs(kept.float().mean().item() - 0.75) < 0.01
    torch.testing.assert_close(dropped[kept], weights[kept] / 0.75)


def test_choice_is_the_first_that_does_not_refuse_and_can_be_forced():
    inputs = make_inputs(1, 2, 2, 2, 1, 1)
    assert list(ops.IMPLEMENTATIONS) == ["fused", "cudnn", "sdpa", "padded", "matmul", "reference"]
    options = {"dims": None, "mask": None, "causal": False, "dropout": 0.0, "need_weights": True}
    names = rank(*inputs, **options).names
    assert sorted(names) == sorted(ops.IMPLEMENTATIONS)
    taking = [name for name in names if not ops.IMPLEMENTATIONS[name].why_not(*inputs, **options)]
    assert ops.choose(*inputs, need_weights=True) == taking[0]
    assert not {"sdpa", "padded"} & set(taking)
    assert ops.choose(*inputs, implementation="reference") == "reference"
    assert ops.attention(*inputs, scale=1.0, implementation="reference")[1] is None


def test_a_forced_implementation_that_refuses_gives_every_reason():
    inputs = [part.long() for part in make_inputs(1, 2, 2, 2, 1, 1)]
    with pytest.raises(ValueError, match=r"sdpa: it never holds.*need_weights=True.*floating point inputs.*int64"):
        ops.choose(*inputs, need_weights=True, implementation="sdpa")


def test_an_unknown_implementation_names_the_known():
    with pytest.raises(ValueError, match=r"'auto' or one of \['fused', 'cudnn', .*\], got 'flash'"):
        ops.attention(*make_inputs(1, 2, 2, 2, 1, 1), scale=1.0, implementation="flash")


@pytest.mark.parametrize(
    ("part", "index", "message"),
    [
        (torch.zeros(2, 3), 0, r"must be \(batch, query, shared\).*got \(2, 3\)"),
        (torch.zeros(2, 4, 5), 0, "query must have mixing's 3 shared dimensions, got 5"),
        (torch.zeros(2, 5, 4), 1, "key must have 3 shared dimensions, or 5 with the content scores of 2 heads, got 4"),
        (torch.zeros(1, 5, 5), 1, "key and value must have query's batch of 2, got 1 and 2"),
        (torch.zeros(3, 2, 5, 3), 2, "key and value must have query's batch of 2, got 2 and 3"),
        (torch.zeros(2, 1, 5, 3), 2, "value must have mixing's 2 heads, got 1"),
        (torch.zeros(2, 2, 6, 3), 2, "value must be as long as key, which has 5 tokens, got 6"),
    ],
)
def test_wrong_shapes_are_named(part, index, message):
    inputs = list(make_inputs(2, 4, 5, 3, 2, 3, dtype=torch.float32))
    inputs[index] = part
    with pytest.raises(ValueError, match=message):
        ops.attention(*inputs, scale=1.0)


@pytest.mark.parametrize("shape", [(5,), (4, 6), (3, 1, 4, 5), (2, 3, 4, 5), (2, 4, 5, 1), (1, 2, 2, 4, 5)], ids=str)
def test_a_mask_that_does_not_fit_names_the_shape_it_should_have(shape):
    with pytest.raises(ValueError, match=r"broadcastable to \(batch, head, query, key\), here \(2, 2, 4, 5\).*got \("):
        ops.attention(*make_inputs(2, 4, 5, 3, 2, 3), scale=1.0, mask=torch.ones(shape, dtype=torch.bool))


def test_a_mask_of_integers_is_refused():
    with pytest.raises(ValueError, match=r"mask must be boolean .* or floating point, got torch.int64"):
        ops.attention(*make_inputs(2, 4, 5, 3, 2, 3), scale=1.0, mask=torch.ones(4, 5, dtype=torch.int64))


def test_compiled_code_gets_what_is_fast_and_exported_code_what_is_portable():
    class Asks(torch.nn.Module):
        def forward(self, query):
            return query + is_exporting()

    zero = torch.zeros(1)
    assert not torch.compile(Asks(), fullgraph=True, backend="eager")(zero).any()
    for strict in (False, True):
        assert torch.export.export(Asks(), (zero,), strict=strict).module()(zero).all()
