"""The first hours, or minutes, on a card: everything that only a card can show, in stages of at most nine minutes, which go on after failures.

    python benchmarks/gpu/first_card.py                          # every stage, into build/first-card
    python benchmarks/gpu/first_card.py --stage kernels streams  # some; --list says what each does
    python benchmarks/gpu/first_card.py --within 560             # as much as there is time for
    python benchmarks/gpu/first_card.py --rehearse               # without a card, over the strict libraries of tests/support
    python benchmarks/gpu/first_card.py --rehearse --fail-every 3
    python benchmarks/gpu/first_card.py --pack build/wheels      # fetch what an interpreter without a network may lack

A stage is a list of commands, each a process of its own with a limit, so a fault of the card, a hang or a crash takes one command. What a command
finds it appends at once to STAGE.jsonl, a line each; a command that dies within one of several checks is started again behind that check.
`summary.md` is written anew after each command. Nothing is downloaded: with `--wheels` missing packages are unpacked from there for the commands
alone. CuPy itself (70 MB a wheel) is too large to be carried beside the sources within 64 MiB; without it the stage `environment` and the peers of
`speed` run, and the rest says why it does not.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common

STAGE_SECONDS: Final = 540.0
LEAST_SECONDS: Final = 5.0
"""A command with less time than this is not begun."""
MOST_WHEELS: Final = 64 << 20
FAULTS: Final = ("exit", "kill", "hang", "garbage")
"""What an injected failure is: the command ends with an error, is killed, never ends, or writes half a line."""
PACKAGES: Final = (
    "dask", "distributed", "partd", "locket", "tblib", "zict", "tornado", "tyro", "docstring-parser", "typeguard", "lazy-loader",
    "nvidia-cudnn-frontend<1.28",
)  # fmt: skip
"""What a Python with CuPy, PyTorch and the usual packages lacks; cupy-cuda13x is 70 MB and stays out."""


@dataclass(frozen=True)
class Command:
    """One process of a stage.

    Args:
        name: of a function of `first_card_items`.
        seconds: its limit; `rehearsal` that of a rehearsal.
        says: what it is for.
    """

    name: str
    seconds: float
    says: str
    rehearsal: float = 90.0


STAGES: Final[dict[str, tuple[Command, ...]]] = {
    "environment": (
        Command("machine", 60, "processor, memory, card, versions, what is missing"),
        Command("cupy", 60, "the card as CuPy sees it, a kernel's way through every layer"),
        Command("sources", 240, "every source compiled and loaded, registers and spills of each kernel"),
        Command("libraries", 60, "cuBLAS, NCCL, PyTorch with CUDA"),
    ),
    "kernels": (
        Command("fp32", 200, "every kernel against its reference, fp32"),
        Command("bf16", 200, "the same, bf16"),
        Command("products", 60, "matrix products of ragged sizes, each way of transposing; with a bias, by cuBLASLt unless it refuses"),
        Command("against_torch", 60, "kernels against PyTorch's on the card"),
    ),
    "streams": (
        Command("programs", 150, "random programs with a third of their memory, on one device and two parts: the same bits as with room"),
        Command("graphs", 90, "a step with graphs and without, twice each: the same bits"),
        Command("locked", 30, "host memory is locked, and copies of it keep their bytes"),
        Command("nccl", 60, "a communicator of one rank sends to itself"),
    ),
    "training": (
        Command("tiny", 150, "losses of the CPU within rounding: fp32, dropout, tf32, bf16"),
        Command("small", 300, "GPT-2 small, some steps, the CPU's losses"),
    ),
    "beyond": (
        Command("small_beyond", 200, "GPT-2 small with all, half and a quarter of its memory: equal losses, rates"),
        Command("xl_beyond", 330, "GPT-2 XL likewise"),
    ),
    "speed": (
        Command("copies", 60, "tiles to the card and back, over one large locked copy"),
        Command("small_speed", 120, "GPT-2 small beside PyTorch, eager and compiled"),
        Command("host", 90, "host time a task"),
        Command("xl_speed", 270, "GPT-2 XL beside PyTorch, eager and compiled"),
    ),
    "profile": (
        Command("kernel_speed", 90, "the kernels of a step of GPT-2 small and XL one at a time, in us and TFLOP/s or GB/s"),
        Command("small_profile", 120, "where the time of GPT-2 small goes, by kind of task"),
        Command("xl_profile", 210, "where that of GPT-2 XL goes"),
        Command("attention", 120, "our attention beside cuDNN's and PyTorch's, by length and head size"),
    ),
}


@dataclass
class Session:
    """Runs commands, and keeps what they found.

    Args:
        out: the folder of results.
        rehearse: whether the card is emulated.
        fail_every: each so-manieth command fails; 0 for none.
        env: of the commands.
        seconds: of a stage.
        until: when all must have ended, by `time.monotonic`.
    """

    out: Path
    rehearse: bool = False
    fail_every: int = 0
    env: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    seconds: float = STAGE_SECONDS
    until: float = float("inf")
    num_commands: int = 0

    def stage(self, name: str) -> None:
        """Run the commands of a stage, one after another."""
        end = min(time.monotonic() + self.seconds, self.until)
        self.log(name).unlink(missing_ok=True)
        for command in STAGES[name]:
            self.command(name, command, end)
            self.summarise()

    def command(self, stage: str, command: Command, end: float) -> None:
        """Run a command, again behind what it died in, until it ends or nothing is gained."""
        begun: list[str] = []
        started = time.monotonic()
        limit = min(started + (command.rehearsal if self.rehearse else command.seconds), end)
        while True:
            left = limit - time.monotonic()
            if left < LEAST_SECONDS:
                self.note(stage, {"command": command.name, "status": "no time left", "begun": begun})
                return
            error = self.start(stage, command.name, begun, left)
            lines = [line for line in self.read(stage) if line.get("command") == command.name]
            now = [line["check"] for line in lines if line.get("status") == "begun"]
            gained, begun = len(now) > len(begun), now
            if error:
                ended = {line["check"] for line in lines if "result" in line}
                lost = [check for check in now if check not in ended]
                self.note(stage, {"command": command.name, "status": "failed", "check": lost[-1] if lost else "", "error": error})
            if not error or not gained:
                took = round(time.monotonic() - started, 1)
                self.note(stage, {"command": command.name, "status": "stopped" if error else "ended", "seconds": took})
                return

    def start(self, stage: str, name: str, begun: Sequence[str], seconds: float) -> str:
        """Start a process and wait for it; what went wrong, or an empty text."""
        self.num_commands += 1
        argv = [*common.this_script(__file__), "--command", name, "--out", str(self.log(stage)), "--skip", json.dumps(list(begun))]
        argv += ["--rehearse"] * self.rehearse
        if self.fail_every and self.num_commands % self.fail_every == 0:
            fault = FAULTS[self.num_commands // self.fail_every % len(FAULTS)]
            argv += ["--fault", fault]
            seconds = min(seconds, LEAST_SECONDS) if fault == "hang" else seconds
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(argv, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=self.env)
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it has started as well
            process.wait()
            output.seek(0)
            last = "\n".join(output.read().splitlines()[-12:])
        if code is None:
            return f"did not end within {seconds:.0f} s\n{last}"
        has_ended = any(line.get("command") == name and line.get("status") == "done" for line in self.read(stage))
        return "" if code == 0 and has_ended else f"ended with {code}\n{last}"

    def log(self, stage: str) -> Path:
        """The results of a stage."""
        return self.out / f"{stage}.jsonl"

    def read(self, stage: str) -> Iterator[dict[str, Any]]:
        """What is there, without lines that are broken."""
        return read_lines(self.log(stage))

    def note(self, stage: str, line: dict[str, Any]) -> None:
        """Append a line; on a new one, whatever a command has left."""
        append(self.log(stage), line)

    def summarise(self) -> None:
        """Write summary.md."""
        text = "".join(f"## {stage}\n\n{table(stage, list(self.read(stage)))}\n" for stage in STAGES if self.log(stage).exists())
        card = "an emulated card: times say nothing" if self.rehearse else "a card"
        aside = self.out / "summary.md.new"
        aside.write_text(f"# First card\n\nBy `make first-card`, on {card}.\n\n{text}", encoding="utf-8")
        aside.replace(self.out / "summary.md")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """JSON objects, a line each; broken lines are left out."""
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            yield line


def append(path: Path, line: dict[str, Any]) -> None:
    """Append an object as a line of its own, and let it reach the disk."""
    with path.open("a+b") as file:
        file.seek(0, os.SEEK_END)
        at = file.tell()
        file.seek(max(at - 1, 0))
        lead = b"\n" if at and file.read(1) != b"\n" else b""
        file.write(lead + json.dumps(line, default=str).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def table(stage: str, lines: Sequence[dict[str, Any]]) -> str:
    """A stage's results for people."""
    rows = ["| command | check | result |", "|---|---|---|"]
    for line in lines:
        if "result" in line:
            rows.append(f"| {line['command']} | {line['check']} | {short(line['result'])} |")
        elif line.get("status") in ("failed", "stopped", "no time left"):
            what = line["status"] + (f": {line['error'].splitlines()[0]}" if line.get("error") else "")
            rows.append(f"| {line['command']} | {line.get('check', '')} | **{what}** |")
    return "\n".join(rows) + "\n"


