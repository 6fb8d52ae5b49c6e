"""Whole runs of the command: files they leave, signals, kills, full disks, divergence."""

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from wrappers.cli import main

ROOT = Path(__file__).parents[2]
SMALL = {"vocab_size": 257, "n_positions": 16, "n_embd": 12, "n_layer": 2, "n_head": 3, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
FLAGS = "--config-path=small.json --dataset=text --dataset-path=text --tokenizer=bytes --batch=4 --minibatch=2 --lr=1e-3 --ncpu=2 --sample-tokens=0"
TRAIN = ["train", *FLAGS.split()]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory of its own with a small config and some text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NNTASK_CACHE", str(tmp_path / "cache"))
    (tmp_path / "small.json").write_text(json.dumps(SMALL))
    (tmp_path / "text").mkdir()
    for i in range(25):
        (tmp_path / "text" / f"{i}.txt").write_text(f"line {i} of a text about the number {i * i}\n" * 20)
    return tmp_path


def start(*argv: str, script: str = "") -> subprocess.Popen[str]:
    """The command as a process of its own; `script` runs before it."""
    code = f"{script}\nimport sys\nfrom wrappers.cli import main\nsys.exit(main({list(argv)!r}))"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def wait_for_step(process: subprocess.Popen[str], step: int) -> None:
    """Read the process's output until it prints `step`."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(f"step {step}/"):
            return
    raise AssertionError(f"no step {step}: {process.stderr.read() if process.stderr else ''}")


def same_state(one: Path, other: Path) -> bool:
    """Whether two checkpoints hold the same bits and the same place in the data."""
    cursors = [json.loads((p / "state.json").read_text())["cursor"] for p in (one, other)]
    files = ("model.safetensors", "optimizer.safetensors")
    return cursors[0] == cursors[1] and all((one / f).read_bytes() == (other / f).read_bytes() for f in files)


def test_a_run_leaves_its_files(here, capsys):
    """Run directory, trace, weights; the lines of the timing loops and of the end; generate and report read the run."""
    argv = "--steps=4 --run-dir=run --nforward=2 --nforward-warmup=1 --nbackward=1 --eval-every=2 --trace=t.json.gz --trace-steps=2:3"
    assert main([*TRAIN, *argv.split(), "--save-checkpoint=w.safetensors", "--save-checkpoint-dtype=bf16", "--sample-tokens=5"]) == 0
    out = capsys.readouterr().out
    lines = (
        "forward time: ",
        "forward throughput (tokens/sec):  ",
        "forward performance: ",
        "backward time: ",
        "Total train batches: ",
        "Total train sequences: ",
        "Total train tokens: ",
        "step 1/4 | loss ",
        "validation loss ",
        "bits/byte",
        "Training time: ",
        "Training throughput tokens/sec: ",
        "Training performance: ",
        "Loss on the last batch: ",
        "--- sample",
    )
    places = [out.index(line) for line in lines]
    assert places == sorted(places)
    run = here / "run"
    assert {p.name for p in run.iterdir()} == {"config.toml", "metrics.jsonl", "summary.json", "checkpoints", "latest"}
    wanted = "steps tokens seconds tokens_per_second loss_first loss_last peak_bytes budget_bytes moved_bytes "
    wanted += "tasks task_overhead_us fallbacks workers versions"
    summary = json.loads((run / "summary.json").read_text())
    assert " ".join(summary) == wanted
    assert (summary["steps"], summary["tokens"], summary["workers"]) == (4, 256, ["cpu:0", "cpu:1"])
    events = json.loads(gzip.decompress((here / "t.json.gz").read_bytes()))["traceEvents"]
    assert any(e["ph"] == "X" for e in events)
    assert {a.dtype.name for a in load_file(here / "w.safetensors").values()} == {"bfloat16"}
    assert main(["generate", "run", "--max-new-tokens=5", "--prompt=line", "--seed=3"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("line")
    assert main(["generate", "run/latest", "--max-new-tokens=5", "--prompt=line", "--seed=3", "--ncpu=1"]) == 0
    assert capsys.readouterr().out == first
    assert main(["report", "run"]) == 0
    assert "<svg" in (run / "report.html").read_text()


def test_config_toml_repeats_the_run(here, capsys):
    """--config RUN/config.toml gives the same losses; a flag beside it is stronger."""
    assert main([*TRAIN, "--steps=3", "--run-dir=a"]) == 0
    assert main(["train", "--config=a/config.toml", "--run-dir=b"]) == 0
    losses = [[json.loads(line)["loss"] for line in Path(run, "metrics.jsonl").read_text().splitlines()] for run in ("a", "b")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3


@pytest.mark.parametrize(
    "flags",
    [
        "--dtype=fp64 --optimizer=sgd --momentum=0.9",
        "--dtype=bf16 --optimizer=adam",
        "--no-flashattention --recompute=block --grad-clip=0.5",
        "--redux",
    ],
)
def test_continuations_are_exact(here, capsys, flags):
    """Five steps and a continuation equal ten steps bit by bit, with dropout, in every arithmetic, whatever the workers."""
    flags = flags.split()
    assert main([*TRAIN, *flags, "--steps=6", "--run-dir=a"]) == 0
    assert main([*TRAIN, *flags, "--steps=3", "--run-dir=b"]) == 0
    assert main(["train", "--resume=b", "--steps=6", "--ncpu=1", "--sched=eager", "--sim-gpu=1"]) == 0
    assert same_state(here / "a" / "latest", here / "b" / "latest")


KILL = """
import os, signal, sys
def hook(event, args):
    if event == "os.rename" and "step-000010" in str(args[1]):
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
"""


def test_a_kill_while_saving_costs_nothing(here):
    """Ten steps equal five, kill -9 during the next checkpoint, resume, five more: weights, optimizer, place in the data."""
    flags = ["--steps=10", "--save-every=5"]
    assert main([*TRAIN, *flags, "--run-dir=a"]) == 0
    process = start(*TRAIN, *flags, "--run-dir=b", script=KILL)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert os.readlink(here / "b" / "latest") == "checkpoints/step-000005"
    assert main(["train", "--resume", "--run-dir=b"]) == 0
    assert same_state(here / "a" / "latest", here / "b" / "latest")
    assert len((here / "b" / "metrics.jsonl").read_text().splitlines()) == 10


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_tells_how_to_continue(here, number, code):
    """Ctrl-C and SIGTERM let what is in flight finish; the command that is printed continues the run."""
    process = start(*TRAIN, "--steps=100000", "--run-dir=a")
    wait_for_step(process, 3)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    command = out.rpartition("continue with: nntask ")[2].split()
    done = int(out.rpartition("interrupted after step ")[2].partition(";")[0])
    assert main([*command, f"--steps={done + 1}"]) == 0
    assert "Traceback" not in err


HANG = """
import nntask.trainer.loop as loop
def save(self):
    print("step 0/saving", flush=True)
    import threading
    threading.Event().wait()
loop.Loop.save = save
"""


def test_a_second_signal_stops_at_once(here):
    """While the first one's checkpoint does not come to an end, the second one ends the process."""
    process = start(*TRAIN, "--steps=100000", "--run-dir=a", script=HANG)
    wait_for_step(process, 2)
    process.send_signal(signal.SIGINT)
    wait_for_step(process, 0)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130


FULL = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
def hook(event, args):
    if event == "os.mkdir" and "step-000004" in str(args[0]):
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
sys.addaudithook(hook)
"""


def test_a_full_disk_keeps_the_checkpoint_before(here):
    """No room for the checkpoint of step 4: exit 6, one sentence, and the run continues from step 2 once there is room."""
    process = start(*TRAIN, "--steps=6", "--save-every=2", "--run-dir=a", script=FULL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 6
    assert "step-000002 is safe" in err
    assert err.count("\n") == 1
    assert main(["train", "--resume=a"]) == 0


@pytest.mark.parametrize(("extra", "words"), [([], "--check-finite names"), (["--check-finite"], "wrote the first NaN, to tile")])
def test_divergence_ends_with_5_and_keeps_the_last_good_checkpoint(here, capsys, extra, words):
    """A NaN is never saved; with --check-finite the task and tile that made it are named."""
    code = main([*TRAIN, "--steps=200", "--lr=1e9", "--warmup-steps=0", "--save-every=1", "--run-dir=a", *extra])
    assert code == 5
    assert words in capsys.readouterr().err
    import numpy as np

    assert all(np.isfinite(a).all() for a in load_file(here / "a" / "latest" / "model.safetensors").values())


def test_a_budget_that_is_too_small_ends_with_3(here, capsys):
    """The task, its bytes, the budget and the flags that help are named, and no run directory is left."""
    assert main([*TRAIN, "--steps=2", "--ram=40KiB", "--run-dir=a"]) == 3
    err = capsys.readouterr().err
    assert "raise --ram" in err
    assert "40,960" in err
    assert not (here / "a").exists()


def test_dry_runs_and_plans_write_nothing(here, capsys):
    """--dry-run prints the resolved configuration; plan prints JSON with the documented fields."""
    assert main([*TRAIN, "--steps=2", "--dry-run"]) == 0
    assert "minibatch_tile = 1" in capsys.readouterr().out
    assert not (here / "runs").exists()
    assert main(["plan", *FLAGS.split(), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    for field in ["feasible", "peak_bytes", "minimum_budget_bytes", "persistent_bytes", "moved_bytes_per_step", "tasks_per_step", "seconds_per_step"]:
        assert field in plan
    assert plan["persistent_bytes"]["ram"] < plan["peak_bytes"]["ram"]


def test_the_command_of_the_nearest_relative_runs(here, capsys):
    """NNTile's flags, as its users type them, on a small model and without a GPU."""
    argv = (
        "--config-path=small.json --tokenizer=bytes --batch=4 --minibatch=2 --minibatch-tile=2 --seq-tile=16 --embd-tile=12 "
        "--inner-tile=48 --head-tile=3 --flashattention "
        "--nforward=1 --nforward-warmup=1 --nbackward=1 --nbackward-warmup=1 --dataset=text --dataset-path=text --dataset-select=4 "
        "--optimizer=fusedadamw --optimizer-eps=1e-8 --weight-decay=0.1 --loss-reduction=mean --lr=3e-4 --start-lr=0 --full-lr-iter=10 --nepochs=1 "
        "--nepochs-warmup=1 --sample-tokens=0"
    )
    from examples import gpt2_custom_training  # noqa: F401 - the script is importable

    assert main(["train", *argv.split()]) == 0
    out = capsys.readouterr().out
    batches = int(out.partition("Total train batches: ")[2].partition("\n")[0])
    assert f"step {2 * batches}/{2 * batches} |" in out


def test_devices_and_bench_print_json(capsys):
    """Both answer machines as well as people."""
    assert main(["devices", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cores"] >= 1
    assert main(["bench", "overhead", "--json", "--tasks=400"]) == 0
    fields = {"submitted_us_per_task", "replayed_us_per_task", "submitted_us_two_workers", "replayed_us_two_workers"}
    assert fields <= set(json.loads(capsys.readouterr().out))
