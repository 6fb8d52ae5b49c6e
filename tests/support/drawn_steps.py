"""Small steps drawn from numbers: chains, fans, joins, accumulations, overwrites, scratch, inputs, outputs, data in files, conditional tasks."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st

from scheduler.core.memory.extents import PAGE
from scheduler.core.records import RW, SCRATCH, Condition, HandleRecord, Mode, R, W
from scheduler.testing import FakeDriver

Access = tuple[HandleRecord, Mode]


@dataclass
class DrawnStep:
    """A step drawn from numbers: handles, tasks over them, who owns what."""

    driver: FakeDriver
    persistent: list[HandleRecord] = field(default_factory=list)
    inputs: list[HandleRecord] = field(default_factory=list)
    files: list[HandleRecord] = field(default_factory=list)
    outputs: list[HandleRecord] = field(default_factory=list)
    owned: dict[HandleRecord, bool] = field(default_factory=dict)
    tasks: list[list[Access]] = field(default_factory=list)
    conditions: dict[int, Condition] = field(default_factory=dict)
    readable: list[HandleRecord] = field(default_factory=list)

    def new(self, pages: int, name: str, *, is_output: bool = False) -> HandleRecord:
        """A handle of the step."""
        handle = self.driver.handle(pages, name)
        self.owned[handle] = is_output
        return handle

    def begin(self, sizes: list[int], num_inputs: int, in_files: int, readers: int) -> None:
        """Persistent data, some of it in files by the bits of `in_files`, read with so many pages, and inputs with the step's own copies of them."""
        for at, pages in enumerate(sizes):
            (self.inputs if at < num_inputs else self.persistent).append(self.driver.handle(pages, f"p{at}"))
        for handle in self.inputs:
            own = self.new(handle.spec.size // PAGE, f"{handle.spec.name} copy")
            self.tasks.append([(handle, R), (own, W)])
            self.readable.append(own)
        self.readable += self.persistent
        for at, handle in enumerate(self.persistent):
            if in_files >> at & 1:
                self.files.append(handle)
                self.driver.attach(handle, readers * PAGE)

    def add(self, what: int, a: int, b: int, pages: int) -> None:
        """One or more tasks of a kind."""
        old, other = self.readable[-1 - a % len(self.readable)], self.readable[b % len(self.readable)]
        if what == 0:  # link of a chain, perhaps with scratch
            self.derive([self.readable[-1]], pages, scratch=a % 3)
        elif what == 1:  # fan out, join
            parts = [self.derive([old], 1 + (pages + at) % 3) for at in range(1 + b % 4)]
            self.derive(parts, pages)
        elif what == 2:
            self.derive([old, other], pages, scratch=pages % 3)
        elif what == 3 and old is not other:  # accumulate
            self.tasks.append([(old, RW), (other, R)])
        elif what == 4:
            output = self.new(pages, "out", is_output=True)
            self.outputs.append(output)
            self.tasks.append([(old, R), (output, W)])
            self.readable.append(output)
        elif what == 5 and self.persistent:  # overwrite
            target = self.persistent[b % len(self.persistent)]
            self.tasks.append([(target, W)] if target is old else [(old, R), (target, W)])
        elif what == 7:  # two results, the second of which another task adds to as it makes one more
            parts = [self.new(pages, "tmp") for _ in range(3)]
            self.tasks.append([(old, R), (parts[0], W), (parts[1], W)])
            self.tasks.append([(parts[0] if a % 2 else other, R), (parts[1], RW), (parts[2], W)])
            self.readable += parts
        elif what == 8 and old is not other:
            self.choose(old, other, 1 + b % 3, pages)
        else:
            self.tasks.append([(old, RW)])

    def choose(self, source: HandleRecord, total: HandleRecord, num_experts: int, pages: int) -> None:
        """Flags, and for each of them two tasks: one makes new data out of an expert's, the other adds it to a total."""
        flags = self.new(1, "flags")
        self.conditions[len(self.tasks)] = Condition(flags=1)
        self.tasks.append([(source, R), (flags, W)])
        for number in range(num_experts):
            part, condition = self.new(pages, "part"), Condition(guard=0, number=number, share=0.5)
            expert = self.persistent[number % len(self.persistent)] if self.persistent else source
            self.conditions |= {len(self.tasks): condition, len(self.tasks) + 1: condition}
            self.tasks.append([(flags, R), (expert, R), (part, W)])
            self.tasks.append([(flags, R), (part, R), (total, RW)])

    def derive(self, sources: list[HandleRecord], pages: int, scratch: int = 0) -> HandleRecord:
        """A task that makes new data out of old."""
        target = self.new(pages, "tmp")
        accesses: list[Access] = [(source, R) for source in dict.fromkeys(sources)]
        accesses.append((target, W))
        if scratch:
            accesses.append((self.new(scratch, "scratch"), SCRATCH))
        self.tasks.append(accesses)
        self.readable.append(target)
        return target


STEPS = st.tuples(
    st.lists(st.integers(1, 4), min_size=2, max_size=5),
    st.integers(0, 2),
    st.one_of(st.just(0), st.integers(0, 31)),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 9), st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=9),
)
