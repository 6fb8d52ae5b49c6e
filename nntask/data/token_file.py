"""Token files: streams of token ids on disk, read window by window.

A token file has no header and is little-endian: uint16, or uint32 if a sidecar ``<file>.json`` contains ``{"dtype": "uint32"}``. It is read with
``pread``, never whole and never through a memory map, so a file larger than memory needs the memory of one window only. Files with the header of
another program, and ids of four or eight bytes without a sidecar, are refused with the command or the sidecar that fixes them.

Every returned id is inside the vocabulary. If the sidecar has checksums, as nntask's own sidecars have, it is also the id that was written. A window
is checked when it is read, and the head of the file when it is opened.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import DataError
from ..io.atomic_write import written_aside
from ..io.block_checksums import HEAD_NBYTES, BlockChecksums, block_checksums, discard
from ..io.regular_file import read_text
from ..io.sealed_json import SEAL, sealed, unsealed
from ..io.strided_ranges import OpenFile

DTYPES: Final[dict[str, np.dtype[Any]]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
SCAN_NBYTES: Final = 64 << 20
_CHUNK_NBYTES: Final = 4 << 20
_LARGEST_SIDECAR: Final = 1 << 16
"""Largest size of a sidecar in bytes, without its checksums."""
_CHECKSUMS: Final = "blocks"
"""Key of the checksums in a sidecar; a sidecar with checksums is sealed (`nntask.io.sealed_json`)."""
_LLM_C: Final = {20240520: "uint16", 20240801: "uint32"}
"""First number of llm.c's header -> element type of the ids that follow the header."""
_LLM_C_NBYTES: Final = 1024
_NUMPY: Final = b"\x93NUMPY"
_FEWEST: Final = 64
"""Smallest number of 16-bit values from which the size of a file's ids is guessed."""
_DISTINCT: Final = 8
_SAMPLES: Final = 64
_SAMPLE_NBYTES: Final = 64 << 10
_REBUILT: Final = "it is nntask's own cache, which the next run rebuilds"


