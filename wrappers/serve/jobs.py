"""The way from a request to a job of the engine, and from the engine's output to an answer or the events of a stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nntask import DataError, ProcessUnavailable, UsageError
from nntask.data import ChatProcess
from nntask.inference import RunningBatch, Spelling, TextIds, TextRequest, TokenBytes, TokenOffsets, TokenScore

from .answers import DONE, Form, PromptCounts, ToldToken, Written, event
from .engine import Busy, Job, News, Piece, TextEngine
from .errors import ApiError, undecodable
from .pieces import CONTEXT
from .schema import Asked


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a text: its ids and characters."""

    ids: tuple[int, ...]
    text: str


def encoded(asked: Asked, ids: TextIds, template: ChatProcess | None) -> list[Prompt]:
    """Return the prompts of a request.

    Raises:
        ApiError: a prompt is empty, or there is no template for a conversation.
        DataError: the template refuses the conversation.
        ProcessUnavailable: the template's process is not available.
    """
    if asked.messages:
        if template is None:
            why = "this model's tokenizer has no chat template; start the server with --chat-template FILE, or use /v1/completions"
            raise ApiError(400, why, param="messages")
        text = template.prompt(asked.messages, "the request")
        try:
            token_ids = ids.conversation(text)
        except UsageError as error:
            raise ApiError(400, str(error), param="messages") from None
        if not token_ids:
            raise ApiError(400, "the chat template writes nothing for this conversation; change the messages", param="messages")
        return [Prompt(tuple(token_ids), text)]
    prompts = []
    for each in asked.prompts:
        try:
            prompts.append(Prompt(tuple(ids.prompt(each)), each) if isinstance(each, str) else Prompt(each, ""))
        except UsageError as error:
            raise ApiError(400, str(error), param="prompt") from None
    return prompts


def job_of(asked: Asked, prompts: list[Prompt], ids: TextIds, batch: RunningBatch) -> Job:
    """Return the job of a request.

    Raises:
        ApiError: a text could become too long, or a prompt has ids that the model does not know.
    """
    most, texts = batch.shape.longest, []
    for prompt in prompts:
        count = len(prompt.ids)
        if count + (1 if asked.limit is None else asked.limit) > most:
            wanted = "a new one" if asked.limit in (None, 1) else f"{asked.limit} new ones"
            raise ApiError(
                400,
                f"prompt and new tokens must be at most {most} tokens together, got {count} of the prompt and {wanted}; shorten one of them",
                param="messages" if asked.messages else "prompt",
                code="context_length_exceeded",
            )
        limit = max(1, most - count if asked.limit is None else asked.limit)  # one token is computed even if the answer is the prompt alone
        scores_prompt = asked.echo and asked.num_top is not None
        rules = (frozenset(ids.stop), asked.penalties, asked.output_penalties, asked.num_top, scores_prompt)
        texts += [TextRequest(prompt.ids, limit, asked.how, number, *rules) for number in range(asked.n)]
    for text in texts[:: asked.n]:
        try:
            batch.check(text)
        except UsageError as error:
            raise ApiError(400, str(error), param="messages" if asked.messages else "prompt") from None
    return Job(texts, asked.stops)


def full_queue(count: int) -> ApiError:
    """Return the error for a request with `count` texts that do not fit in the queue."""
    why = f"as many texts as may wait do so already, and {count} more were asked for; try again later"
    return ApiError(429, why, code="queue_full", headers={"retry-after": "1"})


class Desk:
    """Delivery of the engine's output to the coroutines that wait for it. All methods except `deliver` and `fail` run in the event loop."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_failure: Callable[[], None] = lambda: None
        self._queues: dict[int, asyncio.Queue[Piece | ApiError]] = {}

    def open(self, loop: asyncio.AbstractEventLoop, on_failure: Callable[[], None]) -> None:
        """Deliver to `loop` from now on; `on_failure` is called there after a failure of the engine."""
        self._loop, self._on_failure = loop, on_failure

    def deliver(self, news: News) -> None:
        """Deliver output; called on the engine's thread."""
        self._call(self._bring, news)

    def fail(self) -> None:
        """Report a failure; called on the engine's thread."""
        self._call(self._on_failure)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: there is no reader any more
                self._loop.call_soon_threadsafe(function, *arguments)

    def _bring(self, news: News) -> None:
        for job, each in news:
            waiting = self._queues.get(id(job))
            if waiting is not None:
                waiting.put_nowait(each)

    @contextlib.contextmanager
    def submitted(self, engine: TextEngine, job: Job) -> Iterator[asyncio.Queue[Piece | ApiError]]:
        """Submit a job and yield the queue of its output. Leaving the context early cancels the job.

        Raises:
            ApiError: too many texts wait, or the engine shuts down.
        """
        self._queues[id(job)] = queue = asyncio.Queue[Piece | ApiError]()
        try:
            engine.submit(job)
            try:
                yield queue
            finally:
                engine.cancel(job)  # no effect if the job is complete
        except Busy:
            raise full_queue(len(job.texts)) from None
        finally:
            del self._queues[id(job)]


