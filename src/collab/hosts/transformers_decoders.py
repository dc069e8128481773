"""Rows of transformers: BART and its family, speech, packed sequences, GPT-2, and distances added to scores."""

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from transformers.utils.generic import torch_float

from collab.hosts.linear import Block
from collab.hosts.transformers_rows import (
    ALWAYS,
    ASKED,
    ASKED_TUPLE,
    BART,
    CLIP,
    ENCODER,
    ENCODER_MASKED,
    LLAMA,
    back_to_tokens_first,
    fused,
    inverted_mask,
    named_inputs,
    row,
    then,
    tokens_first,
)
from collab.hosts.transformers_shell import Given, output_alone

# BART and its family, decoders and speech.

row(
    "AudioFlamingo3Attention", "BartAttention", "BigBirdPegasusDecoderAttention", "BioGptAttention",
    "BlenderbotAttention", "BlenderbotSmallAttention", "InformerAttention", "M2M100Attention", "MBartAttention",
    "MarianAttention", "MusicgenAttention", "MusicgenMelodyAttention", "NllbMoeAttention", "PLBartAttention",
    "PPFormulaNetAttention", "PegasusAttention", "PegasusXAttention", "Speech2TextAttention",
    "TimeSeriesTransformerAttention", "WhisperAttention",
    **BART,
)  # fmt: skip
row(
    "Data2VecAudioAttention", "HubertAttention", "PatchTSMixerAttention", "PatchTSTAttention", "SEWAttention",
    "UniSpeechAttention", "UniSpeechSatAttention", "Wav2Vec2Attention",
    **BART,
)  # fmt: skip
row("MossTranscribeDiarizeAudioAttention", "OPTAttention", "Qwen2AudioAttention", "VoxtralAttention", **BART)
row("Kosmos2_5TextAttention", "SeamlessM4TAttention", "SeamlessM4Tv2Attention", **BART, **ENCODER)
row(
    "KosmosTextAttention",
    **(BART | {"out": None}), **ENCODER,
    tail=lambda module, given, output: module.out_proj(
        output if module.inner_attn_ln is None else module.inner_attn_ln(output)
    ),
)  # fmt: skip
row("TrOCRAttention", **BART, **ASKED)
row("XGLMAttention", **BART, **ALWAYS)
row(
    "LEDDecoderAttention",
    **BART, **ASKED,
    returns=lambda module, given, output, weights: (output, weights, given.get("past_key_values")),
)  # fmt: skip


def _mvp_inputs(module: Any, given: Given) -> tuple[Tensor, Tensor, Tensor]:
    if given.get("attn_prompt") is not None:
        raise ValueError("attn_prompt must be None: its keys are ordinary ones, not of the space the heads now share")
    hidden_states, memory = given["hidden_states"], given.get("key_value_states")
    source = hidden_states if memory is None else memory
    return hidden_states, source, source


row("MvpAttention", **BART, **ASKED, inputs=_mvp_inputs)


def _fsmt_inputs(module: Any, given: Given) -> tuple[Tensor, Tensor, Tensor]:
    source = given["key"] if module.encoder_decoder_attention else given["query"]
    return given["query"], source, source


def _fsmt_mask(module: Any, given: Given) -> Tensor | None:
    mask: Tensor | None = given.get("attn_mask")
    padding: Tensor | None = given.get("key_padding_mask")
    if padding is None or padding.dim() == 0:
        return mask
    if mask is None:
        return ~padding[:, None, None]
    return mask.masked_fill(padding[:, None, None], torch.finfo(mask.dtype).min)


_FSMT = {**BART, **ASKED, "inputs": tokens_first(_fsmt_inputs), "mask": _fsmt_mask, "tail": back_to_tokens_first,
         "batch_first": False}  # fmt: skip
row(
    "fsmt.Attention",
    **_FSMT, cache="layer_state", memory="key", cross=lambda module, path: True,
    when=lambda module: module.encoder_decoder_attention,
)  # fmt: skip
row(
    "fsmt.Attention",
    **_FSMT, cache="layer_state", memory="", cross=lambda module, path: False,
    when=lambda module: not module.encoder_decoder_attention,
)  # fmt: skip

