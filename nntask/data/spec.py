"""The user's choice of data and tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from .objectives import Objective

SplitName = Literal["training", "validation"]
SPLITS: Final[tuple[SplitName, SplitName]] = ("training", "validation")
"""Names of splits in messages and findings."""


@dataclass(frozen=True, slots=True)
class DataSpec:
    """The user's choice of dataset and tokenizer.

    Args:
        dataset: "stdlib", "text", "WikiText-103", "train.bin", "jsonl" or "images".
        path: for "text", "jsonl" and "images", a file or directory; for "WikiText-103", a directory, or "" for one in the cache; for "train.bin", the
            file of token ids or the directory with a train.bin.
        val_path: validation text or token ids; "" for the validation split of the dataset, if it has one.
        select: number of texts to use, from the first (rows of WikiText, sequences of a token file); -1 for all.
        tokenizer: "auto", "bpe", "bytes", or the name of a tokenizer on the Hub, which may be in `tokenizer_path` already.
        tokenizer_path: directory with a tokenizer.json; "" to train a tokenizer on the text.
        vocab_size: number of ids in the model's vocabulary.
        objective: training objective, with the sizes of sequences.
    """

    dataset: str = "stdlib"
    path: str = ""
    val_path: str = ""
    select: int = -1
    tokenizer: str = "auto"
    tokenizer_path: str = ""
    vocab_size: int = 4096
    objective: Objective = field(default_factory=Objective)

    def name_of(self, split: SplitName) -> str:
        """Return the name of a split in messages, which contains the flag that names its data."""
        if split == "validation" and self.val_path:
            return f"--val-path {self.val_path}"
        return f"the {split} split of " + (f"--dataset-path {self.path}" if self.path else f"--dataset {self.dataset}")
