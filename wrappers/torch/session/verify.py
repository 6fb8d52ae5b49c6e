"""The comparison of `verify=`: a step by eager PyTorch, and the same step of a session.

The module itself runs, with copies of the session's values in its tensors. Random operations draw the same numbers as in the session, and the state
of Python is restored afterwards, so that the session's step begins in the same state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from nntask import NntaskError, UsageError

from ..capture.capture import Applied, Function, with_hooks_of
from ..capture.recorder import number_of_draw, whole
from ..guards.away import standing_for
from ..guards.snapshots import RandomState
from ..guards.world import World
from ..steps.captures import Captures
from ..steps.optimizers import SessionOptimizer
from ..tasks.calls import Call
from ..tasks.kernels import draws, generator_of, into_of
from .session_values import SessionValues

TOLERANCES: Final = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest difference relative to the largest value of a tensor, by element type."""
OTHERS: Final = 3e-2
"""Largest relative difference for narrower types."""
_SMALL: Final = 1e-4
"""Fraction of a parameter's largest gradient below which a gradient may be mere rounding, so that Adam's step from it is arbitrary."""


@dataclass
class Expected:
    """A step by eager PyTorch.

    Attributes:
        loss: loss of the step.
        gradients: gradients by first names of the parameters.
        tensors: parameters after the update and buffers, by first names.
        moments: names in the session's optimizer -> values.
    """

    loss: float
    gradients: dict[str, torch.Tensor]
    tensors: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor] = field(default_factory=dict)


