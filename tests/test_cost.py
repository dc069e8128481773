"""cost: the formulas against parameters of real layers, operations that torch counts, and caches."""

import json

import pytest
import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

import collab
import collab.analysis_commands  # its commands join those below
import tiny_models
from collab.commands import app
from collab.ops import reference, sdpa
from tiny_models import numbers

torch.set_num_threads(1)

BERT = {"num_heads": 12, "head_dim": 64, "query_width": 768}
"""The layer of the paper's tables."""


def count(*modules_or_parameters):
    return sum(
        one.numel() if isinstance(one, torch.Tensor) else sum(part.numel() for part in one.parameters())
        for one in modules_or_parameters
    )


# --- one layer


@pytest.mark.parametrize("shared_dim", [64, 128, 256, 384])
@pytest.mark.parametrize("tokens", [1, 128, 1000])
def test_the_papers_formulas(shared_dim, tokens):
    width, heads, full = 768, 12, 768
    ordinary = collab.layer_cost(**BERT, tokens=tokens, query_bias=False, key_bias=False)
    assert ordinary.parameters == 2 * width * full
    assert ordinary.flops == 2 * tokens * width * full + tokens**2 * heads * 64
    shared = collab.layer_cost(**BERT, tokens=tokens, shared_dim=shared_dim, content=False)
    assert shared.parameters == (2 * width + heads) * shared_dim
    assert shared.flops == tokens * (2 * width + heads) * shared_dim + tokens**2 * heads * shared_dim
    ours = collab.layer_cost(**BERT, tokens=tokens, shared_dim=shared_dim)
    assert ours.parameters - shared.parameters == ours.content == heads * width
    assert ours.flops - shared.flops == ours.content_flops == tokens * heads * width + tokens**2 * heads


@pytest.mark.parametrize("dims_per_head", [None, 7])
@pytest.mark.parametrize("bias", [True, False])
def test_parameters_and_operations_of_a_layer(dims_per_head, bias, monkeypatch):
    layer = collab.CollaborativeAttention(
        32, 4, 24, dims_per_head=dims_per_head, head_dim=8, key_width=20, bias=bias, implementation="reference"
    )
    options = {"num_heads": 4, "head_dim": 8, "query_width": 32, "key_width": 20, "content": bias}
    cost = collab.layer_cost(
        **options, shared_dim=24, dims_per_head=dims_per_head, tokens=5, key_tokens=9, number_bytes=4
    )
    assert cost.parameters == count(layer.query, layer.key, layer.mixing)
    x, y = numbers(1, 5, 32), numbers(1, 9, 20)
    with FlopCounterMode(display=False) as counter:
        query, key = layer.query(x), layer.key(y)
    made = cost.projection_flops + (9 * 4 * 20 if bias else 0)
    assert counter.get_total_flops() == 2 * made
    value = numbers(1, 4, 9, 8)
    if dims_per_head is None:
        with FlopCounterMode(display=False) as counter:
            reference.attention(query, key, value, layer.mixing, scale=1.0)
        assert counter.get_total_flops() == 2 * (cost.score_flops + 5 * 9 * 4 * 8)  # the values, too
    elif bias:
        # Seven dimensions and the content score: eight, as wide as the values are. Nothing is padded then.
        monkeypatch.setattr(sdpa, "MULTIPLE", 8)
        with FlopCounterMode(display=False) as counter:
            sdpa.attention(query, key, value, layer.mixing, scale=1.0, dims=layer.dims)
        assert counter.get_total_flops() == 2 * (cost.score_flops + 5 * 9 * 4 + 5 * 9 * 4 * 8)
    mixed = query[:, None] * layer.mixing[:, None] if dims_per_head is None else layer.mixing.expand(5, -1, -1)
    assert cost.mixing_flops == mixed.numel()
    assert cost.cache_bytes == key[0, 0].numel() * 4


