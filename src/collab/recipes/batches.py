"""The batches of a training: which examples each process takes in which step, and the random changes made to them."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler, default_collate

from collab.recipes import processes
from collab.recipes.settings import FitSettings

Batch = dict[str, Any]
IGNORED = -100
"""Label that does not count."""

COUNTED = "counted"
"""Where a part of a batch keeps how many of its items count, and how many of its examples."""


class Part(NamedTuple):
    """One process's share of a step's batch: which examples, the seed of their random changes, whether they count."""

    indices: list[int]
    seed: int
    counts: bool


class Parts(Dataset[Batch]):
    """Batches by their part: examples are fetched, changed by random numbers of their own, and put together."""

    def __init__(self, data: Any, collate: Callable[[list[Any]], Batch] | None) -> None:
        self.data, self.collate = data, collate or default_collate

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, part: Part) -> Batch:
        import random

        import numpy

        # The same whichever process prepares it, and whenever: a run that goes on sees what it would have seen.
        random.seed(part.seed)
        numpy.random.seed(part.seed % 2**32)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(part.seed)
            batch: Batch = dict(self.collate([self.data[index] for index in part.indices]))
        batch[COUNTED] = (count_items(batch, len(part.indices)), len(part.indices)) if part.counts else (0, 0)
        return batch


class Schedule(Sampler[Part]):
    """Every part of this process, from one step to the last, epoch after epoch.

    Batches belong to all processes: each takes every n-th example. One with fewer examples than parts gives an example
    again that does not count, since every process must take part in every step.
    """

    def __init__(
        self, batches: Callable[[int], Sequence[Sequence[int]]], settings: FitSettings, first: int, total: int
    ):
        self.batches, self.settings, self.first, self.total = batches, settings, first, total

    def __len__(self) -> int:
        return self.total * self.settings.accumulate

    def __iter__(self) -> Iterator[Part]:
        step, epoch = 0, 0
        rank, accumulate = processes.rank(), self.settings.accumulate
        parts = processes.count() * accumulate
        while step < self.total:
            batches = self.batches(epoch)
            if not batches:
                raise ValueError("data must hold at least one batch, got none")
            for number in range(max(0, self.first - step), min(len(batches), self.total - step)):
                batch = batches[number]
                for own in range(rank * accumulate, (rank + 1) * accumulate):
                    indices = list(batch[own::parts])
                    seed = seed_from(self.settings.seed, "examples", step + number, own)
                    yield Part(indices or list(batch[:1]), seed, bool(indices))
            step += len(batches)
            epoch += 1


def seed_from(*parts: object) -> int:
    """A seed that depends on all of the values, the same on every machine."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def count_items(batch: Batch, examples: int) -> int:
    """Labels that count, or examples where there are no labels."""
    labels = batch.get("labels")
    return int((labels != IGNORED).sum()) if isinstance(labels, Tensor) else examples


def shuffled_batches(length: int, batch_size: int, seed: int) -> Callable[[int], list[list[int]]]:
    """For each epoch all examples in an order of its own, `batch_size` at a time."""

    def batches(epoch: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed_from(seed, "order", epoch))
        order = torch.randperm(length, generator=generator).tolist()
        return [order[start : start + batch_size] for start in range(0, length, batch_size)]

    return batches


def length_sorted_batches(lengths: Sequence[int], batch_size: int, seed: int, pool: int = 50) -> Callable[[int], Any]:
    """Like `shuffled_batches`, but of examples alike in length, so that there is little padding.

    The shuffled examples are sorted in pools of `pool` batches, and the batches shuffled again.
    """

    def batches(epoch: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed_from(seed, "order", epoch))
        order = torch.randperm(len(lengths), generator=generator).tolist()
        found: list[list[int]] = []
        for start in range(0, len(order), pool * batch_size):
            near = sorted(order[start : start + pool * batch_size], key=lambda index: lengths[index])
            found += [near[first : first + batch_size] for first in range(0, len(near), batch_size)]
        return [found[index] for index in torch.randperm(len(found), generator=generator).tolist()]

    return batches
