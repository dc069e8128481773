"""The layer on its own: what it computes, what it accepts, and every way it is carried elsewhere."""

import copy
import io
import math

import pytest
import torch
from torch import nn

from collab import CollaborativeAttention
from collab.config import MIXING_STARTS
from collab.layer import head_blocks


def make_layer(*args, seed=0, **options):
    """A float64 layer with every parameter random, so that biases and content count."""
    layer = CollaborativeAttention(*args, **({"dtype": torch.float64} | options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    return layer


def draw(*size, dtype=torch.float64, seed=1):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def lengths_mask(lengths, longest):
    return torch.arange(longest) < torch.tensor(lengths)[:, None]


# --- what it computes


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize("implementation", ["sdpa", "reference"])
def test_concatenated_heads_are_torch_multihead_attention(implementation, cross, bias):
    embed_dim, num_heads, key_width, value_width = 12, 3, (7 if cross else 12), (5 if cross else 12)
    options = {"kdim": key_width, "vdim": value_width} if cross else {}
    original = nn.MultiheadAttention(
        embed_dim, num_heads, bias=bias, batch_first=True, dtype=torch.float64, **options
    ).eval()
    layer = CollaborativeAttention(
        embed_dim, num_heads, key_width=key_width, value_width=value_width, bias=bias, implementation=implementation,
        dtype=torch.float64,
    ).eval()  # fmt: skip
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.normal_()
        if cross:
            query, key, value = original.q_proj_weight, original.k_proj_weight, original.v_proj_weight
        else:
            query, key, value = original.in_proj_weight.chunk(3)
        layer.query.weight.copy_(query)
        layer.key.weight[:embed_dim] = key
        layer.value.weight.copy_(value)
        layer.out.load_state_dict(original.out_proj.state_dict())
        if bias:
            query_bias, _, value_bias = original.in_proj_bias.chunk(3)
            layer.value.bias.copy_(value_bias)
            content = torch.einsum("hd,hdk->hk", query_bias.view(num_heads, -1), key.view(num_heads, -1, key_width))
            layer.content.copy_(content)

    queries = draw(2, 6, embed_dim)
    keys = draw(2, 9, key_width, seed=2) if cross else queries
    values = draw(2, 9, value_width, seed=3) if cross else queries
    present = lengths_mask([keys.shape[1], 4], keys.shape[1])
    allowed = draw(6, keys.shape[1]) > -1
    allowed[:, 0] = True
    expected, expected_weights = original(
        queries, keys, values, key_padding_mask=~present, attn_mask=~allowed, average_attn_weights=False
    )
    output = layer(queries, keys, values, mask=allowed, padding_mask=present)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-6)
    layer.implementation = "auto"
    output, weights = layer(queries, keys, values, mask=allowed, padding_mask=present, need_weights=True)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-6)


def test_the_layer_is_its_formula():
    layer = make_layer(6, 2, 3, head_dim=4, scale=0.7)
    inputs = draw(5, 6)
    heads = []
    for head in range(2):
        scores = (inputs @ layer.query.weight.T * layer.mixing[head]) @ (inputs @ layer.key.weight[:3].T).T
        scores = (scores + inputs @ layer.content[head]) * 0.7
        heads.append(scores.softmax(-1) @ layer.value(inputs)[:, 4 * head : 4 * head + 4])
    torch.testing.assert_close(layer(inputs), layer.out(torch.cat(heads, -1)))


def test_scale_comes_from_the_head_size_and_never_from_the_shared_size():
    assert {CollaborativeAttention(32, 4, shared).scale for shared in (None, 1, 5, 16, 32)} == {8**-0.5}
    assert CollaborativeAttention(32, 4, 16, head_dim=3).scale == 3**-0.5
    assert CollaborativeAttention(32, 4, 16, scale=1.0).scale == 1.0


def test_without_bias_there_is_no_content_and_no_bias():
    layer = CollaborativeAttention(12, 3, 5, bias=False)
    assert layer.content is None
    assert sorted(dict(layer.named_parameters())) == [
        "key.weight",
        "mixing",
        "out.weight",
        "query.weight",
        "value.weight",
    ]
    assert CollaborativeAttention(12, 3, 5).content.shape == (3, 12)


