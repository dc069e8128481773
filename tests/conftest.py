"""One thread a test process: several of them share the machine, and threads that wait for each other cost more.

Where there is no CUDA device, Triton's kernels run in its interpreter. It is chosen before Triton is imported.
"""

import os

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
