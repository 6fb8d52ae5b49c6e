"""Chains of operations on an emulated device: one kernel leaves the bits of one operation after another, and steps of models have such chains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from support.cuda_cases import BF16
from support.cuda_emulator import COMPILER, Emulator, on_device
from support.kernel_cases import Maker, patterned_backward

from scheduler.core.codelet import KernelChain
from tiles.emission import codelet
from tiles.kernels.catalog import kernel, operations, register
from tiles.kernels.cuda import tables
from tiles.kernels.cuda.tables import head_scratch_nbytes
from tiles.kernels.reference.attention import Pair
from tiles.kernels.reference.loss import Head
from tiles.kernels.registry import registered_chains

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ to run the sources with")
Call = tuple[list[np.ndarray], dict[str, Any]]
SIZE: Final = 64
"""Features of a head, for which tensor cores compute attention in bf16."""
NAMES: Final = {kernel(op, "cuda"): op for op in operations("cuda")}
CHAINS: Final = {" + ".join(NAMES[one] for one in chain.kernels): chain for one in NAMES for chain in registered_chains(one)}


@pytest.fixture(scope="module")
def emulator(cuda_libraries: Path) -> Emulator:
    """The device of these tests."""
    found = Emulator(cuda_libraries, eager=True)
    found.enter(found.stream())
    return found


def call(op: str, make: Maker, rows: int, width: int, dtype: Any) -> Call:
    """Arguments of an operation, with a residual and without."""

    def short(*shape: int) -> np.ndarray:
        return make(*shape).astype(dtype)

    x, y, z, vector, other = short(rows, width), short(rows, width), short(rows, width), short(width), short(width)
    mean, rstd, ids, room = make(rows), make.positive(rows), make.ids(30, rows) - 1, np.zeros(head_scratch_nbytes(rows, 21, width), np.uint8)
    tiles: Mapping[str, Sequence[np.ndarray]] = {
        "activation_backward": [x, y, z],
        "add": [x, y, z],
        "attention_backward": [
            *(short(1, rows, SIZE) for _ in range(4)),
            make.positive(1, 1, rows) * 5,
            make(1, 1, rows),
            *(short(1, rows, SIZE) for _ in range(3)),
            np.zeros(8, np.uint8),
        ],
        "attention_delta": [short(1, rows, SIZE), short(1, rows, SIZE), make(1, 1, rows)],
        "column_sums": [x, make(width)],
        "dropout": [x, np.array([1, 2], np.uint64), y],
        "head_backward": [x, short(21, width), ids, mean, y, short(21, width).astype(np.float32), room],
        "head_finish": [ids, mean, rstd, make(rows), make(rows), np.zeros(1)],
        "head_forward": [x, short(21, width), ids, mean, rstd, make(rows), room.copy()],
        "layer_norm": [x, vector, other, y, mean, rstd],
        "layer_norm_backward": [x, vector, mean, rstd, y, z, short(rows, width), make(width), make(width)],
        "rms_norm": [x, vector, y, rstd],
        "rms_norm_backward": [x, vector, rstd, y, z, make(width)],
    }
    constants = {
        "activation_backward": {"kind": "gelu_new"},
        "attention_backward": {
            "at": Pair(SIZE, SIZE**-0.5, True, 0, 0, 0, 0, 1, rows, num_keys=rows),
            "stored": False,
            "first_k": True,
            "first_q": True,
        },
        "attention_delta": {"head_size": SIZE},
        "column_sums": {"accumulate": True},
        "dropout": {"p": 0.3, "stream": 4, "shape": (2 * rows, 2 * width), "origin": (rows, width)},
        "head_backward": {"num_c": 1, "v_start": 0, "scale": 0.1, "first": True, "accumulate": True},
        "head_finish": {"scale": 0.1},
        "head_forward": {"num_c": 1, "v_start": 0, "vocab": 30, "first": True},
        "layer_norm_backward": {"accumulate": False, "residual": True},
        "rms_norm_backward": {"accumulate": True, "residual": False},
    }
    return [*tiles[op]], constants.get(op, {"eps": 1e-5} if "norm" in op else {})


def linked(chain: KernelChain, rows: int, width: int, dtype: Any) -> list[Call]:
    """Arguments of a chain's operations, which share the results that they read."""
    make = Maker(np.float32)
    calls = [call(NAMES[one], make, rows, width, dtype) for one in chain.kernels]
    for link in chain.links:
        calls[link.reader][0][link.argument] = calls[link.writer][0][link.result]
    if chain.kernels[0] is kernel("attention_delta", "cuda"):
        calls[1][0][3] = calls[0][0][1]
    if chain.kernels[0] is kernel("head_forward", "cuda"):
        calls[1][0][0] = calls[0][0][2]
        calls[2][0][:3] = calls[0][0][:3]
    return calls


def copied(calls: Sequence[Call]) -> list[Call]:
    """The same with arrays of their own; an array that two operations share stays one."""
    copies = {id(array): array.copy() for arrays, _ in calls for array in arrays}
    return [([copies[id(array)] for array in arrays], constants) for arrays, constants in calls]


