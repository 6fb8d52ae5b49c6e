"""Whole runs of the command: files they leave, signals, kills, full disks, divergence."""

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from support.commands import KILL, ROOT, numbers, same_state, start, wait_for_line, wait_for_step
from support.deadline import DEADLINE

from nntask.checkpoints.store import find_checkpoint
from nntask.optim import adamw8bit
from nntask.training.session import in_ranges
from wrappers.cli import main

SMALL = {"vocab_size": 257, "n_positions": 16, "n_embd": 12, "n_layer": 2, "n_head": 3, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
FLAGS = "--config-path=small.json --dataset=text --dataset-path=text --tokenizer=bytes --batch=4 --minibatch=2 --lr=1e-3 --ncpu=2 --sample-tokens=0"
TRAIN = ["train", *FLAGS.split()]


@pytest.fixture
def here(folder, text):
    """A directory with a small config and some text."""
    (folder / "small.json").write_text(json.dumps({"model_type": "gpt2", **SMALL}))
    return folder


def test_a_run_leaves_its_files(here, capsys):
    """Run directory and trace; the lines of the end; generate and report read the run; its weights are exported."""
    argv = "--steps=4 --run-dir=run --eval-every=2 --trace-steps=2:3@t.json.gz --sample-tokens=5"
    assert main([*TRAIN, *argv.split()]) == 0
    out = capsys.readouterr().out
    lines = (
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
    files = ".lock config.toml machine.json plan.json metrics.jsonl summary.json checkpoints latest"
    assert {p.name for p in run.iterdir()} == set(files.split())
    wanted = "steps tokens seconds tokens_per_second loss_first loss_last "
    wanted += "validation_loss_first validation_loss_last validation_loss_least validation_loss_least_step peak_bytes budget_bytes moved_bytes "
    wanted += "evictions stall_seconds hit_rate recomputed_tasks recompute_seconds skipped_tasks moved_bytes_around_steps evictions_around_steps "
    wanted += "stall_seconds_around_steps tasks tasks_per_step task_overhead_us fallbacks data workers versions bits_depend_on_schedule"
    summary = json.loads((run / "summary.json").read_text())
    assert " ".join(summary) == wanted
    assert (summary["steps"], summary["tokens"], summary["workers"]) == (4, 256, ["cpu:0", "cpu:1"])
    assert summary["fallbacks"] == {}  # every kernel runs on every worker that this version has
    events = json.loads(gzip.decompress((here / "t.json.gz").read_bytes()))["traceEvents"]
    assert any(e["ph"] == "X" for e in events)
    assert main(["export", "run", "w.safetensors", "--format=weights", "--dtype=bf16"]) == 0
    capsys.readouterr()
    assert {a.dtype.name for a in load_file(here / "w.safetensors").values()} == {"bfloat16"}
    assert main(["generate", "run", "--max-new-tokens=5", "--prompt=line", "--seed=3"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("line")
    assert main(["generate", "run/latest", "--max-new-tokens=5", "--prompt=line", "--seed=3", "--ncpu=1"]) == 0
    assert capsys.readouterr().out == first
    assert main(["generate", "run", "--max-new-tokens=5", "--prompt=line", "--seed=3", "--ram=64KiB"]) == 3
    least = re.search(r"; use --ram (\S+), or --disk DIR with ", capsys.readouterr().err)
    assert least is not None
    assert main(["generate", "run", "--max-new-tokens=5", "--prompt=line", "--seed=3", f"--ram={least[1]}"]) == 0
    assert capsys.readouterr().out == first
    assert main(["generate", "run", "--max-new-tokens=5", "--prompt=line", "--seed=3", "--ram=64KiB", "--disk=tier:1GiB"]) == 0
    assert capsys.readouterr().out == first
    assert not list((here / "tier").iterdir())
    assert main(["report", "run"]) == 0
    assert "Bokeh" in (run / "report.html").read_text()


def test_config_toml_repeats_the_run(here, capsys):
    """--config RUN/config.toml gives the same losses; a flag beside it is stronger."""
    assert main([*TRAIN, "--steps=3", "--run-dir=a"]) == 0
    assert main(["train", "--config=a/config.toml", "--run-dir=b"]) == 0
    losses = [[json.loads(line)["loss"] for line in Path(run, "metrics.jsonl").read_text().splitlines()] for run in ("a", "b")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3
    assert main(["train", "--resume=a", "--steps=4"]) == 0
    assert main(["train", "--config=a/config.toml"]) == 0
    (anew,) = (here / "runs").iterdir()
    assert numbers(anew) == numbers(here / "a")


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("--dtype=fp64 --optimizer=sgd:0.9", marks=pytest.mark.long),
        "--dtype=bf16 --optimizer=adam",
        "--optimizer=muon:0.9 --grad-clip=0.5",
        "--optimizer=adamw8bit",
        "--attention=stored --recompute=block --grad-clip=0.5",
        "--lanes=4",
    ],
)
def test_continuations_are_exact(here, capsys, flags, monkeypatch):
    """Five steps and a continuation equal ten steps bit by bit, with dropout, in every arithmetic, whatever the workers."""
    monkeypatch.setattr(adamw8bit, "LEAST", 256)
    flags = flags.split()
    assert main([*TRAIN, *flags, "--steps=6", "--run-dir=a"]) == 0
    assert main([*TRAIN, *flags, "--steps=3", "--run-dir=b"]) == 0
    assert main(["train", "--resume=b", "--steps=6", "--ncpu=1", "--sched=eager", "--sim-gpu=1"]) == 0
    assert same_state(here / "a" / "latest", here / "b" / "latest")
    assert numbers(here / "a") == numbers(here / "b")


@pytest.mark.parametrize("start", ["w.safetensors", "w.pt", "first", "first/checkpoints/step-000002"])
def test_a_run_that_began_from_files_continues(here, capsys, start):
    """--init-from takes exported weights of any name, a run and a checkpoint, with the same result; a continuation begins at its own checkpoint."""
    assert main([*TRAIN, "--steps=2", "--run-dir=first"]) == 0
    assert main(["export", "first", "w.safetensors", "--format=weights"]) == 0
    shutil.copy("w.safetensors", "w.pt")
    flags = [*TRAIN, "--init-from=w.safetensors"]
    assert main([*flags, "--steps=6", "--run-dir=a"]) == 0
    other = [flag for flag in TRAIN if "config" not in flag] if start.startswith("first") else TRAIN
    assert main([*other, f"--init-from={start}", "--steps=3", "--run-dir=b"]) == 0
    (here / "w.safetensors").unlink()
    assert main(["train", "--resume=b", "--steps=6"]) == 0
    assert same_state(here / "a" / "latest", here / "b" / "latest")
    assert numbers(here / "a") == numbers(here / "b")
    capsys.readouterr()
    assert main(["train", "--resume=b", "--steps=8", "--init-from=o.safetensors"]) == 2
    assert "both say where to begin" in capsys.readouterr().err


@pytest.mark.parametrize(("first", "last"), [(1, 1), (2, 4), *(pytest.param(*each, marks=pytest.mark.long) for each in ((3, 3), (5, 5)))])
def test_a_trace_of_some_steps_holds_their_tasks_and_no_others(here, capsys, first, last):
    """Every step of the range whole, each kind of task as often, with validation and checkpoints in between."""
    flags = f"--steps=5 --run-dir=a --eval-every=1 --save-every=2 --trace-steps={first}:{last}@t.json"
    assert main([*TRAIN, *flags.split()]) == 0
    per_step = int(capsys.readouterr().out.partition(" tasks a step")[0].rpartition(" ")[2])
    events = json.loads((here / "t.json").read_text())["traceEvents"]
    tasks = Counter(e["name"] for e in events if e["ph"] == "X" and e["pid"] == 1)
    steps = last - first + 1
    assert tasks.total() == steps * per_step
    assert all(count % steps == 0 for count in tasks.values())


@pytest.mark.parametrize(
    "flags",
    [
        "--ram=2MiB --disk=tier:1GiB --evict=lru --order=layers",
        pytest.param("--ram=2MiB --disk=tier --evict=next-use --order=eager-update --no-prefetch", marks=pytest.mark.long),
        "--sim-gpu=1@500MB/s --ncpu=0 --gpu-memory=1MiB --evict=fifo --order=submission",
    ],
)
def test_resources_change_no_loss(here, capsys, flags):
    """Disk, eviction, order, prefetch and device memory may differ, also between a run and its continuation."""
    assert main([*TRAIN, "--steps=4", "--run-dir=a"]) == 0
    assert main([*TRAIN, "--steps=2", "--run-dir=b", *flags.split()]) == 0
    assert main(["train", "--resume=b", "--steps=4", "--disk=other", "--no-prefetch", "--evict=lru", "--order=auto"]) == 0
    assert numbers(here / "a") == numbers(here / "b")


def test_a_kill_while_saving_costs_nothing(here):
    """Ten steps equal five, kill -9 during the next checkpoint, resume, five more: weights, optimizer, place in the data."""
    flags = ["--steps=10", "--save-every=5"]
    assert main([*TRAIN, *flags, "--run-dir=a"]) == 0
    process = start(*TRAIN, *flags, "--run-dir=b", script=KILL)
    process.communicate(timeout=DEADLINE)
    assert process.returncode == -signal.SIGKILL
    assert os.readlink(here / "b" / "latest") == "checkpoints/step-000005"
    assert main(["train", "--resume", "--run-dir=b"]) == 0
    assert same_state(here / "a" / "latest", here / "b" / "latest")
    assert numbers(here / "a") == numbers(here / "b")
    assert len(numbers(here / "b")) == 10


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long)])
def test_a_signal_saves_and_tells_how_to_continue(here, number, code):
    """Ctrl-C and SIGTERM let what is in flight finish; the command that is printed continues the run."""
    process = start(*TRAIN, "--steps=100000", "--run-dir=a")
    wait_for_step(process, 3)
    process.send_signal(number)
    out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == code, err
    command = out.rpartition("continue with: nntask ")[2].split()
    done = int(out.rpartition("interrupted after step ")[2].partition(";")[0])
    assert main([*command, f"--steps={done + 1}"]) == 0
    assert "Traceback" not in err


