"""What every benchmark here shares: the machine's description, alternating rounds in subprocesses, medians, and results as JSON.

Rules. Each side of a comparison runs in its own process, so neither inherits the other's threads, memory or caches. Rounds alternate (ours,
peer, ours, peer, ...), so a machine that slows down slows both. What is reported is the median over rounds; every round is kept in the file.
A result carries the machine, the versions, the date, the commit and git's names of the sources, and never a path or a host name. A row may have a
`verdict` of its own: "not resolved" where the bar lies within the interval of what was measured.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = ROOT / "benchmarks" / "results"

Measurement = dict[str, float]


@dataclass(frozen=True, slots=True)
class Side:
    """One competitor: a command whose stdout ends in its measurement, a flat JSON object of numbers.

    Args:
        name: how tables call it.
        argv: command line.
        env: environment variables on top of this process's.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


def this_script(script: str, *arguments: str) -> tuple[str, ...]:
    """Command line that runs the file `script` again with `arguments`."""
    return (sys.executable, str(Path(script).resolve()), *arguments)


def report(measurement: Mapping[str, float]) -> None:
    """Print a side's measurement where `alternate` looks for it."""
    print(json.dumps(dict(measurement)), flush=True)


def alternate(sides: Sequence[Side], rounds: int) -> dict[str, list[Measurement]]:
    """Run every side once per round, in turn.

    Returns:
        name of a side -> one measurement per round.

    Raises:
        SystemExit: a side failed; its output has been printed.
    """
    found: dict[str, list[Measurement]] = {side.name: [] for side in sides}
    for number in range(rounds):
        for side in sides:
            measurement = _run(side)
            found[side.name].append(measurement)
            figures = ", ".join(f"{key} {value:,.4g}" for key, value in measurement.items())
            print(f"round {number + 1}/{rounds}  {side.name}: {figures}", file=sys.stderr, flush=True)
    return found


def measured(sides: Sequence[Side], rounds: int) -> tuple[dict[str, Any], dict[str, list[Measurement]], dict[str, Measurement]]:
    """Run every side once per round, in turn.

    Returns:
        the machine before the first round; name of a side -> one measurement per round; name of a side -> medians of its measurements.
    """
    before, found = machine(), alternate(sides, rounds)
    return before, found, {name: medians(measurements) for name, measurements in found.items()}


def _run(side: Side) -> Measurement:
    done = subprocess.run(side.argv, env={**os.environ, **side.env}, cwd=ROOT, capture_output=True, text=True, check=False)
    start = done.stdout.rfind("{")
    if done.returncode or start < 0:
        raise SystemExit(f"{side.name} ended with code {done.returncode} and no measurement\n{done.stdout}{done.stderr}")
    return {key: float(value) for key, value in json.loads(done.stdout[start:]).items()}


def model_flops(config: Any, length: int) -> float:
    """Of one sequence: 6N + 12Ldn per token, N without positions (`nntask.hardware.flops`)."""
    from nntask.hardware import flop_counts_of

    positions = config.n_positions * config.n_embd
    return flop_counts_of(config, length, flash=True).model - 6.0 * length * positions


def medians(rounds: Sequence[Measurement]) -> Measurement:
    """Median of every figure over the rounds."""
    return {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}


def usable_cores() -> int:
    """Number of cores that this process may use, as nntask counts them; `--list` of scripts runs without installed packages."""
    from scheduler import usable_cores

    return usable_cores()


def compare(what: str, unit: str, ours: float, peer: str, theirs: float, *, better: str, bar: str = "") -> dict[str, Any]:
    """One row of a table of docs/results.

    Args:
        what: what was measured.
        better: "more", "less" or "equal".
        bar: the promise, "ratio >= 1.0", "ratio <= 0.7", "ratio in 0.9..1.1" or "ours <= 50"; empty where nothing was promised.
    """
    ratio = ours / theirs if theirs or ours else 1.0
    row: dict[str, Any] = {"what": what, "unit": unit, "ours": ours, "peer": peer, "theirs": theirs, "ratio": round(ratio, 4), "better": better}
    if bar:
        word, relation, limit = bar.split()
        value = {"ratio": ratio, "ours": ours}[word]
        low, _, high = limit.partition("..") if relation == "in" else ("-inf", "", limit) if relation == "<=" else (limit, "", "inf")
        row |= {"bar": bar, "met": float(low) <= value <= float(high)}
    return row


