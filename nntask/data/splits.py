"""Splits of a directory: the keywords that name splits, and the assignment of files by name. Nothing here reads a file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from ..errors import DataError

Split = Literal["train", "validation", "test"]
_KEYWORDS: Final[Mapping[str, Split]] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "dev", "val"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_DELIMITER: Final = "[-._ 0-9]"
_WORD: Final = re.compile(rf"(?:^|{_DELIMITER})({'|'.join(sorted(_KEYWORDS, key=len, reverse=True))})(?={_DELIMITER}|$)", re.IGNORECASE)
_MOST_NAMES: Final = 3


@dataclass(frozen=True, slots=True)
class Listing:
    """Files of a directory.

    Args:
        flag: flag that names the directory.
        root: path of the directory, as given by the user.
        files: paths relative to the directory, separated by "/", in reading order and without hidden files.
        documents: path -> content of the files that `is_document` selects.
    """

    flag: str
    root: str
    files: tuple[str, ...]
    documents: Mapping[str, str] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """Flag and directory, for error messages."""
        return f"{self.flag} {self.root}"

    def in_order(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the given files, in the order of the listing."""
        wanted = set(names)
        return tuple(name for name in self.files if name in wanted)

    def below(self, folder: str) -> Listing:
        """Return the listing of one folder, with paths relative to it."""
        cut = len(folder) + 1
        files = tuple(name[cut:] for name in self.files if name.startswith(f"{folder}/"))
        documents = {name[cut:]: content for name, content in self.documents.items() if name.startswith(f"{folder}/")}
        return Listing(self.flag, f"{self.root}/{folder}", files, documents)


@dataclass(frozen=True, slots=True)
class Splits:
    """Assignment of a listing's files to splits, in the order of the listing.

    Args:
        layout: name of the recognised layout; "" for a plain tree.
        train: files for training; all data files of a plain tree.
        validation: files of the validation split; may be empty.
        test: files of the test split; may be empty.
        others: files with data that belong to no split.
        metadata: files that describe the data.
    """

    layout: str
    train: tuple[str, ...]
    validation: tuple[str, ...] = ()
    test: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    metadata: tuple[str, ...] = ()

    def within(self, folder: str) -> Splits:
        """Return the same splits with paths relative to the parent directory of `folder`."""
        groups = (self.train, self.validation, self.test, self.others, self.metadata)
        return Splits(self.layout, *(tuple(f"{folder}/{name}" for name in names) for names in groups))

    def sentence(self, where: str) -> str:
        """Return a report, in one line, of the files used for each split."""
        said = [f"training {named(self.train)}"]
        said += [f"validation {named(self.validation)}"] if self.validation else []
        said += [f"test {named(self.test)}, not read"] if self.test else []
        said += [f"of no split and left out {named(self.others)}"] if self.others else []
        said += [f"metadata {named(self.metadata)}, not read"] if self.metadata else []
        return f"{where}{f' ({self.layout})' if self.layout else ''}: {'; '.join(said)}"


def named(files: Sequence[str]) -> str:
    """Return the number of files and the names of the first ones, with control characters escaped."""
    more = ", ..." if len(files) > _MOST_NAMES else ""
    names = ", ".join(files[:_MOST_NAMES])
    shown = "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in names)
    return f"{len(files):,} file{'' if len(files) == 1 else 's'} ({shown}{more})"


def base_name(name: str) -> str:
    """Return the last component of a path."""
    return name.rpartition("/")[2]


def splits_in(name: str) -> frozenset[Split]:
    """Return the splits whose keywords are words of a name, in upper or lower case."""
    return frozenset(_KEYWORDS[found.group(1).lower()] for found in _WORD.finditer(name))


def split_folders(names: Iterable[str]) -> Mapping[Split, tuple[str, ...]]:
    """Return split -> folders whose names contain the keywords of this split only."""
    found: dict[Split, tuple[str, ...]] = {}
    for name in names:
        splits = splits_in(name)
        if len(splits) == 1:
            (split,) = splits
            found[split] = (*found.get(split, ()), name)
    return found


def splits_in_folders(name: str) -> frozenset[Split]:
    """Return the splits whose keywords are words of the folders in a path."""
    return frozenset[Split]().union(*(splits_in(folder) for folder in name.split("/")[:-1]))


def named_splits(listing: Listing, layout: str, by_split: Mapping[str, tuple[str, ...]], *, folders: bool = False) -> Splits:
    """Return the splits for files with declared split names: exactly one name is used for training, the others by their keywords.

    Args:
        listing: files of the directory.
        layout: name of the layout.
        by_split: declared name of a split -> files.
        folders: whether advice can name a split by its folder instead of a pattern.

    Raises:
        DataError: several splits may be for training, or the training split shares a file with another split.
    """
    train = [name for name in by_split if "train" in splits_in(name)] or [name for name in by_split if not splits_in(name)]
    exact = [name for name in train if name.lower() == "train"] or train
    if len(exact) > 1:
        passed = f"{listing.root}/{exact[0]}" if folders else f"'{listing.root}/{_pattern(by_split[exact[0]])}'"
        raise DataError(
            f"has the splits {', '.join(by_split)}, and {' and '.join(exact[:4])} may be for training",
            f"pass one, as in {listing.flag} {passed}",
            flag=listing.flag,
            value=listing.root,
        )
    chosen = exact[0] if exact else ""
    for name, files in by_split.items():
        if shared := set(by_split.get(chosen, ())) & set(files) if name != chosen else ():
            raise DataError(
                f"has {min(shared)} in the splits {chosen} and {name}",
                f"pass the files that are to train, as in {listing.flag} FILE",
                flag=listing.flag,
                value=listing.root,
            )
    chosen_files: dict[str, list[str]] = {"train": list(by_split.get(chosen, ())), "validation": [], "test": [], "others": []}
    for name, files in by_split.items():
        if name != chosen:
            splits = splits_in(name)
            chosen_files["test" if "test" in splits else "validation" if splits == {"validation"} else "others"] += files
    return Splits(layout, **{split: listing.in_order(files) for split, files in chosen_files.items()})


def _pattern(files: Sequence[str]) -> str:
    """Return a pattern for the files of a split, built from their common prefix."""
    first, last = min(files), max(files)
    common = next((at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), min(len(first), len(last)))
    return first if first == last else first[:common].rstrip("0123456789") + "*"