class Verifier:
    """Comparison of a session's steps with eager PyTorch.

    Args:
        every: number of steps from one comparison to the next; 0 for none.
        captures, optimizer, values: passes, optimizer and values of the session.
    """

    def __init__(self, every: int, captures: Captures, optimizer: SessionOptimizer, values: SessionValues) -> None:
        self._every, self._captures, self._optimizer, self._values = every, captures, optimizer, values

    def wants(self, num_steps: int) -> bool:
        """Return whether the step after `num_steps` steps is compared."""
        return self._every > 0 and num_steps % self._every == 0

    def expected(self, minibatches: Sequence[Mapping[str, Any]], divisor: int, seed: tuple[int, int]) -> Expected:
        """Take a step by eager PyTorch, from the state of the session.

        Args:
            minibatches: arguments of each minibatch, by name.
            divisor: number by which the sum of losses is divided before its gradient is taken.
            seed: seed and number of the step.

        Raises:
            UsageError: eager PyTorch raises an error in the step.
        """
        own, optimizer = self._captures.own, self._optimizer
        with set_back(self._captures.world):
            try:
                expected = eager_step(self._captures.module, self._captures.objective, own, self._values.by_first_name(), minibatches, divisor, seed)
            except Exception as error:
                raise UsageError(
                    f"verify= took step {seed[1]} by eager PyTorch first, which raised {type(error).__name__}: {error}",
                    "call module(**batch) by eager PyTorch to locate the error, and fix the batch or the module",
                ) from error
        state = {name: torch.from_numpy(tensor.read()) for name, tensor in optimizer.updates.tensors().items()}
        if not optimizer.has_twin or any(name.startswith("master.") for name in state):  # as PyTorch has no masters: compare loss and buffers only
            expected.tensors = {name: value for name, value in expected.tensors.items() if not isinstance(value, torch.nn.Parameter)}
        else:
            self._update(expected, state, seed[1] - 1)
        return expected

    def compare(self, number: int, expected: Expected, loss: float) -> None:
        """Compare a step of the session with eager PyTorch.

        Args:
            number: number of the step.
            expected: the same step by eager PyTorch.
            loss: loss of the session.

        Raises:
            NntaskError: they differ by more than rounding; the message names the differences.
        """
        tensors = self._values.by_first_name()
        moments = {name: torch.from_numpy(tensor.read()) for name, tensor in self._optimizer.updates.tensors().items() if name in expected.moments}
        differences = []
        kinds = [each.dtype for each in expected.tensors.values() if each.is_floating_point()]
        if not _near(torch.tensor(loss), torch.tensor(expected.loss), max(map(_tolerance, kinds), default=OTHERS)):
            differences.append(f"the loss is {loss:.9g}, eager's {expected.loss:.9g}")
        for name, want in expected.moments.items():
            kind, _, parameter = name.partition(".")
            if kind != "v" and not _near(moments[name], want, _tolerance(expected.tensors[parameter].dtype)):
                words = "momentum" if kind == "momentum" else "first moment"
                differences.append(f"the gradient of {parameter} (its {words}), by {_away(moments[name], want):.1e}")
        for name, want in expected.tensors.items():
            gradient = expected.gradients.get(name)
            kind = "buffer" if not isinstance(want, torch.nn.Parameter) else "parameter"
            have, want = tensors[name].detach(), want.detach()
            if gradient is not None and expected.moments:  # a gradient that is mere rounding gives a step of arbitrary direction
                have = torch.where(gradient.abs() > _SMALL * gradient.abs().max(), have, want)
            if not _near(have, want, _tolerance(want.dtype)):
                differences.append(f"{kind} {name}, by {_away(have, want):.1e}")
        if differences:
            more = f" (and {len(differences) - 4} more)" if len(differences) > 4 else ""
            raise NntaskError(
                f"step {number} differs from the same step by eager PyTorch (verify={self._every}): {'; '.join(differences[:4])}{more}",
                "something "
                "that the step reads is out of sight (C code, files, the clock, state of an installed package): move it to a buffer or an attribute "
                "of the module",
            )

    def _update(self, expected: Expected, state: Mapping[str, torch.Tensor], num_steps: int) -> None:
        """Update the expected parameters with PyTorch's own optimizer.

        Args:
            state: optimizer state of the session, by name.
            num_steps: number of steps that the session has taken.
        """
        options, own = self._optimizer.options, self._captures.own
        twin = type(options)(
            [{**group, "params": [expected.tensors[own[id(each)]] for each in group["params"] if id(each) in own]} for group in options.param_groups]
        )
        is_adam = not isinstance(options, torch.optim.SGD)
        names = {"exp_avg": "m", "exp_avg_sq": "v"} if is_adam else {"momentum_buffer": "momentum"}
        entries: list[tuple[str, str, torch.Tensor]] = []
        for parameter in (each for group in twin.param_groups for each in group["params"]):
            name = next(name for name, each in expected.tensors.items() if each is parameter)
            if is_adam:
                twin.state[parameter]["step"] = torch.tensor(float(self._optimizer.num_steps_of(name, num_steps)))
            for of_torch, ours in names.items():
                if (value := state.get(f"{ours}.{name}")) is not None:
                    twin.state[parameter][of_torch] = value.to(parameter.dtype)
                    entries.append((f"{ours}.{name}", of_torch, parameter))
        if self._optimizer.max_norm > 0:
            torch.nn.utils.clip_grad_norm_([each for each in expected.tensors.values() if each.grad is not None], self._optimizer.max_norm)
        twin.step()
        expected.moments = {name: twin.state[parameter][of_torch] for name, of_torch, parameter in entries}


