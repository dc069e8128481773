"""The models that `collab train glue` starts from, by name or folder, each with a new head for a task."""

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from collab.demo import demo_folder
from collab.recipes.glue_data import Examples, Task
from collab.sources import open_tokenizer

HUB_NAMES = {
    "bert-base-cased": "google-bert/bert-base-cased",
    "distilbert-base-cased": "distilbert/distilbert-base-cased",
    "albert-base-v2": "albert/albert-base-v2",
}
"""The paper's models, and where the hub has them."""

MINILM, MINILM_DISTILBERT = "minilm", "minilm-distilbert"


def source_of(name: str) -> str:
    """The folder or hub name that a model's name means."""
    if name in (MINILM, MINILM_DISTILBERT):
        return str(demo_folder())
    folder = Path(name).expanduser()
    return str(folder) if folder.is_dir() else HUB_NAMES.get(name, name)


def open_with_head(name: str, task: Task, seed: int) -> nn.Module:
    """A pretrained model with a head for a task, whose weights follow from the seed."""
    import transformers

    labels = len(task.labels) or 1
    with torch.random.fork_rng(devices=[]), _quiet():
        torch.default_generator.manual_seed(seed)
        if name == MINILM_DISTILBERT:
            body = distilbert_from_bert(transformers.BertModel.from_pretrained(source_of(name), dtype=torch.float32))
            body.config.num_labels = labels
            model: Any = transformers.DistilBertForSequenceClassification(body.config)
            model.distilbert.load_state_dict(body.state_dict())
        else:
            automatic: Any = transformers.AutoModelForSequenceClassification
            model = automatic.from_pretrained(source_of(name), num_labels=labels, dtype=torch.float32)
    found: nn.Module = model.eval()
    return found


def distilbert_from_bert(bert: Any) -> Any:
    """A DistilBERT with a BERT's function where all tokens are of type 0, which is added to the word embeddings."""
    import transformers

    old = bert.config
    config = transformers.DistilBertConfig(
        vocab_size=old.vocab_size, max_position_embeddings=old.max_position_embeddings, dim=old.hidden_size,
        n_layers=old.num_hidden_layers, n_heads=old.num_attention_heads, hidden_dim=old.intermediate_size,
        dropout=old.hidden_dropout_prob, attention_dropout=old.attention_probs_dropout_prob,
        activation=old.hidden_act, pad_token_id=old.pad_token_id, seq_classif_dropout=old.hidden_dropout_prob,
    )  # fmt: skip
    if old.layer_norm_eps != 1e-12:
        raise ValueError(f"layer_norm_eps must be 1e-12, as DistilBERT's is, got {old.layer_norm_eps}")
    model = transformers.DistilBertModel(config)
    parts = {
        "attention.self.query": "attention.q_lin", "attention.self.key": "attention.k_lin",
        "attention.self.value": "attention.v_lin", "attention.output.dense": "attention.out_lin",
        "attention.output.LayerNorm": "sa_layer_norm", "intermediate.dense": "ffn.lin1",
        "output.dense": "ffn.lin2", "output.LayerNorm": "output_layer_norm",
    }  # fmt: skip
    given, state = bert.state_dict(), {}
    words = given["embeddings.word_embeddings.weight"] + given["embeddings.token_type_embeddings.weight"][0]
    state["embeddings.word_embeddings.weight"] = words
    state["embeddings.position_embeddings.weight"] = given["embeddings.position_embeddings.weight"]
    for end in ("weight", "bias"):
        state[f"embeddings.LayerNorm.{end}"] = given[f"embeddings.LayerNorm.{end}"]
        for layer in range(old.num_hidden_layers):
            for theirs, ours in parts.items():
                state[f"transformer.layer.{layer}.{ours}.{end}"] = given[f"encoder.layer.{layer}.{theirs}.{end}"]
    model.load_state_dict(state)
    return model.eval()


class Encoded:
    """Examples as a model reads them, tokenised once.

    Args:
        model: decides what it is given beside the tokens.
        source: where the tokenizer is.
        examples: sentences and labels.
        max_length: tokens to cut an example to.
        is_class: whether labels are classes, not scores.
    """

    def __init__(self, model: nn.Module, source: str, examples: Examples, max_length: int, is_class: bool) -> None:
        tokenizer = open_tokenizer(source)
        texts = [list(column) for column in zip(*examples.sentences, strict=True)]
        taken = inspect.signature(model.forward).parameters
        found = tokenizer(
            *texts, truncation=True, max_length=max_length, return_attention_mask=False,
            return_token_type_ids="token_type_ids" in taken,
        )  # fmt: skip
        self.columns = {
            name: [torch.tensor(row, dtype=torch.int32) for row in rows]
            for name, rows in found.items()
            if name in taken
        }
        self.labels = torch.tensor(examples.labels, dtype=torch.long if is_class else torch.float32)
        self.lengths = [len(row) for row in found["input_ids"]]
        self.pad = int(tokenizer.pad_token_id)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> int:
        return index

    def batch(self, indices: Sequence[int], labelled: bool = True) -> dict[str, Tensor]:
        """Examples as tensors (example, token), padded at the end, and their labels."""
        made = {}
        for name, rows in self.columns.items():
            value = self.pad if name == "input_ids" else 0
            chosen = [rows[index] for index in indices]
            made[name] = pad_sequence(chosen, batch_first=True, padding_value=value).long()
        lengths = torch.tensor([self.lengths[index] for index in indices])
        made["attention_mask"] = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        if labelled:
            made["labels"] = self.labels[list(indices)]
        return made

    def by_length(self, size: int, indices: Sequence[int] | None = None) -> list[list[int]]:
        """Batches of examples of like length, for little padding."""
        order = sorted(range(len(self)) if indices is None else indices, key=lambda index: self.lengths[index])
        return [order[start : start + size] for start in range(0, len(order), size)]


@torch.no_grad()
def predict(model: nn.Module, encoded: Encoded, device: torch.device, batch_size: int = 128) -> Tensor:
    """(example, output) logits, in the order of the examples."""
    model.eval()
    batches = encoded.by_length(batch_size)
    outputs = [
        model(**{name: value.to(device) for name, value in encoded.batch(batch, labelled=False).items()}).logits
        for batch in batches
    ]
    order = torch.tensor([index for batch in batches for index in batch])
    logits = torch.cat(outputs).float().cpu()
    return torch.empty_like(logits).index_copy_(0, order, logits)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without a warning that the head's weights are new: that is what is wanted."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
