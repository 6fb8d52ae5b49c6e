"""Failures of a runtime: the first one of each kind, kept for later queries, and errors that name the kernel that raised them."""

from __future__ import annotations

from ..core.errors import DoesNotFit, SchedulerError, TaskError, TierFailed
from ..core.records import Task, data_of


class Failures:
    """The first failure of each kind.

    Attributes:
        tier: first failure of the disk tier.
        source: first error of a source file.
        refusal: error of the first task that did not fit.
        unreported: first failure of a task outside all replays that no wait of the program has raised yet.
    """

    def __init__(self) -> None:
        self.tier: TierFailed | None = None
        self.source: BaseException | None = None
        self.refusal: DoesNotFit | None = None
        self.unreported: BaseException | None = None

    def of_copy(self, error: BaseException) -> None:
        """Record the error of a copy: a file could not be read, or the disk tier could not be written."""
        if isinstance(error, TierFailed):
            self.tier = self.tier or error
        else:
            self.source = self.source or error

    def of_task(self, task: Task, error: BaseException) -> BaseException:
        """Record the error of a task that failed or was cancelled; return the error for the program."""
        if isinstance(error, DoesNotFit):
            self.refusal = self.refusal or error
        if isinstance(error, SchedulerError):
            return error
        notes = "".join(f", {note}" for note in getattr(error, "__notes__", ()))  # a note of fused tasks says which one raised
        kernel = f"kernel {task.spec.name!r} (task {task.id}) over {data_of(task)}"
        named = TaskError("raised", kernel, why=f"{type(error).__name__}: {error}{notes}")
        named.__cause__ = error
        return named

    def take(self) -> BaseException | None:
        """Return the unreported failure, which counts as reported from now on."""
        failure, self.unreported = self.unreported, None
        return failure
