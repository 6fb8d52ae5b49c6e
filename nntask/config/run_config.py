"""What a run does, with every question answered: numbers for sizes, tiles and devices, and nothing to default again.

`resolution.resolve` makes a `RunConfig` of settings, which are what people typed; everything behind it takes the run, or the part of it that it
needs. Settings come along for what they say without any question (names of files to write, what to observe), and because config.toml and checkpoints
keep them.

An empty value that stays has a meaning: no adapters means that all weights are trained, no checkpoint that the run is new.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

from ..adapters.frozen_base import FrozenBase
from ..adapters.lora import LoRA
from ..checkpoints.store import Checkpoint
from ..data.spec import DataSpec
from ..data.special_tokens import CHAT_TEMPLATE
from ..hardware.machine_spec import MachineSpec, devices_alone
from ..models.interface import LanguageConfig, ModelConfig
from ..optim.lr_schedule import Schedule, make_schedule
from ..tiling.model_tiling import ModelTiling
from .cluster import ClusterSpec
from .settings import TrainSettings


@dataclass(frozen=True, slots=True)
class LanguageSpec:
    """A language model that is trained, whatever it is made of.

    Args:
        seq_len: tokens per sequence.
        seed: of its weights, dropout and data.
        dtype: arithmetic, a value of --dtype but not auto.
    """

    config: LanguageConfig
    seq_len: int
    seed: int
    dtype: str


@dataclass(frozen=True, slots=True)
class ModelSpec(LanguageSpec):
    """A model of tiles as it is built on a runtime.

    Args:
        tiling: sizes between 1 and the dimension.
        flash: whether attention does without the full score matrix.
        library: whether cuDNN may compute it on GPUs.
        adapters: what is trained beside frozen weights; None where all weights are trained.
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
        batch, minibatch: sequences of the step, and of those in flight at once.
        lanes: parallel lanes of gradient sums.
        order: in which the step executes when memory is short.
        recompute: what it makes again instead of keeping it, see `scheduler.planning.choose_plan`.
        update_on: who updates the weights: "device", "cpu" for CPU workers beside the devices, or "auto" until a forecast has chosen.
    """

    batch: int
    minibatch: int
    lanes: int
    order: str
    recompute: str
    update_on: Literal["device", "cpu", "auto"]

    @property
    def num_minibatches(self) -> int:
        """Minibatches of a step."""
        return self.batch // self.minibatch


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """What updates the weights; see the flags of these names."""

    kind: Literal["adamw", "adam", "sgd"]
    lr: float
    weight_decay: float
    eps: float
    beta1: float
    beta2: float
    momentum: float
    grad_clip: float


@dataclass(frozen=True, slots=True)
class ScheduleSpec:
    """The learning rate over the steps; see `nntask.optim.lr_schedule`."""

    kind: str
    lr: float
    warmup_steps: int
    min_lr: float
    start_lr: float
    full_lr_iter: int

    def over(self, steps: int) -> Schedule:
        """The learning rate of each of so many steps."""
        return make_schedule(
            self.kind,
            self.lr,
            steps=steps,
            warmup_steps=self.warmup_steps,
            min_lr=self.min_lr,
            start_lr=self.start_lr,
            full_lr_iter=self.full_lr_iter,
        )


@dataclass(frozen=True, slots=True)
class Length:
    """How long a run trains: so many steps, or where that is 0 so many passes over the data.

    Args:
        warmup_epochs: passes before the others, which do not count in the closing figures.
    """

    steps: int
    epochs: int
    warmup_epochs: int

    @property
    def least(self) -> int:
        """Optimizer steps at least, before the data are known."""
        return max(self.steps, 1)

    def on(self, batches_per_epoch: int) -> tuple[int, int]:
        """Optimizer steps, and how many of them are of warm-up epochs."""
        if self.steps:
            return self.steps, 0
        warmup = self.warmup_epochs * batches_per_epoch
        return warmup + self.epochs * batches_per_epoch, warmup


@dataclass(frozen=True, slots=True)
class Saving:
    """When checkpoints are written, and how many are kept.

    Args:
        every: steps between two of them; 0 for none before the end.
        at_end: whether the state after the last step is saved.
        keep: newest checkpoints that stay.
    """

    every: int
    at_end: bool
    keep: int


@dataclass(frozen=True, slots=True)
class Start:
    """Where the weights are that a run begins with; a model of its own, from the seed, where nothing else is named.

    Args:
        is_continued: whether the flags are of a run that goes on, which has model, tiling and batch already. A new run that goes on from a checkpoint
            of its own, because the nodes of a cluster have changed, still has the flags of a new one.
        resumed: the checkpoint to continue from; None for none.
        base: the frozen weights that adapters stand beside; None where all weights are trained.
        directory: the model directory of a new run of all weights; None where there is none.
        weights, optimizer: files that are read before the first step; None for none.
    """

    is_continued: bool
    resumed: Checkpoint | None
    frozen_base: FrozenBase | None
    directory: Path | None
    weights: Path | None
    optimizer: Path | None

    @property
    def step(self) -> int:
        """Steps that are done already."""
        return 0 if self.resumed is None else self.resumed.step

    @property
    def flag(self) -> str:
        """The flag that names the run's directory."""
        return "--run-dir" if self.resumed is None else "--resume"


