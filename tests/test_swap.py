"""collaborate_ and find_attention: sizes, filters, reports, all or nothing, and errors that say what was wrong."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiny_models
from collab import CollaborativeConfig, NoAttentionFound, collaborate_, find_attention, structure, swap
from collab.hosts.linear import LinearHost

BERT_LAYERS = ["encoder.layer.0.attention.self", "encoder.layer.1.attention.self"]
FULL = 32
"""4 heads of 8."""


def sizes(model: nn.Module) -> dict[str, int]:
    return {path: entry["shared_dim"] for path, entry in structure.structure_of(model).items()}


def config(shared_dim: Any, **settings: Any) -> CollaborativeConfig:
    return CollaborativeConfig(shared_dim=shared_dim, **({"max_iterations": 3} | settings))


def refusal(model: nn.Module, shared_dim: Any = 10, kind: type[Exception] = ValueError, **settings: Any) -> str:
    """The message of the error a swap ends with; the model must be untouched."""
    before = fingerprint(model)
    with pytest.raises(kind) as caught:
        collaborate_(model, config(shared_dim, **settings))
    assert fingerprint(model) == before
    return str(caught.value)


def fingerprint(model: Any) -> dict[str, Any]:
    """Classes, attributes, parameter objects with their values, and config: equal only if nothing was touched."""
    described = model.config.to_json_string() if hasattr(model, "config") else None
    modules = {
        name: (type(module), list(vars(module)), list(module._parameters.items()), list(module._modules))
        for name, module in model.named_modules()
    }
    values = {
        name: None if value.is_meta else value.flatten().view(torch.uint8).tolist()
        for name, value in model.state_dict().items()
    }
    layouts = {name: repr(module) for name, module in model.named_modules()}
    return {"config": described, "modules": modules, "values": values, "layouts": layouts}


# sizes and selection


def test_an_integer_is_the_size_of_every_layer() -> None:
    model = tiny_models.bert()
    report = collaborate_(model, config(10))
    assert sizes(model) == dict.fromkeys(BERT_LAYERS, 10)
    assert [site.path for site in report.sites] == BERT_LAYERS
    assert report.left == {}
    for path in BERT_LAYERS:
        layer = model.get_submodule(path)
        assert (layer.query.out_features, layer.key.out_features, layer.mixing.shape) == (10, 14, (4, 10))


def test_a_fraction_is_of_each_layers_own_size() -> None:
    model = tiny_models.clip(vision_config={"hidden_size": 48, "num_attention_heads": 4})
    assert {site.full_dim for site in find_attention(model)} == {32, 48}
    report = collaborate_(model, config(0.5))
    assert {site.path.split(".")[0]: site.shared_dim for site in report.sites} == {"text_model": 16, "vision_model": 24}
    assert len(report.sites) == 4


def test_a_mapping_names_the_layers_and_leaves_the_others() -> None:
    model = tiny_models.bert()
    report = collaborate_(model, config({BERT_LAYERS[1]: 7}))
    assert sizes(model) == {BERT_LAYERS[1]: 7}
    assert report.left == {BERT_LAYERS[0]: ["not selected"]}
    message = refusal(tiny_models.bert(), {"encoder.layer.9.attention.self": 7, BERT_LAYERS[0]: 7})
    assert "encoder.layer.9.attention.self" in message
    assert "it has encoder.layer.0.attention.self, encoder.layer.1.attention.self" in message


def test_a_filter_chooses_layers() -> None:
    model = tiny_models.bart()
    report = collaborate_(model, config(10), only=lambda site: site.kind == "cross")
    assert len(report.sites) == 2
    assert all(path.endswith("encoder_attn") for path in sizes(model))
    assert len(report.left) == 4
    with pytest.raises(NoAttentionFound, match=r"no attention to swap in BertModel; looked at: .*\(not selected\)"):
        collaborate_(tiny_models.bert(), config(10), only=lambda site: False)


def test_one_layer_after_the_other() -> None:
    model = tiny_models.bert()
    expected = model(**tiny_models.inputs_for(model))[0]
    for path in BERT_LAYERS:
        collaborate_(model, config({path: FULL}))
    assert sizes(model) == dict.fromkeys(BERT_LAYERS, FULL)
    torch.testing.assert_close(model(**tiny_models.inputs_for(model))[0], expected, atol=1e-5, rtol=0)


def test_an_attention_module_on_its_own() -> None:
    layer = tiny_models.bert().get_submodule(BERT_LAYERS[0])
    inputs = tiny_models.numbers(2, 5, 32)
    expected = layer(inputs)[0]
    report = collaborate_(layer, config(FULL))
    assert [site.path for site in report.sites] == [""]
    torch.testing.assert_close(layer(inputs)[0], expected, atol=1e-5, rtol=0)


# fresh weights


@pytest.mark.parametrize("mixing", ["concatenate", "normal", "uniform", "ones"])
def test_fresh_weights_come_from_the_seed_alone(mixing: str) -> None:
    def weights(seed: int, noise: int) -> dict[str, Tensor]:
        model = tiny_models.bert()
        torch.manual_seed(noise)
        state = torch.get_rng_state()
        report = collaborate_(model, config(10, weights="fresh", mixing=mixing, seed=seed))
        assert torch.equal(torch.get_rng_state(), state)
        assert all(site.error is None for site in report.sites)
        return model.state_dict()

    once, again, other = weights(0, 1), weights(0, 2), weights(1, 1)
    assert all(torch.equal(once[name], again[name]) for name in once)
    path = BERT_LAYERS[0]
    assert not torch.equal(once[f"{path}.query.weight"], other[f"{path}.query.weight"])
    assert not torch.equal(once[f"{path}.query.weight"], once[f"{BERT_LAYERS[1]}.query.weight"])
    assert not once[f"{path}.key.weight"][10:].any()  # no content yet
    rows = once[f"{path}.mixing"]
    if mixing == "concatenate":
        assert rows.sum(0).tolist() == [1.0] * 10
    elif mixing == "ones":
        assert (rows == 1).all()
    else:
        assert rows.unique().numel() == rows.numel()
        assert torch.equal(rows, other[f"{path}.mixing"]) is False


def test_fresh_heads_that_use_few_dimensions_are_the_dense_ones_with_a_shorter_mixing() -> None:
    """With as many dimensions a head as its own block has, nothing is left out: heads as before, at their own cost."""
    dense, sparse = tiny_models.bert(), tiny_models.bert()
    collaborate_(dense, config(8, weights="fresh"))
    collaborate_(sparse, config(8, weights="fresh", dims_per_head=2))
    layer = sparse.get_submodule(BERT_LAYERS[0])
    assert layer.mixing.shape == (4, 2)
    assert layer.mixing_dims.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    inputs = tiny_models.numbers(2, 5, 32)
    expected = dense.get_submodule(BERT_LAYERS[0])(inputs)[0]
    torch.testing.assert_close(layer(inputs)[0], expected, atol=1e-6, rtol=0)


def test_the_scale_of_fresh_layers_is_saved_with_their_mixing() -> None:
    """Heads of a reduced size, with the scale of that size: ordinary attention that was built so, exactly."""
    model = tiny_models.bert()  # 32 wide, 4 heads of 8
    collaborate_(model, config(8, weights="fresh", dims_per_head=2, scale=2**-0.5))
    layer = model.get_submodule(BERT_LAYERS[0])
    inputs = tiny_models.numbers(2, 5, 32)
    query, key = (
        (inputs @ weight.T).unflatten(-1, (4, 2)).transpose(1, 2)
        for weight in (layer.query.weight, layer.key.weight[:8])
    )
    value = layer.value(inputs).unflatten(-1, (4, 8)).transpose(1, 2)
    expected = (query @ key.mT / 2**0.5).softmax(-1) @ value
    torch.testing.assert_close(layer(inputs)[0], expected.transpose(1, 2).flatten(-2), atol=1e-5, rtol=0)
    again = tiny_models.bert()
    collaborate_(again, config(8, weights="fresh", dims_per_head=2))
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.get_submodule(BERT_LAYERS[0])(inputs)[0], layer(inputs)[0])


def test_fresh_weights_follow_dtype_and_trainability_and_spare_the_values() -> None:
    model = tiny_models.bert().to(torch.bfloat16)
    layer = model.get_submodule(BERT_LAYERS[0])
    layer.requires_grad_(False)
    value = layer.value.weight.clone()
    collaborate_(model, config(10, weights="fresh"))
    assert {parameter.dtype for parameter in layer.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    assert torch.equal(layer.value.weight, value)


# the report


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "albert", "clip"])
def test_parameters_are_counted_as_they_are(name: str) -> None:
    model = tiny_models.MAIN_MODELS[name]()

    def counted(module: nn.Module) -> int:
        return sum({id(parameter): parameter.numel() for parameter in module.parameters()}.values())

    before = {site.path: counted(site.module) for site in find_attention(model)}
    whole = counted(model)
    report = collaborate_(model, config(10))
    assert {site.path: site.parameters_before for site in report.sites} == before
    assert {site.path: site.parameters_after for site in report.sites} == {
        path: counted(model.get_submodule(path)) for path in before
    }
    assert (report.parameters_before, report.parameters_after) == (whole, counted(model))
    assert report.parameters_after < report.parameters_before


@pytest.mark.parametrize("name", ["bert", "opt", "vit"])
def test_the_error_reported_is_that_of_the_weights_installed(name: str) -> None:
    model = tiny_models.MAIN_MODELS[name]()
    names = ("query", "key") if name == "bert" else ("q_proj", "k_proj")

    def products(module: nn.Module) -> Tensor:
        query, key = (getattr(module, name).weight.detach().double().unflatten(0, (4, 8)) for name in names)
        return query.mT @ key

    def shared_products(module: Any) -> Tensor:
        query, key = (getattr(module, name).weight.detach().double() for name in names)
        return torch.einsum("rq,hr,rk->hqk", query, module.mixing.detach().double(), key[: len(query)])

    wanted = {site.path: products(site.module) for site in find_attention(model)}
    report = collaborate_(model, config(20))
    for site in report.sites:
        difference = shared_products(model.get_submodule(site.path)) - wanted[site.path]
        error = float(difference.norm() / wanted[site.path].norm())
        assert site.error == pytest.approx(error, rel=1e-4)
        assert 0.01 < site.error < 1
        assert site.iterations == 3
        assert not site.converged
        assert site.seconds > 0


def test_the_report_prints_as_a_table_and_is_json() -> None:
    model = nn.ModuleDict({"bert": tiny_models.bert(), "llama": tiny_models.tiny("LlamaModel")})
    report = collaborate_(model, config(10))
    text = str(report)
    header, *rows = text.splitlines()
    assert header.split()[:3] == ["path", "full_dim", "shared_dim"]
    for site in report.sites:
        row = next(row for row in rows if site.path in row)
        assert all(f"{number:,}" in row for number in (32, 10, site.parameters_before, site.parameters_after))
    assert "left as it was: llama.layers.0.self_attn (rotary positions" in text
    assert f"model parameters: {report.parameters_before:,} -> {report.parameters_after:,}" in text
    values = json.loads(json.dumps(report.to_dict()))
    assert values["sites"][0]["path"] == "bert.encoder.layer.0.attention.self"
    assert values["parameters_after"] == report.parameters_after
    assert "fresh" in str(collaborate_(tiny_models.bert(), config(10, weights="fresh")))


def test_what_cannot_be_swapped_is_left_with_the_reasons() -> None:
    model = nn.ModuleDict({"bert": tiny_models.bert(), "llama": tiny_models.tiny("LlamaModel")})
    report = collaborate_(model, config(10))
    assert list(report.left) == ["llama.layers.0.self_attn", "llama.layers.1.self_attn"]
    assert all("rotary positions" in reason for reasons in report.left.values() for reason in reasons)
    assert len(report.sites) == 2
    path = "llama.layers.0.self_attn"
    with pytest.raises(ValueError, match=rf"shared_dim names {path}, which cannot be swapped: rotary"):
        collaborate_(model, config({path: 10}))


def test_progress_wraps_the_layers() -> None:
    seen = []

    def progress(layers: Any, total: int) -> Any:
        seen.append(total)
        for layer in layers:
            seen.append(layer[0].path)
            yield layer

    collaborate_(tiny_models.bert(), config(10), progress=progress)
    assert seen == [2, *BERT_LAYERS]


# all or nothing


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", ["query.weight", "key.weight", "query.bias"])
def test_numbers_that_are_none_stop_the_swap_and_name_the_layer(place: str, value: float) -> None:
    model = tiny_models.bert()
    model.get_submodule(BERT_LAYERS[1]).get_parameter(place).data.flatten()[3] = value
    message = refusal(model)
    assert BERT_LAYERS[1] in message
    assert place.split(".")[0] in message
    assert "must be finite, got NaN or infinity" in message


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "albert"])
def test_a_layer_that_fails_half_way_leaves_the_model_untouched(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_models.MAIN_MODELS[name]()
    expected = model(**tiny_models.inputs_for(model))[0]
    install, calls = LinearHost.install_, []

    def failing(self: LinearHost, module: nn.Module, shared: Any) -> None:
        calls.append(module)
        install(self, module, shared)
        if len(calls) == 2:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(LinearHost, "install_", failing)
    assert refusal(model, kind=RuntimeError) == "out of memory"
    assert len(calls) == 2
    assert torch.equal(model(**tiny_models.inputs_for(model))[0], expected)
    monkeypatch.undo()
    collaborate_(model, config(10))


def test_a_failure_after_the_last_layer_leaves_the_model_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    record = swap.record_structure_

    def failing(model: nn.Module, config: CollaborativeConfig) -> None:
        record(model, config)
        raise RuntimeError("interrupted")

    monkeypatch.setattr(swap, "record_structure_", failing)
    assert refusal(tiny_models.t5(), kind=RuntimeError) == "interrupted"


# bad input


@pytest.mark.parametrize("shared_dim", [0, -3, True, 2.5, 1.5, 0.0, -0.5, "12", None, {}, {"a": 0}, {"a": 1.5}])
def test_sizes_that_are_none_are_refused(shared_dim: Any) -> None:
    with pytest.raises(ValueError, match=r"^shared_dim must .*, got ") as caught:
        CollaborativeConfig(shared_dim=shared_dim)
    if not isinstance(shared_dim, dict):
        assert str(shared_dim) in str(caught.value)


@pytest.mark.parametrize("shared_dim", [33, {BERT_LAYERS[1]: 33}])
def test_a_size_beyond_full_names_the_layer_and_its_full_size(shared_dim: Any) -> None:
    message = refusal(tiny_models.bert(), shared_dim)
    path = BERT_LAYERS[1] if isinstance(shared_dim, dict) else BERT_LAYERS[0]
    assert all(part in message for part in (path, "32", "33", "heads x head size"))


def test_a_size_that_would_keep_a_fused_shape_is_refused() -> None:
    """2 x 30 shared dimensions and 4 content rows would fill GPT-2's 2 x 32 rows, and load as ordinary heads."""
    message = refusal(tiny_models.gpt2(), 30)
    assert "shared_dim 30 cannot be used at transformer.h.0.attn: c_attn would keep its shape" in message


