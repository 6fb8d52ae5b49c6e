"""Datasets by name: `stdlib`, `text`, `WikiText-103` and `train.bin` become one or two token files, and a tokenizer where there is one.

Text is tokenised once and kept under the cache directory, keyed by a hash of the text, the tokenizer and the vocabulary size. A cached file is
complete once it has its name (`nntask.io.atomic_write`): a process that fails leaves no file, and a process that is killed leaves a hidden directory
that the next process removes.
"""

from __future__ import annotations

import contextlib
import hashlib
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np

from ..config.environment import cache_directory
from ..errors import DataError, UsageError
from ..io.atomic_write import written_aside
from .corpora import stdlib_corpus, text_corpus
from .examples import Source, examples_of
from .hub import WIKITEXT, check_tokenizer, check_wikitext, fetched_tokenizer, tokenizer_location, wikitext_corpus
from .objectives import Objective
from .sampler import Examples
from .texts import Corpus, Text, check_texts
from .token_file import DTYPES, TokenFile, write_sidecar
from .tokenizer import TOKENIZER_FILE, BpeTokenizer, ByteTokenizer, Tokenizer, have_tokenizers, load_tokenizer, train_bpe

DATASETS: Final = ("stdlib", "text", WIKITEXT, "train.bin")
_OWN_TOKENIZERS: Final = ("auto", "bpe", "bytes")
_TRAINING_NBYTES: Final = 8_000_000
_FORMAT: Final = "2"  # raise when the meaning of cached files changes


@dataclass(frozen=True, slots=True)
class DataSpec:
    """The user's choice of dataset and tokenizer.

    Args:
        dataset: "stdlib", "text", "WikiText-103" or "train.bin".
        path: for "text", a file or directory; for "WikiText-103", a directory, or "" for one in the cache; for "train.bin", the file of token ids or
            the directory with a train.bin.
        val_path: validation text or token ids; "" for the validation split of the dataset, if it has one.
        select: only the first `select` texts (rows of WikiText, sequences of a token file); -1 for all.
        tokenizer: "auto", "bpe", "bytes", or the name of a tokenizer on the Hub, which may be in `tokenizer_path` already.
        tokenizer_path: directory with a tokenizer.json; "" to train a tokenizer on the text.
        vocab_size: number of ids in the model's vocabulary.
        objective: what is learnt, with the sizes of sequences.
    """

    dataset: str = "stdlib"
    path: str = ""
    val_path: str = ""
    select: int = -1
    tokenizer: str = "auto"
    tokenizer_path: str = ""
    vocab_size: int = 4096
    objective: Objective = field(default_factory=Objective)


@dataclass(frozen=True, slots=True)
class Dataset:
    """Training data, validation data if any, and the tokenizer if known.

    Args:
        name: the name in `DataSpec.dataset`.
        train: the training data.
        validation: the validation data; None without a validation split.
        tokenizer: the tokenizer that made the tokens; None if it is unknown.
        fingerprint: a hash of the training tokens, independent of their path (for large token files a hash of samples; see `TokenFile.fingerprint`).
        select_sequences: number of sequences of `train` that are used; -1 for all.
        spec: what was asked for.
    """

    name: str
    train: Source
    validation: Source | None
    tokenizer: Tokenizer | None
    fingerprint: str
    select_sequences: int = -1
    spec: DataSpec = DataSpec()

    def examples(self, seed: int) -> Examples:
        """The training data as sequences of what is learnt, with random choices of that seed.

        Raises:
            DataError: the tokenizer lacks a token that this takes.
        """
        return examples_of(self.train, self.spec.objective, self.tokenizer, self.spec.vocab_size, seed)

    def scored_examples(self, seed: int) -> Examples | None:
        """The validation data as `examples`; None without a validation split."""
        if self.validation is None:
            return None
        return examples_of(self.validation, self.spec.objective, self.tokenizer, self.spec.vocab_size, seed)


