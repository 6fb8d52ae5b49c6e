"""Service in the process of `ChatProcess`: compiles a chat template and renders conversations."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from ..errors import DataError
from .chat import ROW_ADVICE, ChatTemplate
from .json_lines import Record
from .row_counts import RowTally

IMPORTED: Final = ("nntask.data.chat_blocks", "jinja2.constants", "jinja2.debug", "textwrap", "encodings.unicode_escape")
"""Modules that compiling and rendering import lazily."""


class ChatService:
    """A service that renders conversations with one compiled template.

    Args:
        content: arguments of `ChatTemplate`, by name.

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
            return self._checked(self._template.prompt(content["messages"], where), where, most, "change the messages")
        counts = RowTally()
        text, answers = self._template.rendered(Record(content["row"], where), counts)
        return self._checked(text, where, most, ROW_ADVICE), answers, counts.numbers, counts.unknown

    def _checked(self, text: str, where: str, most: int, advice: str) -> str:
        if len(text) > most:
            what = f"{where} is not for the chat template of {self._name}, which writes {len(text):,} characters of at most {most:,}"
            raise DataError(f"{what}; {advice}")
        return text


SERVICE: Final = ChatService
