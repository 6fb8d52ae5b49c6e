"""Preparation of a row's conversation for a chat template: the checks, and the changes that transformers makes before it renders messages."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ..errors import DataError
from .json_lines import Record
from .row_keys import is_nothing

if TYPE_CHECKING:
    from .chat_blocks import TemplateReads

MESSAGES: Final = "messages"
ASSISTANT: Final = "assistant"
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
_GIVEN: Final = frozenset(("tools", "documents", "chat_template_kwargs"))
"""Keys of a row that become variables of the template."""
_VALUES: Final = frozenset(("default", "const", "enum", "examples"))
"""Keys of a JSON schema under which null is a meaningful value."""
_VARIABLES: Final = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize", "conversation", "padding")
)
"""Names that `chat_template_kwargs` may not set, because they are other arguments of ``apply_chat_template``."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation of a row.

    Args:
        said: messages of the row, unchanged.
        messages: messages as the template receives them.
        learnt: whether each message is an answer to learn.
        given: further variables of the template.
        where: position of the row in its file, for error messages.
        has_nulls: whether tools or arguments of function calls contain nulls, which columnar files add for missing keys.
    """

    said: list[Mapping[str, Any]]
    messages: list[dict[str, Any]]
    learnt: list[bool]
    given: Mapping[str, Any]
    where: str
    has_nulls: bool


def conversation_of(line: Record, reads: TemplateReads) -> Conversation:
    """Return the conversation of a row, for a template that reads the given parts.

    Raises:
        DataError: the row has no messages or none of the assistant, or a value of the wrong type.
    """
    raw_messages = messages_of(line)
    learnt = [_is_learnt(each, line.where) for each in raw_messages]
    messages = [plain_message(each, reads, line.where) for each in raw_messages]
    has_nulls = any("tool_calls" in each and _has_null_arguments(each) for each in raw_messages)
    given: dict[str, Any] = {"tools": None, "documents": None}
    if not _GIVEN.isdisjoint(line.values):
        given = {name: _list_under(line, name) for name in given} | _variables(line)
        try:
            given["tools"], tools_have_nulls = _without_nulls(given["tools"])
        except RecursionError:
            raise DataError(f'{line.where} has "tools" that are nested too deeply', "fix or remove the line") from None
        has_nulls |= tools_have_nulls
    return Conversation(raw_messages, messages, learnt, given, line.where, has_nulls)


def messages_of(line: Record) -> list[Mapping[str, Any]]:
    """Return the messages of a row.

    Raises:
        DataError: the row has no list of messages, or no message of the assistant.
    """
    messages = line.values.get(MESSAGES)
    is_list = isinstance(messages, list) and all(isinstance(each, Mapping) and isinstance(each.get("role"), str) for each in messages)
    if not is_list or not messages:
        shape = '[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
        raise DataError(f'{line.where} must have "{MESSAGES}", such as {shape}', "fix or remove the line")
    if all(each["role"] != ASSISTANT for each in messages):
        raise DataError(f"{line.where} has no message of the role {ASSISTANT}, whose answers are learnt", "fix or remove the line")
    return list(messages)


def plain_message(message: Mapping[str, Any], reads: TemplateReads, where: str) -> dict[str, Any]:
    """Return a message as a template receives it: without nulls and the weight, with reasoning under all names that templates read.

    Parts of text are joined into a string unless the template reads parts itself.

    Raises:
        DataError: the content is neither a string nor a list of text parts.
    """
    if len(message) == 2 and isinstance(message.get("content"), str):  # fast path for nearly all messages
        return dict(message)
    plain = {key: value for key, value in message.items() if value is not None and key != "weight"}
    reasoning = next((plain[key] for key in _REASONING if key in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    content = plain.get("content")
    if isinstance(content, list):
        if not all(map(_is_text, content)):
            shape = '{"type": "text", "text": "..."}'
            raise DataError(f"{where} has content that is not text: {json.dumps(content)[:60]}", f"give a string or parts such as {shape}")
        if "text" not in reads.names:  # the template would print the list in Python's syntax
            plain["content"] = "".join(each["text"] for each in content)
    elif content is not None and not isinstance(content, str):
        raise DataError(f'{where} must have a string under "content", got {json.dumps(content)[:60]}', "fix or remove the line")
    if reads.takes_objects and isinstance(plain.get("tool_calls"), list):
        plain["tool_calls"] = [_with_object(each) for each in plain["tool_calls"]]
    return plain


def _is_text(entry: Any) -> bool:
    """Return whether an entry of a message's content is a text part without other values."""
    is_text = isinstance(entry, Mapping) and entry.get("type") == "text" and isinstance(entry.get("text"), str)
    return is_text and all(key in ("type", "text") or is_nothing(value) for key, value in entry.items())


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message's content."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(each["text"] for each in content)
    return content if isinstance(content, str) else ""


