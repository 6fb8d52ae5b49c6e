"""Broken and hostile GGUF files: one sentence, exit code 6, no memory taken, and no reading beyond the header."""

from __future__ import annotations

import contextlib
import resource
import struct
import tracemalloc
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.gguf_files import write_gguf
from support.model_directories import write_model
from support.transformers_oracle import CONFIGS, hf_model
from tokenizers import Tokenizer

from nntask.data.tokenizer import load_tokenizer
from nntask.errors import NntaskError, StorageError
from nntask.gguf.architectures import ALL_FACTORS, ARCHITECTURES
from nntask.gguf.config_keys import config_from
from nntask.gguf.model_file import GgufModel, open_gguf
from nntask.gguf.new_file import new_gguf
from nntask.gguf.tensor_ranges import Heads
from nntask.gguf.text_ends import ids_from
from nntask.gguf.vocabulary import UntranslatedError, files_from, wrong_merge
from nntask.io.gguf_file import TENSOR_TYPES, GgufFile
from nntask.models.registry import config_from_dict
from wrappers.cli import main

U32, STRING, ARRAY, U64, F32 = 4, 8, 9, 10, 6
HUGE = 1 << 60
EXAMPLES = 300


def text(value: str | bytes, length: int | None = None) -> bytes:
    """A text, or one that claims another length."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def pair(key: str, kind: int, value: bytes) -> bytes:
    """A key with its value."""
    return text(key) + struct.pack("<I", kind) + value


ARCHITECTURE = pair("general.architecture", STRING, text("gpt2"))


def tensor(name: str = "a", shape: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    """An entry; shape in the order of the file."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def file_of(pairs: list[bytes], tensors: list[bytes], *, data: int = 64, magic: bytes = b"GGUF", version: int = 3, counts=None) -> bytes:
    """A file; `counts` of tensors and keys if they are not those that are there."""
    counts = (len(tensors), len(pairs)) if counts is None else counts
    header = magic + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(tensors)
    return header + bytes(-len(header) % 32 + data)


def nested(depth: int) -> bytes:
    """A list of lists of lists ..."""
    return pair("a", ARRAY, struct.pack("<IQ", ARRAY, 1) * depth + struct.pack("<IQB", 0, 1, 1))


CASES = {
    "empty": b"",
    "three bytes": b"GGU",
    "other magic": file_of([], [], magic=b"GGML"),
    "version 1": file_of([], [], version=1),
    "version 4": file_of([], [], version=4),
    "big-endian": file_of([], [], version=3 << 24),
    "2^60 keys": file_of([ARCHITECTURE], [], counts=(0, HUGE)),
    "2^64 - 1 keys": file_of([ARCHITECTURE], [], counts=(0, (1 << 64) - 1)),
    "2^60 tensors": file_of([ARCHITECTURE], [tensor()], counts=(HUGE, 1)),
    "a key of 2^60 letters": file_of([text("a", HUGE) + struct.pack("<I", U32)], []),
    "a text of 2^60 letters": file_of([pair("a", STRING, text("b", HUGE))], []),
    "a text beyond the end": file_of([pair("a", STRING, text("b", 200))], []),
    "a list of 2^60 numbers": file_of([pair("a", ARRAY, struct.pack("<IQ", U64, HUGE))], []),
    "a list of 2^61 numbers": file_of([pair("a", ARRAY, struct.pack("<IQ", U64, HUGE << 1))], []),
    "a list of 2^60 texts": file_of([pair("a", ARRAY, struct.pack("<IQ", STRING, HUGE))], []),
    "lists of lists": file_of([nested(1)], []),
    "ten thousand lists of lists": file_of([nested(10_000)], []),
    "a list of nothing known": file_of([pair("a", ARRAY, struct.pack("<IQ", 77, 1))], []),
    "a value of nothing known": file_of([pair("a", 77, b"")], []),
    "no UTF-8": file_of([pair("a", STRING, text(b"\xff\xfe"))], []),
    "a key of two lines": file_of([pair("a\nb", U32, bytes(4))], []),
    "a tensor of two lines": file_of([ARCHITECTURE], [tensor("a\nb")]),
    "a key twice": file_of([ARCHITECTURE, ARCHITECTURE], []),
    "a tensor twice": file_of([ARCHITECTURE], [tensor(), tensor(offset=32)]),
    "no axes": file_of([ARCHITECTURE], [tensor(shape=())]),
    "2^32 - 1 axes": file_of([ARCHITECTURE], [text("a") + struct.pack("<I", (1 << 32) - 1)]),
    "an axis of 2^60": file_of([ARCHITECTURE], [tensor(shape=(HUGE,))]),
    "axes whose product is 2^64": file_of([ARCHITECTURE], [tensor(shape=(1 << 32, 1 << 32))]),
    "an empty tensor": file_of([ARCHITECTURE], [tensor(shape=(4, 0))]),
    "a type that is unknown": file_of([ARCHITECTURE], [tensor(kind=1000)]),
    "cut blocks": file_of([ARCHITECTURE], [tensor(shape=(33,), kind=8)]),
    "an offset beyond the end": file_of([ARCHITECTURE], [tensor(offset=96)]),
    "an offset of 2^63": file_of([ARCHITECTURE], [tensor(offset=1 << 63)]),
    "an offset that is odd": file_of([ARCHITECTURE], [tensor(offset=4)]),
    "tensors on each other": file_of([ARCHITECTURE], [tensor(shape=(16,)), tensor("b", offset=32)]),
    "a tensor that is cut": file_of([ARCHITECTURE], [tensor(shape=(17,))]),
    "an alignment of 0": file_of([ARCHITECTURE, pair("general.alignment", U32, struct.pack("<I", 0))], [tensor()]),
    "an alignment of 3": file_of([ARCHITECTURE, pair("general.alignment", U32, struct.pack("<I", 3))], [tensor()]),
    "an alignment of 2^31": file_of([ARCHITECTURE, pair("general.alignment", U32, struct.pack("<I", 1 << 31))], [tensor()]),
    "an alignment of NaN": file_of([ARCHITECTURE, pair("general.alignment", F32, struct.pack("<f", float("nan")))], [tensor()]),
}


