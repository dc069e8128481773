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

PROVENANCE = {
    "seed": 0, "commit": "0123456789abcdef", "device": "cuda (NVIDIA H200)", "versions": {"torch": "2.11.0"},
    "time": "2026-11-19T21:00:00+00:00",
}  # fmt: skip


def record(attention, key_dim, seed, top1, settings=(), **more):
    config = vision.Config(
        data=("x",), attention=attention, key_dim=key_dim, seed=seed, image_size=64, patch_size=8,
        **{"epochs": 30.0, "batch_size": 512, **dict(settings)},
    )  # fmt: skip
    metrics = {
        "seconds": 150.0,
        "top1": top1, "top5": top1 + 20, "parameters": {384: 19_700_000, 192: 18_900_000}.get(key_dim, 21_500_000),
        "data": {"train_images": 50_000, "val_images": 10_000, "classes": 200},
        "train": {"seconds": 123.4, "images_per_second": 9876.5, "waiting": 0.012, "steps": 2910},
    }  # fmt: skip
    return RunRecord(name="vision", config=config.to_dict(), metrics=metrics | more, provenance=PROVENANCE)


def conversion(shared_dim, method, inputs, top1, **more):
    return {
        "method": method, "shared_dim": shared_dim, "inputs": inputs, "dims_per_head": None, "seconds": 3.25,
        "top1": top1, "top5": 50.0, "parameters": 20_000_000, "moved": 0.0123, **more,
    }  # fmt: skip


def of_conversions(sizes, top1=30.0, model="runs/vision/concatenated-768/model", **more):
    """A record of a trained model, converted; every row loses a hundredth of a point more than the one before."""
    rows = [
        conversion(size, method, inputs, top1 - 0.1 - place / 100)
        for place, (size, method, inputs) in enumerate(
            (size, *way) for size in sizes for way in (("refined", 2048), ("refined", 256), ("paper", 0))
        )
    ]
    maps = {"original": MAP} | {f"{way} {size}": MAP for size in sizes for way in ("paper", "refined")}
    settings = {"model": model, "epochs": 0.0, "pretrained": True, "convert_sizes": tuple(sizes)}
    made = record("concatenate", None, 0, top1, settings, conversions=rows, maps=maps, full_dim=768, **more)
    del made.metrics["train"]
    return made


MAP = [[[0.0, 0.5], [1.0, 0.25]]] * 2


@pytest.fixture
def records():
    found = [record("concatenate", 768, seed, 30 + seed / 10) for seed in (0, 1)]
    found += [record("collaborative", 192, seed, 33.0) for seed in (0, 1)]
    found += [record("concatenate", 192, seed, 30.06) for seed in (0, 1)]
    return [*found, of_conversions([384, 256]), of_conversions([192], top1=30.02), of_conversions([64])]


def test_the_document_says_what_the_records_say():
    text = render_vision.DOCUMENT.read_text(encoding="utf-8")
    found = render_vision.recorded()
    for name in ("table3", "claims", "table4", "goals"):
        assert render_vision.table_in(text, name) == render_vision.PARTS[name](found)
    has_maps = any(record.metrics.get("maps") for record in found)
    assert (render_vision.table_in(text, "maps") == render_vision.NOTHING) == (not has_maps)


def test_tables_hold_every_row_with_its_seeds(records):
    table = render_vision.table3(records)
    lines = [line.split("|")[1:6] for line in table.splitlines() if line.startswith("| co")]
    assert [[cell.strip() for cell in line] for line in lines] == [
        ["concatenated", "768", "30.05 (30.00, 30.10)", "50.05", "21.5 M"],
        ["concatenated", "192", "30.06 (30.06, 30.06)", "50.06", "18.9 M"],
        ["collaborative", "192", "33.00 (33.00, 33.00)", "53.00", "18.9 M"],
    ]
    assert "x 0.88" in table
    assert "Commit 0123456789ab; cuda (NVIDIA H200); torch 2.11.0." in table
    assert "50,000 training and 10,000 validation images of 200 classes" in table
    assert "Not measured: concatenated 384, collaborative 384." in table
    assert "Up to 9 runs shared the device: seconds are of a share of it." in table
    answers = render_vision.claims(records)
    assert "| At 192, heads that share are better than heads by themselves. | +2.94 | yes |" in answers
    assert "| Concatenated heads lose at a quarter, 192. | -0.01 | undecided: seeds differ by more |" in answers
    assert "| At 384, heads that share are better than heads by themselves. |  | not measured |" in answers
    assert "seeds of a row, of which there are 2, differ by: up to 0.10." in answers
    lost = render_vision.claims([record("concatenate", size, 0, 30 + size / 768) for size in (768, 384)])
    assert "| Concatenated heads lose nothing at half the key dimension, 384. | -0.50 | no |" in lost
    assert "of which there are 1, differ by: not known." in lost
    equal = render_vision.claims([record("concatenate", size, 0, 30.0) for size in (768, 384, 192)])
    assert "| Concatenated heads lose nothing at half the key dimension, 384. | +0.00 | yes |" in equal
    assert "| Concatenated heads lose at a quarter, 192. | +0.00 | no |" in equal
    assert render_vision.table3([]) == render_vision.claims([]) == render_vision.goals([]) == render_vision.NOTHING


