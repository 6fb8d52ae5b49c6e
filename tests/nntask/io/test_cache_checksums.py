"""Encoded data in the cache and in prepared directories: no id is learnt that was not written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nntask.data import DataSpec, TokenFile, open_dataset
from nntask.data import row_file as row_module
from nntask.data.objectives import Objective
from nntask.data.prepare import tokenize_dataset
from nntask.data.row_file import RowFile, write_rows
from nntask.data.token_file import write_sidecar
from nntask.errors import DataError
from nntask.io.block_checksums import BLOCK_NBYTES, BlockChecksums, block_checksums

AGAIN = "it is nntask's own cache and is rebuilt"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own."""
    monkeypatch.setenv("NNTASK_CACHE", str(tmp_path / "cache"))


def text_spec(tmp_path: Path) -> DataSpec:
    """A text of bytes, with one for validation."""
    for name in ("train", "val"):
        (tmp_path / f"{name}.txt").write_text(f"words for {name}, and some more\n" * 40)
    return DataSpec("text", str(tmp_path / "train.txt"), str(tmp_path / "val.txt"), tokenizer="bytes", vocab_size=300)


def rows_spec(tmp_path: Path) -> DataSpec:
    """Pairs in JSON lines."""
    lines = (json.dumps({"input": f"text {number}", "target": f"text {number + 1}"}) for number in range(40))
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    objective = Objective(kind="seq2seq", form="pairs", length=32, target_length=32)
    return DataSpec("jsonl", str(tmp_path / "rows.jsonl"), tokenizer="bytes", vocab_size=300, objective=objective)


def content(folder: Path) -> dict[str, bytes]:
    """Relative path -> bytes, of all files below a folder."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def flip(path: Path, at: int = -1) -> None:
    """Change one bit of a file in place, and not its size."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("spec_of", [text_spec, rows_spec])
def test_whatever_file_of_the_cache_changed_is_made_again(spec_of: Callable[[Path], DataSpec], tmp_path: Path) -> None:
    """For each file of encoded data: one bit, the end cut off, nothing left, and a checksum removed; one line says so."""
    spec = spec_of(tmp_path)
    open_dataset(spec)
    folder = tmp_path / "cache"
    whole = content(folder)
    names = [name for name in whole if not name.endswith("findings.json")]
    assert len(names) >= 3
    for name in names:
        for harm in (flip, lambda path: os.truncate(path, path.stat().st_size - 4), lambda path: os.truncate(path, 0)):
            harm(folder / name)
            said: list[str] = []
            open_dataset(spec, said.append)
            assert sum(AGAIN in sentence for sentence in said) == 1, (name, said)
            assert content(folder) == whole, name
    said = []
    open_dataset(spec, said.append)
    assert not any(AGAIN in sentence or "tokenising" in sentence for sentence in said)


