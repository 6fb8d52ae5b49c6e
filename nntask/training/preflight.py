"""Checks before a run starts: unusable directories and files are refused here, before any file is written."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Final

from ..checkpoints.store import Checkpoint, run_of, step_directories
from ..config.run_config import LanguageRun, RunConfig
from ..config.settings import TrainSettings
from ..data.dataset import check_spec
from ..data.foreign_tokenizer import TOKENIZER_FILE, other_way
from ..data.images import IMAGES
from ..errors import DataError, Setting, UsageError
from ..hardware.machine_request import DiskSpec
from ..io.safetensors_file import TensorFile
from ..io.writable import check_writable
from ..optim.lr_schedule import make_schedule
from .run_directory import check_new_run, check_no_links
from .run_lock import check_unlocked

_IN_MEMORY: Final = ("tmpfs", "ramfs")


def check_start(run: LanguageRun) -> None:
    """Check the schedule, and the files and directories that a run reads and writes; files are read, none is written.

    Raises:
        UsageError: a place cannot be written, or belongs to another run; or the schedule ends above its start.
        DataError: data or a file of weights is missing or broken.
    """
    data, schedule, begin = run.data, run.schedule, run.start.directory
    if begin is not None and data.tokenizer == "auto" and not data.tokenizer_path and data.dataset not in ("train.bin", IMAGES):
        raise DataError(
            f"has no {TOKENIZER_FILE}, and its weights belong to the ids of one tokenizer",
            f"name it with --tokenizer-path DIR, or train on token ids with --dataset train.bin{other_way(begin)}",
            flag="--init-from",
            value=run.settings.checkpoints.init_from,
        )
    make_schedule(schedule.kind, schedule.lr, steps=run.length.least, min_lr=schedule.min_lr)
    check_unlocked(run.directory, run.start.flag)
    check_directory(run)
    _check_files(run)
    check_spec(data)


def with_known_base(run: RunConfig) -> RunConfig:
    """Return a new run with fingerprints of the frozen weights of its adapters; check the weights of a continued run against its own.

    Raises:
        DataError: the weights are missing or broken, or not those that the adapters were trained with.
    """
    base, resumed = run.start.frozen_base, run.start.resumed
    if base is None:
        return run
    if resumed is not None:
        base.check(resumed.path)
        return run
    return run.beside(base.with_fingerprints())


def check_directory(run: LanguageRun) -> None:
    """Check that a run may begin or continue in its directory, without creating anything.

    Raises:
        UsageError: another run is in the directory, the run is past the checkpoint already, or the directory cannot be written.
    """
    resumed = run.start.resumed
    if resumed is None:
        check_new_run(run.directory)
    else:
        _check_resumed_run(run.settings, resumed)


def _check_resumed_run(settings: TrainSettings, resumed: Checkpoint) -> None:
    run = run_of(resumed)
    wanted = settings.checkpoints.run_dir
    if wanted and Path(wanted).resolve() != run:
        others = (Setting("--run-dir", wanted),)
        raise UsageError(f"continues in its own directory {run}, got {{0}}", "drop --run-dir", flag="--resume", value=resumed.path, others=others)
    newest = step_directories(run)[-1:]
    if newest and newest[0].resolve() != resumed.path.resolve():
        raise UsageError(
            f"is not the newest checkpoint of its run, {newest[0].name} is", "resume that one or move it away", flag="--resume", value=resumed.path
        )
    steps = settings.run.steps
    if steps is not None and resumed.step >= steps:
        raise UsageError(
            f"must be above the {resumed.step} steps that {resumed.path} has done, got {steps}",
            f"for example --steps {2 * resumed.step}",
            flag="--steps",
        )
    check_no_links(run)
    check_writable(run, "the run directory")


def _check_files(run: LanguageRun) -> None:
    """Check the files that are read or written outside the run directory."""
    settings = run.settings
    if (weights := run.start.weights) is not None:
        TensorFile(weights).close()
    if run.cluster is None or run.cluster.is_local:  # otherwise the directory is on the nodes
        check_disk(run.machine.disk)
    if trace := settings.observe.trace:
        if Path(trace).is_dir():
            raise UsageError(f"FILE in --trace-steps must not be a directory, got {trace}", "name a file")
        check_writable(Path(trace), "--trace-steps")


def check_disk(disk: DiskSpec | None) -> None:
    """Check the directory of --disk without creating it. The runtime creates it, but not its parent, whose name may be mistyped.

    Raises:
        UsageError: the directory cannot be created or written.
    """
    if disk is not None:
        check_tier_directory(disk.directory)


def check_tier_directory(directory: Path) -> None:
    """Check the directory of a disk tier, like `check_disk`."""
    if directory.exists() and not directory.is_dir():
        raise UsageError("is a file", "give a directory", flag="--disk", value=directory)
    if not directory.absolute().parent.is_dir():
        raise UsageError(
            f"cannot be created: there is no directory {directory.parent}", "create it, or choose another place", flag="--disk", value=directory
        )
    check_writable(directory, "--disk")


def warn_of_disk(disk: DiskSpec | None) -> None:
    """Warn if the disk tier is in memory: its data then takes RAM in addition to --ram."""
    if disk is not None and (kind := file_system_of(disk.directory)) in _IN_MEMORY:
        print(f"nntask: --disk {disk.directory} is on {kind}, which is RAM: its data takes memory in addition to --ram", file=sys.stderr)


def file_system_of(path: Path) -> str:
    """Return the type of the file system of an existing or future path; "" if the system does not report it."""
    place = path.absolute()
    while not place.exists():
        place = place.parent
    device = place.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            mount, _, kind = line.partition(" - ")
            if mount.split(" ")[2] == wanted:
                return kind.split(" ")[0]
    return ""
