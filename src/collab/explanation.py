"""explain: which implementation a model's collaborative attention runs, why, and why not the others."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from collab.ops.choice import Choice, watcher
from collab.table import format_table


@dataclass(frozen=True, kw_only=True)
class ExplainedAttention:
    """One kind of call of collaborative attention, from one layer: what it was given and what runs.

    Attributes:
        path: the layer that makes it, as in `model.get_submodule(path)`; "" for what was explained itself.
        calls: how many such calls one run makes.
        batch, queries, keys: sequences, and tokens of each side.
        num_heads, shared_dim, value_dim: heads, dimensions they share, and of one value head.
        dims_per_head: how many of the shared dimensions a head uses; None when it uses all.
        content: whether heads have content scores.
        device, dtype: of the queries.
        mask: "none", or its type and shape.
        causal, dropout, need_weights: as `collab.ops.attention` was given them.
        gradients: whether the call is recorded for gradients.
        implementation: what runs.
        why: the rule that put it first, or who forced it.
        against: every other implementation -> why it refuses; nothing where it could run, and is slower by the rule.
    """

    path: str
    calls: int
    batch: int
    queries: int
    keys: int
    num_heads: int
    shared_dim: int
    dims_per_head: int | None
    value_dim: int
    content: bool
    device: str
    dtype: str
    mask: str
    causal: bool
    dropout: float
    need_weights: bool
    gradients: bool
    implementation: str
    why: str
    against: dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Explanation:
    """What `explain` found; prints as a table, with the reasons below it.

    Attributes:
        rows: one for each layer and kind of call, in the order they run.
    """

    rows: tuple[ExplainedAttention, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        rows = [dataclasses.asdict(row) for row in self.rows]
        for row in rows:
            row["against"] = {name: list(reasons) for name, reasons in row["against"].items()}
        return {"rows": rows}

    def __str__(self) -> str:
        header = [
            "path",
            "calls",
            "batch",
            "queries",
            "keys",
            "heads",
            "shared_dim",
            "value_dim",
            "dtype",
            "mask",
            "runs",
        ]
        table = format_table(header, [_cells(row) for row in self.rows])
        reasons = dict.fromkeys(line for row in self.rows for line in _reasons(row))
        return "\n".join((table, "", *reasons))


def explain(target: Callable[..., Any], *inputs: Any, **arguments: Any) -> Explanation:
    """Run something once and say which implementation its collaborative attention runs, and why no other.

    It runs as it is: in its own mode, under the present `torch.no_grad()` or `use_implementation`. Random numbers and
    the buffers of a model in training are put back afterwards. A cache among the inputs is filled, as by any call.

    Example:
        >>> import torch, collab
        >>> layer = collab.CollaborativeAttention(embed_dim=64, num_heads=4, shared_dim=24)
        >>> explanation = collab.explain(layer, torch.randn(2, 10, 64), causal=True)
        >>> explanation.rows[0].queries, explanation.rows[0].shared_dim
        (10, 24)
        >>> query, key, value = torch.randn(2, 10, 24), torch.randn(2, 12, 24), torch.randn(2, 4, 12, 16)
        >>> explanation = collab.explain(
        ...     collab.ops.attention, query, key, value, torch.ones(4, 24), scale=0.25, implementation="reference"
        ... )
        >>> explanation.rows[0].why
        "implementation='reference' asks for it"

    Args:
        target: a model, a layer, a method such as `model.generate`, or `collab.ops.attention`, which takes query
            (batch, query, shared), key (batch, key, shared [+ head]), value (batch, head, key, value_dim) and mixing
            (head, shared).
        *inputs: what it is called with,
        **arguments: and by name.

    Returns:
        One row for every layer and kind of call: what it was given, what runs, and why.
    """
    if not callable(target):
        raise ValueError(f"target must be a model, a layer or a function, got a {type(target).__name__}")
    owner = target if isinstance(target, nn.Module) else getattr(target, "__self__", None)
    owner = owner if isinstance(owner, nn.Module) else None
    watch = _Watch()
    token = watcher.set(watch)
    try:
        # Compiled code is run as written: it would not tell what it calls.
        with _followed(owner, watch), _put_back(owner), torch.compiler.set_stance("force_eager"):
            target(*inputs, **arguments)
    finally:
        watcher.reset(token)
    if not watch.rows:
        name = getattr(target, "__name__", type(target).__name__)
        raise ValueError(f"target must call collaborative attention, and {name} did not: convert it by collaborate_")
    return Explanation(tuple(watch.rows.values()))


class _Watch:
    """Told of every call; knows which layer runs."""

    def __init__(self) -> None:
        self.paths = [""]
        self.rows: dict[str, ExplainedAttention] = {}

    def __call__(self, choice: Choice, given: dict[str, Any]) -> None:
        row = _row(self.paths[-1], choice, given)
        before = self.rows.get(repr(row))
        self.rows[repr(row)] = dataclasses.replace(row, calls=1 if before is None else before.calls + 1)


def _row(path: str, choice: Choice, given: dict[str, Any]) -> ExplainedAttention:
    query, key, value, mixing = (given[name] for name in ("query", "key", "value", "mixing"))
    tensors = [part for part in given.values() if isinstance(part, Tensor)]
    return ExplainedAttention(
        path=path,
        calls=1,
        batch=query.shape[0],
        queries=query.shape[1],
        keys=key.shape[1],
        num_heads=mixing.shape[0],
        shared_dim=query.shape[2],
        dims_per_head=None if given["dims"] is None else mixing.shape[1],
        value_dim=value.shape[3],
        content=key.shape[2] > query.shape[2],
        device=query.device.type,
        dtype=_dtype(query),
        mask="none" if given["mask"] is None else f"{_dtype(given['mask'])} {tuple(given['mask'].shape)}",
        causal=given["causal"],
        dropout=given["dropout"],
        need_weights=given["need_weights"],
        gradients=torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors),
        implementation=choice.name,
        why=choice.why,
        against=choice.against,
    )


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _cells(row: ExplainedAttention) -> list[object]:
    size = str(row.shared_dim) if row.dims_per_head is None else f"{row.dims_per_head} of {row.shared_dim}"
    mask = " + ".join(part for part in (row.mask, "causal" if row.causal else "") if part not in ("", "none"))
    return [
        row.path or "(itself)", row.calls, row.batch, row.queries, row.keys, row.num_heads, size, row.value_dim,
        row.dtype, mask or "none", row.implementation,
    ]  # fmt: skip


def _reasons(row: ExplainedAttention) -> Iterator[str]:
    yield f"{row.implementation}: {row.why}"
    for name, reasons in row.against.items():
        yield f"not {name}: {'; '.join(reasons) or f'it could run, {row.implementation} comes first'}"


@contextlib.contextmanager
def _followed(owner: nn.Module | None, watch: _Watch) -> Iterator[None]:
    """Hooks that say which module runs, gone afterwards."""

    def enter(path: str, *_: Any) -> None:
        if watcher.get() is watch:  # another thread may run the same model
            watch.paths.append(path)

    def leave(*_: Any) -> None:
        if watcher.get() is watch:
            watch.paths.pop()

    handles = []
    try:
        for path, module in [] if owner is None else owner.named_modules():
            handles.append(module.register_forward_pre_hook(partial(enter, path)))
            handles.append(module.register_forward_hook(leave, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _put_back(owner: nn.Module | None) -> Iterator[None]:
    """Random numbers, and buffers that training moves, as they were."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    modules = [] if owner is None else [module for module in owner.modules() if module.training]
    places = [(module, name) for module in modules for name, _ in module.named_buffers(recurse=False)]
    moved = [module.get_buffer(name) for module, name in places]
    kept = [buffer.clone() for buffer in moved]
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        with torch.no_grad():
            for (module, name), buffer, before in zip(places, moved, kept, strict=True):
                setattr(module, name, buffer.copy_(before))
