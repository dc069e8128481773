"""From records of the vision recipe to docs/vision.md: the paper's Tables 3 and 4 on Tiny-ImageNet, and attention maps.

python paper/render_vision.py

Reads `paper/results/vision*.jsonl` and the paper's own numbers from `paper/published.yaml`.
"""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from collab.recipes.attention_figure import draw_maps
from collab.records import RunRecord, read_records

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "paper" / "results"
PUBLISHED = ROOT / "paper" / "published.yaml"
DOCUMENT = ROOT / "docs" / "vision.md"
FIGURE = ROOT / "docs" / "figures" / "vision-attention.svg"
END = "<!-- end -->\n"
NOTHING = "Not measured yet.\n"

METHODS = {
    "paper": "the paper's", "shared": "ours", "unshared": "heads by themselves", "calibrated": "ours, calibrated",
    "refined": "ours, refined", "sparse": "ours, sparse and refined",
}  # fmt: skip
HEADS = {"concatenate": "concatenated", "collaborative": "collaborative"}

Records = Sequence[RunRecord]


def begin(name: str) -> str:
    """The line before a part."""
    return f"<!-- written by paper/render_vision.py: {name} -->\n"


def recorded(folder: Path = RESULTS) -> list[RunRecord]:
    """All records of the recipe; of runs with the same settings the last."""
    found: dict[str, RunRecord] = {}
    for path in sorted(folder.glob("vision*.jsonl")) if folder.is_dir() else []:
        for record in read_records(path):
            if record.name == "vision":
                where = {"data", "cache_folder", "workers"}
                found[repr(sorted((k, v) for k, v in record.config.items() if k not in where))] = record
    return list(found.values())


def published(table: str, path: Path = PUBLISHED) -> list[dict[str, str]]:
    """The rows the paper printed, none where they are not at hand."""
    if not path.exists():
        return []
    import yaml

    read = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    rows: list[dict[str, str]] = (read.get(table) or {}).get("rows", [])
    return rows


def trained(records: Records) -> list[RunRecord]:
    """Trainings of the rows of Table 3: DeiT-B3."""
    return [record for record in records if "train" in record.metrics and record.config["model"] == "deit-b3"]


def row_of(record: RunRecord) -> tuple[str, int]:
    """Kind of heads and key dimension."""
    width = record.config["width"] or 768
    return record.config["attention"], record.config["key_dim"] or width


def in_rows(records: Records) -> dict[tuple[str, int], list[RunRecord]]:
    """Runs that differ in their seed alone together: ordinary heads first, large sizes first."""
    found: dict[tuple[str, int], list[RunRecord]] = {}
    for record in sorted(trained(records), key=lambda one: (row_of(one)[0] != "concatenate", -row_of(one)[1])):
        found.setdefault(row_of(record), []).append(record)
    return found


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
    return f"{_markdown(lines)}\n{_settings(trained(records))} {_origin(trained(records))}\n"


def claims(records: Records) -> str:
    """What the paper says of its table, and whether it holds here."""
    rows = in_rows(records)
    mean = {row: statistics.mean(one.metrics["top1"] for one in own) for row, own in rows.items()}
    own_spread = [max(v) - min(v) for v in ([one.metrics["top1"] for one in own] for own in rows.values())]
    spread = max(own_spread, default=0.0)
    lines = []

    def say(text: str, first: tuple[str, int], second: tuple[str, int], matches: bool = False) -> None:
        if first in mean and second in mean:
            difference = mean[first] - mean[second]
            if abs(difference) <= spread:
                answer = "holds: within what seeds differ by" if matches else "open: within what seeds differ by"
            else:
                answer = "holds" if difference > 0 else "does not hold"
            lines.append([text, f"{difference:+.2f}", answer])

    full = ("concatenate", 768)
    say("Concatenated heads lose nothing at half the key dimension, 384.", ("concatenate", 384), full, matches=True)
    say("Concatenated heads lose at a quarter, 192.", full, ("concatenate", 192))
    for size in (384, 192):
        shared, alone = ("collaborative", size), ("concatenate", size)
        say(f"At {size}, heads that share are better than heads by themselves.", shared, alone)
    say("Heads that share match the full model at a quarter, 192.", ("collaborative", 192), full, matches=True)
    if not lines:
        return NOTHING
    runs = min(len(own) for own in rows.values())
    note = (
        f"Differences of mean Acc@1 in points. With {runs} seeds a row, seeds of one row differ by up to {spread:.2f}."
    )
    return f"{_markdown([['claim of the paper', 'difference here', 'answer'], *lines])}\n{note}\n"


