"""Which layers of a model are collaborative or pruned, and how: describe it, write it into configs, build it again."""

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from collab.config import FORMAT_VERSION, CollaborativeConfig
from collab.hosts import Collaborative, Host, empty_shared_weights, weights_problem
from collab.hosts.heads import cut_to_, heads_before
from collab.inspection import AttentionSite, find_attention


def structure_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Which layers are not as their class makes them, and how: all that is needed to build the same structure again.

    Collaborative ones have `shared_dim`, and `dims_per_head` where heads use some of it; where heads were cut out
    `num_heads` is how many are left.
    """
    structure = {}
    for site in find_attention(model):
        if site.host is None:
            continue
        entry: dict[str, Any] = {}
        if isinstance(site.module, Collaborative):
            entry["shared_dim"] = site.module.shared_dim
            if site.module.dims is not None:
                entry["dims_per_head"] = site.module.dims.shape[1]
        if heads_before(site.module) is not None:
            entry["num_heads"] = site.num_heads
        if entry:
            structure[site.path] = {"host": site.host.name} | entry
    return structure


def build_structure_(model: nn.Module, structure: Mapping[str, Mapping[str, Any]]) -> None:
    """Make the layers of an ordinary model what `structure_of` described, with weights yet to be loaded."""
    sites = {path: site for site in find_attention(model) for path in site.paths}
    unknown = sorted(set(structure) - set(sites))
    if unknown:
        raise ValueError(
            f"{type(model).__name__} has no attention at {', '.join(unknown)}; it has {', '.join(sites) or 'none'}"
        )
    for path, entry in structure.items():
        site = sites[path]
        if site.why_not:
            raise ValueError(f"attention at {path} cannot be made collaborative: {'; '.join(site.why_not)}")
        # Some models have a class of their own for each attn_implementation.
        if entry["host"].replace("Sdpa", "") != host_at(site).name.replace("Sdpa", ""):
            raise ValueError(f"attention at {path} must be a {entry['host']}, got a {host_at(site).name}")
    cut = {path: entry["num_heads"] for path, entry in structure.items() if entry.get("num_heads") is not None}
    for path, left in cut.items():
        cut_to_(model, host_at(sites[path]), sites[path].path, left)
    if cut:
        sites = {path: site for site in find_attention(model) for path in site.paths}
    chosen, pieces = [], []
    for path, entry in structure.items():
        site, shared_dim, dims_per_head = sites[path], entry.get("shared_dim"), entry.get("dims_per_head")
        if shared_dim is None:
            continue
        check_size(site, shared_dim, dims_per_head)
        chosen.append(site)
        weights = host_at(site).read(site.module)
        pieces.append(empty_shared_weights(weights, shared_dim, dims_per_head=dims_per_head))
    with all_or_nothing(model, chosen):
        for site, shared in zip(chosen, pieces, strict=True):
            host_at(site).install_(site.module, shared)


LOADER = {"quant_method": "collab"}
"""What makes `from_pretrained` ask this package to shape a model before its weights arrive: transformers finds custom
loaders by the `quantization_config` of a config, quantised or not."""


def record_structure_(model: nn.Module, config: CollaborativeConfig | None = None) -> None:
    """Write what was done into the configs of transformers models, so that their own `save_pretrained` keeps it.

    Models inside the model are seen to as well (a tower of CLIP, what a SentenceTransformer wraps). Where one shares
    its config with the model around it, the paths are those of the outer one.
    """
    recorded: set[int] = set()
    for inner in model.modules():
        model_config: Any = getattr(inner, "config", None)
        # Wrappers of such models (sentence-transformers) show the same config, but do not write it.
        if not (hasattr(type(inner), "base_model_prefix") and hasattr(model_config, "save_pretrained")):
            continue
        # Files keep the modules' own names: old names would be made by rules that split fused heads evenly.
        inner._weight_conversions = []  # type: ignore[assignment]
        described = description(inner, config)
        if described["sites"] and id(model_config) not in recorded:
            model_config.collaborative = described
            model_config.quantization_config = dict(LOADER)
            recorded.add(id(model_config))


def description(model: nn.Module, config: CollaborativeConfig | None = None) -> dict[str, Any]:
    """What a checkpoint says of a converted model: format version, layers, and the settings they came from."""
    earlier = getattr(getattr(model, "config", None), "collaborative", None) or {}
    sites = structure_of(model)
    is_sparse, is_pruned = (any(name in site for site in sites.values()) for name in ("dims_per_head", "num_heads"))
    return {
        # What an older reader understands is written for it; it must not take sparse mixing for another thing.
        "format_version": FORMAT_VERSION if is_pruned else 2 if is_sparse else 1,
        "sites": sites,
        "settings": earlier.get("settings") if config is None else config.to_dict(),
    }


def check_size(site: AttentionSite, shared_dim: int, dims_per_head: int | None = None) -> None:
    """Refuse a size that a layer cannot have, naming those it can."""
    if not 1 <= shared_dim <= site.full_dim:
        raise ValueError(f"shared_dim must be between 1 and {site.full_dim} at {site.path}, got {shared_dim}")
    if dims_per_head is not None and not 1 <= dims_per_head <= shared_dim:
        raise ValueError(f"dims_per_head must be between 1 and {shared_dim} at {site.path}, got {dims_per_head}")
    problem = host_at(site).size_problem(site.module, shared_dim)
    if problem:
        raise ValueError(f"shared_dim {shared_dim} cannot be used at {site.path}: {problem}")


def check_readable(sites: Iterable[AttentionSite]) -> None:
    """Refuse layers whose weights cannot be read as plain, finite numbers."""
    for site in sites:
        problems = weights_problem(site.module)
        if problems:
            raise ValueError(f"cannot read the weights of {site.path}: {'; '.join(problems)}")


def host_at(site: AttentionSite) -> Host:
    """The host of a layer that must have one."""
    if site.host is None:
        raise ValueError(f"no host serves {site.path}")
    return site.host


@contextmanager
def all_or_nothing(model: nn.Module, sites: list[AttentionSite]) -> Iterator[None]:
    """Undo what the block did to these layers, and to the model's configs, if it fails.

    Objects get their classes and attributes back. Tables of parameters and children are copied beforehand, not what
    is in them: the block may replace a parameter, not overwrite it.
    """
    changed: list[Any] = [part for site in sites for part in host_at(site).parts(site.module)]
    owners = [module for module in model.modules() if hasattr(getattr(module, "config", None), "save_pretrained")]
    changed += [*owners, *(owner.config for owner in owners)]
    saved = [
        (type(one), dict(vars(one)), {name: copy.copy(v) for name, v in vars(one).items() if isinstance(v, dict)})
        for one in changed
    ]
    try:
        yield
    except BaseException:
        for one, (original, attributes, tables) in zip(changed, saved, strict=True):
            one.__class__ = original
            vars(one).clear()
            vars(one).update(attributes)
            for name, table in tables.items():  # filled again, not replaced: handles of hooks remember theirs
                attributes[name].clear()
                attributes[name].update(table)
        raise
