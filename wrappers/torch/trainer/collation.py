"""Conversion of batches of nntask's datasets to the arguments of a language model, by transformers' collators.

Masks depend on the seed, the step and the minibatch, in validation on the seed and the tokens. So a resumed run trains on the same masks, and two
validations give the same score.
"""

from __future__ import annotations

import inspect
import zlib
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import transformers

import nntask.data
from nntask import DataError, UsageError

from .language import Kind

Tokens = npt.NDArray[np.int32]
IGNORED: Final = -100
"""Label of a token that the loss ignores."""
_TRIES: Final = 64
"""Largest number of draws of a mask until it hides a token."""


def load_tokenizer(directory: str) -> Any:
    """Return transformers' tokenizer in a directory, or in that of a tokenizer.json; None without a path. It has a mask token if its files have one.

    Raises:
        DataError: the tokenizer cannot be read.
    """
    if not directory:
        return None
    known, path = nntask.data.load_tokenizer(directory), Path(directory)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path if path.is_dir() else path.parent, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # its type depends on the damage
        raise DataError(
            f"transformers cannot read the tokenizer in {directory}: {error}", "copy its files from the model's directory again"
        ) from None
    if tokenizer.mask_token is not None and tokenizer.mask_token_id >= known.vocab_size:  # transformers has added it
        tokenizer.mask_token = None
    return tokenizer


class Collator:
    """Maker of minibatches.

    Args:
        kind: training task of the model.
        tokenizer: transformers' tokenizer; None if the data are ids without one.
        module: the model.
        seed: seed of the masks.

    Attributes:
        fixed: arguments of the model that are the same in all batches.

    """

    def __init__(self, kind: Kind, tokenizer: Any, module: torch.nn.Module, seed: int) -> None:
        self._kind, self._tokenizer, self._module, self._seed = kind, tokenizer, module, seed
        self.fixed = {"use_cache": False} if "use_cache" in inspect.signature(module.forward).parameters else {}

    def check(self) -> None:
        """Check that the model can learn from the data.

        Raises:
            UsageError: tokens must be masked, and the tokenizer has no mask token, or more ids than the model.
        """
        if self._kind != "masked":
            return
        if getattr(self._tokenizer, "mask_token", None) is None:
            raise UsageError(
                "a masked language model needs a mask token, and the tokenizer of the data has none",
                "name the model's own with --tokenizer-path DIR, or copy its tokenizer_config.json next to its tokenizer.json",
            )
        num_ids, most = len(self._tokenizer), int(self._module.config.get_text_config().vocab_size)
        if num_ids > most:  # random ids replace some tokens
            raise UsageError(
                f"the tokenizer has {num_ids} ids with the special tokens that transformers adds to it, and the model's vocabulary {most}",
                "use the tokenizer that belongs to the model",
            )

    def training(self, tokens: Tokens, step: int, number: int) -> dict[str, Any]:
        """Return minibatch `number` of a step, from 1  # tokens (b, T)."""
        return self._minibatch(tokens, None, (step, number))

    def validation(self, tokens: Tokens, targets: Tokens) -> dict[str, Any]:
        """Return a batch to score; sequences without a target in `targets` are ignored  # both (b, T)."""
        return self._minibatch(tokens, np.asarray((targets >= 0).any(1)), (0, zlib.crc32(np.ascontiguousarray(tokens).tobytes())))

    def example(self, size: int, length: int) -> dict[str, Any]:
        """Return a minibatch of these shapes with arbitrary values."""
        tokens = np.zeros((size, length), np.int32)
        if self._kind == "masked":
            ids = torch.from_numpy(tokens.astype(np.int64))
            return {"input_ids": ids, "labels": ids, **self.fixed}
        return self._minibatch(tokens, None, (0, 0))

    def _minibatch(self, tokens: Tokens, counts: npt.NDArray[np.bool_] | None, at: tuple[int, int]) -> dict[str, Any]:
        """Return the arguments of the model.

        Args:
            counts: (b,) whether each sequence is scored; None for all.
            at: numbers that determine random numbers together with the seed.
        """
        ids = tokens.astype(np.int64)
        if self._kind == "masked":
            batch = self._masked(ids, counts, at)
        elif self._kind == "pairs":
            batch = self._pairs(ids)
        else:
            batch = self._causal(ids)
        if counts is not None:
            batch["labels"][torch.from_numpy(~counts)] = IGNORED
        return {**batch, **self.fixed}

    def _causal(self, ids: npt.NDArray[np.int64]) -> dict[str, Any]:
        rows = list(torch.from_numpy(ids))
        if self._tokenizer is None:
            stacked = torch.stack(rows)
            return {"input_ids": stacked, "labels": stacked.clone()}
        return dict(transformers.DataCollatorForLanguageModeling(self._tokenizer, mlm=False)(rows))

    def _masked(self, ids: npt.NDArray[np.int64], counts: npt.NDArray[np.bool_] | None, at: tuple[int, int]) -> dict[str, Any]:
        shown = ids if counts is None else ids[counts]
        for attempt in range(_TRIES):
            words = np.random.SeedSequence([self._seed, *at, attempt]).generate_state(2, np.uint32)
            seed = int(words[0]) << 31 | int(words[1]) >> 1
            masked = dict(transformers.DataCollatorForLanguageModeling(self._tokenizer, mlm=True, seed=seed)(list(torch.from_numpy(shown.copy()))))
            if bool((masked["labels"] != IGNORED).any()):
                break
        else:
            raise DataError(
                f"a minibatch of {len(shown)} x {shown.shape[1]} tokens has none to mask: all are special tokens of the tokenizer",
                "raise --seq-len, or use other texts",
            )
        if counts is None:
            return masked
        whole = {"input_ids": torch.from_numpy(ids.copy()), "labels": torch.full(ids.shape, IGNORED)}
        for name, value in whole.items():
            value[torch.from_numpy(counts)] = masked[name]
        return whole

    def _pairs(self, ids: npt.NDArray[np.int64]) -> dict[str, Any]:
        half = ids.shape[1] // 2
        if self._tokenizer is None:
            return {"input_ids": torch.from_numpy(ids[:, :half].copy()), "labels": torch.from_numpy(ids[:, half:].copy())}
        rows = [{"input_ids": row[:half].tolist(), "labels": row[half:].tolist()} for row in ids]
        return dict(transformers.DataCollatorForSeq2Seq(self._tokenizer, model=self._module, padding=False)(rows))