def peak_rss() -> int:
    """Largest resident memory of this process so far, bytes.

    Linux keeps it per address space as VmHWM; ``ru_maxrss`` is the fallback, because it survives exec and so may show the parent's peak.
    """
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def one_thread_blas() -> dict[str, str]:
    """Environment in which BLAS keeps to the calling thread."""
    return {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def machine() -> dict[str, Any]:
    """What the numbers depend on and a reader may know: processor, cores, memory, system, Python."""
    model = platform.processor()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": model or platform.machine(),
        "cores": usable_cores(),
        "memory_gib": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def versions(*packages: str) -> dict[str, str]:
    """Installed versions; "absent" for a package that is not installed."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def commit(checkout: Path = ROOT) -> str:
    """Short name of a checkout's commit, with "+" when its working tree differs from it; "unknown" outside a checkout."""
    try:
        name = _git("rev-parse", "--short", "HEAD", checkout=checkout).strip()
        changed = [line for line in _git("status", "--porcelain", checkout=checkout).splitlines() if not line.endswith(".json")]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name + ("+" if changed else "")


def sources() -> dict[str, str]:
    """Git's names of the trees that were measured and of what measured them, at HEAD; empty outside a checkout.

    A rebase renames commits and leaves these names: ``git rev-parse COMMIT:nntask`` tells whether a commit holds what was measured.
    """
    script = Path(sys.argv[0]).resolve()
    try:
        own = script.parent if script.parent.parent.name == "benchmarks" else script
        places = ["nntask", "tiles", "scheduler", "wrappers", own.relative_to(ROOT).as_posix()]
        return {place: _git("rev-parse", f"HEAD:{place}").strip()[:12] for place in places}
    except (OSError, ValueError, subprocess.CalledProcessError):
        return {}


def _git(*arguments: str, checkout: Path = ROOT) -> str:
    return subprocess.run(("git", *arguments), cwd=checkout, capture_output=True, text=True, check=True).stdout


def parser(doc: str | None, output: str | None) -> argparse.ArgumentParser:
    """Return a parser with the option `--output`.

    Args:
        doc: docstring of the script, which `--help` prints.
        output: default name of the result; None if it depends on other options.
    """
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--output", default=output, help="name of the result; empty: print it only")
    return made


def finish(
    name: str,
    machine: Mapping[str, Any],
    packages: Sequence[str],
    settings: Mapping[str, Any],
    comparisons: Sequence[Mapping[str, Any]],
    *,
    keep: bool = True,
    **more: Any,
) -> None:
    """Print the comparisons, and keep the result as ``benchmarks/results/<name>.json``.

    Args:
        name: name of the result; empty keeps none.
        machine: description of the machine before the first measurement.
        packages: packages whose versions count.
        settings: options of the measurement; `rounds` is one of them.
        comparisons: rows of the page, by `compare`.
        keep: False for a try of the script, whose result is not kept.
        more: single measurements and other entries of the file.
    """
    for row in comparisons:
        verdict = f"  bar {row['bar']}: {row.get('verdict') or ('met' if row['met'] else 'NOT MET')}" if "bar" in row else ""
        print(f"{row['what']}: ours {row['ours']:,.4g} {row['unit']}, {row['peer']} {row['theirs']:,.4g}, ratio {row['ratio']:.3f}{verdict}")
    if name and keep:
        result = {"machine": machine, "versions": versions(*packages), "settings": settings, "comparisons": comparisons, **more}
        print(f"wrote {write(name, result).relative_to(ROOT)}; python benchmarks/table.py puts it into docs/results and README.md")


def write(name: str, result: Mapping[str, Any]) -> Path:
    """Write ``benchmarks/results/<name>.json``, stamped with date, commit and sources."""
    stamped = {"benchmark": name, "date": datetime.date.today().isoformat(), "commit": commit(), "sources": sources(), **result}
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(stamped, indent=1) + "\n")
    return path
