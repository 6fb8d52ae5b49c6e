"""Conditional tasks: a task whose flag is 0 ends without its data, in eager programs and in recorded steps, on every kind of machine."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.late_gpu import COUNT, FILL, Numbers, Place, both, gpus

from nntask.telemetry.tracing import facts_of, steps_of_tasks
from scheduler import Codelet, Condition, InlineRuntime, Runtime, TaskError, TaskRuntime
from scheduler.execution.trace import SKIPPED, Trace
from scheduler.storage.device import DeviceMemory

NUM_EXPERTS = 12
MIB = 1 << 20
WEIGHT = Numbers()


class Flags:
    """A view of one byte for each expert, wherever it is."""

    def __call__(self, memory: Any, offset: int) -> Any:
        if isinstance(memory, DeviceMemory):
            return FlagsPlace(memory.address + offset)
        return np.ndarray((NUM_EXPERTS,), np.uint8, buffer=memory, offset=offset)


class FlagsPlace(Place):
    """Flags in a GPU's memory."""

    def __init__(self, address: int) -> None:
        super().__init__(address, 0)
        self.nbytes = NUM_EXPERTS

    def numbers(self) -> np.ndarray:
        return np.ndarray((NUM_EXPERTS,), np.uint8, buffer=(ctypes.c_char * NUM_EXPERTS).from_address(self.address))


def choose(token: np.ndarray, flags: np.ndarray) -> None:
    """Choose the experts whose bits are set in the token's number."""
    flags[:] = [int(token[0]) >> expert & 1 for expert in range(NUM_EXPERTS)]


def apply(flags: np.ndarray, weight: np.ndarray, out: np.ndarray, *, expert: int) -> None:
    """Add an expert's weight to the result; a kernel that runs without being chosen is an error."""
    assert flags[expert], f"expert {expert} runs and was not chosen"
    out += (expert + 1) * weight


def advance(token: np.ndarray) -> None:
    """Choose other experts for the next step."""
    token[:] = (int(token[0]) * 29 + 17) % (1 << NUM_EXPERTS)


CHOOSE, APPLY, ADVANCE = both("choose", choose), both("apply", apply), both("advance", advance)
ADD = both("add", lambda total, other: np.add(total, other, out=total))
COPY = both("copy", lambda token, copy: np.copyto(copy, token))
DECODE = both("decode", lambda weight, decoded, flags: np.copyto(decoded, weight))


class Mixture:
    """A program with a token, the weights of experts, and a step that adds those of the chosen experts to a result."""

    def __init__(self, runtime: TaskRuntime) -> None:
        self.runtime = runtime
        self.flags: Any = None
        self.token = self.handle("token")
        self.out = self.handle("out")
        self.weights = [self.handle(f"weight {expert}") for expert in range(NUM_EXPERTS)]
        for number, handle in enumerate([self.token, self.out, *self.weights]):
            runtime.submit(FILL, [(handle, "W")], {"value": 1.0 + number})

    def handle(self, name: str) -> Any:
        return self.runtime.handle(8 * COUNT, WEIGHT, name=name, kind="persistent")

    def step(self) -> None:
        flags = self.runtime.handle(NUM_EXPERTS, Flags(), name="flags")
        self.runtime.submit(CHOOSE, [(self.token, "R"), (flags, "W")], condition=Condition(flags=1))
        for expert, weight in enumerate(self.weights):
            accesses = [(flags, "R"), (weight, "R"), (self.out, "RW")]
            self.runtime.submit(APPLY, accesses, {"expert": expert}, condition=Condition(guard=0, number=expert))
        self.runtime.submit(ADVANCE, [(self.token, "RW")])

    def result(self) -> np.ndarray:
        with self.runtime.acquire(self.out, "R") as view:
            return view.copy()


def run(mixture: Mixture, num_steps: int, *, is_recorded: bool) -> np.ndarray:
    """Run steps, and return the sum of the weights that they chose."""
    if not is_recorded:
        for _ in range(num_steps):
            mixture.step()
        return mixture.result()
    assert isinstance(mixture.runtime, Runtime)
    with mixture.runtime.record() as step:
        mixture.step()
    for _ in range(num_steps):
        step.replay()
    return mixture.result()


def chosen(num_steps: int) -> list[list[int]]:
    """The experts of each step."""
    token, steps = np.ones(1), []
    for _ in range(num_steps):
        steps.append([expert for expert in range(NUM_EXPERTS) if int(token[0]) >> expert & 1])
        advance(token)
    return steps


