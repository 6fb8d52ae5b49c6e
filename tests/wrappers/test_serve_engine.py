"""The engine of `nntask serve` by itself: what a text that fails does to its job and to others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import numpy as np
from support.deadline import DEADLINE
from support.small_texts import COARSE, SMALL

from nntask.inference import RunningBatch, TextRequest
from nntask.inference.row_steps import BatchShape
from nntask.models.gpt2 import GPT2
from scheduler import Runtime
from wrappers.serve.engine import Job, News, Piece, TextEngine
from wrappers.serve.errors import ApiError

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
