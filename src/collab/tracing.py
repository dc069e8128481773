"""What kind of tracing goes on, where torch's own answer depends on its version."""

import torch


def is_exporting() -> bool:
    """Whether a program is made for others, to run anywhere: with `torch.export`, not with `torch.compile`.

    Compilers call this instead of tracing it: those of torch 2.11 take `torch.compiler.is_exporting()` for true in
    everything that they compile, which would get what is portable instead of what is fast.
    """
    return torch.compiler.is_exporting()


# What torch.compiler.assume_constant_result does, which imports the compiler: seconds, for everybody.
is_exporting._dynamo_marked_constant = True  # type: ignore[attr-defined]
