"""plan: how small each layer can be, from its error curve, before anything is converted."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from collab.calibration import Calibration, calibrate, check_calibration, check_fits
from collab.config import CollaborativeConfig
from collab.conversion import Metric
from collab.decomposition import error_curve
from collab.effects import Effects
from collab.inspection import AttentionSite, find_attention
from collab.running import Batch, Progress
from collab.structure import check_readable, check_size, host_at
from collab.table import format_table

_SHOWN = (0.125, 0.25, 1 / 3, 0.5, 0.75)
"""Shares of a layer's full size whose errors a plan prints."""


@dataclass(frozen=True)
class SitePlan:
    """What one layer's size could be and what was chosen.

    Attributes:
        path: where the layer is.
        full_dim: heads x head size.
        shared_dim: the size chosen.
        error: relative error at that size, at most: converting improves on the curve.
        curve: relative error at every size from 0 to `full_dim`, from one pass over the layer.
        importance: what its squared error is multiplied with where layers are weighed against each other: by what it
            does to the model's output, where a budget is to be spent and there are inputs to measure that on; with
            statistics alone the mean variance of the layer's scores, which the error is a share of; else 1.
        parameters: of its query and key projections, for one shared dimension.
    """

    path: str
    full_dim: int
    shared_dim: int
    error: float
    curve: tuple[float, ...]
    importance: float
    parameters: int


@dataclass(frozen=True)
class SizePlan:
    """The size chosen for every layer, and the curves it was chosen from. Prints as a table.

    Attributes:
        sites: layer by layer.
        metric: what errors are measured in: "weights", or "inputs" with calibration.
        is_bound: whether a conversion as the config asks for stays below the errors; not if heads may use some of the
            dimensions only, or by another method.
    """

    sites: list[SitePlan]
    metric: str
    is_bound: bool = True

    @property
    def sizes(self) -> dict[str, int]:
        """Path -> shared_dim, as `CollaborativeConfig(shared_dim=...)` takes it."""
        return {site.path: site.shared_dim for site in self.sites}

    @property
    def kept(self) -> float:
        """Share of the query and key parameters that is kept."""
        full = sum(site.full_dim * site.parameters for site in self.sites)
        return sum(site.shared_dim * site.parameters for site in self.sites) / full

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self) | {"sizes": self.sizes, "kept": self.kept}

    def __str__(self) -> str:
        header = ["path", "full_dim", *(f"error at {share:.3g}" for share in _SHOWN), "shared_dim", "error"]
        rows = [
            [
                site.path,
                site.full_dim,
                *(site.curve[max(1, round(share * site.full_dim))] for share in _SHOWN),
                site.shared_dim,
                site.error,
            ]
            for site in self.sites
        ]
        bound = "stays below them" if self.is_bound else "by these settings may have larger ones"
        return (
            f"{format_table(header, rows)}\n"
            f"errors: relative, in the metric of the {self.metric}, at shares of each layer's full size; a conversion "
            f"{bound}\nkept: {self.kept:.3f} of the query and key parameters"
        )


def plan(
    model: nn.Module,
    config: CollaborativeConfig,
    *,
    calibration: Calibration | Iterable[Batch] | None = None,
    only: Callable[[AttentionSite], bool] | None = None,
    progress: Progress | None = None,
) -> SizePlan:
    """Choose every layer's size as `config` asks for, from error curves; the model is only looked at.

    Args:
        model: any model `find_attention` finds swappable attention in.
        config: with `budget`, sizes that lower the error of all layers together the most for that share of parameters;
            with `max_error`, each layer's smallest size of at most that error; with `shared_dim`, those sizes.
        calibration: statistics from `calibrate`, or inputs as `calibrate` takes them: errors are then those of the
            scores on such inputs. With the inputs themselves, a budget is spent by what each layer's error does to the
            model's output, which is the better way.
        only: look only at layers for which this is true.
        progress: wraps the loop over layers, given it and its length: a progress bar.

    Example:
        >>> import torch, collab
        >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 4, batch_first=True), 2)
        >>> sorted(collab.plan(model, collab.CollaborativeConfig(budget=0.5)).sizes.values())
        [16, 16]
    """
    check_calibration(calibration)
    batches: Iterable[Batch] | None = None
    if calibration is not None and not isinstance(calibration, Calibration):
        batches = list(calibration) if iter(calibration) is calibration else calibration
        calibration = calibrate(model, batches, only=only, progress=progress)
    return plan_with(model, config, calibration, batches, only, progress)


