"""Layers to measure against each other: ordinary attention, as fast as PyTorch can, and ours with the same sizes."""

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from collab import ops
from collab.cost import layer_cost
from collab.layer import CollaborativeAttention

PASSES = ("inference", "training", "decode")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Size = tuple[int, int | None]
"""shared_dim, and dims_per_head or None."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What layers are measured at: everything that rivals have in common.

    Attributes:
        batch, tokens: sequences, and tokens of each; for "decode" tokens in the cache.
        width, num_heads, head_dim: of the layer; a head's size is a share of the width if not given.
        step: "inference"; "training": forward, and backward to the input and all parameters, none of whose gradients is
            there before; or "decode": attention of one more token, over a cache of keys and values.
        causal: tokens see those before them only.
        threads: of a CPU; as many as torch uses now if not given.
        repeats: samples of everything that is measured.
        replay: on a CUDA device, measure without what launching costs.
    """

    batch: int = 32
    tokens: int = 128
    width: int = 768
    num_heads: int = 12
    head_dim: int | None = None
    step: str = "inference"
    causal: bool = False
    dtype: str = "float32"
    device: str = "cpu"
    threads: int | None = None
    repeats: int = 25
    replay: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "tokens", "width", "num_heads", "head_dim", "threads"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if self.head_dim is None and self.width % self.num_heads:
            raise ValueError(
                f"width must be divisible by num_heads, got {self.width} and {self.num_heads}; or give head_dim"
            )
        if self.step not in PASSES:
            raise ValueError(f"step must be one of {', '.join(PASSES)}, got {self.step!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")

    @property
    def size_of_head(self) -> int:
        """`head_dim`, as given or as the width has it."""
        return self.head_dim or self.width // self.num_heads

    def inputs(self) -> tuple[Tensor, Tensor | None]:
        """(batch, token, width) each: an input, and for training a gradient of the output."""
        draw = Draw(self)
        if self.step == "decode":
            return draw(1), None  # what decodes brings its own
        made = [draw(self.batch, self.tokens, self.width) for _ in range(2)]
        if self.step == "inference":
            return made[0], None
        return made[0].requires_grad_(), made[1]

    def flops(self, shared_dim: int | None = None, dims_per_head: int | None = None) -> int:
        """Operations of one call, a multiplication with its addition counted as one; a backward pass is two."""
        is_decoding = self.step == "decode"
        queries = 1 if is_decoding else self.tokens
        cost = layer_cost(
            num_heads=self.num_heads, head_dim=self.size_of_head, query_width=self.width, tokens=queries,
            key_tokens=self.tokens, shared_dim=shared_dim, dims_per_head=dims_per_head,
        )  # fmt: skip
        inner = self.num_heads * self.size_of_head
        weighing = queries * self.tokens * inner  # of values
        if is_decoding:
            contents = self.num_heads * self.tokens if shared_dim else 0
            return self.batch * (cost.score_flops + cost.mixing_flops + contents + weighing)
        values_and_output = 2 * self.tokens * self.width * inner + weighing
        return self.batch * (cost.flops + values_and_output) * (3 if self.step == "training" else 1)


class Draw:
    """Random numbers in a shape, on the device of a setting and always the same for its seed."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.generator = torch.Generator(setting.device).manual_seed(setting.seed)

    def __call__(self, *shape: int) -> Tensor:
        """Normally distributed, in the setting's type."""
        drawn = torch.randn(shape, generator=self.generator, device=self.setting.device)
        return drawn.to(DTYPES[self.setting.dtype])