row("CanarySelfAttention", "CohereAsrSelfAttention", "JambaAttention", "NemotronHAttention", "ZambaAttention", **LLAMA)
row(
    "CanaryCrossAttention", "CohereAsrCrossAttention",
    **LLAMA, **ENCODER, cross=lambda module, path: True,
)  # fmt: skip
row("DiaCrossAttention", **LLAMA, memory="cross_attention_states", cross=lambda module, path: True)
row("Phi4MultimodalAudioAttention", **LLAMA, returns=output_alone)


def _perceiver_resampler_inputs(module: Any, given: Given) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.cat((given["context"], given["latents"]), dim=-2)
    return given["latents"], source, source


row("Idefics2PerceiverAttention", **LLAMA, inputs=_perceiver_resampler_inputs, cross=lambda module, path: True)
row(
    "EsmFold2DiffusionAttention",
    **(LLAMA | {"out": None, "dropout": None}), mask="attention_bias",
    tail=lambda module, given, output: module.o_proj(output * module.gate_proj(given["hidden_states"]).sigmoid()),
)  # fmt: skip


row(
    "EsmFoldSelfAttention",
    **fused("proj", per_head=True), out=None, head_dim="head_width", scale_from="rescale_factor", dropout=None,
    **ALWAYS,
    mask=lambda module, given: None if given.get("mask") is None else given["mask"].bool()[:, None, None],
    bias=lambda module, given, *lengths: None if given.get("bias") is None else given["bias"].permute(0, 3, 1, 2),
    tail=lambda module, given, output: module.o_proj(
        output * module.g_proj(given["x"]).sigmoid() if module.gated else output
    ),
    returns=lambda module, given, output, weights: (output, weights.permute(0, 3, 1, 2)),
)  # fmt: skip


def _compressor_inputs(module: Any, given: Given) -> tuple[Tensor, Tensor, Tensor]:
    latents = module.norm_latents(given["latents"])
    source = torch.cat((module.norm_media(given["x"]), latents), dim=-2)
    return latents, source, source


row(
    "EvollaSequenceCompressorAttention",
    query="to_q", key=Block("to_kv", 0, 2), value=Block("to_kv", 1, 2), out="to_out", num_heads="heads",
    head_dim=lambda module: module.to_out.in_features // module.heads, scale_from="scale", dropout=None,
    inputs=_compressor_inputs, mask=lambda module, given: given["mask"].bool()[:, None, None],
    weights="never", returns=output_alone, cross=lambda module, path: True,
)  # fmt: skip


def _fsmn_added(module: Any, given: Given, output: Tensor) -> Tensor:
    if module.fsmn is None:
        return output
    memory: Tensor = module.fsmn(module.v_proj(given["hidden_states"]), given.get("input_features_mask"))
    return output + memory


row("FunAsrNanoAttention", **LLAMA, tail=_fsmn_added)


# Packed sequences: several, one after the other, none of which sees another.


def _unbatched_inputs(module: Any, given: Given) -> tuple[Tensor, Tensor, Tensor]:
    batch = given["hidden_states"][None]
    return batch, batch, batch


_PACKED = {"segments": "cu_seqlens", "mask": None}
_UNBATCHED = {
    **_PACKED,
    "inputs": _unbatched_inputs,
    "tail": lambda module, given, output: output[0],
    "returns": output_alone,
}
row(
    "Qwen2_5OmniAudioAttention", "Qwen3ASRAudioAttention", "Qwen3OmniMoeAudioAttention",
    **(BART | {"dropout": "attention_dropout"}), **_UNBATCHED,
)  # fmt: skip
row("Cosmos3EdgeVisionAttention", **CLIP, **_UNBATCHED)
row("GlmImageVisionAttention", **fused("qkv"), out="proj", dropout="attention_dropout", **_UNBATCHED)
row(
    "MiniCPMOcrVisionAttention", "MiniCPMV4_6VisionAttention", "MiniCPMV4_7VisionAttention",
    **(BART | {"dropout": "attention_dropout"}), **_PACKED,
    returns=lambda module, given, output, weights: (output, None),
)  # fmt: skip
row(
    "HunYuanVLVisionAttention",
    **(BART | {"out": "o_proj", "dropout": None}), **_PACKED,
    returns=lambda module, given, output, weights: (output, None),
)  # fmt: skip


