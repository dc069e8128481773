"""Attention classes of Hugging Face transformers as data. To add one, see docs/adding-a-host.md.

A row names classes that differ in nothing but their name. `folder.Class` names a class whose name several of
transformers' modules use for different things. What is not a row is a function that a row needs: it tells where
the inputs, the mask or an addend to the scores of a class come from.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from transformers.utils.generic import torch_float

from collab.hosts import register_host
from collab.hosts.linear import Block
from collab.hosts.obstacles import ROTARY
from collab.hosts.transformers_shell import Given, TransformersHost, output_alone, pair_if_asked


def _row(*names: str, **fields: Any) -> None:
    """Register one row for every class that differs from the first in its name alone."""
    for name in names:
        folder, _, class_name = name.rpartition(".")
        module = f"models.{folder}.modeling_{folder}." if folder else ""
        register_host(f"transformers.{module}{class_name}", TransformersHost(name=name, **fields))


def _named_inputs(query: str, key: str, value: str) -> dict[str, Any]:
    """Queries, keys and values come from arguments of their own."""
    return {"inputs": lambda module, given: (given[query], given[key], given[value])}


def _then(layer: str) -> dict[str, Any]:
    """A layer of the module follows the output projection, such as a dropout."""
    return {"tail": lambda module, given, output: getattr(module, layer)(output)}


def _fused(name: str, *, per_head: bool = False) -> dict[str, Block]:
    """Queries, keys and values of one linear layer, in this order."""
    return {role: Block(name, index, 3, per_head) for index, role in enumerate(("query", "key", "value"))}


# Where projections and sizes are, by habit of naming.

_BERT = {
    "query": "query", "key": "key", "value": "value", "out": None,
    "num_heads": "num_attention_heads", "head_dim": "attention_head_size", "dropout": "dropout",
}  # fmt: skip
_PROJ = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}
_BART = {**_PROJ, "out": "out_proj", "dropout": "dropout"}
_CLIP = {**_BART, "scale_from": "scale"}
_VIT = {**_PROJ, "out": "o_proj", "num_heads": "num_attention_heads", "dropout": "attention_dropout"}
_LLAMA = {**_VIT, "num_heads": lambda module: module.o_proj.in_features // module.head_dim}

# How classes behave that call no attention interface: they divide by the root of the head size themselves, and return
# the weights always, or when asked to.

_BY_HEAD_SIZE = {"scale_from": lambda module: module.attention_head_size**-0.5}
_ALWAYS = {"weights": "always"}
_ASKED = {"weights": "asked"}
_ASKED_TUPLE = {"weights": "asked", "returns": pair_if_asked}
_BERT_ALWAYS = {**_BERT, **_BY_HEAD_SIZE, **_ALWAYS}
_BERT_ASKED = {**_BERT, **_BY_HEAD_SIZE, **_ASKED_TUPLE}

_ENCODER = {"memory": "encoder_hidden_states"}
_ENCODER_MASKED = {"memory": "encoder_hidden_states", "cross_mask": "encoder_attention_mask"}


# BERT and its family: the output projection is in another module.

_row(
    "BertSelfAttention", "BertGenerationSelfAttention", "BridgeTowerSelfAttention", "CamembertSelfAttention",
    "Data2VecTextSelfAttention", "ElectraSelfAttention", "ErnieSelfAttention", "RoCBertSelfAttention",
    "RobertaPreLayerNormSelfAttention", "RobertaSelfAttention", "XLMRobertaSelfAttention", "XLMRobertaXLSelfAttention",
    "XmodSelfAttention",
    **_BERT,
)  # fmt: skip
_row(
    "BertCrossAttention", "BertGenerationCrossAttention", "BridgeTowerCrossAttention", "CamembertCrossAttention",
    "Data2VecTextCrossAttention", "ElectraCrossAttention", "ErnieCrossAttention", "RoCBertCrossAttention",
    "RobertaCrossAttention", "RobertaPreLayerNormCrossAttention", "XLMRobertaCrossAttention",
    "XLMRobertaXLCrossAttention", "XmodCrossAttention",
    **_BERT, **_ENCODER, cross=lambda module, path: True,
)  # fmt: skip
_row(
    "AlignTextSelfAttention", "AltRobertaSelfAttention", "ChineseCLIPTextSelfAttention", "ClapTextSelfAttention",
    "LayoutLMSelfAttention", "MarkupLMSelfAttention", "SplinterSelfAttention",
    **(_BERT | {"dropout": "attention_dropout"}),
)  # fmt: skip
_row(
    "DPTSelfAttention", "VideoMAESelfAttention", "VitPoseBackboneSelfAttention", "YolosSelfAttention",
    # of transformers 5.17, where the classes that attend in later versions wrap these
    "Dinov2SelfAttention", "Dinov2WithRegistersSelfAttention", "RadioSelfAttention", "RfDetrDinov2SelfAttention",
    "Tipsv2VisionSelfAttention",
    **(_BERT | {"dropout": "dropout_prob"}), mask=None,
)  # fmt: skip
_row(
    "Blip2QFormerMultiHeadAttention", "InstructBlipQFormerMultiHeadAttention",
    "InstructBlipVideoQFormerMultiHeadAttention",
    **(_BERT | {"dropout": "attention_dropout"}), **_ENCODER_MASKED,
)  # fmt: skip
_row(
    "EsmSelfAttention", "EvollaSaProtSelfAttention",
    **_BERT, **_BY_HEAD_SIZE, **_ENCODER_MASKED,
    obstacles=lambda module: [ROTARY] if module.position_embedding_type == "rotary" else [],
)  # fmt: skip
_row("MobileBertSelfAttention", **_BERT, **_named_inputs("query_tensor", "key_tensor", "value_tensor"))
_row(
    "DistilBertSelfAttention",
    query="q_lin", key="k_lin", value="v_lin", out="out_lin",
    num_heads="n_heads", head_dim="attention_head_size", dropout="dropout",
)  # fmt: skip
_row(
    "AlbertAttention",
    **(_BERT | {"out": "dense", "dropout": "attention_dropout"}),
    tail=lambda module, given, output: module.LayerNorm(given["hidden_states"] + module.output_dropout(output)),
    shared_by=lambda module: module.config.num_hidden_layers // module.config.num_hidden_groups,
)

# Older classes of that family.

_row("BigBirdPegasusSelfAttention", "BigBirdSelfAttention", "BlipTextSelfAttention", **_BERT_ALWAYS, **_ENCODER_MASKED)
_row("GitSelfAttention", **_BERT_ALWAYS)
_row("MegatronBertSelfAttention", "RemBertSelfAttention", **_BERT_ALWAYS, **_ENCODER)
_row("FlavaSelfAttention", "ViltSelfAttention", "VisualBertSelfAttention", **_BERT_ASKED)
_row("MobileViTSelfAttention", **(_BERT_ASKED | {"returns": output_alone}), mask=None)
_row(
    "LxmertAttention",
    **_BERT_ASKED, **_named_inputs("hidden_states", "context", "context"),
    cross=lambda module, path: "visual_attention" in path,
)  # fmt: skip
_row(
    "TvpAttention",
    **(_BERT_ASKED | {"out": "dense", "dropout": "attn_dropout"}),
    tail=lambda module, given, output: module.layer_norm(module.dropout(output) + given["hidden_states"]),
)
_row(
    "GroundingDinoMultiheadAttention", "MMGroundingDinoMultiheadAttention", "OmDetTurboMultiheadAttention",
    "ZoeDepthMultiheadAttention",
    **(_BERT_ASKED | {"out": "out_proj"}), **_named_inputs("queries", "keys", "values"),
)  # fmt: skip
_row(
    "MPNetSelfAttention",
    **(_BERT_ASKED | {"query": "q", "key": "k", "value": "v", "out": "o"}),
    bias=lambda module, given, *lengths: given.get("position_bias"),
)


def _with_cache_if_decoder(module: Any, given: Given, output: Tensor, weights: Tensor | None) -> Any:
    result = pair_if_asked(module, given, output, weights)
    return (*result, given.get("past_key_values")) if module.is_decoder else result


_row("TapasSelfAttention", **(_BERT_ASKED | {"returns": _with_cache_if_decoder}), **_ENCODER)
_row("SuperGlueSelfAttention", **(_BERT_ASKED | {"returns": _with_cache_if_decoder}), **_ENCODER_MASKED)


def _canine_mask(module: Any, given: Given) -> Tensor | None:
    mask: Tensor | None = given.get("attention_mask")
    if mask is not None and mask.dim() == 3:
        mask = (1.0 - mask[:, None].float()) * torch.finfo(given["from_tensor"].dtype).min
    return mask


_row(
    "CanineSelfAttention",
    **_BERT_ASKED, **_named_inputs("from_tensor", "to_tensor", "to_tensor"), mask=_canine_mask,
)  # fmt: skip


def _perceiver_inputs(module: Any, given: Given) -> tuple[Tensor, Tensor, Tensor]:
    hidden_states, other = module.layernorm1(given["hidden_states"]), given.get("inputs")
    source = hidden_states if other is None else module.layernorm2(other)
    return hidden_states, source, source


_row(
    "PerceiverSelfAttention",
    **(_BERT_ASKED | {"num_heads": "num_heads", "head_dim": "qk_channels_per_head"}
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


_row("Data2VecVisionSelfAttention", **_BERT_ASKED, mask=None, bias=_data2vec_bias)
_row(
    "Data2VecVisionSdpaSelfAttention",
    **_BERT, **_BY_HEAD_SIZE, weights="never", mask=None, bias=_data2vec_bias,
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


_row(
    "LayoutLMv2SelfAttention",
    **_BERT_ALWAYS, bias=_layoutlm_bias,
    mask=lambda module, given: ~given["attention_mask"].bool(),
    obstacles=lambda module: ["fast_qkv keeps the biases apart from the projection"] if module.fast_qkv else [],
)  # fmt: skip
_row("LayoutLMv3SelfAttention", **_BERT_ALWAYS, bias=_layoutlmv3_bias)
_row("PPDocLayoutV2ReadingOrderSelfAttention", **_BERT_ALWAYS, bias=_reading_order_bias)


def _window_mask(module: Any, given: Given) -> Tensor | None:
    """A mask by window, (window, token, token), for sequences that hold every window of every image in turn."""
    mask: Tensor | None = given.get("attention_mask")
    if mask is None:
        return None
    return mask.repeat(given["hidden_states"].shape[0] // mask.shape[0], 1, 1)[:, None]


def _table_bias(module: Any, given: Given, query_length: int, key_length: int, past: Any) -> Tensor:
    bias: Tensor = module.relative_position_bias_table[module.relative_position_index.view(-1)]
    return bias.view(query_length, key_length, -1).permute(2, 0, 1)[None]


_row(
    "ClapAudioSelfAttention", "DonutSwinSelfAttention", "MaskFormerSwinSelfAttention",
    **_BERT_ASKED, mask=_window_mask, bias=_table_bias,
)  # fmt: skip
_row("SwinAttention", **_VIT, mask=_window_mask, bias=lambda module, given, *lengths: module.relative_position_bias())


# Encoders that take fewer keys than queries, reduced from the same image.


def _reduced(reduce: Any) -> dict[str, Any]:
    """Keys and values come from an image that `reduce` made smaller."""

    def inputs(module: Any, given: Given) -> tuple[Tensor, Tensor, Tensor]:
        hidden_states = given["hidden_states"]
        source = reduce(module, hidden_states, given["height"], given["width"])
        return hidden_states, source, source

    return {"inputs": inputs, "mask": None}


def _as_image(tokens: Tensor, height: int, width: int) -> Tensor:
    image: Tensor = tokens.mT.unflatten(-1, (height, width))
    return image


def _pvt_reduce(module: Any, tokens: Tensor, height: int, width: int) -> Tensor:
    if module.sequences_reduction_ratio == 1:
        return tokens
    smaller = module.sequence_reduction(_as_image(tokens, height, width))
    return cast(Tensor, module.layer_norm(smaller.flatten(2).mT))


def _pvt_v2_reduce(module: Any, tokens: Tensor, height: int, width: int) -> Tensor:
    if module.linear_attention:
        smaller = module.spatial_reduction(module.pool(_as_image(tokens, height, width)))
        return cast(Tensor, module.act(module.layer_norm(smaller.flatten(2).mT)))
    if module.spatial_reduction_ratio == 1:
        return tokens
    smaller = module.spatial_reduction(_as_image(tokens, height, width))
    return cast(Tensor, module.layer_norm(smaller.flatten(2).mT))


def _glpn_reduce(module: Any, tokens: Tensor, height: int, width: int) -> Tensor:
    if module.sr_ratio == 1:
        return tokens
    return cast(Tensor, module.layer_norm(module.sr(_as_image(tokens, height, width)).flatten(2).mT))


def _segformer_reduce(module: Any, tokens: Tensor, height: int, width: int) -> Tensor:
    reduced = module.sequence_reduction_ratio > 1
    return cast(Tensor, module.sequence_reduction(tokens, height, width) if reduced else tokens)


_row("GLPNEfficientSelfAttention", **_BERT_ASKED, **_reduced(_glpn_reduce))
_row("PvtEfficientSelfAttention", **_BERT_ASKED, **_reduced(_pvt_reduce))
_row(
    "PvtV2SelfAttention",
    **(_BERT_ASKED | {"out": "proj", "dropout": "attn_drop"}), **_reduced(_pvt_v2_reduce), **_then("proj_drop"),
)  # fmt: skip
_row("SegformerAttention", **_VIT, **(_reduced(_segformer_reduce) | {"mask": "attention_mask"}))


# Vision transformers.

_row(
    "ASTAttention", "BeitAttention", "DeiTAttention", "Dinov2Attention", "Dinov2WithRegistersAttention",
    "IJepaAttention", "LwDetrViTAttention", "PixioAttention", "RfDetrDinov2Attention", "Tipsv2VisionAttention",
    "ViTAttention", "ViTMAEAttention", "ViTMSNAttention", "VivitAttention",
    **_VIT,
)  # fmt: skip
_row("MoonshineStreamingEncoderAttention", **_LLAMA)
_row("RadioAttention", **_VIT, segments="cu_seqlens")
_row(
    "AltCLIPAttention", "CLIPAttention", "CLIPSegAttention", "ChineseCLIPVisionAttention", "MetaClip2Attention",
    "Owlv2Attention", "OwlViTAttention", "UnlimitedOcrAttention", "XCLIPAttention",
    **_CLIP,
)  # fmt: skip
_row(
    "Aimv2Attention", "Emu3VQVAEAttentionBlock", "EomtAttention", "GitVisionAttention", "Idefics2VisionAttention",
    "Idefics3VisionAttention", "Kosmos2VisionAttention", "Ovis2VisionAttention", "Sam3LiteTextTextAttention",
    "Siglip2Attention", "SiglipAttention", "SmolVLMVisionAttention", "Tipsv2TextAttention",
    "VJEPA2PoolerSelfAttention", "VideomtAttention",
    **_CLIP,
)  # fmt: skip
_row(
    "VJEPA2PoolerCrossAttention",
    **(_CLIP | {"out": None}), **_named_inputs("queries", "keys", "values"), cross=lambda module, path: True,
)  # fmt: skip
_row(
    "XCLIPCrossAttention",
    **(_CLIP | {"out": "proj", "dropout": "attn_drop"}), **_named_inputs("queries", "keys", "values"),
    **_then("proj_drop"), mask=None, returns=output_alone, cross=lambda module, path: True,
)  # fmt: skip
_row(
    "InternVLVisionAttention", "JanusVisionAttention", "QianfanOCRVisionAttention",
    **(_CLIP | {"out": "projection_layer", "dropout": "attention_dropout"}), **_then("projection_dropout"),
)  # fmt: skip
_row("GroupViTAttention", **_CLIP, **_ENCODER, **_ALWAYS)
_row("Phi4MultimodalVisionAttention", **(_BART | {"dropout": "attention_dropout"}))
_row("MllamaVisionAttention", **(_BART | {"out": "o_proj", "dropout": None}))
_row("Molmo2VisionAttention", **_LLAMA, **_ENCODER)
_row(
    "Kosmos2_5VisionAttention",
    query="query", key="key", value="value", out="output", num_heads="n_heads", dropout="dropout", **_ALWAYS,
)  # fmt: skip
_row(
    "Pix2StructVisionAttention",
    query="query", key="key", value="value", out="output",
    num_heads="n_heads", head_dim="key_value_proj_dim", dropout="dropout",
)  # fmt: skip
_row(
    "Blip2Attention", "InstructBlipAttention", "InstructBlipVideoAttention", "PPOCRV5MobileRecAttention",
    "PPOCRV5ServerRecAttention", "PPOCRV6SmallRecAttention",
    **_fused("qkv"), out="projection", scale_from="scale", dropout="attention_dropout", mask=None,
)  # fmt: skip
_row(
    "BlipAttention",
    **_fused("qkv"), out="projection", scale_from="scale", dropout="dropout", mask=None, **_ALWAYS,
)  # fmt: skip
_row(
    "MgpstrAttention",
    **_fused("qkv"), out="proj", head_dim=lambda module: module.qkv.in_features // module.num_heads,
    scale_from="scale", dropout="attn_drop", mask=None, **_then("proj_drop"), **_ALWAYS,
)  # fmt: skip
_row(
    "TimesformerSelfAttention",
    **_fused("qkv"), out=None, head_dim=lambda module: module.qkv.in_features // module.num_heads,
    scale_from="scale", dropout="attn_drop", mask=None, **_ASKED_TUPLE,
)  # fmt: skip
_row(
    "OneFormerTextMapperAttention",
    **(_CLIP | {"out": "proj", "dropout": None}), **_named_inputs("q", "k", "v"), **_then("proj_drop"),
    head_dim=lambda module: module.proj.in_features // module.num_heads,
    mask=None, weights="never", returns=output_alone, cross=lambda module, path: True,
)  # fmt: skip


def _cvt_inputs(module: Any, given: Given) -> tuple[Tensor, Tensor, Tensor]:
    tokens, height, width = given["hidden_state"], given["height"], given["width"]
    first, tokens = tokens.split([tokens.shape[1] - height * width, height * width], dim=1)
    image = _as_image(tokens, height, width)
    names = ("query", "key", "value")
    inputs = (torch.cat((first, getattr(module, f"convolution_projection_{name}")(image)), dim=1) for name in names)
    return cast(tuple[Tensor, Tensor, Tensor], tuple(inputs))


_row(
    "CvtSelfAttention",
    query="projection_query", key="projection_key", value="projection_value", out=None,
    head_dim=lambda module: module.embed_dim // module.num_heads, scale_from="scale", dropout="dropout",
    inputs=_cvt_inputs, mask=None, weights="never", returns=output_alone,
)  # fmt: skip


# Points and masks: queries, keys and values are given apart, several sets to an image.


def _point_inputs(module: Any, given: Given) -> tuple[Tensor, Tensor, Tensor]:
    return cast(tuple[Tensor, Tensor, Tensor], tuple(given[name].flatten(0, 1) for name in ("query", "key", "value")))


_POINTS = {
    "inputs": _point_inputs,
    "mask": "attention_similarity",
    "tail": lambda module, given, output: output.unflatten(0, given["query"].shape[:2]),
}
_row(
    "EdgeTamAttention", "EdgeTamVideoAttention", "Sam2Attention", "Sam2VideoAttention", "Sam3TrackerAttention",
    "Sam3TrackerVideoAttention",
    **(_VIT | {"dropout": None}), **_POINTS,
)  # fmt: skip
_row(
    "SamAttention", "SamHQAttention",
    **(_VIT | {"out": "out_proj", "dropout": None}), **_POINTS,
    head_dim=lambda module: module.internal_dim // module.num_attention_heads,
)  # fmt: skip
_row(
    "Sam3Attention", "Sam3LiteTextAttention",
    **(_VIT | {"dropout": None}), **_named_inputs("query", "key", "value"),
)  # fmt: skip


# Detection: positions are added to the inputs of queries and keys, but not of values.


def _plus(tokens: Tensor, positions: Tensor | None) -> Tensor:
    return tokens if positions is None else tokens + positions


def _located(positions: str, memory_positions: str | None = None) -> dict[str, Any]:
    """Names of the arguments that hold the positions of the queries and of the other sequence."""

    def inputs(module: Any, given: Given) -> tuple[Tensor, Tensor, Tensor]:
        hidden_states, memory = given["hidden_states"], given.get("key_value_states")
        query = _plus(hidden_states, given.get(positions))
        if memory is None:
            return query, query, hidden_states
        return query, _plus(memory, given.get(memory_positions) if memory_positions else None), memory

    return {"inputs": inputs}


_row(
    "ConditionalDetrSelfAttention", "DFineSelfAttention", "DeformableDetrSelfAttention", "Deimv2SelfAttention",
    "DetrSelfAttention", "MaskFormerDetrSelfAttention", "PPDocLayoutV2SelfAttention", "PPDocLayoutV3SelfAttention",
    "PPDocLayoutV4SelfAttention", "RTDetrSelfAttention", "RTDetrV2SelfAttention",
    **_LLAMA, **_located("position_embeddings"),
)  # fmt: skip
_row(
    "DetrCrossAttention", "MaskFormerDetrCrossAttention",
    **_LLAMA, **_located("position_embeddings", "encoder_position_embeddings"), cross=lambda module, path: True,
)  # fmt: skip
_row("DetrAttention", **(_BART | {"dropout": "attention_dropout"}), **_ASKED, **_located("object_queries"))


def _inverted_mask(module: Any, given: Given) -> Tensor | None:
    """A mask that is True where it hides, when it is boolean."""
    mask: Tensor | None = given.get("attention_mask")
    return ~mask if mask is not None and mask.dtype == torch.bool else mask


_row(
    "TableTransformerAttention",
    **_BART, **_ASKED, **_located("object_queries", "spatial_position_embeddings"), mask=_inverted_mask,
)  # fmt: skip


def _tokens_first(hook: Any) -> Any:
    """The hook's inputs, given as (token, batch, width)."""
    return lambda module, given: tuple(tokens.transpose(0, 1) for tokens in hook(module, given))


