"""Directories of data as users have them: the training split trains, the validation split validates, a test split and metadata are never text."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nntask.data import Dataset, DataSpec, open_dataset
from nntask.data.images import open_images
from nntask.data.objectives import ImageShape, Objective
from nntask.data.prepare import tokenize_dataset
from nntask.errors import DataError

SPLITS = ("train", "validation", "test")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNTASK_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def rows(split: str) -> list[str]:
    """Texts that name their split."""
    return [f"{split} row {number}" for number in range(40)]


def texts(dataset: Dataset, part: str = "train") -> list[str]:
    """The texts of a part of a dataset of bytes."""
    tokens = getattr(dataset, part)
    if tokens is None:
        return []
    ids = tokens.window(0, tokens.num_tokens)
    assert ids[-1] == 256
    return [bytes(text.tolist()[:-1]).decode() for text in np.split(ids, np.flatnonzero(ids == 256) + 1)[:-1]]


def opened(path: str, dataset: str = "text", said: list[str] | None = None, **more: Any) -> Dataset:
    """The dataset of a path, as bytes."""
    return open_dataset(DataSpec(dataset, path, tokenizer="bytes", vocab_size=300, **more), (lambda sentence: None) if said is None else said.append)


def table(path: Path, values: Sequence[Any], kind: str = "parquet", column: str = "text") -> None:
    """A table of one column as a file."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    content = pa.table({column: values})
    if kind == "parquet":
        pq.write_table(content, path, row_group_size=7)
        return
    write = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as sink, write(sink, content.schema) as writer:
        writer.write_table(content, 7)


