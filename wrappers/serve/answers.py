"""Generated texts as the objects that OpenAI's clients read: complete answers and the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from nntask.inference import TokenBytes, TokenScore

DONE: Final = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class ToldToken:
    """A token whose log-probability is part of the answer.

    Attributes:
        offset: number of characters of the text before the token.
        score: probabilities of the token; None for the first token of a text, which has no context.
        is_cut: whether the text lacks the space with which the token's bytes begin.
    """

    token: int
    offset: int
    score: TokenScore | None
    is_cut: bool = False


@dataclass(slots=True)
class Written:
    """The part of one text of an answer that has been generated so far."""

    text: str = ""
    end: str | None = None
    scores: list[ToldToken] = field(default_factory=list)
    num_new: int = 0
    num_shared: int = 0
    num_pieces: int = 0


@dataclass(frozen=True, slots=True)
class PromptCounts:
    """Number of prompt tokens of a request, each prompt counted once, and how many of them were in the cache already."""

    num_tokens: int
    num_shared: int


class Form:
    """Format of the answers to one request.

    Args:
        is_chat: whether the answers are messages of a conversation.
        name: id of the answer.
        created: seconds since 1970.
        model: name of the model, as the request gave it.
        fingerprint: id of the software and the model.
        words: table of the tokens' texts and bytes.
        tells_scores: whether the answers include log-probabilities.
    """

    def __init__(self, *, is_chat: bool, name: str, created: int, model: str, fingerprint: str, words: TokenBytes, tells_scores: bool) -> None:
        self.is_chat, self._words, self._tells_scores = is_chat, words, tells_scores
        self._head = {"id": name, "created": created, "model": model, "system_fingerprint": fingerprint}

    def answer(self, texts: Sequence[Written], prompts: PromptCounts) -> dict[str, Any]:
        """Return a complete answer."""
        choices = []
        for index, text in enumerate(texts):
            said: dict[str, Any] = {"message": {"role": "assistant", "content": text.text, "refusal": None}} if self.is_chat else {"text": text.text}
            choices.append({"index": index, **said, "logprobs": self._scores(text.scores), "finish_reason": text.end})
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": usage(texts, prompts)}

    def begin(self, index: int) -> bytes | None:
        """Return the event that begins a text; None for completions, which have no such event."""
        return self._event(index, {"delta": {"role": "assistant", "content": ""}}, None, None) if self.is_chat else None

    def more(self, index: int, text: str, scores: Sequence[ToldToken], end: str | None) -> bytes:
        """Return the event with the next part of a text; `end` is the reason why the text ends, or None."""
        said: dict[str, Any] = {"delta": {"content": text} if text or end is None else {}} if self.is_chat else {"text": text}
        return self._event(index, said, self._scores(scores) if scores else None, end)

    def counts(self, texts: Sequence[Written], prompts: PromptCounts) -> bytes:
        """Return the event with the token counts."""
        return event({**self._head, "object": self._chunk, "choices": [], "usage": usage(texts, prompts)})

    @property
    def _chunk(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _event(self, index: int, said: dict[str, Any], logprobs: Any, end: str | None) -> bytes:
        choice = {"index": index, **said, "logprobs": logprobs, "finish_reason": end}
        return event({**self._head, "object": self._chunk, "choices": [choice]})

    def _scores(self, scores: Sequence[ToldToken]) -> dict[str, Any] | None:
        """Return the log-probabilities in the form of the endpoint; None if the request did not ask for them."""
        if not self._tells_scores:
            return None
        if self.is_chat:
            return {"content": [self._in_chat(each.score) for each in scores if each.score is not None], "refusal": None}
        return {
            "tokens": [self._words.word(each.token)[each.is_cut :] for each in scores],
            "token_logprobs": [None if each.score is None else _told(each.score.logprob) for each in scores],
            "top_logprobs": [None if each.score is None else self._top(each.score) for each in scores],
            "text_offset": [each.offset for each in scores],
        }

    def _top(self, score: TokenScore) -> dict[str, float]:
        """Return the best tokens and the chosen one; of several tokens with the same spelling only the best."""
        found: dict[str, float] = {}
        for token, logprob in (*score.top, (score.token, score.logprob)):
            found.setdefault(self._words.word(token), _told(logprob))
        return found

    def _in_chat(self, score: TokenScore) -> dict[str, Any]:
        found = [self._entry(token, logprob) for token, logprob in ((score.token, score.logprob), *score.top)]
        return {**found[0], "top_logprobs": found[1:]}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._words.word(token), "logprob": _told(logprob), "bytes": list(self._words.of(token))}


def usage(texts: Sequence[Written], prompts: PromptCounts) -> dict[str, Any]:
    """Return the token counts of an answer."""
    new = sum(text.num_new for text in texts)
    counts = {"prompt_tokens": prompts.num_tokens, "completion_tokens": new, "total_tokens": prompts.num_tokens + new}
    return {**counts, "prompt_tokens_details": {"cached_tokens": prompts.num_shared}}


def _told(logprob: float) -> float:
    """Return a finite number for JSON; nearly impossible tokens get the smallest value that OpenAI reports."""
    return max(logprob, -9999.0)


def event(value: dict[str, Any]) -> bytes:
    """Return an object as an event of a stream."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
