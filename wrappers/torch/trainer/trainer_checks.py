"""Checks of transformers' training arguments: those that a session does not support are refused by name, each with a remedy."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

import accelerate
import transformers

from nntask import UsageError

from ..releases import ACCELERATE, TRANSFORMERS, check_release, check_torch
from ..steps.optimizers import torch_optimizer

ADVICE: Final[Mapping[str, str]] = {
    "bf16": "leave it out, and give the model in that type: model.to(torch.bfloat16)",
    "fp16": "leave it out; train in fp32, or give the model in bfloat16: model.to(torch.bfloat16)",
    **dict.fromkeys(("bf16_full_eval", "fp16_full_eval"), "leave it out; evaluation computes in the type of the model"),
    **dict.fromkeys(
        ("deepspeed", "fsdp", "parallelism_config", "gradient_checkpointing", "activation_checkpointing"),
        "leave it out: ram= and disk= of this trainer keep the memory within a budget",
    ),
    **dict.fromkeys(("torch_compile", "use_liger_kernel", "neftune_noise_alpha", "debug"), "leave it out"),
    "auto_find_batch_size": "leave it out; choose per_device_train_batch_size, and a step that does not fit is refused before it runs",
    "enable_jit_checkpoint": "leave it out, and save often enough with save_steps",
    "push_to_hub": "leave it out, and upload the directory that save_model writes",
    "predict_with_generate": "leave it out, and generate with the model after close()",
}
"""Argument that must be off -> remedy."""
OPTIMIZERS: Final = ("adamw_torch", "adamw_torch_fused", "sgd")
"""Supported values of ``optim``."""
OVERRIDDEN: Final = (
    *("_prepare_for_training", "training_step", "_clip_grad_norm", "_get_grad_norm", "_wrap_model", "prediction_step", "_save_checkpoint", "_save"),
    *("_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_rng_state", "_load_best_model"),
)
"""Methods of transformers' Trainer that ours overrides; if the loop no longer called one of them, it would train without the session."""
_CALLED: Final = ("_inner_training_loop", "_run_epoch", "_get_num_items_in_batch", "_get_output_dir", "_prepare_inputs", "store_flos")
"""Methods of transformers' Trainer that ours calls or compares."""


def check_trainer_packages(session: type[Any]) -> None:
    """Check the releases of PyTorch, transformers and accelerate that are installed.

    Args:
        session: class of sessions, with which a self-check trains.

    Raises:
        UsageError: a release is older than the tested ones, or newer and lacks parts that are used here.
    """
    check_torch(session)
    check_release(TRANSFORMERS, str(transformers.__version__), lambda: fault_of_loop(transformers.Trainer))
    check_release(ACCELERATE, str(accelerate.__version__))


def fault_of_loop(base: type[Any]) -> str | None:
    """Return why transformers' loop cannot train here: methods that its Trainer lacks, or does not call; None if it can.

    Args:
        base: transformers' Trainer.
    """
    if missing := [name for name in (*OVERRIDDEN, *_CALLED) if not hasattr(base, name)]:
        return f"its Trainer lacks {', '.join(missing)}"
    source = "".join(inspect.getsource(each) for each in base.__mro__ if each is not object)
    uncalled = [name for name in OVERRIDDEN if f".{name}(" not in source]
    return f"its Trainer does not call {', '.join(uncalled)}" if uncalled else None


def check_arguments(args: Any, *, named_optimizer: bool) -> None:
    """Check that a session supports the training arguments.

    Args:
        args: transformers' TrainingArguments.
        named_optimizer: whether ``optim`` names the optimizer.

    Raises:
        UsageError: an argument is not supported; the message names it, its value and the remedy.
    """
    for name, advice in ADVICE.items():
        value = getattr(args, name, None)
        if value is not None and value is not False and value not in ("", [], {}):
            raise UsageError(f"{name} of the training arguments must be off, got {value!r}", advice)
    optimizer = str(getattr(args.optim, "value", args.optim))
    if named_optimizer and optimizer not in OPTIMIZERS:
        raise UsageError(f"optim of the training arguments must be one of {', '.join(OPTIMIZERS)}, got {optimizer!r}", "use one of them")
    if args.world_size > 1:
        raise UsageError(f"a trainer is one process, got {args.world_size} of them", "start the script without a launcher")
    if args.device.type != "cpu":
        raise UsageError(f"the device of the training arguments must be the CPU, got {args.device}", "give use_cpu=True to the training arguments")


def check_trainer(trainer: Any, base: type[Any]) -> None:
    """Check a finished trainer: overridden methods that compute the step, the optimizer, accelerate's settings.

    Args:
        trainer: the trainer.
        base: class whose methods it must not override.

    Raises:
        UsageError: something is not supported; the message says what, and the remedy.
    """
    for name in ("training_step", "_inner_training_loop", "_run_epoch"):
        if getattr(type(trainer), name) is not getattr(base, name):
            raise UsageError(f"{type(trainer).__name__} overrides {name}, and steps are the session's", "override compute_loss, or use callbacks")
    if trainer.accelerator.mixed_precision != "no":
        precision = trainer.accelerator.mixed_precision
        raise UsageError(f"mixed_precision of accelerate must be no, got {precision}", "set it to no, or give the model in that type")
    if trainer.lr_scheduler is not None and trainer.optimizer is None:
        raise UsageError("a learning rate schedule without its optimizer changes nothing", "give both in optimizers=")
    optimizer = trainer.optimizer
    try:
        if trainer.model_init is None:
            torch_optimizer(trainer.create_optimizer(), trainer.model, None, {})
    finally:
        trainer.optimizer = optimizer
