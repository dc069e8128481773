"""Effects: a budget is spent by what layers do to the model's output, and measuring that leaves no trace."""

import copy

import pytest
import torch

import tiny_models
from collab import CollaborativeConfig, calibrate, collaborate_, find_attention, plan
from collab.effects import Effects
from collab.running import call, device_of
from test_sizes import Layers, layer
from tiny_models import numbers

BUDGET = CollaborativeConfig(budget=0.5, multiple_of=1)


def inputs(count=4):
    return [numbers(8, 6, 16, seed=seed) for seed in range(count)]


def silent(made):
    """A layer whose attention hardly reaches the output."""
    with torch.no_grad():
        made.self_attn.out_proj.weight.mul_(1e-3)
    return made


def test_layers_that_the_output_hardly_depends_on_get_less():
    model = Layers(silent(layer(1)), layer(1)).eval()
    by_scores = plan(model, BUDGET, calibration=calibrate(model, inputs()))
    by_effect = plan(model, BUDGET, calibration=inputs())
    assert by_effect.sites[0].importance < 1e-3 * by_effect.sites[1].importance
    assert by_effect.sites[0].shared_dim < 0.5 * by_effect.sites[1].shared_dim
    assert by_effect.sites[0].shared_dim < by_scores.sites[0].shared_dim
    assert [site.curve for site in by_effect.sites] == [site.curve for site in by_scores.sites]


def test_an_effect_is_the_output_error_of_one_layer_made_worse():
    model = Layers(layer(1), layer(2)).eval()
    statistics = calibrate(model, inputs())
    for site in find_attention(model):
        found = Effects(model, inputs()).of(site, statistics.sites[site.path])
        worse = copy.deepcopy(model)
        config = CollaborativeConfig(shared_dim=8, max_iterations=0)
        report = collaborate_(worse, config, calibration=statistics, only=lambda one, site=site: one.path == site.path)
        with torch.no_grad():
            aim, output = (
                torch.cat([call(one, batch, device_of(one)) for batch in inputs()]) for one in (model, worse)
            )
        error = float((output - aim).square().sum() / aim.square().sum())
        assert found == pytest.approx(error / report.sites[0].error ** 2, rel=1e-3)


@pytest.mark.parametrize("name", ["bert", "albert", "bart", "vit", "gpt2"])
def test_planning_by_inputs_changes_nothing_and_a_conversion_has_those_sizes(name):
    model = getattr(tiny_models, name)()
    batches = [tiny_models.inputs_for(model)]
    before = copy.deepcopy(model)
    planned = plan(model, BUDGET, calibration=batches)
    assert all(torch.equal(value, before.state_dict()[name]) for name, value in model.state_dict().items())
    assert [type(module) for module in model.modules()] == [type(module) for module in before.modules()]
    assert all(site.importance > 0 for site in planned.sites)
    report = collaborate_(model, BUDGET, calibration=batches, refine=False)
    assert {site.path: site.shared_dim for site in report.sites} == planned.sizes


def test_a_failure_in_the_middle_leaves_the_model_as_it_was():
    model = Layers(layer(1), layer(2)).eval()
    before = copy.deepcopy(model)
    statistics = calibrate(model, inputs())
    site = next(iter(find_attention(model)))
    calls = []

    def fail(module, args, output):
        calls.append(1)
        if len(calls) == 2:  # the first call is the original's
            raise KeyboardInterrupt

    handle = model.register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        Effects(model, inputs()).of(site, statistics.sites[site.path])
    handle.remove()
    assert [type(module) for module in model.modules()] == [type(module) for module in before.modules()]
    assert torch.equal(model(inputs(1)[0]), before(inputs(1)[0]))


def test_identical_heads_and_single_inputs_are_measured_too():
    model = Layers(layer(1, alike=1.0), layer(2)).eval()
    planned = plan(model, BUDGET, calibration=iter(inputs(1)))
    assert all(0 < site.importance < float("inf") for site in planned.sites)
    assert planned.kept <= 0.5


def test_without_a_batch_there_is_nothing_to_measure():
    with pytest.raises(ValueError, match="at least one batch, got none"):
        plan(Layers(layer(1)), BUDGET, calibration=[])
