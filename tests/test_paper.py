"""What the paper printed is whole, and docs/glue-results.md says what records say. Records here are made up."""

import dataclasses
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from collab.records import RunRecord, append_record

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "paper"))

pytest.importorskip("matplotlib")
pytest.importorskip("yaml")

import glue_records  # noqa: E402
import render_glue  # noqa: E402

# What the paper printed.


def test_what_the_paper_printed_has_every_row_and_is_text():
    printed = glue_records.published()
    assert {name: len(printed[name]["rows"]) for name in ("table2", "table3", "table4", "glue")} == {
        "table2": 8, "table3": 5, "table4": 5, "glue": 10,
    }  # fmt: skip
    assert (ROOT / printed["table1"]["file"]).is_file()
    assert all(printed[name]["rows"] is None and printed[name]["said"] for name in ("decomposition_time", "recovery"))
    for name, table in printed.items():
        assert table["where"], name
        for row in table.get("rows") or []:
            assert list(row) == table["columns"], name
            assert all(cell is None or isinstance(cell, str) for cell in row.values()), (name, row)


def test_numbers_of_the_paper_are_numbers():
    printed = glue_records.published()
    for name in ("table2", "table3", "table4", "glue"):
        for row in printed[name]["rows"]:
            for column, cell in row.items():
                if column not in ("model", "heads") and cell is not None:
                    assert all(float(part.removesuffix("M")) > 0 for part in cell.split("/")), (name, row)
    for row in printed["glue"]["rows"]:  # a slip of the pen would show: the last column is the mean of all numbers
        numbers = [float(part) for task in printed["glue"]["columns"][3:-1] for part in row[task].split("/")]
        assert abs(sum(numbers) / len(numbers) - float(row["average"])) < 0.11, row


# Made-up records. Nothing in them was measured.

TASK_METRICS = {
    "cola": ["matthews_correlation"], "SST-2": ["accuracy"], "MRPC": ["f1", "accuracy"], "RTE": ["accuracy"],
    "stsb": ["pearson", "spearman"],
}  # fmt: skip


def row(method="original", size=None, seed=0, stage="fine-tuned", score=0.5, task="RTE", parameters=1_000_000, **other):
    metrics = {name: score + 0.01 * index for index, name in enumerate(TASK_METRICS[task])}
    values = {"task": task, "model": "made-up-bert", "method": method, "size": size, "seed": seed, "stage": stage}
    return values | {"metrics": metrics, "parameters": parameters, "seconds": 2.0} | other


def record(rows, time="2000-01-01T00:00:00+00:00"):
    origin = {"seed": 0, "commit": "made up", "device": "made up", "versions": {"python": "0"}, "time": time}
    return RunRecord(name="glue", config={}, metrics={"rows": rows}, provenance=origin)


@pytest.fixture
def made_up(tmp_path):
    rows = [
        row(seed=seed, score=score, task=task) for task in TASK_METRICS for seed, score in enumerate((0.6, 0.7, 0.9))
    ]
    for size in (64, 32):
        for method in ("paper", "refined"):
            for stage, score in (("converted", 0.4), ("fine-tuned again", 0.65)):
                rows.append(row(method, size, stage=stage, score=score, parameters=10_000 * size))
    rows.append(row("pruned", None, stage="fine-tuned again", score=0.3, parameters=310_000))
    append_record(tmp_path / "runs.jsonl", record(rows))
    return tmp_path


def test_the_table_has_medians_spread_and_what_the_paper_printed(made_up):
    parts = render_glue.written(made_up, made_up)
    lines = [line.split(" | ") for line in parts["table"].splitlines()]
    original = next(line for line in lines if line[0] == "| original")
    assert original[3:] == [
        "1.00 M", "70.0 (60.0-90.0)", "70.0 (60.0-90.0)", "70.0 / 71.0 (60.0-90.0)", "70.0 / 71.0 (60.0-90.0)",
        "70.0 (60.0-90.0)", "3 |",
    ]  # fmt: skip
    assert ["| heads pruned", "32", "fine-tuned again", "0.31 M", "", "", "", "", "30.0", "1 |"] in lines
    printed = next(line for line in lines if line[0] == "| *BERT-base, printed*" and line[1] == "128")
    assert printed[3:] == ["96.6 M", "43.5", "89.5", "83.4 / 75.2", "84.5 / 84.3", "60.7", "3 |"]
    assert "DistilBERT" not in parts["table"]
    assert "Settings" not in parts["table"]  # these records do not tell
    lost = [line.split(" | ") for line in parts["what is lost"].splitlines()]
    assert ["| ours, refined", "64", "converted", "", "", "", "", "-20.0 |"] in lost
    assert "Commit made up" in parts["table"]


def test_the_figures_are_drawn_and_are_the_same_again(made_up):
    parts = render_glue.written(made_up, made_up)
    drawn = {}
    for name, figure in {"recovery": "glue-recovery.svg", "decomposition time": "glue-decomposition-time.svg"}.items():
        assert f"(figures/{figure})" in parts[name]
        drawn[figure] = (made_up / figure).read_bytes()
        assert ElementTree.fromstring(drawn[figure]).tag.endswith("svg")
    text = drawn["glue-recovery.svg"].decode()
    for word in ("RTE, made-up-bert", "heads pruned", "ours, refined", "converted", "key dimension"):
        assert word in text, word
    assert "made-up-bert, whole" in drawn["glue-decomposition-time.svg"].decode()
    render_glue.written(made_up, made_up)
    assert {figure: (made_up / figure).read_bytes() for figure in drawn} == drawn


