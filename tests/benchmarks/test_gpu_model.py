"""The model of a step's time on a GPU: launches, their bytes and machine code, and that the committed figures are those of the sources."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support.nvrtc import library, machine_code

from tiles.kernels import BF16, kernel
from tiles.kernels.cuda.array import DeviceArray

GPU = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    for folder in (GPU.parent, GPU):
        monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module("model")


def launches_of(model: ModuleType, name: str, *arrays: DeviceArray, **constants: Any) -> list[Any]:
    """The launches of an operation's kernel."""
    gpu = model.RecordingGpu(1 << 40)
    gpu.enter(gpu.stream())
    with model.recording(gpu) as launches:
        kernel(name, "cuda")(*arrays, **constants)
    return launches


def array(*shape: int, dtype: Any = BF16) -> DeviceArray:
    """An array of the shape, at an address that 16 bytes divide."""
    return DeviceArray(1 << 44, shape, np.dtype(dtype))


def test_committed_figures_are_those_of_the_sources(model: ModuleType) -> None:
    """`model.json` has the launches and bytes of a step of GPT-2 small as they are, and its instructions are of the sources as they are."""
    committed = json.loads(model.RESULTS.read_text())
    assert committed["sources"] == model.digest_of_sources(), "run python benchmarks/gpu/model.py, then benchmarks/gpu/bench.py --table"
    launches = model.step_launches("gpt2", 16)
    kernels = committed["steps"]["GPT-2 small, 16 x 1,024"]["kernels"]
    assert Counter(launch.kernel for launch in launches) == {name: row["launches"] for name, row in kernels.items()}
    nbytes: Counter[str] = Counter()
    for launch in launches:
        nbytes[launch.kernel] += launch.nbytes
    assert nbytes == {name: row["nbytes"] for name, row in kernels.items()}


@pytest.mark.parametrize(
    ("name", "arrays", "constants", "nbytes"),
    [
        ("add", [array(64, 32)] * 3, {}, 3 * 64 * 32 * 2),
        ("activation_backward", [array(64, 32)] * 3, {"kind": "gelu_new"}, 3 * 64 * 32 * 2),
        ("sum_squares", [array(1 << 16, dtype=np.float32), array(1, dtype=np.float64)], {}, 4 << 16),
        (
            "embedding",
            [array(8, dtype=np.int32), array(1000, 32), array(8, 32)],
            {"v_start": 0, "vocab": 1000, "accumulate": False},
            8 * 4 + 2 * 8 * 32 * 2,
        ),
    ],
)
def test_bytes_are_those_that_a_kernel_must_move(model: ModuleType, name: str, arrays: list[DeviceArray], constants: Any, nbytes: int) -> None:
    """Each array once, an updated one twice, and of a table the rows that are read."""
    launch = launches_of(model, name, *arrays, **constants)[0]
    assert nbytes <= launch.nbytes <= nbytes + 8 * launch.blocks + 4  # partial sums, and a counter of blocks


def test_products_have_their_operations(model: ModuleType) -> None:
    """Two for each pair of factors, and a result that is added to is also read."""
    (plain,) = launches_of(model, "matmul", array(4, 8), array(8, 16), array(4, 16), trans_a=False, trans_b=False, alpha=1.0, accumulate=False)
    (onto,) = launches_of(model, "matmul", array(4, 8), array(8, 16), array(4, 16), trans_a=False, trans_b=False, alpha=1.0, accumulate=True)
    assert plain.flops == onto.flops == 2 * 4 * 8 * 16
    assert (plain.nbytes, onto.nbytes) == (2 * (4 * 8 + 8 * 16 + 4 * 16), 2 * (4 * 8 + 8 * 16 + 2 * 4 * 16))


@pytest.mark.skipif(library() is None, reason="NVRTC's wheel is not installed")
def test_machine_code_is_counted_along_the_widest_path(model: ModuleType) -> None:
    """A warp adds 8 numbers of each of two arrays per iteration, with two loads and a store of 16 bytes; committed instructions are counted so."""
    path = model.path_of(machine_code("elementwise", "bf16", 90)["add"])
    assert max(loop.nbytes for loop in path.loops) == 48
    assert 0 < path.straight < path.static
    (rows, *_) = model.path_of(machine_code("norm", "bf16", 90)["norm_backward"]).loops
    assert [loop.nbytes for loop in rows.inner] == [5 * 16, 7 * 16]  # of each row, x, gamma and three slopes; then a residual and dx too
    tiles = [array(16384, 768), array(768, 3072), array(3072), array(16384, 3072), array(16384, 3072)]
    _, launch = launches_of(model, "linear_activation", *tiles, kind="gelu_new", trans_b=False, accumulate=False)
    row = json.loads(model.RESULTS.read_text())["steps"]["GPT-2 small, 16 x 1,024"]["kernels"]["activation"]
    assert model.num_instructions(launch) == pytest.approx(row["instructions"] / row["launches"])


def test_a_time_is_the_longest_of_three(model: ModuleType) -> None:
    """Memory, tensor cores or instructions bound a launch; a launch that does nothing takes the time between launches."""
    card = model.CARDS["H100"]
    launch = model.Launch("add", "elementwise", 1, 256, int(card.memory), 0.0)
    assert model.time_of(launch, card, 0.0) == (1.0, "memory", 1.0 + card.launch)
    assert model.time_of(launch, card, 2 * card.instructions).bound == "instructions"
    assert model.time_of(launch._replace(flops=3 * card.tensor), card, 0.0)[:2] == (3.0, "tensor cores")
    assert model.time_of(launch._replace(nbytes=0), card, 0.0).expected == card.launch
