"""JSON lines: texts, pairs, labels and conversations, and what a wrong line says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.chat_templates import template_of
from support.objective_data import CHATML, TEXTS, Learner, lines_in, opened, tokenizer_in

from nntask.config.settings import DataSettings
from nntask.data import BatchStream, ChatSource, Dataset, load_tokenizer
from nntask.data.chat import ChatTemplate
from nntask.data.encoding import RowEncoder
from nntask.data.json_lines import JsonLines, Record, json_lines
from nntask.data.sampler import in_order
from nntask.data.tokenizer import ByteTokenizer
from nntask.errors import DataError

WORDS = sorted({word for text in TEXTS for word in text.split()})
TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "what is it?"},
    {"role": "assistant", "content": "a cat"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "yes"},
]


@pytest.fixture
def bert(tmp_path: Path) -> str:
    """A tokenizer with BERT's template."""
    return str(tokenizer_in(tmp_path / "tok", WORDS, "bert"))


def dataset_of(tmp_path: Path, rows: list[Any], config: Learner, length: int = 16, **data: Any) -> Dataset:
    """The dataset of lines, all of which are for training."""
    path = lines_in(tmp_path / "x.jsonl", rows)
    return opened(config, DataSettings(dataset="jsonl", dataset_path=str(path), val_path=str(path), **data), length)


def test_texts_become_a_stream(tmp_path: Path) -> None:
    """Each line is a text with an end; about one in twenty is held out, whatever its place in the file."""
    path = lines_in(tmp_path / "x.jsonl", [{"text": text} for text in TEXTS])
    dataset = opened(Learner(), DataSettings(dataset="jsonl", dataset_path=str(path), tokenizer="bytes"))
    _, validation = json_lines(str(path), "", -1)
    assert validation is not None
    held = [record.text("text") for record in validation]
    assert 0 < len(held) < 10
    kept = [text for text in TEXTS if text not in held]
    ids = dataset.train.window(0, dataset.train.num_tokens)
    assert bytes(ids[ids < 256].astype(np.uint8)).decode() == "".join(kept)
    assert (ids == 256).sum() == len(kept)
    turned = lines_in(tmp_path / "y.jsonl", [{"text": text} for text in reversed(TEXTS)])
    assert sorted(record.text("text") for record in json_lines(str(turned), "", -1)[1]) == sorted(held)
    assert json_lines(str(path), str(turned), 7)[0].num_lines() == 7
    assert json_lines(str(path), str(turned), 7)[1].num_lines() == 60


