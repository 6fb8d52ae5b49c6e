"""Translation between our names of LLaMA weights and Hugging Face's: pure functions on arrays, for weights and gradients alike.

Hugging Face puts ``model.`` before every name but the head's. Layouts are equal: matrices (out, in), embedding and head (V, C), so no weight is
transposed or joined. Older checkpoints also hold the rotary frequencies (``rotary_emb.inv_freq``), which follow from the config and are dropped; some
hold a head although it is tied to the embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy.typing as npt

from .config_checks import check_head
from .llama_config import LlamaConfig

Arrays = dict[str, npt.NDArray[Any]]

_PREFIX: Final = "model."
_HEAD: Final = "lm_head.weight"
_FREQUENCIES: Final = "rotary_emb.inv_freq"


def to_hf(arrays: Mapping[str, npt.NDArray[Any]], config: LlamaConfig) -> Arrays:
    """Arrays under our names -> the state dict of a ``LlamaForCausalLM``.

    Args:
        arrays: name of `Module.named_parameters` -> array, without a tied head.
        config: the model's config.
    """
    state = {_HEAD if name == "lm_head" else _PREFIX + name: array for name, array in arrays.items()}
    if config.tie_word_embeddings:
        state[_HEAD] = state[_PREFIX + "embed_tokens.weight"]
    return state


def from_hf(state: Mapping[str, npt.NDArray[Any]], config: LlamaConfig) -> Arrays:
    """A state dict of a ``LlamaForCausalLM`` (or of its ``model`` alone) -> arrays under our names.

    Raises:
        DataError: an untied head is missing.
    """
    arrays: Arrays = {}
    for theirs, array in state.items():
        if theirs == _HEAD:
            if not config.tie_word_embeddings:
                arrays["lm_head"] = array
        elif not theirs.endswith(_FREQUENCIES):
            arrays[theirs.removeprefix(_PREFIX)] = array
    check_head(arrays, _HEAD, is_tied=config.tie_word_embeddings)
    return arrays
