"""The shell of collaborative transformers attention: the calling conventions of the classes it replaces, kept."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, EncoderDecoderCache, StaticLayer

from collab import ops
from collab.hosts import Collaborative
from collab.hosts.linear import LinearHost, Number

_IMPLEMENTATIONS = ("eager", "sdpa")


class TransformersShell(Collaborative):
    """Forward of a collaborative transformers attention: the arguments and results of the class it replaces."""

    host: ClassVar["TransformersHost"]
    _argument_names: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls) -> None:
        original: Any = cls.__bases__[1]
        cls._argument_names = tuple(inspect.signature(original.forward).parameters)[1:]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Attend as the original class does, through shared projections."""
        module = cast(Any, self)
        host = self.host
        given = dict(zip(self._argument_names, args, strict=False)) | kwargs
        query, key, value, past_length = self._project(given)
        mask, causal = self._mask(given, query.shape[1])
        if host.bias is not None:
            bias = host.bias(module, given, query.shape[1], key.shape[1], past_length)
            mask = mask if bias is None else _add_bias(mask, bias)
        attend = partial(
            ops.attention,
            mixing=self.mixing,
            dims=self.dims,
            scale=host.scale(module),
            dropout=host.dropout_of(module),
            need_weights=self._needs_weights(given),
        )
        segments = given.get(host.segments) if host.segments else None
        if segments is None:
            context, weights = attend(query, key, value, mask=mask, causal=causal)
        else:
            lengths = (segments[1:] - segments[:-1]).tolist()
            parts = [tensor.split(lengths, dim=-2) for tensor in (query, key, value)]
            context, weights = _join([attend(*part) for part in zip(*parts, strict=True)])
        output = host.finish(module, given, context.transpose(1, 2).flatten(-2))
        return host.returns(module, given, output, weights)

    def _project(self, given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, int | Tensor]:
        """Query (batch, query, shared), key (batch, key, shared + head), value (batch, head, key, dim), tokens past."""
        module = cast(Any, self)
        query_input, key_input, value_input = self.host.inputs_of(module, given, self._argument_names[0])
        is_cross = given.get(self.host.memory) is not None
        cache: Cache | None = given.get(self.host.cache)
        index = self._layer_index(given) if cache is not None else 0
        is_filled = False
        layers = cache
        if isinstance(cache, EncoderDecoderCache):
            is_filled = is_cross and bool(cache.is_updated.get(index))
            layers = cache.cross_attention_cache if is_cross else cache.self_attention_cache
        past_length: int | Tensor = 0
        if layers is not None and not is_cross:
            past_length = cast(int | Tensor, layers.get_seq_length(index))
            # A static cache hands out its live counter, which the update below moves.
            if isinstance(past_length, Tensor):
                past_length = past_length.clone()

        if layers is not None and is_filled:
            query = self.host.project_query(module, query_input)
            stored = cast(Any, layers.layers[index])
            key, value = self._unpack(stored.keys), stored.values
            return query, key, value, past_length
        projected = self.host.project(module, query_input, key_input, value_input)
        key = projected["key"]
        value = projected["value"].unflatten(-1, (self.mixing.shape[0], -1)).transpose(1, 2)
        if layers is not None:
            key, value = layers.update(self._pack(key, value, layers, index), value, index)
            key = self._unpack(key)
            if is_cross and isinstance(cache, EncoderDecoderCache):
                cache.is_updated[index] = True
        return projected["query"], key, value, past_length

    def _layer_index(self, given: dict[str, Any]) -> int:
        """The cache's layer: the module's own, unless the caller names one, as for a module several layers share."""
        index: int = given["layer_idx"] if "layer_idx" in given else getattr(self, self.host.layer)
        return index

    def _pack(self, key: Tensor, value: Tensor, layers: Cache, index: int) -> Tensor:
        """The shared key once, as the cache's single head; a static cache wants as many heads as the values have."""
        layer: Any = layers.layers[index] if index < len(layers.layers) else None
        packed = key[:, None]
        if isinstance(layer, StaticLayer):
            num_heads = self.mixing.shape[0]
            padding = -key.shape[-1] % num_heads
            packed = nn.functional.pad(key, (0, padding)).unflatten(-1, (num_heads, -1)).transpose(1, 2)
        held = layer.keys if layer is not None and layer.is_initialized else None
        if held is not None and held.numel() and (held.shape[1], held.shape[-1]) != (packed.shape[1], packed.shape[-1]):
            # Chunked prefill makes a static cache ready for the original's keys; any other with such keys was filled.
            if not isinstance(layer, StaticLayer) or int(layer.cumulative_length) > 0:
                raise ValueError(
                    f"the cache must hold this model's shared keys, {tuple(packed[:, :, 0].shape)} a token, "
                    f"got {tuple(held[:, :, 0].shape)}: it was filled by another model"
                )
            held = None
        if held is None and isinstance(layer, StaticLayer):
            _allocate(layer, packed, value)
        return packed

    def _unpack(self, key: Tensor) -> Tensor:
        if key.shape[1] == 1:
            return key[:, 0]
        return key.transpose(1, 2).flatten(-2)[..., : self.shared_dim + len(self.mixing)]

    def _mask(self, given: dict[str, Any], query_length: int) -> tuple[Tensor | None, bool]:
        """The mask, and whether its absence means causal: so it does for "sdpa", never for "eager"."""
        module, host = cast(Any, self), self.host
        if callable(host.mask):
            mask = host.mask(module, given)
        else:
            is_cross = given.get(host.memory) is not None
            name = host.cross_mask if is_cross and host.cross_mask else host.mask
            mask = given.get(name) if name else None
        is_causal = given.get("is_causal")
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        plain = mask is None and host.weights == "interface" and _implementation(module) == "sdpa"
        return mask, plain and query_length > 1 and bool(is_causal)

    def _needs_weights(self, given: dict[str, Any]) -> bool:
        if self.host.weights == "interface":
            return _implementation(cast(Any, self)) == "eager"
        asked = self.host.weights == "asked" and bool(given.get("output_attentions"))
        return asked or self.host.weights == "always"