def short(result: Any) -> str:
    """A result in one cell."""
    text = ", ".join(f"{key} {value}" for key, value in result.items()) if isinstance(result, dict) else str(result)
    return text.replace("|", "/").replace("\n", " ")[:300]


def carry_out(name: str, log: Path, skipped: Sequence[str], rehearse: bool, fault: str) -> int:
    """Be a command: run its checks, and append what they find."""
    if fault == "exit":
        print("planted: an error", file=sys.stderr)
        return 3
    if fault == "hang":
        signal.pause()
    import first_card_here
    import first_card_items as items

    num_failed = 0
    with first_card_here.opened(rehearse) as here:
        for check, run in items.COMMANDS[name](here):
            if check in skipped:
                continue
            append(log, {"command": name, "check": check, "status": "begun"})
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "garbage":
                with log.open("a") as file:
                    file.write('{"command": "')
                return 0
            started = time.monotonic()
            try:
                found = run()
                here.look()
            except Exception as error:  # a check must not take the others along
                found, num_failed = {"failed": f"{type(error).__name__}: {str(error)[:400]}"}, num_failed + 1
            append(log, {"command": name, "check": check, "result": found, "seconds": round(time.monotonic() - started, 2)})
            if "failed" in found and here.is_lost():  # after a fault nothing of this process works: another one goes on
                return 4
    append(log, {"command": name, "status": "done", "failed": num_failed})
    return 0


