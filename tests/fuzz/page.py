"""Write docs/results/hostile_inputs.md from the table of hostile inputs."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from support.hostile_inputs import page

    (ROOT / "docs" / "results" / "hostile_inputs.md").write_text(page(), encoding="utf-8")
