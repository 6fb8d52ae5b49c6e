"""Families of models that Hugging Face and we both have: by the ``model_type`` of a config.json, its config and its names.

A family's `from_hf` and `to_hf` turn a state dict into arrays under our names and back. They are asked about arrays without memory as well, whose
places are then looked at (`shadow`), so they may slice, split, transpose, and rename, and `to_hf` may join; neither may look at values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy.typing as npt

from ..models import gpt2_names
from ..models.config import GPT2Config

Arrays = dict[str, npt.NDArray[Any]]
Translate = Callable[[Mapping[str, npt.NDArray[Any]], Any], Arrays]


@dataclass(frozen=True, slots=True)
class Family:
    """One family of models.

    Args:
        config: class of its configs, with ``from_dict`` and ``to_dict``.
        from_hf: their state dict and the config -> arrays under our names.
        to_hf: arrays under our names and the config -> their state dict.
    """

    config: Any
    from_hf: Translate
    to_hf: Translate


FAMILIES: Final = {"gpt2": Family(GPT2Config, gpt2_names.from_hf, gpt2_names.to_hf)}
"""Model types of config.json."""


def family_of(config: Any) -> Family:
    """The family of one of our configs."""
    return next(family for family in FAMILIES.values() if isinstance(config, family.config))
