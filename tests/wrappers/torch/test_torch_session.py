"""Any module of PyTorch in training: eager's losses, the same bits whatever the memory and the workers, and what is refused."""

from __future__ import annotations

import copy
import inspect
import os
import re
import threading
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.torch_families import FAMILIES, Batch, eager, make
from support.torch_refusals import REFUSALS, Refusal
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import scheduler
from nntask import DataError, DoesNotFit, UsageError
from nntask.config import ResourceSettings, machine_of
from nntask.hardware import open_runtime
from wrappers.torch import Session, empty_parameters
from wrappers.torch.session.arguments import grouped
from wrappers.torch.tasks.step import Pass

pytest.importorskip("transformers")

USUAL = ("bert", "mixtral", "resnet", "t5")
"""Families of the default run: an encoder, grouped products, batch normalisation, tied weights in an encoder and a decoder."""
ALL = [pytest.param(name, marks=() if name in USUAL else pytest.mark.long) for name in FAMILIES]
SAME = [pytest.param(name, marks=() if name == USUAL[0] else pytest.mark.long) for name in FAMILIES]


def train(module: torch.nn.Module, batches: Sequence[Batch], **terms: Any) -> tuple[list[float], dict[str, torch.Tensor], dict[str, Any]]:
    """Losses, weights and counters of a session."""
    with Session(copy.deepcopy(module), lr=1e-3, **terms) as session:
        losses = [session.step(**batch) for batch in batches]
        return losses, session.state_dict(), session.runtime.stats()


def test_a_runtime_may_be_lent() -> None:
    """The same bits on a runtime of the caller, which stays open; a recorded step is the one that is replayed; failures are the caller's."""
    module, batches = make("bert", 2)
    expected, _, _ = train(module, batches, ram="64MB", workers=1)
    machine = machine_of(ResourceSettings(ncpu=1, ram="64MB", ngpu=0))
    with open_runtime(machine) as runtime:
        with Session(copy.deepcopy(module), lr=1e-3, on=(machine, runtime)) as session:
            step = session.training_step([batches[0]])
            assert [session.step(**batch) for batch in batches] == expected
            assert step is session.training_step([batches[1]])
            assert set(session.model_tensors()) < set(module.state_dict())  # a tied head once
        runtime.wait()
    small = machine_of(ResourceSettings(ncpu=1, ram="400KB", ngpu=0))
    with pytest.raises(scheduler.DoesNotFit), open_runtime(small) as runtime, Session(copy.deepcopy(module), lr=1e-3, on=(small, runtime)) as session:
        session.step(**batches[0])


@pytest.mark.parametrize("family", ALL)
def test_losses_are_eagers(family: str) -> None:
    """10 steps with AdamW, within 1e-5; the first loss within one rounding; evaluation after them, and the weights."""
    module, batches = make(family, 10)
    theirs = copy.deepcopy(module)
    expected = eager(theirs, batches, lr=1e-3)
    with Session(module, lr=1e-3, ram="256MB", workers=2) as session:
        found = [session.step(**batch) for batch in batches]
        assert max(abs(ours - other) for ours, other in zip(found, expected, strict=True)) <= 1e-5
        assert abs(found[0] - expected[0]) <= 1e-6
        theirs.eval()
        with torch.no_grad():
            assert session.evaluate(**batches[0]) == pytest.approx(theirs(**batches[0]).loss.item(), abs=1e-5)
        state = session.state_dict()
    assert state.keys() == theirs.state_dict().keys()
    for name, value in theirs.state_dict().items():
        is_of_keys = name.endswith("bias") and ("att" in name or "k_proj" in name)  # softmax ignores it: AdamW makes steps of rounding errors
        assert torch.allclose(state[name], value, atol=2 * len(batches) * 1e-3 if is_of_keys else 1e-4), name


