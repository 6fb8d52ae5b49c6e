"""``nntask data prepare``: a dataset as train.bin, val.bin and tokenizer.json, for machines without access to the dataset."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..options.help import parse

if TYPE_CHECKING:
    from nntask.data import TokenizedDataset

ACTIONS = ("prepare",)


@dataclass(frozen=True, slots=True)
class PrepareSettings:
    """Write a dataset as train.bin, val.bin and tokenizer.json, which nntask train --dataset train.bin --dataset-path DIR reads."""

    dataset: str = "stdlib"
    """stdlib (this machine's Python library), text (--dataset-path: file or directory, also parquet), WikiText-103, jsonl (its texts)"""
    dataset_path: str = ""
    """file, directory or pattern of files of the dataset; WikiText-103 is fetched to it if it is not there"""
    val_path: str = ""
    """validation text (default: held-out texts, or the dataset's own)"""
    dataset_select: int = -1
    """use the first N texts (rows of WikiText-103); -1 for all"""
    tokenizer: str = "auto"
    """bpe (trained on the text), bytes, or a name on the Hub such as gpt2; auto: bpe where installed"""
    tokenizer_path: str = ""
    """directory with tokenizer.json; a tokenizer with a name is fetched to it if it is not there"""
    vocab_size: int = 50257
    """ids of a tokenizer that is trained, and most that any may have"""
    output: str = ""
    """directory to write, a new one"""


def run(argv: Sequence[str]) -> int:
    """Prepare data; returns 0."""
    from nntask import UsageError

    settings, words = parse(PrepareSettings, argv, "nntask data", words=("prepare",))
    if words[0] not in ACTIONS:
        raise UsageError(f"data knows {', '.join(ACTIONS)}, got {words[0]!r}", "write nntask data prepare --output DIR")
    if not settings.output:
        raise UsageError("data prepare needs --output, the directory to write", "add it")
    if settings.vocab_size < 1 or settings.dataset_select == 0 or settings.dataset_select < -1:
        raise UsageError(
            f"must be at least 1 and --dataset-select at least 1, or -1 for all, got {settings.vocab_size} and {settings.dataset_select}",
            "the nearest legal values are 1",
            flag="--vocab-size",
        )
    from nntask.data import DataSpec, tokenize_dataset

    spec = DataSpec(
        dataset=settings.dataset,
        path=settings.dataset_path,
        val_path=settings.val_path,
        select=settings.dataset_select,
        tokenizer=settings.tokenizer,
        tokenizer_path=settings.tokenizer_path,
        vocab_size=settings.vocab_size,
    )
    done = tokenize_dataset(spec, Path(settings.output), lambda sentence: print(sentence, flush=True))
    print(f"wrote {done.num_train:,} tokens for training and {done.num_validation:,} for validation, {done.tokenizer} of {done.vocab_size:,} ids")
    for note in done.notes:
        print(note)
    print(_how_to_use(settings, done))
    return 0


def _how_to_use(settings: PrepareSettings, done: TokenizedDataset) -> str:
    """Return the command that trains a model with a matching number of ids on the tokens."""
    from nntask import PRESETS

    train = f"use it with: nntask train --dataset train.bin --dataset-path {shlex.quote(settings.output)}"
    if done.tokenizer == "bytes":
        train += " --tokenizer bytes"
    default, *others = PRESETS
    most = PRESETS[default].vocab_size
    if done.vocab_size <= most:
        return train
    fits = next((name for name in others if PRESETS[name].vocab_size >= done.vocab_size), None)
    model = f"--model {fits}, or another" if fits else "--config-path of a"
    is_trained = settings.tokenizer in ("auto", "bpe") and not settings.tokenizer_path
    smaller = f" ({default}, the default, has {most:,}: prepare with --vocab-size {most} for it)" if is_trained else ""
    return f"{train} {model} model of at least {done.vocab_size:,} ids{smaller}"