def pack(folder: Path) -> None:
    """Fetch wheels for Python 3.12 on x86-64.

    Raises:
        SystemExit: pip failed, or they are too large.
    """
    folder.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
    argv += [f"--platform={name}_x86_64" for name in ("manylinux_2_28", "manylinux_2_17", "manylinux2014", "manylinux_2_5", "manylinux1")]
    if subprocess.run([*argv, "-d", str(folder), *PACKAGES]).returncode:
        raise SystemExit("pip could not fetch the wheels; see above")
    size = sum(path.stat().st_size for path in folder.glob("*.whl"))
    if size > MOST_WHEELS:
        raise SystemExit(f"wheels are to be at most {MOST_WHEELS:,} bytes, got {size:,}; shorten PACKAGES")
    print(f"{len(list(folder.glob('*.whl')))} wheels, {size / 1e6:.1f} MB, in {folder}")


def unpacked(wheels: Path, target: str) -> bool:
    """Whether wheels were put where commands find them."""
    argv = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--target", target]
    return not subprocess.run([*argv, *map(str, sorted(wheels.glob("*.whl")))]).returncode


def has_driver() -> bool:
    """Whether anything of an NVIDIA driver is here: its library, its command or its devices. Only where all are missing is a card surely absent."""
    with contextlib.suppress(OSError):
        return bool(ctypes.CDLL("libcuda.so.1"))
    return shutil.which("nvidia-smi") is not None or any(Path("/dev").glob("nvidia*")) or Path("/dev/dxg").exists()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--stage", nargs="*", choices=tuple(STAGES), default=tuple(STAGES))
    parser.add_argument("--out", type=Path, default=common.ROOT / "build" / "first-card")
    parser.add_argument("--seconds", type=float, default=STAGE_SECONDS, help="of a stage")
    parser.add_argument("--within", type=float, default=float("inf"), help="seconds of all stages together")
    parser.add_argument("--rehearse", action="store_true", help="emulate the card")
    parser.add_argument("--fail-every", type=int, default=0, help="let each so-manieth command fail")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels for packages that are missing")
    parser.add_argument("--pack", type=Path, help="fetch such wheels into a folder, and end")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--command", help=argparse.SUPPRESS)
    parser.add_argument("--skip", type=json.loads, default=[], help=argparse.SUPPRESS)
    parser.add_argument("--fault", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.list:
        for stage in STAGES:
            print(stage, *(f"    {command.name:16}{command.says}" for command in STAGES[stage]), sep="\n")
        return 0
    if asked.pack:
        pack(asked.pack)
        return 0
    if asked.command:
        return carry_out(asked.command, asked.out, asked.skip, asked.rehearse, asked.fault)
    if not asked.rehearse and not has_driver():
        sys.stderr.write(
            "first_card.py: a card needs an NVIDIA driver, and there is none here; install one, or add --rehearse for an emulated card\n"
        )
        return 2
    asked.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as site:
        paths = [str(common.ROOT), str(common.ROOT / "tests"), *([site] if asked.wheels and unpacked(asked.wheels, site) else [])]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])]), "OMP_NUM_THREADS": "1"}
        session = Session(asked.out, asked.rehearse, asked.fail_every, env, asked.seconds, time.monotonic() + asked.within)
        for stage in asked.stage:
            started = time.monotonic()
            session.stage(stage)
            print(f"{stage}: {time.monotonic() - started:.0f} s, {session.log(stage)}", flush=True)
    print((asked.out / "summary.md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
