"""Exported directories: transformers computes with them what we do, and they come back bit by bit."""

import json
import os
import random
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from support.gpt2_oracle import random_config
from support.model_directories import CUTS, HUGE, saved, weights
from support.tokenizers_of_others import BEGIN, END, TURN, llama3

from nntask.data import load_tokenizer
from nntask.data.tokenizer import ByteTokenizer, train_bpe
from nntask.errors import UsageError
from nntask.export.huggingface import export
from nntask.models.gpt2 import GPT2
from scheduler import InlineRuntime


def text_of(seed: int) -> str:
    """Words, code, odd spaces, scripts of many kinds, control characters."""
    rng = random.Random(seed)
    alphabets = (
        "abcdefgh ",
        "ABC abc 0123456789",
        " \t\n  ",
        "äöüß éè",
        "中文字符",
        "привет",
        "🙂🚀👩‍👩‍👧",
        "()[]{}:=+-*/\\'\"",
        "\u200b\x00\x7f\xa0",
    )
    return "".join(rng.choice(rng.choice(alphabets)) for _ in range(rng.randrange(0, 120)))


@pytest.mark.parametrize("shard_nbytes", [HUGE, 20_000, 1])
@pytest.mark.parametrize("stored", ["auto", "fp32", "fp16", "bf16"])
def test_the_way_there_and_back(tmp_path, shard_nbytes, stored):
    """Export and import give the weights in the stored element type, bit by bit, in one file or in many."""
    config = random_config(8, tie_word_embeddings=False)
    model = GPT2(config, CUTS[1], InlineRuntime(), seed=4)
    done = export(saved(tmp_path / "run", model), tmp_path / "out", dtype=stored, shard_nbytes=shard_nbytes, tokenizer=None)
    kind = {"auto": np.float32, "fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}[stored]
    found = weights(tmp_path / "out")
    for name, tensor in model.tensors().items():
        assert np.array_equal(found[name], tensor.read().astype(kind).astype(np.float32)), name
    assert done.nbytes == config.num_parameters * np.dtype(kind).itemsize
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == len(done.files)
    assert (len(done.files) > 1) == (shard_nbytes < HUGE)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    theirs.save_pretrained(tmp_path / "again")
    again = weights(tmp_path / "again")
    assert all(np.array_equal(again[name], value) for name, value in found.items())


@pytest.mark.parametrize("kind", ["bpe", "bytes", "bytes without end"])
def test_tokenizers_agree(tmp_path, kind):
    """AutoTokenizer makes the same ids of 1,000 texts, after the one that a text of the run begins after, and the same texts of them."""
    texts = [text_of(seed) for seed in range(1000)]
    size = 256 if kind == "bytes without end" else 400
    tokenizer = train_bpe(texts[:200], size) if kind == "bpe" else ByteTokenizer(size)
    config = random_config(1, vocab_size=size)
    export(
        saved(tmp_path / "run", GPT2(config, CUTS[0], InlineRuntime()), tokenizer),
        tmp_path / "out",
        dtype="auto",
        shard_nbytes=HUGE,
        tokenizer=tokenizer,
    )
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text, ids in zip(texts, tokenizer.encode(texts), strict=True):
        assert theirs(text).input_ids == [tokenizer.begin_of_text, *ids.tolist()], repr(text)
        assert theirs.decode(ids.tolist()) == tokenizer.decode(ids.tolist()) == text
    if kind != "bytes without end":
        assert theirs.eos_token_id == tokenizer.end_of_text
        assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == tokenizer.end_of_text


def test_what_is_there_stays_until_the_new_one_is_whole(tmp_path):
    """Without force nothing is touched, with it only model directories, and a failure leaves the old one."""
    config = random_config(2)
    model = GPT2(config, CUTS[0], InlineRuntime(), seed=1)
    checkpoint = saved(tmp_path / "run", model)
    out = tmp_path / "out"

    def go(path=out, **how):
        return export(checkpoint, path, **{"dtype": "auto", "shard_nbytes": HUGE, "tokenizer": None, **how})

    go()
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(UsageError, match="replace it with --force"):
        go()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious.txt").write_text("x")
    for path, words in (
        (tmp_path / "other", "has precious.txt, and --force replaces directories that hold a model and nothing else"),
        (tmp_path / "run", "which is the checkpoint that is exported"),
        (checkpoint.path / "x", "contain or lie in"),
    ):
        with pytest.raises(UsageError, match=words):
            go(path, force=True)
    model.tensors()["ln_f.bias"].write(np.full(config.n_embd, 1e6, np.float32))
    large = saved(tmp_path / "large", model)
    with pytest.raises(UsageError, match="too large for float16"):
        export(large, out, dtype="fp16", shard_nbytes=HUGE, tokenizer=None, force=True)
    assert (out / "model.safetensors").read_bytes() == before
    with pytest.raises(UsageError, match="is not a writable directory"):
        go(Path("/proc/none/out"))
    export(large, out, dtype="bf16", shard_nbytes=20_000, tokenizer=None, force=True)
    assert not (out / "model.safetensors").exists()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["large", "other", "out", "run"]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("notes.txt", "has notes.txt"),
        ("optimizer.safetensors", "has optimizer.safetensors"),
        ("checkpoints/", "has checkpoints"),
        ("model.safetensors.bak", "has model.safetensors.bak"),
        ("config.json", "holds a model of type 'bart'"),
    ],
)
def test_force_replaces_models_and_nothing_else(tmp_path, entry, words):
    """A directory with a config.json that holds anything else, or a model that we do not know, stays as it is."""
    checkpoint = saved(tmp_path / "run", GPT2(random_config(2), CUTS[0], InlineRuntime(), seed=1))
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text('{"model_type": "gpt2"}')
    if entry == "config.json":
        (out / entry).write_text('{"model_type": ["gpt2"]}')
        with pytest.raises(UsageError, match=r"holds a model of type \['gpt2'\]"):
            export(checkpoint, out, dtype="auto", shard_nbytes=HUGE, tokenizer=None, force=True)
    if entry.endswith("/"):
        (out / entry).mkdir()
    else:
        (out / entry).write_text('{"model_type": "bart"}')
    with pytest.raises(UsageError, match=words):
        export(checkpoint, out, dtype="auto", shard_nbytes=HUGE, tokenizer=None, force=True)
    assert (out / "config.json").exists()
    assert (out / entry).exists()


