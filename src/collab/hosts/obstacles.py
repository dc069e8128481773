"""What an attention class does that no host can follow, as far as its source code tells."""

import functools
import inspect
import re
import sys

from torch import nn

_NOT_FIXED = "so a head's product is not one fixed matrix"
ROTARY = f"rotary positions turn queries and keys between their projections, {_NOT_FIXED}"
_OBSTACLES = (
    (r"[Rr]otary|RoPE|Rope|\brope|_rope|apply_rot", ROTARY),
    (
        r"self\.(q|k|qk|query|key)_?(layer_?)?norm|self\.(layer_?)?norm_?(q|k|query|key)\b|self\.(q|k)_(a_)?layernorm"
        r"|normalize\((q|query)",
        f"queries and keys are normalised between their projections, {_NOT_FIXED}",
    ),
    (
        r"kv_lora_rank|q_lora_rank",
        f"queries and keys come through a bottleneck that is normalised between two projections, {_NOT_FIXED}",
    ),
    (
        r"sampling_offsets|sampling_locations",
        "it samples an image at learned offsets: it scores no keys",
    ),
    (
        r"delta_rule|[Ll]ightning|[Rr]ecurrent|rwkv|Rwkv|MobileViTV2|EfficientAdditive|torch\.fft|context_vector\b"
        r"|GRUCell|Gated(Attention|Attn)",
        "linear, gated or recurrent attention: there is no softmax over the products of queries and keys",
    ),
    (
        r"sliding_chunks|block_sparse|BlockSparse|block_len|LSH|landmark|Landmark|natten|ProbSparse|GlobalLocal"
        r"|self\.window_size|_convert_to_block|context_size|chunk_length|hashcode|mra2|use_mask_unit_attn"
        r"|class Outlook",
        "sparse, local or windowed attention: it does not score every key",
    ),
    (
        r"relative_k|rel_pos_|relative_pos\b|relative_position_(proj|attn)|distance_embedding|disentangled|pos_bias_[uv]|r_w_bias|rel_embeddings"
        r"|decomposed_rel|relative_position_buckets|gated_position_bias|bbox_pos_emb|layout_query|emb_rel_k"
        r"|reshape_q",
        "relative positions enter the scores in a way that no row expresses",
    ),
    (r"softcap", "scores are capped by a tanh before the softmax"),
    (r"\bsinks\b", "a learned sink takes part in every softmax"),
    (r"per_dim_scale|_scale_query", "queries are scaled by a learned vector after their projection"),
    (
        r"query_stride|query_pool|do_pool|conv_kernel_layer|matmul_qk|MLPLayerWithBN|LinearNorm|conv2d\(",
        "queries or keys are pooled, convolved or normalised after their projection",
    ),
    (r"nn\.Conv[12]d\(|create_conv2d\(|ConvNorm|Conv2dNorm", "its projections are convolutions"),
    (r"class \w*Channel(Attention|Attn)", "channels attend to channels, not tokens to tokens"),
    (r"text_attn_weights", "the same scores serve both sequences, each way"),
    (
        r"query = cls_token|query_states = hidden_states \*|attn_proj\(|self\.query_emb",
        "it projects no queries: they are learned, or come projected from outside",
    ),
    (r"positional_encoding", "positions are added to keys and values after their projections"),
    (r"attn_weights_reshaped = attn_weights\n|attention_scores\.squeeze", "it hands out scores, not attention weights"),
    (r"QuantLinear|IntSoftmax|EsmFoldLinear|ClippableLinear", "its projections are not plain linear layers"),
    (r"q_content_proj|w2e_query|linear_q_points|key_protein", "queries or keys are made by several projections"),
    (r"_flash_attention_forward", "it calls flash attention alone; load the model with 'eager' or 'sdpa'"),
    (r"gumbel|get_attn\(", "keys are assigned to queries, not averaged by a softmax over keys"),
)
_ATTENDS = re.compile(
    r"softmax|attention_interface|scaled_dot_product|_flash_attention_forward|sampling_offsets|sampling_locations"
    r"|delta_rule|einsum|matmul|logsumexp|\bbmm\b| @ "
)


def reasons_against(cls: type) -> list[str]:
    """What in the source of a class forbids shared heads; empty when nothing is known to."""
    source = _source(cls)
    return [reason for pattern, reason in _OBSTACLES if re.search(pattern, source)]


def attends(cls: type) -> bool:
    """Whether a class computes attention itself, rather than leaving it to one inside."""
    return bool(_ATTENDS.search(_source(cls)))


def wrapped(cls: type) -> list[str]:
    """Names of the attention classes that a class makes use of."""
    namespace = vars(sys.modules[cls.__module__])
    names = dict.fromkeys(re.findall(r"\b\w*(?:Attention|Attn)\w*\b", _source(cls)))
    return [
        name
        for name in names
        if name != cls.__name__ and isinstance(namespace.get(name), type) and issubclass(namespace[name], nn.Module)
    ]


@functools.cache
def _source(cls: type) -> str:
    """Source of a class without its documentation, and of the classes of its own library that it inherits from."""
    library = cls.__module__.partition(".")[0]
    bases = [base for base in cls.__mro__ if base.__module__.partition(".")[0] == library and base is not nn.Module]
    return re.sub(r'"""(.|\n)*?"""', "", "\n".join(map(_own_source, bases)))


def _own_source(cls: type) -> str:
    # `inspect.getsource` would parse the whole file for every class, and count decorators in.
    found = re.search(rf"^class {cls.__name__}\b(.|\n)*?(?=^[A-Za-z_@]|\Z)", _module_source(cls.__module__), re.M)
    return found[0] if found else ""


@functools.cache
def _module_source(name: str) -> str:
    try:
        return inspect.getsource(sys.modules[name])
    except (OSError, TypeError, KeyError):  # made at run time, or in a shell
        return ""
