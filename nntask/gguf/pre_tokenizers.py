"""Rules that cut texts into words before byte-level BPE, under llama.cpp's names (`tokenizer.ggml.pre`).

A rule is a list of regular expressions, each of which cuts the pieces of the one before it, and a few switches. The expressions are those of the
tokenizer.json files that the rules are named after, also for rules that llama.cpp approximates. Rules that llama.cpp implements by code of its own
(kimi-k2, afmoe, superbpe) or without the byte alphabet (gemma4, whitespace) are not known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

_SHORT: Final = "'s|'t|'re|'ve|'m|'ll|'d"
"""Ends of English words."""
_LINES: Final = r"[\r\n]*"
_REST: Final = r"\s+(?!\S)|\s+"
_GPT_2: Final = rf"{_SHORT}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_DEEPSEEK: Final = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"""
    rf"{_LINES}|\s*[\r\n]+|{_REST}"
)
_LETTERS: Final = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f"
    "\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd"
    "\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59"
    "\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149"
    "\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    "\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb"
    "\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Letters with two cases, from DeepSeek's tokenizer.json."""


def _words(digits: str, *, letters: str = r"\p{L}", short: str = f"(?i:{_SHORT})|", more: str = "", spaces: str = rf"\s*[\r\n]+|{_REST}") -> str:
    """Return the expression of Llama 3 and similar models: words with one mark before them, numbers, punctuation, and spaces."""
    word = letters if letters == r"\p{L}" else f"[{letters}]"
    return rf"{short}[^\r\n\p{{L}}\p{{N}}]?{word}+|{digits}| ?[^\s{letters}\p{{N}}{more}]+{'' if more else _LINES}|{spaces}"


