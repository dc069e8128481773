"""`collab train`: run a training recipe. Its options are the fields of the recipe's config, and so is their help."""

import dataclasses
import inspect
import math
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from collab.commands import Debug, Json, _examples, _print_json, _reported, app
from collab.recipes import available, processes, recipe_named, train
from collab.recipes.many import DONE, Run, plan_runs, record_of, run_many
from collab.recipes.run_board import RunBoard
from collab.recipes.settings import read_config
from collab.records import append_record, read_records
from collab.table import format_table

trainings = typer.Typer(
    rich_markup_mode=None, add_completion=False, no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
app.add_typer(trainings, name="train", help="Train models by recipe: each a task of the paper, or one to prepare it.")

Settings = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings as KEY=VALUE; the same as the options.")
]
ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="YAML file of settings.")]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="FOLDER", help="Folder of the run; a run that was stopped goes on when started again."
    ),
]
Results = Annotated[
    Path | None, typer.Option("--results", metavar="FILE", help="Append the record to this file of JSON lines.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]


def read_pairs(pairs: list[str] | None) -> dict[str, str]:
    """`KEY=VALUE` texts as a mapping."""
    found: dict[str, str] = {}
    for pair in pairs or []:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ValueError(f"a setting must be KEY=VALUE, got {pair!r}")
        found[key.strip().replace("-", "_")] = value
    return found


@trainings.command(
    "many",
    epilog=_examples(
        "collab train many paper/configs/glue/minilm-*.yaml data=glue.tar.xz --out runs --jobs 8 --split seeds",
        "collab train many paper/configs/*/*.yaml --out runs --results paper/results/all.jsonl --devices 0,1 --jobs 8",
    ),
)
@_reported
def many(
    configs: Annotated[
        list[str],
        typer.Argument(metavar="FILE... [KEY=VALUE]...", help="YAML files in folders named as recipes, and settings."),
    ],
    out: Out = None,
    results: Results = None,
    jobs: Annotated[int, typer.Option(min=1, help="How many at a time.")] = 4,
    split: Annotated[
        str | None, typer.Option(metavar="SETTING", help="One run for each of its values: seeds, for instance.")
    ] = None,
    minutes: Annotated[float | None, typer.Option(min=0, help="Stop after so many; what is done is kept.")] = None,
    retries: Annotated[int, typer.Option(min=0, help="How often one that failed is started again.")] = 1,
    devices: Annotated[str | None, typer.Option(metavar="0,1,...", help="CUDA devices to spread them over.")] = None,
    debug: Debug = False,
) -> None:
    """Run many trainings side by side, each in its own process.

    Those that are done, or whose record is in the file of results, are not run again, so the same command goes on after
    it was stopped. Of runs that are stopped, the results so far are recorded where their recipe keeps them.
    """
    if out is None:
        raise ValueError("--out must name the folder of the runs, got none")
    settings = read_pairs([item for item in configs if "=" in item])
    known = read_records(results) if results and results.is_file() else []
    runs = plan_runs([Path(item) for item in configs if "=" not in item], settings, out, split=split, known=known)
    if not runs:
        raise ValueError("name at least one config file, got none")
    board, before = RunBoard(runs, out), signal.signal(signal.SIGTERM, _stop)

    def keep(run: Run) -> None:
        record = record_of(run)
        if results is not None and record is not None and record not in known:
            append_record(results, record)
            known.append(record)

    def changed(every: Sequence[Run], run: Run | None) -> None:
        board.changed(every, run)
        if run is not None and run.state == DONE:
            keep(run)

    try:
        with_all = run_many(
            runs, jobs=jobs, retries=retries, devices=devices.split(",") if devices else (),
            seconds=math.inf if minutes is None else 60 * minutes, changed=changed,
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGTERM, before)
        board.close()
        for run in runs:
            keep(run)
    typer.echo(board.summary())
    if not with_all:
        raise typer.Exit(1)


def _stop(number: int, frame: object) -> None:
    """End as after Ctrl-C: the trainings are ended too, and what they did is recorded."""
    raise KeyboardInterrupt


def _run(config_class: type[Any], given: dict[str, Any]) -> None:
    """Do what the command line says."""
    names = [field.name for field in dataclasses.fields(config_class)]
    options = {name: given[name] for name in names if given[name] is not None}
    config = read_config(config_class, given["config_file"], options | read_pairs(given["settings"]))
    if given["out"] is None:
        raise ValueError("--out must name the folder of the run, got none")
    was_done = (given["out"] / "record.json").is_file()
    record = train(config, given["out"], progress=not given["quiet"])
    if not processes.is_main():
        return
    if given["results"] is not None and not was_done:
        append_record(given["results"], record)
    if given["as_json"]:
        _print_json(record.to_dict())
    else:
        typer.echo(shown(record.metrics))


def shown(metrics: dict[str, Any]) -> str:
    """What a person wants to see of a record's metrics; lists of numbers, and rows that have medians, are left out."""
    lines, tables = [], []
    for name, value in metrics.items():
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            if name != "rows" or "medians" not in metrics:
                header = list(dict.fromkeys(key for row in value for key in row))
                cells = [["" if row.get(key) is None else row[key] for key in header] for row in value]
                tables.append(f"{name}\n{format_table(header, cells)}")
        elif isinstance(value, dict):
            lines += [f"{name} {key}: {_number(one)}" for key, one in value.items() if not isinstance(one, list | dict)]
        elif not isinstance(value, list):
            lines.append(f"{name}: {_number(value)}")
    return "\n".join([*lines, *tables])


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _register(name: str, module: ModuleType) -> None:
    """Make a recipe a subcommand."""
    fixed = {
        "settings": Settings, "config_file": ConfigFile, "out": Out, "results": Results, "quiet": Quiet,
        "as_json": Json, "debug": Debug,
    }  # fmt: skip
    hints: dict[str, Any] = dict(fixed)
    for field in dataclasses.fields(module.Config):
        hints[field.name] = _option(field)
    defaults = {"quiet": False, "as_json": False, "debug": False}

    def command(**given: Any) -> None:
        _run(module.Config, given)

    command.__doc__ = (module.__doc__ or "").strip()
    made: Any = _reported(command)
    made.__name__ = name
    made.__annotations__ = hints
    made.__signature__ = inspect.Signature(
        [
            inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(key), annotation=hint)
            for key, hint in hints.items()
        ]
    )
    examples: list[str] = getattr(module, "EXAMPLES", [f"collab train {name} --out runs/{name}"])
    register: Callable[[Any], Any] = trainings.command(name, epilog=_examples(*examples))
    register(made)


def _option(field: "dataclasses.Field[Any]") -> Any:
    """A config's field as an option: read as text, so that every way to give a setting reads it alike."""
    default = field.default_factory() if callable(field.default_factory) else field.default
    shown = "" if default is dataclasses.MISSING else f" [default: {_shown(default)}]"
    help_text = field.metadata.get("help", field.name.replace("_", " ")) + shown
    return Annotated[str | None, typer.Option(f"--{field.name.replace('_', '-')}", metavar="VALUE", help=help_text)]


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else "none" if value is None else str(value)


for _name in available():
    _register(_name, recipe_named(_name))