class TokenFile:
    """An open token file.

    Args:
        path: path of the file.
        vocab_size: number of ids in the model's vocabulary; ids must be smaller.
        scan_nbytes: number of bytes at the head of the file that are checked on opening.
        flag: command-line flag that names the file, for error messages.
        name: name, in messages, of the user's data from which a cached file was made; "" for a file of the user. A cached file must have checksums,
            and those of its head are verified on opening.

    Attributes:
        name: name of the data in messages: the argument `name`, or the path of a file of the user.
        dtype: element type of the ids.
        is_declared: whether a sidecar declares the element type.

    Raises:
        DataError: the file is missing, empty or not a whole number of tokens, contains an id outside the vocabulary, or changed since it was written.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, vocab_size: int, scan_nbytes: int = SCAN_NBYTES, flag: str = "--dataset-path", name: str = ""
    ) -> None:
        self.path, self.name = Path(path), name or str(path)
        self._where = f"{path} (cached tokens of {name})" if name else str(path)
        self.vocab_size = vocab_size
        self._is_cache = bool(name)
        given, digits = _sidecar_of(self.path)
        self.dtype, self.is_declared = given or DTYPES["uint16"], given is not None
        try:
            self._file = OpenFile(self.path)
            nbytes = os.fstat(self._file.fd).st_size
        except OSError as error:
            raise DataError(f"cannot read the token file {self.path}: {error.strerror}", f"give an existing file with {flag}") from None
        if nbytes == 0:
            raise DataError(f"{self._where} is empty", f"a token file holds at least one sequence of {self.dtype.name} ids")
        self._check_format(nbytes)
        if nbytes % self.dtype.itemsize:
            raise DataError(
                f"{self._where} has {nbytes} bytes, not a multiple of {self.dtype.itemsize} ({self.dtype.name} ids)",
                f'the file is cut short, or its ids are of another type: declare the type in {self.path.name}.json, as {{"dtype": "uint32"}}',
            )
        self.num_tokens = nbytes // self.dtype.itemsize
        self._checksums = self._checksums_of(digits, nbytes)
        if name:  # the ids of a cached file were checked when it was written
            self._compare(0, min(nbytes, scan_nbytes, HEAD_NBYTES))
        else:
            self._scan(min(nbytes, scan_nbytes))

    def window(self, first: int, count: int) -> npt.NDArray[np.int32]:
        """Return the tokens [first, first + count), (count,) int32.

        Raises:
            DataError: the window exceeds the file, the file cannot be read or has changed since it was written, or an id is outside the vocabulary.
        """
        if first < 0 or count < 1 or first + count > self.num_tokens:
            raise DataError(f"{self._where} holds tokens 0 to {self.num_tokens - 1}, asked for {count} from {first}")
        ids = self._compared(first, count)
        self._check(ids, first)
        return ids.astype(np.int32)

    def fingerprint(self) -> str:
        """Return a hash of the element type, the size, and the content: all of it up to 4 MiB, otherwise 64 evenly spaced windows of 64 KiB.

        The hash does not depend on the path. It misses a change between two windows of a large file.

        Raises:
            DataError: the file cannot be read, or has changed since it was written.
        """
        nbytes = self.num_tokens * self.dtype.itemsize
        digest = hashlib.sha256(f"{self.dtype.name} {nbytes} ".encode())
        if nbytes <= _SAMPLES * _SAMPLE_NBYTES:
            digest.update(self._compared(0, self.num_tokens).tobytes())
        else:
            count = _SAMPLE_NBYTES // self.dtype.itemsize
            for number in range(_SAMPLES):
                digest.update(self._compared((self.num_tokens - count) * number // (_SAMPLES - 1), count).tobytes())
        return digest.hexdigest()

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        self._file.close()

    def _compared(self, first: int, count: int) -> npt.NDArray[Any]:
        """Return the tokens [first, first + count), after verifying their checksums."""
        self._compare(first * self.dtype.itemsize, (first + count) * self.dtype.itemsize)
        return self._read(first, count)

    def _read(self, first: int, count: int) -> npt.NDArray[Any]:
        size = self.dtype.itemsize
        data = b""
        while len(data) < count * size:
            try:
                piece = os.pread(self._file.fd, count * size - len(data), first * size + len(data))
            except OSError as error:
                raise DataError(f"cannot read {self._where}: {error.strerror}", self._advice("check the disk, or restore the file")) from error
            if not piece:
                expected = f"{first + count} tokens were expected"
                raise DataError(f"{self._where} became shorter while it was read, {expected}", self._advice("restore the file"))
            data += piece
        return np.frombuffer(data, self.dtype)

    def _checksums_of(self, digits: Any, nbytes: int) -> BlockChecksums | None:
        """Return the checksums of a file, None if its sidecar has none; raise DataError if they do not fit its size, or a cached file has none."""
        if digits is None and not self._is_cache:
            return None
        if digits is None:
            raise DataError(f"{self._where} has no checksums", _REBUILT)
        try:
            return BlockChecksums(digits, nbytes)
        except ValueError as error:
            raise DataError(f"{self._where} changed since {_sidecar(self.path).name} was written: {error}", self._of_changes()) from None

    def _compare(self, begin: int, end: int) -> None:
        """Verify the checksums of the bytes [begin, end), if the file has checksums."""
        if self._checksums is None:
            return
        try:
            changed = self._checksums.first_changed(self._file.fd, begin, end)
        except OSError as error:
            raise DataError(f"cannot read {self._where}: {error.strerror}", self._advice("check the disk, or restore the file")) from error
        if changed is not None:
            first = changed // self.dtype.itemsize
            if self._is_cache:
                discard(self.path, self._file.fd)
            raise DataError(f"{self._where} changed since it was written: the ids from position {first} have another checksum", self._of_changes())

    def _advice(self, owner: str) -> str:
        """Return the remedy for error messages: `owner` for a file of the user; a cached file needs none."""
        return _REBUILT if self._is_cache else owner

    def _of_changes(self) -> str:
        return self._advice(
            "copy it again, or rewrite it with nntask data prepare; if the change is intended, "
            f'write {{"dtype": "{self.dtype.name}"}} to {_sidecar(self.path).name}'
        )

    def _check_format(self, nbytes: int) -> None:
        """Check that a file of `nbytes` bytes has no header, and that its ids are not longer than its element type."""
        head = os.pread(self._file.fd, _CHUNK_NBYTES, 0)
        number = int.from_bytes(head[:4], "little")
        if number in _LLM_C and nbytes >= _LLM_C_NBYTES:
            also = "" if _LLM_C[number] == "uint16" else ' and write {"dtype": "uint32"} to new.bin.json'
            raise DataError(
                f"{self.path} begins with the header of llm.c, {_LLM_C_NBYTES} bytes before the ids",
                f"leave it out with: tail -c +{_LLM_C_NBYTES + 1} {shlex.quote(str(self.path))} > new.bin{also}",
            )
        if head.startswith(_NUMPY):
            raise DataError(f"{self.path} is an array of NumPy", "write its ids alone with: numpy.load(...).astype('uint16').tofile('new.bin')")
        size = 2 if self.is_declared else _size_of(np.frombuffer(head[: len(head) // 16 * 16], DTYPES["uint16"]), self.vocab_size, nbytes)
        if size == 8:
            raise DataError(f"{self.path} holds ids of eight bytes", "write them as uint16 or uint32, for example with numpy.ndarray.astype")
        if size == 4:
            below = ((self.vocab_size - 1) >> 16) + 1
            raise DataError(
                f"{self.path} seems to hold ids of four bytes: every second number of two bytes is below {below}, and no sidecar declares their size",
                f'write {{"dtype": "uint32"}} to {self.path.name}.json in its directory, or {{"dtype": "uint16"}} if its ids have two bytes',
            )

    def _scan(self, nbytes: int) -> None:
        """Check the ids in the first `nbytes` bytes; the others are checked when they are read."""
        count, step = nbytes // self.dtype.itemsize, _CHUNK_NBYTES // self.dtype.itemsize
        for first in range(0, count, step):
            self._check(self._read(first, min(step, count - first)), first)

    def _check(self, ids: npt.NDArray[Any], first: int) -> None:
        if int(ids.max()) < self.vocab_size:
            return
        where = int(np.argmax(ids >= self.vocab_size))
        raise DataError(
            f"{self._where}: token id {int(ids[where])} at position {first + where} is beyond the vocabulary (ids 0 to {self.vocab_size - 1})",
            self._advice("use the config of the tokenizer that wrote the file"),
        )


def _size_of(numbers: npt.NDArray[np.uint16], vocab_size: int, nbytes: int) -> int:
    """Return the size of ids in bytes, guessed from the head of a file without a sidecar: 4 or 8 if two-byte ids never look like it, otherwise 2.

    The upper halves of longer ids are small. The lower halves have many different values, most of them larger than any upper half.

    Args:
        numbers: head of the file as 16-bit numbers.
        vocab_size: number of ids in the model's vocabulary.
        nbytes: size of the file in bytes.
    """
    high, lower, upper = (vocab_size - 1) >> 16, numbers[::4], numbers[1::2]
    if len(numbers) < _FEWEST or nbytes % 4 or int(upper.max()) > high:
        return 2
    if len(np.unique(lower)) < _DISTINCT or 2 * np.count_nonzero(lower > high) < len(lower):
        return 2
    is_eight = nbytes % 8 == 0 and not numbers[2::4].any() and not numbers[3::4].any()
    return 8 if is_eight else 4


def _sidecar(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _sidecar_of(path: Path) -> tuple[np.dtype[Any] | None, Any]:
    """Return the element type and the checksums from the sidecar of `path`, None for each that is missing; raise DataError if it is damaged."""
    sidecar = _sidecar(path)
    try:
        nbytes = path.stat().st_size if path.is_file() else 0
        text = read_text(sidecar, _LARGEST_SIDECAR + nbytes // 1024)
    except FileNotFoundError:
        return None, None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {sidecar}: {error}", "fix it, or remove it if the ids are uint16") from None
    try:
        values = json.loads(text)
        dtype = DTYPES[values["dtype"]]
        if SEAL not in values and _CHECKSUMS not in values:
            return dtype, None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DataError(f'{sidecar} must be {{"dtype": "uint16"}} or {{"dtype": "uint32"}}, got {text[:80]!r}', "write one of them") from None
    try:
        return dtype, unsealed(values)[_CHECKSUMS]
    except (ValueError, KeyError) as error:
        raise DataError(f"{sidecar} is damaged: {error}", f'copy it again, or write {{"dtype": "{dtype.name}"}} to it') from None


def write_sidecar(path: Path, content: Path, dtype: np.dtype[Any]) -> None:
    """Write the sidecar of `path`, which declares the element type, so that no other format is guessed, and has checksums.

    Args:
        path: final path of the token file.
        content: present path of the file's content, before it is renamed to `path`.
        dtype: element type of the ids.
    """
    with written_aside(_sidecar(path)) as new:
        new.write_text(sealed({"dtype": dtype.name, _CHECKSUMS: block_checksums(content)}), encoding="utf-8")
