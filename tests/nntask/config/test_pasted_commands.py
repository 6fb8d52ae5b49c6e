"""Commands in messages: pasted into a shell they do what the message says, whatever a directory from elsewhere is called."""

from __future__ import annotations

import ast
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from nntask.data import TokenFile
from nntask.data.foreign_tokenizer import open_tokenizer
from nntask.errors import NntaskError
from nntask.hf.model_directory import weight_ranges
from nntask.io.safetensors_file import TensorFile
from nntask.io.terminal_text import python_command, python_text
from nntask.training.run_directory import check_new_run

NAMES = [
    "plain",
    "a b",
    "$(touch owned)",
    "`touch owned`",
    "'; touch owned; '",
    '"; touch owned; "',
    "'); import os; os.system('touch owned'); ('",
    "\\",
]


def pickled(place: Path) -> None:
    """A torch checkpoint in place of weights."""
    (place / "model.safetensors").write_bytes(b"PK\x03\x04" + bytes(60))
    TensorFile(place / "model.safetensors")


def pickled_directory(place: Path) -> None:
    """A model directory with a pickle and no safetensors."""
    (place / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (place / "tokenizer.json").write_text("{}")
    (place / "pytorch_model.bin").write_bytes(b"PK")
    weight_ranges(place)


def sentence_piece(place: Path) -> None:
    """A tokenizer that transformers would convert."""
    (place / "tokenizer.model").write_bytes(b"x")
    open_tokenizer(place)


def tokens_of_llm_c(place: Path) -> None:
    """Token ids behind the header of llm.c."""
    (place / "train.bin").write_bytes(np.array([20240520, 1], "<i4").tobytes() + bytes(2000))
    TokenFile(place / "train.bin", vocab_size=300)


def run_that_is_there(place: Path) -> None:
    """A run directory with a checkpoint."""
    (place / "checkpoints" / "step-000001").mkdir(parents=True)
    check_new_run(place)


CASES: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "pickle": (pickled, "convert it: ", ", then put"),
    "pickled directory": (pickled_directory, "convert it: ", ", then give"),
    "tokenizer.model": (sentence_piece, "write one with: ", ""),
    "llm.c": (tokens_of_llm_c, "leave it out with: ", ""),
    "run": (run_that_is_there, "continue that run with ", ""),
}
"""Kind of message -> what brings it about, and the words around its command."""


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES)
def test_a_pasted_command_runs_nothing_else(case: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell hands over the path as one word, or as one literal of a line of Python."""
    bring_about, before, after = CASES[case]
    programs, place = tmp_path / "bin", tmp_path / name
    programs.mkdir()
    place.mkdir()
    for program in ("python", "tail"):
        (programs / program).write_text(f'#!/bin/sh\nprintf "%s\\0" "$@" > {tmp_path}/words\n')
        (programs / program).chmod(0o755)
    with pytest.raises(NntaskError) as error:
        bring_about(place)
    command = str(error.value).split(before)[1]
    command = command.rsplit(after, 1)[0] if after else command
    command = f"python {command}" if command.startswith("--") else command
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    subprocess.run(["/bin/sh", "-c", command], cwd=tmp_path, check=True, timeout=20)
    words = (tmp_path / "words").read_bytes().decode().split("\0")[:-1]
    if len(words) == 2 and words[0] == "-c":
        literals = [node.value for node in ast.walk(ast.parse(words[1])) if isinstance(node, ast.Constant)]
        assert any(isinstance(value, str) and value.startswith(str(place)) for value in literals)
    else:
        assert any(word.startswith(str(place)) for word in words)
    assert not list(tmp_path.rglob("owned"))


def test_a_literal_is_the_text(tmp_path: Path) -> None:
    """Quotes of both kinds, escapes, and characters of every plane."""
    for text in (*NAMES, "é ∀ 🙂", "line\nbreak", "\x1b[0m", "a\udcffb"):
        assert ast.literal_eval(python_text(text)) == text
    assert python_command('print("a")') == "python -c 'print(\"a\")'"
