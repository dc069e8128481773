"""The shell of collaborative transformers attention: the calling conventions of the classes it replaces, kept."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, EncoderDecoderCache, StaticLayer

from collab import ops
from collab.hosts import Collaborative
from collab.hosts.linear import LinearHost

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
        hidden_states = given[self._argument_names[0]]
        memory = given.get(host.memory)
        located = hidden_states
        if host.positions is not None and given.get(host.positions) is not None:
            located = hidden_states + given[host.positions]
        query, key, value, past_length = self._project(given, located, hidden_states, memory)

        mask, causal = self._mask(given, query.shape[1])
        bias = None
        if host.bias is not None:
            bias = host.bias(module, given, query.shape[1], key.shape[1], past_length)
            mask = _add_bias(mask, bias)
        eager = _implementation(module) == "eager"
        context, weights = ops.attention(
            query,
            key,
            value,
            self.mixing,
            scale=host.scale(module),
            mask=mask,
            causal=causal,
            dropout=host.dropout_of(module),
            need_weights=eager,
        )
        context = context.transpose(1, 2).flatten(-2)
        output = host.finish(module, context, hidden_states)
        return host.returns(output, weights, bias, given)

    def _project(
        self, given: dict[str, Any], located: Tensor, hidden_states: Tensor, memory: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, int | Tensor]:
        """Query (batch, query, shared), key (batch, key, shared + head), value (batch, head, key, dim), tokens past."""
        module = cast(Any, self)
        is_cross = memory is not None
        cache: Cache | None = given.get(self.host.cache)
        is_filled = False
        layers = cache
        if isinstance(cache, EncoderDecoderCache):
            is_filled = is_cross and bool(cache.is_updated.get(module.layer_idx))
            layers = cache.cross_attention_cache if is_cross else cache.self_attention_cache
        past_length: int | Tensor = 0
        if layers is not None and not is_cross:
            past_length = cast(int | Tensor, layers.get_seq_length(module.layer_idx))
            # A static cache hands out its live counter, which the update below moves.
            if isinstance(past_length, Tensor):
                past_length = past_length.clone()

        if layers is not None and is_filled:
            query = self.host.project_query(module, located)
            stored = layers.layers[module.layer_idx]
            key, value = self._unpack(stored.keys), stored.values
            return query, key, value, past_length
        source = located if memory is None else memory
        projected = self.host.project(module, located, source, hidden_states if memory is None else memory)
        key = projected["key"]
        value = projected["value"].unflatten(-1, (self.mixing.shape[0], -1)).transpose(1, 2)
        if layers is not None:
            key, value = layers.update(self._pack(key, layers), value, module.layer_idx)
            key = self._unpack(key)
            if is_cross and isinstance(cache, EncoderDecoderCache):
                cache.is_updated[module.layer_idx] = True
        return projected["query"], key, value, past_length

    def _pack(self, key: Tensor, layers: Cache) -> Tensor:
        """The shared key once, as the cache's single head; a static cache wants as many heads as the values have."""
        index = cast(Any, self).layer_idx
        if not (index < len(layers.layers) and isinstance(layers.layers[index], StaticLayer)):
            return key[:, None]
        num_heads = self.mixing.shape[0]
        padding = -key.shape[-1] % num_heads
        packed: Tensor = nn.functional.pad(key, (0, padding)).unflatten(-1, (num_heads, -1))
        return packed.transpose(1, 2)

    def _unpack(self, key: Tensor) -> Tensor:
        if key.shape[1] == 1:
            return key[:, 0]
        return key.transpose(1, 2).flatten(-2)[..., : sum(self.mixing.shape)]

    def _mask(self, given: dict[str, Any], query_length: int) -> tuple[Tensor | None, bool]:
        """The mask as given, and whether its absence means causal: so it does for "sdpa", never for "eager"."""
        module = cast(Any, self)
        is_cross = given.get(self.host.memory) is not None
        mask = given.get(self.host.cross_mask if is_cross and self.host.cross_mask else self.host.mask)
        is_causal = given.get("is_causal")
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        causal = mask is None and query_length > 1 and bool(is_causal) and _implementation(module) == "sdpa"
        return mask, causal


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


def _pair(output: Tensor, weights: Tensor | None, bias: Tensor | None, given: dict[str, Any]) -> Any:
    return output, weights


@dataclass(frozen=True, kw_only=True)
class TransformersHost(LinearHost):
    """One transformers attention class as data: where its projections are, and what its forward's arguments mean.

    Args:
        mask, memory, cache: names of forward's arguments for the mask, the other sequence and the key/value cache.
        cross_mask: name of the argument that holds the mask over the other sequence, where it is another one.
        positions: name of the argument added to the input of queries and keys, but not of values.
        bias: makes the addend to the scores from the module, the arguments, query and key length and cached tokens.
        tail: what follows the output projection inside the class, given the module, its output and the input.
        returns: forward's result, given output, weights, bias and arguments.
    """

    shell: type[Collaborative] = TransformersShell
    num_heads: str = "num_heads"
    head_dim: str = "head_dim"
    scale_from: str | float | Callable[[Any], float] = "scaling"
    mask: str = "attention_mask"
    memory: str = "key_value_states"
    cache: str = "past_key_values"
    cross_mask: str | None = None
    positions: str | None = None
    bias: Callable[[Any, dict[str, Any], int, int, int | Tensor], Tensor] | None = None
    tail: Callable[[Any, Tensor, Tensor], Tensor] = lambda module, output, hidden_states: output
    returns: Callable[[Tensor, Tensor | None, Tensor | None, dict[str, Any]], Any] = _pair

    def why_not(self, module: nn.Module) -> list[str]:
        """Reasons why this instance cannot be swapped."""
        reasons = super().why_not(module)
        try:
            _implementation(module)
        except ValueError as error:
            reasons.append(str(error))
        return reasons

    def finish(self, module: Any, context: Tensor, hidden_states: Tensor) -> Tensor:
        """From concatenated heads (batch, query, heads x value size) to the module's output."""
        output = context if self.out is None else getattr(module, self.out)(context)
        return self.tail(module, output, hidden_states)

    def project_query(self, module: Any, query: Tensor) -> Tensor:
        """The shared query alone, when keys and values are cached already."""
        return cast(Tensor, getattr(module, self._block("query").name)(query))
