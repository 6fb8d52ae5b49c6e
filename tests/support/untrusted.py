"""Readers of files from elsewhere, each as one call that reads all that a command would, and a small valid input for each."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import struct
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from support.known_run import write_run
from support.model_directories import CONFIG, TEXT, saved, write_model
from support.objective_data import ImageLearner
from support.watched import Outcome, check_reader

from nntask.checkpoints.store import find_checkpoint
from nntask.config.settings import DataSettings, from_dict
from nntask.data.image_file import read_image
from nntask.data.json_lines import RowTexts, json_lines
from nntask.data.tables import json_rows, rows_of
from nntask.data.token_file import TokenFile
from nntask.data.tokenizer import load_tokenizer, train_bpe
from nntask.gguf.model_file import GgufModel
from nntask.hf.model_directory import ModelDirectory
from nntask.io.gguf_file import TENSOR_TYPES, GgufFile
from nntask.io.safetensors_file import TensorFile
from nntask.models.gpt2 import GPT2
from nntask.models.registry import FAMILIES, config_from_json, config_notes
from nntask.tiling.model_tiling import ModelTiling
from scheduler import InlineRuntime
from wrappers.cli import main
from wrappers.report.records import read_run


def read_safetensors(path: Path) -> int:
    """Open a file, and read its first tensors and its fingerprint; returns the number of tensors."""
    with TensorFile(path) as file:
        file.fingerprint()
        for each in list(file.ranges().values())[:50]:
            each.read(np.empty(each.shape, each.dtype))
        return len(file.entries)


def read_gguf(path: Path) -> int:
    """Open a file, read its first tensors and its notes, and open its tokenizer; returns the number of tensors."""
    model = GgufModel(path)
    for each in list(model.stored_ranges()[0].values())[:50]:
        each.read(np.empty(each.shape, each.dtype))
    assert all("\n" not in note for note in model.notes)
    load_tokenizer(path).encode(["some text"])
    return len(model.tensors)


def read_config(path: Path) -> int:
    """Read a config and what is said of it; returns the number of weights."""
    config = config_from_json(path)
    config_notes(json.loads(path.read_text(encoding="utf-8")), str(path))
    json.dumps(config.to_dict())
    return config.num_parameters


def read_tokenizer(path: Path) -> int:
    """Open a tokenizer and encode a word; returns the number of tokens."""
    tokenizer = load_tokenizer(path)
    tokenizer.decode([int(each) for each in next(iter(tokenizer.encode(["some"])))])
    return tokenizer.vocab_size


def read_lines(path: Path) -> int:
    """Read a file of JSON lines as texts for training and for validation; returns the number of letters."""
    train, validation = json_lines(str(path), "", -1)
    return sum(len(text.content) for lines in (train, validation) if lines is not None for text in RowTexts(lines))


def read_table(path: Path) -> int:
    """Read a table as texts and as rows; returns the number of letters."""
    return sum(map(len, rows_of(path))) + sum(map(len, json_rows(path)))


def read_ids(path: Path) -> int:
    """Open a file of token ids, and read all windows; returns the number of ids."""
    file = TokenFile(path, vocab_size=300)
    try:
        for first in range(0, file.num_tokens, 1 << 16):
            file.window(first, min(1 << 16, file.num_tokens - first))
        file.fingerprint()
        return file.num_tokens
    finally:
        file.close()


def read_state(path: Path) -> int:
    """Open the checkpoint of a state.json with its settings and its model; returns the step."""
    found = find_checkpoint(path.parent)
    from_dict(found.state["settings"], str(path))
    found.check_size()
    found.verify("model.safetensors", "optimizer.safetensors")
    return found.step


def read_picture(path: Path) -> tuple[int, ...]:
    """Read an image of one and of three channels; returns the shape."""
    read_image(path, 8, 1)
    return read_image(path, 8, 3).shape


def read_arrays(path: Path) -> int:
    """Open images in NumPy's files and read them all; returns their number."""
    from support.objective_data import opened

    dataset = opened(ImageLearner(), DataSettings(dataset="images", dataset_path=str(path)))
    examples = dataset.examples(0)
    examples.arrays(np.arange(examples.num_sequences), 0)
    return examples.num_sequences


def read_records(path: Path) -> int:
    """Read the records of a run for its report; `path` is one of its files. Returns the number of lines."""
    return len(read_run(path.parent).lines)


def read_index(path: Path) -> int:
    """Open the model directory of an index of shards; returns the number of tensors."""
    return len(ModelDirectory.open(path.parent).ranges)


@dataclass(frozen=True, slots=True)
class Parser:
    """A reader.

    Args:
        file: name of the file that is damaged.
        read: the reader, called with the path of the file.
        make: writes the files of a valid input to a directory.
    """

    file: str
    read: Callable[[Path], object]
    make: Callable[[Path], object]


def _arrays(directory: Path) -> None:
    np.save(directory / "images.npy", np.zeros((40, 8, 8, 1), np.uint8))
    np.save(directory / "images_labels.npy", np.arange(40, dtype=np.int32) % 2)


def _picture(directory: Path) -> None:
    from PIL import Image

    ramp = np.arange(16 * 16 * 3, dtype=np.uint8).reshape(16, 16, 3)
    Image.fromarray(ramp).save(directory / "picture.png")


