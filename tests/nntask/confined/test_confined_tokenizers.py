"""Tokenizers whose rules are not known to be bounded: they work in a confined process, with the same ids, and hostile ones are refused there."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tokenizers
from support.gguf_tokenizers import byte_level, sentence_piece
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from nntask.data.encoding import RowEncoder
from nntask.data.foreign_tokenizer import TOKENIZER_FILE
from nntask.data.rule_bounds import has_long_value, normalizer_of, sections_of, unbounded_rule
from nntask.data.token_rules import ConfinedRules, LocalRules
from nntask.data.tokenizer import BpeTokenizer, load_tokenizer
from nntask.errors import DataError
from nntask.gguf.pre_tokenizers import RULES

TEXTS = ["", "a", "the cat sat  on the mat\n\nand it's 2024!", "é 😀 ﷺ <sep> b", "aaa" * 500]
DOUBLE: dict[str, Any] = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
LEVEL: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
TWICE: dict[str, Any] = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2,
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {},
}


def split(regex: str) -> dict[str, Any]:
    """A pre-tokenizer."""
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def many(kind: str, part: dict[str, Any], count: int) -> dict[str, Any]:
    """A sequence of equal steps."""
    parts = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "post_processor": "processors", "decoder": "decoders"}
    return {kind: {"type": "Sequence", parts[kind]: [part] * count}}


def byte_level_rule(name: str) -> Any:
    """The pre-tokenizer of a rule of llama.cpp."""
    return json.loads(byte_level(name).to_str())["pre_tokenizer"]


def base() -> dict[str, Any]:
    """A tokenizer.json of single letters with two merges, and an added token."""
    inner = byte_level("gpt-2")
    inner.add_special_tokens(["<sep>", "<|endoftext|>"])
    found: dict[str, Any] = json.loads(inner.to_str())
    return found


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    """Writes a tokenizer.json with other sections; returns its directory."""

    def write(content: dict[str, Any], **changes: Any) -> Path:
        (tmp_path / TOKENIZER_FILE).write_text(json.dumps({**content, **changes}))
        return tmp_path

    return write


MORE_MEMORY, MORE_TIME = "(takes more memory than it may have|writes more than [\\d,]+ bytes)", r"(takes more than \d+ s of processor time|fails)"
HOSTILE: dict[str, tuple[dict[str, Any], str, str]] = {
    "a normalizer that doubles 27 times": (many("normalizer", DOUBLE, 27), "a", MORE_MEMORY),
    "a normalizer that doubles 34 times": (many("normalizer", DOUBLE, 34), "a", MORE_MEMORY),
    "a replacement of 4 kB": ({"normalizer": {**DOUBLE, "content": "b" * 4_000}}, "a" * 200_000, MORE_MEMORY),
    "a regular expression that doubles": (many("normalizer", {**DOUBLE, "pattern": {"Regex": "."}}, 30), "a", MORE_MEMORY),
    "an exponential expression": ({"pre_tokenizer": split("(a|aa)+$")}, "a" * 60 + "b", MORE_TIME),
    "an exponential expression of a normalizer": ({"normalizer": {**DOUBLE, "pattern": {"Regex": "(a|aa)+$"}}}, "a" * 60 + "b", MORE_TIME),
    "bytes of bytes": (many("pre_tokenizer", LEVEL, 40), "é", MORE_MEMORY),
    "a template with the text many times": ({"post_processor": {**TWICE, "single": TWICE["single"] * 5_000}}, "ab" * 1000, MORE_MEMORY),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_rules(name: str, written: Callable[..., Path]) -> None:
    """Rules without bound are refused when they are loaded or at a text, with the memory of their process bounded, and the next text is encoded."""
    changes, text, words = HOSTILE[name]
    with pytest.raises(DataError, match=words) as refusal:
        load_tokenizer(written(base(), **changes)).encode([text], special=True)
    assert "\n" not in str(refusal.value)
    assert re.match(r"(encoding a text of [\d,]+ characters with )?the tokenizer in " + str(written(base())), str(refusal.value))


def test_texts_behind_a_hostile_one(written: Callable[..., Path]) -> None:
    """They are encoded; a note says that the tokenizer is confined, and why."""
    ours = load_tokenizer(written(base(), **HOSTILE["an exponential expression"][0]))
    assert re.search(r"a separate process with limits of time and memory, since it has a rule that nntask does not know: .*\|aa\)\+\$", ours.notes[0])
    want = ours.encode(["cat"])[0]
    with pytest.raises(DataError, match=MORE_TIME):
        ours.encode(["cat", HOSTILE["an exponential expression"][1], "cat"])
    np.testing.assert_array_equal(ours.encode(["cat"])[0], want)


def test_a_hostile_decoder(written: Callable[..., Path]) -> None:
    """Ids whose text doubles are refused; those of other texts are decoded."""
    ours = load_tokenizer(written(base(), **many("decoder", {**DOUBLE}, 34)))
    a, b = (int(ours.encode([text])[0][0]) for text in "ab")
    assert ours.decode([b]) == "b"
    with pytest.raises(DataError, match=f"decoding ids with the tokenizer in .* {MORE_MEMORY}"):
        ours.decode([a])


def test_a_normalizer_works_while_a_file_is_loaded(written: Callable[..., Path]) -> None:
    """It brings added tokens to its form, so it is not loaded in this process."""
    content = base()
    content["added_tokens"].append({**content["added_tokens"][0], "id": 300, "content": "aaaa", "special": False, "normalized": True})
    with pytest.raises(DataError, match=f"the tokenizer in .* {MORE_MEMORY}; name another with --tokenizer-path DIR"):
        load_tokenizer(written(content, **many("normalizer", DOUBLE, 34)))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (models.WordPiece({"[UNK]": 0, "a": 1, "##a": 2}, unk_token="[UNK]", max_input_chars_per_word=10**9), "words of 1000000000 characters"),
        (models.WordPiece({"u" * 300: 0, "a": 1}, unk_token="u" * 300), "unk_token of 300 characters"),
        (models.Unigram([("a" * 300, -1.0), ("a", -2.0)], 1, False), "a token of 300 characters"),
        (models.BPE({"a": 0, "a" + "z" * 300: 1}, [], end_of_word_suffix="z" * 300), "end_of_word_suffix of 300 characters"),
    ],
)
def test_models_without_bound(model: Any, words: str, tmp_path: Path) -> None:
    """Sizes that make the time or memory of a word grow beyond its length confine a tokenizer."""
    tokenizers.Tokenizer(model).save(str(tmp_path / TOKENIZER_FILE))
    ours = load_tokenizer(tmp_path)
    assert words in ours.notes[0]
    assert ours.encode(["a"])[0].size == 1


def test_a_panic_in_this_process_is_an_error_of_the_text(written: Callable[..., Path]) -> None:
    """A known expression can give up at a long text, which the package tells by a panic that is no Exception."""
    inner = tokenizers.Tokenizer.from_str(json.dumps({**base(), "pre_tokenizer": split("(a|aa)+$")}))
    rules = LocalRules(inner, "DIR")
    with pytest.raises(DataError, match=r"the tokenizer in DIR fails at a text .*; change the text"):
        rules.encode(["a" * 60 + "b"])


HARMLESS: dict[str, dict[str, Any]] = {
    "an unknown expression": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split("(?:c|s)at|the "), LEVEL]}},
    "a long replacement": {"normalizer": {**DOUBLE, "content": "nine letters or more"}},
    "a template with the text twice": {"post_processor": TWICE},
}


@pytest.mark.parametrize("name", HARMLESS)
def test_confined_rules_are_the_same_rules(name: str, written: Callable[..., Path], tmp_path: Path) -> None:
    """Ids, rows, offsets, texts and the saved file are those of the tokenizer in this process."""
    content = {**base(), **HARMLESS[name]}
    ours = load_tokenizer(written(content))
    assert isinstance(ours, BpeTokenizer)
    assert isinstance(ours.rules, ConfinedRules)
    inner = tokenizers.Tokenizer.from_str(json.dumps(content))
    theirs = BpeTokenizer(inner, rules=LocalRules(inner))
    for special in (False, True):
        for one, other in zip(ours.encode(TEXTS, special=special), theirs.encode(TEXTS, special=special), strict=True):
            np.testing.assert_array_equal(one, other)
    for text in TEXTS:
        assert ours.decode(list(ours.encode([text])[0])) == theirs.decode(list(theirs.encode([text])[0]))
        for one, other in zip(RowEncoder(ours).with_offsets(text), RowEncoder(theirs).with_offsets(text), strict=True):
            np.testing.assert_array_equal(one, other)
        for second, limit in ((None, 7), ("it sat", 7), ("it sat", 1000)):
            for one, other in zip(RowEncoder(ours).row(text, second, limit), RowEncoder(theirs).row(text, second, limit), strict=True):
                np.testing.assert_array_equal(one, other)
    assert [chunk for chunk, _ in ours.encode_long(iter(["the cat ", "sat"]))] == ["the cat sat"]
    (tmp_path / "saved").mkdir()
    ours.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert isinstance(again, BpeTokenizer)
    assert again.content() == ours.content()
    assert json.loads(again.content()) == json.loads(inner.to_str())


def test_a_long_text_of_short_words(written: Callable[..., Path]) -> None:
    """The memory of a confined process is enough for a text in which each letter is a token and a word."""
    ours = load_tokenizer(written(base(), pre_tokenizer={"type": "Sequence", "pretokenizers": [split("(?:c|s)at|."), LEVEL]}))
    assert ours.encode(["a b c d " * (1 << 16)])[0].size == 1 << 19


def test_a_confined_process_ends_with_its_tokenizer(written: Callable[..., Path]) -> None:
    """No process is left when a tokenizer is closed, or is no longer used."""
    before = set(psutil.Process().children())
    ours = load_tokenizer(written({**base(), **HARMLESS["a long replacement"]}))
    assert set(psutil.Process().children()) != before
    del ours
    assert set(psutil.Process().children()) == before


PUBLISHED: dict[str, Callable[[], Any]] = {
    "BERT": lambda: tokenized(
        models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"),
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
        processors.BertProcessing(("[UNK]", 0), ("[UNK]", 0)),
        decoders.WordPiece(prefix="##"),
    ),
    "ALBERT": lambda: tokenized(
        models.Unigram([("<unk>", 0.0), ("▁a", -1.0)], 0, False),
        normalizers.Sequence(
            [
                normalizers.Replace("``", '"'),
                normalizers.Replace("''", '"'),
                normalizers.NFKD(),
                normalizers.StripAccents(),
                normalizers.Lowercase(),
                normalizers.Replace(tokenizers.Regex(" {2,}"), " "),
            ]
        ),
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]),
        processors.TemplateProcessing("<unk> $A <unk>", "<unk> $A <unk> $B:1 <unk>:1", [("<unk>", 0)]),
        decoders.Metaspace(),
    ),
    "T5, as transformers converts it": lambda: tokenized(
        models.Unigram([("<unk>", 0.0), ("▁a", -1.0)], 0, False),
        normalizers.Sequence([precompiled(), normalizers.Strip(left=False), normalizers.Replace(tokenizers.Regex(" {2,}"), "▁")]),
        pre_tokenizers.Metaspace(),
        processors.TemplateProcessing("$A <unk>", "$A <unk> $B:1 <unk>:1", [("<unk>", 0)]),
        decoders.Metaspace(),
    ),
    "XLNet": lambda: tokenized(
        models.Unigram([("<unk>", 0.0), ("▁a", -1.0)], 0, False),
        normalizers.Sequence(
            [normalizers.Replace("``", '"'), normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase(), precompiled()]
        ),
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]),
        None,
        decoders.Metaspace(),
    ),
    "CLIP": lambda: tokenized(
        models.BPE({"a</w>": 0}, [], end_of_word_suffix="</w>"),
        normalizers.Sequence([normalizers.NFC(), normalizers.Replace(tokenizers.Regex(r"\s+"), " "), normalizers.Lowercase()]),
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tokenizers.Regex(r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"), behavior="removed", invert=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        ),
        processors.RobertaProcessing(("a</w>", 0), ("a</w>", 0), trim_offsets=False, add_prefix_space=False),
        decoders.ByteLevel(),
    ),
    "Wav2Vec2": lambda: tokenized(models.WordLevel({"<pad>": 0}, "<pad>"), None, pre_tokenizers.WhitespaceSplit(), None, decoders.CTC()),
    "Falcon": lambda: tokenized(
        models.BPE(),
        None,
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Punctuation("contiguous"),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
                pre_tokenizers.Digits(),
                pre_tokenizers.Split(tokenizers.Regex("[0-9][0-9][0-9]"), "isolated"),
            ]
        ),
        processors.ByteLevel(),
        decoders.ByteLevel(),
    ),
    "LLaMA": lambda: sentence_piece(has_prefix=True),
    "Gemma": lambda: sentence_piece(has_prefix=False),
}


def precompiled() -> Any:
    """A normalizer with a table of one empty node, and the longest of Unicode's forms as the only text."""
    return normalizers.Precompiled((4).to_bytes(4, "little") + bytes(4) + "صلى الله عليه وسلم".encode() + b"\0")


