"""Small traces of accesses, for the lower bounds."""

from __future__ import annotations

from hypothesis import strategies as st

from .bounds import AccessTrace

UNIT = 1 << 20


@st.composite
def traces(draw: st.DrawFn) -> AccessTrace:
    """Up to six positions over up to four tiles of one unit; a temporary is written first."""
    persistent = draw(st.lists(st.booleans(), min_size=1, max_size=4))
    accesses: list[list[tuple[int, str]]] = []
    seen: set[int] = set()
    for _ in range(draw(st.integers(1, 6))):
        tiles = draw(st.lists(st.integers(0, len(persistent) - 1), max_size=2, unique=True))
        accesses.append([(t, draw(st.sampled_from(("R", "W", "RW"))) if persistent[t] or t in seen else "W") for t in tiles])
        seen.update(tiles)
    scratch = draw(st.lists(st.sampled_from((0, UNIT)), min_size=len(accesses), max_size=len(accesses)))
    return AccessTrace(accesses, [UNIT] * len(persistent), persistent, scratch)
