"""Modules that change their own state in steps or between them: results are eager PyTorch's (P1 to P4)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.eager_twin import LINE, Case, Cases, Program, Run, adam, adamw, at, check, plain_sgd, rows, sgd
from support.small_modules import Net, module_of, program_of
from torch import nn
from torch.nn import functional

CASES = Cases()


class Heads(nn.Module):
    """A trunk and two heads, of which `head` says which is used; "both" adds them."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 4), nn.Linear(12, 4)
        self.head = "first"

    def forward(self, x: torch.Tensor, head: str | None = None) -> torch.Tensor:
        """The result of a head."""
        y, head = torch.tanh(self.trunk(x)), head or self.head
        if head == "both":
            return self.first(y) + self.second(y)
        return self.first(y) if head == "first" else self.second(y)


def by_turns(run: Run) -> None:
    """Use the other head."""
    run.module.head = ("first", "second")[run.number % 2]  # type: ignore[assignment]


@CASES.add(steps=8, optimizer=adamw, before=[at(4, lambda run: setattr(run.module, "head", "both"))])
def p1_head_from_step_4() -> Program:
    """A head whose gradient is None in the first four steps."""
    return Program(Heads())


@CASES.add(steps=8, optimizer=adamw, before=[by_turns])
def p1_heads_by_turns_adamw() -> Program:
    """One head a step: decay, moments and step counts of the other stand still."""
    return Program(Heads())


@CASES.add(steps=8, optimizer=adam, before=[by_turns], max_grad_norm=0.3)
def p1_heads_by_turns_adam_clipped() -> Program:
    """The norm is that of the gradients that exist."""
    return Program(Heads())


@CASES.add(steps=8, optimizer=sgd, before=[by_turns], minibatches=2)
def p1_heads_by_turns_sgd_in_minibatches() -> Program:
    """Momentum and decay of the idle head stand still."""
    return Program(Heads())


@CASES.add(
    steps=8,
    optimizer=adamw,
    batches=lambda: [{**batch, "head": head} for batch, head in zip(rows(8, 8, 8)(), ("first", "second", "both"), strict=True)],
)
def p1_heads_by_argument() -> Program:
    """The batch says which head is used."""
    return Program(Heads())


@CASES.add(optimizer=adamw)
def p1_a_head_that_is_never_used() -> Program:
    """Its weights stay, weight decay or not."""
    return Program(Heads())


@CASES.add(optimizer=adamw, batches=rows(8, 4))
def p1_head_by_shape() -> Program:
    """Large batches go through one head, small ones through another."""
    return Program(module_of(lambda self, x: self.first(self.trunk(x)) if len(x) > 4 else self.second(self.trunk(x)), base=Heads))


@CASES.add()
def p2_buffer_through_data() -> Program:
    """`self.n.data.mul_` on a buffer that the result uses."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.n.data.mul_(0.9)
        return self.b(torch.tanh(self.a(x))) * self.n

    return _buffer_program(forward)


def _buffer_program(forward: Any) -> Program:
    module = module_of(forward)
    module.register_buffer("n", torch.ones(4))
    return Program(module)


@CASES.add()
def p2_data_of_a_buffer_assigned() -> Program:
    """`self.n.data = ...` before the result uses the buffer."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.n.data = self.n * 0.9
        return Net.forward(self, x) * self.n

    return _buffer_program(forward)


@CASES.add(minibatches=2)
def p2_data_of_a_buffer_assigned_afterwards() -> Program:
    """The same at the end of forward, twice a step."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = Net.forward(self, x) * self.n
        self.n.data = self.n.data * 0.9
        return y

    return _buffer_program(forward)


@CASES.add()
def p2_older_spectral_norm() -> Program:
    """Power iteration that writes `u` and `v` through `.data`, as older code does."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        weight = self.a.weight
        self.v.data = functional.normalize(torch.mv(weight.data.t(), self.u.data), dim=0)
        self.u.data = functional.normalize(torch.mv(weight.data, self.v.data), dim=0)
        return self.b(torch.tanh(functional.linear(x, weight / self.u.dot(weight.mv(self.v)), self.a.bias)))

    module = module_of(forward)
    module.register_parameter("u", nn.Parameter(functional.normalize(torch.randn(12), dim=0), requires_grad=False))
    module.register_parameter("v", nn.Parameter(functional.normalize(torch.randn(12), dim=0), requires_grad=False))
    return Program(module)


