"""From records of bench_quality.py to the tables in docs/quality.md; reads records only."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collab.records import RunRecord, read_records

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "benchmarks" / "results"
DOCUMENT = ROOT / "docs" / "quality.md"
README = ROOT / "README.md"
END = "<!-- end -->\n"
WHERE = ("device", "threads", "seed", "refinement", "views")
"""Parts of a record's config that do not tell two rows of a table apart: of such rows the last is shown."""


@dataclass(frozen=True)
class Score:
    """A column: the name in the records, the heading, and digits after the point."""

    name: str
    heading: str
    digits: int


SCORES = {
    "minilm": [Score("spearman", "Spearman", 4)],
    "budget": [Score("spearman", "Spearman", 4)],
    "vit": [
        Score("top1", "top-1 %", 2),
        Score("top5", "top-5 %", 2),
        Score("divergence", "divergence", 4),
        Score("changed", "changed %", 2),
    ],
    "albert": [Score("masked", "15 % masked", 4), Score("one_masked", "one masked", 4)],
}
"""The first score of each is the one whose difference to the original is shown; early records lack some others."""

EXAMPLES = {
    "minilm": "{:,} pairs of STS-B dev",
    "budget": "{:,} pairs of STS-B dev",
    "vit": "{:,} validation images of Tiny-ImageNet",
    "albert": "{:,} test reactions of USPTO-50k",
}


def record_file(name: str) -> Path:
    """Where the records of one table are kept."""
    return RECORDS / f"quality-{name}.jsonl"


def begin(name: str) -> str:
    """The line before a table."""
    return f"<!-- written by benchmarks/bench_quality.py: {name} -->\n"


def latest(records: list[RunRecord]) -> list[RunRecord]:
    """The last record of every row, in the order of methods and sizes.

    Of the largest set of examples only, and of refinement with the settings that were recorded last with as many
    inputs: the others are in the table of settings.
    """
    most = max(record.config["examples"] for record in records)
    settings = {
        record.config["calibration"]: record.config.get("refinement") for record in records if _is_refined(record)
    }
    rows: dict[tuple[Any, ...], RunRecord] = {}
    for record in records:
        is_last = record.config.get("refinement") == settings.get(record.config["calibration"])
        if record.config["examples"] == most and (is_last or not _is_refined(record)):
            rows[tuple(value for name, value in sorted(record.config.items()) if name not in WHERE)] = record
    return sorted(rows.values(), key=_order)


def _is_refined(record: RunRecord) -> bool:
    return bool(record.config.get("refinement"))


_METHODS = ("original", "unshared", "paper", "shared", "calibrated", "refined", "sparse")
_BUDGET_METHODS = ("uniform, calibrated", "budget, calibrated", "uniform, refined", "budget, refined")


def _order(record: RunRecord) -> tuple[float, int, int]:
    config = record.config
    methods = (*_METHODS, *_BUDGET_METHODS)
    place = methods.index(config["method"])
    if config["method"] == "original":
        return -1e9, 0, 0
    sizes = record.metrics["sizes"].values()
    group = -config["budget"] if config["budget"] else -sum(sizes) / len(sizes)
    if place >= len(_METHODS):  # a budget and its uniform size belong together
        group = -round(sum(sizes) / len(sizes) / 16)
    return group, place, -config["calibration"]


def render(name: str, records: list[RunRecord]) -> str:
    """The table, and where its numbers come from."""
    records = latest(records)
    scores = SCORES[name]
    originals = [record for record in records if record.config["method"] == "original"]
    if not originals:
        raise ValueError(f"the records of {name} must have the row original, got {len(records)} others")
    before = originals[0].metrics["scores"]
    heading = ["method", "shared_dim", "calibration inputs", *(score.heading for score in scores), "difference"]
    heading += ["attention parameters", "seconds", "decomposition", "refinement", "on"]
    lines = [heading, ["---"] * len(heading)]
    lines += [_cells(record, scores, before) for record in records]
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    return f"{table}\n\n{_legend(name, records)}\n"


