"""Our GPU code over libraries that refuse what CUDA, cuBLAS and ctypes refuse (`support.strict_cuda`): training passes, and faults are told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cuda_emulator import COMPILER, Emulator
from support.gpu_training import on_gpus
from support.strict_cuda import STRICT_TRAINING, TIGHT, installed, opened

from scheduler.testing import FakeCuda
from tiles.kernels.registry import BF16

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ to run the sources with")


@pytest.fixture
def cuda(cuda_libraries: Path, tmp_path: Path) -> Iterator[FakeCuda]:
    """Two cards behind strict libraries."""
    with installed(cuda_libraries, tmp_path / "code", num_devices=2) as found:
        yield found


@pytest.mark.parametrize(("dtype", "budget", "count"), [(np.float32, 1 << 26, 1), (BF16, 1 << 26, 1), (np.float32, TIGHT, 2)])
def test_training_is_refused_nothing(dtype: Any, budget: int, count: int, cuda: FakeCuda, cuda_libraries: Path) -> None:
    """In memory with graphs, in bf16, and on two cards that hold a part: the emulation's losses, and not a call that CUDA would refuse."""
    runtime, num_pageable = on_gpus(opened(cuda, count), budget, 1 << 27), cuda.num_pageable
    found = STRICT_TRAINING.losses(runtime, 0.2, dtype=dtype)
    assert cuda.found == []
    assert cuda.num_pageable == num_pageable
    assert cuda.getDevice() == 0
    np.testing.assert_allclose(found, STRICT_TRAINING.losses(on_gpus([Emulator(cuda_libraries)], 1 << 26, 1 << 27), 0.2, dtype=dtype), rtol=1e-5)
    assert cuda.num_graphs > 0 or budget == TIGHT
