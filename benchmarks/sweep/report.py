"""Counts, bars and tables of the sweep from its verdicts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

import common

Found = Mapping[str, Mapping[str, Any]]
"""Case -> its verdict."""

LIBRARIES: Final = ("transformers", "peft", "torchvision", "timm")
COUNTED: Final = ("equal", "rounding", "random", "refused", "different", "traceback")
"""Verdicts of modules that eager PyTorch trains."""
LEAST_CLASSES: Final = 150
MOST_REFUSED: Final = 0.1
MOST_NAMES: Final = 8
"""Limit of the modules that a line names; more are counted."""
TITLES: Final = {
    "equal": "equal",
    "rounding": "equal but for rounding",
    "random": "random",
    "refused": "refused",
    "different": "different",
    "traceback": "other errors",
}


def settings() -> dict[str, Any]:
    """What every case has in common."""
    from trial import FACTOR, MOVED, MOVED_DOUBLE, NEAR, OPTIMIZER, STEPS

    return {"steps": STEPS, "optimizer": f"SGD, {OPTIMIZER}", "near": NEAR, "moved": MOVED, "moved_double": MOVED_DOUBLE, "factor": FACTOR}


def counts(found: Found, library: str = "") -> Counter[str]:
    """Verdict -> number of cases of a library, or of all."""
    return Counter(entry["verdict"] for case, entry in found.items() if case.startswith(f"{library}/" if library else ""))


def counted(tally: Mapping[str, int]) -> int:
    """Number of modules that eager PyTorch trains."""
    return sum(tally.get(verdict, 0) for verdict in COUNTED)


def comparisons(found: Found) -> list[dict[str, Any]]:
    """What holds for all modules, with the bars."""
    every, classes = counts(found), counts(found, "transformers")
    total = counted(every)
    same = every["equal"] + every["rounding"]
    return [
        common.compare(
            "classes of transformers that eager PyTorch trains", "classes", counted(classes), "bar", LEAST_CLASSES, better="more", bar="ours >= 150"
        ),
        common.compare("equal, or equal but for rounding", "modules", same, "all", total, better="more"),
        common.compare("refused", "modules", every["refused"], "all", total, better="less", bar=f"ratio <= {MOST_REFUSED}"),
        common.compare(
            "not trained to other losses or weights", "modules", total - every["different"], "all", total, better="more", bar="ratio >= 1"
        ),
        common.compare("no error that is not a refusal", "modules", total - every["traceback"], "all", total, better="more", bar="ratio >= 1"),
    ]


def tables(found: Found) -> list[dict[str, Any]]:
    """Counts by library, and every module that is not equal."""
    head = ["library", "modules", *(TITLES[verdict] for verdict in COUNTED), "not counted"]
    rows = []
    for library in LIBRARIES:
        tally = counts(found, library)
        if tally:
            rows.append([library, str(counted(tally)), *(str(tally[verdict]) for verdict in COUNTED), str(tally["no eager"])])
    return [
        {"head": head, "rows": rows},
        {"head": ["verdict", "modules", "message"], "rows": list(_others(found))},
    ]


def _others(found: Found) -> Iterable[list[str]]:
    for verdict in ("different", "traceback", "refused", "rounding", "random"):
        groups: dict[str, list[str]] = {}
        for case, entry in found.items():
            if entry["verdict"] == verdict:
                groups.setdefault(_words(entry), []).append(case.partition("/")[2])
        if verdict in ("rounding", "random"):
            groups = {_summary(verdict, found): [name for names in groups.values() for name in names]} if groups else {}
        for words, names in sorted(groups.items(), key=lambda group: (-len(group[1]), group[0])):
            shown = ", ".join(f"`{name}`" for name in names) if len(names) <= MOST_NAMES else f"{len(names)} of them, in `cases` of the file"
            yield [TITLES[verdict], shown, plain(words)]


def plain(text: str) -> str:
    """Text that Markdown shows as it is."""
    return re.sub(r"([\\`*_\[\]<>$~])", r"\\\1", text)


def _words(entry: Mapping[str, Any]) -> str:
    """What is said of a module that is not equal."""
    if entry["verdict"] == "different":
        differences = f"losses {entry.get('loss_difference', 0):.1e}, tensors {entry.get('state_difference', 0):.1e} ({entry.get('worst', '')})"
        twins = f"twins {entry.get('twin_loss_difference', 0):.1e} and {entry.get('twin_state_difference', 0):.1e}"
        return f"{differences}; {twins}"
    return "; ".join(each for each in (entry.get("reason", ""), entry.get("place", "")) if each)


def _summary(verdict: str, found: Found) -> str:
    """One sentence for all modules of a verdict that needs no explanation of its own."""
    if verdict == "random":
        return "the session trains the module, and values cannot be compared"
    entries = [entry for entry in found.values() if entry["verdict"] == verdict]
    most = max(_ratio(entry) for entry in entries)
    return f"differences are at most {most:.1f} times those of eager twins whose weights were moved by 1e-7"


def _ratio(entry: Mapping[str, Any]) -> float:
    pairs = (("loss_difference", "twin_loss_difference"), ("state_difference", "twin_state_difference"))
    return max(entry.get(ours, 0.0) / max(entry.get(theirs, 0.0), 1e-5) for ours, theirs in pairs)
