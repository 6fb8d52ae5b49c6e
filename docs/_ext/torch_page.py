"""The page of tested and refused PyTorch models: ``python docs/_ext/torch_page.py`` writes it, and a test compares it.

Families are those of `tests/support/torch_families.py`, tests those over them, mistakes those of `tests/support/torch_refusals.py`, arguments and
flags those that `wrappers/torch` refuses. The operations of a family come from a capture of its step, and every message from the mistake itself.
``--check`` writes nothing; names of families after it leave out the rows of the others and the sections about all families, which saves time. This
script does not need Sphinx.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
import inspect
import io
import json
import os
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from nntask import NntaskError

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs" / "reference" / "pytorch.md"
TESTS: Final = (
    "tests/wrappers/torch/test_torch_session.py",
    "tests/wrappers/torch/test_torch_cuts.py",
    "tests/wrappers/torch/test_torch_gpu.py",
    "tests/gpu/test_gpu_torch.py",
)
"""Files with tests over families."""
REPORT_MODULES: Final = tuple(f"torch_reports_{name}" for name in ("autograd", "views", "state", "training", "batches"))
"""Modules of `tests/support` that hold programs of public reports."""
REPORTS: Final = ROOT / "benchmarks" / "results" / "torch_reports.csv"
"""List of public reports with their outcomes, which the page counts."""
SHORT: Final = 4
"""Largest number of words of a remedy that the page shows with its rule."""
OUTCOMES: Final = {"equal": "eager PyTorch's results", "refused": "refused", "differs": "**other results**", "raised": "**fails**"}
"""Outcome of a program of a public report -> its name in the table."""
SMALL: Final = 3000
"""Bytes above which a parameter is cut here, as in the tests: nearly all of them."""
BEGIN: Final = "## Families that nntask train refuses"
END: Final = "## Tests over families"
"""Heading after the sections about all families together, which begin at `BEGIN`."""
TEMPLATE: Final = """# PyTorch models: tested, refused

Evidence for [Any PyTorch model](../guides/pytorch.md). `python docs/_ext/torch_page.py` generates this page from the code, and a test compares them.

## Families

