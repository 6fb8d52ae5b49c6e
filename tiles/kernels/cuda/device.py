"""The GPU on which kernels run: `launch.Device` over CuPy. Sources are compiled at first use; products are cuBLAS's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Final, TypeVar

import numpy as np

from scheduler import DoesNotFit, Shortage
from scheduler.drivers import NOT_READY, NUM_STARTED, CupyGpu, CupyGraph, CupyStream, GpuFacts, Stream, is_fatal, is_out_of_memory

from ..registry import BF16
from .array import DeviceArray
from .batches import TABLE_NBYTES, Batches
from .compiling import KernelBuildError, build
from .epilogues import BIAS, GELU_SLOPE, CublasLt
from .launch import ARRIVALS_NBYTES, PARTIALS_NBYTES, Arguments, Product, StreamPointer, use
from .library_attention import ATTENTION_WORKSPACE_NBYTES, LibraryAttention, WholeShape
from .products import WORKSPACE_NBYTES, Cublas, column_major

SPARE_NBYTES: Final = 64 << 20
"""Reserve that is released when a library asks for memory that another process has taken."""

FORWARD_TILES: Final = 5
"""Number of tiles in a forward pass of attention; a backward pass has more."""
_PEAK_SIZE: Final = 4096
_PEAK_PRODUCTS: Final = 10
_PEAK_VALUES: Final = 1 << 20
_CANNOT_TRANSLATE: Final = (218, 221, 222, 223)
"""cudaError_t: invalid code, no translator, code too new for the driver, translation switched off."""
_FREE_SHARED: Final = 48 << 10
"""Largest shared memory of a block that needs no permission."""
_MODULES: dict[tuple[int, str, str], int] = {}
"""Kernels that this process has loaded, by card, source and element type; they stay loaded when the card is closed."""
_T = TypeVar("_T")


class CudaDevice(CupyGpu):
    """A GPU that computes.

    Args:
        facts: properties of the card.
        partition: number of the partition; None for a whole card.
        tf32: whether products of fp32 tiles may round their factors to 10 bits of mantissa.
    """

    def __init__(self, facts: GpuFacts, partition: int | None = None, *, tf32: bool = False) -> None:
        super().__init__(facts, partition)
        from cupy.cuda import driver

        self._driver = driver
        self._functions: dict[tuple[str, str, str], int] = {}
        self._allowed: set[int] = set()
        self._most_shared = int(self._cuda.deviceGetAttribute(self._cuda.cudaDevAttrMaxSharedMemoryPerBlockOptin, self.index))
        self._partials = DeviceArray(self.reserve(PARTIALS_NBYTES), (PARTIALS_NBYTES,), np.dtype(np.uint8))
        self._arrivals = self._zeros(ARRIVALS_NBYTES)
        self._spare: int | None = self.reserve(SPARE_NBYTES)
        self._local = threading.local()
        self.products_flops = 0.0
        workspace = self.reserve(WORKSPACE_NBYTES)
        with self.visit():  # a handle belongs to the device that is current when it is created
            self._blas = Cublas(workspace, tf32=tf32)
            self._products = CublasLt(self._blas, workspace)
        self._batches = Batches(self._blas, self.reserve(TABLE_NBYTES))
        self._attention: LibraryAttention | None = None

    def open_attention(self, report: Callable[[str], None] = lambda sentence: None) -> None:
        """Let cuDNN compute attention of whole sequences on this GPU, if it supports their shape. Threads must enter their streams afterwards.

        The workspace of cuDNN is not part of the budget.

        Args:
            report: function that is called with a sentence about each shape that cuDNN leaves to our kernels, when it is first used.

        Raises:
            ImportError: cuDNN or its frontend is missing.
            MemoryError: the card has no room for the workspace.
        """
        if self._attention is not None:
            return
        workspace = self.reserve(ATTENTION_WORKSPACE_NBYTES)
        try:
            with self.visit():
                self._attention = LibraryAttention(workspace, report)
        except BaseException:
            self.release(workspace)
            raise

    def whole_attention(self, shape: WholeShape, *tiles: DeviceArray) -> bool:
        """Start cuDNN's attention, as `launch.Device` describes."""
        library = self._attention
        if library is None or not self._try(lambda: library.takes(shape, may_plan=not getattr(self._local, "captures", False))):
            return False
        self._clear()
        self.num_started += 1
        start = library.forward if len(tiles) == FORWARD_TILES else library.backward
        self._try(lambda: start(shape, *tiles))
        return True

    def enter(self, stream: Stream) -> None:
        """Make kernels of the calling thread run on this GPU, on `stream`."""
        super().enter(stream)
        self._entered = stream  # kept alive, since cuBLAS refers to it until it gets another one
        self._local.stream = stream.number  # type: ignore[attr-defined]
        self._blas.use(self._local.stream)
        if self._attention is not None:
            self._attention.use(self._local.stream)
        use(self)

    @property
    def partials(self) -> DeviceArray:
        """Memory for the partial sums of one kernel at a time."""
        return self._partials

    @property
    def arrivals(self) -> DeviceArray:
        """Counters of blocks, 0 between kernels."""
        return self._arrivals

    def _zeros(self, nbytes: int) -> DeviceArray:
        """Return new memory full of zeros."""
        zeros, stream, event = np.zeros(nbytes, np.uint8), self.stream(), self.event()
        array = DeviceArray(self.reserve(nbytes), zeros.shape, zeros.dtype)
        with self.visit():
            stream.copy(array.address, zeros.ctypes.data, nbytes)
            stream.record(event)
            event.wait()
        return array

    def start(self, source: str, element: str, kernel: str, grid: tuple[int, int, int], threads: int, shared: int, arguments: Arguments) -> None:
        """Start a kernel."""
        function = self._functions.get((source, element, kernel))
        if function is None:
            function = self._functions[source, element, kernel] = self._try(lambda: self._function(source, element, kernel))
        if shared > _FREE_SHARED and (function not in self._allowed or shared > self._most_shared):
            self._allow(function, kernel, shared)
        launch, stream = self._driver.launchKernel, self._local.stream
        try:
            launch(function, *grid, threads, 1, 1, shared, stream, arguments.address, 0)
        except RuntimeError as error:
            self._again(error, lambda: launch(function, *grid, threads, 1, 1, shared, stream, arguments.address, 0))
        self.num_started += 1

    def gemm(self, a: DeviceArray, b: DeviceArray, out: DeviceArray, *, alpha: float, accumulate: bool, **layout: Any) -> None:
        """out (+)= alpha * op(a) @ op(b), sums in fp32; `layout` has the other arguments of `launch.Device`."""
        product = column_major(a, b, out, **layout)
        self.num_started += 1  # a library may have started something before it fails
        try:
            self._blas.multiply(product, alpha, accumulate)
        except RuntimeError as error:
            self._again(error, lambda: self._blas.multiply(product, alpha, accumulate))

    def gemms(self, products: Sequence[Product], *, trans_a: bool, trans_b: bool, accumulate: bool) -> None:
        """Start several products of one shape and type, as `launch.Device` describes."""
        whole = [column_major(*product, trans_a=trans_a, trans_b=trans_b) for product in products]
        self.num_started += 1
        if not self._try(lambda: self._batches.multiply(whole, accumulate, captures=getattr(self._local, "captures", False))):
            for product in products:
                self.gemm(*product, trans_a=trans_a, trans_b=trans_b, alpha=1.0, accumulate=accumulate)

    def gemm_with_bias(self, a: DeviceArray, b: DeviceArray, bias: DeviceArray, out: DeviceArray, *, trans_b: bool) -> bool:
        """out = a @ op(b) + bias by cuBLASLt, as `launch.Device` describes."""
        product = column_major(a, b, out, trans_a=False, trans_b=trans_b)
        self.num_started += 1
        return self._try(lambda: self._products.multiply(product, BIAS, bias, self._local.stream))

    def gemm_with_gelu_slope(self, a: DeviceArray, b: DeviceArray, x: DeviceArray, out: DeviceArray, *, trans_b: bool) -> bool:
        """out = a @ op(b) * gelu'(x) by cuBLASLt, as `launch.Device` describes."""
        product = column_major(a, b, out, trans_a=False, trans_b=trans_b)
        self.num_started += 1
        return self._try(lambda: self._products.multiply(product, GELU_SLOPE, x, self._local.stream))

    def start_external(self, start: Callable[[StreamPointer], None]) -> None:
        """Let another library put kernels on the stream of the calling thread.

        Such a library reads the runtime's last error. If both share a runtime, it would take the "not ready" of an event query of ours for the
        failure of its own kernel, so that error is cleared first.
        """
        self._clear()
        self.num_started += 1
        start(StreamPointer(self.name, self.index, self._local.stream))

    def _clear(self) -> None:
        with suppress(RuntimeError):
            self._cuda.check_status(NOT_READY)

    def capture(self, stream: Stream, run: Callable[[], None]) -> CupyGraph:
        """Record kernels as a graph."""
        self._local.captures, before = True, self.num_started
        try:
            return super().capture(stream, run)
        finally:
            self._local.captures, self.num_started = False, before

    def measure_products(self, dtype: str) -> None:
        """Measure the speed of matrix products, the best of three tries, as `products_flops`; no step on this card can exceed it. Takes 0.1 s.

        Args:
            dtype: value of --dtype; "bf16" measures products of bf16 matrices, others those of fp32 with this device's rounding.
        """
        stream = self.stream()
        with self.visit(), stream.owner:  # the calling thread belongs to the program, and keeps its device and its stream
            self._measure(BF16 if dtype == "bf16" else np.dtype(np.float32), stream)

    def _measure(self, element: np.dtype[Any], stream: CupyStream) -> None:
        nbytes = _PEAK_SIZE * _PEAK_SIZE * element.itemsize
        begin, end = self.event(), self.event()
        self.enter(stream)
        address = self.reserve(3 * nbytes)
        a, b, out = (DeviceArray(address + operand * nbytes, (_PEAK_SIZE, _PEAK_SIZE), element) for operand in range(3))
        values = np.random.default_rng(0).standard_normal(_PEAK_VALUES, np.float32).astype(element)  # zeros would be faster than real data
        for offset in range(0, 3 * nbytes, values.nbytes):
            stream.copy(address + offset, values.ctypes.data, values.nbytes)
        for number in range(4):
            stream.record(begin)
            for _ in range(_PEAK_PRODUCTS):
                self.gemm(a, b, out, trans_a=False, trans_b=False, alpha=1.0, accumulate=False)
            stream.record(end)
            end.wait()
            if number:  # the first one loads the library
                self.products_flops = max(self.products_flops, _PEAK_PRODUCTS * 2.0 * _PEAK_SIZE**3 / end.seconds_since(begin))
        self.release(address)

    def close(self) -> None:
        """Release the memory that is not part of the budget; nothing can be computed afterwards."""
        try:
            with self.visit(), ExitStack() as libraries:
                libraries.callback(self._blas.close)
                libraries.callback(self._products.close)
                if self._attention is not None:
                    libraries.callback(self._attention.close)
        finally:
            super().close()

    def _function(self, source: str, element: str, kernel: str) -> int:
        """Load a function of a source.

        Raises:
            KernelBuildError: the driver cannot translate code for an architecture that the compiler has no machine code for.
        """
        key = self.index, source, element
        if key not in _MODULES:
            code = build(source, element, self.facts.capability)
            try:
                _MODULES[key] = self._driver.moduleLoadData(code)
            except RuntimeError as error:
                if getattr(error, "status", None) not in _CANNOT_TRANSLATE:
                    raise
                raise KernelBuildError(
                    f"the driver of {self.name} cannot use the kernels of {source}.cu, compiled for an older GPU ({error}); update the driver, "
                    "install a CuPy that knows this GPU, or compute on the CPU with --ngpu 0"
                ) from error
        return int(self._driver.moduleGetFunction(_MODULES[key], kernel))

    def _allow(self, function: int, kernel: str, shared: int) -> None:
        """Permit a kernel all shared memory: partitions of a card share their kernels, so a smaller limit could revoke another one's permission."""
        if shared > self._most_shared:
            raise KernelBuildError(
                f"kernel {kernel} needs {shared:,} bytes of shared memory a block and {self.name} has {self._most_shared:,}; use a model with "
                "smaller heads, or compute on the CPU with --ngpu 0"
            )
        self._driver.funcSetAttribute(function, self._driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, self._most_shared)
        self._allowed.add(function)

    def _try(self, call: Callable[[], _T]) -> _T:
        try:
            return call()
        except RuntimeError as error:
            return self._again(error, call)

    def _again(self, error: RuntimeError, call: Callable[[], _T]) -> _T:
        """Handle a failed call: call again if memory was short and some can be released, else raise.

        A failure while a graph is recorded is raised unchanged: libraries report calls that cannot be recorded in the same words as a broken device,
        and waiting is not allowed. The kernels of the graph are then started one by one, where a real failure would show its cause.

        Raises:
            DeviceFailed: the device does not work any more.
            DoesNotFit: memory is short although the reserve was released.
        """
        if getattr(self._local, "captures", False):
            raise error
        try:
            return self._once_more(error, call)
        except Exception as final:
            setattr(final, NUM_STARTED, self.num_started)
            raise

    def _once_more(self, error: RuntimeError, call: Callable[[], _T]) -> _T:
        if is_out_of_memory(error) and self._spare is not None:
            self._cuda.streamSynchronize(self._local.stream)
            self.release(self._spare)
            self._spare = None
            return self._try(call)
        if is_out_of_memory(error):
            free, total = self._cuda.memGetInfo()
            raise DoesNotFit(Shortage("outside", self.name, 0, total, total - free, task="a library")) from error
        if not is_fatal(error):
            error = self._cause(error)
        if is_fatal(error):
            raise self.failed(error) from error
        raise error

    def _cause(self, error: RuntimeError) -> RuntimeError:
        """Return the driver's error in place of a library's. A fault of an earlier kernel surfaces in the next call, which may be a library's."""
        try:
            self._cuda.streamSynchronize(self._local.stream)
        except RuntimeError as cause:
            return cause
        return error
