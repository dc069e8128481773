"""prune_heads_: take whole heads away, the least important first: what sharing dimensions is to be compared with.

After Michel, Levy and Neubig (2019), "Are Sixteen Heads Really Better than One?".
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from collab.head_importance import Loss, head_importance
from collab.hosts.heads import can_be_cut, cut_heads_, empty_heads_, without_heads
from collab.inspection import AttentionSite
from collab.prunable import Prunable, find_prunable, owned_parameters
from collab.running import Batch, Progress
from collab.structure import host_at, record_structure_
from collab.swap import WRAPPERS, NoAttentionFound, count_parameters
from collab.table import format_table


@dataclass(frozen=True)
class PrunedSite:
    """What became of one attention layer.

    Attributes:
        path: where the layer is.
        host: its class.
        num_heads: how many heads it had.
        removed: which of them are gone, counted from 0 as they were before.
        is_cut: whether its projections are smaller now. Otherwise the class cannot run with fewer heads: what the heads
            give is zero and stays so in training, and their parameters are still there.
        importance: of every head it had, in their order; None where heads were named.
        parameters_before, parameters_after: of the attention module and its output projection.
    """

    path: str
    host: str
    num_heads: int
    removed: list[int]
    is_cut: bool
    importance: list[float] | None
    parameters_before: int
    parameters_after: int


@dataclass(frozen=True)
class PruningReport:
    """What `prune_heads_` did, layer by layer. Prints as a table.

    Attributes:
        sites: the layers whose heads could be taken away, those that kept all of them too.
        left: path -> reasons, for attention whose heads could not.
        attention_before, attention_after: parameters of all attention, as `attention_parameters` counts them.
        parameters_before, parameters_after: of the whole model.
        emptied: parameters of removed heads that are still there, as zeros, where a class cannot be cut.
    """

    sites: list[PrunedSite]
    left: dict[str, list[str]]
    attention_before: int
    attention_after: int
    parameters_before: int
    parameters_after: int
    emptied: int

    @property
    def removed(self) -> dict[str, list[int]]:
        """Path -> heads that are gone: `prune_heads_(model, heads=...)` takes the same from a model like this one."""
        return {site.path: site.removed for site in self.sites if site.removed}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        rows = [
            [
                site.path, site.num_heads, site.num_heads - len(site.removed),
                ", ".join(map(str, site.removed)) or "none",
                "" if not site.removed else "cut" if site.is_cut else "emptied",
                site.parameters_before, site.parameters_after,
            ]
            for site in self.sites
        ]  # fmt: skip
        header = ["path", "heads", "left", "removed", "how", "parameters before", "after"]
        lines = [format_table(header, rows)]
        lines += [f"left as it was: {path} ({'; '.join(reasons)})" for path, reasons in self.left.items()]
        if self.emptied:
            lines.append(f"note: {self.emptied:,} parameters of removed heads are zeros: their classes cannot be cut")
        lines.append(f"attention parameters: {self.attention_before:,} -> {self.attention_after:,}")
        share = self.parameters_after / max(1, self.parameters_before)
        lines.append(f"model parameters: {self.parameters_before:,} -> {self.parameters_after:,} ({share:.3f} of them)")
        return "\n".join(lines)


def prune_heads_(
    model: nn.Module,
    *,
    share: float | None = None,
    parameters: int | None = None,
    heads: Mapping[str, Sequence[int]] | None = None,
    batches: Sequence[Batch] | None = None,
    loss: Loss | None = None,
    importance: Mapping[str, Tensor] | None = None,
    normalise: bool = True,
    only: Callable[[AttentionSite], bool] | None = None,
    progress: Progress | None = None,
) -> PruningReport:
    """Take attention heads away, in place; if anything fails the model is untouched.

    Heads go one by one, that of least importance in the whole model first, until enough are gone; importances are found
    once, before the first. One head at least stays in every layer, whatever its importance. A layer that a model runs
    several times, as ALBERT does, loses a head once, everywhere.

    Where the class can run with fewer heads the projections become smaller: `num_heads` of the layer shrinks, and heads
    that stay are numbered anew. In other classes what a head gives is set to zero, which training does not change; the
    report tells which is which. Optimizers made before hold parameters that are gone: make them afterwards.

    Example:
        >>> import torch, transformers, collab
        >>> config = transformers.BertConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=2)
        >>> model = transformers.BertModel(config)
        >>> report = collab.prune_heads_(model, heads={"encoder.layer.0.attention.self": [1, 3]})
        >>> [site.num_heads for site in collab.find_attention(model)]
        [2, 4]

    Args:
        model: a model with ordinary attention that `find_attention` finds swappable.
        share: share of all heads to remove, to the nearest whole head.
        parameters: how many parameters attention may have afterwards, as `attention_parameters` counts them: that of a
            converted model to put a row of equal size beside it. Heads that are emptied, now or before, count as cut.
        heads: path -> heads to remove, counted from 0, instead of a share or parameters.
        batches: labelled inputs to find importances on, as `head_importance` takes them.
        loss: see `head_importance`.
        importance: path -> importance of each head, instead of batches: of one pass over them for several sizes.
        normalise: see `head_importance`.
        only: prune only layers for which this is true.
        progress: wraps the loop over batches, given it and its length: a progress bar.

    Raises:
        NoAttentionFound: there is no layer whose heads could be taken away.
        ValueError: a setting does not fit the model, or so many heads cannot go.
    """
    _check(model, share, parameters, heads, batches, importance)
    prunable, left = find_prunable(model, only)
    if not prunable:
        seen = "; ".join(f"{path} ({', '.join(reasons)})" for path, reasons in left.items())
        raise NoAttentionFound(f"no heads to prune in {type(model).__name__}; looked at: {seen or 'nothing'}")
    if heads is not None:
        removed = _named(prunable, heads, left)
    else:
        if importance is None:
            importance = head_importance(
                model, batches or (), loss=loss, normalise=normalise, only=only, progress=progress
            )
        prunable = _with_importance(prunable, importance, left)
        removed = _least_important(model, prunable, importance, share, parameters)
    return _prune(model, prunable, removed, None if heads is not None else importance, left)


def attention_parameters(model: nn.Module) -> int:
    """Number of parameters of a model's attention modules and of their output projections, shared ones counted once.

    The output projection counts also where it is in another module, as in BERT. Ordinary heads, shared ones and what is
    left after pruning are counted alike.
    """
    return sum(parameter.numel() for parameter in owned_parameters(model))


def _check(model: nn.Module, share: Any, parameters: Any, heads: Any, batches: Any, importance: Any) -> None:
    if type(model).__name__ in WRAPPERS:
        wrapped = WRAPPERS[type(model).__name__]
        raise ValueError(f"model must be the model itself, got a {type(model).__name__}: prune its .{wrapped}")
    given = [name for name, value in (("share", share), ("parameters", parameters), ("heads", heads))
             if value is not None]  # fmt: skip
    if len(given) != 1:
        raise ValueError(f"one of share, parameters and heads must be given, got {' and '.join(given) or 'none'}")
    sources = [name for name, value in (("batches", batches), ("importance", importance)) if value is not None]
    if heads is not None and sources:
        raise ValueError(f"heads must come without {' and '.join(sources)}: which heads go is said already")
    if heads is None and len(sources) != 1:
        raise ValueError(f"{given[0]} needs either batches or importance, got {' and '.join(sources) or 'none'}")
    if isinstance(batches, Mapping | str | Tensor):
        raise ValueError(f"batches must be several batches, got one {type(batches).__name__}: put it in a list")
    if share is not None and not 0 < share < 1:
        raise ValueError(f"share must be between 0 and 1, got {share!r}")


def _named(
    prunable: Sequence[Prunable], heads: Mapping[str, Sequence[int]], left: Mapping[str, list[str]]
) -> dict[str, list[int]]:
    """The heads a caller named, by the first path of each layer."""
    known = {path: one for one in prunable for path in one.site.paths}
    removed: dict[str, list[int]] = {}
    for path, named in heads.items():
        if path not in known:
            why = "; ".join(left.get(path, [f"there is no attention, only at {', '.join(known)}"]))
            raise ValueError(f"heads names {path!r}, where none can be removed: {why}")
        site = known[path].site
        wrong = [head for head in named if type(head) is not int or not 0 <= head < site.num_heads]
        if wrong or len(set(named)) != len(named) or site.path in removed:
            raise ValueError(
                f"heads at {path} must be different whole numbers from 0 to {site.num_heads - 1}, once a layer, "
                f"got {list(named)}"
            )
        if len(named) >= site.num_heads:
            raise ValueError(f"heads must leave one of {site.num_heads} at {path}, got {list(named)}")
        removed[site.path] = sorted(named)
    if not any(removed.values()):
        raise ValueError("heads must name at least one head, got none")
    return removed


def _with_importance(
    prunable: Sequence[Prunable], importance: Mapping[str, Tensor], left: dict[str, list[str]]
) -> list[Prunable]:
    """The layers whose heads' importance is known; others are left as they are."""
    for path, values in importance.items():
        site = next((one.site for one in prunable if one.site.path == path), None)
        if site is None or tuple(values.shape) != (site.num_heads,):
            expected = "no heads that could go" if site is None else f"{site.num_heads} heads"
            raise ValueError(f"importance has {tuple(values.shape)} at {path!r}, where the model has {expected}")
    for one in prunable:
        if one.site.path not in importance:
            left[one.site.path] = ["the loss does not depend on it"]
    return [one for one in prunable if one.site.path in importance]


