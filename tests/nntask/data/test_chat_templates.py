"""Chat templates in the styles of published models: text, ids and answers are those of transformers, or the row is refused in a sentence."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from support.chat_templates import BLOCKS, DEEPSEEK, LLAMA, QWEN2, QWEN3, SMOLLM, TEMPLATES, chat_tokenizer, template_of

from nntask.data import load_tokenizer
from nntask.data.chat import ChatTemplate
from nntask.data.chat_answers import Answers
from nntask.data.encoding import RowEncoder
from nntask.data.json_lines import Record
from nntask.errors import DataError

transformers = pytest.importorskip("transformers")

SYSTEM = {"role": "system", "content": "be brief"}
TALK = [
    {"role": "user", "content": " what is it? "},
    {"role": "assistant", "content": "a cat"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "yes"},
]
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks <there>.", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"type": "function", "id": "call_1", "function": {"name": "look", "arguments": {"at": "the mat", "n": 2}}}
CALLS = [
    {"role": "user", "content": "look"},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "content": "a cat", "tool_call_id": "call_1"},
    {"role": "assistant", "content": "it is a cat"},
]
ENDS = {
    "llama": "<|eot_id|>",
    "qwen2": "<|im_end|>\n",
    "qwen3": "<|im_end|>\n",
    "mistral": "</s>",
    "gemma": "<end_of_turn>\n",
    "gemma3": "<end_of_turn>\n",
    "phi3": "<|end|>\n",
    "phi4": "<|end|>",
    "deepseek": "<|eot_id|>",
    "smollm": "<|im_end|>\n",
    "blocks": "<|im_end|>",
}
"""What each template closes an answer with."""
LAST = {"phi3": "</s>", "phi4": "</s>"}
"""What it writes at the end of a conversation beside that."""


def parts_of(directory: Path, row: dict[str, Any]) -> tuple[str, list[str], list[int], list[int]]:
    """Text, answers, ids and marks of a row by the template of a directory."""
    tokenizer = load_tokenizer(directory)
    template, line = template_of(tokenizer), Record(row, "x.jsonl line 1")
    text, spans = template.rendered(line)
    ids, counts = RowEncoder(tokenizer).answers(text, spans)
    return text, [text[begin:end] for begin, end in spans], ids.tolist(), counts.astype(int).tolist()


def expected_of(directory: Path, row: dict[str, Any], **how: Any) -> Any:
    """What transformers makes of the row."""
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    more = row.get("chat_template_kwargs") or {}
    return theirs.apply_chat_template(row["messages"], tools=row.get("tools"), documents=row.get("documents"), **more, **how)


def check(directory: Path, row: dict[str, Any]) -> tuple[str, list[str]]:
    """Check text and ids against transformers; returns the text and the answers."""
    text, answers, ids, counts = parts_of(directory, row)
    assert text == expected_of(directory, row, tokenize=False)
    assert ids == expected_of(directory, row, tokenize=True, return_dict=False)
    decode = load_tokenizer(directory).inner.decode
    assert decode([each for each, learnt in zip(ids, counts, strict=True) if learnt], skip_special_tokens=False) == "".join(answers)
    return text, answers


@pytest.mark.parametrize("name", TEMPLATES)
def test_conversations_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """With and without a system prompt; the answers are what the assistant says with what closes it."""
    place = chat_tokenizer(tmp_path / "tok", TEMPLATES[name])
    date = {"chat_template_kwargs": {"date_string": "1 Jan 2025"}} if name == "llama" else {}
    close = ENDS[name]
    for messages in (TALK, [SYSTEM, *TALK], TALK[:2]):
        if messages[0] is SYSTEM and name in ("gemma", "phi3", "mistral"):  # the last writes it before a last question only
            words = "System role not supported" if name == "gemma" else "leaves out: 'be brief'"
            with pytest.raises(DataError, match=words):
                parts_of(place, {"messages": messages, **date})
            continue
        _, answers = check(place, {"messages": messages, **date})
        before = "<think>\n\n</think>\n\n" if name == "qwen3" else ""  # which the last answer of this template has
        said = [each["content"] + close for each in messages if each["role"] == "assistant"]
        assert answers == [*said[:-1], before + said[-1] + LAST.get(name, "")]


@pytest.mark.parametrize(("name", "source"), [("llama", LLAMA), ("qwen2", QWEN2), ("qwen3", QWEN3)])
def test_function_calls(tmp_path: Path, name: str, source: str) -> None:
    """Calls are answers, what functions return is not; tools are written by the templates that know them."""
    place = chat_tokenizer(tmp_path / "tok", source)
    row: dict[str, Any] = {"messages": [each for each in CALLS if name != "qwen3" or each["role"] != "tool"]}
    if name == "llama":
        row["chat_template_kwargs"] = {"date_string": "1 Jan 2025"}
    if name != "qwen3":
        row["tools"] = TOOLS
    text, answers = check(place, row)
    assert ("Looks <there>." in text) == (name != "qwen3")
    assert answers[0].count('{"at": "the mat", "n": 2}') == 1
    assert answers[1].startswith("<think>" if name == "qwen3" else "it is a cat")


@pytest.mark.parametrize(("source", "learnt"), [(QWEN2, '"arguments": {"at": "the mat"}}'), (QWEN3, '"arguments": {"at":"the mat"}}')])
def test_arguments_in_a_string_are_written_once(tmp_path: Path, source: str, learnt: str) -> None:
    """OpenAI's format has them as a string of JSON: an object for a template that writes JSON of them, as they are for one that asks."""
    place = chat_tokenizer(tmp_path / "tok", source)
    call = {"type": "function", "function": {"name": "look", "arguments": '{"at":"the mat"}'}}
    _, answers, *_ = parts_of(place, {"messages": [CALLS[0], {"role": "assistant", "content": None, "tool_calls": [call]}]})
    assert learnt in answers[0]


