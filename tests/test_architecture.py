"""The layout: imports point one way, model libraries stay in the files that name them, public names are documented."""

import ast
import doctest
import importlib
import importlib.metadata
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import collab

SOURCE = Path(collab.__file__).parent
FILES = {
    ".".join(("collab", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(SOURCE.rglob("*.py"))
}
"""Module name -> file, of every module of the package."""

MAY_IMPORT = {
    "version": set(),
    "table": set(),
    "config": set(),
    "tracing": set(),
    "ops": {"tracing"},
    "fused_projection": {"tracing"},
    "layer": {"config", "fused_projection", "ops"},
    "alternating": set(),
    "starting": {"alternating"},
    "decomposition": {"alternating", "config", "layer", "starting"},
    "hosts": {"fused_projection", "ops", "table"},
    "inspection": {"hosts", "table"},
    "structure": {"config", "hosts", "inspection"},
    "running": set(),
    "evaluate": {"running", "table"},
    "calibration": {"inspection", "running", "table"},
    "conversion": {"calibration", "config", "decomposition", "hosts", "layer"},
    "twins": {"inspection", "structure"},
    "closeness": set(),
    "effects": {
        "calibration", "closeness", "conversion", "decomposition", "evaluate", "inspection", "running", "structure",
        "twins",
    },
    "sizes": {
        "calibration", "config", "conversion", "decomposition", "effects", "inspection", "running", "structure",
        "table",
    },
    "fitting": {"calibration", "hosts", "inspection", "structure"},
    "holding_back": {"running"},
    "refinement": {
        "calibration", "closeness", "config", "evaluate", "fitting", "holding_back", "running", "twins",
    },
    "swap": {
        "calibration", "config", "conversion", "decomposition", "hosts", "inspection", "refinement", "running", "sizes",
        "structure", "table", "twins",
    },
}  # fmt: skip
"""File or folder of the core -> the others it may know. What is not here comes after the core, and may know all."""

LIBRARIES = {
    "hosts.transformers_decoders": {"transformers"},
    "hosts.transformers_vision": {"transformers"},
    "hosts.transformers_shell": {"transformers"},
    "hosts.catalogue": {"transformers"},
    "hosts.timm": {"timm"},
    "ops.cudnn_kernels": {"triton"},
    "ops.fused_backward": {"triton"},
    "ops.fused_decode": {"triton"},
    "ops.fused_forward": {"triton"},
    "ops.fused_gather": {"triton"},
    "ops.fused_pieces": {"triton"},
    "ops.fused_short": {"triton"},
    "ops.fused_short_backward": {"triton"},
    "ops.fused_sums": {"triton"},
    "timm_models": {"timm"},
    "transformers_loading": {"transformers"},
    "checkpoint": {"transformers"},
    "calibration": {"safetensors"},
    "analysis_plot": {"matplotlib"},
    "bench_plot": {"matplotlib"},
    "bench_commands": {"rich", "typer"},
    "weights_file": {"safetensors"},
    "sources": {"PIL", "huggingface_hub", "timm", "transformers"},
    "commands": {"rich", "transformers", "typer"},
    "analysis_commands": {"typer"},
    "report_commands": {"typer"},
    "reporting.figures": {"matplotlib"},
    "translate_commands": {"typer"},
    "recipes.averaging": {"safetensors"},
    "recipes.bleu": {"sacrebleu"},
    "recipes.packed_text": {"numpy", "tokenizers", "transformers"},
    "recipes.parallel_text": {"datasets"},
    "recipes.scoring": {"numpy", "transformers"},
    "recipes.token_batches": {"numpy"},
    "recipes.translation_model": {"transformers"},
    "classification": {"numpy", "timm", "transformers"},
    "evaluate_commands": {"typer"},
    "recipes": {"yaml"},
    "recipes.attention_figure": {"matplotlib"},
    "recipes.augmentation": {"PIL", "numpy", "timm"},
    "recipes.device_augmentation": {"torchvision"},
    "recipes.image_cache": {"PIL", "numpy"},
    "recipes.images": {"PIL", "datasets"},
    "recipes.vision": {"timm"},
    "recipes.vision_data": {"PIL"},
    "recipes.vision_models": {"timm", "transformers"},
    "recipes.settings": {"yaml"},
    "recipes.batches": {"numpy"},
    "recipes.training_steps": {"transformers"},
    "recipes.glue_data": {"datasets"},
    "recipes.glue_models": {"transformers"},
    "recipes.mlm": {"transformers"},
    "recipes.text_blocks": {"numpy", "tokenizers", "transformers"},
    "recipes.run_board": {"rich"},
    "train_commands": {"typer"},
}
"""File -> the libraries beside torch it may import. No other file imports any."""

LONGEST = 450


def imports(name):
    """(top package, module of ours or None) of every import statement of a module, also those inside functions."""
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively; write the whole name"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            targets = [target if target in FILES else node.module for target in whole]
        else:
            continue
        for target in targets:
            top = target.partition(".")[0]
            yield top, target if top == "collab" else None


def inner(name):
    """`collab.hosts.timm` -> `hosts.timm`."""
    return name.removeprefix("collab").removeprefix(".")


def part(name):
    """`collab.hosts.timm` -> `hosts`."""
    return inner(name).partition(".")[0]


def test_the_core_imports_one_way():
    assert set(MAY_IMPORT) <= {part(name) for name in FILES}
    for name in FILES:
        if part(name) in MAY_IMPORT:
            known = {part(target) for _, target in imports(name) if target} - {part(name)}
            wrong = known - MAY_IMPORT[part(name)]
            assert not wrong, f"{name} imports {sorted(wrong)}, and may import {sorted(MAY_IMPORT[part(name)])} only"


def test_no_import_leads_back():
    waiting = {name: {target for _, target in imports(name) if target} - {name} for name in FILES}
    while waiting:
        free = {name for name, targets in waiting.items() if not targets & set(waiting)}
        assert free, f"these import each other in a circle, or what does: {sorted(waiting)}"
        waiting = {name: targets for name, targets in waiting.items() if name not in free}


@pytest.mark.parametrize("name", FILES)
def test_only_named_files_import_libraries_beside_torch(name):
    found = {top for top, _ in imports(name)} - set(sys.stdlib_module_names) - {"collab", "torch"}
    wrong = found - LIBRARIES.get(inner(name), set())
    assert not wrong, f"{name} imports {sorted(wrong)}: declare it in LIBRARIES, or move it to the file that is for it"


def run_python(script):
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=SOURCE.parent)


def test_importing_brings_torch_and_nothing_else():
    done = run_python("""
import sys, torch
before = set(sys.modules)
import collab
new = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
assert new == {"collab"}, sorted(new)
""")
    assert done.returncode == 0, done.stderr


def test_torch_models_can_be_converted_where_no_other_library_is_installed():
    done = run_python("""
import sys
from importlib.machinery import PathFinder

BLOCKED = {"transformers", "timm", "safetensors", "huggingface_hub", "typer", "rich", "peft", "accelerate", "numpy"}

# Who asks for a blocked library is told that there is none, as where it is not installed: torch asks for some.
class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in BLOCKED else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
import importlib.util, torch, collab
assert not any(importlib.util.find_spec(name) for name in BLOCKED)

model = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
assert len(collab.find_attention(model)) == 1
print(collab.collaborate_(model, collab.CollaborativeConfig(shared_dim=8), calibration=[torch.randn(4, 3, 16)]))
assert model(torch.randn(2, 3, 16)).shape == (2, 3, 16)
assert not BLOCKED & set(sys.modules), BLOCKED & set(sys.modules)
""")
    assert done.returncode == 0, done.stderr
    assert "self_attn" in done.stdout


def test_files_are_named_after_what_they_do_and_are_not_too_long():
    assert not [name for name in FILES if name.rpartition(".")[2] in ("utils", "helpers", "common", "misc", "other")]
    lengths = {name: len(path.read_text().splitlines()) for name, path in FILES.items()}
    assert not {name: length for name, length in lengths.items() if length > LONGEST}


def test_every_file_says_what_it_is_for():
    assert not [name for name, path in FILES.items() if not ast.get_docstring(ast.parse(path.read_text()))]


@pytest.mark.parametrize("name", [name for name in collab.__all__ if name != "__version__"])
def test_public_names_are_documented(name):
    thing = getattr(collab, name)
    written = inspect.getdoc(thing) or ""
    assert written, f"{name} has no docstring"
    assert not written.startswith(f"{name}("), f"{name} has only the docstring its dataclass made"
    if inspect.isclass(thing):
        missing = [
            member
            for member, value in vars(thing).items()
            if not member.startswith("_") and (callable(value) or isinstance(value, property | classmethod))
            if not inspect.getdoc(getattr(thing, member))
        ]
        assert not missing, f"{name} has members without a docstring: {missing}"


def test_public_names_are_sorted_and_exist_once():
    assert sorted(set(collab.__all__)) == collab.__all__
    assert all(hasattr(collab, name) for name in collab.__all__)


EXAMPLES = [name for name, path in FILES.items() if ">>>" in path.read_text()]


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_in_docstrings_run(name):
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted > 0
    assert results.failed == 0


def test_the_layer_and_the_search_have_examples():
    assert {"collab.layer", "collab.inspection"} <= set(EXAMPLES)


def test_the_version_is_the_installed_one():
    try:
        installed = importlib.metadata.version("collab")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("collab is not installed, only on the path")
    assert installed == collab.__version__