# GPT-2 and its family.


def _buffered_causal(module: Any, given: Given, query_length: int, key_length: int, past: Any) -> Tensor:
    """An addend from the causal mask, local perhaps, that these classes keep in the buffer `bias`."""
    allowed = module.bias[:, :, key_length - query_length : key_length, :key_length].bool()
    dtype = module.mixing.dtype
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(~allowed, torch.finfo(dtype).min)


_GPT2_SELF = {**fused("c_attn"), "when": lambda module: not module.is_cross_attention}
_GPT2_CROSS = {
    "query": "q_attn", "key": Block("c_attn", 0, 2), "value": Block("c_attn", 1, 2),
    "when": lambda module: module.is_cross_attention, "cross": lambda module, path: True,
}  # fmt: skip
_GPT2 = {"out": "c_proj", "dropout": "attn_dropout", **ENCODER_MASKED, **then("resid_dropout")}
row("DecisionTransformerGPT2Attention", "GPT2Attention", **_GPT2, **_GPT2_SELF)
row("DecisionTransformerGPT2Attention", "GPT2Attention", **_GPT2, **_GPT2_CROSS)


def _imagegpt_scale(module: Any) -> float:
    # Versions differ in what they make of a root that is not an integer.
    scale = 1 / torch_float(module.head_dim**0.5) if module.scale_attn_weights else 1.0
    return float(scale / (module.layer_idx + 1) if module.scale_attn_by_inverse_layer_idx else scale)


