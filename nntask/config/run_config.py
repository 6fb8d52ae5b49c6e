"""Resolved configuration of a run: numbers for sizes, tiles and devices, with no defaults left to fill in.

`resolution.resolve` turns settings, which users give, into a `RunConfig`; all later code takes the run, or the part of it that it needs. A run keeps
its settings, for values that need no resolution (names of output files, options to observe) and because config.toml and checkpoints store them.

An empty value is meaningful: without adapters all weights are trained, without a checkpoint the run is new.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

from ..adapters.frozen_base import FrozenBase
from ..adapters.lora import LoRA
from ..architecture.family_config import ModelConfig
from ..architecture.interface import LanguageConfig
from ..checkpoints.store import Checkpoint
from ..data.spec import DataSpec
from ..data.special_tokens import CHAT_TEMPLATE
from ..hardware.machine_spec import MachineSpec, devices_alone
from ..optim.lr_schedule import Schedule, make_schedule
from ..tiling.model_tiling import ModelTiling
from .cluster import ClusterSpec
from .settings import TrainSettings


@dataclass(frozen=True, slots=True)
class LanguageSpec:
    """A language model to train, with or without tiles.

    Args:
        config: config of the model.
        seq_len: number of tokens per sequence.
        seed: seed of its weights, dropout and data.
        dtype: arithmetic, a value of --dtype except auto.
    """

    config: LanguageConfig
    seq_len: int
    seed: int
    dtype: str


@dataclass(frozen=True, slots=True)
class ModelSpec(LanguageSpec):
    """A model with tiles, as it is built on a runtime.

    Args:
        tiling: tile sizes, each between 1 and its dimension.
        flash: whether attention avoids the full matrix of scores.
        library: whether cuDNN may compute attention on GPUs.
        adapters: adapters to train on frozen weights; None if all weights are trained.
    """

    config: ModelConfig
    tiling: ModelTiling
    flash: bool
    library: bool
    adapters: LoRA | None


@dataclass(frozen=True, slots=True)
class StepSpec:
    """An optimizer step.

    Args:
        batch, minibatch: number of sequences of the step, and of those in flight at once.
        lanes: number of parallel lanes of gradient sums.
        order: order in which the step executes if memory is short.
        recompute: values to recompute instead of keeping them, an argument of `scheduler.planning.choose_plan`.
        update_on: workers that update the weights: "device", "cpu" for CPU workers while devices compute the rest, or "auto" before a forecast.
    """

    batch: int
    minibatch: int
    lanes: int
    order: str
    recompute: str
    update_on: Literal["device", "cpu", "auto"]

    @property
    def num_minibatches(self) -> int:
        """Number of minibatches of a step."""
        return self.batch // self.minibatch


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """The optimizer that updates the weights; fields are named like their flags."""

    kind: Literal["adamw", "adam", "sgd", "muon", "adamw8bit"]
    lr: float
    weight_decay: float
    eps: float
    beta1: float
    beta2: float
    momentum: float
    grad_clip: float


@dataclass(frozen=True, slots=True)
class ScheduleSpec:
    """The learning rate over the steps, with the arguments of `nntask.optim.lr_schedule.make_schedule`."""

    kind: str
    lr: float
    warmup_steps: int
    min_lr: float
    warmup_start_lr: float | None

    def over(self, steps: int) -> Schedule:
        """Return the learning rate of each of `steps` steps."""
        return make_schedule(
            self.kind, self.lr, steps=steps, warmup_steps=self.warmup_steps, warmup_start_lr=self.warmup_start_lr, min_lr=self.min_lr
        )


@dataclass(frozen=True, slots=True)
class Length:
    """Length of training: `steps` steps, or if that is 0 `epochs` passes over the data.

    Args:
        warmup_epochs: number of passes at the beginning, among `epochs`, that the closing figures leave out.
    """

    steps: int
    epochs: int
    warmup_epochs: int = 0

    @property
    def least(self) -> int:
        """Smallest number of optimizer steps, before the data are known."""
        return max(self.steps, 1)

    def on(self, batches_per_epoch: int) -> tuple[int, int]:
        """Return the number of optimizer steps, and how many of them belong to warm-up epochs."""
        if self.steps:
            return self.steps, 0
        return self.epochs * batches_per_epoch, self.warmup_epochs * batches_per_epoch


@dataclass(frozen=True, slots=True)
class Saving:
    """Checkpoints that a run writes and keeps.

    Args:
        every: number of steps between two checkpoints; 0 for none before the end.
        at_end: whether to save the state after the last step.
        keep: number of newest checkpoints to keep.
    """

    every: int
    at_end: bool
    keep: int


@dataclass(frozen=True, slots=True)
class Start:
    """Initial weights of a run; if no field names any, the model is initialised from the seed.

    Args:
        is_continued: whether the flags are those of a resumed run, which has its model, tiling and batch already. A new run that continues from its
            own checkpoint, because the nodes of a cluster have changed, still has the flags of a new run.
        resumed: checkpoint to continue from; None for none.
        frozen_base: frozen weights that the adapters belong to; None if all weights are trained.
        directory: model directory or GGUF file of a new run that trains all weights; None for none.
        weights, optimizer: files with nntask's names that are read before the first step; None for none.
    """

    is_continued: bool
    resumed: Checkpoint | None
    frozen_base: FrozenBase | None
    directory: Path | None
    weights: Path | None
    optimizer: Path | None

    @property
    def step(self) -> int:
        """Number of steps that are done already."""
        return 0 if self.resumed is None else self.resumed.step

    @property
    def flag(self) -> str:
        """The flag that names the run's directory."""
        return "--run-dir" if self.resumed is None else "--resume"


