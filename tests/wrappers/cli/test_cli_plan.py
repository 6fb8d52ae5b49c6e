"""``nntask plan``, ``bench`` and ``devices`` as commands: JSON keys, tables, exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.commands import refuse

from nntask.io.units import parse_size
from tiles.kernels.cpu.onednn import library as onednn
from wrappers.cli import main
from wrappers.cli.bench import BENCHMARKS
from wrappers.cli.commands.plan import _result

SMALL = {"vocab_size": 257, "n_positions": 16, "n_embd": 12, "n_layer": 2, "n_head": 3, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
KEYS = ["feasible", "peak_bytes", "minimum_budget_bytes", "persistent_bytes", "moved_bytes_per_step", "tasks_per_step", "seconds_per_step"]


@pytest.fixture
def config(folder: Path) -> str:
    """The flag of a small model, in a directory of its own."""
    (folder / "small.json").write_text(json.dumps({"model_type": "gpt2", **SMALL}))
    return "--config-path=small.json"


def test_plan_json_and_table(config: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The documented keys come first; the table says the same in words; nothing is written."""
    flags = ["plan", config, "--batch=2", "--minibatch=1", "--ram=300KiB", "--disk=scratch:100MB", "--ncpu=2"]
    assert main([*flags, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert list(plan)[: len(KEYS)] == KEYS
    assert plan["feasible"]
    assert set(plan["moved_bytes_per_step"]) <= {"ram->disk", "disk->ram"}
    assert set(plan["budget_bytes"]) == {"ram", "disk"}
    assert main(flags) == 0
    out = capsys.readouterr().out
    for word in (
        "parameters",
        "at once if nothing moves",
        "forecast about",
        "GB per step, simulated",
        "busy, simulated",
        "budget 300 KiB",
        "(chosen",
        "seconds per step",
        "feasible            yes",
    ):
        assert word in out
    assert [path.name for path in tmp_path.iterdir()] == ["small.json"]


@pytest.mark.parametrize("feasible", [True, False])
def test_the_largest_model_is_of_the_family(feasible: bool) -> None:
    """The line says so, since presets of other families are not tried."""
    figures = {"largest_minibatch": None, "largest_model": "gpt2", "batch": 2, "seq_len": 16, "feasible": feasible, "refusal": "", "advice": ()}
    assert next(_result(figures)).startswith("largest --model     gpt2 of this family, with --batch 2 --seq-len 16 or less")


def test_a_plan_that_does_not_fit_ends_with_3(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What it needs is printed all the same, and no forecast; the sentence names the numbers and what would fit."""
    assert main(["plan", config, "--batch=2", "--ram=100KiB", "--json"]) == 3
    captured = capsys.readouterr()
    plan = json.loads(captured.out)
    assert (plan["feasible"], plan["forecast_bytes"], plan["forecast_seconds"], plan["seconds_per_step"]) == (False, None, None, None)
    assert "102,400 B" in captured.err
    assert "it would fit with" in captured.err
    assert captured.err.count("\n") == 1


def test_a_plan_that_does_not_fit_chooses_nothing(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No order is chosen for a step that cannot run, and the model that would fit is another one."""
    assert main(["plan", config, "--batch=2", "--ram=16KiB", "--disk=scratch:100MB"]) == 3
    out = capsys.readouterr().out
    assert "feasible            no: " in out
    for word in ("(chosen", "forecast", "everything fits", "peak", "seconds"):
        assert word not in out


@pytest.mark.parametrize("flags", [["--ram=1KB"], ["--ram=16KiB", "--disk=scratch:100MB"], ["--ram=1KB", "--batch=2"]], ids=" ".join)
def test_a_plan_that_fits_in_no_order_is_told_before_a_search(flags: list[str], config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The figures are those of the submission order with nothing made again, which takes no search."""
    assert main(["plan", config, "--batch=4", "--minibatch=1", *flags, "--json"]) == 3
    plan = json.loads(capsys.readouterr().out)
    assert (plan["order"], plan["recompute"], plan["values"], plan["forecast_bytes"]) == ("submission", "none", [], None)
    assert plan["tasks_per_step"] == sum(plan["tasks_by_name"].values())


def test_the_least_budgets_of_the_table_are_enough(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Typed back as they are printed, the step fits."""
    flags = ["plan", config, "--batch=2", "--devices=1x4MiB"]
    assert main([*flags, "--ram=16KiB", "--disk=100MB"]) == 0
    found = re.findall(r"^(ram|disk) +budget .*?, at least ([\d.]+ \w+) \(([\d,]+ B)\)", capsys.readouterr().out, re.MULTILINE)
    assert {name for name, *_ in found} == {"ram", "disk"}
    for at in (1, 2):  # in large units, and to the byte
        assert main([*flags, *(f"--{name}={sizes[at - 1]}" for name, *sizes in found)]) == 0


def test_a_device_without_room_for_a_task_is_refused(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By plan as by train, with the least that will do; one that has that much and is sent nothing peaks at nothing."""
    flags = ["plan", config, "--batch=2", "--ncpu=1", "--sim-gpu=2", "--json"]
    assert main([*flags, "--gpu-memory=60"]) == 3
    found = re.search(
        r"the smallest task that computes needs [\d,]+ B, more than the 60 B of sim:0, .* fit with (--gpu-memory) (\S+)\n", capsys.readouterr().err
    )
    assert found is not None
    assert main([*flags, f"--gpu-memory={found[2]}"]) == 0
    least = json.loads(capsys.readouterr().out)["minimum_budget_bytes"]
    assert parse_size(found[2], "--gpu-memory") >= least["sim:0"]
    assert least["ram"] > least["sim:0"]
    assert main([*flags, f"--gpu-memory={least['sim:0']}B"]) == 0
    assert main([*flags, f"--gpu-memory={least['sim:0'] - 1}B"]) == 3
    capsys.readouterr()
    assert main(["plan", config, "--batch=1", "--devices=16x4MiB", "--link=1KB/s", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert min(plan["peak_bytes"].values()) == 0


def test_devices_that_are_alike_share_a_line(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As workers and as memories; in --json each has its own figures. There are not more than a plan goes through in a minute."""
    assert main(["plan", config, "--batch=2", "--minibatch=1", "--devices=4x4MiB@1TF"]) == 0
    out = capsys.readouterr().out
    assert "workers             4 x sim@gpu:0..3; policy" in out
    assert (
        re.findall(r"^gpu:\S* +budget 4 MiB, at least .*, peak at most ", out, re.MULTILINE)
        == re.findall(r"^gpu:0\.\.3 .*at most ", out, re.MULTILINE)
        != []
    )
    assert main(["plan", config, "--batch=2", "--devices=4x4MiB", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["budget_bytes"]) == ["ram", "gpu:0", "gpu:1", "gpu:2", "gpu:3"]
    assert main(["plan", config, "--devices=1000x4MiB"]) == 2
    assert "--devices must be at most 64, because each has a memory and links" in capsys.readouterr().err


def test_imaginary_devices_by_flag(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--devices, --ram and --link describe the machine; --link alone is a mistake."""
    assert main(["plan", config, "--batch=2", "--devices=2x4MiB@1TF", "--ram=1GiB", "--link=1GB/s", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["budget_bytes"] == {"ram": 1 << 30, "gpu:0": 4 << 20, "gpu:1": 4 << 20}
    assert main(["plan", config, "--link=1GB/s"]) == 2
    assert "--link 1GB/s is about imaginary devices" in capsys.readouterr().err
    assert (plan["link_bytes_per_second"], plan["disk_bytes_per_second"]) == (1e9, None)
    assert main(["plan", config, "--devices=many"]) == 2
    capsys.readouterr()
    assert main(["plan", config, "--devices=2x4MiB", "--sim-gpu=2@1GB", "--gpu-memory=1MiB"]) == 2
    assert "--sim-gpu 2@1GB is about this machine, and --devices 2x4MiB is another one" in capsys.readouterr().err
    assert main(["plan", config, "--devices=2x4MiB", "--sim-gpu=0@1GB/s"]) == 2
    assert "--sim-gpu 0@1GB/s is about this machine, and --devices 2x4MiB is another one" in capsys.readouterr().err


@pytest.mark.parametrize("name", list(BENCHMARKS))
def test_the_usage_line_of_a_benchmark_is_what_it_takes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its name once, then flags; a word behind it is refused."""
    with pytest.raises(SystemExit) as end:
        main(["bench", name, "--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: nntask bench {name} [-h] [")
    assert main(["bench", name, "again"]) == 2
    assert "unexpected word 'again'" in capsys.readouterr().err


def test_the_disk_of_an_imaginary_machine_has_a_rate(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--disk-rate is that of all requests together, printed with the links'; a slower disk takes longer, and a rate of no disk is a mistake."""
    flags = ["plan", config, "--batch=2", "--minibatch=1", "--devices=1x192KiB@1GF", "--ram=128KiB", "--disk=scratch:1GiB", "--recompute=none"]
    seconds = []
    for rate, nbytes in (([], 1.6e9), (["--disk-rate=20MB/s"], 20e6)):
        assert main([*flags, *rate, "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert (plan["link_bytes_per_second"], plan["disk_bytes_per_second"]) == (25e9, nbytes)
        seconds.append((plan["seconds_per_step"], plan["forecast_seconds"][plan["order"]]))
    assert seconds[1][0] > seconds[0][0]
    assert seconds[1][1] > seconds[0][1]
    assert main([*flags, "--disk-rate=6GB/s"]) == 0
    assert "rates               25 GB/s between RAM and each device, in each direction; disk 6 GB/s, all requests together" in capsys.readouterr().out
    for wrong, words in (
        (["plan", config, "--disk-rate=6GB/s"], "--disk-rate 6GB/s is about the disk of an imaginary machine, and this one's is measured"),
        (["plan", config, "--devices=1x4MiB", "--disk-rate=6GB/s"], "--disk-rate 6GB/s is about the disk of an imaginary machine and it has none"),
        ([*flags, "--disk-rate=quick"], "--disk-rate must be bytes per second, got 'quick'"),
    ):
        assert main(wrong) == 2
        assert words in capsys.readouterr().err


def test_updates_by_cpu_workers_are_planned(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan says who updates, and why if that was open; --ram-rate says how fast, and is a mistake where nobody asks."""
    flags = ["plan", config, "--devices=1x4MiB@1TF", "--batch=2", "--minibatch=1"]
    assert main([*flags, "--update-on=cpu", "--ncpu=2"]) == 0
    out = capsys.readouterr().out
    assert "weights             updated by CPU workers in RAM\n" in out
    assert "workers             1 x sim@gpu:0, 2 x cpu@ram; policy" in out
    assert main([*flags, "--update-on=auto", "--ram-rate=1MB/s"]) == 0
    assert "weights             updated where devices compute (chosen: " in capsys.readouterr().out
    for argv, sentence in (
        (["plan", config, "--ram-rate=1GB/s"], "--ram-rate 1GB/s is about the RAM of an imaginary machine, and this one's is measured"),
        ([*flags, "--ram-rate=1GB/s"], "--ram-rate 1GB/s is about updates by CPU workers, and in this plan devices update; add --update-on auto"),
        ([*flags, "--ram-rate=quick", "--update-on=cpu"], "--ram-rate must be bytes per second, got 'quick'"),
        ([*flags, "--update-on=gpu"], "--update-on"),
        ([*flags, "--update-on=cpu", "--ncpu=0"], "--update-on cpu needs CPU workers, and --ncpu 0 leaves none; use --ncpu 1, or --update-on device"),
        (["train", config, "--dask=local:2", "--lanes=2", "--update-on=auto"], "--update-on auto is for one machine"),
    ):
        assert main(argv) == 2
        assert sentence in capsys.readouterr().err


def test_the_disk_of_an_imaginary_machine_is_a_size(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--disk 2TB is as large as that; memory that does not say is boundless; on this machine a size is no directory."""
    flags = ["plan", config, "--batch=2", "--devices=1x4MiB"]
    assert main([*flags, "--disk=2TB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["budget_bytes"]["disk"] == 2 * 10**12
    assert main([*flags, "--disk=2TB"]) == 0
    out = capsys.readouterr().out
    assert "ram                 budget boundless, at least" in out
    assert re.search(r"^disk                budget 1\.82 TiB, at least .*, reserved ", out, re.MULTILINE)
    assert main(["plan", config, "--disk=2TB"]) == 2
    assert "--disk must be DIR or DIR:SIZE, got '2TB', which is a size" in capsys.readouterr().err
    assert main([*flags, "--disk=1XB"]) == 2
    assert "--disk must be SIZE or DIR:SIZE of an imaginary machine, got '1XB'; for example --disk 2TB" in capsys.readouterr().err


@pytest.mark.parametrize("budget", ["--ram=1000TiB", "--disk=scratch:1000TiB", "--sim-gpu=1 --gpu-memory=1000TiB"])
def test_a_budget_that_this_machine_lacks_may_be_of_another(config: str, capsys: pytest.CaptureFixture[str], budget: str) -> None:
    """The refusal of a plan names --devices, with which the same budgets are planned; that of a training does not, nor a step that is too large."""
    flags, advice = [config, "--batch=2", *budget.split()], "or plan for another machine with --devices, such as 8x80GiB@150TF"
    assert main(["plan", *flags]) == 3
    assert capsys.readouterr().err.endswith(f", {advice}\n")
    assert main(["train", *flags, "--steps=1"]) == 3
    assert "--devices" not in capsys.readouterr().err
    if "gpu" not in budget:
        assert main(["plan", *flags, "--devices=8x80GiB@150TF"]) == 0
    assert main(["plan", config, "--batch=2", "--ram=100KiB", "--disk=scratch:1MB"]) == 3
    assert "--devices" not in capsys.readouterr().err


def test_an_order_that_was_given_is_not_called_chosen(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a given order the table says that it was given."""
    flags = ["plan", config, "--batch=2", "--minibatch=1", "--ram=300KiB", "--disk=scratch:100MB", "--ncpu=2", "--order=layers"]
    assert main(flags) == 0
    out = capsys.readouterr().out
    assert [line.split()[1] for line in out.splitlines() if line.endswith("(given)")] == ["layers"]
    assert not any("(chosen" in line for line in out.splitlines() if line.startswith("order"))


@pytest.mark.parametrize(
    ("flags", "helps"),
    [
        pytest.param(["--devices=1x64KiB"], ["--devices"], marks=pytest.mark.long),
        (["--devices=1x4MiB", "--ram=300KiB"], ["--ram", "--disk"]),
        (["--devices=1x4MiB", "--ram=300KiB", "--disk=200KiB"], ["--disk"]),
    ],
)
def test_what_an_imaginary_machine_lacks(config: str, flags: list[str], helps: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Larger devices, RAM or disk, as texts of these flags; nothing of this machine's devices and directories."""
    assert main(["plan", config, "--batch=2", *flags, "--json"]) == 3
    captured = capsys.readouterr()
    figures = json.loads(captured.out)
    advice, lack = figures["advice"], figures["shortage"]
    assert lack["budget"] == figures["budget_bytes"][lack["node"]]
    assert f"{lack['needed']:,} B" in figures["refusal"]
    assert all(change.startswith(f"{words} ") for change, words in zip(advice, helps, strict=False))
    assert len(advice) >= len(helps)
    assert not any(word in captured.err for word in ("DIR", "--gpu-memory", "--sim-gpu", "CuPy"))


@pytest.mark.parametrize("flag", ["--ngpu=1", "--gpu-memory=1GiB", "--ngpu=-1", "--ngpu=1x2"])
def test_devices_of_this_machine_say_nothing_of_another(config: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They are refused beside --devices, with what to give instead, typed or in the TOML file; --ncpu 0 and --ngpu 0 are what such a machine has."""
    words = "about this machine, and --devices 1x4MiB is another one; give its devices, and their memory, with --devices"
    assert main(["plan", config, "--devices=1x4MiB", "--ncpu=0", flag]) == 2
    assert words in capsys.readouterr().err
    name, _, value = flag.removeprefix("--").partition("=")
    Path("run.toml").write_text(f"{name.replace('-', '_')} = {value if value.isdigit() else json.dumps(value)}\n")
    assert main(["plan", config, "--devices=1x4MiB", "--config=run.toml"]) == 2
    assert words in capsys.readouterr().err
    assert main(["plan", config, "--devices=1x4MiB", "--ncpu=0", "--ngpu=0", "--sim-gpu=0"]) == 0


def test_the_environment_is_about_this_machine(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its GPUs and their memory say nothing of imaginary devices, and are no mistake of whoever asks for these."""
    for name, value in (("NNTASK_GPU_MEMORY", "1GiB"), ("STARPU_NCUDA", "0")):
        monkeypatch.setenv(name, value)
        assert main(["plan", config, "--devices=1x4MiB"]) == 0
        assert main(["plan", config, "--devices=1x4MiB", "--gpu-memory=1GiB"]) == 2


def test_a_resumed_run_is_planned_on_other_devices(config: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The devices that it had are no mistake there, and those that are typed are one."""
    data = ["--dataset=train.bin", "--dataset-path=.", "--sample-tokens=0"]
    np.random.default_rng(0).integers(0, SMALL["vocab_size"], 5000).astype(np.uint16).tofile(folder / "train.bin")
    assert main(["train", config, *data, "--steps=1", "--batch=1", "--sim-gpu=1", "--ncpu=0", "--gpu-memory=4MiB", "--run-dir=run"]) == 0
    assert main(["plan", "--resume=run", "--devices=1x4MiB"]) == 0
    capsys.readouterr()
    assert main(["plan", "--resume=run", "--devices=1x4MiB", "--gpu-memory=1GiB"]) == 2
    assert "--gpu-memory 1GiB is about this machine, and --devices 1x4MiB is another one" in capsys.readouterr().err


def test_a_disk_of_this_machine_is_none_of_another_one(config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory in the environment; its size is taken over, and one that is typed is a mistake."""
    flags = ["plan", config, "--batch=2", "--devices=1x4MiB", "--json"]
    for said, is_there in (("scratch", False), ("scratch:1GB", True)):
        monkeypatch.setenv("NNTASK_DISK", said)
        assert main(flags) == 0
        assert ("disk" in json.loads(capsys.readouterr().out)["budget_bytes"]) == is_there
    assert main([*flags, "--disk=scratch"]) == 2
    assert "--disk must be SIZE or DIR:SIZE of an imaginary machine, got 'scratch'" in capsys.readouterr().err


def test_bench_links_are_known_to_devices(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured rates are positive, and `nntask devices` reads them back; nothing is left in the directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    disk = tmp_path / "disk"
    assert main(["bench", "links", f"--disk={disk}", "--size=64MiB", "--repeats=1", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert set(figures["links"]) == {"ram->sim", "sim->ram", "ram->disk", "disk->ram"}
    assert all(link["bytes_per_second"] > 0 for link in figures["links"].values())
    assert figures["recorded"]
    assert list(disk.iterdir()) == []
    assert main(["devices", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {"ram->sim:0", "sim:0->ram", "ram->disk", "disk->ram"} <= set(facts["links"])
    assert facts["gemm_peak_flops"] > 1e8
    assert main(["devices", "--sim-gpu=1", f"--disk={disk}:1GiB"]) == 0
    out = capsys.readouterr().out
    assert "1 x sim@sim:0" in out
    assert "disk 1 GiB" in out


@pytest.mark.parametrize("flags", [["--ram=5MiB"], ["--sim-gpu=1"], []], ids=" ".join)
def test_devices_say_one_budget(flags: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """That of RAM is what its node has, given or by default."""
    assert main(["devices", *flags]) == 0
    out = capsys.readouterr().out
    found = re.search(r"^nodes +ram ([\d.]+ \w+)", out, re.MULTILINE)
    assert found is not None
    assert f"budget   {found[1]} for tiles{'' if flags[:1] == ['--ram=5MiB'] else ' by default'} (--ram)\n" in out


@pytest.mark.parametrize("command", [["bench", "links", "--size=64MiB"], ["devices"], ["train", "--dry-run"], ["plan"]], ids=" ".join)
def test_what_a_disk_lies_in_is_never_made(command: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One rule for all commands: --disk makes a directory, not its parents, which may be mistyped; nothing is left behind."""
    assert main([*command, "--disk=new/a/b"]) == 2
    assert "--disk new/a/b cannot be created: there is no directory new/a; create it, or choose another place" in capsys.readouterr().err
    assert not (folder / "new").exists()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["bench"], "bench needs NAME; NAME is one of overhead, kernels, links"),
        (["bench", "sched", "--seq-len=0"], "nntask bench sched is a script now; in a checkout of nntask, run python benchmarks/bounds/schedules.py"),
        (["bench", "speed"], "there is no benchmark 'speed'; NAME is one of"),
        (["bench", "links", "--size=1MiB"], "--size must be at least 64MiB"),
        (["bench", "links", "--size=64MiB", "--disk=tier:64MiB"], "--disk must be a directory here, got 'tier:64MiB'; use --disk tier, and --size"),
        (["bench", "links", "--disk=tier:x"], "--disk must be a directory here, got 'tier:x'; use --disk tier, and --size for the space to use"),
        (["bench", "links", "--disk=a:b/c:64MiB"], "--disk must be a directory here, got 'a:b/c:64MiB'; use --disk a:b/c, and --size for the space"),
        (["bench", "links", "--disk=tier:1GB:2GB"], "--disk must be a directory here, got 'tier:1GB:2GB'; use --disk tier, and --size"),
        (["bench", "links", "--disk=1GB:2GB"], "--disk must be a directory here, got '1GB:2GB'; use --disk scratch, and --size"),
        (["bench", "links", "--disk=:2GB"], "--disk must be a directory here, got ':2GB'; use --disk scratch, and --size"),
        (["bench", "links", "--disk=64MiB"], "--disk must be a directory here, got '64MiB'; use --disk scratch, and --size for the space to use"),
        (["bench", "overhead", "--tasks=1"], "--tasks must be at least 100"),
    ],
)
def test_mistakes_end_with_2(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence names the flag and what would do."""
    assert main(argv) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("limit", "free", "words"),
    [
        ((128 << 20) - 1, 64 << 20, "--size 64MiB takes twice that in memory, 134,217,728 B, and this process may use 134,217,727 B; lower it"),
        (128 << 20, (64 << 20) - 1, "--size 64MiB is 67,108,864 B, and 67,108,863 B are free in tier; lower it, or name another --disk"),
    ],
)
def test_bench_links_takes_what_there_is(
    limit: int, free: int, words: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the memory or the disk has no room for is refused before any of it is taken."""
    monkeypatch.setattr("scheduler.storage.memory_limit", lambda: limit)
    monkeypatch.setattr("nntask.hardware.free_bytes", lambda _: free)
    assert main(["bench", "links", "--disk=tier", "--size=64MiB"]) == 3
    assert words in capsys.readouterr().err
    assert not (folder / "tier").exists()


def test_devices_say_how_bf16_is_computed() -> None:
    """By which library, or why in fp32."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "nntask", "devices"]
    off = subprocess.run(command, env={**environment, "NNTASK_ONEDNN": "off"}, capture_output=True, text=True, check=True).stdout
    assert "bf16     computed in fp32: switched off by NNTASK_ONEDNN" in off
    facts = json.loads(subprocess.run([*command, "--json"], env=environment, capture_output=True, text=True, check=True).stdout)
    assert facts["bf16"] == {"native": onednn.has_bf16_products(), "by": onednn.bf16_products()}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "mistral", "hidden_size": 2147483640, "num_key_value_heads": 4}, "a step must have at most 1,000,000 tasks"),
        ({"model_type": "bert", "max_position_embeddings": 2147483647}, "table of 2,147,483,647 positions; lower max_position_embeddings in the"),
        ({"model_type": "mlp_mixer", "image_size": 10**6, "patch_size": 2}, "1 x 2 sequences of 250,000,000,000 tokens"),
    ],
)
def test_sizes_beyond_any_machine_are_refused_at_once(folder: Path, capsys, config, words) -> None:
    """Before a tile is made: of a width, of a table that is longer than any sequence, and of patches."""
    sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    mixer = {"tokens_mlp_dim": 8, "channels_mlp_dim": 8} if config["model_type"] == "mlp_mixer" else {}
    if mixer:
        sizes = {key: value for key, value in sizes.items() if key in ("hidden_size", "num_hidden_layers")}
    longest = {} if mixer else {"max_position_embeddings": 64}
    (folder / "large.json").write_text(json.dumps({**sizes, **mixer, **longest, **config}))
    data = ["--dataset=images"] if mixer else ["--seq-len=32"]
    code, err = refuse(capsys, ["plan", "--config-path=large.json", "--batch=2", "--minibatch=2", *data])
    assert (code, words in err) == (2, True), err


def test_a_model_of_images_takes_all_patches(folder: Path, capsys) -> None:
    """Of images with more patches than the longest usual text has tokens, too."""
    config = {"model_type": "mlp_mixer", "image_size": 66, "patch_size": 1, "num_channels": 1, "hidden_size": 8, "num_hidden_layers": 1}
    (folder / "wide.json").write_text(json.dumps({**config, "tokens_mlp_dim": 8, "channels_mlp_dim": 8, "num_labels": 2}))
    assert main(["plan", "--config-path=wide.json", "--batch=2", "--dataset=images", "--ncpu=1"]) == 0
    assert "feasible            yes" in capsys.readouterr().out