# It reads the mask of the other sequence nowhere: cross-attention, too, takes `attention_mask`.
_IMAGEGPT = {**_GPT2, **ALWAYS, "cross_mask": None, "cache": "layer_past", "scale_from": _imagegpt_scale}
row("ImageGPTAttention", **_IMAGEGPT, **_GPT2_SELF, bias=_buffered_causal)
row("ImageGPTAttention", **_IMAGEGPT, **_GPT2_CROSS)
row(
    "GPTBigCodeAttention",
    **fused("c_attn", per_head=True), **_GPT2, cache="layer_past",
    obstacles=lambda module: ["its cross-attention splits keys and values by one head"]
    if module.is_cross_attention else [],
)  # fmt: skip
row(
    "GPTNeoSelfAttention",
    **(BART | {"dropout": "attn_dropout"}), **ALWAYS, **then("resid_dropout"),
    scale_from=1.0, cache="layer_past", layer="layer_id", bias=_buffered_causal,
)  # fmt: skip
row(
    "BarkSelfAttention",
    **fused("att_proj"), out="out_proj", dropout="attn_dropout", **ALWAYS, **then("resid_dropout"),
    scale_from=lambda module: module.head_dim**-0.5,
    bias=lambda module, given, *lengths: _buffered_causal(module, given, *lengths) if module.is_causal else None,
)  # fmt: skip
row(
    "openai.Attention",
    **fused("c_attn"), out="c_proj", num_heads="n_head", head_dim=lambda module: module.split_size // module.n_head,
    scale_from=lambda module: (module.split_size // module.n_head) ** -0.5 if module.scale else 1.0,
    dropout="attn_dropout", **ASKED, **then("resid_dropout"), bias=_buffered_causal,
    returns=lambda module, given, output, weights: [output] if weights is None else [output, weights],
)  # fmt: skip
row(
    "ctrl.MultiHeadAttention",
    query="Wq", key="Wk", value="Wv", out="dense", dropout=None, cache="layer_past", **named_inputs("q", "k", "v"),
)  # fmt: skip


def _xlm_mask(module: Any, given: Given) -> Tensor:
    mask: Tensor = given["mask"] != 0
    return mask[:, None] if mask.dim() == 3 else mask[:, None, None]


row(
    "flaubert.MultiHeadAttention", "xlm.MultiHeadAttention",
    query="q_lin", key="k_lin", value="v_lin", out="out_lin", num_heads="n_heads", dropout="dropout",
    scale_from=lambda module: module.head_dim**-0.5, **ASKED_TUPLE,
    mask=_xlm_mask, memory="kv", cache="cache", layer="layer_id",
)  # fmt: skip


# Distance as an addend to the scores: alibi, T5.


def _bloom_tail(module: Any, given: Given, output: Tensor) -> Tensor:
    return cast(Tensor, given["residual"] + functional.dropout(output, module.hidden_dropout, module.training))


row(
    "BloomAttention",
    **fused("query_key_value", per_head=True), out="dense", scale_from="inv_norm_factor",
    dropout="attention_dropout", **ALWAYS, cache="layer_past", tail=_bloom_tail,
    bias=lambda module, given, *lengths: given["alibi"].unflatten(0, (-1, module.num_heads)) * module.beta,
)  # fmt: skip


def _mpt_bias(module: Any, given: Given, query_length: int, key_length: int, past: Any) -> Tensor | None:
    bias: Tensor | None = given.get("position_bias")
    return None if bias is None else bias[:, :, max(0, bias.shape[2] - key_length) :]


row(
    "MptAttention",
    **fused("Wqkv"), out="out_proj", num_heads="n_heads", scale_from="softmax_scale", dropout="attn_dropout_p",
    **ALWAYS, mask=inverted_mask, bias=_mpt_bias,
    obstacles=lambda module: ["clip_qkv clips queries and keys after their projections"] if module.clip_qkv else [],
)  # fmt: skip


def _cpmant_bias(module: Any, given: Given, *lengths: Any) -> Tensor:
    # The mask goes into the addend as infinity: a query that sees nothing must get nothing, not the mean of all.
    hidden = ~given["attention_mask"].bool()[:, None]
    return cast(Tensor, given["position_bias"].masked_fill(hidden, -torch.inf))


row(
    "CpmAntAttention",
    query="project_q", key="project_k", value="project_v", out="attention_out", head_dim="dim_head",
    scale_from=lambda module: module.dim_head**-0.5, dropout="dropout", **ASKED,
    **named_inputs("hidden_q", "hidden_kv", "hidden_kv"),
    mask=None, bias=_cpmant_bias,
)  # fmt: skip


def _t5_bias(module: Any, given: Given, query_length: int, key_length: int, past_length: int | Tensor) -> Tensor:
    bias: Tensor | None = given.get("position_bias")
    if bias is None:
        device, dtype = module.mixing.device, module.mixing.dtype
        if module.has_relative_attention_bias:
            bias = module.compute_bias(query_length, key_length, device=device, past_seen_tokens=past_length)
        else:
            bias = torch.zeros(1, module.n_heads, query_length, key_length, device=device, dtype=dtype)
            bias.requires_grad_(module.training and getattr(module, "gradient_checkpointing", False))
        # The layer that makes it returns it, for those above.
        given["position_bias"] = bias
    return cast(Tensor, bias)


_T5 = {
    "query": "q", "key": "k", "value": "v", "out": "o",
    "num_heads": "n_heads", "head_dim": "key_value_proj_dim", "dropout": "dropout", "bias": _t5_bias,
}  # fmt: skip
_T5_CALL = {
    "mask": "mask",
    "returns": lambda module, given, output, weights: (output, given["position_bias"], weights),
}
row(
    "LongT5Attention", "MT5Attention", "Pop2PianoAttention", "SwitchTransformersAttention", "T5Attention",
    "UdopAttention",
    **_T5, **_T5_CALL,
)  # fmt: skip
row(
    "Pix2StructTextAttention",
    **(_T5 | {"query": "query", "key": "key", "value": "value", "out": "output"}), **_T5_CALL,
)  # fmt: skip
row("UMT5Attention", **_T5, **ENCODER)
