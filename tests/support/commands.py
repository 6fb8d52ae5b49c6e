"""The command as a process or in this one: what it prints, what a run leaves, and refusals."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nntask.config.settings import TrainSettings
from nntask.io.sealed_json import SEAL, sealed
from wrappers.cli import COMMANDS, main
from wrappers.cli.options.flags import Table, table_of

ROOT = Path(__file__).parents[2]


def start(*argv: str, script: str = "", **options: Any) -> subprocess.Popen[str]:
    """The command as a process of its own; `script` runs before it, `options` are those of Popen."""
    code = f"{script}\nimport sys\nfrom wrappers.cli import main\nsys.exit(main({list(argv)!r}))"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, **options)


def wait_for_step(process: subprocess.Popen[str], step: int) -> None:
    """Read the process's output until it prints `step`."""
    wait_for_line(process, f"step {step}/")


def wait_for_line(process: subprocess.Popen[str], beginning: str) -> None:
    """Read the process's output until a line begins so."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(beginning):
            return
    raise AssertionError(f"no line {beginning}: {process.stderr.read() if process.stderr else ''}")


def same_state(one: Path, other: Path) -> bool:
    """Whether two checkpoints hold the same bits and the same place in the data."""
    cursors = [json.loads((p / "state.json").read_text())["cursor"] for p in (one, other)]
    files = ("model.safetensors", "optimizer.safetensors")
    return cursors[0] == cursors[1] and all((one / f).read_bytes() == (other / f).read_bytes() for f in files)


def rewrite_state(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the content of a state.json or session.json, and give it the checksum of the new content."""
    state = json.loads(file.read_text())
    del state[SEAL]
    change(state)
    file.write_text(sealed(state))


def numbers(run: Path) -> list[tuple[int, float, float, float]]:
    """Step, loss, gradient norm and learning rate of every line, all digits."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"], line["lr"]) for line in lines]


KILL = """
import os, signal, sys
def hook(event, args):
    if event == "os.rename" and "step-000010" in str(args[1]):
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
"""


def refuse(capsys, argv: list[str]) -> tuple[int, str]:
    """Run a command line that must be refused; returns exit code and message."""
    begin = time.process_time()
    code = main(argv)
    seconds = time.process_time() - begin
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    assert seconds < 2
    return code, err


def flag_tables() -> Iterator[tuple[str, Table]]:
    """Yield each command with its flags, which a dataclass of the command's module describes."""
    train = table_of(TrainSettings)
    for command in COMMANDS:
        if command == "bench":
            benchmarks = importlib.import_module("wrappers.cli.bench").BENCHMARKS
            for name, settings in benchmarks.items():
                yield f"bench {name}", table_of(getattr(importlib.import_module(f"wrappers.cli.bench.{name}"), settings))
            continue
        takes_train = command in ("train", "plan")
        name = "PrepareSettings" if command == "data" else f"{command.title()}{'Help' if takes_train else 'Settings'}"
        table = table_of(getattr(importlib.import_module(f"wrappers.cli.commands.{command}"), name))
        yield command, {flag: each for flag, each in table.items() if each.group != "train"} | (train if takes_train else {})
