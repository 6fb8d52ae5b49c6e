"""The notebooks run from top to bottom, and are committed as they were executed: small, with outputs, and with no path of anybody's machine."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
MOST_NBYTES = 100_000
SECONDS = 270


def code_cells(path: Path) -> list[dict[str, Any]]:
    """The cells of a notebook that hold code."""
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def test_there_are_four() -> None:
    """All of them are tested and shown: the site's page names each."""
    page = (ROOT / "docs" / "notebooks.md").read_text()
    assert len(NOTEBOOKS) == 4
    assert [path.stem for path in NOTEBOOKS if f"notebooks/{path.stem}" not in page] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_as_executed(path: Path) -> None:
    """Cells were executed in order, none failed, some show something, and nothing in them names a home or a temporary directory."""
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert outputs
    assert not any(output["output_type"] == "error" or output.get("name") == "stderr" for output in outputs)
    assert path.stat().st_size < MOST_NBYTES
    assert re.findall(r"/(?:home|root|tmp|work|usr)/[\w./-]+", path.read_text()) == []


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh kernel runs every cell; the notebook's own assertions hold. What can be compared bit by bit is compared inside it."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
