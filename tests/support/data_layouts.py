"""Names of files in data directories, drawn at random from the words of splits and words like them."""

from __future__ import annotations

from hypothesis import strategies as st

WORDS = ("train", "training", "validation", "valid", "dev", "val", "test", "testing", "eval", "evaluation", "data", "notes", "en", "trains", "00000")
NAMES = st.builds(
    lambda parts, separators, end: "".join(x for pair in zip(parts, [*separators, ""], strict=False) for x in pair) + end,
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=3),
    st.lists(st.sampled_from(["-", ".", "_", " ", "0", "x"]), min_size=3, max_size=3),
    st.sampled_from([".jsonl", ".txt"]),
)
FOLDERS = st.sampled_from(["", "", "", "data/", "train/", "val/", "test/", "en/train/", "my-test/", "valid_set/", "a/", "a/b/"])
PATHS = st.lists(st.builds(str.__add__, FOLDERS, NAMES), min_size=1, max_size=7, unique=True)