def _back_to_tokens_first(module: Any, given: Given, output: Tensor) -> Tensor:
    return output.transpose(0, 1)


def _mask_by_head(module: Any, given: Given) -> Tensor | None:
    mask: Tensor | None = given.get("attention_mask")
    return None if mask is None else mask.unflatten(0, (-1, module.num_heads)).to(given["hidden_states"].dtype)


_row(
    "Mask2FormerAttention", "OneFormerAttention",
    **_BART, **_ASKED, mask=_mask_by_head, tail=_back_to_tokens_first,
    inputs=_tokens_first(_located("position_embeddings", "key_value_position_embeddings")["inputs"]),
)  # fmt: skip


def _grouped_inputs(module: Any, given: Given) -> tuple[Tensor, Tensor, Tensor]:
    """In training, queries come in groups that do not see each other: each becomes a sequence of its own."""
    hidden_states = given["hidden_states"]
    located = _plus(hidden_states, given.get("position_embeddings"))
    if module.training:
        size = hidden_states.shape[1] // module.config.group_detr
        hidden_states, located = (torch.cat(tokens.split(size, dim=1)) for tokens in (hidden_states, located))
    return located, located, hidden_states


def _ungroup(module: Any, given: Given, output: Tensor) -> Tensor:
    return torch.cat(output.split(given["hidden_states"].shape[0]), dim=1) if module.training else output


