"""From settings to a run that may start: everything that can be refused is refused here, before a file is written."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from ..checkpoints import STATE, Checkpoint, run_of, step_directories
from ..data import TOKENIZER, DataSpec, check_spec
from ..errors import DataError, UsageError
from ..lora import largest_rank
from ..models.interface import ModelConfig
from ..schedule import make_schedule
from ..tensorfile import TensorFile
from ..tiletable import read_table, shape_of
from ..tiling import ModelTiling, default_tiling
from .base import Base
from .claim import check_unclaimed
from .cluster_rules import local_nodes
from .disks import disk_of
from .gpus import device_class
from .outputs import check_new_run, check_writable, default_run_dir, versions
from .rules import check_rank, resolve
from .settings import TrainSettings, differences, from_dict

_IN_MEMORY: Final = ("tmpfs", "ramfs")
TILE_FLAGS: Final = ("minibatch_tile", "seq_tile", "embd_tile", "inner_tile", "head_tile", "vocab_tile")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that may start.

    Args:
        settings: resolved, tile sizes included.
        run: the run directory; made when the run starts.
        resumed: the checkpoint to continue from, if any.
    """

    settings: TrainSettings
    config: ModelConfig
    tiling: ModelTiling
    data: DataSpec
    run: Path
    resumed: Checkpoint | None


def prepare(settings: TrainSettings, config: ModelConfig, resumed: Checkpoint | None) -> Prepared:
    """Resolve and check a run; reads files, writes none.

    Raises:
        UsageError: a rule is broken, a place cannot be written, or the run differs from the one it continues.
        DataError: data or a checkpoint is missing or broken.
    """
    settings, tiling = resolved(settings, config, resumed)
    check_rank(settings, largest_rank(config))
    make_schedule(
        settings.optimizer.schedule,
        settings.optimizer.lr or 0.0,
        steps=settings.run.steps or 1,
        min_lr=settings.optimizer.min_lr,
    )
    data = data_spec(settings, config)
    if resumed is not None:
        run = _relative(run_of(resumed))
    else:
        run = Path(settings.checkpoints.run_dir) if settings.checkpoints.run_dir else default_run_dir(model_name(settings))
    check_unclaimed(run, claimed_by(resumed))
    check_run(settings, run, resumed)
    _check_files(settings)
    check_spec(data)
    return Prepared(settings, config, tiling, data, run, resumed)


def resolved(settings: TrainSettings, config: ModelConfig, resumed: Checkpoint | None) -> tuple[TrainSettings, ModelTiling]:
    """Every value and tile size of a run; of one that is continued they are those it has.

    Raises:
        UsageError: a rule is broken, or the run differs from the one it continues, which is said first.
    """
    try:
        settings, tiling = with_tiles(with_tokenizer(resolve(settings, config)), config)
    except UsageError:
        if resumed is not None and (found := _differences(settings, resumed)):  # stored sizes break rules beside others
            raise _differs(resumed, found) from None
        raise
    if resumed is not None:
        _check_same(settings, config, resumed)
    return settings, tiling


def with_tokenizer(settings: TrainSettings) -> TrainSettings:
    """Settings with the tokenizer that belongs to the weights of --init-from, where no other was asked for.

    Raises:
        DataError: text is to be read, and the directory has no tokenizer.
    """
    begin, data = settings.checkpoints.init_from, settings.data
    if not begin or data.tokenizer != "auto" or data.tokenizer_path or settings.checkpoints.resume:
        return settings
    if (Path(begin) / TOKENIZER).is_file():
        return replace(settings, data=replace(data, tokenizer_path=begin))
    if data.dataset == "train.bin":
        return settings
    raise DataError(
        f"--init-from {begin} has no {TOKENIZER}, and its weights know the ids of one tokenizer only; name it with --tokenizer-path DIR, "
        "or train on token ids with --dataset train.bin"
    )


