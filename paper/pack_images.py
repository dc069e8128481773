"""Pack Tiny-ImageNet, or any small images, into archives small enough to travel.

python paper/pack_images.py OUT --from train-part1.tar.xz train-part2.tar.xz val.tar.xz
python paper/pack_images.py OUT --from DATA --megabytes 55 --train-images 2048

Writes OUT/train.tar.xz and OUT/val.tar.xz, which `collab train vision --data OUT` reads. Validation images are kept as
they are. Training images are too where there is room; else they are written again as WebP, of the highest quality that
fits, which OUT/packed.json names. AVIF is better at the same size, and slower; not every PIL reads it.
"""

import argparse
import io
import json
import lzma
import tarfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from collab.recipes.images import ImageList, find_images, read_image

SAMPLE = 1500
"""Images that qualities are tried on."""

Change = Callable[[bytes], bytes]


def as_format(kind: str, quality: int) -> Change:
    """Write an image again, as "webp" or "avif", in this quality."""

    def change(content: bytes) -> bytes:
        written = io.BytesIO()
        read_image(content).save(written, kind, quality=quality)
        return written.getvalue()

    return change


def changed(images: ImageList, change: Change | None, kind: str = "") -> Iterator[tuple[str, bytes]]:
    """Path in the archive and content of every image, below its class's folder."""
    with ThreadPoolExecutor() as pool:
        contents = ((place, content) for place, content in images.stream())
        work = lambda item: (item[0], item[1] if change is None else change(item[1]))  # noqa: E731
        for place, content in in_parts(pool, work, contents):
            path = Path(images.names[place])
            suffix = path.suffix if change is None else f".{kind}"
            yield f"{images.classes[images.labels[place]]}/{path.stem}{suffix}", content


def in_parts(pool, work, items: Iterable, size: int = 2048) -> Iterator:
    """`work` of every item, some ahead at a time."""
    part = []
    for item in items:
        part.append(item)
        if len(part) == size:
            yield from pool.map(work, part)
            part = []
    yield from pool.map(work, part)


def write(path: Path, split: str, images: ImageList, change: Change | None, kind: str = "") -> int:
    """Write an archive to a temporary name and rename it; its size in bytes."""
    temporary = path.with_name(f".{path.name}.partial")
    with tarfile.open(temporary, "w:xz", preset=6) as written:
        for name, content in changed(images, change, kind):
            member = tarfile.TarInfo(f"{split}/{name}")
            member.size = len(content)
            written.addfile(member, io.BytesIO(content))
    temporary.replace(path)
    return path.stat().st_size


def estimate(images: ImageList, change: Change | None) -> float:
    """Compressed bytes an image, from a sample."""
    sample = images.spread(SAMPLE)
    contents = [content for _, content in changed(sample, change)]
    # In an archive each also has a name, and the last of its blocks is filled up.
    return len(lzma.compress(b"".join(contents))) / len(contents) + 24


def best_quality(images: ImageList, room: float, kind: str) -> int | None:
    """The highest quality at which the images fit into so many bytes; None for as they are."""
    if estimate(images, None) * len(images) <= room:
        return None
    low, high = 1, 95
    if estimate(images, as_format(kind, low)) * len(images) > room:
        raise ValueError(f"{len(images)} images cannot be packed into {room / 2**20:.1f} MiB; take fewer")
    while high - low > 1:
        middle = (low + high) // 2
        if estimate(images, as_format(kind, middle)) * len(images) <= room:
            low = middle
        else:
            high = middle
    return low


def pack(
    data: list[str], output: Path, megabytes: float, train_images: int | None = None, kind: str = "webp"
) -> dict[str, object]:
    """Pack both splits; what was done."""
    output.mkdir(parents=True, exist_ok=True)
    room = megabytes * 2**20
    val = write(output / "val.tar.xz", "val", find_images(data, "val"), None)
    images = find_images(data, "train").spread(train_images)
    quality = best_quality(images, room - val, kind)
    while True:
        change = None if quality is None else as_format(kind, quality)
        train = write(output / "train.tar.xz", "train", images, change, kind)
        if train + val <= room:
            break
        quality = 60 if quality is None else quality - 2
    done = {
        "train_images": len(images), "train_bytes": train, "val_bytes": val,
        "train_format": "as they were" if quality is None else f"{kind}, quality {quality}",
    }  # fmt: skip
    (output / "packed.json").write_text(json.dumps(done, indent=2) + "\n", encoding="utf-8")
    return done


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--from", dest="data", nargs="+", required=True, help="a folder, or archives")
    parser.add_argument("--megabytes", type=float, default=55, help="MiB that both archives may take together")
    parser.add_argument("--train-images", type=int, help="take so many, of each class alike")
    parser.add_argument("--format", choices=("webp", "avif"), default="webp", help="of images that do not fit")
    options = parser.parse_args()
    done = pack(options.data, options.output, options.megabytes, options.train_images, options.format)
    print(json.dumps(done, indent=2))


if __name__ == "__main__":
    main()
