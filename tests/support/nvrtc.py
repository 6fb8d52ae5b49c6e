"""NVRTC from its wheel, which needs no GPU: compiles a kernel source for an architecture, and says what is wrong with it."""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache
from pathlib import Path

from tiles.kernels.cuda.compiling import source_text


@cache
def library() -> ctypes.CDLL | None:
    """The library, if the wheel is installed."""
    found = importlib.util.find_spec("nvidia")
    for folder in (found and found.submodule_search_locations) or ():
        for path in sorted(Path(folder).glob("*/lib/libnvrtc.so.*")):
            return ctypes.CDLL(str(path))
    return None


def compile_source(name: str, element: str, architecture: int) -> tuple[bool, str]:
    """Whether a source compiles for ``sm_<architecture>``, and the compiler's log, which says of each kernel how many registers a thread takes."""
    nvrtc = library()
    assert nvrtc is not None
    program = ctypes.c_void_p()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source_text(name).encode(), f"{name}.cu".encode(), 0, None, None) == 0
    flags = [f"-arch=sm_{architecture}".encode(), f"-DELEMENT={element}".encode(), b"-std=c++17", b"--ptxas-options=-v"]
    status = nvrtc.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return status == 0, log.value.decode()