def with_tiles(settings: TrainSettings, config: ModelConfig) -> tuple[TrainSettings, ModelTiling]:
    """Settings with every tile size a number, from the tables where none was given; and the tiling itself.

    Raises:
        DataError: --tile-table is no such table.
    """
    cut = settings.tiling
    minibatch, length = cut.minibatch, settings.model.seq_len or config.n_positions
    rows = read_table(cut.tile_table) if cut.tile_table and cut.auto_tile == "table" and open_tiles(settings) else {}
    row = rows.get(shape_of(config, minibatch, length)) or default_tiling(config, minibatch, length, device=device_class(settings))
    return with_tiling(settings, row.resolve(config, minibatch, length), config)


def with_tiling(settings: TrainSettings, tiling: ModelTiling, config: ModelConfig) -> tuple[TrainSettings, ModelTiling]:
    """Settings with the sizes of `tiling` where none was given; where they came from matters no longer. And the tiling itself."""
    cut = settings.tiling
    sizes = {name: getattr(tiling, name) if getattr(cut, name) is None else getattr(cut, name) for name in TILE_FLAGS}
    tiling = ModelTiling(**sizes).resolve(config, cut.minibatch, settings.model.seq_len or config.n_positions)
    sizes = {name: getattr(tiling, name) for name in TILE_FLAGS}
    return replace(settings, tiling=replace(cut, **sizes, auto_tile="table", tile_table="")), tiling


def open_tiles(settings: TrainSettings) -> list[str]:
    """Tile sizes that nobody gave."""
    return [name for name in TILE_FLAGS if getattr(settings.tiling, name) is None]


def data_spec(settings: TrainSettings, config: ModelConfig) -> DataSpec:
    """The data part of the settings."""
    data = settings.data
    return DataSpec(
        dataset=data.dataset,
        path=data.dataset_path,
        val_path=data.val_path,
        select=data.dataset_select,
        tokenizer=data.tokenizer,
        tokenizer_path=data.tokenizer_path,
        vocab_size=config.vocab_size,
    )


def model_name(settings: TrainSettings) -> str:
    """What the run is called after."""
    path, begin = settings.model.config_path, settings.checkpoints.init_from
    if begin:
        return Path(begin).resolve().name
    return Path(path).stem if path else settings.model.model or "tiny"


def state_of(prepared: Prepared, fingerprint: str, tokenizer: str | None, base: Base | None) -> dict[str, Any]:
    """What state.json holds besides step and cursor.

    Args:
        fingerprint: of the data.
        base: of adapters; None where all weights are trained.
    """
    return {
        "seed": prepared.settings.data.seed,
        "model": prepared.config.to_dict(),
        "settings": asdict(prepared.settings),
        "data": fingerprint,
        "tokenizer": tokenizer,
        "versions": versions(),
        **({} if base is None else {"base": base.to_dict()}),
    }


def _check_same(settings: TrainSettings, config: ModelConfig, resumed: Checkpoint) -> None:
    """Check that model, tiling, data and optimizer are those of the run that is continued.

    Raises:
        UsageError: they are not; names every difference.
    """
    was, now = resumed.config.to_dict(), config.to_dict()
    found = [f"{key} (was {was.get(key)}, is {value})" for key, value in now.items() if was.get(key) != value]
    found += _differences(settings, resumed)
    if found:
        raise _differs(resumed, found)


def _differences(settings: TrainSettings, resumed: Checkpoint) -> list[str]:
    return differences(from_dict(resumed.state["settings"], str(resumed.path / STATE)), settings)


def _differs(resumed: Checkpoint, found: Sequence[str]) -> UsageError:
    return UsageError(
        f"--resume {resumed.path} continues the same model, tiling, data and optimizer, but these differ: {', '.join(found)}; "
        "drop those flags, or start a new run"
    )


def claimed_by(resumed: Checkpoint | None) -> str:
    """The flag that names the run directory."""
    return "--run-dir" if resumed is None else "--resume"


