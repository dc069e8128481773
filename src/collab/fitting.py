"""Fitting the shared weights of some layers to an aim: what is fitted, and the steps that do it."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from collab.calibration import Moments, SiteStatistics
from collab.hosts import SharedWeights
from collab.inspection import AttentionSite
from collab.structure import host_at

_CHECKS = 8
"""How many times a fit looks at the inputs held back: to keep the best it saw, to slow down, and to stop early."""

_FAR = 0.1
"""Error from which on steps are as long as the rate says."""

_RIDGE = 0.01
"""Of the mean variance, added to the variance of every direction of the inputs: those in which they hardly vary would
otherwise be moved by any amount."""

_WORTH = 2e-3
"""A fit goes on while the error on inputs held back changes by this share of it between two looks."""


PRECISIONS = ("float32", "tf32", "bfloat16")
"""Of products in the steps of a fit."""


class Leaves:
    """One layer's shared weights in float32, or float64 where they are in that, and a change of each, to be fitted.

    Changes are in coordinates of the inputs that vary independently and alike: with inputs of covariance U diag(v) Uᵀ,
    the change of the weight is change @ diag(1/√v) Uᵀ. A step of one size then changes the scores about as much in
    every direction, where in the weights' own coordinates a few directions of the inputs decide how long steps may be,
    and the others hardly move. Without statistics it is the change of the weights themselves.
    """

    def __init__(self, site: AttentionSite, statistics: SiteStatistics | None = None) -> None:
        self.site = site
        shared = host_at(site).shared_weights(site.module)
        self.dims = shared.dims
        names = ("query", "key", "mixing", "content")
        weights = {name: getattr(shared, name).detach() for name in names}
        self._start = {
            name: weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)
            for name, weight in weights.items()
        }
        self._leaving: dict[str, Tensor] = {}
        seen = dict(self._start)
        if statistics is not None:
            query, key = _independent(statistics.query), _independent(statistics.key)
            for name, (enter, leave) in {"query": query, "key": key, "content": key}.items():
                seen[name] = seen[name] @ enter.to(seen[name])
                self._leaving[name] = leave.to(seen[name])
        self._sizes = {name: float(weight.square().mean().sqrt()) for name, weight in seen.items()}
        self._sizes["content"] = max(self._sizes["content"], self._sizes["key"])  # it may still be all zeros
        self.tensors = {name: torch.zeros_like(weight).requires_grad_() for name, weight in self._start.items()}

    def parameters(self) -> dict[str, Tensor]:
        """What the layer's own parameters are with these weights."""
        weights = {
            name: start + (self.tensors[name] @ self._leaving[name] if name in self._leaving else self.tensors[name])
            for name, start in self._start.items()
        }
        return host_at(self.site).parameters_from(self.site.module, SharedWeights(**weights, dims=self.dims))

    def groups(self, rate: float) -> list[dict[str, Any]]:
        """For an optimiser: steps in proportion to the size of what they change."""
        return [{"params": [tensor], "lr": rate * self._sizes[name]} for name, tensor in self.tensors.items()]

    def values(self) -> dict[str, Tensor]:
        """A copy of the changes."""
        return {name: tensor.detach().clone() for name, tensor in self.tensors.items()}

    @torch.no_grad()
    def set_(self, values: dict[str, Tensor]) -> None:
        """Take over a copy made earlier, and write it into the layer."""
        for name, tensor in self.tensors.items():
            tensor.copy_(values[name])
        own = dict(self.site.module.named_parameters())
        for name, value in self.parameters().items():
            if name in own:  # which dimensions a sparse layer uses is no parameter, and does not change
                own[name].copy_(value)


def _independent(moments: Moments) -> tuple[Tensor, Tensor]:
    """Into coordinates of the inputs that vary independently and alike, and back: both (width, width)."""
    covariance, _ = moments.shrunk()
    variances, directions = torch.linalg.eigh(covariance)
    deviations = (variances.clamp(min=0) + _RIDGE * variances.mean()).sqrt()
    return directions * deviations, (directions / deviations).mT


def fit(
    every: Sequence[Leaves],
    cases: Sequence[Any],
    loss_of: Callable[[Any], Tensor],
    judge: Callable[[], float],
    steps: int,
    *,
    rate: float,
    generator: torch.Generator,
    ticks: Iterator[int],
    quickly: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
) -> tuple[float, float]:
    """Adam with a falling rate; keeps the best weights `judge` saw, those it began with among them.

    Args:
        every: the layers to fit.
        cases: what `loss_of` takes, one a step, in an order drawn from `generator`.
        loss_of: the error to lower.
        judge: the error on inputs held back, of the weights as they are.
        steps: how many, unless there is nothing left to gain.
        rate: step size, as a share of the size of what is changed, for errors from `_FAR` on.
        generator: of the order of the cases.
        ticks: one is taken a step.
        quickly: what steps run within, and `judge` does not.

    Returns:
        What `judge` said before and after.
    """
    optimiser = torch.optim.Adam([group for leaves in every for group in leaves.groups(rate)], betas=(0.9, 0.95))
    rates = [group["lr"] for group in optimiser.param_groups]
    begun = best = judge()
    # The closer the start, the shorter the steps: too long ones would first undo what there is.
    rates = [own * min(1.0, math.sqrt(max(begun, 0.0) / _FAR)) for own in rates]
    kept = [leaves.values() for leaves in every]
    order: list[int] = []
    slower = 1.0
    for step in range(steps):
        order = order or torch.randperm(len(cases), generator=generator).tolist()
        share = slower * min(1.0, (step + 1) / (0.05 * steps + 1)) * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group, own in zip(optimiser.param_groups, rates, strict=True):
            group["lr"] = own * share
        optimiser.zero_grad()
        with torch.enable_grad(), quickly():
            loss = loss_of(cases[order.pop()])
            if loss.requires_grad:  # none of the layers may run on some inputs
                loss.backward()
        optimiser.step()
        next(ticks, None)
        if (step + 1) % max(1, steps // _CHECKS) and step + 1 < steps:
            continue
        error = judge()
        is_done = step > steps // 2 and abs(best - error) < _WORTH * best
        if error < best:
            best, kept = error, [leaves.values() for leaves in every]
        elif error > begun:  # the steps are too long for what is left to gain: go back, and take shorter ones
            slower *= 0.4
            for leaves, values in zip(every, kept, strict=True):
                leaves.set_(values)
            optimiser.state.clear()
        if is_done:
            break
    for leaves, values in zip(every, kept, strict=True):
        leaves.set_(values)
    return begun, best


@contextlib.contextmanager
def quick_products(precision: str, device: torch.device) -> Iterator[None]:
    """Products of float32 as `PRECISIONS` says, and as before afterwards."""
    if precision == "bfloat16":
        with torch.autocast(device.type, torch.bfloat16):
            yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
