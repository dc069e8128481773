"""Attention classes of Hugging Face transformers, one row each. To add one, see docs/adding-a-host.md."""

from typing import Any, cast

import torch
from torch import Tensor

from collab.hosts import register_host
from collab.hosts.linear import Block
from collab.hosts.transformers_shell import TransformersHost


def _row(*names: str, **fields: Any) -> None:
    """Register one row for every class that differs from the first in its name alone."""
    for name in names:
        register_host(f"transformers.{name}", TransformersHost(name=name, **fields))


# BERT and its family. The output projection is in another module.
_BERT = {
    "query": "query", "key": "key", "value": "value", "out": None,
    "num_heads": "num_attention_heads", "head_dim": "attention_head_size", "dropout": "dropout",
}  # fmt: skip
_row("BertSelfAttention", "RobertaSelfAttention", "ElectraSelfAttention", **_BERT)
_row(
    "BertCrossAttention", "RobertaCrossAttention", "ElectraCrossAttention",
    memory="encoder_hidden_states", cross=lambda module, path: True, **_BERT,
)  # fmt: skip

_row(
    "DistilBertSelfAttention",
    query="q_lin", key="k_lin", value="v_lin", out="out_lin",
    num_heads="n_heads", head_dim="attention_head_size", dropout="dropout",
)  # fmt: skip

_PROJ = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}
_row(
    "ViTAttention", "DeiTAttention", "BeitAttention",
    **_PROJ, out="o_proj", num_heads="num_attention_heads", dropout="attention_dropout",
)  # fmt: skip
_row("CLIPAttention", **_PROJ, out="out_proj", scale_from="scale", dropout="dropout")
_row("OPTAttention", **_PROJ, out="out_proj", dropout="dropout")
_row(
    "BartAttention", "MarianAttention", "WhisperAttention",
    **_PROJ, out="out_proj", dropout="dropout",
)  # fmt: skip

_row(
    "AlbertAttention",
    **(_BERT | {"out": "dense", "dropout": "attention_dropout"}),
    tail=lambda module, given, output: module.LayerNorm(given["hidden_states"] + module.output_dropout(output)),
    shared_by=lambda module: module.config.num_hidden_layers // module.config.num_hidden_groups,
)

_GPT2 = {"out": "c_proj", "dropout": "attn_dropout", "memory": "encoder_hidden_states"}
_row(
    "GPT2Attention", "DecisionTransformerGPT2Attention",
    query=Block("c_attn", 0, 3), key=Block("c_attn", 1, 3), value=Block("c_attn", 2, 3),
    when=lambda module: not module.is_cross_attention,
    tail=lambda module, given, output: module.resid_dropout(output),
    **_GPT2,
)  # fmt: skip
_row(
    "GPT2Attention", "DecisionTransformerGPT2Attention",
    query="q_attn", key=Block("c_attn", 0, 2), value=Block("c_attn", 1, 2),
    when=lambda module: module.is_cross_attention, cross=lambda module, path: True,
    cross_mask="encoder_attention_mask",
    tail=lambda module, given, output: module.resid_dropout(output),
    **_GPT2,
)  # fmt: skip


def _t5_bias(
    module: Any, given: dict[str, Any], query_length: int, key_length: int, past_length: int | Tensor
) -> Tensor:
    bias = given.get("position_bias")
    if bias is not None:
        return cast(Tensor, bias)
    # The first layer makes it and hands it to the others.
    given["position_bias"] = bias = _t5_own_bias(module, query_length, key_length, past_length)
    return bias


def _t5_own_bias(module: Any, query_length: int, key_length: int, past_length: int | Tensor) -> Tensor:
    device, dtype = module.mixing.device, module.mixing.dtype
    if not module.has_relative_attention_bias:
        bias = torch.zeros(1, module.n_heads, query_length, key_length, device=device, dtype=dtype)
        return bias.requires_grad_(module.gradient_checkpointing and module.training)
    return cast(Tensor, module.compute_bias(query_length, key_length, device=device, past_seen_tokens=past_length))


_row(
    "T5Attention", "MT5Attention",
    query="q", key="k", value="v", out="o", num_heads="n_heads", head_dim="key_value_proj_dim", dropout="dropout",
    mask="mask", bias=_t5_bias,
    returns=lambda module, given, output, weights: (output, given["position_bias"], weights),
)  # fmt: skip
