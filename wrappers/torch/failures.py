"""What a program sees when a runtime fails under a session: one sentence with what to do, instead of how the runtime came to know."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import scheduler
from nntask import DoesNotFit, NntaskError, StorageError, UsageError
from nntask.hardware import FAILURES
from scheduler import Runtime

from .kernels import OperationFailed


@contextmanager
def user_errors(runtime: Runtime, *, has_disk: bool) -> Iterator[None]:
    """Turn failures of a runtime into the error that says what to do.

    Raises:
        NntaskError: for a failure.
    """
    try:
        yield
    except FAILURES as error:
        raise _user_error(error, runtime, has_disk=has_disk) from error


def _user_error(error: Exception, runtime: Runtime, *, has_disk: bool) -> Exception:
    """The error that a program sees for a failure of the runtime: first what is known to have gone wrong, else the error itself."""
    if isinstance(error.__cause__, OperationFailed):
        return UsageError(f"{error.__cause__}; look at the values of this batch")
    if runtime.tier_failure is not None:
        return StorageError(f"{runtime.tier_failure}; make a new session, and resume from what save() wrote last")
    if isinstance(error.__cause__, NntaskError):
        return error.__cause__
    refusal = error if isinstance(error, scheduler.DoesNotFit) else runtime.refusal
    if refusal is None:
        return error
    story = str(refusal).partition("; raise the budget")[0]
    if refusal.node.startswith(("cuda", "sim")):
        return DoesNotFit(f"{story}; raise gpu_memory=")
    return DoesNotFit(f"{story}; raise ram={'' if has_disk else ', or add disk=DIR'}")