def _cased(digits: str, *, short: str = f"(?i:{_SHORT})?") -> str:
    """Return the expression of GPT-4o and similar models, in which capitals begin new words."""
    first = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{first}{_UPPER}*{_LOWER}+{short}|{first}{_UPPER}+{_LOWER}*{short}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_REST}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule that cuts texts into words.

    Args:
        name: first name of the rule, which is written to files.
        patterns: regular expressions, applied in turn.
        others: further names, with the same words and switches.
        ignores_merges: whether a word that is a token is taken whole, without merges.
        adds_bos: whether a begin-of-text token is added by default.
        is_composed: whether the tokenizers of that name bring texts to Unicode's form NFC first.
        digits: whether the file that the rule is named after has single digits and GPT-2's expression as separate steps.
    """

    name: str
    patterns: tuple[str, ...]
    others: tuple[str, ...] = ()
    ignores_merges: bool = False
    adds_bos: bool = False
    is_composed: bool = False
    digits: bool = False

    def pre_tokenizer(self) -> dict[str, Any]:
        """Return the pre-tokenizer of a tokenizer.json."""
        if self.patterns == (_GPT_2,):
            return _level(use_regex=True)
        if self.digits:
            return {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _level(use_regex=True)]}
        return {"type": "Sequence", "pretokenizers": [*map(_split, self.patterns), _level(use_regex=False)]}


def _level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


DECODER: Final[Mapping[str, Any]] = _level(use_regex=True)
"""Decoder of a tokenizer.json with the byte alphabet."""
_LLAMA_3: Final = _words(r"\p{N}{1,3}")
_QWEN: Final = _words(r"\p{N}")
_HALVES: Final = "|".join(rf"\s{{{1 << power}}}(?!\S)" for power in range(9, 1, -1))

RULES: Final = (
    Rule(
        name="default",
        patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT_2, r"\p{N}+", "[0-9][0-9][0-9]"),
    ),
    Rule(
        name="gpt-2",
        patterns=(_GPT_2,),
        others=(
            *("gpt2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "gigachat", "mellum", "a.x-4.0", "modern-bert"),
            *("jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "jina-v1-en", "jina-v2-code", "roberta-bpe"),
        ),
    ),
    Rule(
        name="smollm",
        patterns=(r"\p{N}", _GPT_2),
        others=("smollm2", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
        digits=True,
    ),
    Rule(
        name="llama-bpe",
        patterns=(_LLAMA_3,),
        others=("llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
        ignores_merges=True,
        adds_bos=True,
    ),
    Rule(name="dbrx", patterns=(_LLAMA_3,), others=("smaug-bpe", "glm4", "chatglm-bpe")),
    Rule(name="jais-2", patterns=(_words(r"\p{N}{1,3}", spaces=rf"\s*[\r\n]+|{_HALVES}|\s{{1,2}}(?!\S)|\s{{1}}"),)),
    Rule(
        name="qwen2",
        patterns=(_QWEN,),
        others=("deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "hunyuan", "solar-open", "grok-2"),
        is_composed=True,
    ),
    Rule(name="stablelm2", patterns=(_QWEN,)),
    Rule(name="qwen35", patterns=(_words(r"\p{N}", letters=r"\p{L}\p{M}"),), is_composed=True),
    Rule(name="seed-coder", patterns=(_words(r"\p{N}{1}", more=r"\r\n"),)),
    Rule(name="ufakzeka", patterns=(_words(r"\p{N}", short=""),)),
    Rule(
        name="bailingmoe",
        patterns=(r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",),
        others=("bailingmoe2", "llada-moe"),
    ),
    Rule(
        name="exaone-moe",
        patterns=(
            rf"(?i:{_SHORT})|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|"
            rf"\s*[\r\n]|{_REST}",
        ),
    ),
    Rule(name="gpt-4o", patterns=(_cased(r"\p{N}{1,3}"),), others=("llama4", "kanana2", "talkie", "minimax-m2")),
    Rule(name="tekken", patterns=(_cased(r"\p{N}", short=""),), ignores_merges=True, adds_bos=True),
    Rule(name="tiny_aya", patterns=(r"\d{1,3}(?=(?:\d{3})*\b)", _cased(r"\p{N}{1,3}")), others=("cohere2moe",)),
    Rule(name="minicpm5", patterns=(r"\p{N}{1,3}", _words(r"\p{N}+")), ignores_merges=True),
    Rule(name="laguna", patterns=(r"[^\n]+|[\n]+", _QWEN)),
    Rule(
        name="deepseek-llm",
        patterns=(r"[\r\n]", rf"\s?[{_LETTERS}]+", "\\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", "[一-龥ࠀ-一가-퟿]+", r"\p{N}+"),
    ),
    Rule(name="deepseek-coder", patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    Rule(name="deepseek-v3", patterns=(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK), others=("hunyuan-dense", "joyai-llm", "hy_v4")),
    Rule(name="falcon", patterns=(r"[\p{P}\$\+<=>\^~\|`]+", _GPT_2, "[0-9][0-9][0-9]")),
    Rule(name="bloom", patterns=(r" ?[^(\s|.,!?…。，、।۔،)]+",), others=("poro-chat", "gpt3-finnish")),
    Rule(name="viking", patterns=(r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}")),
)
BY_NAME: Final[Mapping[str, Rule]] = {name: rule for rule in RULES for name in (rule.name, *rule.others)}
"""Value of tokenizer.ggml.pre -> rule."""


def rule_of(content: Mapping[str, Any]) -> Rule | None:
    """Return the rule by which llama.cpp cuts texts like the tokenizer.json of a byte-level BPE; None if it has none."""
    steps, model = list(_steps(content.get("pre_tokenizer"))), content["model"]
    fitting = [rule for rule in RULES if rule.ignores_merges == bool(model.get("ignore_merges")) and list(_steps(rule.pre_tokenizer())) == steps]
    composed = [rule for rule in fitting if rule.is_composed == is_composed(content)]
    return next(iter([*composed, *fitting]), None)


def is_composed(content: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer.json brings texts to the form NFC and changes nothing else before it cuts them."""
    normalizer = content.get("normalizer")
    return isinstance(normalizer, Mapping) and normalizer.get("type") == "NFC"


def _steps(pre_tokenizer: Any) -> Iterator[tuple[str, ...]]:
    """Yield the steps of a pre-tokenizer, equal ones in one spelling."""
    if not isinstance(pre_tokenizer, Mapping):
        yield ("nothing",)
        return
    kind = pre_tokenizer.get("type")
    if kind == "Sequence":
        for each in pre_tokenizer.get("pretokenizers", []):
            yield from _steps(each)
    elif kind == "Digits":
        yield ("split", r"\p{N}" if pre_tokenizer.get("individual_digits") else r"\p{N}+")
    elif kind == "ByteLevel":
        yield from [("prefix",)] * bool(pre_tokenizer.get("add_prefix_space", True))
        yield from [("split", _GPT_2)] * bool(pre_tokenizer.get("use_regex", True))
        yield ("bytes",)
    else:
        yield _of_split(pre_tokenizer) or (str(kind), str(pre_tokenizer))


def _of_split(step: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the step of a Split that keeps matches and the text between them as pieces; None for any other step."""
    pattern, behavior = step.get("pattern"), str(step.get("behavior")).lower()
    regex = pattern.get("Regex") if isinstance(pattern, Mapping) else None
    if step.get("type") != "Split" or not isinstance(regex, str):
        return None
    covers = regex.endswith(_REST)  # then there is no text between matches
    keeps_all = behavior == "isolated" or (behavior == "removed" and covers)
    return ("split", regex) if keeps_all and bool(step.get("invert")) == (behavior == "removed") else None
