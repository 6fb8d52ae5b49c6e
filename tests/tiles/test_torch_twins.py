"""The second opinion that `make test-gpu` asks of PyTorch, asked here of our references: what compares kernels on a card is right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.torch_twins import TWINS, WITHOUT, compare_with_torch

from tiles.kernels.catalog import kernel, operations


def _reference(op: str, arrays: list[np.ndarray], **constants: Any) -> None:
    kernel(op, "reference")(*arrays, **constants)


@pytest.mark.parametrize("op", TWINS)
def test_twins_compute_what_references_do(op: str) -> None:
    """In fp32, on the CPU."""
    assert compare_with_torch(op, _reference, "cpu") < 1e-2


def test_a_wrong_kernel_is_found() -> None:
    """One that loses a sign."""

    def wrong(op: str, arrays: list[np.ndarray], **constants: Any) -> None:
        _reference(op, arrays, **constants)
        arrays[-1][...] *= -1

    with pytest.raises(AssertionError, match="layer_norm, case 0, argument 5"):
        compare_with_torch("layer_norm", wrong, "cpu")


def test_every_kernel_has_a_twin_or_a_reason() -> None:
    """None is forgotten, and none has both."""
    assert {*TWINS, *WITHOUT} == set(operations("cuda"))
    assert not TWINS.keys() & WITHOUT.keys()
