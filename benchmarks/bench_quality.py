"""Measure what conversions of real models lose on real data, keep a record a row, and write docs/quality.md from them.

    python benchmarks/bench_quality.py minilm --glue glue.tar.xz
    python benchmarks/bench_quality.py budget --glue glue.tar.xz
    python benchmarks/bench_quality.py vit --weights FOLDER --val tiny-imagenet-val.tar.xz --train images.tar.xz
    python benchmarks/bench_quality.py albert --weights FOLDER --reactions reactions.tar.xz
    python benchmarks/bench_quality.py sample-images images.tar.xz --count 2048 --from train.tar.xz
    python benchmarks/bench_quality.py prepare-reactions reactions.tar.xz --from uspto50k.tar.xz
    python benchmarks/bench_quality.py render

A row that was recorded with the same settings is not measured again, unless --again is given.
"""

import argparse
import copy
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from quality_tables import RECORDS, record_file, write_tables
from real_data import (
    Batch,
    ReactionTokens,
    change,
    classify,
    masked_accuracy,
    prepare_reactions,
    read_images,
    read_pairs,
    read_reactions,
    sample_images,
    sample_sentences,
    sentence_batches,
    spearman,
    top_accuracy,
    validation_labels,
    views,
)
from torch import nn

import collab
from collab.demo import demo_folder
from collab.records import RunRecord, append_record, provenance, read_records
from collab.sources import open_model
from collab.swap import SwapReport

SEED = 0


@dataclass(frozen=True)
class Row:
    """One line of a table: how to convert. `calibration` is how many inputs are used, 0 for the weights alone."""

    method: str
    shared_dim: int | None = None
    dims_per_head: int | None = None
    budget: float | None = None
    calibration: int = 0

    @property
    def solver(self) -> str:
        """Method of the decomposition."""
        return self.method if self.method in ("unshared", "paper") else "shared"

    @property
    def refined(self) -> bool:
        """Whether refinement follows the decomposition."""
        return self.method in ("refined", "sparse") or self.method.endswith(", refined")

    def config(self) -> collab.CollaborativeConfig:
        """The library's settings for it."""
        chosen = {"shared_dim": self.shared_dim, "budget": self.budget, "dims_per_head": self.dims_per_head}
        settings = {name: value for name, value in chosen.items() if value is not None}
        if self.solver != "shared":
            settings["method"] = self.solver
        return collab.CollaborativeConfig(seed=SEED, **settings)


@dataclass
class Subject:
    """A trained model, what it is measured on, and what conversions may look at.

    Attributes:
        model: the original, never changed.
        score: a model -> what is measured.
        batches: calibration inputs by their number.
        refinement: how rows that are refined are.
        expected: what the original must score for its inputs to be the ones it was trained for, and how closely.
        views: how many inputs are made of each calibration image.
        limited: whether it is measured on a part of the data; then nothing is recorded.
    """

    name: str
    model: nn.Module
    score: Callable[[nn.Module], dict[str, float]]
    examples: int
    batches: dict[int, list[Batch]]
    refinement: collab.Refinement = field(default_factory=collab.Refinement)
    expected: dict[str, tuple[float, float]] = field(default_factory=dict)
    views: int = 1
    limited: bool = False

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device


def rows_of(
    sizes: Iterable[int], sparse: dict[int, int], calibration: Iterable[int], budgets: Iterable[float] = ()
) -> list[Row]:
    """Every method at every size; what uses data, with every number of calibration inputs, the largest first.

    Sizes chosen by a budget are refined, on as many inputs as there are.
    """
    rows = [Row("original")]
    counts = sorted(calibration, reverse=True)
    for size in sizes:
        rows += [Row(method, size) for method in ("unshared", "paper", "shared")]
        rows += [Row(method, size, calibration=count) for count in counts for method in ("calibrated", "refined")]
        rows += [Row("sparse", size, sparse[size], calibration=count) for count in counts[:1] if size in sparse]
    return rows + [Row("budget, refined", budget=share, calibration=counts[0]) for share in budgets]


