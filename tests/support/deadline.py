"""How long tests wait for what should happen soon."""

from __future__ import annotations

from typing import Final

DEADLINE: Final = 280.0
"""Seconds after which a thread or a process hangs: far above what a busy machine needs, below pytest's own limit, which names no culprit."""
