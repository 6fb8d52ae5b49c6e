"""Model directories and checkpoints whose config is made to break its reader: one sentence, a documented exit code, and no memory taken."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.model_directories import CONFIG, TEXT, saved, write_model

from nntask.data.tokenizer import train_bpe
from nntask.errors import DataError
from nntask.hf.model_directory import ModelDirectory
from nntask.io.sealed_json import sealed
from nntask.models.gpt2 import GPT2
from nntask.tiling.model_tiling import ModelTiling
from scheduler import InlineRuntime
from wrappers.cli import main

LARGEST = (1 << 31) - 1
CHANGES: dict[str, dict[str, Any]] = {
    "as many blocks as there may be": {"n_layer": 1 << 14},
    "more blocks": {"n_layer": 10**9},
    "the widest": {"n_embd": 1 << 30, "n_head": 1 << 20},
    "wider": {"n_embd": 10**12},
    "the widest inside": {"n_inner": LARGEST},
    "the largest vocabulary": {"vocab_size": LARGEST},
    "a larger one": {"vocab_size": 1 << 60},
    "the most positions": {"n_positions": LARGEST},
    "all at once": {"n_layer": 1 << 14, "n_embd": 1 << 30, "n_head": 1 << 20, "vocab_size": LARGEST, "n_positions": LARGEST},
    "below zero": {"n_embd": -12},
    "none": {"n_head": 0},
    "a fraction": {"n_layer": 1.5},
    "no number": {"layer_norm_epsilon": float("nan")},
    "infinite": {"n_embd": float("inf")},
    "a list": {"vocab_size": [[[300]]]},
    "a type of the family that is none": {"model_type": {"a": []}},
}
COMMANDS = {
    "generate": ["--prompt=some", "--max-new-tokens=2"],
    "perplexity": ["--dataset=text", "--dataset-path=notes.txt"],
    "quantize": ["out.gguf"],
    "serve": ["--port=0"],
    "train": ["--dataset=text", "--dataset-path=notes.txt", "--seq-len=8", "--steps=1", "--run-dir=run", "--train=lora:2"],
    "plan": ["--seq-len=8"],
}


@pytest.fixture
def bounded() -> Iterator[None]:
    """Two GiB of addresses beside what is mapped, for what would take memory without end."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (2 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def argv_of(command: str) -> list[str]:
    """A command line about the directory `model`."""
    first = {"train": ["--init-from=model"], "plan": ["--init-from=model"]}.get(command, ["model"])
    return [command, *first, *COMMANDS[command]]


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("command", COMMANDS)
def test_hostile_configs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every size that is too large, or none: refused before anything is made of it."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model")
    (tmp_path / "notes.txt").write_text("some words\n" * 50)
    config = tmp_path / "model" / "config.json"
    values = json.loads(config.read_text())
    for name, change in CHANGES.items():
        config.write_text(json.dumps({**values, **change}))
        before = psutil.Process().memory_info().rss
        code = main(argv_of(command))
        err = capsys.readouterr().err
        assert code in (2, 3, 4), (name, code, err)
        assert err.count("\n") == 1, (name, err)
        assert psutil.Process().memory_info().rss - before < 200 << 20, name
    for depth in (90, 110, *range(700, 1000, 3), 100_000):
        config.write_text(json.dumps(values).removesuffix("}") + f', "n_embd": {"[" * depth}{"]" * depth}}}')
        code = main(argv_of(command))
        err = capsys.readouterr().err
        assert code in (2, 4), (depth, code, err)
        assert err.count("\n") == 1, (depth, err)


def test_a_config_of_more_weights_than_there_are(tmp_path: Path) -> None:
    """Named with both numbers; a vocabulary that is a little larger is told by its tensor."""
    write_model(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps({**values, "vocab_size": 30_000}))
    with pytest.raises(DataError, match=r"asks for 36\d,\d\d\d weights, and its files hold 7,\d\d\d; copy both"):
        ModelDirectory.open(tmp_path / "model")
    config.write_text(json.dumps({**values, "vocab_size": 301}))
    ModelDirectory.open(tmp_path / "model")


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "chat_template.jinja"])
def test_files_of_gigabytes_beside_a_tokenizer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Are not read."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model")
    with (tmp_path / "model" / name).open("wb") as out:
        out.truncate(4 << 30)
    assert main(argv_of("generate")) == 4
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert name in err


def test_a_tokenizer_file_of_a_gigabyte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Is not read; one that is nested deeply is refused."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    file.write_text("[" * 1_000_000)
    assert main(argv_of("generate")) == 4
    assert "is longer than any of a published tokenizer" in capsys.readouterr().err
    with file.open("r+b") as out:
        out.truncate(1 << 30)
    assert main(argv_of("generate")) == 4
    assert "it has more than 104,857,600 bytes" in capsys.readouterr().err


@pytest.mark.parametrize("metadata", ['"text"', "[1]", '{"quantised": 5}', '{"quantised": ["a"]}', '{"quantised": "[]"}', '{"quantised": "{\\n"}'])
def test_wrong_metadata_of_safetensors(metadata: str, tmp_path: Path) -> None:
    """What is no object of texts, or says of no tensors how they are quantised, is refused with one sentence."""
    write_model(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    del header["__metadata__"]
    text = (json.dumps(header).removesuffix("}") + f', "__metadata__": {metadata}}}').encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    with pytest.raises(DataError) as caught:
        ModelDirectory.open(tmp_path / "model")
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("command", ["generate", "quantize", "serve", "export"])
def test_hostile_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint whose state asks for more weights than there are: the same."""
    monkeypatch.chdir(tmp_path)
    checkpoint = saved(tmp_path / "model", GPT2(CONFIG, ModelTiling(), InlineRuntime(), seed=1), train_bpe([TEXT], 290))
    file = checkpoint.path / "state.json"
    for name in ("as many blocks as there may be", "the widest", "the widest inside", "the largest vocabulary", "all at once"):
        file.write_text(sealed({**checkpoint.state, "model": {**checkpoint.state["model"], **CHANGES[name]}}))
        code = main([command, "model", *COMMANDS.get(command, ["out"])])
        err = capsys.readouterr().err
        assert (code, err.count("\n")) == (4, 1), (name, code, err)
        assert "weights, and model.safetensors holds" in err
