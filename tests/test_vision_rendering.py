"""What docs/vision.md says is what records say; images are packed into what fits."""

import sys
from pathlib import Path

import pytest
import torch

from collab.recipes import vision
from collab.recipes.image_cache import cached_images
from collab.records import RunRecord, append_record
from test_vision import CLASSES, SIDE, write

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "paper"))

pytest.importorskip("matplotlib")
pytest.importorskip("timm")

import pack_images  # noqa: E402
import render_vision  # noqa: E402

PROVENANCE = {"seed": 0, "commit": "0123456789abcdef", "device": "cuda (NVIDIA H200)", "versions": {"torch": "2.11.0"}}


def record(attention, key_dim, seed, top1, **more):
    config = vision.Config(
        data=("x",), attention=attention, key_dim=key_dim, seed=seed, image_size=64, patch_size=8, epochs=30.0,
        batch_size=512,
    )  # fmt: skip
    metrics = {
        "top1": top1, "top5": top1 + 20, "parameters": {768: 21_500_000, 384: 19_700_000, 192: 18_900_000}[key_dim],
        "data": {"train_images": 50_000, "val_images": 10_000, "classes": 200},
        "train": {"seconds": 123.4, "images_per_second": 9876.5, "waiting": 0.012, "steps": 2910},
    }  # fmt: skip
    return RunRecord(name="vision", config=config.to_dict(), metrics=metrics | more, provenance=PROVENANCE)


@pytest.fixture
def records():
    row = {
        "method": "refined", "shared_dim": 96, "inputs": 256, "dims_per_head": None, "seconds": 3.25, "top1": 29.5,
        "top5": 50.0, "parameters": 20_000_000, "moved": 0.0123,
    }  # fmt: skip
    maps = {name: [[[0.0, 0.5], [1.0, 0.25]]] * 2 for name in ("original", "paper 96", "refined 96", "paper 192")}
    found = [record("concatenate", 768, seed, 30 + seed / 10) for seed in (0, 1)]
    found += [record("collaborative", 192, seed, 33.0) for seed in (0, 1)]
    found += [record("concatenate", 192, seed, 30.06) for seed in (0, 1)]
    return [*found, record("concatenate", 768, 2, 30.0, conversions=[row], maps=maps)]


def test_the_document_says_what_the_records_say():
    text = render_vision.DOCUMENT.read_text(encoding="utf-8")
    found = render_vision.recorded()
    for name in ("table3", "claims", "table4"):
        assert render_vision.table_in(text, name) == render_vision.PARTS[name](found)
    has_maps = any(record.metrics.get("maps") for record in found)
    assert (render_vision.table_in(text, "maps") == render_vision.NOTHING) == (not has_maps)


def test_tables_hold_every_row_with_its_seeds(records):
    table = render_vision.table3(records)
    lines = [line.split("|")[1:6] for line in table.splitlines() if line.startswith("| co")]
    assert [[cell.strip() for cell in line] for line in lines] == [
        ["concatenated", "768", "30.03 (30.00, 30.10, 30.00)", "50.03", "21.5 M"],
        ["concatenated", "192", "30.06 (30.06, 30.06)", "50.06", "18.9 M"],
        ["collaborative", "192", "33.00 (33.00, 33.00)", "53.00", "18.9 M"],
    ]
    assert "x 0.88" in table
    assert "Commit 0123456789ab; cuda (NVIDIA H200); torch 2.11.0." in table
    assert "50,000 training and 10,000 validation images of 200 classes" in table
    answers = render_vision.claims(records)
    assert "| At 192, heads that share are better than heads by themselves. | +2.94 | holds |" in answers
    assert "| Concatenated heads lose at a quarter, 192. | -0.03 | open: within what seeds differ by |" in answers
    converted = render_vision.table4(records)
    assert "| 96 | ours, refined | 256 | 29.50 | -0.50 | 50.00 | 20.00 M | x 0.93 | 0.012 | 3.2 |" in converted
    assert render_vision.table3([]) == render_vision.NOTHING


def test_maps_are_drawn_and_the_last_of_equal_runs_counts(records, tmp_path):
    shown = render_vision.maps(records, tmp_path / "maps.svg")
    assert "figures/maps.svg" in shown
    assert "paper 96" in (tmp_path / "maps.svg").read_text(encoding="utf-8")
    for one in (records[0], record("concatenate", 768, 0, 31.0)):
        append_record(tmp_path / "vision-runs.jsonl", one)
    (kept,) = render_vision.recorded(tmp_path)
    assert kept.metrics["top1"] == 31.0


def test_what_the_paper_printed_is_read_where_it_is(tmp_path):
    assert render_vision.published("table3", tmp_path / "none.yaml") == []
    path = tmp_path / "published.yaml"
    path.write_text('table3:\n  rows:\n    - {heads: concatenated, key_dim: "768", top1: "68.1"}\n', encoding="utf-8")
    assert render_vision.published("table3", path)[0]["top1"] == "68.1"
    assert render_vision.published("table9", path) == []


def test_images_are_packed_as_they_are_where_there_is_room_else_smaller(tmp_path):
    folder = write(tmp_path / "data")
    done = pack_images.pack([str(folder)], tmp_path / "whole", 1.0)
    assert done["train_format"] == "as they were"
    for split in ("train", "val"):
        own = cached_images([str(folder)], split, tmp_path / "cache", size=SIDE)
        packed = cached_images([str(tmp_path / "whole")], split, tmp_path / "cache", size=SIDE)
        assert torch.equal(own.pixels, packed.pixels)
        assert torch.equal(own.labels, packed.labels)
        assert packed.classes == CLASSES
    room = (done["train_bytes"] * 0.5 + done["val_bytes"]) / 2**20
    smaller = pack_images.pack([str(folder)], tmp_path / "smaller", room, train_images=18)
    assert smaller["train_format"].startswith("webp, quality")
    assert smaller["train_bytes"] + smaller["val_bytes"] <= room * 2**20
    again = cached_images([str(tmp_path / "smaller")], "train", tmp_path / "cache", size=SIDE)
    assert again.labels.bincount().tolist() == [6, 6, 6]
    with pytest.raises(ValueError, match="cannot be packed"):
        pack_images.pack([str(folder)], tmp_path / "tiny", 0.0001)
