"""The libraries below our GPU code, on the CPU and strict: CuPy's modules, cuBLAS and the driver behind ctypes, NVRTC; kernels are those of
`cuda_emulator`.

`installed` puts them where our code imports them, so `CudaDevice`, `CupyGpu`, `Cublas` and `compiling` run as they are. What cuBLAS and ctypes refuse
is refused here: types of arguments that were not declared, enumerations, leading dimensions, alignment, a workspace that a stream has taken away, the
device of a handle. `fake_cuda.FakeCuda` does the same for runtime and driver.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.cuda_emulator import CompiledSources
from support.fake_cuda import CFunction, FakeCuda, KernelParameter
from support.fake_cuda_calls import CUDARuntimeError
from support.gpu_training import Training
from support.hazards import Access
from support.kernel_declarations import declared_in
from support.strict_cublas_lt import LibcublasLt, Refuses
from support.strict_nccl import StrictNccl

from nntask.hardware import gpus
from nntask.hardware.gpus import CudaCards
from nntask.models.gpt2 import GPT2Config
from nntask.tiling.model_tiling import ModelTiling
from scheduler.drivers import cuda_cupy
from tiles.kernels.cuda import device, epilogues, launch, products

BF16 = np.dtype(ml_dtypes.bfloat16)
ILLEGAL_ADDRESS = 700
_TYPES = {0: np.dtype(np.float32), 14: BF16}
"""cudaDataType."""


class SourceKernels:
    """`fake_cuda.Kernels` of our sources: an image is the name of a source, its type of elements and its text.

    Args:
        folder: where libraries are built.
    """

    def __init__(self, folder: Path) -> None:
        self._sources = CompiledSources(folder)

    @staticmethod
    def _declared(image: bytes) -> dict[str, list[KernelParameter]]:
        source, element, text = image.decode().split("\0")
        return {name: [one.parameter for one in declared] for name, declared in declared_in(source, text, element).items()}

    def parameters(self, image: bytes) -> Mapping[str, Sequence[KernelParameter]]:
        """Sizes and addresses of each parameter, from the text."""
        return self._declared(image)

    def run(self, image: bytes, kernel: str, grid: tuple[int, int, int], threads: int, shared: int, arguments: bytes) -> None:
        """Run it on the CPU."""
        source, element, _ = image.decode().split("\0")
        memory = ctypes.create_string_buffer(arguments, len(arguments))
        places, at = [], ctypes.addressof(memory)
        for parameter in self._declared(image)[kernel]:
            places.append(at)
            at += parameter.nbytes
        pointers = (ctypes.c_uint64 * len(places))(*places)
        self._sources.run(source, element, kernel, (*grid, threads, shared, 0), ctypes.addressof(pointers))


class Nvrtc:
    """`cupy.cuda.nvrtc`: what it makes of a source is an image of `SourceKernels`."""

    def getSupportedArchs(self) -> tuple[int, ...]:
        return (80, 90, 100)

    def getVersion(self) -> tuple[int, int]:
        return 99, 0

    def createProgram(self, text: str, name: str, headers: Sequence[str], names: Sequence[str]) -> list[str]:
        assert '#include "' not in text
        return [name.removesuffix(".cu"), "", text]

    def compileProgram(self, program: list[str], options: Sequence[str]) -> None:
        assert all(isinstance(option, str) for option in options)
        assert "-arch=sm_90" in options
        (program[1],) = (option.removeprefix("-DELEMENT=") for option in options if option.startswith("-DELEMENT="))

    def getCUBIN(self, program: list[str]) -> bytes:
        return "\0".join(program).encode()

    def destroyProgram(self, program: list[str]) -> None:
        program.clear()


class Libcuda:
    """libcuda, as far as it is called by ctypes."""

    def __init__(self, cuda: FakeCuda) -> None:
        pointer, size, address = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64
        self.cuMemAlloc_v2 = CFunction(cuda, "cuMemAlloc", [pointer, size], self._reserve)
        self.cuMemFree_v2 = CFunction(cuda, "cuMemFree", [address], cuda.release)
        self.cuMemHostRegister_v2 = CFunction(cuda, "cuMemHostRegister", [pointer, size, ctypes.c_uint], cuda.pin)
        self.cuMemHostUnregister = CFunction(cuda, "cuMemHostUnregister", [pointer], cuda.unpin)
        self._cuda = cuda

    def _reserve(self, found: ctypes.c_uint64, nbytes: int) -> int:
        status, found.value = self._cuda.reserve(nbytes)
        return status


@dataclass
class _Handle:
    device: int
    stream: int = 0
    workspace: tuple[int, int] | None = None
    mode: int = 0


class Libcublas:
    """cuBLAS (cuBLAS documentation, 2.4, cublasGemmEx and cublasGemmBatchedEx): products of fp32 and bf16, sums in fp32.

    Attributes:
        batch_status: status with which batches are answered if they are right; 0 to compute them.
    """

    def __init__(self, cuda: FakeCuda) -> None:
        handle, integer, pointer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
        self.cuda = cuda
        self._handles: dict[int, _Handle] = {}
        matrix = [pointer, integer, integer]
        self.cublasCreate_v2 = CFunction(cuda, "cublasCreate", [pointer], self._create)
        self.cublasDestroy_v2 = CFunction(cuda, "cublasDestroy", [handle], self._destroy)
        self.cublasSetMathMode = CFunction(cuda, "cublasSetMathMode", [handle, integer], self._set_mode)
        self.cublasSetStream_v2 = CFunction(cuda, "cublasSetStream", [handle, pointer], self._set_stream)
        self.cublasSetWorkspace_v2 = CFunction(cuda, "cublasSetWorkspace", [handle, pointer, size], self._set_workspace)
        types = [handle, *[integer] * 5, pointer, *matrix, *matrix, pointer, *matrix, integer, integer]
        self.cublasGemmEx = CFunction(cuda, "cublasGemmEx", types, self._gemm)
        self.cublasGemmBatchedEx = CFunction(cuda, "cublasGemmBatchedEx", [*types, integer], self._gemm_of_batch)
        self.batch_status = 0

    def _create(self, found: ctypes.c_void_p) -> int:
        found.value = 0x600_0000_0000 + 0x100 * (len(self._handles) + 1)
        self._handles[found.value] = _Handle(self.cuda.getDevice())
        return 0

    def device_of(self, number: int) -> int | None:
        """The device of a handle; None if it is no handle, or that of a device which is not current."""
        handle = self._of(number)
        return None if handle is None else handle.device

    def _of(self, number: int) -> _Handle | None:
        handle = self._handles.get(number)
        if handle is None:
            self.cuda.refuse(f"{number:#x} is no handle of cuBLAS, or one that was destroyed")
        elif handle.device != self.cuda.getDevice():
            self.cuda.refuse(f"a handle of device {handle.device} is used while device {self.cuda.getDevice()} is current")
            return None
        return handle

    def _destroy(self, number: int) -> int:
        if self._of(number) is None:
            return 1
        del self._handles[number]
        return 0

    def _set_mode(self, number: int, mode: int) -> int:
        handle = self._of(number)
        if handle is None or mode not in (0, 2, 3, 16, 17, 18, 19):
            self.cuda.refuse(f"there is no math mode {mode}")
            return 7
        handle.mode = mode
        return 0

    def _set_stream(self, number: int, stream: int) -> int:
        handle = self._of(number)
        if handle is None:
            return 1
        handle.stream, handle.workspace = stream, None
        return 0

    def _set_workspace(self, number: int, address: int, nbytes: int) -> int:
        handle = self._of(number)
        if handle is None or address % 256 or self.cuda.memory_at(address, nbytes, "the workspace") != handle.device:
            self.cuda.refuse(f"a workspace is memory of the handle's device in units of 256 bytes, got {address:#x}")
            return 7
        handle.workspace = address, nbytes
        return 0

    def _gemm(
        self, number: int, opa: int, opb: int, m: int, n: int, k: int, alpha: ctypes.c_float, a: int, atype: int, lda: int, b: int, btype: int,
        ldb: int, beta: ctypes.c_float, c: int, ctype: int, ldc: int, compute: int, algorithm: int,
    ) -> int:  # fmt: skip
        handle = self._of(number)
        if handle is None:
            return 1
        wrong = self._wrong(handle, opa, opb, m, n, k, (atype, btype, ctype), compute, algorithm)
        if wrong:
            self.cuda.refuse(f"cublasGemmEx: {wrong}")
            return 7
        sides = ((a, (k, m) if opa else (m, k), atype, lda), (b, (n, k) if opb else (k, n), btype, ldb), (c, (m, n), ctype, ldc))
        accesses = []
        for place, (rows, columns), kind, distance in sides:
            item = _TYPES[kind].itemsize
            nbytes = (distance * (columns - 1) + rows) * item
            if distance < max(1, rows) or place % item:
                self.cuda.refuse(f"cublasGemmEx: columns of {rows} numbers lie {distance} apart, from {place:#x} of {item} bytes each")
                return 7
            if self.cuda.memory_at(place, nbytes, "a matrix") is None:
                self.cuda.refuse("cublasGemmEx: a matrix is no memory of a device")
                return 13
            accesses.append(Access(place, nbytes, place == c))
        if handle.workspace is None:
            self.cuda.refuse("cublasGemmEx: the stream has taken the workspace away, and with it the same bits and graphs")
            return 7
        accesses.append(Access(*handle.workspace, True))
        factors = alpha.value, beta.value
        try:
            self.cuda.submit(handle.stream, "a product", accesses, lambda: self._multiply(sides, opa, opb, *factors))
        except CUDARuntimeError as error:
            if error.status != ILLEGAL_ADDRESS:
                raise
            return 14  # CUBLAS_STATUS_INTERNAL_ERROR, whatever the device says
        return 0

    def _gemm_of_batch(self, number: int, opa: int, opb: int, m: int, n: int, k: int, alpha: ctypes.c_float, *rest: Any) -> int:
        """Products whose addresses are read from device memory when it is their turn; only then is it known what they access."""
        a, atype, lda, b, btype, ldb, beta, c, ctype, ldc, count, compute, algorithm = rest
        handle = self._of(number)
        if handle is None:
            return 1
        wrong = self._wrong(handle, opa, opb, m, n, k, (atype, btype, ctype), compute, algorithm)
        if wrong or count < 1 or handle.workspace is None:
            self.cuda.refuse(f"cublasGemmBatchedEx: {wrong or 'no products, or no workspace'}")
            return 7
        sides = (((k, m) if opa else (m, k), atype, lda), ((n, k) if opb else (k, n), btype, ldb), ((m, n), ctype, ldc))
        for place in (a, b, c):
            if place % 8 or self.cuda.memory_at(place, 8 * count, "addresses of matrices") is None:
                self.cuda.refuse("cublasGemmBatchedEx: addresses of matrices are no memory of a device")
                return 13
        if any(distance < max(1, rows) for (rows, _), _, distance in sides):
            self.cuda.refuse("cublasGemmBatchedEx: columns are longer than their distance")
            return 7
        if self.batch_status:
            return self.batch_status
        factors = alpha.value, beta.value

        def multiply() -> None:
            lists = [(ctypes.c_uint64 * count).from_address(place) for place in (a, b, c)]
            for places in zip(*lists, strict=True):
                whole = []
                for place, (shape, kind, distance) in zip(places, sides, strict=True):
                    nbytes = (distance * (shape[1] - 1) + shape[0]) * _TYPES[kind].itemsize
                    if place % 16 or distance * _TYPES[kind].itemsize % 16 or self.cuda.memory_at(place, nbytes, "a matrix") is None:
                        self.cuda.refuse(f"cublasGemmBatchedEx: {place:#x} is not aligned to 16 bytes, as are its columns, or no memory of a device")
                        return
                    whole.append((place, shape, kind, distance))
                self._multiply(whole, opa, opb, *factors)

        read = [Access(place, 8 * count, False) for place in (a, b, c)]
        self.cuda.submit(handle.stream, "products", [*read, Access(*handle.workspace, True)], multiply)
        return 0

    def _wrong(self, handle: _Handle, opa: int, opb: int, m: int, n: int, k: int, kinds: tuple[int, int, int], compute: int, algorithm: int) -> str:
        """What is wrong with enumerations and sizes."""
        if opa not in (0, 1) or opb not in (0, 1):
            return f"factors are as they are (0) or transposed (1), got {opa} and {opb}"
        if min(m, n, k) < 1:
            return f"sizes are at least 1 here, got {m}, {n}, {k}"
        if kinds not in ((0, 0, 0), (14, 14, 14), (14, 14, 0)):
            return f"no product of CUBLAS_COMPUTE_32F has the types {kinds}"
        if compute not in (68, 77) or (compute == 77 and kinds[0] != 0) or algorithm != -1:
            return f"sums are of type 68, or 77 of fp32, by algorithm -1, got {compute} and {algorithm}"
        if handle.mode != 16:
            return "sums of bf16 products may be rounded in between"
        return ""

    def _multiply(self, sides: Any, opa: int, opb: int, alpha: float, beta: float) -> None:
        def matrix(place: int, shape: tuple[int, int], kind: int, distance: int) -> np.ndarray:
            dtype = _TYPES[kind]
            nbytes = (distance * (shape[1] - 1) + shape[0]) * dtype.itemsize
            flat = np.frombuffer((ctypes.c_char * nbytes).from_address(place), dtype)
            return np.lib.stride_tricks.as_strided(flat, shape, (dtype.itemsize, distance * dtype.itemsize))

        a, b, c = (matrix(*side) for side in sides)
        left, right = a.astype(np.float32), b.astype(np.float32)
        found = np.float32(alpha) * ((right if not opb else right.T).T @ (left if not opa else left.T).T).T
        c[...] = found if beta == 0.0 else np.float32(beta) * c.astype(np.float32) + found


class _CupyStream:
    """`cupy.cuda.Stream`."""

    def __init__(self, cuda: FakeCuda, *, non_blocking: bool = False) -> None:
        self._cuda, self.device_id = cuda, cuda.getDevice()
        self.ptr = cuda.streamCreateWithFlags(int(non_blocking))

    def use(self) -> None:
        if self._cuda.getDevice() != self.device_id:
            raise self._cuda.refuse(f"a stream of device {self.device_id} is entered while device {self._cuda.getDevice()} is current")

    def __enter__(self) -> None:
        self.use()

    def __exit__(self, *_: object) -> None:
        self.use()

    def __del__(self) -> None:
        self._cuda.streamDestroy(self.ptr)


@contextmanager
def installed(folder: Path, cache_folder: Path, *, refuses: Refuses = lambda *_: 0, **terms: Any) -> Iterator[FakeCuda]:
    """The libraries in place of the real ones; yields runtime and driver.

    Args:
        folder: of libraries of the CPU.
        cache_folder: where code of sources is kept.
        refuses: argument of `LibcublasLt`.
        terms: as of `FakeCuda`.
    """
    cuda = FakeCuda(SourceKernels(folder), **terms)
    cupy, inner, backends = ModuleType("cupy"), ModuleType("cupy.cuda"), ModuleType("cupy_backends.cuda.libs")
    cupy.cuda, cupy.__version__ = inner, "14.0"  # type: ignore[attr-defined]
    inner.runtime, inner.driver, inner.nvrtc = cuda, cuda, Nvrtc()  # type: ignore[attr-defined]
    inner.nccl = StrictNccl(cuda)  # type: ignore[attr-defined]
    inner.Stream = lambda *, non_blocking=False: _CupyStream(cuda, non_blocking=non_blocking)  # type: ignore[attr-defined]
    backends.cublas = None  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        for module in (cupy, inner, backends):
            patch.setitem(sys.modules, module.__name__, module)
        for name in ("cupy_backends", "cupy_backends.cuda"):
            patch.setitem(sys.modules, name, ModuleType(name))
        patch.setenv("XDG_CACHE_HOME", str(cache_folder))
        patch.setattr(cuda_cupy, "_runtime", lambda: cuda)
        driver, libcublas = cuda_cupy.typed_driver(Libcuda(cuda)), Libcublas(cuda)
        blas, blas_lt = products.typed_cublas(libcublas), epilogues.typed_cublas_lt(LibcublasLt(cuda, libcublas.device_of, refuses))
        patch.setattr(cuda_cupy, "_driver", lambda: driver)
        patch.setattr(products, "_library", lambda: blas)
        patch.setattr(epilogues, "_library", lambda: blas_lt)
        patch.setattr(device, "_MODULES", {})
        patch.setattr(device, "_PEAK_SIZE", 32)
        patch.setattr(device, "_PEAK_VALUES", 32 * 32)
        yield cuda
    vars(launch._current).clear()  # a device of the test's own thread would outlive the modules that it is made of


STRICT_TRAINING = Training(
    GPT2Config(vocab_size=30, n_positions=8, n_embd=8, n_layer=1, n_head=2), ModelTiling(minibatch_tile=2, seq_tile=4, vocab_tile=20), 7, 1e-2
)
"""Steps enough to start graphs."""
TIGHT = 3 << 16
"""Bytes of a device that does not hold one."""


def opened(cuda: FakeCuda, count: int = 1, *, dtype: str = "fp32", tf32: bool = False) -> list[Any]:
    """Devices as a run opens them."""
    facts = cuda_cupy.find_gpus(lambda: ["cupy-cuda13x"], lambda: cuda, most=count)
    return CudaCards().open([(card, None) for card in facts], tf32=tf32, dtype=dtype)


class StrictCards:
    """`gpus.CudaCards` of a machine with strict libraries: one card."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def choose(self, count: int | None) -> list[cuda_cupy.GpuFacts]:
        """The card."""
        return cuda_cupy.find_gpus(lambda: ["cupy-cuda13x"], lambda: self._cuda, most=1)

    def open(self, facts: Any, *, tf32: bool, dtype: str) -> list[Any]:
        """Its devices."""
        return list(CudaCards().open(facts, tf32=tf32, dtype=dtype))


@contextmanager
def rehearsed(folder: Path, cache_folder: Path) -> Iterator[tuple[FakeCuda, StrictCards]]:
    """`installed`, and the card where commands look for cards; yields both."""
    with installed(folder, cache_folder) as cuda, pytest.MonkeyPatch.context() as patch:
        found = StrictCards(cuda)
        patch.setattr(gpus, "cards", found)
        yield cuda, found
