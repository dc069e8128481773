"""content and drop_key_bias_: the four terms of scores, by hand and as models compute them."""

import copy
import json

import pytest
import torch
from torch import nn

import collab
import tiny_models
from collab import key_bias
from collab.content import score_terms
from collab.key_bias import key_bias_of
from tiny_models import inputs_for, numbers, randomise_

torch.set_num_threads(1)


def attention_layer(**options):
    return randomise_(nn.MultiheadAttention(8, 2, batch_first=True, **options)).eval()


def terms_by_hand(layer, x, y):
    """The four terms (batch, head, query, key) of two heads of four, loop by loop."""
    query, key, _ = layer.in_proj_weight.double().chunk(3)
    query_bias, key_bias, _ = layer.in_proj_bias.double().chunk(3)
    terms = []
    for head in (slice(0, 4), slice(4, 8)):
        q, k, b, c = query[head], key[head], query_bias[head], key_bias[head]
        ones = torch.ones(len(x), x.shape[1], y.shape[1]).double()
        four = (x @ q.mT @ k @ y.mT, ones * (y @ k.mT @ b)[:, None], ones * (x @ q.mT @ c)[:, :, None], ones * (b @ c))
        terms.append(torch.stack(four))
    return (torch.stack(terms, dim=2) / 2).detach()  # (term, batch, head, query, key)


def distance(left, right):
    return (left - right).abs().sum(-1).mean((0, 2)) / 2


def test_the_terms_are_those_of_the_paper():
    layer = attention_layer()
    (site,) = collab.find_attention(layer)
    x, y = numbers(3, 5, 8).double(), numbers(3, 6, 8, seed=1).double()
    terms = score_terms(site.host, layer, x, y)
    for name, expected in zip(
        ("context", "content", "query_only", "constant"), terms_by_hand(layer, x, y), strict=True
    ):
        torch.testing.assert_close(getattr(terms, name).expand_as(expected), expected)


def test_measures_by_hand():
    layer = attention_layer()
    x, y = numbers(3, 5, 8), numbers(3, 6, 8, seed=1)
    (found,) = collab.content(layer, (x, y, y)).layers
    context, content, *_ = terms = terms_by_hand(layer, x.double(), y.double())
    whole = terms.sum(0).softmax(-1)
    expected = {
        "content_distance": distance(whole, content.softmax(-1)),
        "context_distance": distance(whole, context.softmax(-1)),
        "flat_distance": distance(whole, torch.full_like(whole, 1 / 6)),
        "content_kl": (whole * (whole.log() - content.log_softmax(-1))).sum(-1).mean((0, 2)),
    }
    centred = [term - term.mean(-1, keepdim=True) for term in (context, content, context + content)]
    variance = centred[2].square().sum((0, 2, 3))
    expected |= {
        "context_share": (centred[0] * centred[2]).sum((0, 2, 3)) / variance,
        "content_share": (centred[1] * centred[2]).sum((0, 2, 3)) / variance,
        "other_share": torch.zeros(2).double(),
    }
    for name, values in expected.items():
        assert [getattr(head, name) for head in found.heads] == pytest.approx(values.tolist(), abs=1e-5), name
    assert found.mean("content_kl") == pytest.approx(float(expected["content_kl"].mean()), abs=1e-5)
    # The four are all that the layer computed, and two of them change nothing.
    assert found.other < 1e-5
    assert found.vanishing < 1e-12


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["bert", "vit", "gpt2", "bart", "albert"])
def test_the_four_terms_are_what_models_compute(name, attention):
    model = getattr(tiny_models, name)(attention)
    state = copy.deepcopy(model.state_dict())
    report = collab.content(model, inputs_for(model))
    assert report.left == {}
    assert [layer.path for layer in report.layers] == [site.path for site in collab.find_attention(model)]
    for layer in report.layers:
        assert layer.other < 1e-4
        assert layer.vanishing < 1e-12
        for head in layer.heads:
            assert head.context_share + head.content_share + head.other_share == pytest.approx(1)
            assert 0 < head.context_distance < 1
            assert 0 < head.content_distance < 1
            assert head.content_kl > 2 * head.content_distance**2  # Pinsker
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


