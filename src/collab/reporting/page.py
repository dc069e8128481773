"""The page of a report: HTML from its facts alone, so that every number on it is one of the file beside it."""

import importlib.resources
import json
from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from collab.reporting.cells import Column, listing, number, table
from collab.reporting.map_parts import attention_part, mixing_part

_TITLES = {
    "conversion": "What was converted",
    "fidelity": "What was lost",
    "layers": "Layer by layer",
    "spectra": "Spectra",
    "mixing": "How heads mix dimensions",
    "attention": "What heads attend to",
    "parameters": "Parameters, operations, cache",
    "speed": "Speed",
    "provenance": "Where this came from",
}
"""Parts in the order of the page, and their headings."""

_CAPTIONS = {
    "errors": "Relative error of each layer's query/key products. Hollow: if every head were cut down for itself, to "
    "as many dimensions in all.",
    "sizes": "Dimensions of each layer before (grey) and after (blue), and how many of the shared ones a head uses, "
    "mean over heads: the participation ratio of what each dimension adds to its product.",
    "spectra-heads": "Each head by itself, mean over heads and layers. A curve that rises late uses all of its "
    "dimensions: a single head leaves little to save. After, its keys are those of all dimensions it uses.",
    "spectra-all": "All heads side by side; of products, their sum. A curve that rises early says that heads have "
    "dimensions in common: those a shared space stores once.",
}


def render(facts: Mapping[str, Any], figures: Mapping[str, str], seen: str | None, data_name: str) -> str:
    """The whole page, with nothing to fetch.

    Args:
        facts: what `gather` found.
        figures: inline SVG by name, those that could be drawn.
        seen: the image of the example as a data URI, if it is an image.
        data_name: name of the file beside the page that holds the facts.
    """
    parts: dict[str, Callable[[], str]] = {
        "conversion": lambda: _conversion(facts),
        "fidelity": lambda: _fidelity(facts),
        "layers": lambda: _layers(facts, figures),
        "spectra": lambda: _spectra(facts, figures),
        "mixing": lambda: mixing_part(facts),
        "attention": lambda: attention_part(facts, seen),
        "parameters": lambda: _parameters(facts),
        "speed": lambda: _speed(facts),
        "provenance": lambda: _provenance(facts),
    }
    kept = [name for name in _TITLES if name in facts]
    sections = "".join(f'<section id="{name}"><h2>{_TITLES[name]}</h2>{parts[name]()}</section>' for name in kept)
    links = "".join(f'<a href="#{name}">{_TITLES[name]}</a>' for name in kept)
    title = escape(facts["conversion"]["name"])
    style = importlib.resources.files("collab.reporting").joinpath("page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{title}: conversion report</title>'
        f'<link rel="icon" href="data:,"><style>{style}</style></head>\n<body>'
        f'<header><p class="eyebrow">collab conversion report</p><h1>{title}</h1>{_lead(facts)}{_tiles(facts)}'
        f"<nav>{links}</nav></header>\n<main>{sections}{_left_out(facts)}</main>\n"
        f'<footer>Every number here is in <a href="{escape(data_name)}">{escape(data_name)}</a>; pointing at one shows '
        "all of its digits. How to read this page: docs/reading-the-report.md of collab.</footer></body></html>\n"
    )


def _lead(facts: Mapping[str, Any]) -> str:
    layers, full, shared = (
        number(facts, f"conversion/{name}", kind)
        for name, kind in (("layers", "count"), ("full_dim", "span"), ("shared_dim", "span"))
    )
    return (
        f'<p class="lead">{layers} attention layers of a {escape(facts["conversion"]["class"])}: where its heads had '
        f"{full} query/key dimensions side by side, they now share {shared}.</p>"
    )


def _tiles(facts: Mapping[str, Any]) -> str:
    """The first numbers."""
    tiles = []
    for tile in facts["headline"]:
        small = escape(tile["note"])
        if tile["pair"] is not None:
            base = tile["at"].rpartition("/")[0]
            before, after = (number(facts, f"{base}/{when}", tile["pair"]) for when in ("before", "after"))
            small = f"{before} → {after}{', ' if small else ''}{small}"
        tiles.append(
            f'<div class="tile"><dt>{escape(tile["label"])}</dt>'
            f'{number(facts, tile["at"], tile["kind"], "dd", "big")}<dd class="small">{small}</dd></div>'
        )
    return f'<dl class="tiles">{"".join(tiles)}</dl>'


