"""Datasets by name: `stdlib`, `text`, `WikiText-103` and `train.bin` become one or two token files, and a tokenizer where there is one.

Text is tokenised once and kept under the cache directory, keyed by a hash of the text, the tokenizer and the vocabulary. A file there is whole once
it has its name (`nntask.writing`): a process that fails leaves nothing behind, one that is killed a hidden directory that the next one removes.
"""

from __future__ import annotations

import contextlib
import hashlib
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from ..environment import cache_directory
from ..errors import DataError, UsageError
from ..writing import written_aside
from .corpus import stdlib_corpus, text_corpus
from .hub import WIKITEXT, check_tokenizer, check_wikitext, fetched_tokenizer, tokenizer_place, wikitext_corpus
from .texts import Corpus, Text
from .tokenizer import FILE_NAME, BpeTokenizer, ByteTokenizer, Tokenizer, have_tokenizers, load_tokenizer, train_bpe
from .tokens import DTYPES, TokenFile, write_sidecar

DATASETS: Final = ("stdlib", "text", WIKITEXT, "train.bin")
_OWN_TOKENIZERS: Final = ("auto", "bpe", "bytes")
_TRAINING_NBYTES: Final = 8_000_000
_FORMAT: Final = "2"  # raise when the meaning of cached files changes


@dataclass(frozen=True, slots=True)
class DataSpec:
    """What the user asked for.

    Args:
        dataset: "stdlib", "text", "WikiText-103" or "train.bin".
        path: file or directory of "text"; directory of "WikiText-103", empty for one in the cache; file, or directory that holds train.bin, of
            "train.bin".
        val_path: validation text or tokens; empty for what the dataset brings along.
        select: only the first `select` texts (rows of WikiText, sequences of a token file); -1 for all.
        tokenizer: "auto", "bpe", "bytes", or the name of one on the Hub, which may lie in `tokenizer_path` already.
        tokenizer_path: directory with tokenizer.json; empty to train one on the text.
        vocab_size: the model's vocabulary.
    """

    dataset: str = "stdlib"
    path: str = ""
    val_path: str = ""
    select: int = -1
    tokenizer: str = "auto"
    tokenizer_path: str = ""
    vocab_size: int = 4096


@dataclass(frozen=True, slots=True)
class Dataset:
    """Training tokens, validation tokens if any, and the tokenizer if known.

    Args:
        fingerprint: a hash that differs when the training tokens do, wherever they lie (of large token files, samples; see `TokenFile.fingerprint`).
        select_sequences: how many sequences of `train` count; -1 for all.
    """

    name: str
    train: TokenFile
    validation: TokenFile | None
    tokenizer: Tokenizer | None
    fingerprint: str
    select_sequences: int = -1


def check_spec(spec: DataSpec) -> None:
    """Find out cheaply what `open_dataset` would refuse about names and paths.

    Raises:
        UsageError: a name is not offered, or flags do not go together.
        DataError: a file that is named does not exist, or a package is missing.
    """
    if spec.dataset not in DATASETS:
        raise UsageError(
            f"--dataset {spec.dataset} is not available: this version reads {', '.join(DATASETS)}; "
            "save the texts as files and use --dataset text --dataset-path DIR"
        )
    if spec.dataset not in ("stdlib", WIKITEXT) and not spec.path:
        raise UsageError(f"--dataset {spec.dataset} needs --dataset-path, a file or a directory; add it")
    if spec.dataset == "stdlib" and spec.path:
        tokens = _train_bin(spec.path)
        kind = "train.bin" if tokens.suffix == ".bin" and tokens.is_file() else "text"
        raise UsageError(f"--dataset-path {spec.path} is not read by --dataset stdlib, the default; add --dataset {kind}, or drop --dataset-path")
    fetched = {"--dataset-path": spec.dataset == WIKITEXT, "--tokenizer-path": spec.tokenizer not in _OWN_TOKENIZERS}
    for flag, path in (("--dataset-path", spec.path), ("--val-path", spec.val_path), ("--tokenizer-path", spec.tokenizer_path)):
        if path and not Path(path).exists() and not fetched.get(flag):
            raise DataError(f"{flag} {path} does not exist; give an existing file or directory")
    if spec.dataset == WIKITEXT:
        check_wikitext(spec.path, _advice(spec))
    if spec.tokenizer not in _OWN_TOKENIZERS:
        check_tokenizer(spec.tokenizer, spec.tokenizer_path, _advice(spec))
    if spec.tokenizer == "bpe" and not have_tokenizers():
        raise DataError("--tokenizer bpe needs the tokenizers package; pip install tokenizers, or use --tokenizer bytes")
    if spec.dataset == "train.bin":
        TokenFile(_train_bin(spec.path), vocab_size=spec.vocab_size).close()
        _check_beside(spec)


