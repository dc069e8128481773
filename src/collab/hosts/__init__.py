"""Hosts: how to read one attention class, and how to make an instance of it collaborative in place.

A host knows where a class keeps its projections and how its forward is called. It knows nothing of how shared
projections are found. Libraries register their hosts on first use; nothing is imported that the model does not need.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from collab import ops
from collab.hosts.obstacles import reasons_against

_LIBRARIES = {
    "transformers": "collab.hosts.transformers",
    "timm": "collab.hosts.timm",
    "torch": "collab.hosts.torch_nn",
}
"""Top package of a model's attention class -> the module that registers its hosts."""

_hosts: dict[str, list["Host"]] = {}


@dataclass(frozen=True)
class HeadWeights:
    """What an attention module computes its scores with.

    Attributes:
        query: (head, head_dim, query_in).
        key: (head, head_dim, key_in).
        query_bias: (head, head_dim), or None. The key's bias is the same for every key and drops out of the softmax.
    """

    query: Tensor
    key: Tensor
    query_bias: Tensor | None

    @property
    def num_heads(self) -> int:
        """Number of heads."""
        return self.query.shape[0]

    @property
    def head_dim(self) -> int:
        """Dimensions of one head's query and key."""
        return self.query.shape[1]


@dataclass(frozen=True)
class SharedWeights:
    """What a collaborative attention module computes its scores with.

    Attributes:
        query: (shared, query_in).
        key: (shared, key_in).
        mixing: (head, shared), or (head, k) with `dims`.
        content: (head, key_in), added to the scores once multiplied with the key's input.
        dims: (head, k) integers: the shared dimension each mixing weight is for; None when every head uses all.
    """

    query: Tensor
    key: Tensor
    mixing: Tensor
    content: Tensor
    dims: Tensor | None = None

    @property
    def shared_dim(self) -> int:
        """Dimensions of the space the heads share."""
        return self.query.shape[0]


class Collaborative:
    """Mark of a module that was made collaborative: its class is `Collaborative<Name>`, a subclass of its own class.

    The module has a parameter `mixing` (head, shared). Its query projection gives (..., shared) and its key projection
    gives (..., shared + head), where the last columns are the content scores. If its heads use some of the shared
    dimensions each, `mixing` is (head, k) and a buffer `mixing_dims` (head, k) says which.
    """

    mixing: nn.Parameter
    host: ClassVar["Host"]
    _buffers: dict[str, Tensor | None]
    _shared_dim: int  # with `mixing_dims` only, where the mixing does not show it

    @property
    def shared_dim(self) -> int:
        """Dimensions of the space the heads share."""
        return self.mixing.shape[1] if self.dims is None else self._shared_dim

    @property
    def dims(self) -> Tensor | None:
        """(head, k): the shared dimension each mixing weight is for; None when every head uses all."""
        return self._buffers.get("mixing_dims")

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The class is made at run time: pickle and deepcopy make it again from the shell and the original class.
        shell, original = type(self).__bases__
        # A class that inherits its forward is served by the host of a class it derives from.
        served = next(cls for cls in original.__mro__ if self.host in hosts_of_class(cls))
        position = hosts_of_class(served).index(self.host)
        return _new_collaborative, (shell, original, served, position), self.__dict__.copy()


_collaborative_classes: dict[tuple[type, type, int], type[nn.Module]] = {}


def collaborative_class(shell: type[Collaborative], original: type[nn.Module], host: "Host") -> type[nn.Module]:
    """The subclass of `original` that takes its forward from the shell; made once."""
    key = (shell, original, id(host))
    if key not in _collaborative_classes:
        body = {"__module__": original.__module__, "__doc__": f"{original.__name__}, collaborative.", "host": host}
        _collaborative_classes[key] = type(f"Collaborative{original.__name__}", (shell, original), body)
    return _collaborative_classes[key]


def _new_collaborative(
    shell: type[Collaborative], original: type[nn.Module], served: type[nn.Module], position: int
) -> nn.Module:
    made = collaborative_class(shell, original, hosts_of_class(served)[position])
    return made.__new__(made)


