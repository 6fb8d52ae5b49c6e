"""GGUF files that we write: what the gguf package and transformers read of them, and what comes back here."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from support.gguf_files import ARCHITECTURES, converted
from support.gguf_oracle import FAMILIES, expressible, greedy, of_transformers, read, wide
from support.model_directories import write_model
from support.transformers_oracle import CONFIGS, hf_model, tiles

from nntask.architecture.rotary import RopeScaling
from nntask.errors import DoesNotFit, UsageError
from nntask.export import Conversion, Convertible, write_gguf, write_quantised
from nntask.hf.model_directory import ModelDirectory
from nntask.models.gpt2 import GPT2Config
from nntask.tiling.model_tiling import ModelTiling
from wrappers.cli import main

QUANTISED = {"q8_0": gguf.GGMLQuantizationType.Q8_0, "q4_0": gguf.GGMLQuantizationType.Q4_0}
WRITERS = {".gguf": write_gguf, "": write_quantised}


def directory_of(path: Path, theirs: Any) -> Convertible:
    """A model of transformers as a directory, opened."""
    theirs.save_pretrained(path)
    return opened(path)


def opened(path: Path) -> Convertible:
    """A directory or a file, opened."""
    return Convertible.of(path, ModelDirectory.open(path).config, None, None)


def fields_of(reader: gguf.GGUFReader) -> dict[str, Any]:
    """Key -> value, as the package reads them."""
    return {key: field.contents() for key, field in reader.fields.items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_package_reads_what_it_would_have_written(tmp_path: Path, name: str) -> None:
    """Names, shapes and every bit of all tensors, as llama.cpp's converter makes them, and the keys of the config."""
    config = expressible(name)
    theirs = hf_model(config)
    source = directory_of(tmp_path / "model", theirs)
    done = write_gguf(source, tmp_path / "model.gguf", Conversion("f32"))
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    expected = converted(theirs)
    assert {tensor.name for tensor in reader.tensors} == expected.keys()
    for tensor in reader.tensors:
        assert tensor.tensor_type == gguf.GGMLQuantizationType.F32
        np.testing.assert_array_equal(tensor.data, expected[tensor.name])
        assert tensor.data_offset % 32 == 0
    found, kind = fields_of(reader), ARCHITECTURES[theirs.config.model_type]
    assert found["general.architecture"] == kind
    assert found[f"{kind}.block_count"] == config.n_layer
    assert found[f"{kind}.context_length"] == config.n_positions
    assert found[f"{kind}.embedding_length"] == config.n_embd
    assert found[f"{kind}.attention.head_count"] == config.n_head
    assert found[f"{kind}.feed_forward_length"] == (config.inner_size if name == "gpt2" else config.intermediate_size)
    if name != "gpt2":
        assert found[f"{kind}.attention.head_count_kv"] == config.n_kv_head
        assert found[f"{kind}.rope.freq_base"] == config.rope_theta
    assert done.num_weights == config.num_parameters
    assert done.nbytes == done.before == 4 * config.num_parameters


@pytest.mark.parametrize("name", FAMILIES)
def test_there_and_back(tmp_path: Path, name: str) -> None:
    """From a directory to a file to a directory: equal bits but for norms of Gemma, and equal tokens."""
    config = expressible(name)
    theirs = hf_model(config)
    source = directory_of(tmp_path / "model", theirs)
    write_gguf(source, tmp_path / "model.gguf", Conversion("f32"))
    write_quantised(opened(tmp_path / "model.gguf"), tmp_path / "back", Conversion("f32"))
    back = read(tmp_path / "back", tiles(config))
    for key, value in of_transformers(theirs, config).items():
        if name.startswith("gemma") and "norm" in key:
            np.testing.assert_allclose(back[key], value, atol=1e-6)
        else:
            np.testing.assert_array_equal(back[key], value)
    assert greedy(tmp_path / "model.gguf", [3, 1, 4]) == greedy(tmp_path / "model", [3, 1, 4]) == greedy(tmp_path / "back", [3, 1, 4])


