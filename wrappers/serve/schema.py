"""Requests in OpenAI's format: a table of fields with checks and defaults for each endpoint.

An unsupported field is refused unless its value is empty or the default; a field without effect is accepted. Unknown fields are listed in the
response (`Asked.ignored`), or refused if the server is strict; empty ones are ignored. A duplicate field is refused.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from nntask.inference import OutputPenalties, Penalties, Sampling

from .errors import ApiError

Check = Callable[[str, Any], Any]
MOST_TOP: Final = 20
"""Largest number of alternatives reported for each chosen token."""
_MOST_TOKENS: Final = 1 << 31
NO_LIMIT: Final = _MOST_TOKENS + 1
"""Number of new tokens that means "until the context is full"."""
_MOST_STOPS: Final = 16
_LONGEST_STOP: Final = 1000
_LEAST_TOP_P: Final = 1e-9
_EFFECTLESS: Final = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls"),
    *("verbosity", "keep_alive", "cache_prompt", "prediction"),
)
"""Fields that describe the request or how it is served, and do not affect the text."""
_UNSUPPORTED: Final = (
    *("tools", "tool_choice", "functions", "function_call", "response_format", "modalities", "audio", "suffix", "web_search_options"),
    *("grammar", "json_schema", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
    *("chat_template_kwargs", "min_p", "ignore_eos"),
)
_OF_MESSAGES: Final = ("role", "content", "name", "refusal", "annotations")
"""Fields of messages; the last three have no effect."""
_ROLE: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_CALLS: Final = ("tool_calls", "function_call")
_NOTHING: Final[Mapping[str, tuple[Any, ...]]] = {
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
}
"""Values of unsupported fields that are the default, and so accepted."""
_EMPTY: Final[tuple[Any, ...]] = (None, "", [], {}, False)
"""Values that are empty for every field."""


def refused(name: str, rule: str, value: Any) -> ApiError:
    """Return the error for a value that breaks a rule."""
    return ApiError(400, f"{name} must be {rule}, got {_shown(value)}; change it", param=name)


def _shown(value: Any) -> str:
    """Return a value as JSON of at most 80 characters, for messages."""
    try:
        shown = json.dumps(value, ensure_ascii=True)
    except RecursionError:
        shown = f"a deeply nested {type(value).__name__}"
    return shown if len(shown) <= 80 else shown[:77] + "..."


def _where(rule: str, holds: Callable[[Any], bool], kind: Callable[[Any], Any] = lambda value: value) -> Check:
    """Return a check that refuses values for which `holds` is false, and converts others by `kind`; `rule` describes the values for the message."""

    def check(name: str, value: Any) -> Any:
        if not holds(value):
            raise refused(name, rule, value)
        return kind(value)

    return check


def _integer(low: int, high: int, also: str = "") -> Check:
    """Return a check for whole numbers; `also` describes a further accepted value for the message."""
    return _where(f"a whole number from {low} to {high}{also}", lambda value: type(value) is int and low <= value <= high)


def _number(low: float, high: float) -> Check:
    return _where(f"a number from {low:g} to {high:g}", lambda value: type(value) in (int, float) and low <= value <= high, float)


_flag: Final = _where("true or false", lambda value: type(value) is bool)


def _or(other: Any, meaning: Any, check: Check) -> Check:
    """Return a check that also accepts `other`, which means `meaning`."""

    def either(name: str, value: Any) -> Any:
        return meaning if type(value) is type(other) and value == other else check(name, value)

    return either


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise refused(name, "a string", value)
    return _encodable(name, value)


def _encodable(name: str, text: str) -> str:
    """Return `text` if it can be encoded: it has no unpaired surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise refused(name, "Unicode text without unpaired surrogates", text) from None
    return text


def _stops(name: str, value: Any) -> tuple[str, ...]:
    found = [value] if isinstance(value, str) else value
    is_list = isinstance(found, list) and len(found) <= _MOST_STOPS
    if not is_list or not all(isinstance(each, str) and len(each) <= _LONGEST_STOP for each in found):
        raise refused(name, f"a string or at most {_MOST_STOPS} of them, of at most {_LONGEST_STOP} characters", value)
    return tuple(_encodable(name, each) for each in found if each)


def _biases(name: str, value: Any) -> dict[int, float]:
    rule = "an object of at most 1024 token ids, each with a number from -100 to 100"
    if not isinstance(value, dict) or len(value) > 1024:
        raise refused(name, rule, value)
    found = {}
    for key, number in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10) or type(number) not in (int, float) or not -100 <= number <= 100:
            raise refused(name, rule, {key: number})
        found[int(key)] = float(number)
    return found


def _stream_options(name: str, value: Any) -> bool:
    """Return whether the stream ends with token counts."""
    if not isinstance(value, dict):
        raise refused(name, 'an object with "include_usage"', value)
    wanted = value.get("include_usage")
    return wanted is not None and bool(_flag(f"{name}.include_usage", wanted))