_row("LwDetrAttention", "RfDetrAttention", **_LLAMA, inputs=_grouped_inputs, tail=_ungroup, mask=None)


# BART and its family, decoders and speech.

_row(
    "AudioFlamingo3Attention", "BartAttention", "BigBirdPegasusDecoderAttention", "BioGptAttention",
    "BlenderbotAttention", "BlenderbotSmallAttention", "InformerAttention", "M2M100Attention", "MBartAttention",
    "MarianAttention", "MusicgenAttention", "MusicgenMelodyAttention", "NllbMoeAttention", "PLBartAttention",
    "PPFormulaNetAttention", "PegasusAttention", "PegasusXAttention", "Speech2TextAttention",
    "TimeSeriesTransformerAttention", "WhisperAttention",
    **_BART,
)  # fmt: skip
_row(
    "Data2VecAudioAttention", "HubertAttention", "PatchTSMixerAttention", "PatchTSTAttention", "SEWAttention",
    "UniSpeechAttention", "UniSpeechSatAttention", "Wav2Vec2Attention",
    **_BART,
)  # fmt: skip
_row("MossTranscribeDiarizeAudioAttention", "OPTAttention", "Qwen2AudioAttention", "VoxtralAttention", **_BART)
_row("Kosmos2_5TextAttention", "SeamlessM4TAttention", "SeamlessM4Tv2Attention", **_BART, **_ENCODER)
_row(
    "KosmosTextAttention",
    **(_BART | {"out": None}), **_ENCODER,
    tail=lambda module, given, output: module.out_proj(
        output if module.inner_attn_ln is None else module.inner_attn_ln(output)
    ),
)  # fmt: skip
_row("TrOCRAttention", **_BART, **_ASKED)
_row("XGLMAttention", **_BART, **_ALWAYS)
_row(
    "LEDDecoderAttention",
    **_BART, **_ASKED,
    returns=lambda module, given, output, weights: (output, weights, given.get("past_key_values")),
)  # fmt: skip


