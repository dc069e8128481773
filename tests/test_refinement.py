"""Refinement: converted layers come closer to the original's outputs, or stay as they are, and nothing else changes."""

import copy
import gc
import json
import math
import weakref

import pytest
import torch
from torch import nn

import collab.refinement
import tiny_models
from collab import CollaborativeConfig, Refinement, calibrate, collaborate_, compare, find_attention
from collab.calibration import Moments, SiteStatistics
from collab.fitting import PRECISIONS, Leaves, fit
from collab.hosts import Collaborative
from collab.running import split_batch
from collab.twins import Twin
from tiny_models import inputs_for, numbers, token_ids

POOR = CollaborativeConfig(shared_dim=6, method="paper", max_iterations=0)
"""A conversion that leaves much to gain: what a decomposition starts from, at random."""


def settings(**options):
    """Few steps, and nothing that depends on what the defaults are."""
    return Refinement(**({"rate": 0.03, "batch_size": 32, "held_back": 0.125} | options))


BRIEF = settings(steps=2, joint_steps=2)
QUICK = settings(steps=4, joint_steps=8)
BY_LAYER = settings(steps=8, joint_steps=0)
TOGETHER = settings(steps=0, joint_steps=16)
BOTH = settings(steps=8, joint_steps=16)
TERRIBLE = 1e30
"""A rate no fit can improve anything with."""

HELD_BACK = 4
"""Which of eight batches is held back with the share that is the default."""

BERT_LAYERS = ["encoder.layer.0.attention.self", "encoder.layer.1.attention.self"]


def texts(count=8, batch=24, first=0):
    """Batches of token ids with their masks: sequences of 7, 5 and 3 tokens."""
    lengths = torch.tensor([7, 5, 3]).repeat(batch // 3 + 1)[:batch, None]
    mask = (torch.arange(7) < lengths).long()
    return [{"input_ids": token_ids(7, batch, seed=first + seed), "attention_mask": mask} for seed in range(count)]


def batches_for(model, count=8):
    """Batches that differ from each other, for any of the tiny models."""
    return [
        {name: torch.cat([_drawn(name, value, 4 * index + part) for part in range(4)]) for name, value in given.items()}
        for index, given in enumerate([inputs_for(model)] * count)
    ]


def _drawn(name, value, seed):
    if name.endswith("input_ids"):
        return token_ids(value.shape[1], seed=seed + 100 * ("decoder" in name))
    return numbers(*value.shape, seed=seed) if value.is_floating_point() else value


def sharp(builder, **options):
    """A tiny model whose heads look at some tokens more than at others, as those of trained ones do."""
    model = getattr(tiny_models, builder)(**options)
    with torch.no_grad():
        for site in find_attention(model):
            site.host.read(site.module).query.mul_(1 if builder == "t5" else 3)  # T5 does not scale its scores down
    return model


def converted(model, batches, how=QUICK, config=POOR, **options):
    """A refined copy, and the report."""
    model = copy.deepcopy(model)
    return model, collaborate_(model, config, calibration=batches, refine=how, **options)


def same_state(one, other):
    ours, theirs = one.state_dict(), other.state_dict()
    return list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)


def measured(original, model, batch):
    """What a report's errors are, by other code: share of the squares missed, or divergence of logits."""
    found = compare(original, model, [batch])
    return found.relative**2 if found.kl is None else found.kl


# closer, or as it was


@pytest.mark.parametrize("how", [BOTH, BY_LAYER, TOGETHER], ids=["both", "by layer", "together"])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_outputs_come_closer_on_inputs_held_back_and_the_report_is_true(name, how):
    model, batches = sharp(name), texts()
    plain, _ = converted(model, batches, False)
    refined, report = converted(model, batches, how)
    done = report.refinement
    assert (done.batches, done.held_back) == (7, 1)
    assert done.kept
    assert done.after < 0.97 * done.before
    assert done.before == pytest.approx(measured(model, plain, batches[HELD_BACK]), rel=1e-4)
    assert done.after == pytest.approx(measured(model, refined, batches[HELD_BACK]), rel=1e-4)
    assert list(done.sites) == ([] if how is TOGETHER else [site.path for site in report.sites])
    assert all(after <= before for before, after in done.sites.values())


@pytest.mark.parametrize("name", ["albert", "vit", "clip", "bart", "t5"])
def test_shared_modules_images_and_decoders_come_closer_too(name):
    model = sharp(name)
    refined, report = converted(model, batches_for(model))
    done = report.refinement
    assert sorted(done.sites) == sorted(site.path for site in report.sites)
    assert done.kept
    assert done.after < 0.99 * done.before
    assert all(after <= before for before, after in done.sites.values())
    assert any(after < before for before, after in done.sites.values())
    assert torch.isfinite(refined(**inputs_for(model))[0]).all()


