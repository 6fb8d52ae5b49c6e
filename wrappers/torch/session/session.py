"""Training of any PyTorch module on the scheduler, within hard memory budgets, with planned copies between memories and bits independent of both.

    session = Session(module, optimizer="adamw", lr=3e-4, ram="2GiB", disk="scratch", minibatches=2)
    loss = session.step(input_ids=ids, labels=ids)

The module is captured when the first batch of a shape arrives (`capture`), its calls become tasks (`segments`, `step`), and a whole optimizer step,
all minibatches and the update, is recorded once and replayed. PyTorch computes inside the tasks, with one thread per worker.

Parameters and buffers move into the session. The module keeps its structure; its tensors keep their shapes without values (NaN in a few bytes), so
that memory holds the weights once. `load_into` returns the values.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from nntask import UsageError
from nntask.io import parse_size
from scheduler import Runtime, Step, Ticket
from tiles import TileTensor

from ..capture.batches import check_batch, cut
from ..capture.objectives import loss_of, objective_of, read_by, scalar
from ..capture.values import HostValues
from ..releases import check_torch
from ..steps.captures import Captures, Purpose
from ..steps.dry import PassTerms
from ..steps.emission import check_ids, key_of, value_of
from ..steps.modules import first_values, give, let_go, saved_names, shared_buffers
from ..steps.optimizers import SessionOptimizer, guarded, torch_optimizer
from ..steps.state import ModuleState
from ..steps.weights import attach_files
from ..tasks.chains import ChainCompiler
from ..tasks.cuts import tiles_of
from .arguments import grouped, signature
from .files import SessionFiles
from .hosting import Host, end_dropped
from .memory import release_unused
from .python_state import bring_into_python, host_values, undone_on_failure, write_step
from .recording import StepRecorder
from .session_checks import check_arguments
from .session_values import SessionValues
from .started import StartedStep
from .verify import Verifier


class Session(SessionFiles):
    """A module in training.

    Args:
        module: any module on the CPU, or with `weights` a module without values. Its tensors move into the session.
        optimizer: "sgd", "adam", "adamw", "muon", "adamw8bit", or instances of SGD, Adam, AdamW or Muon of torch.optim over the module's parameters
            (or a list of a Muon and an AdamW for all but matrices). Every step reads the options of its groups, so that PyTorch's schedulers work;
            its state is in the session.
        arguments: the keywords below, which are handed on as three groups, `Learning`, `Resources` and `Execution` (`arguments`).
        lr: learning rate of an optimizer given by name.
        loss: function of the module's result and the batch that returns a scalar; None if the result has the loss (`.loss`), or is the loss.
        objective: function of the module and a batch that returns the loss, instead of a call of the module and `loss`; None for these two.
        minibatches: number of parts of a batch along the first axis, whose gradients are summed; the number of workers keeps all of them busy. The
            gradient is that of the mean of the minibatches' losses.
        max_grad_norm: norm to which the whole gradient is scaled down; 0 is off. The norm is measured in any case; infinity only measures it.
        seed: seed of dropout and other random numbers.
        ram: budget of host memory, e.g. "2GiB", or a number of bytes; None for 0.9 of the free memory.
        disk: directory of the disk tier, or "DIR:SIZE"; None without one.
        workers: number of CPU workers; None for the number of cores divided by `threads`, or for none if GPUs compute.
        threads: number of PyTorch's threads inside an operation. With 1, minibatches use the cores in parallel; more are for steps of one minibatch.
            Part of the numerics: sums over threads round differently.
        ngpu: number of GPUs, the first ones that CUDA shows; None for all. Tasks with a CUDA kernel run only on them.
        sim_gpu: number of simulated devices.
        gpu_memory: budget of each GPU or simulated device, e.g. "16GiB", or for GPUs a share, e.g. "0.5"; None for 0.9 of the free memory.
        on: a machine and its runtime, which the caller has opened and will close, in place of `ram` to `gpu_memory`. The caller then gets failures
            unchanged, and must check that a step fits.
        order: order of a training step's tasks when memory is short, a name for `Runtime.record`.
        recompute: part of a training step to recompute in the backward pass instead of keeping it, a name for `Runtime.record`; "auto" recomputes
            if memory is short.
        largest_tile: size above which parameters are cut along their first axis into tiles, with their gradients and the optimizer's state, so that
            none need fit the budget as a whole. Part of the numerics: a product that is cut rounds differently.
        weights: model directory whose safetensors files hold the weights; they are read when they are needed, so the module may come from
            `empty_parameters`. None for the weights in the module.
        compiled: whether to compile chains of elementwise operations and normalisations, which needs a C++ compiler. Results then differ by rounding
            from those of a session without it, so a saved session must be resumed with the same choice.
        verify: number of steps from one comparison with eager PyTorch to the next, beginning with the first step; 0 for none. Loss, gradients,
            parameters and buffers are compared. Use it for the first run of a new program; it takes the time and the memory of eager PyTorch, outside
            the budget.
        planned: a training step of this module that was captured and planned before, as by ``nntask train``; None to capture it at its first use. A
            tensor without values then gets them from a file of a saved session, which the caller loads.
        options: further options of an optimizer given by name, such as ``weight_decay``.

    Raises:
        UsageError: an argument breaks a rule, or the module cannot be trained here.
        DoesNotFit: a budget is above the memory that this process may use.

    Attributes:
        module: the module, without values.
        optimizer: the optimizer of torch.optim, which holds learning rate and options.
        num_steps: number of completed optimizer steps.
    """

    __signature__ = signature()

    def __init__(self, module: torch.nn.Module, optimizer: Any = "adamw", **arguments: Any) -> None:
        check_torch(Session)
        learning, resources, execution, options = grouped(arguments)
        check_arguments(module, learning, resources, execution)
        self.module, self.optimizer = module, torch_optimizer(optimizer, module, learning.lr, options)
        self._learning, self._execution = learning, execution
        self.num_steps, self._half_done, self._is_closed = 0, "", False
        self._guards = ExitStack()  # guards of module and optimizer while the session is open
        self._started: deque[StartedStep] = deque()
        tiles = tiles_of(module.named_parameters(), parse_size(str(execution.largest_tile), "largest_tile"))
        self._host = Host(module, resources)
        self._dropped = weakref.finalize(self, end_dropped, self._host)
        self._dropped.atexit = False
        self.runtime: Runtime = self._host.runtime
        try:
            with self._host.user_errors(), self._taken(tiles):
                self._captures = self._new_captures(tiles) if execution.planned is None else execution.planned.captures
                self._captures.quiet = self.runtime.wait
                self._prepare()
        except BaseException:
            self.close()
            raise
        release_unused()

    def _new_captures(self, tiles: Mapping[str, tuple[int, int]]) -> Captures:
        """Return the captures of the module's passes, none yet."""
        learning = self._learning
        terms = PassTerms(tiles, ChainCompiler() if self._execution.compiled else None, self._host.machine.has_gpus)
        function = scalar(learning.objective or objective_of(learning.loss or loss_of))
        return Captures(self.module, function, terms, roots=read_by(learning.objective or learning.loss), shared=shared_buffers(self.module))

    @contextmanager
    def _taken(self, tiles: Mapping[str, tuple[int, int]]) -> Iterator[None]:
        """Create the state of the module and of its optimizer on the runtime; if that or the block fails, the module gets its values back."""
        self.state = ModuleState(self.module, self.runtime, tiles)
        values, weights = first_values(self.module), self._execution.weights
        if self._execution.planned is not None:
            values = {name: value for name, value in values.items() if not value.is_meta}
        if weights is not None:
            saved = saved_names(self.module)
            attach_files(Path(weights), {name: tensor for name, tensor in self.state.tensors().items() if name in saved}, self.module)
            values = {name: value for name, value in values.items() if name not in saved}
        max_norm = self._learning.max_grad_norm
        max_norm = 0.0 if max_norm == inf else max_norm  # infinity only measures, as in torch.nn.utils.clip_grad_norm_
        with self.state.take(values):
            self._optimizer = SessionOptimizer(self.optimizer, self.module, self.state.parameters, max_norm)
            self._key = key_of(self.runtime)
            self._key.write(np.array([self._learning.seed, 0], np.uint64))
            self.runtime.wait()
            self._guards.enter_context(let_go(self.module))
            self._guards.enter_context(guarded(self.optimizer))
            yield

    def _prepare(self) -> None:
        """Create the recorder of steps and the comparison with eager PyTorch."""
        self._steps = StepRecorder(
            self._captures,
            self.state,
            self._key,
            self._optimizer,
            machine=None if self._host.is_borrowed else self._host.machine,
            order=self._execution.order,
            recompute=self._execution.recompute,
        )
        if (planned := self._execution.planned) is not None:
            self._steps.adopt(planned.step, planned.order)
        self._module_values = SessionValues(self.module, self.state, self._captures.own)
        self._verifier = Verifier(self._execution.verify, self._captures, self._optimizer, self._module_values)

    @property
    def fallbacks(self) -> Mapping[str, int]:
        """Number of tasks in a step that CPU workers run although there are GPUs, by name."""
        return self._steps.fallbacks

    def step(self, **batch: Any) -> float:
        """Take one optimizer step on a batch, and wait for it.

        Args:
            batch: keyword arguments of the module. Tensors are cut along their first axis into minibatches; other values go to all of them.

        Returns:
            The loss.

        Raises:
            UsageError: the batch cannot be cut, the module cannot be captured, or one of its operations refuses the batch's values.
            DoesNotFit: a budget is too small for the step.

        If a step raises an error after its start, it is left out: parameters, buffers, optimizer and `num_steps` are as before. The exception is a
        failure in the backward pass after some parameters have been updated, which `max_grad_norm` prevents because updates then wait for the whole
        gradient. The message says so, and the session can only continue from a saved one.
        """
        return self.start(**batch).result().loss

    def start(self, **batch: Any) -> StartedStep:
        """Begin one optimizer step and return immediately while fewer than two are in flight; arguments and errors are those of `step`."""
        check_batch(batch, self._learning.minibatches, learns=True)
        return self.start_minibatches(cut(batch, self._learning.minibatches))

    def start_minibatches(self, minibatches: Sequence[Mapping[str, Any]], *, divisor: int | None = None) -> StartedStep:
        """Begin one optimizer step on given minibatches, which may differ in number and shape from those of other steps.

        Args:
            minibatches: arguments of each minibatch, by name.
            divisor: number by which the sums of the minibatches' losses and gradients are divided; None for the number of minibatches.

        Raises:
            UsageError: a minibatch has no tensor, the module cannot be captured, or its minibatches have gradients of different parameters.
            DoesNotFit: a budget is too small for the step.
        """
        self._check_open()
        self._optimizer.check()
        divisor = divisor or len(minibatches)
        expected = None
        if self._verifier.wants(self.num_steps):
            self._wait_for_started()
            expected = self._verifier.expected(minibatches, divisor, (self._learning.seed, self.num_steps + 1))
        with undone_on_failure(self._captures.world) as undo:
            with self._host.user_errors():
                recorded, uses = self._steps.step_for("train", minibatches, divisor, self._values)
            check_ids(recorded.passes, minibatches)
            while len(self._started) > 1:
                self._started.popleft().wait()
            self._check_whole()
            with self._host.user_errors():
                leavings = write_step(recorded, uses, minibatches, self._captures.world, self.state)
                self._key.write(np.array([self._learning.seed, self.num_steps + 1], np.uint64))
                self._optimizer.prepare_step(self.num_steps + 1, recorded.updated)
                ticket = recorded.step.replay()
        self.num_steps += 1
        self._optimizer.note_step(recorded.updated)
        started = StartedStep(recorded, leavings, ticket, self.num_steps, self._host, self.state, self._note_failure)
        self._started.append(started)
        if any(leaving.is_any for leaving in leavings):
            started.wait()  # so that the program finds the tensors that the step leaves in Python
            if not started.succeeded:
                undo()
        if expected is not None:
            self._verifier.compare(self.num_steps, expected, started.result().loss)
        return started

    def _values(self, minibatch: Mapping[str, Any], number: int) -> HostValues:
        """Return the values of tensors at the beginning of the next step."""
        return host_values(minibatch, (self._learning.seed, self.num_steps + 1, number), self._captures.world, self.state)

    def _note_failure(self, error: Exception, ticket: Ticket, number: int, updated: Collection[str]) -> Exception:
        """Note that a step has failed: it is left out, or, if it has changed anything, the session cannot continue.

        Args:
            error: cause of the failure.
            ticket: ticket of its replay, which has ended.
            number: number of the step.
            updated: names of the parameters that the step updates.

        Returns:
            The error, with the consequence for the step if an operation of PyTorch has failed.
        """
        outcome = "the step was left out, and parameters, buffers and optimizer are as before it"
        if not ticket.changed_nothing:
            outcome = self._half_done = f"step {number} has updated some parameters and not all; continue with resume() from the last save()"
        else:
            is_last = number == self.num_steps  # no step was started after it
            self.num_steps -= is_last
            self._optimizer.note_left_out(updated, keeps_number=not is_last)
        if not isinstance(error, UsageError):
            return error
        return UsageError(error.fact, f"{error.remedy}; {outcome}" if error.remedy else outcome)

    def evaluate(self, **batch: Any) -> float:
        """Return the loss of a batch in evaluation mode; state changes only as the module's forward pass itself changes it in that mode."""
        return float(self.evaluated(batch))

    def evaluated(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """Return the loss in evaluation mode as a tensor () of its own element type."""
        loss: torch.Tensor = self._compute("evaluate", batch)
        return loss.reshape(())

    def predict(self, **batch: Any) -> Any:
        """Return the module's result for a batch in evaluation mode, with new tensors."""
        return self._compute("predict", batch)

    def _compute(self, purpose: Purpose, batch: Mapping[str, Any]) -> Any:
        """Return the result of a pass without an update."""
        self._check_whole()
        with undone_on_failure(self._captures.world), self._host.user_errors():
            recorded, uses = self._steps.step_for(purpose, [batch], 1, self._values)
            check_ids(recorded.passes, [batch])
            leavings = write_step(recorded, uses, [batch], self._captures.world, self.state)
            ticket = recorded.step.replay()
            ticket.wait()
            bring_into_python(leavings, recorded.kept, ticket, self.state)
            return value_of(recorded.outputs[0], recorded.kept[0], ticket)

    def state_dict(self, *, frozen: bool = True) -> dict[str, torch.Tensor]:
        """Return copies of the parameters and buffers under all names of the module, after steps in flight; tied ones share memory.

        Args:
            frozen: whether to include frozen parameters.
        """
        self._check_open()
        return self._module_values.state_dict(frozen=frozen)

    def load_state_dict(self, values: Mapping[str, torch.Tensor], strict: bool = True) -> None:
        """Overwrite parameters and buffers between steps; the optimizer's state stays, as when a module's tensors are written by eager PyTorch.

        Args:
            values: new values, by names of the module's `state_dict`.
            strict: whether all names of the `state_dict` must be present.

        Raises:
            UsageError: a name or a shape is not the module's, or with `strict` one is missing.
        """
        self._wait_for_started()
        self._check_whole()
        checked = self._module_values.checked(values, strict=strict)
        with self._host.user_errors():
            self.state.write(checked)
            self._optimizer.updates.follow(list(checked))
            self.runtime.wait()

    def load_into(self, module: torch.nn.Module) -> None:
        """Give a module, which may be the session's own, copies of the parameters and buffers."""
        self._check_open()
        give(module, self._module_values.by_every_name())

    def model_tensors(self) -> dict[str, TileTensor]:
        """Return the tensors of the module's `state_dict` by name, tied ones once."""
        return self._module_values.saved(frozen=True)

    def optimizer_tensors(self) -> dict[str, TileTensor]:
        """Return the optimizer's state by name, such as "m.layer.weight"."""
        return self._optimizer.updates.tensors()

    def training_step(self, minibatches: Sequence[Mapping[str, Any]], *, divisor: int | None = None) -> Step:
        """Return the step that `start_minibatches` replays for minibatches of these shapes, recording it if necessary; values do not matter."""
        return self._steps.step_for("train", minibatches, divisor or len(minibatches), self._values)[0].step

    @property
    def _numerics(self) -> dict[str, Any]:
        return {
            "seed": self._learning.seed,
            "minibatches": self._learning.minibatches,
            "kind of device": "cuda" if self._host.machine.has_gpus else "cpu",
            "threads": self._host.threads,
            "compiled": self._execution.compiled,
            "rows_of_tiles": {name: rows for name, (_, rows) in self.state.tiles.items()},
        }

    def close(self) -> None:
        """End the workers and free all memory; parameters are lost unless they were saved. Idempotent."""
        self._is_closed = True
        self._dropped.detach()
        self._guards.close()
        self._host.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