MACHINES = {
    "one worker": {"cpu_workers": 1},
    "two workers": {"cpu_workers": 2},
    "a little memory and a disk": {"cpu_workers": 2, "ram": 6 * 4096, "disk": True},
    "two simulated devices": {"cpu_workers": 1, "sim_gpus": 2, "gpu_memory": 5 * 4096},
    "two GPUs that run late": {"cpu_workers": 1, "gpus": 2, "gpu_memory": 5 * 4096},
}


@pytest.mark.parametrize("is_recorded", [False, True], ids=["eager", "recorded"])
@pytest.mark.parametrize("machine", MACHINES)
def test_only_chosen_experts_run(machine: str, is_recorded: bool, tmp_path: Path) -> None:
    """The result is that of the inline runtime, bit by bit, and as many tasks are skipped as experts were not chosen."""
    expected = run(Mixture(InlineRuntime()), 9, is_recorded=False)
    options: dict[str, Any] = {"ram": MIB, **MACHINES[machine]}
    if "disk" in options:
        options["disk"] = tmp_path
    if "gpus" in options:
        options["gpus"] = gpus(options["gpus"], 3)
    with Runtime(**options) as runtime:
        result = run(Mixture(runtime), 9, is_recorded=is_recorded)
        runtime.wait()
        stats, num_chosen = runtime.stats(), sum(map(len, chosen(9)))
        assert stats["skipped_tasks"] == 9 * NUM_EXPERTS - num_chosen
        is_counted = is_recorded and len(stats["budget_bytes"]) > 1
        assert stats["conditional_hits"] + stats["conditional_misses"] == num_chosen * is_counted
        runtime._executor.validate()
    assert result.tobytes() == expected.tobytes()


def test_data_of_skipped_tasks_stays_on_the_disk(tmp_path: Path) -> None:
    """With memory for three weights, a replay reads at most those of its own chosen experts, and none of the others."""
    with Runtime(1, ram=7 * 4096, disk=tmp_path) as runtime:
        mixture = Mixture(runtime)
        with runtime.record() as step:
            mixture.step()
        step.replay()
        runtime.wait()
        for experts in chosen(9)[1:]:
            before = runtime.stats()
            step.replay()
            runtime.wait()
            after = runtime.stats()
            assert after["moved_bytes"].get("disk->ram", 0) - before["moved_bytes"].get("disk->ram", 0) <= (len(experts) + 2) * 4096
            num_hits, num_misses = (after[name] - before[name] for name in ("conditional_hits", "conditional_misses"))
            assert num_hits + num_misses == len(experts)
            assert num_misses >= len(experts) - 6  # the memory has seven tiles, and one is the result


def test_experts_of_a_group_are_skipped_by_their_flags() -> None:
    """A step that fits the memory runs all experts of a result as one task, which computes those that were chosen."""
    expected = run(Mixture(InlineRuntime()), 9, is_recorded=False)
    with Runtime(2, ram=MIB) as runtime:
        mixture = Mixture(runtime)
        with runtime.record(groups=True) as step:
            mixture.step()
        for _ in range(9):
            step.replay()
        assert mixture.result().tobytes() == expected.tobytes()
        assert len(step.plan.tasks) == 3
        assert runtime.stats()["skipped_tasks"] == sum(NUM_EXPERTS - len(experts) for experts in chosen(9))


def test_a_trace_has_the_skipped_tasks(tmp_path: Path) -> None:
    """As instants, so that the tasks of every replay are all there, and viewers count no time for them."""
    trace = Trace()
    with Runtime(2, ram=MIB, trace=trace) as runtime:
        mixture = Mixture(runtime)
        with runtime.record() as step:
            mixture.step()
        trace.active = False
        for number in range(9):
            runtime.wait()
            trace.active = number >= 4
            step.replay()
        runtime.wait()
        assert step.plan is not None
        ran = list(trace.tasks())
        skips = [task for task in ran if task[5] == SKIPPED]
        assert len(skips) == sum(NUM_EXPERTS - len(experts) for experts in chosen(9)[4:])
        placed = steps_of_tasks(ran, step.first_tasks, len(step.plan.tasks), 1, 5)
        assert sorted(at for at in placed if at is not None) == [(number, position) for number in range(5, 10) for position in range(NUM_EXPERTS + 2)]
        assert {at[1] - 1 for at, task in zip(placed, ran, strict=True) if task in skips and at is not None and at[0] == 5}.isdisjoint(chosen(9)[4])
        facts = facts_of(ran, placed, step.plan, runtime)
        assert facts["steps"] == [5, 6, 7, 8, 9]
        trace.write(tmp_path / "t.json", {0: "cpu:0", 1: "cpu:1"}, runtime.node_names)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert [event["name"] for event in events if event["ph"] == "i"] == ["apply skipped"] * len(skips)
    assert sum(event["name"] == "apply" for event in events if event["ph"] == "X") == sum(map(len, chosen(9)[4:]))


