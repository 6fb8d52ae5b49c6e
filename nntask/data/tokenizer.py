"""Text to token ids and back: a byte-level BPE that is trained on the data with `tokenizers`, or plain bytes where that package is missing.

Both cover every possible text, so encoding never fails. In a corpus each text is preceded by `begin_of_text` and followed by `end_of_text`.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import DataError
from ..gguf.model_file import is_gguf, open_gguf
from ..io.json_file import LARGEST_NBYTES
from .special_tokens import END_OF_TEXT, MASK, Special, read_special

TOKENIZER_FILE: Final = "tokenizer.json"
_NUM_BYTES: Final = 256


class Tokenizer(Protocol):
    """The interface of tokenizers.

    Attributes:
        name: "bytes" or "bpe".
        vocab_size: the largest id plus one.
    """

    name: str
    vocab_size: int

    @property
    def special(self) -> Special:
        """The ids around texts, as far as they are known, and the files that declare them."""

    @property
    def begin_of_text(self) -> int:
        """The id before every text: a begin-of-text id, or the end-of-text id of the previous text.

        Raises:
            DataError: no file declares the end-of-text id.
        """

    @property
    def end_of_text(self) -> int:
        """The id behind every text.

        Raises:
            DataError: no file declares the end-of-text id.
        """

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[npt.NDArray[np.int64]]:
        """(n,) token ids of each text; with `special`, including the ids that the tokenizer's template puts around a text."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; bytes that are not UTF-8 become replacement characters."""

    def byte_lengths(self) -> npt.NDArray[np.int64] | None:
        """(vocab_size,) number of bytes of text per id, 0 for special tokens; None where the number depends on neighbouring tokens."""

    def save(self, directory: Path) -> None:
        """Write the files that `load_tokenizer` reads to `directory`."""


class ByteTokenizer:
    """A tokenizer whose ids 0 to 255 are bytes; a text ends with id 256 if the model's vocabulary has that id, else with a newline.

    Args:
        vocab_size: number of ids of the model.

    Raises:
        DataError: the model has fewer than 256 ids.
    """

    name = "bytes"

    def __init__(self, vocab_size: int = _NUM_BYTES + 1) -> None:
        if vocab_size < _NUM_BYTES:
            raise DataError(f"plain bytes need a vocabulary of at least {_NUM_BYTES}, the model has {vocab_size}; raise vocab_size in the config")
        self.vocab_size = min(vocab_size, _NUM_BYTES + 1)
        self.end_of_text = self.begin_of_text = _NUM_BYTES if vocab_size > _NUM_BYTES else ord("\n")
        self.special = Special(self.begin_of_text, (self.end_of_text,))

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[npt.NDArray[np.int64]]:
        """(n,) bytes of each text in UTF-8; `special` has no effect."""
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
        """Write no file: plain bytes need no table."""


