"""Rows of transformers: BERT and its family, older classes of it, and those that add a bias of their own to scores."""

from typing import Any, cast

import torch
from torch import Tensor

from collab.hosts.obstacles import ROTARY
from collab.hosts.transformers_rows import (
    BERT,
    BERT_ALWAYS,
    BERT_ASKED,
    BY_HEAD_SIZE,
    ENCODER,
    ENCODER_MASKED,
    VIT,
    named_inputs,
    row,
)
from collab.hosts.transformers_shell import Given, output_alone, pair_if_asked

# BERT and its family: the output projection is in another module.

row(
    "BertSelfAttention", "BertGenerationSelfAttention", "BridgeTowerSelfAttention", "CamembertSelfAttention",
    "Data2VecTextSelfAttention", "ElectraSelfAttention", "ErnieSelfAttention", "RoCBertSelfAttention",
    "RobertaPreLayerNormSelfAttention", "RobertaSelfAttention", "XLMRobertaSelfAttention", "XLMRobertaXLSelfAttention",
    "XmodSelfAttention",
    **BERT,
)  # fmt: skip
row(
    "BertCrossAttention", "BertGenerationCrossAttention", "BridgeTowerCrossAttention", "CamembertCrossAttention",
    "Data2VecTextCrossAttention", "ElectraCrossAttention", "ErnieCrossAttention", "RoCBertCrossAttention",
    "RobertaCrossAttention", "RobertaPreLayerNormCrossAttention", "XLMRobertaCrossAttention",
    "XLMRobertaXLCrossAttention", "XmodCrossAttention",
    **BERT, **ENCODER, cross=lambda module, path: True,
)  # fmt: skip
row(
    "AlignTextSelfAttention", "AltRobertaSelfAttention", "ChineseCLIPTextSelfAttention", "ClapTextSelfAttention",
    "LayoutLMSelfAttention", "MarkupLMSelfAttention", "SplinterSelfAttention",
    **(BERT | {"dropout": "attention_dropout"}),
)  # fmt: skip
row(
    "DPTSelfAttention", "VideoMAESelfAttention", "VitPoseBackboneSelfAttention", "YolosSelfAttention",
    # of transformers 5.17, where the classes that attend in later versions wrap these
    "Dinov2SelfAttention", "Dinov2WithRegistersSelfAttention", "RadioSelfAttention", "RfDetrDinov2SelfAttention",
    "Tipsv2VisionSelfAttention",
    **(BERT | {"dropout": "dropout_prob"}), mask=None,
)  # fmt: skip
row(
    "Blip2QFormerMultiHeadAttention", "InstructBlipQFormerMultiHeadAttention",
    "InstructBlipVideoQFormerMultiHeadAttention",
    **(BERT | {"dropout": "attention_dropout"}), **ENCODER_MASKED,
)  # fmt: skip
row(
    "EsmSelfAttention", "EvollaSaProtSelfAttention",
    **BERT, **BY_HEAD_SIZE, **ENCODER_MASKED,
    obstacles=lambda module: [ROTARY] if module.position_embedding_type == "rotary" else [],
)  # fmt: skip
row("MobileBertSelfAttention", **BERT, **named_inputs("query_tensor", "key_tensor", "value_tensor"))
row(
    "DistilBertSelfAttention",
    query="q_lin", key="k_lin", value="v_lin", out="out_lin",
    num_heads="n_heads", head_dim="attention_head_size", dropout="dropout",
)  # fmt: skip
row(
    "AlbertAttention",
    **(BERT | {"out": "dense", "dropout": "attention_dropout"}),
    tail=lambda module, given, output: module.LayerNorm(given["hidden_states"] + module.output_dropout(output)),
    shared_by=lambda module: module.config.num_hidden_layers // module.config.num_hidden_groups,
)

# Older classes of that family.

row("BigBirdPegasusSelfAttention", "BigBirdSelfAttention", "BlipTextSelfAttention", **BERT_ALWAYS, **ENCODER_MASKED)
row("GitSelfAttention", **BERT_ALWAYS)
row("MegatronBertSelfAttention", "RemBertSelfAttention", **BERT_ALWAYS, **ENCODER)
row("FlavaSelfAttention", "ViltSelfAttention", "VisualBertSelfAttention", **BERT_ASKED)
row("MobileViTSelfAttention", **(BERT_ASKED | {"returns": output_alone}), mask=None)
row(
    "LxmertAttention",
    **BERT_ASKED, **named_inputs("hidden_states", "context", "context"),
    cross=lambda module, path: "visual_attention" in path,
)  # fmt: skip
row(
    "TvpAttention",
    **(BERT_ASKED | {"out": "dense", "dropout": "attn_dropout"}),
    tail=lambda module, given, output: module.layer_norm(module.dropout(output) + given["hidden_states"]),
)
row(
    "GroundingDinoMultiheadAttention", "MMGroundingDinoMultiheadAttention", "OmDetTurboMultiheadAttention",
    "ZoeDepthMultiheadAttention",
    **(BERT_ASKED | {"out": "out_proj"}), **named_inputs("queries", "keys", "values"),
)  # fmt: skip
row(
    "MPNetSelfAttention",
    **(BERT_ASKED | {"query": "q", "key": "k", "value": "v", "out": "o"}),
    bias=lambda module, given, *lengths: given.get("position_bias"),
)


