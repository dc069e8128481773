"""Measure what converting a real sentence encoder loses, keep the record, and write the table in README.md from it.

    python benchmarks/readme_table.py run --glue glue.tar.xz    measure, append a record, rewrite the table
    python benchmarks/readme_table.py render                    rewrite the table from the last record

The archive, any tar file with STS-B's development set in glue/STS-B/sts-dev.csv, adds the correlation with human
judgements; without it the table has no such columns.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from collab.config import CollaborativeConfig
from collab.demo import PACKAGE, SizeResult, convert_sizes, demo_folder
from collab.records import RunRecord, append_record, provenance, read_records
from collab.sentences import SENTENCES
from collab.sources import open_model
from collab.swap import count_parameters

sys.path.insert(0, str(Path(__file__).parent))  # for when this file is not run but loaded by its path

from real_data import Pairs, read_pairs, spearman
from real_data import ranks as _ranks  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "benchmarks" / "results" / "minilm-conversion.jsonl"
README = ROOT / "README.md"
BEGIN, END = "<!-- written by benchmarks/readme_table.py -->\n", "<!-- end -->\n"
SIZES = (384, 256, 192, 128, 64, 32)


def measure(sizes: tuple[int, ...] = SIZES, pairs: Pairs | None = None) -> RunRecord:
    """Convert the model to every size, with the default settings, and measure each."""
    folder = demo_folder()
    model = open_model(str(folder))
    settings = CollaborativeConfig(shared_dim=sizes[0]).to_dict()
    del settings["shared_dim"]
    before = {"parameters": count_parameters(model), "spearman": _spearman(model, folder, pairs)}
    rows = []
    for result, converted, unshared in convert_sizes(model, folder, sizes, settings["max_iterations"]):
        scores = {"spearman": _spearman(converted, folder, pairs), "unshared": _spearman(unshared, folder, pairs)}
        rows.append(_row(result, scores))
        print(rows[-1], flush=True)
    before["attention_parameters"] = sum(site.parameters_before for site in result.report.sites)
    config = {"model": PACKAGE, "sizes": list(sizes), "settings": settings, "sentences": len(SENTENCES)}
    return RunRecord(
        name="minilm-conversion",
        config=config | {"pairs": len(pairs or [])},
        metrics={"original": before, "sizes": rows},
        provenance=provenance(seed=settings["seed"]),
    )


def render(record: RunRecord) -> str:
    """The table, and what its columns mean."""
    has_scores = record.config["pairs"] > 0
    header = ["shared_dim", "attention parameters", "error, mean (max)", "cosine", "cosine, unshared"]
    header += ["STS-B", "STS-B, unshared"] if has_scores else []
    original = record.metrics["original"]
    scores = [_number(original["spearman"]), ""] if has_scores else []
    rows = [["original", f"{original['attention_parameters']:,}", "", "", "", *scores]]
    for size in record.metrics["sizes"]:
        errors = size["errors"]
        scores = [_number(size["spearman"][name]) for name in ("spearman", "unshared")] if has_scores else []
        rows.append(
            [
                str(size["shared_dim"]),
                f"{size['attention_parameters']:,}",
                f"{_number(sum(errors) / len(errors))} ({_number(max(errors))})",
                _number(size["cosine"]),
                _number(size["unshared_cosine"]),
                *scores,
            ]
        )
    lines = ["| " + " | ".join(cells) + " |" for cells in [header, ["---:"] * len(header), *rows]]
    return "\n".join(lines) + f"\n\n{_legend(record, has_scores)}\n"


def table_in(readme: str) -> str:
    """What stands between the markers."""
    return readme.split(BEGIN)[1].split(END)[0]


def write_table(record: RunRecord) -> None:
    """Put the table between the markers of README.md."""
    text = README.read_text(encoding="utf-8")
    README.write_text(text.replace(BEGIN + table_in(text) + END, BEGIN + render(record) + END), encoding="utf-8")


def _row(result: SizeResult, scores: dict[str, float | None]) -> dict[str, Any]:
    return {
        "shared_dim": result.shared_dim,
        "parameters": result.report.parameters_after,
        "attention_parameters": sum(site.parameters_after for site in result.report.sites),
        "errors": result.errors,
        "cosine": result.fidelity.pooled_cosine,
        "unshared_cosine": result.unshared.pooled_cosine,
        "spearman": scores,
        "seconds": sum(site.seconds for site in result.report.sites),
    }


def _legend(record: RunRecord, has_scores: bool) -> str:
    config, origin = record.config, record.provenance
    scores = (
        " *STS-B*: Spearman correlation between the cosine of two sentences' embeddings and people's judgement of how "
        f"alike they are, {config['pairs']:,} dev pairs."
    )
    versions = ", ".join(f"{name} {version}" for name, version in origin["versions"].items() if name != "timm")
    return (
        f"`{config['model'].replace('_', '-')}`, at most {config['settings']['max_iterations']} sweeps, weights "
        f"alone: no data, no training. *Attention parameters*: of the query, key and value projections and the mixing; "
        f"the output projection is not among them. *Error*: of a layer's query/key products, relative. "
        f"*Cosine*: between sentence embeddings before and after, mean over {config['sentences']} sentences."
        f"{scores if has_scores else ''} *Unshared*: every head truncated by itself "
        f"(SVD) to as many dimensions in all. "
        f"Commit {(origin['commit'] or 'unknown')[:12]}, {origin['device']}, {versions}."
    )


def _number(value: float) -> str:
    return f"{value:.4f}"


def _spearman(model: nn.Module, folder: Path, pairs: Pairs | None) -> float | None:
    return spearman(model, folder, pairs) if pairs else None


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run", help="measure, append a record, rewrite the table")
    run.add_argument("--glue", type=Path, help="archive that holds glue/STS-B/sts-dev.csv")
    run.add_argument("--threads", type=int, default=1, help="threads to compute with")
    verbs.add_parser("render", help="rewrite the table from the last record")
    options = parser.parse_args()
    if options.verb == "run":
        torch.set_num_threads(options.threads)
        append_record(RECORDS, measure(pairs=read_pairs(options.glue) if options.glue else None))
    write_table(read_records(RECORDS)[-1])


if __name__ == "__main__":
    main()
