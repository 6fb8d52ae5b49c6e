"""Datasets by name: opens `stdlib`, `text`, `WikiText-103`, `train.bin`, `jsonl` and `images` as training data, validation data and a tokenizer.

Texts are encoded once into token files, and rows of JSON lines into row files; both are kept in the cache (`tokenized`). Images are read in place.
"""

from __future__ import annotations

import difflib
import hashlib
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from ..errors import DataError, UsageError
from ..io.cache_directory import cache_directory
from .chat_source import ChatSource, template_notes, with_template
from .corpora import scored_corpus, stdlib_corpus, text_corpus
from .directories import is_named
from .examples import Source, examples_of
from .findings import FINDINGS, Finding, no_validation, read_findings
from .foreign_tokenizer import TOKENIZER_FILE, have_tokenizers
from .hub import WIKITEXT, check_tokenizer, check_wikitext, fetched_tokenizer, tokenizer_location, wikitext_corpus
from .images import IMAGES, open_images, told_images
from .json_lines import JSONL, RowTexts, json_lines, line_corpus, told_lines
from .objectives import Objective
from .row_counts import RowCounts
from .row_file import RowFile, write_rows
from .rows import NUM_FIELDS, encoded_rows
from .sampler import Examples, Shuffled
from .spec import SPLITS, DataSpec
from .texts import Corpus, check_texts
from .token_file import TokenFile
from .tokenized import cache_errors, cached_tokenizer, encoded_texts, findings_of, named_tokenizer, reads_bytes, rebuilt, tokenizer_key
from .tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

DATASETS: Final = ("stdlib", "text", WIKITEXT, "train.bin", JSONL, IMAGES)
_OWN_TOKENIZERS: Final = ("auto", "bpe", "bytes")
_FORMAT: Final = "3"  # raise when the meaning of cached rows changes
_TEXT_FORMAT: Final = "3"  # raise when the meaning of cached texts changes


@dataclass(frozen=True, slots=True)
class Dataset:
    """Training data, validation data if any, and the tokenizer if known.

    Args:
        name: name of the dataset, as in `DataSpec.dataset`.
        train: training data.
        validation: validation data; None without a validation split.
        tokenizer: tokenizer that produced the tokens; None if it is unknown.
        fingerprint: hash of the training tokens, independent of their path (for large token files a hash of samples; see `TokenFile.fingerprint`).
        select_sequences: number of sequences of `train` to use; -1 for all.
        spec: request that the dataset was opened for.
        findings: data that are left out, cut or replaced.
    """

    name: str
    train: Source
    validation: Source | None
    tokenizer: Tokenizer | None
    fingerprint: str
    select_sequences: int = -1
    spec: DataSpec = field(default_factory=DataSpec)
    findings: tuple[Finding, ...] = ()

    def examples(self, seed: int) -> Examples:
        """Return the training data as sequences for the objective; `seed` determines the random choices.

        Raises:
            DataError: the tokenizer lacks a token that the objective needs.
        """
        return examples_of(self.train, self.spec.objective, self.tokenizer, self.spec.vocab_size, seed)

    def scored_examples(self, seed: int) -> Examples | None:
        """Return the validation data as sequences for the objective; None without a validation split.

        Rows are shuffled, so that scoring only the first ones is representative.
        """
        if self.validation is None:
            return None
        found = examples_of(self.validation, self.spec.objective, self.tokenizer, self.spec.vocab_size, seed)
        return Shuffled(found) if isinstance(self.validation, RowFile) else found


