"""A step of several minibatches on a runtime: its inputs, the submission of its tasks, and the values of its outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from nntask import UsageError
from nntask.optim import Optimizer
from scheduler import Access, Codelet, Handle, R, TaskRuntime, Ticket, W
from scheduler.machine import Binding, labelled
from tiles import TileTensor

from ..capture.batches import layout_of, memory_of
from ..capture.eager_forms import Fields
from ..capture.recorder import HOST_INPUT
from ..tasks.calls import Capture, Ref, Storage, aten
from ..tasks.devices import HOST, as_bytes, compute_on_gpu
from ..tasks.kernels import tensor_of
from ..tasks.step import Pass
from .state import ModuleState, array_of, tensor_of_one_tile


class StepTasks:
    """Captured passes over minibatches on a state's runtime, ready to be submitted.

    Attributes:
        inputs: input tensors of each minibatch, by name.
    """

    def __init__(self, passes: Sequence[Pass], state: ModuleState, minibatches: Sequence[Mapping[str, Any]]) -> None:
        self._passes, self._state = passes, state
        self.inputs = [_inputs_of(state.runtime, each) | _host_inputs_of(state.runtime, one) for one, each in zip(passes, minibatches, strict=True)]
        self._handles = [state.handles((*each.captured.storages, *each.constants), inputs) for each, inputs in zip(passes, self.inputs, strict=True)]

    def submit(self, key: TileTensor, optimizer: Optimizer | None) -> tuple[list[dict[Storage, Handle]], TileTensor | None]:
        """Submit the tasks of all minibatches, and of the update if there is an optimizer.

        Returns:
            The handles of the outputs of each minibatch; and the gradient's sum of squares, None without an update.
        """
        runtime, gradients = self._state.runtime, self._state.gradients(self._passes[0].captured.gradients)
        copies = {} if optimizer is None else self._copies_of_buffers()
        all_outputs, late = [], []
        for number, (each, handles) in enumerate(zip(self._passes, self._handles, strict=True)):
            outputs, adding = each.submit(runtime, _with_copies(handles, copies), gradients, key.handles[0], minibatch=number)
            all_outputs.append(outputs)
            late += adding
        for submit in late:
            submit()
        if optimizer is None:
            return all_outputs, None
        written = {s.name for each in self._passes for call in each.captured.calls for s in call.writes if s.role == "parameter"}
        optimizer.follow(written)  # updates masters of parameters that the passes themselves change
        optimizer.step()
        assert optimizer.grad_norm is not None  # step() has just set it
        if copies:  # buffers are written only after the whole gradient has been computed
            accesses: list[Access] = [(copy.handles[0], R) for copy in copies.values()]
            accesses += [(self._state.buffers[name].handles[0], W) for name in copies]
            with labelled(phase="update", path=""):
                runtime.submit(_COPY, [*accesses, (optimizer.grad_norm.handles[0], R)])
        return all_outputs, optimizer.grad_norm

    def fill_constants(self) -> None:
        """Give new constants of the passes their values, which takes memory."""
        self._state.fill_constants(storage for handles in self._handles for storage in handles)

    def named_data(self, key: TileTensor, optimizer: Optimizer | None) -> dict[str, Binding]:
        """Return the data that exists before the step, by name: the module's tensors, constants, state of the optimizer, and inputs."""
        learnt = frozenset[str]() if optimizer is None else frozenset(name for name, _ in self._passes[0].captured.gradients)
        written = {
            handles[storage].record
            for each, handles in zip(self._passes, self._handles, strict=True)
            for segment in each.segments
            for storage in segment.updates
            if storage in handles
        }

        def bound(handles: Sequence[Handle], *, is_learnt: bool = False) -> Binding:
            return Binding(handles, is_learnt or any(handle.record in written for handle in handles))

        constants = {handle.record: handle for handles in self._handles for storage, handle in handles.items() if storage.role == "constant"}
        data = {f"the module's {name}": bound(tensor.handles, is_learnt=name in learnt) for name, tensor in self._state.tensors().items()}
        data |= {f"constant {number}": bound([handle]) for number, handle in enumerate(constants.values())}
        data |= {f"{name} of minibatch {number}": bound(each.handles) for number, inputs in enumerate(self.inputs) for name, each in inputs.items()}
        data["random key"] = Binding(key.handles)
        if optimizer is not None:
            data |= {f"the optimizer's {name}": Binding(tensor.handles, is_written=True) for name, tensor in optimizer.tensors().items()}
            data["options of the optimizer"] = Binding(optimizer.hyper.handles)
        return data

    def _copies_of_buffers(self) -> dict[str, TileTensor]:
        """Return copies of the buffers that the passes change, by name, so that a failed step leaves buffers unchanged."""
        updated = {s.name: None for each in self._passes for segment in each.segments for s in segment.updates if s.role == "buffer"}
        copies = {name: self._state.buffers[name].like(data_class="data", name=f"copy of {name}") for name in updated}
        if copies:
            accesses: list[Access] = [(self._state.buffers[name].handles[0], R) for name in copies]
            accesses += [(copy.handles[0], W) for copy in copies.values()]
            self._state.runtime.submit(_COPY, accesses)
        return copies


