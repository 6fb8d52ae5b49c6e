"""Rows of plain texts, in JSON lines and in tables: every key is used, ignored or refused, and empty rows are left out and counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nntask.data import Dataset, DataSpec, open_dataset
from nntask.data.findings import counts
from nntask.data.objectives import Objective
from nntask.data.prepare import tokenize_dataset
from nntask.data.row_keys import ROW_KEYS
from nntask.errors import DataError

RULES = ROW_KEYS["text"]
CORPORA: dict[str, dict[str, Any]] = {
    "C4": {"timestamp": "2019-04-25T12:57:54Z", "url": "http://a"},
    "the Pile": {"meta": {"pile_set_name": "Github"}},
    "FineWeb": {"id": "<urn>", "dump": "CC", "url": "u", "date": "d", "file_path": "s3", "language": "en", "language_score": 0.9, "token_count": 3},
    "FineWeb-Edu": {"id": "<urn>", "dump": "CC", "score": 3.1, "int_score": 3, "embedding": [0.5], "count": 2},
    "Dolma": {"id": "1", "added": "2024", "created": "2023", "source": "wiki", "metadata": {"a": 1}, "version": "v0", "attributes": {"a": 1}},
    "RedPajama": {"meta": "{}", "red_pajama_subset": "c4"},
    "SlimPajama": {"meta": {"redpajama_set_name": "C4"}},
    "Wikipedia": {"id": "12", "url": "u", "title": "Cats"},
    "Cosmopedia": {"text_token_length": 7, "seed_data": "web", "format": "story", "audience": "young"},
    "a frame of pandas": {"__index_level_0__": 3},
}
LAYOUTS = ("lines", "table as lines", "table", "saved")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNTASK_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def write(layout: str, name: str, rows: list[dict[str, Any]]) -> str:
    """Rows in a layout; returns the path."""
    if layout == "lines":
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return f"{name}.jsonl"
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    content = pa.Table.from_pylist([{key: None for each in rows for key in each} | row for row in rows])
    if layout != "saved":
        pq.write_table(content, f"{name}.parquet")
        return f"{name}.parquet"
    Path(name).mkdir()
    with pa.OSFile(f"{name}/data-00000-of-00001.arrow", "wb") as sink, pa.ipc.new_stream(sink, content.schema) as writer:
        writer.write_table(content)
    Path(name, "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    return name


def opened(layout: str, rows: list[dict[str, Any]], scored: list[dict[str, Any]], said: Callable[[str], None] = lambda sentence: None) -> Dataset:
    """The dataset of rows that train and rows that validate, as bytes."""
    spec = spec_of(layout, write(layout, "t", rows), write(layout, "v", scored))
    return open_dataset(spec, said)


def spec_of(layout: str, path: str, val_path: str = "") -> DataSpec:
    """What a user says about rows in a layout."""
    return DataSpec("jsonl" if "lines" in layout else "text", path, val_path, tokenizer="bytes", vocab_size=300)


def texts(tokens: Any) -> list[str]:
    """The texts of a file of bytes."""
    ids = tokens.window(0, tokens.num_tokens)
    return [bytes(text.tolist()[:-1]).decode() for text in np.split(ids, np.flatnonzero(ids == 256) + 1)[:-1]]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("corpus", CORPORA)
def test_rows_of_public_corpora_are_read_without_a_word(layout: str, corpus: str) -> None:
    """Their keys are ignored for a reason, or are the text."""
    rows = [{"text": f"text {number}", **CORPORA[corpus]} for number in range(3)]
    dataset = opened(layout, rows, rows[:1])
    assert (dataset.findings, texts(dataset.train)) == ((), ["text 0", "text 1", "text 2"])
    assert all(RULES[key].reason for key in CORPORA[corpus])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_unknown_keys_are_named_once_for_each_split(layout: str) -> None:
    """With the number of rows, from the cache too; the texts are the same without them."""
    rows = [{"text": "a", "colour": "red", "mood": 1}, {"text": "b", "colour": "blue", "mood": 2}]
    said: list[str] = []
    dataset = opened(layout, rows, [{"text": "c", "mood": 1}], said.append)
    assert [each.key for each in dataset.findings] == ["unknown_keys", "validation_unknown_keys"]
    assert dataset.findings[0].sentence == 'unknown keys of 2 training rows are ignored: "colour" in 2, "mood" in 2'
    assert dataset.findings[1].sentence == 'unknown keys of 1 validation rows are ignored: "mood" in 1'
    assert (texts(dataset.train), texts(dataset.validation)) == (["a", "b"], ["c"])
    assert open_dataset(dataset.spec).findings == dataset.findings
    assert not any("mood" in sentence for sentence in said)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_that_would_change_what_is_learnt_are_refused(layout: str) -> None:
    """With the row and the reason; a key with nothing in it is ignored."""
    refused = [key for key, rule in RULES.items() if rule.use == "refused"]
    for number, key in enumerate(refused):
        rows: list[dict[str, Any]] = [{"text": "a"}, {"text": "b", key: [1, 2]}]
        name = f"t{number}"
        with pytest.raises(DataError) as error:
            open_dataset(spec_of(layout, write(layout, name, rows)))
        place = f"{name}{'.jsonl line' if layout == 'lines' else '/data-00000-of-00001.arrow row' if layout == 'saved' else '.parquet row'} 2"
        assert f'{place} has "{key}", which is not read: {RULES[key].reason}, or remove the key' in str(error.value)
    nothing = [{"text": "a", **{key: [] for key in refused}}, {"text": "b", **dict.fromkeys(refused)}]
    assert texts(opened(layout, nothing, [{"text": "c"}]).train) == ["a", "b"]


@pytest.mark.parametrize("kind", ["text", "pairs", "labels", "chat"])
def test_what_is_refused_in_one_kind_of_row_is_refused_in_all(kind: str) -> None:
    """Weights, ids and masks of other programs, targets, media."""
    keys = ("weight", "sample_weight", "input_ids", "loss_mask", "completion_mask", "labels", "images", "audio")
    assert [ROW_KEYS[kind][key].use for key in keys] == ["refused"] * len(keys)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_empty_rows_are_left_out_and_counted_in_each_split(layout: str, tmp_path: Path) -> None:
    """Empty strings and null; a text of blanks is a text. `data prepare` says the same."""
    rows = [{"text": "a"}, {"text": ""}, {"text": None}, {"text": " "}]
    dataset = opened(layout, rows, [{"text": ""}, {"text": "c"}])
    assert (texts(dataset.train), texts(dataset.validation)) == (["a", " "], ["c"])
    assert counts(dataset.findings) == {"rows_empty": {"number": 2, "total": 4}, "validation_rows_empty": {"number": 1, "total": 2}}
    sentences = [each.sentence for each in dataset.findings]
    assert sentences == [
        "2 of 4 training rows have an empty text and are left out",
        "1 of 2 validation rows have an empty text and are left out",
    ]
    assert open_dataset(dataset.spec).findings == dataset.findings
    said: list[str] = []
    done = tokenize_dataset(dataset.spec, tmp_path / "out", said.append)
    assert (done.num_train, [sentence for sentence in said if "an empty text" in sentence]) == (dataset.train.num_tokens, sentences)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_held_out_rows_are_counted(layout: str) -> None:
    """Without a validation split all rows are counted, in one split or in both."""
    rows = [{"text": f"text {number}"} for number in range(80)] + [{"text": "", "number": number} for number in range(40)]
    dataset = open_dataset(spec_of(layout, write(layout, "t", rows)))
    assert sorted(texts(dataset.train) + texts(dataset.validation)) == sorted(f"text {number}" for number in range(80))
    found = counts(dataset.findings)
    assert sum(found.get(key, {"number": 0})["number"] for key in ("rows_empty", "validation_rows_empty")) == 40


def test_rows_that_hold_out_all_texts_train_on_them() -> None:
    """A split by hashes leaves no split without a text."""
    (row,) = [row for row in ({"text": f"text {number}"} for number in range(40)) if held_out(row)][:1]
    dataset = open_dataset(spec_of("lines", write("lines", "t", [row, *({"text": "", "id": number} for number in range(9))])))
    assert (texts(dataset.train), dataset.validation) == ([row["text"]], None)


def held_out(row: dict[str, Any]) -> bool:
    """Whether a line is held out for validation."""
    from nntask.data.texts import is_held_out

    return is_held_out(json.dumps(row))


@pytest.mark.parametrize("kind", ["tables", "lines", "pairs"])
def test_a_validation_split_without_rows_is_named(kind: str) -> None:
    """The layout says that it validates, and no loss would say that it does not."""
    Path("d").mkdir()
    layout = "table" if kind == "tables" else "lines"
    write(layout, "d/train", [{"input": "a", "target": "b"}] if kind == "pairs" else [{"text": "a"}])
    if kind == "tables":
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.table({"text": pa.array([], pa.string())}), "d/validation.parquet")
    else:
        Path("d/validation.jsonl").write_text("\n")
    objective = Objective(kind="seq2seq", form="pairs", length=8, target_length=8) if kind == "pairs" else Objective()
    dataset = open_dataset(replace(spec_of(layout, "d"), objective=objective))
    assert dataset.validation is None
    assert counts(dataset.findings) == {"validation_missing": {"number": 1, "total": 1}}
    assert dataset.findings[0].sentence.startswith("the validation split of --dataset-path d has no row to validate on")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_that_are_all_one_are_read(layout: str) -> None:
    """They ask for what is done anyway; true and 0 do not."""
    rows: list[dict[str, Any]] = [{"text": "a", "weight": 1, "loss_weight": 1.0}]
    assert texts(opened(layout, rows, rows).train) == ["a"]
    for number, weight in enumerate((True, 0, 0.5)):
        with pytest.raises(DataError, match='has "weight", which is not read: all rows count alike'):
            open_dataset(spec_of(layout, write(layout, f"w{number}", [{"text": "a", "weight": weight}])))