def _least_important(
    model: nn.Module,
    prunable: Sequence[Prunable],
    importance: Mapping[str, Tensor],
    share: float | None,
    parameters: int | None,
) -> dict[str, list[int]]:
    """Which heads go, of the whole model in the order of their importance, the last one of a layer excepted."""
    emptied = [one.emptied for one in prunable]
    order = sorted(
        (float(importance[one.site.path][head]), position, head)
        for position, one in enumerate(prunable)
        for head in range(one.site.num_heads)
        if head not in emptied[position]
    )
    before = attention_parameters(model) - sum(
        len(gone) * one.numbers_per_head for one, gone in zip(prunable, emptied, strict=True)
    )
    wanted = None if share is None else round(share * len(order))
    if wanted == 0:
        raise ValueError(f"share must be at least one head of {len(order)}, got {share}")
    if parameters is not None and parameters >= before:
        raise ValueError(f"parameters must be less than the {before:,} that attention has, got {parameters:,}")
    removed: dict[str, list[int]] = {one.site.path: [] for one in prunable}
    count, freed = 0, 0
    for _, position, head in order:
        if (parameters is not None and before - freed <= parameters) or count == wanted:
            break
        one = prunable[position]
        gone = removed[one.site.path]
        if len(gone) < one.site.num_heads - len(emptied[position]) - 1:
            gone.append(head)
            count, freed = count + 1, freed + one.numbers_per_head
    if wanted is not None and count < wanted:
        raise ValueError(f"share must leave a head in every layer, {count / len(order):.3f} at most, got {share}")
    if parameters is not None and before - freed > parameters:
        raise ValueError(
            f"parameters must be at least {before - freed:,}, which one head in every layer leaves, got {parameters:,}"
        )
    return {path: sorted(gone) for path, gone in removed.items() if gone}