@dataclass(frozen=True, slots=True)
class TileChoice:
    """How tile sizes were chosen.

    Args:
        given: sizes that flags say, by flag; the others are those of a table, or found by trial.
        is_measured: whether the others are to be found by trial before the run begins.
        table: the file that takes what is found; "" for none.
    """

    given: Mapping[str, int]
    is_measured: bool
    table: str


@dataclass(frozen=True, slots=True)
class LanguageRun:
    """A run of any language model.

    Args:
        name: of the model, after which the run is called.
        directory: of the run; made when it starts.
        machine: of this process; each node of a cluster has its own.
        cluster: whose nodes train; None for this machine alone.
        traced: the first and the last step that are traced; None for all, if any are.
        settings: as typed, with every default filled in.
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
    settings: TrainSettings

    def in_order(self, order: str) -> Self:
        """The run with its steps in another order."""
        return replace(self, step=replace(self.step, order=order))

    def recomputing(self, recompute: str) -> Self:
        """The run with other data made again in its steps."""
        return replace(self, step=replace(self.step, recompute=recompute))

    def updating_on(self, updater: Literal["device", "cpu"]) -> Self:
        """The run with that updater of its weights, which it writes down, so that a run that is continued goes on with the same arithmetic."""
        resources = replace(self.settings.resources, update_on=updater)
        return replace(
            self,
            step=replace(self.step, update_on=updater),
            machine=self.machine if updater == "cpu" else devices_alone(self.machine, resources.ncpu),
            settings=replace(self.settings, resources=resources),
        )

    def planned(self, order: str, recompute: str) -> Self:
        """The run with the order of its steps that a planner has chosen, and with what that makes again, where it was free to choose."""
        run = self.in_order(order)
        return run.recomputing(recompute) if self.step.recompute == "auto" else run


def with_kept_template(data: DataSpec, checkpoint: Checkpoint) -> DataSpec:
    """Return the data of a run that is continued, with the chat template that its checkpoint keeps if the file of the template is gone."""
    objective, kept = data.objective, checkpoint.path / CHAT_TEMPLATE
    if not objective.template or Path(objective.template).exists() or not kept.is_file():
        return data
    return replace(data, objective=replace(objective, template=str(kept)))


@dataclass(frozen=True, slots=True)
class RunConfig(LanguageRun):
    """A run of a model that is made of tiles.

    Args:
        tiles: how tile sizes were chosen.
    """

    model: ModelSpec
    tiles: TileChoice

    def after(self, checkpoint: Checkpoint) -> RunConfig:
        """The same run, going on from a checkpoint of its own."""
        start = replace(self.start, resumed=checkpoint, directory=None, weights=None, optimizer=None)
        return replace(self, start=start, data=with_kept_template(self.data, checkpoint))

    def beside(self, base: FrozenBase) -> RunConfig:
        """The same run, with these frozen weights beside its adapters."""
        return replace(self, start=replace(self.start, frozen_base=base))

    def on(self, machine: MachineSpec) -> RunConfig:
        """The same run on another machine."""
        return replace(self, machine=machine)

    def cut(self, *, batch: int | None = None, minibatch: int | None = None, **sizes: int) -> RunConfig:
        """The run with another batch, minibatch, or other tile sizes, to see what it would need; what it writes down stays as it was."""
        step = replace(self.step, batch=batch or self.step.batch, minibatch=minibatch or self.step.minibatch)
        return replace(self, step=step, model=replace(self.model, tiling=replace(self.model.tiling, **sizes)))

    def with_model(self, **changes: object) -> RunConfig:
        """The run of a model that differs in some fields of its `ModelSpec`; what it writes down stays as it was."""
        return replace(self, model=replace(self.model, **changes))  # type: ignore[arg-type]
