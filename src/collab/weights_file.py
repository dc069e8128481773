"""Weights in safetensors files: every tensor once, checked before use. Nothing is ever pickled or unpickled."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_ALIASES = "aliases"
"""Entry of a file's metadata: name of a tensor -> the name under which the same tensor is in the file."""


class CheckpointError(ValueError):
    """A directory is not the collaborative checkpoint it should be; the message names the file and what is wrong."""


def read_shapes(files: Iterable[str | os.PathLike[str]]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors in these files, each of which must be a whole safetensors file."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with _open(file) as opened:
            shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    return shapes


def write_weights(model: nn.Module, file: Path) -> None:
    """Write a model's state, tensors that have several names once."""
    save_file = _safetensors().torch.save_file
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    names: dict[Any, str] = {}
    storages: set[int] = set()
    for name, tensor in model.state_dict().items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else name
        if place in names:
            aliases[name] = names[place]
            continue
        names[place] = name
        # Other views of one storage are written apart: the model that reads them makes its own.
        storage = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone().contiguous() if storage in storages else tensor.contiguous()
        storages.add(storage)
    # One entry: safetensors writes several in any order, and the same model should give the same file.
    save_file(tensors, file, metadata={_ALIASES: json.dumps(aliases)} if aliases else {"format": "pt"})


def check_fits(model: nn.Module, file: Path) -> None:
    """Check that a file has every tensor of a model, of its shape, and no other."""
    found = read_shapes([file])
    aliases = _aliases(file)
    found |= {name: found[kept] for name, kept in aliases.items() if kept in found}
    wanted = model.state_dict(keep_vars=True)
    for problem, names in (("no", wanted.keys() - found.keys()), ("unexpected", found.keys() - wanted.keys())):
        if names:
            raise CheckpointError(f"{file} has {problem} {', '.join(sorted(names))}")
    filled: dict[int, str] = {}
    for name, tensor in wanted.items():
        if found[name] != tuple(tensor.shape):
            raise CheckpointError(f"{name} in {file} must be {tuple(tensor.shape)}, got {found[name]}")
        source = aliases.get(name, name)
        if filled.setdefault(id(tensor), source) != source:
            raise CheckpointError(
                f"{file} has {filled[id(tensor)]} and {source} as two tensors, which {type(model).__name__} ties to one"
            )


@torch.no_grad()
def read_weights_(model: nn.Module, file: Path) -> None:
    """Fill a model that `check_fits`, each tensor with the type it was saved with."""
    aliases = _aliases(file)
    with _open(file) as opened:
        for name, target in model.state_dict(keep_vars=True).items():
            tensor = opened.get_tensor(aliases.get(name, name))
            # Changing a parameter's data, not the parameter, keeps tied weights tied.
            if target.dtype != tensor.dtype:
                target.data = target.data.to(tensor.dtype)
            target.copy_(tensor)


def read_tensor(file: Path, name: str) -> Tensor:
    """One tensor of a file, by any of its names."""
    source = _aliases(file).get(name, name)
    with _open(file) as opened:
        tensor: Tensor = opened.get_tensor(source)
    return tensor


def _aliases(file: Path) -> dict[str, str]:
    with _open(file) as opened:
        text = (opened.metadata() or {}).get(_ALIASES, "{}")
    try:
        return {str(name): str(kept) for name, kept in json.loads(text).items()}
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"metadata of {file} is damaged: {error}") from error


def _open(file: str | os.PathLike[str]) -> Any:
    safetensors = _safetensors()
    if Path(file).suffix != ".safetensors":
        raise CheckpointError(f"{file} must be a safetensors file: nothing else is read, pickles least of all")
    if not Path(file).is_file():
        raise CheckpointError(f"{file} is missing")
    try:
        return safetensors.safe_open(file, framework="pt")
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is not a whole safetensors file: {error}") from error


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("saving and loading need safetensors: pip install safetensors") from error
    return safetensors
