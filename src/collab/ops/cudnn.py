"""Collaborative attention through cuDNN's attention, which `scaled_dot_product_attention` knows, on CUDA devices.

Kernels of ours write the heads' mixed queries and one key for all of them, whose last dimensions are the content
scores: the query of head i has a one at the i-th of those. With sparse mixing every head gets the dimensions that it
uses, and its content score, as a key of its own. Widths are filled up with zeros to what cuDNN takes, in queries and in
keys, so nothing is read that was not written.

cuDNN sums gradients in whatever order they come, so their last bits vary; those of the mixing's own step do not.
"""

import functools
import importlib
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from collab.ops import fused

NAME = "cudnn"

MULTIPLE = 8
"""Widths that cuDNN takes are multiples of it, and rows begin at as many numbers: 16 bytes."""

WIDEST = 128
"""Of a head's queries and keys, and of its values."""

MOST = 65535
"""Batch elements and heads."""

BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]
"""The second only where torch refuses the first in spite of what is asked here: slow, and right."""

ELSEWHERE = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
"""On CPUs, where Triton's interpreter runs our kernels."""

_FIXED = 92600
"""The version of cuDNN from which gradients are right for all numbers of keys; see `_why_not_gradients`."""

_DTYPES = (torch.bfloat16, torch.float16)


def width_of(key: Tensor, mixing: Tensor, shared_dim: int, is_sparse: bool) -> int:
    """Numbers of a head's queries and keys: mixed dimensions, content scores, and zeros."""
    used = mixing.shape[1] + (key.shape[-1] > shared_dim) if is_sparse else key.shape[-1]
    return used + -used % MULTIPLE


def why_not(
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
) -> list[str]:
    """Reasons to refuse these inputs; empty when they can be computed here."""
    reasons = list(_why_not_here(query.device.type, query.device.index))
    if need_weights:
        reasons.append("it never holds the attention weights, and need_weights=True asks for them")
    if dropout:
        reasons.append(f"it drops no attention weights, and dropout is {dropout}")
    if mask is not None:
        reasons.append("it takes no mask, which cuDNN would read as a number for every score")
    if query.dtype not in _DTYPES or key.dtype != query.dtype or value.dtype != query.dtype:
        found = ", ".join(str(part.dtype).removeprefix("torch.") for part in (query, key, value))
        reasons.append(f"query, key and value must all be bfloat16 or float16, got {found}")
    if torch.are_deterministic_algorithms_enabled():
        reasons.append("its gradients vary in their last bits, and deterministic algorithms are asked for")
    reasons += _why_not_sizes(query, key, value, mixing, dims is not None, causal)
    records = torch.is_grad_enabled() and any(part.requires_grad for part in (query, key, value, mixing))
    keys = key.shape[1]
    if records and not causal and keys % 128 == 64 and _has_wrong_gradients(query.device.type, query.device.index):
        reasons.append(f"before version 9.26 cuDNN's gradients may be no numbers for 64 keys modulo 128, got {keys}")
    if not reasons and query.is_cuda and not torch.compiler.is_compiling():
        key_heads = 1 if dims is None else len(mixing)
        width = width_of(key, mixing, query.shape[-1], dims is not None)
        sizes = (query.shape[0], len(mixing), key_heads, query.shape[1], keys, width, value.shape[-1])
        if not _is_taken(query.device, query.dtype, sizes, causal, records):
            reasons.append("torch does not give such inputs to cuDNN on this device")
    return reasons


