"""Token files, orders, tokenizers and datasets."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.search import search

from nntask.data import BatchStream, Cursor, DataSpec, TokenFile, open_dataset
from nntask.data.dataset import check_spec, corpus_of
from nntask.data.sampler import Windows, in_order, permuted
from nntask.data.texts import PIECE_NBYTES, Text
from nntask.data.tokenizer import ByteTokenizer
from nntask.errors import DataError, UsageError


def tokens_in(path: Path, ids, dtype="<u2") -> Path:
    """Write ids to a headerless file."""
    path.write_bytes(np.asarray(ids, dtype).tobytes())
    return path


def test_sequences_and_targets_are_windows_of_the_stream(tmp_path):
    """Sequence i is [iT, (i+1)T), its targets are one further, and a short rest is dropped."""
    file = TokenFile(tokens_in(tmp_path / "t.bin", range(23)), vocab_size=23)
    batch = in_order(Windows(file, 5), 2, 10)
    assert [b.tokens.tolist() for b in batch] == [[[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]], [[10, 11, 12, 13, 14], [15, 16, 17, 18, 19]]]
    assert batch[0].targets[0].tolist() == [1, 2, 3, 4, 5]
    assert [Windows(file, length).num_sequences for length in (5, 11, 23)] == [4, 2, 0]  # of 23, the last target is missing


def test_a_last_evaluation_batch_is_filled_with_ignored_targets(tmp_path):
    """Three sequences in batches of two leave a row whose targets are all -1."""
    file = TokenFile(tokens_in(tmp_path / "t.bin", range(16)), vocab_size=16)
    last = in_order(Windows(file, 5), 2, 10)[1]
    assert last.targets[0].tolist() == [11, 12, 13, 14, 15]
    assert (last.targets[1] == -1).all()


@given(count=st.integers(1, 3000), seed=st.integers(0, 2**40), epoch=st.integers(0, 1000))
@search(60)
def test_the_order_of_an_epoch_is_a_permutation(count, seed, epoch):
    """Every sequence is visited exactly once."""
    assert sorted(permuted(np.arange(count), count, seed, epoch).tolist()) == list(range(count))


def test_orders_differ_between_epochs_and_seeds():
    """Another epoch or seed gives another order; the same ones give the same."""
    order = [tuple(permuted(np.arange(100), 100, seed, epoch)) for seed, epoch in ((0, 0), (0, 1), (1, 0), (0, 0))]
    assert len(set(order)) == 3
    assert order[0] == order[3]


def test_batches_continue_exactly_from_a_cursor(tmp_path):
    """A stream started from another's cursor hands out the same batches, over the end of an epoch."""
    file = TokenFile(tokens_in(tmp_path / "t.bin", np.arange(101) % 50), vocab_size=50)
    whole = BatchStream(Windows(file, 10), 3, seed=7)
    expected = [whole.next().tokens for _ in range(8)]
    assert whole.batches_per_epoch == 3
    assert whole.cursor == Cursor(2, 6)
    first = BatchStream(Windows(file, 10), 3, seed=7)
    for _ in range(4):
        first.next()
    rest = BatchStream(Windows(file, 10), 3, seed=7, cursor=first.cursor)
    assert all((rest.next().tokens == e).all() for e in expected[4:])


def test_select_uses_only_the_first_sequences(tmp_path):
    """With select 4, no token behind the fourth sequence is ever seen."""
    file = TokenFile(tokens_in(tmp_path / "t.bin", range(101)), vocab_size=101)
    stream = BatchStream(Windows(file, 10), 2, seed=0, select=4)
    assert stream.batches_per_epoch == 2
    assert max(stream.next().tokens.max() for _ in range(4)) < 40


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"\1\0\2", "not a multiple of 2"),
        (np.array([1, 2, 3, 99, 4], "<u2").tobytes(), "token id 99 at position 3 is beyond the vocabulary (ids 0 to 49)"),
    ],
)
def test_broken_token_files_are_refused_on_opening(tmp_path, content, words):
    """Empty, odd-sized and out-of-vocabulary files say what is wrong and where."""
    path = tmp_path / "train.bin"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"train\.bin") as error:
        TokenFile(path, vocab_size=50)
    assert words in str(error.value)


def test_ids_behind_the_scanned_head_are_checked_when_read(tmp_path):
    """A bad id that the scan on opening does not reach is named when its window is read."""
    file = TokenFile(tokens_in(tmp_path / "t.bin", [1] * 50 + [77] + [1] * 9), vocab_size=50, scan_nbytes=40)
    file.window(0, 50)
    with pytest.raises(DataError, match="77 at position 50"):
        file.window(45, 10)


def test_a_stream_shorter_than_a_batch_is_refused(tmp_path):
    """The message gives the tokens that are there and those that are needed."""
    file = TokenFile(tokens_in(tmp_path / "t.bin", range(30)), vocab_size=50)
    with pytest.raises(DataError, match=r"30 tokens give 2 sequences of 10, and --batch is 4; use at least 41 tokens, or --batch 2"):
        BatchStream(Windows(file, 10), 4, seed=0)


