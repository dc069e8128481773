"""save and load: a directory with config.json and safetensors, written whole or not at all. Nothing is ever pickled."""

import copy
import json
import os
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from collab import timm_models
from collab.config import FORMAT_VERSION
from collab.hosts import Collaborative, check_dims
from collab.inspection import find_attention
from collab.side_files import carry_side_files
from collab.structure import LOADER, build_structure_, description, record_structure_, structure_of
from collab.swap import WRAPPERS
from collab.version import __version__
from collab.weights_file import CheckpointError, check_fits, read_shapes, read_tensor, read_weights_, write_weights

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"


def save(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    like: str | os.PathLike[str] | None = None,
    max_shard_size: int | str | None = None,
    extra: Mapping[str, str] | None = None,
) -> None:
    """Write a collaborative or pruned model to a new directory, for `load` to read back bit by bit.

    A transformers model is written as its own `save_pretrained` writes it. A timm model is written with what
    `timm.create_model` needs to make it again; any other without, so that `load` wants an ordinary instance of it. The
    directory appears when everything is in it; if anything fails it does not appear.

    Example:
        >>> import tempfile, torch, collab
        >>> model = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
        >>> report = collab.collaborate_(model, collab.CollaborativeConfig(shared_dim=16))
        >>> directory = tempfile.mkdtemp() + "/encoder-16"
        >>> collab.save(model, directory)
        >>> again = collab.load(directory, model=torch.nn.TransformerEncoderLayer(32, 4, batch_first=True))

    Args:
        model: a model that `collaborate_` changed, or `prune_heads_` where that cut heads out.
        directory: where to; it must not exist, its parents may be missing.
        overwrite: replace a directory that exists, if it is empty or holds a model; of a link, the one it points to.
        like: directory of the original model, whose tokenizer and similar files are copied; see `carry_side_files`.
        max_shard_size: largest file of a transformers model, as in `save_pretrained`.
        extra: further text files to put beside the model, name -> text.

    Raises:
        FileExistsError, NotADirectoryError, PermissionError: as `check_target` says.
        ValueError: the model has no collaborative attention, or cannot be written.
    """
    model = _unwrap(model)
    if any(isinstance(module, Collaborative) and _is_sharded(module) for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__} must have its parameters whole to be saved, but they are sharded: "
            "save within FullyShardedDataParallel.summon_full_params(model)"
        )
    if not structure_of(model):
        raise ValueError(
            f"{type(model).__name__} must have collaborative attention to be saved, or heads cut out; "
            "collaborate_ it first"
        )
    if hasattr(model, "peft_config"):
        raise ValueError(
            f"{type(model).__name__} has adapters: merge them (merge_and_unload) and save the result, "
            "or save the adapters alone with save_pretrained"
        )
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} must be a tensor to be saved, got {type(tensor).__name__}")
        if tensor.device.type == "meta":
            raise ValueError(f"{name} must have values to be saved, but is on the meta device")
    record_structure_(model)
    saves_itself = hasattr(model, "save_pretrained") and not timm_models.is_timm(model)
    if max_shard_size is not None and not saves_itself:
        raise ValueError(f"max_shard_size must be None for {type(model).__name__}: only transformers models are split")
    for name in extra or {}:
        if name in ("", "..") or Path(name).name != name:
            raise ValueError(f"extra must have plain file names, got {name!r}")
    with _new_directory(Path(directory), overwrite) as draft:
        if like is not None:
            carry_side_files(like, draft)
        if saves_itself:
            options = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
            model.save_pretrained(str(draft), **options)  # type: ignore[operator]
        else:
            _write(model, draft)
        for name, text in (extra or {}).items():
            if (draft / name).exists():
                raise ValueError(f"extra must not have {name!r}, which is a file of the model")
            (draft / name).write_text(text, encoding="utf-8")


