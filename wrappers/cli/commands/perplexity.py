"""``nntask perplexity``: the perplexity of a text under a run, a checkpoint, a model directory or a GGUF file."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from time import perf_counter
from typing import TYPE_CHECKING, Final, Literal

from nntask.config import MachineSettings

from ..options.help import parse
from ..options.runtime_flags import machine_from, open_source, runtime_of

if TYPE_CHECKING:
    from nntask.data import Dataset, TokenFile, Tokenizer
    from nntask.inference import ModelSource


TELL_SECONDS: Final = 10.0
"""Period of the progress lines."""


@dataclass(frozen=True, slots=True)
class ScoreSettings:
    """Text to score."""

    dataset: str = "stdlib"
    """data to score: stdlib (this machine's Python library), text (any files, also parquet), WikiText-103, train.bin, or jsonl"""
    dataset_path: str = ""
    """file, directory or pattern of files of the dataset; a missing WikiText-103 is downloaded to it"""
    val_path: str = ""
    """validation text or tokens (default: held-out texts, or val.bin in the directory of train.bin)"""
    dataset_select: int = -1
    """score only the first N texts (rows of WikiText-103, sequences of train.bin); -1 for all"""
    split: Literal["auto", "validation", "train"] = "auto"
    """part of the dataset; auto is its validation part, or all of it if there is none"""
    seq_len: int | None = None
    """number of tokens per sequence (default: as in training, at most 4096)"""
    batch: int = 1
    """number of sequences that are scored at the same time"""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """element type of weights and activations; auto is that of the run, and fp32 for a model directory"""
    tokenizer_path: str = ""
    """directory with tokenizer.json, for a model without a tokenizer"""
    json: bool = False
    """print one JSON object: loss, perplexity, bits_per_byte, tokens, dataset, split, seq_len, seconds"""


@dataclass(frozen=True, slots=True)
class PerplexitySettings:
    """Score a text with a trained model. MODEL is a run directory, one of its checkpoints, a model directory of
    transformers, or a GGUF file."""

    score: ScoreSettings = field(default_factory=ScoreSettings)
    machine: MachineSettings = field(default_factory=MachineSettings)


def run(argv: Sequence[str]) -> int:
    """Score a text and print the result; returns 0."""
    settings, words = parse(PerplexitySettings, argv, "nntask perplexity", words=("MODEL",))
    asked = settings.score
    check(asked)
    machine = machine_from(settings.machine)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from nntask import UsageError
    from nntask.config import checked_length
    from nntask.inference import check_scoring
    from nntask.inference import perplexity as score

    source = open_source(words[0])
    if source.config.objective != "causal":
        raise UsageError(f"perplexity needs a model that predicts the next token, and {words[0]} is a {source.config.model_type}", "use one of those")
    length = checked_length(asked.seq_len, source.config, source.context)
    dataset, tokenizer = _open(asked, source)
    split, file = _split_of(asked, dataset)
    for finding in dataset.findings:
        print(finding.sentence, file=sys.stderr, flush=True)
    begin = perf_counter()
    if file.num_tokens > 1:  # otherwise `perplexity` raises the error
        check_scoring(source, asked.dtype, machine, batch=asked.batch, length=min(length, file.num_tokens - 1))
    with runtime_of(machine, "--batch or --seq-len") as runtime:
        select = dataset.select_sequences
        result = score(source, runtime, file, tokenizer, length=length, batch=asked.batch, select=select, dtype=asked.dtype, progress=_progress())
    facts = {"dataset": dataset.name, "split": split, "seq_len": length, "seconds": round(perf_counter() - begin, 3)}
    if asked.json:
        perplexity = result.perplexity if isfinite(result.perplexity) else None  # exp(loss) may overflow
        figures = {"loss": result.loss, "perplexity": perplexity, "bits_per_byte": result.bits_per_byte, "tokens": result.tokens}
        print(json.dumps({**figures, **facts}, allow_nan=False))
    else:
        print(f"{dataset.name}, {split}: {result.line()}, {length} at a time")
    return 0


def _progress() -> Callable[[int, int], None]:
    """Return a function that prints the progress on stderr, at most once per `TELL_SECONDS`."""
    printed = perf_counter()

    def report(scored: int, total: int) -> None:
        nonlocal printed
        if perf_counter() > printed + TELL_SECONDS and scored < total:
            printed = perf_counter()
            print(f"scored {scored} of {total} sequences", file=sys.stderr, flush=True)

    return report


def check(asked: ScoreSettings) -> None:
    """Check the values of the flags.

    Raises:
        UsageError: the first value that breaks its rule.
    """
    from nntask import UsageError
    from nntask.data import WIKITEXT

    for flag, value in (("--seq-len", asked.seq_len), ("--batch", asked.batch)):
        if value is not None and value < 1:
            raise UsageError(f"must be at least 1, got {value}", "the nearest legal value is 1", flag=flag)
    if asked.dataset_select == 0 or asked.dataset_select < -1:
        raise UsageError(f"must be at least 1, or -1 for all, got {asked.dataset_select}", "the nearest legal value is 1", flag="--dataset-select")
    is_apart = bool(asked.val_path) or asked.dataset == WIKITEXT  # the selection applies to training texts
    if asked.dataset_select != -1 and asked.dataset != "train.bin" and is_apart and asked.split != "train":
        raise UsageError(
            f"selects training texts, and {asked.val_path or f'the validation part of {asked.dataset}'} is scored whole",
            f"drop it{'' if asked.val_path else ', or add --split train'}",
            flag="--dataset-select",
            value=asked.dataset_select,
        )
    if asked.val_path and asked.split == "train":
        raise UsageError("is not scored with --split train", "drop one of them", flag="--val-path", value=asked.val_path)


def _open(asked: ScoreSettings, source: ModelSource) -> tuple[Dataset, Tokenizer | None]:
    """Return the dataset in the model's own tokens, and the tokenizer; token ids need no tokenizer."""
    from nntask.data import DataSpec, open_dataset

    has_own = source.has_tokenizer or bool(asked.tokenizer_path)
    tokenizer = source.tokenizer(asked.tokenizer_path) if has_own or asked.dataset != "train.bin" else None
    is_file = tokenizer is not None and tokenizer.name != "bytes"
    spec = DataSpec(
        dataset=asked.dataset,
        path=asked.dataset_path,
        val_path=asked.val_path,
        select=asked.dataset_select,
        tokenizer="bytes" if tokenizer is not None and not is_file else "auto",
        tokenizer_path=(asked.tokenizer_path or str(source.path)) if is_file else "",
        vocab_size=source.config.vocab_size,
    )
    return open_dataset(spec, lambda sentence: print(sentence, file=sys.stderr if asked.json else sys.stdout, flush=True)), tokenizer


def _split_of(asked: ScoreSettings, dataset: Dataset) -> tuple[str, TokenFile]:
    """Return the name of the scored part, and its tokens.

    Raises:
        UsageError: the dataset has no such part.
    """
    from nntask import UsageError
    from nntask.data import TokenFile

    assert isinstance(dataset.train, TokenFile)  # datasets of continuous texts have this class
    if asked.split == "train" or (asked.split == "auto" and dataset.validation is None):
        return "train", dataset.train
    if dataset.validation is None:
        raise UsageError(f"validation needs validation data and {dataset.name} brings none", "add --val-path, or use --split train", flag="--split")
    assert isinstance(dataset.validation, TokenFile)
    return "validation", dataset.validation
