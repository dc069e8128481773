"""From records of the benchmarks of layers and their parts to docs/speed.md: its tables and its figure.

python benchmarks/speed_tables.py
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import bench_cpu_paths

from collab.bench_plot import draw_speed
from collab.records import RunRecord, read_records
from collab.speed_records import ORDINARY, best, case_of, groups, latest, series, size_name, size_of
from collab.table1 import HEADER, published, table1_cells

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENT = ROOT / "docs" / "speed.md"
FIGURE = ROOT / "docs" / "figures" / "speed.svg"
END = "<!-- end -->\n"
NOTHING = "Not measured yet.\n"

NAMES = {"auto": "chosen by itself", "chosen": "chosen by itself", "one key head": "one key head in ordinary kernels"}
"""How lines of a table are called."""

Render = Callable[[Sequence[RunRecord]], str]


def record_file(name: str) -> Path:
    """Where records of a benchmark are kept."""
    return RESULTS / f"{name}.jsonl"


def begin(name: str) -> str:
    """The line before a table."""
    return f"<!-- written by benchmarks/speed_tables.py: {name} -->\n"


def ratios(step: str) -> Render:
    """Time of the layer as it is used, by case and size, as a share of ordinary attention's."""

    def render(records: Sequence[RunRecord]) -> str:
        def lines(own: Sequence[RunRecord]) -> list[list[str]]:
            sizes = _sizes(own)
            table = [["batch x tokens", "ordinary ms", "by", *(size_name(size) for size in sizes)]]
            for (_, batch, tokens), of_case in groups(own, case_of).items():
                (ordinary,) = best(of_case, ORDINARY)
                found = {size_of(record): record for record in best(of_case, "collaborative", "auto")}
                cells = [_ratio(found.get(size)) for size in sizes]
                table.append([f"{batch} x {tokens:,}", _milliseconds(ordinary), _runs(ordinary), *cells])
            return table

        return _by_device([record for record in records if record.config["pass"] == step], lines)

    return render


def decoding(records: Sequence[RunRecord]) -> str:
    """Time of a step of decoding by case and size, and the share of the cache that is left."""

    def lines(own: Sequence[RunRecord]) -> list[list[str]]:
        table = [["sequences x tokens", "shared_dim", "ms", "ordinary ms", "by", "ratio", "runs", "cache"]]
        for (_, batch, tokens), of_case in groups(own, case_of).items():
            (ordinary,) = best(of_case, ORDINARY)
            for record in best(of_case, "collaborative", "auto"):
                share = record.metrics["cache_bytes"] / ordinary.metrics["cache_bytes"]
                table.append([
                    f"{batch} x {tokens:,}", size_name(size_of(record)), _milliseconds(record),
                    f"{record.metrics['baseline_milliseconds']:.3g}", _runs(ordinary), _ratio(record), _runs(record),
                    f"{share:.2f}",
                ])  # fmt: skip
        return table

    return _by_device([record for record in records if record.config["pass"] == "decode"], lines)