@pytest.mark.parametrize("implementation", ["sdpa", "reference"])
def test_a_padded_batch_equals_each_sequence_alone(implementation):
    layer = make_layer(12, 3, 5, implementation=implementation)
    inputs, lengths = draw(3, 7, 12), [7, 4, 1]
    together = layer(inputs, padding_mask=lengths_mask(lengths, 7), causal=True)
    for row, length in enumerate(lengths):
        alone = layer(inputs[row : row + 1, :length], causal=True)
        torch.testing.assert_close(together[row : row + 1, :length], alone)


@pytest.mark.parametrize("implementation", ["sdpa", "reference"])
@pytest.mark.parametrize("causal", [False, True])
def test_mask_and_padding_mask_combine_as_one_mask(implementation, causal):
    layer = make_layer(12, 3, 5, implementation=implementation)
    inputs, present = draw(2, 6, 12), lengths_mask([6, 3], 6)
    allowed = draw(2, 3, 6, 6, seed=4) > -0.5
    allowed[..., 0] = True
    addend = draw(2, 3, 6, 6, seed=5)
    together = allowed & present[:, None, None]
    expected = layer(inputs, mask=together, causal=causal)
    torch.testing.assert_close(layer(inputs, mask=allowed, padding_mask=present, causal=causal), expected)
    expected = layer(inputs, mask=addend.masked_fill(~together, -torch.inf), causal=causal)
    masked = addend.masked_fill(~allowed, -torch.inf)
    torch.testing.assert_close(layer(inputs, mask=masked, padding_mask=present, causal=causal), expected)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3), (1, 2, 3)], ids=str)
@pytest.mark.parametrize("mask_kind", ["query key", "batch query key", "batch head query key", "broadcast"])
def test_any_batch_shape_equals_its_rows(batch, mask_kind):
    layer = make_layer(8, 2, 5, key_width=6)
    queries, keys = draw(*batch, 4, 8), draw(*batch, 5, 6)
    present = draw(*batch, 5, seed=2) > -1
    present[..., 0] = True
    size = {
        "query key": (4, 5),
        "batch query key": (*batch, 4, 5),
        "batch head query key": (*batch, 2, 4, 5),
        "broadcast": (*(1 for _ in batch), 2, 1, 5),
    }[mask_kind]
    mask = draw(*size, seed=3)
    output, weights = layer(queries, keys, mask=mask, padding_mask=present, need_weights=True)
    assert output.shape == (*batch, 4, 8)
    assert weights.shape == (*batch, 2, 4, 5)
    heads = mask if mask.dim() == 2 else mask.expand(*batch, *mask.shape[len(batch) :])
    for index in torch.ones(batch).nonzero().tolist():
        at = tuple(index)
        row_mask = heads if mask.dim() == 2 else heads[at]
        row = layer(queries[at], keys[at], mask=row_mask, padding_mask=present[at])
        torch.testing.assert_close(output[at], row)


def test_an_empty_batch_and_no_queries_give_empty_outputs():
    layer = make_layer(8, 2, 5)
    assert layer(draw(0, 4, 8)).shape == (0, 4, 8)
    assert layer(draw(2, 0, 4, 8)).shape == (2, 0, 4, 8)
    assert layer(draw(3, 0, 8), draw(3, 4, 8)).shape == (3, 0, 8)


def test_weights_sum_to_one_and_give_the_output():
    layer = make_layer(12, 3, 5, value_width=7).eval()
    queries, keys, values = draw(2, 4, 12), draw(2, 6, 12, seed=2), draw(2, 6, 7, seed=3)
    output, weights = layer(queries, keys, values, causal=True, need_weights=True)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 4, dtype=torch.float64))
    context = weights @ layer.value(values).unflatten(-1, (3, 4)).transpose(1, 2)
    torch.testing.assert_close(layer.out(context.transpose(1, 2).flatten(-2)), output)
    torch.testing.assert_close(layer(queries, keys, values, causal=True), output)


