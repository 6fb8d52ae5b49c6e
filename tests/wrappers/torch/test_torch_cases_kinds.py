"""Kinds of tensors, modules, results and mistakes (P5, P11, P12, P15, P16, C13)."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.eager_twin import LINE, Batch, Case, Cases, Program, Run, at, check, plain_sgd, rows
from support.small_modules import Net, module_of, program_of
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional

from nntask import UsageError
from wrappers.torch import Session

CASES = Cases()
X = torch.ones(8, 12, dtype=torch.float64)
TERMS: dict[str, Any] = {"ram": "16MB", "workers": 1}


def test_p5_names_behind_a_checkpoint_wrapper(tmp_path: Path) -> None:
    """`session.state_dict()` and what is saved have the names of `module.state_dict()`, which hides the wrapper, and a session resumes from them."""
    module = Net()
    module.a = checkpoint_wrapper(module.a)
    names, x = list(module.state_dict()), torch.ones(8, 12)

    def opened(module: nn.Module) -> Session:
        return Session(module, "sgd", lr=0.1, loss=lambda y, batch: y.square().mean(), **TERMS)

    with opened(copy.deepcopy(module)) as session:
        session.step(x=x)
        assert list(session.state_dict()) == names
        session.save(tmp_path / "saved")
        expected, after = session.state_dict(), session.step(x=x)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert sorted(saved) == sorted(names)
    assert all(torch.equal(saved[name], value) for name, value in expected.items())
    with opened(copy.deepcopy(module)) as session:
        session.resume(tmp_path / "saved")
        assert session.step(x=x) == after
        session.load_into(module)
    assert module.a.weight.isfinite().all()


@CASES.add(minibatches=2)
def p5_checkpoint_wrapper() -> Program:
    """A layer behind `checkpoint_wrapper`."""
    module = Net()
    module.a = checkpoint_wrapper(module.a)
    return Program(module)


@CASES.add(max_grad_norm=0.1)
def p11_empty_parameter() -> Program:
    """A parameter without elements, which the forward pass uses."""
    module = module_of(lambda self, x: Net.forward(self, x) + self.none.sum())
    module.none = nn.Parameter(torch.empty(0, 4))
    return Program(module)


@CASES.add()
def p11_empty_buffer() -> Program:
    """A buffer without elements, joined to another tensor."""
    module = module_of(lambda self, x: self.b(torch.cat([torch.tanh(self.a(x)), self.none.expand(len(x), 0)], 1)))
    module.register_buffer("none", torch.empty(1, 0))
    return Program(module)


@CASES.add(batches=lambda: [{"input_ids": torch.arange(i, i + 16).reshape(2, 8) % 20} for i in range(3)], ignore="config")
def p11_mobilebert_with_equal_sizes() -> Program:
    """MobileBERT whose embeddings are as wide as its layers, so that a matrix of its head has no rows."""
    hf = pytest.importorskip("transformers")
    sizes = {"vocab_size": 20, "hidden_size": 16, "embedding_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    dry = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "true_hidden_size": 16, "intra_bottleneck_size": 16}
    module = hf.MobileBertForMaskedLM(hf.MobileBertConfig(**sizes, **dry))
    return Program(module, lambda found, batch: functional.cross_entropy(found.logits.flatten(0, 1), batch["input_ids"].flatten()))


@CASES.add()
def p11_weights_of_empty_irreps() -> Program:
    """Weights of the paths of a product, none of which one kind has, as in e3nn: cut from one vector."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        first, second = self.paths.split([12, 0])
        return Net.forward(self, x * first + (x[:, :0] * second).sum(1, keepdim=True))

    module = module_of(forward)
    module.paths, module.none = nn.Parameter(torch.randn(12)), nn.Parameter(torch.empty(0))
    return Program(module)


def _with_buffer(forward: Callable[..., Any], value: torch.Tensor, *, persistent: bool = True) -> Program:
    module = module_of(forward)
    module.register_buffer("table", value, persistent=persistent)
    return Program(module)


