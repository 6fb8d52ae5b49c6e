"""The command on GPUs, emulated ones: flags, losses, refusals with their exit codes, a device that is lost."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cuda_emulator import COMPILER, Emulator
from support.emulated_cards import EmulatedCards

from nntask.hardware import gpus
from scheduler.core.errors import DoesNotFit
from scheduler.core.shortage import Shortage
from scheduler.drivers.cuda_cupy import find_gpus
from scheduler.drivers.disk import staging_nbytes
from scheduler.drivers.gpu import NoGpu
from tiles.kernels import catalog
from tiles.kernels.cuda.compiling import KernelBuildError
from wrappers.cli import main

CONFIG = {"vocab_size": 61, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
FLAGS = "--config-path=config.json --dataset=train.bin --dataset-path=. --batch=2 --minibatch=1 --lr=1e-3 --sample-tokens=0 --ram=64MiB"
TRAIN = ["train", *FLAGS.split()]
SHORT = ["--gpu-memory=256KiB", "--order=submission", "--recompute=none"]
"""Less memory than a step takes, in an order that takes no search."""

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no g++ to run the sources with")


@pytest.fixture
def cards(folder: Path, cuda_libraries: Path, monkeypatch: pytest.MonkeyPatch) -> EmulatedCards:
    """A directory with what a run needs, on a machine with two cards."""
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **CONFIG}))
    np.random.default_rng(0).integers(0, CONFIG["vocab_size"], 5000).astype(np.uint16).tofile(folder / "train.bin")
    found = EmulatedCards(cuda_libraries)
    monkeypatch.setattr(gpus, "cards", found)
    return found


def losses(run: str) -> list[float]:
    """Of each step."""
    return [json.loads(line)["loss"] for line in Path(run, "metrics.jsonl").read_text().splitlines()]


@needs_compiler
def test_the_same_command_uses_the_gpus_there_are(cards: EmulatedCards, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a flag, and without a CPU worker; losses are those of the CPU within rounding; the summary says who computed, and what fell back."""
    assert main([*TRAIN, "--steps=3", "--run-dir=gpu"]) == 0
    out = capsys.readouterr().out
    assert "workers: cuda:0; " in out
    assert "cuda:0 4.95 GiB" in out
    assert main([*TRAIN, "--steps=3", "--run-dir=cpu", "--ngpu=0", "--ncpu=1"]) == 0
    np.testing.assert_allclose(losses("gpu"), losses("cpu"), rtol=1e-4)
    summary = json.loads(Path("gpu/summary.json").read_text())
    assert summary["fallbacks"] == {}
    assert list(summary["budget_bytes"]) == ["ram", "cuda:0"]


@needs_compiler
def test_parts_of_a_card(cards: EmulatedCards, capsys: pytest.CaptureFixture[str]) -> None:
    """Two parts of one card are two devices with a memory each, a fraction of the card's, and compute the same bits as two cards."""
    shared = ["--steps=2", *SHORT]
    assert main([*TRAIN, *shared, "--run-dir=split", "--ngpu=1x2"]) == 0
    assert len(cards.opened) == 2
    assert main([*TRAIN, *shared, "--run-dir=cards", "--ngpu=2"]) == 0
    assert losses("split") == losses("cards")
    assert main([*TRAIN, "--steps=1", "--run-dir=fraction", "--ngpu=-1x2", "--gpu-memory=0.25"]) == 0
    assert "cuda:0 1 GiB, cuda:1 1 GiB" in capsys.readouterr().out


@needs_compiler
def test_the_ram_that_is_asked_for_is_enough_beside_staging(cards: EmulatedCards, capsys: pytest.CaptureFixture[str]) -> None:
    """Copies between disk and GPUs keep a part of --ram; what a refusal says is needed counts it, and is enough."""
    tight = [*TRAIN[:-1], "--steps=1", *SHORT, "--disk=scratch:64MiB"]
    staging = staging_nbytes(1, has_tier=True)
    assert main([*tight, f"--ram={staging + 1}", "--run-dir=a"]) == 3
    needed = re.search(r"needs ([\d,]+ B) of ram at least", capsys.readouterr().err)
    assert needed is not None
    assert main([*tight, f"--ram={needed[1]}", "--run-dir=a"]) == 0


