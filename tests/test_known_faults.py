"""Faults of the original authors' code, one test each, so that none of them comes back."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny_models
from collab import CollaborativeConfig, collaborate_, find_attention

TOLERANCE = 1e-5


def swap(model: Any, shared_dim: int | float) -> Any:
    collaborate_(model, CollaborativeConfig(shared_dim=shared_dim))
    return model


def run(model: Any) -> Tensor:
    return model(**tiny_models.inputs_for(model))[0]


def is_exact(model: Any, expected: Tensor) -> bool:
    """The check the suite rests on: no output moved by more than the tolerance."""
    return bool((run(model) - expected).abs().max() <= TOLERANCE)


@pytest.mark.parametrize("name", ["bert", "distilbert", "gpt2", "t5", "clip"])
def test_scores_are_not_rescaled_by_the_shared_size(name: str) -> None:
    """Heads that use half of their dimensions fit half of the size exactly, if the scale stays what it was."""
    model = tiny_models.MAIN_MODELS[name]()
    sites = find_attention(model)
    with torch.no_grad():
        for site in sites:
            site.host.read(site.module).query[:, site.head_dim // 2 :] = 0
    scales = [site.host.scale(site.module) for site in sites]
    expected = run(model)
    swap(model, 0.5)
    assert [site.host.scale(site.module) for site in sites] == scales
    assert set(scales) == ({1.0} if name == "t5" else {8**-0.5})
    assert is_exact(model, expected)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("shared_dim", [1.0, 0.5])
def test_distilberts_mask_is_not_dropped(shared_dim: float, attention: str) -> None:
    model = swap(tiny_models.distilbert(attention), shared_dim)
    tokens, mask = tiny_models.token_ids(), tiny_models.padding_mask()
    padded = model(input_ids=tokens, attention_mask=mask)[0]
    for row, length in enumerate(mask.sum(1).tolist()):
        alone = model(input_ids=tokens[row : row + 1, :length])[0][0]
        torch.testing.assert_close(padded[row, :length], alone, atol=TOLERANCE, rtol=0)
    unmasked = model(input_ids=tokens)[0]
    assert not torch.allclose(padded[1, :3], unmasked[1, :3], atol=1e-2)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_albert_keeps_its_epsilon(attention: str) -> None:
    model = tiny_models.albert(attention, layer_norm_eps=0.5)
    expected = run(model)
    assert (run(tiny_models.albert(attention, layer_norm_eps=1e-12)) - expected).abs().max() > 1e-2
    assert is_exact(swap(model, 1.0), expected)


def test_albert_keeps_its_output_dropout() -> None:
    model = tiny_models.albert("eager", hidden_dropout_prob=0.4, attention_probs_dropout_prob=0.2)
    converted = swap(copy.deepcopy(model), 1.0)
    outputs = []
    for one in (model, converted):
        torch.manual_seed(0)
        outputs.append(run(one.train()))
    torch.testing.assert_close(outputs[1], outputs[0], atol=TOLERANCE, rtol=0)
    for site in find_attention(converted):
        assert site.module.output_dropout.p == 0.4
        site.module.output_dropout.p = 0.0
    torch.manual_seed(0)
    assert not torch.allclose(run(converted), outputs[0], atol=1e-2)


def test_every_group_of_albert_is_swapped() -> None:
    model = swap(tiny_models.albert(), 1.0)
    layers = [layer for group in model.encoder.albert_layer_groups for layer in group.albert_layers]
    assert len(layers) == 4
    expected = run(model)
    for layer in layers:
        mixing = layer.attention.mixing.data.clone()
        layer.attention.mixing.data.zero_()
        assert not is_exact(model, expected)
        layer.attention.mixing.data.copy_(mixing)
    assert is_exact(model, expected)


def test_conversion_draws_no_random_numbers() -> None:
    models = []
    for seed in (1, 2):
        model = tiny_models.bert()
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        models.append(swap(model, 10))
        assert torch.equal(torch.get_rng_state(), state)
    one, other = (model.state_dict() for model in models)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def perturb_mixing(layer: Any) -> None:
    layer.mixing.data[0, 0] += 0.01


def perturb_content(layer: Any) -> None:
    layer.key.weight.data[-1, 0] += 0.01


def perturb_scale(layer: Any) -> None:
    layer.scaling *= 1.001


@pytest.mark.parametrize("perturb", [perturb_mixing, perturb_content, perturb_scale])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_tolerance_can_fail(attention: str, perturb: Callable[[Any], None]) -> None:
    model = tiny_models.bert(attention)
    expected = run(model)
    swap(model, 1.0)
    assert is_exact(model, expected)
    perturb(model.encoder.layer[1].attention.self)
    assert not is_exact(model, expected)


def test_the_tolerance_fails_one_dimension_below_full_size() -> None:
    model = tiny_models.bert()
    expected = run(model)
    assert not is_exact(swap(model, 31), expected)
