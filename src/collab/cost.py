"""cost: parameters, operations and cache of ordinary and of shared heads, by formula."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from collab.config import CollaborativeConfig, is_integer
from collab.hosts import Collaborative
from collab.inspection import AttentionSite, find_attention
from collab.key_bias import key_bias_of
from collab.structure import check_size, host_at
from collab.table import format_table

Size = int | float | Mapping[str, int]
"""A size as `CollaborativeConfig(shared_dim=...)` takes it."""

TOKENS = (128, 512, 2048)
"""Lengths whose operations a report tells unless others are asked for."""


@dataclass(frozen=True)
class LayerCost:
    """What queries, keys and their scores cost in one attention layer.

    A FLOP here is a multiplication with its addition, as in Cordonnier, Loukas and Jaggi (2020), section 3.4; programs
    that count both give twice as much. Values and output are not counted: they are the same for all heads.

    Attributes:
        weights: parameters of the query and key projections: 2 D_in D_k, or 2 D_in shared_dim of shared heads.
        biases: parameters of their biases; shared heads have none.
        mixing: parameters of the mixing: heads x shared_dim, or heads x dims_per_head.
        content: parameters of the content vectors: heads x D_in.
        projection_flops: making queries and keys.
        mixing_flops: weighing the queries, once for each head.
        content_flops: the content scores: making them, and adding them to the scores.
        score_flops: products of queries and keys.
        cache_bytes: of the keys of one token.
    """

    weights: int
    biases: int
    mixing: int
    content: int
    projection_flops: int
    mixing_flops: int
    content_flops: int
    score_flops: int
    cache_bytes: int

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.weights + self.biases + self.mixing + self.content

    @property
    def flops(self) -> int:
        """All of them."""
        return self.projection_flops + self.mixing_flops + self.content_flops + self.score_flops

    def to_dict(self) -> dict[str, int]:
        """Plain values, ready for JSON."""
        return asdict(self) | {"parameters": self.parameters, "flops": self.flops}

    def __add__(self, other: "LayerCost") -> "LayerCost":
        return LayerCost(**{name: value + getattr(other, name) for name, value in asdict(self).items()})


def layer_cost(
    *,
    num_heads: int,
    head_dim: int,
    query_width: int,
    key_width: int | None = None,
    shared_dim: int | None = None,
    dims_per_head: int | None = None,
    tokens: int = 128,
    key_tokens: int | None = None,
    query_bias: bool = True,
    key_bias: bool = True,
    content: bool = True,
    number_bytes: int = 4,
) -> LayerCost:
    """What one layer's queries, keys and scores cost; of ordinary heads unless there is a `shared_dim`.

    Example:
        >>> ordinary = layer_cost(num_heads=12, head_dim=64, query_width=768, query_bias=False, key_bias=False)
        >>> shared = layer_cost(num_heads=12, head_dim=64, query_width=768, shared_dim=256, content=False)
        >>> ordinary.parameters, shared.parameters
        (1179648, 396288)

    Args:
        num_heads: number of heads.
        head_dim: size of one, where they share nothing.
        query_width: width of the query's input.
        key_width: width of the key's input; `query_width` if not given.
        shared_dim: dimensions that all heads share; None for ordinary heads.
        dims_per_head: how many of those a head uses; all if not given.
        tokens: number of queries.
        key_tokens: number of keys; `tokens` if not given.
        query_bias: whether ordinary heads have a bias on queries.
        key_bias: the same for keys.
        content: whether shared heads have content vectors; those that `collaborate_` makes have.
        number_bytes: of one number in the cache of keys.
    """
    key_width = query_width if key_width is None else key_width
    key_tokens = tokens if key_tokens is None else key_tokens
    sizes = {"num_heads": num_heads, "head_dim": head_dim, "query_width": query_width, "key_width": key_width}
    _check_sizes(sizes | {"tokens": tokens, "key_tokens": key_tokens, "number_bytes": number_bytes})
    optional = {"shared_dim": shared_dim, "dims_per_head": dims_per_head}
    _check_sizes({name: size for name, size in optional.items() if size is not None})
    if dims_per_head is not None and (shared_dim is None or dims_per_head > shared_dim):
        raise ValueError(f"dims_per_head must be at most shared_dim, got {dims_per_head} and {shared_dim}")
    is_shared = shared_dim is not None
    projected = num_heads * head_dim if shared_dim is None else shared_dim
    scored = head_dim if shared_dim is None else dims_per_head or shared_dim  # dimensions that a head scores in
    contents = num_heads if is_shared and content else 0
    pairs = tokens * key_tokens
    return LayerCost(
        weights=(query_width + key_width) * projected,
        biases=0 if is_shared else (query_bias + key_bias) * projected,
        mixing=num_heads * scored if is_shared else 0,
        content=contents * key_width,
        projection_flops=(tokens * query_width + key_tokens * key_width) * projected,
        mixing_flops=tokens * num_heads * scored if is_shared else 0,
        content_flops=key_tokens * contents * key_width + pairs * contents,
        score_flops=pairs * num_heads * scored,
        cache_bytes=(projected + contents) * number_bytes,
    )


def _check_sizes(sizes: Mapping[str, int]) -> None:
    for name, value in sizes.items():
        if not is_integer(value) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")


@dataclass(frozen=True)
class BreakEven:
    """For which lengths shared heads take fewer operations than ordinary ones.

    Attributes:
        cheaper: "always", "never", "below" or "above" `tokens`.
        tokens: the length at which both take as many; None for "always" and "never".
    """

    cheaper: str
    tokens: float | None = None

    def __str__(self) -> str:
        if self.tokens is None:
            return f"{self.cheaper} cheaper"
        return f"cheaper {self.cheaper} {self.tokens:,.0f} tokens"


@dataclass(frozen=True)
class CostRow:
    """What a model's attention costs with ordinary heads and with shared ones, for one size and one length.

    Attributes:
        shared_dim: the size, as it was asked for; None for that of layers converted already.
        tokens: length of a sequence.
        before, after: sums over layers, each as often as one pass of the model runs it; parameters once.
        break_even: for which lengths `after` takes fewer operations.
    """

    shared_dim: Size | None
    tokens: int
    before: LayerCost
    after: LayerCost
    break_even: BreakEven

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        before, after = self.before.to_dict(), self.after.to_dict()
        return {
            "shared_dim": self.shared_dim,
            "tokens": self.tokens,
            "before": before,
            "after": after,
            "ratio": {name: after[name] / before[name] for name in ("parameters", "flops", "cache_bytes")},
            "break_even": asdict(self.break_even),
        }


@dataclass(frozen=True)
class CostReport:
    """What `cost` found, size by size and length by length. Prints as a table.

    Attributes:
        rows: one for every size and length.
        layers: paths of the layers counted.
        dims_per_head: how many of the shared dimensions a head uses, where that was asked for.
        left: path -> reasons, for attention that is not counted.
    """

    rows: list[CostRow]
    layers: list[str]
    dims_per_head: int | None
    left: dict[str, list[str]]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "layers": self.layers,
            "dims_per_head": self.dims_per_head,
            "left": self.left,
            "rows": [row.to_dict() for row in self.rows],
        }

    def __str__(self) -> str:
        header = ["shared_dim", "tokens", "parameters before", "after", "ratio", "FLOPs before", "after", "ratio",
                  "cache bytes before", "after", "ratio"]  # fmt: skip
        table = [
            [
                _size_name(row.shared_dim), row.tokens,
                *_pair(row.before.parameters, row.after.parameters),
                *_pair(row.before.flops, row.after.flops),
                *_pair(row.before.cache_bytes, row.after.cache_bytes),
            ]
            for row in self.rows
        ]  # fmt: skip
        own = "" if self.dims_per_head is None else f", {self.dims_per_head} of the shared dimensions a head"
        lines = [
            format_table(header, table),
            f"{len(self.layers)} layers{own}: their queries, keys and scores; values and output stay as they are. A "
            "FLOP is a multiplication with its addition. Cache: the keys of one token, were every layer to keep them",
        ]
        for name, told in {_size_name(row.shared_dim): row.break_even for row in self.rows}.items():
            lines.append(f"break-even of shared_dim {name}: {told}")
        lines += [f"not counted: {path} ({'; '.join(reasons)})" for path, reasons in self.left.items()]
        return "\n".join(lines)


def cost(
    model: nn.Module,
    shared_dim: Size | Sequence[int | float] | None = None,
    *,
    tokens: Sequence[int] = TOKENS,
    dims_per_head: int | None = None,
    only: Callable[[AttentionSite], bool] | None = None,
) -> CostReport:
    """What a model's attention costs with ordinary heads and what it would cost with shared ones; nothing is converted.

    Args:
        model: any model `find_attention` finds swappable or converted attention in.
        shared_dim: the size, as `CollaborativeConfig` takes it, or several. None for a model that is converted: that
            of its own layers.
        tokens: lengths of a sequence, of queries and of keys.
        dims_per_head: how many of the shared dimensions a head uses; all if not given.
        only: count only layers for which this is true.

    Example:
        >>> import torch, collab
        >>> row = collab.cost(torch.nn.TransformerEncoderLayer(64, 4), 16, tokens=[32]).rows[0]
        >>> row.before.weights, row.after.weights, str(row.break_even)
        (8192, 2048, 'cheaper below 1,456 tokens')
    """
    found = [site for site in find_attention(model) if only is None or only(site)]
    is_converted = shared_dim is None
    sites = [
        site for site in found if isinstance(site.module, Collaborative) or (not is_converted and not site.why_not)
    ]
    left = {site.path: list(site.why_not) or ["not converted"] for site in found if site not in sites}
    if not sites:
        wanted = "converted attention" if is_converted else "attention to count"
        hint = ": say which shared_dim it would have" if is_converted and found else ""
        raise ValueError(f"no {wanted} in {type(model).__name__}{hint}")
    if is_converted and dims_per_head is not None:
        raise ValueError("dims_per_head must come with a shared_dim, got none")
    if isinstance(tokens, int):
        raise ValueError(f"tokens must be a list of lengths, got {tokens}")
    if not tokens:
        raise ValueError("tokens must be at least one length, got none")
    several = list(shared_dim) if isinstance(shared_dim, Sequence) else [shared_dim]
    if not several:
        raise ValueError("shared_dim must be at least one size, got none")
    rows = []
    for size in several:
        (*at_lengths, one, two) = (_totals(sites, size, dims_per_head, length) for length in (*tokens, 1, 2))
        break_even = _break_even(*zip(one, two, strict=True))
        for length, (before, after) in zip(tokens, at_lengths, strict=True):
            rows.append(CostRow(size, length, before, after, break_even))
    return CostReport(rows, [site.path for site in sites], dims_per_head, left)


def _site_costs(site: AttentionSite, size: Size | None, dims: int | None, tokens: int) -> tuple[LayerCost, LayerCost]:
    """One layer's costs with ordinary heads and with shared ones."""
    module = site.module
    options: dict[str, Any] = {
        "num_heads": site.num_heads, "head_dim": site.head_dim, "query_width": site.query_width,
        "key_width": site.key_width, "tokens": tokens,
        "number_bytes": next(module.parameters()).element_size(),
    }  # fmt: skip
    if isinstance(module, Collaborative):
        # Whether it had biases once is not known any more.
        before = layer_cost(**options, query_bias=False, key_bias=False)
    else:
        weights, host = host_at(site).read(module), host_at(site)
        has_key_bias = key_bias_of(host, module) is not None
        before = layer_cost(**options, query_bias=weights.query_bias is not None, key_bias=has_key_bias)
    if size is None:
        assert isinstance(module, Collaborative)
        own = None if module.dims is None else module.dims.shape[1]
        return before, layer_cost(**options, shared_dim=module.shared_dim, dims_per_head=own)
    shared_dim = CollaborativeConfig(shared_dim=size).shared_dim_for(site.path, site.full_dim)
    if shared_dim is None:  # a layer that a mapping does not name stays as it is
        return before, before
    if not isinstance(module, Collaborative):
        check_size(site, shared_dim, dims)
    return before, layer_cost(**options, shared_dim=shared_dim, dims_per_head=dims)


