"""The tape: what it computes, what it keeps, what it refuses."""

import gc
import weakref

import numpy as np
import pytest

from nntask import checkpoint, no_grad
from nntask.errors import UsageError
from nntask.nn import functional
from nntask.nn.autograd import ParameterEdge, Tensor
from nntask.nn.initializers import constant, normal
from nntask.nn.layers import LayerNorm, Linear
from nntask.nn.module import Module, Parameter
from scheduler import InlineRuntime, Runtime
from tiles import TileTensor

B, T, C = 2, 6, 8


class Small(Module):
    """A residual block with a fan-out of its input three ways."""

    def __init__(self, runtime, dtype=np.float64):
        self.norm = LayerNorm(C, 3, 1e-5)
        self.wide = Linear(C, 2 * C, (3, 5), std=0.5, activation="gelu")
        self.back = Linear(2 * C, C, (5, 3), std=0.5)
        self.allocate(runtime, dtype, 1)

    def __call__(self, x):
        """(B, T, C) -> (B, T, C)."""
        return x + self.back(self.wide(self.norm(x))) + x


def given(runtime, values, tile=(1, 4, 3)):
    """Values as a tile tensor with ragged tiles."""
    data = TileTensor(runtime, values.shape, tile, values.dtype, kind="input", name="x")
    data.write(values)
    return data


def values(seed):
    """(B, T, C) normal numbers."""
    return np.random.default_rng(seed).normal(size=(B, T, C))


def run(runtime, block, x, dy):
    """Output, and gradients of the input and of every parameter."""
    parameter = Parameter(x.shape, (1, 4, 3), constant(0.0))
    parameter.allocate(runtime, "x", x.dtype, 0)
    parameter.data.write(x)
    y = block(parameter)
    y.backward(given(runtime, dy))
    return y.read(), parameter.gradient.read()


def test_gradients_are_those_of_finite_differences():
    """Fan-out, norms, activations and residuals together, in fp64."""
    runtime = InlineRuntime()
    module, x, dy, direction = Small(runtime), values(0), values(1), values(2)
    _, dx = run(runtime, module, x, dy)
    step = 1e-6
    with no_grad():
        plus, minus = (module(Tensor(given(runtime, x + s * step * direction))).read() for s in (1, -1))
    assert np.vdot(dx, direction) == pytest.approx(np.vdot(dy, plus - minus) / (2 * step), rel=1e-7)
    weight = module.wide.weight
    change, before = np.random.default_rng(3).normal(size=weight.shape), weight.read()
    found = []
    for sign in (1, -1):
        weight.data.write(before + sign * step * change)
        with no_grad():
            found.append(module(Tensor(given(runtime, x))).read())
    assert np.vdot(weight.gradient.read(), change) == pytest.approx(np.vdot(dy, found[0] - found[1]) / (2 * step), rel=1e-7)


def test_gradients_of_parameters_add_up_over_backward_passes():
    """Until they are forgotten; forgetting clears nothing and the next pass begins anew."""
    runtime = InlineRuntime(lanes=3)
    module = Small(runtime)
    x, dy = values(0), values(1)
    run(runtime, module, x, dy)
    once = {name: p.gradient.read() for name, p in module.named_parameters().items()}
    run(runtime, module, x, dy)
    for name, parameter in module.named_parameters().items():
        assert np.allclose(parameter.gradient.read(), 2 * once[name], rtol=1e-12), name
    module.zero_grad()
    assert all(p.gradient is None for p in module.parameters())
    run(runtime, module, x, dy)
    assert all(np.array_equal(p.gradient.read(), once[name]) for name, p in module.named_parameters().items())


def test_checkpoint_gives_the_same_bits():
    """Output and all gradients, when the block's input fans out past the block as well."""
    found = []
    for recompute in (False, True):
        runtime = InlineRuntime()
        module = Small(runtime)

        def block(x, module=module, recompute=recompute):
            return x + (checkpoint(module, x) if recompute else module(x))

        result = run(runtime, block, values(0), values(1))
        found.append([*result, *(p.gradient.read() for p in module.parameters())])
    assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))


def test_checkpoint_keeps_only_the_input():
    """Inside, nothing survives the forward pass; after the backward pass nothing at all does."""
    gc.disable()
    try:
        runtime = InlineRuntime()
        module = Small(runtime)
        inside = []

        def block(x):
            y = module.norm(x)
            inside.append(weakref.ref(y.data))
            return module.back(module.wide(y))

        x = module.norm(Tensor(given(runtime, values(0))))
        y = checkpoint(block, x)
        alive = weakref.ref(x.data)
        del x
        assert inside[0]() is None
        assert alive() is not None
        y.backward(given(runtime, values(1)))
        assert len(inside) == 2
        assert inside[1]() is None
        assert alive() is None
    finally:
        gc.enable()


