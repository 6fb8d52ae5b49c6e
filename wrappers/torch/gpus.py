"""GPUs of a session: the choice of GPUs, checks that PyTorch can use them, tasks without a CUDA kernel, and PyTorch's settings meanwhile.

With GPUs, everything that has a CUDA kernel runs only on them, as with our own models: bits of CPU and GPU kernels differ, and so do random numbers,
and results must not depend on which worker was idle.
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
    """Return the machine of a session; the arguments are those of `Session`.

    Raises:
        UsageError: requested GPUs are not available, or an argument breaks a rule.
        DoesNotFit: a budget is above the memory that this process may use.
    """
    if ngpu is not None and ngpu < 0:
        raise UsageError(f"ngpu must be at least 0, or None for all GPUs, got {ngpu}; use 0")
    if ngpu and sim_gpu:
        raise UsageError(f"devices are real or simulated, got ngpu={ngpu} and sim_gpu={sim_gpu}; drop one of them")
    if workers is not None and workers < 0:
        raise UsageError(f"workers must be at least 0, or None for one a core, got {workers}; use 1")
    if workers == 0 and ngpu == 0 and not sim_gpu:
        raise UsageError("workers must be at least 1 without GPUs, got 0; use 1, or sim_gpu=1")
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
            graphs=False,  # a graph cannot contain memory that PyTorch allocates between kernels
        )
    )


def check_gpus(gpus: Sequence[Any], module: torch.nn.Module) -> None:
    """Check that PyTorch can use the GPUs, and that they can update the parameters.

    Args:
        gpus: devices of a runtime; emulated ones have no index and belong to the host.

    Raises:
        UsageError: this PyTorch has no CUDA, or does not see one of the GPUs; or a trainable parameter is neither fp32 nor bf16.
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
    """Return the number of tasks that CPU workers run although there are GPUs, because a call has no CUDA kernel, by task name.

    Raises:
        UsageError: there are such tasks, and no CPU worker.
    """
    if not machine.has_gpus:
        return {}
    counts = dict(Counter(task.name for task in tasks if "cuda" not in task.kinds))
    if counts and not machine.num_cpu:
        raise UsageError(
            f"tasks of {', '.join(sorted(counts))} have no CUDA kernel, and there is no CPU worker to run them; give workers=1, or use ngpu=0"
        )
    return counts


class GpuTerms(WhileOpen):
    """Settings of PyTorch for deterministic CUDA kernels, in operations that have them."""

    _before: ClassVar[tuple[bool, bool, bool]] = (False, False, True)

    def _begin(self) -> None:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used; PyTorch warns about products without it
        type(self)._before = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        )
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False

    def _join(self) -> None:
        """Do nothing: all sessions use the same settings."""

    @classmethod
    def _restore(cls) -> None:
        is_on, warns, fills = cls._before
        torch.use_deterministic_algorithms(is_on, warn_only=warns)
        torch.utils.deterministic.fill_uninitialized_memory = fills
        if torch.cuda.is_initialized():  # return the memory that PyTorch caches on the card
            torch._C._cuda_clearCublasWorkspaces()  # workspaces of streams that no longer exist
            torch.cuda.empty_cache()
