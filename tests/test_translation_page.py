"""What docs/translation.md says is what the records of trainings say."""

import sys
from pathlib import Path
from typing import Any

import pytest

from collab.records import RunRecord, append_record

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "paper"))

pytest.importorskip("matplotlib")
pytest.importorskip("yaml")

import render_translation as page  # noqa: E402


def record(variant: str, key_dim: int, seed: int = 0, **metrics: Any) -> RunRecord:
    score = {
        "text": "europarl",
        "sacrebleu": 20.0 + seed,
        "compound_split": 21.0 + seed,
        "signature": "nrefs:1",
        "sentences": 3,
        "seconds": 1,
    }
    curve = [
        {"step": step, "what": what, "loss": loss, "perplexity": 2.0, "sacrebleu": 9.0, "seconds": 1.0}
        for step, what, loss in ((80, "training", 3.0), (100, "training", 2.5), (100, "averaged", 2.25))
    ]
    config = {
        "variant": variant, "key_dim": key_dim, "seed": seed, "collaborative_in": ["encoder", "decoder", "cross"],
        "steps": 100, "batch_tokens": 8192, "learning_rate": 7e-4, "warmup_steps": 10, "label_smoothing": 0.1,
        "dropout": 0.1, "max_grad_norm": 0.0, "average": 5, "average_every": 2, "beams": 4, "length_penalty": 0.6,
    }  # fmt: skip
    measured = {
        "parameters": 1_000_000 * key_dim, "scores": [score], "training_seconds": 90.0,
        "peak_memory": 2**31, "updates": 100, "epochs": 3.0, "waiting": 0.001, "curve": curve, "conversions": [],
        "data": {"pairs": 9, "tokens": [5, 6], "sources": {"a": 9}, "texts": {"dev": 3}, "vocabulary": 400},
    }  # fmt: skip
    origin = {
        "seed": seed,
        "commit": "a" * 40,
        "device": "cpu",
        "versions": {"torch": "2"},
        "time": f"2026-01-0{seed + 1}",
    }
    return RunRecord(name="translation", config=config, metrics=measured | metrics, provenance=origin)


def rows_of(tmp_path: Path, *records: RunRecord) -> page.Rows:
    for one in records:
        append_record(tmp_path / "translation.jsonl", one)
    return page.grouped(page.recorded(tmp_path))


def test_a_row_is_the_mean_over_its_seeds_beside_what_the_paper_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = tmp_path / "published.yaml"
    published.write_text(
        "table2: {rows: [{key_dim: '64', heads: collaborative, bleu: '27.31', parameters: '52.7', hours: '17.9'}]}"
    )
    monkeypatch.setattr(page, "PUBLISHED", published)
    conversion = {
        "shared_dim": 8, "how": "inputs", "parameters": 5_000_000, "largest_error": 0.25,
        "conversion_seconds": 3.0, "text": "europarl", "sacrebleu": 11.0, "compound_split": 12.0,
    }  # fmt: skip
    rows = rows_of(
        tmp_path, record("collaborative", 64), record("collaborative", 64, seed=1),
        record("concatenated", 512, conversions=[conversion]), record("concatenated", 64, updates=50),
    )  # fmt: skip
    assert list(rows) == [("concatenated", 512), ("collaborative", 64)]  # the shorter training is another matter
    table = page.table2(rows)
    assert (
        "| 64 | collaborative | 64.0 M | 21.50 ± 0.50 (20.50) | 1.5 ± 0.0 | 2.0 GiB | 2 | *52.7* | *27.31* | *17.9* |"
        in table
    )
    assert "| 512 | concatenated | 512.0 M | 21.00 (20.00) | 1.5 | 2.0 GiB | 1 |  |  |  |" in table
    assert (
        "| 64 | collaborative | 100 | 3.0 | 2.500 ± 0.000 | 3.000 ± 0.000 | 2.250 ± 0.000 | 0.10 % |"
        in page.learning(rows)
    )
    assert "| 8 | in the metric of its inputs | 5.0 M | 12.00 (11.00) | 0.250 | 3 |" in page.conversions(rows)
    monkeypatch.setattr(page, "PUBLISHED", tmp_path / "nothing.yaml")
    assert "paper" not in page.table2(rows)


def test_figures_are_drawn_the_same_for_the_same_records(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, record("collaborative", 64), record("concatenated", 64), record("concatenated", 512))
    for path in (tmp_path / "a.svg", tmp_path / "b.svg"):
        page.draw_against(rows, "parameters", path)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    page.draw_curves(rows, tmp_path / "curves.svg")
    assert "collaborative 64" in (tmp_path / "curves.svg").read_text()


def test_the_page_says_what_the_records_say() -> None:
    rows = page.grouped(page.recorded())
    document = page.DOCUMENT.read_text(encoding="utf-8")
    for name, render in page.PARTS.items():
        assert page.part_in(document, name) == render(rows), f"run paper/render_translation.py: {name}"
    assert page.table2({}) == "Not measured yet.\n"


def test_every_row_of_the_table_has_a_config_that_can_be_run() -> None:
    from collab.recipes.settings import read_config
    from collab.recipes.translation import Config

    files = sorted((ROOT / "paper" / "configs" / "translation").glob("*.yaml"))
    found = {}
    for file in files:
        first = file.read_text(encoding="utf-8").splitlines()[0]
        assert first.startswith(f"# collab train translation --config paper/configs/translation/{file.name} --out ")
        config = read_config(Config, file, {})
        found[config.variant, config.key_dim, config.seed, config.prepare_only] = file.stem
    sizes = [(size, seed) for size in (512, 256, 128, 64) for seed in ((0, 1) if size in (512, 64) else (0,))]
    for variant in ("concatenated", "collaborative"):
        for size, seed in sizes:
            assert found[variant, size, seed, False] == f"{variant}-{size}" + (f"-seed{seed}" if seed else "")
    assert len(found) == len(files)