def tokenized(model: Any, normalizer: Any, splitter: Any, template: Any, decoder: Any) -> tokenizers.Tokenizer:
    """A tokenizer of these parts."""
    found = tokenizers.Tokenizer(model)
    for name, part in (("normalizer", normalizer), ("pre_tokenizer", splitter), ("post_processor", template), ("decoder", decoder)):
        if part is not None:
            setattr(found, name, part)
    return found


@pytest.mark.parametrize("name", [*PUBLISHED, *(rule.name for rule in RULES if rule.name != "tiny_aya")])
def test_published_rules_stay_in_this_process(name: str) -> None:
    """Tokenizers of the published families are not confined."""
    inner = PUBLISHED[name]() if name in PUBLISHED else byte_level(name)
    assert unbounded_rule(sections_of(inner)) == ""


SIGN, FORM = {"type": "Metaspace", "replacement": "a", "prepend_scheme": "always", "split": True}, {"type": "NFKC"}
OTHER_SIGN = {**SIGN, "replacement": "b"}
PREPEND = {"type": "Prepend", "prepend": "b" * 16}
BERT = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True}
CTC = {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}
CLASSES: dict[str, Any] = {"X": {"id": "X", "ids": [0] * 300, "tokens": ["a"] * 300}}
TEMPLATE = {**TWICE, "single": [{"SpecialToken": {"id": "X", "type_id": 0}}, *TWICE["single"][:1]], "special_tokens": CLASSES}
UNBOUNDED: dict[str, dict[str, Any]] = {
    "a prefix of each part of a text": {"normalizer": PREPEND},
    "prefixes of each part of a text": many("normalizer", {**PREPEND, "prepend": "b"}, 5),
    "two signs in turn": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [SIGN, OTHER_SIGN] * 3}},
    "a normalizer and signs": {**many("normalizer", DOUBLE, 3), "pre_tokenizer": {"type": "Sequence", "pretokenizers": [SIGN, OTHER_SIGN]}},
    "a form of letters that were made": {"normalizer": {"type": "Sequence", "normalizers": [{**DOUBLE, "content": "ﷺ"}, FORM]}},
    "spaces around spaced characters": many("normalizer", BERT, 6),
    "a long text that is searched for": {"pre_tokenizer": {**split(""), "pattern": {"String": "a" * 300 + "b"}}},
    "many steps": many("pre_tokenizer", {"type": "Digits", "individual_digits": True}, 40),
    "a look ahead from each digit": {"pre_tokenizer": byte_level_rule("tiny_aya")},
    "a decoder of nothing": {"decoder": {"type": "BPEDecoder", "suffix": ""}},
    "a pause of nothing": {"decoder": {**CTC, "word_delimiter_token": ""}},
    "a pad of nothing": {"decoder": {**CTC, "pad_token": ""}},
    "words of words": many("decoder", {"type": "WordPiece", "prefix": "##", "cleanup": True}, 10),
    "a template of many ids": {"post_processor": TEMPLATE},
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_rules_without_bound_are_not_of_this_process(name: str) -> None:
    """Steps that multiply a text, alone or together, and those whose time is more than proportional to it, are loaded by the package and confined."""
    inner = tokenizers.Tokenizer.from_str(json.dumps({**base(), **UNBOUNDED[name]}))
    assert unbounded_rule(sections_of(inner))


