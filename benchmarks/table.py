"""The results as pages: docs/results and the headlines of README.md, made from the committed JSON, and the figures in docs/images.

    python benchmarks/table.py            # rewrite docs/results, docs/images and the part of README.md between the markers
    python benchmarks/table.py --check    # write nothing; exit 1 and name the files that do not show what benchmarks/results says
    python benchmarks/table.py --site DIR --plots DIR    # pages and figures elsewhere

A row says what it stands beside. Only another program is a peer, and only beside a peer is nntask called faster or slower, which way round the unit
says. Beside itself under other conditions, or beside a limit (a bound, the speed of a copy), a row has the bare ratio; beside a count there is none.
A bar is met, not met, or not resolved where it lies within the interval of what was measured. docs/results/gpu.md is benchmarks/gpu/bench.py's.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent))
from figures import figures

ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = ROOT / "benchmarks" / "results"
README: Final = ROOT / "README.md"
SITE: Final = ROOT / "docs" / "results"
PLOTS: Final = ROOT / "docs" / "images"
BEGIN: Final = "<!-- results: made by benchmarks/table.py -->"
END: Final = "<!-- end of results -->"

Row = Mapping[str, Any]
Result = Mapping[str, Any]
Beside = Literal["peer", "self", "limit", "count"]

PAGES: Final = tuple(tomllib.loads((ROOT / "benchmarks" / "pages.toml").read_text(encoding="utf-8"))["page"])
"""The pages in the order of the index: name, title, summary, and sections with benchmark, title, command and method."""

BESIDE: Final[Mapping[Beside, tuple[str, ...]]] = {
    "peer": ("torch", "dask.threaded", "distributed", "the same, malloc"),
    "self": (
        "unlimited",
        "all of it",
        "nntask's own tiles",
        "before",
        "blocking copies",
        "eager + lru",
        "everything fits",
        "none",
        "one client at a time",
        "of",
        "its budget",
        "fp32",
        "block",
        "device",
        "the better",
        "one worker",
        "sequences of",
        "around position",
        "best of",
        "the same, not traced",
        "cached",
        "a step without it",
        "single tasks",
        "a node's share",
        "measured",
        "0.0118 + 0.365 x sequences",
    ),
    "limit": (
        "sgemm peak",
        "copy",
        "one large GEMM",
        "LP bound",
        "lower bound",
        "the step",
        "(n - 1) / n",
        "allowed",
        "its budget and",
        "python -c pass",
        "import numpy",
    ),
    "count": ("bar", "all", "asked for", "this one"),
}
"""How the names of what a row stands beside begin. A longer beginning wins over a shorter one."""

SPEEDS: Final = ("tokens/s", "steps/s", "GB/s", "GF/s")
TIMES: Final = ("s", "ms", "us", "s a step")
BYTES: Final = ("bytes", "GB", "GB a step", "TB a step")
UNITS: Final = {"us": "µs", "GF/s": "Gflop/s"}
"""How pages write a unit, where that differs from the results."""

EXCHANGE: Final = "tiny on 2 nodes, exchange alone 48% of the computation: a step (95 % interval of the median ratio: 1.46 to 1.52)"
HEADLINES: Final = (
    (
        "training",
        "gpt2, 4 x 1024 tokens a step, fp32",
        "torch, hand-written, eager, kept (the fastest)",
        "GPT-2 small, fp32",
        "best of 8 set-ups of torch",
    ),
    ("training", "gpt2, 4 x 1024 tokens a step, fp32: peak resident memory", "torch, transformers, eager", "its peak memory", ""),
    ("memory", "RAM at an eighth of needed + disk", "unlimited", "GPT-2 small, 1/8 of the RAM it needs", "all it needs"),
    ("memory", "gpt2-large in 1GB, train, validate, save, kill -9: resident memory", "allowed", "GPT-2 large, `--ram 1GB`: resident", ""),
    ("runtime", "empty task, replayed, one worker", "dask.threaded", "cost of a replayed task", ""),
    ("cluster", EXCHANGE, "a node's share of it without exchange", "2 nodes on a busy link: a step", "without exchange"),
)
"""Rows of README.md: page; the row and what it stands beside; how README calls the two, the latter as it is where nothing is said."""


def load(directory: Path) -> dict[str, Result]:
    """All results by the name of their benchmark."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))}


def pages(results: Mapping[str, Result]) -> dict[str, str]:
    """Name of a file in docs/results -> its text.

    Raises:
        ValueError: a result has no section in pages.toml or several, or a section has no result.
    """
    described = [section["benchmark"] for page in PAGES for section in page["section"]]
    if sorted(described) != sorted(results):
        missing = sorted(set(described) ^ set(results))
        raise ValueError(f"each result of benchmarks/results needs exactly one section in benchmarks/pages.toml; differing: {', '.join(missing)}")
    made = {f"{page['name']}.md": _page(page, results) for page in PAGES}
    return {"index.md": _index(results), **made}