@pytest.mark.parametrize("family", SAME)
def test_the_same_bits_in_any_memory_on_any_workers(family: str, tmp_path: Path) -> None:
    """Two minibatches: all memory, a quarter of it above a disk, one worker, two simulated devices: equal losses and weights."""
    module, batches = make(family, 3)
    losses, weights, stats = train(module, batches, minibatches=2, ram="256MB", workers=2)
    quarter = f"{stats['peak_bytes']['ram'] // 4}B"
    others = [
        {"ram": quarter, "disk": f"{tmp_path}:256MB", "workers": 2},
        {"ram": "256MB", "workers": 1},
        {"ram": "256MB", "workers": 0, "sim_gpu": 2, "gpu_memory": "64MB"},
    ]
    for terms in others:
        found, same, counted = train(module, batches, minibatches=2, **terms)
        assert found == losses
        assert all(torch.equal(same[name], value) for name, value in weights.items())
        if "disk" in terms:
            assert counted["moved_bytes"]
            assert counted["peak_bytes"]["ram"] <= stats["peak_bytes"]["ram"] // 4


def test_minibatches_accumulate_as_in_eager() -> None:
    """The gradient is that of the mean of the minibatches' losses, clipping and weight decay included."""
    module, batches = make("gpt2", 4)
    theirs = copy.deepcopy(module)
    expected = eager(theirs, batches, minibatches=2, lr=1e-3, weight_decay=0.1)
    with Session(module, torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.1), minibatches=2, ram="64MB") as session:
        assert [session.step(**batch) for batch in batches] == pytest.approx(expected, abs=1e-6)


def test_minibatches_may_differ_in_shape_and_have_an_objective_of_their_own() -> None:
    """The gradient is that of the sum of their losses over the divisor; evaluation has the same objective."""
    module, (batch, _) = make("gpt2", 2)
    short = {name: value[:1, :8] if isinstance(value, torch.Tensor) else value for name, value in batch.items()}

    def objective(module: torch.nn.Module, batch: Any) -> torch.Tensor:
        outputs = module(**batch)
        return outputs.loss * 2 + outputs.logits.square().mean()

    theirs = copy.deepcopy(module)
    optimizer, expected = torch.optim.AdamW(theirs.parameters(), lr=1e-3), []
    for minibatches in ([batch, short], [short, batch, short]):
        losses = [objective(theirs, each) for each in minibatches]
        optimizer.zero_grad()
        (sum(losses) / 4).backward()
        optimizer.step()
        expected.append(sum(loss.item() for loss in losses) / 4)
    with Session(module, lr=1e-3, objective=objective, ram="64MB") as session:
        found = [session.start_minibatches(each, divisor=4).result().loss for each in ([batch, short], [short, batch, short])]
        assert found == pytest.approx(expected, abs=1e-5)
        assert session.evaluate(**short) == pytest.approx(objective(theirs.eval(), short).item(), abs=1e-5)
        with pytest.raises(UsageError, match=r"labels of the batch has tensors inside a list; give each tensor as an argument"):
            session.step(input_ids=batch["input_ids"], labels=[batch["labels"]])


def test_schedulers_of_pytorch_set_the_rate() -> None:
    """The rate of the optimizer's group is read at each step."""
    module, batches = make("opt", 3)
    theirs = copy.deepcopy(module)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    expected = []
    for batch in batches:
        optimizer.zero_grad()
        loss = theirs(**batch).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        expected.append(loss.item())
    ours = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(ours, 1, 0.1)
    found = []
    with Session(module, ours, ram="64MB") as session:
        for batch in batches:
            found.append(session.step(**batch))
            schedule.step()
    assert found == pytest.approx(expected, abs=1e-5)