def _rotates(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.view_as_complex(self.a(x).reshape(8, 6, 2)) * self.table
    return self.b(torch.view_as_real(y).reshape(8, 12))


@CASES.add(before=[at(3, lambda run: run.note(run.predict(x=X)))])
def p12_complex_buffer() -> Program:
    """A rotary table of complex numbers."""
    return _with_buffer(_rotates, torch.polar(torch.ones(8, 6), torch.randn(8, 6)))


@CASES.add()
def p12_complex_buffer_that_is_not_saved() -> Program:
    """The same, not persistent."""
    return _with_buffer(_rotates, torch.polar(torch.ones(8, 6), torch.randn(8, 6)), persistent=False)


def _multiplies(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.b(torch.tanh(torch.sparse.mm(self.table, self.a(x))))


@CASES.add()
def p12_sparse_buffer() -> Program:
    """An adjacency matrix in coordinates."""
    return _with_buffer(_multiplies, (torch.randn(8, 8) * (torch.rand(8, 8) < 0.3)).to_sparse().coalesce())


@CASES.add()
def p12_sparse_buffer_of_rows() -> Program:
    """An adjacency matrix in compressed rows."""
    return _with_buffer(_multiplies, (torch.randn(8, 8) * (torch.rand(8, 8) < 0.3)).to_sparse_csr())


@CASES.add(before=[at(2, lambda run: run.note((run.evaluate(x=X), run.predict(x=X))))])
def p12_expanded_buffer() -> Program:
    """A grid that is expanded, as KAN registers it."""
    return _with_buffer(lambda self, x: Net.forward(self, x - self.table), torch.linspace(-1, 1, 12).expand(8, 12))


@CASES.add(optimizer=lambda module: torch.optim.SGD([*module.a.parameters(), *module.b.parameters()], lr=0.1))
def p12_expanded_parameter() -> Program:
    """A frozen parameter that is expanded."""
    module = module_of(lambda self, x: Net.forward(self, x - self.table))
    module.table = nn.Parameter(torch.linspace(-1, 1, 12).expand(8, 12), requires_grad=False)
    return Program(module)


@CASES.add()
def p12_expanded_buffer_replaced() -> Program:
    """An expanded buffer that forward replaces by a dense one of its shape."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = Net.forward(self, x - self.table)
        self.table = self.table * 0.9
        return y

    return _with_buffer(forward, torch.linspace(-1, 1, 12).expand(8, 12))


def _evaluated(run: Run) -> None:
    run.note((run.evaluate(x=X), run.predict(x=X)))


def _encoder(norm_first: bool) -> Program:
    layer = nn.TransformerEncoderLayer(12, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return program_of(lambda self, x: self.b(self.body(x.reshape(2, 4, 12))), body=encoder)


@CASES.add(before=[at(2, _evaluated), at(5, _evaluated)])
def p15_encoder_evaluated() -> Program:
    """`nn.TransformerEncoder`, which takes a fast path in evaluation mode."""
    return _encoder(norm_first=False)


@CASES.add(before=[at(0, _evaluated)])
def p15_encoder_with_norms_first_evaluated() -> Program:
    """The same with norms first, evaluated before the first step."""
    return _encoder(norm_first=True)


@CASES.add(before=[at(1, _evaluated)], setup=[lambda run: run.module.body.eval()])
def p15_attention_evaluated() -> Program:
    """`nn.MultiheadAttention` without weights, as in open_clip, whose part stays in evaluation mode."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.reshape(2, 4, 12)
        return self.b(self.body(y, y, y, need_weights=False)[0])

    return program_of(forward, body=nn.MultiheadAttention(12, 2, batch_first=True))


@CASES.add(allowed="equal refused", words=LINE)
def p16_address_of_memory() -> Program:
    """`data_ptr()` in forward: "its data is not allocated yet"."""
    return program_of(lambda self, x: Net.forward(self, x) * (1.0 if x.data_ptr() else 0.5))


@CASES.add(allowed="equal refused", words=LINE)
def p16_memory_of_a_result() -> Program:
    """`.numpy()` of a detached prediction."""
    return program_of(lambda self, x: Net.forward(self, x) * (1.0 + float(np.abs(self.a(x).detach().numpy()).max())))


@CASES.add(allowed="equal refused", words=LINE)
def p16_loop_over_values() -> Program:
    """A loop over the values of a prediction."""
    return program_of(lambda self, x: Net.forward(self, x) * (1 + sum(value.item() for value in self.a(x).detach().abs().mean(0))))


MISTAKES: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "shapes": lambda self, x: self.b(x[:, :5]),
    "index": lambda self, x: self.b(torch.tanh(self.a(x)))[:, 4],
    "index_of_tensor": lambda self, x: self.b(x).index_select(1, torch.tensor([0, 9])),
    "view": lambda self, x: self.b(x).view(5, 5),
    "argument": lambda self, x: self.b(torch.tanh("x")),
    "types": lambda self, x: self.b(x.long()),
    "in_place": lambda self, x: self.b(self.a.weight.add_(1.0)),
    "operation": lambda self, x: self.b(x).bitwise_and(x[:, :4]),
    "einsum": lambda self, x: torch.einsum("ij,jk->ik", x, self.b.weight),
    "keyword": lambda self, x: torch.sum(x, axes=1),
}
"""Mistakes of the user that PyTorch itself raises."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_p16_what_pytorch_raises_is_a_sentence(mistake: str) -> None:
    """An error of PyTorch is a UsageError with the user's line, or with the operation if a task or the backward pass raises it; its exit code is 2.
    Weights can be had back."""
    module = module_of(MISTAKES[mistake])
    with pytest.raises((RuntimeError, IndexError, TypeError, NotImplementedError)):
        module(x=torch.ones(8, 12))
    with Session(module, "sgd", lr=0.1, loss=lambda y, batch: y.sum(), **TERMS) as session:
        with pytest.raises(UsageError, match=rf"{re.escape(Path(__file__).name)}:\d+|^aten\.\w+\.\w+ failed|bitwise_and") as caught:
            session.step(x=torch.ones(8, 12))
        assert caught.value.exit_code == 2
        session.load_into(module)
    assert module.a.weight.isfinite().all()


@CASES.add(allowed="equal refused", words="script")
def c13_scripted_submodule() -> Program:
    """A layer that is scripted."""
    module = Net()
    module.a = torch.jit.script(module.a)
    return Program(module)


@CASES.add(allowed="refused", words="[Ll]azy|first call", optimizer=lambda module: torch.optim.SGD(module.b.parameters(), lr=0.1))
def c13_lazy_layer() -> Program:
    """`nn.LazyLinear` before its first call has no shape: refused, with what to do."""
    module = Net()
    module.a = nn.LazyLinear(12)
    return Program(module)


@CASES.add(max_grad_norm=math.inf)
def c13_infinite_norm() -> Program:
    """`max_grad_norm=inf` measures the norm and clips nothing."""
    return Program(Net())


@CASES.add(before=[at(3, lambda run: run.note(run.predict(x=X)))])
def c13_cumulative_batch_normalisation() -> Program:
    """`BatchNorm1d(momentum=None)`: the average of all batches."""
    return program_of(lambda self, x: self.b(torch.tanh(self.norm(self.a(x)))), norm=nn.BatchNorm1d(12, momentum=None))


@dataclass
class Result:
    """A module's result."""

    logits: torch.Tensor
    twice: list[torch.Tensor]
    name: str = "result"


@CASES.add(before=[at(3, lambda run: run.note(vars(run.predict(x=X))))])
def c13_dataclass_as_result() -> Program:
    """A dataclass as result, which `predict` gives back."""
    module = module_of(lambda self, x: (lambda y: Result(y, [y * 2]))(Net.forward(self, x)))
    return Program(module, lambda found, batch: found.logits.square().mean() + found.twice[0].sum() * 0.01)


def _negative() -> list[Batch]:
    z = torch.complex(*torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(1)))
    assert z.conj().imag.is_neg()
    return [{"x": z.conj().imag}]


