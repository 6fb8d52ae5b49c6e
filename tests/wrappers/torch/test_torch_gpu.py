"""Modules of PyTorch in training on GPUs, emulated ones: the CPU's bits, any memory and number of devices, random numbers, what stays on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cuda_emulator import COMPILER
from support.emulated_cards import EmulatedCards
from support.torch_families import FAMILIES, Batch, make
from torch.nn import functional

from nntask import DoesNotFit, UsageError
from nntask.hardware import gpus
from scheduler import DeviceFailed
from scheduler.drivers.cuda_cupy import GpuFacts
from scheduler.drivers.disk import staging_nbytes
from scheduler.drivers.gpu import NoGpu
from tiles.kernels import StreamPointer, kernel
from wrappers.torch import Session
from wrappers.torch.capture.capture import CaptureTerms, capture
from wrappers.torch.capture.objectives import loss_of, objective_of
from wrappers.torch.session.hosting import GpuTerms, check_gpus
from wrappers.torch.tasks import devices
from wrappers.torch.tasks.calls import Call
from wrappers.torch.tasks.kernels import does_nothing, draws, gpu_rule_of, has_cuda_kernel, into_of
from wrappers.torch.tasks.rules import num_uniforms

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ to run the sources with")

USUAL = ("bert", "gpt_neox")
ALL = [pytest.param(name, marks=() if name in USUAL else pytest.mark.long) for name in FAMILIES]


@pytest.fixture(autouse=True)
def cards(cuda_libraries: Path, monkeypatch: pytest.MonkeyPatch) -> EmulatedCards:
    """A machine with two cards."""
    found = EmulatedCards(cuda_libraries)
    monkeypatch.setattr(gpus, "cards", found)
    return found


def train(module: torch.nn.Module, batches: Sequence[Batch], **terms: Any) -> tuple[list[float], dict[str, torch.Tensor], dict[str, Any]]:
    """Losses, weights and counters of a session with two minibatches."""
    with Session(copy.deepcopy(module), minibatches=2, **{"ram": "256MB", "lr": 1e-3, **terms}) as session:
        losses = [session.step(**batch) for batch in batches]
        return losses, session.state_dict(), session.runtime.stats()


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Whether all tensors have the same bits."""
    return left.keys() == right.keys() and all(torch.equal(value, right[name]) for name, value in left.items())


@pytest.mark.parametrize("family", [pytest.param("bert", marks=pytest.mark.long), "gpt_neox"])
def test_bits_are_the_cpus_and_memory_and_devices_change_none(family: str, tmp_path: Path) -> None:
    """With attention of products, which CPUs compute as well: the CPU's losses; in all memory, a quarter of it, on two devices, above a disk."""
    module, batches = make(family, 3)
    module.set_attn_implementation("eager")
    on_cpu = train(module, batches, optimizer="sgd", workers=1)
    losses, weights, stats = train(module, batches, optimizer="sgd", ngpu=1, gpu_memory="256MB")
    assert losses == on_cpu[0]
    assert max(float((weights[name] - value).abs().max()) for name, value in on_cpu[1].items()) <= 1e-7  # our kernels of updates round on their own
    quarter = f"{stats['peak_bytes']['cuda:0'] // 4}B"
    others: list[dict[str, Any]] = [
        {"ngpu": 1, "gpu_memory": quarter},
        {"ngpu": 2, "gpu_memory": quarter},
        {"ngpu": 1, "gpu_memory": quarter, "ram": f"{(1 << 20) + staging_nbytes(1, has_tier=True)}B", "disk": f"{tmp_path}:256MB"},
    ]
    for terms in others:
        found = train(module, batches, optimizer="sgd", **terms)
        assert found[0] == losses, terms
        assert same(found[1], weights), terms
        assert found[2]["evictions"] > 0
        assert found[2]["peak_bytes"]["cuda:0"] <= stats["peak_bytes"]["cuda:0"] // 4


