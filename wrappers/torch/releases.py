"""Releases of PyTorch, transformers and accelerate that a session works with: older ones are refused, newer ones checked, with a warning.

A version is checked when the first session or trainer is made, not on import. A release in the range needs no further check. A newer release of
PyTorch, or a pre-release, must have every name that this package uses and must pass a self-check (`insides`), once in a process; then one line is
printed. This module imports none of the packages until a check needs one.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from nntask import UsageError


@dataclass(frozen=True, slots=True)
class Supported:
    """The releases of a package with which the tests of this package have passed.

    Attributes:
        title: name of the package in sentences.
        package: name of the package for pip.
        oldest, newest: first and last release of the range, (major, minor).
    """

    title: str
    package: str
    oldest: tuple[int, int]
    newest: tuple[int, int]

    @property
    def words(self) -> str:
        """The range in words, such as "2.12 to 2.15"."""
        return " to ".join(dict.fromkeys(f"{major}.{minor}" for major, minor in (self.oldest, self.newest)))

    @property
    def remedy(self) -> str:
        """The command that installs a release of the range."""
        (low, first), (high, last) = self.oldest, self.newest
        return f"pip install '{self.package}>={low}.{first},<{high}.{last + 1}'"

    def holds(self, version: str) -> bool:
        """Return whether a version is in the range; a newer version or a pre-release is not.

        Args:
            version: version in the package's own form, such as "2.13.0+cpu".

        Raises:
            UsageError: the version is older.
        """
        numbers = re.match(r"(\d+)\.(\d+)(?:\.\d+)*(.*)", version)
        release = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
        if release < self.oldest:
            oldest = ".".join(map(str, self.oldest))
            raise UsageError(f"wrappers.torch needs {self.title} {oldest} or newer (tested: {self.words}), got {version}", self.remedy)
        is_final = numbers is not None and re.match(r"(\.?post\d+)?(\+.*)?$", numbers[3]) is not None
        return is_final and release <= self.newest

    def refusal(self, version: str, reason: str) -> UsageError:
        """Return the error for a release outside the range that fails a check."""
        return UsageError(f"{self.title} {version} is not among the tested releases, {self.words}, and {reason}", self.remedy)


TORCH: Final = Supported("PyTorch", "torch", (2, 12), (2, 15))
TRANSFORMERS: Final = Supported("transformers", "transformers", (5, 23), (5, 24))
ACCELERATE: Final = Supported("accelerate", "accelerate", (1, 14), (1, 15))

_LOCK: Final = threading.RLock()
_done: set[str] = set()


def check_release(tested: Supported, version: str, find_fault: Callable[[], str | None] | None = None) -> None:
    """Refuse a release that is older than the tested ones; check one outside the range and warn about it, once in a process.

    Args:
        tested: the range.
        version: the installed release.
        find_fault: check of a release outside the range; it returns a fault as words after "and", or None. It may make sessions, whose releases are
            not checked meanwhile. None if there is no check.

    Raises:
        UsageError: the release is older, or has a fault.
    """
    if tested.holds(version):
        return
    with _LOCK:
        if (key := f"{tested.package} {version}") in _done:
            return
        _done.add(key)
        try:
            if find_fault is not None and (fault := find_fault()) is not None:
                raise tested.refusal(version, fault)
        except BaseException:
            _done.discard(key)
            raise
        outcome = "nothing checks it" if find_fault is None else "a self-check has passed"
        print(f"nntask: {tested.title} {version} is not among the tested releases, {tested.words}; {outcome}", file=sys.stderr)


def check_torch(session: type[Any]) -> None:
    """Check the installed release of PyTorch; the first session does so.

    Args:
        session: class of sessions, with which the self-check trains; passed in because its module imports this one.

    Raises:
        UsageError: the release is older than the tested ones, or newer and lacks parts that a session uses.
    """
    import torch

    from .insides import find_fault

    check_release(TORCH, str(torch.__version__), partial(find_fault, session))


def check_inductor() -> None:
    """Check that a PyTorch outside the tested range has the parts of Inductor that sessions use; the first session with compiled chains does so.

    Raises:
        UsageError: it lacks a name.
    """
    import torch

    from .insides import find_fault_of_inductor

    installed = str(torch.__version__)
    if not TORCH.holds(installed) and (fault := find_fault_of_inductor()) is not None:
        raise TORCH.refusal(installed, fault)


def check_packages(session: type[Any]) -> None:
    """Check the releases of PyTorch and transformers that are installed, for `nntask train` and `nntask plan`.

    Args:
        session: class of sessions, the argument of `check_torch`.

    Raises:
        UsageError: a release is older than the tested ones, or PyTorch is newer and lacks parts that a session uses.
    """
    import transformers

    check_torch(session)
    check_release(TRANSFORMERS, str(transformers.__version__))


def refuse_older(packages: Sequence[Supported] = (TORCH, TRANSFORMERS)) -> None:
    """Refuse installed packages that are older than the tested releases, without importing them.

    Args:
        packages: packages to check; by default those that `nntask train` needs.

    Raises:
        UsageError: a package is older.
    """
    for tested, installed in _installed(packages):
        tested.holds(installed)


def explain(error: Exception, *, of_trainer: bool = False) -> None:
    """Raise an error about releases if a module of this package cannot be imported and an installed release is not a tested one.

    Args:
        error: error of the import.
        of_trainer: whether the module is the Trainer's, which needs transformers and accelerate too.

    Raises:
        UsageError: a package is older than the tested releases, or outside of them.
    """
    for tested, installed in _installed((TORCH, TRANSFORMERS, ACCELERATE) if of_trainer else (TORCH,)):
        if not tested.holds(installed):
            raise tested.refusal(installed, f"an import that wrappers.torch needs failed ({error})") from error


def _installed(packages: Sequence[Supported]) -> Iterator[tuple[Supported, str]]:
    """Yield the packages that are installed, with their versions."""
    for tested in packages:
        with suppress(PackageNotFoundError):
            yield tested, version(tested.package)
