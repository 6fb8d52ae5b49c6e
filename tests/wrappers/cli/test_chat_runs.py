"""Runs on conversations, from the flag to what speaks to the trained model: the template learnt is kept, and prompts begin as rows do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.chat_templates import QWEN2, SMOLLM, chat_tokenizer, template_of
from support.commands import refuse
from support.model_directories import losses, write_model
from support.objective_data import CHATML, lines_in
from support.served import CONFIG, write_served_model

from nntask.checkpoints.store import find_checkpoint
from nntask.config.run_config import with_kept_template
from nntask.data import ChatSource, DataSpec, load_tokenizer
from nntask.data.chat import ChatTemplate
from nntask.data.chat_source import templates_of
from nntask.data.encoding import RowEncoder
from nntask.data.json_lines import Record
from nntask.data.objectives import Objective
from nntask.gguf.model_file import open_gguf
from nntask.inference import ModelSource
from wrappers.cli import main
from wrappers.serve.jobs import encoded
from wrappers.serve.schema import chat

LARGER = replace(CONFIG, vocab_size=300)
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
TRAIN = ["train", "--dataset=jsonl", "--dataset-path=x.jsonl", "--val-path=x.jsonl", "--batch=2", "--steps=1", "--sample-tokens=4", "--ncpu=1"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a model, conversations and a template."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NNTASK_CACHE", str(tmp_path / "cache"))
    write_served_model(tmp_path / "base")
    lines_in(tmp_path / "x.jsonl", [{"messages": TALK}] * 3)
    (tmp_path / "qwen.jinja").write_text(QWEN2)
    return tmp_path


def conversation(source: str, messages: list[dict[str, Any]] = TALK[:1]) -> list[int]:
    """Ids of a conversation as `nntask serve` makes them of a request."""
    model = ModelSource.open(source)
    ids = model.text_ids(model.tokenizer())
    found = ChatSource.of(ids.tokenizer, "")
    (prompt,) = encoded(chat({"model": "m", "messages": messages}), ids, ChatTemplate(found.source, found.name, found.words))  # type: ignore[arg-type]
    return list(prompt.ids)


def prompt(source: str, text: str) -> list[int]:
    """Ids of a prompt."""
    model = ModelSource.open(source)
    return model.text_ids(model.tokenizer()).prompt(text)


@pytest.mark.parametrize("has_template", [True, False])
def test_the_template_given_is_kept(here: Path, has_template: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """With the run, its checkpoints, its exports, and for what continues, adapts or serves it; the file may be gone by then."""
    transformers = pytest.importorskip("transformers")
    write_served_model(here / "from", has_template=has_template)
    argv = [*TRAIN, "--init-from=from", "--chat-template=qwen.jinja", "--seq-len=128"]
    assert main([*argv, "--run-dir=run"]) == 0
    assert main([*argv, "--run-dir=lora", "--train=lora:2"]) == 0
    (here / "qwen.jinja").rename(here / "gone.jinja")
    assert main(["train", "--resume=run", "--steps=2"]) == 0
    assert main(["train", "--resume=lora", "--steps=2"]) == 0
    assert main(["export", "run", "out"]) == 0
    assert main(["export", "lora", "merged", "--merge"]) == 0
    assert main(["export", "lora", "adapters"]) == 0
    assert main(["quantize", "run", "q.gguf", "--type=f32"]) == 0
    assert main([*TRAIN, "--init-from=out", "--run-dir=next", "--seq-len=128"]) == 0
    assert templates_of(open_gguf(here / "q.gguf").files) == {"default": QWEN2}
    expected = transformers.AutoTokenizer.from_pretrained(here / "from").apply_chat_template(
        TALK[:1], chat_template=QWEN2, add_generation_prompt=True, return_dict=False
    )
    for place in ("out", "merged", "adapters"):
        theirs = transformers.AutoTokenizer.from_pretrained(here / place)
        assert theirs.apply_chat_template(TALK[:1], add_generation_prompt=True, return_dict=False) == expected, place
        about = json.loads((here / place / "tokenizer_config.json").read_text())
        assert about.get("chat_template") == (QWEN2 if has_template else None)
    for place in ("run", "run/checkpoints/step-000001", "lora", "out", "merged", "q.gguf", "next"):
        assert conversation(place) == expected, place


def test_a_broken_template_of_the_model_is_said_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the header of a run that is given another one, and in summary.json; the export has the template given."""
    (here / "base" / "chat_template.jinja").write_bytes(b"\xff")
    argv = [*TRAIN, "--init-from=base", "--seq-len=128"]
    code, err = refuse(capsys, argv)
    assert (code, "chat_template.jinja cannot be read" in err) == (4, True)
    assert main([*argv, "--chat-template=qwen.jinja", "--run-dir=run"]) == 0
    said = capsys.readouterr().out
    assert said.count("--chat-template qwen.jinja replaces the tokenizer's own chat template, with which something is wrong: base/chat_template") == 1
    assert json.loads((here / "run" / "summary.json").read_text())["data"]["template_notes"] == {"number": 1, "total": 0}
    assert main(["export", "run", "out"]) == 0
    assert (here / "out" / "chat_template.jinja").read_text() == QWEN2
    assert main(["train", "--resume=run", "--steps=2"]) == 0