def _prompts(name: str, value: Any) -> tuple[str | tuple[int, ...], ...]:
    """Return the prompts, each as text or ids."""

    def is_ids(each: Any) -> bool:
        return isinstance(each, list) and bool(each) and all(type(token) is int for token in each)

    found = [value] if isinstance(value, str) or is_ids(value) else value
    if not isinstance(found, list) or not found or not all(isinstance(each, str) or is_ids(each) for each in found):
        raise refused(name, "a string, a list of token ids, or a list of either", value)
    return tuple(_encodable(name, each) if isinstance(each, str) else tuple(each) for each in found)


def _messages(name: str, value: Any) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list) or not value:
        rule = 'a list of objects with "role" and "content", the latter a string or a list of {"type": "text", "text": ...}'
        raise refused(name, rule, value)
    return tuple(_message(f"{name}[{number}]", each) for number, each in enumerate(value))


def _message(where: str, message: Any) -> dict[str, str]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise refused(where, 'an object with "role" and "content"', message)
    if not _ROLE.fullmatch(message["role"]):  # the template writes the role between special tokens, so it must not contain any
        raise refused(f"{where}.role", 'at most 64 letters, digits, "_" and "-", such as user', message["role"])
    if calls := [key for key in _CALLS if message.get(key)]:
        raise refused(where, f"without {calls[0]}, which is not supported", message)
    content = message.get("content")
    if content is None and message["role"] == "assistant":
        content = ""  # OpenAI's own answers have no content if they contain a call or a refusal
    if isinstance(content, list):
        if not all(isinstance(each, dict) and each.get("type") == "text" and isinstance(each.get("text"), str) for each in content):
            raise refused(where, 'a list of {"type": "text", "text": ...}, the only kind of content that this model reads', message)
        content = "".join(each["text"] for each in content)
    if not isinstance(content, str):
        raise refused(where, 'an object with "role" and "content"', message)
    return {"role": message["role"], "content": _encodable(where, content)}


_COMMON: Final[Mapping[str, tuple[Check, Any]]] = {
    "model": (_text, None),
    "temperature": (_number(0, 2), 1.0),
    "top_p": (_number(0, 1), 1.0),
    "top_k": (_or(-1, 0, _integer(0, _MOST_TOKENS)), 0),
    "n": (_integer(1, 128), 1),
    "stream": (_flag, False),
    "stream_options": (_stream_options, False),
    "stop": (_stops, ()),
    "max_tokens": (_or(-1, NO_LIMIT, _integer(0, _MOST_TOKENS, ", or -1 for the rest of the context")), None),
    "presence_penalty": (_number(-2, 2), 0.0),
    "frequency_penalty": (_number(-2, 2), 0.0),
    "repetition_penalty": (_number(0.01, 100), 1.0),
    "logit_bias": (_biases, {}),
    "seed": (_integer(-(1 << 63), (1 << 63) - 1), None),
}
_COMPLETION: Final = {
    **_COMMON,
    "prompt": (_prompts, None),
    "logprobs": (_or(True, 1, _or(False, None, _integer(0, MOST_TOP))), None),
    "echo": (_flag, False),
    "best_of": (_integer(1, 128), None),
}
_CHAT: Final = {
    **_COMMON,
    "messages": (_messages, None),
    "max_completion_tokens": (_or(-1, NO_LIMIT, _integer(0, _MOST_TOKENS, ", or -1 for the rest of the context")), None),
    "logprobs": (_flag, False),
    "top_logprobs": (_integer(0, MOST_TOP), None),
}


@dataclass(frozen=True, slots=True)
class Asked:
    """A parsed request.

    Attributes:
        prompts: prompts of a completion.
        messages: messages of a conversation.
        limit: maximum number of new tokens; None to fill the context.
        ignored: unknown fields.
        num_top: number of alternatives to report for each token; None for no log-probabilities.
        tells_usage: whether a stream ends with token counts.
    """

    model: str
    prompts: tuple[str | tuple[int, ...], ...]
    messages: tuple[dict[str, str], ...]
    n: int
    limit: int | None
    how: Sampling
    penalties: Penalties
    output_penalties: OutputPenalties | None
    stops: tuple[str, ...]
    num_top: int | None
    echo: bool
    stream: bool
    tells_usage: bool
    ignored: tuple[str, ...] = ()

    @property
    def num_texts(self) -> int:
        """Number of requested texts."""
        return max(1, len(self.prompts)) * self.n