def _why_not_sizes(
    query: Tensor, key: Tensor, value: Tensor, mixing: Tensor, is_sparse: bool, causal: bool
) -> list[str]:
    """Reasons in how many there are of everything, and where values lie in memory."""
    reasons = []
    (batch, queries, shared_dim), (keys, value_dim) = query.shape, value.shape[2:]
    width = width_of(key, mixing, shared_dim, is_sparse)
    if width > WIDEST:
        what = "dimensions of a head" if is_sparse else "shared dimensions"
        reasons.append(f"{what}, with content scores, must be at most {WIDEST}, got {width}")
    if value_dim > WIDEST or value_dim % MULTIPLE:
        reasons.append(f"value heads must be a multiple of {MULTIPLE} wide, and at most {WIDEST}, got {value_dim}")
    if queries < 2 or keys < 2:
        reasons.append(f"there must be at least two queries and keys, got {queries} and {keys}")
    if causal and queries != keys:
        reasons.append(f"with causal there must be as many keys as queries, got {keys} and {queries}")
    if not 0 < batch <= MOST or not 0 < len(mixing) <= MOST or not value_dim or not shared_dim:
        reasons.append(f"there must be 1 to {MOST} batch elements and heads, none of them empty")
    if any(part.stride(-1) != 1 and part.shape[-1] > 1 for part in (query, key, value)):
        reasons.append("numbers of a token must lie side by side in memory")
    longest = max(queries, keys) * len(mixing) * width  # as it is written for each head
    if longest > fused.FARTHEST or any(fused.spans(part) > fused.FARTHEST for part in (query, key)):
        reasons.append(f"tokens must lie within {fused.FARTHEST} numbers of each other in memory")
    start = 0 if torch.compiler.is_compiling() else value.storage_offset()  # which compilers cannot trace
    if start % MULTIPLE or any(stride % MULTIPLE for stride in value.stride()[:3]):
        reasons.append(f"values of a token must begin at multiples of {MULTIPLE} numbers in memory")
    return reasons


def _why_not_here(device_type: str, device_index: int | None) -> list[str]:
    """Reasons that lie in the machine. Imports the operators, which a compiler cannot do while it traces."""
    reasons = fused.why_not_here(device_type, device_index)
    if reasons:
        return reasons
    if device_type == "cuda":
        if not torch.backends.cudnn.is_available() or torch.backends.cudnn.version() is None:
            return ["it needs cuDNN, which torch was built without"]
        if not torch.backends.cudnn.enabled or not torch.backends.cuda.cudnn_sdp_enabled():
            return ["cuDNN's attention is switched off"]
    importlib.import_module("collab.ops.cudnn_operators")
    return []


def _has_wrong_gradients(device_type: str, device_index: int | None) -> bool:
    """Whether gradients of some numbers of keys may be no numbers, as torch's own choice has it for Hopper."""
    if device_type != "cuda" or torch.cuda.get_device_capability(device_index) != (9, 0):
        return False
    return (torch.backends.cudnn.version() or 0) < _FIXED


# What torch.compiler.assume_constant_result does, which imports the compiler: seconds, for everybody.
_why_not_here._dynamo_marked_constant = True  # type: ignore[attr-defined]
_has_wrong_gradients._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=1024)
def _is_taken(
    device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...], causal: bool, is_recorded: bool
) -> bool:
    """Whether torch gives inputs of these sizes to cuDNN: its own answer, which depends on its version."""
    batch, heads, key_heads, queries, keys, width, value_dim = sizes
    shapes = ((batch, heads, queries, width), (batch, key_heads, keys, width), (batch, heads, keys, value_dim))
    with torch.inference_mode(False):
        parts = [torch.empty(1, 1, 1, shape[-1], device=device, dtype=dtype).expand(shape) for shape in shapes]
        parts = [part.detach().requires_grad_(is_recorded) for part in parts]
        make: Any = torch.backends.cuda.SDPAParams
        return torch.backends.cuda.can_use_cudnn_attention(make(*parts, None, 0.0, causal, key_heads < heads))


class _InOneLayout(torch.autograd.Function):
    """Outputs (batch, head, query, value_dim), whose gradient lies in memory as they do: (batch, query, head, dim).

    torch keeps what cuDNN planned for a gradient by the layout of all inputs but that one, and uses it for the next.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        """The same."""
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The same, copied where it lies otherwise."""
        return gradients[0].transpose(1, 2).contiguous().transpose(1, 2)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixing: Tensor,
    *,
    scale: float,
    dims: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    need_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Mix, and let cuDNN do the rest. Shapes as in `ops.attention`; the output lies as (batch, query, head, dim)."""
    from collab.ops.cudnn_operators import spread_heads

    width = width_of(key, mixing, query.shape[-1], dims is not None)
    mixed_query, head_key = spread_heads(query, key, mixing, dims, width)
    parts = (mixed_query.transpose(1, 2), head_key.transpose(1, 2), value)
    options: dict[str, Any] = {"is_causal": causal, "scale": scale, "enable_gqa": dims is None and len(mixing) > 1}
    with sdpa_kernel(BACKENDS if query.is_cuda else ELSEWHERE):
        output = scaled_dot_product_attention(*parts, **options)
    return (_InOneLayout.apply(output) if torch.is_grad_enabled() else output), None
