"""Optimizers: one task per tile of a parameter, with all numbers that change between steps in one small input tensor.

Rules.

- `step` only emits tasks, so it can be recorded. The options of the groups and the number of the step come in through `hyper`, which `prepare` writes
  before each step (or replay).
- `step` updates the parameters that have a gradient when it emits. The others keep their values and state.
- Without clipping, an update depends only on the gradient of its own tile and runs as soon as that is final. The norm of the whole gradient is always
  computed; with clipping, every update waits for it.
- `step` releases the gradients: they are freed with the last task that reads them, and the next backward pass begins with none.
- State is persistent: moments in fp32, unless the optimizer stores them in 8 bits, and fp32 masters of 16-bit parameters; fp64 for fp64.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler import Handle, TaskRuntime, W
from scheduler.machine import labelled
from tiles import TileTensor, emit
from tiles.kernels import HYPER, NARROW
from tiles.ops import elementwise
from tiles.ops import muon as muon_ops
from tiles.ops import optimizer as optimizer_ops

from ..errors import UsageError
from ..nn.module import Module, Parameter

Tiles = Mapping[str, Sequence[int]]
"""Numbers of tiles of parameters, by the parameter's name."""


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that share a weight decay.

    Attributes:
        newton_schulz: how `Muon` updates them, which are then matrices; None for AdamW.
    """

    parameters: Sequence[Parameter]
    weight_decay: float
    newton_schulz: muon_ops.NewtonSchulz | None = None


class Options(NamedTuple):
    """Learning rate, weight decay and other options of a group, which may change between steps.

    Attributes:
        lr: learning rate.
        weight_decay: weight decay of the group's parameters.
        first: decay of the first moment (beta1), or momentum.
        second: decay of the second moment (beta2).
        eps: added to the root of the second moment.
    """

    lr: float
    weight_decay: float
    first: float = 0.0
    second: float = 0.0
    eps: float = 0.0


def decay_groups(model: Module, weight_decay: float) -> list[Group]:
    """Return the usual groups: matrices have weight decay, vectors (biases, norms) have none."""
    matrices = [p for p in model.parameters() if len(p.shape) > 1]
    vectors = [p for p in model.parameters() if len(p.shape) <= 1]
    return [Group(matrices, weight_decay), *([Group(vectors, 0.0)] if vectors else [])]


class Optimizer(ABC):
    """Base of all optimizers: groups, state, the hyper tensor, the gradient norm.

    Args:
        parameters: parameters with tiles, or groups of them; frozen ones are left out.
        options: options until `prepare` or `prepare_groups` is given others; the weight decay is for parameters without a group.
        kinds: kinds of state in addition to masters; `_new_state` decides which of them a parameter has.
        max_norm: largest norm of the whole gradient, which is scaled down to it; 0 disables clipping.
        tiles_of: numbers of the tiles whose state this optimizer holds, by name of the parameter; other nodes update the rest. None for all.
        on_cpu: whether only CPU workers update, in host memory, where the state is, while devices compute the rest.

    Attributes:
        hyper: (num_groups, HYPER) fp64 input, a row for each group.
        grad_norm: (1,) sum of squares of the gradient of the last emitted step before clipping; None before. `norm_of` returns its root.
        state: kind -> name of the parameter -> tensor, for the parameters that have this kind; "master" has the 16-bit parameters only.

    Raises:
        UsageError: no parameter is learnt, a parameter appears twice, or a number is out of range.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter] | Sequence[Group],
        options: Options,
        kinds: Sequence[str],
        *,
        max_norm: float,
        tiles_of: Tiles | None,
        on_cpu: bool,
    ) -> None:
        _check_ranges(lr=options.lr, weight_decay=options.weight_decay, max_norm=max_norm)
        self.groups = _as_groups(parameters, options.weight_decay)
        for group in self.groups:
            _check_ranges(weight_decay=group.weight_decay)
        self.options, self.max_norm, self.tiles_of, self.on_cpu = options, max_norm, tiles_of, on_cpu
        self.runtime: TaskRuntime = self.groups[0].parameters[0].data.runtime
        self._rows = {p.name: row for row, group in enumerate(self.groups) for p in group.parameters}
        shape = (len(self.groups), HYPER)
        self.hyper = TileTensor(self.runtime, shape, (-1, -1), np.float64, kind="input", data_class="data", name="hyper")
        self.grad_norm: TileTensor | None = None
        self.state = {
            kind: {p.name: tensor for p in self._parameters() if (tensor := self._new_state(p, kind)) is not None} for kind in ("master", *kinds)
        }
        self.prepare(1)
        self.reset()

    @property
    def whole(self) -> Mapping[str, str]:
        """Parameters whose tiles one node updates, all of them together, each with the name of its matrix; tiles of others are independent."""
        return {}

    def _parameters(self) -> list[Parameter]:
        return [p for group in self.groups for p in group.parameters]

    def _new_state(self, parameter: Parameter, kind: str) -> TileTensor | None:
        """Create the state of a kind for a parameter, persistent and without data: a tensor like it, in fp32 or wider; None if it has none."""
        is_narrow = parameter.data.dtype in NARROW
        if kind == "master" and not is_narrow:
            return None
        dtype = np.float32 if is_narrow else parameter.data.dtype
        return parameter.data.like(dtype=dtype, kind="persistent", data_class="optimizer", name=f"{kind} {parameter.name}")

    def reset(self) -> None:
        """Emit the tasks that reset the state: masters become the parameters' present values, everything else zero. The constructor calls it; call
        it again after overwriting parameters without their state."""
        self.follow(self.state["master"])
        for parameter in self._parameters():
            for kind, tensors in self.state.items():
                if kind != "master" and parameter.name in tensors:
                    elementwise.fill(tensors[parameter.name], 0.0, self._tiles(parameter.name))

    def follow(self, names: Collection[str]) -> None:
        """Emit the tasks that copy overwritten parameters to their masters; all other state stays."""
        masters = self.state["master"]
        for parameter in self._parameters():
            if parameter.name in masters and parameter.name in names:
                elementwise.copy_into(parameter.data, masters[parameter.name], self._tiles(parameter.name))

    def _tiles(self, name: str) -> Sequence[int] | None:
        """Return the tiles of a parameter whose state this optimizer holds; None for all."""
        return None if self.tiles_of is None else self.tiles_of[name]

    def prepare(self, step: int, lr: float | None = None) -> None:
        """Write the step number `step`, from 1, and the options of all groups to `hyper`. Call it before each replay.

        Args:
            lr: learning rate from now on.
        """
        if step < 1:
            raise UsageError(f"steps count from 1, got {step}", "the first step is 1")
        if lr is not None:
            self.options = self.options._replace(lr=lr)
        self.prepare_groups([step] * len(self.groups), [self._options_of(group) for group in self.groups])

    def _options_of(self, group: Group) -> Options:
        """Return the present options of a group."""
        return self.options._replace(weight_decay=group.weight_decay)

    def prepare_groups(self, steps: Sequence[int], options: Sequence[Options]) -> None:
        """Write the step number and the options of each group to `hyper`; replaces `prepare`.

        Args:
            steps: number of the step for each group's parameters, from 1; any number for a group that the step does not update.
            options: options of each group.
        """
        rows = [
            (each.lr, 1 - each.first**step, 1 - each.second**step, *each[2:], each.weight_decay, step)
            for step, each in zip(steps, options, strict=True)
        ]
        self.hyper.write(np.array(rows, np.float64))

    def step(self) -> None:
        """Emit the updates of all parameters that have a gradient, and release the gradients.

        Raises:
            UsageError: no parameter has a gradient.
        """
        with labelled(phase="update", path=""):
            ready = self.take_gradients()
            for _, gradient, _ in ready:
                for handle in gradient.handles:
                    complete(gradient, handle)
            self.grad_norm = optimizer_ops.sum_of_squares([gradient for _, gradient, _ in ready])
            norm = self.grad_norm if self.max_norm > 0 else None
            for parameter, gradient, group in ready:
                self.update(parameter, gradient, group, norm)

    def take_gradients(self) -> list[tuple[Parameter, TileTensor, Group]]:
        """Return each parameter that has a gradient, with the gradient and its group, and release the gradients.

        Raises:
            UsageError: no parameter has a gradient.
        """
        ready = [(p, gradient, group) for group in self.groups for p in group.parameters if (gradient := p.gradient) is not None]
        if not ready:
            raise UsageError("step() needs gradients and no parameter has one", "call backward() on a loss first")
        self.zero_grad()
        return ready

    def update(
        self,
        parameter: Parameter,
        gradient: TileTensor,
        group: Group,
        norm: TileTensor | None,
        tiles: Sequence[int] | None = None,
        priority: int = 0,
    ) -> None:
        """Emit the update of one parameter, or of the given tiles of it.

        Args:
            norm: (1,) sum of squares of the whole gradient, for clipping; None for no clipping.
        """
        name = parameter.name
        update = optimizer_ops.Update(
            param=parameter.data,
            grad=gradient,
            hyper=self.hyper,
            row=self._rows[name],
            decays=group.weight_decay > 0,
            norm=norm,
            max_norm=self.max_norm,
            master=self.state["master"].get(name),
            tiles=tiles,
            priority=priority,
            cpu_only=self.on_cpu,
        )
        self._emit(update, {kind: tensors[name] for kind, tensors in self.state.items() if name in tensors}, group)

    @abstractmethod
    def _emit(self, update: optimizer_ops.Update, state: Mapping[str, TileTensor], group: Group) -> None:
        """Emit the tasks of an update; `state` has the parameter's tensors by kind."""

    def tensors(self) -> dict[str, TileTensor]:
        """Return the whole state by name, for checkpoints: the kind, such as "master", "m" or "momentum", a dot, and the name of the parameter."""
        return {f"{kind}.{name}": tensor for kind, tensors in self.state.items() for name, tensor in tensors.items()}

    def zero_grad(self) -> None:
        """Drop all gradients; this frees their memory and clears nothing."""
        for parameter in self._parameters():
            parameter.gradient = None


