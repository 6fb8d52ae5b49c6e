"""Compiled chains: eager's losses within rounding, the same bits in any memory, buffers that are counted, and what is refused."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.torch_families import eager, make

from nntask import DataError, UsageError
from wrappers.torch import Session, Trainer
from wrappers.torch.capture.capture import CaptureTerms, capture
from wrappers.torch.tasks.calls import Capture, Ref, Storage
from wrappers.torch.tasks.chains import Chain, ChainCompiler
from wrappers.torch.tasks.inductor import check_compiler, compile_function
from wrappers.torch.tasks.segments import segments_of

pytest.importorskip("transformers")
try:
    check_compiler()
except UsageError:
    pytest.skip("no C++ compiler", allow_module_level=True)


def train(module: torch.nn.Module, batches: Any, **terms: Any) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Losses, weights and the peak of a session with compiled chains."""
    with Session(copy.deepcopy(module), lr=1e-3, compiled=True, **terms) as session:
        return [session.step(**batch) for batch in batches], session.state_dict(), session.runtime.stats()["peak_bytes"]["ram"]


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.long), "bert", pytest.param("vit", marks=pytest.mark.long)])
def test_losses_are_eagers_within_rounding(family: str) -> None:
    """Rotary positions and RMSNorm, GELU and layer norms, patches: 5 steps of AdamW within 1e-5, evaluation too."""
    module, batches = make(family, 5)
    theirs = copy.deepcopy(module)
    expected = eager(theirs, batches, minibatches=2, lr=1e-3)
    with Session(module, lr=1e-3, minibatches=2, ram="256MB", compiled=True) as session:
        assert [session.step(**batch) for batch in batches] == pytest.approx(expected, abs=1e-5)
        with torch.no_grad():
            assert session.evaluate(**batches[0]) == pytest.approx(theirs.eval()(**batches[0]).loss.item(), abs=1e-5)


def test_the_same_bits_in_any_memory_on_any_workers(tmp_path: Path) -> None:
    """A quarter of the memory above a disk, one worker, another session: equal losses and weights."""
    module, batches = make("bert", 3)
    losses, weights, peak = train(module, batches, minibatches=2, ram="256MB", workers=2)
    others: list[dict[str, Any]] = [{"ram": f"{peak // 4}B", "disk": f"{tmp_path}:256MB", "workers": 2}, {"ram": "256MB", "workers": 1}]
    for terms in others:
        found, same, needed = train(module, batches, minibatches=2, **terms)
        assert found == losses
        assert all(torch.equal(same[name], value) for name, value in weights.items())
        if "disk" in terms:
            assert needed <= peak // 4


def _nbytes(storages: Iterable[Storage]) -> int:
    return sum(storage.nbytes for storage in storages)


def _captured(function: Any, **inputs: torch.Tensor) -> Capture:
    return capture(torch.nn.Module(), inputs, lambda _, batch: function(**batch), CaptureTerms(backward=False))


def _scratch(captured: Capture) -> int:
    return max(segment.scratch_nbytes for segment in segments_of(captured))


