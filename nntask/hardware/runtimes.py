"""Runtimes on the machine of a process: budgets, lanes, and the check that finds the first NaN."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from typing import Final

import numpy as np

from scheduler import DeviceFailed, FinishedTask, HandleLost, RunStopped, Runtime, TaskError, TierFailed, Trace
from scheduler import DoesNotFit as NoRoom
from scheduler.machine import watchdog_seconds
from tiles.kernels import KernelBuildError, kernel_versions

from ..errors import Diverged, NntaskError, StorageError, UsageError
from ..io.system_limits import is_open_file_limit
from .gpus import close_gpus, open_gpus
from .machine_spec import MachineSpec, cannot_reserve
from .memory_advice import does_not_fit


class FoundNaN(ArithmeticError):
    """A kernel wrote NaN; the message names the task and the tile."""


def check_finite(task: FinishedTask) -> None:
    """Check the data that a task has just written for NaN.

    Raises:
        FoundNaN: an element is NaN; the message names the first.
    """
    for tile in task.tiles:
        if tile.mode == "R":
            continue
        view = tile.data
        if isinstance(view, np.ndarray) and view.dtype.kind in "fV":
            is_nan = np.isnan(view)
            if is_nan.any():
                where = [int(i) for i in np.argwhere(is_nan)[0]]
                raise FoundNaN(f"task {task.name!r} wrote the first NaN, to tile {tile.name or '(unnamed)'} at element {where}")


def open_runtime(machine: MachineSpec, *, dtype: str = "fp32", lanes: int = 1, trace: Trace | None = None) -> Runtime:
    """Return the runtime of a machine.

    Args:
        dtype: value of --dtype; GPUs measure products in it.
        lanes: number of parallel lanes of sums.
        trace: trace that receives events.

    Raises:
        DoesNotFit: the system gives less address space than the budgets.
        StorageError: the directory of the disk tier cannot be used.
        UsageError: `NNTASK_WATCHDOG` is no positive number.
    """
    plan, disk, how = machine.gpus, machine.disk, machine.scheduling
    watchdog = _watchdog() if how.watchdog is None else how.watchdog
    if plan.why_none:
        print(f"nntask: {plan.why_none}", file=sys.stderr)
    with ExitStack() as unused:
        gpus = open_gpus(plan, dtype)
        unused.callback(close_gpus, gpus)
        try:
            runtime = Runtime(
                machine.num_cpu,
                sim_gpus=machine.num_simulated,
                gpus=gpus,
                gpu_memory=machine.device.nbytes if machine.has_devices else None,
                sim_bandwidth=machine.link_rate,
                ram=machine.ram.nbytes,
                disk=None if disk is None else (disk.directory, disk.budget.given),
                sched=how.policy,
                evict=how.evict,
                prefetch=how.prefetch,
                lanes=lanes,
                trace=trace,
                graphs=how.graphs,
                watchdog=watchdog,
                kernels=kernel_versions(),
                aside=machine.aside,
                mixed=machine.sharing == "mixed",  # if pinned, only the recorded step shares tasks
            )
        except (MemoryError, OverflowError) as error:
            raise cannot_reserve(machine, error) from error
        except OSError as error:
            if disk is None or is_open_file_limit(error):
                raise
            raise StorageError(f"{disk.budget.text}: {error.strerror or error}", "name a directory that can be written", flag="--disk") from error
        unused.pop_all()  # the runtime owns them from here on
    return runtime


def _watchdog() -> float | None:
    try:
        return watchdog_seconds(os.environ)
    except ValueError as error:
        raise UsageError(str(error)) from error


FAILURES: Final = (TaskError, DeviceFailed, HandleLost, TierFailed, RunStopped, NoRoom)
"""Errors of a runtime that are caused by its environment, rather than by a fault in the program."""


def as_user_error(error: Exception, runtime: Runtime, machine: MachineSpec, aside: str, *, lower: str | None = None) -> Exception:
    """Return the error that the user sees for one of `FAILURES`.

    Causes that the runtime knows come first, because tasks that needed the lost data are cancelled one after another: the disk tier, a GPU, a task
    that did not fit, a file that could not be read. Then follows the message of a kernel, `Diverged` if --check-finite stopped it, otherwise the
    error itself.

    Args:
        machine: machine of the runtime.
        aside: text that follows the sentence about a disk tier that failed.
        lower: flags to lower, an argument of `does_not_fit`.
    """
    if runtime.tier_failure is not None:
        return StorageError(runtime.tier_failure.fact, f"free space there, choose another directory with --disk, or raise --ram; {aside}")
    if isinstance(error, DeviceFailed):
        return StorageError(error.fact, f"{error.remedy}; {aside}")
    refusal = error if isinstance(error, NoRoom) else runtime.refusal
    if refusal is not None:
        return does_not_fit(refusal.shortage, machine, lower=lower)
    if isinstance(error.__cause__, KernelBuildError):
        return StorageError(str(error.__cause__), aside)
    for cause in (error.__cause__, runtime.source_failure):
        if isinstance(cause, NntaskError):
            return cause
    if isinstance(error.__cause__, FoundNaN):
        return Diverged(str(error.__cause__), "lower --lr, raise --warmup-steps or set --grad-clip 1")
    return error
