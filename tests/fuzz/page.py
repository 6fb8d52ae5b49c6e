"""Write docs/results/hostile_inputs.md and benchmarks/results/hostile_inputs.csv from the table of hostile inputs."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from support.hostile_inputs import listing, page

    (ROOT / "docs" / "results" / "hostile_inputs.md").write_text(page(), encoding="utf-8")
    (ROOT / "benchmarks" / "results" / "hostile_inputs.csv").write_text(listing(), encoding="utf-8")
