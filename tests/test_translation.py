"""Training a translation model: reading and packing pairs, batches, the model's heads, the loop, the scores."""

import json
import lzma
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

pytest.importorskip("accelerate", reason="training needs accelerate")
pytest.importorskip("sacrebleu", reason="scores need sacrebleu")

from collab.recipes import train
from collab.recipes.averaging import Averaging
from collab.recipes.bleu import bleu, split_compounds, tokenise
from collab.recipes.packed_text import PAD_ID, Filters, Packed, pack
from collab.recipes.parallel_text import name_of, read_pairs
from collab.recipes.scoring import open_translator
from collab.recipes.smoothed_loss import SmoothedLoss, Uncompiled, compile_layers_
from collab.recipes.token_batches import IGNORED, TokenBatches, prepare
from collab.recipes.translating import cut, translate
from collab.recipes.translation import Config
from collab.recipes.translation_model import Architecture, build_model, count_trained, place_of

WORDS = {
    "the": "die", "a": "eine", "cat": "Katze", "dog": "Dogge", "sees": "sieht", "likes": "mag", "bird": "Meise",
    "cow": "Kuh", "old": "alte", "big": "große", "small": "kleine", "and": "und",
}  # fmt: skip
SMALL = {"layers": 1, "width": 32, "heads": 4, "feed_forward": 64}
TINY = Architecture(**SMALL, key_dim=32, dropout=0.0)


