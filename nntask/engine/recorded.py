"""Implementation of the training loop's interface by a language model with recorded steps for training, validation and timing.

A training step is the whole batch: forward and backward passes of every minibatch, and the optimizer. It is the step that was captured and planned
before memory was taken, on the engine's data, if there is one. Other steps are recorded at their first use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler import Runtime, Step, Ticket, contribution
from scheduler.machine import Binding, WorkerKind
from scheduler.planning import PlannedOrder
from tiles import TileTensor

from ..config.run_config import OptimizerSpec, RunConfig
from ..data.batch import Batch
from ..data.dataset import Dataset
from ..data.objectives import Objective
from ..data.tokenizer import Tokenizer
from ..hardware.allocator import give_back_freed
from ..hardware.flops import known_gemm_peak
from ..hardware.gpus import gpu_peak
from ..models.language import LanguageModel
from ..nn.autograd import accumulation, no_grad
from ..optim.adamw8bit import AdamW8bit
from ..optim.muon import Muon, hidden_matrices, muon_groups
from ..optim.optimizers import SGD, Adam, AdamW, Optimizer, Tiles, decay_groups, norm_of
from ..optim.sharded import DataShard, Exchange, Transport
from .interface import Outcome
from .models import build_model

Inputs = Mapping[str, Any]
"""A `TileTensor` for each array of a batch, by its name."""
Sampler = Callable[[RunConfig, LanguageModel, Runtime, Tokenizer | None, int, Callable[[], bool]], str]
"""Function that returns a sample of a trained model (`nntask.inference.sample_text`)."""
FREED_SECONDS: Final = 5.0
"""Interval at which freed memory is returned to the system if memory is short. Returning it takes up to 25 ms. Without it, GPT-2 small in an eighth
of the memory it needs had 140 MB of holes between allocations in use after three steps, and 110 MB after one step of half a minute."""


@dataclass(frozen=True, slots=True)
class _InferenceStep:
    """A recorded step with its inputs and its output."""

    step: Step
    inputs: Inputs
    output: TileTensor

    def run(self, batch: Batch) -> npt.NDArray[Any]:
        """Write the inputs, replay, and read the output."""
        for name, tensor in self.inputs.items():
            tensor.write(batch.arrays[name])
        value: npt.NDArray[Any] = self.step.replay().read(self.output)
        return value


def build_optimizer(model: LanguageModel, spec: OptimizerSpec, tiles_of: Tiles | None = None, *, on_cpu: bool = False) -> Optimizer:
    """Build the optimizer of a model.

    Args:
        on_cpu: whether only CPU workers update, while devices compute the rest.
        tiles_of: numbers of the tiles whose state is held here, by name of the parameter; None for all.
    """
    groups, betas = decay_groups(model, spec.weight_decay), (spec.beta1, spec.beta2)
    shared: dict[str, Any] = {"max_norm": spec.grad_clip, "tiles_of": tiles_of, "on_cpu": on_cpu}
    if spec.kind == "sgd":
        return SGD(groups, spec.lr, momentum=spec.momentum, **shared)
    if spec.kind == "muon":
        groups, shared = muon_groups(model, spec.weight_decay), {**shared, "pieces": hidden_matrices(model)}
        return Muon(groups, spec.lr, momentum=spec.momentum, betas=betas, eps=spec.eps, **shared)
    kinds = {"adam": Adam, "adamw": AdamW, "adamw8bit": AdamW8bit}
    return kinds[spec.kind](groups, spec.lr, betas=betas, eps=spec.eps, **shared)


def exchange_of(model: LanguageModel, spec: OptimizerSpec, shard: DataShard, transport: Transport) -> Exchange:
    """Return the exchange of a node; the optimizer updates its tiles (`Exchange.tiles_of`), of which those of `Optimizer.whole` stay together."""
    whole = {name: piece.matrix for name, piece in hidden_matrices(model).items()} if spec.kind == "muon" else {}
    return Exchange([p for p in model.parameters() if p.trainable], shard, transport, whole)


@dataclass(frozen=True, slots=True)
class StepSymbols:
    """Symbolic handles of a training step that was captured without memory.

    Attributes:
        data: data that exists before the step, by name (`named_data`).
        losses: loss (1,) of each minibatch.
        squares: sum of squares of the gradient (1,); None on a node that does not have it.
    """

    data: Mapping[str, Binding]
    losses: Sequence[TileTensor]
    squares: TileTensor | None


class PlannedStep(NamedTuple):
    """A captured training step in its planned order, and the kind of worker of each of its tasks; None for any kind."""

    order: PlannedOrder
    symbols: StepSymbols
    kinds: Sequence[WorkerKind] | None = None


def named_data(model: LanguageModel, optimizer: Optimizer, inputs: Sequence[Inputs]) -> dict[str, Binding]:
    """Return the data that exists before a training step, by name: parameters, state of the optimizer, and inputs.

    Args:
        inputs: inputs of each minibatch.
    """
    tensors = {name: (parameter.data, parameter.trainable) for name, parameter in model.named_parameters().items()}
    tensors |= {name: (tensor, True) for name, tensor in optimizer.tensors().items()}
    tensors |= {name: (tensor, False) for name, tensor in {**model.constants(), "options of the optimizer": optimizer.hyper}.items()}
    tensors |= {f"{name} of minibatch {number}": (tensor, False) for number, given in enumerate(inputs) for name, tensor in given.items()}
    return {name: Binding(tensor.handles, is_written) for name, (tensor, is_written) in tensors.items()}


def emit_training_step(
    model: LanguageModel, optimizer: Optimizer, inputs: Sequence[Inputs], exchange: Exchange | None = None
) -> tuple[list[TileTensor], TileTensor | None]:
    """Emit forward and backward passes of every minibatch and the update.

    A minibatch is one contribution to the sums over minibatches; if there is only one, each of its tiles is one. If the inputs have a factor, it
    is that of the mean over the whole batch; otherwise each of n minibatches counts 1 / n.

    Args:
        exchange: exchange with the other nodes of a cluster; `inputs` are then those of this node.

    Returns:
        The losses (1,), whose sum over all nodes is the mean over the batch, and the sum of squares of the gradient (1,), which is None on nodes that
        do not have it.
    """
    model.train()
    numbers = range(len(inputs)) if exchange is None else exchange.shard.minibatches
    count = len(inputs) if exchange is None else exchange.shard.num_minibatches
    losses = []
    with accumulation():
        for number, given in zip(numbers, inputs, strict=True):
            with contribution(number) if count > 1 else nullcontext():
                loss = model(**given, scale=1.0 if "factor" in given else 1 / count, share=1 / count, minibatch=number)
                loss.backward()
            losses.append(loss.data)
    if exchange is not None:
        exchange.emit(optimizer)
        return losses, optimizer.grad_norm
    optimizer.step()
    assert optimizer.grad_norm is not None  # step() has just set it
    return losses, optimizer.grad_norm


class Inference:
    """A model that scores text.

    Args:
        context: number of tokens of a sequence.
        objective: training objective of the model; None for the next token.
    """

    def __init__(self, model: LanguageModel, runtime: Runtime, context: int, objective: Objective | None = None) -> None:
        self.model, self.runtime, self.context, self.objective = model, runtime, context, objective or Objective()
        self._steps: dict[tuple[str, int], _InferenceStep] = {}

    def model_tensors(self) -> Mapping[str, TileTensor]:
        """Return the parameters that are learnt, by name."""
        return self.model.trained_tensors()

    def evaluate(self, batch: Batch) -> float:
        """Return the sum of the losses of a batch's targets, except those of -1; changes nothing."""
        recorded = self._recorded("evaluate", len(batch), lambda: self._emit_loss(len(batch), training=False))
        return float(recorded.run(batch)[0])

    def _recorded(self, name: str, size: int, emit: Callable[[], tuple[Inputs, Callable[[], TileTensor]]]) -> _InferenceStep:
        """Return the recorded step `name` for a size, captured at its first use."""
        found = self._steps.get((name, size))
        if found is None:
            inputs, body = emit()
            with self.runtime.record() as step:
                output = body()
            found = self._steps[name, size] = _InferenceStep(step, inputs, output)
        return found

    def _emit_loss(self, batch: int, *, training: bool) -> tuple[Inputs, Callable[[], TileTensor]]:
        given = self._inputs_for(batch, self.objective.scored_names)

        def body() -> TileTensor:
            self.model.train(training)
            with no_grad():
                return self.model(**given, reduction="sum").data

        return given, body

    def _inputs_for(self, batch: int, names: Sequence[str]) -> Inputs:
        return self.model.inputs(batch, self.context, names, self.objective.target_length)


