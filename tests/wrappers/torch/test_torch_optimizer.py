"""The optimizer of a session does what torch.optim does, in fp64: parameters without a gradient, options that change, counts, and what is refused."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import rewrite_state
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nntask import DataError, UsageError
from wrappers.torch import Session

Make = Callable[[nn.Module], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda module: torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1),
    "plain sgd": lambda module: torch.optim.SGD(module.parameters(), lr=0.05, weight_decay=0.1),
    "adam": lambda module: torch.optim.Adam(module.parameters(), lr=0.02, betas=(0.7, 0.8), weight_decay=0.1),
    "adamw": lambda module: torch.optim.AdamW(module.parameters(), lr=0.02, betas=(0.7, 0.8), weight_decay=0.1),
}


class Heads(nn.Module):
    """Two heads of which a batch names one, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(12, 12)
        self.heads = nn.ModuleList(nn.Linear(12, 4) for _ in range(2))
        self.spare = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](self.body(x).tanh()).square().mean()


class Picky(Heads):
    """Heads that pick columns, which fails for a column beyond the last one."""

    def forward(self, x: torch.Tensor, head: int, column: torch.Tensor) -> torch.Tensor:
        return self.heads[head](self.body(x).tanh()).gather(1, column).square().mean()


def make(kind: type[nn.Module] = Heads) -> nn.Module:
    """A module in fp64 with the same values each time."""
    torch.manual_seed(0)
    return kind().double()


def batches(heads: Sequence[int], *, seed: int = 1) -> list[dict[str, Any]]:
    """A batch for each of these heads."""
    generator = torch.Generator().manual_seed(seed)
    return [{"x": torch.randn(8, 12, generator=generator, dtype=torch.float64), "head": head} for head in heads]


def eager(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    given: Sequence[dict[str, Any]],
    after: Callable[[int], None] = lambda number: None,
    clip: float = 0,
) -> list[float]:
    """Losses of PyTorch itself.

    Args:
        after: called after each step.
        clip: norm to which gradients are clipped; 0 is off.
    """
    losses = []
    for number, batch in enumerate(given):
        optimizer.zero_grad()
        loss = module(**batch)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        after(number)
        losses.append(loss.item())
    return losses


def compare(session: Session, module: nn.Module) -> None:
    """The weights of a session are those of a module, but for rounding."""
    for name, value in module.state_dict().items():
        assert torch.allclose(session.state_dict()[name], value, rtol=1e-12, atol=1e-13), name


@pytest.mark.parametrize("clip", [0.0, 0.1, math.inf])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("heads", [[0, 0, 0, 1, 1, 1, 1, 1], [0, 1, 0, 1, 1, 0, 0, 1]], ids=["later", "by turns"])
def test_a_parameter_without_a_gradient_is_left_alone(heads: list[int], kind: str, clip: float) -> None:
    """Heads by turns, and one that is never used: losses and weights; an infinite norm only measures."""
    ours, theirs = make(), make()
    expected = eager(theirs, OPTIMIZERS[kind](theirs), batches(heads), clip=clip)
    with Session(ours, OPTIMIZERS[kind](ours), max_grad_norm=clip, ram="16MB") as session:
        started = [session.start(**batch) for batch in batches(heads)]
        assert [each.result().loss for each in started] == pytest.approx(expected, rel=1e-12)
        assert all(each.result().grad_norm > 0 for each in started)
        compare(session, theirs)


SCHEDULES: dict[str, tuple[str, Callable[[torch.optim.Optimizer], Any]]] = {
    "one cycle of betas": ("adamw", lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)),
    "one cycle of momentum": ("sgd", lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)),
    "cycles of momentum": ("sgd", lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=2)),
    "rates of groups": ("adam", lambda optimizer: lr_scheduler.LambdaLR(optimizer, [lambda step: 0.9**step, lambda step: 1 / (1 + step)])),
}


