"""Tokenizers, from text to token ids and back: a byte-level BPE trained on the data with `tokenizers`, or plain bytes if that package is missing.

Both cover every possible text, so encoding never fails. In a corpus each text is preceded by `begin_of_text` and followed by `end_of_text`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import DataError
from .foreign_tokenizer import TOKENIZER_FILE, open_tokenizer
from .seams import Seams
from .special_tokens import END_OF_TEXT, MASK, Companions, Special, special_of
from .token_rules import ConfinedRules, LocalRules, TokenRules

_NUM_BYTES: Final = 256


class ByteTokenizer:
    """A tokenizer whose ids 0 to 255 are bytes; a text ends with id 256 if the model's vocabulary has that id, else with a newline.

    Args:
        vocab_size: number of ids in the model's vocabulary.
        files: name -> content of the files to save with the tokenizer, such as a chat template.

    Attributes:
        vocab_size: largest id plus one.
        begin_of_text: id before every text, the end of the previous text.
        end_of_text: id after every text.
        special: special ids, and the files that declare them.

    Raises:
        DataError: the vocabulary has fewer than 256 ids.
    """

    name = "bytes"
    notes: tuple[str, ...] = ()
    terms = ""

    def __init__(self, vocab_size: int = _NUM_BYTES + 1, files: Mapping[str, str] | None = None) -> None:
        if vocab_size < _NUM_BYTES:
            raise DataError(f"plain bytes need a vocabulary of at least {_NUM_BYTES}, the model has {vocab_size}", "raise vocab_size in the config")
        self.vocab_size = min(vocab_size, _NUM_BYTES + 1)
        self.end_of_text = self.begin_of_text = _NUM_BYTES if vocab_size > _NUM_BYTES else ord("\n")
        self.special = Special(self.begin_of_text, (self.end_of_text,), files or {})

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[npt.NDArray[np.int64]]:
        """Return the (n,) UTF-8 bytes of each text; `special` has no effect."""
        return [np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.int64) for text in texts]

    def encode_long(self, pieces: Iterable[str]) -> Iterator[tuple[str, npt.NDArray[np.int64]]]:
        """Yield the pieces, and the (n,) bytes of each."""
        return ((piece, self.encode([piece])[0]) for piece in pieces)

    def word(self, token: int) -> str:
        """Return the number of a byte as text."""
        return str(token)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the bytes `ids`; ids above 255 are left out."""
        return bytes(i for i in ids if i < _NUM_BYTES).decode("utf-8", "replace")

    def byte_lengths(self) -> npt.NDArray[np.int64]:
        """Return (vocab_size,), 1 for each byte and 0 for the end of text."""
        lengths = np.ones(self.vocab_size, np.int64)
        lengths[_NUM_BYTES:] = 0
        return lengths

    def close(self) -> None:
        """Do nothing, since there is no process."""

    def save(self, directory: Path) -> None:
        """Write the companion files, such as a chat template; plain bytes need no vocabulary file."""
        _save_files(self.special, directory)


