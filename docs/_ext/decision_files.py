"""The dated decisions: files `YYYY-MM-title.md` in `docs/decisions`, each with its title, a line with the date and the area, and three sections.

The sections are Context, Decision and Consequence. As a program: exit code 1 and the reason, if a file has another shape.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "decisions"
SHAPE = re.compile(
    r"# (?P<title>[^\n]+)\n\n(?P<date>\d{4}-\d{2}(?:-\d{2})?) · (?P<area>[a-z ]+)\n\n"
    r"## Context\n\n.+?\n\n## Decision\n\n.+?\n\n## Consequence\n\n.+",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Decision:
    """One file of the folder."""

    path: Path
    title: str
    date: str
    area: str


def read_all(folder: Path = FOLDER) -> list[Decision]:
    """All decisions, newest first, those of one date by name.

    Raises:
        ValueError: a file has another shape, or a name that says another month.
    """
    found = []
    for path in sorted(folder.glob("*.md")):
        if path.name == "index.md":
            continue
        shape = SHAPE.fullmatch(path.read_text())
        if shape is None or path.name[:7] != shape["date"][:7]:
            raise ValueError(f"{path.name} must be a title, 'DATE · area', and Context, Decision, Consequence; its name must begin with the month")
        found.append(Decision(path, shape["title"], shape["date"], shape["area"]))
    return sorted(found, key=lambda each: each.date, reverse=True)


def main() -> None:
    """Read all files; two decisions of one title are an error too."""
    titles = [each.title for each in read_all()]
    if not titles or len(set(titles)) < len(titles):
        sys.exit(f"{FOLDER} must hold decisions, each with a title of its own")


if __name__ == "__main__":
    main()
