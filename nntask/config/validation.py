"""Rules between settings, checked before anything is opened or computed; `resolution` has the defaults of unset values.

Each broken rule is one `UsageError` with the flag, the value received, the rule and the nearest legal value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from scheduler.drivers import MOST_PARTITIONS
from scheduler.planning import AUTO, BLOCK, NONE

from ..architecture.interface import LanguageConfig
from ..errors import Setting, UsageError
from ..io.units import LARGEST
from .cluster import check_cluster
from .init_from import brings_config
from .objective import check_objective, image_shape
from .settings import TrainSettings, flag_of

DEFAULT_LENGTH: Final = 4096
"""Largest default length of a sequence in tokens, for models that allow longer ones."""
_COUNTS: Final = (
    ("tiling", "batch", 1),
    ("tiling", "lanes", 1),
    ("model", "seq_len", 1),
    ("run", "steps", 1),
    ("run", "nepochs", 0),
    ("run", "eval_every", 0),
    ("run", "eval_batches", 1),
    ("run", "sample_tokens", 0),
    ("data", "seed", 0),
    ("data", "target_len", 1),
    ("optimizer", "warmup_steps", 0),
    ("checkpoints", "save_every", 0),
    ("checkpoints", "keep_checkpoints", 1),
    ("resources", "ncpu", 0),
    ("resources", "ngpu", -1),
    ("resources", "split_gpu", 1),
    ("resources", "sim_gpu", 0),
    ("cluster", "nodes", 1),
)
_MOST: Final = {
    "batch": (10**10, "tiles and minibatches are searched among its divisors"),
    "ncpu": (1024, "each worker is a thread of one process"),
    "sim_gpu": (64, "each device has two threads and a memory"),
    "counts": (64, "each device has a memory and links that a plan goes through one by one"),
    "devices": (64, "each has a memory and links that a plan goes through one by one"),
    "split_gpu": (MOST_PARTITIONS, "each part has threads, a memory and libraries of its own"),
}
_OR_WHOLE: Final = (
    ("tiling", "minibatch"),
    ("tiling", "minibatch_tile"),
    ("tiling", "seq_tile"),
    ("tiling", "embd_tile"),
    ("tiling", "inner_tile"),
    ("tiling", "head_tile"),
    ("tiling", "vocab_tile"),
    ("data", "dataset_select"),
)
_RANGES: Final = (
    ("model", "dropout", 0.0, 1.0, True),
    ("optimizer", "lora_dropout", 0.0, 1.0, True),
    ("optimizer", "lr", 0.0, float("inf"), True),
    ("optimizer", "weight_decay", 0.0, float("inf"), True),
    ("optimizer", "optimizer_eps", 0.0, float("inf"), True),
    ("optimizer", "beta1", 0.0, 1.0, True),
    ("optimizer", "beta2", 0.0, 1.0, True),
    ("optimizer", "momentum", 0.0, 1.0, True),
    ("optimizer", "grad_clip", 0.0, float("inf"), True),
    ("optimizer", "min_lr", 0.0, float("inf"), True),
    ("optimizer", "warmup_start_lr", 0.0, float("inf"), True),
)
_EXPERTS: Final = ":experts"
_LORA: Final = re.compile(rf"lora:(\d{{1,9}})({_EXPERTS})?", re.ASCII)
_ORDER: Final = re.compile(r"auto|submission|eager-update|layers(:[1-9]\d*)?|turn:[1-7]/8|forward", re.ASCII)
_NAME: Final = r"[\w.*]+( and \d+)?"  # in a PyTorch model, a task of several operations is named after one of them: "mm and 2"
_OPERATION: Final = rf"{_NAME}(\[\d+\])?(:(0?\.\d*[1-9]\d*|1(\.0*)?))?"
_RECOMPUTE: Final = re.compile(rf"{_OPERATION}(,\s*{_OPERATION})*", re.ASCII)
_STEP_RANGE: Final = re.compile(r"(\d+):(\d+)", re.ASCII)


def check_prompt(prompt: str) -> None:
    """Check that --prompt is text.

    Raises:
        UsageError: it has bytes that are not UTF-8.
    """
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(f"must be text in UTF-8, got other bytes at character {error.start}", "use a terminal in UTF-8", flag="--prompt") from None


def check_values(settings: TrainSettings) -> None:
    """Check every value on its own, except the sizes that `machine.request_of` parses; needs no model.

    Raises:
        UsageError: a value breaks its rule.
    """
    check_prompt(settings.run.prompt)
    for group, name, least in _COUNTS:
        value = getattr(getattr(settings, group), name)
        if value is not None and value < least:
            what = {0: "0 or more", 1: "at least 1"}.get(least, "0 or more, or -1 for all")
            raise UsageError(f"must be {what}, got {value}", f"the nearest legal value is {least}", flag=flag_of(name))
        check_most(name, value)
    for group, name in _OR_WHOLE:
        value = getattr(getattr(settings, group), name)
        if value in (None, AUTO):
            continue
        if value == 0 or value < -1:
            near = f"the nearest legal value is {1 if value == 0 else -1}"
            raise UsageError(f"must be at least 1, or -1 for the whole, got {value}", near, flag=flag_of(name))
        check_most(name, value)
    for group, name, low, high, open_end in _RANGES:
        value = getattr(getattr(settings, group), name)
        if value is not None and not (low <= value < high if open_end else low <= value <= high):
            limit = f"a finite number of at least {low:g}" if high == float("inf") else f"at least {low:g} and below {high:g}"
            near = f"the nearest legal value is {low:g}" if value < low else f"for example {0.001 if high == float('inf') else high / 2:g}"
            raise UsageError(f"must be {limit}, got {value:g}", near, flag=flag_of(name))
    check_objective(settings.data)
    _check_combinations(settings)
    _check_adapters(settings)
    resources = settings.resources
    if _ORDER.fullmatch(resources.order) is None:
        raise UsageError(
            f"must be auto, submission, eager-update, layers, layers:G with G minibatches, turn:K/8 with K from 1 to 7, or forward, "
            f"got {resources.order!r}",
            "use --order auto",
            flag="--order",
        )
    if resources.watchdog is not None and not 0.0 < resources.watchdog < float("inf"):
        raise UsageError(f"must be a positive number of seconds, got {resources.watchdog:g}", "for example 60", flag="--watchdog")
    _check_recompute(resources.recompute)
    trace_range(settings.observe.trace_steps)


def _check_recompute(text: str) -> None:
    if _RECOMPUTE.fullmatch(text) is None:
        raise UsageError(
            "must be auto, none, block, or operations separated by commas, each perhaps with a share of its layers (above 0, at most 1), "
            f"such as layer_norm,attention:0.5, got {text!r}",
            "use --recompute auto",
            flag="--recompute",
        )
    names = [each.partition(":")[0].strip() for each in text.split(",")]
    for name in names:
        if len(names) > 1 and name in (AUTO, NONE, BLOCK):
            raise UsageError(f"cannot be combined, got {text!r}", f"use --recompute {name}, or name operations only", flag="--recompute", value=name)
        if names.count(name) > 1:
            raise UsageError(
                f"must name an operation once, got {name!r} {names.count(name)} times in {text!r}", "keep one of them", flag="--recompute"
            )


def check_most(name: str, value: int | None) -> None:
    """Check that a count is within its bound.

    Raises:
        UsageError: the count is larger.
    """
    most, why = _MOST.get(name, (LARGEST, ""))
    if value is not None and value > most:
        raise UsageError(f"must be at most {most}{why and ', because '}{why}, got {value}", f"the nearest legal value is {most}", flag=flag_of(name))


def _check_combinations(settings: TrainSettings) -> None:
    model, resources = settings.model, settings.resources
    if model.model is not None and model.config_path is not None:
        others = (Setting("--config-path", model.config_path),)
        raise UsageError("and {0} both name a model", "drop one of them", flag="--model", value=model.model, others=others)
    begin = settings.checkpoints.init_from
    for flag, value in (("--model", model.model), ("--config-path", model.config_path)):
        if brings_config(begin) and value:
            others = (Setting(flag, value),)
            raise UsageError(
                "brings its own config and weights, and {0} names others", "drop one of them", flag="--init-from", value=begin, others=others
            )
    if resources.ngpu and resources.sim_gpu:
        both = (Setting("--ngpu", resources.ngpu), Setting("--sim-gpu", resources.sim_gpu))
        raise UsageError("devices are real or simulated, got {0} and {1}", "drop one of them", others=both)
    if model.dtype == "fp64" and resources.ngpu:
        others = (Setting("--ngpu", resources.ngpu),)
        raise UsageError(
            "has no CUDA kernels, and {0} asks for GPUs", "use --ngpu 0, or another --dtype", flag="--dtype", value="fp64", others=others
        )
    if model.gpu_attention != "own" and settings.cluster.dask:
        raise UsageError(
            "is for training on one machine, got {0}",
            "use --attention flash",
            flag="--attention",
            value=model.attention,
            others=(Setting("--dask", settings.cluster.dask),),
        )
    if model.attention == "cudnn" and model.dtype != "bf16":
        others = (Setting("--dtype", model.dtype),)
        raise UsageError("computes in bf16, got {0}", "add --dtype bf16, or use --attention flash", flag="--attention", value="cudnn", others=others)
    if settings.optimizer.momentum and settings.optimizer.optimizer not in ("sgd", "muon"):
        raise UsageError(
            f"belongs to sgd and muon, not {settings.optimizer.optimizer}",
            "drop it, or set --beta1",
            flag=flag_of("momentum"),
            value=settings.optimizer.momentum,
        )
    if settings.optimizer.warmup_start_lr is not None and settings.optimizer.warmup_steps == 0:
        raise UsageError(
            "begins a warm-up, and {0} asks for none",
            "drop one of them",
            flag="--warmup-start-lr",
            value=settings.optimizer.warmup_start_lr,
            others=(Setting("--warmup-steps", 0),),
        )
    if settings.run.prompt and not settings.run.sample_tokens:
        others = (Setting("--sample-tokens", 0),)
        raise UsageError("is for the text sampled after training, and {0} asks for none", "drop one of them", flag="--prompt", others=others)
    check_cluster(settings)


def rank_of(settings: TrainSettings) -> int | None:
    """Return the rank of the adapters to train; None if all weights are trained.

    Raises:
        UsageError: --train is not all, lora:RANK or lora:RANK:experts.
    """
    asked = settings.optimizer.train
    if asked == "all":
        return None
    match = _LORA.fullmatch(asked)
    if match is None or int(match[1]) < 1:
        rank = next((number for number in re.findall(r"[0-9]{1,4}", asked) if int(number)), "4")
        remedy = f"for example --train lora:{rank}{_EXPERTS if 'expert' in asked else ''}"
        raise UsageError(f"must be all, or lora:RANK or lora:RANK:experts with a rank of at least 1, got {asked}", remedy, flag="--train")
    return int(match[1])


def adapts_experts(settings: TrainSettings) -> bool:
    """Return whether the experts of a mixture get adapters, too."""
    return settings.optimizer.train.endswith(_EXPERTS)


def _check_adapters(settings: TrainSettings) -> None:
    """Check --train against the flags that only adapters have, or cannot have."""
    optimizer = settings.optimizer
    if rank_of(settings) is None:
        for flag, value in (("--lora-alpha", optimizer.lora_alpha), ("--lora-dropout", optimizer.lora_dropout or None)):
            if value is not None:
                others = (Setting("--train", "all"),)
                raise UsageError("is about adapters and {0} has none", "add --train lora:8, or drop it", flag=flag, value=value, others=others)
        return
    if optimizer.lora_alpha is not None and not 0 < optimizer.lora_alpha < float("inf"):
        raise UsageError(f"must be a finite number above 0, got {optimizer.lora_alpha:g}", "for example twice the rank", flag="--lora-alpha")
    if adapts_experts(settings) and optimizer.lora_dropout:
        others = (Setting("--train", optimizer.train),)
        raise UsageError(
            "must be 0 with {0}: adapters of experts have no dropout, as in PEFT", "drop one of them", flag="--lora-dropout",
            value=optimizer.lora_dropout, others=others,
        )  # fmt: skip


def check_rank(settings: TrainSettings, limit: int, *, has_experts: bool) -> None:
    """Check adapters against the smallest width of the matrices that get one, and against a model without experts.

    Raises:
        UsageError: the rank is larger, or there are no experts that could have adapters.
    """
    rank, asked = rank_of(settings), settings.optimizer.train
    if rank is None:
        return
    if adapts_experts(settings) and not has_experts:
        raise UsageError(f"{asked} is for mixtures of experts, and the model has none", f"use lora:{rank}", flag="--train")
    if rank > limit:
        raise UsageError(
            f"{asked} must have a rank of at most {limit}, the smallest width of a matrix that gets an adapter",
            f"the nearest legal value is {asked.replace(str(rank), str(limit), 1)}",
            flag="--train",
        )


def trace_range(text: str) -> tuple[int, int] | None:
    """Return the first and last step of a value of --trace-steps; None for "all" and for no text.

    Raises:
        UsageError: the text is neither "all" nor A:B with 1 <= A <= B.
    """
    return None if text in ("", "all") else step_range(text, "--trace-steps", "all, or ")


def step_range(text: str, flag: str, others: str = "") -> tuple[int, int]:
    """Return the first and last step of A:B.

    Args:
        text: value of the flag.
        flag: flag with its dashes, for messages.
        others: other values that the flag takes, as the beginning of its rule.

    Raises:
        UsageError: the text is not A:B with 1 <= A <= B.
    """
    match = _STEP_RANGE.fullmatch(text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"must be {others}A:B with 1 <= A <= B, got {text!r}", "for example 10:12", flag=flag)
    return int(match[1]), int(match[2])


def checked_length(seq_len: int | None, config: LanguageConfig, usual: int) -> int:
    """Return --seq-len, or by default the `usual` length, at most `DEFAULT_LENGTH`; a model of images always takes all patches.

    Raises:
        UsageError: --seq-len is longer than the model's sequences may be.
    """
    limit = config.longest
    if seq_len is None:
        return min(usual, DEFAULT_LENGTH) if image_shape(config) is None else config.n_positions
    if limit is not None and seq_len > limit:
        raise UsageError(f"must be at most {config.positions_key} = {limit}, got {seq_len}", f"the nearest legal value is {limit}", flag="--seq-len")
    return seq_len


def nearest(legal: Iterable[int], value: int) -> int:
    """Return the element of `legal` closest to `value`, the smaller of two."""
    return min(legal, key=lambda n: (abs(n - value), n))
