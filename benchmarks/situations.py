"""The page of situations: counts of `results/situations.csv`, whose rows are public reports that were set up as tests."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from rows import table

OUTCOMES: Final = {
    "equal": "the result of the reference: transformers, tokenizers, datasets or llama.cpp",
    "read": "accepted, with the meaning that its author intended",
    "reported": "ignored, left out or changed, with a message or a count",
    "refused": "an error with place and remedy",
}
"""Outcome of a situation -> its meaning."""
PAGE: Final = """# Situations of public reports

{total} public reports of failures elsewhere were set up on small inputs as tests. nntask answers none silently and none with a traceback.
`benchmarks/results/situations.csv` lists each with its source, nntask's behaviour and its tests. Programs of PyTorch have
[a list of their own](../reference/pytorch.md#programs-of-public-reports).

{counts}

{outcomes}

## Examples

{examples}
"""


def load(path: Path) -> list[dict[str, str]]:
    """Return the rows of the list."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def page(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the page: counts by kind and outcome, and the first situation of each kind."""
    found = Counter((row["kind"], row["outcome"]) for row in rows)
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    counts = [[kind, *(found[kind, outcome] for outcome in OUTCOMES)] for kind in kinds]
    totals = ["all", *(sum(found[kind, outcome] for kind in kinds) for outcome in OUTCOMES)]
    first = [next(row for row in rows if row["kind"] == kind) for kind in kinds]
    return PAGE.format(
        total=len(rows),
        counts=table(["kind", *OUTCOMES], [*counts, totals]),
        outcomes=table(["outcome", "meaning"], OUTCOMES.items()),
        examples=table(["situation", "nntask"], [[row["situation"], row["behaviour"]] for row in first]),
    )
