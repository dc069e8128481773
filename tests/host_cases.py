"""One row per architecture: a tiny model, or an attention module alone, the classes it proves, and its inputs.

`test_every_host.py` runs one contract over all of them. To add an architecture, add a row: `model(...)` where the
whole model is easily made small, else `module(...)`, which calls the attention as its layer does.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tiny_models import BATCH, LENGTH, inputs_for, numbers, padding_mask, randomise_, tiny, tiny_config, token_ids


@dataclass(frozen=True)
class Case:
    """How to build one model, what to give it, and which attention classes it must contain, all of them swapped.

    Attributes:
        name: of the test.
        classes: names of attention classes, as registered; `New|Old` where versions of transformers differ.
        build: the model with an attention implementation, "eager" or "sdpa", all its parameters random.
        inputs: its arguments.
        implementations: the attention implementations it can have.
        bf16: whether transformers runs it in bfloat16.
        weights: whether transformers hands out its attention weights.
    """

    name: str
    classes: tuple[str, ...]
    build: Callable[[str], nn.Module]
    inputs: Callable[[Any], dict[str, Any]]
    implementations: tuple[str, ...] = ("eager", "sdpa")
    bf16: bool = True
    weights: bool = True


class NotInTransformers(Exception):
    """The installed version has no such class."""


def find(place: str, name: str) -> Any:
    """A class of transformers by its module and name."""
    try:
        return getattr(importlib.import_module(place), name)
    except (ImportError, AttributeError) as error:
        raise NotInTransformers(f"transformers {transformers.__version__} has no {name} in {place}") from error


def find_model(name: str, attention: str) -> Any:
    """A model class that has this attention implementation."""
    model_class = find("transformers", name)
    if attention == "sdpa" and not model_class._supports_sdpa:
        raise NotInTransformers(f"transformers {transformers.__version__} has no sdpa for {name}")
    return model_class


def model(
    name: str,
    classes: str,
    inputs: Callable[[Any], dict[str, Any]] = inputs_for,
    *,
    only: str | None = None,
    bf16: bool = True,
    weights: bool = True,
    **overrides: Any,
) -> Case:
    """A whole model of transformers: its class, the attention classes in it, its inputs and overrides of its config.

    `only` is the one attention implementation it has, if transformers gives it no other.
    """
    return Case(
        name=name + "".join(f"-{value}" for value in overrides.values() if isinstance(value, bool | int | str)),
        classes=tuple(classes.split()),
        build=lambda attention: tiny(find_model(name, attention).__name__, attention, **overrides),
        inputs=inputs,
        implementations=(only,) if only else ("eager", "sdpa"),
        bf16=bf16,
        weights=weights,
    )


class Alone(nn.Module):
    """An attention module as the only thing in a model."""

    def __init__(self, attention: nn.Module, implementation: str) -> None:
        super().__init__()
        self.attention = attention
        self.implementation = implementation

    def forward(self, **arguments: Any) -> Any:
        return self.attention(**arguments)


def module(
    name: str,
    folder: str,
    call: Callable[[Alone], dict[str, Any]],
    *,
    config: str | None = None,
    settings: Mapping[str, Any] | None = None,
    arguments: Mapping[str, Any] | Callable[[Any], Mapping[str, Any]] = {},  # noqa: B006
    only: str | None = None,
) -> Case:
    """An attention module alone.

    Args:
        name, folder: its class, and the folder of transformers' models that has it, with the file if it is another.
        call: its arguments, as its layer gives them.
        config, settings: the config class its constructor takes first, if any, and what to override in it.
        arguments: the rest of its constructor's arguments, or a function of the config that gives all of them.
        only: the one attention implementation it has: "eager" if it does its own arithmetic and adds its masks.
    """

    def build(attention: str) -> nn.Module:
        folder_name, _, file = folder.partition("/")
        place = f"transformers.models.{folder_name}"
        made_from = None
        if config is not None:
            public = hasattr(transformers, config)
            config_class = find("transformers" if public else f"{place}.configuration_{folder_name}", config)
            made_from = tiny_config(config_class, **(settings or {}))
            made_from._attn_implementation = attention
        attention_class = find(f"{place}.modeling_{file or folder_name}", name)
        if callable(arguments):
            made = attention_class(**arguments(made_from))
        else:
            made = attention_class(**({"config": made_from} if made_from is not None else {}), **arguments)
        return randomise_(Alone(made, attention)).eval()

    return Case(
        name=f"{folder}.{name}",
        classes=(name,),
        build=build,
        inputs=call,
        implementations=(only,) if only else ("eager", "sdpa"),
    )


# Inputs.


def tokens(length: int = LENGTH, width: int = 32, seed: int = 0) -> Tensor:
    """(batch, length, width) random vectors."""
    return numbers(BATCH, length, width, seed=seed)


def mask(alone: Alone, queries: int = LENGTH, keys: int = LENGTH) -> Tensor:
    """(batch, 1, query, key): keys that are padding are hidden, in the way of the attention implementation."""
    allowed = padding_mask(keys).bool()[:, None, None].expand(-1, -1, queries, -1)
    if alone.implementation == "sdpa":
        return allowed
    dtype = next(alone.parameters()).dtype
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)


def images(batch: int = BATCH, size: int = 16, channels: int = 3) -> Tensor:
    """(batch, channel, size, size)."""
    return numbers(batch, channels, size, size)


def pixels(size: int = 16, **more: Any) -> Callable[[Any], dict[str, Any]]:
    """Images of this size."""
    return lambda model: {"pixel_values": images(size=size)} | more


def video(frames: int = 2, size: int = 16) -> Callable[[Any], dict[str, Any]]:
    """(batch, frame, channel, size, size)."""
    return lambda model: {"pixel_values": numbers(BATCH, frames, 3, size, size)}


def sound(model: Any) -> dict[str, Any]:
    """(batch, sample), and which of them are padding."""
    return {"input_values": numbers(BATCH, 160), "attention_mask": padding_mask(160 // 20).repeat_interleave(20, 1)}


def text(**more: Any) -> Callable[[Any], dict[str, Any]]:
    """A padded batch of tokens."""
    return lambda model: {"input_ids": token_ids(), "attention_mask": padding_mask()} | more


def hidden(**more: Any) -> Callable[[Alone], dict[str, Any]]:
    """Hidden states with a mask."""
    return lambda alone: {"hidden_states": tokens(), "attention_mask": mask(alone)} | more


def without_mask(**more: Any) -> Callable[[Alone], dict[str, Any]]:
    """Hidden states alone."""
    return lambda alone: {"hidden_states": tokens()} | more


def crossed(memory: str = "key_value_states", **more: Any) -> Callable[[Alone], dict[str, Any]]:
    """Hidden states, another sequence and a mask over it."""
    return lambda alone: (
        {
            "hidden_states": tokens(),
            memory: tokens(LENGTH + 2, seed=1),
            "attention_mask": mask(alone, keys=LENGTH + 2),
        }
        | {name: value() for name, value in more.items()}
    )


def apart(query: str, key: str, value: str, masked: bool = True) -> Callable[[Alone], dict[str, Any]]:
    """Queries, keys and values from three sequences."""

    def call(alone: Alone) -> dict[str, Any]:
        given = {query: tokens(), key: tokens(LENGTH + 2, seed=1), value: tokens(LENGTH + 2, seed=2)}
        return given | ({"attention_mask": mask(alone, keys=LENGTH + 2)} if masked else {})

    return call


def points(alone: Alone) -> dict[str, Any]:
    """Two sets of points to an image."""
    return {name: numbers(BATCH, 2, length, 32, seed=length) for name, length in (("query", 5), ("key", 9))} | {
        "value": numbers(BATCH, 2, 9, 32, seed=3),
        "attention_similarity": numbers(2 * BATCH, 1, 5, 9, seed=4),
    }


def packed(batched: bool = False, **more: Any) -> Callable[[Alone], dict[str, Any]]:
    """Sequences of 4, 6 and 2 tokens, one after the other."""
    states = numbers(12, 32)
    given = {"hidden_states": states[None] if batched else states, "cu_seqlens": torch.tensor([0, 4, 10, 12])}

    def call(alone: Alone) -> dict[str, Any]:
        if "cu_seqlens" not in inspect.signature(type(alone.attention).forward).parameters:
            raise NotInTransformers(f"transformers {transformers.__version__} packs no sequences there")
        return given | more

    return call


DECODER = {"is_decoder": True, "add_cross_attention": True}
CONVOLUTIONS = {
    "conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "feat_extract_norm": "layer",
}  # fmt: skip
DETECTION = {"hidden_size": 32, "num_attention_heads": 4}
BART_LIKE = {"embed_dim": 32, "num_heads": 4}

CASES = [
    # BERT and its family, as encoders and as decoders with cross-attention.
    model("BertModel", "BertSelfAttention"),
    model("BertModel", "BertSelfAttention BertCrossAttention", **DECODER),
    model("BertGenerationEncoder", "BertGenerationSelfAttention BertGenerationCrossAttention", **DECODER),
    model("CamembertModel", "CamembertSelfAttention CamembertCrossAttention", **DECODER),
    model("Data2VecTextModel", "Data2VecTextSelfAttention Data2VecTextCrossAttention", **DECODER),
    model("ElectraModel", "ElectraSelfAttention"),
    model("ElectraModel", "ElectraSelfAttention ElectraCrossAttention", **DECODER),
    model("ErnieModel", "ErnieSelfAttention ErnieCrossAttention", **DECODER),
    model(
        "RoCBertModel", "RoCBertSelfAttention RoCBertCrossAttention",
        lambda model: inputs_for(model) | {"input_shape_ids": token_ids(), "input_pronunciation_ids": token_ids()},
        pronunciation_embed_dim=8, pronunciation_vocab_size=64, shape_embed_dim=8, shape_vocab_size=64, **DECODER,
    ),
    model("RobertaModel", "RobertaSelfAttention"),
    model("RobertaModel", "RobertaSelfAttention RobertaCrossAttention", **DECODER),
    model(
        "RobertaPreLayerNormModel", "RobertaPreLayerNormSelfAttention RobertaPreLayerNormCrossAttention", **DECODER
    ),
    model("XLMRobertaModel", "XLMRobertaSelfAttention XLMRobertaCrossAttention", **DECODER),
    model("XLMRobertaXLModel", "XLMRobertaXLSelfAttention XLMRobertaXLCrossAttention", **DECODER),
    model("XmodModel", "XmodSelfAttention XmodCrossAttention", default_language="en_XX", **DECODER),
    module("BridgeTowerSelfAttention", "bridgetower", hidden(), config="BridgeTowerTextConfig"),
    module(
        "BridgeTowerCrossAttention", "bridgetower", crossed("encoder_hidden_states"), config="BridgeTowerTextConfig"
    ),
    model("AlignTextModel", "AlignTextSelfAttention", only="eager"),
    model("AltCLIPModel", "AltCLIPAttention AltRobertaSelfAttention"),
    model("ChineseCLIPModel", "ChineseCLIPTextSelfAttention ChineseCLIPVisionAttention"),
    model("ClapTextModel", "ClapTextSelfAttention", only="eager"),
    model("LayoutLMModel", "LayoutLMSelfAttention"),
    model("MarkupLMModel", "MarkupLMSelfAttention", only="eager", max_depth=3, xpath_unit_hidden_size=8),
    model("SplinterModel", "SplinterSelfAttention", only="eager"),
    model("DPTModel", "DPTSelfAttention", pixels()),
    model("VideoMAEModel", "VideoMAESelfAttention", video(), num_frames=2, tubelet_size=2),
    model(
        "VitPoseBackbone", "VitPoseBackboneSelfAttention", pixels(32), image_size=(32, 32), patch_size=(8, 8),
    ),
    model("YolosModel", "YolosSelfAttention", pixels(), image_size=(16, 16), num_detection_tokens=3),
    *[
        module(
            name, folder,
            lambda alone: {
                "hidden_states": tokens(), "encoder_hidden_states": tokens(LENGTH + 2, seed=1),
                "encoder_attention_mask": mask(alone, keys=LENGTH + 2),
            },
            config=config, settings={"encoder_hidden_size": 32}, arguments={"is_cross_attention": True},
        )
        for name, folder, config in [
            ("Blip2QFormerMultiHeadAttention", "blip_2", "Blip2QFormerConfig"),
            ("InstructBlipQFormerMultiHeadAttention", "instructblip", "InstructBlipQFormerConfig"),
            ("InstructBlipVideoQFormerMultiHeadAttention", "instructblipvideo", "InstructBlipVideoQFormerConfig"),
        ]
    ],
    module("Blip2QFormerMultiHeadAttention", "blip_2", hidden(), config="Blip2QFormerConfig"),
    model("MobileBertModel", "MobileBertSelfAttention", intra_bottleneck_size=32, normalization_type="layer_norm"),
    model("EsmModel", "EsmSelfAttention", position_embedding_type="absolute", mask_token_id=3),
    module("EvollaSaProtSelfAttention", "evolla", hidden(), config="SaProtConfig",
           settings={"position_embedding_type": "absolute"}),
    model("DistilBertModel", "DistilBertSelfAttention"),
    model("AlbertModel", "AlbertAttention", num_hidden_layers=4, num_hidden_groups=2, inner_group_num=2),
    # Older classes of that family.
    model("BigBirdModel", "BigBirdSelfAttention", attention_type="original_full", only="eager",
          use_cache=False, **DECODER),
    model(
        "BigBirdPegasusModel", "BigBirdPegasusSelfAttention BigBirdPegasusDecoderAttention",
        only="eager", attention_type="original_full",
    ),
    model("BlipTextModel", "BlipTextSelfAttention",
          text(encoder_hidden_states=tokens(5, seed=1), encoder_attention_mask=padding_mask(5)), only="eager",
          encoder_hidden_size=32),
    model("GitModel", "GitSelfAttention GitVisionAttention", only="eager"),
    model("MegatronBertModel", "MegatronBertSelfAttention", only="eager"),
    model("RemBertModel", "RemBertSelfAttention", only="eager", input_embedding_size=16, **DECODER),
    model("FlavaModel", "FlavaSelfAttention",
          lambda model: text()(model) | pixels()(model), only="eager"),
    model(
        "ViltModel", "ViltSelfAttention",
        lambda model: text()(model) | pixels(pixel_mask=torch.ones(BATCH, 16, 16))(model), only="eager",
    ),
    model("VisualBertModel", "VisualBertSelfAttention", only="eager", visual_embedding_dim=16),
    module("MobileViTSelfAttention", "mobilevit", without_mask(), config="MobileViTConfig",
           arguments={"hidden_size": 32}, only="eager"),
    model(
        "LxmertModel", "LxmertAttention",
        lambda model: text(visual_feats=tokens(5, 16), visual_pos=numbers(BATCH, 5, 4))(model), only="eager",
        visual_feat_dim=16, l_layers=1, x_layers=1, r_layers=1,
    ),
    module("TvpAttention", "tvp", hidden(), config="TvpConfig", only="eager"),
    *[
        module(name, folder, apart("queries", "keys", "values"), config=config, arguments=arguments, only="eager")
        for name, folder, config, arguments in [
            ("GroundingDinoMultiheadAttention", "grounding_dino", "GroundingDinoConfig", {"num_attention_heads": 4}),
            ("MMGroundingDinoMultiheadAttention", "mm_grounding_dino", "MMGroundingDinoConfig",
             {"num_attention_heads": 4}),
            ("OmDetTurboMultiheadAttention", "omdet_turbo", "OmDetTurboConfig", {**DETECTION, "dropout": 0.0}),
            ("ZoeDepthMultiheadAttention", "zoedepth", None, {**DETECTION, "dropout": 0.0}),
        ]
    ],
    model("MPNetModel", "MPNetSelfAttention", only="eager"),
    model("TapasModel", "TapasSelfAttention", only="eager"),
    module("SuperGlueSelfAttention", "superglue", hidden(), config="SuperGlueConfig", only="eager"),
    model(
        "CanineModel", "CanineSelfAttention", only="eager",
        downsampling_rate=2, num_hash_buckets=64, local_transformer_stride=4, upsampling_kernel_size=3,
    ),
    module(
        "PerceiverSelfAttention", "perceiver",
        lambda alone: {"hidden_states": tokens(5), "inputs": tokens(), "inputs_mask": mask(alone, 5)},
        config="PerceiverConfig", only="eager",
        arguments={"is_cross_attention": True, "qk_channels": 16, "v_channels": 32, "num_heads": 4, "q_dim": 32,
                   "kv_dim": 32},
    ),
    model(
        "Data2VecVisionModel", "Data2VecVisionSelfAttention", use_relative_position_bias=True, only="eager",
    ),
    model(
        "Data2VecVisionModel", "Data2VecVisionSdpaSelfAttention", use_shared_relative_position_bias=True, only="sdpa",
    ),
    module(
        "LayoutLMv2SelfAttention", "layoutlmv2",
        lambda alone: hidden(rel_pos=numbers(BATCH, 4, LENGTH, LENGTH), rel_2d_pos=numbers(BATCH, 4, LENGTH, LENGTH,
                                                                                            seed=1))(alone),
        config="LayoutLMv2Config", settings={"fast_qkv": False}, only="eager",
    ),
    model(
        "LayoutLMv3Model", "LayoutLMv3SelfAttention", only="eager",
        input_size=16, coordinate_size=5, shape_size=6, max_2d_position_embeddings=32,
    ),
    module(
        "PPDocLayoutV2ReadingOrderSelfAttention", "pp_doclayout_v2",
        hidden(rel_2d_pos=numbers(BATCH, 4, LENGTH, LENGTH)), config="PPDocLayoutV2ReadingOrderConfig",
        only="eager",
    ),
    *[
        model(name, attention, pixels(), only="eager", weights=whole, bf16=whole, image_size=16, patch_size=2,
              embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)
        for name, attention, whole in [
            ("DonutSwinModel", "DonutSwinSelfAttention", True),
            ("MaskFormerSwinModel", "MaskFormerSwinSelfAttention", False),
        ]
    ],
    model(
        "SwinModel", "SwinAttention", pixels(),
        image_size=16, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4,
    ),
    model(
        "ClapAudioModel", "ClapAudioSelfAttention",
        lambda model: {"input_features": numbers(2, 1, 60, 16)}, only="eager",
        spec_size=64, num_mel_bins=16, patch_size=4, patch_stride=[4, 4], window_size=4, depths=[2, 2],
        num_attention_heads=[2, 4], patch_embeds_hidden_size=16, hidden_size=32,
    ),
    # Keys of a smaller image.
    *[
        model(name, attention, pixels(32), only=only, num_encoder_blocks=2, depths=[2, 2],
              num_attention_heads=[2, 4], hidden_sizes=[16, 32], mlp_ratios=[2, 2], strides=[4, 2],
              **more)
        for name, attention, only, more in [
            ("GLPNModel", "GLPNEfficientSelfAttention", "eager", {"sr_ratios": [2, 1], "patch_sizes": [7, 3]}),
            ("SegformerModel", "SegformerAttention", None, {"sr_ratios": [2, 1], "patch_sizes": [7, 3]}),
            ("PvtModel", "PvtEfficientSelfAttention", "eager",
             {"sequence_reduction_ratios": [2, 1], "patch_sizes": [4, 2], "image_size": 32}),
            ("PvtV2Model", "PvtV2SelfAttention", "eager",
             {"sr_ratios": [2, 1], "patch_sizes": [7, 3], "image_size": 32}),
        ]
    ],
    # Vision transformers.
    model("ASTModel", "ASTAttention", lambda model: {"input_values": numbers(BATCH, 40, 16)}, max_length=40),
    model("BeitModel", "BeitAttention", use_relative_position_bias=True),
    model("BeitModel", "BeitAttention", use_shared_relative_position_bias=True),
    model("DeiTModel", "DeiTAttention"),
    model("Dinov2Model", "Dinov2Attention|Dinov2SelfAttention"),
    model("Dinov2WithRegistersModel", "Dinov2WithRegistersAttention|Dinov2WithRegistersSelfAttention"),
    model("IJepaModel", "IJepaAttention"),
    module("LwDetrViTAttention", "lw_detr", without_mask(), config="LwDetrViTConfig",
           settings={"window_block_indices": [0], "image_size": 64}),
    model("PixioModel", "PixioAttention"),
    model("RfDetrDinov2Backbone", "RfDetrDinov2Attention|RfDetrDinov2SelfAttention"),
    model(
        "Tipsv2Model", "Tipsv2TextAttention Tipsv2VisionAttention|Tipsv2VisionSelfAttention", bf16=False,
    ),
    model("ViTModel", "ViTAttention"),
    model("ViTMAEModel", "ViTMAEAttention", lambda model: pixels(noise=numbers(BATCH, 16))(model)),
    model("ViTMSNModel", "ViTMSNAttention"),
    model("VivitModel", "VivitAttention", video(), num_frames=2, tubelet_size=[2, 4, 4]),
    module("MoonshineStreamingEncoderAttention", "moonshine_streaming", hidden(),
           config="MoonshineStreamingEncoderConfig", arguments={"layer_idx": 0}),
    module("RadioAttention", "radio", packed(batched=True), config="RadioConfig"),
    model("RadioModel", "RadioAttention|RadioSelfAttention", pixels(), max_img_size=16),
    model("CLIPModel", "CLIPAttention"),
    model("CLIPSegModel", "CLIPSegAttention"),
    model("MetaClip2Model", "MetaClip2Attention"),
    model("Owlv2Model", "Owlv2Attention"),
    model("OwlViTModel", "OwlViTAttention"),
    module("UnlimitedOcrAttention", "unlimited_ocr", hidden(), config="CLIPVisionConfig"),
    model("XCLIPTextModel", "XCLIPAttention"),
    model("Aimv2Model", "Aimv2Attention"),
    module("Emu3VQVAEAttentionBlock", "emu3", without_mask(), config="SiglipVisionConfig"),
    module("EomtAttention", "eomt", hidden(), config="EomtConfig"),
    module("Idefics2VisionAttention", "idefics2", hidden(), config="SiglipVisionConfig"),
    module("Idefics3VisionAttention", "idefics3", hidden(), config="SiglipVisionConfig"),
    model(
        "Kosmos2Model", "Kosmos2VisionAttention KosmosTextAttention",
        lambda model: text(image_embeds_position_mask=torch.zeros(BATCH, LENGTH, dtype=torch.long).index_fill(
            1, torch.tensor([1, 2]), 1))(model) | pixels()(model),
        latent_query_num=2,
    ),
    module("Ovis2VisionAttention", "ovis2", hidden(), config="Ovis2VisionConfig"),
    module("Sam3LiteTextTextAttention", "sam3_lite_text", hidden(), config="SiglipTextConfig"),
    model("Siglip2TextModel", "Siglip2Attention"),
    model("SiglipModel", "SiglipAttention MultiheadAttention"),
    module("SmolVLMVisionAttention", "smolvlm", hidden(), config="SiglipVisionConfig"),
    module("VideomtAttention", "videomt", hidden(), config="SiglipVisionConfig"),
    module("VJEPA2PoolerSelfAttention", "vjepa2", without_mask(), config="VJEPA2Config"),
    module("VJEPA2PoolerCrossAttention", "vjepa2", apart("queries", "keys", "values", masked=False),
           config="VJEPA2Config"),
    module("XCLIPCrossAttention", "x_clip", apart("queries", "keys", "values", masked=False), config="XCLIPConfig",
           settings={"prompt_num_attention_heads": 4}),
    *[
        module(name, folder, hidden(), config=config, settings={"attention_bias": True})
        for name, folder, config in [
            ("InternVLVisionAttention", "internvl", "InternVLVisionConfig"),
            ("JanusVisionAttention", "janus", "JanusVisionConfig"),
            ("QianfanOCRVisionAttention", "qianfan_ocr", "QianfanOCRVisionConfig"),
        ]
    ],
    model("GroupViTModel", "GroupViTAttention", only="eager",
          vision_config={"depths": [1, 1, 1], "num_group_tokens": [4, 2, 0], "num_output_groups": [4, 2, 0]}),
    module("Phi4MultimodalVisionAttention", "phi4_multimodal", hidden(), config="Phi4MultimodalVisionConfig"),
    module("MllamaVisionAttention", "mllama", hidden(), config="MllamaVisionConfig", settings={"attention_heads": 4}),
    module("Molmo2VisionAttention", "molmo2", crossed("encoder_hidden_states"), config="Molmo2AdapterConfig"),
    module("Kosmos2_5VisionAttention", "kosmos2_5",
           without_mask(attention_mask=numbers(BATCH, 1, LENGTH, LENGTH)), config="Kosmos2_5VisionConfig"),
    module("Kosmos2_5TextAttention", "kosmos2_5", hidden(), config="Kosmos2_5TextConfig", arguments=BART_LIKE),
    module("Pix2StructVisionAttention", "pix2struct", hidden(), config="Pix2StructVisionConfig"),
    model("Blip2VisionModel", "Blip2Attention", pixels()),
    model("InstructBlipVisionModel", "InstructBlipAttention", pixels()),
    model("InstructBlipVideoVisionModel", "InstructBlipVideoAttention", pixels()),
    *[
        module(name, folder, without_mask(), config="SiglipVisionConfig", settings={"qkv_bias": True})
        for name, folder in [
            ("PPOCRV5MobileRecAttention", "pp_ocrv5_mobile_rec"),
            ("PPOCRV5ServerRecAttention", "pp_ocrv5_server_rec"),
            ("PPOCRV6SmallRecAttention", "pp_ocrv6_small_rec"),
        ]
    ],
    model("BlipVisionModel", "BlipAttention", pixels(), only="eager"),
    model("MgpstrModel", "MgpstrAttention", pixels(), only="eager", image_size=[16, 16]),
    model("TimesformerModel", "TimesformerSelfAttention", video(), only="eager", num_frames=2),
    module("OneFormerTextMapperAttention", "oneformer", lambda alone: {
        "q": tokens(), "k": tokens(9, seed=1), "v": tokens(9, seed=2)}, only="eager",
        arguments={"dim": 32, "num_heads": 4, "qkv_bias": True}),
    model(
        "CvtModel", "CvtSelfAttention", pixels(32), only="eager",
        patch_sizes=[7, 3], patch_stride=[4, 2], patch_padding=[2, 1], embed_dim=[16, 32], num_heads=[2, 4],
        depth=[1, 2], mlp_ratio=[2.0, 2.0], attention_drop_rate=[0.0, 0.0], drop_rate=[0.0, 0.0],
        drop_path_rate=[0.0, 0.0], qkv_bias=[True, True], cls_token=[False, True],
        qkv_projection_method=["dw_bn", "dw_bn"], kernel_qkv=[3, 3], padding_kv=[1, 1], stride_kv=[2, 2],
        padding_q=[1, 1], stride_q=[1, 1],
    ),
    # Points and masks.
    *[
        module(name, folder, points, config=config, settings={"attention_downsample_rate": 2})
        for name, folder, config in [
            ("EdgeTamAttention", "edgetam", "EdgeTamMaskDecoderConfig"),
            ("EdgeTamVideoAttention", "edgetam_video", "EdgeTamVideoMaskDecoderConfig"),
            ("Sam2Attention", "sam2", "Sam2MaskDecoderConfig"),
            ("Sam2VideoAttention", "sam2_video", "Sam2VideoMaskDecoderConfig"),
            ("Sam3TrackerAttention", "sam3_tracker", "Sam3TrackerMaskDecoderConfig"),
            ("Sam3TrackerVideoAttention", "sam3_tracker_video", "Sam3TrackerVideoMaskDecoderConfig"),
            ("SamAttention", "sam", "SamMaskDecoderConfig"),
            ("SamHQAttention", "sam_hq", "SamHQMaskDecoderConfig"),
        ]
    ],
    module("Sam3Attention", "sam3", apart("query", "key", "value"), config="Sam3DETRDecoderConfig"),
    module("Sam3LiteTextAttention", "sam3_lite_text", apart("query", "key", "value"),
           config="Sam3LiteTextDETRDecoderConfig"),
    # Detection.
    *[
        module(name, folder, hidden(position_embeddings=tokens(seed=5)), config="DetrConfig", arguments=DETECTION)
        for name, folder in [
            ("ConditionalDetrSelfAttention", "conditional_detr"), ("DFineSelfAttention", "d_fine"),
            ("DeformableDetrSelfAttention", "deformable_detr"), ("Deimv2SelfAttention", "deimv2"),
            ("DetrSelfAttention", "detr"), ("MaskFormerDetrSelfAttention", "maskformer"),
            ("PPDocLayoutV2SelfAttention", "pp_doclayout_v2"), ("PPDocLayoutV3SelfAttention", "pp_doclayout_v3"),
            ("PPDocLayoutV4SelfAttention", "pp_doclayout_v4"), ("RTDetrSelfAttention", "rt_detr"),
            ("RTDetrV2SelfAttention", "rt_detr_v2"),
        ]
    ],
    *[
        module(
            name, folder,
            crossed(position_embeddings=lambda: tokens(seed=5), encoder_position_embeddings=lambda: tokens(9, seed=6)),
            config="DetrConfig", arguments=DETECTION,
        )
        for name, folder in [("DetrCrossAttention", "detr"), ("MaskFormerDetrCrossAttention", "maskformer")]
    ],
    module("DetrAttention", "dab_detr", hidden(object_queries=tokens(seed=5)), config="DabDetrConfig",
           only="eager"),
    module(
        "TableTransformerAttention", "table_transformer",
        crossed(object_queries=lambda: tokens(seed=5), spatial_position_embeddings=lambda: tokens(9, seed=6)),
        arguments=BART_LIKE, only="eager",
    ),
    *[
        module(
            name, folder,
            lambda alone: {
                "hidden_states": numbers(LENGTH, BATCH, 32), "position_embeddings": numbers(LENGTH, BATCH, 32, seed=1),
                "attention_mask": mask(alone).repeat_interleave(4, 0)[:, 0],
            },
            arguments=BART_LIKE, only="eager",
        )
        for name, folder in [("Mask2FormerAttention", "mask2former"), ("OneFormerAttention", "oneformer")]
    ],
    *[
        module(name, folder, without_mask(hidden_states=tokens(8), position_embeddings=tokens(8, seed=5)),
               config=config, settings={"decoder_self_attention_heads": 4, "group_detr": 2},
               arguments={"layer_idx": 0})
        for name, folder, config in [
            ("LwDetrAttention", "lw_detr", "LwDetrConfig"), ("RfDetrAttention", "rf_detr", "RfDetrConfig"),
        ]
    ],
    # BART and its family, decoders and speech.
    module("AudioFlamingo3Attention", "audioflamingo3", hidden(), config="WhisperConfig", arguments=BART_LIKE),
    model("BartModel", "BartAttention"),
    model("BioGptModel", "BioGptAttention"),
    model("BlenderbotModel", "BlenderbotAttention"),
    model("BlenderbotSmallModel", "BlenderbotSmallAttention"),
    module("InformerAttention", "informer", crossed(), config="InformerConfig",
           settings={"prediction_length": 2}, arguments=BART_LIKE),
    model("M2M100Model", "M2M100Attention"),
    model("MBartModel", "MBartAttention"),
    model("MarianModel", "MarianAttention"),
    module("MusicgenAttention", "musicgen", crossed(), config="MusicgenDecoderConfig", arguments=BART_LIKE),
    module("MusicgenMelodyAttention", "musicgen_melody", hidden(), config="MusicgenMelodyDecoderConfig",
           arguments=BART_LIKE),
    model("NllbMoeModel", "NllbMoeAttention", only="eager"),
    model("PLBartModel", "PLBartAttention"),
    module("PPFormulaNetAttention", "pp_formulanet", crossed(), config="MBartConfig", arguments=BART_LIKE),
    model("PegasusModel", "PegasusAttention"),
    model("PegasusXModel", "PegasusXAttention", only="eager"),
    module("Speech2TextAttention", "speech_to_text", crossed(), config="Speech2TextConfig", arguments=BART_LIKE),
    module("TimeSeriesTransformerAttention", "time_series_transformer", crossed(),
           config="TimeSeriesTransformerConfig", settings={"prediction_length": 2}, arguments=BART_LIKE),
    model("WhisperModel", "WhisperAttention"),
    *[
        model(name, attention, sound, **CONVOLUTIONS)
        for name, attention in [
            ("Data2VecAudioModel", "Data2VecAudioAttention"), ("HubertModel", "HubertAttention"),
            ("SEWModel", "SEWAttention"), ("UniSpeechModel", "UniSpeechAttention"),
            ("UniSpeechSatModel", "UniSpeechSatAttention"), ("Wav2Vec2Model", "Wav2Vec2Attention"),
        ]
    ],
    module("PatchTSMixerAttention", "patchtsmixer", hidden(), config="PatchTSMixerConfig", arguments=BART_LIKE),
    module("PatchTSTAttention", "patchtst", hidden(), config="PatchTSTConfig", arguments=BART_LIKE),
    model("MossTranscribeDiarizeAudioModel", "MossTranscribeDiarizeAudioAttention"),
    model("OPTModel", "OPTAttention"),
    model("Qwen2AudioEncoder", "Qwen2AudioAttention"),
    model("VoxtralEncoder", "VoxtralAttention"),
    model("SeamlessM4TForTextToText", "SeamlessM4TAttention"),
    model("SeamlessM4Tv2ForTextToText", "SeamlessM4Tv2Attention"),
    model("TrOCRForCausalLM", "TrOCRAttention",
          text(encoder_hidden_states=tokens(5, seed=1), encoder_attention_mask=padding_mask(5)), only="eager",
          cross_attention_hidden_size=32),
    model("XGLMModel", "XGLMAttention", only="eager", attention_heads=4),
    model("LEDModel", "LEDDecoderAttention", only="eager", max_encoder_position_embeddings=64,
          max_decoder_position_embeddings=40, attention_window=4),
    model("MvpModel", "MvpAttention", only="eager"),
    model("FSMTModel", "fsmt.Attention", only="eager", src_vocab_size=64, tgt_vocab_size=64, use_cache=False),
    module("CanarySelfAttention", "canary", hidden(), config="CanaryDecoderConfig", arguments={"layer_idx": 0}),
    module("CanaryCrossAttention", "canary", crossed("encoder_hidden_states"), config="CanaryDecoderConfig",
           arguments={"layer_idx": 0}),
    module("CohereAsrSelfAttention", "cohere_asr", hidden(), config="CohereAsrConfig", arguments={"layer_idx": 0}),
    module("CohereAsrCrossAttention", "cohere_asr", crossed("encoder_hidden_states"), config="CohereAsrConfig",
           arguments={"layer_idx": 0}),
    module("JambaAttention", "jamba", hidden(), config="JambaConfig", arguments={"layer_idx": 0}),
    module("NemotronHAttention", "nemotron_h", hidden(), config="NemotronHConfig", arguments={"layer_idx": 0}),
    module("ZambaAttention", "zamba", lambda alone: {"hidden_states": tokens(width=64), "attention_mask": mask(alone),
                                                     "layer_idx": 0},
           config="ZambaConfig", settings={"layer_types": ["hybrid", "hybrid"]}, arguments={"layer_idx": 0}),
    module("DiaCrossAttention", "dia", crossed("cross_attention_states"), config="DiaDecoderConfig",
           settings={"cross_hidden_size": 32, "cross_num_attention_heads": 4, "cross_num_key_value_heads": 4,
                     "cross_head_dim": 8}, arguments={"layer_idx": 0}),
    module("Phi4MultimodalAudioAttention", "phi4_multimodal", hidden(), config="Phi4MultimodalAudioConfig"),
    module("Idefics2PerceiverAttention", "idefics2",
           lambda alone: {"latents": tokens(3), "context": tokens(4, seed=1), "attention_mask": mask(alone, 3)},
           config="Idefics2PerceiverConfig", settings={"resampler_n_heads": 4, "resampler_head_dim": 8}),
    module("EsmFold2DiffusionAttention", "esmfold2",
           lambda alone: {"hidden_states": tokens(), "attention_bias": numbers(BATCH, 4, LENGTH, LENGTH)},
           config="BertConfig", arguments=lambda config: {"config": config, "diffusion_config": tiny_config(
               transformers.ViTConfig, head_dim=8)}),
    module("EsmFoldSelfAttention", "esm/esmfold",
           lambda alone: {"x": tokens(), "mask": padding_mask(), "bias": numbers(BATCH, LENGTH, LENGTH, 4)},
           arguments={"embed_dim": 32, "num_heads": 4, "head_width": 8, "gated": True}, only="eager"),
    module("EvollaSequenceCompressorAttention", "evolla",
           lambda alone: {"x": tokens(), "latents": tokens(3, seed=1), "mask": padding_mask(LENGTH + 3)},
           arguments={"dim": 32, "dim_head": 8, "heads": 4}, only="eager"),
    module("FunAsrNanoAttention", "fun_asr_nano",
           lambda alone: hidden(input_features_mask=padding_mask())(alone), config="FunAsrNanoEncoderConfig",
           arguments={"use_fsmn": True}),
    # Packed sequences.
    module("Qwen2_5OmniAudioAttention", "qwen2_5_omni", packed(), config="Qwen2_5OmniAudioEncoderConfig"),
    module("Qwen3ASRAudioAttention", "qwen3_asr", packed(), config="WhisperConfig"),
    module("Qwen3OmniMoeAudioAttention", "qwen3_omni_moe", packed(), config="Qwen3OmniMoeAudioEncoderConfig"),
    module("Cosmos3EdgeVisionAttention", "cosmos3_edge", packed(), config="SiglipVisionConfig"),
    module("GlmImageVisionAttention", "glm_image", packed(), config="GlmImageVisionConfig"),
    module("HunYuanVLVisionAttention", "hunyuan_vl", packed(batched=True, attention_mask=None),
           config="SiglipVisionConfig", settings={"attention_heads": 4}),
    *[
        module(name, folder, packed(batched=True, max_seqlen=6), config="SiglipVisionConfig")
        for name, folder in [
            ("MiniCPMOcrVisionAttention", "minicpm_ocr"), ("MiniCPMV4_6VisionAttention", "minicpmv4_6"),
            ("MiniCPMV4_7VisionAttention", "minicpmv4_7"),
        ]
    ],
    # GPT-2 and its family.
    model("GPT2Model", "GPT2Attention"),
    model("GPT2Model", "GPT2Attention", add_cross_attention=True, scale_attn_by_inverse_layer_idx=True),
    model("DecisionTransformerGPT2Model", "DecisionTransformerGPT2Attention", add_cross_attention=True),
    model("ImageGPTModel", "ImageGPTAttention", text(encoder_hidden_states=tokens(seed=1)), only="eager",
          use_cache=False, add_cross_attention=True, scale_attn_by_inverse_layer_idx=True),
    model("GPTBigCodeModel", "GPTBigCodeAttention", multi_query=False),
    model("GPTNeoModel", "GPTNeoSelfAttention", only="eager", attention_types=[[["global", "local"], 1]],
          window_size=3),
    model("BarkCausalModel", "BarkSelfAttention", text(), only="eager", input_vocab_size=64, output_vocab_size=64,
          block_size=16),
    model("OpenAIGPTModel", "openai.Attention", only="eager"),
    model("CTRLModel", "ctrl.MultiHeadAttention"),
    model("FlaubertModel", "flaubert.MultiHeadAttention", only="eager", emb_dim=32),
    model("XLMModel", "xlm.MultiHeadAttention", only="eager", emb_dim=32),
    # Distance as an addend.
    model("BloomModel", "BloomAttention", only="eager"),
    model("MptModel", "MptAttention", only="eager"),
    model("CpmAntModel", "CpmAntAttention", lambda model: {"input_ids": token_ids() * padding_mask().flip(1)},
          only="eager",
          dim_head=8, dim_ff=36, prompt_types=4, prompt_length=2, segment_types=4),
    model("LongT5Model", "LongT5Attention", only="eager"),
    model("MT5Model", "MT5Attention"),
    model("Pop2PianoForConditionalGeneration", "Pop2PianoAttention"),
    model("SwitchTransformersModel", "SwitchTransformersAttention", only="eager"),
    model("T5Model", "T5Attention"),
    module("UdopAttention", "udop", lambda alone: {"hidden_states": tokens(), "mask": mask(alone)},
           config="UdopConfig", arguments={"has_relative_attention_bias": True}),
    module("Pix2StructTextAttention", "pix2struct", lambda alone: {"hidden_states": tokens(), "mask": mask(alone)},
           config="Pix2StructTextConfig", settings={"hidden_size": 32, "d_kv": 8},
           arguments={"has_relative_attention_bias": True, "layer_idx": 0}),
    model("UMT5Model", "UMT5Attention"),
]  # fmt: skip