def test_a_cache_of_an_earlier_version_is_made_again(tmp_path: Path) -> None:
    """It has no checksums, and its ids are not believed."""
    spec = text_spec(tmp_path)
    dataset = open_dataset(spec)
    assert isinstance(dataset.train, TokenFile)
    path = dataset.train.path
    ids = path.read_bytes()
    path.write_bytes(b"\x05\x00" * (len(ids) // 2))
    path.with_name("train.bin.json").write_text('{"dtype": "uint16"}')
    said: list[str] = []
    open_dataset(spec, said.append)
    assert any(f"{path} (cached tokens of " in sentence and f" has no checksums; {AGAIN}" in sentence for sentence in said)
    assert path.read_bytes() == ids


def test_no_id_of_a_large_file_is_learnt_unread(tmp_path: Path) -> None:
    """Behind the head that is compared on opening, an id that changed ends the run when it is read, and the next run makes the file again."""
    path = tmp_path / "train.bin"
    ids = np.arange(BLOCK_NBYTES * 2, dtype="<u2") % 300  # four blocks
    path.write_bytes(ids.tobytes())
    write_sidecar(path, path, ids.dtype)
    flip(path, 3 * BLOCK_NBYTES + 8)
    file = TokenFile(path, vocab_size=400, scan_nbytes=BLOCK_NBYTES, name="the texts")
    third = 3 * BLOCK_NBYTES // 2
    assert file.window(third - 40, 40).tolist() == ids[third - 40 : third].tolist()
    with pytest.raises(DataError, match=rf"the ids from position {third} have another checksum; .* the next run rebuilds"):
        file.window(third - 40, 41)
    with pytest.raises(DataError, match="cannot read"):
        TokenFile(path, vocab_size=400, name="the texts")


def test_what_another_run_made_again_is_kept(tmp_path: Path) -> None:
    """A run that finds its tokens changed leaves alone what replaced them meanwhile, and a sidecar that another run writes just now."""
    path, copy = tmp_path / "train.bin", tmp_path / "copy"
    ids = np.arange(BLOCK_NBYTES, dtype="<u2") % 300  # two blocks
    for file in (path, copy):
        file.write_bytes(ids.tobytes())
    flip(path)
    write_sidecar(path, copy, ids.dtype)
    with pytest.raises(DataError, match="changed since it was written"):
        TokenFile(path, vocab_size=400, name="the texts")
    copy.rename(path)
    assert TokenFile(path, vocab_size=400, name="the texts").window(0, len(ids)).tolist() == ids.tolist()
    flip(path)
    old = TokenFile(path, vocab_size=400, scan_nbytes=1, name="the texts")
    copy.write_bytes(ids.tobytes())
    copy.rename(path)
    with pytest.raises(DataError, match="changed since it was written"):
        old.window(len(ids) - 1, 1)
    assert TokenFile(path, vocab_size=400, name="the texts").window(0, len(ids)).tolist() == ids.tolist()


def test_a_cache_that_another_run_removes_at_once(tmp_path: Path) -> None:
    """Two runs find the same changed tokenizer; the slower one finds nothing to remove."""
    pytest.importorskip("tokenizers")
    spec = replace(text_spec(tmp_path), tokenizer="bpe")
    open_dataset(spec)
    whole = content(tmp_path / "cache")
    tokenizer = next((tmp_path / "cache").rglob("tokenizer.json"))
    flip(tokenizer)

    def report(sentence: str) -> None:
        if "tokenizer.json changed since" in sentence:
            shutil.rmtree(tokenizer.parent)

    open_dataset(spec, report)
    assert content(tmp_path / "cache") == whole
    assert [path.name for path in tokenizer.parent.parent.iterdir()] == [tokenizer.parent.name]


def test_a_disk_that_fails_ends_the_reading_in_a_sentence(tmp_path: Path) -> None:
    """Of rows, with or without checksums, and of tokens."""
    write_rows(tmp_path / "rows", ([np.full(1000, number, np.int32)] * 2 for number in range(30)))
    folder = os.open(tmp_path, os.O_RDONLY)  # cannot be read as a file
    try:
        for is_written in (True, False):
            rows = RowFile(tmp_path / "rows", 2, "the rows", is_written=is_written)
            for file in rows._open.values():
                os.dup2(folder, file.fd)
            with pytest.raises(DataError, match=r"cannot read .*\(cached rows of the rows\): Is a directory; remove"):
                rows.row(3)
        path = tmp_path / "train.bin"
        path.write_bytes(bytes(2 * BLOCK_NBYTES))
        write_sidecar(path, path, np.dtype("<u2"))
        file = TokenFile(path, vocab_size=400, scan_nbytes=1, name="the texts")
        os.dup2(folder, file._file.fd)
        with pytest.raises(DataError, match="Is a directory; it is nntask's own cache"):
            file.window(BLOCK_NBYTES // 2, 5)
    finally:
        os.close(folder)


def test_no_row_of_a_large_file_is_learnt_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of tokens."""
    write_rows(tmp_path / "rows", ([np.full(1000, number, np.int32)] * 2 for number in range(30)))
    flip(tmp_path / "rows" / "values.bin", 2 * BLOCK_NBYTES + 8)
    monkeypatch.setattr(row_module, "HEAD_NBYTES", 100)
    rows = RowFile(tmp_path / "rows", 2)
    assert rows.row(3)[0].tolist() == [3] * 1000
    with pytest.raises(DataError, match=r"values.bin changed since it was written.* which the next run rebuilds"):
        rows.row(2 * BLOCK_NBYTES // 8000)
    with pytest.raises(DataError, match=r"cannot read .*rows: No such file"):
        RowFile(tmp_path / "rows", 2)


def test_a_prepared_directory_that_changed_is_refused(tmp_path: Path) -> None:
    """nntask cannot make it again; what its owner wants changed is said in the sidecar."""
    tokenize_dataset(text_spec(tmp_path), tmp_path / "out")
    spec = DataSpec("train.bin", str(tmp_path / "out"), tokenizer="bytes", vocab_size=300)
    open_dataset(spec)
    flip(tmp_path / "out" / "val.bin")
    dataset = open_dataset(spec)
    assert isinstance(dataset.validation, TokenFile)
    with pytest.raises(DataError, match=r"val.bin changed since it was written.*nntask data prepare"):
        dataset.validation.window(0, 5)
    flip(tmp_path / "out" / "train.bin")
    with pytest.raises(DataError, match=r"train.bin changed since it was written.*nntask data prepare"):
        open_dataset(spec)
    sidecar = tmp_path / "out" / "train.bin.json"
    text = sidecar.read_text()
    for wrong in (text.replace("uint16", "uint32"), text.replace("blocks", "block5"), text.replace("crc32", "crc33")):
        sidecar.write_text(wrong)
        with pytest.raises(DataError, match="damaged"):
            open_dataset(spec)
    (tmp_path / "out" / "train.bin").write_bytes(b"\x05\x00" * 500)
    sidecar.write_text(text)
    with pytest.raises(DataError, match=r'changed since.*write \{"dtype": "uint16"\}'):
        open_dataset(spec)
    sidecar.write_text('{"dtype": "uint16"}')
    assert isinstance(open_dataset(spec).train, TokenFile)


def test_a_block_is_compared_once(tmp_path: Path) -> None:
    """The first block that differs is named; equal ones are not read again."""
    path = tmp_path / "file"
    path.write_bytes(bytes(BLOCK_NBYTES) * 2 + b"end")
    digits = block_checksums(path)
    checksums = BlockChecksums(digits, path.stat().st_size)
    fd = os.open(path, os.O_RDONLY)
    try:
        assert checksums.first_changed(fd, 0, 1) is None
        flip(path, 5)
        flip(path, -1)
        assert checksums.first_changed(fd, 0, 2 * BLOCK_NBYTES) is None
        assert checksums.first_changed(fd, 0, 2 * BLOCK_NBYTES + 1) == 2 * BLOCK_NBYTES
    finally:
        os.close(fd)
    for wrong in (digits[:-1], digits[:-1] + "x", "", 5):
        with pytest.raises(ValueError, match=r"checksums|hexadecimal"):
            BlockChecksums(wrong, path.stat().st_size)  # type: ignore[arg-type]
