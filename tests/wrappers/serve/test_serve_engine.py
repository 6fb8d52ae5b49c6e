"""The engine of `nntask serve` by itself: what a text that fails does to its job and to others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from support.deadline import DEADLINE
from support.small_texts import COARSE, SMALL

from nntask.data.tokenizer import ByteTokenizer
from nntask.inference import RunningBatch, TextIds, TextRequest
from nntask.inference.row_steps import BatchShape
from nntask.inference.running_batch import RunningText
from nntask.models.gpt2 import GPT2
from scheduler import Runtime
from wrappers.serve.app import Application, Service
from wrappers.serve.engine import Job, News, Piece, TextEngine
from wrappers.serve.errors import ApiError
from wrappers.serve.jobs import Desk
from wrappers.serve.metrics import Metrics
from wrappers.serve.server import listening, serve

ILL = 60


@contextmanager
def ill_batch() -> Iterator[RunningBatch]:
    """A batch of a model whose scores are not finite behind one token."""
    with Runtime(cpu_workers=1, ram=1 << 26) as runtime:
        model = GPT2(SMALL, COARSE, runtime, seed=4)
        rows = model.embed.weight.data.read()
        rows[ILL] = np.inf
        model.embed.weight.data.write(rows)
        yield RunningBatch(model, runtime, BatchShape.of(3, 48), vocab_size=ILL)


def test_texts_of_a_job_that_fail_together_are_told_once() -> None:
    """Two texts of one job diverge in the same step: the job is told so once, another job is written to its end, and the engine goes on."""
    news: SimpleQueue[News] = SimpleQueue()
    failures: list[None] = []
    engine = TextEngine(ill_batch, lambda ids: "x" * len(ids), 4, news.put, lambda: failures.append(None))
    engine.start()
    ill, well = Job([TextRequest((ILL,), 4), TextRequest((ILL,), 4)]), Job([TextRequest((1, 2), 4)])
    engine.submit(well)
    engine.submit(ill)
    told: list[tuple[Job, Piece | ApiError]] = []
    while not any(job is well and isinstance(each, ApiError) for job, each in told) and not any(
        isinstance(each, Piece) and each.end is not None for _, each in told
    ):
        told += news.get(timeout=DEADLINE)
    engine.end()
    engine.join()
    errors = [(job, each.code) for job, each in told if isinstance(each, ApiError)]
    assert errors == [(ill, "diverged")]
    assert "".join(each.text for job, each in told if job is well and isinstance(each, Piece)) == "xxxx"
    assert (engine.failure, failures, engine.num_open) == (None, [], 0)


def test_a_stop_word_that_begins_inside_a_token() -> None:
    """Tokens of two characters: the token in which the word begins is told whole, the next one, which begins in the word, is not."""
    news: SimpleQueue[News] = SimpleQueue()
    engine = TextEngine(ill_batch, lambda ids: "xy" * len(ids), 1, news.put, lambda: None)
    engine.start()
    engine.submit(Job([TextRequest((1, 2), 8, num_top=0)], stops=("yx",)))
    pieces: list[Piece] = []
    while not pieces or pieces[-1].end is None:
        pieces += [each for _, each in news.get(timeout=DEADLINE) if isinstance(each, Piece)]
    engine.end()
    engine.join()
    assert ("".join(each.text for each in pieces), pieces[-1].end, pieces[-1].num_new) == ("x", "stop", 2)
    assert sum(len(each.scores) for each in pieces) == 1


class Broken:
    """A batch whose first step fails, and which lets no text leave afterwards."""

    before_failing: Callable[[], None]

    def record_ahead(self) -> bool:
        """Nothing to record."""
        return False

    def join(self, request: TextRequest) -> RunningText:
        """A text that runs."""
        return RunningText(request, 0, list(request.prompt), [], [], 0, 0)

    def step(self) -> object:
        """Fails."""
        self.before_failing()
        raise MemoryError("no more")

    def leave(self, text: RunningText) -> None:
        """Fails, too."""
        raise RuntimeError("the batch has failed")


@pytest.mark.parametrize("breaks", ["leave", "deliver"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failure_is_reported_whatever_fails_besides(breaks: str) -> None:
    """The server ends, although jobs cannot be told, or a text of a cancelled job cannot leave the batch that failed."""
    failures: SimpleQueue[None] = SimpleQueue()
    news: SimpleQueue[News] = SimpleQueue()
    batch = Broken()

    def deliver(each: News) -> None:
        if breaks == "deliver":
            raise RuntimeError("the event loop is closed")
        news.put(each)

    @contextmanager
    def broken() -> Iterator[Any]:
        yield batch

    engine = TextEngine(broken, lambda ids: "", 4, deliver, lambda: failures.put(None))
    cancelled, waiting = Job([TextRequest((1,), 4)]), Job([TextRequest((1,), 4)])

    def queue_both() -> None:
        if breaks == "leave":
            engine.cancel(cancelled)
            engine.submit(waiting)

    batch.before_failing = queue_both
    engine.start()
    engine.submit(cancelled)
    failures.get(timeout=DEADLINE)
    engine.join()
    assert isinstance(engine.failure, MemoryError)
    if breaks == "leave":
        ((told, error),) = news.get(timeout=DEADLINE)
        assert (told, error.code if isinstance(error, ApiError) else None) == (waiting, "engine_failed")


class BrokenAhead(Broken):
    """A batch that fails while the engine is idle."""

    def record_ahead(self) -> bool:
        """Fails."""
        raise MemoryError("no more")


@pytest.mark.timeout(60)
def test_a_failure_before_the_server_listens_ends_it() -> None:
    """An idle engine fails before there is an event loop: the server ends with the cause, instead of answering every request with 503."""

    @contextmanager
    def broken() -> Iterator[Any]:
        yield BrokenAhead()

    desk, ids = Desk(), TextIds(ByteTokenizer(), (), None, frozenset(), 256, adds_special=False)
    engine = TextEngine(broken, ids.tokenizer.decode, 4, desk.deliver, desk.fail)
    service = Service("bytes", 0, "", ids, None, "", 1 << 20, receive_seconds=5, is_local=True)
    engine.start()
    engine.join()
    with listening("127.0.0.1", 0) as listener, pytest.raises(MemoryError, match="no more"):
        serve(Application(service, engine, desk, Metrics(engine)), engine, desk, listener, receive_seconds=5, grace_seconds=1)
