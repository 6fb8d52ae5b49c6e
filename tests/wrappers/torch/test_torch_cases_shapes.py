"""Modules with shapes that follow from values, and random operations of integers (P8, P9)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.eager_twin import LINE, Batch, Case, Cases, Program, check, rows
from support.small_modules import Net, module_of, program_of
from torch import nn
from torch.nn import functional

from nntask import UsageError
from wrappers.torch import Session

CASES = Cases()
EDGES = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 0, 3], [1, 2, 3, 4, 5, 6, 7, 0, 0, 3]])
"""A fixed graph of eight nodes, two of which have loops."""


def with_loops(edges: torch.Tensor, count: int) -> torch.Tensor:
    """The edges without loops, and then one loop for each node, as graph convolutions want them."""
    edges = edges[:, edges[0] != edges[1]]
    return torch.cat([edges, torch.arange(count).repeat(2, 1)], 1)


class Convolution(Net):
    """A graph convolution with symmetric normalisation, whose edges are a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", EDGES.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The result, a row for each node."""
        source, target = with_loops(self.edges, len(x))
        degree = torch.zeros(len(x), dtype=x.dtype).scatter_add_(0, target, torch.ones(len(target), dtype=x.dtype))
        weight = degree[source].rsqrt() * degree[target].rsqrt()
        return self.b(torch.tanh(torch.zeros_like(x).index_add(0, target, self.a(x)[source] * weight[:, None])))


@CASES.add()
def p8_graph_convolution() -> Program:
    """Loops of a fixed graph, removed and added in forward, as GCN does."""
    return Program(Convolution())


@CASES.add()
def p8_graph_attention() -> Program:
    """A softmax over the edges of each node, as GAT has it, over `int(target.max()) + 1` nodes."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        source, target = with_loops(self.edges, len(x))
        y, count = self.a(x), int(target.max()) + 1
        score = functional.leaky_relu((y[source] * y[target]).sum(1), 0.2).exp()
        total = torch.zeros(count, dtype=x.dtype).index_add(0, target, score)
        return self.b(torch.tanh(torch.zeros_like(y).index_add(0, target, y[source] * (score / total[target])[:, None])))

    return Program(module_of(forward, base=Convolution))


@CASES.add()
def p8_graph_polynomials() -> Program:
    """Chebyshev polynomials of a sparse Laplacian, whose edges are selected by a mask, as Cheb does."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        source, target = self.edges[:, self.edges[0] != self.edges[1]]
        step = lambda y: -torch.zeros_like(y).index_add(0, target, y[source])  # noqa: E731
        first, second = x, step(x)
        third = 2 * step(second) - first
        return self.b(torch.tanh(self.a(first) + self.a(second) + self.a(third)))

    return Program(module_of(forward, base=Convolution))