def test_position_biases_are_kept_and_told():
    for name in ("t5", "beit"):
        model = getattr(tiny_models, name)()
        first = collab.content(model, inputs_for(model)).layers[0]
        assert first.other > 0.1
        assert abs(first.mean("other_share")) > 1e-3
        assert sum(map(first.mean, ("context_share", "content_share", "other_share"))) == pytest.approx(1)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_padding_does_not_count(name, attention):
    model = getattr(tiny_models, name)(attention)
    ids = tiny_models.token_ids(5, 1)
    alone = collab.content(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    padded = {
        "input_ids": torch.cat((ids, torch.ones(1, 3, dtype=torch.long)), dim=1),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0]]),
    }
    for one, other in zip(alone.layers, collab.content(model, padded).layers, strict=True):
        for left, right in zip(one.heads, other.heads, strict=True):
            assert vars(left) == pytest.approx(vars(right), abs=1e-5)


def test_causal_masks_are_honoured():
    """A query that sees itself alone attends to it whatever the terms are."""
    model = tiny_models.gpt2()
    ids = tiny_models.token_ids(1, 2)
    for layer in collab.content(model, {"input_ids": ids}).layers:
        assert all(head.content_distance == head.flat_distance == 0 for head in layer.heads)
    layer = attention_layer()
    x = numbers(1, 4, 8)
    mask = torch.ones(4, 4, dtype=torch.bool).triu(1)

    class Causal(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = layer

        def forward(self, x):
            return self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]

    (found,) = collab.content(Causal(), x).layers
    context, content, *_ = terms_by_hand(layer, x.double(), x.double())
    whole, alone = ((part.masked_fill(mask, -torch.inf)).softmax(-1) for part in (context + content, content))
    assert [head.content_distance for head in found.heads] == pytest.approx(distance(whole, alone).tolist(), abs=1e-6)


def test_all_content_and_none():
    layer = attention_layer()
    layer.in_proj_weight.data[:8] = 0  # queries are their bias
    x = numbers(2, 5, 8)
    (found,) = collab.content(layer, (x, x, x)).layers
    for head in found.heads:
        assert head.content_distance == pytest.approx(0, abs=1e-6)
        assert head.content_share == pytest.approx(1, abs=1e-5)
        assert head.context_distance == pytest.approx(head.flat_distance, abs=1e-6)
    (found,) = collab.content(attention_layer(bias=False), (x, x, x)).layers
    for head in found.heads:
        assert head.content_distance == head.flat_distance
        assert head.content_share == 0
        assert head.context_distance == pytest.approx(0, abs=1e-12)


def test_report():
    model = tiny_models.bert()
    report = collab.content(model, inputs_for(model))
    values = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert values["layers"][1]["heads"][2]["content_kl"] == report.layers[1].heads[2].content_kl
    text = str(report)
    assert "encoder.layer.1.attention.self" in text
    nearest = min(range(4), key=lambda head: report.layers[0].heads[head].content_distance)
    assert f"head {nearest}, at" in text.splitlines()[2]


def test_what_cannot_be_split_is_told():
    model = tiny_models.bert()
    site = collab.find_attention(model)[0]
    collab.collaborate_(model, collab.CollaborativeConfig(shared_dim={site.path: 8}))
    report = collab.content(model, inputs_for(model))
    assert report.left == {site.path: ["already collaborative, with shared_dim 8"]}
    assert f"left out: {site.path} (already collaborative" in str(report)
    with pytest.raises(ValueError, match="no attention to look at in Linear"):
        collab.content(nn.Linear(2, 2), numbers(1, 2))
    twice = nn.ModuleDict({"used": nn.Linear(8, 8), "unused": nn.MultiheadAttention(8, 2)})
    twice.forward = lambda x: twice["used"](x)
    with pytest.raises(ValueError, match="no scores of ModuleDict could be seen on this batch: unused: it did not run"):
        collab.content(twice, numbers(1, 2, 8))