@pytest.mark.parametrize(
    ("kind", "good", "bad", "words"),
    [
        ("causal", {"text": "a"}, "{", "line 2 is not JSON"),
        ("causal", {"text": "a"}, [1], "line 2 must be an object"),
        ("causal", {"text": "a"}, {"txt": "a"}, 'line 2 must have a string under "text", got the keys txt'),
        ("masked", {"text": "a"}, {"text": 3}, 'line 2 must have a string under "text", got int there'),
        ("seq2seq", {"input": "a", "target": "b"}, {"input": "a"}, 'line 2 must have a string under "target", got the keys input'),
        (
            "classify",
            {"text": "a", "label": 1},
            {"text": "a", "label": 2},
            'must have a "label", a whole number from 0 to 1 or one of no, yes, got 2',
        ),
        ("classify", {"text": "a", "label": "yes"}, {"text": "a", "label": "maybe"}, "got 'maybe'"),
        ("classify", {"text": "a", "label": 1}, {"text": "a", "label": True}, "got True"),
        ("classify", {"text": "a", "label": 1}, {"text": "a", "pair": "b", "label": 1}, 'has a "pair" and the first line has none'),
        ("causal", {"messages": TALK}, {"messages": []}, 'line 2 must have "messages", such as'),
        ("causal", {"messages": TALK}, {"messages": TALK[:2]}, "line 2 has no message of the role assistant"),
        ("causal", {"messages": TALK}, {"messages": [{"role": "assistant"}]}, "line 2 is not for the chat template of"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, bert: str, kind: str, good: Any, bad: Any, words: str) -> None:
    """One sentence with the number of the line."""
    path = lines_in(tmp_path / "x.jsonl", [good, bad])
    if isinstance(bad, str):
        path.write_text(path.read_text().replace('"{"', bad))
    (tmp_path / "chat.jinja").write_text(CHATML.replace("message.content", "message.content + ''"))
    template = {"chat_template": str(tmp_path / "chat.jinja")} if "messages" in good else {}
    config = Learner(kind, id2label={0: "no", 1: "yes"})
    data = DataSettings(dataset="jsonl", dataset_path=str(path), val_path=str(path), tokenizer_path=bert, **template)
    with pytest.raises(DataError) as error:
        opened(config, data)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_labels_and_pairs(tmp_path: Path, bert: str) -> None:
    """Rows have the tokenizer's template, are cut to the length and padded; types tell the texts of a pair apart."""
    rows = [{"text": "the cat", "pair": "sat on", "label": "yes"}, {"text": " ".join(["dog"] * 30), "pair": "ran", "label": 0}]
    config = Learner("classify", id2label={0: "no", 1: "yes"})
    dataset = dataset_of(tmp_path, rows, config, 10, tokenizer_path=bert)
    examples = dataset.examples(0)
    found = examples.arrays(np.arange(2), 0)
    known = load_tokenizer(bert).inner.get_vocab()
    ids = {word: known.get(word, 1) for word in ("the", "cat", "sat", "on", "dog", "ran")}
    assert found["tokens"].tolist() == [
        [2, ids["the"], ids["cat"], 3, ids["sat"], ids["on"], 3, 0, 0, 0],
        [2, *[ids["dog"]] * 6, 3, ids["ran"], 3],
    ]
    assert found["token_types"].tolist() == [[0] * 4 + [1] * 3 + [0] * 3, [0] * 8 + [1] * 2]
    assert found["documents"].tolist() == [[1] * 7 + [0] * 3, [1] * 10]
    assert found["targets"].tolist() == [[1], [0]]
    assert list(found) == list(dataset.spec.objective.names)
    scored = in_order(examples, 4, 3)
    assert [each.targets.tolist() for each in scored] == [[[1], [0], [-1], [-1]]]
    assert "factor" not in BatchStream(examples, 2, seed=0).next().arrays
    many = dataset_of(tmp_path, [{"text": "a", "label": at // 30} for at in range(60)], Learner("classify"), 10, tokenizer="bytes")
    (first,) = in_order(many.scored_examples(0), 8, 1)
    assert 0 < first.targets.sum() < 8  # though lines are sorted by label


def test_rows_are_cut_as_transformers_cuts_them(bert: str) -> None:
    """Texts and pairs of any lengths."""
    transformers = pytest.importorskip("transformers")
    theirs, encoder = transformers.AutoTokenizer.from_pretrained(bert), RowEncoder(load_tokenizer(bert))
    for first in (0, 1, 4, 9, 30):
        for second in (None, 1, 5, 30):
            one, two = " ".join(["dog"] * first), None if second is None else " ".join(["cat"] * second)
            ids, *_ = encoder.row(one, two, 12)
            expected = theirs(one, two, truncation=True, max_length=12)["input_ids"]
            assert len(ids) == len(expected) <= 12
            if second != first:
                assert ids.tolist() == expected


def test_inputs_and_outputs(tmp_path: Path) -> None:
    """Bytes end with the end of text; an output is read behind the start id, and what is behind it is no target."""
    config = Learner("seq2seq", decoder_start_token_id=9, pad_token_id=8)
    dataset = dataset_of(
        tmp_path, [{"input": "abc", "target": "de"}, {"input": "abcdefgh", "target": "xyzuv"}], config, 6, tokenizer="bytes", target_len=4
    )
    batch = BatchStream(dataset.examples(0), 2, seed=0).next()
    order = [0, 1] if batch.tokens[0, 3] == 256 else [1, 0]
    assert batch.tokens[order].tolist() == [[97, 98, 99, 256, 8, 8], [97, 98, 99, 100, 101, 256]]
    assert batch.arrays["documents"][order].tolist() == [[1, 1, 1, 1, 0, 0], [1] * 6]
    assert batch.targets[order].tolist() == [[100, 101, 256, -1], [120, 121, 122, 256]]
    assert batch.arrays["decoder_tokens"][order].tolist() == [[9, 100, 101, 8], [9, 120, 121, 122]]
    assert batch.arrays["factor"] == np.float32(1 / 7)


def test_rows_come_from_the_cache(tmp_path: Path) -> None:
    """A second opening encodes nothing and has the same fingerprint; another length is encoded anew."""
    from nntask.data import open_dataset

    said: list[str] = []
    dataset = dataset_of(tmp_path, [{"input": "abc", "target": "de"}] * 3, Learner("seq2seq"), 8, tokenizer="bytes")
    again = open_dataset(dataset.spec, said.append)
    assert (said, again.fingerprint) == ([], dataset.fingerprint)
    (again.train.path / "values.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"values\.bin \(cached rows of the training split of --dataset-path .*\) is shorter than its rows; remove"):
        again.examples(0).arrays(np.array([2]), 0)
    assert dataset_of(tmp_path, [{"input": "abc", "target": "de"}] * 3, Learner("seq2seq"), 9, tokenizer="bytes").fingerprint != again.fingerprint


def answers_in(dataset: Dataset, at: int = 0) -> tuple[str, str]:
    """The text of a sequence of bytes, and what of it is a target."""
    found = dataset.examples(0).arrays(np.array([at]), 0)
    tokens, targets = found["tokens"][0], found["targets"][0]
    return bytes(tokens[found["documents"][0] > 0].astype(np.uint8)).decode(), bytes(targets[targets >= 0].astype(np.uint8)).decode()


def test_half_characters_are_replaced(tmp_path: Path) -> None:
    """JSON can say them alone; texts, rows and conversations take them as U+FFFD."""
    path = tmp_path / "x.jsonl"
    path.write_text('{"input": "a\\ud800", "target": "b\\udc00"}\n')
    data = DataSettings(dataset="jsonl", dataset_path=str(path), val_path=str(path), tokenizer="bytes", objective="seq2seq")
    found = opened(Learner(), data).train.row(0)
    assert bytes(found[0][:-1].astype(np.uint8)).decode() == "a\ufffd"
    (tmp_path / "t.jinja").write_text(CHATML)
    path.write_text('{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "\\ud800"}]}\n')
    dataset = opened(Learner(), replace(data, objective="causal", chat_template=str(tmp_path / "t.jinja")), 60)
    assert answers_in(dataset)[1] == "\ufffd<|end|>"


def test_only_answers_count(tmp_path: Path) -> None:
    """With what ends them; blocks of a template say so themselves, and a template without them gives the same."""
    blocks = CHATML.replace(
        "{{ message.content }}<|end|>",
        "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|end|>{% endgeneration %}"
        "{% else %}{{ message.content }}<|end|>{% endif %}",
    )
    for number, source in enumerate((CHATML, blocks)):
        file = tmp_path / f"{number}.jinja"
        file.write_text(source)
        dataset = dataset_of(tmp_path, [{"messages": TALK}], Learner(), 150, tokenizer="bytes", chat_template=str(file))
        text, answers = answers_in(dataset)
        assert text.startswith("<|system|>be brief<|end|><|user|>what is it?<|end|><|assistant|>a cat<|end|>")
        assert answers == "a cat<|end|>yes<|end|>"
        batch = BatchStream(dataset.examples(0), 1, seed=0).next()
        assert batch.arrays["factor"] == np.float32(1 / len(answers))


def test_conversations_share_sequences(tmp_path: Path) -> None:
    """With --document-boundaries several are in one sequence, each with a number and its own targets; one without an answer in reach is left out."""
    (tmp_path / "t.jinja").write_text(CHATML)
    rows = [{"messages": [{"role": "user", "content": "q" * n}, {"role": "assistant", "content": f"a{n}"}]} for n in (1, 2, 300, 3)]
    dataset = dataset_of(tmp_path, rows, Learner(), 100, tokenizer="bytes", chat_template=str(tmp_path / "t.jinja"), document_boundaries=True)
    examples = dataset.examples(0)
    assert (dataset.train.num_rows, examples.num_sequences) == (3, 2)
    for length, count in ((114, 1), (113, 2)):  # 37 + 38 + 39 positions
        terms = {"tokenizer": "bytes", "chat_template": str(tmp_path / "t.jinja"), "document_boundaries": True}
        assert dataset_of(tmp_path, rows, Learner(n_positions=128), length, **terms).examples(0).num_sequences == count
    found = examples.arrays(np.array([0, 1]), 0)
    assert found["documents"].max(1).tolist() == [2, 1]
    assert answers_in(dataset)[1] == "a1<|end|>a2<|end|>"
    assert answers_in(dataset, 1)[1] == "a3<|end|>"
    changes = np.flatnonzero(np.diff(found["documents"][0]))
    assert found["targets"][0, changes[0]] == ord(">")
    dataset = dataset_of(tmp_path, rows[2:3], Learner(), 100, tokenizer="bytes", chat_template=str(tmp_path / "t.jinja"))
    with pytest.raises(DataError, match="has 0 rows, and --batch is 1; use conversations with an answer within --seq-len 100"):
        BatchStream(dataset.examples(0), 1, seed=0)


def test_the_tokenizers_own_template_and_special_tokens(tmp_path: Path) -> None:
    """It may use the names of special tokens; rendered text and marks are those of transformers."""
    transformers = pytest.importorskip("transformers")
    source = (
        "{{ bos_token }}{% for message in messages %}\n  {% if message['role'] == 'assistant' %}\n"
        "{% generation %}{{ message['content'] | trim }} {{ eos_token }}{% endgeneration %}\n"
        "  {% else %}\n {{ message['content'] }} {% continue %}\n  {% endif %}\n{% endfor %}"
    )
    talk = [{"role": "user", "content": "the dog"}, {"role": "assistant", "content": " the cat "}, *[{"role": "user", "content": "sat"}]]
    place = tokenizer_in(tmp_path / "tok", WORDS, chat_template=source)
    tokenizer = load_tokenizer(place)
    ids, counts = RowEncoder(tokenizer).answers(*template_of(tokenizer).rendered(Record({"messages": talk}, "line 1")))
    theirs = transformers.AutoTokenizer.from_pretrained(place)
    expected = theirs.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
    assert ids.tolist() == expected["input_ids"]
    assert counts.astype(int).tolist() == expected["assistant_masks"]
    assert counts.sum() == 3


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for %}", "has an error"),
        ("{{ raise_exception('roles must alternate') }}", "line 1 is not for the chat template of .*: roles must alternate"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "line 1 is not for the chat template of .*unsafe"),
        ("{{ messages | length }}{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "writes differently once more messages follow"),
        ("{{ messages[-1].content }}", "leaves out: 'be brief'"),
    ],
)
def test_a_wrong_template_is_refused(tmp_path: Path, source: str, words: str) -> None:
    """Mistakes, refusals of the template, what the sandbox forbids, and templates whose answers cannot be told."""
    with pytest.raises(DataError, match=words):
        ChatTemplate(source, "t.jinja", {}).rendered(Record({"messages": TALK}, "x.jsonl line 1"))


def test_a_changed_template_encodes_anew(tmp_path: Path) -> None:
    """The tokenizer's own template is part of what rows follow from, though its tokenizer.json stays."""
    row = {"messages": [{"role": "user", "content": "the dog"}, {"role": "assistant", "content": "cat"}]}
    sources = ("{% for m in messages %}{{ m.content }} {% endfor %}", "{% for m in messages %}sat {{ m.content }} {% endfor %}")
    found = []
    for at, source in enumerate(sources):
        place = tokenizer_in(tmp_path / f"tok{at}", WORDS, chat_template=source)
        dataset = dataset_of(tmp_path, [row], Learner(), tokenizer_path=str(place))
        found.append((dataset.fingerprint, dataset.examples(0).arrays(np.array([0]), 0)["tokens"].tolist()))
    assert found[0][0] != found[1][0]
    assert found[0][1] != found[1][1]


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    """With its number, however far into the file it is; a mark of the order of bytes at the beginning is none of the text."""
    path = tmp_path / "x.jsonl"
    good = b'{"text": "\xc3\xa4"}\n'
    path.write_bytes(b"\xef\xbb\xbf" + good * 2000 + b'{"text": "\xff"}\n')
    records = iter(JsonLines((path,)))
    assert next(records) == Record({"text": "ä"}, f"{path} line 1")
    with pytest.raises(DataError, match="line 2001 is not text in UTF-8: invalid start byte at its byte 10"):
        list(records)


def test_a_tokenizer_without_a_template_is_refused() -> None:
    """The advice names the flag."""
    with pytest.raises(DataError, match="name one with --chat-template FILE"):
        ChatSource.of(ByteTokenizer(), "")
