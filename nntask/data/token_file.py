"""A stream of token ids in a file, read window by window.

The file has no header and is little-endian: uint16, or uint32 when a sidecar ``<file>.json`` holds ``{"dtype": "uint32"}``. It is read with
``pread``, never whole and never through a memory map, so a file larger than memory takes the memory of one window. Files with the header of another
program, and ids of four or eight bytes without a sidecar, are refused with the command or the sidecar that mends them.

Every id that this module returns is inside the vocabulary: a window is checked when it is read, and the head of the file when it is opened.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import DataError
from ..io.regular_file import open_regular, read_text

DTYPES: Final[dict[str, np.dtype[Any]]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
SCAN_NBYTES: Final = 64 << 20
_CHUNK_NBYTES: Final = 4 << 20
_LARGEST_SIDECAR: Final = 1 << 16
_LLM_C: Final = {20240520: "uint16", 20240801: "uint32"}
"""First number of llm.c's header -> element type of the ids behind it."""
_LLM_C_NBYTES: Final = 1024
_NUMPY: Final = b"\x93NUMPY"
_FEWEST: Final = 64
"""Numbers at the head of a file from which the size of its ids is told."""
_DISTINCT: Final = 8
_SAMPLES: Final = 64
_SAMPLE_NBYTES: Final = 64 << 10


