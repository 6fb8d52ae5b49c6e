"""transformers' classes as the oracles of all families: small odd configs, equal weights, batches of every objective, losses and gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import transformers
from support.gpt2_oracle import WIDE, gradients_of

from nntask import no_grad
from nntask.architecture.rotary import RopeScaling
from nntask.models.bert import BertConfig, RobertaConfig
from nntask.models.gemma import Gemma2Config, Gemma3Config
from nntask.models.gpt2 import GPT2Config
from nntask.models.gpt_neo import GPTNeoConfig
from nntask.models.gpt_neox import GPTNeoXConfig
from nntask.models.llama import LlamaConfig
from nntask.models.mistral import MistralConfig
from nntask.models.mixtures import MixtralConfig, OlmoeConfig, Qwen2MoeConfig, Qwen3MoeConfig
from nntask.models.opt import OPTConfig
from nntask.models.phi import PhiConfig
from nntask.models.phi3 import Phi3Config
from nntask.models.qwen import FULL, SLIDING, Qwen2Config, Qwen3Config
from nntask.models.registry import FAMILIES, build
from nntask.models.t5 import T5Config
from nntask.tiling.model_tiling import ModelTiling

LENGTH, BATCH, TARGET = 11, 5, 7
"""Tokens and sequences, which no tiling of `TILES` divides, and tokens of a decoder."""
_HIDDEN: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 30,
    "intermediate_size": 47,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 13,
    "initializer_range": 0.2,
}
_GROUPED = {**_HIDDEN, "num_key_value_heads": 3, "head_dim": 8}
_WHOLE_HEADS = {**_HIDDEN, "hidden_size": 48}  # of eight features
EAGER_EXPERTS = {"experts_implementation": "eager"}  # the default takes widths that are multiples of 16 bytes only
_QWEN_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 3, "moe_intermediate_size": 19, "num_key_value_heads": 3}
_LONGROPE = {"rope_type": "longrope", "short_factor": (1.0, 1.08, 1.3), "long_factor": (1.1, 2.25, 31.5), "factor": 1.5}

CONFIGS: dict[str, Any] = {
    "gpt2": GPT2Config(vocab_size=61, n_positions=13, n_embd=30, n_layer=3, n_head=5, n_inner=47, initializer_range=0.2).with_dropout(0.0),
    "llama": LlamaConfig(**_GROUPED, rope_theta=100.0),
    "mistral": MistralConfig(**_GROUPED, sliding_window=4),
    "qwen2": Qwen2Config(**{**_WHOLE_HEADS, "num_key_value_heads": 3}, use_sliding_window=True, sliding_window=3, max_window_layers=1),
    "qwen3": Qwen3Config(**_GROUPED, tie_word_embeddings=True),
    "mixtral": MixtralConfig(**_GROUPED, num_local_experts=5, sliding_window=4),
    "mixtral balanced": MixtralConfig(**_GROUPED, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.3),
    "olmoe": OlmoeConfig(**_WHOLE_HEADS, num_key_value_heads=3, num_experts=7, num_experts_per_tok=3),
    "qwen2_moe": Qwen2MoeConfig(**{**_WHOLE_HEADS, **_QWEN_EXPERTS}, num_experts=6, shared_expert_intermediate_size=37, qkv_bias=True),
    "qwen3_moe": Qwen3MoeConfig(**{**_GROUPED, **_QWEN_EXPERTS}, num_local_experts=9, norm_topk_prob=True, mlp_only_layers=(1,)),
    "gemma2": Gemma2Config(**_GROUPED, sliding_window=5, query_pre_attn_scalar=24, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "gemma3": Gemma3Config(**_GROUPED, layer_types=(SLIDING, FULL, SLIDING), sliding_window=5, query_pre_attn_scalar=24),
    "gpt_neo": GPTNeoConfig(
        vocab_size=61, hidden_size=30, num_layers=3, num_heads=6, max_position_embeddings=13, window_size=4, initializer_range=0.2
    ),
    "gpt_neox": GPTNeoXConfig(**_WHOLE_HEADS, partial_rotary_factor=0.5),
    "phi": PhiConfig(**{**_WHOLE_HEADS, "num_key_value_heads": 2}, partial_rotary_factor=0.5),
    "phi3": Phi3Config(**{**_WHOLE_HEADS, "num_key_value_heads": 2}, partial_rotary_factor=0.75, sliding_window=5),
    **{
        f"phi3 {name}": Phi3Config(
            **{**_WHOLE_HEADS, "num_key_value_heads": 2},
            partial_rotary_factor=0.75,
            rope_scaling=RopeScaling(**_LONGROPE, original_max_position_embeddings=original),
        )
        for name, original in (("long", 2), ("short", 11))
    },
    "opt": OPTConfig(
        vocab_size=61, hidden_size=30, ffn_dim=47, num_hidden_layers=3, num_attention_heads=6, max_position_embeddings=13, init_std=0.2
    ).with_dropout(0.0),
    "bert": BertConfig(**_HIDDEN).with_dropout(0.0),
    "bert classifier": BertConfig(**_HIDDEN, num_labels=3).with_dropout(0.0),
    "roberta": RobertaConfig(**{**_HIDDEN, "max_position_embeddings": 15}, type_vocab_size=1).with_dropout(0.0),
    "roberta classifier": RobertaConfig(**{**_HIDDEN, "max_position_embeddings": 15}, num_labels=2).with_dropout(0.0),
    "t5": T5Config(vocab_size=61, d_model=30, d_kv=8, d_ff=47, num_layers=2, num_decoder_layers=3, num_heads=5, n_positions=13).with_dropout(0.0),
    "t5 gated": T5Config(
        vocab_size=61, d_model=30, d_kv=8, d_ff=47, num_layers=2, num_heads=5, n_positions=13, feed_forward_proj="gated-gelu"
    ).with_dropout(0.0),
}
"""Small and odd; windows that begin and end inside tiles."""

IDLE_EXPERTS = replace(CONFIGS["qwen2_moe"], num_experts=20, num_experts_per_tok=1).with_layers(1)
"""A mixture in which no tile of a few tokens chooses most of the experts."""

DECODERS = [name for name, config in CONFIGS.items() if config.objective == "causal"]


def tiles(config: Any) -> ModelTiling:
    """Tiles that divide nothing."""
    return ModelTiling(2, 4, 11, 13, 2 * config.n_head // config.n_kv_head, 17)


def hf_model(config: Any, dtype: Any = np.float32, seed: int = 0) -> Any:
    """The oracle of a config, its biases and norms away from their first values."""
    torch.manual_seed(seed)
    values = config.to_dict()
    kind = getattr(transformers, values["architectures"][0])
    theirs = kind(kind.config_class(**{**values, "attn_implementation": "eager", **EAGER_EXPERTS, "pad_token_id": values.get("pad_token_id")}))
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return theirs.to(WIDE[np.dtype(dtype)])


def state_of(theirs: Any) -> dict[str, Any]:
    """Its weights as arrays."""
    return in_files(theirs, {name: value.detach().numpy().copy() for name, value in theirs.state_dict().items()})


def hf_gradients(theirs: Any) -> dict[str, Any]:
    """Its gradients as arrays, of those weights that the loss needs, under the names of files."""
    return in_files(theirs, {name: p.grad.numpy() for name, p in theirs.named_parameters() if p.grad is not None})


def in_files(theirs: Any, arrays: dict[str, Any]) -> dict[str, Any]:
    """Arrays under the names of files, which have a matrix for each expert."""
    family = FAMILIES[theirs.config.model_type].config
    if not getattr(family.names, "stacked", ()):  # names of some families depend on the config
        return arrays
    config = family.from_dict({**theirs.config.to_dict()})
    return dict(config.names.to_hf(config.names.from_hf(arrays, config), config))


def our_model(theirs: Any, config: Any, tiling: ModelTiling, runtime: Any, **options: Any) -> Any:
    """Ours with the weights of `theirs`."""
    model = build(config, tiling, runtime, seed=None, **options)
    model.load(config.names.from_hf(state_of(theirs), config))
    return model


def random_batch(config: Any, seed: int) -> dict[str, np.ndarray]:
    """Arrays of a batch of the config's objective, with padding where that is usual."""
    draw = np.random.default_rng(seed)
    tokens = draw.integers(2, config.vocab_size, (BATCH, LENGTH), np.int32)
    if config.objective == "causal":
        return {"tokens": tokens, "targets": draw.integers(0, config.vocab_size, (BATCH, LENGTH), np.int32)}
    lengths = draw.integers(3, LENGTH + 1, BATCH)
    documents = (np.arange(LENGTH) < lengths[:, None]).astype(np.int32)
    given = {"tokens": np.where(documents, tokens, config.pad_token_id or 0).astype(np.int32), "documents": documents}
    if config.objective == "classify":
        return {**given, "targets": draw.integers(0, config.num_labels, (BATCH, 1), np.int32)}
    if config.objective == "masked":
        targets = np.where(documents & (draw.random((BATCH, LENGTH)) < 0.4), tokens, -1).astype(np.int32)
    else:
        targets = draw.integers(2, config.vocab_size, (BATCH, TARGET), np.int32)
        targets[1, 4:] = -1
        started = np.concatenate([np.full((BATCH, 1), config.decoder_start_token_id, np.int32), np.maximum(targets[:, :-1], 0)], axis=1)
        given["decoder_tokens"] = started
    return {**given, "targets": targets, "factor": np.array([1 / (targets >= 0).sum()], np.float32)}


