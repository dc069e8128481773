"""What a model's attention runs, and why: `explain` says it, `use_implementation` decides it."""

import contextlib
import json
import threading

import pytest
import torch
import transformers
from torch import nn
from typer.testing import CliRunner

import collab
import collab.analysis_commands  # its commands join those below
import tiny_models
from collab.commands import app
from collab.ops import choice

QUICK = collab.CollaborativeConfig(shared_dim=12, max_iterations=1)
ON_CPU = ["sdpa", "padded", "matmul", "reference"]


def converted(model, config=QUICK):
    collab.collaborate_(model, config)
    return model


def layer(**options):
    torch.manual_seed(0)
    return collab.CollaborativeAttention(32, 4, 12, **options)


def runs(explanation):
    return {row.implementation for row in explanation.rows}


def hooks_of(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


# --- explain


def test_a_layer_tells_what_it_was_given_and_why_it_runs_what_it_runs():
    x, mask = torch.randn(2, 9, 32), torch.ones(2, 9, dtype=torch.bool)
    (row,) = collab.explain(layer(), x, padding_mask=mask, causal=True).rows
    assert (row.path, row.calls, row.batch, row.queries, row.keys) == ("", 1, 2, 9, 9)
    assert (row.num_heads, row.shared_dim, row.dims_per_head, row.value_dim) == (4, 12, None, 8)
    assert (row.device, row.dtype, row.mask, row.causal) == ("cpu", "float32", "bool (2, 1, 1, 9)", True)
    assert (row.dropout, row.need_weights, row.gradients, row.content) == (0.0, False, True, True)
    assert row.why.startswith("least estimated cost on a CPU: ")
    assert row.implementation in ON_CPU
    assert set(row.against) == set(collab.ops.IMPLEMENTATIONS) - {row.implementation}
    assert not any(row.against[name] for name in row.against if name in ON_CPU)
    with torch.no_grad():
        (other,) = collab.explain(layer(bias=False, dims_per_head=3), x, need_weights=True).rows
    assert (other.gradients, other.content, other.dims_per_head, other.mask) == (False, False, 3, "none")
    assert "need_weights=True" in other.against["sdpa"][0]
    assert other.implementation in ("matmul", "reference")


def test_every_layer_of_a_model_has_its_row_and_layers_that_run_twice_count_so():
    model = converted(tiny_models.bert())
    rows = collab.explain(model, **tiny_models.inputs_for(model)).rows
    assert [row.path for row in rows] == [f"encoder.layer.{index}.attention.self" for index in range(2)]
    assert all(model.get_submodule(row.path).mixing.shape[0] == row.num_heads for row in rows)
    rows = collab.explain(converted(tiny_models.albert()), tiny_models.token_ids()).rows
    assert [row.calls for row in rows] == [2] * 4


def test_cross_attention_has_as_many_keys_as_the_encoder_has_tokens():
    model = converted(tiny_models.bart())
    inputs = tiny_models.inputs_for(model)
    rows = {row.path: row for row in collab.explain(model, **inputs).rows}
    assert len(rows) == 6
    for path, row in rows.items():
        kind = [part in path for part in ("encoder.layers", "self_attn", "encoder_attn")]
        keys = tiny_models.LENGTH if "decoder" not in path or kind[2] else tiny_models.LENGTH - 1
        queries = tiny_models.LENGTH if "decoder" not in path else tiny_models.LENGTH - 1
        assert (row.queries, row.keys) == (queries, keys)


def test_generation_is_explained_step_by_step():
    model = converted(tiny_models.gpt2())
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "pad_token_id": 1}
    rows = collab.explain(model.generate, tiny_models.token_ids(), **options).rows
    assert [(row.queries, row.keys) for row in rows if row.path == rows[0].path] == [(7, 7), (1, 8), (1, 9)]
    assert {row.path for row in rows} == {"transformer.h.0.attn", "transformer.h.1.attn"}


def test_functions_have_no_path_and_keep_nothing():
    def twice(x):
        return one(one(x))

    one = layer()
    (row,) = collab.explain(twice, torch.randn(1, 3, 32)).rows
    assert (row.path, row.calls) == ("", 2)