def test_inputs_no_fit_has_seen_come_closer():
    model, batches, others = sharp("bert"), texts(), texts(4, first=500)
    plain, _ = converted(model, batches, False)
    refined, _ = converted(model, batches, BOTH)
    assert compare(model, refined, others).relative < 0.97 * compare(model, plain, others).relative


@pytest.mark.parametrize(
    "how",
    [
        settings(steps=3, joint_steps=3, rate=0.5, held_back=0.5),
        settings(steps=1, joint_steps=1, batch_size=1, seed=9),
        settings(steps=4, joint_steps=4, rate=30.0),
        settings(steps=0, joint_steps=0),
    ],
    ids=["half held back", "single steps", "long steps", "no steps"],
)
def test_the_error_is_never_worse_than_at_the_start(how):
    model, batches = sharp("bert"), texts(batch=3)
    refined, report = converted(model, batches, how)
    plain, _ = converted(model, batches, False)
    done = report.refinement
    assert done.after <= done.before
    assert done.kept == (done.after < done.before) == (not same_state(refined, plain))


@pytest.mark.parametrize(
    ("steps", "joint_steps", "dtype"),
    [
        (8, 8, torch.float32),
        (8, 0, torch.float32),
        (0, 8, torch.float32),
        (8, 8, torch.bfloat16),
        (8, 8, torch.float64),
    ],
    ids=str,
)
def test_what_does_not_help_is_undone_bit_by_bit_and_said(steps, joint_steps, dtype):
    model, batches = sharp("bert").to(dtype), texts()
    plain, _ = converted(model, batches, False)
    rate = TERRIBLE**9 if dtype == torch.float64 else TERRIBLE  # or a step might land somewhere better by chance
    refined, report = converted(model, batches, settings(steps=steps, joint_steps=joint_steps, rate=rate))
    assert not report.refinement.kept
    assert report.refinement.after == report.refinement.before > 0
    assert all(after == before for before, after in report.refinement.sites.values())
    assert "it was no better, and undone" in str(report)
    assert same_state(refined, plain)


def test_layers_that_are_closer_by_themselves_but_not_together_are_undone(monkeypatch):
    model, batches = sharp("bert"), texts()
    plain, _ = converted(model, batches, False)

    def wreck(every, *rest, **options):
        for leaves in every:
            leaves.set_({name: values + 1 for name, values in leaves.values().items()})
        return 1.0, 0.5

    monkeypatch.setattr(collab.refinement, "fit", wreck)
    refined, report = converted(model, batches, BY_LAYER)
    assert not report.refinement.kept
    assert same_state(refined, plain)


def test_at_full_size_there_is_nothing_to_gain():
    model, batches = sharp("bert"), texts()
    refined, report = converted(model, batches, config=CollaborativeConfig(shared_dim=32))
    assert report.refinement.before < 1e-10
    assert compare(model, refined, batches).max_abs < 1e-4


@pytest.mark.parametrize("precision", PRECISIONS)
def test_steps_are_as_precise_as_is_asked_and_judgement_as_precise_as_ever(precision):
    seen = set()

    def watch(module, args, output):
        low = output.dtype == torch.bfloat16
        seen.add((torch.is_grad_enabled(), low, torch.get_float32_matmul_precision()))

    model = sharp("bert")
    handle = model.encoder.layer[0].intermediate.dense.register_forward_hook(watch)
    before = torch.get_float32_matmul_precision()
    report = collaborate_(
        model, POOR, calibration=texts(), refine=settings(steps=0, joint_steps=16, precision=precision)
    )
    handle.remove()
    assert torch.get_float32_matmul_precision() == before
    assert (True, precision == "bfloat16", "high" if precision == "tf32" else before) in seen
    assert {one for one in seen if one[0]} == {one for one in seen if one[0] and one[1] == (precision == "bfloat16")}
    assert report.refinement.after < report.refinement.before
    again = collaborate_(sharp("bert"), POOR, calibration=texts(), refine=settings(steps=0, joint_steps=0)).refinement
    assert again.before == pytest.approx(report.refinement.before, rel=1e-6)


def missed_logits(original, model, batch):
    """Share of the squares of centred logits that is missed."""
    with torch.no_grad():
        aim, found = (one(**batch).logits.double() for one in (original, model))
    aim, found = (logits - logits.mean(-1, keepdim=True) for logits in (aim, found))
    return float((found - aim).square().sum() / aim.square().sum())


