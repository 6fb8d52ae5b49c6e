"""Files of a run: its directory, config.toml, summary.json and the checkpoints' state.

Existing runs are never overwritten: a new run needs a directory of its own, and a resumed one continues in its old one.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from tiles.kernels import kernel_versions

from ..checkpoints.store import RUN_CONFIG, step_directories
from ..config.resolution import RUNS, default_run_dir
from ..data.findings import Finding, counts
from ..errors import DataError, StorageError, UsageError
from ..io.atomic_write import fsync, make_directories, write_atomically
from ..io.writable import check_writable
from ..telemetry.metrics import Totals, around, to_json
from ..telemetry.tensorboard import FOLDER
from ..telemetry.tracing import TRACE
from .run_lock import LOCK

CONFIG: Final = RUN_CONFIG
METRICS: Final = "metrics.jsonl"
SUMMARY: Final = "summary.json"
MACHINE: Final = "machine.json"
PLAN: Final = "plan.json"
"""File of the figures of the plan of each machine, from `nntask.planning.order_figures`."""
_OF_TORCH: Final = ("torch", "transformers")
_OF_CUDNN: Final = ("nvidia-cudnn-frontend", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
NODES: Final = "nodes"
"""Directory of a run on a cluster that has a directory for each node, with the node's metrics.jsonl and machine.json."""
"""Default file for the steps of --trace-steps."""


def check_new_run(path: Path) -> None:
    """Check that a run can be written to `path`, without creating anything.

    Raises:
        UsageError: another run is there, or the directory cannot be created or written.
    """
    if path.exists() and not path.is_dir():
        raise UsageError("is a file", "give a directory", flag="--run-dir", value=path)
    if path.is_dir() and any(path.iterdir()) and not _never_began(path):
        if step_directories(path):
            raise UsageError(
                "is not empty", f"give a new directory, or continue that run with --resume {shlex.quote(str(path))}", flag="--run-dir", value=path
            )
        what = "holds a run that saved nothing" if (path / CONFIG).is_file() else "is not empty"
        raise UsageError(what, "remove it, or give a new directory", flag="--run-dir", value=path)
    check_writable(path, "--run-dir")


def check_no_links(path: Path) -> None:
    """Check that the directories inside a run are no links; files written into a link would land elsewhere.

    Raises:
        UsageError: one of them is a link.
    """
    directories = [path / "checkpoints", path / FOLDER, path / NODES, *(path / NODES).glob("*")]
    if links := [directory for directory in directories if directory.is_symlink()]:
        raise UsageError(
            f"{links[0]} must be a directory of the run itself, and is a link to {os.readlink(links[0])!r}",
            "replace it by the directory, or move the whole run to its target",
        )


def _never_began(path: Path) -> bool:
    """Return whether a run directory is left over from a run that ended before its first step."""
    metrics = path / METRICS
    names = {entry.name for entry in path.iterdir()} - {LOCK}
    return not names or (
        CONFIG in names and names <= {CONFIG, METRICS, SUMMARY, MACHINE, PLAN, TRACE} and not (metrics.exists() and metrics.stat().st_size)
    )


@contextmanager
def own_directory(directory: Path, model: str) -> Iterator[Path]:
    """Create a directory of its own for a run, even if others begin in the same second. It is removed if it stays empty.

    Args:
        directory: the directory that was free when the run was resolved.
        model: name of the model, which follows the time in the directory's name.
    """
    had_runs = RUNS.is_dir()
    while True:
        try:
            make_directories(directory.parent)
            directory.mkdir()
            fsync(directory.parent)
            break
        except FileExistsError:
            if not os.path.lexists(directory):  # its parent is a file
                break
            directory = default_run_dir(model)
        except OSError:  # the check of the directory reports it
            break
    try:
        yield directory
    finally:
        with suppress(OSError):  # it is not empty: it contains a run
            directory.rmdir()
            if not had_runs:
                RUNS.rmdir()


def newest_run() -> Path:
    """Return the run in runs/ that saved a checkpoint last.

    The times of the runs' `latest` links are compared, since steps of different runs do not compare, and a time in state.json would come from the
    same clock. If the clock was set back between two saves, the older run is returned. The header of a run names the run that it continues.

    Raises:
        DataError: no run there has a checkpoint.
    """
    saved = [(link.lstat().st_mtime, link.parent) for link in RUNS.glob("*/latest")]
    if not saved:
        raise DataError(f"found no checkpoint in {RUNS}/", "give the run's directory, as in --resume DIR", flag="--resume", value="auto")
    return max(saved)[1]


