"""Tables as lines of text: the first column is aligned left, the numbers in the others right."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows with equal numbers of cells as aligned lines, indented by two blanks."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *cells in rows:
        right = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("  ".join(["", name.ljust(widths[0]), *right]).rstrip())
    return lines
