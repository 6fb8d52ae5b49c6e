"""Arguments for CUDA kernels: which stay fp32 where activations are bf16."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from support.kernel_cases import CASES, Maker

from tiles.kernels.catalog import operations
from tiles.kernels.reference.experts import expert_backward_tiles, expert_forward_tiles
from tiles.kernels.reference.loss import PLAIN, backward_tiles, forward_tiles

BF16 = np.dtype(ml_dtypes.bfloat16)

FLOATS = {
    "adam": (1, 2, 3),
    "adam8bit": (1, 3, 5),
    "add_rows_backward": (1,),
    "balance_backward": (1,),
    "attention": (4, 5, 6),
    "attention_apply": (1,),
    "attention_backward": (4, 5),
    "attention_delta": (2,),
    "attention_lse": (1, 2, 3),
    "cached_attention": (5, 6),
    "column_sums": (1,),
    "combine_pages": (0, 1, 2),
    "embedding_backward": (2,),
    "head_norm": (3,),
    "head_norm_backward": (2, -1),
    "layer_norm": (4, 5),
    "layer_norm_backward": (2, 3, -2, -1),
    "mean_tokens": (1,),
    "muon_update": (1, 3),
    "norm_apply": (1, 2),
    "norm_backward_apply": (2, 3, 5, 6, 9, 10),
    "norm_backward_sums": (2, 3, 5, 6),
    "paged_attention": (5, 6, 7),
    "residual_layer_norm": (6, 7),
    "residual_rms_norm": (5,),
    "rms_norm": (3,),
    "rms_norm_backward": (2, -1),
    "rotary": (1, 2),
    "route": (2,),
    "route_backward": (2,),
    "row_squares": (1, 2),
    "row_sums": (1,),
    "sgd": (1, 3, 4),
    "whole_attention": (4,),
    "whole_attention_backward": (4,),
}
"""Arguments that stay fp32 where activations and parameters are bf16: statistics, gradients of weights, moments, masters."""

ONLY_FLOATS = {"balance_finish", "head_finish", "norm_finish", "rotary_angles", "rotary_angles_at", "sum_scalars"} | {
    "muon_momentum",
    "muon_normalise",
    "muon_polynomial",
}

LOOSE = {"rotary_angles": 2e-4, "rotary_angles_at": 2e-4}
"""Angles of late positions are rounded in fp32 before their cosine is taken."""


def all_cases(skipped: set[str]) -> list[tuple[str, int]]:
    """(operation, number of its case)."""
    return [(op, number) for op in operations("cuda") if op not in skipped for number in range(len(CASES[op]))]


def _kept(op: str, args: list[np.ndarray], constants: dict[str, Any]) -> set[int]:
    """Numbers of the arguments that stay fp32."""
    if op in ("head_forward", "head_backward"):
        places, how = range(len(args)), constants.get("how", PLAIN)
        if op == "head_forward":
            return set(forward_tiles(places, constants["num_c"], how).statistics)
        found = backward_tiles(places, constants["num_c"], how)
        return {found.lse, *found.dws} | {place for place in (found.factor, found.dbias) if place is not None}
    if op == "expert_forward":
        return {expert_forward_tiles(range(len(args)), constants["num_c"], has_factors="scale" in constants).weights}
    if op == "expert_backward":
        given = expert_backward_tiles(range(len(args)), constants["num_c"], has_factors="scale" in constants)
        return {given.weights, given.dweights, *given.learnt}
    num_tiles = len(args) - bool(constants.get("offset"))  # negative places count from before the scratch of an offset
    return {place % num_tiles for place in FLOATS.get(op, ()) if place < num_tiles}


def arguments(op: str, number: int, short: bool, seed: int = 0) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Arguments of a case, pure outputs full of NaN, and its constants."""
    make = Maker(np.float32)
    make.rng = np.random.default_rng(seed)
    args, outputs, constants = CASES[op][number](make)
    kept = _kept(op, args, constants)
    if op == "attention_backward" and "accumulate" in constants:
        kept.add(len(args) - 2)
    if constants.get("stored"):
        kept.discard(4)  # stored weights are like activations
    for place, arg in enumerate(args):
        if short and arg.dtype == np.float32 and place not in kept:
            args[place] = arg.astype(BF16)
    for place in outputs:
        args[place].fill(np.nan)
    return args, constants
