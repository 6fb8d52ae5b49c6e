"""The runs of `same_runs` and their inputs: models of some ten thousand parameters, text, tokens, a directory as transformers writes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

TRAIN: Final = "train --dataset=text --dataset-path=text.txt --tokenizer=bytes --batch=4 --lr=1e-3 --sample-tokens=8 --ncpu=2"
EXAMPLE: Final = "examples/gpt2_custom_training.py"
NNTILE: Final = TRAIN.replace("train ", f"{EXAMPLE} ", 1)
"""The same with NNTile's command line."""
TILES: Final = "--seq-tile=9 --embd-tile=16 --inner-tile=50 --head-tile=2 --vocab-tile=75 --minibatch-tile=1"
RAM: Final = "--ram=64MiB"
HERE: Final = "--run-dir=run"


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table.

    Args:
        name: of the row.
        commands: command lines without ``nntask``, run one after another in one directory.
        allowance: how much the sum of moved bytes may differ, as a share of the recorded one; 0 means that the bytes of each link are equal.
        exact: whether everything is compared: text without masks, and fields that time decides elsewhere.
        stop_at: SIGINT goes to the first command when it prints a line that begins so; lines about steps and the number of tasks are not compared.
    """

    name: str
    commands: tuple[str, ...]
    allowance: float = 0.0
    exact: bool = False
    stop_at: str = ""


TIGHT: Final = "--ram=900KiB --disk=tier:8MiB"
"""A quarter of what the step needs in memory."""
SMALL: Final = f"--config-path=gpt2.json {TILES}"
VALIDATE: Final = "--eval-every=3 --eval-batches=2 --val-path=val.txt"
TEXT: Final = "--dataset=text --dataset-path=text.txt"
START: Final = f"train --init-from=start {TEXT} --batch=4 --lr=1e-3 --sample-tokens=4 --ncpu=2"
DEVICES: Final = f"{RAM} --steps=4 --ncpu=0 --gpu-memory=400KiB"
BAD: Final = "train --config-path=gpt2.json --dataset=train.bin --dataset-path=data --batch=4 --steps=2 --ncpu=1 --sample-tokens=0"
BAD_NNTILE: Final = BAD.replace("train ", f"{EXAMPLE} ", 1)
PLAN: Final = f"plan {SMALL} --batch=4 --minibatch=2 --json"

CASES: Final = (
    Case("in memory", (f"{TRAIN} {SMALL} {RAM} --steps=6 {VALIDATE} --save-every=3 {HERE}",)),
    Case("one worker, recomputation, stored scores", (f"{NNTILE} {SMALL} {RAM} --steps=4 --ncpu=1 --recompute=block --no-flashattention {HERE}",)),
    Case("a quarter of the memory, and disk", (f"{TRAIN} {SMALL} {TIGHT} --steps=4 {VALIDATE} {HERE}",), allowance=0.3),
    Case(
        "a quarter of the memory, and disk, one worker",
        (f"{TRAIN} {SMALL} {TIGHT} --steps=4 --ncpu=1 --no-prefetch --sched=eager --order=submission {HERE}",),
        allowance=0.05,
    ),
    Case("two simulated devices", (f"{TRAIN} {SMALL} {DEVICES} --sim-gpu=2 {HERE}",), allowance=0.3),
    Case("a simulated device", (f"{TRAIN} {SMALL} {DEVICES} --sim-gpu=1 --no-prefetch --order=layers {HERE}",), allowance=0.15),
    Case("two Dask nodes", (f"{TRAIN} {SMALL} --ram=128MiB --steps=4 --lanes=4 --minibatch=2 --ncpu=1 --dask=local:2 {HERE}",), allowance=0.01),
    Case(
        "LoRA",
        (
            f"{TRAIN} {SMALL} {RAM} --steps=4 --train=lora:3 --lora-alpha=6 --lora-dropout=0.1 {HERE}",
            "export run adapter",
            "export run merged --merge",
        ),
    ),
    Case(
        "resumed after it ended",
        (
            f"{TRAIN} {SMALL} {RAM} --steps=3 {HERE}",
            "train --resume=run --steps=6 --ncpu=1",
            "train --resume=run/checkpoints/step-000006 --steps=8 --sample-tokens=0",
        ),
    ),
    Case(
        "resumed after Ctrl-C",
        (f"{TRAIN} {SMALL} {RAM} --steps=80 --keep-checkpoints=1 {HERE}", "train --resume=auto --run-dir=run --keep-checkpoints=1"),
        stop_at="step 1/",
    ),
    Case("LLaMA", (f"{TRAIN} --config-path=llama.json --inner-tile=30 --vocab-tile=75 {RAM} --steps=4 {VALIDATE} {HERE}",)),
    Case("bf16", (f"{TRAIN} {SMALL} {RAM} --steps=4 --dtype=bf16 {HERE}",)),
    Case("fp64, four lanes", (f"{TRAIN} {SMALL} {RAM} --steps=4 --dtype=fp64 --lanes=4 --minibatch=1 {HERE}",)),
    Case(
        "accumulation, clipping, schedule",
        (
            f"{NNTILE} {SMALL} {RAM} --steps=8 --minibatch=2 --grad-clip=0.5 --schedule=cosine --warmup-steps=3 --min-lr=1e-4 --weight-decay=0.1 "
            f"--loss-reduction=sum --save-checkpoint=end.safetensors --save-optimizer=moments.safetensors {HERE}",
        ),
    ),
    Case("sgd", (f"{TRAIN} {SMALL} {RAM} --steps=4 --optimizer=sgd:0.9 --schedule=linear --check-finite {HERE}",)),
    Case("from a transformers directory", (f"{START} {RAM} --steps=3 {HERE}", "export run out --dtype=bf16 --shard-size=20KB")),
    Case("from a transformers directory, little memory", (f"{START} --ram=400KiB --disk=tier:8MiB --steps=3 {HERE}",), allowance=0.3),
    Case(
        "generate, perplexity, compare",
        (
            f"generate start --prompt=abc --max-new-tokens=9 --temperature=0 {RAM} --ncpu=2",
            f"generate start --prompt-file=val.txt --batch=3 --max-new-tokens=4 --seed=3 {RAM} --ncpu=2",
            f"perplexity start --dataset=text --dataset-path=val.txt --seq-len=12 --json {RAM} --ncpu=2",
            f"compare gpt2.json --steps=2 --batch=2 --json {RAM}",
        ),
    ),
    Case(
        "plans of imaginary machines",
        (
            f"{PLAN} --devices=2x400KiB --ram=4MiB",
            f"{PLAN} --devices=1x250KiB@1TF --ram=900KiB --disk=8MiB",
            f"{PLAN} --devices=1x300KiB --ram=500KiB --disk=8MiB --order=submission --no-prefetch --evict=lru --sched=dmda",
            f"{PLAN} --devices=3x300KiB --ram=4MiB --train=lora:3 --recompute=block --sched=lws --lanes=2",
        ),
        exact=True,
    ),
    Case("plan of this machine", (f"{PLAN} {RAM} --ncpu=2", f"plan {SMALL} --batch=4 {RAM} --ncpu=2 --dry-run")),
    Case("traced and reported", (f"{TRAIN} {SMALL} {RAM} --steps=4 --trace-steps=2:3 --report-to=tensorboard {HERE}", "report run")),
    Case(
        "bad input",
        (
            f"{BAD} --minibatch=3",
            f"{BAD} --bach=3",
            f"{BAD} --config-path=none.json",
            f"{BAD} --seq-len=17",
            f"{BAD} --ram=12XB",
            f"{BAD} --batch=500",
            f"{BAD_NNTILE} --restrict=cuda",
            f"{BAD} --resume=data",
            f"{BAD} --dataset-path=nowhere",
            f"{BAD} --order=forward",
            f"{BAD} --sim-gpu=2 --gpu-memory=60",
            f"{BAD} --ram=100KiB",
            f"{BAD} --dask=local:2",
            f"{BAD} --train=lora:999",
            "generate data --prompt=a",
            "generate nowhere --ram=10TB",
            "export nowhere out",
            "trian",
        ),
        exact=True,
    ),
    Case(
        "bad input, places and files",
        (
            f"{BAD} --disk=/proc/x:1GB",
            f"{BAD} --disk=tier:100TB --dry-run --sim-gpu=1 --gpu-memory=100TB",
            f"{BAD} --train=lora:8 --init-from=nope.safetensors",
            f"{BAD} --train=lora:8 --init-from=empty.safetensors",
            f"{BAD} --train=lora:8 --init-from=nope/w.safetensors",
            f"{BAD} --train=lora:8 --init-from=nope.safetensors --dask=local:2 --lanes=2 --minibatch=2",
            f"{BAD} --train=lora:8 --init-from=empty.safetensors --dask=local:2 --lanes=2 --minibatch=2",
            f"{BAD} --dask=local:2 --lanes=2 --minibatch=2 --ram=10TB",
        ),
        exact=True,
    ),
    Case(
        "bad input, two mistakes",
        (
            f"{BAD} --disk=text.txt:100TB",
            f"{BAD} --disk=nope/a/b:100TB",
            f"{BAD} --disk=/proc/x:100TB",
            f"{BAD} --ram=10TB --dataset-path=nowhere",
            f"{BAD} --ram=10TB --init-from=nope.safetensors",
            f"{BAD} --ram=10TB --run-dir=/proc/x",
            f"{BAD} --ram=10TB --trace-steps=all@/proc/x/t.json",
            f"{BAD} --ram=10TB --trace-steps=all@data",
            f"{BAD} --sim-gpu=1 --gpu-memory=10TB --run-dir=/proc/x",
            f"{BAD} --gpu-memory=10TB --run-dir=/proc/x",
            f"{BAD} --train=lora:8 --init-from=nope.safetensors --run-dir=/proc/x",
            f"{BAD} --ram=10TB --seq-tile=1 --embd-tile=1 --inner-tile=1 --head-tile=1 --vocab-tile=1 --batch=4000",
            f"{BAD_NNTILE} --restrict=cuda --config-path=none.json",
            f"{BAD} --dask=local:2 --lanes=2 --minibatch=2 --disk=text.txt --run-dir=/proc/x",
            f"{PLAN} --ram=10TB --train=lora:8 --init-from=nope.safetensors",
            f"{PLAN} --disk=text.txt:100TB",
        ),
        exact=True,
    ),
)


def inputs(folder: Path) -> None:
    """Write what the commands read: configurations, text, tokens, a directory as transformers writes it."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    rng = np.random.default_rng(1)
    gpt2 = {"model_type": "gpt2", "vocab_size": 300, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 4}
    (folder / "gpt2.json").write_text(json.dumps({**gpt2, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}))
    llama = {"model_type": "llama", "vocab_size": 300, "max_position_embeddings": 16, "hidden_size": 24, "intermediate_size": 60}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "tie_word_embeddings": False}
    (folder / "llama.json").write_text(json.dumps({**llama, **heads}))
    for name, length in (("text.txt", 20_000), ("val.txt", 4_000)):
        (folder / name).write_text("".join(rng.choice(list("abcdefghij klmno\n"), length)))
    (folder / "empty.safetensors").touch()
    (folder / "data").mkdir()
    (folder / "data" / "train.bin").write_bytes(rng.integers(0, 300, 2000).astype("<u2").tobytes())

    start = folder / "start"
    start.mkdir()
    (start / "config.json").write_text(json.dumps({**gpt2, "architectures": ["GPT2LMHeadModel"], "bos_token_id": 256, "eos_token_id": 256}))
    save_file({name: rng.normal(0, 0.2, shape).astype(np.float32) for name, shape in gpt2_shapes(24, 2, 300, 16)}, start / "model.safetensors")
    vocabulary = {letter: number for number, letter in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|endoftext|>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(start / "tokenizer.json"))


def gpt2_shapes(width: int, layers: int, words: int, positions: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of transformers' GPT-2."""
    yield "transformer.wte.weight", (words, width)
    yield "transformer.wpe.weight", (positions, width)
    for layer in range(layers):
        for name, shape in (("ln_1", (width,)), ("attn.c_attn", (width, 3 * width)), ("attn.c_proj", (width, width)), ("ln_2", (width,))):
            yield f"transformer.h.{layer}.{name}.weight", shape
            yield f"transformer.h.{layer}.{name}.bias", shape[-1:]
        for name, shape in (("mlp.c_fc", (width, 4 * width)), ("mlp.c_proj", (4 * width, width))):
            yield f"transformer.h.{layer}.{name}.weight", shape
            yield f"transformer.h.{layer}.{name}.bias", shape[-1:]
    for part in ("weight", "bias"):
        yield f"transformer.ln_f.{part}", (width,)
