"""Rotary positions (Su et al., RoFormer, 2021): the rotated features, their frequencies, and their keys in configs.

Scaling is read from ``rope_theta`` and ``rope_scaling`` (transformers 4) or from ``rope_parameters`` (transformers 5). If a file has both formats,
their values must agree. Files of other formats are translated to these keys and read by `scaling_of`; `RopeScaling.to_dict` returns them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import ceil, floor, log, pi, sqrt
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from .config_checks import check_count, check_object, check_positive, check_switch, shown

_ORIGINAL: Final = "original_max_position_embeddings"
_NEEDED: Final[dict[str, tuple[str, ...]]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
}
_OPTIONAL: Final[dict[str, tuple[str, ...]]] = {
    "llama3": (_ORIGINAL,),
    "yarn": ("factor", _ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("factor", _ORIGINAL, "attention_factor"),
}
_LISTS: Final = ("short_factor", "long_factor")
_TURNS: Final = {"beta_fast": 32.0, "beta_slow": 1.0}
ROPE_TYPES: Final = tuple(_NEEDED)
"""Implemented kinds of rotary scaling."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of rotary frequencies for longer sequences; field names as in ``rope_scaling``.

    Args:
        rope_type: kind of scaling. "linear" divides every frequency by `factor` (Chen et al., Position Interpolation, 2023). "llama3" divides only
            frequencies with long wavelengths (Llama 3.1). "yarn" divides those with fewer than `beta_slow` turns in the original length, keeps those
            with more than `beta_fast` turns, and multiplies cosines and sines by an attention factor (Peng et al., YaRN, 2023). "dynamic" has no
            effect up to max_position_embeddings tokens, the longest sequence that is accepted here. "longrope" divides each frequency by a factor of
            its own, from one of two lists that `Rotary.is_long` selects, and multiplies cosines and sines by an attention factor (Ding et al.,
            LongRoPE, 2024).
        factor: divisor of frequencies, at least 1; for "longrope", it only determines the attention factor.
        low_freq_factor, high_freq_factor: limits for "llama3": frequencies with a wavelength above original / low are divided, frequencies with a
            wavelength below original / high are kept, and the frequencies between are blended.
        original_max_position_embeddings: longest sequence of the original training in tokens, for "llama3", "yarn" and "longrope".
        attention_factor: factor of cosines and sines for "yarn" and "longrope"; None to derive it from `factor`, and for "yarn" also from
            `mscale` and `mscale_all_dim`.
        beta_fast, beta_slow: numbers of turns for "yarn"; None for 32 and 1.
        mscale, mscale_all_dim: weights of log(factor) in numerator and denominator of the attention factor of "yarn"; None for none.
        truncate: whether "yarn" widens the blended range to whole features; None for true.
        short_factor, long_factor: divisors of the frequencies for "longrope", one for each rotated pair of features.
    """

    rope_type: str
    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    @property
    def angle_factor(self) -> float:
        """Factor of cosines and sines: `attention_factor` if given.

        Otherwise it is 0.1 log(factor) + 1 for "yarn" without further keys (Peng et al., equation 22), and 1 for kinds other than "yarn" and
        "longrope". For "longrope" it is sqrt(1 + log(factor) / log(original length)) (Ding et al., section 3.3).
        """
        if self.rope_type not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.rope_type == "longrope":
            assert self.original_max_position_embeddings is not None  # as the config has checked
            return 1.0 if self.factor <= 1 else sqrt(1 + log(self.factor) / log(self.original_max_position_embeddings))
        if self.mscale and self.mscale_all_dim:
            return _weighted(self.factor, self.mscale) / _weighted(self.factor, self.mscale_all_dim)
        return _weighted(self.factor, 1)

    def to_dict(self) -> dict[str, Any]:
        """Return the scaling as a JSON object, without the keys that its kind does not use."""
        found = {key: value for key, value in asdict(self).items() if value is not None}
        return found | {key: list(found[key]) for key in _LISTS if key in found}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """Rotation of queries and keys by their positions.

    Args:
        size: number of rotated features of a head, the first ones; even.
        theta: base of the frequencies.
        scaling: scaling for longer sequences; None for none.
    """

    size: int
    theta: float
    scaling: RopeScaling | None = None

    @property
    def has_two_tables(self) -> bool:
        """Whether long sequences have frequencies of their own."""
        return self.scaling is not None and self.scaling.rope_type == "longrope"

    def is_long(self, length: int) -> bool:
        """Return whether sequences of at most `length` tokens use the long factors: those of a "longrope" that may exceed the original length.

        The limit decides, not the number of tokens so far: keys in a cache cannot change their frequencies.
        """
        return self.has_two_tables and self.scaling is not None and length > (self.scaling.original_max_position_embeddings or 0)

    def frequencies(self, *, is_long: bool = False) -> npt.NDArray[np.float32]:
        """Return the scaled frequencies (size / 2,) in fp32: theta^(-2i / size) radians per position for feature pair i before scaling.

        All arithmetic is in fp32, as in transformers: at position 100,000 the last digit of a frequency is a visible angle.

        Args:
            is_long: whether the long factors of "longrope" divide, instead of the short ones.
        """
        scaling = self.scaling
        powers = np.float32(self.theta) ** (np.arange(0, self.size, 2, dtype=np.float32) / np.float32(self.size))
        plain = (1 / powers).astype(np.float32)
        if scaling is None or scaling.rope_type in ("default", "dynamic"):
            return plain
        if scaling.rope_type == "longrope":
            return (1 / (np.array(scaling.long_factor if is_long else scaling.short_factor, np.float32) * powers)).astype(np.float32)
        if scaling.rope_type == "linear":
            return plain / np.float32(scaling.factor)
        return _yarn(powers, self.theta, scaling) if scaling.rope_type == "yarn" else _llama3(plain, scaling)


def _llama3(plain: npt.NDArray[np.float32], scaling: RopeScaling) -> npt.NDArray[np.float32]:
    low, high, original = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position_embeddings
    assert isinstance(low, float) and isinstance(high, float) and isinstance(original, int)  # noqa: PT018 - llama3, as the config has checked
    wavelengths = 2 * pi / plain  # positions per turn
    share = np.clip((original / wavelengths - low) / (high - low), 0, 1)  # weight of the unscaled frequency: 1 for short wavelengths, 0 for long
    blended: npt.NDArray[np.float32] = ((1 - share) * plain / np.float32(scaling.factor) + share * plain).astype(np.float32)
    return blended


def _yarn(powers: npt.NDArray[np.float32], theta: float, scaling: RopeScaling) -> npt.NDArray[np.float32]:
    """Return YaRN's frequencies, "NTK by parts" (Peng et al., 2023, section 3.2), with the same operations as transformers."""
    original = scaling.original_max_position_embeddings
    assert original is not None  # as the config has checked
    size = 2 * len(powers)
    turns = (scaling.beta_fast or _TURNS["beta_fast"], scaling.beta_slow or _TURNS["beta_slow"])
    bounds = [size * log(original / (each * 2 * pi)) / (2 * log(theta)) for each in turns]
    if scaling.truncate is not False:
        bounds = [floor(bounds[0]), ceil(bounds[1])]
    low, high = max(bounds[0], 0), min(bounds[1], size - 1)
    high += 0.001 if low == high else 0
    ramp = np.clip((np.arange(size // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)  # 0 keeps, 1 divides
    weight = 1 - ramp
    frequencies: npt.NDArray[np.float32] = (1 / (np.float32(scaling.factor) * powers) * (1 - weight) + 1 / powers * weight).astype(np.float32)
    return frequencies


def _weighted(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * log(factor) + 1.0


_EXAMPLES: Final[dict[str, Any]] = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    _ORIGINAL: 8192,
    "attention_factor": 1.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def rope_of(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the present keys of ``rope_theta`` and ``rope_scaling`` from either format.

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
    known: dict[str, Any] = {"rope_scaling": next(iter(scalings.values()), None)}
    if thetas:
        known["rope_theta"] = _agreed("rope_theta", thetas, source)
    own = {key: (values[key] or {}).get("rope_theta", values.get("rope_theta")) for key in scalings}  # one scaling does not complete another
    _agreed("rotary scaling", {key: {"rope_type": "default", **scaling, "rope_theta": own[key]} for key, scaling in scalings.items()}, source)
    if known["rope_scaling"] is not None:
        own = {_ORIGINAL: _agreed(_ORIGINAL, originals, source)} if originals else {}
        partial = {key: values[key] for key in ("partial_rotary_factor",) if key in values}
        known["rope_scaling"] = {**partial, **known["rope_scaling"], **own}
    elif values.get("partial_rotary_factor") not in (None, 1):
        known["rope_scaling"] = {"rope_type": "default", "partial_rotary_factor": values["partial_rotary_factor"]}
    return known


def _agreed(what: str, by_key: Mapping[str, Any], source: str) -> Any:
    """Return the common value of all keys of `by_key`; None if `by_key` is empty.

    Raises:
        UsageError: two keys have different values.
    """
    value = next(iter(by_key.values()), None)
    for key, other in by_key.items():
        if other != value:
            raise UsageError(
                f"{source} has {what} twice, {shown(value)} in {next(iter(by_key))} and {shown(other)} in {key}", "remove the one that is wrong"
            )
    return value


def scaling_of(values: object, longest: int, source: str) -> RopeScaling | None:
    """Return the checked rotary scaling of decoded JSON; None without scaling.

    Args:
        values: value of "rope_scaling".
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
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise UsageError(
            f"rope_type in {where} must be one of {', '.join(ROPE_TYPES)}, got {shown(kind)}", "use a version of the model for shorter texts"
        )
    if values.get("partial_rotary_factor") not in (None, 1):
        raise UsageError(f"partial_rotary_factor in {where} must be 1, got {shown(values['partial_rotary_factor'])}", "use a config without it")
    return None if kind == "default" else _checked(kind, values, longest, where)


def _checked(kind: str, values: Mapping[str, Any], longest: int, where: str) -> RopeScaling:
    """Return the scaling of a kind with its defaults, after a check of its values."""
    needed = _NEEDED[kind]
    if missing := [key for key in needed if key not in values]:
        raise UsageError(f"{where} lacks {', '.join(missing)}", f"rope_type {kind} needs {', '.join(needed)}")
    given = {key: values[key] for key in needed} | {key: values[key] for key in _OPTIONAL.get(kind, ()) if values.get(key) is not None}
    if kind in _OPTIONAL:
        given.setdefault(_ORIGINAL, longest)
        check_count(_ORIGINAL, given[_ORIGINAL], where, _EXAMPLES[_ORIGINAL])
    if kind == "yarn":
        given.setdefault("factor", longest / given[_ORIGINAL])
    if kind == "longrope":
        given.setdefault("factor", max(1.0, longest / given[_ORIGINAL]))
    for key, value in given.items():
        if key == "truncate":
            check_switch(key, value, where)
        elif key in _LISTS:
            given[key] = _divisors(key, value, where)
        elif key != _ORIGINAL:
            check_positive(key, value, where, _EXAMPLES[key])
            given[key] = float(value)
    if given["factor"] < 1:
        raise UsageError(f"factor in {where} must be at least 1, got {given['factor']:g}", "the nearest legal value is 1")
    for first, second, usual in (("low_freq_factor", "high_freq_factor", "1.0 and 4.0"), ("beta_slow", "beta_fast", "1.0 and 32.0")):
        least, most = (given.get(key, _TURNS.get(key, 0.0)) for key in (first, second))
        if {first, second} & given.keys() and least >= most:
            raise UsageError(f"{first} in {where} must be below {second}, got {least} and {most}", f"write for example {usual}")
    return RopeScaling(rope_type=kind, **given)


def _divisors(key: str, values: object, where: str) -> tuple[float, ...]:
    """Return a list of positive numbers as a tuple.

    Raises:
        UsageError: `values` is something else.
    """
    if not isinstance(values, list | tuple):
        raise UsageError(f"{key} in {where} must be a list of numbers, got {shown(values)}", "copy it from the config of the model")
    for number, value in enumerate(values):
        check_positive(f"{key}[{number}]", value, where, 1.0)
    return tuple(float(value) for value in values)


def check_divisors(scaling: RopeScaling | None, size: int, source: str) -> None:
    """Check that a "longrope" has a divisor for each pair of the `size` rotated features of a head.

    Raises:
        UsageError: a list is longer or shorter, or no attention factor follows from its original length.
    """
    if scaling is None or scaling.rope_type != "longrope":
        return
    for key in _LISTS:
        if (count := len(getattr(scaling, key) or ())) != size // 2:
            raise UsageError(
                f"{key} in rope_scaling in {source} must have {size // 2} numbers, one for each pair of the {size} rotated features of a head, "
                f"got {count}",
                "copy it from the config of the model",
            )
    if scaling.original_max_position_embeddings == 1 and scaling.factor > 1 and scaling.attention_factor is None:
        raise UsageError(f"{_ORIGINAL} in {source} must be above 1, as no attention factor follows from it, got 1", "write attention_factor, too")


def unread_of_rope(values: Mapping[str, Any]) -> list[str]:
    """Return the keys of the rotary scalings of a config.json that their kind has neither in nntask nor in transformers.

    A config may have one scaling, or one for each kind of block.
    """
    scalings = {key: values[key] for key in ("rope_parameters", "rope_scaling") if isinstance(values.get(key), Mapping)}
    for key, scaling in list(scalings.items()):
        if by_kind := {name: each for name, each in scaling.items() if isinstance(each, Mapping)}:
            del scalings[key]
            scalings |= {f"{key}.{name}": each for name, each in by_kind.items()}
    unread = []
    for key, scaling in scalings.items():
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        known = {*_NEEDED.get(kind, ()), *_OPTIONAL.get(kind, ()), "rope_type", "type", "rope_theta", "partial_rotary_factor", _ORIGINAL}
        unread += [f"{key}.{name}" for name, value in scaling.items() if value is not None and name not in known]
    return unread