def test_reasoning(tmp_path: Path) -> None:
    """Under its older names too; one that the template leaves out is no text, and counted where answers are."""
    place = chat_tokenizer(tmp_path / "tok", QWEN3)
    for key in ("reasoning_content", "thinking", "reasoning"):
        _, answers = check(place, {"messages": [TALK[0], {**TALK[1], key: "it purrs"}]})
        assert answers == ["<think>\nit purrs\n</think>\n\na cat<|im_end|>\n"]
    thought = {"role": "assistant", "content": "<think>\nit purrs\n</think>\n\na cat"}
    _, answers = check(place, {"messages": [TALK[0], thought, *TALK[2:]]})
    assert answers == ["a cat<|im_end|>\n", "<think>\n\n</think>\n\nyes<|im_end|>\n"]
    other = chat_tokenizer(tmp_path / "other", DEEPSEEK)
    _, answers = check(other, {"messages": [TALK[0], thought, *TALK[2:]]})
    assert answers == ["\n\na cat<|eot_id|>", "yes<|eot_id|>"]
    with pytest.raises(
        DataError, match='has "reasoning_content" in a message, the reasoning of the assistant before its answer, and the chat template'
    ):
        parts_of(other, {"messages": [TALK[0], {**TALK[1], "reasoning_content": "it purrs"}]})


def test_variables_of_a_row(tmp_path: Path) -> None:
    """`chat_template_kwargs` reach the template, also over the special tokens; arguments of the rendering are not theirs."""
    place = chat_tokenizer(tmp_path / "tok", "{{ bos_token }}{% if enable_thinking is false %}short{% endif %}" + SMOLLM)
    for kwargs in ({"enable_thinking": False}, {"enable_thinking": True}, {"bos_token": "<|begin_of_text|>"}, {}, None):
        check(place, {"messages": TALK, "chat_template_kwargs": kwargs})
    with pytest.raises(DataError, match="sets add_generation_prompt under"):
        parts_of(place, {"messages": TALK, "chat_template_kwargs": {"add_generation_prompt": True}})


def test_the_date_is_fixed(tmp_path: Path) -> None:
    """Training on the same rows gives the same ids every day."""
    text, *_ = parts_of(chat_tokenizer(tmp_path / "tok", LLAMA), {"messages": TALK})
    assert "Today Date: 26 Jul 2024" in text


@pytest.mark.parametrize("options", ["", "indent=2", "separators=(',', ':')", "sort_keys=true", "ensure_ascii=true, indent=1"])
def test_json_in_templates(tmp_path: Path, options: str) -> None:
    """All options that transformers' filter has."""
    place = chat_tokenizer(tmp_path / "tok", SMOLLM + "{{ documents | tojson(" + options + ") }}")
    check(place, {"messages": TALK, "documents": [{"name": "é <b>", "at": [1, {"z": None, "a": True}]}]})


