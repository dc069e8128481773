"""Masked language modelling from scratch: a small ALBERT on English text files, for `collab train glue` to start from.

Texts are tokenised once. A run that was stopped goes on from its newest checkpoint; start it again with the same
settings. The model and its tokenizer end up in the folder `model` of the run.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import collab
from collab.recipes import processes
from collab.recipes.batches import IGNORED, Batch
from collab.recipes.fitting_loop import fit
from collab.recipes.settings import FitSettings, RecipeConfig, check_at_least
from collab.recipes.text_blocks import Blocks, make_tokenizer, pack, read_lines
from collab.recipes.work import Work

EXAMPLES = [
    "collab train mlm --config paper/configs/mlm/albert-europarl.yaml --out runs/albert",
    "collab train mlm --texts english.txt --width 256 --layers 6 --max-steps 20000 --out runs/my-albert",
    "collab train glue --model runs/my-albert/model --task MRPC --out runs/my-albert-mrpc",
]


def _set(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class Config(RecipeConfig):
    """Settings."""

    texts: tuple[str, ...] = _set((), "text files, also packed as .gz, .bz2 or .xz, folders or tar archives")
    only: str = _set("*", "of folders and archives the files whose name matches this, like *.en")
    column: int | None = _set(None, "of lines with tabs in them use this column, from 0; the whole line if not given")
    vocabulary: str = _set("minilm", "minilm: that of the package with that model; new; or a tokenizer's folder")
    vocab_size: int = _set(16384, "of a new vocabulary")
    max_lines: int | None = _set(None, "use the first lines only")
    length: int = _set(128, "tokens of a block")
    layers: int = _set(6, "how many times the shared layer is run")
    width: int = _set(384, "of the hidden states")
    heads: int = _set(6, "attention heads")
    embedding: int = _set(128, "width of the word embeddings")
    feed_forward: int = _set(1536, "width inside the feed-forward")
    shared_dim: int | None = _set(None, "train with collaborative attention of this size; ordinary if not given")
    mixing: str = _set("concatenate", "how its mixing starts")
    dropout: float = _set(0.0, "of hidden states and attention; ALBERT uses none")
    mask_share: float = _set(0.15, "tokens to predict: of these 80 % masked, 10 % other tokens, 10 % as they are")
    batch_size: int = _set(256, "blocks of a step")
    max_steps: int = _set(20000, "steps")
    learning_rate: float = _set(1e-3, "at its highest")
    schedule: str = _set("linear", "linear, cosine, inverse_sqrt or constant")
    warmup_share: float = _set(0.05, "share of the steps in which it rises")
    weight_decay: float = _set(0.01, "of weight matrices")
    adam_betas: tuple[float, float] = _set((0.9, 0.98), "Adam's betas")
    max_grad_norm: float = _set(1.0, "gradients are scaled down to this norm")
    accumulate: int = _set(1, "parts a step is computed in, to save memory")
    workers: int = _set(0, "processes that prepare batches")
    held_back: int = _set(512, "blocks to judge by, at most a tenth of them")
    log_every: int = _set(50, "steps between two lines of the log")
    checkpoint_every: int | None = _set(1000, "steps between checkpoints; none: no checkpoints")
    fsdp: bool = _set(False, "shard the model over the processes too, not only the batches")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.texts:
            raise ValueError("texts must name text files, folders or archives, got none")
        check_at_least(self, 1, "layers", "width", "heads", "embedding", "feed_forward", "batch_size", "max_lines")
        check_at_least(self, 1, "held_back", "vocab_size")
        check_at_least(self, 0, "column")
        check_at_least(self, 8, "length")
        if self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads, got {self.width} and {self.heads}")
        if not 0 < self.mask_share < 1:
            raise ValueError(f"mask_share must be a share in (0, 1), got {self.mask_share!r}")
        self.fit_settings()

    def fit_settings(self) -> FitSettings:
        """How it is trained."""
        return FitSettings(
            batch_size=self.batch_size, max_steps=self.max_steps, learning_rate=self.learning_rate,
            schedule=self.schedule, warmup_share=self.warmup_share, weight_decay=self.weight_decay,
            adam_betas=self.adam_betas, max_grad_norm=self.max_grad_norm, accumulate=self.accumulate,
            workers=self.workers, log_every=self.log_every, checkpoint_every=self.checkpoint_every, seed=self.seed,
            precision=self.precision, device=self.device, fsdp=self.fsdp,
        )  # fmt: skip


def run(config: Config, work: Work) -> dict[str, Any]:
    """Tokenise, train, judge on blocks held back; the model ends up in the folder `model` of the run."""
    tokens, target = work.folder_of("tokens"), work.folder / "model"

    def lines() -> Iterator[str]:
        for number, line in enumerate(read_lines(config.texts, config.only, config.column)):
            if number == config.max_lines:
                return
            yield line

    def tokenise() -> dict[str, int]:
        if not processes.is_main():
            return {}
        tokenizer = make_tokenizer(config.vocabulary, config.vocab_size, lines, tokens)
        return {"blocks": pack(lines(), tokenizer, config.length, tokens), "vocabulary": len(tokenizer)}

    sizes = work.step("tokens", tokenise)
    tokenizer = make_tokenizer(config.vocabulary, config.vocab_size, lines, tokens)
    held = min(config.held_back, max(1, sizes["blocks"] // 10))
    work.say(f"{sizes['blocks']:,} blocks of {config.length} tokens, {held:,} of them held back")

    def train() -> dict[str, Any]:
        device = processes.device_named(config.device)
        learner = MaskedLearner(build(config, tokenizer).to(device), tokenizer, config.mask_share)
        folder = work.folder_of("train")
        train_blocks, judged = Blocks(tokens, held), Blocks(tokens, 0, held)
        before = learner.judge(judged, device)
        done = fit(
            learner, train_blocks, config.fit_settings(), folder, collate=train_blocks.batch,
            on_device=learner.masked, loss=_loss, progress=work.progress,
        )  # fmt: skip
        if processes.is_main():
            learner.model.save_pretrained(str(target))
            tokenizer.save_pretrained(str(target))
        after = learner.judge(judged, device)
        parameters = sum(parameter.numel() for parameter in learner.model.parameters())
        found = {
            "steps": done.steps,
            "training_seconds": done.seconds,
            "waiting": done.waiting,
            "parameters": parameters,
        }
        found |= {"examples_per_second": done.examples_per_second, "peak_memory": done.peak_memory}
        return {"before": before, "after": after, **found, "losses": done.losses}

    return {**sizes, "held_back": held, **work.step("train", train)}


def build(config: Config, tokenizer: Any) -> Any:
    """The model, with weights that follow from the seed."""
    import transformers

    settings = transformers.AlbertConfig(
        vocab_size=len(tokenizer), embedding_size=config.embedding, hidden_size=config.width,
        num_hidden_layers=config.layers, num_attention_heads=config.heads, intermediate_size=config.feed_forward,
        max_position_embeddings=max(512, config.length), hidden_dropout_prob=config.dropout,
        attention_probs_dropout_prob=config.dropout, classifier_dropout_prob=0.1, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.cls_token_id, eos_token_id=tokenizer.sep_token_id,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.seed)
        model = transformers.AlbertForMaskedLM(settings)
    if config.shared_dim is not None:
        collab.collaborate_(
            model,
            collab.CollaborativeConfig(
                shared_dim=config.shared_dim, weights="fresh", mixing=config.mixing, seed=config.seed
            ),
        )
    return model


class MaskedLearner(nn.Module):
    """A masked language model that computes its head at masked tokens alone, the same number in every block."""

    def __init__(self, model: Any, tokenizer: Any, share: float) -> None:
        super().__init__()
        self.model: Any = model
        self.mask, self.vocabulary = int(tokenizer.mask_token_id), len(tokenizer)
        self.special = sorted(tokenizer.all_special_ids)
        self.share = share

    def masked(self, batch: Batch, generator: torch.Generator | None = None) -> Batch:
        """Blocks (block, token) with some tokens hidden; where they are and what they were, both (block, hidden)."""
        ids = batch["input_ids"]
        options: dict[str, Any] = {"device": ids.device, "generator": generator}
        luck = torch.rand(ids.shape, **options)
        for token in self.special:
            luck = luck.masked_fill(ids == token, -1.0)
        count = max(1, round(self.share * (ids.shape[1] - 2)))
        luck, places = luck.topk(count, dim=1)
        targets = ids.gather(1, places)
        other = torch.randint(self.vocabulary, targets.shape, **options)
        fate = torch.rand(targets.shape, **options)
        shown = torch.where(fate < 0.8, self.mask, torch.where(fate < 0.9, other, targets))
        # A block with few ordinary tokens has special ones among the hidden: they stay, and do not count.
        shown, wanted = torch.where(luck < 0, targets, shown), targets.masked_fill(luck < 0, IGNORED)
        return {"input_ids": ids.scatter(1, places, shown), "places": places, "targets": wanted}

    def forward(self, input_ids: Tensor, places: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """(loss, logits at the hidden tokens)."""
        hidden = self.model.albert(input_ids=input_ids)[0]
        chosen = hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[2]))
        logits = self.model.predictions(chosen)
        flat = logits.flatten(0, 1).float()
        return nn.functional.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED), logits

    @torch.no_grad()
    def judge(self, blocks: Blocks, device: torch.device, batch_size: int = 64) -> dict[str, float]:
        """Mean loss and accuracy at hidden tokens, always the same ones."""
        self.eval()
        generator = torch.Generator().manual_seed(0)
        loss = right = count = 0.0
        for start in range(0, len(blocks), batch_size):
            batch = self.masked(blocks.batch(range(start, min(start + batch_size, len(blocks)))), generator)
            batch = {name: value.to(device) for name, value in batch.items()}
            one, logits = self(**batch)
            known = batch["targets"] != IGNORED
            loss += float(one) * int(known.sum())
            right += int((logits.argmax(-1) == batch["targets"])[known].sum())
            count += int(known.sum())
        return {"loss": loss / count, "accuracy": right / count}


def _loss(model: nn.Module, batch: Batch, num_items: Any) -> Tensor:
    """Items are blocks, in each of which as many tokens are hidden: the mean over blocks is that over tokens."""
    loss: Tensor = model(**batch)[0] * (len(batch["input_ids"]) / num_items)
    return loss
