"""Attention by cuDNN on GPUs, over a strict stand-in of its frontend: our reference's numbers, what is left to our kernels, graphs, and refusals."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import strict_cudnn
from support.cuda_emulator import COMPILER
from support.fake_cuda import FakeCuda
from support.gpu_bench import KernelBench
from support.gpu_training import on_gpus
from support.kernel_cases import Maker
from support.strict_cuda import installed, opened
from support.strict_cudnn import StrictCudnn

from scheduler import InlineRuntime, TaskRuntime
from tiles import TileTensor
from tiles.kernels.catalog import kernel
from tiles.kernels.cpu.attention_blocks import whole_scratch_nbytes
from tiles.kernels.cuda import library_attention
from tiles.kernels.cuda.device import SPARE_NBYTES
from tiles.kernels.reference.attention import Pair
from tiles.kernels.registry import BF16
from tiles.ops import attention

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ to run the sources with")
T, SIZE = 9, 8
CLOSE = {"rtol": 2e-2, "atol": 2e-2}
"""Of bf16 results whose factors were rounded in between."""


@pytest.fixture
def cuda(cuda_libraries: Path, tmp_path: Path) -> Iterator[FakeCuda]:
    """A card behind strict libraries."""
    with installed(cuda_libraries, tmp_path / "code") as found:
        yield found


@pytest.fixture
def cudnn(cuda: FakeCuda) -> Iterator[StrictCudnn]:
    """And cuDNN on it."""
    with strict_cudnn.installed(cuda) as found:
        yield found


def tiles_of(causal: bool, group: int, dtype: Any = BF16) -> tuple[list[np.ndarray], list[np.ndarray], Pair]:
    """Arguments of the forward and the backward kernel, whose o and lse are those of the reference."""
    make, tk, h = Maker(np.float32), T if causal else T + 2, 2 * group
    q, k, v, do = make(2, T, h * SIZE), make(2, tk, 2 * SIZE), make(2, tk, 2 * SIZE), make(2, T, h * SIZE)
    q, k, v, do = (x.astype(dtype) for x in (q, k, v, do))
    o, lse = np.zeros(q.shape), np.zeros((2, h, T))
    at, room = Pair(SIZE, SIZE**-0.5, causal, 0, 0, 0, 0, h, T, num_keys=tk), np.empty(whole_scratch_nbytes(2 * h * T, T, tk, 4), np.uint8)
    kernel("whole_attention", "reference")(*(x.astype(np.float64) for x in (q, k, v)), o, lse, room, at=at)
    left = [q, k, v, o.astype(dtype), lse.astype(np.float32)]
    return [*left, room], [*left, do, *(np.full_like(x, np.nan) for x in (q, k, v)), room], at


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_cudnn_has_the_numbers_of_the_reference(causal: bool, group: int, cuda: FakeCuda, cudnn: StrictCudnn) -> None:
    """Forward and backward, with shared heads of keys; nothing is refused, and none of our kernels starts."""
    (gpu,) = opened(cuda)
    told: list[str] = []
    gpu.open_attention(told.append)
    bench = KernelBench(gpu)
    before, (forward, backward, at) = cuda.num_launches, tiles_of(causal, group)
    bench.check("whole_attention", forward, {"at": at}, **CLOSE)
    bench.check("whole_attention_backward", backward, {"at": at}, **CLOSE)
    assert (cudnn.num_planned, cudnn.num_started, told) == (2, 2, [])
    assert cuda.num_launches == before
    gpu.close()
    assert cuda.found == []


def refuse(queries: Sequence[int]) -> bool:
    """What cuDNN says of graphs that its descriptors cannot express."""
    raise RuntimeError("CUDNN_STATUS_BAD_PARAM\nno such descriptor")


@pytest.mark.parametrize("why", ["not opened", "fp32", "declined", "workspace", "descriptor"])
def test_what_cudnn_does_not_take_is_ours(why: str, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both passes of it: cuDNN starts nothing at all then; a shape that it was asked about is told once, with the reason."""
    told: list[str] = []
    if why == "workspace":
        monkeypatch.setattr(library_attention, "ATTENTION_WORKSPACE_NBYTES", 64)
    with strict_cudnn.installed(cuda, declines=refuse if why == "descriptor" else lambda queries: why == "declined") as cudnn:
        (gpu,) = opened(cuda)
        if why != "not opened":
            gpu.open_attention(told.append)
        bench, (forward, backward, at) = KernelBench(gpu), tiles_of(True, 1, np.float32 if why == "fp32" else BF16)
        bench.check("whole_attention", forward, {"at": at}, **CLOSE)
        bench.check("whole_attention_backward", backward, {"at": at}, **CLOSE)
        assert cudnn.num_started == 0
        assert cuda.found == []
        words = {
            "declined": "no plan of the forward pass, with at most 320 MiB of workspace (no engine supports this graph)",
            "descriptor": "no plan of the forward pass, with at most 320 MiB of workspace (CUDNN_STATUS_BAD_PARAM no such descriptor)",
            "workspace": "no plan of the backward pass, with at most 0 MiB of workspace (every plan wants more workspace)",
        }
        shape = "2 x 9 tokens, 2 heads of 8, causal"
        assert told == ([f"cuDNN leaves attention of {shape} to nntask's kernels: {words[why]}"] if why in words else [])


