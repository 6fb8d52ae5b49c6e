"""Rules that cut texts into words: ids of texts as llama.cpp gives them, and every spelling of a rule in a tokenizer.json."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.gguf_rules import APPROXIMATED, keys_of_rule, record
from support.gguf_tokenizers import as_read
from tokenizers import Tokenizer

from nntask.gguf.pre_tokenizers import BY_NAME, RULES, rule_of
from nntask.gguf.vocabulary import tokenizer_from

NAMES = [rule.name for rule in RULES]


def tokenizer_of(name: str) -> Tokenizer:
    """The tokenizer of the record with a rule."""
    keys = keys_of_rule(name, record()["merges"])
    text = tokenizer_from(as_read(keys), len(keys["tokenizer.ggml.tokens"]))
    assert text is not None
    return Tokenizer.from_str(text)


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_llama_cpp(name: str) -> None:
    """For 21 texts with a vocabulary whose tokens go across words, but for those that llama.cpp's expressions approximate."""
    found, inner = record(), tokenizer_of(name)
    ids = [inner.encode(text).ids for text in found["texts"]]
    if BY_NAME[name].adds_bos:  # unless the file says otherwise, as this one does
        assert all(each[:1] != [0] for each in ids if each)
    for text, ours, theirs in zip(found["texts"], ids, found["ids"][name], strict=True):
        assert (ours == theirs) == (text not in APPROXIMATED.get(name, ())), text


def test_the_record_tells_rules_apart() -> None:
    """Of 24 rules the texts tell 18 apart; the others differ in ends of lines, long runs of spaces, or whole words."""
    ids = record()["ids"]
    assert sorted(ids) == sorted(NAMES)
    assert len({json.dumps(each) for each in ids.values()}) == 18


@pytest.mark.parametrize("name", [name for rule in RULES for name in rule.others])
def test_other_names_are_the_same_rule(name: str) -> None:
    """What a file says under another name."""
    assert tokenizer_of(name).to_str() == tokenizer_of(BY_NAME[name].name).to_str()


def as_content(pre_tokenizer: dict[str, Any], *, ignores: bool, normalizer: dict[str, Any] | None = None) -> dict[str, Any]:
    """A tokenizer.json as far as rules are concerned."""
    return {"pre_tokenizer": pre_tokenizer, "normalizer": normalizer, "model": {"ignore_merges": ignores}}


def test_a_rule_is_found_by_what_it_does() -> None:
    """Steps inside of steps, digits as expressions, and matches that cover a text are the same rule; anything else is none."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    for rule in RULES:
        normalizer = {"type": "NFC"} if rule.is_composed else None
        steps = [{"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False} for each in rule.patterns]
        for spelling in ([*steps, level], [{"type": "Sequence", "pretokenizers": steps}, level]):
            found = rule_of(as_content({"type": "Sequence", "pretokenizers": spelling}, ignores=rule.ignores_merges, normalizer=normalizer))
            assert found == rule
        assert rule_of(as_content({"type": "Sequence", "pretokenizers": steps}, ignores=rule.ignores_merges)) is None
    covering = {"type": "Split", "pattern": {"Regex": BY_NAME["gpt-4o"].patterns[0]}, "behavior": "Removed", "invert": True}
    assert rule_of(as_content({"type": "Sequence", "pretokenizers": [covering, level]}, ignores=False)) == BY_NAME["gpt-4o"]
    cutting = {**covering, "pattern": {"Regex": r"\p{N}"}}
    assert rule_of(as_content({"type": "Sequence", "pretokenizers": [cutting, level]}, ignores=False)) is None
    for wrong in ({"type": "Whitespace"}, {**level, "add_prefix_space": True, "use_regex": True}, level, {"type": "Metaspace"}):
        assert rule_of(as_content(wrong, ignores=False)) is None
    assert rule_of(as_content(BY_NAME["qwen2"].pre_tokenizer(), ignores=True)) is None
