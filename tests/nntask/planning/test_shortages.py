"""Refusals for memory: the fields of each, and its sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import scheduler
from nntask.config.machine import machine_of, request_of
from nntask.config.resolution import resolve
from nntask.config.settings import ModelSettings, ResourceSettings, TilingSettings, TrainSettings
from nntask.errors import DoesNotFit
from nntask.hardware import gpus, machine_spec
from nntask.hardware.gpu_attention import gpus_with_cudnn
from nntask.hardware.machine_model import MachineModel, this_machine
from nntask.hardware.machine_request import Budget
from nntask.hardware.machine_spec import cannot_reserve
from nntask.inference import memory_check
from nntask.models.gpt2 import GPT2Config
from nntask.planning import fit_advice, memory_fit
from nntask.planning.needs import Needs, shortage
from scheduler import Shortage
from scheduler.drivers import CONTEXT_NBYTES, GpuFacts
from scheduler.storage import memory_limit
from tiles.kernels import ATTENTION_WORKSPACE_NBYTES

CONFIG = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
SETTINGS = TrainSettings(
    model=ModelSettings(config_path="small.json"),
    tiling=TilingSettings(batch=2, minibatch=1),
    resources=ResourceSettings(ncpu=1, ram="64MiB", recompute="none"),
)
CARD = GpuFacts(0, "Fake", 90, 8 << 30, 6 << 30)


@pytest.fixture(scope="module")
def step() -> tuple[Needs, MachineModel]:
    """The needs of a small step, and a machine that holds it."""
    run = resolve(SETTINGS, CONFIG)
    return memory_fit.needs_of(memory_fit.capture(run).plan), this_machine(run.machine)


def with_ram(machine: MachineModel, nbytes: int) -> MachineModel:
    """The machine with another budget of host memory."""
    return replace(machine, nodes=(("ram", nbytes), *machine.nodes[1:]))


def test_the_step_as_a_whole(step: tuple[Needs, MachineModel]) -> None:
    """The last tier is short by a byte."""
    needs, machine = step
    least = needs.last(machine)
    lack = shortage(with_ram(machine, least - 1), needs)
    assert lack == Shortage("step", "ram", least, least - 1)
    assert lack.fact == f"the step needs {least:,} B of ram at least, more than its budget of {least - 1:,} B"


def test_its_largest_task(step: tuple[Needs, MachineModel]) -> None:
    """The task is named with the sizes of its data, and the memory is the largest one with workers."""
    needs, machine = step
    lack = shortage(with_ram(machine, needs.task - 1), replace(needs, reading=0))
    assert (lack.cause, lack.node, lack.needed, lack.budget, lack.task) == ("task", "ram", needs.task, needs.task - 1, needs.largest.name)
    assert sum(size.nbytes for size in lack.sizes) == needs.task
    assert lack.fact.startswith(f"{needs.largest.name} needs {needs.task:,} B at once (")
    assert lack.fact.endswith(f"more than the {needs.task - 1:,} B of the largest memory with workers for it")


def test_a_device_that_would_idle(step: tuple[Needs, MachineModel]) -> None:
    """Of all devices the first that holds no task with flops."""
    needs, _ = step
    machine = this_machine(machine_of(ResourceSettings(ncpu=1, sim_gpu=2, ram="64MiB", gpu_memory="60B")))
    lack = shortage(machine, needs)
    assert lack == Shortage("idle", "sim:0", needs.least, 60)
    assert lack.fact.endswith("B, more than the 60 B of sim:0, which would stay idle")


def test_a_run_that_is_refused(step: tuple[Needs, MachineModel]) -> None:
    """The error of `nntask train` has the shortage, and the advice apart from it."""
    needs, machine = step
    asked = resolve(SETTINGS, CONFIG)
    small = needs.last(machine) // 2
    run = asked.on(replace(asked.machine, ram=Budget(small, is_given=True, text=f"{small}B")))
    with pytest.raises(DoesNotFit) as refusal:
        memory_fit.fitting_order(memory_fit.capture(run), run, lambda target, needs: fit_advice.advice(run, target, needs))
    lack = refusal.value.shortage
    assert lack is not None
    assert (lack.cause, lack.node) == ("step", "ram")
    assert lack.budget <= small < lack.needed
    assert refusal.value.fact == lack.fact
    assert refusal.value.remedy.startswith("it would fit with --ram ")
    assert str(refusal.value) == f"{refusal.value.fact}; {refusal.value.remedy}"


def test_more_memory_than_the_process_may_use() -> None:
    """The flag begins the sentence."""
    with pytest.raises(DoesNotFit) as refusal:
        machine_of(ResourceSettings(ncpu=1, sim_gpu=2, ram="1000TiB", gpu_memory="1TiB"))
    lack = refusal.value.shortage
    assert lack is not None
    assert (lack.cause, lack.node, lack.needed, lack.budget) == ("reserve", "ram", 1002 << 40, memory_limit())
    assert [size.name for size in lack.sizes] == ["ram", "sim:0", "sim:1"]
    assert refusal.value.flag == "--ram"
    assert refusal.value.fact == f"--ram 1000TiB and --gpu-memory 1TiB cannot be reserved: {lack.fact}"
    assert refusal.value.remedy == "lower it, and name a disk for the rest"


def test_memory_that_the_system_does_not_map() -> None:
    """An error of Python has no fields; the flags have the bytes."""
    machine = machine_of(ResourceSettings(ncpu=1, ram="64MiB"))
    refusal = cannot_reserve(machine, MemoryError("mmap failed"))
    assert refusal.shortage == Shortage("reserve", "ram", 64 << 20, memory_limit(), detail="mmap failed")
    assert str(refusal) == "--ram 64MiB cannot be reserved: mmap failed; lower it"
    of_card = scheduler.DoesNotFit(Shortage("reserve", "GPU 0 (Fake)", 8, 4), "GPU 0 (Fake) did not give 8 bytes")
    refusal = cannot_reserve(machine, of_card)
    assert refusal.shortage is of_card.shortage
    assert str(refusal).endswith("did not give 8 bytes; lower --gpu-memory, or end other programs that use the card")


def test_a_disk_with_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIZE and the free bytes."""
    monkeypatch.setattr(machine_spec, "free_bytes", lambda _: 1000)
    with pytest.raises(DoesNotFit) as refusal:
        machine_of(ResourceSettings(ncpu=1, ram="64MiB", disk=f"{tmp_path}:2MB"))
    assert refusal.value.shortage == Shortage("reserve", "disk", 2_000_000, 1000)
    assert str(refusal.value) == f"--disk {tmp_path}: SIZE is 2,000,000 B, and 1,000 B are free there; lower it, or free some room"


