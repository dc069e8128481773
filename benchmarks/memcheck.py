"""One pass of every kernel over odd shapes, for a checker of memory accesses: `make memcheck`.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 python benchmarks/memcheck.py

Without torch's own pool of memory every tensor is an allocation by itself, so that one byte beyond it is seen.
"""

import itertools
import math

import torch
from torch import Tensor

from collab import ops
from collab.layer import start_dims
from collab.ops import reference

SHAPES = (
    # batch, query, key, shared, heads, value_dim
    (5, 123, 77, 37, 3, 32),
    (2, 150, 333, 130, 12, 64),
    (1, 1, 1, 16, 1, 16),
    (2, 65, 129, 384, 4, 128),
    (33, 500, 140, 256, 12, 64),
    (2, 70, 100, 230, 4, 64),
    (45, 100, 120, 64, 12, 64),
    (3, 1, 700, 128, 12, 64),
)
"""Two have enough programs for tiles that small batches never run. The last is a step of decoding."""

DEVICE = "cuda"
OWN = 16
"""Dimensions of a head where mixing is sparse."""


def inputs_of(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Query, key with content scores, value and mixing, each exactly as large as its numbers."""
    batch, queries, keys, shared, heads, value_dim = shape
    options = {"device": DEVICE, "dtype": dtype}
    value = torch.randn(batch, keys, heads, value_dim, **options).transpose(1, 2)
    return [
        torch.randn(batch, queries, shared, **options), torch.randn(batch, keys, shared + heads, **options), value,
        torch.randn(heads, shared, **options),
    ]  # fmt: skip


def check(shape: tuple[int, ...], dtype: torch.dtype, is_sparse: bool, mask_kind: str, name: str = "fused") -> float:
    """Run forward and backward, or decode, and return the relative error to the definition in float64.

    Not a number where the implementation of that name refuses the inputs.
    """
    query, key, value, mixing = inputs_of(shape, dtype)
    batch, queries, keys, shared, heads, _ = shape
    dims = start_dims(heads, shared, min(OWN, shared)).to(DEVICE) if is_sparse else None
    if dims is not None:
        mixing = mixing[:, : dims.shape[1]].contiguous()
    options = {"dims": dims, "scale": 0.1, "causal": mask_kind == "causal"}
    if mask_kind == "padding":
        options["mask"] = torch.rand(batch, 1, 1, keys, device=DEVICE) < 0.8
    if mask_kind == "additive":
        options["mask"] = torch.randn(1, heads, queries, keys, device=DEVICE, dtype=dtype)
    leaves = [part.detach().requires_grad_() for part in (query, key, value, mixing)]
    inputs = {option: given for option, given in options.items() if option != "scale"}
    if reasons := ops.IMPLEMENTATIONS[name].why_not(*leaves, **inputs):
        assert name != "fused", reasons
        print(f"{name}: {reasons}")
        return math.nan
    exact_options = options | {"mask": _wide(options.get("mask"))}
    exact, _ = reference.attention(*(part.double() for part in (query, key, value, mixing)), **exact_options)
    with torch.no_grad():
        output, _ = ops.attention(query, key, value, mixing, **options, implementation=name)
    if queries > 1:
        trained, _ = ops.attention(*leaves, **options, implementation=name)
        trained.float().square().sum().backward()
        assert all(leaf.grad is not None and bool(leaf.grad.isfinite().all()) for leaf in leaves)
    return float((output.double() - exact).norm() / exact.norm().clamp(min=1e-12))


def _wide(mask: Tensor | None) -> Tensor | None:
    return mask.double() if mask is not None and mask.is_floating_point() else mask


def main() -> None:
    """Entry point."""
    torch.manual_seed(0)
    worst = 0.0
    masks = ("none", "causal", "padding", "additive")
    for index, (shape, is_sparse) in enumerate(itertools.product(SHAPES, (False, True))):
        for dtype in (torch.bfloat16, torch.float32):
            mask_kind = masks[(index + (dtype == torch.float32)) % len(masks)]
            error = check(shape, dtype, is_sparse, mask_kind)
            worst = max(worst, error)
            print(f"{shape} {dtype} {'sparse' if is_sparse else 'dense'} {mask_kind}: error {error:.2e}", flush=True)
        error = check(shape, torch.bfloat16, is_sparse, "none", "cudnn")
        worst = max(worst, error)  # which stays what it is beside what is not a number
        print(f"{shape} {'sparse' if is_sparse else 'dense'} by cudnn: error {error:.2e}", flush=True)
    torch.cuda.synchronize()
    print(f"largest error {worst:.2e}")
    assert worst < 0.02


if __name__ == "__main__":
    main()