def load(
    directory: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    model_class: type[Any] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Any:
    """Read back a model that `save` or `save_pretrained` wrote, in evaluation mode. Only safetensors are read.

    After `import collab` the `from_pretrained` of transformers reads such a directory as well. This function checks
    more: every weight must be there and none may be left over.

    Example:
        >>> import tempfile, transformers, collab
        >>> config = transformers.BertConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1)
        >>> model = transformers.BertModel(config)
        >>> report = collab.collaborate_(model, collab.CollaborativeConfig(shared_dim=16))
        >>> directory = tempfile.mkdtemp() + "/bert-16"
        >>> collab.save(model, directory)
        >>> type(collab.load(directory)).__name__
        'BertModel'

    Args:
        directory: what `save` wrote.
        model: an ordinary instance of the saved model, which is made collaborative and given the weights; needed for
            models that are neither transformers' nor timm's.
        model_class: class of transformers to open the checkpoint with, if not the one that was saved: weights that
            only one of the two has are then new or left out, as `from_pretrained` does.
        device: where the model goes.
        dtype: type of its weights; the one they were saved with if not given.
        options: passed to `from_pretrained`.

    Raises:
        CheckpointError: a file is missing, truncated, edited, or newer than this version of collab.
    """
    folder = Path(directory)
    config = read_config(folder)
    structure = sites_in(config.get("collaborative"), folder / CONFIG_NAME)
    if "transformers_version" in config:
        if model is not None:
            raise ValueError(f"model must be None for {folder}, a transformers checkpoint; give model_class if need be")
        loaded = _load_transformers(folder, config, model_class, dtype, options)
    else:
        given = sorted(options) + ["model_class"] * (model_class is not None)
        if given:
            raise ValueError(
                f"{', '.join(given)} must not be given for {folder}, which is not a transformers checkpoint"
            )
        if model is None:
            model = _make(folder, config)
        loaded = _load_into(model, structure, folder).to(dtype=dtype).eval()
    # What from_pretrained has spread over devices is not touched unless asked for.
    return loaded if device is None else loaded.to(device)


def sites_in(entry: Any, where: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """The layers a config's `collaborative` entry describes, checked: path -> what `structure_of` says."""
    if entry is None:
        raise CheckpointError(
            f"{where} has no entry 'collaborative': its model was not saved as a collaborative one "
            "(save a model put together from converted parts with collab.save)"
        )
    version = entry.get("format_version") if isinstance(entry, Mapping) else None
    if type(version) is not int or version < 1:
        raise CheckpointError(
            f"'collaborative' in {where} must have an integer format_version >= 1, got {version!r} in {entry!r:.80}"
        )
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{where} has format_version {version}, newer than what collab {__version__} reads "
            f"(up to {FORMAT_VERSION}): upgrade collab"
        )
    sites = entry.get("sites")
    if not isinstance(sites, Mapping) or not sites:
        raise CheckpointError(f"'collaborative' in {where} must name its layers in 'sites', got {sites!r:.80}")
    for path, site in sites.items():
        size, left = (site.get(name) if isinstance(site, Mapping) else None for name in ("shared_dim", "num_heads"))
        if left is not None and (type(left) is not int or left < 1):
            raise CheckpointError(f"site {path!r} in {where} must have num_heads >= 1, or none, got {left!r}")
        is_size = (type(size) is int and size >= 1) or (size is None and left is not None)
        if not is_size or not isinstance(site.get("host"), str):
            raise CheckpointError(f"site {path!r} in {where} must have a host and a shared_dim >= 1, got {site!r:.80}")
        own = site.get("dims_per_head")
        if own is not None and (type(own) is not int or size is None or not 1 <= own <= size):
            raise CheckpointError(
                f"site {path!r} in {where} must have dims_per_head from 1 to shared_dim {size}, or none, got {own!r}"
            )
    return {path: dict(site) for path, site in sites.items()}


def check_dims_of(model: nn.Module, read: Callable[[str], Tensor], where: str | os.PathLike[str]) -> None:
    """Check the dimensions that heads of sparse layers are said to use, each read by its name in the model's state."""
    for site in find_attention(model):
        if isinstance(site.module, Collaborative) and site.module.dims is not None:
            name = f"{site.path}.mixing_dims".lstrip(".")
            try:
                check_dims(site.module, read(name), f"{name} in {where}")
            except ValueError as error:
                raise CheckpointError(str(error)) from error


def check_target(directory: str | os.PathLike[str], overwrite: bool) -> None:
    """Check that `save` can put a model there, before any work is done for it. Nothing is written.

    Args:
        directory: where the model is to go.
        overwrite: whether a directory that is empty or holds a model may be replaced.

    Raises:
        FileExistsError: it exists and may not be replaced.
        NotADirectoryError: it, or what should hold it, is something else than a directory.
        PermissionError: it cannot be made or replaced there.
    """
    target = Path(directory)
    if target.exists() or target.is_symlink():
        if not overwrite:
            raise FileExistsError(f"{target} exists already; give another directory, or overwrite=True")
        if not target.is_dir():
            raise NotADirectoryError(f"{target} must be a directory to be overwritten")
    place = target.resolve()
    parent = next(folder for folder in place.parents if folder.exists())
    if not parent.is_dir():
        raise NotADirectoryError(f"{parent} must be a directory to hold {target}")
    for folder in (parent, place):
        if folder.exists() and not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(f"{folder} must be writable to put a model at {target}")
    if place.exists() and any(place.iterdir()) and not (place / CONFIG_NAME).is_file():
        raise FileExistsError(f"{target} must be empty or hold a model ({CONFIG_NAME}) to be overwritten")


def _unwrap(model: nn.Module) -> nn.Module:
    """The model inside what torch.compile and data parallel training wrap around it."""
    while type(model).__name__ in WRAPPERS:
        model = getattr(model, WRAPPERS[type(model).__name__])
    return model


def _is_sharded(module: nn.Module) -> bool:
    mixing = module._parameters.get("mixing")
    return mixing is None or mixing.dim() != 2


@contextmanager
def _new_directory(target: Path, overwrite: bool) -> Iterator[Path]:
    """A directory to write in, beside the target, that takes the target's place when all went well."""
    check_target(target, overwrite)
    target = target.resolve()  # a link stays, and what it points to is replaced
    target.parent.mkdir(parents=True, exist_ok=True)
    unique = uuid.uuid4().hex[:8]
    draft, former = (target.parent / f".{target.name}.{unique}.{role}" for role in ("draft", "former"))
    draft.mkdir()
    try:
        yield draft
        if target.exists():
            target.rename(former)
        try:
            draft.rename(target)
        except BaseException:
            if former.exists():
                former.rename(target)
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    if former.exists():
        shutil.rmtree(former)


def _write(model: nn.Module, folder: Path) -> None:
    """Config and weights of a model that is not transformers'."""
    config: dict[str, Any] = {"model_class": f"{type(model).__module__}.{type(model).__qualname__}"}
    if timm_models.is_timm(model):
        how, why_not = timm_models.how_to_create(model)
        if why_not:
            warnings.warn(
                f"timm.create_model cannot make this {type(model).__name__} again: {why_not}. "
                "Keep the code that makes it: collab.load will need model=...",
                stacklevel=3,
            )
        else:
            config |= how
    config["collaborative"] = description(model)
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_weights(model, folder / WEIGHTS_NAME)


def read_config(folder: Path) -> dict[str, Any]:
    """What a model's config.json says; it must be there and hold a JSON object."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} must be a directory that collab.save wrote, there is none")
    file = folder / CONFIG_NAME
    if not file.is_file():
        raise FileNotFoundError(f"{folder} is not a model: it has no {CONFIG_NAME}")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} must hold a JSON object, got {type(config).__name__}")
    return config


def _load_transformers(
    folder: Path,
    config: dict[str, Any],
    model_class: type[Any] | None,
    dtype: torch.dtype | None,
    options: dict[str, Any],
) -> Any:
    import transformers

    loader = config.get("quantization_config")
    if loader != LOADER:
        raise CheckpointError(f"{folder / CONFIG_NAME} must have quantization_config {LOADER}, got {loader}")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} has no weights: looked for {WEIGHTS_NAME} and shards named *.safetensors")
    read_shapes(files)
    names = config.get("architectures") or []
    saved_class: Any = getattr(transformers, names[0], None) if names else None
    chosen: Any = model_class or saved_class
    if chosen is None:
        raise CheckpointError(
            f"{folder / CONFIG_NAME} names no model class of transformers ({names}): give model_class"
        )
    if dtype is not None:
        options = options | {"dtype": dtype}
    # transformers only logs which weights are of another shape, and raises an error that names none.
    imposed = {"ignore_mismatched_sizes": True, "output_loading_info": True}
    try:
        model, found = chosen.from_pretrained(
            str(folder), **({"use_safetensors": True, "local_files_only": True} | options | imposed)
        )
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    if found["mismatched_keys"] and not options.get("ignore_mismatched_sizes"):
        name, got, wanted = min(found["mismatched_keys"], key=lambda mismatch: str(mismatch[0]))
        raise CheckpointError(
            f"{name} in {folder} must be {tuple(wanted)} for {chosen.__name__} as configured, got {tuple(got)}: "
            "the config must describe the model that was saved, its entry 'collaborative' included"
        )
    if chosen is saved_class:
        for problem in ("missing", "unexpected"):
            keys = sorted(found[f"{problem}_keys"])
            if keys:
                raise CheckpointError(f"weights in {folder} do not fit {chosen.__name__}: {problem} {', '.join(keys)}")
    return model


def _make(folder: Path, config: dict[str, Any]) -> nn.Module:
    if "architecture" not in config:
        raise ValueError(
            f"{folder} holds the weights of {config.get('model_class', 'a torch model')} but not how to make one: "
            f"give load(..., model=) an ordinary instance, as it was before collaborate_"
        )
    try:
        return timm_models.create(config)
    except Exception as error:
        raise CheckpointError(f"timm cannot make what {folder / CONFIG_NAME} describes: {error}") from error


def _load_into(model: nn.Module, structure: dict[str, dict[str, Any]], folder: Path) -> nn.Module:
    """Make an ordinary model collaborative and fill it; it is left as it was if anything does not fit."""
    trial = _without_values(model)
    try:
        build_structure_(trial, structure)
    except ValueError as error:
        raise CheckpointError(f"{folder / CONFIG_NAME} does not fit {type(model).__name__}: {error}") from error
    check_fits(trial, folder / WEIGHTS_NAME)
    check_dims_of(trial, partial(read_tensor, folder / WEIGHTS_NAME), folder / WEIGHTS_NAME)
    build_structure_(model, structure)
    read_weights_(model, folder / WEIGHTS_NAME)
    return model


def _without_values(model: nn.Module) -> nn.Module:
    """A copy of a model's structure, its tensors on the meta device."""
    copies: dict[int, Any] = {}
    for parameter in model.parameters():
        if parameter.device.type == "meta":
            raise ValueError(f"model must have its parameters on a device, but {type(model).__name__} is on meta")
        copies[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        copies[id(buffer)] = buffer.detach().to("meta")
    return copy.deepcopy(model, copies)
