"""Fixtures of the tests of `nntask serve`: a model directory, the same model without a server, and the key of a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.served import KEY, Alone, write_served_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory, each of whose tokens is a letter."""
    return write_served_model(tmp_path_factory.mktemp("served") / "small")


@pytest.fixture(scope="module")
def alone(model: Path) -> Iterator[Alone]:
    """The same model without a server."""
    found = Alone(model)
    yield found
    found.close()


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The flag of a file with the key of served models."""
    file = tmp_path_factory.mktemp("key") / "key"
    file.write_text(KEY)
    file.chmod(0o600)
    return f"--api-key-file={file}"
