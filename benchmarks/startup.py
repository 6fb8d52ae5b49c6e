"""How long the command takes to start: `nntask --help`, and the first step of the model `tiny`, each from the start of the process.

    python benchmarks/startup.py              # seven rounds, writes benchmarks/results/startup.json
    python benchmarks/startup.py --output=    # written nowhere

The first step is timed to the moment its line arrives: imports, the dataset and its tokenizer from the cache, the plan, initialisation,
calibration and the step itself. Once more with an empty cache, where the text is read, a tokenizer trained and the text tokenised. Beside them,
in turn: Python that does nothing, and Python that imports NumPy. Bars: 0.5 s for the help, 5 s for the first step with the cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Final

import common

COMMAND: Final = (sys.executable, "-m", "nntask")
TRAIN: Final = (*COMMAND, "train", "--model", "tiny", "--steps", "1", "--sample-tokens", "0")


def whole(*argv: str) -> float:
    """Seconds until a command has ended well."""
    begin = perf_counter()
    subprocess.run(argv, cwd=common.ROOT, check=True, capture_output=True)
    return perf_counter() - begin


def first_step(cache: Path | None) -> float:
    """Seconds until `nntask train` has printed its first step.

    Args:
        cache: where tokenizers and tokenised text are kept; None for the usual place.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"} | ({} if cache is None else {"NNTASK_CACHE": str(cache)})
        begin = perf_counter()
        process = subprocess.Popen([*TRAIN, "--run-dir", f"{folder}/run"], cwd=common.ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        seconds = next((perf_counter() - begin for line in process.stdout if line.startswith("step 1/")), None)
        process.communicate()
    if process.returncode or seconds is None:
        raise SystemExit(f"nntask train ended with code {process.returncode}" + ("" if seconds else " and printed no step"))
    return seconds


def measure() -> common.Measurement:
    """One round, seconds."""
    with tempfile.TemporaryDirectory() as empty:
        return {
            "python": whole(sys.executable, "-c", "pass"),
            "help": whole(*COMMAND, "--help"),
            "numpy": whole(sys.executable, "-c", "import numpy"),
            "first_step": first_step(None),
            "first_step_empty_cache": first_step(Path(empty)),
        }


def main() -> None:
    parser = common.parser(__doc__, "startup")
    parser.add_argument("--rounds", type=int, default=7, help="times everything runs")
    options = parser.parse_args()
    machine = common.machine()
    first_step(None)  # fills the cache
    rounds = [measure() for _ in range(options.rounds)]
    middle = common.medians(rounds)
    common.finish(
        options.output,
        machine,
        ("nntask", "numpy", "tokenizers"),
        {"model": "tiny", "rounds": options.rounds},
        [
            common.compare("nntask --help", "s", middle["help"], "python -c pass", middle["python"], better="less", bar="ours <= 0.5"),
            common.compare(
                "first step of tiny, from the command", "s", middle["first_step"], "import numpy", middle["numpy"], better="less", bar="ours <= 5"
            ),
            common.compare(
                "first step of tiny, tokenizer not cached", "s", middle["first_step_empty_cache"], "cached", middle["first_step"], better="less"
            ),
        ],
        medians=middle,
        rounds=rounds,
    )


if __name__ == "__main__":
    main()
