"""Resolution of settings to a run: `resolve` fills in every open value, once.

Its stages, in order: defaults and rules between values (`filled`), the devices, tile sizes from the tables (`in_tiles`), the comparison with the
resumed run, and the budgets of memory and disk. Nothing is written, no file of weights is read, and no memory is taken. Checks of files, directories
and available memory come later (`training.preflight`, `planning.fit_advice`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ..adapters.lora import LoRA, largest_rank, mixtures_of
from ..architecture.family_config import ModelConfig
from ..architecture.interface import LanguageConfig
from ..checkpoints.store import Checkpoint, run_of
from ..data.foreign_tokenizer import has_tokenizer
from ..data.spec import DataSpec
from ..errors import UsageError
from ..hardware.machine_spec import MachineSpec, with_budgets, with_cudnn
from ..tiling.model_tiling import ModelTiling, divisors
from .cluster import cluster_of
from .init_from import InitialModel, brings_config, initial_model, model_path
from .machine import devices_of, sharing_of
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
from .settings import OptimizerSettings, TrainSettings, known
from .stored_run import differences, frozen_base_to_start_from, stored_settings
from .tile_sizes import TILE_FLAGS, in_tiles, table_tiling
from .validation import adapts_experts, check_rank, checked_length, nearest, rank_of, trace_range

DEFAULT_STEPS: Final = 200
TINY: Final = "tiny"
"""Default model."""
MUON_MOMENTUM: Final = 0.95
RUNS: Final = Path("runs")
CHECKPOINTS: Final = "checkpoints"
"""Name of the directory of checkpoints in that of a run."""


def resolve(settings: TrainSettings, config: ModelConfig, resumed: Checkpoint | None = None, machine: MachineSpec | None = None) -> RunConfig:
    """Return the run of a model with tiles.

    Args:
        settings: settings of the user.
        config: config of the model.
        resumed: checkpoint to continue from, if any.
        machine: machine of the run; None for this machine's devices and budgets, as the settings ask for them.

    Raises:
        UsageError: a rule is broken, or the run differs from the one it continues.
        DataError: a tile table is malformed, or a checkpoint does not name the frozen weights of its adapters.
        DoesNotFit: the budget of GPUs is above the memory of a card.
    """
    there = with_budgets(devices_of(settings.resources, settings.model.dtype)) if machine is None else machine
    asked, settings, tiling = sized(settings, config, resumed, lambda: there.gpus.device_class)
    if settings.model.attention == "cudnn":
        there = with_cudnn(there)
    check_rank(settings, largest_rank(config, experts=adapts_experts(settings)), has_experts=bool(mixtures_of(config)))
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
    """Return the run of a model without tiles; arguments and errors are those of `resolve`. Settings about tiles must be unset."""
    continued = None if resumed is None else _Continued.of(resumed)
    with _differing_first(settings, continued):
        settings = with_tokenizer(filled(settings, config))
    if continued is not None:
        continued.check_same(settings)
    if not objective_of(settings, config).is_plain:
        raise UsageError(
            "with conversations is for nntask's own models",
            "write them as texts, or train such a model",
            flag="--dataset",
            value=settings.data.dataset,
        )
    if settings.resources.update_on != "device":
        raise UsageError("is for nntask's own models", "drop it, or train such a model", flag="--update-on", value=settings.resources.update_on)
    if sharing_of(settings.resources):
        value = f"{settings.resources.sched}@{settings.resources.assignment}"
        raise UsageError("is for nntask's own models", "drop it, or train such a model", flag="--sched", value=value)
    model = LanguageSpec(config, known(settings.model.seq_len), settings.data.seed, dtype_of(settings.model.dtype))
    return LanguageRun(**_terms(settings, config, resumed, machine), model=model)


def _terms(settings: TrainSettings, config: LanguageConfig, resumed: Checkpoint | None, machine: MachineSpec) -> dict[str, Any]:
    """Return the fields of `LanguageRun` that models with and without tiles share."""
    optimizer, begin = settings.optimizer, settings.checkpoints
    lr, warmup_steps = known(optimizer.lr), known(optimizer.warmup_steps)
    is_continued = resumed is not None or bool(begin.resume)
    initial = InitialModel() if is_continued else initial_model(begin.init_from)
    return {
        "name": name_of(settings),
        "directory": directory_of(settings, resumed),
        "step": StepSpec(
            known(settings.tiling.batch),
            settings.tiling.num_sequences,
            known(settings.tiling.lanes),
            settings.resources.order,
            settings.resources.recompute,
            settings.resources.update_on,
        ),
        "optimizer": OptimizerSpec(
            optimizer.optimizer,
            lr,
            optimizer.weight_decay,
            optimizer.optimizer_eps,
            optimizer.beta1,
            optimizer.beta2,
            optimizer.momentum or 0.0,
            optimizer.grad_clip,
        ),
        "schedule": ScheduleSpec(optimizer.schedule, lr, warmup_steps, optimizer.min_lr, optimizer.warmup_start_lr),
        "length": Length(settings.run.steps or 0, settings.run.nepochs),
        "saving": Saving(0 if begin.save_every is None else begin.save_every, begin.save_every != 0, begin.keep_checkpoints),
        "data": data_spec(settings, config, resumed),
        "machine": machine,
        "cluster": cluster_of(settings.cluster),
        "start": Start(
            is_continued,
            resumed,
            frozen_base_to_start_from(settings, resumed),
            initial.directory,
            initial.weights,
            None,
        ),
        "traced": trace_range(settings.observe.trace_steps),
        "command": "nntask train",
        "sums_loss": False,
        "settings": settings,
    }


def sized(
    settings: TrainSettings, config: ModelConfig, resumed: Checkpoint | None, device_class: Callable[[], str]
) -> tuple[TrainSettings, TrainSettings, ModelTiling]:
    """Return the settings with every default filled in, these settings with every tile size as well, and the tiling.

    A resumed run keeps the tile sizes of its checkpoint.

    Args:
        device_class: function that returns the key of the built-in table of tiles; called after the rules between values are checked.

    Raises:
        UsageError: a rule is broken, or the run differs from the one it continues, which is reported first.
        DataError: the file in --auto-tile is not a tile table.
    """
    continued = None if resumed is None else _Continued.of(resumed)
    if continued is not None:
        settings = continued.with_attention(settings)
    with _differing_first(settings, continued):
        asked = with_tokenizer(filled(settings, config))
        settings, tiling = in_tiles(asked, table_tiling(asked, config, device_class()), config)
    if continued is not None:
        continued.check_same(settings, config)
    return asked, settings, tiling


def filled(settings: TrainSettings, config: LanguageConfig) -> TrainSettings:
    """Fill in open values, except tile sizes, and check the values against each other and the model; repeating it changes nothing.

    Raises:
        UsageError: a rule is broken.
    """
    model, tiling, optimizer, run = settings.model, settings.tiling, settings.optimizer, settings.run
    if model.model is None and model.config_path is None and not brings_config(settings.checkpoints.init_from):
        model = replace(model, model=TINY)
    small = model.model is not None and is_small(model.model)
    length = checked_length(model.seq_len, config, config.n_positions)
    model = replace(model, seq_len=length)
    batch = tiling.batch if tiling.batch is not None else (8 if small else 1)
    lanes = 1 if tiling.lanes is None else tiling.lanes
    if tiling.minibatch == "auto":
        raise UsageError("is for nntask train and plan, on one machine, of nntask's own models", "give a number", flag="--minibatch", value="auto")
    minibatch = batch if tiling.minibatch == -1 else tiling.minibatch
    _divides("--minibatch", minibatch, "--batch", batch)
    per_tile = tiling.minibatch_tile
    if per_tile is not None:
        per_tile = minibatch if per_tile == -1 else per_tile
        _divides("--minibatch-tile", per_tile, "--minibatch", minibatch)
    if tiling.seq_tile is not None and tiling.seq_tile > length:
        raise UsageError(
            f"must be at most the sequence length {length}, got {tiling.seq_tile}", f"the nearest legal value is {length}", flag="--seq-tile"
        )
    tiling = replace(tiling, batch=batch, minibatch=minibatch, minibatch_tile=per_tile, lanes=lanes)
    lr = optimizer.lr if optimizer.lr is not None else (1e-3 if small else 3e-4)
    warmup = 10 if optimizer.warmup_steps is None else optimizer.warmup_steps
    alpha, rank = optimizer.lora_alpha, rank_of(settings)
    alpha = float(rank) if alpha is None and rank is not None else alpha
    optimizer = with_momentum(replace(optimizer, lr=lr, warmup_steps=warmup, lora_alpha=alpha))
    if run.steps is None and not run.nepochs:
        run = replace(run, steps=DEFAULT_STEPS)
    return with_objective(replace(settings, model=model, tiling=tiling, optimizer=optimizer, run=run), config)


def with_momentum(optimizer: OptimizerSettings) -> OptimizerSettings:
    """Fill in the momentum of Muon; replace a momentum of 0 of the others, which earlier versions stored, by their default."""
    if optimizer.optimizer == "muon":
        return replace(optimizer, momentum=MUON_MOMENTUM if optimizer.momentum is None else optimizer.momentum)
    return replace(optimizer, momentum=optimizer.momentum or None)


def is_small(preset: str) -> bool:
    """Return whether a preset learns in minutes; such presets have their own default batch and learning rate."""
    return preset.rpartition("-")[2] == TINY


def dtype_of(asked: str) -> str:
    """Return the arithmetic that a value of --dtype means."""
    return "fp32" if asked == "auto" else asked


def model_spec(settings: TrainSettings, config: ModelConfig, tiling: ModelTiling) -> ModelSpec:
    """Return the model that filled settings ask for; tiles do not matter for a model that is only read."""
    return ModelSpec(
        config=config,
        tiling=tiling,
        seq_len=known(settings.model.seq_len),
        dtype=dtype_of(settings.model.dtype),
        seed=settings.data.seed,
        flash=settings.model.attention != "stored",
        library=settings.model.attention == "cudnn",
        adapters=adapters_of(settings),
    )


def adapters_of(settings: TrainSettings) -> LoRA | None:
    """Return the adapters that `--train` asks for; None if all weights are trained."""
    rank, chosen = rank_of(settings), settings.optimizer
    return None if rank is None else LoRA(rank, known(chosen.lora_alpha), chosen.lora_dropout, adapts_experts(settings))


def data_spec(settings: TrainSettings, config: LanguageConfig, resumed: Checkpoint | None = None) -> DataSpec:
    """Return the data part of the settings, for a new run or one that continues from a checkpoint."""
    data = settings.data
    spec = DataSpec(
        dataset=data.dataset,
        path=data.dataset_path,
        val_path=data.val_path,
        select=data.dataset_select,
        tokenizer=data.tokenizer,
        tokenizer_path=data.tokenizer_path,
        vocab_size=config.vocab_size,
        objective=objective_of(settings, config),
    )
    return spec if resumed is None else with_kept_template(spec, resumed)


def with_tokenizer(settings: TrainSettings) -> TrainSettings:
    """Return settings with the tokenizer of the model of --init-from, if that has one and the settings name no other."""
    data, files = settings.data, settings.checkpoints
    is_open = brings_config(files.init_from) and data.tokenizer == "auto" and not data.tokenizer_path and not files.resume
    if is_open and has_tokenizer(path := model_path(files.init_from)):
        return replace(settings, data=replace(data, tokenizer_path=str(path)))
    return settings


def name_of(settings: TrainSettings) -> str:
    """Return the name of a run: its model's."""
    path, begin = settings.model.config_path, settings.checkpoints.init_from
    if brings_config(begin):
        source = Path(begin).resolve()
        return (source.parent.parent if source.parent.name == CHECKPOINTS else source).name
    return Path(path).stem if path else known(settings.model.model)


