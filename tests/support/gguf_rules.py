"""A vocabulary whose merges go across spaces and lines, so that every cut of a pre-tokenizer shows in the ids, and the ids that llama.cpp gives it.

`tests/data/llama_cpp_ids.json` has its merges, the texts, and the ids of each text for each rule as xllamacpp 2026.10.11549 gives them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from tokenizers import pre_tokenizers

RECORD: Final = Path(__file__).parents[1] / "data" / "llama_cpp_ids.json"
LETTERS: Final = sorted(pre_tokenizers.ByteLevel.alphabet())
APPROXIMATED: Final = {
    "gpt-4o": ("हिन्दी भाषा",),
    "tekken": ("हिन्दी भाषा",),
    "tiny_aya": ("camelCase HTTPServer iPhone9",),
    "deepseek-llm": ("\u00a0nbsp\u2003em",),
    "deepseek-coder": ("\u00a0nbsp\u2003em",),
}
"""Rule -> texts that llama.cpp cuts otherwise than the expressions that the rule is named after: marks, capitals, and spaces beyond ASCII."""
WIDTH: Final = 16


def record() -> dict[str, Any]:
    """The record."""
    found: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


def keys_of_rule(rule: str, merges: list[str]) -> dict[str, Any]:
    """The metadata of a tokenizer that cuts texts by a rule."""
    tokens = [*LETTERS, *("".join(pair.split(" ")) for pair in merges)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": rule,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [gguf.TokenType.NORMAL] * len(tokens),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }


def write_small(path: Path, keys: dict[str, Any], vocab_size: int) -> Path:
    """A LLaMA of one block and zeros, with the metadata of a tokenizer."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    add_keys(writer, keys)
    square, line = np.zeros((WIDTH, WIDTH), np.float32), np.zeros(WIDTH, np.float32)
    writer.add_tensor("token_embd.weight", np.zeros((vocab_size, WIDTH), np.float32))
    writer.add_tensor("output_norm.weight", line)
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", line)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", square)
    finish(writer)
    return path


def add_keys(writer: gguf.GGUFWriter, keys: dict[str, Any]) -> None:
    """Keys with values of the types that nntask writes."""
    for key, value in keys.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)


def finish(writer: gguf.GGUFWriter) -> None:
    """Write all that was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