def _index(results: Mapping[str, Result]) -> str:
    lines = [
        "# Results",
        "",
        "Everything here is generated by `python benchmarks/table.py` from the JSON files in `benchmarks/results`, which hold every single",
        "round, and a test fails when a page and the files differ. Rows that miss their bar stay.",
        "",
        "| page | what it measures | bars met | not met | not resolved |",
        "|---|---|---|---|---|",
    ]
    for page in PAGES:
        verdicts = tally(results[section["benchmark"]] for section in page["section"])
        counts = " | ".join(str(verdicts[name]) for name in ("met", "not met", "not resolved"))
        lines.append(f"| [{page['title']}]({page['name']}.md) | {page['summary']} | {counts} |")
    verdicts = tally(results.values())
    lines.append(f"| all | | {verdicts['met']} | {verdicts['not met']} | {verdicts['not resolved']} |")
    lines += [
        "",
        "[GPUs](gpu.md) has the claims for a card, and what `make bench-gpu` has measured of them. [Situations](situations.md) lists public reports",
        "that were set up as tests, [hostile inputs](hostile_inputs.md) files that are made to break a reader.",
        "",
        "## How to read the tables",
        "",
        "- Every side of a comparison runs in a process of its own (kernels share one and take turns), rounds alternate between the sides, and",
        "  a figure is the median over rounds.",
        "- *ratio* is nntask's figure over the one beside it. Beside another program it says who is faster, or who needs less; beside nntask",
        "  itself under other conditions, or beside a limit such as a lower bound, it stands alone.",
        "- A *bar* is what was promised: of the ratio, or, with a unit, of nntask's own figure. It is met, not met, or not resolved, where it",
        "  lies within the interval of what was measured.",
        "- All figures come from one small machine, named under each table. It sets `OPENBLAS_CORETYPE=Haswell`, so OpenBLAS runs AVX2 code;",
        "  nntask's fp32 products go to oneDNN (AVX-512) then, and so does the measured sgemm peak. PyTorch brings its own libraries, which",
        "  that variable does not touch.",
        "- The commit is that of the measured tree; `sources` in a file has git's names of its folders, which survive a rebase.",
        "",
        "To measure on your machine: `make bench` for the usual ones, or the command under a table. `benchmarks/README.md` lists them all.",
    ]
    lines += ["", ":::{toctree}", ":hidden:", "", *(page["name"] for page in PAGES), "gpu", "situations", "hostile_inputs", ":::"]
    return "\n".join(lines) + "\n"


def _page(page: Mapping[str, Any], results: Mapping[str, Result]) -> str:
    parts = [f"# {page['title']}", page["summary"], "[How to read the tables](index.md)."]
    parts += [_section(section, results[section["benchmark"]]) for section in page["section"]]
    return "\n\n".join(parts) + "\n"


def _section(section: Mapping[str, str], result: Result) -> str:
    machine = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    rounds = result["settings"]["rounds"]
    stamp = (
        f"{result['date']}, commit {result['commit']}; {machine['processor']}, {machine['cores']} cores, {machine['memory_gib']:g} GiB; Python "
        f"{machine['python']}, {versions}; {f'median of {rounds} rounds' if rounds > 1 else 'one round'}. `{section['command']}` writes "
        f"`benchmarks/results/{section['benchmark']}.json`."
    )
    lines = ["| measured | nntask | beside | ratio | bar |", "|---|---|---|---|---|", *(_row(row) for row in result["comparisons"])]
    tables = map(_table, result.get("tables", ()))
    return "\n\n".join([f"## {section['title']}", section["method"], "\n".join(lines), *tables, *result.get("notes", ()), stamp])


def _table(table: Mapping[str, Any]) -> str:
    """A table of a result's own: `head` and `rows` of cells in Markdown."""
    head, *rows = ("| " + " | ".join(str(cell).replace("|", r"\|") for cell in row) + " |" for row in (table["head"], *table["rows"]))
    return "\n".join([head, "|---" * len(table["head"]) + "|", *rows])


def _row(row: Row, name: str = "", other: str = "") -> str:
    """A row of a table, under names of its own where they are given."""
    beside = _beside(row)
    other = "" if row["peer"] in ("bar", "this one") else f"{other or row['peer'].removesuffix(', ms')}: {_amount(row['theirs'], row['unit'])}"
    ratio = "" if beside == "count" or not row["unit"] else f"{row['ratio']:.2f}"
    if ratio and beside == "peer":
        ratio += f", {comparison(row)}"
    bar = f"{_bar(row)}: {verdict(row).replace('not met', '**not met**')}" if "bar" in row else ""
    return f"| {name or row['what']} | {_amount(row['ours'], row['unit'])} | {other} | {ratio} | {bar} |"


