"""Steps of decoding to measure against each other: attention of one new token over a cache of keys and values."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from collab import ops
from collab.layer import start_dims
from collab.rivals import Draw, Rival, Setting, Size, Skipped, WrongResult, backends_for, distance, through


def ordinary_decoding_rivals(setting: Setting) -> list[Rival]:
    """SDPA over the keys of every head, through every backend that takes them."""
    draw = Draw(setting)
    heads = (setting.batch, setting.num_heads)
    query = draw(*heads, 1, setting.size_of_head)
    key, value = (draw(*heads, setting.tokens, setting.size_of_head) for _ in range(2))
    found = []
    for backend in backends_for(setting.device):

        def attend(_: Tensor, backend: str = backend) -> Tensor:
            with through(backend):
                return functional.scaled_dot_product_attention(query, key, value)

        rival = Rival(kind="ordinary", layer=attend, implementation=backend, asked=backend)
        if rival.runs(query, None):
            found.append(rival)
    return found


def shared_decoding_rivals(
    setting: Setting, size: Size, implementations: Sequence[str], skipped: Skipped
) -> list[Rival]:
    """`collab.ops.attention` over the shared keys, each implementation compared with the definition."""
    (shared_dim, dims_per_head), draw = size, Draw(setting)
    query = draw(setting.batch, 1, shared_dim)
    key = draw(setting.batch, setting.tokens, shared_dim + setting.num_heads)
    value = draw(setting.batch, setting.num_heads, setting.tokens, setting.size_of_head)
    mixing = draw(setting.num_heads, dims_per_head or shared_dim)
    mixing *= (setting.size_of_head / mixing.shape[1]) ** 0.5
    dims = None
    if dims_per_head is not None:
        dims = start_dims(setting.num_heads, shared_dim, dims_per_head).to(setting.device, ops.DIMS_DTYPE)
    options: Any = {"scale": setting.size_of_head**-0.5, "dims": dims}
    tensors = (query, key, value, mixing)

    def attend(_: Tensor, implementation: str = "reference", *, exactly: bool = False) -> Tensor:
        given = [tensor.float() for tensor in tensors] if exactly else tensors
        return ops.attention(*given, **options, implementation=implementation)[0]

    with torch.no_grad():
        expected = attend(query, exactly=True)
        allowed = 3 * distance(attend(query).float(), expected) + 1e-4
    found = []
    for implementation in implementations:

        def run(_: Tensor, implementation: str = implementation) -> Tensor:
            return attend(_, implementation)

        rival = Rival(
            kind="collaborative", layer=run, implementation=implementation, asked=implementation,
            shared_dim=shared_dim, dims_per_head=dims_per_head, parameters=0,
        )  # fmt: skip
        try:
            with torch.no_grad():
                off = distance(run(query).float(), expected)
                chosen = ops.choose(*tensors, dims=dims, implementation=implementation)
        except Exception as error:
            skipped(rival.name, error)
            continue
        if not off <= allowed:
            raise WrongResult(
                f"output of shared_dim {shared_dim}, dims_per_head {dims_per_head}, by {implementation} must be within "
                f"{allowed:.2g} of the definition in float32, got {off:.2g}"
            )
        found.append(rival.told(implementation=chosen, error=off))
    return found
