"""Training on a cluster by the command: a small model and its flags, and what the servers of a dashboard answer."""

from __future__ import annotations

from urllib.request import urlopen

from support.deadline import DEADLINE

CONFIG = {"vocab_size": 257, "n_positions": 16, "n_embd": 12, "n_layer": 2, "n_head": 3, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}

FLAGS = "--config-path=small.json --dataset=text --dataset-path=text --tokenizer=bytes --batch=8 --minibatch=2 --lanes=4 --lr=1e-3 --ncpu=1"

TRAIN = ["train", *FLAGS.split(), "--sample-tokens=0"]


def read(address: str | None) -> str:
    """What a server answers."""
    assert address is not None
    with urlopen(address, timeout=DEADLINE) as answer:
        return str(answer.read().decode())