def test_operations_of_ordinary_heads():
    layer = nn.MultiheadAttention(32, 4, batch_first=True)
    x = numbers(1, 6, 32)
    with FlopCounterMode(display=False) as counter:
        layer(x, x, x)
    cost = collab.layer_cost(num_heads=4, head_dim=8, query_width=32, tokens=6)
    rest = 2 * 6 * 32 * 32 + 6 * 6 * 32  # values, output and the mean of the values
    assert counter.get_total_flops() == 2 * (cost.flops + rest)
    assert cost.parameters == 2 * (32 * 32 + 32)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_heads": 0}, "num_heads must be a positive integer, got 0"),
        ({"tokens": 1.5}, "tokens must be a positive integer, got 1.5"),
        ({"shared_dim": -1}, "shared_dim must be a positive integer, got -1"),
        ({"dims_per_head": 8}, "dims_per_head must be at most shared_dim, got 8 and None"),
        ({"shared_dim": 4, "dims_per_head": 8}, "dims_per_head must be at most shared_dim, got 8 and 4"),
    ],
)
def test_sizes_that_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        collab.layer_cost(**(BERT | given))


# --- a model


def scoring_parameters(model):
    """Parameters of queries, keys and mixing of BERT's layers."""
    modules = [layer.attention.self for layer in model.encoder.layer]
    mixings = [module.mixing for module in modules if hasattr(module, "mixing")]
    return count(*(part for module in modules for part in (module.query, module.key)), *mixings)


@pytest.mark.parametrize(("shared_dim", "dims_per_head"), [(12, None), (0.5, 4), (32, None)])
def test_the_parameters_are_those_of_a_conversion(shared_dim, dims_per_head):
    model = tiny_models.bert()
    (row,) = collab.cost(model, shared_dim, tokens=[10], dims_per_head=dims_per_head).rows
    assert row.before.parameters == scoring_parameters(model)
    config = collab.CollaborativeConfig(shared_dim=shared_dim, dims_per_head=dims_per_head, max_iterations=1)
    collab.collaborate_(model, config)
    assert row.after.parameters == scoring_parameters(model)
    (own,) = collab.cost(model, tokens=[10]).rows  # as it is converted
    assert own.after == row.after
    assert own.before.weights == row.before.weights
    assert own.shared_dim is None
    assert "as converted" in str(collab.cost(model))


def test_the_cache_is_that_of_a_decoder():
    model = tiny_models.gpt2()
    (row,) = collab.cost(model, 12, tokens=[10]).rows
    for expected in (row.before, row.after):
        cache = transformers.DynamicCache(config=model.config)
        model(tiny_models.token_ids(6, 1), past_key_values=cache)
        held = sum(layer.keys[:, :, 0].numel() * layer.keys.element_size() for layer in cache.layers)
        assert held == expected.cache_bytes
        if expected is row.before:
            collab.collaborate_(model, collab.CollaborativeConfig(shared_dim=12, max_iterations=1))
    (half,) = collab.cost(tiny_models.gpt2().bfloat16(), 12, tokens=[10]).rows
    assert half.before.cache_bytes * 2 == row.before.cache_bytes


def test_layers_that_run_several_times():
    (row,) = collab.cost(tiny_models.albert(), 12, tokens=[10]).rows
    one = collab.layer_cost(num_heads=4, head_dim=8, query_width=32, shared_dim=12, tokens=10)
    assert row.after.parameters == 4 * one.parameters
    assert row.after.flops == 4 * 2 * one.flops  # four layers, each run twice


@pytest.mark.parametrize(("shared_dim", "dims_per_head"), [(16, None), (12, None), (9, None), (24, 9), (16, 10)])
def test_break_even(shared_dim, dims_per_head):
    model = tiny_models.bert()
    found = collab.cost(model, shared_dim, tokens=[7], dims_per_head=dims_per_head).rows[0].break_even
    assert found.cheaper == "below"
    around = [max(1, int(found.tokens)), int(found.tokens) + 1]
    below, above = collab.cost(model, shared_dim, tokens=around, dims_per_head=dims_per_head).rows
    assert below.after.flops <= below.before.flops
    assert above.after.flops > above.before.flops
    assert f"cheaper below {found.tokens:,.0f} tokens" in str(
        collab.cost(model, shared_dim, dims_per_head=dims_per_head)
    )


