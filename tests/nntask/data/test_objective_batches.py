"""What a batch is to the engines: arrays by name, rows of it, and what is said of all of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from nntask.config import TrainSettings, resolve
from nntask.config.settings import ModelSettings, TilingSettings
from nntask.data import Batch, Cursor, Objective, random_batch
from nntask.data.objectives import ImageShape, factor_of
from nntask.data.sampler import with_factor
from nntask.engine.models import build_model
from nntask.engine.recorded import RecordedEngine, emit_training_step
from nntask.errors import UsageError
from nntask.models.gpt2 import GPT2
from nntask.models.registry import PRESETS
from scheduler import Runtime
from tiles import TileTensor

IDS = np.arange(24, dtype=np.int32).reshape(4, 6)
ALL = (
    Objective(length=6),
    Objective(length=6, separates=True),
    Objective(form="chat", length=6),
    Objective("masked", length=6),
    Objective("masked", length=6, separates=True),
    Objective("seq2seq", "pairs", length=6, target_length=3),
    Objective("classify", "labels", length=6, num_labels=3),
    Objective("classify", "labels", length=6, has_pairs=True, num_labels=3),
    Objective("classify", "images", num_labels=3, image=ImageShape(8, 4, 3)),
)


def test_rows_of_a_batch_keep_what_is_said_of_all_of_it() -> None:
    """Rows are cut from every array but the factor, by a slice or by numbers; the place in the data stays."""
    batch = Batch({"tokens": IDS, "targets": IDS + 1, "factor": np.array([0.5], np.float32)}, Cursor(1, 8))
    for some in (batch.rows(slice(1, 3)), batch.rows(np.array([1, 2]))):
        assert some.tokens.tolist() == IDS[1:3].tolist()
        assert some.targets.tolist() == (IDS[1:3] + 1).tolist()
        assert some.arrays["factor"].tolist() == [0.5]
        assert (len(some), some.begin) == (2, Cursor(1, 8))


def test_the_factor_is_one_over_the_targets_that_count() -> None:
    """It is 0 where none does."""
    assert factor_of(np.array([[1, -1], [-1, 0]], np.int32)).tolist() == [0.5]
    assert factor_of(np.full((2, 2), -1, np.int32)).tolist() == [0.0]


@pytest.mark.parametrize("objective", ALL, ids=lambda each: " ".join(each.names))
def test_a_random_batch_has_the_arrays_of_its_objective(objective: Objective) -> None:
    """Names, rows and types; labels below their number."""
    batch = random_batch(objective, 4, 50, 0)
    assert sorted(batch.arrays) == sorted(objective.names)
    assert set(objective.names) - set(objective.scored_names) <= {"factor"}
    for name, array in batch.arrays.items():
        assert array.dtype == (np.float32 if name in ("factor", "images") else np.int32)
        assert len(array) == (1 if name == "factor" else 4)
    if objective.kind == "classify":
        assert batch.targets.shape == (4, 1)
        assert batch.targets.max() < 3


class _Counting(GPT2):
    """A model that takes documents without looking at them, and a factor, which is 1 / 10."""

    seen: ClassVar[list[tuple[frozenset[str], float]]] = []

    def __call__(self, tokens: TileTensor, targets: TileTensor, *, scale: float = 1.0, reduction: str = "mean", **others: Any) -> Any:
        self.seen.append((frozenset(others), scale))
        is_mean = "factor" in others
        return super().__call__(tokens, targets, scale=scale / 10 if is_mean else scale, reduction="sum" if is_mean else reduction)


def test_the_loss_is_the_mean_over_targets_of_the_whole_batch() -> None:
    """Minibatches with 7 and 3 targets: the engine leaves the mean to the factor, and scores without it."""
    settings = TrainSettings(model=ModelSettings(model="tiny", seq_len=16), tiling=TilingSettings(batch=4, minibatch=2))
    run = resolve(settings, PRESETS["tiny"])
    run = replace(run, data=replace(run.data, objective=replace(run.data.objective, separates=True)))
    whole = random_batch(run.data.objective, 4, run.model.config.vocab_size, 3)
    targets = np.full_like(whole.targets, -1)
    targets[:1, :7], targets[3:, 4:7] = whole.targets[:1, :7], whole.targets[3:, 4:7]
    batch = with_factor(Batch({**whole.arrays, "targets": targets}))
    assert batch.arrays["factor"] == np.float32(0.1)
    with Runtime(1) as runtime:
        engine = RecordedEngine(run, runtime, _Counting(run.model.config, run.model.tiling, runtime, seed=0))
        scored = engine.evaluate(batch)
        assert engine.start(1, 1e-3, batch).result().loss == pytest.approx(scored / 10, rel=1e-5)
    evaluated = {"documents", "positions"}
    assert set(_Counting.seen) == {(frozenset(evaluated), 1.0), (frozenset(evaluated | {"factor", "share", "minibatch"}), 1.0)}


def test_a_step_takes_the_tensors_that_a_model_names() -> None:
    """The loss of a recorded step over minibatches is that of the whole batch; a model that takes no decoder's tokens says so."""
    settings = TrainSettings(model=ModelSettings(model="tiny", seq_len=16), tiling=TilingSettings(batch=4, minibatch=2))
    run = resolve(settings, PRESETS["tiny"])
    batch = random_batch(run.data.objective, 4, run.model.config.vocab_size, 3)
    with Runtime(1) as runtime:
        engine = RecordedEngine(run, runtime)
        scored = engine.evaluate(batch) / batch.targets.size
        assert engine.start(1, 1e-3, batch).result().loss == pytest.approx(scored, rel=1e-5)
    with Runtime(1) as runtime:
        model = build_model(run.model, runtime)
        given = model.inputs(2, 16, Objective(separates=True).names)
        assert {name: (tensor.shape, tensor.dtype) for name, tensor in given.items()} == {
            **{name: ((2, 16), np.dtype(np.int32)) for name in ("tokens", "targets", "documents")},
            "factor": ((1,), np.dtype(np.float32)),
        }
        given["decoder_tokens"] = given["documents"]
        with pytest.raises(UsageError, match="a gpt2 takes tokens, targets, factor, documents, positions, got decoder_tokens besides"):
            emit_training_step(model, engine.optimizer, [given])