def layers(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Records of whole layers: steps of decoding have a table of their own."""
    return [record for record in records if record.config["pass"] != "decode"]


def ways(records: Sequence[RunRecord]) -> str:
    """Every way that was measured, by case and size."""

    def lines(own: Sequence[RunRecord]) -> list[list[str]]:
        sizes = _sizes(own)
        table = [["pass", "batch x tokens", "layer", *(size_name(size) for size in sizes)]]
        for (step, batch, tokens), of_case in groups(own, case_of).items():
            for name, figures in series(of_case):
                found = {size_of(record): record for record in figures}
                cells = [_ratio_and_way(found.get(size)) for size in sizes]
                table.append([step, f"{batch} x {tokens:,}", NAMES.get(name, f"`{name}`"), *cells])
        return table

    return _by_device(layers(records), lines)


def memory(records: Sequence[RunRecord]) -> str:
    """Peak memory of the layer as it is used, as a share of ordinary attention's."""

    def lines(own: Sequence[RunRecord]) -> list[list[str]]:
        sizes = _sizes(own)
        table = [["pass", "batch x tokens", "ordinary MiB", *(size_name(size) for size in sizes)]]
        for (step, batch, tokens), of_case in groups(own, case_of).items():
            (ordinary,) = best(of_case, ORDINARY)
            found = {size_of(record): record for record in best(of_case, "collaborative", "auto")}
            shares = [found[size].metrics["memory_ratio"] if size in found else None for size in sizes]
            cells = ["" if share is None else f"{share:.2f}" for share in shares]
            table.append([step, f"{batch} x {tokens:,}", f"{ordinary.metrics['peak_memory'] / 2**20:,.1f}", *cells])
        return table

    return _by_device(layers(records), lines)


def paper(records: Sequence[RunRecord]) -> str:
    """The paper's Table 1, on each device."""
    table = _by_device(records, lambda own: [list(HEADER), *table1_cells(own)])
    return table if table == NOTHING else f"{table}\nPaper: {published()['source']}.\n"


def cpu_paths(records: Sequence[RunRecord]) -> str:
    """How many times as long as the fastest implementation the chosen one takes on a CPU, and each plain one, at most.

    A line is all layers, masks and shared sizes of a kind. The choice is that of the present rule.
    """
    cases = [(case, times) for case, times in bench_cpu_paths.least(records) if case["what"] == "layer"]
    if not cases:
        return NOTHING
    kinds: dict[tuple[str, ...], list[dict[str, float]]] = {}
    for case, times in cases:
        kind = (
            case["dtype"], case["pass"], f"{case['batch']} x {case['queries']:,}",
            "some dimensions" if case["dims_per_head"] else "all dimensions",
        )  # fmt: skip
        best = min(times.values())
        ratios = {name: time / best for name, time in times.items()}
        kinds.setdefault(kind, []).append({"chosen": ratios[bench_cpu_paths.chosen(case)], **ratios})
    names = ["chosen", *bench_cpu_paths.PLAIN]
    heading = [
        "type",
        "pass",
        "batch x tokens",
        "heads use",
        "cases",
        *(NAMES.get(name, f"`{name}`") for name in names),
    ]
    rows = [heading, ["---"] * len(heading)]
    for kind, found in sorted(kinds.items(), key=lambda item: (item[0][0] != "float32", item[0])):
        most = [max(ratios[name] for ratios in found) for name in names]
        rows.append([*kind, str(len(found)), *(f"{ratio:.2f}" for ratio in most)])
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in rows)
    above = sum(ratios["chosen"] > bench_cpu_paths.PROMISED for found in kinds.values() for ratios in found)
    origin = records[-1].provenance
    versions = ", ".join(f"{name} {origin['versions'][name]}" for name in ("python", "torch"))
    commits = ", ".join(sorted({_short(record.provenance["commit"] or "unknown") for record in records}))
    told = f"{above} of {len(cases)} cases are above {bench_cpu_paths.PROMISED}."
    return f"{table}\n\n{told} {origin['device']}; commit {commits}; {versions}.\n"


def parts(records: Sequence[RunRecord]) -> str:
    """Microseconds of each part, its fastest way, and the least that the device allows in brackets; ours by ordinary's.

    The output projection is measured once, since it is the same for all.
    """

    def lines(own: Sequence[RunRecord]) -> list[list[str]]:
        table = [[
            "pass", "batch x tokens", "layer", "projection", "attention", "by", "output", "together", "ratio",
            "TFLOP/s of attention", "ratio at ordinary's",
        ]]  # fmt: skip
        for (step, batch, tokens), of_case in groups(own, case_of).items():
            ordinary = _fastest_parts([record for record in of_case if record.config["kind"] == ORDINARY])
            sizes = groups(of_case, lambda record: (record.config["kind"], *size_of(record)))
            for (kind, *_), of_layer in sizes.items():
                found = ordinary | (own_parts := _fastest_parts(of_layer))
                if "attention" not in own_parts:
                    continue  # then there is no whole
                attention, usual = found["attention"], ordinary["attention"]
                size = f" {size_name(size_of(attention))}" if attention.config["shared_dim"] else ""
                times = [_microseconds(found.get(part)) for part in PARTS]
                whole, theirs = (
                    sum(part.metrics["milliseconds"] for part in each.values()) for each in (found, ordinary)
                )
                rate, usual_rate = (part.metrics["flops_a_second"] for part in (attention, usual))
                # What would be left if only attention's rate were another.
                level = whole - attention.metrics["milliseconds"] * (1 - rate / usual_rate)
                table.append([
                    step, f"{batch} x {tokens:,}", kind + size, *times[:2], attention.config["implementation"],
                    times[2], f"{whole * 1e3:.1f}", f"{whole / theirs:.2f}", f"{rate / 1e12:.3g}",
                    f"{level / theirs:.2f}",
                ])  # fmt: skip
        return table

    table = _by_device(records, lines)
    if table == NOTHING:
        return table
    most = records[-1].metrics
    flops, size = most["most_flops_a_second"] / 1e12, most["most_bytes_a_second"] / 1e12
    return f"{table}\nA large product reached {flops:.3g} TFLOP/s, a large copy {size:.3g} TB/s.\n"