class BpeTokenizer:
    """A tokenizer of the `tokenizers` package.

    Args:
        inner: a `tokenizers.Tokenizer`.
        directory: the directory with its companion files; None for a tokenizer that was trained in this process.

    Raises:
        DataError: a companion file is broken.
    """

    name = "bpe"

    def __init__(self, inner: Any, directory: Path | None = None) -> None:
        self.inner = inner
        self.vocab_size = max(inner.get_vocab().values(), default=-1) + 1  # ids need not be consecutive
        self.special = read_special(directory, inner)
        self._where = directory or "the tokenizer"

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[npt.NDArray[np.int64]]:
        """(n,) token ids of each text; with `special`, including the ids of the template in tokenizer.json."""
        return [np.array(e.ids, np.int64) for e in self.inner.encode_batch_fast(list(texts), add_special_tokens=special)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens left out."""
        return str(self.inner.decode(list(ids), skip_special_tokens=True))

    @property
    def begin_of_text(self) -> int:
        """The begin-of-text id if the tokenizer's template starts a text with it, else the end-of-text id of the previous text."""
        bos = self.special.bos
        return self.end_of_text if bos is None or self.inner.encode("", add_special_tokens=True).ids[:1] != [bos] else bos

    @property
    def end_of_text(self) -> int:
        """The first of the ids that end a text.

        Raises:
            DataError: no file declares an end-of-text id.
        """
        if not self.special.eos:
            raise DataError(
                f"nothing at {self._where} says which token ends a text; put its model's tokenizer_config.json beside {TOKENIZER_FILE}, or "
                f'write one, for example {{"eos_token": "</s>"}} with a token that is there'
            )
        return self.special.eos[0]

    def byte_lengths(self) -> npt.NDArray[np.int64] | None:
        """(vocab_size,) number of bytes per id: in the byte-level alphabet, one character of a token is one byte. None for other alphabets."""
        if not _is_byte_level(self.inner):
            return None
        lengths = np.zeros(self.vocab_size, np.int64)
        added = self.inner.get_added_tokens_decoder()
        for token, index in self.inner.get_vocab().items():
            lengths[index] = len(token) if index not in added else 0 if added[index].special else len(token.encode("utf-8"))
        return lengths

    def save(self, directory: Path) -> None:
        """Write tokenizer.json and its companion files to `directory`."""
        self.inner.save(str(directory / TOKENIZER_FILE), pretty=False)
        for name, content in self.special.files.items():
            (directory / name).write_text(content, encoding="utf-8")


def _is_byte_level(inner: Any) -> bool:
    """Whether the tokens are written in the byte-level alphabet of GPT-2 (Radford et al., 2019)."""
    decoder = None if inner.decoder is None else json.loads(inner.decoder.__getstate__())
    return decoder is not None and decoder["type"] == "ByteLevel"


def have_tokenizers() -> bool:
    """Whether the `tokenizers` package is installed."""
    return importlib.util.find_spec("tokenizers") is not None


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer in a tokenizer.json.

    Args:
        path: the file, its directory, or a GGUF file.

    Raises:
        DataError: the file is missing, broken or larger than any tokenizer's, or `tokenizers` is not installed.
    """
    file = Path(path)
    opened = open_gguf(file) if is_gguf(file) else None
    if opened is not None and opened.untranslated:
        raise DataError(f"the tokenizer in {file} {opened.untranslated}; name its tokenizer.json with --tokenizer-path DIR, or use another file")
    inside = None if opened is None else opened.files.get(TOKENIZER_FILE)
    file = file / TOKENIZER_FILE if file.is_dir() else file
    if not file.is_file() or (inside is None and opened is not None):
        raise DataError(f"no {TOKENIZER_FILE} at {file}; give its directory with --tokenizer-path, or drop the flag to train a tokenizer on the data")
    if not have_tokenizers():
        raise DataError(f"reading {file} needs the tokenizers package; pip install -e '.[text]', or use --tokenizer bytes")
    from tokenizers import Tokenizer as Inner

    if inside is None and (size := file.stat().st_size) > LARGEST_NBYTES:
        raise DataError(f"{file} has {size:,} bytes, and a tokenizer file at most {LARGEST_NBYTES:,}; copy it again, or use another tokenizer")
    try:
        inner = Inner.from_file(str(file)) if inside is None else Inner.from_str(inside)
    except Exception as error:  # the package raises bare Exception for any broken file
        raise DataError(f"{file} is not a tokenizer file: {error}; copy it again") from None
    return BpeTokenizer(inner, file.parent if inside is None else file)


def stored_tokenizer(path: Path) -> bytes:
    """The content of a tokenizer.json: the file itself, that of a directory, or that of a GGUF file."""
    if is_gguf(path):
        return open_gguf(path).files[TOKENIZER_FILE].encode()
    return (path / TOKENIZER_FILE if path.is_dir() else path).read_bytes()


def has_tokenizer(path: Path) -> bool:
    """Whether a model directory or a GGUF file comes with a tokenizer."""
    return TOKENIZER_FILE in open_gguf(path).files if is_gguf(path) else (path / TOKENIZER_FILE).is_file()


def train_bpe(texts: Iterable[str], vocab_size: int, *, has_mask: bool = False, num_free: int = 0) -> Tokenizer:
    """Train a byte-level BPE of at most `vocab_size - num_free` ids, with id 0 as the end of text. Equal texts give equal ids.

    Args:
        texts: what it learns from.
        vocab_size: ids of the model.
        has_mask: whether id 1 is a mask token.
        num_free: ids at the end of the vocabulary that stay free for sentinels.

    Raises:
        DataError: `vocab_size - num_free` is below 257, the number of bytes plus the end-of-text id.
    """
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if vocab_size - num_free <= _NUM_BYTES:
        beside = f", {num_free} of them sentinels" if num_free else ""
        raise DataError(
            f"a byte-level BPE needs a vocabulary of at least {_NUM_BYTES + 1 + num_free}{beside}, the model has {vocab_size}; "
            f"raise vocab_size in the config{' or use --tokenizer bytes' if vocab_size >= _NUM_BYTES else ''}"
        )
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - num_free,
        special_tokens=[END_OF_TEXT, MASK] if has_mask else [END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer=trainer)
    return BpeTokenizer(inner)
