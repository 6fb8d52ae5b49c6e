"""Layouts of data directories: which files train, validate and test, from their names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.data_layouts import PATHS, by_patterns, check_like

from nntask.data.cards import matching
from nntask.data.layout import splits_of
from nntask.data.splits import Listing, Splits, splits_in
from nntask.errors import DataError

CARD = "---\nlicense: mit\nconfigs:\n{}---\n# Words\n"
ROW = (".jsonl", ".parquet", ".arrow")


def decided(files: Sequence[str], documents: Mapping[str, str] | None = None) -> Splits:
    """The splits of files in a directory d."""
    return splits_of(Listing("--dataset-path", "d", tuple(files), documents or {}), lambda name: True, lambda name: name.endswith(ROW))


@pytest.mark.parametrize(
    ("files", "train", "validation", "test"),
    [
        (["train.jsonl", "validation.jsonl", "test.jsonl"], ["train.jsonl"], ["validation.jsonl"], ["test.jsonl"]),
        (["README.md", "train_0.csv", "train_1.csv", "test_0.csv"], ["train_0.csv", "train_1.csv"], [], ["test_0.csv"]),
        (["data/train.csv", "data/dev.csv"], ["data/train.csv"], ["data/dev.csv"], []),
        (["train/a.txt", "train/b.txt", "val/a.txt", "eval/a.txt"], ["train/a.txt", "train/b.txt"], ["val/a.txt"], ["eval/a.txt"]),
        (["my-training-set/x", "valid_1/x"], ["my-training-set/x"], ["valid_1/x"], []),
        (["wiki.train.raw", "wiki.valid.raw", "wiki.test.raw"], ["wiki.train.raw"], ["wiki.valid.raw"], ["wiki.test.raw"]),
        (["TRAIN.jsonl", "Test.jsonl"], ["TRAIN.jsonl"], [], ["Test.jsonl"]),
        (["corpus.txt", "val.txt", "test.txt"], ["corpus.txt"], ["val.txt"], ["test.txt"]),
        (["src/main/A.java", "src/test/B.java"], ["src/main/A.java"], [], ["src/test/B.java"]),
        (["train.jsonl", "eval/x.jsonl"], ["train.jsonl"], [], ["eval/x.jsonl"]),
        (["train/a.txt", "train/test.txt", "validation/train.txt"], ["train/a.txt", "train/test.txt"], ["validation/train.txt"], []),
        (
            ["books/train to Busan.txt", *(f"books/{n}.txt" for n in "abcd")],
            ["books/train to Busan.txt", *(f"books/{n}.txt" for n in "abcd")],
            [],
            [],
        ),
        (["latest.txt", "trainer.py", "contest.md", "devices.md"], ["latest.txt", "trainer.py", "contest.md", "devices.md"], [], []),
        (
            ["README.md", "data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test-00000-of-00001.parquet"],
            ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"],
            [],
            ["data/test-00000-of-00001.parquet"],
        ),
        (
            ["data/train_sft-00000-of-00001.parquet", "data/test_sft-00000-of-00001.parquet"],
            ["data/train_sft-00000-of-00001.parquet"],
            [],
            ["data/test_sft-00000-of-00001.parquet"],
        ),
        (["data/corpus-00000-of-00001.parquet"], ["data/corpus-00000-of-00001.parquet"], [], []),
    ],
)
def test_splits_by_name(files: list[str], train: list[str], validation: list[str], test: list[str]) -> None:
    """Folders first, then files, with the keywords and delimiters of `datasets`; a chance word keeps nothing from a plain tree."""
    found = decided(files)
    assert (found.train, found.validation, found.test) == (tuple(train), tuple(validation), tuple(test))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["data/train_sft-00000-of-00001.parquet", "data/train_gen-00000-of-00001.parquet"], "may be for training; pass one, as in "
         "--dataset-path 'd/data/train_sft-00000-of-00001.parquet'"),
        (["data/a-00000-of-00002.parquet", "data/a-00001-of-00002.parquet", "data/b-00000-of-00001.parquet"], "--dataset-path 'd/data/a-*'"),
        (["train_test.jsonl", "x.jsonl"], "train_test.jsonl, whose name belongs to the splits test and train; pass what is to train"),
        (["a cat.txt", "a dog.txt", "a train.txt", "test tubes.txt"], "'d/**' to train on all"),
        (["train/a.py", "test/a.py", *(f"{n}.py" for n in "abcdef")], "6 files (a.py, b.py, c.py, ...) of no split; pass what is to train"),
        (["snapshots/1/a.txt", "snapshots/2/a.txt", "blobs/0"], "has 2 snapshots of a repository; name one, as in d/snapshots/1"),
    ],
)  # fmt: skip
def test_an_ambiguous_layout_is_refused(files: list[str], words: str) -> None:
    """One sentence, which names what to pass."""
    with pytest.raises(DataError) as error:
        decided(files)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@settings(deadline=None)
@given(PATHS)
@example(["train.jsonl", "test.jsonl", "eval/foo.jsonl"])
@example(["val/test.jsonl", "notes.txt"])
def test_every_file_has_one_use_and_nothing_of_a_test_split_trains(files: list[str]) -> None:
    """Files are divided, in their order; no file that a word marks as test or validation trains beside files that it does not mark."""
    try:
        found = decided(files)
    except DataError:
        return
    parts = (found.train, found.validation, found.test, found.others, found.metadata)
    assert sorted(name for part in parts for name in part) == sorted(files)
    for part in parts:
        assert list(part) == [name for name in files if name in part]
    for name in found.train:
        own = splits_in(PurePosixPath(name).name)
        of_folders = frozenset(split for folder in name.split("/")[:-1] for split in splits_in(folder))
        assert not (of_folders or own) or "train" in (of_folders or own)
    for name in found.validation:
        assert "test" not in (frozenset(split for folder in name.split("/")[:-1] for split in splits_in(folder)) or splits_in(name))
    assert found.layout or not (found.validation or found.test or found.others)


@settings(deadline=None)
@given(PATHS)
@example(["train.jsonl", "notes.txt"])
def test_splits_are_those_of_the_patterns_of_datasets(files: list[str]) -> None:
    """Equal wherever these have a training split and no file is of two."""
    check_like(files, by_patterns(files))


@settings(deadline=None)
@given(PATHS, st.sampled_from(["x", "corpus/y", "en"]))
def test_a_folder_around_a_layout_changes_nothing(files: list[str], folder: str) -> None:
    """The names are the same below it."""
    moved = [f"{folder}/{name}" for name in files]
    try:
        found = decided(files)
    except DataError:
        with pytest.raises(DataError):
            decided(moved)
        return
    if not found.metadata and found.layout != "shards of the Hub":
        assert decided(moved) == found.within(folder)


def saved(folder: str, *tables: str, **more: object) -> dict[str, str]:
    """The state.json of a saved dataset."""
    prefix = f"{folder}/" if folder else ""
    return {f"{prefix}state.json": json.dumps({"_data_files": [{"filename": name} for name in tables], **more})}


def test_save_to_disk() -> None:
    """The tables that state.json lists, by split; caches of maps beside them, and descriptions, are no data."""
    names = [
        f"{split}/{name}"
        for split in ("train", "validation", "test")
        for name in ("cache-0.arrow", "data-0.arrow", "dataset_info.json", "state.json")
    ]
    documents = {"dataset_dict.json": json.dumps({"splits": ["train", "validation", "test"]})}
    for split in ("train", "validation", "test"):
        documents |= saved(split, "data-0.arrow")
    found = decided(["dataset_dict.json", *names], documents)
    assert (found.train, found.validation, found.test) == (("train/data-0.arrow",), ("validation/data-0.arrow",), ("test/data-0.arrow",))
    assert len(found.metadata) == 10
    above = decided([f"my/{name}" for name in ["dataset_dict.json", *names]], {f"my/{name}": content for name, content in documents.items()})
    assert above.train == ("my/train/data-0.arrow",)
    del documents["dataset_dict.json"]  # each split saved alone
    assert decided(names, documents).train == ("train/data-0.arrow",)
    one = decided(["cache-1.arrow", "data-0.arrow", "data-1.arrow", "dataset_info.json", "state.json"], saved("", "data-0.arrow", "data-1.arrow"))
    assert one.train == ("data-0.arrow", "data-1.arrow")


@pytest.mark.parametrize(
    ("files", "documents", "words"),
    [
        (["a/x.arrow", "b/x.arrow"], {**saved("a", "x.arrow"), **saved("b", "x.arrow")}, "holds 2 datasets of save_to_disk: a, b; name one"),
        (["dataset_dict.json", "a/x.arrow", "b/x.arrow"],
         {"dataset_dict.json": '{"splits": ["a", "b"]}', **saved("a", "x.arrow"), **saved("b", "x.arrow")},
         "a and b may be for training; pass one, as in --dataset-path d/a"),
        (["x.arrow"], saved("", "x.arrow", "y.arrow"), "d/y.arrow is named in state.json and is not there"),
        (["x.arrow"], saved("", "x.arrow", _indices_data_files=[{"filename": "i"}]), "names a table of indices, which is not read"),
        (["dataset_dict.json"], {"dataset_dict.json": "{"}, "d/dataset_dict.json is not JSON"),
        (["dataset_dict.json"], {"dataset_dict.json": "[]"}, "d/dataset_dict.json must be an object"),
        (["dataset_dict.json"], {"dataset_dict.json": '{"splits": 3}'}, "must list its splits"),
        (["state.json", "dataset_info.json"], {"state.json": "no"}, "d/state.json is not JSON"),
    ],
)  # fmt: skip
def test_a_saved_dataset_that_is_not_whole_is_refused(files: list[str], documents: dict[str, str], words: str) -> None:
    """The file and the remedy are named."""
    with pytest.raises(DataError) as error:
        decided(files, documents)
    assert words in str(error.value)


def test_a_state_of_something_else_is_a_text() -> None:
    """Only a state.json that lists tables is that of a saved dataset."""
    for content in ("no JSON", "[1]", '{"step": 3}'):
        assert decided(["state.json", "a.txt"], {"state.json": content}).train == ("state.json", "a.txt")


@pytest.mark.parametrize(
    ("configs", "train", "test", "others"),
    [
        ('- config_name: default\n  data_files:\n  - split: train\n    path: data/tr-*\n  - split: test\n    path: ["x/*.jsonl"]\n',
         ["data/tr-0.jsonl"], ["x/y.jsonl"], ["en/a.jsonl"]),
        ("- config_name: all\n  data_files: '**/*.jsonl'\n", ["data/tr-0.jsonl", "en/a.jsonl", "x/y.jsonl"], [], []),
        ("- config_name: a\n  data_files: x/y.jsonl\n- config_name: b\n  default: true\n  data_dir: en\n",
         ["en/a.jsonl"], [], ["data/tr-0.jsonl", "x/y.jsonl"]),
        ("- config_name: a\n  data_files:\n  - split: everything\n    path: en/*\n", ["en/a.jsonl"], [], ["data/tr-0.jsonl", "x/y.jsonl"]),
        ("- config_name: a\n  sep: ','\n", ["data/tr-0.jsonl", "en/a.jsonl", "x/y.jsonl"], [], []),
    ],
)  # fmt: skip
def test_the_card_of_a_repository(configs: str, train: list[str], test: list[str], others: list[str]) -> None:
    """The files that the default config names for each split; the card itself is no text."""
    found = decided(["README.md", "data/tr-0.jsonl", "en/a.jsonl", "x/y.jsonl"], {"README.md": CARD.format(configs)})
    assert (found.train, found.test, found.others, found.metadata) == (tuple(train), tuple(test), tuple(others), ("README.md",))


@pytest.mark.parametrize(
    ("configs", "words"),
    [
        ("- config_name: en\n  data_files: en/*\n- config_name: fr\n  data_files: fr/*\n", "has 2 configs, en, fr, and no default; "
         "pass the files of one, as in --dataset-path 'd/en/*'"),
        ("- config_name: en\n  default: true\n  data_dir: en\n- config_name: default\n  data_dir: fr\n", "several defaults"),
        ("- config_name: en\n  data_files: nowhere/*\n", "names nowhere/*, and no such file with data is there"),
        ("- config_name: en\n  data_files: hf://datasets/a/b/c.parquet\n", "which is on another machine; fetch it"),
        ("- config_name: en\n  data_files: {a: b}\n", "must have a config_name, and data_files of paths"),
        ("- data_files: en/*\n", "must have a config_name"),
        ("- config_name: [\n", "does not begin with valid YAML"),
        ("  a: 3\n", "must be a list, got dict"),
        ("- config_name: en\n  data_files:\n  - split: train_a\n    path: en/*\n  - split: train_b\n    path: fr/*\n",
         "train_a and train_b may be for training"),
        ("- config_name: en\n  data_files:\n  - split: train\n    path: '*/*'\n  - split: test\n    path: fr/*\n",
         "has fr/a.jsonl in the splits train and test; pass the files that are to train"),
    ],
)  # fmt: skip
def test_a_card_that_leaves_it_open_is_refused(configs: str, words: str) -> None:
    """One sentence, which names what to pass or to mend."""
    with pytest.raises(DataError) as error:
        decided(["README.md", "en/a.jsonl", "fr/a.jsonl"], {"README.md": CARD.format(configs)})
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_several_configs_by_the_old_description() -> None:
    """Folders that dataset_infos.json calls configs are not mixed."""
    files = ["dataset_infos.json", "en/train-0.parquet", "fr/train-0.parquet"]
    with pytest.raises(DataError, match="has the configs en, fr; name one, as in --dataset-path d/en"):
        decided(files, {"dataset_infos.json": '{"en": {}, "fr": {}}'})
    assert decided(files, {"dataset_infos.json": '{"default": {}}'}).train == ("en/train-0.parquet", "fr/train-0.parquet")


def test_metadata_is_no_text() -> None:
    """Descriptions never are, a card and a license are none beside rows; in a tree of texts a README is one."""
    found = decided(
        ["LICENSE", "README.md", "a.parquet", "b.parquet", "c.parquet", "config.json", "dataset_infos.json"], {"dataset_infos.json": "{}"}
    )
    assert found.train == ("a.parquet", "b.parquet", "c.parquet")
    assert found.metadata == ("LICENSE", "README.md", "config.json", "dataset_infos.json")
    tree = ["LICENSE", "README.md", "a.txt", "config.json", "one.jsonl"]
    assert decided(tree, {"README.md": "# Notes\n"}).train == tuple(tree)
    assert decided(["README.md", "a.txt"], {"README.md": "---\ntask_categories:\n- text-generation\n---\n"}).train == ("a.txt",)


@pytest.mark.parametrize(
    ("name", "is_metadata"),
    [
        *((name, True) for name in ("README.md", "readme_zh.md", "LICENSE", "LICENSE-APACHE", "license.txt", "CITATION.cff", "requirements.txt")),
        *((name, False) for name in ("authors.jsonl", "citation.parquet", "notices.txt", "license_texts.jsonl", "readers.txt")),
    ],
)
def test_names_of_files_about_the_data(name: str, is_metadata: bool) -> None:
    """Beside rows; files of rows are data whatever they are called."""
    assert (decided(["a.jsonl", "b.jsonl", name]).metadata == (name,)) is is_metadata


def test_the_cache_of_the_hub() -> None:
    """One snapshot is read, not its blobs."""
    files = ["blobs/0", "refs/main", "snapshots/1/train.txt", "snapshots/2/train.txt", "snapshots/2/test.txt"]
    found = decided(files, {"refs/main": "2\n"})
    assert (found.train, found.test) == (("snapshots/2/train.txt",), ("snapshots/2/test.txt",))


@pytest.mark.parametrize(
    "pattern",
    ["*", "**", "**/*", "a/*", "a/**", "a/**/c*", "*.txt", "**/b.txt", "a/b?txt", "a/[!a]*", "[a-b]/*", "./c/c.txt", "a/b/**/c.txt", "**.txt"],
)
def test_patterns_of_a_card_match_as_paths_do(pattern: str, tmp_path: Path) -> None:
    """As `pathlib` matches them on a disk; a double star within a name is one star."""
    files = ["a/a.txt", "a/b.txt", "a/b/c.txt", "a/b/d/c.txt", "b.txt", "c/c.txt", "d"]
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    wanted = pattern.replace("**.txt", "*.txt").replace("a/**", "a/**/*") if pattern in ("**.txt", "a/**") else "**/*" if pattern == "**" else pattern
    assert sorted(matching(pattern, files)) == sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.glob(wanted) if path.is_file())


def test_a_missing_shard_is_told() -> None:
    """Shards say how many there are."""
    with pytest.raises(DataError, match=r"has 1 of the 3 shards of train; copy the missing ones, or pass .* 'd/data/train-\*'"):
        decided(["data/train-00001-of-00003.parquet", "data/test-00000-of-00001.parquet"])
