"""Capture of steps from shapes alone: the pass over a minibatch, and the step in the planner's form. It allocates no memory and reads no weights."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from nntask.planning import CapturedStep, untouched
from scheduler import CapturingRuntime, Handle
from scheduler.machine import Binding
from tiles import TileTensor

from ..capture.capture import CaptureTerms, Function, capture
from ..tasks.calls import Storage
from ..tasks.chains import ChainCompiler
from ..tasks.cuts import cut_parameters
from ..tasks.step import Pass
from ..tasks.sums import with_accumulated_sums
from .emission import StepTasks, key_of, num_rows_of
from .modules import saved_names
from .optimizers import optimizer_on
from .state import ModuleState, gradient_dtype_of
from .weights import attach_files

_ONE_AT_ONCE: Final = threading.Lock()
"""Lock while a pass is captured and compiled: both change process-wide settings of PyTorch, and restore them."""


@dataclass(frozen=True, slots=True)
class PassTerms:
    """Options of a captured pass.

    Attributes:
        tiles: (rows, rows of a tile) of each parameter that is cut along its first axis, by name.
        compiler: compiler of chains of calls; None leaves the calls separate.
        on_gpus: whether GPUs compute.
    """

    tiles: Mapping[str, tuple[int, int]]
    compiler: ChainCompiler | None = None
    on_gpus: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedPasses(CapturedStep):
    """A captured step of passes, on symbolic handles by which a session runs it.

    Attributes:
        passes: the pass over each minibatch.
        minibatches: arguments of each pass; tensors have only shapes and types that count.
        data: data that exists before the step, by name (`StepTasks.named_data`).
        outputs: handles of the outputs of each pass.
        squares: the gradient's sum of squares; None without an update.
    """

    passes: Sequence[Pass]
    minibatches: Sequence[Mapping[str, Any]]
    data: Mapping[str, Binding]
    outputs: Sequence[Mapping[Storage, Handle]]
    squares: TileTensor | None


def pass_of(module: torch.nn.Module, minibatch: Mapping[str, Any], function: Function, terms: PassTerms, how: CaptureTerms) -> Pass:
    """Return the pass over a minibatch; concurrent threads capture one after another.

    Args:
        function: function that `capture` calls with the module and the minibatch.
        terms: options of the pass.
        how: options of the capture.

    Raises:
        UsageError: the pass cannot be captured.
    """
    with _ONE_AT_ONCE:
        captured = capture(module, minibatch, function, how)
        num_rows = num_rows_of(captured)
        captured = cut_parameters(with_accumulated_sums(captured), terms.tiles)
        if terms.compiler is not None:
            captured = terms.compiler.chained(captured)
    parameters = dict(module.named_parameters())
    dtypes = {name: gradient_dtype_of(parameters[name], name) for name, _ in captured.gradients}
    return Pass(captured, dtypes, num_rows, on_gpus=terms.on_gpus)


def captured_step(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    passes: Sequence[Pass],
    minibatches: Sequence[Mapping[str, Any]],
    terms: PassTerms,
    *,
    max_norm: float = 0.0,
    weights: Path | None = None,
) -> CapturedPasses:
    """Return the step of some passes in the planner's form.

    Args:
        optimizer: optimizer of the update; None for a step without one.
        minibatches: arguments of each pass.
        terms: options of the passes.
        max_norm: norm to which the gradient is clipped; 0 is off.
        weights: model directory with the initial weights; None if they are in memory.

    Raises:
        DataError: the directory does not hold the weights of the module.
    """
    dry = CapturingRuntime(has_gpus=terms.on_gpus)
    state, key = ModuleState(module, dry, terms.tiles), key_of(dry)
    saved = saved_names(module)
    tensors = {name: tensor for name, tensor in state.tensors().items() if name in saved}
    if weights is not None:
        attach_files(weights, tensors, module)
    update = None if optimizer is None else optimizer_on(optimizer, module, state.parameters, max_norm)
    emission = StepTasks(passes, state, minibatches)
    with dry.record():
        outputs, squares = emission.submit(key, update)
    of_optimizer = {} if update is None else update.tensors()
    dry.plan.idle = untouched(dry.plan, [*state.tensors().values(), *of_optimizer.values()])
    return CapturedPasses(
        dry.plan,
        tensors,
        {},
        of_optimizer,
        dry.reading_nbytes,
        passes=passes,
        minibatches=minibatches,
        data=emission.named_data(key, update),
        outputs=outputs,
        squares=squares,
    )
