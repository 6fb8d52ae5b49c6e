"""The compose files say what the commands take: services build the Dockerfile's targets, and their command lines are accepted."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from distributed.cli import dask_scheduler, dask_worker

from nntask.config.settings import TrainSettings
from wrappers.cli.commands.serve import ServeSettings, check
from wrappers.cli.options.flags import build as build_settings
from wrappers.cli.options.flags import scan, table_of

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "docker").glob("compose*.yaml"))
DASK = {"scheduler": dask_scheduler.main, "worker": dask_worker.main}


def services() -> list[Any]:
    """Every service of every file; what compose.gpu.yaml says is laid over compose.yaml."""
    found, plain = [], yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]
    for file in FILES:
        for name, service in yaml.safe_load(file.read_text())["services"].items():
            base = plain[name] if file.stem == "compose.gpu" else {}
            whole = {**base, **service, "build": {**base.get("build", {}), **service["build"]}}
            found.append(pytest.param(whole, id=f"{file.stem} {name}"))
    return found


@pytest.mark.parametrize("service", services())
def test_services_build_and_run_what_there_is(service: dict[str, Any]) -> None:
    """The target exists, volumes are declared, and the program takes its arguments."""
    build = service["build"]
    assert f"AS {build['target']}\n" in (ROOT / "docker" / build["context"] / build["dockerfile"]).read_text()
    if service.get("entrypoint"):
        program, name, *words = service["entrypoint"]
        assert program == "dask"
        DASK[name].make_context(name, words, resilient_parsing=False)
        return
    command, *words = shlex.split(service["command"])
    if command == "serve":
        values, models = scan(words, table_of(ServeSettings), 1)
        check(build_settings(ServeSettings(), values, table_of(ServeSettings)).server)
        assert len(models) == 1
        assert service["ports"] == [f"127.0.0.1:{values['port']}:{values['port']}"]
        assert "NNTASK_API_KEY" in service["environment"]
        return
    assert command == "train"
    values, _ = scan(words, table_of(TrainSettings))
    if "dask" in values:
        assert values["lanes"] >= values["nodes"]


def test_dask_workers_match_what_is_trained_on() -> None:
    """The cluster's file starts as many workers as its training waits for, at the address that it names."""
    file = yaml.safe_load((ROOT / "docker/compose.dask.yaml").read_text())["services"]
    values, _ = scan(shlex.split(file["train"]["command"])[1:], table_of(TrainSettings))
    assert values["nodes"] == file["worker"]["deploy"]["replicas"]
    assert values["dask"] in file["worker"]["entrypoint"]
