"""Models of transformers, PEFT, torchvision and timm, trained by eager PyTorch and through `wrappers.torch.Session`: where do the two differ?

    python benchmarks/sweep/run.py                      # all cases, an hour; writes benchmarks/results/torch_sweep.json
    python benchmarks/sweep/run.py --resume             # goes on after an interruption
    python benchmarks/sweep/run.py --only Bert --output=    # cases whose names match a pattern, written nowhere
    python benchmarks/sweep/run.py --list
    python benchmarks/sweep/run.py --report             # writes the result from what was tried before an interruption

Each case is a module with a tiny configuration and random weights from a seed, dropout off, fp32, and five steps of SGD with momentum and weight
decay. `trial.py` says what the verdicts mean. Cases run in two processes, one thread each; a case that takes longer than the limit, or whose process
ends, does not stop the others. Every verdict is appended to build/torch_sweep.jsonl at once.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import common
import report

JOURNAL: Final = common.ROOT / "build" / "torch_sweep.jsonl"
LIMIT: Final = 60.0
"""Processor seconds of a case."""
WAITING: Final = 10.0
"""Longest wait for a case, relative to its limit."""
STARTING: Final = 300.0
"""Seconds until a process of the sweep has started."""
CASES_PER_PROCESS: Final = 40


def work(connection: Any) -> None:
    """Try the cases that arrive, and answer each with its verdict; runs in a process of its own."""
    import warnings

    import libraries
    import torch
    from sources import trial_of
    from trial import NO_EAGER, Verdict, sentence, tried

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    libraries.prepare()
    connection.send_bytes(b"ready")
    while True:
        try:
            case = connection.recv_bytes().decode()
        except EOFError:  # the sweep was stopped
            return
        try:
            trial = trial_of(case)
        except Exception as error:
            verdict = Verdict(NO_EAGER, sentence(error, with_type=True))
        else:
            verdict = tried(trial, lambda stage: connection.send_bytes(json.dumps({"stage": stage}).encode()))
        connection.send_bytes(json.dumps(verdict.as_json()).encode())


class Worker:
    """A process that tries cases, made anew when it ends or a case takes too long."""

    def __init__(self) -> None:
        self._process: Any = None
        self._count = 0

    def try_case(self, case: str, limit: float) -> dict[str, Any]:
        """The verdict of a case, as JSON."""
        if self._process is None or self._count >= CASES_PER_PROCESS:
            self._start()
        self._count += 1
        try:
            stage, until, used = "", time.monotonic() + WAITING * limit, self._used()
            self._connection.send_bytes(case.encode())
        except (ConnectionError, psutil.Error):  # it ended after its last answer
            self.close()
            return self.try_case(case, limit)
        while True:
            try:
                if not self._connection.poll(1.0):
                    if self._used() - used > limit or time.monotonic() > until:
                        return self._ended(stage, f"no result within {limit:g} s of processor time")
                    continue
                answer: dict[str, Any] = json.loads(self._connection.recv_bytes())
            except (EOFError, ConnectionError, psutil.Error):
                self._process.join()
                return self._ended(stage, f"the process ended with code {self._process.exitcode}")
            if "verdict" in answer:
                return answer
            stage = answer["stage"]

    def _used(self) -> float:
        """Processor seconds of the process so far: other programs on the machine do not make a case late."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def _ended(self, stage: str, reason: str) -> dict[str, Any]:
        self.close()
        return {"verdict": "traceback" if stage else "no eager", "reason": reason}

    def _start(self) -> None:
        self.close()
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        if not self._connection.poll(STARTING):
            raise RuntimeError(f"a process of the sweep did not start within {STARTING:g} s")
        self._connection.recv_bytes()
        self._count = 0

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
            self._process = None


def sweep(cases: Sequence[str], journal: Path, processes: int, limit: float) -> None:
    """Try cases, and append each verdict to the journal."""
    waiting, lock, finished = iter(cases), threading.Lock(), 0

    def serve() -> None:
        nonlocal finished
        worker = Worker()
        while True:
            with lock:
                case = next(waiting, None)
            if case is None:
                break
            began = time.monotonic()
            verdict = worker.try_case(case, limit)
            line = json.dumps({"case": case, **verdict, "seconds": round(time.monotonic() - began, 1)})
            with lock:
                finished += 1
                with journal.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
                print(f"{finished}/{len(cases)} {case}: {verdict['verdict']} {verdict.get('reason', '')[:150]}", file=sys.stderr, flush=True)
        worker.close()

    threads = [threading.Thread(target=serve) for _ in range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def read(journal: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The verdicts of a journal by case; a line that an interruption cut off is left out."""
    for line in journal.read_text(encoding="utf-8").splitlines() if journal.exists() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        yield entry.pop("case"), entry


def main(argv: Sequence[str] | None = None) -> None:
    """Try the cases that are asked for, and keep the result."""
    parser = common.parser(__doc__, "torch_sweep")
    parser.add_argument("--only", default="", metavar="PATTERN", help="cases whose names match this regular expression")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--resume", action="store_true", help="keep the verdicts of the journal, and try what is missing")
    parser.add_argument("--report", action="store_true", help="write the result from the journal as it is, and try nothing")
    parser.add_argument("--again", nargs="*", default=(), metavar="VERDICT", help="with --resume: try cases with these verdicts again")
    parser.add_argument("--limit", type=float, default=LIMIT, help="processor seconds of a case")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--journal", type=Path, default=JOURNAL)
    asked = parser.parse_args(argv)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false", **common.one_thread_blas()}
    import sources

    cases = [case for case in sources.cases() if re.search(asked.only, case)]
    if asked.list:
        print("\n".join(cases))
        return
    machine = common.machine()
    asked.journal.parent.mkdir(parents=True, exist_ok=True)
    if not asked.resume and not asked.report:
        asked.journal.unlink(missing_ok=True)
    before = {case: entry for case, entry in read(asked.journal) if entry["verdict"] not in asked.again}
    if not asked.report:
        sweep([case for case in cases if case not in before], asked.journal, asked.processes, asked.limit)
    after = dict(read(asked.journal))
    found = {case: after[case] for case in cases if case in after}
    common.finish(
        asked.output,
        machine,
        ("nntask", "torch", "transformers", "peft", "torchvision", "timm", "numpy"),
        {"rounds": 1, "limit_seconds": asked.limit, "processes": asked.processes, **report.settings()},
        report.comparisons(found),
        tables=report.tables(found),
        cases=found,
    )


if __name__ == "__main__":
    main()
