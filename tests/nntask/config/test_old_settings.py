"""Settings of earlier versions: files and checkpoints with old names mean what they meant."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from nntask.config.old_settings import OLD_SETTINGS, lost, translated
from nntask.config.settings import TrainSettings, from_dict
from nntask.errors import DataError, UsageError
from wrappers.cli.options.flags import build, from_toml, table_of

RUN = Path(__file__).resolve().parents[2] / "data" / "run_before_rooms" / "run"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"fp32_fast_tf32": True, "dtype": "auto"}, {"dtype": "tf32"}),
        ({"flashattention": False, "gpu_attention": "auto"}, {"attention": "stored"}),
        ({"flashattention": True, "gpu_attention": "cudnn"}, {"attention": "cudnn"}),
        ({"flashattention": True, "gpu_attention": "own"}, {}),
        ({"redux": True}, {"lanes": 4}),
        ({"redux": True, "lanes": 4}, {"lanes": 4}),
        ({"fp32_fast_tf32": True, "dtype": "tf32"}, {"dtype": "tf32"}),
        ({"full_lr_iter": 5, "warmup_steps": 5}, {"warmup_steps": 5, "warmup_start_lr": 0.0}),
        ({"restrict": "cpu", "sim_gpu": 0, "ngpu": 0}, {"sim_gpu": 0, "ngpu": 0}),
        ({"optimizer": "fusedadamw"}, {"optimizer": "adamw"}),
        ({"start_lr": 0.1, "full_lr_iter": 5, "warmup_steps": 0}, {"warmup_steps": 5, "warmup_start_lr": 0.1}),
        ({"start_lr": 0.1, "full_lr_iter": 1, "warmup_steps": 3}, {"warmup_steps": 3}),
        ({"nepochs": 2, "nepochs_warmup": 1}, {"nepochs": 3}),
        ({"restrict": "cuda"}, {"ngpu": -1}),
        ({"restrict": "cuda", "ngpu": 2}, {"ngpu": 2}),
        ({"restrict": "cpu"}, {"ngpu": 0}),
        ({"load_checkpoint": "w.safetensors"}, {"init_from": "w.safetensors"}),
        ({"strict": True, "nforward": 3, "loss_reduction": "sum", "save_checkpoint": "w"}, {}),
    ],
)
def test_old_settings_map_onto_present_ones(old: dict[str, Any], new: dict[str, Any]) -> None:
    """By name and by value; a second translation changes nothing."""
    assert translated(old, "x.toml") == new == translated(new, "x.toml")


@pytest.mark.parametrize(
    ("old", "words"),
    [
        ({"redux": True, "lanes": 2}, "redux = True in x.toml means lanes = 4, got lanes = 2; drop one of them"),
        ({"fp32_fast_tf32": True, "dtype": "bf16"}, "means dtype = tf32, got dtype = bf16"),
        ({"flashattention": False, "gpu_attention": "cudnn"}, "means gpu_attention = own, got gpu_attention = cudnn"),
        ({"flashattention": False, "attention": "flash"}, "means attention = stored, got attention = flash"),
        ({"gpu_attention": "cudnn", "attention": "stored"}, "means attention = cudnn, got attention = stored"),
        ({"full_lr_iter": 5, "warmup_steps": 3}, "means warmup_steps = 5, got warmup_steps = 3"),
        ({"full_lr_iter": 5, "warmup_start_lr": 0.1}, "means warmup_start_lr = 0.0, got warmup_start_lr = 0.1"),
        ({"full_lr_iter": 0}, "full_lr_iter in x.toml must be at least 1, got 0; the nearest legal value is 1"),
        ({"restrict": "cuda", "ngpu": 0}, "restrict = cuda in x.toml means ngpu = -1, got ngpu = 0"),
        ({"restrict": "cpu", "ngpu": 2}, "restrict = cpu in x.toml means ngpu = 0, got ngpu = 2"),
        ({"restrict": "cpu", "sim_gpu": 2}, "means sim_gpu = 0, got sim_gpu = 2"),
        ({"restrict": "cuda", "sim_gpu": 2}, "means sim_gpu = 0, got sim_gpu = 2"),
        ({"load_checkpoint": "w.safetensors", "init_from": "run"}, "means init_from = w.safetensors, got init_from = run"),
    ],
)
def test_contradictions_are_refused(old: dict[str, Any], words: str) -> None:
    """No translation replaces another explicit value, in a file of settings and in those of a checkpoint."""
    with pytest.raises(UsageError, match=re.escape(words)):
        translated(old, "x.toml")
    lines = "\n".join(f"{name} = {json.dumps(value)}" for name, value in old.items())
    with pytest.raises(UsageError, match=re.escape(words)):
        from_toml(lines, "x.toml", table_of(TrainSettings))


def test_what_training_no_longer_does_is_said() -> None:
    """One sentence for each setting that asks for something, none for one that asks for nothing."""
    old = {"strict": True, "nforward": 3, "nbackward": 0, "loss_reduction": "mean", "save_checkpoint": "w"}
    sentences = list(lost(old, "x.toml"))
    assert [sentence.partition(" in x.toml has no effect; ")[0] for sentence in sentences] == ["nforward", "strict", "save_checkpoint"]


def test_a_file_with_old_keys_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    """Sections or none, with notes about what has no effect; wrong types are named."""
    table = table_of(TrainSettings)
    text = '[optimizer]\noptimizer = "fusedadamw"\nfull-lr-iter = 4\nstart_lr = 0\n[run]\nnforward = 2\n'
    assert from_toml(text, "x.toml", table)[0] == {"optimizer": "adamw", "warmup-steps": 4, "warmup-start-lr": 0.0}
    assert "nforward in x.toml has no effect" in capsys.readouterr().err
    with pytest.raises(UsageError, match=r"full_lr_iter in x\.toml must be a whole number, got 'x'"):
        from_toml('full_lr_iter = "x"', "x.toml", table)
    with pytest.raises(UsageError, match=r"load_optimizer.*--resume"):
        from_toml('load_optimizer = "o.safetensors"', "x.toml", table)
    with pytest.raises(DataError, match=r"settings\.tiling\.redux in state\.json must be true or false, got 1"):
        from_dict({"tiling": {"redux": 1}}, "state.json")


def test_the_files_of_an_old_run_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """Its config.toml and its checkpoint give the same present settings, and nothing that they ask for is lost."""
    table = table_of(TrainSettings)
    text = (RUN / "config.toml").read_text()
    assert OLD_SETTINGS.keys() & {key for group in tomllib.loads(text).values() for key in group}
    values = {name: value for name, value in from_toml(text, "config.toml", table)[0].items() if name != "recompute"}
    state = json.loads((RUN / "checkpoints" / "step-000006" / "state.json").read_text())
    stored = from_dict(state["settings"], "state.json")
    assert build(TrainSettings(), {**values, "run-dir": stored.checkpoints.run_dir}, table) == stored
    assert capsys.readouterr().err == ""
