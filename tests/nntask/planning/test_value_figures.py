"""What is said of values that are kept, moved or made again: the headline of each decision, rows of a real step, aligned lines."""

from __future__ import annotations

from typing import Any

import pytest

from nntask.config.resolution import resolve
from nntask.config.settings import DataSettings, ResourceSettings, TilingSettings, TrainSettings
from nntask.hardware.machine_model import this_machine
from nntask.models.gpt2 import GPT2Config
from nntask.planning import HEAD, cells, headline, order_figures, value_lines
from nntask.planning.run_candidates import planned_run

CONFIG = GPT2Config(vocab_size=257, n_positions=64, n_embd=32, n_layer=4, n_head=2)


def figures_of(**resources: Any) -> dict[str, Any]:
    """The figures of a step that holds 7 MiB, on two CPU workers."""
    tiling = TilingSettings(batch=8, minibatch=8, minibatch_tile=4)
    run = resolve(TrainSettings(data=DataSettings(tokenizer="bytes"), tiling=tiling, resources=ResourceSettings(ncpu=2, **resources)), CONFIG)
    return order_figures(planned_run(run).order, run, this_machine(run.machine))


def test_everything_fits() -> None:
    """One word, no rows."""
    found = figures_of()
    assert headline(found) == "none: everything fits"
    assert (cells(found), value_lines(found)) == ([], [])


def test_a_step_that_only_fits_like_that() -> None:
    """Rows add up to what there is of a kind, count the model's layers, and cost seconds on this machine; nothing can move."""
    found = figures_of(ram="3MB")
    assert found["recompute"] != "none"
    assert headline(found).startswith(f"{found['recompute']} (chosen; forecast ")
    assert headline(found).endswith(" s a step; without any it would not fit)")
    for value in found["values"]:
        assert value["again_bytes"] + value["moved_bytes"] + value["kept_bytes"] == value["bytes"]
        assert 0 < value["seconds_again"] < 1
        assert value["moved_bytes"] == value["seconds_moved"] == 0
    assert any(value["again_bytes"] for value in found["values"])
    norms = next(value for value in found["values"] if value["name"] == "h.*.ln_1.layer_norm[0]")
    assert (norms["operation"], norms["layers"]) == ("layer_norm", CONFIG.n_layer)
    head, *rows = value_lines(found)
    assert head.split("  ")[1] == HEAD[0]
    assert len(rows) == len(found["values"])


@pytest.mark.parametrize("asked", ["layer_norm:0.5", "block", "none"])
def test_what_was_asked_for(asked: str) -> None:
    """Is called given, with what becomes of each kind of value and what the other ways would cost, as where a planner chooses."""
    found = figures_of(ram={"block": "2MB"}.get(asked, "4MB"), disk="scratch:1GiB", recompute=asked)
    assert headline(found) == f"{asked} (given)"
    assert found["seconds_without_recompute"] is None
    shares = {value["name"]: value["again_bytes"] / value["bytes"] for value in found["values"]}
    assert len(shares) > 3
    if asked == "block":
        assert min(shares.values()) < 0.5 < max(shares.values())
    else:
        assert {name: share for name, share in shares.items() if share} == ({} if asked == "none" else {"h.*.ln_1.layer_norm[0]": 0.5})
    assert all(value["again_bytes"] + value["moved_bytes"] + value["kept_bytes"] == value["bytes"] for value in found["values"])
    assert all(value["seconds_again"] > 0 and value["seconds_moved"] > 0 for value in found["values"])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"recompute": "a"}, "a (chosen; forecast 0.5 s a step, without any 2 s)"),
        ({}, "none (chosen; forecast 0.5 s a step)"),
        ({"values": []}, "none: it could not save time"),
        ({"values": [], "recompute_is_given": True}, "none (given)"),
    ],
)
def test_headlines(changed: dict[str, Any], said: str) -> None:
    """Of a step that does not fit."""
    found = {"recompute": "none", "recompute_is_given": False, "seconds_without_recompute": 2.0, "values": [{}], "order": "layers"}
    forecasts = {"forecast_bytes": {"layers": 1}, "forecast_seconds": {"layers": 0.5}}
    assert headline({**found, **forecasts, **changed}) == said
