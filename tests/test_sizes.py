"""plan: error curves bound conversions, budgets are kept and well spent, and what cannot be planned is named."""

import copy
import itertools
import json
import math

import pytest
import torch
from torch import nn

import collab
import tiny_models
from collab import CollaborativeConfig, calibrate, collaborate_, decompose, error_curve, find_attention, plan
from tiny_models import numbers, padding_mask, token_ids

BERT_LAYERS = ["encoder.layer.0.attention.self", "encoder.layer.1.attention.self"]


def texts(count=4):
    return [{"input_ids": token_ids(seed=seed), "attention_mask": padding_mask()} for seed in range(count)]


class Layers(nn.Module):
    """Attention layers one after another, some of them perhaps the same module."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def layer(seed=0, *, alike=0.0, width=16, heads=2):
    """A layer of random weights; the more alike its heads are, the sooner its error curve falls."""
    made = tiny_models.randomise_(nn.TransformerEncoderLayer(width, heads, 24, batch_first=True), seed).eval()
    with torch.no_grad():
        weights = made.self_attn.in_proj_weight[: 2 * width].view(2, heads, width // heads, width)
        weights[:, 1:] = alike * weights[:, :1] + (1 - alike) * weights[:, 1:]
    return made


def varied():
    """Layers that differ in how much their heads have in common."""
    return Layers(layer(1), layer(2, alike=1.0), layer(3, alike=0.7))


def loss(planned, sizes):
    """What a budget is spent to lower: the squared errors of all layers' scores."""
    return sum(one.importance * one.curve[size] ** 2 for one, size in zip(planned.sites, sizes, strict=True))


def share(planned, sizes):
    full = sum(one.full_dim * one.parameters for one in planned.sites)
    return sum(size * one.parameters for one, size in zip(planned.sites, sizes, strict=True)) / full


# error curves


@pytest.mark.parametrize("alike", [0.0, 0.7, 1.0])
def test_a_curve_falls_from_one_to_zero_and_no_conversion_is_above_it(alike):
    made = layer(alike=alike)
    site = find_attention(made)[0]
    weights = site.host.read(site.module)
    curve = error_curve(weights.query.detach(), weights.key.detach())
    assert curve.shape == (17,)
    assert (curve[0], curve[-1]) == (1, 0)
    assert (curve.diff() <= 0).all()
    for rank in (1, 3, 8, 12, 15):
        for sweeps in (0, 5):
            found = decompose(weights.query.detach(), weights.key.detach(), rank, max_iterations=sweeps).relative_error
            assert found <= float(curve[rank]) + 1e-7, (rank, sweeps)


def test_a_curve_is_no_worse_than_heads_truncated_each_by_itself():
    query, key = numbers(3, 4, 20, seed=1).double(), numbers(3, 4, 24, seed=2).double()
    curve = error_curve(query, key)
    values = torch.linalg.svdvals(query.mT @ key).flatten().sort(descending=True).values.square()
    alone = (1 - values.cumsum(0) / values.sum())[:12].clamp(min=0).sqrt()
    assert (curve[1:] <= alone + 1e-6).all()


def test_heads_that_are_the_same_need_the_dimensions_of_one():
    query, key = numbers(1, 4, 20, seed=1).repeat(3, 1, 1), numbers(1, 4, 20, seed=2).repeat(3, 1, 1)
    curve = error_curve(query, key)
    assert curve[4] < 1e-6 < curve[3]


def test_weights_of_zero_have_no_error_at_any_size():
    assert error_curve(torch.zeros(2, 3, 5), numbers(2, 3, 5)).tolist() == [0.0] * 7


# budgets


