"""Ids that begin and end a text, as declared by the companion files of a tokenizer.json, and the content of these files.

The sources are, in order: ids in generation_config.json, then in config.json; the words in tokenizer_config.json and special_tokens_map.json; and
special tokens with the usual names of the model families. An id counts only if it is a special token of the tokenizer, since transformers writes 1
and 2 into the config of every LLaMA that declares no ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ..errors import DataError
from ..gguf.model_file import is_gguf, open_gguf
from ..io.json_file import read_object
from ..io.regular_file import read_text
from .added_tokens import ADDED_TOKENS

END_OF_TEXT: Final = "<|endoftext|>"
GENERATION: Final = "generation_config.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
CHAT_TEMPLATE: Final = "chat_template.jinja"
_MORE_TEMPLATES: Final = "additional_chat_templates"
_CONFIG: Final = "config.json"
SPECIAL_TOKENS: Final = "special_tokens_map.json"
_WORDS: Final = (TOKENIZER_CONFIG, SPECIAL_TOKENS)
_KEPT: Final = (GENERATION, *_WORDS, CHAT_TEMPLATE)
SPECIAL_FILES: Final = (*_KEPT, _CONFIG, ADDED_TOKENS)
"""Names of the companion files that are read."""
_PAIRS: Final = ((END_OF_TEXT, END_OF_TEXT), ("<|begin_of_text|>", "<|end_of_text|>"), ("<s>", "</s>"), ("[CLS]", "[SEP]"))
"""Words that (begin, end) a text in GPT-2, Llama 3, Llama 2 and BERT."""

MASK: Final = "[MASK]"
_MASKS: Final = (MASK, "<mask>")
"""Words of the mask token in BERT and RoBERTa."""


@dataclass(frozen=True, slots=True)
class Special:
    """Special ids of a tokenizer, and the files that declare them.

    Args:
        bos: id before a text; None if no file declares one.
        eos: ids that end a text, beginning with the one that follows training texts; empty if no file declares one.
        files: name -> content of the companion files to save with tokenizer.json, which declare the same ids.
        mask: id that hides a token from a masked language model; None if there is none.
        flaws: reasons why chat templates among the files are not read, a clause each.
    """

    bos: int | None = None
    eos: tuple[int, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    mask: int | None = None
    flaws: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the keys bos_token_id and eos_token_id of Hugging Face's configs; the latter is a list if several ids end a text."""
        return {"bos_token_id": self.bos, "eos_token_id": list(self.eos) if len(self.eos) > 1 else self.eos[0] if self.eos else None}


@dataclass(frozen=True, slots=True)
class Companions:
    """Companion files of a tokenizer.json.

    Args:
        files: name -> text of the files to save with the tokenizer.
        objects: name -> content of all JSON files.
        flaws: reasons why chat templates are not read, a clause each.
    """

    files: Mapping[str, str] = field(default_factory=dict)
    objects: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    flaws: tuple[str, ...] = ()


def read_companions(directory: Path, *, has_template: bool = False) -> Companions:
    """Read the companion files of a tokenizer.json.

    Args:
        directory: directory of the tokenizer's files, or a GGUF file.
        has_template: whether another chat template replaces the tokenizer's own, so that an unreadable one is a flaw, not an error.

    Raises:
        DataError: a file is broken.
    """
    if is_gguf(directory):
        files = {name: text for name, text in open_gguf(directory).files.items() if name in _KEPT}
        return Companions(files, {name: json.loads(text) for name, text in files.items() if name.endswith(".json")})
    objects = {name: read_object(directory / name, "the file") for name in SPECIAL_FILES if name.endswith(".json") and (directory / name).is_file()}
    for name, content in objects.items():
        try:
            json.dumps(content, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise DataError(f"{directory / name} has a text with an unpaired surrogate, which is not a character", "copy the file again") from None
    files = {name: _text(directory / name) for name in _KEPT if name != CHAT_TEMPLATE and (directory / name).is_file()}
    flaws = []
    try:
        templates = {CHAT_TEMPLATE: _text(directory / CHAT_TEMPLATE)} if (directory / CHAT_TEMPLATE).is_file() else {}
        templates |= _named_templates(directory, templates, objects)
    except DataError as error:
        if not has_template:
            raise
        templates, flaws = {}, [error.fact]
    return Companions({name: text for name, text in {**files, **templates}.items() if text}, objects, tuple(flaws))


def special_of(inner: Any, companions: Companions) -> Special:
    """Return the special ids of a `tokenizers.Tokenizer` with its companion files."""
    files, objects = dict(companions.files), companions.objects
    special = {index for index, token in inner.get_added_tokens_decoder().items() if token.special}
    bos, eos = _by_id(objects, "bos_token_id", special, inner), _by_id(objects, "eos_token_id", special, inner)
    if (bos or eos) and _CONFIG in objects:  # config.json is not saved, so its ids move to generation_config.json
        ids = Special(bos[0] if bos else None, eos).to_dict()
        files[GENERATION] = json.dumps({**objects.get(GENERATION, {}), **ids}, indent=2) + "\n"
    bos, eos = bos or _by_word(objects, "bos_token", inner), eos or _by_word(objects, "eos_token", inner)
    if not eos:
        for pair in _PAIRS:
            begin, end = (tuple(index for index in [inner.token_to_id(word)] if index in special) for word in pair)
            if end:
                bos, eos = bos or begin, end
                break
    mask = _by_word(objects, "mask_token", inner) or tuple(each for each in map(inner.token_to_id, _MASKS) if each in special)
    return Special(bos[0] if bos else None, eos, files, mask[0] if mask else None, companions.flaws)


def _named_templates(directory: Path, files: Mapping[str, str], objects: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return replacements for the files of a directory that has several chat templates, each in a file, as transformers writes them.

    The new tokenizer_config.json lists all templates by name. chat_template.jinja becomes empty, since it would take precedence over the list.
    """
    named = {file.stem: _text(file) for file in sorted((directory / _MORE_TEMPLATES).glob("*.jinja"))}
    if not named:
        return {}
    if CHAT_TEMPLATE in files:
        named = {"default": files[CHAT_TEMPLATE], **named}
    entries = [{"name": name, "template": template} for name, template in named.items()]
    about = {**objects.get(TOKENIZER_CONFIG, {}), "chat_template": entries}
    return {TOKENIZER_CONFIG: json.dumps(about, indent=2, ensure_ascii=False) + "\n", CHAT_TEMPLATE: ""}


def _text(file: Path) -> str:
    try:
        return read_text(file)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}", "copy it again") from None


def _by_id(objects: Mapping[str, Mapping[str, Any]], key: str, special: set[int], inner: Any) -> tuple[int, ...]:
    """Return the ids under a key, one id or a list, from the first file that has a special token there.

    All ids of a list that are tokens are returned, since a model may deliberately declare several ends.
    """
    for name in (GENERATION, _CONFIG):
        value = objects.get(name, {}).get(key)
        ids = [each for each in (value if isinstance(value, list) else [value]) if type(each) is int and each >= 0]
        if any(each in special for each in ids):
            return tuple(dict.fromkeys(each for each in ids if inner.id_to_token(each) is not None))
    return ()


def _by_word(objects: Mapping[str, Mapping[str, Any]], key: str, inner: Any) -> tuple[int, ...]:
    """Return the id of the token that a key names by its word, or by an object with the word under "content"; () if there is none."""
    for name in _WORDS:
        value = objects.get(name, {}).get(key)
        word = value.get("content") if isinstance(value, Mapping) else value
        index = inner.token_to_id(word) if isinstance(word, str) else None
        if index is not None:
            return (int(index),)
    return ()
