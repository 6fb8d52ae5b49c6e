"""Memory stays warm: once a step has run, running it again takes no new pages from the system."""

from __future__ import annotations

import resource

import numpy as np

from nntask.models.gpt2 import GPT2
from nntask.models.registry import PRESETS
from nntask.optim.optimizers import AdamW
from nntask.tiling.model_tiling import default_tiling
from scheduler import Runtime

BATCH, LENGTH, STEPS = 2, 64, 6
PAGES = 200
"""Faults of so many pages of 4 KiB in all steps together are Python's own; activations of one step are above a thousand."""


def test_steps_take_no_new_pages() -> None:
    """Data, gradients, activations and scratch of a step lie where those of the one before lay."""
    config = PRESETS["tiny"]
    with Runtime(2, ram=256 << 20) as runtime:
        model = GPT2(config, default_tiling(config, BATCH, LENGTH), runtime)
        optimizer = AdamW(model.parameters(), lr=1e-4)
        tokens, targets = model.input_tensors(BATCH, LENGTH)
        with runtime.record() as step:
            model(tokens, targets).backward()
            optimizer.step()
        ids = np.random.default_rng(0).integers(0, config.vocab_size, (BATCH, LENGTH + 1))
        tokens.write(ids[:, :-1])
        targets.write(ids[:, 1:])
        faults = []
        for number in range(STEPS + 4):
            optimizer.prepare(number + 1)
            step.replay().wait()
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        used = runtime.stats()["peak_bytes_by_class"]["ram"]["activations"]
    assert used > 4096 * PAGES
    assert faults[-1] - faults[3] < PAGES, f"page faults after each step: {faults}"