def test_nothing_to_swap_says_what_was_looked_at() -> None:
    message = refusal(nn.Sequential(nn.Linear(4, 4)), kind=NoAttentionFound)
    assert message == "no attention to swap in Sequential; looked at: nothing named attention"
    message = refusal(tiny_models.tiny("LlamaModel"), kind=NoAttentionFound)
    assert "no attention to swap in LlamaModel; looked at: layers.0.self_attn (rotary positions" in message

    class StrangeAttention(nn.Linear):
        pass

    message = refusal(nn.Sequential(StrangeAttention(4, 4)), kind=NoAttentionFound)
    assert "0 (unknown class" in message
    assert "StrangeAttention: no host is registered for it" in message


def test_converting_twice_is_an_error() -> None:
    model = tiny_models.bert()
    collaborate_(model, config(10))
    message = refusal(model, 8, kind=NoAttentionFound)
    assert f"{BERT_LAYERS[0]} (already collaborative, with shared_dim 10)" in message
    assert "already collaborative, with shared_dim 10" in refusal(model, {BERT_LAYERS[0]: 8})


def test_a_model_without_values_is_an_error() -> None:
    message = refusal(tiny_models.bert().to("meta"))
    assert f"cannot read the weights of {BERT_LAYERS[0]}: query.weight is on the meta device" in message


