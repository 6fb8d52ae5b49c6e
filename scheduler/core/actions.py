"""The single dispatch over actions: every driver of a machine executes its actions through `carry_out`.

The executor, virtual time and the fakes of tests each implement `ActionHandler`, which has one method per kind of action.
A new kind of action fails the type check until every driver implements it, even if the implementation does nothing or raises.
"""

from __future__ import annotations

from typing import Protocol, assert_never

from .events import Action, CopyTile, DiscardExtent, MoveTile, ReportFailure, ReportStepDone, RunTask


class ActionHandler(Protocol):
    """A driver of a machine: one method per kind of action. The actions of an event are executed in the order in which the machine returns them."""

    def run_task(self, action: RunTask) -> None:
        """Start a task on its worker; `TaskFinished` or `TaskFailed` follows."""

    def copy_tile(self, action: CopyTile) -> None:
        """Start a copy; `CopyFinished` or `CopyFailed` follows."""

    def move_tile(self, action: MoveTile) -> None:
        """Move bytes within a node before anything else happens there; no event follows."""

    def discard_extent(self, action: DiscardExtent) -> None:
        """Return a part of a storage node's file to the file system; no event follows."""

    def report_failure(self, action: ReportFailure) -> None:
        """Note a task that has failed or was cancelled."""

    def report_step_done(self, action: ReportStepDone) -> None:
        """Note a replay that has ended."""


def carry_out(action: Action, handler: ActionHandler) -> None:
    """Execute one action with the handler's method for its kind."""
    if isinstance(action, RunTask):  # hot path: quicker than `match`; most frequent kinds first
        handler.run_task(action)
    elif isinstance(action, CopyTile):
        handler.copy_tile(action)
    elif isinstance(action, ReportStepDone):
        handler.report_step_done(action)
    elif isinstance(action, DiscardExtent):
        handler.discard_extent(action)
    elif isinstance(action, MoveTile):
        handler.move_tile(action)
    elif isinstance(action, ReportFailure):
        handler.report_failure(action)
    else:
        assert_never(action)
