"""The one thread that owns the runtime: requests come to it by a queue, and what their texts say leaves in lists, one for each step.

Requests wait in order of arrival until a slot and pages of the cache are free; how many may wait is bounded where they are submitted. The thread
sleeps in its queue while there is nothing to do, once the step of prompts is recorded. When it fails, every request is told so; `failure` says why.
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
    """A request at work: its texts, each of which runs by itself.

    Args:
        texts: what each begins with and how it goes on.
        stops: words that end a text.
    """

    texts: Sequence[TextRequest]
    stops: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """What a text of a job has said since the last piece.

    Attributes:
        index: of the text in its job.
        text: characters, maybe none.
        scores: of the tokens that begin in these characters, if they were asked for, each with the number of characters in front of its token.
        num_new: tokens of the text so far.
        num_shared: tokens of its prompt that were in the cache already.
        end: why it has ended with this; None where it goes on.
        prompt_scores: with the first piece, if they were asked for.
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
        scores: that have not been told, each with the characters in front of its token.
    """

    job: Job
    index: int
    pieces: TextPieces
    scores: deque[tuple[int, TokenScore]] = field(default_factory=deque)

    def told_scores(self, *, is_whole: bool) -> tuple[tuple[int, TokenScore], ...]:
        """The scores of tokens that begin in what has been told; all of them of a text that has ended by itself.

        Those that begin in a stop word never are. A token in which one begins is, so that tokens may say more than the text.
        """
        found = []
        while self.scores and (is_whole or self.scores[0][0] < self.pieces.num_told):
            found.append(self.scores.popleft())
        return tuple(found)


class Busy(Exception):
    """As many texts wait as may."""


class TextEngine:
    """Runs texts of many requests side by side.

    Args:
        open_batch: called on the engine's thread; the batch lives inside the context.
        decode: ids -> text.
        most_open: texts that may run and wait; a job has no more.
        deliver: called on the engine's thread with what has happened; must not block.
        on_failure: called on the engine's thread when it has failed, after everybody has been told.

    Attributes:
        failure: what ended the thread before its time.
        num_said: tokens that all texts have said.
        num_read: tokens of prompts that texts began with.
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
        """Texts that run or wait."""
        return self._num_open

    @property
    def num_running(self) -> int:
        """Texts that run."""
        return len(self._running)

    def start(self) -> None:
        """Open the batch and begin.

        Raises:
            Exception: what opening it raised.
        """
        self._thread.start()
        self._ready.result()

    def submit(self, job: Job) -> None:
        """Let a job wait for its turn; what its texts say is delivered.

        Raises:
            Busy: too many texts are open.
            ApiError: the engine has failed or ends.
        """
        with self._lock:
            if self._is_closed:
                raise ApiError(503, ENDING, code="shutting_down")
            if self._num_open + len(job.texts) > self.most_open:
                raise Busy
            self._num_open += len(job.texts)
            self._inbox.put(lambda: self._waiting.extend((job, index) for index in range(len(job.texts))))

    def cancel(self, job: Job) -> None:
        """Let go of a job that nobody waits for; its texts end before the next step."""
        self._inbox.put(lambda: self._drop(job))

    def end(self) -> None:
        """Tell every job that the server shuts down, and end the thread."""
        with self._lock:
            self._is_closed = True
        self._inbox.put(self._end)

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def _run(self) -> None:
        """The engine's thread."""
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
                self._tell_all(ApiError(500, "the server has failed and ends; what is behind it stands in its log", code="engine_failed"))
            finally:  # or the server would stay, and answer every request with 503
                self._on_failure()

    def _turn(self, batch: RunningBatch) -> None:
        """Take what has come, let waiting texts join, and step."""
        if not self._running and not self._waiting:
            if self._inbox.empty() and batch.record_ahead():
                return
            self._inbox.get()()
        while True:
            try:
                self._inbox.get_nowait()()
            except queue.Empty:
                break
        news: News = []
        self._join_waiting(batch, news)
        if self._running and not self._is_ending:
            for text, each in batch.step():
                if text in self._running:  # else its job has ended with another of its texts
                    news.extend(self._heard(batch, text, each))
        if news:
            self._deliver(news)

    def _join_waiting(self, batch: RunningBatch, news: News) -> None:
        """Let texts join in order of arrival, as long as the first one can."""
        while self._waiting and not self._is_ending:
            job, index = self._waiting[0]
            text = batch.join(job.texts[index])
            if text is None:
                return
            self._waiting.popleft()
            self.num_read += len(text.request.prompt)
            self._running[text] = _Running(job, index, TextPieces(self._decode, text.request.prompt, job.stops))

    def _heard(self, batch: RunningBatch, text: RunningText, each: NextToken | Diverged) -> News:
        """What a step has said of a text, as its job is told it."""
        running = self._running[text]
        if isinstance(each, Diverged):
            return self._failed(text, ApiError(500, f"a text has ended because {each}", code="diverged"))
        try:
            return self._spelled(batch, text, running, each)
        except (DataError, ProcessUnavailable) as error:
            batch.leave(text)
            return self._failed(text, undecodable(error))

    def _failed(self, text: RunningText, error: ApiError) -> News:
        """End the job of a text."""
        job = self._running[text].job
        self._forget(text)
        self._drop(job)
        return [(job, error)]

    def _spelled(self, batch: RunningBatch, text: RunningText, running: _Running, each: NextToken) -> News:
        """What a step has said of a text in characters.

        Raises:
            DataError: the rules of the tokenizer fail at it.
            ProcessUnavailable: their process was ended, or the server shuts down.
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
        told, text.prompt_scores = tuple(text.prompt_scores), []
        if end is not None:
            self._forget(text)
        return [(running.job, Piece(running.index, said, scores, text.num_new, text.num_shared, end, told))]

    def _forget(self, text: RunningText) -> None:
        """A text has ended."""
        del self._running[text]
        with self._lock:
            self._num_open -= 1

    def _drop(self, job: Job) -> None:
        """Let go of what a job has left."""
        assert self.batch is not None  # it has been opened
        for text in [text for text, running in self._running.items() if running.job is job]:
            self.batch.leave(text)
            self._forget(text)
        kept = [each for each in self._waiting if each[0] is not job]
        with self._lock:
            self._num_open -= len(self._waiting) - len(kept)
        self._waiting = deque(kept)

    def _end(self) -> None:
        self._is_ending = True
        self._tell_all(ApiError(503, ENDING, code="shutting_down"))

    def _tell_all(self, error: ApiError) -> None:
        """Tell every job, those whose submission has not been looked at included, that it ends."""
        while True:
            try:
                self._inbox.get_nowait()()
            except queue.Empty:
                break
            except Exception:
                if self.failure is None:
                    raise
                # a batch that has failed may not let texts leave, and all jobs are told the same in any case
        jobs = {id(job): job for job in (*(running.job for running in self._running.values()), *(job for job, _ in self._waiting))}
        self._running.clear()
        self._waiting.clear()
        self._deliver([(job, error) for job in jobs.values()])
