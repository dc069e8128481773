"""FSDP2: a model's parameters, gradients and optimiser state, each process holding its share."""

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from collab.recipes import processes

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def shard_(model: nn.Module) -> nn.Module:
    """Shard a model over all processes, in place: the blocks of its lists one by one, then the rest."""
    if processes.count() == 1:
        raise ValueError("fsdp must be false for a single process: start several with torchrun")
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList):
            for block in module:
                if any(True for _ in block.parameters()):
                    fully_shard(block)
    fully_shard(model)
    return model


def leave_whole(accelerator: Any) -> None:
    """Make accelerate take a model that is sharded already as it is: no wrapper around it, no move."""
    accelerator.prepare_model = functools.partial(_prepare, accelerator.prepare_model)


def _prepare(prepare_model: Any, model: nn.Module, **_: Any) -> Any:
    return prepare_model(model, device_placement=False, evaluation_mode=True)


def whole_state(model: nn.Module) -> dict[str, Any]:
    """Every parameter and buffer whole, on the CPU of every process."""
    return dict(processes.agree(get_model_state_dict(model, options=_WHOLE)))


def whole_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimiser's state, whole; on the main process only."""
    return dict(get_optimizer_state_dict(model, optimizer, options=_WHOLE))


def load_whole_(model: nn.Module, state: dict[str, Any]) -> None:
    """Each process takes its share of what `whole_state` gave."""
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))


def load_whole_optimizer_(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Each process takes its share of what `whole_optimizer_state` gave."""
    set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(full_state_dict=True))
