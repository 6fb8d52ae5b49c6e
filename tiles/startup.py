"""What must happen before NumPy is imported: let its OpenBLAS use AVX-512 on processors that have it but that it does not recognise.

OpenBLAS picks kernels by the processor's name; AMD processors newer than the library, and virtual ones, fall back to AVX2. Measured here on such a
machine: sgemm 119 GF/s per core as picked, 227 with AVX-512 kernels. Once NumPy is loaded the choice is made, so this module imports nothing.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_NEEDED = {"avx512f", "avx512dq", "avx512bw", "avx512vl"}


def prefer_avx512() -> None:
    """Ask OpenBLAS for its AVX-512 kernels where they run and it might miss them; a user's OPENBLAS_CORETYPE is left alone."""
    if "OPENBLAS_CORETYPE" in os.environ or "numpy" in sys.modules:
        return
    try:
        description = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    except OSError:
        return
    fields = dict(line.split(":", 1) for line in description.splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    if fields.get("vendor_id") == "AuthenticAMD" and set(fields.get("flags", "").split()) >= _NEEDED:
        os.environ["OPENBLAS_CORETYPE"] = "SkylakeX"
