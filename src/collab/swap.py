"""collaborate_: inspect, decompose, replace, refine, report. A model is swapped whole or left untouched."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from collab.calibration import Calibration, SiteStatistics, calibrate, check_calibration, check_fits, little_data
from collab.config import CollaborativeConfig
from collab.conversion import Metric, fresh_weights, shared_from
from collab.decomposition import QueryKeyFactors, decompose, decompose_many
from collab.hosts import HeadWeights, SharedWeights
from collab.inspection import AttentionSite, AttentionSites, find_attention
from collab.refinement import Refinement, RefinementReport, refine_
from collab.running import Batch, Progress
from collab.sizes import plan_with
from collab.structure import LOADER, all_or_nothing, check_readable, check_size, host_at, record_structure_
from collab.table import format_table
from collab.twins import Twin

_TOGETHER = 12
"""Layers on a GPU that are decomposed at once."""


class NoAttentionFound(ValueError):
    """Nothing in the model can be swapped; the message says what was looked at."""


@dataclass(frozen=True)
class SiteReport:
    """What became of one attention layer.

    Attributes:
        path: where the layer is.
        host: its original class.
        full_dim: heads x head size of the original.
        shared_dim: dimensions of the space its heads now share.
        dims_per_head: how many of those a head uses, where that is fewer; None if it may use all.
        method: how it was decomposed: "shared", "unshared", "paper"; "fresh" if it was not.
        metric: what errors are measured in: the "weights", or their "inputs" where there was calibration.
        error: relative error of the query/key products (Frobenius norm) in that metric; 0 when exact, None when
            drawn afresh. Refinement is not in it: it leaves the products for the outputs' sake.
        unshared_error: what it would be if every head was truncated by itself, to as many dimensions in all.
        iterations: sweeps of the decomposition.
        converged: whether its tolerance, not its limit, ended it.
        condition: how much the shared dimensions cancel each other; see `QueryKeyFactors`.
        seconds: time it took, refinement not counted.
        parameters_before, parameters_after: of the whole attention module.
    """

    path: str
    host: str
    full_dim: int
    shared_dim: int
    dims_per_head: int | None
    method: str
    metric: str
    error: float | None
    unshared_error: float | None
    iterations: int
    converged: bool
    condition: float
    seconds: float
    parameters_before: int
    parameters_after: int


@dataclass(frozen=True)
class SwapReport:
    """What `collaborate_` did, layer by layer. Prints as a table.

    Attributes:
        sites: the layers that were swapped.
        left: path -> reasons, for attention that was left as it was.
        parameters_before, parameters_after: of the whole model.
        refinement: what refinement did, if there was one.
        notes: what else there is to say, such as that there was little data.
    """

    sites: list[SiteReport]
    left: dict[str, list[str]]
    parameters_before: int
    parameters_after: int
    refinement: RefinementReport | None = None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        rows = [
            [
                site.path, site.full_dim, site.shared_dim, "fresh" if site.error is None else site.error,
                "" if site.unshared_error is None else site.unshared_error,
                site.iterations, site.seconds, site.parameters_before, site.parameters_after,
            ]
            for site in self.sites
        ]  # fmt: skip
        header = ["path", "full_dim", "shared_dim", "error", "unshared", "iterations", "seconds", "parameters before",
                  "after"]  # fmt: skip
        if any(site.dims_per_head for site in self.sites):
            header.insert(3, "per head")
            for row, site in zip(rows, self.sites, strict=True):
                row.insert(3, site.dims_per_head or site.shared_dim)
        lines = [format_table(header, rows)]
        lines += [f"left as it was: {path} ({'; '.join(reasons)})" for path, reasons in self.left.items()]
        share = self.parameters_after / max(1, self.parameters_before)
        metrics = sorted({f"{site.method}, in the metric of the {site.metric}" for site in self.sites})
        lines.append(f"decomposition: {'; '.join(metrics)}")
        if self.refinement is not None:
            done = self.refinement
            outcome = "" if done.kept else "; it was no better, and undone"
            lines.append(
                f"refined in {done.seconds:.1f} s: error of the model's output on {done.held_back} batches held back "
                f"{done.before:.4g} -> {done.after:.4g}{outcome}"
            )
        lines += [f"note: {note}" for note in self.notes]
        lines.append(f"model parameters: {self.parameters_before:,} -> {self.parameters_after:,} ({share:.3f} of them)")
        return "\n".join(lines)


@torch.inference_mode(False)  # what is made here is to be fitted, and trained
def collaborate_(
    model: nn.Module,
    config: CollaborativeConfig,
    *,
    calibration: Calibration | Iterable[Batch] | None = None,
    refine: bool | Refinement | None = None,
    only: Callable[[AttentionSite], bool] | None = None,
    progress: Progress | None = None,
) -> SwapReport:
    """Make a model's attention collaborative, in place; if anything fails the model is untouched.

    Args:
        model: any model `find_attention` finds swappable attention in.
        config: the size of the shared space, and the rest.
        calibration: what the model's inputs look like, so that what matters to them is kept: statistics that
            `calibrate` made, or a few hundred unlabelled inputs themselves, in batches as `calibrate` takes them.
        refine: whether to fit the converted layers to the original ones' outputs, on the inputs given as
            `calibration`; or how. If not said: yes where there are inputs, no where there are statistics only.
        only: swap only the layers for which this is true.
        progress: wraps a loop, given it and its length: a progress bar. It is called once for each stage.

    Returns:
        A report that prints as a table.

    Raises:
        NoAttentionFound: there is nothing to swap.
        ValueError: a setting does not fit the model, or its weights cannot be read.
    """
    _check_arguments(model, config, calibration, refine)
    sites = find_attention(model)
    chosen = _choose(model, sites, config, only)
    batches: list[Batch] | Iterable[Batch] | None = None
    if calibration is not None and not isinstance(calibration, Calibration):
        # Refinement holds all inputs anyway, and what can be read only once need not look like it.
        is_kept = refine is not False or iter(calibration) is calibration
        batches = list(calibration) if is_kept else calibration
        paths = {site.path for site in chosen}
        calibration = calibrate(model, batches, only=lambda site: site.path in paths, progress=progress)
    statistics = {} if calibration is None else calibration.sites
    if calibration is not None:
        check_fits(calibration, {site.path: site for site in sites})
    sizes = _sizes(model, chosen, config, calibration, batches, progress)
    parameters_before = count_parameters(model)
    reports, pieces = _convert(chosen, sizes, config, statistics, progress)
    notes = _notes(chosen, statistics, calibration)
    refinement = None
    with all_or_nothing(model, chosen):
        twins = [Twin(site) for site in chosen]
        for site, shared in zip(chosen, pieces, strict=True):
            host_at(site).install_(site.module, shared)
        record_structure_(model, config)
        if batches is not None and refine is not False:
            for twin in twins:
                twin.swapped()
            settings = refine if isinstance(refine, Refinement) else Refinement(seed=config.seed % 2**31)
            refinement = refine_(model, twins, batches, settings, progress, statistics)
            notes += refinement.notes
    done = [
        replace(report, parameters_after=count_parameters(site.module))
        for report, site in zip(reports, chosen, strict=True)
    ]
    swapped = {report.path for report in done}
    left = {site.path: list(site.why_not) or ["not selected"] for site in sites if site.path not in swapped}
    return SwapReport(done, left, parameters_before, count_parameters(model), refinement, tuple(notes))


WRAPPERS = {
    "OptimizedModule": "_orig_mod",
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module",
}
"""Wrapper -> where it keeps the model. They hold on to paths and parameters that a swap would change under them."""


def count_parameters(module: nn.Module) -> int:
    """Number of parameters, shared ones counted once."""
    return sum(parameter.numel() for parameter in module.parameters())


def _check_arguments(model: nn.Module, config: object, calibration: object, refine: object) -> None:
    if not isinstance(config, CollaborativeConfig):
        raise ValueError(
            f"config must be a CollaborativeConfig, such as CollaborativeConfig(shared_dim=64), got {config!r}"
        )
    wrapped = WRAPPERS.get(type(model).__name__)
    if wrapped is not None:
        raise ValueError(
            f"model must be the model itself, got a {type(model).__name__} around it: "
            f"convert its .{wrapped}, and wrap that afterwards"
        )
    if not isinstance(refine, bool | Refinement | None):
        raise ValueError(f"refine must be True, False or a Refinement, got {refine!r}")
    if config.weights == "fresh" and (calibration is not None or refine):
        raise ValueError("fresh weights must come without calibration and refine: there is nothing to be true to")
    if refine and (calibration is None or isinstance(calibration, Calibration)):
        got = "none" if calibration is None else "statistics only"
        raise ValueError(f"refine needs inputs: calibration must be batches of them, got {got}")
    check_calibration(calibration)


def _choose(
    model: nn.Module, sites: AttentionSites, config: CollaborativeConfig, only: Callable[[AttentionSite], bool] | None
) -> list[AttentionSite]:
    """The layers to swap, with everything checked that can be checked beforehand."""
    if isinstance(config.shared_dim, Mapping):
        unknown = sorted(set(config.shared_dim) - {site.path for site in sites})
        if unknown:
            raise ValueError(
                f"shared_dim names {', '.join(unknown)}, where {type(model).__name__} has no attention; "
                f"it has {', '.join(site.path for site in sites) or 'none'}"
            )
    chosen = []
    for site in sites:
        named = isinstance(config.shared_dim, Mapping) and site.path in config.shared_dim
        if named and site.why_not:
            raise ValueError(f"shared_dim names {site.path}, which cannot be swapped: {'; '.join(site.why_not)}")
        if site.why_not or (only is not None and not only(site)):
            continue
        if isinstance(config.shared_dim, Mapping) and not named:
            continue
        if config.shared_dim is not None:
            check_size(site, config.shared_dim_for(site.path, site.full_dim) or site.full_dim)
        chosen.append(site)
    if not chosen:
        seen = "; ".join(f"{site.path} ({', '.join(site.why_not) or 'not selected'})" for site in sites)
        raise NoAttentionFound(
            f"no attention to swap in {type(model).__name__}; looked at: {seen or 'nothing named attention'}"
        )
    quantised = getattr(getattr(model, "config", None), "quantization_config", None) or LOADER
    if quantised != LOADER:
        raise ValueError(f"{type(model).__name__} must not be quantised, its config has {quantised}")
    check_readable(chosen)
    return chosen


def _sizes(
    model: nn.Module,
    chosen: Sequence[AttentionSite],
    config: CollaborativeConfig,
    calibration: Calibration | None,
    batches: Iterable[Batch] | None,
    progress: Progress | None,
) -> dict[str, int]:
    """Path -> shared_dim."""
    if config.shared_dim is not None:
        return {site.path: config.shared_dim_for(site.path, site.full_dim) or site.full_dim for site in chosen}
    paths = {site.path for site in chosen}
    return plan_with(model, config, calibration, batches, lambda site: site.path in paths, progress).sizes


@torch.no_grad()
def _convert(
    chosen: Sequence[AttentionSite],
    sizes: Mapping[str, int],
    config: CollaborativeConfig,
    statistics: Mapping[str, SiteStatistics],
    progress: Progress | None,
) -> tuple[list[SiteReport], list[SharedWeights]]:
    """Every layer's shared weights, one by one; on a GPU several at once."""
    generator = torch.Generator().manual_seed(config.seed)
    reports: list[SiteReport] = []
    pieces: list[SharedWeights] = []
    groups = _groups(chosen)
    for group in groups if progress is None else progress(groups, len(groups)):
        start = time.perf_counter()
        weights = [host_at(site).read(site.module) for site in group]
        if config.weights == "fresh":
            found: list[tuple[Metric, QueryKeyFactors | None, float | None]] = [(Metric(), None, None)] * len(group)
        else:
            found = _decompose(group, weights, [sizes[site.path] for site in group], config, statistics)
        for site, one, (metric, factors, unshared) in zip(group, weights, found, strict=True):
            if factors is None:
                scale = host_at(site).scale(site.module)
                shared = fresh_weights(one, sizes[site.path], config, generator, scale)
            else:
                shared = shared_from(one, factors, metric, config.dims_per_head)
            pieces.append(shared)
            seconds = (time.perf_counter() - start) / len(group)
            reports.append(_report(site, shared, config, metric, factors, unshared, seconds))
    return reports, pieces


