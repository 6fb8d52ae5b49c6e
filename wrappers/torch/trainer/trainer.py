"""transformers' Trainer on a session: a script changes its import, and states the memory budgets.

    from wrappers.torch import Trainer
    trainer = Trainer(model=model, args=args, train_dataset=dataset, ram="2GiB", disk="scratch")

The loop is transformers' own: datasets, collators, callbacks, logging, schedules and metrics are unchanged. A step goes to the session (see
`training_step`), and evaluation gets a substitute for the model, whose calls run in the session. Checkpoints are directories of `Session.save`, with
trainer_state.json, the schedule and random states as JSON, written completely or not at all. No pickle is written or read. The weights stay in the
session until `close`, so that the budget holds after training too; calling the model meanwhile raises an error.
"""

from __future__ import annotations

import base64
import inspect
import json
import os
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from nntask import UsageError
from nntask.io import read_object, written_aside

from ..guards.walk_code import Narrow
from ..session.files import MODEL, STATE, storage_errors
from ..session.session import Session
from ..session.session_checks import check_module
from ..tasks.cuts import LARGEST_TILE
from ..tasks.inductor import check_compiler
from .trainer_checks import check_arguments, check_trainer, check_trainer_packages

SCHEDULE: Final = "scheduler.json"
RANDOM: Final = "rng_state.json"
_COUNT: Final = "num_items_in_batch"
"""Name of the number of tokens among the inputs of a minibatch."""


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """transformers' Trainer with model, gradients and optimizer within memory budgets.

    Args:
        model: the model; this and all arguments that are not listed here are those of transformers' Trainer.
        args: training arguments. One step is ``gradient_accumulation_steps`` minibatches of ``per_device_train_batch_size``.
        others: further positional arguments.
        ram, disk, workers, threads, sim_gpu, gpu_memory, largest_tile, compiled: arguments of `Session`. If a step has one minibatch, set
            `threads` to the number of cores.
        ngpu: number of GPUs; None for all. The model stays in CPU memory (``use_cpu=True``), and the session copies it to them in pieces.
        more: further arguments by name.

    Raises:
        UsageError: a session does not support an argument; the message names it and the remedy.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        args: Any = None,
        *others: Any,
        ram: int | str | None = None,
        disk: str | os.PathLike[str] | None = None,
        workers: int | None = None,
        threads: int = 1,
        ngpu: int | None = 0,
        sim_gpu: int = 0,
        gpu_memory: str | None = None,
        largest_tile: str = LARGEST_TILE,
        compiled: bool = False,
        **more: Any,
    ) -> None:
        check_trainer_packages(Session)
        self._terms: dict[str, Any] = {"ram": ram, "disk": disk, "workers": workers, "threads": threads, "ngpu": ngpu, "sim_gpu": sim_gpu}
        self._terms |= {"gpu_memory": gpu_memory, "largest_tile": largest_tile, "compiled": compiled}
        self._session: Session | None = None
        self._learns = False
        self._minibatches: list[dict[str, Any]] = []
        self._norm = 0.0
        args = transformers.TrainingArguments("tmp_trainer") if args is None else args
        given = inspect.signature(transformers.Trainer.__init__).bind(self, model, args, *others, **more).arguments
        is_named = given.get("optimizers", (None, None))[0] is None and given.get("optimizer_cls_and_kwargs") is None
        check_arguments(args, named_optimizer=is_named)
        if model is not None:
            check_module(model)
        if compiled:
            check_compiler()
        super().__init__(model, args, *others, **more)
        check_trainer(self, Trainer)

    def close(self) -> None:
        """Return the weights to the model, and free the session's memory; the optimizer's state is lost unless it was saved. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            try:
                session.load_into(session.module)
            finally:
                session.close()

    def _open(self, *, learns: bool) -> Session:
        """Return the session of the model, with its optimizer if it learns, else without optimizer state."""
        if self._session is not None and self._session.module is self.model and (self._learns or not learns):
            return self._session
        self.close()
        plain = getattr(self.optimizer, "optimizer", self.optimizer)  # PyTorch's own, inside accelerate's
        optimizer: dict[str, Any] = {"optimizer": plain} if learns else {"optimizer": "sgd", "lr": 0.0}
        norm = self.args.max_grad_norm or 0.0
        self._session = Session(self.model, **optimizer, objective=_Objective(self), max_grad_norm=norm, seed=self.args.seed, **self._terms)
        self._learns = learns
        return self._session

    # ---- Training. The loop's own call of the optimizer finds no gradients, and does nothing. ----

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        self._minibatches = []
        if not self._learns:
            self.close()  # it was opened for evaluation only; accelerate prepares the model with its weights
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        self._open(learns=True)  # only now, because accelerate takes the state of the optimizer out and puts it back
        return prepared

    def training_step(self, model: torch.nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Collect a minibatch, and take the step with the last one: the session computes, clips and updates. Weights are those of transformers.

        Returns:
            The loss of the step with its last minibatch, and zero before.
        """
        self.model.train()
        self._minibatches.append(self._counted(inputs, num_items_in_batch))
        if not self.accelerator.sync_gradients:
            return torch.tensor(0.0)
        is_scaled = self.loss_is_scaled_for_ga
        if is_scaled is None:
            is_scaled = (self.model_accepts_loss_kwargs and num_items_in_batch is not None) or self.compute_loss_func is not None
        minibatches, self._minibatches = self._minibatches, []
        started = self._open(learns=True).start_minibatches(minibatches, divisor=1 if is_scaled else self.current_gradient_accumulation_steps)
        outcome = started.result()
        self._norm = outcome.grad_norm
        return torch.tensor(outcome.loss, dtype=started.loss_dtype)

    def _counted(self, inputs: Mapping[str, Any], count: Any) -> dict[str, Any]:
        batch = dict(self._prepare_inputs(inputs))
        return batch if count is None else {**batch, _COUNT: torch.as_tensor(count)}

    def _clip_grad_norm(self, model: torch.nn.Module) -> float:
        return self._norm  # the session has clipped

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: float | None = None) -> float:
        return self._norm

    # ---- Evaluation ----

    def _wrap_model(self, model: torch.nn.Module, training: bool = True, dataloader: Any = None) -> torch.nn.Module:
        if training:
            return super()._wrap_model(model, training=training, dataloader=dataloader)
        started = time.monotonic()
        session = self._open(learns=False)
        if not self.accelerator._models:  # transformers' Trainer then also reports the time of preparing the model
            self.model_preparation_time = round(time.monotonic() - started, 4)
        return _StandIn(self.model, session)

    def prediction_step(
        self, model: torch.nn.Module, inputs: Mapping[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Evaluate as transformers' Trainer does; if only the loss is wanted, the session keeps nothing else."""
        if prediction_loss_only and self.label_names and all(inputs.get(name) is not None for name in self.label_names):
            batch = self._counted(inputs, self._get_num_items_in_batch([inputs], self.args.device))
            return self._open(learns=False).evaluated(batch), None, None
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[no-any-return]

    # ---- Checkpoints ----

    @property
    def _has_adapters(self) -> bool:
        return hasattr(self.model, "peft_config")

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        self.store_flos()
        parent = Path(self._get_output_dir(trial))
        directory = parent / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        best = parent / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
        if self.args.save_strategy != "no" and self.state.best_global_step and (best == directory or best.exists()):
            self.state.best_model_checkpoint = str(best)
        session = self._open(learns=True)
        with storage_errors(directory), written_aside(directory) as new:
            if self.args.save_only_model:
                session.save_weights(new, frozen=not self._has_adapters)
            else:
                session.save_into(new, frozen=not self._has_adapters)
                _write_json(new / SCHEDULE, self.lr_scheduler.state_dict(), f"the schedule {type(self.lr_scheduler).__name__}")
                _write_json(new / RANDOM, _random_states(), "the random states")
            self._save_beside(new)
            self._note_callbacks()
            self.state.save_to_json(str(new / TRAINER_STATE_NAME))
        rotate_checkpoints(str(parent), self.args.save_total_limit, self.state.best_model_checkpoint, use_mtime=True)

    def _note_callbacks(self) -> None:
        """Put the states of callbacks that have one into the trainer's state."""
        states_by_name: dict[str, list[Any]] = {}
        for callback in (*self.callback_handler.callbacks, self.control):
            if isinstance(callback, ExportableState):
                states_by_name.setdefault(type(callback).__name__, []).append(callback.state())
        for name, states in states_by_name.items():
            self.state.stateful_callbacks[name] = states[0] if len(states) == 1 else states

    def _save(self, output_dir: str | None = None, state_dict: Mapping[str, torch.Tensor] | None = None) -> None:
        directory = Path(output_dir or self.args.output_dir)
        if not self._has_adapters:
            self._open(learns=False).save_weights(directory)
        self._save_beside(directory)

    def _save_beside(self, directory: Path) -> None:
        """Save adapters if the model has some, and the tokenizer or processor."""
        if self._has_adapters:
            self.model.save_pretrained(directory, state_dict=self._open(learns=False).state_dict(frozen=False))
        processor = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if processor is not None:
            processor.save_pretrained(directory)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        if not (Path(resume_from_checkpoint) / STATE).exists():
            raise UsageError(
                f"{resume_from_checkpoint} holds no session, only what another trainer or save_only_model has written",
                "begin anew with its weights: model=AutoModel...from_pretrained(it)",
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        self._open(learns=True).resume(checkpoint, frozen=not self._has_adapters)
        self.lr_scheduler.load_state_dict(read_object(Path(checkpoint) / SCHEDULE, "the schedule"))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            _restore_random_states(read_object(Path(checkpoint) / RANDOM, "the random states"))

    def _load_best_model(self) -> None:
        directory = Path(self.state.best_model_checkpoint)
        if (directory / MODEL).exists():
            self._open(learns=True).load_weights(directory, frozen=not self._has_adapters)


class _Objective:
    """The loss of a minibatch that a trainer's `compute_loss` computes."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def __call__(self, model: torch.nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
        inputs = dict(batch)
        count = inputs.pop(_COUNT, None)
        return self._trainer.compute_loss(model, inputs, num_items_in_batch=count)

    def reads(self) -> dict[str, Any]:
        """Return the objects from which the Python state that the loss reads is reachable."""
        return {"trainer": Narrow(self._trainer, ("compute_loss_func", "label_smoother", "model_accepts_loss_kwargs"))}


class _StandIn(torch.nn.Module):  # type: ignore[misc]
    """A substitute for the model in evaluation: calls run in the session, and attributes are the model's."""

    def __init__(self, model: torch.nn.Module, session: Session) -> None:
        super().__init__()
        self.__dict__.update(_model=model, _session=session)  # so that the model is not a submodule

    def forward(self, **inputs: Any) -> Any:
        return self._session.predict(**inputs)

    def _get_name(self) -> str:
        return str(self._model._get_name())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_model"], name)


def _write_json(file: Path, content: Mapping[str, Any], what: str) -> None:
    try:
        file.write_text(json.dumps(content))
    except TypeError as error:
        raise UsageError(f"{what} cannot be saved as JSON: {error}", "use another one, or save_strategy='no'") from None


def _random_states() -> dict[str, Any]:
    """Return the states of the generators of Python, NumPy and PyTorch, from which samplers and datasets may draw."""
    kind, words, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(words).tolist(), *rest],
        "torch": base64.b64encode(torch.random.get_rng_state().numpy().tobytes()).decode(),
    }


def _restore_random_states(states: Mapping[str, Any]) -> None:
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    kind, words, *rest = states["numpy"]
    np.random.set_state((kind, np.array(words, np.uint32), *rest))
    torch.random.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(states["torch"])), dtype=torch.uint8))
