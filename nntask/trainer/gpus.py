"""The GPUs of a run, from its flags: which cards, in how many parts, with how much memory of each; and the devices themselves.

Where GPUs are used, everything that has a CUDA kernel runs on them and nowhere else, so a loss does not depend on who was free; workers of the CPU
run what has none, and there are none unless `--ncpu` asks for them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Protocol

from scheduler import usable_cores
from scheduler.core.steps import RecordedTask
from scheduler.drivers.cuda_cupy import CONTEXT_NBYTES, INSTALL, GpuFacts, NoGpu, choose_gpus, connect, name_of
from scheduler.drivers.gpu import Gpu
from scheduler.drivers.nccl import CupyNccl, Nccl

from ..errors import DoesNotFit, UsageError
from ..sizes import format_size, parse_size
from .settings import MachineSettings, TrainSettings

DEFAULT_SHARE: Final = 0.9
"""Of what is free on a card, besides `CONTEXT_NBYTES` for each of its parts."""
_FRACTION: Final = re.compile(r"\s*(0?\.\d+|1\.0*|0\.\d*)\s*")


class Cards(Protocol):
    """Where GPUs come from."""

    def choose(self, count: int | None) -> list[GpuFacts]:
        """The first so many cards, None for all there are.

        Raises:
            NoGpu: they are not to be had.
        """

    def open(self, facts: Sequence[tuple[GpuFacts, int | None]], *, tf32: bool, dtype: str) -> list[Gpu]:
        """Devices of (card, part)."""

    def nccl(self, facts: GpuFacts) -> Nccl:
        """NCCL for a card.

        Raises:
            NoGpu: it is not installed.
        """


class CudaCards:
    """Real ones."""

    @staticmethod
    @cache
    def _choose(count: int | None) -> tuple[GpuFacts, ...]:
        return tuple(choose_gpus(count))

    def choose(self, count: int | None) -> list[GpuFacts]:
        """The first so many cards, as they were when first looked at: what a run takes of them later does not change its budgets."""
        return list(self._choose(count))

    def open(self, facts: Sequence[tuple[GpuFacts, int | None]], *, tf32: bool, dtype: str) -> list[Gpu]:
        """Devices, which can reach each other's memory where the hardware lets them."""
        from tiles.kernels.cuda.device import CudaDevice

        devices: list[Any] = []
        with ExitStack() as unused:
            unused.callback(close_gpus, devices)
            for card, part in facts:
                devices.append(CudaDevice(card, part, tf32=tf32))
                devices[-1].measure_products(dtype)
            connect(devices)
            unused.pop_all()
        return devices

    def nccl(self, facts: GpuFacts) -> Nccl:
        """CuPy's."""
        return CupyNccl(facts)


def close_gpus(gpus: Sequence[Gpu]) -> None:
    """Give back what they took; one that has failed takes nothing back."""
    for gpu in gpus:
        with suppress(RuntimeError):
            gpu.close()


cards: Cards = CudaCards()
"""Tests put others here."""


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """GPUs that a run will use.

    Args:
        parts: (card, number of the part, or None where a card is whole) of each memory node.
        nbytes: budget of each.
    """

    parts: tuple[tuple[GpuFacts, int | None], ...]
    nbytes: int

    @property
    def names(self) -> list[str]:
        """Of the GPUs, one for each node."""
        return [name_of(card, part) for card, part in self.parts]


NO_GPUS: Final = GpuPlan((), 0)


def gpus_of(settings: TrainSettings) -> tuple[GpuPlan, str]:
    """The GPUs that flags ask for, and why there are none although CuPy is installed, if that is so and nobody has asked for any.

    Raises:
        UsageError: GPUs were asked for that are not to be had.
        DoesNotFit: the budget is above what a card has.
    """
    resources = settings.resources
    if resources.ngpu == 0 or resources.restrict == "cpu" or (resources.ngpu is None and resources.sim_gpu):
        return NO_GPUS, ""
    must = resources.ngpu is not None or resources.restrict == "cuda"
    try:
        found = cards.choose(resources.ngpu)
        if not found and must:
            raise NoGpu(f"--restrict=cuda needs a GPU, and CuPy, through which GPUs are used, is not installed; drop --restrict=cuda, or {INSTALL}")
    except NoGpu as error:
        if must:
            raise UsageError(str(error)) from error
        return NO_GPUS, f"no GPU is used: {error}"
    if not found:
        return NO_GPUS, ""
    if settings.model.dtype == "fp64":
        return NO_GPUS, "no GPU is used: --dtype fp64 has no CUDA kernels"
    split = resources.split_gpu
    parts = tuple((card, None if split == 1 else part) for card in found for part in range(split))
    return GpuPlan(parts, _budget(resources.gpu_memory, found, split)), ""


def device_class(settings: TrainSettings) -> str:
    """Key of the tile table: what computes."""
    return "cuda" if gpus_of(settings)[0].parts else "cpu"