def _beside(row: Row) -> Beside:
    """What kind of thing a row's other figure is.

    Raises:
        ValueError: `BESIDE` does not know its name.
    """
    found = [(len(start), kind) for kind, starts in BESIDE.items() for start in starts if row["peer"].startswith(start)]
    if not found:
        raise ValueError(f"{row['what']!r} stands beside {row['peer']!r}; say in BESIDE of benchmarks/table.py what that is")
    return max(found)[1]


def comparison(row: Row) -> str:
    """A row beside a peer in one word, whichever way round is better: faster or slower, less or more; "as fast" and "as much" within a percent.

    Raises:
        ValueError: the unit is neither a speed, a time nor a number of bytes.
    """
    equal = f"{row['ratio']:.2f}" == "1.00"
    better = row["ratio"] > 1 if row["better"] == "more" else row["ratio"] < 1
    if row["unit"] in SPEEDS + TIMES:
        return "as fast" if equal else "faster" if better else "slower"
    if row["unit"] in BYTES:
        return "as much" if equal else "less" if better else "more"
    raise ValueError(f"{row['what']!r} is in {row['unit']!r}, which benchmarks/table.py cannot compare")


def verdict(row: Row) -> str:
    """Of a row with a bar: met, not met or not resolved."""
    return row.get("verdict") or ("met" if row["met"] else "not met")


def tally(results: Any) -> Counter[str]:
    """How many bars of some results are met, not met and not resolved."""
    return Counter(verdict(row) for result in results for row in result["comparisons"] if "bar" in row)


def _bar(row: Row) -> str:
    """A row's bar in signs; on a count that must be complete, "all"."""
    subject, relation, limit = row["bar"].split()
    if _beside(row) == "count" and (subject, relation, limit) == ("ratio", ">=", "1"):
        return "all"
    sign = {">=": "≥ ", "<=": "≤ ", "in": ""}[relation]
    return f"{sign}{limit.replace('..', ' to ')}" + (f" {UNITS.get(row['unit'], row['unit'])}" if subject == "ours" and row["unit"] else "")


def _amount(value: float, unit: str) -> str:
    """A figure with its unit; "yes" and "no" where there is none."""
    if unit == "bytes":
        return f"{value / 1e9:.2f} GB" if value >= 1e8 else f"{value / 1e6:.1f} MB"
    if unit == "":
        return "yes" if value else "no"
    shown = f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
    return f"{shown} {UNITS.get(unit, unit)}"


def headlines(results: Mapping[str, Result]) -> str:
    """The six rows of README.md, the count of all bars, and the addresses of the pages."""
    lines = ["| measured on two CPU cores | nntask | compared with | ratio | bar |", "|---|---|---|---|---|"]
    sections = [(page["name"], section["benchmark"]) for page in PAGES for section in page["section"]]
    rows = {(page, row["what"], row["peer"]): row for page, benchmark in sections for row in results[benchmark]["comparisons"]}
    for page, what, peer, name, beside in HEADLINES:
        lines.append(_row(rows[page, what, peer], f"[{name}][{page}]", beside))
    found = tally(results.values())
    lines += [
        "",
        f"All results have {sum(found.values())} bars: {found['met']} are met, {found['not met']} are not, and {found['not resolved']} lie within "
        "the error of the measurement.",
        "",
    ]
    return "\n".join([*lines, *(f"[{page}]: docs/results/{page}.md" for page in dict.fromkeys(page for page, *_ in HEADLINES))])


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


def made(site: Path, plots: Path) -> dict[Path, str]:
    """Every file that follows from the committed results -> its text."""
    results = load(RESULTS)
    return {
        README: filled(README.read_text(encoding="utf-8"), headlines(results)),
        **{site / name: text for name, text in pages(results).items()},
        **{plots / name: text for name, text in figures(results).items()},
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Write the files, or say which are stale."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare only")
    parser.add_argument("--site", type=Path, default=SITE, help="directory of the pages (default: docs/results)")
    parser.add_argument("--plots", type=Path, default=PLOTS, help="directory of the figures (default: docs/images)")
    options = parser.parse_args(argv)
    files = made(options.site, options.plots)
    if options.check:
        stale = [path for path, text in files.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
        if stale:
            names = ", ".join(str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path) for path in stale)
            print(f"not what benchmarks/results says: {names}; run: python benchmarks/table.py", file=sys.stderr)
        return int(bool(stale))
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
