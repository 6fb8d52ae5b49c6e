"""Rules for keys of config.json that are not fields of our configs: read by a translation, another name of a field, ignored for a reason, or refused
unless the value changes nothing.

A class of configs has the rules of its own keys in `ModelConfig.foreign` and inherits those of its bases, which it may override. The rules cover
every key of transformers' config of the family. A key without a rule and without a field therefore changes nothing in transformers' model; callers
report it (`ModelConfig.unread`). Keys within a rotary scaling are handled in `rotary`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ..errors import UsageError
from .config_checks import shown


@dataclass(frozen=True, slots=True)
class Used:
    """A key that `ModelConfig.read` of its class or other code reads."""


@dataclass(frozen=True, slots=True)
class Ignored:
    """A key that does not change the results of nntask's model.

    Args:
        reason: why it does not.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Only:
    """A key that changes a model's results unless it has one of some values.

    Args:
        values: JSON values that change nothing; the first one is named in the error message.
        advice: remedy.
    """

    values: tuple[Any, ...]
    advice: str

    def check(self, key: str, value: Any, source: str) -> None:
        """Check a value.

        Raises:
            UsageError: the value is none of `values`.
        """
        if not any(type(value) is type(legal) and value == legal for legal in self.values):
            raise UsageError(f"{key} in {source} must be {shown(self.values[0])}, got {shown(value)}", self.advice)


@dataclass(frozen=True, slots=True)
class Alias:
    """Another name of a field in transformers' `attribute_map`.

    Args:
        field: name of the field.
    """

    field: str


Rule = Used | Ignored | Only | Alias
Rules = Mapping[str, Rule]


def ignored(reason: str, keys: str) -> dict[str, Rule]:
    """Return the rule of several keys, which are separated by spaces."""
    return {key: Ignored(reason) for key in keys.split()}


def only(values: tuple[Any, ...], advice: str, keys: str) -> dict[str, Rule]:
    """Return the rule of several keys, separated by spaces, that may have these values only."""
    return {key: Only(values, advice) for key in keys.split()}


def off(advice: str, keys: str) -> dict[str, Rule]:
    """Return the rule of several switches, separated by spaces, that must be off."""
    return only((False, None), advice, keys)


COMMON: Final[Rules] = {
    "model_type": Used(),
    "bos_token_id": Used(),
    "eos_token_id": Used(),
    "pad_token_id": Ignored("a token is padding where the data say so; its row of the embedding learns like any other"),
    **ignored("the tokenizer's files say it", "cls_token_id sep_token_id mask_token_id unk_token_id decoder_start_token_id tokenizer_class"),
    **ignored(
        "a record of the software that wrote the file",
        "_name_or_path name_or_path _model_name_or_path transformers_version _commit_hash finetuning_task auto_map unsloth_version unsloth_fixed "
        "custom_pipelines transformers.js_config is_llama_config language license",
    ),
    "architectures": Ignored("the weights in the files decide, and those of another head are refused"),
    **ignored("files say the types of their weights, and --dtype that of the model", "dtype torch_dtype use_bfloat16"),
    **ignored(
        "how transformers computes or returns the same numbers",
        "use_cache use_return_dict return_dict output_attentions output_hidden_states output_past torchscript attn_implementation "
        "_attn_implementation _attn_implementation_autoset _attn_implementation_internal _flash_attn_2_enabled use_flash_attention_2 "
        "gradient_checkpointing use_gradient_checkpointing chunk_size_feed_forward tf_legacy_loss pretraining_tp "
        "base_model_tp_plan base_model_pp_plan",
    ),
    **ignored("the family says it", "is_encoder_decoder tie_encoder_decoder is_decoder"),
    **ignored(
        "of another head",
        "id2label label2id num_labels problem_type classifier_dropout summary_type summary_use_proj summary_activation summary_proj_to_labels "
        "summary_first_dropout summary_hidden_size",
    ),
    **ignored(
        "flags of generation and generation_config.json decide",
        "max_length min_length max_new_tokens min_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k "
        "top_p min_p typical_p epsilon_cutoff eta_cutoff repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size "
        "bad_words_ids num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values "
        "exponential_decay_length_penalty suppress_tokens begin_suppress_tokens cache_implementation prefix task_specific_params",
    ),
    **off("use a model without an encoder to attend to", "add_cross_attention"),
    **only(
        (None,),
        "use the weights that it was made from, or a GGUF file, which nntask quantize writes",
        "quantization_config compression_config",
    ),
    "pruned_heads": Only(({}, None), "use a model with all its heads"),
    "is_causal": Only((True, None), "use a model whose tokens see those before them"),
}
"""Keys that transformers' base class has, or had, for every family."""


def check_foreign(rules: Rules, values: Mapping[str, Any], source: str) -> None:
    """Check the keys that allow certain values only.

    Raises:
        UsageError: a key has another value.
    """
    for key, value in values.items():
        if isinstance(rule := rules.get(key), Only):
            rule.check(key, value, source)


def renamed(rules: Rules, values: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """Return the values with other names of fields replaced by the fields.

    Raises:
        UsageError: a field has two different values.
    """
    by_field = dict(values)
    for key, value in values.items():
        rule = rules.get(key)
        if not isinstance(rule, Alias) or value is None:
            continue
        if (other := by_field.setdefault(rule.field, value)) != value:
            raise UsageError(f"{source} has {rule.field} twice, {shown(value)} in {key} and {shown(other)} in {rule.field}", "remove the wrong one")
    return by_field
