"""Counts of function calls while a program runs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType, FunctionType
from typing import cast


def count_calls(program: Callable[[], object], *functions: Callable[..., object]) -> list[int]:
    """The number of calls of each function while a program runs, in the calling thread and in threads that it starts."""
    counted = {cast(FunctionType, function).__code__: 0 for function in functions}

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code in counted:
            counted[frame.f_code] += 1

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        program()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return list(counted.values())


def num_calls(program: Callable[[], object]) -> int:
    """The number of calls of any function while a program runs, in the calling thread; each item that a generator yields is one as well."""
    count = 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        program()
    finally:
        sys.setprofile(None)
    return count
