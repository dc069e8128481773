"""What MkDocs does here beside its own: formulas become MathML, and files from outside docs/ become pages.

MathML is drawn by the browser itself: no script, no font, no network.
"""

import html
import json
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
GENERATED = {"changelog.md": "CHANGELOG.md", "tour.md": "examples/tour.ipynb"}
"""Page -> the file of the repository that it shows."""

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_files(files: Any, config: Any) -> None:
    """Add the pages that are made from files outside docs/."""
    for page, source in GENERATED.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=notebook_page(text) if page == "tour.md" else text))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Lead links to such files, which are right where the repository is read, to their pages."""
    for name, source in GENERATED.items():
        markdown = markdown.replace(f"](../{source})", f"]({name})")
    return markdown


def on_page_content(content: str, page: Any, config: Any, files: Any) -> str:
    """Turn formulas into MathML."""
    return _FORMULA.sub(_to_mathml, content)


def _to_mathml(found: re.Match[str]) -> str:
    display = "block" if found[1] == "div" else "inline"
    formula = convert(html.unescape(found[2]).strip(), display=display)
    return formula.replace("<mo>&#x02016;</mo>", '<mo stretchy="false">&#x02016;</mo>')  # bars of norms stay small


def notebook_page(text: str) -> str:
    """A notebook as Markdown: its text, its code, and what that printed and drew."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += [_output(output) for output in cell.get("outputs", [])]
    return "\n\n".join(parts) + "\n"


def _output(output: dict[str, Any]) -> str:
    if output["output_type"] == "stream":
        return f"```{{.text .output}}\n{''.join(output['text']).rstrip()}\n```"
    return f"![What the cell above draws](data:image/png;base64,{''.join(output['data']['image/png']).strip()})"
