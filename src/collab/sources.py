"""From what a user names (a directory, a hub name, a text file, a folder of images) to models and batches."""

import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from collab.calibration import Calibration
from collab.checkpoint import CONFIG_NAME, WEIGHTS_NAME, load, read_config
from collab.side_files import SIDE_FILES, sentence_transformers_folders

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.spm")
_IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
STATISTICS = ".safetensors"
LEAST_BATCHES = 8
"""Calibration inputs come in at least so many batches, if there are so many: refinement holds some of them back."""


def open_model(name: str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> nn.Module:
    """A model by its directory or its name on the hub, of the class it was saved as, in evaluation mode.

    Directories that `save` wrote, of transformers and timm models, are opened too.

    Args:
        name: a directory that holds config.json and weights, a name on the hub, or a name of timm's, such as
            deit_base_patch16_224.
        dtype: type of its weights; the one they were saved with if not given.
        device: where it goes.

    Raises:
        ValueError: there is no such directory, or it is not a model, or its class is not in transformers.
        FileNotFoundError: the directory has no config.json.
        ConnectionError: the hub has no such model, or cannot be reached.
    """
    folder = local_folder(name)
    if folder is not None:
        config = read_config(folder)
        if "collaborative" in config:
            return _on(load(folder, dtype=dtype), device)
        if "architecture" in config and "model_type" not in config:
            return _on(_open_timm(f"local-dir:{folder}", str(folder)), device, dtype)
    elif is_timm_name(name):
        _ask_hub_for_timm(name.removeprefix("timm/"))
        return _on(_open_timm(name.removeprefix("timm/"), name), device, dtype)
    return _on(_open_transformers(name, folder, dtype), device)


def local_folder(name: str) -> Path | None:
    """The directory of this name, or None for a name on the hub; a path that leads nowhere is an error."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ValueError(f"a model must be a directory or a name on the hub, but {name} is a file")
    if name.startswith((".", "/", "~")) or name.count("/") != name.strip("/").count("/") or name.count("/") > 1:
        raise ValueError(f"there is no directory {name}; a model must be a directory or a name on the hub")
    return None


def side_files_folder(name: str) -> Path | None:
    """The directory with a model's tokenizer and similar files; a hub model's are fetched, its weights are not.

    None for a name of timm's: what its models need is in their config.
    """
    folder = local_folder(name)
    if folder is not None or is_timm_name(name):
        return folder
    from huggingface_hub import snapshot_download

    fetched = Path(snapshot_download(name, allow_patterns=[f"{beginning}*" for beginning in SIDE_FILES]))
    inner = sentence_transformers_folders(fetched)
    if inner:
        snapshot_download(name, allow_patterns=[f"{folder}/*" for folder in inner])
    return fetched


def text_batches(
    model: nn.Module, source: str, texts: Sequence[str], *, batch_size: int = 16, max_length: int = 128
) -> Iterator[dict[str, Tensor]]:
    """Texts as padded batches for this model, tokenised as `source` (a directory or hub name) says.

    An encoder-decoder model gets each text on both sides: it is asked for the text's every token, given those before.

    Args:
        model: a transformers model.
        source: where its tokenizer is.
        texts: one a row.
        batch_size: rows of a batch.
        max_length: longer texts are cut to so many tokens, or to what the model takes if that is less.
    """
    if not texts:
        raise ValueError("there must be at least one text, got none")
    if reads_images(model):
        raise ValueError(f"{type(model).__name__} reads images, not text: give a folder of images")
    tokenizer = open_tokenizer(source)
    config: Any = model.config
    limits = [max_length, tokenizer.model_max_length, _positions(model) or max_length]
    for start in range(0, len(texts), batch_size):
        encoded = tokenizer(
            list(texts[start : start + batch_size]),
            padding=True,
            truncation=True,
            max_length=min(limits),
            return_tensors="pt",
        )
        batch = {name: encoded[name] for name in ("input_ids", "attention_mask", "token_type_ids") if name in encoded}
        if config.is_encoder_decoder:
            batch.pop("token_type_ids", None)
            batch |= _teacher_forcing(batch, config, tokenizer.pad_token_id)
        yield batch


def reads_images(model: nn.Module) -> bool:
    """Whether a model reads images and nothing else."""
    return hasattr(model, "pretrained_cfg") or getattr(model, "main_input_name", "") == "pixel_values"


def read_texts(path: Path) -> list[str]:
    """The lines of a text file, empty ones left out."""
    try:
        texts = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path} as a text file: {error}") from error
    if not texts:
        raise ValueError(f"{path} must have a text on at least one line, got none")
    return texts


def image_batches(model: nn.Module, source: str, paths: Sequence[Path], *, batch_size: int = 16) -> Iterator[Any]:
    """Image files as batches for this model, prepared as `source` (a directory or hub name) says."""
    if getattr(model, "main_input_name", "") == "input_ids" and not hasattr(model.config, "vision_config"):
        raise ValueError(f"{type(model).__name__} reads text, not images: give a text file")
    prepare = _image_preparation(model, source)
    for start in range(0, len(paths), batch_size):
        yield prepare(_read_images(paths[start : start + batch_size]))


def image_as_seen(model: nn.Module, source: str, path: Path) -> Tensor:
    """(3, height, width): an image file cut and scaled as for this model, in colours from 0 to 1."""
    (image,) = _read_images([path])
    # What is done to colours is the same for every pixel, and shows on black and on white.
    plain = [image.point(lambda _, value=value: value) for value in (0, 255)]
    prepared = _image_preparation(model, source)([*plain, image])
    black, white, seen = prepared["pixel_values"] if isinstance(prepared, dict) else prepared
    colours: Tensor = (seen - black) / (white - black)
    return colours.clamp(0, 1)


def find_images(folder: Path) -> list[Path]:
    """The image files in a folder, sorted by name; none is an error."""
    if not folder.is_dir():
        raise ValueError(f"{folder} must be a folder of images, {'but is a file' if folder.exists() else 'got none'}")
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in _IMAGES)
    if not paths:
        raise ValueError(f"{folder} must hold images ({', '.join(_IMAGES)}), got none")
    return paths


def read_calibration(path: Path, max_inputs: int) -> Calibration | list[str] | list[Path]:
    """What a user names to calibrate with: statistics, texts, or image files; no model is needed to read them.

    Args:
        path: a .safetensors file that `Calibration.save` wrote, a text file with one text a line, or a folder of
            images.
        max_inputs: of more texts or images, so many are taken, spread evenly.
    """
    if path.is_dir():
        return _spread(find_images(path), max_inputs)
    if path.suffix == STATISTICS:
        return Calibration.load(path)
    return _spread(read_texts(path), max_inputs)


def calibration_batches(
    model: nn.Module,
    source: str,
    inputs: Sequence[str] | Sequence[Path],
    *,
    batch_size: int = 32,
    max_length: int = 128,
) -> list[Any]:
    """What `read_calibration` read as batches for this model: texts of like length together, for little padding."""
    batch_size = min(batch_size, -(-len(inputs) // LEAST_BATCHES))
    paths = [path for path in inputs if isinstance(path, Path)]
    if paths:
        return list(image_batches(model, source, paths, batch_size=batch_size))
    texts = sorted((text for text in inputs if isinstance(text, str)), key=len)
    return list(text_batches(model, source, texts, batch_size=batch_size, max_length=max_length))


def _spread(inputs: list[Any], count: int) -> list[Any]:
    """At most so many of the inputs, from the first to the last at even distances."""
    count = min(count, len(inputs))
    return [inputs[index * len(inputs) // count] for index in range(count)]


def _open_transformers(name: str, folder: Path | None, dtype: torch.dtype | None) -> nn.Module:
    import transformers

    if folder is None:
        _ask_hub(name)
    options = {} if dtype is None else {"dtype": dtype}
    try:
        config = transformers.AutoConfig.from_pretrained(str(folder or name))
    except (OSError, ValueError) as error:
        raise _cannot_open(name, folder, error) from error
    names = config.architectures or ["AutoModel"]
    model_class: Any = getattr(transformers, names[0], None)
    if model_class is None:
        raise ValueError(f"{name} must be of a class of transformers to be opened, got architectures {names}")
    try:
        model: nn.Module = model_class.from_pretrained(str(folder or name), **options)
    except (OSError, ValueError) as error:
        raise _cannot_open(name, folder, error) from error
    return model


def _ask_hub_for_timm(name: str) -> None:
    """Fail at once where the hub has no weights for a model of timm's."""
    import timm

    hub_name = getattr(timm.get_pretrained_cfg(name), "hf_hub_id", None)
    if hub_name:
        _ask_hub(str(hub_name), WEIGHTS_NAME)


def _ask_hub(name: str, file: str = CONFIG_NAME) -> None:
    """Fail at once where the hub has no such model: the libraries would ask for half a minute."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    try:
        if not isinstance(try_to_load_from_cache(name, file), str):
            HfApi().model_info(name, timeout=10)
    except Exception as error:  # of the hub, of its client, or of whichever library it connects with
        raise _cannot_open(name, None, error) from error


def _cannot_open(name: str, folder: Path | None, error: Exception) -> Exception:
    if folder is not None:
        return ValueError(f"{name} is not a model that can be opened: {_first_line(error)}")
    return ConnectionError(f"no directory is named {name}, and the hub did not give it: {_first_line(error)}")


def is_timm_name(name: str) -> bool:
    """Whether timm knows a model of this name: deit_base_patch16_224, or timm/deit_base_patch16_224 as on the hub."""
    if importlib.util.find_spec("timm") is None or local_folder(name) is not None:
        return False
    import timm

    known: bool = timm.is_model(name.removeprefix("timm/")) and ("/" not in name or name.startswith("timm/"))
    return known


def _open_timm(where: str, name: str) -> nn.Module:
    """A timm model that is trained, from `where` as timm writes it."""
    import timm

    try:
        model: nn.Module = timm.create_model(where, pretrained=True)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{name} is not a model that timm can open: {_first_line(error)}") from error
    except Exception as error:  # of the hub, of its client, or of whichever library it connects with
        if where.startswith("local-dir:"):
            raise ValueError(f"{name} is not a model that timm can open: {_first_line(error)}") from error
        raise ConnectionError(f"timm knows {name}, but its weights could not be had: {_first_line(error)}") from error
    return model


def _on(model: nn.Module, device: torch.device | str, dtype: torch.dtype | None = None) -> nn.Module:
    return model.to(device=torch.device(device), dtype=dtype).eval()


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _positions(model: nn.Module) -> int:
    """How many tokens a model has positions for; 0 if it has no limit."""
    for path, module in model.named_modules():
        # RoBERTa and its relatives number positions from behind the one that padding has.
        if path.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            table: Any = module
            return int(table.num_embeddings - table.padding_idx - 1)
    return getattr(model.config, "max_position_embeddings", 0) or 0


def open_tokenizer(source: str) -> Any:
    """The tokenizer of a directory or a hub name, with a token to pad with."""
    import transformers

    folder = local_folder(source)
    # Without this check some tokenizers come up empty, and every text would be a row of unknown tokens.
    if folder is not None and not any(True for pattern in _TOKENIZER_FILES for _ in folder.glob(pattern)):
        raise ValueError(f"{source} has no tokenizer: put its tokenizer.json and the like beside {CONFIG_NAME}")
    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(str(folder or source))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"cannot open the tokenizer of {source}: {_first_line(error)}") from error
    if tokenizer.pad_token is None:
        # Any token will do: what is padded is masked and does not count.
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def _teacher_forcing(batch: dict[str, Tensor], config: Any, pad: int) -> dict[str, Tensor]:
    """The decoder's side of an input: the same tokens one place later, behind the token a decoder starts with."""
    candidates = (getattr(config, f"{name}_token_id", None) for name in ("decoder_start", "bos", "eos"))
    start = next((token for token in candidates if token is not None), pad)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    return {
        "decoder_input_ids": torch.cat((torch.full_like(ids[:, :1], start), ids[:, :-1]), dim=1),
        "decoder_attention_mask": torch.cat((torch.ones_like(mask[:, :1]), mask[:, :-1]), dim=1),
    }


def _read_images(paths: Sequence[Path]) -> list[Any]:
    """Images in colour."""
    from PIL import Image

    images = []
    for path in paths:
        try:
            images.append(Image.open(path).convert("RGB"))
        except OSError as error:
            raise ValueError(f"cannot read {path} as an image: {_first_line(error)}") from error
    return images


def _image_preparation(model: nn.Module, source: str) -> Any:
    """A function from images to a batch."""
    if hasattr(model, "pretrained_cfg"):
        data: Any = importlib.import_module("timm.data")
        size = getattr(getattr(model, "patch_embed", None), "img_size", None)  # may not be the one it was trained at
        asked = {} if size is None else {"input_size": (3, *size)}
        transform = data.create_transform(**data.resolve_data_config(asked, model=model), is_training=False)
        return lambda images: torch.stack([transform(image) for image in images])
    import transformers

    try:
        processor: Any = transformers.AutoImageProcessor.from_pretrained(str(local_folder(source) or source))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot open the image processor of {source}: {_first_line(error)}") from error
    return lambda images: {"pixel_values": processor(images=images, return_tensors="pt")["pixel_values"]}
