"""From records of the vision recipe to docs/vision.md: the paper's Tables 3 and 4 on Tiny-ImageNet, and attention maps.

python paper/render_vision.py

Reads `paper/results/vision*.jsonl` and the paper's own numbers from `paper/published.yaml`. Of what was not measured it
says so.
"""

import math
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vision_records import (
    ROOT,
    Converted,
    Records,
    converted,
    in_rows,
    published,
    recorded,
    side_by_side,
    trained,
)

from collab.recipes.attention_figure import draw_maps

DOCUMENT = ROOT / "docs" / "vision.md"
FIGURES = ROOT / "docs" / "figures"
END = "<!-- end -->\n"
NOTHING = "Not measured yet.\n"

METHODS = {
    "paper": "the paper's", "shared": "ours", "unshared": "heads by themselves", "calibrated": "ours, calibrated",
    "refined": "ours, refined", "sparse": "ours, sparse and refined",
}  # fmt: skip
HEADS = {"concatenate": "concatenated", "collaborative": "collaborative"}
ROWS = [("concatenate", 768), ("concatenate", 384), ("concatenate", 192), ("collaborative", 384),
        ("collaborative", 192)]  # fmt: skip
"""Rows of the paper's Table 3."""

GOALS = ((2, 3, 0.1), (1, 2, 0.3), (1, 3, 1.0), (1, 4, 0.5), (1, 12, 2.0))
"""A share of the full size, as numerator and denominator, and how many points of Acc@1 may be lost there at most."""


def begin(name: str) -> str:
    """The line before a part."""
    return f"<!-- written by paper/render_vision.py: {name} -->\n"


def table3(records: Records) -> str:
    """Accuracy, size and time of each row, mean over seeds and each one's; the paper's numbers beside them."""
    rows = in_rows(records)
    if not rows:
        return NOTHING
    printed = {(row["heads"], row["key_dim"]): row for row in published("table3")}
    full = max(one.metrics["parameters"] for own in rows.values() for one in own)
    lines = [["heads", "key dimension", "Acc@1 % (each seed)", "Acc@5 %", "parameters", "", "training s", "images/s",
              "waiting %", "paper: Acc@1", "Acc@5", "parameters"]]  # fmt: skip
    for (attention, key_dim), own in rows.items():
        metrics = [record.metrics for record in own]
        training = [one["train"] for one in metrics]
        paper = printed.get((HEADS[attention], str(key_dim)), {})
        lines.append([
            HEADS[attention], str(key_dim), _mean_and_each([one["top1"] for one in metrics]),
            f"{statistics.mean(one['top5'] for one in metrics):.2f}", f"{metrics[0]['parameters'] / 1e6:.1f} M",
            f"x {metrics[0]['parameters'] / full:.2f}", f"{statistics.mean(one['seconds'] for one in training):.0f}",
            f"{statistics.mean(one['images_per_second'] for one in training):,.0f}",
            f"{100 * statistics.mean(one['waiting'] for one in training):.1f}",
            paper.get("top1", ""), paper.get("top5", ""), paper.get("parameters", ""),
        ])  # fmt: skip
    missing = [f"{HEADS[attention]} {key_dim}" for attention, key_dim in ROWS if (attention, key_dim) not in rows]
    notes = [_settings(records), _origin(trained(records))]
    if missing:
        notes.insert(0, f"Not measured: {', '.join(missing)}.")
    return f"{_markdown(lines)}\n{' '.join(notes)}\n"


