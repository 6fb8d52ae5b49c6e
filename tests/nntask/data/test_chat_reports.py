"""Situations of public reports about chat data and templates, each set up on small inputs; the list of situations names their sources."""

from __future__ import annotations

import json
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from support.chat_templates import DEEPSEEK, GEMMA, MISTRAL, PHI3, QWEN2, QWEN3, SMOLLM, chat_tokenizer, template_of

from nntask.data import load_tokenizer
from nntask.data.chat import ChatTemplate
from nntask.data.encoding import RowEncoder, conversation_ids
from nntask.data.json_lines import Record
from nntask.data.objectives import Objective
from nntask.data.row_counts import RowCounts
from nntask.errors import DataError

USER, REPLY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
TALK = [USER, REPLY, {"role": "user", "content": "sure?"}, {"role": "assistant", "content": "yes"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}}]
CALL = {"type": "function", "function": {"name": "look", "arguments": '{"at": "the mat"}'}}


def rendered(source: str, row: dict[str, Any], counts: RowCounts | None = None) -> tuple[str, list[str]]:
    """The text of a row, and its answers."""
    text, spans = ChatTemplate(source, "t.jinja", {"bos_token": "<s>", "eos_token": "</s>"}).rendered(Record(row, "x.jsonl line 1"), counts)
    return text, [text[begin:end] for begin, end in spans]


def counted(source: str, row: dict[str, Any]) -> list[str]:
    """Keys of the findings of a row."""
    counts = RowCounts(Objective(), "training")
    counts.num_rows = 1
    rendered(source, row, counts)
    return [finding.key for finding in counts.findings()]


def test_a_published_template_without_blocks_has_answers() -> None:
    """Masks of transformers are all zero there, and trainers stop or learn nothing."""
    assert rendered(QWEN3, {"messages": TALK})[1] == ["ho<|im_end|>\n", "<think>\n\n</think>\n\nyes<|im_end|>\n"]


def test_the_end_of_a_turn_is_learnt() -> None:
    """It is not the tokenizer's end of text with these templates, and a model that never learns it never stops."""
    assert rendered(GEMMA, {"messages": TALK})[1] == ["ho<end_of_turn>\n", "yes<end_of_turn>\n"]


def test_an_end_that_is_the_padding_is_learnt(tmp_path: Path) -> None:
    """What counts is told by place and not by id."""
    place = chat_tokenizer(tmp_path / "tok", MISTRAL)
    about = json.loads((place / "tokenizer_config.json").read_text())
    (place / "tokenizer_config.json").write_text(json.dumps({**about, "pad_token": "</s>"}))
    tokenizer = load_tokenizer(place)
    ids, counts = RowEncoder(tokenizer).answers(*template_of(tokenizer).rendered(Record({"messages": TALK}, "line 1")))
    assert (ids[counts] == tokenizer.special.eos[0]).sum() == 2


def test_answers_between_instructions_are_found() -> None:
    """Where an answer has no header of its own, and the same words are other tokens behind a bracket."""
    assert rendered(MISTRAL, {"messages": [USER, {**REPLY, "content": "hi"}, USER, {**REPLY, "content": "hi"}]})[1] == ["hi</s>", "hi</s>"]


@pytest.mark.parametrize("begin", [False, True])
def test_a_beginning_is_there_once(tmp_path: Path, begin: bool) -> None:
    """Also where the tokenizer puts it in front of a text, and the template as well."""
    tokenizer = load_tokenizer(chat_tokenizer(tmp_path / "tok", MISTRAL, begin=begin))
    template = template_of(tokenizer)
    ids, _ = RowEncoder(tokenizer).answers(*template.rendered(Record({"messages": TALK}, "line 1")))
    assert (ids == tokenizer.special.bos).sum() == 1
    assert conversation_ids(tokenizer, template.prompt(TALK[:1], "line 1")).count(tokenizer.special.bos or 0) == 1


@pytest.mark.parametrize(
    "writes", ["{{ c.function.arguments | tojson }}", "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}"]
)
@pytest.mark.parametrize("as_object", [False, True])
def test_arguments_are_no_string_in_a_string(writes: str, as_object: bool) -> None:
    """OpenAI's format has a string of JSON, which templates escape again, or cannot take apart."""
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}" + writes + "{% endfor %}<end>{% endfor %}"
    call = {**CALL, "function": {"name": "look", "arguments": {"at": "the mat"}}} if as_object else CALL
    _, answers = rendered(source, {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]})
    assert answers in (['<assistant>{"at": "the mat"}<end>'], ["<assistant>at=the mat<end>"])


def test_text_in_place_of_content_is_not_none() -> None:
    """A call has null as its content, which templates wrote as the word None."""
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}<end>{% endfor %}"
    assert "None" not in rendered(source, {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]})[0]


