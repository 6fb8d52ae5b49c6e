"""``nntask data prepare``: a dataset as train.bin, val.bin and tokenizer.json, for machines without access to the dataset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..options.help import parse

ACTIONS = ("prepare",)


@dataclass(frozen=True, slots=True)
class PrepareSettings:
    """Write a dataset as train.bin, val.bin and tokenizer.json, which nntask train --dataset train.bin --dataset-path DIR reads."""

    dataset: str = "stdlib"
    """stdlib (this machine's Python library), text (--dataset-path: file or directory, also parquet), WikiText-103"""
    dataset_path: str = ""
    """file or directory of the dataset; WikiText-103 is fetched to it if it is not there"""
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
        raise UsageError(f"nntask data knows {', '.join(ACTIONS)}, got {words[0]!r}; write nntask data prepare --output DIR")
    if not settings.output:
        raise UsageError("nntask data prepare needs --output, the directory to write; add it")
    if settings.vocab_size < 1 or settings.dataset_select == 0 or settings.dataset_select < -1:
        raise UsageError(
            f"--vocab-size must be at least 1 and --dataset-select at least 1, or -1 for all, "
            f"got {settings.vocab_size} and {settings.dataset_select}; the nearest legal values are 1"
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
    train = f"nntask train --dataset train.bin --dataset-path {settings.output}"
    print(f"use it with: {train}{' --tokenizer bytes' if done.tokenizer == 'bytes' else ''}, and a model of at least {done.vocab_size:,} ids")
    return 0
