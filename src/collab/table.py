"""Plain text tables, so that reports print without any library."""

from collections.abc import Sequence


def format_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as their widest cell, numbers to the right, a rule under the header."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(row[column]) for row in [list(header), *cells]) for column in range(len(header))]
    numeric = [bool(rows) and all(isinstance(row[i], int | float) for row in rows) for i in range(len(header))]
    lines = [list(header), ["-" * width for width in widths], *cells]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in lines
    )


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1e-3 or abs(value) >= 1e4 else f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
