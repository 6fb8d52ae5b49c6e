"""The GPUs of a run, from its flags: the cards, the number of parts and the memory of each, and the devices themselves.

If GPUs are used, every task with a CUDA kernel runs on them only, so a loss does not depend on which worker was free. CPU workers run the other
tasks; with GPUs, there are CPU workers only if `--ncpu` asks for them. `--sched auto@mixed` lets both share tasks.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cache
from threading import Lock
from typing import Any, Final

from scheduler import Codelet, Shortage, usable_cores
from scheduler import DoesNotFit as NoRoom
from scheduler.drivers import CONTEXT_NBYTES, INSTALL, CupyNccl, Gpu, GpuFacts, NoGpu, choose_gpus, connect, name_of
from scheduler.machine import MIXED_POLICIES, RecordedTask

from ..errors import DoesNotFit, Setting, UsageError
from ..io.units import format_size
from .machine_request import DeviceSize, MachineRequest

ALL_GPUS: Final = -1
"""Value of --ngpu for all GPUs, of which there must be one."""
DEFAULT_SHARE: Final = 0.9
"""Share of the free memory of a card, apart from `CONTEXT_NBYTES` for each of its parts."""
_LEAST_NBYTES: Final = 1 << 20
"""Least budget of a part of a card."""


class CudaCards:
    """Source of GPUs: those of this machine that CUDA shows."""

    @staticmethod
    @cache
    def _choose(count: int | None) -> tuple[GpuFacts, ...]:
        return tuple(choose_gpus(count))

    def choose(self, count: int | None) -> list[GpuFacts]:
        """Return the first `count` cards; all cards for None.

        Their state is that of the first call, so that memory which a run takes later does not change its budgets.

        Raises:
            NoGpu: there are fewer.
        """
        return list(self._choose(count))

    def open(self, facts: Sequence[tuple[GpuFacts, int | None]], *, tf32: bool, dtype: str) -> list[Gpu]:
        """Open devices of (card, part), which can access each other's memory if the hardware lets them."""
        from tiles.kernels import CudaDevice

        devices: list[Any] = []
        with ExitStack() as unused:
            unused.callback(close_gpus, devices)
            for card, part in facts:
                devices.append(CudaDevice(card, part, tf32=tf32))
                devices[-1].measure_products(dtype)
            connect(devices)
            unused.pop_all()
        return devices

    def nccl(self, facts: GpuFacts) -> CupyNccl:
        """Return NCCL for a card.

        Raises:
            NoGpu: NCCL is not installed.
        """
        return CupyNccl(facts)


def close_gpus(gpus: Sequence[Gpu]) -> None:
    """Free the resources of devices; a device that has failed is ignored."""
    for gpu in gpus:
        with suppress(RuntimeError):
            gpu.close()


cards = CudaCards()
"""Source of GPUs; tests replace it."""


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """GPUs that a run will use.

    Args:
        devices: (card, number of the part; None for a whole card) of each memory node.
        nbytes: budget of each device.
        why_none: reason why there are none, if CuPy is installed and no flag asks for GPUs.
        has_cudnn: whether cuDNN may compute attention; its workspace is not part of `nbytes`.
    """

    devices: tuple[tuple[GpuFacts, int | None], ...]
    nbytes: int
    why_none: str = ""
    has_cudnn: bool = False

    @property
    def names(self) -> list[str]:
        """Names of the GPUs, one for each node."""
        return [name_of(card, part) for card, part in self.devices]

    @property
    def device_class(self) -> str:
        """Key of the tile table: the kind of device that computes."""
        return "cuda" if self.devices else "cpu"


NO_GPUS: Final = GpuPlan((), 0)


def gpus_of(request: MachineRequest, dtype: str) -> GpuPlan:
    """Return the GPUs that flags ask for.

    Args:
        dtype: value of --dtype.

    Raises:
        UsageError: the flags ask for GPUs that are not available.
        DoesNotFit: the budget is above the memory of a card.
    """
    if request.num_gpus == 0 or (request.num_gpus is None and request.num_simulated):
        return NO_GPUS
    must = request.num_gpus is not None
    try:
        chosen = cards.choose(None if request.num_gpus == ALL_GPUS else request.num_gpus)
        if not chosen and must:
            missing = NoGpu("CuPy, through which GPUs are used, is not installed", INSTALL)
            asked = Setting("--ngpu", request.num_gpus)
            clause, remedy = f"needs a GPU, and {missing.fact}", f"drop {{0}}, or {missing.remedy}"
            raise UsageError(clause, remedy, flag=asked.flag, value=asked.value, others=(asked,)) from missing
    except NoGpu as error:
        if error.requested is not None:
            raise UsageError(error.fact, error.remedy, flag="--ngpu") from error
        remedy = ", or ".join(filter(None, (error.remedy, "compute on the CPU with --ngpu 0")))
        if must:
            raise UsageError(error.fact, remedy) from error
        return GpuPlan((), 0, f"no GPU is used: {error.fact}; {remedy}")
    if not chosen:
        return NO_GPUS
    if dtype == "fp64":
        return GpuPlan((), 0, "no GPU is used: --dtype fp64 has no CUDA kernels")
    split = request.num_partitions
    devices = tuple((card, None if split == 1 else part) for card in chosen for part in range(split))
    return GpuPlan(devices, _budget(request.device, chosen, split))


