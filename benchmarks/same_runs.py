"""Small runs of one commit, recorded bit by bit and compared with those of another: what a refactor must not change.

    python benchmarks/same_runs.py record --code ../before before.json   # --code: a checkout of the old commit
    python benchmarks/same_runs.py check before.json                     # the code of this checkout; exit 1 where anything differs
    python benchmarks/same_runs.py check before.json --only lora         # only the runs whose name contains "lora"

A run is one or more command lines of ``python -m nntask`` in an empty directory with the same few inputs: models of some ten thousand parameters,
text, a directory as transformers writes it. The code under test is only on the PYTHONPATH of these subprocesses, so any commit can be recorded.

Compared exactly, of every run: exit codes; printed text, with figures of time, rate, share and bytes masked; each loss, gradient norm and learning
rate of metrics.jsonl; names, order and values of all fields of metrics.jsonl, summary.json, machine.json and state.json, floats bit by bit, but of
those in `VOLATILE` and `TRAFFIC` only the names; config.toml, letter by letter; the name of every file of the working directory; type, shape and hash
of every tensor of safetensors files, and the hash of the whole file. Of refusals of bad input: stderr, letter by letter.

Bytes moved between memories are compared exactly where they are the same in every recording of one commit: those of plans of imaginary machines,
which run the scheduler in virtual time (there peaks, evictions and seconds are exact, too), and those of runs with room enough. Where workers and
transfers race for memory, and where Dask nodes talk (0.2% between recordings), the sum over all links must be within the run's `allowance`, a share
of the record's.

Not compared: measured seconds and what is computed from them, versions, contents of traces and pages. Losses are those of one machine: a record of
another processor, or of other versions of NumPy or oneDNN, differs by rounding; `check` says when machine or versions are not those of the record.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from common import ROOT, machine, one_thread_blas, versions
from same_run_cases import CASES, EXAMPLE, Case, inputs

VOLATILE: Final = frozenset(
    (
        *("seconds", "tokens_per_second", "tflops", "mfu", "wait_seconds", "stall_seconds", "stall_seconds_around_steps", "hit_rate"),
        *("busy_seconds", "worker_stall_seconds", "task_overhead_us", "peak_flops", "seconds_per_step", "busy_share", "forecast_seconds"),
        *("recompute_seconds", "link_bytes_per_second", "disk_bytes_per_second", "versions", "address"),
    )
)
"""Fields whose value depends on time or on what is installed."""

TRAFFIC: Final = frozenset(("moved_bytes", "moved_bytes_around_steps", "evictions", "evictions_around_steps", "resident_peak_bytes", "peak_bytes"))
"""Fields whose value depends on which worker and which transfer was first; sums of moved bytes are compared apart from them."""

MASKS: Final = (
    (re.compile(r"(?m)^(moved |peak: |evictions: |scored |the connections between nodes broke).*\n"), ""),
    (re.compile(r"(?m)^(node \d+: |order: |dask: |seconds per step ).*$"), r"\1#"),
    (re.compile(r"(continued|interrupted) after step \d+"), r"\1 after step #"),
    (re.compile(r"\beta \S+"), "eta #"),
    (re.compile(r"(tokens/sec|Training performance): \S+"), r"\1: #"),
    (re.compile(r"[\d.,]+(e[+-]\d+)?[kMG]? ?(ms|s|seconds|tok/s|%|[KMG]i?B(/s)?)(?!\w)"), r"# \2"),
    (re.compile(r"[\d.]+/# "), "#/# "),
)
"""What time decides of printed text; lines about traffic are printed only where some worker waited for it."""


def record_case(case: Case, code: Path) -> dict[str, Any]:
    """What a case does: an entry for each command, one for the names of files, one for each file that can be compared."""
    with tempfile.TemporaryDirectory(prefix="same-runs-") as scratch:
        folder = Path(scratch).resolve() / "here"
        folder.mkdir()
        inputs(folder)
        given = set(folder.rglob("*"))
        found: dict[str, Any] = {}
        for number, command in enumerate(case.commands, 1):
            code_found, out, err = run(command, folder, code, case.stop_at if number == 1 else "")
            texts = {"stdout": out.replace(str(folder), "<here>"), "stderr": err.replace(str(folder), "<here>")}
            found[f"command {number}"] = {"line": command, "exit": code_found, **{key: text_of(text, case) for key, text in texts.items()}}
        made = sorted(path for path in set(folder.rglob("*")) - given if path.relative_to(folder).parts[0] != "xdg")
        names = (f"{path.relative_to(folder)}{f' -> {path.readlink()}' if path.is_symlink() else ''}" for path in made)
        found["files"] = [re.sub(r"(tfevents)\.\d+\.\d+", r"\1.#", name) for name in names]
        for path in made:
            if path.is_file() and not path.is_symlink() and (contents := read(path, case)) is not None:
                found[str(path.relative_to(folder))] = contents
                if path.name == "summary.json":
                    found["traffic"] = json.loads(path.read_text()).get("moved_bytes", {})
        return found


def run(command: str, folder: Path, code: Path, stop_at: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("NNTASK_", "STARPU_", "DASK_", "PYTHON"))}
    environment |= {"PYTHONPATH": str(code), "PYTHONUNBUFFERED": "1", "NNTASK_CACHE": str(folder / "cache"), "XDG_CACHE_HOME": str(folder / "xdg")}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "100", **one_thread_blas()}
    with (folder.parent / "stderr").open("w+") as err:
        argv = [sys.executable, *words_of(command, code)]
        process = subprocess.Popen(argv, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=err, text=True)
        lines = []
        for line in process.stdout or ():
            lines.append(line)
            if stop_at and line.startswith(stop_at):
                process.send_signal(signal.SIGINT)
        process.wait()
        err.seek(0)
        return process.returncode, "".join(lines), err.read()


def words_of(command: str, code: Path) -> list[str]:
    """What follows the interpreter; for a checkout from before `old_settings`, with its flags for a file of weights and for the file of a trace."""
    words = shlex.split(command)
    if not (code / "nntask" / "config" / "old_settings.py").exists():
        words = [word.replace("--init-from=", "--load-checkpoint=") if word.endswith(".safetensors") else word for word in words]
        words = [word.replace("--trace-steps=all@", "--trace=") for word in words]
    return [str(code / EXAMPLE), *words[1:]] if words[0] == EXAMPLE else ["-m", "nntask", *words]


def text_of(text: str, case: Case) -> Any:
    """Lines of printed text without what time decides; of JSON, its fields."""
    if text.startswith("{"):
        return fields_of(json.loads(text), case)
    for pattern, mask in () if case.exact else MASKS:
        text = pattern.sub(mask, text)
    return [line for line in text.splitlines() if not (case.stop_at and line.startswith(("step ", "saved ")))]


def read(path: Path, case: Case) -> Any:
    """What is compared of a file; None where nothing but its name is."""
    if path.suffix == ".safetensors":
        return tensors_of(path)
    if path.suffix == ".jsonl":
        return [fields_of(json.loads(line), case) for line in path.read_text().splitlines()]
    if path.suffix == ".json":
        return fields_of(json.loads(path.read_text()), case)
    if path.suffix in (".toml", ".md", ".txt"):
        return path.read_text().splitlines()
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.suffix == ".bin" else None


def fields_of(value: Any, case: Case) -> Any:
    """JSON with floats as hexadecimal text and without the values that time decides."""
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, list):
        return [fields_of(each, case) for each in value]
    if isinstance(value, dict):
        left_out = frozenset() if case.exact else VOLATILE | TRAFFIC | ({"tasks"} if case.stop_at else set())
        return {key: "not compared" if key in left_out else fields_of(each, case) for key, each in value.items()}
    return value


def tensors_of(path: Path) -> dict[str, str]:
    """Type, shape and hash of every tensor of a safetensors file, its metadata, and the hash of the file."""
    contents = path.read_bytes()
    (length,) = struct.unpack("<Q", contents[:8])
    data = contents[8 + length :]
    found = {"whole file": hashlib.sha256(contents).hexdigest()}
    for name, about in json.loads(contents[8 : 8 + length]).items():
        if name == "__metadata__":
            found[name] = json.dumps(about)
        else:
            begin, end = about["data_offsets"]
            found[name] = f"{about['dtype']} {about['shape']} {hashlib.sha256(data[begin:end]).hexdigest()[:16]}"
    return found


def differences(before: Any, after: Any, where: str = "") -> Iterator[str]:
    """A line for each value that differs, is missing or is new; the order of fields counts."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before.keys() - after.keys():
            yield f"{where}[{key}]: is missing"
        for key in after.keys() - before.keys():
            yield f"{where}[{key}]: is new"
        shared = [key for key in before if key in after]
        if shared != [key for key in after if key in before]:
            yield f"{where}: its fields stand in another order"
        for key in shared:
            yield from differences(before[key], after[key], f"{where}[{key}]")
    elif isinstance(before, list) and isinstance(after, list):
        if len(before) != len(after):
            yield f"{where}: {len(before)} entries before, {len(after)} now"
        for number, (old, new) in enumerate(zip(before, after, strict=False)):
            yield from differences(old, new, f"{where}[{number}]")
    elif not where.endswith("[line]") and (type(before) is not type(after) or before != after):  # flags may be spelled in another way
        yield f"{where}: {before!r} before, {after!r} now"


