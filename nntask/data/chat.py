"""Rendering of conversations by Jinja chat templates as in transformers, with the character ranges of the assistant's answers.

Templates are untrusted programs: they run in Jinja's sandbox, without access to files or to attributes of objects. The assistant's answers are the
output of ``{% generation %}`` blocks. For a template without such blocks, an answer is the text that the template adds to the previous messages
(`chat_answers`). A row is refused if its template leaves out a part of it: tools, function calls, reasoning, whole messages. Jinja2 is imported only
when a template is compiled.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from ..errors import DataError
from .chat_answers import Answers, Untold
from .chat_messages import ASSISTANT, MESSAGES, Conversation, conversation_of, names_of, plain_message, text_of
from .json_lines import Record
from .row_counts import RowTally
from .row_keys import ROW_KEYS, is_nothing

__all__ = ["MESSAGES", "ChatTemplate"]

_WRITTEN: Final = frozenset(key for key, rule in ROW_KEYS["message"].items() if rule.use == "written")

IMPORTED: Final = ("nntask.data.chat_blocks", "jinja2.constants", "jinja2.debug", "textwrap", "encodings.unicode_escape")
"""Modules that `ChatService` imports lazily."""
ROW_ADVICE: Final = "correct or remove the line, or correct the template"
"""End of messages about rows that a template refuses or that take too much."""
PROMPT_ADVICE: Final = "change the messages"
"""The same for prompts."""


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: source of the template.
        name: origin of the template, for error messages.
        words: name in templates -> special token, such as "bos_token".
        tools: source of the template for conversations with tools; "" to use `source` for them.

    Raises:
        DataError: Jinja2 is missing, or the template has an error.
    """

    def __init__(self, source: str, name: str, words: Mapping[str, str], tools: str = "") -> None:
        if importlib.util.find_spec("jinja2") is None:
            raise DataError(f"the chat template of {name} needs the jinja2 package", "pip install -e '.[text]'")
        import jinja2

        from .chat_blocks import ChatEnvironment, reads_of

        self._name, self._words = name, words
        self._marks = ChatEnvironment()
        try:
            self._template, self._reads = self._marks.jinja.from_string(source), reads_of(self._marks.jinja, source)
        except jinja2.TemplateError as error:
            line = f" in line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise DataError(f"the chat template of {name} has an error{line}: {error}", "correct it, or give another --chat-template FILE") from None
        self._of_tools = ChatTemplate(tools, name, words) if tools else None

    def set_date(self, now: datetime) -> None:
        """Set the date that the template sees. The default is a fixed date, so that training data are reproducible."""
        self._marks.now = now

    def rendered(self, line: Record, counts: RowTally | None = None) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation, and the first and last (excluded) character of each answer.

        Args:
            line: row with messages.
            counts: counter of unknown keys and of answers that the template changes; None to count nothing.

        Raises:
            DataError: the row has no messages or none of the assistant, or the template refuses them.
        """
        if self._of_tools is not None and not is_nothing(line.values.get("tools")):
            return self._of_tools.rendered(line, counts)
        if counts is not None:
            counts.check("chat", [line.values], line.where)
        conversation = conversation_of(line, self._reads)
        if counts is not None:
            counts.check("message", line.values[MESSAGES], line.where)
            counts.add("nulls_in_tools", conversation.has_nulls)

        def write(messages: Sequence[Mapping[str, Any]], *, prompts: bool) -> str:
            return self._render(messages, conversation.where, prompts=prompts, given=conversation.given)[0]

        text, blocks = self._render(conversation.messages, conversation.where, given=conversation.given)
        answers = Answers(write, conversation.messages, text)
        self._check_written(conversation, text, answers, counts)
        try:
            return text, answers.spans(conversation.learnt, blocks)
        except Untold:
            raise DataError(
                f"{line.where} has a conversation that the chat template of {self._name} writes differently once more messages follow, so "
                "its answers cannot be located",
                "use a template with {% generation %} blocks, or write one answer per line",
            ) from None

    def _check_written(self, found: Conversation, text: str, answers: Answers, counts: RowTally | None) -> None:
        """Count the answers that the template changes; raise DataError if the text lacks a message, tools, documents or a required key."""
        for name in ("tools", "documents"):
            if found.given[name] is not None and self._render(found.messages, found.where, given={**found.given, name: None})[0] == text:
                raise DataError(
                    f'{found.where} has "{name}", and the chat template of {self._name} does not write them',
                    "name a template that does with --chat-template FILE, or remove the key",
                )
        for at, message in enumerate(found.messages):
            self._check_keys(found, at, text)
            said = text_of(message).strip()
            if said in text:
                changed = False
            else:
                try:
                    is_written = answers.is_written(at)
                except Untold:
                    is_written = True  # a template that refuses the mark may still write the message
                if not is_written:
                    raise DataError(
                        f"{found.where} has a message of the role {message['role']} that the chat template of {self._name} leaves out: {said[:40]!r}",
                        "name another template with --chat-template FILE, or remove the message",
                    )
                changed = True
            if counts is not None and message["role"] == ASSISTANT:
                counts.add("answers")
                counts.add("answers_changed", changed)

    def _check_keys(self, found: Conversation, at: int, text: str) -> None:
        """Check that the template writes all keys of message `at` that must be written; raise DataError if the template ignores a key."""
        for key in _WRITTEN & found.said[at].keys():
            names = names_of(key)
            if is_nothing(found.said[at][key]) or names & self._reads.names:
                continue
            less = {key: value for key, value in found.messages[at].items() if key not in names}
            if self._render([*found.messages[:at], less, *found.messages[at + 1 :]], found.where, given=found.given)[0] == text:
                raise DataError(
                    f'{found.where} has "{key}" in a message, {ROW_KEYS["message"][key].reason}, and the chat template of {self._name} does not '
                    "write it",
                    "name a template that does with --chat-template FILE, or remove the key",
                )

    def prompt(self, messages: Sequence[Mapping[str, Any]], where: str) -> str:
        """Return the text of a conversation up to the assistant's next answer; `where` is its origin, for error messages.

        Raises:
            DataError: the template refuses the conversation.
        """
        plain = [plain_message(each, self._reads, where) for each in messages]
        return self._render(plain, where, prompts=True, advice=PROMPT_ADVICE)[0]

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        where: str,
        *,
        prompts: bool = False,
        given: Mapping[str, Any] | None = None,
        advice: str = ROW_ADVICE,
    ) -> tuple[str, list[tuple[int, int]]]:
        import jinja2

        values = {**self._words, "tools": None, "documents": None, **(given or {}), "messages": messages, "add_generation_prompt": prompts}
        try:
            return self._marks.rendered(self._template, **values)
        except (jinja2.TemplateError, TypeError, LookupError, AttributeError, ValueError, ArithmeticError, RecursionError) as error:
            what = " ".join(str(error).split())
            what = f'"{what}"' if what.endswith(".") else what
            raise DataError(f"{where} is not for the chat template of {self._name}: {what}", advice) from None


class ChatService:
    """A service that renders conversations with one template; `content` has the arguments of `ChatTemplate` by name.

    Raises:
        DataError: Jinja2 is missing, or the template has an error.
    """

    facts: Any = None

    def __init__(self, content: dict[str, Any]) -> None:
        self._name = content["name"]
        self._template = ChatTemplate(content["source"], self._name, content["words"], content["tools"])

    def __call__(self, content: dict[str, Any]) -> Any:
        """Return the text of a prompt, or the text, answers and counts of a row.

        Raises:
            DataError: the template refuses the conversation, or writes too much.
        """
        where, most = content["where"], content["most"]
        if "row" not in content:
            self._template.set_date(datetime.fromisoformat(content["now"]))
            return self._checked(self._template.prompt(content["messages"], where), where, most, PROMPT_ADVICE)
        counts = RowTally()
        text, answers = self._template.rendered(Record(content["row"], where), counts)
        return self._checked(text, where, most, ROW_ADVICE), answers, counts.numbers, counts.unknown

    def _checked(self, text: str, where: str, most: int, advice: str) -> str:
        if len(text) > most:
            what = f"{where} is not for the chat template of {self._name}, which writes {len(text):,} characters of at most {most:,}"
            raise DataError(what, advice)
        return text


SERVICE: Final = ChatService
"""Service in the process of `ChatProcess`."""
