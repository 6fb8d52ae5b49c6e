"""Modules that need values of tensors, or shapes that follow from them: computed if they are constants, refused if they are not (P7, P8)."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.eager_twin import LINE, Batch, Case, Cases, Program, Run, at, check, rows
from support.small_modules import Net, module_of, program_of
from torch import nn
from torch.nn import functional

CASES = Cases()
FLOAT64 = torch.float64


def _scaled(constant: Any) -> Program:
    """A program whose result is multiplied by a number, computed from constants in forward."""
    return program_of(lambda self, x: self.b(torch.tanh(self.a(x))) * constant(x))


@CASES.add()
def p7_item() -> Program:
    """`.item()` of a tensor that forward makes."""
    return _scaled(lambda x: torch.linspace(0.5, 1.5, 5, dtype=FLOAT64).prod().item())


@CASES.add()
def p7_tolist() -> Program:
    """`torch.arange(...).tolist()` as axes of a sum, as MONAI's DiceLoss has them."""

    def dice(y: torch.Tensor, batch: Batch) -> torch.Tensor:
        axes = torch.arange(1, y.dim()).tolist()
        p = torch.sigmoid(y)
        return (1 - (2 * (p * 0.5).sum(dim=axes) + 1) / (p.sum(dim=axes) + 3)).mean()

    return Program(Net(), dice)


@CASES.add()
def p7_int_float_bool() -> Program:
    """`int()`, `float()` and `bool()` of tensors, and a tensor as an index of a list."""

    def constant(x: torch.Tensor) -> float:
        third = torch.tensor([1, 2, 3]).max()
        return float(torch.tensor(0.5, dtype=FLOAT64)) * int(third) * [0.0, 1.0, 2.0, 0.7][third] + bool(third > 2)

    return _scaled(constant)


@CASES.add()
def p7_numpy() -> Program:
    """`.numpy()` of a tensor of indices."""
    return _scaled(lambda x: float(torch.arange(1, 5).numpy().sum()) / 10)


@CASES.add()
def p7_numpy_of_a_buffer() -> Program:
    """`.numpy()` of a buffer that never changes."""
    module = module_of(lambda self, x: self.b(torch.tanh(self.a(x))) * float(self.table.numpy().mean()))
    module.register_buffer("table", torch.arange(1.0, 5.0))
    return Program(module)


@CASES.add()
def p7_nonzero() -> Program:
    """`nonzero` of a constant mask, as indices."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        kept = torch.tensor([1, 0, 1, 1] * 3).nonzero().squeeze(1)
        return self.b(torch.tanh(self.a(x)).index_fill(1, kept, 0.5))

    return program_of(forward)


@CASES.add()
def p7_unique() -> Program:
    """`unique` of constant ids."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        ids, counts = torch.tensor([3, 1, 3, 7]).unique(return_counts=True)
        return self.b(torch.tanh(self.a(x)))[:, : len(ids)] * counts

    return program_of(forward)


@CASES.add()
def p7_bincount() -> Program:
    """`bincount(minlength=)` of constant ids."""
    return _scaled(lambda x: torch.bincount(torch.tensor([0, 1, 1, 3]), minlength=4).to(x.dtype))


@CASES.add(allowed="equal refused", words=LINE, batches=lambda: [{**batch, "ids": torch.tensor([0, 1, 1, 3, 2, 1, 0, 0])} for batch in rows(8, 8)()])
def p7_bincount_of_an_input() -> Program:
    """`bincount(minlength=)` of ids of the batch that are below it, so that the shape is bounded."""

    def forward(self: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x))) * torch.bincount(ids, minlength=4)

    return program_of(forward)


@CASES.add()
def p7_repeat_interleave() -> Program:
    """`repeat_interleave` by a constant tensor."""
    return program_of(lambda self, x: self.b(torch.tanh(self.a(x))).repeat_interleave(torch.tensor([1, 2, 0, 1]), dim=1))


