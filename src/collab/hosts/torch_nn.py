"""torch.nn.MultiheadAttention, alone or inside nn.TransformerEncoder, nn.TransformerDecoder and nn.Transformer."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from collab import ops
from collab.hosts import (
    Collaborative,
    HeadWeights,
    Host,
    SharedWeights,
    collaborative_class,
    copy_weights,
    install_mixing_,
    mixing_from,
    register_host,
    replace_parameter_,
)

_SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


class _Absent:
    """What `in_proj_weight` of a collaborative module is: nothing, and not None either.

    nn.TransformerEncoder reads its first layer's `in_proj_weight` without asking whether there is one, to decide on
    handing nested tensors to kernels that compute ordinary heads. None makes it fail. It never does so when an
    argument overrides torch's functions, as this does; whoever computes with it is told where the weights are.
    """

    _is_hf_initialized = True  # transformers' initialisers pass over what is marked so (SigLIP's pooling names it)
    _message = (
        "collaborative MultiheadAttention has no in_proj_weight: "
        "its weights are q_proj_weight, k_proj_weight, v_proj_weight and mixing"
    )

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(cls._message)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(self._message)


class MultiheadAttentionShell(Collaborative):
    """Forward of a collaborative nn.MultiheadAttention: its arguments, its masks (True is masked) and its results."""

    host: ClassVar["MultiheadAttentionHost"]

    @property
    def in_proj_weight(self) -> _Absent:
        """There is none; it is absent in a way that keeps torch's own fast paths away."""
        return _Absent()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as nn.MultiheadAttention does, through shared projections.

        Args:
            query: (query, batch, embed_dim), (batch, query, embed_dim) with `batch_first`, or (query, embed_dim).
            key: the same with kdim, over the keys.
            value: the same with vdim.
            key_padding_mask: (batch, key), or (key) without a batch; boolean, True is masked, or an addend.
            need_weights: also return the attention weights.
            attn_mask: (query, key) or (batch x head, query, key); boolean, True is masked, or an addend.
            average_attn_weights: return the mean of the weights over heads.
            is_causal: says that `attn_mask` is the causal one.

        Returns:
            output, of query's shape, and the weights (batch, query, key) or (batch, head, query, key), or None.
        """
        module = cast(Any, self)
        if query.is_nested:
            return self._forward_nested(query, key, value, key_padding_mask, attn_mask)
        if query.dim() not in (2, 3) or not query.dim() == key.dim() == value.dim():
            shapes = ", ".join(str(tuple(part.shape)) for part in (query, key, value))
            raise ValueError(f"query, key and value must all be of 3 dimensions, or of 2 without a batch, got {shapes}")
        if is_causal and attn_mask is None:
            raise ValueError("is_causal says that attn_mask is the causal one: attn_mask must be given, got None")
        is_batched = query.dim() == 3
        shared_query = functional.linear(query, module.q_proj_weight)
        shared_key = functional.linear(key, module.k_proj_weight)
        projected_value = functional.linear(value, module.v_proj_weight, module.in_proj_bias)
        parts = [shared_query, shared_key, projected_value]
        if not is_batched:
            parts = [part[None] for part in parts]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not module.batch_first:
            parts = [part.transpose(0, 1) for part in parts]
        shared_query, shared_key, projected_value = parts  # (batch, token, ...)

        # As in torch, the hint stands for the mask unless padding or the weights need the mask itself.
        causal = is_causal and key_padding_mask is None and not need_weights
        size = (len(shared_query), module.num_heads, shared_query.shape[1], shared_key.shape[1])
        mask = None if causal else _mask(attn_mask, key_padding_mask, size, shared_query.dtype)
        context, weights = ops.attention(
            shared_query,
            shared_key,
            projected_value.unflatten(-1, (module.num_heads, -1)).transpose(1, 2),
            self.mixing,
            scale=self.host.scale(module),
            dims=self.dims,
            mask=mask,
            causal=causal,
            dropout=module.dropout if module.training else 0.0,
            need_weights=need_weights,
        )
        # Back to query's own order before the projection, so that the output is contiguous like torch's.
        order = (0, 2, 1, 3) if module.batch_first or not is_batched else (2, 0, 1, 3)
        output = module.out_proj(context.permute(order).flatten(-2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        if not is_batched:
            output, weights = output[0], None if weights is None else weights[0]
        return output, weights

    def _forward_nested(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None
    ) -> tuple[Tensor, None]:
        """Self-attention over a nested tensor, which an nn.TransformerEncoder makes if its first layer is ordinary."""
        if query is not key or key is not value or key_padding_mask is not None or attn_mask is not None:
            raise ValueError("a nested tensor must be query, key and value at once and come without masks")
        if not cast(Any, self).batch_first:
            raise ValueError("a nested tensor must have its batch first: build the module with batch_first=True")
        rows = query.unbind()
        lengths = torch.tensor([len(row) for row in rows], device=query.device)
        padded = query.to_padded_tensor(0.0)
        padding = torch.arange(padded.shape[1], device=query.device) >= lengths[:, None]
        output, _ = self.forward(padded, padded, padded, key_padding_mask=padding, need_weights=False)
        return torch.nested.as_nested_tensor([new[: len(row)] for new, row in zip(output, rows, strict=True)]), None


def _mask(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, size: tuple[int, int, int, int], dtype: torch.dtype
) -> Tensor | None:
    """Both masks as one, broadcastable to `size` = (batch, head, query, key).

    Boolean masks give a boolean one in the other sense, True where a query may attend; any other gives an addend.
    """
    batch, num_heads, queries, keys = size
    masks = []
    if attn_mask is not None:
        per_head = (batch * num_heads, queries, keys)
        if tuple(attn_mask.shape) not in (per_head, per_head[1:]):
            raise ValueError(f"attn_mask must be {per_head[1:]} or {per_head}, got {tuple(attn_mask.shape)}")
        masks.append(attn_mask if attn_mask.dim() == 2 else attn_mask.unflatten(0, (batch, num_heads)))
    if key_padding_mask is not None:
        if tuple(key_padding_mask.shape) != (batch, keys):
            raise ValueError(f"key_padding_mask must be {(batch, keys)}, got {tuple(key_padding_mask.shape)}")
        masks.append(key_padding_mask[:, None, None])
    for mask in masks:
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise ValueError(f"masks must be boolean (True is masked) or floating point, got {mask.dtype}")
    if not masks:
        return None
    if all(mask.dtype == torch.bool for mask in masks):
        return ~reduce(torch.logical_or, masks)
    return reduce(torch.add, (_addend(mask, dtype) for mask in masks))


def _addend(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)


@dataclass(frozen=True)
class MultiheadAttentionHost(Host):
    """Reads either form of nn.MultiheadAttention and leaves its separate form, `_qkv_same_embed_dim = False`.

    After a swap q_proj_weight is (shared, embed_dim), k_proj_weight (shared + head, kdim), v_proj_weight
    (embed_dim, vdim) and in_proj_bias the value's bias (embed_dim).
    """

    name: str = "MultiheadAttention"

    def why_not(self, module: Any) -> list[str]:
        """Reasons why this instance cannot be swapped."""
        reasons = []
        for name in ("in_proj_weight", *_SEPARATE, "in_proj_bias"):
            if name not in module._parameters:
                reasons.append(f"{name} is parametrised, not a plain parameter: remove the parametrisation first")
        added = "adds a key that does not come from the input, against which the key's bias does not drop out"
        if module.bias_k is not None or module.bias_v is not None:
            reasons.append(f"add_bias_kv (bias_k, bias_v) {added}")
        if module.add_zero_attn:
            reasons.append(f"add_zero_attn {added}")
        return reasons

    def is_cross(self, module: Any, path: str) -> bool:
        """Whether keys come from another sequence: decoder layers call theirs multihead_attn."""
        return path.endswith("multihead_attn") or module.kdim != module.embed_dim

    def scale(self, module: Any) -> float:
        """1 / sqrt(head_dim)."""
        return float(module.head_dim**-0.5)

    def sizes(self, module: Any) -> dict[str, int]:
        """num_heads, head_dim and the widths of the three inputs."""
        return {
            "num_heads": module.num_heads,
            "head_dim": module.head_dim,
            "query_width": module.embed_dim,
            "key_width": module.kdim,
            "value_width": module.vdim,
        }

    def parts(self, module: nn.Module) -> list[nn.Module]:
        """The module: the output projection is left alone."""
        return [module]

    def read(self, module: Any) -> HeadWeights:
        """Views of the module's query and key weights, head by head."""
        heads = (module.num_heads, module.head_dim)
        query, key = (weight.unflatten(0, heads) for weight in _weights(module)[:2])
        bias = module.in_proj_bias
        return HeadWeights(query, key, None if bias is None else bias.chunk(3)[0].unflatten(0, heads))

    def install_(self, module: Any, shared: SharedWeights) -> None:
        """Give the module its separate weights, the mixing and its collaborative class."""
        query, key, value = _weights(module)
        fused = module.in_proj_weight
        rows = _shared_rows(shared)
        for name, trained in zip(rows, (query, key), strict=True):
            replace_parameter_(module, name, rows[name], like=trained if fused is None else fused)
        install_mixing_(module, shared, like=module.q_proj_weight)
        if fused is not None:
            # A copy: what is left must not keep the whole alive.
            replace_parameter_(module, "v_proj_weight", value.detach().clone(), like=fused)
            replace_parameter_(module, "in_proj_weight", None)
        if module.in_proj_bias is not None:
            # The query's bias is in the content term, the key's drops out.
            value_bias = module.in_proj_bias.detach().chunk(3)[2].clone()
            replace_parameter_(module, "in_proj_bias", value_bias)
        # Encoder layers read this flag before they take the kernels of ordinary heads.
        module._qkv_same_embed_dim = False
        module.__class__ = collaborative_class(MultiheadAttentionShell, type(module), self)

    def parameters_from(self, module: Any, shared: SharedWeights) -> dict[str, Tensor]:
        """What a collaborative module's parameters would be with these weights, by name."""
        parameters = mixing_from(module, shared)
        return parameters | {name: rows.to(getattr(module, name)) for name, rows in _shared_rows(shared).items()}

    def shared_weights(self, module: Any) -> SharedWeights:
        """Copies of a collaborative module's weights."""
        return copy_weights(module, module.q_proj_weight, module.k_proj_weight)

    def watch_inputs(self, module: Any, seen: Callable[[str, Tensor], None]) -> list[RemovableHandle]:
        """Report forward's query and key: the projections are parameters, with nothing to hook to."""

        def report(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = dict(zip(("query", "key"), args, strict=False)) | kwargs
            for role in ("query", "key"):
                for inputs in _as_batches(given[role], module.batch_first):
                    seen(role, inputs)

        return [module.register_forward_pre_hook(report, with_kwargs=True)]


def _shared_rows(shared: SharedWeights) -> dict[str, Tensor]:
    """The parameters that hold shared projections."""
    return {"q_proj_weight": shared.query, "k_proj_weight": torch.cat((shared.key, shared.content))}


def _as_batches(inputs: Tensor, batch_first: bool) -> list[Tensor]:
    """A query or key as (batch, token, width); a nested tensor row by row, for its rows differ in length."""
    if inputs.is_nested:
        return [row[None] for row in inputs.unbind()]
    if inputs.dim() == 2:
        return [inputs[None]]
    return [inputs if batch_first else inputs.transpose(0, 1)]


def _weights(module: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value weights (embed_dim, width) of a module not yet collaborative."""
    if module.in_proj_weight is not None:
        query, key, value = module.in_proj_weight.chunk(3)
        return query, key, value
    return module.q_proj_weight, module.k_proj_weight, module.v_proj_weight


# The full name: torch.ao has classes of the same name that are quantised.
register_host("torch.nn.modules.activation.MultiheadAttention", MultiheadAttentionHost())