def _table(directory: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [f"row {number}, and words" for number in range(50)]
    pq.write_table(pa.table({"text": rows, "number": list(range(50))}), directory / "rows.parquet")


def _ids(directory: Path) -> None:
    np.arange(4000, dtype=np.uint16).__mod__(300).astype("<u2").tofile(directory / "train.bin")
    (directory / "train.bin.json").write_text('{"dtype": "uint16"}')


def _lines(directory: Path) -> None:
    rows = [{"text": f"line {number} \u00e9", "n": number, "more": [{"a": None}]} for number in range(40)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _gguf(directory: Path) -> None:
    with tempfile.TemporaryDirectory() as beside:
        write_model(Path(beside) / "model")
        assert main(["quantize", str(Path(beside) / "model"), str(directory / "model.gguf")]) == 0


def _model(directory: Path) -> None:
    with tempfile.TemporaryDirectory() as beside:
        write_model(Path(beside) / "model")
        for file in (Path(beside) / "model").iterdir():
            (directory / file.name).write_bytes(file.read_bytes())


def _shards(directory: Path) -> None:
    from safetensors.numpy import load_file, save_file

    _model(directory)
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names, weights = sorted(tensors), {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, directory / file)
        weights |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weights}))


def _checkpoint(directory: Path) -> None:
    with tempfile.TemporaryDirectory() as run:
        found = saved(Path(run), GPT2(CONFIG, ModelTiling(), InlineRuntime(), seed=1), train_bpe([TEXT], 290))
        for file in found.path.iterdir():
            (directory / file.name).write_bytes(file.read_bytes())


def _run(directory: Path) -> None:
    write_run(directory)


PARSERS: Final[Mapping[str, Parser]] = {
    "safetensors": Parser("model.safetensors", read_safetensors, _model),
    "index": Parser("model.safetensors.index.json", read_index, _shards),
    "GGUF": Parser("model.gguf", read_gguf, _gguf),
    "config": Parser("config.json", read_config, _model),
    "tokenizer": Parser("tokenizer.json", read_tokenizer, _model),
    "JSON lines": Parser("rows.jsonl", read_lines, _lines),
    "tables": Parser("rows.parquet", read_table, _table),
    "token ids": Parser("train.bin", read_ids, _ids),
    "state": Parser("state.json", read_state, _checkpoint),
    "images": Parser("picture.png", read_picture, _picture),
    "arrays": Parser("images.npy", read_arrays, _arrays),
    "report": Parser("metrics.jsonl", read_records, _run),
}
"""Name of a parser -> how it is called."""


NATIVE: Final = ("tokenizer", "tables", "images")
"""Parsers of libraries in other languages, whose memory Python does not trace."""


@functools.cache
def valid_files(parser: str) -> Mapping[str, bytes]:
    """Name -> content of the files of a valid input."""
    with tempfile.TemporaryDirectory() as place:
        PARSERS[parser].make(Path(place))
        return {file.relative_to(place).as_posix(): file.read_bytes() for file in sorted(Path(place).rglob("*")) if file.is_file()}


def write_valid(parser: str, directory: Path) -> Path:
    """Write a valid input; return the file that is to be damaged."""
    for name, content in valid_files(parser).items():
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    return directory / PARSERS[parser].file


def fuzz(parser: str, place: Path, content: bytes, file: str = "") -> Outcome:
    """Read a valid input in which one file has other content, and check the bounds; returns the outcome.

    Args:
        parser: name of the parser.
        place: a directory for the input, made at the first call.
        content: the other content.
        file: name of the file; "" for the parser's own.
    """
    directory = place / parser.replace(" ", "-")
    if not directory.is_dir():
        directory.mkdir()
        write_valid(parser, directory)
    target = directory / (file or PARSERS[parser].file)
    target.write_bytes(content)
    try:
        return check_reader(PARSERS[parser].read, directory / PARSERS[parser].file, traced=parser not in NATIVE)
    finally:
        valid = valid_files(parser).get(target.name)
        target.unlink() if valid is None else target.write_bytes(valid)


def family_configs() -> dict[str, dict[str, Any]]:
    """Family -> the smallest config of its presets, as decoded JSON."""
    return {
        kind: min((config.to_dict() for config in family.presets.values()), key=lambda values: len(json.dumps(values)))
        for kind, family in FAMILIES.items()
        if family.presets
    }


def png(pixels: np.ndarray[Any, Any]) -> bytes:
    """A PNG of an array."""
    from PIL import Image

    found = io.BytesIO()
    Image.fromarray(pixels).save(found, "PNG")
    return found.getvalue()


def gguf_with(metadata: Any) -> bytes:
    """The valid GGUF file with other metadata; values of no type that a file can have are left out."""
    whole = valid_files("GGUF")["model.gguf"]
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "model.gguf").write_bytes(whole)
        file = GgufFile(Path(place) / "model.gguf")
    pairs = [made for key, value in metadata.items() if (made := _pair(key, value))] if isinstance(metadata, dict) else []
    entries, data, numbers = b"", b"", {each.name: number for number, each in TENSOR_TYPES.items()}
    for name, each in file.tensors.items():
        data += bytes(-len(data) % 32)
        shape = tuple(reversed(each.shape))
        entries += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, numbers[each.type.name], len(data))
        data += whole[each.offset : each.offset + each.nbytes]
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(file.tensors), len(pairs)) + b"".join(pairs) + entries
    return header + bytes(-len(header) % 32) + data


def _text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(raw)) + raw


def _pair(key: Any, value: Any) -> bytes:
    """A key with its value; nothing if the value has no type of GGUF."""
    made = _value(value)
    return _text(str(key)) + made if made else b""


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        for number, letter in ((4, "I"), (5, "i"), (10, "Q"), (11, "q")):
            with contextlib.suppress(struct.error):
                return struct.pack(f"<I{letter}", number, value)
        return b""
    if isinstance(value, float):
        return struct.pack("<Id", 12, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if not isinstance(value, list) or not value:
        return struct.pack("<IIQ", 9, 8, 0) if isinstance(value, list) else b""
    if all(isinstance(each, str) for each in value):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
    with contextlib.suppress(struct.error):
        return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
    return b""
