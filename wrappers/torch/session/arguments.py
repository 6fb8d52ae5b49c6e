"""Keyword arguments of a session in three groups, each handed on as one object; `Session` describes them.

Users type single keywords, and each keyword is the field of one group. Others are options of an optimizer that is given by name.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from nntask.hardware import MachineSpec
from scheduler import Runtime
from scheduler.planning import PlannedOrder

from ..capture.capture import Function
from ..capture.objectives import Loss
from ..steps.captures import Captures
from ..steps.dry import CapturedPasses
from ..tasks.cuts import LARGEST_TILE


class PlannedPasses(NamedTuple):
    """A training step that was captured and planned before its session is opened.

    Attributes:
        captures: the captures that `step` belongs to, which the session continues.
        step: the step on symbolic handles.
        order: the step in its planned order.
    """

    captures: Captures
    step: CapturedPasses
    order: PlannedOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """Objective, minibatches and learning rate of a step."""

    lr: float | None = None
    loss: Loss | None = None
    objective: Function | None = None
    minibatches: int = 1
    max_grad_norm: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Memories, workers and devices."""

    ram: int | str | None = None
    disk: str | os.PathLike[str] | None = None
    workers: int | None = None
    threads: int = 1
    ngpu: int | None = 0
    sim_gpu: int = 0
    gpu_memory: str | None = None
    on: tuple[MachineSpec, Runtime] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """How steps are captured, recorded and checked."""

    order: str = "auto"
    recompute: str = "auto"
    largest_tile: str = LARGEST_TILE
    weights: str | os.PathLike[str] | None = None
    compiled: bool = False
    verify: int = 0
    planned: PlannedPasses | None = None


class ArgumentGroups(NamedTuple):
    """Keyword arguments of a session by group, and the options of an optimizer that is given by name."""

    learning: Learning
    resources: Resources
    execution: Execution
    options: Mapping[str, Any]


def grouped(arguments: Mapping[str, Any]) -> ArgumentGroups:
    """Return keyword arguments by group; those that belong to none are options of the optimizer."""
    rest = dict(arguments)

    def chosen(kind: type[Any]) -> dict[str, Any]:
        return {f.name: rest.pop(f.name) for f in fields(kind) if f.name in rest}

    return ArgumentGroups(Learning(**chosen(Learning)), Resources(**chosen(Resources)), Execution(**chosen(Execution)), rest)


def signature() -> inspect.Signature:
    """Return the signature of `Session` with every keyword and its default, for help and completion."""
    kinds = inspect.Parameter
    parameters = [kinds("module", kinds.POSITIONAL_OR_KEYWORD), kinds("optimizer", kinds.POSITIONAL_OR_KEYWORD, default="adamw")]
    parameters += [
        kinds(f.name, kinds.KEYWORD_ONLY, default=f.default, annotation=f.type) for group in (Learning, Resources, Execution) for f in fields(group)
    ]
    return inspect.Signature([*parameters, kinds("options", kinds.VAR_KEYWORD)])
