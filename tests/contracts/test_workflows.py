"""Files for maintainers: workflows, templates, metadata and limits say the same as the rest of the repository."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_workflows_run_what_exists(file: Path) -> None:
    """Every command of a workflow is a target of the Makefile or a script of this repository."""
    jobs = yaml.safe_load(file.read_text())["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert commands
    words = [command.split() for command in commands]
    wrong = [" ".join(each) for each in words if not (each[1] in TARGETS if each[0] == "make" else (ROOT / each[0]).is_file())]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_caches_of_pip_know_every_list_of_versions(file: Path) -> None:
    """A new version in either file of requirements makes a new cache."""
    jobs = yaml.safe_load(file.read_text())["jobs"]
    cached = {name: step["with"] for name, job in jobs.items() for step in job["steps"] if step.get("with", {}).get("cache") == "pip"}
    stale = [name for name, given in cached.items() if given.get("cache-dependency-path", "").split() != ["pyproject.toml", "constraints.txt"]]
    assert not stale, f"cache-dependency-path of {', '.join(stale)} must list pyproject.toml and constraints.txt"


@pytest.mark.parametrize(("file", "job"), [("tests", "test"), ("weekly", "test-all")])
def test_workflows_test_the_versions_of_the_classifiers(file: str, job: str) -> None:
    """The matrices have the Python versions that the package says it supports."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / f"{file}.yml").read_text())["jobs"]
    prefix = "Programming Language :: Python :: 3."
    supported = [f"3.{line.removeprefix(prefix)}" for line in PROJECT["classifiers"] if line.startswith(prefix)]
    assert jobs[job]["strategy"]["matrix"]["python"] == supported
    assert PROJECT["requires-python"] == f">={supported[0]}"


def test_every_requirement_has_its_version() -> None:
    """constraints.txt has a line for each package that the project or the development extra names, under the heading that the Makefile writes."""
    heading, *lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert f'@echo "{heading}"' in (ROOT / "Makefile").read_text()
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    extras = PROJECT["optional-dependencies"]
    named = {re.split(r"[^\w-]", each)[0].lower().replace("_", "-") for each in (*PROJECT["dependencies"], *extras["text"], *extras["dev"])}
    missing = {name for name in named - pinned if not name.startswith(("torch", "nvidia-"))}  # another version for each platform
    assert not missing, f"constraints.txt lacks {', '.join(sorted(missing))}; run make constraints"


def test_forms_and_citation_can_be_read() -> None:
    """Issue forms have a name and a body, and the citation has the version of the package."""
    forms = {form.stem: yaml.safe_load(form.read_text()) for form in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")}
    wanted = ("name", "description", "body")
    assert [f"{name} lacks {key}" for name, form in sorted(forms.items()) for key in wanted if name != "config" and not form.get(key)] == []
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"]
    assert citation["cff-version"] == "1.2.0"