@CASES.add()
def p7_split() -> Program:
    """`tensor_split` and `split` by sizes that a tensor holds."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        first, second = torch.tanh(self.a(x)).split(torch.tensor([4, 8]).tolist(), dim=1)
        third, fourth = second.tensor_split(torch.tensor([4]), dim=1)
        return self.b(torch.cat([first * 2, third, fourth * 3], 1))

    return program_of(forward)


@CASES.add(batches=lambda: [{**batch, "variance": torch.full((8, 4), 0.5)} for batch in rows(8, 8)()])
def p7_gaussian_loss() -> Program:
    """`F.gaussian_nll_loss`, which asks whether any variance is negative."""
    module = module_of(lambda self, x, variance: (self.b(torch.tanh(self.a(x))), variance))
    return Program(module, lambda found, batch: functional.gaussian_nll_loss(found[0], torch.zeros_like(found[0]), found[1]))


@CASES.add(allowed="equal refused", words=LINE)
def p7_gaussian_loss_of_a_prediction() -> Program:
    """The same with a variance that the module predicts: the answer is checked at every step, or refused."""

    def loss(y: torch.Tensor, batch: Batch) -> torch.Tensor:
        mean, spread = y.chunk(2, 1)
        return functional.gaussian_nll_loss(mean, torch.zeros_like(mean), spread.exp())

    return Program(Net(), loss)


@CASES.add()
def p7_transformer_with_a_generated_mask() -> Program:
    """`nn.Transformer` with `generate_square_subsequent_mask`, which it compares with a causal one."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Transformer(12, 2, 1, 1, 16, dropout=0.0, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.reshape(2, 4, 12)
            mask = nn.Transformer.generate_square_subsequent_mask(4, dtype=x.dtype)
            return self.body(x, x, src_mask=mask, tgt_mask=mask)

    return Program(Model())


@CASES.add()
def p7_kron() -> Program:
    """`torch.kron` of a weight and a constant."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(functional.linear(x, torch.kron(self.a.weight[:4, :4], torch.eye(3, dtype=x.dtype)))))

    return program_of(forward)


@CASES.add()
def p7_counter_in_a_buffer() -> Program:
    """A counter in a buffer, read with `.item()`: every third call draws other projections, as a performer does."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if self.calls.item() % 3 == 2:
            self.scale.mul_(0.5)
        self.calls += 1
        return self.b(torch.tanh(self.a(x))) * self.scale

    module = module_of(forward)
    module.register_buffer("calls", torch.tensor(0))
    module.register_buffer("scale", torch.ones(4))
    return Program(module)