@dataclass(frozen=True, slots=True)
class InFlight:
    """A training step in flight.

    Attributes:
        meanwhile: function that is called now and then while the program waits for the step.
    """

    ticket: Ticket
    losses: Sequence[TileTensor]
    squares: TileTensor | None
    meanwhile: Callable[[], None]

    def shard_outcome(self) -> tuple[list[float], float | None]:
        """Wait until this node's shard of the step is over. Return the losses of its minibatches, and the gradient's sum of squares or None."""
        self.ticket.wait(self.meanwhile)
        losses = [float(self.ticket.read(loss)[0]) for loss in self.losses]
        return losses, None if self.squares is None else float(self.ticket.read(self.squares)[0])

    def result(self) -> Outcome:
        """Wait until the step is over."""
        losses, squares = self.shard_outcome()
        assert squares is not None  # only a node of several may be without it
        return outcome_of(losses, squares)


def outcome_of(losses: Sequence[float], squares: float) -> Outcome:
    """Return the outcome of a step, from the losses of all its minibatches in their order and the sum of squares of the gradient."""
    return Outcome(sum(losses), norm_of(squares))


class RecordedEngine(Inference):
    """A language model, its optimizer and their recorded step.

    Args:
        run: configuration of the run; its order of execution applies to training steps, while other steps choose their own.
        model: model to train; None to build a new one.
        shard: shard of a step that this node computes; None for the whole step.
        transport: connection to the other nodes, if there are any.
        sampler: function of the run, the model, its runtime and the arguments of `sample` that returns a text; None if nothing samples it.
        planned: the step, if it has been captured and planned; None to record it at its first use.

    Raises:
        RecordingError: the model differs from the one that was captured (`Runtime.adopt`).
    """

    def __init__(
        self,
        run: RunConfig,
        runtime: Runtime,
        model: LanguageModel | None = None,
        shard: DataShard | None = None,
        transport: Transport | None = None,
        sampler: Sampler | None = None,
        planned: PlannedStep | None = None,
    ) -> None:
        super().__init__(build_model(run.model, runtime) if model is None else model, runtime, run.model.seq_len, run.data.objective)
        self.run, self._sampler = run, sampler
        self.exchange: Exchange | None = None
        if shard is not None and transport is not None:
            self.exchange = exchange_of(self.model, run.optimizer, shard, transport)
        tiles_of = None if self.exchange is None else self.exchange.tiles_of
        self.optimizer = build_optimizer(self.model, run.optimizer, tiles_of, on_cpu=run.step.update_on == "cpu")
        self._minibatch = run.step.minibatch
        count = run.step.num_minibatches if shard is None else len(shard.minibatches)
        self._inputs = [self._inputs_for(self._minibatch, self.objective.names) for _ in range(count)]
        self._step: Step | None = None
        self._losses: Sequence[TileTensor] = []
        self._squares: TileTensor | None = None
        if planned is not None:
            symbols = planned.symbols
            self._step = runtime.adopt(planned.order, symbols.data, named_data(self.model, self.optimizer, self._inputs), planned.kinds)
            self._losses, self._squares = symbols.losses, symbols.squares
        self._freed_at = -inf  # time at which freed memory was last returned to the system

    @property
    def num_trained(self) -> int:
        """Number of weights that are learnt."""
        return self.model.num_trained

    @property
    def num_tasks(self) -> int:
        """Number of tasks of one optimizer step."""
        return self._training_step().num_tasks

    @property
    def order(self) -> PlannedOrder:
        """Order in which an optimizer step executes, with its expected traffic."""
        order = self._training_step().order
        assert order is not None  # recording has ended
        return order

    @property
    def step(self) -> Step:
        """The recorded optimizer step."""
        return self._training_step()

    def optimizer_tensors(self) -> Mapping[str, TileTensor]:
        """Return the state of the optimizer by name."""
        return self.optimizer.tensors()

    def peak_flops(self) -> float:
        """Return the flop/s of matrix products on the GPUs, else on the CPU workers, in the element type of the model."""
        return gpu_peak(self.runtime.gpus) or known_gemm_peak(max(len(self.runtime.stats()["busy_seconds"]), 1), self.run.model.dtype)

    def reset_optimizer(self) -> None:
        """Reset the optimizer to the present weights."""
        self.optimizer.reset()

    def sample(self, dataset: Dataset, length: int, stopped: Callable[[], bool]) -> str:
        """Return the text that a run prints at its end."""
        assert self._sampler is not None, "the engine has no sampler"
        return self._sampler(self.run, self.model, self.runtime, dataset.tokenizer, length, stopped)

    def start(self, step: int, lr: float, batch: Batch) -> InFlight:
        """Begin optimizer step `step` (from 1) on a whole batch, or on this node's sequences of it. Return at once while fewer than two steps are in
        flight."""
        recorded = self._training_step()
        self._give_back()
        for number, given in enumerate(self._inputs):
            minibatch = batch.rows(slice(number * self._minibatch, (number + 1) * self._minibatch))
            for name, tensor in given.items():
                tensor.write(minibatch.arrays[name])
        self.model.dropout_key.write(np.array([self.run.model.seed, step], np.uint64))
        self.optimizer.prepare(step, lr)
        return InFlight(recorded.replay(), self._losses, self._squares, self._give_back)

    def forward(self, minibatch: Batch) -> None:
        """Run one forward pass over a minibatch; returns when it is over."""
        self._recorded("forward", len(minibatch), lambda: self._emit_loss(len(minibatch), training=True)).run(minibatch)

    def forward_backward(self, minibatch: Batch) -> None:
        """Run one forward and backward pass; parameters stay as they are."""
        self._recorded("backward", len(minibatch), lambda: self._emit_backward(len(minibatch))).run(minibatch)

    def _emit_backward(self, batch: int) -> tuple[Inputs, Callable[[], TileTensor]]:
        given = self._inputs_for(batch, self.objective.names)

        def body() -> TileTensor:
            self.model.train()
            loss = self.model(**given)
            loss.backward()
            self.model.zero_grad()
            return loss.data

        return given, body

    def _give_back(self) -> None:
        """Return freed memory to the system if not everything fits and the last time was long enough ago."""
        if self.order.forecasts and monotonic() - self._freed_at >= FREED_SECONDS:
            give_back_freed()
            self._freed_at = monotonic()

    def _training_step(self) -> Step:
        if self._step is None:
            with self.runtime.record(self.run.step.order, self.run.step.recompute) as step:
                self._losses, self._squares = emit_training_step(self.model, self.optimizer, self._inputs, self.exchange)
            self._step = step
        return self._step