@needs_compiler
def test_the_memory_of_a_gpu_that_is_advised_is_enough(cards: EmulatedCards, capsys: pytest.CaptureFixture[str]) -> None:
    """Typed back as it is printed, the run trains."""
    assert main([*TRAIN, "--steps=1", "--run-dir=a", "--gpu-memory=8KiB"]) == 3
    advised = re.search(r"it would fit with --gpu-memory ([\d.]+\w+)", capsys.readouterr().err)
    assert advised is not None
    assert main([*TRAIN, "--steps=1", "--run-dir=a", f"--gpu-memory={advised[1]}"]) == 0


@needs_compiler
def test_the_least_ram_of_a_plan_counts_staging(cards: EmulatedCards, capsys: pytest.CaptureFixture[str]) -> None:
    """With GPUs over a disk, what the table says of RAM is enough for the plan and for the run; the table's budget is what was typed."""
    flags = [*TRAIN[1:-1], "--steps=1", *SHORT, "--disk=scratch:64MiB"]
    assert main(["plan", *flags, "--ram=64MiB"]) == 0
    row = re.search(r"^ram +budget 64 MiB, at least ([\d.]+ \w+)", capsys.readouterr().out, re.MULTILINE)
    assert row is not None
    least = row[1].replace(" ", "")
    assert main(["plan", *flags, f"--ram={least}"]) == 0
    assert main(["train", *flags, f"--ram={least}", "--run-dir=a"]) == 0
    assert main(["plan", *flags, f"--ram={staging_nbytes(1, has_tier=True) + 1}"]) == 3


