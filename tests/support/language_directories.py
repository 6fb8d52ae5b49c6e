"""Model directories of families that nntask has no tiles for, as transformers writes them: small, from a seed, with a tokenizer of 300 ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB = 300
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 64}
DRY = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
BERT = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
T5 = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
FAMILIES: dict[str, tuple[str, str, dict[str, Any], dict[str, str]]] = {
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", {**SHAPE, "num_key_value_heads": 2, "hidden_dropout": 0.0}, GPT),
    "electra": ("ElectraForMaskedLM", "ElectraConfig", {**SHAPE, **DRY, "embedding_size": 32}, BERT),
    "bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        {
            **{f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))},
            **{"d_model": 32, "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "max_position_embeddings": 64},
            **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 1, "forced_eos_token_id": 1},
        },
        T5,
    ),
    "marian": (
        "MarianMTModel",
        "MarianConfig",
        {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "pad_token_id": 1},
        T5,
    ),
    "flex_olmo": (
        "FlexOlmoForCausalLM",
        "FlexOlmoConfig",
        {**SHAPE, "num_key_value_heads": 2, "num_experts": 2, "num_experts_per_tok": 1, "pad_token_id": 0, "eos_token_id": 1},
        GPT,
    ),
    "vit": ("ViTForImageClassification", "ViTConfig", {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32}, GPT),
}
"""Name -> (model class, config class, its arguments, special tokens)."""


def write_language_model(path: Path, family: str, **changes: Any) -> Path:
    """A directory with config, weights and tokenizer; returns it.

    Args:
        changes: of the config.
    """
    model_class, config_class, arguments, words = FAMILIES[family]
    torch.manual_seed(0)
    sizes = {} if family == "vit" else {"vocab_size": VOCAB}
    getattr(hf, model_class)(getattr(hf, config_class)(**{**sizes, **arguments, **changes})).save_pretrained(path)
    tokenizer(words).save_pretrained(path)
    return path


def tokenizer(words: dict[str, str]) -> Any:
    """A tokenizer of 300 ids with special tokens."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=list(dict.fromkeys(words.values())), initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator((f"line {i} of a text about the number {i * i}\n" for i in range(500)), trainer)
    if "cls_token" in words:
        ends = [words["cls_token"], words["sep_token"]]
        inner.post_processor = processors.TemplateProcessing(
            single=f"{ends[0]} $A {ends[1]}", special_tokens=[(word, inner.token_to_id(word)) for word in ends]
        )
    return hf.PreTrainedTokenizerFast(tokenizer_object=inner, **words)
