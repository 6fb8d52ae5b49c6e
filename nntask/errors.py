"""Errors that a user can see, and the exit code that each one gives the command.

::

    NntaskError                  1   a bug, unless it is one of these
    ├── UsageError (ValueError)  2   a flag, a config or a shape breaks a rule, or a place that a flag names cannot be written
    ├── DoesNotFit               3   the model and its tiles need more than the budgets
    ├── DataError                4   data or a checkpoint is missing, broken, changed or of another shape
    ├── Diverged                 5   the loss became NaN or infinite
    ├── StorageError             6   a GGUF file is broken, or a disk or a device failed; the newest checkpoint is whole
    ├── ProcessUnavailable       6   a confined process was ended by others, does not answer, or does not start
    └── ClusterError             6   a cluster cannot be used, or failed; the newest checkpoint is whole

Each message is one plain sentence: the rule, the values received, the remedy.
"""

from __future__ import annotations

from typing import ClassVar


class NntaskError(Exception):
    """Base of all errors that nntask raises on purpose."""

    exit_code: ClassVar[int] = 1


class UsageError(NntaskError, ValueError):
    """A flag, a config or a shape breaks a rule, or a place that a flag names cannot be written."""

    exit_code: ClassVar[int] = 2


class DoesNotFit(NntaskError):
    """The model and its tiles need more memory than the budgets allow."""

    exit_code: ClassVar[int] = 3


class DataError(NntaskError):
    """Data or a checkpoint is missing, broken, changed, or of another shape."""

    exit_code: ClassVar[int] = 4


class Diverged(NntaskError):
    """The loss became NaN or infinite."""

    exit_code: ClassVar[int] = 5


class StorageError(NntaskError):
    """A GGUF file is broken, or a disk or a device failed; the newest checkpoint, if there is one, is whole."""

    exit_code: ClassVar[int] = 6


class ProcessUnavailable(NntaskError):
    """A process that confines a program of others was ended by others, does not answer, or does not start."""

    exit_code: ClassVar[int] = 6


class ClusterError(NntaskError):
    """A cluster cannot be used, or failed; the newest checkpoint, if there is one, is whole."""

    exit_code: ClassVar[int] = 6
