"""What stands between kernels and a GPU, without one: cuBLAS's order of arguments, packed arguments, the cache of compiled sources, and refusals."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.cuda_emulator import COMPILER, Emulator, on_device, on_host
from support.kernel_cases import CASES, Maker

from scheduler import Runtime
from scheduler.core.errors import DeviceFailed
from scheduler.drivers.cuda_cupy import CupyGpu, GpuFacts
from tiles import TileTensor, emission
from tiles.kernels import catalog, registry
from tiles.kernels.catalog import kernel
from tiles.kernels.cuda import compiling, device, launch, products
from tiles.kernels.cuda.array import DeviceArray
from tiles.kernels.cuda.compiling import KernelBuildError, build, source_text, target_of
from tiles.kernels.cuda.device import CudaDevice
from tiles.kernels.cuda.launch import Arguments
from tiles.kernels.cuda.products import column_major
from tiles.ops.elementwise import activation, scale

BF16 = np.dtype(ml_dtypes.bfloat16)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no g++ to run the sources with")


def blas(product: Any) -> None:
    """C = op(A) @ op(B) of column-major matrices, as GemmEx is specified."""

    def matrix(array: Any, rows: int, columns: int, distance: int) -> np.ndarray:
        flat = on_host(array.at(array.dtype, distance * (columns - 1) + rows))
        return np.lib.stride_tricks.as_strided(flat, (rows, columns), (flat.itemsize, distance * flat.itemsize))

    a = matrix(product.a, *((product.k, product.m) if product.trans_a else (product.m, product.k)), product.lda)
    b = matrix(product.b, *((product.n, product.k) if product.trans_b else (product.k, product.n)), product.ldb)
    c = matrix(product.c, product.m, product.n, product.ldc)
    c[...] = (a.T if product.trans_a else a) @ (b.T if product.trans_b else b)


@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("stride", [None, 11])
def test_row_major_products_are_cublas_transposes(trans_a: bool, trans_b: bool, stride: int | None) -> None:
    """(5, 7) @ (7, 3), each factor also given transposed, the first also with gaps between its rows."""
    rng = np.random.default_rng(0)
    a = rng.standard_normal((7, 5) if trans_a else (5, 7)).astype(np.float32)
    b = rng.standard_normal((3, 7) if trans_b else (7, 3)).astype(np.float32)
    out = np.zeros((5, 3), np.float32)
    left = a
    if stride is not None:
        left = np.full((a.shape[0], stride), np.nan, np.float32)
        left[:, : a.shape[1]] = a
    place = on_device(left).at(np.float32, *a.shape)
    blas(column_major(place, on_device(b), on_device(out), trans_a=trans_a, trans_b=trans_b, stride_a=stride))
    np.testing.assert_allclose(out, (a.T if trans_a else a) @ (b.T if trans_b else b), rtol=1e-5)


class Library:
    """cuBLAS as far as it is set up."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda handle, *arguments: self.calls.append((name, arguments)) or 0


def test_cublas_adds_up_in_fp32_and_keeps_its_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of bf16 products are not rounded in between; a stream takes the workspace away, so it is given after it."""
    library = Library()
    monkeypatch.setattr(products, "_library", lambda: library)
    products.Cublas(4096, tf32=False).use(7)
    assert library.calls == [
        ("cublasCreate_v2", ()),
        ("cublasSetMathMode", (16,)),
        ("cublasSetStream_v2", (7,)),
        ("cublasSetWorkspace_v2", (4096, products.WORKSPACE_NBYTES)),
    ]


def test_what_cannot_be_recorded_is_not_taken_for_a_broken_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS says the same of both; outside of a recording it ends the run."""
    gpu = CudaDevice.__new__(CudaDevice)  # no CuPy here
    gpu.name, gpu._local, gpu.num_started = "GPU 0", threading.local(), 0
    error = products.CublasError(13)

    def refused() -> None:
        gpu._again(error, refused)

    monkeypatch.setattr(CupyGpu, "capture", lambda self, stream, run: run())
    with pytest.raises(products.CublasError):
        gpu.capture(None, refused)  # type: ignore[arg-type]
    with pytest.raises(DeviceFailed):
        refused()


