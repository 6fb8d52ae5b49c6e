"""Every registered CPU kernel against its readable twin: dtypes, odd shapes, first writes over garbage, bounded temporaries."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from support.kernel_cases import (
    CASES,
    Maker,
)

from scheduler import REDUX, RW, InlineRuntime, R, W
from tiles import TileTensor
from tiles.emission import emit
from tiles.kernels.catalog import kernel, operations
from tiles.kernels.registry import Backend


def test_every_kernel_has_a_twin_and_a_case() -> None:
    """No kernel without a readable reference and a case here."""
    assert operations("reference") == sorted(CASES)
    assert set(CASES) - set(operations("cpu")) == {"whole_attention", "whole_attention_backward"}  # only GPUs have a library for these


@pytest.mark.every
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("op", "number"), [(op, i) for op in operations("cpu") for i in range(len(CASES[op]))])
def test_cpu_equals_reference(op: str, number: int, dtype: type) -> None:
    """All arguments agree afterwards; pure outputs start as NaN, so nothing may read them."""
    args, outputs, constants = CASES[op][number](Maker(dtype))
    for at in outputs:
        args[at].fill(np.nan)
    fast = [array.copy() for array in args]
    with np.errstate(invalid="raise"):
        kernel(op, "reference")(*args, **constants)
        kernel(op, "cpu")(*fast, **constants)
    tolerance = 2e-4 if dtype == np.float32 else 1e-11
    for at, (want, found) in enumerate(zip(args, fast, strict=True)):
        if want.dtype != np.uint8 and want.dtype != np.uint64:
            np.testing.assert_allclose(found, want, rtol=tolerance, atol=tolerance, err_msg=f"argument {at}")


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("renormalises", [False, True])
@pytest.mark.parametrize("place", [0, 3, 5])
def test_nan_logits_reach_weights_and_gradients(place: int, renormalises: bool, backend: Backend) -> None:
    """A router that diverged must show, whether the expert is chosen or not; other rows keep their values."""
    logits = Maker(np.float32)(2, 6)
    logits[0, place] = np.nan
    choices, weights, flags, dlogits = np.empty((2, 3), np.int32), np.empty((2, 3), np.float32), np.empty((1, 6), np.uint8), np.empty_like(logits)
    kernel("route", backend)(logits, choices, weights, flags, renormalises=renormalises)
    kernel("route_backward", backend)(logits, choices, np.ones_like(weights), dlogits, renormalises=renormalises)
    for array in (weights, dlogits):
        assert np.isnan(array[0]).all()
        assert np.isfinite(array[1]).all()


@pytest.mark.parametrize("op", ["silu_gate", "scale", "cap"])
def test_16_bit_tiles_go_through_fp32(op: str) -> None:
    """A kernel without a twin for bf16 sees fp32 copies of 16-bit tiles and its output is rounded once."""
    runtime = InlineRuntime()
    args, outputs, constants = CASES[op][0](Maker(np.float32))
    narrow = [array.astype(ml_dtypes.bfloat16) for array in args]
    handles = []
    for array in narrow:
        tensor = TileTensor(runtime, array.shape, (-1,) * array.ndim, array.dtype)
        tensor.write(array)
        handles.append(tensor)
    emit(runtime, op, [(t.handles[0], W if i in outputs else R) for i, t in enumerate(handles)], **constants)
    wide = [array.astype(np.float32) for array in narrow]
    kernel(op, "cpu")(*wide, **constants)
    for at in outputs:
        np.testing.assert_array_equal(handles[at].read(), wide[at].astype(ml_dtypes.bfloat16))


def test_accumulating_into_16_bits_reads_the_old_value() -> None:
    """RW and REDUX tiles keep what they held."""
    runtime = InlineRuntime()
    total = TileTensor(runtime, (4,), (4,), ml_dtypes.bfloat16)
    part = TileTensor(runtime, (4,), (4,), ml_dtypes.bfloat16)
    total.write(np.full(4, 2.0))
    part.write(np.full(4, 3.0))
    emit(runtime, "accumulate", [(total.handles[0], RW), (part.handles[0], R)])
    emit(runtime, "add_into", [(part.handles[0], R), (total.handles[0], REDUX)])
    np.testing.assert_array_equal(total.read().astype(np.float32), 8.0)


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("kind", ["gelu_new", "relu"])
def test_every_task_of_a_model_has_a_cost(flash: bool, kind: str) -> None:
    """Cost functions, which schedulers and planners call, take the tiles of every task of a training step."""
    from nntask.models.gpt2 import GPT2, GPT2Config
    from nntask.optim.optimizers import AdamW, decay_groups
    from nntask.tiling.model_tiling import ModelTiling
    from scheduler import InlineRuntime
    from scheduler.core.codelet import Codelet

    costs = []

    class Costs(InlineRuntime):
        def _submit(self, codelet: Codelet, accesses, constants, priority, terms) -> None:  # type: ignore[no-untyped-def]
            if codelet.cost is not None:
                costs.append(codelet.cost([handle.view for handle, _ in accesses], constants))
            super()._submit(codelet, accesses, constants, priority, terms)

    config = GPT2Config(vocab_size=31, n_positions=12, n_embd=16, n_layer=1, n_head=2, activation_function=kind)
    model = GPT2(config, ModelTiling(seq_tile=5, inner_tile=20, vocab_tile=11), Costs(), flash=flash)
    tokens, targets = model.input_tensors(2)
    for tensor in (tokens, targets):
        tensor.write(np.zeros(tensor.shape, np.int32))
    model.train()
    model.dropout_key.write(np.array([0, 1], np.uint64))
    optimizer = AdamW(decay_groups(model, 0.1), 1e-3)
    optimizer.prepare(1, 1e-3)
    model(tokens, targets).backward()
    optimizer.step()
    assert costs
    assert all(cost.flops >= 0 and cost.nbytes > 0 for cost in costs)