@pytest.mark.parametrize("family", ALL)
def test_losses_are_the_cpus(family: str) -> None:
    """Every family, with its own attention and AdamW, within 1e-5; nothing is left to the CPU."""
    module, batches = make(family, 2)
    expected, _, _ = train(module, batches, workers=1)
    with Session(module, lr=1e-3, minibatches=2, ngpu=1, gpu_memory="256MB", ram="256MB") as session:
        assert [session.step(**batch) for batch in batches] == pytest.approx(expected, abs=1e-5)
        assert session.fallbacks == {}
        assert session.evaluate(**batches[0]) > 0


def test_buffers_that_change_stay_on_the_device() -> None:
    """A model with a normalisation over the batch needs no CPU worker, and has the CPU's losses and running statistics."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))
    batches = [{"input": torch.randn(16, 8)} for _ in range(3)]
    terms: dict[str, Any] = {"optimizer": "sgd", "loss": lambda result, batch: result.square().mean()}
    expected, state, _ = train(module, batches, workers=1, **terms)
    losses, found, _ = train(module, batches, ngpu=1, gpu_memory="16MB", **terms)
    assert losses == expected
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        torch.testing.assert_close(found[name], state[name], rtol=1e-6, atol=1e-7)
    assert int(found["1.num_batches_tracked"]) == 6


def test_float16_is_frozen_or_refused() -> None:
    """Gradients of fp16 would need a scaled loss, so learnt parameters of it are refused with a remedy; frozen ones compute what the CPU does."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)).half()
    batches = [{"input": torch.randn(16, 32).half()}] * 3
    terms: dict[str, Any] = {"loss": lambda result, batch: result.float().square().mean()}
    with pytest.raises(UsageError, match=r"0\.weight is of type torch\.float16, and GPUs update parameters .*; convert the module, freeze it"):
        train(module, batches, ngpu=1, gpu_memory="16MB", **terms)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    scale = torch.nn.Linear(8, 8)
    module = torch.nn.Sequential(module, _ToFloat(), scale)
    expected, _, _ = train(module, batches, workers=1, **terms)
    assert train(module, batches, ngpu=1, gpu_memory="16MB", **terms)[0] == pytest.approx(expected, rel=1e-3)
    assert expected[-1] < expected[0]


