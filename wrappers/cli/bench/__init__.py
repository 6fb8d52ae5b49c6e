"""``nntask bench NAME``: measurements of this machine, each in a module of its own.

    overhead   overhead of the runtime per task, measured
    kernels    seconds, rate, fraction of a training step and of the machine's peak, by codelet, measured
    links      copies between RAM, simulated devices and the disk tier, measured; the rates are kept for plans and policies

Every benchmark has a dataclass of flags and a ``run(settings)`` that returns its figures, and the same figures as lines of text.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Sequence
from typing import Any, Final

from ..options.help import parse

BENCHMARKS: Final = {
    "overhead": "OverheadSettings",
    "kernels": "KernelsSettings",
    "links": "LinksSettings",
}
"""Name of the module -> name of its dataclass of flags."""
MOVED: Final = {"evict": "evict", "bound": "bound", "sched": "schedules"}
"""Benchmark of an earlier version -> script in benchmarks/bounds."""


def run(argv: Sequence[str]) -> int:
    """Run a benchmark and print its figures.

    Raises:
        UsageError: there is no such benchmark, or a flag is wrong.
    """
    from nntask import UsageError

    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    name = next((word for word in argv if not word.startswith("-")), None)
    if name is None and any(token in ("-h", "--help") for token in argv):
        print("usage: nntask bench NAME [flags]\n\n  " + "\n  ".join(f"nntask bench {each} --help" for each in BENCHMARKS))
        return 0
    if name not in BENCHMARKS:
        if name in MOVED:
            raise UsageError(
                f"nntask bench {name} is a script now", f"in a checkout of nntask, run python benchmarks/bounds/{MOVED[name]}.py with its flags"
            )
        wrong = f"there is no benchmark {name!r}" if name else "bench needs NAME"
        raise UsageError(wrong, f"NAME is one of {', '.join(BENCHMARKS)}, as in nntask bench overhead")
    module = importlib.import_module(f".{name}", __name__)
    rest = [*argv[: argv.index(name)], *argv[argv.index(name) + 1 :]]
    settings, _ = parse(getattr(module, BENCHMARKS[name]), rest, f"nntask bench {name}")
    result: tuple[dict[str, Any], list[str]] = module.run(settings)
    print(json.dumps(result[0], indent=1) if settings.json else "\n".join(result[1]))
    return 0
