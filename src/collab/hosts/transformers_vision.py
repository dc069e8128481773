"""Rows of transformers: vision, encoders that take fewer keys than queries, points and masks, detection."""

from typing import Any, cast

import torch
from torch import Tensor

from collab.hosts.transformers_rows import (
    ALWAYS,
    ASKED,
    ASKED_TUPLE,
    BART,
    BERT_ASKED,
    CLIP,
    ENCODER,
    LLAMA,
    VIT,
    back_to_tokens_first,
    fused,
    inverted_mask,
    named_inputs,
    row,
    then,
    tokens_first,
)
from collab.hosts.transformers_shell import Given, output_alone

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


row("GLPNEfficientSelfAttention", **BERT_ASKED, **_reduced(_glpn_reduce))
row("PvtEfficientSelfAttention", **BERT_ASKED, **_reduced(_pvt_reduce))
row(
    "PvtV2SelfAttention",
    **(BERT_ASKED | {"out": "proj", "dropout": "attn_drop"}), **_reduced(_pvt_v2_reduce), **then("proj_drop"),
)  # fmt: skip
row("SegformerAttention", **VIT, **(_reduced(_segformer_reduce) | {"mask": "attention_mask"}))


# Vision transformers.

row(
    "ASTAttention", "BeitAttention", "DeiTAttention", "Dinov2Attention", "Dinov2WithRegistersAttention",
    "IJepaAttention", "LwDetrViTAttention", "PixioAttention", "RfDetrDinov2Attention", "Tipsv2VisionAttention",
    "ViTAttention", "ViTMAEAttention", "ViTMSNAttention", "VivitAttention",
    **VIT,
)  # fmt: skip
row("MoonshineStreamingEncoderAttention", **LLAMA)
row("RadioAttention", **VIT, segments="cu_seqlens")
row(
    "AltCLIPAttention", "CLIPAttention", "CLIPSegAttention", "ChineseCLIPVisionAttention", "MetaClip2Attention",
    "Owlv2Attention", "OwlViTAttention", "UnlimitedOcrAttention", "XCLIPAttention",
    **CLIP,
)  # fmt: skip
row(
    "Aimv2Attention", "Emu3VQVAEAttentionBlock", "EomtAttention", "GitVisionAttention", "Idefics2VisionAttention",
    "Idefics3VisionAttention", "Kosmos2VisionAttention", "Ovis2VisionAttention", "Sam3LiteTextTextAttention",
    "Siglip2Attention", "SiglipAttention", "SmolVLMVisionAttention", "Tipsv2TextAttention",
    "VJEPA2PoolerSelfAttention", "VideomtAttention",
    **CLIP,
)  # fmt: skip
row(
    "VJEPA2PoolerCrossAttention",
    **(CLIP | {"out": None}), **named_inputs("queries", "keys", "values"), cross=lambda module, path: True,
)  # fmt: skip
row(
    "XCLIPCrossAttention",
    **(CLIP | {"out": "proj", "dropout": "attn_drop"}), **named_inputs("queries", "keys", "values"),
    **then("proj_drop"), mask=None, returns=output_alone, cross=lambda module, path: True,
)  # fmt: skip
row(
    "InternVLVisionAttention", "JanusVisionAttention", "QianfanOCRVisionAttention",
    **(CLIP | {"out": "projection_layer", "dropout": "attention_dropout"}), **then("projection_dropout"),
)  # fmt: skip
row("GroupViTAttention", **CLIP, **ENCODER, **ALWAYS)
row("Phi4MultimodalVisionAttention", **(BART | {"dropout": "attention_dropout"}))
row("MllamaVisionAttention", **(BART | {"out": "o_proj", "dropout": None}))
row("Molmo2VisionAttention", **LLAMA, **ENCODER)
row(
    "Kosmos2_5VisionAttention",
    query="query", key="key", value="value", out="output", num_heads="n_heads", dropout="dropout", **ALWAYS,
)  # fmt: skip
row(
    "Pix2StructVisionAttention",
    query="query", key="key", value="value", out="output",
    num_heads="n_heads", head_dim="key_value_proj_dim", dropout="dropout",
)  # fmt: skip
row(
    "Blip2Attention", "InstructBlipAttention", "InstructBlipVideoAttention", "PPOCRV5MobileRecAttention",
    "PPOCRV5ServerRecAttention", "PPOCRV6SmallRecAttention",
    **fused("qkv"), out="projection", scale_from="scale", dropout="attention_dropout", mask=None,
)  # fmt: skip
row(
    "BlipAttention",
    **fused("qkv"), out="projection", scale_from="scale", dropout="dropout", mask=None, **ALWAYS,
)  # fmt: skip
row(
    "MgpstrAttention",
    **fused("qkv"), out="proj", head_dim=lambda module: module.qkv.in_features // module.num_heads,
    scale_from="scale", dropout="attn_drop", mask=None, **then("proj_drop"), **ALWAYS,
)  # fmt: skip
row(
    "TimesformerSelfAttention",
    **fused("qkv"), out=None, head_dim=lambda module: module.qkv.in_features // module.num_heads,
    scale_from="scale", dropout="attn_drop", mask=None, **ASKED_TUPLE,
)  # fmt: skip
row(
    "OneFormerTextMapperAttention",
    **(CLIP | {"out": "proj", "dropout": None}), **named_inputs("q", "k", "v"), **then("proj_drop"),
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


row(
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
row(
    "EdgeTamAttention", "EdgeTamVideoAttention", "Sam2Attention", "Sam2VideoAttention", "Sam3TrackerAttention",
    "Sam3TrackerVideoAttention",
    **(VIT | {"dropout": None}), **_POINTS,
)  # fmt: skip
row(
    "SamAttention", "SamHQAttention",
    **(VIT | {"out": "out_proj", "dropout": None}), **_POINTS,
    head_dim=lambda module: module.internal_dim // module.num_attention_heads,
)  # fmt: skip
row(
    "Sam3Attention", "Sam3LiteTextAttention",
    **(VIT | {"dropout": None}), **named_inputs("query", "key", "value"),
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


row(
    "ConditionalDetrSelfAttention", "DFineSelfAttention", "DeformableDetrSelfAttention", "Deimv2SelfAttention",
    "DetrSelfAttention", "MaskFormerDetrSelfAttention", "PPDocLayoutV2SelfAttention", "PPDocLayoutV3SelfAttention",
    "PPDocLayoutV4SelfAttention", "RTDetrSelfAttention", "RTDetrV2SelfAttention",
    **LLAMA, **_located("position_embeddings"),
)  # fmt: skip
row(
    "DetrCrossAttention", "MaskFormerDetrCrossAttention",
    **LLAMA, **_located("position_embeddings", "encoder_position_embeddings"), cross=lambda module, path: True,
)  # fmt: skip
row("DetrAttention", **(BART | {"dropout": "attention_dropout"}), **ASKED, **_located("object_queries"))


row(
    "TableTransformerAttention",
    **BART, **ASKED, **_located("object_queries", "spatial_position_embeddings"), mask=inverted_mask,
)  # fmt: skip


def _mask_by_head(module: Any, given: Given) -> Tensor | None:
    mask: Tensor | None = given.get("attention_mask")
    return None if mask is None else mask.unflatten(0, (-1, module.num_heads)).to(given["hidden_states"].dtype)


row(
    "Mask2FormerAttention", "OneFormerAttention",
    **BART, **ASKED, mask=_mask_by_head, tail=back_to_tokens_first,
    inputs=tokens_first(_located("position_embeddings", "key_value_position_embeddings")["inputs"]),
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


row("LwDetrAttention", "RfDetrAttention", **LLAMA, inputs=_grouped_inputs, tail=_ungroup, mask=None)