@pytest.mark.parametrize(
    ("name", "kind", "suffix"),
    [
        pytest.param(name, kind, suffix, marks=[] if name == "gpt2" or (kind == "q4_0" and suffix) else pytest.mark.long)
        for name in FAMILIES
        for kind in QUANTISED
        for suffix in WRITERS
    ],
)
def test_quantised_bytes_are_those_of_the_package(tmp_path: Path, name: str, kind: str, suffix: str) -> None:
    """Of every matrix of a product; norms, biases, positions and embeddings stay. Tables are quantised where it is asked for."""
    config = wide(expressible(name))
    theirs = hf_model(config)
    source = directory_of(tmp_path / "model", theirs)
    arrays = converted(theirs)
    for tables in (False, True):
        path = tmp_path / f"out{tables}{suffix}"
        done = WRITERS[suffix](source, path, Conversion(kind, embeddings=tables, head=tables))
        tensors = {}
        if suffix:
            tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
            assert tensors.keys() == arrays.keys()
        for short, values in arrays.items():
            stays = values.ndim == 1 or short == "position_embd.weight" or (not tables and short in ("token_embd.weight", "output.weight"))
            stays |= "ffn_gate_inp" in short
            expected = values if stays else gguf.quants.quantize(values, QUANTISED[kind])
            if suffix:
                assert tensors[short].tensor_type == (gguf.GGMLQuantizationType.F32 if stays else QUANTISED[kind])
                np.testing.assert_array_equal(tensors[short].data, expected, short)
        assert done.nbytes < done.before
        assert any("position" in name or "wpe" in name for names in done.stayed.values() for name in names) == (name == "gpt2")
        formats = ModelDirectory.open(path).formats
        assert {each.name for each in formats.values()} == {kind}
    expected = greedy(tmp_path / f"outTrue{suffix}", [3, 1, 4])
    assert len(expected) == 9
    if suffix:
        write_quantised(source, tmp_path / "same", Conversion(kind, embeddings=True, head=True))
        assert greedy(tmp_path / "same", [3, 1, 4]) == expected
        found = read(path, tiles(config))
        for key, value in read(tmp_path / "same", tiles(config)).items():
            np.testing.assert_allclose(found[key], value, rtol=0, atol=1e-6 if name.startswith("gemma") and "norm" in key else 0)


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0", "q4_0"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2"])
def test_transformers_reads_them(tmp_path: Path, name: str, kind: str) -> None:
    """Its own reader of GGUF files makes the same tokens of ours."""
    config = replace(wide(expressible(name)), vocab_size=64)
    if name == "gpt2":  # of which transformers takes the usual sizes, whatever the file says
        config = replace(config, vocab_size=50257, n_positions=1024, n_inner=None)
    source = directory_of(tmp_path / "model", hf_model(config))
    write_gguf(source, tmp_path / "model.gguf", Conversion(kind, embeddings=True, head=True))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).eval()
    prompt = torch.tensor([[3, 1, 4]])
    with torch.no_grad():
        found = theirs.generate(prompt, max_new_tokens=9, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 3:].tolist()
    assert greedy(tmp_path / "model.gguf", [3, 1, 4]) == found


def test_again_in_the_same_type_is_the_same(tmp_path: Path) -> None:
    """A quantised model that is quantised again has the same bytes, and what stays, stays quantised."""
    config = wide(expressible("llama"))
    source = directory_of(tmp_path / "model", hf_model(config))
    for kind in QUANTISED:
        write_gguf(source, tmp_path / f"{kind}.gguf", Conversion(kind, embeddings=True, head=True))
        write_gguf(opened(tmp_path / f"{kind}.gguf"), tmp_path / f"{kind}-again.gguf", Conversion(kind))
        one, two = (gguf.GGUFReader(tmp_path / name).tensors for name in (f"{kind}.gguf", f"{kind}-again.gguf"))
        for ours, theirs in zip(one, two, strict=True):
            np.testing.assert_array_equal(ours.data, theirs.data)


