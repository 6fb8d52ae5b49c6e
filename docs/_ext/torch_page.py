"""The page of what is tested and refused of PyTorch models: ``python docs/_ext/torch_page.py`` writes it, and a test compares it.

Families are those of `tests/support/torch_families.py`, tests those over them, mistakes those of `tests/support/torch_refusals.py`, arguments and
flags those that `wrappers/torch` refuses. What a family is made of is seen by capturing its step, and every sentence by making the mistake. With
``--check`` nothing is written; names of families after it leave out the rows of the others, which saves time. Knows no Sphinx.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

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
OUTCOMES: Final = {"equal": "eager PyTorch's results", "refused": "refused", "differs": "**other results**", "raised": "**fails**"}
"""Words of the table for the outcomes of programs of public reports."""
SMALL: Final = 3000
"""Bytes above which a parameter is cut here, as in the tests: nearly all of them."""
BEGIN: Final = "## Families that nntask train refuses"
END: Final = "## Tests over families"
"""Heading after the sections about all families together, which begin at `BEGIN`."""
INTRODUCTION: Final = """# PyTorch models: tested, refused

Evidence for [Any PyTorch model](../guides/pytorch.md). `python docs/_ext/torch_page.py` generates this page from the code, and a test compares them.
"""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in (head, ["---"] * len(head), *rows)])


@dataclass
class Family:
    """What is known of a family.

    Attributes:
        model: its class.
        kind: what kind of model it is.
        command: what `nntask train` does with it.
        refusal: the sentence if it refuses.
        num_calls: calls of a step that compute something.
        beside: operations whose result PyTorch allocates, and that is copied.
        gathered: operations for which a parameter that is cut is put together.
        without_cuda: operations that a GPU leaves to a CPU worker.
    """

    model: str
    kind: str
    command: str
    refusal: str
    num_calls: int
    beside: set[str]
    gathered: set[str]
    without_cuda: set[str]


def family_of(name: str) -> Family:
    """Capture a family's step."""
    from support.torch_families import make

    from wrappers.torch.capture import CaptureTerms, aten, capture
    from wrappers.torch.cuts import cut_parameters, tiles_of
    from wrappers.torch.kernels import does_nothing, has_cuda_kernel, torch_nbytes
    from wrappers.torch.objectives import loss_of, objective_of
    from wrappers.torch.sums import with_accumulated_sums

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
    """What kind of model it is, what `nntask train` does with a directory of it, and the sentence if it refuses."""
    from nntask import DataError, UsageError
    from nntask.models import FAMILIES
    from scheduler import CapturingRuntime
    from wrappers.torch.language import TITLES, language_config
    from wrappers.torch.state import ModuleState
    from wrappers.torch.weights import attach_files

    kind = "image classifier" if "pixel_values" in batch else "speech to text" if "input_features" in batch else ""
    values = {**json.loads(module.config.to_json_string()), "architectures": [type(module).__name__]}
    try:
        config = language_config(values, "DIR/config.json")
        kind = kind or TITLES[config.kind].partition(":")[0]
        if config.model_type in FAMILIES:
            return kind, "yes, in tiles of its own", ""
        with tempfile.TemporaryDirectory() as folder:
            module.save_pretrained(folder)
            empty = config.make()
            saved = empty.state_dict().keys()
            tensors = ModuleState(empty, CapturingRuntime(), {}).tensors()
            try:
                attach_files(Path(folder), {name: tensor for name, tensor in tensors.items() if name in saved}, empty)
            except DataError as error:
                return kind, "refused as it is saved", str(error).replace(folder, "DIR")
    except UsageError as error:
        return kind, "refused", str(error)
    return kind, "yes", ""


def families_markdown(found: Mapping[str, Family]) -> str:
    """The table of families."""
    measured = json.loads((ROOT / "benchmarks" / "results" / "torch_families.json").read_text())["families"]
    rows = [
        [
            f"`{name}`",
            f"`{each.model}`",
            each.kind,
            str(each.num_calls),
            f"{measured[name]['difference']:.1g}" if name in measured else "",
            ("yes" if all(measured[name]["same_bits"].values()) else "**no**") if name in measured else "",
            each.command,
        ]
        for name, each in found.items()
    ]
    return table(["family", "model", "what it is", "calls", "losses differ by", "same bits", "`nntask train`"], rows)


def falls_back_markdown(found: Mapping[str, Family]) -> str:
    """The table of what falls back."""
    rows = []
    for what, of in (
        ("PyTorch allocates the result, which is copied", lambda each: each.beside),
        ("a parameter that is cut is put together", lambda each: each.gathered),
        ("a GPU leaves it to a CPU worker", lambda each: each.without_cuda),
    ):
        users = Counter(operation for each in found.values() for operation in of(each))
        rows.append([what, ", ".join(f"`{operation}` ({users[operation]})" for operation in sorted(users)) or "none"])
    return table(["what happens", "for which operations (in how many families)"], rows)


def commands_markdown(found: Mapping[str, Family]) -> str:
    """What families meet that `nntask train` refuses; those that differ in names alone in one row, with the sentence of the first."""
    alike: dict[str, list[str]] = defaultdict(list)
    for name, each in found.items():
        if each.refusal:
            alike[each.refusal.replace(each.model, "").replace(name, "")].append(name)
    return table(["family", "the sentence"], [[", ".join(f"`{name}`" for name in names), f"`{found[names[0]].refusal}`"] for names in alike.values()])


