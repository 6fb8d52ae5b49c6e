"""Metadata of GGUF files as llama.cpp itself reads them: keys of architectures, rules of tokenizers, ends of texts, parts, and ternary types."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from support.gguf_oracle import expressible, greedy, wide
from support.gguf_rules import add_keys, finish, keys_of_rule, record, write_small
from support.gguf_tokenizers import TEXTS, as_read, sentence_piece
from support.model_directories import write_model
from support.transformers_oracle import hf_model
from tokenizers import Tokenizer

from nntask.architecture.rotary import RopeScaling
from nntask.data.tokenizer import load_tokenizer
from nntask.export import Conversion, Convertible, write_gguf
from nntask.gguf.vocabulary import tokenizer_from
from nntask.gguf.vocabulary_keys import keys_of
from nntask.hf.model_directory import ModelDirectory
from nntask.models.qwen import FULL, SLIDING

PROMPT, COUNT = [3, 1, 4] * 4, 9
SIZE: dict[str, Any] = {"vocab_size": 300, "max_position_embeddings": 64}
YARN = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=8)


def of(name: str, **more: Any) -> Any:
    """A config that llama.cpp opens: whole heads, and room for the prompt."""
    scalar = {"query_pre_attn_scalar": 16} if name.startswith("gemma") else {}
    size = {"vocab_size": 300, "n_positions": 64} if name == "gpt2" else SIZE
    return replace(wide(expressible(name)), **{**size, **scalar, **more})


def models() -> dict[str, Any]:
    """Name -> config."""
    found = {name: of(name) for name in ("gpt2", "llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi")}
    found["phi3"] = of("phi3", sliding_window=None)
    found["mistral"] = of("mistral", sliding_window=64)
    for name in ("gemma2", "gemma3", "llama", "qwen2", "qwen3", "phi"):
        found[f"{name} linear"] = of(name, rope_scaling=RopeScaling(rope_type="linear", factor=4.0))
    for name in ("llama", "qwen2", "qwen3"):
        found[f"{name} yarn"] = of(name, rope_scaling=YARN)
    found["llama yarn factor"] = of("llama", rope_scaling=replace(YARN, attention_factor=0.83))
    found["llama yarn mscale"] = of("llama", rope_scaling=replace(YARN, mscale=0.7, mscale_all_dim=0.3))
    found["phi3 whole"] = of("phi3", sliding_window=None, partial_rotary_factor=1.0, tie_word_embeddings=True)
    for reach, original in (("long", 8), ("short", 1024)):  # a context is at least 256 there
        tables = {"short_factor": (1.0, 1.08, 1.1, 1.2, 1.3, 1.4), "long_factor": (1.1, 1.2, 2.25, 4.0, 9.0, 31.5)}
        scaling = RopeScaling(rope_type="longrope", factor=2.0, original_max_position_embeddings=original, **tables)
        found[f"phi3 {reach}"] = of("phi3", sliding_window=None, max_position_embeddings=2048, rope_scaling=scaling)
        scaling = replace(scaling, **{key: (*values, 40.0, 50.0) for key, values in tables.items()}, attention_factor=1.2)
        found[f"llama {reach}"] = of("llama", max_position_embeddings=2048, rope_scaling=scaling)
    found["gemma2 46"] = of("gemma2", num_hidden_layers=46, head_dim=32)
    found["gemma2 list"] = of("gemma2", layer_types=(SLIDING, SLIDING, FULL))
    found["gemma3 62"] = of("gemma3", num_hidden_layers=62, layer_types=None, head_dim=32)
    found["gemma3 cap"] = of("gemma3", final_logit_softcapping=2.0)
    found["gemma3 base"] = of("gemma3", rope_local_base_freq=50.0, sliding_window=4)
    found["gemma3 pattern"] = of("gemma3", layer_types=(SLIDING, FULL) * 3, sliding_window=4)
    found["gemma3 list"] = of("gemma3", layer_types=(SLIDING, SLIDING, FULL, SLIDING, FULL, SLIDING), sliding_window=4)
    return found


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer, without which llama.cpp has no ids."""
    write_model(tmp_path_factory.mktemp("tokenizer") / "model")
    return load_tokenizer(tmp_path_factory.getbasetemp() / "tokenizer0" / "model")


def exported(path: Path, config: Any, tokenizer: Any) -> tuple[Path, Any]:
    """A file that nntask wrote of a model of transformers, and that model."""
    theirs = hf_model(config)
    theirs.save_pretrained(path)
    write_gguf(Convertible.of(path, ModelDirectory.open(path).config, None, tokenizer), path.with_suffix(".gguf"), Conversion("f32"))
    return path.with_suffix(".gguf"), theirs


@pytest.mark.parametrize("name", list(models()))
def test_a_file_of_ours_is_the_same_model(tmp_path: Path, llama_cpp: Any, tokenizer: Any, name: str) -> None:
    """Logits of transformers from the directory, of llama.cpp from the file, and our tokens from the file."""
    path, theirs = exported(tmp_path / "model", models()[name], tokenizer)
    with torch.no_grad():
        expected = theirs(torch.tensor([PROMPT])).logits[0].double().numpy()
    opened = llama_cpp.LlamaCpp(path, 64)
    found = opened.logits(PROMPT)
    assert np.abs(found - expected).max() < 0.002 * np.ptp(expected)
    assert greedy(path, PROMPT)[0] == int(found[-1].argmax()) == int(expected[-1].argmax())
    opened.close()


