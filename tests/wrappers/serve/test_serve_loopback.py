"""Addresses of this machine alone, in all their spellings."""

from __future__ import annotations

import pytest

from wrappers.serve.loopback import is_loopback, listens_locally


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "127.0.0.1", "127.0.0.2", "::1", "[::1]", "[0:0:0:0:0:0:0:1]"])
def test_requests_to_this_machine(host: str) -> None:
    """The name and every literal address of loopback."""
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", "0.0.0.0", "127.1"])
def test_requests_to_others(host: str) -> None:
    """Names that another site may resolve to this machine, and addresses of others."""
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("host", "is_local"), [("127.1", True), ("127.0.0.2", True), ("0:0:0:0:0:0:0:1", True), ("0.0.0.0", False), ("no such", False)]
)
def test_listening_at_any_spelling(host: str, is_local: bool) -> None:
    """What the system makes of a host decides, not how it is written."""
    assert listens_locally(host) == is_local