LAST = """
import os, signal, sys
def hook(event, args):
    if event == "os.rename" and str(args[1]).endswith("/step-000003"):
        os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(hook)
"""


def test_a_signal_during_the_last_checkpoint_finds_the_run_done(here):
    """Files and closing lines are there, no sample, no command that would be refused."""
    process = start(*TRAIN, "--steps=3", "--run-dir=a", "--sample-tokens=1000000", script=LAST)
    out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130, err
    assert "Loss on the last batch: " in out
    assert "continue with" not in out
    assert "--- sample" not in out
    assert (here / "a" / "latest" / "state.json").is_file()


def test_a_signal_ends_a_long_validation_and_a_long_sample(here):
    """Both look at the flag between batches and between tokens."""
    (here / "val.txt").write_text("a line of validation text\n" * 40_000)
    process = start(*TRAIN, "--steps=9", "--run-dir=a", "--val-path=val.txt", "--eval-every=1", "--eval-batches=1000000")
    wait_for_step(process, 1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130, err
    assert "validation loss" not in out
    assert "interrupted after step 1; continue with: nntask train --resume a" in out
    process = start(*TRAIN, "--steps=1", "--run-dir=b", "--tokenizer=bytes", "--sample-tokens=1000000")
    wait_for_line(process, "Loss on the last batch: ")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130, err
    assert "continue with" not in out


def test_a_continued_run_keeps_its_shape(here, capsys):
    """The message names the flag that was given, rather than a stored size of a tile that does not go with it."""
    assert main([*TRAIN, "--steps=1", "--run-dir=a"]) == 0
    for flag in ("--seq-len", "--batch", "--lr"):
        assert main(["train", "--resume=a", "--steps=2", f"{flag}=3"]) == 2
        err = capsys.readouterr().err
        assert f"but these differ: {flag} (was " in err
        assert "drop those flags, or start a new run" in err


ONE_BY_ONE = """
import nntask.training.signals as signals
signals.REPETITION_SECONDS = 0.0
"""
"""A repetition counts, however soon it comes."""

HANG = """
import nntask.training.loop as loop
whole = loop.Loop.save
def save(self):
    if not self.interrupts.pending():
        return whole(self)
    print("step 0/saving", flush=True)
    import threading
    threading.Event().wait()
loop.Loop.save = save
"""


@pytest.mark.parametrize(
    ("every", "words"),
    [
        pytest.param(0, "nothing was saved, so there is", marks=pytest.mark.long),
        (2, "nothing more was saved, the newest checkpoint is a/check"),
    ],
)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.long)])
def test_a_second_signal_stops_at_once(here, every, words, number, code):
    """While the first one's checkpoint does not come to an end, the second one ends the process and says what there is."""
    process = start(*TRAIN, "--steps=100000", "--run-dir=a", f"--save-every={every}", script=ONE_BY_ONE + HANG)
    wait_for_step(process, 3)
    process.send_signal(signal.SIGINT)
    wait_for_step(process, 0)
    process.send_signal(number)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == code
    assert f"nntask: stopped at once; {words}" in err


