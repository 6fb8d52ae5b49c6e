"""Reader of the header of a GGUF file: its metadata, and the type, shape and offset of each tensor.

The format is specified at https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; versions 2 and 3, little-endian, are supported. A file consists
of the letters GGUF, the numbers of tensors and keys, the keys with their values, an entry for each tensor, padding, and the tensors.

Files are untrusted: every length and count is compared with the remaining bytes before memory is allocated for it. A header may have at most 128 MiB,
65,536 keys, 131,072 tensors and two million strings. The gguf package is not used, because its reader maps the file and trusts it. A file that breaks
a rule is refused with an error of one sentence.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..errors import StorageError
from .strided_ranges import OpenFile, read_all

SUFFIX: Final = ".gguf"
_LFS: Final = b"vers"
"""First bytes of a Git LFS pointer, the small text that replaces a large file that was not downloaded."""
MAGIC: Final = b"GGUF"
ALIGNMENT: Final = 32
"""Default alignment of tensors in bytes, used unless the metadata has another under `ALIGNMENT_KEY`."""
ALIGNMENT_KEY: Final = "general.alignment"
_LARGEST_HEADER: Final = 128 << 20
_MOST_KEYS: Final = 1 << 16
_MOST_TENSORS: Final = 1 << 17
_MOST_TEXTS: Final = 1 << 21
"""Largest total number of strings in the lists of a file; a string takes several times more memory than bytes of the file."""
_LARGEST_NAME: Final = 65535
_LARGEST_RANK: Final = 4
_LARGEST_ALIGNMENT: Final = 1 << 20
_READ_AT_ONCE: Final = 1 << 20
_STRING: Final = 8
_ARRAY: Final = 9
_BOOL: Final = 7
_SCALARS: Final[Mapping[int, str]] = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
"""Type number of a metadata value -> its format character in `struct`."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """Storage type of a tensor's values.

    Args:
        name: name of the type in ggml.
        block_values: number of values in a block; they are adjacent in a row.
        block_bytes: size of a block in bytes.
    """

    name: str
    block_values: int
    block_bytes: int


def _types() -> dict[int, TensorType]:
    plain = {0: ("F32", 4), 1: ("F16", 2), 24: ("I8", 1), 25: ("I16", 2), 26: ("I32", 4), 27: ("I64", 8), 28: ("F64", 8), 30: ("BF16", 2)}
    of_32 = {
        2: ("Q4_0", 18),
        3: ("Q4_1", 20),
        6: ("Q5_0", 22),
        7: ("Q5_1", 24),
        8: ("Q8_0", 34),
        9: ("Q8_1", 40),
        20: ("IQ4_NL", 18),
        39: ("MXFP4", 17),
    }
    of_256 = {10: ("Q2_K", 84), 11: ("Q3_K", 110), 12: ("Q4_K", 144), 13: ("Q5_K", 176), 14: ("Q6_K", 210), 15: ("Q8_K", 292), 16: ("IQ2_XXS", 66)}
    of_256 |= {17: ("IQ2_XS", 74), 18: ("IQ3_XXS", 98), 19: ("IQ1_S", 50), 21: ("IQ3_S", 110), 22: ("IQ2_S", 82), 23: ("IQ4_XS", 136)}
    of_256 |= {29: ("IQ1_M", 56), 34: ("TQ1_0", 54), 35: ("TQ2_0", 66)}
    groups = ((1, plain), (32, of_32), (256, of_256))
    return {number: TensorType(name, values, nbytes) for values, group in groups for number, (name, nbytes) in group.items()}


TENSOR_TYPES: Final[Mapping[int, TensorType]] = _types()
"""Type number in files -> storage type. ggml has added types since, which are not in this table."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor's entry in the header.

    Args:
        type: storage type of the values.
        shape: extents per axis, the last one contiguous (files list them in reverse order).
        offset: offset of the first byte in the file.
        nbytes: size of the tensor in bytes.
    """

    type: TensorType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class GgufFile:
    """An open GGUF file whose header has been read and checked.

    Attributes:
        header_nbytes: bytes before the first tensor.
        metadata: key -> number, bool, string, list of strings, or array of numbers or bools.
        tensors: name -> entry.
        file: the open file, from which tensors are read.

    Raises:
        StorageError: the file cannot be read, is not a GGUF file, or breaks a rule of the format.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self.file = OpenFile(self.path)
            self._nbytes = os.fstat(self.file.fd).st_size
        except OSError as error:
            raise StorageError(f"cannot read {self.path}: {error.strerror}", "give an existing GGUF file") from None
        cursor = _Cursor(self.file, self._nbytes)
        num_tensors, num_keys = self._start(cursor)
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = cursor.name("a key")
            if key in self.metadata:
                raise cursor.broken(f"it has the key {key[:80]!r} twice")
            self.metadata[key] = _value(cursor, cursor.scalar("I"), key)
        entries = self._entries(cursor, num_tensors)
        self.header_nbytes = cursor.offset
        self.tensors = self._placed(cursor, entries)

    def _start(self, cursor: _Cursor) -> tuple[int, int]:
        """Read the start of the header; return (number of tensors, number of keys)."""
        magic = cursor.take(4, "its first letters")
        if magic == _LFS:
            raise StorageError(f"{self.path} is a pointer of Git LFS and not the file itself", "fetch it with git lfs pull")
        if magic != MAGIC:
            raise cursor.broken(f"it begins with {magic!r} and not with {MAGIC!r}")
        version = cursor.scalar("I")
        if version not in (2, 3):
            how = "is of a big-endian machine" if version and version & 0xFFFF == 0 else f"has version {version}"
            raise cursor.broken(f"it {how}, and only versions 2 and 3 in little-endian order can be read")
        num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
        for count, most, what in ((num_keys, _MOST_KEYS, "keys"), (num_tensors, _MOST_TENSORS, "tensors")):
            if most < count <= self._nbytes:  # larger numbers are refused by `expect` below
                raise cursor.broken(f"it must have at most {most} {what}, got {count}")
        cursor.expect(num_keys, 13, "keys")  # at least a length (8), a type (4) and a value (1 byte) each
        cursor.expect(num_tensors, 32, "tensors")  # at least a length, a rank, one extent, a type and an offset each
        return num_tensors, num_keys

    def _entries(self, cursor: _Cursor, count: int) -> dict[str, tuple[TensorType, tuple[int, ...], int]]:
        """Read the entries; return name -> (type, shape, offset from the first tensor)."""
        entries: dict[str, tuple[TensorType, tuple[int, ...], int]] = {}
        for _ in range(count):
            name = cursor.name("a tensor's name")
            if name in entries:
                raise cursor.broken(f"it has the tensor {name[:80]!r} twice")
            rank = cursor.scalar("I")
            if not 1 <= rank <= _LARGEST_RANK:
                raise cursor.broken(f"its tensor {name[:80]!r} must have 1 to {_LARGEST_RANK} axes, got {rank}")
            shape = tuple(reversed([cursor.scalar("Q") for _ in range(rank)]))
            number, offset = cursor.scalar("I"), cursor.scalar("Q")
            kind = TENSOR_TYPES.get(number)
            if kind is None:
                raise StorageError(
                    f"{name[:80]} in {self.path} has the type number {number}, which nntask does not know",
                    "use a file of type F32, F16, BF16, Q8_0 or Q4_0",
                )
            entries[name] = kind, shape, offset
        return entries

    def _placed(self, cursor: _Cursor, entries: Mapping[str, tuple[TensorType, tuple[int, ...], int]]) -> dict[str, GgufTensor]:
        """Return name -> entry, after checking that the tensors are aligned, do not overlap, and lie inside the file."""
        alignment = self.metadata.get(ALIGNMENT_KEY, ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= _LARGEST_ALIGNMENT or alignment & (alignment - 1):
            raise cursor.broken(f"its {ALIGNMENT_KEY} must be a power of two up to {_LARGEST_ALIGNMENT}, got {str(alignment)[:40]}")
        first = -(-cursor.offset // alignment) * alignment
        placed: dict[str, GgufTensor] = {}
        end, before = first, "the header"
        for name, (kind, shape, offset) in sorted(entries.items(), key=lambda entry: entry[1][2]):
            count = prod(shape)
            if count == 0 or shape[-1] % kind.block_values:
                raise cursor.broken(
                    f"rows of its tensor {name[:80]!r} of type {kind.name} must be whole blocks of {kind.block_values} values, got shape {shape}"
                )
            nbytes, start = count // kind.block_values * kind.block_bytes, first + offset
            if offset % alignment or start + nbytes > self._nbytes:
                raise cursor.broken(
                    f"its tensor {name[:80]!r} must begin at a multiple of {alignment} from byte {first} on and end within the file of "
                    f"{self._nbytes} bytes, got bytes {start} to {start + nbytes}"
                )
            if start < end:
                raise cursor.broken(f"its tensor {name[:80]!r} begins at byte {start}, which belongs to {before}")
            placed[name] = GgufTensor(kind, shape, start, nbytes)
            end, before = start + nbytes, name[:80]
        return {name: placed[name] for name in entries}


def _value(cursor: _Cursor, kind: int, key: str) -> Any:
    """Read the next metadata value, which has the type number `kind`; `key` is its key, for error messages."""
    if kind == _STRING:
        return cursor.text(f"the value of {key[:80]!r}")
    if kind in _SCALARS:
        value = cursor.scalar(_SCALARS[kind])
        return bool(value) if kind == _BOOL else value
    if kind != _ARRAY:
        raise cursor.broken(f"its {key[:80]!r} has values of the unknown type number {kind}")
    inner, count = cursor.scalar("I"), cursor.scalar("Q")
    if inner == _ARRAY:
        raise cursor.broken(f"its {key[:80]!r} is a list of lists, which no known key has as its value")
    if inner == _STRING:
        cursor.expect_texts(count, key)
        return [cursor.text(f"a text of {key[:80]!r}") for _ in range(count)]
    if inner not in _SCALARS:
        raise cursor.broken(f"its {key[:80]!r} is a list of values of the unknown type number {inner}")
    dtype = np.dtype(f"<{_SCALARS[inner]}")
    cursor.expect(count, dtype.itemsize, f"values of {key[:80]!r}")
    values = np.frombuffer(cursor.take(count * dtype.itemsize, f"values of {key[:80]!r}"), dtype)
    return values.astype(np.bool_) if inner == _BOOL else values


class _Cursor:
    """Sequential reader of the header of an open file of `nbytes` bytes."""

    def __init__(self, file: OpenFile, nbytes: int) -> None:
        self._file, self._nbytes = file, nbytes
        self._window, self._first = b"", 0
        self._num_texts = 0
        self.offset = 0

    def broken(self, how: str) -> StorageError:
        """Return the error for a file that breaks a rule of the format; `how` is a clause that says which."""
        return StorageError(f"{self._file.path} is not a whole GGUF file: {how}", "copy it again, or use another file")

    def expect(self, count: int, each: int, what: str) -> None:
        """Check that `count` items of at least `each` bytes fit into the rest of the header."""
        if count * each > self._available():
            raise self.broken(f"it claims {count} {what} from byte {self.offset} on, and at most {self._available()} bytes of the header are left")

    def expect_texts(self, count: int, key: str) -> None:
        """Check that `count` strings fit into the rest of the header and into the limit on strings."""
        self.expect(count, 8, f"texts of {key[:80]!r}")
        self._num_texts += count
        if self._num_texts > _MOST_TEXTS:
            raise self.broken(f"its lists must have at most {_MOST_TEXTS} texts together, got {self._num_texts} with those of {key[:80]!r}")

    def take(self, count: int, what: str) -> bytes:
        """Read the next `count` bytes."""
        begin = self.offset - self._first
        if begin + count > len(self._window):
            self.expect(count, 1, f"bytes of {what}")
            self._window = self._read(max(count, min(_READ_AT_ONCE, self._available())))
            self._first, begin = self.offset, 0
        self.offset += count
        return self._window[begin : begin + count]

    def scalar(self, letter: str) -> Any:
        """Read the next number; `letter` is its format character in `struct`."""
        return struct.unpack(f"<{letter}", self.take(struct.calcsize(f"<{letter}"), "a number"))[0]

    def text(self, what: str, most: int = _LARGEST_HEADER) -> str:
        """Read the next string: its length, then that many bytes of UTF-8."""
        count = self.scalar("Q")
        if count > most:
            raise self.broken(f"{what} at byte {self.offset} must have at most {most} bytes, got {count}")
        raw = self.take(count, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.broken(f"{what} at byte {self.offset - count} is not UTF-8") from None

    def name(self, what: str) -> str:
        """Read the next string as a name, which must be printable and have no line breaks."""
        found = self.text(what, _LARGEST_NAME)
        if not found.isprintable():
            raise self.broken(f"{what} before byte {self.offset} must be printable, got {found[:40]!r}")
        return found

    def _available(self) -> int:
        return max(0, min(self._nbytes, _LARGEST_HEADER) - self.offset)

    def _read(self, count: int) -> bytes:
        found = bytearray(count)
        read_all(self._file, memoryview(found), self.offset)
        return bytes(found)
