"""``nntask train``: turns flags into settings, and settings into a run."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

from nntask.config import TrainSettings

from ..options.help import show_help
from ..options.sources import naming, request

PROGRAM = "nntask train"


@dataclass(frozen=True, slots=True)
class TrainHelp:
    """Train a GPT-2 or a LLaMA. Without flags: a small model on this machine's Python library."""

    train: TrainSettings = field(default_factory=TrainSettings)
    config: str = ""
    """TOML file with any of these flags; the environment and the command line are stronger"""


def run(argv: Sequence[str], program: str = PROGRAM) -> int:
    """Train; returns the exit code."""
    if any(token in ("-h", "--help") for token in argv):
        show_help(TrainHelp, program)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # one BLAS thread per worker; read when NumPy loads
    asked = request(argv, os.environ)
    from nntask.config import check_shared, resolve
    from nntask.hardware import with_budgets
    from nntask.training import check_start, train

    # a loss that overflows ends the run with a sentence; NumPy's warnings from the workers would only hide it
    warnings.filterwarnings("ignore", category=RuntimeWarning)
    settings = asked.settings
    assert asked.devices is not None  # no flag of this command imagines a machine
    with naming(asked.sources):
        run = resolve(settings, asked.config, asked.resumed, with_budgets(asked.devices, settings.resources))
        if run.cluster is None or settings.run.dry_run:
            return train(run)
        from ...dask.training.cluster_engine import train_on

        check_start(run)  # what is wrong is better heard before workers start
        check_shared(run.step.num_minibatches, run.step.lanes, run.cluster)
        return train_on(run.cluster, lambda cluster: train(run, cluster), print)
