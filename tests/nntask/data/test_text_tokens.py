"""Texts as tokens: the ids of the whole text, bytes that are replaced are counted, tokens without a row are named with their place."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.splitters import drawn_text, trained
from tokenizers import AddedToken, Tokenizer

from nntask.data import Dataset, DataSpec, TokenFile, load_tokenizer, open_dataset
from nntask.data import texts as text_module
from nntask.data.json_lines import JsonLines
from nntask.data.masking import masking_of
from nntask.data.objectives import Objective
from nntask.data.prepare import tokenize_dataset
from nntask.data.row_counts import RowCounts
from nntask.data.rows import encoded_rows
from nntask.data.texts import Replaced, Text, decoded
from nntask.errors import DataError


def tokenizer_at(directory: Path, name: str = "gpt2", **words: str) -> Path:
    """A directory with a tokenizer.json that begins and ends texts with </s>, and further added tokens behind its last id."""
    directory.mkdir()
    inner = trained(name)
    inner.add_tokens([AddedToken(word, special=True) for word in words.values()])
    inner.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return directory


def opened(text: Path, tokenizer: Path, vocab_size: int = 2000) -> Dataset:
    """The dataset of a text file."""
    return open_dataset(DataSpec("text", str(text), tokenizer_path=str(tokenizer), vocab_size=vocab_size))


def ids_of(dataset: Dataset) -> list[int]:
    """All training ids."""
    assert isinstance(dataset.train, TokenFile)
    found: list[int] = dataset.train.window(0, dataset.train.num_tokens).tolist()
    return found


@pytest.mark.parametrize("name", ["gpt2", "gpt2 prefix", "llama2", "mistral", "gemma", "qwen2 nfc", "bert", "t5"])
def test_a_long_text_has_the_ids_of_the_whole(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in pieces of 3 KiB: no space is put before a piece, no merge and no run of white space is cut, whatever lines there are."""
    monkeypatch.setattr(text_module, "PIECE_NBYTES", 3000)
    text = drawn_text(7, 6000).replace("\r", "")
    (tmp_path / "t.txt").write_text(text, encoding="utf-8", newline="")
    where = tokenizer_at(tmp_path / "m", name)
    inner = Tokenizer.from_file(str(where / "tokenizer.json"))
    assert ids_of(opened(tmp_path / "t.txt", where)) == [*inner.encode(text, add_special_tokens=False).ids, 2]
    rows = tmp_path / "t.jsonl"
    rows.write_text(json.dumps({"text": text}))
    lines = open_dataset(DataSpec("jsonl", str(rows), tokenizer_path=str(where), vocab_size=2000))
    assert ids_of(lines) == ids_of(opened(tmp_path / "t.txt", where)), "a text has the same ids wherever it is"


def test_memory_of_a_long_text_is_that_of_its_parts(tmp_path: Path) -> None:
    """A text of 24 MiB is encoded in parts of about 1 MiB."""
    tokenizer = load_tokenizer(tokenizer_at(tmp_path / "m"))
    pieces = ("the cat sat\n" * 87_000 for _ in range(24))
    assert max(len(chunk) for chunk, _ in tokenizer.encode_long(pieces)) < 3 << 20


@pytest.mark.parametrize("kind", ["text", "lines", "jsonl"])
def test_a_byte_order_mark_is_no_text(kind: str, tmp_path: Path) -> None:
    """At the head of a file only; the same ids as without it."""
    where = tokenizer_at(tmp_path / "m")
    texts = [tmp_path / f"{number}.{'jsonl' if kind == 'jsonl' else 'txt'}" for number in range(2)]
    for file, mark in zip(texts, ("", "\ufeff"), strict=True):
        content = json.dumps({"text": "the cat\nsat"}) if kind == "jsonl" else "the cat\nsat \ufeff on"
        file.write_text(mark + content, encoding="utf-8")
    if kind == "lines":
        from nntask.data.tables import rows_of

        assert list(rows_of(texts[0])) == list(rows_of(texts[1])) == ["the cat\n", "sat \ufeff on"]
        return
    found = [open_dataset(DataSpec(kind, str(file), tokenizer_path=str(where), vocab_size=2000)) for file in texts]
    assert ids_of(found[0]) == ids_of(found[1])


def test_replaced_bytes_are_counted_and_said_each_time(tmp_path: Path) -> None:
    """With the first file and their number, also by a run that finds its tokens in the cache, and by one that takes prepared tokens."""
    where = tokenizer_at(tmp_path / "m")
    folder = tmp_path / "texts"
    folder.mkdir()
    total = 0
    for number in range(40):
        content = b"plain words \xe4\xc3\xa4 and more words in a text " * (3 if number % 4 == 1 else 1) if number % 2 else b"all is well"
        (folder / f"{number:02}.txt").write_bytes(content)
        total += len(content)
    for _ in range(2):
        found = opened(folder, where).findings
        assert {finding.key for finding in found} == {"bytes_replaced", "validation_bytes_replaced"}
        assert sum(finding.number for finding in found) == 40
        assert sum(finding.total for finding in found) == total
        assert "of the training texts are not UTF-8 and are replaced by U+FFFD, in " in found[0].sentence
        assert "01.txt and " in found[0].sentence
    spec = DataSpec("text", str(folder), tokenizer_path=str(where), vocab_size=2000)
    done = tokenize_dataset(spec, tmp_path / "out")
    assert done.notes == tuple(finding.sentence for finding in found)
    prepared = open_dataset(DataSpec("train.bin", str(tmp_path / "out"), vocab_size=2000))
    assert prepared.findings == found