@pytest.mark.parametrize("multiple_of", [1, 3, 4, 8])
@pytest.mark.parametrize("budget", [0.29, 0.5, 0.77, 1.0])
def test_a_budget_is_kept_in_sizes_that_are_multiples(budget, multiple_of):
    config = CollaborativeConfig(budget=budget, multiple_of=multiple_of)
    model = varied()
    if budget == 0.29 and multiple_of == 8:
        with pytest.raises(ValueError, match=r"budget must be at least 0\.5 with sizes that are multiples, got 0\.29"):
            plan(model, config)
        return
    planned = plan(model, config)
    assert planned.kept == share(planned, planned.sizes.values()) <= budget
    # Nothing is left that another step could use.
    assert budget - planned.kept < multiple_of / 16
    for one in planned.sites:
        assert one.shared_dim % multiple_of == 0 or one.shared_dim == one.full_dim
        assert one.error == one.curve[one.shared_dim]
    if budget == 1:
        assert [one.shared_dim for one in planned.sites] == [16, 16, 16]


def test_a_budget_that_a_size_meets_exactly_is_met():
    """0.29 x 100 is less than 29 in floating point."""
    model = layer(width=100, heads=10)
    planned = plan(model, CollaborativeConfig(budget=0.29, multiple_of=1))
    assert planned.sizes == {"self_attn": 29}
    assert planned.kept == 0.29


@pytest.mark.parametrize("budget", [0.25, 0.4, 0.6, 0.8])
@pytest.mark.parametrize("seed", range(3))
def test_a_budget_is_spent_about_as_well_as_can_be_and_never_worse_than_evenly(budget, seed):
    model = Layers(layer(seed), layer(seed + 10, alike=0.5 + 0.1 * seed), layer(seed + 20, alike=0.9))
    planned = plan(model, CollaborativeConfig(budget=budget, multiple_of=2))
    found = loss(planned, planned.sizes.values())
    possible = [sizes for sizes in itertools.product(range(2, 17, 2), repeat=3) if share(planned, sizes) <= budget]
    assert found <= 1.1 * min(loss(planned, sizes) for sizes in possible)
    assert found <= min(loss(planned, sizes) for sizes in possible if len(set(sizes)) == 1)


def test_even_sizes_are_taken_where_steps_by_steps_would_end_worse():
    """Curves as no layer's are: the best first step leaves too little for the second."""
    steep = [1.0, 0.9, 0.85, 0.8, 0.0]
    late = [1.0, 0.99, 0.4, 0.39, 0.0]
    sites = [
        collab.sizes.SitePlan(str(i), 4, 4, 0.0, tuple(math.sqrt(value) for value in curve), 1.0, 10)
        for i, curve in enumerate((steep, late))
    ]
    sizes = collab.sizes._spend(sites, [[1, 2, 3, 4]] * 2, 0.5)
    assert sum(sizes) <= 4
    best = min(
        sites[0].curve[one] ** 2 + sites[1].curve[other] ** 2
        for one, other in ((1, 1), (2, 2))
    )  # fmt: skip
    assert sites[0].curve[sizes[0]] ** 2 + sites[1].curve[sizes[1]] ** 2 <= best


def test_layers_whose_heads_have_more_in_common_get_less():
    sizes = plan(Layers(layer(1), layer(1, alike=1.0)), CollaborativeConfig(budget=0.5, multiple_of=1)).sizes
    assert sizes["layers.0.self_attn"] > sizes["layers.1.self_attn"]


def test_a_layer_that_is_run_more_often_gets_more():
    one, other = layer(1), layer(1)
    sizes = plan(Layers(one, other, one, one), CollaborativeConfig(budget=0.5, multiple_of=1))
    assert [site.importance for site in sizes.sites] == [3, 1]
    first, second = sizes.sizes.values()
    assert first > second
    # Its parameters are there once, however often they are used.
    assert first + second == 16


def test_albert_counts_its_modules_as_often_as_they_run():
    planned = plan(tiny_models.albert(), CollaborativeConfig(budget=0.5))
    assert [site.importance for site in planned.sites] == [2] * 4
    assert planned.kept <= 0.5