@pytest.mark.parametrize(
    ("name", "labels", "expected", "rate"),
    [
        ("BertForTokenClassification", 3, lambda *all: compare(*all[:2], [all[2]]).kl, 0.005),
        ("BertForSequenceClassification", 3, missed_logits, 0.00125),
        ("BertForSequenceClassification", 1, lambda *all: compare(*all[:2], [all[2]]).relative ** 2, 0.00125),
    ],
    ids=["logits of tokens", "logits of texts", "a number a text"],
)
def test_each_kind_of_output_is_judged_in_its_own_way(name, labels, expected, rate):
    model = sharp("tiny", name=name, num_labels=labels)
    plain, _ = converted(model, texts(), False)
    _, report = converted(model, texts(), settings(steps=0, joint_steps=0, rate=None))
    assert report.refinement.before == pytest.approx(expected(model, plain, texts()[HELD_BACK]), rel=1e-3)
    assert report.refinement.settings["rate"] == rate


def test_logits_of_texts_come_closer_whatever_all_of_a_text_have_in_common():
    model = sharp("tiny", name="BertForSequenceClassification", num_labels=3)
    _, report = converted(model, texts(), settings(steps=0, joint_steps=32))
    assert report.refinement.after < 0.99 * report.refinement.before
    with torch.no_grad():
        model.classifier.bias += 5
    _, moved = converted(model, texts(), settings(steps=0, joint_steps=32))
    assert moved.refinement.before == pytest.approx(report.refinement.before, rel=1e-4)
    assert moved.refinement.after == pytest.approx(report.refinement.after, rel=1e-2)


def test_padding_does_not_count():
    model, batches = sharp("bert"), texts()
    others = copy.deepcopy(batches)
    for seed, batch in enumerate(others):
        padding = batch["attention_mask"] == 0
        batch["input_ids"][padding] = token_ids(7, 24, seed=seed + 50)[padding]
    one, first = converted(model, batches)
    other, second = converted(model, others)
    assert first.refinement.after == pytest.approx(second.refinement.after, rel=1e-4)
    for path in BERT_LAYERS:
        ours, theirs = one.get_submodule(path).query.weight, other.get_submodule(path).query.weight
        torch.testing.assert_close(ours, theirs, atol=1e-4 * float(ours.detach().abs().max()), rtol=0)


# what a layer is fitted to


@pytest.fixture
def cases(monkeypatch):
    """Every case that is made, and how many of them lived at once."""

    class Cases(list):
        most = 0

    made, alive = Cases(), weakref.WeakSet()

    class Case(collab.refinement._Case):
        __hash__ = object.__hash__

        def __init__(self, args, kwargs, target, counts):
            super().__init__(args, kwargs, target, counts)
            alive.add(self)
            made.most = max(made.most, len(alive))
            if made.keep:
                made.append(self)

    made.keep, made.alive = False, alive
    monkeypatch.setattr(collab.refinement, "_Case", Case)
    return made


def calls_of(model, path, batches):
    """(input, output) of every call of a layer."""
    seen = []
    handle = model.get_submodule(path).register_forward_hook(
        lambda module, args, kwargs, output: seen.append((args[0] if args else kwargs["hidden_states"], output[0])),
        with_kwargs=True,
    )
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    handle.remove()
    return seen


