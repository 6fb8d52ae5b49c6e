"""The table of task states drives every transition, and what is not in the table is impossible."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

import scheduler
from scheduler.core import task_states
from scheduler.core.errors import InvalidEvent
from scheduler.core.events import TaskFailed, TaskFinished
from scheduler.core.records import TaskState, W
from scheduler.core.task_states import TASK_TRANSITIONS, TaskEvent, Transition
from scheduler.testing import FakeDriver

TRANSITIONS = [value for value in vars(task_states).values() if isinstance(value, Transition)]


@pytest.mark.parametrize("transition", TRANSITIONS, ids=lambda transition: transition.event)
def test_a_transition_follows_the_table(transition: Transition) -> None:
    """A pair of state and event that is missing raises."""
    for state in get_args(TaskState):
        expected = TASK_TRANSITIONS.get((state, transition.event))
        if expected is not None:
            assert transition[state] == expected
        else:
            with pytest.raises(InvalidEvent, match=f"'{transition.event}' is impossible for a task that is {state}"):
                transition[state]
    assert transition  # its event occurs in the table


def test_every_event_has_one_transition() -> None:
    """Rows of no transition would only be documentation."""
    assert sorted(transition.event for transition in TRANSITIONS) == sorted(get_args(TaskEvent))
    assert {event for _, event in TASK_TRANSITIONS} == set(get_args(TaskEvent))


def test_no_code_sets_the_state_of_a_task_by_hand() -> None:
    """Every assignment looks the next state up under the present one."""
    paths = sorted(Path(str(scheduler.__file__)).parent.rglob("*.py"))
    assignments = [line.strip() for path in paths for line in path.read_text().splitlines() if re.search(r"\btask\.state = ", line)]
    assert len(assignments) > len(TRANSITIONS) / 2
    assert [line for line in assignments if not line.endswith("[task.state]")] == []


@pytest.mark.parametrize("failed", [False, True])
def test_an_impossible_event_is_refused_with_the_story_of_its_task(failed: bool) -> None:
    """A driver that reports the end of a task twice is told which task, and what has happened to it."""
    driver = FakeDriver((4,), [("cpu", 0, 1)])
    run = driver.submit((driver.handle(name="data"), W))
    driver.drain()
    again = TaskFailed(run.task, ZeroDivisionError()) if failed else TaskFinished(run.task)
    with pytest.raises(InvalidEvent) as refusal:
        driver.machine.handle(again)
    message = str(refusal.value)
    assert message.startswith(
        f"during {type(again).__name__} of {run.task!r}, '{'raised' if failed else 'finished'}' is impossible for a task that is done\n"
    )
    assert "story of" in message
    assert "TaskSubmitted" in message
