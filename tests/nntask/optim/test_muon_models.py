"""Muon and AdamW with 8-bit moments in models: which parameters, which state, the same bits wherever tasks run and data lie.

Reports of what goes wrong elsewhere: embeddings and heads orthogonalised (AReaL 1270), matrices that count as vectors once they are sharded
(verl-SpeCo 91), precision that a shard's size decides (torchao 4912, bitsandbytes 2080), gradients of an inner AdamW that are never cleared
(KempnerForge 183).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from support.muon_oracle import in_fp32
from support.training import COARSE, GPT, Job, build

from nntask.errors import DataError, UsageError
from nntask.io.safetensors_file import load_tensors, save_tensors
from nntask.models.gpt2 import GPT2
from nntask.nn.layers import Embedding, Linear
from nntask.nn.module import Module
from nntask.optim import adamw8bit
from nntask.optim.adamw8bit import AdamW8bit
from nntask.optim.muon import RATES_OF_ADAMW, Muon, hidden_matrices, muon_groups
from nntask.optim.optimizers import Group, Optimizer, decay_groups
from nntask.tiling.model_tiling import ModelTiling
from scheduler import InlineRuntime, Runtime
from scheduler.core.step_plan import StepPlan

OTHERS = ("muon", "adamw8bit")


class Layers(Module):
    """An embedding, two layers and their biases."""

    def __init__(self, runtime: InlineRuntime, tile: int) -> None:
        self.table = Embedding(11, 20, (tile, tile), std=0.3)
        self.wide = Linear(20, 33, (tile, tile), std=0.3)
        self.tall = Linear(33, 20, (tile, tile), std=0.3, has_rows_in=False)
        self.allocate(runtime, np.float32, 3)


def gradients() -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Numbers of ten steps, and random gradients of `Layers`."""
    shapes, rng = {name: p.shape for name, p in Layers(InlineRuntime(), 64).named_parameters().items()}, np.random.default_rng(1)
    for step in range(1, 11):
        yield step, {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@cache
def weights_of_torch() -> dict[str, np.ndarray]:
    """Weights after ten steps of torch: Muon for matrices of layers, AdamW for the embedding and the biases, clipped as a whole."""
    copies = {name: torch.nn.Parameter(torch.from_numpy(p.read())) for name, p in Layers(InlineRuntime(), 64).named_parameters().items()}
    inner = [copies["wide.weight"], copies["tall.weight"]]
    oracles = [
        torch.optim.Muon(inner, lr=1.0, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([copies["table.weight"]], lr=1.0, weight_decay=0.1),
        torch.optim.AdamW([copies["wide.bias"], copies["tall.bias"]], lr=1.0, weight_decay=0.0),
    ]
    for step, given in gradients():
        for name, gradient in given.items():
            copies[name].grad = torch.from_numpy(gradient)
        torch.nn.utils.clip_grad_norm_(copies.values(), 2.0)
        with in_fp32():
            for oracle in oracles:
                oracle.param_groups[0]["lr"] = 0.1 / step
                oracle.step()
    return {name: copy.detach().numpy() for name, copy in copies.items()}


def ten_steps(runtime: Runtime | InlineRuntime, tile: int) -> tuple[dict[str, np.ndarray], StepPlan | None]:
    """Weights after ten steps of ours, and the plan of a step that was recorded."""
    model = Layers(runtime, tile)
    parameters, recorded = model.named_parameters(), None
    optimizer = Muon(muon_groups(model, 0.1), pieces=hidden_matrices(model), max_norm=2.0)
    inputs = {name: p.data.like(kind="input", name=f"gradient of {name}") for name, p in parameters.items()}

    def emit() -> None:
        for name, parameter in parameters.items():
            parameter.edge.add(inputs[name])
        optimizer.step()
        assert all(parameter.gradient is None for parameter in model.parameters())

    for step, given in gradients():
        for name, gradient in given.items():
            inputs[name].write(gradient)
        optimizer.prepare(step, 0.1 / step)
        if isinstance(runtime, InlineRuntime):
            emit()
            continue
        if recorded is None:
            with runtime.record() as recorded:
                emit()
        recorded.replay()
        runtime.wait()
    return {name: p.read() for name, p in parameters.items()}, None if recorded is None else recorded.plan


@pytest.mark.parametrize("tile", [64, 16, 9, 7, 20])
def test_a_model_takes_the_steps_of_torch(tile: int, tmp_path: Path) -> None:
    """Five tilings, in memory and in a quarter of it above a disk, with the same bits."""
    weights, _ = ten_steps(InlineRuntime(), tile)
    for name, want in weights_of_torch().items():
        assert np.abs(weights[name] - want).max() < 1e-5, name
    with Runtime(1, ram=1 << 24) as runtime:
        roomy, plan_of_step = ten_steps(runtime, tile)
    assert plan_of_step is not None
    memory = max(plan_of_step.needed_bytes() // 4, plan_of_step.largest_task())
    with Runtime(2, ram=memory, disk=tmp_path) as runtime:
        short, _ = ten_steps(runtime, tile)
        assert runtime.stats()["moved_bytes"]["ram->disk"] > 0
    for name, want in weights.items():
        np.testing.assert_array_equal(roomy[name], want)
        np.testing.assert_array_equal(short[name], want)


@pytest.mark.parametrize("family", ["gpt2", "llama", "llama adapters"])
def test_only_matrices_of_hidden_layers_are_orthogonalised(family: str) -> None:
    """No embedding, position or head, whatever the tiles; each parameter has the state of its rule and no other; adapters are matrices."""
    names = []
    for tiling in (ModelTiling(minibatch_tile=1), None):
        model = build(InlineRuntime(), family, tiling=tiling)
        optimizer = Muon(muon_groups(model, 0.1), pieces=hidden_matrices(model))
        names.append(optimizer.whole)
        assert set(names[-1]) == set(optimizer.state["momentum"])
        trained = model.trained_tensors()
        assert set(optimizer.state["m"]) == set(optimizer.state["v"]) == set(trained) - set(names[-1])
        assert all(len(trained[name].shape) == 2 for name in names[-1])
    assert names[0] == names[1]
    if family == "gpt2":
        layers = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
        assert set(names[0].values()) == {f"h.{number}.{layer}.weight" for number in range(2) for layer in layers}
        assert len(names[0]) == 2 * 6


def test_the_whole_parameter_decides_on_8_bits() -> None:
    """Not its tiles: 4,096 elements in 64 tiles have 8-bit moments, 4,095 in one have not; masters of bf16 stay fp32."""
    for tile in (64, 8):
        model = GPT2(GPT.with_dropout(0.0), ModelTiling(minibatch_tile=1, embd_tile=8, vocab_tile=tile), InlineRuntime(), seed=3)
        optimizer = AdamW8bit(decay_groups(model, 0.1))
        for name, tensor in model.trained_tensors().items():
            is_large = prod(tensor.shape) >= adamw8bit.LEAST
            kinds = ("m_codes", "m_scales", "v_codes", "v_scales") if is_large else ("m", "v")
            assert {kind for kind, tensors in optimizer.state.items() if name in tensors} == set(kinds)
            assert optimizer.state[kinds[0]][name].dtype == (np.uint8 if is_large else np.float32)


@pytest.mark.usefixtures("small_moments")
def test_codes_of_another_format_are_refused(tmp_path: Path) -> None:
    """Codes of decimal tables were named after the moment alone."""
    tensors = Job(InlineRuntime(), optimizer="adamw8bit").optimizer.tensors()
    save_tensors(tmp_path / "old", {name.replace("_codes.", "."): tensor for name, tensor in tensors.items()})
    save_tensors(tmp_path / "new", tensors)
    load_tensors(tmp_path / "new", tensors)
    with pytest.raises(DataError, match="m_codes"):
        load_tensors(tmp_path / "old", tensors)


@cache
def truth(optimizer: str) -> list[bytes]:
    """What running every task at once, in order, gives."""
    return Job(InlineRuntime(), optimizer=optimizer).run(3)


@cache
def plan(optimizer: str) -> StepPlan:
    """The step in submission order."""
    with Runtime(1, ram=1 << 28) as runtime:
        step = Job(runtime, order="submission", optimizer=optimizer).step
        assert step is not None
        assert step.plan is not None
        return step.plan


@pytest.fixture
def small_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most moments of small models have 8 bits."""
    monkeypatch.setattr(adamw8bit, "LEAST", 256)


def have_codes(optimizer: Optimizer) -> bool:
    """Whether an AdamW8bit has moments in 8 bits."""
    return bool(optimizer.state["m_codes"])


@pytest.mark.usefixtures("small_moments")
@pytest.mark.parametrize("optimizer", OTHERS)
@pytest.mark.parametrize(
    ("workers", "sims", "sched", "share"),
    [
        *((3, 0, sched, 0.0) for sched in ("eager", "lws", "dmdas")),
        *((2, 0, sched, 0.25) for sched in ("prio", "dm")),
        *((0, 2, sched, 0.0) for sched in ("dmda", "reuse")),
        *((0, 2, sched, 0.25) for sched in ("prio", "dmdas")),
    ],
    ids=str,
)
def test_schedules_change_no_bits(workers: int, sims: int, sched: str, share: float, optimizer: str, tmp_path: Path) -> None:
    """All policies on workers, in a quarter of the memory above a disk, on two devices with and without room: losses and norms of clipped steps."""
    memory = max(int(plan(optimizer).needed_bytes() * share), plan(optimizer).largest_task()) if share else 1 << 28
    options = {"sim_gpus": sims, "gpu_memory": memory} if sims else {}
    with Runtime(workers, ram=memory if share else 1 << 28, disk=tmp_path if share else None, sched=sched, **options) as runtime:
        job = Job(runtime, optimizer=optimizer)
        assert optimizer != "adamw8bit" or have_codes(job.optimizer)
        assert job.run(3) == truth(optimizer)


@pytest.mark.usefixtures("small_moments")
@pytest.mark.parametrize("optimizer", OTHERS)
def test_updates_by_cpu_workers_change_no_bits(optimizer: str) -> None:
    """All tasks of the update with state are for CPU workers."""
    with Runtime(1, ram=1 << 28) as runtime:
        want = Job(runtime, minibatches=4, tiling=COARSE, optimizer=optimizer).run(2)
    with Runtime(2, ram=1 << 28, sim_gpus=1, gpu_memory=1 << 28, aside=True) as runtime:
        assert Job(runtime, minibatches=4, tiling=COARSE, on_cpu=True, optimizer=optimizer).run(2) == want


@pytest.mark.usefixtures("small_moments")
def test_8_bit_losses_stay_near_those_of_fp32() -> None:
    """The gradient's sum of squares, more sensitive than the loss, is within 1 % in ten steps of a small model with most moments in blocks."""
    losses = {}
    for optimizer in ("adamw", "adamw8bit"):
        job = Job(InlineRuntime(), optimizer=optimizer)
        assert optimizer == "adamw" or have_codes(job.optimizer)
        losses[optimizer] = [np.frombuffer(step, np.float64)[-1] for step in job.run(10)]  # the sum of squares of the gradient, which is stricter
    np.testing.assert_allclose(losses["adamw8bit"], losses["adamw"], rtol=0.01)


def test_a_matrix_with_some_gradients_is_refused() -> None:
    """A piece that is frozen after the optimizer was created would stop its whole matrix; without any piece, or without it, a step is taken."""
    job = Job(InlineRuntime(), optimizer="muon")
    parameters = job.model.named_parameters()
    parameters["h.0.attn.k.weight"].freeze()
    with pytest.raises(UsageError, match=r"Muon updates whole matrices, got gradients of 2 of the 3 pieces of h\.0\.attn\.c_attn\.weight; freeze"):
        job.run(1)
    for name in "qv":
        parameters[f"h.0.attn.{name}.weight"].freeze()
    assert job.run(1)
    model = build(InlineRuntime())
    model.named_parameters()["h.0.attn.k.weight"].freeze()
    assert list(Muon(muon_groups(model, 0.1), pieces=hidden_matrices(model)).whole.values()).count("h.0.attn.c_attn.weight") == 2


def _vectors(model: Module) -> list[Group]:
    return [Group([p for p in model.parameters() if len(p.shape) == 1], 0.0, RATES_OF_ADAMW)]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda model: Muon(decay_groups(model, 0.1)), "Muon needs a matrix of a hidden layer that is learnt, got none"),
        (lambda model: Muon(_vectors(model)), "Muon updates matrices, got wide.bias of shape"),
        (lambda model: Muon(muon_groups(model, 0.1), momentum=1.0), "momentum must be at least 0 and below 1, got 1"),
        (lambda model: Muon(muon_groups(model, 0.1), betas=(1.0, 0.9)), "betas must be"),
        (lambda model: AdamW8bit(model.parameters(), eps=-1.0), "betas must be"),
    ],
)
def test_broken_rules_are_named(make, words):
    """One plain sentence each."""
    with pytest.raises(UsageError, match=words):
        make(Layers(InlineRuntime(), 16))