def in_groups(kind: str, module: nn.Module) -> torch.optim.Optimizer:
    """An optimizer of which weights and biases are groups with options of their own."""
    weights, biases = ([p for p in module.parameters() if (p.dim() > 1) == is_matrix] for is_matrix in (True, False))
    own: dict[str, Any] = {"momentum": 0.5} if kind == "sgd" else {"betas": (0.5, 0.6), "eps": 1e-4}
    groups = [{"params": weights}, {"params": biases, "lr": 0.01, "weight_decay": 0.0, **own}]
    made = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[kind]
    return made(groups, lr=0.05, weight_decay=0.1, **({"momentum": 0.9} if kind == "sgd" else {}))


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedulers_set_options_of_groups(name: str) -> None:
    """Rates, betas and momentum that follow PyTorch's schedulers, and weight decay that follows a cosine and begins at zero in one group."""
    kind, schedule = SCHEDULES[name]
    heads = [0, 1, 0, 0, 1, 1, 0, 1]

    def follow(optimizer: torch.optim.Optimizer, schedule: Any) -> Callable[[int], None]:
        def after(number: int) -> None:
            schedule.step()
            for which, group in enumerate(optimizer.param_groups):
                group["weight_decay"] = 0.1 * (1 - math.cos(number + which))

        return after

    theirs = make()
    optimizer = in_groups(kind, theirs)
    expected = eager(theirs, optimizer, batches(heads), follow(optimizer, schedule(optimizer)), clip=0.2)
    ours = make()
    optimizer = in_groups(kind, ours)
    after, found = follow(optimizer, schedule(optimizer)), []
    with Session(ours, optimizer, max_grad_norm=0.2, ram="16MB") as session:
        for number, batch in enumerate(batches(heads)):
            found.append(session.step(**batch))
            after(number)
        compare(session, theirs)
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_counts_and_options_are_saved_and_resumed(kind: str, tmp_path: Path) -> None:
    """In the middle of heads by turns, from options that a scheduler had changed: the same bits."""
    given, half = batches([0, 1, 0, 0, 1, 1, 0, 1]), 4

    def run(session: Session, schedule: Any, numbers: range) -> Iterator[float]:
        for number in numbers:
            yield session.step(**given[number])
            schedule.step()

    ours = make()
    optimizer = in_groups(kind, ours)
    schedule = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
    with Session(ours, optimizer, ram="16MB") as session:
        losses = list(run(session, schedule, range(half)))
        session.save(tmp_path / "saved")
        saved = schedule.state_dict()
        losses += run(session, schedule, range(half, 8))
        expected = session.state_dict()
    state = json.loads((tmp_path / "saved" / "session.json").read_text())
    skipped = {name: count for name, count in state["skipped"].items() if "weight" in name}
    assert skipped == {"heads.0.weight": 1, "heads.1.weight": 3, "spare.weight": 4}
    ours = make()
    optimizer = in_groups(kind, ours)
    schedule = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
    with Session(ours, optimizer, ram="16MB") as session:
        session.resume(tmp_path / "saved")
        schedule.load_state_dict(saved)
        assert list(run(session, schedule, range(half, 8))) == losses[half:]
        assert all(torch.equal(value, expected[name]) for name, value in session.state_dict().items())
        session.reset_optimizer()
        session.save(tmp_path / "reset")
    state = json.loads((tmp_path / "reset" / "session.json").read_text())
    assert (state["step"], state["skipped"]) == (0, {})


def test_a_session_saved_without_counts_is_resumed(tmp_path: Path) -> None:
    """As older versions wrote it: one learning rate, and each parameter has taken all steps. Counts and groups of others are refused."""
    given = batches([0] * 4)
    with Session(make(), "adamw", lr=0.05, ram="16MB") as session:
        for batch in given[:2]:
            session.step(**batch)
        session.save(tmp_path / "saved")
        expected = [session.step(**batch) for batch in given[2:]]
    file = tmp_path / "saved" / "session.json"
    state = json.loads(file.read_text())
    for key in ("groups", "skipped"):
        rewrite_state(file, lambda content, key=key: content.pop(key))
    with Session(make(), "adamw", lr=0.5, ram="16MB") as session:
        session.resume(tmp_path / "saved")
        assert [session.step(**batch) for batch in given[2:]] == expected
        for change, words in [
            ({"skipped": {"nothing": 1}}, "counts steps of other parameters"),
            ({"skipped": {"body.weight": 3}}, "counts steps of other parameters"),
            ({"skipped": {"body.weight": "1"}}, "format"),
            ({"skipped": 3}, "no whole session"),
            ({"groups": state["groups"] * 2}, r"2 parameter groups, which differ from the optimizer's 1"),
            ({"groups": [{"lr": 0.1, "momentum": 0.9}]}, "parameter groups, which differ"),
            ({"groups": [3]}, "format"),
            ({"groups": 3}, "no whole session"),
        ]:
            file.write_text(json.dumps(state))
            rewrite_state(file, lambda content, change=change: content.update(change))
            with pytest.raises(DataError, match=words):
                session.resume(tmp_path / "saved")


def picky(heads: Sequence[int], *, bad_at: int | None = None) -> list[dict[str, Any]]:
    """Batches for `Picky`, of which one fails."""
    column = torch.zeros(8, 1, dtype=torch.int64)
    return [{**batch, "column": column + 4 * (number == bad_at)} for number, batch in enumerate(batches(heads))]


