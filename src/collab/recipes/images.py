"""Labelled images: from folders, archives and data sets of the hub to names, labels and bytes.

What is understood of a folder or of archives:

    train/CLASS/*.jpg                  and val/CLASS/*.jpg, as ImageNet has it
    train/CLASS/images/*.JPEG          and val/images/*.JPEG with val/val_annotations.txt, as Tiny-ImageNet has it

Either may be inside one more folder. An archive is a tar file, compressed or not; several, or a folder of them, are
read as if unpacked into one folder. A split that is asked for as `""` is the folder itself: CLASS/*.jpg.
"""

import hashlib
import io
import json
import os
import tarfile
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".avif")
SPLITS = {"train": ("train", "training"), "val": ("val", "valid", "validation", "test")}
"""Split -> the folders it may be in, the first that there is."""

HUB = "datasets:"
"""How the name of a data set of the hub begins; the library `datasets` fetches it."""

_AHEAD = 256
"""Images that are decoded ahead of the one that is taken."""

_KEPT = 2**29
"""Bytes of archives whose images are kept in memory while they are listed, not unpacked once more to be read."""

_ANNOTATIONS = "val_annotations.txt"
_INNER = "images"


@dataclass(frozen=True)
class ImageList:
    """The images of one split, in the order of their names.

    Attributes:
        names: where each is, for messages.
        labels: the place of each one's class in `classes`.
        classes: names of the classes, sorted.
        stream: gives (place, content) of every image, in the order that is quickest to read.
        paths: their files, where they are files.
    """

    names: tuple[str, ...]
    labels: tuple[int, ...]
    classes: tuple[str, ...]
    stream: Callable[[], Iterator[tuple[int, Any]]]
    paths: tuple[Path, ...] | None = None

    def __len__(self) -> int:
        return len(self.names)

    def taken(self, places: Sequence[int]) -> "ImageList":
        """Some of the images, in this order; classes stay as they are."""
        at = {place: new for new, place in enumerate(places)}

        def stream() -> Iterator[tuple[int, Any]]:
            for place, content in self.stream():
                if place in at:
                    yield at[place], content

        return replace(
            self,
            names=tuple(self.names[place] for place in places),
            labels=tuple(self.labels[place] for place in places),
            stream=stream,
            paths=None if self.paths is None else tuple(self.paths[place] for place in places),
        )

    def spread(self, count: int | None) -> "ImageList":
        """At most so many images: as many of each class as of any other, or one more."""
        if count is None or count >= len(self):
            return self
        return self.taken(sorted(each_class_in_turn(self.labels)[:count]))


def each_class_in_turn(labels: Sequence[int]) -> list[int]:
    """Places of all images: the first of each class, then the second of each, and so on."""
    seen: Counter[int] = Counter()
    turns = []
    for place, label in enumerate(labels):
        turns.append((seen[label], label, place))
        seen[label] += 1
    return [place for _, _, place in sorted(turns)]


def find_images(data: Sequence[str], split: str) -> ImageList:
    """The images of a split ("train", "val", or "" for a folder of class folders).

    Args:
        data: a folder, of images or of archives; or archives; or `datasets:NAME`, a data set of the hub.
        split: which images.

    Raises:
        ValueError: there are none, or some have no class.
    """
    if not data:
        raise ValueError("data must name a folder, archives, or datasets:NAME, got nothing")
    if any(one.startswith(HUB) for one in data):
        if len(data) > 1:
            raise ValueError(f"data must be one data set of the hub and nothing else, got {', '.join(data)}")
        return _of_hub(data[0].removeprefix(HUB), split)
    paths = [Path(one).expanduser() for one in data]
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        raise ValueError(
            f"data must be a folder of images, archives of them, or {HUB}NAME; there is no {', '.join(missing)}"
        )
    packed = archives_in(paths[0]) if len(paths) == 1 and paths[0].is_dir() else []
    if packed:
        return _of_archives(packed, split)
    if len(paths) == 1 and paths[0].is_dir():
        return _of_folder(paths[0], split)
    folders = [str(path) for path in paths if path.is_dir()]
    if folders:
        raise ValueError(f"data must be one folder, or archives, got {len(paths)} of which {folders[0]} is a folder")
    return _of_archives(paths, split)


