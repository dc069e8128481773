"""Attention through cuDNN: what feeds it against the definition in float64, on a CUDA device or in an interpreter.

Where there is no CUDA device, Triton's interpreter runs our kernels, and torch's attention for CPUs stands in for
cuDNN's.
"""

import os

import pytest
import torch

from collab import CollaborativeAttention, ops
from collab.ops import cudnn, reference
from collab.ops.ranking import FILLED, LONG, MORE_THAN, ORDER, rank

pytest.importorskip("triton")
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
DTYPES = [torch.bfloat16, torch.float16]
# batch, query, key, shared, heads, value_dim, dims_per_head
ODD_SHAPES = [
    (2, 37, 45, 20, 3, 16, None),
    (2, 17, 17, 70, 5, 8, None),
    (1, 33, 20, 52, 12, 24, None),  # 64 with content
    (3, 2, 3, 2, 7, 8, None),
    (2, 37, 45, 150, 3, 16, 9),
    (1, 20, 33, 40, 4, 8, 7),  # 8 with content
    (1, 18, 18, 5, 1, 8, 5),
]
LARGE_SHAPES = [
    (2, 512, 512, 64, 12, 64, None),
    (2, 300, 700, 52, 12, 64, None),
    (1, 513, 513, 116, 12, 64, None),
    (2, 512, 512, 256, 12, 64, 64),
    (1, 260, 130, 384, 6, 128, 63),
]