@pytest.mark.parametrize("character", ["a", '"', "\\", " "])
@pytest.mark.parametrize("place", ["tokens", "ids"])
def test_a_part_that_is_too_long(place: str, character: str, written: Callable[..., Path]) -> None:
    """A token that the package would overflow its stack with, and long lists of ids, are refused before it reads the file."""
    vocabulary = [[character * 1_000_000, -1.0], ["a", -2.0]] if place == "tokens" else [["a", -1.0]]
    numbers = {"X": {**CLASSES["X"], "ids": [0] * 100_000}} if place == "ids" else CLASSES
    content = {**base(), "model": {"type": "Unigram", "unk_id": 0, "vocab": vocabulary}, "post_processor": {**TEMPLATE, "special_tokens": numbers}}
    with pytest.raises(DataError, match="has a token or a list of numbers that is longer than any of a published tokenizer"):
        load_tokenizer(written(content))


def test_long_tables_of_normalizers(written: Callable[..., Path]) -> None:
    """Only the table itself may be long, not a token beside it."""
    content = {**base(), "normalizer": {"type": "Precompiled", "precompiled_charsmap": "QUJD" * 20_000}}
    assert not has_long_value(json.dumps(content).encode())
    content["model"]["vocab"]["a" * 80_000] = 999
    assert has_long_value(json.dumps(content).encode())


