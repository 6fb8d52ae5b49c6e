"""``nntask models``: every family and preset, what a step of one takes, and names that are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.commands import refuse

from nntask.config.resolution import is_small
from nntask.models.registry import FAMILIES, PRESETS
from wrappers.cli import main
from wrappers.cli.commands.models import STATE_BYTES


def test_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """Families with their class, objectives and presets, as text and as JSON."""
    assert main(["models", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == list(FAMILIES)
    assert [name for facts in found.values() for name in facts["presets"]] == list(PRESETS)
    assert found["bert"]["classes"] == ["BertForMaskedLM", "BertForSequenceClassification"]
    assert found["bert"]["objectives"] == ["masked", "classify"]
    assert found["gpt2"]["presets"]["gpt2"] == {"parameters": 124_439_808, "state_bytes": 124_439_808 * STATE_BYTES}
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert f"{STATE_BYTES} bytes a parameter" in out
    assert all(f"\n{kind}: " in out for kind in FAMILIES)
    assert all(f"\n  {name} " in out for name in PRESETS)


def test_a_family_is_listed_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """By its model_type, unless that is a preset, too."""
    assert main(["models", "t5"]) == 0
    out = capsys.readouterr().out
    assert "t5-v1.1-small" in out
    assert "bert" not in out


def test_a_preset_is_planned(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The numbers of `nntask plan` for the same model and batch."""
    assert main(["plan", "--model=bert-tiny", "--batch=1", "--ncpu=1", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert main(["models", "bert-tiny", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == plan["parameters"] == PRESETS["bert-tiny"].num_parameters
    assert found["persistent_bytes"] == plan["persistent_bytes"]["ram"]
    assert plan["minimum_budget_bytes"]["ram"] >= found["least_bytes"]
    assert (found["tasks"], found["seq_len"]) == (plan["tasks_per_step"], plan["seq_len"])
    assert main(["models", "gpt2"]) == 0
    assert "kept between steps  1.39 GiB" in capsys.readouterr().out
    assert main(["models", "mixer-tiny"]) == 0
    assert "4 blocks of width 64; 10 classes, images of 16 patches" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "words"), [("gtp2", "did you mean gpt2?"), ("xxxxxxxx", "nntask models lists all of them")])
def test_an_unknown_name_is_one_sentence(capsys: pytest.CaptureFixture[str], name: str, words: str) -> None:
    """With the nearest name, where one is near."""
    code, message = refuse(capsys, ["models", name])
    assert (code, words in message) == (2, True), message


def test_small_presets_have_defaults_of_their_own() -> None:
    """Those that are called tiny."""
    assert [name for name in PRESETS if is_small(name)] == [name for name in PRESETS if "tiny" in name]
    assert is_small("bert-tiny")
    assert not is_small("gpt2")


def test_a_model_without_a_longest_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    """A T5 takes sequences of any length."""
    assert main(["models", "t5-small"]) == 0
    assert "32,128 ids, sequences of any length" in capsys.readouterr().out
    assert main(["models", "t5-small", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["longest_sequence"] is None
