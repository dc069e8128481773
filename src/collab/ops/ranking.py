"""Which implementation is fastest for which inputs: rules by device, from measurements.

On CPUs the rule compares estimated costs, in multiplications for a score, which is a pair of one head's query and key;
whatever else an implementation does is told in that unit. Plain products take `shared_dim + value_dim` of them. Flash
attention takes the common width that inputs are filled up to, twice or more often; it saves passes over the scores, and
what prepares the tokens for it is shared by as many scores as there are queries. `benchmarks/bench_cpu_paths.py`
measures how far this is from the fastest.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from collab.ops import padded, sdpa
from collab.tracing import is_exporting

ORDER = ("fused", "cudnn", "sdpa", "padded", "matmul", "reference")
"""Where nothing better is known: kernels made for the purpose, torch's own, plain products."""

LONG = ("cudnn", *(name for name in ORDER if name != "cudnn"))
"""On CUDA, where cuDNN's kernels make up for the mixed queries that are written out for them: see `MORE_THAN`."""

FILLED = tuple({"sdpa": "padded", "padded": "sdpa"}.get(name, name) for name in ORDER)
"""On CUDA, of half types and heads that use all dimensions: flash attention there takes one width for queries, keys and
values, and no kernel takes keys whose width is no multiple of eight. `sdpa` gives them what is left, plain products."""

HALVES = (torch.bfloat16, torch.float16)

MORE_THAN = 128
"""Queries, and keys, of which there are more where `LONG` holds, for gradients and for heads that use some dimensions.
On an H200, in bfloat16, as a share of the fastest ordinary layer's time, training with 64 dimensions took 1.26 by
`fused` and 1.15 by cuDNN with 32 x 512 tokens, 1.98 and 1.28 with 8 x 2048; without gradients it was 0.82 and 0.88,
0.90 and 1.03. Of 384 dimensions 64 a head took 1.49 and 1.22 with 32 x 512. `benchmarks/bench_attention.py` measures it
again."""

PORTABLE = ("sdpa", "padded", "matmul", "reference", "fused", "cudnn")

COMPILED_LENGTH = 512
"""The length that is assumed where code is compiled, lest it be compiled again for lengths on the rule's other side."""

_CAPABILITIES: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()

HAS_TILES = bool(_CAPABILITIES.get("amx_bf16"))
"""Whether this processor multiplies tiles of half types (AMX), which flash attention does too."""

HAS_FLOAT16 = bool(_CAPABILITIES.get("avx512_fp16") or _CAPABILITIES.get("amx_fp16"))
"""Whether this processor multiplies numbers of float16; where not, plain products took ten times as long."""

_LONG = 6
"""Without products of float16, flash attention is faster than SDPA's others from so many keys for each dimension."""

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
    records = torch.is_grad_enabled()
    is_recorded = records and any(part.requires_grad for part in (query, key, value, mixing))
    if query.device.type == "cuda":
        if min(query.shape[1], key.shape[1]) > MORE_THAN and (dims is not None or is_recorded):
            what = "heads of some dimensions" if dims is not None else "gradients"
            return Ranking(LONG, f"on CUDA, cuDNN comes first for {what} over more than {MORE_THAN} tokens", {})
        order = FILLED if dims is None and query.dtype in HALVES else ORDER
        return Ranking(order, "on CUDA, kernels for shared keys come first", {})
    if query.device.type != "cpu":
        return Ranking(ORDER, f"the usual order, nothing was measured on {query.device.type}", {})
    has_flash = not dropout and (mask is None or not (records and mask.requires_grad))
    if query.dtype == torch.float16 and not HAS_FLOAT16:
        keys = COMPILED_LENGTH if torch.compiler.is_compiling() else key.shape[1]
        is_long = keys >= _LONG * padded.common_width(key, value)
        first = "padded" if is_long and has_flash and not is_recorded and dims is None else "sdpa"
        made_for_cuda = ("fused", "cudnn")
        others = (name for name in ORDER if name not in (*made_for_cuda, first))
        return Ranking(
            (first, *others, *made_for_cuda),
            "a CPU without products of float16 is best at SDPA, which makes them in float32",
            {},
        )
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

    flash = _flash_costs(keys, is_half=is_half, masked=masked, is_recorded=is_recorded)
    costs: dict[str, float] = {"matmul": shared_dim + value_dim}
    if has_flash:
        width = padded.common_width(key, value)
        costs["padded"] = flash.product * width + flash.fill * width / queries - flash.saved
    if dims is not None:
        width = sdpa.own_width(key, value, mixing, shared_dim)
    if dims is not None and not has_flash:  # plain products of what was gathered, and passes over the scores
        gather, passes = (450.0, 5 / 8) if is_half else (100.0, 1 / 6)
        costs["sdpa"] = width + value_dim + gather * width / queries + passes * keys
    elif dims is not None:
        costs["sdpa"] = flash.product * width + flash.gather * width / queries + flash.gathered - flash.saved
    return costs


@dataclass(frozen=True, kw_only=True)
class _FlashCosts:
    """What flash attention takes on a CPU, in multiplications of a plain product.

    Attributes:
        product: for a number of the common width, of queries with keys and of weights with values.
        saved: what not passing over all scores again and again is worth.
        fill, gather: for a number of a token that is filled up to the width, or gathered.
        gathered: for a score of gathered keys.
    """

    product: float = 2.0
    saved: float
    fill: float
    gather: float
    gathered: float = 0.0


def _flash_costs(keys: float, *, is_half: bool, masked: bool, is_recorded: bool) -> _FlashCosts:
    """Measured on layers of BERT-base's and MiniLM's sizes; lengths and what is recorded are as in `rank`."""
    if is_half and HAS_TILES:
        saved = keys / 2 - 96 if is_recorded else keys * 3 / 4 + 128
        return _FlashCosts(saved=saved, fill=11.0, gather=400.0, gathered=80.0)
    # Elsewhere plain products of half types have instructions that flash attention does without.
    if is_half and is_recorded:
        saved = keys / 2 - 260 if masked else keys / 3 - 230
        return _FlashCosts(product=4.1, saved=saved, fill=0.0, gather=300.0, gathered=35.0)
    if is_half:
        return _FlashCosts(product=6.6, saved=440 + keys / 5 if masked else 270.0, fill=400.0, gather=750.0)
    if not masked:
        return _FlashCosts(saved=60.0, fill=170.0, gather=200.0)
    if is_recorded:
        return _FlashCosts(saved=140.0, fill=170.0, gather=350.0)
    return _FlashCosts(saved=min(keys, 512) / 4 + 100, fill=40.0, gather=350.0)
