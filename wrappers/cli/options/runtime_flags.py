"""Model and machine of the commands that use a trained model: notes about its files, checks of its flags, and the runtime they ask for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ..output import complain

if TYPE_CHECKING:
    from nntask.config import MachineSettings
    from nntask.hardware import MachineSpec
    from nntask.inference import ModelSource
    from scheduler import Runtime


def open_source(path: str | Path) -> ModelSource:
    """Open the model in a directory or a GGUF file, and print the notes about its files.

    Raises:
        DataError: it does not exist, contains no model, or its content is broken.
        UsageError: its config belongs to no family, or breaks a rule.
    """
    from nntask.inference import ModelSource

    source = ModelSource.open(path)
    for sentence in source.notes():
        complain(sentence)
    return source


def machine_from(asked: MachineSettings) -> MachineSpec:
    """Return the machine that the flags describe. `nntask.inference.check_memory` checks later, with the model, that the budgets are available.

    Raises:
        UsageError: the first value that breaks its rule.
        DoesNotFit: the budget of GPUs is above the memory of a card.
    """
    from nntask.config import ResourceSettings, TrainSettings, check_values, devices_of
    from nntask.hardware import with_budgets
    from nntask.training import check_disk, warn_of_disk

    resources = ResourceSettings(**asdict(asked))
    check_values(TrainSettings(resources=resources))
    machine = with_budgets(devices_of(resources, "fp32"))
    check_disk(machine.disk)
    warn_of_disk(machine.disk)
    return machine


@contextmanager
def runtime_of(machine: MachineSpec, lower: str) -> Iterator[Runtime]:
    """Yield the runtime of a machine, with errors that name the flags that help.

    Args:
        lower: flags that make tasks smaller when they are lowered; "" if the command has none.

    Raises:
        DoesNotFit: a budget is too small, or not available.
        StorageError: the disk tier failed.
        NntaskError: weights could not be read.
    """
    from nntask.hardware import FAILURES, as_user_error, open_runtime

    runtime = open_runtime(machine)
    try:
        with runtime:
            yield runtime
    except FAILURES as error:
        raise as_user_error(error, runtime, machine, "name another directory with --disk", lower=lower) from error