def test_a_budget_changes_no_byte(tmp_path: Path) -> None:
    """Windows of a row at a time give the same file; less is refused with the least that will do."""
    config = wide(expressible("gpt2"))
    source = directory_of(tmp_path / "model", hf_model(config))
    write_gguf(source, tmp_path / "one.gguf", Conversion("q4_0"))
    with pytest.raises(DoesNotFit, match="the least that will do is") as caught:
        write_gguf(source, tmp_path / "two.gguf", Conversion("q4_0", nbytes=100))
    assert not (tmp_path / "two.gguf").exists()
    lack = caught.value.shortage
    assert lack is not None
    assert (caught.value.flag, lack.cause, lack.needed, lack.budget) == ("--ram", "task", 4 * 4 * 64, 100)
    write_gguf(source, tmp_path / "two.gguf", Conversion("q4_0", nbytes=4 * 4 * 96))
    one, two = ({tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / name).tensors} for name in ("one.gguf", "two.gguf"))
    assert all(np.array_equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("kind", ["q4_0", "q8_0", "bf16"])
@pytest.mark.parametrize("suffix", list(WRITERS))
def test_a_budget_holds(tmp_path: Path, suffix: str, kind: str) -> None:
    """Matrices of 4 MiB pass through windows that take 1 MiB in all, with what stands ready besides."""
    config = GPT2Config(vocab_size=61, n_positions=13, n_embd=512, n_layer=1, n_head=4)
    write_model(tmp_path / "model", config)
    source = opened(tmp_path / "model")
    tracemalloc.start()
    try:
        WRITERS[suffix](source, tmp_path / f"out{suffix}", Conversion(kind, nbytes=1 << 20))
        assert tracemalloc.get_traced_memory()[1] < 3 << 19
    finally:
        tracemalloc.stop()


def test_rotary_scaling(tmp_path: Path) -> None:
    """Llama 3's factors are a tensor, linear scaling a key; both come back."""
    llama3 = RopeScaling(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    for scaling in (llama3, RopeScaling(rope_type="linear", factor=2.0)):
        config = replace(wide(CONFIGS["llama"]), rope_scaling=scaling, rope_theta=500000.0)
        path = tmp_path / scaling.rope_type
        write_gguf(directory_of(path, hf_model(config)), path.with_suffix(".gguf"), Conversion("f32"))
        assert ModelDirectory.open(path.with_suffix(".gguf")).config.rope_scaling == scaling
        assert greedy(path.with_suffix(".gguf"), [3, 1, 4]) == greedy(path, [3, 1, 4])


def test_what_the_format_cannot_say_is_refused(tmp_path: Path) -> None:
    """A family without an architecture, and configs of which llama.cpp's code has a constant."""
    wrong = {
        "opt": (CONFIGS["opt"], "GGUF files can only be written of gemma2, gemma3_text, gpt2, llama"),
        "windows": (CONFIGS["qwen2"], "use_sliding_window True"),
        "scores": (CONFIGS["gemma3"], "query_pre_attn_scalar 24"),
        "head": (replace(CONFIGS["gemma2"], query_pre_attn_scalar=8, tie_word_embeddings=False), "lm_head.weight has no name in GGUF files"),
        "caps": (replace(CONFIGS["gemma2"], query_pre_attn_scalar=8, attn_logit_softcapping=None), "attn_logit_softcapping None"),
        "activation": (replace(CONFIGS["gpt2"], activation_function="relu"), "activation_function relu"),
        "layers": (replace(CONFIGS["gpt2"], scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx True"),
    }
    for name, (config, words) in wrong.items():
        source = directory_of(tmp_path / name, hf_model(config))
        with pytest.raises(UsageError, match=words):
            write_gguf(source, tmp_path / f"{name}.gguf", Conversion("f32"))
        assert not (tmp_path / f"{name}.gguf").exists()


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes and what stayed are printed; places and flags are checked."""
    monkeypatch.chdir(tmp_path)
    directory_of(tmp_path / "model", hf_model(wide(expressible("llama"))))
    assert main(["quantize", "model", "small.gguf", "--type=q4_0", "--keep=*.layers.0.*", "--ram=64KiB"]) == 0
    out = capsys.readouterr().out
    assert "bits a weight" in out
    assert "(--keep)" in out
    assert "model.embed_tokens.weight (--embeddings quantises it)" in out
    for argv, code, words in (
        (["model", "small.gguf"], 2, "exists; name another file, or replace it with --force"),
        (["small.gguf", "small.gguf", "--force"], 2, "which is the source"),
        (["model", "model", "--force"], 2, "which is the source"),
        (["model", "model/x.gguf"], 2, "which is the source"),
        (["model", "other.gguf", "--keep=nothing"], 2, "--keep nothing fits none of the"),
        (["model", "other.gguf", "--type=f16", "--head"], 2, "--head is about --type q8_0 and q4_0"),
        (["model", "other.gguf", "--ram=1KiB"], 3, "the least that will do is"),
        (["nowhere", "other.gguf"], 4, "does not exist"),
    ):
        assert main(["quantize", *argv]) == code
        err = capsys.readouterr().err
        assert words in err
        assert err.count("\n") == 1
    assert not Path("other.gguf").exists()
    assert main(["quantize", "model", "small.gguf", "--type=q8_0", "--force"]) == 0
    assert main(["quantize", "small.gguf", "back", "--type=bf16"]) == 0
    assert sorted(each.name for each in tmp_path.iterdir()) == ["back", "model", "small.gguf"]


OF_64: dict[str, Any] = {
    "bert": {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4},
    "gpt_neo": {"hidden_size": 64, "num_heads": 4},
    "gpt_neox": {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4},
    "opt": {"hidden_size": 64, "ffn_dim": 96, "num_attention_heads": 4},
    "gemma2": {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2},
    "phi3": {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2},
    "mixtral": {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2},
    "t5": {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_heads": 4},
}


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in FAMILIES])
def test_directories_of_other_families(tmp_path: Path, name: str) -> None:
    """Matrices of layers hold what their blocks stand for, also of joined weights whose heads lie side by side; all else is as it was."""
    kind = name.replace("roberta", "bert").split()[0]
    config, changes = CONFIGS[name], OF_64[kind]
    if scaling := getattr(config, "rope_scaling", None):  # twice as many features of a head turn
        changes = {**changes, "rope_scaling": replace(scaling, short_factor=scaling.short_factor * 2, long_factor=scaling.long_factor * 2)}
    config = replace(config, **changes)
    theirs = hf_model(config)
    source = directory_of(tmp_path / "model", theirs)
    write_quantised(source, tmp_path / "small", Conversion("q8_0"))
    before, after = read(tmp_path / "model", tiles(config)), read(tmp_path / "small", ModelTiling())
    assert before.keys() == after.keys()
    held = set(ModelDirectory.open(tmp_path / "small").blocks({key: value.shape for key, value in before.items()}))
    assert held
    for key, value in before.items():
        if key in held:
            assert 0 < abs(value - after[key]).max() <= abs(value).max() / 127
        else:
            np.testing.assert_array_equal(value, after[key])
