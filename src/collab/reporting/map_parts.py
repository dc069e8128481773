"""The heat maps of a report's page: how heads mix the shared dimensions, and what they attend to."""

from collections.abc import Mapping
from html import escape
from typing import Any

import torch
from torch import Tensor

from collab.reporting.cells import number
from collab.reporting.figures import blocks
from collab.reporting.pictures import data_uri, glow, heat

_CELL, _LETTER, _LONGEST = 15.0, 6.0, 13
"""Sizes of a labelled map: of a cell, of a letter, and letters of a token at most."""


def mixing_part(facts: Mapping[str, Any]) -> str:
    """Mixing of every layer, before and after, a row a head and a column a dimension, equally wide."""
    strips = []
    for place, layer in enumerate(facts["mixing"]["layers"]):
        before, after = blocks(layer["heads"], layer["full_dim"]), torch.tensor(layer["weights"])
        height = max(3.0, min(14.0, 72 / layer["heads"])) * layer["heads"]
        pictures = "".join(
            f'<span style="flex-grow:{values.shape[1]};height:{height:.0f}px">'
            f'<img class="heat" src="{data_uri(heat(values))}" alt="layer {layer["layer"]}, {name}"></span>'
            for name, values in (("before", before), ("after", after))
        )
        size = number(facts, f"mixing/layers/{place}/shared_dim", "count")
        full = number(facts, f"mixing/layers/{place}/full_dim", "count")
        caption = f"layer {layer['layer']}: {full} dimensions, now {size}"
        strips.append(f'<figure class="strip"><figcaption>{caption}</figcaption><div>{pictures}</div></figure>')
    most = facts["mixing"]["most_columns"]
    cut = any(layer["shared_dim"] > most for layer in facts["mixing"]["layers"])
    more = f" Of larger sizes the strongest {most:,} dimensions are shown." if cut else ""
    return (
        "<p>A row is a head, a column a dimension of the query/key space. Before, on the left, every head has a block "
        "of dimensions to itself. After, on the right, the heads draw on the same dimensions: the stronger the colour, "
        "the more a head's query/key product gets of that dimension, relative to the head's largest (square roots, so "
        "that small shares are seen too); blue adds, orange subtracts. Columns come in the order of the head that uses "
        f"them most, so colour away from the diagonal is what is shared.{more}</p>{''.join(strips)}"
    )


def attention_part(facts: Mapping[str, Any], seen: str | None) -> str:
    """Attention of every head in every layer, original beside converted; `seen` is the image, as a data URI."""
    found = facts["attention"]
    is_text = found["kind"] == "text"
    source = number(facts, "attention/source", "text")
    if is_text:
        intro = (
            f"<blockquote>{source}</blockquote><p>Each map shows which tokens (columns) a token (row) attends to: the "
            "stronger, the more; square roots, so that small shares are seen too."
        )
        if found["is_cut"]:
            intro += f" Of this text the first {len(found['layers'][0]['keys']):,} tokens."
    else:
        asks = escape(str(found["layers"][0]["asks"]))
        bare = data_uri(glow(torch.zeros_like(torch.tensor(found["layers"][0]["converted"][0]))))
        intro = (
            # Once, and not in every one of the pictures that show it.
            f'<style>.image .map {{ background-image: url("{seen}") }}</style>'
            f'<figure class="image seen"><div class="map"><img src="{bare}" alt="the image as the model sees it"></div>'
            f"<figcaption>{source}, as the model sees it</figcaption></figure>"
            f"<p>The stronger a patch glows, the more attention it gets from {asks}; square roots, so that small "
            "shares are seen too."
        )
    if "moved" in found["layers"][0]:
        intro += (
            " In every pair the original comes first, then the converted model, on one scale. “Moved” is the share of "
            "attention that goes elsewhere since the conversion."
        )
    panels = []
    for place, layer in enumerate(found["layers"]):
        checked = " checked" if place == 0 else ""
        label = f'<label for="layer-{place}" title="{escape(layer["path"])}">{layer["layer"]}</label>'
        panel = _text_panel(facts, place) if is_text else _image_panel(facts, place)
        panels.append(
            f'<input type="radio" name="layer" id="layer-{place}"{checked}>{label}<div class="panel">{panel}</div>'
        )
    return f'{intro}</p><fieldset class="tabs"><legend>Layer</legend>{"".join(panels)}</fieldset>'


def _sides(layer: Mapping[str, Any]) -> dict[str, Tensor]:
    """Maps by model: (head, query, key) of text, (head, row, column) of an image."""
    return {name: torch.tensor(layer[name]) for name in ("original", "converted") if layer[name] is not None}


