"""What hosts say of a layer: the inputs it projects, and its weights, taken out and put in without changing it."""

import copy
import dataclasses
import inspect

import pytest
import torch
from torch import nn
from torch.func import functional_call

import collab
import test_timm
import test_torch_nn
from collab.hosts import SharedWeights, empty_shared_weights
from collab.inspection import find_attention
from host_cases import CASES, NotInTransformers
from test_every_host import leaves, run
from tiny_models import inputs_for, numbers, randomise_, tiny

torch.set_num_threads(1)

PARTS = ("query", "key", "mixing", "content")


def swappable(model):
    return [site for site in find_attention(model) if site.host is not None and not site.why_not]


def watched(sites, call):
    """(path, role) -> what was seen while `call` ran."""
    seen = {}
    handles = [
        handle
        for site in sites
        for handle in site.host.watch_inputs(
            site.module, lambda role, x, path=site.path: seen.setdefault((path, role), []).append(x)
        )
    ]
    assert handles
    call()
    for handle in handles:
        handle.remove()
    count = {key: len(inputs) for key, inputs in seen.items()}
    call()
    assert count == {key: len(inputs) for key, inputs in seen.items()}, "it goes on after the handles are removed"
    return seen


def random_weights(site, seed, shared_dim=None):
    """Shared weights for a layer, of no meaning, with gradients."""
    empty = empty_shared_weights(site.host.read(site.module), shared_dim or site.full_dim // 2)
    generator = torch.Generator().manual_seed(seed)
    parts = {name: getattr(empty, name) for name in PARTS}
    return SharedWeights(
        **{
            name: (0.4 * torch.randn(part.shape, generator=generator)).to(part).requires_grad_()
            for name, part in parts.items()
        }
    )


def detached(shared):
    return dataclasses.replace(shared, **{name: getattr(shared, name).detach() for name in PARTS})


def installed(model, weights):
    """A copy of the model with these weights, by path."""
    converted = copy.deepcopy(model)
    for site in swappable(converted):
        site.host.install_(site.module, detached(weights[site.path]))
    return converted


def from_arguments(site):
    """Hook to the module: what the shell of its collaborative form would project, from forward's arguments."""
    found = []
    names = tuple(inspect.signature(type(site.module).forward).parameters)[1:]

    def hook(module, args, kwargs):
        given = dict(zip(names, args, strict=False)) | kwargs
        found.append(site.host.inputs_of(module, given, names[0])[:2])

    return site.module.register_forward_pre_hook(hook, with_kwargs=True), found


def check_weights(model, call):
    """Weights put in by name do what installed ones do, with gradients, and come out as they went in."""
    sites = swappable(model)
    first, second = ({site.path: random_weights(site, seed) for site in sites} for seed in (1, 2))
    converted, expected = installed(model, first), installed(model, second)
    parameters = {}
    for site in collab.find_attention(converted):
        if site.path in second:
            named = site.host.parameters_from(site.module, second[site.path])
            assert all(site.module.get_parameter(name).shape == values.shape for name, values in named.items())
            parameters |= {f"{site.path}.{name}".lstrip("."): values for name, values in named.items()}
    torch.manual_seed(0)
    result = leaves(call(lambda *args, **kwargs: functional_call(converted, parameters, args, kwargs)))
    exact = leaves(call(expected))
    torch.testing.assert_close(result, exact, atol=1e-6, rtol=1e-6)
    other = leaves(call(converted))
    assert any(not torch.allclose(a, b, atol=1e-4) for a, b in zip(result, other, strict=True))
    sum((tensor.float() ** 2).sum() for tensor in result).backward()
    for path, shared in second.items():
        for name in PARTS:
            grad = getattr(shared, name).grad
            assert grad is not None, (path, name)
            assert grad.any(), (path, name)
    for site in collab.find_attention(expected):
        if site.path in second:
            taken, given = site.host.shared_weights(site.module), second[site.path]
            assert all(torch.equal(getattr(taken, name), getattr(given, name)) for name in PARTS)
            assert taken.dims is None
            assert not taken.query.requires_grad
            assert taken.query.data_ptr() != next(site.module.parameters()).data_ptr()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_class_of_transformers(case):
    """The inputs seen are those that the contract in test_every_host.py proves to be projected, batch first."""
    try:
        model = case.build(case.implementations[0])
        inputs = case.inputs(model)
    except NotInTransformers as error:
        pytest.skip(str(error))
    # SigLIP pools with nn.MultiheadAttention, which has tests of its own.
    sites = [site for site in swappable(model) if hasattr(site.host, "inputs_of")]
    hooks = {site.path: from_arguments(site) for site in sites}
    seen = watched(sites, lambda: run(model, inputs))
    for site in sites:
        handle, found = hooks[site.path]
        handle.remove()
        widths = {"query": site.query_width, "key": site.key_width}
        for index, role in enumerate(widths):
            expected = [inputs[index] for inputs in found[: len(found) // 2]]  # the model ran twice
            got = seen[site.path, role]
            assert len(got) == len(expected) >= 1
            for ours, theirs in zip(got, expected, strict=True):
                assert ours.shape[-1] == widths[role]
                torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)

    def call(model):
        torch.manual_seed(0)
        return model(**inputs)

    check_weights(model, call)


def test_keys_of_another_sequence():
    """Cross-attention: keys are seen as the other sequence, whole, and queries as the layer's own."""
    for name in ("BertModel", "GPT2Model"):
        model = tiny(name, add_cross_attention=True, is_decoder=True)
        memory = numbers(3, 5, 32, seed=4)
        inputs = inputs_for(model) | {"encoder_hidden_states": memory, "encoder_attention_mask": torch.ones(3, 5)}
        sites = [site for site in swappable(model) if site.kind == "cross"]
        assert len(sites) == 2
        seen = watched(sites, lambda model=model, inputs=inputs: run(model, inputs))
        for site in sites:
            assert torch.equal(seen[site.path, "key"][0], memory)
            assert seen[site.path, "query"][0].shape == (3, 7, 32)
    model = tiny("T5Model")
    encoded = []
    model.encoder.register_forward_hook(lambda module, args, result: encoded.append(result[0]))
    seen = watched(swappable(model), lambda: run(model, inputs_for(model)))
    path = "decoder.block.1.layer.1.EncDecAttention"
    assert torch.equal(seen[path, "key"][0], encoded[0])
    assert seen[path, "query"][0].shape != encoded[0].shape or not torch.equal(seen[path, "query"][0], encoded[0])


@pytest.mark.parametrize("name", ["BertModel", "ViTModel", "T5Model", "GPT2Model"])
def test_scores_follow_from_what_is_seen(name):
    """Inputs seen, weights read and the scale give the attention weights that the model itself returns."""
    model = tiny(name, "eager")
    inputs = inputs_for(model) | {"output_attentions": True}
    inputs.pop("attention_mask", None)
    sites = [site for site in swappable(model) if site.kind == "self" and "decoder" not in site.path]
    with torch.no_grad():
        result = model(**inputs)
    given = result.get("encoder_attentions", result.get("attentions"))
    seen = watched(sites, lambda: run(model, inputs))
    assert len(sites) == len(given) == 2
    for site, expected in zip(sites, given, strict=True):
        weights = site.host.read(site.module)
        query, key = (seen[site.path, role][0] for role in ("query", "key"))
        heads = torch.einsum("bqi,hdi->bhqd", query, weights.query)
        if weights.query_bias is not None:
            heads = heads + weights.query_bias[:, None]
        scores = torch.einsum("bhqd,hdi,bki->bhqk", heads, weights.key, key) * site.host.scale(site.module)
        if name == "T5Model":
            scores = scores + model.encoder.block[0].layer[0].SelfAttention.compute_bias(7, 7)
        if name == "GPT2Model":
            scores = scores.masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -torch.inf)
        torch.testing.assert_close(scores.softmax(-1), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", test_timm.CASES)
def test_every_class_of_timm(name):
    case = test_timm.CASES[name]
    module = test_timm.build(case)
    (site,) = swappable(module)

    def call(model):
        return model(case.x, **case.given)

    with torch.no_grad():
        seen = watched([site], lambda: call(module))
    tokens = case.x.flatten(1, -2)
    expected = {"query": site.host.queries(module, tokens), "key": site.host.keys(module, tokens, case.given)}
    for role, inputs in expected.items():
        assert len(seen["", role]) == 1
        torch.testing.assert_close(seen["", role][0], inputs, atol=1e-6, rtol=0)
    check_weights(module, call)


@pytest.mark.parametrize("form", test_torch_nn.FORMS)
def test_multihead_attention(form):
    module = test_torch_nn.attention(**test_torch_nn.FORMS[form])
    query, key, value = test_torch_nn.inputs(module)
    (site,) = swappable(module)
    seen = watched([site], lambda: module(query, value=value, key=key))
    for role, inputs in {"query": query, "key": key}.items():
        assert torch.equal(seen["", role][0], inputs if module.batch_first else inputs.transpose(0, 1))
    check_weights(module, lambda model: model(query, key, value)[0])
    one = [part[0] if module.batch_first else part[:, 0] for part in (query, key, value)]
    seen = watched([site], lambda: module(*one))
    assert torch.equal(seen["", "key"][0], one[1][None])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_fast_paths_of_torch_are_seen_through():
    """An encoder in evaluation runs fused kernels over nested tensors: each sequence is seen without its padding."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = randomise_(nn.TransformerEncoder(layer, 2)).eval()
    x, padding = numbers(2, 5, 16), torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1]]).bool()
    with torch.no_grad():
        seen = watched(swappable(model), lambda: model(x, src_key_padding_mask=padding))
    for role in ("query", "key"):
        first, second = seen["layers.0.self_attn", role]
        assert torch.equal(first, x[:1])
        assert torch.equal(second, x[1:, :3])
        assert [inputs.shape[1] for inputs in seen["layers.1.self_attn", role]] == [5, 3]


def test_weights_of_other_sizes_are_refused():
    model = tiny("BertModel")
    smaller = {site.path: random_weights(site, 1, 8) for site in swappable(model)}
    converted = installed(model, smaller)
    site = collab.find_attention(converted)[0]
    other = random_weights(swappable(model)[0], 1, 12)
    with pytest.raises(ValueError, match=r"must have 8 shared dimensions and dense mixing of \(4, 8\)"):
        site.host.parameters_from(site.module, other)


def test_parameters_take_the_type_of_the_module():
    """Weights kept in float32 beside a model in bfloat16, as mixed precision does."""
    model = tiny("GPT2Model")
    sites = swappable(model)
    converted = installed(model, {site.path: random_weights(site, 1) for site in sites}).bfloat16()
    site = collab.find_attention(converted)[0]
    shared = random_weights(sites[0], 2)
    parameters = site.host.parameters_from(site.module, shared)
    assert {values.dtype for values in parameters.values()} == {torch.bfloat16}
    sum(values.float().sum() for values in parameters.values()).backward()
    assert shared.query.grad.dtype == torch.float32