def parsed(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a request's body.

    Raises:
        ApiError: the body is not a JSON object.
    """

    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is not a JSON number")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) < len(pairs):
            raise ValueError("an object has a duplicate name")
        return members

    try:
        content = json.loads(body.decode(), parse_constant=refuse, object_pairs_hook=once)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body must be UTF-8 text, and byte {error.start} is not; encode it in UTF-8") from None
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body must be JSON: {why}; fix it") from None
    if not isinstance(content, dict):
        raise ApiError(400, f"the body must be a JSON object, got {type(content).__name__}; put the fields into an object")
    return content


def completion(body: Mapping[str, Any], *, is_strict: bool = False) -> Asked:
    """Return a request to ``/v1/completions``.

    Args:
        is_strict: whether unknown fields are refused.

    Raises:
        ApiError: a field breaks its rule.
    """
    values, ignored = _checked(body, _COMPLETION, ("model", "prompt"), is_strict=is_strict)
    if values["best_of"] not in (None, values["n"]):
        raise ApiError(400, f"best_of must equal n, got {values['best_of']} and {values['n']}: all texts are returned; leave it out", param="best_of")
    limit = 16 if values["max_tokens"] is None else values["max_tokens"]
    if limit == 0 and not values["echo"]:
        raise refused("max_tokens", "at least 1 without echo", 0)
    limit = None if limit == NO_LIMIT else limit
    return _asked(values, ignored=ignored, prompts=values["prompt"], limit=limit, num_top=values["logprobs"], echo=values["echo"])


def chat(body: Mapping[str, Any], *, is_strict: bool = False) -> Asked:
    """Return a request to ``/v1/chat/completions``; the arguments are those of `completion`.

    Raises:
        ApiError: a field breaks its rule.
    """
    values, ignored = _checked(body, _CHAT, ("model", "messages"), is_strict=is_strict)
    if values["top_logprobs"] and not values["logprobs"]:
        raise ApiError(400, "top_logprobs requires logprobs: true; add it, or leave out top_logprobs", param="top_logprobs")
    limits = [values[name] for name in ("max_completion_tokens", "max_tokens") if values[name] is not None]
    if limits and limits[0] == 0:
        raise refused("max_completion_tokens", "at least 1", 0)
    return _asked(
        values,
        ignored=(*ignored, *_unknown_of_messages(body["messages"], is_strict=is_strict)),
        messages=values["messages"],
        limit=limits[0] if limits and limits[0] != NO_LIMIT else None,
        num_top=(values["top_logprobs"] or 0) if values["logprobs"] else None,
    )


def _asked(values: Mapping[str, Any], **own: Any) -> Asked:
    """Return the request with the fields that both endpoints share, and `own`."""
    changes = OutputPenalties(values["presence_penalty"], values["frequency_penalty"], values["logit_bias"])
    seed = secrets.randbits(63) if values["seed"] is None else values["seed"] % (1 << 63)
    how = Sampling(values["temperature"], values["top_k"], max(values["top_p"], _LEAST_TOP_P), seed)
    common = {
        "model": values["model"],
        "n": values["n"],
        "how": how,
        "penalties": Penalties(values["repetition_penalty"]),
        "output_penalties": None if changes == OutputPenalties() else changes,
        "stops": values["stop"],
        "stream": values["stream"],
        "tells_usage": values["stream_options"],
    }
    return Asked(**{"prompts": (), "messages": (), "echo": False, **common, **own})


def _checked(
    body: Mapping[str, Any], table: Mapping[str, tuple[Check, Any]], needed: Sequence[str], *, is_strict: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the values of all fields of a table, and the names of unknown fields."""
    for name in needed:
        if body.get(name) is None:
            raise ApiError(400, f"{name} is missing; add it to the request", param=name)
    values, unknown = {name: default for name, (_, default) in table.items()}, []
    for name, value in body.items():
        if name in table:
            if value is not None:
                values[name] = table[name][0](name, value)
        elif name in _UNSUPPORTED:
            if value not in _EMPTY and value not in _NOTHING.get(name, ()):
                raise ApiError(400, f"{name} is not supported here, got {_shown(value)}; leave it out", param=name)
        elif name not in _EFFECTLESS and value not in _EMPTY:
            unknown.append(_plain(name))
            if is_strict:
                raise ApiError(400, f"unknown field {name!a:.80}; the fields of this request are {', '.join(sorted(table))}", param=_plain(name))
    if any(isinstance(value, float) and not math.isfinite(value) for value in values.values()):
        raise ApiError(400, "numbers must be finite; change them")
    return values, tuple(unknown)


def _unknown_of_messages(messages: Sequence[Mapping[str, Any]], *, is_strict: bool) -> tuple[str, ...]:
    """Return the names of unknown fields of messages, as ``messages[].name``."""
    found: dict[str, None] = {}
    for number, message in enumerate(messages):
        for key in [key for key, value in message.items() if key not in (*_OF_MESSAGES, *_CALLS) and value not in _EMPTY]:
            if is_strict:
                raise refused(f"messages[{number}]", f"an object of {', '.join(_OF_MESSAGES)}, without {_plain(key)}", message)
            found[f"messages[].{_plain(key)}"] = None
    return tuple(found)


def _plain(name: str) -> str:
    """Return a client's name for logs and headers: short printable ASCII without separators."""
    return ascii(name)[1:-1].replace(",", "\\x2c")[:80]