def saved(root: Path) -> None:
    """A DatasetDict as `save_to_disk` of `datasets` writes it, with a file of a map beside the data."""
    for split in SPLITS:
        table(root / split / "data-00000-of-00001.arrow", rows(split), "stream")
        table(root / split / "cache-1f.arrow", ["of a map"], "stream")
        (root / split / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": split}, indent=2))
        (root / split / "dataset_info.json").write_text("{}")
    (root / "dataset_dict.json").write_text(json.dumps({"splits": SPLITS}))


def hub(root: Path) -> None:
    """A repository of the Hub."""
    for split in SPLITS:
        table(root / "data" / f"{split}-00000-of-00001.parquet", rows(split))
    (root / "README.md").write_text("---\nlicense: mit\n---\n# A card\n")
    (root / "dataset_infos.json").write_text('{"default": {}}')
    (root / ".gitattributes").write_text("*.parquet filter=lfs\n")


def shards_with_a_card(root: Path) -> None:
    """A repository whose card names the files, which have other names."""
    for split in SPLITS:
        table(root / "parts" / f"{split[:2]}.parquet", rows(split))
    entries = "".join(f"  - split: {split}\n    path: parts/{split[:2]}*\n" for split in SPLITS)
    (root / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files:\n{entries}---\n")


def line_files(root: Path) -> None:
    """A file of JSON lines for each split."""
    root.mkdir()
    for split in SPLITS:
        (root / f"{split}.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows(split)))


@pytest.mark.parametrize(
    ("lay", "kind"),
    [(saved, "text"), (hub, "text"), (shards_with_a_card, "text"), (line_files, "jsonl"), (saved, "jsonl"), (hub, "jsonl")],
)
def test_the_parts_of_a_dataset_are_kept_apart(tmp_path: Path, lay: Callable[[Path], None], kind: str) -> None:
    """Each row is a text; what was taken is said, by a run and by `data prepare`; --val-path replaces the validation split."""
    lay(tmp_path / "d")
    said: list[str] = []
    dataset = opened("d", kind, said)
    assert (texts(dataset), texts(dataset, "validation")) == (rows("train"), rows("validation"))
    assert said[0].startswith("--dataset-path d (")
    assert ": training 1 file (" in said[0]
    assert "; validation 1 file (" in said[0]
    assert "; test 1 file (" in said[0]
    assert ", not read" in said[0]
    told: list[str] = []
    done = tokenize_dataset(DataSpec(kind, "d", tokenizer="bytes", vocab_size=300), tmp_path / "out", told.append)
    assert (told[0], done.num_train) == (said[0], dataset.train.num_tokens)
    (tmp_path / "mine.jsonl").write_text('{"text": "mine"}\n')
    other = opened("d", kind, val_path="mine.jsonl")
    assert texts(other) == rows("train")
    assert texts(other, "validation") == (["mine"] if kind == "jsonl" else ['{"text": "mine"}\n'])
    again = opened("d", kind, val_path="d")
    assert texts(again, "validation") == rows("validation")


def test_a_table_without_a_validation_split_holds_rows_out(tmp_path: Path) -> None:
    """About one in twenty by a hash of the row, whatever its place; empty rows are left out and counted."""
    table(tmp_path / "d" / "a.parquet", [*rows("x"), "", None])
    table(tmp_path / "e" / "b.feather", rows("x")[::-1], "file")
    first, second = opened("d"), opened("e")
    assert sorted(texts(first) + texts(first, "validation")) == sorted(rows("x"))
    assert 0 < len(texts(first, "validation")) < 6
    assert sorted(texts(second, "validation")) == sorted(texts(first, "validation"))
    (finding,) = first.findings
    assert (finding.key, finding.number, finding.total) == ("rows_empty", 2, 42)
    assert second.findings == ()
    assert texts(opened("d", select=3)) == texts(first)[:3]


def test_a_plain_tree_is_as_it_was(tmp_path: Path) -> None:
    """Every file is a text in the order of its path, about one in twenty held out by its name; empty and stray files are counted."""
    for number in range(30):
        (tmp_path / "d" / f"{number % 3}").mkdir(parents=True, exist_ok=True)
        (tmp_path / "d" / f"{number % 3}" / f"{number}.txt").write_text(f"text {number}\n")
    (tmp_path / "d" / "README.md").write_text("# not a card\n")
    (tmp_path / "d" / "empty.txt").touch()
    dataset = opened("d")
    order = sorted((str(number % 3), f"{number}.txt", number) for number in range(30))
    wanted = ["# not a card\n", *(f"text {number}\n" for _, _, number in order)]
    assert [text for text in wanted if text in texts(dataset)] == texts(dataset)
    assert sorted(texts(dataset) + texts(dataset, "validation")) == sorted(wanted)
    assert [(each.key, each.number, each.total) for each in dataset.findings] == [("files_empty", 1, 32)]
    assert texts(opened("d/0/0.txt")) == ["text 0\n"]


def test_files_of_no_split_are_left_out_and_counted(tmp_path: Path) -> None:
    """The run says which; they are in the findings that summary.json keeps."""
    line_files(tmp_path / "d")
    (tmp_path / "d" / "more.jsonl").write_text('{"text": "of no split"}\n')
    said: list[str] = []
    dataset = opened("d", "jsonl", said)
    assert "of no split and left out 1 file (more.jsonl)" in said[0]
    assert [(each.key, each.number, each.total) for each in dataset.findings] == [("files_left_out", 1, 4)]
    assert texts(opened("d/[mt]*e.jsonl", "jsonl")) == ["of no split"]
    assert len(texts(opened("d/**", "jsonl")) + texts(opened("d/**", "jsonl"), "validation")) == 121


@pytest.mark.parametrize(
    ("names", "flag", "words"),
    [
        (["val/a.txt", "test/b.txt"], "path", "d has only files for validation or test, 2 files (val/a.txt, test/b.txt)"),
        (
            ["train.txt", "test.txt"],
            "val_path",
            "d has 1 file (train.txt) for training, 1 file (test.txt) for test and none for validation",
        ),
        ([], "path", "--dataset-path d holds no text"),
    ],
)
def test_a_directory_without_the_wanted_part_is_refused(tmp_path: Path, names: list[str], flag: str, words: str) -> None:
    """One sentence."""
    (tmp_path / "d").mkdir()
    for name in names:
        (tmp_path / "d" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "d" / name).write_text("a text\n")
    (tmp_path / "other.txt").write_text("another\n")
    with pytest.raises(DataError) as error:
        opened("d" if flag == "path" else "other.txt", **({"val_path": "d"} if flag == "val_path" else {}))
    assert words in str(error.value)


def test_validation_files_of_a_directory_of_their_own(tmp_path: Path) -> None:
    """Without splits all files of --val-path; with a test split alone that, since it is named."""
    (tmp_path / "t.txt").write_text("train\n")
    for name in ("plain/a.txt", "plain/b.txt", "only/test.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{name}\n")
    assert texts(opened("t.txt", val_path="plain"), "validation") == ["plain/a.txt\n", "plain/b.txt\n"]
    assert texts(opened("t.txt", val_path="only"), "validation") == ["only/test.txt\n"]


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress), ("", gzip.compress)])
def test_compressed_files_are_read(tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes]) -> None:
    """By their first bytes, whatever they are called: texts and JSON lines, the same as unpacked; a damaged one is named."""
    (tmp_path / "d").mkdir()
    content = "".join(json.dumps({"text": f"{row} é"}) + "\n" for row in rows("x")).encode()
    (tmp_path / "d" / f"train.jsonl{suffix}").write_bytes(pack(content))
    (tmp_path / "d" / f"test.jsonl{suffix}").write_bytes(pack(content))
    dataset = opened("d", "jsonl")
    assert sorted(texts(dataset) + texts(dataset, "validation")) == sorted(f"{row} é" for row in rows("x"))
    (tmp_path / f"t.txt{suffix}").write_bytes(pack(b"a text\n" * 500_000))
    assert texts(opened(f"t.txt{suffix}")) == ["a text\n" * 500_000]
    (tmp_path / f"cut.jsonl{suffix}").write_bytes(pack(os.urandom(4000).hex().encode())[:-300])
    with pytest.raises(DataError, match=r"cut\.jsonl.* is not a whole (gzip|bzip2|xz) file: .*; copy it again"):
        opened(f"cut.jsonl{suffix}", "jsonl")


