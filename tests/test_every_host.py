"""One contract over every attention class of transformers that is supported; and what is not is refused by name."""

import ast
import copy
import dataclasses
import functools
import importlib
import inspect
import math
import re
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn

import collab
import collab.hosts.transformers
from collab.hosts import Collaborative, _hosts, catalogue
from collab.hosts.transformers_shell import TransformersHost
from host_cases import CASES, Alone, NotInTransformers
from tiny_models import inputs_for, tiny

torch.set_num_threads(1)


def leaves(result):
    """Every floating point tensor in a model's result, in order."""
    if isinstance(result, Tensor):
        return [result] if result.is_floating_point() else []
    if isinstance(result, dict):
        result = list(result.values())
    return [leaf for item in result for leaf in leaves(item)] if isinstance(result, list | tuple) else []


@torch.no_grad()
def run(model, inputs):
    torch.manual_seed(0)  # some models choose patches at random
    return leaves(model(**inputs))


def with_weights(case, model, inputs):
    """Also ask for attention weights, where they can be had."""
    if isinstance(model, Alone):
        takes = "output_attentions" in inspect.signature(type(model.attention).forward).parameters
    else:
        takes = case.weights
    return inputs | {"output_attentions": True} if takes else inputs


def to(dtype, inputs):
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


def swapped(model, shared_dim):
    converted = copy.deepcopy(model)
    report = collab.collaborate_(converted, collab.CollaborativeConfig(shared_dim=shared_dim, max_iterations=1))
    return converted, report


def scales(model):
    return {site.path: site.host.scale(site.module) for site in collab.find_attention(model) if site.host}


def rms(results, exact):
    """Root mean square of what differs, over all results together."""
    squares = sum(((a.double() - b.double()) ** 2).sum() for a, b in zip(results, exact, strict=True))
    return math.sqrt(squares / sum(tensor.numel() for tensor in exact))


def check_smaller(model, inputs, exact):
    """A smaller size runs, makes a difference, trains, and leaves the scale alone."""
    smaller, _ = swapped(model, 0.5)
    result = run(smaller, inputs)
    assert [tensor.shape for tensor in result] == [tensor.shape for tensor in exact]
    assert rms(result, exact) > 1e-4, "attention hardly matters to what is compared"
    assert scales(model) == scales(smaller), "the scale depends on shared_dim"
    check_training(smaller, inputs)


def check_training(converted, inputs):
    """Gradients reach every mixing matrix, with the dropout that the class has."""
    mixings = []
    for site in collab.find_attention(converted):
        site.module.train()
        mixings += [site.module.mixing] if isinstance(site.module, Collaborative) else []
    torch.manual_seed(0)
    sum((tensor.float() ** 2).sum() for tensor in leaves(converted(**inputs))).backward()
    assert mixings
    assert all(mixing.grad is not None and mixing.grad.isfinite().all() and mixing.grad.any() for mixing in mixings)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_contract(case):
    for implementation in case.implementations:
        try:
            model = case.build(implementation)
            inputs = case.inputs(model)
        except NotInTransformers as error:
            pytest.skip(str(error))
        if implementation == "eager":
            inputs = with_weights(case, model, inputs)
        exact = run(model, inputs)
        assert exact
        assert all(torch.isfinite(tensor).all() for tensor in exact)

        converted, report = swapped(model, 1.0)
        found = {site.host for site in report.sites}
        assert found <= {name for names in case.classes for name in names.split("|")}
        assert all(found & set(names.split("|")) for names in case.classes)
        result = run(converted, inputs)
        assert [tensor.shape for tensor in result] == [tensor.shape for tensor in exact]
        difference = max(float((a - b).abs().max()) for a, b in zip(result, exact, strict=True))
        assert difference <= 1e-5, f"{implementation}: full size is off by {difference:.1e}"

        if implementation == case.implementations[0]:
            check_smaller(model, inputs, exact)
        if case.bf16:
            low = to(torch.bfloat16, inputs)
            own_error = rms(run(copy.deepcopy(model).bfloat16(), low), exact)
            error = rms(run(converted.bfloat16(), low), exact)
            assert error <= 2 * own_error + 1e-3, (
                f"{implementation}: bf16 is off by {error:.1e}, originally {own_error:.1e}"
            )