def test_keys_and_empty_rows_of_texts_are_said_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the header of a run on plain texts, and in summary.json."""
    lines_in(here / "x.jsonl", [{"text": "a text of some length " * 9, "colour": 1, "url": "u"}] * 4 + [{"text": ""}])
    assert main([*TRAIN, "--init-from=base", "--seq-len=32", "--run-dir=run"]) == 0
    said = capsys.readouterr().out
    for split in ("training", "validation"):
        assert said.count(f'unknown keys of 5 {split} rows are ignored: "colour" in 4\n') == 1
        assert said.count(f"1 of 5 {split} rows have an empty text and are left out\n") == 1
    data = json.loads((here / "run" / "summary.json").read_text())["data"]
    assert data["rows_empty"] == data["validation_rows_empty"] == {"number": 1, "total": 5}
    assert data["unknown_keys"]["number"] == data["validation_unknown_keys"]["number"] == 1


def test_a_template_by_name_is_in_a_gguf_file(here: Path) -> None:
    """Of several templates the default one; a file has one."""
    about = json.loads((here / "base" / "tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": QWEN2}, {"name": "default", "template": SMOLLM}]
    (here / "base" / "tokenizer_config.json").write_text(json.dumps({**about, "chat_template": named}))
    assert main(["quantize", "base", "q.gguf", "--type=f32"]) == 0
    assert templates_of(open_gguf(here / "q.gguf").files) == {"default": SMOLLM}
    assert conversation("q.gguf") == conversation("base")


def test_a_template_that_changed_is_another_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file is still there and says something else, so the rows are others."""
    assert main([*TRAIN, "--init-from=base", "--chat-template=qwen.jinja", "--seq-len=128", "--run-dir=run"]) == 0
    (here / "qwen.jinja").write_text(SMOLLM)
    capsys.readouterr()
    code, err = refuse(capsys, ["train", "--resume=run", "--steps=2"])
    assert (code, "was trained on other data" in err) == (4, True)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_a_run_from_nothing_keeps_its_template(here: Path, tokenizer: str) -> None:
    """Also with plain bytes; the end of text that a template names is the one that the export declares."""
    transformers = pytest.importorskip("transformers")
    source = CHATML.replace("<|end|>", "{{ eos_token }}")
    (here / "t.jinja").write_text(source)
    (here / "c.json").write_text(json.dumps({**CONFIG.to_dict(), "vocab_size": 260}))
    argv = [*TRAIN, "--config-path=c.json", f"--tokenizer={tokenizer}", "--chat-template=t.jinja", "--seq-len=64", "--run-dir=run"]
    assert main(argv) == 0
    (here / "t.jinja").unlink()
    assert main(["train", "--resume=run", "--steps=2"]) == 0
    assert main(["export", "run", "out"]) == 0
    theirs = transformers.AutoTokenizer.from_pretrained(here / "out")
    expected = theirs.apply_chat_template(TALK, return_dict=False)
    end = theirs.eos_token_id
    assert expected.count(end) == 2
    assert conversation("run") == conversation("out") == theirs.apply_chat_template(TALK[:1], add_generation_prompt=True, return_dict=False)
    row = ModelSource.open("run")
    ids, counts = RowEncoder(row.tokenizer()).answers(*template_of(row.tokenizer()).rendered(Record({"messages": TALK}, "line 1")))
    assert ids.tolist() == expected
    assert ids[counts].tolist()[-1] == end


