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
    from nntask.hardware import devices_of
    from nntask.training import check_start, train

    # a loss that overflows ends the run with a sentence; NumPy's warnings from the workers would only hide it
    warnings.filterwarnings("ignore", category=RuntimeWarning)
    settings = asked.settings
    with naming(asked.sources):
        if not settings.cluster.dask or settings.run.dry_run:
            return train(resolve(settings, asked.config, asked.resumed))
        from ...dask.training.cluster_engine import train_on

        client = devices_of(settings.resources, settings.model.dtype)  # each node has budgets of its own
        run = resolve(settings, asked.config, asked.resumed, client)
        check_start(run)  # what is wrong is better heard before workers start
        check_shared(run.step.num_minibatches, run.step.lanes, settings.cluster)
        return train_on(settings.cluster, lambda cluster: train(run, cluster), print)
