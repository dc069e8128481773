"""How the API page reads docstrings: `Example:` as code, and `a, b: text` as two attributes of one text."""

import re
from typing import Any

from griffe import Extension, Object

_SEVERAL = re.compile(r"^    (\w+(?:, \w+)+): (.+(?:\n {8,}.+)*)", re.MULTILINE)


class OwnStyle(Extension):
    """Brings docstrings into the form that the reader of Google's style knows."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Bring one object's docstring into that form."""
        if obj.docstring:
            text = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = _SEVERAL.sub(_one_each, text)


def _one_each(found: re.Match[str]) -> str:
    return "\n".join(f"    {name}: {found[2]}" for name in found[1].split(", "))
