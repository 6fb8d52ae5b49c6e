"""Layouts of data directories: assignment of files to training, validation and test, from a listing of the directory.

`splits_of` is a pure function from a listing to splits. It recognises, in this order: directories written by `save_to_disk` of `datasets`; the
dataset card of a repository; the Hub's shards (``data/train-00000-of-00003.parquet``); and split names in folders, then in files, with the keywords
and delimiters of `datasets`. Any other directory is a plain tree, all of whose files are used for training.

Files of a test split are never training data. A layout that does not determine the training files is refused, with a message that says what to pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from ..errors import DataError
from .cards import CARD, CardConfig, card_configs, is_dataset_card, matching
from .saved import DICT, STATE, object_in, saved_splits
from .splits import Listing, Splits, base_name, named, named_splits, splits_in, splits_in_folders

INFOS: Final = "dataset_infos.json"
HEAD: Final = "refs/main"
_SHARD: Final = re.compile(r"data/(\w[\w.]*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})[^/]*\.[^/]*")
_SNAPSHOT: Final = re.compile(r"^snapshots/[^/]+/")
"""Beginning of file names in the Hub's cache."""
_DESCRIPTIONS: Final = frozenset({"dataset_info.json", INFOS, DICT})
"""Names of files that describe a dataset, in any folder."""
_ABOUT: Final = re.compile(
    r"(readme|licen[cs]e|copying|notice|citation|changelog|authors|contributing|requirements)([-_][^.]*)?(\.(md|txt|rst|html|cff|pdf))?"
    r"|config\.json|dummy_data\.zip",
    re.IGNORECASE,
)
"""Names of files that describe the data if the directory also has other signs of a dataset."""


def is_document(name: str) -> bool:
    """Return whether `splits_of` needs the content of a file."""
    return name == HEAD or _SNAPSHOT.sub("", name) in (CARD, INFOS) or base_name(name) in (DICT, STATE)


def splits_of(listing: Listing, is_data: Callable[[str], bool], has_rows: Callable[[str], bool]) -> Splits:
    """Return the splits of a directory.

    Args:
        listing: files of the directory.
        is_data: predicate on a file's name, whether the file can hold data of the wanted form.
        has_rows: predicate on a file's name, whether the file holds rows (tables and JSON lines do, texts do not).

    Raises:
        DataError: the layout does not determine the training files, or a file that describes it is damaged.
    """
    snapshot = _snapshot(listing)
    if snapshot:
        return splits_of(listing.below(snapshot), is_data, has_rows).within(snapshot)
    saved = saved_splits(listing, is_data)
    if saved is not None:
        return saved
    about = frozenset(name for name in listing.files if _is_metadata(name, listing))
    asides = frozenset(name for name in listing.files if name not in about and _ABOUT.fullmatch(base_name(name)))
    config = _card_config(listing)
    files = tuple(name for name in listing.files if is_data(name) and name not in about)
    rows = 2 * sum(map(has_rows, files)) > sum(name not in asides for name in files)
    if config is not None:
        splits = _of_config(listing, config, files)
    else:
        splits = _by_shards(listing, files) or _by_names(listing, tuple(name for name in files if name not in asides))
    if splits is None:
        plain = tuple(name for name in files if not rows or name not in asides)
        return Splits("", plain, metadata=tuple(name for name in listing.files if name in about or (rows and name in asides)))
    taken = {*splits.train, *splits.validation, *splits.test}
    return replace(splits, metadata=tuple(name for name in listing.files if name in about or (name in asides and name not in taken)))


def _is_metadata(name: str, listing: Listing) -> bool:
    return base_name(name) in _DESCRIPTIONS or (name == CARD and is_dataset_card(listing.documents.get(CARD, "")))


def _snapshot(listing: Listing) -> str:
    """Return the folder of the current snapshot in the Hub's cache, "" in any other directory; raise DataError if several may be current."""
    folders = list(dict.fromkeys("/".join(name.split("/")[:2]) for name in listing.files if re.match(r"snapshots/[^/]+/", name)))
    if not folders or not any(name.startswith("blobs/") for name in listing.files):
        return ""
    head = f"snapshots/{listing.documents.get(HEAD, '').strip()}"
    if head in folders:
        return head
    if len(folders) > 1:
        raise DataError(
            f"has {len(folders)} snapshots of a repository", f"name one, as in {listing.root}/{folders[0]}", flag=listing.flag, value=listing.root
        )
    return folders[0]


def _card_config(listing: Listing) -> CardConfig | None:
    """Return the config of the dataset card to use, None if the card names no files; raise DataError if none of several is the default."""
    configs = [each for each in card_configs(listing.documents.get(CARD, ""), f"{listing.root}/{CARD}") if each.patterns or each.folder]
    defaults = configs if len(configs) == 1 else [each for each in configs if each.is_default]
    if configs and len(defaults) != 1:
        name = configs[0].folder or next(iter(configs[0].patterns.values()))[0]
        raise DataError(
            f"the card of {listing.where} has {len(configs)} configs, {', '.join(each.name for each in configs[:8])}, and "
            f"{'no default' if not defaults else 'several defaults'}",
            f"pass the files of one, as in {listing.flag} '{listing.root}/{name}'",
        )
    return defaults[0] if defaults else None