@CASES.add(batches=_negative)
def c13_input_with_the_negative_bit() -> Program:
    """The imaginary part of a conjugate as input."""
    return Program(Net())


@CASES.add(batches=lambda: [{"x": torch._neg_view(batch["x"])} for batch in rows(8, 8)()], minibatches=2)
def c13_whole_input_with_the_negative_bit() -> Program:
    """An input whose memory is whole and has the negative bit."""
    return Program(Net())


@CASES.add(batches=lambda: [{**batch, "scale": np.float32(0.5 + i % 2)} for i, batch in enumerate(rows(8, 8, 8)())], optimizer=plain_sgd)
def c13_scalar_of_numpy() -> Program:
    """A NumPy scalar of fp32 in the batch."""
    return program_of(lambda self, x, scale: Net.forward(self, x) * scale)


@CASES.add()
def c13_scalar_of_numpy_in_the_module() -> Program:
    """A NumPy scalar of fp32 as attribute."""
    return program_of(lambda self, x: Net.forward(self, x) * self.scale, scale=np.float32(0.3))


@pytest.mark.parametrize("optimizer", ["adamw", "instance"])
def test_c13_an_unknown_keyword(optimizer: str) -> None:
    """An unknown keyword of `Session` is refused by its name, not with words about `lr=`."""
    module = Net()
    given: Any = torch.optim.SGD(module.parameters(), lr=0.1) if optimizer == "instance" else optimizer
    with pytest.raises((UsageError, TypeError), match="example") as caught:
        Session(module, given, example={"x": X}, **TERMS)
    assert isinstance(caught.value, UsageError)
    assert "lr=" not in str(caught.value)


@pytest.mark.parametrize("case", CASES)
def test_results_are_eagers(case: Case) -> None:
    """Losses, gradients, weights and predictions are those of eager PyTorch."""
    check(case)
