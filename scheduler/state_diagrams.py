"""State diagrams for the documentation, from the transition tables; ``python -m scheduler.state_diagrams`` updates them in `scheduler/README.md`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from .core.dispatch import TASK_TRANSITIONS
from .core.memory.coherence import TRANSITIONS

README: Final = Path(__file__).with_name("README.md")


def diagram(transitions: Iterable[tuple[tuple[str, str], str]], first: Mapping[str, str], last: Mapping[str, str]) -> str:
    """Return a Mermaid state diagram.

    Args:
        transitions: ((state, event), next state) pairs.
        first: event that leads to each initial state.
        last: event that ends each final state; "" for none.
    """
    lines = ["```mermaid", "stateDiagram-v2"]
    lines += [f"    [*] --> {state}: {event}" for state, event in first.items()]
    lines += [f"    {before} --> {after}: {event}" for (before, event), after in transitions]
    lines += [f"    {state} --> [*]{f': {event}' if event else ''}" for state, event in last.items()]
    return "\n".join([*lines, "```"])


def diagrams() -> dict[str, str]:
    """Return every generated section of the README by name."""
    dropped = dict.fromkeys(("reserved", "shared", "modified"), "dropped")
    return {
        "task states": diagram(TASK_TRANSITIONS.items(), {"waiting": "submitted"}, dict.fromkeys(("done", "failed", "cancelled"), "")),
        "replica states": diagram(TRANSITIONS.items(), {"reserved": "extent taken"}, dropped),
    }


def with_diagrams(text: str) -> str:
    """Return `text` with its generated sections updated.

    Raises:
        ValueError: the markers of a section are missing.
    """
    for name, section in diagrams().items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        before, opened, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not opened or not closed:
            raise ValueError(f"{README.name} has no section {begin} ... {end}; put the two lines back")
        text = f"{before}{begin}\n{section}\n{end}{after}"
    return text


if __name__ == "__main__":
    README.write_text(with_diagrams(README.read_text()))
