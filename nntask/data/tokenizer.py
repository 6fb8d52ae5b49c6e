"""Text to token ids and back: a byte-level BPE trained on the spot with `tokenizers`, or plain bytes where that package is missing.

Both cover every possible text, so encoding never fails. Texts of a corpus are joined by `end_of_text`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import DataError

END_OF_TEXT: Final = "<|endoftext|>"
FILE_NAME: Final = "tokenizer.json"
_NUM_BYTES: Final = 256


class Tokenizer(Protocol):
    """What the rest of nntask knows of a tokenizer."""

    name: str
    vocab_size: int
    end_of_text: int

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[npt.NDArray[np.int64]]:
        """Token ids of each text; with `special`, also those that the tokenizer itself puts around a text."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; bytes that are not UTF-8 become replacement characters."""

    def byte_lengths(self) -> npt.NDArray[np.int64]:
        """(vocab_size,) bytes of text that each id stands for; 0 for special tokens."""

    def save(self, directory: Path) -> None:
        """Write what `load_tokenizer` needs to `directory`."""


class ByteTokenizer:
    """Every byte is a token; id 256 ends a text where the vocabulary has room for it, a newline where not."""

    name = "bytes"

    def __init__(self, vocab_size: int = _NUM_BYTES + 1) -> None:
        if vocab_size < _NUM_BYTES:
            raise DataError(f"plain bytes need a vocabulary of at least {_NUM_BYTES}, the model has {vocab_size}; raise vocab_size in the config")
        self.vocab_size = min(vocab_size, _NUM_BYTES + 1)
        self.end_of_text = _NUM_BYTES if vocab_size > _NUM_BYTES else ord("\n")

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[npt.NDArray[np.int64]]:
        """Bytes of each text in UTF-8; nothing is put around them."""
        return [np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.int64) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the bytes `ids`; ids beyond 255 are left out."""
        return bytes(i for i in ids if i < _NUM_BYTES).decode("utf-8", "replace")

    def byte_lengths(self) -> npt.NDArray[np.int64]:
        """(vocab_size,) ones, and 0 for the end of text."""
        lengths = np.ones(self.vocab_size, np.int64)
        lengths[_NUM_BYTES:] = 0
        return lengths

    def save(self, directory: Path) -> None:
        """Nothing to write: bytes need no table."""


class BpeTokenizer:
    """A byte-level BPE held by the `tokenizers` package."""

    name = "bpe"

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.vocab_size = int(inner.get_vocab_size())
        end = inner.token_to_id(END_OF_TEXT)
        self.end_of_text = int(end) if end is not None else 0

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[npt.NDArray[np.int64]]:
        """Token ids of each text; with `special`, as the file's own template has them."""
        return [np.array(e.ids, np.int64) for e in self.inner.encode_batch_fast(list(texts), add_special_tokens=special)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens left out."""
        return str(self.inner.decode(list(ids), skip_special_tokens=True))

    def byte_lengths(self) -> npt.NDArray[np.int64]:
        """(vocab_size,) bytes: in the byte-level alphabet one character of a token stands for one byte."""
        lengths = np.zeros(self.vocab_size, np.int64)
        special = set(self.inner.get_added_tokens_decoder())
        for token, index in self.inner.get_vocab().items():
            lengths[index] = 0 if index in special else len(token)
        return lengths

    def save(self, directory: Path) -> None:
        """Write tokenizer.json."""
        self.inner.save(str(directory / FILE_NAME), pretty=False)


def have_tokenizers() -> bool:
    """Whether the `tokenizers` package is installed."""
    return importlib.util.find_spec("tokenizers") is not None


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer in a directory with tokenizer.json, or in such a file itself.

    Raises:
        DataError: there is none, it is broken, or `tokenizers` is not installed.
    """
    file = Path(path)
    file = file / FILE_NAME if file.is_dir() else file
    if not file.is_file():
        raise DataError(f"no {FILE_NAME} at {file}; give its directory with --tokenizer-path, or drop the flag to train a tokenizer on the data")
    if not have_tokenizers():
        raise DataError(f"reading {file} needs the tokenizers package; pip install tokenizers, or use --tokenizer bytes")
    from tokenizers import Tokenizer as Inner

    try:
        return BpeTokenizer(Inner.from_file(str(file)))
    except Exception as error:  # the package raises bare Exception for any broken file
        raise DataError(f"{file} is not a tokenizer file: {error}") from None


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most `vocab_size` ids; the end of text is id 0. The same texts give the same ids.

    Raises:
        DataError: the vocabulary has no room for the 256 bytes and the end of text.
    """
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if vocab_size <= _NUM_BYTES:
        raise DataError(
            f"a byte-level BPE needs a vocabulary of at least {_NUM_BYTES + 1}, the model has {vocab_size}; "
            "raise vocab_size in the config or use --tokenizer bytes"
        )
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer=trainer)
    return BpeTokenizer(inner)
