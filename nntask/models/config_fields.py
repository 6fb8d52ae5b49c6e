"""Fields of configs with their rules: one declaration has a field's check, its default and its example in error messages.

A value of the wrong JSON type is an error and is never converted, apart from whole numbers where a float belongs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import MISSING, field
from functools import partial
from typing import Any, Final

from ..errors import UsageError
from .config_checks import (
    LARGEST_CLASSES,
    LARGEST_COUNT,
    LARGEST_DEPTH,
    check_choice,
    check_count,
    check_positive,
    check_probability,
    check_switch,
    shown,
)

Check = Callable[[str, Any, str], None]
"""(key, value, source): raises `UsageError` if the value breaks its rule."""

ACTIVATIONS: Final = {
    "gelu_new": "gelu_new",
    "gelu_pytorch_tanh": "gelu_new",
    "gelu_fast": "gelu_new",
    "gelutanh": "gelu_new",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
"""Name of an activation in configs -> name of its kernel. The first four names are the tanh approximation of GELU."""


def _field(check: Check, default: Any, *, or_null: bool = False, convert: Callable[[Any], Any] | None = None, is_token: bool = False) -> Any:
    """Declare a field with a check; null is legal if it is the default or allowed."""
    takes_null = or_null or default is None

    def check_value(key: str, value: Any, source: str) -> None:
        if value is not None or not takes_null:
            check(key, value, source)

    return field(default=default, metadata={"check": check_value, "convert": convert, "is_token": is_token})


def count(usual: int, default: Any = MISSING, most: int = LARGEST_COUNT, *, or_null: bool = False, or_zero: bool = False) -> Any:
    """Declare a whole number from 1 to `most`; 0 is legal if it is allowed. Error messages give `usual` as an example."""

    def check(key: str, value: Any, source: str) -> None:
        if not (or_zero and type(value) is int and value == 0):
            check_count(key, value, source, usual, most)

    return _field(check, default, or_null=or_null)


def depth(usual: int, default: Any = MISSING) -> Any:
    """Declare a number of blocks."""
    return count(usual, default, LARGEST_DEPTH)


def classes(usual: int, default: Any = MISSING, *, or_zero: bool = False) -> Any:
    """Declare a number of classes."""
    return count(usual, default, LARGEST_CLASSES, or_zero=or_zero)


def positive(usual: float, default: Any = MISSING, *, or_null: bool = False) -> Any:
    """Declare a number above 0."""
    return _field(partial(check_positive, usual=usual), default, or_null=or_null, convert=float)


def probability(default: float | None) -> Any:
    """Declare a number in [0, 1)."""
    return _field(check_probability, default, convert=float)


def switch(default: bool | None) -> Any:
    """Declare a value that is true or false."""
    return _field(check_switch, default)


def choice(names: Collection[str], default: Any = MISSING) -> Any:
    """Declare a choice from some strings."""
    return _field(partial(check_choice, names=names), default)


def token(default: int | None) -> Any:
    """Declare the id of a token, or null; `ModelConfig` checks that the vocabulary has it."""

    def check(key: str, value: Any, source: str) -> None:
        if type(value) is not int or value < 0:
            raise UsageError(f"{key} in {source} must be the id of a token, 0 or above, or null, got {shown(value)}; write for example 0")

    return _field(check, default, or_null=True, is_token=True)


def layer_kinds(kinds: Collection[str]) -> Any:
    """Declare a list with one of `kinds` for every block, or null."""

    def check(key: str, value: Any, source: str) -> None:
        if not isinstance(value, (list, tuple)) or any(kind not in kinds for kind in value):
            raise UsageError(f"{key} in {source} must be a list of {' and '.join(kinds)}, one for every layer, got {shown(value)}; correct it")

    return _field(check, None, convert=tuple)