def test_one_token_attends_to_itself():
    layer = make_layer(12, 3, 5)
    inputs = draw(2, 1, 12)
    torch.testing.assert_close(layer(inputs), layer.out(layer.value(inputs)))


def test_dropout_acts_while_training_only():
    layer = make_layer(12, 3, 5, dropout=0.5)
    inputs = draw(2, 6, 12)
    torch.manual_seed(0)
    assert not torch.equal(layer(inputs), layer(inputs))
    _, weights = layer(inputs, need_weights=True)
    assert 0.2 < (weights == 0).double().mean() < 0.8
    layer.eval()
    assert torch.equal(layer(inputs), layer(inputs))
    torch.testing.assert_close(layer(inputs), layer(inputs, need_weights=True)[0])


# --- gradients


@pytest.mark.parametrize("implementation", ["sdpa", "reference"])
@pytest.mark.parametrize("kind", ["plain", "causal and padding", "additive"])
def test_gradients_of_inputs_and_parameters_match_finite_differences(implementation, kind):
    layer = make_layer(4, 2, 3, key_width=3, value_width=2, implementation=implementation)
    inputs = [draw(2, 3, 4), draw(2, 3, 3, seed=2), draw(2, 3, 2, seed=3)]
    inputs = [part.requires_grad_() for part in inputs]
    options = {
        "plain": {},
        "causal and padding": {"causal": True, "padding_mask": lengths_mask([3, 2], 3)},
        "additive": {"mask": draw(2, 2, 3, 3, seed=4)},
    }[kind]
    names = [name for name, _ in layer.named_parameters()]
    parameters = [parameter.detach().clone().requires_grad_() for parameter in layer.parameters()]
    assert {"mixing", "key.weight"} <= set(names)

    def run(query, key, value, *values):
        state = dict(zip(names, values, strict=True))
        return torch.func.functional_call(layer, state, (query, key, value), options)

    assert torch.autograd.gradcheck(run, (*inputs, *parameters))
    run(*inputs, *parameters).square().sum().backward()
    content_gradient = parameters[names.index("key.weight")].grad[layer.shared_dim :]
    assert all(part.grad.any() for part in [*inputs, *parameters])
    assert (content_gradient != 0).all()


# --- mixing starts


@pytest.mark.parametrize(("heads", "shared"), [(4, 32), (4, 30), (3, 10), (4, 3), (5, 1), (1, 7)])
def test_blocks_of_ones_for_any_shared_size(heads, shared):
    blocks = head_blocks(heads, shared)
    assert blocks.shape == (heads, shared)
    assert set(blocks.unique().tolist()) <= {0.0, 1.0}
    sizes = blocks.sum(1)
    assert sizes.min() >= 1
    assert sizes.max() - sizes.min() <= 1
    assert (blocks.sum(0) >= 1).all()  # no dimension without a head
    if shared >= heads:
        assert (blocks.sum(0) == 1).all()
        assert torch.equal(blocks.nonzero()[:, 1], torch.arange(shared))  # head after head, dimension after dimension
    assert torch.equal(CollaborativeAttention(8 * heads, heads, shared).mixing, blocks)


@pytest.mark.parametrize("start", ["normal", "uniform"])
def test_random_mixing_has_the_distribution_it_is_named_after(start):
    torch.manual_seed(0)
    mixing = CollaborativeAttention(64, 8, 4000, mixing=start).mixing.double()
    deviation = math.sqrt(8 / 4000)
    scaled = mixing / deviation
    assert abs(scaled.mean()) < 0.02
    assert abs(scaled.var() - 1) < 0.03
    # Fourth moment and largest value tell the two apart: 3 and unbounded, 9/5 and sqrt(3).
    fourth, largest = {"normal": (3.0, 3.5), "uniform": (1.8, math.sqrt(3))}[start]
    assert abs(scaled.pow(4).mean() - fourth) < 0.12
    assert (scaled.abs().max() > largest) if start == "normal" else (scaled.abs().max() <= largest)