def check_spec(spec: DataSpec) -> None:
    """Check names and paths before the work of `open_dataset`.

    Raises:
        UsageError: a name is unknown, or flags exclude each other.
        DataError: a named file does not exist, or a package is missing.
    """
    if spec.dataset not in DATASETS:
        near = difflib.get_close_matches(spec.dataset.lower(), [name.lower() for name in DATASETS], 1)
        name = next((name for name in DATASETS if name.lower() in near), None)
        advice = f"did you mean {name}?" if name else "save the texts as files and use --dataset text --dataset-path DIR"
        raise UsageError(f"is not available: this version reads {', '.join(DATASETS)}", advice, flag="--dataset", value=spec.dataset)
    if spec.dataset not in ("stdlib", WIKITEXT) and not spec.path:
        raise UsageError("needs --dataset-path, a file or a directory", "add it", flag="--dataset", value=spec.dataset)
    if spec.dataset == "stdlib" and spec.path:
        tokens = _train_bin(spec.path)
        kind = "train.bin" if tokens.suffix == ".bin" and tokens.is_file() else "text"
        raise UsageError(
            "is not read by --dataset stdlib, the default", f"add --dataset {kind}, or drop --dataset-path", flag="--dataset-path", value=spec.path
        )
    fetched = {"--dataset-path": spec.dataset == WIKITEXT, "--tokenizer-path": spec.tokenizer not in _OWN_TOKENIZERS}
    if spec.dataset == IMAGES and spec.objective.image is None:
        raise UsageError("is for models of images, and this one takes text", "use a dataset of text", flag="--dataset", value="images")
    named = {"--dataset-path": spec.path, "--val-path": spec.val_path, "--tokenizer-path": spec.tokenizer_path}
    for flag, path in {**named, "--chat-template": spec.objective.template}.items():
        if path and not is_named(path) and not fetched.get(flag):
            raise DataError("does not exist", "give an existing file or directory", flag=flag, value=path)
    if spec.dataset == WIKITEXT:
        check_wikitext(spec.path, _advice(spec))
    if spec.tokenizer not in _OWN_TOKENIZERS:
        check_tokenizer(spec.tokenizer, spec.tokenizer_path, _advice(spec))
    if spec.tokenizer == "bpe" and not have_tokenizers():
        raise DataError("needs the tokenizers package", "pip install -e '.[text]', or use --tokenizer bytes", flag="--tokenizer", value="bpe")
    if spec.dataset == "train.bin":
        TokenFile(_train_bin(spec.path), vocab_size=spec.vocab_size).close()
        _check_beside(spec)


def _check_beside(spec: DataSpec) -> None:
    """Check that the named tokenizer equals the tokenizer.json in the directory of train.bin, which produced the ids; either may be absent.

    Raises:
        UsageError: the two tokenizers give words different ids, or --tokenizer bpe is given and the directory of train.bin has no tokenizer.json.
        DataError: a tokenizer is broken.
    """
    beside = _train_bin(spec.path).with_name(TOKENIZER_FILE)
    if spec.tokenizer == "bpe" and not spec.tokenizer_path and not beside.is_file():
        raise UsageError(
            f"bpe with --dataset train.bin is the tokenizer that made the ids, and there is no {beside}",
            "name its directory with --tokenizer-path, or drop --tokenizer",
            flag="--tokenizer",
        )
    if spec.tokenizer not in _OWN_TOKENIZERS:
        named = tokenizer_location(spec.tokenizer, spec.tokenizer_path)
    elif spec.tokenizer_path:
        named = Path(spec.tokenizer_path)
    else:
        return
    if named.exists() and beside.is_file() and load_tokenizer(named).inner.get_vocab() != load_tokenizer(beside).inner.get_vocab():
        raise UsageError(
            f"{_train_bin(spec.path)} holds ids of {beside}, and {named} gives words other ids",
            f"use weights trained with the former, "
            f"rewrite {_train_bin(spec.path).name} with nntask data prepare --tokenizer-path {shlex.quote(str(named))}, "
            f"or remove {beside} if it did not make the ids",
        )


def _advice(spec: DataSpec) -> str:
    """Return the advice for errors about an unreachable Hub: the command that prepares the data on another machine."""
    flags = {"dataset": spec.dataset, "dataset-path": spec.path, "tokenizer": spec.tokenizer, "tokenizer-path": spec.tokenizer_path}
    select = f" --dataset-select {spec.select}" if spec.select != -1 else ""
    command = "nntask data prepare" + "".join(f" --{name} {shlex.quote(value)}" for name, value in flags.items() if value) + select
    return f"on a machine that reaches it run: {command} --output DIR; then copy DIR here and use --dataset train.bin --dataset-path DIR"


def with_tokenizer_path(spec: DataSpec) -> DataSpec:
    """Return the spec with `tokenizer_path` set to the directory of a Hub tokenizer, which is fetched if it is not on this machine.

    Raises:
        DataError: the tokenizer cannot be fetched.
    """
    if spec.tokenizer in _OWN_TOKENIZERS:
        return spec
    return replace(spec, tokenizer_path=str(fetched_tokenizer(spec.tokenizer, spec.tokenizer_path, _advice(spec))))


