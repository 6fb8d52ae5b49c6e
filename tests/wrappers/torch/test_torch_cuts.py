"""Parameters in pieces along their first axis, and gradients that are summed where they lie: the same training, within less memory."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.torch_families import FAMILIES, make
from torch import nn

import wrappers.torch.tasks.rows as rows
from nntask import DataError, DoesNotFit, UsageError
from wrappers.torch import Session
from wrappers.torch.capture.capture import CaptureTerms, capture
from wrappers.torch.capture.objectives import loss_of, objective_of
from wrappers.torch.tasks.calls import aten
from wrappers.torch.tasks.cuts import cut_parameters, tiles_of
from wrappers.torch.tasks.kernels import torch_nbytes
from wrappers.torch.tasks.sums import with_accumulated_sums

pytest.importorskip("transformers")

USUAL = ("gpt2", "llama", "mixtral", "deberta_v2")
"""Families of the default run: tied tables and products cut along the summed axis, along columns, grouped products, and what has no rule."""
CUT = [pytest.param(name, marks=() if name in USUAL else pytest.mark.long) for name in FAMILIES]


def train(family: str, **terms: Any) -> tuple[list[float], dict[str, torch.Tensor], dict[str, Any]]:
    """Losses, weights and counters of three steps."""
    module, batches = make(family, 3)
    with Session(module, lr=1e-3, **terms) as session:
        losses = [session.step(**batch) for batch in batches]
        return losses, session.state_dict(), session.runtime.stats()


@pytest.mark.parametrize("family", CUT)
def test_a_model_of_small_tiles_is_the_same(family: str, tmp_path: Path) -> None:
    """Losses and weights as of whole tensors but for rounding; the same bits in a quarter of the memory and with one worker."""
    whole, weights, _ = train(family, ram="256MB")
    cut, cut_weights, stats = train(family, ram="256MB", largest_tile="3KB")
    assert max(abs(ours - theirs) for ours, theirs in zip(cut, whole, strict=True)) <= 2e-6
    for name, value in weights.items():
        torch.testing.assert_close(cut_weights[name], value, rtol=2e-3, atol=3e-4)  # AdamW divides gradients near zero by themselves
    budget = max(stats["peak_bytes"]["ram"] // 4, 400_000)
    again, same, _ = train(family, ram=str(budget), disk=str(tmp_path), largest_tile="3KB", workers=1)
    assert again == cut
    assert all(torch.equal(same[name], value) for name, value in cut_weights.items())


class Tables(nn.Module):
    """A large table, tied to the output layer."""

    def __init__(self, rows: int, width: int = 32, padding: int | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width, padding_idx=padding)
        self.between = nn.Linear(width, width)
        self.output = nn.Linear(width, rows, bias=False)
        self.output.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The loss of predicting the ids."""
        return nn.functional.cross_entropy(self.output(self.between(self.table(ids))).flatten(0, 1), ids.flatten())


def test_one_tensor_need_not_fit_the_budget(tmp_path: Path) -> None:
    """A tied table of 8 MB trains in 6 MB, state and all, with the bits that its tiles have in memory; as one tile it is refused."""
    ids = torch.randint(0, 65536, (1, 4), generator=torch.Generator().manual_seed(0))

    def run(largest_tile: str = "500KB", **terms: Any) -> tuple[list[float], int]:
        torch.manual_seed(0)
        with Session(Tables(65536), lr=1e-3, largest_tile=largest_tile, **terms) as session:
            return [session.step(ids=ids) for _ in range(3)], session.runtime.stats()["peak_bytes"]["ram"]

    losses, _ = run(ram="128MB")
    small, peak = run(ram="6MB", disk=str(tmp_path))
    assert small == losses
    assert peak <= 6_000_000
    with pytest.raises(DoesNotFit, match="raise ram="):
        run("16MB", ram="6MB", disk=str(tmp_path))


