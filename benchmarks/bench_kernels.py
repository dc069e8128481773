"""Profile whole attention layers kernel by kernel: what runs in one call, how often, and for how long.

    python benchmarks/bench_kernels.py --output benchmarks/results/kernels.jsonl
    python benchmarks/bench_kernels.py --output /tmp/try.jsonl --device cpu --quick

By torch.profiler, of ordinary layers and ours as they are used, not compiled. On a GPU times are those of kernels
alone, without the gaps between launches, which a graph does not have. On a CPU they are those of operators of torch.
"""

import argparse
import re
from collections import defaultdict
from collections.abc import Sequence

import torch
from bench_attention import DIMS_PER_HEAD, QUICK, QUICK_CASES, QUICK_DIMS, QUICK_SIZES, SIZES, SPARSE_CASES
from bench_parts import carry_out, parser_of
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from collab import CollaborativeAttention
from collab.records import RunRecord, append_record, provenance
from collab.rivals import OrdinaryAttention, Setting, Size, fill_
from collab.speed_records import size_of
from collab.sweep import device_name
from collab.table import format_table

CASES = (("training", 32, 128), ("inference", 32, 128), ("inference", 32, 512))
CALLS, WARM_UP = 10, 3
MOST_LETTERS = 56


def shorten(name: str) -> str:
    """A kernel's name without types, arguments and namespaces.

    Example:
        >>> shorten("void at::native::(anonymous namespace)::reduce_kernel<512, 1, float>(at::Tensor, int)")
        'reduce_kernel'
    """
    name = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    name = re.split(r"[<(]", name, maxsplit=1)[0] if not name.startswith("aten::") else name
    return name.rsplit("::", 1)[-1].strip()[:MOST_LETTERS]


def layer_of(setting: Setting, size: Size | None) -> nn.Module:
    """Ordinary heads if there is no size, ours otherwise."""
    dtype = getattr(torch, setting.dtype)
    sizes = setting.width, setting.num_heads
    layer: nn.Module
    if size is None:
        layer = OrdinaryAttention(*sizes, device=setting.device, dtype=dtype)
    else:
        layer = CollaborativeAttention(
            *sizes, size[0], dims_per_head=size[1], mixing="normal", device=setting.device, dtype=dtype
        )
    fill_(layer, setting.seed)
    return layer


def profiled(setting: Setting, size: Size | None) -> dict[str, tuple[float, float]]:
    """Kernel -> calls and microseconds in one pass, the longest first."""
    layer, (inputs, gradient) = layer_of(setting, size), setting.inputs()
    wanted = [inputs, *layer.parameters()]

    def step() -> None:
        with torch.set_grad_enabled(gradient is not None):
            output = layer(inputs)
        if gradient is not None:
            torch.autograd.grad(output, wanted, gradient)

    is_cuda = setting.device != "cpu"
    for _ in range(WARM_UP):
        step()
    if is_cuda:
        torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as found:
        for _ in range(CALLS):
            step()
        if is_cuda:
            torch.cuda.synchronize()
    times: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in found.key_averages():
        if (event.device_type == DeviceType.CUDA) != is_cuda:
            continue
        took = event.self_device_time_total if is_cuda else event.self_cpu_time_total
        times[shorten(event.key)][0] += event.count / CALLS
        times[shorten(event.key)][1] += took / CALLS
    longest = sorted(times.items(), key=lambda item: -item[1][1])
    return {name: (calls, took) for name, (calls, took) in longest if took > 0}


def run(options: argparse.Namespace, records: list[RunRecord]) -> None:
    """Profile every layer, and append a record a kernel to the file and to `records`."""
    common = {"device": options.device, "dtype": options.dtype} | (QUICK if options.quick else {})
    dense, own = (QUICK_SIZES, QUICK_DIMS) if options.quick else (SIZES, DIMS_PER_HEAD)
    cases = [("training", *QUICK_CASES[0]), ("inference", *QUICK_CASES[1])] if options.quick else CASES
    for step, batch, tokens in cases:
        setting = Setting(batch=batch, tokens=tokens, step=step, **common)
        has_sparse = (batch, tokens) in (*SPARSE_CASES, QUICK_CASES[1])
        sparse = [(size, own) for size in dense[1:]] if has_sparse else []
        for size in [None, *((size, None) for size in dense), *sparse]:
            origin = provenance(seed=setting.seed, device=setting.device)
            shared_dim, dims_per_head = size or (None, None)
            for kernel, (calls, microseconds) in profiled(setting, size).items():
                record = RunRecord(
                    name="kernels",
                    config={
                        "benchmark": "kernels", "device": device_name(setting.device), "pass": step, "batch": batch,
                        "tokens": tokens, "width": setting.width, "num_heads": setting.num_heads,
                        "dtype": setting.dtype, "threads": None, "kind": "collaborative" if size else "ordinary",
                        "shared_dim": shared_dim, "dims_per_head": dims_per_head, "kernel": kernel,
                        "run": options.run,
                    },
                    metrics={"calls": calls, "microseconds": microseconds},
                    provenance=origin | {"commit": options.commit or origin["commit"]},
                )  # fmt: skip
                records.append(record)
                append_record(options.output, record)


def summary(records: Sequence[RunRecord]) -> str:
    """A line a kernel."""
    lines = []
    for record in records:
        config, metrics = record.config, record.metrics
        size, own = size_of(record)
        layer = f"{config['kind']} {size or ''}{f'/{own}' if own else ''}".strip()
        case = [config["pass"], f"{config['batch']} x {config['tokens']}", layer, config["kernel"]]
        lines.append([*case, f"{metrics['calls']:.3g}", f"{metrics['microseconds']:.1f}"])
    return format_table(["pass", "batch x tokens", "layer", "kernel", "calls", "us"], lines)


def main() -> None:
    """Entry point."""
    carry_out(parser_of(__doc__), run, summary)


if __name__ == "__main__":
    main()
