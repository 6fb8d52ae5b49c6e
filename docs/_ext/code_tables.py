"""Sphinx directives that make tables for the pages about the inside of the packages: modules with their first sentence, transitions of states."""

from __future__ import annotations

import ast
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[2]


def modules_markdown(package: str) -> str:
    """Modules of a folder of the product, such as `scheduler/core`, each with the first sentence of its docstring; subpackages by their own."""
    lines = ["| module | what it is |", "|---|---|"]
    folder = ROOT / package
    if not folder.is_dir():
        raise ValueError(f"{package} is no folder of the repository")
    paths = [*sorted(folder.glob("*.py")), *sorted(folder.glob("*/__init__.py"))]
    for path in paths:
        is_package = path.name == "__init__.py"
        if path == folder / "__init__.py" or path.name == "__main__.py":
            continue
        name = f"{path.parent.name}/" if is_package else path.stem
        first = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].replace("\n", " ").replace("``", "`").replace("|", r"\|")
        lines.append(f"| `{name}` | {first} |")
    return "\n".join(lines)


def transitions_markdown(which: str) -> str:
    """The table of transitions of "task" or "replica" states."""
    from scheduler.core.memory.coherence import TRANSITIONS
    from scheduler.core.task_states import TASK_TRANSITIONS

    if which == "task":
        first, begin, last, end = "waiting", "submitted", ("done", "failed", "cancelled"), ""
        middle = [(before, after, event) for (before, event), after in TASK_TRANSITIONS.items()]
    else:
        first, begin, last, end = "reserved", "extent taken", ("reserved", "shared", "modified"), "dropped"
        middle = [(before, after, event) for (before, event), after in TRANSITIONS.items()]
    rows = [f"| (begins) | `{first}` | {begin} |"]
    rows += [f"| `{before}` | `{after}` | {event} |" for before, after, event in middle]
    rows += [f"| `{state}` | (ends) | {end} |" for state in last]
    return "\n".join(["| from | to | when |", "|---|---|---|", *rows])


class Modules(SphinxDirective):
    """``{modules} scheduler/core``."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """The nodes."""
        return self.parse_text_to_nodes(modules_markdown(self.arguments[0]))


class Transitions(SphinxDirective):
    """``{transitions} task`` or ``{transitions} replica``."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """The nodes."""
        return self.parse_text_to_nodes(transitions_markdown(self.arguments[0]))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives."""
    app.add_directive("modules", Modules)
    app.add_directive("transitions", Transitions)
    return {"parallel_read_safe": True}