@needs_compiler
def test_a_lost_device_ends_with_six_and_a_whole_checkpoint(cards: EmulatedCards, capsys: pytest.CaptureFixture[str]) -> None:
    """The run goes on from it where the device works."""
    assert main([*TRAIN, "--steps=2", "--save-every=1", "--run-dir=run"]) == 0
    steps_of_device = int(cards.opened[0].time)
    cards.fails_after = steps_of_device
    capsys.readouterr()
    assert main([*TRAIN, "--steps=200", "--save-every=1", "--run-dir=lost"]) == 6
    err = capsys.readouterr().err
    assert err.startswith("nntask: emulated stopped working: planted")
    assert "the newest checkpoint is lost/checkpoints/" in err
    cards.fails_after = None
    assert main(["train", "--resume=lost", "--steps=4", "--sample-tokens=0"]) == 0
    assert main([*TRAIN, "--steps=4", "--run-dir=whole"]) == 0
    assert losses("lost")[-1] == losses("whole")[-1]


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (
            KernelBuildError("the kernels of norm.cu do not compile for sm_90 (x)"),
            6,
            "norm.cu do not compile for sm_90 (x); nothing was saved, so there is nothing to continue",
        ),
        (
            DoesNotFit(Shortage("outside", "GPU 0 (Emulated)", 0, 8, 7, task="a library")),
            3,
            "GPU 0 (Emulated) has no memory left for a library, which allocates outside the budget (1 of 8 bytes are free); lower --gpu-memory, or "
            "end other programs that use the card",
        ),
    ],
)
def test_a_kernel_that_cannot_start(
    error: Exception, code: int, words: str, cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its source does not compile, or the card has no memory left for libraries: one sentence, and the exit code of its kind."""

    def refuse(*_: Any) -> None:
        raise error

    monkeypatch.setattr(Emulator, "start", refuse)
    assert main([*TRAIN, "--steps=1", "--run-dir=run"]) == code
    err = capsys.readouterr().err
    assert err.endswith(words + "\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        ("--ngpu=3", 2, "--ngpu must be at most the number of GPUs that CUDA shows, got 3 and there are 2 (0: Emulated, 1: Emulated); lower it"),
        ("--gpu-memory=7GiB", 3, "--gpu-memory 7GiB is 7 GiB a part, above the 5,905,580,032 B that GPU 0 (Emulated) has free"),
        ("--gpu-memory=1.0", 3, "--gpu-memory 1.0 is 8 GiB a part, above the 5,905,580,032 B"),
        ("--gpu-memory=0.0", 2, "--gpu-memory must be a size, or a fraction of the card above 0 and up to 1.0, got 0.0"),
        ("--ngpu=-1x12", 3, "too little for 12 parts"),
        ("--ngpu=1x0", 2, "PARTS in --ngpu must be at least 1, got 0"),
        ("--ngpu=1x17", 2, "PARTS in --ngpu must be at most 16"),
        ("--ngpu=1 --sim-gpu=1", 2, "devices are real or simulated, got --ngpu 1 and --sim-gpu 1; drop one of them"),
        ("--ngpu=1 --dtype=fp64", 2, "--dtype fp64 has no CUDA kernels"),
        ("--ngpu=-2", 2, "--ngpu must be 0 or more, or -1 for all, got -2"),
    ],
)
def test_refusals(argv: str, code: int, words: str, cards: EmulatedCards, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence with the values and the way out."""
    assert main([*TRAIN, "--steps=1", "--run-dir=run", *argv.split()]) == code
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1
    assert not Path("run").exists()


class CudaError(RuntimeError):
    """As CuPy raises it."""

    def __init__(self, status: int) -> None:
        super().__init__(f"CUDA error {status}")
        self.status = status


class CudaRuntime:
    """CuPy's runtime on a machine where something is wrong.

    Args:
        status: of every call that counts GPUs.
        driver: version of the driver, such as 12020.
    """

    def __init__(self, status: int, driver: int) -> None:
        self.status, self.driver = status, driver

    def getDeviceCount(self) -> int:
        raise CudaError(self.status)

    def driverGetVersion(self) -> int:
        return self.driver

    def runtimeGetVersion(self) -> int:
        return 13000


def missing() -> Any:
    """CuPy whose libraries are not there."""
    raise ImportError("libcublas.so.13: cannot open shared object file")


@pytest.mark.parametrize(
    ("packages", "runtime", "words"),
    [
        ([], None, "CuPy, and it is not installed; pip install -e '.[cuda13]'"),
        (
            ["cupy-cuda12x", "cupy-cuda13x"],
            None,
            "one CuPy package must be installed, and there are cupy-cuda12x and cupy-cuda13x, which overwrite each",
        ),
        (
            ["cupy-cuda13x"],
            missing,
            "cupy-cuda13x is installed and cannot be imported (libcublas.so.13: cannot open shared object file); pip install",
        ),
        (["cupy-cuda13x"], lambda: CudaRuntime(35, 0), "no NVIDIA driver is loaded here"),
        (
            ["cupy-cuda13x"],
            lambda: CudaRuntime(35, 12020),
            "the NVIDIA driver here supports CUDA up to 12.2, and cupy-cuda13x needs 13.0; update the driver",
        ),
        (["cupy-cuda13x"], lambda: CudaRuntime(100, 13000), "CUDA finds no GPU to use (CUDA error 100)"),
    ],
)
def test_a_machine_without_usable_gpus(
    packages: list[str], runtime: Any, words: str, cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Asked for a GPU the command refuses, and says why; asked for nothing it says why and computes on the CPU."""
    monkeypatch.setattr(cards, "choose", lambda count: find_gpus(lambda: packages, runtime))
    with pytest.raises(NoGpu) as error:
        cards.choose(None)
    assert words in str(error.value)
    for flag in ("--ngpu=1", "--ngpu=-1"):
        assert main([*TRAIN, "--steps=1", flag]) == 2
        assert words in capsys.readouterr().err
    if packages:
        assert main(["devices"]) == 0
        told = f"no GPU is used: {error.value}, or compute on the CPU with --ngpu 0"
        assert f"gpu      {told}" in capsys.readouterr().out
        assert main([*TRAIN, "--steps=1", "--run-dir=run", "--ncpu=1"]) == 0
        assert capsys.readouterr().err == f"nntask: {told}\n"


def test_a_card_that_cuda_visible_devices_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the variable."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(NoGpu, match="with CUDA_VISIBLE_DEVICES='7'; change it"):
        find_gpus(lambda: ["cupy-cuda12x"], lambda: CudaRuntime(100, 13000))


def test_a_card_that_cannot_be_opened(cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence with what a library said."""

    def broken(*_: Any, **__: Any) -> list[Any]:
        raise RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED")

    monkeypatch.setattr(cards, "open", broken)
    assert main([*TRAIN, "--steps=1", "--run-dir=run", "--ngpu=1"]) == 2
    assert "GPU 0 (Emulated) could not be opened (CUBLAS_STATUS_NOT_INITIALIZED); see in nvidia-smi" in capsys.readouterr().err


@needs_compiler
def test_generation_on_a_gpu(cards: EmulatedCards, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same tokens as on the CPU."""
    Path("config.json").write_text(json.dumps({"model_type": "gpt2", **CONFIG, "vocab_size": 257}))
    argv = [*TRAIN, "--dataset=text", "--dataset-path=text", "--tokenizer=bytes", "--steps=1", "--run-dir=run"]
    assert main(argv) == 0
    asked = ["generate", "run", "--max-new-tokens=6", "--prompt=line", "--seed=3"]
    capsys.readouterr()
    assert main([*asked, "--ngpu=1"]) == 0
    on_gpu = capsys.readouterr().out
    assert main([*asked, "--ngpu=0", "--ncpu=1"]) == 0
    assert capsys.readouterr().out == on_gpu


def test_devices_lists_cards(cards: EmulatedCards, capsys: pytest.CaptureFixture[str]) -> None:
    """With their memory, and as workers."""
    assert main(["devices", "--ngpu=2"]) == 0
    out = capsys.readouterr().out
    assert "gpu      0: Emulated, compute capability 9.0, 6 GiB of 8 GiB free" in out
    assert "1 x cuda@cuda:0, 1 x cuda@cuda:1" in out


def test_what_has_no_cuda_kernel(own_kernels: None, cards: EmulatedCards, capsys: pytest.CaptureFixture[str]) -> None:
    """It needs a CPU worker, with which it runs there."""
    catalog.register("residual_layer_norm", "cpu")(catalog.kernel("residual_layer_norm", "cpu"))
    assert main([*TRAIN, "--steps=1", "--run-dir=run"]) == 2
    err = capsys.readouterr().err
    assert "there is no CPU worker to run them; add --ncpu 1" in err
    assert "residual_layer_norm" in err
    assert not Path("run").exists()
    if COMPILER is not None:
        assert main([*TRAIN, "--steps=2", "--run-dir=run", "--ncpu=1"]) == 0
        assert "on the CPU, without a CUDA kernel: " in capsys.readouterr().out
        assert list(json.loads(Path("run/summary.json").read_text())["fallbacks"]) == ["residual_layer_norm"]
        assert main([*TRAIN, "--steps=2", "--run-dir=cpu", "--ngpu=0", "--ncpu=1"]) == 0
        np.testing.assert_allclose(losses("run"), losses("cpu"), rtol=1e-4)


@needs_compiler
def test_measured_tiles_on_a_gpu(cards: EmulatedCards, capsys: pytest.CaptureFixture[str]) -> None:
    """Each task of a trial has its time, although kernels end after the loss is known and the run joins tasks."""
    given = ["--seq-tile=8", "--embd-tile=-1", "--inner-tile=-1", "--head-tile=-1", "--vocab-tile=-1"]
    assert main([*TRAIN, *given, "--steps=1", "--run-dir=run", "--ngpu=1", "--auto-tile=measured"]) == 0
    assert "s a step" in capsys.readouterr().out


@needs_compiler
def test_a_trace_knows_the_steps_of_joined_tasks(cards: EmulatedCards, capsys: pytest.CaptureFixture[str]) -> None:
    """As many tasks in each step."""
    assert main([*TRAIN, "--steps=6", "--run-dir=run", "--ngpu=1", "--trace-steps=all@trace.json"]) == 0
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    steps = Counter(event["args"]["step"] for event in events if "step" in event.get("args", {}))
    assert sorted(steps) == [1, 2, 3, 4, 5, 6]
    assert len(set(steps.values())) == 1


@needs_compiler
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_updates_by_cpu_workers(cards: EmulatedCards, capsys: pytest.CaptureFixture[str], dtype: str) -> None:
    """CPU workers update and do nothing else; losses are those of updates on GPUs within rounding, and no task counts as one that falls back."""
    some = [f"--dtype={dtype}", "--steps=3", *SHORT]
    assert main([*TRAIN, *some, "--update-on=cpu", "--ncpu=2", "--run-dir=cpu", "--trace-steps=all@t.json"]) == 0
    out = capsys.readouterr().out
    assert "weights are updated by CPU workers in RAM" in out
    assert "workers: cpu:0, cpu:1, cuda:0" in out
    assert main([*TRAIN, *some, "--run-dir=gpu"]) == 0
    np.testing.assert_allclose(losses("cpu"), losses("gpu"), rtol=1e-2 if dtype == "bf16" else 1e-4)
    events = json.loads(Path("t.json").read_text())
    events = events["traceEvents"] if isinstance(events, dict) else events
    threads = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event.get("name") == "thread_name"}
    ran = {(threads[event["pid"], event["tid"]].partition(":")[0], event["name"]) for event in events if event.get("ph") == "X"}
    assert {name for where, name in ran if where == "cpu"} == {"adam"}
    assert ("cuda", "adam") not in ran
