"""Loopback addresses in any notation."""

from __future__ import annotations

import ipaddress
import socket
from typing import Final

LOCALHOST: Final = "localhost"


def is_loopback(host: str) -> bool:
    """Return whether a host in a request is this machine: the name localhost, or a literal address of loopback, in brackets or not."""
    try:
        return host.lower() == LOCALHOST or ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def listens_locally(host: str) -> bool:
    """Return whether a server at `host` is reachable from this machine only: all of its addresses are loopback, such as those of 127.1."""
    try:
        found = {str(address[4][0]) for address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):  # listening there fails and reports the reason
        return False
    return bool(found) and all(is_loopback(address) for address in found)
