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
import translation_claims  # noqa: E402
import translation_records as records  # noqa: E402


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


def found_in(tmp_path: Path, *made: RunRecord) -> records.Found:
    for one in made:
        append_record(tmp_path / "translation.jsonl", one)
    return records.found(tmp_path)


def scores(*bleu: float) -> list[dict[str, Any]]:
    named = zip(("multi30k", "europarl"), bleu, strict=True)
    return [record("", 0).metrics["scores"][0] | {"text": text, "compound_split": one} for text, one in named]


def converted() -> RunRecord:
    score = {
        "shared_dim": 64, "how": "inputs", "parameters": 5_000_000, "largest_error": 0.25,
        "conversion_seconds": 3.0, "text": "europarl", "sacrebleu": 11.0, "compound_split": 12.0,
    }  # fmt: skip
    made = record("collaborative", 512)
    return RunRecord.from_dict(made.to_dict() | {"metrics": {"data": made.metrics["data"], "conversions": [score]}})


def timed(**seconds: float) -> RunRecord:
    rows = [
        {"variant": variant, "key_dim": 64, "batch_tokens": 16384, "seconds_per_update": one, "peak_memory": None}
        for variant, one in seconds.items()
    ]
    made = record("collaborative", 64).to_dict() | {"name": "translation-speed", "metrics": {"rows": rows}}
    return RunRecord.from_dict(made)


def test_a_row_is_the_mean_over_its_seeds_beside_what_the_paper_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = tmp_path / "published.yaml"
    published.write_text(
        "table2: {rows: [{key_dim: '64', heads: collaborative, bleu: '27.31', parameters: '52.7', hours: '17.9'}, "
        "{key_dim: '256', heads: collaborative}]}"
    )
    monkeypatch.setattr(records, "PUBLISHED", published)
    shown = found_in(
        tmp_path, record("collaborative", 64), record("collaborative", 64, seed=1), converted(),
        record("concatenated", 512), record("concatenated", 64, updates=50),
    )  # fmt: skip
    assert list(shown.rows) == [("concatenated", 512), ("collaborative", 64)]  # the shorter training is another matter
    table = page.table2(shown)
    assert (
        "| 64 | collaborative | 64.0 M | 21.50 ± 0.50 (20.50) | 12.00 | 1.5 ± 0.0 | 2.0 GiB | 2 | *52.7* | *27.31* | "
        "*17.9* |" in table
    )
    assert "| 512 | concatenated | 512.0 M | 21.00 (20.00) |  | 1.5 | 2.0 GiB | 1 |  |  |  |" in table
    assert "Not measured yet: collaborative 256." in table
    assert "some places only: concatenated 64 seed 0: 50 updates." in table
    assert (
        "| 64 | collaborative | 100 | 3.0 | 2.500 ± 0.000 | 3.000 ± 0.000 | 2.250 ± 0.000 | 0.10 % |"
        in page.learning(shown)
    )
    assert "| 512 | not | 512.0 M | 21.00 (20.00) |  |  |" in page.conversions(shown)
    assert "| 64 | in the metric of its inputs | 5.0 M | 12.00 (11.00) | 0.250 | 3 |" in page.conversions(shown)
    monkeypatch.setattr(records, "PUBLISHED", tmp_path / "nothing.yaml")
    assert "paper" not in page.table2(shown)


def test_conversions_are_shown_without_the_training_they_are_of(tmp_path: Path) -> None:
    shown = found_in(tmp_path, converted())
    assert page.conversions(shown).count("\n| ") == 2
    assert page.table2(shown) == page.answers(shown) == "Not measured yet.\n"


def test_claims_are_answered_by_more_than_chance(tmp_path: Path) -> None:
    made = [
        record("concatenated", 512, scores=scores(30, 10)), record("concatenated", 512, seed=1, scores=scores(31, 10)),
        record("concatenated", 64, scores=scores(30, 9)), record("collaborative", 64, scores=scores(31, 9.5)),
    ]  # fmt: skip
    shown = found_in(tmp_path, *made)
    assert translation_claims.chance_of(shown) == 0.5
    hurts, keeps, better = translation_claims.claims(shown)
    assert (
        "** Yes: concatenated 64 against concatenated 512: multi30k 30.00 and 30.50; europarl 9.00 and 10.00; -0.75"
        in hurts
    )
    assert keeps.endswith("** Not measured: collaborative 128 is missing.")
    assert "** Yes: collaborative 64 against concatenated 64" in better
    worse = [record("collaborative", 128, scores=scores(30, 9.4)), record("collaborative", 64, scores=scores(30.5, 9))]
    hurts, keeps, better = translation_claims.claims(found_in(tmp_path, *worse))
    assert "** No: collaborative 128 against concatenated 512" in keeps
    assert "** No: collaborative 64 against concatenated 64" in better
    assert "** No: from update 80 to 100 its loss" in translation_claims.flattened(shown)
    assert "fell by 16.7 %" in page.answers(shown)
    flat = [dict(row, loss=2.5) for row in made[0].metrics["curve"]]
    only = found_in(tmp_path / "flat", record("concatenated", 512, curve=flat))
    assert "** Yes: from update 80 to 100 its loss" in page.answers(only)
    once = found_in(tmp_path / "once", record("concatenated", 512, curve=made[0].metrics["curve"][1:]))
    assert "flattened is not known" in page.answers(once)
    assert "No row was trained with two seeds" in page.answers(only)


