"""Masked language modelling with a BERT of transformers, in a session of PyTorch on a memory budget.

    python examples/torch_bert.py --steps 100
    python examples/torch_bert.py --steps 100 --ram 9MB --disk scratch    # the same losses in a third of the memory
    python examples/torch_bert.py --text notes.txt --save trained         # BertForMaskedLM.from_pretrained("trained") reads it

Tokens are bytes, so there is no tokenizer. The default text is Python's standard library. The script runs offline, in a minute.

Letters: B sequences of T tokens.
"""

import argparse
import os
from pathlib import Path

import numpy as np
import torch
from transformers import BertConfig, BertForMaskedLM

from wrappers.torch import Session

B, T = 16, 128
MASK = 256  # the only token that is not a byte
IGNORED = -100  # label of tokens that are not predicted


def masked(windows, rng):
    """Return input ids and labels of windows, with 15 % of the tokens to predict: (B, T) -> (B, T), (B, T).

    Of these, eight tenths are masked, one tenth is random, and one tenth is unchanged (Devlin et al., BERT, 2018).
    """
    guessed = rng.random(windows.shape) < 0.15
    chance = rng.random(windows.shape)
    ids = np.where(guessed & (chance < 0.8), MASK, windows)
    ids = np.where(guessed & (chance >= 0.9), rng.integers(0, 256, windows.shape), ids)
    return torch.tensor(ids), torch.tensor(np.where(guessed, windows, IGNORED))


def batch_of(text, number):
    """Return a batch that depends only on its number."""
    rng = np.random.default_rng(number)
    starts = rng.integers(0, len(text) - T, B)
    ids, labels = masked(np.stack([text[start : start + T] for start in starts]).astype(np.int64), rng)
    return {"input_ids": ids, "labels": labels}


def train(steps, text, *, layers=4, width=128, save=None, **budgets):
    """Train a model and return the loss of each step."""
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 4, "intermediate_size": 4 * width}
    module = BertForMaskedLM(BertConfig(vocab_size=MASK + 1, max_position_embeddings=T, **sizes))  # with its dropout of 0.1
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: min(1.0, (number + 1) / 20))
    with Session(module, optimizer, minibatches=2, max_grad_norm=1.0, **budgets) as session:
        losses = []
        for number in range(1, steps + 1):
            losses.append(session.step(**batch_of(text, number)))
            schedule.step()
            if number % 10 == 0:
                print(f"step {number}/{steps} | loss {losses[-1]:.3f}", flush=True)
        held_out = session.evaluate(**batch_of(text, 0))
        peak = session.runtime.stats()["peak_bytes"]["ram"]
        if save:
            session.save(save)
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f} in {steps} steps, {held_out:.3f} without dropout; peak {peak / 1e6:.1f} MB")
    return losses


def library():
    """Return a part of Python's standard library as bytes."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:80]
    return np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, choices=range(1, 10_001), metavar="N", help="optimizer steps, at least 1")
    parser.add_argument("--text", type=Path, help="text file to train on (default: Python's standard library)")
    parser.add_argument("--save", help="new directory for weights, optimizer and config")
    parser.add_argument("--ram", help="memory budget, such as 9MB (default: 0.9 of the free memory)")
    parser.add_argument("--disk", help="directory of a disk tier below the memory")
    options = parser.parse_args()
    text = np.frombuffer(options.text.read_bytes(), np.uint8) if options.text else library()
    if len(text) <= T:
        parser.error(f"--text must have more than {T} bytes, got {len(text)}; give a longer one")
    train(options.steps, text, save=options.save, ram=options.ram, disk=options.disk)


if __name__ == "__main__":
    main()
