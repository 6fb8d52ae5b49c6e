"""The machine of the commands that use a trained model: checks of its flags, and the runtime they ask for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nntask.trainer.settings import MachineSettings
    from scheduler.runtime import Runtime


def check_machine(machine: MachineSettings) -> None:
    """Check where to compute.

    Raises:
        UsageError: the first value that breaks its rule.
    """
    from nntask.trainer.prepare import check_disk, warn_of_disk
    from nntask.trainer.rules import check_values
    from nntask.trainer.settings import ResourceSettings, TrainSettings

    check_values(TrainSettings(resources=ResourceSettings(**asdict(machine))))
    check_disk(machine.disk)
    warn_of_disk(machine.disk)


@contextmanager
def runtime_of(machine: MachineSettings, lower: str) -> Iterator[Runtime]:
    """The runtime that the flags ask for; its refusals name the flags that help.

    Args:
        lower: flags that make tasks smaller when they are lowered; "" where the command has none.

    Raises:
        DoesNotFit: a budget is too small, or not to be had.
        StorageError: the disk tier failed.
        NntaskError: weights could not be read.
    """
    from nntask.trainer.machine import FAILURES, open_runtime, told
    from nntask.trainer.settings import ResourceSettings, TrainSettings

    resources = ResourceSettings(**asdict(machine))
    runtime = open_runtime(TrainSettings(resources=resources))
    try:
        with runtime:
            yield runtime
    except FAILURES as error:
        raise told(error, runtime, resources, "name another directory with --disk", lower=lower) from error
