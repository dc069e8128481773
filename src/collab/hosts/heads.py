"""Which numbers of an ordinary attention module are which head's: to weigh heads, to empty them, to cut them out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from collab.hosts import Host, replace_parameter_
from collab.hosts.linear import Block, LinearHost, is_plain

CAN_BE_CUT = frozenset({
    "ASTAttention", "Aimv2Attention", "AlbertAttention", "AlignTextSelfAttention", "AltCLIPAttention",
    "AltRobertaSelfAttention", "AudioFlamingo3Attention", "BartAttention", "BertCrossAttention",
    "BertGenerationCrossAttention", "BertGenerationSelfAttention", "BertSelfAttention",
    "BigBirdPegasusDecoderAttention", "BigBirdSelfAttention", "BioGptAttention", "BlenderbotAttention",
    "BlenderbotSmallAttention", "BlipTextSelfAttention", "CLIPAttention", "CLIPSegAttention",
    "CamembertCrossAttention", "CamembertSelfAttention", "CanaryCrossAttention", "CanarySelfAttention",
    "CanineSelfAttention", "ChineseCLIPTextSelfAttention", "ChineseCLIPVisionAttention", "ClapTextSelfAttention",
    "CohereAsrCrossAttention", "CohereAsrSelfAttention", "ConditionalDetrSelfAttention",
    "Cosmos3EdgeVisionAttention", "DFineSelfAttention", "DPTSelfAttention", "Data2VecAudioAttention",
    "Data2VecTextCrossAttention", "Data2VecTextSelfAttention", "DecisionTransformerGPT2Attention",
    "DeformableDetrSelfAttention", "DeiTAttention", "Deimv2SelfAttention", "DetrCrossAttention",
    "DetrSelfAttention", "DiaCrossAttention", "Dinov2Attention", "Dinov2WithRegistersAttention",
    "DistilBertSelfAttention", "EdgeTamAttention", "EdgeTamVideoAttention", "ElectraCrossAttention",
    "ElectraSelfAttention", "Emu3VQVAEAttentionBlock", "EomtAttention", "ErnieCrossAttention",
    "ErnieSelfAttention", "EsmSelfAttention", "FlavaSelfAttention", "GLPNEfficientSelfAttention", "GPT2Attention",
    "GPTBigCodeAttention", "GPTNeoSelfAttention", "GitSelfAttention", "GitVisionAttention",
    "GlmImageVisionAttention", "GroundingDinoMultiheadAttention", "HubertAttention", "HunYuanVLVisionAttention",
    "IJepaAttention", "Idefics2PerceiverAttention", "Idefics2VisionAttention", "Idefics3VisionAttention",
    "ImageGPTAttention", "InformerAttention", "JambaAttention", "Kosmos2VisionAttention",
    "Kosmos2_5TextAttention", "Kosmos2_5VisionAttention", "LayoutLMSelfAttention", "LwDetrAttention",
    "LwDetrViTAttention", "M2M100Attention", "MBartAttention", "MMGroundingDinoMultiheadAttention",
    "MarianAttention", "MarkupLMSelfAttention", "MaskFormerDetrCrossAttention", "MaskFormerDetrSelfAttention",
    "MegatronBertSelfAttention", "MetaClip2Attention", "MiniCPMOcrVisionAttention", "MiniCPMV4_6VisionAttention",
    "MiniCPMV4_7VisionAttention", "MllamaVisionAttention", "MobileBertSelfAttention", "Molmo2VisionAttention",
    "MoonshineStreamingEncoderAttention", "MossTranscribeDiarizeAudioAttention", "MusicgenAttention",
    "MusicgenMelodyAttention", "NemotronHAttention", "NllbMoeAttention", "OPTAttention",
    "OmDetTurboMultiheadAttention", "Ovis2VisionAttention", "OwlViTAttention", "Owlv2Attention",
    "PLBartAttention", "PPDocLayoutV2SelfAttention", "PPDocLayoutV3SelfAttention", "PPDocLayoutV4SelfAttention",
    "PPFormulaNetAttention", "PatchTSMixerAttention", "PatchTSTAttention", "PegasusAttention",
    "PegasusXAttention", "Phi4MultimodalAudioAttention", "Phi4MultimodalVisionAttention",
    "Pix2StructVisionAttention", "PixioAttention", "PvtEfficientSelfAttention", "Qwen2AudioAttention",
    "Qwen2_5OmniAudioAttention", "Qwen3ASRAudioAttention", "Qwen3OmniMoeAudioAttention", "RTDetrSelfAttention",
    "RTDetrV2SelfAttention", "RadioAttention", "RemBertSelfAttention", "RfDetrAttention", "RfDetrDinov2Attention",
    "RoCBertCrossAttention", "RoCBertSelfAttention", "RobertaCrossAttention", "RobertaPreLayerNormCrossAttention",
    "RobertaPreLayerNormSelfAttention", "RobertaSelfAttention", "SEWAttention", "Sam2Attention",
    "Sam2VideoAttention", "Sam3Attention", "Sam3LiteTextAttention", "Sam3LiteTextTextAttention",
    "Sam3TrackerAttention", "Sam3TrackerVideoAttention", "SeamlessM4TAttention", "SeamlessM4Tv2Attention",
    "SegformerAttention", "Siglip2Attention", "SiglipAttention", "SmolVLMVisionAttention", "Speech2TextAttention",
    "SplinterSelfAttention", "TapasSelfAttention", "TimeSeriesTransformerAttention", "Tipsv2TextAttention",
    "Tipsv2VisionAttention", "TvpAttention", "UniSpeechAttention", "UniSpeechSatAttention",
    "UnlimitedOcrAttention", "VJEPA2PoolerSelfAttention", "ViTAttention", "ViTMAEAttention", "ViTMSNAttention",
    "VideoMAESelfAttention", "VideomtAttention", "ViltSelfAttention", "VisualBertSelfAttention",
    "VitPoseBackboneSelfAttention", "VivitAttention", "VoxtralAttention", "Wav2Vec2Attention", "WhisperAttention",
    "XCLIPAttention", "XCLIPCrossAttention", "XLMRobertaCrossAttention", "XLMRobertaSelfAttention",
    "XLMRobertaXLCrossAttention", "XLMRobertaXLSelfAttention", "XmodCrossAttention", "XmodSelfAttention",
    "YolosSelfAttention", "ZambaAttention", "ZoeDepthMultiheadAttention", "ctrl.MultiHeadAttention",
    "flaubert.MultiHeadAttention", "openai.Attention", "xlm.MultiHeadAttention",
})  # fmt: skip
"""Hosts whose forward counts the heads it finds, so that a module may have fewer. To all others heads stay, emptied."""

_NUMBERS_OF_HEADS = ("num_heads", "num_attention_heads", "num_key_value_heads", "n_heads", "n_head")
_FULL_SIZES = ("all_head_size", "all_head_dim", "split_size", "inner_dim", "attn_dim")


@dataclass(frozen=True)
class HeadPart:
    """What of one parameter belongs to the heads.

    Attributes:
        owner: the module whose parameter it is.
        name: of the parameter in it.
        dim: the dimension along which heads lie.
        indices: (head, k) where along it each head's numbers are.
    """

    owner: nn.Module
    name: str
    dim: int
    indices: Tensor

    @property
    def parameter(self) -> nn.Parameter:
        """The whole parameter."""
        parameter: nn.Parameter = self.owner._parameters[self.name]  # type: ignore[assignment]
        return parameter

    @property
    def numbers_per_head(self) -> int:
        """How many numbers one head has in it."""
        return self.indices.shape[1] * self.parameter.numel() // self.parameter.shape[self.dim]

    def of_heads(self, values: Tensor) -> Tensor:
        """(head, number): what of a tensor of the parameter's shape is each head's."""
        rows = values.movedim(self.dim, 0)[self.indices.to(values.device).flatten()]
        return rows.reshape(len(self.indices), -1)


HeadParts = Mapping[str, Sequence[HeadPart]]
"""Role ("query", "key", "value", "out") -> what its projection has of the heads."""


def output_projection(model: nn.Module, host: Host | None, path: str) -> nn.Module | None:
    """The layer that projects the concatenated heads, in the attention module or, as in BERT, beside it."""
    module = model.get_submodule(path)
    name = host.out if isinstance(host, LinearHost) else "out_proj"
    if name is not None:
        return getattr(module, name, None)
    if path and isinstance(host, LinearHost) and host.query == "query":
        beside = getattr(model.get_submodule(path.rpartition(".")[0]), "output", None)
        dense = getattr(beside, "dense", None)
        return dense if isinstance(dense, nn.Module) else None
    return None


def head_parts(host: Host, module: nn.Module, output: nn.Module) -> dict[str, list[HeadPart]]:
    """What the parameters of an ordinary attention module and of its output projection have of its heads."""
    num_heads = host.sizes(module)["num_heads"]
    if isinstance(host, LinearHost):
        parts = _linear_parts(host, module, num_heads)
    else:
        parts = _multihead_parts(module, num_heads)
    is_transposed = type(output).__name__ == "Conv1D"
    width = parts["value"][0].indices.numel()
    indices = _places(width).view(num_heads, -1)
    return parts | {"out": [HeadPart(output, "weight", 0 if is_transposed else 1, indices)]}


def why_not_prune(host: Host, module: Any, output: nn.Module | None) -> list[str]:
    """Reasons why heads of a module that could be swapped cannot be taken away."""
    if output is None:
        return ["where its heads are projected to the output is not known"]
    if isinstance(host, LinearHost) and not is_plain(output):
        return [f"its output projection is a {type(output).__name__}, not a plain linear layer"]
    if host.name == "FunAsrNanoAttention":
        return ["its values are read by a memory block too"]
    between = getattr(module, "norm", None)
    if type(module).__module__ == "timm.layers.attention" and not isinstance(between, nn.Identity | None):
        return ["norm normalises all heads together, before the output projection"]
    num_heads, inputs = host.sizes(module)["num_heads"], _inputs(output)
    if isinstance(host, LinearHost):
        values = sum(part.indices.numel() for part in _linear_parts(host, module, num_heads)["value"][:1])
        if values != inputs:
            return [f"its output projection reads {inputs} numbers, not the {values} of its heads"]
    return []


def can_be_cut(host: Host, module: Any) -> bool:
    """Whether the module's forward works with fewer heads than it was made with."""
    if type(module).__module__ == "timm.layers.attention":
        return getattr(module, "gate", None) is None
    return type(module).__module__.startswith("transformers.") and host.name in CAN_BE_CUT


