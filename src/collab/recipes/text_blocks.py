"""Plain text as blocks of tokens, tokenised once into a file that is mapped into memory: training never waits."""

import bz2
import gzip
import json
import lzma
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from collab.demo import demo_folder
from collab.recipes.work import write_json

PACKED: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}

_TOGETHER = 2000
"""Lines that are tokenised at once."""


def read_lines(sources: Sequence[str], only: str, column: int | None = None) -> Iterator[str]:
    """The lines of text files, which may be packed, of folders and of tar archives.

    Args:
        sources: the files, folders and archives.
        only: of folders and archives, files whose name matches this.
        column: of lines with tabs, what to take, counted from 0; all of the line if not given.
    """
    for source in sources:
        for text in _texts(Path(source).expanduser(), only):
            for line in text.splitlines():
                if stripped := _cell(line, column, source).strip():
                    yield stripped


def _cell(line: str, column: int | None, source: str) -> str:
    cells = line.split("\t")
    if column is None or len(cells) == 1:
        return line
    if column >= len(cells):
        raise ValueError(f"column must be from 0 to {len(cells) - 1} in {source}, got {column}: {line[:80]!r}")
    return cells[column]


def _texts(path: Path, only: str) -> Iterator[str]:
    """Of files, one by one, what is in them."""
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            if file.is_file() and fnmatch(file.name, only):
                yield _unpacked(file)
    elif not path.is_file():
        raise FileNotFoundError(f"texts must be text files, folders or tar archives of them, got {path}")
    elif tarfile.is_tarfile(path):
        with tarfile.open(path) as archive:
            for member in archive:
                if member.isfile() and fnmatch(Path(member.name).name, only):
                    found = archive.extractfile(member)
                    assert found is not None
                    yield found.read().decode("utf-8")
    else:
        yield _unpacked(path)


def _unpacked(path: Path) -> str:
    try:
        with PACKED.get(path.suffix, open)(path, "rt", encoding="utf-8") as file:
            text: str = file.read()
    except (UnicodeDecodeError, EOFError, OSError, lzma.LZMAError) as error:
        raise ValueError(f"{path} must hold text in UTF-8, packed as its name says: {error}") from None
    return text


def make_tokenizer(vocabulary: str, vocab_size: int, lines: Callable[[], Iterable[str]], folder: Path) -> Any:
    """A tokenizer, saved into a folder and read back from there if it is there.

    Args:
        vocabulary: "minilm", that of the package with that model; "new", trained on the lines; or a tokenizer's folder.
        vocab_size: of a new one.
        lines: gives the text to train on.
        folder: where to.
    """
    import transformers

    automatic: Any = transformers.AutoTokenizer
    if (folder / "tokenizer.json").is_file():
        return automatic.from_pretrained(str(folder))
    if vocabulary == "new":
        made = _trained(vocab_size, lines())
    else:
        made = automatic.from_pretrained(str(demo_folder() if vocabulary == "minilm" else Path(vocabulary)))
    made.save_pretrained(str(folder))
    return automatic.from_pretrained(str(folder))


def _trained(vocab_size: int, lines: Iterable[str]) -> Any:
    """Pieces of words, as BERT's."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = {name: f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    made: Any = Tokenizer(models.WordPiece(unk_token=special["unk"]))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=list(special.values()), show_progress=False
    )
    made.train_from_iterator(lines, trainer)
    ends = [(special[name], made.token_to_id(special[name])) for name in ("sep", "cls")]
    made.post_processor = processors.BertProcessing(*ends)
    tokens: Any = {f"{name}_token": token for name, token in special.items()}
    return PreTrainedTokenizerFast(tokenizer_object=made, **tokens)


def pack(lines: Iterable[str], tokenizer: Any, length: int, folder: Path) -> int:
    """Write blocks of `length` tokens to a folder: lines one after the other, each ended by the separator.

    Returns:
        How many blocks there are. What does not fill one is left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kind = numpy.uint16 if len(tokenizer) <= 2**16 else numpy.uint32
    first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
    inner, count, rest = length - 2, 0, numpy.empty(0, dtype=kind)
    partial = folder / f"blocks.{os.getpid()}.partial"
    with partial.open("wb") as file:
        for some in _groups(lines):
            found = tokenizer(some, add_special_tokens=False, return_attention_mask=False)["input_ids"]
            flat = numpy.fromiter((token for row in found for token in (*row, last)), dtype=kind)
            rest = numpy.concatenate((rest, flat))
            whole = len(rest) // inner
            blocks = numpy.empty((whole, length), dtype=kind)
            blocks[:, 0], blocks[:, -1] = first, last
            blocks[:, 1:-1] = rest[: whole * inner].reshape(whole, inner)
            file.write(blocks.tobytes())
            rest, count = rest[whole * inner :], count + whole
    if not count:
        partial.unlink()
        raise ValueError(f"texts must fill at least one block of {length} tokens, got fewer")
    partial.replace(folder / "blocks.bin")
    write_json(folder / "blocks.json", {"blocks": count, "length": length, "type": numpy.dtype(kind).name})
    return count


def _groups(lines: Iterable[str]) -> Iterator[list[str]]:
    some: list[str] = []
    for line in lines:
        some.append(line)
        if len(some) == _TOGETHER:
            yield some
            some = []
    if some:
        yield some


class Blocks:
    """The blocks that `pack` wrote, mapped into memory; from block `first` on to `end`."""

    def __init__(self, folder: Path, first: int = 0, end: int | None = None) -> None:
        about = json.loads((folder / "blocks.json").read_text(encoding="utf-8"))
        shape = (about["blocks"], about["length"])
        self.rows = numpy.memmap(folder / "blocks.bin", dtype=about["type"], mode="r", shape=shape)[first:end]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> int:
        return index

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """`input_ids` (block, token) of some blocks."""
        return {"input_ids": torch.from_numpy(self.rows[list(indices)].astype(numpy.int64))}
