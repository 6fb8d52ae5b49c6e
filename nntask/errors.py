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

Each message is one plain sentence: the rule, the values received, the remedy. Code that needs a part of it takes the attribute, never the words.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    from scheduler import Shortage


class NntaskError(Exception):
    """Base of all errors that nntask raises on purpose.

    Args:
        clause: the rule and the values; a whole sentence if nothing needs its parts.
        remedy: advice, as a clause; "" for none.
        flag: flag that the error is about and that begins the message, before `clause`; "" for none.

    Attributes:
        clause, remedy, flag: the arguments.
        subject: beginning of the message: the flag, or the variable or key that has set it (`naming`).
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, clause: str = "", remedy: str = "", *, flag: str = "") -> None:
        self.clause, self.remedy, self.flag, self.subject = clause, remedy, flag, flag
        super().__init__(self._sentence())

    def __reduce__(self) -> Any:
        """Return the parts of a copy, which has the same attributes but no causes and frames."""
        return type(self).__new__, (type(self),), {"args": self.args, **vars(self)}

    def __copy__(self) -> Self:
        """Return the same error without causes and frames, also if tblib, which distributed may load, has registered another way to copy."""
        other = type(self).__new__(type(self))
        other.args = self.args
        vars(other).update(vars(self))
        return other

    @property
    def fact(self) -> str:
        """The message without the remedy."""
        return f"{self.subject} {self.clause}" if self.subject else self.clause

    def naming(self, subject: str) -> Self:
        """Return the same error about the variable or key that has set its flag."""
        other = copy(self)
        other.subject = subject
        other.args = (other._sentence(),)
        return other

    def reworded(self, sentence: str) -> Self:
        """Return the same error with another sentence, which names the origins of flags."""
        other = copy(self)
        other.args = (sentence,)
        return other

    def _sentence(self) -> str:
        return f"{self.fact}; {self.remedy}" if self.remedy else self.fact


class UsageError(NntaskError, ValueError):
    """A flag, a config or a shape breaks a rule, or a place that a flag names cannot be written."""

    exit_code: ClassVar[int] = 2


class DoesNotFit(NntaskError):
    """The model and its tiles need more memory than the budgets allow.

    Args:
        clause, remedy, flag: those of `NntaskError`.
        shortage: the memory that is too small, and the bytes; None if only figures of a plan are known.

    Attributes:
        shortage: the argument.
    """

    exit_code: ClassVar[int] = 3

    def __init__(self, clause: str, remedy: str = "", *, flag: str = "", shortage: Shortage | None = None) -> None:
        super().__init__(clause, remedy, flag=flag)
        self.shortage = shortage


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
