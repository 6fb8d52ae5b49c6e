"""Messages about data name what the user gave, by its flag and its split, and no file of the cache unless that file is damaged."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.objective_data import CHATML, Learner, lines_in, opened

from nntask.config.settings import DataSettings
from nntask.data import BatchStream, Dataset, DataSpec, open_dataset
from nntask.data.dataset import DATASETS, check_spec
from nntask.errors import DataError, UsageError

LONG = [{"text": "a text of some length " * 20}] * 3
TALK = {"messages": [{"role": "user", "content": "q" * 90}, {"role": "assistant", "content": "a"}]}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNTASK_CACHE", str(tmp_path / "the-cache"))
    monkeypatch.chdir(tmp_path)


def table(path: str, values: list[str | None], column: Any = None) -> str:
    """A table of texts."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"text": pa.array(values, column or pa.string()), "id": list(range(len(values)))}), path)
    return path


def stream(path: str, dataset: str = "jsonl", val_path: str = "", **more: Any) -> Callable[[], Dataset]:
    """Opens a stream of texts."""
    return lambda: open_dataset(DataSpec(dataset, path, val_path, tokenizer="bytes", vocab_size=300, **more))


@pytest.mark.parametrize("dataset", ["text", "jsonl"])
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([None, None], "holds no text: all of its 2 rows are empty; give rows with a text"),
        (["", None, ""], "holds no text: all of its 3 rows are empty; give rows with a text"),
        ([], None),
    ],
)
def test_tables_without_a_text_are_refused(dataset: str, values: list[str | None], words: str | None) -> None:
    """All rows null or empty, or no rows; for training and for validation."""
    table("x.parquet", values)
    lines_in(Path("good.jsonl"), LONG)
    none = "holds no text: its tables have no rows" if dataset == "text" else "has no line; give a file"
    for flag, opens in (("--dataset-path", stream("x.parquet", dataset)), ("--val-path", stream("good.jsonl", dataset, "x.parquet"))):
        with pytest.raises(DataError) as error:
            opens()
        assert str(error.value).startswith(f"{flag} x.parquet {words or none}")


def test_a_column_of_nothing_names_its_file() -> None:
    """A column that has the type of null."""
    pa = pytest.importorskip("pyarrow")
    table("x.parquet", [None, None], pa.null())
    with pytest.raises(DataError, match=r"the column text of x\.parquet holds null, and texts are needed"):
        stream("x.parquet", "text")()
    with pytest.raises(DataError, match=r"--dataset-path x\.parquet holds no text"):
        stream("x.parquet")()


def short_of(kind: str, rows: list[Any], **more: Any) -> Dataset:
    """A dataset of too few rows of a kind of learning."""
    lines_in(Path("x.jsonl"), rows)
    return opened(Learner(kind), DataSettings(dataset="jsonl", dataset_path="x.jsonl", val_path="x.jsonl", tokenizer="bytes", **more), 32)


def talks() -> Dataset:
    """Conversations without an answer within the length."""
    Path("t.jinja").write_text(CHATML)
    return short_of("causal", [TALK], chat_template="t.jinja")


@pytest.mark.parametrize(
    ("opens", "words"),
    [
        (lambda: short_of("causal", [{"text": "ab"}]), "the training split of --dataset-path x.jsonl is too short: 3 tokens give 0 sequences of 32"),
        (lambda: short_of("causal", [{"text": "ab"}], document_boundaries=True), "the training split of --dataset-path x.jsonl is too short"),
        (lambda: short_of("seq2seq", [{"text": "ab"}]), "the training split of --dataset-path x.jsonl is too short"),
        (lambda: short_of("seq2seq", [{"input": "a", "target": "b"}]), "the training split of --dataset-path x.jsonl has 1 row, and --batch is 2"),
        (lambda: short_of("classify", [{"text": "a", "label": 1}]), "the training split of --dataset-path x.jsonl has 1 row, and --batch is 2"),
        (talks, "the training split of --dataset-path x.jsonl has 0 rows, and --batch is 2; use conversations with an answer within --seq-len 32"),
    ],
    ids=["stream", "apart", "spans", "pairs", "labels", "chat"],
)
def test_too_little_data_is_named_as_the_user_named_it(opens: Callable[[], Dataset], words: str) -> None:
    """In every kind of sequence; the validation split by its flag."""
    dataset = opens()
    with pytest.raises(DataError) as error:
        BatchStream(dataset.examples(0), 2, seed=0)
    assert words in str(error.value)
    assert "the-cache" not in str(error.value)
    if dataset.validation is not None:
        assert dataset.scored_examples(0).name == "--val-path x.jsonl"


