"""Pages from committed results: docs/results, the headlines of README.md, and the figures in docs/images.

    python benchmarks/table.py            # rewrite docs/results, docs/images and the part of README.md between the markers
    python benchmarks/table.py --check    # write nothing; exit 1 and name the files that differ from benchmarks/results
    python benchmarks/table.py --site DIR --plots DIR    # pages and figures elsewhere

`benchmarks/pages.toml` has the sections of the pages, `rows` the form of their tables. benchmarks/gpu/bench.py writes docs/results/gpu.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import situations
from figures import figures
from rows import line, table, tables, tally

ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = ROOT / "benchmarks" / "results"
README: Final = ROOT / "README.md"
SITE: Final = ROOT / "docs" / "results"
PLOTS: Final = ROOT / "docs" / "images"
BEGIN: Final = "<!-- results: made by benchmarks/table.py -->"
END: Final = "<!-- end of results -->"

Result = Mapping[str, Any]

PAGES: Final = tuple(tomllib.loads((ROOT / "benchmarks" / "pages.toml").read_text(encoding="utf-8"))["page"])
"""The pages in the order of the index: name, title, summary, and sections with benchmark, title, command and method."""

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
"""Rows of README.md: page, row and compared figure, README's name for the row, and README's name for the figure if it is another one."""


INDEX: Final = """# Results

`python benchmarks/table.py` generates these pages from the files in `benchmarks/results`, which hold every single round; a test fails if they differ.
Rows that miss their bar stay.

{index}

[GPUs](gpu.md) has the claims for a card, [situations](situations.md) counts public reports that were set up as tests, and
[hostile inputs](hostile_inputs.md) files that are made to break a reader.

## How to read the tables

- Each side of a comparison runs in a process of its own (kernels share one), in alternating rounds; a figure is the median over rounds.
- *Ratio* is nntask's figure over the compared one. For another program it says which is faster, or needs less.
- A cell such as *2.75 / 2.68: 1.02* has nntask's figure, the compared figure and the ratio. A shared figure of nntask is in a column or a head of its
  own.
- A *bar* is a promise about the ratio or, with a unit, about nntask's own figure. It is not resolved if it lies within the interval of the
  measurement. If a head has the bar, cells say only that it is not met.
- Below each table are the date, the measured commit, the processor, the rounds, the command, and the file in `benchmarks/results`, whose `sources`
  are git's names of the measured folders. Shared by all that use it: {machine}.
- `OPENBLAS_CORETYPE=Haswell` is set, so OpenBLAS runs AVX2 code; nntask's fp32 products, and the sgemm peak, go to oneDNN (AVX-512). PyTorch has its
  own libraries, which ignore that variable.

`make bench` measures the most common ones on your machine; `benchmarks/README.md` lists all commands.
"""


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
    verdicts = {page["name"]: tally(results[section["benchmark"]] for section in page["section"]) for page in PAGES} | {
        "all": tally(results.values())
    }
    counts = {name: [found[verdict] for verdict in ("met", "not met", "not resolved")] for name, found in verdicts.items()}
    rows = [[f"[{page['title']}]({page['name']}.md)", page["summary"], *counts[page["name"]]] for page in PAGES]
    index = table(["page", "measurements", "bars met", "not met", "not resolved"], [*rows, ["all", "", *counts["all"]]])
    pages = "\n".join(page["name"] for page in PAGES)
    return f"""{INDEX.format(index=index, machine=_machine(results))}
:::{{toctree}}
:hidden:

{pages}
gpu
situations
hostile_inputs
:::
"""


def _machine(results: Mapping[str, Result]) -> str:
    """Return the parts of machine and versions that all results share."""
    machine, versions = _shared(result["machine"] for result in results.values()), _shared(result["versions"] for result in results.values())
    packages = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()) if name != "nntask")
    return f"{machine['cores']} cores, {machine['memory_gib']:g} GiB, {machine['system']}, Python {machine['python']}, {packages}"


def _shared(described: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the keys that have the same value wherever they occur."""
    values: dict[str, set[Any]] = {}
    for each in described:
        for key, value in each.items():
            values.setdefault(key, set()).add(value)
    return {key: found.pop() for key, found in values.items() if len(found) == 1}


def _page(page: Mapping[str, Any], results: Mapping[str, Result]) -> str:
    shared = _shared(result["versions"] for result in results.values()).keys()
    parts = [f"# {page['title']}", page["summary"], "[Reading the tables](index.md)."]
    parts += [_section(section, results[section["benchmark"]], shared) for section in page["section"]]
    return "\n\n".join(parts) + "\n"


def _section(section: Mapping[str, Any], result: Result, shared: Collection[str]) -> str:
    versions = [f"{name} {version}" for name, version in result["versions"].items() if name not in shared]
    rounds = result["settings"]["rounds"]
    facts = [
        result["date"],
        result["commit"],
        result["machine"]["processor"].removesuffix(" Processor"),
        *versions,
        f"{rounds} round{'s' * (rounds > 1)}",
    ]
    stamp = f"{', '.join(facts)}: `{section['command']}`, `{section['benchmark']}.json`."
    own = [table(each["head"], each["rows"]) for each in result.get("tables", ())]
    return "\n\n".join([f"## {section['title']}", section["method"], *tables(result["comparisons"], section), *own, *result.get("notes", ()), stamp])


def headlines(results: Mapping[str, Result]) -> str:
    """The six rows of README.md, the count of all bars, and the addresses of the pages."""
    sections = [(page["name"], section["benchmark"]) for page in PAGES for section in page["section"]]
    rows = {(page, row["what"], row["peer"]): row for page, benchmark in sections for row in results[benchmark]["comparisons"]}
    shown = [line(rows[page, what, peer], f"[{name}][{page}]", other) for page, what, peer, name, other in HEADLINES]
    found = tally(results.values())
    lines = [
        table(["measured on two CPU cores", "nntask", "compared with", "ratio", "bar"], shown),
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
        site / "situations.md": situations.page(situations.load(RESULTS / "situations.csv")),
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
