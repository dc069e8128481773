"""`collab bench`: how fast layers are on this machine, beside the fastest ordinary attention there is."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from collab import ops
from collab.analysis_plot import check_figure
from collab.bench_plot import draw_speed
from collab.command_options import read_device
from collab.commands import Debug, Json, _command, _print_json, _progress
from collab.records import RunRecord, read_records
from collab.rivals import DTYPES, Setting, Size
from collab.speed_records import COLLABORATIVE, size_name
from collab.sweep import Row, begin_run, sweep
from collab.table1 import HEADER, measure_table1, published, short_count, table1_cells

_WIDEST = 200
"""Columns of a table that goes to a file."""


@_command(
    "collab bench",
    "collab bench --shared-dim 64,128,256 --tokens 128,512 --batch 8 --threads 2",
    "collab bench --device cuda --training --shared-dim 128,256 --dims-per-head 64 --save speed.jsonl --plot speed.svg",
    "collab bench --device cuda --decode --tokens 4096 --batch 64 --shared-dim 128",
    "collab bench --table1",
)
def bench(
    width: Annotated[int | None, typer.Option(help="Of the layer's input and output.  [default: 768]")] = None,
    heads: Annotated[int | None, typer.Option(help="How many the layer has.  [default: 12]")] = None,
    shared_dim: Annotated[
        str | None,
        typer.Option(
            metavar="SIZES",
            help="Dimensions that all heads share, with commas between; once, twice and four times a head's size if "
            "not given.",
        ),
    ] = None,
    dims_per_head: Annotated[
        int | None, typer.Option(help="How many of the shared dimensions a head uses; all if not given.")
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="LENGTHS", help="Of a sequence, with commas between; with --decode, of the cache.  [default: 128]"
        ),
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences at once.  [default: 32]")] = None,
    training: Annotated[
        bool, typer.Option("--training/--inference", help="Measure forward and backward, or forward alone.")
    ] = False,
    decode: Annotated[
        bool, typer.Option("--decode", help="Measure attention of one new token over a cache of keys and values.")
    ] = False,
    causal: Annotated[bool, typer.Option("--causal", help="Tokens see those before them only.")] = False,
    table1: Annotated[
        bool, typer.Option("--table1", help="Measure the paper's Table 1, and print its V100 beside this machine.")
    ] = False,
    implementation: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help=f"What computes our layer: auto, {', '.join(ops.IMPLEMENTATIONS)}, or several with commas between.",
        ),
    ] = "auto",
    compile_: Annotated[
        bool, typer.Option("--compile", help="Measure layers made by torch.compile, too; the faster one counts.")
    ] = False,
    dtype: Annotated[
        str,
        typer.Option(
            metavar="DTYPE",
            help=f"Type of all numbers: auto, {', '.join(DTYPES)}; auto is float32 on a CPU, else bfloat16.",
        ),
    ] = "auto",
    device: Annotated[str, typer.Option(metavar="DEVICE", help="Where to compute: cpu, cuda, cuda:1, ...")] = "cpu",
    threads: Annotated[
        int | None, typer.Option(help="That a CPU computes with; as many as PyTorch takes if not given.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=2, help="Samples of each layer; their median is printed.")] = 25,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Add a record of every figure to this file of JSON lines.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw ratios to this .png, .svg or .pdf file.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure how fast collaborative layers are on this machine.

    One attention layer of any size, against ordinary attention made as fast as PyTorch can: one projection for queries,
    keys and values, and the fastest backend of scaled_dot_product_attention, found by trying all. A ratio below one is
    faster. All is measured in turn, on random weights, after our outputs were compared with the definition's.
    """
    given = {
        "--width": width, "--heads": heads, "--shared-dim": shared_dim, "--dims-per-head": dims_per_head,
        "--tokens": tokens, "--batch": batch, "--training": training, "--decode": decode, "--causal": causal,
    }  # fmt: skip
    given["--implementation"] = None if implementation == "auto" else implementation
    extra = [option for option, value in given.items() if value not in (None, False)]
    if table1 and extra:
        raise ValueError(f"--table1 must come without {', '.join(extra)}: its sizes are the paper's")
    if decode and (training or causal):
        raise ValueError(f"--decode must come without {'--training' if training else '--causal'}")
    place = read_device(device)
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"--dtype must be auto or one of {', '.join(DTYPES)}, got {dtype!r}")
    names = implementation.split(",")
    for name in names:
        ops.check_implementation(name)
    _check_files(save, plot)
    common: dict[str, Any] = {
        "width": width or 768, "num_heads": heads or 12, "batch": batch or 32, "causal": causal,
        "step": "decode" if decode else "training" if training else "inference",
        "dtype": _dtype(place) if dtype == "auto" else dtype,
        "device": device, "threads": threads, "repeats": repeats,
    }  # fmt: skip
    for name, value in (("--width", width), ("--heads", heads), ("--batch", batch), ("--threads", threads)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    settings = [Setting(**common, tokens=length) for length in _integers(tokens or "128", "--tokens")]
    failures: list[str] = []
    started = begin_run()

    def skipped(name: str, error: Exception) -> None:
        failures.append(f"{name} not measured: {' '.join(str(error).split())[:200]}")

    rows: list[Row] = []
    if table1:
        bars = {step: _progress(f"measuring {step}") for step in ("training", "inference")}
        rows += measure_table1(settings[0], is_compiled=compile_, skipped=skipped, progress=bars.get)
    else:
        sizes = _sizes(shared_dim, dims_per_head, settings[0])
        bar = _progress(*(f"measuring {setting.tokens} tokens" for setting in settings))
        for setting in settings:
            torch.compiler.reset()
            rows += sweep(
                setting, sizes, implementations=names, compile_ordinary=compile_, compile_ours=compile_,
                skipped=skipped, progress=bar,
            )  # fmt: skip
    records = [row.to_record("table1" if table1 else "attention", run=started) for row in rows]
    if plot is not None:
        draw_speed(records, plot)
    if save is not None:
        _append(save, records)
    for failure in failures:
        typer.echo(f"collab: {failure}", err=True)
    if as_json:
        _print_json({"records": [record.to_dict() for record in records], "not_measured": failures})
    else:
        _print_table1(records) if table1 else _print_rows(records)
        for what, path in (("drawn to", plot), ("saved to", save)):
            if path is not None:
                typer.echo(f"{what} {path}")


def _dtype(device: torch.device) -> str:
    return "bfloat16" if device.type == "cuda" else "float32"


def _integers(text: str, option: str) -> list[int]:
    """`128` or `128,512`."""
    try:
        found = [int(item) for item in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} must be integers with commas between, like 128,512, got {text!r}") from None
    if min(found) < 1:
        raise ValueError(f"{option} must be at least 1, got {min(found)}")
    return found


def _sizes(shared_dim: str | None, dims_per_head: int | None, setting: Setting) -> list[Size]:
    head = setting.size_of_head
    dims = [head, 2 * head, 4 * head] if shared_dim is None else _integers(shared_dim, "--shared-dim")
    if dims_per_head is None:
        return [(size, None) for size in dims]
    if not 1 <= dims_per_head <= min(dims):
        raise ValueError(
            f"--dims-per-head must be from 1 to the smallest --shared-dim {min(dims)}, got {dims_per_head}"
        )
    return [(size, dims_per_head) for size in dims]


def _check_files(save: Path | None, plot: Path | None) -> None:
    """Say now, not after all is measured, that something could not be written."""
    if plot is not None:
        check_figure(plot)
    for option, path in (("--save", save), ("--plot", plot)):
        if path is not None and (path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK)):
            raise ValueError(f"{option} must be a file in a directory that can be written to, got {path}")
    if save is not None and save.exists():
        read_records(save)