def check_links(request: MachineRequest) -> None:
    """Check that links with a rate have a simulated device.

    Raises:
        UsageError: there are no simulated devices.
    """
    if request.link_text and not request.num_simulated:
        value = f"0@{request.link_text}"
        raise UsageError("has a rate of links and no device", f"use --sim-gpu 1@{request.link_text}", flag="--sim-gpu", value=value)


def check_devices(request: MachineRequest, gpus: GpuPlan) -> None:
    """Check that flags that need a device have one.

    Raises:
        UsageError: a flag has none.
    """
    if request.update_on == "cpu":
        _check_update(request, gpus)
    check_sharing(request, has_devices=bool(gpus.devices or request.num_simulated))
    if gpus.devices:
        return
    if request.num_cpu == 0 and not request.num_simulated:
        raise UsageError("needs a device: add --sim-gpu 1, or use --ncpu 1", flag="--ncpu", value=0)
    size = request.device
    flags = {
        "--ngpu": f"{request.num_gpus or 0}x{request.num_partitions}" if request.num_partitions > 1 else request.num_gpus or "",
        "--gpu-memory": size.text if size is not None and not request.num_simulated else "",
    }
    for flag, value in flags.items():
        if value:
            simulated = "add --sim-gpu 1, or " if flag == "--gpu-memory" and size is not None and size.share is None else ""
            raise UsageError("is about GPUs, and none is used", f"{simulated}drop it", flag=flag, value=value)


def _check_update(request: MachineRequest, gpus: GpuPlan) -> None:
    """Check that --update-on cpu has devices that compute the rest, and CPU workers.

    Raises:
        UsageError: one of them is missing.
    """
    if not (gpus.devices or request.num_simulated):
        raise UsageError(
            "leaves all but updates to devices, and there is none", "use --update-on device, or add --sim-gpu 1", flag="--update-on", value="cpu"
        )
    check_updaters(request.num_cpu)


def check_sharing(request: MachineRequest, *, has_devices: bool) -> None:
    """Check that --sched POLICY@mixed or @pinned has devices and CPU workers that may share tasks, and a policy that compares them.

    Raises:
        UsageError: one of them is missing.
    """
    if not request.sharing:
        return
    value = f"{request.sched}@{request.sharing}"
    if request.sched not in ("auto", *MIXED_POLICIES):
        raise UsageError(
            "compares no kinds of workers", f"use --sched auto@{request.sharing}, or {', '.join(MIXED_POLICIES)}", flag="--sched", value=value
        )
    if not has_devices:
        raise UsageError("shares tasks with devices, and there is none", "use --sched auto, or add --sim-gpu 1", flag="--sched", value=value)
    if request.num_cpu == 0:
        others = (Setting("--ncpu", 0),)
        raise UsageError("needs CPU workers, and {0} leaves none", "use --ncpu 1, or --sched auto", flag="--sched", value=value, others=others)
    if request.update_on != "device":
        others = (Setting("--update-on", request.update_on),)
        raise UsageError(
            "lets CPU workers run all tasks, and {0} only updates",
            "use --update-on device, or --sched auto",
            flag="--sched",
            value=value,
            others=others,
        )


def check_updaters(num_cpu: int | None) -> None:
    """Check that --update-on cpu has CPU workers.

    Raises:
        UsageError: --ncpu leaves none.
    """
    if num_cpu == 0:
        others = (Setting("--ncpu", 0),)
        raise UsageError(
            "needs CPU workers, and {0} leaves none", "use --ncpu 1, or --update-on device", flag="--update-on", value="cpu", others=others
        )


def _budget(size: DeviceSize | None, found: Sequence[GpuFacts], split: int) -> int:
    """Return the bytes of each part.

    Raises:
        DoesNotFit: a card has less.
    """
    least = min(found, key=lambda card: card.free_nbytes)
    free = least.free_nbytes // split - CONTEXT_NBYTES
    node = f"cuda:{least.index}"
    if free < _LEAST_NBYTES:
        raise DoesNotFit(
            f"GPU {least.index} ({least.name}) has {format_size(least.free_nbytes)} of {format_size(least.nbytes)} free, too little for {split} "
            f"part{'' if split == 1 else 's'} of it",
            "end other programs that use the card, or use --ngpu 0",
            shortage=Shortage("reserve", node, split * (CONTEXT_NBYTES + _LEAST_NBYTES), least.free_nbytes),
        )
    if size is None:
        return int(DEFAULT_SHARE * free)
    nbytes = size.nbytes if size.share is None else int(size.share * min(card.nbytes for card in found)) // split
    if nbytes > free:
        raise DoesNotFit(
            f"is {format_size(nbytes)} a part, above the {free:,} B that GPU {least.index} ({least.name}) has free for "
            f"each of its {split} part{'' if split == 1 else 's'} after {format_size(CONTEXT_NBYTES)} for CUDA itself",
            "lower it, or end other programs that use the card",
            flag="--gpu-memory",
            value=size.text,
            shortage=Shortage("reserve", node, nbytes, free),
        )
    return nbytes


