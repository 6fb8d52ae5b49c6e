"""What the README says is true: its Python runs, its commands and flags exist, its tables show what they are made from, and it is short."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.deadline import DEADLINE

from nntask.config.old_settings import OLD_SETTINGS
from nntask.config.settings import ModelSettings, TrainSettings
from nntask.models.registry import PRESETS
from wrappers.cli import COMMANDS
from wrappers.cli.commands.export import ExportSettings
from wrappers.cli.commands.plan import OWN_FLAGS
from wrappers.cli.commands.quantize import QuantizeSettings
from wrappers.cli.commands.serve import ServeSettings
from wrappers.cli.options.flags import ELSEWHERE, table_of

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = sorted(ROOT.glob("*.md"))
PAGES += [ROOT / folder / "README.md" for folder in ("benchmarks", "tiles", "nntask", "wrappers")]
EXAMPLE = re.compile(r"# ((?:examples|nntask/models)/\w+\.py)\n")
"""First line of a block that shows a part of an example instead of a whole program."""
SLOW_PAGES = ("docs/guides/pytorch.md", "docs/start/from-pytorch.md")
"""Pages whose blocks train modules of PyTorch, which takes seconds each."""
BLOCKS = [
    pytest.param(code, id=f"{page.relative_to(ROOT)} {number}", marks=pytest.mark.pages if str(page.relative_to(ROOT)) in SLOW_PAGES else ())
    for page in (ROOT / "README.md", *DOCS)
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]
OTHER_FLAGS = {
    "before",
    "code",
    "help",
    "check",
    "rounds",
    "jobs",
    "steps",
    "output",
    "peers",
    "json",
    "help-all",
    "keep-going",
    "suite",
    "tiny",
    "only",
    "case",
    "list",  # of benchmarks/gpu/first_card.py, as is rehearse
    "rehearse",
    "device",  # of benchmarks/bounds/bound.py
    "fastest",
    "force",
    "a",
    "b",
    "rtol",
    "atol",
    "shard-size",
    "target",
    "rm",
    "init",
    "build-arg",
    "merge",
    "prompt-file",
    "max-new-tokens",
    "temperature",
    "top-k",
    "top-p",
    "num-beams",
    "length-penalty",
    "early-stopping",
    "repetition-penalty",
    "no-repeat-ngram-size",
    "cache",
    "split",
    "logdir",
    "port",
    "minutes",
    "nworkers",
    "build",
    "abort-on-container-exit",
    "exit-code-from",
}
"""Flags of make, of docker, of the other commands and of the benchmark scripts."""


def rows(heading: str) -> list[list[str]]:
    """Cells of the table under a heading of the README, head and rule left out."""
    section = README.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize("code", BLOCKS)
def test_python_runs(code: str, tmp_path: Path) -> None:
    """Every Python block of the README and of docs runs as printed, in a directory of its own; one that shows an example is in it, word for word.

    The blocks of `SLOW_PAGES` are run with the commands of the pages, by `make test-pages`.
    """
    if shown := EXAMPLE.match(code):
        assert code[shown.end() :] in (ROOT / shown[1]).read_text()
        return
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1", "NNTASK_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 0, done.stderr


def test_there_is_an_example() -> None:
    """The README shows a recorded step."""
    assert re.search(r"```python\n(?:(?!```).)*record\(\)", README, re.DOTALL)


def test_commands_table() -> None:
    """The table of commands is the command line's own."""
    assert rows("Commands") == [[f"`nntask {name}`", text] for name, text in COMMANDS.items()]


def test_help_names_models_that_exist() -> None:
    """The help of --model says where presets are listed, and its examples and default are presets."""
    text = re.search(r'"""(built-in model; nntask models lists all, such as (.+) \(default: (\w+)\))"""', inspect.getsource(ModelSettings))
    assert text is not None
    assert {*text[2].split(", "), text[3]} <= set(PRESETS)


def test_the_front_page_is_short() -> None:
    """At most 200 lines of at most 120 characters."""
    lines = README.splitlines()
    assert len(lines) <= 200
    assert [line for line in lines if len(line) > 120] == []


@pytest.mark.parametrize("page", [*PAGES, *DOCS], ids=lambda path: str(path.relative_to(ROOT)))
def test_flags_exist(page: Path) -> None:
    """Flags a page names in code are flags that are accepted."""
    known = {
        *table_of(TrainSettings),
        *table_of(QuantizeSettings),
        *table_of(ExportSettings),
        *table_of(ServeSettings),
        *OWN_FLAGS,
        *OTHER_FLAGS,
        "config",
        *(
            {*(name.replace("_", "-") for name in OLD_SETTINGS), *ELSEWHERE} if page.name == "from-nntile.md" else ()
        ),  # the page says what becomes of them
    }
    shell = " ".join(re.findall(r"`[^`]+`|```(?:sh|text)?\n.*?```", page.read_text(), re.DOTALL))
    named = {flag.removeprefix("no-") if flag.removeprefix("no-") in known else flag for flag in re.findall(r"(?<![\w-])--([a-z][a-z0-9-]*)", shell)}
    assert named <= known, f"{page.name} names flags that nothing accepts: {sorted(named - known)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_files_exist(page: Path) -> None:
    """Relative links, and paths in code that look like files of this repository, lead somewhere."""
    text = page.read_text()
    links = [*re.findall(r"\]\(([^)#]+)\)", text), *re.findall(r"^\[[^\]]+\]: (\S+)", text, re.MULTILINE)]
    links = [link for link in links if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []
    files = re.findall(r"`((?:nntask|tiles|scheduler|wrappers|examples|tests|benchmarks)/[\w/.]+\.(?:py|md|json))`", text)
    assert [name for name in files if not (ROOT / name).exists()] == []


def test_make_targets() -> None:
    """`make X` anywhere in a page is a target of the Makefile."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {(page.name, target) for page in (*PAGES, *DOCS) for target in re.findall(r"(?:`|^)make (?!a )([a-z-]+)", page.read_text(), re.MULTILINE)}
    unknown = [f"{page}: make {target}" for page, target in sorted(named) if target not in targets]
    assert not unknown, "\n".join(unknown)


def test_results_are_current() -> None:
    """docs/results, docs/images and the headlines of the README are made from the committed results."""
    done = subprocess.run([sys.executable, "benchmarks/table.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_gpu_page_is_current() -> None:
    """docs/results/gpu.md shows what benchmarks/gpu has measured, or that nothing has."""
    assert subprocess.run([sys.executable, "benchmarks/gpu/bench.py", "--table", "--check"], cwd=ROOT).returncode == 0


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_train_says_how_nntask_becomes_a_command() -> None:
    """As the quick start does: what a run prints at its end begins with nntask, which is in the environment that make has made."""
    command = ". .venv/bin/activate"
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}  # when make runs this test
    printed = subprocess.run(["make", "-n", "train"], cwd=ROOT, check=True, capture_output=True, text=True, env=environment).stdout
    assert printed.rstrip().endswith(f'to have it as a command in this shell: {command}"')
    assert command in README.partition("## A minute of training")[0]
