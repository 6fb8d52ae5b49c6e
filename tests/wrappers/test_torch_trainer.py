"""transformers' Trainer on a session: the numbers of transformers' own, resumption, callbacks, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.torch_families import LENGTH, VOCAB, make

hf = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from nntask import DoesNotFit, UsageError  # noqa: E402
from wrappers.torch import Trainer  # noqa: E402

USUAL: dict[str, Any] = {
    **{"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 2, "learning_rate": 3e-3, "weight_decay": 0.1},
    **{"max_grad_norm": 0.5, "lr_scheduler_type": "cosine", "warmup_steps": 3, "logging_steps": 1, "report_to": [], "save_strategy": "no"},
    **{"use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False, "per_device_eval_batch_size": 2},
}
TERMS: dict[str, Any] = {"ram": "64MB", "workers": 1}


class Texts(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Random tokens, a part of whose labels do not count: of each text another part."""

    def __init__(self, count: int, *, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(2, VOCAB, (count, LENGTH), generator=generator)
        self.labels = self.ids.clone()
        for number in range(count):
            self.labels[number, : number % 7 * 5] = -100

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[number], "labels": self.labels[number]}


def arguments(directory: Path, **changes: Any) -> Any:
    return hf.TrainingArguments(str(directory), **{**USUAL, **changes})


def accuracy(found: Any) -> dict[str, float]:
    """Part of the tokens that are predicted."""
    return {"accuracy": float((np.argmax(found.predictions, -1) == found.label_ids).mean()), "first": float(found.predictions[0, 0, 0])}


def run(kind: Any, directory: Path, module: torch.nn.Module, *, resume: str | None = None, more: Any = None, **changes: Any) -> tuple[Any, list[Any]]:
    """A trainer that has trained a copy of a module, and what it logged."""
    more = dict(more or {})
    terms = TERMS if kind is Trainer else {}
    trainer = kind(
        copy.deepcopy(module),
        arguments(directory, **changes),
        train_dataset=more.pop("train", Texts(13)),
        eval_dataset=Texts(5, seed=1),
        **more,
        **terms,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer, trainer.state.log_history


def compare(ours: list[Any], theirs: list[Any], *, atol: float = 1e-5) -> None:
    assert [sorted(entry) for entry in ours] == [sorted(entry) for entry in theirs]
    for entry, other in zip(ours, theirs, strict=True):
        for name in entry:
            if "runtime" not in name and "per_second" not in name and "preparation" not in name:
                assert entry[name] == pytest.approx(other[name], abs=atol, rel=1e-4 if "norm" in name else 1e-9), (name, entry, other)


def test_logs_are_those_of_transformers(tmp_path: Path) -> None:
    """Accumulation with incomplete last steps and batches, tokens that do not count, warm-up and cosine, clipping, weight decay, evaluation with
    metrics: all that is logged, and the weights."""
    module, _ = make("gpt2", 0)
    terms = {"eval_strategy": "steps", "eval_steps": 3}
    theirs, expected = run(hf.Trainer, tmp_path / "theirs", module, more={"compute_metrics": accuracy}, **terms)
    ours, found = run(Trainer, tmp_path / "ours", module, more={"compute_metrics": accuracy}, **terms)
    compare(found, expected)
    assert sum("loss" in entry for entry in found) == 8
    ours.close()
    for name, value in theirs.model.state_dict().items():
        assert torch.allclose(ours.model.state_dict()[name], value, atol=1e-4), name
