"""Rules between settings, and what unset values become."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from nntask.config import machine as machine_settings
from nntask.config.disk import disk_of, imaginary_disk_of
from nntask.config.machine import devices_of, machine_of, request_of
from nntask.config.resolution import filled, resolve
from nntask.config.settings import TrainSettings, from_dict
from nntask.config.stored_run import differences
from nntask.config.validation import check_values
from nntask.errors import DataError, UsageError
from nntask.hardware.machine_spec import with_budgets
from nntask.hardware.memory_advice import does_not_fit
from nntask.hardware.runtimes import open_runtime
from nntask.io.units import parse_size
from scheduler import Shortage
from wrappers.cli.options.flags import build, scan, table_of
from wrappers.cli.options.sources import request

TABLE = table_of(TrainSettings)


@dataclass(frozen=True)
class Shape:
    positions_key: str = "n_positions"
    n_positions: int = 64
    longest: int | None = 64
    vocab_size: int = 100


def settings(*argv: str) -> TrainSettings:
    """Settings of a command line."""
    return build(TrainSettings(), scan(argv, TABLE)[0], TABLE)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--batch=6", "--minibatch=4"], "--minibatch must divide --batch = 6, got 4; the nearest legal value is 3"),
        ([f"--batch={10**10 - 1}", "--minibatch=4"], "--minibatch must divide --batch = 9999999999, got 4; the nearest legal value is 3"),
        (["--batch=8", "--minibatch=4", "--minibatch-tile=3"], "--minibatch-tile must divide --minibatch = 4, got 3; the nearest legal value is 2"),
        (["--seq-len=65"], "--seq-len must be at most n_positions = 64, got 65; the nearest legal value is 64"),
        (["--seq-tile=128"], "--seq-tile must be at most the sequence length 64, got 128"),
    ],
)
def test_rules_between_values(argv, words):
    """Flag, value, rule and the nearest legal value are in the message."""
    with pytest.raises(UsageError) as error:
        filled(settings(*argv), Shape())
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--batch=0"], "--batch must be at least 1, got 0"),
        (["--steps=-3"], "--steps must be at least 1, got -3"),
        (["--nepochs=-1"], "--nepochs must be 0 or more"),
        (["--minibatch=0"], "--minibatch must be at least 1, or -1 for the whole, got 0"),
        (["--vocab-tile=-2"], "--vocab-tile must be at least 1, or -1"),
        (["--keep-checkpoints=0"], "--keep-checkpoints must be at least 1"),
        (["--dropout=1"], "--dropout must be at least 0 and below 1, got 1"),
        (["--lr=nan"], "--lr must be a finite number of at least 0, got nan; for example 0.001"),
        (["--lr=inf"], "--lr must be a finite number of at least 0, got inf; for example 0.001"),
        (["--lr=-1"], "--lr must be a finite number of at least 0, got -1; the nearest legal value is 0"),
        (["--ncpu=1025"], "--ncpu must be at most 1024, because each worker is a thread of one process, got 1025"),
        (["--sim-gpu=65"], "--sim-gpu must be at most 64, because each device has two threads and a memory, got 65"),
        (["--ngpu=-1"], "drop --ngpu -1"),
        (["--ngpu=-2"], "--ngpu must be 0 or more, or -1 for all, got -2; the nearest legal value is -1"),
        (["--ram=12XB"], "--ram must be a size in B, KB, KiB, MB, MiB, GB, GiB, TB or TiB, got '12XB'; for example 12GiB"),
        (["--model=tiny", "--config-path=x"], "both name a model"),
        (["--warmup-start-lr=-1"], "--warmup-start-lr must be a finite number of at least 0"),
        (["--warmup-start-lr=1e-5", "--warmup-steps=0"], "--warmup-start-lr 1e-05 begins a warm-up, and --warmup-steps 0 asks for none"),
        (["--trace-steps=5:2@x"], "--trace-steps must be all, or A:B"),
        (["--ncpu=0"], "--ncpu 0 needs a device"),
        (["--optimizer=adam:0.9"], "MOMENTUM in --optimizer 0.9 belongs to sgd"),
        (["--watchdog=0"], "must be a positive number of seconds"),
        (["--watchdog=inf"], "must be a positive number of seconds"),
        ([f"--seed={1 << 63}"], "--seed must be at most 9223372036854775807, got 9223372036854775808"),
        (["--seed=-1"], "--seed must be 0 or more"),
        ([f"--batch={10**30}"], "--batch must be at most"),
        ([f"--batch={10**10 + 1}"], "--batch must be at most 10000000000, because tiles and minibatches are searched among its divisors"),
        (["--ram=99999999TiB"], "--ram must be at most 9223372036854775807 bytes"),
        (["--disk=scratch:12XB"], "--disk must be a size in B"),
        (["--disk=scratch:"], "--disk must be DIR or DIR:SIZE"),
        (["--disk=:1GiB"], "--disk must be DIR or DIR:SIZE"),
        (["--order=layer"], "--order must be auto, submission"),
        (["--order=layers:0"], "--order must be auto, submission"),
        (["--order=turn:9/8"], "turn:K/8 with K from 1 to 7, or forward, got 'turn:9/8'"),
        (["--recompute=attention:1.5"], "each perhaps with a share of its layers (above 0, at most 1), such as layer_norm,attention:0.5, got"),
        (["--recompute=attention:0.5, attention"], "--recompute must name an operation once, got 'attention' 2 times in 'attention:0.5, attention'"),
        (["--recompute=auto,attention"], "--recompute auto cannot be combined, got 'auto,attention'; use --recompute auto, or name operations only"),
        (["--sim-gpu=1", "--gpu-memory=0.5x"], "--gpu-memory must be a size"),
        (["--gpu-memory=1GiB"], "add --sim-gpu 1"),
        (["--gpu-memory=0.5"], "about GPUs, and none is used; drop it"),
        (["--gpu-memory=0.5", "--sim-gpu=1"], "must be bytes for simulated devices, got 0.5, a share of a card"),
        (["--ngpu=0x2"], "--ngpu 0x2 is about GPUs, and none is used; drop it"),
        (["--sim-gpu=1@fast"], "RATE in --sim-gpu must be bytes per second, got 'fast'; for example 55GB/s"),
        (["--sim-gpu=1@8"], "RATE in --sim-gpu must be bytes per second, got '8', which has no unit; for example 8GB/s"),
        (["--sim-gpu=1@8Gb/s"], "RATE in --sim-gpu must be bytes per second, got '8Gb/s'; bits? 8 Gb/s are 1GB/s"),
        (["--sim-gpu=0@5GB"], "--sim-gpu 0@5GB has a rate of links and no device; use --sim-gpu 1@5GB"),
    ],
)
def test_values_on_their_own(argv, words):
    """Counts, ranges, combinations and devices are checked without a model."""

    def check(asked):
        check_values(asked)
        devices_of(asked.resources, asked.model.dtype)

    with pytest.raises(UsageError) as error:
        check(settings(*argv))
    assert words in str(error.value)


@pytest.mark.parametrize("text", ["h.*.mlp.mm and 1[0],addmm and 2:0.5,layer_norm", "h.*.ln_1[0], attention:1"])
def test_names_that_plans_print_can_be_given(text):
    """Those of PyTorch models among them, whose tasks are of several operations."""
    check_values(settings(f"--recompute={text}"))


@pytest.mark.parametrize(
    ("shortage", "lower", "remedy"),
    [
        (Shortage("taken", "ram", 5, 4, 4, "program"), None, "raise --ram (now the default), lower --minibatch, or use --recompute block"),
        (Shortage("task", "sim:1", 5, 4, task="adam"), None, "raise --gpu-memory (now 1MiB), or lower --inner-tile or --vocab-tile"),
        (Shortage("task", "ram", 5, 4, task="flash_attention"), None, "raise --ram (now the default), or lower --seq-tile or --head-tile"),
        (Shortage("task", "ram", 5, 4, task="head"), None, "raise --ram (now the default), or lower --vocab-tile"),
        (Shortage("task", "ram", 5, 4, task="matmul"), None, "raise --ram (now the default), or lower --minibatch-tile or --seq-tile"),
        (Shortage("full", "disk", 5, 4, 4, "head"), None, "raise SIZE in --disk tier:SIZE, now --disk tier:2MiB"),
        (Shortage("outside", "GPU 0 (H100)", 0, 4, 4, "a library"), None, "lower --gpu-memory, or end other programs that use the card"),
        (Shortage("taken", "ram", 5, 4, 4, "program"), "--batch", "raise --ram (now the default)"),
        (Shortage("taken", "ram", 5, 4, 4, "head"), "--batch", "raise --ram (now the default), or lower --batch"),
        (Shortage("task", "cuda:0", 5, 4, task="head"), "", "raise --gpu-memory (now 1MiB)"),
    ],
)
def test_what_does_not_fit_names_flag_and_value(shortage, lower, remedy):
    """The scheduler knows memories, the user flags; the refusal keeps the facts."""
    machine = machine_of(settings("--sim-gpu=2", "--gpu-memory=1MiB", "--disk=tier:2MiB").resources)
    refusal = does_not_fit(shortage, machine, lower=lower)
    assert refusal.shortage is shortage
    assert (refusal.fact, refusal.remedy) == (shortage.fact, remedy)
    assert str(refusal) == f"{shortage.fact}; {remedy}"


def test_a_shortage_without_a_disk_advises_one():
    """When bytes are taken; a task that is too large alone is no smaller with a disk."""
    machine = machine_of(settings("--ram=1MiB").resources)
    assert does_not_fit(Shortage("taken", "ram", 5, 4, 4, "head"), machine, lower="").remedy == "raise --ram (now 1MiB), or add --disk DIR"
    assert does_not_fit(Shortage("task", "ram", 5, 4, task="head"), machine, lower="").remedy == "raise --ram (now 1MiB)"


def test_defaults_of_the_small_model():
    """Without flags: 8 sequences, 1e-3, ten warm-up steps, 200 steps; resolving twice changes nothing."""
    resolved = filled(TrainSettings(), Shape())
    assert (resolved.tiling.batch, resolved.tiling.minibatch, resolved.model.seq_len) == (8, 8, 64)
    assert (resolved.optimizer.lr, resolved.optimizer.warmup_steps, resolved.run.steps) == (1e-3, 10, 200)
    assert (resolved.model.model, resolved.optimizer.optimizer, resolved.tiling.lanes) == ("tiny", "adamw", 1)
    assert filled(resolved, Shape()) == resolved


def test_differences_name_locked_flags_only():
    """Resources may differ between a run and its continuation; learning rates and tiles may not."""
    stored = filled(settings("--lr=1e-3", "--ncpu=2"), Shape())
    now = filled(settings("--lr=2e-3", "--ncpu=1", "--seq-tile=32"), Shape())
    assert differences(stored, now) == ["--seq-tile (was None, is 32)", "--lr (was 0.001, is 0.002)"]
    assert differences(stored, replace(stored, resources=now.resources)) == []


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("adamw8bit", "muon", "adamw8bit, is muon:0.95"),
        ("adamw", "sgd:0.9", "adamw, is sgd:0.9"),
        ("muon", "muon:0.9", "muon:0.95, is muon:0.9"),
        ("sgd", "adam", "sgd, is adam"),
    ],
)
def test_differences_name_a_flag_with_all_of_its_value(before, after, words):
    """The optimizer changed, rather than a momentum that one of the two lacks."""
    stored, now = (filled(settings(f"--optimizer={optimizer}"), Shape()) for optimizer in (before, after))
    assert differences(stored, now) == [f"--optimizer (was {words})"]


@pytest.mark.parametrize(
    ("text", "place"), [("", None), ("scratch", ("scratch", None)), ("scratch:20GB", ("scratch", 20_000_000_000)), ("/a:b/c", ("/a:b/c", None))]
)
def test_a_disk_is_a_directory_and_perhaps_a_size(text, place):
    """A colon inside a path is part of the path."""
    assert disk_of(text) == (None if place is None else (Path(place[0]), place[1]))


def test_a_size_is_no_directory(tmp_path, monkeypatch):
    """--disk 500GiB means 500 GiB to whoever types it, unless there is a directory of that name; of an imaginary machine it is the size."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"--disk must be DIR or DIR:SIZE, got '500GiB', which is a size .* for example scratch:500GiB, or ./500GiB"):
        request_of(settings("--disk=500GiB").resources)
    assert request_of(settings("--disk=500GiB").resources, has_disk=False).disk is None
    assert disk_of("./500GiB") == (Path("500GiB"), None)
    assert [imaginary_disk_of(text) for text in ("500GiB", "scratch:1GB", "")] == [500 << 30, 10**9, None]
    for text in ("scratch", "1XB"):
        with pytest.raises(UsageError, match=rf"--disk must be SIZE or DIR:SIZE of an imaginary machine, got '{text}'; for example --disk 2TB"):
            imaginary_disk_of(text)
    Path("500GiB").mkdir()
    assert disk_of("500GiB") == (Path("500GiB"), None)