def int8_parameters(layer: Any) -> None:
    layer.key.weight = nn.Parameter(layer.key.weight.data.mul(10).to(torch.int8), requires_grad=False)


def quantised_class(layer: Any) -> None:
    class Linear8bitLt(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            return inputs @ (self.weight / 10).mT

    layer.key.__class__ = Linear8bitLt


def method_for_weight(layer: Any) -> None:
    class Linear(nn.Module):
        def weight(self) -> Tensor:
            return torch.zeros(1)

    layer.key = Linear()


def tensor_subclass(layer: Any) -> None:
    class QuantisedTensor(Tensor):
        pass

    layer.key.weight = nn.Parameter(layer.key.weight.data.as_subclass(QuantisedTensor))


@pytest.mark.parametrize(
    ("quantise", "expected"),
    [
        (int8_parameters, "key.weight is quantised (torch.int8): convert the model before quantising it"),
        (quantised_class, "Linear8bitLt, not a plain linear layer: merge adapters and convert before quantising"),
        (method_for_weight, "Linear, not a plain linear layer"),
        (tensor_subclass, "key.weight is a QuantisedTensor, no plain tensor"),
    ],
)
def test_a_quantised_model_is_an_error(quantise: Callable[[Any], None], expected: str) -> None:
    model = tiny_models.bert()
    for path in BERT_LAYERS:
        quantise(model.get_submodule(path))
    message = refusal(model)
    assert expected in message
    assert BERT_LAYERS[0] in message


def test_a_config_that_says_quantised_is_an_error() -> None:
    model = tiny_models.bert()
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    assert "BertModel must not be quantised" in refusal(model)


def test_what_is_no_model_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"model must be a torch\.nn\.Module, got a str"):
        collaborate_("bert-base-uncased", config(10))  # type: ignore[arg-type]