def test_a_text_that_begins_like_a_compressed_file_is_a_text(tmp_path: Path) -> None:
    """The letters of bzip2 alone say nothing."""
    (tmp_path / "t.txt").write_text("BZh91 is the name of a road\n")
    assert texts(opened("t.txt")) == ["BZh91 is the name of a road\n"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x28\xb5\x2f\xfd rest", "is compressed by Zstandard, which is not read; unpack it with zstd -d"),
        (b"PK\x03\x04 rest", "is a zip archive, which is not read; unpack it with unzip"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n", "is a pointer of Git LFS, not the file itself; fetch it"),
        (b"\0" * 257 + b"ustar\0" + b"\0" * 300, "is a tar archive, which is not read; unpack it with tar -xf"),
        (gzip.compress(b"\0" * 257 + b"ustar\0" + b"\0" * 300), "is a tar archive"),
        (b"FEA1 rest", "is a file of Feather 1, which is not read; write it again"),
        (b"ARROW1\0\0 and no more", "is not a whole"),
    ],
    ids=["zst", "zip", "lfs", "tar", "tar.gz", "feather 1", "cut ipc"],
)  # fmt: skip
@pytest.mark.parametrize(("name", "kind"), [("x.txt", "text"), ("x.jsonl", "jsonl"), ("x.arrow", "text"), ("x.parquet", "jsonl")])
def test_a_format_that_is_not_read_is_named(tmp_path: Path, content: bytes, words: str, name: str, kind: str) -> None:
    """With what unpacks or fetches it, whatever the dataset."""
    is_table = name.endswith((".arrow", ".parquet"))
    if is_table and (content.startswith(b"\x1f") or (b"ARROW1" in content and name.endswith("parquet"))):
        words = "is not a whole"
    elif not is_table and content.startswith((b"FEA1", b"ARROW1")):
        return  # a text of these letters
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as error:
        opened(name, kind)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('[{"text": "a"}, {"text": "b"}]', "x.json holds one array instead of an object per line; convert it, for example with jq -c '.[]' x.json"),
        ('[\n  {"text": "a"}\n]\n', "x.json holds one array"),
        ('{\n  "text": "a"\n}\n', "x.json holds objects over several lines"),
    ],
)
def test_json_of_another_shape_is_named(tmp_path: Path, content: str, words: str) -> None:
    """An array, or an object over several lines, with the command that converts it."""
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(DataError) as error:
        opened("x.json", "jsonl")
    assert words in str(error.value)