def test_a_table_holds_trainings_of_equal_length_alone(records):
    tried = [record("concatenate", 768, seed, 9.0, {"max_steps": 60}) for seed in (0, 1, 2)]
    again = record("collaborative", 384, 0, 12.0, {"epochs": 10.0})
    assert (
        render_vision.table3([tried[0], *records, *tried[1:], again]).splitlines()[:5]
        == (render_vision.table3(records).splitlines()[:5])
    )


def test_conversions_of_one_model_are_one_table_whoever_made_them(records):
    elsewhere = of_conversions([384], top1=20.0)  # another training of that name: what it lost is of its own
    text = render_vision.table4([*records, of_conversions([256], model="vits/vit-ti"), elsewhere])
    assert text.count("**DeiT-B3, trained here**") == 2
    assert text.count("**vit-ti**") == 1
    table = text.split("**DeiT-B3, trained here**")[1]
    lines = [[cell.strip() for cell in line.split("|")[1:6]] for line in table.splitlines() if line.startswith("| ")]
    assert lines[2:6] == [
        ["", "original", "", "30.00", ""], ["384", "the paper's", "", "29.88", "-0.12"],
        ["384", "ours, refined", "256", "29.89", "-0.11"], ["384", "ours, refined", "2,048", "29.90", "-0.10"],
    ]  # fmt: skip
    assert ["192", "ours, refined", "2,048", "29.92", "-0.10"] in lines  # less than it scored in that run
    assert [line[0] for line in lines[6:]] == 3 * ["256"] + 3 * ["192"] + 3 * ["64"]
    assert "| 64 | ours, refined | 2,048 | 29.90 | -0.10 | 50.00 | 20.00 M | x 0.93 | 0.012 | 3.2 |" in table
    full = of_conversions([768, 64])
    full.metrics["conversions"][-1] |= {"gained": 20, "lost": 44}
    assert "| 29.85 | -0.15 ± 0.08 | 50.00 |" in render_vision.table4([full])
    assert "| 768 | any, exact |" in render_vision.table4([full])


def test_goals_are_of_what_was_refined_on_the_most_images(records):
    lines = [line for line in render_vision.goals(records).splitlines() if line.startswith("| DeiT")]
    assert lines == [
        "| DeiT-B3, trained here | 1/2 | 384 | 0.3 | 0.10 | yes |",
        "| DeiT-B3, trained here | 1/3 | 256 | 1.0 | 0.13 | yes |",
        "| DeiT-B3, trained here | 1/4 | 192 | 0.5 | 0.10 | yes |",
        "| DeiT-B3, trained here | 1/12 | 64 | 2.0 | 0.10 | yes |",
    ]
    far = record("concatenate", None, 0, 30.0, {"model": "far"}, full_dim=192, conversions=[
        conversion(128, "refined", 2048, 29.8), conversion(64, "refined", 256, 29.0),
    ])  # fmt: skip
    assert "| far | 2/3 | 128 | 0.1 | 0.20 | no |" in render_vision.goals([far])
    assert "| far | 1/3 | 64 | 1.0 | 1.00 | yes |" in render_vision.goals([far])


def test_maps_are_drawn_of_each_model_and_the_last_of_equal_runs_counts(records, tmp_path):
    shown = render_vision.maps([*records, of_conversions([384], model="vits/ViT_Ti")], tmp_path)
    assert "figures/vision-attention-deit-b3-trained-here.svg" in shown
    assert "figures/vision-attention-vit-ti.svg" in shown
    drawn = (tmp_path / "vision-attention-deit-b3-trained-here.svg").read_text(encoding="utf-8")
    assert "paper 64" in drawn
    assert "paper 384" not in drawn  # three sizes, the smallest
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
