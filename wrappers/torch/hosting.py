"""The runtime of a session: opened for it, or the caller's own, with PyTorch's settings meanwhile; and the translation of its failures.

A failure becomes one sentence with a remedy, without internals of the runtime. Failures of a caller's runtime are raised unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

import scheduler
from nntask import DoesNotFit, NntaskError, StorageError, UsageError
from nntask.hardware import FAILURES, MachineSpec, open_runtime, reuse_freed_memory
from scheduler import Runtime

from .gpus import GpuTerms, check_gpus, machine_with
from .kernels import OperationFailed
from .threads import Threads, WhileOpen


class Host:
    """A runtime for a session, open until `close`.

    Args:
        module: module to train.
        on: a machine and its runtime, which the caller has opened and will close; None to open one.
        threads: number of PyTorch's threads inside an operation.
        resources: arguments of `machine_with`; without `workers`, their number is that of the cores divided by `threads`.

    Raises:
        UsageError, DoesNotFit: an argument breaks a rule, or a budget is too large, as described at `Session`.

    Attributes:
        machine, runtime: the machine and its runtime.
        threads: number of PyTorch's threads inside an operation.
        is_borrowed: whether the runtime belongs to the caller.
    """

    def __init__(self, module: torch.nn.Module, on: tuple[MachineSpec, Runtime] | None, threads: int, resources: dict[str, Any]) -> None:
        self.threads, self.is_borrowed = threads, on is not None
        self._settings: list[WhileOpen] = [Threads(threads)]
        try:
            if on is None:
                machine = machine_with(**resources)
                if resources["workers"] is None and machine.num_cpu:
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


def _user_error(error: Exception, runtime: Runtime, *, has_disk: bool) -> Exception:
    """Return the error to raise for a failure of the runtime: the known cause if there is one, else the error itself."""
    if isinstance(error.__cause__, OperationFailed):
        return UsageError(f"{error.__cause__}; look at the values of this batch")
    if runtime.tier_failure is not None:
        return StorageError(f"{runtime.tier_failure}; make a new session, and resume from the last save()")
    if isinstance(error.__cause__, NntaskError):
        return error.__cause__
    refusal = error if isinstance(error, scheduler.DoesNotFit) else runtime.refusal
    if refusal is None:
        return error
    story = str(refusal).partition("; raise the budget")[0]
    if refusal.node.startswith(("cuda", "sim")):
        return DoesNotFit(f"{story}; raise gpu_memory=")
    return DoesNotFit(f"{story}; raise ram={'' if has_disk else ', or add disk=DIR'}")
