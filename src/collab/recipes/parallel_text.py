"""Pairs of sentences in two languages, from wherever they are: files side by side, archives, tables, `datasets`.

A source of pairs is one string:

    corpus/train                       the files corpus/train.en and corpus/train.de
    corpus/a.en:corpus/a.de            two files by name
    europarl.tar.xz!train400k          the members train400k.en and train400k.de of an archive
    tatoeba.txt.xz                     one file, the two languages with a tab between
    datasets:wmt/wmt14/de-en:train     a split of a set on the hub, by the library `datasets`
    corpus/train[:1000]                the first 1,000 pairs of a source, whichever it is

Files may be packed as .gz, .bz2 or .xz. Line i of one file belongs to line i of the other.
"""

import bz2
import gzip
import lzma
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Pair = tuple[str, str]

ENDINGS = {"en": ("en", "eng"), "de": ("de", "deu", "ger"), "fr": ("fr", "fra"), "cs": ("cs", "ces")}
"""Language -> how files of it end, where that is not its name alone."""

PACKED = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
TABLES = (".tsv", ".txt")
ARCHIVES = (".tar", ".tar.xz", ".tar.gz", ".tgz", ".tar.bz2")


def read_pairs(source: str, languages: tuple[str, str]) -> list[Pair]:
    """All pairs of a source, in order, spaces made single ones; see this file's head for what a source is."""
    whole, count = _first_ones(source)
    if count is not None:
        return read_pairs(whole, languages)[:count]
    if source.startswith("datasets:"):
        pairs = list(_from_datasets(source, languages))
    elif _is_table(Path(source)):
        pairs = _from_table(Path(source))
    else:
        names, texts = _side_by_side(source, languages)
        first, second = (text.split("\n") for text in texts)
        # What ends with a newline has nothing after it.
        first, second = (lines[:-1] if lines[-1] == "" else lines for lines in (first, second))
        if len(first) != len(second):
            raise ValueError(
                f"{names[0]} and {names[1]} must have the same number of lines, got {len(first):,} and {len(second):,}"
            )
        pairs = list(zip(first, second, strict=True))
    pairs = [(" ".join(one.split()), " ".join(other.split())) for one, other in pairs]
    if not any(one and other for one, other in pairs):
        raise ValueError(f"{source} must have pairs of sentences, got {len(pairs)} lines and nothing in them")
    return pairs


def name_of(source: str) -> str:
    """What to call a source: the last part of its name, of an archive and of what is in it.

    Example:
        >>> name_of("data/europarl.tar.xz!train400k[:1000]")
        'europarl train400k'
    """
    source, _ = _first_ones(source)
    if source.startswith("datasets:"):
        return source.removeprefix("datasets:").replace("/", "-").replace(":", "-")
    file, _, member = source.partition("!")
    names = [Path(file if member else file.partition(":")[0]).name, *([Path(member).name] if member else [])]
    for ending in (".xz", ".gz", ".bz2", ".tar", ".tgz", *TABLES):
        names = [name.removesuffix(ending) for name in names]
    return " ".join(names)


def _first_ones(source: str) -> tuple[str, int | None]:
    """A source without the count of pairs to read of it, and that, if it is there; `datasets` has its own."""
    found = None if source.startswith("datasets:") else re.fullmatch(r"(.+)\[:(\d+)\]", source)
    return (source, None) if found is None else (found[1], int(found[2]))


def _is_table(path: Path) -> bool:
    name = path.name.removesuffix(path.suffix) if path.suffix in PACKED else path.name
    return name.endswith(TABLES) and ":" not in str(path) and not Path(path).is_dir()


def _from_table(path: Path) -> list[Pair]:
    pairs = []
    for number, line in enumerate(_read(path).removesuffix("\n").split("\n"), start=1):
        columns = line.split("\t")
        if len(columns) < 2:
            raise ValueError(f"{path}, line {number}, must be two sentences with a tab between, got {line[:80]!r}")
        pairs.append((columns[0], columns[1]))
    return pairs


def _side_by_side(source: str, languages: tuple[str, str]) -> tuple[list[str], list[str]]:
    """Names and texts of the two files."""
    archive, mark, member = source.partition("!")
    if mark:
        return _from_archive(Path(archive), member, languages)
    first, mark, second = source.partition(":")
    if mark:
        return [first, second], [_read(Path(first)), _read(Path(second))]
    found = []
    for language in languages:
        candidates = [
            Path(f"{source}.{ending}{packed}")
            for ending in ENDINGS.get(language, (language,))
            for packed in ("", *PACKED)
        ]
        existing = [path for path in candidates if path.is_file()]
        if not existing:
            raise FileNotFoundError(f"{source} must be there as {candidates[0]}, a file of {language!r}: there is none")
        found.append(existing[0])
    return [str(path) for path in found], [_read(path) for path in found]


def _from_archive(archive: Path, member: str, languages: tuple[str, str]) -> tuple[list[str], list[str]]:
    if not archive.name.endswith(ARCHIVES):
        raise ValueError(f"what stands before ! must be an archive ({', '.join(ARCHIVES)}), got {archive}")
    wanted = [[f"{member}.{ending}" for ending in ENDINGS.get(language, (language,))] for language in languages]
    texts: dict[str, str] = {}
    with tarfile.open(archive) as opened:
        members = []
        for entry in opened:
            members.append(entry.name)
            name = entry.name.removeprefix("./")
            if any(name in names for names in wanted):
                file = opened.extractfile(entry)
                if file is not None:
                    texts[name] = _decoded(file.read(), f"{archive}!{name}")
    found = []
    for names in wanted:
        have = [name for name in names if name in texts]
        if not have:
            raise ValueError(f"{archive} must have {' or '.join(names)}, it has {', '.join(members)}")
        found.append(have[0])
    return [f"{archive}!{name}" for name in found], [texts[name] for name in found]


def _from_datasets(source: str, languages: tuple[str, str]) -> Iterator[Pair]:
    """Rows of the shape the WMT sets have: {"translation": {"en": ..., "de": ...}}."""
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{source} needs the library datasets: pip install datasets", name="datasets"
        ) from error
    # A split may be a part of one, as in train[:1000].
    _, whole, split = (*source.split(":", 2), "", "")[:3]
    if not whole or not split:
        raise ValueError(f"a set of datasets must be datasets:NAME:SPLIT or datasets:NAME/CONFIG:SPLIT, got {source}")
    name, _, config = whole.rpartition("/")
    rows = datasets.load_dataset(name or config, config if name else None, split=split)
    for row in rows:
        pair = row["translation"]
        missing = [language for language in languages if language not in pair]
        if missing:
            raise ValueError(f"{source} must have {' and '.join(languages)}, it has {' and '.join(pair)}")
        yield pair[languages[0]], pair[languages[1]]


def _read(path: Path) -> str:
    opener: Any = PACKED.get(path.suffix, open)
    with opener(path, "rb") as file:
        return _decoded(file.read(), str(path))


def _decoded(text: bytes, name: str) -> str:
    try:
        return text.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} must be UTF-8: {error}") from None
