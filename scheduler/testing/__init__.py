"""Fakes for tests: a driver without threads or time over real little buffers, and the sequential truth to compare with."""

from .driver import FakeDriver, FakeStep, collect_inside, fresh_machine
from .truth import Run, Wrong, mix, truth

__all__ = ["FakeDriver", "FakeStep", "Run", "Wrong", "collect_inside", "fresh_machine", "mix", "truth"]
