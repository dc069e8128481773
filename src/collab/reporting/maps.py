"""The maps of a report, as plain numbers: how heads mix shared dimensions, and what they attend to."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from collab.ops.reference import dense_mixing
from collab.reporting.attention import attention_weights, moved
from collab.reporting.inputs import Example, LeftOut
from collab.reporting.subject import Subject
from collab.structure import host_at

MOST_COLUMNS = 512
"""Shared dimensions that a mixing heat map shows, at most: the strongest."""


def mixing_maps(subject: Subject) -> dict[str, Any]:
    """For each layer, how much each head uses each shared dimension: (head, shared), from -1 to 1.

    The mixing weight times the norms of the dimension's query and key, which is what a head's product gets of it, as
    a share of the largest in the head. Columns are put in the order of the head that uses them most.
    """
    layers = []
    for site in subject.sites:
        shared = host_at(site).shared_weights(site.module)
        mixing = shared.mixing.detach().float().cpu()
        if shared.dims is not None:
            mixing = dense_mixing(mixing, shared.dims.cpu(), shared.shared_dim)
        norms = [part.detach().float().cpu().norm(dim=1) for part in (shared.query, shared.key)]
        strength = mixing * norms[0] * norms[1]
        strength = strength / strength.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        strongest = strength.abs().amax(0).argsort(descending=True)[:MOST_COLUMNS]
        owner = strength.abs().argmax(0)
        order = sorted(
            strongest.tolist(), key=lambda column: (int(owner[column]), -float(strength[:, column].abs().max()))
        )
        layers.append(
            {
                "layer": subject.numbers[site.path],
                "path": site.path,
                "heads": site.num_heads,
                "full_dim": site.full_dim,
                "shared_dim": shared.shared_dim,
                "order": order,
                "weights": _rounded(strength[:, order], 3),
            }
        )
    return {"layers": layers, "most_columns": MOST_COLUMNS}


def attention_maps(subject: Subject) -> dict[str, Any]:
    """What every head attends to in the example, before and after."""
    example = subject.example
    if example is None:
        raise LeftOut(subject.why_not["example"])
    after = attention_weights(subject.converted, example.batch)
    before = {} if subject.original is None else attention_weights(subject.original, example.batch)
    if not after:
        raise LeftOut("no layer of this model shows its attention weights")
    facts: dict[str, Any] = {"source": example.source, "kind": "text" if example.pixels is None else "image"}
    facts["is_cut"] = example.is_cut
    rows = []
    for path, weights in after.items():
        earlier = before.get(path)
        row: dict[str, Any] = {"path": path}
        if earlier is not None and earlier.shape == weights.shape:
            by_head = moved(earlier, weights)
            row |= {"moved": _rounded(by_head, 4), "mean_moved": round(float(by_head.mean()), 4)}
        else:
            earlier = None
        shown = _of_text(example, path, weights) if example.pixels is None else _of_image(subject, example, weights)
        if shown is None:
            continue
        take: Callable[[Tensor], Tensor] = shown.pop("take")
        maps = {"original": earlier, "converted": weights}
        row |= {name: None if values is None else _rounded(take(values), 4) for name, values in maps.items()}
        rows.append(row | shown)
    if not rows:
        raise LeftOut("its attention is not over one grid of patches of the image")
    # What runs several times has no number of its own.
    numbers = subject.numbers
    return facts | {"layers": [{"layer": numbers.get(row["path"], place), **row} for place, row in enumerate(rows)]}


def _of_text(example: Example, path: str, weights: Tensor) -> dict[str, Any] | None:
    """Whose attention to what: the tokens of both sides of a map (head, query, key)."""
    rows = example.asked if example.asked and "decoder" in path.lower() else example.tokens
    columns = rows if weights.shape[-1] == len(rows) else example.tokens
    if weights.shape[1:] != (len(rows), len(columns)):
        rows, columns = ([str(place) for place in range(size)] for size in weights.shape[1:])
    return {"queries": rows, "keys": columns, "take": lambda values: values}


def _of_image(subject: Subject, example: Example, weights: Tensor) -> dict[str, Any] | None:
    """Attention (head, row, column) on the patches: the class token's, or what patches get from all, on average."""
    assert example.pixels is not None
    height, width = example.pixels.shape[1:]
    found = _grid(weights.shape[-1], height, width)
    if found is None or weights.shape[1] not in (1, weights.shape[2]):
        return None
    before, rows, columns = found
    has_class = before > 0 and getattr(subject.converted, "cls_token", example) is not None
    by_class = has_class or weights.shape[1] == 1

    def take(values: Tensor) -> Tensor:
        given = values[:, 0] if by_class else values.mean(1)
        on_patches: Tensor = given[:, before:].unflatten(-1, (rows, columns))
        return on_patches

    return {"asks": "the class token" if by_class else "all patches, on average", "take": take}


def _grid(tokens: int, height: int, width: int) -> tuple[int, int, int] | None:
    """How many tokens come before the patches, and the patches' rows and columns; None if they fill no grid."""
    for before in range(9):
        rows = round(((tokens - before) * height / width) ** 0.5) if tokens > before else 0
        if rows and (tokens - before) % rows == 0 and rows * width == (tokens - before) // rows * height:
            return before, rows, (tokens - before) // rows
    return None


def _rounded(values: Tensor, digits: int) -> Any:
    """Nested lists of numbers with so many digits after the point."""
    return (values.double() * 10**digits).round().div(10**digits).tolist()
