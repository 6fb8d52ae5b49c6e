"""Service in the process of `ConfinedRules`: encodes and decodes with one tokenizer."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ..errors import DataError
from .token_rules import LocalRules

IMPORTED: Final = ("tokenizers",)
"""Modules that encoding imports lazily."""


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
        """Call a method of `LocalRules`, and return its result with arrays as lists.

        Args:
            content: name of the method, and its arguments.

        Raises:
            DataError: the rules fail for a text.
        """
        method, arguments = content
        if method == "encode":
            text, special = arguments
            return self._rules.encode([text], special=special)[0].tolist()
        if method not in ("row", "with_offsets", "around", "decode"):
            raise ValueError(method)
        found = getattr(self._rules, method)(*arguments)
        return [each.tolist() if isinstance(each, np.ndarray) else each for each in found] if isinstance(found, tuple) else found


SERVICE: Final = TokenService
