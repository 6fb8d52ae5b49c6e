"""Directories and modules of Hugging Face, both ways, for every family; `test_hf_directory` and `test_hf_export` have what no family changes."""

import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.families import FAMILIES
from support.gpt2_oracle import batches
from support.llama_oracle import SCALINGS
from support.model_directories import HUGE, saved
from support.transformers_oracle import CONFIGS, EAGER_EXPERTS, hf_logits, hf_model, our_logits, our_model, random_batch, seen, tiles

from nntask import no_grad
from nntask.errors import DataError
from nntask.export.huggingface import export
from nntask.hf.model_directory import ModelDirectory
from nntask.io.strided_ranges import FileRange, OpenFile, RowGroups
from nntask.models.registry import build
from scheduler import InlineRuntime
from wrappers.cli import main
from wrappers.torch.interchange import from_torch, to_torch

kinds = pytest.mark.parametrize("kind", CONFIGS)
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


def attached(path, tiling=None, runtime=None):
    """The model of a directory, its tiles read from there, in evaluation mode."""
    directory = ModelDirectory.open(path)
    model = build(directory.config, tiling or tiles(directory.config), runtime or InlineRuntime(), seed=None)
    directory.attach(model.tensors())
    model.eval()
    return model


def close(ours, theirs, tolerance=1e-4):
    """Whether scores are equal within a tolerance of the largest one."""
    return np.abs(ours - theirs).max() < tolerance * max(1.0, np.abs(theirs).max())


@kinds
def test_directories_of_every_family_are_read(tmp_path, kind):
    """Shards, in ragged tiles: the config and the logits of transformers."""
    config = CONFIGS[kind]
    theirs = hf_model(config).eval()
    theirs.save_pretrained(tmp_path / "d", max_shard_size="9KB")
    assert len(list((tmp_path / "d").glob("*.safetensors"))) > 1
    model, batch = attached(tmp_path / "d"), random_batch(config, 1)
    assert model.config.description == config.description
    assert close(seen(batch, our_logits(model, batch)), seen(batch, hf_logits(theirs, config, batch).detach()))