def check_spec(spec: DataSpec) -> None:
    """Refuse wrong names and paths before the work of `open_dataset`.

    Raises:
        UsageError: a name is unknown, or flags exclude each other.
        DataError: a named file does not exist, or a package is missing.
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
        raise DataError("--tokenizer bpe needs the tokenizers package; pip install -e '.[text]', or use --tokenizer bytes")
    if spec.dataset == "train.bin":
        TokenFile(_train_bin(spec.path), vocab_size=spec.vocab_size).close()
        _check_beside(spec)


def _check_beside(spec: DataSpec) -> None:
    """Check that the named tokenizer equals the tokenizer.json beside train.bin, which made the ids; either may be absent.

    Raises:
        UsageError: the two tokenizers give words different ids, or --tokenizer bpe is given and no tokenizer.json is beside train.bin.
        DataError: a tokenizer is broken.
    """
    beside = _train_bin(spec.path).with_name(TOKENIZER_FILE)
    if spec.tokenizer == "bpe" and not spec.tokenizer_path and not beside.is_file():
        raise UsageError(
            f"--tokenizer bpe with --dataset train.bin is the tokenizer that made the ids, and there is no {beside}; "
            "name its directory with --tokenizer-path, or drop --tokenizer"
        )
    if spec.tokenizer not in _OWN_TOKENIZERS:
        named = tokenizer_location(spec.tokenizer, spec.tokenizer_path)
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
    """The advice in errors about an unreachable Hub: the command that prepares the data on another machine."""
    flags = {"dataset": spec.dataset, "dataset-path": spec.path, "tokenizer": spec.tokenizer, "tokenizer-path": spec.tokenizer_path}
    select = f" --dataset-select {spec.select}" if spec.select != -1 else ""
    command = "nntask data prepare" + "".join(f" --{name} {shlex.quote(value)}" for name, value in flags.items() if value) + select
    return f"on a machine that reaches it run: {command} --output DIR; then copy DIR here and use --dataset train.bin --dataset-path DIR"


def with_tokenizer_path(spec: DataSpec) -> DataSpec:
    """The spec with `tokenizer_path` set to the directory of a tokenizer of the Hub, which is fetched if it is not on this machine.

    Raises:
        DataError: the tokenizer cannot be fetched.
    """
    if spec.tokenizer in _OWN_TOKENIZERS:
        return spec
    return replace(spec, tokenizer_path=str(fetched_tokenizer(spec.tokenizer, spec.tokenizer_path, _advice(spec))))


def corpus_of(spec: DataSpec) -> Corpus:
    """The texts that a spec names.

    Raises:
        DataError: the texts are missing, are no texts, or cannot be fetched.
    """
    if spec.dataset == "stdlib":
        corpus = stdlib_corpus(spec.select)
    elif spec.dataset == WIKITEXT:
        corpus = wikitext_corpus(spec.path, spec.select, _advice(spec))
    else:
        corpus = text_corpus(spec.path, spec.select)
        if not reads_bytes(spec):
            check_texts(corpus, spec.path, "--dataset-path")
    if spec.val_path:
        extra = text_corpus(spec.val_path, flag="--val-path")
        if not reads_bytes(spec):
            check_texts(extra, spec.val_path, "--val-path")
        corpus = Corpus(corpus.name, corpus.train + corpus.validation, extra.train + extra.validation)
    return corpus


def open_dataset(spec: DataSpec, report: Callable[[str], None] = lambda sentence: None) -> Dataset:
    """Open the dataset that a spec names; text that is not in the cache is tokenised first.

    Args:
        spec: the choice of dataset and tokenizer.
        report: called with a sentence before each piece of work that takes seconds.

    Raises:
        UsageError: a name is unknown, or flags exclude each other.
        DataError: the data is missing, broken, or does not fit the vocabulary.
    """
    check_spec(spec)
    spec = with_tokenizer_path(spec)
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
    return Dataset(spec.dataset, train, validation, tokenizer, fingerprint, spec=spec)


def check_vocabulary(tokenizer: Tokenizer, spec: DataSpec) -> None:
    """Check that the model's vocabulary covers every id of the tokenizer; surplus ids of the model are never used.

    Raises:
        DataError: the tokenizer has more ids than the model.
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
    known = path.with_name(TOKENIZER_FILE)
    if spec.tokenizer_path or (spec.tokenizer in ("auto", "bpe") and known.is_file()):
        tokenizer = load_tokenizer(spec.tokenizer_path or known)
        check_vocabulary(tokenizer, spec)
        tokenizer.begin_of_text  # noqa: B018 - raises before the training, where the sample text after it would need this id in vain
    elif spec.tokenizer == "bytes":
        tokenizer = ByteTokenizer(spec.vocab_size)
    return Dataset("train.bin", train, validation, tokenizer, train.fingerprint(), spec.select, spec)