@pytest.mark.parametrize(("content", "side"), [(" ", "lstrip"), ("\n", "rstrip"), ("q", "rstrip")])
def test_an_added_token_of_spaces(content: str, side: str, written: Callable[..., Path]) -> None:
    """One that takes the spaces next to it, and is one itself, also after normalization, looks through a whole run for each of them."""
    file = base()
    token = {**file["added_tokens"][0], "id": 300, "content": content, side: True, "special": False, "normalized": content == "q"}
    file["added_tokens"].append(token)
    assert "an added token of 1 spaces" in load_tokenizer(written(file, normalizer={**DOUBLE, "pattern": {"String": "q"}, "content": " "})).notes[0]


def test_defaults_of_confined_rules(written: Callable[..., Path]) -> None:
    """Keys that old files leave out have the values that the package gives them."""
    sign = {"type": "Metaspace", "replacement": "▁", "add_prefix_space": True}
    path = written(base(), normalizer={**DOUBLE, "content": "nine letters or more"}, pre_tokenizer=sign)
    (path / "tokenizer_config.json").write_text('{"add_prefix_space": false}')
    with pytest.raises(DataError, match=r"add_prefix_space in tokenizer_config\.json"):
        load_tokenizer(path)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ('{"normalizer": {"type": "NFC"}, "model": {"vocab": {}}}', "NFC"),
        ('{"model": {"vocab": {"normalizer": 1}}, "normalizer": {"type": "NFC"}}', "NFC"),
        ('{"normalizer": null, "model": {}, "normalizer": {"type": "NFC"}}', "NFC"),
        ('{"normalizer": null, "model": {}, "norm\\u0061lizer": {"type": "NFC"}}', "NFC"),
        ('{"normalizer": {"type": "NFC"}, "model": {"vocab": {"normalizer": 1}}}', "NFC"),
        ('{"added_tokens": ["é"], "normalizer": {"type": "NFC"}, "model": {}}', "NFC"),
        ('{"model": {}}', None),
    ],
)
@pytest.mark.parametrize("is_long", [False, True])
def test_the_normalizer_that_counts(text: str, want: str | None, is_long: bool) -> None:
    """It is found without parsing the model, and found where another one comes last, or has its name in other letters."""
    found = normalizer_of(text.encode() + b" " * (1 << 18) * is_long)
    assert (found or {}).get("type") == want
    assert (json.loads(text).get("normalizer") or {}).get("type") == want
