"""Rules for the keys of generation_config.json, in the form of the rules for config.json (`architecture.foreign_keys`).

Ids that begin and end texts are read. Keys of sampling are left to flags. Any other key that changes texts in transformers and has no
implementation here is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..architecture.foreign_keys import Rules, Used, check_foreign, ignored, only

_ADVICE: Final = "that is not done here; remove the key to write texts without it"

GENERATION_KEYS: Final[Rules] = {
    **dict.fromkeys(("bos_token_id", "eos_token_id"), Used()),
    **ignored("the config says it", "pad_token_id decoder_start_token_id"),
    **ignored(
        "flags say it",
        "max_length max_new_tokens max_time do_sample early_stopping num_beams temperature top_k top_p length_penalty num_return_sequences seed "
        "repetition_penalty no_repeat_ngram_size",
    ),
    **ignored(
        "how transformers computes or returns the same texts",
        "use_cache cache_implementation cache_config max_cache_len output_attentions output_hidden_states output_scores output_logits "
        "return_dict_in_generate is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold "
        "prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit assistant_lookbehind target_lookbehind assistant_ensemble_weight "
        "speculation_type use_mtp compile_config disable_compile continuous_batching_config low_memory prefill_chunk_size renormalize_logits "
        "remove_invalid_values",
    ),
    **ignored(
        "a record of the software that wrote the file", "_from_model_config transformers_version generation_kwargs trust_remote_code chat_format"
    ),
    **only((None, 0), _ADVICE, "min_length min_new_tokens encoder_no_repeat_ngram_size"),
    **only((None, 1.0, 1), _ADVICE, "typical_p encoder_repetition_penalty guidance_scale num_beam_groups top_h"),
    **only((None, 0.0, 0), _ADVICE, "diversity_penalty penalty_alpha min_p epsilon_cutoff eta_cutoff"),
    **only((None, []), _ADVICE, "bad_words_ids suppress_tokens begin_suppress_tokens stop_strings constraints force_words_ids sequence_bias"),
    **only(
        (None, False),
        _ADVICE,
        "forced_bos_token_id forced_eos_token_id exponential_decay_length_penalty token_healing watermarking_config dola_layers",
    ),
}
"""Rule of each key of transformers' ``GenerationConfig``."""

_FLAGS: Final = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
"""Keys that change even the most probable text and have a flag -> the value that changes nothing."""


def check_generation(values: Mapping[str, Any], source: str) -> None:
    """Check that texts equal those of transformers, apart from the values that flags set.

    Raises:
        UsageError: a key changes texts in a way that is not implemented.
    """
    check_foreign(GENERATION_KEYS, values, source)


def generation_notes(values: Mapping[str, Any], source: str) -> list[str]:
    """Return sentences for the caller to print: values that take effect only through a flag, and keys that are ignored."""
    notes = [
        f"{source} has {key} {values[key]}, which is used where a flag says it: --{key.replace('_', '-')} {values[key]}"
        for key, usual in _FLAGS.items()
        if values.get(key) not in (None, usual)
    ]
    unread = [key for key, value in values.items() if value is not None and key not in GENERATION_KEYS]
    if unread:
        notes.append(f"{source} has keys that are ignored, here and in transformers: {', '.join(unread)}")
    return notes