def test_always_and_never_and_above():
    model = tiny_models.bert()
    assert str(collab.cost(model, 6).rows[0].break_even) == "always cheaper"
    assert str(collab.cost(model, 32).rows[0].break_even) == "never cheaper"
    found = collab.cost(model, 32, dims_per_head=4, tokens=[10, 10000]).rows
    assert found[0].break_even.cheaper == "above"
    assert [row.after.flops < row.before.flops for row in found] == [False, True]


def test_sizes_and_lengths():
    model = tiny_models.bart()
    report = collab.cost(model, [16, 0.25], tokens=(5, 50, 500))
    assert [(row.shared_dim, row.tokens) for row in report.rows] == [
        (size, tokens) for size in (16, 0.25) for tokens in (5, 50, 500)
    ]
    site = collab.find_attention(model)[0].path
    (row,) = collab.cost(model, {site: 8}, tokens=[10]).rows
    one = collab.cost(model, 8, tokens=[10], only=lambda found: found.path == site).rows[0]
    assert row.before.parameters - row.after.parameters == one.before.parameters - one.after.parameters
    values = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    first = values["rows"][0]
    assert first["ratio"]["parameters"] == pytest.approx(first["after"]["parameters"] / first["before"]["parameters"])
    assert first["before"]["flops"] == report.rows[0].before.flops
    assert "6 layers" in str(report)


def test_what_is_refused_or_left_out():
    model = tiny_models.bert()
    with pytest.raises(ValueError, match="no converted attention in BertModel: say which shared_dim it would have"):
        collab.cost(model)
    with pytest.raises(ValueError, match="shared_dim must be at most heads x head size"):
        collab.cost(model, 33)
    with pytest.raises(ValueError, match="dims_per_head must be between 1 and 8"):
        collab.cost(model, 8, dims_per_head=9)
    with pytest.raises(ValueError, match="tokens must be at least one length, got none"):
        collab.cost(model, 8, tokens=[])
    with pytest.raises(ValueError, match="tokens must be a positive integer, got 0"):
        collab.cost(model, 8, tokens=[0])
    with pytest.raises(ValueError, match="no attention to count in LlamaModel"):
        collab.cost(tiny_models.tiny("LlamaModel"), 8)
    path = collab.find_attention(model)[0].path
    collab.collaborate_(model, collab.CollaborativeConfig(shared_dim={path: 8}, max_iterations=1))
    report = collab.cost(model)
    assert report.layers == [path]
    assert list(report.left.values()) == [["not converted"]]
    assert "not counted: encoder.layer.1" in str(report)
    with pytest.raises(ValueError, match="dims_per_head must come with a shared_dim"):
        collab.cost(model, dims_per_head=4)


# --- the command


def run(*arguments, code=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


def test_the_command(tmp_path):
    tiny_models.bert().save_pretrained(tmp_path)
    found = json.loads(run("cost", tmp_path, "--shared-dim", "16,0.25", "--tokens", "5,50", "--json").stdout)
    expected = collab.cost(tiny_models.bert(), [16, 0.25], tokens=[5, 50]).to_dict()
    assert found == {"model": str(tmp_path), **json.loads(json.dumps(expected))}
    text = run("cost", tmp_path, "--shared-dim", "16", "--dims-per-head", "8").stdout
    assert "break-even of shared_dim 16" in text
    assert "8 of the shared dimensions a head" in text
    mapped = run("cost", tmp_path, "--shared-dim", "encoder.layer.0.attention.self=8", "--tokens", 7).stdout
    assert "encoder.layer.0.attention.self=8" in mapped
    assert "Examples:\n    collab cost" in run("cost", "--help").stdout
    assert "--tokens must be integers" in run("cost", tmp_path, "--shared-dim", 8, "--tokens", "x", code=2).stderr
    assert "--shared-dim must be" in run("cost", tmp_path, "--shared-dim", "8,half", code=2).stderr
    assert "say which shared_dim" in run("cost", tmp_path, code=2).stderr


def test_no_size_and_a_bare_length_are_refused_by_name():
    model = torch.nn.TransformerEncoderLayer(16, 2)
    with pytest.raises(ValueError, match="shared_dim must be at least one size, got none"):
        collab.cost(model, [])
    with pytest.raises(ValueError, match="tokens must be a list of lengths, got 5"):
        collab.cost(model, 8, tokens=5)