def plan_with(
    model: nn.Module,
    config: CollaborativeConfig,
    calibration: Calibration | None,
    batches: Iterable[Batch] | None,
    only: Callable[[AttentionSite], bool] | None,
    progress: Progress | None,
) -> SizePlan:
    """`plan` from statistics and the inputs they are of, each where there are any."""
    found = {site.path: site for site in find_attention(model)}
    sites = [site for site in found.values() if not site.why_not and (only is None or only(site))]
    if isinstance(config.shared_dim, Mapping):
        _check_names(config.shared_dim, found, type(model).__name__)
        sites = [site for site in sites if site.path in config.shared_dim]
    if not sites:
        raise ValueError(f"no attention to plan for in {type(model).__name__}")
    check_readable(sites)
    if calibration is not None:
        check_fits(calibration, found)
    steps: Iterable[AttentionSite] = sites if progress is None else progress(sites, len(sites))
    effects = None if batches is None or config.budget is None else Effects(model, batches)
    measured = [_measure(site, calibration, effects) for site in steps]
    if calibration is not None:
        measured = _with_unseen(measured, calibration)
    sizes = choose_sizes(measured, sites, config)
    chosen = [
        SitePlan(**(asdict(one) | {"shared_dim": size, "error": one.curve[size]}))
        for one, size in zip(measured, sizes, strict=True)
    ]
    return SizePlan(chosen, "weights" if calibration is None else "inputs", _is_bound(config))


def _check_names(names: Iterable[str], found: Mapping[str, AttentionSite], model_name: str) -> None:
    unknown = sorted(set(names) - set(found))
    if unknown:
        raise ValueError(
            f"shared_dim names {', '.join(unknown)}, where {model_name} has no attention; "
            f"it has {', '.join(found) or 'none'}"
        )
    for name in names:
        if found[name].why_not:
            raise ValueError(f"shared_dim names {name}, which cannot be swapped: {'; '.join(found[name].why_not)}")


def _is_bound(config: CollaborativeConfig) -> bool:
    """Whether a conversion starts from what the error curves are made of, and can only improve on it."""
    return config.method == "shared" and config.dims_per_head is None


@torch.no_grad()
def _measure(site: AttentionSite, calibration: Calibration | None, effects: Effects | None) -> SitePlan:
    weights = host_at(site).read(site.module)
    statistics = None if calibration is None else calibration.sites.get(site.path)
    query, key = Metric.of(statistics, weights.query.device).enter(weights)
    try:
        curve = error_curve(query, key)
    except ValueError as error:
        raise ValueError(f"cannot decompose {site.path}: {error}") from error
    importance = 1.0
    if effects is not None:
        importance = effects.of(site, statistics)
    elif statistics is not None:
        # Squared norm of all heads' products, from their factors; of the scores of one head, a mean variance.
        squares = ((query @ query.mT) * (key @ key.mT)).sum()
        importance = float(squares) * host_at(site).scale(site.module) ** 2 / weights.num_heads
    return SitePlan(
        path=site.path,
        full_dim=site.full_dim,
        shared_dim=site.full_dim,
        error=0.0,
        curve=tuple(curve.tolist()),
        importance=importance if effects is not None else importance * site.uses,
        parameters=weights.query.shape[2] + weights.key.shape[2],
    )


def _with_unseen(measured: Sequence[SitePlan], calibration: Calibration) -> list[SitePlan]:
    """Layers that no input reached are as important as the others are on average: nothing is known of them."""
    known = [one.importance for one in measured if one.path in calibration.sites]
    usual = sum(known) / len(known) if known else 1.0
    return [one if one.path in calibration.sites else replace(one, importance=usual) for one in measured]


