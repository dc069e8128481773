"""Which implementation runs: the first in the ranking that takes the inputs, or the one that is asked for."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor

from collab.ops import cudnn, fused, matmul, padded, reference, sdpa
from collab.ops.ranking import rank

IMPLEMENTATIONS: dict[str, ModuleType] = {
    module.NAME: module for module in (fused, cudnn, sdpa, padded, matmul, reference)
}
"""By name. Each has `attention` and `why_not`; the order is that of messages, `rank` has that of speed."""

_forced = "auto"
"""What `use_implementation` asks for, in the whole process: threads that recompute layers for gradients must agree."""


@dataclass(frozen=True)
class Choice:
    """Which implementation runs on some inputs, and why no other does.

    Attributes:
        name: the one that runs.
        why: the rule that put it first, or who forced it.
        against: every other one -> why it refuses the inputs; nothing where it takes them and would be slower.
    """

    name: str
    why: str
    against: dict[str, tuple[str, ...]]


Watcher = Callable[[Choice, dict[str, Any]], None]
"""Is told of every call of `ops.attention`: the choice, and the arguments by name."""

watcher: ContextVar[Watcher | None] = ContextVar("collab_watcher", default=None)
"""Who watches the calls made from here. Compiled code is not watched."""


@contextlib.contextmanager
def use_implementation(name: str) -> Iterator[None]:
    """Within, all collaborative attention runs this implementation, and raises where it refuses the inputs.

    It is in force for the whole process, and for layers of converted models as for `CollaborativeAttention`; a layer
    made with an `implementation` of its own keeps that. Compiled models are compiled again where it matters.

    Example:
        >>> import torch, collab
        >>> layer = collab.CollaborativeAttention(embed_dim=64, num_heads=4, shared_dim=24)
        >>> with collab.use_implementation("reference"):
        ...     output = layer(torch.randn(2, 10, 64))

    Args:
        name: one of `collab.ops.IMPLEMENTATIONS`, or "auto" for the automatic choice.
    """
    global _forced
    check_implementation(name)
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


def check_implementation(name: str) -> None:
    """Refuse a name that is neither "auto" nor in `IMPLEMENTATIONS`."""
    if name != "auto" and name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be 'auto' or one of {list(IMPLEMENTATIONS)}, got {name!r}")


def choose(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixing: Tensor,
    *,
    dims: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    need_weights: bool = False,
    implementation: str = "auto",
) -> str:
    """Name the implementation `attention` would use for these inputs, or raise with every reason against them."""
    check_implementation(implementation)
    options: dict[str, Any] = {
        "dims": dims, "mask": mask, "causal": causal, "dropout": dropout, "need_weights": need_weights,
    }  # fmt: skip
    asked = _forced if implementation == "auto" else implementation
    candidates = rank(query, key, value, mixing, **options).names if asked == "auto" else (asked,)
    refusals = {}
    for name in candidates:
        refusals[name] = IMPLEMENTATIONS[name].why_not(query, key, value, mixing, **options)
        if not refusals[name]:
            return name
    listing = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in refusals.items())
    raise ValueError(f"no implementation takes these inputs. {listing}")


def choice_for(
    query: Tensor, key: Tensor, value: Tensor, mixing: Tensor, *, implementation: str = "auto", **options: Any
) -> Choice:
    """What `choose` gives, with the reason for it and those against every other implementation."""
    name = choose(query, key, value, mixing, implementation=implementation, **options)
    if implementation != "auto":
        why = f"implementation={implementation!r} asks for it"
    elif _forced != "auto":
        why = f"use_implementation({_forced!r}) asks for it"
    else:
        why = str(rank(query, key, value, mixing, **options))
    others = [other for other in IMPLEMENTATIONS if other != name]
    against = {other: tuple(IMPLEMENTATIONS[other].why_not(query, key, value, mixing, **options)) for other in others}
    return Choice(name, why, against)
