"""Real inputs for the benchmarks, read straight from archives, and the scores models get on them."""

import csv
import io
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from collab.sources import text_batches

Batch = dict[str, Tensor]
Pairs = list[tuple[str, str, float]]


def read_member(archive: Path, name: str) -> str:
    """The text of one file in a tar archive."""
    with tarfile.open(archive) as opened:
        try:
            file = opened.extractfile(name)
        except KeyError:
            file = None
        if file is None:
            raise ValueError(f"{archive} must hold the file {name}")
        return file.read().decode("utf-8")


def device_of(model: nn.Module) -> torch.device:
    """Where a model is."""
    return next(model.parameters()).device


# Sentences: STS-B, from GLUE.


def read_pairs(archive: Path, split: str = "dev") -> Pairs:
    """STS-B: two sentences, and how alike people found them. `split` is "train" or "dev"."""
    lines = read_member(archive, f"glue/STS-B/sts-{split}.csv").splitlines()
    rows = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    return [(row[5], row[6], float(row[4])) for row in rows]


def sentence_batches(model: nn.Module, folder: Path, sentences: Sequence[str], batch_size: int = 32) -> list[Batch]:
    """Batches of sentences of like length, so that few tokens are padding, in a random order (seed 0)."""
    batches = list(text_batches(model, str(folder), sorted(sentences, key=len), batch_size=batch_size))
    order = np.random.default_rng(0).permutation(len(batches))
    return [{name: part.to(device_of(model)) for name, part in batches[index].items()} for index in order]


def sample_sentences(pairs: Pairs, count: int) -> list[str]:
    """So many different sentences of the pairs, drawn with seed 0."""
    sentences = sorted({sentence for left, right, _ in pairs for sentence in (left, right)})
    if count > len(sentences):
        raise ValueError(f"there are {len(sentences)} different sentences, {count} were asked for")
    chosen = np.random.default_rng(0).permutation(len(sentences))[:count]
    return [sentences[index] for index in chosen]


def spearman(model: nn.Module, folder: Path, pairs: Pairs) -> float:
    """Rank correlation of two sentences' cosine with how alike people found them."""
    left, right, scores = zip(*pairs, strict=True)
    cosines = torch.cosine_similarity(embed(model, folder, left), embed(model, folder, right), dim=-1)
    return float(torch.corrcoef(torch.stack((ranks(cosines), ranks(torch.tensor(scores)))))[0, 1])


def ranks(values: Tensor) -> Tensor:
    """Place of each value in their order; equal values share the mean of their places."""
    _, groups, counts = torch.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2)[groups].double()


@torch.no_grad()
def embed(model: nn.Module, folder: Path, sentences: Sequence[str]) -> Tensor:
    """(sentence, feature): outputs averaged over tokens."""
    order = sorted(range(len(sentences)), key=lambda index: len(sentences[index]))  # little padding, less work
    means = []
    for batch in text_batches(model, str(folder), [sentences[index] for index in order], batch_size=64):
        batch = {name: part.to(device_of(model)) for name, part in batch.items()}
        mask = batch["attention_mask"][..., None].float()
        means.append(((model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)).cpu())
    embedded = torch.cat(means)
    return embedded[torch.tensor(order).argsort()]


# Reactions: USPTO-50k, as SMILES.

_TOKEN = re.compile(r"\[[^\]]+\]|Br|Cl|>>|%\d\d|.")


def prepare_reactions(archive: Path, output: Path) -> int:
    """Write USPTO-50k's reactions in canonical form, without atom numbers, to a smaller archive; returns its size.

    Canonical is what the model was trained on; on other spellings it is wrong about three times as often. Needs RDKit,
    which nothing else here does: hence a step of its own.
    """
    with tarfile.open(output, "w:xz") as written:
        for split in ("valid", "test"):
            rows = csv.reader(read_member(archive, f"uspto50k/raw_{split}.csv").splitlines()[1:])
            content = "".join(f"{canonical(row[2])}\n" for row in rows).encode()
            member = tarfile.TarInfo(f"reactions/{split}.txt")
            member.size = len(content)
            written.addfile(member, io.BytesIO(content))
    return output.stat().st_size


def canonical(reaction: str) -> str:
    """`[CH3:1][OH:2]>>[CH2:1]=[O:2]` is `CO>>C=O`; molecules of a side in the order of their names."""
    from rdkit import Chem

    def molecule(smiles: str) -> str:
        numbered = Chem.MolFromSmiles(smiles)
        for atom in numbered.GetAtoms():
            atom.SetAtomMapNum(0)
        # Read once more: chirality that only the numbers told apart is gone without them.
        return str(Chem.MolToSmiles(Chem.MolFromSmiles(Chem.MolToSmiles(numbered))))

    return ">>".join(".".join(sorted(map(molecule, side.split(".")))) for side in reaction.split(">>"))


