"""Launches of a fused GPU task: which of its members one call starts.

Members of one codelet that are independent of each other start together (`Codelet.cuda_many`), and so do members that read each other's results where
one kernel computes all of them (`KernelChain`). A launch is moved only past launches that use none of the data that it writes, and write none of
the data that it uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from ..core.codelet import Codelet, KernelChain
from ..core.records import RW, SCRATCH, HandleRecord, W
from ..core.step_plan import RecordedTask, StepPlan
from .fused_tasks import PlannedLaunch

LOOK_BACK: Final = 8
"""Largest number of launches between two tasks that are launched together, because the data of both is then allocated at the same time."""


@dataclass(eq=False, slots=True)
class _Launch:
    """Tasks that are launched together.

    Attributes:
        codelet: codelet of the first one.
        chain: chain of which they are the first tasks; None for tasks of one codelet.
        planned: positions of all tasks of the chain.
        positions: positions of the tasks in the step.
        uses: all data that they access.
        writes: data that they write, scratch included.
        has_moved: whether it has moved to the end for a task of its codelet. It does once, because its data stays allocated until it runs.
    """

    codelet: Codelet
    chain: KernelChain | None = None
    planned: Sequence[int] = ()
    positions: list[int] = field(default_factory=list)
    uses: set[HandleRecord] = field(default_factory=set)
    writes: set[HandleRecord] = field(default_factory=set)
    has_moved: bool = False

    def add(self, position: int, task: RecordedTask) -> _Launch:
        """Add a task, and return the launch."""
        self.positions.append(position)
        self.uses.update(handle for handle, _ in task.accesses)
        self.writes.update(handle for handle, mode in task.accesses if mode in (W, RW, SCRATCH))
        return self

    def depends_on(self, other: _Launch) -> bool:
        """Return whether the order of two launches matters."""
        return bool(self.uses & other.writes or self.writes & other.uses)

    def depends_on_any(self, others: Iterable[_Launch]) -> bool:
        """Return whether the order of this launch and one of the others matters."""
        return any(self.depends_on(other) for other in others)


def launches(plan: StepPlan, first: int, end: int) -> list[PlannedLaunch]:
    """Divide tasks [first, end) of a step into launches.

    A task joins one of the last `LOOK_BACK` launches if that has the same codelet, the task is independent of it, and the task or that launch is
    independent of all later ones.
    """
    result: list[_Launch] = []
    chains: dict[int, _Launch] = {}  # position of a task of a chain -> its launch, which has the tasks before it
    for position in range(first, end):
        task = plan.tasks[position]
        assert isinstance(task.codelet, Codelet)
        own = _Launch(task.codelet).add(position, task)
        if position in chains:
            if not _extend(result, chains[position], own):
                result.append(own)
        elif chain := next(_chains_at(plan, position, end, chains), None):
            own.chain, own.planned = chain
            result.append(own)
            chains.update(dict.fromkeys(own.planned, own))
        elif joined := _alike(result, own):
            if own.depends_on_any(result[result.index(joined) + 1 :]):
                result.remove(joined)
                result.append(joined)
                joined.has_moved = True
            joined.add(position, task)
        else:
            result.append(own)
    return [start for launch in result for start in _starts(launch)]


def _starts(launch: _Launch) -> Iterator[PlannedLaunch]:
    """Yield a launch, or the tasks of an incomplete chain one by one."""
    if launch.chain is None:
        yield PlannedLaunch(launch.positions, launch.codelet.cuda_many if len(launch.positions) > 1 else None)
    elif launch.positions == launch.planned:
        yield PlannedLaunch(launch.positions, launch.chain.run)
    else:
        yield from (PlannedLaunch([position]) for position in launch.positions)


def _alike(earlier: Sequence[_Launch], own: _Launch) -> _Launch | None:
    """Return the launch that a task joins, or that moves to the end to be joined: of the same codelet, and independent of the task."""
    if own.codelet.cuda_many is not None:
        for number, launch in enumerate(reversed(earlier[-LOOK_BACK:])):
            if launch.codelet is own.codelet and launch.chain is None and not own.depends_on(launch):
                later = earlier[len(earlier) - number :]
                may_move = not launch.has_moved and not launch.depends_on_any(later)
                return launch if may_move or not own.depends_on_any(later) else None
    return None


def _extend(result: list[_Launch], launch: _Launch, own: _Launch) -> bool:
    """Add the next task of a chain to its launch, which moves to the end if the task depends on later launches; return whether that is possible."""
    later = result[result.index(launch) + 1 :]
    is_next = own.positions == [launch.planned[len(launch.positions)]] and len(later) <= LOOK_BACK
    if not is_next or own.depends_on_any(later):
        if not is_next or launch.depends_on_any(later):
            return False
        result.remove(launch)
        result.append(launch)
    launch.positions += own.positions
    launch.uses |= own.uses
    launch.writes |= own.writes
    return True


def _chains_at(plan: StepPlan, position: int, end: int, taken: dict[int, _Launch]) -> Iterator[tuple[KernelChain, list[int]]]:
    """Yield the chains that begin with a task and end before `end`, with the positions of their tasks, none of which is `taken`."""
    codelet = plan.tasks[position].codelet
    for chain in codelet.chains if isinstance(codelet, Codelet) else ():
        positions = [position]
        while len(positions) < len(chain.kernels):
            follower = _next_of(plan, chain, positions)
            if follower is None or follower >= end or follower in taken:
                break
            positions.append(follower)
        else:
            yield chain, positions


def _next_of(plan: StepPlan, chain: KernelChain, positions: Sequence[int]) -> int | None:
    """Return the position of the task that continues a chain; None if there is none."""
    links = [link for link in chain.links if link.reader == len(positions)]
    results = [plan.tasks[positions[link.writer]].accesses[link.result][0] for link in links]
    for position in plan.uses[results[0]].positions:
        task = plan.tasks[position]
        if position <= positions[-1] or not isinstance(task.codelet, Codelet) or task.codelet.cuda is not chain.kernels[len(positions)]:
            continue
        if all(task.accesses[link.argument][0] is handle for link, handle in zip(links, results, strict=True)):
            writers = [positions[link.writer] for link in links]
            are_private = (
                plan.owned.get(handle) is False and list(plan.uses[handle].positions) == [writer, position]
                for link, handle, writer in zip(links, results, writers, strict=True)
                if link.is_private
            )
            return position if all(are_private) else None
    return None