def test_later_layers_see_the_converted_earlier_ones_and_aim_at_the_original(cases):
    model, batches = sharp("bert"), texts()
    cases.keep = True
    refined, report = converted(model, batches, BY_LAYER)
    assert report.refinement.kept
    order = [index for index in range(8) if index != HELD_BACK] + [HELD_BACK]
    second = cases[8:]  # of the first layer there are as many
    assert len(second) == 8
    now = calls_of(refined, BERT_LAYERS[1], [batches[index] for index in order])
    then = calls_of(model, BERT_LAYERS[1], [batches[index] for index in order])
    plain, _ = converted(model, batches, False)
    unrefined = calls_of(plain, BERT_LAYERS[1], [batches[index] for index in order])
    for case, (inputs, _), (first_inputs, target), (unrefined_inputs, _) in zip(
        second, now, then, unrefined, strict=True
    ):
        given = case.args[0] if case.args else case.kwargs["hidden_states"]
        torch.testing.assert_close(given, inputs, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(case.target, target, atol=1e-6, rtol=1e-5)
        assert not torch.allclose(given, first_inputs, atol=1e-4)
        assert not torch.allclose(given, unrefined_inputs, atol=1e-5)


def test_every_run_of_a_shared_module_is_a_case(cases):
    model, batches = sharp("albert"), texts()
    cases.keep = True
    converted(model, batches, BY_LAYER)
    path = "encoder.albert_layer_groups.0.albert_layers.0.attention"
    uses = next(site.uses for site in find_attention(model) if site.path == path)
    assert uses == 2
    first = [batches[index] for index in (0, 2, 5, 7, HELD_BACK)]  # half of the batches, since each gives two cases
    expected = calls_of(model, path, first)
    assert len(expected) == 2 * len(first)
    for case, (_, target) in zip(cases, expected, strict=False):
        torch.testing.assert_close(case.target, target, atol=1e-5, rtol=1e-5)


def test_cases_of_one_layer_at_a_time_are_held(cases):
    most = {}
    for layers in (2, 5):
        cases.most = 0
        converted(tiny_models.bert(num_hidden_layers=layers), texts(batch=3), settings(steps=8, joint_steps=1))
        gc.collect()
        assert not cases.alive
        most[layers] = cases.most
    assert most == {2: 8, 5: 8}


# settings


def test_the_same_seed_gives_the_same_weights_whatever_random_numbers_others_drew():
    model, batches = sharp("bert"), texts()
    torch.manual_seed(1)
    one, _ = converted(model, batches, BRIEF)
    torch.manual_seed(2)
    other, _ = converted(model, batches, BRIEF)
    third, _ = converted(model, batches, settings(steps=2, joint_steps=2, seed=3))
    assert same_state(one, other)
    assert not same_state(one, third)


def test_a_generator_of_batches_is_as_good_as_a_list():
    model = sharp("bert")
    assert same_state(converted(model, texts(), BRIEF)[0], converted(model, (batch for batch in texts()), BRIEF)[0])


def test_steps_of_all_layers_together_follow_the_inputs_unless_given(monkeypatch):
    monkeypatch.setattr(collab.refinement, "_FEWEST_STEPS", 2)
    monkeypatch.setattr(collab.refinement, "_MOST_STEPS", 5)
    for batches, steps in ((2, 2), (5, 4), (9, 5)):  # one is held back
        _, report = converted(sharp("bert"), texts(batches), settings(steps=0))
        assert report.refinement.settings["joint_steps"] == steps
    _, report = converted(sharp("bert"), texts(2), settings(steps=0, joint_steps=3))
    assert report.refinement.settings["joint_steps"] == 3


def test_batches_too_large_for_a_step_are_split():
    model = sharp("bert")
    _, report = converted(model, texts(2, batch=20), settings(steps=2, joint_steps=2, batch_size=4))
    assert (report.refinement.batches, report.refinement.held_back) == (9, 1)
    assert report.refinement.after <= report.refinement.before


def test_a_single_batch_is_split_into_its_inputs():
    _, report = converted(sharp("bert"), texts(1, batch=3))
    assert (report.refinement.batches, report.refinement.held_back) == (2, 1)
    assert not any("single input" in note for note in report.notes)


def test_a_single_input_is_fitted_to_and_says_so():
    model, batch = sharp("bert"), {"input_ids": token_ids(7, 1)}
    _, report = converted(model, [batch])
    assert (report.refinement.batches, report.refinement.held_back) == (1, 1)
    assert report.refinement.after < report.refinement.before
    assert any("a single input was given" in note for note in report.notes)
    assert "note: a single input was given" in str(report)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": -1}, "steps must be an integer >= 0, got -1"),
        ({"steps": 2.5}, r"steps must be an integer >= 0, got 2\.5"),
        ({"steps": True}, "steps must be an integer >= 0, got True"),
        ({"joint_steps": -3}, "joint_steps must be an integer >= 0, got -3"),
        ({"batch_size": 0}, "batch_size must be an integer >= 1, got 0"),
        ({"seed": -1}, "seed must be an integer >= 0, got -1"),
        ({"rate": 0}, "rate must be a number > 0, got 0"),
        ({"rate": -0.1}, r"rate must be a number > 0, got -0\.1"),
        ({"rate": math.nan}, "rate must be a number > 0, got nan"),
        ({"rate": math.inf}, "rate must be a number > 0, got inf"),
        ({"layer_weight": -1}, "layer_weight must be a number >= 0, got -1"),
        ({"held_back": 0}, r"held_back must be a share in \(0, 1\), got 0"),
        ({"held_back": 1.0}, r"held_back must be a share in \(0, 1\), got 1\.0"),
        ({"precision": "half"}, r"precision must be 'auto' or one of \('float32', .*\), got 'half'"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Refinement(**values)


def test_refining_without_inputs_is_refused():
    model = tiny_models.bert()
    stats = calibrate(model, texts(1))
    with pytest.raises(ValueError, match="refine needs inputs: calibration must be batches of them, got none"):
        collaborate_(model, POOR, refine=True)
    with pytest.raises(
        ValueError, match="refine needs inputs: calibration must be batches of them, got statistics only"
    ):
        collaborate_(model, POOR, calibration=stats, refine=QUICK)
    with pytest.raises(ValueError, match="calibration must be statistics or an iterable of batches, got 5"):
        collaborate_(model, POOR, calibration=5)
    with pytest.raises(ValueError, match="refine must be True, False or a Refinement, got 3"):
        collaborate_(model, POOR, calibration=texts(1), refine=3)
    assert not any(isinstance(module, Collaborative) for module in model.modules())
    assert collaborate_(model, POOR, calibration=stats).refinement is None


def test_progress_is_told_how_many_steps_there_are_and_sees_all_of_them():
    totals, taken = [], []

    def progress(steps, total):
        totals.append(total)
        taken.append(0)
        for step in steps:
            taken[-1] += 1
            yield step

    converted(sharp("bert"), texts(), progress=progress)
    assert totals == taken == [8, 2, 4 * 2 + 8]  # batches to calibrate on, layers to decompose, steps
    totals.clear(), taken.clear()
    # Nothing to gain: the fits stop early, and the rest counts as done.
    converted(sharp("bert"), texts(), config=CollaborativeConfig(shared_dim=32), progress=progress)
    assert totals == taken == [8, 2, 4 * 2 + 8]


def test_the_report_is_plain_values():
    _, report = converted(sharp("bert"), texts(), BRIEF)
    values = json.loads(json.dumps(report.to_dict()))["refinement"]
    assert values["settings"] == BRIEF.to_dict()
    assert values["sites"].keys() == set(BERT_LAYERS)
    assert values["seconds"] > 0


# which layers


class Spare(nn.Module):
    """Two layers, of which the second is never run."""

    def __init__(self):
        super().__init__()
        self.used, self.spare = (nn.TransformerEncoderLayer(16, 2, 24, batch_first=True) for _ in range(2))

    def forward(self, x):
        return self.used(x)


def test_layers_no_input_reached_are_left_alone_and_named():
    model = tiny_models.randomise_(Spare())
    batches = [numbers(3, 5, 16, seed=seed) for seed in range(8)]
    plain, _ = converted(model, batches, False)
    refined, report = converted(model, batches)
    assert "not refined, since no input reached them: spare.self_attn" in report.notes
    assert list(report.refinement.sites) == ["used.self_attn"]
    assert same_state(refined.spare, plain.spare)
    assert not same_state(refined.used, plain.used)


def test_only_some_layers():
    model = sharp("bert")
    refined, report = converted(model, texts(), only=lambda site: ".1." in site.path)
    assert list(report.refinement.sites) == BERT_LAYERS[1:]
    assert report.refinement.after < report.refinement.before
    assert same_state(refined.encoder.layer[0], model.encoder.layer[0])
    assert type(refined.get_submodule(BERT_LAYERS[0])) is type(model.get_submodule(BERT_LAYERS[0]))


def test_heads_go_on_using_the_dimensions_they_used():
    model, config = sharp("bert"), CollaborativeConfig(shared_dim=12, dims_per_head=3, max_iterations=3)
    plain, _ = converted(model, texts(), False, config)
    refined, report = converted(model, texts(), QUICK, config)
    assert report.refinement.after < report.refinement.before
    for path in BERT_LAYERS:
        now, then = refined.get_submodule(path), plain.get_submodule(path)
        assert now.mixing.shape == (4, 3)
        assert torch.equal(now.mixing_dims, then.mixing_dims)
        assert not torch.equal(now.mixing, then.mixing)


def test_a_model_in_half_precision_stays_so_and_is_fitted_in_single_precision(monkeypatch):
    fitted = []

    class Noted(collab.refinement.Leaves):
        def __init__(self, *args):
            super().__init__(*args)
            fitted.append(self)

    monkeypatch.setattr(collab.refinement, "Leaves", Noted)
    model = sharp("bert").to(torch.bfloat16)
    refined, report = converted(model, texts(), BOTH)
    assert report.refinement.after < report.refinement.before
    assert {parameter.dtype for parameter in refined.parameters()} == {torch.bfloat16}
    assert len(fitted) == 2
    for leaves in fitted:
        assert {tensor.dtype for tensor in leaves.tensors.values()} == {torch.float32}
        assert {tensor.dtype for tensor in leaves.parameters().values()} == {torch.bfloat16}


# what is left behind


def test_nothing_but_the_converted_weights_changes():
    model = sharp("gpt2")
    model.transformer.h[0].train()
    for parameter in model.transformer.h[1].parameters():
        parameter.requires_grad_(False)
    model.config.use_cache = True
    hooked = []
    model.transformer.h[0].attn.register_forward_hook(lambda *args: hooked.append(1))
    plain, _ = converted(model, texts(), False)
    random = torch.get_rng_state()
    refined, report = converted(model, texts())
    assert report.refinement.kept
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in refined.modules()] == [module.training for module in model.modules()]
    assert {name: parameter.requires_grad for name, parameter in refined.named_parameters()} == {
        name: parameter.requires_grad for name, parameter in plain.named_parameters()
    }
    assert not refined.transformer.h[1].attn.mixing.requires_grad
    assert all(parameter.grad is None and parameter.is_leaf for parameter in refined.parameters())
    assert refined.config.use_cache is True
    assert torch.backends.mha.get_fastpath_enabled()
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in refined.modules()]
    assert sum(hooks) == 1
    changed = {name for name, value in refined.state_dict().items() if not torch.equal(value, plain.state_dict()[name])}
    assert changed <= {f"transformer.h.{i}.attn.{name}" for i in (0, 1) for name in ("c_attn.weight", "mixing")}
    assert len(changed) == 4
    # Of a projection that queries, keys and values share, values are not changed.
    for i in (0, 1):
        now, then = refined.transformer.h[i].attn.c_attn, plain.transformer.h[i].attn.c_attn
        assert torch.equal(now.weight[:, -32:], then.weight[:, -32:])
    assert type(refined.transformer.h[0].attn) is type(plain.transformer.h[0].attn)
    assert vars(refined.transformer.h[0].attn).keys() == vars(plain.transformer.h[0].attn).keys()