def test_flags_of_a_group_decide_about_other_tasks() -> None:
    """Flags are written by the last of several tasks that run as one, and are read by tasks that run by themselves."""
    with Runtime(2, ram=MIB) as runtime:
        mixture = Mixture(runtime)
        outputs = [mixture.handle(f"out {expert}") for expert in range(NUM_EXPERTS)]
        for handle in outputs:
            runtime.submit(FILL, [(handle, "W")], {"value": 0.0})
        with runtime.record(groups=True) as step:
            copy, token = mixture.handle("copy"), mixture.handle("copy of the copy")
            flags = runtime.handle(NUM_EXPERTS, Flags(), name="flags")
            runtime.submit(COPY, [(mixture.token, "R"), (copy, "W")])
            runtime.submit(COPY, [(copy, "R"), (token, "W")])
            runtime.submit(CHOOSE, [(token, "R"), (flags, "W")], condition=Condition(flags=1))
            for expert, (weight, out) in enumerate(zip(mixture.weights, outputs, strict=True)):
                accesses = [(flags, "R"), (weight, "R"), (out, "RW")]
                runtime.submit(APPLY, accesses, {"expert": expert}, condition=Condition(guard=0, number=expert))
            runtime.submit(ADVANCE, [(mixture.token, "RW")])
            del copy, token, flags
        assert "choose" not in {task.name for task in step.plan.tasks}
        for _ in range(9):
            step.replay()
        runtime.wait()
        assert runtime.stats()["skipped_tasks"] == sum(NUM_EXPERTS - len(experts) for experts in chosen(9))
        for expert, handle in enumerate(outputs):
            with runtime.acquire(handle, "R") as view:
                assert view[0] == (expert + 1) * (expert + 3) * sum(expert in experts for experts in chosen(9))


def test_groups_do_not_wait_for_data_that_may_not_come() -> None:
    """Of tasks that run as one, none reads data that a conditional task outside writes anew, such as decoded weights: a group always runs."""
    with Runtime(1, ram=MIB) as runtime:
        mixture = Mixture(runtime)
        total, weight = mixture.handle("total"), mixture.weights[1]
        with runtime.record(groups=True) as step:
            flags, decoded = runtime.handle(NUM_EXPERTS, Flags(), name="flags"), runtime.handle(8 * COUNT, WEIGHT, name="decoded")
            runtime.submit(CHOOSE, [(mixture.token, "R"), (flags, "W")], condition=Condition(flags=1))
            runtime.submit(DECODE, [(weight, "R"), (decoded, "W"), (flags, "R")], condition=Condition(guard=2, number=1))
            runtime.submit(APPLY, [(flags, "R"), (decoded, "R"), (mixture.out, "RW")], {"expert": 1}, condition=Condition(guard=0, number=1))
            runtime.submit(COPY, [(mixture.out, "R"), (total, "W")])
            runtime.submit(ADVANCE, [(mixture.token, "RW")])
            del flags, decoded
        for _ in range(9):
            step.replay()
        with runtime.acquire(total, "R") as view:
            assert view[0] == 2 + 2 * 4 * sum(1 in experts for experts in chosen(9))


def test_data_that_a_skipped_task_was_to_write_is_lost() -> None:
    """W gives up the old value, so a reader without the same condition is an error that names the task, whatever the schedule."""
    with Runtime(1, ram=MIB) as runtime:
        mixture = Mixture(runtime)
        flags = runtime.handle(NUM_EXPERTS, Flags(), name="flags")
        runtime.submit(CHOOSE, [(mixture.token, "R"), (flags, "W")], condition=Condition(flags=1))
        fresh = mixture.handle("fresh")
        runtime.submit(FILL, [(fresh, "W"), (flags, "R")], {"value": 0.0}, condition=Condition(guard=1, number=5))
        runtime.submit(APPLY, [(flags, "R"), (fresh, "R"), (mixture.out, "RW")], {"expert": 5}, condition=Condition(guard=0, number=5))
        runtime.wait()
        runtime.submit(APPLY, [(flags, "R"), (fresh, "R"), (mixture.out, "RW")], {"expert": 0})
        with pytest.raises(TaskError, match="fill, which writes it, was skipped"):
            runtime.wait()


