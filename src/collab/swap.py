"""collaborate_: inspect, decompose, replace, report. A model is swapped whole or left untouched."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from collab.config import CollaborativeConfig
from collab.decomposition import decompose
from collab.hosts import HeadWeights, SharedWeights, empty_shared_weights, weights_problem
from collab.inspection import AttentionSite, AttentionSites, find_attention
from collab.layer import start_mixing_
from collab.structure import LOADER, all_or_nothing, check_size, host_at, record_structure_
from collab.table import format_table


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
        error: relative error of the query/key products (Frobenius norm); 0 when exact, None when drawn afresh.
        iterations: sweeps of the decomposition.
        converged: whether its tolerance, not its limit, ended it.
        seconds: time it took.
        parameters_before, parameters_after: of the whole attention module.
    """

    path: str
    host: str
    full_dim: int
    shared_dim: int
    error: float | None
    iterations: int
    converged: bool
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
    """

    sites: list[SiteReport]
    left: dict[str, list[str]]
    parameters_before: int
    parameters_after: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        rows = [
            [
                site.path, site.full_dim, site.shared_dim, "fresh" if site.error is None else site.error,
                site.iterations, site.seconds, site.parameters_before, site.parameters_after,
            ]
            for site in self.sites
        ]  # fmt: skip
        header = ["path", "full_dim", "shared_dim", "error", "iterations", "seconds", "parameters before", "after"]
        lines = [format_table(header, rows)]
        lines += [f"left as it was: {path} ({'; '.join(reasons)})" for path, reasons in self.left.items()]
        share = self.parameters_after / max(1, self.parameters_before)
        lines.append(f"model parameters: {self.parameters_before:,} -> {self.parameters_after:,} ({share:.3f} of them)")
        return "\n".join(lines)


def collaborate_(
    model: nn.Module,
    config: CollaborativeConfig,
    *,
    only: Callable[[AttentionSite], bool] | None = None,
    progress: Callable[[Iterable[Any], int], Iterable[Any]] | None = None,
) -> SwapReport:
    """Make a model's attention collaborative, in place; if anything fails the model is untouched.

    Args:
        model: any model `find_attention` finds swappable attention in.
        config: the size of the shared space, and the rest.
        only: swap only the layers for which this is true.
        progress: wraps the loop over layers, given it and its length: a progress bar.

    Returns:
        A report that prints as a table.

    Raises:
        NoAttentionFound: there is nothing to swap.
        ValueError: a setting does not fit the model, or its weights cannot be read.
    """
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
    sites = find_attention(model)
    plan = _plan(model, sites, config, only)
    parameters_before = count_parameters(model)
    generator = torch.Generator().manual_seed(config.seed)
    reports, pieces = [], []
    steps: Iterable[tuple[AttentionSite, int]] = plan if progress is None else progress(plan, len(plan))
    for site, shared_dim in steps:
        shared, report = _shared_weights(site, shared_dim, config, generator)
        pieces.append(shared)
        reports.append(report)
    with all_or_nothing(model, [site for site, _ in plan]):
        for (site, _), shared in zip(plan, pieces, strict=True):
            host_at(site).install_(site.module, shared)
        record_structure_(model, config)
    done = [
        replace(report, parameters_after=count_parameters(site.module))
        for report, (site, _) in zip(reports, plan, strict=True)
    ]
    swapped = {report.path for report in done}
    left = {site.path: list(site.why_not) or ["not selected"] for site in sites if site.path not in swapped}
    return SwapReport(done, left, parameters_before, count_parameters(model))


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


def _plan(
    model: nn.Module, sites: AttentionSites, config: CollaborativeConfig, only: Callable[[AttentionSite], bool] | None
) -> list[tuple[AttentionSite, int]]:
    """The layers to swap and their sizes, with everything checked that can be checked beforehand."""
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
        shared_dim = config.shared_dim_for(site.path, site.full_dim)
        if shared_dim is not None:
            check_size(site, shared_dim)
            chosen.append((site, shared_dim))
    if not chosen:
        seen = "; ".join(f"{site.path} ({', '.join(site.why_not) or 'not selected'})" for site in sites)
        raise NoAttentionFound(
            f"no attention to swap in {type(model).__name__}; looked at: {seen or 'nothing named attention'}"
        )
    quantised = getattr(getattr(model, "config", None), "quantization_config", None) or LOADER
    if quantised != LOADER:
        raise ValueError(f"{type(model).__name__} must not be quantised, its config has {quantised}")
    for site, _ in chosen:
        problems = weights_problem(site.module)
        if problems:
            raise ValueError(f"cannot read the weights of {site.path}: {'; '.join(problems)}")
    return chosen


@torch.no_grad()
def _shared_weights(
    site: AttentionSite, shared_dim: int, config: CollaborativeConfig, generator: torch.Generator
) -> tuple[SharedWeights, SiteReport]:
    start = time.perf_counter()
    weights = host_at(site).read(site.module)
    error, iterations, converged = None, 0, True
    if config.weights == "fresh":
        shared = _fresh(weights, shared_dim, config.mixing, generator)
    else:
        try:
            content = _content(weights)
            factors = decompose(
                weights.query, weights.key, shared_dim, max_iterations=config.max_iterations, tolerance=config.tolerance
            )
        except ValueError as error_found:
            raise ValueError(f"cannot decompose {site.path}: {error_found}") from error_found
        # Kept until every layer is done, so in the model's own dtype already.
        parts = (factors.query.mT, factors.key.mT, factors.mixing, content)
        shared = SharedWeights(*(part.to(weights.query) for part in parts))
        error, iterations, converged = factors.relative_error, factors.iterations, factors.converged
    report = SiteReport(
        path=site.path,
        host=host_at(site).name,
        full_dim=site.full_dim,
        shared_dim=shared_dim,
        error=error,
        iterations=iterations,
        converged=converged,
        seconds=time.perf_counter() - start,
        parameters_before=count_parameters(site.module),
        parameters_after=0,
    )
    return shared, report


def _content(weights: HeadWeights) -> torch.Tensor:
    """(head, key_in): what the query bias adds to the score of a key, exactly."""
    if weights.query_bias is None:
        return weights.key.new_zeros(weights.num_heads, weights.key.shape[2])
    if not torch.isfinite(weights.query_bias).all():
        raise ValueError("the query bias must be finite, got NaN or infinity")
    return torch.einsum("hdk,hd->hk", weights.key.double(), weights.query_bias.double())


def _fresh(weights: HeadWeights, shared_dim: int, mixing: str, generator: torch.Generator) -> SharedWeights:
    """New weights drawn on the CPU, so that a seed means the same on every device."""
    shared = empty_shared_weights(weights, shared_dim, device="cpu", dtype=torch.float32)
    nn.init.xavier_uniform_(shared.query, generator=generator)
    nn.init.xavier_uniform_(shared.key, generator=generator)
    start_mixing_(shared.mixing, weights.head_dim, mixing, generator)
    shared.content.zero_()
    return shared
