"""The pages of the site hold without Sphinx: links and anchors lead somewhere, flags exist, tables are those of the code, drawings are fresh.

Sphinx itself, with every warning as an error, builds the site in the long tests. Code blocks of these pages run in `test_readme.py` and
`test_readme_commands.py`.
"""

from __future__ import annotations

import csv
import dataclasses
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from nntask.config.environment import VARIABLES
from nntask.config.settings import SUFFIXES, TrainSettings
from nntask.data.dataset import DATASETS
from nntask.data.row_keys import ROW_KEYS
from nntask.engine.evaluation import Evaluation
from nntask.models.registry import FAMILIES
from nntask.telemetry.metrics import StepRecord
from wrappers.cli.commands.plan import OWN_FLAGS
from wrappers.cli.options.flags import table_of

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.DOTALL | re.MULTILINE)
MODELS_HEAD = "| `--model` | `model_type` | learns | what it is |"
MOST_CONCEPTS = 60
"""Largest number of terms that a newcomer to the scheduler must learn."""
LINK = re.compile(r"(?<!!)\[(?:[^\]\[]|\[[^\]]*\])+\]\(([^)\s]+)\)")


def name_of(page: Path) -> str:
    """A page as tests name it."""
    return str(page.relative_to(ROOT))


@cache
def anchors(page: Path) -> set[str]:
    """What links may name of a page: its headings as GitHub and MyST spell them, and its own targets."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#{1,4} (.+)$", text, re.MULTILINE)
    spelt = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    return spelt | set(re.findall(r"^\(([\w-]+)\)=$", text, re.MULTILINE))


def wrong_links(page: Path) -> list[str]:
    """Links of a page to pages, files or headings that are not there."""
    found = []
    for link in LINK.findall(CODE.sub("`code`", page.read_text())):
        place, _, anchor = link.partition("#")
        if "://" in link or link.startswith("mailto:"):
            continue
        target = page if not place else (page.parent / place).resolve()
        if target.parent == DOCS / "reference" / "api" and target.suffix == ".rst":  # made when the site is built, of packages with a front door
            is_there = bool(getattr(import_module(target.stem), "__all__", None))
        else:
            is_there = target.exists() and (not anchor or target.suffix != ".md" or anchor in anchors(target))
        if not is_there:
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    """Relative links name files that exist, and headings that these have."""
    assert wrong_links(page) == []


def test_a_wrong_link_is_found(tmp_path: Path) -> None:
    """A missing page, a missing heading and a missing image directory are three findings; code is none."""
    page = tmp_path / "page.md"
    page.write_text("# One two\n\n[a](none.md) [b](#one-two) [c](#three) [d](page.md#one-two) [e](page.md#four) `[f](none.md)`\n")
    assert wrong_links(page) == ["none.md", "#three", "page.md#four"]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_images_exist(page: Path) -> None:
    """Every image of a page is in the repository."""
    images = [
        *re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", page.read_text()),
        *re.findall(r"^:::\{(?:figure|image)\} (\S+)$", page.read_text(), re.MULTILINE),
    ]
    assert [image for image in images if not (page.parent / image).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_exist(page: Path) -> None:
    """Paths in code that look like files of this repository are files of it."""
    files = re.findall(r"`((?:nntask|tiles|scheduler|wrappers|examples|tests|benchmarks|docs|docker)/[\w/.-]+\.\w+)`", page.read_text())
    assert [file for file in files if not (ROOT / file).exists()] == []


@pytest.mark.parametrize("package", ["nntask", "scheduler", "tiles", "wrappers"])
def test_modules_of_readmes_exist(package: str) -> None:
    """The first cells of a package's tables of modules and rooms name files or folders of it."""
    text = (ROOT / package / "README.md").read_text()
    tables = re.findall(r"^\| (?:module|room|part) \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    named = [name.rstrip("/") for table in tables for row in table.splitlines() for name in re.findall(r"`([^`]+)`", row.split("|")[1])]
    assert named
    assert [name for name in named if not [*(ROOT / package).glob(f"**/{name}"), *(ROOT / package).glob(f"**/{name}.py")]] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_folders_of_tables_exist(page: Path) -> None:
    """A table of modules is of a folder of the product."""
    folders = re.findall(r"^:::\{modules\} (\S+)$", page.read_text(), re.MULTILINE)
    assert [folder for folder in folders if not (ROOT / folder / "__init__.py").exists()] == []


def test_every_package_has_a_table_of_modules() -> None:
    """The pages about the inside name the modules of every package."""
    tables = {folder for page in DOCS.glob("internals/*.md") for folder in re.findall(r"^:::\{modules\} (\S+)$", page.read_text(), re.MULTILINE)}
    inits = [path for package in ("scheduler", "tiles", "nntask", "wrappers") for path in (ROOT / package).rglob("__init__.py")]
    packages = {str(path.parent.relative_to(ROOT)) for path in inits}
    assert packages - tables == set()


def test_every_module_about_pytorch_has_its_place() -> None:
    """The list of steps from a batch to a step names each module of the package once."""
    section = (DOCS / "internals" / "wrappers.md").read_text().partition("## PyTorch\n")[2].partition(":::{modules}")[0]
    steps = [*re.findall(r"^\d\. .*(?:\n   .*)*", section, re.MULTILINE), *re.findall(r"^All of them .*$", section, re.MULTILINE)]
    named = [name for step in steps for name in re.findall(r"`([a-z_]+)`", step)]
    stems = {path.stem for path in (ROOT / "wrappers" / "torch").rglob("*.py")}
    assert sorted(named) == sorted(stems - {"__init__", "interchange"})


def test_every_page_is_reached() -> None:
    """Every page stands in a table of contents, by its name or by a pattern."""
    reached = {DOCS / "index.md"}
    for page in PAGES:
        for tree in re.findall(r"^:::\{toctree\}\n(.*?)^:::$", page.read_text(), re.DOTALL | re.MULTILINE):
            for entry in tree.split():
                reached.update(page.parent.glob(f"{entry}.md"))
    assert set(PAGES) - reached == set()


def table(page: str, head: str) -> list[list[str]]:
    """Cells of the table of a page whose head is `head`."""
    _, found, rest = (DOCS / page).read_text().partition(f"{head}\n")
    assert found, f"docs/{page} has no table {head}"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in rest.split("\n\n")[0].splitlines()[1:]]


def test_models_are_named() -> None:
    """The guide to models names every family with its objectives and presets, in order."""
    rows = [[re.findall(r"`([a-z0-9_.-]+)`", cell) for cell in cells[:3]] for cells in table("guides/models.md", MODELS_HEAD)]
    assert rows == [[list(family.presets), [kind], list(family.config.objectives)] for kind, family in FAMILIES.items()]


def test_tiling_flags() -> None:
    """The guide to tiles lists exactly the flags of that group."""
    named = [flag for cells in table("guides/tiles.md", "| flag | meaning |") for flag in re.findall(r"--([a-z-]+)", cells[0])]
    assert sorted(named) == sorted(flag.name for flag in table_of(TrainSettings).values() if flag.group == "tiling" and flag.field not in SUFFIXES)


def test_datasets() -> None:
    """The page for users of NNTile and the help list all datasets, in order."""
    (row,) = [cells for cells in table("start/from-nntile.md", "| topic | in nntask |") if cells[0] == "data"]
    assert re.findall(r"`([^`]+)`", row[1]) == ["--dataset", *DATASETS]
    help_text = (ROOT / "nntask" / "config" / "settings.py").read_text().partition("    dataset: str")[2].partition("    dataset_path")[0]
    assert sorted(DATASETS, key=help_text.index) == list(DATASETS)


def test_flags_of_plan() -> None:
    """The guide to plans lists the flags that only `nntask plan` takes."""
    named = [cells[0].strip("`").removeprefix("--") for cells in table("guides/planning.md", "| flag of `plan` | meaning |")]
    assert named == [name for name in OWN_FLAGS if name != "json"]


def registry_tables() -> ModuleType:
    """The module that makes tables of the reference."""
    spec = spec_from_file_location("registry_tables", DOCS / "_ext" / "registry_tables.py")
    assert spec is not None
    assert spec.loader is not None
    tables = module_from_spec(spec)
    spec.loader.exec_module(tables)
    return tables


def test_table_of_row_keys() -> None:
    """The page of keys of rows shows each key of the registry once for each kind of row."""
    assert ":::{rows-table}" in (DOCS / "reference" / "rows.md").read_text()
    shown = [
        (cells[0], key)
        for cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in registry_tables().rows_markdown().splitlines()[2:])
        for key in re.findall(r"`([^`]+)`", cells[1])
    ]
    assert sorted(shown) == sorted((kind, key) for kind, rules in ROW_KEYS.items() for key in rules)


def test_environment_table() -> None:
    """The page of environment variables shows a row for each variable of the registry, and its flag exists; pages name no other variable."""
    tables = registry_tables()
    assert ":::{environment-table}" in (DOCS / "reference" / "environment.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in tables.environment_markdown().splitlines()[2:]]
    assert rows == [[f"`{each.name}`", f"`--{each.flag}`" if each.flag else "", each.help] for each in VARIABLES]
    flags = {flag.name for flag in table_of(TrainSettings).values()}
    assert {each.flag for each in VARIABLES if each.flag} <= flags
    named = {name for page in PAGES for name in re.findall(r"\b(?:NNTASK|STARPU)_[A-Z_]+\b", page.read_text())}
    assert named - {each.name for each in VARIABLES} == set()


def test_metrics_are_explained() -> None:
    """The tables of metrics.jsonl name the keys of a step's line, those of a validation apart, and no others."""
    named = [key for cells in table("reference/files.md", "| key | unit | meaning |") for key in re.findall(r"`([a-z_]+)`", cells[0])]
    assert sorted(named) == sorted(field.name for field in dataclasses.fields(StepRecord))
    validated = [
        key for cells in table("reference/files.md", "| key of a validation | unit | meaning |") for key in re.findall(r"`([a-z_]+)`", cells[0])
    ]
    assert sorted(validated) == sorted(Evaluation(0.0, 1.0, 0.0, 1).figures())


def names_of_tier(head: str) -> dict[str, list[str]]:
    """Names by package, as a table of the page of API tiers lists them."""
    return {
        re.findall(r"`([^`]+)`", cells[0])[0]: re.findall(r"`([^`]+)`", cells[2])
        for cells in table("reference/api.md", f"| package | contents | {head} |")
    }


def test_tiers_of_the_api() -> None:
    """The stable packages are listed with exactly the names that they export, the provisional ones with some of theirs, and none is in both."""
    stable, provisional = names_of_tier("stable names"), names_of_tier("provisional names")
    assert stable == {name: list(import_module(name).__all__) for name in ("nntask", "scheduler", "tiles", "wrappers.torch")}
    unknown = {name: sorted(set(names) - set(import_module(name).__all__)) for name, names in provisional.items()}
    assert not any(unknown.values()), unknown
    assert all(provisional.values())
    assert not stable.keys() & provisional.keys()


def test_drawings_are_fresh() -> None:
    """The drawings of the concepts are what their script makes, and their words fit their boxes."""
    done = subprocess.run([sys.executable, "docs/_ext/drawings.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_page_about_pytorch_has_every_family() -> None:
    """Each once, in order."""
    from support.torch_families import FAMILIES

    named = [cells[0].strip("`") for cells in table("reference/pytorch.md", "| family | model | kind | calls | `nntask train` |")]
    assert named == list(FAMILIES)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "families",
    [
        pytest.param(("bert",), marks=pytest.mark.pages),
        pytest.param(("bert", "vit"), marks=pytest.mark.long),
        pytest.param((), marks=pytest.mark.long),
    ],
    ids=["a family", "some families", "all families"],
)
def test_the_page_about_pytorch_is_fresh(families: tuple[str, ...]) -> None:
    """What is tested and refused of PyTorch models is what the code and its sentences say; run with the commands of the pages, or `long`."""
    done = subprocess.run([sys.executable, "docs/_ext/torch_page.py", "--check", *families], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def concepts_of(page: Path) -> set[str]:
    """Terms that a page introduces: emphasised ones, entries of a glossary, and rows of a table of words."""
    text = CODE.sub("`code`", page.read_text())
    glossary = text.partition(":::{glossary}")[2].splitlines()
    emphasised = re.findall(r"(?<![*\w])\*([a-z][a-z\- \n]*)\*(?!\*)", text)
    rows = re.findall(r"^\| ([a-z ]+) \|", text.partition("| word of the core |")[2].partition("\n\n")[0], re.MULTILINE)
    return {" ".join(term.split()) for term in (*emphasised, *(line for line in glossary if re.match(r"[a-z]", line)), *rows)}


def test_a_newcomer_to_the_scheduler_learns_few_concepts() -> None:
    """At most `MOST_CONCEPTS` terms are introduced by the pages of concepts and the page about the scheduler; more must replace others."""
    concepts = set().union(*map(concepts_of, [*(DOCS / "concepts").glob("*.md"), DOCS / "internals" / "scheduler.md"]))
    assert {"budget", "codelet", "frontier", "forecast", "backing replica"} <= concepts  # one of each kind of place
    assert len(concepts) <= MOST_CONCEPTS, sorted(concepts)


def test_decisions_have_one_shape() -> None:
    """At most 40 pages, each with a title of its own and the sections in their order."""
    pages = {page: page.read_text() for page in sorted(DOCS.glob("decisions/*.md")) if page.name != "index.md"}
    assert 0 < len(pages) <= 40
    sections = ["Context", "Decision", "Consequence", "Alternatives"]
    assert {page.name: found for page, text in pages.items() if (found := re.findall(r"^## (.+)$", text, re.MULTILINE)) != sections} == {}
    titles = [text.partition("\n")[0] for text in pages.values()]
    assert all(title.startswith("# ") for title in titles)
    assert len(set(titles)) == len(titles)


def test_the_page_about_installing_lists_every_extra() -> None:
    """Who reads it knows what can be added."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = (DOCS / "start" / "install.md").read_text().partition("## Extras")[2]
    listed = {name for row in re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)}
    assert listed == set(extras)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_site_builds(tmp_path: Path) -> None:
    """Sphinx makes every page without a warning, and the pages hold what they are made from."""
    pytest.importorskip("sphinx", reason="Sphinx is not installed; make docs installs it")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "--keep-going",
        "-n",
        "-E",
        "-d",
        str(tmp_path / "trees"),
        "-b",
        "html",
        str(DOCS),
        str(tmp_path / "site"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site"
    assert "--gpu-memory" in (site / "reference" / "command-line.html").read_text()
    assert "NNTASK_ONEDNN" in (site / "reference" / "environment.html").read_text()
    assert "TileTensor" in (site / "reference" / "api" / "tiles.html").read_text()


def test_the_list_of_situations_names_tests() -> None:
    """Each row is filled, and its tests are functions of the suite."""
    functions = {name for file in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)}
    with (ROOT / "benchmarks" / "results" / "situations.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= 120
    assert [row for row in rows if not all(row.values())] == []
    gone = sorted({name for row in rows for name in row["tests"].split()} - functions)
    assert not gone, f"situations.csv names tests that are not there: {', '.join(gone)}"
