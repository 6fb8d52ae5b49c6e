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
Flags and their values are attributes, too, so that a message can name what has set a flag: a variable, or a key of a file (`naming`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self

if TYPE_CHECKING:
    from scheduler import Shortage


class Setting(NamedTuple):
    """A flag in a message, and its value; None for a message about the flag alone."""

    flag: str
    value: Any = None

    @property
    def text(self) -> str:
        """The value as it is typed."""
        return f"{self.value:g}" if isinstance(self.value, float) else str(self.value)


class FlagOrigin(Protocol):
    """A variable or key that has set a flag."""

    @property
    def subject(self) -> str:
        """Name of the variable or key, and of its file."""

    def has(self, value: Any) -> bool:
        """Return whether the flag has this value because of the variable or key."""

    def assignment(self, *, is_first: bool) -> str:
        """Return the name with its value; the file is named only with `is_first`."""


class NntaskError(Exception):
    """Base of all errors that nntask raises on purpose.

    Args:
        clause: the rule and the values; a whole sentence if nothing needs its parts. {0}, {1}, ... are places of `others`.
        remedy: advice, as a clause; "" for none. {0}, {1}, ... are places of `others`.
        flag: flag that the error is about and that begins the message, before `clause`; "" for none.
        value: value of the flag, which then follows it in the message; None to leave it out.
        others: other flags in `clause` and `remedy`.

    Attributes:
        flag, value, others: the arguments.
        fact, remedy: the message without the remedy, and the remedy; "" for none.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, clause: str = "", remedy: str = "", *, flag: str = "", value: Any = None, others: Sequence[Setting] = ()) -> None:
        self._clause, self._remedy = clause, remedy
        self.flag, self.value, self.others = flag, value, tuple(others)
        self._write({})

    def __reduce__(self) -> Any:
        """Return the parts of a copy, which has the same attributes but no causes and frames."""
        return type(self).__new__, (type(self),), {"args": self.args, **vars(self)}

    def __copy__(self) -> Self:
        """Return the same error without causes and frames, also if tblib, which distributed may load, has registered another way to copy."""
        other = type(self).__new__(type(self))
        other.args = self.args
        vars(other).update(vars(self))
        return other

    def naming(self, origins: Mapping[str, FlagOrigin]) -> Self:
        """Return the same error, whose message names the variables and keys that have set its flags; the error itself if none has.

        Args:
            origins: flag -> what has set it.
        """
        if not origins.keys() & {self.flag, *(each.flag for each in self.others)}:
            return self
        other = copy(self)
        other._write(origins)
        return other

    def advising(self, alternative: str) -> Self:
        """Return the same error with a clause appended to its remedy."""
        other = copy(self)
        other._remedy += f", {alternative}"
        other._write({})
        return other

    def _write(self, origins: Mapping[str, FlagOrigin]) -> None:
        """Make the message."""
        named = set[str]()

        def words(setting: Setting) -> str:
            origin = origins.get(setting.flag)
            if origin is None:
                return setting.flag if setting.value is None else f"{setting.flag} {setting.text}"
            if setting.value is None or not origin.has(setting.value):
                return origin.subject if setting.value is None else f"{origin.subject} {setting.text}"
            is_first = setting.flag not in named
            named.add(setting.flag)
            return origin.assignment(is_first=is_first)

        def filled(text: str) -> str:
            for number, setting in enumerate(self.others):
                if (mark := f"{{{number}}}") in text:
                    text = text.replace(mark, words(setting))
            return text

        begin = f"{words(Setting(self.flag, self.value))} " if self.flag else ""
        self.fact = begin + filled(self._clause)
        self.remedy = filled(self._remedy)
        self.args = (f"{self.fact}; {self.remedy}" if self.remedy else self.fact,)


class UsageError(NntaskError, ValueError):
    """A flag, a config or a shape breaks a rule, or a place that a flag names cannot be written."""

    exit_code: ClassVar[int] = 2


class DoesNotFit(NntaskError):
    """The model and its tiles need more memory than the budgets allow.

    Args:
        clause, remedy, flag, value, others: those of `NntaskError`.
        shortage: the memory that is too small, and the bytes; None if only figures of a plan are known.

    Attributes:
        shortage: the argument.
    """

    exit_code: ClassVar[int] = 3

    def __init__(
        self,
        clause: str,
        remedy: str = "",
        *,
        flag: str = "",
        value: Any = None,
        others: Sequence[Setting] = (),
        shortage: Shortage | None = None,
    ) -> None:
        super().__init__(clause, remedy, flag=flag, value=value, others=others)
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