def test_rows_of_tables_have_the_keys_of_their_lines(tmp_path: Path) -> None:
    """A table gives every row the keys of all; those without a value are none, so a conversation is as its JSON line says it."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    from nntask.data.json_lines import JsonLines

    lines = [{"text": "a", "more": {"x": 1}}, {"text": "b", "tools": [{"name": "f"}, {"name": "g", "type": "t"}]}]
    pq.write_table(pa.Table.from_pylist([{"text": None, "more": None, "tools": None} | line for line in lines]), tmp_path / "x.parquet")
    assert [record.values for record in JsonLines((tmp_path / "x.parquet",))] == lines
    assert [record.where for record in JsonLines((tmp_path / "x.parquet",))] == [f"{tmp_path}/x.parquet row {number}" for number in (1, 2)]


def test_links_to_folders_are_followed_once(tmp_path: Path) -> None:
    """A link that leads outside is read, one that leads back is not; a link to nothing is named only if it would be read."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.txt").write_text("far\n")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "d")
    (tmp_path / "d" / "test").mkdir(parents=True)
    (tmp_path / "d" / "train").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "d" / "same").symlink_to(tmp_path / "d" / "train")
    (tmp_path / "d" / "test" / "lost.txt").symlink_to(tmp_path / "nowhere")
    assert texts(opened("d")) == ["far\n"]


def test_names_are_shown_as_a_terminal_may_see_them(tmp_path: Path) -> None:
    """Control characters and bytes that are no text are escaped; a pipe among the files is no text."""
    (tmp_path / "d").mkdir()
    for name in (b"a\x1b[31m.txt", b"b\xff.txt"):
        Path(os.fsdecode(os.fsencode(tmp_path / "d") + b"/" + name)).write_text("text\n")
    os.mkfifo(tmp_path / "d" / "pipe")
    os.mkfifo(tmp_path / "x.jsonl")
    said: list[str] = []
    assert len(texts(opened("d", said=said))) == 2
    assert "training 3 files (a\\x1b[31m.txt, b\\udcff.txt, pipe)" in said[0]
    with pytest.raises(DataError, match=r"cannot read x\.jsonl: it is a pipe"):
        opened("x.jsonl", "jsonl")


def test_the_cache_of_the_hub_is_read_by_its_snapshot(tmp_path: Path) -> None:
    """Not by its blobs, which are the same files by other names."""
    (tmp_path / "d" / "blobs").mkdir(parents=True)
    (tmp_path / "d" / "snapshots" / "abc" / "data").mkdir(parents=True)
    (tmp_path / "d" / "refs").mkdir()
    (tmp_path / "d" / "refs" / "main").write_text("abc")
    for split in SPLITS:
        table(tmp_path / "d" / "blobs" / split, rows(split))
        (tmp_path / "d" / "snapshots" / "abc" / "data" / f"{split}-00000-of-00001.parquet").symlink_to(tmp_path / "d" / "blobs" / split)
    dataset = opened("d")
    assert (texts(dataset), texts(dataset, "validation")) == (rows("train"), rows("validation"))