def archives_in(folder: Path) -> list[Path]:
    """The archives in a folder that holds no folder of a split."""
    names = [name for split in SPLITS.values() for name in split]
    if any((folder / name).is_dir() for name in names):
        return []
    return sorted(path for path in folder.iterdir() if path.is_file() and ".tar" in path.suffixes)


def fingerprint(data: Sequence[str], split: str) -> str:
    """What tells these images from others without reading them: names, sizes and times of the files or archives."""
    found: list[Any] = [split]
    for one in data:
        path = Path(one).expanduser()
        if one.startswith(HUB) or not path.exists():
            found.append(one)
            continue
        # The same archives elsewhere are the same.
        archives = [path] if path.is_file() else archives_in(path)
        found += [(archive.name, archive.stat().st_size) for archive in archives]
        if not archives:
            wanted = (*SUFFIXES, ".txt")
            files = sorted(child for child in path.rglob("*") if child.suffix.lower() in wanted)
            found.append([(child.relative_to(path).as_posix(), child.stat().st_size) for child in files])
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]


def read_image(content: Any) -> Any:
    """An image in colour, from the bytes of a file, a path, or an image: grey, CMYK and palettes become RGB.

    Raises:
        OSError: it cannot be read.
    """
    from PIL import Image

    if isinstance(content, Image.Image):
        return content.convert("RGB")
    try:
        with Image.open(io.BytesIO(content) if isinstance(content, bytes) else content) as opened:
            return opened.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # PIL's, of broken files
        raise OSError(str(error) or type(error).__name__) from error


def decoded(images: ImageList, change: Callable[[Any], Any]) -> Iterator[tuple[int, Any]]:
    """(place, `change` of the image in colour or why it cannot be read) of every image, by several threads."""
    waiting: deque[tuple[int, Future[Any]]] = deque()

    def first() -> tuple[int, Any]:
        place, future = waiting.popleft()
        error = future.exception()
        if error is not None and not isinstance(error, OSError):
            raise error
        return place, future.result() if error is None else error

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:  # PIL works outside Python's lock
        for place, content in images.stream():
            waiting.append((place, pool.submit(lambda content: change(read_image(content)), content)))
            if len(waiting) > _AHEAD:
                yield first()
        while waiting:
            yield first()