@pytest.mark.parametrize("call", [9, 11, 20, 40], ids=["the first", "the error", "of a layer", "of all layers"])
def test_a_pass_that_fails_half_way_leaves_the_model_as_it_was(call):
    model, batches = sharp("bert"), texts()
    model.encoder.layer[1].train()
    before, parameters = copy.deepcopy(model), dict(model.named_parameters())
    calls = []

    def fail(module, args):
        calls.append(module)
        if len(calls) == call:
            raise KeyboardInterrupt

    model.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        collaborate_(model, POOR, calibration=batches, refine=QUICK)
    assert sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()) == 1
    now = dict(model.named_parameters())
    assert list(now) == list(parameters)
    assert all(now[name] is parameter for name, parameter in parameters.items())
    assert same_state(model, before)
    assert [type(module) for module in model.modules()] == [type(module) for module in before.modules()]
    assert [module.training for module in model.modules()] == [module.training for module in before.modules()]
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.config.to_dict() == before.config.to_dict()
    # It can still be converted, and comes out as if nothing had been.
    collaborate_(model, POOR, calibration=batches, refine=BRIEF)
    assert same_state(model, converted(before, batches, BRIEF)[0])


def test_a_twin_shows_either_state_exactly():
    model = sharp("gpt2")
    site = find_attention(model)[0]
    twin = Twin(site)
    expected = model(**texts(1)[0]).logits
    first = snapshot(site)
    reference = copy.deepcopy(model)
    collaborate_(reference, CollaborativeConfig(shared_dim={site.path: 6}, dims_per_head=2))
    other = reference.get_submodule(site.path)
    site.host.install_(site.module, site.host.shared_weights(other))
    twin.swapped()
    second = snapshot(site)
    assert first != second
    handle = site.module.register_forward_hook(lambda *args: None)
    site.module.train()
    for _ in range(2):
        twin.show(original=True)
        assert snapshot(site) == first
        torch.testing.assert_close(model.eval()(**texts(1)[0]).logits, expected, atol=0, rtol=0)
        site.module.train()
        twin.show(original=False)
        assert snapshot(site) == second
        # Whoever put these there still has them.
        assert len(site.module._forward_hooks) == 1
        assert site.module.training
    handle.remove()
    assert torch.equal(model.eval()(**texts(1)[0]).logits, reference.eval()(**texts(1)[0]).logits)


