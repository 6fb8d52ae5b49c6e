"""Captured steps on the data of a program: the same values as a recorded step, and a refusal that names whatever differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from scheduler import CapturingRuntime, DoesNotFit, Handle, RecordingError, Runtime, Step, TaskRuntime
from scheduler.api.binding import Binding
from scheduler.api.placement import kinds_of
from scheduler.core.codelet import Codelet
from scheduler.planning import SUBMISSION, PlannedOrder

NAMES = {"weight": ("persistent", "parameters"), "frozen": ("persistent", "parameters"), "source": ("input", "data")}
"""Name -> kind and class of data from before the step."""


class Program:
    """A step that adds a frozen number and an input to a weight, and has their sum as its result."""

    def __init__(self, runtime: TaskRuntime, kit: Any, number: float = 0.0) -> None:
        self.runtime, self.kit = runtime, kit
        self.handles: dict[str, Handle] = {
            name: kit.filled(runtime, number + at, name, kind=kind, data_class=data_class)
            for at, (name, (kind, data_class)) in enumerate(NAMES.items())
        }

    @property
    def data(self) -> dict[str, Binding]:
        """Data from before the step."""
        return {name: Binding([handle], name == "weight") for name, handle in self.handles.items()}

    def emit(self) -> Handle:
        """Submit the tasks of the step, and return its result."""
        weight, frozen, source = self.handles.values()
        part, result = (self.kit.handle(self.runtime, name) for name in ("part", "result"))
        self.runtime.submit(self.kit.plus, [(frozen, "R"), (source, "R"), (part, "W")])
        self.runtime.submit(self.kit.add, [(weight, "RW"), (part, "R")])
        self.runtime.submit(self.kit.plus, [(weight, "R"), (part, "R"), (result, "W")])
        return result


def captured(kit: Any, **options: Any) -> tuple[PlannedOrder, Program, Handle]:
    """The planned step, its symbolic handles and its result."""
    dry = CapturingRuntime(**options)
    program = Program(dry, kit)
    with dry.record():
        result = program.emit()
    return PlannedOrder(SUBMISSION, dry.plan, {}, num_tasks=len(dry.plan.tasks)), program, result


@pytest.mark.parametrize("sims", [0, 2])
def test_it_replays_as_if_the_program_had_recorded_it(kit: Any, sims: int) -> None:
    """Results, shared data and two replays in flight, on workers and on devices."""
    values = []
    for is_captured in (True, False):
        with Runtime(0 if sims else 2, sim_gpus=sims, ram=1 << 20) as runtime:
            own = Program(runtime, kit, 3.0)
            if is_captured:
                planned, symbolic, result = captured(kit)
                step: Step = runtime.adopt(planned, symbolic.data, own.data)
                assert step.plan is planned.plan
            else:
                with runtime.record() as step:
                    result = own.emit()
            tickets = [step.replay() for _ in range(2)]
            values.append([*(float(ticket.read(result)[0]) for ticket in tickets), kit.value(runtime, own.handles["weight"])])
            with runtime.acquire(own.handles["source"], "W") as view:
                view.fill(100.0)
            values[-1].append(float(step.replay().read(result)[0]))
            assert step.num_tasks == 4
    assert values[0] == values[1] == [21.0, 30.0, 21.0, 229.0]


def test_an_adopted_step_keeps_its_data_alive(kit: Any) -> None:
    """The program may drop its handles."""
    with Runtime(1, ram=1 << 20) as runtime:
        own = Program(runtime, kit, 3.0)
        planned, symbolic, result = captured(kit)
        step = runtime.adopt(planned, symbolic.data, own.data)
        del own
        assert float(step.replay().read(result)[0]) == 21.0


def _without(name: str) -> Callable[[dict[str, Binding], dict[str, Binding], Any], None]:
    def change(symbols: dict[str, Binding], data: dict[str, Binding], other: Any) -> None:
        del symbols[name], data[name]

    return change


def _larger(symbols: dict[str, Binding], data: dict[str, Binding], other: Any) -> None:
    data["weight"] = replace(data["weight"], handles=[other(9, kind="persistent", data_class="parameters")])


def _other_kind(symbols: dict[str, Binding], data: dict[str, Binding], other: Any) -> None:
    data["source"] = Binding([other(8, kind="persistent", data_class="data")])


def _other_class(symbols: dict[str, Binding], data: dict[str, Binding], other: Any) -> None:
    data["frozen"] = Binding([other(8, kind="persistent", data_class="optimizer")])


def _more_handles(symbols: dict[str, Binding], data: dict[str, Binding], other: Any) -> None:
    data["frozen"] = Binding([*data["frozen"].handles, other(8, kind="persistent", data_class="parameters")])


def _twice(symbols: dict[str, Binding], data: dict[str, Binding], other: Any) -> None:
    data["frozen"] = Binding(data["weight"].handles)


def _trained_here_only(symbols: dict[str, Binding], data: dict[str, Binding], other: Any) -> None:
    data["frozen"] = replace(data["frozen"], is_written=True)


def _not_updated(symbols: dict[str, Binding], data: dict[str, Binding], other: Any) -> None:
    for side in (symbols, data):
        side["frozen"] = replace(side["frozen"], is_written=True)


def _updated_though_frozen(symbols: dict[str, Binding], data: dict[str, Binding], other: Any) -> None:
    for side in (symbols, data):
        side["weight"] = replace(side["weight"], is_written=False)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda symbols, data, other: data.pop("frozen"), "only the captured step has frozen"),
        (lambda symbols, data, other: symbols.pop("frozen"), "only the program has frozen"),
        (_without("frozen"), r"handle \d+ 'frozen' \(64 B\), which plus uses, has none"),
        (_without("source"), r"handle \d+ 'source' \(64 B\), which copy input uses, has none"),
        (_larger, "weight must be what was captured, .*64 B.*, got .*72 B"),
        (_other_kind, "source must be what was captured, .*input.*, got .*persistent"),
        (_other_class, "frozen must be what was captured, .*parameters.*, got .*optimizer"),
        (_more_handles, "frozen has 1 handles in a captured step, got 2"),
        (_twice, "two names have the same handle"),
        (_trained_here_only, "frozen is only read in a captured step, and written by the program"),
        (_not_updated, "frozen must be written, and the captured step only reads it"),
        (_updated_though_frozen, "weight must only be read, and the captured step writes it"),
    ],
)
def test_data_that_differs_is_refused_by_name(kit: Any, change: Callable[..., Any], said: str) -> None:
    """Data without a name, with one on one side only, of another size, kind, class or mode, or with two names."""
    planned, symbolic, _ = captured(kit)
    with Runtime(1, ram=1 << 20) as runtime:
        own, symbols = Program(runtime, kit), symbolic.data
        data = own.data
        change(symbols, data, lambda count, **options: kit.handle(runtime, "other", count, **options))
        with pytest.raises(RecordingError, match=said):
            runtime.adopt(planned, symbols, data)


def test_data_that_the_step_does_not_use_may_have_a_name(kit: Any) -> None:
    """Such as positions that no sequence reaches; it stays where it is."""
    planned, symbolic, result = captured(kit)
    with Runtime(1, ram=1 << 20) as runtime:
        own = Program(runtime, kit, 3.0)
        unused = {"unused": Binding([kit.filled(runtime, 1, "unused", kind="persistent")], is_written=True)}
        symbols = {"unused": Binding([kit.handle(symbolic.runtime, "unused", kind="persistent")], is_written=True)}
        step = runtime.adopt(planned, {**symbolic.data, **symbols}, {**own.data, **unused})
        assert float(step.replay().read(result)[0]) == 21.0


def test_other_workers_are_refused(kit: Any) -> None:
    """A step for CPU workers beside devices runs on no machine without them."""
    planned, symbolic, _ = captured(kit, aside=True)
    with Runtime(1, ram=1 << 20) as runtime, pytest.raises(RecordingError, match="plus was captured for workers of kinds sim, got cpu, sim; capture"):
        runtime.adopt(planned, symbolic.data, Program(runtime, kit).data)


def test_a_task_that_fits_no_memory_is_refused(kit: Any) -> None:
    """At once, with its name and sizes."""
    planned, symbolic, _ = captured(kit)
    with Runtime(0, sim_gpus=1, ram=1 << 20, gpu_memory=8192) as runtime, pytest.raises(DoesNotFit, match="plus"):
        runtime.adopt(planned, symbolic.data, Program(runtime, kit).data)


def test_steps_are_not_adopted_while_one_is_recorded(kit: Any) -> None:
    """As recordings do not nest."""
    planned, symbolic, _ = captured(kit)
    with Runtime(1, ram=1 << 20) as runtime:
        own = Program(runtime, kit)
        with runtime.record(), pytest.raises(RecordingError, match="must not nest"):
            runtime.adopt(planned, symbolic.data, own.data)


def test_kinds_of_workers_are_those_of_the_machine() -> None:
    """With GPUs, codelets with a CUDA kernel run nowhere else; beside devices, CPU workers run what devices may not."""
    both, plain, aside = Codelet("both", cpu=print, cuda=print), Codelet("plain", cpu=print), Codelet("aside", cpu=print, cpu_only=True)
    assert [kinds_of(each, None, has_gpus=False) for each in (both, plain, aside)] == [("cpu", "sim", "cuda"), ("cpu", "sim"), ("cpu",)]
    assert [kinds_of(each, None, has_gpus=True) for each in (both, plain, aside)] == [("cuda",), ("cpu", "sim"), ("cpu",)]
    assert [kinds_of(each, "cuda", has_gpus=True) for each in (both, plain, aside)] == [("cuda",), ("cpu",), ("cpu",)]
    assert [kinds_of(each, "sim", has_gpus=False) for each in (both, plain, aside)] == [("sim",), ("sim",), ("cpu",)]