@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("rows", "width"), [(3, 7), (150, 136)])
@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_leaves_the_bits_of_its_operations(
    name: str, rows: int, width: int, dtype: Any, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All results but private ones and scratch; rows that 16 bytes divide and others, and sums of several pieces of rows."""
    chain = CHAINS[name]
    monkeypatch.setattr(tables, "COLUMNS", 8)
    monkeypatch.setattr(tables, "LEAST_ROWS", 40)
    monkeypatch.setattr(tables, "_ROWS", 20)
    for backwards in (False, True):
        emulator.backwards = backwards
        single = linked(chain, rows, width, dtype)
        whole = copied(single)
        for one, (arrays, constants) in zip(chain.kernels, single, strict=True):
            one(*map(on_device, arrays), **constants)
        chain.run([([on_device(array) for array in arrays], constants) for arrays, constants in whole])
        private = {id(whole[link.writer][0][link.result]) for link in chain.links if link.is_private}
        for (wanted, _), (found, _) in zip(single, whole, strict=True):
            for expected, result in zip(wanted, found, strict=True):
                assert id(result) in private or result.dtype == np.uint8 or expected.tobytes() == result.tobytes()


@pytest.mark.parametrize("has_copy", [False, True])
def test_a_head_with_weights_of_its_own_is_computed_pass_by_pass(has_copy: bool, emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quantised head is decoded for each pass; capped logits, in pieces of rows, leave the same bits either way."""
    emulator.backwards = False
    monkeypatch.setattr(tables, "COLUMNS", 8)
    monkeypatch.setattr(tables, "LEAST_ROWS", 40)
    monkeypatch.setattr(tables, "_ROWS", 20)
    chain = CHAINS["head_forward + head_finish + head_backward"]
    calls = linked(chain, 150, 16, BF16)
    for number in (0, 2):
        calls[number][1]["how"] = Head(cap=2.0)
    if has_copy:
        calls[2][0][1] = calls[2][0][1].copy()
    whole = copied(calls)
    for one, (arrays, constants) in zip(chain.kernels, calls, strict=True):
        one(*map(on_device, arrays), **constants)
    chain.run([([on_device(array) for array in arrays], constants) for arrays, constants in whole])
    for (expected, _), (results, _) in zip(calls[1:], whole[1:], strict=True):
        assert [one.tobytes() for one in expected if one.dtype != np.uint8] == [one.tobytes() for one in results if one.dtype != np.uint8]


@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["fp32", "bf16"])
def test_the_gradient_of_a_bias_reads_delta_after_it_is_written(dtype: Any, emulator: Emulator) -> None:
    """Tensor cores compute delta with the gradient of the queries, which is started after the gradient of the bias."""
    emulator.backwards = False
    chain = CHAINS["attention_delta + attention_backward"]
    arrays, _, constants = patterned_backward(Maker(np.float32), "bias", stored=False, first=True, size=SIZE, tq=20, tk=20)
    arrays = [array.astype(dtype) if number in (0, 1, 2, 3, 6, 7, 8) else array for number, array in enumerate(arrays)]
    o, delta = Maker(np.float32)(*arrays[3].shape).astype(dtype), np.full_like(arrays[5], np.nan)
    arrays[5] = delta
    single: list[Call] = [([o, arrays[3], delta], {"head_size": SIZE}), (arrays, constants)]
    whole = copied(single)
    for one, (given, numbers) in zip(chain.kernels, single, strict=True):
        one(*map(on_device, given), **numbers)
    chain.run([([on_device(array) for array in given], numbers) for given, numbers in whole])
    assert [array.tobytes() for array in single[1][0][:-1]] == [array.tobytes() for array in whole[1][0][:-1]]


def test_what_is_chained() -> None:
    """Sums before norms and before their gradients; gradients of biases with what makes their slopes; both passes of a head; delta of attention."""
    norms = {"layer_norm", "rms_norm"}
    expected = {f"add + {norm}" for norm in norms}
    expected |= {f"{ops} + {norm}_backward" for norm in norms for ops in ("add", "add + add")}
    expected |= {f"{ops}layer_norm_backward + column_sums" for ops in ("", "add + ", "add + add + ")}
    expected |= {"attention_delta + attention_backward", "head_forward + head_finish + head_backward"}
    assert CHAINS.keys() == expected | {"activation_backward + column_sums", "dropout + column_sums"}


@pytest.mark.usefixtures("own_kernels")
def test_a_kernel_of_the_program_is_in_no_chain() -> None:
    """Neither as the first nor as a later one."""
    assert codelet("add").chains
    for op in ("add", "column_sums"):
        register(op, "cuda")(lambda *tiles, **constants: None)
    assert not codelet("add").chains
    assert codelet("column_sums").cuda not in {one for chain in codelet("activation_backward").chains for one in chain.kernels}
