"""Run the cells of tour.ipynb in order, and keep what they print and draw in the notebook.

    python examples/run_tour.py

No Jupyter is needed for that. Files that the cells write go to a temporary directory.
"""

import base64
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).resolve().parent / "tour.ipynb"
WIDTH = 1100
"""Pixels of pictures that are kept, at most: the notebook should stay small."""


def read_cells() -> dict[str, Any]:
    """The notebook as its JSON says."""
    notebook: dict[str, Any] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return notebook


def run_cells(notebook: dict[str, Any]) -> dict[str, Any]:
    """Run all code cells in the current directory and put their outputs in; returns the names they leave."""
    pictures: list[Any] = []
    names: dict[str, Any] = {"__name__": "__main__", "display": pictures.append}
    count = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        count += 1
        pictures.clear()
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, cell {count}", "exec"), names)
        cell["execution_count"] = count
        cell["outputs"] = [_stream(printed.getvalue())] if printed.getvalue() else []
        cell["outputs"] += [_picture(image) for image in pictures]
    return names


def write_cells(notebook: dict[str, Any]) -> None:
    """Write the notebook as Jupyter does."""
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _stream(text: str) -> dict[str, Any]:
    return {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}


def _picture(image: Any) -> dict[str, Any]:
    from PIL.Image import Quantize  # here: what draws has it

    small = image.convert("RGB")
    small.thumbnail((WIDTH, WIDTH))
    data = io.BytesIO()
    small.quantize(256, method=Quantize.FASTOCTREE).save(data, format="PNG", optimize=True)
    encoded = base64.b64encode(data.getvalue()).decode()
    return {"data": {"image/png": encoded}, "metadata": {}, "output_type": "display_data"}


def main() -> None:
    """Entry point."""
    notebook = read_cells()
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            run_cells(notebook)
        finally:
            os.chdir(before)
    write_cells(notebook)
    print(f"ran {NOTEBOOK}", file=sys.stderr)


if __name__ == "__main__":
    main()