def test_mixing_of_ones_is_ones():
    layer = CollaborativeAttention(64, 4, 24, mixing="ones")
    assert torch.equal(layer.mixing, torch.ones(4, 24))


@pytest.mark.parametrize("start", MIXING_STARTS)
def test_a_fresh_layer_is_reproducible_finite_and_has_no_content(start):
    def fresh():
        torch.manual_seed(0)
        return CollaborativeAttention(32, 4, 10, mixing=start)

    first, second = fresh(), fresh()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not first.content.any()
    assert not first.value.bias.any()
    first.reset_parameters()
    if start == "concatenate":
        assert torch.equal(first.mixing, second.mixing)
    assert not torch.equal(first.query.weight, second.query.weight)


# --- dtypes and devices


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("need_weights", [False, True])
def test_every_dtype_stays_within_its_own_precision(dtype, need_weights):
    exact_layer = make_layer(32, 4, 10)
    layer = copy.deepcopy(exact_layer).to(dtype)
    exact_layer.load_state_dict(layer.state_dict())  # the rounded weights, in float64
    inputs = draw(3, 9, 32, dtype=dtype)
    present = lengths_mask([9, 5, 2], 9)
    exact = exact_layer(inputs.double(), padding_mask=present, causal=True)
    output = layer(inputs, padding_mask=present, causal=True, need_weights=need_weights)
    output = output[0] if need_weights else output
    assert output.dtype == dtype
    assert (output.double() - exact).abs().max() <= 16 * torch.finfo(dtype).eps * exact.abs().max()
    output.sum().backward()
    assert all(parameter.grad.dtype == dtype and parameter.grad.isfinite().all() for parameter in layer.parameters())


@pytest.mark.parametrize("need_weights", [False, True])
def test_autocast(need_weights):
    layer = make_layer(32, 4, 10, dtype=torch.float32)
    inputs = draw(2, 5, 32, dtype=torch.float32)
    bias = draw(4, 5, 5, dtype=torch.float32).expand(2, -1, -1, -1)
    expected = layer(inputs, mask=bias)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(inputs, mask=bias, need_weights=need_weights)
        output = output[0] if need_weights else output
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), expected, rtol=0.05, atol=0.1)
    output.float().sum().backward()
    assert layer.mixing.grad.dtype == torch.float32
    assert layer.mixing.grad.isfinite().all()


def test_device_and_dtype_arguments():
    layer = CollaborativeAttention(32, 4, 10, device="meta", dtype=torch.bfloat16)
    assert {parameter.device.type for parameter in layer.parameters()} == {"meta"}
    assert {parameter.dtype for parameter in layer.parameters()} == {torch.bfloat16}
    layer.to_empty(device="cpu").reset_parameters()
    assert layer(draw(2, 3, 32, dtype=torch.bfloat16)).isfinite().all()
    assert torch.equal(layer.mixing.float(), head_blocks(4, 10))


# --- carried elsewhere


def test_state_dict_round_trip_and_deepcopy():
    layer, other = make_layer(12, 3, 5), make_layer(12, 3, 5, seed=9)
    inputs = draw(2, 4, 12)
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    assert not torch.equal(other(inputs), layer(inputs))
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(other(inputs), layer(inputs))
    assert torch.equal(copy.deepcopy(layer)(inputs), layer(inputs))


def test_repr_names_the_sizes():
    assert "num_heads=3, head_dim=4, shared_dim=5" in repr(CollaborativeAttention(12, 3, 5))


