"""Optimizers against torch's, and the rules of gradients around them."""

import ml_dtypes
import numpy as np
import pytest
import torch

from nntask import SGD, Adam, AdamW, Group, decay_groups
from nntask.errors import UsageError
from nntask.nn.initializers import normal
from nntask.nn.layers import Linear
from nntask.nn.module import Module
from nntask.optim.optimizers import norm_of
from scheduler import InlineRuntime, Runtime

SHAPE = (7, 5)
TILE = (3, 2)


class Layer(Module):
    """One matrix and one vector."""

    def __init__(self, runtime, dtype=np.float32):
        self.inner = Linear(*SHAPE, TILE, std=0.5)
        self.inner.bias.init = normal(0.5)
        self.allocate(runtime, dtype, 3)


def gradients(step):
    """Of the matrix and the vector in one step."""
    rng = np.random.default_rng(step)
    return [rng.normal(size=shape).astype(np.float32) for shape in (SHAPE, SHAPE[1:])]


def contribute(module, step):
    """Give each parameter its gradient of the step."""
    for parameter, gradient in zip(module.parameters(), gradients(step), strict=True):
        given = parameter.data.like(dtype=np.float32)
        given.write(gradient)
        parameter.edge.add(given)


@pytest.mark.parametrize("max_norm", [0.0, 2.0])
@pytest.mark.parametrize(
    ("ours", "theirs", "settings"),
    [
        (AdamW, torch.optim.AdamW, {"betas": (0.8, 0.9), "eps": 1e-6}),
        (Adam, torch.optim.Adam, {"betas": (0.9, 0.99), "eps": 1e-8}),
        (SGD, torch.optim.SGD, {}),
        (SGD, torch.optim.SGD, {"momentum": 0.7}),
    ],
)
def test_updates_are_those_of_torch(ours, theirs, settings, max_norm):
    """Eight steps with a decayed matrix, a free vector and a changing learning rate; the reported norm is that before clipping."""
    module = Layer(InlineRuntime())
    copies = [torch.nn.Parameter(torch.from_numpy(p.read())) for p in module.parameters()]
    oracle = theirs([{"params": copies[:1], "weight_decay": 0.1}, {"params": copies[1:], "weight_decay": 0.0}], lr=1.0, **settings)
    optimizer = ours(decay_groups(module, 0.1), lr=1.0, max_norm=max_norm, **settings)
    for step in range(1, 9):
        for copy, gradient in zip(copies, gradients(step), strict=True):
            copy.grad = torch.from_numpy(gradient)
        norm = torch.nn.utils.clip_grad_norm_(copies, max_norm or 1e9)
        for group in oracle.param_groups:
            group["lr"] = 0.1 / step
        oracle.step()
        contribute(module, step)
        optimizer.prepare(step, 0.1 / step)
        optimizer.step()
        assert norm_of(optimizer.grad_norm.read()) == pytest.approx(norm.item(), rel=1e-5)
        for parameter, copy in zip(module.parameters(), copies, strict=True):
            assert np.abs(parameter.read() - copy.detach().numpy()).max() < 2e-6


@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_narrow_parameters_follow_fp32_masters(kind):
    """Small steps that bf16 would swallow add up in the master; the parameter is its rounding."""
    module = Layer(InlineRuntime(), ml_dtypes.bfloat16)
    optimizer = kind(module.parameters(), lr=1e-4)
    before = module.inner.weight.read().astype(np.float32)
    for step in range(1, 21):
        contribute(module, 1)
        optimizer.prepare(step)
        optimizer.step()
    master = optimizer.tensors()["master.inner.weight"].read()
    assert master.dtype == np.float32
    change = master - before
    expected = -20e-4 * (np.sign(gradients(1)[0]) if kind is AdamW else gradients(1)[0])
    assert np.abs(change - expected).max() < 1e-5
    assert np.array_equal(module.inner.weight.read(), master.astype(ml_dtypes.bfloat16))


def test_step_uses_gradients_up():
    """They are gone after it, and a step without any is refused."""
    module = Layer(InlineRuntime())
    optimizer = AdamW(module.parameters())
    with pytest.raises(UsageError, match=r"call backward\(\)"):
        optimizer.step()
    contribute(module, 1)
    optimizer.step()
    assert all(p.gradient is None for p in module.parameters())
    contribute(module, 2)
    optimizer.zero_grad()
    assert all(p.gradient is None for p in module.parameters())


def test_tiles_without_a_contribution_have_zero_gradient():
    """They decay and keep their moments at zero, as torch's rows do."""
    module = Layer(InlineRuntime())
    optimizer = AdamW(decay_groups(module, 0.5), lr=0.1)
    before = module.inner.weight.read()
    for parameter in module.parameters():
        parameter.edge.accumulator()
    optimizer.step()
    assert np.allclose(module.inner.weight.read(), before * (1 - 0.1 * 0.5), rtol=1e-6)
    assert norm_of(optimizer.grad_norm.read()) == 0


def test_groups_decay_matrices():
    """Vectors have no weight decay."""
    module = Layer(InlineRuntime())
    assert [(len(g.parameters), g.weight_decay) for g in decay_groups(module, 0.1)] == [(1, 0.1), (1, 0.0)]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: AdamW([]), "needs parameters"),
        (lambda p: AdamW([Group(p, 0.0), Group(p[:1], 0.1)]), "inner.weight"),
        (lambda p: AdamW(p, lr=-1.0), "lr must be at least 0"),
        (lambda p: AdamW(p, betas=(0.9, 1.0)), "betas"),
        (lambda p: SGD(p, momentum=1.0), "momentum"),
        (lambda p: SGD([Group(p, float("nan"))]), "weight_decay"),
        (lambda p: SGD(p).prepare(0), "count from 1"),
    ],
)
def test_broken_rules_are_named(make, words):
    """One plain sentence each."""
    with pytest.raises(UsageError, match=words):
        make(Layer(InlineRuntime()).parameters())


def test_a_recorded_step_takes_its_numbers_from_prepare():
    """Two replays with different rates and step numbers give what two eager steps give."""
    found = []
    for recorded in (False, True):
        with Runtime(cpu_workers=2, ram=1 << 26) as runtime:
            module = Layer(runtime)
            optimizer = AdamW(module.parameters(), max_norm=1.0)
            given = []
            for parameter, gradient in zip(module.parameters(), gradients(1), strict=True):
                given.append(parameter.data.like(kind="input"))
                given[-1].write(gradient)

            def emit(module=module, optimizer=optimizer, given=given):
                for parameter, gradient in zip(module.parameters(), given, strict=True):
                    parameter.edge.add(gradient)
                optimizer.step()

            if recorded:
                with runtime.record() as step:
                    emit()
            for number in (1, 2):
                optimizer.prepare(number, 0.1 / number)
                if recorded:
                    step.replay().wait()
                else:
                    emit()
            found.append([p.read() for p in module.parameters()])
    assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))
