"""`nntask compare`: equal kinds are equal bit by bit, and a kernel that is wrong on one kind is named, with the tile, the place and the values."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.counted_calls import count_calls
from support.model_directories import write_model

from nntask.checkpoints.store import find_checkpoint
from nntask.models.registry import build
from nntask.tiling.model_tiling import ModelTiling
from nntask.training import compare as comparing
from scheduler import InlineRuntime
from scheduler.api.recording import Recorder
from tiles.kernels import catalog
from wrappers.cli import main

SMALL = {"vocab_size": 64, "n_positions": 16, "n_embd": 12, "n_layer": 2, "n_head": 3}


@pytest.fixture(autouse=True)
def here(folder: Path, own_kernels: None) -> Path:
    """A directory with a small config."""
    (folder / "small.json").write_text(json.dumps({"model_type": "gpt2", **SMALL}))
    return folder


def on_sim() -> bool:
    """Whether this is the thread of a simulated device."""
    return threading.current_thread().name.startswith("nntask sim:")


def plant(op: str, spoil: Callable[..., None]) -> None:
    """Let a kernel be wrong on simulated devices: `spoil` gets its tiles after it has run."""
    honest = catalog.kernel(op, "cpu")

    def kernel(*tiles: Any, **constants: Any) -> None:
        honest(*tiles, **constants)
        if on_sim():
            spoil(*tiles)

    catalog.register(op, "cpu")(kernel)


@pytest.mark.parametrize("flags", [[], ["--a=sim", "--b=cpu", "--dtype=bf16", "--steps=3", "--batch=2", "--seq-len=7"]])
def test_cpu_and_simulated_devices_are_equal(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Bit by bit, first weights, forward and backward pass and optimizer."""
    assert main(["compare", "small.json", "--rtol=0", "--atol=0", *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["equal"], found["largest_difference"], found["first"]) == (True, 0, None)
    assert found["tiles"] >= found["tasks"] > 100
    assert main(["compare", "small.json", *flags]) == 0
    assert "equal within rtol 1e-05 and atol 1e-08; largest difference 0\n" in capsys.readouterr().out


@pytest.mark.parametrize("ahead", [0, comparing.AHEAD])
def test_a_wrong_kernel_is_named(ahead: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first task of the first kind that is wrong, not those that it spoils: codelet, tiles read and written, difference, place, count."""
    monkeypatch.setattr(comparing, "AHEAD", ahead)

    def spoil(*tiles: Any) -> None:
        o = tiles[3]
        o[0, 5, 2] += 0.5
        o[0, 6, 1] -= 0.25

    plant("attention", spoil)
    assert main(["compare", "--a", "cpu", "--b", "sim", "small.json", "--json"]) == 1
    first = json.loads(capsys.readouterr().out)["first"]
    assert (first["name"], first["replay"], first["reads"]) == ("attention", 0, ["linear[0, 0, 0]"] * 3 + ["dropout key[0]"])
    (tile,) = first["tiles"]
    assert (tile["name"], tile["shape"], tile["dtype"], tile["index"]) == ("attention[0, 0, 0]", [1, 8, 12], "float32", [0, 5, 2])
    assert tile["largest"] == pytest.approx(0.5, abs=1e-6) == tile["b"] - tile["a"]
    assert (tile["num_beyond"], tile["num_elements"]) == (2, 96)
    assert main(["compare", "small.json"]) == 1
    out = capsys.readouterr().out
    assert "the first task that differs: attention, task " in out
    assert "of step 1\nit reads linear[0, 0, 0], linear[0, 0, 0], linear[0, 0, 0], dropout key[0]\n" in out
    assert "attention[0, 0, 0] [1, 8, 12] float32: largest difference 0.5 at [0, 5, 2], " in out
    assert "2 of 96 elements beyond rtol 1e-05 and atol 1e-08\n" in out


def test_what_a_task_updates_counts_as_read(capsys: pytest.CaptureFixture[str]) -> None:
    """A step of the optimizer reads the weight and the moments that it writes."""

    def spoil(*tiles: Any) -> None:
        tiles[0][...] += 1

    plant("adam", spoil)
    assert main(["compare", "--a", "cpu", "--b", "sim", "small.json", "--json"]) == 1
    first = json.loads(capsys.readouterr().out)["first"]
    assert first["name"] == "adam"
    assert first["tiles"][0]["name"] in first["reads"]


def test_tolerances(capsys: pytest.CaptureFixture[str]) -> None:
    """A small difference is equal or not, as the flags say; the largest one is told either way. NaN on one side is beyond any."""
    plant("fill", lambda out: np.multiply(out, 1 + 1e-3, out=out))  # first weights of the norms
    assert main(["compare", "small.json", "--rtol=0.5", "--atol=0.5", "--json"]) == 0
    assert 1e-4 < json.loads(capsys.readouterr().out)["largest_difference"] < 0.5
    assert main(["compare", "small.json", "--rtol=1e-4", "--json"]) == 1
    first = json.loads(capsys.readouterr().out)["first"]
    assert (first["name"], first["replay"], first["reads"]) == ("fill", None, [])
    plant("fill", lambda out: out.fill(np.nan))
    assert main(["compare", "small.json", "--rtol=1", "--atol=1e9", "--json"]) == 1
    (tile,) = json.loads(capsys.readouterr().out)["first"]["tiles"]
    assert (tile["largest"], tile["b"], tile["num_beyond"]) == ("inf", "nan", tile["num_elements"])


def test_runs_and_model_directories(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run with its weights and tiles, one of its checkpoints, and a directory as transformers writes it."""
    (here / "text.txt").write_text("some words, and some more\n" * 200)
    (here / "bytes.json").write_text(json.dumps({"model_type": "gpt2", **SMALL, "vocab_size": 257}))
    flags = (
        "--config-path=bytes.json --dataset=text --dataset-path=text.txt --tokenizer=bytes --batch=4 --minibatch=2 --embd-tile=5 --steps=2 --ncpu=1"
    )
    assert main(["train", *flags.split(), "--sample-tokens=0", "--run-dir=run"]) == 0
    write_model(here / "hub")
    capsys.readouterr()
    for word, tokens in (("run", "4 x 16"), ("run/latest", "4 x 16"), ("hub", "1 x 16")):
        assert main(["compare", word, "--rtol=0", "--atol=0"]) == 0
        assert f"{word}: 1 step of {tokens} tokens; " in capsys.readouterr().out
    read: list[Any] = []
    plant("embedding", lambda tokens, w, out: read.append(np.array(w)))
    assert main(["compare", "run", "--batch=2", "--seq-len=8"]) == 0
    assert "2 x 8 tokens" in capsys.readouterr().out
    from safetensors.numpy import load_file

    trained = load_file(here / "run" / "latest" / "model.safetensors")["wte.weight"]
    assert any(np.array_equal(each, trained[:, :5]) for each in read)
    assert main(["train", *flags.split(), "--train=lora:2", "--seed=5", "--sample-tokens=0", "--run-dir=beside"]) == 0
    read.clear()
    assert main(["compare", "beside", "--seed=1"]) == 0
    made = build(find_checkpoint("run").config, ModelTiling(), InlineRuntime(), seed=5).tensors()["wte.weight"].read()
    assert any(np.array_equal(each, made[:, :5]) for each in read)


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["small.json", "--b=cpu"], 2, "--a and --b must be two kinds of workers, got cpu for both; for example --b sim"),
        (["small.json", "--b=cuda"], 2, "--b must be one of cpu, sim, got 'cuda'"),
        (["smal"], 2, "MODEL must be a preset (tiny, gpt2, "),
        ([], 2, "nntask: compare needs MODEL"),
        (["small.json", "--rtol=-1"], 2, "--rtol must be 0 or more, and finite, got -1.0; the nearest legal value is 0"),
        (["small.json", "--atol=nan"], 2, "--atol must be 0 or more, and finite, got nan"),
        (["small.json", "--steps=0"], 2, "--steps must be at least 1, got 0"),
        (["small.json", "--seq-len=17"], 2, "--seq-len must be at most n_positions = 16, got 17"),
        (["empty"], 4, "empty holds no checkpoint"),
        (["small.json", "--ram=12KiB"], 3, "raise --ram (now 12KiB), or lower --batch or --seq-len"),
    ],
)
def test_mistakes(here: Path, capsys: pytest.CaptureFixture[str], argv: list[str], code: int, words: str) -> None:
    """One line: the rule, the value, what to do; nothing hangs when one side cannot run."""
    (here / "empty").mkdir()
    assert main(["compare", *argv]) == code
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_both_sides_run_one_captured_step() -> None:
    """Which is captured once, and planned for both."""
    assert count_calls(lambda: main(["compare", "small.json"]), Recorder.finish) == [1]


def test_a_kernel_that_raises_on_one_side_ends_both() -> None:
    """What it raised is told."""

    def broken(*tiles: Any) -> None:
        raise ZeroDivisionError("planted")

    plant("attention", broken)
    with pytest.raises(Exception, match="ZeroDivisionError: planted"):
        main(["compare", "small.json"])