class TokenFile:
    """Token ids on disk.

    Args:
        path: the file.
        vocab_size: ids must be below this number.
        scan_nbytes: number of bytes at the head of the file that are checked on opening.
        flag: the command-line flag that named the file, for error messages.

    Attributes:
        dtype: element type.
        is_declared: whether a sidecar says it.

    Raises:
        DataError: the file is missing, empty, not a whole number of tokens, or holds an id beyond the vocabulary.
    """

    def __init__(self, path: str | os.PathLike[str], *, vocab_size: int, scan_nbytes: int = SCAN_NBYTES, flag: str = "--dataset-path") -> None:
        self._fd = -1
        self.path = Path(path)
        self.vocab_size = vocab_size
        given = _dtype_of(self.path)
        self.dtype, self.is_declared = given or DTYPES["uint16"], given is not None
        try:
            self._fd = open_regular(self.path)
            nbytes = os.fstat(self._fd).st_size
        except OSError as error:
            raise DataError(f"cannot read the token file {self.path}: {error.strerror}; give an existing file with {flag}") from None
        if nbytes == 0:
            raise DataError(f"{self.path} is empty; a token file holds at least one sequence of {self.dtype.name} ids")
        self._check_format(nbytes)
        if nbytes % self.dtype.itemsize:
            raise DataError(
                f"{self.path} has {nbytes} bytes, not a multiple of {self.dtype.itemsize} ({self.dtype.name} ids); the file is cut short, "
                f'or its ids are of another type: say so in {self.path.name}.json as {{"dtype": "uint32"}}'
            )
        self.num_tokens = nbytes // self.dtype.itemsize
        self._scan(min(nbytes, scan_nbytes))

    def window(self, first: int, count: int) -> npt.NDArray[np.int32]:
        """Tokens [first, first + count): (count,) int32.

        Raises:
            DataError: the window leaves the file, the file cannot be read, or an id is beyond the vocabulary.
        """
        if first < 0 or count < 1 or first + count > self.num_tokens:
            raise DataError(f"{self.path} holds tokens 0 to {self.num_tokens - 1}; asked for {count} from {first}")
        ids = self._read(first, count)
        self._check(ids, first)
        return ids.astype(np.int32)

    def num_sequences(self, length: int) -> int:
        """Number of whole sequences of `length` tokens whose shifted targets are in the file too."""
        return max(self.num_tokens - 1, 0) // length

    def fingerprint(self) -> str:
        """A hash of the element type, the size, and 64 evenly spaced windows of 64 KiB, or the whole content of a file of at most 4 MiB.

        The path does not enter the hash; a change between two windows of a large file escapes it.
        """
        nbytes = self.num_tokens * self.dtype.itemsize
        digest = hashlib.sha256(f"{self.dtype.name} {nbytes} ".encode())
        if nbytes <= _SAMPLES * _SAMPLE_NBYTES:
            digest.update(self._read(0, self.num_tokens).tobytes())
        else:
            count = _SAMPLE_NBYTES // self.dtype.itemsize
            for number in range(_SAMPLES):
                digest.update(self._read((self.num_tokens - count) * number // (_SAMPLES - 1), count).tobytes())
        return digest.hexdigest()

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()

    def _read(self, first: int, count: int) -> npt.NDArray[Any]:
        size = self.dtype.itemsize
        data = b""
        while len(data) < count * size:
            try:
                piece = os.pread(self._fd, count * size - len(data), first * size + len(data))
            except OSError as error:
                raise DataError(f"cannot read {self.path}: {error.strerror}; check the disk, or restore the file") from error
            if not piece:
                raise DataError(f"{self.path} became shorter while it was read; {first + count} tokens were expected")
            data += piece
        return np.frombuffer(data, self.dtype)

    def _check_format(self, nbytes: int) -> None:
        """Check that a file of a size has no header, and no longer ids than it seems to have."""
        head = os.pread(self._fd, _CHUNK_NBYTES, 0)
        number = int.from_bytes(head[:4], "little")
        if number in _LLM_C and nbytes >= _LLM_C_NBYTES:
            also = "" if _LLM_C[number] == "uint16" else ' and write {"dtype": "uint32"} to new.bin.json'
            raise DataError(
                f"{self.path} begins with the header of llm.c, {_LLM_C_NBYTES} bytes before the ids; leave it out with: "
                f"tail -c +{_LLM_C_NBYTES + 1} {self.path} > new.bin{also}"
            )
        if head.startswith(_NUMPY):
            raise DataError(f"{self.path} is an array of NumPy; write its ids alone with: numpy.load(...).astype('uint16').tofile('new.bin')")
        size = 2 if self.is_declared else _size_of(np.frombuffer(head[: len(head) // 16 * 16], DTYPES["uint16"]), self.vocab_size, nbytes)
        if size == 8:
            raise DataError(f"{self.path} holds ids of eight bytes; write them as uint16 or uint32, for example with numpy.ndarray.astype")
        if size == 4:
            raise DataError(
                f"{self.path} seems to hold ids of four bytes, for every second number of two bytes is below {self._high() + 1}, and no sidecar "
                f'says of how many they are; write {{"dtype": "uint32"}} to {self.path.name}.json beside it, or {{"dtype": "uint16"}} '
                "if its ids are of two"
            )

    def _high(self) -> int:
        """The largest upper half that an id of four bytes has."""
        return (self.vocab_size - 1) >> 16

    def _scan(self, nbytes: int) -> None:
        """Check the ids in the first `nbytes`; the others are checked when they are read."""
        count, step = nbytes // self.dtype.itemsize, _CHUNK_NBYTES // self.dtype.itemsize
        for first in range(0, count, step):
            self._check(self._read(first, min(step, count - first)), first)

    def _check(self, ids: npt.NDArray[Any], first: int) -> None:
        if int(ids.max()) < self.vocab_size:
            return
        where = int(np.argmax(ids >= self.vocab_size))
        raise DataError(
            f"{self.path}: token id {int(ids[where])} at position {first + where} is beyond the vocabulary (ids 0 to {self.vocab_size - 1}); "
            "use the config of the tokenizer that wrote the file"
        )


def _size_of(numbers: npt.NDArray[np.uint16], vocab_size: int, nbytes: int) -> int:
    """The size of the ids of a file without a sidecar, told from its first numbers of two bytes: 4 or 8 if no ids of two bytes look so, else 2.

    Upper halves of longer ids are small, and lower halves are not: of many different values, most of them larger than any upper half.
    """
    high, lower, upper = (vocab_size - 1) >> 16, numbers[::4], numbers[1::2]
    if len(numbers) < _FEWEST or nbytes % 4 or int(upper.max()) > high:
        return 2
    if len(np.unique(lower)) < _DISTINCT or 2 * np.count_nonzero(lower > high) < len(lower):
        return 2
    is_eight = nbytes % 8 == 0 and not numbers[2::4].any() and not numbers[3::4].any()
    return 8 if is_eight else 4


def _dtype_of(path: Path) -> np.dtype[Any] | None:
    """Element type of `path`, from its sidecar; None if it has none."""
    sidecar = path.with_name(path.name + ".json")
    try:
        text = read_text(sidecar, _LARGEST_SIDECAR)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {sidecar}: {error}; mend it, or remove it if the ids are uint16") from None
    try:
        name = json.loads(text)["dtype"]
        return DTYPES[name]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DataError(f'{sidecar} must be {{"dtype": "uint16"}} or {{"dtype": "uint32"}}, got {text[:80]!r}; write one of them') from None


def write_sidecar(path: Path, dtype: np.dtype[Any]) -> None:
    """Write the sidecar that declares the element type of `path`, so that its content is never taken for that of another program."""
    path.with_name(path.name + ".json").write_text(json.dumps({"dtype": dtype.name}), encoding="utf-8")