def test_compiles_without_a_graph_break():
    layer = make_layer(16, 4, 6, dtype=torch.float32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for queries, keys in ((5, 7), (9, 4)):
        inputs = draw(2, queries, 16, dtype=torch.float32), draw(2, keys, 16, dtype=torch.float32)
        options = {"mask": draw(queries, keys, dtype=torch.float32), "padding_mask": lengths_mask([keys, 2], keys)}
        expected, output = layer(*inputs, **options), compiled(*inputs, **options)
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
        expected_gradient, gradient = (
            torch.autograd.grad(result.square().sum(), layer.mixing)[0] for result in (expected, output)
        )
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@torch.no_grad()
def test_compiles_with_inductor():
    layer = make_layer(16, 4, 6, dtype=torch.float32)
    inputs = draw(2, 5, 16, dtype=torch.float32)
    compiled = torch.compile(layer, fullgraph=True)
    torch.testing.assert_close(compiled(inputs, causal=True), layer(inputs, causal=True), rtol=1e-5, atol=1e-5)


def test_compiles_with_weights_and_causal():
    layer = make_layer(16, 4, 6, dtype=torch.float32)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    inputs = draw(2, 5, 16, dtype=torch.float32)
    for options in ({"causal": True}, {"need_weights": True}):
        torch.testing.assert_close(compiled(inputs, **options), layer(inputs, **options))


class Masked(nn.Module):
    """The layer with positional inputs, as exporters like them."""

    def __init__(self, layer, causal=False):
        super().__init__()
        self.layer, self.causal = layer, causal

    def forward(self, query, key, padding_mask):
        return self.layer(query, key, padding_mask=padding_mask, causal=self.causal)


def export_case(batch, queries, keys):
    lengths = [keys] + [1 + (3 * row) % keys for row in range(1, batch)]
    return (
        draw(batch, queries, 16, dtype=torch.float32, seed=queries),
        draw(batch, keys, 16, dtype=torch.float32, seed=keys),
        lengths_mask(lengths, keys),
    )


def dynamic_shapes():
    batch, queries, keys = (torch.export.Dim(name, min=1, max=64) for name in ("batch", "queries", "keys"))
    return ({0: batch, 1: queries}, {0: batch, 1: keys}, {0: batch, 1: keys})


OTHER_SIZES = [(2, 5, 7), (5, 3, 11), (1, 8, 2), (4, 1, 1)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("implementation", ["sdpa", "reference"])
def test_exports_with_dynamic_shapes(implementation, causal):
    module = Masked(make_layer(16, 4, 6, dtype=torch.float32, implementation=implementation), causal).eval()
    program = torch.export.export(module, export_case(3, 4, 6), dynamic_shapes=dynamic_shapes())
    for sizes in OTHER_SIZES:
        case = export_case(*sizes)
        torch.testing.assert_close(program.module()(*case), module(*case), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_onnx_runs_in_onnxruntime_at_other_sizes(causal, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    module = Masked(make_layer(16, 4, 6, dtype=torch.float32), causal).eval()
    path = tmp_path / "layer.onnx"
    torch.onnx.export(
        module, export_case(3, 4, 6), path, dynamo=True, dynamic_shapes=dynamic_shapes(), verbose=False,
        input_names=["query", "key", "padding_mask"],
    )  # fmt: skip
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]
    for sizes in OTHER_SIZES:
        case = export_case(*sizes)
        (output,) = session.run(None, {name: part.numpy() for name, part in zip(names, case, strict=True)})
        torch.testing.assert_close(torch.from_numpy(output), module(*case), rtol=0, atol=1e-5)


# --- what it refuses


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embed_dim": 0}, "embed_dim must be an integer >= 1, got 0"),
        ({"num_heads": 0}, "num_heads must be an integer >= 1, got 0"),
        ({"num_heads": 5}, "embed_dim must be divisible by num_heads, got 12 and 5; or give head_dim"),
        ({"shared_dim": 0}, "shared_dim must be an integer >= 1, got 0"),
        ({"shared_dim": 2.5}, "shared_dim must be an integer >= 1, got 2.5"),
        ({"head_dim": -1}, "head_dim must be an integer >= 1, got -1"),
        ({"key_width": 0}, "key_width must be an integer >= 1, got 0"),
        ({"value_width": 0}, "value_width must be an integer >= 1, got 0"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ({"dropout": -0.1}, r"dropout must be in \[0, 1\), got -0.1"),
        ({"dropout": math.nan}, r"dropout must be in \[0, 1\), got nan"),
        ({"mixing": "gaussian"}, "mixing must be one of .*'concatenate'.*, got 'gaussian'"),
        ({"implementation": "flash"}, r"implementation must be 'auto' or one of \['fused', 'cudnn', .*\], got 'flash'"),
    ],
)
def test_bad_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        CollaborativeAttention(**({"embed_dim": 12, "num_heads": 3} | options))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(12,)], r"query must be \(\.\.\., tokens, 12\), got \(12,\)"),
        ([(2, 4, 11)], r"query must be \(\.\.\., tokens, 12\), got \(2, 4, 11\)"),
        ([(2, 4, 12), (2, 5, 12)], r"key must be \(\.\.\., tokens, 7\), got \(2, 5, 12\)"),
        ([(2, 4, 12), (2, 5, 7), (2, 5, 8)], r"value must be \(\.\.\., tokens, 7\), got \(2, 5, 8\)"),
        ([(2, 4, 12), (3, 5, 7)], r"same batch dimensions.*got \(2, 4, 12\), \(3, 5, 7\) and \(3, 5, 7\)"),
        ([(2, 4, 12), (2, 5, 7), (2, 6, 7)], r"key and value the same tokens.*\(2, 5, 7\) and \(2, 6, 7\)"),
    ],
)
def test_wrong_inputs_are_named(shapes, message):
    layer = make_layer(12, 3, 5, key_width=7)
    with pytest.raises(ValueError, match=message):
        layer(*(draw(*shape) for shape in shapes))


