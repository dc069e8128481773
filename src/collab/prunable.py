"""Which layers heads can be taken from, and what belongs to each of their heads."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from collab.hosts import weights_problem
from collab.hosts.heads import HeadParts, can_be_cut, head_parts, output_projection, why_not_prune
from collab.inspection import AttentionSite, find_attention
from collab.structure import host_at


@dataclass(frozen=True)
class Prunable:
    """One attention layer whose heads can go.

    Attributes:
        site: where it is.
        output: its output projection, in it or beside it.
        parts: what the parameters of both have of each head.
    """

    site: AttentionSite
    output: nn.Module
    parts: HeadParts

    @property
    def numbers_per_head(self) -> int:
        """Parameters that belong to one head."""
        return sum(part.numbers_per_head for several in self.parts.values() for part in several)

    @property
    def emptied(self) -> list[int]:
        """Heads that were taken away before, where that left zeros."""
        if can_be_cut(host_at(self.site), self.site.module):
            return []
        parts = (*self.parts["value"], *self.parts["out"])
        silent = [~part.of_heads(part.parameter.detach() != 0).any(1).cpu() for part in parts]
        return torch.stack(silent).all(0).nonzero().flatten().tolist()

    def count(self) -> int:
        """Parameters of the module and its output projection."""
        return sum(one.numel() for one in _parameters(self.site.module, self.output).values())


def find_prunable(
    model: nn.Module, only: Callable[[AttentionSite], bool] | None = None
) -> tuple[list[Prunable], dict[str, list[str]]]:
    """The layers whose heads can be taken away, and path -> reasons for all others."""
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(module))
    found, left = [], {}
    for site in find_attention(model):
        reasons = list(site.why_not)
        if not reasons and only is not None and not only(site):
            reasons = ["not selected"]
        if not reasons:
            output = output_projection(model, site.host, site.path)
            reasons = why_not_prune(host_at(site), site.module, output) or weights_problem(site.module)
        if not reasons and output is not None:
            one = Prunable(site, output, head_parts(host_at(site), site.module, output))
            parts = [part for several in one.parts.values() for part in several]
            if any(len(owners[id(part.parameter)]) > 1 for part in parts):
                reasons = ["its weights are tied to another layer's: untie them first"]
            else:
                found.append(one)
        if reasons:
            left[site.path] = reasons
    return found, left


def owned_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Every parameter of the attention modules and of their output projections, each once."""
    found: dict[int, nn.Parameter] = {}
    for site in find_attention(model):
        found |= _parameters(site.module, output_projection(model, site.host, site.path))
    return list(found.values())


def _parameters(module: nn.Module, output: nn.Module | None) -> dict[int, nn.Parameter]:
    both = [*module.parameters(), *(() if output is None else output.parameters())]
    return {id(parameter): parameter for parameter in both}