def budget_rows(budgets: Iterable[tuple[float, int]], calibration: int) -> list[Row]:
    """Sizes chosen by budget, and beside each the uniform size that keeps as many query/key weights."""
    rows = [Row("original")]
    for budget, uniform in budgets:
        for method in ("calibrated", "refined"):
            rows.append(Row(f"uniform, {method}", shared_dim=uniform, calibration=calibration))
            rows.append(Row(f"budget, {method}", budget=budget, calibration=calibration))
    return rows


def measure(subject: Subject, row: Row) -> RunRecord:
    """Convert a copy as the row says, and score it."""
    converted = copy.deepcopy(subject.model)
    metrics: dict[str, Any] = {}
    if row.method == "original":
        metrics["attention_parameters"] = attention_parameters(converted)
    else:
        report, seconds = convert_(converted, row, subject.batches.get(row.calibration), subject.refinement)
        metrics["attention_parameters"] = sum(site.parameters_after for site in report.sites)
        metrics["seconds"] = seconds
        metrics["sizes"] = {site.path: site.shared_dim for site in report.sites}
        metrics["errors"] = {site.path: site.error for site in report.sites}
        metrics["refinement"] = None if report.refinement is None else asdict(report.refinement)
    metrics["scores"] = subject.score(converted)
    return RunRecord(
        name=f"quality-{subject.name}",
        config=config_key(subject, row),
        metrics=metrics,
        provenance=provenance(seed=SEED, device=subject.device),
    )


def convert_(
    model: nn.Module, row: Row, batches: list[Batch] | None, refinement: collab.Refinement
) -> tuple[SwapReport, dict[str, float]]:
    """Convert in place; the report, and seconds: in total, of which for decomposition and refinement."""
    options: dict[str, Any] = {}
    if row.calibration:
        if batches is None:
            raise ValueError(f"there must be {row.calibration} calibration inputs, got none")
        options = {"calibration": batches, "refine": row.refined and refinement}
    begin = _now(model)
    report = collab.collaborate_(model, row.config(), progress=_progress(row), **options)
    seconds = {"total": _now(model) - begin, "decomposition": sum(site.seconds for site in report.sites)}
    if report.refinement is not None:
        seconds["refinement"] = report.refinement.seconds
    return report, seconds


def _now(model: nn.Module) -> float:
    if next(model.parameters()).is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def _progress(row: Row) -> Callable[[Iterable[Any], int], Iterator[Any]]:
    def wrap(items: Iterable[Any], length: int) -> Iterator[Any]:
        begin = last = time.perf_counter()
        for place, item in enumerate(items):
            if time.perf_counter() - last > 10:
                last = time.perf_counter()
                print(f"    {row.method} {row.shared_dim or ''}: {place} of {length}, {last - begin:.0f} s", flush=True)
            yield item

    return wrap


def attention_parameters(model: nn.Module) -> int:
    """Of all modules that can be swapped."""
    sites = [site for site in collab.find_attention(model) if not site.why_not]
    return sum(parameter.numel() for site in sites for parameter in site.module.parameters())


def config_key(subject: Subject, row: Row) -> dict[str, Any]:
    """All that decides a row's outcome, the code apart."""
    settings = {
        "refinement": subject.refinement.to_dict() if row.refined else None,
        "examples": subject.examples,
        "seed": SEED,
        "device": subject.device.type,
        "threads": torch.get_num_threads(),
    }
    if row.calibration and subject.views > 1:
        settings["views"] = subject.views
    return asdict(row) | settings


def run(subject: Subject, rows: Iterable[Row], results: Path, *, again: bool = False) -> None:
    """Measure the rows that are not recorded yet, and append each as soon as it is done."""
    path = results / record_file(subject.name).name
    done = [
        record.config for file in {path, record_file(subject.name)} if file.exists() for record in read_records(file)
    ]
    for row in rows:
        if not again and config_key(subject, row) in done and not subject.limited:
            print(f"recorded: {_title(row)}", flush=True)
            continue
        print(f"measuring: {_title(row)}", flush=True)
        record = measure(subject, row)
        print(f"    {record.metrics['scores']}  {_rounded(record.metrics.get('seconds', {}))}", flush=True)
        if row.method == "original" and not subject.limited:
            check_original(subject, record.metrics["scores"])
        if not subject.limited:
            append_record(path, record)


