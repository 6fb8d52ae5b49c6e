"""Translation between our names and layouts of GPT-2 weights and Hugging Face's: pure functions on arrays, for weights and gradients alike.

Hugging Face puts ``transformer.`` before every name but the head's, and has one ``c_attn`` of shape (C, 3C) with q, k and v as column blocks. Its
"Conv1D" weights are (in, out) like ours, so none is transposed. Checkpoints on the Hub come with and without the prefix, with and without attention
masks (``attn.bias``), and with a head even when it is tied to the embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import DataError
from .config_checks import check_head
from .gpt2_config import GPT2Config

Arrays = dict[str, npt.NDArray[Any]]

_PREFIX: Final = "transformer."
_HEAD: Final = "lm_head.weight"
_MASKS: Final = (".attn.bias", ".attn.masked_bias")
_FUSED: Final = "attn.c_attn."
_PROJECTIONS: Final = ("q", "k", "v")


def to_hf(arrays: Mapping[str, npt.NDArray[Any]], config: GPT2Config) -> Arrays:
    """Arrays under our names -> the state dict of a ``GPT2LMHeadModel``.

    Args:
        arrays: name of `Module.named_parameters` -> array, without a tied head.
        config: the model's config.
    """
    state: Arrays = {}
    for name, array in arrays.items():
        layer, _, rest = name.partition(".attn.")
        projection, _, kind = rest.partition(".")
        if projection not in _PROJECTIONS:
            state["lm_head.weight" if name == "lm_head" else _PREFIX + name] = array
        elif projection == "q":
            fused = [arrays[f"{layer}.attn.{p}.{kind}"] for p in _PROJECTIONS]
            state[f"{_PREFIX}{layer}.{_FUSED}{kind}"] = np.concatenate(fused, axis=-1)  # 3 x (C, C) -> (C, 3C)
    if config.tie_word_embeddings:
        state[_HEAD] = state[_PREFIX + "wte.weight"]
    return state


def from_hf(state: Mapping[str, npt.NDArray[Any]], config: GPT2Config) -> Arrays:
    """A state dict of a ``GPT2LMHeadModel`` (or of its ``transformer`` alone) -> arrays under our names.

    Raises:
        DataError: a fused weight is not divisible in three, or an untied head is missing.
    """
    arrays: Arrays = {}
    for theirs, array in state.items():
        name = theirs.removeprefix(_PREFIX)
        if name.endswith(_MASKS):
            continue
        if name == _HEAD:
            if not config.tie_word_embeddings:
                arrays["lm_head"] = array
        elif _FUSED in name:
            layer, _, kind = name.partition("." + _FUSED)
            if array.shape[-1] != 3 * config.n_embd:
                raise DataError(
                    f"{theirs} must end with 3 x n_embd = {3 * config.n_embd} columns, got shape {array.shape}; use the config it was trained with"
                )
            for projection, piece in zip(_PROJECTIONS, np.split(array, 3, axis=-1), strict=True):  # (C, 3C) -> 3 x (C, C)
                arrays[f"{layer}.attn.{projection}.{kind}"] = piece
        else:
            arrays[name] = array
    check_head(arrays, _HEAD, is_tied=config.tie_word_embeddings)
    return arrays
