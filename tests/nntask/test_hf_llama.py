"""LLaMA directories and modules of Hugging Face, both ways; `test_hf_directory` and `test_hf_export` have what no family changes."""

import json

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from hf_oracle import batches
from llama_oracle import SCALINGS, hf_model, our_model, random_config
from test_hf_export import HUGE, saved

from nntask import no_grad
from nntask.hf.directory import ModelDirectory
from nntask.models.llama import Llama
from nntask.tiling import ModelTiling
from nntask.trainer.export import export
from scheduler import InlineRuntime
from wrappers.cli import main
from wrappers.torch import from_torch, to_torch


def ragged(config):
    """Uneven tiles that hold one group of heads each."""
    return ModelTiling(2, 5, 7, 11, config.n_head // config.n_kv_head, 13)


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


@pytest.mark.parametrize("seed", range(4))
def test_directories_of_transformers_are_read(tmp_path, seed):
    """Shards, biases, tied and untied heads, every rotary scaling, in ragged tiles: their logits."""
    config = random_config(seed, rope_scaling=SCALINGS[seed], tie_word_embeddings=bool(seed % 2))
    theirs = hf_model(config)
    theirs.save_pretrained(tmp_path / "d", max_shard_size="4KB")
    directory = ModelDirectory.open(tmp_path / "d")
    model = Llama(directory.config, ragged(config), InlineRuntime(), seed=None)
    directory.check({name: tensor.shape for name, tensor in model.tensors().items()})
    directory.attach(model.tensors())
    tokens = batches(config, 1, 3, config.n_positions)[0][0]
    assert np.abs(logits(model, tokens) - expected_logits(theirs, tokens)).max() < 1e-4


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-4), (ml_dtypes.bfloat16, 2e-2)])
@pytest.mark.parametrize("tied", [True, False])
def test_exported_directories_are_read_by_transformers(tmp_path, dtype, tolerance, tied):
    """Their logits on the exported directory are ours, in fp32 and in bf16."""
    config = random_config(7, tie_word_embeddings=tied, initializer_range=0.1, rope_scaling=SCALINGS[-1])
    model = our_model(hf_model(config), config, ragged(config), InlineRuntime(), dtype=dtype)
    export(saved(tmp_path / "run", model), tmp_path / "out", dtype="auto", shard_nbytes=HUGE, tokenizer=None)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert type(theirs).__name__ == "LlamaForCausalLM"
    tokens = batches(config, 1, 3, config.n_positions)[0][0]
    expected = expected_logits(theirs, tokens)
    assert np.abs(logits(model, tokens) - expected).max() < tolerance * max(1.0, np.abs(expected).max())


def test_modules_both_ways():
    """from_torch computes what the module does, to_torch gives it back bit by bit."""
    config = random_config(3, rope_scaling=SCALINGS[1])
    theirs = hf_model(config).eval()
    model = from_torch(theirs, InlineRuntime(), ragged(config))
    assert isinstance(model, Llama)
    back = to_torch(model)
    assert all(torch.equal(value, theirs.state_dict()[name]) for name, value in back.state_dict().items())
    tokens = batches(config, 1, 2, config.n_positions)[0][0]
    assert np.abs(logits(model, tokens) - expected_logits(theirs, tokens)).max() < 1e-4


def test_training_goes_on_from_a_directory(tmp_path, monkeypatch):
    """--init-from a LLaMA, one step with a learning rate of zero, export: the file's bits, and a config that says the same."""
    monkeypatch.chdir(tmp_path)
    config = random_config(5, vocab_size=300, max_position_embeddings=16, rope_scaling=SCALINGS[-1])
    theirs = hf_model(config)
    theirs.save_pretrained(tmp_path / "start")
    np.random.default_rng(0).integers(0, 300, 400).astype(np.uint16).tofile(tmp_path / "train.bin")
    argv = "train --init-from=start --dataset=train.bin --dataset-path=. --batch=4 --steps=1 --lr=0 --weight-decay=0 --sample-tokens=0 --ncpu=2"
    assert main([*argv.split(), "--inner-tile=7", "--run-dir=run"]) == 0
    assert main(["export", "run", "out"]) == 0
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(value, theirs.state_dict()[name]) for name, value in again.state_dict().items())
    assert again.config.rope_parameters == theirs.config.rope_parameters
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"
