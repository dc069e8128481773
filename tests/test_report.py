import json
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import collab
import collab.report_commands  # its command joins those below
import tiny_models
from browser import NAMES, Browser, find_chromium
from collab import sources
from collab.commands import app
from collab.reporting import attention, cells, figures, page, pictures
from collab.reporting.latency import latencies
from collab.reporting.record import conversion_record, read_record
from test_cli import TEXTS, save_tokenizer

LINES = [line for line in TEXTS.splitlines() if line]


def convert(model, folder, shared_dim=8, record=True, **settings):
    """Save a model, converted; say what was done as `collab convert` does, if asked to."""
    config = collab.CollaborativeConfig(shared_dim=shared_dim, **settings)
    done = collab.collaborate_(model, config)
    said = conversion_record("nobody/nothing", folder, config, done)
    extra = {"collab-report.json": json.dumps(said)} if record else {}
    collab.save(model, folder, extra=extra)
    if not sources.reads_images(model):
        save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """Where a converted BERT is."""
    return convert(tiny_models.bert(), tmp_path_factory.mktemp("report") / "bert-8")


@pytest.fixture(scope="module")
def made(bert):
    """A whole report."""
    return collab.report(bert, original=tiny_models.bert(), inputs=LINES, example=LINES[0])


@pytest.fixture
def undrawn(monkeypatch):
    """Reports without figures, which take most of the time."""
    monkeypatch.setattr("collab.reporting.draw_all", lambda facts: {})


