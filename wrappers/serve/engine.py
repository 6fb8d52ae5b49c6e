"""The engine: the single thread that owns the runtime, takes jobs from a queue, and delivers the new tokens of their texts after each step.

Texts start in order of arrival, as soon as a slot and pages of the cache are free; `submit` limits the number that may wait. An idle thread first
records the step of prompts, and then sleeps on its queue. If the thread fails, all jobs get an error and `failure` has the cause.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final, Literal

from nntask import DataError, Diverged, ProcessUnavailable
from nntask.inference import NextToken, RunningBatch, RunningText, TextRequest, TokenScore

from .errors import ApiError, undecodable
from .pieces import TextPieces

ENDING: Final = "the server is shutting down; ask another one, or this one later"


@dataclass(eq=False, slots=True)
class Job:
    """A submitted request with one or more texts, which run independently.

    Args:
        texts: prompt and sampling rules of each text.
        stops: stop words.
    """

    texts: Sequence[TextRequest]
    stops: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """New output of one text of a job.

    Attributes:
        index: position of the text in its job.
        text: new characters, possibly none.
        scores: scores of the tokens that begin in `text`, if requested, each with the number of characters before its token.
        num_new: number of tokens of the text so far.
        num_shared: number of prompt tokens that were in the cache already.
        end: reason why the text ends with this piece; None if it continues.
        prompt_scores: scores of the prompt, if requested; only in the first piece.
    """

    index: int
    text: str
    scores: tuple[tuple[int, TokenScore], ...]
    num_new: int
    num_shared: int
    end: Literal["stop", "length"] | None
    prompt_scores: tuple[TokenScore, ...] = ()


News = list[tuple[Job, "Piece | ApiError"]]


@dataclass(eq=False, slots=True)
class _Running:
    """A text that runs.

    Attributes:
        scores: scores that are not delivered yet, each with the number of characters before its token.
    """

    job: Job
    index: int
    pieces: TextPieces
    scores: deque[tuple[int, TokenScore]] = field(default_factory=deque)

    def told_scores(self, *, is_whole: bool) -> tuple[tuple[int, TokenScore], ...]:
        """Return the scores of the tokens that begin in the delivered characters; of a text that has ended without a stop word, all scores.

        Tokens that begin in a stop word are never included. A token in which a stop word begins is, so the tokens may contain more than the text.
        """
        found = []
        while self.scores and (is_whole or self.scores[0][0] < self.pieces.num_told):
            found.append(self.scores.popleft())
        return tuple(found)


class Busy(Exception):
    """The queue is full: the maximum number of texts is waiting."""


class TextEngine:
    """Batched generation for the texts of many requests.

    Args:
        open_batch: function that opens the batch, called on the engine's thread; the batch lives inside the context.
        decode: function that converts ids to text.
        most_open: largest number of texts that run or wait, and of texts in a job.
        deliver: callback for new output, called on the engine's thread; must not block.
        on_failure: callback for a failure of the engine, called on its thread after all jobs have got the error.

    Attributes:
        failure: exception that ended the thread; None while it runs.
        num_said: number of tokens generated for all texts.
        num_read: number of prompt tokens of the texts that have started.
    """

    def __init__(
        self,
        open_batch: Callable[[], AbstractContextManager[RunningBatch]],
        decode: Callable[[Sequence[int]], str],
        most_open: int,
        deliver: Callable[[News], None],
        on_failure: Callable[[], None],
    ) -> None:
        self.batch: RunningBatch | None = None
        self.failure: BaseException | None = None
        self.num_said = self.num_read = 0
        self._open_batch, self._decode, self._deliver, self._on_failure = open_batch, decode, deliver, on_failure
        self.most_open, self._num_open, self._lock, self._is_closed = most_open, 0, threading.Lock(), False
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ready: Future[None] = Future()
        self._waiting: deque[tuple[Job, int]] = deque()
        self._running: dict[RunningText, _Running] = {}
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="nntask engine", daemon=True)

    @property
    def num_open(self) -> int:
        """Number of texts that run or wait."""
        return self._num_open

    @property
    def num_running(self) -> int:
        """Number of texts that run."""
        return len(self._running)

    def start(self) -> None:
        """Open the batch and start the thread.

        Raises:
            Exception: the exception that opening the batch raised.
        """
        self._thread.start()
        self._ready.result()

    def submit(self, job: Job) -> None:
        """Queue a job; the output of its texts is delivered as it comes.

        Raises:
            Busy: too many texts are open.
            ApiError: the engine has failed or shuts down.
        """
        with self._lock:
            if self._is_closed:
                raise ApiError(503, ENDING, code="shutting_down")
            if self._num_open + len(job.texts) > self.most_open:
                raise Busy
            self._num_open += len(job.texts)
            self._inbox.put(lambda: self._waiting.extend((job, index) for index in range(len(job.texts))))

    def cancel(self, job: Job) -> None:
        """Cancel a job whose client is gone; its texts end before the next step."""
        self._inbox.put(lambda: self._drop(job))

    def end(self) -> None:
        """End every job with the error of a shutdown, and end the thread."""
        with self._lock:
            self._is_closed = True
        self._inbox.put(self._end)

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def _run(self) -> None:
        """Run the engine's thread."""
        try:
            with self._open_batch() as batch:
                self.batch = batch
                self._ready.set_result(None)
                while not self._is_ending:
                    self._turn(batch)
        except BaseException as error:
            with self._lock:
                self._is_closed = True
            if not self._ready.done():
                self._ready.set_exception(error)
                return
            self.failure = error
            try:
                self._tell_all(ApiError(500, "the server has failed and shuts down; see the server log", code="engine_failed"))
            finally:  # otherwise the server would stay up and answer every request with 503
                self._on_failure()

    def _turn(self, batch: RunningBatch) -> None:
        """Take the queued requests, start waiting texts, and run a step."""
        if not self._running and not self._waiting:
            if self._inbox.empty() and batch.record_ahead():
                return
            self._inbox.get()()
        self._take_queued()
        news: News = []
        self._join_waiting(batch, news)
        if self._running and not self._is_ending:
            for text, each in batch.step():
                if text in self._running:  # else another text of the same job has ended the job
                    news.extend(self._heard(batch, text, each))
        if news:
            self._deliver(news)

    def _take_queued(self) -> None:
        """Take all queued requests."""
        while not self._inbox.empty():  # this thread alone takes from the queue
            self._inbox.get()()

    def _join_waiting(self, batch: RunningBatch, news: News) -> None:
        """Start waiting texts in order of arrival, as long as the first one fits."""
        while self._waiting and not self._is_ending:
            job, index = self._waiting[0]
            text = batch.join(job.texts[index])
            if text is None:
                return
            self._waiting.popleft()
            self.num_read += len(text.request.prompt)
            self._running[text] = _Running(job, index, TextPieces(self._decode, text.request.prompt, job.stops))

    def _heard(self, batch: RunningBatch, text: RunningText, each: NextToken | Diverged) -> News:
        """Return the output of a text in a step, in the form that its job receives."""
        running = self._running[text]
        if isinstance(each, Diverged):
            return self._failed(text, ApiError(500, f"generation has stopped: {each}", code="diverged"))
        try:
            return self._spelled(batch, text, running, each)
        except (DataError, ProcessUnavailable) as error:
            batch.leave(text)
            return self._failed(text, undecodable(error))

    def _failed(self, text: RunningText, error: ApiError) -> News:
        """End the job of a text with an error."""
        job = self._running[text].job
        self._forget(text)
        self._drop(job)
        return [(job, error)]

    def _spelled(self, batch: RunningBatch, text: RunningText, running: _Running, each: NextToken) -> News:
        """Return the output of a text in a step, decoded to characters.

        Raises:
            DataError: the rules of the tokenizer fail at the text.
            ProcessUnavailable: the tokenizer's process was ended, or the server shuts down.
        """
        said = ""
        if each.token is not None:
            self.num_said += 1
            if each.score is not None:
                running.scores.append((running.pieces.num_spelled, each.score))
            said = running.pieces.add(each.token)
        end = each.end
        if running.pieces.is_stopped:
            batch.leave(text)
            end = "stop"
        elif end is not None:
            said += running.pieces.end()
            end = "stop" if running.pieces.is_stopped else end
        if not said and end is None:
            return []
        scores = running.told_scores(is_whole=end is not None and not running.pieces.is_stopped)
        prompt_scores, text.prompt_scores = tuple(text.prompt_scores), []
        if end is not None:
            self._forget(text)
        return [(running.job, Piece(running.index, said, scores, text.num_new, text.num_shared, end, prompt_scores))]

    def _forget(self, text: RunningText) -> None:
        """Remove a text that has ended."""
        del self._running[text]
        with self._lock:
            self._num_open -= 1

    def _drop(self, job: Job) -> None:
        """Remove the remaining texts of a job."""
        assert self.batch is not None  # opened before the thread takes jobs
        for text in [text for text, running in self._running.items() if running.job is job]:
            if self.failure is None:  # a failed batch may not be able to release texts
                self.batch.leave(text)
            self._forget(text)
        remaining = [each for each in self._waiting if each[0] is not job]
        with self._lock:
            self._num_open -= len(self._waiting) - len(remaining)
        self._waiting = deque(remaining)

    def _end(self) -> None:
        self._is_ending = True
        self._tell_all(ApiError(503, ENDING, code="shutting_down"))

    def _tell_all(self, error: ApiError) -> None:
        """End every job with `error`, including those that are still in the queue."""
        self._take_queued()
        jobs = {id(job): job for job in (*(running.job for running in self._running.values()), *(job for job, _ in self._waiting))}
        self._running.clear()
        self._waiting.clear()
        self._deliver([(job, error) for job in jobs.values()])
