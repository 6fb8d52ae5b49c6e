"""Every family on two nodes, with dropout and the batches of its objective: the bits of one node."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.dask_nodes import run_of, train
from support.objective_data import TEXTS, lines_in
from support.transformers_oracle import CONFIGS, IDLE_EXPERTS

IDLE = "idle experts"
SOON = ("bert classifier", IDLE)


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in SOON else pytest.mark.long) for name in (*CONFIGS, IDLE)])
def test_two_nodes_give_the_bits_of_one(name: str, tmp_path: Path) -> None:
    """Losses, norms and weights, clipped."""
    config = (IDLE_EXPERTS if name == IDLE else CONFIGS[name]).with_dropout(0.1)
    labels = lines_in(tmp_path / "labels.jsonl", [{"text": text, "label": 0} for text in TEXTS]) if config.objective == "classify" else None
    run = run_of(2, clip=0.5, minibatch=2, config=config, length=11, labels=labels)
    if name == IDLE:  # tiles of few tokens
        run = run.with_model(tiling=replace(run.model.tiling, minibatch_tile=1, seq_tile=4))
    alone, together = train(1, run), train(2, run)
    assert together.outcomes == alone.outcomes
    assert together.weights == alone.weights
