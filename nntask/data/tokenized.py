"""Cache of tokenised texts, and of the tokenizers trained on them.

Text is tokenised once and stored in the cache directory, keyed by a hash of the text, the tokenizer and the vocabulary size. Cached files are written
atomically (`nntask.io.atomic_write`): a process that fails leaves no file, and a process that is killed leaves a hidden directory that the next
process removes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from ..errors import DataError
from ..io.atomic_write import written_aside
from ..io.block_checksums import block_checksums
from ..io.cache_directory import cache_directory
from ..io.regular_file import read_text
from .encoding import RowEncoder
from .findings import Finding, read_findings, write_findings
from .foreign_tokenizer import TOKENIZER_FILE, have_tokenizers, stored_tokenizer
from .known_ids import check_known
from .spans import NUM_SENTINELS
from .spec import DataSpec
from .texts import Corpus, Replaced, Text
from .token_file import DTYPES, TokenFile, write_sidecar
from .tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, train_bpe

_TRAINING_NBYTES: Final = 8_000_000
_TOKENIZER_CHECKSUM: Final = "tokenizer.crc32"
_LARGEST_CHECKSUM: Final = 1 << 20


def tokenizer_key(spec: DataSpec) -> str:
    """Return a cache key, which differs between tokenizers that may give a text different tokens."""
    if spec.tokenizer_path:
        tokenizer, file = named_tokenizer(spec), Path(spec.tokenizer_path)
        digest = hashlib.sha256(stored_tokenizer(file))
        digest.update(f" {tokenizer.begin_of_text} {tokenizer.end_of_text}{tokenizer.terms}".encode())
        if tokenizer.vocab_size > spec.vocab_size:  # texts are encoded, and their ids checked, for each vocabulary size
            digest.update(f" {spec.vocab_size}".encode())
        return digest.hexdigest()
    kind = ("bpe" if have_tokenizers() else "bytes") if spec.tokenizer == "auto" else spec.tokenizer
    return f"{kind} {spec.vocab_size}{_own_terms(spec)}"


def named_tokenizer(spec: DataSpec) -> Tokenizer:
    """Load the tokenizer at the path of a spec; its own chat template need not be readable if the spec names another."""
    return load_tokenizer(spec.tokenizer_path, has_template=bool(spec.objective.template))


def _own_terms(spec: DataSpec) -> str:
    """Return the part of the cache key by which tokenizers that nntask trains differ between objectives."""
    return {"masked": " mask", "seq2seq": " sentinels" if spec.objective.form == "stream" else ""}.get(spec.objective.kind, "")


def reads_bytes(spec: DataSpec) -> bool:
    """Return whether the tokenizer of a spec is plain bytes, which accepts any file as text."""
    return not spec.tokenizer_path and (spec.tokenizer == "bytes" or not have_tokenizers())


def tokenizer_of(spec: DataSpec, corpus: Corpus, report: Callable[[str], None]) -> Tokenizer:
    """Return the tokenizer of `spec`: loaded from its path, plain bytes, or trained on the corpus."""
    if spec.tokenizer_path:
        return named_tokenizer(spec)
    if reads_bytes(spec):
        return ByteTokenizer(spec.vocab_size)
    report(f"training a byte-level BPE of {spec.vocab_size} ids on {corpus.name}")
    free = NUM_SENTINELS if _own_terms(spec) == " sentinels" else 0
    texts = first_pieces(corpus.train, _TRAINING_NBYTES)
    return train_bpe(texts, spec.vocab_size, has_mask=spec.objective.kind == "masked", num_free=free)


def cached_tokenizer(spec: DataSpec, corpus: Corpus, directory: Path, report: Callable[[str], None]) -> Tokenizer:
    """Return the tokenizer of `spec`; a tokenizer that nntask trains is cached in `directory`, with the data that it encodes.

    If the cached tokenizer has changed since it was written, the directory is removed, and the tokenizer is trained again.
    """
    if spec.tokenizer_path or reads_bytes(spec):
        return tokenizer_of(spec, corpus, report)
    cached, checksum = directory / TOKENIZER_FILE, directory / _TOKENIZER_CHECKSUM
    if cached.is_file():
        try:
            if read_text(checksum, _LARGEST_CHECKSUM) == block_checksums(cached):
                return load_tokenizer(cached)
            reason = f"{cached} changed since it was written"
        except FileNotFoundError:
            reason = f"{cached} has no checksum"
        except (DataError, OSError, ValueError) as error:
            reason = f"{cached} cannot be used: {error.fact if isinstance(error, DataError) else error}"
        report(rebuilt(reason))
        _remove(directory)
    tokenizer = tokenizer_of(spec, corpus, report)
    with written_aside(cached) as new:
        tokenizer.save(new.parent)
        (new.parent / TOKENIZER_FILE).rename(new)
        with written_aside(checksum) as digits:
            digits.write_text(block_checksums(new), encoding="utf-8")
    return tokenizer


def _remove(directory: Path) -> None:
    """Remove a cache directory atomically, unless another process has removed it."""
    with contextlib.suppress(FileNotFoundError), tempfile.TemporaryDirectory(dir=directory.parent) as aside:
        os.rename(directory, Path(aside) / directory.name)


def first_pieces(texts: Iterable[Text], nbytes: int) -> Iterator[str]:
    """Yield the first pieces of the texts, about `nbytes` characters in total."""
    seen = 0
    for text in texts:
        for piece in text.pieces():
            if seen >= nbytes:
                return
            seen += len(piece)
            yield piece


def encoded_texts(texts: Collection[Text], path: Path, tokenizer: Tokenizer, vocab_size: int, report: Callable[[str], None], name: str) -> TokenFile:
    """Return the token file of `texts` at `path`, which is written first if it is missing or corrupt. Messages refer to the texts as `name`."""
    if path.is_file():
        try:
            return TokenFile(path, vocab_size=vocab_size, name=name)
        except DataError as error:
            report(rebuilt(error.fact))
    write_tokens(texts, path, tokenizer, vocab_size, report, f"of {name}")
    return TokenFile(path, vocab_size=vocab_size, name=name)


def rebuilt(fact: str) -> str:
    """Return the report that a cached file cannot be used, by the fact of an error, and is rebuilt."""
    return f"{fact}; it is nntask's own cache and is rebuilt"


def write_tokens(texts: Collection[Text], path: Path, tokenizer: Tokenizer, vocab_size: int, report: Callable[[str], None], about: str = "") -> int:
    """Write the token file of `texts`: each text is followed by the end-of-text id, and preceded by the begin-of-text id if that is a different id.

    Args:
        texts: texts in the order of the file.
        path: token file to write; its sidecar and its findings (`findings_of`) are written to the same directory.
        tokenizer: tokenizer that encodes the texts.
        vocab_size: number of ids in the model's vocabulary.
        report: function called with a sentence before the work.
        about: end of that sentence; "" for the path.

    Returns:
        The number of tokens.

    Raises:
        DataError: the tokenizer has no end-of-text id, or a text has a token outside the model's vocabulary.
    """
    dtype = DTYPES["uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"]
    around = np.array([tokenizer.begin_of_text, tokenizer.end_of_text])
    check_known(around, tokenizer, vocab_size, "every text, at its beginning or end,")
    end = around[1:].astype(dtype).tobytes()
    begin = b"" if around[0] == around[1] else around[:1].astype(dtype).tobytes()
    report(f"tokenising {len(texts)} text{'s' if len(texts) > 1 else ''} {about or f'to {path}'}")
    replaced = Replaced()
    with written_aside(path) as new:
        with new.open("wb") as file:
            for text in texts:
                file.write(begin)
                for ids in _encoded(text, tokenizer, vocab_size, replaced):
                    file.write(ids.astype(dtype).tobytes())
                file.write(end)
            num_tokens = file.tell() // dtype.itemsize
        write_sidecar(path, new, dtype)
        if replaced.nbytes:
            write_findings(_findings_path(path), [_replacement(replaced, path.stem)])
    return num_tokens


def _encoded(text: Text, tokenizer: Tokenizer, vocab_size: int, replaced: Replaced) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the token ids of a text, chunk by chunk; raise DataError if a token is outside the model's vocabulary."""
    num_lines = 0
    for chunk, ids in tokenizer.encode_long(text.pieces(replaced)):
        if len(ids) and int(ids.max()) >= vocab_size:
            num_lines += chunk.count("\n", 0, int(RowEncoder(tokenizer).with_offsets(chunk)[1][np.argmax(ids >= vocab_size)]))
            check_known(ids, tokenizer, vocab_size, f"{text.path or text.name}, line {num_lines + 1},")
        num_lines += chunk.count("\n")
        yield ids


def findings_of(path: Path) -> tuple[Finding, ...]:
    """Return the findings about the texts of a token file, which were written with it."""
    return read_findings(_findings_path(path))


def _findings_path(path: Path) -> Path:
    return path.with_suffix(".findings.json")


def _replacement(replaced: Replaced, split: str) -> Finding:
    """Return the finding about replaced bytes in the texts of a split."""
    more = f" and {len(replaced.files) - 1} more files" if len(replaced.files) > 1 else ""
    what = "validation texts" if split == "val" else "training texts"
    return Finding(
        "validation_bytes_replaced" if split == "val" else "bytes_replaced",
        replaced.nbytes,
        replaced.total,
        f"{replaced.nbytes:,} of the {replaced.total:,} bytes of the {what} are not UTF-8 and are replaced by U+FFFD, in "
        f"{replaced.files[0].name}{more}; convert them, for example with iconv -f WINDOWS-1252 -t UTF-8",
    )


class cache_errors:
    """Context that turns an I/O error of the cache into one that names the environment variable of the cache directory."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):  # of the reader of a report
            raise DataError(
                f"cannot use the cache {cache_directory()}: {error.strerror or error}", "set NNTASK_CACHE to a writable directory with space"
            ) from None
