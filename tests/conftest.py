"""One thread a test process: several of them share the machine, and threads that wait for each other cost more."""

import torch

torch.set_num_threads(1)
