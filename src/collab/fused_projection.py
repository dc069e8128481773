"""One matrix product for several linear layers that read the same input.

Where the weights allow it they move, once, to one piece of memory, from which one product takes them all: no call
copies them, and nothing is held twice. Each parameter stays the object it is and has a storage of its own and of its
own size, which looks into that memory. So whoever saves, counts, ties or moves parameters meets ordinary ones, and
updates in place reach the product. Parameters that left, for another type or device or because others took their
place, move again when the layers run next.
"""

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from collab.tracing import is_exporting

DEVICES = {"cuda"}
"""Types of device on which one large product is faster than several."""

_ALIGNMENT = 8
"""Every layer's outputs start at a multiple of this column: at 16 bytes, which fast loads want, in half precision."""

_PLAIN = (Tensor, nn.Parameter)
"""Types of tensors that are what they seem: no quantised, sharded, fake or nested ones."""

Parts = Sequence[Tensor | None]
"""Weights, or biases, of the layers in their order."""


def project_together(linears: Sequence[nn.Module], inputs: Tensor) -> list[Tensor] | None:
    """The outputs of several linear layers for one input from one product; None where each must be called by itself.

    None it is on other devices than `DEVICES`, while a model is exported, and unless every layer is an `nn.Linear` as
    torch made it, with plain parameters and no hooks.

    Args:
        linears: the layers, whose weights may move; see the top of this file.
        inputs: (..., width).

    Returns:
        (..., outputs) of each layer, views of one tensor.
    """
    if inputs.device.type not in DEVICES or _is_traced() or type(inputs) not in _PLAIN or _has_global_hooks():
        return None
    if not all(_is_plain(linear) for linear in linears):
        return None
    weights, biases = ([linear._parameters[name] for linear in linears] for name in ("weight", "bias"))
    joined = _joined(weights, biases, inputs)
    if joined is None:
        return None
    weight, bias, sizes = joined
    # Split, not sliced: the gradient of one split is one concatenation, that of every slice is as large as the whole.
    return list(functional.linear(inputs, weight, bias).split(sizes, dim=-1)[::2])


def _is_traced() -> bool:
    """Whether what runs now is written down as a graph for others, who should see the layers."""
    return is_exporting() or torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]


def _has_global_hooks() -> bool:
    """Whether somebody watches every module's calls."""
    return bool(nn.modules.module._has_any_global_hook())


def _is_plain(linear: nn.Module) -> bool:
    """Whether calling this layer is its product and nothing else, as far as the layer goes."""
    hooks = (linear._forward_hooks, linear._forward_pre_hooks, linear._backward_hooks, linear._backward_pre_hooks)
    return (
        type(linear) is nn.Linear
        and not any(hooks)
        and "forward" not in linear.__dict__
        and "weight" in linear._parameters
        and "bias" in linear._parameters
    )


def _joined(weights: Parts, biases: Parts, inputs: Tensor) -> tuple[Tensor, Tensor | None, list[int]] | None:
    """Weight and bias of all the layers as one, through which gradients reach theirs, and lengths `_with_padding`.

    None if that cannot be, or is not worth it.
    """
    # A graph that is compiled must not depend on where in memory weights are.
    is_compiled = torch.compiler.is_compiling()
    packed = None if is_compiled else _found(weights, biases)
    if packed is None and not _fit(weights, biases):
        return None
    whole = weights[0] if packed is None else packed.weight
    if whole is None or not _takes(whole, inputs):
        return None
    learns = torch.is_grad_enabled() and any(map(_learns, (inputs, *weights, *biases)))
    if not learns and not is_compiled and _is_cast(whole):
        return None  # autocast may keep what it makes of the layers' own weights, but not of these
    if packed is None and not is_compiled:
        packed = _pack(weights, biases)
    if packed is None:
        return _concatenate(weights, biases) if learns or is_compiled else None
    weight, bias = packed.weight, packed.bias
    if learns:
        if any(map(_learns, weights)):
            weight = _Joined.apply(packed.sizes, weight, *weights)
        if bias is not None and any(map(_learns, biases)):
            bias = _Joined.apply(packed.sizes, bias, *biases)
    return weight, bias, packed.sizes


def _fit(weights: Parts, biases: Parts) -> bool:
    """Whether these are (outputs, width) and (outputs) of one width, of one type and on one device."""
    first = weights[0]
    for weight, bias in zip(weights, biases, strict=True):
        if first is None or weight is None or type(weight) not in _PLAIN or weight.dim() != 2:
            return False
        if weight.shape[1] != first.shape[1] or weight.device != first.device or weight.dtype != first.dtype:
            return False
        if bias is not None and (
            type(bias) not in _PLAIN
            or bias.shape != weight.shape[:1]
            or bias.device != first.device
            or bias.dtype != first.dtype
        ):
            return False
    return True


def _takes(weight: Tensor, inputs: Tensor) -> bool:
    """Whether the product of inputs and a weight can be taken; with autocast it makes them of one type."""
    is_of_type = inputs.dtype == weight.dtype or torch.is_autocast_enabled(inputs.device.type)
    return is_of_type and inputs.device == weight.device and inputs.shape[-1] == weight.shape[1]


def _learns(part: Tensor | None) -> bool:
    return part is not None and part.requires_grad


def _is_cast(weight: Tensor) -> bool:
    """Whether autocast gives a product another type than the weight's."""
    if not torch.is_autocast_enabled(weight.device.type):
        return False
    return torch.get_autocast_dtype(weight.device.type) != weight.dtype


def _with_padding(weights: Parts) -> list[int]:
    """How many rows each weight has, each followed by how many it is padded with."""
    lengths = [len(weight) for weight in weights if weight is not None]
    return [size for length in lengths for size in (length, -length % _ALIGNMENT)]


