"""Programs that a runtime refuses: the kind of the error, and its sentence with the values and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scheduler import Codelet, Condition, InlineRuntime, RecordingError, Runtime
from scheduler.storage.arena import HostArena
from scheduler.testing import FakeGpu

MIB = 1 << 20


def on_a_gpu_inline(kit: Any) -> None:
    """A codelet for GPUs, on the runtime without workers."""
    InlineRuntime().submit(Codelet("on GPUs", cuda=lambda out: None), [])


def replay_inside(kit: Any) -> None:
    """A replay of a step before its recording has ended."""
    with Runtime(1, ram=MIB) as runtime, runtime.record() as step:
        step.replay()


def read_inside(kit: Any) -> None:
    """A read of the program's data during a recording."""
    with Runtime(1, ram=MIB) as runtime:
        data = kit.filled(runtime, 1, "data")
        with runtime.record(), runtime.acquire(data, "R"):
            pass


def a_conditional_exchange(kit: Any) -> None:
    """An operation of the host that depends on a flag."""
    with Runtime(1, ram=MIB) as runtime:
        flags = kit.filled(runtime, 1, "flags")
        exchange = Codelet("exchange", host=lambda done, *views: done(None))
        runtime.submit(exchange, [(flags, "R")], condition=Condition(guard=0))


def gpus_without_a_budget(kit: Any) -> None:
    """A GPU whose memory has no limit."""
    Runtime(1, ram=MIB, gpus=[FakeGpu()])


def a_budget_without_addresses(kit: Any) -> None:
    """More bytes than addresses."""
    HostArena(1 << 62)


REFUSED: list[tuple[Callable[[Any], None], type[Exception], str]] = [
    (on_a_gpu_inline, ValueError, r"^Codelet\('on GPUs'\) has no CPU implementation; register one or use a runtime with its device$"),
    (replay_inside, RecordingError, r"^the step is still being recorded \(or recording failed\); leave the `with runtime.record\(\)` block first$"),
    (read_inside, RecordingError, r"^.*'data'.* cannot be acquired while a step is being recorded; read values through the ticket of a replay$"),
    (
        a_conditional_exchange,
        ValueError,
        r"^Codelet\('exchange'\) depends on a flag, so it must run on a worker, got a host operation; submit it without",
    ),
    (gpus_without_a_budget, ValueError, r"^GPUs need a budget; give gpu_memory, the bytes of each$"),
    (a_budget_without_addresses, MemoryError, r"^the system refused to reserve 4,611,686,018,427,387,904 bytes .*; lower the memory budget$"),
]


@pytest.mark.parametrize(("program", "kind", "words"), REFUSED, ids=[program.__name__ for program, _, _ in REFUSED])
def test_a_program_is_refused_in_a_sentence(program: Callable[[Any], None], kind: type[Exception], words: str, kit: Any) -> None:
    """The runtime can be closed afterwards."""
    with pytest.raises(kind, match=words):
        program(kit)