class Host(ABC):
    """Reads and rewrites instances of some attention classes. See `hosts/transformers_bert.py` for the common case."""

    name: str
    """The class it serves, as `collab hosts` and reports print it."""

    def serves(self, module: nn.Module) -> bool:
        """Whether this host is the one for the instance, where a class has several."""
        return True

    @abstractmethod
    def why_not(self, module: nn.Module) -> list[str]:
        """Reasons why this instance cannot be swapped; empty when it can."""

    @abstractmethod
    def read(self, module: nn.Module) -> HeadWeights:
        """Views of the module's query and key weights, head by head."""

    @abstractmethod
    def scale(self, module: nn.Module) -> float:
        """The factor on the scores."""

    @abstractmethod
    def install_(self, module: nn.Module, shared: SharedWeights) -> None:
        """Make `module` collaborative in place. Must not fail half way: `why_not` has been asked."""

    @abstractmethod
    def parameters_from(self, module: nn.Module, shared: SharedWeights) -> dict[str, Tensor]:
        """What a collaborative module's parameters would be with these weights, by name, for `functional_call`.

        Gradients reach the weights. What `shared` does not say (values, biases) is the module's own, as constants.

        Raises:
            ValueError: the weights are not of the module's sizes.
        """

    @abstractmethod
    def shared_weights(self, module: nn.Module) -> SharedWeights:
        """Copies of a collaborative module's weights, without gradients: what `parameters_from` takes."""

    @abstractmethod
    def watch_inputs(self, module: nn.Module, seen: Callable[[str, Tensor], None]) -> list[RemovableHandle]:
        """Call `seen("query", x)` and `seen("key", y)` whenever the module runs, until the handles are removed.

        They are what it projects to queries and keys, (batch, token, width); just "query" when keys are cached already.
        """

    @abstractmethod
    def parts(self, module: nn.Module) -> list[nn.Module]:
        """The module and the children `install_` changes, so that a failed swap can be undone."""

    @abstractmethod
    def sizes(self, module: nn.Module) -> dict[str, int]:
        """num_heads, head_dim, query_width, key_width and value_width, also of a collaborative module."""

    def size_problem(self, module: nn.Module, shared_dim: int) -> str | None:
        """Why this very size cannot be used, if so: its weights must not pass for those of the original class."""
        return None

    def is_cross(self, module: nn.Module, path: str) -> bool:
        """Whether keys come from another sequence than queries."""
        return False

    def uses(self, module: nn.Module) -> int:
        """How many times one pass of the model runs this module, where the class itself knows of sharing (ALBERT)."""
        return 1


def register_host(class_name: str, host: Host) -> None:
    """Let `host` serve attention classes of this qualified name; a class may have several hosts.

    The name is `library.ClassName`, or `library.module.ClassName` in full where a library uses one name several times.
    """
    _hosts.setdefault(class_name, []).append(host)


def host_of(module: nn.Module) -> Host | None:
    """The host that serves this module, also when it was made collaborative already; None if there is none."""
    if isinstance(module, Collaborative):
        return module.host
    for cls in type(module).__mro__:
        # A subclass that brings its own forward is another attention: only what inherits it unchanged is served.
        if type(module).forward is cls.__dict__.get("forward"):
            return next((host for host in hosts_of_class(cls) if host.serves(module)), None)
    return None


def hosts_of_class(cls: type) -> list[Host]:
    """The hosts registered for this very class."""
    library = cls.__module__.partition(".")[0]
    if library in _LIBRARIES:
        importlib.import_module(_LIBRARIES[library])
    return _hosts.get(f"{cls.__module__}.{cls.__name__}") or _hosts.get(f"{library}.{cls.__name__}", [])


def why_not(module: nn.Module) -> list[str]:
    """Reasons why this attention module cannot be made collaborative; empty when it can."""
    if isinstance(module, Collaborative):
        own = "" if module.dims is None else f", {module.dims.shape[1]} of them a head"
        return [f"already collaborative, with shared_dim {module.shared_dim}{own}"]
    host = host_of(module)
    if host is None:
        return why_not_class(type(module)) or ["its class has hosts, but none is for this instance"]
    if "forward" in module.__dict__:
        return ["its forward was replaced on the instance, where another class would not reach: remove that first"]
    return host.why_not(module)


def why_not_class(cls: type) -> list[str]:
    """Reasons why no host serves this attention class, as far as its source tells; empty when one does."""
    if hosts_of_class(cls):
        return []
    return reasons_against(cls) or [f"unknown class {cls.__module__}.{cls.__name__}: no host is registered for it"]


