"""The Cholesky example gives numpy's factor."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "cholesky.py"


@pytest.mark.parametrize(
    "flags", ["--size 130 --tile 32 --workers 2", "--size 64 --tile 64 --workers 1", "--size 97 --tile 20 --workers 1 --sim-gpus 2"]
)
def test_factor_equals_numpys(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Ragged tiles, one tile, simulated devices: equal to rounding."""
    assert runpy.run_path(str(EXAMPLE))["main"](flags.split()) < 1e-13
    assert "error" in capsys.readouterr().out


def test_bad_sizes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A tile of no rows names the flag and both values."""
    with pytest.raises(SystemExit):
        runpy.run_path(str(EXAMPLE))["main"](["--tile", "0"])
    assert "--size and --tile must be positive, got 1024 and 0" in capsys.readouterr().err