def _concatenate(weights: Parts, biases: Parts) -> tuple[Tensor, Tensor | None, list[int]]:
    """What `_joined` gives, made anew: copies, with zeros between."""
    sizes = _with_padding(weights)
    padded = [
        functional.pad(weight, (0, 0, 0, padding))
        for weight, padding in zip(weights, sizes[1::2], strict=True)
        if weight is not None
    ]
    if all(bias is None for bias in biases):
        return torch.cat(padded), None, sizes
    padded_biases = [
        rows.new_zeros(len(rows)) if bias is None else functional.pad(bias, (0, padding))
        for bias, rows, padding in zip(biases, padded, sizes[1::2], strict=True)
    ]
    return torch.cat(padded), torch.cat(padded_biases), sizes


class _Joined(torch.autograd.Function):
    """What holds all parts already, as a function of the parts: a concatenation that copies nothing."""

    generate_vmap_rule = True

    @staticmethod
    def forward(sizes: list[int], joined: Tensor, *parts: Tensor | None) -> Tensor:
        """`joined`; `sizes` are its parts' lengths, each followed by its padding's."""
        return joined.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.sizes, _, *parts = inputs
        ctx.save_for_backward(*parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Each part's rows of the gradient."""
        # Looked at only for the error that it is if they were changed in place since: `joined` changed with them.
        _ = ctx.saved_tensors
        rows = gradients[0].split(ctx.sizes)[::2]
        wanted = ctx.needs_input_grad[2:]
        return None, None, *(part if is_wanted else None for part, is_wanted in zip(rows, wanted, strict=True))


class _Packed:
    """Weights (and biases) of several layers in one piece of memory each, rows of zeros between.

    It lives as long as a storage that looks into it: those of the parameters hold it, it holds none of them.
    """

    def __init__(self, weights: Sequence[Tensor], biases: Parts) -> None:
        sizes = self.sizes = _with_padding(weights)
        self.weight = weights[0].new_zeros((sum(sizes), weights[0].shape[1]))
        self.bias = None if all(bias is None for bias in biases) else weights[0].new_zeros(sum(sizes))
        self.storages: list[weakref.ref[torch.UntypedStorage]] = []
        starts = [sum(sizes[:index]) for index in range(0, len(sizes), 2)]
        moves: list[tuple[Tensor, Tensor]] = []
        for whole, parts in ((self.weight, weights), (self.bias, biases)):
            for start, part in zip(starts, parts, strict=True):
                if whole is not None and part is not None:
                    moves.append((part, self._window(whole[start : start + len(part)]).copy_(part)))
        if self.weight.is_cuda:  # other streams may still read the old places, or be about to read the new ones
            torch.cuda.synchronize(self.weight.device)
        for part, moved in moves:
            part.data = moved
        self.places = _places(weights, biases)

    def _window(self, rows: Tensor) -> Tensor:
        """These rows as a tensor whose storage ends where they do, as an ordinary parameter's does."""
        start = rows.storage_offset() * rows.element_size()
        storage: Any = rows.untyped_storage()[start : start + rows.nbytes]
        # Python's side of a storage lives as long as the storage, so this is there as long as the parameter is.
        storage.collab_packed = self
        self.storages.append(weakref.ref(storage))
        return rows.new_empty(0).set_(storage, 0, rows.shape, rows.stride())

    @property
    def is_whole(self) -> bool:
        """Whether no parameter has left."""
        return all(storage() is not None for storage in self.storages)


_packing = threading.Lock()


def _pack(weights: Parts, biases: Parts) -> _Packed | None:
    """Move these to one piece of memory; None if they must stay where they are."""
    with _packing, torch.inference_mode(False), torch.no_grad():
        found = _found(weights, biases)  # another thread has packed them meanwhile
        if found is not None:
            return found
        parts = [part for part in (*weights, *biases) if part is not None]
        if len(set(map(id, parts))) < len(parts) or not all(map(_may_move, parts)):
            return None
        if parts[0].is_cuda and torch.cuda.is_current_stream_capturing():
            for part in parts:  # the graph will look for them where they are
                _storage(part).collab_packed = None
            return None
        return _Packed([weight for weight in weights if weight is not None], biases)


def _found(weights: Parts, biases: Parts) -> _Packed | None:
    """Where these are packed already, in this order."""
    if type(weights[0]) is not nn.Parameter:
        return None
    packed: _Packed | None = getattr(_storage(weights[0]), "collab_packed", None)
    return packed if packed is not None and packed.places == _places(weights, biases) else None


def _places(weights: Parts, biases: Parts) -> list[Any]:
    """Where in memory each is, and how to read it there."""
    return [_place(part) for part in (*weights, *biases)]


def _place(part: Tensor | None) -> Any:
    if type(part) is nn.Parameter:
        return part.data_ptr(), part.shape, part.stride(), part.dtype
    return None if part is None else id(part)  # other tensors never move


def _may_move(part: Tensor) -> bool:
    """Whether nothing but this parameter knows of its memory."""
    if type(part) is not nn.Parameter or part.is_inference() or not part.is_contiguous():
        return False
    if part.layout != torch.strided or part.untyped_storage().nbytes() != part.nbytes:
        return False
    if part.device.type == "cpu" and part.is_shared():  # with other processes
        return False
    storage = _storage(part)
    if hasattr(storage, "collab_packed") and (storage.collab_packed is None or storage.collab_packed.is_whole):
        return False  # it is used with others, or by a graph
    # Known to the parameter, and to the storage as Python sees it here. Whoever else knows (a view, a state dict, what
    # gathers sharded parameters) would be left with memory that is no longer the parameter's.
    return torch._C._storage_Use_Count(storage._cdata) <= 2


def _storage(part: Tensor) -> Any:
    return part.untyped_storage()