def snapshot(site):
    """Which objects a layer is made of: classes, attributes, and what is in its tables."""
    return [
        (
            type(part),
            {
                name: {key: id(entry) for key, entry in value.items()} if isinstance(value, dict) else id(value)
                for name, value in vars(part).items()
                if "hook" not in name and name != "training"
            },
        )
        for part in site.host.parts(site.module)
    ]


# the steps of a fit


class Number:
    """Something to fit, in place of a layer's weights: one number."""

    def __init__(self, value):
        self.tensor = torch.tensor(float(value), requires_grad=True)
        self.written = []

    def groups(self, rate):
        return [{"params": [self.tensor], "lr": rate}]

    def values(self):
        return {"number": self.tensor.detach().clone()}

    def set_(self, values):
        with torch.no_grad():
            self.tensor.copy_(values["number"])
        self.written.append(float(self.tensor.detach()))


def run_fit(judge=None, steps=80, rate=0.1, number=None):
    """Bring a number from 2 towards 0; gives it, the errors before and after, and how many steps there were."""
    number, ticks = number or Number(2.0), iter(range(1000))
    found = fit(
        [number],
        [0, 1],
        lambda case: number.tensor.square(),
        judge or (lambda: float(number.tensor.detach().square())),
        steps,
        rate=rate,
        generator=torch.Generator().manual_seed(0),
        ticks=ticks,
    )
    return number, found, next(ticks)


