"""``nntask train``: flags to settings, settings to a run."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

from nntask.trainer.settings import TrainSettings

from .help import show_help
from .layers import naming, request

PROGRAM = "nntask train"


@dataclass(frozen=True, slots=True)
class _Help:
    """Train a GPT-2 or a LLaMA. Without flags: a small model on this machine's Python library."""

    train: TrainSettings = field(default_factory=TrainSettings)
    config: str = ""
    """TOML file with any of these flags; the environment and the command line are stronger"""


def run(argv: Sequence[str], program: str = PROGRAM) -> int:
    """Train; returns the exit code."""
    if any(token in ("-h", "--help") for token in argv):
        show_help(_Help, program)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # one BLAS thread per worker; read when NumPy loads
    asked = request(argv, os.environ)
    from nntask.trainer.run import train

    # a loss that overflows ends the run with a sentence; NumPy's warnings from the workers would only hide it
    warnings.filterwarnings("ignore", category=RuntimeWarning)
    with naming(asked.sources):
        if not asked.settings.cluster.dask or asked.settings.run.dry_run:
            return train(asked.settings, asked.config, asked.resumed)
        from nntask.trainer.cluster_rules import check_shared
        from nntask.trainer.prepare import prepare
        from wrappers.dask.cluster_nodes import train_on

        check_shared(prepare(asked.settings, asked.config, asked.resumed).settings)  # what is wrong is better heard before workers start
        return train_on(asked.settings.cluster, lambda cluster: train(asked.settings, asked.config, asked.resumed, cluster), print)
