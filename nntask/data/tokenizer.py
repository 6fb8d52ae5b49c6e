"""Text to token ids and back: a byte-level BPE that is trained on the data with `tokenizers`, or plain bytes where that package is missing.

Both cover every possible text, so encoding never fails. In a corpus each text is preceded by `begin_of_text` and followed by `end_of_text`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import DataError
from .foreign_tokenizer import TOKENIZER_FILE, open_tokenizer
from .seams import Seams
from .special_tokens import END_OF_TEXT, MASK, Companions, Special, special_of
from .token_rules import ConfinedRules, LocalRules, TokenRules

_NUM_BYTES: Final = 256


class Tokenizer(Protocol):
    """The interface of tokenizers.

    Attributes:
        name: "bytes" or "bpe".
        vocab_size: the largest id plus one.
        notes: what its files say and is not followed, a sentence each.
        terms: what its tokens follow from besides the bytes of its file; "" if nothing.
        special: the ids around texts, as far as they are known, and the files that declare them.
    """

    name: str
    vocab_size: int
    notes: tuple[str, ...]
    terms: str
    special: Special

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

    def encode_long(self, pieces: Iterable[str]) -> Iterator[tuple[str, npt.NDArray[np.int64]]]:
        """Encode a text that is read in pieces, with bounded memory where it can be cut (`Seams`).

        Yields:
            Chunks of the text, and the (n,) token ids of each; one after another they are those of the whole text.
        """

    def word(self, token: int) -> str:
        """The token of an id as it is written in a text."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; bytes that are not UTF-8 become replacement characters."""

    def byte_lengths(self) -> npt.NDArray[np.int64] | None:
        """(vocab_size,) number of bytes of text per id, 0 for special tokens; None where the number depends on neighbouring tokens."""

    def close(self) -> None:
        """End a process that the tokenizer has; texts that are encoded there fail."""

    def save(self, directory: Path) -> None:
        """Write the files that `load_tokenizer` reads to `directory`."""


