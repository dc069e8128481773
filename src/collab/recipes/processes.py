"""The processes of one training: which one this is, and how they agree. One process is the case of a single one."""

import os
from typing import Any

import torch
from torch import distributed


def count() -> int:
    """How many processes train together: those that torchrun started, else one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Which of them this is, from 0."""
    return int(os.environ.get("RANK", "0"))


def is_main() -> bool:
    """Whether this is the one that writes files and shows progress."""
    return rank() == 0


def device_named(name: str) -> torch.device:
    """What `auto`, `cpu` or `cuda` means for this process; `auto` is CUDA where there is a device."""
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device must be cpu where there is no CUDA device, got 'cuda'")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def start(device: torch.device) -> None:
    """Connect the processes, if there are several and they are not connected yet."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if count() > 1 and not distributed.is_initialized():
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")


def agree(value: Any) -> Any:
    """The main process's value, in all of them; all must call this."""
    if count() == 1 or not distributed.is_initialized():
        return value
    values = [value]
    distributed.broadcast_object_list(values, src=0)
    return values[0]
