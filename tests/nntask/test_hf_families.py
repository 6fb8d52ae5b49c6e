"""Directories and modules of Hugging Face, both ways, for every family; `test_hf_directory` and `test_hf_export` have what no family changes."""

import json

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from support.families import FAMILIES
from support.gpt2_oracle import batches
from support.llama_oracle import SCALINGS
from support.model_directories import HUGE, saved

from nntask import no_grad
from nntask.export.huggingface import export
from nntask.hf.model_directory import ModelDirectory
from scheduler import InlineRuntime
from wrappers.cli import main
from wrappers.torch.interchange import from_torch, to_torch

families = pytest.mark.parametrize("family", FAMILIES, ids=str)


def config_of(family, seed, scaling=-1, **changes):
    """A random config, with a rotary scaling where there are rotations."""
    return family.oracle.random_config(seed, **({"rope_scaling": SCALINGS[scaling]} if family.name == "llama" else {}), **changes)


def logits(model, tokens):
    """Ours, in fp32."""
    given, _ = model.input_tensors(*tokens.shape)
    given.write(tokens)
    with no_grad():
        return model.logits(given).read().astype(np.float32)


def expected_logits(theirs, tokens):
    """Theirs."""
    with torch.no_grad():
        return theirs.float()(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()


@families
@pytest.mark.parametrize("seed", range(4))
def test_directories_of_transformers_are_read(tmp_path, family, seed):
    """Shards, biases, tied and untied heads, every rotary scaling, in ragged tiles: their logits."""
    config = config_of(family, seed, seed, tie_word_embeddings=bool(seed % 2))
    theirs = family.oracle.hf_model(config)
    theirs.save_pretrained(tmp_path / "d", max_shard_size="4KB")
    directory = ModelDirectory.open(tmp_path / "d")
    model = family.kind(directory.config, family.tilings(config)[1], InlineRuntime(), seed=None)
    directory.check({name: tensor.shape for name, tensor in model.tensors().items()})
    directory.attach(model.tensors())
    model.eval()
    tokens = batches(config, 1, 3, config.n_positions)[0][0]
    expected = expected_logits(theirs.eval(), tokens)
    assert np.abs(logits(model, tokens) - expected).max() < 1e-4 * max(1.0, np.abs(expected).max())


@families
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-4), (ml_dtypes.bfloat16, 2e-2)])
@pytest.mark.parametrize("tied", [True, False])
def test_exported_directories_are_read_by_transformers(tmp_path, family, dtype, tolerance, tied):
    """Their logits on the exported directory are ours, in fp32 and in bf16."""
    config = config_of(family, 7, tie_word_embeddings=tied, initializer_range=0.1)
    model = family.oracle.our_model(family.oracle.hf_model(config), config, family.tilings(config)[1], InlineRuntime(), dtype=dtype)
    export(saved(tmp_path / "run", model), tmp_path / "out", dtype="auto", shard_nbytes=HUGE, tokenizer=None)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert type(theirs).__name__ == {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}[family.name]
    assert theirs.dtype == (torch.float32 if dtype == np.float32 else torch.bfloat16)
    tokens = batches(config, 1, 3, config.n_positions)[0][0]
    expected = expected_logits(theirs, tokens)
    assert np.abs(logits(model, tokens) - expected).max() < tolerance * max(1.0, np.abs(expected).max())


@families
def test_modules_both_ways(family):
    """from_torch computes what the module does, to_torch gives it back bit by bit."""
    config = config_of(family, 3, 1)
    theirs = family.oracle.hf_model(config).eval()
    model = from_torch(theirs, InlineRuntime(), family.tilings(config)[1])
    assert isinstance(model, family.kind)
    model.eval()
    back = to_torch(model)
    assert all(torch.equal(value, theirs.state_dict()[name]) for name, value in back.state_dict().items())
    tokens = batches(config, 1, 2, config.n_positions)[0][0]
    expected = expected_logits(theirs, tokens)
    assert np.abs(logits(model, tokens) - expected).max() < 1e-4 * max(1.0, np.abs(expected).max())


@families
def test_training_goes_on_from_a_directory(tmp_path, monkeypatch, family):
    """--init-from a directory, one step with a learning rate of zero, export: the file's bits, and a config that says the same."""
    monkeypatch.chdir(tmp_path)
    config = config_of(family, 5, **{"vocab_size": 300, family.longest: 16})
    theirs = family.oracle.hf_model(config)
    theirs.save_pretrained(tmp_path / "start")
    np.random.default_rng(0).integers(0, 300, 400).astype(np.uint16).tofile(tmp_path / "train.bin")
    argv = "train --init-from=start --dataset=train.bin --dataset-path=. --batch=4 --steps=1 --lr=0 --weight-decay=0 --sample-tokens=0 --ncpu=2"
    assert main([*argv.split(), "--inner-tile=7", "--run-dir=run"]) == 0
    assert main(["export", "run", "out"]) == 0
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(value, theirs.state_dict()[name]) for name, value in again.state_dict().items())
    if family.name == "llama":
        assert again.config.rope_parameters == theirs.config.rope_parameters
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == family.name