def _with_cache_if_decoder(module: Any, given: Given, output: Tensor, weights: Tensor | None) -> Any:
    result = pair_if_asked(module, given, output, weights)
    return (*result, given.get("past_key_values")) if module.is_decoder else result


row("TapasSelfAttention", **(BERT_ASKED | {"returns": _with_cache_if_decoder}), **ENCODER)
row("SuperGlueSelfAttention", **(BERT_ASKED | {"returns": _with_cache_if_decoder}), **ENCODER_MASKED)


def _canine_mask(module: Any, given: Given) -> Tensor | None:
    mask: Tensor | None = given.get("attention_mask")
    if mask is not None and mask.dim() == 3:
        mask = (1.0 - mask[:, None].float()) * torch.finfo(given["from_tensor"].dtype).min
    return mask


row(
    "CanineSelfAttention",
    **BERT_ASKED, **named_inputs("from_tensor", "to_tensor", "to_tensor"), mask=_canine_mask,
)  # fmt: skip


def _perceiver_inputs(module: Any, given: Given) -> tuple[Tensor, Tensor, Tensor]:
    hidden_states, other = module.layernorm1(given["hidden_states"]), given.get("inputs")
    source = hidden_states if other is None else module.layernorm2(other)
    return hidden_states, source, source


row(
    "PerceiverSelfAttention",
    **(BERT_ASKED | {"num_heads": "num_heads", "head_dim": "qk_channels_per_head"}
       | {"scale_from": lambda module: module.qk_channels_per_head**-0.5}),
    inputs=_perceiver_inputs, memory="inputs", cross_mask="inputs_mask",
)  # fmt: skip


def _data2vec_bias(module: Any, given: Given, *lengths: Any) -> Tensor | None:
    bias: Tensor | None = given.get("relative_position_bias")
    if not module.has_relative_position_bias:
        return bias
    height, width = (size // module.config.patch_size for size in given["resolution"])
    length, interpolate = given["hidden_states"].shape[1], given.get("interpolate_pos_encoding", False)
    own: Tensor = module.relative_position_bias((height, width), interpolate, dim_size=length)
    return own if bias is None else own + bias


row("Data2VecVisionSelfAttention", **BERT_ASKED, mask=None, bias=_data2vec_bias)
row(
    "Data2VecVisionSdpaSelfAttention",
    **BERT, **BY_HEAD_SIZE, weights="never", mask=None, bias=_data2vec_bias,
)  # fmt: skip


def _layoutlm_bias(module: Any, given: Given, *lengths: Any) -> Tensor | None:
    names = {"rel_pos": module.has_relative_attention_bias, "rel_2d_pos": module.has_spatial_attention_bias}
    biases = [given[name] for name, has in names.items() if has]
    return cast(Tensor, sum(biases[1:], biases[0])) if biases else None


def _layoutlmv3_bias(module: Any, given: Given, *lengths: Any) -> Tensor | None:
    if not module.has_relative_attention_bias:
        return None
    bias: Tensor = given["rel_pos"] + given["rel_2d_pos"] if module.has_spatial_attention_bias else given["rel_pos"]
    return cast(Tensor, bias * module.attention_head_size**-0.5)


def _reading_order_bias(module: Any, given: Given, *lengths: Any) -> Tensor | None:
    if given.get("rel_2d_pos") is not None or not module.has_relative_attention_bias:
        return cast(Tensor | None, given.get("rel_2d_pos"))
    return cast(Tensor, given["rel_pos"] * module.attention_head_size**-0.5)


row(
    "LayoutLMv2SelfAttention",
    **BERT_ALWAYS, bias=_layoutlm_bias,
    mask=lambda module, given: ~given["attention_mask"].bool(),
    obstacles=lambda module: ["fast_qkv keeps the biases apart from the projection"] if module.fast_qkv else [],
)  # fmt: skip
row("LayoutLMv3SelfAttention", **BERT_ALWAYS, bias=_layoutlmv3_bias)
row("PPDocLayoutV2ReadingOrderSelfAttention", **BERT_ALWAYS, bias=_reading_order_bias)


def _window_mask(module: Any, given: Given) -> Tensor | None:
    """A mask by window, (window, token, token), for sequences that hold every window of every image in turn."""
    mask: Tensor | None = given.get("attention_mask")
    if mask is None:
        return None
    return mask.repeat(given["hidden_states"].shape[0] // mask.shape[0], 1, 1)[:, None]


def _table_bias(module: Any, given: Given, query_length: int, key_length: int, past: Any) -> Tensor:
    bias: Tensor = module.relative_position_bias_table[module.relative_position_index.view(-1)]
    return bias.view(query_length, key_length, -1).permute(2, 0, 1)[None]


row(
    "ClapAudioSelfAttention", "DonutSwinSelfAttention", "MaskFormerSwinSelfAttention",
    **BERT_ASKED, mask=_window_mask, bias=_table_bias,
)  # fmt: skip
row("SwinAttention", **VIT, mask=_window_mask, bias=lambda module, given, *lengths: module.relative_position_bias())
