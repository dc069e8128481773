"""The mean of the last few states of a model in training: kept in files while it trains, averaged at the end."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Averaging:
    """Keeps weights at the last steps, `every` apart, of which the last one is the training's last.

    Args:
        folder: where they are kept, a file a step; a file that is there is whole.
        last_step: of the training; if it changes, then before the first of the states is due.
        count: how many are kept.
        every: steps between them.
    """

    folder: Path
    last_step: int
    count: int
    every: int

    @property
    def steps(self) -> list[int]:
        """At which weights are kept."""
        steps = [self.last_step - self.every * back for back in range(self.count)]
        return sorted(step for step in steps if step > 0)

    def after_step(self, step: int, model: nn.Module) -> None:
        """Keep the model's weights, if this is a step to do so; of several processes the first one writes."""
        if step not in self.steps:
            return
        weights = {name: _whole(parameter) for name, parameter in trained(model).items()}
        if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
            return
        from safetensors.torch import save_file

        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self._file(step).with_suffix(".partial")
        save_file(weights, partial)
        partial.replace(self._file(step))

    @torch.no_grad()
    def load_(self, model: nn.Module) -> Sequence[int]:
        """Give the model the mean of what was kept, summed in float32; returns the steps it is of."""
        from safetensors.torch import load_file

        kept = [step for step in self.steps if self._file(step).is_file()]
        if not kept:
            raise FileNotFoundError(f"{self.folder} must hold weights of the steps {self.steps}: there are none")
        total: dict[str, Tensor] = {}
        for step in kept:
            for name, weight in load_file(self._file(step)).items():
                total[name] = total[name] + weight.float() if name in total else weight.float()
        for name, parameter in trained(model).items():
            parameter.copy_(total[name] / len(kept))
        return kept

    def clear(self) -> None:
        """Remove what was kept."""
        for step in self.steps:
            self._file(step).unlink(missing_ok=True)

    def _file(self, step: int) -> Path:
        return self.folder / f"step-{step}.safetensors"


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that are trained, by name, shared ones once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _whole(parameter: Any) -> Tensor:
    """On the CPU, from all processes where it is in pieces."""
    whole: Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return whole.detach().cpu().contiguous().clone()
