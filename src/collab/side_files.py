"""What lies beside a model's weights and is needed to use it: tokenizer, processors, sentence-transformers modules."""

import json
import os
import shutil
from pathlib import Path

SIDE_FILES = (
    "tokenizer", "vocab", "merges", "special_tokens_map", "added_tokens", "spiece", "sentencepiece", "source.spm",
    "target.spm", "bpe.codes", "normalizer", "chat_template", "preprocessor_config", "processor_config",
    "image_processor", "video_preprocessor", "feature_extractor", "generation_config", "modules.json",
    "sentence_", "config_sentence_transformers",
)  # fmt: skip
"""How the names of tokenizer, processor and sentence-transformers files begin."""


def carry_side_files(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> list[str]:
    """Copy what belongs to a model besides config and weights: tokenizer, processors, sentence-transformers modules.

    Args:
        source: directory of the original model.
        target: directory of the converted one; files that it has already are kept.

    Returns:
        The paths copied, relative to `target`.
    """
    source, target = Path(source), Path(target)
    if not source.is_dir():
        raise FileNotFoundError(f"{source} must be the directory of the original model, there is none")
    paths = [path for path in source.iterdir() if path.is_file() and _is_side_file(path.name)]
    for folder in sentence_transformers_folders(source):
        paths += [path for path in (source / folder).rglob("*") if path.is_file()]
    copied = []
    for path in sorted(paths):
        relative = path.relative_to(source)
        if not (target / relative).exists():
            (target / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / relative)
            copied.append(relative.as_posix())
    return copied


def _is_side_file(name: str) -> bool:
    return name.startswith(SIDE_FILES) and not name.endswith((".safetensors", ".bin", ".pt", ".h5", ".onnx"))


def sentence_transformers_folders(source: Path) -> list[str]:
    """Folders of the modules that follow the transformer, from modules.json."""
    file = source / "modules.json"
    if not file.is_file():
        return []
    try:
        modules = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(modules, list) or not modules:
        raise ValueError(f"{file} must hold a list of modules, got {modules!r:.80}")
    folders = []
    for module in modules:
        folder = module.get("path") if isinstance(module, dict) else None
        if not isinstance(folder, str):
            raise ValueError(f"each module in {file} must have a 'path' that is text, got {module!r:.80}")
        parts = Path(folder).parts
        if folder and (not parts or ".." in parts or Path(folder).anchor):
            raise ValueError(f"{file} must keep its modules in folders beside it, got {folder!r}")
        folders.append(folder)
    if folders[0]:
        raise ValueError(
            f"{file} keeps the transformer in {folders[0]!r}, where a converted model cannot be put: convert the "
            "SentenceTransformer itself and call its save_pretrained"
        )
    return [folder for folder in folders if folder]
