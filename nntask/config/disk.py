"""Parser of --disk: the directory and the size of a disk tier."""

from __future__ import annotations

from pathlib import Path

from ..errors import UsageError
from ..io.units import is_size, parse_size


def disk_of(text: str) -> tuple[Path, int | None] | None:
    """Return directory and size in bytes of --disk; None for no disk tier.

    Raises:
        UsageError: the text has no directory, a malformed size, or a size in place of the directory.
    """
    if not text:
        return None
    directory, colon, size = text.rpartition(":")
    if not colon or "/" in size:
        if is_size(text) and not Path(text).exists():
            raise UsageError(
                f"must be DIR or DIR:SIZE, got {text!r}, which is a size and not an existing directory",
                f"for example scratch:{text}, or ./{text} for a directory of that name",
                flag="--disk",
            )
        return Path(text), None
    if not directory or not size:
        raise UsageError(f"must be DIR or DIR:SIZE, got {text!r}", "for example scratch:20GB", flag="--disk")
    if is_size(directory.rpartition(":")[2]) and not Path(directory).exists():
        raise UsageError(
            f"must be DIR or DIR:SIZE, got {text!r}, which has two sizes, and there is no directory {directory}",
            f"for example scratch:{size}",
            flag="--disk",
        )
    return Path(directory), parse_size(size, "--disk")


def imaginary_disk_of(text: str) -> int | None:
    """Return the bytes of --disk for an imaginary machine; None for no disk tier.

    Raises:
        UsageError: the text has no size.
    """
    if is_size(text):
        return parse_size(text, "--disk")
    disk = disk_of(text)
    if disk is None:
        return None
    if disk[1] is None:
        raise UsageError(f"must be SIZE or DIR:SIZE of an imaginary machine, got {text!r}", "for example --disk 2TB", flag="--disk")
    return disk[1]


def has_size(text: str) -> bool:
    """Return whether --disk gives a size of the disk tier, with or without a directory."""
    try:
        return imaginary_disk_of(text) is not None
    except UsageError:
        return False