def test_a_fit_goes_on_while_it_gains():
    number, (before, after), steps = run_fit()
    assert (before, steps) == (4.0, 80)
    assert after == pytest.approx(float(number.tensor.detach()) ** 2)
    assert after < 0.1


def test_a_fit_stops_early_where_there_is_nothing_left_to_gain():
    _, (before, after), steps = run_fit(judge=lambda: 0.5)
    assert before == after == 0.5
    assert 40 < steps < 60


def test_a_fit_keeps_the_best_it_saw():
    errors, seen = iter([1.0, 0.8, 0.6, 0.2, 0.5, 0.55, 0.6, 0.65, 0.7]), []
    number = Number(2.0)

    def judge():
        seen.append(float(number.tensor.detach()))
        return next(errors)

    _, (before, after), _ = run_fit(judge, number=number)
    assert (before, after) == (1.0, 0.2)
    assert len(set(seen)) == len(seen)
    assert float(number.tensor.detach()) == seen[3]


def test_a_fit_that_got_worse_than_its_start_goes_back_and_takes_shorter_steps():
    number, (before, after), _ = run_fit(steps=16, rate=50.0)
    assert after <= before == 4.0
    assert number.written.count(2.0) >= 2
    assert float(number.tensor.detach()) ** 2 == pytest.approx(after)


def test_an_error_that_rounding_made_negative_is_none_at_all():
    number, found, _ = run_fit(judge=lambda: -1e-9)  # a divergence of what is equal
    assert found == (-1e-9, -1e-9)
    assert float(number.tensor.detach()) == 2.0


@pytest.mark.parametrize("error", [math.inf, math.nan])
def test_a_fit_that_went_out_of_bounds_ends_where_it_began(error):
    errors = iter([1.0] + [error] * 20)
    number, found, _ = run_fit(lambda: next(errors))
    assert found == (1.0, 1.0)
    assert float(number.tensor.detach()) == 2.0


def test_a_change_of_one_size_matters_alike_in_every_direction_of_the_inputs():
    _, site = swapped_layer()
    scales = torch.logspace(1, -4, 16)
    turned = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(1))).Q
    inputs = torch.randn(4096, 16, generator=torch.Generator().manual_seed(2)) * scales @ turned
    statistics = SiteStatistics(Moments.of(inputs), Moments.of(inputs))
    leaves = Leaves(site, statistics)
    start = leaves.parameters()
    for name, value in dict(site.module.named_parameters()).items():
        if name in start:
            assert torch.equal(start[name], value)  # no change is none at all
    felt = []
    for direction in range(16):
        with torch.no_grad():
            leaves.tensors["query"].zero_()[0, direction] = 1
        step = (leaves.parameters()["q_proj_weight"] - start["q_proj_weight"])[0]
        felt.append(float((inputs @ step.detach()).var()))
    known = sorted(felt)[-5:]  # the others vary a hundred times less: those are not moved by any amount
    assert max(known) < 1.1
    assert min(known) > 0.7
    assert min(felt) < 1e-3


def swapped_layer():
    """A converted layer 16 wide, and where it is."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)
    collaborate_(model, CollaborativeConfig(shared_dim=4))
    return model, find_attention(model)[0]


# --- batches that not every layer reads, or that cannot be split


def encoder(**options):
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


class EitherLayer(nn.Module):
    """Runs one of two layers, whichever the batch asks for."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(2))

    def forward(self, inputs, is_second=False):
        return self.second(inputs) if is_second else self.first(inputs)


