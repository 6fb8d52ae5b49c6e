"""Rows of chats, pairs and labels: every key is used, ignored or refused, weights count, and what rows lose is counted and kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.chat_templates import BLOCKS, QWEN3, SMOLLM, chat_tokenizer
from support.objective_data import CHATML, Learner, lines_in, opened

from nntask.config.settings import DataSettings
from nntask.data import Dataset, open_dataset
from nntask.data.chat import ChatTemplate
from nntask.data.findings import counts as counts_of
from nntask.data.json_lines import Record
from nntask.data.objectives import Objective
from nntask.data.row_counts import RowCounts
from nntask.data.row_keys import ROW_KEYS, is_nothing, unknown_keys
from nntask.errors import DataError

TALK = [
    {"role": "user", "content": "what is it?"},
    {"role": "assistant", "content": "sat on the mat"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "dog"},
]
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("causal", {"messages": TALK}),
    "pairs": ("seq2seq", {"input": "a", "target": "b"}),
    "labels": ("classify", {"text": "a", "label": 1}),
}


@pytest.fixture
def rows_of(tmp_path: Path) -> Callable[..., Dataset]:
    """Opens rows of a kind, all of which are for training and for validation."""
    (tmp_path / "t.jinja").write_text(CHATML)

    def dataset(kind: str, rows: list[Any], length: int = 120, **data: Any) -> Dataset:
        path = lines_in(tmp_path / f"{kind}.jsonl", rows)
        template = {"chat_template": str(tmp_path / "t.jinja")} if kind == "chat" else {}
        settings = DataSettings(dataset="jsonl", dataset_path=str(path), val_path=str(path), tokenizer="bytes", **{**template, **data})
        return opened(Learner(ROWS[kind][0], n_positions=400), settings, length)

    return dataset


def answers_of(source: str, messages: list[dict[str, Any]]) -> list[str]:
    """What is learnt of a conversation."""
    text, spans = ChatTemplate(source, "t.jinja", {}).rendered(Record({"messages": messages}, "x.jsonl line 1"))
    return [text[begin:end] for begin, end in spans]


@pytest.mark.parametrize("source", [CHATML, SMOLLM, QWEN3, BLOCKS, BLOCKS.replace("loop.index > 20", "false")], ids=range(5))
@pytest.mark.parametrize("weights", [(0, 1), (1, 0), (0, None), (None, 0), (0, 0), (1, 1), (1.0, 0.0)])
def test_an_answer_of_weight_0_is_not_learnt(source: str, weights: tuple[Any, Any]) -> None:
    """As in OpenAI's format: it is in the text and no target; with blocks of the template and without."""
    plain = answers_of(source, TALK)
    talk = [dict(each) for each in TALK]
    talk[1]["weight"], talk[3]["weight"] = weights
    talk[0]["weight"] = 0
    expected = [answer for answer, weight in zip(plain, weights, strict=True) if weight != 0]
    assert answers_of(source, talk) == expected
    assert "sat on the mat" in ChatTemplate(source, "t.jinja", {}).rendered(Record({"messages": talk}, "line 1"))[0]


@pytest.mark.parametrize("weight", [0.5, 2, -1, True, "1", [1]])
def test_other_weights_are_refused(weight: Any) -> None:
    """An answer is learnt or not."""
    with pytest.raises(DataError, match='must have 0 or 1 as the "weight" of a message'):
        answers_of(CHATML, [TALK[0], {**TALK[1], "weight": weight}])
    with pytest.raises(DataError, match='has "weight" 1 in a message of the role user'):
        answers_of(CHATML, [{**TALK[0], "weight": 1}, TALK[1]])


def test_rows_without_an_answer_to_learn_are_counted(rows_of: Callable[..., Dataset]) -> None:
    """Those beyond the length, and those whose answers have weight 0; a second run from the cache says the same."""
    long = [{"role": "user", "content": "q" * 200}, TALK[1]]
    rows = [{"messages": TALK}, {"messages": long}, {"messages": [TALK[0], {**TALK[1], "weight": 0}]}, {"messages": TALK + long}]
    dataset = rows_of("chat", rows, 150)
    assert dataset.train.num_rows == 2
    sentences = [finding.sentence for finding in dataset.findings]
    assert "1 of 4 training conversations have no answer to learn within --seq-len 150 and are left out; raise --seq-len" in sentences
    assert "1 of 4 training conversations have no answer that is learnt (weight 0, or none at all) and are left out" in sentences
    assert "1 of 4 training rows are longer than --seq-len 150 and are cut; raise --seq-len" in sentences
    expected = {key: {"number": 1, "total": 4} for key in ("rows_left_out", "rows_without_answers", "rows_cut")}
    expected |= {f"validation_{key}": value for key, value in expected.items()}
    assert counts_of(dataset.findings) == expected
    said: list[str] = []
    again = open_dataset(dataset.spec, said.append)
    assert (said, again.findings) == ([], dataset.findings)


