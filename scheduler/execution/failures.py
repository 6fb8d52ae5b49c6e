"""What has gone wrong in a runtime: the first failure of each kind, kept for who asks, and errors that name the kernel that raised them."""

from __future__ import annotations

from ..core.errors import DoesNotFit, SchedulerError, TaskError, TierFailed
from ..core.records import Task, data_of


class Failures:
    """First failures.

    Attributes:
        tier: of the disk tier.
        source: of a file that is read.
        refusal: of a task that did not fit.
        unreported: of a task outside all replays, for the next wait of the program.
    """

    def __init__(self) -> None:
        self.tier: TierFailed | None = None
        self.source: BaseException | None = None
        self.refusal: DoesNotFit | None = None
        self.unreported: BaseException | None = None

    def of_copy(self, error: BaseException) -> None:
        """A file could not be read, or the disk tier not be written."""
        if isinstance(error, TierFailed):
            self.tier = self.tier or error
        else:
            self.source = self.source or error

    def of_task(self, task: Task, error: BaseException) -> BaseException:
        """A task has failed or was cancelled; the error that programs get."""
        if isinstance(error, DoesNotFit):
            self.refusal = self.refusal or error
        if isinstance(error, SchedulerError):
            return error
        notes = "".join(f", {note}" for note in getattr(error, "__notes__", ()))  # of fused tasks: which one
        named = TaskError(f"kernel {task.name!r} (task {task.id}) over {data_of(task)} raised {type(error).__name__}: {error}{notes}")
        named.__cause__ = error
        return named

    def take(self) -> BaseException | None:
        """The unreported failure, which is reported by that."""
        found, self.unreported = self.unreported, None
        return found
