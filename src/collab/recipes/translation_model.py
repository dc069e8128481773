"""Transformer-base for translation, its heads concatenated or collaborative, as a transformers model.

The class is `MarianMTModel`: of transformers' encoder-decoders it alone is what "Attention Is All You Need" describes,
normalising after each residual, with sinusoidal positions, embeddings times the root of the width and nothing else
between (BART normalises its embeddings and learns its positions). So generation, caches, `save_pretrained` and
`from_pretrained` are those that users have; attention is swapped in it by `collaborate_` with fresh weights.

Both kinds of heads have a key dimension, which is that of all heads together:

- Concatenated heads of the full key dimension, the model's width, are Marian's own attention, untouched. Of a smaller
  one they are our layer with mixing frozen to a block of ones a head and sparse, so that each head has dimensions of
  its own and scores cost what those of heads of that size do; their scale is 1 / sqrt(their own size), as ordinary
  attention of that size has. The content term is trained, as a query bias would be: it can say a little more than the
  query bias of a reduced head, which favours this baseline, if anything.
- Collaborative heads have the scale of the full-size head, 1 / sqrt(width / heads), whatever their key dimension: it
  says how sharp heads are to be, and does not change with how much they share. Their mixing starts as blocks of ones,
  so that they begin as ordinary heads, of the key dimension's size, and learn what to share. Small trials on captions
  learned faster from there than from "normal", at random with the variance at which scores vary as those of full-size
  heads do; the setting `mixing` has both.

Weights start as in fairseq, whose settings the paper took: Xavier for all projections, those of queries, keys and
values times 1 / sqrt(2) in every kind of layer, zero for biases, and a deviation of 1 / sqrt(width) for embeddings,
which are those of both languages and of the output at once.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from collab.config import MIXING_STARTS, CollaborativeConfig
from collab.hosts import Collaborative
from collab.inspection import AttentionSite
from collab.recipes.packed_text import END_ID, PAD_ID
from collab.swap import collaborate_

VARIANTS = ("concatenated", "collaborative")
PLACES = ("encoder", "decoder", "cross")


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Sizes of a model and the kind of its heads.

    Attributes:
        variant: "concatenated" or "collaborative".
        collaborative_in: where the heads of a collaborative model share: "encoder", "decoder" and "cross", from the
            decoder to the encoder. Elsewhere they are concatenated, of the same key dimension.
        key_dim: dimensions of queries and keys, of all heads together.
        mixing: how the mixing of collaborative heads starts.
        layers: of the encoder, and as many of the decoder.
        width, heads, feed_forward: of every layer.
        dropout: of embeddings and of what each block adds.
    """

    variant: str = "collaborative"
    collaborative_in: tuple[str, ...] = PLACES
    key_dim: int = 512
    mixing: str = "concatenate"
    layers: int = 6
    width: int = 512
    heads: int = 8
    feed_forward: int = 2048
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise ValueError(f"variant must be one of {list(VARIANTS)}, got {self.variant!r}")
        unknown = [place for place in self.collaborative_in if place not in PLACES]
        if unknown or not self.collaborative_in:
            raise ValueError(
                f"collaborative_in must be some of {list(PLACES)}, got {', '.join(self.collaborative_in) or 'none'}"
            )
        if self.mixing not in MIXING_STARTS:
            raise ValueError(f"mixing must be one of {list(MIXING_STARTS)}, got {self.mixing!r}")
        for name in ("layers", "width", "heads", "feed_forward", "key_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.width % self.heads or self.width % 2:
            raise ValueError(f"width must be even and divisible by heads {self.heads}, got {self.width}")
        if self.key_dim > self.width:
            raise ValueError(f"key_dim must be at most the width {self.width}, got {self.key_dim}")
        concatenated = self.variant == "concatenated" or len(set(self.collaborative_in)) < len(PLACES)
        if concatenated and self.key_dim % self.heads:
            raise ValueError(
                f"key_dim must be divisible by heads {self.heads} to be split over them, got {self.key_dim}"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")


def build_model(architecture: Architecture, vocabulary: int, *, max_length: int = 1024, seed: int = 0) -> Any:
    """A model with fresh weights, drawn on the CPU from the seed: the same on every machine.

    Args:
        architecture: its sizes and the kind of its heads.
        vocabulary: number of subwords; rounded up to a multiple of eight, which products on a GPU like better.
        max_length: positions it knows, and subwords that it translates into at most.
        seed: of its weights.
    """
    from transformers import MarianConfig, MarianMTModel

    config = MarianConfig(
        vocab_size=vocabulary + -vocabulary % 8,
        d_model=architecture.width,
        encoder_layers=architecture.layers,
        decoder_layers=architecture.layers,
        encoder_attention_heads=architecture.heads,
        decoder_attention_heads=architecture.heads,
        encoder_ffn_dim=architecture.feed_forward,
        decoder_ffn_dim=architecture.feed_forward,
        dropout=architecture.dropout,
        activation_function="relu",
        scale_embedding=True,
        max_position_embeddings=max_length,
        pad_token_id=PAD_ID,
        eos_token_id=END_ID,
        decoder_start_token_id=PAD_ID,
        forced_eos_token_id=END_ID,
    )
    config._attn_implementation = "sdpa"
    model: Any = MarianMTModel(config)
    start_weights_(model, torch.Generator().manual_seed(seed))
    shared = set(architecture.collaborative_in) if architecture.variant == "collaborative" else set()
    for place in PLACES:
        settings = _heads(architecture, place in shared, seed)
        if settings is not None:
            collaborate_(model, settings, only=_is_at(place))
            if place not in shared:
                for module in _layers_at(model, place):
                    module.mixing.requires_grad_(False)
    soften_(model)
    # Only the end of a text is a guess: what has no end is cut.
    generation = model.generation_config
    generation.max_length, generation.num_beams, generation.length_penalty = max_length, 4, 0.6
    generation.early_stopping = True
    generation.bad_words_ids = [[PAD_ID]]
    return model


def _heads(architecture: Architecture, is_shared: bool, seed: int) -> CollaborativeConfig | None:
    """How to make the heads of one place; None leaves Marian's own."""
    size, heads = architecture.key_dim, architecture.heads
    if is_shared:
        return CollaborativeConfig(shared_dim=size, weights="fresh", mixing=architecture.mixing, seed=seed)
    if size == architecture.width:
        return None
    own = size // heads
    return CollaborativeConfig(
        shared_dim=size, dims_per_head=own, weights="fresh", mixing="concatenate", scale=own**-0.5, seed=seed
    )


def place_of(path: str) -> str:
    """Which of `PLACES` an attention layer is at.

    Example:
        >>> place_of("model.decoder.layers.0.encoder_attn")
        'cross'
    """
    if path.endswith("encoder_attn"):
        return "cross"
    return "encoder" if ".encoder." in path else "decoder"


def _is_at(place: str) -> Callable[[AttentionSite], bool]:
    return lambda site: place_of(site.path) == place


def _layers_at(model: nn.Module, place: str) -> Sequence[Any]:
    return [
        module
        for path, module in model.named_modules()
        if isinstance(module, Collaborative) and place_of(path) == place
    ]


@torch.no_grad()
def start_weights_(model: nn.Module, generator: torch.Generator) -> None:
    """Draw the weights of a Marian model as fairseq does; positions and norms stay."""
    shared = model.get_submodule("model.shared")
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and path != "lm_head":
            nn.init.xavier_uniform_(module.weight, generator=generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif module is shared:
            weight = module.weight
            assert isinstance(weight, torch.Tensor)
            nn.init.normal_(weight, std=1 / math.sqrt(weight.shape[1]), generator=generator)
            weight[PAD_ID].zero_()


@torch.no_grad()
def soften_(model: nn.Module) -> None:
    """Make queries, keys and values smaller, so that every head begins with looking almost everywhere."""
    for path, module in model.named_modules():
        if path.endswith((".q_proj", ".k_proj", ".v_proj")) and isinstance(module, nn.Linear):
            module.weight.mul_(2**-0.5)


def count_trained(model: nn.Module) -> int:
    """Number of parameters that training found: not the positions, nor mixing that is frozen."""
    parameters = (
        parameter for name, parameter in model.named_parameters() if not name.endswith("embed_positions.weight")
    )
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
