"""Translation from scratch with collaborative or concatenated heads: the paper's section 4.1 and appendix A.

    collab train translation --config paper/configs/translation/collaborative-128.yaml --out runs/collaborative-128

A transformer-base (6 + 6 layers, width 512, 8 heads, feed-forward 2,048, one embedding for both languages and the
output) is trained with Adam (0.9, 0.98), an inverse-square-root schedule, label smoothing and batches of about as many
tokens each; the mean of its last states is scored by beam search, with sacreBLEU and with tokenised BLEU of split
compounds.

`variant` says what heads there are, `key_dim` how large queries and keys are, all heads together, `collaborative_in` in
which of encoder, decoder and cross attention they share; `translation_model.py` says how each is built and why.

Data is any number of line-aligned texts, as `parallel_text.py` reads them; it is packed once, and `--packed` names an
earlier run, or its folder steps/data/packed, which may come from another machine (`prepare_only`), instead.

Steps of a run: `data`, `fit`, `score/TEXT`, and `convert/SIZE-HOW` if a model of concatenated heads is to be converted
after it was trained, or one that was trained before (`--model`). The model is in `model`, which `collab translate` and
transformers open; translations of each text are beside its score.
"""

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from collab.recipes import processes
from collab.recipes.averaging import Averaging
from collab.recipes.bleu import check_installed
from collab.recipes.development import Development
from collab.recipes.fitting_loop import FitResult, fit
from collab.recipes.pace import Pace
from collab.recipes.packed_text import Filters, Packed, pack
from collab.recipes.scoring import CONVERSIONS, Scorer
from collab.recipes.settings import FitSettings, RecipeConfig, check_at_least, check_choice
from collab.recipes.smoothed_loss import SmoothedLoss, compile_layers_
from collab.recipes.token_batches import TokenBatches, prepare
from collab.recipes.translation_model import Architecture, build_model, count_trained
from collab.recipes.work import Work

DEV = "dev"
"""How the text is called that is looked at while training."""