def _totals(
    sites: Sequence[AttentionSite], size: Size | None, dims: int | None, tokens: int
) -> tuple[LayerCost, LayerCost]:
    """All layers' costs with ordinary heads and with shared ones."""
    before, after = zip(*(_site_costs(site, size, dims, tokens) for site in sites), strict=True)
    return _total(before, sites), _total(after, sites)


def _total(costs: Sequence[LayerCost], sites: Sequence[AttentionSite]) -> LayerCost:
    """Sum over layers: operations and caches as often as a pass runs a layer, parameters once."""
    total = LayerCost(*([0] * 9))
    for one, site in zip(costs, sites, strict=True):
        repeated = {
            name: value * site.uses
            for name, value in asdict(one).items()
            if name.endswith("flops") or name == "cache_bytes"
        }
        total = total + LayerCost(**(asdict(one) | repeated))
    return total


def _break_even(before: Sequence[LayerCost], after: Sequence[LayerCost]) -> BreakEven:
    """Where `after` takes as many operations as `before`, from the costs at one token and at two.

    Operations for T tokens are a T + b T²: what projections save, b times T eats.
    """
    (before_linear, before_square), (after_linear, after_square) = _by_power(before), _by_power(after)
    saved, paid = before_linear - after_linear, after_square - before_square
    if paid <= 0 and saved >= 0:
        return BreakEven("always" if paid < 0 or saved > 0 else "never")
    if paid >= 0 and saved <= 0:
        return BreakEven("never")
    return BreakEven("below" if paid > 0 else "above", saved / paid)


def _by_power(costs: Sequence[LayerCost]) -> tuple[int, int]:
    """What a and b are in a T + b T², from the costs at one token and at two."""
    one, two = (cost.flops for cost in costs)
    square = (two - 2 * one) // 2
    return one - square, square


def _pair(before: int, after: int) -> tuple[int, int, float]:
    return before, after, after / before


def _size_name(size: Size | None) -> str:
    if size is None:
        return "as converted"
    return ", ".join(f"{path}={value}" for path, value in size.items()) if isinstance(size, Mapping) else str(size)
