"""Sparse mixing: heads that use a few of the shared dimensions compute what dense heads with zeros elsewhere do."""

import copy
import io
import json
import pickle

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from torch.func import functional_call

import collab
import test_layer
import test_ops
import test_timm
import test_torch_nn
import tiny_models
from collab import CollaborativeAttention, ops
from collab.hosts import SharedWeights
from collab.inspection import find_attention
from collab.layer import head_blocks, start_dims, start_mixing_
from collab.ops.reference import dense_mixing
from collab.structure import all_or_nothing, build_structure_, record_structure_, structure_of
from test_generation import MODELS as GENERATING
from test_generation import MODES, generate, same_generation
from test_ops import SCALE, masks

torch.set_num_threads(1)


def draw_dims(heads, shared_dim, own, seed=0):
    """(head, own) distinct dimensions a head, in no order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(shared_dim, generator=generator)[:own] for _ in range(heads)])


# The operation.


def sparse_inputs(batch, queries, keys, shared, heads, value_dim, own, **options):
    query, key, value, mixing = test_ops.make_inputs(batch, queries, keys, shared, heads, value_dim, **options)
    return query, key, value, mixing[:, :own].contiguous(), draw_dims(heads, shared, own)


def dense(mixing, dims, shared_dim):
    """Weight by weight: the check on the definition itself."""
    full = mixing.new_zeros(len(mixing), shared_dim)
    for head, row in enumerate(dims.tolist()):
        for place, dim in enumerate(row):
            full[head, dim] = mixing[head, place]
    return full


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", test_ops.MASK_NAMES)
def test_every_implementation_is_the_dense_one_under_every_mask(name, causal):
    query, key, value, mixing, dims = sparse_inputs(2, 4, 5, 6, 3, 3, own=2)
    options = {"scale": SCALE, "mask": masks(2, 3, 4, 5)[name], "causal": causal}
    full = dense(mixing, dims, 6)
    expected, weights = ops.attention(query, key, value, full, **options, need_weights=True)
    for implementation in test_ops.PORTABLE:
        output, _ = ops.attention(query, key, value, mixing, dims=dims, **options, implementation=implementation)
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    _, found = ops.attention(query, key, value, mixing, dims=dims, **options, need_weights=True)
    torch.testing.assert_close(found, weights, rtol=0, atol=1e-12)


@pytest.mark.parametrize("content", [True, False])
@pytest.mark.parametrize(
    "shape",  # batch, query, key, shared, heads, value_dim, own: wider and narrower than the values, one, all
    [
        (2, 3, 5, 40, 3, 11, 23),
        (2, 3, 5, 9, 3, 16, 2),
        (1, 1, 1, 1, 1, 1, 1),
        (3, 7, 5, 6, 4, 8, 6),
        (2, 1, 9, 12, 5, 8, 7),
    ],
    ids=str,
)
def test_odd_shapes_and_gradients(shape, content):
    query, key, value, mixing, dims = sparse_inputs(*shape, content=content)
    results = {}
    for name in ("dense", *test_ops.PORTABLE):
        leaves = [part.clone().requires_grad_() for part in (query, key, value, mixing)]
        weights = dense(leaves[3], dims, shape[3]) if name == "dense" else leaves[3]
        options = {"implementation": "reference"} if name == "dense" else {"implementation": name, "dims": dims.int()}
        output, _ = ops.attention(*leaves[:3], weights, scale=SCALE, **options)
        output.square().sum().backward()
        results[name] = [output, *(leaf.grad for leaf in leaves)]
    for name in test_ops.PORTABLE:
        torch.testing.assert_close(results[name], results["dense"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_no_worse_than_the_dense_reference(dtype):
    inputs = sparse_inputs(2, 33, 40, 24, 3, 16, own=9)
    exact, _ = ops.attention(*inputs[:4], dims=inputs[4], scale=SCALE)
    low = [part.to(dtype) for part in inputs[:4]]
    full = dense(low[3], inputs[4], 24)
    own, _ = ops.attention(*low[:3], full, scale=SCALE, implementation="reference")
    for implementation in test_ops.PORTABLE:
        for mixing in (low[3], inputs[3]):  # also of the wider type that a mixed precision keeps it in
            options = {"dims": inputs[4], "scale": SCALE, "implementation": implementation}
            output, _ = ops.attention(*low[:3], mixing, **options)
            assert output.dtype == dtype
            assert 0 < (output.double() - exact).abs().max() <= 2 * (own.double() - exact).abs().max()


def test_shapes_that_do_not_fit_are_named():
    query, key, value, mixing, dims = sparse_inputs(2, 3, 4, 6, 3, 5, own=2)
    with pytest.raises(ValueError, match=r"dims must be \(3, 2\), as mixing is, got \(3, 1\)"):
        ops.attention(query, key, value, mixing, dims=dims[:, :1], scale=1.0)
    with pytest.raises(ValueError, match="mixing must have at most query's 1 dimensions a head, got 2"):
        ops.attention(query[..., :1], key, value, mixing, dims=dims, scale=1.0)
    with pytest.raises(ValueError, match="query must have mixing's 2 shared dimensions, got 6"):
        ops.attention(query, key, value, mixing, scale=1.0)


BAD_DIMS = {
    "from 0 to 5, got 6": torch.tensor([[0, 1], [2, 6], [4, 5]]),
    "from 0 to 5, got -1": torch.tensor([[0, 1], [2, -1], [4, 5]]),
    "must differ within a head, got 4 twice in head 2": torch.tensor([[0, 1], [2, 3], [4, 4]]),
    "must be integers, got torch.float32": torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]),
    r"must be \(3, 1 to 6 dimensions\), got \(2, 2\)": torch.tensor([[0, 1], [2, 3]]),
}


@pytest.mark.parametrize("message", BAD_DIMS)
def test_dims_no_head_can_use_are_named(message):
    layer = CollaborativeAttention(12, 3, 6, dims_per_head=2)
    before = layer.dims.clone()
    with pytest.raises(ValueError, match=f"dims .*{message}"):
        layer.set_dims_(BAD_DIMS[message])
    assert torch.equal(layer.dims, before)
    (site,) = swappable(tiny_attention())
    shared = sparse_weights(site, 6, 2)
    with pytest.raises(ValueError, match=f"dims .*{message}"):
        site.host.install_(site.module, SharedWeights(**(vars(shared) | {"dims": BAD_DIMS[message]})))


# The layer.


def sparse_and_dense_layer(dtype=torch.float64, own=5, **options):
    """A layer with sparse mixing of random weights, and the dense one of the same mixing."""
    torch.manual_seed(0)
    sparse = CollaborativeAttention(16, 4, 12, dims_per_head=own, mixing="normal", dtype=dtype, **options)
    sparse.set_dims_(draw_dims(4, 12, own))
    with torch.no_grad():
        for parameter in sparse.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    full = CollaborativeAttention(16, 4, 12, dtype=dtype, **options)
    state = sparse.state_dict()
    state["mixing"] = dense(state["mixing"], state.pop("mixing_dims"), 12)
    full.load_state_dict(state)
    return sparse.eval(), full.eval()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("bias", [True, False])
def test_layer_equals_the_dense_layer_of_the_same_mixing(bias, dtype, tolerance):
    sparse, full = sparse_and_dense_layer(dtype, bias=bias)
    x, y = torch.randn(2, 3, 5, 16, dtype=dtype), torch.randn(2, 3, 7, 16, dtype=dtype)
    padding = torch.arange(7) < torch.tensor([7, 3, 1])[:, None]
    for call in (
        {"query": x, "causal": True},
        {"query": x, "need_weights": True},
        {"query": x, "key": y, "padding_mask": padding.expand(2, 3, 7)},
        {"query": x, "key": y, "mask": torch.randn(5, 7, dtype=dtype), "causal": True},
    ):
        torch.testing.assert_close(sparse(**call), full(**call), rtol=0, atol=tolerance)


def test_gradients_of_the_layer_are_those_of_the_dense_one():
    sparse, full = sparse_and_dense_layer()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    for layer in (sparse, full):
        layer(x).square().sum().backward()
    expected = {name: parameter.grad for name, parameter in full.named_parameters()}
    expected["mixing"] = expected["mixing"].gather(1, sparse.dims.long())
    for name, parameter in sparse.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=1e-10)
        assert parameter.grad.any()


def test_autocast_and_casts_leave_dims_alone():
    sparse, full = sparse_and_dense_layer(torch.float32)
    x = torch.randn(2, 5, 16)
    with torch.autocast("cpu", torch.bfloat16):
        output, expected = sparse(x), full(x)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output, expected, rtol=0, atol=0.1)
    dims = sparse.dims.clone()
    for cast in (sparse.half(), sparse.to(torch.bfloat16), sparse.double()):
        assert cast.dims.dtype == ops.DIMS_DTYPE
        assert torch.equal(cast.dims, dims)


@pytest.mark.parametrize("need_weights", [False, True])
def test_layer_compiles_into_one_graph(need_weights):
    sparse, _ = sparse_and_dense_layer(torch.float32)
    compiled = torch.compile(sparse, fullgraph=True, backend="aot_eager")
    for length in (5, 9):
        x = torch.randn(2, length, 16, requires_grad=True)
        result, expected = compiled(x, need_weights=need_weights), sparse(x, need_weights=need_weights)
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_layer_exports_and_runs_in_onnxruntime_at_other_sizes(tmp_path):
    layer, _ = sparse_and_dense_layer(torch.float32)
    module = test_layer.Masked(layer, causal=False).eval()
    shapes = test_layer.dynamic_shapes()
    program = torch.export.export(module, test_layer.export_case(3, 4, 6), dynamic_shapes=shapes)
    for sizes in test_layer.OTHER_SIZES:
        case = test_layer.export_case(*sizes)
        torch.testing.assert_close(program.module()(*case), module(*case), rtol=1e-5, atol=1e-5)
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    file = tmp_path / "layer.onnx"
    torch.onnx.export(program, (), file, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]
    for sizes in test_layer.OTHER_SIZES:
        case = test_layer.export_case(*sizes)
        (output,) = session.run(None, {name: part.numpy() for name, part in zip(names, case, strict=True)})
        torch.testing.assert_close(torch.from_numpy(output), module(*case), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("heads", "shared_dim", "own"), [(4, 12, 3), (4, 12, 5), (4, 12, 12), (4, 12, 1), (5, 12, 4)])
def test_dims_start_with_the_own_block_and_spread(heads, shared_dim, own):
    dims = start_dims(heads, shared_dim, own)
    ops.check_dims(dims, heads, shared_dim)
    blocks = head_blocks(heads, shared_dim)
    assert torch.equal(blocks.gather(1, dims).sum(1), blocks.sum(1).clamp(max=own))
    uses = dims.flatten().bincount(minlength=shared_dim)
    if own >= shared_dim // heads:
        assert uses.min() >= 1
        assert uses.max() - uses.min() <= 2


def test_mixing_starts_as_its_name_says():
    dims = start_dims(4, 12, 5)
    mixing = torch.empty(4, 5)
    start_mixing_(mixing, 3, "concatenate", dims=dims, shared_dim=12)
    assert torch.equal(dense(mixing, dims, 12), head_blocks(4, 12))
    wide = torch.empty(50, 400)
    for start in ("normal", "uniform"):
        start_mixing_(wide, 8, start, torch.Generator().manual_seed(0))
        assert wide.square().sum(1).mean() == pytest.approx(8, rel=0.05)
    layer = CollaborativeAttention(16, 4, 12, dims_per_head=5)
    ordinary = CollaborativeAttention(16, 4, 12)
    ordinary.load_state_dict({name: part for name, part in layer.state_dict().items() if "mixing" not in name} | {
        "mixing": ordinary.mixing.detach()})  # fmt: skip
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(layer(x), ordinary(x), rtol=0, atol=1e-6)
    assert "shared_dim=12, dims_per_head=5" in repr(layer)
    assert "dims_per_head" not in repr(ordinary)
    assert ordinary.dims is None


def test_layer_travels():
    layer, _ = sparse_and_dense_layer(torch.float32)
    x = torch.randn(2, 5, 16)
    fresh = CollaborativeAttention(16, 4, 12, dims_per_head=5)
    assert not torch.equal(fresh.dims, layer.dims)
    fresh.load_state_dict(layer.state_dict())
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    for again in (
        fresh,
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(buffer, weights_only=False),
    ):
        assert torch.equal(again(x), layer(x))
    with pytest.raises(RuntimeError, match="mixing_dims"):
        CollaborativeAttention(16, 4, 12).load_state_dict(layer.state_dict())


def test_bad_settings_of_the_layer_are_named():
    for bad in (0, 13, 2.5, True):
        with pytest.raises(ValueError, match=f"dims_per_head must be an integer from 1 to shared_dim 12, got {bad}"):
            CollaborativeAttention(16, 4, 12, dims_per_head=bad)
    layer = CollaborativeAttention(16, 4, 12, dims_per_head=5)
    with pytest.raises(ValueError, match=r"dims must be \(4, 5\), as mixing is, got \(4, 3\)"):
        layer.set_dims_(draw_dims(4, 12, 3))
    with pytest.raises(ValueError, match="build it with dims_per_head"):
        CollaborativeAttention(16, 4, 12).set_dims_(draw_dims(4, 12, 5))


def test_layer_without_values():
    layer = CollaborativeAttention(16, 4, 12, dims_per_head=5, device="meta")
    assert layer.dims.is_meta
    assert layer.to_empty(device="cpu").dims.shape == (4, 5)


# Other libraries' layers.


def tiny_attention():
    """Three heads, 12 wide."""
    return nn.Sequential(nn.MultiheadAttention(12, 3))


def swappable(model):
    return [site for site in find_attention(model) if site.host is not None and not site.why_not]


def sparse_weights(site, shared_dim, own, seed=0):
    weights = site.host.read(site.module)
    generator = torch.Generator().manual_seed(seed)

    def draw(*size):
        return (0.4 * torch.randn(size, generator=generator)).to(weights.query)

    heads, key_in = weights.num_heads, weights.key.shape[2]
    return SharedWeights(
        query=draw(shared_dim, weights.query.shape[2]),
        key=draw(shared_dim, key_in),
        mixing=draw(heads, own),
        content=draw(heads, key_in),
        dims=draw_dims(heads, shared_dim, own, seed),
    )


def sparse_and_dense(model, shared_dim=12, own=5):
    """Two copies of a model with the same shared weights: sparse mixing, and dense mixing with zeros."""
    both = []
    for is_sparse in (True, False):
        made = copy.deepcopy(model)
        for number, site in enumerate(swappable(made)):
            shared = sparse_weights(site, shared_dim, own, seed=number)
            if not is_sparse:
                full = dense(shared.mixing, shared.dims, shared_dim)
                shared = SharedWeights(shared.query, shared.key, full, shared.content)
            site.host.install_(site.module, shared)
        record_structure_(made)
        both.append(made)
    return both


def outputs(model, inputs):
    with torch.no_grad():
        result = model(**inputs)
    return [part for part in result.to_tuple() if isinstance(part, torch.Tensor)]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", tiny_models.MAIN_MODELS)
def test_models_equal_the_dense_ones(name, attention):
    model = tiny_models.MAIN_MODELS[name](attention)
    sparse, full = sparse_and_dense(model)
    inputs = tiny_models.inputs_for(model)
    result, expected = outputs(sparse, inputs), outputs(full, inputs)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-5)
    assert any((a - b).abs().max() > 1e-3 for a, b in zip(result, outputs(model, inputs), strict=True))
    for site in find_attention(sparse):
        assert site.module.shared_dim == 12
        assert site.module.dims.shape == site.module.mixing.shape == (4, 5)
        assert site.why_not == ("already collaborative, with shared_dim 12, 5 of them a head",)
    exact, expected = (outputs(one.double(), to_double(inputs)) for one in (sparse, full))
    torch.testing.assert_close(exact, expected, rtol=0, atol=1e-6)


def to_double(inputs):
    return {name: part.double() if part.is_floating_point() else part for name, part in inputs.items()}


@pytest.mark.parametrize("name", ["plain", "BEiT", "MaxViT", "TNT", "VOLO, class", "Twins", "pooling, averaged"])
@pytest.mark.parametrize("fused", [True, False])
@torch.no_grad()
def test_timm_classes_equal_the_dense_ones(name, fused):
    case = test_timm.CASES[name]
    original = test_timm.build(case, fused)
    sparse, full = sparse_and_dense(original)
    output = sparse(case.x, **case.given)
    torch.testing.assert_close(output, full(case.x, **case.given), rtol=0, atol=1e-5)
    assert (output - original(case.x, **case.given)).abs().max() > 1e-3


@pytest.mark.parametrize("form", ["fused", "separate, batch first"])
@pytest.mark.parametrize("options", test_torch_nn.WEIGHTS)
@torch.no_grad()
def test_multihead_attention_equals_the_dense_one(form, options):
    original = test_torch_nn.attention(**test_torch_nn.FORMS[form])
    sparse, full = sparse_and_dense(original)
    parts = test_torch_nn.inputs(original)
    given = {"attn_mask": test_torch_nn.ADDED, **options}
    for result, expected in zip(sparse(*parts, **given), full(*parts, **given), strict=True):
        if expected is not None:
            torch.testing.assert_close(result, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "t5", "bart"])
def test_generation_with_every_cache(name):
    sparse, full = sparse_and_dense(GENERATING[name]("sdpa"), shared_dim=10, own=3)
    expected = generate(full)
    for mode in ("greedy", "no-cache", "static", "explicit-static", "beam"):
        wanted = generate(full, **MODES[mode](full)) if mode == "beam" else expected
        same_generation(generate(sparse, **MODES[mode](sparse)), wanted)


def test_caches_hold_what_dense_layers_cache():
    sparse, _ = sparse_and_dense(GENERATING["gpt2"]("sdpa"), shared_dim=10, own=3)
    cache = sparse(tiny_models.token_ids(), use_cache=True).past_key_values
    assert cache.layers[0].keys.shape == (3, 1, 7, 10 + 4)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_models_compile_into_one_graph(name):
    sparse, _ = sparse_and_dense(tiny_models.MAIN_MODELS[name]("sdpa"))
    inputs = tiny_models.inputs_for(sparse)
    compiled = torch.compile(sparse, fullgraph=True, backend="eager")
    torch.testing.assert_close(outputs(compiled, inputs), outputs(sparse, inputs), rtol=0, atol=1e-6)


def test_layers_travel_and_train():
    sparse, _ = sparse_and_dense(tiny_models.gpt2("sdpa"))
    inputs = tiny_models.inputs_for(sparse)
    for again in (copy.deepcopy(sparse), pickle.loads(pickle.dumps(sparse))):
        assert all(torch.equal(a, b) for a, b in zip(outputs(again, inputs), outputs(sparse, inputs), strict=True))
    site = find_attention(sparse)[0]
    before = site.module.dims.clone()
    optimizer = torch.optim.SGD(sparse.parameters(), lr=0.1)
    sparse(**inputs)[0].square().mean().backward()
    assert site.module.mixing.grad.any()
    optimizer.step()
    assert torch.equal(site.module.dims, before)
    assert site.module.bfloat16().dims.dtype == ops.DIMS_DTYPE


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_weights_are_taken_out_and_put_in(name):
    model = tiny_models.MAIN_MODELS[name]("sdpa")
    first, _ = sparse_and_dense(model)
    second = copy.deepcopy(model)
    parameters = {}
    for site, original in zip(find_attention(first), swappable(second), strict=True):
        shared = sparse_weights(original, 12, 5, seed=9)
        parameters |= {
            f"{site.path}.{name}": part for name, part in site.host.parameters_from(site.module, shared).items()
        }
        original.host.install_(original.module, shared)
        taken = original.host.shared_weights(original.module)
        for part, given in vars(shared).items():
            assert torch.equal(getattr(taken, part), given)
            assert getattr(taken, part).dtype == given.dtype
        full = SharedWeights(shared.query, shared.key, dense(shared.mixing, shared.dims, 12), shared.content)
        with pytest.raises(ValueError, match=r"12 shared dimensions and sparse mixing of \(4, 5\).*dense mixing of"):
            site.host.parameters_from(site.module, full)
    inputs = tiny_models.inputs_for(model)
    with torch.no_grad():
        result = functional_call(first, parameters, (), inputs)[0]
        torch.testing.assert_close(result, second(**inputs)[0], rtol=0, atol=1e-6)


def test_what_is_installed_is_a_copy_and_a_failure_is_undone():
    model = tiny_attention()
    (site,) = swappable(model)
    shared = sparse_weights(site, 6, 2)
    before = dict(model.state_dict())
    with pytest.raises(RuntimeError, match="half way"), all_or_nothing(model, [site]):  # noqa: PT012
        site.host.install_(site.module, shared)
        assert site.module.dims is not None
        raise RuntimeError("half way")
    assert model.state_dict().keys() == before.keys()
    assert type(site.module) is nn.MultiheadAttention
    site.host.install_(site.module, shared)
    shared.dims.zero_()
    ops.check_dims(site.module.dims, 3, 6)


# Saved and loaded.


def saved(folder, name="bert"):
    model, _ = sparse_and_dense(tiny_models.MAIN_MODELS[name]())
    collab.save(model, folder)
    return model


@pytest.mark.parametrize("name", ["bert", "albert", "gpt2", "t5", "vit"])
def test_transformers_models_are_saved_and_loaded(name, tmp_path):
    model = saved(tmp_path / "out", name)
    inputs = tiny_models.inputs_for(model)
    for again in (collab.load(tmp_path / "out"), type(model).from_pretrained(tmp_path / "out")):
        assert all(torch.equal(a, b) for a, b in zip(outputs(again, inputs), outputs(model, inputs), strict=True))
        assert structure_of(again) == structure_of(model)
    low = type(model).from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    site, of_low = find_attention(model)[0], find_attention(low)[0]
    assert of_low.module.mixing.dtype == torch.bfloat16
    assert torch.equal(of_low.module.dims, site.module.dims)
    assert of_low.module.dims.dtype == ops.DIMS_DTYPE
    low.save_pretrained(tmp_path / "again")
    assert torch.equal(find_attention(collab.load(tmp_path / "again"))[0].module.dims, site.module.dims)


def test_other_models_are_saved_and_loaded(tmp_path):
    vit, _ = sparse_and_dense(test_timm.model("vit_tiny_patch16_224"))
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, 16, batch_first=True), 2)
    torch_model, _ = sparse_and_dense(encoder.eval(), shared_dim=6, own=2)
    collab.save(vit, tmp_path / "vit")
    collab.save(torch_model, tmp_path / "encoder")
    again = collab.load(tmp_path / "vit")
    x = test_timm.images("vit_tiny_patch16_224")
    assert torch.equal(again(x), vit(x))
    loaded = collab.load(tmp_path / "encoder", model=copy.deepcopy(encoder))
    x = torch.randn(2, 5, 12)
    assert torch.equal(loaded(x), torch_model(x))
    assert all(site.module.dims.dtype == ops.DIMS_DTYPE for model in (again, loaded) for site in find_attention(model))


def test_what_is_on_disk(tmp_path):
    saved(tmp_path / "out")
    entry = json.loads((tmp_path / "out" / "config.json").read_text())["collaborative"]
    assert entry["format_version"] == 2
    for site in entry["sites"].values():
        assert site == {"host": "BertSelfAttention", "shared_dim": 12, "dims_per_head": 5}
    weights = load_file(tmp_path / "out" / "model.safetensors")
    for name in entry["sites"]:
        assert weights[f"{name}.mixing"].shape == weights[f"{name}.mixing_dims"].shape == (4, 5)
        assert weights[f"{name}.mixing_dims"].dtype == ops.DIMS_DTYPE
    _, full = sparse_and_dense(tiny_models.bert())
    collab.save(full, tmp_path / "dense")
    entry = json.loads((tmp_path / "dense" / "config.json").read_text())["collaborative"]
    # What a reader that knows no sparse mixing needs, and nothing else.
    assert entry["format_version"] == 1
    assert entry["sites"]["encoder.layer.0.attention.self"] == {"host": "BertSelfAttention", "shared_dim": 12}


@pytest.mark.parametrize("library", ["transformers", "torch"])
@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([0, 1, 2, 3, 12], "from 0 to 11, got 12"),
        ([-1, 1, 2, 3, 4], "from 0 to 11, got -1"),
        ([0, 1, 7, 3, 7], "got 7 twice in head 1"),
    ],
)
def test_bad_dims_in_a_file_are_refused_by_name(library, row, message, tmp_path):
    if library == "transformers":
        saved(tmp_path / "out")
        path = "encoder.layer.1.attention.self"
        options = {}
    else:
        plain = nn.Sequential(nn.MultiheadAttention(32, 4), nn.MultiheadAttention(32, 4))
        collab.save(sparse_and_dense(plain)[0], tmp_path / "out")
        path = "1"
        options = {"model": plain}
    file = tmp_path / "out" / "model.safetensors"
    weights = load_file(file)
    weights[f"{path}.mixing_dims"][1] = torch.tensor(row)
    save_file(weights, file, metadata={"format": "pt"})
    match = rf"{path}\.mixing_dims in .*{message}"
    with pytest.raises(collab.CheckpointError, match=match):
        collab.load(tmp_path / "out", **options)
    if options:
        assert not structure_of(options["model"])
        assert type(options["model"][0]) is nn.MultiheadAttention
    else:
        with pytest.raises(collab.CheckpointError, match=match):
            transformers.AutoModel.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dims_per_head": 13}, "dims_per_head from 1 to shared_dim 12, or none, got 13"),
        ({"dims_per_head": 0}, "dims_per_head from 1 to shared_dim 12, or none, got 0"),
        ({"dims_per_head": True}, "dims_per_head from 1 to shared_dim 12, or none, got True"),
        ({"dims_per_head": 4}, r"mixing.* must be \(4, 4\).*got \(4, 5\)"),
        # As a reader sees it that knows no sparse mixing.
        ({"dims_per_head": None}, "mixing_dims, which collaborative attention does not have"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_configs_that_do_not_fit_are_refused(change, message, tmp_path):
    saved(tmp_path / "out")
    file = tmp_path / "out" / "config.json"
    config = json.loads(file.read_text())
    config["collaborative"]["sites"]["encoder.layer.0.attention.self"] |= change
    file.write_text(json.dumps(config))
    with pytest.raises(collab.CheckpointError, match=message):
        collab.load(tmp_path / "out")


def test_a_structure_must_fit_the_layers():
    with pytest.raises(ValueError, match="dims_per_head must be between 1 and 6 at 0, got 7"):
        build_structure_(tiny_attention(), {"0": {"host": "MultiheadAttention", "shared_dim": 6, "dims_per_head": 7}})
    assert torch.equal(dense_mixing(torch.ones(1, 2), torch.tensor([[3, 1]]), 4), torch.tensor([[0.0, 1, 0, 1]]))
