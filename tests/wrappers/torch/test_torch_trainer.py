"""transformers' Trainer on a session: the numbers of transformers' own, resumption, callbacks, and what is refused."""

from __future__ import annotations

import copy
import gc
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.deadline import DEADLINE
from support.torch_families import LENGTH, VOCAB, make

hf = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from nntask import DoesNotFit, UsageError  # noqa: E402
from wrappers.torch import Trainer  # noqa: E402
from wrappers.torch.tasks.threads import Threads  # noqa: E402

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
    """Training arguments as usual, but for some."""
    return hf.TrainingArguments(str(directory), **{**USUAL, **changes})


def accuracy(found: Any) -> dict[str, float]:
    """Part of the labels that are predicted, and one logit."""
    logits = found.predictions[0] if isinstance(found.predictions, tuple) else found.predictions
    return {"accuracy": float((np.argmax(logits, -1) == found.label_ids).mean()), "first": float(logits.reshape(-1)[0])}


def run(kind: Any, directory: Path, module: torch.nn.Module, *, resume: str | None = None, more: Any = None, **changes: Any) -> tuple[Any, list[Any]]:
    """A trainer that has trained a copy of a module, and what it logged."""
    more = dict(more or {})
    terms = TERMS if kind is Trainer else {}
    trainer = kind(
        copy.deepcopy(module),
        arguments(directory, **changes),
        train_dataset=more.pop("train", Texts(13)),
        eval_dataset=more.pop("eval", Texts(5, seed=1)),
        **more,
        **terms,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer, trainer.state.log_history


def compare(ours: list[Any], theirs: list[Any], *, atol: float = 1e-5) -> None:
    """Logs are equal, but for the time."""
    assert [sorted(entry) for entry in ours] == [sorted(entry) for entry in theirs]
    for entry, other in zip(ours, theirs, strict=True):
        for name in entry:
            if "runtime" not in name and "per_second" not in name and "preparation" not in name:
                assert entry[name] == pytest.approx(other[name], abs=atol, rel=1e-4 if "norm" in name else 1e-9), (name, entry, other)


class Notes(hf.TrainerCallback):  # type: ignore[misc, name-defined]
    """Notes what it is called for, and when."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda args, state, control, **_: self.calls.append((name, state.global_step))
        return super().__getattribute__(name)


def test_logs_weights_and_callbacks_are_those_of_transformers(tmp_path: Path) -> None:
    """Accumulation with incomplete last steps and batches, tokens that do not count, warm-up and cosine, clipping, weight decay, evaluation with
    metrics: all that is logged, and the weights; and callbacks are called for the same events at the same steps."""
    module, _ = make("gpt2", 0)
    notes = [Notes(), Notes()]
    terms = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 5}
    theirs, expected = run(hf.Trainer, tmp_path / "theirs", module, more={"compute_metrics": accuracy, "callbacks": notes[:1]}, **terms)
    ours, found = run(Trainer, tmp_path / "ours", module, more={"compute_metrics": accuracy, "callbacks": notes[1:]}, **terms)
    compare(found, expected)
    assert sum("loss" in entry for entry in found) == 8
    assert notes[0].calls == notes[1].calls
    assert {"on_substep_end", "on_prediction_step", "on_save", "on_pre_optimizer_step"} <= {name for name, _ in notes[1].calls}
    ours.close()
    for name, value in theirs.model.state_dict().items():
        assert torch.allclose(ours.model.state_dict()[name], value, atol=1e-4), name


def test_a_run_that_is_resumed_logs_the_same(tmp_path: Path) -> None:
    """From a checkpoint within an epoch, in another process' state of random numbers, with dropout: the same bits in losses and weights.
    The checkpoint is read by from_pretrained, and has no pickle."""
    module, _ = make("gpt2", 0)
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.1
    whole, expected = run(Trainer, tmp_path / "whole", module, save_strategy="steps", save_steps=3, save_total_limit=2)
    assert sorted(path.name for path in (tmp_path / "whole").iterdir()) == ["checkpoint-6", "checkpoint-8"]  # the last step is saved as well
    checkpoint = tmp_path / "whole" / "checkpoint-6"
    assert {path.suffix for path in checkpoint.iterdir()} == {".json", ".safetensors"}
    torch.manual_seed(5)
    other, _ = make("gpt2", 0, seed=1)
    for part in other.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.1
    resumed, found = run(Trainer, tmp_path / "resumed", other, resume=str(checkpoint))
    compare(found[:-1], expected[:-1], atol=0)  # the last entry is the mean of the steps of a call
    whole.close()
    resumed.close()
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    read = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "checkpoint-8")
    assert torch.equal(read.transformer.h[0].mlp.c_fc.weight, whole.model.transformer.h[0].mlp.c_fc.weight)


@pytest.mark.long
def test_short_memory_logs_the_same_bits(tmp_path: Path) -> None:
    """A quarter of the memory above a disk, two workers."""
    module, _ = make("gpt2", 0)
    trainer, expected = run(Trainer, tmp_path / "0", module, num_train_epochs=1)
    peak = trainer._session.runtime.stats()["peak_bytes"]["ram"]
    trainer.close()
    tight = {"ram": f"{peak // 4}B", "disk": f"{tmp_path}:64MB", "workers": 2}
    trainer = Trainer(copy.deepcopy(module), arguments(tmp_path / "1", num_train_epochs=1), train_dataset=Texts(13), **tight)
    trainer.train()
    compare(trainer.state.log_history, expected, atol=0)
    stats = trainer._session.runtime.stats()
    assert stats["moved_bytes"]
    assert stats["peak_bytes"]["ram"] <= peak // 4
    trainer.close()


def test_evaluation_and_prediction_need_no_training(tmp_path: Path) -> None:
    """Before any step, after it, and with the model back in memory; calling the model meanwhile is refused."""
    module, batches = make("bert", 1)
    theirs = hf.Trainer(copy.deepcopy(module), arguments(tmp_path), eval_dataset=Texts(5), compute_metrics=accuracy)
    ours = Trainer(module, arguments(tmp_path), eval_dataset=Texts(5), train_dataset=Texts(4), compute_metrics=accuracy, **TERMS)
    expected, found = theirs.evaluate(), ours.evaluate()
    for name in ("eval_loss", "eval_accuracy", "eval_first"):
        assert found[name] == pytest.approx(expected[name], abs=1e-5)
    assert np.allclose(ours.predict(Texts(3)).predictions, theirs.predict(Texts(3)).predictions, atol=1e-5)
    with pytest.raises(UsageError, match=r"weights of the module are in a session, .* or close\(\) of its trainer"):
        module(**batches[0])
    ours.train()
    after = ours.evaluate()
    assert after["eval_loss"] < found["eval_loss"]
    ours.save_model(str(tmp_path / "saved"))
    with pytest.raises(UsageError, match=r"has no values, since a session holds them.* or close\(\) of its trainer"):
        Trainer(module, arguments(tmp_path), eval_dataset=Texts(5), **TERMS).evaluate()
    ours.close()
    another = Trainer(module, arguments(tmp_path), eval_dataset=Texts(5), **TERMS)
    assert another.evaluate()["eval_loss"] == after["eval_loss"]
    another.close()
    read = hf.AutoModelForMaskedLM.from_pretrained(tmp_path / "saved")
    assert hf.Trainer(read, arguments(tmp_path), eval_dataset=Texts(5)).evaluate()["eval_loss"] == pytest.approx(after["eval_loss"], abs=1e-6)


class OwnStep(Trainer):
    """Overrides what the session does."""

    def training_step(self, *others: Any, **more: Any) -> Any:
        """Not the session's."""
        return super().training_step(*others, **more)


def on_meta() -> torch.nn.Module:
    """A module without values."""
    with torch.device("meta"):
        return torch.nn.Linear(4, 4)


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"bf16": True}, {}, r"bf16 .* must be off, got True; .* model\.to\(torch\.bfloat16\)"),
    ({"bf16_full_eval": True}, {}, r"bf16_full_eval .* computes in the type of the model"),
    ({"gradient_checkpointing": True}, {}, r"gradient_checkpointing .* ram= and disk="),
    ({"torch_compile": True}, {}, r"torch_compile .* must be off"),
    ({"neftune_noise_alpha": 0.0}, {}, r"neftune_noise_alpha .* must be off, got 0\.0; leave it out"),
    ({"auto_find_batch_size": True}, {}, r"auto_find_batch_size .* choose per_device_train_batch_size"),
    ({"enable_jit_checkpoint": True}, {}, r"enable_jit_checkpoint .* save_steps"),
    ({"push_to_hub": True}, {}, r"push_to_hub .* upload the directory"),
    ({"debug": "underflow_overflow"}, {}, r"debug .* must be off"),
    ({"use_liger_kernel": True}, {}, r"use_liger_kernel .* must be off"),
    ({"optim": "adafactor"}, {}, r"optim .* adamw_torch, adamw_torch_fused, sgd, got 'adafactor'"),
    ({"optim": "sgd", "optim_args": "momentum=0.9,nesterov=true"}, {}, r"nesterov of SGD must be False, got True"),
    ({}, {"optimizer_cls_and_kwargs": (torch.optim.Adagrad, {})}, r"got Adagrad"),
    ({}, {"kind": OwnStep}, r"OwnStep overrides training_step, .* override compute_loss"),
    ({}, {"model": on_meta}, r"weight has no values \(it is on the meta device\)"),
]


