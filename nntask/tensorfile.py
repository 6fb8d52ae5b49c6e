"""Tile tensors in safetensors files, written and read band by band so that no tensor is ever whole in memory twice.

A band is the tiles that share an index along the first axis: contiguous bytes of the file. Files are read with ``pread``, never through a memory
map. The format is that of https://github.com/huggingface/safetensors: 8 bytes of header length, a JSON header, the data.
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

from .errors import DataError, Diverged, StorageError, UsageError
from .fileranges import FileRange, OpenFile, strides_of
from .finite import first_not_finite
from .writing import written_aside

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
_READ_AT_ONCE: Final = 1 << 20
_SAMPLE: Final = 4096


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: element type, shape, and its bytes [first, last) behind the header."""

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
    """Write `tensors` to a new file and force it to disk; when it fails, whatever was at `path` before is still there.

    Args:
        dtype: element type for floating-point tensors (default: their own).
        finite: refuse NaN and infinity.

    Returns:
        The file's checksum, as `checksum_of` finds it.

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
        raise StorageError(f"cannot write {path}: {error.strerror or error}; make room or choose another place") from error


def _write(file: IO[bytes], tensors: Mapping[str, TileTensor], dtype: np.dtype[Any] | None, metadata: Mapping[str, str], *, finite: bool) -> int:
    kinds = {name: dtype if dtype is not None and _NAMES[tensor.dtype] in _FLOATS else tensor.dtype for name, tensor in tensors.items()}
    start, _ = header_of({name: (tensor.shape, kinds[name]) for name, tensor in tensors.items()}, metadata)
    file.write(start)
    checksum = zlib.crc32(start)
    for name, tensor in tensors.items():
        for rows, indices in _bands(tensor):
            band = np.empty((rows, *tensor.shape[1:]), kinds[name])
            for index in indices:
                _, *inner = tensor.tiling.slices(index)
                with tensor.runtime.acquire(tensor[index], "R") as view:
                    band[(slice(None), *inner)] = view
            if finite and _NAMES[kinds[name]] in _FLOATS:
                _check_finite(name, tensor, band)
            raw = band.reshape(-1).view(np.uint8).data
            file.write(raw)
            checksum = zlib.crc32(raw, checksum)
    return checksum


def header_of(tensors: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """What a file begins with, and the bytes [first, last) of each tensor behind that.

    Args:
        tensors: name -> (shape, element type).
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    places = {}
    offset = 0
    for name, (shape, dtype) in tensors.items():
        places[name] = offset, offset + prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": list(places[name])}
        offset = places[name][1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, places


def checksum_of(path: str | os.PathLike[str]) -> int:
    """CRC-32 of a file, read piece by piece. It is there for failing disks and copies, not against forgery, and is the fastest that Python has.

    Raises:
        DataError: the file cannot be read.
    """
    checksum, piece = 0, bytearray(_READ_AT_ONCE)
    try:
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(piece):
                checksum = zlib.crc32(memoryview(piece)[:count], checksum)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; use another checkpoint") from None
    return checksum


def fingerprint_of(path: str | os.PathLike[str]) -> str:
    """Size and CRC-32 of a file's header (names, types, shapes, places) and of the first, middle and last 4 KiB of every tensor, as text.

    It takes milliseconds whatever the size of the model. Weights that were trained on, merged or replaced differ in it; a few values that were
    changed within a large tensor may not.

    Raises:
        DataError: see `TensorFile`.
    """
    with TensorFile(path) as file:
        return file.fingerprint()


def _check_finite(name: str, tensor: TileTensor, band: np.ndarray[Any, Any]) -> None:
    """Look for NaN and infinity in a band as it will be stored.

    Raises:
        Diverged: the tensor holds one.
        UsageError: only the element type it is stored in makes one of it.
    """
    if first_not_finite(band) is not None:
        if band.dtype.itemsize < tensor.dtype.itemsize and _is_finite(tensor):
            raise UsageError(f"{name} holds values too large for {band.dtype.name}; store it as bf16 or fp32")
        raise Diverged(f"{name} holds values that are not finite")


def _is_finite(tensor: TileTensor) -> bool:
    for index in tensor.tiling.indices():
        with tensor.runtime.acquire(tensor[index], "R") as view:
            if first_not_finite(view) is not None:
                return False
    return True


def _bands(tensor: TileTensor) -> Iterator[tuple[int, list[tuple[int, ...]]]]:
    """(rows, tile indices) of each band, in order."""
    grouped: dict[int, list[tuple[int, ...]]] = {}
    for index in tensor.tiling.indices():
        grouped.setdefault(index[0], []).append(index)
    for indices in grouped.values():
        yield tensor.tiling.extents(indices[0])[0], indices


class TensorFile:
    """An open safetensors file whose header has been checked against its size.

    Raises:
        DataError: the file is missing, is a torch pickle, or is corrupt.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._fd = -1
        try:
            self._fd = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            nbytes = os.fstat(self._fd).st_size
            start = os.pread(self._fd, 8, 0)
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error.strerror}; give an existing safetensors file") from None
        _refuse_pickle(self.path, start)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or not 2 <= length <= min(_LARGEST_HEADER, nbytes - 8):
            raise self._corrupt(f"its header claims {length} bytes and the file has {nbytes}")
        try:
            header = json.loads(os.pread(self._fd, length, 8))
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            self.entries = {name: self._entry(name, value, nbytes - 8 - length) for name, value in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise self._corrupt(f"its header does not read: {error}") from None
        self._check_places(nbytes - 8 - length)
        self._data = 8 + length

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def check(self, shapes: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]], *, exact: bool) -> None:
        """Compare names, shapes and element types with what is expected.

        Args:
            shapes: name -> (shape, dtype).
            exact: element types must be equal; otherwise any floating-point type stands for any other.

        Raises:
            DataError: the first tensor that is missing, misshapen, of another type, or not expected.
        """
        for name, (shape, dtype) in shapes.items():
            entry = self.entries.get(name)
            if entry is None:
                raise DataError(f"{self.path} has no tensor {name}, which the model needs with shape {shape}; is it a checkpoint of this model?")
            if entry.shape != shape:
                raise DataError(f"{name} in {self.path} has shape {entry.shape}, the model needs {shape}; use the config it was trained with")
            have, want = _NAMES[entry.dtype], _NAMES[dtype]
            if have != want and (exact or not {have, want} <= _FLOATS):
                raise DataError(f"{name} in {self.path} has element type {have}, {want} is needed; use the --dtype it was trained with")
        if surplus := sorted(set(self.entries) - set(shapes)):
            entry = self.entries[surplus[0]]
            raise DataError(f"{self.path} has a tensor {surplus[0]} of shape {entry.shape} that the model lacks; use the config it was trained with")

    def read_into(self, name: str, tensor: TileTensor) -> None:
        """Fill `tensor` with the file's `name`, band by band; shapes were checked before.

        Raises:
            DataError: the file became shorter.
        """
        entry = self.entries[name]
        offset = self._data + entry.first
        for rows, indices in _bands(tensor):
            band = np.empty((rows, *entry.shape[1:]), entry.dtype)
            raw = band.reshape(-1).view(np.uint8).data
            done = 0
            while done < len(raw):
                count = os.preadv(self._fd, [raw[done:]], offset + done)
                if count == 0:
                    raise self._corrupt("it became shorter while it was read")
                done += count
            offset += len(raw)
            for index in indices:
                _, *inner = tensor.tiling.slices(index)
                with tensor.runtime.acquire(tensor[index], "W") as view:
                    view[...] = band[(slice(None), *inner)]

    def fingerprint(self) -> str:
        """See `fingerprint_of`."""
        checksum = zlib.crc32(os.pread(self._fd, self._data, 0))
        for entry in self.entries.values():
            for first in (entry.first, (entry.first + entry.last) // 2, max(entry.first, entry.last - _SAMPLE)):
                checksum = zlib.crc32(os.pread(self._fd, min(_SAMPLE, entry.last - first), self._data + first), checksum)
        return f"{os.fstat(self._fd).st_size}-{checksum:08x}"

    def ranges(self) -> dict[str, FileRange]:
        """Where each tensor lies; the ranges stay open when this file is closed."""
        file = OpenFile(self.path, fd=os.dup(self._fd))
        return {name: FileRange(file, e.dtype, self._data + e.first, e.shape, strides_of(e.shape, e.dtype)) for name, e in self.entries.items()}

    def _entry(self, name: str, value: Mapping[str, Any], available: int) -> Entry:
        if value["dtype"] not in _DTYPES:
            raise DataError(
                f"{name} in {self.path} has element type {value['dtype']}, which is not read here; store it as F32, F16 or BF16, "
                "of a quantised model the weights that it was made from"
            )
        dtype, shape = _DTYPES[value["dtype"]], tuple(int(n) for n in value["shape"])
        first, last = (int(n) for n in value["data_offsets"])
        if not 0 <= first <= last <= available or last - first != prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} of shape {shape} and type {value['dtype']} claims bytes {first} to {last} of {available}")
        return Entry(dtype, shape, first, last)

    def _check_places(self, nbytes: int) -> None:
        """Check that the tensors fill the `nbytes` behind the header, one after another, as the format demands.

        Raises:
            DataError: they do not.
        """
        end = 0
        for name, entry in sorted(self.entries.items(), key=lambda item: (item[1].first, item[1].last)):
            if entry.first != end:
                raise self._corrupt(f"{name} begins at byte {entry.first} and the tensors before it end at byte {end}")
            end = entry.last
        if end != nbytes:
            raise self._corrupt(f"its tensors take {end} bytes and {nbytes} are there")

    def _corrupt(self, how: str) -> DataError:
        return DataError(f"{self.path} is not a whole safetensors file: {how}; copy it again or use another checkpoint")


def _refuse_pickle(path: Path, start: bytes) -> None:
    """A torch checkpoint is a zip archive or starts with a pickle protocol opcode; loading one would run code from it."""
    if start[:4] == b"PK\x03\x04" or (start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05"):
        converted = path.with_suffix(".safetensors")
        then = ""
        if converted == path:
            converted = path.with_stem(f"{path.stem}-converted")
            then = f", then put {converted.name} in the place of {path.name}"
        raise DataError(
            f'{path} is a torch pickle, which is never loaded here; convert it: python -c "import torch, safetensors.torch as s; '
            f"s.save_file({{k: v.clone() for k, v in torch.load('{path}', map_location='cpu', weights_only=True).items()}}, "
            f"'{converted}')\"{then}"
        )


def load_tensors(path: str | os.PathLike[str], tensors: Mapping[str, TileTensor], *, exact: bool = True) -> None:
    """Fill `tensors` from a file that holds just these names and shapes; nothing is written unless all fit.

    Raises:
        DataError: see `TensorFile` and `TensorFile.check`.
    """
    with TensorFile(path) as file:
        file.check({name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}, exact=exact)
        for name, tensor in tensors.items():
            file.read_into(name, tensor)
