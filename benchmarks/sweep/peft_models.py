"""Tuners of PEFT for the sweep, each on a tiny LLaMA and a tiny BERT."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn
from trial import STEPS, Trial

VOCABULARY: Final = 97
ROWS: Final = 2
LENGTH: Final = 16
WIDTH: Final = 32

_SHAPE: Final = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_BASES: Final = ("llama", "bert")
_TARGETS: Final = {"llama": ["q_proj", "v_proj"], "bert": ["query", "value"]}
_SMALL: Final[Mapping[str, Any]] = {
    **{"r": 4, "lora_alpha": 8, "num_virtual_tokens": 4, "adapter_len": 4, "adapter_layers": 2, "total_step": 20, "tinit": 1, "tfinal": 2},
    **{"n_frequency": 16, "block_size": 8, "boft_block_size": 4, "oft_block_size": 4, "num_vectors": 16, "vector_length": 8, "topk": 2},
    **{"encoder_hidden_size": WIDTH, "num_subspaces": 2, "subspace_rank": 1, "n_tasks": 1, "n_skills": 2, "token_indices": [3, 4, 5]},
    **{
        "theta_d_length": 64,
        "mini_r": 1,
        "group_size": 8,
        "cpt_token_ids": [3, 4, 5, 6],
        "cpt_mask": [1, 1, 1, 1],
        "cpt_tokens_type_mask": [1, 2, 3, 4],
    },
    **{"num_ranks": 1, "effective_rank": 4, "oft_block_share": False, "num_tasks": 1},
}
"""Values of fields of a tuner's configuration, where it has them."""
_VARIANTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "LORA/dora": {"use_dora": True},
    "LORA/rslora": {"use_rslora": True},
    "LORA/pissa": {"init_lora_weights": "pissa"},
    "LORA/olora": {"init_lora_weights": "olora"},
    "LORA/all-linear": {"target_modules": "all-linear"},
    "LORA/bias": {"bias": "lora_only", "lora_bias": True},
    "LORA/modules_to_save": {"modules_to_save": ["lm_head", "cls", "classifier"]},
    "OFT/cayley": {"use_cayley_neumann": False},
    "LOKR/decompose": {"decompose_both": True},
    "PREFIX_TUNING/projection": {"prefix_projection": True},
}
"""Further configurations of a tuner."""


def peft_cases() -> list[str]:
    """Names of tuners with the models that they are tried on."""
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    tuners = [str(getattr(each, "value", each)) for each in PEFT_TYPE_TO_CONFIG_MAPPING]
    return [f"{tuner}/{base}" for tuner in [*tuners, *_VARIANTS] for base in _BASES]


def of_peft(name: str) -> Trial:
    """The trial of a tuner on a model."""
    tuner, _, base = name.rpartition("/")

    def make() -> nn.Module:
        return _adapted(tuner, base)

    generator = torch.Generator().manual_seed(5)
    batches = []
    for _ in range(STEPS):
        ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator)
        labels = ids if base == "llama" else torch.randint(0, 2, (ROWS,), generator=generator)
        batches.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    make()
    return Trial(make, batches, None, "input_ids, attention_mask, labels")


def _adapted(tuner: str, base: str) -> nn.Module:
    """The base model with the adapters of a tuner."""
    import peft
    import transformers
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    if base == "llama":
        model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SHAPE, max_position_embeddings=64))
        task = peft.TaskType.CAUSAL_LM
    else:
        model = transformers.BertForSequenceClassification(transformers.BertConfig(**_SHAPE, max_position_embeddings=64))
        task = peft.TaskType.SEQ_CLS
    kind = tuner.partition("/")[0]
    config_class = next(each for key, each in PEFT_TYPE_TO_CONFIG_MAPPING.items() if str(getattr(key, "value", key)) == kind)
    names = {each.name for each in dataclasses.fields(config_class)}
    given = {key: value for key, value in _SMALL.items() if key in names}
    if "target_modules" in names and kind not in ("TRAINABLE_TOKENS", "ADAPTION_PROMPT", "LN_TUNING"):
        given["target_modules"] = _TARGETS[base]
    if kind == "IA3":
        given["feedforward_modules"] = []
    if kind in ("OFT", "BOFT", "ADALORA"):
        given.pop("r", None)
    if kind == "C3A":
        given["block_size"] = 8
    given |= _VARIANTS.get(tuner, {})
    return peft.get_peft_model(model, config_class(task_type=task, **given))
