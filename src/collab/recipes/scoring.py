"""What a trained translation model is worth: BLEU of texts, by itself and converted to smaller sizes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from collab.config import CollaborativeConfig
from collab.recipes import processes
from collab.recipes.bleu import bleu
from collab.recipes.packed_text import PAD_ID, Packed
from collab.recipes.token_batches import IGNORED, TokenBatches, shifted
from collab.recipes.translating import translate
from collab.recipes.translation_model import count_trained
from collab.recipes.work import Work, write_json, write_text
from collab.swap import collaborate_

CONVERSIONS = ("weights", "inputs", "refined")
"""How a trained model may be converted: from its weights alone, as in the paper; in the metric of its inputs; that, and
refined on them."""

_PAIRS, _ROWS = 1024, 64
"""Of the training data to calibrate with, and of a batch of them."""


@dataclass
class Scorer:
    """Translates texts with the trained model, or with one converted from it, and scores what comes out.

    Args:
        packed: where the texts are.
        work: where translations are kept.
        device: where to translate.
        is_half: translate in bfloat16 on a CUDA device.
        beams, length_penalty, batch_tokens: as in `translate`.
        seed: of which pairs to calibrate with.
    """

    packed: Packed
    work: Work
    device: torch.device
    is_half: bool = True
    beams: int = 4
    length_penalty: float = 0.6
    batch_tokens: int = 8192
    seed: int = 0
    opened: dict[Path, Any] = field(default_factory=dict)

    def score(self, text: str, model: Path) -> dict[str, Any]:
        """BLEU of one text by a saved model; of several processes the first does it."""
        if not processes.is_main():
            return {}
        if model not in self.opened:
            self.opened = {model: self._ready(open_translator(model))}
        return self._score(text, self.opened[model], self.work.folder_of("score"))

    def convert(self, trained: Path, size: int, how: str, texts: Sequence[str]) -> list[dict[str, Any]]:
        """Convert a saved model, in one of the ways of `CONVERSIONS`, and score it: a row a text."""
        if not processes.is_main():
            return []
        self.opened = {}
        model = open_translator(trained).to(self.device)
        start = time.perf_counter()
        inputs = None if how == "weights" else self.calibration()
        report = collaborate_(
            model, CollaborativeConfig(shared_dim=size, seed=self.seed), calibration=inputs, refine=how == "refined"
        )
        seconds = time.perf_counter() - start
        folder, parameters = self.work.folder_of(f"convert/{size}-{how}"), count_trained(model)
        ready = self._ready(model)
        described = {
            "shared_dim": size,
            "how": how,
            "parameters": parameters,
            "conversion_seconds": seconds,
            "largest_error": max(site.error or 0.0 for site in report.sites),
        }
        return [described | self._score(text, ready, folder) for text in texts]

    def _score(self, text: str, model: Any, folder: Path) -> dict[str, Any]:
        sentences, references = zip(*self.packed.text(text), strict=True)
        start = time.perf_counter()
        found = translate(
            model, self.packed.tokenizer, sentences, beams=self.beams, length_penalty=self.length_penalty,
            batch_tokens=self.batch_tokens,
        )  # fmt: skip
        seconds = time.perf_counter() - start
        write_text(folder / f"{text}.txt", "".join(f"{line}\n" for line in found))
        score = bleu(found, references)
        self.work.say(
            f"{text}: sacreBLEU {score.sacrebleu:.2f} ({score.signature}), BLEU of split compounds "
            f"{score.compound_split:.2f}"
        )
        scored = {"text": text} | score.to_dict() | {"seconds": seconds}
        write_json(folder / f"{text}.bleu.json", scored)
        return scored

    def _ready(self, model: Any) -> Any:
        is_half = self.is_half and self.device.type == "cuda"
        return model.to(self.device, torch.bfloat16 if is_half else torch.float32).eval()

    def calibration(self) -> list[dict[str, Any]]:
        """Pairs of the training data, as the model takes them, with masks that say which are padding."""
        batches = TokenBatches(self.packed, 1 << 20, self.seed)
        chosen = np.random.default_rng(self.seed).permutation(len(batches.data))[:_PAIRS]
        chosen = chosen[np.argsort(batches.widths[chosen], kind="stable")]
        ready = []
        for start in range(0, len(chosen), _ROWS):
            batch = batches.collate(chosen[start : start + _ROWS].tolist())
            ready.append({
                "input_ids": batch["input_ids"],
                "attention_mask": (batch["input_ids"] != PAD_ID).long(),
                "decoder_input_ids": shifted(batch["labels"]),
                "decoder_attention_mask": (batch["labels"] != IGNORED).long(),
            })  # fmt: skip
        return [{name: tensor.to(self.device) for name, tensor in batch.items()} for batch in ready]


def open_translator(folder: Path) -> Any:
    """A saved encoder-decoder, on the CPU."""
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"model must be a folder with a trained model, got {folder}: it has no config.json")
    from transformers import AutoModelForSeq2SeqLM

    return AutoModelForSeq2SeqLM.from_pretrained(folder)