def open_gpus(plan: GpuPlan, dtype: str) -> list[Gpu]:
    """Open the devices of a plan.

    Args:
        dtype: value of --dtype.

    Raises:
        DoesNotFit: a card did not give the memory that CUDA needs for itself.
        UsageError: a package that CuPy needs is missing, or a card does not work.
    """
    if not plan.devices:
        return []
    try:
        with ExitStack() as unused:
            devices: list[Any] = cards.open(plan.devices, tf32=dtype == "tf32", dtype=dtype)
            unused.callback(close_gpus, devices)
            tell = _told_once()
            for device in devices if plan.has_cudnn else ():
                device.open_attention(tell)
            unused.pop_all()
        return devices
    except NoRoom as error:
        raise DoesNotFit(error.fact, "lower --gpu-memory, or end other programs that use the card", shortage=error.shortage) from error
    except MemoryError as error:
        raise DoesNotFit(str(error), shortage=Shortage("outside", plan.names[0], 0, plan.nbytes, task="CUDA", detail=str(error))) from error
    except ImportError as error:
        raise UsageError(str(error)) from error
    except RuntimeError as error:  # an error of CUDA or cuBLAS, or a source that does not compile
        raise UsageError(
            f"{' and '.join(plan.names)} could not be opened ({error})",
            "see in nvidia-smi whether another program has it, or compute on the CPU with --ngpu 0",
        ) from error


def _told_once() -> Callable[[str], None]:
    """Return a function that receives sentences of all devices of a run, and prints each once."""
    printed, lock = set[str](), Lock()

    def tell(sentence: str) -> None:
        with lock:
            if sentence not in printed:
                printed.add(sentence)
                print(f"nntask: {sentence}", file=sys.stderr)

    return tell


def check_fallbacks(tasks: Iterable[RecordedTask], gpus: GpuPlan, num_cpu: int) -> dict[str, int]:
    """Return name -> number of a step's tasks that run on the CPU although there are GPUs, because their codelets have no CUDA kernel.

    Raises:
        UsageError: there are such tasks, and no CPU worker can run them.
    """
    if not gpus.devices:
        return {}
    counts = dict(
        Counter(task.name for task in tasks if "cuda" not in task.kinds and not (isinstance(task.codelet, Codelet) and task.codelet.cpu_only))
    )
    names = ", ".join(sorted(counts))
    if counts and not num_cpu:
        raise UsageError(f"tasks of {names} have no CUDA kernel, and there is no CPU worker to run them", "add --ncpu 1, or use --ngpu 0")
    return counts


def open_nccl(gpus: GpuPlan) -> CupyNccl:
    """Return NCCL for the first of the GPUs.

    Raises:
        UsageError: there is no GPU, or NCCL is not installed.
    """
    if not gpus.devices:
        why = gpus.why_none or "no GPU is used, since CuPy is not installed"
        raise UsageError(f"sends from a GPU, and {why}", "use --transport dask", flag="--transport", value="nccl")
    try:
        return cards.nccl(gpus.devices[0][0])
    except NoGpu as error:
        raise UsageError(error.fact, ", or ".join(filter(None, (error.remedy, "use --transport dask")))) from error


def without_nccl(gpus: GpuPlan, split: int, taken: int) -> GpuPlan:
    """Return the GPUs with the budget that remains after NCCL has taken `taken` bytes of the first card. Every part of every card loses the same,
    because all have one budget.

    Args:
        split: number of parts of each card.

    Raises:
        DoesNotFit: no budget remains.
    """
    left = gpus.nbytes - -(-taken // split)
    if left <= 0:
        raise DoesNotFit(
            f"has taken {format_size(taken)} of {gpus.names[0]}, and --gpu-memory is {format_size(gpus.nbytes)}",
            "raise it, use fewer nodes, or use --transport dask",
            flag="--transport",
            value="nccl",
            shortage=Shortage("reserve", gpus.names[0], taken, gpus.nbytes),
        )
    return replace(gpus, nbytes=left)


def gpu_peak(gpus: Sequence[Any]) -> float:
    """Return the flop/s of matrix products on all GPUs, as measured at their opening; 0 if not measured. Parts of a card share its rate."""
    return float(sum({getattr(gpu, "index", number): getattr(gpu, "products_flops", 0.0) for number, gpu in enumerate(gpus)}.values()))


def num_cpu_workers(asked: int | None, gpus: GpuPlan) -> int:
    """Return the number of CPU workers: `asked`; by default one per core, or none if GPUs compute."""
    if asked is not None:
        return asked
    return 0 if gpus.devices else usable_cores()