def _is_learnt(message: Mapping[str, Any], where: str) -> bool:
    weight, role = message.get("weight"), message["role"]
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        raise DataError(f'{where} must have 0 or 1 as the "weight" of a message, got {json.dumps(weight)[:40]}', "use 1 to learn it, else 0")
    if weight == 1 and role != ASSISTANT:
        raise DataError(
            f'{where} has "weight" 1 in a message of the role {role}, and only what the role {ASSISTANT} says is learnt', "remove the weight"
        )
    return role == ASSISTANT and weight != 0


def _list_under(line: Record, name: str) -> list[Mapping[str, Any]] | None:
    """Return the list of objects under a key, decoded from a JSON string if necessary; None if it is empty; raise DataError for any other value."""
    value = line.values.get(name)
    if isinstance(value, str) and value.strip():
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if is_nothing(value):
        return None
    if not isinstance(value, list) or not all(isinstance(each, Mapping) for each in value):
        raise DataError(f'{line.where} must have a list of objects under "{name}", got {json.dumps(value)[:60]}', "fix the line")
    return value


def _without_nulls(value: Any) -> tuple[Any, bool]:
    """Return tools without the meaningless nulls of their schemas, and whether there were any."""
    if isinstance(value, list):
        entries = [_without_nulls(each) for each in value]
        return [each for each, _ in entries], any(has_nulls for _, has_nulls in entries)
    if not isinstance(value, Mapping):
        return value, False
    cleaned, has_nulls = {}, False
    for key, each in value.items():
        if each is None and key not in _VALUES:
            has_nulls = True
            continue
        cleaned[key], within = (each, False) if key in _VALUES else _without_nulls(each)
        has_nulls |= within
    return cleaned, has_nulls


def _has_null_arguments(message: Mapping[str, Any]) -> bool:
    """Return whether a function call in a message has an object of arguments with a null value."""
    calls = message.get("tool_calls")
    functions = [call.get("function", call) for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []
    arguments = [each.get("arguments") for each in functions if isinstance(each, Mapping)]
    return any(isinstance(each, Mapping) and None in each.values() for each in arguments)


def _variables(line: Record) -> dict[str, Any]:
    """Return the variables that ``chat_template_kwargs`` sets; raise DataError unless it is an object that sets none of `_VARIABLES`."""
    value = line.values.get("chat_template_kwargs")
    if is_nothing(value):
        return {}
    if not isinstance(value, Mapping):
        raise DataError(f'{line.where} must have an object under "chat_template_kwargs", got {json.dumps(value)[:60]}', "fix the line")
    if wrong := sorted(_VARIABLES & set(value)):
        raise DataError(f'{line.where} sets {wrong[0]} under "chat_template_kwargs", which is for other variables of the template', "remove it")
    return dict(value)


def _with_object(call: Any) -> Any:
    """Return a function call with its arguments as an object, decoded from the JSON string of OpenAI's format if possible."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(arguments, str):
        return call
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return call
    if not isinstance(value, dict):
        return call
    changed = {**function, "arguments": value}  # type: ignore[dict-item]
    return {**call, "function": changed} if "function" in call else changed


def names_of(key: str) -> frozenset[str]:
    """Return the names by which templates may read a key of a message."""
    return frozenset(_REASONING if key in _REASONING else (key,))