def test_a_directory_has_one_run_at_a_time(here, capsys):
    """A second run, new or continued, is refused and told who is there and what to do; a run that was killed is continued at once."""
    process = start(*TRAIN, "--steps=100000", "--save-every=2", "--run-dir=a")
    wait_for_step(process, 3)
    lines = (here / "a" / "config.toml").read_bytes()
    for flag, argv in (("--run-dir", [*TRAIN, "--run-dir=a"]), ("--resume", ["train", "--resume=a"]), ("--resume", ["train", "--resume=a/latest"])):
        assert main(argv) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"nntask: {flag} a is in use: process {process.pid} on ")
        assert f"wait for its end, stop it there with kill {process.pid}, or give another --run-dir" in err
        assert err.count("\n") == 1
    assert (here / "a" / "config.toml").read_bytes() == lines
    process.kill()
    process.communicate(timeout=DEADLINE)
    done = find_checkpoint(here / "a").step
    assert main(["train", "--resume=a", f"--steps={done + 1}"]) == 0


def test_timeout_sends_its_signal_twice_and_the_run_is_saved(here):
    """coreutils' timeout signals the process and then its whole group."""
    process = start(*TRAIN, "--steps=100000", "--run-dir=a", process_group=0)
    wait_for_step(process, 3)
    process.send_signal(signal.SIGTERM)
    os.killpg(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 143, err
    assert "stopped at once" not in err
    assert "continue with: nntask train --resume a" in out


SLOW_END = """
import threading
import scheduler.api.runtime as runtime
def close(self, *error):
    print("closing", flush=True)
    threading.Event().wait()
runtime.Runtime.__exit__ = close
"""


def test_a_second_signal_after_everything_was_saved(here):
    """It ends the process, and what it says is what the run has said before."""
    process = start(*TRAIN, "--steps=100000", "--run-dir=a", script=ONE_BY_ONE + SLOW_END)
    wait_for_step(process, 3)
    process.send_signal(signal.SIGINT)
    wait_for_line(process, "closing")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130
    done = find_checkpoint(here / "a").step
    assert err == f"nntask: stopped at once; interrupted after step {done}; continue with: nntask train --resume a\n"


EARLY = """
import threading
import nntask.training.session as session
def load(prepared, engine):
    print("loading", flush=True)
    threading.Event().wait()
session.load_weights = load
"""


ELSEWHERE = """
import signal, threading
import nntask.training.session as session
def load(prepared, engine):
    sleeps = threading.Event()
    def take_both():
        sleeps.wait()
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        threading.Event().wait()
    threading.Thread(target=take_both, daemon=True).start()
    sleeps.set()
    threading.Event().wait()
session.load_weights = load
"""


def test_signals_that_reach_another_thread_are_heard(here):
    """The main thread sleeps without limit, and the system gives both to a thread of ours: nobody wakes the one on which Python's handlers run."""
    assert main([*TRAIN, "--steps=2", "--run-dir=a"]) == 0
    process = start("train", "--resume=a", "--steps=4", script=ELSEWHERE)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 143
    assert "nntask: stopped at once; " in err


def test_a_second_signal_before_a_continuation_has_begun(here):
    """What was saved before is still there, and is named."""
    assert main([*TRAIN, "--steps=2", "--run-dir=a"]) == 0
    process = start("train", "--resume=a", "--steps=4", script=EARLY)
    wait_for_line(process, "loading")
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode in (130, 143)
    assert "nothing more was saved, the newest checkpoint is a/checkpoints/step-000002; continue with: nntask train --resume a" in err


WHEN_IMPORTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite that runs in the background inherits that it is ignored
class Finder:
    def find_spec(name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder)
"""


@pytest.mark.parametrize("name", ["numpy", "nntask", "nntask.errors", "scheduler.core.errors", "nntask.training.run", "wrappers.cli.commands.train"])
def test_a_signal_while_modules_are_imported(here, name):
    """One line and no traceback, also where the message of a mistake is on its way; ``python -m nntask`` imports nothing large before it listens."""
    process = start("train", "--bach=3" if "errors" in name else "--dry-run", script=WHEN_IMPORTED.format(name=name))
    _, err = process.communicate(timeout=DEADLINE)
    assert (process.returncode, err) == (130, "nntask: interrupted\n")
    code = "import sys, nntask; sys.exit(any(m in sys.modules for m in ('numpy', 'nntask.nn.autograd')))"
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False).returncode == 0


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
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 6
    assert "step-000002 is safe" in err
    assert err.count("\n") == 1
    assert main(["train", "--resume=a"]) == 0


FULL_JOURNAL = """
import os, resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
def hook(event, args):
    if event == "os.rename" and str(args[1]).endswith("/step-000002"):
        size = os.stat("a/metrics.jsonl").st_size + 10
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
sys.addaudithook(hook)
"""


def test_a_full_disk_that_meets_the_journal_first(here):
    """metrics.jsonl cannot grow, nor summary or trace be written: exit 6, one sentence about the first of them, and the run continues later."""
    process = start(*TRAIN, "--steps=6", "--save-every=2", "--run-dir=a", "--trace-steps=all@t.json", script=FULL_JOURNAL)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 6, err
    assert "cannot write a/metrics.jsonl: File too large; the checkpoint a/checkpoints/step-000002 is safe" in err
    assert err.count("\n") == 1
    assert main(["train", "--resume=a"]) == 0
    assert [step for step, *_ in numbers(here / "a")] == [1, 2, 3, 4, 5, 6]


def test_weights_that_are_not_finite_are_never_saved(here, capsys):
    """The loss and the norm of step 1 are finite, what its update makes of the weights is not."""
    code = main([*TRAIN, "--steps=1", "--optimizer=sgd", "--lr=1e300", "--warmup-steps=0", "--run-dir=a", "--save-every=1"])
    assert code == 5
    err = capsys.readouterr().err
    assert "holds values that are not finite" in err
    assert "lower --lr" in err
    assert [loss for _, loss, *_ in numbers(here / "a") if loss is not None]
    assert not list((here / "a").glob("checkpoints/*"))


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
    assert "40,960 B" in err
    assert "it would fit with --ram " in err
    assert "40,960" in err
    assert not (here / "a").exists()


@pytest.mark.long
def test_an_order_is_that_of_the_training_step_alone(here, capsys):
    """Validation and the sample have no such order and run all the same; the plan names the order of the run."""
    (here / "small.json").write_text(
        json.dumps({"model_type": "gpt2", "vocab_size": 257, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2})
    )
    flags = [*FLAGS.split(), "--minibatch=1", "--ram=400KB", "--disk=disk:100MB", "--order=turn:2/8"]
    assert main(["train", *flags, "--steps=2", "--run-dir=r", "--val-path=text", "--eval-every=1", "--eval-batches=1", "--sample-tokens=4"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"order: turn:2/8, forecast to move 0.0\d*[1-9]\d* GB and to take 0.0\d*[1-9]\d* s a step", out), "small, not nothing"
    assert "--- sample" in out
    assert main(["plan", *flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["order"] == "turn:2/8"
    assert main(["train", *flags, "--steps=1", "--run-dir=lru", "--evict=lru"]) == 0
    assert "order: turn:2/8, forecast under next-use to move" in capsys.readouterr().out


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


def test_devices_and_bench_print_json(capsys):
    """Both answer machines as well as people."""
    assert main(["devices", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cores"] >= 1
    assert main(["bench", "overhead", "--json", "--tasks=400"]) == 0
    fields = {"submitted_us_per_task", "replayed_us_per_task", "traced_replayed_us_per_task"}
    fields |= {"submitted_us_two_workers", "replayed_us_two_workers", "mixed_us_two_workers", "waited_us_two_workers"}
    assert fields <= set(json.loads(capsys.readouterr().out))


def test_many_workers_are_named_in_ranges():
    """Up to eight by name."""
    few = [f"cpu:{number}" for number in range(8)]
    assert in_ranges(few) == few
    assert in_ranges([*few, "cuda:0", "sim:0", "sim:1"]) == ["cpu:0..7", "cuda:0", "sim:0..1"]
