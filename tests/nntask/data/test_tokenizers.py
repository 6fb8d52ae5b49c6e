"""How texts begin and end for tokenizers of others, and that it stays with the ids: read, kept with the tokenizer, written again."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.tokenizers_of_others import BEGIN, END, LETTERS, TURN, llama3
from tokenizers import Tokenizer, decoders, models, normalizers

from nntask.data import DataSpec, load_tokenizer, open_dataset
from nntask.data.dataset import check_spec
from nntask.data.prepare import tokenize_dataset
from nntask.data.tokenizer import train_bpe
from nntask.errors import DataError, UsageError


def write(directory: Path, name: str, **values) -> None:
    """A JSON file."""
    (directory / name).write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("files", "bos", "eos"),
    [
        ({}, BEGIN, (END,)),
        ({"config.json": {"bos_token_id": BEGIN, "eos_token_id": TURN}}, BEGIN, (TURN,)),
        ({"config.json": {"eos_token_id": END}, "generation_config.json": {"eos_token_id": [END, TURN]}}, None, (END, TURN)),
        ({"config.json": {"bos_token_id": 1, "eos_token_id": 2}}, BEGIN, (END,)),  # what transformers writes when nobody said better
        ({"tokenizer_config.json": {"bos_token": "<|begin_of_text|>", "eos_token": {"content": "<|eot_id|>"}}}, BEGIN, (TURN,)),
        ({"special_tokens_map.json": {"eos_token": "<|eot_id|>"}}, None, (TURN,)),
        ({"config.json": {"eos_token_id": TURN}, "tokenizer_config.json": {"eos_token": "<|end_of_text|>"}}, None, (TURN,)),
    ],
)
def test_the_files_beside_a_tokenizer_say_how_texts_end(tmp_path, files, bos, eos):
    """The model's files before the tokenizer's, before the names of its tokens; saved elsewhere without config.json it says the same."""
    for name, values in files.items():
        write(llama3(tmp_path / "m"), name, **values)
    tokenizer = load_tokenizer(llama3(tmp_path / "m"))
    assert (tokenizer.special.bos, tokenizer.special.eos) == (bos, eos)
    (tmp_path / "kept").mkdir()
    tokenizer.save(tmp_path / "kept")
    again = load_tokenizer(tmp_path / "kept").special
    assert (again.bos, again.eos) == (bos, eos)
    assert tokenizer.end_of_text == eos[0]
    assert tokenizer.begin_of_text == (eos[0] if bos is None else bos)


def test_texts_stand_between_begin_and_end(tmp_path):
    """Where another token begins a text than ends it, each text of the training data has both; where it is one token, only the end."""
    (tmp_path / "t.txt").write_text("ab")
    letters = [LETTERS.index("a"), LETTERS.index("b")]
    for path, expected in ((llama3(tmp_path / "m"), [BEGIN, *letters, END]), (llama3(tmp_path / "n", special=["<|endoftext|>"]), [*letters, 256])):
        found = open_dataset(DataSpec("text", str(tmp_path / "t.txt"), tokenizer_path=str(path), vocab_size=300))
        assert found.train.window(0, found.train.num_tokens).tolist() == expected
        tokenize_dataset(DataSpec("text", str(tmp_path / "t.txt"), tokenizer_path=str(path), vocab_size=300), tmp_path / f"out-{path.name}")
        assert np.fromfile(tmp_path / f"out-{path.name}" / "train.bin", np.uint16).tolist() == expected


def test_an_end_that_is_not_known_is_asked_for(tmp_path):
    """Not id 0: the message says which file to write, and with it the tokenizer is used."""
    path = llama3(tmp_path / "m", special=["<|whatever|>"])
    (tmp_path / "t.txt").write_text("ab")
    np.zeros(50, np.uint16).tofile(tmp_path / "train.bin")
    text = DataSpec("text", str(tmp_path / "t.txt"), tokenizer_path=str(path), vocab_size=300)
    for spec in (text, DataSpec("train.bin", str(tmp_path), tokenizer_path=str(path), vocab_size=300)):
        with pytest.raises(DataError, match=r'declares the token that ends a text; copy its model\'s .* \{"eos_token": "</s>"\}'):
            open_dataset(spec)
    write(path, "tokenizer_config.json", eos_token="<|whatever|>")
    assert open_dataset(text).train.window(2, 1) == [256]
    (path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json is not whole JSON"):
        open_dataset(text)


def test_ids_may_have_holes(tmp_path):
    """The vocabulary ends behind the largest id, however many there are; so do the lengths in bytes, and the ids' element type."""
    tokenizer = load_tokenizer(llama3(tmp_path, special=(), hole=70_000))
    assert tokenizer.vocab_size == 256 + 70_000 + 1
    lengths = tokenizer.byte_lengths()
    assert lengths.shape == (tokenizer.vocab_size,)
    assert (lengths[0], lengths[300], lengths[-1]) == (1, 0, 4)
    assert tokenizer.special.eos == ()  # the word </s> of some text is no end of one


