"""Scaling of rotary positions as the metadata of GGUF files, in both directions.

llama.cpp takes a factor without a type for linear scaling, and has an older key for it. Llama 3's scaling is a tensor with the factor of every
frequency. YaRN's numbers of turns are constants of llama.cpp's code for the architectures here, and its factor of cosines and sines is told as a
multiple of the one that YaRN's paper has.
"""

from __future__ import annotations

from math import log, pi
from typing import Any, Final

import numpy as np

from ..errors import DataError
from .metadata_keys import Keys, Values

_LLAMA_3: Final = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of all models of Meta; a file has only the factors that follow from them."""
_TYPE, _FACTOR, _OLD_FACTOR = "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"
_ORIGINAL, _ATTENTION = "rope.scaling.original_context_length", "rope.scaling.attn_factor"
_TURNS: Final = {"beta_fast": ("rope.scaling.yarn_beta_fast", 32.0), "beta_slow": ("rope.scaling.yarn_beta_slow", 1.0)}
"""Key of a config -> key of a file, and llama.cpp's constant."""


def scaling_from(keys: Keys, values: Values, size: int, factors: np.ndarray[Any, Any] | None) -> dict[str, Any] | None:
    """The scaling of rotary frequencies as a config has it; None for none.

    Args:
        keys: of the architecture.
        values: the config so far.
        size: features of a head that turn.
        factors: of ``rope_freqs.weight``; None if there is none.

    Raises:
        DataError: it is a scaling that is not known.
    """
    factor = keys.number(_FACTOR, 0) or keys.number(_OLD_FACTOR, 0)
    kind = keys.text(_TYPE) or "linear"
    attention = keys.number(_ATTENTION, 1)
    if kind not in ("none", "linear", "yarn"):
        raise keys.refusal(_TYPE, repr(kind), "none, linear or yarn")
    if kind != "yarn":
        keys.equal(_ATTENTION, 1, "as cosines and sines are scaled by YaRN only")
        keys.text(_ORIGINAL)  # which says nothing without YaRN
    if factors is not None:
        if kind == "yarn" or factor not in (0, 1):
            raise keys.refusal(_FACTOR, factor, f"absent beside rope_freqs.weight, which scales positions by itself (type {kind})")
        return _llama_3(values, size, factors)
    if kind == "yarn" and (factor > 1 or attention != 1):
        return _yarn(keys, values, factor or 1, attention)
    return {"rope_type": "linear", "factor": factor} if kind == "linear" and factor not in (0, 1) else None


def _yarn(keys: Keys, values: Values, factor: float, attention: float) -> dict[str, Any]:
    found = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": keys.count(_ORIGINAL, values["max_position_embeddings"])}
    keys.equal("rope.scaling.yarn_ext_factor", 1, "as all of the scaling is YaRN's")
    keys.equal("rope.scaling.yarn_attn_factor", 1, f"as {keys.name}.{_ATTENTION} says it")
    for name, (key, usual) in _TURNS.items():
        if (turns := keys.number(key, usual)) != usual:
            found[name] = turns
    return found if attention == 1 else {**found, "attention_factor": _attention_factor(attention, factor)}


def _attention_factor(multiple: float, factor: float) -> float:
    """The factor of cosines and sines with the fewest decimals whose multiple of YaRN's own one is the given number in fp32."""
    usual = _usual(factor)
    decimals = (float(f"{multiple * usual:.{digits}g}") for digits in range(1, 17))
    return next((each for each in decimals if np.float32(each / usual) == np.float32(multiple)), multiple * usual)


def _usual(factor: float) -> float:
    """YaRN's factor of cosines and sines (Peng et al., 2023, equation 22)."""
    return 0.1 * log(factor) + 1.0 if factor > 1 else 1.0


def _llama_3(values: Values, size: int, found: np.ndarray[Any, Any]) -> dict[str, Any]:
    scaling = {**_LLAMA_3, "factor": float(found.max(initial=1))}
    if found.shape != (-(-size // 2),) or not np.allclose(rotary_factors(scaling, values["rope_theta"], size), found, rtol=1e-4):
        raise DataError(
            "rope_freqs.weight in the file are not the factors of a Llama 3; use a model with plain, linear, YaRN's or Llama 3's rotary scaling"
        )
    return scaling


def rotary_factors(scaling: Values, theta: float, size: int) -> np.ndarray[Any, Any]:
    """(size / 2,) fp32: what each rotary frequency is divided by, as Llama 3 scales them; see `nntask.models.rotary`."""
    plain = theta ** -(np.arange(0, size, 2, dtype=np.float64) / size)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    share = np.clip((scaling["original_max_position_embeddings"] * plain / (2 * pi) - low) / (high - low), 0, 1)
    factors: np.ndarray[Any, Any] = (1 / ((1 - share) / scaling["factor"] + share)).astype(np.float32)
    return factors


def scaling_keys(scaling: Values | None) -> dict[str, Any]:
    """Key -> value of a scaling, as far as a file can say it; the other direction of `scaling_from`."""
    kind = None if scaling is None else scaling["rope_type"]
    if scaling is None or kind not in ("linear", "yarn"):
        return {}
    found: dict[str, Any] = {_TYPE: kind, _FACTOR: float(scaling["factor"])}
    if kind == "yarn":
        found[_ORIGINAL] = scaling["original_max_position_embeddings"]
        if scaling.get("attention_factor") is not None:
            found[_ATTENTION] = scaling["attention_factor"] / _usual(scaling["factor"])
    return found