def _cells(record: RunRecord, scores: list[Score], before: dict[str, float]) -> list[str]:
    config, metrics = record.config, record.metrics
    scored = metrics["scores"]
    values = [f"{scored[score.name]:.{score.digits}f}" if score.name in scored else "" for score in scores]
    main = scores[0]
    change = metrics["scores"][main.name] - before[main.name]
    original = config["method"] == "original"
    seconds = metrics.get("seconds", {})
    return [
        config["method"],
        "" if original else _size(record),
        _inputs(config),
        *values,
        "" if original else f"{change:+.{main.digits}f}",
        f"{metrics['attention_parameters']:,}",
        *(f"{seconds[part]:.1f}" if seconds.get(part) else "" for part in ("total", "decomposition", "refinement")),
        "" if original else _place(record),
    ]


def _size(record: RunRecord) -> str:
    config, sizes = record.config, list(record.metrics["sizes"].values())
    if config["budget"]:
        return f"{', '.join(map(str, sizes))} (budget {config['budget']:.3g})"
    few = config["dims_per_head"]
    return f"{sizes[0]}" + (f", {few} a head" if few else "")


def _inputs(config: dict[str, Any]) -> str:
    """How many inputs conversion saw, and in how many views where those are more than one."""
    count, views = config["calibration"], config.get("views", 1)
    return (f"{count:,}" + (f" in {views} views" if views > 1 else "")) if count else ""


def _place(record: RunRecord) -> str:
    config = record.config
    if config["device"] != "cpu":
        return "GPU"
    return f"CPU, {config['threads']} thread{'s' * (config['threads'] > 1)}"


def _legend(name: str, records: list[RunRecord]) -> str:
    examples = EXAMPLES[name].format(records[0].config["examples"])
    origins = [record.provenance for record in records]
    commits = sorted({_short(origin["commit"] or "unknown") for origin in origins})
    devices = sorted({origin["device"] for origin in origins})
    versions = sorted({f"{package} {version}" for origin in origins for package, version in origin["versions"].items()})
    return (
        f"{examples}. *Seconds*: the whole conversion, calibration included. *Attention parameters*: of the attention "
        f"modules. Commit {', '.join(commits)}; {'; '.join(devices)}; {', '.join(versions)}."
    )


def _short(commit: str) -> str:
    """A commit by its first letters, and whether the sources differed from it."""
    number, changed, _ = commit.partition("+changes")
    return number[:12] + changed


SETTINGS = "settings"
_SETTINGS_FROM = ("minilm", "vit", "vit-settings", "albert")
_SHOWN = ("steps", "joint_steps", "rate", "layer_weight", "batch_size", "precision")
"""Settings of refinement that differ between records."""


def render_settings(records: dict[str, list[RunRecord]]) -> str:
    """Every refined row there is a record of, with how it was refined; `records` by the name of their file."""
    lines = [["model", "shared_dim", "inputs", *_SHOWN, "held-back error before", "after", "difference", "seconds"]]
    lines.append(["---"] * len(lines[0]))
    found: list[RunRecord] = []
    for name, group in records.items():
        model = name.removesuffix("-settings")
        originals = [record for record in records.get(model, group) if record.config["method"] == "original"]
        for record in (record for record in group if record.metrics.get("refinement")):
            config, done, score = record.config, record.metrics["refinement"], SCORES[model][0]
            change = record.metrics["scores"][score.name] - originals[0].metrics["scores"][score.name]
            size = [_size(record), _inputs(config), *(_setting(done["settings"], key) for key in _SHOWN)]
            errors = [f"{done[when]:.4f}" for when in ("before", "after")]
            seconds = f"{done['seconds']:.0f} ({_place(record)})"
            lines.append([model, *size, *errors, f"{change:+.{score.digits}f}", seconds])
            found.append(record)
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    commits = sorted({_short(record.provenance["commit"] or "unknown") for record in found})
    return f"{table}\n\nCommit {', '.join(commits)}.\n"


def _setting(settings: dict[str, Any], name: str) -> str:
    value = settings.get(name, "auto")  # the precision could not be chosen at first
    return value if isinstance(value, str) else f"{value:g}"