@pytest.mark.parametrize("begin", [False, True])
def test_a_run_is_spoken_to_as_it_was_trained(here: Path, begin: bool) -> None:
    """Prompts of a run that began with a directory, or learnt conversations, have the ids that its directory, its exports and transformers have."""
    transformers = pytest.importorskip("transformers")
    place = chat_tokenizer(here / "tok", SMOLLM, begin=begin)
    write_model(here / "start", LARGER)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (here / "start" / name).write_bytes((place / name).read_bytes())
    assert main([*TRAIN, "--init-from=start", "--seq-len=128", "--run-dir=run"]) == 0
    lines_in(here / "y.jsonl", [{"text": "some words and more of them " * 9}] * 3)
    stream = [each.replace("x.jsonl", "y.jsonl") for each in TRAIN]
    assert main([*stream, "--init-from=start", "--seq-len=32", "--run-dir=stream", "--prompt=hello"]) == 0
    (here / "c.json").write_text(json.dumps(LARGER.to_dict()))
    assert main([*TRAIN, "--config-path=c.json", "--tokenizer-path=start", "--seq-len=128", "--run-dir=fresh"]) == 0
    assert main([*stream, "--config-path=c.json", "--tokenizer-path=start", "--seq-len=32", "--run-dir=plain"]) == 0
    assert main(["export", "run", "out"]) == 0
    theirs = transformers.AutoTokenizer.from_pretrained(here / "start")
    expected, talk = theirs("hello")["input_ids"], theirs.apply_chat_template(TALK[:1], add_generation_prompt=True, return_dict=False)
    for source in ("start", "run", "stream", "fresh", "out"):
        assert prompt(source, "hello") == expected, source
    tokenizer = load_tokenizer(here / "start")
    assert prompt("plain", "hello") == [tokenizer.begin_of_text, *theirs("hello", add_special_tokens=False)["input_ids"]]
    for source in ("start", "run", "stream", "fresh", "plain", "out"):
        assert conversation(source) == talk, source
    assert prompt("run", "") == [tokenizer.begin_of_text]


def test_findings_of_rows_are_said_and_kept(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the header of the run and in summary.json; of a second run from the cache too."""
    lines_in(here / "x.jsonl", [{"messages": TALK, "colour": 1}] * 3 + [{"messages": [{"role": "user", "content": "q" * 99}, TALK[1]]}] * 2)
    argv = [*TRAIN, "--init-from=base", "--seq-len=64"]
    for run in ("a", "b"):
        assert main([*argv, f"--run-dir={run}"]) == 0
        said = capsys.readouterr().out
        assert "2 of 5 training conversations have no answer to learn within --seq-len 64 and are left out; raise --seq-len" in said
        assert 'unknown keys of 5 training rows are ignored: "colour" in 3' in said
        summary = json.loads((here / run / "summary.json").read_text())
        assert summary["data"]["rows_left_out"] == {"number": 2, "total": 5}
    assert losses(here / "a") == losses(here / "b")


def test_a_run_that_restarts_itself_follows_its_checkpoint(here: Path) -> None:
    """A cluster that changes is a run that goes on from a newer checkpoint, when the older one with the template may be gone."""
    assert main([*TRAIN, "--init-from=base", "--chat-template=qwen.jinja", "--seq-len=128", "--run-dir=run", "--steps=2", "--save-every=1"]) == 0
    older, newer = (find_checkpoint(here / "run" / "checkpoints" / f"step-00000{step}") for step in (1, 2))
    spec = DataSpec(objective=Objective(form="chat", template="qwen.jinja"))
    assert with_kept_template(spec, older) == spec
    (here / "qwen.jinja").unlink()
    again = with_kept_template(spec, older)
    assert again.objective.template == str(older.path / "chat_template.jinja")
    Path(again.objective.template).unlink()
    assert with_kept_template(again, newer).objective.template == str(newer.path / "chat_template.jinja")
    assert with_kept_template(DataSpec(), newer) == DataSpec()