# wrappers


def test_a_wrapped_model_is_refused_and_what_it_wraps_is_not() -> None:
    model = tiny_models.bert(num_hidden_layers=1)
    inputs = tiny_models.inputs_for(model)
    with torch.no_grad():
        expected = model(**inputs)[0]
        assert "got a DataParallel around it: convert its .module" in refusal(nn.DataParallel(model))
        model.cpu()  # where there is a CUDA device, DataParallel moved it
        compiled = torch.compile(model, backend="eager")
        torch.testing.assert_close(compiled(**inputs)[0], expected)
        assert [site.path for site in find_attention(compiled)] == [f"_orig_mod.{BERT_LAYERS[0]}"]
        with pytest.raises(ValueError, match=r"got a OptimizedModule around it: convert its \._orig_mod"):
            collaborate_(compiled, config(10))
        collaborate_(compiled._orig_mod, config(10))
        # A compiled model that is swapped underneath must notice, not go on with the old graph.
        assert torch.equal(compiled(**inputs)[0], model(**inputs)[0])
        assert not torch.allclose(compiled(**inputs)[0], expected, atol=1e-3)


# find_attention


def test_sites_of_bert() -> None:
    sites = find_attention(tiny_models.bert())
    assert [site.path for site in sites] == BERT_LAYERS
    site = sites[0]
    assert (site.num_heads, site.head_dim, site.full_dim, site.kind, site.uses) == (4, 8, 32, "self", 1)
    assert (site.query_width, site.key_width, site.value_width) == (32, 32, 32)
    assert (site.class_name, site.host.name, site.shared, site.why_not) == (
        "BertSelfAttention", "BertSelfAttention", False, (),
    )  # fmt: skip
    assert json.loads(json.dumps(site.to_dict()))["path"] == BERT_LAYERS[0]
    header, _, *rows = str(sites).splitlines()
    assert header.split()[0] == "path"
    assert len(rows) == 2
    assert "BertSelfAttention" in rows[0]
    assert rows[0].split()[-1] == "yes"


