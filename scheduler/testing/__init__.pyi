from .cuda import FakeCuda, KernelParameter, KernelPointer
from .driver import FakeDriver, FakeStep, collect_inside, fresh_machine
from .gpu import FakeEvent, FakeGpu, FakeStream
from .hazards import Access
from .sequential import Run, Wrong, mix, truth

__all__ = [
    "Access",
    "FakeCuda",
    "FakeDriver",
    "FakeEvent",
    "FakeGpu",
    "FakeStep",
    "FakeStream",
    "KernelParameter",
    "KernelPointer",
    "Run",
    "Wrong",
    "collect_inside",
    "fresh_machine",
    "mix",
    "truth",
]