BACKENDS: dict[str, SDPBackend | None] = {
    "default": None,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""What `scaled_dot_product_attention` can compute with, by name; "default" is whichever it would choose."""

Skipped = Callable[[str, Exception], None]
"""Told what could not be measured, by name, and why."""

_REFUSALS = ("No available kernel", "No viable backend", "cuDNN")
"""Of what SDPA says where the backend takes no such inputs."""


def backends_for(device: str) -> list[str]:
    """Names of those worth trying: on a GPU plain products are far behind, and their memory may not be there."""
    return [name for name in BACKENDS if name != "math" or not device.startswith("cuda")]


class WrongResult(RuntimeError):
    """What was to be measured does not compute what it should."""


class OrdinaryAttention(nn.Module):
    """Heads with queries and keys of their own: one projection for all three, SDPA, and the output projection.

    (batch, token, width) to the same.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        backend: str = "default",
        causal: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim or width // num_heads
        self.backend, self.causal = backend, causal
        options: Any = {"device": device, "dtype": dtype}
        self.projection = nn.Linear(width, 3 * num_heads * self.head_dim, **options)
        self.out = nn.Linear(num_heads * self.head_dim, width, **options)

    def forward(self, inputs: Tensor) -> Tensor:
        """Attend from every token to every token."""
        parts = self.projection(inputs).unflatten(-1, (3, self.num_heads, self.head_dim))
        query, key, value = (part.transpose(1, 2) for part in parts.unbind(2))
        with through(self.backend):
            context = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        output: Tensor = self.out(context.transpose(1, 2).flatten(-2))
        return output


class SharedAttention(nn.Module):
    """Ours, told whether to be causal when it is built: a layer that is called with its input alone."""

    def __init__(self, layer: CollaborativeAttention, *, causal: bool = False) -> None:
        super().__init__()
        self.layer, self.causal = layer, causal

    def forward(self, inputs: Tensor) -> Tensor:
        """Attend from every token to every token."""
        output: Tensor = self.layer(inputs, causal=self.causal)
        return output


def through(backend: str) -> contextlib.AbstractContextManager[object]:
    """SDPA computes with this backend, or raises."""
    chosen = BACKENDS[backend]
    return contextlib.nullcontext() if chosen is None else sdpa_kernel(chosen)


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A layer to measure.

    Attributes:
        kind: "ordinary", "collaborative", or another name.
        layer: called with (batch, token, width).
        implementation: what computes it: a backend of SDPA, or one of `collab.ops.IMPLEMENTATIONS`.
        asked: the implementation that was asked for; "auto" where it was chosen.
        shared_dim, dims_per_head: of shared heads.
        compiled: whether `torch.compile` made it.
        error: of the output, relative, against the definition in float32; None where that was not looked at.
        parameters: of the layer.
    """

    kind: str
    layer: Callable[[Tensor], Tensor]
    wanted: list[Tensor] = field(default_factory=list, repr=False)
    implementation: str
    asked: str = "auto"
    shared_dim: int | None = None
    dims_per_head: int | None = None
    compiled: bool = False
    error: float | None = None
    parameters: int = 0

    @property
    def name(self) -> str:
        """What tells it from the others of one comparison."""
        size = "" if self.shared_dim is None else f" {self.shared_dim}"
        own = "" if self.dims_per_head is None else f"/{self.dims_per_head}"
        return f"{self.kind}{size}{own}, {self.asked}{', compiled' if self.compiled else ''}"

    def step(self, inputs: Tensor, gradient: Tensor | None) -> Callable[[], object]:
        """One call: forward, and backward to the input and all parameters where there is a `gradient`."""
        if gradient is None:
            return lambda: _without_gradients(self.layer, inputs)
        wanted = [inputs, *self.wanted]
        return lambda: torch.autograd.grad(self.layer(inputs), wanted, gradient)

    def runs(self, inputs: Tensor, gradient: Tensor | None) -> bool:
        """Whether a backend of SDPA takes these inputs."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they say why one does not
            try:
                self.step(inputs, gradient)()
            except RuntimeError as error:
                if not any(word in str(error) for word in _REFUSALS):
                    raise
                return False
        return True

    def told(self, **changes: Any) -> "Rival":
        """The same, with more said of it."""
        return replace(self, **changes)


@torch.no_grad()
def _without_gradients(layer: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    return layer(inputs)


def rival_of(module: nn.Module, **described: Any) -> Rival:
    """A rival from a module."""
    parameters = list(module.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    return Rival(layer=module, wanted=list(parameters), parameters=count, **described)


def compiled(rival: Rival) -> Rival:
    """The same, made by `torch.compile` when it is first called."""
    return replace(rival, layer=torch.compile(rival.layer, dynamic=False), compiled=True)


def ordinary_rivals(setting: Setting, inputs: Tensor, gradient: Tensor | None) -> list[Rival]:
    """Ordinary attention with the same weights through every backend of SDPA that takes these inputs."""
    options: Any = {"head_dim": setting.head_dim, "causal": setting.causal, "device": inputs.device}
    sizes = setting.width, setting.num_heads
    first = OrdinaryAttention(*sizes, dtype=inputs.dtype, **options)
    fill_(first, setting.seed)
    exact = OrdinaryAttention(*sizes, dtype=torch.float32, **options)
    exact.load_state_dict(first.state_dict())
    expected = _results(exact, inputs, None)[0]
    found = []
    for backend in backends_for(setting.device):
        module = OrdinaryAttention(*sizes, backend=backend, dtype=inputs.dtype, **options)
        module.load_state_dict(first.state_dict())
        rival = rival_of(module, kind="ordinary", implementation=backend, asked=backend)
        if rival.runs(inputs, gradient):
            found.append(rival.told(error=distance(_results(module, inputs, None)[0], expected)))
    return found


def shared_rivals(
    setting: Setting,
    size: Size,
    inputs: Tensor,
    gradient: Tensor | None,
    implementations: Sequence[str],
    skipped: Skipped,
) -> list[Rival]:
    """Our layer with the same weights through several implementations, each compared with the definition.

    An implementation that raises is left out, and `skipped` told.

    Raises:
        WrongResult: if one is further from the definition in float32 than rounding explains.
    """
    shared_dim, dims_per_head = size
    causal = setting.causal

    def layer(implementation: str, dtype: torch.dtype) -> CollaborativeAttention:
        return CollaborativeAttention(
            setting.width, setting.num_heads, shared_dim, dims_per_head=dims_per_head, head_dim=setting.head_dim,
            mixing="normal", implementation=implementation, device=inputs.device, dtype=dtype,
        )  # fmt: skip

    first = layer("reference", inputs.dtype)
    fill_(first, setting.seed)
    exact = layer("reference", torch.float32)
    exact.load_state_dict(first.state_dict())
    expected = _results(SharedAttention(exact, causal=causal), inputs, gradient)
    plain = _results(SharedAttention(first, causal=causal), inputs, gradient)
    allowed = [3 * distance(found, right) + 1e-4 for found, right in zip(plain, expected, strict=True)]
    found = []
    for implementation in implementations:
        ours = layer(implementation, inputs.dtype)
        ours.load_state_dict(first.state_dict())
        module = SharedAttention(ours, causal=causal)
        described: Any = {"shared_dim": shared_dim, "dims_per_head": dims_per_head, "asked": implementation}
        try:
            results = _results(module, inputs, gradient)
            with torch.set_grad_enabled(gradient is not None):
                chosen = implementation_of(ours, inputs, causal)
        except Exception as error:  # of whatever kind a kernel's compiler, a driver or a refusal is
            skipped(rival_of(module, kind="collaborative", implementation=implementation, **described).name, error)
            continue
        offs = [distance(one, right) for one, right in zip(results, expected, strict=True)]
        names = ["output", "gradient of the input", *(f"gradient of {name}" for name, _ in module.named_parameters())]
        for name, off, most in zip(names, offs, allowed, strict=False):
            if not off <= most:
                raise WrongResult(
                    f"{name} of shared_dim {shared_dim}, dims_per_head {dims_per_head}, by {implementation} must be "
                    f"within {most:.2g} of the definition in float32, got {off:.2g}"
                )
        found.append(rival_of(module, kind="collaborative", implementation=chosen, error=offs[0], **described))
    return found


def implementation_of(layer: CollaborativeAttention, inputs: Tensor, causal: bool) -> str:
    """Which implementation a layer computes an input by."""
    value = layer.value(inputs).unflatten(-1, (layer.num_heads, layer.head_dim)).transpose(1, 2)
    return ops.choose(
        layer.query(inputs), layer.key(inputs), value, layer.mixing, dims=layer.dims, causal=causal,
        implementation=layer.implementation,
    )  # fmt: skip


@torch.no_grad()
def fill_(module: nn.Module, seed: int) -> None:
    """Fresh weights of which none is zero: what is zero can be wrong, or fast, unseen."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        fan = parameter.shape[-1]
        drawn = torch.randn(parameter.shape, generator=generator) * fan**-0.5
        parameter.copy_(drawn)
    if isinstance(module, CollaborativeAttention):
        # The scores' standard deviation is one, as with ordinary heads.
        module.mixing.mul_(module.head_dim**0.5)


def _results(module: nn.Module, inputs: Tensor, gradient: Tensor | None) -> list[Tensor]:
    """Output, and gradients of the input and the parameters if there is one of the output, in float32."""
    dtype = next(module.parameters()).dtype
    inputs = inputs.detach().to(dtype).requires_grad_(gradient is not None)
    with torch.set_grad_enabled(gradient is not None):
        output = module(inputs)
    results = [output.detach()]
    if gradient is not None:
        results += torch.autograd.grad(output, [inputs, *module.parameters()], gradient.to(dtype))
    return [result.float() for result in results]


def distance(found: Tensor, expected: Tensor) -> float:
    """||found - expected|| / ||expected||."""
    return float((found - expected).norm() / expected.norm())