def choose_sizes(
    measured: Sequence[SitePlan], sites: Sequence[AttentionSite], config: CollaborativeConfig
) -> list[int]:
    """One size a layer, from their curves, as the config asks for."""
    if config.shared_dim is not None:
        sizes = [config.shared_dim_for(site.path, site.full_dim) or site.full_dim for site in sites]
        for site, size in zip(sites, sizes, strict=True):
            check_size(site, size)
        return sizes
    candidates = [_candidates(site, config.multiple_of) for site in sites]
    if config.max_error is not None:
        if not _is_bound(config):
            setting = f"method={config.method!r}" if config.dims_per_head is None else "dims_per_head"
            raise ValueError(
                f"max_error must come without {setting}, whose errors no curve bounds: give budget instead"
            )
        return [
            next((size for size in options if one.curve[size] <= config.max_error), options[-1])
            for one, options in zip(measured, candidates, strict=True)
        ]
    assert config.budget is not None
    return _spend(measured, candidates, config.budget)


def _candidates(site: AttentionSite, multiple_of: int) -> list[int]:
    """Sizes this layer can have that are multiples, and its full size, smallest first."""
    host = host_at(site)
    sizes = [*range(multiple_of, site.full_dim, multiple_of), site.full_dim]
    return [size for size in sizes if host.size_problem(site.module, size) is None]


def _spend(measured: Sequence[SitePlan], candidates: Sequence[Sequence[int]], budget: float) -> list[int]:
    """Grow sizes from the smallest, each time where the squared error of all scores falls most for a parameter.

    What is left of a budget may be too little for a step: should equal shares do better, they are taken.
    """
    full = _cost(measured, [one.full_dim for one in measured])
    places = [0] * len(measured)
    spent = _cost(measured, [options[0] for options in candidates])
    if spent / full > budget:
        raise ValueError(f"budget must be at least {spent / full:.4g} with sizes that are multiples, got {budget}")
    while True:
        # Several steps at once count too: a curve may be flat for one step and fall at the next.
        moves = [
            (_gain(one, options[places[i]], size) / ((size - options[places[i]]) * one.parameters), i, place)
            for i, (one, options) in enumerate(zip(measured, candidates, strict=True))
            for place, size in enumerate(options)
            if place > places[i] and (spent + (size - options[places[i]]) * one.parameters) / full <= budget
        ]
        if not moves:
            break
        _, index, place = max(moves, key=lambda move: (move[0], -move[1], -move[2]))
        spent += (candidates[index][place] - candidates[index][places[index]]) * measured[index].parameters
        places[index] = place
    grown = [options[place] for options, place in zip(candidates, places, strict=True)]
    shares = {size / one.full_dim for one, options in zip(measured, candidates, strict=True) for size in options}
    even = [
        [
            max((size for size in options if size / one.full_dim <= share), default=options[0])
            for one, options in zip(measured, candidates, strict=True)
        ]
        for share in sorted(shares)
    ]
    fitting = [sizes for sizes in even if _cost(measured, sizes) / full <= budget]
    return min([grown, *fitting], key=lambda sizes: _loss(measured, sizes))


def _cost(measured: Sequence[SitePlan], sizes: Sequence[int]) -> int:
    """Query and key parameters of all layers."""
    return sum(size * one.parameters for one, size in zip(measured, sizes, strict=True))


def _loss(measured: Sequence[SitePlan], sizes: Sequence[int]) -> float:
    """Mean squared error of all layers' scores."""
    return sum(one.importance * one.curve[size] ** 2 for one, size in zip(measured, sizes, strict=True))


def _gain(one: SitePlan, now: int, then: int) -> float:
    """By how much the mean squared error of a layer's scores falls between two sizes."""
    return one.importance * (one.curve[now] ** 2 - one.curve[then] ** 2)
