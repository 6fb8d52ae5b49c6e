"""The commands of `first_card`: each yields (name of a check, function that carries it out and returns what it found).

A check that finds something wrong raises. Trainings run `nntask train` in this process. In a rehearsal the card is that of
`tests/support/strict_cuda`, models are tiny, and figures of speed mean nothing.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import bench
import common

Check = tuple[str, Callable[[], Any]]
NEEDED: Final = ("numpy", "ml-dtypes", "numba", "safetensors", "cloudpickle", "dask", "distributed", "psutil", "threadpoolctl", "tyro", "lazy-loader")
USED: Final = (
    "cupy-cuda13x", "cupy-cuda12x", "torch", "transformers", "nvidia-cublas", "nvidia-cuda-nvrtc", "nvidia-nccl-cu13", "cuda-pathfinder",
    "nvidia-cudnn-frontend", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12",
)  # fmt: skip
WHOLE: Final = "--seq-tile=-1 --embd-tile=-1 --inner-tile=-1 --head-tile=-1 --vocab-tile=-1 --ngpu=1"
CPU_LOSSES: Final = 1e-3
"""Most that losses of the CPU and the card differ by, relative."""


class Work(bench.Work):
    """Trainings in this process, whose cards may be emulated."""

    def run(self, argv: Sequence[str]) -> tuple[int, str]:
        """Run `nntask`; its exit code and what it said."""
        from wrappers.cli import main

        said, before = io.StringIO(), Path.cwd()
        os.chdir(self.folder)
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                code = main(list(argv))
        finally:
            os.chdir(before)
        return code, said.getvalue()


@dataclass
class Here:
    """What a command has: cards, a folder, trainings.

    Attributes:
        rehearse: whether the card is emulated.
    """

    rehearse: bool
    work: Work
    cuda: Any = None
    rehearsed: Any = None
    opened: list[Any] = field(default_factory=list)

    def devices(self, count: int = 1, *, tf32: bool = False) -> list[Any]:
        """Parts of the first card, or all of it."""
        (card,) = self.cards.choose(1)
        parts: list[Any] = self.cards.open([(card, part if count > 1 else None) for part in range(count)], tf32=tf32, dtype="fp32")
        self.opened += parts
        return parts

    def look(self) -> None:
        """Look at what a rehearsal's libraries have refused.

        Raises:
            AssertionError: there is something.
        """
        assert not (self.cuda and self.cuda.found), f"CUDA would refuse: {self.cuda.found[:3]}"

    @property
    def cards(self) -> Any:
        """Where devices come from."""
        from nntask.hardware import cards

        return self.rehearsed or cards

    def is_lost(self) -> bool:
        """Whether the card answers nothing more in this process."""
        try:
            if self.opened:
                self.opened[0]._cuda.setDevice(0)
                self.opened[0]._cuda.deviceSynchronize()
        except (RuntimeError, AttributeError) as error:
            return isinstance(error, RuntimeError)
        return False

    def config(self, size: str) -> Any:
        """A model without dropout."""
        found = bench.gpt2("tiny" if self.rehearse else size)
        return replace(found, vocab_size=60, n_positions=8, n_embd=8, n_layer=1, n_head=2) if self.rehearse else found

    def steps(self, count: int) -> int:
        """Steps of a training."""
        return min(count, 3) if self.rehearse else count

    def sizes(self, batch: int, minibatch: int) -> str:
        """Flags of a batch, and whole tiles."""
        if self.rehearse:
            batch, minibatch = 2, 1
        return f"{WHOLE} --batch={batch} --minibatch={minibatch} --minibatch-tile={minibatch}"


@contextlib.contextmanager
def opened(rehearse: bool) -> Iterator[Here]:
    """A folder, and cards."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        here = Here(rehearse, Work(Path(folder), 0.0))
        if rehearse:
            from support.cuda_emulator import build_folder
            from support.strict_cuda import rehearsed

            here.cuda, here.rehearsed = stack.enter_context(rehearsed(build_folder(common.ROOT / "build" / "emulated"), Path(folder) / "code"))
        yield here


