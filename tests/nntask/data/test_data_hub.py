"""WikiText, parquet and prepared data: read where they lie, and a plain word where they do not."""

import contextlib
import http.server
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
from support.tokenizers_of_others import llama3

from nntask.data import DataSpec, load_tokenizer, open_dataset
from nntask.data import hub as probe
from nntask.data.hub import wikitext_files
from nntask.data.prepare import tokenize_dataset
from nntask.data.tokenizer import train_bpe
from nntask.errors import DataError, UsageError

TRAIN = ["", " = Robert Boulter = \n", "", " Robert Boulter is an English actor .\n", " He had a role , and another .\n"] * 40
VALIDATION = [" = Homarus = \n", " The lobster .\n"] * 30


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """A cache of its own, and the Hub as this machine has it."""
    monkeypatch.setenv("NNTASK_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.chdir(tmp_path)


def lay(root: Path, kind: str) -> Path:
    """WikiText as the Hub's parquet files, as the cache of `datasets`, or as text files; a test split and other configs beside it."""
    root.mkdir()
    if kind == "text":
        for name, rows in (("train", TRAIN), ("valid", VALIDATION), ("test", ["never\n"])):
            (root / f"wiki.{name}.raw").write_text("".join(row if row.endswith("\n") else row + "\n" for row in rows))
        return root
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    ours = root / "wikitext-103-raw-v1"
    ours.mkdir()
    half = len(TRAIN) // 2
    parts = {
        "train-00000-of-00002": TRAIN[:half],
        "train-00001-of-00002": TRAIN[half:],
        "validation-00000-of-00001": VALIDATION,
        "test-0": ["never\n"],
    }
    for name, rows in parts.items():
        table = pa.table({"text": rows})
        if kind == "parquet":
            pq.write_table(table, ours / f"{name}.parquet")
        else:
            with pa.OSFile(str(ours / f"wikitext-{name}.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table, 7)
    (root / "wikitext-2-raw-v1").mkdir()
    pq.write_table(pa.table({"text": ["another"]}), root / "wikitext-2-raw-v1" / "train-00000-of-00001.parquet")
    return root


def text_of(tokens, tokenizer) -> str:
    """The text of a token file."""
    return tokenizer.decode(tokens.window(0, tokens.num_tokens).tolist())


@pytest.mark.parametrize("kind", ["parquet", "arrow", "text"])
@pytest.mark.parametrize("select", [-1, 7])
def test_wikitext_is_read_where_it_lies(tmp_path, kind, select):
    """The same text from every form: rows in order, the validation split apart, the test split and other configs untouched."""
    path = lay(tmp_path / "data", kind)
    spec = DataSpec("WikiText-103", str(path), select=select, tokenizer="bytes", vocab_size=300)
    dataset = open_dataset(spec)
    rows = TRAIN if select == -1 else TRAIN[:select]
    assert text_of(dataset.train, dataset.tokenizer) == "".join(row if row.endswith("\n") else row + "\n" for row in rows)
    assert text_of(dataset.validation, dataset.tokenizer) == "".join(VALIDATION)
    assert open_dataset(spec).fingerprint == dataset.fingerprint


def test_tables_among_texts(tmp_path):
    """--dataset text reads parquet files too; columns without text and broken files are told."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "mine").mkdir()
    pq.write_table(pa.table({"id": [1, 2], "text": ["one", "two\n"]}), tmp_path / "mine" / "a.parquet")
    dataset = open_dataset(DataSpec("text", "mine", tokenizer="bytes", vocab_size=257))
    assert dataset.train.window(0, dataset.train.num_tokens).tolist() == [*b"one", 256, *b"two\n", 256]
    for name, table, words in (("b", {"a": [1], "b": [2]}, "has the columns a, b"), ("c", {"text": [1]}, "holds int64")):
        pq.write_table(pa.table(table), tmp_path / f"{name}.parquet")
        with pytest.raises(DataError, match=words):
            open_dataset(DataSpec("text", f"{name}.parquet", tokenizer="bytes", vocab_size=257))
    (tmp_path / "d.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match="not a whole parquet file"):
        open_dataset(DataSpec("text", "d.parquet", tokenizer="bytes", vocab_size=257))


def test_prepared_data_trains_alike(tmp_path):
    """train.bin, val.bin and the tokenizer beside them are what the source itself gives."""
    path = lay(tmp_path / "data", "text")
    spec = DataSpec("WikiText-103", str(path), vocab_size=280)
    done = tokenize_dataset(spec, tmp_path / "out")
    direct, prepared = open_dataset(spec), open_dataset(DataSpec("train.bin", "out", vocab_size=280))
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == ["tokenizer.json", "train.bin", "train.bin.json", "val.bin", "val.bin.json"]
    for name in ("train", "validation"):
        ours, theirs = getattr(prepared, name), getattr(direct, name)
        assert np.array_equal(ours.window(0, ours.num_tokens), theirs.window(0, theirs.num_tokens))
    assert (done.num_train, done.num_validation) == (direct.train.num_tokens, direct.validation.num_tokens)
    assert prepared.tokenizer.encode(["a role"])[0].tolist() == direct.tokenizer.encode(["a role"])[0].tolist()
    with pytest.raises(UsageError, match="--output out exists"):
        tokenize_dataset(spec, Path("out"))
    with pytest.raises(DataError, match="beyond the vocabulary"):
        open_dataset(DataSpec("train.bin", "out", vocab_size=270))
    assert not list(tmp_path.glob(".writing-*"))


def test_a_tokenizer_below_its_name(tmp_path):
    """--tokenizer NAME --tokenizer-path DIR finds DIR/tokenizer.json and DIR/NAME/tokenizer.json."""
    (tmp_path / "t.txt").write_text("some words, and more\n" * 50)
    (tmp_path / "tok" / "gpt2").mkdir(parents=True)
    train_bpe(["some words"], 270).save(tmp_path / "tok" / "gpt2")
    dataset = open_dataset(DataSpec("text", "t.txt", tokenizer="gpt2", tokenizer_path="tok", vocab_size=300))
    assert dataset.tokenizer.encode(["some"])[0].tolist() == load_tokenizer("tok/gpt2").encode(["some"])[0].tolist()


@pytest.mark.parametrize(
    ("endpoint", "reasons"),
    [
        ("silent", ["no answer within 0.25 s", "timed out"]),
        ("refused", ["Connection refused"]),
        ("no such host", ["hub.invalid cannot be reached"]),
        ("offline", ["HF_HUB_OFFLINE forbids asking"]),
    ],
)
def test_a_hub_that_does_not_answer(tmp_path, monkeypatch, endpoint, reasons):
    """The command that prepares the data elsewhere, after one short wait: a host is silent, refuses, has no name, or must not be asked."""
    assert probe.PROBE_SECONDS < 5
    monkeypatch.setattr(probe, "PROBE_SECONDS", 0.25)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if endpoint == "refused":
            server.close()
        if endpoint == "offline":
            monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid" if endpoint == "no such host" else f"http://127.0.0.1:{port}")
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.delenv(name, raising=False)
        with pytest.raises(DataError) as told:
            open_dataset(DataSpec("WikiText-103", "data", select=40000, tokenizer="gpt2", tokenizer_path="data"))
        (tmp_path / "t.txt").write_text("text")
        with pytest.raises(DataError) as of_tokenizer:
            open_dataset(DataSpec("text", "t.txt", tokenizer="gpt2", tokenizer_path="data", vocab_size=300))
    assert "nntask data prepare --dataset WikiText-103 --dataset-path data --tokenizer gpt2 --tokenizer-path data --dataset-select 40000" in str(
        told.value
    )
    assert "nntask data prepare --dataset text --dataset-path t.txt --tokenizer gpt2 --tokenizer-path data" in str(of_tokenizer.value)
    assert any(reason in str(of_tokenizer.value) for reason in reasons), of_tokenizer.value
    assert not (tmp_path / "data").exists()


def _headers(content):
    if content is None:
        return [("X-Error-Code", "EntryNotFound")]
    return [("ETag", '"1"'), ("X-Repo-Commit", "0" * 40), ("Content-Length", str(len(content)))]


@contextlib.contextmanager
def hub(monkeypatch, files):
    """A Hub on this machine with one model's files; yields the paths that are asked for."""
    constants = pytest.importorskip("huggingface_hub.constants")
    asked = []

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            asked.append(self.path)
            content = files.get(self.path.rpartition("/")[2])
            self.send_response(200 if content else 404)
            for key, value in _headers(content):
                self.send_header(key, value)
            self.end_headers()
            if content and self.command == "GET":
                self.wfile.write(content)

        do_GET = do_HEAD

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
        yield asked
        server.shutdown()


def test_a_hub_that_answers_with_an_error(monkeypatch):
    """That is the package's to tell, and the command that prepares the data elsewhere is ours."""
    Path("t.txt").write_text("text")
    with hub(monkeypatch, {}) as asked, pytest.raises(DataError) as told:
        open_dataset(DataSpec("text", "t.txt", tokenizer="none", vocab_size=300))
    assert "--tokenizer none could not be fetched: " in str(told.value)
    assert "; on a machine that reaches it run: nntask data prepare --dataset text --dataset-path t.txt --tokenizer none --output DIR" in str(
        told.value
    )
    assert len(asked) > 1


def test_a_tokenizer_is_fetched_with_what_says_how_texts_end(monkeypatch, tmp_path):
    """The files beside it that are there, before it; the others are not missed."""
    files = {"tokenizer.json": (llama3(tmp_path / "m") / "tokenizer.json").read_bytes(), "config.json": b'{"eos_token_id": 258}'}
    Path("t.txt").write_text("text")
    with hub(monkeypatch, files):
        found = open_dataset(DataSpec("text", "t.txt", tokenizer="some/model", tokenizer_path="tok", vocab_size=300))
    assert found.tokenizer.end_of_text == 258
    assert Path("tok/some/model/config.json").read_bytes() == files["config.json"]


def test_a_split_is_a_word_of_a_name(tmp_path):
    """Not a part of one."""
    for name in ("constrained.txt", "retrained-valuable.txt"):
        (tmp_path / name).write_text("text")
    assert wikitext_files(str(tmp_path)) == {}
    (tmp_path / "wikitext-train-00000-of-00002.txt").write_text("text")
    (tmp_path / "x.VALID.txt").write_text("text")
    assert {split: [each.name for each in files] for split, files in wikitext_files(str(tmp_path)).items()} == {
        "train": ["wikitext-train-00000-of-00002.txt"],
        "validation": ["x.VALID.txt"],
    }
    assert wikitext_files("nowhere") == {}
