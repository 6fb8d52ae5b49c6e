"""Streaming of tokens as text: whole characters only, spelled as in the whole text; and the bytes and offsets of single tokens."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final

from ..data.byte_letters import byte_letters
from ..data.tokenizer import Tokenizer

HALF: Final = "\N{REPLACEMENT CHARACTER}"
"""Replacement for bytes that form no character."""
_SPACE: Final = "\N{LOWER ONE EIGHTH BLOCK}"
"""SentencePiece's sign for a space."""
_BYTE: Final = re.compile("<0x([0-9A-F]{2})>")
_NUM_BYTES: Final = 256


class Spelling:
    """Spelling of one growing text.

    Args:
        decode: function from ids to text.
        before: ids in front of the text, which are not spelled but decide how the first ids are spelled.

    Attributes:
        ids: ids of the text so far, after those of `before`; the caller appends new ones.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int] = ()) -> None:
        self._decode, self.ids = decode, list(before)
        self._from, self._shown = 0, len(self.ids)  # ids before _shown are spelled; those from _from on are the context of the next id

    def news(self, *, is_last: bool = False) -> str:
        """Return the characters of ids that are not spelled yet. An incomplete character waits for its other bytes unless `is_last`."""
        text = self._decode(self.ids[self._from :])
        if text.endswith(HALF) and not is_last:
            return ""
        found = text[len(self._decode(self.ids[self._from : self._shown])) :]
        if found:  # otherwise the same context is still needed
            self._from, self._shown = self._shown, len(self.ids)
        return found

    def counts(self, ids: Sequence[int], goes_on: Callable[[int], bool]) -> list[int]:
        """Return the number of certain characters before each of `ids`, which are appended to the text.

        Args:
            goes_on: predicate on tokens: if it is true, nothing is spelled before the token, so that runs of such tokens are spelled as a whole.
        """
        certain_counts, count, was_inside = [], 0, False
        for token in ids:
            is_inside = goes_on(token)
            count += 0 if was_inside and is_inside else len(self.news())
            was_inside = is_inside
            certain_counts.append(count)
            self.ids.append(token)
        return certain_counts


class TokenBytes:
    """Bytes of single tokens, independent of their neighbours.

    The bytes of all tokens of a text are the text in UTF-8, except for special tokens, which texts leave out, and a first space that SentencePiece
    added.

    Args:
        tokenizer: byte-level tokenizer, one of SentencePiece's kind (with ``<0xE2>`` for a byte), or plain bytes. A token of any other kind has the
            bytes to which it is decoded.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, rules = tokenizer, getattr(tokenizer, "rules", None)
        inner = getattr(tokenizer, "inner", None)
        self._inner, self._kinds = inner, frozenset[str]()
        self._added: Mapping[int, str] = {}
        self._left_out = frozenset[int]()
        if inner is not None and rules is not None:
            added = inner.get_added_tokens_decoder()
            self._added = {index: token.content for index, token in added.items()}
            self._left_out = frozenset(index for index, token in added.items() if token.special)
            decoder = rules.sections["decoder"]
            self._kinds = frozenset() if decoder is None else frozenset(_kind_of(each) for each in _flat(decoder))

    def is_left_out(self, token: int) -> bool:
        """Return whether texts leave a token out."""
        return token in self._left_out

    def of(self, token: int) -> bytes:
        """Return the bytes of a token; none for an id that is no token."""
        if self._inner is None:
            return bytes([token]) if token < _NUM_BYTES else b""
        if token in self._added:
            return self._added[token].encode()
        word = self._inner.id_to_token(token)
        if word is None:
            return b""
        if "ByteLevel" in self._kinds and all(letter in _bytes_of_letters() for letter in word):
            return bytes(_bytes_of_letters()[letter] for letter in word)
        if "ByteFallback" in self._kinds and (match := _BYTE.fullmatch(word)):
            return bytes([int(match[1], 16)])
        if "spaces" in self._kinds:
            return str(word).replace(_SPACE, " ").encode()
        return self._tokenizer.decode([token]).encode()

    def word(self, token: int) -> str:
        """Return a token as text. Bytes that are no text are escaped in OpenAI's notation, so that different tokens look different."""
        found = self.of(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{each:02x}" for each in found)

    def byte(self, token: int) -> int | None:
        """Return the byte of a byte token of SentencePiece; None for other tokens."""
        if self._inner is None or "ByteFallback" not in self._kinds or token in self._added:
            return None
        found = _BYTE.fullmatch(self._inner.id_to_token(token) or "")
        return None if found is None else int(found[1], 16)

    def is_cut(self, run: bytes) -> bool:
        """Return whether a text that begins with the bytes `run` loses its first byte, a space, in decoding."""
        if self._inner is None or not run.startswith(b" ") or not _is_text(run):
            return False
        return self._tokenizer.decode([self._inner.token_to_id("<0x20>")]) == ""

    def goes_on(self, token: int) -> bool:
        """Return whether a run of byte tokens continues with a token: a byte token, or one that texts leave out."""
        return self.byte(token) is not None or self.is_left_out(token) or not self.of(token)


class TokenOffsets:
    """Offsets of the tokens of a text: the position of the first character that begins in a token, or of the one that contains its bytes.

    A broken character is usually decoded to one replacement character (U+FFFD). If a run of SentencePiece's byte tokens has anything but whole
    characters, each byte is decoded to a replacement character of its own. So an offset in such a run is unknown until its character is shown or the
    run ends. Characters already shown do not change, and later bytes have the positions that they have in the run.

    Args:
        words: bytes of tokens.
        before: ids in front of the text, with which `Spelling` began.
        is_whole: whether runs are spelled as a whole instead of token by token.
    """

    def __init__(self, words: TokenBytes, before: Sequence[int] = (), *, is_whole: bool = False) -> None:
        self._words, self._is_whole = words, is_whole
        self._count, self._half, self._waits = 0, b"", False
        self._told, self._run, self._certain = b"", b"", 0  # bytes of a run that are shown; all its bytes; characters before the others
        self._begins = True  # whether the shown bytes begin the text that is decoded, so that a first space is left out
        self._waiting = list[int]()  # number of bytes of the run in front of each token without an offset
        for token in before:
            if (byte := words.byte(token)) is not None:
                self._told += bytes([byte])
            elif not words.goes_on(token):
                self._told, self._begins = b"", False
        self._run = self._told

    def add(self, token: int, certain: int) -> list[int]:
        """Add a token and return the offsets that become known, of the first tokens that had none.

        Args:
            certain: number of characters of all tokens before, without an incomplete last one.
        """
        byte = self._words.byte(token)
        if byte is None and not (self._run and self._words.goes_on(token)):
            offsets = [*self.end(), self._offset_of(token, max(certain, self._offset_at(len(self._run))))]
            self._told = self._run = b""
            return offsets
        self._certain = certain
        self._waiting.append(len(self._run))
        self._run += b"" if byte is None else bytes([byte])
        if self._is_whole or not _is_text(self._run):
            return []
        offsets = self.end()
        if len(self._run.decode()) > _num_signs(self._told):
            self._told, self._run, self._begins = self._run[len(self._told) :], self._run[len(self._told) :], True
        return offsets

    def end(self) -> list[int]:
        """Return the offsets of all tokens that had none."""
        found = [self._offset_at(at) for at in self._waiting]
        self._waiting.clear()
        return found

    def _offset_at(self, at: int) -> int:
        """Return the number of characters in front of byte `at` of the run, or in front of the run's end."""
        if _is_text(self._run):
            return self._certain + max(0, len(codecs.getincrementaldecoder("utf-8")().decode(self._run[:at])) - _num_signs(self._told))
        is_cut = self._begins and self._words.is_cut(self._told)
        return self._certain + max(0, at - _num_signs(self._told) + is_cut)

    def _offset_of(self, token: int, certain: int) -> int:
        """Return the offset of a token that is no byte token of SentencePiece."""
        self._certain = certain
        data = b"" if self._words.is_left_out(token) else self._words.of(token)
        if not (self._half or self._waits):
            self._count = certain
        elif self._half and data and not _is_whole(self._half + data[:1]):
            self._count, self._half = self._count + 1, b""
        offset = self._count
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(self._half + data)
        self._count += len(text)
        self._waits = text.endswith(HALF) if text else self._waits  # `Spelling` is not certain of such an end
        self._half = bytes(decoder.getstate()[0])
        return offset


def _is_text(data: bytes) -> bool:
    """Return whether bytes are whole characters."""
    return HALF not in data.decode(errors="replace")


def _num_signs(run: bytes) -> int:
    """Return the number of characters that a run of SentencePiece's bytes is decoded to."""
    return len(run.decode()) if _is_text(run) else len(run)


def _is_whole(data: bytes) -> bool:
    """Return whether bytes are characters, of which the last may be incomplete."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(data)
    except UnicodeDecodeError:
        return False
    return True


def _flat(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a decoder, or the parts of a sequence of decoders."""
    if decoder["type"] != "Sequence":
        yield decoder
        return
    for each in decoder["decoders"]:
        yield from _flat(each)


def _kind_of(decoder: Mapping[str, Any]) -> str:
    """Return the kind of a decoder; "spaces" if it turns SentencePiece's sign into a space."""
    is_spaces = decoder["type"] == "Metaspace" or (decoder["type"] == "Replace" and decoder.get("pattern") == {"String": _SPACE})
    return "spaces" if is_spaces else str(decoder["type"])


@cache
def _bytes_of_letters() -> Mapping[str, int]:
    return {letter: byte for byte, letter in byte_letters().items()}