def hf_logits(theirs: Any, config: Any, batch: dict[str, np.ndarray]) -> Any:
    """Its scores, (B * T, V) or (B, classes)."""
    logits = hf_outputs(theirs, config, batch).logits
    return logits.reshape(-1, logits.shape[-1])


def hf_outputs(theirs: Any, config: Any, batch: dict[str, np.ndarray]) -> Any:
    """Its scores, and the load-balancing loss of experts if the config asks for it."""
    given = {name: torch.from_numpy(array.astype(np.int64)) for name, array in batch.items() if name != "factor"}
    more = {"attention_mask": given["documents"]} if "documents" in given else {}
    if "decoder_tokens" in given:
        more["decoder_input_ids"] = given["decoder_tokens"]
    if config.objective in ("causal", "seq2seq"):
        more["use_cache"] = False
    return theirs(input_ids=given["tokens"], **more)


def hf_loss(theirs: Any, config: Any, batch: dict[str, np.ndarray]) -> Any:
    """Its mean loss, a torch scalar."""
    targets = torch.from_numpy(batch["targets"].astype(np.int64)).flatten()
    found = hf_outputs(theirs, config, batch)
    loss = torch.nn.functional.cross_entropy(found.logits.reshape(-1, found.logits.shape[-1]), targets, ignore_index=-1)
    balance = config.description.balance
    return loss + balance * found.aux_loss if balance else loss


def our_logits(model: Any, batch: dict[str, np.ndarray]) -> np.ndarray:
    """Ours, of the same shape, in fp32."""
    target_len = batch["decoder_tokens"].shape[1] if "decoder_tokens" in batch else None
    given = model.inputs(*batch["tokens"].shape, names=list(batch), target_len=target_len)
    for name, tensor in given.items():
        tensor.write(batch[name])
    with no_grad():
        scores = model.logits(**{name: given[name] for name in given if name not in ("targets", "factor")}).read().astype(np.float32)
    return scores.reshape(-1, scores.shape[-1])


def seen(batch: dict[str, np.ndarray], scores: Any) -> np.ndarray:
    """The scores that mean something: not those of padding."""
    documents = batch.get("documents")
    return np.asarray(scores if documents is None or documents.size != len(scores) else scores[documents.flatten() > 0])


def our_gradients(model: Any) -> dict[str, Any]:
    """Our gradients under transformers' names, without those of tied names."""
    config = model.config
    return {name: array for name, array in config.names.to_hf(gradients_of(model), config).items() if name not in config.names.aliases}


def without_dropout(config: Any) -> Any:
    """The config without dropout."""
    return replace(config, **dict.fromkeys(config.dropouts, 0.0))
