"""Splits of a directory: the words that name them, and files with names of splits. Nothing here reads a file."""

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
        where: the flag and the directory, for messages.
        root: the directory, as the user named it.
        files: paths below it with "/", in the order in which they would be read; no hidden ones.
        documents: contents of the files that `is_document` names.
    """

    where: str
    root: str
    files: tuple[str, ...]
    documents: Mapping[str, str] = field(default_factory=dict)

    @property
    def flag(self) -> str:
        """The flag that named the directory."""
        return self.where.partition(" ")[0]

    def in_order(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of its files, in its order."""
        wanted = set(names)
        return tuple(name for name in self.files if name in wanted)

    def below(self, folder: str) -> Listing:
        """The files in one folder, with names below it."""
        cut = len(folder) + 1
        files = tuple(name[cut:] for name in self.files if name.startswith(f"{folder}/"))
        documents = {name[cut:]: content for name, content in self.documents.items() if name.startswith(f"{folder}/")}
        return Listing(f"{self.where}/{folder}", f"{self.root}/{folder}", files, documents)


@dataclass(frozen=True, slots=True)
class Splits:
    """What a listing means: paths of its files, in its order.

    Args:
        layout: name of the layout, "" for a plain tree.
        train, validation, test: files of each split, each possibly empty; a plain tree has only the first.
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
        """The same with names from the directory above `folder`."""
        groups = (self.train, self.validation, self.test, self.others, self.metadata)
        return Splits(self.layout, *(tuple(f"{folder}/{name}" for name in names) for names in groups))

    def sentence(self, where: str) -> str:
        """One line that says which files were taken for what."""
        said = [f"training {named(self.train)}"]
        said += [f"validation {named(self.validation)}"] if self.validation else []
        said += [f"test {named(self.test)}, not read"] if self.test else []
        said += [f"of no split and left out {named(self.others)}"] if self.others else []
        said += [f"metadata {named(self.metadata)}, not read"] if self.metadata else []
        return f"{where}{f' ({self.layout})' if self.layout else ''}: {'; '.join(said)}"


def named(files: Sequence[str]) -> str:
    """Number of files with the names of the first ones, as a terminal may see them: control characters are escaped."""
    more = ", ..." if len(files) > _MOST_NAMES else ""
    names = ", ".join(files[:_MOST_NAMES])
    shown = "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in names)
    return f"{len(files):,} file{'' if len(files) == 1 else 's'} ({shown}{more})"


def base_name(name: str) -> str:
    """The last component of a path."""
    return name.rpartition("/")[2]


def splits_in(name: str) -> frozenset[Split]:
    """The splits whose keywords are words of a name, in any case."""
    return frozenset(_KEYWORDS[found.group(1).lower()] for found in _WORD.finditer(name))


def split_folders(names: Iterable[str]) -> Mapping[Split, tuple[str, ...]]:
    """The folders that are named after one split each, by split."""
    found: dict[Split, tuple[str, ...]] = {}
    for name in names:
        splits = splits_in(name)
        if len(splits) == 1:
            (split,) = splits
            found[split] = (*found.get(split, ()), name)
    return found


def splits_in_folders(name: str) -> frozenset[Split]:
    """The splits whose keywords are words of the folders of a path."""
    return frozenset[Split]().union(*(splits_in(folder) for folder in name.split("/")[:-1]))


def named_splits(listing: Listing, layout: str, by_split: Mapping[str, tuple[str, ...]], *, folders: bool = False) -> Splits:
    """Splits from files that have names of splits: of those for training one, of the others all.

    Args:
        by_split: name -> files.
        folders: whether a split can be passed as a folder of its name, else by a pattern.

    Raises:
        DataError: several splits may be for training, or the one that is shares a file with another.
    """
    train = [name for name in by_split if "train" in splits_in(name)] or [name for name in by_split if not splits_in(name)]
    exact = [name for name in train if name.lower() == "train"] or train
    if len(exact) > 1:
        passed = f"{listing.root}/{exact[0]}" if folders else f"'{listing.root}/{_pattern(by_split[exact[0]])}'"
        raise DataError(
            f"{listing.where} has the splits {', '.join(by_split)}, and {' and '.join(exact[:4])} may be for training; "
            f"pass one, as in {listing.flag} {passed}"
        )
    chosen = exact[0] if exact else ""
    for name, files in by_split.items():
        if shared := set(by_split.get(chosen, ())) & set(files) if name != chosen else ():
            raise DataError(
                f"{listing.where} has {min(shared)} in the splits {chosen} and {name}; pass the files that are to train, as in {listing.flag} FILE"
            )
    found: dict[str, list[str]] = {"train": list(by_split.get(chosen, ())), "validation": [], "test": [], "others": []}
    for name, files in by_split.items():
        if name != chosen:
            splits = splits_in(name)
            found["test" if "test" in splits else "validation" if splits == {"validation"} else "others"] += files
    return Splits(layout, **{split: listing.in_order(files) for split, files in found.items()})


def _pattern(files: Sequence[str]) -> str:
    """A pattern that names the files of a split: their common beginning."""
    first, last = min(files), max(files)
    common = next((at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), min(len(first), len(last)))
    return first if first == last else first[:common].rstrip("0123456789") + "*"