def _of_folder(folder: Path, split: str) -> ImageList:
    """Images in a folder that holds the split's folder, itself or in its only folder that has one."""
    inside = _split_folder(folder, split)
    files = sorted(path for path in inside.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    names = [path.relative_to(inside).as_posix() for path in files]
    annotations = next(iter(sorted(inside.glob("*annotations.txt"))), None)
    text = annotations.read_text(encoding="utf-8") if annotations is not None else None
    labels, classes = _label(names, text, str(inside))

    def stream() -> Iterator[tuple[int, Any]]:
        return ((place, path.read_bytes()) for place, path in enumerate(files))

    return ImageList(tuple(names), labels, classes, stream, tuple(files))


def _split_folder(folder: Path, split: str) -> Path:
    if not split:
        return folder
    for root in (folder, *sorted(child for child in folder.iterdir() if child.is_dir())):
        for name in SPLITS[split]:
            if (root / name).is_dir():
                return root / name
    inside = ", ".join(sorted(child.name for child in folder.iterdir())[:5]) or "nothing"
    raise ValueError(f"{folder} must hold a folder {' or '.join(SPLITS[split])} with images, it holds {inside}")


def _of_archives(archives: Sequence[Path], split: str) -> ImageList:
    """Images in tar files whose path has the split's folder in it."""
    found: dict[str, tuple[int, str]] = {}
    contents: dict[str, bytes] = {}
    annotations = None
    wanted = SPLITS[split] if split else ()
    is_small = sum(archive.stat().st_size for archive in archives) <= _KEPT
    for number, archive in enumerate(archives):
        for name, inner, read in _members(archive, wanted):
            if inner.endswith(_ANNOTATIONS):
                annotations = read().decode("utf-8")
            elif PurePosixPath(inner).suffix.lower() in SUFFIXES:
                found[inner] = (number, name)
                if is_small:
                    contents[inner] = read()
    where = ", ".join(str(archive) for archive in archives)
    if not found:
        raise ValueError(f"{where} must hold images in a folder {' or '.join(wanted) or 'a class'}, got none")
    names = sorted(found)
    labels, classes = _label(names, annotations, where)
    place_of = {found[inner]: place for place, inner in enumerate(names)}

    def stream() -> Iterator[tuple[int, Any]]:
        if is_small:
            yield from ((place, contents[inner]) for place, inner in enumerate(names))
            return
        for number, archive in enumerate(archives):
            for name, _, read in _members(archive, wanted):
                if (number, name) in place_of:
                    yield place_of[number, name], read()

    return ImageList(tuple(names), labels, classes, stream)


def _members(archive: Path, folders: Sequence[str]) -> Iterator[tuple[str, str, Callable[[], bytes]]]:
    """Name, path below the split's folder, and content of each file of an archive that is in such a folder."""
    try:
        with tarfile.open(archive, "r|*") as opened:
            for member in opened:
                parts = PurePosixPath(member.name).parts
                at = next((place for place, part in enumerate(parts[:-1]) if part in folders), -1)
                if member.isfile() and (at >= 0 or not folders):
                    file = opened.extractfile(member)
                    if file is not None:
                        yield member.name, "/".join(parts[at + 1 :]), file.read
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ValueError(f"{archive} must be a tar file that can be read: {error}") from error


def _label(names: Sequence[str], annotations: str | None, where: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Labels and classes of images by their paths, or by a table of file names and classes."""
    if not names:
        raise ValueError(f"{where} must hold images ({', '.join(SUFFIXES)}), got none")
    listed: dict[str, str] = {}
    if annotations is not None:
        rows = (line.split() for line in annotations.splitlines() if line.strip())
        listed = {row[0]: row[1] for row in rows if len(row) > 1}
    owners: list[str | None] = []
    for name in names:
        *folders, file = name.split("/")
        owners.append(folders[0] if folders and folders[0] != _INNER else listed.get(file))
    strange = [name for name, owner in zip(names, owners, strict=True) if owner is None]
    if strange:
        raise ValueError(
            f"each image of {where} must be in a folder of its class's name, or in {_ANNOTATIONS}; "
            f"{len(strange)} are not, such as {strange[0]}"
        )
    classes = tuple(sorted({owner for owner in owners if owner is not None}))
    at = {name: place for place, name in enumerate(classes)}
    return tuple(at[owner] for owner in owners if owner is not None), classes


def _of_hub(name: str, split: str) -> ImageList:
    """A data set of the hub that has a column of images and one of classes."""
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{HUB}{name} needs datasets: pip install datasets", name=error.name) from error
    loaded: Any = datasets.load_dataset(name)
    candidates = [part for part in SPLITS.get(split, ("train",)) if part in loaded]
    if not candidates:
        raise ValueError(f"{HUB}{name} must have a split {' or '.join(SPLITS[split])}, it has {', '.join(loaded)}")
    rows = loaded[candidates[0]]
    images = [column for column, kind in rows.features.items() if isinstance(kind, datasets.Image)]
    classes = [column for column, kind in rows.features.items() if isinstance(kind, datasets.ClassLabel)]
    if not images or not classes:
        raise ValueError(f"{HUB}{name} must have a column of images and one of classes, it has {list(rows.features)}")
    image, label = images[0], classes[0]
    labels = tuple(rows[label])
    unknown = sum(one is None or one < 0 for one in labels)
    if unknown:
        raise ValueError(f"each image of {HUB}{name} {candidates[0]} must have a class, {unknown} have none")

    def stream() -> Iterator[tuple[int, Any]]:
        return ((place, row[image]) for place, row in enumerate(rows))

    names = tuple(f"{name} {candidates[0]} {place}" for place in range(len(rows)))
    return ImageList(names, labels, tuple(rows.features[label].names), stream)