def test_a_table_with_padding_and_repeated_ids_has_eagers_gradient() -> None:
    """Rows of ids that occur several times are sums, that of the padding id has no part from the lookup, at the bounds of tiles too."""
    ids = torch.tensor([[0, 6, 6, 7, 13, 13, 13, 99, 0, 1]])
    torch.manual_seed(0)
    module = Tables(100, 8, padding=6)
    theirs = copy.deepcopy(module)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=1.0)
    theirs(ids).backward()
    optimizer.step()
    with Session(module, "sgd", lr=1.0, ram="16MB", largest_tile="224") as session:  # 7 rows a tile
        session.step(ids=ids)
        torch.testing.assert_close(session.state_dict()["table.weight"], theirs.table.weight.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("largest_tile", ["1MB", "640"])
def test_a_gradient_divided_by_counts_is_eagers_and_its_memory_is_counted(largest_tile: str) -> None:
    """Of a table with scale_grad_by_freq, for which PyTorch alone has the operation, in memory of its own."""
    torch.manual_seed(0)
    module = nn.Embedding(100, 8, scale_grad_by_freq=True)
    theirs, ids = copy.deepcopy(module), torch.tensor([[0, 6, 6, 7, 13, 13, 13, 99]])
    theirs(ids).square().sum().backward()
    expected = (theirs.weight - theirs.weight.grad).detach()

    def loss(result: torch.Tensor, _: Any) -> torch.Tensor:
        return result.square().sum()

    captured = capture(module, {"input": ids}, objective_of(loss), CaptureTerms(backward=True))
    assert max(map(torch_nbytes, captured.calls)) == module.weight.nbytes
    with Session(module, "sgd", lr=1.0, loss=loss, ram="16MB", largest_tile=largest_tile) as session:
        session.step(input=ids)
        torch.testing.assert_close(session.state_dict()["weight"], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("padding", [-1, 7])
def test_rows_without_counting_are_those_with(padding: int) -> None:
    """What GPUs compute, where the host must not wait for how many ids lie in a piece, is what CPUs compute."""
    torch.manual_seed(0)
    ids, table, gradient = torch.randint(0, 20, (3, 200)), torch.randn(20, 4), torch.randn(3, 200, 4)
    sums, plain = torch.zeros(20, 4), torch.full((600, 4), 9.0)
    found, looked_up = torch.zeros(20, 4), torch.full((600, 4), 9.0)
    for first, end in ((0, 7), (7, 15), (15, 20)):
        rows.look_up(plain, table[first:end], ids, first, 20)
        rows.look_up_without_counting(looked_up, table[first:end], ids, first)
        rows.add_gradient(sums[first:end], gradient, ids, first, padding)
        rows.add_gradient_without_counting(found[first:end], gradient.view(-1, 4), ids, first, padding)
    assert torch.equal(looked_up, plain)
    assert torch.equal(plain, table[ids.view(-1)])
    assert torch.equal(found, sums)
    expected = torch.zeros(20, 4).index_add_(0, ids.view(-1), gradient.view(-1, 4))
    if padding >= 0:
        expected[padding] = 0
    assert torch.equal(found, expected)


class _Shifted(Tables):
    """Looks up other ids than it is given."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids * 2)


def test_an_id_without_a_row_is_no_row_of_another_step() -> None:
    """Ids that the module computes are checked against the whole table, and the step is left out."""
    with Session(_Shifted(100), "sgd", lr=1.0, ram="16MB", largest_tile="640") as session:
        before = session.state_dict()["table.weight"]
        with pytest.raises(UsageError, match=r"ids must be from 0 to 99, got 0 to 126"):
            session.step(ids=torch.arange(64).reshape(8, 8))
        assert torch.equal(session.state_dict()["table.weight"], before)
        assert session.step(ids=torch.arange(50).reshape(5, 10)) > 0


def test_minibatches_add_to_pieces() -> None:
    """Gradients of four minibatches, each added tile by tile, are those of the whole batch."""
    ids = torch.arange(64).reshape(8, 8)

    def run(minibatches: int, largest_tile: str) -> torch.Tensor:
        torch.manual_seed(0)
        with Session(Tables(100), "sgd", lr=1.0, ram="16MB", minibatches=minibatches, largest_tile=largest_tile) as session:
            session.step(ids=ids)
            return session.state_dict()["table.weight"]

    torch.testing.assert_close(run(4, "640"), run(1, "1MB"), rtol=1e-5, atol=1e-6)


def test_rows_are_added_after_all_minibatches() -> None:
    """A minibatch's product adds to the gradient of a tied table without waiting for the end of the one before: rows come last."""
    module, ids = Tables(100), torch.arange(64).reshape(8, 8)
    with Session(module, "sgd", lr=1.0, ram="16MB", minibatches=2) as session:
        plan = session.training_step([{"ids": ids[:4]}, {"ids": ids[4:]}]).plan
    names = [task.name for task in plan.tasks]
    rows = [number for number, name in enumerate(names) if name.startswith("add_rows_gradient")]
    products = [number for number, name in enumerate(names) if "mm" in name]
    assert len(rows) == 2
    assert max(products) < min(rows)


def test_sums_of_gradients_make_no_temporary() -> None:
    """The gradient of a tied table is one storage: made by the product, added to by the lookup."""
    module = Tables(100)
    batch = {"ids": torch.zeros(1, 8, dtype=torch.int64)}
    captured = capture(module, batch, objective_of(loss_of), CaptureTerms(backward=True))
    summed = with_accumulated_sums(captured)
    assert sum(call.func is aten.add.Tensor for call in captured.calls) == 1
    assert not any(call.func is aten.add.Tensor for call in summed.calls)
    size = module.table.weight.nbytes
    assert [sum(any(s.nbytes == size for s in call.made) for call in each.calls) for each in (captured, summed)] == [3, 1]
    tiles = tiles_of(module.named_parameters(), size // 4)
    assert tiles["table.weight"] == (100, 25)
    cut = cut_parameters(summed, tiles)
    assert max(s.nbytes for call in cut.calls for s in call.reads | call.writes) < size
    assert [part for part in cut.gradients if part[0] == "table.weight"] == [("table.weight", number) for number in range(4)]


class _Summed(nn.Module):
    """Two matrices whose sum is one layer, and of which the second is another layer as well; gradients of both have a summand in common."""

    def __init__(self, *, sum_first: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(20, 20) / 5), nn.Parameter(torch.randn(20, 20) / 5)
        self.sum_first = sum_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = [self.first + self.second, self.second]
        inner, outer = layers if self.sum_first else reversed(layers)
        return (torch.tanh(x @ inner) @ outer).square().mean()


class _Alike(nn.Module):
    """A matrix, and another of other shape that is added to it: the gradients of both are in one storage."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(40, 20))
        self.second = nn.Parameter(torch.randn({"transposed": (20, 40), "flat": (800,), "scaled": (800,), "equal": (40, 20)}[kind]))
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        other = self.second.t() if self.kind == "transposed" else self.second.view(40, 20)
        return (x @ (self.first * 2 if self.kind == "scaled" else self.first).add(other).t()).square().mean()


def _check_as_eager(module: nn.Module, **terms: Any) -> None:
    """Weights after two steps of SGD are eager's."""
    theirs, x = copy.deepcopy(module), torch.randn(8, 20)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    with Session(module, "sgd", lr=0.1, ram="16MB", **terms) as session:
        for _ in range(2):
            optimizer.zero_grad()
            theirs(x).backward()
            optimizer.step()
            session.step(x=x)
        for name, value in session.state_dict().items():
            torch.testing.assert_close(value, theirs.state_dict()[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("sum_first", [True, False])
def test_a_summand_that_is_another_gradient_is_not_written_over(minibatches: int, sum_first: bool) -> None:
    """The gradient of a parameter that is also a summand of the next one's keeps its values, whichever is made first."""
    torch.manual_seed(0)
    _check_as_eager(_Summed(sum_first=sum_first), minibatches=minibatches)


@pytest.mark.parametrize("kind", ["transposed", "flat", "scaled", "equal"])
def test_gradients_of_one_storage_are_cut_each_in_its_own_way(kind: str) -> None:
    """Of a parameter and of another one of other shape, or with no tiles, whose gradients PyTorch makes as one tensor."""
    torch.manual_seed(0)
    _check_as_eager(_Alike(kind), largest_tile="500")


@pytest.mark.parametrize(("rows", "limit", "expected"), [(10, 40, 10), (10, 39, 5), (10, 12, 3), (7, 4, 1), (7, 1, 1), (1, 1, None)])
def test_tiles_are_equal_shares(rows: int, limit: int, expected: int | None) -> None:
    """As many tiles as the limit asks for, of equal rows; one row at least."""
    found = tiles_of([("weight", torch.empty(rows, 1))], limit)
    assert found == ({} if expected in (None, rows) else {"weight": (rows, expected)})


def test_a_session_goes_on_with_its_tiles_alone(tmp_path: Path) -> None:
    """Resuming with other tiles, which round otherwise, is refused; with the same ones it has the same bits."""
    module, batches = make("bert", 2)
    with Session(copy.deepcopy(module), lr=1e-3, ram="64MB", largest_tile="3KB") as session:
        session.step(**batches[0])
        session.save(tmp_path / "saved")
        expected = session.step(**batches[1])
    with Session(copy.deepcopy(module), lr=1e-3, ram="64MB", largest_tile="3KB") as session:
        session.resume(tmp_path / "saved")
        assert session.step(**batches[1]) == expected
    with Session(copy.deepcopy(module), lr=1e-3, ram="64MB") as session, pytest.raises(DataError, match=r"rows_of_tiles must be .* largest_tile"):
        session.resume(tmp_path / "saved")
