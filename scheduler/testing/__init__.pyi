from .driver import FakeDriver, FakeStep
from .gpu import FakeGpu, FakeStream
from .machines import collect_inside
from .sequential import Run, Wrong, mix

__all__ = ["FakeDriver", "FakeGpu", "FakeStep", "FakeStream", "Run", "Wrong", "collect_inside", "mix"]
