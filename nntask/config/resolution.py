"""From what was typed to what a run does: `resolve` answers every question that settings leave open, once.

Its stages, in order: defaults and rules between values (`filled`), the devices, tile sizes from the tables (`in_tiles`), the comparison with the run
that is continued, and the budgets of memory and disk. Nothing is written, no file of weights is read, and no memory is taken: what files and places
refuse, and budgets that are not to be had, come after the rules of settings (`training.preflight`, `planning.fit_advice`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal, cast

from ..adapters.frozen_base import frozen_base_to_start_from
from ..adapters.lora import LoRA, largest_rank
from ..checkpoints.store import STATE, Checkpoint, run_of
from ..data.foreign_tokenizer import has_tokenizer
from ..data.spec import DataSpec
from ..errors import UsageError
from ..hardware.machine_spec import MachineSpec, devices_of, with_budgets, with_cudnn
from ..models.interface import LanguageConfig, ModelConfig
from ..tiling.model_tiling import ModelTiling, divisors
from .cluster import cluster_of
from .objective import objective_of, with_objective
from .run_config import (
    LanguageRun,
    LanguageSpec,
    Length,
    ModelSpec,
    OptimizerSpec,
    RunConfig,
    Saving,
    ScheduleSpec,
    Start,
    StepSpec,
    TileChoice,
    with_kept_template,
)
from .settings import TrainSettings, differences, from_dict, known
from .tile_sizes import TILE_FLAGS, in_tiles, table_tiling
from .validation import check_rank, checked_length, nearest, rank_of, trace_range

DEFAULT_STEPS: Final = 200
TINY: Final = "tiny"
"""The model that is trained where none is named."""
RUNS: Final = Path("runs")


def resolve(settings: TrainSettings, config: ModelConfig, resumed: Checkpoint | None = None, machine: MachineSpec | None = None) -> RunConfig:
    """What a run of a model of tiles does.

    Args:
        config: of the model.
        resumed: the checkpoint to continue from, if any.
        machine: what computes; None for this machine's devices and budgets, as the settings ask for them.

    Raises:
        UsageError: a rule is broken, or the run differs from the one it continues.
        DataError: a tile table is none, or a checkpoint does not name the weights that its adapters stand beside.
        DoesNotFit: the budget of GPUs is above what a card has.
    """
    there = with_budgets(devices_of(settings.resources, settings.model.dtype), settings.resources) if machine is None else machine
    asked, settings, tiling = sized(settings, config, resumed, lambda: there.gpus.device_class)
    if settings.model.gpu_attention == "cudnn":
        there = with_cudnn(there)
    check_rank(settings, largest_rank(config))
    return RunConfig(
        **_terms(settings, config, resumed, there),
        model=model_spec(settings, config, tiling),
        tiles=TileChoice(
            {name: getattr(asked.tiling, name) for name in TILE_FLAGS if getattr(asked.tiling, name) is not None},
            asked.tiling.auto_tile == "measured",
            asked.tiling.tile_table,
        ),
    )


def resolve_untiled(settings: TrainSettings, config: LanguageConfig, resumed: Checkpoint | None, machine: MachineSpec) -> LanguageRun:
    """What a run of a model without tiles does; arguments and errors as of `resolve`. Settings about tiles must be unset."""
    with _differing_first(settings, resumed):
        settings = with_tokenizer(filled(settings, config))
    if resumed is not None and (found := _differences(settings, resumed)):
        raise _differs(resumed, found)
    if not objective_of(settings, config).is_plain:
        raise UsageError(
            f"--dataset {settings.data.dataset} with conversations is for nntask's own models; write them as texts, or train such a model"
        )
    if settings.resources.update_on != "device":
        raise UsageError(f"--update-on {settings.resources.update_on} is for nntask's own models; drop it, or train such a model")
    model = LanguageSpec(config, known(settings.model.seq_len), settings.data.seed, dtype_of(settings.model.dtype))
    return LanguageRun(**_terms(settings, config, resumed, machine), model=model)


def _terms(settings: TrainSettings, config: LanguageConfig, resumed: Checkpoint | None, machine: MachineSpec) -> dict[str, Any]:
    """What `LanguageRun` has of any model, by field."""
    optimizer, begin = settings.optimizer, settings.checkpoints
    lr, warmup_steps = known(optimizer.lr), known(optimizer.warmup_steps)
    is_continued = resumed is not None or bool(begin.resume)
    return {
        "name": name_of(settings),
        "directory": directory_of(settings, resumed),
        "step": StepSpec(
            known(settings.tiling.batch),
            settings.tiling.minibatch,
            known(settings.tiling.lanes),
            settings.resources.order,
            settings.resources.recompute,
            settings.resources.update_on,
        ),
        "optimizer": OptimizerSpec(
            cast(Literal["adamw", "adam", "sgd"], optimizer.optimizer),  # the other name of adamw is gone
            lr,
            optimizer.weight_decay,
            optimizer.optimizer_eps,
            optimizer.beta1,
            optimizer.beta2,
            optimizer.momentum,
            optimizer.grad_clip,
        ),
        "schedule": ScheduleSpec(optimizer.schedule, lr, warmup_steps, optimizer.min_lr, optimizer.start_lr, optimizer.full_lr_iter),
        "length": Length(settings.run.steps or 0, settings.run.nepochs, settings.run.nepochs_warmup),
        "saving": Saving(0 if begin.save_every is None else begin.save_every, begin.save_every != 0, begin.keep_checkpoints),
        "data": data_spec(settings, config, resumed),
        "machine": machine,
        "cluster": cluster_of(settings.cluster),
        "start": Start(
            is_continued,
            resumed,
            frozen_base_to_start_from(settings, resumed),
            Path(begin.init_from) if begin.init_from and not is_continued else None,
            Path(begin.load_checkpoint) if begin.load_checkpoint and resumed is None else None,
            Path(begin.load_optimizer) if begin.load_optimizer and resumed is None else None,
        ),
        "traced": trace_range(settings.observe.trace_steps),
        "settings": settings,
    }


def sized(
    settings: TrainSettings, config: ModelConfig, resumed: Checkpoint | None, device_class: Callable[[], str]
) -> tuple[TrainSettings, TrainSettings, ModelTiling]:
    """The settings with every default filled in, the same with every tile size a number, and the tiling; of a run that is continued, its own.

    Args:
        device_class: key of the built-in table of tiles; asked when the rules between values are kept.

    Raises:
        UsageError: a rule is broken, or the run differs from the one it continues, which is said first.
        DataError: --tile-table is no such table.
    """
    settings = _with_recorded_attention(settings, resumed)
    with _differing_first(settings, resumed):
        asked = with_tokenizer(filled(settings, config))
        settings, tiling = in_tiles(asked, table_tiling(asked, config, device_class()), config)
    if resumed is not None:
        _check_same(settings, config, resumed)
    return asked, settings, tiling


def filled(settings: TrainSettings, config: LanguageConfig) -> TrainSettings:
    """Fill in what was left open, except tile sizes, and check the values against each other and the model; repeating it changes nothing.

    Raises:
        UsageError: the first rule that is broken.
    """
    model, tiling, optimizer, run, checkpoints = (
        settings.model,
        settings.tiling,
        settings.optimizer,
        settings.run,
        settings.checkpoints,
    )
    if model.model is None and model.config_path is None and not checkpoints.init_from:
        model = replace(model, model=TINY)
    small = model.model is not None and is_small(model.model)
    if model.fp32_fast_tf32:
        model = replace(model, dtype="tf32", fp32_fast_tf32=False)
    length = checked_length(model.seq_len, config, config.n_positions)
    model = replace(model, seq_len=length)
    batch = tiling.batch if tiling.batch is not None else (8 if small else 1)
    lanes = tiling.lanes if tiling.lanes is not None else (4 if tiling.redux else 1)
    minibatch = batch if tiling.minibatch == -1 else tiling.minibatch
    _divides("--minibatch", minibatch, "--batch", batch)
    per_tile = tiling.minibatch_tile
    if per_tile is not None:
        per_tile = minibatch if per_tile == -1 else per_tile
        _divides("--minibatch-tile", per_tile, "--minibatch", minibatch)
    if tiling.seq_tile is not None and tiling.seq_tile > length:
        raise UsageError(f"--seq-tile must be at most the sequence length {length}, got {tiling.seq_tile}; the nearest legal value is {length}")
    tiling = replace(tiling, batch=batch, minibatch=minibatch, minibatch_tile=per_tile, lanes=lanes, redux=False)
    lr = optimizer.lr if optimizer.lr is not None else (1e-3 if small else 3e-4)
    warmup = optimizer.warmup_steps if optimizer.warmup_steps is not None else (0 if optimizer.full_lr_iter > 1 else 10)
    kind = "adamw" if optimizer.optimizer == "fusedadamw" else optimizer.optimizer
    alpha, rank = optimizer.lora_alpha, rank_of(settings)
    alpha = float(rank) if alpha is None and rank is not None else alpha
    optimizer = replace(optimizer, lr=lr, warmup_steps=warmup, optimizer=kind, lora_alpha=alpha)
    asked = run.nepochs + run.nepochs_warmup + run.nforward + run.nbackward + run.nforward_warmup + run.nbackward_warmup
    if run.steps is None and not asked:
        run = replace(run, steps=DEFAULT_STEPS)
    return with_objective(replace(settings, model=model, tiling=tiling, optimizer=optimizer, run=run, checkpoints=checkpoints), config)


def is_small(preset: str) -> bool:
    """Whether a preset learns in minutes; those have a batch and a rate of their own."""
    return preset.rpartition("-")[2] == TINY


def dtype_of(asked: str) -> str:
    """The arithmetic that a value of --dtype stands for."""
    return "fp32" if asked == "auto" else asked


def model_spec(settings: TrainSettings, config: ModelConfig, tiling: ModelTiling) -> ModelSpec:
    """The model that filled settings ask for; tiles do not matter to one that is only read."""
    return ModelSpec(
        config=config,
        tiling=tiling,
        seq_len=known(settings.model.seq_len),
        dtype=dtype_of(settings.model.dtype),
        seed=settings.data.seed,
        flash=settings.model.flashattention,
        library=settings.model.gpu_attention == "cudnn",
        adapters=adapters_of(settings),
    )


def adapters_of(settings: TrainSettings) -> LoRA | None:
    """What `--train` asks for; None where all weights are trained."""
    rank, chosen = rank_of(settings), settings.optimizer
    return None if rank is None else LoRA(rank, known(chosen.lora_alpha), chosen.lora_dropout)


def data_spec(settings: TrainSettings, config: LanguageConfig, resumed: Checkpoint | None = None) -> DataSpec:
    """Return the data part of the settings, for a run that goes on from a checkpoint or a new one."""
    data = settings.data
    found = DataSpec(
        dataset=data.dataset,
        path=data.dataset_path,
        val_path=data.val_path,
        select=data.dataset_select,
        tokenizer=data.tokenizer,
        tokenizer_path=data.tokenizer_path,
        vocab_size=config.vocab_size,
        objective=objective_of(settings, config),
    )
    return found if resumed is None else with_kept_template(found, resumed)


def with_tokenizer(settings: TrainSettings) -> TrainSettings:
    """Settings with the tokenizer that belongs to the weights of --init-from, where it has one and no other is asked for."""
    data, files = settings.data, settings.checkpoints
    is_open = bool(files.init_from) and data.tokenizer == "auto" and not data.tokenizer_path and not files.resume
    if is_open and has_tokenizer(Path(files.init_from)):
        return replace(settings, data=replace(data, tokenizer_path=files.init_from))
    return settings


def name_of(settings: TrainSettings) -> str:
    """What the run is called after: its model."""
    path, begin = settings.model.config_path, settings.checkpoints.init_from
    if begin:
        return Path(begin).resolve().name
    return Path(path).stem if path else known(settings.model.model)


def directory_of(settings: TrainSettings, resumed: Checkpoint | None) -> Path:
    """The directory of a run: that of the checkpoint, as seen from here where it is below; that of the flag; else a new one in runs/."""
    if resumed is not None:
        here, run = Path.cwd(), run_of(resumed)
        return run.relative_to(here) if run.is_relative_to(here) else run
    return Path(settings.checkpoints.run_dir) if settings.checkpoints.run_dir else default_run_dir(name_of(settings))


def default_run_dir(model: str) -> Path:
    """runs/<time>-<model>, with a number behind it when that is taken."""
    base = RUNS / f"{time.strftime('%Y%m%d-%H%M%S')}-{model}"
    path, number = base, 2
    while path.exists():
        path = base.with_name(f"{base.name}-{number}")
        number += 1
    return path


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


@contextmanager
def _differing_first(settings: TrainSettings, resumed: Checkpoint | None) -> Iterator[None]:
    """Where a rule is broken in the block, say first in what settings differ from those of the run that is continued.

    Raises:
        UsageError: names every difference.
    """
    try:
        yield
    except UsageError:
        if resumed is not None and (found := _differences(settings, resumed)):  # stored sizes break rules beside others
            raise _differs(resumed, found) from None
        raise


def _with_recorded_attention(settings: TrainSettings, resumed: Checkpoint | None) -> TrainSettings:
    """Settings with the attention that the run has which they continue, where they leave that open: its bits depend on it."""
    if resumed is None or settings.model.gpu_attention != "auto":
        return settings
    stored = from_dict(resumed.state["settings"], str(resumed.path / STATE))
    return replace(settings, model=replace(settings.model, gpu_attention=stored.model.gpu_attention))


def _differences(settings: TrainSettings, resumed: Checkpoint) -> list[str]:
    stored = from_dict(resumed.state["settings"], str(resumed.path / STATE))
    if stored.data.objective is None:  # written before there were others
        stored = replace(stored, data=replace(stored.data, objective="causal"))
    return differences(stored, settings)


def _differs(resumed: Checkpoint, found: Sequence[str]) -> UsageError:
    return UsageError(
        f"--resume {resumed.path} continues the same model, tiling, data and optimizer, but these differ: {', '.join(found)}; "
        "drop those flags, or start a new run"
    )


def _divides(flag: str, value: int, of_flag: str, whole: int) -> None:
    """Check that `value` divides `whole`.

    Raises:
        UsageError: it does not; names the nearest divisor.
    """
    if whole % value:
        near = nearest(divisors(whole), value)
        raise UsageError(f"{flag} must divide {of_flag} = {whole}, got {value}; the nearest legal value is {near}")
