"""Which implementation is fastest for which inputs: rules by device, from measurements.

On CPUs the rule compares estimated costs, in multiplications for a score, which is a pair of one head's query and key;
whatever else an implementation does is told in that unit. Plain products take `shared_dim + value_dim` of them. Flash
attention takes twice the common width that inputs are filled up to; it saves passes over the scores, and what prepares
the tokens for it is shared by as many scores as there are queries. `benchmarks/bench_cpu_paths.py` measures how far
this is from the fastest.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from collab.ops import padded, sdpa
from collab.tracing import is_exporting

ORDER = ("fused", "cudnn", "sdpa", "padded", "matmul", "reference")
"""Where nothing better is known: kernels made for the purpose, torch's own, plain products."""

LONG = ("cudnn", *(name for name in ORDER if name != "cudnn"))
"""On CUDA, from so many tokens on that cuDNN's kernels make up for the mixed queries that are written out for them."""

MORE_THAN = 128
"""Queries, and keys, of which there are more where `LONG` holds. On an H200, in bfloat16, as a share of the fastest
ordinary layer's time, 32 x 128 tokens took 0.66 by `fused` and 0.90 by cuDNN with one key head, 64 wide; training 1.05
and 1.13. With 32 x 512 tokens it was 1.00 and 0.88, training 1.31 and 1.03; with 8 x 2048, 1.20 and 0.93, training 2.00
and 0.98. Sparse mixing, which `fused` took 1.40 to 1.71 for at those lengths, has cuDNN compute what it does in an
ordinary layer. `benchmarks/bench_attention.py` measures it again."""

PORTABLE = ("sdpa", "padded", "matmul", "reference", "fused", "cudnn")

COMPILED_LENGTH = 512
"""The length that is assumed where code is compiled, lest it be compiled again for lengths on the rule's other side."""

FEWEST = 64
"""Preparing fewer tokens than this takes no less time."""


@dataclass(frozen=True)
class Ranking:
    """Names of implementations, the fastest first, with the rule that says so and the costs it compared, if any."""

    names: tuple[str, ...]
    rule: str
    costs: dict[str, float]

    def __str__(self) -> str:
        costs = ", ".join(f"{name} {self.costs[name]:,.0f}" for name in self.names if name in self.costs)
        return f"{self.rule}: {costs}" if costs else self.rule


def rank(
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
) -> Ranking:
    """How fast implementations would be, whether or not they take the inputs, which are as in `ops.attention`."""
    if is_exporting():
        return Ranking(PORTABLE, "an exported program may run on any device", {})
    if query.device.type == "cuda":
        if min(query.shape[1], key.shape[1]) > MORE_THAN:
            return Ranking(LONG, f"on CUDA, cuDNN comes first for more than {MORE_THAN} tokens", {})
        return Ranking(ORDER, f"on CUDA, kernels for shared keys come first for up to {MORE_THAN} tokens", {})
    if query.device.type != "cpu":
        return Ranking(ORDER, f"the usual order, nothing was measured on {query.device.type}", {})
    records = torch.is_grad_enabled()
    is_recorded = records and any(part.requires_grad for part in (query, key, value, mixing))
    has_flash = not dropout and (mask is None or not (records and mask.requires_grad))
    costs = _cpu_costs(
        query, key, value, mixing,
        dims=dims, masked=causal or mask is not None, is_recorded=is_recorded, has_flash=has_flash,
    )  # fmt: skip
    names = sorted(costs, key=lambda name: costs[name])
    return Ranking((*names, *(name for name in ORDER if name not in costs)), "least estimated cost on a CPU", costs)


def _cpu_costs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixing: Tensor,
    *,
    dims: Tensor | None,
    masked: bool,
    is_recorded: bool,
    has_flash: bool,
) -> dict[str, float]:
    """Cost of a score by name; what is not here comes after."""
    shared_dim, value_dim = query.shape[2], value.shape[3]
    is_half = query.element_size() < 4
    queries: float = COMPILED_LENGTH
    keys: float = COMPILED_LENGTH
    if not torch.compiler.is_compiling():
        queries, keys = max(1, query.shape[1]), key.shape[1]
        queries = queries if queries < keys else max(FEWEST, queries)

    # Multiplications that not passing over all scores again and again is worth, and those that a number of a token is
    # worth where it is filled up to the width, or gathered.
    if is_half:
        saved = keys / 2 - 96 if is_recorded else keys * 3 / 4 + 128
        fill, gather, gathered = 11.0, 400.0, 80.0
    elif masked and not is_recorded:
        saved, fill, gather, gathered = min(keys, 512) / 4 + 100, 0.0, 350.0, 0.0
    else:
        saved, fill, gather, gathered = 140.0 if masked else 120.0, 170.0, 350.0, 0.0

    costs: dict[str, float] = {"matmul": shared_dim + value_dim}
    if has_flash:
        width = padded.common_width(key, value)
        costs["padded"] = 2 * width + fill * width / queries - saved
    if dims is not None:
        width = sdpa.own_width(key, value, mixing, shared_dim)
        costs["sdpa"] = 2 * width + gather * width / queries + gathered - saved
    return costs
