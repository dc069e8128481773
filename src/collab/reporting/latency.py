"""latencies: how long models take for the same inputs, measured briefly and in turn."""

import statistics
import time
from collections.abc import Sequence

import torch
from torch import nn

from collab.running import Batch, call, device_of, evaluating

_WARM_UP = 2
_FEWEST, _MOST = 5, 50
_SECONDS = 1.5


def latencies(models: Sequence[nn.Module], batch: Batch) -> list[list[float]]:
    """Milliseconds of one pass of each model, [model]: the first quartile, the median and the third.

    The models take turns, so that whatever else the machine does falls on all of them; a second or two in all, or five
    rounds if those take longer. Without gradients, in evaluation mode.
    """
    times: list[list[float]] = [[] for _ in models]
    with evaluating(*models), torch.no_grad():
        for model in models:
            for _ in range(_WARM_UP):
                _time(model, batch)
        end = time.perf_counter() + _SECONDS
        while len(times[0]) < _FEWEST or (time.perf_counter() < end and len(times[0]) < _MOST):
            for model, own in zip(models, times, strict=True):
                own.append(_time(model, batch))
    return [statistics.quantiles(own, n=4) for own in times]


def _time(model: nn.Module, batch: Batch) -> float:
    device = device_of(model)
    _wait_for(device)
    start = time.perf_counter()
    call(model, batch, device)
    _wait_for(device)
    return (time.perf_counter() - start) * 1000


def _wait_for(device: torch.device) -> None:
    """Until a GPU has done what it was told to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
