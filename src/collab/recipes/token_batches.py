"""Batches of about as many tokens each, of few shapes, cut out of mapped arrays.

Pairs are sorted into buckets by the longer of their two sentences. A batch comes from one bucket, both of its sides are
as wide as the bucket, and it has as many rows as make up the tokens that were asked for: every bucket has one shape,
which is the same in every epoch, so that what was compiled or recorded for a shape is used again.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from collab.recipes.packed_text import PAD_ID, Array, Packed

IGNORED = -100
"""A label that is none."""

WIDTHS = (8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128, 192, 256, 512, 1024)
"""Of buckets, in subwords. Multiples of four, of eight where there are many subwords."""


class PairIndices(Dataset[int]):
    """The pairs of a corpus by number; the numbers are made subwords by the batch, in `TokenBatches.collate`."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class TokenBatches:
    """Which pairs make a batch, in every epoch, and the batch itself.

    Args:
        packed: the corpus.
        tokens: of a batch: rows x width of the longer side, padding counted.
        seed: of the order.
    """

    def __init__(self, packed: Packed, tokens: int, seed: int) -> None:
        self.packed, self.tokens, self.seed = packed, tokens, seed
        self.lengths, self.starts, _ = packed.train()
        self.subwords: Array | None = None
        longer = self.lengths.max(axis=0)
        if tokens < int(longer.max()):
            raise ValueError(f"batch_tokens must be at least the longest sentence, {int(longer.max())}, got {tokens}")
        self.widths = np.array(WIDTHS)[np.searchsorted(WIDTHS, longer)]

    @property
    def data(self) -> PairIndices:
        """The dataset to draw from."""
        return PairIndices(self.lengths.shape[1])

    def rows(self, width: int) -> int:
        """Of a batch of the bucket of this width: a multiple of eight where there are so many."""
        rows = self.tokens // width
        return rows - rows % 8 if rows > 8 else max(1, rows)

    def __call__(self, epoch: int) -> list[list[int]]:
        """Pairs of every batch of an epoch: every pair, and some twice, to fill the last batch of a bucket."""
        generator = np.random.default_rng((self.seed, epoch))
        batches: list[list[int]] = []
        for width in np.unique(self.widths):
            members = generator.permutation(np.flatnonzero(self.widths == width))
            rows = self.rows(int(width))
            if len(members) > rows:
                members = np.concatenate((members, members[: -len(members) % rows]))
            batches += [members[start : start + rows].tolist() for start in range(0, len(members), rows)]
        return [batches[place] for place in generator.permutation(len(batches))]

    def collate(self, pairs: Sequence[int]) -> dict[str, Tensor]:
        """`input_ids` and `labels`, each (row, width), padded with PAD_ID and IGNORED; `prepare` does the rest."""
        if self.subwords is None:  # opened where it is used: in a worker process, or in this one
            self.subwords = self.packed.train()[2]
        chosen = np.asarray(pairs)
        width = int(self.widths[chosen].max())
        places = np.arange(width)
        sides = []
        for starts, lengths, nothing in zip(
            self.starts[:, chosen], self.lengths[:, chosen], (PAD_ID, IGNORED), strict=True
        ):
            is_token = places < lengths[:, None]
            at = np.where(is_token, starts[:, None] + places, 0)
            sides.append(torch.from_numpy(np.where(is_token, self.subwords[at].astype(np.int64), nothing)))
        return {"input_ids": sides[0], "labels": sides[1]}


def prepare(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A collated batch as the model takes it, made on the device it is on.

    Masks have all four dimensions, (row, 1, 1, key) and (1, 1, query, key): transformers would ask smaller ones whether
    they mask anything at all, and a GPU would have to be waited for, for the answer.
    """
    source, labels = batch["input_ids"], batch["labels"]
    width = labels.shape[1]
    return {
        "input_ids": source,
        "attention_mask": (source != PAD_ID)[:, None, None],
        "decoder_input_ids": shifted(labels),
        "decoder_attention_mask": torch.ones(width, width, dtype=torch.bool, device=labels.device).tril()[None, None],
        "labels": labels,
    }


def shifted(labels: Tensor) -> Tensor:
    """What the decoder has read when it is asked for `labels` (row, width)."""
    return torch.nn.functional.pad(labels[:, :-1].masked_fill(labels[:, :-1] == IGNORED, PAD_ID), (1, 0), value=PAD_ID)


def padded_pairs(sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Pairs of encoded sentences as `TokenBatches.collate` gives them."""
    sides = []
    for side, nothing in ((sources, PAD_ID), (targets, IGNORED)):
        rows = [torch.tensor(ids) for ids in side]
        sides.append(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=nothing))
    return {"input_ids": sides[0], "labels": sides[1]}