def test_times_are_those_of_updates_alone_once_they_are_measured(tmp_path: Path) -> None:
    shown = found_in(tmp_path, record("concatenated", 64), record("collaborative", 64), timed(collaborative=2.4))
    assert shown.seconds(("collaborative", 64)) == 100 * 8192 / 16384 * 2.4
    assert shown.seconds(("concatenated", 64)) is None
    assert "| 64 | collaborative | 64.0 M | 21.00 (20.00) |  | 2.0 | 1.5 | 2.0 GiB | 1 |" in page.table2(shown)
    assert "| 64 | concatenated | 64.0 M | 21.00 (20.00) |  |  | 1.5 | 2.0 GiB | 1 |" in page.table2(shown)
    page.draw_against(shown, "time", tmp_path / "some.svg")
    assert "alone on the GPU" not in (tmp_path / "some.svg").read_text()
    page.draw_against(
        found_in(tmp_path, timed(collaborative=2.4, concatenated=1.2)), "time", tmp_path / "all.svg"
    )  # fmt: skip
    assert "alone on the GPU" in (tmp_path / "all.svg").read_text()


def test_an_example_is_what_was_said(tmp_path: Path) -> None:
    made = record("collaborative", 64).to_dict() | {"name": "translate", "metrics": {"translations": ["Ja.", "Nein."]}}
    made["config"] = {
        "model": "runs/64/model",
        "sentences": ["It's so.", "No."],
        "variant": "collaborative",
        "key_dim": 64,
        "updates": 9,
    }
    text = page.example(found_in(tmp_path, RunRecord.from_dict(made)))
    asked = "$ collab translate runs/64/model \\\n    --text 'It'\"'\"'s so.' \\\n    --text No.\n"
    assert f"{asked}Ja.\nNein.\n```" in text
    assert "collaborative heads, key dimension 64, 9 updates. cpu; commit aaaaaaaaaaaa; torch 2." in text


def test_figures_are_drawn_the_same_for_the_same_records(tmp_path: Path) -> None:
    shown = found_in(tmp_path, record("collaborative", 64), record("concatenated", 64), record("concatenated", 512))
    for path in (tmp_path / "a.svg", tmp_path / "b.svg"):
        page.draw_against(shown, "parameters", path)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    page.draw_curves(shown.rows, tmp_path / "curves.svg")
    assert "collaborative 64" in (tmp_path / "curves.svg").read_text()


def test_the_pages_say_what_the_records_say() -> None:
    shown = records.found()
    for file, parts in ((page.DOCUMENT, page.PARTS), (page.README, {"example": page.example})):
        document = file.read_text(encoding="utf-8")
        for name, render in parts.items():
            assert page.part_in(document, name) == render(shown), f"run paper/render_translation.py: {name}"
    assert page.table2(records.Found()) == "Not measured yet.\n"


def test_every_row_of_the_table_has_a_config_that_can_be_run() -> None:
    from collab.recipes.settings import read_config
    from collab.recipes.translation import Config

    files = sorted((ROOT / "paper" / "configs" / "translation").glob("*.yaml"))
    found = {}
    for file in files:
        first = file.read_text(encoding="utf-8").splitlines()[0]
        assert first.startswith(f"# collab train translation --config paper/configs/translation/{file.name} --out ")
        found[file.stem] = read_config(Config, file, {})
    sizes = [(size, seed) for size in (512, 256, 128, 64) for seed in ((0, 1) if size in (512, 64) else (0,))]
    for variant in ("concatenated", "collaborative"):
        for size, seed in sizes:
            row = found.pop(f"{variant}-{size}" + (f"-seed{seed}" if seed else ""))
            assert (row.variant, row.key_dim, row.seed, row.model) == (variant, size, seed, None)
    for how in ("weights", "inputs", "refined"):
        row = found.pop(f"convert-{how}")
        assert row.convert_with == (how,)
        assert set(row.convert_to) >= {256, 128, 64}
    assert {name: row.prepare_only for name, row in found.items()} == {"data": True, "data-short": True}