def read_reactions(archive: Path, split: str) -> list[str]:
    """What `prepare_reactions` wrote. `split` is "valid" or "test"."""
    return read_member(archive, f"reactions/{split}.txt").splitlines()


class ReactionTokens:
    """From SMILES to ids and back: an atom, a bond or a bracket is a token."""

    def __init__(self, vocabulary: Path) -> None:
        tokens = vocabulary.read_text(encoding="utf-8").split("\n")
        self.ids = {token: index for index, token in enumerate(tokens) if token}

    def encode(self, reaction: str) -> list[int]:
        """Ids with the start and the end marked."""
        unknown = self.ids["[UNK]"]
        inner = [self.ids.get(token, unknown) for token in _TOKEN.findall(reaction)]
        return [self.ids["[CLS]"], *inner, self.ids["[SEP]"]]

    def batches(self, reactions: Sequence[str], *, seed: int, share: float = 0.15, batch_size: int = 32) -> list[Batch]:
        """Padded batches with a share of the tokens masked; `labels` are what was there, -100 elsewhere.

        Reactions of like length go together; the order of the batches is random.
        """
        encoded = sorted((self.encode(reaction) for reaction in reactions), key=len)
        generator = np.random.default_rng(seed)
        batches = []
        for start in range(0, len(encoded), batch_size):
            rows = encoded[start : start + batch_size]
            ids = torch.full((len(rows), len(rows[-1])), self.ids["[PAD]"])
            labels = torch.full_like(ids, -100)
            for row, tokens in enumerate(rows):
                ids[row, : len(tokens)] = torch.tensor(tokens)
                count = max(1, round(share * (len(tokens) - 2)))
                places = torch.from_numpy(1 + generator.permutation(len(tokens) - 2)[:count])
                labels[row, places] = ids[row, places]
                ids[row, places] = self.ids["[MASK]"]
            batches.append({"input_ids": ids, "attention_mask": ids != self.ids["[PAD]"], "labels": labels})
        return [batches[index] for index in generator.permutation(len(batches))]


@torch.no_grad()
def masked_accuracy(model: nn.Module, batches: Sequence[Batch]) -> float:
    """Share of the masked tokens that the model puts first."""
    right = total = 0
    for batch in batches:
        inputs = {name: part.to(device_of(model)) for name, part in batch.items()}
        labels = inputs.pop("labels")
        guesses = model(**inputs).logits.argmax(-1)
        right += int((guesses == labels).sum())
        total += int((labels >= 0).sum())
    return right / total


# Images: Tiny-ImageNet.

_SMALLEST_VIEW = 0.35
"""Share of an image's area that a view of it has at least."""


def read_images(
    archive: Path, *, resize: int = 256, crop: int = 224, limit: int | None = None, cache: Path | None = None
) -> tuple[Tensor, list[str]]:
    """(image, channel, crop, crop) uint8 of all JPEGs in an archive, in its order, and their names.

    Bilinear, as the model of this benchmark was trained with: bicubic costs it more than one point. In the folder
    `cache` decoded images are kept, for programs that read the same ones at the same time or later.
    """
    if cache is not None:
        kept = cache / f"{archive.name}-{resize}-{crop}-{limit or 'all'}.pt"
        if not kept.exists():
            cache.mkdir(parents=True, exist_ok=True)
            draft = kept.with_name(f".{kept.name}.{os.getpid()}")
            torch.save(read_images(archive, resize=resize, crop=crop, limit=limit), draft)
            draft.replace(kept)
        images, names = torch.load(kept, mmap=True)
        return images, names
    with ThreadPoolExecutor() as pool:  # PIL works outside Python's lock

        def files() -> Iterator[tuple[str, bytes]]:
            with tarfile.open(archive, "r|*") as opened:
                for member in opened:
                    file = opened.extractfile(member) if member.name.endswith(".JPEG") else None
                    if file is not None:
                        yield member.name, file.read()

        names, waiting = [], []
        for name, content in files():
            if limit is not None and len(names) == limit:
                break
            names.append(name)
            waiting.append(pool.submit(decode, content, resize, crop))
        if not names:
            raise ValueError(f"{archive} must hold JPEG files, got none")
        images = torch.empty(len(names), 3, crop, crop, dtype=torch.uint8)
        for place, future in zip(images, waiting, strict=True):
            place.copy_(future.result())
    return images, names


def decode(content: bytes, resize: int, crop: int) -> Tensor:
    """(3, crop, crop) uint8: the shorter side resized, then the centre."""
    from PIL import Image

    with Image.open(io.BytesIO(content)) as opened:
        image = opened.convert("RGB")
    scale = resize / min(image.size)
    image = image.resize([round(side * scale) for side in image.size], Image.Resampling.BILINEAR)
    left, top = ((side - crop) // 2 for side in image.size)
    pixels = np.asarray(image.crop((left, top, left + crop, top + crop)))
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)