def _groups(chosen: Sequence[AttentionSite]) -> list[Sequence[AttentionSite]]:
    """Layers to decompose together: one at a time on a CPU, where that is as fast and takes less memory."""
    on_gpu = all(host_at(site).read(site.module).query.is_cuda for site in chosen)
    size = _TOGETHER if on_gpu else 1
    return [chosen[start : start + size] for start in range(0, len(chosen), size)]


def _decompose(
    group: Sequence[AttentionSite],
    weights: Sequence[HeadWeights],
    sizes: Sequence[int],
    config: CollaborativeConfig,
    statistics: Mapping[str, SiteStatistics],
) -> list[tuple[Metric, QueryKeyFactors | None, float | None]]:
    """Metric, factors and the error of heads that share nothing, of some layers."""
    names = ", ".join(site.path for site in group)
    try:
        # At full size heads are taken over as they are, in any metric.
        metrics = [
            Metric.of(None if size == site.full_dim else statistics.get(site.path), one.query.device)
            for site, one, size in zip(group, weights, sizes, strict=True)
        ]
        entered = [metric.enter(one) for metric, one in zip(metrics, weights, strict=True)]
        factors = decompose_many(
            entered,
            sizes,
            max_iterations=config.max_iterations,
            tolerance=config.tolerance,
            method=config.method,
            dims_per_head=config.dims_per_head,
            seed=config.seed,
        )
        unshared = [
            decompose(query, key, size, method="unshared").relative_error
            for (query, key), size in zip(entered, sizes, strict=True)
        ]
    except ValueError as error:
        raise ValueError(f"cannot decompose {names}: {error}") from error
    return list(zip(metrics, factors, unshared, strict=True))