def test_other_datasets_have_names_too() -> None:
    """Those without a path by their own flag, token files of the user by their path."""
    assert DataSpec().name_of("validation") == "the validation split of --dataset stdlib"
    assert DataSpec("text", "d").name_of("training") == "the training split of --dataset-path d"
    assert DataSpec("text", "d", "v").name_of("validation") == "--val-path v"
    Path("train.bin").write_bytes(b"\1\0" * 9)
    assert open_dataset(DataSpec("train.bin", "train.bin", vocab_size=300)).train.name == "train.bin"


def test_what_is_said_before_the_work_names_the_data() -> None:
    """Not the file of the cache that it is written to."""
    lines_in(Path("x.jsonl"), LONG)
    lines_in(Path("y.jsonl"), [{"input": "a", "target": "b"}])
    said: list[str] = []
    open_dataset(DataSpec("jsonl", "x.jsonl", "x.jsonl", tokenizer="bytes", vocab_size=300), said.append)
    data = DataSettings(dataset="jsonl", dataset_path="y.jsonl", tokenizer="bytes")
    open_dataset(replace(opened(Learner("seq2seq"), data).spec, val_path="y.jsonl"), said.append)
    assert said == [
        "tokenising 3 texts of the training split of --dataset-path x.jsonl",
        "tokenising 3 texts of --val-path x.jsonl",
        "tokenising 1 row of the training split of --dataset-path y.jsonl",
        "tokenising 1 row of --val-path y.jsonl",
    ]


def test_a_damaged_file_of_the_cache_is_named_with_its_data() -> None:
    """Cut short while it is open, or before it is opened, when it is rebuilt."""
    lines_in(Path("x.jsonl"), LONG)
    dataset = stream("x.jsonl")()
    size = dataset.train.path.stat().st_size
    with dataset.train.path.open("r+b") as file:
        file.truncate(size - 1)
    whole = r"train\.bin \(cached tokens of the training split of --dataset-path x\.jsonl\)"
    with pytest.raises(
        DataError, match=rf"{whole} (became shorter|changed since it was written).*it is nntask's own cache, which the next run rebuilds"
    ):
        dataset.train.window(0, dataset.train.num_tokens)
    said: list[str] = []
    assert open_dataset(dataset.spec, said.append).train.num_tokens == size // 2
    assert re.search(rf"the-cache.*{whole} has {size - 1} bytes.*it is nntask's own cache and is rebuilt", said[0])


def test_an_empty_split_of_a_dataset_is_none() -> None:
    """A repository may have a validation split without rows; the training goes on, and the header says so."""
    Path("d").mkdir()
    Path("d/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in LONG))
    Path("d/validation.jsonl").write_text('{"text": ""}\n')
    dataset = stream("d")()
    assert dataset.validation is None
    assert [each.key for each in dataset.findings] == ["validation_rows_empty", "validation_missing"]


@pytest.mark.parametrize("name", DATASETS)
def test_a_slip_in_the_name_of_a_dataset_is_recognised(name: str) -> None:
    """Two letters swapped, one missing, or another case; a name that resembles none is answered with the way for any texts."""
    for slip in {f"{name[:-2]}{name[-1]}{name[-2]}", name[:-1], name.upper(), f"{name}s"} - {name}:
        with pytest.raises(
            UsageError, match=rf"^--dataset {re.escape(slip)} is not available: this version reads .*; did you mean {re.escape(name)}\?$"
        ):
            check_spec(DataSpec(slip))
    with pytest.raises(UsageError, match=r"; save the texts as files and use --dataset text --dataset-path DIR$"):
        check_spec(DataSpec("the pile"))
