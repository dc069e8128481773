"""Label-smoothed cross entropy of an encoder-decoder, and its layers compiled."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from collab.recipes.token_batches import IGNORED


class SmoothedLoss:
    """The loss of a batch that `prepare` made, as `fit` calls it: summed over its labels, divided by `num_items`.

    Args:
        smoothing: share of each label that is spread evenly over all subwords.
        is_compiled: fuse what is done with the logits, the largest tensor there is, by torch.compile.
    """

    def __init__(self, smoothing: float, is_compiled: bool = False) -> None:
        self.smoothing = smoothing
        self.of_logits: Any = torch.compile(cross_entropy) if is_compiled else cross_entropy

    def __call__(self, model: nn.Module, batch: dict[str, Tensor], num_items: Any) -> Tensor:
        """The model is called without labels, which would have it compute a loss of its own."""
        labels = batch["labels"]
        given = {name: tensor for name, tensor in batch.items() if name != "labels"}
        logits = model(**given, use_cache=False).logits
        loss: Tensor = self.of_logits(logits, labels, self.smoothing) / num_items
        return loss


def cross_entropy(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Sum over the labels (row, width) of logits (row, width, vocabulary), in float32."""
    return functional.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing
    )


def compile_layers_(model: nn.Module) -> None:
    """Compile every encoder and decoder layer; all layers of a kind share what was compiled.

    The first batch's shape is compiled for, and the second's, as for any shape. Asking for any shape at once would make
    unknowns of the sizes of heads and of the dropout, too.
    """
    for part in ("model.encoder.layers", "model.decoder.layers"):
        for layer in model.get_submodule(part).children():
            layer.compile()


class Uncompiled:
    """A context in which compiled layers run as they are written: generation has other shapes at every step."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.compiled: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        for module in self.model.modules():
            found = getattr(module, "_compiled_call_impl", None)
            if found is not None:
                self.compiled.append((module, found))
                module._compiled_call_impl = None

    def __exit__(self, *error: object) -> None:
        for module, found in self.compiled:
            module._compiled_call_impl = found
        self.compiled = []
