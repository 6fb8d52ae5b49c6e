"""JSON objects that contain a checksum of their content. It detects errors of disks and copies, not forgery."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any, Final

SEAL: Final = "crc32"
"""Key of the checksum: the CRC-32 of all other keys and values, as JSON with sorted keys and no spaces."""


def sealed(values: Mapping[str, Any]) -> str:
    """Return the text of a JSON object, with its checksum as an additional key."""
    return json.dumps({**values, SEAL: _checksum(values)}, indent=1)


def unsealed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a decoded object without its checksum.

    Raises:
        ValueError: the checksum is missing or does not match the content.
    """
    content = {key: value for key, value in values.items() if key != SEAL}
    written, checksum = values.get(SEAL), _checksum(content)
    if written != checksum:
        raise ValueError(f"its content has the checksum {checksum}, and {SEAL} says {str(written)[:20]}, so it changed since it was written")
    return content


def _checksum(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