class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015), like ``torch.optim.Adam``: weight decay is added to the gradient.

    Args:
        parameters: parameters with tiles, or groups of them.
        lr: learning rate until `prepare` is given another.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: weight decay of parameters without a group.
        max_norm: largest norm of the whole gradient, which is scaled down to it; 0 disables clipping.
        tiles_of, on_cpu: the same as for `Optimizer`.
    """

    decoupled = False
    kinds: Sequence[str] = ("m", "v")

    def __init__(
        self,
        parameters: Sequence[Parameter] | Sequence[Group],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_norm: float = 0.0,
        tiles_of: Tiles | None = None,
        on_cpu: bool = False,
    ) -> None:
        if not all(0 <= beta < 1 for beta in betas) or eps < 0:
            raise UsageError(f"betas must be at least 0 and below 1 and eps 0 or more, got {betas} and {eps:g}", "use (0.9, 0.999) and 1e-8")
        options = Options(lr, weight_decay, *betas, eps)
        super().__init__(parameters, options, self.kinds, max_norm=max_norm, tiles_of=tiles_of, on_cpu=on_cpu)

    def _emit(self, update: optimizer_ops.Update, state: Mapping[str, TileTensor], group: Group) -> None:
        optimizer_ops.adamw(update, state["m"], state["v"], decoupled=self.decoupled)


class AdamW(Adam):
    """AdamW (Loshchilov and Hutter, 2019), like ``torch.optim.AdamW``: weight decay acts on the parameter itself. Arguments: those of `Adam`."""

    decoupled = True


class SGD(Optimizer):
    """Stochastic gradient descent, like ``torch.optim.SGD``: weight decay is added to the gradient.

    Args:
        momentum: decay of the momentum; 0 disables it.
        parameters, lr, weight_decay, max_norm, tiles_of, on_cpu: the same as for `Adam`.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter] | Sequence[Group],
        lr: float = 1e-3,
        *,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        max_norm: float = 0.0,
        tiles_of: Tiles | None = None,
        on_cpu: bool = False,
    ) -> None:
        if not 0 <= momentum < 1:
            raise UsageError(f"momentum must be at least 0 and below 1, got {momentum:g}", "use 0.9")
        options, kinds = Options(lr, weight_decay, momentum), ("momentum",) if momentum else ()
        super().__init__(parameters, options, kinds, max_norm=max_norm, tiles_of=tiles_of, on_cpu=on_cpu)

    def _emit(self, update: optimizer_ops.Update, state: Mapping[str, TileTensor], group: Group) -> None:
        optimizer_ops.sgd(update, state.get("momentum"))


