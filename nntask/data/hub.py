"""What comes from the Hugging Face Hub: WikiText and tokenizers, looked for on this machine first.

Files that lie in the directory are read directly, whatever put them there: the Hub's parquet files, the cache of `datasets`, or text. Only where
there are none is the Hub asked, after a probe that takes at most `PATIENCE` seconds, so that a machine without a network says so at once.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Final

from ..environment import cache_directory
from ..errors import DataError
from .rows import TABLES, RowText, check_tables
from .special import SPECIAL_FILES
from .texts import Corpus
from .tokenizer import FILE_NAME

WIKITEXT: Final = "WikiText-103"
PATIENCE: Final = 4.0
"""Seconds to wait for the Hub's first answer."""
_REPOSITORY: Final = "Salesforce/wikitext"
_NAME: Final = "wikitext-103-raw-v1"
_SPLITS: Final = {"train": {"train"}, "validation": {"validation", "valid", "val"}}
_SUFFIXES: Final = (*TABLES, ".raw", ".tokens", ".txt")


def wikitext_directory(path: str) -> Path:
    """Where WikiText is looked for, and where it is put when it is fetched."""
    return Path(path) if path else cache_directory() / "hub"


def wikitext_files(path: str) -> dict[str, tuple[Path, ...]]:
    """Split -> files of WikiText on this machine; empty where there are none for training.

    Files are told by their names: a split's name is a word of the file's, one suffix for all.
    """
    root = wikitext_directory(path)
    if root.is_file():
        return {"train": (root,)}
    found = sorted(each for each in root.rglob("*") if each.is_file() and each.suffix in _SUFFIXES and not each.name.startswith("."))
    found = [each for each in found if _NAME in each.parts] or found
    for suffix in _SUFFIXES:
        splits = {
            split: tuple(each for each in found if each.suffix == suffix and words & set(re.split(r"[^a-z]+", each.name.lower())))
            for split, words in _SPLITS.items()
        }
        if splits["train"]:
            return splits
    return {}


def wikitext_corpus(path: str, select: int, advice: str) -> Corpus:
    """WikiText-103: the rows of its training split and those of its validation split, fetched if they are not there.

    Args:
        select: only the first `select` rows for training; -1 for all.
        advice: what to do where they cannot be fetched.

    Raises:
        DataError: they are not there and cannot be fetched.
    """
    files = wikitext_files(path)
    if not files:
        _fetch_wikitext(wikitext_directory(path), advice)
        files = wikitext_files(path)
    if not files:
        raise DataError(
            f"{_REPOSITORY} was fetched to {wikitext_directory(path)}, and no training split is there; remove it and try again, or {advice}"
        )
    texts = {split: (RowText(f"{WIKITEXT}/{split}", None, files=places),) if places else () for split, places in files.items()}
    train = RowText(f"{WIKITEXT}/train", None, files=files["train"], select=select if select > 0 else -1)
    return Corpus(WIKITEXT, (train,), texts.get("validation", ()))


def check_wikitext(path: str, advice: str) -> None:
    """Find out cheaply whether WikiText can be had.

    Args:
        advice: what to do where it cannot.

    Raises:
        DataError: it is neither on this machine nor to be fetched.
    """
    files = wikitext_files(path)
    if files:
        check_tables(files["train"])
        return
    what = f"--dataset {WIKITEXT}: {wikitext_directory(path)} has no files of it"
    if importlib.util.find_spec("datasets") is None:
        raise DataError(f"{what}, and fetching them needs the datasets package; pip install datasets, or {advice}")
    check_hub(what, advice)


def _fetch_wikitext(directory: Path, advice: str) -> None:
    import datasets

    try:
        datasets.load_dataset(_REPOSITORY, _NAME, cache_dir=str(directory))
    except Exception as error:  # the package passes on whatever its many parts raise
        raise DataError(f"{_REPOSITORY} could not be fetched: {_first_line(error)}; {advice}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def check_hub(what: str, advice: str) -> None:
    """Check that the Hub answers.

    Args:
        what: cannot be had without it.
        advice: what to do then.

    Raises:
        DataError: it does not, within `PATIENCE` seconds.
    """
    host = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "on", "yes", "true"):
        raise DataError(f"{what}, and HF_HUB_OFFLINE forbids asking {host}; {advice}")
    reason = _probe(host)
    if reason:
        raise DataError(f"{what}, and {host} cannot be reached ({reason}); {advice}")


def _probe(host: str) -> str:
    """Why a host does not answer; empty when it does. A thread of its own, because looking up a name cannot be given a deadline."""
    answers: list[str] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(host, method="HEAD"), timeout=PATIENCE):
                answers.append("")
        except urllib.error.HTTPError:  # an answer, even if it is no
            answers.append("")
        except (OSError, ValueError) as error:
            answers.append(str(getattr(error, "reason", None) or error))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return answers[0] if answers else f"no answer within {PATIENCE:g} s"


def tokenizer_place(name: str, path: str) -> Path:
    """Where the tokenizer `name` is looked for: in the directory, below it under its name, and where it is put when it is fetched."""
    root = Path(path) if path else cache_directory() / "tokenizers"
    if root.is_file() or (path and (root / FILE_NAME).is_file()):
        return root
    return root / name


def check_tokenizer(name: str, path: str, advice: str) -> None:
    """Find out cheaply whether a tokenizer can be had; arguments as of `check_wikitext`.

    Raises:
        DataError: it is neither on this machine nor to be fetched.
    """
    place = tokenizer_place(name, path)
    if place.is_file() or (place / FILE_NAME).is_file():
        return
    what = f"--tokenizer {name}: there is no {FILE_NAME} in {path or place}"
    if importlib.util.find_spec("huggingface_hub") is None:
        raise DataError(f"{what}, and fetching it needs the huggingface_hub package; pip install huggingface_hub, or {advice}")
    check_hub(what, advice)


def fetched_tokenizer(name: str, path: str, advice: str) -> Path:
    """The place of the tokenizer `name`, fetched if it is not there, with the files that belong to it; arguments as of `check_wikitext`.

    Raises:
        DataError: it cannot be fetched.
    """
    place = tokenizer_place(name, path)
    if not place.is_file() and not (place / FILE_NAME).is_file():
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError

        try:
            for each in SPECIAL_FILES:
                with contextlib.suppress(EntryNotFoundError):
                    hf_hub_download(name, each, local_dir=str(place))
            hf_hub_download(name, FILE_NAME, local_dir=str(place))
        except Exception as error:  # the package passes on whatever its many parts raise
            raise DataError(f"--tokenizer {name} could not be fetched: {_first_line(error)}; {advice}") from error
    return place