class _Dropping(torch.nn.Module):
    """Dropout, random noise and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(16, 64)
        self.last = torch.nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.dropout(self.first(x), 0.5, self.training)
        return (self.last(y + 0.1 * torch.randn_like(y)) ** 2).mean()


def test_random_numbers_depend_on_seed_step_and_place_alone(tmp_path: Path) -> None:
    """The same numbers on one worker, two, and in short memory; others at the next step, in the other minibatch, with another seed."""
    torch.manual_seed(0)
    module, x = _Dropping(), torch.randn(1, 16).expand(8, 16).contiguous()
    batches = [{"x": x}] * 2
    terms = [
        {"workers": 1, "ram": "64MB"},
        {"workers": 2, "ram": "64MB"},
        {"workers": 2, "ram": "40KiB", "disk": f"{tmp_path}:16MB"},
        {"workers": 2, "ram": "64MB", "seed": 1},
    ]
    found = [train(module, batches, minibatches=2, **each)[0] for each in terms]
    assert found[0] == found[1] == found[2]
    assert found[3] != found[0]
    with Session(module, "sgd", lr=0.0, ram="64MB") as session:
        losses = [session.step(x=x) for _ in range(3)]
        assert len(set(losses)) == 3
        assert session.evaluate(x=x) == session.evaluate(x=x)


def test_frozen_parameters_have_neither_gradient_nor_state() -> None:
    """The weights stay, bit for bit, and the optimizer holds nothing for them."""
    module, batches = make("gpt2", 2)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("ln_f" in name)
    before = copy.deepcopy(module.state_dict())
    with Session(module, lr=1e-2, ram="64MB") as session:
        for batch in batches:
            session.step(**batch)
        after = session.state_dict()
        assert {name.partition(".")[2] for name in session.optimizer_tensors()} == {"transformer.ln_f.weight", "transformer.ln_f.bias"}
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert changed == {"transformer.ln_f.weight", "transformer.ln_f.bias"}


def test_adapters_of_peft_work_as_they_are() -> None:
    """LoRA: eager's losses."""
    peft = pytest.importorskip("peft")
    module, batches = make("llama", 4)
    adapted = peft.get_peft_model(module, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))
    theirs = copy.deepcopy(adapted)
    learnt = [parameter for parameter in theirs.parameters() if parameter.requires_grad]
    optimizer, expected = torch.optim.AdamW(learnt, lr=1e-2), []
    for batch in batches:
        optimizer.zero_grad()
        loss = theirs(**batch).loss
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    with Session(adapted, lr=1e-2, ram="64MB") as session:
        assert [session.step(**batch) for batch in batches] == pytest.approx(expected, abs=1e-5)


def test_a_run_that_is_resumed_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """Weights, moments, the number of the step and the learning rate come back; the files are safetensors and JSON."""
    module, batches = make("bert", 6)
    terms: dict[str, Any] = {"lr": 1e-3, "ram": "64MB", "minibatches": 2}
    with Session(copy.deepcopy(module), **terms) as session:
        whole = [session.step(**batch) for batch in batches]
        weights = session.state_dict()
    with Session(copy.deepcopy(module), **terms) as session:
        first = [session.step(**batch) for batch in batches[:3]]
        session.save(tmp_path / "run")
    assert {path.suffix for path in (tmp_path / "run").iterdir()} == {".safetensors", ".json"}
    other, _ = make("bert", 0, seed=1)
    with Session(other, **terms) as session:
        session.resume(tmp_path / "run")
        assert session.num_steps == 3
        assert first + [session.step(**batch) for batch in batches[3:]] == whole
        assert all(torch.equal(value, weights[name]) for name, value in session.state_dict().items())


def test_a_module_gets_its_weights_back() -> None:
    """While the session has them the module's are NaN in a few bytes, and calls are refused; `load_into` fills it, ties included."""
    module, batches = make("gpt2", 1)
    expected = copy.deepcopy(module.state_dict())
    with Session(module, "sgd", lr=0.0, ram="64MB") as session:
        with torch._C.DisableTorchFunctionSubclass():
            assert all(value.untyped_storage().nbytes() <= 8 for value in module.parameters())
            assert all(value.isnan().all() for value in module.parameters())
        with pytest.raises(UsageError, match=r"weights of the module are in a session, .*load_into\(module\)"):
            module(**batches[0])
        session.load_into(module)
        assert torch.isfinite(module(**batches[0]).loss)
    assert all(torch.equal(value, expected[name]) for name, value in module.state_dict().items())
    assert module.lm_head.weight is module.transformer.wte.weight