def _report(
    site: AttentionSite,
    shared: SharedWeights,
    config: CollaborativeConfig,
    metric: Metric,
    factors: QueryKeyFactors | None,
    unshared: float | None,
    seconds: float,
) -> SiteReport:
    return SiteReport(
        path=site.path,
        host=host_at(site).name,
        full_dim=site.full_dim,
        shared_dim=shared.shared_dim,
        dims_per_head=None if shared.dims is None else shared.dims.shape[1],
        method="fresh" if factors is None else config.method,
        metric=metric.name,
        error=None if factors is None else factors.relative_error,
        unshared_error=unshared,
        iterations=0 if factors is None else factors.iterations,
        converged=factors is None or factors.converged,
        condition=1.0 if factors is None else factors.condition,
        seconds=seconds,
        parameters_before=count_parameters(site.module),
        parameters_after=0,
    )


def _notes(
    chosen: Sequence[AttentionSite], statistics: Mapping[str, SiteStatistics], calibration: Calibration | None
) -> list[str]:
    """What a user should know of the data: layers it did not reach, and that there was little of it."""
    if calibration is None:
        return []
    notes = []
    unseen = [site.path for site in chosen if site.path not in statistics]
    if unseen:
        notes.append(f"no calibration input reached {', '.join(unseen)}: converted from the weights alone")
    worst = max((statistics[site.path].whitening()[2] for site in chosen if site.path in statistics), default=0.0)
    return [*notes, *filter(None, [little_data(worst)])]
