"""Effects: what an error in one layer's scores does to the output of the model, measured on some inputs."""

from collections.abc import Iterable

import torch
from torch import nn

from collab.calibration import SiteStatistics
from collab.closeness import logit_squares_of, squares_of
from collab.conversion import Metric, shared_from
from collab.decomposition import decompose
from collab.evaluate import are_logits, pick_output, positions_that_count
from collab.inspection import AttentionSite
from collab.running import Batch, call, device_of, split_batch, step_by_step
from collab.structure import host_at
from collab.twins import Twin

_INPUTS = 64
"""That are looked at: effects differ by orders of magnitude, and a few inputs tell those apart."""

_TOGETHER = 16
"""Inputs that are run at once."""

_LEAST_ERROR = 0.01
"""Of a layer's scores, relative, for its effect to be more than rounding."""


class Effects:
    """Makes one layer after the other worse than it is, and looks at what comes out of the model.

    Layers differ much in it: the softmax of one hardly changes with its scores, and later layers make up for some of
    what earlier ones do.
    """

    def __init__(self, model: nn.Module, batches: Iterable[Batch]) -> None:
        self._model, self._device = model, device_of(model)
        self._batches: list[Batch] = []
        for batch in batches:
            self._batches += split_batch(batch, _TOGETHER, model)
            if len(self._batches) * _TOGETHER >= _INPUTS:
                break
        if not self._batches:
            raise ValueError("batches must be there when they are read a second time, got none: give a list")

    @torch.no_grad()
    def of(self, site: AttentionSite, statistics: SiteStatistics | None) -> float:
        """Relative squared error of the model's output for one of the layer's scores; 0 where sizes cost nothing."""
        host, module = host_at(site), site.module
        weights = host.read(module)
        metric = Metric.of(statistics, weights.query.device)
        query, key = metric.enter(weights)
        size = site.full_dim
        while size > 1:
            size //= 2
            if host.size_problem(module, size) is not None:
                continue
            factors = decompose(query, key, size, max_iterations=0)
            if factors.relative_error < _LEAST_ERROR:
                continue
            twin = Twin(site)
            try:
                host.install_(module, shared_from(weights, factors, metric, None))
                twin.swapped()
                return self._output_error(twin) / factors.relative_error**2
            finally:
                twin.show(original=True)
        return 0.0

    def _output_error(self, twin: Twin) -> float:
        total = squares = 0.0
        with step_by_step(self._model):
            for batch in self._batches:
                twin.show(original=True)
                name, target = self._output(batch)
                twin.show(original=False)
                _, output = self._output(batch)
                is_logits = are_logits(self._model, name, target)
                counts = positions_that_count(self._model, batch, target)
                missed, size = (logit_squares_of if is_logits else squares_of)(output, target, counts)
                total, squares = total + float(missed), squares + float(size)
        return total / max(squares, 1e-300)

    def _output(self, batch: Batch) -> tuple[str, torch.Tensor]:
        return pick_output(call(self._model, batch, self._device), type(self._model).__name__)