def test_blocks_are_marked_as_transformers_marks_them(tmp_path: Path) -> None:
    """Also of a tokenizer whose tokens hold a space and the word behind it, where an answer begins within a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    source = "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}{% endgeneration %} {% endfor %}"
    place = chat_tokenizer(tmp_path / "tok", source)
    words = ["user:", "Ġcat", "Ġdog", "assistant:", "Ġ", "[UNK]", "</s>"]
    inner = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "merged_with_next"), pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)]
    )
    inner.add_special_tokens(["</s>"])
    inner.save(str(place / "tokenizer.json"))
    row = {"messages": [{"role": "user", "content": "cat"}, {"role": "assistant", "content": "dog"}]}
    found = parts_of(place, row)[3]
    assert found == expected_of(place, row, return_dict=True, return_assistant_tokens_mask=True)["assistant_masks"]
    assert sum(found) > 0
    place = chat_tokenizer(tmp_path / "other", BLOCKS)
    found = parts_of(place, {"messages": TALK})[3]
    assert found == expected_of(place, {"messages": TALK}, return_dict=True, return_assistant_tokens_mask=True)["assistant_masks"]


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3", "phi3", "phi4", "deepseek", "smollm", "blocks"])
def test_a_conversation_that_the_assistant_opens(tmp_path: Path, name: str) -> None:
    """Templates that look at the first message cannot be asked about none; the answer begins behind its prompt all the same."""
    place = chat_tokenizer(tmp_path / "tok", TEMPLATES[name])
    date = {"chat_template_kwargs": {"date_string": "1 Jan 2025"}} if name == "llama" else {}
    for talk in (TALK[1:], [SYSTEM, *TALK[1:]]):
        if talk[0] is SYSTEM and name in ("phi3", "gemma3"):  # neither has a place for a system prompt then
            continue
        _, answers = check(place, {"messages": talk, **date})
        assert [each.replace("<think>\n\n</think>\n\n", "") for each in answers] == [
            "a cat" + ENDS[name],
            "yes" + ENDS[name] + LAST.get(name, ""),
        ]
    _, answers = check(place, {"messages": TALK[1:2], **date})
    assert answers[0].endswith("a cat" + ENDS[name] + LAST.get(name, ""))


@pytest.mark.parametrize("name", ["mistral", "gemma"])
def test_a_template_that_refuses_an_opening_says_so(tmp_path: Path, name: str) -> None:
    """The message is the template's own, as with transformers."""
    with pytest.raises(DataError, match="roles must alternate"):
        parts_of(chat_tokenizer(tmp_path / "tok", TEMPLATES[name]), {"messages": TALK[1:]})


def test_parts_of_text(tmp_path: Path) -> None:
    """They reach templates that read parts, and are joined for others; images are refused."""
    parts = [{"type": "text", "text": "what "}, {"type": "text", "text": "is it?"}]
    row = {"messages": [{"role": "user", "content": parts}, TALK[1]]}
    check(chat_tokenizer(tmp_path / "gemma3", TEMPLATES["gemma3"]), row)
    text, *_ = parts_of(chat_tokenizer(tmp_path / "smollm", SMOLLM), row)
    assert "user\nwhat is it?<|im_end|>" in text
    with pytest.raises(DataError, match="has content that is not text"):
        parts_of(tmp_path / "smollm", {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}, TALK[1]]})


def test_named_templates(tmp_path: Path) -> None:
    """A row with tools is written by the template of that name, as by transformers."""
    named = [{"name": "default", "template": SMOLLM}, {"name": "tool_use", "template": QWEN2}]
    place = chat_tokenizer(tmp_path / "tok", named)
    assert "# Tools" not in check(place, {"messages": TALK})[0]
    assert "# Tools" in check(place, {"messages": TALK, "tools": TOOLS})[0]


def test_named_templates_without_a_default_are_listed(tmp_path: Path) -> None:
    """transformers refuses them, too."""
    place = chat_tokenizer(tmp_path / "tok", [{"name": "rag", "template": SMOLLM}, {"name": "tool_use", "template": QWEN2}])
    with pytest.raises(DataError, match="has chat templates named rag, tool_use and none named default"):
        template_of(load_tokenizer(place))


def test_named_templates_in_files(tmp_path: Path) -> None:
    """transformers writes each into a file of its own; a tokenizer that is saved again has all of them."""
    named = [{"name": "default", "template": SMOLLM}, {"name": "tool_use", "template": QWEN2}]
    theirs = transformers.AutoTokenizer.from_pretrained(chat_tokenizer(tmp_path / "tok", named))
    theirs.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "additional_chat_templates" / "tool_use.jinja").is_file()
    (tmp_path / "again").mkdir()
    load_tokenizer(tmp_path / "saved").save(tmp_path / "again")
    for place in ("saved", "again"):
        assert "# Tools" not in check(tmp_path / place, {"messages": TALK})[0]
        assert "# Tools" in check(tmp_path / place, {"messages": TALK, "tools": TOOLS})[0]


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma", "gemma3", "smollm", "mistral", "deepseek", "blocks"])
def test_both_ways_of_telling_answers_agree(name: str) -> None:
    """Where beginnings of a conversation are beginnings of its text, a mark in place of an answer finds the same characters."""
    draw = random.Random(7)
    words = ["a cat", "<|im_end|>", "yes\n\nno", "[INST]", "é 😀", "a", "assistant", "<|im_start|>assistant\n", "]", "the the"]
    template = ChatTemplate(TEMPLATES[name].replace("{%- generation %}", "").replace("{%- endgeneration %}", ""), "t.jinja", {"eos_token": "</s>"})

    def write(messages: Any, *, prompts: bool) -> str:
        return template._render(messages, "line 1", prompts=prompts)[0]

    for _ in range(40):
        talk = [{"role": ("user", "assistant")[at % 2], "content": draw.choice(words) + draw.choice(words)} for at in range(2 * draw.randint(1, 3))]
        answers = Answers(write, talk, write(talk, prompts=False))
        for at in range(1, len(talk), 2):
            assert answers.span(at) == answers._within(at), talk