def test_cut_pairs_and_texts_are_counted(rows_of: Callable[..., Dataset]) -> None:
    """Inputs and outputs apart; rows that just fit are not among them."""
    rows = [{"input": "a" * 7, "target": "b" * 3}, {"input": "a" * 8, "target": "b" * 3}, {"input": "a", "target": "b" * 4}]
    dataset = rows_of("pairs", rows, 8, target_len=4)
    assert [finding.sentence for finding in dataset.findings][:2] == [
        "1 of 3 training inputs are longer than --seq-len 8 and are cut; raise --seq-len",
        "1 of 3 training outputs are longer than --target-len 4 and are cut; raise --target-len",
    ]
    dataset = rows_of("labels", [{"text": "a" * 7, "label": 1}, {"text": "a" * 8, "label": 1}], 8)
    assert counts_of(dataset.findings)["rows_cut"] == {"number": 1, "total": 2}
    assert rows_of("labels", [{"text": "a" * 7, "label": 1}], 8).findings == ()


@pytest.mark.parametrize("kind", ROWS)
def test_every_key_of_the_table(kind: str, rows_of: Callable[..., Dataset]) -> None:
    """A refused key is refused with its reason unless there is nothing in it; an ignored one changes nothing."""
    row = ROWS[kind][1]
    rules = ROW_KEYS[kind]
    for key in (key for key, rule in rules.items() if rule.use == "refused"):
        with pytest.raises(DataError, match=f'line 1 has "{key}", which is not read: '):
            unknown_keys({**row, key: "x"}, kind, "line 1")
        assert [unknown_keys({**row, key: value}, kind, "line 1") for value in (None, "", [], {}, rules[key].usual)] == [[]] * 5
    plain, more = rows_of(kind, [row]), rows_of(kind, [{**row, **{key: "x" for key, rule in rules.items() if rule.use == "ignored"}}])
    assert (more.findings, list(map(list, more.train.row(0)))) == (plain.findings, list(map(list, plain.train.row(0))))
    with pytest.raises(DataError, match='line 1 has "weight", which is not read: all rows count alike'):
        rows_of(kind, [{**row, "weight": 0.5}])


def test_every_key_of_messages(rows_of: Callable[..., Dataset]) -> None:
    """The same; what the template must write is refused if it does not, and known templates write it."""
    rules = ROW_KEYS["message"]
    for key in (key for key, rule in rules.items() if rule.use in ("refused", "written")):
        with pytest.raises(DataError, match=f'line 1 has (a message with )?"{key}"'):
            ChatTemplate(CHATML, "t.jinja", {}).rendered(Record({"messages": [TALK[0], {**TALK[1], key: "x"}]}, "line 1"), RowCounts(Objective(), ""))
    ignored = {key: "x" for key, rule in rules.items() if rule.use == "ignored"}
    nothing = {key: None for key, rule in rules.items() if rule.use in ("refused", "written")}
    assert rows_of("chat", [{"messages": [TALK[0], {**TALK[1], **ignored, **nothing}]}]).findings == ()


def test_a_template_that_writes_whole_messages_leaves_nothing_out() -> None:
    """It names no key, and each reaches the text."""
    whole = "{% for m in messages %}{{ m | tojson }}\n{% endfor %}"
    assert answers_of(whole, [TALK[0], {**TALK[1], "tool_calls": [{"name": "f"}]}])[0].count("tool_calls") == 1


def test_unknown_keys_are_named_once(rows_of: Callable[..., Dataset]) -> None:
    """With how many rows have them; known ones are not named."""
    rows = [{"messages": [{**TALK[0], "mood": 1}, TALK[1]], "id": 3, "colour": "red"}, {"messages": TALK, "colour": 0, "zeal": None}]
    (finding, other) = rows_of("chat", rows).findings
    assert (finding.key, finding.number, other.key) == ("unknown_keys", 3, "validation_unknown_keys")
    assert finding.sentence == 'unknown keys of 2 training rows are ignored: "colour" in 2, "mood" of messages in 1, "zeal" in 1'
    (finding, _) = rows_of("labels", [{"text": "a", "label": 1, **{f"k{at}": 1 for at in range(10)}}]).findings
    assert finding.sentence.endswith(" and 2 others")