@pytest.mark.parametrize("name", list(CASES))
def test_a_broken_file_is_refused(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence with the name of the file, exit code 6, and less than 2 MiB of memory."""
    path = tmp_path / "model.gguf"
    path.write_bytes(CASES[name])
    tracemalloc.start()
    try:
        with pytest.raises(StorageError) as caught:
            GgufFile(path)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert main(["generate", str(path), "--prompt", "x"]) == 6
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert len(err) < 400 + len(str(path))


def test_a_sparse_file_takes_no_memory(tmp_path: Path) -> None:
    """A file that is as long as its claims, by holes: headers end at 128 MiB, and lists at four million texts."""
    for kind, count, words in (
        (U64, 1 << 30, "of the header are left"),
        (STRING, 1 << 23, "texts together, got"),
        (0, 1 << 33, "of the header are left"),
    ):
        path = tmp_path / f"{kind}.gguf"
        path.write_bytes(file_of([pair("a", ARRAY, struct.pack("<IQ", kind, count))], []))
        with path.open("r+b") as file:
            file.truncate(1 << 36)
        tracemalloc.start()
        try:
            with pytest.raises(StorageError, match=words):
                GgufFile(path)
            assert tracemalloc.get_traced_memory()[1] < 4 << 20
        finally:
            tracemalloc.stop()


def test_types_are_those_of_the_gguf_package() -> None:
    """Names and sizes."""
    for number, ours in TENSOR_TYPES.items():
        theirs = gguf.GGMLQuantizationType(number)
        assert (theirs.name, *gguf.GGML_QUANT_SIZES[theirs]) == (ours.name, ours.block_values, ours.block_bytes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file that opens."""
    directory = tmp_path_factory.mktemp("whole")
    write_model(directory / "model")
    return write_gguf(directory / "model.gguf", hf_model(replace(CONFIGS["gpt2"], vocab_size=300)), tokenizer=directory / "model").read_bytes()


def opens(path: Path) -> None:
    """Opens a file and reads all of it, or raises."""
    model = GgufModel(path)
    for where in model.stored_ranges()[0].values():
        where.read(np.empty(where.shape, where.dtype))
    assert all("\n" not in note for note in model.notes)
    load_tokenizer(path).encode(["some text"])


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_random_cuts_and_bytes(tmp_path: Path, whole: bytes, data: st.DataObject) -> None:
    """Whatever is cut off or changed: the file opens, or is refused with one sentence."""
    raw = bytearray(whole)
    for _ in range(data.draw(st.integers(0, 6))):
        raw[data.draw(st.one_of(st.integers(0, 1000), st.integers(0, len(raw) - 1)))] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.one_of(st.just(len(raw)), st.integers(0, len(raw))))]
    path = tmp_path / "changed.gguf"
    path.write_bytes(raw)
    try:
        opens(path)
    except NntaskError as error:
        assert "\n" not in str(error)  # noqa: PT017


