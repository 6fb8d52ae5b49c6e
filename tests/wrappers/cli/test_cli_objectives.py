"""``nntask train`` on JSON lines, and what it says to objectives that a model cannot learn."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.commands import refuse, rewrite_state
from support.objective_data import CHATML, TEXTS, lines_in

from wrappers.cli import main

SMALL = {"vocab_size": 257, "n_positions": 16, "n_embd": 12, "n_layer": 1, "n_head": 3, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
TRAIN = ["train", "--config-path=small.json", "--tokenizer=bytes", "--batch=4", "--steps=2", "--ncpu=1", "--sample-tokens=0", "--dataset=jsonl"]


@pytest.fixture
def here(folder: Path) -> Path:
    """A directory with a small config and lines."""
    (folder / "small.json").write_text(json.dumps({"model_type": "gpt2", **SMALL}))
    lines_in(folder / "text.jsonl", [{"text": text} for text in TEXTS])
    lines_in(folder / "labels.jsonl", [{"text": text, "label": 0} for text in TEXTS])
    lines_in(folder / "talk.jsonl", [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 8)
    (folder / "broken.jsonl").write_text('{"text": "a"}\n\n{"text":\n')
    (folder / "t.jinja").write_text(CHATML)
    return folder


def test_a_model_learns_from_json_lines(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Texts are held out for validation, a run that goes on has the same objective, and other boundaries are a difference."""
    assert main([*TRAIN, "--dataset-path=text.jsonl", "--run-dir=run", "--eval-every=2"]) == 0
    out = capsys.readouterr().out
    assert "bits/byte" in out
    assert 'objective = "causal"' in (here / "run" / "config.toml").read_text()
    path = next((here / "run" / "checkpoints").glob("*/state.json"))
    assert json.loads(path.read_text())["settings"]["data"]["objective"] == "causal"
    for key in ("objective", "mask_probability"):  # as before there were objectives
        rewrite_state(path, lambda state, key=key: state["settings"]["data"].pop(key))
    assert main(["train", "--resume=run", "--steps=3"]) == 0
    code, message = refuse(capsys, ["train", "--resume=run", "--steps=4", "--document-boundaries"])
    assert code == 2
    assert "--document-boundaries (was False, is True)" in message


def test_json_lines_are_prepared(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The token files of the texts, as any other dataset's; images are not."""
    assert main(["data", "prepare", "--dataset=jsonl", "--dataset-path=text.jsonl", "--tokenizer=bytes", "--output=out"]) == 0
    ids = np.fromfile(here / "out" / "train.bin", "<u2")
    assert (ids == 256).sum() + (np.fromfile(here / "out" / "val.bin", "<u2") == 256).sum() == len(TEXTS)
    code, message = refuse(capsys, ["data", "prepare", "--dataset=images", "--dataset-path=.", "--output=other"])
    assert (code, "--dataset images is read in place" in message) == (2, True)


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["--dataset-path=text.jsonl", "--objective=masked"], 2, "--objective masked is not for a gpt2, which learns causal"),
        (["--dataset-path=text.jsonl", "--objective=mask"], 2, "--objective must be one of causal, masked, seq2seq, classify, got 'mask'"),
        (["--dataset-path=broken.jsonl"], 4, "broken.jsonl line 3 is not JSON"),
        (["--dataset-path=labels.jsonl", "--objective=classify"], 2, "--objective classify is not for a gpt2"),
        (["--dataset-path=none.jsonl"], 4, "--dataset-path none.jsonl does not exist"),
        (["--dataset-path=talk.jsonl", "--chat-template=none.jinja"], 4, "--chat-template none.jinja does not exist"),
        (["--dataset-path=text.jsonl", "--objective=masked:1"], 2, "SHARE in --objective must be above 0 and below 1, got 1"),
        (["--dataset=images", "--dataset-path=."], 2, "--dataset images is not for a gpt2"),
    ],
)
def test_mistakes_are_one_sentence(here: Path, capsys: pytest.CaptureFixture[str], argv: list[str], code: int, words: str) -> None:
    """With the exit code of what is wrong."""
    found, message = refuse(capsys, [*TRAIN, *argv])
    assert (found, words in message) == (code, True), message
