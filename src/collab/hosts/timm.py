"""Attention classes of timm, one row each, named in full: timm calls many of them Attention."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from collab import ops
from collab.hosts import Collaborative, HeadWeights, SharedWeights, register_host, replace_parameter_
from collab.hosts.linear import Block, LinearHost, Number

_QUERY, _KEY, _VALUE = (Block("qkv", index, 3) for index in range(3))


class TimmShell(Collaborative):
    """Forward of a collaborative timm attention: the arguments and the result of the class it replaces."""

    host: ClassVar["TimmHost"]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Attend as the original class does, through shared projections."""
        module = cast(Any, self)
        host = self.host
        given = host.arguments_given(args, kwargs)
        tokens = given["x"].flatten(1, -2)  # (batch, token, width), of a grid of tokens too
        queries, keys = host.queries(module, tokens), host.keys(module, tokens, given)
        projected = host.project(module, queries, keys, keys)
        value = projected["value"].unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
        # Without fused attention timm passes the weights through attn_drop, where its users hook to look at them.
        shows_weights = not getattr(module, "fused_attn", False) and host.dropout is not None
        context, weights = ops.attention(
            projected["query"],
            projected["key"],
            value,
            self.mixing,
            scale=host.scale(module),
            dims=self.dims,
            mask=host.mask(module, given),
            causal=bool(given.get("is_causal")),
            dropout=0.0 if shows_weights else host.dropout_of(module),
            need_weights=shows_weights,
        )
        if shows_weights:
            context = module.attn_drop(weights) @ value
        return host.finish(module, context.transpose(1, 2).flatten(-2), given["x"])


def _attn_mask(module: Any, given: dict[str, Any]) -> Tensor | None:
    """The mask as given; without fused attention timm takes `is_causal` for all there is to mask."""
    mask: Tensor | None = given.get("attn_mask")
    return None if given.get("is_causal") and not module.fused_attn else mask


def _like_input(module: Any, output: Tensor, x: Tensor) -> Tensor:
    return output.reshape(*x.shape[:-1], -1)


@dataclass(frozen=True, kw_only=True)
class TimmHost(LinearHost):
    """One timm attention class as data: where its projections are, and what its forward does around them.

    Args:
        arguments: the arguments of forward that are understood, in order.
        queries: what queries are made from, given the module and the tokens (batch, token, width).
        keys: what keys and values are made from, given the module, the tokens and forward's arguments.
        mask: the mask or addend, broadcastable to (batch, head, query, key), given the module and the arguments.
        head: what happens to the concatenated heads, given the module, them and the input.
        tail: the result, given the module, the projected output (batch, query, width) and the input.
    """

    shell: type[Collaborative] = TimmShell
    query: str | Block = _QUERY
    key: str | Block = _KEY
    value: str | Block = _VALUE
    out: str | None = "proj"
    num_heads: Number = "num_heads"
    head_dim: Number = "head_dim"
    scale_from: str | float | Callable[[Any], float] = "scale"
    dropout: str | None = "attn_drop"
    arguments: tuple[str, ...] = ("x",)
    queries: Callable[[Any, Tensor], Tensor] = lambda module, tokens: tokens
    keys: Callable[[Any, Tensor, dict[str, Any]], Tensor] = lambda module, tokens, given: tokens
    mask: Callable[[Any, dict[str, Any]], Tensor | None] = lambda module, given: None
    head: Callable[[Any, Tensor, Tensor], Tensor] = lambda module, context, x: context
    tail: Callable[[Any, Tensor, Tensor], Tensor] = _like_input

    def why_not(self, module: nn.Module) -> list[str]:
        """Reasons why this instance cannot be swapped."""
        reasons = super().why_not(module)
        new = [name for name in inspect.signature(module.forward).parameters if name not in self.arguments]
        if new:
            reasons.append(f"this version of timm gives its forward arguments that are not understood: {new}")
        return reasons

    def as_batch(self, inputs: Tensor) -> Tensor:
        """What a projection is given, as (batch, token, width): one token of each, tokens, or a grid of them."""
        return inputs[:, None] if inputs.dim() == 2 else inputs.flatten(1, -2)

    def arguments_given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Forward's arguments by name."""
        unknown = [name for name in kwargs if name not in self.arguments]
        if unknown or len(args) > len(self.arguments):
            raise TypeError(f"{self.name} takes {', '.join(self.arguments)}, got {len(args)} arguments and {unknown}")
        return dict(zip(self.arguments, args, strict=False)) | kwargs

    def finish(self, module: Any, context: Tensor, x: Tensor) -> Tensor:
        """From concatenated heads (batch, query, heads x head size) to the module's output."""
        output = module.proj(self.head(module, context, x))
        if hasattr(module, "proj_drop"):
            output = module.proj_drop(output)
        return self.tail(module, output, x)