class _ToFloat(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float()


def test_bfloat16_trains() -> None:
    """Parameters of bf16 with gradients, moments and masters of fp32: the CPU's losses within the rounding of bf16, equal bits in less memory."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.LayerNorm(64), torch.nn.Linear(64, 8)).to(torch.bfloat16)
    batches = [{"input": torch.randn(16, 32).to(torch.bfloat16)}] * 4
    terms: dict[str, Any] = {"loss": lambda result, batch: result.float().square().mean()}
    expected, _, _ = train(module, batches, workers=1, **terms)
    losses, weights, stats = train(module, batches, ngpu=1, gpu_memory="16MB", **terms)
    assert losses == pytest.approx(expected, rel=1e-2)
    assert losses[-1] < losses[0]
    found = train(module, batches, ngpu=1, gpu_memory=f"{stats['peak_bytes']['cuda:0'] // 2}B", **terms)
    assert found[0] == losses
    assert same(found[1], weights)


class _Draws(torch.nn.Module):
    """Every random operation that GPUs have a rule for, in fp32 and bf16, in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.dropout(self.layer(x), 0.25)
        y = y + torch.rand(y.shape) + torch.rand_like(y) + torch.randn(y.shape) + torch.randn_like(y)
        y = y + torch.empty_like(y).uniform_(-1, 1) + torch.empty_like(y).normal_(2, 3) + torch.empty_like(y).bernoulli_(0.25)
        y = y + torch.bernoulli(torch.sigmoid(y).detach()) + torch.rand(y.shape, dtype=torch.bfloat16)
        return y.square().mean()


def test_random_numbers_depend_on_seed_step_and_place_alone() -> None:
    """Neither memory nor devices change a bit, the seed does, and so does the step."""
    torch.manual_seed(0)
    module, x = _Draws(), torch.randn(64, 8)
    terms = {"optimizer": "sgd", "lr": 0.0}
    losses, _, stats = train(module, [{"x": x}] * 2, ngpu=1, gpu_memory="16MB", **terms)
    assert losses[0] != losses[1]
    tight = f"{stats['peak_bytes']['cuda:0'] // 2}B"
    assert train(module, [{"x": x}] * 2, ngpu=2, gpu_memory=tight, **terms)[0] == losses
    assert train(module, [{"x": x}] * 2, ngpu=1, gpu_memory="16MB", seed=1, **terms)[0] != losses


def _drawn(function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What the rule of the one random call of a function computes from 100,000 elements' numbers of the reference  # -> (100000,)."""
    pass_ = capture(
        torch.nn.Linear(1, 1), {"x": torch.zeros(100_000, dtype=dtype)}, lambda _, batch: function(batch["x"]), CaptureTerms(backward=False)
    )
    (call,) = [each for each in pass_.calls if draws(each)]
    uniforms = np.empty(num_uniforms(call), np.float32)
    kernel("keyed_uniform", "reference")(np.array([3, 4], np.uint64), uniforms, stream=5)
    target = torch.full((100_000,), 0.5, dtype=dtype)
    results = [torch.empty(100_000, dtype=ref.dtype) for ref in call.results if ref is not None]
    rule = gpu_rule_of(call)
    assert rule is not None
    args = [target if hasattr(value, "storage") else value for value in call.args]
    rule(results if call.made else [], *args, **{**call.kwargs, "uniforms": torch.from_numpy(uniforms)})
    return results[0] if call.made else target


@pytest.mark.parametrize(
    ("function", "mean", "std"),
    [
        (torch.rand_like, 0.5, 12**-0.5),
        (torch.randn_like, 0.0, 1.0),
        (lambda x: torch.empty_like(x).uniform_(-1, 3), 1.0, 4 * 12**-0.5),
        (lambda x: torch.empty_like(x).normal_(2, 3), 2.0, 3.0),
        (lambda x: torch.empty_like(x).bernoulli_(0.25), 0.25, 0.1875**0.5),
        (torch.bernoulli, 0.5, 0.5),
        (lambda x: torch.native_dropout(x, 0.2, True)[0], 0.5, 0.25),
    ],
)
def test_random_numbers_have_their_distribution(function: Any, mean: float, std: float) -> None:
    """Mean and standard deviation of 100,000, each within five standard errors or so."""
    found = _drawn(function).double()
    assert float(found.mean()) == pytest.approx(mean, abs=5 * std / 100_000**0.5)
    assert float(found.std()) == pytest.approx(std, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_uniform_numbers_stay_below_one(dtype: torch.dtype) -> None:
    """In every type, where rounding could take them there."""
    found = _drawn(torch.rand_like, dtype)
    assert float(found.max()) < 1
    assert float(found.min()) >= 0


class _Exponential(torch.nn.Module):
    """Numbers that only CPU workers draw, between products."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return self.layer(y + torch.empty_like(y).exponential_()).square().mean()


def test_what_gpus_cannot_draw_is_left_to_the_cpu() -> None:
    """With a CPU worker: only that call's task, listed in `fallbacks`, and losses do not depend on memory. Without: refused, by name."""
    torch.manual_seed(0)
    module, batch = _Exponential(), {"x": torch.randn(4, 8)}
    with Session(copy.deepcopy(module), "sgd", ngpu=1, workers=1, gpu_memory="16MB", ram="64MB") as session:
        losses = [session.step(**batch) for _ in range(2)]
        assert session.fallbacks == {"exponential": 1}
    with Session(copy.deepcopy(module), "sgd", ngpu=2, workers=2, gpu_memory="64KiB", ram="64MB") as session:
        assert [session.step(**batch) for _ in range(2)] == losses
    with (
        Session(module, "sgd", ngpu=1, gpu_memory="16MB", ram="64MB") as session,
        pytest.raises(UsageError, match=r"tasks of exponential have no CUDA kernel, and there is no CPU worker .*; give workers=1, or use ngpu=0"),
    ):
        session.step(**batch)


def test_attention_of_the_cpu_alone_is_captured_as_products() -> None:
    """PyTorch's fused attention for CPUs is no call of a pass that GPUs compute; the setting is the program's again afterwards."""
    module, batches = make("bert", 1)
    objective = objective_of(loss_of)
    names = [
        {call.func.name() for call in capture(module, batches[0], objective, CaptureTerms(backward=True, on_gpus=on_gpus)).calls}
        for on_gpus in (True, False)
    ]
    fused = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert [fused in each for each in names] == [False, True]
    assert torch.backends.cuda.flash_sdp_enabled()


def _overloads(call: Call) -> set[str]:
    """Names of the overloads that may compute a call: its own and that with an output, if these do."""
    into = into_of(call)
    cells = getattr(into, "__closure__", None) or ()
    found = {cell.cell_contents.name() for cell in cells if isinstance(cell.cell_contents, torch._ops.OpOverload)}
    return found if into is not None else {call.func.name()}


@pytest.fixture(scope="module")
def is_on_cuda() -> Callable[[str], bool]:
    """Whether PyTorch's list of native functions, which its packages carry, names a CUDA kernel of an overload, or one for all devices."""
    pytest.importorskip("yaml")
    generator = pytest.importorskip("torchgen.gen")
    model = pytest.importorskip("torchgen.model")
    folder = Path(generator.__file__).parent / "packaged" / "ATen" / "native"
    table = generator.parse_native_yaml(str(folder / "native_functions.yaml"), str(folder / "tags.yaml"))
    functions = {f"aten::{function.func.name}": function for function in table.native_functions}
    keys = ("CUDA", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd")

    def ask(name: str) -> bool:
        function = functions[name]
        if function.structured_delegate is not None:
            return ask(f"aten::{function.structured_delegate}")
        return any(table.backend_indices[model.DispatchKey[key]].has_kernel(function) for key in keys)

    return ask


@pytest.mark.parametrize("family", ALL)
def test_calls_have_cuda_kernels_by_pytorchs_own_table(family: str, is_on_cuda: Callable[[str], bool]) -> None:
    """Everything that a task calls, in the form in which it is called; the CPU's fused attention has none."""
    assert not is_on_cuda("aten::_scaled_dot_product_flash_attention_for_cpu")
    module, batches = make(family, 1)
    calls = capture(module, batches[0], objective_of(loss_of), CaptureTerms(backward=True, on_gpus=True)).calls
    names = {name for call in calls if not does_nothing(call) and not draws(call) for name in _overloads(call)}
    assert len(names) > 5
    assert [name for name in sorted(names) if not is_on_cuda(name)] == []
    assert all(map(has_cuda_kernel, calls))


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (
            torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79 GiB of which 1.00 GiB is free. Process 7 has the rest."
            ),
            DoesNotFit,
            "GPU 0 has no memory left for PyTorch, which allocates outside the budget (CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79 "
            "GiB of which 1.00 GiB is free); lower gpu_memory=, or end other programs that use the card",
        ),
        (torch.AcceleratorError("an illegal memory access"), DeviceFailed, "GPU 0 stopped working: an illegal memory access; resume from"),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"),
            DeviceFailed,
            "GPU 0 stopped working: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED",
        ),
        (RuntimeError("sizes differ"), RuntimeError, "sizes differ"),
    ],
)
def test_what_a_card_says_is_told(error: RuntimeError, kind: type[Exception], words: str) -> None:
    """Memory that is short, a card that has stopped, and a mistake of the call."""
    found = devices._told(StreamPointer("GPU 0", 0, 1), error)
    assert type(found) is kind
    assert str(found).startswith(words)


