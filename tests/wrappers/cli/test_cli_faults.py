"""Runs beyond memory whose disk fails, vanishes or is shared, that are interrupted, or whose budgets are the smallest: exit codes and checkpoints."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.commands import numbers, start, wait_for_step
from support.deadline import DEADLINE
from support.fault_runs import FLAGS, prepare, undisturbed

from nntask.data import TokenFile
from nntask.hardware.runtimes import FoundNaN
from nntask.training import run
from scheduler import Codelet, Runtime, Shortage
from scheduler.core.errors import DoesNotFit, TierFailed
from scheduler.storage import DiskTier
from wrappers.cli import main

STEPS = 14
TRAIN = ["train", *FLAGS.split(), f"--steps={STEPS}"]
SMALL = ["--ram=192KiB", "--disk=tier", "--order=layers", "--recompute=none"]
"""A fifth of what a step needs, in an order that takes no search."""


@pytest.fixture
def here(folder: Path) -> Path:
    """A directory with what a run needs."""
    prepare(folder)
    return folder


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float, float, float]]:
    """Every line of the run where everything fits and nothing happens."""
    return undisturbed(tmp_path_factory.mktemp("truth"), TRAIN)


def broken(honest: Callable[..., None], code: int) -> Callable[..., None]:
    """Reads or writes of the tier that fail once the second step has been saved."""

    def carry_out(tier: DiskTier, *arguments: Any) -> None:
        if Path("a/checkpoints/step-000002").exists():
            raise OSError(code, os.strerror(code))
        honest(tier, *arguments)

    return carry_out


@pytest.mark.parametrize(("what", "code"), [("write", errno.ENOSPC), pytest.param("write", errno.EIO, marks=pytest.mark.long), ("read", errno.EIO)])
def test_a_disk_that_fails(here, truth, capsys, monkeypatch, what, code):
    """Exit 6, one sentence, the checkpoint before is whole, and its continuation ends as if nothing had happened."""
    with monkeypatch.context() as patch:
        patch.setattr(DiskTier, what, broken(getattr(DiskTier, what), code))
        assert main([*TRAIN, *SMALL, "--save-every=2", "--run-dir=a"]) == 6
    err = capsys.readouterr().err
    assert f"disk tier in tier: {os.strerror(code)}" in err
    assert "the newest checkpoint is a/checkpoints/step-000002; continue with: nntask train --resume a" in err
    assert err.count("\n") == 1
    assert os.readlink(here / "a" / "latest") == "checkpoints/step-000002"
    assert main(["train", "--resume=a", "--ram=64MiB"]) == 0
    assert numbers(here / "a") == truth


def shorten(file: TokenFile) -> None:
    """The file loses its end."""
    os.truncate(file.path, 20)


def break_disk(file: TokenFile) -> None:
    """Reads of the file fail with EIO from now on, as those of address 0 of a process do."""
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    os.dup2(memory, file._file.fd)
    os.close(memory)


def cut_short(honest: Callable[..., Any], reads: int, name: str, fault: Callable[[TokenFile], None] = shorten) -> Callable[..., Any]:
    """Reads of tokens; after so many of them, something happens to the file of that name."""
    left = reads

    def window(file: TokenFile, first: int, count: int) -> Any:
        nonlocal left
        if file.path.name == name:
            if left == 0:
                fault(file)
            left -= 1
        return honest(file, first, count)

    return window


@pytest.mark.parametrize(
    ("name", "reads", "fault", "flags", "saved"),
    [
        ("train.bin", 5 * 4, shorten, [], 5),
        ("train.bin", 5 * 4, shorten, ["--save-every=0"], 5),
        ("val.bin", 0, shorten, ["--eval-every=3", "--val-path=val.bin"], 3),
        ("train.bin", 5 * 4, break_disk, [], 5),
    ],
)
def test_data_that_are_lost(here, truth, capsys, monkeypatch, name, reads, fault, flags, saved):
    """Exit 4: the steps done are saved first, and once the file is restored the run goes on as if nothing had happened."""
    content = (here / "train.bin").read_bytes()
    (here / "val.bin").write_bytes(content)
    with monkeypatch.context() as patch:
        patch.setattr(TokenFile, "window", cut_short(TokenFile.window, reads, name, fault))
        assert main([*TRAIN, "--run-dir=a", *flags]) == 4
    err = capsys.readouterr().err
    assert (f"{name} became shorter while it was read" if fault is shorten else f"{name}: Input/output error") in err
    assert err.endswith(f"; the newest checkpoint is a/checkpoints/step-{saved:06d}; restore the data, then continue with: nntask train --resume a\n")
    (here / name).write_bytes(content)
    assert main(["train", "--resume=a"]) == 0
    assert numbers(here / "a") == truth


def test_data_that_become_shorter_before_the_first_step_is_done(here, capsys, monkeypatch):
    """There is nothing to continue, and the message says so."""
    monkeypatch.setattr(TokenFile, "window", cut_short(TokenFile.window, 0, "train.bin"))
    assert main([*TRAIN, "--run-dir=a"]) == 4
    assert "tokens were expected; restore the file; nothing was saved, so there is nothing to continue" in capsys.readouterr().err


def test_an_interrupt_while_memory_is_short(here, truth):
    """Evictions and fetches are under way all the time: exit 130, nothing is left on the disk, the continuation gives the same bits."""
    process = start(*TRAIN, *SMALL, "--run-dir=a")
    wait_for_step(process, 3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130, err
    assert "continue with: nntask train --resume a" in out
    assert not list((here / "tier").iterdir())
    done = len(numbers(here / "a"))
    assert 3 <= done < STEPS
    assert main(["train", "--resume=a", "--ram=64MiB"]) == 0
    assert numbers(here / "a") == truth


def test_runs_share_a_directory_that_vanishes(here, truth):
    """Two at once have one --disk directory, which is removed in the middle: neither notices."""
    processes = [start(*TRAIN[:-1], "--steps=5", *SMALL, f"--run-dir={name}") for name in "ab"]
    for process in processes:
        wait_for_step(process, 2)
    (here / "tier").rmdir()
    for process, name in zip(processes, "ab", strict=True):
        _, err = process.communicate(timeout=DEADLINE)
        assert process.returncode == 0, err
        assert numbers(here / name) == truth[:5]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (FoundNaN("planted"), 5),
        (DoesNotFit(Shortage("taken", "ram", 1, 0, task="planted")), 3),
        (TierFailed("data", "tier", "planted", reads=False), 6),
    ],
)
def test_what_fails_when_the_run_is_over(here, capsys, monkeypatch, error, code):
    """The runtime waits at its end; what it learns then has its exit code and one sentence, too."""

    def fail(view: Any) -> None:
        raise error

    def wait(runtime: Runtime) -> None:
        if code == 5:
            runtime.submit(Codelet("last", cpu=fail), [(runtime.handle(8, lambda *place: None), "W")])
            return honest(runtime)
        runtime._executor.failures.tier = error if code == 6 else None
        raise error

    honest = Runtime.wait
    monkeypatch.setattr(run, "run_loop", lambda running, explainer: monkeypatch.setattr(Runtime, "wait", wait))
    assert main([*TRAIN, "--run-dir=a"]) == code
    err = capsys.readouterr().err
    assert "planted" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "short"),
    [
        ("--ram={ram}B", "ram"),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (
                ("--ram={ram}B --disk=tier:{disk}B", "ram"),
                ("--ram={ram}B --disk=tier:{disk}B", "disk"),
                ("--ncpu=0 --sim-gpu=1 --gpu-memory={sim:0}B --ram={ram}B", "sim:0"),
            )
        ),
    ],
)
def test_what_plan_calls_the_minimum_trains_and_a_page_less_is_refused(here, truth, capsys, flags, short):
    """Exit 3 and the number, before a run directory is made; at the number two steps end with the right losses."""
    roomy = dict.fromkeys(("ram", "disk", "sim:0"), 1 << 30)
    common = [*TRAIN[:-1], "--order=submission"]

    def given(budgets: dict[str, int]) -> list[str]:
        text = flags
        for name, budget in budgets.items():
            text = text.replace("{" + name + "}", str(budget))
        return [*common, *text.split()]

    assert main(["plan", *given(roomy)[1:], "--json"]) == 0
    minimum = json.loads(capsys.readouterr().out)["minimum_budget_bytes"]
    budgets = {**roomy, **minimum}
    assert main([*given({**budgets, short: minimum[short] - 4096}), "--steps=6", "--run-dir=b"]) == 3
    assert f"{minimum[short]:,}" in capsys.readouterr().err
    assert not (here / "b").exists()
    assert main([*given(budgets), "--steps=2", "--run-dir=a"]) == 0
    assert numbers(here / "a") == truth[:2]


def test_a_budget_above_what_the_process_may_use(here, capsys):
    """Exit 3 and the number, before anything is built."""
    assert main([*TRAIN, "--ram=900TiB", "--run-dir=a"]) == 3
    err = capsys.readouterr().err
    assert "B of memory that this process may use" in err
    assert "--ram 900TiB" in err
    assert not (here / "a").exists()
