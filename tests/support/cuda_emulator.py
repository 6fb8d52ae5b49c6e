"""A CUDA device on the CPU: kernel sources compiled by g++ with `emulation.hpp`, products by NumPy. Slow, exact, for tests without a GPU."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from support.kernel_declarations import declared_in

from scheduler.testing import FakeGpu, FakeStream
from tiles.kernels.cuda.array import DeviceArray
from tiles.kernels.cuda.compiling import source_text
from tiles.kernels.cuda.launch import ARRIVALS_NBYTES, PARTIALS_NBYTES, SOURCES, Arguments, Product, StreamPointer, use
from tiles.kernels.cuda.library_attention import WholeShape
from tiles.kernels.reference.elementwise import slope

COMPILER = shutil.which("g++")
_running = threading.Lock()
"""Of a kernel: a library has one set of threads, whoever loads it."""
_building = threading.Lock()
"""Of a library: devices of one process need the same ones."""

EMULATION = Path(__file__).with_name("emulation.hpp")


def check_arguments(source: str, element: str, kernel: str, arguments: Arguments) -> None:
    """Compare how arguments are packed with what a kernel declares.

    Raises:
        AssertionError: there are more or fewer, or one is of another kind.
    """
    packed = re.findall(r"\d+s|f4x|[Qqd]", arguments._struct.format)
    formats = {"float": "f4x", "double": "d", "u32": "Q", "u64": "Q", "int": "q", "long long": "q"}
    wanted = [
        "Q" if one.is_pointer else formats.get(one.kind, f"{one.parameter.nbytes}s")
        for one in declared_in(source, source_text(source), element)[kernel]
    ]
    assert packed == wanted, f"{kernel} declares {wanted}, and is started with {packed}"


def build_folder(base: Path) -> Path:
    """A folder in `base` for libraries of the sources as they are now."""
    digest = sha256(b"\0".join(path.read_bytes() for path in (*sorted(SOURCES.iterdir()), EMULATION) if path.is_file())).hexdigest()
    folder = base / digest[:16]
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class CompiledSources:
    """Kernel sources as libraries of the CPU.

    Args:
        folder: where they are built.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._libraries: dict[tuple[str, str], ctypes.CDLL] = {}

    def run(self, source: str, element: str, kernel: str, dimensions: Sequence[int], arguments: int) -> None:
        """Run a kernel.

        Args:
            dimensions: blocks along three axes, threads, bytes of shared memory, whether threads of a block run from the last to the first.
            arguments: address of the addresses of its arguments.
        """
        function = getattr(self.library(source, element), f"emulate_{kernel}")
        with _running:
            function((ctypes.c_int * 6)(*dimensions), ctypes.c_void_p(arguments))

    def library(self, source: str, element: str) -> ctypes.CDLL:
        """The library of a source for a type of elements, built if it is not there."""
        found = self._libraries.get((source, element))
        if found is None:
            path = self._folder / f"{source}_{element}.so"
            with _building:
                self._build(source, element, path)
            found = self._libraries[source, element] = ctypes.CDLL(str(path))
        return found

    @staticmethod
    def _build(source: str, element: str, path: Path) -> None:
        """Make the library of a source, unless it is there. Written aside, for other processes may be at it, too."""
        if not path.exists():
            flags = ["-O1", "-std=c++17", "-shared", "-fPIC", "-DEMULATED", f"-DELEMENT={element}", "-include", str(EMULATION)]
            command = [COMPILER or "g++", *flags, "-x", "c++", str(SOURCES / f"{source}.cu"), "-o"]
            own = path.with_suffix(f".{os.getpid()}")
            subprocess.run([*command, str(own)], check=True, capture_output=True, text=True)
            own.replace(path)