@torch.no_grad()
def empty_heads_(parts: HeadParts, heads: Sequence[int]) -> None:
    """Set values and output of some heads to zero, in place: they give nothing, and nothing can train them back."""
    for part in (*parts["value"], *parts["out"]):
        chosen = part.indices[list(heads)].flatten().to(part.parameter.device)
        part.parameter.index_fill_(part.dim, chosen, 0.0)


@torch.no_grad()
def without_heads(parts: HeadParts, heads: Sequence[int]) -> list[tuple[nn.Module, str, Tensor]]:
    """The parameters without some heads: (owner, name, values) each."""
    dropped: dict[tuple[int, str, int], tuple[HeadPart, list[Tensor]]] = {}
    for part in (one for several in parts.values() for one in several):
        key = (id(part.owner), part.name, part.dim)
        dropped.setdefault(key, (part, []))[1].append(part.indices[list(heads)].flatten())
    result = []
    for part, indices in dropped.values():
        stays = torch.ones(part.parameter.shape[part.dim], dtype=torch.bool, device="cpu")
        stays[torch.cat(indices)] = False
        kept = stays.nonzero().flatten().to(part.parameter.device)
        result.append((part.owner, part.name, part.parameter.index_select(part.dim, kept)))
    return result


def cut_heads_(module: Any, smaller: Sequence[tuple[nn.Module, str, Tensor]], num_heads: int, left: int) -> None:
    """Give an attention module that had `num_heads` the parameters that `without_heads` found, and `left` heads."""
    module._heads_before = heads_before(module) or num_heads
    for owner, name, values in smaller:
        replace_parameter_(owner, name, values)
        if name == "weight":
            _set_sizes(owner, values)
    for names, before in ((_NUMBERS_OF_HEADS, 1), (_FULL_SIZES, None)):
        for name in names:
            number = module.__dict__.get(name)
            if before is not None and number == num_heads:
                setattr(module, name, left)
            elif before is None and isinstance(number, int):
                setattr(module, name, number // num_heads * left)


def heads_before(module: nn.Module) -> int | None:
    """How many heads a module was made with, if some were cut out of it since."""
    number: int | None = module.__dict__.get("_heads_before")
    return number


def cut_to_(model: nn.Module, host: Host, path: str, left: int) -> None:
    """Cut an attention module, made for more, to so many heads whose values are still to come: the first ones stay."""
    module = model.get_submodule(path)
    num_heads = host.sizes(module)["num_heads"]
    output = output_projection(model, host, path)
    reasons = why_not_prune(host, module, output)
    if not 1 <= left <= num_heads:
        reasons = [f"num_heads must be from 1 to the {num_heads} it has, got {left}"]
    elif not reasons and not can_be_cut(host, module):
        reasons = ["its class runs with all its heads only"]
    if reasons or output is None:
        raise ValueError(f"attention at {path} cannot have {left} heads: {'; '.join(reasons)}")
    smaller = without_heads(head_parts(host, module, output), range(left, num_heads))
    cut_heads_(module, smaller, num_heads, left)


def _set_sizes(linear: Any, weight: Tensor) -> None:
    if type(linear).__name__ == "Conv1D":
        linear.nx, linear.nf = weight.shape
    else:
        linear.out_features, linear.in_features = weight.shape


def _places(count: int) -> Tensor:
    """The integers below a number, on the CPU: models are made on the meta device, where nothing can be picked."""
    return torch.arange(count, device="cpu")


def _inputs(linear: Any) -> int:
    rows: int = linear.weight.shape[0 if type(linear).__name__ == "Conv1D" else 1]
    return rows


def _linear_parts(host: LinearHost, module: Any, num_heads: int) -> dict[str, list[HeadPart]]:
    parts: dict[str, list[HeadPart]] = {}
    for role in ("query", "key", "value"):
        place = getattr(host, role)
        block = place if isinstance(place, Block) else Block(place)
        linear = attrgetter(block.name)(module)
        is_transposed = type(linear).__name__ == "Conv1D"
        rows = _places(linear.weight.shape[1 if is_transposed else 0])
        if block.per_head:
            indices = rows.view(num_heads, block.count, -1)[:, block.index]
        else:
            indices = rows.chunk(block.count)[block.index].view(num_heads, -1)
        parts[role] = [HeadPart(linear, "weight", 1 if is_transposed else 0, indices)]
        if linear.bias is not None:
            parts[role].append(HeadPart(linear, "bias", 0, indices))
        beside = {"query": "q_bias", "value": "v_bias"}.get(role, "")
        if module._parameters.get(beside) is not None:
            parts[role].append(HeadPart(module, beside, 0, _places(indices.numel()).view(num_heads, -1)))
    return parts


def _multihead_parts(module: Any, num_heads: int) -> dict[str, list[HeadPart]]:
    parts: dict[str, list[HeadPart]] = {}
    fused = _places(3 * module.embed_dim).view(3, num_heads, -1)
    for index, role in enumerate(("query", "key", "value")):
        if module.in_proj_weight is not None:
            parts[role] = [HeadPart(module, "in_proj_weight", 0, fused[index])]
        else:
            parts[role] = [HeadPart(module, f"{role[0]}_proj_weight", 0, fused[0])]
        if module.in_proj_bias is not None:
            parts[role].append(HeadPart(module, "in_proj_bias", 0, fused[index]))
    return parts
