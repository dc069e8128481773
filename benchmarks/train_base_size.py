"""Train a language model of BERT-base's size for minutes, to have trained query/key weights of that size to decompose.

    python benchmarks/train_base_size.py pack tokens.npy.xz --europarl europarl.tar.xz --tatoeba tatoeba.txt.xz
    python benchmarks/train_base_size.py train tokens.npy.xz FOLDER --minutes 6

`pack` turns the English sentences of the archives into one row of token ids; `train` needs that file alone, torch and
transformers. The result is the query and key weights and query biases of every layer, in float16, six layers a file.
"""

import argparse
import json
import lzma
import math
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from collab.records import provenance

SEPARATOR = 1
LAYERS_PER_FILE = 6
HELD_BACK = 0.01
"""Share of the tokens, from the end, that is never trained on."""


@dataclass(frozen=True)
class Training:
    """What is trained and how; the defaults are BERT-base's sizes, for minutes on one large GPU."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    length: int = 128
    batch: int = 192
    rate: float = 6e-4
    warm_up: float = 0.05
    weight_decay: float = 0.01
    seed: int = 0


def pack(
    europarl: Path | None, tatoeba: Path | None, limit: int | None = None, vocabulary: int | None = None
) -> np.ndarray:
    """(token,) uint16: all sentences in a random order, each ended by `SEPARATOR`.

    Ids are those of the demo model's tokenizer, renumbered from the most frequent on, so that the vocabulary has no
    token without an occurrence. A limited vocabulary leaves out sentences that have other tokens: a CPU spends most of
    its time on a large one.
    """
    from transformers import AutoTokenizer

    from collab.demo import demo_folder

    tokenizer = AutoTokenizer.from_pretrained(demo_folder())
    sentences = sorted(set(_english(europarl, tatoeba)))
    np.random.default_rng(0).shuffle(sentences)
    sentences = sentences[:limit]
    encoded: list[list[int]] = []
    for start in range(0, len(sentences), 10_000):
        encoded += tokenizer(sentences[start : start + 10_000], add_special_tokens=False)["input_ids"]
        print(f"{len(encoded):,} of {len(sentences):,} sentences", flush=True)
    separator = tokenizer.vocab_size
    if vocabulary is not None:
        frequencies = np.bincount(np.concatenate([np.array(ids, dtype=np.int64) for ids in encoded]))
        known = set(np.argsort(-frequencies, kind="stable")[:vocabulary].tolist())
        encoded = [ids for ids in encoded if known.issuperset(ids)]
    row = np.concatenate([np.array([*ids, separator], dtype=np.int64) for ids in encoded])
    counts = np.bincount(row, minlength=separator + 1)
    counts[separator] = counts.max() + 1
    order = np.argsort(-counts, kind="stable")
    renumbered = np.empty_like(order)
    renumbered[order] = np.arange(len(order)) + SEPARATOR
    return renumbered[row].astype(np.uint16)


def _english(europarl: Path | None, tatoeba: Path | None) -> Iterator[str]:
    if europarl is not None:
        with tarfile.open(europarl) as archive:
            file = archive.extractfile("train400k.en")
            if file is None:
                raise ValueError(f"{europarl} must hold the file train400k.en, got something else of that name")
            yield from file.read().decode("utf-8").splitlines()
    if tatoeba is not None:
        with lzma.open(tatoeba, "rt", encoding="utf-8") as lines:
            yield from (line.split("\t")[0] for line in lines)


def save_tokens(path: Path, tokens: np.ndarray) -> None:
    """An .npy file, compressed."""
    with lzma.open(path, "wb") as file:
        np.save(file, tokens)


def load_tokens(path: Path) -> np.ndarray:
    """(token,) uint16, as `save_tokens` wrote them."""
    with lzma.open(path, "rb") as file:
        tokens: np.ndarray = np.load(file)
    if tokens.dtype != np.uint16 or tokens.ndim != 1:
        raise ValueError(f"{path} must hold a row of uint16, got {tokens.dtype} of shape {tokens.shape}")
    return tokens


def build(training: Training, vocabulary: int) -> nn.Module:
    """A causal language model, with no dropout: minutes of training do not overfit.

    GPT-2's layers have BERT-base's sizes and learn within minutes, where masked language modelling spends as long on a
    plateau on which attention learns nothing.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(training.seed)
    config = GPT2Config(
        vocab_size=math.ceil(vocabulary / 64) * 64,
        n_layer=training.layers,
        n_embd=training.width,
        n_head=training.heads,
        n_positions=training.length,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation="sdpa",
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


class NextTokenLoss(nn.Module):
    """Cross-entropy of every token, given those before it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """`tokens` (batch, token)."""
        scores = self.model(input_ids=tokens).logits[:, :-1]
        return nn.functional.cross_entropy(scores.flatten(0, 1).float(), tokens[:, 1:].flatten())


class Pieces:
    """Random pieces of one long row of tokens, cut on the device, so that it never waits for input."""

    def __init__(self, tokens: np.ndarray, training: Training, device: torch.device) -> None:
        self.row = torch.from_numpy(tokens.astype(np.int32)).to(device)
        self.length, self.batch = training.length, training.batch
        self.places = torch.arange(training.length, device=device)
        self.generator = torch.Generator(device).manual_seed(training.seed)

    def draw(self) -> Tensor:
        """(batch, token) ids."""
        options: dict[str, Any] = {"generator": self.generator, "device": self.row.device}
        starts = torch.randint(len(self.row) - self.length + 1, (self.batch, 1), **options)
        return self.row[starts + self.places].long()


def train(
    tokens: np.ndarray,
    training: Training,
    *,
    minutes: float | None,
    steps: int | None,
    device: torch.device,
    compiled: bool = True,
) -> tuple[nn.Module, dict[str, Any]]:
    """Train for so many minutes (after compiling), or steps; returns the model and what came of it."""
    if (minutes is None) == (steps is None):
        raise ValueError(f"one of minutes and steps must be given, got minutes={minutes} and steps={steps}")
    cut = len(tokens) - max(training.length, round(HELD_BACK * len(tokens)))
    pieces = Pieces(tokens[:cut], training, device)
    held_back = Pieces(tokens[cut:], training, device)
    model = build(training, int(tokens.max()) + 1).to(device).train()
    optimizer = torch.optim.AdamW(_groups(model, training), lr=0.0, betas=(0.9, 0.98), fused=device.type == "cuda")
    plain = NextTokenLoss(model)
    loss_of: nn.Module = plain
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        if compiled:
            loss_of = torch.compile(plain)  # type: ignore[assignment]
    autocast = torch.autocast(device.type, torch.bfloat16)

    def step(share: float) -> Tensor:
        for group in optimizer.param_groups:
            group["lr"] = training.rate * _schedule(share, training.warm_up)
        with autocast:
            loss: Tensor = loss_of(pieces.draw())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    compiling = time.perf_counter()
    for _ in range(3):  # at rate zero: they compile, and change nothing
        first = float(step(0.0))
    print(f"ready after {time.perf_counter() - compiling:.0f} s, loss {first:.3f}", flush=True)
    begin, done, share, curve = time.perf_counter(), 0, 0.0, []
    every = 100 if steps is None else max(1, steps // 10)
    while share < 1:
        loss = step(share)
        done += 1
        if done % every == 0 or steps is not None:
            value = float(loss)  # waits for the device, so only now and then
            seconds = time.perf_counter() - begin
            if done % every == 0:
                curve.append([done, round(seconds, 2), value])
                speed = done * training.batch * training.length / seconds
                print(f"step {done:6d}  {seconds:6.1f} s  loss {value:.4f}  {speed:,.0f} tokens/s", flush=True)
        share = done / steps if steps is not None else (time.perf_counter() - begin) / (60 * (minutes or 0))
    seconds = time.perf_counter() - begin
    with torch.no_grad(), autocast:
        final = float(torch.stack([plain(held_back.draw()) for _ in range(8)]).mean())
    print(f"{done} steps in {seconds:.1f} s, loss on tokens held back {final:.4f}", flush=True)
    outcome = {"steps": done, "seconds": seconds, "first_loss": first, "held_back_loss": final, "curve": curve}
    return model, outcome


def _schedule(share: float, warm_up: float) -> float:
    """Up in a line, down in half a cosine, to a tenth."""
    if share < warm_up:
        return share / warm_up
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (share - warm_up) / (1 - warm_up))))


def _groups(model: nn.Module, training: Training) -> list[dict[str, Any]]:
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    return [{"params": decayed, "weight_decay": training.weight_decay}, {"params": others, "weight_decay": 0.0}]


def query_key_weights(model: nn.Module) -> list[dict[str, Tensor]]:
    """Per layer, in float16: query and key (head * head_dim, width) as nn.Linear keeps them, query_bias."""
    weights = []
    for block in model.transformer.h:
        fused = block.attn.c_attn
        query, key, _ = fused.weight.mT.chunk(3)
        parts = {"query": query, "key": key, "query_bias": fused.bias.chunk(3)[0]}
        weights.append({name: part.detach().half().cpu().contiguous() for name, part in parts.items()})
    return weights


def save_weights(folder: Path, weights: list[dict[str, Tensor]], summary: dict[str, Any]) -> list[Path]:
    """Six layers a file, tensors named `layers.3.query`, and training.json beside them."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for start in range(0, len(weights), LAYERS_PER_FILE):
        layers = range(start, min(start + LAYERS_PER_FILE, len(weights)))
        tensors = {f"layers.{layer}.{name}": part for layer in layers for name, part in weights[layer].items()}
        path = folder / f"query-key-{layers[0]:02d}-{layers[-1]:02d}.safetensors"
        save_file(tensors, path)
        written.append(path)
    (folder / "training.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return written


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    packing = verbs.add_parser("pack", help="turn sentences into one row of token ids")
    packing.add_argument("tokens", type=Path, help="file to write, .npy.xz")
    packing.add_argument("--europarl", type=Path, help="tar archive that holds train400k.en, a sentence a line")
    packing.add_argument("--tatoeba", type=Path, help="xz file, English and German separated by a tab")
    packing.add_argument("--limit", type=int, help="keep so many sentences only")
    packing.add_argument("--vocabulary", type=int, help="keep only sentences of so many of the most frequent tokens")
    training = verbs.add_parser("train", help="train and write the weights")
    training.add_argument("tokens", type=Path, help="what `pack` wrote")
    training.add_argument("folder", type=Path, help="where the weights go")
    training.add_argument("--minutes", type=float)
    training.add_argument("--steps", type=int)
    training.add_argument("--eager", action="store_true", help="on a GPU: do not compile, for the shortest trainings")
    training.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, default in vars(Training()).items():
        training.add_argument("--" + name.replace("_", "-"), type=type(default), default=default)
    options = parser.parse_args()
    if options.verb == "pack":
        packed = pack(options.europarl, options.tatoeba, options.limit, options.vocabulary)
        save_tokens(options.tokens, packed)
        size = options.tokens.stat().st_size / 1e6
        print(f"{len(packed):,} tokens, vocabulary {packed.max() + 1:,}, {size:.1f} MB", flush=True)
        return
    settings = replace(Training(), **{name: getattr(options, name) for name in vars(Training())})
    device = torch.device(options.device)
    tokens = load_tokens(options.tokens)
    length = {"minutes": options.minutes, "steps": options.steps}
    model, outcome = train(tokens, settings, **length, device=device, compiled=not options.eager)
    summary = {
        "training": vars(settings),
        "tokens": len(tokens),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "outcome": outcome,
        "provenance": provenance(seed=settings.seed, device=device),
    }
    for path in save_weights(options.folder, query_key_weights(model), summary):
        print(f"{path}  {path.stat().st_size / 1e6:.1f} MB", flush=True)


if __name__ == "__main__":
    main()