def test_bytes_are_counted_one_by_one_at_the_ends_of_pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As `bytes.decode` replaces them, and as many as are in no character, wherever pieces end."""
    monkeypatch.setattr(text_module, "PIECE_NBYTES", 7)
    draw = np.random.default_rng(0)
    for number in range(200):
        parts = [b"\xe2\x82\xac", b"\xe2\x82", b"\xff", b"a", b"\xf0\x9f\x99", b"\xf0\x9f\x99\x82", b"\n", b"\xc3"]
        content = b"".join(parts[each] for each in draw.integers(0, len(parts), 40))
        (tmp_path / "t").write_bytes(content)
        replaced = Replaced()
        with (tmp_path / "t").open("rb") as file:
            text = "".join(decoded(file, tmp_path / "t", replaced))
        assert text == content.decode("utf-8", "replace"), number
        assert replaced.nbytes == len(content) - len(content.decode("utf-8", "ignore").encode())
        assert replaced.total == len(content)
    assert "".join(Text("t", tmp_path / "t").pieces()) == text


def test_more_ids_than_rows_are_fine_until_one_occurs(tmp_path: Path) -> None:
    """The token is named with its file and line, on the first and on every later try; other texts are encoded as ever."""
    where = tokenizer_at(tmp_path / "m", image="<image_soft_token>")
    (tmp_path / "good.txt").write_text("the cat\n" * 10)
    (tmp_path / "bad.txt").write_text("the cat\n" * 4 + "sat <image_soft_token> on\n" + "the cat\n")
    num_rows = load_tokenizer(where).vocab_size - 1
    assert ids_of(opened(tmp_path / "good.txt", where, num_rows)) == ids_of(opened(tmp_path / "good.txt", where))
    words = (
        rf"bad\.txt, line 5, has the token <image_soft_token> with the id {num_rows}, and the model's vocabulary has the ids 0 to {num_rows - 1}; "
    )
    assert len(ids_of(opened(tmp_path / "bad.txt", where))) > 10
    for _ in range(2):
        with pytest.raises(DataError, match=words):
            opened(tmp_path / "bad.txt", where, num_rows)


@pytest.mark.parametrize(
    ("objective", "line"),
    [
        (Objective("causal", "chat", 32, template="t.jinja"), {"messages": [{"role": "assistant", "content": "a <img>"}]}),
        (Objective("seq2seq", "pairs", 32, 32), {"input": "a", "target": "b <img>"}),
        (Objective("classify", "labels", 32, num_labels=2), {"text": "a <img>", "label": 1}),
    ],
    ids=["chat", "pairs", "labels"],
)
def test_rows_with_an_id_beyond_the_rows_are_named(
    objective: Objective, line: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second line of the file, in every form of rows."""
    monkeypatch.chdir(tmp_path)
    Path("t.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    tokenizer = load_tokenizer(tokenizer_at(tmp_path / "m", image="<img>"))
    good = json.loads(json.dumps(line).replace(" <img>", " cat"))
    Path("rows.jsonl").write_text(json.dumps(good) + "\n" + json.dumps(line) + "\n")
    lines = JsonLines((Path("rows.jsonl"),))
    assert len(list(encoded_rows(lines, objective, tokenizer, tokenizer.vocab_size, RowCounts(objective, "training")))) == 2
    with pytest.raises(DataError, match=r"rows.jsonl line 2 has the token <img> with the id \d+"):
        list(encoded_rows(lines, objective, tokenizer, tokenizer.vocab_size - 1, RowCounts(objective, "training")))


def test_tokens_around_and_instead_of_texts_need_rows(tmp_path: Path) -> None:
    """The end of a text, and the mask, which no text has; random tokens of a masked model all have rows."""
    where = tokenizer_at(tmp_path / "m", mask="[MASK]", end="<end>")
    (tmp_path / "t.txt").write_text("the cat")
    (where / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    tokenizer = load_tokenizer(where)
    with pytest.raises(DataError, match="every text, at its beginning or end, has the token <end>"):
        opened(tmp_path / "t.txt", where, tokenizer.vocab_size - 1)
    with pytest.raises(DataError, match=r"every batch of hidden tokens has the token \[MASK\]"):
        masking_of(tokenizer, tokenizer.vocab_size - 2, 0.15, 0)
    assert masking_of(tokenizer, tokenizer.vocab_size - 1, 0.15, 0).num_ids == tokenizer.vocab_size - 1


def ids_in(file: Path, ids: np.ndarray[Any, Any], dtype: str, *, head: bytes = b"", sidecar: str = "") -> Path:
    """A token file."""
    file.write_bytes(head + ids.astype(dtype).tobytes())
    if sidecar:
        file.with_name(file.name + ".json").write_text(json.dumps({"dtype": sidecar}))
    return file


@pytest.mark.parametrize("vocab_size", [300, 50257, 65536, 128256, 262144])
@pytest.mark.parametrize("dtype", ["<u4", "<i4", "<i8"])
def test_ids_of_four_bytes_without_a_sidecar_are_told(vocab_size: int, dtype: str, tmp_path: Path) -> None:
    """Instead of twice as many of two bytes, every second of them 0 or 1; with the sidecar they are read, and ids of two bytes always are."""
    ids = np.random.default_rng(0).integers(0, vocab_size, 4001)
    words = (
        "ids of eight bytes; write them as" if dtype == "<i8" else r'seems to hold ids of four bytes.*write \{"dtype": "uint32"\} to train.bin.json'
    )
    with pytest.raises(DataError, match=words):
        TokenFile(ids_in(tmp_path / "train.bin", ids, dtype), vocab_size=vocab_size)
    if dtype != "<i8":
        found = TokenFile(ids_in(tmp_path / "train.bin", ids, dtype, sidecar="uint32"), vocab_size=vocab_size)
        assert found.window(0, 4001).tolist() == ids.tolist()
    two = np.random.default_rng(1).integers(0, min(vocab_size, 65536), 4000)
    assert TokenFile(ids_in(tmp_path / "two.bin", two, "<u2"), vocab_size=vocab_size).num_tokens == 4000


@pytest.mark.parametrize(
    "ids",
    [
        np.zeros(4000),
        np.tile([5, 0], 2000),
        np.tile([0, 5], 2000),
        np.arange(100),
        np.where(np.arange(4000) % 2, 0, np.arange(4000) % 7),
        np.repeat(np.arange(2000), 2),
    ],
)
def test_ids_of_two_bytes_with_few_distinct_ones_are_read(ids: np.ndarray[Any, Any], tmp_path: Path) -> None:
    """Dull files are no sign of four bytes."""
    for vocab_size in (4000, 1 << 22):
        assert TokenFile(ids_in(tmp_path / "train.bin", ids % 60 if vocab_size > 4000 else ids, "<u2"), vocab_size=vocab_size).num_tokens == len(ids)


def test_a_sidecar_is_believed(tmp_path: Path) -> None:
    """Also where the ids look otherwise."""
    ids = np.where(np.arange(4000) % 2, 0, np.arange(4000))
    with pytest.raises(DataError, match="four bytes"):
        TokenFile(ids_in(tmp_path / "train.bin", ids, "<u2"), vocab_size=4000)
    assert TokenFile(ids_in(tmp_path / "train.bin", ids, "<u2", sidecar="uint16"), vocab_size=4000).num_tokens == 4000


@pytest.mark.parametrize(("magic", "dtype", "more"), [(20240520, "<u2", ""), (20240801, "<u4", r' and write \{"dtype": "uint32"\}')])
def test_headers_of_other_programs_are_told(magic: int, dtype: str, more: str, tmp_path: Path) -> None:
    """llm.c's, with the command that leaves it out and what it gives; NumPy's."""
    ids = np.random.default_rng(0).integers(0, 50257, 4000)
    head = np.zeros(256, "<i4")
    head[:3] = magic, 1, len(ids)
    file = ids_in(tmp_path / "train.bin", ids, dtype, head=head.tobytes())
    with pytest.raises(DataError, match=rf"begins with the header of llm.c, 1024 bytes before the ids; .*tail -c \+1025 .* > new.bin{more}"):
        TokenFile(file, vocab_size=50304)
    rest = tmp_path / "new.bin"
    rest.write_bytes(file.read_bytes()[1024:])  # what the command does
    if more:
        rest.with_name("new.bin.json").write_text('{"dtype": "uint32"}')
    assert TokenFile(rest, vocab_size=50304).window(0, 4000).tolist() == ids.tolist()
    np.save(tmp_path / "a.npy", ids.astype("<u2"))
    with pytest.raises(DataError, match=r"is an array of NumPy; write its ids alone with: numpy.load"):
        TokenFile(tmp_path / "a.npy", vocab_size=50304)


def test_notes_of_a_tokenizer_are_findings(tmp_path: Path) -> None:
    """One finding, for every form of data."""
    where = tokenizer_at(tmp_path / "m")
    (where / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "sparkle": 1}))
    (tmp_path / "t.txt").write_text("the cat")
    found = opened(tmp_path / "t.txt", where)
    assert [finding.sentence for finding in found.findings] == ["tokenizer: tokenizer_config.json has sparkle, which is not known here and not used"]
    assert open_dataset(replace(found.spec, dataset="text")).findings == found.findings
