"""GGUF files in shards, as llama-gguf-split writes them: any shard names the model, and shards that do not belong together are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support.gguf_files import write_gguf
from support.gguf_oracle import greedy, read
from support.gguf_rules import add_keys, finish
from support.model_directories import write_model
from support.transformers_oracle import CONFIGS, hf_model

from nntask.data.tokenizer import load_tokenizer
from nntask.errors import DataError, NntaskError, StorageError
from nntask.gguf.model_file import fingerprint, open_gguf
from nntask.tiling.model_tiling import ModelTiling
from wrappers.cli import main

COUNT = 3


def split(path: Path, folder: Path, *, count: int = COUNT) -> list[Path]:
    """The shards of a file: metadata in the first one, and tensors in turn."""
    reader = gguf.GGUFReader(path)
    folder.mkdir(exist_ok=True)
    shards = [folder / f"model-{number + 1:05d}-of-{count:05d}.gguf" for number in range(count)]
    for number, shard in enumerate(shards):
        writer = gguf.GGUFWriter(shard, "gpt2" if number == 0 else "")
        if number:
            writer.kv_data[0].clear()  # of an architecture
        else:
            fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith(("GGUF.", "general.architecture"))}
            add_keys(writer, fields)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number::count]:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        finish(writer)
    return shards


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A GPT-2 with a tokenizer in one file."""
    write_model(tmp_path / "model")
    return write_gguf(tmp_path / "whole.gguf", hf_model(replace(CONFIGS["gpt2"], vocab_size=300)), tokenizer=tmp_path / "model")


def test_any_shard_names_the_model(tmp_path: Path, whole: Path) -> None:
    """Weights, tokens of greedy texts, the tokenizer, and one fingerprint."""
    shards = split(whole, tmp_path / "shards")
    expected = read(whole, ModelTiling())
    for shard in shards:
        found = read(shard, ModelTiling())
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[name], expected[name]) for name in expected)
        assert load_tokenizer(shard).encode(["some text"])[0].tolist() == load_tokenizer(whole).encode(["some text"])[0].tolist()
    assert greedy(shards[1], [3, 1, 4]) == greedy(whole, [3, 1, 4])
    assert len({fingerprint(shard) for shard in shards}) == 1
    assert open_gguf(shards[2]).notes == []
    alone = split(whole, tmp_path / "alone", count=1)
    assert greedy(alone[0], [3, 1, 4]) == greedy(whole, [3, 1, 4])


def test_a_shard_that_changes_is_seen(tmp_path: Path, whole: Path) -> None:
    """One that is replaced while another names the model, in the model and in the fingerprint."""
    shards = split(whole, tmp_path / "shards")
    before, mark = read(shards[0], ModelTiling()), fingerprint(shards[0])
    raw = bytearray(shards[2].read_bytes())
    raw[-64:-60] = np.float32(0.5).tobytes()
    shards[2].write_bytes(raw)
    after = read(shards[0], ModelTiling())
    assert any(not np.array_equal(before[name], after[name]) for name in before)
    assert fingerprint(shards[0]) != mark


def changed(shard: Path, **keys: Any) -> None:
    """A shard with other values of its keys of shards."""
    reader = gguf.GGUFReader(shard, "r+")
    for key, value in keys.items():
        field = reader.fields[f"split.{key.replace('_', '.')}"]
        field.parts[field.data[0]][0] = value
    reader.data.flush()


def test_shards_that_do_not_belong_together(tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing, swapped, renamed, foreign, repeated or broken shard: one sentence."""
    wrong: dict[str, tuple[Any, str]] = {
        "missing": (lambda shards: shards[1].unlink(), "model-00002-of-00003.gguf is not in its directory; copy the missing shard"),
        "swapped": (lambda shards: changed(shards[1], no=2), "is shard 2 of 3 by its metadata, and shard 1 of 3 by its name"),
        "other count": (lambda shards: changed(shards[1], count=4), "is shard 1 of 4 by its metadata"),
        "tensors": (lambda shards: changed(shards[0], tensors_count=7), "split.tensors.count in"),
        "repeated": (lambda shards: (shards[1].write_bytes(shards[2].read_bytes()), changed(shards[1], no=1)), "and in a shard before it"),
        "huge": (lambda shards: changed(shards[0], count=65535), "split.count in"),
        "none": (lambda shards: changed(shards[0], count=0), "split.count in"),
    }
    for name, (spoil, words) in wrong.items():
        shards = split(whole, tmp_path / name)
        spoil(shards)
        with pytest.raises(DataError) as caught:
            open_gguf(shards[0])
        assert words in str(caught.value), name
        assert main(["generate", str(shards[0]), "--prompt=a"]) == 4
        assert capsys.readouterr().err.count("\n") == 1
    shards = split(whole, tmp_path / "cut")
    shards[1].write_bytes(shards[1].read_bytes()[:-100])
    with pytest.raises(StorageError, match="must begin at a multiple of"):
        open_gguf(shards[0])
    shards = split(whole, tmp_path / "renamed")
    shards[0].rename(other := tmp_path / "renamed" / "model.gguf")
    with pytest.raises(DataError, match=r"split.count in .* is 3, and by its name there is 1"):
        open_gguf(other)
    with pytest.raises(NntaskError):
        open_gguf(shards[0])


def test_a_shard_is_not_written_over(tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the model that is read, by `quantize --force`."""
    shards = split(whole, tmp_path / "shards")
    before = shards[1].read_bytes()
    assert main(["quantize", str(shards[0]), str(shards[1]), "--force"]) == 2
    assert "which is the source" in capsys.readouterr().err
    assert shards[1].read_bytes() == before
    assert main(["quantize", str(shards[2]), str(tmp_path / "one.gguf"), "--type=f32"]) == 0
    assert greedy(tmp_path / "one.gguf", [3, 1, 4]) == greedy(whole, [3, 1, 4])


def test_joined_shards_are_one_file(tmp_path: Path, whole: Path) -> None:
    """llama-gguf-split leaves a count of 0 in what it joins, under a name that is no shard's."""
    (joined,) = split(whole, tmp_path / "joined", count=1)
    for count in (0, 1):
        target = tmp_path / f"joined-{count}.gguf"
        raw = joined.read_bytes()
        key = b"split.count"
        place = raw.index(key) + len(key) + 4  # behind the number of the value's type
        target.write_bytes(raw[:place] + count.to_bytes(2, "little") + raw[place + 2 :])
        found, expected = read(target, ModelTiling()), read(whole, ModelTiling())
        assert all(np.array_equal(found[name], expected[name]) for name in expected)
