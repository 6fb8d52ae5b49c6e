"""Training any PyTorch module on the scheduler: hard budgets for memory, planned movement between memories, the same bits whatever they are.

    session = Session(module, optimizer="adamw", lr=3e-4, ram="2GiB", disk="scratch", minibatches=2)
    loss = session.step(input_ids=ids, labels=ids)

The module is captured when the first batch of a shape arrives (`capture`), its calls become tasks (`segments`, `step`), and a whole optimizer step,
all minibatches and the update, is recorded once and replayed. PyTorch computes inside the tasks, one thread for each worker.

Parameters and buffers move into the session. The module keeps its structure; its tensors are emptied (NaN in a few bytes, of the same shape), so that
memory holds the weights once; `load_into` brings them back.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal

import numpy as np
import torch

import scheduler
from nntask import DoesNotFit, StorageError, UsageError
from nntask.config import ResourceSettings
from nntask.engine import Outcome
from nntask.hardware import FAILURES, MachineSpec, machine_of, open_runtime, reuse_freed_memory, this_machine
from nntask.io import load_tensors
from nntask.optim import norm_of
from nntask.planning import needs_of, shortage
from scheduler import Handle, Runtime, Step, Ticket
from tiles import TileTensor

from .batches import check_batch, cut, shapes_of, signature_of
from .capture import Function, Storage
from .dry import captured_step, pass_of
from .emission import StepTasks, check_ids, key_of, value_of, write_inputs
from .files import MODEL, load_session, save_session, write_model, write_session
from .modules import check_module, first_values, give, is_frozen, let_go, modes_of, named_tensors
from .objectives import Loss, call, loss_of, objective_of, scalar
from .optimizers import note_step, optimizer_on, rate_of, terms_of, torch_optimizer
from .state import ModuleState
from .step import Pass, as_tensor
from .threads import SingleThread
from .weights import attach_files

Purpose = Literal["train", "evaluate", "predict"]
"""What a step is for: an update, a loss, or the module's result."""

MOST_SHAPES: Final = 8
"""Most shapes of batches that one session records steps for, for each purpose."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A recorded step for one shape of batches.

    Attributes:
        step: the step.
        passes: the pass over each minibatch.
        divisor: the loss of the step is the sum of the minibatches' losses divided by this.
        inputs: by name, of each minibatch.
        outputs: of each minibatch: what the pass returns, with references.
        kept: handles of the outputs' storages, of each minibatch.
        squares: the gradient's sum of squares; None without an update.
    """

    step: Step
    passes: Sequence[Pass]
    divisor: int
    inputs: Sequence[Mapping[str, TileTensor]]
    outputs: Sequence[Any]
    kept: Sequence[Mapping[Storage, Handle]]
    squares: TileTensor | None


class StartedStep:
    """A step under way."""

    def __init__(self, session: Session, recorded: _Recorded, ticket: Ticket) -> None:
        self._session, self._recorded, self._ticket = session, recorded, ticket
        self._outcome: Outcome | Exception | None = None

    def result(self) -> Outcome:
        """Wait until the step is over; the outcome may be asked for again, and later.

        Raises:
            NntaskError: a task failed, or a memory was too small.
        """
        self.wait()
        assert self._outcome is not None  # wait() has set it
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    def wait(self) -> None:
        """Wait until the step is over, and keep its outcome, which later steps overwrite in the runtime."""
        if self._outcome is None:
            try:
                self._outcome = self._read()
            except Exception as error:
                self._outcome = error

    def _read(self) -> Outcome:
        recorded = self._recorded
        with self._session.user_errors():
            self._ticket.wait()
            losses = [float(value_of(outputs, kept, self._ticket).reshape(())) for outputs, kept in zip(recorded.outputs, recorded.kept, strict=True)]
            assert recorded.squares is not None  # a training step has an update
            return Outcome(sum(losses) / recorded.divisor, norm_of(self._ticket.read(recorded.squares)))