class Elements(HTMLParser):
    """Tags with their attributes, and the text of those that say which fact they show."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.shown, self._open = [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if "data-at" in attributes:
            self._open = (tag, [attributes["data-at"], attributes.get("title"), ""])

    def handle_data(self, data):
        if self._open:
            self._open[1][2] += data

    def handle_endtag(self, tag):
        if self._open and tag == self._open[0]:
            self.shown.append(tuple(self._open[1]))
            self._open = None


def at(facts, place):
    """The value at a place; told by its own few lines, not by those that wrote the page."""
    for step in place.split("/"):
        facts = facts[int(step)] if isinstance(facts, list) else facts[step]
    return facts


def check_shown(value, text):
    """Whether a text says the value, as exactly as its digits go."""
    if value is None:
        assert text == "\N{EN DASH}"
    elif isinstance(value, bool | str | dict) or (isinstance(value, list) and not value):
        assert text in (value, json.dumps(value))
    elif isinstance(value, list) and isinstance(value[0], int):
        assert text == " to ".join(f"{one:,}" for one in dict.fromkeys((value[0], value[-1])))
    else:
        digits = re.fullmatch(r"([+\N{MINUS SIGN}±-]?[\d,]*(?:\.\d+)?(?:e[+-]\d+)?)(%| ms| B)?", text)
        assert digits, text
        number = digits[1].replace(",", "").replace("\N{MINUS SIGN}", "-").replace("±", "")
        unit = 10 ** -len(number.partition("e")[0].partition(".")[2]) * float(f"1e{number.partition('e')[2] or 0}")
        expected = value
        if digits[2] == "%":
            expected = 100 * (value - (text[0] in "+±\N{MINUS SIGN}"))
        assert abs(float(number) - expected) <= unit / 2 * 1.001


# --- what is on the page


def test_every_number_on_the_page_is_that_of_the_file(made):
    facts = json.loads(made.data.read_text())
    assert facts == made.facts
    shown = Elements(made.page.read_text()).shown
    assert len(shown) > 100
    for place, whole, text in shown:
        value = at(facts, place)
        check_shown(value, text)
        if whole is not None:
            assert json.loads(whole) == value
    of_layers = {place.split("/")[2] for place, _, _ in shown if place.startswith("layers/0/")}
    assert {"shared_dim", "error", "unshared_error", "path", "effective_dims"} <= of_layers


def test_every_part_is_there_and_every_table_cell_says_what_it_shows(made):
    assert made.left_out == {}
    elements = Elements(made.page.read_text())
    sections = [attributes["id"] for tag, attributes in elements.tags if tag == "section"]
    parts = ["conversion", "fidelity", "layers", "spectra", "mixing", "attention", "parameters", "speed", "provenance"]
    assert sections == parts
    cells_shown = [attributes for tag, attributes in elements.tags if tag == "td" and "soft" not in attributes["class"]]
    assert cells_shown
    assert all("data-at" in attributes for attributes in cells_shown)
    names = [path.name for path in made.figures]
    assert sorted(names) == sorted(f"{name}.{ending}" for name in figures.NAMES for ending in ("svg", "png"))
    assert all(path.stat().st_size > 1000 for path in made.figures)


def test_the_page_fetches_nothing(made):
    text = made.page.read_text()
    elements = Elements(text)
    assert not {"script", "iframe", "object", "embed"} & {tag for tag, _ in elements.tags}
    linked = [
        value
        for _, attributes in elements.tags
        for name, value in attributes.items()
        if name in ("src", "href", "xlink:href", "srcset", "data", "poster")
    ]
    assert {value for value in linked if not value.startswith(("data:", "#"))} == {"report.json"}
    assert all(address.startswith(("data:", "#")) for address in re.findall(r"url\([\"']?([^)\"']*)", text))
    assert "@import" not in text
    ids = [attributes["id"] for _, attributes in elements.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_facts_are_those_of_the_models(made):
    facts, original = made.facts, tiny_models.bert()
    converted = collab.load(made.page.parents[1])
    batches = list(sources.text_batches(original, str(made.page.parents[1]), LINES))
    fidelity = collab.compare(original, converted, batches).to_dict()
    assert {name: facts["fidelity"][name] for name in fidelity} == fidelity
    whole = [sum(parameter.numel() for parameter in model.parameters()) for model in (original, converted)]
    assert [facts["parameters"][0][when] for when in ("before", "after")] == whole
    assert [row["shared_dim"] for row in facts["layers"]] == [8, 8]
    used = collab.analyze(converted).layers[1].effective_dims
    assert facts["layers"][1]["effective_dims"]["mean"] == pytest.approx(sum(used) / len(used))
    before = collab.analyze(original).layers[0].product
    assert facts["spectra"]["layers"][0]["before"]["product"] == before.concatenated_size(0.9)
    mean = sum(layer.product.concatenated[4] for layer in collab.analyze(original).layers) / 2
    curve = facts["spectra"]["curves"]["before"]["product"]["all"]
    assert dict(zip(curve["components"], curve["energy"], strict=True))[5] == pytest.approx(mean, abs=1e-5)
    assert facts["speed"]["rows"][0]["inputs"] == 1
    assert facts["speed"]["rows"][1]["inputs"] == len(LINES)
    assert facts["mean_error"] == pytest.approx(sum(row["error"] for row in facts["layers"]) / 2)
    commits = {row["item"]: row for row in facts["provenance"]}
    assert commits["collab"]["conversion"] == commits["collab"]["report"] == collab.__version__


def test_speed_is_the_median_of_each_model(bert, tmp_path, monkeypatch, undrawn):
    models = []
    monkeypatch.setattr(
        "collab.reporting.facts.latencies",
        lambda both, batch: models.append(both) or [[1.0, 2.0, 3.0], [4.0, 5.0, 9.0]],
    )
    original = tiny_models.bert().train()
    facts = collab.report(bert, original=original, inputs=LINES, output=tmp_path).facts
    assert models[0][0] is original
    assert original.training
    row = facts["speed"]["rows"][1]
    assert (row["before"], row["after"], row["ratio"]) == (2.0, 5.0, 2.5)
    assert (row["before_quartiles"], row["after_quartiles"]) == ([1.0, 3.0], [4.0, 9.0])
    assert [one["at"] for one in facts["headline"]][-1] == "speed/rows/1/ratio"


def test_of_a_long_text_the_beginning_is_drawn(bert, tmp_path, monkeypatch, undrawn):
    monkeypatch.setattr("collab.reporting.inputs.MAP_TOKENS", 3)
    made = collab.report(bert, inputs=LINES, example="the cat sat on", output=tmp_path)
    assert made.facts["attention"]["layers"][0]["keys"] == ["the", "cat", "sat"]
    assert "Of this text the first 3 tokens." in made.page.read_text()
    made = collab.report(bert, inputs=LINES, example="the cat sat", output=tmp_path)
    assert not made.facts["attention"]["is_cut"]


def test_mixing_is_that_of_the_layer_by_its_strength(made):
    module = collab.find_attention(collab.load(made.page.parents[1]))[0].module
    shared = module.host.shared_weights(module)
    found = made.facts["mixing"]["layers"][0]
    strength = (shared.mixing * shared.query.norm(dim=1) * shared.key.norm(dim=1)).detach()
    strength = strength / strength.abs().amax(1, keepdim=True)
    torch.testing.assert_close(torch.tensor(found["weights"]), strength[:, found["order"]], atol=6e-4, rtol=0)
    owners = strength.abs().argmax(0)[found["order"]].tolist()
    assert owners == sorted(owners)


def test_what_is_given_is_escaped(bert, made, tmp_path):
    folder = tmp_path / "<i>&amp;"
    folder.mkdir()
    for file in bert.iterdir():
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    record = json.loads((folder / "collab-report.json").read_text())
    record["model"] = "<script>alert('model')</script>"
    record["report"]["notes"] = ["<b>note</b>"]
    record["report"]["left"] = {"<b>path</b>": ["<b>reason</b>"]}
    record["settings"] = {"<b>setting</b>": "<b>value</b>"}
    record["provenance"]["versions"]["torch"] = "<b>version</b>"
    (folder / "collab-report.json").write_text(json.dumps(record))
    text = 'the <img src=x onerror="alert(1)"> cat\' & "mat"'
    html = collab.report(folder, original=tiny_models.bert(), example=text, inputs=LINES).page.read_text()
    tags = Elements(html).tags
    # Not even "<unk>", which is a token of this text.
    assert {tag for tag, _ in tags} <= {tag for tag, _ in Elements(made.page.read_text()).tags} | {"ul", "li"}
    assert not [attributes for _, attributes in tags if "onerror" in attributes or attributes.get("src") == "x"]
    shown = {place: words for place, _, words in Elements(html).shown}
    assert shown["conversion/model"] == record["model"]
    assert shown["attention/source"] == text
    assert "&lt;b&gt;note&lt;/b&gt;" in html
    assert "&lt;b&gt;reason&lt;/b&gt;" in html
    assert "<title>&lt;i&gt;&amp;amp;: conversion report</title>" in html


# --- what is left out


def test_without_the_original(bert, tmp_path):
    made = collab.report(bert, output=tmp_path / "out", inputs=LINES)
    assert set(made.left_out) == {"the original model", "fidelity", "speed"}
    assert "nobody/nothing cannot be opened here: no directory is named" in made.left_out["the original model"]
    assert "it takes the original model, and nobody/nothing cannot" in made.left_out["fidelity"]
    assert made.facts["spectra"]["curves"]["before"] is None
    assert made.facts["attention"]["layers"][0]["original"] is None
    assert made.facts["parameters"][0]["before"] == collab.swap.count_parameters(tiny_models.bert())
    html = made.page.read_text()
    assert "Left out" in html
    assert "the hub did not give it" in html
    for place, _, text in Elements(html).shown:
        check_shown(at(made.facts, place), text)
    assert "left out: fidelity (it takes" in str(made)


def test_without_a_record(tmp_path):
    folder = convert(tiny_models.bert(), tmp_path / "bert", record=False)
    made = collab.report(folder, inputs=LINES)
    assert "there is no collab-report.json" in made.left_out["errors"]
    assert "it is not known which one it was" in made.left_out["the original model"]
    assert "errors.svg" not in [path.name for path in made.figures]
    assert made.facts["conversion"]["settings"]["shared_dim"] == 8
    (folder / "collab-report.json").write_text('{"report": {"sites": [{}]}}')
    assert "not what collab convert writes: KeyError" in collab.report(folder, inputs=LINES).left_out["errors"]
    (folder / "collab-report.json").write_text("[")
    assert "not what collab convert writes: JSONDecodeError" in collab.report(folder, inputs=LINES).left_out["errors"]


def test_sentences_a_tokenizer_does_not_know_are_not_judged_by(bert, tmp_path, undrawn):
    made = collab.report(bert, original=tiny_models.bert(), output=tmp_path)
    assert set(made.left_out) == {"fidelity", "speed", "attention"}
    assert "are unknown to this model; give texts that are for it" in made.left_out["fidelity"]


def test_without_matplotlib(bert, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    made = collab.report(bert, original=tiny_models.bert(), inputs=LINES, output=tmp_path)
    assert made.left_out == {"figures": "figures need matplotlib: pip install matplotlib"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.json"]


def test_a_part_that_fails_does_not_take_the_others_with_it(bert, tmp_path, monkeypatch, undrawn):
    def fail(*arguments):
        raise RuntimeError("the bits fell out")

    monkeypatch.setattr("collab.reporting.facts.compare", fail)
    made = collab.report(bert, original=tiny_models.bert(), inputs=LINES, output=tmp_path)
    assert made.left_out == {"fidelity": "RuntimeError: the bits fell out"}


# --- what is refused


def test_directories_that_hold_no_conversion(tmp_path):
    tiny_models.bert().save_pretrained(tmp_path / "plain")
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(collab.CheckpointError, match="has no entry 'collaborative'"):
        collab.report(tmp_path / "plain")
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        collab.report(tmp_path / "empty")
    with pytest.raises(FileNotFoundError, match="must be a directory"):
        collab.report(tmp_path / "gone")
    assert sorted(tmp_path.rglob("*")) == before


def test_an_original_that_is_none(bert, tmp_path):
    with pytest.raises(ValueError, match="has no attention there"):
        collab.report(bert, original=tiny_models.gpt2())
    with pytest.raises(ValueError, match=r"must have 4 heads of 8 and width 32 at .*, got 2 of 16 and 32 in BertModel"):
        collab.report(bert, original=tiny_models.bert(num_attention_heads=2))
    with pytest.raises(ValueError, match="is converted itself"):
        collab.report(bert, original=str(bert))
    with pytest.raises(ValueError, match="must be on cpu, where the report is made, got one on meta"):
        collab.report(bert, original=tiny_models.bert().to("meta"))
    with pytest.raises(ValueError, match=r"there is no directory \./gone"):
        collab.report(bert, original="./gone")


def test_inputs_that_do_not_fit(bert, tmp_path):
    image = tmp_path / "noise.png"
    Image.effect_noise((20, 20), 40).save(image)
    with pytest.raises(ValueError, match="reads text, not images"):
        collab.report(bert, example=image)
    with pytest.raises(ValueError, match="at least one text"):
        collab.report(bert, inputs=[])
    with pytest.raises(NotADirectoryError, match="must be a directory to hold the report"):
        collab.report(bert, output=image)


# --- files


def test_a_failure_leaves_what_there_was(bert, tmp_path, monkeypatch, undrawn):
    target = tmp_path / "out"
    collab.report(bert, original=tiny_models.bert(), inputs=LINES, output=target)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    assert set(before) == {"report.html", "report.json"}
    written, write = [], Path.write_bytes

    def fail(self, content):
        written.append(self.name)
        if len(written) == 2:
            raise OSError("disk full")
        return write(self, content)

    monkeypatch.setattr(Path, "write_bytes", fail)
    for folder in (target, tmp_path / "new"):
        written.clear()
        with pytest.raises(OSError, match="disk full"):
            collab.report(bert, original=tiny_models.bert(), inputs=LINES, example=LINES[1], output=folder)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    assert list((tmp_path / "new").iterdir()) == []


def test_figures_that_are_none_any_more_go_and_other_files_stay(bert, tmp_path):
    collab.report(bert, original=tiny_models.bert(), inputs=LINES, output=tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    made = collab.report(bert, output=tmp_path)
    assert "attention" in made.left_out
    assert not (tmp_path / "attention.svg").exists()
    assert (tmp_path / "notes.txt").read_text() == "mine"
    named = {path.name for path in (made.page, made.data, *made.figures)}
    assert {path.name for path in tmp_path.iterdir()} == named | {"notes.txt"}


def test_json_is_whole_and_keeps_lists_of_numbers_on_a_line(made):
    text = made.data.read_text()
    assert json.loads(text) == made.facts
    assert max(map(len, text.splitlines())) < 10_000
    values = {"a": [], "b": {}, "c": [[1, 2], [3.5]], "d": [{"e": None}], "f": "\N{EN DASH}"}
    assert json.loads(page.to_json(values)) == values
    assert "[1, 2]" in page.to_json(values)
    with pytest.raises(ValueError, match="not JSON compliant"):
        page.to_json({"a": float("nan")})


def test_pictures_are_png(tmp_path):
    values = torch.tensor([[0.0, 1.0, -0.5], [-1.0, 0.25, 2.0]])
    (tmp_path / "heat.png").write_bytes(pictures.png(pictures.heat(values)))
    image = Image.open(tmp_path / "heat.png")
    assert image.size == (3, 2)
    assert image.getpixel((1, 0)) == (*pictures.POSITIVE, 255)
    assert image.getpixel((2, 0)) == (*pictures.NEGATIVE, 180)
    assert image.getpixel((0, 0))[3] == 0
    assert image.getpixel((2, 1))[3] == 255
    colours = torch.randint(256, (4, 5, 3), generator=torch.Generator().manual_seed(0))
    (tmp_path / "colours.png").write_bytes(pictures.png(colours))
    assert list(Image.open(tmp_path / "colours.png").tobytes()) == colours.flatten().tolist()
    assert pictures.glow(torch.tensor([[0.0, 1.0]]))[0, :, 3].tolist() == [0, 217]


def test_numbers_as_they_are_written():
    found = [cells.written(*case) for case in ((None, "count"), (0.5, "change"), (1.0001, "change"), (1.25, "change"))]
    assert found == ["\N{EN DASH}", "\N{MINUS SIGN}50.0%", "±0%", "+25.0%"]
    assert cells.written(0.99995, "cosine") == "0.999950"
    assert [cells.written(value, "ms") for value in (1.234, 12.34, 1234.5)] == ["1.23 ms", "12.3 ms", "1,234 ms"]
    assert cells.resolve({"a": [{"b": 1}]}, "a/0/b") == 1
    assert cells.resolve({"a": [{"b": 1}]}, "a/1/b") is cells.resolve({"a": 2}, "a/b") is None


# --- attention


def own_weights(model, inputs):
    """What the model gives when asked: every attention weight there is, of the first input."""
    eager = model
    eager.set_attn_implementation("eager")
    outputs = eager(**inputs, output_attentions=True)
    names = ("encoder_attentions", "decoder_attentions", "cross_attentions", "attentions")
    return [weights[0] for name in names for weights in (getattr(outputs, name, None) or ())]


@pytest.mark.parametrize("kind", ["bert", "distilbert", "albert", "gpt2", "t5", "bart", "vit", "beit", "whisper"])
@pytest.mark.parametrize("is_converted", [False, True])
def test_attention_is_the_models_own(kind, is_converted):
    model = getattr(tiny_models, kind)()
    if is_converted:
        collab.collaborate_(model, collab.CollaborativeConfig(shared_dim=8))
    inputs = tiny_models.inputs_for(model)
    found = attention.attention_weights(model.train(), inputs)
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    model.eval()
    expected = own_weights(model, inputs)
    assert len(found) == len(expected)
    for weights in found.values():
        assert any(weights.shape == own.shape and torch.allclose(weights, own, atol=1e-6) for own in expected), (
            "these weights are not among those the model gives"
        )


def test_layers_that_run_several_times_are_told_apart():
    found = attention.attention_weights(tiny_models.albert(), tiny_models.inputs_for(tiny_models.albert()))
    assert len(found) == 8
    assert all(re.search(r", run [12]$", path) for path in found)


def test_attention_of_timm():
    timm = pytest.importorskip("timm")
    sizes = {"img_size": 32, "embed_dim": 24, "num_heads": 3, "depth": 2, "num_classes": 5}
    model = tiny_models.randomise_(timm.create_model("vit_tiny_patch16_224", **sizes)).eval()
    image = tiny_models.numbers(1, 3, 32, 32)
    before = attention.attention_weights(model, image)
    collab.collaborate_(model, collab.CollaborativeConfig(shared_dim=24))
    after = attention.attention_weights(model, image)
    assert [weights.shape for weights in after.values()] == [(3, 5, 5)] * 2
    for path, weights in before.items():
        torch.testing.assert_close(after[path], weights, atol=1e-5, rtol=0)
    assert all(block.attn.fused_attn for block in model.blocks)


def test_classes_that_show_nothing_are_left_out():
    layer = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
    assert attention.attention_weights(layer, torch.randn(1, 4, 16)) == {}


def test_how_much_moved():
    one = torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[1.0, 0.0], [1.0, 0.0]]])
    other = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [0.0, 1.0]]])
    assert attention.moved(one, other).tolist() == [0.25, 1.0]


def test_time_is_taken_in_turn():
    calls = []

    class Slow(torch.nn.Module):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def forward(self, x):
            assert not self.training
            calls.append(self.name)
            return x

    models = [Slow("a").train(), Slow("b").train()]
    times = latencies(models, torch.zeros(1, 2))
    assert all(first <= median <= third for first, median, third in times)
    assert calls[:8] == ["a", "a", "b", "b", "a", "b", "a", "b"]
    assert all(model.training for model in models)


# --- kinds of models


@pytest.mark.parametrize("kind", ["gpt2", "t5", "bart", "albert"])
def test_other_models_of_text(kind, tmp_path):
    folder = convert(getattr(tiny_models, kind)(), tmp_path / kind)
    made = collab.report(folder, original=getattr(tiny_models, kind)(), inputs=LINES)
    assert made.left_out == {}
    layers = made.facts["attention"]["layers"]
    assert layers[0]["keys"][-1] == LINES[0].split()[-1]
    for layer in layers:
        shape = torch.tensor(layer["converted"]).shape
        assert shape[1:] == (len(layer["queries"]), len(layer["keys"]))
        assert shape == torch.tensor(layer["original"]).shape
    if kind in ("t5", "bart"):
        decoder = next(layer for layer in layers if "decoder" in layer["path"])
        assert decoder["queries"][0] == "</s>"
    for place, _, text in Elements(made.page.read_text()).shown:
        check_shown(at(made.facts, place), text)


def test_an_image(tmp_path):
    model = tiny_models.vit()
    folder = convert(model, tmp_path / "vit")
    size = {"height": model.config.image_size, "width": model.config.image_size}
    processor = {"image_processor_type": "ViTImageProcessor", "size": size, "image_std": [0.5, 0.25, 0.125]}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    photo = tmp_path / "red.png"
    Image.new("RGB", (16, 16), (255, 51, 102)).save(photo)
    seen = sources.image_as_seen(model, str(folder), photo)
    torch.testing.assert_close(seen[:, 3, 4], torch.tensor([1.0, 0.2, 0.4]), atol=1e-3, rtol=0)
    made = collab.report(folder, original=tiny_models.vit(), example=photo)
    assert made.left_out == {}
    assert made.facts["fidelity"]["inputs"] == 1
    found = made.facts["attention"]
    assert found["source"] == "red.png"
    layer = found["layers"][1]
    assert layer["asks"] == "the class token"
    batch = next(iter(sources.image_batches(model, str(folder), [photo])))
    weights = attention.attention_weights(collab.load(folder), batch)[layer["path"]]
    torch.testing.assert_close(
        torch.tensor(layer["converted"]), weights[:, 0, 1:].unflatten(-1, (4, 4)), atol=6e-5, rtol=0
    )
    assert made.page.read_text().count("background-image") == 1
    bare = collab.report(folder, original=tiny_models.vit())
    assert set(bare.left_out) == {"fidelity", "speed", "attention"}
    assert "no images to run the models on" in bare.left_out["speed"]
    with pytest.raises(ValueError, match=r"cannot read .* as an image"):
        collab.report(folder, example=folder / "config.json")


def test_a_timm_model(tmp_path):
    timm = pytest.importorskip("timm")
    sizes = {"img_size": 32, "embed_dim": 24, "num_heads": 3, "depth": 1, "num_classes": 5}
    model = tiny_models.randomise_(timm.create_model("vit_tiny_patch16_224", **sizes)).eval()
    timm.models.save_for_hf(model, tmp_path / "plain", model_args=sizes, safe_serialization=True)
    folder = convert(model, tmp_path / "vit", shared_dim=12)
    photo = tmp_path / "noise.png"
    Image.effect_noise((40, 40), 50).save(photo)
    made = collab.report(folder, original=str(tmp_path / "plain"), example=photo)
    assert made.left_out == {}
    assert made.facts["fidelity"]["output"] == "logits"
    assert torch.tensor(made.facts["attention"]["layers"][0]["converted"]).shape == (3, 2, 2)


def test_heads_that_use_some_dimensions_and_layers_that_were_left(tmp_path, monkeypatch):
    monkeypatch.setattr("collab.reporting.maps.MOST_COLUMNS", 6)
    model = tiny_models.bert()
    paths = [site.path for site in collab.find_attention(model)]
    folder = convert(model, tmp_path / "bert", shared_dim={paths[1]: 16}, dims_per_head=4)
    made = collab.report(folder, original=tiny_models.bert(), inputs=LINES)
    (layer,) = made.facts["layers"]
    assert (layer["layer"], layer["path"], layer["dims_per_head"]) == (1, paths[1], 4)
    assert made.facts["spectra"]["layers"][0]["layer"] == made.facts["mixing"]["layers"][0]["layer"] == 1
    assert [one["path"] for one in made.facts["conversion"]["left"]] == [paths[0]]
    assert len(made.facts["mixing"]["layers"][0]["weights"][0]) == 6
    assert "the strongest 6 dimensions are shown" in made.page.read_text()
    assert [layer["layer"] for layer in made.facts["attention"]["layers"]] == [0, 1]


# --- the command


def run(*arguments, code=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Where an ordinary BERT is."""
    folder = tmp_path_factory.mktemp("original") / "bert"
    tiny_models.bert().save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def test_the_command(original, tmp_path, undrawn):
    texts = tmp_path / "texts.txt"
    texts.write_text(TEXTS)
    out = tmp_path / "bert-8"
    run("convert", original, out, "--shared-dim", 8)
    arguments = ("report", out, "--inputs", texts, "--text", "the cat sat")
    text = run(*arguments).stdout
    assert f"report: {out / 'report' / 'report.html'}" in text
    assert "parameters of the model" in text
    found = json.loads(run(*arguments, "--output", tmp_path / "elsewhere", "--json").stdout)
    assert Path(found["page"]) == tmp_path / "elsewhere" / "report.html"
    assert found["left_out"] == {}
    facts = json.loads(Path(found["data"]).read_text())
    assert facts["attention"]["source"] == "the cat sat"
    assert facts["fidelity"]["inputs"] == len(LINES)
    assert facts["conversion"]["model"] == str(original)
    assert found["headline"][0]["value"] == facts["fidelity"]["pooled_cosine"]
    assert json.loads(run(*arguments, "--max-inputs", 2, "--json").stdout)["left_out"] == {}
    assert json.loads((out / "report" / "report.json").read_text())["fidelity"]["inputs"] == 2
    # The report does not keep the model from being opened, or replaced.
    assert run("inspect", out)
    run("convert", original, out, "--shared-dim", 4, "--overwrite", "--max-iterations", 1)
    assert not (out / "report").exists()


