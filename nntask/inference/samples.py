"""Sample text at the end of training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from typing import Final

import numpy as np

from scheduler import Runtime

from ..checkpoints.store import Checkpoint
from ..config.run_config import LanguageRun
from ..config.settings import TrainSettings
from ..config.stored_run import stored_settings
from ..data.known_ids import check_known
from ..data.tokenizer import Tokenizer
from ..errors import UsageError
from ..models.language import LanguageModel
from .generator import Generator
from .sampling import Sampling

HOW: Final = Sampling(temperature=0.8, top_k=40)
"""Rule by which the tokens of the sample are chosen."""


def begins_as_rows(settings: TrainSettings, form: str | None) -> bool:
    """Return whether texts of a run begin as the tokenizer's template begins them, instead of after an end-of-text token.

    Args:
        settings: settings of the run.
        form: form of its data; None if it is not known.
    """
    return bool(settings.checkpoints.init_from) or form == "chat"


def begins_after_end(checkpoint: Checkpoint) -> bool:
    """Return whether a prompt of a checkpoint begins after an end-of-text token that its tokenizer's template need not put there."""
    return checkpoint.config.objective == "causal" and not begins_as_rows(stored_settings(checkpoint), checkpoint.state.get("form"))


def sample_prompt(run: LanguageRun, tokenizer: Tokenizer | None, length: int) -> tuple[list[int], int]:
    """Return the ids that the sample begins with, and the number of them that precede the text.

    Args:
        length: number of tokens of a sequence.

    Raises:
        UsageError: the ids are longer than a sequence.
        DataError: the model has no row for one of them.
    """
    if tokenizer is None:
        return [0], 1
    prompt, adds_special = run.settings.run.prompt, begins_as_rows(run.settings, run.data.objective.form)
    begin = [] if adds_special and prompt else [tokenizer.begin_of_text]
    ids = [*begin, *(int(i) for i in tokenizer.encode([prompt], special=adds_special and bool(prompt))[0])]
    check_known(np.array(ids), tokenizer, run.model.config.vocab_size, "--prompt, with the token before a text,")
    if len(ids) > length:
        raise UsageError(f"must have at most --seq-len = {length} tokens, got {len(ids)} with the token before a text", "shorten it", flag="--prompt")
    return ids, len(begin)


def sample_text(
    run: LanguageRun, model: LanguageModel, runtime: Runtime, tokenizer: Tokenizer | None, length: int, stopped: Callable[[], bool]
) -> str:
    """Return a text of a trained model, or its ids if there is no tokenizer.

    Args:
        length: number of tokens of a sequence.
        stopped: function called after each token; it returns whether to stop.
    """
    prompt, num_before = sample_prompt(run, tokenizer, length)
    drawn = Generator(model, runtime, length).stream(
        [prompt],
        run.settings.run.sample_tokens,
        replace(HOW, seed=run.model.seed),
        vocab_size=min(tokenizer.vocab_size, model.config.vocab_size) if tokenizer else None,
        stop=tokenizer.special.eos if tokenizer else (),
    )
    new = [token for (token,) in takewhile(lambda _: not stopped(), drawn) if token is not None]
    return tokenizer.decode([*prompt[num_before:], *new]) if tokenizer else " ".join(map(str, new))
