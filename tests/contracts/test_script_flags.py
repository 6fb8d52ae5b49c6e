"""Flags in scripts: what benchmarks, images and the Makefile pass to nntask's commands is accepted by them."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from support.commands import flag_tables

from nntask.config.old_settings import OLD_SETTINGS
from nntask.config.settings import SUFFIXES
from wrappers.cli import COMMANDS

ROOT: Final = Path(__file__).parents[2]
FLAG: Final = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]*)")
SCRIPTS: Final = sorted((ROOT / "benchmarks").rglob("*.py"))
PLAIN: Final = [ROOT / "Makefile", *sorted(path for path in (ROOT / "docker").rglob("*") if path.is_file())]
OF_OTHERS: Final = {
    *("short", "porcelain", "query-gpu", "real-json", "junitxml", "no-deps", "only-binary", "python-version", "implementation", "platform"),
    *("no-index", "no-compile", "no-cache-dir", "target"),
}
"""Flags of git, nvidia-smi, pytest and pip."""
MISTAKEN: Final = {"bach"}
"""Flag that a recorded case types wrongly on purpose."""
FOR_OLD_CODE: Final = {"same_runs.py": {"load-checkpoint", "trace"}}
"""Script that also runs earlier commits -> their flags."""
GONE: Final = {name.replace("_", "-") for name in (*OLD_SETTINGS, *SUFFIXES)}
"""Flags of earlier versions of nntask train."""


def accepted(text: str) -> set[str]:
    """Flags of the commands that a text may be for."""
    tables = {command: set(table) for command, table in flag_tables()}
    flags = {"config", "help", "help-all"}.union(*tables.values()) - GONE
    if "NNTILE" in text:
        example = runpy.run_path(str(ROOT / "examples" / "gpt2_custom_training.py"))
        flags |= {option.removeprefix("--") for action in example["parser"]()._actions for option in action.option_strings}
    return flags | (tables["report"] if "report" in text else set())


def texts(path: Path) -> Iterator[str]:
    """Texts in the code of a script, without docstrings; an f-string is one text, with its expressions."""
    tree = ast.parse(path.read_text())
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node) if part is not node}
    inner |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) not in inner and (isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))):
            yield ast.unparse(node)


def defined(path: Path) -> set[str]:
    """Flags that a script defines: by argparse, or as fields of a dataclass."""
    text = path.read_text()
    names = re.findall(r"add_argument\(\s*\"--([a-z][\w-]*)\"", text) + re.findall(r"^    ([a-z]\w*): .* = ", text, re.MULTILINE)
    return {name.replace("_", "-") for name in names}


OF_SCRIPTS: Final = set[str]().union(*map(defined, SCRIPTS)) - GONE


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_script_passes_flags_that_exist(path: Path) -> None:
    """Those of nntask's commands, of scripts, and of some other programs."""
    known = OF_SCRIPTS | defined(path) | OF_OTHERS | MISTAKEN | FOR_OLD_CODE.get(path.name, set())
    for text in texts(path):
        if named := set(FLAG.findall(text)):
            known_here = known | accepted(text)
            assert {flag.removeprefix("no-") if flag not in known_here else flag for flag in named} <= known_here, text


@pytest.mark.parametrize("path", PLAIN, ids=lambda path: str(path.relative_to(ROOT)))
def test_images_and_the_makefile_pass_flags_that_exist(path: Path) -> None:
    """In each line that is a command of nntask."""
    for line in path.read_text().splitlines():
        if match := re.search(rf"(?:nntask|command:) (?:{'|'.join(COMMANDS)}) .*", line):
            named = {flag.removeprefix("no-") for flag in FLAG.findall(match[0])}
            assert named <= accepted("report") | OF_SCRIPTS, line
