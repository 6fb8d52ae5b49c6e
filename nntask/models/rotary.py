"""Rotary positions (Su et al., RoFormer, 2021): which features turn, how fast, and how configs say so.

Scaling is read from ``rope_theta`` and ``rope_scaling`` (transformers 4) or from ``rope_parameters`` (transformers 5). Where a file has both formats,
their values must agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import pi
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from .config_checks import check_choice, check_count, check_object, check_positive, shown

ROPE_TYPES: Final = ("default", "linear", "dynamic", "llama3")
"""The kinds of rotary scaling that are implemented; yarn and longrope are not."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of rotary frequencies for longer sequences; field names as in ``rope_scaling``.

    Args:
        rope_type: "linear" divides every frequency by `factor` (Chen et al., Position Interpolation, 2023). "llama3" divides only frequencies with
            long wavelengths (Llama 3.1). "dynamic" has no effect up to max_position_embeddings tokens, the longest sequence that is accepted here.
        factor: the divisor, at least 1.
        low_freq_factor, high_freq_factor: for "llama3": frequencies with a wavelength above original / low are divided, frequencies with a
            wavelength below original / high are kept, and the frequencies between are blended.
        original_max_position_embeddings: for "llama3": the longest sequence of the original training, in tokens.
    """

    rope_type: str
    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """The scaling as a JSON object, without the keys that its kind does not use."""
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """How queries and keys turn with their positions.

    Args:
        size: features of a head that turn, the first ones; even.
        theta: base of the frequencies.
        scaling: for longer sequences; None for none.
    """

    size: int
    theta: float
    scaling: RopeScaling | None = None

    def frequencies(self) -> npt.NDArray[np.float32]:
        """(size / 2,) fp32: radians per position of feature pair i, theta^(-2i / size), scaled.

        All arithmetic is in fp32, as in transformers: at position 100,000 the last digit of a frequency is a visible angle.
        """
        size, scaling = self.size, self.scaling
        plain = (1 / np.float32(self.theta) ** (np.arange(0, size, 2, dtype=np.float32) / np.float32(size))).astype(np.float32)
        if scaling is None or scaling.rope_type in ("default", "dynamic"):
            return plain
        factor = np.float32(scaling.factor)
        if scaling.rope_type == "linear":
            return plain / factor
        low, high, original = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position_embeddings
        assert isinstance(low, float) and isinstance(high, float) and isinstance(original, int)  # noqa: PT018 - llama3, as the config has checked
        wavelengths = 2 * pi / plain  # positions per turn
        share = np.clip((original / wavelengths - low) / (high - low), 0, 1)  # weight of the unscaled frequency: 1 for short wavelengths, 0 for long
        blended: npt.NDArray[np.float32] = ((1 - share) * plain / factor + share * plain).astype(np.float32)
        return blended


_ORIGINAL: Final = "original_max_position_embeddings"
_EXAMPLES: Final[dict[str, Any]] = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, _ORIGINAL: 8192}


def rope_of(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """``rope_theta`` and ``rope_scaling`` from either format, as far as they are present.

    A number that is present under two keys must be equal under both; transformers 5 silently takes one of them.

    Raises:
        UsageError: two values disagree, or a scaling is no JSON object.
    """
    scalings: dict[str, dict[str, Any]] = {}
    thetas, originals = ({key: values[key]} if values.get(key) is not None else {} for key in ("rope_theta", _ORIGINAL))
    for key in ("rope_parameters", "rope_scaling"):
        if values.get(key) in (None, {}):
            continue
        check_object(values[key], f"{key} in {source}", "rope_type")
        scaling = dict(values[key])
        if "type" in scaling:
            scaling.setdefault("rope_type", scaling.pop("type"))
        thetas |= {key: scaling.pop("rope_theta")} if "rope_theta" in scaling else {}
        originals |= {key: scaling[_ORIGINAL]} if _ORIGINAL in scaling else {}
        scalings[key] = scaling
    found: dict[str, Any] = {"rope_scaling": next(iter(scalings.values()), None)}
    if thetas:
        found["rope_theta"] = _agreed("rope_theta", thetas, source)
    own = {key: (values[key] or {}).get("rope_theta", values.get("rope_theta")) for key in scalings}  # one scaling does not complete another
    _agreed("rotary scaling", {key: {"rope_type": "default", **scaling, "rope_theta": own[key]} for key, scaling in scalings.items()}, source)
    if found["rope_scaling"] is not None:
        own = {_ORIGINAL: _agreed(_ORIGINAL, originals, source)} if originals else {}
        partial = {key: values[key] for key in ("partial_rotary_factor",) if key in values}
        found["rope_scaling"] = {**partial, **found["rope_scaling"], **own}
    elif values.get("partial_rotary_factor") not in (None, 1):
        found["rope_scaling"] = {"rope_type": "default", "partial_rotary_factor": values["partial_rotary_factor"]}
    return found


def _agreed(what: str, by_key: Mapping[str, Any], source: str) -> Any:
    """The one value under all keys of `by_key`; None where `by_key` is empty.

    Raises:
        UsageError: two keys have different values.
    """
    value = next(iter(by_key.values()), None)
    for key, other in by_key.items():
        if other != value:
            raise UsageError(
                f"{source} has {what} twice, {shown(value)} in {next(iter(by_key))} and {shown(other)} in {key}; remove the one that is wrong"
            )
    return value


def scaling_of(values: object, longest: int, source: str) -> RopeScaling | None:
    """Checked rotary scaling from decoded JSON; None without scaling.

    Args:
        values: the value of "rope_scaling".
        longest: max_position_embeddings, the default of original_max_position_embeddings.
        source: name of the config, for error messages.

    Raises:
        UsageError: the kind of scaling is not implemented, or a value breaks its rule.
    """
    if values is None:
        return None
    where = f"rope_scaling in {source}"
    check_object(values, where, "rope_type")
    assert isinstance(values, Mapping)
    kind = values.get("rope_type", values.get("type", "default"))
    check_choice("rope_type", kind, ROPE_TYPES, where)
    if values.get("partial_rotary_factor") not in (None, 1):
        raise UsageError(f"partial_rotary_factor in {where} must be 1, got {shown(values['partial_rotary_factor'])}; use a config without it")
    if kind == "default":
        return None
    needed = ("factor",) if kind != "llama3" else ("factor", "low_freq_factor", "high_freq_factor")
    if missing := [key for key in needed if key not in values]:
        raise UsageError(f"{where} lacks {', '.join(missing)}; rope_type {kind} needs {', '.join(needed)}")
    for key in needed:
        check_positive(key, values[key], where, _EXAMPLES[key])
    if values["factor"] < 1:
        raise UsageError(f"factor in {where} must be at least 1, got {values['factor']}; the nearest legal value is 1")
    if kind != "llama3":
        return RopeScaling(rope_type=kind, factor=float(values["factor"]))
    original = values.get(_ORIGINAL, longest)
    check_count(_ORIGINAL, original, where, _EXAMPLES[_ORIGINAL])
    low, high = float(values["low_freq_factor"]), float(values["high_freq_factor"])
    if low >= high:
        raise UsageError(f"low_freq_factor in {where} must be below high_freq_factor, got {low} and {high}; write for example 1.0 and 4.0")
    return RopeScaling(
        rope_type=kind, factor=float(values["factor"]), low_freq_factor=low, high_freq_factor=high, original_max_position_embeddings=original
    )
