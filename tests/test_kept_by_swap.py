"""What a swap must leave as it was: modes, dtypes, trainability, dropout, hooks, ties, names, returned weights."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from transformers.models.bert.modeling_bert import BertSelfAttention
from transformers.pytorch_utils import Conv1D

import tiny_models
from collab import CollaborativeConfig, NoAttentionFound, collaborate_, find_attention

peft = pytest.importorskip("peft")

BERT_LAYER = "encoder.layer.0.attention.self"


def swap(model: Any, shared_dim: int | float = 10) -> Any:
    collaborate_(model, CollaborativeConfig(shared_dim=shared_dim, max_iterations=3))
    return model


def run(model: Any) -> Tensor:
    return model(**tiny_models.inputs_for(model))[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_dtype_and_device(name: str, dtype: torch.dtype) -> None:
    model = swap(tiny_models.MAIN_MODELS[name]().to(dtype))
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert run(model).dtype == dtype


@pytest.mark.parametrize("move", ["half", "bfloat16", "double"])
def test_moving_a_converted_model_moves_all_of_it(move: str) -> None:
    model = swap(tiny_models.bert())
    expected = run(model)
    getattr(model, move)()
    assert len({parameter.dtype for parameter in model.parameters()}) == 1
    torch.testing.assert_close(run(model).float(), expected, atol=0.15, rtol=0)
    assert model.get_submodule(BERT_LAYER).mixing.dtype == run(model).dtype
    assert model.to("meta").get_submodule(BERT_LAYER).mixing.is_meta


def test_each_module_keeps_its_mode() -> None:
    model = tiny_models.bert().train()
    model.get_submodule(BERT_LAYER).eval()
    model.get_submodule(f"{BERT_LAYER}.key").train()
    modes = {name: module.training for name, module in model.named_modules()}
    assert {name: module.training for name, module in swap(model).named_modules()} == modes


@pytest.mark.parametrize("frozen", ["query", "key", "value"])
def test_each_projection_keeps_its_trainability(frozen: str) -> None:
    model = tiny_models.bert()
    getattr(model.get_submodule(BERT_LAYER), frozen).requires_grad_(False)
    swap(model)
    layer, other = model.get_submodule(BERT_LAYER), model.encoder.layer[1].attention.self
    for role in ("query", "key", "value"):
        assert getattr(layer, role).weight.requires_grad == (role != frozen)
    assert layer.mixing.requires_grad == (frozen != "query")  # mixing multiplies the query: they go together
    assert all(parameter.requires_grad for parameter in other.parameters())


def test_a_frozen_model_stays_frozen_and_a_trained_one_trained_under_no_grad() -> None:
    frozen = swap(tiny_models.gpt2().requires_grad_(False))
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    with torch.no_grad():
        trained = swap(tiny_models.gpt2())
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in trained.parameters())


def test_unchanged_parameters_are_the_very_same() -> None:
    """So that optimizers and ties that hold them still do."""
    model = tiny_models.bert()
    before = dict(model.named_parameters())
    swap(model)
    changed = {name for name, parameter in model.named_parameters() if before.get(name) is not parameter}
    assert {name.split(".self.")[1] for name in changed} == {"query.weight", "key.weight", "mixing"}


@pytest.mark.parametrize("name", ["bert", "albert", "gpt2", "t5", "bart", "vit"])
def test_dropout_acts_in_training_alone(name: str) -> None:
    model = tiny_models.MAIN_MODELS[name]()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for attribute in ("dropout", "attention_dropout", "activation_dropout"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)
    swap(model)
    torch.testing.assert_close(run(model.train()), run(model.eval()))  # nothing is dropped at probability zero
    for site in find_attention(model):
        name_of_dropout = site.host.dropout
        if isinstance(getattr(site.module, name_of_dropout), float):
            setattr(site.module, name_of_dropout, 0.5)
        else:
            getattr(site.module, name_of_dropout).p = 0.5
    assert torch.equal(run(model), run(model))
    model.train()
    assert not torch.allclose(run(model), run(model))
    torch.manual_seed(0)
    once = run(model)
    torch.manual_seed(0)
    assert torch.equal(run(model), once)


def test_dropped_attention_weights_are_the_originals() -> None:
    """With the same random numbers, eager attention drops the very weights the original drops, at its rate."""
    model = tiny_models.bert("eager", attention_probs_dropout_prob=0.3).train()
    converted = swap(copy.deepcopy(model), 1.0)
    inputs = {"input_ids": tiny_models.token_ids(30, 8)}
    outputs = []
    for one in (model, converted):
        torch.manual_seed(0)
        outputs.append(one(**inputs, output_attentions=True))
    torch.testing.assert_close(outputs[1].last_hidden_state, outputs[0].last_hidden_state, atol=1e-5, rtol=0)
    for weights, expected in zip(outputs[1].attentions, outputs[0].attentions, strict=True):
        torch.testing.assert_close(weights, expected, atol=1e-5, rtol=0)
        assert abs((weights == 0).float().mean() - 0.3) < 0.02


@pytest.mark.parametrize("name", ["bert", "albert", "gpt2"])
def test_norms_keep_their_epsilon(name: str) -> None:
    overrides = {"layer_norm_epsilon": 0.1} if name == "gpt2" else {"layer_norm_eps": 0.1}
    model = tiny_models.MAIN_MODELS[name](**overrides)
    expected = run(model)
    swap(model, 1.0)
    assert all(module.eps == 0.1 for module in model.modules() if isinstance(module, nn.LayerNorm))
    torch.testing.assert_close(run(model), expected, atol=1e-5, rtol=0)


def test_hooks_still_fire() -> None:
    model = tiny_models.bert()
    layer = model.get_submodule(BERT_LAYER)
    fired = []
    for module, name in ((layer, "layer"), (layer.query, "query"), (layer.key, "key"), (layer.value, "value")):
        module.register_forward_pre_hook(lambda *given, name=name: fired.append(f"before {name}"))
        module.register_forward_hook(lambda *given, name=name: fired.append(f"after {name}"))
        module.register_full_backward_hook(lambda *given, name=name: fired.append(f"backward {name}"))
    run(swap(model)).sum().backward()
    names = ("layer", "query", "key", "value")
    assert sorted(fired) == sorted(f"{when} {name}" for when in ("before", "after", "backward") for name in names)


def test_a_module_at_two_paths_is_swapped_once_and_stays_one() -> None:
    model = tiny_models.bert()
    model.encoder.layer[1].attention = model.encoder.layer[0].attention
    expected = run(model)
    (site,) = find_attention(model)
    assert site.uses == 2
    assert site.paths == (BERT_LAYER, "encoder.layer.1.attention.self")
    report = collaborate_(model, CollaborativeConfig(shared_dim=1.0))
    assert [done.path for done in report.sites] == [BERT_LAYER]
    assert model.encoder.layer[1].attention.self is model.encoder.layer[0].attention.self
    torch.testing.assert_close(run(model), expected, atol=1e-5, rtol=0)


def test_layers_that_share_weights_are_refused_not_torn_apart() -> None:
    shared_projection, shared_weight = tiny_models.bert(), tiny_models.bert()
    first, second = (layer.attention.self for layer in shared_projection.encoder.layer)
    second.query = first.query
    first, second = (layer.attention.self for layer in shared_weight.encoder.layer)
    second.key.weight = first.key.weight
    for model in (shared_projection, shared_weight):
        with pytest.raises(NoAttentionFound, match=r"tied to encoder\.layer\.1\.attention\.self\.(query|key)\.weight"):
            swap(model)
    tied_value = tiny_models.bert()
    first, second = (layer.attention.self for layer in tied_value.encoder.layer)
    second.value = first.value
    swap(tied_value)
    assert second.value is first.value


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("bert", {"query.bias", "key.bias"}),
        ("opt", {"q_proj.bias", "k_proj.bias"}),
        ("t5", set()),
        ("gpt2", set()),
        ("vit", {"q_proj.bias", "k_proj.bias"}),
    ],
)
def test_names_in_the_state_dict(name: str, changed: set[str]) -> None:
    """All names stay, but for biases of queries and keys, which the content rows of the key replace."""
    model = tiny_models.MAIN_MODELS[name]()
    sites = find_attention(model)
    before = set(model.state_dict())
    swap(model)
    gone, come = before - set(model.state_dict()), set(model.state_dict()) - before
    assert gone == {f"{site.path}.{name}" for site in sites for name in changed}
    assert come == {f"{site.path}.mixing" for site in sites}


@pytest.mark.parametrize("name", ["bert", "albert", "gpt2", "t5", "bart", "vit"])
def test_attention_weights_are_the_originals(name: str) -> None:
    model = tiny_models.MAIN_MODELS[name]("eager")
    expected = model(**tiny_models.inputs_for(model), output_attentions=True)
    found = swap(model, 1.0)(**tiny_models.inputs_for(model), output_attentions=True)
    kinds = [key for key in expected if "attentions" in key and expected[key]]
    assert len(kinds) == (3 if model.config.is_encoder_decoder else 1)
    for kind in kinds:
        assert len(found[kind]) == len(expected[kind]) >= 2
        for weights, original in zip(found[kind], expected[kind], strict=True):
            torch.testing.assert_close(weights, original, atol=1e-5, rtol=0)


LORA_TARGETS = {"bert": ["query", "key", "value"], "gpt2": ["c_attn"], "t5": ["q", "k", "v"]}


@pytest.mark.parametrize("name", LORA_TARGETS)
def test_lora_on_top(name: str) -> None:
    model = swap(tiny_models.MAIN_MODELS[name]())
    plain = run(model)
    config = peft.LoraConfig(target_modules=LORA_TARGETS[name], r=2, fan_in_fan_out=name == "gpt2")
    adapted = peft.get_peft_model(model, config)
    inputs = tiny_models.inputs_for(model)
    torch.testing.assert_close(adapted(**inputs)[0], plain)  # LoRA starts at zero
    for parameter_name, parameter in adapted.named_parameters():
        if "lora_B" in parameter_name:
            parameter.data.normal_(std=0.1)
    output = adapted(**inputs)[0]
    assert not torch.allclose(output, plain, atol=1e-2)
    output.sum().backward()
    trained = {name for name, parameter in adapted.named_parameters() if parameter.grad is not None}
    assert trained
    assert all("lora_" in name for name in trained)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(**inputs)[0], output, atol=1e-5, rtol=0)
    assert all(type(site.module).__name__.startswith("Collaborative") for site in find_attention(merged))


def test_lora_below_is_refused() -> None:
    adapted = peft.get_peft_model(tiny_models.bert(), peft.LoraConfig(target_modules=["query"], r=2))
    with pytest.raises(NoAttentionFound, match=r"query is a peft.*Linear, not a plain linear layer: merge adapters"):
        swap(adapted)
    swap(adapted.merge_and_unload())


def test_projections_with_computed_weights_are_refused() -> None:
    parametrised, pruned = tiny_models.bert(), tiny_models.bert()
    for layer in parametrised.encoder.layer:
        parametrizations.orthogonal(layer.attention.self.query)
    for layer in pruned.encoder.layer:
        prune.random_unstructured(layer.attention.self.query, "weight", amount=0.5)
    for model in (parametrised, pruned):
        with pytest.raises(NoAttentionFound, match=r"query is a .*Linear, not a plain linear layer"):
            swap(model)


def test_an_attention_whose_forward_was_replaced_is_refused() -> None:
    model = tiny_models.bert()
    for layer in model.encoder.layer:
        layer.attention.self.forward = layer.attention.self.forward
    with pytest.raises(NoAttentionFound, match="its forward was replaced on the instance"):
        swap(model)


@pytest.mark.parametrize("name", ["bert", "albert", "gpt2", "t5", "bart", "clip"])
def test_deepcopy_and_pickle(name: str) -> None:
    model = swap(tiny_models.MAIN_MODELS[name]())
    expected = run(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(other), expected)
        assert [type(module) for module in other.modules()] == [type(module) for module in model.modules()]
        assert not {id(parameter) for parameter in other.parameters()} & {id(one) for one in model.parameters()}


def test_pickle_opens_in_a_fresh_process(tmp_path: Path) -> None:
    model = swap(tiny_models.bert())
    torch.save({"model": model, "output": run(model)}, tmp_path / "model.pt")
    code = (
        "import sys, torch, collab\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "import tiny_models\n"
        "saved = torch.load(sys.argv[1], weights_only=False)\n"
        "model = saved['model']\n"
        "assert torch.equal(model(**tiny_models.inputs_for(model))[0], saved['output'])\n"
        "print(type(model.encoder.layer[0].attention.self).__name__)"
    )
    tests = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "model.pt", tests], capture_output=True, text=True)
    assert done.stdout.strip() == "CollaborativeBertSelfAttention", done.stderr


def test_training_a_copy_leaves_the_model_alone() -> None:
    model = swap(tiny_models.bert())
    before = copy.deepcopy(model.state_dict())
    other = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(other.parameters(), lr=1.0)
    run(other).square().sum().backward()
    optimizer.step()
    mixing = other.get_submodule(BERT_LAYER).mixing
    assert not torch.equal(mixing, model.get_submodule(BERT_LAYER).mixing)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_converted_module_is_still_of_its_class() -> None:
    layer = swap(tiny_models.bert()).get_submodule(BERT_LAYER)
    assert isinstance(layer, BertSelfAttention)
    assert type(layer).__name__ == "CollaborativeBertSelfAttention"
    assert isinstance(swap(tiny_models.gpt2()).transformer.h[0].attn.c_attn, Conv1D)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "bart"])
def test_autocast(name: str, attention: str) -> None:
    model = swap(tiny_models.MAIN_MODELS[name](attention)).train()
    expected = run(model.eval())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = run(model)
    torch.testing.assert_close(output.float(), expected, atol=0.3, rtol=0.1)
    output.float().square().sum().backward()
    for site in find_attention(model):
        assert site.module.mixing.dtype == site.module.mixing.grad.dtype == torch.float32


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "bart", "albert"])
def test_gradients_reach_every_shared_weight(name: str) -> None:
    model = swap(tiny_models.MAIN_MODELS[name]()).train()
    run(model).square().sum().backward()
    for site in find_attention(model):
        assert site.module.mixing.grad.abs().min() > 0
        for part in site.host.parts(site.module)[1:]:
            gradient = part.weight.grad.mT if isinstance(part, Conv1D) else part.weight.grad
            assert (gradient.abs().sum(1) > 0).all()  # the content rows are the last of the key's
