"""Muon and AdamW with 8-bit moments in sessions: the steps of PyTorch's own optimizers, tiles, files, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.muon_oracle import in_fp32
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import lr_scheduler

from nntask import DataError, UsageError
from wrappers.torch import Session
from wrappers.torch.steps.muon import muon_of

RATE = 0.01
WORDS = 23


class Net(nn.Module):
    """An embedding, matrices that are wide and tall, a norm, and a head that the module names as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(WORDS, 16)
        self.body = nn.Sequential(nn.Linear(16, 300), nn.Tanh(), nn.Linear(300, 16), nn.LayerNorm(16))
        self.head = nn.Linear(16, WORDS, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.head(self.body(self.table(x))).flatten(0, 1), y.flatten())


def batches(count: int = 10) -> Iterator[dict[str, torch.Tensor]]:
    """Random words."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield {name: torch.randint(0, WORDS, (4, 5), generator=generator) for name in "xy"}


def pair(module: Net, **options: Any) -> list[torch.optim.Optimizer]:
    """A Muon of the matrices of the body, and an AdamW of everything else."""
    inner = [module.body[0].weight, module.body[2].weight]
    others = [p for p in module.parameters() if all(p is not each for each in inner)]
    return [
        torch.optim.Muon(inner, lr=RATE, weight_decay=0.1, **options),
        torch.optim.AdamW(others, lr=RATE, weight_decay=0.1),
    ]


def eager(options: dict[str, Any], clip: float = 0.0) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of PyTorch, with rates that halve."""
    module, losses = Net(), []
    optimizers = pair(module, **options)
    schedules = [lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in optimizers]
    for batch in batches():
        module.zero_grad()
        loss = module(**batch)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        with in_fp32():
            for each in (*optimizers, *schedules):
                each.step()
        losses.append(loss.item())
    return losses, module.state_dict()


@pytest.mark.parametrize(
    ("options", "clip", "largest_tile"),
    [
        ({}, 0.0, "1GiB"),
        ({"adjust_lr_fn": "match_rms_adamw", "momentum": 0.9}, 0.0, "4KiB"),
        ({"nesterov": False, "ns_steps": 4}, 0.0, "2KiB"),
        ({}, 0.1, "1KiB"),
        ({"eps": 1e-3, "ns_coefficients": (2.0, -1.5, 0.5)}, 0.0, "512B"),
    ],
    ids=str,
)
def test_a_muon_and_an_adamw_take_the_steps_of_torch(options: dict[str, Any], clip: float, largest_tile: str) -> None:
    """Ten steps with PyTorch's schedulers of both, in five tilings; the pair's options are read in every step."""
    losses, weights = eager(options, clip)
    module = Net()
    optimizers = pair(module, **options)
    schedules = [lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in optimizers]
    with Session(module, optimizers, minibatches=2, max_grad_norm=clip, largest_tile=largest_tile, ram="64MB") as session:
        for batch, want in zip(batches(), losses, strict=True):
            assert float(session.step(**batch)) == pytest.approx(want, rel=1e-5)
            for schedule in schedules:
                schedule.step()
        for name, value in session.state_dict().items():
            assert (value - weights[name]).abs().max() < 1e-5, name


def test_a_name_leaves_embeddings_head_and_vectors_to_adamw() -> None:
    """With AdamW's rates; matrices have a momentum, everything else two moments."""
    with Session(Net(), "muon", lr=RATE, weight_decay=0.1, ram="64MB") as session:
        names = set(session.optimizer_tensors())
        assert {name for name in names if name.startswith("momentum.")} == {"momentum.body.0.weight", "momentum.body.2.weight"}
        assert {"m.table.weight", "v.head.weight", "m.body.0.bias", "m.body.3.weight"} <= names
        groups = session.optimizer.param_groups
        assert [group.get("adjust_lr_fn") for group in groups] == ["match_rms_adamw", None, None]


def test_a_name_has_one_weight_decay_by_default() -> None:
    """AdamW's, also for matrices; an array of experts is left to AdamW and decays."""
    module = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5))
    module.experts = nn.Parameter(torch.ones(2, 5, 5))
    optimizer = muon_of(module, {"lr": RATE}, vectors_decay=False)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.01, 0.0]
    assert [tuple(p.shape) for p in optimizer.param_groups[1]["params"]] == [(2, 5, 5)]


