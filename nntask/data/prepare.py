"""Export of tokenised datasets as portable directories with train.bin, val.bin and tokenizer.json, from text of any source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import StorageError, UsageError
from ..io.atomic_write import written_aside
from ..io.writable import check_writable
from .dataset import check_spec, corpus_of, with_tokenizer_path
from .images import IMAGES
from .spec import DataSpec
from .tokenized import findings_of, tokenizer_of, write_tokens


@dataclass(frozen=True, slots=True)
class TokenizedDataset:
    """Summary of a written directory of tokens.

    Args:
        num_train: number of training tokens.
        num_validation: number of validation tokens.
        tokenizer: name of the tokenizer.
        vocab_size: number of ids of the tokenizer.
        notes: notes about ignored settings of the tokenizer's files and about replaced bytes of texts, a sentence each.
    """

    num_train: int
    num_validation: int
    tokenizer: str
    vocab_size: int
    notes: tuple[str, ...] = ()


def tokenize_dataset(spec: DataSpec, output: Path, report: Callable[[str], None] = lambda sentence: None) -> TokenizedDataset:
    """Tokenise a dataset into a new directory, which appears when it is complete (`nntask.io.atomic_write`).

    Args:
        spec: choice of dataset and tokenizer.
        output: directory to write.
        report: function called with a sentence before each piece of work that takes seconds.

    Raises:
        UsageError: `output` exists and is not empty, or cannot be written, or `spec` names a token file or images.
        DataError: the data are missing or broken, or a text has a token outside the vocabulary of `spec`.
        StorageError: the disk is full or failed.
    """
    if spec.dataset == "train.bin":
        raise UsageError("is already prepared", "use it with nntask train --dataset train.bin", flag="--dataset", value="train.bin")
    if spec.dataset == IMAGES:
        raise UsageError("is read in place", "use it with nntask train --dataset images", flag="--dataset", value="images")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError("exists", "give a new directory", flag="--output", value=output)
    check_writable(output, "--output")
    check_spec(spec)
    spec = with_tokenizer_path(spec)
    corpus = corpus_of(spec)
    for sentence in (*corpus.sentences, *(finding.sentence for finding in corpus.findings)):
        report(sentence)
    try:
        with written_aside(output) as new:
            new.mkdir()
            tokenizer = tokenizer_of(spec, corpus, report)
            tokenizer.save(new)
            counts = {"train.bin": 0, "val.bin": 0}
            for name, texts in zip(counts, (corpus.train, corpus.validation), strict=True):
                if texts or name == "train.bin":
                    counts[name] = write_tokens(texts, new / name, tokenizer, spec.vocab_size, report, f"to {output / name}")
    except BrokenPipeError:  # of the reader of a report
        raise
    except OSError as error:
        raise StorageError(f"cannot write {output}: {error.strerror or error}", "make room or name another --output") from error
    findings = tuple(each for name in counts for each in findings_of(output / name))
    return TokenizedDataset(
        counts["train.bin"], counts["val.bin"], tokenizer.name, tokenizer.vocab_size, (*tokenizer.notes, *(each.sentence for each in findings))
    )