def test_sites_of_albert_are_shared() -> None:
    model = tiny_models.albert()  # 4 layers, 2 groups, 2 inner layers each
    sites = find_attention(model)
    assert [site.path for site in sites] == [
        f"encoder.albert_layer_groups.{group}.albert_layers.{inner}.attention" for group in (0, 1) for inner in (0, 1)
    ]
    calls: dict[str, int] = {}
    for site in sites:
        site.module.register_forward_hook(lambda *given, path=site.path: calls.update({path: calls.get(path, 0) + 1}))
    model(**tiny_models.inputs_for(model))
    assert {site.path: site.uses for site in sites} == calls == {site.path: 2 for site in sites}
    assert all(site.shared for site in sites)


@pytest.mark.parametrize(
    ("name", "self_attention", "cross_attention"),
    [("bart", 4, 2), ("t5", 4, 2), ("clip", 4, 0), ("whisper", 4, 2), ("marian", 4, 2)],
)
def test_kinds(name: str, self_attention: int, cross_attention: int) -> None:
    kinds = [site.kind for site in find_attention(tiny_models.MAIN_MODELS[name]())]
    assert (kinds.count("self"), kinds.count("cross")) == (self_attention, cross_attention)


def test_sites_of_gpt2_with_cross_attention() -> None:
    sites = find_attention(tiny_models.gpt2(add_cross_attention=True))
    assert {site.path: site.kind for site in sites} == {
        "transformer.h.0.attn": "self",
        "transformer.h.0.crossattention": "cross",
        "transformer.h.1.attn": "self",
        "transformer.h.1.crossattention": "cross",
    }
    assert {(site.num_heads, site.head_dim, site.key_width) for site in sites} == {(4, 8, 32)}