def table4(records: Records) -> str:
    """Conversions without training, a table a model."""
    parts = []
    for record in records:
        metrics = record.metrics
        if not metrics.get("conversions"):
            continue
        lines = [["shared size", "method", "images", "Acc@1 %", "change", "Acc@5 %", "parameters", "", "moved", "s"]]
        full = metrics["parameters"]
        lines.append(["", "original", "", f"{metrics['top1']:.2f}", "", f"{metrics['top5']:.2f}", f"{full / 1e6:.2f} M",
                      "x 1.00", "", ""])  # fmt: skip
        for row in metrics["conversions"]:
            moved = row.get("moved")
            size = str(row["shared_dim"]) + (f", {row['dims_per_head']} a head" if row["dims_per_head"] else "")
            lines.append([
                size, METHODS[row["method"]], f"{row['inputs']:,}" if row["inputs"] else "",
                f"{row['top1']:.2f}", f"{row['top1'] - metrics['top1']:+.2f}", f"{row['top5']:.2f}",
                f"{row['parameters'] / 1e6:.2f} M", f"x {row['parameters'] / full:.2f}",
                "" if moved is None else f"{moved:.3f}", f"{row['seconds']:.1f}",
            ])  # fmt: skip
        parts.append(f"**{_model_name(record)}**\n\n{_markdown(lines)}\n{_origin([record])}\n")
    printed = published("table4")
    if parts and printed:
        lines = [["heads", "key dimension", "Acc@1 %", "Acc@5 %", "parameters", ""]]
        lines += [[row["heads"], row["key_dim"], row["top1"], row["top5"], row["parameters"], f"x {row['share']}"]
                  for row in printed]  # fmt: skip
        parts.append(f"**The paper's, of {printed[0]['model']} on ImageNet**\n\n{_markdown(lines)}")
    return "\n".join(parts) or NOTHING


def maps(records: Records, path: Path = FIGURE) -> str:
    """The figure of attention maps, drawn from the last record that has them; images are not in it."""
    found = [record for record in records if record.metrics.get("maps")]
    if not found:
        return NOTHING
    (record,) = found[-1:]
    all_maps = record.metrics["maps"]
    sizes = sorted({int(name.split()[1]) for name in all_maps if " " in name}, reverse=True)[1:4]
    wanted = ["original", *(f"{method} {size}" for size in sizes for method in ("paper", "refined"))]
    draw_maps({name: all_maps[name] for name in wanted if name in all_maps}, path)
    path.write_text("\n".join(line.rstrip() for line in path.read_text(encoding="utf-8").splitlines()) + "\n",
                    encoding="utf-8")  # fmt: skip
    alt = "What the class token of the last layer attends to, an image a row: the original and converted models"
    return f"![{alt}](figures/{path.name})\n\n*{_model_name(record)}. {_origin([record])}*\n"


def _model_name(record: RunRecord) -> str:
    name = Path(record.config["model"]).name
    if name == "model":  # the directory in a run's folder
        name = Path(record.config["model"]).parent.name
    return {"concatenated-768": "DeiT-B3, trained here"}.get(name, name)


def _mean_and_each(values: Sequence[float]) -> str:
    each = ", ".join(f"{value:.2f}" for value in values)
    return f"{statistics.mean(values):.2f} ({each})"


def _settings(records: Records) -> str:
    """What all trainings had in common."""
    config, data = records[-1].config, records[-1].metrics["data"]
    done = records[-1].metrics["train"]
    return (
        f"{data['train_images']:,} training and {data['val_images']:,} validation images of {data['classes']} classes, "
        f"{config['image_size']} x {config['image_size']}, patches of {config['patch_size']}; "
        f"{config['epochs']:g} epochs, {done['steps']:,} steps of {config['batch_size']}; "
        f"augmented on the {'device' if config['augment_on'] == 'device' else 'CPU'}."
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


PARTS: dict[str, Callable[[Records], str]] = {"table3": table3, "claims": claims, "table4": table4, "maps": maps}
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
