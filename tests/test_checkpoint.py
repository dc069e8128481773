"""collab.save and collab.load: what is written, when, and what is refused."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import collab
from collab.checkpoint import check_target
from collab.structure import structure_of
from tiny_models import bert, gpt2, inputs_for, randomise_, tiny

torch.set_num_threads(1)


def converted(model: Any, shared_dim: Any = 12) -> Any:
    collab.collaborate_(model, collab.CollaborativeConfig(shared_dim=shared_dim, max_iterations=2))
    return model


class Twice(nn.Module):
    """One attention at two paths, an embedding tied to the head, a buffer, and a view of that buffer."""

    def __init__(self, is_tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 32)
        self.first = nn.MultiheadAttention(32, 4, batch_first=True)
        self.second = self.first
        self.head = nn.Linear(32, 20)
        if is_tied:
            self.head.weight = self.embedding.weight
        self.register_buffer("shift", torch.full((32,), 0.25))
        self.register_buffer("part", self.shift[:16])

    def forward(self, tokens: Tensor) -> Tensor:
        states = self.embedding(tokens) + self.shift
        for attention in (self.first, self.second):
            states = states + attention(states, states, states, need_weights=False)[0]
        return self.head(states)


def twice(seed: int = 0, **options: Any) -> Any:
    return randomise_(Twice(**options), seed).eval()


TOKENS = torch.arange(12).view(2, 6)


def entries(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_what_is_on_disk(tmp_path: Path) -> None:
    collab.save(converted(bert()), tmp_path / "deep" / "out")
    assert entries(tmp_path / "deep") == ["out"]
    assert entries(tmp_path / "deep" / "out") == ["config.json", "model.safetensors"]
    config = json.loads((tmp_path / "deep" / "out" / "config.json").read_text())
    assert config["architectures"] == ["BertModel"]
    assert config["collaborative"] == {
        "format_version": 1,
        "sites": {
            f"encoder.layer.{layer}.attention.self": {"host": "BertSelfAttention", "shared_dim": 12} for layer in (0, 1)
        },
        "settings": collab.CollaborativeConfig(shared_dim=12, max_iterations=2).to_dict(),
    }
    # As readable as any other directory: not hidden from a server's other users.
    mode = (tmp_path / "deep" / "out").stat().st_mode
    (tmp_path / "plain").mkdir()
    assert mode == (tmp_path / "plain").stat().st_mode


def test_documentation_shows_what_is_written(tmp_path: Path) -> None:
    text = (Path(__file__).parent.parent / "docs" / "saving-and-loading.md").read_text(encoding="utf-8")
    shown = json.loads(re.findall(r"```json\n(.*?)```", text, re.DOTALL)[0])
    model = bert(hidden_size=64, num_attention_heads=4)
    collab.collaborate_(model, collab.CollaborativeConfig(shared_dim=16))
    collab.save(model, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {name: written[name] for name in shown} == shown
    for name, rows, columns in re.findall(r"\| `(\S+)` \| (\d+) x (\d+) \|", text):
        assert model.state_dict()[name].shape == (int(rows), int(columns))


def test_save_writes_what_save_pretrained_writes(tmp_path: Path) -> None:
    model = converted(gpt2())
    model.save_pretrained(tmp_path / "own")
    collab.save(model, tmp_path / "ours")
    assert entries(tmp_path / "own") == entries(tmp_path / "ours")
    for name in entries(tmp_path / "own"):
        assert (tmp_path / "own" / name).read_bytes() == (tmp_path / "ours" / name).read_bytes()


def test_settings_survive_a_second_save_and_a_second_swap_is_recorded(tmp_path: Path) -> None:
    model = converted(bert(), {"encoder.layer.0.attention.self": 12})
    collab.save(model, tmp_path / "one")
    model = collab.load(tmp_path / "one")
    assert model.config.collaborative["settings"]["max_iterations"] == 2
    converted(model, {"encoder.layer.1.attention.self": 20})
    collab.save(model, tmp_path / "two")
    sizes = {path: site["shared_dim"] for path, site in structure_of(collab.load(tmp_path / "two")).items()}
    assert sizes == {"encoder.layer.0.attention.self": 12, "encoder.layer.1.attention.self": 20}


def test_existing_directory(tmp_path: Path) -> None:
    model = converted(bert())
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(FileExistsError, match=str(out)):
        collab.save(model, out)
    collab.save(model, out, overwrite=True)
    (out / "old.txt").write_text("left from before")
    collab.save(model, out, overwrite=True)
    assert entries(tmp_path) == ["out"]
    assert entries(out) == ["config.json", "model.safetensors"]
    (out / "config.json").unlink()
    with pytest.raises(FileExistsError, match="must be empty or hold a model"):
        collab.save(model, out, overwrite=True)
    (tmp_path / "file.txt").write_text("")
    with pytest.raises(NotADirectoryError, match=r"file\.txt"):
        collab.save(model, tmp_path / "file.txt", overwrite=True)
    assert (out / "model.safetensors").is_file()


def test_target_can_be_checked_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_target(tmp_path / "deep" / "out", False)
    check_target(str(tmp_path), True)
    with pytest.raises(FileExistsError, match="exists already"):
        check_target(tmp_path, False)
    (tmp_path / "file.txt").write_text("")
    with pytest.raises(FileExistsError, match="must be empty or hold a model"):
        check_target(tmp_path, True)
    with pytest.raises(NotADirectoryError, match=r"file\.txt must be a directory to hold"):
        check_target(tmp_path / "file.txt" / "deep" / "out", False)
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may write anywhere
    with pytest.raises(PermissionError, match=f"{tmp_path} must be writable"):
        check_target(tmp_path / "deep" / "out", False)
    assert entries(tmp_path) == ["file.txt"]


def test_extra_files_come_with_the_model_or_not_at_all(tmp_path: Path) -> None:
    model = converted(twice())
    collab.save(model, tmp_path / "out", extra={"report.json": "{}"})
    assert (tmp_path / "out" / "report.json").read_text() == "{}"
    for name in ("../report.json", str(tmp_path / "report.json"), "..", "", "config.json"):
        with pytest.raises(ValueError, match="extra must"):
            collab.save(model, tmp_path / "other", extra={name: "{}"})
    assert entries(tmp_path) == ["out"]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("make", [bert, twice])
def test_a_write_that_fails_half_way_leaves_nothing(
    make: Any, overwrite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = converted(make())
    if overwrite:
        collab.save(model, tmp_path / "out")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def full_disk(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> None:
        Path(filename).write_bytes(b"half of it")
        raise OSError("No space left on device")

    import transformers.modeling_utils

    monkeypatch.setattr(safetensors.torch, "save_file", full_disk)
    monkeypatch.setattr(transformers.modeling_utils, "safe_save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        collab.save(model, tmp_path / "out", overwrite=overwrite)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert entries(tmp_path) == (["out"] if overwrite else [])


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="collaborative attention"):
        collab.save(bert(), tmp_path / "out")
    with pytest.raises(ValueError, match="meta device"):
        collab.save(converted(bert()).to("meta"), tmp_path / "out")
    with pytest.raises(ValueError, match="max_shard_size"):
        collab.save(converted(twice()), tmp_path / "out", max_shard_size="1GB")
    assert entries(tmp_path) == []


def test_what_is_not_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        collab.load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        collab.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(collab.CheckpointError, match="is not JSON"):
        collab.load(tmp_path)
    bert().save_pretrained(tmp_path / "ordinary")
    with pytest.raises(collab.CheckpointError, match="no entry 'collaborative'"):
        collab.load(tmp_path / "ordinary")


def test_load_passes_arguments_on(tmp_path: Path) -> None:
    import transformers

    model = converted(bert())
    collab.save(model, tmp_path / "out")
    assert collab.load(tmp_path / "out", dtype=torch.float16).dtype == torch.float16
    assert collab.load(tmp_path / "out", attn_implementation="eager").config._attn_implementation == "eager"
    assert collab.load(tmp_path / "out", device="meta").device.type == "meta"
    assert collab.load(tmp_path / "out", device_map="cpu").device.type == "cpu"
    head = collab.load(tmp_path / "out", model_class=transformers.BertForTokenClassification)
    assert torch.equal(head.bert.encoder.layer[0].attention.self.mixing, model.encoder.layer[0].attention.self.mixing)
    with pytest.raises(ValueError, match="model must be None"):
        collab.load(tmp_path / "out", model=bert())


def test_compiled_model_is_saved_as_what_it_wraps(tmp_path: Path) -> None:
    model = converted(bert())
    collab.save(torch.compile(model), tmp_path / "out")
    assert torch.equal(collab.load(tmp_path / "out").pooler.dense.weight, model.pooler.dense.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_model_with_shared_modules_tied_weights_and_views(dtype: torch.dtype, tmp_path: Path) -> None:
    model = converted(twice()).to(dtype)
    collab.save(model, tmp_path / "out")
    names = set(load_file(tmp_path / "out" / "model.safetensors"))
    assert names & {"embedding.weight", "head.weight"} == {"embedding.weight"}
    assert not any(name.startswith("second") for name in names)
    loaded = collab.load(tmp_path / "out", model=twice(seed=1).train())
    assert not loaded.training
    assert loaded.head.weight is loaded.embedding.weight
    assert loaded.first is loaded.second
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    with torch.no_grad():
        assert torch.equal(model(TOKENS), loaded(TOKENS))
    loaded(TOKENS).sum().backward()
    collab.save(loaded, tmp_path / "again")
    for name in entries(tmp_path / "out"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_torch_model_wants_an_instance(tmp_path: Path) -> None:
    collab.save(converted(twice()), tmp_path / "out")
    with pytest.raises(ValueError, match=r"Twice.*give load\(\.\.\., model=\)"):
        collab.load(tmp_path / "out")
    with pytest.raises(ValueError, match="dtype_map"):
        collab.load(tmp_path / "out", model=twice(), dtype_map="auto")
    with pytest.raises(ValueError, match="meta"):
        collab.load(tmp_path / "out", model=twice().to("meta"))
    with pytest.raises(collab.CheckpointError, match="has no attention at first"):
        collab.load(tmp_path / "out", model=nn.Linear(2, 2))
    with pytest.raises(collab.CheckpointError, match="already collaborative"):
        collab.load(tmp_path / "out", model=converted(twice()))
    # A model that does not tie what the saved one tied gets the same numbers in both places.
    apart = collab.load(tmp_path / "out", model=twice(is_tied=False), dtype=torch.float64)
    assert apart.head.weight.dtype == torch.float64
    assert torch.equal(apart.head.weight, apart.embedding.weight)
    collab.save(converted(twice(is_tied=False)), tmp_path / "apart")
    with pytest.raises(collab.CheckpointError, match="two tensors, which Twice ties"):
        collab.load(tmp_path / "apart", model=twice())


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda tensors: tensors.pop("first.mixing"), ["no first.mixing", "second.mixing"]),
        (lambda tensors: tensors.update(extra=torch.zeros(2)), ["unexpected extra"]),
        (lambda tensors: tensors.update({"first.mixing": torch.zeros(4, 11)}), ["first.mixing", "(4, 12)", "(4, 11)"]),
    ],
)
def test_torch_model_with_edited_weights_leaves_the_instance_alone(edit: Any, words: list[str], tmp_path: Path) -> None:
    collab.save(converted(twice()), tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    with safetensors.safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata=metadata)
    instance = twice(seed=1)
    expected = instance(TOKENS)
    with pytest.raises(collab.CheckpointError) as error:
        collab.load(tmp_path / "out", model=instance)
    for word in [*words, str(file)]:
        assert word in str(error.value)
    assert type(instance.first) is nn.MultiheadAttention
    assert torch.equal(instance(TOKENS), expected)


def test_torch_model_with_damaged_files(tmp_path: Path) -> None:
    collab.save(converted(twice()), tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    whole = file.read_bytes()
    for broken in (whole[:-50], whole[:5], b"", b"\xff" * 100):
        file.write_bytes(broken)
        with pytest.raises(collab.CheckpointError, match="not a whole safetensors file"):
            collab.load(tmp_path / "out", model=twice())
    file.unlink()
    with pytest.raises(collab.CheckpointError, match=r"model\.safetensors is missing"):
        collab.load(tmp_path / "out", model=twice())
    torch.save({}, tmp_path / "out" / "pytorch_model.bin")
    with pytest.raises(collab.CheckpointError, match=r"model\.safetensors is missing"):
        collab.load(tmp_path / "out", model=twice())


def vision_transformer(**options: Any) -> Any:
    timm = pytest.importorskip("timm")
    sizes = {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 7, "in_chans": 1}
    return randomise_(timm.create_model("vit_tiny_patch16_224", **(sizes | options))).eval()


def test_timm_model_is_made_again(tmp_path: Path) -> None:
    import timm

    rates = {"drop_rate": 0.1, "pos_drop_rate": 0.2, "proj_drop_rate": 0.3, "attn_drop_rate": 0.4}
    model = converted(vision_transformer(global_pool="avg", drop_path_rate=0.5, **rates)).to(torch.bfloat16)
    collab.save(model, tmp_path / "out")
    loaded = collab.load(tmp_path / "out")
    images = torch.randn(2, 1, 32, 32, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(model(images), loaded(images))
    assert str(loaded) == str(model)  # dropout rates among the rest
    assert tuple(loaded.pretrained_cfg["mean"]) == model.pretrained_cfg["mean"]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architecture"] == "vit_tiny_patch16_224"
    # timm's own reading of the directory cannot take the weights for ordinary ones.
    with pytest.raises(RuntimeError, match="size mismatch"):
        timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True)
    collab.save(loaded, tmp_path / "again")
    for name in entries(tmp_path / "out"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_timm_model_that_cannot_be_made_again_says_so_when_saved(tmp_path: Path) -> None:
    model = converted(vision_transformer())
    model.blocks[0].mlp.act = nn.ReLU()
    with pytest.warns(UserWarning, match="will need model="):
        collab.save(model, tmp_path / "out")
    with pytest.raises(ValueError, match="give load"):
        collab.load(tmp_path / "out")
    skeleton = vision_transformer()
    skeleton.blocks[0].mlp.act = nn.ReLU()
    images = torch.randn(2, 1, 32, 32)
    with torch.no_grad():
        assert torch.equal(model(images), collab.load(tmp_path / "out", model=skeleton)(images))


def test_timm_config_that_was_edited(tmp_path: Path) -> None:
    collab.save(converted(vision_transformer()), tmp_path / "out")
    file = tmp_path / "out" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"architecture": "no_such_model"}))
    with pytest.raises(collab.CheckpointError, match="no_such_model"):
        collab.load(tmp_path / "out")
    file.write_text(json.dumps(config | {"model_args": config["model_args"] | {"num_classes": 8}}))
    with pytest.raises(collab.CheckpointError, match=r"head\.weight.*\(8, 32\), got \(7, 32\)"):
        collab.load(tmp_path / "out")


def test_side_files(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    carried = ["tokenizer.json", "vocab.txt", "merges.txt", "preprocessor_config.json", "modules.json", "spiece.model",
               "1_Pooling/config.json", "2_Dense/model.safetensors"]  # fmt: skip
    for name in [*carried, "config.json", "model.safetensors", "pytorch_model.bin", "README.md", "onnx/model.onnx"]:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(name)
    modules = [{"path": "", "type": "Transformer"}, {"path": "1_Pooling"}, {"path": "2_Dense"}]
    (source / "modules.json").write_text(json.dumps(modules))
    collab.save(converted(bert()), target, like=source)
    assert (target / "config.json").read_text() != "config.json"
    (target / "vocab.txt").unlink()
    assert collab.carry_side_files(source, target) == ["vocab.txt"]
    found = [path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()]
    assert sorted(found) == sorted([*carried, "config.json", "model.safetensors"])

    with pytest.raises(FileNotFoundError, match="nowhere"):
        collab.save(converted(bert()), tmp_path / "other", like=tmp_path / "nowhere")
    (source / "modules.json").write_text(json.dumps([{"path": "0_Transformer"}]))
    with pytest.raises(ValueError, match="0_Transformer"):
        collab.save(converted(bert()), tmp_path / "other", like=source)
    assert entries(tmp_path) == ["source", "target"]


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        ("{", "is not JSON"),
        ("{}", "must hold a list of modules"),
        ("[]", "must hold a list of modules"),
        ("[[]]", "must have a 'path'"),
        ("[{}]", "must have a 'path'"),
        ('[{"path": ""}, {"path": 1}]', "must have a 'path'"),
        ('[{"path": ""}, {"path": "../outside"}]', r"'\.\./outside'"),
        ('[{"path": ""}, {"path": "inside/../../outside"}]', "outside"),
        ('[{"path": ""}, {"path": "/outside"}]', "'/outside'"),
        ('[{"path": ""}, {"path": "."}]', "'.'"),
    ],
)
def test_side_files_stay_in_their_folder(modules: str, words: str, tmp_path: Path) -> None:
    source, target = tmp_path / "deep" / "source", tmp_path / "target" / "deep"
    for folder in (source, target, tmp_path / "deep" / "outside"):
        folder.mkdir(parents=True)
    (tmp_path / "deep" / "outside" / "config.json").write_text("{}")
    (source / "modules.json").write_text(modules)
    with pytest.raises(ValueError, match=words) as error:
        collab.carry_side_files(source, target)
    assert str(source / "modules.json") in str(error.value)
    assert [path for path in (tmp_path / "target").rglob("*") if path.is_file()] == []


def test_sharded_parameters_are_not_saved(tmp_path: Path) -> None:
    model = converted(twice())
    model.first.mixing = nn.Parameter(model.first.mixing.detach().flatten()[:7])
    with pytest.raises(ValueError, match="summon_full_params"):
        collab.save(model, tmp_path / "out")
    assert entries(tmp_path) == []


def test_wrappers_of_training_are_taken_off(tmp_path: Path) -> None:
    class FullyShardedDataParallel(nn.Module):  # the real one needs a process group
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    model = converted(twice())
    for name, wrapper in (("plain", nn.DataParallel), ("sharded", FullyShardedDataParallel)):
        collab.save(wrapper(model), tmp_path / name)
        assert "first.mixing" in load_file(tmp_path / name / "model.safetensors")


def test_missing_safetensors_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = converted(twice())
    collab.save(model, tmp_path / "out")
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ModuleNotFoundError, match="pip install safetensors"):
        collab.load(tmp_path / "out", model=twice())
    with pytest.raises(ModuleNotFoundError, match="pip install safetensors"):
        collab.save(model, tmp_path / "other")
    assert entries(tmp_path) == ["out"]


def test_nothing_is_ever_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collab.save(converted(twice()), tmp_path / "torch")
    collab.save(converted(tiny("T5ForConditionalGeneration")), tmp_path / "t5")

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("pickle was used")

    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr("pickle.loads", refuse)
    monkeypatch.setattr("pickle.load", refuse)
    collab.load(tmp_path / "torch", model=twice())
    loaded = collab.load(tmp_path / "t5")
    loaded(**inputs_for(loaded))


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="needs symbolic links")
def test_a_dangling_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError, match="link"):
        collab.save(converted(bert()), tmp_path / "link")


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="needs symbolic links")
def test_overwriting_a_link_replaces_what_it_points_to(tmp_path: Path) -> None:
    model = converted(twice())
    collab.save(model, tmp_path / "real" / "out", extra={"old.txt": ""})
    (tmp_path / "link").symlink_to(tmp_path / "real" / "out")
    collab.save(model, tmp_path / "link", overwrite=True)
    assert entries(tmp_path) == ["link", "real"]
    assert (tmp_path / "link").is_symlink()
    assert entries(tmp_path / "real") == ["out"]
    assert entries(tmp_path / "real" / "out") == ["config.json", "model.safetensors"]
