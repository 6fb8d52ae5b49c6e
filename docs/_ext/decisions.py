"""The index of decisions: a table made from the files in `decisions`, newest first."""

from __future__ import annotations

from decision_files import read_all
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class DecisionIndex(SphinxDirective):
    """``{decision-index}``: all decisions in a table."""

    def run(self) -> list[nodes.Node]:
        """The nodes."""
        rows = [f"| {each.date} | [{each.title}]({each.path.name}) | {each.area} |" for each in read_all()]
        return self.parse_text_to_nodes("\n".join(["| date | decision | area |", "|---|---|---|", *rows]))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("decision-index", DecisionIndex)
    return {"parallel_read_safe": True}
