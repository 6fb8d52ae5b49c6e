"""``nntask train``: turns flags into settings, and settings into a run."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nntask.config import TrainSettings

from ..options.help import show_requested_help
from ..options.sources import Request, naming, request
from ..options.torch_extra import load_torch, through_torch

if TYPE_CHECKING:
    from nntask.config import RunConfig
    from nntask.training import AroundTraining

    Changed = Callable[[RunConfig], RunConfig]

PROGRAM = "nntask train"


@dataclass(frozen=True, slots=True)
class TrainHelp:
    """Train a GPT-2, a LLaMA, or with --init-from another language model of transformers. Without flags: a small one on Python's library."""

    train: TrainSettings = field(default_factory=TrainSettings)
    config: str = ""
    """TOML file with any of these flags; the command line overrides it, and so do the environment variables that --help-all lists"""


def run(argv: Sequence[str], program: str = PROGRAM, *, changed: Changed | None = None, around: AroundTraining | None = None) -> int:
    """Train; returns the exit code.

    Args:
        argv: the words of the command line.
        program: name of the command in the help.
        changed: function that returns the run to train instead of the one that the flags ask for; None to train that one. For programs around this
            command, which then need a model with tiles on one machine.
        around: function that returns a context manager for the training, as for `nntask.training.train`; None for none.
    """
    show_requested_help(TrainHelp, argv, program)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # one BLAS thread per worker; read when NumPy loads
    asked = request(argv, os.environ)
    from nntask.config import check_shared, resolve
    from nntask.hardware import with_budgets
    from nntask.planning import choose_minibatch
    from nntask.telemetry import StepPrinter
    from nntask.training import check_start, train

    # a loss that overflows ends the run with a sentence; NumPy's warnings from the workers would only hide it
    warnings.filterwarnings("ignore", category=RuntimeWarning)
    if asked.untiled is not None:
        return _through_torch(asked, asked.untiled)
    say = StepPrinter(is_dry=asked.settings.run.dry_run).say
    assert asked.config is not None  # it has tiles
    assert asked.devices is not None  # no flag of this command imagines a machine
    with naming(asked.sources):
        machine = with_budgets(asked.devices)
        settings, minibatch = choose_minibatch(asked.settings, asked.config, machine)
        if minibatch:
            say(f"minibatch: {minibatch}")
        run = resolve(settings, asked.config, asked.resumed, machine)
        if changed is not None:
            run = changed(run)
        if run.cluster is None or run.settings.run.dry_run:
            return train(run, around=around)
        from ...dask.training.cluster_engine import train_on

        check_start(run)  # report errors before workers start
        check_shared(run.step.num_minibatches, run.step.lanes, run.cluster)
        return train_on(run.cluster, lambda cluster: train(run, cluster), say)


def _through_torch(asked: Request, untiled: tuple[Mapping[str, Any], str]) -> int:
    """Train a model without tiles; returns the exit code."""
    settings = asked.settings
    assert asked.machine is not None  # no flag of this command imagines a machine
    with naming(asked.sources):
        load_torch(untiled)
        from nntask.telemetry import StepPrinter

        from ...torch.trainer.training import train

        announce = (lambda: None) if settings.run.dry_run else (lambda: StepPrinter().say(through_torch(untiled)))
        return train(settings, asked.values, *untiled, asked.resumed, asked.machine, announce)
