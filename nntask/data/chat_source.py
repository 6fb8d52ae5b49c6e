"""Sources of chat templates: from a file or from a tokenizer's files; also attaches a template to the tokenizer that a run saves."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from ..errors import DataError
from ..io.regular_file import read_text
from .added_tokens import ROLES
from .special_tokens import CHAT_TEMPLATE, END_OF_TEXT, SPECIAL_TOKENS, TOKENIZER_CONFIG
from .tokenizer import ByteTokenizer, Tokenizer

_TOOL_USE: Final = "tool_use"
_DIFFER: Final = "differ"


@dataclass(frozen=True, slots=True)
class ChatSource:
    """A chat template before compilation; the fields are the arguments of `ChatTemplate`."""

    source: str
    name: str
    words: Mapping[str, str]
    tools: str = ""

    def terms(self) -> str:
        """Return all inputs that determine the text of a conversation, as a cache key: the templates and their special tokens."""
        words = sorted(self.words.items())
        return json.dumps([self.source, words, *([json.dumps([self.tools, words])] if self.tools else [])])

    @classmethod
    def of(cls, tokenizer: Tokenizer, file: str) -> ChatSource:
        """Return the template in a file, or the template of a tokenizer.

        Args:
            tokenizer: tokenizer whose special tokens the template may name.
            file: path of the template; "" for the tokenizer's own.

        Raises:
            DataError: the tokenizer has no template, or the file cannot be read.
        """
        files = tokenizer.special.files
        config = json.loads(files.get(TOKENIZER_CONFIG, "{}"))
        if file:
            try:
                source = read_text(file).removeprefix("\ufeff")
            except (OSError, UnicodeDecodeError) as error:
                raise DataError(
                    f"cannot be read: {getattr(error, 'strerror', None) or error}", "give a text file", flag="--chat-template", value=file
                ) from None
            return cls(source, file, _words(tokenizer, config, source))
        named = templates_of(files)
        if named and "default" not in named:
            raise DataError(
                f"the tokenizer of the data has chat templates named {', '.join(sorted(named))} and none named default",
                "write one of them to a file and name it with --chat-template FILE",
            )
        if not named:
            raise DataError(
                "conversations need a chat template, and the tokenizer of the data has none",
                "name one with --chat-template FILE, or the tokenizer of a model for conversations with --tokenizer-path DIR",
            )
        source, tools = named["default"], named.get(_TOOL_USE, "")
        holder = CHAT_TEMPLATE if CHAT_TEMPLATE in files else TOKENIZER_CONFIG
        return cls(source, holder, _words(tokenizer, config, source + tools), tools)


def templates_of(files: Mapping[str, str]) -> dict[str, str]:
    """Return name -> template for the templates in a tokenizer's companion files; the name of the default template is "default"."""
    if CHAT_TEMPLATE in files:
        return {"default": files[CHAT_TEMPLATE]}
    found = json.loads(files.get(TOKENIZER_CONFIG, "{}")).get("chat_template")
    if isinstance(found, str):
        return {"default": found}
    entries = [each for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []
    return {str(each.get("name")): each["template"] for each in entries if isinstance(each.get("template"), str)}


def with_template(tokenizer: Tokenizer, file: str) -> Tokenizer:
    """Return a copy of a tokenizer that has the template in `file` as its own, so that saving the tokenizer saves the template.

    Raises:
        DataError: the file cannot be read.
    """
    source = ChatSource.of(tokenizer, file).source
    files = {**tokenizer.special.files, CHAT_TEMPLATE: source}
    config = json.loads(files.get(TOKENIZER_CONFIG, "{}"))
    if "chat_template" in config:  # older readers know no chat_template.jinja
        files[TOKENIZER_CONFIG] = json.dumps({**config, "chat_template": source}, indent=2, ensure_ascii=False) + "\n"
    templated = copy.copy(tokenizer)
    templated.special = replace(tokenizer.special, files=files)
    return templated


def template_notes(tokenizer: Tokenizer, file: str) -> tuple[str, ...]:
    """Return sentences about a tokenizer's templates that are ignored or contradict each other; `file` replaces them unless it is ""."""
    flaws = _flaws(tokenizer)
    if not file:
        return tuple(f"{flaw}; the former is used" for flaw in flaws if flaw.endswith(_DIFFER))
    where = f"--chat-template {file} replaces the tokenizer's own chat template"
    return (f"{where}, with which something is wrong: {', and '.join(flaws)}",) if flaws else ()


def _flaws(tokenizer: Tokenizer) -> list[str]:
    """Return the faults of a tokenizer's own chat templates, a clause each."""
    files, flaws = tokenizer.special.files, list(tokenizer.special.flaws)
    inside, named = json.loads(files.get(TOKENIZER_CONFIG, "{}")).get("chat_template"), templates_of(files)
    entries = inside if isinstance(inside, list) else []
    if not (inside is None or isinstance(inside, str) or (entries and all(map(_is_named, entries)))):
        flaws.append(f"chat_template in {TOKENIZER_CONFIG} is neither a text nor a list of names and templates: {json.dumps(inside)[:40]}")
    elif entries and CHAT_TEMPLATE not in files and "default" not in named:
        flaws.append(f"{TOKENIZER_CONFIG} names the templates {', '.join(sorted(named))} and none default")
    if isinstance(inside, str) and CHAT_TEMPLATE in files and inside.strip() != files[CHAT_TEMPLATE].strip():
        flaws.append(f"{CHAT_TEMPLATE} and chat_template in {TOKENIZER_CONFIG} {_DIFFER}")
    return flaws


def _is_named(entry: Any) -> bool:
    return isinstance(entry, Mapping) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)


def _words(tokenizer: Tokenizer, config: Mapping[str, Any], source: str) -> dict[str, str]:
    """Return name in templates -> special token, as declared by the tokenizer's files or, without them, by an exported tokenizer."""
    files = tokenizer.special.files
    named = {**json.loads(files.get(SPECIAL_TOKENS, "{}")), **{name: config[name] for name in ROLES if config.get(name)}}
    words = {name: each["content"] if isinstance(each, Mapping) else each for name, each in named.items() if each and name in ROLES}
    if TOKENIZER_CONFIG in files:
        return words
    own = {name: word for name, word in _own_words(tokenizer).items() if word and name in source}  # unused ones would only change cache keys
    return {**own, **words}


def _own_words(tokenizer: Tokenizer) -> dict[str, str | None]:
    """Return the special tokens that `hf.tokenizer_files` writes for a tokenizer without a tokenizer_config.json."""
    special, inner = tokenizer.special, getattr(tokenizer, "inner", None)
    if isinstance(tokenizer, ByteTokenizer):
        word = END_OF_TEXT if tokenizer.end_of_text > ord("\n") else None
        return {"bos_token": word, "eos_token": word, "unk_token": word}
    begin = None if special.bos is None or inner is None else inner.id_to_token(special.bos)
    end = inner.id_to_token(special.eos[0]) if special.eos and inner is not None else None
    return {"bos_token": begin, "eos_token": end, "unk_token": END_OF_TEXT if end == END_OF_TEXT else None}
