"""The text that a training ends with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Final

import numpy as np

from ..config.run_config import LanguageRun
from ..data.known_ids import check_known
from ..data.tokenizer import Tokenizer
from ..errors import UsageError
from ..models.language import LanguageModel
from .generator import Generator
from .sampling import Sampling

if TYPE_CHECKING:
    from scheduler import Runtime

HOW: Final = Sampling(temperature=0.8, top_k=40)
"""How its tokens are chosen."""


def sample_prompt(run: LanguageRun, tokenizer: Tokenizer | None, length: int) -> list[int]:
    """Ids that the sample begins with: what stands before a text, and those of --prompt.

    Args:
        length: tokens of a sequence.

    Raises:
        UsageError: they are more than a sequence has.
        DataError: the model has no row for one of them.
    """
    if tokenizer is None:
        return [0]
    ids = [tokenizer.begin_of_text, *(int(i) for i in tokenizer.encode([run.settings.run.prompt])[0])]
    check_known(np.array(ids), tokenizer, run.model.config.vocab_size, "--prompt, with the token before a text,")
    if len(ids) > length:
        raise UsageError(f"--prompt has {len(ids)} tokens with the one before a text, and a sequence --seq-len = {length}; shorten it")
    return ids


def sample_text(
    run: LanguageRun, model: LanguageModel, runtime: Runtime, tokenizer: Tokenizer | None, length: int, stopped: Callable[[], bool]
) -> str:
    """Text (or ids, without a tokenizer) from a trained model.

    Args:
        length: tokens of a sequence.
        stopped: asked after each token.
    """
    prompt = sample_prompt(run, tokenizer, length)
    drawn = Generator(model, runtime, length).stream(
        [prompt],
        run.settings.run.sample_tokens,
        replace(HOW, seed=run.model.seed),
        vocab_size=min(tokenizer.vocab_size, model.config.vocab_size) if tokenizer else None,
        stop=tokenizer.special.eos if tokenizer else (),
    )
    new = [token for (token,) in takewhile(lambda _: not stopped(), drawn) if token is not None]
    return tokenizer.decode([*prompt[1:], *new]) if tokenizer else " ".join(map(str, new))
