"""Each invariant of the machine, broken by hand: the check between events names it. And events that no driver may bring."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scheduler.core.errors import InvalidEvent
from scheduler.core.events import CopyFinished, SourceAttached, StepStarted, TaskSubmitted, WorkerJoined
from scheduler.core.memory import coherence
from scheduler.core.memory.compaction import Compaction
from scheduler.core.memory.extents import PAGE
from scheduler.core.records import RAM, RW, HandleRecord, NodeId, R, Replica, Task, TaskId, TaskSpec, W, Worker
from scheduler.testing import FakeDriver

SIM, DISK = NodeId(1), NodeId(2)


class Scene:
    """A CPU task that runs on `read`, a copy of `moved` to a device, and `idle` data in host memory; all were written there."""

    def __init__(self) -> None:
        self.driver = FakeDriver((8, 4, 20), [("cpu", RAM, 1), ("sim", SIM, 1)], storage=True)
        self.machine = self.driver.machine
        self.replicas, self.dispatch = self.machine._replicas, self.machine._dispatch
        self.ram = self.replicas.nodes[RAM]
        self.read, self.moved, self.idle = (self._written(name) for name in ("read", "moved", "idle"))
        self.task = self.driver.submit((self.read, R), kinds=("cpu",)).task
        self.driver.submit((self.moved, R), kinds=("sim",))
        self.worker = self.machine.workers[0]
        self.machine.validate()

    def _written(self, name: str) -> HandleRecord:
        handle = self.driver.handle(1, name)
        self.driver.submit((handle, W), kinds=("host",))
        self.driver.drain()
        return handle

    @property
    def replica(self) -> Replica:
        """The idle data in host memory."""
        return self.idle.replicas[RAM]


def resize(scene: Scene, nbytes: int) -> None:
    """Change the size of the idle data, and the end that the node knows."""
    end = scene.replica.offset + scene.idle.spec.size
    scene.ram.ends[end + nbytes] = scene.ram.ends.pop(end)
    scene.idle.spec.size += nbytes


def relocate(scene: Scene) -> None:
    """Say that the idle data is on the device, where no node lists it."""
    scene.idle.replicas[SIM] = scene.idle.replicas.pop(RAM)
    scene.idle.replicas[SIM].node = SIM


def pretend_staged(scene: Scene) -> None:
    """Forget that the CPU worker runs its task."""
    scene.worker.running, scene.task.state = None, "staged"


def admit_before_its_turn(scene: Scene) -> None:
    """Admit a task of kind host that waits for its turn."""
    scene.dispatch.turns.append(scene.task)
    scene.dispatch.host.assigned.append(scene.task)
    scene.read.replicas[RAM].pins += 1


def forget_pending_work(scene: Scene) -> None:
    """Count less work of a replay than its pending tasks have."""
    scene.driver.record([[(scene.moved, RW)], [(scene.moved, RW)]], {}).replay()
    (replay,) = scene.replicas.foresight.replays
    replay.pending_seconds -= 1.0


def attribute(path: Callable[[Scene], object], name: str, value: object) -> Callable[[Scene], None]:
    """A function that sets an attribute, or adds to it if `value` is a tuple of a number."""

    def change(scene: Scene) -> None:
        owner = path(scene)
        setattr(owner, name, getattr(owner, name) + value[0] if isinstance(value, tuple) else value)

    return change


BROKEN: list[tuple[str, Callable[[Scene], object]]] = [
    ("extents of node node 0 overlap at byte", lambda scene: resize(scene, 8)),
    ("extents of node node 0 leave a gap at byte", lambda scene: resize(scene, -8)),
    ("node node 0 uses 12288 B of a budget of 4096 B", attribute(lambda scene: scene.ram, "budget", PAGE)),
    ("is modified on one node while others hold it too", attribute(lambda scene: scene.idle.replicas[DISK], "state", "shared")),
    ("was unpinned more often than pinned", attribute(lambda scene: scene.idle.replicas[DISK], "pins", -1)),
    ("on node 0 has 1 pins, but 0 tasks and copies use it", attribute(lambda scene: scene.replica, "pins", 1)),
    ("on node 0 counts 0 copies out of it", attribute(lambda scene: scene.moved.replicas[RAM], "outgoing", 0)),
    ("on node 0 is an orphan", lambda scene: scene.idle.replicas.pop(RAM)),
    ("on node 0 has no backing replica to go to", attribute(lambda scene: scene.idle.replicas[DISK], "is_backing", False)),
    ("on node 0 is a backing replica that is not on the last tier", attribute(lambda scene: scene.replica, "is_backing", True)),
    ("on node 0: lost track of a copy", attribute(lambda scene: scene.replica, "arriving", True)),
    ("on node 0 is reserved although nothing uses it", attribute(lambda scene: scene.replica, "state", "reserved")),
    ("on node 0 outlived its handle", attribute(lambda scene: scene.idle, "released", True)),
    ("is listed on node 0 but lives on node 1", relocate),
    ("on node 0 is in use but was dropped", lambda scene: scene.ram.vacate(scene.read.replicas[RAM])),
    ("B created ahead, but", attribute(lambda scene: scene.replicas.reservations, "lasting", (PAGE,))),
    ("1 tasks were given to the policy, which holds 0", attribute(lambda scene: scene.dispatch, "num_ready", 1)),
    ("1 tasks were blocked, the lines hold 0", attribute(lambda scene: scene.dispatch, "num_blocked", 1)),
    ("worker 0 runs .*, which is staged", attribute(lambda scene: scene.task, "state", "staged")),
    ("worker 0 idles although a task is staged", pretend_staged),
    ("worker 0 holds 1 tasks, more than 0", attribute(lambda scene: scene.worker, "depth", 0)),
    (r"tasks of 0.0 s are pending, . of -1\.0 s were counted", forget_pending_work),
    ("tasks wait for their turns, and some of them are admitted", admit_before_its_turn),
    ("workers have 0 free slots, 1 were counted", attribute(lambda scene: scene.dispatch, "num_free", (1,))),
    ("1 tasks run, 2 were counted", attribute(lambda scene: scene.dispatch, "num_active", (1,))),
]


@pytest.mark.parametrize(("words", "spoil"), BROKEN, ids=[words for words, _ in BROKEN])
def test_a_broken_invariant_is_named(words: str, spoil: Callable[[Scene], object]) -> None:
    """The message has the object and both values."""
    scene = Scene()
    spoil(scene)
    with pytest.raises(InvalidEvent, match=words):
        scene.machine.validate()


def start_twice(scene: Scene) -> None:
    """Start a replay that is in progress."""
    step = scene.driver.record([[(scene.idle, RW)], [(scene.idle, RW)]], {})
    step.replay()
    scene.machine.handle(StepStarted(scene.replicas.foresight.replays[0]))


def overwrite_in_transit(scene: Scene) -> None:
    """Start a task that writes data whose backing replica is in use."""
    scene.idle.replicas[DISK].pins = 1
    accesses = ((scene.idle, RW),)
    task = Task(TaskId(9), TaskSpec(None, "writer", ("cpu",), accesses, {}), accesses, replicas=[scene.replica])
    scene.replicas.invalidate_others(task, [])


EVENTS: list[tuple[str, Callable[[Scene], object]]] = [
    ("worker 0 joined twice", lambda scene: scene.machine.handle(WorkerJoined(Worker(scene.worker.id, "cpu", RAM, 1)))),
    ("was submitted while running", lambda scene: scene.machine.handle(TaskSubmitted(scene.task))),
    ("a replay was started while replay 0 still has 2 tasks", start_twice),
    ("was to be read from a file although tasks use it", lambda scene: scene.machine.handle(SourceAttached(scene.read, object(), 0))),
    (
        "from node 0 to node 2 finished but was not in progress",
        lambda scene: scene.machine.handle(CopyFinished(scene.replica, scene.idle.replicas[DISK])),
    ),
    ("would be overwritten while its backing replica is in use", overwrite_in_transit),
    ("'copied from' is impossible while reserved", lambda scene: coherence.step(scene.idle.replicas[DISK], "copied from")),
    ("on node 0 would be moved while pinned", lambda scene: Compaction(scene.replicas)._compact(RAM, [])),
    ("on node 0 would be freed while pinned", lambda scene: scene.replicas.drop(scene.read.replicas[RAM], [])),
]


@pytest.mark.parametrize(("words", "bring"), EVENTS, ids=[words for words, _ in EVENTS])
def test_an_impossible_event_is_refused(words: str, bring: Callable[[Scene], object]) -> None:
    """A driver that brings one has a bug; the message has the latest events of the task or handle."""
    scene = Scene()
    with pytest.raises(InvalidEvent, match=words):
        bring(scene)
