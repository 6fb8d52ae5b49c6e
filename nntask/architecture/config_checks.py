"""Fields of configs with their rules: checks of values in a JSON config, one function per rule, and declarations of fields with a check.

Each error names the key, the source, the rule, the value with its JSON type, and a legal value. In all functions `key` is the key of the value, and
`source` is the name of the file or object that holds it. A check raises `UsageError` if the rule is broken. Values of
the wrong JSON type are never converted, apart from whole numbers where a float belongs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, field
from functools import partial
from math import isqrt
from pathlib import Path
from typing import Any, Final

from ..errors import DataError, UsageError
from ..io.json_file import read_json

LARGEST_COUNT: Final = (1 << 31) - 1
LARGEST_DEPTH: Final = 1 << 14
LARGEST_CLASSES: Final = 1 << 20
"""Largest value of any count, largest number of blocks, and largest number of classes. Blocks have a limit of their own because their Python objects
take host memory before the memory check can refuse the model."""


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


def config_values(path: str | os.PathLike[str], advice: str = "check --config-path") -> tuple[Any, str]:
    """Return the decoded JSON of a config file, and the file's name for error messages.

    Args:
        path: the file, or the directory of a ``config.json``.
        advice: remedy in the error message about a file that cannot be read.

    Raises:
        DataError: the file cannot be read or is not JSON.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    return read_json(file, "the config", advice), str(file)


def check_object(values: object, source: str, key: str) -> None:
    """Check that `values` is a JSON object; the error names `key` as an example of its keys."""
    if not isinstance(values, Mapping):
        raise UsageError(f"{source} must be a JSON object with keys like {key}, got {json_type(values)}", "write {...}")


def check_count(key: str, value: object, source: str, usual: int, most: int = LARGEST_COUNT) -> None:
    """Check that `value` is a whole number from 1 to `most`.

    Args:
        key: the value's key.
        value: the value.
        source: the file or object that holds the value.
        usual: a legal value, for the error message.
        most: the largest legal value.
    """
    if type(value) is not int:
        try:
            near = int(value)  # type: ignore[call-overload]
        except (TypeError, ValueError, OverflowError):
            near = 0
        near = near if 0 < near <= most and type(value) is not bool else usual
        raise UsageError(f"{key} in {source} must be a whole number, got {shown(value)}", f'write for example "{key}": {near}')
    if value < 1:
        raise UsageError(f"{key} in {source} must be at least 1, got {_short(value)}", "the nearest legal value is 1")
    if value > most:
        raise UsageError(f"{key} in {source} must be at most {most}, got {_short(value)}", f"the nearest legal value is {most}")


def check_positive(key: str, value: object, source: str, usual: float) -> None:
    """Check that `value` is a finite number above 0; the error suggests `usual`."""
    number = _number(key, value, source, usual)
    if not 0 < number < float("inf"):
        raise UsageError(f"{key} in {source} must be positive and finite, got {_short(value)}", f'write for example "{key}": {usual}')


def check_probability(key: str, value: object, source: str) -> None:
    """Check that `value` is a number in [0, 1)."""
    if not 0 <= _number(key, value, source, 0.1) < 1:
        raise UsageError(f"{key} in {source} must be at least 0 and below 1, got {_short(value)}", "write 0 for no dropout")


def _number(key: str, value: object, source: str, usual: float) -> float:
    if type(value) not in (int, float):
        raise UsageError(f"{key} in {source} must be a number, got {shown(value)}", f'write for example "{key}": {usual}')
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:
        return float("inf")


def check_switch(key: str, value: object, source: str) -> None:
    """Check that `value` is true or false."""
    if type(value) is not bool:
        raise UsageError(f"{key} in {source} must be true or false, got {shown(value)}", "write true or false without quotes")


def check_choice(key: str, value: object, source: str, names: Collection[str]) -> None:
    """Check that `value` is one of the strings `names`."""
    if type(value) is not str or value not in names:
        raise UsageError(f"{key} in {source} must be one of {', '.join(names)}, got {shown(value)}", "choose one of them")


def check_num_weights(asked: int, held: int, source: object, files: str, advice: str) -> None:
    """Check, before memory is taken for a config's sizes, that the config needs about as many weights as its files have. The head is exempt from the
    count, because files may lack it; it is no larger than all the weights that the files have.

    Args:
        asked: number of weights of the config.
        held: number of weights in the files.
        source: name of the config's source, for the error message.
        files: name of the files with a verb, such as "the files hold".

    Raises:
        DataError: the config needs far more.
    """
    if asked > 2 * held:
        raise DataError(f"{source} asks for {asked:,} weights, and {files} {held:,}", advice)


