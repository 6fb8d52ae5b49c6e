"""`--attention cudnn` over a strict stand-in of cuDNN's frontend: losses beside those of our kernels, a choice that is kept, refusals."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import strict_cudnn
from support.cuda_emulator import COMPILER
from support.fake_cuda import FakeCuda
from support.objective_data import TEXTS, lines_in
from support.strict_cuda import rehearsed
from support.strict_cudnn import StrictCudnn
from support.transformers_oracle import CONFIGS

from nntask.hardware import gpu_attention
from nntask.hardware.gpu_attention import gpus_with_cudnn
from nntask.hardware.gpus import GpuPlan
from nntask.io.units import parse_size
from scheduler.drivers.cuda_cupy import GpuFacts
from tiles.kernels import CudaDevice, WholeShape, attention_seconds
from wrappers.cli import main

CONFIG = {"vocab_size": 61, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
FLAGS = "--config-path=config.json --dataset=train.bin --dataset-path=. --batch=2 --minibatch=2 --lr=1e-3 --sample-tokens=0 --ram=64MiB --dtype=bf16"
TRAIN = ["train", *FLAGS.split()]
CUDNN, AUTO = "--attention=cudnn", "--attention=auto"

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ to run the sources with")


@pytest.fixture
def cuda(folder: Path, cuda_libraries: Path, tmp_path: Path) -> Iterator[FakeCuda]:
    """A directory with what a run needs, on a machine with one card behind strict libraries."""
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **CONFIG}))
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
    assert main([*TRAIN, "--steps=4", "--run-dir=own"]) == 0
    assert cudnn.num_started == 0
    assert main([*TRAIN, "--steps=4", "--run-dir=whole", CUDNN]) == 0
    assert cudnn.num_planned == 2
    np.testing.assert_allclose(losses("whole"), losses("own"), rtol=1e-2)
    assert main([*TRAIN, "--steps=4", "--run-dir=single", CUDNN, "--no-graphs"]) == 0
    assert losses("single") == losses("whole")
    assert main([*TRAIN, "--steps=2", "--run-dir=parts", CUDNN]) == 0
    planned = cudnn.num_planned
    assert main(["train", "--resume=parts", "--steps=4"]) == 0
    assert cudnn.num_planned == planned + 2
    assert losses("parts") == losses("whole")
    assert main(["train", "--resume=parts", "--steps=5", "--attention=flash"]) == 2
    assert "--attention (was cudnn, is flash)" in capsys.readouterr().err
    assert cuda.found == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--dtype=fp32"], "--attention cudnn computes in bf16, got --dtype fp32; add --dtype bf16, or use --attention flash"),
        (["--dask=local:2", "--lanes=2"], "--attention cudnn is for training on one machine, got --dask local:2; use --attention flash"),
        ([AUTO, "--dask=local:2", "--lanes=2"], "--attention auto is for training on one machine, got --dask local:2; use --attention flash"),
        (["--ngpu=0"], "--attention cudnn is about GPUs, and none is used; use --attention flash"),
    ],
)
def test_what_cudnn_cannot_do_is_refused(flags: list[str], words: str, cudnn: StrictCudnn, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is opened."""
    assert main([*TRAIN, "--steps=1", CUDNN, *flags]) == 2
    assert words in capsys.readouterr().err


CHOICES = {"own": "flash", "cudnn": "cudnn"}
"""Library of attention in plan.json -> value of --attention."""


def chosen(run: str) -> dict[str, Any]:
    """What plan.json says of the choice."""
    return dict(json.loads(Path(run, "plan.json").read_text())["gpu_attention"])