def _of_config(listing: Listing, config: CardConfig, files: tuple[str, ...]) -> Splits | None:
    """Return the splits that a config of the card declares; raise DataError if no file matches the config."""
    layout = f"card, config {config.name}"
    if not config.patterns:
        inside = listing.below(config.folder)
        splits = _by_names(inside, tuple(name[len(config.folder) + 1 :] for name in files if name.startswith(f"{config.folder}/")))
        plain = Splits("", listing.in_order(name for name in files if name.startswith(f"{config.folder}/")))
        splits = splits.within(config.folder) if splits else plain
    else:
        by_split = {
            split: tuple(dict.fromkeys(name for each in wanted for name in matching(each, files))) for split, wanted in config.patterns.items()
        }
        present = {split: names for split, names in by_split.items() if names}
        if not present:
            missing = next(iter(config.patterns.values()))[0]
            raise DataError(f"the card of {listing.where} names {missing}, and no such file with data is there", "copy the directory again")
        splits = named_splits(listing, layout, present)
    taken = {*splits.train, *splits.validation, *splits.test, *splits.others}
    return replace(splits, layout=layout, others=splits.others + tuple(name for name in files if name not in taken and not _ABOUT.fullmatch(name)))


def _by_shards(listing: Listing, files: tuple[str, ...]) -> Splits | None:
    """Return the splits of files ``data/NAME-00000-of-00001.EXTENSION``; None if there is no such file; raise DataError if a shard is missing."""
    by_split: dict[str, list[str]] = {}
    numbers: dict[tuple[str, int], set[int]] = {}
    for name in files:
        if shard := _SHARD.fullmatch(name):
            by_split.setdefault(shard.group(1), []).append(name)
            numbers.setdefault((shard.group(1), int(shard["count"])), set()).add(int(shard["number"]))
    for (split, count), there in numbers.items():
        if len(there) < count:
            raise DataError(
                f"has {len(there)} of the {count} shards of {split}",
                f"copy the missing ones, or pass those that are there, as in {listing.flag} '{listing.root}/data/{split}-*'",
                flag=listing.flag,
                value=listing.root,
            )
    if not by_split:
        return None
    splits = named_splits(listing, "shards of the Hub", {name: tuple(names) for name, names in by_split.items()})
    taken = {name for names in by_split.values() for name in names}
    return replace(splits, others=splits.others + tuple(name for name in files if name not in taken and not _ABOUT.fullmatch(base_name(name))))


def _by_names(listing: Listing, files: tuple[str, ...]) -> Splits | None:
    """Return the splits by keywords in folders or files, None for a plain tree; raise DataError for a file of several splits or many of none."""
    marked = {name: splits for name in files if (splits := splits_in_folders(name))}
    layout = "names of folders"
    if not any("train" in splits for splits in marked.values()):
        layout = layout if marked else "names of files"
        marked |= {name: splits for name in files if name not in marked and (splits := splits_in(base_name(name)))}
    if not marked:
        return None
    for name, splits in marked.items():
        if "train" in splits and len(splits) > 1:
            raise DataError(
                f"has {name}, whose name belongs to the splits {' and '.join(sorted(splits))}",
                f"{_advice(listing, name)}",
                flag=listing.flag,
                value=listing.root,
            )
    train, test = (tuple(name for name, splits in marked.items() if split in splits) for split in ("train", "test"))
    validation = tuple(name for name, splits in marked.items() if splits == {"validation"})
    others = tuple(name for name in files if name not in marked)
    kept_apart = validation or test or any(splits_in(base_name(name)) - {"train"} for name in others)
    _check_configs(listing, train)
    if not train:
        train, others = others, ()
    elif len(others) > len(marked) and not kept_apart:
        return None  # coincidence: no file is for validation or test
    elif len(others) >= len(marked) and kept_apart:
        raise DataError(
            f"has {named(train)} for training by name, and {named(others)} of no split",
            f"{_advice(listing, train[0])}, or {listing.flag} '{listing.root}/**' to train on all",
            flag=listing.flag,
            value=listing.root,
        )
    return Splits(layout, *(listing.in_order(names) for names in (train, validation, test, others)))


def _advice(listing: Listing, name: str) -> str:
    return f"pass what is to train, as in {listing.flag} '{listing.root}/{name}'"


def _check_configs(listing: Listing, train: Sequence[str]) -> None:
    """Raise DataError if the training files belong to several configs of dataset_infos.json, the older description of a repository."""
    configs = object_in(listing, INFOS) if INFOS in listing.documents else {}
    folders = list(dict.fromkeys(folder for name in train for folder in name.split("/")[:-1] if folder in configs))
    if len(folders) > 1:
        raise DataError(
            f"has the configs {', '.join(folders[:8])}",
            f"name one, as in {listing.flag} {listing.root}/{folders[0]}",
            flag=listing.flag,
            value=listing.root,
        )
