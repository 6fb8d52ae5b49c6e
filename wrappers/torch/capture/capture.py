"""The capture of a pass: from a module and a batch to the calls of aten operations in its forward and backward pass.

The module runs once under a fake tensor mode (shapes only: no arithmetic, no memory), autograd included, and every operation that reaches the
dispatcher below autograd is recorded. So the calls are those that eager PyTorch makes, in their order, and computing them gives eager's bits.
Python control flow simply runs, with its effects. A decision that needs a value uses the value in the current batch, and becomes a guard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map, tree_map_only

from nntask import UsageError

from ..guards.away import standing_for
from ..guards.snapshots import RandomState, Snapshot
from ..guards.world import World
from ..tasks.calls import Capture, Carried, Ref, aten
from .batches import layout_of
from .eager_forms import plain_python, with_plain_classes
from .recorder import CallRecorder
from .refusals import refusals
from .values import HostValues

Function = Callable[[torch.nn.Module, Mapping[str, Any]], Any]
"""Function of a module and a batch that returns the result of a pass."""

_OF_ONEDNN: Final = frozenset({aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default})


@dataclass(frozen=True)
class CaptureTerms:
    """Options of a capture.

    Args:
        backward: whether there is a backward pass.
        divisor: number of minibatches by which the loss is divided before its gradient is taken.
        on_gpus: whether GPUs compute the pass; attention is then captured as products and a softmax, since PyTorch's fused one is for the CPU only.
        world: state of Python that the pass may read and change; None to ignore it.
        values: values of tensors, for decisions that need them; None if there are none.
        own: id -> name of the module's tensors that the session holds; None for all.
    """

    backward: bool
    divisor: int = 1
    on_gpus: bool = False
    world: World | None = None
    values: HostValues | None = None
    own: Mapping[int, str] | None = None


def capture(module: torch.nn.Module, batch: Mapping[str, Any], function: Function, terms: CaptureTerms) -> Capture:
    """Capture a forward pass, and on request the backward pass. Values of the module are not used.

    State of Python that the pass changes stays changed, as after a call of the module; if capturing fails it is restored. Tensors that the pass
    leaves there are fake until their values are known (`Capture.carried`).

    Recurrent layers of oneDNN are captured a second time with oneDNN switched off, for the whole process, so that they become products: only oneDNN
    knows the size of the workspace of its own layers. Nothing else should compute meanwhile.

    Args:
        module: the module, in training or evaluation mode, on the CPU or on the meta device.
        batch: arguments of the function; tensors are inputs, other values are fixed.
        function: function of the module and the batch that returns the values to keep; with a backward pass a scalar, the loss.
        terms: options of the capture.

    Raises:
        UsageError: the pass cannot be captured; the message names the line of the model.
    """
    before = terms.world.now() if terms.world is not None else Snapshot()
    numbers = RandomState()

    def again(*, copies: bool) -> Capture:
        before.restore()
        numbers.restore()
        return _capture(module, batch, function, terms, before, copies=copies)

    with ExitStack() as settings:
        if terms.on_gpus:
            settings.enter_context(sdpa_kernel(SDPBackend.MATH))
        captured = _capture(module, batch, function, terms, before, copies=False)
        if any(call.func in _OF_ONEDNN for call in captured.calls):
            settings.callback(torch._C._set_mkldnn_enabled, torch._C._get_mkldnn_enabled())
            torch._C._set_mkldnn_enabled(False)
            captured = again(copies=False)
        if any(storage.role == "input" for call in captured.calls for storage in call.writes):  # the model changes the program's inputs
            captured = again(copies=True)
    return captured


def _capture(
    module: torch.nn.Module, batch: Mapping[str, Any], function: Function, terms: CaptureTerms, before: Snapshot, *, copies: bool
) -> Capture:
    """Capture a pass from a state of Python; with `copies` the function gets copies of the inputs."""
    for path, (tensor, _) in before.tensors.items():
        if isinstance(tensor, FakeTensor):
            raise UsageError(
                f"{path} holds a tensor that an earlier minibatch of this step has made, whose values are not known yet",
                "give it an initial tensor of the same shape, or use minibatches=1",
            )
    recorder = CallRecorder(terms.values, {id(tensor): path for path, (tensor, _) in before.tensors.items()}, on_gpus=terms.on_gpus)
    numbers = RandomState()
    try:
        with ExitStack() as stack:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            run = _Run(module, recorder, _twins_of(module, recorder, terms.own))
            stack.enter_context(standing_for(run.twins.by_id))
            stack.enter_context(plain_python(recorder))
            result = run.result(batch, function, terms, copies=copies)
            after = before if terms.world is None or before.is_current() else terms.world.walked()
            carried, carried_refs = _carried(before, after, recorder)
            run.check_gradients()
            outer = [(recorder.ref(recorder.fake_of(tensor)).storage, tensor, recorder.ref(gradient)) for tensor, gradient in run.outer]
            changed = {
                name: recorder.ref(value) for name, value in run.copies.items() if isinstance(value, torch.Tensor) and recorder.is_changed(value)
            }
            outputs = tree_map(lambda leaf: _kept(leaf, recorder), result), [*carried_refs, *changed.values(), *(ref for _, _, ref in outer)]
        moved = [
            p for p, (tensor, _) in after.tensors.items() if not isinstance(tensor, FakeTensor) and tensor is not before.tensors.get(p, (None,))[0]
        ]
        effects = [*before.differences(after), *moved, *numbers.differences(RandomState())]
        gradients = {(name, 0): recorder.ref(gradient) for name, gradient in run.gradients.items()}
        return Capture(
            recorder.calls,
            outputs,
            gradients,
            recorder.named,
            carried,
            tuple(recorder.guards.values()),
            tuple(recorder.host),
            tuple(effects),
            changed,
            outer,
        )
    except BaseException:
        before.restore()
        for tensor, _ in before.tensors.values():
            if isinstance(tensor.grad, FakeTensor):
                tensor.grad = None
        raise


class _Twins(NamedTuple):
    """Fake tensors for the parameters and buffers of a module.

    Attributes:
        by_name: twins by every name.
        parameters: twins of parameters, by first names.
        by_id: twins by the id of the tensor that they replace.
        aliases: each twin with another tensor in its memory.
    """

    by_name: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    by_id: dict[int, torch.Tensor]
    aliases: list[tuple[torch.Tensor, torch.Tensor]]


class _Run:
    """One run of a function of a module over fake tensors.

    Attributes:
        gradients: gradients of parameters, by their first names.
        copies: copies of the inputs, if the function gets copies.
    """

    def __init__(self, module: torch.nn.Module, recorder: CallRecorder, twins: _Twins) -> None:
        self._module, self._recorder, self.twins = module, recorder, twins
        self._learnt = {name: twin for name, twin in twins.parameters.items() if twin.requires_grad}
        self.gradients: dict[str, torch.Tensor] = {}
        self.copies: dict[str, Any] = {}
        self.outer: list[tuple[torch.Tensor, torch.Tensor]] = []

    def result(self, batch: Mapping[str, Any], function: Function, terms: CaptureTerms, *, copies: bool) -> Any:
        """Run the function, and the backward pass if there is one, and return the function's result."""
        recorder = self._recorder
        inputs = {name: _input(value) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
        for name, value in inputs.items():
            if isinstance(value, torch.Tensor):
                recorder.enter(value, "input", name)
        then = (lambda found: self._differentiate(found, terms.divisor)) if terms.backward else (lambda found: found)
        applied = Applied(self._module, function, then)
        with refusals(), torch.random.fork_rng(devices=[]), recorder, torch.set_grad_enabled(terms.backward):
            recorder.begin()
            if copies:
                inputs = self.copies = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
            recurrent = [
                (child, list(child._flat_weights), list(child._flat_weight_refs))
                for child in self._module.modules()
                if isinstance(child, torch.nn.RNNBase)
            ]
            outputs = applied.called_with(self.twins.by_name, inputs)
            for child, weights, references in recurrent:  # otherwise they would keep lists of twins
                child._flat_weights, child._flat_weight_refs = weights, references
            applied.update()
            self._write_moved()
            return tree_map_only(torch.Tensor, recorder.own, with_plain_classes(outputs))

    def _differentiate(self, outputs: Any, divisor: int) -> Any:
        """Compute the gradients of all parameters that have one, including those that a backward pass in the module has added to `.grad`."""
        if not outputs.requires_grad:
            raise UsageError("the loss depends on no parameter that is learnt", "unfreeze one, or compute the loss from the module's result")
        outer = self._recorder.learnable()
        wanted = [*self._learnt.values(), *outer]
        gradients = torch.autograd.grad(outputs if divisor == 1 else outputs / divisor, wanted, allow_unused=True)
        given = zip(outer, gradients[len(self._learnt) :], strict=True)
        self.outer = [(tensor, self._recorder.own(gradient.detach())) for tensor, gradient in given if gradient is not None]
        gradients = gradients[: len(self._learnt)]
        for (name, twin), gradient in zip(self._learnt.items(), gradients, strict=True):
            added, twin.grad = twin.grad, None
            if added is not None:
                gradient = added if gradient is None else gradient + added
            if gradient is not None:
                self.gradients[name] = self._recorder.own(gradient.detach())
        return outputs

    def _write_moved(self) -> None:
        """Write the values of tensors whose memory the module has replaced (``weight.data = ...``) to their original memory."""
        for twin, alias in self.twins.aliases:
            if self._recorder.known(twin) is not self._recorder.known(alias):
                if twin.shape != alias.shape or twin.dtype != alias.dtype:
                    raise UsageError(
                        f"the module gives a tensor of shape {tuple(alias.shape)} values of shape {tuple(twin.shape)}", "keep its shape and type"
                    )
                with torch.no_grad():
                    alias.copy_(twin.detach())

    def check_gradients(self) -> None:
        """Check that all gradients are dense.

        Raises:
            UsageError: a gradient is sparse.
        """
        for name, gradient in self.gradients.items():
            if gradient.layout != torch.strided:
                raise UsageError(f"the gradient of {name} is sparse, and gradients must be dense", "make its embedding with sparse=False")


def _carried(before: Snapshot, after: Snapshot, recorder: CallRecorder) -> tuple[list[Carried], list[Ref]]:
    """Return the tensors that a pass has left in Python, written to the constant that they replace or kept as outputs; and those outputs."""
    carried, refs = list[Carried](), list[Ref]()
    with recorder, torch.no_grad():
        for path, (tensor, slot) in after.tensors.items():
            if not isinstance(tensor, FakeTensor) or tensor.layout != torch.strided:
                continue
            if slot.write is None:
                raise UsageError(
                    f"{path} keeps a tensor of the pass in a place that cannot receive its value", "keep it as an attribute of the module"
                )
            old = before.tensors.get(path)
            if old is not None and before.leaves[path] == after.leaves[path] and (storage := recorder.known(old[0])) is not None:
                if recorder.known(tensor) is not storage:
                    recorder.fake_of(old[0]).copy_(tensor.detach())
                ref = recorder.ref(old[0])
            else:
                ref = recorder.ref(recorder.own(tensor.detach()))
                refs.append(ref)
            carried += [Carried(each, tensor, ref, path) for each in (slot, *after.aliases.get(path, ()))]
    return carried, refs


def _kept(leaf: Any, recorder: CallRecorder) -> Any:
    """Return the reference of a tensor, or a plain value; None for other objects, which may hold tensors without memory."""
    if isinstance(leaf, torch.Tensor):
        return recorder.ref(leaf)
    return leaf if isinstance(leaf, bool | int | float | str | None) else None


def _input(value: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor for a tensor of the batch."""
    strides, _ = layout_of(value)
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device="cpu").requires_grad_(value.requires_grad)


def _twins_of(module: torch.nn.Module, recorder: CallRecorder, own: Mapping[int, str] | None) -> _Twins:
    """Return fake tensors for the parameters and buffers of a module.

    Args:
        own: id -> name of the tensors that the session holds; None for all.

    Raises:
        UsageError: the module has a parameter that the session lacks.
    """
    twins = _Twins({}, {}, {}, [])
    for name, value in (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)):
        is_parameter = isinstance(value, torch.nn.Parameter)
        if not value.numel() or value.layout != torch.strided or (own is not None and id(value) not in own):
            if is_parameter and value.numel() and own is not None:
                raise UsageError(f"{name} is a parameter that the module did not have when its session was made", "make a new session")
            continue  # a constant of the program
        if id(value) not in twins.by_id:
            first = name if own is None else own[id(value)]
            twin = twins.by_id[id(value)] = torch.empty(value.shape, dtype=value.dtype, device="cpu")
            if is_parameter:
                twins.parameters[first] = with_hooks_of(value, twin.requires_grad_(value.requires_grad))
                twin._is_param = True  # for isinstance(..., torch.nn.Parameter)
            recorder.enter(twin, "parameter" if is_parameter else "buffer", first)
            twins.aliases.append((twin, twin.detach()))
        twins.by_name[name] = twins.by_id[id(value)]
    return twins


def with_hooks_of(parameter: torch.Tensor, twin: torch.Tensor) -> torch.Tensor:
    """Register the gradient hooks of a parameter on its twin, the fake tensor that replaces it, and return the twin."""
    if twin.requires_grad:
        for hook in (parameter._backward_hooks or {}).values():
            twin.register_hook(hook)
    return twin


class Applied(torch.nn.Module):  # type: ignore[misc]
    """A module that computes a function of another module."""

    def __init__(self, module: torch.nn.Module, function: Function, then: Callable[[Any], Any]) -> None:
        super().__init__()
        self.module, self.function, self.then = module, function, then
        self.replaced: dict[str, tuple[torch.Tensor, Any]] = {}  # buffers that the function has replaced by new tensors: (old, new)

    def forward(self, batch: Mapping[str, Any]) -> Any:
        """Return `then` of the function's result, and note the buffers that the function has replaced."""
        before = dict(self.module.named_buffers(remove_duplicate=False))
        result = self.function(self.module, batch)
        after = dict(self.module.named_buffers(remove_duplicate=False))
        self.replaced = {name: (old, after.get(name)) for name, old in before.items() if after.get(name) is not old}
        return self.then(result)  # here, because a backward pass with recomputation uses the module's tensors

    def called_with(self, tensors: Mapping[str, torch.Tensor], inputs: Mapping[str, Any]) -> Any:
        """Call the function while the module has other tensors, given by every name.

        `functional_call` restores the tensors by name in the order of their replacement: a submodule with two names would keep its replacement.
        """
        once = {path for path, _ in self.module.named_modules()}
        again = {path for path, _ in self.module.named_modules(remove_duplicate=False)} - once
        by_name = {f"module.{name}": tensor for name, tensor in tensors.items() if name.rpartition(".")[0] not in again}
        return torch.func.functional_call(self, by_name, (inputs,), tie_weights=False)

    def update(self) -> None:
        """Write new values of replaced buffers to the old ones.

        Raises:
            UsageError: a new buffer has another shape or type.
        """
        for name, (old, new) in self.replaced.items():
            if not isinstance(new, torch.Tensor) or new.shape != old.shape or new.dtype != old.dtype:
                raise UsageError(f"the module replaces its buffer {name} by something of another shape or type", "keep both, or use an attribute")
            with torch.no_grad():
                old.copy_(new)