def validation_labels(archive: Path, names: Sequence[str], classes: dict[str, int]) -> Tensor:
    """(image,) class of each validation image, by val/val_annotations.txt."""
    rows = [line.split("\t") for line in read_member(archive, "val/val_annotations.txt").splitlines()]
    of_file = {row[0]: classes[row[1]] for row in rows}
    return torch.tensor([of_file[name.rsplit("/", 1)[-1]] for name in names])


def pixels(images: Tensor, device: torch.device) -> Tensor:
    """uint8 to what the model reads: mean and standard deviation one half."""
    return images.to(device, torch.float32) / 127.5 - 1


def views(images: Tensor, count: int, device: torch.device, seed: int = 0, chunk: int = 128) -> Iterator[Tensor]:
    """Parts of (count * image, channel, crop, crop) as the model reads them: images as they are, then in other views.

    A view is a part of an image, enlarged, half of the time mirrored; every second one is mixed with another image.
    Trained models are sure of the images they were trained on, and these are some that they have not seen.
    """
    generator = torch.Generator().manual_seed(seed)
    for part in images.split(chunk):
        yield pixels(part, device)
    for _ in range(count - 1):
        order = torch.randperm(len(images), generator=generator)
        for part in images[order].split(chunk):
            yield _view(pixels(part, device), generator)


def _view(images: Tensor, generator: torch.Generator) -> Tensor:
    """A view of each of (image, channel, side, side)."""
    number = len(images)
    side, across, down, mirrored, weight = torch.rand(5, number, generator=generator)
    side = (_SMALLEST_VIEW + (1 - _SMALLEST_VIEW) * side).sqrt()
    place = torch.zeros(number, 2, 3)  # from the view's coordinates to the image's, both from -1 to 1
    place[:, 0, 0], place[:, 1, 1] = side * torch.where(mirrored < 0.5, -1.0, 1.0), side
    place[:, 0, 2], place[:, 1, 2] = (1 - side) * (2 * across - 1), (1 - side) * (2 * down - 1)
    grid = nn.functional.affine_grid(place.to(images.device), list(images.shape), align_corners=False)
    seen = nn.functional.grid_sample(images, grid, padding_mode="border", align_corners=False)
    weight = 0.5 * weight
    weight[::2] = 0.0
    weight = weight.to(images.device)[:, None, None, None]
    return (1 - weight) * seen + weight * seen.roll(1, 0)


@torch.no_grad()
def classify(model: nn.Module, images: Tensor, batch_size: int | None = None) -> Tensor:
    """(image, class) logits, on the CPU."""
    usual = 32 if device_of(model).type == "cpu" else 250  # what stays in a CPU's cache is faster there
    parts = images.split(batch_size or usual)
    return torch.cat([model(pixel_values=pixels(part, device_of(model))).logits.float().cpu() for part in parts])


def top_accuracy(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Per cent of the images whose class is the model's first guess, and among its first five."""
    hits = logits.topk(5).indices == labels[:, None]
    return {"top1": 100 * int(hits[:, 0].sum()) / len(labels), "top5": 100 * int(hits.any(1).sum()) / len(labels)}


def change(logits: Tensor, original: Tensor) -> dict[str, float]:
    """How far guesses are from the original's: mean KL divergence in nats, per cent of images with another first guess.

    Accuracy alone says little of small losses: some of the guesses that change become right.
    """
    log_probs, original_log_probs = logits.double().log_softmax(-1), original.double().log_softmax(-1)
    divergence = (original_log_probs.exp() * (original_log_probs - log_probs)).sum(-1).mean()
    changed = (logits.argmax(-1) != original.argmax(-1)).double().mean()
    return {"divergence": float(divergence), "changed": 100 * float(changed)}


def sample_images(archives: Sequence[Path], output: Path, count: int) -> int:
    """Copy so many training images into a smaller archive, each class in turn; returns its size in bytes."""
    by_class: dict[str, list[tuple[str, bytes]]] = {}
    wanted = -(-count // 200) + 1
    for archive in archives:
        with tarfile.open(archive, "r|*") as opened:
            for member in opened:
                if not member.name.endswith(".JPEG"):
                    continue
                kept = by_class.setdefault(member.name.split("/")[1], [])
                file = opened.extractfile(member) if len(kept) < wanted else None
                if file is not None:
                    kept.append((member.name, file.read()))
    turns = [by_class[name][turn] for turn in range(wanted) for name in sorted(by_class) if turn < len(by_class[name])]
    if len(turns) < count:
        raise ValueError(f"the archives must hold {count} images to take, got {len(turns)}")
    with tarfile.open(output, "w:xz") as written:
        for name, content in turns[:count]:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            written.addfile(member, io.BytesIO(content))
    return output.stat().st_size
