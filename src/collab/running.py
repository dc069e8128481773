"""Running a model on batches without leaving a trace: modes, random numbers and caches are as they were afterwards."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch import Tensor, nn

Batch = Mapping[str, Any] | Tensor | tuple[Any, ...] | list[Any]
"""Keyword arguments of a model (what a tokenizer gives), one tensor, or a tuple of positional arguments."""

Progress = Callable[[Iterable[Any], int], Iterable[Any]]
"""Wraps a loop, given it and its length (0 where that is not known): a progress bar."""


@contextlib.contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Evaluation mode, and afterwards every module's own mode again: a model may be partly frozen."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def step_by_step(model: nn.Module) -> Iterator[None]:
    """Evaluation mode in which every module is called: no cache of keys, no kernel that skips whole layers."""
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    caching = {id(config): config for config in configs if getattr(config, "use_cache", None)}
    is_fast = torch.backends.mha.get_fastpath_enabled()
    with evaluating(model):
        for config in caching.values():
            config.use_cache = False
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(is_fast)
            for config in caching.values():
                config.use_cache = True


def device_of(model: nn.Module) -> torch.device:
    """Where a model's first parameter is."""
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def call(model: Callable[..., Any], batch: Batch, device: torch.device, seed: int = 0) -> Any:
    """One batch's outputs. Models that draw random numbers even in evaluation (ViT-MAE) draw the same for a seed."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        # Those generators alone that are put back: torch.manual_seed would reach every device there is.
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        if isinstance(batch, Mapping):
            return model(**{name: _to(value, device) for name, value in batch.items()})
        if isinstance(batch, tuple | list):
            return model(*(_to(value, device) for value in batch))
        if isinstance(batch, Tensor):
            return model(batch.to(device))
    raise ValueError(f"a batch must be a mapping, a tensor or a tuple, got {type(batch).__name__}")


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def split_batch(batch: Batch, size: int, model: nn.Module) -> list[Batch]:
    """A batch as several of at most `size` inputs each; as it is where it cannot be told how to split it."""
    is_named, is_sequence = isinstance(batch, Mapping), isinstance(batch, tuple | list)
    named: dict[Any, Any] = dict(batch) if is_named else dict(enumerate(batch if is_sequence else [batch]))
    parts = list(named.values())
    rows = {len(part) if isinstance(part, Tensor) and part.dim() else 0 for part in parts}
    if len(rows) != 1 or max(rows) <= size or _may_be_tokens(named, max(rows)) or _reads_tokens_first(model):
        return [batch]
    pieces = [
        {name: part[start : start + size] for name, part in named.items()} for start in range(0, rows.pop(), size)
    ]
    if is_named:
        return list(pieces)
    return [tuple(piece.values()) if is_sequence else piece[0] for piece in pieces]


def _may_be_tokens(named: Mapping[Any, Tensor], rows: int) -> bool:
    """Whether rows of some mask may be tokens: there are as many of those as inputs, and no name says which it is."""
    as_many = any(part.dim() > 1 and part.shape[1] == rows for part in named.values())
    masks = (
        name
        for name, part in named.items()
        if part.dim() == 2 and (part.dtype == torch.bool or part.is_floating_point())
    )
    return as_many and any(not ("padding" in str(name) or name == "attention_mask") for name in masks)


def _reads_tokens_first(model: nn.Module) -> bool:
    """Whether attention in the model reads (token, batch, width): the model's own inputs may be like that."""
    return any(isinstance(module, nn.MultiheadAttention) and not module.batch_first for module in model.modules())


def length_of(steps: Iterable[Any]) -> int:
    """How many steps there are, 0 if that is not known."""
    return len(steps) if isinstance(steps, Sized) else 0


def tokens_that_count(model: nn.Module, batch: Batch, path: str, shape: torch.Size, *, keys: bool) -> Tensor | None:
    """Which tokens of an attention layer's input (batch, token, ...) are not padding; None if all are, or who knows.

    Args:
        model: the model, whose config says whether it is an encoder-decoder model.
        batch: the inputs of the whole model.
        path: where the layer is: in an encoder-decoder model, which of the two masks is meant.
        shape: of the layer's input.
        keys: whether that input is what cross-attention makes keys of: another sequence, with a mask of its own.
    """
    if not isinstance(batch, Mapping):
        return None
    is_two = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    # A decoder run on its own is told what the encoder gave, and calls its own mask what a whole model calls the other.
    is_alone = batch.get("encoder_hidden_states") is not None
    mask = batch.get("attention_mask")
    if keys:
        # Perceiver, whose only sequence is called "inputs", reads that by cross-attention.
        has_mask = (is_two or "inputs" in batch) and not is_alone
        mask = mask if has_mask else batch.get("encoder_attention_mask")
    elif is_two and not is_alone and "decoder" in path.lower():
        labels = batch.get("labels")
        mask = batch.get("decoder_attention_mask")
        mask = labels != -100 if mask is None and labels is not None else mask
    elif _reads_another_input(model, path):
        return None
    if not isinstance(mask, Tensor) or mask.shape != shape[:2]:
        return None
    is_unclear = not is_two and not keys and _has_second_sequence(model, batch, mask.shape)
    return None if is_unclear else mask != 0


def _reads_another_input(model: nn.Module, path: str) -> bool:
    """Whether a layer is in a part that reads images or sound beside the text, whose mask says nothing of those."""
    if any(word in path.lower() for word in ("vision", "visn", "image", "audio")):
        return True
    own = getattr(model, "main_input_name", None)
    parts = path.split(".")
    towers = [model.get_submodule(".".join(parts[:end])) for end in range(1, len(parts))]
    named = [name for name in (getattr(tower, "main_input_name", None) for tower in towers) if name is not None]
    return bool(named) and named[-1] not in (own, "input_ids")


def _has_second_sequence(model: nn.Module, batch: Mapping[str, Any], shape: torch.Size) -> bool:
    """Whether the batch has another sequence of features (LXMERT's image regions) that is just as long as the text."""
    known = ("inputs_embeds", "encoder_hidden_states", getattr(model, "main_input_name", None))
    return any(
        isinstance(value, Tensor) and value.dim() == 3 and value.is_floating_point() and value.shape[:2] == shape
        for name, value in batch.items()
        if name not in known
    )
