"""Fakes for tests: a driver without threads or time over real little buffers, the sequential truth to compare with, and a GPU that runs late."""

from .driver import FakeDriver, FakeStep, collect_inside, fresh_machine
from .gpu import FakeEvent, FakeGpu, FakeStream
from .truth import Run, Wrong, mix, truth

__all__ = ["FakeDriver", "FakeEvent", "FakeGpu", "FakeStep", "FakeStream", "Run", "Wrong", "collect_inside", "fresh_machine", "mix", "truth"]
