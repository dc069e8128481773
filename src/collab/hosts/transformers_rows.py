"""What rows of transformers' attention classes are made of: where things are by habit, and what many classes do."""

from typing import Any

import torch
from torch import Tensor

from collab.hosts import register_host
from collab.hosts.linear import Block
from collab.hosts.transformers_shell import Given, TransformersHost, pair_if_asked


def row(*names: str, **fields: Any) -> None:
    """Register one row for every class that differs from the first in its name alone."""
    for name in names:
        folder, _, class_name = name.rpartition(".")
        module = f"models.{folder}.modeling_{folder}." if folder else ""
        register_host(f"transformers.{module}{class_name}", TransformersHost(name=name, **fields))


def named_inputs(query: str, key: str, value: str) -> dict[str, Any]:
    """Queries, keys and values come from arguments of their own."""
    return {"inputs": lambda module, given: (given[query], given[key], given[value])}


def then(layer: str) -> dict[str, Any]:
    """A layer of the module follows the output projection, such as a dropout."""
    return {"tail": lambda module, given, output: getattr(module, layer)(output)}


def fused(name: str, *, per_head: bool = False) -> dict[str, Block]:
    """Queries, keys and values of one linear layer, in this order."""
    return {role: Block(name, index, 3, per_head) for index, role in enumerate(("query", "key", "value"))}


# Where projections and sizes are, by habit of naming.

BERT = {
    "query": "query", "key": "key", "value": "value", "out": None,
    "num_heads": "num_attention_heads", "head_dim": "attention_head_size", "dropout": "dropout",
}  # fmt: skip
PROJ = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}
BART = {**PROJ, "out": "out_proj", "dropout": "dropout"}
CLIP = {**BART, "scale_from": "scale"}
VIT = {**PROJ, "out": "o_proj", "num_heads": "num_attention_heads", "dropout": "attention_dropout"}
LLAMA = {**VIT, "num_heads": lambda module: module.o_proj.in_features // module.head_dim}

# How classes behave that call no attention interface: they divide by the root of the head size themselves, and return
# the weights always, or when asked to.

BY_HEAD_SIZE = {"scale_from": lambda module: module.attention_head_size**-0.5}
ALWAYS = {"weights": "always"}
ASKED = {"weights": "asked"}
ASKED_TUPLE = {"weights": "asked", "returns": pair_if_asked}
BERT_ALWAYS = {**BERT, **BY_HEAD_SIZE, **ALWAYS}
BERT_ASKED = {**BERT, **BY_HEAD_SIZE, **ASKED_TUPLE}

ENCODER = {"memory": "encoder_hidden_states"}
ENCODER_MASKED = {"memory": "encoder_hidden_states", "cross_mask": "encoder_attention_mask"}


# Sequences that come before batches, and masks that say what is hidden.


def inverted_mask(module: Any, given: Given) -> Tensor | None:
    """A mask that is True where it hides, when it is boolean."""
    mask: Tensor | None = given.get("attention_mask")
    return ~mask if mask is not None and mask.dtype == torch.bool else mask


def tokens_first(hook: Any) -> Any:
    """The hook's inputs, given as (token, batch, width)."""
    return lambda module, given: tuple(tokens.transpose(0, 1) for tokens in hook(module, given))


def back_to_tokens_first(module: Any, given: Given, output: Tensor) -> Tensor:
    """What `tokens_first` turned, turned back."""
    return output.transpose(0, 1)
