"""Tiny configurations of transformers, by rules over the names of their fields.

A rule gives a field a small value if its default is larger; fields without a rule keep their defaults. Nested configurations are made by the same
rules, and joined so that a width has one value wherever it stands.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

WIDTH: Final = 32
HEADS: Final = 4
HEAD: Final = WIDTH // HEADS
VOCABULARY: Final = 99
IMAGE: Final = 32
PATCH: Final = 8
LENGTH: Final = 16
POSITIONS: Final = 64
LABELS: Final = 5

_SPECIAL: Final = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 2, "cls_token_id": 1, "decoder_start_token_id": 1}

_EXACT: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_nextn_predict_layers", "pretraining_tp", "patch_stride"), 1),
    **{"conv_kernel": None, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "num_mel_bins": 16, "max_source_positions": LENGTH},
    **{"kv_lora_rank": 16, "q_lora_rank": 16, "o_lora_rank": 16, "index_topk": 8, "index_head_dim": HEAD, "index_n_heads": HEADS},
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "head_dim", "d_kv", "attention_head_size", "global_head_dim"), HEAD),
    **{"sliding_window": 8, "attention_window": 8, "num_queries": 10, "max_window_layers": 1, "type_vocab_size": 2, "rotary_dim": 4},
    **{"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8, "mamba_d_ssm": 64, "state_size": 8, "chunk_size": 8},
    **{"n_mels": 16, "audio_seq_length": LENGTH, "pruned": None, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "layerdrop": 0.0},
    **{"apply_spec_augment": False, "mask_time_prob": 0.0, "mask_feature_prob": 0.0, "router_jitter_noise": 0.0, "mlp_ratio": 2},
    **{"num_latents": 8, "d_latents": WIDTH, "num_image_tokens": 16, "codebook_size": 32, "codebook_dim": 8, "num_labels": LABELS, "window_size": 4},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": HEAD, "linear_value_head_dim": HEAD},
    **{"axial_pos_shape": [4, 4], "axial_pos_embds_dim": [16, 16], "num_buckets": 4, "lsh_attn_chunk_length": 8, "local_attn_chunk_length": 8},
    **{"num_codebooks": 2, "xvector_output_dim": WIDTH, "classifier_proj_size": WIDTH, "max_2d_position_embeddings": 128},
}
"""Largest values of some fields."""
_MISSING: Final = {"pad_token_id": 0, "num_experts_per_tok": 2, "prediction_length": 8, "vocab_size": VOCABULARY, "attn_layer_indices": [1]}
"""Values of fields whose default is None, which most classes do not train with."""

_RULES: Final[tuple[tuple[str, Any], ...]] = (
    (r"(kv_heads|key_value_heads|num_kv|n_head_kv)", 2),
    (r"experts_per_tok|moe_topk|top_k_experts|num_selected_experts|moe_top_k", 2),
    (r"(num|n)_(\w+_)?(shared|null)_experts", 1),
    (r"(num|n)_(\w+_)?experts$|moe_num_experts|num_experts", 4),
    (r"(^|_)(heads|head|n_heads|num_heads)$|num_attention_heads|attention_heads$|nhead$", HEADS),
    (r"(hidden_layers|num_layers|n_layers?|_layers|^depth|^layers|num_blocks|_depth|num_hidden_blocks)$", 2),
    (
        r"(intermediate_(size|dim)|ffn_dim|d_ff|n_inner|mlp_dim|ffn_hidden_size|feedforward_dim|dim_feedforward|_ffn_size|ffn_size|d_inner)$",
        2 * WIDTH,
    ),
    (r"(vocab_size|vocab_size_\w+|entity_vocab_size|num_embeddings)$", VOCABULARY),
    (r"(max_position_embeddings|n_positions|max_target_positions|max_seq_len\w*|max_length|max_sequence_length|n_ctx|seq_length)$", POSITIONS),
    (r"(hidden_(size|dim)\w*|d_model|n_embd|embed_dim|embedding_size|embedding_dim|emb_dim|projection_dim|\w*_hidden_size|\w*_embed_dim)$", WIDTH),
    (r"(^dim|^width|_dim|_width|out_features|_size_per_layer_input|output_channels|num_features|_proj_size|hidden_channels|bottleneck\w*)$", WIDTH),
    (r"^(neck_hidden_sizes?|fusion_hidden_size|decoder_channels|mask_feature_size|feature_size|conv_dim|num_filters|base_channels)$", WIDTH),
)
"""Pattern of a name -> value of a whole number that is larger."""


def tiny(config_class: Any, **given: Any) -> Any:
    """A tiny configuration of a class.

    Args:
        config_class: class of a configuration.
        given: fields with values of their own.

    Raises:
        Exception: whatever the class raises for fields that it does not accept together.
    """
    return config_class(**{**changes(config_class()), **given})


def changes(config: Any) -> dict[str, Any]:
    """Fields of a configuration that become smaller, with their values; nested configurations whole."""
    found: dict[str, Any] = {}
    for name, value in _values(config).items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            found[name] = type(value)(**{**_own(value), **changes(value)})
        elif (small := smaller(name, value)) is not value:
            found[name] = small
    return {**found, **_together(config, found)}


def _values(config: Any) -> dict[str, Any]:
    """The fields of a configuration; those that differ from layer to layer are left out."""
    found: dict[str, Any] = {}
    for name in [each.name for each in fields(config)]:
        with contextlib.suppress(AttributeError, RuntimeError):
            found[name] = getattr(config, name)
    return found


def _own(config: Any) -> dict[str, Any]:
    """Plain fields of a nested configuration that are not the defaults of its class."""
    default = _values(type(config)())
    plain = {name: value for name, value in _values(config).items() if not hasattr(value, "to_dict")}
    return {name: value for name, value in plain.items() if name not in default or default[name] != value}


def _together(config: Any, changed: Mapping[str, Any]) -> dict[str, Any]:
    """Fields whose values follow from each other: layers of every kind, lists with an entry for each layer, heads, sections of rotations, padding."""
    values = _values(config)
    found = {name: value for name, value in _MISSING.items() if name in values and values[name] is None}
    layers = next((name for name in ("num_hidden_layers", "num_layers", "n_layer") if name in changed), "")
    if layers:
        before, left = values[layers], changed[layers]
        kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
        if len(kinds) == before:
            left = found[layers] = max(left, 1 + max(kinds.index(kind) for kind in set(kinds)))
        lists = {name: value for name, value in values.items() if name not in changed}
        found |= {name: value[:left] for name, value in lists.items() if isinstance(value, list) and len(value) == before}
    heads, keys = values.get("num_attention_heads"), values.get("num_key_value_heads")
    if keys is not None and "num_key_value_heads" in changed and heads == keys:
        found["num_key_value_heads"] = changed.get("num_attention_heads", heads)
    rotations = values.get("rope_parameters")
    if isinstance(rotations, dict) and "mrope_section" in rotations:
        found["rope_parameters"] = {**rotations, "mrope_section": [HEAD // 2 - 2, 1, 1]}
    return found


def smaller(name: str, value: Any) -> Any:
    """Small value of a field, or the value itself."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return False if name == "apply_spec_augment" else value
    if "drop" in name and isinstance(value, int | float):
        return type(value)(0)
    if name in _SPECIAL:
        return _SPECIAL[name] if isinstance(value, int) and value >= VOCABULARY else value
    if re.search(r"token_(id|index)$", name) and isinstance(value, int):
        return value if value < VOCABULARY else 3 + sum(map(ord, name)) % (VOCABULARY - 4)
    if isinstance(value, list | tuple):
        return _smaller_list(name, value)
    if not isinstance(value, int | float):
        return value
    if name in _EXACT:
        small = _EXACT[name]
        return value if small is None or value <= small else type(value)(small) if isinstance(small, int | float) else small
    if name in ("image_size", "img_size"):
        return IMAGE
    if name == "patch_size":
        return min(value, PATCH)
    if isinstance(value, int):
        for pattern, small in _RULES:
            if re.search(pattern, name):
                return min(value, small)
    return value


def _smaller_list(name: str, values: Any) -> Any:
    """Small values of a list: one layer for each stage, widths that double."""
    kind = type(values)
    if name == "attention_types":
        return [[values[0][0], 1]]
    if not values or not all(isinstance(each, int | float) for each in values):
        return values
    if name in ("image_size", "img_size", "input_size"):
        return kind(IMAGE for _ in values)
    if name in _EXACT and isinstance(_EXACT[name], list):
        return kind(_EXACT[name])
    if re.search(r"depths?$|layers$|num_blocks$|blocks$|layer_config$|num_conv_blocks|stage_layers", name):
        return kind(1 for _ in values)
    if re.search(r"heads$", name):
        return kind(min(each, 2) for each in values)
    if re.search(r"hidden_sizes|channels|embed_dims?|dims?$|widths|encoder_in_channels|num_filters|hidden_dims", name) and max(values) > WIDTH:
        least = min(each for each in values if each > 4) if max(values) > 4 else 1
        return kind(max(8, 8 * round(each / least)) if each > 4 else each for each in values)
    return values
