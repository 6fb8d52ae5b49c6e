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
    for command in commands:
        program, *rest = command.split()
        assert rest[0] in TARGETS if program == "make" else (ROOT / program).is_file(), command


@pytest.mark.parametrize(("file", "job"), [("tests", "test"), ("weekly", "test-all")])
def test_workflows_test_the_versions_of_the_classifiers(file: str, job: str) -> None:
    """The matrices have the Python versions that the package says it supports."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / f"{file}.yml").read_text())["jobs"]
    prefix = "Programming Language :: Python :: 3."
    supported = [f"3.{line.removeprefix(prefix)}" for line in PROJECT["classifiers"] if line.startswith(prefix)]
    assert jobs[job]["strategy"]["matrix"]["python"] == supported
    assert PROJECT["requires-python"] == f">={supported[0]}"


def test_forms_and_citation_can_be_read() -> None:
    """Issue forms have a name and a body, and the citation has the version of the package."""
    for form in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")):
        fields = yaml.safe_load(form.read_text())
        assert form.stem == "config" or (fields["name"] and fields["description"] and fields["body"])
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"]
    assert citation["cff-version"] == "1.2.0"