@pytest.mark.parametrize(("status", "kind"), [(222, KernelBuildError), (700, RuntimeError)])
def test_a_driver_that_is_too_old_for_the_kernels_is_told(status: int, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that it cannot translate is no broken device; other failures stay what they are."""

    class Driver:
        def moduleLoadData(self, code: bytes) -> int:
            error = RuntimeError("CUDA_ERROR_UNSUPPORTED_PTX_VERSION")
            error.status = status  # type: ignore[attr-defined]
            raise error

    gpu = CudaDevice.__new__(CudaDevice)  # no CuPy here
    gpu.name, gpu.index, gpu._driver = "GPU 0", 0, Driver()
    gpu.facts = GpuFacts(0, "card", 999, 1, 1)
    monkeypatch.setattr(device, "build", lambda *_: b"")
    with pytest.raises(RuntimeError) as found:
        gpu._function("norm", "float", "forward")
    assert type(found.value) is kind
    if kind is KernelBuildError:
        assert "the driver of GPU 0 cannot use the kernels of norm.cu" in str(found.value)


def test_products_of_two_types_are_refused() -> None:
    """cuBLAS has none."""
    a, b = np.zeros((2, 2), np.float32), np.zeros((2, 2), BF16)
    with pytest.raises(TypeError, match="matrices of one type, got float32 and bfloat16"):
        column_major(on_device(a), on_device(b), on_device(a), trans_a=False, trans_b=False)


def test_arguments_lie_where_a_launch_looks_for_them() -> None:
    """Numbers of every type, a struct, an address and a null pointer; filled again, a copy keeps the old values."""
    pair = np.array((3, 2.5), np.dtype([("count", np.int32), ("factor", np.float32)]))[()]
    place = on_device(np.zeros(4, np.float32))
    first = (np.int32(-5), np.uint32(1 << 31), np.int64(-1 << 40), np.uint64(1 << 63), np.float32(0.1), np.float64(0.1), pair, place, None)
    kinds = (
        ctypes.c_int32,
        ctypes.c_uint32,
        ctypes.c_int64,
        ctypes.c_uint64,
        ctypes.c_float,
        ctypes.c_double,
        None,
        ctypes.c_uint64,
        ctypes.c_uint64,
    )
    packed = Arguments(first)

    def read(arguments: Arguments) -> list[Any]:
        pointers = (ctypes.c_uint64 * len(first)).from_address(arguments.address)
        return [kind.from_address(at).value for kind, at in zip(kinds, pointers, strict=True) if kind is not None]

    packed.fill(first)
    want = [first[0], first[1], first[2], first[3], float(first[4]), first[5], place.address, 0]
    kept = packed.copy()
    packed.fill((np.int32(7), *first[1:]))
    assert read(kept) == want
    assert read(packed) == [7, *want[1:]]
    struct_at = (ctypes.c_uint64 * len(first)).from_address(kept.address)[6]
    assert ctypes.string_at(struct_at, 8) == pair.tobytes()


@needs_compiler
@pytest.mark.parametrize("wrong", [np.float64(2.0), np.int32(2), None])
def test_arguments_are_those_that_a_kernel_declares(wrong: Any, cuda_libraries: Path) -> None:
    """A number of another kind, or none, would be read as something else."""
    gpu, x = Emulator(cuda_libraries), on_device(np.ones(4, np.float32))
    gpu.enter(gpu.stream())
    with pytest.raises(AssertionError, match="scale declares"):
        launch.KernelSource("elementwise").each("scale", x.dtype, 4, x, x, wrong)


class Compiler:
    """Answers like CuPy's NVRTC."""

    def __init__(self, supported: tuple[int, ...] = (80, 90, 100), wrong: str = "") -> None:
        self.supported, self.wrong = supported, wrong
        self.num_compiled = 0

    def getSupportedArchs(self) -> tuple[int, ...]:
        return self.supported

    def getVersion(self) -> tuple[int, int]:
        return 13, 0

    def createProgram(self, text: str, name: str, headers: Any, names: Any) -> int:
        self.text = text
        return 1

    def compileProgram(self, program: int, options: tuple[str, ...]) -> None:
        self.num_compiled += 1
        self.options = options
        if self.wrong:
            raise RuntimeError("NVRTC_ERROR_COMPILATION (6)")

    def getProgramLog(self, program: int) -> str:
        return f"{self.wrong}\n1 error detected"

    def getCUBIN(self, program: int) -> bytes:
        return b"machine code"

    def getPTX(self, program: int) -> str:
        return "portable code"

    def destroyProgram(self, program: int) -> None:
        self.text = ""


def test_a_source_is_compiled_once(tmp_path: Path) -> None:
    """Per source, type and architecture; a folder that cannot be written only costs time."""
    compiler = Compiler()
    for _ in range(2):
        assert build("norm", "float", 90, tmp_path / "new", compiler) == b"machine code"
    assert compiler.num_compiled == 1
    assert compiler.options == ("-arch=sm_90", "-DELEMENT=float", "-std=c++17")
    build("norm", "bf16", 90, tmp_path / "new", compiler)
    build("norm", "float", 80, tmp_path / "new", compiler)
    assert compiler.num_compiled == 3
    assert build("norm", "float", 120, tmp_path / "new", compiler) == b"portable code\0"
    assert compiler.options[0] == "-arch=compute_100"
    (tmp_path / "file").touch()
    assert build("norm", "float", 90, tmp_path / "file", compiler) == b"machine code"


def test_sources_need_no_file() -> None:
    """The header is in them."""
    for name in launch.NAMES:
        assert '#include "' not in source_text(name)


def test_a_source_that_does_not_compile_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence has the compiler's first complaint and a way out. No file is written, and the source is compiled once."""
    compiler = Compiler(wrong="norm.cu(33): error: identifier is undefined")
    monkeypatch.setattr(compiling, "_refused", {})
    with pytest.raises(KernelBuildError, match=r"norm\.cu do not compile for sm_90 \(norm\.cu\(33\): error: identifier is undefined\).*--ngpu 0"):
        build("norm", "float", 90, tmp_path, compiler)
    assert not list(tmp_path.iterdir())
    with pytest.raises(KernelBuildError, match="identifier is undefined"):
        build("norm", "float", 90, tmp_path, compiler)
    assert compiler.num_compiled == 1
    with pytest.raises(KernelBuildError, match=r"compute capability 70.*install the CuPy of an older CUDA"):
        target_of(70, [80, 90])


def test_a_programs_kernel_puts_ours_for_gpus_aside(own_kernels: None) -> None:
    """An operation with a CPU kernel of the program's own runs there, GPUs or not, until the program brings one for GPUs, too."""
    assert emission.codelet("scale").kinds == ("cpu", "sim", "cuda")
    catalog.register("scale", "cpu")(lambda x, out, *, alpha: np.multiply(x, 2 * alpha, out=out))
    assert emission.codelet("scale").kinds == ("cpu", "sim")
    catalog.register("scale", "cuda")(lambda x, out, *, alpha: None)
    assert emission.codelet("scale").kinds == ("cpu", "sim", "cuda")
    catalog.register("scale", "cpu")(lambda x, out, *, alpha: np.multiply(x, 3 * alpha, out=out))
    assert emission.codelet("scale").kinds == ("cpu", "sim", "cuda")


@pytest.mark.parametrize("op", ["expert_forward", "expert_backward"])
def test_experts_cost_all_rows_on_gpus(op: str) -> None:
    """CPUs multiply the rows that chose an expert, K / E of them more if it has any; GPUs multiply all. Other operations cost the same."""
    views, _, constants = CASES[op][0](Maker(np.float32))
    on_cpu, on_gpu = (emission.codelet(op, has_gpus=has_gpus).cost(views, constants) for has_gpus in (False, True))
    num_rows = np.prod(views[0].shape[:-1])
    assert on_cpu.flops == pytest.approx(on_gpu.flops * 3 / 6 / (1 - (1 - 3 / 6) ** num_rows))  # 3 of 6 experts
    views, _, constants = CASES["matmul"][0](Maker(np.float32))
    assert emission.codelet("matmul").cost(views, constants) == emission.codelet("matmul", has_gpus=True).cost(views, constants)


@pytest.mark.parametrize(("op", "num_vectors", "most"), [("rms_norm_backward", 1, 163_840), ("layer_norm_backward", 2, 163_840)])
def test_norms_that_are_too_wide_are_refused(op: str, num_vectors: int, most: int) -> None:
    """Their partial sums would not fit the memory that a device has for them; the bound is that of sums over one piece of rows."""
    x, row, column = (DeviceArray(0, shape, np.dtype(np.float32)) for shape in ((3, most + 1), (most + 1,), (3,)))
    arrays = [x, row, *[column] * num_vectors, x, x, *[row] * num_vectors]
    with pytest.raises(ValueError, match=f"the gradient of a norm takes tiles of {most:,} columns at most, got {most + 1}; use smaller tiles"):
        kernel(op, "cuda")(*arrays, accumulate=False, residual=False)


@needs_compiler
def test_a_programs_activation_runs_on_the_cpu(own_kernels: None, cuda_libraries: Path) -> None:
    """Kernels for GPUs know the built-in ones; what the program has put in their place is what is computed."""
    registry.register_activation("relu", backward=lambda x, dy, dx: None)(lambda x, y: y.fill(7))
    with Runtime(1, gpus=[Emulator(cuda_libraries)], gpu_memory=1 << 20, ram=1 << 22) as runtime:
        for dtype in (np.float32, BF16):
            x = TileTensor(runtime, (4,), (4,), dtype)
            x.write(np.ones(4, dtype))
            y = activation(scale(x, 2.0), "relu")
            assert y.read().astype(float).tolist() == [7.0] * 4


@needs_compiler
def test_other_types_are_refused_by_name(cuda_libraries: Path) -> None:
    """fp64 tiles have no CUDA kernels; the message says what to do."""
    with Runtime(0, gpus=[Emulator(cuda_libraries)], gpu_memory=1 << 20, ram=1 << 22) as runtime:
        x = TileTensor(runtime, (4,), (4,), np.float64)
        x.write(np.ones(4))
        y = scale(x, 2.0)
        with pytest.raises(Exception, match=r"CUDA kernels compute tiles of fp32 and bf16, and scale got float64; use one of these"):
            runtime.wait()
        del y
