"""Directories written by `save_to_disk` of `datasets`: a Dataset, or a DatasetDict of several splits, whose tables are listed in state.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from ..errors import DataError
from .splits import Listing, Splits, named_splits, splits_in

DICT: Final = "dataset_dict.json"
STATE: Final = "state.json"


def saved_splits(listing: Listing, is_data: Callable[[str], bool]) -> Splits | None:
    """Return the splits of a saved dataset; None for any other directory.

    Raises:
        DataError: the directory holds several datasets, or a description is damaged.
    """
    if DICT in listing.documents:
        names = object_in(listing, DICT).get("splits")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise DataError(f"{listing.root}/{DICT} must list its splits, got {listing.documents[DICT][:60]!r}", "save the dataset again")
        return _rest(listing, named_splits(listing, "save_to_disk", {name: _tables(listing, name) for name in names}, folders=True), is_data)
    if STATE in listing.documents and (tables := _tables(listing, "")):
        return _rest(listing, Splits("save_to_disk", tables), is_data)
    folders = [name.rpartition("/")[0] for name in listing.documents if name.endswith(f"/{DICT}")]
    below = tuple(f"{folder}/" for folder in folders)
    states = (name.rpartition("/")[0] for name in listing.documents if name.endswith(f"/{STATE}") and not name.startswith(below))
    folders += [folder for folder in states if _tables(listing, folder)]
    if len(folders) == 1:
        inner = saved_splits(listing.below(folders[0]), is_data)
        return None if inner is None else _rest(listing, inner.within(folders[0]), is_data)
    if folders and all(splits_in(folder) and f"{folder}/{DICT}" not in listing.documents for folder in folders):
        return _rest(listing, named_splits(listing, "save_to_disk", {folder: _tables(listing, folder) for folder in folders}, folders=True), is_data)
    if folders:
        names = ", ".join(folders[:8])
        raise DataError(
            f"holds {len(folders)} datasets of save_to_disk: {names}",
            f"name one, as in {listing.flag} {listing.root}/{folders[0]}",
            flag=listing.flag,
            value=listing.root,
        )
    return None


def _tables(listing: Listing, folder: str) -> tuple[str, ...]:
    """Return the tables that a state.json lists, none if it is not of a saved dataset; raise DataError if one is missing or rows are reordered."""
    prefix = f"{folder}/" if folder else ""
    if f"{prefix}{STATE}" not in listing.documents:
        return ()
    try:
        state = object_in(listing, f"{prefix}{STATE}")
    except DataError:
        if f"{prefix}dataset_info.json" in listing.files:
            raise
        return ()
    entries = state.get("_data_files")
    if not isinstance(entries, list) or not all(isinstance(each, dict) and isinstance(each.get("filename"), str) for each in entries):
        return ()
    if state.get("_indices_data_files"):
        raise DataError(f"{listing.root}/{prefix}{STATE} names a table of indices, which is not read", "save flatten_indices() of the dataset")
    names = tuple(prefix + each["filename"] for each in entries)
    if missing := [name for name in names if name not in listing.files]:
        raise DataError(f"{listing.root}/{missing[0]} is named in {prefix}{STATE} and is not there", "copy the directory again")
    return names


def object_in(listing: Listing, name: str) -> Mapping[str, Any]:
    """Return the JSON object in a document of a listing.

    Raises:
        DataError: the document is not a JSON object.
    """
    try:
        document = json.loads(listing.documents[name])
    except (ValueError, RecursionError) as error:
        raise DataError(f"{listing.root}/{name} is not JSON: {error}", "copy it again, or remove it") from None
    if not isinstance(document, dict):
        raise DataError(f"{listing.root}/{name} must be an object, got {listing.documents[name][:40]!r}", "copy it again, or remove it")
    return document


def _rest(listing: Listing, found: Splits, is_data: Callable[[str], bool]) -> Splits:
    """Return the splits of saved tables, with all other files as metadata; raise DataError if the wanted form of data cannot be read from tables."""
    if not all(is_data(name) for name in found.train):
        raise DataError(
            "holds tables of save_to_disk, which this dataset does not read",
            "use --dataset text or --dataset jsonl",
            flag=listing.flag,
            value=listing.root,
        )
    taken = {*found.train, *found.validation, *found.test, *found.others}
    return replace(found, metadata=tuple(name for name in listing.files if name not in taken))