def test_sites_of_an_encoder_decoder_of_two_models() -> None:
    from transformers import EncoderDecoderModel

    decoder = tiny_models.tiny("BertLMHeadModel", is_decoder=True, add_cross_attention=True)
    model = EncoderDecoderModel(encoder=tiny_models.bert(), decoder=decoder)
    kinds = {site.path: site.kind for site in find_attention(model)}
    assert kinds["encoder.encoder.layer.0.attention.self"] == "self"
    assert kinds["decoder.bert.encoder.layer.0.attention.self"] == "self"
    assert kinds["decoder.bert.encoder.layer.0.crossattention.self"] == "cross"
    assert len(kinds) == 6


def test_finding_changes_nothing() -> None:
    model = tiny_models.gpt2()
    before = fingerprint(model)
    state = torch.get_rng_state()
    find_attention(model)
    assert fingerprint(model) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert fingerprint(copy.deepcopy(model))["values"] == before["values"]


@pytest.mark.parametrize("weights", ["decompose", "fresh"])
@pytest.mark.parametrize("name", ["query.weight", "key.bias", "value.weight"])
def test_numbers_that_are_not_finite_are_refused_wherever_they_are(name, weights):
    model = tiny_models.bert()
    path = "encoder.layer.1.attention.self"
    model.get_submodule(path).get_parameter(name).data.view(-1)[0] = torch.nan
    with pytest.raises(ValueError, match=f"{path}: {name} must be finite"):
        collaborate_(model, CollaborativeConfig(shared_dim=8, weights=weights))


def test_a_size_is_not_a_config():
    with pytest.raises(ValueError, match="config must be a CollaborativeConfig"):
        collaborate_(tiny_models.bert(), 16)
