"""One BLAS thread per worker, whatever the environment says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_kernels_use_one_blas_thread() -> None:
    """Parallelism comes from tasks, even where the environment asks BLAS for more threads."""
    count = "import threadpoolctl; print(*(info['num_threads'] for info in threadpoolctl.threadpool_info() if info['user_api'] == 'blas'))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "2"}
    found = []
    for start in ("import numpy", "import tiles.kernels.cpu"):
        done = subprocess.run([sys.executable, "-c", f"{start}; {count}"], env=environment, capture_output=True, text=True, check=True)
        found.append(done.stdout.split())
    assert found[0], "NumPy has no BLAS that threadpoolctl knows"
    assert set(found[1]) == {"1"}