def test_what_a_template_drops_is_refused_or_counted(rows_of: Callable[..., Dataset], tmp_path: Path) -> None:
    """A message of a role that it does not know, tools, documents; thoughts that it strips from answers are counted."""
    (tmp_path / "strict.jinja").write_text(
        "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}<{{ m.role }}>{{ m.content.split('</think>')[-1] | trim }}<end>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    strict = {"chat_template": str(tmp_path / "strict.jinja")}
    for role in ("system", "developer", "tool"):
        with pytest.raises(DataError, match=f"has a message of the role {role} that the chat template of .* leaves out: 'be brief'"):
            rows_of("chat", [{"messages": [{"role": role, "content": "be brief"}, *TALK]}], **strict)
    for key in ("tools", "documents"):
        with pytest.raises(DataError, match=f'has "{key}", and the chat template of .* does not write them'):
            rows_of("chat", [{"messages": TALK, key: [{"name": "f"}]}], **strict)
        with pytest.raises(DataError, match=f'must have a list of objects under "{key}"'):
            rows_of("chat", [{"messages": TALK, key: "f"}], **strict)
        assert rows_of("chat", [{"messages": TALK, key: []}], **strict).findings == ()
    talk = [TALK[0], {"role": "assistant", "content": "<think>why</think> dog"}, *TALK[2:]]
    found = rows_of("chat", [{"messages": talk}], **strict).findings
    assert [(each.key, each.number, each.total) for each in found][:1] == [("answers_changed", 1, 2)]


def test_tools_in_a_string_and_documents_reach_the_template(tmp_path: Path) -> None:
    """Tables of columns hold tools as JSON; documents are rendered as transformers renders them."""
    transformers = pytest.importorskip("transformers")
    source = "{{ tools | tojson }}{% for d in documents or [] %}[{{ d.title }}: {{ d.text }}]{% endfor %}" + SMOLLM
    theirs = transformers.AutoTokenizer.from_pretrained(chat_tokenizer(tmp_path / "tok", source))
    tools, documents = [{"name": "f"}], [{"title": "a", "text": "b"}]
    expected = theirs.apply_chat_template(TALK, tools=tools, documents=documents, tokenize=False)
    for given in (tools, '[{"name": "f"}]'):
        row = Record({"messages": TALK, "tools": given, "documents": documents}, "line 1")
        assert ChatTemplate(source, "t.jinja", {}).rendered(row)[0] == expected


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"conversations": [{"from": "human", "value": "a"}]}, "conversations of another format; write each as"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preferences, which are not learnt"),
        ({"prompt": "a", "completion": "b"}, "a prompt and its completion"),
        ({"instruction": "a", "input": "", "output": "b"}, "an instruction and its output"),
    ],
)
def test_rows_of_other_formats_are_named(row: dict[str, Any], words: str, tmp_path: Path) -> None:
    """With what to write instead."""
    path = lines_in(tmp_path / "x.jsonl", [row])
    with pytest.raises(DataError, match=words):
        opened(Learner(), DataSettings(dataset="jsonl", dataset_path=str(path), tokenizer="bytes"))


def test_an_array_in_a_file_is_named(tmp_path: Path) -> None:
    """JSON files of other programs hold one array, in one line or many; the message has the command that turns it into lines."""
    import json

    for indent in (None, 2):
        path = tmp_path / "x.json"
        path.write_text(json.dumps([{"messages": TALK}], indent=indent))
        with pytest.raises(DataError, match=r"holds one array .*jq -c '\.\[\]'"):
            opened(Learner(), DataSettings(dataset="jsonl", dataset_path=str(path), tokenizer="bytes"))


def test_nothing_is_nothing() -> None:
    """Numbers are something."""
    assert [is_nothing(value) for value in (None, False, "", [], {}, 0, 0.0, "0", [0])] == [True] * 5 + [False] * 4


def test_the_first_token_of_an_answer_is_learnt(rows_of: Callable[..., Dataset]) -> None:
    """A conversation of nothing but an answer has a first token, which has no place to be predicted from."""
    dataset = rows_of("chat", [{"messages": [{"role": "assistant", "content": "dog"}]}])
    found = dataset.examples(0).arrays(np.array([0]), 0)
    targets = found["targets"][0]
    assert bytes(targets[targets >= 0].astype(np.uint8)).decode() == "dog<|end|>"