@pytest.mark.parametrize("name", ["lw_detr.LwDetrAttention", "rf_detr.RfDetrAttention"])
def test_queries_in_groups_do_not_see_each_other_in_training(name):
    """These classes split their sequence in training, which the contract does not compare."""
    model = next(case for case in CASES if case.name == name).build("eager")
    inputs = next(case for case in CASES if case.name == name).inputs(model)
    converted, _ = swapped(model, 1.0)
    in_training = run(model.train(), inputs)
    assert not torch.allclose(in_training[0], run(model.eval(), inputs)[0])
    torch.testing.assert_close(run(converted.train(), inputs), in_training, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "overrides", "ending"),
    [
        ("BertModel", {"is_decoder": True, "add_cross_attention": True}, "crossattention.self"),
        ("GPT2Model", {"add_cross_attention": True}, "crossattention"),
        ("BartModel", {}, "encoder_attn"),
        ("T5Model", {}, "EncDecAttention"),
        ("WhisperModel", {}, "encoder_attn"),
        ("BlipTextModel", {"encoder_hidden_size": 32}, "crossattention.self"),
        ("LxmertModel", {"l_layers": 1, "r_layers": 1, "x_layers": 1}, "visual_attention.att"),
    ],
)
def test_self_and_cross_are_told_apart(name, overrides, ending):
    sites = collab.find_attention(tiny(name, **overrides))
    assert not [site for site in sites if site.why_not]
    assert {site.path for site in sites if site.kind == "cross"} == {s.path for s in sites if s.path.endswith(ending)}
    assert {site.kind for site in sites} == {"self", "cross"}


# What is supported is proven, and what is the same code is supported.


@functools.cache
def classes_of_transformers():
    """(module, class) -> source of every attention class in transformers' models, read without importing them."""
    folder = Path(transformers.__file__).parent / "models"
    return {
        (f"transformers.models.{path.parent.name}.{path.stem}", found[1]): found[0]
        for path in sorted(folder.glob("*/modeling_*.py"))
        for found in re.finditer(r"^class (\w*Attention\w*)\b(?:.|\n)*?(?=^[A-Za-z_@]|\Z)", path.read_text(), re.M)
    }


def registered():
    """Registered name -> the places in the installed transformers that it means."""
    names = [name for name in _hosts if name.startswith("transformers.")]
    places = {name: [] for name in names}
    for module, class_name in classes_of_transformers():
        for name in (f"{module}.{class_name}", f"transformers.{class_name}"):
            if name in places:
                places[name].append((module, class_name))
    return places


def forward_of(source):
    """A class's forward without annotations and documentation; None if it has none."""
    body = ast.parse(source).body[0].body
    forward = next((item for item in body if getattr(item, "name", None) == "forward"), None)
    if forward is None:
        return None
    for argument in ast.walk(forward):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    forward.returns, forward.decorator_list = None, []
    if isinstance(forward.body[0], ast.Expr) and isinstance(forward.body[0].value, ast.Constant):
        del forward.body[0]
    return ast.dump(forward)


def test_every_supported_class_is_under_contract():
    proven = {name for case in CASES for names in case.classes for name in names.split("|")}
    short = {}
    for name, places in registered().items():
        for module, class_name in places:
            folder = module.split(".")[2]
            short[name] = class_name if name.count(".") == 1 else f"{folder}.{class_name}"
    assert not set(short.values()) - proven
    assert len(short) > 200


def test_a_plain_name_means_one_class():
    """A name that two of transformers' modules use for different code must be registered with its module."""
    assert not {name: places for name, places in registered().items() if len(places) > 1}


def test_the_same_code_is_the_same_host():
    supported = {
        place
        for places in registered().values()
        for place in places
        if "attention_interface" in classes_of_transformers()[place] or "softmax" in classes_of_transformers()[place]
    }
    forwards = {place: forward_of(source) for place, source in classes_of_transformers().items()}
    known = {forwards[place]: place for place in supported}
    others = {place: forward for place, forward in forwards.items() if place not in supported}
    missing = {place: known[forward] for place, forward in others.items() if forward in known}
    assert not missing, "these have the forward of a supported class, and no row"


# What cannot be supported is refused, with the reason.


@pytest.mark.parametrize("name", ["LlamaModel", "Qwen2Model", "Qwen3Model", "MistralModel", "GPTNeoXModel"])
def test_rotary_models_are_refused(name):
    model = tiny(name)
    sites = collab.find_attention(model)
    assert len(sites) == 2
    for site in sites:
        assert "rotary positions" in site.why_not[0]
        assert ("normalised" in " ".join(site.why_not)) == (name == "Qwen3Model")
    before = run(model, inputs_for(model))
    with pytest.raises(collab.NoAttentionFound, match="rotary positions"):
        collab.collaborate_(model, collab.CollaborativeConfig(shared_dim=8))
    assert all(torch.equal(a, b) for a, b in zip(run(model, inputs_for(model)), before, strict=True))


@pytest.mark.parametrize(
    ("name", "overrides", "reason"),
    [
        ("EsmModel", {"position_embedding_type": "rotary", "mask_token_id": 3}, "rotary positions"),
        ("GPTBigCodeModel", {"multi_query": True}, "heads share keys"),
        ("DebertaV2Model", {"relative_attention": True, "pos_att_type": ["p2c"]}, "relative positions"),
        ("LongformerModel", {"attention_window": 4}, "sparse, local or windowed"),
        ("Swinv2Model", {"embed_dim": 16, "depths": [1], "num_heads": [2], "window_size": 4}, "normalised"),
    ],
)
def test_other_models_are_refused(name, overrides, reason):
    sites = [site for site in collab.find_attention(tiny(name, **overrides)) if site.why_not]
    assert sites
    assert all(reason in " ".join(site.why_not) for site in sites)


