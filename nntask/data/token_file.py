"""A stream of token ids in a file, read window by window.

The file has no header and is little-endian: uint16, or uint32 when a sidecar ``<file>.json`` holds ``{"dtype": "uint32"}``. It is read with
``pread``, never whole and never through a memory map, so a file larger than memory takes the memory of one window.

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

DTYPES: Final[dict[str, np.dtype[Any]]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
SCAN_NBYTES: Final = 64 << 20
_CHUNK_NBYTES: Final = 4 << 20
_SAMPLES: Final = 64
_SAMPLE_NBYTES: Final = 64 << 10


class TokenFile:
    """Token ids on disk.

    Args:
        path: the file.
        vocab_size: ids must be below this number.
        scan_nbytes: number of bytes at the head of the file that are checked on opening.
        flag: the command-line flag that named the file, for error messages.

    Raises:
        DataError: the file is missing, empty, not a whole number of tokens, or holds an id beyond the vocabulary.
    """

    def __init__(self, path: str | os.PathLike[str], *, vocab_size: int, scan_nbytes: int = SCAN_NBYTES, flag: str = "--dataset-path") -> None:
        self._fd = -1
        self.path = Path(path)
        self.vocab_size = vocab_size
        self.dtype = _dtype_of(self.path)
        try:
            self._fd = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            nbytes = os.fstat(self._fd).st_size
        except OSError as error:
            raise DataError(f"cannot read the token file {self.path}: {error.strerror}; give an existing file with {flag}") from None
        if nbytes == 0:
            raise DataError(f"{self.path} is empty; a token file holds at least one sequence of {self.dtype.name} ids")
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


def _dtype_of(path: Path) -> np.dtype[Any]:
    """Element type of `path`, from its sidecar when it has one."""
    sidecar = path.with_name(path.name + ".json")
    try:
        text = sidecar.read_text(encoding="utf-8")
    except FileNotFoundError:
        return DTYPES["uint16"]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {sidecar}: {error}; mend it, or remove it if the ids are uint16") from None
    try:
        name = json.loads(text)["dtype"]
        return DTYPES[name]
    except (ValueError, KeyError, TypeError):
        raise DataError(f'{sidecar} must be {{"dtype": "uint16"}} or {{"dtype": "uint32"}}, got {text[:80]!r}; write one of them') from None


def write_sidecar(path: Path, dtype: np.dtype[Any]) -> None:
    """Write the sidecar that declares the element type of `path`, unless the type is uint16."""
    if dtype != DTYPES["uint16"]:
        path.with_name(path.name + ".json").write_text(json.dumps({"dtype": dtype.name}), encoding="utf-8")
