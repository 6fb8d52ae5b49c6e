"""AdamW whose moments have 8 bits (Dettmers et al., 2022): two bytes and two fp32 scales per 256 weights, where `AdamW` has eight bytes a weight.

Blocks of 256 lie within a tile, row by row, and codes are rounded by random bits of the step, the parameter's name, the tile and the element. So
results depend on the tiling, as all sums do, and on nothing else. Parameters of fewer than `LEAST` elements, such as norms and biases, have fp32
moments, as with bitsandbytes and torchao; the number counts the whole parameter, not a tile or a node's share of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Final

import numpy as np

from tiles import TileTensor
from tiles.ops import optimizer as optimizer_ops

from ..nn.initializers import stream_of
from ..nn.module import Parameter
from .optimizers import AdamW, Group

LEAST: Final = 4096
"""Smallest number of elements of a parameter whose moments have 8 bits."""


class AdamW8bit(AdamW):
    """AdamW with block-wise 8-bit moments. Arguments: those of `Adam`."""

    kinds = ("m", "v", "m_codes", "v_codes", "m_scales", "v_scales")

    def _new_state(self, parameter: Parameter, kind: str) -> TileTensor | None:
        is_large, name = prod(parameter.shape) >= LEAST, f"{kind} {parameter.name}"
        if kind != "master" and is_large != (kind not in ("m", "v")):
            return None
        if kind.endswith("_scales"):
            return optimizer_ops.moment_scales(parameter.data, name)
        if kind.endswith("_codes"):
            return parameter.data.like(dtype=np.uint8, kind="persistent", data_class="optimizer", name=name)
        return super()._new_state(parameter, kind)

    def _emit(self, update: optimizer_ops.Update, state: Mapping[str, TileTensor], group: Group) -> None:
        if "m_codes" in state:
            moments = (state[kind] for kind in ("m_codes", "m_scales", "v_codes", "v_scales"))
            optimizer_ops.adamw8bit(update, *moments, stream=stream_of(update.param.name))
        else:
            super()._emit(update, state, group)
