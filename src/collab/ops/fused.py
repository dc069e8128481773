"""Collaborative attention in kernels of our own, forward and backward, for CUDA devices.

Nothing is materialised for all heads, mixed queries least of all: kernels mix in registers and read the shared key as
it is. They are operators of torch, so `torch.compile(fullgraph=True)`, CUDA graphs and autocast work. A few queries
that need no gradients, as when decoding, have a kernel of their own.

This file does not import Triton; the files of the kernels do, and are imported where they are first needed.
"""

import importlib.util
import os

import torch
from torch import Tensor

NAME = "fused"

WIDEST = 768
"""Shared dimensions that a program holds, at most."""

WIDEST_VALUE = 128

FARTHEST = 2**31 - 1
"""Kernels count from a sequence's first token in 32 bits."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
    reasons = list(why_not_here(query.device.type, query.device.index))
    if need_weights:
        reasons.append("it never holds the attention weights, and need_weights=True asks for them")
    if dropout:
        reasons.append(f"it drops no attention weights, and dropout is {dropout}")
    if query.dtype not in _DTYPES or key.dtype != query.dtype or value.dtype != query.dtype:
        found = ", ".join(str(part.dtype).removeprefix("torch.") for part in (query, key, value))
        reasons.append(f"query, key and value must all be float32, bfloat16 or float16, got {found}")
    if query.shape[-1] > WIDEST:
        reasons.append(f"the shared size must be at most {WIDEST}, got {query.shape[-1]}")
    if value.shape[-1] > WIDEST_VALUE:
        reasons.append(f"value heads must be at most {WIDEST_VALUE} wide, got {value.shape[-1]}")
    if any(size == 0 for part in (query, key, value) for size in part.shape):
        reasons.append("there must be at least one query, key and head")
    if any(part.stride(-1) != 1 and part.shape[-1] > 1 for part in (query, key, value)):
        reasons.append("numbers of a token must lie side by side in memory")
    if any(spans(part) > FARTHEST for part in (query, key, value, mask) if part is not None):
        reasons.append(f"tokens must lie within {FARTHEST} numbers of each other in memory")
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        reasons.append("it makes no gradient of an additive mask")
    return reasons


def why_not_here(device_type: str, device_index: int | None) -> list[str]:
    """Reasons that lie in the machine. Imports the operators, which a compiler cannot do while it traces."""
    if importlib.util.find_spec("triton") is None:
        return ["it needs Triton, which is not installed"]
    if device_type == "cuda":
        if torch.version.hip is not None:
            return ["it needs a CUDA device, this one is of another make"]
        if torch.cuda.get_device_capability(device_index) < (8, 0):
            return ["it needs a device of compute capability 8.0 or later"]
    elif device_type != "cpu" or os.environ.get("TRITON_INTERPRET") != "1":
        return [f"it needs a CUDA device, the inputs are on {device_type}"]
    importlib.import_module("collab.ops.fused_operators")
    importlib.import_module("collab.ops.fused_decode")
    return []


def spans(tensor: Tensor) -> int:
    """Numbers between the first and the last token of a sequence, or the first and the last entry of a mask's head."""
    return sum(max(0, size - 1) * stride for size, stride in zip(tensor.shape[-2:], tensor.stride()[-2:], strict=True))


# What torch.compiler.assume_constant_result does, which imports the compiler: seconds, for everybody.
why_not_here._dynamo_marked_constant = True  # type: ignore[attr-defined]


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
    """Attend in one kernel. Shapes as in `ops.attention`; the output lies as (batch, query, head, dim) in memory."""
    from collab.ops import fused_decode, fused_operators

    if not fused_decode.why_not(query, key, value, mixing, dims=dims, mask=mask, causal=causal):
        return fused_decode.decode(query, key, value, mixing, scale=scale, dims=dims, mask=mask), None
    return fused_operators.attend(query, key, value, mixing, dims, mask, scale, causal), None
