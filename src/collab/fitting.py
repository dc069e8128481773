"""Fitting the shared weights of some layers to an aim: what is fitted, and the steps that do it."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from collab.hosts import SharedWeights
from collab.inspection import AttentionSite
from collab.structure import host_at

_CHECKS = 8
"""How many times a fit looks at the inputs held back: to keep the best it saw, to slow down, and to stop early."""

_FAR = 0.1
"""Error from which on steps are as long as the rate says."""

_WORTH = 2e-3
"""A fit goes on while the error on inputs held back changes by this share of it between two looks."""


class Leaves:
    """One layer's shared weights in float32, to be fitted."""

    def __init__(self, site: AttentionSite) -> None:
        self.site = site
        shared = host_at(site).shared_weights(site.module)
        self.dims = shared.dims
        self.tensors = {
            name: getattr(shared, name).float().requires_grad_() for name in ("query", "key", "mixing", "content")
        }

    def parameters(self) -> dict[str, Tensor]:
        """What the layer's own parameters are with these weights."""
        shared = SharedWeights(**self.tensors, dims=self.dims)
        return host_at(self.site).parameters_from(self.site.module, shared)

    def groups(self, rate: float) -> list[dict[str, Any]]:
        """For an optimiser: steps in proportion to the size of what they change; content may still be all zeros."""
        sizes = {name: float(tensor.detach().square().mean().sqrt()) for name, tensor in self.tensors.items()}
        sizes["content"] = max(sizes["content"], sizes["key"])
        return [{"params": [tensor], "lr": rate * sizes[name]} for name, tensor in self.tensors.items()]

    def values(self) -> dict[str, Tensor]:
        """A copy of the weights."""
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

    Returns:
        What `judge` said before and after.
    """
    optimiser = torch.optim.Adam([group for leaves in every for group in leaves.groups(rate)], betas=(0.9, 0.95))
    rates = [group["lr"] for group in optimiser.param_groups]
    begun = best = judge()
    # The closer the start, the shorter the steps: too long ones would first undo what there is.
    rates = [own * min(1.0, math.sqrt(begun / _FAR)) for own in rates]
    kept = [leaves.values() for leaves in every]
    order: list[int] = []
    slower = 1.0
    for step in range(steps):
        order = order or torch.randperm(len(cases), generator=generator).tolist()
        share = slower * min(1.0, (step + 1) / (0.05 * steps + 1)) * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group, own in zip(optimiser.param_groups, rates, strict=True):
            group["lr"] = own * share
        optimiser.zero_grad()
        with torch.enable_grad():
            loss_of(cases[order.pop()]).backward()
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