class _Card:
    """A card as a runtime has it."""

    name, index = "GPU 0 (Real)", 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="this PyTorch has CUDA")
def test_a_card_without_cuda_in_pytorch_is_refused() -> None:
    """With the version that is installed; emulated devices need none."""
    module = torch.nn.Linear(2, 2)
    with pytest.raises(
        UsageError, match=r"GPU 0 \(Real\) was asked for, and this PyTorch \(.*\) cannot use GPUs; install one with CUDA, or use ngpu=0"
    ):
        check_gpus([_Card()], module)
    check_gpus([object()], module)


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        ({"ngpu": 3}, "got 3 and there are 2"),
        ({"ngpu": -1}, "ngpu must be at least 0, or None for all GPUs, got -1; use 0"),
        ({"ngpu": 1, "sim_gpu": 1}, "devices are real or simulated, got ngpu=1 and sim_gpu=1; drop one of them"),
        ({"ngpu": 1, "dtype": torch.float64}, "weight is of type torch.float64, and GPUs update parameters of torch.float32 and torch.bfloat16"),
    ],
)
def test_refusals(terms: dict[str, Any], words: str) -> None:
    """One sentence with the values, and the module keeps its weights."""
    module = torch.nn.Linear(2, 2).to(terms.pop("dtype", torch.float32))
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(UsageError) as error:
        Session(module, ram="64MB", **terms)
    assert words in str(error.value)
    assert same(module.state_dict(), before)