def write_file(path: Path, text: str) -> None:
    """Replace a small file of the run atomically.

    Raises:
        StorageError: the disk is full or failed.
    """
    try:
        write_atomically(path, text)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}", "make room or choose another --run-dir") from error


def versions() -> dict[str, str]:
    """Return the versions of the software that decides the numbers."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    return found | _installed("nntask", "ml_dtypes", "tokenizers") | computing_versions()


def computing_versions() -> dict[str, str]:
    """Return the versions of the software that computes: the kernels, and PyTorch and cuDNN if the process has loaded them."""
    loaded = [name for name in _OF_TORCH if name in sys.modules] + list(_OF_CUDNN if "cudnn" in sys.modules else ())
    return kernel_versions() | _installed(*loaded)


def _installed(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def summary_of(
    whole: Totals, own: Totals, stats: Mapping[str, Any], tasks_per_step: int, fallbacks: Mapping[str, int], findings: Sequence[Finding] = ()
) -> dict[str, Any]:
    """Return the content of summary.json.

    Args:
        whole: sums over metrics.jsonl, resumed steps included.
        own: sums over the steps of this process.
        stats: counters of the runtime of this process.
        tasks_per_step: number of tasks of a step; tasks that run as one count separately.
        fallbacks: number of tasks of a step that ran on the CPU for lack of a CUDA kernel, by name.
        findings: records that the data left out, cut or replaced.
    """
    outside, tasks = around(own, stats), tasks_per_step * own.steps
    return {
        "steps": whole.steps,
        "tokens": whole.tokens,
        "seconds": whole.seconds,
        "tokens_per_second": whole.tokens / whole.seconds if whole.seconds else 0.0,
        "loss_first": whole.loss_first,
        "loss_last": whole.loss_last,
        **_validations(whole),
        "peak_bytes": stats["peak_bytes"],
        "budget_bytes": stats["budget_bytes"],
        "moved_bytes": whole.moved_bytes,
        "evictions": whole.evictions,
        "stall_seconds": whole.stall_seconds,
        "hit_rate": whole.hit_rate,
        "recomputed_tasks": whole.recomputed_tasks,
        "recompute_seconds": whole.recompute_seconds,
        "skipped_tasks": whole.skipped_tasks,
        **{f"{name}_around_steps": value for name, value in outside.items()},
        "tasks": stats["tasks"],
        "tasks_per_step": tasks_per_step,
        "task_overhead_us": own.idle_seconds / tasks * 1e6 if tasks else 0.0,
        "fallbacks": dict(fallbacks),
        "data": counts(findings),
        "workers": sorted(stats["busy_seconds"]),
        "versions": versions(),
    }


def _validations(whole: Totals) -> dict[str, float | int | None]:
    """Return the validation losses of summary.json; none for a run without validation."""
    if whole.validation_last is None:
        return {}
    return {
        "validation_loss_first": whole.validation_first,
        "validation_loss_last": whole.validation_last,
        "validation_loss_least": whole.validation_least,
        "validation_loss_least_step": whole.validation_least_step,
    }


def machine_of(stats: Mapping[str, Any], peak_flops: float, num_tasks: int) -> dict[str, Any]:
    """Return the content of machine.json: the resources of a process for training, known before its first step.

    Args:
        stats: counters of its runtime.
        peak_flops: measured flop/s that its workers reach in matrix products.
        num_tasks: number of tasks of a step.
    """
    return {
        "workers": list(stats["busy_seconds"]),
        "budget_bytes": stats["budget_bytes"],
        "peak_flops": peak_flops,
        "policy": stats["policy"],
        "tasks_per_step": num_tasks,
        "versions": versions(),
    }


def write_machine(run: Path, machine: Mapping[str, Any]) -> None:
    """Write machine.json."""
    write_file(run / MACHINE, to_json(machine, indent=1) + "\n")


def write_summary(run: Path, summary: Mapping[str, Any]) -> None:
    """Write summary.json."""
    write_file(run / SUMMARY, to_json(summary, indent=1) + "\n")


def write_plan(run: Path, figures: Mapping[str, Any]) -> None:
    """Write plan.json: the decisions about the step before it ran."""
    write_file(run / PLAN, to_json(figures, indent=1) + "\n")