def test_compiled_code_is_explained_as_it_is_written():
    compiled = torch.compile(layer(), backend="eager")
    x = torch.randn(1, 5, 32)
    before = compiled(x)
    (row,) = collab.explain(compiled, x).rows
    assert row.path == "_orig_mod"
    assert torch.equal(compiled(x), before)
    with pytest.raises(ValueError, match="did not"):
        collab.explain(lambda: 1)


def test_it_prints_a_table_and_every_reason_once():
    model = converted(tiny_models.bert())
    explanation = collab.explain(model, **tiny_models.inputs_for(model))
    text = str(explanation)
    assert text.count("encoder.layer.0.attention.self") == 1
    assert text.count("not fused: ") == 1
    assert "comes first" in text
    values = json.loads(json.dumps(explanation.to_dict(), allow_nan=False))
    assert [row["path"] for row in values["rows"]] == [row.path for row in explanation.rows]
    assert values["rows"][0]["against"]["fused"] == list(explanation.rows[0].against["fused"])
    assert "3 of 12" in str(collab.explain(layer(dims_per_head=3), torch.randn(1, 3, 32), causal=True))
    assert "causal" in str(collab.explain(layer(), torch.randn(1, 3, 32), causal=True))


class Noisy(nn.Module):
    """Draws random numbers and counts, as models in training do."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention, self.fails = nn.BatchNorm1d(32), layer(dropout=0.5), False

    def forward(self, x):
        x = self.norm(x.transpose(1, 2)).transpose(1, 2) + torch.randn(32)
        output = self.attention(x)
        if self.fails:
            raise RuntimeError("as it was told")
        return output


@pytest.mark.parametrize("fails", [False, True])
def test_random_numbers_buffers_and_hooks_are_as_before(fails):
    model, x = Noisy().train(), torch.randn(4, 9, 32)
    model.fails = fails
    torch.manual_seed(3)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    hooks, numbers = hooks_of(model), torch.get_rng_state()
    with pytest.raises(RuntimeError, match="as it was told") if fails else contextlib.nullcontext():
        (row,) = collab.explain(model, x).rows
        assert (row.path, row.dropout) == ("attention", 0.5)
    assert hooks_of(model) == hooks
    assert torch.equal(torch.get_rng_state(), numbers)
    assert model.training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert choice.watcher.get() is None
    model.fails = False
    model(x)
    assert not torch.equal(model.norm.running_mean, state["norm.running_mean"])


def test_buffers_that_a_model_replaces_are_put_back_too():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = layer()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count = self.count + 1
            return self.attention(x)

    model = Counting()
    collab.explain(model, torch.randn(1, 3, 32))
    assert model.count == 0


def test_who_else_runs_the_model_is_not_told_of():
    model, x = converted(tiny_models.bert()), tiny_models.token_ids()

    class Beside(nn.Module):
        def forward(self, x):
            thread = threading.Thread(target=model, args=(x[:1],))
            thread.start()
            thread.join()
            return model(x)

    assert {row.batch for row in collab.explain(Beside(), x).rows} == {3}


def test_what_is_not_collaborative_is_refused():
    with pytest.raises(ValueError, match=r"must call collaborative attention, and BertModel did not: convert it"):
        collab.explain(tiny_models.bert(), tiny_models.token_ids())
    with pytest.raises(ValueError, match="target must be a model, a layer or a function, got a str"):
        collab.explain("bert")


# --- use_implementation


@pytest.mark.parametrize("name", ON_CPU)
def test_an_implementation_is_forced_on_layers_and_converted_models(name):
    model, x = converted(tiny_models.bert()), torch.randn(2, 5, 32)
    inputs = tiny_models.inputs_for(model)
    expected = model(**inputs).last_hidden_state
    with collab.use_implementation(name):
        assert runs(collab.explain(layer(), x)) == {name}
        explanation = collab.explain(model, **inputs)
        assert runs(explanation) == {name}
        assert explanation.rows[0].why == f"use_implementation('{name}') asks for it"
        torch.testing.assert_close(model(**inputs).last_hidden_state, expected, atol=1e-5, rtol=1e-5)
        assert runs(collab.explain(layer(implementation="reference"), x)) == {"reference"}  # its own word goes first


def test_what_is_forced_nests_and_ends_with_the_block_or_an_exception():
    one, x = layer(), torch.randn(2, 5, 32)
    usual = runs(collab.explain(one, x))
    with collab.use_implementation("reference"):
        with collab.use_implementation("padded"):
            assert runs(collab.explain(one, x)) == {"padded"}
            with collab.use_implementation("auto"):
                assert runs(collab.explain(one, x)) == usual
        assert runs(collab.explain(one, x)) == {"reference"}
        with pytest.raises(RuntimeError, match="stop"), collab.use_implementation("sdpa"):
            raise RuntimeError("stop")
        assert runs(collab.explain(one, x)) == {"reference"}
    assert runs(collab.explain(one, x)) == usual


def test_one_that_refuses_raises_with_its_reason_and_is_not_replaced():
    x = torch.randn(2, 5, 32)
    with collab.use_implementation("sdpa"), pytest.raises(ValueError, match=r"sdpa: it never holds .*need_weights"):
        layer()(x, need_weights=True)
    model = converted(tiny_models.bert("eager"))
    with collab.use_implementation("padded"), pytest.raises(ValueError, match="padded: it never holds"):
        model(tiny_models.token_ids(), output_attentions=True)
    unknown = pytest.raises(ValueError, match=r"must be 'auto' or one of \['fused', .*\], got 'flash'")
    with unknown, collab.use_implementation("flash"):
        pass
    assert choice._forced == "auto"


def test_compiled_code_follows_what_is_forced():
    one, x = layer(), torch.randn(2, 5, 32)
    ran = []
    compiled = torch.compile(one, backend=lambda graph, _: ran.append(str(graph.code)) or graph.forward, dynamic=False)
    with torch.no_grad():
        expected = compiled(x)
        for name in ("padded", "reference"):
            with collab.use_implementation(name):
                torch.testing.assert_close(compiled(x), expected, atol=1e-5, rtol=1e-5)
            assert ("scaled_dot_product" in ran[-1]) == (name == "padded")
        count = len(ran)
        compiled(x)
    assert len(ran) == count  # back at what was compiled first


def test_generation_follows_what_is_forced():
    model = converted(tiny_models.gpt2())
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 1}
    expected = model.generate(tiny_models.token_ids(), **options)
    for name in ON_CPU:
        with collab.use_implementation(name):
            assert runs(collab.explain(model.generate, tiny_models.token_ids(), **options)) == {name}
            assert torch.equal(model.generate(tiny_models.token_ids(), **options), expected)


# --- the command


def run(*arguments, code=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def saved(tmp_path):
    """A converted BERT with a tokenizer of words, and a file of two texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<s>", "<pad>", "</s>", "<unk>", "the", "cat", "sat"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>")
    collab.save(converted(tiny_models.bert()), tmp_path / "bert")
    fast.save_pretrained(tmp_path / "bert")
    (tmp_path / "texts.txt").write_text("the cat sat\nthe cat\n")
    return tmp_path / "bert", tmp_path / "texts.txt"