def traffic_differences(before: dict[str, int], after: dict[str, int], allowance: float) -> Iterator[str]:
    """Lines about moved bytes: each link without an allowance, else their sum where it is further off than the allowance."""
    old, new = sum(before.values()), sum(after.values())
    if not allowance:
        yield from differences(dict(sorted(before.items())), dict(sorted(after.items())), "[traffic]")
    elif abs(new - old) > allowance * old:
        yield f"[traffic]: {old:,} B before, {new:,} B now, more than {allowance:.0%} apart"


def case_differences(case: Case, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """A line for each difference between two recordings of one case."""
    old, new = ({key: value for key, value in found.items() if key != "traffic"} for found in (before, after))
    return [*differences(old, new), *traffic_differences(before.get("traffic", {}), after.get("traffic", {}), case.allowance)]


def compare(before: dict[str, Any], after: dict[str, Any], shown: int) -> int:
    """Print the table; returns how many runs differ."""
    width, num_differ, cases = max(map(len, after)), 0, {case.name: case for case in CASES}
    for name, found in after.items():
        lines = case_differences(cases[name], before[name], found) if name in before else ["is not in the record"]
        num_differ += bool(lines)
        print(f"{name:{width}} | {f'{len(lines)} differences' if lines else 'same'}")
        for line in lines[:shown]:
            print(f"{'':{width}} | {line[:600]}")
    return num_differ


def environment_of_record() -> dict[str, Any]:
    """What rounding depends on besides the code."""
    return {"processor": machine()["processor"], "python": machine()["python"], **versions("numpy", "numba", "ml_dtypes", "tokenizers", "dask")}


def record(code: Path, only: str, jobs: int) -> dict[str, Any]:
    """Run the cases whose name contains `only`; name -> what it did."""
    chosen = [case for case in CASES if only in case.name]
    if not chosen:
        raise SystemExit(f"no run has {only!r} in its name; there are: {', '.join(case.name for case in CASES)}")

    def one(case: Case) -> dict[str, Any]:
        begin = time.perf_counter()
        found = record_case(case, code)
        print(f"{case.name}: {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)
        return found

    with ThreadPoolExecutor(jobs) as pool:
        return {case.name: found for case, found in zip(chosen, pool.map(one, chosen), strict=True)}


def main(argv: Sequence[str] | None = None) -> int:
    """Record or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "check"))
    parser.add_argument("file", type=Path, help="the record, JSON")
    parser.add_argument("--code", type=Path, default=ROOT, help="checkout whose code runs (default: this one)")
    parser.add_argument("--only", default="", help="only runs whose name contains this; record replaces these in FILE")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once (default 2)")
    parser.add_argument("--shown", type=int, default=5, help="differences shown of each run (default 5)")
    args = parser.parse_args(argv)
    kept = json.loads(args.file.read_text()) if args.action == "check" or (args.only and args.file.exists()) else {"runs": {}}
    found = record(args.code.resolve(), args.only, args.jobs)
    about = environment_of_record()
    if args.action == "record":
        args.file.write_text(json.dumps({"environment": about, "runs": {**kept["runs"], **found}}, indent=1) + "\n")
        print(f"wrote {args.file}: {len(found)} runs")
        return 0
    for line in differences(kept["environment"], about, "environment"):
        print(f"{line}; losses may differ by rounding")
    num_differ = compare(kept["runs"], found, args.shown)
    print(f"{num_differ} of {len(found)} runs differ" if num_differ else f"all {len(found)} runs are the same")
    return 1 if num_differ else 0


if __name__ == "__main__":
    raise SystemExit(main())