def test_a_module_without_its_weights_is_refused(tmp_path: Path) -> None:
    """NaN would be trained otherwise: while a session has the weights and after it, until they are back, or are read from what it saved."""
    module, batches = make("gpt2", 1)
    words = r"^transformer\.wte\.weight has no values, since a session holds them, or held them .*; bring them back first with load_into\(module\)"
    with Session(module, ram="64MB") as session:
        expected = session.evaluate(**batches[0])
        with pytest.raises(UsageError, match=words):
            Session(module, ram="64MB")
        session.save(tmp_path / "saved")
    with pytest.raises(UsageError, match=words):
        Session(module, ram="64MB")
    with Session(module, weights=tmp_path / "saved", ram=64_000_000, disk=tmp_path / "disk") as session:
        assert session.evaluate(**batches[0]) == expected
        session.load_into(module)
    assert module.eval()(**batches[0]).loss.item() == pytest.approx(expected, abs=1e-6)
    with Session(module, ram="64MB") as session:
        assert session.evaluate(**batches[0]) == expected


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_weights_come_from_files_when_they_are_needed(family: str, tmp_path: Path) -> None:
    """A module without memory and a directory as save_pretrained writes it, in short memory: the losses of the module with its values."""
    module, batches = make(family, 2)
    module.save_pretrained(tmp_path / "model")
    with empty_parameters():
        empty, _ = make(family, 0)
    assert all(value.is_meta for value in empty.parameters())
    losses, weights, stats = train(module, batches, ram="64MB")
    half = f"{stats['peak_bytes']['ram'] // 2}B"
    with Session(empty, lr=1e-3, weights=tmp_path / "model", ram=half, disk=f"{tmp_path}:64MB") as session:
        assert [session.step(**batch) for batch in batches] == losses
        session.load_into(empty)
    assert all(torch.equal(value, weights[name]) for name, value in empty.state_dict().items())
    (tmp_path / "model" / "model.safetensors").unlink()
    with empty_parameters():
        empty, _ = make(family, 0)
    with pytest.raises(DataError, match=r"has no weights; it needs model\.safetensors"):
        Session(empty, weights=tmp_path / "model", ram="64MB")


def test_frozen_weights_in_files_need_no_room(tmp_path: Path) -> None:
    """Without a disk tier, a session runs in less memory than they take, with the same losses; they are read again when they are needed."""
    module = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)], torch.nn.Linear(256, 4))
    module[:4].requires_grad_(False)
    save_file(module.state_dict(), tmp_path / "model.safetensors")

    def train_on_ones(module: torch.nn.Module, **terms: Any) -> list[float]:
        with Session(module, "sgd", lr=0.1, loss=lambda out, batch: out.square().mean(), workers=1, **terms) as session:
            return [session.step(input=torch.ones(4, 256)) for _ in range(3)]

    losses = train_on_ones(copy.deepcopy(module), ram="64MB")
    assert losses[0] > losses[2]
    assert train_on_ones(module, ram="700KB", weights=tmp_path) == losses  # the frozen weights have 1,048,576 bytes


class _Twice(torch.nn.Module):
    """The gradient of a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(torch.tanh(self.layer(x)).sum(), x, create_graph=True)
        return (slope**2).mean()


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class _Custom(_Twice):
    """A function with a backward pass of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (_Double.apply(self.layer(x)) ** 2).mean()


