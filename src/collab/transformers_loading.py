"""What lets plain `from_pretrained` open a collaborative checkpoint: shape the model before its weights arrive.

transformers calls a registered "quantizer" between building a model on the meta device and reading its weights. Nothing
is quantised here, and no trace of it stays on the loaded model.
"""

from collections.abc import Iterable, Mapping, Set
from typing import Any

from torch import Tensor
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from collab.checkpoint import check_dims_of, sites_in
from collab.hosts import Collaborative
from collab.inspection import find_attention
from collab.structure import LOADER, build_structure_
from collab.weights_file import CheckpointError, read_shapes


@register_quantization_config(LOADER["quant_method"])
class CollaborativeLoading(QuantizationConfigMixin):
    """Stands in a config for the loader below; all that matters is in the config's `collaborative` entry."""

    def __init__(self, **ignored: Any) -> None:
        self.quant_method = LOADER["quant_method"]  # type: ignore[assignment]


@register_quantizer(LOADER["quant_method"])
class CollaborativeLoader(HfQuantizer):
    """Makes the attention of an empty model collaborative, and sees to it that every weight of it is then loaded."""

    def __init__(self, quantization_config: QuantizationConfigMixin, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        # Weights are read and cast as those of any model are, not as packed numbers.
        self.pre_quantized = False
        self._is_checked = False

    def _process_model_before_weight_loading(self, model: Any, **arguments: Any) -> Any:
        read_shapes(arguments.get("checkpoint_files") or [])
        where = f"{model.config.name_or_path}/config.json"
        structure = sites_in(getattr(model.config, "collaborative", None), where)
        names = _at_home(model, structure)
        try:
            build_structure_(model, {name: structure[path] for path, name in names.items()})
        except ValueError as error:
            raise CheckpointError(f"{where} does not fit {type(model).__name__}: {error}") from error
        expected = dict(model.state_dict(keep_vars=True))
        proceed = model.mark_tied_weights_as_initialized

        def check_and_proceed(loading_info: Any) -> None:
            # This is the first that transformers does once weights are in, and before it makes up missing ones.
            del model.mark_tied_weights_as_initialized
            _check_weights(model, expected, loading_info, recorded=names)
            self._is_checked = True
            proceed(loading_info)

        model.mark_tied_weights_as_initialized = check_and_proceed
        return model

    def _process_model_after_weight_loading(self, model: Any, **arguments: Any) -> Any:
        if not self._is_checked:
            raise RuntimeError("this version of transformers loads weights in a way that collab cannot check")
        self.remove_quantization_config(model)  # type: ignore[no-untyped-call]
        del model.is_quantized
        for module in model.modules():
            config: Any = getattr(module, "config", None)
            if hasattr(config, "_is_quantized"):
                del config._is_quantized
        model.config.quantization_config = dict(LOADER)
        model._weight_conversions = []
        return model

    def is_serializable(self) -> bool:
        """Whether the model can be saved: always."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether the model can be trained: always."""
        return True


def _at_home(model: Any, structure: Iterable[str]) -> dict[str, str]:
    """Recorded path -> the same layer's path in the opening class, which may have a head's prefix or lack one.

    A class that was not the one saved may lack some of the layers; that class's own must all be there.
    """
    here = {path: site.path for site in find_attention(model) for path in site.paths}
    prefix = f"{model.base_model_prefix}."
    is_same_class = type(model).__name__ in (model.config.architectures or [])
    found = {}
    for path in structure:
        spellings = [name for name in (path, prefix + path, path.removeprefix(prefix)) if name in here]
        alike = {site for name, site in here.items() if _ends_alike(path, name)}
        if spellings:
            found[path] = spellings[0]
        elif len(alike) == 1 and sum(_ends_alike(other, *alike) for other in structure) == 1:
            found[path] = alike.pop()
        elif is_same_class:
            found[path] = path
    return found


def _ends_alike(left: str, right: str) -> bool:
    """Whether two paths are one but for components that one of them has in front."""
    return f".{left}".endswith(f".{right}") or f".{right}".endswith(f".{left}")


def _check_weights(model: Any, expected: Mapping[str, Tensor], loading_info: Any, recorded: Iterable[str]) -> None:
    """Attention must be loaded whole; other weights of a wrong shape are emptied, for transformers to complain of."""
    sites = find_attention(model)
    attention = tuple(f"{path}." for site in sites if isinstance(site.module, Collaborative) for path in site.paths)
    source = model.config.name_or_path
    loaded = model.state_dict(keep_vars=True)
    missing = [
        name
        for name in sorted(loading_info.missing_keys - model.all_tied_weights_keys.keys())
        if name.startswith(attention) and not getattr(loaded[name], "_is_hf_initialized", False)
    ]
    if missing:
        raise CheckpointError(f"{source} has no {', '.join(missing)}: the file is not whole, or its names were changed")
    # A weight that nobody expects keeps the name it has in the file, with the prefixes of the class that was saved.
    in_file = (*attention, *(f"{path}." for path in recorded))
    unexpected = sorted(name for name in loading_info.unexpected_keys if name.startswith(in_file))
    if unexpected:
        raise CheckpointError(f"{source} has {', '.join(unexpected)}, which collaborative attention does not have")
    shapes = {name: (tuple(tensor.shape), tuple(expected[name].shape)) for name, tensor in loaded.items()}
    changed = {name: (shape, wanted) for name, (shape, wanted) in shapes.items() if shape != wanted}
    for name, (shape, wanted) in changed.items():
        if name.startswith(attention):
            raise CheckpointError(f"{name} in {source} must be {wanted} as its config.json says, got {shape}")
    check_dims_of(model, loaded.__getitem__, source)
    for site in sites:
        if f"{site.path}.mixing" in loading_info.unexpected_keys:
            raise CheckpointError(f"{source} has {site.path}.mixing, but its config.json does not have {site.path}")
    # Only now: an error of ours would be lost in the one transformers raises when it finds any of these.
    for name, (shape, wanted) in changed.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, expected[name])
        loading_info.mismatched_keys.add((name, shape, wanted))
    _mark_loaded(model, loaded.keys() - loading_info.missing_and_mismatched())


def _mark_loaded(model: Any, loaded: Set[str]) -> None:
    """Keep transformers from initialising what is loaded whole: some classes look for biases that are gone."""
    for path, module in model.named_modules():
        if any(isinstance(part, Collaborative) for part in module.modules()):
            prefix = f"{path}." if path else ""
            tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
            if all(prefix + name in loaded for name, _ in tensors):
                module._is_hf_initialized = True