class BpeTokenizer:
    """A tokenizer of the `tokenizers` package.

    Args:
        inner: a `tokenizers.Tokenizer`; without its rules if these run in a sandboxed process.
        companions: companion files of the tokenizer; None for a tokenizer trained in this process.
        rules: rules that encode and decode; None for the rules of `inner`.
        where: directory of the tokenizer, for error messages.
        notes: notes about settings in the tokenizer's files that are ignored, a sentence each.
        terms: cache key of all that determines the tokens besides the bytes of the tokenizer's file; "" if nothing does.

    Attributes:
        inner: vocabulary of the tokenizer: words, ids, and special tokens.
        rules: rules that encode and decode.
        vocab_size: largest id plus one.
        special: special ids, as far as they are known, and the files that declare them.
    """

    name = "bpe"

    def __init__(
        self,
        inner: Any,
        companions: Companions | None = None,
        rules: TokenRules | None = None,
        *,
        where: object = "the tokenizer",
        notes: tuple[str, ...] = (),
        terms: str = "",
    ) -> None:
        self.inner, self.notes, self.terms = inner, notes, terms
        self.rules = rules or LocalRules(inner, where)
        self.vocab_size = max(inner.get_vocab().values(), default=-1) + 1  # ids need not be consecutive
        self.special = special_of(inner, companions or Companions())
        self._where = where

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[npt.NDArray[np.int64]]:
        """Return the (n,) token ids of each text; with `special`, including the ids of the template in tokenizer.json."""
        return self.rules.encode(texts, special=special)

    def encode_long(self, pieces: Iterable[str]) -> Iterator[tuple[str, npt.NDArray[np.int64]]]:
        """Encode a text that is read in pieces, with bounded memory if the text has seams (`Seams`).

        Yields:
            Chunks of the text, and the (n,) token ids of each; concatenated, they are the ids of the whole text.
        """
        waiting = iter(pieces)
        first = list(itertools.islice(waiting, 2))
        chunks = iter(first) if len(first) < 2 else self._seams.cut(itertools.chain(first, waiting))
        return ((chunk, self.encode([chunk])[0]) for chunk in chunks)

    @cached_property  # searches the whole vocabulary
    def _seams(self) -> Seams:
        return Seams.of(self.inner) if isinstance(self.rules, LocalRules) else Seams(None, False)

    def word(self, token: int) -> str:
        """Return the word of a token id in the vocabulary."""
        return str(self.inner.id_to_token(token))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, without special tokens; bytes that are not UTF-8 become replacement characters."""
        return self.rules.decode(ids)

    @property
    def begin_of_text(self) -> int:
        """Begin-of-text id if the tokenizer's template starts a text with it, otherwise the end-of-text id of the previous text.

        Raises:
            DataError: no file declares an end-of-text id.
        """
        bos = self.special.bos
        return self.end_of_text if bos is None or self.rules.around("")[0][:1] != [bos] else bos

    @property
    def end_of_text(self) -> int:
        """First of the ids that end a text.

        Raises:
            DataError: no file declares an end-of-text id.
        """
        if not self.special.eos:
            raise DataError(
                f"no file at {self._where} declares the token that ends a text",
                f"copy its model's tokenizer_config.json next to {TOKENIZER_FILE}, or "
                f'write one, for example {{"eos_token": "</s>"}} with a token that is there',
            )
        return self.special.eos[0]

    def byte_lengths(self) -> npt.NDArray[np.int64] | None:
        """Return (vocab_size,), the number of bytes per id, 0 for special tokens; None if it depends on neighbouring tokens.

        In the byte-level alphabet a character of a token is a byte.
        """
        decoder = self.rules.sections["decoder"]
        if decoder is None or decoder["type"] != "ByteLevel":  # the byte-level alphabet of GPT-2 (Radford et al., 2019)
            return None
        lengths = np.zeros(self.vocab_size, np.int64)
        added = self.inner.get_added_tokens_decoder()
        for token, index in self.inner.get_vocab().items():
            lengths[index] = len(token) if index not in added else 0 if added[index].special else len(token.encode("utf-8"))
        return lengths

    def content(self) -> str:
        """Return the text of the tokenizer.json."""
        return self.rules.content if isinstance(self.rules, ConfinedRules) else str(self.inner.to_str(pretty=False))

    def close(self) -> None:
        """End the process of sandboxed rules, even while it encodes a text."""
        self.rules.close()

    def save(self, directory: Path) -> None:
        """Write tokenizer.json and its companion files to `directory`."""
        (directory / TOKENIZER_FILE).write_text(self.content(), encoding="utf-8")  # save() cannot write to a path that is not UTF-8
        _save_files(self.special, directory)


Tokenizer = ByteTokenizer | BpeTokenizer
"""A tokenizer of a model."""


def _save_files(special: Special, directory: Path) -> None:
    for name, content in special.files.items():
        (directory / name).write_text(content, encoding="utf-8")


def load_tokenizer(path: str | os.PathLike[str], *, has_template: bool = False) -> BpeTokenizer:
    """Load a tokenizer.

    Args:
        path: a tokenizer.json, its directory, a directory with vocab.json and merges.txt or with BERT's vocab.txt, or a GGUF file.
        has_template: whether another chat template replaces the tokenizer's own, which then need not be readable.

    Raises:
        DataError: a file is missing, broken or larger than any tokenizer's, the files contradict each other, or `tokenizers` is not installed.
    """
    opened = open_tokenizer(Path(path), has_template=has_template)
    return BpeTokenizer(opened.inner, opened.companions, opened.rules, where=opened.directory, notes=opened.notes, terms=opened.terms)


def train_bpe(texts: Iterable[str], vocab_size: int, *, has_mask: bool = False, num_free: int = 0) -> BpeTokenizer:
    """Train a byte-level BPE of at most `vocab_size - num_free` ids, with id 0 as the end of text. Equal texts give equal ids.

    Args:
        texts: texts to train on.
        vocab_size: number of ids in the model's vocabulary.
        has_mask: whether id 1 becomes a mask token.
        num_free: number of ids at the end of the vocabulary to reserve for sentinels.

    Raises:
        DataError: `vocab_size - num_free` is below 257, the number of bytes plus the end-of-text id.
    """
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if vocab_size - num_free <= _NUM_BYTES:
        sentinels = f", {num_free} of them sentinels" if num_free else ""
        raise DataError(
            f"a byte-level BPE needs a vocabulary of at least {_NUM_BYTES + 1 + num_free}{sentinels}, the model has {vocab_size}",
            f"raise vocab_size in the config{' or use --tokenizer bytes' if vocab_size >= _NUM_BYTES else ''}",
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