def test_what_a_session_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    """At construction: the argument, its value, what to do."""
    module, _ = make("opt", 0)
    for changes, more, words in REFUSED:
        more = dict(more)
        kind, model = more.pop("kind", Trainer), more.pop("model", lambda: module)
        with pytest.raises(UsageError, match=words) as error:
            kind(model(), arguments(tmp_path, **changes), train_dataset=Texts(4), **more, **TERMS)
        assert "\n" not in str(error.value)


def test_a_step_that_is_refused_loses_nothing(tmp_path: Path) -> None:
    """A budget too small for the step, and a checkpoint of another trainer: `close` gives the weights back."""
    module, _ = make("bert", 0)
    before = copy.deepcopy(module.state_dict())
    trainer = Trainer(module, arguments(tmp_path), train_dataset=Texts(4), ram="1200KB", workers=1)
    with pytest.raises(DoesNotFit, match=r"needs [\d,]+ B .*raise ram="):
        trainer.train()
    (tmp_path / "checkpoint-1").mkdir()
    with pytest.raises(UsageError, match=r"checkpoint-1 holds no session, .*begin anew with its weights"):
        trainer.train(resume_from_checkpoint=True)
    trainer.close()
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


class Images(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Random images of five classes."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.pixels, self.labels = torch.randn(9, 3, 32, 32, generator=generator), torch.randint(0, 5, (9,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"pixel_values": self.pixels[number], "labels": self.labels[number]}


def own_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Cross entropy of each token with itself shifted by nothing: any loss that is not the model's."""
    return torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_items_in_batch


class Squared:
    """Overrides the loss as scripts do."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        """The loss and a penalty."""
        outputs = model(**inputs)
        loss = outputs.loss + 0.01 * outputs.logits.square().mean()
        return (loss, outputs) if return_outputs else loss


class SquaredTheirs(Squared, hf.Trainer):  # type: ignore[misc, name-defined]
    pass


class SquaredOurs(Squared, Trainer):
    pass


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert, which is given the number of tokens and does not use it": ("bert", {}),
    "t5, encoder and decoder": ("t5", {}),
    "vit, images": ("vit", {"more": {"train": Images(), "eval": Images()}}),
    "label smoothing": ("gpt2", {"label_smoothing_factor": 0.1}),
    "a loss of the user": ("gpt2", {"more": {"compute_loss_func": own_loss}}),
    "an overridden loss": ("llama", {"kinds": (SquaredTheirs, SquaredOurs)}),
    "no clipping, SGD with momentum": ("gpt2", {"max_grad_norm": 0.0, "optim": "sgd", "optim_args": "momentum=0.9"}),
    "fused AdamW, linear": ("gpt2", {"optim": "adamw_torch_fused", "lr_scheduler_type": "linear", "adam_beta2": 0.95}),
    "down when the loss stays": (
        "gpt2",
        {
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "lr_scheduler_kwargs": {"patience": 0},
            "metric_for_best_model": "loss",
            "eval_strategy": "steps",
            "eval_steps": 2,
            "warmup_steps": 0,
            "learning_rate": 1e-2,
        },
    ),
    "steps instead of epochs, loaded by a worker": ("gpt2", {"max_steps": 5, "dataloader_num_workers": 1}),
    "by length": ("gpt2", {"train_sampling_strategy": "group_by_length"}),
}


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_log_what_transformers_logs(variant: str, tmp_path: Path) -> None:
    """Other models, losses, optimizers, schedules and samplers."""
    family, terms = VARIANTS[variant]
    kinds = terms.get("kinds", (hf.Trainer, Trainer))
    terms = {name: value for name, value in terms.items() if name != "kinds"}
    module, _ = make(family, 0)
    more = {"compute_metrics": accuracy, **terms.pop("more", {})}
    terms = {"eval_strategy": "epoch", **terms}
    logs = [run(kind, tmp_path / str(number), module, more=more, **terms)[1] for number, kind in enumerate(kinds)]
    compare(logs[1], logs[0])


@pytest.mark.long
def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    """As transformers: the weights of the best evaluation, whose checkpoint the limit spares."""
    module, _ = make("gpt2", 0)
    terms = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "learning_rate": 0.03, "warmup_steps": 0}
    losses = []
    for kind in (hf.Trainer, Trainer):
        trainer, logs = run(kind, tmp_path / kind.__module__, module, load_best_model_at_end=True, save_total_limit=1, **terms)
        best = min(entry["eval_loss"] for entry in logs if "eval_loss" in entry)
        losses.append(trainer.evaluate()["eval_loss"])
        assert losses[-1] == pytest.approx(best, abs=1e-6)
        assert [path.name for path in (tmp_path / kind.__module__).iterdir()] == [f"checkpoint-{trainer.state.best_global_step}"]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.long
def test_adapters_are_trained_saved_and_resumed(tmp_path: Path) -> None:
    """LoRA: transformers' numbers; a checkpoint has the adapters, as PEFT reads them, and not the base; it resumes exactly."""
    peft = pytest.importorskip("peft")
    base, _ = make("llama", 0)

    def adapted(seed: int) -> Any:
        torch.manual_seed(seed)
        return peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))

    _, expected = run(hf.Trainer, tmp_path / "theirs", adapted(0))
    ours, found = run(Trainer, tmp_path / "ours", adapted(0), save_strategy="steps", save_steps=3)
    compare(found, expected)
    checkpoint = tmp_path / "ours" / "checkpoint-3"
    assert sum(path.stat().st_size for path in checkpoint.glob("*.safetensors")) < 30_000
    _, resumed = run(Trainer, tmp_path / "resumed", adapted(1), resume=str(checkpoint))
    compare(resumed[:-1], found[:-1], atol=0)
    ours.save_model(str(tmp_path / "saved"))
    ours.close()
    read = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "saved")
    weights = ours.model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in read.state_dict().items())


