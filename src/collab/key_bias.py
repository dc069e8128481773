"""drop_key_bias_: set to zero what no softmax sees."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from collab.evaluate import pick_output, positions_that_count
from collab.hosts import Host, weights_problem
from collab.hosts.linear import Block, LinearHost
from collab.inspection import AttentionSite, find_attention
from collab.running import Batch, call, device_of, evaluating
from collab.structure import host_at
from collab.table import format_table


def key_bias_of(host: Host, module: Any) -> Tensor | None:
    """(head, head_dim): a view of an unconverted layer's key bias, or None if it has none."""
    num_heads = host.sizes(module)["num_heads"]
    if isinstance(host, LinearHost):
        block = host.key if isinstance(host.key, Block) else Block(host.key)
        bias: Tensor | None = attrgetter(block.name)(module).bias
        if bias is not None and block.per_head:
            return bias.detach().view(num_heads, block.count, -1)[:, block.index]
        return None if bias is None else bias.detach().chunk(block.count)[block.index].view(num_heads, -1)
    bias = getattr(module, "in_proj_bias", None)
    return None if bias is None else bias.detach().chunk(3)[1].view(num_heads, -1)


@dataclass(frozen=True)
class KeyBiasReport:
    """What `drop_key_bias_` did.

    Attributes:
        zeroed: path -> norm of the key bias that was there.
        parameters: how many numbers are zero now.
        left: path -> reasons, for layers whose key bias is as it was.
        difference: relative change of the model's output on the batch, a rounding error; None if no batch was given.
    """

    zeroed: dict[str, float]
    parameters: int
    left: dict[str, list[str]]
    difference: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [format_table(["path", "norm of the key bias, now zero"], list(self.zeroed.items()))]
        lines += [f"left as it was: {path} ({'; '.join(why)})" for path, why in self.left.items()]
        proof = "; by the formula, not tried on inputs: give a batch"
        if self.difference is not None:
            proof = f"; the output changed by {self.difference:.2g}, relative"
        return "\n".join([*lines, f"{self.parameters:,} parameters have no effect and are zero{proof}"])


@torch.no_grad()
def drop_key_bias_(
    model: nn.Module, batch: Batch | None = None, *, only: Callable[[AttentionSite], bool] | None = None
) -> KeyBiasReport:
    """Set the key biases to zero that no softmax sees, in place; all of them, or if anything fails none.

    They add the same number to the scores of all keys. The parameters stay where they are: the model's structure and
    the names in its checkpoints do not change. Layers that could not be swapped keep theirs: with rotary positions, for
    one, a key bias does have an effect.

    Args:
        model: any model `find_attention` finds swappable attention in.
        batch: inputs to prove it on: the output must stay what it was, up to the root of the precision of its type, or
            four times that of a half type.
        only: see only to layers for which this is true.
    """
    found = [site for site in find_attention(model) if only is None or only(site)]
    left = {site.path: reasons for site in found if (reasons := [*site.why_not] or _why_no_bias(site))}
    sites = [site for site in found if site.path not in left]
    if not sites:
        listing = "; ".join(f"{path}: {', '.join(reasons)}" for path, reasons in left.items())
        raise ValueError(f"no key bias to drop in {type(model).__name__}{f': {listing}' if left else ''}")
    before = None if batch is None else _output(model, batch)
    biases = {site.path: bias for site in sites if (bias := key_bias_of(host_at(site), site.module)) is not None}
    saved = {path: bias.clone() for path, bias in biases.items()}
    difference = None
    try:
        for bias in biases.values():
            bias.zero_()
        if batch is not None and before is not None:
            difference = _difference(before, _output(model, batch))
    except BaseException:
        for path, bias in biases.items():
            bias.copy_(saved[path])
        raise
    norms = {path: float(bias.double().norm()) for path, bias in saved.items()}
    return KeyBiasReport(norms, sum(bias.numel() for bias in saved.values()), left, difference)


def _why_no_bias(site: AttentionSite) -> list[str]:
    """Why there is nothing to drop in a layer that could be swapped, or nothing that could be told apart."""
    if problems := weights_problem(site.module):
        return problems
    return [] if key_bias_of(host_at(site), site.module) is not None else ["it has no key bias"]


def _output(model: nn.Module, batch: Batch) -> Tensor:
    """What a model gives for a batch at positions that are not padding, (position, feature)."""
    with evaluating(model):
        _, output = pick_output(call(model, batch, device_of(model)), type(model).__name__)
    counts = positions_that_count(model, batch, output)
    return output.flatten(0, -2) if counts is None else output[counts]


def _difference(before: Tensor, after: Tensor) -> float:
    """The relative change of an output; more than rounding is an error."""
    eps = torch.finfo(before.dtype).eps
    limit = min(eps**0.5, 4 * eps if eps > 1e-4 else 1.0)  # the root of a half type's would let real changes pass
    wide = [(part.cpu() if part.device.type == "mps" else part).double() for part in (before, after)]
    change = float((wide[1] - wide[0]).norm() / wide[0].norm().clamp(min=1e-300))
    if not change <= limit:
        raise ValueError(
            f"without the key biases the output must change by rounding alone, at most {limit:.2g}, got {change:.3g}; "
            "they are as they were"
        )
    return change
