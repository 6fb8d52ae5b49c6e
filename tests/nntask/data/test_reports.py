"""Reports of long work go to a reader that may end, as in ``nntask train | head``: its broken pipe is no error of a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from nntask.data.dataset import open_dataset
from nntask.data.prepare import tokenize_dataset
from nntask.data.spec import DataSpec


class Ended:
    """Report that fails at its nth sentence, as a write to a closed pipe; `sentences` has those before."""

    def __init__(self, number: int) -> None:
        self.left, self.sentences = number, list[str]()

    def __call__(self, sentence: str) -> None:
        if self.left == 0:
            raise BrokenPipeError(32, "Broken pipe")
        self.left -= 1
        self.sentences.append(sentence)


def spec_of(folder: Path) -> DataSpec:
    """Texts with a tokenizer of bytes, which are encoded to the cache."""
    (folder / "a.txt").write_text("to be or not to be, that is the question\n" * 50)
    return DataSpec(dataset="text", path=str(folder / "a.txt"), tokenizer="bytes", vocab_size=257)


@pytest.mark.parametrize("kind", ["open", "prepare"])
def test_the_end_of_a_reader_is_no_failure_of_a_file(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At whichever sentence it comes: the broken pipe itself reaches the command, which then ends without an error."""
    monkeypatch.setenv("NNTASK_CACHE", str(tmp_path / "whole"))
    spec = spec_of(tmp_path)

    def work(report: Ended, name: str) -> None:
        if kind == "open":
            open_dataset(spec, report)
        else:
            tokenize_dataset(spec, tmp_path / name, report)

    whole = Ended(-1)
    work(whole, "all")
    assert whole.sentences
    for number in range(len(whole.sentences)):
        monkeypatch.setenv("NNTASK_CACHE", str(tmp_path / f"cache{number}"))
        with pytest.raises(BrokenPipeError):
            work(Ended(number), f"out{number}")
