"""The commands of `benchmarks/same_speed.py` start on either side."""

from __future__ import annotations

import importlib
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_steps_start_with_the_packages_of_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The script that times a step finds its helpers in this checkout, and the packages in the other one."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    script = importlib.import_module("same_speed")
    (tmp_path / "nntask").mkdir()
    (tmp_path / "nntask" / "__init__.py").write_text("raise SystemExit(7)")

    def code(checkout: Path, *arguments: str) -> int:
        side = script.side("a side", checkout, arguments)
        return subprocess.run(side.argv, env={**os.environ, **side.env}, capture_output=True, check=False).returncode

    assert code(ROOT, str(ROOT / "benchmarks" / "training.py"), "--help") == 0
    assert code(ROOT, "-c", "import nntask") == 0
    assert code(tmp_path, "-c", "import nntask") == 7
