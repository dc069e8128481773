"""The fused kernels: against the definition in float64, on a CUDA device or in Triton's interpreter."""

import os

import pytest
import torch

from collab import CollaborativeAttention
from collab.ops import fused, reference

pytest.importorskip("triton")
from collab.ops import fused_backward, fused_forward, fused_short_backward, fused_tiles
from collab.ops.fused_tiles import BackwardTiles, Tiles, backward_tiles, forward_tiles, split_width

pytestmark = [
    pytest.mark.gpu,
    # The interpreter computes in numpy, which warns of what padding holds.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
if not ON_GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1", allow_module_level=True)

SCALE = 0.3
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# batch, query, key, shared, heads, value_dim
ODD_SHAPES = [
    (2, 123, 77, 37, 3, 11),
    (1, 1, 1, 1, 1, 1),
    (2, 1, 33, 8, 4, 8),
    (3, 17, 5, 2, 7, 3),
    (2, 31, 40, 70, 1, 20),
]
LARGE_SHAPES = [
    (2, 128, 128, 64, 12, 64),
    (2, 512, 512, 64, 12, 64),
    (1, 300, 700, 128, 12, 64),
    (2, 128, 128, 256, 12, 64),
    (2, 100, 200, 384, 6, 32),
    (1, 260, 260, 768, 4, 128),
    (1, 257, 513, 200, 18, 64),
    (3, 60, 100, 116, 12, 64),
    (2, 50, 50, 300, 6, 128),
    (2, 128, 128, 384, 12, 128),
]


@pytest.fixture(autouse=True)
def _full_precision():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def make_inputs(batch, queries, keys, shared, heads, value_dim, *, content=True, dtype=torch.float32, seed=0, own=None):
    """Queries, keys and values as one projection would give them, side by side, mixing, and dims for sparse mixing."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(DEVICE, dtype)

    width = shared + (heads if content else 0)
    of_queries = draw(batch, queries, shared + 5)
    of_keys = draw(batch, keys, width + heads * value_dim)
    value = of_keys[..., width:].unflatten(-1, (heads, value_dim)).transpose(1, 2)
    dims = None
    if own is not None:
        dims = torch.stack([torch.randperm(shared, generator=generator)[:own].sort().values for _ in range(heads)])
        dims = dims.to(DEVICE, torch.int32)
    return (of_queries[..., 3 : 3 + shared], of_keys[..., :width], value, draw(heads, own or shared)), dims


def run(module, inputs, gradient, dims=None, **options):
    """Output and gradients of the four inputs."""
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    output, _ = module.attention(*inputs, scale=SCALE, dims=dims, **options)
    return (output, *torch.autograd.grad(output, inputs, gradient.to(output)))


def run_in_other_order(inputs, gradient, order, **options):
    """What `run` gives of the definition if its products sum the shared dimensions in another order."""
    query, key, value, mixing = inputs
    back = order.argsort()
    key = torch.cat((key[..., order], key[..., len(order) :]), dim=-1)
    output, of_query, of_key, of_value, of_mixing = run(
        reference, (query[..., order], key, value, mixing[:, order]), gradient, **options
    )
    of_key = torch.cat((of_key[..., back], of_key[..., len(order) :]), dim=-1)
    return output, of_query[..., back], of_key, of_value, of_mixing[:, back]


def check(inputs, dims=None, mask=None, orders=1, **options):
    """Errors of the output and every gradient are at most twice those of the definition in the same dtype.

    The largest error of thousands of numbers is chance: from one order of summing to another that of the definition
    itself is up to three times as large in float32, and so the definition would not always pass beside itself. With
    `orders` it is the largest of so many, and the mean of squares, which hardly depends on the order, counts too.
    """
    shape = (*inputs[2].shape[:2], inputs[0].shape[1], inputs[2].shape[3])
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(inputs[0])
    wide = mask.double() if mask is not None and mask.dtype != torch.bool else mask
    exact = run(reference, [part.double() for part in inputs], gradient, dims, mask=wide, **options)
    plain = run(reference, inputs, gradient, dims, mask=mask, **options)
    found = run(fused, inputs, gradient, dims, mask=mask, **options)
    generator = torch.Generator().manual_seed(2)
    others = [torch.randperm(inputs[0].shape[-1], generator=generator).to(DEVICE) for _ in range(orders - 1)]
    plains = [plain, *(run_in_other_order(inputs, gradient, order, mask=mask, **options) for order in others)]
    eps = torch.finfo(inputs[0].dtype).eps
    names = ("output", "query", "key", "value", "mixing")
    for name, truth, mine, *owns in zip(names, exact, found, *plains, strict=True):
        own = owns[0]
        assert mine.dtype == own.dtype
        assert mine.shape == truth.shape
        assert mine.isfinite().all(), name
        # One rounding of the largest number is what even an exact algorithm may lose; inputs are of the order of one.
        rounding = 2 * eps * truth.abs().max().clamp(min=1) + 2e-6
        largest = float(max((each.double() - truth).abs().max() for each in owns))
        error = float((mine.double() - truth).abs().max())
        assert error <= 2 * largest + rounding, f"{name}: {error:.3g}, the definition {largest:.3g}"
        if orders > 1:
            usual = float(max((each.double() - truth).square().mean() for each in owns)) ** 0.5
            error = float((mine.double() - truth).square().mean()) ** 0.5
            assert error <= 2 * usual + eps, f"{name}: {error:.3g} in the mean, the definition {usual:.3g}"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("content", [True, False], ids=["content", "no content"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ODD_SHAPES, ids=str)
def test_errs_at_most_twice_as_much_as_the_definition(shape, dtype, content, causal):
    inputs, _ = make_inputs(*shape, content=content, dtype=dtype)
    check(inputs, causal=causal)


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device: too large for the interpreter")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*LARGE_SHAPES, (5, 123, 77, 37, 3, 11)], ids=str)
def test_errs_at_most_twice_as_much_at_real_sizes(shape, dtype, causal):
    inputs, _ = make_inputs(*shape, dtype=dtype)
    check(inputs, causal=causal, orders=4 if dtype == torch.float32 else 1)


def test_another_order_of_summing_is_the_same_definition():
    inputs, _ = make_inputs(2, 9, 7, 8, 3, 5, dtype=torch.float64)
    gradient = torch.randn(2, 3, 9, 5)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    here, there = run(reference, inputs, gradient), run_in_other_order(inputs, gradient, order)
    for left, right in zip(here, there, strict=True):
        torch.testing.assert_close(left, right)


def masks(batch, heads, queries, keys, dtype):
    """Every kind of mask, by name."""
    generator = torch.Generator().manual_seed(7)
    allowed = torch.rand(batch, heads, queries, keys, generator=generator) > 0.4
    addend = torch.randn(batch, heads, queries, keys, generator=generator).to(dtype)
    nothing = allowed.clone()
    nothing[0, :, 0] = False
    lowest = torch.zeros(batch, 1, queries, keys, dtype=dtype).masked_fill(~allowed[:, :1], torch.finfo(dtype).min)
    found = {
        "boolean": allowed,
        "boolean (query, key)": allowed[0, 0],
        "padding (batch, 1, 1, key)": allowed[:, :1, :1],
        "boolean (1, head, query, 1)": allowed[:1, :, :, :1],
        "additive": addend,
        "additive (1, head, query, key)": addend[:1],
        "additive (query, key) with -inf": addend[0, 0].masked_fill(~allowed[0, 0], -torch.inf),
        "additive with the lowest number": lowest,
        "boolean with a row of nothing": nothing,
        "additive with a row of nothing": addend.masked_fill(~nothing, -torch.inf),
    }
    return {name: mask.to(DEVICE) for name, mask in found.items()}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", masks(1, 1, 1, 1, torch.float32))
def test_every_mask(name, dtype, causal):
    inputs, _ = make_inputs(2, 33, 41, 20, 3, 16, dtype=dtype)
    check(inputs, mask=masks(2, 3, 33, 41, dtype)[name], causal=causal)


@pytest.mark.parametrize("keys", [20, 140])
@pytest.mark.parametrize(("own", "dtype"), [(48, torch.float32), (130, torch.bfloat16)], ids=str)
def test_sparse_heads_of_two_tiles(own, dtype, keys):
    assert split_width(own, dtype.itemsize)[1]
    inputs, dims = make_inputs(1, 17, keys, 140, 2, 16, dtype=dtype, own=own)
    check(inputs, dims=dims)


def test_dims_are_read_as_they_lie():
    inputs, dims = make_inputs(1, 9, 140, 40, 3, 16, own=9)
    check(inputs, dims=dims.T.contiguous().T)
    check(inputs, dims=dims.long())


@pytest.mark.parametrize("keys", [41, 150])
@pytest.mark.parametrize("name", ["none", "padding (batch, 1, 1, key)", "boolean with a row of nothing"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sparse_mixing(dtype, name, keys):
    inputs, dims = make_inputs(2, 33, keys, 40, 3, 16, dtype=dtype, own=9)
    check(inputs, dims=dims, mask=masks(2, 3, 33, keys, dtype).get(name))


def test_a_query_that_may_attend_to_nothing_gives_zeros_and_no_gradients():
    inputs, _ = make_inputs(2, 5, 7, 8, 2, 16)
    mask = torch.ones(2, 1, 5, 7, dtype=torch.bool, device=DEVICE)
    mask[1] = False
    output, *gradients = run(fused, inputs, torch.ones(2, 2, 5, 16), mask=mask)
    assert not output[1].any()
    assert all(not gradient[1].any() and gradient[0].any() for gradient in gradients[:3])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_huge_logits_stay_finite(dtype):
    inputs, _ = make_inputs(1, 20, 150, 16, 2, 16, dtype=dtype)
    inputs = (inputs[0] * 20, inputs[1] * 20, *inputs[2:])  # beyond that float16 itself overflows
    output, *gradients = run(fused, inputs, torch.ones(1, 2, 20, 16))
    exact, _ = reference.attention(*(part.double() for part in inputs), scale=SCALE)
    plain, _ = reference.attention(*inputs, scale=SCALE)
    assert output.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert (output - exact).abs().max() <= 2 * (plain - exact).abs().max() + 1e-3


FORWARD_TILES = [
    (50, Tiles(16, 64, 4, 1, group=1, way=2)),
    (50, Tiles(16, 64, 4, 1, group=3, way=1)),
    (50, Tiles(16, 64, 4, 2, group=1, chunk=16)),
    (150, Tiles(32, 16, 4, 2, way=1)),
    (150, Tiles(16, 32, 4, 1, way=2)),
    (150, Tiles(16, 32, 4, 1, way=2, ahead=True)),
    (160, Tiles(16, 32, 4, 1, way=1, plain=False, ahead=True)),
    (160, Tiles(16, 32, 4, 1, plain=False)),
    (150, Tiles(16, 32, 4, 1, way=3)),
    (160, Tiles(16, 32, 4, 1, way=3, plain=False, ahead=True)),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("own", [None, 9], ids=["dense", "sparse"])
@pytest.mark.parametrize(("keys", "tiles"), FORWARD_TILES, ids=str)
def test_every_way_of_the_forward_pass(keys, tiles, own, causal):
    batch = 2 if ON_GPU else 1  # the interpreter takes long
    inputs, dims = make_inputs(batch, 33, keys, 40, 18, 16, own=own)
    exact, _ = reference.attention(*(part.double() for part in inputs), scale=SCALE, dims=dims, causal=causal)
    output, kept = fused_forward.forward(*inputs, dims, None, SCALE, causal, True, "ieee", tiles)
    torch.testing.assert_close(output.double(), exact, atol=2e-5, rtol=2e-5)
    assert kept.shape == ((1, *exact.shape[:3], 64) if keys <= 128 else (2, *exact.shape[:3]))
    again, none = fused_forward.forward(*inputs, dims, None, SCALE, causal, False, "ieee", tiles)
    assert torch.equal(output, again)
    assert none.numel() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("factor", [1, 40])
@pytest.mark.parametrize("shift", [-300, 0, 300])
def test_scores_far_from_zero_lose_nothing(shift, factor, dtype):
    """They are beyond what float32 holds the exponentials of: done again with the maximum."""
    (query, key, value, mixing), _ = make_inputs(2, 20, 150, 16, 2, 16, dtype=dtype)
    key = torch.cat((key[..., :16], key[..., 16:] * factor + shift), dim=-1)
    exact, _ = reference.attention(*(part.double() for part in (query, key, value, mixing)), scale=1.0)
    plain, _ = reference.attention(query, key, value, mixing, scale=1.0)
    output, _ = fused.attention(query, key, value, mixing, scale=1.0)
    allowed = 2 * (plain.double() - exact).abs().max() + 2e-6
    # A score of hundreds is known to so many digits only, in whatever order it is summed.
    allowed += 4 * torch.finfo(torch.float32).eps * key[..., 16:].abs().max()
    assert (output.double() - exact).abs().max() <= allowed


@pytest.mark.parametrize("keys", [40, 150])
@pytest.mark.parametrize("shift", [-500, 500])
def test_gradients_of_scores_far_from_zero_are_those_of_the_definition(shift, keys):
    """Queries past the last are in the block of the last ones, and have content scores, too."""
    (query, key, value, mixing), _ = make_inputs(1, 20, keys, 16, 2, 16)
    inputs = (query, torch.cat((key[..., :16], key[..., 16:] + shift), dim=-1), value, mixing)
    gradient = torch.randn(1, 2, 20, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    expected = run(reference, [part.double() for part in inputs], gradient)
    for mine, exact in zip(run(fused, inputs, gradient), expected, strict=True):
        torch.testing.assert_close(mine.double(), exact, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    "shape", [(2, 1, 20, 1), (1, 3, 1, 140), (3, 20, 140), (20, 1), "transposed", "strided"], ids=str
)
@pytest.mark.parametrize("additive", [False, True])
def test_masks_are_read_as_they_lie(additive, shape):
    inputs, _ = make_inputs(2, 20, 140, 16, 3, 16)
    generator = torch.Generator().manual_seed(3)
    if shape == "transposed":
        mask = torch.rand(2, 3, 140, 20, generator=generator).transpose(2, 3)
    elif shape == "strided":
        mask = torch.rand(2, 1, 20, 280, generator=generator)[..., ::2]
    else:
        mask = torch.rand(shape, generator=generator)
    mask = mask.to(DEVICE)
    check(inputs, mask=mask.masked_fill(mask < 0.3, -torch.inf) if additive else mask > 0.3)


@pytest.mark.parametrize("part", ["query", "key", "key's tokens", "value"])
def test_what_is_expanded_is_read_as_it_lies(part):
    (query, key, value, mixing), _ = make_inputs(2, 20, 140, 16, 3, 16)
    expanded = {
        "query": (query[:1].expand(2, -1, -1), key, value),
        "key": (query, key[:1].expand(2, -1, -1), value),
        "key's tokens": (query, key[:, :1].expand(-1, 140, -1), value),
        "value": (query, key, value[:, :1].expand(-1, 3, -1, -1)),
    }
    check((*expanded[part], mixing.T.contiguous().T))


BACKWARD_TILES = [
    BackwardTiles(16, 64, 4, 1, own=16, other=32, chunk=32, sum_warps=4, sum_stages=1, way=1),
    BackwardTiles(32, 16, 4, 1, own=32, other=16, chunk=16, sum_warps=4, sum_stages=1, way=2),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("workspace", [2**29, 1], ids=["at once", "in portions"])
@pytest.mark.parametrize("tiles", BACKWARD_TILES, ids=str)
def test_every_way_of_the_backward_pass(tiles, workspace, causal, monkeypatch):
    monkeypatch.setattr(fused_backward, "WORKSPACE", workspace)
    inputs, _ = make_inputs(2, 150, 70, 40, 3, 16)
    gradient = torch.randn(2, 3, 150, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    expected = run(reference, [part.double() for part in inputs], gradient, causal=causal)[1:]
    output, kept = fused_forward.forward(*inputs, None, None, SCALE, causal, True, "ieee")
    found = fused_backward.backward(gradient, *inputs, None, output, kept, SCALE, causal, "ieee", tiles)
    for mine, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), exact, atol=1e-4, rtol=1e-4)


@pytest.fixture
def room(monkeypatch):
    """Shared memory of a program as on an H100: in the interpreter, where no device tells."""
    monkeypatch.setattr(fused_tiles, "_SHARED_MEMORY", 227 * 1024)


def gradients(inputs, gradient, mask=None):
    """In float64 and by the definition."""
    exact = run(reference, [part.double() for part in inputs], gradient, mask=mask)[1:]
    return exact, run(reference, inputs, gradient, mask=mask)[1:]


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("content", [True, False], ids=["content", "no content"])
@pytest.mark.usefixtures("room")
def test_the_backward_pass_over_few_keys_in_one_kernel(content, groups):
    inputs, _ = make_inputs(2, 65, 70, 40, 3, 16, content=content, dtype=torch.float16)
    mask = masks(2, 3, 65, 70, torch.float16)["boolean with a row of nothing"]
    gradient = torch.randn(2, 3, 65, 16, generator=torch.Generator().manual_seed(1)).to(inputs[0])
    exact, plain = gradients(inputs, gradient, mask)
    _, kept = fused_forward.forward(*inputs, None, mask, SCALE, False, True, "ieee")
    if not fused_short_backward.stages_of(inputs[0]):
        pytest.skip("too little shared memory")
    assert fused_short_backward.takes(inputs[0], inputs[2], kept)
    found = fused_short_backward.short_backward(gradient, *inputs, kept, SCALE, "ieee", groups)
    same = fused_short_backward.short_backward(gradient, *inputs, kept, SCALE, "ieee", groups)
    assert all(torch.equal(left, right) for left, right in zip(found, same, strict=True))
    for mine, own, truth in zip(found, plain, exact, strict=True):
        assert mine.shape == truth.shape
        assert mine.dtype == own.dtype
        assert (mine - truth).abs().max() <= 2 * (own - truth).abs().max() + 2e-3 * truth.abs().max()


# queries, keys, shared, value_dim
SIDES = {
    (65, 65, 64, 16): True,
    (65, 128, 17, 64): True,
    (65, 70, 65, 16): False,
    (65, 70, 20, 65): False,
    (64, 70, 20, 16): False,
    (65, 64, 20, 16): False,
    (129, 70, 20, 16): False,
}


@pytest.mark.parametrize("case", SIDES, ids=str)
@pytest.mark.usefixtures("room")
def test_one_kernel_makes_gradients_of_few_dimensions_and_two_those_of_more(case, monkeypatch):
    queries, keys, shared, value_dim = case
    inputs, _ = make_inputs(1, queries, keys, shared, 2, value_dim, dtype=torch.float16)
    gradient = torch.randn(1, 2, queries, value_dim, generator=torch.Generator().manual_seed(1)).to(inputs[0])
    exact, plain = gradients(inputs, gradient)
    ran = []
    short_backward = fused_short_backward.short_backward
    monkeypatch.setattr(
        fused_short_backward, "short_backward", lambda *given: (ran.append(True), short_backward(*given))[1]
    )
    found = run(fused, inputs, gradient)[1:]
    assert bool(ran) == (SIDES[case] and fused_short_backward.stages_of(inputs[0]) > 0)
    for mine, own, truth in zip(found, plain, exact, strict=True):
        assert (mine - truth).abs().max() <= 2 * (own - truth).abs().max() + 2e-3 * truth.abs().max()


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device: too large for the interpreter")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shared", [64, 128, 256, 384])
def test_gradients_of_programs_that_go_over_several_heads(shared, dtype):
    """In small batches every program has one head only, and a loop that runs once shows nothing of the next ones."""
    inputs, _ = make_inputs(32, 128, 128, shared, 12, 64, dtype=dtype)
    assert fused_short_backward.groups_of(32, 12, inputs[0].device) < 12
    check(inputs)


def test_heads_are_shared_out_so_that_few_processors_wait():
    cases = [(32, 12), (64, 12), (1, 12), (256, 12), (5, 7)]
    device = torch.device("cpu")
    assert [fused_short_backward.groups_of(*case, device) for case in cases] == [4, 2, 12, 1, 7]


def test_gradients_are_the_same_bit_by_bit_every_time():
    inputs, _ = make_inputs(2, 70, 90, 24, 3, 16, dtype=torch.bfloat16)
    gradient = torch.ones(2, 3, 70, 16)
    once, again = run(fused, inputs, gradient), run(fused, inputs, gradient)
    assert all(torch.equal(left, right) for left, right in zip(once, again, strict=True))


@pytest.mark.parametrize("own", [None, 200], ids=["dense", "sparse"])
def test_few_keys_of_many_dimensions_are_read_in_chunks(own):
    inputs, dims = make_inputs(1, 20, 33, 230, 2, 16, dtype=torch.float16, own=own)
    assert forward_tiles(20, 33, 256, 16, 2, inputs[0]).chunk
    check(inputs, dims=dims)


def test_tiles_that_were_measured_run_where_they_were_measured(room):
    del room

    def tiles(tokens, width, batch=32, heads=12, value_dim=64, dtype=torch.bfloat16, bare=True):
        like = torch.empty(1, 1, 1, dtype=dtype).expand(batch, tokens, width)
        return forward_tiles(tokens, tokens, width, value_dim, heads, like, bare)

    assert tiles(128, 64).group == tiles(128, 128).group == tiles(100, 64, batch=40).group == 3
    for other in ({"batch": 16}, {"heads": 8}, {"value_dim": 128}, {"dtype": torch.float32}, {"bare": False}):
        assert tiles(128, 64, **other).group < 3
    assert tiles(128, 256).group == tiles(64, 64, batch=999).group == 1
    tall = tiles(512, 256)
    assert tall == tiles(2048, 256, batch=8)
    assert (tall.rows, tall.way) == (256, 3)
    for other in ({"batch": 31}, {"value_dim": 128}, {"dtype": torch.float16}, {"bare": False}):
        assert tiles(512, 256, **other).rows <= 128
    assert tiles(512, 128).rows == tiles(512, 384).rows == 128


def test_few_others_are_one_block_of_the_sums_over_heads():
    like = torch.empty(1, 1, 1, dtype=torch.bfloat16)
    lengths = [(128, 128), (65, 20), (20, 65), (64, 64), (129, 20)]
    assert [backward_tiles(*pair, 64, 64, like).other for pair in lengths] == [128, 128, 128, 64, 64]
    assert backward_tiles(128, 128, 64, 64, like.float()).other == 64
    assert backward_tiles(128, 128, 256, 64, like).other == 64  # which no device has run otherwise


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device: too large for the interpreter")
@pytest.mark.parametrize("shape", [(32, 128, 128), (35, 100, 120), (32, 512, 512), (33, 500, 300)], ids=str)
@pytest.mark.parametrize("shared", [64, 128, 256])
def test_outputs_of_many_programs_without_gradients(shared, shape):
    """Where other tiles run than in training."""
    inputs, _ = make_inputs(*shape, shared, 12, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        found, plain = (module.attention(*inputs, scale=SCALE)[0] for module in (fused, reference))
        exact = reference.attention(*(part.double() for part in inputs), scale=SCALE)[0]
    assert (found - exact).abs().max() <= 2 * (plain - exact).abs().max() + 2e-6
    assert (found - exact).pow(2).mean() <= 4 * (plain - exact).pow(2).mean()


def test_widths_are_held_by_two_powers_of_two():
    for width in range(1, 769):
        whole, rest = split_width(width)
        assert whole + rest >= width
        assert whole < width or rest == 0
        assert not whole & (whole - 1)
        assert not rest & (rest - 1)
        assert min(whole, rest or whole) >= 16
    assert [split_width(width) for width in (64, 192, 384, 768)] == [(64, 0), (128, 64), (256, 128), (512, 256)]


REFUSED = {
    "dropout": ({"dropout": 0.1}, "dropout is 0.1"),
    "weights": ({"need_weights": True}, "never holds the attention weights"),
    "double": ({"dtype": torch.float64}, "float64"),
    "width": ({"shared": 769}, "at most 768, got 769"),
    "value": ({"value_dim": 129}, "at most 128 wide, got 129"),
    "empty": ({"keys": 0}, "at least one"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_compute_is_refused_with_the_reason(name):
    given, message = REFUSED[name]
    options = {key: value for key, value in given.items() if key in ("dropout", "need_weights")}
    sizes = {"batch": 1, "queries": 2, "keys": 3, "shared": 4, "heads": 2, "value_dim": 4, "dtype": torch.float32}
    sizes |= {key: value for key, value in given.items() if key in sizes}
    inputs, _ = make_inputs(**sizes)
    assert any(message in reason for reason in fused.why_not(*inputs, **options))


def test_a_mask_that_wants_gradients_is_refused():
    inputs, _ = make_inputs(1, 2, 3, 4, 2, 4)
    mask = torch.zeros(2, 3, device=DEVICE, requires_grad=True)
    assert fused.why_not(*inputs, mask=mask) == ["it makes no gradient of an additive mask"]
    with torch.no_grad():
        assert not fused.why_not(*inputs, mask=mask)


def test_tokens_too_far_apart_to_count_in_32_bits_are_refused():
    query, key, value, mixing = (
        torch.empty(shape, device="meta") for shape in ((1, 3, 4), (1, 5, 6), (1, 2, 5, 4), (2, 4))
    )
    far = torch.empty_strided((1, 5, 6), (2**33, 2**30, 1), device="meta")
    mask = torch.empty_strided((1, 1, 3, 5), (2**33, 2**33, 2**31, 1), dtype=torch.bool, device="meta")
    message = "tokens must lie within"
    assert any(message in reason for reason in fused.why_not(query, far, value, mixing))
    assert any(message in reason for reason in fused.why_not(query, key, value, mixing, mask=mask))
    assert not any(message in reason for reason in fused.why_not(query, key, value, mixing))


@pytest.mark.parametrize("own", [None, 7], ids=["dense", "sparse"])
def test_the_operators_are_registered_well(own):
    inputs, dims = make_inputs(1, 5, 7, 8, 2, 16, own=own)
    from collab.ops import fused_operators

    inputs = tuple(part.detach().requires_grad_() for part in inputs)
    torch.library.opcheck(fused_operators.fused_attention, (*inputs, dims, None, SCALE, False, True))


@pytest.mark.parametrize("own", [None, 7], ids=["dense", "sparse"])
def test_a_layer_trains_and_compiles_whole(own):
    torch.manual_seed(0)
    layer = CollaborativeAttention(32, 2, 16, dims_per_head=own, mixing="normal", implementation="fused", device=DEVICE)
    plain = CollaborativeAttention(32, 2, 16, dims_per_head=own, implementation="reference", device=DEVICE)
    plain.load_state_dict(layer.state_dict())
    inputs = torch.randn(2, 9, 32, device=DEVICE)
    expected = torch.autograd.grad(plain(inputs).square().sum(), list(plain.parameters()))
    compiled = torch.compile(layer, fullgraph=True, backend="inductor" if ON_GPU else "aot_eager")
    for each in (layer, compiled):
        found = torch.autograd.grad(each(inputs).square().sum(), list(layer.parameters()))
        for mine, exact in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, exact, atol=2e-4, rtol=2e-4)


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_a_layer_runs_in_a_cuda_graph():
    torch.manual_seed(0)
    layer = CollaborativeAttention(64, 4, 24, implementation="fused", device=DEVICE, dtype=torch.bfloat16)
    inputs = torch.randn(2, 100, 64, device=DEVICE, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = layer(inputs, causal=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = layer(inputs, causal=True)
        output.zero_()
        graph.replay()
    assert torch.equal(output, expected)


def test_autocast_gives_kernels_what_they_take():
    torch.manual_seed(0)
    layer = CollaborativeAttention(32, 2, 16, mixing="normal", implementation="fused", device=DEVICE)
    inputs = torch.randn(2, 9, 32, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        output = layer(inputs)
    output.float().square().sum().backward()
    assert output.dtype == torch.bfloat16
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in layer.parameters())