@pytest.mark.parametrize(("heads", "bad_at"), [([0, 1, 0, 1, 0], 1), ([0, 1, 0, 1, 0], 2), ([0, 0, 1, 1, 0], 0)])
def test_a_step_that_was_left_out_counts_for_no_parameter(heads: list[int], bad_at: int) -> None:
    """Neither for those that it would have updated nor as skipped by the others."""
    theirs, good = make(Picky), [batch for number, batch in enumerate(picky(heads)) if number != bad_at]
    expected = eager(theirs, OPTIMIZERS["adamw"](theirs), good)
    ours, found = make(Picky), []
    with Session(ours, OPTIMIZERS["adamw"](ours), ram="16MB") as session:
        for number, batch in enumerate(picky(heads, bad_at=bad_at)):
            if number == bad_at:
                with pytest.raises(UsageError, match="left out"):
                    session.step(**batch)
            else:
                found.append(session.step(**batch))
        compare(session, theirs)
    assert found == pytest.approx(expected, rel=1e-12)


def test_a_step_in_flight_that_was_left_out_counts_for_no_parameter(tmp_path: Path) -> None:
    """Behind a step of the other head it keeps its number, and its parameters have skipped it."""
    with Session(make(Picky), "adamw", lr=0.05, ram="16MB") as session:
        started = [session.start(**batch) for batch in picky([0, 1, 0], bad_at=1)]
        with pytest.raises(UsageError, match="left out"):
            started[1].result()
        session.save(tmp_path / "saved")
        assert session.num_steps == 3
    skipped = json.loads((tmp_path / "saved" / "session.json").read_text())["skipped"]
    assert {name: 3 - skipped.get(name, 0) for name in ("body.weight", "heads.0.bias", "heads.1.bias", "spare.bias")} == {
        **{"body.weight": 2, "heads.0.bias": 2, "heads.1.bias": 0, "spare.bias": 0}
    }


AT_ONCE: dict[str, tuple[Callable[[Any], object], str]] = {
    "state_dict": (lambda optimizer: optimizer.state_dict(), r"^state_dict\(\) of the optimizer cannot be called .*; save\(\) and resume\(\)"),
    "load_state_dict": (
        lambda optimizer: optimizer.load_state_dict({"state": {}, "param_groups": []}),
        r"^load_state_dict\(\) of the optimizer cannot be called while a session is open",
    ),
    "clearing state": (lambda optimizer: optimizer.state.clear(), r"^optimizer\.state cannot be read or changed .* reset_optimizer\(\) clears it"),
    "writing state": (lambda optimizer: optimizer.state.update({0: {}}), r"^optimizer\.state cannot be read or changed"),
    "reading state": (lambda optimizer: list(optimizer.state.items()), r"^optimizer\.state cannot be read or changed"),
    "a copy": (copy.deepcopy, r"^optimizer\.state cannot be read or changed"),
}


@pytest.mark.parametrize("what", AT_ONCE)
def test_state_of_the_optimizer_is_refused_at_once(what: str) -> None:
    """While a session has it; the session goes on, and afterwards the optimizer works."""
    module = make()
    optimizer = OPTIMIZERS["adamw"](module)
    act, words = AT_ONCE[what]
    with Session(module, optimizer, ram="16MB") as session:
        for batch in batches([0, 1]):
            with pytest.raises(UsageError, match=words):
                act(optimizer)
            session.step(**batch)
        session.load_into(module)
    assert optimizer.state_dict()["state"] == {}
    optimizer.load_state_dict(optimizer.state_dict())
    eager(module, optimizer, batches([0]))
    assert optimizer.state_dict()["state"]


def _move(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop())


LATER: dict[str, tuple[Callable[[Any], object], str]] = {
    "another state": (lambda optimizer: setattr(optimizer, "state", defaultdict(dict)), r"^optimizer\.state must stay .* got another defaultdict"),
    "a pre-hook": (lambda optimizer: optimizer.register_step_pre_hook(lambda *_: None), r"^the optimizer must have no step hooks, .* got 1"),
    "a post-hook": (lambda optimizer: optimizer.register_step_post_hook(lambda *_: None), r"^the optimizer must have no step hooks"),
    "a parameter less": (lambda optimizer: optimizer.param_groups[0]["params"].pop(), r"had \[4, 4\] parameters in the groups, got \[3, 4\]"),
    "a parameter more": (
        lambda optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]}),
        r"had \[4, 4\] parameters in the groups, got \[4, 4, 1\]",
    ),
    "another group": (_move, r"had \[4, 4\] parameters in the groups, got \[3, 5\]"),
    "another order": (lambda optimizer: optimizer.param_groups[0]["params"].reverse(), r"had \[4, 4\] .* got others; put them back"),
    "no momentum": (lambda optimizer: optimizer.param_groups[1].update(momentum=0), r"^whether group 1 has momentum must stay True .* got False"),
    "a large momentum": (lambda optimizer: optimizer.param_groups[1].update(momentum=1.5), r"^momentum of group 1 must be .* below 1, got 1\.5"),
    "nesterov": (lambda optimizer: optimizer.param_groups[0].update(nesterov=True), r"^nesterov of group 0 must stay False"),
    "negative decay": (lambda optimizer: optimizer.param_groups[0].update(weight_decay=-1), r"^weight_decay of group 0 must be at least 0, got -1"),
}