PARTS = ("projection", "attention", "output")


def _fastest_parts(records: Sequence[RunRecord]) -> dict[str, RunRecord]:
    """Of each part that was measured, the fastest."""
    by_time = sorted(records, key=lambda record: -record.metrics["milliseconds"])
    return {record.config["part"]: record for record in by_time}


def _microseconds(record: RunRecord | None) -> str:
    if record is None:
        return ""
    return f"{record.metrics['milliseconds'] * 1e3:.1f} ({record.metrics['floor_milliseconds'] * 1e3:.1f})"


MOST_KERNELS = 8
"""Of a layer that have a line; the rest share one."""


def kernels(records: Sequence[RunRecord]) -> str:
    """What runs in one pass of a layer, the longest first, and all of it together."""

    def lines(own: Sequence[RunRecord]) -> list[list[str]]:
        table = [["pass", "batch x tokens", "layer", "kernel", "calls", "microseconds"]]
        for (step, batch, tokens), of_case in groups(own, case_of).items():
            sizes = groups(of_case, lambda record: (record.config["kind"], size_of(record)))
            for (kind, size), of_layer in sizes.items():
                layer = kind + (f" {size_name(size)}" if size[0] else "")
                found = [(record.config["kernel"], record.metrics) for record in of_layer]
                found.sort(key=lambda item: -item[1]["microseconds"])
                rest = [metrics for _, metrics in found[MOST_KERNELS:]]
                every = [metrics for _, metrics in found]
                shown = [(f"`{name}`", [metrics]) for name, metrics in found[:MOST_KERNELS]]
                for name, several in [("all", every), *shown, *([("others", rest)] if rest else [])]:
                    calls, took = (sum(metrics[key] for metrics in several) for key in ("calls", "microseconds"))
                    table.append([step, f"{batch} x {tokens:,}", layer, name, f"{calls:.3g}", f"{took:.1f}"])
        return table

    return _by_device(records, lines)


GOALS: dict[tuple[str, int, int], dict[tuple[int, int], float]] = {
    ("inference", 32, 128): {(64, 0): 0.7, (128, 0): 0.8, (256, 0): 1.0, (384, 0): 1.2},
    ("inference", 32, 512): {
        (64, 0): 0.8, (128, 0): 1.0, (256, 0): 1.4, (128, 64): 1.0, (256, 64): 1.0, (384, 64): 1.0,
    },
    ("inference", 8, 2048): {(128, 64): 1.0, (256, 64): 1.0, (384, 64): 1.0},
    ("training", 32, 128): {(64, 0): 0.8, (128, 0): 0.9, (256, 0): 1.15, (384, 0): 1.35},
    ("decode", 64, 4096): {(128, 0): 0.7},
}  # fmt: skip
"""Pass, batch and tokens -> size -> the ratio that was aimed at on an H200."""


def goals(records: Sequence[RunRecord]) -> str:
    """Ratios beside those aimed at, bold where they are met."""
    drawn = [record for record in records if record.config["device"] != "cpu" and case_of(record) in GOALS]

    def lines(own: Sequence[RunRecord]) -> list[list[str]]:
        sizes = sorted({size for goal in GOALS.values() for size in goal}, key=lambda size: (size[1], size[0]))
        table = [["pass", "batch x tokens", *(size_name(size) for size in sizes)]]
        for case, goal in GOALS.items():
            of_case = [record for record in own if case_of(record) == case]
            found = {size_of(record): record.metrics["ratio"] for record in best(of_case, "collaborative", "auto")}
            cells = [_beside(found.get(size), goal.get(size)) for size in sizes]
            table.append([case[0], f"{case[1]} x {case[2]:,}", *cells])
        return table

    return _by_device(drawn, lines)


def _beside(ratio: float | None, goal: float | None) -> str:
    if goal is None:
        return ""
    if ratio is None:
        return f"at most {goal:.2f}"
    return f"{f'**{ratio:.3f}**' if ratio <= goal else f'{ratio:.3f}'} of {goal:.2f}"


TABLES: dict[str, tuple[str, Render]] = {
    "goals": ("attention", goals),
    "kernels": ("kernels", kernels),
    "inference": ("attention", ratios("inference")),
    "training": ("attention", ratios("training")),
    "decode": ("attention", decoding),
    "ways": ("attention", ways),
    "memory": ("attention", memory),
    "parts": ("parts", parts),
    "table1": ("table1", paper),
    "cpu": ("cpu-paths", cpu_paths),
}
"""Name -> the benchmark whose records it is of, and what writes it."""