def norm_of(sum_of_squares: npt.ArrayLike) -> float:
    """Return the gradient norm, from a value of `Optimizer.grad_norm`."""
    return math.sqrt(float(np.asarray(sum_of_squares).reshape(())))


def complete(gradient: TileTensor, tile: Handle, *, priority: int = 0) -> None:
    """Write zeros to a tile of a gradient that no operation contributed to, e.g. of positions beyond the sequence length."""
    if not tile.written:
        emit(gradient.runtime, "fill", [(tile, W)], value=0.0, priority=priority)


def _as_groups(parameters: Sequence[Parameter] | Sequence[Group], weight_decay: float) -> list[Group]:
    groups = [p for p in parameters if isinstance(p, Group)]
    single = [p for p in parameters if isinstance(p, Parameter)]
    if single:
        groups.append(Group(single, weight_decay))
    names = [p.name for group in groups for p in group.parameters]
    if not names or len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise UsageError(f"an optimizer needs parameters, each once, got {len(names)} with {twice or 'none'} repeated", "pass model.parameters()")
    learnt = [replace(group, parameters=[p for p in group.parameters if p.trainable]) for group in groups]
    if not any(group.parameters for group in learnt):
        raise UsageError(f"an optimizer needs parameters that are learnt, and all {len(names)} are frozen", "add adapters, or freeze fewer")
    return [group for group in learnt if group.parameters]


def _check_ranges(**numbers: float) -> None:
    for name, value in numbers.items():
        if not 0 <= value < math.inf:
            raise UsageError(f"{name} must be at least 0, got {value:g}", "the nearest legal value is 0")
