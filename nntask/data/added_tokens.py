"""Tokens added to a tokenizer.json by its companion files: `added_tokens_decoder`, special tokens without an id, and added_tokens.json.

The order is that of transformers: first the tokens of `added_tokens_decoder` by id, then special tokens that have a role, then other special tokens.
Without `added_tokens_decoder`, special_tokens_map.json and added_tokens.json are read instead. A token that tokenizer.json already has keeps its id.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from ..errors import DataError

ADDED_TOKENS: Final = "added_tokens.json"
ROLES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Roles of special tokens in transformers."""
_CONFIG, _MAP = "tokenizer_config.json", "special_tokens_map.json"
_LISTS: Final = ("extra_special_tokens", "additional_special_tokens")
_FLAGS: Final = ("lstrip", "rstrip", "single_word", "normalized", "special")


def add_tokens(inner: Any, objects: Mapping[str, Mapping[str, Any]], where: str, defaults: Mapping[str, str] | None = None) -> list[str]:
    """Add the tokens that the companion files declare.

    Args:
        inner: `tokenizers.Tokenizer` to add them to, in place.
        objects: name -> content of the tokenizer's companion files.
        where: directory of the tokenizer, for error messages.
        defaults: role -> special token to add if no file declares one.

    Returns:
        The tokens that were added or changed, with their flags.

    Raises:
        DataError: a declaration is malformed, or gives a new token an id that is not the next free one.
    """
    config = {**(defaults or {}), **objects.get(_CONFIG, {})}
    written: dict[int, Any] = {}
    if "added_tokens_decoder" in config:
        given = config["added_tokens_decoder"]
        if not isinstance(given, Mapping):
            raise DataError(f"added_tokens_decoder in {_CONFIG} of {where} must map ids to tokens, got {str(given)[:40]}", "copy it again")
        written = {_id(index, _CONFIG, where): _token(entry, _CONFIG, where) for index, entry in given.items()}
    else:
        config |= objects.get(_MAP, {})
        special = {_content(each) for each in _special(config)}
        for word, index in objects.get(ADDED_TOKENS, {}).items():
            entry = {"content": word, "special": word in special, "normalized": word not in special}
            written[_id(index, ADDED_TOKENS, where)] = _token(entry, ADDED_TOKENS, where)
    known = {repr(token) for token in inner.get_added_tokens_decoder().values()}  # the text has all flags
    changed = []
    for index, token in sorted(written.items()):
        if repr(token) not in known:
            old = inner.token_to_id(token.content)
            inner.add_tokens([token])
            changed.append(repr(token))
            if old is None and inner.token_to_id(token.content) != index:
                raise DataError(
                    f"the files in {where} give the added token {token.content!r} the id {index}, and after the tokens of tokenizer.json it would be "
                    f"{inner.token_to_id(token.content)}",
                    "copy tokenizer.json and tokenizer_config.json again, from the same model",
                )
    names = {token.content for token in inner.get_added_tokens_decoder().values()}
    for entry in _special(config):
        if _content(entry) not in names:
            token = _token(entry, _CONFIG, where, special=True)
            inner.add_tokens([token])
            changed.append(repr(token))
            names.add(token.content)
    return changed


def _special(config: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the special tokens that a config names: those of transformers' roles, those of other roles, and those without a role."""
    others = {key: value for key, value in config.items() if key.endswith("_token") and key not in ROLES and isinstance(value, str)}
    extra = config.get(_LISTS[0]) or config.get(_LISTS[1]) or []
    if isinstance(extra, Mapping):
        others, extra = others | dict(extra), []
    named = (config.get(role) for role in ROLES)
    listed = extra if isinstance(extra, list) else []
    for entry in (*named, *others.values(), *listed):
        content = entry.get("content") if isinstance(entry, Mapping) else entry
        if isinstance(content, str) and content:
            yield entry


def _content(entry: Any) -> str:
    return str(entry["content"] if isinstance(entry, Mapping) else entry)


def _id(value: Any, file: str, where: str) -> int:
    """Return a token id from its JSON form, a number or the key of an object."""
    if (type(value) is int or isinstance(value, str)) and str(value).isdecimal():
        return int(value)
    raise DataError(f"{file} of {where} has {value!r} as the id of an added token", "ids are whole numbers from 0, copy it again")


def _token(entry: Any, file: str, where: str, *, special: bool = False) -> Any:
    """Return the `tokenizers.AddedToken` of a JSON entry."""
    from tokenizers import AddedToken

    if isinstance(entry, str):
        return AddedToken(entry, special=special)
    content = entry.get("content") if isinstance(entry, Mapping) else None
    flags = {} if content is None else {name: entry[name] for name in _FLAGS if name in entry}
    if not isinstance(content, str) or not content or not all(type(flag) is bool for flag in flags.values()):
        raise DataError(f"{file} of {where} has an added token of an unknown form: {str(entry)[:60]}", "copy it again")
    return AddedToken(content, **{**flags, **({"special": True} if special else {})})
