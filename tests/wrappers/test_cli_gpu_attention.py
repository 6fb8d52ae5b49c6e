"""`--gpu-attention cudnn` over a strict stand-in of cuDNN's frontend: losses beside those of our kernels, a choice that is kept, refusals."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support import strict_cudnn
from support.cuda_emulator import COMPILER
from support.strict_cuda import rehearsed
from support.strict_cudnn import StrictCudnn

from nntask.hardware.gpus import GpuPlan, gpus_with_cudnn
from scheduler.drivers.cuda_cupy import GpuFacts
from scheduler.testing import FakeCuda
from wrappers.cli import main

CONFIG = {"vocab_size": 61, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
FLAGS = "--config-path=config.json --dataset=train.bin --dataset-path=. --batch=2 --minibatch=2 --lr=1e-3 --sample-tokens=0 --ram=64MiB --dtype=bf16"
TRAIN = ["train", *FLAGS.split()]
CUDNN = "--gpu-attention=cudnn"

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ to run the sources with")


@pytest.fixture
def cuda(folder: Path, cuda_libraries: Path, tmp_path: Path) -> Iterator[FakeCuda]:
    """A directory with what a run needs, on a machine with one card behind strict libraries."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    np.random.default_rng(0).integers(0, CONFIG["vocab_size"], 5000).astype(np.uint16).tofile(folder / "train.bin")
    with rehearsed(cuda_libraries, tmp_path / "code") as (found, _):
        yield found


@pytest.fixture
def cudnn(cuda: FakeCuda) -> Iterator[StrictCudnn]:
    """And cuDNN on it."""
    with strict_cudnn.installed(cuda) as found:
        yield found


def losses(run: str) -> list[float]:
    """Of each step."""
    return [json.loads(line)["loss"] for line in Path(run, "metrics.jsonl").read_text().splitlines()]


def test_a_run_keeps_its_choice(cuda: FakeCuda, cudnn: StrictCudnn, capsys: pytest.CaptureFixture[str]) -> None:
    """Losses are near those of our kernels; stopped and resumed they are those of one run, with graphs and without; another choice is refused."""
    assert main([*TRAIN, "--steps=6", "--run-dir=own"]) == 0
    assert cudnn.num_started == 0
    assert main([*TRAIN, "--steps=6", "--run-dir=whole", CUDNN]) == 0
    assert cudnn.num_planned == 2
    np.testing.assert_allclose(losses("whole"), losses("own"), rtol=1e-2)
    assert main([*TRAIN, "--steps=6", "--run-dir=single", CUDNN, "--no-graphs"]) == 0
    assert losses("single") == losses("whole")
    assert main([*TRAIN, "--steps=3", "--run-dir=parts", CUDNN]) == 0
    planned = cudnn.num_planned
    assert main(["train", "--resume=parts", "--steps=6"]) == 0
    assert cudnn.num_planned == planned + 2
    assert losses("parts") == losses("whole")
    assert main(["train", "--resume=parts", "--steps=7", "--gpu-attention=own"]) == 2
    assert "--gpu-attention (was cudnn, is own)" in capsys.readouterr().err
    assert cuda.found == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--dtype=fp32"], "--gpu-attention cudnn computes in bf16, got --dtype fp32; add --dtype bf16, or use --gpu-attention own"),
        (["--no-flashattention"], "--gpu-attention cudnn keeps no scores, which --no-flashattention asks for; drop one of them"),
        (["--dask=local:2", "--lanes=2"], "--gpu-attention cudnn is for training on one machine, got --dask local:2; use --gpu-attention own"),
        (["--ngpu=0"], "--gpu-attention cudnn is about GPUs, and none is used; use --gpu-attention own"),
    ],
)
def test_what_cudnn_cannot_do_is_refused(flags: list[str], words: str, cudnn: StrictCudnn, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is opened."""
    assert main([*TRAIN, "--steps=1", CUDNN, *flags]) == 2
    assert words in capsys.readouterr().err


def test_a_missing_package_is_one_sentence(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With what to install, and with what to use instead."""
    monkeypatch.setitem(sys.modules, "cudnn", None)
    assert main([*TRAIN, "--steps=1", CUDNN]) == 2
    assert "--gpu-attention cudnn needs nvidia-cudnn-frontend, which is not installed; pip install -e '.[cudnn13]'" in capsys.readouterr().err


def test_the_workspace_is_of_the_budget(cudnn: StrictCudnn) -> None:
    """Of each part's, once."""
    plan = GpuPlan(((GpuFacts(0, "Stand-in", 90, 1 << 34, 1 << 34), None),), 1 << 30)
    found = gpus_with_cudnn(plan)
    assert found.has_cudnn
    assert found.nbytes == (1 << 30) - (320 << 20)
