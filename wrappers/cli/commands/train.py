"""``nntask train``: turns flags into settings, and settings into a run."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

from nntask.config import TrainSettings

from ..options.help import show_help
from ..options.sources import naming, request
from ..options.torch_extra import load_torch, through_torch

PROGRAM = "nntask train"


@dataclass(frozen=True, slots=True)
class TrainHelp:
    """Train a GPT-2, a LLaMA, or with --init-from another language model of transformers. Without flags: a small one on Python's library."""

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
    if asked.untiled is not None:
        with naming(asked.sources):
            load_torch(asked.untiled)
            from ...torch.training import train as train_through_torch

            untiled = asked.untiled
            return train_through_torch(
                settings, asked.values, *untiled, asked.resumed, lambda: None if settings.run.dry_run else print(through_torch(untiled))
            )
    assert asked.config is not None  # it has tiles
    assert asked.devices is not None  # no flag of this command imagines a machine
    with naming(asked.sources):
        run = resolve(settings, asked.config, asked.resumed, with_budgets(asked.devices, settings.resources))
        if run.cluster is None or settings.run.dry_run:
            return train(run)
        from ...dask.training.cluster_engine import train_on

        check_start(run)  # report errors before workers start
        check_shared(run.step.num_minibatches, run.step.lanes, run.cluster)
        return train_on(run.cluster, lambda cluster: train(run, cluster), print)
