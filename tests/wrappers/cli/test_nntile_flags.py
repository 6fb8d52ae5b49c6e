"""NNTile's command line in `examples/gpt2_custom_training.py`: every flag of its table, its lines and its files."""

from __future__ import annotations

import json
import os
import runpy
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.commands import numbers, same_state, wait_for_step
from support.deadline import DEADLINE

from nntask.training import Session
from wrappers.cli import guarded, run_train
from wrappers.cli.options.flags import ELSEWHERE, scan, table_of

SCRIPT = Path(__file__).parents[3] / "examples" / "gpt2_custom_training.py"
EXAMPLE = SimpleNamespace(**runpy.run_path(str(SCRIPT)))
SMALL = {"model_type": "gpt2", "vocab_size": 257, "n_positions": 16, "n_embd": 12, "n_layer": 2, "n_head": 3}
FLAGS = "--config-path=small.json --dataset=text --dataset-path=text --tokenizer=bytes --batch=4 --minibatch=2 --lr=1e-3 --sample-tokens=0"
SHARED = {
    *("config-path", "tokenizer", "tokenizer-path", "batch", "minibatch", "minibatch-tile", "seq-tile", "embd-tile", "inner-tile", "head-tile"),
    *("vocab-tile", "dtype", "dataset", "dataset-path", "dataset-select", "optimizer-eps", "weight-decay", "lr"),
}
"""NNTile's flags that are nntask's, too."""
OPTIONS = sorted({option for action in EXAMPLE.parser()._actions for option in action.option_strings} - {"-h", "--help"})
TRANSLATED = [
    ("--optimizer=fusedadamw", {"optimizer": "adamw"}),
    ("--optimizer=sgd", {"optimizer": "sgd"}),
    ("--flashattention", {}),
    ("--no-flashattention", {"attention": "stored"}),
    ("--redux", {"lanes": 4}),
    ("--fp32-fast-tf32", {"dtype": "tf32"}),
    ("--restrict=none", {}),
    ("--restrict=cpu", {"ngpu": 0}),
    ("--restrict=cuda", {"ngpu": -1}),
    ("--start-lr=1e-5 --full-lr-iter=10", {"warmup-start-lr": 1e-5, "warmup-steps": 10}),
    ("--start_lr=1e-5 --full_lr_iter 10", {"warmup-start-lr": 1e-5, "warmup-steps": 10}),
    ("--start_lr=0", {}),
    ("--fp32-fast-tf32 --dtype=fp32", {"dtype": "tf32"}),
    ("--redux --lanes=4", {"lanes": 4}),
    ("--restrict=cuda --ngpu=2", {"ngpu": 2}),
    ("--full-lr-iter=5 --warmup-steps=0", {"warmup-start-lr": 0.0, "warmup-steps": 5}),
    ("--full-lr-iter=1", {"warmup-start-lr": 0.0, "warmup-steps": 1}),
    ("--nepochs=2 --nepochs-warmup=1", {"nepochs": 3}),
    ("--nforward=1 --nforward-warmup=1 --nbackward=1 --nbackward-warmup=1 --loss-reduction=sum", {}),
    ("--load-checkpoint=a --save-checkpoint=b --save-checkpoint-dtype=bf16", {}),
    ("--load-optimizer=a --save-optimizer=b --save-optimizer-dtype=fp16", {}),
]


@pytest.fixture
def here(folder: Path, text: Path) -> Path:
    """A directory with a small config and some text."""
    (folder / "small.json").write_text(json.dumps({**SMALL, "resid_pdrop": 0.1}))
    return folder


def run(*argv: str) -> int:
    """The exit code of the example."""
    code: int = EXAMPLE.main([*FLAGS.split(), "--ncpu=2", *argv])
    return code


def flags_of(words: str, environ: dict[str, str] | None = None) -> dict[str, Any]:
    """Flags of ``nntask train`` that NNTile's mean."""
    from nntask.config import TrainSettings

    args, rest = EXAMPLE.parsed(words.split())
    values, _ = scan(EXAMPLE.translated(args, rest, environ or {}), table_of(TrainSettings))
    return values


@pytest.mark.parametrize(("words", "values"), TRANSLATED)
def test_a_flag_of_nntile_is_translated(words: str, values: dict[str, Any]) -> None:
    """To the flags of ``nntask train``; those of habits are kept by the example."""
    assert flags_of(words) == values


