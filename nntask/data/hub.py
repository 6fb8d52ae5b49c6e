"""WikiText and tokenizers of the Hugging Face Hub, taken from this machine if possible.

Files on this machine are read directly, whatever their origin: the Hub's parquet files, the cache of `datasets`, or plain text. The Hub is contacted
only if there are none, after a probe of at most `PROBE_SECONDS`, so that a machine without a network gets its error at once.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import threading
from pathlib import Path
from typing import Final

from ..errors import DataError
from ..io.cache_directory import cache_directory
from .foreign_tokenizer import TOKENIZER_FILE, has_tokenizer
from .special_tokens import SPECIAL_FILES
from .splits import splits_in
from .tables import TABLES, RowText, check_tables
from .texts import Corpus

WIKITEXT: Final = "WikiText-103"
PROBE_SECONDS: Final = 4.0
"""Longest wait for the Hub's first answer, in seconds."""
_REPOSITORY: Final = "Salesforce/wikitext"
_NAME: Final = "wikitext-103-raw-v1"
_SUFFIXES: Final = (*TABLES, ".raw", ".tokens", ".txt")


def wikitext_directory(path: str) -> Path:
    """Return the directory in which WikiText is looked for, and into which it is fetched."""
    return Path(path) if path else cache_directory() / "hub"


def wikitext_files(path: str) -> dict[str, tuple[Path, ...]]:
    """Return split name -> files of WikiText on this machine; empty if there is no file of the training split.

    A file belongs to a split if the split's name is a word of the file's name. All files have the same suffix.
    """
    root = wikitext_directory(path)
    if root.is_file():
        return {"train": (root,)}
    candidates = sorted(each for each in root.rglob("*") if each.is_file() and each.suffix in _SUFFIXES and not each.name.startswith("."))
    candidates = [each for each in candidates if _NAME in each.parts] or candidates
    for suffix in _SUFFIXES:
        of_suffix = [(each, splits_in(each.name)) for each in candidates if each.suffix == suffix]
        splits = {split: tuple(each for each, claimed in of_suffix if claimed == {split}) for split in ("train", "validation")}
        if splits["train"]:
            return splits
    return {}


def wikitext_corpus(path: str, select: int, advice: str) -> Corpus:
    """Return the training and validation rows of WikiText-103, which are fetched if they are not on this machine.

    Args:
        path: directory of WikiText; "" for the cache.
        select: number of training rows to keep, from the first; -1 for all.
        advice: remedy that ends the error message if fetching fails.

    Raises:
        DataError: the files are not on this machine and cannot be fetched.
    """
    files = wikitext_files(path)
    if not files:
        _fetch_wikitext(wikitext_directory(path), advice)
        files = wikitext_files(path)
    if not files:
        raise DataError(
            f"{_REPOSITORY} was fetched to {wikitext_directory(path)}, and no training split is there", f"remove it and try again, or {advice}"
        )
    texts = {split: (RowText(f"{WIKITEXT}/{split}", None, files=paths),) if paths else () for split, paths in files.items()}
    train = RowText(f"{WIKITEXT}/train", None, files=files["train"], select=select if select > 0 else -1)
    return Corpus(WIKITEXT, (train,), texts.get("validation", ()))


def check_wikitext(path: str, advice: str) -> None:
    """Check that WikiText is on this machine or can be fetched, without fetching it; the arguments are those of `wikitext_corpus`.

    Raises:
        DataError: WikiText is not on this machine and cannot be fetched.
    """
    if files := wikitext_files(path):
        check_tables(files["train"])
        return
    what = f"--dataset {WIKITEXT}: {wikitext_directory(path)} has no files of it"
    if importlib.util.find_spec("datasets") is None:
        raise DataError(f"{what}, and fetching them needs the datasets package", f"pip install -e '.[hf]', or {advice}")
    check_hub(what, advice)


def _fetch_wikitext(directory: Path, advice: str) -> None:
    import datasets

    try:
        datasets.load_dataset(_REPOSITORY, _NAME, cache_dir=str(directory))
    except Exception as error:  # the package passes on whatever its many parts raise
        raise DataError(f"{_REPOSITORY} could not be fetched: {_first_line(error)}", advice) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def check_hub(what: str, advice: str) -> None:
    """Check that the Hub answers.

    Args:
        what: beginning of the error message, which names the flag and the missing file.
        advice: remedy that ends the error message.

    Raises:
        DataError: the Hub is forbidden by HF_HUB_OFFLINE, or does not answer within `PROBE_SECONDS`.
    """
    host = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "on", "yes", "true"):
        raise DataError(f"{what}, and HF_HUB_OFFLINE forbids asking {host}", advice)
    if reason := _probe(host):
        raise DataError(f"{what}, and {host} cannot be reached ({reason})", advice)


def _probe(host: str) -> str:
    """Return the reason why a host does not answer; "" if it answers.

    The request runs in a thread, because the look-up of a host name has no timeout.
    """
    import urllib.error  # imported here because it takes 3 MB and is rarely needed
    import urllib.request

    answers: list[str] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(host, method="HEAD"), timeout=PROBE_SECONDS):
                answers.append("")
        except urllib.error.HTTPError:  # a refusal is an answer, too
            answers.append("")
        except (OSError, ValueError) as error:
            answers.append(str(getattr(error, "reason", None) or error))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    return answers[0] if answers else f"no answer within {PROBE_SECONDS:g} s"


def tokenizer_location(name: str, path: str) -> Path:
    """Return the file or directory of the tokenizer `name`: `path` if it holds a tokenizer, otherwise its subdirectory `name`."""
    root = Path(path) if path else cache_directory() / "tokenizers"
    if root.is_file() or (path and has_tokenizer(root)):
        return root
    return root / name


def check_tokenizer(name: str, path: str, advice: str) -> None:
    """Check that a tokenizer is on this machine or can be fetched, without fetching it.

    Args:
        name: the tokenizer's name on the Hub.
        path: directory in which it is looked for; "" for the cache.
        advice: remedy that ends the error message.

    Raises:
        DataError: the tokenizer is not on this machine and cannot be fetched.
    """
    location = tokenizer_location(name, path)
    if location.is_file() or has_tokenizer(location):
        return
    if has_tokenizer(Path(name)):
        raise DataError(
            f"takes a name of the Hub, and {name} is a directory of this machine", f"give it with --tokenizer-path {name}", flag="--tokenizer"
        )
    what = f"--tokenizer {name}: there is no {TOKENIZER_FILE} in {path or location}"
    if importlib.util.find_spec("huggingface_hub") is None:
        raise DataError(f"{what}, and fetching it needs the huggingface_hub package", f"pip install -e '.[hf]', or {advice}")
    check_hub(what, advice)


def fetched_tokenizer(name: str, path: str, advice: str) -> Path:
    """Return the file or directory of a tokenizer, fetched with its companion files if necessary; the arguments are those of `check_tokenizer`.

    Raises:
        DataError: the tokenizer cannot be fetched.
    """
    location = tokenizer_location(name, path)
    if not location.is_file() and not has_tokenizer(location):
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError

        try:
            for each in SPECIAL_FILES:
                with contextlib.suppress(EntryNotFoundError):
                    hf_hub_download(name, each, local_dir=str(location))
            hf_hub_download(name, TOKENIZER_FILE, local_dir=str(location))
        except Exception as error:  # the package passes on whatever its many parts raise
            raise DataError(f"could not be fetched: {_first_line(error)}", advice, flag="--tokenizer", value=name) from error
    return location
