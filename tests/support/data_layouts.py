"""Data directories drawn at random from the words of splits and words like them, and the rules of `datasets` as its patterns say them."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import strategies as st

from nntask.data.cards import matching
from nntask.data.layout import splits_of
from nntask.data.splits import Listing, splits_in
from nntask.errors import DataError

KEYWORDS: Mapping[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
FOLDER_PATTERNS = ("**/{0}/**", "**/{0}[-._ 0-9]*/**", "**/*[-._ 0-9]{0}/**", "**/*[-._ 0-9]{0}[-._ 0-9]*/**")
FILE_PATTERNS = ("**/{0}[-._ 0-9]*", "**/*[-._ 0-9]{0}[-._ 0-9]*")

WORDS = ("train", "training", "validation", "valid", "dev", "val", "test", "testing", "eval", "evaluation", "data", "notes", "en", "trains", "00000")
NAMES = st.builds(
    lambda parts, separators, end: "".join(x for pair in zip(parts, [*separators, ""], strict=False) for x in pair) + end,
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=3),
    st.lists(st.sampled_from(["-", ".", "_", " ", "0", "x"]), min_size=3, max_size=3),
    st.sampled_from([".jsonl", ".txt"]),
)
FOLDERS = st.sampled_from(["", "", "", "data/", "train/", "val/", "test/", "en/train/", "my-test/", "valid_set/", "a/", "a/b/"])
PATHS = st.lists(st.builds(str.__add__, FOLDERS, NAMES), min_size=1, max_size=7, unique=True)


def by_patterns(files: list[str]) -> dict[str, set[str]]:
    """Split -> files, by the patterns of `datasets` 5.2: those of folders if any matches, else those of files, else one split of all."""
    for patterns in (FOLDER_PATTERNS, FILE_PATTERNS):
        found = {
            split: {name for keyword in keywords for pattern in patterns for name in matching(pattern.format(keyword), files)}
            for split, keywords in KEYWORDS.items()
        }
        if any(found.values()):
            return {split: names for split, names in found.items() if names}
    return {"train": set(files)}


def check_like(files: list[str], theirs: Mapping[str, set[str]]) -> None:
    """Compare the splits of files with those of `datasets`.

    They are equal wherever `datasets` has a training split and no file is of two. Without one, no file of its other splits trains. A refusal has a
    reason: a file of two splits, or as many files of no split as of all.
    """
    shared = {name for split, names in theirs.items() for other, more in theirs.items() if split != other for name in names & more}
    kept_apart = theirs.get("validation", set()) | theirs.get("test", set())
    try:
        ours = splits_of(Listing("--dataset-path", "d", tuple(files)), lambda name: True, lambda name: name.endswith(".jsonl"))
    except DataError:
        words = [frozenset(split for folder in name.split("/") for split in splits_in(folder)) for name in files]
        assert shared or any("train" in each and len(each) > 1 for each in words) or len(files) >= 2 * len(set().union(*theirs.values()))
        return
    if "train" not in theirs:
        assert not set(ours.train) & kept_apart
    elif ours.layout:
        assert set(ours.train) == theirs["train"]
        assert set(ours.test) | set(ours.validation) >= kept_apart - theirs["train"]
        assert set(ours.validation) == theirs.get("validation", set()) - theirs.get("test", set())
    else:
        assert not kept_apart  # a plain tree, in which a name has the word by chance
        assert set(ours.train) | set(ours.metadata) == set(files)