def _mvp_inputs(module: Any, given: Given) -> tuple[Tensor, Tensor, Tensor]:
    if given.get("attn_prompt") is not None:
        raise ValueError("attn_prompt must be None: its keys are ordinary ones, not of the space the heads now share")
    hidden_states, memory = given["hidden_states"], given.get("key_value_states")
    source = hidden_states if memory is None else memory
    return hidden_states, source, source


_row("MvpAttention", **_BART, **_ASKED, inputs=_mvp_inputs)


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


_FSMT = {**_BART, **_ASKED, "inputs": _tokens_first(_fsmt_inputs), "mask": _fsmt_mask, "tail": _back_to_tokens_first,
         "batch_first": False}  # fmt: skip
_row(
    "fsmt.Attention",
    **_FSMT, cache="layer_state", memory="key", cross=lambda module, path: True,
    when=lambda module: module.encoder_decoder_attention,
)  # fmt: skip
_row(
    "fsmt.Attention",
    **_FSMT, cache="layer_state", memory="", cross=lambda module, path: False,
    when=lambda module: not module.encoder_decoder_attention,
)  # fmt: skip

_row(
    "CanarySelfAttention", "CohereAsrSelfAttention", "JambaAttention", "NemotronHAttention", "ZambaAttention", **_LLAMA
)
_row(
    "CanaryCrossAttention", "CohereAsrCrossAttention",
    **_LLAMA, **_ENCODER, cross=lambda module, path: True,
)  # fmt: skip
_row("DiaCrossAttention", **_LLAMA, memory="cross_attention_states", cross=lambda module, path: True)
_row("Phi4MultimodalAudioAttention", **_LLAMA, returns=output_alone)


