"""find_attention: where a model's attention is, how large it is, and what forbids a swap."""

from dataclasses import dataclass

from torch import nn

from collab.hosts import Collaborative, Host, host_of, why_not
from collab.table import format_table


@dataclass(frozen=True)
class AttentionSite:
    """One attention layer found in a model.

    Attributes:
        path: where it is, as in `model.get_submodule(path)`.
        paths: every path that leads to the same module, `path` first.
        module: the layer.
        host: what knows its class, or None.
        kind: "self" or "cross".
        num_heads, head_dim: its heads and the size of one; 0 if unknown.
        query_width, key_width, value_width: widths of its three inputs; 0 if unknown.
        uses: how many times one pass of the model runs it; more than one for shared modules.
        why_not: reasons why it cannot be made collaborative; empty when it can.
    """

    path: str
    paths: tuple[str, ...]
    module: nn.Module
    host: Host | None
    kind: str
    num_heads: int
    head_dim: int
    query_width: int
    key_width: int
    value_width: int
    uses: int
    why_not: tuple[str, ...]

    @property
    def shared(self) -> bool:
        """Whether one pass of the model runs this module more than once."""
        return self.uses > 1

    @property
    def full_dim(self) -> int:
        """Heads x head size: the shared size at which a swap is exact."""
        return self.num_heads * self.head_dim

    @property
    def class_name(self) -> str:
        """Name of the layer's class."""
        return type(self.module).__name__

    def to_dict(self) -> dict[str, object]:
        """Plain values, ready for JSON."""
        names = ("path", "kind", "num_heads", "head_dim", "query_width", "key_width", "value_width", "uses")
        values: dict[str, object] = {name: getattr(self, name) for name in names}
        host = self.host.name if self.host else None
        return values | {
            "class": self.class_name,
            "host": host,
            "paths": list(self.paths),
            "why_not": list(self.why_not),
        }


class AttentionSites(list[AttentionSite]):
    """A list of sites that prints as a table."""

    def __str__(self) -> str:
        rows = [
            [
                site.path, site.class_name, site.kind, site.num_heads, site.head_dim,
                f"{site.query_width}/{site.key_width}/{site.value_width}", site.uses, "; ".join(site.why_not) or "yes",
            ]
            for site in self
        ]  # fmt: skip
        return format_table(["path", "class", "kind", "heads", "head_dim", "widths q/k/v", "uses", "can swap"], rows)


def find_attention(model: nn.Module) -> AttentionSites:
    """List every attention layer of a model, those that cannot be swapped with the reasons why.

    Example:
        >>> import torch, collab
        >>> [site.path for site in collab.find_attention(torch.nn.TransformerEncoderLayer(64, 4))]
        ['self_attn']
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got a {type(model).__name__}")
    paths: dict[int, list[str]] = {}
    modules: dict[int, nn.Module] = {}
    names: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(path)
        modules[id(module)] = module
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            names.setdefault(id(parameter), []).append(f"{path}.{name}".lstrip("."))
    return AttentionSites(
        _site(module, tuple(paths[key]), names) for key, module in modules.items() if _is_attention(module)
    )


def _is_attention(module: nn.Module) -> bool:
    """Whether a module attends itself: a host knows it, or its name says so and nothing inside it does."""
    if host_of(module) is not None:
        return True
    return _named_attention(module) and not any(
        host_of(child) is not None or _named_attention(child) for child in module.modules() if child is not module
    )


def _named_attention(module: nn.Module) -> bool:
    name = type(module).__name__
    owns_weights = any(True for _ in module.parameters())
    named = ("Attention" in name or "Attn" in name) and not name.endswith(("Output", "Projection"))
    return named and owns_weights and not isinstance(module, Collaborative)


def _site(module: nn.Module, paths: tuple[str, ...], names: dict[int, list[str]]) -> AttentionSite:
    host = host_of(module)
    reasons = why_not(module)
    if host is not None and not reasons:
        reasons = _ties(host, module, paths, names)
    sizes = {"num_heads": 0, "head_dim": 0, "query_width": 0, "key_width": 0, "value_width": 0}
    if host is not None:
        sizes = host.sizes(module)
    return AttentionSite(
        path=paths[0],
        paths=paths,
        module=module,
        host=host,
        kind="cross" if host is not None and host.is_cross(module, paths[0]) else "self",
        uses=len(paths) * (host.uses(module) if host is not None else 1),
        why_not=tuple(reasons),
        **sizes,
    )


def _ties(host: Host, module: nn.Module, paths: tuple[str, ...], names: dict[int, list[str]]) -> list[str]:
    """Why weights that a swap would replace cannot be: they are another layer's too, and would stay that layer's."""
    inside = tuple(f"{path}." if path else "" for path in paths)
    elsewhere = [
        name
        for part in host.parts(module)
        for parameter in part.parameters(recurse=False)
        for name in names[id(parameter)]
        if not name.startswith(inside)
    ]
    return [f"its weights are tied to {', '.join(dict.fromkeys(elsewhere))}: untie them first"] if elsewhere else []