def _check_beside(spec: DataSpec) -> None:
    """Check that a tokenizer that is named is the one that lies beside train.bin and made its ids, if one does.

    Raises:
        UsageError: they give words other ids, or there is none although --tokenizer bpe asks for it.
        DataError: one of them is broken.
    """
    beside = _train_bin(spec.path).with_name(FILE_NAME)
    if spec.tokenizer == "bpe" and not spec.tokenizer_path and not beside.is_file():
        raise UsageError(
            f"--tokenizer bpe with --dataset train.bin is the tokenizer that made the ids, and there is no {beside}; "
            "name its directory with --tokenizer-path, or drop --tokenizer"
        )
    if spec.tokenizer not in _OWN_TOKENIZERS:
        named = tokenizer_place(spec.tokenizer, spec.tokenizer_path)
    elif spec.tokenizer_path:
        named = Path(spec.tokenizer_path)
    else:
        return
    if named.exists() and beside.is_file() and not _is_same(load_tokenizer(named), load_tokenizer(beside)):
        raise UsageError(
            f"{_train_bin(spec.path)} holds ids of {beside}, and {named} gives words other ids; train from weights that know the former, "
            f"make {_train_bin(spec.path).name} again with nntask data prepare --tokenizer-path {shlex.quote(str(named))}, "
            f"or remove {beside} if it did not make the ids"
        )


