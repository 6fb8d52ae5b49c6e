"""Tables of the reference that are made from the code's registries: commands, environment variables, keys of rows, exit codes. Knows no Sphinx."""

from __future__ import annotations

import inspect


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)])


def commands_markdown() -> str:
    """The table of commands."""
    from wrappers.cli import COMMANDS

    return _table(["command", "what it does"], [[f"[`nntask {name}`](#nntask-{name})", text] for name, text in COMMANDS.items()])


def environment_markdown() -> str:
    """The table of environment variables."""
    from nntask.config.environment import VARIABLES

    rows = [[f"`{each.name}`", f"`--{each.flag}`" if each.flag else "", each.help] for each in VARIABLES]
    return _table(["variable", "stands in for", "meaning"], rows)


def rows_markdown() -> str:
    """The table of keys of rows and messages: one line for each kind of row, use and reason."""
    from nntask.data.row_keys import ROW_KEYS

    keys: dict[tuple[str, str, str], list[str]] = {}
    for kind, rules in ROW_KEYS.items():
        for key, rule in rules.items():
            keys.setdefault((kind, rule.use, rule.reason), []).append(f"`{key}`")
    return _table(["in", "keys", "what becomes of them", "why"], [[kind, ", ".join(named), use, why] for (kind, use, why), named in keys.items()])


def errors_markdown() -> str:
    """The table of errors with their exit codes."""
    from nntask import errors

    kinds = [each for each in vars(errors).values() if inspect.isclass(each) and issubclass(each, errors.NntaskError)]
    rows = [[f"`{kind.__name__}`", str(kind.exit_code), inspect.cleandoc(kind.__doc__ or "")] for kind in kinds if kind is not errors.NntaskError]
    return _table(["error", "exit code", "meaning"], rows)
