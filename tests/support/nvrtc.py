"""NVRTC from its wheel, which needs no GPU: compiles a kernel source for an architecture, and says what is wrong with it."""

from __future__ import annotations

import ctypes
import importlib.util
import struct
from functools import cache
from pathlib import Path

from tiles.kernels.cuda.compiling import source_text


@cache
def library() -> ctypes.CDLL | None:
    """The library, if the wheel is installed."""
    found = importlib.util.find_spec("nvidia")
    for folder in (found and found.submodule_search_locations) or ():
        for path in sorted(Path(folder).glob("*/lib/libnvrtc.so.*")):
            for builtins in path.parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins))  # NVRTC opens it by its name alone, from a directory that only the loader's path names
            return ctypes.CDLL(str(path))
    return None


def compile_source(name: str, element: str, architecture: int) -> tuple[bool, str]:
    """Whether a source compiles for ``sm_<architecture>``, and the compiler's log, which says of each kernel how many registers a thread takes."""
    log, code = _compiled(name, source_text(name), element, architecture)
    return bool(code), log


@cache
def _compiled(name: str, text: str, element: str, architecture: int) -> tuple[str, bytes]:
    """The log of the compiler, and the code, which is empty if the source does not compile."""
    nvrtc = library()
    assert nvrtc is not None
    program = ctypes.c_void_p()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), f"{name}.cu".encode(), 0, None, None) == 0
    flags = [f"-arch=sm_{architecture}".encode(), f"-DELEMENT={element}".encode(), b"-std=c++17", b"--ptxas-options=-v"]
    status = nvrtc.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log, code = ctypes.create_string_buffer(size.value), b""
    nvrtc.nvrtcGetProgramLog(program, log)
    if status == 0:
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        image = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, image)
        code = image.raw
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return log.value.decode(), code


def machine_code(name: str, element: str, architecture: int, text: str = "") -> dict[str, bytes]:
    """The machine code of each kernel of a source, or of `text` in its place: the sections ``.text.<kernel>`` of an ELF file."""
    _, code = _compiled(name, text or source_text(name), element, architecture)
    (table,) = struct.unpack_from("<Q", code, 0x28)
    size, count, names = struct.unpack_from("<HHH", code, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", code, table + size * number) for number in range(count)]
    found = {}
    for at, _, _, _, start, length in sections:
        begin = sections[names][4] + at
        title = code[begin : code.index(b"\0", begin)].decode()
        if title.startswith(".text."):
            found[title.removeprefix(".text.")] = code[start : start + length]
    return found


def instructions(name: str, element: str, architecture: int) -> dict[str, list[int]]:
    """The operation codes of each kernel: the low 12 bits of each instruction of 16 bytes."""
    codes = machine_code(name, element, architecture)
    return {kernel: [low & 0xFFF for low, _ in struct.iter_unpack("<QQ", code)] for kernel, code in codes.items()}