def test_grouped_keys_are_refused():
    case = next(case for case in CASES if case.name == "jamba.JambaAttention")
    assert not collab.find_attention(case.build("eager"))[0].why_not
    config = transformers.JambaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2)
    attention = transformers.models.jamba.modeling_jamba.JambaAttention(config, layer_idx=0)
    (site,) = collab.find_attention(attention)
    assert "heads share keys" in site.why_not[0]


def test_norms_between_projections_are_refused():
    module = importlib.import_module("transformers.models.internvl.modeling_internvl")
    config = transformers.InternVLVisionConfig(hidden_size=32, num_attention_heads=4, use_qk_norm=True)
    (site,) = collab.find_attention(module.InternVLVisionAttention(config))
    assert "q_norm normalises" in site.why_not[0]


class SomebodysAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(4, 4)


def test_unknown_classes_are_refused_by_name():
    (site,) = collab.find_attention(nn.Sequential(SomebodysAttention()))
    assert site.why_not == (f"unknown class {__name__}.SomebodysAttention: no host is registered for it",)


def test_other_attention_implementations_are_refused():
    """What neither "eager" nor "sdpa" makes is a mask of a kind not known here: it must not be misread."""
    model = tiny("BertModel")
    model.config._attn_implementation = "flex_attention"
    assert "'eager' or 'sdpa', got 'flex_attention'" in collab.find_attention(model)[0].why_not[0]


# The catalogue.


def test_catalogue_of_a_few_modules():
    def few(names, total):
        assert total > 400
        return [name for name in names if name.rpartition(".")[2] in ("modeling_bert", "modeling_llama", "activation")]

    records = {record.name: record for record in catalogue.catalogue(progress=few)}
    assert records["BertSelfAttention"].supported
    assert records["MultiheadAttention"].library == "torch"
    assert records["BertAttention"].reasons == ("wraps BertCrossAttention, BertSelfAttention",)
    assert "rotary positions" in records["LlamaAttention"].reasons[0]
    assert records["BertSelfAttention"].to_dict()["module"] == "transformers.models.bert.modeling_bert"
    text = catalogue.markdown(list(records.values()))
    assert f"transformers {transformers.__version__}" in text
    assert "| `BertSelfAttention` (bert) | yes |  |" in text


def test_catalogue_goes_on_when_a_module_cannot_be_imported(monkeypatch):
    monkeypatch.setattr(catalogue, "_modules", lambda package, prefix="": iter(["transformers.models.no_such_module"]))
    reasons = {record.library: record.reasons for record in catalogue.catalogue()}
    assert reasons["torch"] == ()
    assert "cannot be imported: ModuleNotFoundError" in reasons["transformers"][0]


DOCUMENT = Path(__file__).parent.parent / "docs" / "hosts.md"


def test_document_lists_what_is_supported():
    """Cheaper than making the document again, and true for any version: every class under contract is in it."""
    rows = {line.split("`")[1]: line for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")}
    for name in {names.split("|")[0].rpartition(".")[2] for case in CASES for names in case.classes} - {"Attention"}:
        assert "| yes |" in rows[name], f"{name} is supported, and docs/hosts.md does not say so: write it again"


@pytest.mark.slow
def test_document_is_what_the_program_writes():
    versions = DOCUMENT.read_text().split("Made with ")[1].partition(".\n")[0]
    installed = ", ".join(f"{library} {catalogue._version(library)}" for library in ("timm", "torch", "transformers"))
    if versions != installed:
        pytest.skip(f"docs/hosts.md was made with {versions}, installed are {installed}")
    assert catalogue.markdown(catalogue.catalogue()) == DOCUMENT.read_text()


# The guide.


def test_the_worked_example_of_the_guide():
    """The guide's own class becomes a class of a package that is not ours, and all its code runs."""
    guide = (Path(__file__).parent.parent / "docs" / "adding-a-host.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", guide, re.S)
    assert len(blocks) == 3
    namespace = {"__name__": "shop"}
    try:
        for block in blocks:
            exec(compile(block, "docs/adding-a-host.md", "exec"), namespace)
        model = namespace["model"]
        assert {type(layer).__name__ for layer in model} == {"CollaborativeBasketAttention"}
        assert all(isinstance(layer, namespace["BasketAttention"]) for layer in model)
    finally:
        _hosts.pop("shop.BasketAttention", None)


def test_the_guide_names_every_field_of_a_row():
    guide = (Path(__file__).parent.parent / "docs" / "adding-a-host.md").read_text()
    table = {name for line in guide.splitlines() if line.startswith("| `") for name in re.findall(r"`(\w+)`", line)}
    fields = {field.name for field in dataclasses.fields(TransformersHost)}
    assert fields - {"name", "shell", "cross", "layer", "shared_by"} <= table
