"""The commands of `first_card`: each yields (name of a check, function that carries it out and returns what it found). A check that finds something
wrong raises. Here are those of the card, its libraries and its kernels; those that train are in `first_card_trainings`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import common
import first_card_trainings as trainings
import numpy as np
from first_card_here import Check, Here

NEEDED: Final = ("numpy", "ml-dtypes", "numba", "safetensors", "cloudpickle", "dask", "distributed", "psutil", "threadpoolctl", "tyro", "lazy-loader")
USED: Final = (
    "cupy-cuda13x", "cupy-cuda12x", "torch", "transformers", "nvidia-cublas", "nvidia-cuda-nvrtc", "nvidia-nccl-cu13", "cuda-pathfinder",
    "nvidia-cudnn-frontend", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12",
)  # fmt: skip


def machine(here: Here) -> Iterator[Check]:
    """What it runs on."""

    def command(*argv: str) -> str:
        try:
            return subprocess.run(argv, capture_output=True, text=True, timeout=30).stdout.strip()
        except OSError as error:
            return str(error)

    yield "processor", lambda: common.machine() | {"disk_gb": round(shutil.disk_usage(".").free / 1e9), "locked": command("sh", "-c", "ulimit -l")}
    yield "packages", lambda: common.versions(*NEEDED, *USED)
    yield "missing", lambda: [name for name, version in common.versions(*NEEDED).items() if version == "absent"]
    fields = "name,driver_version,memory.total,memory.free,pcie.link.gen.current,pcie.link.width.current,clocks.max.sm,power.limit,compute_mode"
    yield "nvidia-smi", lambda: command("nvidia-smi", f"--query-gpu={fields}", "--format=csv")
    yield "cards", lambda: command("nvidia-smi", "-L")
    yield "python", lambda: {"python": sys.version, "commit": common.commit(), "visible": os.environ.get("CUDA_VISIBLE_DEVICES", "all")}


def cupy(here: Here) -> Iterator[Check]:
    """From the first call to a kernel."""

    def way() -> dict[str, Any]:
        from support.gpu_bench import KernelBench

        (device,) = here.devices()
        x, y = np.arange(7, dtype=np.float32), np.zeros(7, np.float32)
        KernelBench(device).run("scale", [x, y], alpha=2.0)
        assert y.tolist() == (2 * x).tolist(), y
        return {"card": device.name, "tflops": round(device.products_flops / 1e12, 1), "most_shared": device._most_shared}

    yield "card", lambda: str(here.cards.choose(1)[0])
    yield "names", lambda: missing_names(here)
    yield "a kernel", way


def missing_names(here: Here) -> list[str]:
    """Names of CuPy that are called here and that it does not have."""
    from cupy.cuda import driver, nvrtc, runtime

    events = "eventCreateWithFlags eventBlockingSync eventDestroy eventQuery eventSynchronize eventElapsedTime eventRecord"
    streams = "streamWaitEvent streamBeginCapture streamEndCapture streamCaptureModeThreadLocal streamSynchronize check_status"
    devices = "getDeviceCount getDeviceProperties getDevice setDevice deviceGetAttribute cudaDevAttrMaxSharedMemoryPerBlockOptin"
    others = "deviceCanAccessPeer _deviceEnsurePeerAccess deviceGetPCIBusId memcpyDefault memcpyAsync free memGetInfo"
    graphs = "graphInstantiate graphLaunch graphDestroy graphExecDestroy"
    asked = [
        (runtime, f"{events} {streams} {devices} {others} {graphs}"),
        (driver, "launchKernel moduleLoadData moduleGetFunction funcSetAttribute CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"),
        (nvrtc, "createProgram compileProgram getCUBIN destroyProgram getSupportedArchs getVersion"),
    ]
    found = [name for module, names in asked for name in names.split() if not hasattr(module, name)]
    assert not found, f"CuPy has no {', '.join(found)}"
    return found


def sources(here: Here) -> Iterator[Check]:
    """Each source is compiled, and each of its kernels loaded."""
    from support.gpu_bench import SOURCES, kernels_in

    def load(name: str, element: str) -> dict[str, Any]:
        device = here.opened[0] if here.opened else here.devices()[0]
        started, kernels = time.monotonic(), kernels_in(name)
        found = {kernel: device._function(name, element, kernel) for kernel in kernels}
        words: dict[str, Any] = {"seconds": round(time.monotonic() - started, 2), "kernels": len(found)}
        if not here.rehearse:
            spilled = {kernel: device._driver.funcGetAttribute(3, function) for kernel, function in found.items()}  # LOCAL_SIZE_BYTES
            words["local_bytes"] = {kernel: nbytes for kernel, nbytes in spilled.items() if nbytes}
        return words

    for name, element in SOURCES:
        yield f"{name} {element}", lambda name=name, element=element: load(name, element)


def libraries(here: Here) -> Iterator[Check]:
    """What else there is."""

    def nccl() -> str:
        return str(here.cards.nccl(here.cards.choose(1)[0])._library.get_version())

    def torch_cuda() -> dict[str, Any]:
        import torch

        return {"torch": torch.__version__, "cuda": torch.version.cuda, "sees": torch.cuda.device_count()}

    yield "torch", torch_cuda
    if not here.rehearse:
        yield "nccl", nccl


def _kernels(here: Here, short: bool) -> Iterator[Check]:
    from support.cuda_cases import LOOSE, ONLY_FLOATS, all_cases, arguments
    from support.gpu_bench import KernelBench

    benches: list[KernelBench] = []

    def run(op: str, numbers: Sequence[int]) -> dict[str, Any]:
        if not benches:
            benches.append(KernelBench(here.devices()[0]))
        rtol, atol = (1.6e-2, 1.6e-2) if short else (2e-4, LOOSE.get(op, 2e-5))
        away = [benches[0].check(op, *arguments(op, number, short=short), rtol=rtol, atol=atol) for number in numbers]
        return {"cases": len(away), "away": float(f"{max(away):.2e}")}

    cases: dict[str, list[int]] = {}
    for op, number in all_cases(ONLY_FLOATS if short else set()):
        cases.setdefault(op, []).append(number)
    for op, numbers in cases.items():
        yield op, lambda op=op, numbers=numbers: run(op, numbers[:1] if here.rehearse else numbers)


def products(here: Here) -> Iterator[Check]:
    """cuBLAS behind our matmul, cuBLASLt behind products with a bias."""
    from support.cuda_cases import BF16
    from support.gpu_bench import KernelBench
    from support.kernel_cases import Maker

    benches: list[KernelBench] = []

    def run(sizes: tuple[int, int, int], dtype: Any) -> dict[str, Any]:
        if not benches:
            benches.append(KernelBench(here.devices()[0]))
        (rows, inner, columns), make, most = sizes, Maker(np.float32), 0.0
        for trans_a, trans_b, accumulate in ((a, b, c) for a in (False, True) for b in (False, True) for c in (False, True)):
            a, b = make(*((inner, rows) if trans_a else (rows, inner))), make(*((columns, inner) if trans_b else (inner, columns)))
            options = {"trans_a": trans_a, "trans_b": trans_b, "alpha": 0.5, "accumulate": accumulate}
            args = [a.astype(dtype), b.astype(dtype), make(rows, columns)]
            most = max(most, benches[0].check("matmul", args, options, rtol=1e-4, atol=1e-4 * inner**0.5))
        return {"away": float(f"{most:.2e}")}

    def biased(sizes: tuple[int, int, int], dtype: Any) -> dict[str, Any]:
        if not benches:
            benches.append(KernelBench(here.devices()[0]))
        (rows, inner, columns), make, most = sizes, Maker(np.float32), 0.0
        tolerance = 1e-4 * inner**0.5 if dtype == np.float32 else 1.6e-2
        with warnings.catch_warnings(record=True, action="always") as warned:
            for trans_b in (False, True):
                x, w = make(rows, inner), make(*((columns, inner) if trans_b else (inner, columns)))
                args = [array.astype(dtype) for array in (x, w, make(columns), make(rows, columns))]
                most = max(most, benches[0].check("linear_bias", args, {"trans_b": trans_b}, rtol=tolerance, atol=tolerance))
        return {"away": float(f"{most:.2e}"), "refused": [str(one.message) for one in warned]}

    def joined(sizes: tuple[int, int, int], dtype: Any) -> dict[str, Any]:
        if not benches:
            benches.append(KernelBench(here.devices()[0]))
        (rows, inner, columns), make, most = sizes, Maker(np.float32), 0.0
        tolerance = 1e-4 * rows**0.5 if dtype == np.float32 else 1.6e-2 * rows**0.5
        with warnings.catch_warnings(record=True, action="always") as warned:
            for accumulate in (False, True):
                args = [array.astype(dtype) for array in (make(rows, inner), *(make(rows, columns) for _ in range(3)))]
                sums = [make(inner, columns) for _ in range(3)]
                options = {"num_a": 1, "num_b": 3, "trans_a": True, "trans_b": False, "accumulate": accumulate}
                most = max(most, benches[0].check("matmuls", [*args, *sums], options, rtol=tolerance, atol=tolerance))
            args = [array.astype(dtype) for array in (make(rows, inner), make(inner, columns), make(rows, columns), make(rows, columns))]
            tolerance = 1e-4 * inner**0.5 if dtype == np.float32 else 3.2e-2
            options = {"kind": "gelu_new", "trans_b": False}
            most = max(most, benches[0].check("linear_activation_backward", args, options, rtol=tolerance, atol=tolerance))
        return {"away": float(f"{most:.2e}"), "refused": [str(one.message) for one in warned]}

    for sizes in ((1, 1, 1), (33, 65, 127), (256, 512, 384), (1000, 77, 513)):
        for dtype in (np.dtype(np.float32), BF16):
            yield f"{sizes} {dtype}, joined", lambda sizes=sizes, dtype=dtype: joined(sizes, dtype)
            yield f"{sizes} {dtype}", lambda sizes=sizes, dtype=dtype: run(sizes, dtype)
            yield f"{sizes} {dtype}, bias", lambda sizes=sizes, dtype=dtype: biased(sizes, dtype)


def against_torch(here: Here) -> Iterator[Check]:
    """Kernels and PyTorch's twins of them, on the same card."""
    from support.gpu_bench import KernelBench
    from support.torch_twins import TWINS, compare_with_torch

    benches: list[KernelBench] = []

    def run(op: str) -> dict[str, Any]:
        import torch

        if not benches:
            benches.append(KernelBench(here.devices()[0]))
        away = compare_with_torch(op, benches[0].run, "cuda" if torch.cuda.is_available() else "cpu")
        return {"away": float(f"{away:.2e}")}

    for op in TWINS:
        yield op, lambda op=op: run(op)


