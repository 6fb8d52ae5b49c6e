"""What a program sees of any runtime: handles, `submit`, `acquire`, `wait`; and how REDUX becomes plain accesses.

REDUX is rewritten here, before any scheduler sees it. Contribution *i* to a handle goes to lane *i mod L*; the first lane to get one is the handle
itself. Contributions are counted, or numbered by the program (`contribution`), so that some of them may be made elsewhere.
The kernel is told with ``accumulate=False`` when it is the first to write its lane (so nobody clears memory first). The next access of
another mode first combines the lanes in a fixed tree: lane j receives lane j + s for s = 1, 2, 4, ... Everything follows from submission
order and L alone, never from workers or time, hence results are the same bits on any machine.

Data may begin in a file: a handle is attached to a source, which reads it whenever it is wanted and not in memory, until it is written.
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Final, Protocol

from .codelet import Codelet
from .core.records import REDUX, RW, SCRATCH, DataClass, Kind, Mode, R, W, WorkerId, WorkerKind
from .drivers.disk import Source

View = Callable[[Any, int], Any]
"""Makes the kernel's argument from (memory of a node, byte offset in it)."""


class ReleaseInbox(Protocol):
    """Where a finalizer may leave word that a record's handle is gone: ``append`` must neither lock nor call back."""

    def append(self, record: Any, /) -> None:
        """Take the record of a handle that no program references any more."""


class Handle:
    """A piece of data the scheduler moves and tracks.

    Args:
        record: the runtime's own record of the data; opaque to programs.
        nbytes: exact size in bytes.
        view: makes the kernel's argument from a node's memory and an offset.
        combine: codelet called as ``combine(total RW, part R)``; needed only where REDUX meets more than one lane.
    """

    __slots__ = (
        "__weakref__",
        "combine",
        "data_class",
        "inbox",
        "kind",
        "lanes",
        "name",
        "nbytes",
        "num_contributions",
        "record",
        "view",
        "written",
    )

    def __init__(
        self,
        record: Any,
        nbytes: int,
        view: View,
        *,
        name: str,
        kind: Kind,
        data_class: DataClass,
        combine: Codelet | None,
        inbox: ReleaseInbox | None,
    ) -> None:
        self.record = record
        self.nbytes = nbytes
        self.view = view
        self.name = name
        self.kind: Kind = kind
        self.data_class: DataClass = data_class
        self.combine = combine
        self.inbox = inbox
        self.written = False
        self.num_contributions = 0
        self.lanes: dict[int, Handle] | None = None

    def __del__(self) -> None:
        inbox = getattr(self, "inbox", None)  # absent when __init__ itself failed
        if inbox is not None:
            inbox.append(self.record)

    def __repr__(self) -> str:
        return f"Handle({self.name!r}, {self.nbytes} B)"


Access = tuple[Handle, Mode]

_contribution: Final[ContextVar[int | None]] = ContextVar("nntask_contribution", default=None)

Terms = tuple[tuple[WorkerKind, ...], WorkerId | None]
"""Kinds of workers that may run a task, and the only worker that may, if the program has placed it."""


