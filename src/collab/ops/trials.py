"""Ways to compute on CUDA devices that none has run yet: checked in Triton's interpreter and compiled, but off there.

What is on trial: cuDNN's attention coming first for long sequences (`ranking`), reading wide queries and keys in chunks
(`fused_tiles`), and all gradients over few keys in one kernel (`fused_short_backward`). What a device has shown to be
right and faster is no longer asked about here.
"""

import torch

enabled = False
"""Set it to try them: `pytest -m gpu --trials tests`, `benchmarks/bench_attention.py --trials`."""


def are_on(device: torch.device) -> bool:
    """Whether a tensor's device may run what is on trial. The interpreter's does: that is where it is tested."""
    return enabled or device.type != "cuda"
