"""Launches of kernels in a step of GPT-2 on a GPU that computes nothing: enough blocks for all multiprocessors."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nntask import GPT2, PRESETS, AdamW, ModelTiling
from scheduler import Runtime
from tiles.kernels import BF16, HollowGpu
from tiles.kernels.cuda.array import DeviceArray
from tiles.kernels.cuda.launch import KernelSource

LARGE = 8 << 20
ENOUGH = 264
"""Two blocks for each multiprocessor of an H100."""
GIB = 1 << 30
OF_PARTS = ("norm_sums",)
"""Kernels that read only the partial sums of large arrays."""


def test_launches_over_large_arrays_fill_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that reads or writes an array of 8 MiB has at least 264 blocks, in both passes and the update."""
    started, start = [], KernelSource.start

    def noted(source: KernelSource, kernel: str, element: np.dtype[Any], *arguments: Any, grid: tuple[int, int, int], **more: Any) -> None:
        arrays = [argument.nbytes for argument in arguments if isinstance(argument, DeviceArray)]
        tables = [argument for argument in arguments if isinstance(argument, np.void) and "counts" in (argument.dtype.names or ())]
        started.append((kernel, prod(grid), max([0, *arrays, *(int(table["counts"].max()) * element.itemsize for table in tables)])))
        start(source, kernel, element, *arguments, grid=grid, **more)

    monkeypatch.setattr(KernelSource, "start", noted)
    config = replace(PRESETS["gpt2"], n_layer=1, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    with Runtime(0, gpus=[HollowGpu(80 * GIB)], gpu_memory=70 * GIB, ram=GIB, disk=(str(tmp_path), 1 << 42)) as runtime:
        model = GPT2(config, ModelTiling().resolve(config, 16, 1024), runtime, seed=1, dtype=BF16)
        optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, max_norm=1.0)
        tokens, targets = model.input_tensors(16)
        model.train()
        with runtime.record() as step:
            model(tokens, targets).backward()
            optimizer.step()
        for tensor in (tokens, targets):
            tensor.write(np.zeros((16, 1024), np.int32))
        step.replay().wait()
    names = {kernel for kernel, _, nbytes in started if nbytes >= LARGE}
    assert {"norm_backward", "logits_and_gradients", "column_sums", "adam", "squares", "flash_64_plain", "flash_dkv_64_plain", "normalise"} <= names
    assert {(kernel, blocks) for kernel, blocks, nbytes in started if nbytes >= LARGE and blocks < ENOUGH and kernel not in OF_PARTS} == set()
