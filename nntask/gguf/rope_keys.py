"""Conversion of rotary scaling to and from the metadata of GGUF files.

llama.cpp reads a factor without a type as linear scaling, and has an older key for it. Llama 3's scaling is a tensor with the factor of every
frequency. LongRoPE's is two tensors: for contexts beyond the original length, and for others; files of a Phi 3 have them without a type. YaRN's
numbers of turns are constants of llama.cpp's code for the architectures here. Its factor of cosines and sines is stored as a multiple of the one in
YaRN's paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log, pi, sqrt
from typing import Any, Final

import numpy as np

from ..architecture.rotary import RopeScaling
from ..errors import DataError
from .architectures import LONG_FACTORS, ROTARY_FACTORS, SHORT_FACTORS
from .metadata_keys import Keys, Values, shortest

_LLAMA_3: Final = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Values of all models of Meta; a file has only the factors that follow from them."""
_TYPE, _FACTOR, _OLD_FACTOR = "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"
_LENGTH: Final = "original_max_position_embeddings"
_ORIGINAL, _ATTENTION = "rope.scaling.original_context_length", "rope.scaling.attn_factor"
_LONG: Final = {"long_factor": LONG_FACTORS, "short_factor": SHORT_FACTORS}
"""Key of a config -> name of the tensor in a file."""
_WITH_LONG: Final = ("llama", "phi3")
"""Architectures for which llama.cpp reads LongRoPE's tensors; for "llama" only if the type is "longrope"."""
_TURNS: Final = {"beta_fast": ("rope.scaling.yarn_beta_fast", 32.0), "beta_slow": ("rope.scaling.yarn_beta_slow", 1.0)}
"""Key of a config -> key of a file, and llama.cpp's constant."""


def scaling_from(keys: Keys, values: Values, size: int, factors: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, Any] | None:
    """Return the scaling of rotary frequencies as a config has it; None for none.

    Args:
        keys: metadata keys of the architecture.
        values: config values read so far.
        size: number of rotated features of a head.
        factors: name -> values of the tensors of `architectures.ALL_FACTORS` in the file.

    Raises:
        DataError: the scaling is not known.
    """
    old_factor = keys.number(_OLD_FACTOR, 0)
    factor = keys.number(_FACTOR, old_factor)
    kind = keys.text(_TYPE) or "linear"
    attention = keys.number(_ATTENTION, 1)
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise keys.refusal(_TYPE, repr(kind), "none, linear, yarn or longrope")
    if kind == "longrope" or factors.keys() & set(_LONG.values()):
        if factor not in (0, 1):
            raise keys.refusal(_FACTOR, factor, "absent with LongRoPE, which scales positions by itself")
        return _longrope(keys, values, keys.text(_TYPE), attention, factors)
    if kind != "yarn":
        keys.equal(_ATTENTION, 1, "as cosines and sines are scaled by YaRN and LongRoPE only")
        keys.text(_ORIGINAL)  # marks the key as read; it has no meaning without YaRN
    if ROTARY_FACTORS in factors:
        if kind == "yarn" or factor not in (0, 1):
            raise keys.refusal(_FACTOR, factor, f"absent with rope_freqs.weight, which scales positions by itself (type {kind})")
        return _llama_3(values, size, factors[ROTARY_FACTORS])
    if kind == "yarn":
        yarn = _yarn(keys, values, factor or 1, attention)
        return None if (yarn["factor"], attention) == (1, 1) else yarn
    return {"rope_type": "linear", "factor": factor} if kind == "linear" and factor not in (0, 1) else None