def test_options_that_a_schedule_changes_and_a_second_training(tmp_path: Path) -> None:
    """Betas and rates of one cycle over two calls of train: transformers' logs and weights; the optimizer's state is refused until close()."""
    module, _ = make("gpt2", 0)
    logs, trainers = [], []
    for kind in (hf.Trainer, Trainer):
        model = copy.deepcopy(module)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=12)
        terms = TERMS if kind is Trainer else {}
        given = arguments(tmp_path, max_steps=5, max_grad_norm=float("inf"))
        trainer = kind(model, given, train_dataset=Texts(13), optimizers=(optimizer, schedule), **terms)
        trainer.train()
        first = trainer.state.log_history
        trainer.train()
        logs.append([*first, *trainer.state.log_history])
        trainers.append(trainer)
    compare(logs[1], logs[0])
    with pytest.raises(UsageError, match=r"state_dict\(\) of the optimizer cannot be called while a session is open"):
        trainers[1].optimizer.state_dict()
    trainers[1].close()
    assert trainers[1].optimizer.state_dict()["state"] == {}
    for name, value in trainers[0].model.state_dict().items():
        assert torch.allclose(trainers[1].model.state_dict()[name], value, atol=1e-4), name


def test_a_trainer_that_is_dropped_ends_its_session(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """With a warning; its workers end, and PyTorch's threads are those of the program again."""
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(2)
    before = set(threading.enumerate())
    trainer = Trainer(make("gpt2", 0)[0], arguments(tmp_path, max_steps=1), train_dataset=Texts(4), ram="64MB", workers=1)
    trainer.train()
    assert set(threading.enumerate()) > before
    del trainer
    with pytest.warns(ResourceWarning, match=r"dropped without close\(\)"):
        gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(DEADLINE)
    assert set(threading.enumerate()) <= before
    assert torch.get_num_threads() == 2


def test_a_session_opens_while_a_dropped_one_ends(request: pytest.FixtureRequest) -> None:
    """Both have the same number of threads, though the program has another one. A session with another number has to wait."""
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(2)
    first = Threads(1)
    Threads.hold()
    Threads.leave()
    assert torch.get_num_threads() == 2
    Threads.hold()  # as a worker does that has collected a session, and computes for another one
    assert torch.get_num_threads() == 1
    with pytest.raises(UsageError, match=r"sessions that are open at once must have equal threads=, got 2 and 1; close the other first"):
        Threads(2)
    second = Threads(1)
    assert torch.get_num_threads() == 1
    for each in (second, first):
        each.end()
