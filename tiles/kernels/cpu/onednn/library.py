"""The library oneDNN: its C interface (version 3) through ctypes, and its fp32 product; `operations` has the others.

The library is loaded at first use. `has_bf16_products` is False, and `bf16_products` says why, if it is not installed, was built for another
interface or thread pool, or the processor has no bf16 instructions (AVX512-BF16 or AMX); kernels then get fp32 copies. `sgemm` needs AVX-512 only.

Each call uses one thread: parallelism comes from tasks. The number of threads is set for each calling thread before its first call, because blocking,
and so the order of sums, may depend on it. Same shapes and strides give the same bits on every thread.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from typing import Any, Final

_PACKAGE: Final = "onednn-cpu-gomp"
_FILE: Final = "libdnnl.so.3"
_CPU: Final = 1  # dnnl_engine_kind_t
_OPENMP: Final = 2  # dnnl_version_t.cpu_runtime; 1 is sequential
_ISA_AVX512: Final = 0x27  # dnnl_cpu_isa_avx512_core
_ISA_BF16: Final = 0xE7  # dnnl_cpu_isa_avx512_core_bf16; processors with AMX have its bits too


class _Version(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
        ("patch", ctypes.c_int),
        ("hash", ctypes.c_char_p),
        ("cpu_runtime", ctypes.c_uint),
        ("gpu_runtime", ctypes.c_uint),
    )


class OneDnnError(RuntimeError):
    """A failed call of oneDNN; the message names the call."""


class Library:
    """The loaded library: functions called through `_quick` keep the GIL, `execute` releases it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._quick = ctypes.PyDLL(path)
        self._quick.dnnl_version.restype = ctypes.POINTER(_Version)
        self.version: _Version = self._quick.dnnl_version().contents
        self.execute = ctypes.CDLL(path).dnnl_primitive_execute
        self.execute.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
        self.set_address = self._quick.dnnl_memory_set_data_handle
        self.set_address.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self.wait = self._quick.dnnl_stream_wait
        self.isa = int(self._quick.dnnl_get_effective_cpu_isa())
        self.engine = ctypes.c_void_p()

    def make(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        """Return the object that the function `name` creates."""
        created = ctypes.c_void_p()
        self.call(name, ctypes.byref(created), *arguments)
        return created

    def call(self, name: str, *arguments: Any) -> None:
        """Call the function `name`.

        Raises:
            OneDnnError: the call failed.
        """
        self.check(getattr(self._quick, name)(*arguments), name)

    def check(self, status: int, name: str) -> None:
        """Raise `OneDnnError` if a call failed."""
        if status:
            raise OneDnnError(f"{name} of {self.path} failed with status {status}; set NNTASK_ONEDNN=off to do without it")

    def use_one_thread(self) -> None:
        """Limit oneDNN to the calling thread, for all calls of this thread from now on."""
        if self.version.cpu_runtime == _OPENMP:
            self._quick.omp_set_num_threads(1)  # found in libgomp or libiomp5, which oneDNN has loaded

    def text(self) -> str:
        """Return the version and the file of the library."""
        return f"oneDNN {self.version.major}.{self.version.minor}.{self.version.patch} ({self.path})"


def _candidates() -> list[str]:
    """Return the files to try, best first: the installed package `onednn-cpu-gomp`, then the system loader's (conda-forge, Debian's libdnnl3)."""
    from importlib import metadata

    try:
        files = metadata.files(_PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    return [*(str(file.locate()) for file in files if file.name == _FILE), _FILE]


@cache
def _load() -> tuple[Library | None, str]:
    """Return the library and its description, or None and the reason why there is none."""
    chosen = os.environ.get("NNTASK_ONEDNN", "")
    if chosen == "off":
        return None, "switched off by NNTASK_ONEDNN"
    reason = "oneDNN is not installed; pip install -e '.[onednn]'"
    for path in [chosen] if chosen else _candidates():
        try:
            library = Library(path)
        except (OSError, AttributeError) as error:
            if chosen or path != _FILE:
                reason = f"{path} cannot be used: {error}"
            continue
        version = library.version
        if version.major != 3 or version.cpu_runtime not in (1, _OPENMP):
            reason = f"{library.text()} is not version 3 built for OpenMP or one thread"
        else:
            try:
                library.engine = library.make("dnnl_engine_create", _CPU, ctypes.c_size_t(0))
            except OneDnnError as error:
                reason = str(error)
                continue
            return library, library.text()
    return None, reason


@cache
def has_bf16_products() -> bool:
    """Return whether 16-bit products can be computed without fp32 copies."""
    library = _load()[0]
    return library is not None and library.isa & _ISA_BF16 == _ISA_BF16


def name() -> str:
    """Return "oneDNN" and its version; the empty string without the library."""
    library = _load()[0]
    return library.text().partition(" (")[0] if library is not None else ""


def bf16_products() -> str:
    """Return version and file of the library, or why it does not compute 16-bit products."""
    library, text = _load()
    return text if library is None or has_bf16_products() else "the processor has no bf16 instructions"


@cache
def sgemm() -> Callable[..., int] | None:
    """Return oneDNN's fp32 product, (transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc) over rows, for threads that have called `join`.

    Return None without the library, or if the processor has no AVX-512.
    """
    library = _load()[0]
    if library is None or library.isa & _ISA_AVX512 != _ISA_AVX512:
        return None
    function: Callable[..., int] = ctypes.CDLL(library.path).dnnl_sgemm
    size, pointer, scalar = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float
    sizes, pair = [size] * 3, [pointer, size]
    function.argtypes = [ctypes.c_char] * 2 + sizes + [scalar, *pair, *pair, scalar, *pair]  # type: ignore[attr-defined]
    return function


def loaded() -> Library:
    """Return the library.

    Raises:
        OneDnnError: it cannot be used.
    """
    library, reason = _load()
    if library is None:
        raise OneDnnError(f"{reason}; call has_bf16_products() or sgemm() first")
    return library


def join() -> None:
    """Limit oneDNN to the calling thread, for all calls of this thread from now on."""
    loaded().use_one_thread()