def _budget(text: str, found: Sequence[GpuFacts], split: int) -> int:
    """Bytes of each part.

    Raises:
        DoesNotFit: a card has less.
        UsageError: `text` is neither a size nor a fraction.
    """
    least = min(found, key=lambda card: card.free_nbytes)
    room = least.free_nbytes // split - CONTEXT_NBYTES
    if room < 1 << 20:
        raise DoesNotFit(
            f"GPU {least.index} ({least.name}) has {format_size(least.free_nbytes)} of {format_size(least.nbytes)} free, too little for {split} "
            f"part{'' if split == 1 else 's'} of it; end what else uses the card, or use --ngpu 0"
        )
    if not text:
        return int(DEFAULT_SHARE * room)
    share = fraction_of(text)
    nbytes = int(share * min(card.nbytes for card in found)) // split if share is not None else parse_size(text, "--gpu-memory")
    if nbytes > room:
        raise DoesNotFit(
            f"--gpu-memory {text} is {format_size(nbytes)} a part, above the {room:,} B that GPU {least.index} ({least.name}) has free for "
            f"each of its {split} part{'' if split == 1 else 's'} beside {format_size(CONTEXT_NBYTES)} for CUDA itself; lower it, or end what else "
            "uses the card"
        )
    return nbytes


def fraction_of(text: str) -> float | None:
    """The share of a card that a text such as 0.25 stands for; None where it is a size.

    Raises:
        UsageError: it is no share at all.
    """
    if _FRACTION.fullmatch(text) is None:
        return None
    share = float(text)
    if not 0 < share <= 1:
        raise UsageError(f"--gpu-memory must be a size, or a fraction of the card above 0 and up to 1.0, got {text}; for example 0.5")
    return share


def open_gpus(plan: GpuPlan, dtype: str) -> list[Gpu]:
    """The devices of a plan.

    Args:
        dtype: value of --dtype.

    Raises:
        DoesNotFit: a card did not give the memory that CUDA needs for itself.
        UsageError: what CuPy needs is missing, or a card does not work.
    """
    if not plan.parts:
        return []
    try:
        return cards.open(plan.parts, tf32=dtype == "tf32", dtype=dtype)
    except MemoryError as error:
        raise DoesNotFit(str(error)) from error
    except ImportError as error:
        raise UsageError(f"{error}") from error
    except RuntimeError as error:  # of CUDA, of cuBLAS, or a source that does not compile
        raise UsageError(
            f"{' and '.join(plan.names)} could not be opened ({error}); see in nvidia-smi whether another program has it, or compute on the CPU with "
            "--ngpu 0"
        ) from error


def check_fallbacks(tasks: Iterable[RecordedTask], settings: TrainSettings) -> dict[str, int]:
    """Tasks of a step that will run on the CPU although there are GPUs, because their codelets have no CUDA kernel: name -> how many.

    Raises:
        UsageError: there are some, and no CPU worker to run them, or --strict.
    """
    plan, _ = gpus_of(settings)
    if not plan.parts:
        return {}
    found = dict(Counter(task.name for task in tasks if "cuda" not in task.kinds))
    names = ", ".join(sorted(found))
    if found and settings.resources.strict:
        raise UsageError(f"--strict refuses tasks without a CUDA kernel, and there are some of {names}; drop --strict, or use --ngpu 0")
    if found and not num_cpu_workers(settings.resources, plan):
        raise UsageError(f"tasks of {names} have no CUDA kernel, and there is no CPU worker to run them; add --ncpu 1, or use --ngpu 0")
    return found


def open_nccl(settings: TrainSettings) -> Nccl:
    """NCCL for the first GPU that a run uses.

    Raises:
        UsageError: it uses none, or NCCL is not installed.
        DoesNotFit: see `gpus_of`.
    """
    plan, why_not = gpus_of(settings)
    if not plan.parts:
        raise UsageError(f"--transport nccl sends from a GPU, and {why_not or 'no GPU is used, since CuPy is not installed'}; use --transport dask")
    try:
        return cards.nccl(plan.parts[0][0])
    except NoGpu as error:
        raise UsageError(str(error)) from error


def without_nccl(settings: TrainSettings, taken: int) -> str:
    """The --gpu-memory that is left where NCCL has taken some bytes of the first card: so many less of each of its parts, and of every card's, since
    all have one budget.

    Raises:
        DoesNotFit: nothing is left.
    """
    plan, _ = gpus_of(settings)
    left = plan.nbytes - -(-taken // settings.resources.split_gpu)
    if left <= 0:
        raise DoesNotFit(
            f"--transport nccl has taken {format_size(taken)} of {plan.names[0]}, and --gpu-memory is {format_size(plan.nbytes)}; raise it, use "
            "fewer nodes, or use --transport dask"
        )
    return f"{left}B"


def gpu_peak(gpus: Sequence[Any]) -> float:
    """Flop/s of matrix products on all of them, as measured when they were opened; 0 where nobody has measured. Parts of a card share its rate."""
    return float(sum({getattr(gpu, "index", number): getattr(gpu, "products_flops", 0.0) for number, gpu in enumerate(gpus)}.values()))


def num_cpu_workers(resources: MachineSettings, plan: GpuPlan) -> int:
    """Workers of the CPU: as many as asked for, else as cores where nobody else computes."""
    if resources.ncpu is not None:
        return resources.ncpu
    return 0 if plan.parts else usable_cores()