def _append(path: Path, records: Sequence[RunRecord]) -> None:
    """All of them, or none."""
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = "".join(json.dumps(record.to_dict(), allow_nan=False) + "\n" for record in records)
    whole = path.with_name(f".{path.name}.partial")
    whole.write_text(before + lines, encoding="utf-8")
    whole.replace(path)


def _print_rows(records: Sequence[RunRecord]) -> None:
    config, device = records[0].config, records[0].provenance["device"]
    what = f"{config['width']} wide, {config['num_heads']} heads, batch {config['batch']}, {config['pass']}"
    table = Table(title=f"{what}, {config['dtype']}, {device}", title_justify="left")
    decoding = config["pass"] == "decode"
    for name in ("tokens", "layer", "runs", "ms", "10 % to 90 %", "ratio", "FLOPs", "ratio", "peak MiB"):
        table.add_column(name, justify="left" if name in ("layer", "runs") else "right")
    table.add_column("cache MiB" if decoding else "parameters", justify="right")
    length = config["tokens"]
    for record in records:
        config, metrics = record.config, record.metrics
        if config["tokens"] != length:
            table.add_section()
            length = config["tokens"]
        last = _mebibytes(metrics["cache_bytes"]) if decoding else f"{metrics['parameters']:,}"
        table.add_row(
            f"{length:,}", _layer(config), _runs(config), f"{metrics['milliseconds']:.4g}",
            f"{metrics['milliseconds_low']:.4g} to {metrics['milliseconds_high']:.4g}", _ratio(metrics["ratio"]),
            short_count(metrics["flops"]), f"{metrics['flop_ratio']:.2f}", _mebibytes(metrics["peak_memory"]), last,
        )  # fmt: skip
    _console().print(table)


def _runs(config: dict[str, Any]) -> str:
    """What computes it, and whether that was chosen."""
    chosen = " (auto)" if config["kind"] == COLLABORATIVE and config["asked"] == "auto" else ""
    return f"{config['implementation']}{', compiled' if config['compiled'] else ''}{chosen}"


def _ratio(value: float) -> str:
    return f"[green]{value:.2f}[/green]" if value < 1 else f"{value:.2f}"


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.3g}"


def _layer(config: dict[str, Any]) -> str:
    if config["shared_dim"] is None:
        return str(config["kind"])
    return f"{config['kind']} {size_name((config['shared_dim'], config['dims_per_head'] or 0))}"


def _print_table1(records: Sequence[RunRecord]) -> None:
    config, printed = records[0].config, published()
    where = f"{records[0].provenance['device']}, {config['dtype']}"
    table = Table(title=f"Table 1: {config['tokens']} tokens, batch {config['batch']}, {where}", title_justify="left")
    for name in HEADER:
        table.add_column(name, justify="left" if name == "runs" else "right")
    for cells in table1_cells(records):
        table.add_row(*cells)
    _console().print(table)
    typer.echo(f"Paper: {printed['source']}. FLOPs: one pass, a multiplication with its addition.")


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_WIDEST)