def make_inputs(batch, queries, keys, shared, heads, value_dim, own=None, *, content=True, dtype=torch.bfloat16):
    """Queries, keys and values as one projection gives them, with no numbers in between, mixing, and dims if any."""
    generator = torch.Generator().manual_seed(0)

    def draw(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(DEVICE, dtype)

    width = shared + (heads if content else 0)
    start = width + -width % 8
    columns = start + heads * value_dim
    of_queries, of_keys = draw(batch, queries, shared + 5), draw(batch, keys, columns + -columns % 8)
    of_queries[..., shared:] = torch.nan
    of_keys[..., width:start] = torch.nan
    value = of_keys[..., start:columns].unflatten(-1, (heads, value_dim)).transpose(1, 2)
    dims = None
    if own is not None:
        dims = torch.stack([torch.randperm(shared, generator=generator)[:own] for _ in range(heads)])
        dims = dims.to(DEVICE, torch.int32)
    return [of_queries[..., :shared], of_keys[..., :width], value, draw(heads, own or shared)], dims


def run(module, inputs, gradient, **options):
    """Output and gradients of the four inputs."""
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    output, _ = module.attention(*inputs, scale=SCALE, **options)
    return (output, *torch.autograd.grad(output, inputs, gradient.to(output)))


def check(inputs, **options):
    """Errors of the output and every gradient are at most twice those of the definition in the same dtype."""
    assert not cudnn.why_not(*inputs, **options)
    shape = (*inputs[2].shape[:2], inputs[0].shape[1], inputs[2].shape[3])
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(inputs[0])
    exact = run(reference, [part.double() for part in inputs], gradient, **options)
    plain = run(reference, inputs, gradient, **options)
    found = run(cudnn, inputs, gradient, **options)
    eps = torch.finfo(inputs[0].dtype).eps
    for name, truth, own, mine in zip(("output", "query", "key", "value", "mixing"), exact, plain, found, strict=True):
        assert mine.dtype == own.dtype
        assert mine.shape == truth.shape
        assert mine.isfinite().all(), name
        allowed = 2 * (own.double() - truth).abs().max() + 2 * eps * truth.abs().max().clamp(min=1)
        assert (mine.double() - truth).abs().max() <= allowed, name


@pytest.mark.parametrize("content", [True, False], ids=["content", "no content"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ODD_SHAPES, ids=str)
def test_errs_at_most_twice_as_much_as_the_definition(shape, dtype, content):
    inputs, dims = make_inputs(*shape, content=content, dtype=dtype)
    check(inputs, dims=dims)


def test_gradients_in_any_layout_are_right():
    inputs, _ = make_inputs(2, 40, 40, 20, 3, 16)
    inputs = [part.detach().requires_grad_() for part in inputs]
    output, _ = cudnn.attention(*inputs, scale=SCALE)
    drawn = torch.randn(2, 3, 40, 16, generator=torch.Generator().manual_seed(1)).to(output)
    layouts = [drawn, drawn.transpose(1, 2).contiguous().transpose(1, 2), drawn.mT.contiguous().mT]
    seen = []
    output.grad_fn.next_functions[0][0].register_prehook(lambda gradients: seen.append(gradients[0].stride()))
    found = [torch.autograd.grad(output, inputs, gradient, retain_graph=True) for gradient in layouts]
    assert seen == [(1920, 16, 48, 1)] * 3
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("own", [None, 9], ids=["dense", "sparse"])
def test_causal(own):
    inputs, dims = make_inputs(2, 37, 37, 20, 3, 16, own)
    check(inputs, dims=dims, causal=True)


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device: too large for the interpreter")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", LARGE_SHAPES, ids=str)
def test_errs_at_most_twice_as_much_at_real_sizes(shape, dtype, causal):
    if causal and shape[1] != shape[2]:
        pytest.skip("causal takes as many keys as queries")
    inputs, dims = make_inputs(*shape, dtype=dtype)
    check(inputs, dims=dims, causal=causal)


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("own", [None, 64], ids=["dense", "sparse"])
def test_cudnn_computes_it(own):
    inputs, dims = make_inputs(2, 512, 512, 64, 12, 64, own)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, torch.no_grad():
        cudnn.attention(*inputs, scale=SCALE, dims=dims)
    names = {event.key for event in profile.key_averages()}
    assert "aten::_scaled_dot_product_cudnn_attention" in names
    assert not {"aten::clone", "aten::copy_", "aten::_scaled_dot_product_attention_math"} & names


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("own", [None, 64], ids=["dense", "sparse"])
def test_it_is_chosen_for_many_tokens(own):
    inputs, dims = make_inputs(2, 512, 512, 64, 12, 64, own)
    assert ops.choose(*inputs, dims=dims) == "cudnn"
    assert ops.choose(*inputs, dims=dims, mask=torch.ones(2, 1, 1, 512, dtype=torch.bool, device=DEVICE)) == "fused"
    inputs, dims = make_inputs(2, 128, 128, 64, 12, 64, own)
    assert ops.choose(*inputs, dims=dims) == "fused"


@pytest.mark.parametrize("own", [None, 9], ids=["dense", "sparse"])
@pytest.mark.parametrize("content", [True, False], ids=["content", "no content"])
def test_what_is_written_is_exactly_the_mixed_queries_and_the_keys(content, own):
    from collab.ops.cudnn_operators import spread_heads

    (query, key, _, mixing), dims = make_inputs(2, 37, 21, 20, 3, 8, own, content=content, dtype=torch.float32)
    mixed, head_key = spread_heads(query, key, mixing, dims, 40)
    assert mixed.shape == (2, 37, 3, 40)
    assert head_key.shape == (2, 21, 1 if own is None else 3, 40)
    shared, count = 20, own or 20
    for head in range(3):
        columns = torch.arange(20, device=DEVICE) if dims is None else dims[head].long()
        expected = torch.zeros(2, 37, 40, device=DEVICE, dtype=mixed.dtype)
        expected[..., :count] = query[..., columns] * mixing[head]
        keys = torch.zeros(2, 21, 40, device=DEVICE, dtype=mixed.dtype)
        keys[..., :count] = key[..., columns]
        if content:
            expected[..., count + (head if own is None else 0)] = 1
            keys[..., count : count + (3 if own is None else 1)] = (
                key[..., shared:] if own is None else key[..., shared + head : shared + head + 1]
            )
        assert torch.equal(mixed[:, :, head], expected)
        assert torch.equal(head_key[:, :, 0 if own is None else head], keys)


@pytest.mark.parametrize("own", [None, 9], ids=["dense", "sparse"])
def test_gradients_are_the_sums_they_should_be_and_the_same_every_time(own):
    from collab.ops.cudnn_operators import spread_heads

    inputs, dims = make_inputs(2, 70, 41, 100, 3, 8, own)
    query, key, mixing = (inputs[place].detach().requires_grad_() for place in (0, 1, 3))
    outputs = spread_heads(query, key, mixing, dims, 104 if own is None else 16)
    gradients = [torch.randn(output.shape, device=DEVICE).to(output) for output in outputs]
    once, again = (torch.autograd.grad(outputs, (query, key, mixing), gradients, retain_graph=True) for _ in range(2))
    assert all(torch.equal(left, right) for left, right in zip(once, again, strict=True))
    weights = mixing.detach().double() if dims is None else reference.dense_mixing(mixing.detach().double(), dims, 100)
    of_mixed, of_keys = (gradient.double() for gradient in gradients)
    if dims is not None:
        dense = torch.zeros(2, 70, 3, 100, device=DEVICE, dtype=torch.float64)
        of_mixed = dense.scatter(3, dims.long().expand(2, 70, 3, 9), of_mixed[..., :9])
        dense = torch.zeros(2, 41, 3, 103, device=DEVICE, dtype=torch.float64)
        columns = torch.cat((dims.long(), 100 + torch.arange(3, device=DEVICE)[:, None]), dim=1)
        of_keys = dense.scatter(3, columns.expand(2, 41, 3, 10), of_keys[..., :10])
    of_mixed = of_mixed[..., :100]
    of_query = (of_mixed * weights).sum(2)
    of_mixing = (of_mixed * query.detach().double()[:, :, None]).sum((0, 1))
    of_mixing = of_mixing if dims is None else of_mixing.gather(1, dims.long())
    for found, expected in zip(once, (of_query, of_keys.sum(2)[..., :103], of_mixing), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-2)


REFUSED = {
    "dropout": ({"dropout": 0.1}, "dropout is 0.1"),
    "weights": ({"need_weights": True}, "never holds the attention weights"),
    "mask": ({"mask": torch.ones(1, 1, 1, 9, dtype=torch.bool)}, "takes no mask"),
    "float32": ({"dtype": torch.float32}, "bfloat16 or float16, got float32"),
    "width": ({"shared": 126}, "at most 128, got 136"),
    "dims": ({"shared": 200, "own": 128}, "at most 128, got 136"),
    "value": ({"value_dim": 12}, "multiple of 8 wide, and at most 128, got 12"),
    "wide value": ({"value_dim": 136}, "got 136"),
    "decoding": ({"queries": 1}, "at least two queries and keys, got 1 and 9"),
    "causal": ({"causal": True, "keys": 8}, "as many keys as queries, got 8 and 9"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_take_is_refused_with_the_reason(name):
    given, message = REFUSED[name]
    options = {key: value for key, value in given.items() if key in ("dropout", "need_weights", "mask", "causal")}
    sizes = {"batch": 1, "queries": 9, "keys": 9, "shared": 4, "heads": 3, "value_dim": 8, "own": None}
    sizes |= {"dtype": torch.bfloat16}
    inputs, dims = make_inputs(**sizes)
    assert not cudnn.why_not(*inputs, dims=dims)
    inputs, dims = make_inputs(**sizes | {key: value for key, value in given.items() if key in sizes})
    assert any(message in reason for reason in cudnn.why_not(*inputs, dims=dims, **options))


def test_values_that_lie_askew_are_refused():
    (query, key, value, mixing), _ = make_inputs(1, 9, 9, 4, 3, 8)
    askew = torch.zeros(1, 9, 30, device=DEVICE, dtype=value.dtype)
    for place in (askew[..., 1:25], askew[..., :24]):
        (reason,) = cudnn.why_not(query, key, place.unflatten(-1, (3, 8)).transpose(1, 2), mixing)
        assert "begin at multiples of 8" in reason


def test_deterministic_algorithms_are_left_to_others():
    inputs, _ = make_inputs(1, 9, 9, 4, 3, 8)
    torch.use_deterministic_algorithms(True)
    try:
        (reason,) = cudnn.why_not(*inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert "deterministic" in reason


@pytest.mark.parametrize("keys", [64, 192, 128, 65])
def test_gradients_that_cudnn_gets_wrong_are_refused(monkeypatch, keys):
    monkeypatch.setattr(cudnn, "_has_wrong_gradients", lambda *device: True)
    inputs, _ = make_inputs(1, keys, keys, 4, 3, 8)
    assert not cudnn.why_not(*inputs)
    inputs[1].requires_grad_()
    assert not cudnn.why_not(*inputs, causal=True)
    assert bool(cudnn.why_not(*inputs)) == (keys in (64, 192))


def test_on_cuda_it_comes_first_for_gradients_and_sparse_heads_of_more_tokens():
    def first(queries, keys, dtype=torch.float32, learns=True, is_sparse=False):
        parts = (torch.empty(1, tokens, 8, device="meta", dtype=dtype) for tokens in (queries, keys))
        query, key = (_OnCuda(part, learns) for part in parts)
        return rank(query, key, query, query, dims=torch.zeros(1) if is_sparse else None).names

    more = MORE_THAN + 1
    assert first(more, more) == first(more, more, learns=False, is_sparse=True) == LONG
    assert first(more, more, learns=False) == ORDER
    with torch.no_grad():
        assert first(more, more) == ORDER
    assert first(MORE_THAN, 500) == first(500, MORE_THAN) == first(1, 500) == ORDER
    assert first(1, 500, torch.bfloat16) == first(more, more, torch.bfloat16, learns=False) == FILLED
    assert FILLED.index("padded") < FILLED.index("sdpa")
    assert sorted(LONG) == sorted(ORDER) == sorted(FILLED) == sorted(ops.IMPLEMENTATIONS)


class _OnCuda:
    """A tensor as the rule sees it, on a device that may not be there."""

    device = torch.device("cuda")

    def __init__(self, tensor, requires_grad):
        self.shape, self.dtype, self.requires_grad = tensor.shape, tensor.dtype, requires_grad


@pytest.mark.parametrize("own", [None, 7], ids=["dense", "sparse"])
def test_the_operators_are_registered_well(own):
    from collab.ops.cudnn_operators import spread_heads

    inputs, dims = make_inputs(1, 5, 7, 8, 2, 8, own)
    query, key, mixing = (inputs[place].detach().requires_grad_() for place in (0, 1, 3))
    torch.library.opcheck(spread_heads, (query, key, mixing, dims, 16))


@pytest.mark.parametrize("own", [None, 7], ids=["dense", "sparse"])
def test_a_layer_trains_and_compiles_whole(own):
    torch.manual_seed(0)
    options = {"dims_per_head": own, "mixing": "normal", "device": DEVICE, "dtype": torch.bfloat16}
    layer = CollaborativeAttention(32, 2, 16, implementation="cudnn", **options)
    plain = CollaborativeAttention(32, 2, 16, implementation="reference", **options)
    plain.load_state_dict(layer.state_dict())
    inputs = torch.randn(2, 40, 32, device=DEVICE, dtype=torch.bfloat16)
    expected = torch.autograd.grad(plain(inputs).float().square().sum(), list(plain.parameters()))
    compiled = torch.compile(layer, fullgraph=True, backend="inductor" if ON_GPU else "aot_eager")
    for each in (layer, compiled):
        found = torch.autograd.grad(each(inputs).float().square().sum(), list(layer.parameters()))
        for mine, exact in zip(found, expected, strict=True):
            assert (mine - exact).norm() <= 0.03 * exact.norm()


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("own", [None, 16], ids=["dense", "sparse"])
def test_a_layer_runs_in_a_cuda_graph(own):
    torch.manual_seed(0)
    layer = CollaborativeAttention(
        64, 4, 24, dims_per_head=own, implementation="cudnn", device=DEVICE, dtype=torch.bfloat16
    )
    inputs = torch.randn(2, 200, 64, device=DEVICE, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = layer(inputs, causal=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = layer(inputs, causal=True)
        output.zero_()
        graph.replay()
    assert torch.equal(output, expected)


def test_autocast_gives_it_what_it_takes():
    torch.manual_seed(0)
    layer = CollaborativeAttention(32, 2, 16, mixing="normal", implementation="cudnn", device=DEVICE)
    inputs = torch.randn(2, 9, 32, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        output = layer(inputs)
    output.float().square().sum().backward()
    assert output.dtype == torch.bfloat16
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in layer.parameters())
