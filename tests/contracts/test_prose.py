"""House English: phrases that a stranger stumbles over do not come back in docstrings, comments, strings and pages."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
from support.prose import findings

ROOT: Final = Path(__file__).resolve().parents[2]
SOURCES: Final = ("scheduler", "tiles", "nntask", "wrappers", "examples")
PAGES: Final = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
"""Pages at the root; each folder of `SOURCES`, `benchmarks` and `tests` may have a README.md, too."""


def files() -> list[Path]:
    """The modules and pages that people read."""
    modules = (path for folder in SOURCES for path in (ROOT / folder).rglob("*.py"))
    readmes = (path for folder in (*SOURCES, "benchmarks", "tests") for path in (ROOT / folder).glob("README.md"))
    return sorted([*modules, *readmes, *(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in PAGES)])


def test_phrases_of_house_english() -> None:
    """No file has a phrase to rewrite."""
    phrases = ((path.relative_to(ROOT), each) for path in files() for each in findings(path))
    lines = [f"{name}:{each.line}: {each.remedy}: {each.text}" for name, each in phrases]
    assert not lines, "write house English:\n" + "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ('def f():\n    """What it does."""\n', "a noun or an imperative first"),
        ('def f(a):\n    """Do.\n\n    Args:\n        a: of it, twice.\n    """\n', "a noun phrase of its own"),
        ("# the bytes behind it\n", "after, following"),
        ('raise ValueError(f"nobody has {n} of it")\n', "no caller, the user, the program that"),
        ("# made once again\n", "recompute, rebuild, write again"),
        ('def f():\n    """Return as many bytes as there are, and what to do."""\n', None),
        ("# moves along the axis\n", None),
    ],
)
def test_the_scanner(text: str, remedy: str | None, tmp_path: Path) -> None:
    """It finds a phrase of each kind, and lets good sentences pass."""
    (tmp_path / "module.py").write_text(text)
    assert [each.remedy for each in findings(tmp_path / "module.py")] == ([] if remedy is None else [remedy])