def test_what_the_command_refuses(original, bert, tmp_path):
    def error(*arguments, code=2):
        result = run("report", *arguments, code=code)
        assert result.stdout == ""
        return result.stderr

    assert "has no entry 'collaborative'" in error(original, code=2)
    assert "either --text TEXT or --image FILE" in error(bert, "--text", "a", "--image", "b.png")
    assert "cannot read" in error(bert, "--inputs", tmp_path / "gone.txt")
    statistics = tmp_path / "statistics.safetensors"
    collab.calibrate(tiny_models.bert(), [tiny_models.inputs_for(tiny_models.bert())]).save(statistics)
    assert "must be a text file or a folder of images" in error(bert, "--inputs", statistics)
    assert "there is no directory ./gone" in error(bert, "--original", "./gone")
    assert "Examples:\n    collab report" in run("report", "--help").stdout


def test_convert_with_a_report(original, tmp_path, undrawn):
    done = run("convert", original, tmp_path / "a", "--shared-dim", 8, "--report")
    page_path = tmp_path / "a" / "report" / "report.html"
    assert f"written to {tmp_path / 'a'}\nreport: {page_path}\n" in done.stdout
    assert page_path.is_file()
    assert not (tmp_path / "a" / "collab-report.json").read_text().count('"page"')
    found = json.loads(run("convert", original, tmp_path / "b", "--shared-dim", 8, "--report", "--json").stdout)
    assert Path(found["page"]).is_file()
    assert found["provenance"]["versions"]["collab"] == collab.__version__
    assert found["calibration"] is None