def test_every_flag_of_nntile_is_known() -> None:
    """It is translated, shared, or answered with what to use instead."""
    from nntask.config import TrainSettings

    table = table_of(TrainSettings)
    known = {option.removeprefix("--") for action in EXAMPLE.parser()._actions for option in action.option_strings}
    tested = {word.removeprefix("--").partition("=")[0].replace("_", "-") for words, _ in TRANSLATED for word in words.split()}
    assert known - {"-h", "help", "no-redux", "no-fp32-fast-tf32"} <= tested
    assert set(table) >= SHARED
    assert {"logger", "logger-server-addr", "logger-server-port"} <= set(ELSEWHERE)
    assert flags_of("--restrict=cuda", {"STARPU_NCUDA": "2"}) == {}
    assert flags_of("--restrict=cuda", {"STARPU_NCUDA": "0"})["ngpu"] == -1


def test_the_lines_of_nntile(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Timed loops, amounts of data, summed losses, and the end; warm-up epochs train and do not count there."""
    (here / "text" / "more.txt").write_text("")
    argv = "--nepochs=1 --nepochs-warmup=1 --nforward=2 --nforward-warmup=1 --nbackward=1 --loss-reduction=sum --dataset-select=3 --run-dir=a"
    assert run(*argv.split(), "--minibatch-tile=2", "--optimizer-eps=1e-8", "--start-lr=0", "--full-lr-iter=4") == 0
    out = capsys.readouterr().out
    lines = (
        *("nntask forward time: ", "nntask forward throughput (tokens/sec):  ", "nntask forward performance: ", "nntask backward time: "),
        *("nntask backward throughput (tokens/sec):  ", "nntask backward performance: ", "Total train batches: ", "Total train sequences: "),
        *("Total train tokens: ", "Training time: ", "Training throughput tokens/sec: ", "Training performance: ", "Loss on the last batch: "),
    )
    places = [out.index(line) for line in lines]
    assert places == sorted(places)
    batches = int(out.partition("Total train batches: ")[2].partition("\n")[0])
    rows = [json.loads(line) for line in (here / "a" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * batches
    assert [row["lr"] for row in rows[:5]] == pytest.approx([0.0, 1e-3 / 3, 2e-3 / 3, 1e-3, 1e-3])
    assert rows[0]["loss"] == pytest.approx(64 * np.log(257), rel=0.05)
    timed = float(out.partition("Training time: ")[2].split()[0])
    assert timed == pytest.approx(sum(row["seconds"] for row in rows[batches:]))


def test_timed_loops_alone_train_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As in NNTile, where --nepochs is 0."""
    assert run("--nbackward=1", "--run-dir=a") == 0
    out = capsys.readouterr().out
    assert "nntask backward time: " in out
    assert "forward time" not in out.replace("backward", "")
    assert "step 1" not in out
    assert not (here / "a" / "checkpoints").exists()


def test_a_signal_ends_the_loops(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No pass begins after it, no further line is printed, and nothing is saved."""
    passes: list[str] = []
    before = signal.getsignal(signal.SIGINT)  # ignored in a process that a shell started in the background

    def stopped() -> bool:
        return len(passes) == 4

    assert EXAMPLE.seconds_of(lambda: passes.append("f"), 1, 2, stopped) is not None
    assert EXAMPLE.seconds_of(lambda: passes.append("b"), 0, 9, stopped) is None
    assert passes == ["f", "f", "f", "b"]
    assert signal.getsignal(signal.SIGINT) == before


def test_files_that_are_saved_are_loaded(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights and optimizer state, at the end and at the start, by any name; a run from both equals one from the checkpoint's."""
    assert run("--steps=2", "--run-dir=first", "--save-checkpoint=w", "--save-optimizer=o") == 0
    files = "--load-checkpoint=w --load-optimizer=o"
    assert run("--steps=3", "--run-dir=a", *files.split()) == 0
    assert run("--steps=1", "--run-dir=weights", "--load-checkpoint=w", "--save-checkpoint=new/dir/w", "--save-checkpoint-dtype=bf16") == 0
    assert "\nsaved new/dir/w\n" in capsys.readouterr().out
    assert {array.dtype.name for array in load_file(here / "new" / "dir" / "w").values()} == {"bfloat16"}
    assert run("--steps=2", "--run-dir=again", "--save-checkpoint=w2", "--save-optimizer=o2") == 0
    assert run("--steps=3", "--run-dir=b", "--load-checkpoint=w2", "--load-optimizer=o2") == 0
    assert same_state(here / "a" / "latest", here / "b" / "latest")
    assert numbers(here / "a")[0][1] == numbers(here / "weights")[0][1]
    capsys.readouterr()


def test_files_are_saved_without_a_checkpoint(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a run that saves none, the last weights; of timed loops alone, the initial ones."""
    assert run("--steps=2", "--save-every=0", "--run-dir=a", "--save-checkpoint=last", "--save-optimizer=state") == 0
    assert not list((here / "a").glob("checkpoints/*"))
    assert run("--steps=2", "--run-dir=b") == 0
    for name, part in (("last", "model"), ("state", "optimizer")):
        saved, kept = load_file(here / name), load_file(here / "b" / "latest" / f"{part}.safetensors")
        assert saved.keys() == kept.keys()
        assert all(np.array_equal(saved[key], kept[key]) for key in kept)
    assert run("--nforward=1", "--run-dir=c", "--save-checkpoint=initial") == 0
    assert load_file(here / "initial").keys() == load_file(here / "last").keys()
    assert not list((here / "c").glob("checkpoints/*"))
    capsys.readouterr()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_signal_after_the_last_step_loses_no_file(when: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A training that it cuts short writes no file, so that the continued one may; one that is complete writes them as without a signal."""

    def interrupted(session: Session) -> None:
        """Send a signal, and wait for its arrival."""
        os.kill(os.getpid(), signal.SIGINT)
        while not session.interrupts.pending():
            pass

    args, rest = EXAMPLE.parsed(
        [*FLAGS.split(), "--ncpu=1", "--steps=2", "--save-every=1", "--run-dir=a", "--save-checkpoint=w", "--save-optimizer=o"]
    )
    training = EXAMPLE.Training(args, trains=True)

    @contextmanager
    def around(session: Session) -> Iterator[None]:
        with training.around(session):
            if when == "before":
                interrupted(session)
            yield
            if when == "after":
                interrupted(session)

    assert guarded(lambda: run_train(EXAMPLE.translated(args, rest, {}), changed=training.changed, around=around)) == 130
    assert [(here / name).exists() for name in ("w", "o")] == [when == "after"] * 2
    if when == "after":
        for name, part in (("w", "model"), ("o", "optimizer")):
            saved, kept = load_file(here / name), load_file(here / "a" / "latest" / f"{part}.safetensors")
            assert all(np.array_equal(saved[key], kept[key]) for key in kept.keys() | saved.keys())
    capsys.readouterr()


@pytest.mark.parametrize("option", OPTIONS)
def test_a_slip_in_a_flag_of_nntile_is_recognised(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Two letters swapped; the message suggests the flag, whether NNTile alone has it or nntask, too."""
    slip = f"{option[:-2]}{option[-1]}{option[-2]}" if option[-1] != option[-2] else option[:-1]
    assert EXAMPLE.main([f"{slip}=1"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"nntask: unknown flag {slip}; did you mean ")
    assert option in err.removesuffix("?\n").split()


@pytest.mark.parametrize("word", ["--zzz", "--no-zzz=1", "--qqq_zzz"])
def test_a_flag_that_resembles_none_is_answered_with_the_help(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    """That of the example, which has its own flags, and names that of nntask train."""
    assert EXAMPLE.main([word]) == 2
    assert capsys.readouterr().err == f"nntask: unknown flag {word.partition('=')[0].replace('_', '-')}; see --help\n"


def test_an_interrupted_run_is_continued_by_the_example(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The line that it prints, typed, writes the files that the first command would have written."""
    words = [*FLAGS.split(), "--ncpu=2", "--steps=60", "--run-dir=a", "--save-checkpoint=w", "--save-checkpoint-dtype=bf16", "--loss-reduction=sum"]
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), *words], env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])}, stdout=subprocess.PIPE, text=True
    )
    wait_for_step(process, 1)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130
    line = out.partition("continue with: ")[2].partition("\n")[0]
    assert not (here / "w").exists()
    program, script, *rest = shlex.split(line)
    assert (program, Path(script)) == ("python", SCRIPT)
    assert EXAMPLE.main([*rest, "--ncpu=1"]) == 0
    assert {array.dtype.name for array in load_file(here / "w").values()} == {"bfloat16"}
    assert len((here / "a" / "metrics.jsonl").read_text().splitlines()) == 60


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        ("--restrict=cuda", 2, "--restrict=cuda needs a GPU"),
        ("--load-checkpoint=none", 4, "cannot read none: "),
        ("--load-optimizer=none", 4, "cannot read none: "),
        ("--load-checkpoint=pickle.pt", 4, "torch pickle"),
        ("--save-checkpoint=small.json", 2, "small.json exists; name another file, or remove it"),
        ("--save-optimizer=w.safetensors", 2, "w.safetensors exists; name another file, or remove it"),
        ("--save-checkpoint=small.json/w", 2, "small.json/w cannot be written"),
        (
            "--save-checkpoint=x --save-optimizer=./x",
            2,
            "--save-checkpoint and --save-optimizer must name two files, got x for both; name another one",
        ),
        ("--save-checkpoint=a/checkpoints/step-000001/model.safetensors", 2, "lies in a checkpoint"),
        ("--redux --lanes=2", 2, "--redux means --lanes 4, got --lanes 2; drop --redux"),
        ("--redux --lanes 2", 2, "--redux means --lanes 4, got --lanes 2; drop --redux"),
        ("--restrict=cuda --ngpu=0", 2, "--restrict=cuda needs a GPU, and --ngpu 0 uses none; drop one of them"),
        ("--restrict=cuda --sim-gpu=2@1GB/s", 2, "--restrict=cuda needs a GPU, and --sim-gpu 2@1GB/s uses none; drop one of them"),
        ("--restrict=cpu --ngpu=1", 2, "--restrict=cpu uses no GPU, got --ngpu 1; drop one of them"),
        ("--restrict=cpu --sim_gpu=1", 2, "--restrict=cpu leaves the 1 devices of --sim-gpu without work; drop one of them"),
        ("--fp32-fast-tf32 --dtype=bf16", 2, "--fp32-fast-tf32 means --dtype tf32, got --dtype bf16; drop one of them"),
        ("--no-flashattention --attention=cudnn", 2, "--no-flashattention means --attention stored, got --attention cudnn; drop one of them"),
        ("--flashattention --attention=stored", 2, "--flashattention stores no scores, and --attention stored does; drop one of them"),
        ("--full-lr-iter=5 --warmup-steps=5", 2, "--full-lr-iter 5 and --warmup-steps 5 are both warm-ups; drop one of them"),
        ("--full-lr-iter=1 --warmup-start-lr=0.1", 2, "--full-lr-iter 1 and --warmup-start-lr 0.1 are both warm-ups; drop one of them"),
        ("--full-lr-iter=0", 2, "--full-lr-iter must be at least 1, got 0; the nearest legal value is 1"),
        ("--full-lr-iter=x", 2, "--full-lr-iter: must be a whole number of 0 or more, got x; see --help"),
        ("--full-lr-iter=5 --start-lr=-1", 2, "--start-lr must be a finite number of at least 0, got -1"),
        ("--start-lr=0.1", 2, "--start-lr 0.1 is where the warm-up of --full-lr-iter begins; add --full-lr-iter"),
        ("--nforward=-1", 2, "--nforward: must be a whole number of 0 or more, got -1"),
        (
            "--train=lora:2 --save-checkpoint=w",
            2,
            "--save-checkpoint w writes the weights of a whole model, and --train lora:2 trains adapters; drop it, and",
        ),
        ("--train=lora:2 --save-optimizer=w", 2, "--save-optimizer w writes the optimizer state of a whole model"),
        ("--train=lora:2 --load-optimizer=w", 2, "--load-optimizer w reads the optimizer state of a whole model"),
        ("--nforward=1 --dask=local:2 --lanes=2", 2, "drop --dask"),
        ("--train=lora:2 --load-checkpoint=w", 2, "both say where to begin"),
        ("--logger", 2, "--logger is not offered: --report-to tensorboard"),
    ],
)
def test_mistakes_are_one_line(argv: str, code: int, words: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is computed or written."""
    (here / "pickle.pt").write_bytes(b"PK\x03\x04" + b"\0" * 30)
    save_file({"x": np.zeros(1)}, here / "w.safetensors")
    (here / "a" / "checkpoints" / "step-000001").mkdir(parents=True)
    (here / "a" / "checkpoints" / "step-000001" / "state.json").touch()
    assert run("--steps=1", *argv.split()) == code
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1
    assert not (here / "runs").exists()
