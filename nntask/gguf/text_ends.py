"""Ids around texts in the metadata of GGUF files, in both directions.

A file has one id that begins a text and three that end one: the end of a text, of a turn, and of a message. llama.cpp also recognises end tokens by
their words, so these are read too. A key of ollama has the ordered list of all end tokens; in a file with this key, only the list counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

PREFIX: Final = "tokenizer.ggml."
_ALL_ENDS: Final = f"{PREFIX}eos_token_ids"
_ENDS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")
_OF_MESSAGES: Final = "<|eom_id|>"
_OF_TURNS: Final = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<EOT>", "_<EOT>", "[EOT]", "<end_of_utterance>")
_WORDS: Final = frozenset(
    (
        *_OF_TURNS,
        *("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", _OF_MESSAGES, "[EOS]", "<eos>", "[e~["),
        *("<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<turn|>", "<|tool_response>"),
    )
)
"""Tokens that end a text for llama.cpp, whatever the keys are; its tokens for filling in the middle are no ends here."""
_TURNED_OFF: Final = (("<|end|>", ("<|return|>", "<|call|>")), ("<|end|>", ("<|calls|>", "<|flush|>")), ("</s>", ("<|tool_response>",)))
"""(word, other words of the vocabulary with which it is not an end)."""


def id_of(metadata: Mapping[str, Any], name: str) -> int | None:
    """Return the id of a special token; None if there is none."""
    value = metadata.get(PREFIX + name)
    return value if type(value) is int else None


def beyond_vocabulary(metadata: Mapping[str, Any], vocab_size: int) -> list[str]:
    """Return keys of ids that no token has, with their values; a negative value means none."""
    ids = {name: metadata.get(PREFIX + name) for name in ("bos_token_id", *_ENDS)}
    unset = (1 << 32) - 1  # -1 as an unsigned number
    return [f"{PREFIX}{name} {index}" for name, index in ids.items() if type(index) is int and vocab_size <= index != unset]


def words_of(metadata: Mapping[str, Any]) -> list[str]:
    """Return the words of the vocabulary; empty if there is none."""
    tokens = metadata.get(f"{PREFIX}tokens")
    return tokens if isinstance(tokens, list) else []


def ends_by_word(tokens: Sequence[str]) -> list[int]:
    """Return ids of the tokens that end a text by their words."""
    found = {word: tokens.index(word) for word in _WORDS.intersection(tokens)}
    for word, others in _TURNED_OFF:
        if all(other in found for other in others):
            found.pop(word, None)
    return sorted(found.values())


def ids_from(metadata: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Return the ids around texts, below `vocab_size`, in the form of configs; ends of turns and of messages are ends of texts too."""
    tokens, given = words_of(metadata), metadata.get(_ALL_ENDS)
    ends: list[int | None]
    if isinstance(given, np.ndarray) and given.dtype.kind in "iu":
        ends = [int(each) for each in given]
    else:
        ends = [*(id_of(metadata, name) for name in _ENDS), *ends_by_word(tokens)]
    begin = id_of(metadata, "bos_token_id")
    if begin is None and metadata.get(f"{PREFIX}model") == "llama" and tokens[1:2] == ["<s>"]:
        begin = 1  # the default of llama.cpp
    ids = list(dict.fromkeys(end for end in ends if end is not None and 0 <= end < vocab_size))
    return {
        "bos_token_id": begin if begin is not None and 0 <= begin < vocab_size else None,
        "eos_token_id": ids if len(ids) > 1 else ids[0] if ids else None,
    }


def id_keys(begin: int | None, ends: Sequence[int], tokens: Sequence[str]) -> dict[str, Any]:
    """Return key -> value of the id that begins a text, if any, and of those that end one; `tokens` are the words of the vocabulary, if any."""
    rest = list(ends[1:])
    turn, message = _chosen(rest, tokens, _OF_TURNS), _chosen(rest, tokens, (_OF_MESSAGES,))
    turn, message = (rest.pop(0) if each is None and rest else each for each in (turn, message))
    named = {"bos_token_id": begin, "eos_token_id": ends[0] if ends else None, "eot_token_id": turn, "eom_token_id": message}
    keys: dict[str, Any] = {PREFIX + name: index for name, index in named.items() if index is not None}
    read = ids_from({**keys, f"{PREFIX}tokens": list(tokens)}, max((*ends, len(tokens))) + 1)["eos_token_id"]
    if list(ends) != (read if isinstance(read, list) else [] if read is None else [read]):
        keys[_ALL_ENDS] = list(ends)
    return keys


def _chosen(rest: list[int], tokens: Sequence[str], words: Sequence[str]) -> int | None:
    """Remove and return the first id of `rest` with one of the words; None if there is none."""
    index = next((each for each in rest if each < len(tokens) and tokens[each] in words), None)
    if index is not None:
        rest.remove(index)
    return index


def unknown_ends(ends: Sequence[int], keys: Mapping[str, Any], tokens: Sequence[str]) -> list[int]:
    """Return the ids in `ends` at which llama.cpp does not stop, because neither a metadata key nor their word marks them as ends."""
    told = {keys.get(PREFIX + name) for name in _ENDS} | set(ends_by_word(tokens))
    return [end for end in ends if end not in told]