class Emulator(FakeGpu):
    """Answers `launch.Device` for kernels and `Gpu` for the scheduler; kernels and copies run late, and streams in an order chosen by chance.

    Args:
        folder: where libraries are built.

    Attributes:
        backwards: whether threads of a block run from the last to the first.
        has_epilogues: whether it has products with an epilogue.
    """

    def __init__(self, folder: Path, **more: Any) -> None:
        super().__init__("emulated", **more)
        self.backwards = False
        self.has_epilogues = True
        self._sources = CompiledSources(folder)
        self._partials, self._arrivals = np.empty(PARTIALS_NBYTES, np.uint8), np.zeros(ARRIVALS_NBYTES, np.uint8)

    def enter(self, stream: FakeStream) -> None:
        super().enter(stream)
        use(self)

    @property
    def partials(self) -> DeviceArray:
        return on_device(self._partials)

    @property
    def arrivals(self) -> DeviceArray:
        return on_device(self._arrivals)

    def start(self, source: str, element: str, kernel: str, grid: tuple[int, int, int], threads: int, shared: int, arguments: Arguments) -> None:
        check_arguments(source, element, kernel, arguments)
        self._sources.library(source, element)
        dimensions, kept = (*grid, threads, shared, int(self.backwards)), arguments.copy()
        self.later(lambda: self._sources.run(source, element, kernel, dimensions, kept.address))

    def gemm(self, *arrays: DeviceArray, **options: Any) -> None:
        self.later(lambda: self._multiply(*arrays, **options))

    def gemms(self, products: Sequence[Product], **options: Any) -> None:
        for product in products:
            self.gemm(*product, alpha=1.0, **options)

    def gemm_with_bias(self, a: DeviceArray, b: DeviceArray, bias: DeviceArray, out: DeviceArray, *, trans_b: bool) -> bool:
        if self.has_epilogues:
            self.later(lambda: self._multiply(a, b, out, trans_a=False, trans_b=trans_b, alpha=1.0, accumulate=False, bias=bias))
        return self.has_epilogues

    def gemm_with_gelu_slope(self, a: DeviceArray, b: DeviceArray, x: DeviceArray, out: DeviceArray, *, trans_b: bool) -> bool:
        if self.has_epilogues:
            self.later(lambda: self._multiply(a, b, out, trans_a=False, trans_b=trans_b, alpha=1.0, accumulate=False, gelu_of=x))
        return self.has_epilogues

    def whole_attention(self, shape: WholeShape, *tiles: DeviceArray) -> bool:
        return False

    def start_external(self, start: Callable[[StreamPointer], None]) -> None:
        self.later(lambda: start(StreamPointer(self.name, None, 0)))

    @staticmethod
    def _multiply(a, b, out, *, trans_a, trans_b, alpha, accumulate, stride_a=None, stride_out=None, bias=None, gelu_of=None):
        target, left, right = _matrix(out, stride_out), _matrix(a, stride_a).astype(np.float32), on_host(b).astype(np.float32)
        product = np.float32(alpha) * ((left.T if trans_a else left) @ (right.T if trans_b else right))
        product = product if bias is None else product + on_host(bias).astype(np.float32)
        product = product if gelu_of is None else product * slope(on_host(gelu_of).astype(np.float32), "gelu_new")
        target[...] = target.astype(np.float32) + product if accumulate else product


def _matrix(array: DeviceArray, stride: int | None) -> np.ndarray:
    """A matrix whose rows begin `stride` elements apart; None for its width."""
    (rows, width), distance = array.shape, stride or array.shape[1]
    flat = on_host(array.at(array.dtype, (rows - 1) * distance + width))
    return np.lib.stride_tricks.as_strided(flat, array.shape, (distance * array.dtype.itemsize, array.dtype.itemsize))


def on_device(array: np.ndarray) -> DeviceArray:
    """A view of host memory; the array must live on."""
    assert array.flags.c_contiguous
    return DeviceArray(array.ctypes.data, array.shape, array.dtype)


def on_host(array: DeviceArray) -> np.ndarray:
    """The same, back."""
    memory = (ctypes.c_char * array.nbytes).from_address(array.address)
    return np.ndarray(array.shape, array.dtype, buffer=memory)