def images(root: Path, names: Sequence[str]) -> None:
    """Small images in folders."""
    image = pytest.importorskip("PIL.Image")
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        image.fromarray(np.full((4, 4), 7, np.uint8)).save(root / name)


def test_folders_of_images_may_be_splits(tmp_path: Path) -> None:
    """Each with the classes; a class that is called after a split is a class, and folders that are neither are refused."""
    objective = Objective(kind="classify", form="images", image=ImageShape(4, 2, 1), num_labels=2)
    images(tmp_path / "d", [f"{split}/{label}/{number}.png" for split in ("train", "val", "test") for label in "ab" for number in range(3)])
    train, validation = open_images("d", "", objective)
    assert (len(train.labels), None if validation is None else len(validation.labels)) == (6, 6)
    assert open_images("d/train", "d", objective)[1].labels.tolist() == [0, 0, 0, 1, 1, 1]
    images(tmp_path / "e", ["train/0.png", "bus/0.png"])
    assert open_images("e", "", objective)[0].labels.tolist() == [0, 1]
    images(tmp_path / "d", ["extra/a/0.png"])
    with pytest.raises(DataError, match=r"must have a folder for each split or for each class, got extra, .*; name the folder of the classes, as in"):
        open_images("d", "", objective)


def written(root: Path, names: Sequence[str]) -> None:
    """Files whose text is their name, as JSON lines if they are called so."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(json.dumps({"text": name}) + "\n" if name.endswith(".jsonl") else name)


@pytest.mark.parametrize(
    ("names", "train", "validation"),
    [
        (["articles/train.txt", *(f"articles/{number}.txt" for number in range(4))], None, []),  # one of many is called after a split
        (["train/val_234.txt", "train/a.txt", "valid/train_1.txt"], ["train/a.txt", "train/val_234.txt"], ["valid/train_1.txt"]),  # folders decide
        (["to-train.txt", "to-test.txt"], ["to-train.txt"], []),
        (["local_dataset/train.txt", "local_dataset/test.txt"], ["local_dataset/train.txt"], []),
        (["train.txt", "valid.txt", "README.md", "LICENSE", "requirements.txt"], ["train.txt"], ["valid.txt"]),
    ],
)
def test_directories_of_public_reports(tmp_path: Path, names: list[str], train: list[str] | None, validation: list[str]) -> None:
    """Directories that other programs read otherwise than their users meant."""
    written(tmp_path / "d", names)
    dataset = opened("d")
    if train is None:
        assert sorted(texts(dataset) + texts(dataset, "validation")) == sorted(names)
    else:
        assert (texts(dataset), texts(dataset, "validation")) == (train, validation)


def test_most_articles_are_not_dropped_for_words_in_their_names(tmp_path: Path) -> None:
    """Of a folder of articles few have the word of a split: it is refused, and the pattern that the message names takes all."""
    written(tmp_path / "d", [*(f"{n}.txt" for n in range(60)), "a train.txt", "a test.txt", "test match 2.txt", "valid points.txt"])
    with pytest.raises(DataError) as error:
        opened("d")
    assert (
        "60 files (0.txt, 1.txt, 10.txt, ...) of no split; pass what is to train, as in --dataset-path 'd/a train.txt', or --dataset-path 'd/**'"
        in str(error.value)
    )
    dataset = opened("d/**")
    assert len(texts(dataset) + texts(dataset, "validation")) == 64


def test_a_validation_folder_that_experiments_share_by_a_link(tmp_path: Path) -> None:
    """The linked folder validates."""
    written(tmp_path, ["valid/v.jsonl", "one/train/t.jsonl"])
    (tmp_path / "one" / "valid").symlink_to("../valid")
    dataset = opened("one", "jsonl")
    assert (texts(dataset), texts(dataset, "validation")) == (["one/train/t.jsonl"], ["valid/v.jsonl"])
