"""The runtime of a session: opened for it, or the caller's own, with PyTorch's settings meanwhile; its GPUs; and the translation of its failures.

A failure becomes one sentence with a remedy, without internals of the runtime. Failures of a caller's runtime are raised unchanged. With GPUs,
everything that has a CUDA kernel runs only on them, as with our own models: bits of CPU and GPU kernels differ, and so do random numbers, and results
must not depend on which worker was idle.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch

import scheduler
from nntask import DoesNotFit, NntaskError, StorageError, UsageError
from nntask.config import ResourceSettings, machine_of
from nntask.hardware import FAILURES, Budget, MachineSpec, is_device, open_runtime, reuse_freed_memory
from nntask.io import parse_size
from scheduler import Runtime
from scheduler.machine import RecordedTask

from ..tasks.kernels import OperationFailed
from ..tasks.threads import Threads, WhileOpen
from .arguments import Resources


class Host:
    """A runtime for a session, open until `close`.

    Args:
        module: module to train.
        resources: machine and runtime of the caller, or the devices and memory of one to open; without `workers`, their number is that of the cores
            divided by `threads`.

    Raises:
        UsageError, DoesNotFit: an argument breaks a rule, or a budget is too large, as described at `Session`.

    Attributes:
        machine, runtime: the machine and its runtime.
        threads: number of PyTorch's threads inside an operation.
        is_borrowed: whether the runtime belongs to the caller.
    """

    def __init__(self, module: torch.nn.Module, resources: Resources) -> None:
        on, threads = resources.on, resources.threads
        self.threads, self.is_borrowed = threads, on is not None
        self._settings: list[WhileOpen] = [Threads(threads)]
        try:
            if on is None:
                machine = machine_with(resources)
                if resources.workers is None and machine.num_cpu:
                    machine = replace(machine, num_cpu=max(1, machine.num_cpu // threads))
                reuse_freed_memory()
                on = machine, open_runtime(machine)
        except BaseException:
            self._settings[0].end()
            raise
        self.machine, self.runtime = on
        try:
            check_gpus(self.runtime.gpus, module)
            if self.runtime.has_gpus:
                self._settings.append(GpuTerms())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the runtime unless it belongs to the caller, and restore the program's settings of PyTorch. Idempotent."""
        if not self.is_borrowed:
            self.runtime.close()
        for settings in self._settings:
            settings.end()

    @contextmanager
    def user_errors(self) -> Iterator[None]:
        """Turn failures of the runtime into errors that name the remedy.

        Raises:
            NntaskError: the runtime failed.
        """
        try:
            yield
        except FAILURES as error:
            if self.is_borrowed:
                raise
            raise _user_error(error, self.runtime, has_disk=self.machine.disk is not None) from error


def end_dropped(host: Host) -> None:
    """Close the runtime of a session that the program has dropped, in a thread, because a finalizer may run where a worker holds a lock."""
    warnings.warn(
        "a session of PyTorch was dropped without close(), and its weights are lost unless it was saved; use it in a with block, or call close() of "
        "it or of its trainer",
        ResourceWarning,
        stacklevel=2,
    )
    Threads.leave()
    threading.Thread(target=host.close, name="nntask end", daemon=True).start()


def _user_error(error: Exception, runtime: Runtime, *, has_disk: bool) -> Exception:
    """Return the error to raise for a failure of the runtime: the known cause if there is one, else the error itself."""
    if isinstance(error.__cause__, OperationFailed):
        return UsageError(str(error.__cause__), "look at the values of this batch")
    if runtime.tier_failure is not None:
        remedy = "free space there, or choose another directory with disk=; then make a new session, and resume from the last save()"
        return StorageError(runtime.tier_failure.fact, remedy)
    if isinstance(error.__cause__, NntaskError):
        return error.__cause__
    refusal = error if isinstance(error, scheduler.DoesNotFit) else runtime.refusal
    if refusal is None:
        return error
    shortage = refusal.shortage
    if shortage.cause == "outside":
        return DoesNotFit(shortage.fact, "lower gpu_memory=, or end other programs that use the card", shortage=shortage)
    raised = "raise gpu_memory=" if is_device(shortage.node) else f"raise ram={'' if has_disk else ', or add disk=DIR'}"
    return DoesNotFit(shortage.fact, raised, shortage=shortage)


def machine_with(asked: Resources) -> MachineSpec:
    """Return the machine that arguments of `Session` describe.

    Raises:
        UsageError: requested GPUs are not available, or an argument breaks a rule.
        DoesNotFit: a budget is above the memory that this process may use.
    """
    ngpu, workers = asked.ngpu, asked.workers
    if ngpu is not None and ngpu < 0:
        raise UsageError(f"ngpu must be at least 0, or None for all GPUs, got {ngpu}", "use 0")
    if ngpu and asked.sim_gpu:
        raise UsageError(f"devices are real or simulated, got ngpu={ngpu} and sim_gpu={asked.sim_gpu}", "drop one of them")
    if workers is not None and workers < 0:
        raise UsageError(f"workers must be at least 0, or None for one a core, got {workers}", "use 1")
    if workers == 0 and ngpu == 0 and not asked.sim_gpu:
        raise UsageError("workers must be at least 1 without GPUs, got 0", "use 1, or sim_gpu=1")
    return machine_of(
        ResourceSettings(
            ncpu=workers,
            ngpu=ngpu,
            sim_gpu=asked.sim_gpu,
            gpu_memory=asked.gpu_memory or "",
            disk=os.fspath(asked.disk or ""),
            graphs=False,  # a graph cannot contain memory that PyTorch allocates between kernels
        ),
        ram=None if asked.ram is None else Budget(parse_size(str(asked.ram), "ram"), True, str(asked.ram)),
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
                f"{gpu.name} was asked for, and this PyTorch ({torch.__version__}) cannot use GPUs", "install one with CUDA, or use ngpu=0"
            )
        if index >= torch.cuda.device_count():
            raise UsageError(f"{gpu.name} was asked for, and PyTorch sees {torch.cuda.device_count()} GPUs", "lower ngpu=")
    for name, parameter in module.named_parameters():
        if gpus and parameter.requires_grad and parameter.dtype not in (torch.float32, torch.bfloat16):
            raise UsageError(
                f"{name} is of type {parameter.dtype}, and GPUs update parameters of torch.float32 and torch.bfloat16",
                "convert the module, freeze it, or use ngpu=0",
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
            f"tasks of {', '.join(sorted(counts))} have no CUDA kernel, and there is no CPU worker to run them", "give workers=1, or use ngpu=0"
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