@pytest.mark.parametrize("directory", ["scratch:1GB", "1GB"])
def test_a_disk_has_one_size(tmp_path, monkeypatch, directory):
    """Two are a mistake, unless the first one ends the name of a directory that there is."""
    monkeypatch.chdir(tmp_path)
    words = f"got '{directory}:2GB', which has two sizes, and there is no directory {directory}; for example scratch:2GB"
    with pytest.raises(UsageError, match=f"--disk must be DIR or DIR:SIZE, {words}"):
        request_of(settings(f"--disk={directory}:2GB").resources)
    Path(directory).mkdir()
    assert disk_of(f"{directory}:2GB") == (Path(directory), 2 * 10**9)


@pytest.mark.parametrize("order", ["auto", "submission", "layers", "layers:2", "eager-update", "turn:2/8", "forward"])
def test_orders_are_accepted(order):
    """The words that --order takes."""
    check_values(settings(f"--order={order}"))


def test_settings_come_back_from_a_dict():
    """state.json's copy of the settings is read back."""
    from dataclasses import asdict

    stored = filled(settings("--lr=1e-3"), Shape())
    assert from_dict(asdict(stored), "state.json") == stored


@pytest.mark.parametrize(
    ("group", "key", "value", "words"),
    [
        ("tiling", "batch", "x", "settings.tiling.batch in state.json must be a whole number or null, got 'x'"),
        ("tiling", "redux", 1, "must be true or false, got 1"),
        ("run", "check_finite", 1, "must be true or false, got 1"),
        ("tiling", "minibatch", True, "must be a whole number or auto, got True"),
        ("optimizer", "beta1", None, "must be a number, got None"),
        ("model", "dtype", "fp23", "must be one of auto, fp32"),
        ("data", "dataset", [], "must be a string"),
    ],
)
def test_stored_settings_of_another_type_are_refused(group, key, value, words):
    """The file, the key and the rule are in the message; whole numbers pass for numbers."""
    with pytest.raises(DataError) as error:
        from_dict({group: {key: value}}, "state.json")
    assert words in str(error.value)
    assert from_dict({"optimizer": {"beta1": 0}, "run": {"of another version": 1}}, "state.json").optimizer.beta1 == 0


