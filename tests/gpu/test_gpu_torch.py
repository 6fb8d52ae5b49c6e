"""Modules of PyTorch in training on the device: the losses of PyTorch's CUDA eager, the same bits whatever the memory, memory beside the budget."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from support.torch_families import FAMILIES, make  # noqa: E402

from scheduler.drivers.cuda_cupy import find_gpus  # noqa: E402
from scheduler.drivers.gpu import NoGpu  # noqa: E402
from tiles.kernels.cuda.array import DeviceArray  # noqa: E402
from wrappers.torch import Session  # noqa: E402
from wrappers.torch.tasks import devices  # noqa: E402

USUAL = ("bert", "gpt_neox", "resnet", "mixtral", "t5")
MOST_BESIDE = 64 << 20
"""Bytes that PyTorch may keep on the card for these models: blocks of its allocator and workspaces of cuBLAS."""


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    """PyTorch can use the card that CuPy finds, and products and convolutions of fp32 are of fp32."""
    try:
        find_gpus(most=1)
    except NoGpu as error:
        pytest.skip(str(error))
    if not torch.cuda.is_available():
        pytest.skip(f"this PyTorch ({torch.__version__}) has no CUDA; install one that has")
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def on_card(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch in the card's memory."""
    return {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def train(module: Any, batches: list[dict[str, Any]], **terms: Any) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    """Losses, weights and counters of a session with two minibatches."""
    with Session(copy.deepcopy(module), minibatches=2, **{"lr": 1e-3, "ram": "1GiB", "ngpu": 1, **terms}) as session:
        losses = [session.step(**batch) for batch in batches]
        assert session.fallbacks == {}
        return losses, session.state_dict(), session.runtime.stats()


@pytest.mark.parametrize("family", [pytest.param(name, marks=() if name in USUAL else pytest.mark.long) for name in FAMILIES])
def test_losses_are_eagers_on_the_card(family: str) -> None:
    """10 steps with AdamW, within 1e-4: attention here is products and a softmax, eager's may be fused."""
    module, batches = make(family, 10)
    theirs = copy.deepcopy(module).cuda()
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-3)
    expected = []
    for batch in map(on_card, batches):
        optimizer.zero_grad()
        loss = theirs(**batch).loss
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    with Session(module, lr=1e-3, ram="1GiB", ngpu=1, gpu_memory="256MB") as session:
        found = [session.step(**batch) for batch in batches]
        assert session.fallbacks == {}
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("family", USUAL)
def test_memory_changes_no_bit(family: str, tmp_path: Path) -> None:
    """Twice with room for everything, then in a quarter of it, and with a disk below: equal losses and weights."""
    module, batches = make(family, 5)
    losses, weights, stats = train(module, batches, gpu_memory="256MB")
    quarter = f"{stats['peak_bytes']['cuda:0'] // 4}B"
    for terms in ({"gpu_memory": "256MB"}, {"gpu_memory": quarter}, {"gpu_memory": quarter, "ram": "64MB", "disk": f"{tmp_path}:256MB"}):
        found = train(module, batches, **terms)
        assert found[0] == losses, terms
        assert all(torch.equal(value, weights[name]) for name, value in found[1].items()), terms


def _squares(module: Any, batch: Any) -> Any:
    """Mean squared error."""
    return torch.nn.functional.mse_loss(module(batch["x"]), batch["y"])


def test_a_model_beyond_the_devices_memory_trains() -> None:
    """16 layers of 17 MB, 1.1 GB with gradients and moments, in 256 MB of the card: eager's losses, and PyTorch keeps little beside the budget."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(16)))
    x, y = torch.randn(64, 2048), torch.randn(64, 2048)
    theirs = copy.deepcopy(module).cuda()
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-4)
    expected = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(theirs(x.cuda()), y.cuda())
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    del theirs, optimizer, loss
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    with Session(module, lr=1e-4, ram="3GiB", ngpu=1, gpu_memory="256MB", objective=_squares) as session:
        found = [session.step(x=x, y=y) for _ in range(3)]
        stats = session.runtime.stats()
    assert found == pytest.approx(expected, rel=1e-4)
    assert stats["evictions"] > 0
    assert stats["peak_bytes"]["cuda:0"] <= 256_000_000
    assert torch.cuda.max_memory_reserved() - before <= MOST_BESIDE


def test_dropout_is_seeded_on_the_card() -> None:
    """The same bits twice and in less memory, others with another seed."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Dropout(0.3), torch.nn.Linear(256, 8))
    terms = {"loss": lambda result, batch: result.square().mean()}
    batches = [{"input": torch.randn(32, 64)}] * 3
    losses, _, stats = train(module, batches, gpu_memory="16MB", **terms)
    assert train(module, batches, gpu_memory="16MB", **terms)[0] == losses
    assert train(module, batches, gpu_memory=f"{stats['peak_bytes']['cuda:0'] // 2}B", **terms)[0] == losses
    assert train(module, batches, gpu_memory="16MB", seed=1, **terms)[0] != losses


def test_kernels_of_pytorch_run_on_our_stream_over_our_memory(open_gpus: Any) -> None:
    """Lent memory becomes a tensor of that address, without a copy, and the current stream is the worker's."""
    (gpu,) = open_gpus(1)
    stream = gpu.stream()
    gpu.enter(stream)
    address = gpu.reserve(4096)
    seen: list[Any] = []

    def compute(where: Any) -> None:
        tensor = devices.as_bytes(DeviceArray(address, (4096,), devices.DTYPES[torch.uint8]), where)
        tensor.fill_(7)
        seen.extend((tensor.data_ptr(), tensor.device.index, torch.cuda.current_stream().cuda_stream))

    devices.compute_on_gpu(compute)
    event = gpu.event()
    stream.record(event)
    event.wait()
    assert seen == [address, gpu.index, stream.number]
    gpu.release(address)


def test_gpus_have_what_the_rules_assume() -> None:
    """A PyTorch with CUDA counts an output's form only where both kinds of devices have it."""
    assert devices.KEYS == ("CPU", "CUDA")
    assert devices.has_kernel(torch.ops.aten.mm.out, *devices.KEYS)
    assert not devices.runs_on_gpu(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default)
