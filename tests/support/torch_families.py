"""Families of transformers in small, with batches: what any module in training is tried with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers as hf

BATCH, LENGTH, VOCAB = 2, 48, 97
SHAPE = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
DRY = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": VOCAB}
BART = {
    **{f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))},
    **{"vocab_size": VOCAB, "d_model": 32, "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "pad_token_id": 1},
}
IMAGES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32, "num_labels": 5, **DRY}

Batch = dict[str, Any]


def _ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, shape)


def _text() -> Batch:
    ids = _ids(BATCH, LENGTH)
    return {"input_ids": ids, "labels": ids}


def _pairs() -> Batch:
    return {"input_ids": _ids(BATCH, LENGTH), "labels": _ids(BATCH, 24)}


def _images() -> Batch:
    return {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.randint(0, 5, (BATCH,))}


def _speech() -> Batch:
    return {"input_features": torch.randn(BATCH, 16, 48), "labels": _ids(BATCH, 16)}


def _kv(**more: Any) -> dict[str, Any]:
    return {**SHAPE, "num_key_value_heads": 2, "max_position_embeddings": 64, **more}


def _masked(**more: Any) -> dict[str, Any]:
    return {**SHAPE, **DRY, "max_position_embeddings": 64, **more}


FAMILIES: Mapping[str, tuple[str, str, dict[str, Any], Callable[[], Batch]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2, _text),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            **{"vocab_size": VOCAB, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 64, "window_size": 16},
            **{"max_position_embeddings": 64},  # its masks are squares of this
            **{"attention_types": [[["global", "local"], 1]], "resid_dropout": 0.0, "embed_dropout": 0.0, "attention_dropout": 0.0},
        },
        _text,
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**SHAPE, "max_position_embeddings": 64}, _text),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", {**GPT2, "rotary_dim": 4}, _text),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _kv(), _text),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _kv(), _text),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _kv(head_dim=8), _text),
    "mistral": ("MistralForCausalLM", "MistralConfig", _kv(sliding_window=16), _text),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", _kv(num_local_experts=4), _text),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", _kv(head_dim=8, sliding_window=16), _text),
    "phi": ("PhiForCausalLM", "PhiConfig", {**SHAPE, "max_position_embeddings": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0}, _text),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {
            **{"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64},
            **{"max_position_embeddings": 64, "dropout": 0.0, "word_embed_proj_dim": 32},
        },
        _text,
    ),
    "bloom": ("BloomForCausalLM", "BloomConfig", {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4}, _text),
    "mamba": ("MambaForCausalLM", "MambaConfig", {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}, _text),
    "bert": ("BertForMaskedLM", "BertConfig", _masked(), _text),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", _masked(pad_token_id=1), _text),
    "electra": ("ElectraForMaskedLM", "ElectraConfig", _masked(embedding_size=32), _text),
    "albert": ("AlbertForMaskedLM", "AlbertConfig", _masked(embedding_size=16), _text),
    "deberta_v2": ("DebertaV2ForMaskedLM", "DebertaV2Config", _masked(relative_attention=True, pos_att_type=["p2c", "c2p"]), _text),
    "distilbert": (
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {
            **{"vocab_size": VOCAB, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 64},
            **{"dropout": 0.0, "attention_dropout": 0.0},
        },
        _text,
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            **{"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
            **{"dropout_rate": 0.0, "decoder_start_token_id": 0},
        },
        _pairs,
    ),
    "bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        {**BART, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": 2},
        _pairs,
    ),
    "marian": (
        "MarianMTModel",
        "MarianConfig",
        {**BART, "max_position_embeddings": 64, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": 2},
        _pairs,
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **BART,
            **{"num_mel_bins": 16, "max_source_positions": 24, "max_target_positions": 32, "bos_token_id": 0, "eos_token_id": 2},
            **{"decoder_start_token_id": 2, "suppress_tokens": None, "begin_suppress_tokens": None},
        },
        _speech,
    ),
    "vit": ("ViTForImageClassification", "ViTConfig", {**IMAGES, "patch_size": 8}, _images),
    "deit": ("DeiTForImageClassification", "DeiTConfig", {**IMAGES, "patch_size": 8}, _images),
    "swin": (
        "SwinForImageClassification",
        "SwinConfig",
        {
            **{"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4, "num_labels": 5},
            **{**DRY, "drop_path_rate": 0.0},
        },
        _images,
    ),
    "convnext": (
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1], "num_labels": 5, "image_size": 32},
        _images,
    ),
    "resnet": (
        "ResNetForImageClassification",
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 5},
        _images,
    ),
}
"""Name -> (model class, config class, its arguments, maker of batches)."""


def make(family: str, num_batches: int, *, seed: int = 0) -> tuple[torch.nn.Module, list[Batch]]:
    """A module in training mode with weights from a seed, and batches."""
    torch.manual_seed(seed)
    model_class, config_class, arguments, batch = FAMILIES[family]
    module = getattr(hf, model_class)(getattr(hf, config_class)(**arguments)).train()
    fixed = {"use_cache": False} if "use_cache" in inspect.signature(module.forward).parameters else {}
    return module, [{**batch(), **fixed} for _ in range(num_batches)]


def eager(module: torch.nn.Module, batches: Sequence[Batch], *, minibatches: int = 1, **options: Any) -> list[float]:
    """Losses of PyTorch itself."""
    optimizer = torch.optim.AdamW(module.parameters(), **options)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        found = []
        for number in range(minibatches):
            part = {name: value.chunk(minibatches)[number] if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
            loss = module(**part).loss
            (loss / minibatches).backward()
            found.append(loss.item())
        optimizer.step()
        losses.append(sum(found) / minibatches)
    return losses
