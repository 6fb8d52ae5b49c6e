"""Parsers and formatters of byte sizes, rates, counts and durations in the form that people write."""

from __future__ import annotations

import math
import re
from typing import Final

from ..errors import UsageError

LARGEST: Final = (1 << 63) - 1
"""Largest number that fits every counter, seed and address."""
_UNITS: Final = {
    "": 1,
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_BY_LOWER: Final = {unit.lower(): unit for unit in _UNITS}
_WORDS: Final = "B, KB, KiB, MB, MiB, GB, GiB, TB or TiB"
_NUMBER: Final = r"\s*(\d{1,3}(?:,\d{3})+|\d+(?:\.\d+)?)\s*"
_SIZE: Final = re.compile(_NUMBER + r"([A-Za-z]*)\s*", re.ASCII)
_BITS: Final = re.compile(_NUMBER + r"((?:[KMGTkmgt][Ii]?)?)b(?:its?)?(?:/s|ps)?\s*", re.ASCII)

_FRACTION: Final = re.compile(r"\s*(0?\.\d+|1\.0*|0\.\d*)\s*", re.ASCII)


def parse_size(text: str, what: str) -> int:
    """Return the bytes in `text`, e.g. "1.5GiB". A bare number is bytes, and case does not matter. Whole numbers may have commas, as messages print
    them: "8,392,704 B".

    Args:
        what: name of the flag, for the message.

    Raises:
        UsageError: the text is not a size, or is less than one byte.
    """
    match = _SIZE.fullmatch(text)
    unit = _BY_LOWER.get(match[2].lower()) if match else None
    if match is None or unit is None:
        number = match[1] if match else "2"
        letter = match[2][:1].upper() if match else ""
        example = f"{number}{letter}iB" if letter in ("K", "M", "T") else f"{number}GiB"
        raise UsageError(f"must be a size in {_WORDS}, got {text!r}", f"for example {example}", flag=what)
    size = float(match[1].replace(",", "")) * _UNITS[unit]
    if size > LARGEST:
        raise UsageError(f"must be at most {LARGEST} bytes, got {text!r}", "for example 2GiB", flag=what)
    nbytes = int(size)
    if nbytes < 1:
        raise UsageError(f"must be at least 1 byte, got {text!r}", "for example 2GiB", flag=what)
    return nbytes


def parse_rate(text: str, what: str) -> float:
    """Return the bytes per second in `text`, e.g. "55GB/s": a size with its unit, with or without the /s. A lower-case b means bits.

    Args:
        what: name of the flag, for the message.

    Raises:
        UsageError: the text is not a rate, has no unit, or counts bits.
    """
    rule = f"must be bytes per second, got {text!r}"
    if bits := _BITS.fullmatch(text):
        number, unit = float(bits[1].replace(",", "")), bits[2]
        meant = f"{number / 8:.15g}{unit.upper().replace('I', 'i')}B"
        raise UsageError(rule, f"bits? {number:.15g} {unit}b/s are {meant}/s" if is_size(meant) else "for example 55GB/s", flag=what)
    size = text.strip().removesuffix("/s").rstrip()
    if size[-1:].isdigit():
        meant = f"{size}GB"
        raise UsageError(f"{rule}, which has no unit", f"for example {meant if is_size(meant) else '55GB'}/s", flag=what)
    try:
        return float(parse_size(size, what))
    except UsageError:
        raise UsageError(rule, "for example 55GB/s", flag=what) from None


def is_size(text: str) -> bool:
    """Return whether `parse_size` accepts the text."""
    try:
        parse_size(text, "")
    except UsageError:
        return False
    return True


def fraction_of(text: str) -> float | None:
    """Return the share of a card in a text such as 0.25; None if the text is a size.

    Raises:
        UsageError: the number is not a share.
    """
    if _FRACTION.fullmatch(text) is None:
        return None
    share = float(text)
    if not 0 < share <= 1:
        raise UsageError(f"must be a size, or a fraction of the card above 0 and up to 1.0, got {text}", "for example 0.5", flag="--gpu-memory")
    return share


def _scaled(nbytes: float) -> tuple[float, str]:
    """Return `nbytes` in the largest binary unit that leaves at least 1, and that unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1000:
            return nbytes, unit
        nbytes /= 1024
    return nbytes, "TiB"


def format_size(nbytes: float) -> str:
    """Return `nbytes` in the largest binary unit that leaves at least 1, with two or three digits."""
    size, unit = _scaled(nbytes)
    return f"{size:.3g} {unit}"


def _least(nbytes: int) -> tuple[float, str]:
    """Return `nbytes` rounded up to the digits of `format_size`, and its unit."""
    size, unit = _scaled(nbytes)
    scale = 100 if size < 10 else 10 if size < 100 else 1
    return math.ceil(size * scale) / scale, unit


def format_least(nbytes: int) -> str:
    """Return `nbytes` like `format_size` but rounded up, so that `parse_size` reads no less: for budgets that users copy from messages."""
    size, unit = _least(nbytes)
    return f"{size:.15g} {unit}"


def rounded_up(nbytes: int) -> int:
    """Return the bytes in the text of `format_least`."""
    size, unit = _least(nbytes)
    return int(size * _UNITS[unit])


def flag_size(nbytes: int) -> str:
    """Return `format_least` as one word, for flags in messages."""
    return format_least(nbytes).replace(" ", "")


def format_count(number: float) -> str:
    """Return a count in at most four characters and a letter: 950, 2.0k, 1.3M."""
    for unit in ("", "k", "M", "G"):
        if number < 1000:
            return f"{number:.0f}{unit}" if not unit or number >= 100 else f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:.1f}T"


def format_duration(seconds: float) -> str:
    """Return seconds as 45s, 1m36s or 2h05m."""
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
