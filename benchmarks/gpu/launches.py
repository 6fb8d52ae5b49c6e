"""Launches of kernels on a GPU that computes nothing (`HollowGpu`), with the bytes that each must move and its floating-point operations.

A kernel reads each array behind a pointer to constants once, writes each other array once, and does both with those of `UPDATED`. Arrays of which a
launch touches a part, such as tables of embeddings, are counted in `PARTS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from math import prod
from typing import Any, Final, NamedTuple

from tiles.kernels import DeviceArray, HollowGpu, KernelSource, source_text

SIZES: Final = {"T": 0, "bf16": 2, "float": 4, "int": 4, "double": 8, "u64": 8}
"""Bytes of a number by its type in a source; T has those of the launch."""
UPDATED: Final = {
    "adam": ("m", "v", "master"),
    "add_bias": ("y",),
    "sgd": ("buffer", "master"),
}
"""Arrays that a kernel reads and writes, by kernel."""
PARTS: Final[Mapping[str, Callable[[Mapping[str, Any]], float]]] = {
    "embedding": lambda given: 2 * given["x"].nbytes + given["tokens"].nbytes,
    "embedding_backward": lambda given: given["dy"].nbytes + 2 * given["dy"].size * 4 + given["tokens"].nbytes,
    "add_rows": lambda given: 2 * given["x"].nbytes + 2 * int(given["row"]),
    "logit_gradients": lambda given: 1.5 * given["logits"].nbytes,  # gradients take half of the bytes of logits
    "logits_and_gradients": lambda given: 1.5 * given["logits"].nbytes,  # a row is still in the cache when it is read again
}
"""Bytes of kernels that touch a part of an array, from their arguments by name."""
OF_ROWS: Final = ("normalise", "norm_backward")
"""Kernels of which a block has whole rows of their first array."""
PAIRS: Final = {"flash": 2, "flash_dq": 3, "flash_dkv": 4}
"""Number of products of queries and keys, or of the same size, by kernel of attention."""


class Launch(NamedTuple):
    """A launch.

    Attributes:
        kernel: name of the kernel; "product" for one of cuBLAS.
        source: name of its source; empty for a product.
        blocks, threads: number of blocks, and threads of a block; 0 for a product.
        nbytes: bytes that it must read and write.
        flops: floating-point operations on tensor cores.
        exposed: bytes that a product accesses after its sums: its result, and what they are added to or multiplied by; 0 for other kernels.
        rows: rows of a block, for kernels of which a block has whole rows; 0 for others.
        turns: iterations in which its threads access a row, or search all tokens.
    """

    kernel: str
    source: str
    blocks: int
    threads: int
    nbytes: int
    flops: float
    exposed: int = 0
    rows: float = 0.0
    turns: float = 0.0


class Parameter(NamedTuple):
    """A kernel's parameter: name, bytes of a number (0: of an element), whether it is a pointer and whether to constants, and the struct's fields."""

    name: str
    size: int
    is_pointer: bool
    is_read: bool
    fields: tuple[Parameter, ...]


@cache
def parameters(source: str) -> dict[str, tuple[Parameter, ...]]:
    """Return the parameters of each kernel of a source."""
    text = re.sub(r"//[^\n]*", "", source_text(source).replace("\\\n", " "))
    structs: dict[str, tuple[Parameter, ...]] = {}
    for name, body in re.findall(r"struct\s+(\w+)\s*\{([^{}]*)\};", text):
        lines = [line.split(",") for line in body.split(";") if "*" in line]
        structs[name] = tuple(_parameter(first if number == 0 else f"{first.partition('*')[0]}{one}", {}) for first, *more in lines
                              for number, one in enumerate([first, *more]))  # fmt: skip
    result = {}
    for name, declared in re.findall(r"KERNEL\s+(?:__launch_bounds__\([^)]*\)\s+)?([\w#]+)\s*\(([^)]*)\)", text):
        own = tuple(_parameter(one, structs) for one in declared.split(","))
        for ending in re.findall(r"^FLASH\((\w+),", text, re.MULTILINE) if "##NAME" in name else ("",):
            result[name.replace("##NAME", ending)] = own
    return result


def _parameter(declared: str, structs: Mapping[str, tuple[Parameter, ...]]) -> Parameter:
    """Return a parameter or a field from its declaration, such as ``const T *x``."""
    kind, *_, name = re.findall(r"\w+", declared.replace("const", " ").partition("[")[0])
    return Parameter(name, SIZES.get(kind, 8), "*" in declared, "const" in declared, structs.get(kind, ()))


def nbytes_of(kernel: str, declared: tuple[Parameter, ...], arguments: tuple[Any, ...], itemsize: int) -> int:
    """Return the bytes that a launch must move."""
    if kernel in PARTS:
        return int(PARTS[kernel]({one.name: given for one, given in zip(declared, arguments, strict=True)}))
    total, updated = 0, UPDATED.get(kernel, ())
    for one, given in zip(declared, arguments, strict=True):
        if one.is_pointer:
            total += (1 + (one.name in updated)) * (given.nbytes if isinstance(given, DeviceArray) else 0)
        elif "counts" in (given.dtype.names or ()):  # a table of tiles; totals are small
            counts = given["counts"]
            for field in one.fields:
                if field.name in ("sums", "total", "partial"):
                    continue
                elements = sum(int(count) for count, address in zip(counts, given[field.name], strict=True) if address)
                total += (1 + (field.name in updated)) * elements * (field.size or itemsize)
    return total


class RecordingGpu(HollowGpu):
    """A hollow GPU that notes its products."""

    def __init__(self, memory: int) -> None:
        super().__init__(memory)
        self.launches: list[Launch] = []

    def gemm(self, a: DeviceArray, b: DeviceArray, out: DeviceArray, **options: Any) -> None:
        """Note a product; the bytes of a bias are few."""
        self.launches.append(_product(a, b, out, **options))
        super().gemm(a, b, out, **options)

    def gemm_with_gelu_slope(self, a: DeviceArray, b: DeviceArray, x: DeviceArray, out: DeviceArray, *, trans_b: bool) -> bool:
        """Note a product that reads `x` after its sums."""
        result = super().gemm_with_gelu_slope(a, b, x, out, trans_b=trans_b)
        last = self.launches[-1]
        self.launches[-1] = last._replace(nbytes=last.nbytes + x.nbytes, exposed=last.exposed + x.nbytes)
        return result

    def gemms(self, products: Sequence[tuple[DeviceArray, DeviceArray, DeviceArray]], **options: Any) -> None:
        """Note several products as one launch."""
        single = [_product(*product, **options) for product in products]
        nbytes, flops, exposed = (sum(getattr(launch, name) for launch in single) for name in ("nbytes", "flops", "exposed"))
        self.launches.append(single[0]._replace(nbytes=nbytes, flops=flops, exposed=exposed))
        super().gemms(products, **options)


def _product(a: DeviceArray, b: DeviceArray, out: DeviceArray, *, trans_a: bool, accumulate: bool, **options: Any) -> Launch:
    """Return the launch of a product."""
    (rows, columns), inner = out.shape, a.shape[0] if trans_a else a.shape[1]
    nbytes = rows * inner * a.dtype.itemsize + b.nbytes + (1 + accumulate) * out.nbytes
    return Launch("product", "", 0, 0, nbytes, 2.0 * rows * columns * inner, (1 + accumulate) * out.nbytes)


@contextmanager
def recording(gpu: RecordingGpu) -> Iterator[list[Launch]]:
    """Note all launches on a GPU in a list."""
    start = KernelSource.start

    def noted(
        source: KernelSource, kernel: str, element: Any, *arguments: Any, grid: tuple[int, int, int], threads: int = 256, shared: int = 0
    ) -> None:
        nbytes = nbytes_of(kernel, parameters(source.name)[kernel], arguments, element.itemsize)
        launch = Launch(kernel, source.name, prod(grid), threads, nbytes, _attention_flops(kernel, arguments))
        if kernel == "embedding_backward":
            tokens = arguments[0]
            launch = launch._replace(rows=1, turns=-(-tokens.size // (shared // 4 - threads - 32)))
        if kernel.startswith("flash_dq"):  # eight lanes of its threads have a row, of 8,192 numbers of rows that a block has
            launch = launch._replace(turns=8 * 8192 / int(kernel.split("_")[2]) / threads)
        if kernel in OF_ROWS:
            width = arguments[0].shape[-1]
            launch = launch._replace(rows=arguments[0].size / width / launch.blocks, turns=-(-width * element.itemsize // (16 * threads)))
        gpu.launches.append(launch)
        start(source, kernel, element, *arguments, grid=grid, threads=threads, shared=shared)

    KernelSource.start = noted  # type: ignore[method-assign]
    try:
        yield gpu.launches
    finally:
        KernelSource.start = start  # type: ignore[method-assign]


def _attention_flops(kernel: str, arguments: tuple[Any, ...]) -> float:
    """Return the operations of attention: a causal pair has half of the products of a full one."""
    name = re.match(r"flash(?:_dq|_dkv)?(?=_\d)", kernel)
    if name is None:
        return 0.0
    q, k = arguments[:2]
    pair = next(argument for argument in arguments if getattr(argument, "dtype", None) is not None and "causal" in (argument.dtype.names or ()))
    return PAIRS[name[0]] * 2.0 * q.size * k.shape[1] / (2 if pair["causal"] else 1)


def step_launches(preset: str, batch: int) -> list[Launch]:
    """Return the launches of a recorded step of GPT-2 without dropout, in bf16, with AdamW and clipping, in coarse tiles."""
    from dataclasses import replace
    from tempfile import TemporaryDirectory

    import numpy as np

    from nntask import GPT2, PRESETS, AdamW, ModelTiling
    from scheduler import Runtime
    from tiles.kernels import BF16

    config, gpu = replace(PRESETS[preset], resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0), RecordingGpu(1 << 40)
    with TemporaryDirectory() as folder, Runtime(0, gpus=[gpu], gpu_memory=1 << 39, ram=1 << 30, disk=(folder, 1 << 42)) as runtime:
        model = GPT2(config, ModelTiling().resolve(config, batch, config.n_positions), runtime, seed=1, dtype=BF16)
        optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, max_norm=1.0)
        tokens, targets = model.input_tensors(batch)
        model.train()
        with runtime.record() as step:
            model(tokens, targets).backward()
            optimizer.step()
        for tensor in (tokens, targets):
            tensor.write(np.zeros((batch, config.n_positions), np.int32))
        runtime.wait()
        with recording(gpu) as launches:
            launches.clear()
            step.replay().wait()
    return launches
