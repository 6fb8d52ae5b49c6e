"""Errors of a node keep their fields on the way to the client, and its refusals for memory have them."""

from __future__ import annotations

import copyreg
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tblib import pickling_support

from nntask.config.resolution import resolve
from nntask.config.settings import ModelSettings, ResourceSettings, TilingSettings, TrainSettings
from nntask.errors import DoesNotFit
from nntask.hardware.machine_model import this_machine
from nntask.hardware.machine_request import Budget
from nntask.models.gpt2 import GPT2Config
from nntask.planning import memory_fit
from scheduler import Shortage
from wrappers.dask.training.failures import NodeFailed, blamed, blaming, portable
from wrappers.dask.training.node_memory import check_memory, machine_of_node
from wrappers.dask.training.peers import PeerLost

CONFIG = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
SETTINGS = TrainSettings(
    model=ModelSettings(config_path="small.json"),
    tiling=TilingSettings(batch=2, minibatch=1),
    resources=ResourceSettings(ncpu=1, ram="64MiB", recompute="none"),
)


@pytest.mark.parametrize("is_registered", [False, True])
def test_an_error_that_travels_keeps_its_fields(is_registered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not its causes, also if distributed has registered its way to copy errors; the worker that met it is one of the fields."""
    monkeypatch.delitem(copyreg.dispatch_table, DoesNotFit, raising=False)
    if is_registered:
        monkeypatch.setitem(copyreg.dispatch_table, DoesNotFit, pickling_support.pickle_exception)
    lack = Shortage("step", "ram", 2, 1)
    error = DoesNotFit("on worker a the step needs 2 B", "raise --ram", shortage=lack)
    error.__cause__ = OSError("of the node")
    sent = blaming(portable(error), "tcp://a:1")
    assert isinstance(sent, DoesNotFit)
    assert (sent.shortage, sent.fact, sent.remedy, str(sent)) == (lack, error.fact, error.remedy, str(error))
    assert (blamed(sent), blamed(error), sent.__cause__) == ("tcp://a:1", "", None)
    lost = portable(PeerLost(3, OSError("gone: reset")))
    assert isinstance(lost, PeerLost)
    assert (lost.rank, lost.why, str(lost)) == (3, "gone: reset", "node 3 does not answer any more: gone: reset")
    assert str(portable(KeyError("x"))) == str(NodeFailed("KeyError: 'x'"))
    assert str(portable(RuntimeError("can't start new thread"))).startswith("the system starts no more threads for this process; raise its limit")


def test_a_node_with_too_little_memory() -> None:
    """For the step; and for the messages with buckets."""
    asked = resolve(SETTINGS, CONFIG)
    plan = memory_fit.capture(asked).plan
    run = asked.on(replace(asked.machine, ram=Budget(100_000, is_given=True, text="100000B")))
    with pytest.raises(DoesNotFit) as refusal:
        check_memory(plan, run, "tcp://a:1", 0)
    lack = refusal.value.shortage
    assert lack is not None
    assert (lack.cause, lack.node, lack.budget) == ("step", "ram", 100_000)
    assert refusal.value.fact == f"on worker tcp://a:1 {lack.fact}, without buckets in transit between nodes"
    assert refusal.value.remedy == "raise --ram, lower --minibatch, add --disk DIR, or use more nodes"
    with pytest.raises(DoesNotFit) as refusal:
        machine_of_node(SimpleNamespace(address="tcp://a:1"), run.machine, run, None, on_host=1, passing_nbytes=200_000)
    assert refusal.value.shortage == Shortage("full", "ram", 200_000, 100_000)
    assert str(refusal.value) == (
        "on worker tcp://a:1 the budget of RAM must hold 200,000 B for buckets in transit between nodes in addition to the step, got 100,000 B; "
        "raise --ram, or use fewer nodes"
    )


def test_readers_of_files_count_on_a_node() -> None:
    """With the least memory of the step, a node has none for the buffers in which it reads weights."""
    asked = resolve(SETTINGS, CONFIG)
    plan = memory_fit.capture(asked).plan
    least = memory_fit.needs_of(plan).minimum(this_machine(asked.machine))["ram"]
    run = asked.on(replace(asked.machine, ram=Budget(least, is_given=True, text=f"{least}B")))
    check_memory(plan, run, "tcp://a:1", 0)
    with pytest.raises(DoesNotFit):
        check_memory(plan, run, "tcp://a:1", 1 << 20)
