"""Rules that write an operation's result to lent memory have the bits of the operation."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from wrappers.torch.tasks.rules import INTO  # noqa: E402

aten = torch.ops.aten
INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bfloat16: torch.int16}


def _special_values(dtype: Any) -> Any:
    """Random numbers with rows of -inf, NaN, infinities and a negative zero  # (3, 16, 32)."""
    x = torch.randn(3, 16, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, 3] = x[1, :, 20:] = -torch.inf
    x[2, 5, 7], x[2, 6, 7], x[2, 7, 7] = torch.nan, torch.inf, -0.0
    return x


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize(("operation", "more"), [("relu", ()), ("_safe_softmax", (-1,)), ("_safe_softmax", (1,))])
def test_results_have_the_bits_of_the_operation(operation: str, more: tuple[int, ...], dtype: Any) -> None:
    """NaN, infinities, zeros with a sign, and rows without a finite value included."""
    call, x = getattr(aten, operation).default, _special_values(dtype)
    result = torch.full_like(x, 7.0)
    INTO[call]([result], x, *more)
    assert torch.equal(result.view(INTEGERS[dtype]), call(x, *more).view(INTEGERS[dtype]))
