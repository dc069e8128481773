"""From records of the GLUE recipe to docs/glue-results.md: the paper's table, its figure of recovery and of time.

python paper/render_glue.py

It reads `paper/results/glue` (JSON lines, and record.json of runs' folders), the paper's own numbers from
`paper/published.yaml`, and from `benchmarks/results` the records of decompositions beside TensorLy and of an ALBERT of
chemical reactions.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from glue_figures import draw_decomposition_time, draw_recovery
from glue_records import (
    RESULTS,
    ROOT,
    TASKS,
    Key,
    Result,
    collect,
    differences,
    origins,
    pretraining,
    published,
    published_model,
    read_rows,
    title_of,
)
from glue_settings import settings_of

from collab.records import RunRecord, read_records

DOCUMENT = ROOT / "docs" / "glue-results.md"
FIGURES = ROOT / "docs" / "figures"
TENSORLY = ROOT / "benchmarks" / "results" / "decomposition-tensorly.jsonl"
CHEMISTRY = ROOT / "benchmarks" / "results" / "quality-albert.jsonl"
END = "<!-- end -->\n"
NOTHING = "Not measured yet.\n"

NAMES = {
    "original": "original", "paper": "the paper's method", "shared": "ours", "calibrated": "ours, calibrated",
    "refined": "ours, refined", "unshared": "heads by themselves", "pruned": "heads pruned",
}  # fmt: skip
"""How methods are called."""


def begin(name: str) -> str:
    """The line before a part."""
    return f"<!-- written by paper/render_glue.py: {name} -->\n"


def table(results: Mapping[Key, Mapping[str, Result]], printed: Mapping[str, Any]) -> str:
    """A table a model: medians over seeds, least and greatest, and below them what the paper printed."""
    parts = []
    for model in dict.fromkeys(key[0] for key in results):
        lines = [["method", "key dimension", "stage", "parameters", *TASKS, "runs"]]
        for (own, method, size, stage), tasks in results.items():
            if own != model:
                continue
            parameters = max(result.parameters for result in tasks.values())
            runs = sorted({len(result.scores[0]) for result in tasks.values()})
            cells = [_cell(tasks.get(task)) for task in TASKS]
            count = "-".join(str(number) for number in dict.fromkeys((runs[0], runs[-1])))
            lines.append([NAMES[method], _size(size), stage, f"{parameters / 1e6:.2f} M", *cells, count])
        kind = published_model(model)
        for row in printed["glue"]["rows"]:
            if row["model"] == kind:
                stage = "fine-tuned again" if row["key_dim"] else "fine-tuned"
                cells = [row[task].replace("/", " / ") for task in TASKS]
                parameters = row["parameters"].replace("M", " M")
                lines.append([f"*{kind}, printed*", row["key_dim"] or "", stage, parameters, *cells, "3"])
        parts.append(f"**{title_of(model)}**\n\n{_markdown(lines)}{settings_of(results, model)}")
    return "\n".join(parts) or NOTHING


def lost(results: Mapping[Key, Mapping[str, Result]]) -> str:
    """A table a model: by how much scores differ from the original's, each run beside the original of its seed."""
    parts = []
    for model in dict.fromkeys(key[0] for key in results):
        first = results.get((model, "original", None, "fine-tuned"), {})
        lines = [["method", "key dimension", "stage", *TASKS]]
        for (own, method, size, stage), tasks in results.items():
            if own == model and method != "original":
                cells = [
                    _difference(differences(tasks[task], first[task])) if task in tasks and task in first else ""
                    for task in TASKS
                ]
                lines.append([NAMES[method], _size(size), stage, *cells])
        if len(lines) > 1:
            parts.append(f"**{title_of(model)}**\n\n{_markdown(lines)}")
    return "\n".join(parts) or NOTHING


GOALS = ((3, "converted"), (6, "converted"), (12, "fine-tuned again"))
"""Of which part of the key dimension, and when, refined heads were to lose no more than a point."""