def changed(source: Path, target: Path, name: str, **keys: Any) -> Path:
    """A file with further keys of an architecture."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, name)
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith(("GGUF.", "general.architecture"))}
    add_keys(writer, {**fields, **{f"{name}.{key}": value for key, value in keys.items()}})
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    finish(writer)
    return target


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("llama", {"rope.scaling.factor": 4.0}),
        ("llama", {"rope.scale_linear": 4.0}),
        ("llama", {"rope.scaling.factor": 2.0, "rope.scale_linear": 8.0}),
        ("llama", {"rope.scaling.factor": 4.0, "rope.scaling.type": "none"}),
        ("llama", {"rope.scaling.factor": 4.0, "rope.scaling.type": "yarn"}),
        (
            "llama",
            {"rope.scaling.factor": 4.0, "rope.scaling.type": "yarn", "rope.scaling.original_context_length": 8, "rope.scaling.attn_factor": 1.5},
        ),
        ("gemma3", {"rope.freq_base_swa": 50.0}),
        ("gemma3", {"final_logit_softcapping": 1.5}),
        ("gemma3", {"attention.sliding_window_pattern": 2}),
        ("gemma2", {"attention.sliding_window_pattern": 3}),
        ("llama", {"rope.scaling.finetuned": True, "expert_count": 0}),
    ],
)
def test_keys_of_others_are_read_as_llama_cpp_reads_them(tmp_path: Path, llama_cpp: Any, tokenizer: Any, name: str, keys: dict[str, Any]) -> None:
    """The same greedy tokens from the same file; without the keys some are other ones."""
    source, _ = exported(tmp_path / "model", of(name, **({"sliding_window": 4} if name != "llama" else {})), tokenizer)
    path = changed(source, tmp_path / "changed.gguf", name, **keys)
    opened = llama_cpp.LlamaCpp(path, 64)
    assert greedy(path, PROMPT) == opened.greedy(PROMPT, COUNT)
    opened.close()


@pytest.mark.parametrize("rule", list(record()["ids"]))
def test_the_record_of_ids_is_llama_cpps(tmp_path: Path, llama_cpp: Any, rule: str) -> None:
    """Which the default tests read from a file."""
    found = record()
    keys = keys_of_rule(rule, found["merges"])
    opened = llama_cpp.LlamaCpp(write_small(tmp_path / "model.gguf", keys, len(keys["tokenizer.ggml.tokens"])), 64)
    assert [opened.ids(text, special=False) for text in found["texts"]] == found["ids"][rule]
    opened.close()


@pytest.mark.parametrize("has_prefix", [True, False])
def test_pieces_have_llama_cpps_ids(tmp_path: Path, llama_cpp: Any, *, has_prefix: bool) -> None:
    """SentencePiece's BPE, with a begin-of-text token and without."""
    inner = sentence_piece(has_prefix=has_prefix)
    size = inner.get_vocab_size()
    keys, _ = keys_of({"tokenizer.json": inner.to_str()}, size, begin=1, ends=(2,))
    del keys["tokenizer.huggingface.json"]
    opened = llama_cpp.LlamaCpp(write_small(tmp_path / "model.gguf", keys, size), 64)
    text = tokenizer_from(as_read(keys), size)
    assert text is not None
    for words in [*TEXTS, "naïve 東京 ok", "a  b", "<s>x"]:
        assert opened.ids(words) == Tokenizer.from_str(text).encode(words, add_special_tokens=False).ids or not words
    opened.close()


def test_a_file_that_is_named_as_a_phi_3(tmp_path: Path, llama_cpp: Any, tokenizer: Any) -> None:
    """llama.cpp opens none of that name without the tokens of a Phi 3, so the name is left out."""
    path, _ = exported(tmp_path / "my-Phi-3-tuned", of("llama"), tokenizer)
    llama_cpp.LlamaCpp(path, 64).close()


@pytest.mark.parametrize("kind", ["TQ1_0", "TQ2_0"])
def test_ternary_types(tmp_path: Path, llama_cpp: Any, tokenizer: Any, kind: str) -> None:
    """Weights that the gguf package made: the tokens of llama.cpp on the decoded ones are ours on the blocks."""
    config = replace(of("llama"), hidden_size=256, intermediate_size=256, head_dim=64)
    source, _ = exported(tmp_path / "model", config, tokenizer)
    number = gguf.GGMLQuantizationType[kind]
    paths = {}
    for decoded in (False, True):
        reader, writer = gguf.GGUFReader(source), gguf.GGUFWriter(tmp_path / f"{decoded}.gguf", "llama")
        add_keys(writer, {key: each.contents() for key, each in reader.fields.items() if not key.startswith(("GGUF.", "general.architecture"))})
        for tensor in reader.tensors:
            blocks = gguf.quants.quantize(tensor.data, number) if ".weight" in tensor.name and tensor.data.ndim == 2 else None
            if blocks is None or tensor.name.startswith(("token_embd", "output")):
                writer.add_tensor(tensor.name, np.array(tensor.data))
            elif decoded:
                writer.add_tensor(tensor.name, gguf.quants.dequantize(blocks, number))
            else:
                writer.add_tensor(tensor.name, blocks, raw_dtype=number)
        finish(writer)
        paths[decoded] = tmp_path / f"{decoded}.gguf"
    opened = llama_cpp.LlamaCpp(paths[True], 64)
    assert greedy(paths[False], PROMPT) == greedy(paths[True], PROMPT) == opened.greedy(PROMPT, COUNT)
    opened.close()
    rounded = llama_cpp.LlamaCpp(paths[False], 64)  # which rounds activations to 8 bits besides
    assert np.abs(rounded.logits(PROMPT)[-1]).max() > 0
    rounded.close()