def test_places_of_data_may_differ():
    """A run whose data moved is the same run; what the data are is compared by its fingerprint."""
    here, there = (
        filled(settings("--dataset=text", f"--dataset-path={place}/text", f"--val-path={place}/val", f"--tokenizer-path={place}"), Shape())
        for place in "ab"
    )
    assert differences(here, there) == []
    assert differences(here, filled(settings("--dataset=train.bin"), Shape())) == ["--dataset (was text, is train.bin)"]


def test_defaults_of_budgets_are_filled_once():
    """What a run is planned with is what its runtime has, whatever the process allocates in between."""
    machine = machine_of(settings("--ncpu=1", "--ngpu=0", "--sim-gpu=1").resources)
    held = np.ones(1 << 22)
    with open_runtime(machine) as runtime:
        assert runtime.stats()["budget_bytes"] == {"ram": machine.ram.nbytes, "sim:0": machine.device.nbytes}
    assert held.size == 1 << 22


def test_a_size_is_parsed_once(monkeypatch):
    """From a command line to the machine of its run, with every budget."""
    sizes = []

    def parse(text, what):
        sizes.append((text, what))
        return parse_size(text, what)

    monkeypatch.setattr(machine_settings, "parse_size", parse)
    asked = request(["--model=tiny", "--ncpu=1", "--ngpu=0", "--ram=2GiB", "--sim-gpu=1", "--gpu-memory=1MiB"], {})
    run = resolve(asked.settings, asked.config, machine=with_budgets(asked.devices))
    assert sizes == [("2GiB", "--ram"), ("1MiB", "--gpu-memory")]
    assert (run.machine.ram.nbytes, run.machine.device.nbytes) == (2 << 30, 1 << 20)