@CASES.add(ignore=r"child a\.weight")
def p2_spectral_norm_of_torch() -> Program:
    """`torch.nn.utils.spectral_norm`, the deprecated one; the weight that it leaves as an attribute is made anew by each call."""
    module = Net()
    nn.utils.spectral_norm(module.a)
    return Program(module)


@CASES.add()
def p2_registered_buffer_assigned() -> Program:
    """`self.h = new` replaces a registered buffer."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.a(x)) + self.h
        self.h = y.detach().mean(0)
        return self.b(y)

    module = module_of(forward)
    module.register_buffer("h", torch.zeros(12))
    return Program(module)


@CASES.add(allowed="equal refused", words=LINE)
def p2_weight_data_assigned_in_forward() -> Program:
    """`weight.data = ...` in forward."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.a.weight.data = self.a.weight.data * 0.99
        return self.b(torch.tanh(self.a(x)))

    return program_of(forward)


def _in_place(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.scale.mul_(0.9)
    return self.b(torch.tanh(self.a(x))) * self.scale


@CASES.add()
def p3_plain_tensor_in_place() -> Program:
    """A tensor that is a plain attribute, updated in place."""
    return program_of(_in_place, scale=torch.ones(4))


@CASES.add(minibatches=2)
def p3_plain_tensor_in_place_in_minibatches() -> Program:
    """The same, twice a step."""
    return program_of(_in_place, scale=torch.ones(4))


@CASES.add(batches=rows(8, 4, 8, 4))
def p3_plain_tensor_in_place_of_two_shapes() -> Program:
    """The same, from two shapes of batches."""
    return program_of(_in_place, scale=torch.ones(4))


def _hidden(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(self.a(x) + self.h)
    self.h = y.detach().mean(0)
    return self.b(y)


@CASES.add()
def p3_hidden_state() -> Program:
    """A hidden state that goes from step to step."""
    return program_of(_hidden, h=torch.zeros(12))


@CASES.add(batches=rows(8, 4, 8, 4))
def p3_hidden_state_of_two_shapes() -> Program:
    """The same, from two shapes of batches."""
    return program_of(_hidden, h=torch.zeros(12))


@CASES.add(minibatches=2)
def p3_hidden_state_within_a_step() -> Program:
    """The second minibatch begins with the hidden state of the first."""
    return program_of(_hidden, h=torch.zeros(12))


@CASES.add()
def p3_hidden_state_from_none() -> Program:
    """A hidden state that begins as None."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.a(x) if self.h is None else self.a(x) + self.h)
        self.h = y.detach()
        return self.b(y)

    return program_of(forward, h=None)


def _counts(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.calls += 1
    return self.b(torch.tanh(self.a(x))) / self.calls


@CASES.add()
def p3_counter() -> Program:
    """A counter in forward."""
    return program_of(_counts, calls=0)


@CASES.add(minibatches=2)
def p3_counter_within_a_step() -> Program:
    """A counter that counts minibatches."""
    return program_of(_counts, calls=0)


@CASES.add(batches=rows(8, 4, 8, 4))
def p3_counter_of_two_shapes() -> Program:
    """A counter over batches of two shapes."""
    return program_of(_counts, calls=0)


@CASES.add()
def p3_list() -> Program:
    """A list that grows, whose length the result uses."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(x))
        return self.b(torch.tanh(self.a(x))) / len(self.seen)

    return program_of(forward, seen=[])


@CASES.add(before=[lambda run: setattr(run.module, "flag", run.number >= 3)])
def p3_flag_between_steps() -> Program:
    """A flag that the script sets."""
    return program_of(lambda self, x: self.b(torch.relu(self.a(x)) if self.flag else torch.tanh(self.a(x))), flag=False)


@CASES.add(before=[lambda run: setattr(run.module, "factor", 1.0 / (1 + run.number))])
def p3_number_between_steps() -> Program:
    """A number that the script anneals."""
    return program_of(lambda self, x: self.b(torch.tanh(self.a(x) * self.factor)), factor=1.0)


class Modes(Net):
    """A `Net` with batch normalisation, and a result that depends on the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The result."""
        return self.b(torch.tanh(self.norm(self.a(x)))) * (1.0 if self.training else 0.5)


@CASES.add(before=[at(2, lambda run: run.module.eval()), at(4, lambda run: run.module.train())])
def p3_mode_between_steps() -> Program:
    """The whole module in evaluation mode for two steps, as after an evaluation without `train()`."""
    return Program(Modes())


@CASES.add(before=[at(3, lambda run: run.module.norm.eval())])
def p3_mode_of_a_part() -> Program:
    """Statistics that are frozen at the fourth step."""
    return Program(Modes())


@CASES.add()
def p3_mode_within_a_step() -> Program:
    """A part whose mode forward itself switches."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.norm.train(not self.norm.training)
        return self.b(torch.tanh(self.norm(self.a(x))))

    return Program(module_of(forward, base=Modes))


def _clamps(context: Any) -> Any:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with context():
            (self.a.weight.data if context is torch.enable_grad else self.a.weight).clamp_(-0.1, 0.1)
        return self.b(torch.tanh(self.a(x)))

    return forward


@CASES.add(allowed="equal refused", words=LINE)
def p4_weights_clamped_through_data() -> Program:
    """A weight that forward clamps through `.data`."""
    return program_of(_clamps(torch.enable_grad))


@CASES.add(allowed="equal refused", words=LINE)
def p4_weights_clamped_under_no_grad() -> Program:
    """A weight that forward clamps under `no_grad`."""
    return program_of(_clamps(torch.no_grad))


@CASES.add(allowed="equal refused", words=LINE, dtype=torch.bfloat16, tolerance=2e-2, optimizer=plain_sgd)
def p4_weights_of_bf16_clamped() -> Program:
    """The same of a weight in bf16, whose master in fp32 must follow."""
    return program_of(_clamps(torch.no_grad))


def _ids() -> list[dict[str, torch.Tensor]]:
    return [{"input": torch.randint(0, 20, (8, 5), generator=torch.Generator().manual_seed(i))} for i in range(3)]


@CASES.add(allowed="equal refused", words=LINE, batches=_ids)
def p4_embedding_with_a_largest_norm() -> Program:
    """`Embedding(max_norm=)` scales the rows that it looks up, in the table."""
    return Program(nn.Sequential(nn.Embedding(20, 12, max_norm=1.0), nn.Linear(12, 4)))


@CASES.add(allowed="equal refused", words=LINE, batches=_ids, dtype=torch.bfloat16, tolerance=2e-2, optimizer=plain_sgd)
def p4_embedding_of_bf16_with_a_largest_norm() -> Program:
    """The same of a table in bf16."""
    return p4_embedding_with_a_largest_norm()


@CASES.add(allowed="equal refused", words=LINE, batches=_ids)
def p4_embedding_bag_with_a_largest_norm() -> Program:
    """`EmbeddingBag(max_norm=)`, likewise."""
    return Program(nn.Sequential(nn.EmbeddingBag(20, 12, max_norm=1.0), nn.Linear(12, 4)))


@pytest.mark.parametrize("case", CASES)
def test_results_are_eagers(case: Case) -> None:
    """Losses, gradients, weights and what the module keeps are those of eager PyTorch."""
    check(case)
