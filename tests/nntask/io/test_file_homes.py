"""Weights at home in their files: read when they are wanted, never written elsewhere, and what happens when a file fails."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from nntask import no_grad
from nntask.errors import StorageError
from nntask.hf.model_directory import ModelDirectory
from nntask.models.gpt2 import GPT2, NAMES, GPT2Config
from nntask.optim.optimizers import AdamW, Group
from nntask.tiling.model_tiling import ModelTiling
from scheduler import Codelet, InlineRuntime, Runtime, TaskError, Trace
from scheduler.core.records import FILE, RAM
from wrappers.cli import main

CONFIG = GPT2Config(vocab_size=512, n_positions=32, n_embd=128, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
TILING = ModelTiling(1, 32, 64, 128, 2, 128)
IDS = np.random.default_rng(5).integers(0, CONFIG.vocab_size, (3, 1, CONFIG.n_positions + 1)).astype(np.int32)


def write_model(path: Path, dtype: type = np.float32, config: GPT2Config = CONFIG) -> Path:
    """A directory as transformers writes it."""
    path.mkdir()
    ours = {name: tensor.read() for name, tensor in GPT2(config, ModelTiling(), InlineRuntime(), seed=9).tensors().items()}
    tensors = {name: np.ascontiguousarray(value.astype(dtype)) for name, value in NAMES.to_hf(ours, config).items() if name != "lm_head.weight"}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config.to_dict()))
    return path


@pytest.fixture(scope="module", params=[np.float32, np.float16], ids=["as stored", "converted"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tiles are read straight into memory, or by way of working memory."""
    return write_model(tmp_path_factory.mktemp("models") / "model", request.param)


def opened(path: Path, runtime: Runtime) -> GPT2:
    """The model of a directory, unread."""
    model = GPT2(CONFIG, TILING, runtime, seed=None)
    ModelDirectory.open(path).attach(model.tensors())
    return model


def losses(path: Path, runtime: Runtime) -> list[bytes]:
    """Bits of the losses of three evaluations by one recorded step."""
    model = opened(path, runtime)
    tokens, targets = model.input_tensors(1)
    with runtime.record() as step:
        model.train(False)
        with no_grad():
            loss = model(tokens, targets).data
    found = []
    for ids in IDS:
        tokens.write(ids[:, :-1])
        targets.write(ids[:, 1:])
        found.append(step.replay().read(loss).tobytes())
    return found


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[bytes]:
    """The losses with room."""
    with Runtime(1, ram=1 << 28) as runtime:
        return losses(directory, runtime)


class Copies(Trace):
    """Collects copies as (source, target, name)."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[int, int, str]] = []

    def add_copy(self, source: int, target: int, name: str, nbytes: int, start_ns: int, end_ns: int, handle: int) -> None:
        """Take note of a copy."""
        self.copies.append((source, target, name))


def size_of(path: Path) -> int:
    """Bytes of a model's tiles in memory."""
    return 4 * sum(value.size for value in load_file(path / "model.safetensors").values())


@pytest.mark.parametrize("machine", ["ram", "ram disk", "device", "device disk"])
def test_a_forward_pass_writes_no_weights(directory: Path, expected: list[bytes], machine: str, tmp_path: Path) -> None:
    """With a quarter of the weights' bytes where tasks run: the same losses, nothing written to the disk tier, or no disk tier at all."""
    quarter = size_of(directory) // 4
    options: dict = {"disk": (tmp_path / "tier", 1 << 30)} if machine.endswith("disk") else {}
    if machine.startswith("device"):
        options.update(sim_gpus=1, gpu_memory=quarter)
    seen = Copies()
    with Runtime(0 if machine.startswith("device") else 2, ram=quarter, trace=seen, **options) as runtime:
        assert losses(directory, runtime) == expected
        stats = runtime.stats()
        runtime._executor.validate()
    place = "sim:0" if machine.startswith("device") else "ram"
    moved = stats["moved_bytes"]
    assert not [name for source, target, name in seen.copies if target != RAM and ".weight" in name and source != FILE]
    assert moved[f"file->{place}"] > 2 * size_of(directory)
    assert all(stats["peak_bytes"][node] <= stats["budget_bytes"][node] for node in stats["peak_bytes"])
    if machine.endswith("disk"):
        assert stats["peak_bytes"]["disk"] < size_of(directory) // 4  # activations


def train(path: Path, **options) -> tuple[list[bytes], dict[str, np.ndarray], dict, list[int]]:
    """Three steps of AdamW on biases and scales alone: bits of the losses, the weights after them, counters, and the plan's least budgets."""
    with Runtime(2, **options) as runtime:
        model = opened(path, runtime)
        optimizer = AdamW([Group([each for each in model.parameters() if len(each.shape) == 1], 0.0)], 1e-2)
        tokens, targets = model.input_tensors(1)
        with runtime.record() as step:
            loss = model(tokens, targets)
            loss.backward()
            optimizer.step()
        found = []
        for number, ids in enumerate(IDS):
            tokens.write(ids[:, :-1])
            targets.write(ids[:, 1:])
            optimizer.prepare(number + 1, 1e-2)
            found.append(step.replay().read(loss.data).tobytes())
        runtime.wait()
        runtime._executor.validate()
        stats = runtime.stats()
        plan = step.plan
        least = [plan.minimum_bytes(is_last=False, computes=True), plan.minimum_bytes(is_last=True, computes=False)]
        least.append(plan.minimum_bytes(is_last=True, computes=True))
        return found, {name: tensor.read() for name, tensor in model.tensors().items()}, stats, least


