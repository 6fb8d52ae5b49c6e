"""What the processor can do, as far as tests depend on it, and how a narrower one looks.

As a program, it runs a command as a processor with AVX2 and without AVX-512 would run it::

    python tests/support/processor.py make suite

The libraries that choose code by the processor are told to choose as they would there. Their words for it differ, and NumPy refuses to switch off
what it has not found, so its list is made from what this processor has.
"""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest

AVX2 = {
    "OPENBLAS_CORETYPE": "Haswell",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": "+avx,+avx2,+bmi,+bmi2,+cx16,+f16c,+fma,+fxsr,+lzcnt,+mmx,+movbe,+popcnt,+sahf,"
    "+sse,+sse2,+sse3,+sse4.1,+sse4.2,+ssse3,+xsave",
}


def wide_features() -> list[str]:
    """NumPy's names of the AVX-512 groups that this processor has and that are not switched off."""
    found = np.show_config(mode="dicts")["SIMD Extensions"]["found"]  # type: ignore[index]
    return [name for name in found if name.startswith("AVX512") or name == "X86_V4"]


needs_avx512 = pytest.mark.skipif(not wide_features(), reason="the processor has no AVX-512, or it is switched off")


def main() -> None:
    """Run the command that the arguments are, without AVX-512."""
    environment = {**os.environ, **AVX2}
    if features := wide_features():
        environment["NPY_DISABLE_CPU_FEATURES"] = " ".join(features)
    os.execvpe(sys.argv[1], sys.argv[1:], environment)


if __name__ == "__main__":
    main()
