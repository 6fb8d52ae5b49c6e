"""Chat templates in a sandboxed process: prompts for a server's conversations, and texts of rows with their answers.

A template is an untrusted program that comes with a model. Jinja's sandbox denies it files and Python objects. It does not prevent endless loops or
unbounded texts in statements, in filters, or in constants that are folded during compilation. Templates are therefore compiled and rendered in a
process that has limits of time and memory for each conversation (`nntask.confined`).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final

from ..confined.process import Allowance, ConfinedProcess, ConfinedRequest, RequestLimits
from ..errors import DataError
from .chat import PROMPT_ADVICE, ROW_ADVICE
from .chat_source import ChatSource
from .json_lines import Record
from .row_counts import RowCounts

CPU_SECONDS: Final = 5
"""Processor time in seconds for compiling, and for each conversation."""
LONGEST: Final = 16 << 20
"""Largest number of characters of a conversation; bounds the memory that a request can give a template by 768 MiB."""
_NBYTES: Final = 256 << 20
_NBYTES_A_CHARACTER: Final = 32
"""Memory for rendering in bytes: a constant, and a number for each character (pieces, joined text, JSON and its encoding)."""
_WRITTEN: Final = 1 << 18
_WRITTEN_A_CHARACTER: Final = 8
"""Largest number of characters that a template may write for a row: a constant, and a number for each character of the row."""
_LONGEST_ERROR: Final = 1000
_JSON_A_CHARACTER: Final = 12
"""Largest size in bytes of a character in ASCII JSON, a surrogate pair."""
_ROW: Final = Allowance(
    RequestLimits(CPU_SECONDS, 64 << 20, _JSON_A_CHARACTER * (_WRITTEN + _LONGEST_ERROR)),
    size_per_second=1 << 13,  # finding the answers renders the row once or twice per answer
    nbytes_per_size=64,
    answer_per_size=_JSON_A_CHARACTER * _WRITTEN_A_CHARACTER,
)
"""Limits for a row, by the characters of its JSON."""
_CLOSED: Final = "conversations are no longer rendered, as the server is shutting down; ask another one, or this one later"


class ChatProcess:
    """A chat template in a process, which renders one conversation at a time and can be shared by threads.

    Args:
        source: the template.
        most: largest number of characters of the messages of a prompt, and of its text; capped by `LONGEST`.
        now: function that returns the date for a prompt; rows have a fixed date.
        cpu_seconds: processor time for each conversation, in whole seconds.

    Raises:
        DataError: the template has an error, or compiling it takes too much time or memory.
        ProcessUnavailable: the process does not start.
    """

    def __init__(
        self,
        source: ChatSource,
        most: int = LONGEST,
        now: Callable[[], datetime] = datetime.now,
        cpu_seconds: int = CPU_SECONDS,
    ) -> None:
        self._name, self._most, self._now = source.name, min(most, LONGEST), now
        self._prompt = RequestLimits(cpu_seconds, _NBYTES + self._most * _NBYTES_A_CHARACTER, _JSON_A_CHARACTER * (self._most + _LONGEST_ERROR))
        self._row = replace(_ROW, least=replace(_ROW.least, seconds=cpu_seconds))
        content = {"source": source.source, "name": source.name, "words": dict(source.words), "tools": source.tools}
        limits = RequestLimits(cpu_seconds, _NBYTES, _JSON_A_CHARACTER * _LONGEST_ERROR)
        opening = ConfinedRequest(json.dumps(content), limits, f"the chat template of {source.name}", "name another with --chat-template FILE")
        self._process = ConfinedProcess("nntask.data.chat", opening, name="the process that renders conversations", closed=_CLOSED)

    def prompt(self, messages: Sequence[Mapping[str, str]], where: str) -> str:
        """Return the text of a conversation up to the assistant's next answer; `where` is its origin, for error messages.

        Raises:
            DataError: the template refuses the conversation, fails, writes too much, or takes too much time or memory.
            ProcessUnavailable: the process was ended or stopped by others, does not start again, or has been closed.
        """
        what = f"{where} is not for the chat template of {self._name}, which"
        if (count := sum(len(word) for message in messages for pair in message.items() for word in pair)) > self._most:
            raise DataError(f"{what} gets at most {self._most:,} characters, got {count:,}", PROMPT_ADVICE)
        content = {"messages": list(messages), "where": where, "now": self._now().isoformat(), "most": self._most}
        return str(self._process.ask(ConfinedRequest(json.dumps(content), self._prompt, what, PROMPT_ADVICE)))

    def rows(self, lines: Iterable[Record], counts: RowCounts) -> Iterator[tuple[Record, str, list[tuple[int, int]]]]:
        """Render rows, a few ahead of the caller, and count unknown keys and answers that the template changes in `counts`.

        Yields:
            The row, its text, and the first and last (excluded) character of each answer.

        Raises:
            DataError: a row has no messages or none of the assistant, or the template refuses them or takes too much time or memory.
            ProcessUnavailable: the process was ended or stopped by others.
        """
        asked = deque[Record]()

        def requests() -> Iterator[ConfinedRequest]:
            for line in lines:
                asked.append(line)
                yield self._request(line)

        for text, answers, numbers, unknown in self._process.answers(requests()):
            counts.numbers.update(numbers)
            counts.unknown.update(unknown)
            yield asked.popleft(), text, [(begin, end) for begin, end in answers]

    def close(self) -> None:
        """End the process for good, even in the middle of a conversation; pending conversations raise `ProcessUnavailable`."""
        self._process.close()

    def _request(self, line: Record) -> ConfinedRequest:
        row = json.dumps(line.values)
        most = _WRITTEN + _WRITTEN_A_CHARACTER * len(row)
        content = f'{{"row": {row}, "where": {json.dumps(line.where)}, "most": {most}}}'
        subject = f"{line.where} is not for the chat template of {self._name}, which"
        return ConfinedRequest(content, self._row.limits(len(row)), subject, ROW_ADVICE)
