"""The benchmark table of README.md, made from the committed results.

python benchmarks/table.py            # rewrite the part of README.md between the markers
python benchmarks/table.py --check    # exit 1 when README.md does not show what benchmarks/results says
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = ROOT / "benchmarks" / "results"
README: Final = ROOT / "README.md"
BEGIN: Final = "<!-- benchmarks: made by benchmarks/table.py -->"
END: Final = "<!-- end of benchmarks -->"


def load(directory: Path) -> list[dict[str, Any]]:
    """All results, by name of the benchmark."""
    return [json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))]


def render(results: Sequence[dict[str, Any]]) -> str:
    """The table as Markdown, losses included."""
    if not results:
        return "Nothing has been measured yet; `make bench` does."
    lines = ["| measured | nntask | peer | nntask / peer | bar |", "|---|---|---|---|---|"]
    lines += [_row(row) for result in results for row in result["comparisons"]]
    lines.append("")
    for result in results:
        machine = result["machine"]
        versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
        lines.append(
            f"`{result['benchmark']}`: {result['date']}, commit {result['commit']}, {machine['processor']}, {machine['cores']} cores, "
            f"{machine['memory_gib']:g} GiB, Python {machine['python']}, {versions}; median of {result['settings']['rounds']} rounds."
        )
        lines.append("")
    return "\n".join(lines).rstrip()


def _row(row: dict[str, Any]) -> str:
    ahead = row["ratio"] > 1 if row["better"] == "more" else row["ratio"] < 1
    verdict = row.get("verdict") or ("met" if row.get("met") else "**not met**")
    bar = f"{row['bar'].replace('>=', '≥').replace('<=', '≤')}: {verdict}" if "bar" in row else ""
    ratio = f"{row['ratio']:.2f}" + ("" if row["better"] == "equal" else " (ahead)" if ahead else " (**behind**)")
    return f"| {row['what']} | {_amount(row['ours'], row['unit'])} | {row['peer']}: {_amount(row['theirs'], row['unit'])} | {ratio} | {bar} |"


def _amount(value: float, unit: str) -> str:
    if unit == "bytes":
        return f"{value / 1e9:.2f} GB"
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"


def filled(text: str, table: str) -> str:
    """`text` with `table` between the markers.

    Raises:
        ValueError: a marker is missing.
    """
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page needs the lines {BEGIN!r} and {END!r}, in this order; put them where the table belongs")
    return f"{head}{BEGIN}\n{table}\n{END}{tail}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare only")
    options = parser.parse_args()
    text = README.read_text()
    wanted = filled(text, render(load(RESULTS)))
    if options.check:
        if text != wanted:
            print("README.md does not show the committed results; run: python benchmarks/table.py", file=sys.stderr)
            return 1
        return 0
    README.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