def _heading(facts: Mapping[str, Any], place: int) -> str:
    path = number(facts, f"attention/layers/{place}/path", "path", "code")
    if "mean_moved" not in facts["attention"]["layers"][place]:
        return f"<p>{path}</p>"
    return f"<p>{path}: moved {number(facts, f'attention/layers/{place}/mean_moved', 'share')}, mean over heads</p>"


def _text_panel(facts: Mapping[str, Any], place: int) -> str:
    """One layer: the mean of its heads with the tokens beside it, then head by head."""
    layer = facts["attention"]["layers"][place]
    sides = _sides(layer)
    means = {name: values.mean(0) for name, values in sides.items()}
    largest = max(float(mean.max()) for mean in means.values()) or 1.0
    whole = "".join(
        f'<figure><div class="scroll" role="region" tabindex="0" aria-label="{name}">'
        f"{_labelled(mean / largest, layer['queries'], layer['keys'])}</div>"
        f"<figcaption>{name}, mean over heads</figcaption></figure>"
        for name, mean in means.items()
    )
    heads = []
    for head in range(len(layer["converted"])):
        own = {name: values[head] for name, values in sides.items()}
        most = max(float(values.max()) for values in own.values()) or 1.0
        pictures = {name: f'<img class="heat" src="{data_uri(heat(values / most))}" alt="{name}, head {head}">'
                    for name, values in own.items()}  # fmt: skip
        heads.append(_tile(facts, place, head, pictures))
    return f'{_heading(facts, place)}<div class="maps">{whole}</div><div class="heads">{"".join(heads)}</div>'


def _image_panel(facts: Mapping[str, Any], place: int) -> str:
    """One layer, head by head, over the image."""
    sides = _sides(facts["attention"]["layers"][place])
    heads = []
    for head in range(len(sides["converted"])):
        own = {name: values[head] for name, values in sides.items()}
        most = max(float(values.max()) for values in own.values()) or 1.0
        pictures = {
            name: f'<img src="{data_uri(glow(values / most))}" alt="{name}, head {head}">'
            for name, values in own.items()
        }
        heads.append(_tile(facts, place, head, pictures))
    return f'{_heading(facts, place)}<div class="heads image">{"".join(heads)}</div>'


def _tile(facts: Mapping[str, Any], place: int, head: int, pictures: Mapping[str, str]) -> str:
    """One head: its maps side by side, and how much moved."""
    alone = "" if len(pictures) > 1 else " alone"
    maps = "".join(f'<div class="map">{picture}</div>' for picture in pictures.values())
    told = f"head {head}"
    if "moved" in facts["attention"]["layers"][place]:
        told += f": moved {number(facts, f'attention/layers/{place}/moved/{head}', 'share')}"
    return f'<figure><div class="pair{alone}">{maps}</div><figcaption>{told}</figcaption></figure>'


def _labelled(values: Tensor, rows: list[str], columns: list[str]) -> str:
    """A map (row, column) from 0 to 1 as SVG, with the tokens beside it and above it."""
    names = [
        [name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…" for name in side] for side in (rows, columns)
    ]
    left, top = (6 + _LETTER * max(map(len, side)) for side in names)
    width, height = _CELL * len(columns), _CELL * len(rows)
    labels = [
        f'<text x="{left - 4:.0f}" y="{top + _CELL * (place + 0.5):.1f}" text-anchor="end">{escape(name)}</text>'
        for place, name in enumerate(names[0])
    ] + [
        f'<text transform="translate({left + _CELL * (place + 0.5):.1f} {top - 4:.0f}) rotate(-90)">'
        f"{escape(name)}</text>"
        for place, name in enumerate(names[1])
    ]
    return (
        f'<svg viewBox="0 0 {left + width + 1:.0f} {top + height + 1:.0f}" style="min-width:'
        f'{0.8 * (left + width):.0f}px;max-width:{1.25 * (left + width):.0f}px" role="img" aria-label="attention map">'
        f'<g fill="currentColor" font-size="10" dominant-baseline="central">{"".join(labels)}</g>'
        f'<image class="heat" href="{data_uri(heat(values))}" x="{left:.0f}" y="{top:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" preserveAspectRatio="none"/>'
        f'<rect x="{left:.0f}" y="{top:.0f}" width="{width:.0f}" height="{height:.0f}" fill="none" '
        'stroke="currentColor" stroke-opacity=".3"/></svg>'
    )
