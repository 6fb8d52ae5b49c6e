"""Language models of transformers in ``nntask train`` and ``nntask plan``: from the config of a model directory, or of a run, to the run's parts.

A directory is read in the same way as those of nntask's own families: no pickle, no foreign code, and no weight before a task needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from nntask.checkpoints import Checkpoint
from nntask.config import LanguageRun, OptimizerSpec, TrainSettings, resolve_untiled
from nntask.hardware import FlopCounts, MachineModel, MachineRequest, check_budgets, requested_devices, reuse_freed_memory, this_machine, with_budgets
from nntask.io import parse_size
from nntask.planning import CapturedStep, Needs, least_needs, more_memory, no_collections, plan_step
from nntask.training import Opened, check_disk, train_untiled
from scheduler import Runtime
from scheduler.planning import PlannedOrder

from ..capture.objectives import loss_of, objective_of, scalar
from ..releases import check_packages
from ..session.arguments import PlannedPasses
from ..session.memory import outside_budget
from ..session.python_state import undone_on_failure
from ..session.session import Session
from ..steps.captures import Captures
from ..steps.dry import CapturedPasses, PassTerms, captured_step
from ..steps.modules import shared_buffers
from ..steps.muon import AdamW8bitOptions, muon_of
from ..tasks.calls import Capture
from ..tasks.cuts import LARGEST_TILE, tiles_of
from ..tasks.segments import flops_of
from ..tasks.step import Pass
from .collation import Collator, load_tokenizer
from .engine import TorchEngine
from .flags import checked_settings
from .language import TITLES, LanguageModelConfig, language_config


def train(
    settings: TrainSettings,
    stated: Mapping[str, Any],
    values: Mapping[str, Any],
    source: str,
    resumed: Checkpoint | None,
    requested: MachineRequest,
    announce: Callable[[], object],
) -> int:
    """Train a language model and return the exit code.

    Args:
        settings: settings of the run.
        stated: settings that the user has given, by flag.
        values: content of the model's config.json.
        source: name of the file with `values`, for messages.
        resumed: the checkpoint to continue from; None for a new run.
        requested: devices and memory that the settings ask for.
        announce: function that is called after the model and the flags have been checked.

    Raises:
        NntaskError: the run failed, in one of the ways of `nntask.training.train`.
    """
    check_packages(Session)
    config = language_config(values, source, settings.model.dropout)
    settings = checked_settings(settings, stated, config)
    announce()
    machine = with_budgets(requested_devices(on_cpus(requested), "fp32"))
    return train_untiled(resolve_untiled(settings, config, resumed, machine), TorchModel(config, settings))


def plan(
    settings: TrainSettings,
    stated: Mapping[str, Any],
    values: Mapping[str, Any],
    source: str,
    resumed: Checkpoint | None,
    requested: MachineRequest,
    target: MachineModel | None,
) -> dict[str, Any]:
    """Return the figures of ``nntask plan --json``; the other arguments are those of `train`.

    Args:
        target: an imaginary machine; None for this one with the budgets of the settings.

    Raises:
        UsageError, DoesNotFit: the step cannot be planned, as in `nntask.planning.plan_run`.
    """
    check_packages(Session)
    config = language_config(values, source, settings.model.dropout)
    settings = checked_settings(settings, stated, config)
    machine = requested_devices(on_cpus(requested), "fp32", checks=target is None)
    if target is None:
        machine = with_budgets(machine)
        check_budgets(machine)
        check_disk(machine.disk)
        target = this_machine(machine)
    run, model = resolve_untiled(settings, config, resumed, machine), TorchModel(config, settings)
    outside = outside_budget()
    with no_collections():
        figures = plan_step(model.capture(run), run, target, partial(model.changes, run, target))
    return {**figures, "trained_parameters": config.num_parameters, "rows_of_tiles": model.rows_of_tiles, "outside_budget_bytes": outside}


def on_cpus(requested: MachineRequest) -> MachineRequest:
    """Return the machine without GPUs; simulated devices stay."""
    return replace(requested, num_gpus=0)


class TorchModel:
    """A language model of transformers, as an `UntiledModel` of nntask.

    Args:
        config: configuration of the model.
        settings: settings of its run.
    """

    def __init__(self, config: LanguageModelConfig, settings: TrainSettings) -> None:
        self._config = config
        self._made: Collator | None = None
        if settings.resources.recompute == "block":
            config.recompute_blocks()
        module = config.module
        self._terms = PassTerms(tiles_of(module.named_parameters(), parse_size(LARGEST_TILE, "largest_tile")))
        self._captures = Captures(module, scalar(objective_of(loss_of)), self._terms, shared=shared_buffers(module))

    @property
    def rows_of_tiles(self) -> dict[str, int]:
        """Number of rows in a tile, for each parameter that is cut."""
        return {name: rows for name, (_, rows) in self._terms.tiles.items()}

    def check(self, run: LanguageRun) -> None:
        """Check that the model can learn from the run's data.

        Raises:
            UsageError: tokens must be masked, and the tokenizer has no mask token.
            DataError: transformers cannot read the tokenizer.
        """
        self._collator(run).check()

    def capture(self, run: LanguageRun) -> CapturedPasses:
        """Return the run's step, captured from shapes; weights of a new run are attached.

        Raises:
            UsageError: the model cannot be captured.
            DataError: the directory does not hold the model's weights.
        """
        module, count = self._config.module, run.step.num_minibatches
        minibatches = [self._collator(run).example(run.step.minibatch, run.model.seq_len)] * count
        with undone_on_failure(self._captures.world) as undo:
            passes = [use.tasks for use in self._captures.passes_over(minibatches, "train", count)]
            undo()  # the session begins with the state of Python that this capture found
        optimizer, clip = optimizer_of(run.optimizer, module), run.optimizer.grad_clip
        captured = captured_step(module, optimizer, passes, minibatches, self._terms, max_norm=clip, weights=run.start.directory)
        return captured.recomputing(run.step.recompute)

    def changes(self, run: LanguageRun, target: MachineModel, needs: Needs, full: str = "") -> Sequence[str]:
        """Return changes of flags, each of which would make the step fit."""
        remedies = more_memory(target, needs, full=full)
        if run.start.is_continued or run.step.minibatch == 1:
            return remedies
        smaller = replace(run, step=replace(run.step, minibatch=1))
        captured = self.capture(smaller)
        if least_needs(captured.plan, target, run.step.recompute, quick=True, reading=captured.reading).fit(target):
            remedies.append("--minibatch 1")
        return remedies

    @contextmanager
    def open(self, run: LanguageRun, runtime: Runtime, step: CapturedStep, order: PlannedOrder) -> Iterator[Opened]:
        """Yield the engine on the runtime of the run; a checkpoint gives its weights later."""
        assert isinstance(step, CapturedPasses)  # `capture` has returned it
        reuse_freed_memory()
        module, counts = self._config.module, _counts(run, step.passes[0])
        optimizer, clip = optimizer_of(run.optimizer, module), run.optimizer.grad_clip
        terms: dict[str, Any] = {"max_grad_norm": clip, "seed": run.model.seed, "on": (run.machine, runtime), "weights": run.start.directory}
        terms |= {"order": run.step.order, "recompute": run.step.recompute, "planned": PlannedPasses(self._captures, step, order)}
        with Session(module, optimizer, minibatches=run.step.num_minibatches, **terms) as session:
            engine = TorchEngine(run, session, self._collator(run))
            says_bits, about = self._config.kind == "causal", partial(self._about, run, engine)
            yield Opened(engine, counts, about, says_bits=says_bits, config=self._config.to_dict())

    def _about(self, run: LanguageRun, engine: TorchEngine) -> Sequence[str]:
        cut = [f"{rows} rows of {name}" for name, rows in self.rows_of_tiles.items()]
        tiles = ", ".join(["each tensor is one", *cut])
        size = f"{self._config.num_parameters / 1e6:.1f} M parameters; {run.step.batch} x {run.model.seq_len} tokens a step"
        return [f"{run.name}: {TITLES[self._config.kind]}, {size}", f"tiles: {tiles}; {engine.num_tasks} tasks a step"]

    def _collator(self, run: LanguageRun) -> Collator:
        if self._made is None:
            self._made = Collator(self._config.kind, load_tokenizer(run.data.tokenizer_path), self._config.module, run.model.seed)
        return self._made


def optimizer_of(spec: OptimizerSpec, module: torch.nn.Module) -> torch.optim.Optimizer:
    """Return PyTorch's optimizer for a run; matrices decay, vectors do not."""
    groups = [
        {"params": [p for p in module.parameters() if (p.dim() > 1) == is_matrix], "weight_decay": spec.weight_decay if is_matrix else 0.0}
        for is_matrix in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    if spec.kind == "muon":
        options = {"lr": spec.lr, "weight_decay": spec.weight_decay, "momentum": spec.momentum, "betas": (spec.beta1, spec.beta2), "eps": spec.eps}
        return muon_of(module, options, vectors_decay=False)
    if spec.kind == "sgd":
        return torch.optim.SGD(groups, lr=spec.lr, momentum=spec.momentum)
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "adamw8bit": AdamW8bitOptions}
    return kinds[spec.kind](groups, lr=spec.lr, betas=(spec.beta1, spec.beta2), eps=spec.eps)


def _counts(run: LanguageRun, one: Pass) -> FlopCounts:
    """Return the floating-point operations of one sequence, counted over the captured calls of a minibatch."""
    forward, both = (flops / run.step.minibatch for flops in flops_in(one.captured))
    return FlopCounts(forward, both - forward, both, "products of a step")


def flops_in(captured: Capture) -> tuple[float, float]:
    """Return the floating-point operations of a pass up to its loss, and of the whole pass."""
    forward = total = 0.0
    for call in captured.calls:
        total += flops_of(call)
        if captured.result.storage in call.made:
            forward = total
    return forward, total
