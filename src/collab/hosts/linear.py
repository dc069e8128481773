"""Hosts whose projections are linear layers, each on its own or several fused into one."""

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from collab.fused_projection import project_together
from collab.hosts import (
    Collaborative,
    HeadWeights,
    Host,
    SharedWeights,
    collaborative_class,
    copy_weights,
    install_mixing_,
    mixing_from,
    replace_parameter_,
)

Number = str | Callable[[Any], int]
"""The attribute that holds a number, or a function of the module."""


@dataclass(frozen=True)
class Block:
    """The `index`-th of `count` equal blocks of outputs of the linear layer `name`.

    With `per_head` the outputs are ordered by head first: every head has its own `count` blocks.
    """

    name: str
    index: int = 0
    count: int = 1
    per_head: bool = False


@dataclass(frozen=True, kw_only=True)
class LinearHost(Host):
    """One attention class as data.

    Args:
        name: the class.
        shell: supplies the forward of the collaborative subclass.
        query, key, value: the projections: the name of a linear layer, or a `Block` of a fused one.
        out: the projection of the concatenated heads, or None if the class has none.
        num_heads, head_dim: attributes that hold them, or functions of the module that still hold once it is swapped.
        scale_from: the attribute that holds the factor on the scores, the factor itself, or a function of the module.
        dropout: the attribute that holds the dropout on attention weights, a probability or a dropout layer; None if
            there is none.
        cross: whether an instance at a path takes its keys from another sequence.
        obstacles: reasons, beyond the common ones, why an instance cannot be swapped.
        when: which instances this row is for, where a class has several rows.
        shared_by: how many times one pass runs the module, where the class shares it.
        batch_first: whether the layers are given (batch, token, width), not (token, batch, width).
    """

    name: str
    shell: type[Collaborative]
    query: str | Block
    key: str | Block
    value: str | Block
    out: str | None
    num_heads: Number
    head_dim: Number
    scale_from: str | float | Callable[[Any], float]
    dropout: str | None
    cross: Callable[[Any, str], bool] = lambda module, path: False
    obstacles: Callable[[Any], list[str]] = lambda module: []
    when: Callable[[Any], bool] = lambda module: True
    shared_by: Callable[[Any], int] = lambda module: 1
    batch_first: bool = True

    def serves(self, module: nn.Module) -> bool:
        """Whether this row is for the instance: in another version of a library its class may wrap another."""
        if not self.when(module):
            return False
        return all(hasattr(module, name.partition(".")[0]) for name in self._layout()) or bool(self.obstacles(module))

    def is_cross(self, module: nn.Module, path: str) -> bool:
        """Whether keys come from another sequence than queries."""
        return self.cross(module, path)

    def uses(self, module: nn.Module) -> int:
        """How many times one pass of the model runs this module."""
        return self.shared_by(module)

    def scale(self, module: nn.Module) -> float:
        """The factor on the scores."""
        if callable(self.scale_from):
            return self.scale_from(module)
        if isinstance(self.scale_from, float):
            return self.scale_from
        scale: float = getattr(module, self.scale_from)
        return scale

    def dropout_of(self, module: nn.Module) -> float:
        """The probability of dropping an attention weight: zero outside training."""
        if not module.training or self.dropout is None:
            return 0.0
        dropout: Any = getattr(module, self.dropout)
        probability: float | None = getattr(dropout, "p", dropout)
        return probability or 0.0

    def sizes(self, module: nn.Module) -> dict[str, int]:
        """num_heads, head_dim and the widths of the three inputs; 0 for that of a layer not plain, or not there."""
        linears = {role: getattr(module, self._block(role).name, None) for role in ("query", "key", "value")}
        widths = {role: _rows(linear)[0].shape[1] if is_plain(linear) else 0 for role, linear in linears.items()}
        num_heads, head_dim = self._heads(module)
        return {"num_heads": num_heads, "head_dim": head_dim} | {
            f"{role}_width": width for role, width in widths.items()
        }

    def size_problem(self, module: nn.Module, shared_dim: int) -> str | None:
        """A fused projection that keeps its shape would load as ordinary heads where collab is missing."""
        num_heads, head_dim = self._heads(module)
        full = num_heads * head_dim
        for name, roles in self._layout().items():
            changed = sum({"query": shared_dim, "key": shared_dim + num_heads}.get(role, full) for role in roles)
            if len(roles) > 1 and changed == full * len(roles):
                return f"{name} would keep its shape and pass for ordinary heads; take one more or one less"
        return None

    def why_not(self, module: nn.Module) -> list[str]:
        """Reasons why this instance cannot be swapped."""
        reasons = self.obstacles(module)
        if reasons:  # they may be that a projection the rest looks at is not there
            return reasons
        blocks = [self._block(role) for role in ("query", "key", "value")]
        for name in self._layout():
            linear = attrgetter(name)(module)
            if not is_plain(linear):
                kind = f"{type(linear).__module__}.{type(linear).__name__}"
                reasons.append(
                    f"{name} is a {kind}, not a plain linear layer: merge adapters and convert before quantising"
                )
        if not reasons:
            num_heads, head_dim = self._heads(module)
            full = num_heads * head_dim
            for role, block in zip(("query", "key"), blocks, strict=False):
                outputs = _rows(_linear(module, block))[0].shape[0]
                if outputs != full * block.count:
                    reasons.append(
                        f"{role} has {outputs // block.count} outputs, not heads x head size = {full}: heads share keys"
                    )
        for name in ("q_norm", "k_norm"):
            if not isinstance(getattr(module, name, None), nn.Identity | None):
                reasons.append(
                    f"{name} normalises between the projections, so a head's product is not one fixed matrix"
                )
        return reasons

    def read(self, module: nn.Module) -> HeadWeights:
        """Views of the module's query and key weights, head by head."""
        heads = self._heads(module)
        query, query_bias = self._take(module, "query")
        key, _ = self._take(module, "key")
        return HeadWeights(
            query=query.unflatten(0, heads),
            key=key.unflatten(0, heads),
            query_bias=None if query_bias is None else query_bias.unflatten(0, heads),
        )

    def parts(self, module: nn.Module) -> list[nn.Module]:
        """The module and the projections `install_` changes."""
        return [module, *(attrgetter(name)(module) for name, roles in self._layout().items() if roles != ["value"])]

    def install_(self, module: nn.Module, shared: SharedWeights) -> None:
        """Give the projections their shared weights, under their own names, and the module its collaborative class."""
        value, value_bias = self._take(module, "value")
        # The parameter itself: a view of it would not be trainable under torch.no_grad.
        trained = attrgetter(self._block("query").name)(module).weight
        for name, weight in self._shared_rows(module, shared, value).items():
            linear = attrgetter(name)(module)
            has_value = "value" in self._layout()[name]
            bias = None
            # Shared queries and keys need no bias, the content term holds what it did; but a Conv1D always has one.
            if linear.bias is not None and (has_value or type(linear).__name__ == "Conv1D"):
                bias = linear.bias.new_zeros(len(weight))
                if value_bias is not None and has_value:
                    bias[-len(value_bias) :] = value_bias
            _replace_rows_(linear, weight, bias)
        install_mixing_(module, shared, like=trained)
        module.__class__ = collaborative_class(self.shell, type(module), self)

    def parameters_from(self, module: Any, shared: SharedWeights) -> dict[str, Tensor]:
        """What a collaborative module's projections and mixing would be with these weights, by name."""
        parameters = mixing_from(module, shared)
        value = self._split_rows(module)["value"].detach()
        for name, rows in self._shared_rows(module, shared, value).items():
            is_transposed = type(attrgetter(name)(module)).__name__ == "Conv1D"
            parameters[f"{name}.weight"] = rows.mT if is_transposed else rows
        return parameters

    def shared_weights(self, module: Any) -> SharedWeights:
        """Copies of a collaborative module's weights."""
        rows = self._split_rows(module)
        return copy_weights(module, rows["query"], rows["key"])

    def watch_inputs(self, module: nn.Module, seen: Callable[[str, Tensor], None]) -> list[RemovableHandle]:
        """Report what the query and key projections are given."""
        handles = []
        for name, roles in self._layout().items():
            watched = [role for role in roles if role != "value"]

            def report(linear: nn.Module, args: tuple[Any, ...], watched: list[str] = watched) -> None:
                for role in watched:
                    seen(role, self.as_batch(args[0]))

            if watched:
                handles.append(attrgetter(name)(module).register_forward_pre_hook(report))
        return handles

    def as_batch(self, inputs: Tensor) -> Tensor:
        """What a projection is given, as (batch, token, width)."""
        if inputs.dim() == 2:
            return inputs[None]
        inputs = inputs.flatten(0, -3)
        return inputs if self.batch_first else inputs.transpose(0, 1)

    def project(self, module: Any, query: Tensor, key: Tensor, value: Tensor) -> dict[str, Tensor]:
        """Shared query, shared key with content scores, and value of a collaborative module, by role.

        (..., width) inputs give (..., shared), (..., shared + head) and (..., heads x value size).
        """
        inputs = {"query": query, "key": key, "value": value}
        layout = self._layout()
        if len(layout) == len(inputs) and query is key and key is value:
            together = project_together([attrgetter(name)(module) for name in layout], query)
            if together is not None:
                return dict(zip(inputs, together, strict=True))
        projected: dict[str, Tensor] = {}
        for name, roles in layout.items():
            outputs = attrgetter(name)(module)(inputs[roles[-1]])
            sizes = _role_sizes(module, roles, outputs.shape[-1])
            projected |= zip(roles, outputs.split(sizes, dim=-1), strict=True)
        return projected

    def _shared_rows(self, module: nn.Module, shared: SharedWeights, value: Tensor) -> dict[str, Tensor]:
        """Linear layer -> weight (outputs, inputs) with shared weights, for the layers they change."""
        rows = {"query": shared.query, "key": torch.cat((shared.key, shared.content)), "value": value}
        return {
            name: torch.cat([rows[role].to(attrgetter(name)(module).weight) for role in roles])
            for name, roles in self._layout().items()
            if roles != ["value"]  # it does not change: its parameters stay the very same, tied or not
        }

    def _split_rows(self, module: Any) -> dict[str, Tensor]:
        """Role -> weight (outputs, inputs) of a collaborative module."""
        split: dict[str, Tensor] = {}
        for name, roles in self._layout().items():
            weight, _ = _rows(attrgetter(name)(module))
            split |= zip(roles, weight.split(_role_sizes(module, roles, len(weight))), strict=True)
        return split

    def _heads(self, module: nn.Module) -> tuple[int, int]:
        """Number of heads and the size of one."""
        num_heads, head_dim = (
            place(module) if callable(place) else int(getattr(module, place))
            for place in (self.num_heads, self.head_dim)
        )
        return num_heads, head_dim

    def _block(self, role: str) -> Block:
        place = getattr(self, role)
        return place if isinstance(place, Block) else Block(place)

    def _layout(self) -> dict[str, list[str]]:
        """Linear layer -> the roles of its outputs, in order."""
        layout: dict[str, list[str]] = {}
        for role in ("query", "key", "value"):
            layout.setdefault(self._block(role).name, []).append(role)
        return layout

    def _take(self, module: nn.Module, role: str) -> tuple[Tensor, Tensor | None]:
        """Weight (outputs, inputs) and bias (outputs) of one role of a module not yet collaborative."""
        block = self._block(role)
        weight, bias = _rows(_linear(module, block))
        num_heads = self._heads(module)[0]

        def take(rows: Tensor) -> Tensor:
            if block.per_head:
                by_head: Tensor = rows.unflatten(0, (num_heads, block.count, -1))
                return by_head[:, block.index].flatten(0, 1)
            return rows.chunk(block.count)[block.index]

        return take(weight), None if bias is None else take(bias)


