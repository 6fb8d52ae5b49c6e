"""Quantised models on CUDA workers, the GPU emulated on the CPU: losses of adapters and texts are those of the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.cuda_emulator import COMPILER, Emulator
from support.gguf_files import write_gguf
from support.gguf_oracle import big
from support.gpu_training import on_gpus
from support.quantised_directories import wide, write_plain, write_quantised
from support.transformers_oracle import hf_model

from nntask.adapters.frozen_base import FrozenBase
from nntask.adapters.lora import LoRA, add_adapters
from nntask.inference.generator import Generator
from nntask.inference.pretrained import ModelSource
from nntask.inference.sampling import Sampling
from nntask.models.registry import build
from nntask.optim.optimizers import AdamW
from nntask.tiling.model_tiling import ModelTiling
from scheduler import Runtime

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ to run the sources with")
TILING = ModelTiling(minibatch_tile=1, seq_tile=7, embd_tile=32, inner_tile=64, head_tile=2, vocab_tile=40)


@pytest.fixture(scope="module", params=["gpt2", pytest.param("llama", marks=pytest.mark.long)])
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantised directory."""
    folder = tmp_path_factory.mktemp("quantised")
    write_quantised(write_plain(folder / "plain", wide(request.param)), folder / "small", "q4_0")
    return folder / "small"


@pytest.fixture(scope="module")
def gpu(cuda_libraries: Path) -> Emulator:
    """A device."""
    return Emulator(cuda_libraries)


def losses(path: Path, runtime: Runtime) -> list[float]:
    """Three steps of adapters; closes the runtime."""
    with runtime:
        model = build(ModelSource.open(path).config, TILING, runtime, seed=None)
        add_adapters(model, LoRA(3, 6.0), seed=1)
        FrozenBase("directory", str(path)).attach(model)
        optimizer = AdamW(model.parameters(), lr=1e-2, max_norm=1.0)
        tokens, targets = model.input_tensors(2)
        with runtime.record() as step:
            loss = model(tokens, targets)
            loss.backward()
            optimizer.step()
        ids, found = np.random.default_rng(0).integers(0, 61, (2, model.config.n_positions + 1)).astype(np.int32), []
        for number in range(1, 4):
            tokens.write(ids[:, :-1])
            targets.write(ids[:, 1:])
            optimizer.prepare(number)
            found.append(float(step.replay().read(loss.data)[0]))
        return found


def test_losses_are_those_of_the_cpu(small: Path, gpu: Emulator) -> None:
    """Within rounding, with memory for a part of the step as well."""
    want = losses(small, Runtime(1, ram=1 << 27))
    found = losses(small, on_gpus([gpu], 1 << 26, 1 << 27))
    np.testing.assert_allclose(found, want, rtol=1e-4)
    assert want[-1] < want[0]
    assert losses(small, on_gpus([gpu], 1 << 19, 1 << 27)) == found


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_texts(small: Path, gpu: Emulator, dtype: str) -> None:
    """Greedy texts; of bf16 that they come to their ends."""
    found = []
    for runtime in (Runtime(1, ram=1 << 27), on_gpus([gpu], 1 << 26, 1 << 27)):
        with runtime:
            model = ModelSource.open(small).build(runtime, TILING, dtype)
            found.append(list(Generator(model, runtime, 13).stream([[1, 2, 3], [4, 5, 6, 7, 8, 9]], 5, Sampling(temperature=0))))
    assert len(found[0]) == len(found[1]) == 5
    assert dtype == "bf16" or found[0] == found[1]


def test_texts_of_a_file_of_several_types(tmp_path: Path, gpu: Emulator) -> None:
    """Greedy texts of a GGUF file of K types and others are those of the CPU; its 16-bit matrix is held as floats."""
    mixed = {"ffn_down": "Q6_K", "attn_v": "Q5_0", "attn_k": "IQ4_XS", "attn_q": "Q3_K", "token_embd": "Q2_K", "ffn_up": "Q5_1", "ffn_gate": "F16"}
    path = write_gguf(tmp_path / "model.gguf", hf_model(replace(big("llama"), num_hidden_layers=1)), random="Q4_K", mixed=mixed)
    found = []
    for runtime in (Runtime(1, ram=1 << 27), on_gpus([gpu], 1 << 26, 1 << 27)):
        with runtime:
            model = ModelSource.open(path).build(runtime, ModelTiling())
            found.append(list(Generator(model, runtime, 13).stream([[1, 2, 3]], 4, Sampling(temperature=0))))
    assert found[0] == found[1]
