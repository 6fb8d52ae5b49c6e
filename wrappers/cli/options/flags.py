"""Flags as text: a table made from a settings dataclass, and one plain sentence for each mistake.

The same table reads the command line, a TOML file and the environment, so all three accept the same values. Every value is checked here; tyro only
draws the help. Flags that earlier versions had are answered with their replacement, and translated in a TOML file (`nntask.config.old_settings`).
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from nntask import UsageError

from ..output import complain

if TYPE_CHECKING:
    from nntask.config import Suffix

OPTIONAL_VALUE: Final = {"resume": "auto"}
"""Flags whose value may be left out -> the value that this means."""
_EVENTS: Final = "is not offered: --report-to tensorboard writes event files into the run's directory, without a server; use that, or drop it"
ELSEWHERE: Final = {
    "logger": _EVENTS,
    "logger-server-addr": _EVENTS,
    "logger-server-port": _EVENTS,
    "force": "belongs to nntask export; nothing else overwrites anything, so give a new directory",
    "shard-size": "belongs to nntask export; drop it",
}
"""Flags of another command, or of NNTile -> the end of the error message, with the right command or an equivalent."""


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

    @property
    def words(self) -> tuple[str, ...]:
        """Words that are allowed instead of a number."""
        return tuple(word for kind in typing.get_args(self.kind) if typing.get_origin(kind) is Literal for word in typing.get_args(kind))

    @property
    def example(self) -> str:
        """A valid value."""
        return self.choices[0] if self.choices else {int: "1", float: "0.1"}.get(self.value_type, "VALUE")

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
                longer = [choice for choice in self.choices if text and choice.startswith(text)]
                near = longer or difflib.get_close_matches(text, self.choices, 1)
                advice = _RENAMED_VALUES.get((self.name, text)) or (f"did you mean {near[0]}?" if near else "choose one of them")
                raise UsageError(f"{source} must be one of {', '.join(self.choices)}, got {text!r}", advice)
            return text
        if self.value_type is bool:
            word = text.lower()
            if word not in ("true", "false", "1", "0", "yes", "no"):
                raise UsageError(f"{source} must be true or false, got {text!r}", "write one of them")
            return word in ("true", "1", "yes")
        if self.value_type in (int, float):
            if text in self.words:
                return text
            try:
                if not text.isascii() or "_" in text:  # Python takes digits of all alphabets, and 1_000
                    raise ValueError
                return self.value_type(text)
            except ValueError:
                what = " or ".join(["a whole number" if self.value_type is int else "a number", *self.words])
                raise UsageError(f"{source} must be {what}, got {text!r}", "write one") from None
        return text


_RENAMED_VALUES: Final = {("optimizer", "fusedadamw"): "use adamw, which is the same"}
"""(flag, value that earlier versions took) -> advice."""

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


def unknown(
    name: str, text: str | None, names: Iterable[str], source: str, listed: str = "--help-all for all flags", *, kind: str = ""
) -> UsageError:
    """Return the error for an unknown flag: its replacement, the command that has it, or the most similar flags.

    Args:
        name: the flag without dashes.
        text: its value; None if it has none.
        names: the known flags without dashes.
        source: noun phrase for the flag or key in messages.
        listed: place where all flags are listed, for a flag that resembles none.
        kind: noun before `source` if it is unknown, with a space; "" for none.
    """
    from nntask.config import SUFFIXES, instead

    if name in ELSEWHERE:
        return UsageError(f"{source} {ELSEWHERE[name]}")
    if (replacement := instead(name, text)) is not None:
        return UsageError(f"{source} was removed", replacement)
    near = difflib.get_close_matches(name, [each for each in names if each.replace("-", "_") not in SUFFIXES], 3)
    best = [f"--{each}" for each in near if _likeness(name, each) > _likeness(name, near[0]) - 0.1]  # nearly as similar as the best
    return UsageError(f"unknown {kind}{source}", f"did you mean {' or '.join(best)}?" if best else f"see {listed}")


def _likeness(name: str, other: str) -> float:
    """Return the similarity of two names, from 0 to 1 for equal names, in the metric of `get_close_matches`."""
    return difflib.SequenceMatcher(None, other, name).ratio()


def scan(argv: Sequence[str], table: Table, positional: int = 0) -> tuple[dict[str, Any], list[str]]:
    """Read a command line.

    Underscores equal dashes, ``--flag=value`` equals ``--flag value``, ``--no-flag`` turns a switch off. The last of equal flags counts.

    Args:
        argv: the words of the command line.
        table: the known flags.
        positional: largest number of words that are no flags.

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
        if token.startswith("--") and token != "--":
            values.update(_read_flag(token, rest, table, argv))
            continue
        words.append(token)
        if len(words) > positional:
            raise UsageError(f"unexpected word {token!r}", "flags begin with --, see --help")
    return values, words