def test_convert_with_a_report_on_images(tmp_path):
    model = tiny_models.vit()
    model.save_pretrained(tmp_path / "vit")
    size = {"height": model.config.image_size, "width": model.config.image_size}
    processor = {"image_processor_type": "ViTImageProcessor", "size": size}
    (tmp_path / "vit" / "preprocessor_config.json").write_text(json.dumps(processor))
    (tmp_path / "photos").mkdir()
    for index in range(3):
        Image.effect_noise((20, 24), 40 + index).save(tmp_path / "photos" / f"{index}.png")
    arguments = ("--shared-dim", 8, "--calibrate", tmp_path / "photos", "--no-refine", "--report")
    run("convert", tmp_path / "vit", tmp_path / "out", *arguments)
    facts = json.loads((tmp_path / "out" / "report" / "report.json").read_text())
    assert facts["left_out"] == []
    assert facts["conversion"]["calibration"] == {"from": str(tmp_path / "photos"), "inputs": 3}
    assert facts["fidelity"]["about"] == "images of the folder that the conversion was calibrated on"
    assert facts["attention"]["source"] == "0.png"


def test_the_guide_to_reading_it(bert, tmp_path, monkeypatch, undrawn, capsys):
    guide = Path(__file__).resolve().parents[1] / "docs" / "reading-the-report.md"
    (code,) = re.findall(r"```python\n(.*?)```", guide.read_text(encoding="utf-8"), re.DOTALL)
    shutil.copytree(bert, tmp_path / "my-bert-384")
    monkeypatch.chdir(tmp_path)
    names = {"collab": collab, "texts": LINES}
    exec(compile(code, guide.name, "exec"), names)
    assert names["made"].facts["attention"]["source"] == "The bank raised its rates."
    assert f"report: {Path('my-bert-384', 'report', 'report.html')}" in capsys.readouterr().out