def _copy_all(*views: Any, where: torch.device = HOST) -> None:
    """Copy the first half of the views to the second half; a further view only adds a dependency."""
    half = len(views) // 2
    for source, target in zip(views[:half], views[half : 2 * half], strict=True):
        as_bytes(target, where).copy_(as_bytes(source, where))


def _copy_all_on_gpu(*views: Any) -> None:
    compute_on_gpu(lambda where: _copy_all(*views, where=where))


_COPY: Final = Codelet("copy buffers", cpu=_copy_all, cuda=_copy_all_on_gpu)


def _with_copies(handles: Mapping[Storage, Handle], copies: Mapping[str, TileTensor]) -> dict[Storage, Handle]:
    """Return the handles with copies in place of the buffers of these names."""
    return {s: copies[s.name].handles[0] if s.role == "buffer" and s.name in copies else handle for s, handle in handles.items()}


def key_of(runtime: TaskRuntime) -> TileTensor:
    """Return the input (2,) for the seed and the number of the step, which determine random numbers."""
    return TileTensor(runtime, (2,), (-1,), np.uint64, kind="input", data_class="data", name="random key")


def _inputs_of(runtime: TaskRuntime, example: Mapping[str, Any]) -> dict[str, TileTensor]:
    return {
        name: tensor_of_one_tile(runtime, torch.empty(layout_of(value)[1], dtype=value.dtype, device="meta"), name, kind="input", data_class="data")
        for name, value in example.items()
        if isinstance(value, torch.Tensor)
    }


def _host_inputs_of(runtime: TaskRuntime, each: Pass) -> dict[str, TileTensor]:
    """Return the inputs that the host computes, as bytes."""
    return {
        storage.name: TileTensor(runtime, (max(storage.nbytes, 1),), (-1,), np.uint8, kind="input", data_class="data", name=storage.name)
        for host in each.captured.host
        for storage in host.storages
    }


def num_rows_of(captured: Capture) -> dict[str, int]:
    """Return the number of rows of the smallest table in which each input is looked up, by name of the input."""
    num_rows: dict[str, int] = {}
    for call in captured.calls:
        if call.func is aten.embedding.default and call.args[1].storage.role == "input" and not call.args[1].storage.name.startswith(HOST_INPUT):
            name = call.args[1].storage.name
            num_rows[name] = min(call.args[0].shape[0], num_rows.get(name, call.args[0].shape[0]))
    return num_rows


def check_ids(passes: Sequence[Pass], minibatches: Sequence[Mapping[str, Any]]) -> None:
    """Check that all ids have a row in their table, before a task fails.

    Raises:
        UsageError: an id has none; the message names the input, its range, and the table's.
    """
    for each, minibatch in zip(passes, minibatches, strict=True):
        for name, num_rows in each.num_rows.items():
            low, high = int(minibatch[name].min()), int(minibatch[name].max())
            if low < 0 or high >= num_rows:
                raise UsageError(f"{name} of the batch must be ids from 0 to {num_rows - 1}, got {low} to {high}", "use the tokenizer of this model")


def write_inputs(
    tensors: Sequence[Mapping[str, TileTensor]], minibatches: Sequence[Mapping[str, Any]], host: Sequence[Mapping[str, torch.Tensor]]
) -> None:
    """Write minibatches, and the values that the host has computed for each, to the inputs of a step."""
    for inputs, minibatch, computed in zip(tensors, minibatches, host, strict=True):
        for name, tensor in inputs.items():
            if name in computed:
                values = np.zeros(tensor.shape, np.uint8)
                memory = array_of(computed[name]).reshape(-1).view(np.uint8)
                values[: len(memory)] = memory
                tensor.write(values)
            else:
                tensor.write(array_of(memory_of(minibatch[name])))


def value_of(outputs: Any, kept: Mapping[Storage, Handle], ticket: Ticket) -> Any:
    """Return the outputs of a pass with tensors in place of references."""
    values = tree_map_only(Ref, lambda ref: tensor_of(torch.from_numpy(ticket.read(kept[ref.storage])), ref).clone(), outputs)
    return values.made() if isinstance(values, Fields) else values
