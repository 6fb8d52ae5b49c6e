"""GGUF files as llama.cpp's converter writes them from models of transformers, by the gguf package alone: the oracle of what we read."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
from support import weight_blocks
from tokenizers import Tokenizer

from tiles.block_format import BLOCK_FORMATS

ARCHITECTURES = {"gpt2": "gpt2", "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3", "phi": "phi2"}
ARCHITECTURES |= {"gemma2": "gemma2", "phi3": "phi3", "mixtral": "llama", "olmoe": "olmoe", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}
MODEL_ARCHES = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
KINDS = {"F32": np.float32, "F16": np.float16}


def paired(weights: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys as llama.cpp's LLaMA turns them (``LlamaModel.permute`` of convert_hf_to_gguf.py)."""
    return weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def converted(theirs: Any) -> dict[str, np.ndarray]:
    """llama.cpp's name -> array, of a model of transformers."""
    config, kind = theirs.config, theirs.config.model_type
    name_map = gguf.get_tensor_name_map(MODEL_ARCHES[ARCHITECTURES[kind]], config.num_hidden_layers)
    found = {}
    for name, tensor in _by_layer(theirs.state_dict()).items():
        if name.endswith((".attn.bias", ".attn.masked_bias")) or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        values = tensor.float().numpy()
        if kind == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            values = values.T
        if kind in ("llama", "mistral", "mixtral") and name.endswith(("q_proj.weight", "q_proj.bias")):
            values = paired(values, config.num_attention_heads)
        if kind in ("llama", "mistral", "mixtral") and name.endswith(("k_proj.weight", "k_proj.bias")):
            values = paired(values, config.num_key_value_heads)
        if kind in ("gemma2", "gemma3_text") and name.endswith("norm.weight"):
            values = values + 1
        if name.endswith("shared_expert_gate.weight"):
            values = values.squeeze()
        theirs_here = name_map.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs_here is not None, name
        found[theirs_here] = np.ascontiguousarray(values)
    return found


def _by_layer(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict with two arrays in place of one of the gates and the layers up of all experts."""
    found = {}
    for name, tensor in state.items():
        if name.endswith("experts.gate_up_proj"):
            found |= zip((name.replace("gate_up_proj", f"{kind}_proj.weight") for kind in ("gate", "up")), tensor.chunk(2, 1), strict=True)
        else:
            found[f"{name}.weight" if name.endswith("experts.down_proj") else name] = tensor
    return found


def write_gguf(
    path: Path,
    theirs: Any,
    *,
    kind: str = "F32",
    tokenizer: Path | None = None,
    repeats_head: bool = False,
    random: str = "",
    mixed: Mapping[str, str] = MappingProxyType({}),
    more: Mapping[str, int] = MappingProxyType({}),
) -> Path:
    """A file of a model of transformers; matrices of a quantised type where they have whole blocks, embeddings included, or of a type `random` with
    blocks of random bytes. `mixed` has other random types for matrices whose names contain a key."""
    config = theirs.config
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config.model_type])
    add_config(writer, config)
    for key, value in more.items():
        writer.add_uint16(key, value)
    if tokenizer is not None:
        add_tokenizer(writer, tokenizer)
    arrays, usual = converted(theirs), random
    if repeats_head:
        arrays["output.weight"] = arrays["token_embd.weight"]
    for name, values in arrays.items():
        random = next((each for key, each in mixed.items() if key in name), usual)
        number = gguf.GGMLQuantizationType[random or kind]
        block = gguf.GGML_QUANT_SIZES[number][0]
        if values.ndim == 1 or values.shape[-1] % block or name == "position_embd.weight" or "ffn_gate_inp" in name:
            writer.add_tensor(name, values)
        elif random in KINDS:
            writer.add_tensor(name, values.astype(KINDS[random]))
        elif random:
            writer.add_tensor(
                name,
                random_blocks(values.shape, gguf.GGMLQuantizationType[random], zlib.crc32(name.encode())),
                raw_dtype=gguf.GGMLQuantizationType[random],
            )
        elif kind in KINDS:
            writer.add_tensor(name, values.astype(KINDS[kind]))
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_blocks(shape: tuple[int, ...], number: gguf.GGMLQuantizationType, seed: int = 1) -> np.ndarray:
    """Random bytes that decode to finite numbers, of the size of weights for formats of ours."""
    known = BLOCK_FORMATS.get(number.name.lower())
    if known is not None and known.is_quantised:
        bytewise = (int(np.prod(shape[:-1])), known.row_bytes(shape[-1]))
        return weight_blocks.random_blocks(bytewise, known, seed).reshape(*shape[:-1], bytewise[1])
    nbytes = gguf.GGML_QUANT_SIZES[number][1]
    size, draw = gguf.quant_shape_to_byte_shape(shape, number), np.random.default_rng(seed)
    blocks = draw.integers(0, 256, (np.prod(size) // nbytes, nbytes), np.uint8)
    with np.errstate(all="ignore"):
        bad = ~np.isfinite(gguf.quants.dequantize(blocks, number)).all(axis=1) if number.name != "Q8_K" else slice(0)
    blocks[bad] = 0
    return blocks.reshape(size)


def add_config(writer: gguf.GGUFWriter, config: Any) -> None:
    """The keys that the converter writes."""
    writer.add_name("a test")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    if config.model_type == "gpt2":
        writer.add_feed_forward_length(config.n_inner or 4 * config.n_embd)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_feed_forward_length(config.intermediate_size)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_head_count_kv(config.num_key_value_heads)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(int(head * rope.get("partial_rotary_factor", 1.0)))
    if config.model_type == "phi":
        writer.add_layer_norm_eps(config.layer_norm_eps)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if (count := getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)) is not None:
        writer.add_expert_count(count)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if (size := getattr(config, "moe_intermediate_size", None)) is not None:
        writer.add_expert_feed_forward_length(size)
    if (size := getattr(config, "shared_expert_intermediate_size", None)) is not None:
        writer.add_expert_shared_feed_forward_length(size)
    if config.model_type in ("gemma2", "gemma3_text", "mistral", "mixtral", "phi3"):
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def add_tokenizer(writer: gguf.GGUFWriter, directory: Path) -> None:
    """The keys of a byte-level BPE, as ``gguf.vocab`` takes them from a tokenizer.json."""
    content = json.loads((directory / "tokenizer.json").read_text())
    inner = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokens = {index: token for token, index in inner.get_vocab().items()}
    special = {token["id"] for token in content["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([tokens[index] for index in range(len(tokens))])
    writer.add_token_types([gguf.TokenType.CONTROL if index in special else gguf.TokenType.NORMAL for index in range(len(tokens))])
    writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
