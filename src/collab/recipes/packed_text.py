"""A corpus ready to train on, in one small folder: subword vocabulary, encoded pairs, the texts to be scored on.

`pack` writes it, `Packed.open` reads it; there is no raw training text in it.

    packed.json        languages, what was kept and why the rest was not, sizes
    tokenizer.json     the joint vocabulary, as transformers reads it, with tokenizer_config.json
    train.xz           every pair's subwords, packed
    texts/NAME.txt     a text to be scored on: a sentence and its translation a line, with a tab between
    unpacked/          made when it is first opened: the same subwords as arrays that are mapped, not read
"""

import itertools
import json
import lzma
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collab.recipes.parallel_text import Pair, name_of, read_pairs

PAD, END = "<pad>", "</s>"
PAD_ID, END_ID = 0, 1
FORMAT_VERSION = 1

OF_A_RUN = Path("steps", "data", "packed")
"""Where a run keeps what it packed."""

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Filters:
    """Which pairs are worth training on.

    Attributes:
        max_length: subwords that a sentence may have, its end mark counted.
        max_ratio: how many times as long as the other, in subwords, the longer sentence may be.
        duplicates: keep pairs that were there before.
        identical: keep pairs whose translation is the sentence itself.
    """

    max_length: int = 100
    max_ratio: float = 2.5
    duplicates: bool = False
    identical: bool = False

    def __post_init__(self) -> None:
        if not 4 <= self.max_length <= 1024:
            raise ValueError(f"max_length must be from 4 to 1,024 subwords, got {self.max_length}")
        if not self.max_ratio >= 1:
            raise ValueError(f"max_ratio must be at least 1, got {self.max_ratio}")


