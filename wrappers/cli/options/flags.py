"""Flags as text: one table made from a settings dataclass, and a plain message for each mistake.

The same table reads the command line, a TOML file and the environment, so all three accept the same names and values with the same messages. Tyro
builds the help and the settings object; a value that tyro would refuse is refused here first, in one sentence.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from nntask import UsageError

OPTIONAL_VALUE: Final = {"resume": "auto"}
_EVENTS: Final = "is not offered: --report-to tensorboard writes event files into the run's directory, without a server; use that, or drop it"
ELSEWHERE: Final = {
    "logger": _EVENTS,
    "logger-server-addr": _EVENTS,
    "logger-server-port": _EVENTS,
    "force": "belongs to nntask export; nothing else overwrites anything, give a new directory",
    "shard-size": "belongs to nntask export; --save-checkpoint writes one file",
}
"""Flags of one command, or of NNTile, that users may type in another: the right command, or an equivalent."""


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag.

    Args:
        name: name without dashes.
        group: field of the settings that holds the flag's group; "" without a group.
        field: field of the group.
        kind: type annotation of the field.
    """

    name: str
    group: str
    field: str
    kind: Any

    @property
    def value_type(self) -> Any:
        """Type of the values, without ``None``."""
        if isinstance(self.kind, types.UnionType) or typing.get_origin(self.kind) is typing.Union:
            return next(k for k in typing.get_args(self.kind) if k is not type(None))
        return self.kind

    @property
    def choices(self) -> tuple[str, ...]:
        """Allowed words; empty if any text is allowed."""
        return typing.get_args(self.value_type) if typing.get_origin(self.value_type) is Literal else ()

    def convert(self, text: str, source: str) -> Any:
        """Return the value of a text.

        Args:
            text: the text.
            source: name of the flag, key or variable, for messages.

        Raises:
            UsageError: the text is not a valid value of the flag.
        """
        if self.choices:
            if text not in self.choices:
                near = difflib.get_close_matches(text, self.choices, 1)
                advice = f"did you mean {near[0]}?" if near else "choose one of them"
                raise UsageError(f"{source} must be one of {', '.join(self.choices)}, got {text!r}; {advice}")
            return text
        if self.value_type is bool:
            word = text.lower()
            if word not in ("true", "false", "1", "0", "yes", "no"):
                raise UsageError(f"{source} must be true or false, got {text!r}; write one of them")
            return word in ("true", "1", "yes")
        if self.value_type in (int, float):
            try:
                return self.value_type(text)
            except ValueError:
                what = "a whole number" if self.value_type is int else "a number"
                raise UsageError(f"{source} must be {what}, got {text!r}; write one") from None
        return text


Table = dict[str, Flag]


def table_of(settings: type[Any]) -> Table:
    """Return the flags of a dataclass whose fields are values, or dataclasses of values."""
    table: Table = {}
    for name, kind in typing.get_type_hints(settings).items():
        if dataclasses.is_dataclass(kind):
            for inner, inner_kind in typing.get_type_hints(kind).items():
                flag = inner.replace("_", "-")
                table[flag] = Flag(flag, name, inner, inner_kind)
        else:
            flag = name.replace("_", "-")
            table[flag] = Flag(flag, "", name, kind)
    return table


def unknown(name: str, table: Mapping[str, Flag], source: str) -> UsageError:
    """Return the error for an unknown flag, with the most similar flags."""
    elsewhere = ELSEWHERE.get(name)
    if elsewhere is not None:
        return UsageError(f"{source.removeprefix('flag ')} {elsewhere}")
    near = difflib.get_close_matches(name, list(table), 3)
    best = [f"--{each}" for each in near if _likeness(name, each) > _likeness(name, near[0]) - 0.1]  # nearly as similar as the best
    return UsageError(f"unknown {source}" + (f"; did you mean {' or '.join(best)}?" if best else "; see --help for all flags"))


def _likeness(name: str, other: str) -> float:
    """Return the similarity of two names, from 0 to 1 for equal names, in the metric of `get_close_matches`."""
    return difflib.SequenceMatcher(None, other, name).ratio()


def scan(argv: Sequence[str], table: Table, positional: int = 0) -> tuple[dict[str, Any], list[str]]:
    """Read a command line.

    Underscores equal dashes, ``--flag=value`` equals ``--flag value``, ``--no-flag`` turns a switch off. The last of equal flags counts.

    Args:
        argv: the words of the command line.
        table: the known flags.
        positional: most words that are no flags.

    Returns:
        flag -> value, and the words that are no flags.

    Raises:
        UsageError: an unknown flag, a missing or wrong value, or more words than `positional`.
    """
    values: dict[str, Any] = {}
    words: list[str] = []
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        if not token.startswith("--") or token == "--":
            words.append(token)
            if len(words) > positional:
                raise UsageError(f"unexpected word {token!r}; flags begin with --, see --help")
            continue
        name, equals, text = token[2:].partition("=")
        name = name.replace("_", "-")
        switch = table.get(name.removeprefix("no-")) if name.startswith("no-") else None
        if switch is not None and switch.value_type is bool:
            if equals:
                raise UsageError(f"--{name} takes no value, got {text!r}; write --{name} to turn it off, or --{switch.name}")
            values[switch.name] = False
            continue
        flag = table.get(name)
        if flag is None:
            raise unknown(name, table, f"flag --{name}")
        if flag.value_type is bool and not equals:
            values[name] = True
            continue
        if not equals:
            if rest and not rest[0].startswith("--"):
                text = rest.pop(0)
            elif name in OPTIONAL_VALUE:
                text = OPTIONAL_VALUE[name]
            else:
                raise UsageError(f"--{name} needs a value, as in --{name}={_example(flag)}")
        values[name] = flag.convert(text, f"--{name}")
    return values, words


def _example(flag: Flag) -> str:
    if flag.choices:
        return flag.choices[0]
    return {int: "1", float: "0.1"}.get(flag.value_type, "VALUE")


def from_toml(text: str, path: str, table: Table) -> dict[str, Any]:
    """Return the flags set in a TOML file, flat or in sections; the names of sections are ignored.

    Raises:
        UsageError: the text is not TOML, a key is not a flag, or a value is wrong.
    """
    import tomllib

    try:
        content = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not a TOML file: {error}; mend that line") from None
    pairs: list[tuple[str, Any]] = []
    for key, value in content.items():
        pairs += value.items() if isinstance(value, dict) else [(key, value)]
    values = {}
    for key, value in pairs:
        name = key.replace("_", "-")
        if name not in table:
            raise unknown(name, table, f"key {key!r} in {path}")
        if isinstance(value, (dict, list)):
            raise UsageError(f"{key} in {path} must be a single value, got {value!r}; write one")
        word = str(value).lower() if isinstance(value, bool) else str(value)
        values[name] = table[name].convert(word, f"{key} in {path}")
    return values


def merge(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `lower` and `upper`; `upper` wins. If `upper` names the model in one way, the other ways in `lower` are dropped."""
    ways = {"model", "config-path", "init-from"}
    merged = {name: value for name, value in lower.items() if name not in ways or not ways & set(upper)}
    merged.update(upper)
    return merged


def build(settings: Any, values: Mapping[str, Any], table: Table) -> Any:
    """Return a copy of the dataclass `settings` with `values` set."""
    groups: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        groups.setdefault(table[name].group, {})[table[name].field] = value
    changes = groups.pop("", {})
    changes.update({group: dataclasses.replace(getattr(settings, group), **inner) for group, inner in groups.items()})
    return dataclasses.replace(settings, **changes)
