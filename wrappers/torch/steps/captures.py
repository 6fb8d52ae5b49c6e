"""The captured passes of a module: one for each purpose, shape of a minibatch and state of Python, captured at their first use.

A pass is reused as long as everything that its capture has read is unchanged: the state of Python (`world`), PyTorch's settings, and the values by
which decisions were made (guards). A pass that has changed the state of Python runs in each step. If it makes the same calls, the tasks are reused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from nntask import UsageError
from nntask.planning import no_collections

from ..capture.batches import signature_of
from ..capture.capture import CaptureTerms, Function
from ..capture.objectives import call
from ..capture.values import HostValues
from ..guards.snapshots import Snapshot
from ..guards.world import World
from ..tasks.calls import Call, Capture, Carried, Ref, Storage
from ..tasks.step import Pass
from .dry import PassTerms, pass_of
from .modules import evaluating, named_tensors

Purpose = Literal["train", "evaluate", "predict"]
"""Purpose of a step: an update, a loss, or the module's result."""

Values = Callable[[Mapping[str, Any], int], HostValues]
"""Function of a minibatch and its number within the step that returns values of tensors."""

MOST_STATES: Final = 32
"""Largest number of states of Python and shapes whose passes are kept; another one is captured anew, and finds its tasks by their form."""
MANY: Final = 8
"""Number of passes in a row that are captured anew because they change the state of Python, before a warning."""


@dataclass(frozen=True, slots=True)
class PassUse:
    """A pass over one minibatch.

    Attributes:
        tasks: the tasks of the pass.
        carried: tensors that it leaves in Python; references are those of `tasks`.
        constants: storages of `tasks` with the program's tensors that they currently represent, except those found by their paths.
        host: values of inputs that the host has computed, by name.
        ran: whether Python has just run for it.
        has_effects: whether Python has changed its state meanwhile.
        outer: learnable tensors of the program outside the module, with the references of their gradients.
    """

    tasks: Pass
    carried: tuple[Carried, ...]
    constants: tuple[tuple[Storage, torch.Tensor], ...]
    host: Mapping[str, torch.Tensor]
    ran: bool
    outer: tuple[tuple[torch.Tensor | None, Ref], ...]
    has_effects: bool