class _SameDraws(TorchDispatchMode):  # type: ignore[misc]
    """A mode in which random operations draw the numbers of a session's step.

    Args:
        seed: seed, number of the step, and number of the minibatch.
    """

    def __init__(self, seed: Sequence[int]) -> None:
        super().__init__()
        self._seed, self._draws = tuple(seed), dict[bytes, int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        number = number_of_draw(self._draws)
        call = replace(Call.of(func, (), ()), draw=number)
        if not draws(call):
            return func(*args, **kwargs)
        generator, rule = generator_of((*self._seed, number)), into_of(call)
        if rule is None:
            return func(*args, **{**kwargs, "generator": generator})
        with FakeTensorMode(allow_non_fake_inputs=True) as shapes:
            predicted = func(*tree_map_only(torch.Tensor, shapes.from_tensor, args), **tree_map_only(torch.Tensor, shapes.from_tensor, kwargs))
        results = [torch.empty_strided(each.shape, each.stride(), dtype=each.dtype) for each in tree_leaves(predicted)]
        rule(results, *args, **{**kwargs, "generator": generator})
        return results[0] if len(results) == 1 else tuple(results)


def eager_step(
    module: torch.nn.Module,
    objective: Function,
    own: Mapping[int, str],
    values: Mapping[str, torch.Tensor],
    minibatches: Sequence[Mapping[str, Any]],
    divisor: int,
    seed: tuple[int, int],
) -> Expected:
    """Take the forward and backward passes of a step by eager PyTorch.

    Args:
        module: module whose tensors are in a session.
        objective: function of the module and a batch that returns the loss.
        own: id -> first name of the tensors that the session holds.
        values: values of these tensors, which become part of the result.
        divisor: number by which the sum of losses is divided before its gradient is taken.
        seed: seed and number of the step.
    """
    twins: dict[str, torch.Tensor] = {}
    by_name: dict[str, torch.Tensor] = {}
    for name, tensor in (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)):
        if (first := own.get(id(tensor))) is not None:
            if first not in twins:
                value = values[first]
                twins[first] = (
                    with_hooks_of(tensor, torch.nn.Parameter(value, tensor.requires_grad)) if isinstance(tensor, torch.nn.Parameter) else value
                )
            by_name[name] = twins[first]
    loss = 0.0

    def backward(minibatch_loss: torch.Tensor) -> torch.Tensor:
        (minibatch_loss if divisor == 1 else minibatch_loss / divisor).backward()
        return minibatch_loss

    for number, minibatch in enumerate(minibatches):
        applied = Applied(module, objective, backward)
        inputs = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in minibatch.items()}
        with standing_for({each: twins[name] for each, name in own.items() if name in twins}), torch.random.fork_rng(devices=[]):
            with _SameDraws((*seed, number)), torch.enable_grad():
                loss += float(applied.called_with(by_name, inputs).detach())
            applied.update()
    gradients = {name: twin.grad for name, twin in twins.items() if twin.grad is not None}
    return Expected(loss / divisor, gradients, twins)


def _tolerance(dtype: torch.dtype) -> float:
    return TOLERANCES.get(dtype, OTHERS)


def _away(have: torch.Tensor, want: torch.Tensor) -> float:
    return float((have.double() - want.double()).abs().max() / max(float(want.double().abs().max()), 1e-12))


def _near(have: torch.Tensor, want: torch.Tensor, tolerance: float) -> bool:
    if not want.is_floating_point():
        return bool(torch.equal(have, want))
    if not want.numel():
        return True
    if not bool(want.isfinite().all()):
        return bool(torch.equal(have.isfinite(), want.isfinite()))
    return float((have.double() - want.double()).abs().max()) <= tolerance * max(float(want.double().abs().max()), 1e-3)


@contextmanager
def set_back(world: World) -> Iterator[None]:
    """Restore the state of Python, and the tensors that the program keeps in it, after the block.

    Raises:
        UsageError: a part of the state cannot be restored.
    """
    before = world.walked()
    tensors = [(tensor, whole(tensor).clone()) for tensor, _ in before.tensors.values() if tensor.layout == torch.strided]
    numbers = RandomState()
    gradients = [(tensor, tensor.grad) for tensor, _ in before.tensors.values() if tensor.requires_grad and tensor.is_leaf]
    for tensor, _ in gradients:
        tensor.grad = None

    def set_tensors_back() -> None:
        with torch.no_grad():
            for tensor, memory in tensors:
                whole(tensor).copy_(memory)

    with ExitStack() as after:
        after.callback(set_tensors_back)
        for tensor, gradient in gradients:
            after.callback(setattr, tensor, "grad", gradient)
        after.callback(before.restore)
        after.callback(numbers.restore)
        yield
    if left := before.differences(world.walked()):
        raise UsageError(
            f"verify= runs the module by eager PyTorch and by the session, and {left[0]} cannot be set back",
            "leave verify= out, or keep that state in an attribute of plain Python",
        )