def _allocate(layer: StaticLayer, key: Tensor, value: Tensor) -> None:
    """Make a static cache ready, the parts of a token's key side by side: read as one row then, without a copy."""
    layer.lazy_initialization(key, value)
    batch, parts, length, part = cast(Tensor, layer.keys).shape
    layer.keys = key.new_zeros(batch, length, parts, part).transpose(1, 2)
    if not torch.compiler.is_compiling():  # as transformers does for the keys it makes
        torch._dynamo.mark_static_address(layer.keys)


def _implementation(module: Any) -> str:
    """Which kind of mask this model makes; anything but "eager" and "sdpa" is refused, never misread."""
    config = getattr(module, "config", None)
    name = getattr(config, "_attn_implementation", None) or "eager"
    if name not in _IMPLEMENTATIONS:
        raise ValueError(f"collaborative attention takes attn_implementation 'eager' or 'sdpa', got {name!r}")
    return str(name)


def _add_bias(mask: Tensor | None, bias: Tensor) -> Tensor:
    """A position bias and a mask as one addend."""
    if mask is None:
        return bias
    return torch.where(mask, bias, torch.finfo(bias.dtype).min) if mask.dtype == torch.bool else bias + mask


def _join(parts: list[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Outputs and weights of sequences packed one after the other, none of which sees another."""
    context = torch.cat([output for output, _ in parts], dim=-2)
    if any(weights is None for _, weights in parts):
        return context, None
    joined = context.new_zeros((*context.shape[:-1], context.shape[-2]))
    start = 0
    for _, weights in parts:
        end = start + cast(Tensor, weights).shape[-1]
        joined[..., start:end, start:end] = cast(Tensor, weights)
        start = end
    return context, joined


Given = dict[str, Any]
"""The arguments of a call by name."""


def pair(module: Any, given: Given, output: Tensor, weights: Tensor | None) -> Any:
    """Output, and weights or None."""
    return output, weights


def pair_if_asked(module: Any, given: Given, output: Tensor, weights: Tensor | None) -> Any:
    """Output alone in a tuple, or with the weights when there are some."""
    return (output,) if weights is None else (output, weights)


def output_alone(module: Any, given: Given, output: Tensor, weights: Tensor | None) -> Any:
    """Output, not in a tuple."""
    return output


def _crosses(module: Any, path: str) -> bool:
    """Whether a module's place says that it attends to another sequence, where its class serves both."""
    ending = ".".join(path.split(".")[-2:])
    return any(word in ending for word in ("cross", "encoder_att", "EncDec", "x_attn"))


@dataclass(frozen=True, kw_only=True)
class TransformersHost(LinearHost):
    """One transformers attention class as data: where its projections are, and what its forward's arguments mean.

    Args:
        mask, memory, cache: names of forward's arguments for the mask, the other sequence and the key/value cache.
            `mask` may be None when the class takes none, or make the mask from the module and the arguments.
        cross_mask: name of the argument that holds the mask over the other sequence, where it is another one.
        segments: name of the argument that says where packed sequences start and end.
        layer: the attribute that holds the module's index in the cache.
        inputs: what is projected to queries, keys and values, each (batch, token, width), from the module and the
            arguments, where it is not the first argument and `memory`.
        bias: makes the addend to the scores, or None, from the module, the arguments, query and key length and cached
            tokens.
        tail: what follows the output projection inside the class, given the module, the arguments and the output.
        weights: when the class returns attention weights: "interface" if it calls transformers' attention interface,
            which gives them for "eager"; else "always", "never", or when "asked" by `output_attentions`.
        returns: forward's result, given the module, the arguments, output and weights.
    """

    shell: type[Collaborative] = TransformersShell
    num_heads: Number = "num_heads"
    head_dim: Number = "head_dim"
    scale_from: str | float | Callable[[Any], float] = "scaling"
    cross: Callable[[Any, str], bool] = _crosses
    mask: str | Callable[[Any, Given], Tensor | None] | None = "attention_mask"
    memory: str = "key_value_states"
    cache: str = "past_key_values"
    cross_mask: str | None = None
    segments: str | None = None
    layer: str = "layer_idx"
    inputs: Callable[[Any, Given], tuple[Tensor, Tensor, Tensor]] | None = None
    bias: Callable[[Any, Given, int, int, int | Tensor], Tensor | None] | None = None
    tail: Callable[[Any, Given, Tensor], Tensor] = lambda module, given, output: output
    weights: str = "interface"
    returns: Callable[[Any, Given, Tensor, Tensor | None], Any] = pair

    def why_not(self, module: nn.Module) -> list[str]:
        """Reasons why this instance cannot be swapped."""
        reasons = super().why_not(module)
        if self.weights == "interface":
            try:
                _implementation(module)
            except ValueError as error:
                reasons.append(str(error))
        return reasons

    def inputs_of(self, module: Any, given: Given, first: str) -> tuple[Tensor, Tensor, Tensor]:
        """What is projected to queries, keys and values."""
        if self.inputs is not None:
            return self.inputs(module, given)
        hidden_states, memory = given[first], given.get(self.memory)
        source = hidden_states if memory is None else memory
        return hidden_states, source, source

    def finish(self, module: Any, given: Given, context: Tensor) -> Tensor:
        """From concatenated heads (batch, query, heads x value size) to the module's output."""
        output = context if self.out is None else getattr(module, self.out)(context)
        return self.tail(module, given, output)

    def project_query(self, module: Any, query: Tensor) -> Tensor:
        """The shared query alone, when keys and values are cached already."""
        return cast(Tensor, getattr(module, self._block("query").name)(query))
