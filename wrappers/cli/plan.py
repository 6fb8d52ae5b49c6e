"""``nntask plan``: what a training run would need, without running it. Takes the flags of ``nntask train``, and ``--json``."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from nntask.trainer.settings import TrainSettings

from .help import show_help
from .layers import request


@dataclass(frozen=True, slots=True)
class _Help:
    """Say what a training run would need. All flags of nntask train; nothing is computed or written."""

    train: TrainSettings = field(default_factory=TrainSettings)
    config: str = ""
    """TOML file with any of these flags; the environment and the command line are stronger"""
    json: bool = False
    """print JSON"""


def run(argv: Sequence[str]) -> int:
    """Print the plan."""
    if any(token in ("-h", "--help") for token in argv):
        show_help(_Help, "nntask plan")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    asked = request(argv, os.environ, extra=("json",))
    from nntask.sizes import format_size
    from nntask.trainer.planning import plan_run

    figures = plan_run(asked.settings, asked.config)
    if asked.extra["json"]:
        print(json.dumps(figures, indent=1))
        return 0
    print(f"parameters        {figures['parameters']:,}")
    for name, nbytes in figures["bytes_by_class"].items():
        print(f"{name + ', peak':17} {format_size(nbytes)}")
    for key, what in (("persistent_bytes", "persistent"), ("peak_bytes", "all, peak"), ("budget_bytes", "budget")):
        for node, nbytes in figures[key].items():
            print(f"{what + ' in ' + node:17} {format_size(nbytes)}")
    print(f"feasible          {'yes' if figures['feasible'] else 'no; raise --ram, or lower --minibatch'}")
    print(f"tasks per step    {figures['tasks_per_step']}")
    for name, size in figures["tiles"].items():
        print(f"{name.replace('_', ' '):17} {size}")
    return 0