def near(found: Sequence[float], want: Sequence[float], relative: float) -> float:
    """The largest relative difference.

    Raises:
        AssertionError: it is above `relative`.
    """
    away = max(abs(a / b - 1) for a, b in zip(found, want, strict=True))
    assert away <= relative, f"{away:.2e} apart, at most {relative:.0e} is rounding: {list(found)[:6]} and {list(want)[:6]}"
    return away


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
    """cuBLAS behind our matmul."""
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

    for sizes in ((1, 1, 1), (33, 65, 127), (256, 512, 384), (1000, 77, 513)):
        for dtype in (np.dtype(np.float32), BF16):
            yield f"{sizes} {dtype}", lambda sizes=sizes, dtype=dtype: run(sizes, dtype)


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


def tiny(here: Here) -> Iterator[Check]:
    """A little GPT-2 on Python's library, or random tokens in a rehearsal."""
    data = "" if here.rehearse else "--dataset=stdlib"
    kept: dict[str, list[float]] = {}

    def train(config: Any, flags: str) -> list[float]:
        found: list[float] = here.work.train(config, flags, here.steps(12), data)["losses"]
        return found

    def run(name: str) -> dict[str, Any]:
        config, sizes = here.config("tiny"), here.sizes(4, 2)
        if name == "dropout":
            config = replace(config, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
        key = "dropout" if name == "dropout" else "plain"
        if key not in kept:
            kept[key] = train(config, f"{sizes.replace('--ngpu=1', '--ngpu=0 --ncpu=1')} --dtype=fp32")
        dtype, band = {"tf32": ("tf32", 5e-3), "bf16": ("bf16", 2e-2)}.get(name, ("fp32", CPU_LOSSES))
        away = near(train(config, f"{sizes} --dtype={dtype}"), kept[key], band)
        return {"away": float(f"{away:.2e}"), "last loss": kept[key][-1]}

    for name in ("fp32", "dropout", "tf32", "bf16"):
        yield name, lambda name=name: run(name)


def small(here: Here) -> Iterator[Check]:
    """Two sequences a step are enough to be wrong."""

    def run() -> dict[str, Any]:
        config, sizes = here.config("gpt2"), here.sizes(2, 2)
        workers = 1 if here.rehearse else min(8, common.usable_cores())
        ours = here.work.train(config, f"{sizes} --dtype=fp32", here.steps(4))
        want = here.work.train(config, f"{sizes.replace('--ngpu=1', f'--ngpu=0 --ncpu={workers}')} --dtype=fp32", here.steps(4))
        away = near(ours["losses"], want["losses"], CPU_LOSSES)
        return {"away": float(f"{away:.2e}"), "losses": ours["losses"], "seconds a step": ours["seconds"], "the CPU's": want["seconds"]}

    yield "fp32", run


def _beyond(here: Here, size: str, batch: int, minibatch: int) -> Iterator[Check]:
    kept: dict[str, Any] = {}

    def run(name: str, share: float) -> dict[str, Any]:
        flags = f"{here.sizes(batch, minibatch)} --dtype=bf16 --recompute=block"
        if name != "whole":
            assert kept, "the run with all memory has failed, so there is nothing to compare with"
            nbytes = max(int(kept["peak_bytes"]["cuda:0"] * share), 1 << 17 if here.rehearse else 1 << 30)
            flags += f" --gpu-memory={nbytes}B"
        found = here.work.train(here.config(size), flags, here.steps(6))
        if not kept:
            kept.update(found)
        assert found["losses"] == kept["losses"], "losses depend on memory"
        words = {
            "tokens/s": round(found["tokens_per_second"]),
            "of the rate in memory": round(found["tokens_per_second"] / kept["tokens_per_second"], 3),
        }
        return words | {"peak bytes": found["peak_bytes"]["cuda:0"], "moved a step": found["moved_bytes_per_step"]}

    for name, share in (("whole", 1.0), ("half", 0.5), ("quarter", 0.25)):
        yield name, lambda name=name, share=share: run(name, share)


def copies(here: Here) -> Iterator[Check]:
    """`bench.copies`."""
    if not here.rehearse:
        yield "tiles", lambda: bench.copies(here.work, "")


def _speed(here: Here, size: str, minibatch: int) -> Iterator[Check]:
    config = here.config(size)

    def ours() -> dict[str, Any]:
        found = here.work.train(config, f"{here.sizes(16, minibatch)} --dtype=bf16", here.steps(14))
        peak = bench.nominal_peak(here.cards.choose(1)[0].name)
        mfu = found["tokens_per_second"] * common.model_flops(config, config.n_positions) / config.n_positions / peak if peak else None
        return {"tokens/s": round(found["tokens_per_second"]), "MFU": mfu and round(mfu, 3), "tasks a step": found["tasks_per_step"]}

    def peer(kind: str) -> dict[str, Any]:
        batch, steps = (2, 2) if here.rehearse else (16, 12)
        found = bench.peer(kind, config, steps, batch, min(batch, minibatch), 150.0, device="cpu" if here.rehearse else "cuda")
        return {"tokens/s": round(found["tokens_per_second"])} if found else {"failed": "this Python has no torch with CUDA"}

    yield "ours", ours
    yield "torch eager", lambda: peer("eager")
    if not here.rehearse:  # a compiler of its own
        yield "torch compiled", lambda: peer("compiled")


def host(here: Here) -> Iterator[Check]:
    """A model so small that the card waits for the host: the step over its tasks is the host's time."""

    def run(flags: str) -> dict[str, Any]:
        config = here.config("tiny") if here.rehearse else replace(bench.gpt2("tiny"), n_layer=24)
        found = here.work.train(config, f"{here.sizes(4, 1)} --dtype=bf16 {flags}", here.steps(30))
        return {"us a task": round(1e6 * found["seconds"] / found["tasks_per_step"], 2), "tasks a step": found["tasks_per_step"]}

    yield "graphs", lambda: run("")
    yield "no graphs", lambda: run("--no-graphs")


def _profile(here: Here, size: str, minibatch: int) -> Iterator[Check]:
    def run(graphs: str) -> dict[str, Any]:
        number = here.work.count + 1
        steps = here.steps(8)
        flags = f"{here.sizes(16, minibatch)} --dtype=bf16 {graphs} --trace=trace{number}.json --trace-steps={steps - 1}:{steps}"
        found = here.work.train(here.config(size), flags, steps)
        events = json.loads((here.work.folder / f"trace{number}.json").read_text())["traceEvents"]
        spent: Counter[str] = Counter()
        for event in events:
            if event.get("ph") == "X" and event["pid"] == 1:
                spent[event["name"]] += event["dur"]
        whole = sum(spent.values()) or 1.0
        rows = {name: f"{1e-3 * us / 2:.2f} ms, {us / whole:.0%}" for name, us in spent.most_common(14)}
        return {"seconds a step": found["seconds"], "busy a step": round(1e-6 * whole / 2, 4)} | rows

    yield "single tasks", lambda: run("--no-graphs")
    yield "fused", lambda: run("")


def attention(here: Here) -> Iterator[Check]:
    """One layer's attention, forward and backward, beside cuDNN's and scaled_dot_product_attention; and what a training chooses by itself."""
    from attention_speed import cudnn_seconds, ours_seconds, torch_seconds

    for length, size in ((8, 64),) if here.rehearse else ((1024, 64), (4096, 64), (1024, 128), (4096, 128)):

        def run(length: int = length, size: int = size) -> dict[str, Any]:
            heads = 1 if here.rehearse else 12
            ours = ours_seconds(here.devices()[0], 1 if here.rehearse else 8, length, heads, size)
            words = {name: f"{1e3 * seconds:.3f} ms" for name, seconds in ours.items()}
            for name, value in cudnn_seconds(here.devices()[0], 1 if here.rehearse else 8, length, heads, size).items():
                words[f"cuDNN {name}"] = f"{1e3 * value:.3f} ms" if name.endswith("ward") else str(value)
            return words | {f"torch {name}": f"{1e3 * seconds:.3f} ms" for name, seconds in torch_seconds(8, length, heads, size).items()}

        yield f"{length} x {size}", run

    def auto() -> dict[str, Any]:
        found = here.work.train(here.config("gpt2"), f"{here.sizes(16, 8)} --dtype=bf16 --gpu-attention=auto", here.steps(12))
        plan = json.loads((here.work.folder / f"run{here.work.count}" / "plan.json").read_text())
        return {**plan["gpu_attention"], "tokens/s": round(found["tokens_per_second"])}

    yield "the choice of --gpu-attention auto", auto


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
    "tiny": tiny,
    "small": small,
    "small_beyond": lambda here: _beyond(here, "gpt2", 16, 4),
    "xl_beyond": lambda here: _beyond(here, "gpt2-xl", 32, 4),
    "copies": copies,
    "small_speed": lambda here: _speed(here, "gpt2", 16),
    "host": host,
    "xl_speed": lambda here: _speed(here, "gpt2-xl", 4),
    "small_profile": lambda here: _profile(here, "gpt2", 16),
    "xl_profile": lambda here: _profile(here, "gpt2-xl", 4),
    "attention": attention,
}