def _prune(
    model: nn.Module,
    prunable: Sequence[Prunable],
    removed: Mapping[str, list[int]],
    importance: Mapping[str, Tensor] | None,
    left: dict[str, list[str]],
) -> PruningReport:
    """Take the heads away: first what can fail, then what cannot."""
    model_before, attention_before = count_parameters(model), attention_parameters(model)
    chosen = [(one, removed[one.site.path]) for one in prunable if one.site.path in removed]
    cut = {one.site.path for one in prunable if can_be_cut(host_at(one.site), one.site.module)}
    smaller = {one.site.path: without_heads(one.parts, gone) for one, gone in chosen if one.site.path in cut}
    before = {one.site.path: one.count() for one in prunable}
    emptied = sum(one.numbers_per_head * len(gone) for one, gone in chosen if one.site.path not in cut)
    for one, gone in chosen:
        site = one.site
        if site.path in smaller:
            cut_heads_(site.module, smaller[site.path], site.num_heads, site.num_heads - len(gone))
        else:
            empty_heads_(one.parts, gone)
    if smaller:
        record_structure_(model)
    sites = [
        PrunedSite(
            path=one.site.path,
            host=host_at(one.site).name,
            num_heads=one.site.num_heads,
            removed=removed.get(one.site.path, []),
            is_cut=one.site.path in cut,
            importance=None if importance is None else importance[one.site.path].tolist(),
            parameters_before=before[one.site.path],
            parameters_after=one.count(),
        )
        for one in prunable
    ]
    return PruningReport(
        sites, left, attention_before, attention_parameters(model), model_before, count_parameters(model), emptied
    )
