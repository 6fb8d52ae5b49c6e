"""MLP-Mixer against a module of torch, and on real images through the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from support.gpt2_oracle import gradients_of, relative
from torch import nn

from nntask import SGD, UsageError
from nntask.hardware.flops import flop_counts_of
from nntask.models.mlp_mixer import MlpMixer, MlpMixerConfig
from nntask.models.registry import build, config_from_dict
from nntask.tiling.model_tiling import ModelTiling
from scheduler import InlineRuntime
from wrappers.cli import main

CONFIG = MlpMixerConfig(
    image_size=9, patch_size=3, num_channels=2, hidden_size=13, num_hidden_layers=2, tokens_mlp_dim=11, channels_mlp_dim=23, num_labels=5,
    initializer_range=0.3,
)  # fmt: skip
BATCH = 5
CUTS = [ModelTiling(), ModelTiling(2, 4, 5, 7, -1, 3)]


class Mlp(nn.Module):
    """Two layers with GELU between them."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(.., K) -> (.., K)."""
        return self.fc2(nn.functional.gelu(self.fc1(x)))


class Block(nn.Module):
    """Section 2 of the paper."""

    def __init__(self, config: MlpMixerConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(config.hidden_size, config.layer_norm_eps) for _ in range(2))
        self.mlp_tokens = Mlp(config.n_positions, config.tokens_mlp_dim)
        self.mlp_channels = Mlp(config.hidden_size, config.channels_mlp_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, N, C) -> (B, N, C)."""
        x = x + self.mlp_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp_channels(self.norm2(x))


class Mixer(nn.Module):
    """The oracle, with timm's names."""

    def __init__(self, config: MlpMixerConfig) -> None:
        super().__init__()
        self.stem = nn.ModuleDict({"proj": nn.Linear(config.patch_width, config.hidden_size)})
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(B, N, P) -> (B, classes)."""
        x = self.stem["proj"](images)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def oracle() -> Mixer:
    """With weights away from their first values."""
    torch.manual_seed(0)
    theirs = Mixer(CONFIG)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return theirs


def batch(seed: int) -> dict[str, np.ndarray]:
    """Random images and classes."""
    draw = np.random.default_rng(seed)
    images = draw.standard_normal((BATCH, CONFIG.n_positions, CONFIG.patch_width)).astype(np.float32)
    return {"images": images, "targets": draw.integers(0, CONFIG.num_labels, (BATCH, 1), np.int32)}


def ours(theirs: Mixer, tiling: ModelTiling, **options: Any) -> Any:
    """Ours with the weights of `theirs`."""
    model = build(CONFIG, tiling, InlineRuntime(), seed=None, **options)
    model.load(CONFIG.names.from_hf({name: value.detach().numpy().copy() for name, value in theirs.state_dict().items()}, CONFIG))
    return model


def given(model: Any, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Tensors of a batch."""
    found = model.inputs(BATCH)
    for name, tensor in found.items():
        tensor.write(arrays[name])
    return found


@pytest.mark.parametrize("tiling", CUTS, ids=["whole", "ragged"])
def test_gradients_and_ten_steps_are_those_of_torch(tiling: ModelTiling) -> None:
    """Gradients of the first step, and losses of ten."""
    theirs = oracle()
    model = ours(theirs, tiling)
    optimizer, reference = SGD(model.parameters(), 0.05), torch.optim.SGD(theirs.parameters(), 0.05)
    for step in range(10):
        arrays = batch(step)
        reference.zero_grad()
        expected = nn.functional.cross_entropy(theirs(torch.from_numpy(arrays["images"])), torch.from_numpy(arrays["targets"][:, 0].astype(np.int64)))
        expected.backward()
        loss = model(**given(model, arrays))
        loss.backward()
        if step == 0:
            found = CONFIG.names.to_hf(gradients_of(model), CONFIG)
            assert {name for name, _ in theirs.named_parameters()} == found.keys()
            largest = max(float(parameter.grad.abs().max()) for parameter in theirs.parameters())
            for name, parameter in theirs.named_parameters():
                gradient = parameter.grad.numpy()
                if np.abs(gradient).max() > 1e-6 * largest:  # a bias of all features of a patch is lost in the next norm: its gradient is rounding
                    assert relative(found[name], gradient) < 1e-5, name
                else:
                    assert np.abs(found[name]).max() < 1e-5 * largest, name
        optimizer.step()
        model.zero_grad()
        reference.step()
        assert loss.read()[0] == pytest.approx(expected.item(), rel=2e-5)


