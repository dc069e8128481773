"""Measure the paper's Table 1 on this machine, keep a record a figure, and print it beside the paper's V100.

    python benchmarks/table1.py --output benchmarks/results/table1.jsonl --threads 2
    python benchmarks/table1.py --output benchmarks/results/table1.jsonl --device cuda --compile

One attention layer of BERT-base, 128 tokens, batch 32. `collab bench --table1` does the same and prints a better table.
"""

import argparse
from pathlib import Path

import torch

from collab.records import RunRecord, append_record
from collab.rivals import DTYPES, Setting
from collab.sweep import begin_run
from collab.table import format_table
from collab.table1 import HEADER, measure_table1, table1_cells


def tell(name: str, error: Exception) -> None:
    """Say what could not be measured."""
    print(f"{name} not measured: {type(error).__name__}: {' '.join(str(error).split())[:160]}", flush=True)


def run(options: argparse.Namespace) -> list[RunRecord]:
    """Measure every layer, append each figure's record, and return them."""
    setting = Setting(
        dtype=options.dtype or ("bfloat16" if options.device.startswith("cuda") else "float32"),
        device=options.device, threads=options.threads, repeats=options.repeats,
    )  # fmt: skip
    started, records = begin_run(), []
    for row in measure_table1(setting, is_compiled=options.compile, skipped=tell):
        print(f"{row.setting.step}, {row.rival.name}: {row.timing}, ratio {row.ratio:.3f}", flush=True)
        records.append(row.to_record("table1", run=started, commit=options.commit))
        append_record(options.output, records[-1])
    return records


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON lines to append to")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=list(DTYPES), help="float32 on a CPU, else bfloat16, if not given")
    parser.add_argument("--threads", type=int, help="of a CPU")
    parser.add_argument("--repeats", type=int, default=25, help="samples of each")
    parser.add_argument("--compile", action="store_true", help="measure layers made by torch.compile, too")
    parser.add_argument("--commit", help="that the sources are of, where there is no checkout")
    options = parser.parse_args()
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device must be cpu where there is no CUDA device, got {options.device}")
    print(format_table(HEADER, table1_cells(run(options))))


if __name__ == "__main__":
    main()
