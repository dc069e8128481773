"""Numbers and tables of a report's page, each with the place in the facts that it shows."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any

NOTHING = "\N{EN DASH}"
"""What is written where there is no value."""

MINUS = "\N{MINUS SIGN}"


def _change(ratio: float) -> str:
    """What became of a whole: 0.75 of it is a quarter less."""
    percent = f"{100 * (ratio - 1):+.1f}%"
    return "±0%" if percent in ("+0.0%", "-0.0%") else percent.replace("-", MINUS)


def _span(values: Sequence[int]) -> str:
    return f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,} to {values[-1]:,}"


def _cosine(value: float) -> str:
    return f"{value:.6f}" if value > 0.9995 else f"{value:.4f}"


def _small(value: float) -> str:
    return f"{value:.2e}" if 0 < abs(value) < 1e-3 else f"{value:.4f}"


_FORMATS: dict[str, Callable[[Any], str]] = {
    "text": str,
    "name": str,
    "path": str,
    "json": json.dumps,
    "count": lambda value: f"{value:,}",
    "span": _span,
    "bytes": lambda value: f"{value:,} B",
    "dims": lambda value: f"{value:.1f}",
    "change": _change,
    "share": lambda value: f"{100 * value:.1f}%",
    "cosine": _cosine,
    "error": _small,
    "ms": lambda value: f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f} ms",
}
"""Kinds of values and how they are written."""

_WORDS = ("text", "name", "path", "json")


def resolve(facts: Any, place: str) -> Any:
    """The value at a place such as "layers/0/error"; None if there is no such place."""
    for step in place.split("/"):
        if isinstance(facts, list):
            facts = facts[int(step)] if int(step) < len(facts) else None
        else:
            facts = facts.get(step) if isinstance(facts, Mapping) else None
    return facts


def written(value: Any, kind: str) -> str:
    """A value as it is shown, not yet escaped."""
    return NOTHING if value is None else _FORMATS[kind](value)


def number(facts: Mapping[str, Any], place: str, kind: str, tag: str = "span", more: str = "") -> str:
    """An element that shows the value at a place; pointing at a number shows all of its digits."""
    value = resolve(facts, place)
    classes = " ".join(filter(None, (_class(kind), more)))
    whole = "" if kind in _WORDS or value is None else f' title="{escape(json.dumps(value))}"'
    at = f'class="{classes}" data-at="{escape(place)}"'.removeprefix('class="" ')
    return f"<{tag} {at}{whole}>{escape(written(value, kind))}</{tag}>"


def _class(kind: str) -> str:
    return {"text": "wrap", "json": "wrap", "name": "name", "path": "path"}.get(kind, "number")


@dataclass(frozen=True)
class Column:
    """A column of a table: its heading, where in a row's facts its values are, their kind, and a heading above."""

    label: str
    place: str
    kind: str = "text"
    group: str = ""


def table(facts: Mapping[str, Any], caption: str, rows: Sequence[str], columns: Sequence[Column]) -> str:
    """A table with a row for each of these places; a column without a single value is not shown."""
    kept = [
        column for column in columns if any(resolve(facts, f"{row}/{column.place}") is not None for row in rows)
    ]  # fmt: skip
    lines = "".join(
        f"<tr>{''.join(number(facts, f'{row}/{column.place}', column.kind, 'td') for column in kept)}</tr>"
        for row in rows
    )
    return _scrolling(caption, f"<thead>{_head(kept)}</thead><tbody>{lines}</tbody>")


def _head(columns: Sequence[Column]) -> str:
    """Headings, in two rows where columns belong together."""
    if not any(column.group for column in columns):
        return f"<tr>{''.join(_heading(column, '') for column in columns)}</tr>"
    above, below = [], []
    for group, members in groupby(columns, key=lambda column: column.group):
        own = list(members)
        if group:
            above.append(f'<th scope="colgroup" class="group" colspan="{len(own)}">{escape(group)}</th>')
            below += [_heading(column, "") for column in own]
        else:
            above += [_heading(column, ' rowspan="2"') for column in own]
    return f"<tr>{''.join(above)}</tr><tr>{''.join(below)}</tr>"


def _heading(column: Column, more: str) -> str:
    kind = "" if column.kind in _WORDS else ' class="number"'
    return f'<th scope="col"{kind}{more}>{escape(column.label)}</th>'


def listing(facts: Mapping[str, Any], caption: str, rows: Sequence[tuple[str, str, str, str]]) -> str:
    """A table of single values: name, place, kind and what it means, if that is to be said; no row without a value."""
    known = [row for row in rows if resolve(facts, row[1]) is not None]
    has_meaning = any(meaning for *_, meaning in known)
    lines = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{number(facts, place, kind, "td")}'
        + (f'<td class="wrap soft">{escape(meaning)}</td>' if has_meaning else "")
        + "</tr>"
        for name, place, kind, meaning in known
    )
    # Numbers stand below each other at their ends, unless there are words among them.
    has_words = any(kind in _WORDS for _, _, kind, _ in known)
    return _scrolling(caption, f"<tbody>{lines}</tbody>", "mixed" if has_words else "")


def _scrolling(caption: str, inner: str, style: str = "") -> str:
    """A table in a box of its own, which scrolls where it is too wide, by keyboard as well."""
    label = escape(caption)
    named = f' class="{style}"' if style else ""
    return (
        f'<p class="caption">{label}</p><div class="scroll" role="region" tabindex="0" aria-label="{label}">'
        f'<table{named} aria-label="{label}">{inner}</table></div>'
    )