def test_wider_inputs_cost_more():
    model = tiny_models.bart()
    planned = plan(model, CollaborativeConfig(budget=0.5, multiple_of=1))
    assert {site.parameters for site in planned.sites} == {64}
    unequal = nn.MultiheadAttention(16, 2, kdim=40, batch_first=True)
    assert plan(unequal, CollaborativeConfig(budget=0.5)).sites[0].parameters == 16 + 40


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "vit"])
@pytest.mark.parametrize("settings", [{"budget": 0.5}, {"max_error": 0.5}], ids=str)
def test_a_conversion_has_exactly_the_sizes_planned_and_no_larger_errors(name, settings):
    model = getattr(tiny_models, name)()
    config = CollaborativeConfig(**settings, multiple_of=4, max_iterations=5)
    planned = plan(model, config)
    report = collaborate_(model, config)
    assert {site.path: site.shared_dim for site in report.sites} == planned.sizes
    for site, expected in zip(report.sites, planned.sites, strict=True):
        assert site.error <= expected.error + 1e-6
    if "max_error" in settings:
        assert all(site.error <= 0.5 for site in report.sites)


def test_planning_changes_nothing():
    model = tiny_models.bert()
    before = copy.deepcopy(model)
    plan(model, CollaborativeConfig(budget=0.5), calibration=calibrate(model, texts()))
    assert all(torch.equal(value, before.state_dict()[name]) for name, value in model.state_dict().items())
    assert [type(module) for module in model.modules()] == [type(module) for module in before.modules()]
    assert model.config.to_dict() == before.config.to_dict()


# a largest error


@pytest.mark.parametrize("max_error", [0.0, 0.1, 0.4, 0.9])
@pytest.mark.parametrize("multiple_of", [1, 5])
def test_each_layer_gets_the_smallest_size_that_is_good_enough(max_error, multiple_of):
    planned = plan(varied(), CollaborativeConfig(max_error=max_error, multiple_of=multiple_of))
    for one in planned.sites:
        assert one.error <= max_error
        smaller = range(multiple_of, one.shared_dim, multiple_of)
        assert all(one.curve[size] > max_error for size in smaller), one.path
    assert [one.shared_dim % multiple_of == 0 or one.shared_dim == 16 for one in planned.sites] == [True] * 3


@pytest.mark.parametrize(
    ("settings", "name"), [({"dims_per_head": 3}, "dims_per_head"), ({"method": "unshared"}, "method='unshared'")]
)
def test_a_largest_error_is_not_promised_where_it_cannot_be_kept(settings, name):
    model = tiny_models.bert()
    config = CollaborativeConfig(max_error=0.3, **settings)
    for attempt in (plan, collaborate_):
        with pytest.raises(ValueError, match=f"max_error must come without {name}, whose errors no curve bounds"):
            attempt(model, config)
    planned = plan(model, CollaborativeConfig(budget=0.5, **settings))
    assert not planned.is_bound
    assert "a conversion by these settings may have larger ones" in str(planned)


# with calibration


def quiet(made, factor):
    """A layer whose scores hardly vary: its queries are small."""
    with torch.no_grad():
        made.self_attn.in_proj_weight[:16] *= factor
    return made


def test_with_calibration_layers_whose_scores_vary_more_get_more():
    model = Layers(quiet(layer(1), 0.05), layer(1))
    config = CollaborativeConfig(budget=0.5, multiple_of=1)
    batches = [numbers(8, 6, 16, seed=seed) for seed in range(4)]
    calibration = calibrate(model, batches)
    plain, planned = plan(model, config), plan(model, config, calibration=calibration)
    assert (plain.metric, planned.metric) == ("weights", "inputs")
    assert [site.importance for site in plain.sites] == [1, 1]
    assert abs(plain.sites[0].shared_dim - plain.sites[1].shared_dim) <= 1
    assert planned.sites[0].importance < 0.05 * planned.sites[1].importance
    assert planned.sites[0].shared_dim < 0.5 * planned.sites[1].shared_dim