def _is_same(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether two tokenizers have the same words with the same ids."""
    return isinstance(one, BpeTokenizer) and isinstance(other, BpeTokenizer) and one.inner.get_vocab() == other.inner.get_vocab()


def _advice(spec: DataSpec) -> str:
    """How to have data without the Hub."""
    flags = {"dataset": spec.dataset, "dataset-path": spec.path, "tokenizer": spec.tokenizer, "tokenizer-path": spec.tokenizer_path}
    select = f" --dataset-select {spec.select}" if spec.select != -1 else ""
    command = "nntask data prepare" + "".join(f" --{name} {shlex.quote(value)}" for name, value in flags.items() if value) + select
    return f"on a machine that reaches it run: {command} --output DIR; then copy DIR here and use --dataset train.bin --dataset-path DIR"


def located(spec: DataSpec) -> DataSpec:
    """The spec with the place of a named tokenizer, fetched if need be.

    Raises:
        DataError: it cannot be fetched.
    """
    if spec.tokenizer in _OWN_TOKENIZERS:
        return spec
    return replace(spec, tokenizer_path=str(fetched_tokenizer(spec.tokenizer, spec.tokenizer_path, _advice(spec))))


def corpus_of(spec: DataSpec) -> Corpus:
    """The texts that a spec names.

    Raises:
        DataError: they are missing, or cannot be fetched.
    """
    if spec.dataset == "stdlib":
        corpus = stdlib_corpus(spec.select)
    elif spec.dataset == WIKITEXT:
        corpus = wikitext_corpus(spec.path, spec.select, _advice(spec))
    else:
        corpus = text_corpus(spec.path, spec.select)
    if spec.val_path:
        extra = text_corpus(spec.val_path, flag="--val-path")
        corpus = Corpus(corpus.name, corpus.train + corpus.validation, extra.train + extra.validation)
    return corpus


def open_dataset(spec: DataSpec, report: Callable[[str], None] = lambda sentence: None) -> Dataset:
    """Open what `spec` names, tokenising text that is not in the cache yet.

    Args:
        report: called with a sentence before anything that takes seconds.

    Raises:
        DataError: the data is missing, broken, or does not fit the vocabulary.
    """
    check_spec(spec)
    spec = located(spec)
    if spec.dataset == "train.bin":
        return _open_tokens(spec)
    corpus = corpus_of(spec)
    with _cache_errors():
        fingerprint, key = (hashlib.sha256(f"{_FORMAT} {texts} {_tokenizer_key(spec)}".encode()).hexdigest() for texts in corpus.fingerprints())
        directory = cache_directory() / "data" / f"{spec.dataset}-{key[:24]}"
        tokenizer = tokenizer_of(spec, corpus, directory, report)
        check_vocabulary(tokenizer, spec)
        train = _encoded(corpus.train, directory / "train.bin", tokenizer, spec.vocab_size, report)
        validation = _encoded(corpus.validation, directory / "val.bin", tokenizer, spec.vocab_size, report) if corpus.validation else None
    return Dataset(spec.dataset, train, validation, tokenizer, fingerprint)


def check_vocabulary(tokenizer: Tokenizer, spec: DataSpec) -> None:
    """Check that the model knows every id of the tokenizer; it may know more, which are never used.

    Raises:
        DataError: it does not.
    """
    if tokenizer.vocab_size > spec.vocab_size:
        raise DataError(
            f"the tokenizer has {tokenizer.vocab_size} ids and the model's vocabulary {spec.vocab_size}; "
            f"set vocab_size to at least {tokenizer.vocab_size}, or use another tokenizer"
        )


def _open_tokens(spec: DataSpec) -> Dataset:
    path = _train_bin(spec.path)
    train = TokenFile(path, vocab_size=spec.vocab_size)
    beside = path.with_name("val.bin")
    val_path = Path(spec.val_path) if spec.val_path else beside
    val_path = val_path / "val.bin" if val_path.is_dir() else val_path
    has_validation = bool(spec.val_path) or (beside.exists() and beside != path)
    validation = TokenFile(val_path, vocab_size=spec.vocab_size, flag="--val-path") if has_validation else None
    tokenizer: Tokenizer | None = None
    known = path.with_name(FILE_NAME)
    if spec.tokenizer_path or (spec.tokenizer in ("auto", "bpe") and known.is_file()):
        tokenizer = load_tokenizer(spec.tokenizer_path or known)
        check_vocabulary(tokenizer, spec)
        tokenizer.begin_of_text  # noqa: B018 - the sample needs it, and is refused before the training rather than after it
    elif spec.tokenizer == "bytes":
        tokenizer = ByteTokenizer(spec.vocab_size)
    return Dataset("train.bin", train, validation, tokenizer, train.fingerprint(), spec.select)


def _train_bin(path: str) -> Path:
    return Path(path) / "train.bin" if Path(path).is_dir() else Path(path)


def _tokenizer_key(spec: DataSpec) -> str:
    """What decides the tokens of a text besides the training texts."""
    if spec.tokenizer_path:
        tokenizer, file = load_tokenizer(spec.tokenizer_path), Path(spec.tokenizer_path)
        digest = hashlib.sha256((file / FILE_NAME if file.is_dir() else file).read_bytes())
        digest.update(f" {tokenizer.begin_of_text} {tokenizer.end_of_text}".encode())
        return digest.hexdigest()
    kind = ("bpe" if have_tokenizers() else "bytes") if spec.tokenizer == "auto" else spec.tokenizer
    return f"{kind} {spec.vocab_size}"


def tokenizer_of(spec: DataSpec, corpus: Corpus, directory: Path, report: Callable[[str], None]) -> Tokenizer:
    """The tokenizer of `spec`: loaded, plain bytes, from `directory`, or trained now and kept there."""
    if spec.tokenizer_path:
        return load_tokenizer(spec.tokenizer_path)
    if spec.tokenizer == "bytes" or not have_tokenizers():
        return ByteTokenizer(spec.vocab_size)
    cached = directory / FILE_NAME
    if cached.is_file():
        with _broken_cache(directory):
            return load_tokenizer(cached)
    report(f"training a byte-level BPE of {spec.vocab_size} ids on {corpus.name}")
    tokenizer = train_bpe(_head(corpus.train, _TRAINING_NBYTES), spec.vocab_size)
    with written_aside(cached) as new:
        tokenizer.save(new.parent)
        (new.parent / FILE_NAME).rename(new)
    return tokenizer


def _head(texts: tuple[Text, ...], nbytes: int) -> Iterator[str]:
    """Pieces of the texts until about `nbytes` characters have passed."""
    seen = 0
    for text in texts:
        for piece in text.pieces():
            if seen >= nbytes:
                return
            seen += len(piece)
            yield piece


def _encoded(texts: tuple[Text, ...], path: Path, tokenizer: Tokenizer, vocab_size: int, report: Callable[[str], None]) -> TokenFile:
    """The token file of `texts`, from the cache or written now."""
    if not path.is_file():
        write_tokens(texts, path, tokenizer, report)
    with _broken_cache(path.parent):
        return TokenFile(path, vocab_size=vocab_size)


def write_tokens(texts: tuple[Text, ...], path: Path, tokenizer: Tokenizer, report: Callable[[str], None]) -> int:
    """Write the token file of `texts`: each with the end of text behind it, and what begins a text before it if that is another id.

    Returns:
        The number of tokens.

    Raises:
        DataError: nothing says how texts of this tokenizer end.
    """
    dtype = DTYPES["uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"]
    end = np.array([tokenizer.end_of_text], dtype).tobytes()
    begin = b"" if tokenizer.begin_of_text == tokenizer.end_of_text else np.array([tokenizer.begin_of_text], dtype).tobytes()
    report(f"tokenising {len(texts)} text{'s' if len(texts) > 1 else ''} to {path}")
    with written_aside(path) as new:
        with new.open("wb") as file:
            for text in texts:
                file.write(begin)
                for piece in text.pieces():
                    file.write(tokenizer.encode([piece])[0].astype(dtype).tobytes())
                file.write(end)
            num_tokens = file.tell() // dtype.itemsize
        write_sidecar(path, dtype)
    return num_tokens


@contextlib.contextmanager
def _broken_cache(directory: Path) -> Iterator[None]:
    """Turns the error about a file that is broken into one that says who made it."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{str(error).partition(';')[0]}; it is nntask's own cache, remove {directory} to have it made again") from None


class _cache_errors:
    """Turns an I/O error of the cache into one that says which variable moves it."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise DataError(
                f"cannot use the cache {cache_directory()}: {error.strerror or error}; set NNTASK_CACHE to a directory with room"
            ) from None
