"""Tokenizers of directories without a tokenizer.json: vocab.json and merges.txt of byte-level BPE, or vocab.txt of BERT's WordPiece.

These files do not contain the rule that splits texts into words. As in transformers, the rule depends on the tokenizer's class, which
tokenizer_config.json or config.json names. Classes with other rules are refused with the command that converts the tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ..errors import DataError
from ..io.terminal_text import python_command, python_text

_VOCAB, _MERGES, _WORDS = "vocab.json", "merges.txt", "vocab.txt"
SENTENCE_PIECE: Final = "tokenizer.model"
_CLASSES: Final[Mapping[str, tuple[str, ...]]] = {
    "gpt2": ("GPT2Tokenizer", "CodeGenTokenizer", "gpt2", "gpt_neo", "gptj", "opt", "phi", "codegen"),
    "roberta": ("RobertaTokenizer", "BartTokenizer", "LongformerTokenizer", "roberta", "bart", "longformer"),
    "qwen2": ("Qwen2Tokenizer", "qwen2"),
    "bert": ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "bert", "distilbert", "electra"),
}
"""Rule -> names of its tokenizer classes, and the model_type of configs that name no class."""
_QWEN_2: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_END: Final = "<|endoftext|>"
SPECIAL: Final[Mapping[str, Mapping[str, str]]] = {
    "gpt2": dict.fromkeys(("unk_token", "bos_token", "eos_token"), _END),
    "roberta": {
        **{"bos_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "cls_token": "<s>"},
        **{"unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>"},
    },
    "qwen2": dict.fromkeys(("unk_token", "eos_token", "pad_token"), _END),
    "bert": {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]", "mask_token": "[MASK]"},
}
"""Rule -> role -> default special token."""


def vocabulary_of(directory: Path) -> tuple[Path, ...]:
    """Return the files of a vocabulary without a tokenizer.json; empty if there are none."""
    for names in ((_VOCAB, _MERGES), (_WORDS,)):
        if all((directory / name).is_file() for name in names):
            return tuple(directory / name for name in names)
    return ()


def conversion(directory: Path) -> str:
    """Return the shell command that writes a tokenizer.json for a directory with a tokenizer of another kind."""
    literal = python_text(directory)
    return python_command(f"from transformers import AutoTokenizer as A; A.from_pretrained({literal}).save_pretrained({literal})")


def rule_of(directory: Path, objects: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the rule of a directory's vocabulary, from name -> content of its JSON files.

    Raises:
        DataError: the rule of the tokenizer's class is not known.
    """
    config = objects.get("config.json", {})
    given = objects.get("tokenizer_config.json", {}).get("tokenizer_class") or config.get("tokenizer_class") or config.get("model_type")
    is_words = (directory / _WORDS).is_file() and not (directory / _VOCAB).is_file()
    if given is None:
        return "bert" if is_words else "gpt2"
    name = str(given).removesuffix("Fast")
    known_rule = next((rule for rule, names in _CLASSES.items() if name in names), None)
    if known_rule is None or (known_rule == "bert") != is_words:
        files = " and ".join(file.name for file in vocabulary_of(directory))
        raise DataError(
            f"{directory} has {files} and no tokenizer.json, and nntask does not know how a {name} cuts texts into words",
            f"write one with: {conversion(directory)}",
        )
    return known_rule


def built(directory: Path, rule: str, config: Mapping[str, Any]) -> Any:
    """Return the `tokenizers.Tokenizer` of a directory's vocabulary, without special tokens and without a template.

    Args:
        directory: directory of the vocabulary.
        rule: result of `rule_of`.
        config: content of tokenizer_config.json, with the special tokens of special_tokens_map.json.

    Raises:
        DataError: a file is broken.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    files = [str(file) for file in vocabulary_of(directory)]
    try:
        if rule == "bert":
            inner = Tokenizer(models.WordPiece(models.WordPiece.read_file(*files), unk_token=_word(config, "unk_token", rule)))
        else:
            vocab, merges = models.BPE.read_file(*files)
            inner = Tokenizer(models.BPE(vocab, merges, continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False))
    except Exception as error:  # the package raises bare Exception for any broken file
        raise DataError(f"{' and '.join(files)} are not a vocabulary: {error}", "copy the files again") from None
    if rule == "bert":
        inner.normalizer = normalizers.BertNormalizer(
            clean_text=True,
            handle_chinese_chars=config.get("tokenize_chinese_chars", True),
            strip_accents=config.get("strip_accents"),
            lowercase=config.get("do_lower_case", True),
        )
        inner.pre_tokenizer, inner.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(prefix="##")
        return inner
    prefix = bool(config.get("add_prefix_space", False))
    level = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=rule != "qwen2")
    inner.decoder = decoders.ByteLevel()
    if rule == "qwen2":
        from tokenizers import Regex

        inner.normalizer = normalizers.NFC()
        inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_QWEN_2), "isolated"), level])
    else:
        inner.pre_tokenizer = level
    return inner


def put_around(inner: Any, rule: str, config: Mapping[str, Any]) -> None:
    """Set the template of a tokenizer, whose special tokens must have been added before; the other arguments are those of `built`."""
    from tokenizers import processors

    def named(key: str) -> tuple[str, int]:
        word = _word(config, key, rule)
        return word, inner.token_to_id(word)

    if rule == "roberta":
        inner.post_processor = processors.RobertaProcessing(
            named("sep_token"), named("cls_token"), config.get("trim_offsets", True), bool(config.get("add_prefix_space", False))
        )
    elif rule == "bert":
        (begin, _), (end, _) = pairs = named("cls_token"), named("sep_token")
        inner.post_processor = processors.TemplateProcessing(
            single=f"{begin}:0 $A:0 {end}:0", pair=f"{begin}:0 $A:0 {end}:0 $B:1 {end}:1", special_tokens=list(pairs)
        )
    else:
        before, after = (config.get(f"add_{key}") is True for key in ("bos_token", "eos_token"))
        words = [named(key) for key, is_put in (("bos_token", before), ("eos_token", after)) if is_put]
        first, last = (f"{words[0][0]}:0 " if before else ""), (f" {words[-1][0]}:0" if after else "")
        second = (f" {words[0][0]}:1" if before else "") + " $B:1" + (f" {words[-1][0]}:1" if after else "")
        inner.post_processor = processors.TemplateProcessing(single=f"{first}$A:0{last}", pair=f"{first}$A:0{last}{second}", special_tokens=words)


def _word(config: Mapping[str, Any], key: str, rule: str) -> str:
    """Return the special token of a role, or else the rule's default."""
    value = config.get(key)
    return str(value.get("content") if isinstance(value, Mapping) else value or SPECIAL[rule].get(key, _END))