EXAMPLES = [
    "collab train translation --config paper/configs/translation/collaborative-128.yaml --out runs/collaborative-128",
    "collab train translation --train corpus/train --dev corpus/dev --tests corpus/test --key-dim 64 --out runs/64",
    "collab train translation --train datasets:wmt/wmt14/de-en:train --prepare-only true --out runs/data",
    "collab train translation --packed runs/data --variant concatenated --out runs/concatenated",
]
"""For the command line's help."""


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class Config(RecipeConfig):
    """Settings of a translation run; every field's help says what it is."""

    variant: str = _setting("collaborative", "heads: concatenated or collaborative")
    key_dim: int = _setting(512, "dimensions of queries and keys, all heads together; the paper: 512, 256, 128, 64")
    collaborative_in: tuple[str, ...] = _setting(
        ("encoder", "decoder", "cross"), "where collaborative heads share: encoder, decoder, cross"
    )
    mixing: str = _setting("concatenate", "start of collaborative mixing: concatenate, normal, uniform or ones")
    layers: int = _setting(6, "of the encoder, and of the decoder")
    width: int = _setting(512, "of every layer")
    heads: int = _setting(8, "of every layer")
    feed_forward: int = _setting(2048, "width inside a layer's feed-forward block")
    dropout: float = _setting(0.1, "of embeddings and of what each block adds")

    packed: str | None = _setting(
        None, "run that packed its data, or such a folder of data; train, dev and tests are in it"
    )
    train: tuple[str, ...] = _setting(
        (), "sources of pairs: PREFIX, A.en:B.de, ARCHIVE!MEMBER, TABLE.tsv, datasets:..."
    )
    dev: str | None = _setting(None, "source of the pairs to look at while training")
    tests: tuple[str, ...] = _setting((), "sources of the pairs to score, each as NAME=SOURCE or SOURCE")
    source_language: str = _setting("en", "translated from")
    target_language: str = _setting("de", "translated to")
    vocabulary: int = _setting(32768, "subwords of both languages together")
    max_length: int = _setting(100, "longest sentence to train on, in subwords")
    max_ratio: float = _setting(2.5, "how many times as long as the other a sentence may be")
    max_pairs: int | None = _setting(None, "pairs to read of each source; all if not given")
    prepare_only: bool = _setting(False, "stop when the data is packed, in steps/data/packed of the folder")

    steps: int = _setting(100_000, "updates")
    max_seconds: float | None = _setting(
        None, "after so many only the updates between the states that are averaged are still made; all if not given"
    )
    pace: str | None = _setting(
        None, "folder that runs share to keep together: max_seconds counts from the first, all end at the same update"
    )
    batch_tokens: int = _setting(7168, "subwords of a batch of an update, of the longer side, padding counted")
    accumulate: int = _setting(1, "parts to compute an update in, to save memory")
    learning_rate: float = _setting(7e-4, "at its highest")
    warmup_steps: int = _setting(4000, "updates in which it rises")
    label_smoothing: float = _setting(0.1, "share of each label that is spread over all subwords")
    weight_decay: float = _setting(0.0, "of AdamW; without, it is Adam")
    max_grad_norm: float = _setting(0.0, "gradients are scaled down to this norm; 0 leaves them, as the paper did")
    average: int = _setting(5, "last states whose mean is the model")
    average_every: int = _setting(1000, "updates between them")
    compile: bool = _setting(False, "compile the layers with torch.compile: slow to start, faster after")
    workers: int = _setting(1, "processes that prepare batches")
    log_every: int = _setting(100, "updates of a line of the log")
    checkpoint_every: int | None = _setting(5000, "updates between checkpoints; none if not given")
    evaluate_every: int = _setting(1000, "updates between looks at the development text")
    dev_sentences: int = _setting(500, "sentences of it to translate each time, greedily; 0 for its loss alone")

    beams: int = _setting(4, "hypotheses of the search that is scored")
    length_penalty: float = _setting(0.6, "power of the length that log probabilities are divided by")
    score_tokens: int = _setting(8192, "subwords of a batch to translate")
    convert_to: tuple[int, ...] = _setting((), "sizes to convert a model of concatenated heads to, once it is trained")
    model: str | None = _setting(None, "trained model to convert, instead of training one")
    convert_with: tuple[str, ...] = _setting(("weights", "inputs"), "how: by weights, by inputs, refined")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.architecture()
        self.filters()
        self.fit_settings()
        self.texts()
        check_at_least(self, 1, "average", "average_every", "evaluate_every", "beams", "score_tokens", "max_pairs")
        check_at_least(self, 0, "dev_sentences", "max_seconds")
        if self.pace is not None and self.max_seconds is None:
            raise ValueError("pace must come with max_seconds, got none: runs that keep together end when that is over")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must be in [0, 1), got {self.label_smoothing}")
        for how in self.convert_with:
            check_choice("convert_with", how, CONVERSIONS)
        if self.model is not None and not self.convert_to:
            raise ValueError("model must come with convert_to, got no sizes to convert it to")
        if self.model is None and self.convert_to and (self.variant != "concatenated" or self.key_dim != self.width):
            raise ValueError(
                f"convert_to must be for concatenated heads of the full key_dim {self.width}, got {self.variant} "
                f"heads of {self.key_dim}"
            )
        if self.model is None and any(not 1 <= size <= self.width for size in self.convert_to):
            raise ValueError(f"convert_to must be sizes from 1 to the width {self.width}, got {self.convert_to}")
        given = [name for name in ("train", "dev", "tests") if getattr(self, name)]
        if self.packed is not None and given:
            raise ValueError(f"packed must come without {' and '.join(given)}: packed data has them")

    def architecture(self) -> Architecture:
        """The model's part of the settings."""
        names = ("variant", "collaborative_in", "key_dim", "mixing", "layers", "width", "heads", "feed_forward")
        return Architecture(**{name: getattr(self, name) for name in (*names, "dropout")})

    def filters(self) -> Filters:
        """The data's part."""
        return Filters(max_length=self.max_length, max_ratio=self.max_ratio)

    def texts(self) -> dict[str, str]:
        """Name -> source of every text to be scored on or looked at."""
        named = {} if self.dev is None else {DEV: self.dev}
        for test in self.tests:
            name, mark, source = test.partition("=")
            name, source = (name, source) if mark else (re.split(r"[/!:]", test)[-1], test)
            if not re.fullmatch(r"[\w.-]+", name) or name in named:
                raise ValueError(f"tests must be NAME=SOURCE with a NAME of its own each, got {test!r}")
            named[name] = source
        return named

    def fit_settings(self) -> FitSettings:
        """The training loop's part."""
        return FitSettings(
            max_steps=self.steps, learning_rate=self.learning_rate, schedule="inverse_sqrt",
            warmup_steps=self.warmup_steps, adam_betas=(0.9, 0.98), adam_eps=1e-9, weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm, accumulate=self.accumulate, workers=self.workers,
            log_every=self.log_every, checkpoint_every=self.checkpoint_every, seed=self.seed,
            precision=self.precision, device=self.device,
        )  # fmt: skip