def test_what_trains_moves_out_of_its_file_and_what_does_not_stays(directory: Path, tmp_path: Path) -> None:
    """At the least budgets that the plan asks for, with a disk tier and without: the same bits as with room, and matrices are never written."""
    expected, weights, _, (task, passive, alone) = train(directory, ram=1 << 28)
    reading = 4 * max(source.scratch_nbytes for source in sources(directory))
    aside = -(-reading // 4096) * 4096
    matrices = {name for name, value in weights.items() if value.ndim > 1}
    frozen = sum(value.nbytes for value in weights.values() if value.ndim > 1)
    assert passive < alone < frozen + passive
    unused = 4096  # the key of a dropout that never happens is not of the step
    for options in ({"ram": task + aside, "disk": (tmp_path, passive + unused)}, {"ram": alone + unused + aside}):
        seen = Copies()
        found, after, stats, _ = train(directory, trace=seen, **options)
        assert not [name for source, target, name in seen.copies if source == RAM and name.partition("[")[0] in matrices]
        assert found == expected
        assert all(np.array_equal(after[name], value) for name, value in weights.items())
        assert stats["moved_bytes"]["file->ram"] > frozen


def sources(path: Path) -> list:
    """The sources of a model's tiles."""
    found: list = []

    class Collecting(InlineRuntime):
        def _attach(self, handle, source):  # type: ignore[no-untyped-def]
            found.append(source)

    ModelDirectory.open(path).attach(GPT2(CONFIG, TILING, Collecting(), seed=None).tensors())
    return found


def truncate(file: Path) -> None:
    """Half of the file is gone."""
    os.truncate(file, file.stat().st_size // 2)


def change(file: Path) -> None:
    """A byte is another, and the time of the last change."""
    with file.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\0")
    os.utime(file, ns=(1, 1))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [(truncate, "has become shorter since it was opened"), (change, "must not change while it is in use, and has changed since it was opened")],
)
def test_a_file_that_is_spoiled(tmp_path: Path, spoil, words: str) -> None:  # type: ignore[no-untyped-def]
    """The tensor and its file are named; what has been read before goes on."""
    path = write_model(tmp_path / "model")
    with Runtime(1, ram=1 << 26) as runtime:
        tensors = opened(path, runtime).tensors()
        head, tail = tensors["ln_f.weight"], tensors["wte.weight"]
        assert head.read().shape == (128,)
        spoil(path / "model.safetensors")
        touch(runtime, tail)
        with pytest.raises(TaskError) as told:
            runtime.wait()
        cause = told.value.__cause__
        assert isinstance(cause, StorageError)
        assert str(cause).startswith("transformer.wte.weight was lost: ")
        assert f"{path / 'model.safetensors'} {words}" in str(cause)
        assert head.read().shape == (128,)
        runtime._executor.validate()


def touch(runtime: Runtime, tensor) -> None:  # type: ignore[no-untyped-def]
    """A task that reads each tile."""
    for handle in tensor.handles:
        runtime.submit(Codelet("touch", cpu=lambda view: None), [(handle, "R")])


def test_a_file_that_is_removed_or_replaced(tmp_path: Path) -> None:
    """It is read on as it was."""
    path = write_model(tmp_path / "model")
    expected = load_file(path / "model.safetensors")["transformer.ln_f.weight"]
    with Runtime(1, ram=1 << 26) as runtime:
        tensors = opened(path, runtime).tensors()
        (path / "model.safetensors").unlink()
        (path / "model.safetensors").write_bytes(b"another")
        assert np.array_equal(tensors["ln_f.weight"].read(), expected)


TRAIN = [
    "--dataset=train.bin",
    "--dataset-path=.",
    "--batch=2",
    "--minibatch=1",
    "--seq-len=32",
    "--lr=1e-3",
    "--ncpu=2",
    "--sample-tokens=0",
    "--init-from=model",
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a model of 16-bit floats and tokens."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model", ml_dtypes.bfloat16)
    np.random.default_rng(0).integers(0, CONFIG.vocab_size, 5000).astype(np.uint16).tofile(tmp_path / "train.bin")
    return tmp_path


@pytest.mark.parametrize("disk", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_least_budgets_of_a_run_that_begins_in_files(here: Path, capsys: pytest.CaptureFixture[str], disk: bool) -> None:
    """What `nntask plan` prints is enough, readers included, and a page less is refused."""

    def flags(ram: int, tier: int) -> list[str]:
        return [f"--ram={ram}", *([f"--disk=tier:{tier}"] if disk else [])]

    assert main(["plan", *TRAIN, *flags(1 << 28, 1 << 28), "--json"]) == 0
    least = json.loads(capsys.readouterr().out)["minimum_budget_bytes"]
    assert main(["train", *TRAIN, *flags(least["ram"], least.get("disk", 0)), "--steps=2", "--run-dir=tight"]) == 0
    assert main(["train", *TRAIN, "--ram=256MiB", "--steps=2", "--run-dir=roomy"]) == 0
    tight, roomy = ([json.loads(line) for line in (here / run / "metrics.jsonl").read_text().splitlines()] for run in ("tight", "roomy"))
    assert [line["loss"] for line in tight] == [line["loss"] for line in roomy]
    assert roomy[0]["moved_bytes"].get("file->ram", 0) > 0
    capsys.readouterr()
    assert main(["train", *TRAIN, *flags(least["ram"] - 4096, least.get("disk", 0)), "--steps=2", "--run-dir=less"]) == 3


def test_a_run_whose_weights_fail_ends_with_code_6(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence that names the tensor and the file."""
    honest = os.preadv

    def broken(fd: int, buffers: list, offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("model.safetensors"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return honest(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", broken)
    assert main(["train", *TRAIN, "--steps=2", "--run-dir=run"]) == 6
    err = capsys.readouterr().err
    assert "transformer." in err
    assert "was lost: cannot read model/model.safetensors: Input/output error" in err
    assert err.count("\n") == 1