WORDS = st.text("ab \u2581<>0x\u0120\n\u00e9", max_size=4)
CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "tokens": st.lists(WORDS, max_size=6),
        "merges": st.lists(st.one_of(WORDS, st.sampled_from(["a b", "ab a", "b  a"])), max_size=4),
        "token_type": st.lists(st.integers(-2, 9), max_size=8).map(lambda kinds: np.array(kinds, np.int32)),
        "scores": st.lists(st.floats(width=32), max_size=8).map(lambda scores: np.array(scores, np.float32)),
        "model": st.sampled_from(["gpt2", "llama", "bert", "none", "", 3]),
        "pre": st.sampled_from(["default", "tekken", "gpt-4o", "x", 3, ""]),
        "eos_token_ids": st.lists(st.integers(-1, 9), max_size=3).map(lambda ids: np.array(ids, np.int64)),
        **{
            name: st.one_of(st.integers(-1, 9), st.booleans(), WORDS)
            for name in ("bos_token_id", "eos_token_id", "unknown_token_id", "add_bos_token")
        },
        **{name: st.booleans() for name in ("add_eos_token", "add_space_prefix")},
    },
)


@pytest.mark.search
@settings(max_examples=EXAMPLES, deadline=None)
@given(CHANGES, st.sampled_from([{"model": "gpt2"}, {"model": "llama"}]))
def test_random_vocabularies(changes: dict[str, Any], plain: dict[str, Any]) -> None:
    """Any metadata of a tokenizer: files that the tokenizers package takes, or one sentence that says what is wrong."""
    tokens = ["a", "b", "ab", "<0x00>", "</s>"]
    keys = {
        **plain,
        "tokens": tokens,
        "merges": ["a b"],
        "scores": np.zeros(5, np.float32),
        "token_type": np.array([1, 1, 1, 6, 3], np.int32),
    } | changes
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    assert set(ids_from(metadata, 9)) == {"bos_token_id", "eos_token_id"}
    try:
        files = files_from(metadata, 16, 9)
    except UntranslatedError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    if not files or wrong_merge(metadata):
        return
    inner = Tokenizer.from_str(files["tokenizer.json"])
    inner.decode(inner.encode("ab \u00e9 ba").ids)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_random_cuts(tmp_path: Path, whole: bytes, data: st.DataObject) -> None:
    """A file that lacks its end is always refused."""
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 33))])
    with pytest.raises(StorageError):
        opens(path)


def test_a_file_that_changes_is_seen(tmp_path: Path, whole: bytes) -> None:
    """One that is replaced is opened anew, and one that is changed is not read on."""
    path = tmp_path / "model.gguf"
    path.write_bytes(whole)
    found = open_gguf(path).stored_ranges()[0]
    assert open_gguf(path).stored_ranges()[0].keys() == found.keys()
    with path.open("r+b") as file:
        file.truncate(len(whole) - 100)
    where = found["transformer.ln_f.weight"]
    with pytest.raises(StorageError, match=r"has changed|become shorter"):
        where.read(np.empty(where.shape, where.dtype))
    with pytest.raises(StorageError, match="must begin at a multiple of"):
        open_gguf(path)


VALUES: list[Any] = [0, 1, (1 << 31) - 1, -1.0, float("nan"), 1e30, "x", True, [1], ["x", "x"]]