def corpus_of(spec: DataSpec) -> Corpus:
    """Return the texts that a spec names.

    Raises:
        DataError: the texts are missing, are not text, or cannot be fetched.
    """
    if spec.dataset == JSONL:
        return line_corpus(spec.path, spec.val_path, spec.select)
    if spec.dataset == "stdlib":
        corpus = stdlib_corpus(spec.select)
    elif spec.dataset == WIKITEXT:
        corpus = wikitext_corpus(spec.path, spec.select, _advice(spec))
    else:
        corpus = text_corpus(spec.path, spec.select, spec.val_path)
        if not reads_bytes(spec):
            check_texts(corpus.train, spec.path, "--dataset-path")
            check_texts(corpus.validation, spec.val_path or spec.path, "--val-path" if spec.val_path else "--dataset-path")
        return corpus
    if spec.val_path:
        extra = scored_corpus(spec.val_path)
        if not reads_bytes(spec):
            check_texts(extra.train, spec.val_path, "--val-path")
        train = corpus.train if spec.dataset == WIKITEXT else (*corpus.train, *corpus.validation)
        corpus = Corpus(corpus.name, train, extra.train, extra.sentences, extra.findings)
    return corpus


def open_dataset(spec: DataSpec, report: Callable[[str], None] = lambda sentence: None) -> Dataset:
    """Open the dataset that a spec names; text that is not in the cache is tokenised first.

    Args:
        spec: choice of dataset and tokenizer.
        report: function called with a sentence before each piece of work that takes seconds.

    Raises:
        UsageError: a name is unknown, or flags exclude each other.
        DataError: the data are missing, are broken, or do not fit the vocabulary.
    """
    check_spec(spec)
    spec = with_tokenizer_path(spec)
    if spec.dataset == "train.bin":
        return _open_tokens(spec)
    if spec.dataset == IMAGES:
        return _open_images(spec, report)
    if spec.objective.form in NUM_FIELDS:
        return _open_rows(spec, report)
    corpus = corpus_of(spec)
    for sentence in corpus.sentences:
        report(sentence)
    with cache_errors():
        fingerprint, key = (hashlib.sha256(f"{_TEXT_FORMAT} {texts} {tokenizer_key(spec)}".encode()).hexdigest() for texts in corpus.fingerprints())
        directory = cache_directory() / "data" / f"{spec.dataset}-{key[:24]}"
        tokenizer = cached_tokenizer(spec, corpus, directory, report)
        ids, names = (tokenizer, spec.vocab_size, report), (spec.name_of("training"), spec.name_of("validation"))
        train = encoded_texts(corpus.train, directory / "train.bin", *ids, names[0])
        validation = encoded_texts(corpus.validation, directory / "val.bin", *ids, names[1]) if corpus.validation else None
    findings = (*corpus.findings, *_findings(tokenizer, train, validation))
    return Dataset(spec.dataset, train, validation, tokenizer, fingerprint, spec=spec, findings=findings)


def _findings(tokenizer: Tokenizer | None, *files: TokenFile | None) -> tuple[Finding, ...]:
    """Return the findings about a tokenizer and about the texts of token files."""
    notes = () if tokenizer is None else tokenizer.notes
    found = [Finding("tokenizer_notes", len(notes), 0, f"tokenizer: {'; '.join(notes)}")] if notes else []
    return (*found, *(each for file in files if file is not None for each in findings_of(file.path)))


def _template_findings(tokenizer: Tokenizer, objective: Objective) -> list[Finding]:
    """Return the finding about chat templates of the tokenizer that are ignored, if any."""
    notes = template_notes(tokenizer, objective.template) if objective.form == "chat" else ()
    return [Finding("template_notes", len(notes), 0, "; ".join(notes))] if notes else []


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
        tokenizer.begin_of_text  # noqa: B018 - raises now, not after the training, when the sample text needs this id
    elif spec.tokenizer == "bytes":
        tokenizer = ByteTokenizer(spec.vocab_size)
    findings = (*_findings(tokenizer, train, validation), *_narrow(tokenizer, train))
    return Dataset("train.bin", train, validation, tokenizer, train.fingerprint(), spec.select, spec, findings)


