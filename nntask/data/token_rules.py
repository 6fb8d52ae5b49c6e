"""Application of a tokenizer's rules, from texts to ids and back, in this process or in a sandboxed one.

Both kinds have the same methods and give the same results. `ConfinedRules` is for tokenizers whose rules are not known to be bounded (`rule_bounds`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..confined.process import Allowance, ConfinedProcess, ConfinedRequest, RequestLimits
from ..errors import DataError
from .rule_bounds import sections_of, with_rules

IMPORTED: Final = ("tokenizers",)
"""Modules that `TokenService` imports lazily."""
Ids = npt.NDArray[np.int32]
Offsets = Sequence[tuple[int, int]]

_OPENING: Final = Allowance(RequestLimits(10, 64 << 20, 1 << 20), size_per_second=1 << 20, nbytes_per_size=48, answer_per_size=2)
"""Limits for loading a tokenizer, by the bytes of its file."""
_TEXT: Final = Allowance(RequestLimits(5, 48 << 20, 1 << 20), size_per_second=1 << 17, nbytes_per_size=512, answer_per_size=64)
"""Limits for a text, by its bytes. Ordinary rules encode 1 MiB or more in a second; memory holds tokens, words and offsets."""
_ID_NBYTES: Final = 8
"""Size of an id that is decoded, as that of a text."""
_CLOSED: Final = "texts are no longer encoded, as the server is shutting down; ask another one"


class LocalRules:
    """Rules that are applied in this process.

    Args:
        inner: a `tokenizers.Tokenizer`.
        where: location of the tokenizer's files, for error messages.
    """

    def __init__(self, inner: Any, where: object = "the tokenizer") -> None:
        self._inner, self._where = inner, where

    @property
    def sections(self) -> Mapping[str, Any]:
        """Rules as sections of a tokenizer.json: normalizer, pre_tokenizer, post_processor, decoder."""
        return sections_of(self._inner)

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[npt.NDArray[np.int64]]:
        """Return the (n,) ids of each text; with `special`, including the ids that the template puts around the text.

        Raises:
            DataError: the rules fail for a text, or take too much time or memory.
        """
        with _panics(self._where):
            return [np.array(found.ids, np.int64) for found in self._inner.encode_batch_fast(list(texts), add_special_tokens=special)]

    def row(self, first: str, second: str | None, limit: int) -> tuple[Ids, Ids, bool]:
        """Return the (n,) ids of a text or pair with its template, n at most `limit`; the type of each; and whether a text was cut."""
        with _panics(self._where):
            one = self._inner.encode(first, add_special_tokens=False)
            two = None if second is None else self._inner.encode(second, add_special_tokens=False)
            most = max(limit - self.num_around(is_pair=two is not None), 0)
            before = (len(one), 0 if two is None else len(two))
            lengths = cut_lengths(*before, most)
            one.truncate(lengths[0])
            if two is not None:
                two.truncate(lengths[1])
            encoding = self._inner.post_process(one, two, True)
        return np.array(encoding.ids[:limit], np.int32), np.array(encoding.type_ids[:limit], np.int32), sum(before) > sum(lengths)

    def with_offsets(self, text: str) -> tuple[Ids, Offsets]:
        """Return the (n,) ids of a text without the template, and the first and last (excluded) character of each."""
        with _panics(self._where):
            found = self._inner.encode(text, add_special_tokens=False)
        return np.array(found.ids, np.int32), found.offsets

    def around(self, text: str) -> tuple[list[int], list[bool]]:
        """Return the ids of a text with its template, and whether each was added by the template."""
        with _panics(self._where):
            found = self._inner.encode(text, add_special_tokens=True)
        return found.ids, [bool(each) for each in found.special_tokens_mask]

    def num_around(self, *, is_pair: bool) -> int:
        """Return the number of ids that the template puts around a text or a pair."""
        return int(self._inner.num_special_tokens_to_add(is_pair))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""
        with _panics(self._where):
            return str(self._inner.decode(list(ids), skip_special_tokens=True))

    def close(self) -> None:
        """Do nothing; `ConfinedRules` end their process."""


class ConfinedRules:
    """Rules that are applied in a sandboxed process.

    Args:
        tokens: a `tokenizers.Tokenizer` without rules.
        sections: rules as sections of a tokenizer.json; values that have a default may be missing.
        where: location of the tokenizer's files, for error messages.

    Raises:
        DataError: the rules are broken, or loading them takes too much time or memory.
    """

    def __init__(self, tokens: Any, sections: Mapping[str, Any], where: object) -> None:
        self._where = where
        self.content = json.dumps(with_rules(json.loads(tokens.to_str()), sections), ensure_ascii=False)
        limits = _OPENING.limits(len(self.content.encode()))
        request = json.dumps({"content": self.content, "where": str(where), "ignores_special": bool(tokens.encode_special_tokens)})
        opening = ConfinedRequest(request, limits, f"the tokenizer in {where}", "name another with --tokenizer-path DIR")
        self._process = ConfinedProcess(__name__, opening, name="the process that encodes texts", closed=_CLOSED)
        self._sections: Mapping[str, Any] = self._process.facts[2]

    @property
    def sections(self) -> Mapping[str, Any]:
        """Rules as sections of a tokenizer.json."""
        return self._sections

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[npt.NDArray[np.int64]]:
        """Return the (n,) ids of each text, like `LocalRules.encode`."""
        requests = (self._request("encode", [text, special], text) for text in texts)
        return [np.array(ids, np.int64) for ids in self._process.answers(requests)]

    def row(self, first: str, second: str | None, limit: int) -> tuple[Ids, Ids, bool]:
        """Return ids, types, and whether a text was cut, like `LocalRules.row`."""
        ids, types, is_cut = self._process.ask(self._request("row", [first, second, limit], first + (second or "")))
        return np.array(ids, np.int32), np.array(types, np.int32), bool(is_cut)

    def with_offsets(self, text: str) -> tuple[Ids, Offsets]:
        """Return the (n,) ids of a text without the template, and their characters, like `LocalRules.with_offsets`."""
        ids, offsets = self._process.ask(self._request("with_offsets", [text], text))
        return np.array(ids, np.int32), [(first, last) for first, last in offsets]

    def around(self, text: str) -> tuple[list[int], list[bool]]:
        """Return the ids of a text with its template, and whether each was added by the template."""
        ids, is_added = self._process.ask(self._request("around", [text], text))
        return ids, is_added

    def num_around(self, *, is_pair: bool) -> int:
        """Return the number of ids that the template puts around a text or a pair."""
        return int(self._process.facts[is_pair])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""
        return str(self._process.ask(self._request("decode", [list(map(int, ids))], None)))

    def close(self) -> None:
        """End the process; pending calls fail."""
        self._process.close()

    def _request(self, method: str, arguments: list[Any], text: str | None) -> ConfinedRequest:
        what = "decoding ids" if text is None else f"encoding a text of {len(text):,} characters"
        size = _ID_NBYTES * len(arguments[0]) if text is None else len(text.encode("utf-8", "replace"))
        subject, advice = f"{what} with the tokenizer in {self._where}", "change the text, or name another tokenizer with --tokenizer-path DIR"
        return ConfinedRequest(json.dumps([method, arguments]), _TEXT.limits(size), subject, advice)


TokenRules = LocalRules | ConfinedRules
"""Rules of a tokenizer."""


def cut_lengths(first: int, second: int, most: int) -> tuple[int, int]:
    """Return the lengths of two texts after cutting them to at most `most` tokens in total; the longer one is cut first."""
    if first + second <= most:
        return first, second
    short = min(first, second, most // 2)
    return (most - short, short) if first > second else (short, most - short)


@contextmanager
def _panics(where: object) -> Iterator[None]:
    """Turn a panic of the `tokenizers` package, which is not an `Exception`, into a `DataError` about the text."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise DataError(f"the tokenizer in {where} fails at a text ({str(error)[:100]})", "change the text, or name another tokenizer") from None


