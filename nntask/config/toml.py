"""Settings as TOML, the form in which a run stores them."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from .settings import SUFFIXES, typed

_OF_ONE_START: Final = frozenset({"run_dir", "resume", "dry_run"})
"""Settings that a file for repeating the run must not contain."""


def to_toml(settings: Any) -> str:
    """Return `settings` (groups of values) as TOML, one section per group, without unset values and those that belong to a single start."""
    lines: list[str] = []
    for group in dataclasses.fields(settings):
        inner = getattr(settings, group.name)
        lines += ["" if lines else "# resolved configuration of an nntask run; nntask train --config FILE starts it anew", f"[{group.name}]"]
        for f in dataclasses.fields(inner):
            value = _as_typed(inner, f.name)
            if value is not None and f.name not in _OF_ONE_START:
                lines.append(f"{f.name} = {_toml_value(value)}")
    return "\n".join(lines) + "\n"


def _as_typed(group: Any, name: str) -> Any:
    """Return a setting with its second part, as its flag takes it.

    Of a second part, return None unless the setting that would have it is unset; a file may then name the part alone.
    """
    value, suffix = getattr(group, name), SUFFIXES.get(name)
    changed = {f.name for f in dataclasses.fields(group) if f.name in SUFFIXES and getattr(group, f.name) != f.default}
    if suffix is not None:
        return value if name in changed and getattr(group, suffix.flag) is None else None
    return value if value is None or all(SUFFIXES[second].flag != name for second in changed) else typed(group, name)


def _toml_value(value: bool | int | float | str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in escaped) + '"'
    return repr(value)
