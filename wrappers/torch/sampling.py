"""Sampling of text at the end of a run. Each token costs a forward pass over a whole sequence, since a session caches no keys and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from nntask.config import LanguageRun
from nntask.data import Tokenizer
from nntask.inference import HOW, choose, sample_prompt

from .session import Session


def sample(
    run: LanguageRun, session: Session, tokenizer: Tokenizer | None, length: int, stopped: Callable[[], bool], fixed: Mapping[str, Any]
) -> str:
    """Return text, or ids without a tokenizer, from a model that predicts the next token.

    Args:
        length: number of tokens of a sequence, the largest length of the text.
        stopped: function that returns whether to stop, called before each token.
        fixed: further arguments of the model.
    """
    prompt, num_before = sample_prompt(run, tokenizer, length)
    ids, how = list(prompt), replace(HOW, seed=run.model.seed)
    ends = tokenizer.special.eos if tokenizer else ()
    row = np.zeros((1, length), np.int64)  # tokens after a position do not change its scores
    row[0, : len(ids)] = ids
    for number in range(min(run.settings.run.sample_tokens, length - len(ids))):
        if stopped():
            break
        scores = session.predict(input_ids=torch.from_numpy(row.copy()), **fixed)["logits"][0, len(ids) - 1]
        token = choose(scores.float().numpy()[: tokenizer.vocab_size if tokenizer else None], how, how.draw(0, number))
        if token in ends:
            break
        row[0, len(ids)] = token
        ids.append(token)
    return tokenizer.decode(ids[num_before:]) if tokenizer else " ".join(map(str, ids[num_before:]))