def _role_sizes(module: Any, roles: list[str], outputs: int) -> list[int]:
    """How a collaborative module's linear layer divides its outputs among its roles; values take what is left."""
    shared_dim, num_heads = module.shared_dim, len(module.mixing)
    sizes = [{"query": shared_dim, "key": shared_dim + num_heads}.get(role, 0) for role in roles]
    if roles[-1] == "value":
        sizes[-1] = outputs - sum(sizes)
    return sizes


def is_plain(linear: nn.Module | None) -> bool:
    """Whether a layer is known to compute its inputs times its weight plus its bias, and nothing more."""
    if linear is None or "weight" not in linear._parameters:  # pruned or normalised: computed anew before every call
        return False
    if type(linear).__name__ == "Conv1D":
        return type(linear).__module__ == "transformers.pytorch_utils"
    return type(linear) in (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)


def _linear(module: nn.Module, block: Block) -> nn.Module:
    linear: nn.Module = attrgetter(block.name)(module)
    return linear


def _rows(linear: Any) -> tuple[Tensor, Tensor | None]:
    """Weight as (outputs, inputs), whichever way the layer stores it, and bias."""
    return (linear.weight.mT if type(linear).__name__ == "Conv1D" else linear.weight), linear.bias


def _replace_rows_(linear: Any, weight: Tensor, bias: Tensor | None) -> None:
    """Change a linear layer's outputs in place: the layer stays the same object, with its hooks."""
    old_bias = linear.bias
    if type(linear).__name__ == "Conv1D":
        replace_parameter_(linear, "weight", weight.mT)
        linear.nf = len(weight)
    else:
        replace_parameter_(linear, "weight", weight)
        linear.out_features = len(weight)
    replace_parameter_(linear, "bias", bias, like=old_bias)