def test_of_one_run_the_last_record_counts_and_folders_of_runs_are_read(tmp_path):
    import json

    append_record(tmp_path / "a.jsonl", record([row(score=0.1)], time="2000-01-02T00:00:00+00:00"))
    append_record(tmp_path / "a.jsonl", record([row(score=0.2)]))
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "losses.jsonl").write_text('{"step": 1}\n')
    (folder / "record.json").write_text(json.dumps(record([row(seed=1, score=0.3)]).to_dict()))
    ((_, tasks),) = glue_records.collect(glue_records.read_rows(tmp_path)).items()
    assert sorted(tasks["RTE"].scores[0]) == pytest.approx([10, 30])


def test_rows_as_the_recipe_writes_them(tmp_path):
    """Metrics in the row itself, sizes as shares, tasks that the page does not show."""
    about = {"model": "made-up", "method": "refined", "size": 0.5, "seed": 0, "stage": "converted", "parameters": 10}
    scores = {"f1": 0.5, "accuracy": 0.4, "score": 0.45, "seconds": 1.0, "mean_error": 0.1}
    rows = [{"task": "MRPC", **about, **scores}, {"task": "QQP", **about, **scores}]
    append_record(tmp_path / "a.jsonl", record(rows))
    parts = render_glue.written(tmp_path, tmp_path)
    assert "| ours, refined | 0.5 of full | converted | 0.00 M |  |  | 50.0 / 40.0 |" in parts["table"]
    assert "share of the key dimension" in (tmp_path / "glue-recovery.svg").read_text()
    append_record(tmp_path / "a.jsonl", record([rows[0] | {"size": 64}]))
    with pytest.raises(ValueError, match="all dimensions or all shares"):
        render_glue.written(tmp_path, tmp_path)


def test_rows_that_are_not_understood_are_refused(tmp_path):
    append_record(tmp_path / "a.jsonl", record([row(method="guessing")]))
    with pytest.raises(ValueError, match=r"a method of .* got 'RTE', 'guessing'"):
        glue_records.read_rows(tmp_path)
    with pytest.raises(ValueError, match="must have the metric accuracy"):
        glue_records.collect([row() | {"metrics": {"loss": 1.0}}])


def test_scores_are_beside_the_original_of_the_same_seed_and_settings_are_told(tmp_path):
    seeds = (("original", None, "fine-tuned", (0.5, 0.6, 0.7)), ("refined", 32, "converted", (0.495, 0.58, 0.699)))
    rows = [
        row(method, size, seed=seed, stage=stage, score=score)
        for method, size, stage, scores in seeds
        for seed, score in enumerate(scores)
    ]
    config = {"epochs": 2.0, "learning_rate": 1e-4, "precision": "tf32", "max_train": None}
    for some, own in ((rows, config), ([row(task="cola")], {"epochs": None, "learning_rate": 2e-5})):
        append_record(tmp_path / "a.jsonl", dataclasses.replace(record(some), config=own))
    parts = render_glue.written(tmp_path, tmp_path)
    assert "**-0.5** (-2.0 to -0.1)" in parts["what is lost"]
    assert (
        "*Settings: epochs 3 (CoLA), 2 (RTE; in the paper 10); learning rate 2e-05 (CoLA), 0.0001 (RTE; in the paper "
        "2e-05); batches of 32; training examples to calibrate with 1,024; precision tf32 (RTE).*"
    ) in parts["table"]


def test_a_model_that_was_trained_here_is_told_of(tmp_path):
    ends = {"before": {"loss": 9.0, "accuracy": 0.0}, "after": {"loss": 2.5, "accuracy": 0.51}}
    metrics = {"blocks": 1000, "steps": 60, "parameters": 3_000_000, "training_seconds": 12.3, **ends}
    config = {"texts": ["/data/a.tar.xz", "b.txt.xz"], "length": 128, "batch_size": 10}
    origin = record([]).provenance
    append_record(tmp_path / "mlm.jsonl", RunRecord(name="mlm", config=config, metrics=metrics, provenance=origin))
    parts = render_glue.written(tmp_path, tmp_path)
    row = "| a.tar.xz, b.txt.xz | 128,000 | 60 of 1,280 | 3.00 M | 9.00, 2.50 | 0.000, 0.510 | 12 |"
    assert row in parts["pretraining"]
    assert parts["table"] == render_glue.NOTHING
    assert glue_records.title_of("runs/mlm/albert-europarl/model") == "albert-europarl"


def test_nothing_measured_is_said(tmp_path):
    parts = render_glue.written(tmp_path, tmp_path)
    assert parts["table"] == parts["recovery"] == render_glue.NOTHING
    assert not (tmp_path / "glue-recovery.svg").exists()


def test_the_document_says_what_the_records_say(tmp_path):
    document = render_glue.DOCUMENT.read_text(encoding="utf-8")
    for name, part in render_glue.written(figures=tmp_path).items():
        assert render_glue.part_in(document, name) == part, "run python paper/render_glue.py"
    assert {path.name for path in tmp_path.iterdir()} <= {path.name for path in render_glue.FIGURES.iterdir()}


def test_of_chemistry_rows_measured_twice_the_last_is_shown():
    def measured(method, size, score):
        config = {"method": method, "shared_dim": size, "dims_per_head": None, "calibration": 0}
        origin = {"commit": "0123456789abcdef", "device": "cpu", "versions": {}, "seed": 0, "time": ""}
        return RunRecord(name="albert", config=config, metrics={"scores": {"masked": score}}, provenance=origin)

    shown = render_glue.chemistry(
        [measured("original", None, 0.9), measured("paper", 64, 0.5), measured("paper", 64, 0.6)]
    )
    assert [line.split("|")[4].strip() for line in shown.splitlines()[2:4]] == ["90.0", "60.0"]
    assert "50.0" not in shown