@dataclass(frozen=True, slots=True)
class TileChoice:
    """Origin of the tile sizes.

    Args:
        given: flag -> size, for sizes that flags set; the others are from a table or a search.
        is_measured: whether to search for the others before the run begins.
        table: file to write the found sizes to; "" for none.
    """

    given: Mapping[str, int]
    is_measured: bool
    table: str


@dataclass(frozen=True, slots=True)
class LanguageRun:
    """A run of any language model.

    Args:
        name: name of the model, which names the run.
        directory: directory of the run; created at its start.
        machine: machine of this process; each node of a cluster has its own.
        cluster: cluster whose nodes train; None for this machine alone.
        traced: first and last traced step; None for all steps, if any are traced.
        command: command that continues the run, without --resume.
        sums_loss: whether losses are printed and written as sums over the tokens of a step instead of means.
        settings: settings of the user, with every default filled in.
    """

    name: str
    directory: Path
    model: LanguageSpec
    step: StepSpec
    optimizer: OptimizerSpec
    schedule: ScheduleSpec
    length: Length
    saving: Saving
    data: DataSpec
    machine: MachineSpec
    cluster: ClusterSpec | None
    start: Start
    traced: tuple[int, int] | None
    command: str
    sums_loss: bool
    settings: TrainSettings

    def in_order(self, order: str) -> Self:
        """Return the run with another order of its steps."""
        return replace(self, step=replace(self.step, order=order))

    def recomputing(self, recompute: str) -> Self:
        """Return the run with another choice of values to recompute."""
        return replace(self, step=replace(self.step, recompute=recompute))

    def updating_on(self, updater: Literal["device", "cpu"]) -> Self:
        """Return the run with this updater of its weights. Its settings change too, so that a resumed run continues with the same arithmetic."""
        resources = replace(self.settings.resources, update_on=updater)
        return replace(
            self,
            step=replace(self.step, update_on=updater),
            machine=self.machine if updater == "cpu" else devices_alone(self.machine, resources.ncpu),
            settings=replace(self.settings, resources=resources),
        )


def with_kept_template(data: DataSpec, checkpoint: Checkpoint) -> DataSpec:
    """Return the data of a resumed run, with the chat template that its checkpoint keeps if the file of the template is gone."""
    objective, kept = data.objective, checkpoint.path / CHAT_TEMPLATE
    if not objective.template or Path(objective.template).exists() or not kept.is_file():
        return data
    return replace(data, objective=replace(objective, template=str(kept)))


@dataclass(frozen=True, slots=True)
class RunConfig(LanguageRun):
    """A run of a model with tiles.

    Args:
        tiles: origin of the tile sizes.
    """

    model: ModelSpec
    tiles: TileChoice

    def after(self, checkpoint: Checkpoint) -> RunConfig:
        """Return the same run, continuing from its own checkpoint."""
        start = replace(self.start, resumed=checkpoint, directory=None, weights=None, optimizer=None)
        return replace(self, start=start, data=with_kept_template(self.data, checkpoint))

    def beside(self, base: FrozenBase) -> RunConfig:
        """Return the same run with these frozen weights for its adapters."""
        return replace(self, start=replace(self.start, frozen_base=base))

    def on(self, machine: MachineSpec) -> RunConfig:
        """Return the same run on another machine."""
        return replace(self, machine=machine)

    def cut(self, *, batch: int | None = None, minibatch: int | None = None, **sizes: int) -> RunConfig:
        """Return the run with another batch, minibatch, or tile sizes, to estimate its needs; its settings stay the same."""
        step = replace(self.step, batch=batch or self.step.batch, minibatch=minibatch or self.step.minibatch)
        return replace(self, step=step, model=replace(self.model, tiling=replace(self.model.tiling, **sizes)))

    def with_model(self, **changes: object) -> RunConfig:
        """Return the run with changes of its `ModelSpec`; its settings stay the same."""
        return replace(self, model=replace(self.model, **changes))  # type: ignore[arg-type]