def test_importance_is_the_mean_variance_of_scores():
    """Of two inputs drawn apart, both centred, in the covariance that is assumed."""
    model = layer(1, heads=4)
    rows = numbers(4000, 16) * torch.linspace(0.2, 2, 16)
    calibration = calibrate(model, [rows[None]])
    planned = plan(model, CollaborativeConfig(budget=0.5), calibration=calibration)
    centred = rows.double() - rows.double().mean(0)
    site = find_attention(model)[0]
    weights = site.host.read(site.module)
    query, key = (torch.einsum("hdi,ti->htd", part.detach().double(), centred) for part in (weights.query, weights.key))
    scores = query[:, :2000] @ key[:, 2000:].mT * site.host.scale(site.module)
    assert planned.sites[0].importance == pytest.approx(float(scores.square().mean()), rel=0.05)


def test_with_calibration_a_conversion_has_the_sizes_planned_and_no_larger_errors():
    model = tiny_models.bert()
    calibration = calibrate(model, texts())
    config = CollaborativeConfig(budget=0.4, multiple_of=2, max_iterations=5)
    planned = plan(model, config, calibration=calibration)
    report = collaborate_(model, config, calibration=calibration)
    assert {site.path: site.shared_dim for site in report.sites} == planned.sizes
    assert all(site.error <= one.error + 1e-6 for site, one in zip(report.sites, planned.sites, strict=True))
    assert {site.metric for site in report.sites} == {"inputs"}


def test_statistics_of_another_model_are_refused():
    calibration = calibrate(tiny_models.bert(hidden_size=48), texts(1))
    with pytest.raises(ValueError, match=f"calibration of {BERT_LAYERS[0]} must have query inputs 32 wide, got 48"):
        plan(tiny_models.bert(), CollaborativeConfig(budget=0.5), calibration=calibration)


# sizes that are given, and layers that are chosen


def test_given_sizes_are_planned_as_they_are():
    model = tiny_models.bert()
    assert plan(model, CollaborativeConfig(shared_dim=0.25)).sizes == dict.fromkeys(BERT_LAYERS, 8)
    planned = plan(model, CollaborativeConfig(shared_dim={BERT_LAYERS[1]: 5}))
    assert planned.sizes == {BERT_LAYERS[1]: 5}
    assert planned.kept == 5 / 32


def test_what_was_planned_can_be_given_back():
    model = tiny_models.bert()
    planned = plan(model, CollaborativeConfig(budget=0.5, multiple_of=3))
    assert plan(model, CollaborativeConfig(shared_dim=planned.sizes)).sizes == planned.sizes


def test_only_some_layers():
    planned = plan(tiny_models.bert(), CollaborativeConfig(budget=0.25), only=lambda site: ".1." in site.path)
    assert planned.sizes == {BERT_LAYERS[1]: 8}
    report = collaborate_(tiny_models.bert(), CollaborativeConfig(budget=0.25), only=lambda site: ".1." in site.path)
    assert {site.path: site.shared_dim for site in report.sites} == planned.sizes