# --- in a browser


@pytest.fixture(scope="module")
def browser():
    program = find_chromium()
    if program is None:
        pytest.skip(f"there is no Chromium (looked for {', '.join(NAMES)}); make browser installs it on Debian")
    with Browser(program) as opened:
        yield opened


SHOWN = """[...document.querySelectorAll("[data-at]")].map(
    (one) => [one.dataset.at, one.title || null, one.textContent, one.closest("table") !== null])"""
WIDTHS = "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
COLOURS = """[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.querySelector("td")).color,
    getComputedStyle(document.querySelector(".figures svg text")).fill]"""


def luminance(colour):
    """From 0, black, to 1, white, of a colour such as rgb(1, 2, 3)."""
    return sum(int(part) for part in re.findall(r"\d+", colour)[:3]) / 765


def test_a_browser_shows_the_numbers_of_the_file(browser, made):
    browser.requests.clear()
    browser.complaints.clear()
    browser.open(made.page)
    facts = json.loads(made.data.read_text())
    shown = browser.run(SHOWN)
    assert len([one for one in shown if one[3]]) > 50
    for place, whole, text, _ in shown:
        check_shown(at(facts, place), text)
        assert whole is None or json.loads(whole) == at(facts, place)
    assert browser.run("document.querySelectorAll('.tile .big').length") == len(facts["headline"])
    assert browser.run("[...document.images].every((one) => one.complete && one.naturalWidth > 0)")
    assert browser.requests == [made.page.resolve().as_uri()]
    assert browser.complaints == []
    assert len(browser.picture()) > 50_000


