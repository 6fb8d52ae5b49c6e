r"""Proofs that a pre-tokenizer's regular expression splits at a seam and gives the same pieces for each side alone as for the whole text.

A seam has one character on each side. The expression is parsed into alternatives, and these into items: a class of characters and a repetition count.
If no match can contain a character of the left side's class followed by one of the right side's, then no attempt to match crosses the seam. There
must be no lookbehind, and the only lookahead may be ``\s+(?!\S)`` followed by the alternative ``\s+``: these two give the same pieces whether the
text ends at the seam or continues. An expression that this grammar does not cover is not proved.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

Side = Literal["word", "space", "line", "letter"]
"""Class of characters: any character that is not whitespace, the space, the line feed, or letters."""

_ALL: Final[frozenset[Side]] = frozenset(("word", "space", "line", "letter"))
GPT_2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Expression of the pre-tokenizer `ByteLevel`."""
_AHEAD: Final = r"\s+(?!\S)"
_SPACES: Final = r"\s+"
_ITEM: Final = re.compile(
    r"(?P<ends>\(\?i:[^()\\\[\]|*+?{}. ]+(?:\|[^()\\\[\]|*+?{}. ]+)*\))|(?P<set>\[\^?(?:\\.(?:\{\w+\})?|[^\\\[\]])+\])"
    r"|(?P<escape>\\[pP]\{\w+\}|\\[sSdrnt])|(?P<char>[^\\\[\](){}|*+?.^$])"
)
_COUNT: Final = re.compile(r"[*+?]|\{(\d+)(?:,(\d*))?\}")
_MEMBER: Final = re.compile(r"\\[pP]\{\w+\}|\\.|.", re.DOTALL)
_LETTERS: Final = frozenset({r"\p{L}", r"\p{Lu}", r"\p{Ll}", r"\p{Lt}", r"\p{Lm}", r"\p{Lo}"})
_OTHERS: Final = frozenset({r"\p{N}", r"\p{P}", r"\p{S}", r"\p{M}", r"\d"})


@dataclass(frozen=True, slots=True)
class _Item:
    """Item of an alternative: the classes of which it may match a character, the smallest count, and whether it repeats."""

    sides: frozenset[Side]
    least: int
    repeats: bool


def splits(pattern: str, left: Side, right: Side) -> bool | None:
    """Return whether an expression splits at a seam.

    Args:
        pattern: regular expression in Oniguruma's syntax; matches and the text between them are pieces.
        left: class of the character before the seam.
        right: class of the character after the seam.

    Returns:
        True if a piece always ends at the seam; False if a piece may extend across it, but all other boundaries stay; None if nothing is proved.
    """
    alternatives = _alternatives(pattern)
    for number, alternative in enumerate(alternatives):
        if alternative == _AHEAD:
            if alternatives[number + 1 : number + 2] != [_SPACES]:
                return None
            alternative = _SPACES
        items = _items(alternative)
        if items is None or _crosses(items, left, right):
            return None
    return _SPACES in alternatives


def _alternatives(pattern: str) -> list[str]:
    """Return the alternatives of an expression; groups and sets are not divided."""
    alternatives, level, is_set, escaped = [""], 0, False, False
    for char in pattern:
        if not escaped and not is_set:
            level += (char == "(") - (char == ")")
            is_set = char == "["
            if char == "|" and level == 0:
                alternatives.append("")
                continue
        elif not escaped and char == "]":
            is_set = False
        escaped = char == "\\" and not escaped
        alternatives[-1] += char
    return alternatives


def _items(alternative: str) -> list[_Item] | None:
    """Return the items of an alternative; None if the grammar does not cover one."""
    items, position = [], 0
    while position < len(alternative):
        item = _ITEM.match(alternative, position)
        if item is None:
            return None
        position = item.end()
        count = _COUNT.match(alternative, position)
        least, repeats = 1, False
        if count is not None:
            position = count.end()
            least = 0 if count[0] in "*?" else int(count[1] or 1)
            repeats = count[0] != "?" and count[0] != "{1}"
            if alternative[position : position + 1] in ("?", "+"):  # lazy and possessive counts
                return None
        items.append(_Item(_sides_of(item), least, repeats))
    return items


def _sides_of(item: re.Match[str]) -> frozenset[Side]:
    """Return a superset of the classes of which an item may match a character."""
    if item["ends"]:
        return frozenset(("word", "letter"))
    text = item["set"] or item["escape"] or item["char"]
    is_negative = text.startswith("[^")
    members = set(_MEMBER.findall(text[2 if is_negative else 1 : -1])) if item["set"] else {text}
    if is_negative:
        left_out: set[Side] = set()
        if r"\s" in members:
            left_out |= {"space", "line"}
        left_out |= {"space"} if " " in members else set()
        left_out |= {"line"} if r"\n" in members or "\n" in members else set()
        left_out |= {"letter"} if r"\p{L}" in members else set()
        return _ALL - left_out
    sides: set[Side] = set()
    for member in members:
        sides |= _sides_of_member(member)
    if "-" in members and len(members) > 1:  # a range
        sides |= {"word", "letter"} if all(len(member) > 1 or member > " " for member in members) else _ALL
    return frozenset(sides)


def _sides_of_member(member: str) -> set[Side]:
    if member == r"\s":
        return {"space", "line"}
    if member in (r"\n", "\n"):
        return {"line"}
    if member == " ":
        return {"space"}
    if member in (r"\r", "\r", r"\t", "\t"):
        return set()
    if member in _LETTERS or (len(member) == 1 and member.isalpha()):
        return {"word", "letter"}
    if member in _OTHERS or len(member) == 1 or (len(member) == 2 and not member[1].isalnum()):
        return {"word"}
    return set(_ALL)


def _crosses(items: list[_Item], left: Side, right: Side) -> bool:
    """Return whether a match may have a character of the left class directly before one of the right class."""
    for number, item in enumerate(items):
        if left not in item.sides:
            continue
        if item.repeats and right in item.sides:
            return True
        for after in items[number + 1 :]:
            if right in after.sides:
                return True
            if after.least:
                break
    return False