class SeparateBiasHost(TimmHost):
    """A class whose biases, the query's and the value's, are its own parameters beside a projection without any."""

    def read(self, module: Any) -> HeadWeights:
        """Views of the module's query and key weights, head by head."""
        weights = super().read(module)
        if module.q_bias is None:
            return weights
        return replace(weights, query_bias=module.q_bias.unflatten(0, self._heads(module)))

    def install_(self, module: Any, shared: SharedWeights) -> None:
        """Make the module collaborative; the query's bias is in the content term then."""
        super().install_(module, shared)
        if module.q_bias is not None:
            replace_parameter_(module, "q_bias", None)
            module.k_bias = None

    def watch_inputs(self, module: nn.Module, seen: Callable[[str, Tensor], None]) -> list[RemovableHandle]:
        """Report the module's input: it takes its projection's weight and does not call it."""

        def report(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for role in ("query", "key"):
                seen(role, self.arguments_given(args, kwargs)["x"])

        return [module.register_forward_pre_hook(report, with_kwargs=True)]

    def project(self, module: Any, query: Tensor, key: Tensor, value: Tensor) -> dict[str, Tensor]:
        """Shared query, shared key with content scores, and value, by role."""
        projected = super().project(module, query, key, value)
        if module.v_bias is not None:
            projected["value"] = projected["value"] + module.v_bias
        return projected


def _row(place: str, host: type[TimmHost] = TimmHost, **fields: Any) -> None:
    """Register one row for the class at `place` inside timm."""
    register_host(f"timm.{place}", host(name=place.rpartition(".")[2], **fields))


def _by_width(module: Any) -> int:
    """Size of a head where no attribute holds it; the output projection does not change in a swap."""
    return int(module.proj.in_features) // int(module.num_heads)


def _norm_and_gate(module: Any, context: Tensor, x: Tensor) -> Tensor:
    context = module.norm(context)
    gate = getattr(module, "gate", None)
    return context if gate is None else context * gate(x).sigmoid()


# ViT, DeiT, DeiT III, CLIP, SigLIP, DINOv2 and most others.
_row("layers.attention.Attention", arguments=("x", "attn_mask", "is_causal"), mask=_attn_mask, head=_norm_and_gate)


# Classes that add a bias for relative positions to their scores.
def _rel_pos(module: Any, given: dict[str, Any]) -> Tensor | None:
    shared: Tensor | None = given.get("shared_rel_pos")
    return shared if module.rel_pos is None else module.rel_pos.get_bias()


def _beit_bias(module: Any, given: dict[str, Any]) -> Tensor | None:
    shared: Tensor | None = given.get("shared_rel_pos_bias")
    if module.relative_position_bias_table is None:
        return shared
    own: Tensor = module._get_rel_pos_bias()
    return own if shared is None else own + shared


def _swin_bias(module: Any, given: dict[str, Any]) -> Tensor:
    bias: Tensor = module._get_rel_pos_bias()
    mask = given.get("mask")  # (window, query, key); the batch is (image x window)
    return bias if mask is None else bias + mask.repeat(len(given["x"]) // len(mask), 1, 1)[:, None]


_row("models.vision_transformer_relpos.RelPosAttention", arguments=("x", "shared_rel_pos"), mask=_rel_pos)
_row(
    "models.beit.Attention", SeparateBiasHost,
    head_dim=_by_width, arguments=("x", "shared_rel_pos_bias"), mask=_beit_bias,
)  # fmt: skip
_row("models.swin_transformer.WindowAttention", head_dim=_by_width, arguments=("x", "mask"), mask=_swin_bias)
for _per_head in (True, False):
    _row(
        "models.maxxvit.AttentionCl",
        query=Block("qkv", 0, 3, _per_head), key=Block("qkv", 1, 3, _per_head), value=Block("qkv", 2, 3, _per_head),
        when=lambda module, per_head=_per_head: module.head_first == per_head,
        head_dim="dim_head", arguments=("x", "shared_rel_pos"), mask=_rel_pos,
    )  # fmt: skip

# Plain self-attention under other names, or over a grid of tokens.
_row("models.metaformer.Attention")
_row("models.volo.Attention", head_dim=_by_width)
_row("models.davit.WindowAttention", head_dim=_by_width, dropout=None)
_row("models.tnt.Attention", query=Block("qk", 0, 2), key=Block("qk", 1, 2), value="v")


# Only the first token, the class, asks.
def _class_token(module: Any, tokens: Tensor) -> Tensor:
    return tokens[:, :1]


_CLASS: dict[str, Any] = {"queries": _class_token, "tail": lambda module, output, x: output}
_row("models.cait.ClassAttn", query="q", key="k", value="v", head_dim=_by_width, **_CLASS)
_row("models.crossvit.CrossAttention", query="wq", key="wk", value="wv", head_dim=_by_width, **_CLASS)
_row("models.volo.ClassAttention", query="q", key=Block("kv", 0, 2), value=Block("kv", 1, 2), **_CLASS)


# Keys and values from a coarser grid of tokens.
def _reduced(module: Any, tokens: Tensor, given: dict[str, Any]) -> Tensor:
    if module.sr is None:
        return tokens
    grid = tokens.mT.unflatten(-1, tuple(given.get("feat_size") or given["size"]))
    if getattr(module, "pool", None) is not None:
        grid = module.pool(grid)
    reduced: Tensor = module.norm(module.sr(grid).flatten(2).mT)
    return reduced if getattr(module, "act", None) is None else module.act(reduced)


_REDUCED: dict[str, Any] = {
    "query": "q", "key": Block("kv", 0, 2), "value": Block("kv", 1, 2), "head_dim": _by_width, "keys": _reduced,
}  # fmt: skip
_row("models.pvt_v2.Attention", arguments=("x", "feat_size"), **_REDUCED)
_row("models.twins.GlobalSubSampleAttn", arguments=("x", "size"), **_REDUCED)


# Pooling: learned queries over all tokens.
def _pooled(module: Any, output: Tensor, x: Tensor) -> Tensor:
    if module.mlp is not None:
        output = output + module.mlp(module.norm(output))
    if module.pool == "token":
        return output[:, 0]
    return output.mean(1) if module.pool == "avg" else output


def _placed(module: Any, tokens: Tensor, given: dict[str, Any]) -> Tensor:
    return tokens if module.pos_embed is None else tokens + module.pos_embed.to(tokens.dtype)


_row(
    "layers.attention_pool.AttentionPoolLatent",
    query="q", key=Block("kv", 0, 2), value=Block("kv", 1, 2), dropout=None,
    arguments=("x", "attn_mask"), mask=lambda module, given: given.get("attn_mask"),
    queries=lambda module, tokens: module.latent.expand(len(tokens), -1, -1), keys=_placed, tail=_pooled,
    cross=lambda module, path: True,
)  # fmt: skip