def pack(
    folder: Path,
    *,
    train: Sequence[str],
    texts: Mapping[str, str],
    languages: tuple[str, str],
    vocabulary: int,
    filters: Filters,
    max_pairs: int | None = None,
) -> dict[str, Any]:
    """Read, filter, learn the vocabulary, encode, and write the folder; returns what packed.json says.

    Args:
        folder: where to; it appears when all is written.
        train: sources of pairs to train on, as `read_pairs` takes them.
        texts: name -> source, of what is to be scored on. Pairs with a sentence of these are not trained on.
        languages: from and to.
        vocabulary: subwords of both languages together.
        filters: which pairs to keep.
        max_pairs: read so many pairs of each source, from its start.
    """
    if not train:
        raise ValueError("train must name at least one source of pairs, got none")
    scored = {name: read_pairs(source, languages) for name, source in texts.items()}
    known = [{pair[side] for pairs in scored.values() for pair in pairs} for side in (0, 1)]
    tally: dict[str, int] = {}
    sources: dict[str, int] = {}
    pairs: list[Pair] = []
    for source in train:
        read = read_pairs(source, languages)[:max_pairs]
        sources[name_of(source)] = sources.get(name_of(source), 0) + len(read)
        pairs += read
    pairs = _worth_training(pairs, known, filters, tally)
    tokenizer = learn_vocabulary((sentence for pair in pairs for sentence in pair), vocabulary)
    encoded = [_encode(tokenizer, side) for side in zip(*pairs, strict=True)]
    fits = _fitting(encoded[0][0], encoded[1][0], filters, tally)
    if not fits.any():
        raise ValueError(f"no pair of {', '.join(train)} is left to train on; dropped: {tally}")
    tokens = np.concatenate([side[np.repeat(fits, lengths)] for lengths, side in encoded])
    lengths = np.stack([lengths[fits] for lengths, _ in encoded]).astype(np.uint16)
    described = {
        "format_version": FORMAT_VERSION,
        "languages": list(languages),
        "vocabulary": tokenizer.get_vocab_size(),
        "sources": sources,
        "pairs": lengths.shape[1],
        "tokens": lengths.sum(axis=1, dtype=np.int64).tolist(),
        "dropped": tally,
        "texts": {name: len(of_text) for name, of_text in scored.items()},
    }
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "texts").mkdir(parents=True)
    _write(partial, lengths, tokens, scored, described)
    _save_tokenizer(tokenizer, partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.replace(folder)
    return described


def _write(
    folder: Path, lengths: Array, tokens: Array, texts: Mapping[str, Sequence[Pair]], described: Mapping[str, Any]
) -> None:
    with lzma.open(folder / "train.xz", "wb", preset=6) as file:
        file.write(lengths.tobytes())
        # All low bytes first, then all high ones: a tenth smaller.
        file.write(np.ascontiguousarray(tokens.view(np.uint8).reshape(-1, 2).T).tobytes())
    for name, pairs in texts.items():
        lines = "".join(f"{sentence}\t{translation}\n" for sentence, translation in pairs)
        (folder / "texts" / f"{name}.txt").write_text(lines, encoding="utf-8")
    (folder / "packed.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Packed:
    """A folder that `pack` wrote, opened.

    Attributes:
        folder: where it is.
        described: what its packed.json says.
    """

    folder: Path
    described: dict[str, Any]

    @classmethod
    def open(cls, folder: str | Path) -> "Packed":
        """Open a folder that `pack` wrote, or that of a run which packed its data; any other is an error."""
        folder = Path(folder)
        if (folder / OF_A_RUN / "packed.json").is_file():
            folder /= OF_A_RUN
        try:
            described = json.loads((folder / "packed.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{folder} must be a run that packed its data, or a folder with a packed.json: there is none"
            ) from None
        if described["format_version"] > FORMAT_VERSION:
            raise ValueError(
                f"{folder} must have a format of at most {FORMAT_VERSION}, got {described['format_version']}: "
                "it was written by a newer version"
            )
        return cls(folder, described)

    @cached_property
    def tokenizer(self) -> Any:
        """As transformers knows it."""
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(self.folder)

    def text(self, name: str) -> list[Pair]:
        """A text to be scored on."""
        path = self.folder / "texts" / f"{name}.txt"
        if not path.is_file():
            raise ValueError(f"{self.folder} has no text {name!r}; it has {', '.join(self.described['texts'])}")
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
        first, second = zip(*(line.split("\t") for line in lines), strict=True)
        return list(zip(first, second, strict=True))

    def train(self) -> tuple[Array, Array, Array]:
        """Lengths (2, pair), starts (2, pair) and subwords (token,) of all pairs, mapped from files."""
        unpacked = self.folder / "unpacked"
        if not (unpacked / "tokens.npy").is_file():
            self._unpack(unpacked)
        lengths = np.load(unpacked / "lengths.npy")
        starts = np.cumsum(lengths.ravel(), dtype=np.int64) - lengths.ravel()
        return lengths, starts.reshape(lengths.shape), np.load(unpacked / "tokens.npy", mmap_mode="r")

    def _unpack(self, unpacked: Path) -> None:
        """Many processes may do so at once: each writes files of its own, and the last to finish leaves its."""
        pairs = self.described["pairs"]
        with lzma.open(self.folder / "train.xz", "rb") as file:
            lengths = np.frombuffer(file.read(4 * pairs), dtype=np.uint16).reshape(2, pairs)
            planes = np.frombuffer(file.read(), dtype=np.uint8).reshape(2, -1)
        tokens = np.ascontiguousarray(planes.T).view(np.uint16).ravel()
        unpacked.mkdir(exist_ok=True)
        for name, array in (("lengths", lengths), ("tokens", tokens)):
            partial = unpacked / f".{name}.{os.getpid()}.npy"
            np.save(partial, array)
            partial.replace(unpacked / f"{name}.npy")


def _worth_training(
    pairs: Iterable[Pair], known: Sequence[set[str]], filters: Filters, tally: dict[str, int]
) -> list[Pair]:
    """What can be said before there are subwords; `tally` counts what was dropped, by reason."""
    seen: set[Pair] = set()
    kept = []
    for pair in pairs:
        reason = None
        if not all(pair):
            reason = "empty"
        elif pair[0] in known[0] or pair[1] in known[1]:
            reason = "in a text to be scored on"
        elif not filters.identical and pair[0] == pair[1]:
            reason = "identical"
        elif not filters.duplicates and pair in seen:
            reason = "duplicate"
        if reason is not None:
            tally[reason] = tally.get(reason, 0) + 1
            continue
        if not filters.duplicates:
            seen.add(pair)
        kept.append(pair)
    if not kept:
        raise ValueError(f"no pair is left to train on; dropped: {tally}")
    return kept


def _fitting(first: Array, second: Array, filters: Filters, tally: dict[str, int]) -> Array:
    """Whether the lengths of each pair, in subwords, will do."""
    longer, shorter = np.maximum(first, second), np.minimum(first, second)
    too_long = longer > filters.max_length
    lopsided = ~too_long & (longer > filters.max_ratio * shorter)
    for reason, dropped in (("too long", too_long), ("lengths too different", lopsided)):
        if dropped.any():
            tally[reason] = int(dropped.sum())
    return np.asarray(~too_long & ~lopsided)


def learn_vocabulary(sentences: Iterable[str], size: int) -> Any:
    """A byte-pair vocabulary of both languages, a `tokenizers.Tokenizer`.

    It starts from bytes, so that no text of any language has a part that it does not know, and gives back the very
    text that it took apart. Words do not run into punctuation or numbers.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    if not 300 <= size <= 1 << 16:
        raise ValueError(f"vocabulary must be from 300, for the 256 bytes and some subwords, to 65,536, got {size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[PAD, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences, trainer)
    return tokenizer


def _encode(tokenizer: Any, sentences: Sequence[str], chunk: int = 20_000) -> tuple[Array, Array]:
    """Lengths (sentence,) in subwords, and all subwords (token,) one after the other, each sentence with its end."""
    lengths, tokens = [], []
    for start in range(0, len(sentences), chunk):
        found = [(*one.ids, END_ID) for one in tokenizer.encode_batch(list(sentences[start : start + chunk]))]
        lengths += [len(ids) for ids in found]
        tokens.append(np.fromiter(itertools.chain.from_iterable(found), dtype=np.uint16))
    return np.array(lengths), np.concatenate(tokens)


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """As transformers reads it: it ends a sentence by itself."""
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", pair=f"$A {END} $B {END}", special_tokens=[(END, END_ID)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip
    fast.save_pretrained(folder)