def weights_problem(module: nn.Module) -> list[str]:
    """What forbids reading this module's parameters as plain, finite, floating point numbers."""
    problems = []
    for name, parameter in module.named_parameters():
        if parameter.device.type == "meta":
            problems.append(f"{name} is on the meta device and has no values: load the weights first")
        elif not parameter.is_floating_point():
            problems.append(f"{name} is quantised ({parameter.dtype}): convert the model before quantising it")
        elif type(parameter.data) is not Tensor:
            kind = type(parameter.data).__name__
            problems.append(f"{name} is a {kind}, no plain tensor: convert the model before quantising or sharding it")
        elif not torch.isfinite(parameter).all():
            problems.append(f"{name} must be finite, got NaN or infinity")
    return problems[:1]


def replace_parameter_(module: nn.Module, name: str, values: Tensor | None, like: Tensor | None = None) -> None:
    """Put a parameter in place with the dtype, device and trainability of the one it follows."""
    if values is None:
        module.register_parameter(name, None)
        return
    old = like if like is not None else getattr(module, name)
    parameter = nn.Parameter(
        values.to(dtype=old.dtype, device=old.device).contiguous(), requires_grad=old.requires_grad
    )
    module.register_parameter(name, parameter)


def check_dims(sparse: Collaborative | SharedWeights, dims: Tensor, name: str = "dims") -> None:
    """Refuse dimensions that these heads cannot use; on the meta device there is nothing to look at."""
    if dims.device.type != "meta":
        ops.check_dims(dims, len(sparse.mixing), sparse.shared_dim, name)


def install_mixing_(module: nn.Module, shared: SharedWeights, like: Tensor) -> None:
    """Give a module its mixing weights, and what they are for where heads do not use all of the shared dimensions."""
    if shared.dims is not None:
        check_dims(shared, shared.dims)
    replace_parameter_(module, "mixing", shared.mixing, like=like)
    if shared.dims is not None:
        # A copy: the caller's stay the caller's.
        dims = shared.dims.detach().to(device=like.device, dtype=ops.DIMS_DTYPE, copy=True)
        module.register_buffer("mixing_dims", dims)
        module._shared_dim = shared.shared_dim  # type: ignore[assignment]


def mixing_from(module: Collaborative, shared: SharedWeights) -> dict[str, Tensor]:
    """What a collaborative module's mixing would be with these weights, by name; they must be of its sizes."""
    sizes, given = (
        f"{part.shared_dim} shared dimensions and {'dense' if part.dims is None else 'sparse'} mixing of "
        f"{tuple(part.mixing.shape)}"
        for part in (module, shared)
    )
    if sizes != given:
        raise ValueError(f"the weights must have {sizes}, as the module has, got {given}")
    named = {"mixing": shared.mixing.to(module.mixing)}
    if module.dims is not None and shared.dims is not None:
        named["mixing_dims"] = shared.dims.to(module.dims)
    return named


@torch.no_grad()
def copy_weights(module: Collaborative, query: Tensor, key: Tensor) -> SharedWeights:
    """Copies of a collaborative module's query (shared, in), key and content (shared + head, in), and mixing."""
    shared_key, content = key.split([module.shared_dim, len(module.mixing)])
    return SharedWeights(
        query=query.clone(),
        key=shared_key.clone(),
        mixing=module.mixing.clone(),
        content=content.clone(),
        dims=None if module.dims is None else module.dims.to(torch.int64, copy=True),
    )


def empty_shared_weights(
    weights: HeadWeights,
    shared_dim: int,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    *,
    dims_per_head: int | None = None,
) -> SharedWeights:
    """Shared weights of the right shapes with no values yet, where and of what type the heads are unless told.

    With `dims_per_head` every head has the first so many dimensions, until others are put there.
    """
    query_in, key_in = weights.query.shape[2], weights.key.shape[2]
    device = device or weights.query.device
    dims = None
    if dims_per_head is not None:
        dims = torch.arange(dims_per_head, device=device).repeat(weights.num_heads, 1)

    def empty(*size: int) -> Tensor:
        return torch.empty(size, device=device, dtype=dtype or weights.query.dtype)

    return SharedWeights(
        query=empty(shared_dim, query_in),
        key=empty(shared_dim, key_in),
        mixing=empty(weights.num_heads, dims_per_head or shared_dim),
        content=empty(weights.num_heads, key_in),
        dims=dims,
    )
