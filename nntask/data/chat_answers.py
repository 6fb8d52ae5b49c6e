"""Which characters of a rendered conversation the assistant has written, told from how the template renders parts of the conversation.

An answer is what the template adds when the answer comes: the text of the conversation up to it without the text of the prompt for it. Templates that
write a beginning otherwise than the same messages in a longer conversation (they look at the first message, or leave out what was thought before the
last question) are asked for the whole conversation once more, with a mark instead of the answer: the answer begins behind the prompt in front of the
mark, and ends with what closes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from ..errors import DataError
from .chat_messages import ASSISTANT

Message = Mapping[str, Any]
Write = Callable[..., str]
"""Messages, and `prompts` whether the prompt of the next answer follows -> their text."""
Span = tuple[int, int]
_MARK: Final = "\ue000nntask\ue001"
"""Text for private use that no template knows, and that begins and ends with characters of its own."""
_TOKEN_ENDS: Final = (">", "]", "\n")
"""Characters behind which a special token may begin."""
_QUESTION: Final = ({"role": "user", "content": "?"},)


class Untold(Exception):
    """The beginning or end of an answer cannot be told."""


class Answers:
    """The answers of one conversation.

    Args:
        write: renders messages; raises DataError if the template refuses them.
        messages: the conversation.
        text: its text.
    """

    def __init__(self, write: Write, messages: Sequence[Message], text: str) -> None:
        self._write, self._messages, self._text = write, messages, text

    def spans(self, learnt: Sequence[bool], blocks: Sequence[Span]) -> list[Span]:
        """Return the first and last (excluded) character of what is learnt.

        Args:
            learnt: whether each message is an answer that is learnt.
            blocks: what the template's own ``{% generation %}`` blocks wrote; empty for a template without them.

        Raises:
            Untold: a message whose answer cannot be told.
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
        """Return the first and last (excluded) character of a message.

        Raises:
            Untold: they cannot be told.
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
        """Return whether what a message says is in the text in any form."""
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
        """Return the span in the text of the whole conversation."""
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
        """Return where the text differs from the text with a mark instead of what a message says.

        Raises:
            Untold: the template writes what the message says nowhere, or more than once.
        """
        other = self._marked(messages, at)
        if other.count(_MARK) != 1:
            raise Untold
        begin = _num_equal(text, other)
        behind = other[max(begin, other.index(_MARK) + len(_MARK)) :]
        return begin, len(text) - _num_equal(text[begin:][::-1], behind[::-1])

    def _behind_prompt(self, at: int, begin: int) -> int:
        """Return where an answer begins whose content begins at `begin`: behind the prompt for it, or as much of the prompt as is there."""
        prompt, floor = self._prompt(at), 0
        if at:
            try:
                floor = self._content(self._messages, at - 1, self._text)[1]
            except Untold:
                floor = 0
            floor = floor if floor <= begin else 0
        for length in range(len(prompt), len(prompt) // 2, -1):
            if (found := self._text.rfind(prompt[:length], floor, begin)) >= 0:
                return found + length
        return begin

    def _prompt(self, at: int) -> str:
        """Return what the template writes before an answer; "" if it cannot be told."""
        for messages in (self._messages[:at], _QUESTION):
            try:
                without, with_prompt = self._write(messages, prompts=False), self._write(messages, prompts=True)
            except DataError:
                continue
            if prompt := with_prompt[_num_whole(without, with_prompt) :]:
                return prompt
        return ""


def _num_equal(text: str, other: str) -> int:
    """Return how many characters two texts begin with in common."""
    least, most = 0, min(len(text), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if text[least:middle] == other[least:middle] else (least, middle - 1)
    return least


def _num_whole(text: str, other: str) -> int:
    """Return how many characters two texts begin with in common, without a part of a special token in which they begin to differ."""
    number = _num_equal(text, other)
    return number if number == len(text) else 1 + max(text[:number].rfind(end) for end in _TOKEN_ENDS)