def test_nulls_of_tables_are_no_parameters() -> None:
    """Tools with different parameters get each other's as null from a table of columns; so do the arguments of calls."""
    padded = json.loads(json.dumps(TOOLS))
    padded[0]["function"]["parameters"]["properties"] |= {"n": None}
    padded[0]["function"] |= {"description": None}
    assert rendered(QWEN2, {"messages": TALK, "tools": padded}) == rendered(QWEN2, {"messages": TALK, "tools": TOOLS})
    assert counted(QWEN2, {"messages": TALK, "tools": padded}) == ["nulls_in_tools"]
    assert counted(QWEN2, {"messages": TALK, "tools": TOOLS}) == []
    kept = json.loads(json.dumps(TOOLS))
    kept[0]["function"]["parameters"]["properties"]["at"] |= {"default": None, "enum": ["a", None]}
    assert '"default": null, "enum": ["a", null]' in rendered(QWEN2, {"messages": TALK, "tools": kept})[0]
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "x", "n": None}}}
    assert counted(QWEN2, {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}) == ["nulls_in_tools"]


@pytest.mark.parametrize("tools", ["null", "[]", "", None, []])
def test_no_tools_in_any_spelling(tools: Any) -> None:
    """Tables write a missing list as JSON's null in a string."""
    assert rendered(QWEN2, {"messages": TALK, "tools": tools}) == rendered(QWEN2, {"messages": TALK})


def test_thoughts_that_a_template_cuts_are_counted() -> None:
    """A model trained so stopped thinking, and nobody was told."""
    thought = {"role": "assistant", "content": "<think>why</think>ho"}
    assert rendered(DEEPSEEK, {"messages": [USER, thought]})[1] == ["ho<|eot_id|>"]
    assert counted(DEEPSEEK, {"messages": [USER, thought]}) == ["answers_changed"]
    assert counted(DEEPSEEK, {"messages": TALK}) == []


def test_thoughts_that_a_template_does_not_know_are_refused() -> None:
    """They are in a key of their own, and were lost in silence."""
    with pytest.raises(DataError, match='has "reasoning_content" in a message'):
        rendered(SMOLLM, {"messages": [USER, {**REPLY, "reasoning_content": "why"}]})


def test_answers_that_are_rewritten_later_are_told() -> None:
    """A template that takes thoughts out of all answers but the last: prefixes are no beginnings of the whole text."""
    source = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
        "{% else %}{{ m.content }}{% endif %}<end>{% endfor %}{% if add_generation_prompt %}<assistant><think>{% endif %}"
    )
    thought = {"role": "assistant", "content": "<think>why</think>ho"}
    assert rendered(source, {"messages": [USER, thought, USER, thought]})[1] == ["ho<end>", "why</think>ho<end>"]


def test_a_system_prompt_is_not_lost() -> None:
    """The first template of its kind wrote none, others write it before a last question only."""
    for source in (PHI3, MISTRAL):
        with pytest.raises(DataError, match=r"role system that the chat template of t\.jinja leaves out: 'be brief'"):
            rendered(source, {"messages": [{"role": "system", "content": "be brief"}, *TALK]})
    with pytest.raises(DataError, match="System role not supported"):
        rendered(GEMMA, {"messages": [{"role": "system", "content": "be brief"}, *TALK]})


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": TALK, "weight": 0.5}, '"weight", which is not read: all rows count alike'),
        ({"messages": TALK, "system": "be brief"}, '"system", which is not read: a message outside the conversation'),
        ({"messages": TALK, "images": ["a.png"]}, '"images", which is not read: a text model reads no media'),
        ({"messages": TALK, "chosen": TALK, "rejected": TALK}, '"chosen", which is not read: preferences are not learnt'),
        ({"messages": TALK, "functions": [{"name": "f"}]}, '"functions", which is not read: functions of the older format'),
        ({"messages": [USER, {**REPLY, "train": False}]}, '"train", which is not read: an answer with "weight": 0 is not learnt'),
        ({"messages": [USER, {**REPLY, "loss": False, "weight": 0.3}]}, 'must have 0 or 1 as the "weight"'),
        ({"messages": [USER, {**REPLY, "content": [{"type": "text", "text": "ho", "weight": 0}]}]}, "has content that is not text"),
        ({"messages": [USER, {**REPLY, "content": {"text": "ho"}}]}, 'must have a string under "content"'),
        ({"messages": [{"role": "human", "content": "hi"}, {"role": "gpt", "content": "ho"}]}, "has no message of the role assistant"),
        ({"messages": json.dumps(TALK)}, 'must have "messages", such as'),
        ({"messages": TALK, "tools": [reduce(lambda inner, _: {"a": inner}, range(5000), {})]}, '"tools" that are nested too deeply'),
        ({"messages": TALK, "chat_template": SMOLLM}, '"chat_template", which is not read: all rows have one template'),
    ],
)
def test_what_changes_the_meaning_of_a_row_is_refused(row: dict[str, Any], words: str) -> None:
    """In one sentence with the line, where other trainers learnt something else."""
    with pytest.raises(DataError, match=words) as error:
        rendered(SMOLLM, row, RowCounts(Objective(), "training"))
    assert "\n" not in str(error.value)
