"""Tile tensors in safetensors files, written and read one row of tiles at a time, so that no tensor is copied as a whole.

A row of tiles is the set of tiles that share an index along the first axis; it occupies contiguous bytes of the file. Files are read with ``pread``,
never through a memory map. The format is specified at https://github.com/huggingface/safetensors: 8 bytes of header length, a JSON header, the data.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any, Final

import ml_dtypes
import numpy as np

from tiles import TileTensor

from ..errors import DataError, Diverged, StorageError, UsageError
from .atomic_write import written_aside
from .finite import first_not_finite
from .regular_file import open_regular
from .safetensors_header import decoded_header
from .strided_ranges import FileRange, OpenFile, strides_of
from .terminal_text import python_command, python_text

_NAMES: Final[dict[np.dtype[Any], str]] = {
    np.dtype(np.float64): "F64",
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(np.int64): "I64",
    np.dtype(np.int32): "I32",
    np.dtype(np.int16): "I16",
    np.dtype(np.int8): "I8",
    np.dtype(np.uint64): "U64",
    np.dtype(np.uint32): "U32",
    np.dtype(np.uint16): "U16",
    np.dtype(np.uint8): "U8",
    np.dtype(np.bool_): "BOOL",
}
_DTYPES: Final = {name: dtype for dtype, name in _NAMES.items()}
_FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16"})
STORAGE: Final[dict[str, np.dtype[Any]]] = {
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}
_LARGEST_HEADER: Final = 100 << 20
_MOST_TENSORS: Final = 1 << 17
_MOST_AXES: Final = 32
"""Largest number of axes of an array in NumPy 1."""
_READ_AT_ONCE: Final = 1 << 20
_SAMPLE: Final = 4096


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor's entry in the header: element type, shape, and byte range [first, last) relative to the end of the header."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    first: int
    last: int


def save_tensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, TileTensor],
    *,
    dtype: np.dtype[Any] | None = None,
    metadata: Mapping[str, str] | None = None,
    finite: bool = False,
) -> int:
    """Write `tensors` to a new file and force it to disk; on failure, an existing file at `path` is kept.

    Args:
        path: the file.
        tensors: name -> tensor.
        dtype: element type in the file for floating-point tensors; None to keep the tensors' own types.
        metadata: content of the header's "__metadata__".
        finite: whether NaN and infinity are refused.

    Returns:
        The file's CRC-32, equal to `checksum_of`.

    Raises:
        StorageError: the disk is full or failed.
        Diverged: a value is not finite.
        UsageError: a finite value is too large for `dtype`.
    """
    path = Path(path)
    try:
        with written_aside(path) as new, new.open("wb") as file:
            return _write(file, tensors, dtype, metadata or {}, finite=finite)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}", "make room or choose another place") from error


def _write(file: IO[bytes], tensors: Mapping[str, TileTensor], dtype: np.dtype[Any] | None, metadata: Mapping[str, str], *, finite: bool) -> int:
    kinds = {name: dtype if dtype is not None and _NAMES[tensor.dtype] in _FLOATS else tensor.dtype for name, tensor in tensors.items()}
    start, _ = header_of({name: (tensor.shape, kinds[name]) for name, tensor in tensors.items()}, metadata)
    file.write(start)
    checksum = zlib.crc32(start)
    for name, tensor in tensors.items():
        for num_rows, indices in _tile_rows(tensor):
            rows = np.empty((num_rows, *tensor.shape[1:]), kinds[name])
            for index in indices:
                _, *inner = tensor.tiling.slices(index)
                with tensor.runtime.acquire(tensor[index], "R") as view:
                    rows[(slice(None), *inner)] = view
            if finite and _NAMES[kinds[name]] in _FLOATS:
                _check_finite(name, tensor, rows)
            raw = rows.reshape(-1).view(np.uint8).data
            file.write(raw)
            checksum = zlib.crc32(raw, checksum)
    return checksum


def header_of(tensors: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Return the header of a file, and the byte range of each tensor.

    Args:
        tensors: name -> (shape, element type), in the order of the file.
        metadata: content of "__metadata__".

    Returns:
        The bytes before the data (length and JSON, padded to a multiple of 8), and name -> (first, last), the offsets in bytes of each tensor in the
        data.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    spans = {}
    offset = 0
    for name, (shape, dtype) in tensors.items():
        spans[name] = offset, offset + prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": list(spans[name])}
        offset = spans[name][1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, spans


def checksum_of(path: str | os.PathLike[str]) -> int:
    """Return the CRC-32 of a file, which is read 1 MiB at a time. It detects errors of disks and copies, not forgery.

    Raises:
        DataError: the file cannot be read.
    """
    checksum, piece = 0, bytearray(_READ_AT_ONCE)
    try:
        with os.fdopen(open_regular(path), "rb", buffering=0) as file:
            while count := file.readinto(piece):
                checksum = zlib.crc32(memoryview(piece)[:count], checksum)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", "use another checkpoint") from None
    return checksum


def fingerprint_of(path: str | os.PathLike[str]) -> str:
    """Return a fingerprint of a safetensors file: its size, and the CRC-32 of its header and of the first, middle and last 4 KiB of every tensor.

    Computing it takes milliseconds for a model of any size. The fingerprint changes when weights are trained, merged or replaced; it may miss a
    change of a few values within a large tensor.

    Returns:
        "SIZE-CRC", the size in bytes and the CRC-32 as 8 hexadecimal digits.

    Raises:
        DataError: the file is missing, is a torch pickle, or is corrupt.
    """
    with TensorFile(path) as file:
        return file.fingerprint()


def _check_finite(name: str, tensor: TileTensor, rows: np.ndarray[Any, Any]) -> None:
    """Raise Diverged if rows, in the element type of the file, have NaN or infinity; UsageError if only that type is too small for them."""
    if first_not_finite(rows) is not None:
        if rows.dtype.itemsize < tensor.dtype.itemsize and _is_finite(tensor):
            raise UsageError(f"{name} holds values too large for {rows.dtype.name}", "store it as bf16 or fp32")
        raise Diverged(f"{name} holds values that are not finite")


def _is_finite(tensor: TileTensor) -> bool:
    for index in tensor.tiling.indices():
        with tensor.runtime.acquire(tensor[index], "R") as view:
            if first_not_finite(view) is not None:
                return False
    return True


def _tile_rows(tensor: TileTensor) -> Iterator[tuple[int, list[tuple[int, ...]]]]:
    """Yield (number of element rows, tile indices) of each row of tiles, in order."""
    grouped: dict[int, list[tuple[int, ...]]] = {}
    for index in tensor.tiling.indices():
        grouped.setdefault(index[0], []).append(index)
    for indices in grouped.values():
        yield tensor.tiling.extents(indices[0])[0], indices


class TensorFile:
    """An open safetensors file whose header was checked against its size; a context manager that closes the file.

    Raises:
        DataError: the file is missing, is a torch pickle, or is corrupt.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._file = OpenFile(self.path)
            nbytes = os.fstat(self._file.fd).st_size
            start = os.pread(self._file.fd, 9, 0)
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error.strerror}", "give an existing safetensors file") from None
        _refuse_pickle(self.path, start)
        length = int.from_bytes(start[:8], "little")
        if len(start) < 8 or not 2 <= length <= min(_LARGEST_HEADER, nbytes - 8):
            raise self._corrupt(f"its header claims {length} bytes and the file has {nbytes}")
        try:
            header = decoded_header(os.pread(self._file.fd, length, 8))
            if len(header) > _MOST_TENSORS:
                raise ValueError(f"it must name at most {_MOST_TENSORS} tensors, got {len(header)}")
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            if not all(isinstance(each, str) for each in self.metadata.values()):
                raise TypeError("__metadata__ must be an object of texts")
            self.entries = {name: self._entry(name, value, nbytes - 8 - length) for name, value in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise self._corrupt(f"its header cannot be parsed: {error}") from None
        self._check_spans(nbytes - 8 - length)
        self._data = 8 + length

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        self._file.close()

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def check(self, shapes: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]], *, exact: bool) -> None:
        """Check that the file holds exactly the expected tensors.

        Args:
            shapes: name -> (shape, element type) of the expected tensors.
            exact: whether element types must be equal; if not, any floating-point type matches any other.

        Raises:
            DataError: a tensor is missing, has another shape or type, or is not expected; the message names the first one.
        """
        for name, (shape, dtype) in shapes.items():
            entry = self.entries.get(name)
            if entry is None:
                raise DataError(f"{self.path} has no tensor {name}, which the model needs with shape {shape}", "is it a checkpoint of this model?")
            if entry.shape != shape:
                raise DataError(f"{name} in {self.path} has shape {entry.shape}, the model needs {shape}", "use the config it was trained with")
            have, want = _NAMES[entry.dtype], _NAMES[dtype]
            if have != want and (exact or not {have, want} <= _FLOATS):
                raise DataError(f"{name} in {self.path} has element type {have}, {want} is needed", "use the --dtype it was trained with")
        if surplus := sorted(set(self.entries) - set(shapes)):
            entry = self.entries[surplus[0]]
            raise DataError(
                f"{self.path} has a tensor {surplus[0]} of shape {entry.shape} that the model lacks", "use the config it was trained with"
            )

    def read_into(self, name: str, tensor: TileTensor) -> None:
        """Fill `tensor` with the file's tensor `name`, one row of tiles at a time. Requires a successful `check`.

        Raises:
            DataError: the file was cut short since it was opened.
        """
        entry = self.entries[name]
        offset = self._data + entry.first
        for num_rows, indices in _tile_rows(tensor):
            rows = np.empty((num_rows, *entry.shape[1:]), entry.dtype)
            raw = rows.reshape(-1).view(np.uint8).data
            done = 0
            while done < len(raw):
                count = os.preadv(self._file.fd, [raw[done:]], offset + done)
                if count == 0:
                    raise self._corrupt("it became shorter while it was read")
                done += count
            offset += len(raw)
            for index in indices:
                _, *inner = tensor.tiling.slices(index)
                with tensor.runtime.acquire(tensor[index], "W") as view:
                    view[...] = rows[(slice(None), *inner)]

    def fingerprint(self) -> str:
        """Return the fingerprint of this file; see `fingerprint_of`."""
        checksum = zlib.crc32(os.pread(self._file.fd, self._data, 0))
        for entry in self.entries.values():
            for first in (entry.first, (entry.first + entry.last) // 2, max(entry.first, entry.last - _SAMPLE)):
                checksum = zlib.crc32(os.pread(self._file.fd, min(_SAMPLE, entry.last - first), self._data + first), checksum)
        return f"{os.fstat(self._file.fd).st_size}-{checksum:08x}"

    def ranges(self) -> dict[str, FileRange]:
        """Return name -> byte range of each tensor; the ranges can still be read after this object is closed."""
        file = OpenFile(self.path, fd=os.dup(self._file.fd))
        return {name: FileRange(file, e.dtype, self._data + e.first, e.shape, strides_of(e.shape, e.dtype)) for name, e in self.entries.items()}

    def _entry(self, name: str, value: Mapping[str, Any], available: int) -> TensorEntry:
        if value["dtype"] not in _DTYPES:
            raise DataError(
                f"{name} in {self.path} has element type {value['dtype']}, which is not read here",
                "store it as F32, F16 or BF16, or for a quantised model use the weights that it was made from",
            )
        dtype, shape = _DTYPES[value["dtype"]], tuple(value["shape"])
        first, last = value["data_offsets"]
        if not all(type(number) is int and number >= 0 for number in (*shape, first, last)) or len(shape) > _MOST_AXES:
            raise TypeError(f"shape and data_offsets of {name} must be whole numbers of at least 0, for at most {_MOST_AXES} axes")
        if not 0 <= first <= last <= available or last - first != prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} of shape {shape} and type {value['dtype']} claims bytes {first} to {last} of {available} bytes of data")
        return TensorEntry(dtype, shape, first, last)

    def _check_spans(self, nbytes: int) -> None:
        """Raise DataError unless the tensors fill the `nbytes` bytes of data without gaps or overlaps, as the format requires."""
        end = 0
        for name, entry in sorted(self.entries.items(), key=lambda item: (item[1].first, item[1].last)):
            if entry.first != end:
                raise self._corrupt(f"{name} begins at byte {entry.first} and the tensors before it end at byte {end}")
            end = entry.last
        if end != nbytes:
            raise self._corrupt(f"its tensors take {end} bytes, and the file has {nbytes} bytes of data")

    def _corrupt(self, how: str) -> DataError:
        return DataError(f"{self.path} is not a whole safetensors file: {how}", "copy it again or use another checkpoint")


