"""Choosing one token of each sequence. A copy of one row per sequence: nothing to gain over a plain loop, so there is no ladder."""

from __future__ import annotations

from ..reference.select import select_rows
from ..registry import register

register("select_rows", "cpu")(select_rows)
