"""Tokens as characters while more tokens come: whole characters only, spelled as in the whole text; and the bytes that a token is by itself."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from ..data.byte_letters import byte_letters

if TYPE_CHECKING:
    from ..data.tokenizer import Tokenizer

HALF: Final = "\N{REPLACEMENT CHARACTER}"
"""What bytes that make no character are decoded to."""
_SPACE: Final = "\N{LOWER ONE EIGHTH BLOCK}"
"""How SentencePiece writes a space."""
_BYTE: Final = re.compile("<0x([0-9A-F]{2})>")
_NUM_BYTES: Final = 256


class Spelling:
    """One text.

    Args:
        decode: ids -> text.
        before: ids in front, which are not spelled, and decide how the first ones are.

    Attributes:
        ids: of the text so far, those in front included; whoever has more appends them.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int] = ()) -> None:
        self._decode, self.ids = decode, list(before)
        self._from, self._shown = 0, len(self.ids)  # ids before _shown are spelled; those from _from on are the context of the next

    def news(self, *, is_last: bool = False) -> str:
        """The characters of ids that are not spelled yet; an incomplete one waits for its remaining bytes, unless there are none to come."""
        text = self._decode(self.ids[self._from :])
        if text.endswith(HALF) and not is_last:
            return ""
        found = text[len(self._decode(self.ids[self._from : self._shown])) :]
        if found:  # else the same context is still needed
            self._from, self._shown = self._shown, len(self.ids)
        return found

    def counts(self, ids: Sequence[int], goes_on: Callable[[int], bool]) -> list[int]:
        """The number of characters that are certain before each of `ids`, which follow.

        Args:
            goes_on: tells a token before which nothing is spelled, so that runs of such tokens are spelled as wholes.
        """
        found, count, was_inside = [], 0, False
        for token in ids:
            is_inside = goes_on(token)
            count += 0 if was_inside and is_inside else len(self.news())
            was_inside = is_inside
            found.append(count)
            self.ids.append(token)
        return found