class _Recurrent(_Twice):
    """An LSTM and a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.LSTM(4, 4), torch.nn.GRU(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.second(self.first(x[None])[0])[0] ** 2).mean() + self.layer(x).mean() ** 2


class _InPlace(_Twice):
    """In-place operations on activations and on a buffer, and a real tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.scale = torch.tensor([2.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        y = self.layer(x).mul_(self.scale).relu_()
        return (y + self.count).square().mean()


class _Losses(_Twice):
    """Losses whose own form for given results makes them larger first, beside live numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x).sigmoid()
        scale = y.mean().exp()
        kinds = (functional.mse_loss, functional.huber_loss, functional.smooth_l1_loss, functional.binary_cross_entropy)
        return sum(kind(y, x.sigmoid()) * scale for kind in kinds)  # type: ignore[return-value]


class _Complex(_Twice):
    """Conjugates and imaginary parts, which PyTorch keeps as marks of a tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.fft.rfft(self.layer(x))
        z = torch.complex(self.layer(x), x)
        return torch.fft.irfft(y * y.conj()).mean() + (y.conj().imag ** 2).mean() + (z @ z.conj().T).real.square().mean()


class _Replaces(_Twice):
    """A buffer that is replaced in each step, and a tensor that is made when it is first wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(4))
        self.mask: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = torch.ones(4, 4).tril()
        y = self.layer(x) @ self.mask
        self.average = 0.5 * self.average + 0.5 * y.detach().mean(0)
        return (y - self.average).square().mean()


class _Frozen(_Twice):
    """Batch normalisation that stays in evaluation mode while the module trains."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4).eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x)).square().mean()


@pytest.mark.parametrize("kind", [_Twice, _Custom, _Recurrent, _InPlace, _Losses, _Complex, _Replaces, _Frozen])
def test_what_autograd_can_do_sessions_can(kind: type[torch.nn.Module]) -> None:
    """Double backward, custom functions, recurrent layers, in-place operations and changed buffers: eager's losses."""
    torch.manual_seed(0)
    module, x = kind(), torch.randn(6, 4)
    theirs, expected = copy.deepcopy(module), []
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = theirs(x)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    with Session(module, "sgd", lr=0.1, ram="64MB") as session:
        assert [session.step(x=x) for _ in range(3)] == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert session.state_dict().get("count", 3) == 3
        if kind is not _Twice:  # which takes gradients in evaluation too
            with torch.no_grad():
                assert session.evaluate(x=x) == pytest.approx(theirs.eval()(x).item(), rel=1e-5, abs=1e-5)
        session.load_into(module)
    assert isinstance(module.eval()(x).item(), float)  # nothing of a capture stays in it


class _Recomputes(torch.nn.Module):
    """Dropout that is computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: functional.dropout(y * self.weight, 0.5, self.training), x, use_reentrant=False).sum()


def test_recomputed_dropout_draws_the_same_numbers() -> None:
    """A loss that is linear in the weights is the sum of gradients times weights: the same mask there and back."""
    with Session(_Recomputes(), "sgd", lr=1.0, ram="64MB") as session:
        loss = session.step(x=torch.ones(64, 64))
        gradient = 1 - session.state_dict()["weight"]
    assert loss == gradient.sum().item()


class _Counts(_Twice):
    """A tensor that is no buffer and changes in place, and a list that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.number = torch.zeros(1)
        self.lengths: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.number += 1
        self.lengths.append(len(x))
        return (self.layer(x) * self.number).square().mean()


def test_a_module_keeps_what_its_forward_changes() -> None:
    """Tensors that it changes and attributes that it sets are those of eager PyTorch after each step, and so are the losses."""
    module, x = _Counts(), torch.ones(3, 4)
    twin = copy.deepcopy(module)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    with Session(module, "sgd", lr=0.1, ram="64MB") as session:
        for number in range(1, 4):
            optimizer.zero_grad()
            expected = twin(x)
            expected.backward()
            optimizer.step()
            assert session.step(x=x) == pytest.approx(expected.item(), rel=1e-6)
            assert module.number.item() == twin.number.item() == number
            assert module.lengths == twin.lengths == [3] * number
    assert module.training


def test_a_bad_batch_and_a_changed_optimizer_lose_nothing(tmp_path: Path) -> None:
    """Ids beyond the table, momentum that is turned off, a parameter frozen later: a sentence each, and the training goes on."""
    module, batches = make("gpt2", 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    with Session(module, optimizer, ram="64MB") as session:
        first = session.step(**batches[0])
        for name, bad, words in (
            ("input_ids", batches[0]["input_ids"] + 97, r"input_ids of the batch must be ids from 0 to 96, got \d+ to \d+"),
            ("attention_mask", np.ones(3), "attention_mask of the batch is a ndarray, and arguments must be tensors or plain values"),
            ("input_ids", batches[0]["input_ids"][:0], r"input_ids of the batch has no elements \(shape \(0, 48\)\)"),
        ):
            with pytest.raises(UsageError, match=words):
                session.step(**{**batches[0], name: bad})
        optimizer.param_groups[0]["momentum"] = 0.0
        with pytest.raises(UsageError, match=r"whether group 0 has momentum must stay True while the session is open, got False"):
            session.step(**batches[0])
        session.save(tmp_path / "saved")  # as the sentence says
        optimizer.param_groups[0]["momentum"] = 0.9
        started = [session.start(**batch) for batch in batches * 2]
        losses = [step.result().loss for step in started]
    assert losses[0] < first
    assert all(torch.isfinite(torch.tensor(losses)))


@pytest.mark.parametrize("method", ["save", "save_into", "save_weights", "resume", "load_weights", "reset_optimizer"])
def test_files_of_a_closed_session(tmp_path: Path, method: str) -> None:
    """Saving, loading and resetting are refused by the session itself, in terms of the program."""
    with Session(_Twice(), "sgd", ram="16MB") as session:
        session.save(tmp_path / "saved")
    arguments = {"reset_optimizer": (), "save": (tmp_path / "new",)}.get(method, (tmp_path / "saved",))
    with pytest.raises(UsageError, match="the session is closed"):
        getattr(session, method)(*arguments)


def test_threads_of_pytorch_come_back() -> None:
    """With the last session that is open, once, and where a session cannot be made."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first, second = (Session(_Twice(), "sgd", ram="16MB") for _ in range(2))
        assert torch.get_num_threads() == 1
        first.close()
        first.close()
        assert torch.get_num_threads() == 1
        second.close()
        assert torch.get_num_threads() == 2
        with pytest.raises(UsageError, match="seed must be at least 0"):
            Session(_Twice(), "sgd", ram="16MB", seed=-1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_sessions_of_several_threads() -> None:
    """Each captures its module while the others do, with the same losses; the process has its settings of PyTorch back afterwards."""
    module, x, before = torch.nn.LSTM(16, 16), torch.randn(8, 16), torch._C._get_mkldnn_enabled()
    together, found = threading.Barrier(4, timeout=60), list[list[float]]()

    def use(module: torch.nn.Module) -> None:
        with Session(module, "sgd", loss=lambda result, _: result[0].square().mean(), ram="16MB", workers=1) as session:
            together.wait()
            found.append([session.step(input=x) for _ in range(2)])

    programs = [threading.Thread(target=use, args=(copy.deepcopy(module),)) for _ in range(4)]
    for program in programs:
        program.start()
    for program in programs:
        program.join()
    assert found == [found[0]] * 4
    assert torch._C._get_mkldnn_enabled() == before


def test_a_capture_leaves_onednn_on_for_other_sessions() -> None:
    """Which computes their convolutions meanwhile; it is off only for recurrent layers, which have their results all the same."""
    seen: list[bool] = []

    class Seen(torch.nn.Conv1d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            seen.append(torch._C._get_mkldnn_enabled())
            return super().forward(input).square().mean()

    with Session(Seen(4, 4, 3), "sgd", ram="16MB") as session:
        session.step(input=torch.randn(8, 4, 16))
    assert seen == [torch._C._get_mkldnn_enabled()]
    module, x = torch.nn.LSTM(16, 16, bidirectional=True), torch.randn(8, 16)
    with torch.no_grad():
        expected, _ = module(x)
    with Session(module, "sgd", loss=lambda result, _: result[0].square().mean(), ram="16MB") as session:
        torch.testing.assert_close(session.predict(input=x)[0], expected, rtol=1e-5, atol=1e-6)


def test_threads_inside_operations(tmp_path: Path) -> None:
    """One worker for all cores; losses are eager's, and the same bits within a quarter of the memory; one number of threads at a time, also later."""
    module, batches = make("bert", 3)
    expected = eager(copy.deepcopy(module), batches, lr=1e-3)
    losses, _, stats = train(module, batches, ram="256MB", threads=2)
    assert max(abs(ours - other) for ours, other in zip(losses, expected, strict=True)) <= 1e-5
    quarter = str(max(stats["peak_bytes"]["ram"] // 4, 400_000))
    assert train(module, batches, ram=quarter, disk=str(tmp_path / "disk"), threads=2, workers=2)[0] == losses
    with Session(_Twice(), "sgd", ram="16MB", threads=2) as session:
        assert torch.get_num_threads() == 2
        assert len(session.runtime.worker_names) == max(1, len(os.sched_getaffinity(0)) // 2)
        with pytest.raises(UsageError, match="equal threads=, got 1 and 2"):
            Session(_Twice(), "sgd", ram="16MB")
        session.save(tmp_path / "saved")
    with Session(_Twice(), "sgd", ram="16MB") as session, pytest.raises(DataError, match=r"threads must be .*, 2, got 1"):
        session.resume(tmp_path / "saved")
    with pytest.raises(UsageError, match="threads must be from 1 to 1024, got 0"):
        Session(_Twice(), "sgd", ram="16MB", threads=0)


class _Returns(_Twice):
    """Changes its input in place, and returns it with its weight and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        seen = x.clone()
        x.mul_(2)
        return {"loss": self.layer(x).mean(), "x": x, "part": x[:, 1], "weight": self.layer.weight, "table": self.table, "seen": seen}


def test_what_a_module_changes_or_returns_of_its_surroundings() -> None:
    """Inputs that are changed in place are changed, as by eager PyTorch; results that are inputs, parameters or buffers are copies."""
    torch.manual_seed(0)
    module, x = _Returns(), torch.randn(3, 4)
    kept, weight = x.clone(), module.layer.weight.detach().clone()
    twin, same = copy.deepcopy(module), x.clone()
    with Session(module, "sgd", lr=0.0, ram="64MB") as session:
        for _ in range(2):
            assert session.step(x=x) == pytest.approx(twin(same)["loss"].item(), abs=1e-6)
            assert torch.equal(x, same)
        found = session.predict(x=x)
    assert torch.equal(x, 8 * kept)
    assert torch.equal(found["x"], 8 * kept)
    assert torch.equal(found["part"], 8 * kept[:, 1])
    assert torch.equal(found["seen"], 4 * kept)
    assert found["x"].untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    assert torch.equal(found["weight"], weight)
    assert torch.equal(found["table"], torch.arange(4))


def test_results_have_tensors_of_their_own() -> None:
    """The logits are eager's, and a cache of keys, an object of its own kind, is left out."""
    module, batches = make("llama", 1)
    batch = {"input_ids": batches[0]["input_ids"]}
    with torch.no_grad():
        expected = copy.deepcopy(module).eval()(**batch).logits
    with Session(module, ram="64MB", loss=lambda result, batch: result.logits.mean()) as session:
        found = session.predict(**batch)
    assert torch.allclose(found.logits, expected, atol=1e-5)
    assert found.past_key_values is None


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.what)
def test_what_cannot_be_trained_is_refused_in_a_sentence(refusal: Refusal, tmp_path: Path) -> None:
    """The rule, the value, and what to do; the line of the model where there is one."""
    sentence = refusal.sentence(tmp_path)
    assert re.search(refusal.words, sentence)
    assert "\n" not in sentence


def test_a_refused_optimizer_leaves_the_module_its_weights() -> None:
    """The session is not made, and nothing is lost."""
    module = torch.nn.Linear(4, 4)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(UsageError, match="got Adagrad"):
        Session(module, torch.optim.Adagrad(module.parameters()), ram="16MB")
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_budgets_that_are_too_small_are_refused_before_anything_runs(tmp_path: Path) -> None:
    """Bytes needed, bytes there, and what to change; the session goes on with a batch that fits."""
    module, batches = make("bert", 1)
    with Session(module, ram="1100KB", lr=1e-3) as session:
        with pytest.raises(DoesNotFit, match=r"needs [\d,]+ B .*raise ram=, use more and smaller minibatches, or add disk=DIR") as error:
            session.step(**batches[0])
        assert error.value.shortage.node == "ram"
        short = {name: value[:1, :8] for name, value in batches[0].items()}
        assert session.step(**short) > 0
    module, _ = make("bert", 0)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(DoesNotFit, match=r"data that has nowhere else to go .*raise ram=, or add disk=DIR") as error:
        Session(module, ram="600KB")
    assert error.value.shortage.cause == "taken"
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())  # those that were taken over are back


class _WithConstant(torch.nn.Module):
    """Has a tensor that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)
        self.constant = torch.ones(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x @ self.constant).square().mean()


@pytest.mark.parametrize("num_rounds", [3, pytest.param(5, marks=pytest.mark.long)])
def test_of_many_shapes_the_last_ones_are_kept(num_rounds: int) -> None:
    """Batches of any number of lengths train; the step of a length that comes back is recorded again, with the same bits and no more memory.

    More rounds are `long`.
    """
    rounds, resident = [], []
    with Session(_WithConstant(), ram="64MB", lr=0.0) as session:
        for _ in range(num_rounds):
            rounds.append([session.step(x=torch.ones(length, 64)) for length in range(1, 11)])
            resident.append(session.runtime.stats()["resident_bytes"]["ram"])
    assert all(each == rounds[0] for each in rounds)
    assert resident[-1] <= resident[1]


def test_a_step_is_emitted_once_and_a_refused_one_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tasks that are checked against the budget are those that run. Constants of a refused step get no memory."""
    emitted, submit = list[int](), Pass.submit

    def counted(self: Pass, *args: Any, minibatch: int = 0, **terms: Any) -> Any:
        emitted.append(minibatch)
        return submit(self, *args, minibatch=minibatch, **terms)

    monkeypatch.setattr(Pass, "submit", counted)
    with Session(_WithConstant(), ram="256KB", lr=1e-3, minibatches=2) as session:
        before = session.runtime.stats()["resident_bytes"]["ram"]
        with pytest.raises(DoesNotFit, match=r"raise ram=, use more and smaller minibatches, or add disk=DIR") as error:
            session.step(x=torch.ones(2048, 64))
        assert error.value.shortage.cause in ("step", "task")
        assert session.runtime.stats()["resident_bytes"]["ram"] == before
        emitted.clear()
        first = session.step(x=torch.ones(2, 64))
        assert emitted == [0, 1]
        assert session.step(x=torch.ones(2, 64)) < first
        assert emitted == [0, 1]


def test_operations_made_again_change_nothing_and_are_of_training_alone() -> None:
    """Losses and weights of a session that makes them again are those of one that keeps them; evaluation has nothing to make again."""
    inputs = torch.randn(512, 64, generator=torch.Generator().manual_seed(1))
    found = []
    for recompute in ("none", "gelu"):
        torch.manual_seed(0)
        module = torch.nn.Sequential(*[layer for _ in range(8) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())])
        with Session(module, "sgd", lr=0.1, loss=lambda out, batch: (out**2).mean(), workers=1, ram="64MB", recompute=recompute) as session:
            found.append([session.step(input=inputs), session.step(input=inputs), session.predict(input=inputs).numpy().tobytes()])
    assert found[0] == found[1]
    with (
        Session(torch.nn.Linear(4, 4), "sgd", lr=0.1, loss=lambda out, batch: out.sum(), workers=1, ram="64MB", recompute="glue") as session,
        pytest.raises(UsageError, match=r"^recompute='glue': this step has no results of 'glue' to recompute"),
    ):
        session.step(input=torch.ones(2, 4))


def test_every_keyword_is_the_field_of_one_group_and_others_are_options() -> None:
    """Users type single keywords; help shows all of them with their defaults."""
    learning, resources, execution, options = grouped({"lr": 1.0, "ram": "2MB", "verify": 1, "weight_decay": 0.5})
    assert (learning.lr, resources.ram, execution.verify, options) == (1.0, "2MB", 1, {"weight_decay": 0.5})
    names = [f.name for group in (learning, resources, execution) for f in fields(group)]
    assert len(names) == len(set(names))
    shown = inspect.signature(Session).parameters
    assert list(shown) == ["module", "optimizer", *names, "options"]
    assert shown["threads"].default == resources.threads == 1
