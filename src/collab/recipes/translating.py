"""Beam search over many sentences: sorted by length, batched by tokens, in the order they came."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

Progress = Callable[[Iterable[Any], int], Iterable[Any]]

LONGER = 50
"""Subwords that a translation may have more than its sentence, as in "Attention Is All You Need"."""


@torch.no_grad()
def translate(
    model: Any,
    tokenizer: Any,
    sentences: Sequence[str],
    *,
    beams: int = 4,
    length_penalty: float = 0.6,
    batch_tokens: int = 8192,
    progress: Progress | None = None,
) -> list[str]:
    """Translate sentences with an encoder-decoder of transformers; an empty one stays empty.

    The penalty is that of transformers and fairseq: a translation's log probability is divided by its length to this
    power.

    Args:
        model: what translates; it is left in the mode it was in.
        tokenizer: its tokenizer.
        sentences: what to translate, one each; longer ones than the model has positions for are cut.
        beams: hypotheses that are kept; one is greedy search.
        length_penalty: above zero favours long translations.
        batch_tokens: subwords of the sentences of a batch, padding counted.
        progress: wraps the loop over batches, given it and its length.
    """
    if beams < 1:
        raise ValueError(f"beams must be at least 1, got {beams}")
    limit = positions_of(model)
    encoded = [cut(tokenizer(text).input_ids, limit) if text.strip() else [] for text in sentences]
    order = sorted((place for place, ids in enumerate(encoded) if ids), key=lambda place: -len(encoded[place]))
    batches = _by_tokens(order, [len(ids) for ids in encoded], batch_tokens)
    translated = [""] * len(sentences)
    was_training = model.training
    model.eval()
    try:
        for batch in batches if progress is None else progress(batches, len(batches)):
            padded = tokenizer.pad({"input_ids": [encoded[place] for place in batch]}, return_tensors="pt")
            width = padded["input_ids"].shape[1]
            found = model.generate(
                input_ids=padded["input_ids"].to(model.device),
                attention_mask=padded["attention_mask"].to(model.device),
                num_beams=beams,
                do_sample=False,
                length_penalty=length_penalty if beams > 1 else 1.0,
                early_stopping=beams > 1,
                max_length=min(limit, width + LONGER),
            )
            texts = tokenizer.batch_decode(found, skip_special_tokens=True)
            for place, text in zip(batch, texts, strict=True):
                translated[place] = " ".join(text.split())
    finally:
        model.train(was_training)
    return translated


def cut(ids: list[int], limit: int) -> list[int]:
    """A sentence's subwords, at most so many; its end mark, the last of them, stays."""
    return ids if len(ids) <= limit else [*ids[: limit - 1], ids[-1]]


def positions_of(model: Any) -> int:
    """Subwords that a model can read and write."""
    return int(getattr(model.config, "max_position_embeddings", None) or 512)


def _by_tokens(order: Sequence[int], lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Batches of what is sorted, longest first: as many as fit beside the longest of each."""
    batches: list[list[int]] = []
    for place in order:
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= batch_tokens:
            batches[-1].append(place)
        else:
            batches.append([place])
    return batches