def sentences(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Made-up sentences and their translations word by word."""
    generator = np.random.default_rng(seed)
    pairs = []
    for _ in range(count):
        words = generator.choice(list(WORDS), size=generator.integers(2, 9), replace=False).tolist()
        pairs.append((" ".join(words) + ".", " ".join(WORDS[word] for word in words) + "."))
    return pairs


def write(folder: Path, name: str, pairs: list[tuple[str, str]]) -> str:
    """Two files side by side; returns their prefix."""
    for language, side in zip(("en", "de"), zip(*pairs, strict=True), strict=True):
        (folder / f"{name}.{language}").write_text("".join(f"{line}\n" for line in side), encoding="utf-8")
    return str(folder / name)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    folder = tmp_path_factory.mktemp("packed")
    source, test = write(folder, "train", sentences(60)), write(folder, "test", sentences(5, seed=1))
    pack(
        folder / "packed", train=[source], texts={"dev": test, "test": test}, languages=("en", "de"), vocabulary=320,
        filters=Filters(max_length=64),
    )  # fmt: skip
    return Packed.open(folder / "packed")


# reading pairs


def test_pairs_are_read_from_wherever_they_are(tmp_path: Path) -> None:
    pairs = [("One  house.", "Ein Haus."), ("Two\u2028houses.", "Zwei Häuser.")]
    clean = [("One house.", "Ein Haus."), ("Two houses.", "Zwei Häuser.")]
    prefix = write(tmp_path, "text", pairs)
    with tarfile.open(tmp_path / "text.tar.xz", "w:xz") as archive:
        archive.add(f"{prefix}.en", "in/text.eng")
        archive.add(f"{prefix}.de", "in/text.deu")
    with lzma.open(tmp_path / "table.txt.xz", "wt", encoding="utf-8") as file:
        file.write("".join(f"{one}\t{other}\tCC-BY\n" for one, other in pairs))
    sources = [prefix, f"{prefix}.en:{prefix}.de", f"{tmp_path}/text.tar.xz!in/text", f"{tmp_path}/table.txt.xz"]
    assert [read_pairs(source, ("en", "de")) for source in sources] == [clean] * 4
    assert [read_pairs(f"{source}[:1]", ("en", "de")) for source in sources] == [clean[:1]] * 4
    assert [name_of(source) for source in (*sources[1:], "a.tar.xz!in/text[:9]")] == [
        "text.en",
        "text text",
        "table",
        "a text",
    ]
    assert read_pairs(prefix, ("de", "en")) == [(other, one) for one, other in clean]


def test_bad_texts_are_named(tmp_path: Path) -> None:
    prefix = write(tmp_path, "text", sentences(3))
    with Path(f"{prefix}.de").open("a", encoding="utf-8") as file:
        file.write("noch eine Zeile\n")
    with pytest.raises(ValueError, match=r"text\.en and .*text\.de must have the same number of lines, got 3 and 4"):
        read_pairs(prefix, ("en", "de"))
    for language in ("en", "de"):
        (tmp_path / f"empty.{language}").write_text("")
    with pytest.raises(ValueError, match="empty must have pairs of sentences, got 0 lines"):
        read_pairs(str(tmp_path / "empty"), ("en", "de"))
    with pytest.raises(FileNotFoundError, match=r"missing must be there as .*missing\.en"):
        read_pairs(str(tmp_path / "missing"), ("en", "de"))
    (tmp_path / "latin.tsv").write_bytes("greetings\tGrüße\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.tsv must be UTF-8: .* byte 0xfc"):
        read_pairs(str(tmp_path / "latin.tsv"), ("en", "de"))
    (tmp_path / "table.tsv").write_text("one\teins\ntwo\n")
    with pytest.raises(ValueError, match=r"table\.tsv, line 2, must be two sentences with a tab between, got 'two'"):
        read_pairs(str(tmp_path / "table.tsv"), ("en", "de"))
    with tarfile.open(tmp_path / "text.tar", "w") as archive:
        archive.add(f"{prefix}.en", "a.en")
    with pytest.raises(ValueError, match=r"text\.tar must have a\.de or a\.deu or a\.ger, it has a\.en"):
        read_pairs(f"{tmp_path}/text.tar!a", ("en", "de"))


def test_pairs_are_read_from_sets_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, config: str | None, split: str) -> list[dict[str, Any]]:
        asked.append((name, config, split))
        return [{"translation": {"de": "Ein Haus.", "en": "A house."}}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert read_pairs("datasets:wmt/wmt14/de-en:train[:9]", ("en", "de")) == [("A house.", "Ein Haus.")]
    read_pairs("datasets:wmt14:test", ("en", "de"))
    assert asked == [("wmt/wmt14", "de-en", "train[:9]"), ("wmt14", None, "test")]
    with pytest.raises(ValueError, match="must have en and fr, it has de and en"):
        read_pairs("datasets:wmt14:test", ("en", "fr"))
    with pytest.raises(
        ValueError, match="must be datasets:NAME:SPLIT or datasets:NAME/CONFIG:SPLIT, got datasets:wmt14"
    ):
        read_pairs("datasets:wmt14", ("en", "de"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match="needs the library datasets: pip install datasets"):
        read_pairs("datasets:wmt14:test", ("en", "de"))


# packing


def test_packed_text_is_the_text(packed: Packed) -> None:
    lengths, starts, subwords = packed.train()

    def text(side: int, pair: int) -> str:
        begin = starts[side, pair]
        return packed.tokenizer.decode(subwords[begin : begin + lengths[side, pair]], skip_special_tokens=True).strip()

    found = [(text(0, pair), text(1, pair)) for pair in range(lengths.shape[1])]
    assert found == list(dict.fromkeys(sentences(60)))
    assert packed.text("test") == sentences(5, seed=1)
    assert packed.tokenizer("a cat").input_ids[-1] == packed.tokenizer.eos_token_id
    assert Packed.open(packed.folder).described["tokens"] == [int(lengths[0].sum()), int(lengths[1].sum())]


def test_pairs_not_worth_training_on_are_counted_by_reason(tmp_path: Path) -> None:
    good = sentences(30)
    bad = [
        good[0], ("same", "same"), ("", "nichts"), ("cat " * 80, "Katze " * 80), ("cat", "Katze " * 30),
        sentences(5, seed=1)[0],
    ]  # fmt: skip
    described = pack(
        tmp_path / "packed", train=[write(tmp_path, "train", good + bad)],
        texts={"test": write(tmp_path, "test", sentences(5, seed=1))}, languages=("en", "de"), vocabulary=320,
        filters=Filters(max_length=50),
    )  # fmt: skip
    reasons = {
        "duplicate": 1, "identical": 1, "empty": 1, "too long": 1, "lengths too different": 1,
        "in a text to be scored on": 1,
    }  # fmt: skip
    assert described["dropped"] == reasons
    assert described["pairs"] == 30
    with pytest.raises(ValueError, match=r"no pair is left to train on; dropped: \{'identical': 1\}"):
        pack(
            tmp_path / "none", train=[write(tmp_path, "same", [("same", "same")])], texts={}, languages=("en", "de"),
            vocabulary=320, filters=Filters(),
        )  # fmt: skip
    with pytest.raises(FileNotFoundError, match=r"must be a run that packed its data, or a folder with a packed\.json"):
        Packed.open(tmp_path)


def test_batches_hold_every_pair_in_few_shapes(packed: Packed) -> None:
    batches = TokenBatches(packed, tokens=128, seed=3)
    shapes = set()
    for epoch in range(3):
        found = batches(epoch)
        assert {pair for batch in found for pair in batch} == set(range(len(batches.data)))
        shapes |= {tuple(batches.collate(batch)["input_ids"].shape) for batch in found}
    assert len(shapes) == len(np.unique(batches.widths))
    assert all(rows * width <= 128 for rows, width in shapes)
    assert batches(1) == TokenBatches(packed, tokens=128, seed=3)(1)
    assert batches(1) != batches(0)
    lengths, starts, subwords = packed.train()
    batch = prepare(batches.collate([4, 9]))
    for row, pair in enumerate((4, 9)):
        source, target = (
            subwords[starts[side, pair] : starts[side, pair] + lengths[side, pair]].tolist() for side in (0, 1)
        )
        assert [token for token in batch["input_ids"][row].tolist() if token != PAD_ID] == source
        assert [token for token in batch["labels"][row].tolist() if token != IGNORED] == target
        assert batch["decoder_input_ids"][row, : len(target)].tolist() == [PAD_ID, *target[:-1]]
        assert int(batch["attention_mask"][row].sum()) == len(source)
    with pytest.raises(ValueError, match=r"batch_tokens must be at least the longest sentence, \d+, got 4"):
        TokenBatches(packed, tokens=4, seed=0)


# the model


def test_concatenated_heads_of_a_reduced_key_are_ordinary_attention_of_that_size() -> None:
    """16 dimensions for 4 heads: 4 each, scale 1 / sqrt(4), and a query bias that the content term holds exactly."""
    model = build_model(Architecture(**SMALL, variant="concatenated", key_dim=16), 64).eval()
    layer = model.model.encoder.layers[0].self_attn
    hidden = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    key_weight, bias = layer.k_proj.weight[:16], torch.randn(16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        # Scores are multiplied by the host's scale of 1 / sqrt(8): what a head of 4 has more is in its weights.
        content = torch.einsum("hdw,hd->hw", key_weight.unflatten(0, (4, 4)), bias.unflatten(0, (4, 4))) * 2**0.5
        layer.k_proj.weight[16:] = content
    query = functional.linear(hidden, layer.q_proj.weight, bias)
    key = functional.linear(hidden, key_weight)
    value = layer.v_proj(hidden)
    query, key, value = (tensor.unflatten(-1, (4, -1)).transpose(1, 2) for tensor in (query, key, value))
    context = functional.scaled_dot_product_attention(query, key, value)  # scale 1 / sqrt(4), its own
    expected = layer.out_proj(context.transpose(1, 2).flatten(-2))
    torch.testing.assert_close(layer(hidden)[0], expected, atol=1e-5, rtol=1e-5)
    assert not layer.mixing.requires_grad
    assert layer.mixing_dims.tolist() == torch.arange(16).view(4, 4).tolist()


def test_heads_are_what_was_asked_for_where_it_was_asked() -> None:
    def kinds(**settings: Any) -> dict[str, str]:
        model = build_model(Architecture(**SMALL, **settings), 64)
        found = {}
        for path, module in model.named_modules():
            if path.endswith("attn"):
                shared = getattr(module, "mixing", None)
                is_trained = shared is not None and shared.requires_grad
                found[place_of(path)] = "ordinary" if shared is None else "shared" if is_trained else "frozen"
        return found

    places = ("encoder", "decoder", "cross")
    assert kinds(variant="concatenated", key_dim=32) == dict.fromkeys(places, "ordinary")
    assert kinds(variant="concatenated", key_dim=8) == dict.fromkeys(places, "frozen")
    assert kinds(key_dim=8) == dict.fromkeys(places, "shared")
    mixed = kinds(key_dim=8, collaborative_in=("cross",))
    assert mixed == {"encoder": "frozen", "decoder": "frozen", "cross": "shared"}


def test_parameters_are_those_of_the_paper_at_every_size() -> None:
    """In millions, with the paper's vocabulary of about 32 thousand subwords: a model without weights is enough."""
    with torch.device("meta"):
        from transformers import MarianConfig, MarianMTModel

        ordinary = MarianMTModel(MarianConfig(
            vocab_size=32768, d_model=512, encoder_layers=6, decoder_layers=6, encoder_attention_heads=8,
            decoder_attention_heads=8, encoder_ffn_dim=2048, decoder_ffn_dim=2048, pad_token_id=0,
        ))  # fmt: skip
    whole = count_trained(ordinary)
    assert round(whole / 1e6, 1) == 60.9
    small = [build_model(Architecture(**SMALL, key_dim=size), 64) for size in (32, 8)]
    # Two projections of 32 for each of 3 layers, and a row of mixing for each of 4 heads.
    assert count_trained(small[0]) - count_trained(small[1]) == 3 * (2 * 32 + 4) * (32 - 8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"variant": "other"}, r"variant must be one of \['concatenated', 'collaborative'\], got 'other'"),
        ({"collaborative_in": ("decoders",)}, "collaborative_in must be some of .*, got decoders"),
        ({"key_dim": 1024}, "key_dim must be at most the width 512, got 1024"),
        ({"key_dim": 100, "variant": "concatenated"}, "key_dim must be divisible by heads 8 .*, got 100"),
        ({"key_dim": 100, "collaborative_in": ("cross",)}, "key_dim must be divisible by heads 8 .*, got 100"),
        ({"mixing": "gaussian"}, "mixing must be one of .*, got 'gaussian'"),
        ({"label_smoothing": 1.0}, r"label_smoothing must be in \[0, 1\), got 1.0"),
        ({"convert_to": (64,)}, "convert_to must be for concatenated heads of the full key_dim 512, got collaborative"),
        ({"convert_to": (1024,), "variant": "concatenated"}, "convert_to must be sizes from 1 to the width 512"),
        ({"convert_with": ("magic",)}, "convert_with must be one of weights, inputs, refined, got 'magic'"),
        ({"pace": "folder"}, "pace must come with max_seconds, got none"),
        ({"model": "folder"}, "model must come with convert_to, got no sizes"),
        ({"packed": "a", "train": ("b",), "dev": "c"}, "packed must come without train and dev"),
        ({"tests": ("a=x", "a=y")}, "tests must be NAME=SOURCE with a NAME of its own each, got 'a=y'"),
        ({"max_ratio": 0.5}, "max_ratio must be at least 1, got 0.5"),
        ({"beams": 0}, "beams must be at least 1, got 0"),
    ],
)  # fmt: skip
def test_bad_settings_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**settings)


