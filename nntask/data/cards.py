"""Dataset cards: the YAML at the head of a README.md, whose key ``configs`` lists the files of each split.

PyYAML is installed with the Hub's packages, and is imported only when a card has configs.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ..errors import DataError

CARD: Final = "README.md"
_HEAD: Final = re.compile(r"---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(\r?\n|$)", re.DOTALL)
_KEY: Final = re.compile(
    r"^(configs|dataset_info|task_categories|task_ids|size_categories|source_datasets|annotations_creators|language_creators|multilinguality"
    r"|pretty_name)[ \t]*:",
    re.MULTILINE,
)
_PIECE: Final = re.compile(r"\*+|\[[^\]]+\]|.")
_HAS_CONFIGS: Final = re.compile(r"^configs[ \t]*:", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class CardConfig:
    """A config of a dataset card.

    Args:
        name: name of the config.
        is_default: whether the card declares it the default.
        patterns: split -> patterns of the split's files; empty if the card has none.
        folder: folder of the config's files; "" if the card names none.
    """

    name: str
    is_default: bool
    patterns: Mapping[str, tuple[str, ...]]
    folder: str


def is_dataset_card(text: str) -> bool:
    """Return whether a README.md begins with the metadata of a dataset."""
    head = _HEAD.match(text.removeprefix("\ufeff"))
    return bool(head and _KEY.search(head.group(1)))


def card_configs(text: str, path: str) -> tuple[CardConfig, ...]:
    """Return the configs of a README.md with the content `text` that is a dataset card; none for any other. `path` is for error messages.

    Raises:
        DataError: the card cannot be read, or PyYAML is missing.
    """
    head = _HEAD.match(text.removeprefix("\ufeff"))
    if not head or not _HAS_CONFIGS.search(head.group(1)):
        return ()
    if importlib.util.find_spec("yaml") is None:
        raise DataError(f"reading the configs of the card {path} needs the pyyaml package", "pip install pyyaml, or name the files")
    import yaml

    try:
        front_matter = yaml.safe_load(head.group(1))
    except yaml.YAMLError as error:
        raise DataError(f"the card {path} does not begin with valid YAML: {' '.join(str(error).split())}", "fix it, or name the files") from None
    configs = front_matter.get("configs") if isinstance(front_matter, dict) else None
    if not isinstance(configs, list):
        raise DataError(f"configs of the card {path} must be a list, got {type(configs).__name__}", "fix it, or name the files")
    return tuple(_config(each, path) for each in configs)


def _config(entry: Any, path: str) -> CardConfig:
    """Return the config of an entry of ``configs``; raise DataError for an entry that `datasets` would refuse, or that names files elsewhere."""
    rule = f"each config of the card {path} must have a config_name, and data_files of paths or of a split with its path"
    wrong = DataError(f"{rule}, got {str(entry)[:120]}", "fix it, or name the files")
    files = entry.get("data_files") if isinstance(entry, dict) else None
    listed = [files] if isinstance(files, str) else [] if files is None else files
    if not isinstance(entry, dict) or not isinstance(entry.get("config_name"), str) or not isinstance(listed, list):
        raise wrong
    patterns: dict[str, tuple[str, ...]] = {}
    for each in listed:
        split, paths = (each.get("split"), each.get("path")) if isinstance(each, dict) else ("train", each)
        paths = [paths] if isinstance(paths, str) else paths
        if not isinstance(split, str) or not isinstance(paths, list) or not all(isinstance(name, str) for name in paths):
            raise wrong
        patterns[split] = (*patterns.get(split, ()), *paths)
    if far := [name for names in patterns.values() for name in names if "://" in name]:
        raise DataError(f"the card {path} names {far[0]}, which is on another machine", "fetch it, and name the file")
    folder = str(entry.get("data_dir") or "").removeprefix("./").rstrip("/")
    name = entry["config_name"]
    return CardConfig(name, name == "default" or entry.get("default") is True, patterns, "" if folder == "." else folder)


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the paths that match a pattern: ``*`` does not match a "/", ``**`` matches any number of folders."""
    folders = pattern.removeprefix("./").split("/")
    expression = ""
    for at, folder in enumerate(folders):
        last = at == len(folders) - 1
        if folder == "**":
            expression += ".*" if last else "(?:.*/)?"
        else:
            expression += "".join(_translated(each) for each in _PIECE.findall(folder)) + ("" if last else "/")
    matches = re.compile(expression).fullmatch
    return [name for name in names if matches(name)]


def _translated(piece: str) -> str:
    """Return the regular expression for one piece of a pattern: a wildcard, a set of characters, or a character."""
    if piece[0] == "*":
        return "[^/]*"
    if len(piece) > 1:
        return "[" + piece[1:-1].replace("\\", "\\\\").replace("!", "^", 1 if piece[1] == "!" else 0) + "]"
    return "[^/]" if piece == "?" else re.escape(piece)
