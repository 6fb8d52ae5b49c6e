"""Programs that the sweep of PyTorch modules (`benchmarks/sweep`) found to be trained otherwise than by eager PyTorch, or refused."""

from __future__ import annotations

import pytest
import torch
from support.eager_twin import Case, Cases, Program, at, check
from support.small_modules import Net, program_of
from torch import nn
from torch.nn import functional

CASES = Cases()


@CASES.add()
def s1_batch_norm_of_a_transposed_input() -> Program:
    """`BatchNorm1d` over the features of a transposed sequence, as PatchTST has it: the running mean is filled."""
    return program_of(lambda self, x: self.norm(self.b(torch.tanh(self.a(x))).view(2, 4, 4).transpose(1, 2)), norm=nn.BatchNorm1d(4))


@CASES.add()
def s2_batch_norm_of_an_expanded_image() -> Program:
    """`BatchNorm2d` of an image that is a slice of a larger one, which is neither contiguous nor channels last."""
    return program_of(lambda self, x: self.norm(self.b(torch.tanh(self.a(x))).view(2, 2, 4, 2)[:, :, 1:]), norm=nn.BatchNorm2d(2))


@CASES.add()
def s3_indices_that_are_views_of_one_tensor() -> Program:
    """Two rows of one integer tensor as indices of rows and columns, as PEFT's OFT keeps them."""

    class Skew(Net):
        def __init__(self) -> None:
            super().__init__()
            rows, columns = torch.triu_indices(4, 4, 1)
            self.register_buffer("rows", rows, persistent=False)
            self.register_buffer("columns", columns, persistent=False)
            self.entries = nn.Parameter(torch.linspace(-1, 1, 6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            upper = torch.zeros(4, 4, dtype=x.dtype).index_put((self.rows, self.columns), self.entries)
            return super().forward(x) @ (upper - upper.T)

    return Program(Skew())


@CASES.add()
def s4_strided_view_of_a_padded_sequence() -> Program:
    """Overlapping windows (as_strided) of a padded sequence whose padding got a transposed input, as Longformer has them."""

    def forward(self: Net, x: torch.Tensor) -> torch.Tensor:
        y = functional.pad(self.a(x).view(2, 4, 12).transpose(1, 2), (0, 0, 2, 2), value=-1.0)
        step = y.stride()
        return y.as_strided((2, 4, 6, 4), (step[0], 3 * step[1], step[1], step[2])).tanh() * self.b(x).view(2, 4, 1, 4)

    return program_of(forward)


def _twice() -> Program:
    module = Net()
    module.outer = nn.Module()
    module.outer.inner = module.a
    module.forward = lambda x: module.b(torch.tanh(module.outer.inner(torch.tanh(module.a(x)))))
    return Program(module)


@CASES.add()
def s5_one_part_under_two_names() -> Program:
    """A layer that is an attribute of two modules, as VB-LoRA's bank of vectors is."""
    return _twice()


@CASES.add(terms={"verify": 1})
def s6_one_part_under_two_names_verified() -> Program:
    """The same with each step compared with eager PyTorch."""
    return _twice()


def _hooked() -> Program:
    module, mask = Net(), torch.tensor([1.0, 0.0, 1.0, 0.5]).view(4, 1)
    module.scale = 0.5
    module.b.weight.register_hook(lambda gradient: gradient * mask * module.scale)
    module.a.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return Program(module)


@CASES.add(minibatches=2, before=[at(3, lambda run: setattr(run.module, "scale", 2.0))])
def s7_hooks_of_gradients() -> Program:
    """Hooks of parameters' gradients that mask, as those of PEFT's CPT and OSF, clamp, and follow an attribute."""
    return _hooked()


@CASES.add(terms={"verify": 1})
def s8_hooks_of_gradients_verified() -> Program:
    """The same with each step compared with eager PyTorch."""
    return _hooked()


@pytest.mark.parametrize("case", CASES)
def test_program(case: Case) -> None:
    """Each program trains in a session as in eager PyTorch."""
    check(case)