class Progress:
    """The texts of a job while they are generated.

    Args:
        prompts: prompts of the request, each with `asked.n` texts.
        decode: ids -> text.
        words: table of the tokens' bytes.
    """

    def __init__(self, asked: Asked, prompts: list[Prompt], form: Form, decode: Callable[[Sequence[int]], str], words: TokenBytes) -> None:
        self._asked, self._form, self._decode, self._words = asked, form, decode, words
        self._prompts = [prompt for prompt in prompts for _ in range(asked.n)]
        self._num_prompt = sum(len(prompt.ids) for prompt in prompts)
        self._texts = [Written() for _ in self._prompts]
        self._offsets: dict[int, TokenOffsets] = {}
        self._waiting: list[list[TokenScore]] = [[] for _ in self._prompts]

    @property
    def is_complete(self) -> bool:
        """Whether all texts have ended."""
        return all(text.end is not None for text in self._texts)

    def add(self, piece: Piece) -> tuple[str, list[ToldToken]]:
        """Add a piece, and return its contribution to the text and to the log-probabilities, preceded by the prompt if the request has `echo`."""
        text, asked, prompt = self._texts[piece.index], self._asked, self._prompts[piece.index]
        begin = (prompt.text or self._decode(prompt.ids)) if asked.echo else ""
        said, scores = "", list[ToldToken]()
        if asked.limit != 0:
            said = piece.text
        if asked.echo and not text.num_pieces:
            said = begin + said
            scores = self._told_prompt(prompt, piece) if asked.num_top is not None else []
        if asked.limit != 0:
            scores += [ToldToken(score.token, len(begin) + offset, score) for offset, score in self._known(piece)]
        text.num_pieces += 1
        text.num_new, text.num_shared = 0 if asked.limit == 0 else piece.num_new, piece.num_shared
        text.text += said
        text.end = piece.end
        text.scores += scores
        return said, scores

    def _known(self, piece: Piece) -> list[tuple[int, TokenScore]]:
        """Return the tokens whose offsets a piece determines, in their order."""
        if self._asked.num_top is None:  # do not call the tokenizer, which may be foreign code, for unused offsets
            return []
        if piece.index not in self._offsets:
            self._offsets[piece.index] = TokenOffsets(self._words, self._prompts[piece.index].ids[-CONTEXT:])
        offsets, waiting, new_offsets = self._offsets[piece.index], self._waiting[piece.index], list[int]()
        for certain, score in piece.scores:
            waiting.append(score)
            new_offsets += offsets.add(score.token, certain)
        if piece.end is not None:
            new_offsets += offsets.end()
        scored = [(offset, waiting[at]) for at, offset in enumerate(new_offsets[: len(waiting)])]
        del waiting[: len(scored)]
        return scored

    def _told_prompt(self, prompt: Prompt, piece: Piece) -> list[ToldToken]:
        """Return the tokens of a prompt.

        The first token may begin with a space that the tokenizer added and that the text does not have.
        """
        ids, scores = prompt.ids, (None, *piece.prompt_scores)
        first = next((at for at, token in enumerate(ids) if not self._words.is_left_out(token)), 0)
        is_cut = self._words.of(ids[first]).startswith(b" ") and not self._decode(ids[: first + 1]).startswith(" ")
        counts, known = Spelling(self._decode).counts(ids, self._words.goes_on), TokenOffsets(self._words, is_whole=True)
        offsets = [offset for each in zip(ids, counts, strict=True) for offset in known.add(*each)] + known.end()
        return [ToldToken(*each, is_cut and at == first) for at, each in enumerate(zip(ids, offsets, scores, strict=True))]

    def answer(self) -> dict[str, Any]:
        """Return the complete answer."""
        return self._form.answer(self._texts, self._counts())

    def _counts(self) -> PromptCounts:
        """Return the prompt counts. Of several texts of one prompt, the first one counts the tokens that were cached before the request."""
        return PromptCounts(self._num_prompt, sum(text.num_shared for text in self._texts[:: self._asked.n]))

    async def events(self, queue: asyncio.Queue[Piece | ApiError]) -> AsyncIterator[bytes]:
        """Yield the events of a stream until all texts have ended or the job fails."""
        for index in range(len(self._texts)):
            if (begin := self._form.begin(index)) is not None:
                yield begin
        while not self.is_complete:
            piece = await queue.get()
            if isinstance(piece, ApiError):
                yield event(piece.body())
                return
            try:
                answer = self._form.more(piece.index, *self.add(piece), piece.end)
            except (DataError, ProcessUnavailable) as error:
                yield event(undecodable(error).body())
                return
            yield answer
        if self._asked.tells_usage:
            yield self._form.counts(self._texts, self._counts())
        yield DONE

    async def until_complete(self, queue: asyncio.Queue[Piece | ApiError]) -> dict[str, Any]:
        """Return the complete answer when all texts have ended.

        Raises:
            ApiError: the job failed.
        """
        try:
            while not self.is_complete:
                piece = await queue.get()
                if isinstance(piece, ApiError):
                    raise piece
                self.add(piece)
            return self.answer()
        except (DataError, ProcessUnavailable) as error:
            raise undecodable(error) from None