# training


def test_the_loss_is_the_smoothed_one_and_does_not_see_padding(packed: Packed) -> None:
    model = build_model(TINY, 320).eval()
    batches = TokenBatches(packed, tokens=256, seed=0)
    chosen = batches(0)[0]
    batch = prepare(batches.collate(chosen))
    found = SmoothedLoss(0.1)(model, batch, 7)
    logs = model(**{name: batch[name] for name in batch if name != "labels"}).logits.log_softmax(-1)
    total = torch.zeros(())
    for row, labels in zip(logs, batch["labels"], strict=True):
        for log, label in zip(row, labels.tolist(), strict=True):
            if label != IGNORED:
                total -= 0.9 * log[label] + 0.1 * log.mean()
    torch.testing.assert_close(found, total / 7, rtol=1e-4, atol=1e-4)
    wider = {
        "input_ids": functional.pad(batch["input_ids"], (0, 3), value=PAD_ID),
        "labels": functional.pad(batch["labels"], (0, 3), value=IGNORED),
    }
    torch.testing.assert_close(SmoothedLoss(0.1)(model, prepare(wider), 7), found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("settings", [{"variant": "concatenated", "key_dim": 8}, {"key_dim": 16}])
def test_layers_are_compiled_once_for_any_shape(
    packed: Packed, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, with the first shape and then for all; and they give way where a model generates."""
    from torch._dynamo.utils import counters

    compile_ = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda layer: compile_(layer, backend="eager", fullgraph=True))
    torch._dynamo.reset()
    counters.clear()
    model = build_model(Architecture(**SMALL | {"layers": 2}, dropout=0.0, **settings), 320).train()
    batches = TokenBatches(packed, tokens=256, seed=0)
    ready = [prepare(batches.collate(pairs)) for pairs in {len(batch): batch for batch in batches(0)}.values()]
    assert len(ready) >= 3
    loss = SmoothedLoss(0.1)
    expected = [loss(model, batch, 9).item() for batch in ready]
    compile_layers_(model)
    assert [loss(model, batch, 9).item() for batch in ready] == pytest.approx(expected, rel=1e-5)
    assert counters["stats"]["unique_graphs"] <= 4  # encoder and decoder layers, twice each
    with Uncompiled(model):
        assert model.model.encoder.layers[0]._compiled_call_impl is None
    assert model.model.encoder.layers[0]._compiled_call_impl is not None


def test_the_average_is_of_the_last_steps(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    averaging = Averaging(tmp_path, last_step=10, count=3, every=2)
    for step in range(1, 11):
        torch.nn.init.constant_(model.weight, step)
        averaging.after_step(step, model)
    assert averaging.steps == [6, 8, 10]
    assert averaging.load_(model) == [6, 8, 10]
    assert model.weight.unique().tolist() == [8.0]
    averaging.clear()
    with pytest.raises(FileNotFoundError, match=r"must hold weights of the steps \[6, 8, 10\]"):
        averaging.load_(model)


def config(packed: Packed | None, **settings: Any) -> Config:
    """A tiny run without dropout."""
    given = {
        **SMALL, "key_dim": 16, "dropout": 0.0, "packed": packed and str(packed.folder), "batch_tokens": 512,
        "warmup_steps": 10, "learning_rate": 0.01, "steps": 2, "average": 1, "average_every": 1,
        "evaluate_every": 100, "log_every": 1, "device": "cpu", "workers": 0, "dev_sentences": 0,
        "checkpoint_every": None,
    }  # fmt: skip
    return Config(**(given | settings))


@pytest.mark.parametrize(
    ("variant", "losses"), [("collaborative", [6.553717, 6.462175]), ("concatenated", [6.549788, 6.455694])]
)
def test_the_first_two_losses_are_what_they_were(packed: Packed, tmp_path: Path, variant: str, losses: Any) -> None:
    record = train(config(packed, variant=variant), tmp_path / "run", progress=False)
    assert [loss for _, loss in record.metrics["losses"]] == pytest.approx(losses, rel=1e-3)


def test_a_run_that_was_stopped_ends_where_it_would_have(
    packed: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(packed, steps=5, dropout=0.1, checkpoint_every=2, average=2, evaluate_every=1)
    whole = train(settings, tmp_path / "whole", progress=False)
    after_step = Averaging.after_step

    def stop(self: Averaging, step: int, model: torch.nn.Module) -> None:
        after_step(self, step, model)
        if step == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Averaging, "after_step", stop)
        with pytest.raises(KeyboardInterrupt):
            train(settings, tmp_path / "stopped", progress=False)
    again = train(settings, tmp_path / "stopped", progress=False)
    assert again.metrics["losses"] == whole.metrics["losses"]
    assert [row["loss"] for row in again.metrics["curve"]] == [row["loss"] for row in whole.metrics["curve"]]
    assert len(again.metrics["curve"]) == 6
    files = [tmp_path / name / "model" / "model.safetensors" for name in ("whole", "stopped")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_runs_that_are_out_of_time_end_together(packed: Packed, tmp_path: Path) -> None:
    """The first after ten updates, 20 for others to notice, and 4 for states that are averaged; the second as well."""
    settings = config(packed, steps=500, max_seconds=0, pace=str(tmp_path / "pace"), average=3, average_every=2)
    for name in ("first", "second"):
        metrics = train(settings, tmp_path / name, progress=False).metrics
        assert metrics["updates"] == 40
        assert metrics["averaged"] == [36, 38, 40]
        assert [row["step"] for row in metrics["curve"]] == [40, 40]
        assert metrics["losses"][-1][0] == 40
    assert not list((tmp_path / "pace").glob("*.step"))
    shorter = config(packed, steps=20, max_seconds=0, pace=str(tmp_path / "pace"), average=3, average_every=2)
    assert train(shorter, tmp_path / "shorter", progress=False).metrics["averaged"] == [16, 18, 20]


def test_a_model_learns_its_sentences_by_heart_and_says_them_again(packed: Packed, tmp_path: Path) -> None:
    """Through `collab train` and `collab translate`, then converted to smaller sizes."""
    from typer.testing import CliRunner

    import collab.train_commands
    import collab.translate_commands  # noqa: F401
    from collab.commands import app

    few = sentences(12)
    source = write(tmp_path, "few", few)
    other = write(tmp_path, "other", [(f"{one} {one}", f"{two} {two}") for one, two in few[:3]])
    arguments = {
        "train": source, "dev": other, "tests": f"few={other}", "vocabulary": 320, "steps": 200, "learning_rate": 0.005,
        "batch_tokens": 1024,
        "variant": "concatenated", "key_dim": 32, "convert_to": "32,8", "label_smoothing": 0, "average": 2,
        "evaluate_every": 60, "dev_sentences": 2, "max_length": 64,
    }  # fmt: skip
    given = config(packed).to_dict()
    shared = (
        "layers",
        "width",
        "heads",
        "feed_forward",
        "dropout",
        "warmup_steps",
        "learning_rate",
        "device",
        "workers",
    )
    values = {name: given[name] for name in shared} | arguments
    options = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    results = tmp_path / "results.jsonl"
    done = CliRunner().invoke(
        app, ["train", "translation", "--out", str(tmp_path / "run"), "--results", str(results), *options, "--quiet"]
    )
    assert done.exit_code == 0, done.output
    metrics = json.loads(results.read_text())["metrics"]
    assert [(row["shared_dim"], row["how"]) for row in metrics["conversions"]] == [
        (32, "weights"), (8, "weights"), (32, "inputs"), (8, "inputs"),
    ]  # fmt: skip
    assert metrics["conversions"][0]["largest_error"] == 0
    assert metrics["conversions"][0]["sacrebleu"] == metrics["scores"][0]["sacrebleu"]
    assert [row["text"] for row in (*metrics["scores"], *metrics["conversions"])] == ["few"] * 5
    assert "nrefs:1" in done.stdout  # the signature is told
    assert metrics["updates"] == 200
    assert metrics["parameters"] > metrics["conversions"][1]["parameters"]
    later = CliRunner().invoke(
        app,
        [
            "train", "translation", "--packed", str(tmp_path / "run"), "--model", str(tmp_path / "run" / "model"),
            "--convert-to", "8", "--convert-with", "inputs", "--device", "cpu", "--out", str(tmp_path / "later"),
            "--json", "--quiet",
        ],
    )  # fmt: skip
    assert later.exit_code == 0, later.output
    assert "scores" not in json.loads(later.stdout)["metrics"]
    (again,) = json.loads(later.stdout)["metrics"]["conversions"]
    timed = ("seconds", "conversion_seconds")
    assert {key: value for key, value in again.items() if key not in timed} == {
        key: value for key, value in metrics["conversions"][3].items() if key not in timed
    }
    told = CliRunner().invoke(
        app, ["translate", str(tmp_path / "run" / "model"), f"{source}.en", "--batch-tokens", "30"]
    )
    assert told.exit_code == 0, told.output
    assert told.stdout.splitlines() == [translation for _, translation in few]
    asked = CliRunner().invoke(
        app, ["translate", str(tmp_path / "run" / "model"), "--text", few[0][0], "--text", "", "--json", "--beams", "1"]
    )
    assert json.loads(asked.stdout)["translations"] == [few[0][1], ""]
    saved = tmp_path / "saved.de"
    CliRunner().invoke(app, ["translate", str(tmp_path / "run" / "model"), "-", "--save", str(saved)], input=few[1][0])
    assert saved.read_text() == f"{few[1][1]}\n"
    assert not list(tmp_path.glob(".*.partial"))
    told = CliRunner().invoke(app, ["translate", str(tmp_path / "run" / "model"), "-"], input="Grüße".encode("latin-1"))
    assert told.exit_code == 2
    assert "the standard input must be UTF-8" in told.output
    told = CliRunner().invoke(
        app, ["translate", str(tmp_path / "run" / "model"), "--text", "a", "--save", str(tmp_path)]
    )
    assert told.exit_code == 2
    assert "--save must be a file in a directory" in told.output
    both = CliRunner().invoke(app, ["translate", str(tmp_path / "run" / "model"), "-", "--text", "a"])
    assert both.exit_code == 2
    assert "give either a FILE, - or --text, got both" in both.output


def test_data_alone_is_prepared_and_used_from_elsewhere(tmp_path: Path) -> None:
    settings = {"train": (write(tmp_path, "train", sentences(40)),), "vocabulary": 320, "device": "cpu"}
    record = train(Config(**settings, prepare_only=True), tmp_path / "data", progress=False)
    assert record.metrics["data"]["pairs"] == 40
    assert Packed.open(tmp_path / "data").described == record.metrics["data"]
    folder = tmp_path / "elsewhere"
    (tmp_path / "data" / "steps" / "data" / "packed").rename(folder)
    lengths, _, _ = Packed.open(folder).train()
    assert lengths.shape == (2, 40)


def test_what_is_empty_stays_empty_and_the_model_as_it_was(packed: Packed) -> None:
    model = build_model(TINY, 320).train()
    found = translate(model, packed.tokenizer, ["", "a cat", "  "], batch_tokens=64)
    assert [bool(text) for text in found] == [False, True, False]
    assert model.training
    short = build_model(TINY, 320, max_length=12)
    assert len(translate(short, packed.tokenizer, ["a cat " * 30, "a dog"])) == 2
    assert cut(list(range(20)), 12) == [*range(11), 19]
    with pytest.raises(ValueError, match="beams must be at least 1, got 0"):
        translate(model, packed.tokenizer, ["a cat"], beams=0)


def test_what_shared_heads_learned_is_said_with_their_cache_and_without(tmp_path: Path) -> None:
    few = sentences(8)
    beyond = write(tmp_path, "beyond", [("cat " * 400, "Katze " * 400)])  # the positions that the model has
    settings = config(
        None, train=(write(tmp_path, "few", few),), dev=beyond, evaluate_every=1000, vocabulary=320, steps=150,
        batch_tokens=1024, label_smoothing=0.0, learning_rate=0.005,
    )  # fmt: skip
    train(settings, tmp_path / "run", progress=False)
    model, tokenizer = open_translator(tmp_path / "run" / "model"), Packed.open(tmp_path / "run").tokenizer
    texts, expected = zip(*few, strict=True)
    for beams in (1, 4):
        generate, caches = model.generate, []

        def uncached(generate: Any = generate, **given: Any) -> Any:
            return generate(**given, use_cache=False)

        def watched(generate: Any = generate, caches: list[Any] = caches, **given: Any) -> Any:
            told = generate(**given, return_dict_in_generate=True)
            caches.append(told.past_key_values)
            return told.sequences

        for way in (uncached, watched):
            model.generate = way
            assert translate(model, tokenizer, texts, beams=beams) == list(expected)
        del model.generate
        for cache in (caches[0].self_attention_cache, caches[0].cross_attention_cache):
            assert [tuple(layer.keys.shape[1::2]) for layer in cache.layers] == [
                (1, 16 + 4)
            ]  # and a content score a head
            assert [layer.values.shape[1] for layer in cache.layers] == [4]


# scores


def test_bleu_of_compounds_counts_their_parts() -> None:
    same = bleu(["Dies war hier ein sehr guter Test."], ["Dies war hier ein sehr guter Test."])
    assert same.sacrebleu == pytest.approx(100)
    assert same.compound_split == pytest.approx(100)
    assert "tok:13a" in same.signature
    # The two sentences share all but one part of a compound.
    other = bleu(["Er las heute die E-Mail-Liste von ihr."], ["Er las heute die E-Post-Liste von ihr."])
    assert 0 < other.sacrebleu < other.compound_split < 100
    with pytest.raises(ValueError, match="outputs must be as many as references, 2, got 1"):
        bleu(["a"], ["a", "b"])
    with pytest.raises(ValueError, match="outputs must be at least one sentence, got none"):
        bleu([], [])


def test_text_is_tokenised_as_moses_does() -> None:
    assert tokenise("Er sagte: „Ja!“ (1,50 Euro)...") == "Er sagte : „ Ja ! “ ( 1,50 Euro ) ..."
    assert tokenise("Am 3. Mai kamen die U.S. Truppen.") == "Am 3. Mai kamen die U.S. Truppen ."
    assert tokenise("Ja. Nein.") == "Ja . Nein ."
    assert split_compounds("ein E-Mail-Test - gut") == "ein E ##AT##-##AT## Mail ##AT##-##AT## Test - gut"
