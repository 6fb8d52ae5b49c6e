"""``nntask generate``: text from a run or a checkpoint."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .help import parse

if TYPE_CHECKING:
    from nntask.checkpoints import Checkpoint
    from nntask.data import Tokenizer
    from scheduler.runtime import Runtime


@dataclass(frozen=True, slots=True)
class GenerateSettings:
    """Continue a prompt with a trained model. RUN is a run directory or one of its checkpoints."""

    prompt: str = ""
    """beginning of the text (default: the beginning of a new one)"""
    max_new_tokens: int = 100
    """tokens to add, fewer when the text ends"""
    temperature: float = 0.8
    """scores are divided by it; 0 takes the best token always"""
    top_k: int = 0
    """only the k best tokens; 0 for all"""
    top_p: float = 1.0
    """only the best tokens that together have this probability"""
    seed: int = 0
    """of the draws"""
    ncpu: int | None = None
    """CPU workers (default: the cores this process may use)"""
    ram: str = ""
    """byte budget of RAM, e.g. 2GiB; below what the model needs, --disk takes the rest"""
    disk: str = ""
    """DIR or DIR:SIZE, a disk tier below RAM: one file in DIR of at most SIZE bytes (default: what is free there), gone at the end"""
    tokenizer_path: str = ""
    """directory with tokenizer.json, for a run that was trained on token ids without one"""


def run(argv: Sequence[str]) -> int:
    """Sample text and print it as it comes."""
    settings, words = parse(GenerateSettings, argv, "nntask generate", words=("RUN",))
    check(settings)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from nntask.checkpoints import find_checkpoint

    checkpoint = find_checkpoint(words[0])
    tokenizer = tokenizer_of(checkpoint, settings.tokenizer_path)
    _generate(settings, checkpoint, tokenizer)
    return 0


def check(settings: GenerateSettings) -> None:
    """Check the values.

    Raises:
        UsageError: the first one that breaks its rule.
        DataError: the directory of --disk cannot be made or written.
    """
    from nntask.errors import UsageError
    from nntask.sizes import LARGEST, parse_size
    from nntask.trainer.prepare import check_disk
    from nntask.trainer.rules import check_most

    rules = (
        ("--max-new-tokens", settings.max_new_tokens, settings.max_new_tokens >= 1, "at least 1", "1"),
        ("--temperature", settings.temperature, 0 <= settings.temperature < float("inf"), "0 or more", "0"),
        ("--top-k", settings.top_k, settings.top_k >= 0, "0 or more", "0"),
        ("--top-p", settings.top_p, 0 < settings.top_p <= 1, "above 0 and at most 1", "1"),
        ("--seed", settings.seed, 0 <= settings.seed <= LARGEST, f"at least 0 and at most {LARGEST}", "0" if settings.seed < 0 else str(LARGEST)),
        ("--ncpu", settings.ncpu, settings.ncpu is None or settings.ncpu >= 1, "at least 1", "1"),
    )
    for flag, value, ok, rule, near in rules:
        if not ok:
            raise UsageError(f"{flag} must be {rule}, got {value}; the nearest legal value is {near}")
    check_most("ncpu", settings.ncpu)
    if settings.ram:
        parse_size(settings.ram, "--ram")
    check_disk(settings.disk)


def tokenizer_of(checkpoint: Checkpoint, path: str = "") -> Tokenizer:
    """The tokenizer a checkpoint was trained with, or the one at `path` if it was trained on bare token ids.

    Raises:
        UsageError: `path` is given although the checkpoint knows its tokenizer.
        DataError: there is none, or it is of another model.
    """
    from nntask.data import ByteTokenizer, load_tokenizer
    from nntask.errors import DataError, UsageError

    kind = checkpoint.state.get("tokenizer")
    if kind is not None and path:
        raise UsageError(f"--tokenizer-path {path} is for runs trained on bare token ids, and {checkpoint.path} has its tokenizer; drop it")
    if kind == "bytes":
        return ByteTokenizer(checkpoint.config.vocab_size)
    if kind is None and not path:
        raise DataError(f"{checkpoint.path} was trained on token ids without a tokenizer; name the one that made them with --tokenizer-path DIR")
    tokenizer = load_tokenizer(path or checkpoint.path)
    if tokenizer.vocab_size > checkpoint.config.vocab_size:
        raise DataError(
            f"the tokenizer at {path or checkpoint.path} has {tokenizer.vocab_size} ids and the model's vocabulary {checkpoint.config.vocab_size}; "
            "name the one that made the model's training data"
        )
    return tokenizer


def _generate(settings: GenerateSettings, checkpoint: Checkpoint, tokenizer: Tokenizer) -> None:
    from nntask.checkpoints import STATE
    from nntask.trainer.prepare import with_tiles
    from nntask.trainer.recorded import Inference
    from nntask.trainer.sampling import Sampling, sample
    from nntask.trainer.settings import from_dict
    from nntask.trainer.weights import load_model

    config = checkpoint.config
    trained, tiling = with_tiles(from_dict(checkpoint.state["settings"], str(checkpoint.path / STATE)), config)
    prompt = [int(i) for i in tokenizer.encode([settings.prompt])[0]] if settings.prompt else []
    how = Sampling(settings.temperature, settings.top_k, settings.top_p, settings.seed)
    with _runtime(settings) as runtime:
        inference = Inference(config, tiling, runtime, trained, load_model(checkpoint, tiling, runtime, trained))
        shown, ids = "", list(prompt)
        for token in sample(
            inference.next_logits,
            [tokenizer.begin_of_text, *prompt],
            settings.max_new_tokens,
            how,
            context=inference.context,
            vocab_size=tokenizer.vocab_size,
            stop=tokenizer.special.eos,
        ):
            ids.append(token)
            text = tokenizer.decode(ids)
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # half a character: wait for the rest
                sys.stdout.write(text[len(shown) :])
                sys.stdout.flush()
                shown = text
    sys.stdout.write(tokenizer.decode(ids)[len(shown) :] + "\n")


@contextmanager
def _runtime(settings: GenerateSettings) -> Iterator[Runtime]:
    """The runtime that the flags ask for; its refusals name the flag that helps.

    Raises:
        DoesNotFit: a budget is too small, or not to be had.
        StorageError: the disk tier failed.
    """
    from nntask.errors import StorageError
    from nntask.trainer.machine import does_not_fit, open_runtime
    from nntask.trainer.settings import ResourceSettings, TrainSettings
    from scheduler.core import errors as scheduler_errors

    resources = ResourceSettings(ncpu=settings.ncpu, ram=settings.ram, disk=settings.disk)
    runtime = open_runtime(TrainSettings(resources=resources))
    try:
        with runtime:
            yield runtime
    except scheduler_errors.SchedulerError as error:
        if runtime.tier_failure is not None:
            raise StorageError(f"{runtime.tier_failure}; name another directory with --disk") from error
        if isinstance(error, scheduler_errors.DoesNotFit):
            raise does_not_fit(error, resources, trains=False) from error
        raise
