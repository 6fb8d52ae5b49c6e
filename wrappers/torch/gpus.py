"""GPUs of a session: which ones take part, whether PyTorch can use them, what they cannot compute, and PyTorch's settings meanwhile.

With GPUs everything that has a CUDA kernel runs on them and nowhere else, as with our own models: bits of CPU and GPU kernels differ, and so do
random numbers, and neither may follow from which worker was free.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch

from nntask import UsageError
from nntask.config import ResourceSettings, parse_size
from nntask.hardware import MachineSpec, machine_of
from scheduler.machine import RecordedTask

from .threads import WhileOpen


def machine_with(
    *, ngpu: int | None, sim_gpu: int, gpu_memory: str | None, workers: int | None, ram: int | str | None, disk: str | os.PathLike[str] | None
) -> MachineSpec:
    """The machine of a session; arguments as of `Session`.

    Raises:
        UsageError: GPUs are asked for that are not to be had, or an argument breaks a rule.
        DoesNotFit: a budget is above what this process may use.
    """
    if ngpu is not None and ngpu < 0:
        raise UsageError(f"ngpu must be at least 0, or None for all GPUs, got {ngpu}; use 0")
    if ngpu and sim_gpu:
        raise UsageError(f"devices are real or simulated, got ngpu={ngpu} and sim_gpu={sim_gpu}; drop one of them")
    if workers is not None and workers < 0:
        raise UsageError(f"workers must be at least 0, or None for one a core, got {workers}; use 1")
    if workers == 0 and ngpu == 0 and not sim_gpu:
        raise UsageError("workers must be at least 1 where there are no GPUs, got 0; use 1, or sim_gpu=1")
    if ram is not None:
        ram = str(parse_size(str(ram), "ram"))
    return machine_of(
        ResourceSettings(
            ncpu=workers,
            ngpu=ngpu,
            sim_gpu=sim_gpu,
            gpu_memory=gpu_memory or "",
            ram=ram or "",
            disk=os.fspath(disk or ""),
            graphs=False,  # memory that PyTorch allocates between kernels is not a graph's
        )
    )


def check_gpus(gpus: Sequence[Any], module: torch.nn.Module) -> None:
    """Refuse GPUs that PyTorch cannot use, and parameters that they cannot update.

    Args:
        gpus: devices of a runtime; emulated ones have no index and are the host's.

    Raises:
        UsageError: this PyTorch has no CUDA, or does not see one of them; or a parameter that is learnt is neither of fp32 nor of bf16.
    """
    for gpu in gpus:
        index = getattr(gpu, "index", None)
        if index is None:
            continue
        if not torch.cuda.is_available():
            raise UsageError(
                f"{gpu.name} was asked for, and this PyTorch ({torch.__version__}) cannot use GPUs; install one with CUDA, or use ngpu=0"
            )
        if index >= torch.cuda.device_count():
            raise UsageError(f"{gpu.name} was asked for, and PyTorch sees {torch.cuda.device_count()} GPUs; lower ngpu=")
    for name, parameter in module.named_parameters():
        if gpus and parameter.requires_grad and parameter.dtype not in (torch.float32, torch.bfloat16):
            raise UsageError(
                f"{name} is of type {parameter.dtype}, and GPUs update parameters of torch.float32 and torch.bfloat16; convert the module, freeze "
                "it, or use ngpu=0"
            )


def fallbacks_of(tasks: Iterable[RecordedTask], machine: MachineSpec) -> dict[str, int]:
    """Tasks of a step that CPU workers run although there are GPUs, because a call of theirs has no CUDA kernel: name -> how many.

    Raises:
        UsageError: there are some, and no CPU worker.
    """
    if not machine.has_gpus:
        return {}
    found = dict(Counter(task.name for task in tasks if "cuda" not in task.kinds))
    if found and not machine.num_cpu:
        raise UsageError(
            f"tasks of {', '.join(sorted(found))} have no CUDA kernel, and there is no CPU worker to run them; give workers=1, or use ngpu=0"
        )
    return found


class GpuTerms(WhileOpen):
    """Lets PyTorch use no CUDA kernel with a sum in no fixed order, where it has another one."""

    _before: ClassVar[tuple[bool, bool, bool]] = (False, False, True)

    def _begin(self) -> None:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used; without it PyTorch warns of products
        type(self)._before = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        )
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False

    def _join(self) -> None:
        """Those of all sessions are equal."""

    @classmethod
    def _restore(cls) -> None:
        is_on, warns, fills = cls._before
        torch.use_deterministic_algorithms(is_on, warn_only=warns)
        torch.utils.deterministic.fill_uninitialized_memory = fills
        if torch.cuda.is_initialized():  # the card gets back what PyTorch keeps of it
            torch._C._cuda_clearCublasWorkspaces()  # of streams that are gone
            torch.cuda.empty_cache()
