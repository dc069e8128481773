"""How a model does on a development text while it trains: loss, perplexity and greedy BLEU, a line a look."""

import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from collab.recipes.bleu import bleu
from collab.recipes.packed_text import Packed
from collab.recipes.smoothed_loss import SmoothedLoss, Uncompiled
from collab.recipes.token_batches import padded_pairs, prepare
from collab.recipes.translating import cut, translate


class Development:
    """Looks at a text every so many steps, and keeps what it saw in curve.jsonl.

    Args:
        packed: where the text is.
        name: of the text.
        folder: of curve.jsonl.
        every: steps between two looks.
        sentences: to translate greedily at each; 0 for the loss alone.
        longest: subwords that the model knows positions for; longer sentences are cut.
        rows: pairs of a batch.
    """

    def __init__(
        self, packed: Packed, name: str, folder: Path, every: int, sentences: int, longest: int, rows: int = 128
    ) -> None:
        self.packed, self.pairs, self.every, self.sentences = packed, packed.text(name), every, sentences
        self.path = folder / "curve.jsonl"
        tokenizer = packed.tokenizer
        encoded = [[cut(tokenizer(text).input_ids, longest) for text in pair] for pair in self.pairs]
        encoded.sort(key=lambda pair: max(map(len, pair)))
        self.batches = [
            padded_pairs(*zip(*encoded[start : start + rows], strict=True)) for start in range(0, len(encoded), rows)
        ]

    def after_step(self, step: int, model: nn.Module, is_last: bool = False) -> None:
        """Look, if it is time to."""
        if step % self.every == 0 or is_last:
            self.measure(step, model, "training")

    @torch.no_grad()
    def measure(self, step: int, model: Any, what: str) -> dict[str, Any]:
        """One look, added to the file. The model is left in the mode it was in."""
        device = next(model.parameters()).device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start, was_training = time.perf_counter(), model.training
        model.eval()
        loss, total, count = SmoothedLoss(0.0), torch.zeros((), device=device), 0
        with Uncompiled(model):  # in the precision that it is trained in, which its forward brings with it
            for batch in self.batches:
                on_device = {name: tensor.to(device) for name, tensor in batch.items()}
                total += loss(model, prepare(on_device), 1)
                count += int((batch["labels"] >= 0).sum())
            score = None
            if self.sentences:
                sources, references = zip(*self.pairs[: self.sentences], strict=True)
                found = translate(model, self.packed.tokenizer, sources, beams=1, batch_tokens=16384)
                score = bleu(found, references).sacrebleu
        model.train(was_training)
        mean = float(total) / max(1, count)
        row = {
            "step": step, "what": what, "loss": mean, "perplexity": math.exp(min(mean, 50.0)), "sacrebleu": score,
            "seconds": time.perf_counter() - start,
        }  # fmt: skip
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        return row

    def read(self) -> list[dict[str, Any]]:
        """Every look, the last one where a step was looked at twice, as a run that was stopped and went on does."""
        rows: dict[tuple[int, str], dict[str, Any]] = {}
        if self.path.is_file():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    row = json.loads(line)
                except ValueError:  # cut short
                    continue
                rows[row["step"], row["what"]] = row
        return [rows[key] for key in sorted(rows, key=lambda key: (key[0], key[1] == "averaged"))]
