"""Compilation of the CUDA sources by NVRTC, at first use, once per element type, architecture and compiler, with a cache on disk.

A file of the cache is named by a hash of everything it depends on, and moved into place when complete, so a wrong or partial file is never loaded.
If the cache is not writable, each run compiles for itself, which takes some seconds.
"""

from __future__ import annotations

import re
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from scheduler.storage import replace_file, user_cache

from .launch import SOURCES

_INCLUDE: Final = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)


class KernelBuildError(RuntimeError):
    """A source that does not compile for this GPU, or a kernel that cannot run on it; the message is one sentence."""


def default_directory() -> Path:
    """Return the directory of compiled sources."""
    return user_cache() / "cuda"


_refused: dict[str, str] = {}
"""Messages of sources that do not compile, by the key of their code: without them each of the tasks that still fail would take a compilation."""


def source_text(name: str) -> str:
    """Return a source with its headers inserted, so that the compiler needs no files."""
    text = (SOURCES / f"{name}.cu").read_text(encoding="utf-8")
    return _INCLUDE.sub(lambda found: (SOURCES / found[1]).read_text(encoding="utf-8").replace("#pragma once", ""), text)


def target_of(capability: int, supported: list[int]) -> tuple[str, bool]:
    """Return the name of the architecture to compile for, and whether the result is machine code or code that the driver translates.

    Args:
        capability: compute capability of the GPU, such as 90.
        supported: compute capabilities that the compiler supports.

    Raises:
        KernelBuildError: the GPU is older than all of `supported`.
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
    """Return the code of a source for a GPU, from the cache or compiled now.

    Args:
        name: name of the source.
        element: one of the values of `launch.ELEMENTS`.
        capability: compute capability of the GPU.
        directory: directory of the cache; None for `default_directory()`.
        compiler: module with NVRTC's interface; None for CuPy's.

    Raises:
        KernelBuildError: the source does not compile.
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
    if key in _refused:
        raise KernelBuildError(_refused[key])
    try:
        code = _compile(compiler, text, name, element, architecture, is_binary)
    except KernelBuildError as error:
        _refused[key] = str(error)
        raise
    replace_file(path, code)
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
