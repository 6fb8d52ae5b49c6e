"""Releases of PyTorch, transformers and accelerate: which are taken, which are refused, and what a release outside the tested range must have."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import wrappers.torch
from nntask import UsageError
from wrappers.torch import Session, insides, releases
from wrappers.torch.insides import RATE, first_difference, missing_names, names_in
from wrappers.torch.releases import ACCELERATE, TORCH, TRANSFORMERS, Supported, check_release
from wrappers.torch.trainer.trainer import Trainer
from wrappers.torch.trainer.trainer_checks import OVERRIDDEN, fault_of_loop

ROOT = Path(__file__).parents[3]
RANGE = Supported("PyTorch", "torch", (2, 12), (2, 14))


@pytest.mark.parametrize("version", ["2.12.0", "2.13.0+cpu", "2.14.1+cu130", "2.14", "2.13.0.post1"])
def test_releases_of_the_range_are_taken(version: str) -> None:
    """Without a check, whatever their build is called."""
    assert RANGE.holds(version)


@pytest.mark.parametrize("version", ["2.15.0", "3.0.0+cpu", "2.13.0a0+git1234", "2.14.0rc2", "2.15.0.dev20261101+cpu"])
def test_newer_releases_and_pre_releases_are_not_of_the_range(version: str) -> None:
    """They are checked, and not refused."""
    assert not RANGE.holds(version)


@pytest.mark.parametrize("version", ["2.11.0", "1.13.1+cpu", "2.9.1", "unknown"])
def test_older_releases_are_refused(version: str) -> None:
    """One sentence: the rule, the version, the command."""
    with pytest.raises(UsageError) as caught:
        check_release(RANGE, version)
    expected = f"wrappers.torch needs PyTorch 2.12 or newer (tested: 2.12 to 2.14), got {version}; pip install 'torch>=2.12,<2.15'"
    assert str(caught.value) == expected


def test_a_newer_release_is_checked_and_warned_of_once(capsys: pytest.CaptureFixture[str]) -> None:
    """The check may begin another one, as a session of the self-check does."""
    checks = []

    def find_fault() -> str | None:
        checks.append(check_release(RANGE, "2.98.0", find_fault))
        return None

    for _ in range(2):
        check_release(RANGE, "2.98.0", find_fault)
    assert checks == [None]
    assert capsys.readouterr().err == "nntask: PyTorch 2.98.0 is not among the tested releases, 2.12 to 2.14; a self-check has passed\n"
    check_release(RANGE, "2.97.0")
    assert "PyTorch 2.97.0 is not among the tested releases, 2.12 to 2.14; nothing checks it" in capsys.readouterr().err


def test_a_newer_release_with_a_fault_is_refused_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    """With what is missing, the tested releases and the command."""
    for _ in range(2):
        with pytest.raises(UsageError) as caught:
            check_release(RANGE, "2.99.0", lambda: "it lacks torch._x")
        words = "PyTorch 2.99.0 is not among the tested releases, 2.12 to 2.14, and it lacks torch._x; pip install 'torch>=2.12,<2.15'"
        assert str(caught.value) == words
    assert capsys.readouterr().err == ""


def test_this_release_has_all_names_and_trains_the_probe() -> None:
    """The self-check passes with the PyTorch of this environment, with the names of Inductor too."""
    assert insides.find_fault(Session) is None
    assert insides.find_fault_of_inductor() is None


def test_the_packages_of_this_environment_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a word: neither before anything is imported, nor with the imported modules."""
    releases.refuse_older()
    releases.explain(ImportError("of a name"), of_trainer=True)
    releases.check_packages(Session)
    releases.check_inductor()
    with Session(torch.nn.Linear(2, 2), "sgd", lr=0.1, ram="64MB", workers=1):
        pass
    assert "tested releases" not in capsys.readouterr().err


def test_names_are_read_from_sources() -> None:
    """Imports, attributes of what they bind, operations; neither other packages nor attributes of values."""
    source = """
import torch
from numpy import sin
from torch._subclasses.fake_tensor import FakeTensor as Fake
from .capture import aten
def function(value):
    import torch._guards
    return Fake.from_tensor(torch._C._get_mkldnn_enabled()), aten.mm.default, value._cdata, sin.at
"""
    names = {"torch", "torch._subclasses.fake_tensor.FakeTensor", "torch._subclasses.fake_tensor.FakeTensor.from_tensor", "torch._guards"}
    assert names < names_in(source)
    assert {"torch._C._get_mkldnn_enabled", "torch.ops.aten.mm.default"} < names_in(source)
    assert not any("_cdata" in name or "sin" in name for name in names_in(source))