def run(config: Config, work: Work) -> dict[str, Any]:
    """Prepare, train, score, convert; returns the metrics of the record."""
    packed = _packed(config, work)
    metrics: dict[str, Any] = {"data": packed.described}
    if config.prepare_only:
        return metrics
    check_installed()
    scored = [name for name in packed.described["texts"] if name != DEV]
    model = work.folder / "model" if config.model is None else Path(config.model)
    scorer = Scorer(
        packed, work, processes.device_named(config.device),
        is_half=config.precision not in ("fp32", "tf32"), beams=config.beams,
        length_penalty=config.length_penalty, batch_tokens=config.score_tokens, seed=config.seed,
    )  # fmt: skip
    if config.model is None:
        metrics |= work.step("fit", lambda: _train(config, packed, work))
        metrics["scores"] = [work.step(f"score/{name}", partial(scorer.score, name, model)) for name in scored]
    metrics["conversions"] = [
        row
        for how in config.convert_with
        for size in config.convert_to
        for row in work.step(f"convert/{size}-{how}", partial(scorer.convert, model, size, how, scored))
    ]
    return metrics


def _packed(config: Config, work: Work) -> Packed:
    """The data, packed now or before."""
    if config.packed is not None:
        packed = Packed.open(config.packed)
        packed.train()  # unpacked once, before many runs ask for it
        return packed
    folder = work.folder_of("data") / "packed"

    def prepare_data() -> Any:
        if not processes.is_main():
            return {}
        return pack(
            folder, train=config.train, texts=config.texts(),
            languages=(config.source_language, config.target_language), vocabulary=config.vocabulary,
            filters=config.filters(), max_pairs=config.max_pairs,
        )  # fmt: skip

    work.step("data", prepare_data)
    return Packed.open(folder)


def _train(config: Config, packed: Packed, work: Work) -> dict[str, Any]:
    """Train, average, and save the model with its tokenizer."""
    folder = work.folder_of("fit")
    batches = TokenBatches(packed, config.batch_tokens, config.seed)
    positions = max(256, 2 * int(batches.lengths.max()))
    model = build_model(config.architecture(), packed.described["vocabulary"], max_length=positions, seed=config.seed)
    if config.compile:
        compile_layers_(model)
    averaging = Averaging(folder / "averaging", config.steps, config.average, config.average_every)
    pace = _pace(config, work)
    development = None
    if DEV in packed.described["texts"]:
        development = Development(packed, DEV, folder, config.evaluate_every, config.dev_sentences, positions)

    def after_step(step: int, trained: nn.Module) -> bool:
        end = None if pace is None else pace.after_step(step)
        averaging.last_step = min(config.steps, end or config.steps)
        averaging.after_step(step, trained)
        is_last = step >= averaging.last_step
        if development is not None and processes.is_main():
            development.after_step(step, trained, is_last)
        return is_last

    loss = SmoothedLoss(config.label_smoothing, config.compile)
    try:
        result = fit(
            model, batches.data, config.fit_settings(), folder,
            collate=batches.collate, batches=batches, on_device=prepare, loss=loss, after_step=after_step,
            progress=work.progress,
        )  # fmt: skip
    finally:
        if pace is not None:
            pace.leave()
    averaged: Sequence[int] = ()
    if processes.is_main():
        averaged = averaging.load_(model)
        if development is not None:
            development.measure(result.steps, model, "averaged")
        model.save_pretrained(work.folder / "model")
        packed.tokenizer.save_pretrained(work.folder / "model")
        averaging.clear()
    curve = [] if development is None else development.read()
    held = 0.0 if pace is None else pace.waited
    return _described(result, model, batches, list(averaged), curve, held)


def _pace(config: Config, work: Work) -> Pace | None:
    """What ends the training after a time, if anything does."""
    if config.max_seconds is None:
        return None
    folder = tempfile.mkdtemp() if config.pace is None else config.pace
    return Pace(Path(folder), work.folder.name, config.max_seconds, notice=(config.average - 1) * config.average_every)


def _described(
    result: FitResult,
    model: nn.Module,
    batches: TokenBatches,
    averaged: list[int],
    curve: list[dict[str, Any]],
    held: float,
) -> dict[str, Any]:
    """What a record says of a training, whose time is without looks at the development text and waits for others."""
    looking = sum(row["seconds"] for row in curve if row["what"] == "training")
    training = max(1e-9, result.seconds - looking - held)
    per_epoch = batches(0)
    pairs = sum(len(batch) for batch in per_epoch)
    target_tokens = int(batches.lengths[1].sum())
    return {
        "parameters": count_trained(model),
        "updates": result.steps,
        "epochs": result.steps / len(per_epoch),
        "training_seconds": training,
        "development_seconds": looking,
        "held_seconds": held,
        "target_tokens_per_second": result.examples_per_second * result.seconds / training * target_tokens / pairs,
        "waiting": result.waiting * result.seconds / training,
        "peak_memory": result.peak_memory,
        "losses": [list(point) for point in result.losses],
        "averaged": averaged,
        "curve": curve,
    }