def _train_bin(path: str) -> Path:
    return Path(path) / "train.bin" if Path(path).is_dir() else Path(path)


def _tokenizer_key(spec: DataSpec) -> str:
    """A key for the cache: it differs between tokenizers that may give a text different tokens."""
    if spec.tokenizer_path:
        tokenizer, file = load_tokenizer(spec.tokenizer_path), Path(spec.tokenizer_path)
        digest = hashlib.sha256((file / TOKENIZER_FILE if file.is_dir() else file).read_bytes())
        digest.update(f" {tokenizer.begin_of_text} {tokenizer.end_of_text}".encode())
        return digest.hexdigest()
    kind = ("bpe" if have_tokenizers() else "bytes") if spec.tokenizer == "auto" else spec.tokenizer
    return f"{kind} {spec.vocab_size}"


def reads_bytes(spec: DataSpec) -> bool:
    """Whether the tokenizer of a spec is plain bytes, to which every file is a text."""
    return not spec.tokenizer_path and (spec.tokenizer == "bytes" or not have_tokenizers())


def tokenizer_of(spec: DataSpec, corpus: Corpus, directory: Path, report: Callable[[str], None]) -> Tokenizer:
    """The tokenizer of `spec`: loaded from its path, plain bytes, loaded from `directory`, or trained on the corpus and saved in `directory`."""
    if spec.tokenizer_path:
        return load_tokenizer(spec.tokenizer_path)
    if reads_bytes(spec):
        return ByteTokenizer(spec.vocab_size)
    cached = directory / TOKENIZER_FILE
    if cached.is_file():
        with _broken_cache(directory):
            return load_tokenizer(cached)
    report(f"training a byte-level BPE of {spec.vocab_size} ids on {corpus.name}")
    tokenizer = train_bpe(_head(corpus.train, _TRAINING_NBYTES), spec.vocab_size)
    with written_aside(cached) as new:
        tokenizer.save(new.parent)
        (new.parent / TOKENIZER_FILE).rename(new)
    return tokenizer


def _head(texts: tuple[Text, ...], nbytes: int) -> Iterator[str]:
    """The first pieces of the texts, about `nbytes` characters in all."""
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


def write_tokens(texts: tuple[Text, ...], path: Path, tokenizer: Tokenizer, report: Callable[[str], None], name: Path | None = None) -> int:
    """Write the token file of `texts`: each text is followed by the end-of-text id, and preceded by the begin-of-text id if that is a different id.

    Args:
        texts: the texts, in the order of the file.
        path: the token file to write; its sidecar goes beside it.
        tokenizer: the tokenizer that encodes the texts.
        report: called with a sentence before the work.
        name: the path that the file will have in the end; `path` unless given.

    Returns:
        The number of tokens.

    Raises:
        DataError: the tokenizer has no end-of-text id.
    """
    dtype = DTYPES["uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"]
    end = np.array([tokenizer.end_of_text], dtype).tobytes()
    begin = b"" if tokenizer.begin_of_text == tokenizer.end_of_text else np.array([tokenizer.begin_of_text], dtype).tobytes()
    report(f"tokenising {len(texts)} text{'s' if len(texts) > 1 else ''} to {name or path}")
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
    """Turns an error about a broken file of the cache into one that says how to have the file made again."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{str(error).partition(';')[0]}; it is nntask's own cache, remove {directory} to have it made again") from None


class _cache_errors:
    """Turns an I/O error of the cache into one that names the environment variable of the cache's directory."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise DataError(
                f"cannot use the cache {cache_directory()}: {error.strerror or error}; set NNTASK_CACHE to a directory with room"
            ) from None