def check_run(settings: TrainSettings, run: Path, resumed: Checkpoint | None) -> None:
    """Check that a run may begin or go on in its directory, creating nothing.

    Raises:
        UsageError: another run is there, it has gone beyond the checkpoint, or it cannot be written.
    """
    if resumed is None:
        check_new_run(run)
    else:
        _check_resumed_run(settings, resumed)


def _check_resumed_run(settings: TrainSettings, resumed: Checkpoint) -> None:
    run = run_of(resumed)
    wanted = settings.checkpoints.run_dir
    if wanted and Path(wanted).resolve() != run:
        raise UsageError(f"--resume {resumed.path} continues in its own directory {run}, got --run-dir {wanted}; drop --run-dir")
    newest = step_directories(run)[-1:]
    if newest and newest[0].resolve() != resumed.path.resolve():
        raise UsageError(f"--resume {resumed.path} is not the newest checkpoint of its run, {newest[0].name} is; resume that one or move it away")
    steps = settings.run.steps
    if steps is not None and resumed.step >= steps:
        raise UsageError(
            f"--steps must be above the {resumed.step} steps that {resumed.path} has done, got {steps}; for example --steps {2 * resumed.step}"
        )
    check_writable(run, "--run-dir")


def _relative(path: Path) -> Path:
    """`path` as seen from here, where it is below."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _check_files(settings: TrainSettings) -> None:
    """Check files that are read or written beside the run directory."""
    files = settings.checkpoints
    for flag, path in (("--load-checkpoint", files.load_checkpoint), ("--load-optimizer", files.load_optimizer)):
        if path:
            if settings.checkpoints.resume:
                raise UsageError(f"{flag} {path} and --resume both say where to begin; drop one of them")
            TensorFile(path).close()
    cluster = settings.cluster.dask
    if not cluster or local_nodes(cluster) is not None:  # else it is a place on the nodes
        check_disk(settings.resources.disk)
    for flag, path in (
        ("--save-checkpoint", files.save_checkpoint),
        ("--save-optimizer", files.save_optimizer),
        ("--trace", settings.observe.trace),
    ):
        if path:
            if Path(path).is_dir():
                raise UsageError(f"{flag} {path} is a directory; give a file")
            check_writable(Path(path), flag)
            if flag != "--trace" and Path(path).exists():
                _check_own(Path(path), flag)


def check_disk(text: str) -> None:
    """Check the value of --disk, creating nothing; its directory is made when the runtime opens, but not what it lies in, which may be mistyped.

    Raises:
        UsageError: it is no directory that can be made or written, or a size that is none.
    """
    disk = disk_of(text)
    if disk is None:
        return
    place = disk[0]
    if place.exists() and not place.is_dir():
        raise UsageError(f"--disk {place} is a file; give a directory")
    if not place.absolute().parent.is_dir():
        raise UsageError(f"--disk {place} cannot be made: there is no directory {place.parent}; make it, or choose another place")
    check_writable(place, "--disk")


def warn_of_disk(text: str) -> None:
    """Say so where --disk is memory: what is moved there takes RAM beside --ram."""
    disk = disk_of(text)
    if disk is not None and (kind := file_system_of(disk[0])) in _IN_MEMORY:
        print(f"nntask: --disk {disk[0]} is on {kind}, which is RAM: what moves there takes memory beside --ram", file=sys.stderr)


def file_system_of(path: Path) -> str:
    """The type of the file system where a path lies, or would lie; "" where the system does not say."""
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


def _check_own(path: Path, flag: str) -> None:
    """Check that what would be overwritten is a safetensors file, such as an earlier result.

    Raises:
        UsageError: it is something else.
    """
    try:
        TensorFile(path).close()
    except DataError:
        raise UsageError(f"{flag} {path} exists and is no safetensors file, which alone is overwritten; give another name, or remove it") from None
