"""What a report runs models on: inputs to judge and time them by, and one example whose attention is drawn."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from collab import sources
from collab.running import Batch
from collab.sentences import SENTENCES

MAP_TOKENS = 32
"""Tokens of a text whose attention is drawn, at most."""

_BATCH = 16
_UNKNOWN = 0.2
"""Share of unknown tokens from which on a tokenizer is for another kind of text."""


class LeftOut(Exception):
    """A part of the report that cannot be had; the message is the reason."""


@dataclass(frozen=True)
class Judged:
    """Inputs to judge by.

    Attributes:
        batches: as a model takes them.
        count: how many inputs they hold.
        about: what they are.
    """

    batches: list[Batch]
    count: int
    about: str


@dataclass(frozen=True)
class Example:
    """One input whose attention is drawn.

    Attributes:
        batch: as a model takes it, alone in its batch.
        source: the text, or the name of the image's file.
        tokens: of a text, the tokens that the model reads.
        asked: of a text, the tokens that a decoder starts from, if there is one.
        is_cut: whether the text has more tokens than those.
        pixels: of an image, (3, height, width) as the model sees it, from 0 to 1.
    """

    batch: Batch
    source: str
    tokens: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    is_cut: bool = False
    pixels: Tensor | None = None


def judged_inputs(
    model: nn.Module, folder: Path, inputs: Sequence[str] | Sequence[Path] | None, calibrated_on: str | None = None
) -> Judged:
    """The inputs given, or else sentences that come with this library, for models that know their words.

    Images that are in the folder the conversion was `calibrated_on` are said to be.
    """
    if inputs is not None:
        paths = [one for one in inputs if isinstance(one, Path)]
        if paths:
            batches = list(sources.image_batches(model, str(folder), paths, batch_size=_BATCH))
            is_known = calibrated_on is not None and {path.parent.resolve() for path in paths} == {
                Path(calibrated_on).resolve()
            }
            about = "images of the folder that the conversion was calibrated on" if is_known else "images given"
            return Judged(batches, len(paths), about)
        texts = [one for one in inputs if isinstance(one, str)]
        return Judged(
            list(sources.text_batches(model, str(folder), texts, batch_size=_BATCH)), len(texts), "texts given"
        )
    if sources.reads_images(model):
        raise LeftOut("no images to run the models on; give some (--inputs FOLDER, or --image FILE)")
    batches = list(sources.text_batches(model, str(folder), SENTENCES, batch_size=_BATCH))
    _check_known(folder, batches)
    return Judged(batches, len(SENTENCES), "everyday English sentences that come with collab")


def example_input(
    model: nn.Module, folder: Path, given: str | Path | None, inputs: Sequence[str] | Sequence[Path] | None
) -> Example:
    """The text or image given, or else the first of the inputs, or else the first sentence of this library."""
    chosen = given if given is not None else inputs[0] if inputs else None
    if isinstance(chosen, Path):
        (batch,) = sources.image_batches(model, str(folder), [chosen])
        return Example(batch, chosen.name, pixels=sources.image_as_seen(model, str(folder), chosen))
    if chosen is None and sources.reads_images(model):
        raise LeftOut("no image whose attention could be drawn; give one (--image FILE)")
    text = SENTENCES[0] if chosen is None else chosen
    (batch,) = sources.text_batches(model, str(folder), [text], max_length=MAP_TOKENS)
    if chosen is None:
        _check_known(folder, [batch])
    tokenizer = sources.open_tokenizer(str(folder))
    tokens, asked = (
        [tokenizer.decode([one]).strip() or repr(tokenizer.decode([one])) for one in batch[name][0].tolist()]
        if name in batch else []
        for name in ("input_ids", "decoder_input_ids")
    )  # fmt: skip
    is_cut = len(tokenizer(text, truncation=True, max_length=MAP_TOKENS + 1)["input_ids"]) > batch["input_ids"].shape[1]
    return Example(batch, text, tokens, asked, is_cut)


def _check_known(folder: Path, batches: Sequence[Any]) -> None:
    """Refuse sentences in a language that the tokenizer was not made for."""
    unknown = sources.open_tokenizer(str(folder)).unk_token_id
    if unknown is None:
        return
    strange = sum(int(((batch["input_ids"] == unknown) & (batch["attention_mask"] != 0)).sum()) for batch in batches)
    tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
    if strange > _UNKNOWN * tokens:
        raise LeftOut(
            f"{strange:,} of the {tokens:,} tokens of the sentences that come with collab are unknown to this model; "
            "give texts that are for it (--inputs FILE, --text TEXT)"
        )