Each of these {count} families of transformers is tested with two small layers.
[Measurements](../results/pytorch.md#losses-of-29-families) compare losses with eager PyTorch's and bits between memories, workers and devices.
*Calls* is the number of operations that compute in a forward and a backward pass. `nntask train` takes a family in tiles of its own, through PyTorch,
or not.

{families}

{BEGIN}

A session takes them, too.

{commands}

## Operations that fall back

A copied result is counted in the budget. A parameter is cut only if it is larger than `largest_tile=`, here {SMALL:,} bytes.

{falls_back}

## Programs of public reports

Public reports of results that differ from eager PyTorch's, under torch.compile, FSDP, DeepSpeed, accelerate and other trainers. For each, a small
program of the same kind takes at least five steps in eager PyTorch and in a session, from equal weights, nearly always in fp64. Losses, weights,
buffers, norms of the gradient and the state in Python are compared. A refusal names the place or the remedy. `benchmarks/results/torch_reports.csv`
lists all reports with their outcomes.

{reports}

{END}

`make test` and `make test-more` run them for a few families, `make test-all` for all. `test_torch_gpu.py` uses emulated devices; `test_gpu_torch.py`
needs a card, and has not run on one yet.

{tests}

## What a session refuses

The weights stay in place.

{mistakes}

## What the trainer refuses

Arguments of `TrainingArguments`, at construction; so are several processes, a device that is not the CPU, and an overridden `training_step`.

{trainer}

## What nntask train refuses

Flags, for a model without tiles, at any value other than the one that disables them.

{flags}
"""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in (head, ["---"] * len(head), *rows)])


@dataclass
class Family:
    """The properties of a family.

    Attributes:
        model: name of its class.
        kind: kind of the model.
        command: how `nntask train` takes it.
        refusal: message if it refuses.
        num_calls: number of calls of a step that compute.
        copied: operations whose result PyTorch allocates, and that is copied.
        gathered: operations for which a cut parameter is joined.
        without_cuda: operations that a GPU leaves to a CPU worker.
    """

    model: str
    kind: str
    command: str
    refusal: str
    num_calls: int
    copied: set[str]
    gathered: set[str]
    without_cuda: set[str]


def family_of(name: str) -> Family:
    """Capture a family's step."""
    from support.torch_families import make

    from wrappers.torch.capture.capture import CaptureTerms, aten, capture
    from wrappers.torch.capture.objectives import loss_of, objective_of
    from wrappers.torch.tasks.cuts import cut_parameters, tiles_of
    from wrappers.torch.tasks.kernels import does_nothing, has_cuda_kernel, torch_nbytes
    from wrappers.torch.tasks.sums import with_accumulated_sums

    module, (batch,) = make(name, 1)
    captured, on_gpus = (capture(module, batch, objective_of(loss_of), CaptureTerms(backward=True, on_gpus=on_gpus)) for on_gpus in (False, True))
    cut = cut_parameters(with_accumulated_sums(captured), tiles_of(module.named_parameters(), SMALL)).calls
    wholes = set().union(*(call.made for call in cut if call.func is aten.cat.default and call.results[0].dtype.itemsize == 1))
    readers = [call for call in cut if wholes & call.reads and not wholes & call.made and call.func is not aten.clone.default]
    kind, command, refusal = _on_the_command_line(module, batch)
    return Family(
        type(module).__name__,
        kind,
        command,
        refusal,
        sum(not does_nothing(call) for call in captured.calls),
        _names(call for call in captured.calls if torch_nbytes(call)),
        _names(readers),
        _names(call for call in on_gpus.calls if not has_cuda_kernel(call)),
    )


def _names(calls: Iterable[Any]) -> set[str]:
    return {call.func.name().removeprefix("aten::").partition(".")[0] for call in calls}


def _on_the_command_line(module: Any, batch: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the kind of a model, how `nntask train` takes a directory of it, and the message if it refuses."""
    from nntask import DataError, UsageError
    from nntask.models import FAMILIES
    from scheduler import CapturingRuntime
    from wrappers.torch.steps.state import ModuleState
    from wrappers.torch.steps.weights import attach_files
    from wrappers.torch.trainer.language import TITLES, language_config

    kind = "images" if "pixel_values" in batch else "speech" if "input_features" in batch else ""
    values = {**json.loads(module.config.to_json_string()), "architectures": [type(module).__name__]}
    try:
        config = language_config(values, "DIR/config.json")
        kind = kind or TITLES[config.kind].partition(":")[0].removesuffix(" language model").replace("sequence to sequence", "seq2seq")
        if config.model_type in FAMILIES:
            return kind, "tiles", ""
        with tempfile.TemporaryDirectory() as folder:
            module.save_pretrained(folder)
            empty = config.make()
            saved = empty.state_dict().keys()
            tensors = ModuleState(empty, CapturingRuntime(), {}).tensors()
            try:
                attach_files(Path(folder), {name: tensor for name, tensor in tensors.items() if name in saved}, empty)
            except DataError as error:
                return kind, "refused as saved", str(error).replace(folder, "DIR")
    except UsageError as error:
        return kind, "refused", str(error)
    return kind, "PyTorch", ""


def families_markdown(found: Mapping[str, Family]) -> str:
    """Return the table of families."""
    rows = [[f"`{name}`", f"`{each.model}`", each.kind, str(each.num_calls), each.command] for name, each in found.items()]
    return table(["family", "model", "kind", "calls", "`nntask train`"], rows)


def falls_back_markdown(found: Mapping[str, Family]) -> str:
    """Return the table of operations that fall back."""
    rows = []
    for what, of in (
        ("PyTorch allocates the result, which is copied", lambda each: each.copied),
        ("a cut parameter is joined", lambda each: each.gathered),
        ("a GPU leaves it to a CPU worker", lambda each: each.without_cuda),
    ):
        users = Counter(operation for each in found.values() for operation in of(each))
        rows.append([what, ", ".join(f"`{operation}` ({users[operation]})" for operation in sorted(users)) or "none"])
    return table(["fallback", "operations (number of families)"], rows)


def commands_markdown(found: Mapping[str, Family]) -> str:
    """Return the table of families that `nntask train` refuses; families whose messages differ only in names share a row."""
    alike: dict[str, list[str]] = defaultdict(list)
    for name, each in found.items():
        if each.refusal:
            alike[each.refusal.replace(each.model, "").replace(name, "")].append(name)
    return table(["family", "message"], [[", ".join(f"`{name}`" for name in names), f"`{found[names[0]].refusal}`"] for names in alike.values()])


def tests_markdown() -> str:
    """Return the table of tests over families."""
    from support.torch_families import FAMILIES

    rows = []
    for path in TESTS:
        spec = importlib.util.spec_from_file_location(f"page_{Path(path).stem}", ROOT / path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for test in vars(module).values():
            for mark in getattr(test, "pytestmark", []) if inspect.isfunction(test) else []:
                if mark.name == "parametrize" and mark.args[0] == "family":
                    names = [getattr(each, "values", (each,))[0] for each in mark.args[1]]
                    which = "all" if set(names) == FAMILIES.keys() else ", ".join(names)
                    text = inspect.cleandoc(test.__doc__ or "").replace("\n", " ")
                    rows.append([f"`{Path(path).name}`", text, which])
    return table(["file", "test", "families"], rows)


def mistakes_markdown() -> str:
    """Return the table of mistakes that a session refuses."""
    from support.torch_refusals import REFUSALS, plain

    mistakes: dict[str, list[str]] = defaultdict(list)
    for each in REFUSALS:
        with tempfile.TemporaryDirectory() as folder:
            mistakes[plain(remedy_of(each.error(Path(folder))), Path(folder))].append(each.what)
    return table(["mistake", "remedy"], ([", ".join(names), f"`{remedy}`"] for remedy, names in mistakes.items()))


def remedy_of(error: NntaskError) -> str:
    """Return the remedy of an error, or the whole message if the remedy is too short to stand alone."""
    return error.remedy if len(error.remedy.split()) > SHORT else str(error)


def trainer_markdown() -> str:
    """Return the table of refused arguments of the trainer."""
    from wrappers.torch.trainer.trainer_checks import ADVICE, OPTIMIZERS

    names: dict[str, list[str]] = defaultdict(list)
    for name, advice in ADVICE.items():
        names[advice].append(f"`{name}`")
    others = ", ".join(f"`{name}`" for name in OPTIMIZERS)
    return table(
        ["argument", "remedy"], [*([", ".join(each), advice] for advice, each in names.items()), ["another `optim`", f"use one of {others}"]]
    )


def flags_markdown() -> str:
    """Return the table of flags that `nntask train` refuses for a model without tiles."""
    from nntask.config import SUFFIXES
    from wrappers.torch.trainer.flags import REFUSED

    flags: dict[tuple[str, bool], list[str]] = defaultdict(list)
    for name, (nothing, why) in REFUSED.items():
        if name.replace("-", "_") in SUFFIXES:
            continue
        flags[why, nothing[0] is True].append(name)
    return table(
        ["flag", "reason and remedy"], [[", ".join(f"`--{'no-' if off else ''}{name}`" for name in each), why] for (why, off), each in flags.items()]
    )


def reports_rows() -> list[list[str]]:
    """Return the public reports with their outcomes, whose programs run by eager PyTorch and on a session."""
    for each in REPORT_MODULES:
        importlib.import_module(f"support.{each}")
    from support.torch_reports import REPORTS as programs

    return [[report.thread, report.address, report.kind, OUTCOMES[report.outcome().name]] for report in programs]


def reports_csv(reports: Sequence[Sequence[str]]) -> str:
    """Return the list of public reports."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([("report", "address", "reported_error", "outcome"), *reports])
    return text.getvalue()


def reports_markdown(reports: Sequence[Sequence[str]]) -> str:
    """Return the number of reports by project and outcome."""
    counts = Counter((thread.partition("#")[0], outcome) for thread, *_, outcome in reports)
    projects = sorted({project for project, _ in counts}, key=lambda project: (-sum(counts[project, each] for each in OUTCOMES.values()), project))
    shown = [outcome for outcome in OUTCOMES.values() if any(counts[project, outcome] for project in projects)]
    rows = [[project, *(str(counts[project, outcome]) for outcome in shown)] for project in projects]
    totals = [str(sum(counts[project, outcome] for project in projects)) for outcome in shown]
    return table(["project", *shown], [*rows, ["all", *totals]])


def page(names: Sequence[str], reports: Sequence[Sequence[str]]) -> str:
    """Return the page with some families.

    Args:
        names: names of the families.
        reports: rows of `reports_rows`.
    """
    found = {name: family_of(name) for name in names}
    return TEMPLATE.format(
        BEGIN=BEGIN,
        END=END,
        SMALL=SMALL,
        count=len(found),
        families=families_markdown(found),
        commands=commands_markdown(found),
        falls_back=falls_back_markdown(found),
        reports=reports_markdown(reports),
        tests=tests_markdown(),
        mistakes=mistakes_markdown(),
        trainer=trainer_markdown(),
        flags=flags_markdown(),
    )


def compared(text: str, names: Sequence[str], known: Iterable[str]) -> list[str]:
    """Return the lines of a page that are compared: without rows of families that were not named, and without the sections about all families."""
    others = set(known) - set(names)
    if not others:
        return text.splitlines()
    before, _, rest = text.partition(BEGIN)
    lines = f"{before}{rest.partition(END)[2]}".splitlines()
    return [line for line in lines if not any(line.startswith(f"| `{name}` |") for name in others) and not line.startswith("Each of these")]


def main() -> int:
    """Write the page and the list of reports, or with --check report whether they are stale."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers
    from support.torch_families import FAMILIES

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    asked = sys.argv[1:]
    names = [name for name in FAMILIES if name in asked] or list(FAMILIES)
    reports = reports_rows() if len(names) == len(FAMILIES) else []
    text, listing = page(names, reports), reports_csv(reports)
    if "--check" not in asked:
        PAGE.write_text(text)
        REPORTS.write_text(listing)
        return 0
    stale = [PAGE] if compared(text, names, FAMILIES) != compared(PAGE.read_text(), names, FAMILIES) else []
    stale += [REPORTS] if reports and listing != REPORTS.read_text() else []
    for path in stale:
        print(f"stale: {path.relative_to(ROOT)}; run: python docs/_ext/torch_page.py", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