@pytest.mark.parametrize("what", LATER)
def test_other_changes_of_the_optimizer_are_refused_at_the_next_step(what: str) -> None:
    """The weights stay, and are those of the steps before."""
    theirs, ours = make(), make()
    eager(theirs, in_groups("sgd", theirs), batches([0]))
    optimizer = in_groups("sgd", ours)
    act, words = LATER[what]
    with Session(ours, optimizer, ram="16MB") as session:
        session.step(**batches([0])[0])
        act(optimizer)
        with pytest.raises(UsageError, match=words):
            session.step(**batches([0])[0])
        compare(session, theirs)


def test_hooks_of_steps_are_refused_when_a_session_opens() -> None:
    """Of the optimizer, and of all optimizers; an optimizer has one session at a time."""
    module = make()
    optimizer = OPTIMIZERS["adamw"](module)
    for register in (optimizer.register_step_post_hook, register_optimizer_step_pre_hook):
        hook = register(lambda *_: None)
        with pytest.raises(UsageError, match="must have no step hooks"):
            Session(module, optimizer, ram="16MB")
        hook.remove()
    with Session(module, optimizer, ram="16MB"), pytest.raises(UsageError, match="that of another session, which is open"):
        Session(make(), optimizer, ram="16MB")


def test_an_optimizer_without_gradients_does_nothing() -> None:
    """`step` and `zero_grad` of the optimizer itself, as loops that were written for eager call them, harm nothing."""
    theirs, ours = make(), make()
    eager(theirs, OPTIMIZERS["adam"](theirs), batches([0, 1]))
    optimizer = OPTIMIZERS["adam"](ours)
    with Session(ours, optimizer, ram="16MB") as session:
        for batch in batches([0, 1]):
            optimizer.zero_grad()
            session.step(**batch)
            optimizer.step()
        compare(session, theirs)


def test_groups_may_be_with_and_without_momentum() -> None:
    """A group without momentum beside one that has it: eager's weights."""
    heads = [0, 1, 0, 1]

    def mixed(module: nn.Module) -> torch.optim.Optimizer:
        optimizer = in_groups("sgd", module)
        optimizer.param_groups[1]["momentum"] = 0.0
        return optimizer

    theirs, ours = make(), make()
    expected = eager(theirs, mixed(theirs), batches(heads))
    with Session(ours, mixed(ours), ram="16MB") as session:
        assert [session.step(**batch) for batch in batches(heads)] == pytest.approx(expected, rel=1e-12)
        compare(session, theirs)


def test_shapes_that_use_other_parameters(tmp_path: Path) -> None:
    """A branch on the shape of the batch, over a disk and with two minibatches: the set of parameters follows the recorded step."""

    class Branches(Heads):
        def forward(self, x: torch.Tensor, head: int = 0) -> torch.Tensor:
            return super().forward(x, int(x.shape[1] > 12)) if x.shape[1] <= 12 else super().forward(x[:, :12], 1)

    sizes = [12, 13, 12, 12, 13, 13]
    generator = torch.Generator().manual_seed(2)
    given = [{"x": torch.randn(8, size, generator=generator, dtype=torch.float64)} for size in sizes]
    theirs, ours = make(Branches), make(Branches)
    expected = eager(theirs, OPTIMIZERS["adamw"](theirs), given)
    with Session(ours, OPTIMIZERS["adamw"](ours), minibatches=2, ram="60KB", disk=f"{tmp_path}:16MB", workers=1) as session:
        assert [session.step(**batch) for batch in given] == pytest.approx(expected, rel=1e-11)
        compare(session, theirs)


def test_counts_follow_long_turns() -> None:
    """Thirty steps of three patterns on simulated devices: the same losses as eager."""
    heads = [number % 2 if pattern else int(number > 6) for pattern, number in itertools.product((0, 1), range(15))]
    theirs, ours = make(), make()
    expected = eager(theirs, OPTIMIZERS["adamw"](theirs), batches(heads))
    with Session(ours, OPTIMIZERS["adamw"](ours), ram="16MB", workers=0, sim_gpu=2, gpu_memory="4MB") as session:
        assert [session.step(**batch) for batch in batches(heads)] == pytest.approx(expected, rel=1e-11)
        compare(session, theirs)