def typed_text(argv: Sequence[str], name: str) -> str | None:
    """Return the last value of a flag on a command line; None without the flag or its value.

    Args:
        argv: the words of the command line.
        name: the flag without dashes.
    """
    value = None
    for word, following in zip(argv, [*argv, "--"][1:], strict=True):
        flag, equals, text = word.partition("=")
        if flag.replace("_", "-") == f"--{name}" and (equals or not following.startswith("--")):
            value = text if equals else following
    return value


def _read_flag(token: str, rest: list[str], table: Table, argv: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield (flag, value) of the word `token` of `argv`, with its value from `rest` if it has none of its own; a second part has its own name."""
    from nntask.config import SUFFIXES, instead

    name, equals, text = token[2:].partition("=")
    name = name.replace("_", "-")
    switch = table.get(name.removeprefix("no-")) if name.startswith("no-") else None
    if switch is not None and switch.value_type is bool:
        if equals:
            raise UsageError(f"takes no value, got {text!r}", f"write --{name} to turn it off, or --{switch.name}", flag=f"--{name}")
        yield switch.name, False
        return
    flag = table.get(name)
    if flag is None:
        value = text if equals else rest[0] if rest and not rest[0].startswith("--") else None
        raise unknown(name, value, table, f"--{name}" + (f"{equals}{text}" if instead(name, value) else ""), kind="flag ")
    if flag.value_type is bool and not equals:
        yield name, True
        return
    if not equals:
        if rest and not rest[0].startswith("--"):
            text = rest.pop(0)
        elif name in OPTIONAL_VALUE:
            text = OPTIONAL_VALUE[name]
        else:
            raise UsageError(f"needs a value, as in --{name}={flag.example}", flag=f"--{name}")
    suffix = SUFFIXES.get(flag.field)
    whole = None if suffix is None else table.get(suffix.flag.replace("_", "-"))
    if suffix is not None and whole is not None:  # a command without that flag has one of its own, such as report --trace
        remedy = _with_second(whole, suffix, text, typed_text(argv, whole.name))
        raise UsageError("is now the second part of another flag", remedy, flag=f"--{name}", value=text)
    yield from values_of(flag, text, f"--{name}", table).items()


def _with_second(flag: Flag, suffix: Suffix, second: str, typed: str | None) -> str:
    """Return the words to type for a second part of a value, as the end of a sentence.

    Args:
        flag: flag that has the part.
        suffix: place of the part in the flag's value.
        second: text of the part.
        typed: value of the flag on the command line, perhaps with a part; None without the flag.
    """
    value = suffix.example if typed is None else typed.partition(suffix.separator)[0]
    if value in suffix.without:
        return f"drop it, since --{flag.name} {value} has none"
    condition = f" {suffix.condition}" if typed is None and suffix.condition else ""
    return f"use --{flag.name} {value}{suffix.separator}{second}{condition}"


def values_of(flag: Flag, text: str, source: str, table: Table) -> dict[str, Any]:
    """Return flag -> value for a text: the flag's own value, and the value of a second part after a separator (`nntask.config.SUFFIXES`).

    Raises:
        UsageError: as in `Flag.convert`, or the second part is empty.
    """
    from nntask.config import SUFFIXES

    values: dict[str, Any] = {}
    for inner, suffix in SUFFIXES.items():
        second = table.get(inner.replace("_", "-"))
        if suffix.flag == flag.field and suffix.separator in text and second is not None:
            text, _, end = text.partition(suffix.separator)
            if not end:
                raise UsageError(f"{source} {text}{suffix.separator} lacks {suffix.name} at its end", f"add it, or drop {suffix.separator}")
            values[second.name] = second.convert(end, f"{suffix.name} in {source}")
    return {**values, flag.name: flag.convert(text, source)}


class FileEntry(NamedTuple):
    """Entry of a TOML file.

    Attributes:
        key: key as the file has it; for the second part of a value, the name of the part and the key.
        text: value as a word.
    """

    key: str
    text: str


def from_toml(text: str, path: str, table: Table) -> tuple[dict[str, Any], dict[str, FileEntry]]:
    """Return flag -> value for a TOML file, and flag -> the entry that has set it.

    Keys are flat or in sections, whose names are ignored. Old keys are translated.

    Raises:
        UsageError: the text is not TOML, a key is not a flag, a value is wrong, or old keys contradict others.
    """
    import tomllib

    from nntask.config import OLD_SETTINGS, SUFFIXES, lost, replaced, translated

    try:
        content = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not a TOML file: {error}", "correct that line") from None
    pairs: list[tuple[str, Any]] = []
    for key, value in content.items():
        pairs += value.items() if isinstance(value, dict) else [(key, value)]
    old: dict[str, Any] = {}
    values: dict[str, Any] = {}
    entries: dict[str, FileEntry] = {}
    for key, value in pairs:
        field, name = key.replace("-", "_"), key.replace("_", "-")
        is_old = name not in table and field in OLD_SETTINGS
        if (not is_old and name not in table) or (name == "load-optimizer" and value):  # a start from such a file cannot be translated
            raise unknown(name, str(value), table, f"key {key!r} in {path}")
        if isinstance(value, (dict, list)):
            raise UsageError(f"{key} in {path} must be a single value, got {value!r}", "write one")
        word = str(value).lower() if isinstance(value, bool) else str(value)
        entries[name] = FileEntry(key, word)
        if is_old:
            old[field] = Flag(name, "", field, OLD_SETTINGS[field]).convert(word, f"{key} in {path}")
        elif (name, word) in _RENAMED_VALUES:
            old[field] = word
        else:
            both = values_of(table[name], word, f"{key} in {path}", table)
            entries |= {other: FileEntry(f"{SUFFIXES[other.replace('-', '_')].name} in {key}", word) for other in both.keys() - {name}}
            values |= both
    keys = {key.replace("-", "_"): key for key, _ in pairs}
    for sentence in lost(old, path, keys):
        complain(sentence)
    fields = {**{name.replace("-", "_"): value for name, value in values.items()}, **old}
    entries |= {name.replace("_", "-"): entries[by.replace("_", "-")] for name, by in replaced(fields).items()}
    settings = {field.replace("_", "-"): value for field, value in translated(fields, path, keys).items()}
    return settings, {name: entries[name] for name in settings}


def merge(lower: Mapping[str, Any], upper: Mapping[str, Any], weights: Collection[str] = ()) -> dict[str, Any]:
    """Return the values of `lower` and `upper`; `upper` wins.

    If `upper` names the model in one way, the other ways in `lower` are dropped. A flag in `upper` sets its whole value: without a second part
    (`nntask.config.SUFFIXES`), that of `lower` is dropped.

    Args:
        weights: flags of `lower` that name weights alone, whatever their file is, and so never a model.
    """
    from nntask.config import SUFFIXES, brings_config

    def ways(values: Mapping[str, Any]) -> set[str]:
        named = {"model", "config-path"} & set(values)
        return named | {"init-from"} if brings_config(values.get("init-from", "")) else named

    dropped = ways(lower) - set(weights) if ways(upper) else set()
    dropped |= {inner.replace("_", "-") for inner, suffix in SUFFIXES.items() if suffix.flag.replace("_", "-") in upper}
    merged = {name: value for name, value in lower.items() if name not in dropped}
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
