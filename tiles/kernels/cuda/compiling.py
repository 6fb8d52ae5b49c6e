"""Machine code of the sources, by NVRTC, kept between runs: compiled at first use, once per element type, architecture and compiler.

A file is named by a hash of everything it depends on and written aside, so a wrong or half one is never found. The cache is only a cache: where it
cannot be written, each run compiles for itself, which takes some seconds.
"""

from __future__ import annotations

import os
import re
import tempfile
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from scheduler.storage import user_cache

from .launch import SOURCES

_INCLUDE: Final = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)


class KernelBuildError(RuntimeError):
    """A source does not compile for this GPU; the message is one sentence."""


def default_directory() -> Path:
    """Where compiled sources are kept."""
    return user_cache() / "cuda"


def source_text(name: str) -> str:
    """A source with its headers in it, so that the compiler needs no file."""
    text = (SOURCES / f"{name}.cu").read_text(encoding="utf-8")
    return _INCLUDE.sub(lambda found: (SOURCES / found[1]).read_text(encoding="utf-8").replace("#pragma once", ""), text)


def target_of(capability: int, supported: list[int]) -> tuple[str, bool]:
    """What to compile for on a GPU: the name of an architecture, and whether machine code comes out, or code that the driver translates.

    Args:
        capability: of the GPU, such as 90.
        supported: by the compiler.

    Raises:
        KernelBuildError: the compiler knows nothing so old.
    """
    if capability in supported:
        return f"sm_{capability}", True
    older = [number for number in supported if number < capability]
    if not older:
        raise KernelBuildError(
            f"the CUDA compiler here builds for {min(supported)} and newer, and the GPU has compute capability {capability}; install the CuPy of an "
            "older CUDA, or compute on the CPU with --ngpu 0"
        )
    return f"compute_{max(older)}", False


def build(name: str, element: str, capability: int, directory: Path | None = None, compiler: Any = None) -> bytes:
    """Code of a source for a GPU, out of the cache or compiled now.

    Args:
        name: of the source.
        element: one of the values of `launch.ELEMENTS`.
        capability: of the GPU.
        directory: of the cache; `default_directory()` unless given.
        compiler: CuPy's NVRTC, unless given.

    Raises:
        KernelBuildError: it does not compile.
    """
    if compiler is None:
        from cupy.cuda import nvrtc

        compiler = nvrtc
    architecture, is_binary = target_of(capability, list(compiler.getSupportedArchs()))
    text = source_text(name)
    key = sha256("\0".join((text, element, architecture, str(compiler.getVersion()))).encode()).hexdigest()[:32]
    folder = default_directory() if directory is None else directory
    path = folder / f"{name}-{element}-{architecture}-{key}.{'cubin' if is_binary else 'ptx'}"
    with suppress(OSError):
        return path.read_bytes()
    code = _compile(compiler, text, name, element, architecture, is_binary)
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        handle, aside = tempfile.mkstemp(dir=folder)
        with os.fdopen(handle, "wb") as file:
            file.write(code)
        os.replace(aside, path)
    return code


def _compile(compiler: Any, text: str, name: str, element: str, architecture: str, is_binary: bool) -> bytes:
    program = compiler.createProgram(text, f"{name}.cu", (), ())
    try:
        compiler.compileProgram(program, (f"-arch={architecture}", f"-DELEMENT={element}", "-std=c++17"))
        code = compiler.getCUBIN(program) if is_binary else compiler.getPTX(program)
    except RuntimeError as error:
        lines = compiler.getProgramLog(program).splitlines()
        first = next((line.strip() for line in lines if "error" in line), str(error))
        raise KernelBuildError(
            f"the kernels of {name}.cu do not compile for {architecture} ({first}); report this with the version of CuPy, or compute on the CPU with "
            "--ngpu 0"
        ) from error
    finally:
        compiler.destroyProgram(program)
    return code if isinstance(code, bytes) else code.encode() + b"\0"
