"""Known keys of tokenizer files: the keys that are used, those that are ignored, with the reason, and those that are refused.

The `tokenizers` package reads all of tokenizer.json. Only three keys have no effect here: `truncation` and `padding`, which are about batches, and
`dropout` of merges, which makes the tokens of a text random. If another file repeats a rule of tokenizer.json, the latter counts. A contradicting key
is refused if it changes tokens in transformers; otherwise it becomes a note. Keys in no table have no effect in transformers' general tokenizer; a
note names them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from ..errors import DataError
from .added_tokens import ROLES
from .rule_bounds import steps
from .token_rules import TokenRules

USED: Final = frozenset(
    {
        *ROLES,
        *("added_tokens_decoder", "additional_special_tokens", "extra_special_tokens", "chat_template", "split_special_tokens"),
        *("add_bos_token", "add_eos_token", "add_prefix_space", "do_lower_case", "strip_accents", "tokenize_chinese_chars", "fix_mistral_regex"),
    }
)
"""Keys of tokenizer_config.json and special_tokens_map.json that are used, or compared with tokenizer.json."""
_REASONS: Final[Mapping[str, str]] = {
    "rows are cut and padded to --seq-len, texts and prompts never": (
        "model_max_length max_length max_len padding_side truncation_side truncation_strategy truncation padding stride pad_to_multiple_of "
        "pad_token_type_id model_input_names return_token_type_ids max_model_input_sizes"
    ),
    "a record of the files and the software that wrote them": (
        "tokenizer_class tokenizer_type processor_class name_or_path special_tokens_map_file tokenizer_file vocab_file merges_file spm_file auto_map "
        "transformers_version _commit_hash device_map backend is_local local_files_only token use_fast from_slow init_inputs trust_remote_code "
        "slow_tokenizer_class vocab_size added_tokens_file full_tokenizer_file tokenizers_version revision __type model_type tokenizer_version"
    ),
    "about text, not ids: tokens are written as tokenizer.json decodes them": (
        "clean_up_tokenization_spaces errors spaces_between_special_tokens decode_with_prefix_space skip_special_tokens"
    ),
    "of tokenizers without a tokenizer.json, whose rules it has": (
        "legacy legacy_behaviour sp_model_kwargs do_basic_tokenize never_split normalize remove_space keep_accents do_lower trim_offsets unk_id "
        "bos_id eos_id pad_id vocab use_regex add_dummy_prefix extra_ids remove_extra_whitespaces wordpieces_prefix clean_text"
    ),
    "of chats, which the chat template writes": "use_default_system_prompt response_schema response_template chat_control_tokens tool_parser_type",
    "of inputs that are no text": "image_token_id video_token_id audio_token_id image_seq_len num_image_tokens patch_size spatial_merge_size",
}
IGNORED: Final[Mapping[str, str]] = {key: reason for reason, keys in _REASONS.items() for key in keys.split()}
"""Key of tokenizer_config.json -> reason why it is ignored."""


def check_keys(inner: Any, rules: TokenRules, objects: Mapping[str, Mapping[str, Any]], where: str) -> tuple[str, ...]:
    """Compare the keys of a tokenizer's files with its tokenizer.json.

    Args:
        inner: a `tokenizers.Tokenizer` with all of its tokens.
        rules: rules of the tokenizer.
        objects: name -> content of the tokenizer's companion files.
        where: directory of the tokenizer, for error messages.

    Returns:
        Notes about keys that are ignored, a sentence each.

    Raises:
        DataError: a key contradicts tokenizer.json in a way that changes tokens in transformers.
    """
    config = objects.get("tokenizer_config.json", {})
    for key, value, given in _repeated(rules.sections, config):
        if type(value) is bool and value != given:
            raise DataError(
                f"{key} in tokenizer_config.json of {where} is {str(value).lower()}, and tokenizer.json has it {str(given).lower()}, so they "
                "cut texts into different tokens",
                "set both to the value that the model was trained with",
            )
    if config.get("fix_mistral_regex") is True:
        raise DataError(
            f"fix_mistral_regex in tokenizer_config.json of {where} replaces the rule of tokenizer.json that cuts texts into words",
            "load and save the tokenizer with transformers, and remove the key",
        )
    return (*_around(inner, rules, config), *_unknown(objects))


def _repeated(sections: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """Yield the keys of a config that repeat a rule of tokenizer.json, as (key, value in the config, value in tokenizer.json)."""
    normalizers, splitters = steps(sections["normalizer"]), steps(sections["pre_tokenizer"])
    for step in normalizers:
        if step["type"] == "BertNormalizer":
            accents = step["lowercase"] if step["strip_accents"] is None else step["strip_accents"]
            yield "do_lower_case", config.get("do_lower_case"), step["lowercase"]
            yield "strip_accents", config.get("strip_accents"), accents
            yield "tokenize_chinese_chars", config.get("tokenize_chinese_chars"), step["handle_chinese_chars"]
    prefix = config.get("add_prefix_space")
    for step in splitters:
        if step["type"] == "ByteLevel":
            yield "add_prefix_space", prefix, step["add_prefix_space"]
    is_prepended = any(step["type"] == "Prepend" for step in normalizers)
    if prefix is False and (is_prepended or any(step["type"] == "Metaspace" and step["prepend_scheme"] != "never" for step in splitters)):
        yield "add_prefix_space", prefix, True


def _around(inner: Any, rules: TokenRules, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes about tokens that a config puts around a text and tokenizer.json does not, or vice versa."""
    ids, is_added = rules.around("a")
    for key, end, side in (("bos_token", 0, "before"), ("eos_token", -1, "after")):
        value, entry = config.get(f"add_{key}"), config.get(key)
        word = entry.get("content") if isinstance(entry, Mapping) else entry
        index = inner.token_to_id(word) if isinstance(word, str) else None
        is_put = bool(ids) and is_added[end] and ids[end] == index
        if type(value) is bool and index is not None and value != is_put:
            yield (
                f"add_{key} in tokenizer_config.json is {str(value).lower()} and is not followed: tokenizer.json puts "
                f"{word if is_put else f'no {word}'} {side} a text"
            )


def _unknown(objects: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        keys = [key for key in objects.get(name, {}) if key not in USED and key not in IGNORED and not key.endswith("_token")]
        if keys:
            yield f"{name} has {', '.join(keys)}, which {'is' if len(keys) == 1 else 'are'} not known here and not used"