def _conversion(facts: Mapping[str, Any]) -> str:
    about = facts["conversion"]
    rows = [
        ("original", "conversion/model", "text", ""),
        ("directory", "conversion/directory", "text", ""),
        ("class", "conversion/class", "text", ""),
        ("type of the weights", "conversion/dtype", "text", ""),
        ("layers converted", "conversion/layers", "count", ""),
        ("heads of a layer", "conversion/heads", "span", ""),
        ("size of a head", "conversion/head_dim", "span", ""),
        ("heads x head size", "conversion/full_dim", "span", ""),
        ("shared dimensions", "conversion/shared_dim", "span", ""),
        ("method", "conversion/method", "text", ""),
        ("metric of the errors", "conversion/metric", "text", ""),
        ("calibrated on", "conversion/calibration/from", "text", ""),
        ("inputs to calibrate", "conversion/calibration/inputs", "count", ""),
        ("refined: error before", "conversion/refinement/before", "error", ""),
        ("refined: error after", "conversion/refinement/after", "error", ""),
        ("refined: seconds", "conversion/refinement/seconds", "dims", ""),
    ]
    notes = "".join(f"<li>{escape(note)}</li>" for note in about["notes"])
    notes += "".join(
        f"<li>left as it was: <code>{escape(one['path'])}</code> ({escape('; '.join(one['reasons']))})</li>"
        for one in about["left"]
    )
    settings = [(name, f"conversion/settings/{name}", "json", "") for name in about["settings"]]
    text = listing(facts, "The model", rows)
    if about["refinement"] is not None:
        text += (
            '<p class="soft">The errors of refinement are of the output of the model, on inputs held back from it: '
            "squared differences as a share of the original's squares; of logits of tokens, mean KL divergence.</p>"
        )
    if settings:
        shown = listing(facts, "Settings of the conversion", settings)
        text += f"<details><summary>Settings of the conversion</summary>{shown}</details>"
    return text + (f"<ul>{notes}</ul>" if notes else "")


def _fidelity(facts: Mapping[str, Any]) -> str:
    rows = [
        ("mean-pooled cosine", "fidelity/pooled_cosine", "cosine", "of outputs averaged over an input's positions"),
        ("mean cosine", "fidelity/mean_cosine", "cosine", "of the outputs at each position"),
        ("least cosine", "fidelity/min_cosine", "cosine", "at the position that moved most"),
        ("same largest logit", "fidelity/same_top", "share", "share of positions whose answer is the same"),
        ("KL divergence", "fidelity/kl", "error", "of the softmax of the logits, in nats, mean over positions"),
        ("relative difference", "fidelity/relative", "error", "norm of the difference over that of the outputs"),
        ("largest difference", "fidelity/max_abs", "error", "of any two numbers"),
        ("positions", "fidelity/positions", "count", "compared: tokens, patches, or whole inputs"),
    ]
    what, count = number(facts, "fidelity/about", "text"), number(facts, "fidelity/inputs", "count")
    output = number(facts, "fidelity/output", "text", "code")
    return (
        f"<p>How far the outputs ({output}) of the converted model are from the original's, on {count} {what}.</p>"
        + listing(facts, "Converted against original", rows)
    )


def _layers(facts: Mapping[str, Any], figures: Mapping[str, str]) -> str:
    columns = [
        Column("layer", "layer", "count"),
        Column("heads", "heads", "count"),
        Column("heads x size", "full_dim", "count"),
        Column("shared", "shared_dim", "count"),
        Column("per head", "dims_per_head", "count"),
        Column("mean", "effective_dims/mean", "dims", "a head uses"),
        Column("least", "effective_dims/least", "dims", "a head uses"),
        Column("most", "effective_dims/most", "dims", "a head uses"),
        Column("error", "error", "error"),
        Column("unshared", "unshared_error", "error"),
        Column("sweeps", "iterations", "count"),
        Column("path", "path", "path"),
    ]
    caption = (
        "Error: of the query/key products, relative, before any refinement. Unshared: if every head were cut down for "
        "itself. A head uses: how many of the shared dimensions, effectively"
    )
    rows = [f"layers/{place}" for place in range(len(facts["layers"]))]
    return _figures(figures, "errors", "sizes") + table(facts, caption, rows, columns)