class TokenService:
    """A service that encodes and decodes with one tokenizer.

    Args:
        content: three values: the tokenizer.json as text under "content"; the location of its file, for messages, under "where"; and whether special
            tokens in texts are encoded as ordinary text, under "ignores_special".

    Attributes:
        facts: three values: the number of ids that the template puts around a text, the number for a pair, and the sections of the rules.

    Raises:
        DataError: the tokenizer is broken.
    """

    def __init__(self, content: dict[str, Any]) -> None:
        import tokenizers

        try:
            inner = tokenizers.Tokenizer.from_str(content["content"])
        except Exception as error:  # the package raises bare Exception for any broken file
            raise DataError(f"the tokenizer is broken: {error}") from None
        inner.encode_special_tokens = content["ignores_special"]
        self._rules = LocalRules(inner, content["where"])
        self.facts = [self._rules.num_around(is_pair=False), self._rules.num_around(is_pair=True), self._rules.sections]

    def __call__(self, content: tuple[str, list[Any]]) -> Any:
        """Call a method of `LocalRules` by its name and arguments, and return its result with arrays as lists.

        Raises:
            DataError: the rules fail for a text.
        """
        method, arguments = content
        if method == "encode":
            text, special = arguments
            return self._rules.encode([text], special=special)[0].tolist()
        if method not in ("row", "with_offsets", "around", "decode"):
            raise ValueError(method)
        result = getattr(self._rules, method)(*arguments)
        return [each.tolist() if isinstance(each, np.ndarray) else each for each in result] if isinstance(result, tuple) else result


SERVICE: Final = TokenService
"""Service in the process of `ConfinedRules`."""