class Captures:
    """The captured passes of a module.

    Args:
        module: the module, whose values are not used.
        objective: function of the module and a batch that returns the loss.
        terms: tiles, compiler and devices for which passes are captured.
        roots: further objects from which state of Python is reachable, by name.
        shared: names of buffers that share memory in the module, which no pass may change, because they are separate in a session.

    Attributes:
        quiet: function that waits until nothing computes, called before a pass is captured; None as long as nothing computes.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        objective: Function,
        terms: PassTerms,
        *,
        roots: Mapping[str, Any] | None = None,
        shared: Collection[str] = (),
    ) -> None:
        self.module, self.terms = module, terms
        self.objective = objective
        self.quiet: Callable[[], object] | None = None
        own: dict[int, str] = {}
        for name, value in named_tensors(module):
            own.setdefault(id(value), name)
        self.own, self._tensors = own, [value for _, value in named_tensors(module)]  # kept alive, so that ids stay unique
        hooks = {name: each for name, each in vars(torch.nn.modules.module).items() if name.startswith("_global_") and isinstance(each, dict)}
        self.world = World({"module": module, **(roots or {}), "hooks of all modules": hooks}, own)
        self._passes: dict[Hashable, list[tuple[PassUse, Capture]]] = {}  # uses, and captures with their guards; least recently used first
        self._forms: dict[Hashable, list[Pass]] = {}
        self._num_anew, self._shared = 0, shared
        self._seen: Snapshot | None = None  # the state of Python at the last capture

    def pass_over(
        self, minibatch: Mapping[str, Any], purpose: Purpose, divisor: int, values: HostValues | None = None, taken: Collection[Pass] = ()
    ) -> PassUse:
        """Return the use of a pass over a minibatch; nothing else may compute while it is captured.

        Args:
            values: current values of tensors; None if there are none.
            taken: passes over other minibatches of the step.
        """
        key = (purpose, divisor, signature_of(minibatch), surroundings(), self.world.now().key)
        passes = self._passes.pop(key, [])
        if passes:
            self._passes[key] = passes
        for use, captured in passes:
            if (host := _host_inputs(captured, values)) is not None:
                self._num_anew = 0
                return replace(use, host=host)
        before = self.world.now()
        with no_collections():  # a collection would go through all of torch
            new_pass = self._captured(minibatch, purpose, divisor, values)
        for name in {s.name for each in new_pass.captured.calls for s in each.writes if s.role == "buffer"}.intersection(self._shared):
            raise UsageError(
                f"the module changes {name}, which shares its memory with another buffer, and a session separates them", "use one buffer"
            )
        host = {s.name: values.given(s) for each in new_pass.captured.host for s in each.storages} if values is not None else {}
        changed = new_pass.captured.effects or ([] if self._seen is None else self._seen.differences(before))
        self._seen = before
        self._note_anew(changed)
        known = self._forms.setdefault((purpose, divisor, surroundings(), form_of(new_pass.captured)), [])
        same = next((each for each in known if each not in taken), new_pass)  # a pass has one set of constants, and each minibatch may need its own
        if same is new_pass:
            known.append(new_pass)
        if not new_pass.captured.effects:
            checked = new_pass.captured if new_pass.captured.guards or new_pass.captured.host else replace(new_pass.captured, calls=())
            self._passes.setdefault(key, []).append((_use(same, new_pass.captured, {}), checked))
            if len(self._passes) > MOST_STATES:
                del self._passes[next(iter(self._passes))]
        return _use(same, new_pass.captured, host, ran=True)

    def passes_over(self, minibatches: Sequence[Mapping[str, Any]], purpose: Purpose, divisor: int, values: Values | None = None) -> list[PassUse]:
        """Return the uses of the passes over the minibatches of one step, as `pass_over` does for one.

        Args:
            values: values of tensors, for decisions of the module; None if there are none.
        """
        uses: list[PassUse] = []
        for number, each in enumerate(minibatches):
            taken = [use.tasks for use in uses]
            uses.append(self.pass_over(each, purpose, divisor, None if values is None else values(each, number), taken))
        return uses

    def keep(self, passes: Collection[Pass]) -> None:
        """Drop all other passes."""
        self._passes = {key: kept for key, known in self._passes.items() if (kept := [each for each in known if each[0].tasks in passes])}
        self._forms = {key: alive for key, tasks in self._forms.items() if (alive := [each for each in tasks if each in passes])}

    def _captured(self, minibatch: Mapping[str, Any], purpose: Purpose, divisor: int, values: HostValues | None) -> Pass:
        if self.quiet is not None:
            self.quiet()
        function = call if purpose == "predict" else self.objective
        how = CaptureTerms(purpose == "train", divisor, self.terms.on_gpus, self.world, values, self.own)
        try:
            if purpose == "train":
                return pass_of(self.module, minibatch, function, self.terms, how)
            with evaluating(self.module):
                return pass_of(self.module, minibatch, function, self.terms, how)
        finally:
            self.world.note_run()

    def _note_anew(self, changed: Sequence[str]) -> None:
        """Count captures in a row, and warn once if there are many.

        Args:
            changed: places in Python's state that the pass itself has changed, or that differ from the previous capture.
        """
        self._num_anew = self._num_anew + 1 if changed else 0
        if self._num_anew == MANY:
            more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
            warnings.warn(
                f"each step is captured anew, because {changed[0]}{more} changes in each step; results are eager PyTorch's, but a step takes longer: "
                "keep such state in tensors, which may change, or where neither the module nor the loss reads it",
                stacklevel=6,
            )


def surroundings() -> Hashable:
    """Return the settings of PyTorch that a capture reads."""
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch._C._get_mkldnn_enabled(),
    )


def _use(tasks: Pass, captured: Capture, host: Mapping[str, torch.Tensor], *, ran: bool = False) -> PassUse:
    """Return a use of one capture's tasks for another capture of the same form.

    Args:
        ran: whether Python has just run, so that its state is that after the pass.
    """
    if tasks.captured is captured:
        carried, constants = tuple(captured.carried), [(storage, storage) for storage in tasks.constants]
    else:
        refs = (each.ref for each in tasks.captured.carried)
        carried = tuple(Carried(new.slot, new.fake, ref, new.path) for new, ref in zip(captured.carried, refs, strict=True))
        constants = list(zip(_constants_in(tasks.captured), _constants_in(captured), strict=True))
    given = tuple((mine, new.tensor) for mine, new in constants if (ran or not new.name) and new.tensor is not None)
    outer = tuple((new.tensor, ref) for (_, _, ref), (new, _, _) in zip(tasks.captured.outer, captured.outer, strict=True))
    return PassUse(tasks, carried, given, host, ran, outer, ran and bool(captured.effects))


def _constants_in(captured: Capture) -> list[Storage]:
    """Return the constants of a pass in the order of their first use."""
    storages: dict[Storage, None] = {}
    for each in captured.calls:
        storages.update(dict.fromkeys(ref.storage for ref in tree_leaves((each.args, dict(each.kwargs))) if isinstance(ref, Ref)))
    return [storage for storage in storages if storage.role == "constant"]


def _host_inputs(captured: Capture, values: HostValues | None) -> dict[str, torch.Tensor] | None:
    """Return the values that the host computes for a pass, by name; None if a guard does not hold, or a shape has changed."""
    inputs: dict[str, torch.Tensor] = {}
    if not captured.guards and not captured.host:
        return inputs
    if values is None:
        return None
    for host in captured.host:
        results = values.run(host)
        if tuple(tuple(each.shape) for each in results) != host.shapes:
            return None
        inputs.update((storage.name, each) for storage, each in zip(host.storages, results, strict=True))
    return inputs if all(values.holds(guard) for guard in captured.guards) else None


def form_of(captured: Capture) -> Hashable:
    """Return the form of a capture: calls, results and gradients, with storages by number. Captures of equal form can use the same tasks."""
    numbers: dict[Storage, int] = {}

    def number(storage: Storage) -> Hashable:
        index = numbers.setdefault(storage, len(numbers))
        return (index, storage.role, storage.name, storage.nbytes, storage.piece)

    def form(value: Any) -> Any:
        return repr(
            tree_map_only(Ref, lambda ref: (number(ref.storage), ref.dtype, ref.shape, ref.strides, ref.offset, ref.is_conj, ref.is_neg), value)
        )

    calls = tuple(_form_of_call(each, form) for each in captured.calls)
    outer = tuple((form(Ref(s, torch.uint8, (), (), 0)), form(ref)) for s, _, ref in captured.outer)
    gradients = tuple((tile, form(ref)) for tile, ref in captured.gradients.items())
    return calls, form(captured.outputs), gradients, tuple(form(each.ref) for each in captured.carried), outer


def _form_of_call(each: Call, form: Callable[[Any], Any]) -> Hashable:
    return each.func, form(each.args), form(dict(each.kwargs)), form(each.results), each.draw
