"""A chat template in a confined process: prompts of a server's conversations, and the texts of rows with their answers.

A template is a program that came with a model. Jinja's sandbox keeps it from files and from Python's objects, but not from loops without end or texts
without bound, in statements, in filters and already where constants are folded as it is compiled. So it is compiled and rendered in a process that
has limits of time and memory for each conversation (`nntask.confined`).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Final

from ..confined.process import ConfinedProcess, ConfinedRequest, RequestLimits, Subject, Wording
from ..errors import DataError
from .chat_source import ChatSource
from .json_lines import Record
from .row_counts import RowCounts

CPU_SECONDS: Final = 5
"""Seconds of a processor for compiling and for each conversation."""
WALL_SECONDS: Final = 4 * CPU_SECONDS
LONGEST: Final = 16 << 20
"""Most characters of any conversation, so that no limit of a request's size gives a template more than 768 MiB."""
_NBYTES: Final = 256 << 20
_NBYTES_A_CHARACTER: Final = 32
"""Memory that a text takes while it is made: pieces, their sum, JSON and its bytes."""
_ROW: Final = 64 << 20
_ROW_A_CHARACTER: Final = 64
"""Memory for a row, which is rendered more than once."""
_WRITTEN: Final = 1 << 18
_WRITTEN_A_CHARACTER: Final = 8
"""Most characters that a template may write for a row, and more of them for each of the row's own."""
_CHARACTERS_A_SECOND: Final = 1 << 13
"""Characters of a row for which it gets another second: finding the answers renders it once or twice for each."""
_LONGEST_ERROR: Final = 1000
_JSON_A_CHARACTER: Final = 12
"""Most bytes of a character in JSON's ASCII, a surrogate pair."""
_WORDING: Final = Wording(
    "the process that writes conversations down",
    "conversations are not written down any more, as the server is shutting down; ask another one, or this one later",
)


class ChatProcess:
    """A template that writes conversations down, one at a time, whatever the number of threads that ask.

    Args:
        source: the template.
        most: characters of a prompt, given and written; never more than `LONGEST`.
        now: the date that the template is told with each prompt; that of rows is fixed.
        cpu_seconds: whole seconds of a processor for each conversation.
        wall_seconds: time for compiling and for each conversation, in seconds.

    Raises:
        DataError: the template has a mistake, or takes too much time or memory already where it is compiled.
        ProcessUnavailable: the process does not start.
    """

    def __init__(
        self,
        source: ChatSource,
        most: int = LONGEST,
        now: Callable[[], datetime] = datetime.now,
        cpu_seconds: int = CPU_SECONDS,
        wall_seconds: float = WALL_SECONDS,
    ) -> None:
        self._name, self._most, self._now = source.name, min(most, LONGEST), now
        self._seconds, self._wall_seconds = cpu_seconds, wall_seconds
        content = {"source": source.source, "name": source.name, "words": dict(source.words), "tools": source.tools}
        subject = Subject(f"the chat template of {source.name}", "name another with --chat-template FILE")
        opening = ConfinedRequest(json.dumps(content), self._limits(_NBYTES, 0), subject)
        self._process = ConfinedProcess("nntask.data.chat_service", opening, _WORDING)

    def prompt(self, messages: Sequence[Mapping[str, str]], where: str) -> str:
        """Return the text of a conversation up to where the assistant's next answer begins.

        Args:
            messages: the conversation.
            where: the place that the conversation is from, for messages.

        Raises:
            DataError: the template refuses it, fails at it, writes too much, or takes too much time or memory.
            ProcessUnavailable: the process was ended or stopped by others, does not start again, or has been closed.
        """
        what = f"{where} is not for the chat template of {self._name}, which"
        if (count := sum(len(word) for message in messages for pair in message.items() for word in pair)) > self._most:
            raise DataError(f"{what} gets at most {self._most:,} characters, got {count:,}; change the messages")
        content = {"messages": list(messages), "where": where, "now": self._now().isoformat(), "most": self._most}
        limits = self._limits(_NBYTES + self._most * _NBYTES_A_CHARACTER, self._most)
        return str(self._process.ask(ConfinedRequest(json.dumps(content), limits, Subject(what, "change the messages"))))

    def rows(self, lines: Iterable[Record], counts: RowCounts) -> Iterator[tuple[Record, str, list[tuple[int, int]]]]:
        """Write rows down, ahead of the caller.

        Args:
            lines: rows with messages.
            counts: counts unknown keys and answers that the template changes.

        Yields:
            The row, its text, and the first and last (excluded) character of each answer.

        Raises:
            DataError: a row has no messages, none of the assistant, or the template refuses them or takes too much time or memory.
            ProcessUnavailable: the process was ended or stopped by others.
        """
        asked = deque[Record]()

        def requests() -> Iterator[ConfinedRequest]:
            for line in lines:
                asked.append(line)
                yield self._row(line)

        for text, answers, numbers, unknown in self._process.answers(requests()):
            counts.numbers.update(numbers)
            counts.unknown.update(unknown)
            yield asked.popleft(), text, [(begin, end) for begin, end in answers]

    def close(self) -> None:
        """End the process for good, also in the middle of a conversation; those that wait are refused."""
        self._process.close()

    def _row(self, line: Record) -> ConfinedRequest:
        row = json.dumps(line.values)
        most = _WRITTEN + _WRITTEN_A_CHARACTER * len(row)
        content = f'{{"row": {row}, "where": {json.dumps(line.where)}, "most": {most}}}'
        subject = Subject(f"{line.where} is not for the chat template of {self._name}, which", "mend or remove the line, or fix the template")
        return ConfinedRequest(content, self._limits(_ROW + len(row) * _ROW_A_CHARACTER, most, len(row) // _CHARACTERS_A_SECOND), subject)

    def _limits(self, nbytes: int, written: int, more_seconds: int = 0) -> RequestLimits:
        answer_nbytes = _JSON_A_CHARACTER * (written + _LONGEST_ERROR)
        return RequestLimits(self._seconds + more_seconds, nbytes, answer_nbytes, self._wall_seconds + 4 * more_seconds)