def programs(here: Here) -> Iterator[Check]:
    """Copies and kernels in each other's way."""
    from support.pressed_programs import NBYTES, program

    from scheduler import Runtime

    def run(seed: int, parts: int) -> dict[str, Any]:
        actions = 12 if here.rehearse else 60
        want = program(Runtime(0, gpus=here.devices(), gpu_memory=1 << 24, ram=1 << 25), seed, actions)
        tight = Runtime(0, gpus=here.devices(parts), gpu_memory=10 * NBYTES, ram=1 << 25)
        assert np.array_equal(program(tight, seed, actions), want), "results depend on memory"
        stats = tight.stats()
        return {"evictions": stats["evictions"]}

    for seed in range(2 if here.rehearse else 12):
        for parts in (1, 2):
            yield f"seed {seed}, {parts} parts", lambda seed=seed, parts=parts: run(seed, parts)


def graphs(here: Here) -> Iterator[Check]:
    """Numbers do not know how kernels are started."""
    kept: dict[str, list[float]] = {}

    def run(name: str, flags: str) -> dict[str, Any]:
        found = here.work.train(here.config("tiny"), f"{here.sizes(4, 1)} {flags}", here.steps(12) + 4)
        kept[name] = found["losses"]
        assert found["losses"] == next(iter(kept.values())), "losses differ from those of the first run"
        return {"seconds a step": found["seconds"], "last loss": found["losses"][-1]}

    for name, flags in (("graphs", ""), ("graphs again", ""), ("none", "--no-graphs"), ("none again", "--no-graphs")):
        yield name, lambda name=name, flags=flags: run(name, flags)


