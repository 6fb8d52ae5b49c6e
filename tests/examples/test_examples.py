"""The examples run, and what they show is so."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nntask import GPT2, GPT2Config, ModelTiling
from scheduler import InlineRuntime
from tiles import TileTensor, register, register_activation
from tiles.kernels.reference.elementwise import activate, slope
from tiles.ops import elementwise

pytestmark = pytest.mark.usefixtures("own_kernels")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(name: str) -> ModuleType:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_custom_kernel() -> None:
    """Fifteen lines at most replace GELU, and losses agree."""
    example = load("custom_kernel")
    lines = inspect.getsource(example.gelu) + inspect.getsource(example.use_it)
    assert len([line for line in lines.splitlines() if line.strip()]) <= 15
    assert example.main() < 1e-5


@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16])
def test_the_custom_gelu_is_gelu(dtype: Any) -> None:
    """Values and gradients of the operations that models are made of, in every element type, far out as well."""
    calls: list[int] = []
    example = load("custom_kernel")

    def counted(x: Any, y: Any) -> None:
        calls.append(1)
        example.gelu(x, y)

    register_activation("gelu_new")(counted)
    runtime = InlineRuntime()
    values = np.concatenate([np.linspace(-40, 40, 33), np.linspace(-3, 3, 32)]).reshape(5, 13).astype(dtype)
    x, dy = (TileTensor(runtime, (5, 13), (2, 4), dtype) for _ in range(2))
    x.write(values)
    dy.write(np.ones((5, 13)))
    bound = 0.02 if dtype == ml_dtypes.bfloat16 else 1e-5
    wide = values.astype(np.float64)
    assert np.allclose(elementwise.activation(x, "gelu_new").read().astype(np.float64), activate(wide, "gelu_new"), rtol=bound, atol=bound)
    assert np.allclose(elementwise.activation_backward(x, dy, "gelu_new").read().astype(np.float64), slope(wide, "gelu_new"), rtol=bound, atol=bound)
    assert len(calls) == len(x.handles)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_models_use_a_registered_activation(dtype: Any) -> None:
    """The fused layers of GPT-2 call it once per tile, at 16 bits as well, and its own gradient where it brings one."""
    calls: list[str] = []

    def twice(x: Any, y: Any) -> None:
        calls.append("forward")
        np.multiply(x, 2, out=y)

    def twice_backward(x: Any, dy: Any, dx: Any) -> None:
        calls.append("backward")
        np.multiply(dy, 2, out=dx)

    register_activation("gelu_new", backward=twice_backward)(twice)
    config = GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2).with_dropout(0)
    model = GPT2(config, ModelTiling(inner_tile=16), InlineRuntime(), dtype=dtype)
    tokens, targets = model.input_tensors(2)
    tokens.write(np.zeros((2, 8)))
    targets.write(np.ones((2, 8)))
    model(tokens, targets).backward()
    assert calls == ["forward"] * 2 + ["backward"] * 2


def test_a_new_activation_needs_its_gradient() -> None:
    """The rule, the name, what to do; with a gradient the name is one like any other, and an unknown one lists it."""
    with pytest.raises(
        ValueError, match=r"a new activation needs its gradient, and 'cube' is none of gelu_new, gelu, relu, silu, tanh; pass backward="
    ):
        register_activation("cube")
    register_activation("cube", backward=lambda x, dy, dx: np.multiply(dy, 3 * x * x, out=dx))(lambda x, y: np.power(x, 3, out=y))
    runtime = InlineRuntime()
    x, dy = (TileTensor(runtime, (3,), (2,), np.float64) for _ in range(2))
    x.write([1, 2, 3])
    dy.write([1, 2, 3])
    assert elementwise.activation(x, "cube").read().tolist() == [1, 8, 27]
    assert elementwise.activation_backward(x, dy, "cube").read().tolist() == [3, 24, 81]
    with pytest.raises(ValueError, match="unknown activation 'cub'; there are gelu_new, gelu, relu, silu, tanh, cube"):
        elementwise.activation(x, "cub")


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_the_latest_registration_wins(dtype: Any) -> None:
    """Over kernels of ours for bf16 tiles and over codelets that were made before, too."""
    runtime = InlineRuntime()
    x, y = (TileTensor(runtime, (4,), (2,), dtype) for _ in range(2))
    x.write(np.ones(4))
    y.write(np.ones(4))
    assert elementwise.add(x, y).read().astype(int).tolist() == [2] * 4
    register("add", "cpu")(lambda a, b, out: np.add(np.add(a, b), 1, out=out))
    assert elementwise.add(x, y).read().astype(int).tolist() == [3] * 4


def test_custom_model() -> None:
    """It learns, and its losses are the same bits for any number of workers."""
    example = load("custom_model")
    losses = example.train(12)
    assert losses[-1] < losses[0] - 1
    assert example.train(12, workers=1) == losses


@pytest.mark.long
def test_torch_vit(tmp_path: Path) -> None:
    """It learns its stripes, with the same bits in a third of the memory above a disk."""
    pytest.importorskip("transformers")
    example = load("torch_vit")
    images, labels = example.stripes(384)
    losses, right = example.train(40, images, labels)
    assert losses[-1] < losses[0] - 0.5
    assert right > 0.3  # by chance 0.1
    assert example.train(5, images, labels, ram="4MB", disk=str(tmp_path))[0] == losses[:5]


def test_torch_vit_has_digits() -> None:
    """As large as the model's images, every class among them."""
    pytest.importorskip("transformers")
    pytest.importorskip("sklearn")
    images, labels = load("torch_vit").digits()
    assert images.shape == (1797, 1, 32, 32)
    assert labels.unique().tolist() == list(range(10))


def test_torch_bert_masks() -> None:
    """About 15 % of the tokens are guessed, eight tenths of them masked; the others stay and have no label."""
    pytest.importorskip("transformers")
    example = load("torch_bert")
    windows = np.arange(20_000).reshape(100, 200) % 256
    ids, labels = (each.numpy() for each in example.masked(windows, np.random.default_rng(0)))
    guessed = labels != example.IGNORED
    assert abs(guessed.mean() - 0.15) < 0.01
    assert abs((ids[guessed] == example.MASK).mean() - 0.8) < 0.03
    assert (labels[guessed] == windows[guessed]).all()
    assert (ids[~guessed] == windows[~guessed]).all()


@pytest.mark.long
def test_torch_bert(tmp_path: Path) -> None:
    """It learns with dropout, with the same bits in little memory above a disk, and its weights are transformers' to read."""
    transformers = pytest.importorskip("transformers")
    example = load("torch_bert")
    terms = {"layers": 1, "width": 32}
    losses = example.train(12, example.library(), save=tmp_path / "run", **terms)
    assert losses[-1] < losses[0]
    assert example.train(3, example.library(), **terms, ram="8MB", disk=str(tmp_path)) == losses[:3]
    assert transformers.BertForMaskedLM.from_pretrained(tmp_path / "run").config.hidden_size == 32
