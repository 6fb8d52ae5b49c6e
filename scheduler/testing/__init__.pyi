from .driver import FakeDriver, FakeStep, collect_inside
from .gpu import FakeGpu, FakeStream
from .sequential import Run, Wrong, mix

__all__ = ["FakeDriver", "FakeGpu", "FakeStep", "FakeStream", "Run", "Wrong", "collect_inside", "mix"]