def _longrope(keys: Keys, values: Values, kind: str, attention: float, factors: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
    """Return LongRoPE's scaling.

    Args:
        kind: type in the file, "" if it has none.
    """
    missing = [name for name in _LONG.values() if name not in factors]
    if keys.name not in _WITH_LONG or missing or ROTARY_FACTORS in factors or kind not in ("longrope", *([""] if keys.name == "phi3" else [])):
        there = f"{kind or 'none'} with {', '.join(factors) or 'no tensor of factors'}"
        rule = f"longrope with {' and '.join(_LONG.values())} alone, for a {' or '.join(_WITH_LONG)}"
        raise keys.refusal(_TYPE, there, rule)
    original = keys.count(_ORIGINAL, values["max_position_embeddings"])
    scaling = {"rope_type": "longrope", _LENGTH: original, **{key: [shortest(each) for each in factors[name].ravel()] for key, name in _LONG.items()}}
    usual = _usual_of_longrope(values["max_position_embeddings"], original)
    return scaling if np.float32(usual) == np.float32(attention) else {**scaling, "attention_factor": attention}


def _usual_of_longrope(longest: int, original: int) -> float:
    """Return LongRoPE's factor of cosines and sines (Ding et al., 2024, section 3.3)."""
    return sqrt(1 + log(longest / original) / log(original)) if longest > original > 1 else 1.0


def _yarn(keys: Keys, values: Values, factor: float, attention: float) -> dict[str, Any]:
    found = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": keys.count(_ORIGINAL, values["max_position_embeddings"])}
    keys.equal("rope.scaling.yarn_ext_factor", 1, "as all of the scaling is YaRN's")
    keys.equal("rope.scaling.yarn_attn_factor", 1, f"as {keys.name}.{_ATTENTION} says it")
    for name, (key, usual) in _TURNS.items():
        if (turns := keys.number(key, usual)) != usual:
            found[name] = turns
    return found if attention == 1 else {**found, "attention_factor": _attention_factor(attention, factor)}


def _attention_factor(multiple: float, factor: float) -> float:
    """Return the factor of cosines and sines with the fewest decimals that is `multiple` times YaRN's own factor in fp32."""
    usual = _usual(factor)
    decimals = (float(f"{multiple * usual:.{digits}g}") for digits in range(1, 17))
    return next((each for each in decimals if np.float32(each / usual) == np.float32(multiple)), multiple * usual)


def _usual(factor: float) -> float:
    """Return YaRN's factor of cosines and sines (Peng et al., 2023, equation 22)."""
    return 0.1 * log(factor) + 1.0 if factor > 1 else 1.0


def _llama_3(values: Values, size: int, found: np.ndarray[Any, Any]) -> dict[str, Any]:
    scaling = {**_LLAMA_3, "factor": float(found.max(initial=1))}
    if found.shape != (-(-size // 2),) or not np.allclose(rotary_factors(scaling, values["rope_theta"], size), found, rtol=1e-4):
        raise DataError(
            "rope_freqs.weight in the file are not the factors of a Llama 3", "use a model with plain, linear, YaRN's or Llama 3's rotary scaling"
        )
    return scaling


def factors_of(scaling: Values, theta: float, size: int) -> dict[str, np.ndarray[Any, Any]]:
    """Return name -> values (size / 2,) in fp32 of the tensors of factors that a scaling has in a file."""
    if scaling["rope_type"] == "longrope":
        return {name: np.array(scaling[key], np.float32) for key, name in _LONG.items()}
    return {ROTARY_FACTORS: rotary_factors(scaling, theta, size)} if scaling["rope_type"] == "llama3" else {}


def rotary_factors(scaling: Values, theta: float, size: int) -> np.ndarray[Any, Any]:
    """Return the divisors (size / 2,) in fp32 of the rotary frequencies in Llama 3's scaling, as in `nntask.architecture.rotary`."""
    plain = theta ** -(np.arange(0, size, 2, dtype=np.float64) / size)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    share = np.clip((scaling["original_max_position_embeddings"] * plain / (2 * pi) - low) / (high - low), 0, 1)
    factors: np.ndarray[Any, Any] = (1 / ((1 - share) / scaling["factor"] + share)).astype(np.float32)
    return factors


def scaling_keys(scaling: Values | None) -> dict[str, Any]:
    """Return key -> value of a scaling in a file's metadata; the inverse of `scaling_from`."""
    kind = None if scaling is None else scaling["rope_type"]
    if scaling is not None and kind == "longrope":
        return {_TYPE: kind, _ORIGINAL: scaling[_LENGTH], _ATTENTION: RopeScaling(**scaling).angle_factor}
    if scaling is None or kind not in ("linear", "yarn"):
        return {}
    metadata: dict[str, Any] = {_TYPE: kind, _FACTOR: float(scaling["factor"])}
    if kind == "yarn":
        metadata[_ORIGINAL] = scaling["original_max_position_embeddings"]
        multiple = RopeScaling(**scaling).angle_factor / _usual(scaling["factor"])
        metadata |= {_ATTENTION: multiple} if multiple != 1 else {}
    return metadata