def test_a_target_that_can_be_no_directory(tmp_path):
    """A pipe, a file, something below a file, a link: another name is asked for, not room on the disk."""
    checkpoint = saved(tmp_path / "run", GPT2(random_config(2), CUTS[0], InlineRuntime(), seed=1))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for path in ("pipe", "file", "file/x", "link"):
        with pytest.raises(UsageError, match="is not a directory; name another one"):
            export(checkpoint, tmp_path / path, dtype="auto", shard_nbytes=HUGE, tokenizer=None, force=True)


def test_begin_and_end_are_as_the_source_had_them(tmp_path):
    """A list of ends, a template for chats, a config of the tokenizer's own: through a checkpoint into the exported directory."""
    source = llama3(tmp_path / "source")
    (source / "config.json").write_text(json.dumps({"bos_token_id": BEGIN, "eos_token_id": [END, TURN]}))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "model_max_length": 77}
    (source / "tokenizer_config.json").write_text(json.dumps(about))
    (source / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    checkpoint = saved(tmp_path / "run", GPT2(random_config(2, vocab_size=300), CUTS[0], InlineRuntime(), seed=1), load_tokenizer(source))
    export(checkpoint, tmp_path / "out", dtype="auto", shard_nbytes=HUGE, tokenizer=load_tokenizer(checkpoint.path))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (BEGIN, [END, TURN])
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [END, TURN]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (theirs.eos_token_id, theirs.model_max_length) == (TURN, 77)
    assert theirs.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<|begin_of_text|>hi"
    assert theirs("a").input_ids[0] == BEGIN