def claims(records: Records) -> str:
    """What the paper says of its table, and whether it holds here."""
    rows = in_rows(records)
    mean = {row: statistics.mean(one.metrics["top1"] for one in own) for row, own in rows.items()}
    seeds = [len(own) for own in rows.values()]
    spread = None  # which seeds of one row differ by, not known where there is one of each
    if max(seeds, default=0) > 1:
        spread = max(max(one) - min(one) for one in ([run.metrics["top1"] for run in own] for own in rows.values()))
    lines = []

    def say(text: str, first: tuple[str, int], second: tuple[str, int], matches: bool = False) -> None:
        if first not in mean or second not in mean:
            lines.append([text, "", "not measured"])
            return
        difference = mean[first] - mean[second]
        answer = "yes" if difference > 0 or (matches and difference == 0) else "no"
        if spread is not None and abs(difference) <= spread:
            answer = "yes: seeds differ by more" if matches else "undecided: seeds differ by more"
        lines.append([text, f"{difference:+.2f}", answer])

    if not rows:
        return NOTHING
    full = ("concatenate", 768)
    say("Concatenated heads lose nothing at half the key dimension, 384.", ("concatenate", 384), full, matches=True)
    say("Concatenated heads lose at a quarter, 192.", full, ("concatenate", 192))
    for size in (384, 192):
        shared, alone = ("collaborative", size), ("concatenate", size)
        say(f"At {size}, heads that share are better than heads by themselves.", shared, alone)
    say("Heads that share match the full model at a quarter, 192.", ("collaborative", 192), full, matches=True)
    known = "not known" if spread is None else f"up to {spread:.2f}"
    count = f"{min(seeds)}" if min(seeds) == max(seeds) else f"{min(seeds)} to {max(seeds)}"
    note = f"Differences of mean Acc@1 in points; seeds of a row, of which there are {count}, differ by: {known}."
    return f"{_markdown([['claim of the paper', 'difference here', 'answer'], *lines])}\n{note}\n"


def table4(records: Records) -> str:
    """Conversions without training, a table a model."""
    parts = [
        f"**{one.name}**\n\n{_markdown(_conversions(one))}\n{_judged(one, records)}\n" for one in converted(records)
    ]
    printed = published("table4")
    if parts and printed:
        lines = [["heads", "key dimension", "Acc@1 %", "Acc@5 %", "parameters", ""]]
        lines += [[row["heads"], row["key_dim"], row["top1"], row["top5"], row["parameters"], f"x {row['share']}"]
                  for row in printed]  # fmt: skip
        parts.append(f"**The paper's, of {printed[0]['model']} on ImageNet**\n\n{_markdown(lines)}")
    return "\n".join(parts) or NOTHING


def _conversions(one: Converted) -> list[list[str]]:
    original = one.original
    full = original["parameters"]
    lines = [["shared size", "method", "images", "Acc@1 %", "change", "Acc@5 %", "parameters", "", "moved", "s"]]
    lines.append(["", "original", "", f"{original['top1']:.2f}", "", f"{original['top5']:.2f}", f"{full / 1e6:.2f} M",
                  "x 1.00", "", ""])  # fmt: skip
    for row in one.rows:
        moved = row.get("moved")
        size = str(row["shared_dim"]) + (f", {row['dims_per_head']} a head" if row["dims_per_head"] else "")
        method = "any, exact" if row["shared_dim"] == one.full_dim else METHODS[row["method"]]
        lines.append([
            size, method, f"{row['inputs']:,}" if row["inputs"] else "",
            f"{row['top1']:.2f}", _change(row, original["data"]["val_images"]), f"{row['top5']:.2f}",
            f"{row['parameters'] / 1e6:.2f} M", f"x {row['parameters'] / full:.2f}",
            "" if moved is None else f"{moved:.3f}", f"{row['seconds']:.1f}",
        ])  # fmt: skip
    return lines


def _change(row: dict[str, Any], images: int) -> str:
    """Of Acc@1, with its standard error, which follows from how many images changed from right to wrong or back."""
    text = f"{row['change']:+.2f}"
    if "gained" not in row:
        return text
    return f"{text} ± {100 * math.sqrt(row['gained'] + row['lost']) / images:.2f}"


def _judged(one: Converted, records: Records) -> str:
    """On what conversions were judged, and in what company they were timed."""
    count = side_by_side(one.records, records)
    company = f" Up to {count} runs shared the device and its host." if count > 1 else ""
    return f"{one.original['data']['val_images']:,} validation images.{company} {_origin(one.records)}"


