"""Programs through the Trainer: heads by turns, hooks of the first call, modes, fp64, the time of preparation (P1, P5, C2, C4, C12)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

hf = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from wrappers.torch import Trainer  # noqa: E402

USUAL: dict[str, Any] = {
    **{"per_device_train_batch_size": 2, "max_steps": 8, "learning_rate": 1e-2, "weight_decay": 0.1, "adam_epsilon": 1e-3, "max_grad_norm": 0.0},
    **{"logging_steps": 1, "logging_nan_inf_filter": False, "report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True},
    **{"dataloader_pin_memory": False, "per_device_eval_batch_size": 2, "lr_scheduler_type": "constant", "remove_unused_columns": False},
}


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Random rows with labels."""

    def __init__(self, count: int, dtype: torch.dtype = torch.float64) -> None:
        self.x = torch.randn(count, 12, generator=torch.Generator().manual_seed(0)).to(dtype)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[number], "labels": torch.tensor(number % 4)}


class Classifier(nn.Module):
    """Two heads, batch normalisation, and a loss."""

    def __init__(self, *, by_turns: bool = False, keeps_statistics: bool = False) -> None:
        super().__init__()
        self.a, self.norm, self.first, self.second = nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Linear(12, 4), nn.Linear(12, 4)
        self.head, self.by_turns, self.keeps_statistics = "first", by_turns, keeps_statistics

    def train(self, mode: bool = True) -> Classifier:
        """Set the mode, of batch normalisation to evaluation if statistics are kept."""
        super().train(mode)
        if self.keeps_statistics:
            self.norm.eval()
        return self

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss and the logits."""
        y = torch.tanh(self.norm(self.a(x)))
        logits = self.second(y) if self.by_turns and self.head == "second" else self.first(y)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


class Turns(hf.TrainerCallback):  # type: ignore[misc, name-defined]
    """Switches the head before each step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        model.head = ("first", "second")[state.global_step % 2]


def trained(kind: Any, folder: Path, module: nn.Module, train: Any, evaluation: Any, **changes: Any) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """The log of a training of a copy of a module with an evaluation after it, and the weights.

    Args:
        changes: of the arguments; "callbacks" are the trainer's, and "first" says whether it evaluates before it trains.
    """
    callbacks, first = changes.pop("callbacks", []), changes.pop("first", False)
    terms = {"ram": "64MB", "workers": 1} if kind is Trainer else {}
    arguments = hf.TrainingArguments(str(folder), **{**USUAL, **changes})
    trainer = kind(copy.deepcopy(module), arguments, train_dataset=train, eval_dataset=evaluation, callbacks=callbacks, **terms)
    if first:
        trainer.evaluate()
    trainer.train()
    trainer.evaluate()
    if kind is Trainer:
        trainer.close()
    return trainer.state.log_history, dict(trainer.model.state_dict())


def compare(folder: Path, module: nn.Module, train: Any, evaluation: Any, tolerance: float, **changes: Any) -> None:
    """Train by both trainers; logs, weights and buffers are equal within a tolerance, but for times."""
    expected, weights = trained(hf.Trainer, folder / "theirs", module, train, evaluation, **changes)
    found, ours = trained(Trainer, folder / "ours", module, train, evaluation, **changes)
    assert [sorted(entry) for entry in found] == [sorted(entry) for entry in expected]
    for entry, other in zip(found, expected, strict=True):
        for name in ("loss", "eval_loss", "grad_norm", "train_loss"):
            if name in other:
                assert entry[name] == pytest.approx(other[name], abs=tolerance, rel=tolerance), (name, entry, other)
    assert ours.keys() == weights.keys()
    for name, value in weights.items():
        assert torch.allclose(ours[name].double(), value.double(), rtol=0, atol=tolerance), name


def _classifier(**terms: Any) -> nn.Module:
    torch.manual_seed(0)
    return Classifier(**terms).double()


def test_p1_heads_by_turns(tmp_path: Path) -> None:
    """A callback switches the head before each step; the idle head stands still."""
    compare(tmp_path, _classifier(by_turns=True), Rows(16), Rows(4), 1e-6, callbacks=[Turns()])


def test_p5_evaluation_before_training(tmp_path: Path) -> None:
    """The entries of an evaluation that comes before the training have all of transformers' names."""
    compare(tmp_path, _classifier(), Rows(16), Rows(4), 1e-6, first=True)


def test_c2_segformer(tmp_path: Path) -> None:
    """Segformer collects hidden states by hooks; evaluation and training alternate, with two shapes of batches."""
    config = hf.SegformerConfig(
        **{"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 8], "patch_sizes": [3, 3], "strides": [2, 2]},
        **{"num_attention_heads": [1, 1], "mlp_ratios": [2, 2], "decoder_hidden_size": 8, "num_labels": 3, "drop_path_rate": 0.0},
        **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout_prob": 0.0},
    )
    torch.manual_seed(0)
    module, generator = hf.SegformerForSemanticSegmentation(config), torch.Generator().manual_seed(0)
    data = [
        {"pixel_values": torch.randn(3, 16, 16, generator=generator), "labels": torch.randint(0, 3, (16, 16), generator=generator)} for _ in range(7)
    ]
    terms = {"eval_strategy": "steps", "eval_steps": 2, "prediction_loss_only": True, "max_steps": 5}
    compare(tmp_path, module, data, data[:3], 2e-5, **terms)


def test_c4_train_that_is_overridden(tmp_path: Path) -> None:
    """A `train()` that keeps the statistics of batch normalisation is called."""
    compare(tmp_path, _classifier(keeps_statistics=True), Rows(16), Rows(4), 1e-6)


def test_c4_module_that_came_in_evaluation_mode(tmp_path: Path) -> None:
    """The trainer calls `train()`, as transformers' own does."""
    compare(tmp_path, _classifier().eval(), Rows(16), Rows(4), 1e-6)


def test_c12_losses_in_fp64(tmp_path: Path) -> None:
    """Losses of a module in fp64 are those of transformers' Trainer, which sums the minibatches of a step in fp32, in another order."""
    compare(tmp_path, _classifier(), Rows(16), Rows(4), 2e-7, learning_rate=1e-3, gradient_accumulation_steps=2)