def _computed(captured: Capture, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The first output of a pass that is one chain."""
    (call,) = captured.calls
    assert isinstance(call.func, Chain)
    tensors = [torch.as_strided(inputs[ref.storage.name], ref.shape, ref.strides, ref.offset) for ref in call.args]
    result = torch.empty_strided(call.results[0].shape, call.results[0].strides, dtype=call.results[0].dtype)
    call.func.into([result], *tensors)
    return result


def test_views_inside_a_chain_are_told_from_its_calls() -> None:
    """Heads, halves, transposes, expansion and single indices of what the chain itself computes."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = (x * 2).view(2, 6, 4, 8).transpose(1, 2)  # (2, 6, 32) -> (2, 4, 6, 8)
        first, second = y[..., :4], y[..., 4:]
        turned = torch.cat((-second, first), -1) + y[:, 1:2].expand(2, 4, 6, 8)
        return (turned.transpose(2, 3) + y[0, 2, 3, 5]).exp()

    x = torch.randn(2, 6, 32)
    compiler = ChainCompiler()
    found = _computed(compiler.chained(_captured(function, x=x)), {"x": x})
    assert torch.allclose(found, function(x), atol=1e-6)


def test_what_only_a_chain_uses_has_no_memory() -> None:
    """Five results of an unfused pass lie in scratch memory; in a chain only its result has any."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return ((x + 1).exp() * x).tanh().sin() - x

    captured = _captured(function, x=torch.randn(1000))
    made = {storage for call in captured.calls for storage in call.made}
    chained = ChainCompiler().chained(captured)
    assert len(made) == 6
    assert _scratch(captured) > 0
    assert _scratch(chained) == 0
    assert [call.made for call in chained.calls] == [frozenset({chained.result.storage})]


def test_buffers_of_a_chain_are_scratch() -> None:
    """Two reductions one after the other keep the first one's result, which PyTorch allocates."""
    inputs = results = [Ref(Storage(64 * 128 * 4, "temporary"), torch.float32, (64, 128), (128, 1), 0)]
    function = compile_function(lambda x: [x.softmax(-1)], inputs, results, "softmax")
    assert function.nbytes in (64 * 4, 2 * 64 * 4)  # of each row its maximum and its sum
    chained = ChainCompiler().chained(_captured(lambda x: (x * 2).softmax(-1), x=torch.randn(64, 128)))
    assert _scratch(chained) == chained.calls[0].func.compiled.nbytes >= 64 * 4
    x, found = torch.randn(64, 128), torch.empty(64, 128)
    function.run([x, found])
    assert torch.allclose(found, x.softmax(-1), atol=1e-6)


def test_equal_chains_are_compiled_once_and_touch_no_more_than_a_call() -> None:
    """Layers share functions; no chain needs more memory than the hungriest call did."""
    few, many = (_pass(num_layers) for num_layers in (2, 4))
    counts, lengths = [], []
    for captured in (few, many):
        compiler = ChainCompiler()
        chained = compiler.chained(captured)
        counts.append(len(compiler._compiled))
        limit = max(_nbytes(call.reads | call.writes) for call in captured.calls)
        chains = [call for call in chained.calls if isinstance(call.func, Chain)]
        lengths.append(len(chains))
        assert all(_nbytes(call.reads | call.writes) <= limit for call in chains)
        assert all(_nbytes(call.reads | call.writes) + call.func.compiled.nbytes <= limit * 17 / 16 for call in chains)
        assert {ref.storage for ref in captured.gradients.values()} <= {storage for call in chained.calls for storage in call.writes}
    assert counts[0] == counts[1] <= lengths[0] < lengths[1]


def _pass(num_layers: int) -> Capture:
    layers = [layer for _ in range(num_layers) for layer in (torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.LayerNorm(32))]
    module = torch.nn.Sequential(*layers)
    return capture(module, {"x": torch.randn(256, 32)}, lambda net, batch: net(batch["x"]).tanh().square().mean(), CaptureTerms(backward=True))


def test_random_calls_and_calls_in_place_stay_themselves() -> None:
    """Dropout between elementwise calls draws from the session's generators, and memory that is changed is not the chain's."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.native_dropout(x.exp() + 1, 0.5, True)[0].sin() * 2
        return y.add_(x).cos() + 1

    chained = ChainCompiler().chained(_captured(function, x=torch.randn(100)))
    assert [str(call.func) for call in chained.calls if not isinstance(call.func, Chain)] == ["aten.native_dropout.default", "aten.add_.Tensor"]
    assert len(chained.calls) == 5


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_over_a_vocabulary_needs_no_log_probabilities(reduction: str) -> None:
    """Ignored targets, the gradient and the loss are PyTorch's, with buffers of a few bytes for each row."""
    scores, target = torch.randn(8, 1000), torch.randint(0, 1000, (8,))
    target[3] = -100

    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores = torch.nn.Parameter(scores.clone())

        def forward(self, target: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.scores, target, reduction=reduction)

    module = Head()
    loss = module(target)
    loss.backward()
    captured = capture(Head(), {"target": target}, lambda net, batch: net(batch["target"]), CaptureTerms(backward=True))
    (call,) = ChainCompiler().chained(captured).calls
    assert isinstance(call.func, Chain)
    assert call.func.compiled.nbytes <= 8 * 8 * 4
    tensors = [scores if ref.storage.role == "parameter" else target for ref in call.args]
    results = {ref.storage: torch.empty(ref.shape, dtype=ref.dtype) for ref in call.results if ref is not None}
    call.func.into(list(results.values()), *tensors)
    assert torch.allclose(results[captured.result.storage], loss, atol=1e-5)
    assert torch.allclose(results[captured.gradients["scores", 0].storage], module.scores.grad, atol=1e-6)


@pytest.mark.long
def test_a_session_is_resumed_with_the_same_choice(tmp_path: Path) -> None:
    """The choice is in session.json; the other one is refused, and nothing is changed; the same one goes on with the same bits."""
    torch.manual_seed(0)
    module, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.LayerNorm(8)), torch.randn(16, 8)
    terms: dict[str, Any] = {"lr": 1e-2, "ram": "16MB", "loss": lambda result, batch: result.tanh().square().mean()}
    with Session(copy.deepcopy(module), compiled=True, **terms) as session:
        session.step(input=x)
        session.save(tmp_path / "run")
        after = session.step(input=x)
    with Session(copy.deepcopy(module), **terms) as session:
        with pytest.raises(DataError, match=r"compiled must be what it was .*, True, got False: bits depend on it"):
            session.resume(tmp_path / "run")
        assert session.num_steps == 0
        session.save(tmp_path / "other")
    with Session(copy.deepcopy(module), compiled=True, **terms) as session:
        with pytest.raises(DataError, match=r"compiled must be what it was .*, False, got True"):
            session.resume(tmp_path / "other")
        session.resume(tmp_path / "run")
        assert session.step(input=x) == after