def _refuse_pickle(path: Path, start: bytes) -> None:
    """Raise DataError for a PyTorch checkpoint (a zip archive, or the opcode of a pickle protocol): loading one would run code from it."""
    is_header = start[8:9] == b"{"  # the first 8 bytes are a length, which may look like the start of a pickle
    if start[:4] == b"PK\x03\x04" or (start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05" and not is_header):
        converted = path.with_suffix(".safetensors")
        then = ""
        if converted == path:
            converted = path.with_stem(f"{path.stem}-converted")
            then = f", then put {converted.name} in the place of {path.name}"
        command = python_command(
            "import torch, safetensors.torch as s; s.save_file({k: v.clone() for k, v in "
            f'torch.load({python_text(path)}, map_location="cpu", weights_only=True).items()}}, {python_text(converted)})'
        )
        raise DataError(f"{path} is a torch pickle, which is never loaded here", f"convert it: {command}{then}")


def load_tensors(path: str | os.PathLike[str], tensors: Mapping[str, TileTensor], *, exact: bool = True) -> None:
    """Fill `tensors` from a file that holds exactly these names and shapes; no tensor is written unless all of them match.

    Args:
        path: the file.
        tensors: name -> tensor.
        exact: whether element types must be equal; if not, any floating-point type matches any other.

    Raises:
        DataError: the file is missing or corrupt, or a tensor does not match.
    """
    with TensorFile(path) as file:
        file.check({name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}, exact=exact)
        for name, tensor in tensors.items():
            file.read_into(name, tensor)