def goals(records: Records) -> str:
    """What conversions may lose at some shares of the full size, and what refined ones of the most images lost."""
    lines = []
    for one in converted(records):
        for share, of, allowed in GOALS:
            size = one.full_dim * share // of
            rows = [row for row in one.rows if row["shared_dim"] == size and row["method"] == "refined"]
            if rows:
                lost = 0.0 - max(rows, key=lambda row: row["inputs"])["change"]
                lines.append([one.name, f"{share}/{of}", size, allowed, f"{lost:.2f}",
                              "yes" if round(lost, 2) <= allowed else "no"])  # fmt: skip
    if not lines:
        return NOTHING
    heading = ["model", "share of the size", "shared size", "may lose", "lost", "met"]
    return f"{_markdown([heading, *lines])}\nPoints of Acc@1, of conversions refined on the most images.\n"


def maps(records: Records, folder: Path = FIGURES) -> str:
    """A figure of attention maps for each converted model; images are not in it."""
    parts = []
    for one in converted(records):
        if not one.maps:
            continue
        sizes = sorted({int(name.split()[1]) for name in one.maps if " " in name}, reverse=True)[-3:]
        wanted = ["original", *(f"{method} {size}" for size in sizes for method in ("paper", "refined"))]
        path = folder / f"vision-attention-{re.sub(r'[^a-z0-9]+', '-', one.name.lower())}.svg"
        draw_maps({name: one.maps[name] for name in wanted if name in one.maps}, path)
        path.write_text("\n".join(line.rstrip() for line in path.read_text(encoding="utf-8").splitlines()) + "\n",
                        encoding="utf-8")  # fmt: skip
        alt = "What the class token of the last layer attends to, an image a row: the original and converted models"
        parts.append(f"![{alt}](figures/{path.name})\n\n*{one.name}. {_origin(one.records)}*\n")
    return "\n".join(parts) or NOTHING


def _mean_and_each(values: Sequence[float]) -> str:
    each = ", ".join(f"{value:.2f}" for value in values)
    return f"{statistics.mean(values):.2f} ({each})"


def _settings(records: Records) -> str:
    """What all trainings had in common."""
    own = trained(records)
    config, data, done = own[-1].config, own[-1].metrics["data"], own[-1].metrics["train"]
    count = side_by_side(own, records)
    company = f" Up to {count} runs shared the device: seconds are of a share of it." if count > 1 else ""
    return (
        f"{data['train_images']:,} training and {data['val_images']:,} validation images of {data['classes']} classes, "
        f"{config['image_size']} x {config['image_size']}, patches of {config['patch_size']}; "
        f"{config['epochs']:g} epochs, {done['steps']:,} steps of {config['batch_size']}; "
        f"augmented on the {'device' if config['augment_on'] == 'device' else 'CPU'}.{company}"
    )


def _origin(records: Records) -> str:
    origins = [record.provenance for record in records]
    commits = sorted({_short(origin["commit"] or "unknown") for origin in origins})
    devices = sorted({origin["device"] for origin in origins})
    packages = {
        f"{name} {version}"
        for origin in origins
        for name, version in origin["versions"].items()
        if name in ("torch", "timm", "transformers", "python")
    }
    return f"Commit {', '.join(commits)}; {'; '.join(devices)}; {', '.join(sorted(packages))}."


def _short(commit: str) -> str:
    number, changed, _ = commit.partition("+changes")
    return number[:12] + changed


def _markdown(lines: Sequence[Sequence[Any]]) -> str:
    heading, *rows = lines
    table = [heading, ["---"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in table) + "\n"


PARTS: dict[str, Callable[[Records], str]] = {
    "table3": table3, "claims": claims, "table4": table4, "goals": goals, "maps": maps,
}  # fmt: skip
"""Name -> what writes it."""


def table_in(document: str, name: str) -> str:
    """What stands between the markers of a part."""
    return document.split(begin(name))[1].split(END)[0]


def main() -> None:
    """Put every part between its markers."""
    records = recorded()
    text = DOCUMENT.read_text(encoding="utf-8")
    for name, render in PARTS.items():
        text = text.replace(begin(name) + table_in(text, name) + END, begin(name) + render(records) + END)
    DOCUMENT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