@CASES.add(batches=lambda: [{**batch, "edges": EDGES} for batch in rows(8, 8, 8)()])
def p8_graph_in_the_batch() -> Program:
    """The graph is an argument with the same values in each step."""

    def forward(self: Any, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = with_loops(edges, len(x))
        return self.b(torch.tanh(torch.zeros_like(x).index_add(0, target, self.a(x)[source])))

    return program_of(forward)


@CASES.add()
def p8_patches_that_are_kept() -> Program:
    """Patches of images of several sizes in one sequence, as NaViT packs them: lengths and masks of constants."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        lengths = torch.tensor([3, 4, 1])
        image = torch.repeat_interleave(torch.arange(3), lengths)
        mask = image[:, None] == image[None]
        y = self.a(x)
        y = functional.scaled_dot_product_attention(y[None], y[None], y[None], attn_mask=mask[None])[0]
        first = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)[:-1]])
        return self.b(torch.stack([part.mean(0) for part in y.split(lengths.tolist())]) + y[first])

    return program_of(forward)


@CASES.add()
def p8_selected_elements_scaled() -> Program:
    """`y[x > 0] *= 2`: an elementwise select."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        y[x > 0] *= 2
        return self.b(torch.tanh(y))

    return program_of(forward)


@CASES.add()
def p8_selected_elements_set() -> Program:
    """`y[mask] = number`, and `y[mask] += number`."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        y[x < -1] = 0.25
        y[x > 1] += 0.5
        return self.b(torch.tanh(y))

    return program_of(forward)


@CASES.add(allowed="equal refused", words=LINE)
def p8_mean_of_selected_elements() -> Program:
    """`y[x > 0].mean()`: as many elements as the values say."""
    return program_of(lambda self, x: (lambda y: y * y[x[:, :4] > 0].mean())(self.b(torch.tanh(self.a(x)))))


class Packed(nn.Module):
    """A recurrent layer over packed sequences of the lengths that it is given."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.body, self.head = kind(12, 6, batch_first=True), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, lengths: Any = (4, 3)) -> torch.Tensor:
        """The result, zero behind the end of a sequence."""
        packed = nn.utils.rnn.pack_padded_sequence(x.reshape(2, 4, 12), lengths, batch_first=True, enforce_sorted=False)
        y, _ = nn.utils.rnn.pad_packed_sequence(self.body(packed)[0], batch_first=True)
        return self.head(y)


@CASES.add()
def p8_packed_lstm_with_a_list() -> Program:
    """A packed LSTM whose lengths are a list."""
    return Program(Packed(nn.LSTM))


@CASES.add(batches=lambda: [{**batch, "lengths": torch.tensor([4, 3 - i // 2])} for i, batch in enumerate(rows(8, 8, 8)())])
def p8_packed_lstm_with_a_tensor() -> Program:
    """A packed LSTM whose lengths are a tensor of the batch, with other values in the third."""
    return Program(Packed(nn.LSTM))


@CASES.add(batches=lambda: [{**batch, "lengths": [4, 2]} for batch in rows(8, 8, 8)()])
def p8_packed_gru_with_a_list_of_the_batch() -> Program:
    """A packed GRU whose lengths are a list of the batch."""
    return Program(Packed(nn.GRU))


@CASES.add(tolerance=1e-9)
def p8_least_squares() -> Program:
    """`linalg.lstsq`, whose residuals have a shape that depends on the rank."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.a(x))
        return self.b(x @ torch.linalg.lstsq(y[:, :4], x).solution.mT[:, :4] @ self.a.weight[:4])

    return program_of(forward)


@CASES.add(allowed="equal refused", words=rf"{LINE}.*(torch\.where|mask|outside|out of)")
def p8_what_cannot_work() -> Program:
    """As many rows as the values of a prediction say: if refused, then with the line and what to write instead."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.a(x))
        chosen = y[y.sum(1) > 0]
        return self.b(chosen).cumsum(0).square().sum() / (1 + len(chosen))

    return Program(module_of(forward), lambda y, batch: y)


@pytest.mark.parametrize("case", CASES)
def test_shapes_of_constants_are_known(case: Case) -> None:
    """Results are eager's; a shape that cannot be known is refused with the line."""
    check(case)


class Draws(nn.Module):
    """A module whose result is what it draws, and a weight that learns."""

    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight, self._draw = nn.Parameter(torch.zeros(1)), draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The draw, and zero."""
        return self._draw(x).to(x.dtype) + self.weight * x.sum()


def _digits(draw: torch.Tensor) -> torch.Tensor:
    return (draw.double() * 10.0 ** torch.arange(len(draw))).sum()


DRAWS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[list[int]], bool]]] = {
    "randint": (lambda x: torch.randint(2, 9, (6,)), lambda digits: all(2 <= digit < 9 for digit in digits)),
    "randint_like": (lambda x: torch.randint_like(x[0], 1, 8), lambda digits: all(1 <= digit < 8 for digit in digits)),
    "randperm": (lambda x: torch.randperm(6), lambda digits: sorted(digits) == [0, 1, 2, 3, 4, 5]),
    "multinomial": (lambda x: torch.multinomial(torch.tensor([0.0, 1, 0, 2, 3, 4]), 6, replacement=True), lambda digits: not {0, 2} & {*digits}),
    "multinomial without replacement": (lambda x: torch.multinomial(torch.ones(6), 6), lambda digits: sorted(digits) == [0, 1, 2, 3, 4, 5]),
}


@pytest.mark.parametrize("name", DRAWS)
def test_p9_random_integers(name: str) -> None:
    """Draws are within their bounds, other ones in each step, and the same ones from the same seed."""
    draw, is_right = DRAWS[name]
    batch: Batch = {"x": torch.ones(2, 6, dtype=torch.float64)}

    def losses(seed: int) -> list[float]:
        with Session(Draws(lambda x: _digits(draw(x))).double(), "sgd", lr=0.0, loss=lambda y, batch: y, ram="16MB", workers=1, seed=seed) as session:
            return [session.step(**batch) for _ in range(8)]

    first = losses(3)
    assert len(set(first)) > 4
    assert losses(3) == first
    assert losses(4) != first
    for loss in first:
        digits = [int(digit) for digit in f"{round(loss):06d}"[::-1]]
        assert is_right(digits), digits


def test_p9_timesteps_of_diffusion() -> None:
    """Timesteps drawn by `randint` choose the noise of each row; training runs, and the mean loss is eager's within its spread."""

    class Diffusion(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            level = torch.linspace(0.1, 0.9, 10, dtype=x.dtype)[torch.randint(0, 10, (len(x),))][:, None]
            return (super().forward(x * level.sqrt() + torch.randn_like(x) * (1 - level).sqrt()) - x[:, :4]).square().mean()

    torch.manual_seed(0)
    module, x = Diffusion().double(), torch.randn(256, 12, dtype=torch.float64)
    with torch.no_grad():
        expected = torch.stack([module(x) for _ in range(40)])
    with Session(module, "sgd", lr=0.0, ram="64MB", workers=1) as session:
        losses = torch.tensor([session.step(x=x) for _ in range(40)], dtype=torch.float64)
    assert len(set(losses.tolist())) == 40
    assert abs(losses.mean() - expected.mean()) <= 5 * expected.std() * (2 / 40) ** 0.5


def test_p9_an_operation_without_a_seed_names_the_line() -> None:
    """A random operation that has no rule is refused with the user's line."""

    class Model(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * torch.poisson(torch.full((4,), 2.0))

    with Session(Model(), "sgd", lr=0.1, loss=lambda y, batch: y.mean(), ram="16MB", workers=1) as session:
        try:
            assert session.step(x=torch.ones(2, 12)) < 1e9
        except UsageError as error:
            assert __file__ in str(error)  # noqa: PT017