class ByteTokenizer:
    """A tokenizer whose ids 0 to 255 are bytes; a text ends with id 256 if the model's vocabulary has that id, else with a newline.

    Args:
        vocab_size: number of ids of the model.
        files: name -> content of the files that are kept with it: a chat template.

    Raises:
        DataError: the model has fewer than 256 ids.
    """

    name = "bytes"
    notes: tuple[str, ...] = ()
    terms = ""

    def __init__(self, vocab_size: int = _NUM_BYTES + 1, files: Mapping[str, str] | None = None) -> None:
        if vocab_size < _NUM_BYTES:
            raise DataError(f"plain bytes need a vocabulary of at least {_NUM_BYTES}, the model has {vocab_size}; raise vocab_size in the config")
        self.vocab_size = min(vocab_size, _NUM_BYTES + 1)
        self.end_of_text = self.begin_of_text = _NUM_BYTES if vocab_size > _NUM_BYTES else ord("\n")
        self.special = Special(self.begin_of_text, (self.end_of_text,), files or {})

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[npt.NDArray[np.int64]]:
        """(n,) bytes of each text in UTF-8; `special` has no effect."""
        return [np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.int64) for text in texts]

    def encode_long(self, pieces: Iterable[str]) -> Iterator[tuple[str, npt.NDArray[np.int64]]]:
        """The pieces, and the (n,) bytes of each."""
        return ((piece, self.encode([piece])[0]) for piece in pieces)

    def word(self, token: int) -> str:
        """The number of a byte."""
        return str(token)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the bytes `ids`; ids beyond 255 are left out."""
        return bytes(i for i in ids if i < _NUM_BYTES).decode("utf-8", "replace")

    def byte_lengths(self) -> npt.NDArray[np.int64]:
        """(vocab_size,) ones, and 0 for the end of text."""
        lengths = np.ones(self.vocab_size, np.int64)
        lengths[_NUM_BYTES:] = 0
        return lengths

    def close(self) -> None:
        """There is no process."""

    def save(self, directory: Path) -> None:
        """Write a chat template if there is one; plain bytes need no table."""
        _save_files(self.special, directory)


class BpeTokenizer:
    """A tokenizer of the `tokenizers` package.

    Args:
        inner: a `tokenizers.Tokenizer`; of a tokenizer with confined rules, its tokens alone.
        beside: the files beside it; none for a tokenizer that was trained in this process.
        rules: what makes ids of texts and texts of ids; those of `inner` if None.
        where: its directory, for messages.
        notes, terms: see `Tokenizer`.

    Attributes:
        inner: the tokenizer's tokens: words, ids, which are special.
        rules: see above.
    """

    name = "bpe"

    def __init__(
        self,
        inner: Any,
        beside: Companions | None = None,
        rules: TokenRules | None = None,
        *,
        where: object = "the tokenizer",
        notes: tuple[str, ...] = (),
        terms: str = "",
    ) -> None:
        self.inner, self.notes, self.terms = inner, notes, terms
        self.rules = rules or LocalRules(inner, where)
        self.vocab_size = max(inner.get_vocab().values(), default=-1) + 1  # ids need not be consecutive
        self.special = special_of(inner, beside or Companions())
        self._where = where

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[npt.NDArray[np.int64]]:
        """(n,) token ids of each text; with `special`, including the ids of the template in tokenizer.json."""
        return self.rules.encode(texts, special=special)

    def encode_long(self, pieces: Iterable[str]) -> Iterator[tuple[str, npt.NDArray[np.int64]]]:
        """Chunks of a text that end at seams, or the whole text if it is one piece, and the (n,) token ids of each."""
        waiting = iter(pieces)
        first = list(itertools.islice(waiting, 2))
        chunks = iter(first) if len(first) < 2 else self._seams().cut(itertools.chain(first, waiting))
        return ((chunk, self.encode([chunk])[0]) for chunk in chunks)

    def _seams(self) -> Seams:
        return Seams.of(self.inner) if isinstance(self.rules, LocalRules) else Seams(None, False)

    def word(self, token: int) -> str:
        """The token of an id, as the vocabulary has it."""
        return str(self.inner.id_to_token(token))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens left out."""
        return self.rules.decode(ids)

    @property
    def begin_of_text(self) -> int:
        """The begin-of-text id if the tokenizer's template starts a text with it, else the end-of-text id of the previous text."""
        bos = self.special.bos
        return self.end_of_text if bos is None or self.rules.around("")[0][:1] != [bos] else bos

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
        decoder = self.rules.sections["decoder"]
        if decoder is None or decoder["type"] != "ByteLevel":  # the byte-level alphabet of GPT-2 (Radford et al., 2019)
            return None
        lengths = np.zeros(self.vocab_size, np.int64)
        added = self.inner.get_added_tokens_decoder()
        for token, index in self.inner.get_vocab().items():
            lengths[index] = len(token) if index not in added else 0 if added[index].special else len(token.encode("utf-8"))
        return lengths

    def content(self) -> str:
        """The text of its tokenizer.json."""
        return self.rules.content if isinstance(self.rules, ConfinedRules) else str(self.inner.to_str(pretty=False))

    def close(self) -> None:
        """End the process of confined rules, also under a text."""
        self.rules.close()

    def save(self, directory: Path) -> None:
        """Write tokenizer.json and its companion files to `directory`."""
        (directory / TOKENIZER_FILE).write_text(self.content(), encoding="utf-8")  # save() takes no path that is not UTF-8
        _save_files(self.special, directory)


def _save_files(special: Special, directory: Path) -> None:
    for name, content in special.files.items():
        (directory / name).write_text(content, encoding="utf-8")


def load_tokenizer(path: str | os.PathLike[str], *, has_template: bool = False) -> Tokenizer:
    """The tokenizer in a tokenizer.json.

    Args:
        path: the file, its directory, a directory with vocab.json and merges.txt or with BERT's vocab.txt, or a GGUF file.
        has_template: whether another chat template replaces its own, which then need not be readable.

    Raises:
        DataError: a file is missing, broken or larger than any tokenizer's, the files contradict each other, or `tokenizers` is not installed.
    """
    found = open_tokenizer(Path(path), has_template=has_template)
    return BpeTokenizer(found.inner, found.beside, found.rules, where=found.directory, notes=found.notes, terms=found.terms)


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
