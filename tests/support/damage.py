"""Strategies of Hypothesis that damage small valid files: bytes without regard to what they mean, and values of JSON or of metadata."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from hypothesis import strategies as st

_NUMBERS: Final = tuple(value.to_bytes(width, "little") for width in (1, 2, 4, 8) for value in (0, 1, (1 << 8 * width - 1) - 1, (1 << 8 * width) - 1))
_DIGITS: Final = (
    b"-1",
    b"0",
    b"1e999",
    b"9" * 400,
    b"9" * 5000,
    b"NaN",
    b"-Infinity",
    b"4294967296",
    b"9223372036854775807",
    b"1.5",
    b"1e-400",
    b"null",
)
_MARKS: Final = (b'"', b"{", b"}", b"[", b"]", b",", b":", b"\0", b"\n", b"\xff\xfe", b"\xef\xbb\xbf", b"\x1b[31m", b"[" * 3000, b'{"a":' * 3000)
EXTREMES: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, -1, 1, 2, 1.5, -0.0, 1e308, float("nan"), float("inf"), float("-inf")),
    *((1 << 31) - 1, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, 1 << 64, -(1 << 63), 10**30, 10**400),
    *("", "x", "x" * 5000, "\ud800", "\x1b]0;a\x07\n", "../x", "/dev/zero", "0", "NaN", "\0", "{}", "[" * 2000),
    *([], {}, [[]], [None], [1, 2, 3], ["a"] * 500, [[[[[[]]]]]], {"": {}}, {"a": [1]}, [-1], [1 << 62] * 3, [{}] * 100),
)
"""Values that stand where others are expected."""


def _position(draw: Callable[..., Any], size: int) -> int:
    """A position in a file, heads preferred."""
    return min(size, draw(st.one_of(st.integers(0, 64), st.integers(0, max(size, 1)))))


def _span(draw: Callable[..., Any], raw: bytearray) -> slice:
    first = _position(draw, len(raw))
    return slice(first, first + draw(st.integers(1, 64)))


def _change(draw: Callable[..., Any], raw: bytearray) -> None:
    """Damage some bytes in place."""
    kind, span = draw(st.sampled_from(["bit", "byte", "cut", "leave out", "insert", "repeat", "number", "digits", "mark", "move"])), _span(draw, raw)
    first = span.start
    if kind == "bit" and first < len(raw):
        raw[first] ^= 1 << draw(st.integers(0, 7))
    elif kind == "byte" and first < len(raw):
        raw[first] = draw(st.integers(0, 255))
    elif kind == "cut":
        del raw[first:]
    elif kind == "leave out":
        del raw[span]
    elif kind == "insert":
        raw[first:first] = draw(st.binary(min_size=1, max_size=16))
    elif kind == "repeat":
        raw[first:first] = raw[span] * draw(st.sampled_from([1, 2, 10, 200]))
    elif kind == "number":
        value = draw(st.sampled_from(_NUMBERS))
        raw[first : first + len(value)] = value
    elif kind == "digits":
        numbers = list(re.finditer(rb"-?\d+(\.\d+)?", raw[:100_000]))
        if numbers:
            chosen = numbers[draw(st.integers(0, len(numbers) - 1))]
            raw[chosen.start() : chosen.end()] = draw(st.sampled_from(_DIGITS))
    elif kind == "mark":
        raw[first:first] = draw(st.sampled_from(_MARKS))
    else:
        part = bytes(raw[span])
        del raw[span]
        at = _position(draw, len(raw))
        raw[at:at] = part


@st.composite
def damaged(draw: Any, raw: bytes, most: int = 4) -> bytes:
    """A file with one to `most` changes of its bytes."""
    found = bytearray(raw)
    for _ in range(draw(st.integers(1, most))):
        _change(draw, found)
    return bytes(found)


def random_bytes(magic: bytes = b"") -> st.SearchStrategy[bytes]:
    """Random bytes, half of them behind the first bytes of the format."""
    return st.one_of(st.binary(max_size=200), st.binary(max_size=200).map(lambda rest: magic + rest))


def _paths(value: Any, before: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to all values inside a value; of long lists only to the first."""
    found = [before] if before else []
    entries = value.items() if isinstance(value, Mapping) else enumerate(value[:8]) if isinstance(value, list) else ()
    for key, each in entries:
        found += _paths(each, (*before, key))
    return found


@st.composite
def other_values(draw: Any, whole: Any, most: int = 3) -> Any:
    """A value of JSON with one to `most` changes: values replaced, left out, repeated, moved, or nested."""
    found = copy.deepcopy(whole)
    for _ in range(draw(st.integers(1, most))):
        paths = _paths(found)
        if not paths:
            return draw(st.sampled_from(EXTREMES))
        *way, last = draw(st.sampled_from(paths))
        inside = found
        for key in way:
            inside = inside[key]
        kind = draw(st.sampled_from(["replace", "replace", "replace", "leave out", "repeat", "nest", "rename", "swap", "scale"]))
        _change_value(draw, kind, inside, last, found, paths)
    return found


def _change_value(draw: Callable[..., Any], kind: str, inside: Any, key: Any, whole: Any, paths: list[tuple[Any, ...]]) -> None:
    value = inside[key]
    if kind == "leave out":
        del inside[key]
    elif kind == "repeat" and isinstance(value, list | str):
        inside[key] = value * draw(st.sampled_from([0, 2, 50]))
    elif kind == "nest":
        for _ in range(draw(st.sampled_from([1, 3, 60, 500]))):
            value = [value]
        inside[key] = value
    elif kind == "rename" and isinstance(inside, dict):
        inside[draw(st.sampled_from(["", "x", "\x1b[0m", "__class__", "a" * 3000, f"{key} "]))] = inside.pop(key)
    elif kind == "swap":
        other = whole
        for step in draw(st.sampled_from(paths)):
            other = other[step] if _has(other, step) else other
        inside[key] = copy.deepcopy(other)
    elif kind == "scale" and isinstance(value, int | float):
        factor = draw(st.sampled_from([-1, 0, 2, 1000, 10**9]))
        inside[key] = type(value)(value * factor)
    else:
        inside[key] = copy.deepcopy(draw(st.sampled_from(EXTREMES)))


def _has(value: Any, step: Any) -> bool:
    return (isinstance(value, dict) and step in value) or (isinstance(value, list) and isinstance(step, int) and step < len(value))