GOALS = "goals"
_MAY_LOSE = {"minilm": {192: 0.001, 128: 0.001, 64: 0.003, 32: 0.008}, "vit": {128: 0.1, 96: 0.3, 64: 1.0}}
"""What refined conversions may lose of the first score, at most, by size: set before anything was measured."""


def render_goals(records: dict[str, list[RunRecord]]) -> str:
    """What refined conversions were to lose at most, and what they lost; `records` by the name of their file."""
    lines = [["model", "shared_dim", "calibration inputs", "may lose", "lost", "met"], ["---"] * 6]
    for name, goals in _MAY_LOSE.items():
        rows = latest(records[name])
        score = SCORES[name][0]
        before = next(row for row in rows if row.config["method"] == "original").metrics["scores"][score.name]
        for row in rows:
            if row.config["method"] != "refined" or row.config["shared_dim"] not in goals:
                continue
            allowed = goals[row.config["shared_dim"]]
            lost = round(before - row.metrics["scores"][score.name], score.digits)
            cells = [name, _size(row), _inputs(row.config), f"{allowed:g}", f"{lost:.{score.digits}f}"]
            lines.append([*cells, "yes" if lost <= allowed else "no"])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


SUMMARY = "summary"
_SUMMARISED = ("unshared", "paper", "shared", "calibrated", "refined")


def render_summary(records: list[RunRecord]) -> str:
    """Score of the sentence encoder by size and method, what a glance at README.md should show."""
    records = [record for record in latest(records) if record.config["dims_per_head"] is None]
    original, score = records[0], SCORES["minilm"][0]
    lines = [["shared_dim", "attention parameters", *_SUMMARISED], ["---:"] * (2 + len(_SUMMARISED))]
    whole = f"{original.metrics['scores'][score.name]:.{score.digits}f}"
    lines.append(["original", f"{original.metrics['attention_parameters']:,}", whole, *[""] * (len(_SUMMARISED) - 1)])
    sizes: dict[str, dict[str, RunRecord]] = {}
    for record in records[1:]:  # of calibrated rows with more and with fewer inputs the first, which saw the most
        sizes.setdefault(_size(record), {}).setdefault(record.config["method"], record)
    for size, found in sizes.items():
        cells = [f"{found[name].metrics['scores'][score.name]:.{score.digits}f}" for name in _SUMMARISED]
        lines.append([size, f"{found['refined'].metrics['attention_parameters']:,}", *cells])
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    shown = _legend("minilm", records).replace("*Seconds*: the whole conversion, calibration included. ", "")
    return f"{table}\n\n{shown}\n"


def table_in(document: str, name: str) -> str:
    """What stands between the markers of one table."""
    return document.split(begin(name))[1].split(END)[0]


def write_tables() -> None:
    """Put every table that has records between its markers."""
    text = DOCUMENT.read_text(encoding="utf-8")
    for name in SCORES:
        if record_file(name).exists():
            table = render(name, read_records(record_file(name)))
            text = text.replace(begin(name) + table_in(text, name) + END, begin(name) + table + END)
    files = {name: record_file(name) for name in _SETTINGS_FROM}
    table = render_settings({name: read_records(file) for name, file in files.items() if file.exists()})
    text = text.replace(begin(SETTINGS) + table_in(text, SETTINGS) + END, begin(SETTINGS) + table + END)
    if all(record_file(name).exists() for name in _MAY_LOSE):
        table = render_goals({name: read_records(record_file(name)) for name in _MAY_LOSE})
        text = text.replace(begin(GOALS) + table_in(text, GOALS) + END, begin(GOALS) + table + END)
    DOCUMENT.write_text(text, encoding="utf-8")
    readme = README.read_text(encoding="utf-8")
    if begin(SUMMARY) in readme:
        table = render_summary(read_records(record_file("minilm")))
        readme = readme.replace(begin(SUMMARY) + table_in(readme, SUMMARY) + END, begin(SUMMARY) + table + END)
        README.write_text(readme, encoding="utf-8")