@CASES.add()
def p7_initialised_by_the_first_batch() -> Program:
    """A buffer `initted` that changes once, as in vector quantisation: the first batch fills the codes."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.a(x))
        if not self.initted:
            self.codes.copy_(y.detach()[:3])
            self.initted.copy_(torch.tensor(True))
        nearest = functional.embedding(torch.cdist(y.detach(), self.codes).argmin(1), self.codes)
        return self.b(y + (nearest - y).detach())

    module = module_of(forward)
    module.register_buffer("initted", torch.tensor(False))
    module.register_buffer("codes", torch.zeros(3, 12))
    return Program(module)


def _lengths(*values: list[int]) -> list[Batch]:
    return [
        {"x": batch["x"].reshape(4, 2, 12), "lengths": torch.tensor(each)} for batch, each in zip(rows(*[8] * len(values))(), values, strict=True)
    ]


@CASES.add(batches=lambda: _lengths([2, 2, 2, 2], [2, 2, 2, 2], [2, 1, 2, 1]))
def p7_mask_as_long_as_the_longest() -> Program:
    """A mask of `int(lengths.max())` columns, as torchaudio's Conformer makes it: lengths are inputs with usually one value."""

    def forward(self: Any, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        longest = int(lengths.max())
        mask = torch.arange(longest)[None] < lengths[:, None]
        return self.b(torch.tanh(self.a(x[:, :longest]))) * mask[..., None]

    return program_of(forward)


@CASES.add(batches=lambda: _lengths([2, 2, 2, 2], [1, 1, 1, 1], [2, 1, 1, 1]))
def p7_mask_of_lengths_that_change() -> Program:
    """The same with another longest length: captured again when it changes."""
    return p7_mask_as_long_as_the_longest()


@CASES.add(batches=lambda: [{**batch, "lengths": torch.tensor([8, 8])} for batch in rows(16, 16, columns=12)()])
def p7_ctc_loss() -> Program:
    """`F.ctc_loss` with lengths as tensors of the batch."""

    def loss(y: torch.Tensor, batch: Batch) -> torch.Tensor:
        scores = y.reshape(8, 2, 4).log_softmax(2)
        return functional.ctc_loss(scores, torch.tensor([[1, 2, 3], [3, 1, 0]]), batch["lengths"], torch.tensor([3, 2]))

    return Program(module_of(lambda self, x, lengths: Net.forward(self, x)), loss)


def _masks(*are_whole: bool) -> list[Batch]:
    return [
        {**batch, "mask": torch.ones(8) if whole else (torch.arange(8) % 2).double()} for batch, whole in zip(rows(8, 8, 8)(), are_whole, strict=True)
    ]


@CASES.add(batches=lambda: _masks(True, True, False))
def p7_branch_on_a_mask() -> Program:
    """A branch on a mask, as in longformer and LED: the branch of the batch at hand, captured again when it changes."""

    def forward(self: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.a(x))
        if (mask == 0).any():
            y = y * mask[:, None] * 2
        return self.b(y)

    return program_of(forward)


@CASES.add(batches=lambda: _masks(True, False, True))
def p7_assertion_on_a_mask() -> Program:
    """Assertions on an input, as in XLM and flaubert."""

    def forward(self: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        assert mask.max().item() <= 1
        assert bool((mask >= 0).all()), "masks are positive"
        return self.b(torch.tanh(self.a(x))) * mask[:, None]

    return program_of(forward)


@CASES.add(batches=lambda: [{**batch, "ids": torch.full((8,), i % 2)} for i, batch in enumerate(rows(8, 8, 8)())])
def p7_equal_to_a_constant() -> Program:
    """`torch.equal` and `allclose` with an input, as FSMT and ProphetNet ask for padding."""

    def forward(self: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        factor = 1.0 if torch.equal(ids, torch.zeros_like(ids)) else 0.5
        return self.b(torch.tanh(self.a(x))) * factor * (2.0 if torch.allclose(ids.double(), torch.ones(8).double()) else 1.0)

    return program_of(forward)


@CASES.add()
def p7_range_of_a_weight() -> Program:
    """Ranges of weights as numbers, as I-BERT quantises: a constant of a frozen buffer."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        scale = max(abs(self.range.min().item()), abs(self.range.max().item())) / 127
        y = self.a(x) / scale
        return self.b(torch.tanh((y + (y.round() - y).detach()) * scale))

    module = module_of(forward)
    module.register_buffer("range", torch.tensor([-1.0, 2.0]))
    return Program(module)


@CASES.add(allowed="equal refused", words=LINE)
def p7_value_of_a_weight() -> Program:
    """A number that follows from a weight that learns: the same as eager, or the line."""
    return program_of(lambda self, x: self.b(torch.tanh(self.a(x))) / (1 + self.a.weight.detach().abs().max().item()))


@CASES.add(setup=[lambda run: run.outer.sizes.fill_(3)], before=[at(3, lambda run: run.outer.sizes.fill_(2))])
def p7_constant_that_changes() -> Program:
    """A tensor outside the module, read with `int()`, that the script changes."""
    sizes = torch.tensor(4)
    return Program(module_of(lambda self, x: Net.forward(self, x)[:, : int(sizes)]), outer=SimpleNamespace(sizes=sizes))


def annealed(run: Run) -> None:
    """Set the rate of the module's temperature."""
    run.outer.warmth.fill_(1 + math.sqrt(run.number))


@CASES.add(before=[annealed])
def p7_constant_that_changes_in_each_step() -> Program:
    """A number in a tensor of the script, read with `.item()` in each step."""
    warmth = torch.tensor(1.0)
    return Program(module_of(lambda self, x: Net.forward(self, x) / warmth.item()), outer=SimpleNamespace(warmth=warmth))


@pytest.mark.parametrize("case", CASES)
def test_values_are_constants_or_guarded(case: Case) -> None:
    """Results are eager's; a value that cannot be known is refused with the line."""
    check(case)