def locked(here: Here) -> Iterator[Check]:
    """cuMemHostRegister."""

    def run(nbytes: int) -> dict[str, Any]:
        from scheduler.storage import HostArena

        (device,) = here.devices()
        arena, address = HostArena(nbytes), device.reserve(nbytes)
        values = np.frombuffer(arena.memory, np.uint8)[:nbytes]
        values[...] = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
        kept, started = values.copy(), time.monotonic()
        is_locked = device.pin(arena.address, nbytes)
        took, stream, event = time.monotonic() - started, device.stream(), device.event()
        stream.copy(address, arena.address, nbytes)
        stream.record(event)
        event.wait()
        values[...] = 0
        stream.copy(arena.address, address, nbytes)
        stream.record(event)
        event.wait()
        assert np.array_equal(values, kept), "bytes changed on the way"
        if is_locked:
            device.unpin(arena.address)
        device.release(address)
        assert is_locked, "the system refuses to lock host memory, so copies are slow: see ulimit -l"
        return {"locked": is_locked, "seconds to lock": round(took, 4)}

    for nbytes in (1 << 16, (64 << 20) - 4096) if not here.rehearse else (1 << 16,):
        yield f"{nbytes} B", lambda nbytes=nbytes: run(nbytes)


def nccl(here: Here) -> Iterator[Check]:
    """One rank."""

    def run() -> str:
        argv = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/gpu/test_gpu_nccl.py"]
        done = subprocess.run(argv, cwd=common.ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-400:]
        return done.stdout.splitlines()[-1]

    if not here.rehearse:
        yield "sends to itself", run


COMMANDS: Final[dict[str, Callable[[Here], Iterator[Check]]]] = {
    "machine": machine,
    "cupy": cupy,
    "sources": sources,
    "libraries": libraries,
    "fp32": lambda here: _kernels(here, short=False),
    "bf16": lambda here: _kernels(here, short=True),
    "products": products,
    "against_torch": against_torch,
    "programs": programs,
    "graphs": graphs,
    "locked": locked,
    "nccl": nccl,
    "tiny": trainings.tiny,
    "small": trainings.small,
    "small_beyond": lambda here: trainings.beyond(here, "gpt2", 16, 4),
    "xl_beyond": lambda here: trainings.beyond(here, "gpt2-xl", 32, 4),
    "copies": trainings.copies,
    "small_speed": lambda here: trainings.speed(here, "gpt2", 16),
    "host": trainings.host,
    "xl_speed": lambda here: trainings.speed(here, "gpt2-xl", 4),
    "kernel_speed": trainings.kernel_speed,
    "small_profile": lambda here: trainings.profile(here, "gpt2", 16),
    "xl_profile": lambda here: trainings.profile(here, "gpt2-xl", 4),
    "attention": trainings.attention,
}