@pytest.mark.parametrize("second", [(0,), (3,), (1, 3, 5)], ids=str)
@pytest.mark.parametrize("only_second", [False, True])
def test_layers_that_some_batches_do_not_reach_are_refined_on_the_others(second, only_second):
    torch.manual_seed(0)
    model = EitherLayer()
    batches = [(torch.randn(4, 8, 32), index in second) for index in range(7)]
    only = (lambda site: site.path.startswith("second")) if only_second else None
    settings = Refinement(steps=4, joint_steps=14)
    report = collaborate_(model, CollaborativeConfig(shared_dim=8), calibration=batches, refine=settings, only=only)
    assert report.refinement.after <= report.refinement.before
    assert not any("no input reached" in note for note in report.notes)


@pytest.mark.parametrize("config", [{"shared_dim": 8}, {"budget": 0.5}], ids=str)
@pytest.mark.parametrize("kind", ["tuple", "mapping", "tokens first"])
def test_masks_of_as_many_tokens_as_inputs_are_not_split(config, kind):
    torch.manual_seed(0)
    model, mask = encoder(), torch.zeros(20, 20)
    inputs = [torch.randn(20, 20, 32) for _ in range(3)]
    batches = [(one, mask) if kind == "tuple" else {"src": one, "mask": mask} for one in inputs]
    if kind == "tokens first":
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64), 2, enable_nested_tensor=False)
        batches = [{"src": one[:, :2], "mask": mask} for one in inputs]
    report = collaborate_(
        model, CollaborativeConfig(**config), calibration=batches, refine=Refinement(steps=2, joint_steps=2)
    )
    assert (report.refinement.batches, report.refinement.held_back) == (2, 1)


def test_batches_are_split_where_it_can_be_told_how():
    model, inputs = encoder(), torch.randn(20, 20, 32)
    for batch in (inputs, [inputs], (inputs,), {"src": inputs, "src_key_padding_mask": torch.zeros(20, 20).bool()}):
        assert len(split_batch(batch, 8, model)) == 3
    (first, *_) = split_batch([inputs[:, :7], torch.zeros(20, 7).bool()], 8, model)
    assert [len(part) for part in first] == [8, 8]


def test_hooks_can_be_removed_after_a_failure():
    def fail(steps, total):
        for step in steps:
            if total == 6:  # the steps of refinement
                raise KeyboardInterrupt
            yield step

    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    handle = layer.self_attn.register_forward_hook(lambda *given: None)
    config, inputs = CollaborativeConfig(shared_dim=8), [numbers(3, 5, 32, seed=seed) for seed in range(4)]
    with pytest.raises(KeyboardInterrupt):
        collaborate_(layer, config, calibration=inputs, refine=Refinement(steps=2, joint_steps=4), progress=fail)
    assert type(layer.self_attn) is nn.MultiheadAttention
    handle.remove()
    assert not layer.self_attn._forward_hooks


def test_inference_mode_around_a_conversion_changes_nothing():
    inputs, reports, layers = [numbers(3, 5, 32, seed=seed) for seed in range(4)], [], []
    for is_on in (False, True):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        with torch.inference_mode(is_on):
            reports.append(collaborate_(layer, POOR, calibration=inputs, refine=QUICK))
        layers.append(layer)
    assert reports[0].refinement.after == reports[1].refinement.after < reports[1].refinement.before
    assert not any(parameter.is_inference() for parameter in layers[1].parameters())


def test_outputs_that_are_no_numbers_are_refused_and_the_model_is_as_it_was():
    model = tiny_models.bert()
    model.encoder.layer[1].output.LayerNorm.weight.data[0] = math.inf
    batches = [{"input_ids": token_ids(seed=seed)} for seed in range(4)]
    with pytest.raises(ValueError, match="the output of BertModel must be finite to be fitted to, got NaN or infinity"):
        collaborate_(model, POOR, calibration=batches, refine=QUICK)
    assert not any(isinstance(module, Collaborative) for module in model.modules())
    assert collaborate_(model, POOR, calibration=batches, refine=False).refinement is None


def test_logits_of_a_timm_classifier_are_compared_without_their_mean():
    timm = pytest.importorskip("timm")

    def refined(shift):
        torch.manual_seed(0)
        sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 4, "num_classes": 5}
        model = timm.create_model("vit_tiny_patch16_224", **sizes).eval()
        with torch.no_grad():
            model.head.weight.normal_(generator=torch.Generator().manual_seed(1))
            model.head.bias.add_(shift)
        images = torch.randn(8, 4, 3, 16, 16, generator=torch.Generator().manual_seed(2))
        return collaborate_(model, POOR, calibration=list(images), refine=BRIEF).refinement

    assert refined(100.0).before == pytest.approx(refined(0.0).before, rel=1e-3)
