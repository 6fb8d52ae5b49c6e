"""Readers of files from outside: pipes, devices and endless files are refused at once, whatever the reader; headers have one meaning."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.objective_data import ImageLearner, opened

from nntask.checkpoints.store import find_checkpoint
from nntask.config.settings import DataSettings
from nntask.data.findings import read_findings
from nntask.data.json_lines import JsonLines
from nntask.data.row_file import RowFile
from nntask.data.texts import Text
from nntask.data.token_file import TokenFile
from nntask.data.tokenizer import load_tokenizer
from nntask.errors import DataError, NntaskError
from nntask.gguf.model_file import is_gguf
from nntask.io.json_file import read_json
from nntask.io.regular_file import open_regular, read_bytes, read_text
from nntask.io.safetensors_file import TensorFile, checksum_of
from nntask.telemetry.metrics import read_metrics
from nntask.tiling.tile_table import read_table
from wrappers.cli.commands.serve import _key
from wrappers.report.records import read_trace

READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "JSON": ("config.json", lambda place: read_json(place, "the config")),
    "safetensors": ("model.safetensors", TensorFile),
    "checksum": ("model.safetensors", checksum_of),
    "metrics": ("metrics.jsonl", read_metrics),
    "tile table": ("tiles.toml", read_table),
    "state": ("state.json", lambda place: find_checkpoint(place.parent)),
    "rows": ("values.bin", lambda place: RowFile(place.parent, 2)),
    "findings": ("findings.json", read_findings),
    "token ids": ("train.bin", lambda place: TokenFile(place, vocab_size=300)),
    "sidecar": ("train.bin.json", lambda place: TokenFile(place.with_suffix(""), vocab_size=300)),
    "tokenizer": ("tokenizer.json", load_tokenizer),
    "text file": ("notes.txt", lambda place: next(Text("notes", place).pieces())),
    "JSON lines": ("rows.jsonl", lambda place: next(iter(JsonLines((place,))))),
    "trace": ("trace.json", read_trace),
    "text": ("text.txt", read_text),
    "array": ("images.npy", lambda place: opened(ImageLearner(), DataSettings(dataset="images", dataset_path=str(place)))),
    "key": ("key", lambda place: _key(str(place))),
}
"""What is read -> name of the file, and its reader."""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_refused_at_once(reader: str, kind: str, tmp_path: Path) -> None:
    """A pipe that nobody writes to, and a link to a device without an end: an error in one line, and no wait."""
    name, read = READERS[reader]
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises((NntaskError, OSError)) as caught:
        read(tmp_path / name)
    assert "\n" not in str(caught.value)


@pytest.mark.timeout(60)
def test_a_pipe_is_no_model(tmp_path: Path) -> None:
    """A pipe with the name of a GGUF file is looked at without being opened."""
    os.mkfifo(tmp_path / "model.gguf")
    assert not is_gguf(tmp_path / "model.gguf")


def test_files_are_read_up_to_their_limit(tmp_path: Path) -> None:
    """At the limit a file is whole; a byte above it is an error that says the limit. A directory is named as one."""
    (tmp_path / "a").write_bytes(b"12345")
    assert read_bytes(tmp_path / "a", 5) == b"12345"
    with pytest.raises(OSError, match="it has more than 4 bytes"):
        read_bytes(tmp_path / "a", 4)
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    os.close(fd := open_regular(tmp_path / "a"))
    assert fd > 0


def changed_header(path: Path, change: Callable[[str], bytes]) -> None:
    """Replace the header of a safetensors file of one tensor by what `change` makes of its text."""
    save_file({"w": np.zeros(4, np.float32)}, path)
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = change(raw[8 : 8 + length].decode().strip())
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])


HEADERS: dict[str, tuple[Callable[[str], bytes], str]] = {
    "a name twice": (lambda text: (text[:-1] + "," + text[1:]).encode(), "the name w occurs twice"),
    "a key of a tensor twice": (lambda text: text.replace('"dtype"', '"dtype":"F16","dtype"').encode(), "the name dtype occurs twice"),
    "UTF-16": (lambda text: text.encode("utf-16"), "header"),
    "a byte order mark": (lambda text: b"\xef\xbb\xbf" + text.encode(), "header"),
    "a fraction": (lambda text: text.replace("[4]", "[4.0]").encode(), "whole numbers"),
    "a truth": (lambda text: text.replace("[0,", "[false,").encode(), "whole numbers"),
    "a text": (lambda text: text.replace("[4]", '["4"]').encode(), "whole numbers"),
    "thousands of digits": (lambda text: text.replace("[4]", f"[{','.join(['9' * 4000] * 300)}]").encode(), "at most 19 digits, got 4000"),
    "a list": (lambda text: f"[{text}]".encode(), "object"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", HEADERS)
def test_headers_of_safetensors_are_read_strictly(name: str, tmp_path: Path) -> None:
    """What the format does not allow is refused in a short line, so that no other reader sees another model in the same file."""
    change, words = HEADERS[name]
    changed_header(tmp_path / "m.safetensors", change)
    with pytest.raises(DataError, match=words) as caught:
        TensorFile(tmp_path / "m.safetensors")
    assert len(str(caught.value)) < 500


def test_lines_of_metrics_that_are_too_deep_or_too_long_are_left_out(tmp_path: Path) -> None:
    """Brackets without end and lines of megabytes are no steps."""
    lines = ["[" * 100_000, json.dumps({"step": 1}), '{"step": 2, "a": "' + "x" * (3 << 20) + '"}', json.dumps({"step": 3})]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 3]


def test_a_trace_unpacks_to_a_limit(tmp_path: Path) -> None:
    """A file of a MiB that unpacks to 300 MiB is refused before it is in memory."""
    with gzip.open(tmp_path / "trace.json.gz", "wb", compresslevel=1) as file:
        for _ in range(300):
            file.write(bytes(1 << 20))
    with pytest.raises(DataError, match=r"holds more than \d+ MiB, so trace fewer steps"):
        read_trace(tmp_path / "trace.json.gz")