def test_the_tape_frees_what_it_has_used_without_the_garbage_collector():
    """Activations die with the backward pass, or with the last reference to a result nobody differentiates."""
    gc.disable()
    try:
        runtime = InlineRuntime()
        module = Small(runtime)
        for differentiate in (True, False):
            hidden = module.wide(module.norm(Tensor(given(runtime, values(0)))))
            kept = weakref.ref(hidden.data)
            y = module.back(hidden)
            del hidden
            assert kept() is not None
            if differentiate:
                y.backward(given(runtime, values(1)))
            else:
                del y
            assert kept() is None
    finally:
        gc.enable()


def test_what_no_gradient_needs_is_not_kept():
    """The sum's inputs are free at once, and under no_grad() everything is."""
    gc.disable()
    try:
        runtime = InlineRuntime()
        module = Small(runtime)
        x = module.norm(Tensor(given(runtime, values(0))))
        branch = module.back(module.wide(x))
        kept = weakref.ref(branch.data)
        y = x + branch
        del branch
        assert kept() is None
        with no_grad():
            free = module.wide(x)
            assert free.edge is None
        assert y.edge is not None
    finally:
        gc.enable()


def test_no_grad_ends_with_its_block():
    """Also when the block raises, and inside each other."""
    runtime = InlineRuntime()
    module = Small(runtime)
    x = Tensor(given(runtime, values(0)))

    def fail():
        with no_grad():
            with no_grad():
                pass
            assert module.norm(x).edge is None
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert module.norm(x).edge is not None


def test_misuse_is_refused_in_one_sentence():
    """A second pass over a used tape, no tape, no loss, a gradient of another shape, weights that are not parameters."""
    runtime = InlineRuntime()
    module = Small(runtime)
    x = Tensor(given(runtime, values(0)))
    y = module.norm(x)
    with pytest.raises(UsageError, match="begins at a loss"):
        y.backward()
    with pytest.raises(UsageError, match=r"got \(1, 6, 8\)"):
        y.backward(given(runtime, values(1)[:1]))
    y.backward(given(runtime, values(1)))
    with pytest.raises(UsageError, match="used up by an earlier backward pass"):
        y.backward(given(runtime, values(1)))
    with pytest.raises(UsageError, match="no_grad"):
        x.backward()
    with pytest.raises(UsageError, match="must be parameters"):
        functional.add_positions(x, Tensor(given(runtime, values(2)[0], tile=(4, 3)), module.norm(x).edge)).backward(given(runtime, values(1)))


def test_narrow_parameters_have_wide_gradients():
    """bf16 weights gather their gradient in fp32."""
    import ml_dtypes

    runtime = InlineRuntime()
    module = Small(runtime, ml_dtypes.bfloat16)
    x = values(0).astype(ml_dtypes.bfloat16)
    run(runtime, module, x, values(1).astype(ml_dtypes.bfloat16))
    assert {p.gradient.dtype for p in module.parameters()} == {np.dtype(np.float32)}
    assert {p.dtype for p in module.parameters()} == {np.dtype(ml_dtypes.bfloat16)}


def test_shared_parameters_are_listed_once():
    """Under their first name; lists of modules count their elements."""

    class Two(Module):
        def __init__(self):
            self.layers = [LayerNorm(C, -1, 1e-5), LayerNorm(C, -1, 1e-5)]
            self.same = self.layers[0].weight
            self.alone = Parameter((2, 3), (-1, -1), normal(1.0))

    module = Two()
    assert list(module.named_parameters()) == ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias", "alone"]
    assert module.num_parameters == 4 * C + 6


def test_a_recorded_backward_pass_gives_the_same_bits():
    """Recording reads no value; two replays agree with the eager pass."""
    with Runtime(cpu_workers=2, ram=1 << 26) as runtime:
        module = Small(runtime)
        x, dy = given(runtime, values(0)), given(runtime, values(1))
        expected = {}
        module(Tensor(x)).backward(dy)
        for name, parameter in module.named_parameters().items():
            expected[name] = parameter.gradient.read()
        module.zero_grad()
        with runtime.record() as step:
            module(Tensor(x)).backward(dy)
        for ticket in (step.replay(), step.replay()):
            for name, parameter in module.named_parameters().items():
                assert np.array_equal(ticket.read(parameter.gradient), expected[name]), name


def test_an_edge_hands_over_what_has_arrived():
    """take() empties it, for operations that add it to their own contribution."""
    runtime = InlineRuntime()
    parameter = Parameter((2,), (2,), constant(0.0))
    parameter.allocate(runtime, "p", np.float32, 0)
    assert isinstance(parameter.edge, ParameterEdge)
    gradient = parameter.edge.accumulator()
    assert parameter.edge.take() is gradient
    assert parameter.edge.take() is None