def test_texts_that_do_not_fit(step: tuple[Needs, MachineModel]) -> None:
    """What is computed begins the sentence, and smaller sizes that would fit are in its advice."""
    needs, machine = step
    small = machine_of(ResourceSettings(ncpu=1, ram=f"{needs.last(machine) - 1}B"))

    def needs_of_batch(batch: int) -> Needs:
        """The needs of a batch, those of the step for two texts."""
        return replace(needs, total=needs.total * batch // 2)

    with pytest.raises(DoesNotFit) as refusal:
        memory_check._check(small, needs_of_batch, (2,), "2 texts", {"--batch": (1,)})
    lack = refusal.value.shortage
    assert lack == Shortage("step", "ram", needs.last(machine), needs.last(machine) - 1)
    assert refusal.value.fact == f"2 texts: {lack.fact}"
    assert refusal.value.remedy.startswith("lower --batch, or ")


class Cards(gpus.CudaCards):
    """One card, which cannot be opened."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def choose(self, count: int | None) -> list[GpuFacts]:
        """The card."""
        return [CARD]

    def open(self, *_: object, **__: object) -> list[scheduler.drivers.Gpu]:
        """Raise the planted error."""
        assert self.error is not None
        raise self.error


def test_the_memory_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above its free bytes, too little for its parts, or taken by cuDNN or NCCL."""
    monkeypatch.setattr(gpus, "cards", Cards())
    free = (6 << 30) - CONTEXT_NBYTES
    plan = gpus.GpuPlan(((CARD, None),), 1000)
    for refused, lack, words in (
        (
            lambda: gpus.gpus_of(request_of(ResourceSettings(gpu_memory="7GiB")), "auto"),
            Shortage("reserve", "cuda:0", 7 << 30, free),
            "--gpu-memory 7GiB is",
        ),
        (
            lambda: gpus.gpus_of(request_of(ResourceSettings(split_gpu=16)), "auto"),
            Shortage("reserve", "cuda:0", 16 * (CONTEXT_NBYTES + (1 << 20)), 6 << 30),
            "GPU 0 (Fake) has 6 GiB of 8 GiB free, too little for 16 parts of it; end other",
        ),
        (lambda: gpus.without_nccl(plan, 1, 2000), Shortage("reserve", "GPU 0 (Fake)", 2000, 1000), "--transport nccl has taken 1.95 KiB of"),
    ):
        with pytest.raises(DoesNotFit) as refusal:
            refused()
        assert refusal.value.shortage == lack
        assert str(refusal.value).startswith(words)
    monkeypatch.setattr("nntask.hardware.gpu_attention._has_frontend", lambda: True)
    with pytest.raises(DoesNotFit, match=r"--attention cudnn takes .*; raise --gpu-memory, or") as refusal:
        gpus_with_cudnn(plan)
    assert refusal.value.shortage == Shortage("reserve", "GPU 0 (Fake)", ATTENTION_WORKSPACE_NBYTES, 1000)


def test_a_card_that_gives_less_when_it_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler's fields stay, its advice becomes flags; an error of Python is quoted."""
    plan = gpus.GpuPlan(((CARD, None),), 1000)
    lack = Shortage("reserve", "GPU 0 (Fake)", 8, 4)
    monkeypatch.setattr(gpus, "cards", Cards(scheduler.DoesNotFit(lack, "GPU 0 (Fake) did not give 8 bytes", "lower the budget")))
    with pytest.raises(DoesNotFit) as refusal:
        gpus.open_gpus(plan, "fp32")
    assert refusal.value.shortage is lack
    assert str(refusal.value) == "GPU 0 (Fake) did not give 8 bytes; lower --gpu-memory, or end other programs that use the card"
    monkeypatch.setattr(gpus, "cards", Cards(MemoryError("planted")))
    with pytest.raises(DoesNotFit, match=r"^planted$") as refusal:
        gpus.open_gpus(plan, "fp32")
    assert refusal.value.shortage == Shortage("outside", "GPU 0 (Fake)", 0, 1000, task="CUDA", detail="planted")
