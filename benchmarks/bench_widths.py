"""Measure cuDNN's attention over keys of several widths, one key for all heads or one each: what widths cost.

    python benchmarks/bench_widths.py
    python benchmarks/bench_widths.py --cases 32x512 --widths 64,80,128 --device cpu --backend default --dtype float32

Twelve heads, values 64 wide, queries and keys laid out as `collab.ops.cudnn` gives them. A table of microseconds.
"""

import argparse
from collections.abc import Callable, Iterator

import torch
from torch.nn.functional import scaled_dot_product_attention

from collab.benchmark import measure_in_turn
from collab.rivals import BACKENDS, DTYPES, Draw, Setting, through
from collab.table import format_table

HEADS, VALUE_DIM = 12, 64


def calls(setting: Setting, width: int, backend: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Name -> a call, by how many keys there are, for inference and for training."""
    batch, tokens, draw = setting.batch, setting.tokens, Draw(setting)
    query = draw(batch, tokens, HEADS, width).transpose(1, 2)
    value = draw(batch, tokens, HEADS, VALUE_DIM).transpose(1, 2)
    gradient = draw(batch, tokens, HEADS, VALUE_DIM).transpose(1, 2)
    for heads in (1, HEADS):
        parts = [query, draw(batch, tokens, heads, width).transpose(1, 2), value]
        wanted = [part.detach().requires_grad_() for part in parts]

        def attend(*parts: torch.Tensor, is_shared: bool = heads == 1) -> torch.Tensor:
            with through(backend):
                return scaled_dot_product_attention(*parts, enable_gqa=is_shared)

        def infer(parts: list[torch.Tensor] = parts, attend: Callable[..., torch.Tensor] = attend) -> torch.Tensor:
            with torch.no_grad():
                return attend(*parts)

        def train(wanted: list[torch.Tensor] = wanted, attend: Callable[..., torch.Tensor] = attend) -> object:
            return torch.autograd.grad(attend(*wanted), wanted, gradient)

        name = f"{heads} key{'s' if heads > 1 else ''}"
        yield f"inference, {name}", infer
        yield f"training, {name}", train


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="32x512,8x2048", help="batch x tokens, with commas between")
    parser.add_argument("--widths", default="64,72,80,96,112,128", help="of keys, with commas between")
    parser.add_argument("--backend", default="cudnn", choices=BACKENDS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    options = parser.parse_args()
    lines = []
    for case in options.cases.split(","):
        batch, tokens = map(int, case.split("x"))
        setting = Setting(batch=batch, tokens=tokens, device=options.device, dtype=options.dtype)
        for width in map(int, options.widths.split(",")):
            timings = measure_in_turn(dict(calls(setting, width, options.backend)), device=options.device, repeats=15)
            times = [f"{timing.milliseconds * 1e3:.1f}" for timing in timings.values()]
            lines.append([case, str(width), *times])
    print(format_table(["batch x tokens", "width", *timings], lines))


if __name__ == "__main__":
    main()