def changed(source: Path, target: Path, key: str, value: Any) -> None:
    """The file with another value under one key; none for None."""
    file = GgufFile(source)
    metadata = {name: each.tolist() if isinstance(each, np.ndarray) else each for name, each in file.metadata.items()}
    metadata[key] = value
    if value is None:
        del metadata[key]
    tensors = {name: (each.type.name, each.shape) for name, each in file.tensors.items()}
    made = new_gguf(target, metadata, tensors, ARCHITECTURES["llama"], Heads(1, 1))
    raw = source.read_bytes()
    with target.open("r+b") as out:
        for name, each in file.tensors.items():
            out.seek(made[name].offset)
            out.write(raw[each.offset : each.offset + each.nbytes])


SIZES = {"context_length": 64, "embedding_length": 64, "block_count": 1, "feed_forward_length": 128, "attention.head_count": 4}
SIZES |= {"attention.head_count_kv": 2, "attention.key_length": 16, "rope.dimension_count": 16, "attention.sliding_window": 8}
NUMBERS: tuple[Any, ...] = (0, -1, 1.5, float("nan"), (1 << 31) - 1, HUGE, None)


@pytest.mark.parametrize("factors", [(), ALL_FACTORS[:1], ALL_FACTORS[1:]], ids=["", "rotary factors", "two tables"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_wrong_pairs_of_sizes(name: str, factors: tuple[str, ...]) -> None:
    """Any two sizes of any architecture that are nonsense together: a config, or a refusal; and no memory."""
    sizes = SIZES | {"attention.layer_norm_rms_epsilon": 1e-5, "attention.layer_norm_epsilon": 1e-5}
    for key in ["attention.sliding_window"] * (name not in ("llama", "gemma2", "gemma3", "phi3")) + ["rope.dimension_count"] * (name == "gpt2"):
        del sizes[key]  # which refuse the file
    plain = {"general.architecture": name, **{f"{name}.{key}": value for key, value in sizes.items()}}
    shapes = {"token_embd.weight": (300, 64), "blk.0.ffn_up.weight": (128, 64), "blk.0.attn_q.weight": (64, 64)}
    tables = {each: np.ones(8, np.float32) for each in factors}
    tracemalloc.start()
    try:
        for (one, other), first, second in product(combinations(sizes, 2), NUMBERS, NUMBERS):
            changed = {f"{name}.{one}": first, f"{name}.{other}": second}
            metadata = {key: value for key, value in {**plain, **changed}.items() if value is not None}
            with contextlib.suppress(NntaskError):
                config_from_dict(config_from(metadata, shapes, "a.gguf", rotary_factors=tables, ties=False)[0])
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("third", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)])
def test_wrong_values_of_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest, third: int
) -> None:
    """Every key of a config and of a tokenizer with every kind of nonsense: the model is read, or refused with one sentence. By default each key
    with a third of the values, each value with a third of the keys."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model")
    source = write_gguf(tmp_path / "whole.gguf", hf_model(replace(CONFIGS["llama"], vocab_size=300)), tokenizer=tmp_path / "model", kind="F16")
    before = resource.getrlimit(resource.RLIMIT_AS)
    most = psutil.Process().memory_info().vms + (8 << 30)  # beside what tests before it have mapped
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))  # for what would take memory without end
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_AS, before))
    keys = [key for key in GgufFile(source).metadata if key not in ("general.name", "general.architecture", "llama.vocab_size")]
    others = ["general.alignment", "llama.rope.scaling.type", "split.count", "tokenizer.huggingface.json", "llama.attention.sliding_window"]
    codes = set()
    for at, key in enumerate(keys + others):
        values = (*VALUES, None) if key in keys else VALUES
        for value in values[(third - at) % 3 :: 3]:
            path = tmp_path / "changed.gguf"
            path.unlink(missing_ok=True)
            changed(source, path, key, value)
            asked = ["generate", "changed.gguf", "--prompt=", "--max-new-tokens=2", "--temperature=0", "--ram=64MiB"]
            code, err = main([*asked, "--tokenizer-path=model"]), capsys.readouterr().err
            if "drop it" in err:  # it has a tokenizer
                code, err = main(asked), capsys.readouterr().err
            assert code in (0, 2, 3, 4, 6), (key, value)
            sentences = [line for line in err.splitlines() if not line.endswith("ignored")]  # without those about ids that cannot come
            assert len(sentences) == 1 or code == 0, (key, value, err)
            codes.add(code)
    assert {0, 2, 4} <= codes
