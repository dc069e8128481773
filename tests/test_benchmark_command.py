import json

import pytest
import torch
from PIL import Image

from collab import bench_commands, cli, rivals, table1
from collab.records import read_records
from collab.speed_records import case_of
from test_cli import error, run

assert cli  # `collab.commands` has the commands of files that name it once those are imported

SMALL = ("--width", 24, "--heads", 3, "--batch", 2, "--tokens", "9", "--threads", 1, "--repeats", 2)


def test_a_table_says_how_fast_each_size_is():
    output = run("bench", *SMALL, "--shared-dim", "8,12").stdout
    assert "24 wide, 3 heads, batch 2, inference, float32, cpu" in output
    for words in (
        "ordinary",
        "collaborative 8 ",
        "collaborative 12 ",
        "ratio",
        "parameters",
        "FLOPs",
        "peak MiB",
        "math",
    ):
        assert words in output


def test_records_and_a_figure_are_saved(tmp_path):
    save, plot = tmp_path / "speed.jsonl", tmp_path / "speed.png"
    arguments = tuple("9,5" if argument == "9" else argument for argument in ("bench", *SMALL, "--training"))
    arguments = (*arguments, "--shared-dim", "12", "--dims-per-head", 4, "--save", save, "--plot", plot)
    output = run(*arguments).stdout
    assert f"drawn to {plot}" in output
    assert f"saved to {save}" in output
    records = read_records(save)
    assert {case_of(record) for record in records} == {("training", 2, 9), ("training", 2, 5)}
    ours = [record for record in records if record.config["kind"] == "collaborative"]
    assert [(record.config["shared_dim"], record.config["dims_per_head"]) for record in ours] == [(12, 4), (12, 4)]
    assert Image.open(plot).size > (300, 300)
    run(*arguments[:-2])
    again = read_records(save)
    assert again[: len(records)] == records
    assert len(again) == 2 * len(records)
    assert {path.name for path in tmp_path.iterdir()} == {"speed.jsonl", "speed.png"}


def test_json_is_all_that_is_printed():
    result = run("bench", *SMALL, "--decode", "--implementation", "auto,reference", "--json")
    found = json.loads(result.stdout)
    assert found["not_measured"] == []
    ours = [record for record in found["records"] if record["config"]["kind"] == "collaborative"]
    # Once, twice and four times a head's size, unless told.
    assert [(record["config"]["shared_dim"], record["config"]["asked"]) for record in ours] == [
        (size, name) for size in (8, 16, 32) for name in ("auto", "reference")
    ]
    assert all(record["config"]["pass"] == "decode" and record["metrics"]["ratio"] > 0 for record in ours)


def test_table_1_is_measured_beside_the_papers(monkeypatch, tmp_path):
    printed = table1.published()
    small = printed | {"batch": 2, "tokens": 9, "width": 24, "num_heads": 3, "rows": printed["rows"][:2]}
    monkeypatch.setattr(table1, "published", lambda: small)
    save = tmp_path / "table1.jsonl"
    output = run("bench", "--table1", "--repeats", 2, "--threads", 1, "--save", save).stdout
    for words in ("ordinary", "10.9G (x 1.00)", "1.75 (x 0.77)", "published, not measured here"):
        assert words in output
    records = read_records(save)
    assert {record.name for record in records} == {"table1"}
    assert {case_of(record) for record in records} == {("training", 2, 9), ("inference", 2, 9)}
    cells = table1.table1_cells(records)
    assert [len(line) for line in cells] == [len(table1.HEADER)] * 2
    assert cells[1][0] == "64"
    assert cells[1][7].endswith(")")
    assert table1.table1_cells([])[0][1] == "-"


def test_what_the_paper_printed_is_what_its_formulas_give_for_parameters():
    rows = table1.published()["rows"]
    setting = rivals.Setting()
    for row in rows[1:]:
        layer = rivals.CollaborativeAttention(768, 12, row["shared_dim"])
        assert sum(one.numel() for one in layer.parameters()) == pytest.approx(row["parameters"][0], rel=0.005)
    assert rows[0]["parameters"][0] == pytest.approx(4 * 768 * 768, rel=0.005)
    assert setting.flops() == pytest.approx(rows[0]["flops"][0], rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tokens", "many"), "--tokens must be integers with commas between, like 128,512, got 'many'"),
        (("--tokens", "0"), "--tokens must be at least 1, got 0"),
        (("--width", 0), "--width must be at least 1, got 0"),
        (("--heads", 5), "width must be divisible by num_heads, got 24 and 5"),
        (("--shared-dim", "x"), "--shared-dim must be integers"),
        (("--dims-per-head", 9), "--dims-per-head must be from 1 to the smallest --shared-dim 8, got 9"),
        (("--dtype", "int8"), "--dtype must be auto or one of float32, bfloat16, float16, got 'int8'"),
        (("--implementation", "magic"), "implementation must be 'auto' or one of"),
        (("--decode", "--training"), "--decode must come without --training"),
        (("--device", "gpu"), "--device must be like cpu, cuda or cuda:1, got 'gpu'"),
        (("--table1",), "--table1 must come without --width, --heads, --tokens, --batch: its sizes are the paper's"),
        (("--save", "/nowhere/a.jsonl"), "--save must be a file in a directory that can be written to"),
        (("--plot", "speed.txt"), "must end in one of .png, .svg, .pdf, got 'speed.txt'"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(arguments, message, monkeypatch):
    monkeypatch.setattr(bench_commands, "sweep", None)
    assert message in error("bench", *SMALL, *arguments)


def test_a_file_of_something_else_is_not_added_to(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_commands, "sweep", None)
    path = tmp_path / "notes.txt"
    path.write_text("not a record\n")
    assert "must be a record" in error("bench", *SMALL, "--save", path)
    assert path.read_text() == "not a record\n"


def test_a_wrong_result_is_told_and_nothing_is_written(tmp_path, monkeypatch):
    forward = rivals.SharedAttention.forward
    wrong = lambda self, inputs: forward(self, inputs) * (2 if self.layer.implementation == "auto" else 1)  # noqa: E731
    monkeypatch.setattr(rivals.SharedAttention, "forward", wrong)
    message = error("bench", *SMALL, "--save", tmp_path / "speed.jsonl", code=1)
    assert "output of shared_dim 8, dims_per_head None, by auto must be within" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused():
    assert "--device must be cpu where there is no CUDA device, got 'cuda'" in error("bench", "--device", "cuda")


def test_help_shows_examples():
    output = run("bench", "--help").stdout
    assert "Examples:" in output
    assert "collab bench --table1" in output
