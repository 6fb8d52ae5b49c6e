"""Text of any source as files that any machine trains from: train.bin, val.bin and tokenizer.json, in a new directory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import StorageError, UsageError
from ..writing import written_aside
from .dataset import DataSpec, check_spec, check_vocabulary, corpus_of, located, tokenizer_of, write_tokens


@dataclass(frozen=True, slots=True)
class Prepared:
    """What was written: tokens for training and for validation, and the tokenizer's name and number of ids."""

    num_train: int
    num_validation: int
    tokenizer: str
    vocab_size: int


def prepare(spec: DataSpec, output: Path, report: Callable[[str], None] = lambda sentence: None) -> Prepared:
    """Tokenise what `spec` names into the directory `output`, which appears when it is whole (`nntask.writing`).

    Raises:
        UsageError: `output` exists and is not empty, or `spec` names token ids.
        DataError: the data is missing or broken, or the tokenizer has more ids than `spec` allows.
        StorageError: the disk is full or failed.
    """
    if spec.dataset == "train.bin":
        raise UsageError("--dataset train.bin is prepared already; use it with nntask train --dataset train.bin")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"--output {output} exists; give a new directory")
    check_spec(spec)
    spec = located(spec)
    corpus = corpus_of(spec)
    try:
        with written_aside(output) as new:
            new.mkdir()
            tokenizer = tokenizer_of(spec, corpus, new, report)
            check_vocabulary(tokenizer, spec)
            tokenizer.save(new)
            num_train = write_tokens(corpus.train, new / "train.bin", tokenizer, report)
            num_validation = write_tokens(corpus.validation, new / "val.bin", tokenizer, report) if corpus.validation else 0
    except OSError as error:
        raise StorageError(f"cannot write {output}: {error.strerror or error}; make room or name another --output") from error
    return Prepared(num_train, num_validation, tokenizer.name, tokenizer.vocab_size)