def test_a_device_that_is_too_small_is_refused_before_anything_runs() -> None:
    """With the bytes it needs and the argument that helps; with as many the step runs. One too small for a moment's zeros is refused at once."""
    module, batches = make("bert", 1)
    with pytest.raises(DoesNotFit, match=r"fill needs 16,384 B at once .*; raise gpu_memory=$"):
        Session(copy.deepcopy(module), lr=1e-3, ngpu=1, gpu_memory="4KiB", ram="64MB")
    with (
        Session(module, lr=1e-3, ngpu=1, gpu_memory="24KiB", ram="64MB") as session,
        pytest.raises(DoesNotFit, match=r"; raise gpu_memory= or use more and smaller minibatches$") as error,
    ):
        session.step(**batches[0])
    assert error.value.shortage.node == "cuda:0"
    with Session(make("bert", 1)[0], lr=1e-3, ngpu=1, gpu_memory=f"{error.value.shortage.needed}B", ram="64MB") as session:
        assert session.step(**batches[0]) > 0


def test_a_machine_without_gpus_refuses_them(cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for one, a session says why there is none; asked for all there are, it computes on the CPU."""

    def none(count: int | None) -> list[GpuFacts]:
        if count is None:
            return []
        raise NoGpu("GPUs are used through CuPy, and it is not installed")

    monkeypatch.setattr(cards, "choose", none)
    with pytest.raises(UsageError, match="it is not installed"):
        Session(torch.nn.Linear(2, 2), ngpu=1, ram="64MB")
    with Session(torch.nn.Linear(2, 2), loss=lambda result, batch: result.square().mean(), ngpu=None, ram="64MB") as session:
        assert session.step(input=torch.ones(2, 2)) > 0
        assert not session.runtime.has_gpus


def test_settings_of_pytorch_come_back() -> None:
    """Sums in a fixed order are asked for while a session with GPUs is open, and not afterwards."""
    before = (torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory)
    first, second = GpuTerms(), GpuTerms()
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    first.end()
    first.end()
    assert torch.are_deterministic_algorithms_enabled()
    second.end()
    assert (torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory) == before


def test_a_run_that_is_resumed_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """What a session on a GPU saved."""
    module, batches = make("bert", 4)
    terms: dict[str, Any] = {"lr": 1e-3, "ngpu": 1, "gpu_memory": "256MB", "ram": "256MB"}
    with Session(copy.deepcopy(module), **terms) as session:
        losses = [session.step(**batch) for batch in batches[:2]]
        session.save(tmp_path / "saved")
        losses += [session.step(**batch) for batch in batches[2:]]
    with Session(module, **terms) as session:
        session.resume(tmp_path / "saved")
        assert [session.step(**batch) for batch in batches[2:]] == losses[2:]