def goals(results: Mapping[Key, Mapping[str, Result]]) -> str:
    """A line a model and goal: on which tasks refined heads lose no more than a point, and on which they lose more."""
    lines = [["model", "key dimension", "stage", "within a point", "not"]]
    for model in dict.fromkeys(key[0] for key in results):
        first = results.get((model, "original", None, "fine-tuned"), {})
        full = max((key[2] for key in results if key[0] == model and isinstance(key[2], int)), default=0)
        for part, stage in GOALS:
            tasks = results.get((model, "refined", full // part, stage), {})
            found = {task: differences(tasks[task], first[task]) for task in TASKS if task in tasks and task in first}
            lost = {task: statistics.median(values) for task, values in found.items() if values}
            if lost:
                kept, more = ([task for task in lost if (lost[task] >= -1) is wanted] for wanted in (True, False))
                cells = [title_of(model), f"{full // part}, 1/{part}", stage, ", ".join(kept)]
                lines.append([*cells, ", ".join(f"{task} ({lost[task]:+.1f})" for task in more)])
    return _markdown(lines) if len(lines) > 1 else NOTHING


def _difference(found: Sequence[float]) -> str:
    """The median, bold where no more than a point is lost, and the range."""
    if not found:
        return ""
    median = statistics.median(found)
    text = f"**{median:+.1f}**" if median >= -1 else f"{median:+.1f}"
    return f"{text} ({min(found):+.1f} to {max(found):+.1f})" if len(found) > 1 else text


def trained_here(records: Sequence[RunRecord]) -> str:
    """What the masked language models that were trained here had learnt by the end."""
    lines = [["text", "tokens", "steps of tokens", "parameters", "loss before, after", "accuracy before, after", "s"]]
    for record in records:
        config, metrics = record.config, record.metrics
        before, after = metrics["before"], metrics["after"]
        lines.append([
            ", ".join(Path(text).name for text in config["texts"]), f"{metrics['blocks'] * config['length']:,}",
            f"{metrics['steps']:,} of {config['batch_size'] * config['length']:,}",
            f"{metrics['parameters'] / 1e6:.2f} M", f"{before['loss']:.2f}, {after['loss']:.2f}",
            f"{before['accuracy']:.3f}, {after['accuracy']:.3f}", f"{metrics['training_seconds']:.0f}",
        ])  # fmt: skip
    if len(lines) == 1:
        return NOTHING
    return f"{_markdown(lines)}{_origin([record.provenance for record in records])}"


def chemistry(records: Sequence[RunRecord]) -> str:
    """How an ALBERT that is good at what it does bears the conversion; of a row that was measured again, the last."""
    row_of = ("method", "shared_dim", "dims_per_head", "calibration")
    records = list({tuple(record.config.get(name) for name in row_of): record for record in records}.values())
    lines = [["method", "key dimension", "calibration inputs", "masked tokens found, %", "difference"]]
    first = next((record for record in records if record.config["method"] == "original"), None)
    for record in sorted(records, key=lambda record: -(record.config["shared_dim"] or 10**9)):
        config, score = record.config, 100 * record.metrics["scores"]["masked"]
        lost = "" if first is None or record is first else f"{score - 100 * first.metrics['scores']['masked']:+.1f}"
        given = f"{config['calibration']:,}" if config["calibration"] else ""
        size = str(config["shared_dim"] or "")
        lines.append([NAMES.get(config["method"], config["method"]), size, given, f"{score:.1f}", lost])
    return f"{_markdown(lines)}{_origin([record.provenance for record in records])}" if len(lines) > 1 else NOTHING


def recovery(results: Mapping[Key, Mapping[str, Result]], folder: Path = FIGURES) -> str:
    """The figure's place, once it is drawn: a panel a model and task."""
    if not any(key[3] == "converted" for key in results):
        return NOTHING
    draw_recovery(results, NAMES, folder / "glue-recovery.svg")
    alt = "Score by key dimension, converted and fine-tuned again, by method, with heads pruned to as many parameters"
    return f"![{alt}](figures/glue-recovery.svg)\n"


def decomposition(
    tensorly: Sequence[RunRecord], results: Mapping[Key, Mapping[str, Result]], folder: Path = FIGURES
) -> str:
    """The figure of time by size, and a table of the layers that TensorLy decomposed too."""
    if not tensorly:
        return NOTHING
    draw_decomposition_time(tensorly, results, NAMES, folder / "glue-decomposition-time.svg")
    lines = [["model", "size", "ours, s", "error", "as good as TensorLy after, s", "TensorLy, s", "error"]]
    for record in tensorly:
        own, other = record.metrics, record.metrics["tensorly"]
        lines.append([
            str(record.config["weights"]["model"] if "weights" in record.config else record.config.get("model", "")),
            str(own["rank"]), f"{own['seconds']:.2f}", f"{own['error']:.4f}",
            f"{own['as_good']['seconds']:.2f}" if own.get("as_good") else "", f"{other['seconds']:.1f}",
            f"{other['error']:.4f}",
        ])  # fmt: skip
    where = sorted({record.provenance["device"] for record in tensorly})
    alt = "Seconds to decompose by key dimension, ours beside TensorLy's"
    return f"![{alt}](figures/glue-decomposition-time.svg)\n\n{_markdown(lines)}\n*{'; '.join(where)}*\n"


def _size(size: int | float | None) -> str:
    """A key dimension, or a share of the full one."""
    if size is None:
        return ""
    return f"{size:g} of full" if isinstance(size, float) else str(size)


def _cell(result: Result | None) -> str:
    """Median of each number, and of the first the least and greatest of the runs."""
    if result is None:
        return ""
    low, high = result.spread
    spread = f" ({low:.1f}-{high:.1f})" if len(result.scores[0]) > 1 else ""
    return " / ".join(f"{median:.1f}" for median in result.medians) + spread


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    head, *rest = ("| " + " | ".join(line) + " |" for line in lines)
    return "\n".join([head, "|" + " ---: |" * len(lines[0]), *rest]) + "\n"


def _origin(found: Sequence[Mapping[str, Any]]) -> str:
    if not found:
        return ""
    commits = sorted({_short(origin["commit"] or "unknown") for origin in found})
    devices = sorted({origin["device"] for origin in found})
    packages = sorted({f"{name} {version}" for origin in found for name, version in origin["versions"].items()})
    return f"\n*Commit {', '.join(commits)}; {'; '.join(devices)}; {', '.join(packages)}.*\n"


def _short(commit: str) -> str:
    """A commit's first characters, and whether the sources were others."""
    name, plus, changes = commit.partition("+")
    return f"{name[:12]}{plus}{changes}"


def written(folder: Path = RESULTS, figures: Path = FIGURES) -> dict[str, str]:
    """Name -> what is to stand between its markers; figures are drawn."""
    results = collect(read_rows(folder)) if folder.is_dir() else {}
    found = origins(folder) if results else []
    tensorly, others = (read_records(path) if path.exists() else [] for path in (TENSORLY, CHEMISTRY))
    return {
        "table": table(results, published()) + _origin(found),
        "what is lost": lost(results),
        "goals": goals(results),
        "pretraining": trained_here(pretraining(folder) if folder.is_dir() else []),
        "chemistry": chemistry(others),
        "recovery": recovery(results, figures),
        "decomposition time": decomposition(tensorly, results, figures),
    }


def part_in(document: str, name: str) -> str:
    """What stands between the markers of one part."""
    return document.split(begin(name))[1].split(END)[0]


def main() -> None:
    """Draw the figures and put everything between its markers."""
    text = DOCUMENT.read_text(encoding="utf-8")
    for name, part in written().items():
        text = text.replace(begin(name) + part_in(text, name) + END, begin(name) + part + END)
    draft = DOCUMENT.with_suffix(".draft")
    draft.write_text(text, encoding="utf-8")
    draft.replace(DOCUMENT)


if __name__ == "__main__":
    main()
