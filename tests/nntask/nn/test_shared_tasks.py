"""Products that share tasks on GPUs, of weights of one shape and before GELU: which ones, and gradients of a CPU run within rounding."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cuda_emulator import COMPILER, Emulator

from nntask import GPT2, GPT2Config, Llama, LlamaConfig, ModelTiling
from scheduler import Runtime
from scheduler.api.capturing_runtime import CapturingRuntime
from tiles.kernels.registry import BF16

GPT2_CONFIG = GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2).with_dropout(0.0)
GROUPED = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=8
)

ROLES = (["k", "weight"], ["k_proj", "weight"])


def names(model: Any, runtime: CapturingRuntime) -> Counter[str]:
    """The tasks of a pass forward and backward, by name."""
    tokens, targets = model.input_tensors(2)
    with runtime.record():
        model.train()
        model(tokens, targets).backward()
    return Counter(task.name for task in runtime.plan.tasks)


@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["fp32", "bf16"])
def test_what_shares_tasks(dtype: Any) -> None:
    """On GPUs q, k and v share one, of grouped queries k and v, and GELU is part of a product in bf16; on CPUs every product has its task."""
    gpu, cpu = CapturingRuntime(has_gpus=True), CapturingRuntime()
    found, single = (names(GPT2(GPT2_CONFIG, ModelTiling(), runtime, dtype=dtype), runtime) for runtime in (gpu, cpu))
    assert found["matmuls"] == 1
    assert found["linear_activation_backward"] == (dtype == BF16)
    assert not {"matmuls", "linear_activation_backward"} & single.keys()
    assert single["matmul"] - found["matmul"] == 3 + (dtype == BF16)
    assert single["add"] - found["add"] == 2
    gpu = CapturingRuntime(has_gpus=True)
    grouped = names(Llama(GROUPED, ModelTiling(), gpu, dtype=dtype), gpu)
    assert grouped["matmuls"] == 1


def test_frozen_weights_have_no_gradients() -> None:
    """Only those that are learnt take part in the shared task; without any there is none."""
    for frozen, count in ((("q",), 1), (("q", "v"), 0), (("q", "k", "v"), 0)):
        runtime = CapturingRuntime(has_gpus=True)
        model = GPT2(GPT2_CONFIG, ModelTiling(), runtime)
        for name, parameter in model.named_parameters().items():
            if name.split(".")[-2] in frozen:
                parameter.freeze()
        assert names(model, runtime)["matmuls"] == count


@pytest.mark.skipif(COMPILER is None, reason="no g++ to run the sources with")
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_gradients_are_those_of_the_cpu(family: str, cuda_libraries: Path) -> None:
    """In fp32 within rounding, where tiles are cut along all axes; a second pass adds to them, and so it does if one of three begins anew."""
    tiling = ModelTiling(minibatch_tile=1, seq_tile=4, embd_tile=8, inner_tile=8, head_tile=2)
    found = []
    for runtime in (Runtime(1, ram=1 << 26), Runtime(0, gpus=[Emulator(cuda_libraries)], gpu_memory=1 << 26, ram=1 << 26)):
        with runtime:
            model: Any = GPT2(GPT2_CONFIG, tiling, runtime, seed=3) if family == "gpt2" else Llama(GROUPED, tiling, runtime, seed=3)
            model.train()
            tokens, targets = model.input_tensors(2)
            for tensor in (tokens, targets):
                tensor.write(np.random.default_rng(0).integers(0, 32, (2, 8)).astype(np.int32))
            parameters = model.named_parameters()
            for turn in range(3):
                if turn == 2:
                    next(parameter for name, parameter in parameters.items() if name.split(".")[-2:] in ROLES).edge.gradient = None
                model(tokens, targets).backward()
            found.append({name: parameter.gradient.read() for name, parameter in parameters.items()})
    for name, want in found[0].items():
        np.testing.assert_allclose(found[1][name], want, rtol=1e-3, atol=1e-5, err_msg=name)