class TokenBytes:
    """The bytes that a token stands for, whatever its neighbours are. Those of all tokens of a text are the text in UTF-8, except for special tokens,
    which texts leave out, and a first space that SentencePiece has put there.

    Args:
        tokenizer: byte-level, of SentencePiece's kind (with ``<0xE2>`` for a byte), or plain bytes; of other kinds a token is what it decodes to.
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
        """Whether texts leave a token out."""
        return token in self._left_out

    def of(self, token: int) -> bytes:
        """The bytes of a token; none of an id that is no token."""
        if self._inner is None:
            return bytes([token]) if token < _NUM_BYTES else b""
        if token in self._added:
            return self._added[token].encode()
        word = self._inner.id_to_token(token)
        if word is None:
            return b""
        if "ByteLevel" in self._kinds and all(letter in _bytes_of_letters() for letter in word):
            return bytes(_bytes_of_letters()[letter] for letter in word)
        if "ByteFallback" in self._kinds and (found := _BYTE.fullmatch(word)):
            return bytes([int(found[1], 16)])
        if "spaces" in self._kinds:
            return str(word).replace(_SPACE, " ").encode()
        return self._tokenizer.decode([token]).encode()

    def word(self, token: int) -> str:
        """A token as text; bytes that are no text, as OpenAI spells them, so that no two of them look alike."""
        found = self.of(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{each:02x}" for each in found)

    def byte(self, token: int) -> int | None:
        """The byte of a token that SentencePiece has for one; None of other tokens."""
        if self._inner is None or "ByteFallback" not in self._kinds or token in self._added:
            return None
        found = _BYTE.fullmatch(self._inner.id_to_token(token) or "")
        return None if found is None else int(found[1], 16)

    def is_cut(self, run: bytes) -> bool:
        """Whether the first byte of a text that begins with such bytes is a space that is left out."""
        if self._inner is None or not run.startswith(b" ") or not _is_text(run):
            return False
        return self._tokenizer.decode([self._inner.token_to_id("<0x20>")]) == ""

    def goes_on(self, token: int) -> bool:
        """Whether a run of such bytes does not end with a token: that is one, or texts leave it out."""
        return self.byte(token) is not None or self.is_left_out(token) or not self.of(token)


class TokenOffsets:
    """Offsets of the tokens of a text: where its first character begins of each, or that in which its bytes lie.

    A character that is replaced has one sign, but the bytes of SentencePiece are a sign each if a run of them is not all characters. So an offset in
    such a run is unknown until its character is told or the run ends. Characters that were told stay as they are, and bytes behind them have the
    places that they have in the run.

    Args:
        words: bytes of tokens.
        before: ids in front of the text, with which `Spelling` began.
        is_whole: whether runs are spelled as wholes, and not as their tokens come.
    """

    def __init__(self, words: TokenBytes, before: Sequence[int] = (), *, is_whole: bool = False) -> None:
        self._words, self._is_whole = words, is_whole
        self._count, self._half, self._waits = 0, b"", False
        self._told, self._run, self._certain = b"", b"", 0  # bytes of a run that are told, all of them, characters before the others
        self._begins = True  # whether the told bytes begin what the others are spelled with, so that a first space is left out
        self._waiting = list[int]()  # bytes of the run in front of each token without an offset
        for token in before:
            if (byte := words.byte(token)) is not None:
                self._told += bytes([byte])
            elif not words.goes_on(token):
                self._told, self._begins = b"", False
        self._run = self._told

    def add(self, token: int, certain: int) -> list[int]:
        """The offsets that are known with one more token, of the first tokens that had none.

        Args:
            certain: characters of all tokens before, without a last one that is not complete.
        """
        byte = self._words.byte(token)
        if byte is None and not (self._run and self._words.goes_on(token)):
            found = [*self.end(), self._offset_of(token, max(certain, self._offset_at(len(self._run))))]
            self._told = self._run = b""
            return found
        self._certain = certain
        self._waiting.append(len(self._run))
        self._run += b"" if byte is None else bytes([byte])
        if self._is_whole or not _is_text(self._run):
            return []
        found = self.end()
        if len(self._run.decode()) > _num_signs(self._told):
            self._told, self._run, self._begins = self._run[len(self._told) :], self._run[len(self._told) :], True
        return found

    def end(self) -> list[int]:
        """The offsets of all tokens that had none."""
        found = [self._offset_at(at) for at in self._waiting]
        self._waiting.clear()
        return found

    def _offset_at(self, at: int) -> int:
        """Characters in front of the byte of the run, or of its end."""
        if _is_text(self._run):
            return self._certain + max(0, len(codecs.getincrementaldecoder("utf-8")().decode(self._run[:at])) - _num_signs(self._told))
        is_cut = self._begins and self._words.is_cut(self._told)
        return self._certain + max(0, at - _num_signs(self._told) + is_cut)

    def _offset_of(self, token: int, certain: int) -> int:
        """The offset of a token that is no byte of SentencePiece."""
        self._certain = certain
        data = b"" if self._words.is_left_out(token) else self._words.of(token)
        if not (self._half or self._waits):
            self._count = certain
        elif self._half and data and not _is_whole(self._half + data[:1]):
            self._count, self._half = self._count + 1, b""
        found = self._count
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(self._half + data)
        self._count += len(text)
        self._waits = text.endswith(HALF) if text else self._waits  # `Spelling` is not certain of such an end
        self._half = bytes(decoder.getstate()[0])
        return found


def _is_text(data: bytes) -> bool:
    """Whether bytes are whole characters."""
    return HALF not in data.decode(errors="replace")


def _num_signs(run: bytes) -> int:
    """Characters of a run of SentencePiece's bytes."""
    return len(run.decode()) if _is_text(run) else len(run)


def _is_whole(data: bytes) -> bool:
    """Whether bytes are characters, the last of which may be a beginning."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(data)
    except UnicodeDecodeError:
        return False
    return True


def _flat(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A decoder, or those that it consists of."""
    if decoder["type"] != "Sequence":
        yield decoder
        return
    for each in decoder["decoders"]:
        yield from _flat(each)


def _kind_of(decoder: Mapping[str, Any]) -> str:
    """The kind of a decoder; "spaces" if it turns the sign of SentencePiece into one."""
    is_spaces = decoder["type"] == "Metaspace" or (decoder["type"] == "Replace" and decoder.get("pattern") == {"String": _SPACE})
    return "spaces" if is_spaces else str(decoder["type"])


@cache
def _bytes_of_letters() -> Mapping[str, int]:
    return {letter: byte for byte, letter in byte_letters().items()}
