"""Tiny random transformers models, built from configs in milliseconds, that every test may use.

`bert()`, `gpt2()`, ... give a model in eval mode with all its parameters random; `inputs_for(model)` gives it a padded
batch. `tiny(name, **overrides)` does the same for any model class of transformers.
"""

import dataclasses
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCABULARY = 64
BATCH, LENGTH, PADDING = 3, 7, 2
"""Sequences, tokens of the longest one, and how many tokens shorter each of the others is than the one before."""

_SIZES: dict[str, Any] = {
    # widths and heads: 4 heads of 8, and a feed-forward that is no multiple of them
    **dict.fromkeys(("hidden_size", "d_model", "dim", "n_embd", "embedding_size", "embed_dim", "d_embed"), 32),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_heads", "n_heads", "n_head"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "decoder_num_attention_heads"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_dim"), 8),
    **dict.fromkeys(("intermediate_size", "hidden_dim", "ffn_dim", "d_ff", "n_inner", "dff"), 36),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "decoder_intermediate_size"), 36),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "decoder_num_hidden_layers"), 2),
    **dict.fromkeys(("projection_dim", "word_embed_proj_dim", "decoder_hidden_size"), 32),
    # vocabulary and lengths
    **dict.fromkeys(("vocab_size", "decoder_vocab_size"), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_target_positions", "max_source_positions"), 40),
    # images and sound
    "image_size": 16, "patch_size": 4, "num_channels": 3, "num_mel_bins": 16,
    # special tokens that a small vocabulary still has
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
    # random numbers would make two passes differ
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
"""What `tiny_config` sets wherever a config has a field of this name."""


def randomise_(model: nn.Module, seed: int = 0) -> nn.Module:
    """Draw every parameter anew: biases and norms too, which libraries start at zero and one, where bugs hide."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        fan_in = parameter.shape[1:].numel() if parameter.dim() > 1 else 4
        values = torch.randn(parameter.shape, generator=generator) * fan_in**-0.5
        if parameter.dim() == 1 and name.endswith("weight"):  # a norm's
            values = 1 + 0.4 * values
        parameter.data.copy_(values)
    return model


def tiny_config(config_class: type[Any], **overrides: Any) -> Any:
    """A config of this class with the usual sizes made tiny; overrides win, a dict overrides a nested config."""
    fields = {field.name: field.default for field in dataclasses.fields(config_class)}
    nested = getattr(config_class, "sub_configs", {})
    # Where a config has one size for every stage, as a list, the case has to give them.
    values = {name: size for name, size in _SIZES.items() if isinstance(fields.get(name, ()), int | float | None)}
    for name, nested_class in nested.items():
        given = overrides.pop(name, {})
        if dataclasses.is_dataclass(nested_class):
            values[name] = tiny_config(nested_class, **given)
        elif given:
            values[name] = given
    return config_class(**(values | overrides))


def build(
    model_class: type[Any], config: Any, attention: str | None = None, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Any:
    """A model of this class in eval mode with random parameters; `attention` is "eager", "sdpa" or the default."""
    model = model_class._from_config(config, attn_implementation=attention)
    return randomise_(model, seed).eval().to(dtype)


def tiny(name: str, attention: str | None = None, seed: int = 0, **overrides: Any) -> Any:
    """A tiny model of the transformers class of this name."""
    model_class = getattr(transformers, name)
    return build(model_class, tiny_config(model_class.config_class, **overrides), attention, seed)


def token_ids(length: int = LENGTH, batch: int = BATCH, seed: int = 0) -> Tensor:
    """(batch, length) tokens, none of them special."""
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def padding_mask(length: int = LENGTH, batch: int = BATCH) -> Tensor:
    """(batch, length) of ones and zeros: the first sequence is whole, every other one is shorter, padded at its end."""
    lengths = length - PADDING * torch.arange(batch)
    return (torch.arange(length) < lengths[:, None]).long()


def numbers(*size: int, seed: int = 0) -> Tensor:
    """Normal random numbers."""
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def inputs_for(model: Any) -> dict[str, Tensor]:
    """A padded batch for a model, from what its config says it reads."""
    config = model.config
    inputs: dict[str, Tensor] = {}
    if model.main_input_name == "input_ids":
        inputs = {"input_ids": token_ids(), "attention_mask": padding_mask()}
    elif model.main_input_name == "input_features":  # Whisper reads a fixed length
        inputs = {"input_features": numbers(BATCH, config.num_mel_bins, 2 * config.max_source_positions)}
    vision = getattr(config, "vision_config", config)
    if model.main_input_name == "pixel_values" or "vision_config" in config.sub_configs:
        inputs["pixel_values"] = numbers(BATCH, vision.num_channels, vision.image_size, vision.image_size)
    if getattr(config, "add_cross_attention", False):
        inputs["encoder_hidden_states"] = numbers(BATCH, LENGTH + 2, 32, seed=1)
        inputs["encoder_attention_mask"] = padding_mask(LENGTH + 2)
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = token_ids(LENGTH - 1, seed=1)
        inputs["decoder_attention_mask"] = padding_mask(LENGTH - 1)
    return inputs


def bert(attention: str | None = None, seed: int = 0, **overrides: Any) -> Any:
    """BERT; `is_decoder=True, add_cross_attention=True` for cross-attention."""
    return tiny("BertModel", attention, seed, **overrides)


def roberta(attention: str | None = None, seed: int = 0, **overrides: Any) -> Any:
    """RoBERTa."""
    return tiny("RobertaModel", attention, seed, **overrides)


def electra(attention: str | None = None, seed: int = 0, **overrides: Any) -> Any:
    """ELECTRA."""
    return tiny("ElectraModel", attention, seed, **overrides)


def distilbert(attention: str | None = None, seed: int = 0, **overrides: Any) -> Any:
    """DistilBERT."""
    return tiny("DistilBertModel", attention, seed, **overrides)


def albert(attention: str | None = None, seed: int = 0, **overrides: Any) -> Any:
    """ALBERT with two groups of two layers, each run twice."""
    sizes = {"num_hidden_layers": 4, "num_hidden_groups": 2, "inner_group_num": 2}
    return tiny("AlbertModel", attention, seed, **(sizes | overrides))


def vit(attention: str | None = None, seed: int = 0, **overrides: Any) -> Any:
    """ViT."""
    return tiny("ViTModel", attention, seed, **overrides)


def deit(attention: str | None = None, seed: int = 0, **overrides: Any) -> Any:
    """DeiT."""
    return tiny("DeiTModel", attention, seed, **overrides)


def beit(attention: str | None = None, seed: int = 0, **overrides: Any) -> Any:
    """BEiT with a relative position bias in every layer."""
    return tiny("BeitModel", attention, seed, **({"use_relative_position_bias": True} | overrides))


def clip(attention: str | None = None, seed: int = 0, **overrides: Any) -> Any:
    """CLIP: a text tower and a vision tower."""
    return tiny("CLIPModel", attention, seed, **overrides)


def gpt2(attention: str | None = None, seed: int = 0, **overrides: Any) -> Any:
    """GPT-2 with its language head; `add_cross_attention=True` for cross-attention."""
    return tiny("GPT2LMHeadModel", attention, seed, **overrides)


def opt(attention: str | None = None, seed: int = 0, **overrides: Any) -> Any:
    """OPT with its language head."""
    return tiny("OPTForCausalLM", attention, seed, **overrides)


def bart(attention: str | None = None, seed: int = 0, **overrides: Any) -> Any:
    """BART with its language head."""
    return tiny("BartForConditionalGeneration", attention, seed, **overrides)


def marian(attention: str | None = None, seed: int = 0, **overrides: Any) -> Any:
    """Marian with its language head."""
    return tiny("MarianMTModel", attention, seed, **overrides)


def t5(attention: str | None = None, seed: int = 0, **overrides: Any) -> Any:
    """T5 with its language head."""
    return tiny("T5ForConditionalGeneration", attention, seed, **overrides)


def whisper(attention: str | None = None, seed: int = 0, **overrides: Any) -> Any:
    """Whisper with its language head."""
    return tiny("WhisperForConditionalGeneration", attention, seed, **overrides)


MAIN_MODELS = {
    function.__name__: function
    for function in (
        bert, roberta, electra, distilbert, albert, vit, deit, beit, clip, gpt2, opt, bart, marian, t5, whisper,
    )
}  # fmt: skip
"""The builders above by name."""
