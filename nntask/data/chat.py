"""Conversations as text, by a chat template in Jinja as transformers renders it, and which tokens of it the assistant has written.

Templates are programs of others: they run in Jinja's sandbox, without access to files or attributes of objects. What is the assistant's is what
stands in ``{% generation %}`` blocks; for a template without them, what it adds to the messages before when the answer comes. Jinja2 is imported
when a conversation is read.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import DataError
from .encoding import RowEncoder
from .json_lines import Record, clean
from .special_tokens import CHAT_TEMPLATE, SPECIAL_TOKENS, TOKENIZER_CONFIG
from .tokenizer import Tokenizer

MESSAGES: Final = "messages"
_ASSISTANT: Final = "assistant"
_WORDS: Final = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class ChatSource:
    """A template as it is written down; arguments as of `ChatTemplate`."""

    source: str
    name: str
    words: Mapping[str, str]

    @classmethod
    def of(cls, tokenizer: Tokenizer, file: str) -> ChatSource:
        """The template in a file, or that of a tokenizer.

        Args:
            file: "" for the tokenizer's.

        Raises:
            DataError: there is none, or it cannot be read.
        """
        files = tokenizer.special.files
        config = json.loads(files.get(TOKENIZER_CONFIG, "{}"))
        named = {**json.loads(files.get(SPECIAL_TOKENS, "{}")), **{name: config[name] for name in _WORDS if config.get(name)}}
        words = {name: each["content"] if isinstance(each, Mapping) else each for name, each in named.items() if each and name in _WORDS}
        if file:
            try:
                return cls(Path(file).read_text(encoding="utf-8"), file, words)
            except (OSError, UnicodeDecodeError) as error:
                raise DataError(f"--chat-template {file} cannot be read: {getattr(error, 'strerror', None) or error}; give a text file") from None
        source = files.get(CHAT_TEMPLATE) or config.get("chat_template")
        if isinstance(source, Sequence) and not isinstance(source, str):  # several of them by name
            source = next((each.get("template") for each in source if isinstance(each, Mapping) and each.get("name") == "default"), None)
        if not isinstance(source, str):
            raise DataError(
                "conversations are written down by a chat template, and the tokenizer of the data has none; name one with --chat-template FILE, "
                "or the tokenizer of a model for conversations with --tokenizer-path DIR"
            )
        return cls(source, TOKENIZER_CONFIG, words)


class ChatTemplate:
    """A template that can be rendered.

    Args:
        source: the template.
        name: where it is from, for messages.
        words: special tokens by the names that templates use.

    Raises:
        DataError: Jinja2 is missing, or the template has a mistake.
    """

    def __init__(self, source: str, name: str, words: Mapping[str, str]) -> None:
        if importlib.util.find_spec("jinja2") is None:
            raise DataError(f"the chat template of {name} needs the jinja2 package; pip install -e '.[text]'")
        import jinja2

        from .chat_blocks import environment

        self._name, self._words, self._source = name, words, source
        self._marks = environment()
        try:
            self._template = self._marks.jinja.from_string(source)
        except jinja2.TemplateError as error:
            raise DataError(f"the chat template of {name} has a mistake: {error}; mend it, or name another with --chat-template FILE") from None

    def terms(self) -> str:
        """What the text of a conversation follows from: the template, and the special tokens that it may name."""
        return json.dumps([self._source, sorted(self._words.items())])

    @classmethod
    def of(cls, tokenizer: Tokenizer, file: str) -> ChatTemplate:
        """The template in a file, or that of a tokenizer; arguments and errors as of `ChatSource.of`, and a mistake in the template."""
        found = ChatSource.of(tokenizer, file)
        return cls(found.source, found.name, found.words)

    def encoded(self, line: Record, encoder: RowEncoder) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """(n,) ids of a conversation, and whether each is the assistant's.

        Raises:
            DataError: the line has no messages, none of the assistant, or the template refuses them.
        """
        text, answers = self.rendered(line)
        ids, starts = encoder.with_starts(clean(text))
        counts = np.zeros(len(ids), np.bool_)
        for begin, end in answers:
            counts |= (starts >= begin) & (starts < end)
        return ids, counts

    def rendered(self, line: Record) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and the first and last (excluded) character of each answer; errors as of `encoded`."""
        messages = messages_of(line)
        text, blocks = self._render(messages, line.where)
        if blocks:
            return text, blocks
        found = []
        for at, message in enumerate(messages):
            if message["role"] == _ASSISTANT:
                before = self._render(messages[:at], line.where, prompts=True)[0]
                until = self._render(messages[: at + 1], line.where)[0]
                if not (until.startswith(before) and text.startswith(until)):
                    raise DataError(
                        f"{line.where} has a conversation whose beginning the chat template of {self._name} writes otherwise when more follows, so "
                        "that its answers cannot be told; use a template with {% generation %} blocks, or one answer a line"
                    )
                found.append((len(before), len(until)))
        return text, found

    def prompt(self, messages: Sequence[Mapping[str, Any]], where: str) -> str:
        """The text of a conversation up to where the assistant's next answer begins.

        Args:
            where: the conversation is from, for messages.

        Raises:
            DataError: the template refuses it.
        """
        return self._render(messages, where, prompts=True)[0]

    def _render(self, messages: Sequence[Mapping[str, Any]], where: str, *, prompts: bool = False) -> tuple[str, list[tuple[int, int]]]:
        import jinja2

        try:
            return self._marks.rendered(self._template, messages=messages, add_generation_prompt=prompts, tools=None, documents=None, **self._words)
        except (jinja2.TemplateError, TypeError, LookupError, AttributeError, ValueError, ArithmeticError, RecursionError) as error:
            what = " ".join(str(error).split())
            what = f'"{what}"' if what.endswith(".") else what
            raise DataError(f"{where} is not for the chat template of {self._name}: {what}; mend or remove the line") from None


def messages_of(line: Record) -> list[Mapping[str, Any]]:
    """The messages of a line.

    Raises:
        DataError: they are none, or none is the assistant's.
    """
    found = line.values.get(MESSAGES)
    is_list = isinstance(found, list) and all(isinstance(each, Mapping) and isinstance(each.get("role"), str) for each in found)
    if not is_list or not found:
        shape = '[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
        raise DataError(f'{line.where} must have "{MESSAGES}", such as {shape}; mend or remove the line')
    if all(each["role"] != _ASSISTANT for each in found):
        raise DataError(f"{line.where} has no message of the role {_ASSISTANT}, and its answers are what is learnt; mend or remove the line")
    return list(found)
