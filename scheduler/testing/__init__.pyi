from .driver import FakeDriver, FakeStep, collect_inside, fresh_machine
from .gpu import FakeEvent, FakeGpu, FakeStream
from .sequential import Run, Wrong, mix, truth

__all__ = ["FakeDriver", "FakeEvent", "FakeGpu", "FakeStep", "FakeStream", "Run", "Wrong", "collect_inside", "fresh_machine", "mix", "truth"]
