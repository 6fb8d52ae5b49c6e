"""Character ranges of the assistant's answers in a rendered conversation, found by rendering parts of the conversation.

An answer is the text that the template adds for it: the conversation up to and including the answer, without the prompt for the answer. This fails
for templates that render a message differently once more messages follow, for example because they leave out reasoning before the last question.
For these, the whole conversation is rendered again with a mark in place of the answer. The answer then begins after the prompt in front of the mark,
and ends after the text that closes the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from ..errors import DataError
from .chat_messages import ASSISTANT

Message = Mapping[str, Any]
Write = Callable[..., str]
"""Function from messages, and a keyword `prompts` that asks for the prompt of the next answer, to their text."""
Span = tuple[int, int]
_MARK: Final = "\ue000nntask\ue001"
"""Placeholder for an answer: its first and last characters are of Unicode's private use area and occur in no template."""
_TOKEN_ENDS: Final = (">", "]", "\n")
"""Characters after which a special token may begin."""
_QUESTION: Final = ({"role": "user", "content": "?"},)


class Untold(Exception):
    """Raised when the beginning or end of an answer cannot be determined."""


class Answers:
    """The answers of one conversation.

    Args:
        write: function that renders messages; raises DataError if the template refuses them.
        messages: messages of the conversation.
        text: rendered text of the conversation.
    """

    def __init__(self, write: Write, messages: Sequence[Message], text: str) -> None:
        self._write, self._messages, self._text = write, messages, text

    def spans(self, learnt: Sequence[bool], blocks: Sequence[Span]) -> list[Span]:
        """Return the first and last (excluded) character of each range to learn.

        Args:
            learnt: whether each message is an answer to learn.
            blocks: character ranges written by the template's ``{% generation %}`` blocks; empty for a template without them.

        Raises:
            Untold: the range of an answer cannot be determined.
        """
        answers = [at for at, message in enumerate(self._messages) if message["role"] == ASSISTANT]
        if not blocks:
            return self._ordered([self.span(at) for at in answers if learnt[at]])
        if all(learnt[at] for at in answers):
            return list(blocks)
        try:
            left_out = [self.span(at) for at in answers if not learnt[at]]
        except Untold:
            if len(blocks) != len(answers):
                raise
            return [block for at, block in zip(answers, blocks, strict=True) if learnt[at]]
        return [(begin, end) for begin, end in blocks if not any(begin < last and first < end for first, last in left_out)]

    def span(self, at: int) -> Span:
        """Return the first and last (excluded) character of message `at`.

        Raises:
            Untold: they cannot be determined.
        """
        try:
            before = self._write(self._messages[:at], prompts=True)
            until = self._text if at == len(self._messages) - 1 else self._write(self._messages[: at + 1], prompts=False)
        except DataError:
            return self._within(at)
        if until.startswith(before) and self._text.startswith(until):
            return len(before), len(until)
        return self._within(at)

    def is_written(self, at: int) -> bool:
        """Return whether the template writes the content of message `at` in any form."""
        return _MARK in self._marked(self._messages, at)

    def _ordered(self, spans: list[Span]) -> list[Span]:
        if any(begin < end for (_, end), (begin, _) in pairwise(spans)):
            raise Untold
        return spans

    def _marked(self, messages: Sequence[Message], at: int) -> str:
        try:
            return self._write([*messages[:at], {**messages[at], "content": _MARK}, *messages[at + 1 :]], prompts=False)
        except DataError:
            raise Untold from None

    def _within(self, at: int) -> Span:
        """Return the span of message `at`, found with a mark in the text of the whole conversation."""
        begin, end = self._content(self._messages, at, self._text)
        if at == len(self._messages) - 1:
            closing = self._text[end:]
        else:
            until = self._messages[: at + 1]
            try:
                alone = self._write(until, prompts=False)
            except DataError:
                raise Untold from None
            closing = alone[self._content(until, at, alone)[1] :]
        return self._behind_prompt(at, begin), end + _num_whole(closing, self._text[end:])

    def _content(self, messages: Sequence[Message], at: int, text: str) -> Span:
        """Return the span of the content of message `at` in `text`, by comparison with the text that has a mark as the content.

        Raises:
            Untold: the template does not write the content exactly once.
        """
        other = self._marked(messages, at)
        if other.count(_MARK) != 1:
            raise Untold
        begin = _num_equal(text, other)
        behind = other[max(begin, other.index(_MARK) + len(_MARK)) :]
        return begin, len(text) - _num_equal(text[begin:][::-1], behind[::-1])

    def _behind_prompt(self, at: int, begin: int) -> int:
        """Return the beginning of answer `at`, whose content begins at `begin`.

        It is the end of the prompt for the answer, or of the longest beginning of the prompt (more than half of it) that the text contains.
        """
        prompt, floor = self._prompt(at), 0
        if at:
            try:
                floor = self._content(self._messages, at - 1, self._text)[1]
            except Untold:
                floor = 0
            floor = floor if floor <= begin else 0
        for length in range(len(prompt), len(prompt) // 2, -1):
            if (start := self._text.rfind(prompt[:length], floor, begin)) >= 0:
                return start + length
        return begin

    def _prompt(self, at: int) -> str:
        """Return the prompt that the template writes before answer `at`; "" if it cannot be determined."""
        for messages in (self._messages[:at], _QUESTION):
            try:
                without, with_prompt = self._write(messages, prompts=False), self._write(messages, prompts=True)
            except DataError:
                continue
            if prompt := with_prompt[_num_whole(without, with_prompt) :]:
                return prompt
        return ""


def _num_equal(text: str, other: str) -> int:
    """Return the length of the longest common prefix of two texts."""
    least, most = 0, min(len(text), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if text[least:middle] == other[least:middle] else (least, middle - 1)
    return least


def _num_whole(text: str, other: str) -> int:
    """Return the length of the longest common prefix of two texts that does not end inside a special token."""
    number = _num_equal(text, other)
    return number if number == len(text) else 1 + max(text[:number].rfind(end) for end in _TOKEN_ENDS)
