"""Loading of tokenizers from a tokenizer.json, a GGUF file, or a vocabulary without rules, together with their companion files.

Encoding is deterministic and complete: truncation and padding, which training scripts leave in tokenizer.json, are disabled, and so is the random
dropout of merges.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..errors import DataError
from ..gguf.model_file import GgufModel, is_gguf, open_gguf
from ..io.regular_file import read_bytes
from .added_tokens import add_tokens
from .rule_bounds import has_long_value, normalizer_of, sections_of, unbounded_model, unbounded_rule, without_rules
from .special_tokens import SPECIAL_TOKENS, TOKENIZER_CONFIG, Companions, read_companions
from .token_rules import ConfinedRules, LocalRules, TokenRules
from .tokenizer_keys import check_keys
from .vocabulary_files import SENTENCE_PIECE, SPECIAL, built, conversion, put_around, rule_of, vocabulary_of

TOKENIZER_FILE: Final = "tokenizer.json"
_POINTER: Final = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class OpenedTokenizer:
    """A loaded tokenizer.

    Args:
        inner: `tokenizers.Tokenizer`, without its rules if they run in a sandboxed process.
        rules: rules of the tokenizer, which encode and decode.
        directory: directory of the tokenizer's files, or the GGUF file.
        companions: companion files of the tokenizer.
        notes: notes about settings in the files that are ignored, a sentence each.
        terms: cache key of all that determines the tokens besides the bytes of the tokenizer's file; "" if nothing does.
    """

    inner: Any
    rules: TokenRules
    directory: Path
    companions: Companions
    notes: tuple[str, ...]
    terms: str


def have_tokenizers() -> bool:
    """Return whether the `tokenizers` package is installed."""
    return importlib.util.find_spec("tokenizers") is not None


def open_tokenizer(path: Path, *, has_template: bool = False) -> OpenedTokenizer:
    """Load the parts of a tokenizer; the arguments and errors are those of `tokenizer.load_tokenizer`."""
    opened = open_gguf(path) if is_gguf(path) else None
    file = path / TOKENIZER_FILE if path.is_dir() else path
    vocabulary = vocabulary_of(path) if path.is_dir() and not file.is_file() else ()
    _check_there(path, file, opened, has_vocabulary=bool(vocabulary))
    directory = path if vocabulary else file.parent if opened is None else file
    companions = read_companions(directory, has_template=has_template)
    objects = companions.objects
    rule = rule_of(path, objects) if vocabulary else None
    if rule is not None:
        config = {**objects.get(SPECIAL_TOKENS, {}), **objects.get(TOKENIZER_CONFIG, {})}
        inner, sections, doubt = built(path, rule, config), None, ""
    else:
        inner, sections, doubt = _read(file, opened)
    dropout = getattr(inner.model, "dropout", None)
    if dropout:
        inner.model.dropout = None
    inner.no_truncation()
    inner.no_padding()
    added = add_tokens(inner, objects, str(directory), {} if rule is None else SPECIAL[rule])
    if rule is not None:
        put_around(inner, rule, config)
    is_split = objects.get(TOKENIZER_CONFIG, {}).get("split_special_tokens") is True
    if is_split:
        inner.encode_special_tokens = True
    doubt = doubt or unbounded_model(inner)
    rules: TokenRules = ConfinedRules(inner, sections or sections_of(inner), directory) if doubt else LocalRules(inner, directory)
    notes = check_keys(inner, rules, objects, str(directory))
    if doubt:
        why = f"since it has a rule that nntask does not know: {doubt}; its tokens are the same, and encoding may be slower"
        notes = (f"the tokenizer runs in a separate process with limits of time and memory, {why}", *notes)
    if dropout:
        notes = (f"{TOKENIZER_FILE} drops {dropout:.0%} of its merges at random; that is off here, so a text always has the same tokens", *notes)
    terms = "" if rule is None else hashlib.sha256(inner.to_str().encode()).hexdigest()
    return OpenedTokenizer(inner, rules, directory, companions, notes, terms + (json.dumps([added, is_split]) if added or is_split else ""))


def _check_there(path: Path, file: Path, opened: GgufModel | None, *, has_vocabulary: bool) -> None:
    """Raise DataError if there is no tokenizer to read, or its package is not installed."""
    if opened is not None and opened.untranslated:
        raise DataError(f"the tokenizer in {path} {opened.untranslated}", "name its tokenizer.json with --tokenizer-path DIR, or use another file")
    if not has_vocabulary and (not file.is_file() or (opened is not None and TOKENIZER_FILE not in opened.files)):
        if (path / SENTENCE_PIECE).is_file():
            raise DataError(f"{path} has {SENTENCE_PIECE} and no {TOKENIZER_FILE}", f"write one with: {conversion(path)}")
        raise DataError(
            f"no {TOKENIZER_FILE} at {file}", "give its directory with --tokenizer-path, or drop the flag to train a tokenizer on the data"
        )
    if not have_tokenizers():
        raise DataError(f"reading {file} needs the tokenizers package", "pip install -e '.[text]', or use --tokenizer bytes")


def _read(file: Path, opened: GgufModel | None) -> tuple[Any, Mapping[str, Any] | None, str]:
    """Read the tokenizer in a tokenizer.json, or in an open GGUF file.

    Returns:
        The `tokenizers.Tokenizer`; its rules, if they were left out of it; and the first rule that is not known to be bounded, "" if there is none.
    """
    import tokenizers

    inside = None if opened is None else opened.files[TOKENIZER_FILE]
    try:
        text = read_bytes(file) if inside is None else inside.encode()
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}", "copy it again") from None
    if text.startswith(_POINTER):
        raise DataError(f"{file} is a pointer of Git LFS and not the file", "fetch it with git lfs pull, or copy it from the model's page")
    if has_long_value(text):
        why = "a token or a list of numbers that is longer than any of a published tokenizer"
        raise DataError(f"{file} has {why}", "name another with --tokenizer-path DIR, or copy it again")
    try:
        if _loads_safely(text):
            inner = tokenizers.Tokenizer.from_buffer(text)  # the package cannot open a path that is not UTF-8
            if not (doubt := unbounded_rule(sections_of(inner))):
                return inner, None, ""
            content = json.loads(inner.to_str())
        else:
            content = json.loads(text)
            doubt = unbounded_rule({"normalizer": content["normalizer"]})
        return tokenizers.Tokenizer.from_str(json.dumps(without_rules(content))), content, doubt
    except Exception as error:  # the package raises bare Exception for any broken file
        if opened is not None and (flaw := opened.flaw()):
            raise DataError(f"the tokenizer in {file} {flaw}", "name its tokenizer.json with --tokenizer-path DIR, or use another file") from None
        raise DataError(
            f"{file} is not a tokenizer file: {error}", f"copy it again, or update the tokenizers package, which is {tokenizers.__version__} here"
        ) from None


def _loads_safely(text: bytes) -> bool:
    """Return whether the normalizer of a tokenizer.json, which runs during loading, is known to be bounded."""
    try:
        return not unbounded_rule({"normalizer": normalizer_of(text)})
    except (ValueError, RecursionError):  # not a tokenizer
        return False


def stored_tokenizer(path: Path) -> bytes:
    """Return the bytes of a tokenizer: a tokenizer.json, from a file, a directory or a GGUF file, or else the files of a vocabulary."""
    if is_gguf(path):
        return open_gguf(path).files[TOKENIZER_FILE].encode()
    file = path / TOKENIZER_FILE if path.is_dir() else path
    return read_bytes(file) if file.is_file() else b"".join(read_bytes(each) for each in vocabulary_of(path))


def other_way(path: Path) -> str:
    """Return the conversion to suggest for a model without a readable tokenizer, as the end of an error message; "" if there is none."""
    return f", or write its {TOKENIZER_FILE} with: {conversion(path)}" if (path / SENTENCE_PIECE).is_file() else ""


def has_tokenizer(path: Path) -> bool:
    """Return whether a model directory or a GGUF file contains a tokenizer."""
    if is_gguf(path):
        return TOKENIZER_FILE in open_gguf(path).files
    return (path / TOKENIZER_FILE).is_file() or bool(vocabulary_of(path))
