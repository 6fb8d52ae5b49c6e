"""The sweep of `benchmarks/sweep`: its verdicts, its rules for tiny configurations, and its journal."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

SWEEP = Path(__file__).resolve().parents[2] / "benchmarks" / "sweep"


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A file of the sweep as a module."""
    monkeypatch.syspath_prepend(str(SWEEP.parent))
    monkeypatch.syspath_prepend(str(SWEEP))
    return importlib.import_module(name)


class Plain(torch.nn.Module):
    """A module that trains through a session as it does in eager PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        return {"loss": self.layer(x).square().mean()}


class Sparse(Plain):
    """A module that a session refuses, because it computes with a sparse tensor."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        return super().forward(x + torch.sparse.mm(x.to_sparse(), torch.eye(4)))


class Noisy(Plain):
    """A module that draws random numbers."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        return super().forward(x + torch.rand_like(x))


def test_three_modules_have_three_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is equal, one is refused with the sentence of the refusal, and one draws random numbers."""
    trial = script("trial", monkeypatch)
    batches = [{"x": torch.full((2, 4), float(number + 1))} for number in range(trial.STEPS)]
    verdicts = [trial.tried(trial.Trial(kind, batches)) for kind in (Plain, Sparse, Noisy)]
    assert [each.verdict for each in verdicts] == ["equal", "refused", "random"]
    assert "tensors must be dense" in verdicts[1].reason


def test_what_eager_does_not_train_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module without a loss has the verdict "no eager", with the reason."""
    trial = script("trial", monkeypatch)
    verdict = trial.tried(trial.Trial(Plain, [{"y": torch.ones(2, 4)}]))
    assert (verdict.verdict, "unexpected keyword" in verdict.reason) == ("no eager", True)


@pytest.mark.parametrize(
    ("apart", "twin", "double", "verdict"),
    [
        (3e-5, 1e-6, None, "rounding"),
        (2e-3, 1e-3, 1e-12, "rounding"),
        (2e-3, 1e-3, 9e-4, "different"),
        (2e-3, 1e-5, 1e-12, "different"),
        (float("inf"), 1e-3, None, "different"),
    ],
)
def test_differences_are_held_against_twins(monkeypatch: pytest.MonkeyPatch, apart: float, twin: float, double: float | None, verdict: str) -> None:
    """A difference up to ten times that of eager twins is rounding if it shrinks in double precision, and another result otherwise."""
    trial = script("trial", monkeypatch)
    assert trial.judged((apart, 0.0), (twin, 0.0), double) == trial.judged((0.0, apart), (0.0, twin), double) == verdict


@pytest.mark.parametrize(("first", "twin", "is_chaos"), [(1e-15, 0.1, True), (1e-15, 1e-3, False), (1e-6, 0.1, False), (None, 0.1, False)])
def test_large_differences_in_double_precision_need_a_cause(
    monkeypatch: pytest.MonkeyPatch, first: float | None, twin: float, is_chaos: bool
) -> None:
    """A large difference in double precision counts as rounding only if one step agrees and moved twins differ as much."""
    assert script("trial", monkeypatch).is_chaos(0.5, first, twin) is is_chaos


def test_twins_move_in_their_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of a twin differ by one rounding, in single and in double precision."""
    trial = script("trial", monkeypatch)
    for dtype in (torch.float32, torch.float64):
        plain = trial.Trial(lambda dtype=dtype: Plain().to(dtype), [])
        weights = [trial.made(plain, moved).layer.weight.detach().double() for moved in (0, 1)]
        moved = ((weights[1] - weights[0]).abs() / weights[0].abs()).max().item()
        assert 0 < moved <= 2 * torch.finfo(dtype).eps


def test_one_tensor_that_differs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The difference is relative to the largest magnitude of the tensor, NaN counts as infinite, and equal infinities as none."""
    trial = script("trial", monkeypatch)
    one, nan, inf = torch.tensor([1.0, 2.0]), torch.tensor([float("nan"), 1.0]), torch.tensor([float("inf"), 1.0])
    theirs = trial.Trained([2.0], {"a": one, "b": inf})
    assert trial.difference(trial.Trained([2.0], {"a": one + 0.5, "b": inf}), theirs) == (0.0, 0.25, "a")
    assert trial.difference(trial.Trained([3.0], {"a": one, "b": inf}), theirs) == (0.5, 0.0, "")
    assert trial.difference(trial.Trained([2.0], {"a": nan, "b": inf}), theirs)[1:] == (float("inf"), "a")


def test_dropout_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probabilities of dropping are zero in modules of any class, and other numbers stay."""
    trial = script("trial", monkeypatch)
    module = torch.nn.Sequential(torch.nn.Dropout(0.3), torch.nn.BatchNorm1d(3, momentum=0.2))
    module.attention_dropout = 0.4
    trial.without_dropout(module)
    assert (module[0].p, module[1].momentum, module.attention_dropout, module.training) == (0.0, 0.2, 0.0, True)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "CLIPModel", "WhisperForConditionalGeneration"])
def test_classes_become_tiny(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A class of text, of text and images, and of speech: few parameters, a batch for each step, and a loss."""
    pytest.importorskip("transformers")
    sources, trial = script("sources", monkeypatch), script("trial", monkeypatch)
    found = sources.of_transformers(name)
    assert len(found.batches) == trial.STEPS
    assert sum(each.numel() for each in trial.made(found).parameters()) < 200_000
    assert trial.eager(found).losses


def test_tables_and_bars_follow_from_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that eager PyTorch does not train are not counted; equal sentences share a row; a difference misses its bar."""
    report = script("report", monkeypatch)
    refused: dict[str, Any] = {"verdict": "refused", "reason": "a [value]"}
    found = {
        "transformers/A": {"verdict": "equal"},
        "transformers/B": refused,
        "timm/c": refused,
        "timm/d": {"verdict": "no eager", "reason": "no"},
        "timm/e": {"verdict": "different", "loss_difference": 1.0, "state_difference": 2.0, "worst": "w"},
    }
    counts, others = report.tables(found)
    assert counts["rows"] == [["transformers", "2", "1", "0", "0", "1", "0", "0", "0"], ["timm", "2", "0", "0", "0", "1", "1", "0", "1"]]
    assert [row[:2] for row in others["rows"]] == [["different", "`e`"], ["refused", "`B`, `c`"]]
    assert others["rows"][1][2] == r"a \[value\]"
    assert [row.get("met") for row in report.comparisons(found)] == [False, None, False, False, True]


def test_a_journal_is_read_up_to_where_it_was_cut(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The line that an interruption left unfinished is ignored, and a missing journal is empty."""
    run = script("run", monkeypatch)
    journal = tmp_path / "journal.jsonl"
    assert dict(run.read(journal)) == {}
    journal.write_text(json.dumps({"case": "a/b", "verdict": "equal"}) + '\n{"case": "a/c", "ver')
    assert dict(run.read(journal)) == {"a/b": {"verdict": "equal"}}


def test_a_case_that_does_not_exist_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of the sweep answers with a verdict, and goes on."""
    run = script("run", monkeypatch)
    worker = run.Worker()
    try:
        verdicts = [worker.try_case(f"peft/{name}/llama", 60.0)["verdict"] for name in ("NOTHING", "LORA")]
    finally:
        worker.close()
    assert verdicts == ["no eager", "equal"]