def tests_markdown() -> str:
    """The table of tests over families."""
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
                    names = {getattr(each, "values", (each,))[0]: getattr(each, "marks", ()) for each in mark.args[1]}
                    always = [name for name, marks in names.items() if not any(each.name == "long" for each in marks)]
                    which = "all" if names.keys() == FAMILIES.keys() else ", ".join(names)
                    text = inspect.cleandoc(test.__doc__ or "").replace("\n", " ")
                    rows.append([f"`{Path(path).name}`, {test.__name__.removeprefix('test_').replace('_', ' ')}", text, which, ", ".join(always)])
    return table(["test", "what it says", "families", "of them without `long`"], rows)


def mistakes_markdown() -> str:
    """The table of sentences of a session."""
    from support.torch_refusals import REFUSALS

    rows = []
    for each in REFUSALS:
        with tempfile.TemporaryDirectory() as folder:
            rows.append([each.what, f"`{each.sentence(Path(folder))}`"])
    return table(["mistake", "the sentence"], rows)


def trainer_markdown() -> str:
    """The table of arguments of the trainer."""
    from wrappers.torch.trainer_checks import ADVICE, OPTIMIZERS

    names: dict[str, list[str]] = defaultdict(list)
    for name, advice in ADVICE.items():
        names[advice].append(f"`{name}`")
    others = ", ".join(f"`{name}`" for name in OPTIMIZERS)
    return table(
        ["argument", "what to do"], [*([", ".join(each), advice] for advice, each in names.items()), ["another `optim`", f"use one of {others}"]]
    )


def flags_markdown() -> str:
    """The table of flags that `nntask train` refuses of a model without tiles."""
    from wrappers.torch.flags import REFUSED

    flags: dict[tuple[str, bool], list[str]] = defaultdict(list)
    for name, (nothing, why) in REFUSED.items():
        flags[why, nothing[0] is True].append(name)
    return table(["flag", "it"], [[", ".join(f"`--{'no-' if off else ''}{name}`" for name in each), why] for (why, off), each in flags.items()])


def reports_markdown() -> str:
    """Return the table of public reports, whose programs run by eager PyTorch and on a session."""
    for each in REPORT_MODULES:
        importlib.import_module(f"support.{each}")
    from support.torch_reports import REPORTS

    rows = [[f"[{report.thread}]({report.address})", report.kind, OUTCOMES[report.outcome().name]] for report in REPORTS]
    count = Counter(row[-1] for row in rows)
    found = ", ".join(f"{word}: {number}" for word, number in count.most_common())
    return f"Outcomes of the {len(rows)} programs: {found}.\n\n{table(['report', 'reported error', 'outcome of a session'], rows)}"


def page(names: Sequence[str]) -> str:
    """The page with some families."""
    found = {name: family_of(name) for name in names}
    return f"""{INTRODUCTION}
## Families

Each of these {len(found)} families of transformers is tested with two small layers, which have all of its operations.
*Calls* is the number of operations that compute in a forward and a backward pass; *losses differ by* is the largest difference from eager PyTorch in
10 steps, in nats; *same bits* compares runs with all memory, with a quarter of it and a disk, on one worker, and on two simulated devices. Both are
[measured](../results/pytorch.md).

{families_markdown(found)}

{BEGIN}

A session in a program takes these families, too.

{commands_markdown(found)}

## Operations that fall back

All of them work. A copied result is counted in the budget. A parameter is cut only if it is larger than `largest_tile=`, here {SMALL:,}
bytes, as in the tests.

{falls_back_markdown(found)}

## Programs of public reports

Public reports of results that differ from eager PyTorch's, under torch.compile, FSDP, DeepSpeed, accelerate and other trainers. For each there is a
small program of the same kind (`tests/support/torch_reports.py` and its neighbours describe them). It takes at least five steps in eager PyTorch and
in a session, from equal weights, nearly always in fp64. Losses, weights, buffers, norms of the gradient and the state in Python are compared
(`tests/wrappers/torch/test_torch_reports.py`). A refusal names the place or the remedy.

{reports_markdown()}

{END}

`make test` runs some of the tests without the mark `long`, `make test-more` the rest of them, and `make test-all` those with it as well. Those of
`test_torch_gpu.py` use emulated devices, those of `test_gpu_torch.py` a card, and have not run on one yet.

{tests_markdown()}

## What a session refuses

The weights stay in place.

{mistakes_markdown()}

## What the trainer refuses

Arguments of `TrainingArguments`, at construction; so are several processes, a device that is not the CPU, and an overridden `training_step`.

{trainer_markdown()}

## What nntask train refuses

Flags, for a model without tiles, at any value other than the one that disables them.

{flags_markdown()}
"""


def compared(text: str, names: Sequence[str], known: Iterable[str]) -> list[str]:
    """The lines of a page that are compared: all of them, or without rows of families that were not named and without what is about all families."""
    others = set(known) - set(names)
    if not others:
        return text.splitlines()
    before, _, rest = text.partition(BEGIN)
    lines = f"{before}{rest.partition(END)[2]}".splitlines()
    return [line for line in lines if not any(line.startswith(f"| `{name}` |") for name in others) and not line.startswith("Each of these")]


def main() -> int:
    """Write the page, or with --check say whether it is stale."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers
    from support.torch_families import FAMILIES

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    asked = sys.argv[1:]
    names = [name for name in FAMILIES if name in asked] or list(FAMILIES)
    text = page(names)
    if "--check" not in asked:
        PAGE.write_text(text)
    elif compared(text, names, FAMILIES) != compared(PAGE.read_text(), names, FAMILIES):
        print(f"stale: {PAGE.relative_to(ROOT)}; run: python docs/_ext/torch_page.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