def test_a_browser_of_a_phones_width_scrolls_tables_and_not_the_page(browser, made):
    for width in (360, 390, 1200):
        browser.open(made.page, width=width)
        whole, window = browser.run(WIDTHS)
        assert whole <= window == width
    browser.open(made.page, width=360)
    boxes = browser.run("[...document.querySelectorAll('.scroll')].map((one) => [one.scrollWidth, one.clientWidth])")
    assert any(inside > outside for inside, outside in boxes), "no table is wide enough to test this with"
    assert all(outside <= 360 for _, outside in boxes)
    size = browser.run("parseFloat(getComputedStyle(document.body).fontSize)")
    assert size >= 16


def test_a_browser_in_the_dark(browser, made):
    for dark in (False, True):
        browser.open(made.page, dark=dark)
        ground, ink, drawn = browser.run(COLOURS)
        assert (luminance(ground) < 0.2) == dark
        assert abs(luminance(ground) - luminance(ink)) > 0.5
        assert abs(luminance(ground) - luminance(drawn)) > 0.5


def test_a_browser_shows_the_layer_that_is_chosen(browser, made):
    browser.open(made.page)
    visible = "[...document.querySelectorAll('.panel')].map((one) => one.offsetHeight > 0)"
    assert browser.run(visible) == [True, False]
    browser.run("document.querySelector('label[for=layer-1]').click()")
    assert browser.run(visible) == [False, True]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"calibration": "some"}, "calibration must be an object"),
        ({"settings": [1]}, "settings must be an object"),
        ({"report": {"sites": [], "left": [1]}}, "left must be an object"),
        ({"report": {"sites": [{"path": "a", "method": None}]}}, "method and metric of its layers must be texts"),
        ({"report": {"sites": [{"path": "a", "error": float("nan")}]}}, "must be finite numbers"),
    ],
)
def test_a_record_of_other_kinds_is_refused_by_name(tmp_path, change, said):
    (tmp_path / "collab-report.json").write_text(json.dumps({"report": {"sites": []}} | change))
    with pytest.raises(ValueError, match=f"not what collab convert writes: TypeError: .*{said}"):
        read_record(tmp_path)
