"""Steps of chains of layers, built by hand."""

from __future__ import annotations

import itertools

from scheduler.core.records import HandleId, HandleRecord, HandleSpec, Kind, Mode, WorkerKind
from scheduler.core.step_plan import Label, Phase, RecordedTask, StepPlan

PAGE = 4096


class PlanBuilder:
    """Builds plans by hand."""

    def __init__(self) -> None:
        self.tasks: list[RecordedTask] = []
        self.owned: dict[HandleRecord, bool] = {}
        self._ids = itertools.count()
        self._label = Label()

    def tile(self, name: str, kind: Kind = "temporary", pages: int = 2) -> HandleRecord:
        """A tile; temporaries belong to the step."""
        size = pages * PAGE
        record = HandleRecord(HandleId(next(self._ids)), HandleSpec(size, size, None, name, kind, "activations"))
        if kind == "temporary":
            self.owned[record] = False
        return record

    def task(self, name: str, *accesses: tuple[HandleRecord, Mode], kind: WorkerKind = "cpu") -> None:
        """The next task."""
        self.tasks.append(RecordedTask(None, name, (kind,), accesses, {}, 0, label=self._label))

    def label(self, phase: Phase, minibatch: int = -1, path: str = "") -> None:
        """Label the next tasks."""
        self._label = Label(phase, minibatch, path)

    def plan(self) -> StepPlan:
        """What has been built."""
        return StepPlan(self.tasks, self.owned)


def toy_step(layers: int = 3, minibatches: int = 4, recompute: bool = False) -> StepPlan:
    """Forward, backward and update of a chain of layers, one minibatch after the other."""
    builder = PlanBuilder()
    weights = [builder.tile(f"w{at}", "persistent", 8) for at in range(layers)]
    moments = [builder.tile(f"m{at}", "persistent", 8) for at in range(layers)]
    gradients = [builder.tile(f"d{at}", pages=8) for at in range(layers)]
    for minibatch in range(minibatches):
        builder.label("forward")
        data, copy = builder.tile("data", "input"), builder.tile("copy")
        builder.task("copy input", (data, "R"), (copy, "W"))
        x = [copy]
        for at, weight in enumerate(weights):
            builder.label("forward", minibatch, f"layers.{at}")
            x.append(builder.tile("x"))
            builder.task("forward", (x[-2], "R"), (weight, "R"), (x[-1], "W"))
        dx = builder.tile("dx")
        builder.label("forward", minibatch)
        builder.task("loss", (x[-1], "R"), (dx, "W"))
        for at in reversed(range(layers)):
            builder.label("backward", minibatch, f"layers.{at}")
            if recompute:
                again = builder.tile("again")
                builder.task("forward", (x[at], "R"), (weights[at], "R"), (again, "W"))
                x[at + 1] = again
            builder.task("backward weight", (x[at], "R"), (x[at + 1], "R"), (dx, "R"), (gradients[at], "RW" if minibatch else "W"))
            before, dx = dx, builder.tile("dx")
            builder.task("backward input", (before, "R"), (weights[at], "R"), (dx, "W"))
    builder.label("update")
    norms = [builder.tile("norm", pages=1) for _ in range(layers)]
    for gradient, norm in zip(gradients, norms, strict=True):
        builder.task("squares", (gradient, "R"), (norm, "W"))
    for weight, moment, gradient in zip(weights, moments, gradients, strict=True):
        builder.task("adam", (weight, "RW"), (moment, "RW"), (gradient, "R"))
    return builder.plan()


def wide_step(layers: int = 10, minibatches: int = 2) -> StepPlan:
    """A residual stream beside which each layer makes four times as much from it, cheaply."""
    builder = PlanBuilder()
    weights = [builder.tile(f"w{at}", "persistent", 1) for at in range(layers)]
    gradients = [builder.tile(f"d{at}", pages=1) for at in range(layers)]
    for minibatch in range(minibatches):
        builder.label("forward")
        data, copy = builder.tile("data", "input"), builder.tile("copy")
        builder.task("copy input", (data, "R"), (copy, "W"))
        x, wide = [copy], []
        for at, weight in enumerate(weights):
            builder.label("forward", minibatch, f"layers.{at}")
            wide.append(builder.tile("wide", pages=8))
            x.append(builder.tile("x"))
            builder.task("widen", (x[-2], "R"), (wide[-1], "W"))
            builder.task("product", (wide[-1], "R"), (weight, "R"), (x[-2], "R"), (x[-1], "W"))
        dx = builder.tile("dx")
        builder.label("forward", minibatch)
        builder.task("loss", (x[-1], "R"), (dx, "W"))
        for at in reversed(range(layers)):
            builder.label("backward", minibatch, f"layers.{at}")
            before, dx = dx, builder.tile("dx")
            builder.task("backward", (wide[at], "R"), (x[at], "R"), (before, "R"), (gradients[at], "RW" if minibatch else "W"), (dx, "W"))
    builder.label("update")
    for weight, gradient in zip(weights, gradients, strict=True):
        builder.task("update", (weight, "RW"), (gradient, "R"))
    return builder.plan()