def test_a_sidecar_makes_the_ids_uint32(tmp_path):
    """uint32 ids above 65535 are read when the sidecar says so; another word in it is refused."""
    path = tokens_in(tmp_path / "train.bin", [70000, 1, 2], "<u4")
    sidecar = tmp_path / "train.bin.json"
    sidecar.write_text(json.dumps({"dtype": "uint32"}))
    assert TokenFile(path, vocab_size=70001).window(0, 3).tolist() == [70000, 1, 2]
    sidecar.write_text('{"dtype": "int8"}')
    with pytest.raises(DataError, match="must be"):
        TokenFile(path, vocab_size=70001)


def test_bytes_tokenizer_round_trips():
    """Any text comes back; the end of text is 256 where there is room."""
    tokenizer = ByteTokenizer(300)
    text = "naïve ∀x\n\0"
    (ids,) = tokenizer.encode([text])
    assert tokenizer.decode(ids.tolist()) == text
    assert tokenizer.vocab_size == 257
    assert ByteTokenizer(256).end_of_text == 10
    with pytest.raises(DataError, match="at least 256"):
        ByteTokenizer(200)


def test_text_becomes_the_same_tokens_again_and_from_the_cache(tmp_path):
    """Training a BPE on a directory is deterministic, and the second opening computes nothing."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(30):
        (texts / f"{i}.txt").write_text(f"the cat number {i} sat on the mat and the dog number {i} did not\n" * 5)
    spec = DataSpec("text", str(texts), vocab_size=300)
    said: list[str] = []
    first = open_dataset(spec, said.append)
    assert len(said) == 4
    assert f"{texts}: training 30 files (0.txt, 1.txt, 10.txt, ...)" in said[0]
    digest = hashlib.sha256(first.train.path.read_bytes()).hexdigest()
    again = open_dataset(spec, said.append)
    assert said[4:] == said[:1]
    first.train.path.unlink()
    (first.train.path.parent / "tokenizer.json").unlink()
    fresh = open_dataset(spec, said.append)
    assert hashlib.sha256(fresh.train.path.read_bytes()).hexdigest() == digest
    assert again.fingerprint == first.fingerprint
    assert first.tokenizer is not None
    assert first.tokenizer.vocab_size <= 300
    ids = first.train.window(0, 40)
    text = first.tokenizer.decode(ids.tolist())
    assert "cat number" in text
    assert first.tokenizer.byte_lengths()[ids].sum() == len(text.encode())
    assert first.validation is not None


def test_stdlib_needs_no_network_and_holds_out_whole_texts():
    """The standard library gives megabytes of text, split by file."""
    from nntask.data.corpora import stdlib_corpus

    corpus = stdlib_corpus()
    names = {t.name for t in corpus.train}
    held = {t.name for t in corpus.validation}
    assert len(names) > 100
    assert held
    assert not names & held
    assert corpus == stdlib_corpus()
    assert len(stdlib_corpus(select=5).train) + len(stdlib_corpus(select=5).validation) == 5


@pytest.mark.parametrize("nbytes", [3000, 5 << 20])
def test_a_fingerprint_is_of_the_content_not_of_the_place(tmp_path, nbytes):
    """A copy elsewhere has the same one; another first, last or sampled token, another size or another element type has not."""
    ids = np.arange(nbytes // 2) % 50
    (tmp_path / "elsewhere").mkdir()
    there = tokens_in(tmp_path / "elsewhere" / "other.bin", ids)

    def fingerprint(values, dtype="<u2"):
        path = tokens_in(tmp_path / "train.bin", values, dtype)
        return open_dataset(DataSpec("train.bin", str(path), vocab_size=1 << 22)).fingerprint

    first = fingerprint(ids)
    assert first == open_dataset(DataSpec("train.bin", str(there), vocab_size=50)).fingerprint
    found = [first, fingerprint(ids[:-1])]
    for position in (0, len(ids) - 1, 100):
        changed = ids.copy()
        changed[position] += 1
        found.append(fingerprint(changed))
    (tmp_path / "train.bin.json").write_text('{"dtype": "uint32"}')
    found.append(fingerprint(ids.astype("<u2").view("<u4"), "<u4"))
    assert len(set(found)) == 6


def test_a_fingerprint_reads_samples_only(tmp_path):
    """Of a file of 1 GiB, 4 MiB."""
    path = tmp_path / "train.bin"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    tokens, read = TokenFile(path, vocab_size=50, scan_nbytes=2), []
    inner = tokens._read
    tokens._read = lambda first, count: read.append(count) or inner(first, count)
    tokens.fingerprint()
    assert sum(read) * 2 == 4 << 20


def test_the_fingerprint_of_texts_is_of_those_that_train(tmp_path):
    """It stays when the directory moves or the validation text changes, and differs when a training text does."""

    def fingerprint(name, line, held):
        (tmp_path / name / "texts").mkdir(parents=True)
        (tmp_path / name / "texts" / "a.txt").write_text(line * 20)
        (tmp_path / name / "val.txt").write_text(held * 20)
        spec = DataSpec("text", str(tmp_path / name / "texts"), str(tmp_path / name / "val.txt"), tokenizer="bytes", vocab_size=257)
        return open_dataset(spec).fingerprint

    first = fingerprint("one", "a line\n", "held out\n")
    assert fingerprint("two", "a line\n", "held out\n") == first
    assert fingerprint("three", "a line\n", "others held out\n") == first
    assert fingerprint("four", "a lime\n", "held out\n") != first


def test_val_bin_beside_train_bin_is_validation(tmp_path):
    """train.bin is all training data; val.bin beside it, or --val-path, is validation."""
    tokens_in(tmp_path / "train.bin", range(30))
    spec = DataSpec("train.bin", str(tmp_path), vocab_size=40)
    assert open_dataset(spec).validation is None
    tokens_in(tmp_path / "val.bin", range(12))
    found = open_dataset(spec)
    assert found.validation is not None
    assert (found.train.num_tokens, found.validation.num_tokens) == (30, 12)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (DataSpec("WikiText-104"), "--dataset WikiText-104 is not available"),
        (DataSpec("WikiText-103", "/does/not/exist"), "--dataset WikiText-103: /does/not/exist has no files of it"),
        (DataSpec("text"), "needs --dataset-path"),
        (DataSpec("text", "/does/not/exist"), "--dataset-path /does/not/exist does not exist"),
        (DataSpec(tokenizer="gpt2", tokenizer_path="/does/not/exist"), "--tokenizer gpt2: there is no tokenizer.json in /does/not/exist"),
    ],
)
def test_names_and_paths_are_checked_first(spec, words, monkeypatch):
    """What is not there is refused before anything is read."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError if "exist" in words else UsageError) as error:
        check_spec(spec)
    assert words in str(error.value)