@pytest.mark.long
def test_the_trainer_takes_the_choice(tmp_path: Path) -> None:
    """A checkpoint of a trainer with compiled chains says so, and is refused by one without."""
    hf = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    module, batches = make("bert", 2)
    texts = [{name: value[0] for name, value in batch.items()} for batch in batches]
    terms = {"per_device_train_batch_size": 2, "report_to": [], "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False}

    def trainer(steps: int, *, compiled: bool) -> Trainer:
        arguments = hf.TrainingArguments(str(tmp_path), max_steps=steps, save_strategy="steps", save_steps=1, **terms)
        return Trainer(copy.deepcopy(module), arguments, train_dataset=texts, ram="64MB", compiled=compiled)

    first = trainer(1, compiled=True)
    first.train()
    first.close()
    assert json.loads((tmp_path / "checkpoint-1" / "session.json").read_text())["numerics"]["compiled"] is True
    second = trainer(2, compiled=False)
    with pytest.raises(DataError, match=r"compiled must be what it was .*, True, got False"):
        second.train(resume_from_checkpoint=True)
    second.close()


_WITHOUT = """
import torch
from nntask import DataError, UsageError
from wrappers.torch import Session
module = torch.nn.Linear(4, 4)
try:
    Session(module, lr=1e-3, ram="16MB", compiled=True)
except UsageError as error:
    print(error)
print(bool(torch.isfinite(module.weight).all()))
"""


@pytest.mark.parametrize("environment", [{"PATH": "/nonexistent"}, pytest.param({"CXX": "/nonexistent/c++"}, marks=pytest.mark.long)])
def test_without_a_compiler_the_choice_is_refused(environment: Mapping[str, str]) -> None:
    """One sentence at construction, and the module keeps its weights."""
    found = subprocess.run([sys.executable, "-c", _WITHOUT], env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == [
        "compiled=True needs a C++ compiler, and none was found; install g++ or clang++, name one by the environment variable CXX, or leave out "
        "compiled=True",
        "True",
    ]


def test_a_compiler_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain that cannot be compiled is refused with its operations."""
    from torch._inductor import config

    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\n[ \"$1\" = --version ] && echo 'g++ 0' && exit 0\necho no headers >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    spec = [Ref(Storage(77 * 4, "temporary"), torch.float32, (77,), (1,), 0)]
    with config.patch({"cpp.cxx": (str(broken),)}), pytest.raises(UsageError, match=r"sin cos cannot be compiled \(.*\); leave out compiled=True"):
        compile_function(lambda x: [x.sin().cos()], spec, spec, "sin cos")
