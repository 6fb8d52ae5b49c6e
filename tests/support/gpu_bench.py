"""Runs kernels on a device with arrays of the host."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from support.cuda_cases import BF16

from tiles.kernels.catalog import kernel
from tiles.kernels.cuda import launch
from tiles.kernels.cuda.array import DeviceArray
from tiles.kernels.cuda.compiling import source_text

SOURCES = [(name, element) for name in launch.NAMES for element in (("bf16",) if name.startswith("flash") else launch.ELEMENTS.values())]
"""Every source, and every type of elements that it is compiled for."""


def kernels_in(source: str) -> list[str]:
    """Kernels of a source."""
    text = source_text(source)
    variants = re.findall(r"^FLASH\((\w+),", text, re.MULTILINE)
    names = re.findall(r"^ *EXPORT\(([\w#]+)\)", text, re.MULTILINE)
    return [name.replace("##NAME", variant) for name in names for variant in (variants if "##NAME" in name else ("",))]


class KernelBench:
    """Copies arrays to a device, starts a kernel, and copies them back.

    Args:
        device: of `CudaCards.open`.
    """

    def __init__(self, device: Any) -> None:
        self.device, self.stream, self.event = device, device.stream(), device.event()
        device.enter(self.stream)

    def run(self, op: str, arrays: list[np.ndarray], **constants: Any) -> None:
        """Run a kernel; `arrays` hold what it left in them."""
        addresses = [self.device.reserve(max(array.nbytes, 16)) for array in arrays]
        for address, array in zip(addresses, arrays, strict=True):
            self.stream.copy(address, array.ctypes.data, array.nbytes)
        self.wait()
        views = [DeviceArray(address, array.shape, array.dtype) for address, array in zip(addresses, arrays, strict=True)]
        kernel(op, "cuda")(*views, **constants)
        for address, array in zip(addresses, arrays, strict=True):
            self.stream.copy(array.ctypes.data, address, array.nbytes)
        self.wait()
        for address in addresses:
            self.device.release(address)

    def wait(self) -> None:
        """Until everything has been done."""
        self.stream.record(self.event)
        self.event.wait()

    def check(self, op: str, args: list[np.ndarray], constants: dict[str, Any], rtol: float, atol: float) -> float:
        """Compare with the reference in fp64; the largest difference of an output.

        Raises:
            AssertionError: an output is further away than that.
        """
        wide = [arg.astype(np.float64) if arg.dtype in (np.float32, BF16) else arg.copy() for arg in args]
        kernel(op, "reference")(*wide, **constants)
        self.run(op, args, **constants)
        most = 0.0
        for want, found in zip(wide, args, strict=True):
            if found.dtype != np.uint8:  # scratch
                np.testing.assert_allclose(found.astype(want.dtype), want, rtol=rtol, atol=atol, equal_nan=False)
                if want.size and want.dtype.kind == "f":
                    away = np.abs(found.astype(np.float64) - want)
                    most = max(most, float(away[np.isfinite(away)].max(initial=0.0)))
        return most