def _sizes(records: Sequence[RunRecord]) -> list[tuple[int, int]]:
    """Dense ones first, then sparse ones."""
    return sorted({size_of(record) for record in records} - {(0, 0)}, key=lambda size: (size[1], size[0]))


def _milliseconds(record: RunRecord) -> str:
    return f"{record.metrics['milliseconds']:.3g}"


def _runs(record: RunRecord) -> str:
    config = record.config
    return f"{config['implementation']}{', compiled' if config['compiled'] else ''}"


def _ratio(record: RunRecord | None) -> str:
    if record is None:
        return ""
    ratio, floor = record.metrics["ratio"], record.metrics["flop_ratio"]
    return f"{f'**{ratio:.2f}**' if ratio < 1 else f'{ratio:.2f}'} ({floor:.2f})"


def _ratio_and_way(record: RunRecord | None) -> str:
    return "" if record is None else f"{record.metrics['ratio']:.2f} {_runs(record)}"


def _by_device(records: Sequence[RunRecord], lines: Callable[[Sequence[RunRecord]], list[list[str]]]) -> str:
    """A table a device, from what was measured there last, and where its numbers come from."""
    parts = []
    for group in groups(latest(records), _device_of).values():
        heading, *rows = lines(group)
        table = [heading, ["---"] * len(heading), *rows]
        parts.append("\n".join("| " + " | ".join(cells) + " |" for cells in table) + f"\n\n{_origin(group)}\n")
    return "\n".join(parts) or NOTHING


def _device_of(record: RunRecord) -> tuple[str, str, int | None]:
    return record.config["device"], record.config["dtype"], record.config["threads"]


def _origin(records: Sequence[RunRecord]) -> str:
    origins = [record.provenance for record in records]
    commits = sorted({_short(origin["commit"] or "unknown") for origin in origins})
    devices = sorted({origin["device"] for origin in origins})
    packages = {
        f"{name} {version}"
        for origin in origins
        for name, version in origin["versions"].items()
        if name in ("torch", "triton", "cuda", "python")
    }
    dtypes = sorted({record.config["dtype"] for record in records})
    return f"{', '.join(dtypes)}; commit {', '.join(commits)}; {'; '.join(devices)}; {', '.join(sorted(packages))}."


def _short(commit: str) -> str:
    """A commit by its first letters, and whether the sources differed from it."""
    number, changed, _ = commit.partition("+changes")
    return number[:12] + changed


def figure(records: Sequence[RunRecord]) -> str:
    """The figure's place in the document."""
    if not _drawn(records):
        return NOTHING
    alt = "Time of collaborative layers as a share of ordinary attention's along the shared size, a panel a case"
    return f"![{alt}](figures/{FIGURE.name})\n\n*{_origin(_drawn(records))}*\n"


def _drawn(records: Sequence[RunRecord]) -> list[RunRecord]:
    """The figure is of one device: a GPU if there are records of one."""
    by_device = groups(latest(layers(records)), _device_of)
    chosen = max(by_device, key=lambda device: device[0] != "cpu", default=None)
    return by_device[chosen] if chosen is not None else []


def digest(records: Sequence[RunRecord]) -> str:
    """What tells records from others; the drawing carries it."""
    text = json.dumps([record.to_dict() for record in records], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def draw(records: Sequence[RunRecord], path: Path) -> None:
    """Draw the figure, with the digest of the records that it is of."""
    draw_speed(_drawn(records), path)
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = "\n".join(line.rstrip() for line in text.splitlines())
    mark = f"<!-- drawn by benchmarks/speed_tables.py from records {digest(_drawn(records))} -->"
    path.write_text(text.replace("<svg ", f"{mark}\n<svg ", 1) + "\n", encoding="utf-8")


def table_in(document: str, name: str) -> str:
    """What stands between the markers of one table."""
    return document.split(begin(name))[1].split(END)[0]


def recorded(benchmark: str) -> list[RunRecord]:
    """All records of a benchmark, none if it was not run."""
    path = record_file(benchmark)
    return read_records(path) if path.exists() else []


def written() -> dict[str, str]:
    """Name -> what is to stand between its markers."""
    parts = {name: render(recorded(benchmark)) for name, (benchmark, render) in TABLES.items()}
    return parts | {"figure": figure(recorded("attention"))}


def main() -> None:
    """Draw the figure and put everything between its markers."""
    records = recorded("attention")
    if records:
        draw(records, FIGURE)
    text = DOCUMENT.read_text(encoding="utf-8")
    for name, part in written().items():
        text = text.replace(begin(name) + table_in(text, name) + END, begin(name) + part + END)
    DOCUMENT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
