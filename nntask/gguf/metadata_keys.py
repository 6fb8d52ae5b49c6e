"""Keys of an architecture in the metadata of a GGUF file: each is read, has a value that changes nothing, is ignored for a reason, or the file is
refused. Keys that llama.cpp does not know either are reported.

Numbers are fp32 in files and are read as their shortest decimals.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from ..errors import DataError

Values = Mapping[str, Any]

NEUTRAL: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "expert_count": ((0,), "experts"),
    "expert_used_count": ((0,), "experts"),
    "expert_shared_count": ((0,), "experts"),
    "expert_gating_func": ((0, 1), "weights of experts that are no softmax"),
    "expert_weights_scale": ((0, 1), "scaled weights of experts"),
    "attention.causal": ((True,), "tokens that see later tokens"),
    "attention.clamp_kqv": ((0,), "clamped queries, keys and values"),
    "attention.max_alibi_bias": ((0,), "ALiBi in place of rotary positions"),
    "attention.scale": ((0,), "scores with a scale of their own"),
    "attention.shared_kv_layers": ((0,), "blocks that share keys and values"),
    "attention.sliding_window": ((0,), "windows"),
    "attn_logit_softcapping": ((0,), "capped scores"),
    "final_logit_softcapping": ((0,), "capped logits"),
    "logit_scale": ((0, 1), "scaled logits"),
    "residual_scale": ((0, 1), "scaled residuals"),
    "embedding_scale": ((0, 1), "scaled embeddings"),
    "pooling_type": ((0,), "pooled embeddings as its output"),
    "nextn_predict_layers": ((0,), "blocks that predict further tokens"),
    "rope.scaling.alpha": ((0, 1), "NTK scaling of rotary positions"),
    "rope.scaling.yarn_log_multiplier": ((0,), "YaRN with a multiplier of its own"),
}
"""Key -> values with which a model is the same as without the key, and the meaning of all other values."""
IGNORED: Final[Mapping[str, str]] = {
    "vocab_size": "the same as the number of rows of the embedding",
    "rope.scaling.finetuned": "a record of the author of the scaling, not of its method",
    "attention.layer_norm_epsilon": "a number of another kind of norm",
    "attention.layer_norm_rms_epsilon": "a number of another kind of norm",
    "tensor_data_layout": "a name for the order of rows, which the architecture determines",
}
"""Key -> reason to ignore it."""
_KNOWN: Final = """
attention.compress_ratios attention.compress_rope_freq_base attention.group_norm_epsilon attention.group_norm_groups attention.head_count_kv
attention.key_length attention.key_length_mla attention.key_length_mla_swa attention.key_length_swa attention.kv_lora_rank attention.kv_lora_rank_swa
attention.output_group_count attention.output_lora_rank attention.output_scale
attention.q_lora_rank attention.recurrent_layers attention.relative_buckets_count attention.rope_pattern attention.sliding_window_pattern
attention.temperature_length attention.temperature_scale attention.value_expert_count attention.value_expert_used_count attention.value_length
attention.value_length_mla attention.value_length_mla_swa attention.value_length_swa attention.value_scale
block_size decoder_block_count decoder_start_token_id deepstack_mapping embedding_length_out embedding_length_per_layer_input features_length
full_attention_interval hash_layer_count hidden_activation interleave_moe_layer_step leading_dense_block_count n_deepstack_layers norm_before_fc
norm_before_residual num_loops proj_query rescale_every_n_layers router_logit_softcapping selector_rank selector_top_k skip_loop_final_norm
swiglu_clamp_exp swiglu_clamp_shexp swin_norm target_hidden_size target_layers time_decay_extra_dim time_mix_extra_dim token_shift_count
use_parallel_residual
rope.dimension_count rope.dimension_count_swa rope.dimension_sections rope.freq_base rope.freq_base_swa rope.scale_linear rope.scaling.attn_factor
rope.scaling.factor rope.scaling.original_context_length rope.scaling.type rope.scaling.yarn_attn_factor rope.scaling.yarn_beta_fast
rope.scaling.yarn_beta_slow rope.scaling.yarn_ext_factor
"""
_KNOWN_PREFIXES: Final = (
    *("expert_", "experts_", "moe_", "ssm.", "wkv.", "posnet.", "convnext.", "shortconv.", "attention.indexer.", "conv_", "xielu.", "altup."),
    *("activation_sparsity", "hyper_connection", "kda.", "dense_", "classifier."),
)
"""Keys that llama.cpp reads for any architecture and that change its results."""


class Keys:
    """The keys of an architecture in a file, with a record of the keys that were read.

    Args:
        metadata: whole metadata of the file.
        name: name of the architecture.
        source: name of the file, for messages.
    """

    def __init__(self, metadata: Values, name: str, source: str) -> None:
        self.metadata, self.name, self._source = metadata, name, source
        self._asked = set[str]()

    def _get(self, key: str, default: Any) -> Any:
        self._asked.add(key)
        return self.metadata.get(f"{self.name}.{key}", default)

    def number(self, key: str, default: float | None = None) -> Any:
        """Return a finite number, or the number that all blocks share if there is one for each.

        Raises:
            DataError: the key is missing and has no default, or its value is not a finite number.
        """
        value = self._get(key, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if type(value) not in (int, float) or not np.isfinite(value):
            got = "nothing" if value is None else str(value)[:60]
            raise DataError(f"{self.name}.{key} in {self._source} must be a finite number, got {got}", "convert the model again, or use another file")
        return shortest(value) if isinstance(value, float) and abs(value) < 3e38 else value

    def count(self, key: str, default: int | None = None) -> int:
        """Return a whole number above 0, which is safe as a divisor.

        Raises:
            DataError: the key is missing and has no default, or its value is not such a number.
        """
        value = self.number(key, default)
        if type(value) is not int or value < 1:
            raise self.refusal(key, value, "a whole number above 0")
        return value

    def refusal(self, key: str, value: Any, rule: str) -> DataError:
        """Return the error for a value of a key that nntask does not support."""
        return DataError(f"{self.name}.{key} in {self._source} must be {rule}, got {str(value)[:60]}", "use another file")

    def text(self, key: str) -> str:
        """Return a text; "" if it is missing."""
        return str(self._get(key, ""))

    def flags(self, key: str) -> np.ndarray[Any, Any] | None:
        """Return a list of switches, one for each block; None if the key is missing or has one number.

        Raises:
            DataError: the value is a list of something else.
        """
        value = self._get(key, None)
        if not isinstance(value, np.ndarray | list):
            return None
        value = np.asarray(value)
        if value.dtype.kind not in "biu" or not np.isin(value, (0, 1)).all():
            raise self.refusal(key, value, "a list of true and false")
        return value.astype(bool)

    def equal(self, key: str, expected: float, reason: str) -> None:
        """Check that a key is missing or has the one legal value.

        Raises:
            DataError: the key has another value.
        """
        if (value := self.number(key, expected)) != expected:
            raise self.refusal(key, value, f"{expected}, {reason}")

    def check_rest(self) -> list[str]:
        """Check the keys of the architecture that have not been read.

        Returns:
            Keys that llama.cpp does not read either.

        Raises:
            DataError: a key changes the model.
        """
        prefix, unread = f"{self.name}.", list[str]()
        for whole, value in self.metadata.items():
            key = whole.removeprefix(prefix)
            if not whole.startswith(prefix) or key in self._asked or key in IGNORED:
                continue
            if key in NEUTRAL:
                allowed, meaning = NEUTRAL[key]
                if not any(np.array_equal(value, each) for each in allowed):
                    raise DataError(
                        f"{whole} in {self._source} is {str(value)[:60]}: the model has {meaning}, which nntask's {self.name} does not support",
                        "use another model",
                    )
            elif key in _KNOWN.split() or key.startswith(_KNOWN_PREFIXES):
                raise DataError(
                    f"{whole} in {self._source} changes the model in a way that nntask's {self.name} does not support", "use another model"
                )
            else:
                unread.append(whole)
        return unread


_GENERAL_PREFIX, _SPLIT_PREFIX = "general.", "split."
_TOKENIZER: Final = """
add_bos_token add_eos_token add_space_prefix bos_token_id eom_token_id eos_token_id eos_token_ids eot_token_id merges model padding_token_id pre
scores token_type tokens unknown_token_id
"""
_TOKENIZER_IGNORED: Final = """
add_sep_token cls_token_id mask_token_id seperator_token_id separator_token_id token_type_count precompiled_charsmap remove_extra_whitespaces
fim_mid_token_id fim_pad_token_id fim_pre_token_id fim_rep_token_id fim_sep_token_id fim_suf_token_id
middle_token_id prefix_token_id suffix_token_id added_tokens normalizer.lowercase normalizer.strip_accents
"""
"""Keys of tokens inside of texts and of other kinds of tokenizers."""
_OTHERS: Final = ("tokenizer.chat_template", "tokenizer.huggingface.json", "quantize.", "adapter.", "imatrix.")


def check_kind(metadata: Values, source: str) -> None:
    """Check that a file holds a model.

    Raises:
        DataError: the file holds adapters, a projector or something else.
    """
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise DataError(f"general.type in {source} is {str(kind)[:60]!r}, not a model", "give the file of a model")


def unread_of_others(metadata: Values, name: str) -> list[str]:
    """Return keys outside of the architecture `name` that are neither read nor known to have no effect on texts."""
    known = {f"tokenizer.ggml.{key}" for key in (_TOKENIZER + _TOKENIZER_IGNORED).split()}
    prefixes = (_GENERAL_PREFIX, _SPLIT_PREFIX, f"{name}.", *_OTHERS)
    return [key for key in metadata if key not in known and not key.startswith(prefixes)]


def shortest(value: float) -> float:
    """Return the number with the fewest decimals that is the same in fp32."""
    return float(np.format_float_scientific(np.float32(value)))
