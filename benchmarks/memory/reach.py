"""Reach: GPT-2 large, 774 M parameters and 12.4 GB of training state, through the command line in 1 GB of RAM.

    python benchmarks/memory/reach.py                       # writes benchmarks/results/memory_reach.json
    python benchmarks/memory/reach.py --model tiny --ram 24MB --output=      # the script itself, in a minute

One run trains three steps with a validation and checkpoint after the second and is killed (SIGKILL) once the third is printed; the next resumes from
the checkpoint, trains the third step anew, validates and saves; then text is generated from the run. Losses of step 3 must be the same bits.
Resident memory is RssAnon + RssShmem of the process, sampled all along, with the interpreter and every import in it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import common

from nntask import PRESETS
from nntask.io import parse_size

SLACK: Final = 250 << 20
SAMPLED_SECONDS: Final = 0.02
STEPS: Final = 3
SAVED: Final = 2


class Watched:
    """A command with its resident memory sampled until it ends."""

    def __init__(self, folder: Path, *argv: str) -> None:
        environment = {**os.environ, **common.one_thread_blas(), "PYTHONPATH": str(common.ROOT), "PYTHONUNBUFFERED": "1"}
        self._output = (folder / "output.txt").open("w+")
        self._begin = time.perf_counter()
        self.peak = 0
        self.process = subprocess.Popen(
            [sys.executable, "-m", "nntask", *argv], cwd=folder, env=environment, stdout=self._output, stderr=subprocess.STDOUT, text=True
        )

    def watch(self, until: Callable[[], bool] = lambda: False) -> dict[str, float]:
        """Sample until the process has ended, or is killed because `until` came true.

        Raises:
            SystemExit: the command failed; its output has been printed.
        """
        killed = False
        while self.process.poll() is None:
            self.peak = max(self.peak, resident(self.process.pid))
            if not killed and until():
                self.process.send_signal(signal.SIGKILL)
                killed = True
            time.sleep(SAMPLED_SECONDS)
        if self.process.returncode != (-signal.SIGKILL if killed else 0):
            self._output.seek(0)
            raise SystemExit(f"ended with code {self.process.returncode}\n{self._output.read()}")
        return {"resident_peak": self.peak, "seconds": time.perf_counter() - self._begin}


def resident(pid: int) -> int:
    """RssAnon + RssShmem of a process; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def records(run: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl so far that are whole."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def losses(run: Path) -> dict[int, float]:
    """Step -> loss."""
    return {line["step"]: line["loss"] for line in records(run) if "step" in line and "loss" in line}


def sequence(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train, kill, resume, generate; peak of resident memory and seconds of each."""
    for name in ("train", "val"):
        (folder / f"{name}.txt").write_text(Path(os.__file__).read_text())
    text = ["--dataset=text", "--dataset-path=train.txt", "--val-path=val.txt", "--tokenizer=bytes"]
    memory = [f"--ram={args.ram}", "--disk=."]
    flags = [f"--model={args.model}", "--batch=1", "--vocab-tile=6283", *text, "--sample-tokens=0", "--lr=1e-4"]
    often = [f"--save-every={SAVED}", f"--eval-every={SAVED}", "--eval-batches=1", "--keep-checkpoints=1"]
    run = folder / "run"
    found: dict[str, dict[str, float]] = {}
    killed = Watched(folder, "train", *flags, *memory, *often, f"--steps={STEPS + 1}", "--run-dir=run")
    found["train, validate, save, kill -9"] = killed.watch(lambda: STEPS in losses(run))
    before = losses(run)
    resumed = Watched(folder, "train", "--resume=run", *memory, f"--steps={STEPS}")
    found["resume, train, validate, save"] = resumed.watch()
    after = losses(run)
    prompt = Watched(folder, "generate", "run", *memory, "--max-new-tokens=2")
    found["generate"] = prompt.watch()
    return {"sessions": found, "loss_before_kill": before[STEPS].hex(), "loss_resumed": after[STEPS].hex(), "equal": before[STEPS] == after[STEPS]}


def main() -> None:
    """Run the sequence."""
    parser = common.parser(__doc__, "memory_reach")
    parser.add_argument("--model", default="gpt2-large", choices=sorted(PRESETS))
    parser.add_argument("--ram", default="1GB")
    parser.add_argument("--disk", default="", help="directory for the disk tier and the run (default: a temporary one)")
    args = parser.parse_args()
    machine = common.machine()
    allowed = round(1.05 * parse_size(args.ram, "--ram")) + SLACK
    with tempfile.TemporaryDirectory(dir=args.disk or None) as folder:
        found = sequence(args, Path(folder))
    rows = [
        common.compare(
            f"{args.model} in {args.ram}, {name}: resident memory",
            "bytes",
            one["resident_peak"],
            "allowed",
            allowed,
            better="less",
            bar="ratio <= 1.0",
        )
        for name, one in found["sessions"].items()
    ]
    print(f"loss of step {STEPS} after the kill and the resume: {'the same bits' if found['equal'] else 'DIFFERENT'}")
    settings = {"rounds": 1, "model": args.model, "ram": args.ram, "batch": 1}
    common.finish(args.output, machine, ("numpy",), settings, rows, **found)


if __name__ == "__main__":
    main()
