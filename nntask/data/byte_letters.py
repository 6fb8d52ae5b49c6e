"""The byte-level alphabet of GPT-2 (Radford et al., 2019, ``bytes_to_unicode``): a printable letter for each byte."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Final

_NUM_BYTES: Final = 256


@cache
def byte_letters() -> Mapping[int, str]:
    """Return byte -> letter: bytes that are printable in Latin-1 map to themselves, the others to code points from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, _NUM_BYTES)]
    others = [byte for byte in range(_NUM_BYTES) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(_NUM_BYTES + at) for at, byte in enumerate(others)}