@pytest.mark.parametrize(("idle", "who", "words"), [(0, "cudnn", "cuDNN, "), (9, "own", "nntask's kernels; cuDNN is not clearly faster, ")])
def test_auto_takes_who_is_faster(idle: int, who: str, words: str, cuda: FakeCuda, capsys: pytest.CaptureFixture[str]) -> None:
    """The losses are those of a run that asks for it by name; a run that goes on keeps it, whoever would be faster by then."""
    with strict_cudnn.installed(cuda, idle=idle):
        assert main([*TRAIN, "--steps=4", "--run-dir=named", f"--attention={CHOICES[who]}"]) == 0
        capsys.readouterr()
        assert main([*TRAIN, "--steps=2", "--run-dir=found", AUTO]) == 0
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("--attention auto:")]
        figures = chosen("found")
        seconds = f"{figures['cudnn_seconds']:.3g} s a step compared with {figures['own_seconds']:.3g} s a step of nntask's kernels"
        assert line == f"--attention auto: {words}{seconds}"
        assert figures["chosen"] == who
        assert f'attention = "{CHOICES[who]}"' in Path("found", "config.toml").read_text()
    with strict_cudnn.installed(cuda, idle=9 - idle):
        assert main(["train", "--resume=found", "--steps=4", AUTO]) == 0
        assert "--attention auto:" not in capsys.readouterr().out
    assert chosen("found") == figures
    assert losses("found") == losses("named")
    assert cuda.found == []


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--dtype=fp32"], "it computes in bf16, and this is --dtype fp32"),
        (["--seq-tile=4"], "it takes whole sequences, and tiles have 4 of 8 tokens (--seq-tile)"),
        (["--seq-tile=3"], "it takes whole sequences, and tiles have 3 of 8 tokens (--seq-tile)"),
        (["--dropout=0.1"], "it takes no dropout, got 0.1 (--dropout)"),
        (["--ngpu=0"], "no GPU is used"),
        (["--gpu-memory=200MiB"], "cuDNN's workspace of 320 MiB leaves nothing of --gpu-memory"),
    ],
)
def test_auto_is_ours_where_there_is_nothing_to_choose(
    flags: list[str], why: str, cuda: FakeCuda, cudnn: StrictCudnn, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the reason, before anything is measured."""
    assert main([*TRAIN, "--steps=2", "--run-dir=never", "--dry-run", AUTO, *flags]) == 0
    assert f"--attention auto: nntask's kernels; not cuDNN: {why}\n" in capsys.readouterr().out
    assert cudnn.num_planned == 0


@pytest.mark.parametrize("flags", [["--seq-tile=3", "--dropout=0.1"], ["--ngpu=0"]], ids=" ".join)
def test_a_run_with_nothing_to_choose_is_one_that_never_asked(flags: list[str], cuda: FakeCuda, cudnn: StrictCudnn) -> None:
    """Its losses, on a GPU and without one; cuDNN is not asked."""
    assert main([*TRAIN, "--steps=2", "--run-dir=found", AUTO, *flags]) == 0
    assert main([*TRAIN, "--steps=2", "--run-dir=own", *flags]) == 0
    assert losses("found") == losses("own")
    assert cudnn.num_planned == 0


@pytest.mark.parametrize(
    ("name", "changes", "flags", "why"),
    [
        ("gpt2", {"n_head": 8, "n_embd": 32}, [], "it takes heads of up to 128 features in steps of 8, got 4"),
        ("mistral", {"sliding_window": 4}, [], "it takes no windows, got one of 4 tokens"),
        ("t5", {}, [], "it adds no biases of distances to scores, got 32 of them"),
        (
            "bert classifier",
            {"hidden_size": 48},
            ["--dataset=jsonl", "--dataset-path=labels.jsonl"],
            "it keeps no documents apart, and rows hold several texts or padding",
        ),
    ],
)
def test_what_cudnn_does_not_take_is_said_with_the_value(
    name: str, changes: dict[str, Any], flags: list[str], why: str, cuda: FakeCuda, cudnn: StrictCudnn, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of each rule that a model breaks."""
    Path("text.txt").write_text("\n".join(TEXTS))
    lines_in(Path("labels.jsonl"), [{"text": text, "label": at % 2} for at, text in enumerate(TEXTS)])
    Path("config.json").write_text(json.dumps({**CONFIGS[name].to_dict(), "vocab_size": 300, **changes}))
    data = ["--dataset=text", "--dataset-path=text.txt", "--tokenizer=bytes", "--seq-len=8", "--dropout=0"]
    for flag, words in ((AUTO, f"nntask's kernels; not cuDNN: {why}"), (CUDNN, f"cuDNN computes none of it: {why}")):
        assert main([*TRAIN, *data, *flags, "--steps=1", "--run-dir=never", "--dry-run", flag]) == 0, capsys.readouterr().err
        said = capsys.readouterr().out
        assert words in said, said


def test_auto_is_ours_where_cudnn_declines_a_shape(cuda: FakeCuda, capsys: pytest.CaptureFixture[str]) -> None:
    """Or is not there at all: the library's own words are told."""
    with strict_cudnn.installed(cuda, declines=lambda queries: True):
        assert main([*TRAIN, "--steps=2", "--run-dir=found", AUTO]) == 0
    said = capsys.readouterr().out
    assert (
        "s a step; not cuDNN: cuDNN leaves attention of 1 x 8 tokens, 2 heads of 8, causal to nntask's kernels: no plan of the forward pass" in said
    )
    assert "(no engine supports this graph)" in chosen("found")["why_not_cudnn"]
    assert main([*TRAIN, "--steps=2", "--run-dir=missing", AUTO]) == 0
    assert "not cuDNN: nvidia-cudnn-frontend is not installed (pip install" in capsys.readouterr().out
    assert cuda.found == []


@pytest.mark.parametrize("where", ["launchKernel", "eventSynchronize"])
def test_a_card_that_stops_while_it_is_timed_ends_the_run(
    where: str, cuda: FakeCuda, cudnn: StrictCudnn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is no reason to choose one or the other; nothing has been written yet. Kernels run behind the host, which often hears when it waits."""
    inner, is_timed = getattr(cuda, where), False

    def seconds(device: CudaDevice, shape: WholeShape) -> tuple[float, float]:
        nonlocal is_timed
        is_timed = True
        return attention_seconds(device, shape)

    def call(*arguments: Any) -> Any:
        if is_timed:
            cuda.break_device(0)
        return inner(*arguments)

    monkeypatch.setattr(gpu_attention, "attention_seconds", seconds)
    monkeypatch.setattr(cuda, where, call)
    assert main([*TRAIN, "--steps=2", "--run-dir=never", AUTO]) == 6
    assert "GPU 0 (Stand-in) stopped working: cudaError 700" in capsys.readouterr().err
    assert not Path("never").exists()


@pytest.mark.parametrize(
    ("flags", "who"),
    [
        (["--gpu-memory=327700KiB"], "own"),  # too little for a task, beside the workspace
        (["--gpu-memory=328000KiB"], "own"),  # too little for the step
        (["--gpu-memory=328000KiB", "--update-on=auto"], "own"),
        (["--gpu-memory=329MiB"], "cudnn"),
        (["--gpu-memory=329MiB", "--ngpu=-1x2", "--batch=4"], "cudnn"),
    ],
)
def test_auto_moves_nothing_for_the_workspace(
    flags: list[str], who: str, cuda: FakeCuda, cudnn: StrictCudnn, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kernels that are faster are not worth data that moves: such a run is one that asked for ours."""
    assert main([*TRAIN, "--steps=2", "--run-dir=found", AUTO, *flags]) == 0
    said = capsys.readouterr().out
    assert "evictions: 0 a step" in said
    assert chosen("found")["chosen"] == who
    assert ("s a step of nntask's kernels: the step needs " in said) == (who == "own")
    assert ("to move nothing, and cuDNN's workspace leaves " in chosen("found")["why_not_cudnn"]) == (who == "own")
    assert main([*TRAIN, "--steps=2", "--run-dir=named", f"--attention={CHOICES[who]}", *flags]) == 0
    assert losses("found") == losses("named")
    assert cuda.found == []


def test_a_run_on_several_devices_has_one_choice(cuda: FakeCuda, cudnn: StrictCudnn) -> None:
    """Which is measured once for both parts of a card, and has the losses of a single device."""
    assert main([*TRAIN, "--steps=2", "--batch=4", "--run-dir=one", AUTO]) == 0
    planned = cudnn.num_planned
    assert main([*TRAIN, "--steps=2", "--batch=4", "--run-dir=two", AUTO, "--ngpu=-1x2"]) == 0
    assert planned + 2 + 2 <= cudnn.num_planned <= planned + 2 + 2 * 2  # then by each part that attention has come to
    assert chosen("two")["chosen"] == "cudnn"
    assert losses("two") == losses("one")
    assert cuda.found == []


def test_what_is_left_to_our_kernels_is_said_once(cuda: FakeCuda, capsys: pytest.CaptureFixture[str]) -> None:
    """A shape that cuDNN declines on both devices; and a run that has nothing for it."""
    with strict_cudnn.installed(cuda, declines=lambda queries: True):
        assert main([*TRAIN, "--steps=2", "--batch=4", "--run-dir=both", CUDNN, "--ngpu=-1x2"]) == 0
        said = capsys.readouterr()
        assert said.err.count("nntask: cuDNN leaves attention of 1 x 8 tokens, 2 heads of 8, causal to nntask's kernels") == 1
        assert "attention: cuDNN computes it in 8 tasks a step, with 320 MiB of each GPU's budget as workspace\n" in said.out
        assert main([*TRAIN, "--steps=2", "--run-dir=cut", CUDNN, "--seq-tile=4"]) == 0
        assert "attention: cuDNN computes none of it: it takes whole sequences, and tiles have 4 of 8 tokens (--seq-tile)" in capsys.readouterr().out


def test_plans_say_who_computes_attention(cuda: FakeCuda, cudnn: StrictCudnn, capsys: pytest.CaptureFixture[str]) -> None:
    """And what of the budgets that takes; nothing is measured for a plan."""
    for flag, words in ((CUDNN, "cuDNN's in 4 tasks a step if it can; 320 MiB of each GPU"), (AUTO, "planned as nntask's own; training also times")):
        assert main(["plan", *FLAGS.split(), flag]) == 0
        assert f"attention           {words}" in capsys.readouterr().out
    assert cudnn.num_planned == 0


def test_a_missing_package_is_one_sentence(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With what to install, and with what to use instead."""
    monkeypatch.setitem(sys.modules, "cudnn", None)
    assert main([*TRAIN, "--steps=1", CUDNN]) == 2
    assert "--attention cudnn needs nvidia-cudnn-frontend, which is not installed; pip install -e '.[cudnn13]'" in capsys.readouterr().err


def test_advice_has_room_for_the_workspace(cuda: FakeCuda, cudnn: StrictCudnn, capsys: pytest.CaptureFixture[str]) -> None:
    """A run with the budget that a refusal names begins."""
    assert main([*TRAIN, "--steps=2", "--run-dir=never", CUDNN, "--gpu-memory=327700KiB"]) == 3
    (size,) = re.findall(r"it would fit with --gpu-memory (\S+)$", capsys.readouterr().err.strip())
    assert main([*TRAIN, "--steps=2", "--run-dir=fits", CUDNN, f"--gpu-memory={size}"]) == 0
    assert parse_size(size, "--gpu-memory") > 320 << 20


def test_the_workspace_is_of_the_budget(cudnn: StrictCudnn) -> None:
    """Of each part's, once."""
    plan = GpuPlan(((GpuFacts(0, "Stand-in", 90, 1 << 34, 1 << 34), None),), 1 << 30)
    found = gpus_with_cudnn(plan)
    assert found.has_cudnn
    assert found.nbytes == (1 << 30) - (320 << 20)
