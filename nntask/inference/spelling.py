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

    def counts(self, ids: Sequence[int]) -> list[int]:
        """The number of characters that are certain before each of `ids`, which follow."""
        found, count = [], 0
        for token in ids:
            found.append(count)
            self.ids.append(token)
            count += len(self.news())
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

    def num_replaced(self, half: bytes) -> int:
        """Signs that a text has for the beginning of a character that does not go on."""
        return len(half) if "ByteFallback" in self._kinds else 1


class TokenOffsets:
    """Offsets of the tokens of a text, one after the other.

    Args:
        words: bytes of tokens.
    """

    def __init__(self, words: TokenBytes) -> None:
        self._words, self._count, self._half, self._waits = words, 0, b"", False
        self._last = 0

    def offset_of(self, token: int, certain: int) -> int:
        """The number of characters in front of the next token; of one that goes on with a character, those in front of that.

        Args:
            certain: characters of all tokens before, without a last one that is not complete.
        """
        data = b"" if self._words.is_left_out(token) else self._words.of(token)
        if not (self._half or self._waits):
            self._count = certain
        elif self._half and data and not _is_whole(self._half + data[:1]):
            self._count += self._words.num_replaced(self._half)
            self._half = b""
        self._last = max(self._last, self._count)  # byte tokens that are no text are replaced as a whole run, which may move earlier ones
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(self._half + data)
        self._count += len(text)
        self._waits = text.endswith(HALF) if text else self._waits  # `Spelling` is not certain of such an end
        self._half = bytes(decoder.getstate()[0])
        return self._last


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
