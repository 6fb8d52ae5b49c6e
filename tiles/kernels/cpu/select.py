"""Selection of one token of each sequence, and of sequences of a batch: copies of whole rows, for which plain loops are fast enough (no ladder)."""

from __future__ import annotations

from ..reference.select import gather_rows, select_rows
from ..registry import register, register_bf16

register("select_rows", "cpu")(select_rows)
register("gather_rows", "cpu")(gather_rows)
register_bf16("gather_rows", takes=lambda views, constants: True)(gather_rows)