# --- the key's bias


BIASED = ["BertModel", "GPT2Model", "BloomModel", "BartModel", "ViTModel"]


@pytest.mark.parametrize("name", BIASED)
def test_dropping_the_key_bias_changes_nothing_else(name):
    model = tiny_models.tiny(name)
    batch = inputs_for(model)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    report = collab.drop_key_bias_(model, batch)
    assert report.difference < 1e-5
    assert report.left == {}
    assert all(norm > 0.1 for norm in report.zeroed.values())
    sites = collab.find_attention(model)
    assert list(report.zeroed) == [site.path for site in sites]
    assert report.parameters == sum(site.full_dim for site in sites)
    assert all(not key_bias_of(site.host, site.module).any() for site in sites)
    after = model.state_dict()
    assert list(after) == list(state)
    assert sum(int((after[key] != state[key]).sum()) for key in state) == report.parameters
    again = collab.drop_key_bias_(model)
    assert set(again.zeroed.values()) == {0.0}
    assert again.difference is None
    assert "have no effect and are zero" in str(report)
    json.dumps(report.to_dict())


def test_of_torch_layers():
    model = randomise_(nn.TransformerEncoderLayer(16, 4, 20, batch_first=True)).eval()
    bias = model.self_attn.in_proj_bias.detach().clone()
    report = collab.drop_key_bias_(model, numbers(2, 5, 16))
    assert report.difference < 1e-5
    expected = bias.clone()
    expected[16:32] = 0
    assert torch.equal(model.self_attn.in_proj_bias.detach(), expected)


def test_layers_whose_key_bias_counts_or_is_not_there_keep_it():
    with pytest.raises(ValueError, match=r"no key bias to drop in Qwen2Model: layers.0.self_attn: rotary"):
        collab.drop_key_bias_(tiny_models.tiny("Qwen2Model"))
    with pytest.raises(ValueError, match="it has no key bias"):
        collab.drop_key_bias_(tiny_models.t5())
    model = tiny_models.bert()
    before = model.encoder.layer[0].attention.self.key.bias.detach().clone()
    report = collab.drop_key_bias_(model, only=lambda site: ".1." in site.path)
    assert list(report.zeroed) == ["encoder.layer.1.attention.self"]
    assert torch.equal(model.encoder.layer[0].attention.self.key.bias, before)


def test_all_or_nothing(monkeypatch):
    model = tiny_models.bert()
    batch = inputs_for(model)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    outputs = iter((torch.ones(2, 3), torch.ones(2, 3) + 1e-2))
    monkeypatch.setattr(key_bias, "_output", lambda model, batch: next(outputs))
    with pytest.raises(ValueError, match=r"must change by rounding alone, at most 0.00035, got 0.01; they are as they"):
        collab.drop_key_bias_(model, batch)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    monkeypatch.undo()
    runs = []
    model.register_forward_pre_hook(lambda module, args: runs.append(1) if not runs else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        collab.drop_key_bias_(model, batch)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_a_real_change_is_none_of_rounding_in_half_types_either():
    model = tiny_models.bert().to(torch.bfloat16)
    layer = model.encoder.layer[1]
    bias = model.encoder.layer[0].attention.self.key.bias
    torch.nn.init.normal_(bias)
    saved = bias.clone()
    layer.register_forward_hook(lambda module, args, output: output * (1 + 0.05 * bias.abs().max()))
    with pytest.raises(ValueError, match="must change by rounding alone"):
        collab.drop_key_bias_(model, {"input_ids": tiny_models.token_ids(7, 3)})
    assert torch.equal(bias, saved)
    assert "not tried on inputs" in str(collab.drop_key_bias_(model))