def test_plans_that_find_no_memory_get_what_is_held_back(cuda: FakeCuda) -> None:
    """The shape is cuDNN's then, as in a run with more memory: the choice does not depend on how much is free at the moment."""
    asked = iter(["CUDNN_STATUS_ALLOC_FAILED"])

    def short(queries: Sequence[int]) -> bool:
        for words in asked:
            raise RuntimeError(words)
        return False

    told: list[str] = []
    with strict_cudnn.installed(cuda, declines=short) as cudnn:
        (gpu,) = opened(cuda)
        gpu.open_attention(told.append)
        before, (forward, _, at) = cuda.memGetInfo()[0], tiles_of(True, 1)
        KernelBench(gpu).check("whole_attention", forward, {"at": at}, **CLOSE)
        assert cuda.memGetInfo()[0] - before == SPARE_NBYTES
        assert (cudnn.num_started, told) == (1, [])
    assert cuda.found == []


def test_a_missing_package_is_one_sentence(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which says what to install."""
    (gpu,) = opened(cuda)
    monkeypatch.setitem(sys.modules, "cudnn", None)
    library_attention.frontend.cache_clear()
    before = cuda.memGetInfo()
    with pytest.raises(ImportError, match=r"nvidia-cudnn-frontend, and it cannot be imported .*; pip install -e '\.\[cudnn13\]'"):
        gpu.open_attention()
    assert cuda.memGetInfo() == before  # the workspace is given back


def test_nothing_is_planned_while_a_graph_is_recorded(cuda: FakeCuda, cudnn: StrictCudnn) -> None:
    """A shape that is met there first is refused before cuDNN is called; one that was met before is recorded."""
    (gpu,) = opened(cuda)
    gpu.open_attention()
    bench, (forward, _, at) = KernelBench(gpu), tiles_of(True, 1)
    arrays = [bench.device.reserve(max(16, x.nbytes)) for x in forward]

    def start() -> None:
        views = [library_attention.DeviceArray(address, x.shape, x.dtype) for address, x in zip(arrays, forward, strict=True)]
        kernel("whole_attention", "cuda")(*views, at=at)

    aside = gpu.stream()
    gpu.enter(aside)
    with pytest.raises(RuntimeError, match="attention is planned before a graph is recorded"):
        gpu.capture(aside, start)
    assert cudnn.num_planned == 0
    start()
    aside.start(gpu.capture(aside, start))
    assert (cudnn.num_planned, cudnn.num_started) == (2, 2)
    assert cuda.found == []


def passes(runtime: TaskRuntime, library: bool, replays: int = 8) -> list[list[np.ndarray]]:
    """o and gradients of a recorded forward and backward pass at each replay."""
    with runtime:
        rng = np.random.default_rng(0)
        q, k, v, do = (TileTensor(runtime, (4, T, 4 * SIZE), (2, T, 2 * SIZE), BF16, name=name) for name in ("q", "k", "v", "do"))
        with runtime.record() as step:  # type: ignore[attr-defined]
            how = {"head_size": SIZE, "scale": SIZE**-0.5, "library": library}
            o, lse = attention.attention(q, k, v, **how)
            outputs = [o, *attention.attention_backward(q, k, v, o, lse, do, **how)]
        found = []
        for _ in range(replays):
            for x in (q, k, v, do):
                x.write(rng.standard_normal(x.shape).astype(BF16))
            ticket = step.replay()
            found.append([ticket.read(x).astype(np.float32) for x in outputs])
        return found


@pytest.mark.parametrize("budget", [1 << 26, 3 << 14])
def test_replays_have_the_numbers_of_our_kernels(budget: int, cuda: FakeCuda, cudnn: StrictCudnn) -> None:
    """In memory, where the kernels are recorded as a graph, and where tiles move; the bits are the same in both."""
    (gpu,) = opened(cuda, dtype="bf16")
    gpu.open_attention()
    found = passes(on_gpus([gpu], budget, 1 << 27), True)
    assert cudnn.num_planned == 2
    assert cudnn.num_started >= 8
    assert cuda.found == []
    assert cuda.num_graphs > 0 or budget < 1 << 26
    (again,) = opened(cuda, dtype="bf16")
    again.open_attention()
    want = passes(on_gpus([again], 1 << 25, 1 << 27), True)
    ours = passes(on_gpus([opened(cuda, dtype="bf16")[0]], 1 << 26, 1 << 27), False)
    for mine, same, other in zip(found, want, ours, strict=True):
        for x, y, z in zip(mine, same, other, strict=True):
            np.testing.assert_array_equal(x, y)
            np.testing.assert_allclose(x, z, rtol=3e-2, atol=3e-2)


def test_only_whole_plain_sequences_ask_for_a_library(cuda: FakeCuda) -> None:
    """Otherwise, and without GPUs, tasks are those of a program that does not ask."""

    def names(runtime: TaskRuntime, dtype: Any = BF16, cut: int = T, **more: Any) -> set[str]:
        q, k, v = (TileTensor(runtime, (2, T, 2 * SIZE), (2, cut, 2 * SIZE), dtype, name=name) for name in "qkv")
        with runtime.record() as step:  # type: ignore[attr-defined]
            kept = attention.attention(q, k, v, **{"head_size": SIZE, "scale": 1.0, "library": True} | more)
        del kept
        return {task.name for task in step.plan.tasks}

    with on_gpus(opened(cuda), 1 << 26, 1 << 27, graphs=False) as runtime:
        assert names(runtime) == {"whole_attention"}
        assert names(runtime, causal=False) == {"whole_attention"}
        assert names(runtime, np.float32) == names(runtime, cut=4) == names(runtime, scoring=attention.Scoring(window=3)) == {"attention"}
        assert names(runtime, head_size=SIZE // 2) == {"attention"}
        key = TileTensor(runtime, (2,), (2,), np.uint64, name="key")
        assert names(runtime, dropout=attention.Dropout(0.1, key, 0)) == {"attention"}
    assert not InlineRuntime().has_gpus


class Planned:
    """A forward graph on the stand-in, and memory for its tensors."""

    def __init__(self, gpu: Any, cudnn: StrictCudnn, **terms: Any) -> None:
        kinds, handle = cudnn.data_type, cudnn.create_handle()
        self.graph, self.handle, self.stream = cudnn.pygraph(**self.kinds(kinds), handle=handle), handle, gpu.stream()
        cudnn.set_stream(handle=handle, stream=self.stream.number)
        self.tensors = [
            self.graph.tensor(name=name, dim=[1, 1, T, SIZE], stride=[T * SIZE, SIZE, SIZE, 1], data_type=kinds.BFLOAT16) for name in "qkv"
        ]
        q, k, v = self.tensors
        o, stats = self.graph.sdpa(q=q, k=k, v=v, **{"attn_scale": 1.0, "generate_stats": True, "name": "x"} | terms)
        self.tensors.append(o.set_output(True).set_dim([1, 1, T, SIZE]).set_stride([T * SIZE, SIZE, SIZE, 1]))
        self.tensors.append(stats.set_output(True).set_dim([1, 1, T, 1]).set_stride([T, 1, 1, 1]).set_data_type(kinds.FLOAT))
        for call in (self.graph.validate, self.graph.build_operation_graph, self.graph.check_support, self.graph.build_plans):
            if call == self.graph.check_support:
                self.graph.create_execution_plans([cudnn.heur_mode.A])
            call()
        self.pack = {tensor: gpu.reserve(256) for tensor in self.tensors}

    @staticmethod
    def kinds(kinds: Any) -> dict[str, Any]:
        """Types of a graph."""
        return {"io_data_type": kinds.BFLOAT16, "intermediate_data_type": kinds.FLOAT, "compute_data_type": kinds.FLOAT}


def _unaligned(made: Planned) -> None:
    made.pack[made.tensors[0]] += 2


def _beyond(made: Planned) -> None:
    made.pack[made.tensors[0]] += 224


def _missing(made: Planned) -> None:
    del made.pack[made.tensors[4]]


def _stale(made: Planned) -> None:
    made.handle += 1


@pytest.mark.parametrize(
    ("fault", "words"), [(_unaligned, "units of 16"), (_beyond, "beyond the 256"), (_missing, "has an address"), (_stale, "handle")]
)
def test_the_stand_in_refuses_what_cudnn_leaves_undefined(fault: Any, words: str, cuda: FakeCuda, cudnn: StrictCudnn) -> None:
    """Addresses that are not aligned, tensors that reach beyond their memory or are missing, a handle that is none."""
    (gpu,) = opened(cuda)
    made = Planned(gpu, cudnn)
    made.graph.execute(made.pack, 0, handle=made.handle)
    fault(made)
    with pytest.raises(RuntimeError, match=words):
        made.graph.execute(made.pack, 0, handle=made.handle)


@pytest.mark.parametrize("terms", [{"attn_scale": 1}, {"generate_stats": False}, {"diagonal_band_right_bound": 1}])
def test_the_stand_in_refuses_other_attention(terms: dict[str, Any], cuda: FakeCuda, cudnn: StrictCudnn) -> None:
    """A scale that is no float, no statistics, a band that is no causal mask."""
    with pytest.raises(RuntimeError):
        Planned(opened(cuda)[0], cudnn, **terms)