def contribute(flags: np.ndarray, weight: np.ndarray, total: np.ndarray, *, expert: int, accumulate: bool) -> None:
    """Add an expert's weight to a sum, or begin the sum with it or with zeros."""
    assert flags[expert] or not accumulate, f"expert {expert} adds to a sum and was not chosen"
    total[:] = (total if accumulate else 0) + flags[expert] * weight


CONTRIBUTE = both("contribute", contribute)


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("machine", MACHINES)
def test_only_the_first_contribution_to_a_sum_ignores_its_flag(machine: str, lanes: int, tmp_path: Path) -> None:
    """A sum begins with zeros if its first contribution was not chosen; later ones are skipped, in each lane."""
    options: dict[str, Any] = {"ram": MIB, **MACHINES[machine], "lanes": lanes}
    if "disk" in options:
        options["disk"] = tmp_path
    if "gpus" in options:
        options["gpus"] = gpus(options["gpus"], 3)
    with Runtime(**options) as runtime:
        mixture = Mixture(runtime)
        totals = [runtime.handle(8 * COUNT, WEIGHT, name=f"total {expert}", kind="persistent", combine=ADD) for expert in range(NUM_EXPERTS)]
        with runtime.record() as step:
            for _ in range(4):
                flags = runtime.handle(NUM_EXPERTS, Flags(), name="flags")
                runtime.submit(CHOOSE, [(mixture.token, "R"), (flags, "W")], condition=Condition(flags=1))
                for expert, (weight, total) in enumerate(zip(mixture.weights, totals, strict=True)):
                    accesses = [(flags, "R"), (weight, "R"), (total, "REDUX")]
                    runtime.submit(CONTRIBUTE, accesses, {"expert": expert}, condition=Condition(guard=0, number=expert))
                runtime.submit(ADVANCE, [(mixture.token, "RW")])
                del flags
        assert step.plan is not None
        assert sum(task.condition is None for task in step.plan.tasks if task.name == "contribute") == lanes * NUM_EXPERTS
        for number in range(5):
            step.replay()
            experts = chosen(4 * number + 4)[-4:]
            for expert, total in enumerate(totals):
                with runtime.acquire(total, "R") as view:
                    assert (view == (expert + 3) * sum(expert in each for each in experts)).all()
        assert runtime.stats()["skipped_tasks"] == sum(NUM_EXPERTS - len(experts) for number, experts in enumerate(chosen(20)) if number % 4 >= lanes)


def test_bounds_of_a_trace_count_skips() -> None:
    """If each of ten tasks runs in three of five steps, their mean durations give the time that passes; medians would give that of all ten."""
    trace = Trace()

    def rotate(token: np.ndarray, flags: np.ndarray) -> None:
        token += 1
        flags[:] = [(number + 6 * int(token[0])) % 10 < 6 for number in range(NUM_EXPERTS)]

    with Runtime(1, ram=MIB, trace=trace) as runtime:
        mixture = Mixture(runtime)
        with runtime.record() as step:
            flags = runtime.handle(NUM_EXPERTS, Flags(), name="flags")
            runtime.submit(both("rotate", rotate), [(mixture.token, "RW"), (flags, "W")], condition=Condition(flags=1))
            for number in range(10):
                accesses = [(flags, "R"), (mixture.weights[number], "R"), (mixture.out, "RW")]
                runtime.submit(APPLY, accesses, {"expert": number}, condition=Condition(guard=0, number=number, share=0.6))
            del flags
        for _ in range(5):
            step.replay()
        runtime.wait()
        assert step.plan is not None
        ran, now = [], 0
        for worker, name, task, _, _, node, accessed in trace.tasks():  # as if each that ran had taken a hundredth of a second
            start, now = now, now + (0 if node == SKIPPED else 10_000_000)
            ran.append((worker, name, task, start, now, node, accessed))
        facts = facts_of(ran, steps_of_tasks(ran, step.first_tasks, len(step.plan.tasks), 1, 1), step.plan, runtime)
    assert facts["steps"] == [1, 2, 3, 4, 5]
    assert facts["seconds_per_step"] == pytest.approx(0.07)
    assert facts["bounds_seconds"] == pytest.approx({"area": 0.07, "critical_path": 0.07, "link": 0.0})