def test_sizes_that_would_pass_for_ordinary_heads_are_not_chosen():
    """Queries, keys and values in one layer: 2 x 30 + 4 content rows are as many as 2 x 32."""
    model = tiny_models.gpt2()
    site = find_attention(model)[0]
    assert site.host.size_problem(site.module, 30) is not None
    curve = plan(model, CollaborativeConfig(max_error=0.5, multiple_of=1)).sites[0].curve
    for error in (curve[30], (curve[29] + curve[30]) / 2):
        sizes = plan(model, CollaborativeConfig(max_error=error, multiple_of=1)).sizes
        assert sizes[site.path] == 31


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budget": 0.2}, r"budget must be at least 0\.25 with sizes that are multiples, got 0\.2"),
        ({"budget": 0.9, "multiple_of": 64}, "budget must be at least 1 with sizes that are multiples, got 0.9"),
        ({"shared_dim": 40}, "shared_dim must be at most heads x head size, which is 32 at .*, got 40"),
        (
            {"shared_dim": {BERT_LAYERS[0]: 8, "pooler": 8}},
            f"shared_dim names pooler, where BertModel has no attention; it has {BERT_LAYERS[0]}, {BERT_LAYERS[1]}",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_had_is_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        plan(tiny_models.bert(), CollaborativeConfig(**settings))


def test_layers_that_cannot_be_swapped_are_refused_by_name():
    model = tiny_models.bert()
    collaborate_(model, CollaborativeConfig(shared_dim={BERT_LAYERS[0]: 8}))
    with pytest.raises(ValueError, match=f"shared_dim names {BERT_LAYERS[0]}, which cannot be swapped: already"):
        plan(model, CollaborativeConfig(shared_dim={BERT_LAYERS[0]: 8}))
    assert list(plan(model, CollaborativeConfig(budget=0.5)).sizes) == BERT_LAYERS[1:]


def test_models_without_attention_and_weights_that_are_no_numbers_are_refused():
    with pytest.raises(ValueError, match="no attention to plan for in Linear"):
        plan(nn.Linear(3, 3), CollaborativeConfig(budget=0.5))
    model = tiny_models.bert()
    model.encoder.layer[1].attention.self.key.weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match=f"cannot read the weights of {BERT_LAYERS[1]}: key.weight must be finite"):
        plan(model, CollaborativeConfig(budget=0.5))


# what is told


def test_a_plan_prints_as_a_table_with_what_is_kept():
    planned = plan(tiny_models.bert(), CollaborativeConfig(budget=0.5))
    lines = str(planned).splitlines()
    assert lines[0].split("  ")[0] == "path"
    row = next(line for line in lines if BERT_LAYERS[1] in line).split()
    site = planned.sites[1]
    shown = [site.curve[size] for size in (4, 8, 11, 16, 24)]
    assert row[1] == "32"
    assert [float(cell) for cell in row[2:7]] == pytest.approx(shown, abs=1e-4)
    assert int(row[7]) == site.shared_dim
    assert "in the metric of the weights" in lines[-2]
    assert lines[-2].endswith("a conversion stays below them")
    assert lines[-1] == f"kept: {planned.kept:.3f} of the query and key parameters"


def test_a_plan_is_plain_values():
    planned = plan(tiny_models.bert(), CollaborativeConfig(budget=0.5))
    values = json.loads(json.dumps(planned.to_dict()))
    assert values["sizes"] == planned.sizes
    assert values["kept"] == planned.kept
    assert values["metric"] == "weights"
    assert [len(site["curve"]) for site in values["sites"]] == [33, 33]


def test_progress_wraps_the_layers():
    calls = []

    def progress(steps, total):
        calls.append(total)
        return steps

    plan(tiny_models.bert(), CollaborativeConfig(budget=0.5), progress=progress)
    assert calls == [2]
    collaborate_(tiny_models.bert(), CollaborativeConfig(budget=0.5), progress=progress)
    assert calls == [2, 2, 2]  # curves, then decompositions


@pytest.mark.parametrize("as_statistics", [False, True])
def test_layers_that_no_input_reached_are_taken_for_as_important_as_the_others(as_statistics):
    class First(Layers):
        def forward(self, inputs):
            return self.layers[0](inputs, inputs, inputs)[0]

    torch.manual_seed(0)
    layer = nn.MultiheadAttention(32, 4, batch_first=True)
    model = First(layer, copy.deepcopy(layer))
    batches = [numbers(4, 9, 32, seed=seed) for seed in range(4)]
    calibration = calibrate(model, batches) if as_statistics else batches
    seen, unseen = plan(model, CollaborativeConfig(budget=0.5), calibration=calibration).sites
    assert unseen.importance == seen.importance > 0
    assert unseen.shared_dim == seen.shared_dim == 16


def test_weights_that_cannot_be_read_are_refused():
    model = nn.TransformerEncoderLayer(32, 4, 64, device="meta")
    for config in ({"budget": 0.5}, {"shared_dim": 8}):
        with pytest.raises(ValueError, match=r"cannot read the weights of self_attn: .* on the meta device"):
            plan(model, CollaborativeConfig(**config))