@kinds
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-4), (ml_dtypes.bfloat16, 8e-2)])
def test_exported_directories_of_every_family_are_read_by_transformers(tmp_path, kind, dtype, tolerance):
    """Nothing is missing or unexpected, and their logits are ours; the files read again have the bits they had."""
    config = CONFIGS[kind]
    model = our_model(hf_model(config), config, tiles(config), InlineRuntime(), dtype=dtype)
    export(saved(tmp_path / "run", model), tmp_path / "out", dtype="auto", shard_nbytes=20000, tokenizer=None)
    named = getattr(transformers, json.loads((tmp_path / "out" / "config.json").read_text())["architectures"][0])
    theirs, info = named.from_pretrained(tmp_path / "out", attn_implementation="eager", output_loading_info=True, **EAGER_EXPERTS)
    assert not any(info.values())
    assert theirs.dtype == (torch.float32 if dtype == np.float32 else torch.bfloat16)
    model.eval()
    batch = random_batch(config, 2)
    with torch.no_grad():
        ours, expected = seen(batch, our_logits(model, batch)), seen(batch, hf_logits(theirs.float().eval(), config, batch))
    if dtype != np.float32 and config.description.stack.num_idle(config.n_embd):  # a rounded score of an expert may choose another one
        agreeing = np.argsort(np.abs(ours - expected).max(axis=1))[: len(ours) * 9 // 10]
        ours, expected = ours[agreeing], expected[agreeing]
    assert close(ours, expected, tolerance)
    again = attached(tmp_path / "out")
    found = {name: tensor.read() for name, tensor in again.tensors().items()}
    assert all(np.array_equal(tensor.read().astype(np.float32), found[name]) for name, tensor in model.tensors().items())


@kinds
def test_modules_of_every_family_both_ways(kind):
    """from_torch computes what the module does, to_torch gives it back bit by bit."""
    config = CONFIGS[kind]
    theirs = hf_model(config).eval()
    model = from_torch(theirs, InlineRuntime(), tiles(config))
    model.eval()
    back = to_torch(model)
    assert type(back) is type(theirs)
    assert all(torch.equal(value, theirs.state_dict()[name]) for name, value in back.state_dict().items())
    batch = random_batch(config, 3)
    assert close(seen(batch, our_logits(model, batch)), seen(batch, hf_logits(theirs, config, batch).detach()))
    narrow = to_torch(from_torch(theirs.bfloat16(), InlineRuntime(), dtype=ml_dtypes.bfloat16))
    assert narrow.dtype == torch.bfloat16
    assert all(torch.equal(value, theirs.state_dict()[name]) for name, value in narrow.state_dict().items())


@pytest.mark.parametrize("kind", ["bert", "roberta", "t5 gated"])
def test_heads_of_their_own_keep_their_bias(tmp_path, kind):
    """An untied head in directories both ways: its bias is that of its layer, whatever stands beside it; a T5 is not scaled."""
    config = replace(CONFIGS[kind], tie_word_embeddings=False)
    theirs, batch = hf_model(config, seed=3).eval(), random_batch(config, 1)
    if kind != "t5 gated":  # of which transformers ties the head that it begins with
        one, other = (value for name, value in theirs.state_dict().items() if value.shape == (config.vocab_size,))
        assert not torch.equal(one, other)
        theirs.save_pretrained(tmp_path / "d")
        assert close(seen(batch, our_logits(attached(tmp_path / "d"), batch)), seen(batch, hf_logits(theirs, config, batch).detach()))
    model = build(config, tiles(config), InlineRuntime(), seed=1)
    for number, tensor in enumerate(model.tensors().values()):
        tensor.write(tensor.read() + 0.1 * np.random.default_rng(number).standard_normal(tensor.shape).astype(np.float32))
    export(saved(tmp_path / "run", model), tmp_path / "out", dtype="auto", shard_nbytes=HUGE, tokenizer=None)
    again = type(theirs).from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    model.eval()
    with torch.no_grad():
        assert close(seen(batch, our_logits(model, batch)), seen(batch, hf_logits(again, config, batch)))


def test_a_tied_head_that_is_not_scaled(tmp_path):
    """What transformers makes of a new T5 whose config says that the head is not tied: it is, and reads what is not scaled."""
    theirs, batch = hf_model(replace(CONFIGS["t5 gated"], tie_word_embeddings=False)).eval(), random_batch(CONFIGS["t5 gated"], 1)
    theirs.save_pretrained(tmp_path / "d")
    model = attached(tmp_path / "d")
    assert (model.config.ties_head, model.config.description.head.scale) == (True, 1.0)
    assert close(our_logits(model, batch), hf_logits(theirs, model.config, batch).detach().numpy())
    assert transformers.T5Config(**model.config.to_dict()).scale_decoder_outputs is False


def rewritten(path, change):
    """The tensors of a directory under other names."""
    weights = {name: value.clone() for name, value in load_file(path / "model.safetensors").items()}
    save_file({name: value.contiguous() for name, value in change(weights).items()}, path / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("gpt_neox", lambda w: {name.replace("lm_head", "embed_out"): value for name, value in w.items()}),
        ("gpt_neox", lambda w: {**w, "gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.ones(2)}),
        ("bert", lambda w: {name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): value for name, value in w.items()}),
        ("bert", lambda w: {**w, "bert.pooler.dense.weight": torch.ones(30, 30), "cls.seq_relationship.weight": torch.ones(2, 30)}),
        ("bert", lambda w: {**w, "cls.predictions.decoder.weight": w["bert.embeddings.word_embeddings.weight"].clone()}),
        ("bert", lambda w: {**w, "cls.predictions.decoder.bias": w["cls.predictions.bias"].clone()}),
        ("bert", lambda w: {name.removeprefix("bert."): value for name, value in w.items()}),
        ("bert classifier", lambda w: {name.removeprefix("bert."): value for name, value in w.items()}),
        ("roberta classifier", lambda w: {**w, "lm_head.bias": torch.ones(61), "roberta.embeddings.position_ids": torch.ones(1, 15)}),
        ("t5", lambda w: {**w, "encoder.embed_tokens.weight": w["shared.weight"].clone(), "lm_head.weight": w["shared.weight"].clone()}),
        ("t5", lambda w: {name.replace("shared.", "encoder.embed_tokens."): value for name, value in w.items()}),
        ("t5", lambda w: {**w, "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": torch.ones(32, 5)}),
    ],
)
def test_older_names_and_those_of_other_uses(tmp_path, kind, change):
    """Names of other versions, without prefix, written twice, or of heads that this model lacks: the same weights."""
    hf_model(CONFIGS[kind]).save_pretrained(tmp_path / "d")
    want = {name: tensor.read() for name, tensor in attached(tmp_path / "d").tensors().items()}
    rewritten(tmp_path / "d", change)
    assert all(np.array_equal(tensor.read(), want[name]) for name, tensor in attached(tmp_path / "d").tensors().items())


def test_what_is_written_twice_must_be_equal_and_what_lacks_is_named(tmp_path):
    """A tied head of other values, and a name that no version has."""
    hf_model(CONFIGS["t5"]).save_pretrained(tmp_path / "d")
    rewritten(tmp_path / "d", lambda w: {**w, "encoder.embed_tokens.weight": w["shared.weight"] + 1})
    with pytest.raises(DataError, match=r"encoder\.embed_tokens\.weight in .* is not shared\.weight"):
        attached(tmp_path / "d")
    rewritten(tmp_path / "d", lambda w: {name: value for name, value in w.items() if "embed_tokens" not in name and "wi.weight" not in name})
    with pytest.raises(DataError, match=r"has no tensor encoder\.block\.0\.layer\.1\.DenseReluDense\.wi\.weight of shape .* and 4 more"):
        attached(tmp_path / "d")


def test_rows_of_heads_in_pieces():
    """Windows of rows that begin and end inside heads, read and written, are those of the array."""
    with tempfile.TemporaryFile() as file:
        values = np.arange(4 * 3 * 5 * 7, dtype=np.float32).reshape(4, 3, 5, 7)
        file.write(values.tobytes())
        file.flush()
        where = FileRange(OpenFile(Path("x"), fd=os.dup(file.fileno())), values.dtype, 5 * 7 * 4, (4, 5, 7), (3 * 5 * 7 * 4, 7 * 4, 4))
        whole, rows = values[:, 1].reshape(20, 7), RowGroups.of(where)
        for first, stop in ((0, 20), (3, 4), (3, 17), (5, 15), (7, 9), (2, 10), (0, 5)):
            for columns in (slice(0, 7), slice(2, 5)):
                part, out = rows[(slice(first, stop), columns)], np.empty((stop - first, columns.stop - columns.start), np.float64)
                part.read(out)
                assert np.array_equal(out, whole[first:stop, columns])
                inner = part[(slice(0, 1), slice(1, 2))]
                out = np.empty((1, 1), np.float32)
                inner.read(out, np.empty(max(inner.scratch_nbytes(out.dtype), 1), np.uint8))
                assert out[0, 0] == whole[first, columns.start + 1]
        rows[(slice(3, 17), slice(1, 6))].write(np.zeros((14, 5)))
        whole[3:17, 1:6] = 0
        where_again = np.fromfile(f"/proc/self/fd/{file.fileno()}", np.float32).reshape(4, 3, 5, 7)
        assert np.array_equal(where_again[:, 1].reshape(20, 7), whole)
        assert np.array_equal(where_again[:, [0, 2]], values[:, [0, 2]])