def test_lengths_in_bytes_are_of_byte_level_alphabets(tmp_path):
    """A sentencepiece token does not say its bytes, so there are none, and no bits per byte."""
    inner = Tokenizer(models.BPE(vocab={"<unk>": 0, "<s>": 1, "</s>": 2, "▁": 3, "a": 4, "▁a": 5}, merges=[("▁", "a")], unk_token="<unk>"))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.byte_lengths() is None
    assert tokenizer.special.eos == (2,)
    assert train_bpe(["ab"], 300).byte_lengths()[1:257].tolist() == [1] * 256


@pytest.mark.parametrize(
    ("size", "num_free", "words"),
    [
        (256, 0, "at least 257, the model has 256; raise vocab_size in the config or use --tokenizer bytes$"),
        (300, 100, "at least 357, 100 of them sentinels, the model has 300; raise vocab_size in the config or use --tokenizer bytes$"),
        (3, 100, "at least 357, 100 of them sentinels, the model has 3; raise vocab_size in the config$"),
    ],
)
def test_a_vocabulary_that_is_too_small_is_the_models(size, num_free, words):
    """The message has the config's number, and what would do there; plain bytes need 256 ids, too."""
    with pytest.raises(DataError, match=words):
        train_bpe(["ab"], size, num_free=num_free)


def test_token_ids_and_the_tokenizer_that_is_named_belong_together(tmp_path):
    """train.bin has its tokenizer beside it; another one that is named is refused, the same one is not, and bpe means the one beside."""
    ours = llama3(tmp_path / "ours")
    np.zeros(50, np.uint16).tofile(ours / "train.bin")
    other = llama3(tmp_path / "other", special=["<|end_of_text|>", "<|begin_of_text|>"])
    spec = DataSpec("train.bin", str(ours), vocab_size=300)
    with pytest.raises(UsageError, match=r"holds ids of .*tokenizer\.json, and .*other gives words other ids; use weights"):
        check_spec(DataSpec("train.bin", str(ours), tokenizer_path=str(other), vocab_size=300))
    check_spec(DataSpec("train.bin", str(ours), tokenizer_path=str(llama3(tmp_path / "same")), vocab_size=300))
    assert open_dataset(DataSpec("train.bin", str(ours), tokenizer="bpe", vocab_size=300)).tokenizer.special == open_dataset(spec).tokenizer.special
    (ours / "tokenizer.json").unlink()
    with pytest.raises(UsageError, match=r"--tokenizer bpe with --dataset train\.bin .* there is no .*tokenizer\.json"):
        check_spec(DataSpec("train.bin", str(ours), tokenizer="bpe", vocab_size=300))


def test_prepared_data_fit_the_vocabulary_that_was_asked_for(tmp_path):
    """--vocab-size is the most ids that may occur; a tokenizer may have more, as long as none of them does."""
    (tmp_path / "t.txt").write_text("ab")
    spec = DataSpec("text", str(tmp_path / "t.txt"), tokenizer_path=str(llama3(tmp_path / "m")), vocab_size=257)
    with pytest.raises(DataError, match=r"at its beginning or end, has the token <\|end_of_text\|> with the id 257, and .* the ids 0 to 256"):
        tokenize_dataset(spec, tmp_path / "out")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["m", "t.txt"]
    assert tokenize_dataset(replace(spec, vocab_size=258), tmp_path / "out").num_train == 4