def test_a_link_to_nothing_is_named(tmp_path):
    """Among the files of a directory."""
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"b\.txt in --dataset-path .* is a dangling link; fix or remove it"):
        open_dataset(DataSpec("text", str(tmp_path), tokenizer="bytes", vocab_size=300))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a text\0with a NUL byte", "it holds NUL bytes"),
        ("a text in UTF-16".encode("utf-16"), "it begins with the byte order mark of UTF-16"),
        ("a text in UTF-16".encode("utf-16-le"), "it holds NUL bytes"),
        (bytes(range(1, 256)) * 9, "50% of its bytes are no part of a character"),
        ("\u0442\u0435\u043a\u0441\u0442".encode("koi8-r"), "100% of its bytes"),
        ("Stra\xdfe, a word in Latin-1".encode("latin-1"), ""),
        (
            ("\xfcber die gr\xf6\xdferen St\xe4dte und ihre Br\xfccken, was man nur hier erz\xe4hlt " * 9).encode("latin-1"),
            "8.8% of .* older encoding",
        ),
        (("many words of another kind " * 30 + "Stra\xdfe ").encode("latin-1") * 9, "0.1% of .* older encoding"),
        (("many words of another kind " * 80 + "Stra\xdfe ").encode("latin-1") * 9, ""),
        (("Stra\xdfe in UTF-8, " * 9).encode() + "Stra\xdfe in Latin-1".encode("latin-1") * 9, ""),
        (b"a text whose first MiB ends within a character " + "\xdf".encode() * PIECE_NBYTES, ""),
    ],
    ids=["nul", "utf-16", "utf-16 without a mark", "binary", "koi8-r", "a word", "german", "often", "seldom", "both", "utf-8"],
)
def test_a_file_that_is_no_text_is_for_plain_bytes_only(tmp_path, content, words):
    """A few bytes of another encoding pass; more, or a NUL byte, are refused, unless the tokenizer is bytes."""
    (tmp_path / "texts").mkdir()
    file = tmp_path / "texts" / "file"
    file.write_bytes(content)
    corpus_of(DataSpec("text", str(file), tokenizer="bytes"))
    for path in (file, file.parent):
        spec = DataSpec("text", str(path), tokenizer="bpe")
        if not words:
            corpus_of(spec)
            continue
        with pytest.raises(DataError, match=f"{file}.* is not text in UTF-8: {words}"):
            corpus_of(spec)
        with pytest.raises(DataError, match="--val-path"):
            corpus_of(DataSpec("stdlib", val_path=str(path), tokenizer="bpe"))


def test_a_long_line_is_read_in_pieces(tmp_path):
    """Pieces end with lines where lines are short; a line of many MiB is cut, characters are not, and nothing is lost."""
    text = "short\n" * 300_000 + "é" * 3_000_000 + "\n" + "end"
    (tmp_path / "t.txt").write_text(text, encoding="utf-8")
    pieces = list(Text("t", tmp_path / "t.txt").pieces())
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 2 * PIECE_NBYTES
    assert pieces[0].endswith("\n")
    assert len(pieces) > 3
