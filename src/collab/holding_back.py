"""Which inputs a fit may look at, and which are held back to judge it by."""

import math
from collections.abc import Iterable

from torch import nn

from collab.running import Batch, split_batch

_MOST = 12
"""Batches to judge by, at most: looking at more costs time that more steps use better."""


def hold_back(
    model: nn.Module, batches: Iterable[Batch], batch_size: int, share: float
) -> tuple[list[Batch], list[Batch], list[str]]:
    """Batches to fit to, batches to judge by, and what to say of them.

    Args:
        model: which takes the batches.
        batches: inputs; those of more than `batch_size` are split, where they can be.
        batch_size: inputs of a batch.
        share: of the batches that is held back, but no more than a dozen of them.
    """
    parts = [part for batch in batches for part in split_batch(batch, batch_size, model)]
    if not parts:
        raise ValueError("batches must hold at least one batch, got none")
    if len(parts) == 1:
        parts = split_batch(parts[0], 1, model)
    if len(parts) == 1:
        return parts, parts, ["a single input was given, or one batch that cannot be split, and says little"]
    every = max(2, round(1 / share))
    # Spread evenly: batches are often sorted by length.
    held = [part for index, part in enumerate(parts) if index % every == every // 2]
    held = spread(held, _MOST) or parts[-1:]
    return [part for part in parts if not any(part is other for other in held)], held, []


def spread(batches: list[Batch], count: int) -> list[Batch]:
    """At most `count` of the batches, and one at least, from all over them."""
    return batches[:: max(1, math.ceil(len(batches) / max(1, count)))]