def _narrow(tokenizer: Tokenizer | None, file: TokenFile) -> tuple[Finding, ...]:
    """Return the finding about a token file without a sidecar whose element type cannot hold all ids of its tokenizer, if it applies."""
    if tokenizer is None or file.is_declared or tokenizer.vocab_size <= 1 << 16:
        return ()
    sentence = (
        f"{file.path} holds ids of two bytes, and its tokenizer has {tokenizer.vocab_size:,} ids, of which those from 65,536 do not fit; if a script "
        f'wrote such ids, they are wrong now: write them as uint32; otherwise write {{"dtype": "uint16"}} to {file.path.name}.json'
    )
    return (Finding("ids_of_two_bytes", tokenizer.vocab_size - (1 << 16), tokenizer.vocab_size, sentence),)


def _train_bin(path: str) -> Path:
    return Path(path) / "train.bin" if Path(path).is_dir() else Path(path)


def _open_images(spec: DataSpec, report: Callable[[str], None]) -> Dataset:
    if sentence := told_images(spec.path, spec.val_path, spec.objective):
        report(sentence)
    train, validation = open_images(spec.path, spec.val_path, spec.objective)
    return Dataset(IMAGES, train, validation, None, train.digest(), spec.select, spec)


def _open_rows(spec: DataSpec, report: Callable[[str], None]) -> Dataset:
    """Open rows of JSON lines from the cache, encoding them first if needed."""
    objective = spec.objective
    lines = json_lines(spec.path, spec.val_path, spec.select)
    sentences, left_out = told_lines(spec.path, spec.val_path)
    for sentence in sentences:
        report(sentence)
    corpus = Corpus(Path(spec.path).name, RowTexts(lines[0]), ())
    pack = objective.length if objective.separates else None
    with cache_errors():
        terms = f"{_FORMAT} {replace(objective, template='', mask_probability=0.0)} {tokenizer_key(spec)} {_template_key(spec)}"
        digests = [split.digest() if split else "" for split in lines]
        fingerprint = hashlib.sha256(f"{terms} {digests[0]}".encode()).hexdigest()
        key = hashlib.sha256(f"{terms} {digests}".encode()).hexdigest()
        directory = cache_directory() / "data" / f"{spec.dataset}-{key[:24]}"
        tokenizer = cached_tokenizer(spec, corpus, directory, report)
        splits, findings = list[RowFile | None](), _template_findings(tokenizer, objective)
        tokenizer = with_template(tokenizer, objective.template) if objective.template else tokenizer
        findings += _findings(tokenizer)
        for split_lines, split, name in zip(lines, SPLITS, ("train.rows", "val.rows"), strict=True):
            rows = _kept_rows(directory / name, objective, spec.name_of(split), report) if split_lines else None
            if split_lines and rows is None:
                num_lines = split_lines.num_lines()
                report(f"tokenising {num_lines} row{'' if num_lines == 1 else 's'} of {spec.name_of(split)}")
                counts = RowCounts(objective, split)
                write_rows(directory / name, encoded_rows(split_lines, objective, tokenizer, spec.vocab_size, counts), pack, counts.findings)
                rows = RowFile(directory / name, NUM_FIELDS[objective.form], spec.name_of(split))
            splits.append(rows)
            findings += read_findings(directory / name / FINDINGS) if split_lines else ()
    train, validation = splits
    assert train is not None  # `json_lines` guarantees lines for training
    validation = validation if validation and validation.num_rows else None
    if validation is None and lines[1] is not None and lines[1].split == "all":
        findings.append(no_validation(spec.name_of("validation")))
    return Dataset(spec.dataset, train, validation, tokenizer, fingerprint, -1, spec, (*left_out, *findings))


def _kept_rows(path: Path, objective: Objective, name: str, report: Callable[[str], None]) -> RowFile | None:
    """Return the cached rows at `path`; None if there are none or if they are corrupt. Error messages refer to them as `name`."""
    if not path.is_dir():
        return None
    try:
        return RowFile(path, NUM_FIELDS[objective.form], name)
    except DataError as error:
        report(rebuilt(error.fact))
        return None


def _template_key(spec: DataSpec) -> str:
    """Return the cache key of the chat template in use, "" for data without one; raise DataError if conversations have no template."""
    if spec.objective.form != "chat":
        return ""
    tokenizer = named_tokenizer(spec) if spec.tokenizer_path else ByteTokenizer()  # a tokenizer trained here has no template either
    return hashlib.sha256(ChatSource.of(tokenizer, spec.objective.template).terms().encode("utf-8", "surrogateescape")).hexdigest()