def test_a_muon_alone_is_for_modules_of_matrices() -> None:
    """If it has all parameters."""
    module = nn.Sequential(nn.Linear(5, 6, bias=False), nn.Linear(6, 4, bias=False))
    with Session(module, torch.optim.Muon(module.parameters()), loss=lambda y, batch: y.square().mean(), ram="16MB") as session:
        assert float(session.step(input=torch.ones(2, 5))) > float(session.step(input=torch.ones(2, 5)))
    with pytest.raises(UsageError, match=r"the optimizer lacks body\.0\.bias, which is learnt"):
        Session(net := Net(), torch.optim.Muon([net.table.weight, net.body[0].weight, net.body[2].weight, net.head.weight]))


@pytest.mark.parametrize("optimizer", ["muon", "adamw8bit"])
def test_a_saved_session_continues_with_the_same_bits(optimizer: str, tmp_path: Path) -> None:
    """Six steps, and three with three after a resumption in less memory."""
    options = {"lr": RATE, "minibatches": 2, "largest_tile": "2KiB"}
    with Session(Net(), optimizer, ram="64MB", **options) as session:
        for number, batch in enumerate(batches(6)):
            session.step(**batch)
            if number == 2:
                session.save(tmp_path / "a")
        whole = session.state_dict()
    with Session(Net(), optimizer, ram="32MB", disk=tmp_path / "disk", **options) as session:
        session.resume(tmp_path / "a")
        for batch in list(batches(6))[3:]:
            session.step(**batch)
        assert all(torch.equal(value, whole[name]) for name, value in session.state_dict().items())
    for other in {"muon", "adamw8bit", "adamw"} - {optimizer}:
        with Session(Net(), other, ram="64MB", **options) as session, pytest.raises(DataError):
            session.resume(tmp_path / "a")


def test_8_bit_moments_stay_near_those_of_torch() -> None:
    """A large matrix has codes and scales, below 2.1 bytes a weight; losses of ten steps are within 1 %."""

    def wide() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 8))

    losses = {}
    for optimizer in ("adamw", "adamw8bit"):
        generator = torch.Generator().manual_seed(2)
        with Session(wide(), optimizer, lr=RATE, loss=lambda y, batch: y.square().mean(), ram="64MB") as session:
            losses[optimizer] = [float(session.step(input=torch.randn(16, 64, generator=generator))) for _ in range(10)]
            state = session.optimizer_tensors()
    assert losses["adamw8bit"] == pytest.approx(losses["adamw"], rel=0.01)
    assert sum(tensor.nbytes for name, tensor in state.items() if name.endswith("0.weight")) < 2.1 * 64 * 300
    assert state["m.2.weight"].dtype.itemsize == 4


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda module: pair(module)[1:], "several optimizers must be a torch.optim.Muon and a torch.optim.AdamW, got AdamW"),
        (lambda module: [*pair(module), *pair(module)], "several optimizers must be .* got Muon, AdamW, Muon, AdamW"),
        (lambda module: [], "several optimizers must be .* got none"),
    ],
)
def test_other_lists_are_refused(make: Any, words: str) -> None:
    """One sentence each."""
    module = Net()
    with pytest.raises(UsageError, match=words):
        Session(module, make(module))


def test_what_cannot_be_is_named() -> None:
    """No matrix, an unknown option, a constant option that changes, state that is read."""
    with pytest.raises(UsageError, match="Muon needs a matrix of a hidden layer that is learnt, got none"):
        Session(nn.LayerNorm(4), "muon")
    for optimizer, word in (("muon", "dampening"), ("adamw", "rom")):
        with pytest.raises(UsageError, match=f"{word}= is neither an argument of Session nor an option of {optimizer}"):
            Session(Net(), optimizer, **{word: 0.1})
    with pytest.raises(UsageError, match=r"torch\.optim\.Muon refuses .*momentum"):
        Session(Net(), "muon", momentum=-1.0)
    module = Net()
    optimizers = pair(module)
    with Session(module, optimizers, ram="64MB") as session:
        with pytest.raises(UsageError, match=r"optimizer\.state cannot be read"):
            optimizers[0].state.clear()
        optimizers[0].param_groups[0]["ns_steps"] = 2
        with pytest.raises(UsageError, match="ns_steps of group 0 must stay 5 while the session is open, got 2"):
            session.step(**next(batches()))