def check_original(subject: Subject, scores: dict[str, float]) -> None:
    """Refuse to go on if the original does not score what it is known to."""
    for name, (value, tolerance) in subject.expected.items():
        if not math.isclose(scores[name], value, abs_tol=tolerance):
            raise ValueError(f"{name} of the original must be {value} within {tolerance}, got {scores[name]}")


def _title(row: Row) -> str:
    return ", ".join(f"{name} {value}" for name, value in asdict(row).items() if value)


def _rounded(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())


def open_minilm(options: argparse.Namespace) -> Subject:
    """The sentence encoder on STS-B dev; calibration on sentences of STS-B train, their labels unused."""
    folder = demo_folder()
    model = open_model(str(folder), device=options.device)
    pairs = read_pairs(options.glue)[: options.limit]
    sentences = sample_sentences(read_pairs(options.glue, "train"), max(options.calibration))
    batches = {count: sentence_batches(model, folder, sentences[:count]) for count in options.calibration}
    return Subject(
        name="minilm",
        model=model,
        score=lambda converted: {"spearman": spearman(converted, folder, pairs)},
        examples=len(pairs),
        batches=batches,
        limited=options.limit is not None,
    )


def open_vit(options: argparse.Namespace) -> Subject:
    """ViT-Ti on Tiny-ImageNet's validation images; calibration on training images."""
    images, names = read_images(options.val, limit=options.limit, cache=options.cache)
    train, _ = read_images(options.train, limit=max(options.calibration), cache=options.cache)
    if len(train) < max(options.calibration):
        raise ValueError(f"{options.train} must hold {max(options.calibration)} images, got {len(train)}")
    model = open_model(str(options.weights), device=options.device)
    labels = validation_labels(options.val, names, model.config.label2id)
    device = torch.device(options.device)
    images = images.to(device)

    def inputs(count: int) -> list[Batch]:
        return [{"pixel_values": part} for part in views(train[:count], options.views, device, SEED)]

    original = classify(model, images)

    def score(converted: nn.Module) -> dict[str, float]:
        logits = classify(converted, images)
        return top_accuracy(logits, labels) | change(logits, original)

    return Subject(
        name="vit",
        model=model,
        score=score,
        examples=len(images),
        batches={count: inputs(count) for count in options.calibration},
        expected={"top1": (69.31, 0.05), "top5": (88.13, 0.05)},
        views=options.views,
        limited=options.limit is not None,
    )


def open_albert(options: argparse.Namespace) -> Subject:
    """The chemistry ALBERT on masked tokens of test reactions; calibration on masked validation reactions."""
    model = open_model(str(options.weights), device=options.device)
    tokens = ReactionTokens(options.weights / "vocab.txt")
    test = read_reactions(options.reactions, "test")[: options.limit]
    one, many = tokens.batches(test, seed=SEED, share=0.0), tokens.batches(test, seed=SEED)
    valid = read_reactions(options.reactions, "valid")
    batches = {}
    for count in options.calibration:
        chosen = tokens.batches(valid[:count], seed=SEED + 1)
        inputs = [{name: part for name, part in batch.items() if name != "labels"} for batch in chosen]
        batches[count] = [{name: part.to(options.device) for name, part in batch.items()} for batch in inputs]

    def score(converted: nn.Module) -> dict[str, float]:
        return {"masked": masked_accuracy(converted, many), "one_masked": masked_accuracy(converted, one)}

    return Subject(
        name="albert",
        model=model,
        score=score,
        examples=len(test),
        batches=batches,
        expected={"masked": (0.986, 0.005)},
        limited=options.limit is not None,
    )


