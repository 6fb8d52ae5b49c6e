"""Chat templates that --chat-template replaces: what is wrong with a tokenizer's own files is said, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.chat_templates import QWEN2, SMOLLM, chat_tokenizer
from support.objective_data import Learner, lines_in, opened

from nntask.config.settings import DataSettings
from nntask.errors import DataError

TALK = [{"role": "user", "content": "what is it?"}, {"role": "assistant", "content": "a cat"}]
WHOLE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
FLAWS: list[tuple[Any, str | bytes | None, str]] = [
    (None, b"\xff\xfe{{ messages }}", "chat_template.jinja cannot be read: "),
    (5, None, "chat_template in tokenizer_config.json is neither a text nor a list of names and templates: 5"),
    ({"default": WHOLE}, None, "chat_template in tokenizer_config.json is neither a text nor a list of names and templates: "),
    ([{"name": "rag", "template": WHOLE}], None, "tokenizer_config.json names the templates rag and none default"),
    (SMOLLM, WHOLE, "chat_template.jinja and chat_template in tokenizer_config.json differ"),
    ("{{", b"\xff", "chat_template.jinja cannot be read: "),
]


def findings_of(place: Path, file: str) -> list[str]:
    """What a run on conversations says about the tokenizer of a directory."""
    path = lines_in(place.parent / "x.jsonl", [{"messages": TALK}])
    data = DataSettings(dataset="jsonl", dataset_path=str(path), tokenizer_path=str(place), chat_template=file)
    return [each.sentence for each in opened(Learner(n_positions=400), data, 200).findings]


@pytest.mark.parametrize(("inside", "beside", "words"), FLAWS)
def test_a_template_that_is_replaced_hides_nothing(inside: Any, beside: str | bytes | None, words: str, tmp_path: Path) -> None:
    """All that is wrong with a tokenizer's own template is one notice of a run that is given another one."""
    place = chat_tokenizer(tmp_path / "tok", inside)
    if beside is not None:
        (place / "chat_template.jinja").write_bytes(beside if isinstance(beside, bytes) else beside.encode())
    file = tmp_path / "mine.jinja"
    file.write_text(WHOLE)
    notices = [each for each in findings_of(place, str(file)) if "chat template" in each]
    assert len(notices) == 1
    assert notices[0].startswith(f"--chat-template {file} replaces the tokenizer's own chat template, with which something is wrong: ")
    assert words in notices[0]
    if words.endswith("differ"):
        assert f"{words}; the former is used" in findings_of(place, "")
    else:
        with pytest.raises(DataError, match="template"):
            findings_of(place, "")


def test_a_whole_template_is_replaced_without_a_word(tmp_path: Path) -> None:
    """In either file, or the same in both; a tokenizer without one says nothing either."""
    (tmp_path / "mine.jinja").write_text(WHOLE)
    named = [{"name": "default", "template": SMOLLM}, {"name": "tool_use", "template": QWEN2}]
    for number, (inside, beside) in enumerate([(SMOLLM, None), (None, SMOLLM), (SMOLLM, SMOLLM + "\n"), (named, None), (None, None)]):
        place = chat_tokenizer(tmp_path / str(number) / "tok", inside)
        if beside is not None:
            (place / "chat_template.jinja").write_text(beside)
        assert findings_of(place, str(tmp_path / "mine.jinja")) == []


@pytest.mark.parametrize("content", ["{", "[1]", '"text"'])
def test_a_broken_config_is_refused_though_a_template_is_given(content: str, tmp_path: Path) -> None:
    """It says more than the template."""
    place = chat_tokenizer(tmp_path / "tok")
    (place / "tokenizer_config.json").write_text(content)
    (tmp_path / "mine.jinja").write_text(WHOLE)
    with pytest.raises(DataError, match=r"tokenizer_config\.json (is not whole JSON|must be a JSON object)"):
        findings_of(place, str(tmp_path / "mine.jinja"))