def test_scores_configs_and_counts() -> None:
    """Scores as the oracle's, in bf16 within its precision; configs both ways; parameters and products as counted by hand."""
    theirs, arrays = oracle(), batch(3)
    expected = theirs(torch.from_numpy(arrays["images"])).detach().numpy()
    model = ours(theirs, CUTS[1])
    assert np.abs(model.class_scores(given(model, arrays)["images"]).read()[:, 0] - expected).max() < 1e-4
    narrow = ours(theirs, CUTS[1], dtype=ml_dtypes.bfloat16)
    scores = narrow.class_scores(given(narrow, arrays)["images"])
    assert scores.dtype == ml_dtypes.bfloat16
    assert np.abs(scores.read()[:, 0].astype(np.float32) - expected).max() < 0.1 * np.abs(expected).max()
    assert config_from_dict(json.loads(json.dumps(CONFIG.to_dict()))) == CONFIG
    assert model.num_parameters == CONFIG.num_parameters == sum(parameter.numel() for parameter in theirs.parameters())
    products = 9 * 18 * 13 + 2 * (2 * 9 * 13 * 11 + 2 * 9 * 13 * 23) + 13 * 5
    assert flop_counts_of(CONFIG, 9, flash=True).model == 6 * products
    with pytest.raises(UsageError, match="classifies images and has no tokens"):
        model.logits(None)
    with pytest.raises(UsageError, match="classifies images and has no tokens"):
        model.encode(None, None)
    with pytest.raises(TypeError, match="dropout"):
        build(CONFIG, ModelTiling(), InlineRuntime(), dropout=0.1)
    with pytest.raises(UsageError, match="an MLP-Mixer takes images and targets"):
        model.inputs(2, 5)
    with pytest.raises(UsageError, match="image_size 9 and patch_size 2"):
        replace(CONFIG, patch_size=2)
    assert isinstance(model, MlpMixer)


@pytest.fixture
def digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """scikit-learn's 8 x 8 digits as an array file."""
    found = pytest.importorskip("sklearn.datasets").load_digits()
    np.savez(tmp_path / "digits.npz", images=(found.images * 15).astype(np.uint8), labels=found.target.astype(np.int32))
    monkeypatch.chdir(tmp_path)
    return tmp_path


TRAIN = "train --model=mixer-tiny --dataset=images --dataset-path=digits.npz --batch=32 --minibatch=16 --lr=3e-3 --warmup-steps=0 --dropout=0.1"


def losses(*flags: str) -> list[float]:
    """Of a run."""
    assert main([*TRAIN.split(), "--run-dir=run", *flags]) == 0
    return [json.loads(line)["loss"] for line in Path("run/metrics.jsonl").read_text().splitlines() if "loss" in line]


@pytest.mark.parametrize(("steps", "below"), [(50, 1.6), pytest.param(150, 1.0, marks=pytest.mark.long)])
def test_digits_are_learnt(digits: Path, steps: int, below: float) -> None:
    """The loss falls well below that of guessing, ln 10; the more, the more steps (long)."""
    found = losses(f"--steps={steps}", "--ncpu=2")
    assert found[0] > 2.0
    assert np.mean(found[-5:]) < below


@pytest.mark.parametrize(
    "machine",
    [
        pytest.param("--ncpu=3", marks=pytest.mark.long),
        pytest.param("--ncpu=2 --ram=1500KB --disk=tier", marks=pytest.mark.long),
        "--ncpu=1 --sim-gpu=2 --gpu-memory=2MB",
    ],
)
def test_bits_do_not_depend_on_the_machine(digits: Path, machine: str) -> None:
    """Simulated devices too small for the step; workers, and a small budget with a disk (long)."""
    expected = losses("--steps=3", "--ncpu=1")
    (digits / "run").rename(digits / "first")
    assert losses("--steps=3", *machine.split()) == expected


@pytest.mark.parametrize(("fits", "largest"), [(True, "mixer-tiny"), pytest.param(False, None, marks=pytest.mark.long)])
def test_plans_name_only_presets_that_take_these_images(digits: Path, capsys: pytest.CaptureFixture[str], fits: bool, largest: str | None) -> None:
    """Larger presets are of larger images; where the model does not fit, none does (long)."""
    machine = "--ram=1GB" if fits else "--ram=100KB"
    assert main(["plan", *TRAIN.split()[1:], "--ncpu=1", machine, "--json"]) == (0 if fits else 3)
    assert json.loads(capsys.readouterr().out)["largest_model"] == largest


def test_images_of_another_size_are_refused(digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence."""
    np.savez(digits / "digits.npz", images=np.zeros((20, 6, 6), np.uint8), labels=np.zeros(20, np.int32))
    assert main([*TRAIN.split(), "--steps=1"]) == 4
    assert "6" in capsys.readouterr().err
    assert main([*TRAIN.replace("--dataset=images --dataset-path=digits.npz", "").split(), "--steps=1"]) == 2
    assert "use --dataset images" in capsys.readouterr().err