def test_missing_names_are_found() -> None:
    """Attributes, modules, operations and their overloads; once each."""
    there = ["torch.nn.functional.dropout", "torch._subclasses.fake_tensor.FakeTensor", "torch.ops.aten.mm.default", "torch._C._get_mkldnn_enabled"]
    missing = ["torch._C._gone", "torch._gone_module", "torch.ops.aten.gone", "torch.ops.aten.mm.gone"]
    assert missing_names([*there, *missing, "torch._gone_module.name", "torch.ops.aten.gone.default"]) == missing


def eager(module: Any, x: torch.Tensor, rate: float = RATE) -> tuple[float, Mapping[str, torch.Tensor]]:
    """A step of plain gradient descent."""
    loss = module(x)
    loss.backward()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.sub_(parameter.grad, alpha=rate)
    return loss.item(), module.state_dict()


def without_masks(module: Any, x: torch.Tensor) -> tuple[float, Mapping[str, torch.Tensor]]:
    """A step that draws nothing."""
    module.draws = False
    return eager(module, x)


def without_counting(module: Any, x: torch.Tensor) -> tuple[float, Mapping[str, torch.Tensor]]:
    """A step that leaves out what is changed in place."""
    loss, state = eager(module, x)
    return loss, {**state, "num_calls": torch.zeros(())}


@pytest.mark.parametrize(
    ("step", "difference"),
    [
        (eager, None),
        (lambda module, x: eager(module, x, 2 * RATE), "project.weight"),
        (lambda module, x: eager(module, 2 * x), "the loss"),
        (without_masks, "random numbers"),
        (without_counting, "num_calls"),
    ],
)
def test_the_self_check_sees_planted_mistakes(step: insides.Step, difference: str | None) -> None:
    """Another update, another loss, no random numbers, a buffer that stays as it was; eager PyTorch itself passes."""
    assert first_difference(step) == difference


class Idle:
    """Is given all attributes of transformers' Trainer, and calls none of them."""


def test_the_loop_of_the_trainer_is_checked() -> None:
    """All methods that are overridden are named, are there and are called; one that is gone, or that nobody calls any more, is a fault."""
    own = {name for name in vars(Trainer) if hasattr(transformers.Trainer, name) and not name.startswith("__")}
    assert own == set(OVERRIDDEN)
    assert fault_of_loop(transformers.Trainer) is None
    assert "its Trainer lacks _prepare_for_training" in str(fault_of_loop(torch.nn.Module))
    for name in dir(transformers.Trainer):
        if not name.startswith("__"):
            setattr(Idle, name, None)
    assert fault_of_loop(Idle) == f"its Trainer does not call {', '.join(OVERRIDDEN)}"


@pytest.mark.parametrize("use", ["from wrappers.torch import Session", "from wrappers.torch.releases import refuse_older; refuse_older()"])
def test_an_old_release_that_cannot_even_be_imported_is_refused(use: str, tmp_path: Path) -> None:
    """The error is the sentence about releases, in programs and in commands, and not what the import lacks."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("__version__ = '2.10.0'\n")
    (tmp_path / "torch-2.10.0.dist-info").mkdir()
    (tmp_path / "torch-2.10.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.10.0\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    done = subprocess.run([sys.executable, "-P", "-c", use], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "UsageError: wrappers.torch needs PyTorch 2.12 or newer" in done.stderr.splitlines()[-1], done.stderr
    assert "got 2.10.0; pip install 'torch>=2.12" in done.stderr.splitlines()[-1]


def test_a_name_that_is_not_there_is_no_matter_of_releases() -> None:
    """The attribute error is Python's own."""
    with pytest.raises(AttributeError):
        _ = wrappers.torch.Sessions  # type: ignore[attr-defined]


def test_the_project_asks_for_the_tested_releases() -> None:
    """The extra, the environment of CI and the target of the Makefile agree with the table."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = {f"{tested.package}>={tested.oldest[0]}.{tested.oldest[1]}" for tested in (TRANSFORMERS, ACCELERATE)}
    for name in ("torch", "dev"):
        assert wanted | {TORCH.remedy.split("'")[1]} <= set(extras[name])
    settings = dict(re.findall(r"^(TORCH\w*) \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert TORCH.holds(settings["TORCH"])
    (major, first), (_, last) = TORCH.oldest, TORCH.newest
    assert settings["TORCH_RELEASES"].split() == [f"{major}.{minor}" for minor in range(first, last + 1)]