class Session:
    """A module in training.

    Args:
        module: any module on the CPU, or with `weights` one without values. Its tensors move into the session.
        optimizer: "sgd", "adam", "adamw", or an instance of these of torch.optim over the module's parameters, whose learning rate is read at every
            step, so that PyTorch's schedulers work.
        lr: learning rate of an optimizer that is named.
        loss: from the module's result and the batch to a scalar; None if the result has the loss (`.loss`), or is it.
        objective: from the module and a batch to the loss, instead of calling the module and `loss`; None for these two.
        minibatches: parts of a batch along the first axis, whose gradients are summed; as many as workers keep all of them busy. The gradient is that
            of the mean of the minibatches' losses.
        max_grad_norm: the whole gradient is scaled down to this norm; 0 is off.
        seed: of dropout and other random numbers.
        ram: budget of host memory, e.g. "2GiB"; None for 0.9 of what is free.
        disk: directory of the disk tier, or "DIR:SIZE"; None without one.
        workers: number of CPU workers; None for one for each core.
        sim_gpu: number of simulated devices.
        gpu_memory: budget of each simulated device.
        on: a machine and its runtime, which the caller has opened and will close, in place of `ram` to `gpu_memory`. Failures are then the caller's
            to explain, and so is a step that does not fit.
        order: in which a training step executes when memory is short, a name of `Runtime.record`.
        weights: model directory whose safetensors files hold the weights; they are read when they are needed, so the module may be made with
            `empty_parameters`. None for those that the module has.
        options: further options of an optimizer that is named, such as ``weight_decay``.

    Raises:
        UsageError: an argument breaks a rule, or the module cannot be trained here.
        DoesNotFit: a budget is above what this process may use.

    Attributes:
        module: the module, emptied.
        optimizer: the optimizer of torch.optim, which holds learning rate and options.
        num_steps: optimizer steps done.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: str | torch.optim.Optimizer = "adamw",
        *,
        lr: float | None = None,
        loss: Loss | None = None,
        objective: Function | None = None,
        minibatches: int = 1,
        max_grad_norm: float = 0.0,
        seed: int = 0,
        ram: str | None = None,
        disk: str | None = None,
        workers: int | None = None,
        sim_gpu: int = 0,
        gpu_memory: str | None = None,
        on: tuple[MachineSpec, Runtime] | None = None,
        order: str = "auto",
        weights: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        if not 0 <= seed < 1 << 63:
            raise UsageError(f"seed must be at least 0 and below 2**63, got {seed}; the nearest legal value is {min(max(seed, 0), (1 << 63) - 1)}")
        if minibatches < 1:
            raise UsageError(f"minibatches must be at least 1, got {minibatches}; 1 takes a batch as a whole")
        check_module(module, has_weights=weights is not None)
        self.optimizer = torch_optimizer(optimizer, module, lr, options)
        self.module, self._num_minibatches = module, minibatches
        self._objective = scalar(objective or objective_of(loss or loss_of))
        self._max_norm, self._seed = max_grad_norm, seed
        self._modes, self._terms = modes_of(module), terms_of(self.optimizer, module)
        self._started: deque[StartedStep] = deque()
        self._order, self._is_borrowed = order, on is not None
        if on is None:
            resources = ResourceSettings(ncpu=workers, sim_gpu=sim_gpu, gpu_memory=gpu_memory or "", ram=ram or "", disk=disk or "", restrict="cpu")
            machine = machine_of(resources)
            reuse_freed_memory()
            on = machine, open_runtime(machine)
        self._machine, self.runtime = on
        self._thread = SingleThread()  # of each worker
        try:
            with self.user_errors():
                self._state = ModuleState(module, self.runtime)
                if weights is not None:
                    saved = module.state_dict().keys()
                    attach_files(Path(weights), {name: tensor for name, tensor in self._state.tensors().items() if name in saved}, module)
                    self._state.write({name: value for name, value in first_values(module).items() if name not in saved})
                else:
                    self._state.write(first_values(module))
                self._optimizer = optimizer_on(self.optimizer, module, self._state.parameters, max_grad_norm)
                self._key = key_of(self.runtime)
                self._key.write(np.array([seed, 0], np.uint64))
                self.runtime.wait()
        except BaseException:
            self.close()
            raise
        let_go(module)
        self._passes: dict[tuple[Any, ...], Pass] = {}
        self._recorded: dict[tuple[Any, ...], _Recorded] = {}
        self.num_steps = 0

    def step(self, **batch: Any) -> float:
        """Take one optimizer step on a batch, and wait for it.

        Args:
            batch: keyword arguments of the module. Tensors are cut along their first axis into minibatches; other values go to all of them.

        Returns:
            The loss.

        Raises:
            UsageError: the batch cannot be cut, or the module cannot be captured.
            DoesNotFit: a budget is too small for the step.
        """
        return self.start(**batch).result().loss

    def start(self, **batch: Any) -> StartedStep:
        """Begin one optimizer step and return at once while fewer than two are under way; other terms as of `step`."""
        check_batch(batch, self._num_minibatches)
        return self.start_minibatches(cut(batch, self._num_minibatches))

    def start_minibatches(self, minibatches: Sequence[Mapping[str, Any]], *, divisor: int | None = None) -> StartedStep:
        """Begin one optimizer step on minibatches that are cut already, which may differ in number and shape from those of other steps.

        Args:
            minibatches: the arguments of each one by name.
            divisor: the gradient, and the loss, is the sum over the minibatches divided by this; None for their number.

        Raises:
            UsageError: a minibatch has no tensor, the module cannot be captured, or its minibatches have gradients of different parameters.
            DoesNotFit: a budget is too small for the step.
        """
        rate = self._rate
        recorded = self._step_for("train", minibatches, divisor or len(minibatches))
        check_ids(recorded.passes, minibatches)
        while len(self._started) > 1:
            self._started.popleft().wait()
        with self.user_errors():
            write_inputs(recorded.inputs, minibatches)
            self._key.write(np.array([self._seed, self.num_steps + 1], np.uint64))
            self._optimizer.prepare(self.num_steps + 1, rate)
            ticket = recorded.step.replay()
        self.num_steps += 1
        note_step(self.optimizer)
        self._started.append(StartedStep(self, recorded, ticket))
        return self._started[-1]

    def evaluate(self, **batch: Any) -> float:
        """The loss of a batch in evaluation mode; changes nothing but buffers that the module itself changes in that mode."""
        return float(self._compute("evaluate", batch).reshape(()))

    def predict(self, **batch: Any) -> Any:
        """The module's result for a batch in evaluation mode, with tensors of its own."""
        return self._compute("predict", batch)

    def _compute(self, purpose: Purpose, batch: Mapping[str, Any]) -> Any:
        """The result of a pass that changes nothing."""
        recorded = self._step_for(purpose, [batch], 1)
        check_ids(recorded.passes, [batch])
        with self.user_errors():
            write_inputs(recorded.inputs, [batch])
            ticket = recorded.step.replay()
            ticket.wait()
            return value_of(recorded.outputs[0], recorded.kept[0], ticket)

    def state_dict(self, *, frozen: bool = True) -> dict[str, torch.Tensor]:
        """Copies of the parameters and buffers under all names of the module, tied ones of one memory; waits for steps under way.

        Args:
            frozen: whether frozen parameters are among them.
        """
        tensors, found, seen = self._state.tensors(), {}, dict[int, torch.Tensor]()
        for name, value in named_tensors(self.module):
            if not frozen and is_frozen(value):
                continue
            if id(value) not in seen:
                seen[id(value)] = as_tensor(tensors[name].read(), value.shape)
            found[name] = seen[id(value)]
        return {name: found[name] for name in self.module.state_dict() if name in found}

    def load_into(self, module: torch.nn.Module) -> None:
        """Give a module, which may be the emptied one, copies of the parameters and buffers."""
        give(module, self._values())

    def model_tensors(self) -> dict[str, TileTensor]:
        """The tensors of the module's `state_dict` by name, tied ones once."""
        return self._saved(frozen=True)

    def optimizer_tensors(self) -> dict[str, TileTensor]:
        """The optimizer's state by name, such as "m.layer.weight"."""
        return self._optimizer.tensors()

    def reset_optimizer(self) -> None:
        """Begin anew with the weights as they are now."""
        self._optimizer.reset()
        self.num_steps = 0

    def training_step(self, minibatches: Sequence[Mapping[str, Any]], *, divisor: int | None = None) -> Step:
        """The step that `start_minibatches` replays for minibatches of these shapes, recorded if it is not yet; their values do not matter."""
        return self._step_for("train", minibatches, divisor or len(minibatches)).step

    def save(self, directory: str | os.PathLike[str], *, frozen: bool = True) -> None:
        """Save everything to a new directory, whole or not at all; `resume` goes on from it with the same bits.

        model.safetensors has the weights under the module's names, beside the config.json of a module of transformers, so that ``from_pretrained``
        reads the directory as well.

        Args:
            directory: does not exist.
            frozen: whether frozen parameters are saved; if not, there is no config.json, and a session to `resume` must have their values.

        Raises:
            UsageError: the directory exists already.
            StorageError: the disk is full or failed.
            Diverged: a weight is not finite.
        """
        save_session(Path(directory), *self._content(frozen=frozen))

    def save_into(self, directory: str | os.PathLike[str], *, frozen: bool = True) -> None:
        """Save everything to a directory that may exist, and that is not whole if this fails; other terms as of `save`."""
        write_session(Path(directory), *self._content(frozen=frozen))

    def _content(self, *, frozen: bool) -> tuple[dict[str, TileTensor], dict[str, TileTensor], dict[str, Any], torch.nn.Module | None]:
        state = {"step": self.num_steps, "lr": float(self.optimizer.param_groups[0]["lr"])}  # also where a change makes `_rate` refuse to go on
        return self._saved(frozen=frozen), self.optimizer_tensors(), state, self.module if frozen else None

    def resume(self, directory: str | os.PathLike[str], *, frozen: bool = True) -> None:
        """Go on from a directory that `save` has written, for the same module and optimizer.

        Args:
            directory: what `save` was given.
            frozen: likewise.

        Raises:
            DataError: the directory is not whole, or is of another module or optimizer. The session's state is then undefined.
        """
        state = load_session(Path(directory), self._saved(frozen=frozen), self.optimizer_tensors())
        self.num_steps = state["step"]
        for group in self.optimizer.param_groups:
            group["lr"] = state["lr"]

    def save_weights(self, directory: str | os.PathLike[str], *, frozen: bool = True) -> None:
        """Save weights and buffers to a directory, tile by tile: what `save` writes, without what a training needs to go on.

        Args:
            directory: may exist.
            frozen: as of `save`.

        Raises:
            StorageError: the disk is full or failed.
            Diverged: a weight is not finite.
        """
        write_model(Path(directory), self._saved(frozen=frozen), self.module if frozen else None)

    def load_weights(self, directory: str | os.PathLike[str], *, frozen: bool = True) -> None:
        """Take weights and buffers from the model.safetensors of a directory; the optimizer begins anew.

        Args:
            directory: what `save` or `save_weights` was given.
            frozen: likewise.

        Raises:
            DataError: the file is missing, corrupt, or of another module.
        """
        load_tensors(Path(directory) / MODEL, self._saved(frozen=frozen))
        self.reset_optimizer()

    @property
    def _rate(self) -> float:
        return rate_of(self.optimizer, self.module, self._terms)

    def _saved(self, *, frozen: bool) -> dict[str, TileTensor]:
        """The tensors of the module's `state_dict`, tied ones once."""
        values = dict(named_tensors(self.module))
        names = {name for name in self.module.state_dict() if frozen or not is_frozen(values[name])}
        return {name: tensor for name, tensor in self._state.tensors().items() if name in names}

    def _values(self) -> dict[str, torch.Tensor]:
        tensors = self._state.tensors()
        return {name: as_tensor(tensors[name].read(), value.shape) for name, value in named_tensors(self.module) if name in tensors}

    def close(self) -> None:
        """End the workers and free all memory; parameters are gone unless they were saved. Idempotent."""
        if not self._is_borrowed:
            self.runtime.close()
        self._thread.end()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @contextmanager
    def user_errors(self) -> Iterator[None]:
        """Turn failures of the runtime into the error that says what to do."""
        try:
            yield
        except FAILURES as error:
            if self._is_borrowed:
                raise
            raise _user_error(error, self.runtime, has_disk=self._machine.disk is not None) from error

    def _step_for(self, purpose: Purpose, minibatches: Sequence[Mapping[str, Any]], divisor: int) -> _Recorded:
        """The recorded step for the shapes of some minibatches.

        Raises:
            UsageError: it is one shape too many.
        """
        for minibatch in minibatches:
            check_batch(minibatch, 1)
        key = (purpose, divisor, *map(signature_of, minibatches))
        found = self._recorded.get(key)
        if found is None:
            if sum(other[0] == purpose for other in self._recorded) == MOST_SHAPES:
                raise UsageError(
                    f"batches may have at most {MOST_SHAPES} different shapes, got one more: {shapes_of(minibatches)}; pad them to a fixed length, "
                    "and drop the last incomplete batch"
                )
            found = self._recorded[key] = self._record(purpose, minibatches, divisor)
        return found

    def _record(self, purpose: Purpose, minibatches: Sequence[Mapping[str, Any]], divisor: int) -> _Recorded:
        with self.user_errors():
            self.runtime.wait()  # no step may compute while a pass is captured
        passes = [self._pass(purpose, minibatch, divisor) for minibatch in minibatches]
        if len({frozenset(each.captured.gradients) for each in passes}) > 1:
            raise UsageError(
                "the minibatches of a step must have gradients of the same parameters, and those of minibatches of shapes "
                f"{shapes_of(minibatches)} differ; pad them to one shape"
            )
        is_training = purpose == "train"
        if not self._is_borrowed:
            self._check_fit(passes, minibatches, training=is_training)
        with self.user_errors():
            emission = StepTasks(passes, self._state, minibatches)
            with self.runtime.record(self._order if is_training else "auto") as step:
                kept, squares = emission.submit(self._key, self._optimizer if is_training else None)
        return _Recorded(step, passes, divisor, emission.inputs, [each.captured.outputs for each in passes], kept, squares)

    def _pass(self, purpose: Purpose, minibatch: Mapping[str, Any], divisor: int) -> Pass:
        """The pass over a minibatch; one for all steps in which it occurs."""
        key = (purpose, divisor, signature_of(minibatch))
        if key not in self._passes:
            function = call if purpose == "predict" else self._objective
            modes = {child: is_training and purpose == "train" for child, is_training in self._modes.items()}
            self._passes[key] = pass_of(self.module, modes, minibatch, function, backward=purpose == "train", divisor=divisor)
        return self._passes[key]

    def _check_fit(self, passes: Sequence[Pass], minibatches: Sequence[Mapping[str, Any]], *, training: bool) -> None:
        """Refuse a step that cannot run within the budgets, before memory is taken for it.

        Raises:
            DoesNotFit: says which budget is too small, and by how much.
        """
        found = captured_step(self.module, self.optimizer if training else None, passes, minibatches, max_norm=self._max_norm)
        needs, machine = needs_of(found.plan, thrifty=True), this_machine(self._machine)
        if not needs.fit(machine):
            changes = ["raise ram=", "use more and smaller minibatches" if training else "predict smaller batches"]
            if self._machine.disk is None:
                changes.append("add disk=DIR")
            raise DoesNotFit(f"{shortage(machine, needs)}; {', '.join(changes[:-1])}, or {changes[-1]}")


def _user_error(error: Exception, runtime: Runtime, *, has_disk: bool) -> Exception:
    """The error that a program sees for a failure of the runtime: first what is known to have gone wrong, else the error itself."""
    if runtime.tier_failure is not None:
        return StorageError(f"{runtime.tier_failure}; make a new session, and resume from what save() wrote last")
    refusal = error if isinstance(error, scheduler.DoesNotFit) else runtime.refusal
    if refusal is None:
        return error
    story = str(refusal).partition("; raise the budget")[0]
    return DoesNotFit(f"{story}; raise ram={'' if has_disk else ', or add disk=DIR'}")