def _spectra(facts: Mapping[str, Any], figures: Mapping[str, str]) -> str:
    names = {"head": "a head's product", "query": "all queries", "key": "all keys", "product": "sum of products"}
    columns = [Column("layer", "layer", "count")]
    for role, name in names.items():
        kind = "dims" if role == "head" else "count"
        columns += [Column(when, f"{when}/{role}", kind, name) for when in ("before", "after")]
    columns.append(Column("path", "path", "path"))
    rows = [f"spectra/layers/{place}" for place in range(len(facts["spectra"]["layers"]))]
    share = number(facts, "spectra/share", "share")
    text = (
        "<p>How many principal components the heads' query and key matrices and their products need: the share of the "
        f"squared singular values that the first components hold. The table says how many hold {share} of them.</p>"
    )
    if facts["spectra"]["curves"]["before"] is None:
        text += '<p class="soft">Of the converted model alone: the original could not be opened.</p>'
    caption = "Components needed, layer by layer; a head's: mean over heads"
    return text + _figures(figures, "spectra-heads", "spectra-all") + table(facts, caption, rows, columns)


def _parameters(facts: Mapping[str, Any]) -> str:
    columns = [
        Column("parameters of", "what"), Column("before", "before", "count"), Column("after", "after", "count"),
        Column("change", "ratio", "change"),
    ]  # fmt: skip
    rows = [f"parameters/{place}" for place in range(len(facts["parameters"]))]
    text = table(facts, "Parameters", rows, columns)
    if "cost" not in facts:
        return text
    columns[0] = Column("tokens", "tokens", "count")
    rows = [f"cost/flops/{place}" for place in range(len(facts["cost"]["flops"]))]
    caption = "Operations of queries, keys and scores, by formula: one is a multiplication with its addition"
    break_even = number(facts, "cost/break_even", "text")
    cache = [
        (name, f"cost/cache_bytes/{when}", "bytes", "") for name, when in (("before", "before"), ("after", "after"))
    ]
    cache.append(("change", "cost/cache_bytes/ratio", "change", ""))
    return (
        text + table(facts, caption, rows, columns) + f"<p>By this count sharing is {break_even}.</p>"
        + listing(facts, "Cache of keys, of one token, were every converted layer to keep them", cache)
    )  # fmt: skip


def _speed(facts: Mapping[str, Any]) -> str:
    columns = [
        Column("inputs", "inputs", "count"), Column("size of one", "size", "name"),
        *(
            Column(label, f"{when}{place}", "ms", group)
            for when, group in (("before", "original"), ("after", "converted"))
            for label, place in (("1st quartile", "_quartiles/0"), ("median", ""), ("3rd quartile", "_quartiles/1"))
        ),
        Column("change", "ratio", "change"),
    ]  # fmt: skip
    device, dtype = number(facts, "speed/device", "text"), number(facts, "speed/dtype", "text")
    rows = [f"speed/rows/{place}" for place in range(len(facts["speed"]["rows"]))]
    return (
        f"<p>Time of one pass on {device}, {dtype}, without gradients; the two models in turn. Measured for a second "
        "or two: enough to tell a large difference, not a small one.</p>"
        + table(facts, "Time of one pass", rows, columns)
    )


def _provenance(facts: Mapping[str, Any]) -> str:
    columns = [Column("", "item", "name"), Column("conversion", "conversion"), Column("this report", "report")]
    rows = [f"provenance/{place}" for place in range(len(facts["provenance"]))]
    return table(facts, "Versions and places", rows, columns)


def _left_out(facts: Mapping[str, Any]) -> str:
    if not facts["left_out"]:
        return ""
    by_reason: dict[str, list[str]] = {}
    for one in facts["left_out"]:
        by_reason.setdefault(one["reason"], []).append(_TITLES.get(one["part"], one["part"].capitalize()))
    lines = "".join(
        f"<li><b>{escape(', '.join(parts))}</b>: {escape(reason)}</li>" for reason, parts in by_reason.items()
    )
    return f'<section id="left-out"><h2>Left out</h2><ul>{lines}</ul></section>'


def _figures(figures: Mapping[str, str], *names: str) -> str:
    shown = "".join(
        f"<figure>{figures[name]}<figcaption>{_CAPTIONS[name]}</figcaption></figure>"
        for name in names
        if name in figures
    )
    return f'<div class="figures">{shown}</div>' if shown else ""


def to_json(facts: Mapping[str, Any]) -> str:
    """The facts as JSON: a line for every list of numbers, however long, and for everything else one of its own."""
    return _lines(facts, "") + "\n"


def _lines(value: Any, indent: str) -> str:
    """JSON whose innermost lists stay on one line."""
    inner = indent + " "
    if isinstance(value, Mapping) and value:
        body = ",\n".join(f"{inner}{json.dumps(str(name))}: {_lines(one, inner)}" for name, one in value.items())
        return f"{{\n{body}\n{indent}}}"
    if isinstance(value, list) and any(isinstance(one, list | Mapping) for one in value):
        return "[\n" + ",\n".join(inner + _lines(one, inner) for one in value) + f"\n{indent}]"
    return json.dumps(value, allow_nan=False)