def check_divisible(key: str, value: int, by_key: str, by: int, source: str) -> None:
    """Check that `value` is a multiple of `by`; the message names the divisor of `value` nearest to `by`."""
    if value % by:
        halves = [n for n in range(1, isqrt(value) + 1) if value % n == 0]
        near = min((*halves, *(value // n for n in halves)), key=lambda n: (abs(n - by), n))
        raise UsageError(
            f"{key} in {source} must be divisible by {by_key}, got {key} {value} and {by_key} {by}", f"the nearest legal {by_key} is {near}"
        )


def _short(value: object) -> str:
    """Return a value as text, shortened to about 40 characters."""
    digits = str(value)
    return digits if len(digits) <= 40 else f"{digits[:20]}... of {len(digits)} characters"


def shown(value: object) -> str:
    """Return a value as JSON text with its JSON type in parentheses."""
    is_json = value is None or isinstance(value, (bool, int, float, str, list, dict))
    return f"{json.dumps(value)[:80]} ({json_type(value)})" if is_json else f"{value!r} of type {type(value).__name__}"


def json_type(value: object) -> str:
    """Return the JSON type of a value in words."""
    kinds: dict[type, str] = {bool: "a boolean", int: "a whole number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return "null" if value is None else kinds.get(type(value), type(value).__name__)


def _field(
    check: Check, default: Any, *, or_null: bool = False, null: Any = None, convert: Callable[[Any], Any] | None = None, is_token: bool = False
) -> Any:
    """Declare a field with a check; null is legal if it is the default, or with `or_null`, and is read as the value `null`."""
    takes_null = or_null or default is None

    def check_value(key: str, value: Any, source: str) -> None:
        if value is not None or not takes_null:
            check(key, value, source)

    return field(default=default, metadata={"check": check_value, "convert": convert, "null": null, "is_token": is_token})


def count(usual: int, default: Any = MISSING, most: int = LARGEST_COUNT, *, or_null: bool = False, or_zero: bool = False) -> Any:
    """Declare a config field: a whole number from 1 to `most`, or 0 with `or_zero`. Error messages give `usual` as an example."""

    def check(key: str, value: Any, source: str) -> None:
        if not (or_zero and type(value) is int and value == 0):
            check_count(key, value, source, usual, most)

    return _field(check, default, or_null=or_null)


def depth(usual: int, default: Any = MISSING) -> Any:
    """Declare a config field: a number of blocks, from 1 to `LARGEST_DEPTH`."""
    return count(usual, default, LARGEST_DEPTH)


def classes(usual: int, default: Any = MISSING, *, or_zero: bool = False) -> Any:
    """Declare a config field: a number of classes, from 1 to `LARGEST_CLASSES`, or 0 with `or_zero`."""
    return count(usual, default, LARGEST_CLASSES, or_zero=or_zero)


def positive(usual: float, default: Any = MISSING, *, or_null: bool = False) -> Any:
    """Declare a config field: a number above 0."""
    return _field(partial(check_positive, usual=usual), default, or_null=or_null, convert=float)


def probability(default: float | None) -> Any:
    """Declare a config field: a number in [0, 1)."""
    return _field(check_probability, default, convert=float)


def factor(default: float) -> Any:
    """Declare a config field: a finite number, 0 or above."""

    def check(key: str, value: Any, source: str) -> None:
        if not 0 <= _number(key, value, source, default) < float("inf"):
            raise UsageError(f"{key} in {source} must be 0 or above, and finite, got {_short(value)}", f'write for example "{key}": {default}')

    return _field(check, default, convert=float)


def switch(default: bool | None) -> Any:
    """Declare a config field: true or false."""
    return _field(check_switch, default)


def choice(names: Collection[str], default: Any = MISSING) -> Any:
    """Declare a config field: one of the strings `names`."""
    return _field(partial(check_choice, names=names), default)


def token(default: int | None) -> Any:
    """Declare a config field: the id of a token, or null; `ModelConfig` checks that the vocabulary has it."""

    def check(key: str, value: Any, source: str) -> None:
        if type(value) is not int or value < 0:
            raise UsageError(f"{key} in {source} must be the id of a token, 0 or above, or null, got {shown(value)}", "write for example 0")

    return _field(check, default, or_null=True, is_token=True)


def layers() -> Any:
    """Declare a config field: a list of numbers of blocks; empty by default and for null."""

    def check(key: str, value: Any, source: str) -> None:
        if not isinstance(value, (list, tuple)) or any(type(layer) is not int or layer < 0 for layer in value):
            raise UsageError(f"{key} in {source} must be a list of numbers of blocks from 0, got {shown(value)}", "write for example [0]")

    return _field(check, (), or_null=True, null=(), convert=tuple)


def layer_kinds(kinds: Collection[str]) -> Any:
    """Declare a config field: a list with one of `kinds` for every block, or null."""

    def check(key: str, value: Any, source: str) -> None:
        if not isinstance(value, (list, tuple)) or any(kind not in kinds for kind in value):
            raise UsageError(f"{key} in {source} must be a list of {' and '.join(kinds)}, one for every layer, got {shown(value)}", "correct it")

    return _field(check, None, convert=tuple)