def directory_of(settings: TrainSettings, resumed: Checkpoint | None) -> Path:
    """Return the directory of a run: that of the resumed checkpoint (relative below the working directory), of --run-dir, or a new one in runs/."""
    if resumed is not None:
        here, run = Path.cwd(), run_of(resumed)
        return run.relative_to(here) if run.is_relative_to(here) else run
    return Path(settings.checkpoints.run_dir) if settings.checkpoints.run_dir else default_run_dir(name_of(settings))


def default_run_dir(model: str) -> Path:
    """Return runs/<time>-<model>, with a number at its end if that exists."""
    base = RUNS / f"{time.strftime('%Y%m%d-%H%M%S')}-{model}"
    path, number = base, 2
    while path.exists():
        path = base.with_name(f"{base.name}-{number}")
        number += 1
    return path


@dataclass(frozen=True, slots=True)
class _Continued:
    """A checkpoint to continue from, and the settings of its run."""

    checkpoint: Checkpoint
    settings: TrainSettings

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> _Continued:
        """Read the settings of a checkpoint."""
        settings = stored_settings(checkpoint)
        if settings.data.objective is None:  # written when causal was the only objective
            settings = replace(settings, data=replace(settings.data, objective="causal"))
        return cls(checkpoint, replace(settings, optimizer=with_momentum(settings.optimizer)))

    def with_attention(self, settings: TrainSettings) -> TrainSettings:
        """Inherit `attention` if it is still "auto", because the bits of results depend on it."""
        model = settings.model
        return replace(settings, model=replace(model, attention=self.settings.model.attention)) if model.attention == "auto" else settings

    def check_same(self, settings: TrainSettings, config: ModelConfig | None = None) -> None:
        """Check that model, tiling, data and optimizer are those of the checkpoint's run.

        Args:
            config: config of the model; None for a model without tiles.

        Raises:
            UsageError: they differ; the message names every difference.
        """
        differing = differences(self.settings, settings)
        if config is not None:
            was, now = self.checkpoint.config.to_dict(), config.to_dict()
            differing = [f"{key} (was {was.get(key)}, is {value})" for key, value in now.items() if was.get(key) != value] + differing
        if differing:
            raise UsageError(
                f"continues the same model, tiling, data and optimizer, but these differ: {', '.join(differing)}",
                "drop those flags, or start a new run",
                flag="--resume",
                value=self.checkpoint.path,
            )


def check_continued(settings: TrainSettings, resumed: Checkpoint) -> None:
    """Check that settings, in which values may be open, are those of the run to continue.

    Raises:
        UsageError: they differ; the message names every difference.
    """
    _Continued.of(resumed).check_same(settings)


@contextmanager
def _differing_first(settings: TrainSettings, continued: _Continued | None) -> Iterator[None]:
    """If a rule is broken inside, report first the differences between the settings and those of the continued run.

    Raises:
        UsageError: settings differ; the message names every difference.
    """
    try:
        yield
    except UsageError as error:
        if continued is not None:  # stored sizes may break rules only together with new ones
            try:
                continued.check_same(settings)
            except UsageError as differing:
                raise differing from error
        raise


def _divides(flag: str, value: int, of_flag: str, whole: int) -> None:
    """Check that `value` divides `whole`.

    Raises:
        UsageError: it does not; the message names the nearest divisor.
    """
    if whole % value:
        near = nearest(divisors(whole), value)
        raise UsageError(f"must divide {of_flag} = {whole}, got {value}", f"the nearest legal value is {near}", flag=flag)