SUBJECTS: dict[str, tuple[Callable[[argparse.Namespace], Subject], dict[str, Any]]] = {
    "minilm": (open_minilm, {"sizes": [192, 128, 64, 32], "sparse": {192: 32, 128: 32}, "calibration": [6144]}),
    "budget": (open_minilm, {"sizes": [], "sparse": {}, "calibration": [6144]}),
    "vit": (
        open_vit,
        {"sizes": [128, 96, 64], "sparse": {128: 64}, "calibration": [2048], "budgets": [2 / 3, 1 / 2, 1 / 3]},
    ),
    "albert": (open_albert, {"sizes": [128, 64, 32], "sparse": {128: 32}, "calibration": [2048]}),
}
BUDGETS = ((1 / 3, 128), (1 / 6, 64))


def main() -> None:
    """Entry point."""
    options = _parser().parse_args()
    if options.verb == "sample-images":
        print(f"{sample_images(options.archives, options.output, options.count) / 1e6:.1f} MB")
        return
    if options.verb == "prepare-reactions":
        print(f"{prepare_reactions(options.archive, options.output) / 1e6:.1f} MB")
        return
    if options.verb != "render":
        torch.set_num_threads(options.threads)
        opening, defaults = SUBJECTS[options.verb]
        options.calibration = options.calibration or defaults["calibration"]
        settings = {name: json.loads(value) for name, value in (pair.split("=") for pair in options.refinement)}
        subject = replace(opening(options), name=options.verb, refinement=collab.Refinement(**settings))
        if options.verb == "budget":
            rows = budget_rows(BUDGETS, max(options.calibration))
        else:
            sizes = options.sizes or defaults["sizes"]
            rows = rows_of(sizes, defaults["sparse"], options.calibration, defaults.get("budgets", ()))
        chosen = [row for row in rows if not options.methods or row.method in options.methods]
        run(subject, chosen, options.results, again=options.again)
        if options.results != RECORDS:
            return
    write_tables()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, (opening, defaults) in SUBJECTS.items():
        of_verb = verbs.add_parser(verb, help=opening.__doc__)
        if opening is open_minilm:
            of_verb.add_argument("--glue", type=Path, required=True, help="archive with glue/STS-B/sts-{train,dev}.csv")
        else:
            of_verb.add_argument("--weights", type=Path, required=True, help="folder of the model")
        if verb == "vit":
            of_verb.add_argument("--val", type=Path, required=True, help="archive with val/images")
            of_verb.add_argument("--train", type=Path, required=True, help="what sample-images wrote")
            of_verb.add_argument("--cache", type=Path, help="folder to keep decoded images in, 1.8 GB")
            of_verb.add_argument("--views", type=int, default=1, help="inputs to make of each calibration image")
        if verb == "albert":
            of_verb.add_argument("--reactions", type=Path, required=True, help="what prepare-reactions wrote")
        of_verb.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        of_verb.add_argument("--threads", type=int, default=torch.get_num_threads())
        of_verb.add_argument("--calibration", type=int, nargs="+", help=f"inputs used, {defaults['calibration']}")
        of_verb.add_argument("--sizes", type=int, nargs="+", help=f"shared sizes, {defaults['sizes']}")
        of_verb.add_argument("--methods", nargs="+", help="these rows only")
        of_verb.add_argument("--refinement", nargs="+", default=[], metavar="NAME=VALUE", help="other settings of it")
        of_verb.add_argument("--limit", type=int, help="score so many examples only, and record nothing")
        of_verb.add_argument("--again", action="store_true", help="measure rows that are recorded too")
        of_verb.add_argument("--results", type=Path, default=RECORDS, help="folder for the records")
    sampling = verbs.add_parser("sample-images", help="copy training images, each class in turn, to a small archive")
    sampling.add_argument("output", type=Path)
    sampling.add_argument("--count", type=int, default=2048)
    sampling.add_argument("--from", dest="archives", type=Path, nargs="+", required=True)
    preparing = verbs.add_parser("prepare-reactions", help="write canonical reactions to a small archive; needs RDKit")
    preparing.add_argument("output", type=Path)
    preparing.add_argument(
        "--from", dest="archive", type=Path, required=True, help="with uspto50k/raw_{valid,test}.csv"
    )
    verbs.add_parser("render", help="write the tables from the records")
    return parser


if __name__ == "__main__":
    main()