def _perceiver_resampler_inputs(module: Any, given: Given) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.cat((given["context"], given["latents"]), dim=-2)
    return given["latents"], source, source


_row("Idefics2PerceiverAttention", **_LLAMA, inputs=_perceiver_resampler_inputs, cross=lambda module, path: True)
_row(
    "EsmFold2DiffusionAttention",
    **(_LLAMA | {"out": None, "dropout": None}), mask="attention_bias",
    tail=lambda module, given, output: module.o_proj(output * module.gate_proj(given["hidden_states"]).sigmoid()),
)  # fmt: skip


_row(
    "EsmFoldSelfAttention",
    **_fused("proj", per_head=True), out=None, head_dim="head_width", scale_from="rescale_factor", dropout=None,
    **_ALWAYS,
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


_row(
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


_row("FunAsrNanoAttention", **_LLAMA, tail=_fsmn_added)


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
_row(
    "Qwen2_5OmniAudioAttention", "Qwen3ASRAudioAttention", "Qwen3OmniMoeAudioAttention",
    **(_BART | {"dropout": "attention_dropout"}), **_UNBATCHED,
)  # fmt: skip
_row("Cosmos3EdgeVisionAttention", **_CLIP, **_UNBATCHED)
_row("GlmImageVisionAttention", **_fused("qkv"), out="proj", dropout="attention_dropout", **_UNBATCHED)
_row(
    "MiniCPMOcrVisionAttention", "MiniCPMV4_6VisionAttention", "MiniCPMV4_7VisionAttention",
    **(_BART | {"dropout": "attention_dropout"}), **_PACKED,
    returns=lambda module, given, output, weights: (output, None),
)  # fmt: skip
_row(
    "HunYuanVLVisionAttention",
    **(_BART | {"out": "o_proj", "dropout": None}), **_PACKED,
    returns=lambda module, given, output, weights: (output, None),
)  # fmt: skip


# GPT-2 and its family.


def _buffered_causal(module: Any, given: Given, query_length: int, key_length: int, past: Any) -> Tensor:
    """An addend from the causal mask, local perhaps, that these classes keep in the buffer `bias`."""
    allowed = module.bias[:, :, key_length - query_length : key_length, :key_length].bool()
    dtype = module.mixing.dtype
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(~allowed, torch.finfo(dtype).min)


_GPT2_SELF = {**_fused("c_attn"), "when": lambda module: not module.is_cross_attention}
_GPT2_CROSS = {
    "query": "q_attn", "key": Block("c_attn", 0, 2), "value": Block("c_attn", 1, 2),
    "when": lambda module: module.is_cross_attention, "cross": lambda module, path: True,
}  # fmt: skip
_GPT2 = {"out": "c_proj", "dropout": "attn_dropout", **_ENCODER_MASKED, **_then("resid_dropout")}
_row("DecisionTransformerGPT2Attention", "GPT2Attention", **_GPT2, **_GPT2_SELF)
_row("DecisionTransformerGPT2Attention", "GPT2Attention", **_GPT2, **_GPT2_CROSS)


def _imagegpt_scale(module: Any) -> float:
    # Versions differ in what they make of a root that is not an integer.
    scale = 1 / torch_float(module.head_dim**0.5) if module.scale_attn_weights else 1.0
    return float(scale / (module.layer_idx + 1) if module.scale_attn_by_inverse_layer_idx else scale)


# It reads the mask of the other sequence nowhere: cross-attention, too, takes `attention_mask`.
_IMAGEGPT = {**_GPT2, **_ALWAYS, "cross_mask": None, "cache": "layer_past", "scale_from": _imagegpt_scale}
_row("ImageGPTAttention", **_IMAGEGPT, **_GPT2_SELF, bias=_buffered_causal)
_row("ImageGPTAttention", **_IMAGEGPT, **_GPT2_CROSS)
_row(
    "GPTBigCodeAttention",
    **_fused("c_attn", per_head=True), **_GPT2, cache="layer_past",
    obstacles=lambda module: ["its cross-attention splits keys and values by one head"]
    if module.is_cross_attention else [],
)  # fmt: skip
_row(
    "GPTNeoSelfAttention",
    **(_BART | {"dropout": "attn_dropout"}), **_ALWAYS, **_then("resid_dropout"),
    scale_from=1.0, cache="layer_past", layer="layer_id", bias=_buffered_causal,
)  # fmt: skip
_row(
    "BarkSelfAttention",
    **_fused("att_proj"), out="out_proj", dropout="attn_dropout", **_ALWAYS, **_then("resid_dropout"),
    scale_from=lambda module: module.head_dim**-0.5,
    bias=lambda module, given, *lengths: _buffered_causal(module, given, *lengths) if module.is_causal else None,
)  # fmt: skip
_row(
    "openai.Attention",
    **_fused("c_attn"), out="c_proj", num_heads="n_head", head_dim=lambda module: module.split_size // module.n_head,
    scale_from=lambda module: (module.split_size // module.n_head) ** -0.5 if module.scale else 1.0,
    dropout="attn_dropout", **_ASKED, **_then("resid_dropout"), bias=_buffered_causal,
    returns=lambda module, given, output, weights: [output] if weights is None else [output, weights],
)  # fmt: skip
_row(
    "ctrl.MultiHeadAttention",
    query="Wq", key="Wk", value="Wv", out="dense", dropout=None, cache="layer_past", **_named_inputs("q", "k", "v"),
)  # fmt: skip


def _xlm_mask(module: Any, given: Given) -> Tensor:
    mask: Tensor = given["mask"] != 0
    return mask[:, None] if mask.dim() == 3 else mask[:, None, None]


_row(
    "flaubert.MultiHeadAttention", "xlm.MultiHeadAttention",
    query="q_lin", key="k_lin", value="v_lin", out="out_lin", num_heads="n_heads", dropout="dropout",
    scale_from=lambda module: module.head_dim**-0.5, **_ASKED_TUPLE,
    mask=_xlm_mask, memory="kv", cache="cache", layer="layer_id",
)  # fmt: skip


# Distance as an addend to the scores: alibi, T5.


def _bloom_tail(module: Any, given: Given, output: Tensor) -> Tensor:
    return cast(Tensor, given["residual"] + functional.dropout(output, module.hidden_dropout, module.training))


_row(
    "BloomAttention",
    **_fused("query_key_value", per_head=True), out="dense", scale_from="inv_norm_factor",
    dropout="attention_dropout", **_ALWAYS, cache="layer_past", tail=_bloom_tail,
    bias=lambda module, given, *lengths: given["alibi"].unflatten(0, (-1, module.num_heads)) * module.beta,
)  # fmt: skip


def _mpt_bias(module: Any, given: Given, query_length: int, key_length: int, past: Any) -> Tensor | None:
    bias: Tensor | None = given.get("position_bias")
    return None if bias is None else bias[:, :, max(0, bias.shape[2] - key_length) :]


_row(
    "MptAttention",
    **_fused("Wqkv"), out="out_proj", num_heads="n_heads", scale_from="softmax_scale", dropout="attn_dropout_p",
    **_ALWAYS, mask=_inverted_mask, bias=_mpt_bias,
    obstacles=lambda module: ["clip_qkv clips queries and keys after their projections"] if module.clip_qkv else [],
)  # fmt: skip


def _cpmant_bias(module: Any, given: Given, *lengths: Any) -> Tensor:
    # The mask goes into the addend as infinity: a query that sees nothing must get nothing, not the mean of all.
    hidden = ~given["attention_mask"].bool()[:, None]
    return cast(Tensor, given["position_bias"].masked_fill(hidden, -torch.inf))


_row(
    "CpmAntAttention",
    query="project_q", key="project_k", value="project_v", out="attention_out", head_dim="dim_head",
    scale_from=lambda module: module.dim_head**-0.5, dropout="dropout", **_ASKED,
    **_named_inputs("hidden_q", "hidden_kv", "hidden_kv"),
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
_row(
    "LongT5Attention", "MT5Attention", "Pop2PianoAttention", "SwitchTransformersAttention", "T5Attention",
    "UdopAttention",
    **_T5, **_T5_CALL,
)  # fmt: skip
_row(
    "Pix2StructTextAttention",
    **(_T5 | {"query": "query", "key": "key", "value": "value", "out": "output"}), **_T5_CALL,
)  # fmt: skip
_row("UMT5Attention", **_T5, **_ENCODER)