class TaskRuntime(abc.ABC):
    """Interface between tile operations and whatever executes tasks.

    Guarantee: tasks appear to run one after another in submission order, whatever really happens.

    Args:
        lanes: L of REDUX; a property of the numerics like a tile size.

    Attributes:
        has_gpus: whether there are CUDA workers, which then run whatever has an implementation for them.
    """

    has_gpus = False

    def __init__(self, lanes: int = 1) -> None:
        if lanes < 1:
            raise ValueError(f"lanes must be at least 1, got {lanes}; use --lanes 1 for plain sums")
        self.lanes = lanes
        self._summing: weakref.WeakSet[Handle] = weakref.WeakSet()

    @abc.abstractmethod
    def handle(
        self,
        nbytes: int,
        view: View,
        *,
        name: str = "",
        kind: Kind = "temporary",
        data_class: DataClass = "activations",
        combine: Codelet | None = None,
    ) -> Handle:
        """Register data of `nbytes` bytes; no memory is taken before the first task writes it."""

    def attach(self, handle: Handle, source: Source) -> None:
        """Say that the data of a handle is what `source` reads: when somebody wants it, as often as it has had to leave memory, until it is written.

        Until then it takes memory only while it is used or there is room. Whatever the handle holds now is as good as overwritten.

        Raises:
            ValueError: a task that has not ended uses the handle, or a recorded step has replayed with it. A step that has not may be given its data
                so.
            DoesNotFit: there is no room for what the source needs to read, not even where data lies that can be dropped at once.
            RecordingError: a step is being recorded.
        """
        self._attach(handle, source)
        self._overwrite(handle)

    @abc.abstractmethod
    def _attach(self, handle: Handle, source: Source) -> None:
        """Take note of the source."""

    @abc.abstractmethod
    def acquire(self, handle: Handle, mode: Mode) -> AbstractContextManager[Any]:
        """Wait for the handle's data in host memory and lend it: ``with runtime.acquire(h, "R") as view``."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Wait until every submitted task is done.

        Raises:
            TaskError: a task failed since the last wait.
        """

    @property
    @abc.abstractmethod
    def recording(self) -> bool:
        """Whether tasks are being captured instead of run."""

    @abc.abstractmethod
    def _examine(self, codelet: Codelet, accesses: Sequence[Access], *, combines: bool = False) -> Terms:
        """Where a task may run; or the refusal of one that cannot be taken on, before anything has changed.

        Args:
            combines: whether it sums lanes: then it belongs to what was submitted before, and runs wherever it likes.
        """

    @abc.abstractmethod
    def _submit(self, codelet: Codelet, accesses: Sequence[Access], constants: Mapping[str, Any], priority: int, terms: Terms) -> None:
        """Take one task, examined before, whose modes are R, W, RW and SCRATCH."""

    def submit(
        self,
        codelet: Codelet,
        accesses: Sequence[Access],
        constants: Mapping[str, Any] | None = None,
        *,
        priority: int = 0,
    ) -> None:
        """Submit a task: `codelet` over `accesses`.

        Args:
            accesses: (handle, mode) pairs in the order of the kernel's arguments; a handle may appear once.
            constants: keyword arguments of the kernel.
            priority: larger runs earlier among ready tasks under policies that look at it.

        Raises:
            ValueError: a handle appears twice, or no worker can run the codelet.
        """
        if len(dict(accesses)) != len(accesses):
            names = ", ".join(f"{mode} {handle.name or 'unnamed'}" for handle, mode in accesses)
            raise ValueError(f"{codelet!r} was submitted with the same handle twice ({names}); access it once, with mode RW if need be")
        terms = self._examine(codelet, accesses)
        if self.lanes > 1:  # else there is nothing to sum
            for handle, mode in accesses:
                if handle.lanes is not None and (mode == R or mode == RW):
                    self._combine(handle, priority)
        plain: list[Access] = []
        for handle, mode in accesses:
            if mode == REDUX:
                handle, mode, accumulate = self._contribute(handle)
                constants = {**(constants or {}), "accumulate": accumulate}
            elif mode != R and mode != SCRATCH:
                self._overwrite(handle)
            plain.append((handle, mode))
        self._submit(codelet, plain, constants or {}, priority, terms)

    def _overwrite(self, handle: Handle) -> None:
        """Take note that the handle is written; lanes it still has are dropped unsummed."""
        handle.written = True
        if handle.lanes is not None:
            self._drop_lanes(handle)

    def _drop_lanes(self, handle: Handle) -> None:
        handle.lanes = None
        self._summing.discard(handle)

    def _contribute(self, handle: Handle) -> tuple[Handle, Mode, bool]:
        """The lane, the mode and whether to accumulate, for the next REDUX contribution to `handle`."""
        lane = handle
        if self.lanes > 1:
            if handle.lanes is None:
                handle.lanes = {}
                handle.num_contributions = 0
                self._summing.add(handle)
            number = _contribution.get()
            if number is None:
                number = handle.num_contributions
                handle.num_contributions += 1
            number %= self.lanes
            found = handle.lanes.get(number)
            lane = handle.lanes[number] = found or (self._lane_of(handle, number) if handle.lanes else handle)
        accumulate = lane.written
        lane.written = True
        return lane, RW if accumulate else W, accumulate

    def _lane_of(self, handle: Handle, number: int) -> Handle:
        """A new lane of a handle."""
        name = f"{handle.name} lane {number}"
        return self.handle(handle.nbytes, handle.view, name=name, data_class=handle.data_class, combine=handle.combine)

    def part_sums(self, handle: Handle, num_lanes: int, *, priority: int = 0) -> dict[int, Handle]:
        """Sum those lanes of a handle whose partners in the tree of `num_lanes` lanes are all here, and take them off it: the others are elsewhere.

        Returns:
            Parts of the whole sum by their first lane; the first of them is the handle itself. `add_part` puts parts together again.

        Raises:
            ValueError, DoesNotFit: see `_combine`.
        """
        lanes = handle.lanes or {0: handle}
        here = set(lanes)
        self._sum(handle, lanes, [(a, b) for a, b, end in tree(num_lanes) if here.issuperset(range(a, end))], priority)
        self._drop_lanes(handle)
        return dict(sorted(lanes.items()))

    def add_part(self, handle: Handle, lane: int, part: Handle) -> None:
        """Let a part of a handle's sum take its place in the tree: the next access sums them all."""
        if handle.lanes is None:
            handle.lanes = {}
            self._summing.add(handle)
        handle.lanes[lane] = part

    def _combine(self, handle: Handle, priority: int = 0) -> None:
        """Sum the lanes into the handle in a fixed tree, as urgently as whoever asks for it; or leave them as they are and raise.

        Raises:
            ValueError: there is no codelet for it, or no worker can run it.
            DoesNotFit: two lanes exceed every memory.
        """
        lanes = handle.lanes or {0: handle}
        self._sum(handle, lanes, [(a, b) for a, b, _ in tree(max(lanes) + 1)], priority)
        self._drop_lanes(handle)

    def _sum(self, handle: Handle, lanes: dict[int, Handle], pairs: Sequence[tuple[int, int]], priority: int) -> None:
        """Carry out some of the tree's additions; a lane that is not there adds nothing. The sum with the handle itself in it stays there."""
        if len(lanes) < 2:
            return
        if handle.combine is None:
            raise ValueError(f"{handle!r} was summed in {len(lanes)} lanes but has no combine codelet; pass one")
        one, other, *_ = lanes.values()
        terms = self._examine(handle.combine, [(one, RW), (other, R)], combines=True)
        for a, b in pairs:
            part, total = lanes.pop(b, None), lanes.get(a)
            if part is None:
                continue
            if total is not None:
                if part is handle:  # a + b and b + a are the same bits
                    part, total = total, part
                self._submit(handle.combine, [(total, RW), (part, R)], {}, priority, terms)
            lanes[a] = total or part

    def _make_whole(self, handle: Handle, mode: Mode) -> None:
        """Before the program uses the handle's data: sum its lanes, or drop them if it overwrites them."""
        if handle.lanes is not None and (mode == R or mode == RW):
            self._combine(handle)
        if mode != R and mode != SCRATCH:
            self._overwrite(handle)

    def _combine_all(self) -> None:
        """Sum the lanes of every handle that has any: a recorded step neither takes nor leaves half-made sums."""
        for handle in sorted(self._summing, key=lambda handle: handle.name):
            self._combine(handle)


def tree(num_lanes: int) -> Iterator[tuple[int, int, int]]:
    """The fixed tree in which lanes are summed: (a, b, end), lane a receives lane b and has lanes a to end - 1 in it then."""
    stride = 1
    while stride < num_lanes:
        for first in range(0, num_lanes - stride, 2 * stride):
            yield first, first + stride, min(first + 2 * stride, num_lanes)
        stride *= 2


@contextmanager
def contribution(number: int | None) -> Iterator[None]:
    """REDUX accesses of tasks submitted inside belong to contribution `number` of each sum, whatever came before: they go to lane `number` mod L, one
    after another. So the sums of numbered contributions are the same bits wherever each of them is made."""
    token = _contribution.set(number)
    try:
        yield
    finally:
        _contribution.reset(token)


def kept_in_contribution(function: Callable[[], None]) -> Callable[[], None]:
    """A function that, whenever it is called, belongs to the contribution in which this was called; it keeps nothing else of the context alive."""
    number = _contribution.get()

    def run() -> None:
        with contribution(number):
            function()

    return run


@contextmanager
def lent(view: Any) -> Iterator[Any]:
    """A context manager that lends `view` and has nothing to give back."""
    yield view