def test_the_command_explains_one_batch(saved):
    folder, texts = saved
    found = json.loads(run("explain", folder, "--text", texts, "--json").stdout)
    first = found["rows"][0]
    assert (found["model"], first["path"]) == (str(folder), "encoder.layer.0.attention.self")
    assert (first["batch"], first["queries"], first["gradients"]) == (2, 3, False)
    assert first["mask"].startswith("bool")
    assert "not fused" in run("explain", folder, "--text", texts).stdout
    forced = run("explain", folder, "--text", texts, "--implementation", "matmul", "--max-length", 2, "--json").stdout
    assert {(row["implementation"], row["queries"]) for row in json.loads(forced)["rows"]} == {("matmul", 2)}
    training = json.loads(run("explain", folder, "--text", texts, "--training", "--json").stdout)["rows"][0]
    assert training["gradients"]
    assert "Examples:\n    collab explain" in run("explain", "--help").stdout


def test_the_command_refuses_in_a_sentence(saved, tmp_path):
    folder, texts = saved
    assert "give either --text FILE or --images DIR" in run("explain", folder, code=2).stderr
    assert "must be 'auto' or one of" in run("explain", folder, "--text", texts, "--implementation", "x", code=2).stderr
    tiny_models.bert().save_pretrained(tmp_path / "plain")
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "plain")
    assert "BertModel did not: convert it" in run("explain", tmp_path / "plain", "--text", texts, code=2).stderr