def ones(*size, dtype=torch.bool):
    return torch.ones(size, dtype=dtype)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": ones(4, 6)}, r"broadcastable to .*here \(2, 3, 4, 5\).*got \(4, 6\)"),
        ({"mask": ones(3, 4, 5)}, r"broadcastable to .*here \(2, 3, 4, 5\).*got \(3, 1, 4, 5\)"),
        ({"mask": ones(5)}, r"mask must be \(query, key\).*1 batch dimensions of the query, got \(5,\)"),
        ({"mask": ones(1, 2, 3, 4, 5)}, r"mask must be \(query, key\).*got \(1, 2, 3, 4, 5\)"),
        ({"mask": ones(4, 5, dtype=torch.int64)}, "mask must be boolean .* or floating point, got torch.int64"),
        ({"mask": ones(4, 6), "padding_mask": ones(2, 5)}, r"broadcastable to .*here \(2, 3, 4, 5\).*got \(4, 6\)"),
        (
            {"mask": ones(4, 5, dtype=torch.int64), "padding_mask": ones(2, 5)},
            "mask must be boolean .* or floating point, got torch.int64",
        ),
        ({"padding_mask": ones(2, 4)}, r"padding_mask must be \(2, 5\), as the key is, got \(2, 4\)"),
        ({"padding_mask": ones(5)}, r"padding_mask must be \(2, 5\), as the key is, got \(5,\)"),
        ({"padding_mask": ones(2, 5, dtype=torch.int64)}, "padding_mask must be boolean.*got torch.int64"),
    ],
)
def test_wrong_masks_are_named(options, message):
    layer = make_layer(12, 3, 5)
    with pytest.raises(ValueError, match=message):
        layer(draw(2, 4, 12), draw(2, 5, 12), **options)


def test_a_mask_over_several_batch_dimensions_must_fit_them():
    layer = make_layer(12, 3, 5)
    with pytest.raises(ValueError, match=r"batch dimensions broadcastable to \(2, 3\), got \(3, 2, 1, 4, 4\)"):
        layer(draw(2, 3, 4, 12), mask=ones(3, 2, 4, 4))


def test_a_forced_implementation_that_refuses_says_why():
    layer = make_layer(12, 3, 5, implementation="sdpa")
    with pytest.raises(ValueError, match=r"sdpa: it never holds the attention weights, and need_weights=True"):
        layer(draw(2, 4, 12), need_weights=True)


def test_true_is_not_a_size():
    with pytest.raises(ValueError, match="num_heads must be an integer >= 1, got True"):
        CollaborativeAttention(8, True)