def test_a_skip_after_an_acquisition_has_a_track() -> None:
    """The program has none, so the first worker's is taken."""
    trace = Trace()
    with Runtime(1, ram=MIB, trace=trace) as runtime:
        mixture = Mixture(runtime)
        flags = runtime.handle(NUM_EXPERTS, Flags(), name="flags")
        runtime.submit(CHOOSE, [(mixture.token, "R"), (flags, "W")], condition=Condition(flags=1))
        runtime.wait()
        with runtime.acquire(mixture.out, "RW"):
            accesses = [(flags, "R"), (mixture.weights[5], "R"), (mixture.out, "RW")]
            runtime.submit(APPLY, accesses, {"expert": 5}, condition=Condition(guard=0, number=5))
        runtime.wait()
    assert [(worker, name) for worker, name, *_, node, _ in trace.tasks() if node == SKIPPED] == [(0, "apply")]


@pytest.mark.parametrize(
    ("accesses", "condition", "message"),
    [
        ([("flags", "W"), ("out", "RW")], Condition(guard=0), "the flag that it reads, must exist with mode R, got W"),
        ([("flags", "R")], Condition(guard=1), "must exist with mode R, got none"),
        ([("flags", "R")], Condition(flags=0), "the flags that it writes, must exist with mode W or RW, got R"),
    ],
)
def test_conditions_that_do_not_match_the_accesses_are_refused(accesses: list, condition: Condition, message: str) -> None:
    """Each gets one sentence, before anything is submitted."""
    for runtime in (InlineRuntime(), Runtime(1, ram=MIB)):
        data = {"flags": runtime.handle(NUM_EXPERTS, Flags()), "out": runtime.handle(8 * COUNT, WEIGHT)}
        with pytest.raises(ValueError, match=message):
            runtime.submit(Codelet("any", cpu=lambda *views: None), [(data[name], mode) for name, mode in accesses], condition=condition)
        if isinstance(runtime, Runtime):
            runtime.close()


def mixtures() -> Iterator[Mixture]:
    """A mixture whose flags are written, on both runtimes."""
    for runtime in (InlineRuntime(), Runtime(1, ram=MIB)):
        mixture = Mixture(runtime)
        mixture.flags = runtime.handle(NUM_EXPERTS, Flags(), name="flags")
        runtime.submit(CHOOSE, [(mixture.token, "R"), (mixture.flags, "W")], condition=Condition(flags=1))
        yield mixture
        if isinstance(runtime, Runtime):
            runtime.close()


@pytest.mark.parametrize("number", [-1, NUM_EXPERTS])
def test_a_number_without_a_flag_is_refused(number: int) -> None:
    """Before the task is submitted."""
    for mixture in mixtures():
        with pytest.raises(ValueError, match=f"a flag of {NUM_EXPERTS}, numbered from 0, got number {number}"):
            mixture.runtime.submit(
                APPLY, [(mixture.flags, "R"), (mixture.weights[0], "R"), (mixture.out, "RW")], condition=Condition(guard=0, number=number)
            )


def test_flags_have_one_kind_of_writer() -> None:
    """Other tasks and the program may not write them, and data that nobody wrote flags to is no guard."""
    for mixture in mixtures():
        with pytest.raises(ValueError, match=r"'flags'.* has flags of conditional tasks"):
            mixture.runtime.submit(FILL, [(mixture.flags, "W")], {"value": 1})
        with pytest.raises(ValueError, match=r"'flags'.* has flags of conditional tasks"), mixture.runtime.acquire(mixture.flags, "W"):
            pass
        other = mixture.runtime.handle(NUM_EXPERTS, Flags(), name="other")
        with pytest.raises(ValueError, match="no task has written flags"):
            mixture.runtime.submit(APPLY, [(other, "R"), (mixture.out, "RW")], condition=Condition(guard=0))


def test_a_view_that_fails_fails_its_task_alone() -> None:
    """An error in a program's view is that of the task, and the runtime goes on."""

    def broken(memory: Any, offset: int) -> Any:
        raise ZeroDivisionError("planted")

    with Runtime(1, ram=MIB) as runtime:
        mixture = Mixture(runtime)
        runtime.submit(FILL, [(runtime.handle(8, broken, name="broken"), "W")], {"value": 1.0})
        with pytest.raises(TaskError, match="planted"):
            runtime.wait()
        assert mixture.result()[0] == 2.0
