"""Tests that need a GPU: each is skipped, with the reason, where CUDA shows none. `make test-gpu` runs them and keeps the result as JSON."""

from __future__ import annotations

import json
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from nntask.hardware.gpus import cards
from scheduler.drivers.cuda_cupy import find_gpus
from scheduler.drivers.gpu import NoGpu

PACKAGES = ("cupy-cuda12x", "cupy-cuda13x", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cublas", "nvidia-cudnn-frontend", "torch")
"""Whose versions results depend on."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where the results go."""
    parser.addoption("--gpu-json", default="", help="write what passed and failed here, as JSON")


def _versions(*packages: str) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


class Results:
    """Counts outcomes and writes them at the end of a session in which a GPU was used.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.started = time.monotonic()
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the outcome of a test."""
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid] = report.outcome

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the file; where everything was skipped nothing has been shown, and that is no success."""
        counts = Counter(self.outcomes.values())
        if not counts["passed"] + counts["failed"]:
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
            return
        card = find_gpus()[0]
        found = {
            "gpu": card.name,
            "capability": card.capability,
            "python": platform.python_version(),
            "versions": _versions(*PACKAGES),
            "seconds": round(time.monotonic() - self.started, 1),
            "outcomes": dict(counts),
            "not_passed": {name: outcome for name, outcome in sorted(self.outcomes.items()) if outcome != "passed"},
        }
        self.path.write_text(json.dumps(found, indent=1) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Collect results where a file was named."""
    path = config.getoption("--gpu-json")
    if path:
        config.pluginmanager.register(Results(Path(path)))


Opener = Callable[..., list[Any]]
"""open_gpus(count, tf32=False): so many parts of the first card."""


@pytest.fixture(scope="session")
def open_gpus() -> Iterator[Opener]:
    """Devices, closed at the end."""
    opened: list[Any] = []
    try:
        card = find_gpus()[0]
    except NoGpu as error:
        pytest.skip(str(error))

    def give(count: int, *, tf32: bool = False) -> list[Any]:
        parts = cards.open([(card, part if count > 1 else None) for part in range(count)], tf32=tf32, dtype="fp32")
        opened.extend(parts)
        return parts

    yield give
    for device in opened:
        device.close()
