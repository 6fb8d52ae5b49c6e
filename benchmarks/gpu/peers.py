"""torch on the card: the peers of `bench`, each a process of its own that prints its rate.

    python benchmarks/gpu/peers.py compiled '[50257, 1024, 768, 12, 12]' --batch 16 --steps 20
    python benchmarks/gpu/peers.py offloaded '[50257, 1024, 1600, 48, 25]' --batch 32 --minibatch 4 --steps 4

``compiled`` is the hand-written GPT-2 of `torch_gpt2` behind torch.compile, ``eager`` the same without. ``offloaded`` is that model under FSDP2
(`fully_shard` of torch.distributed.fsdp) with a group of one process: parameters, gradients and optimizer state in host memory, one block at a time
on the card, activations recomputed block by block. All: scaled_dot_product_attention, bf16 with fp32 masters, fused AdamW, random tokens. DeepSpeed
is not among them: it compiles its optimizer for offloading on the machine, which takes the whole CUDA toolkit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common
import torch
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from torch_gpt2 import GPT2, Block

SKIP: Final = 4
"""Steps before those that count, where there are more; else one."""

Loss = Callable[[Tensor, Tensor], Tensor]


class Recomputed(Block):
    """A block that keeps nothing but its input."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        found: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return found


def compiled(sizes: list[int], device: str, *, eager: bool = False) -> tuple[Any, Loss]:
    """Everything on the card, bf16 by autocast."""
    torch.set_float32_matmul_precision("high")
    with torch.device(device):
        model = GPT2(*sizes)
    step_model = model if eager else torch.compile(model)

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            found: Tensor = step_model(tokens, targets)
        return found

    return model, loss


def offloaded(sizes: list[int], device: str) -> tuple[Any, Loss]:
    """State in host memory, a block at a time on the card."""
    model = GPT2(*sizes)
    policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), "offload_policy": CPUOffloadPolicy()}
    for block in model.blocks:
        block.__class__ = Recomputed
        fully_shard(block, **policy)
    return fully_shard(model, **policy), model


def run(kind: str, sizes: list[int], batch: int, minibatch: int, steps: int, device: str) -> dict[str, float]:
    """Train, and measure the median step and the memory that torch took on the card."""
    model, loss_of = {"compiled": compiled, "eager": partial(compiled, eager=True), "offloaded": offloaded}[kind](sizes, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    skip = SKIP if steps > SKIP else 1
    data = torch.randint(0, sizes[0], (steps + skip, batch, sizes[1] + 1), generator=torch.Generator().manual_seed(0)).to(device)
    seconds = []
    for ids in data:
        begin = perf_counter()
        optimizer.zero_grad(set_to_none=True)
        for part in ids.split(minibatch):
            loss = loss_of(part[:, :-1], part[:, 1:]) * (minibatch / batch)
            loss.backward()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(perf_counter() - begin)
    nbytes = torch.cuda.max_memory_reserved() if device == "cuda" else 0
    return {"tokens_per_second": batch * sizes[1] / statistics.median(seconds[skip:]), "loss": loss.item() * batch / minibatch, "peak_bytes": nbytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kind", choices=("compiled", "eager", "offloaded"))
    parser.add_argument("sizes", type=json.loads, help="vocabulary, positions, width, layers, heads")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--minibatch", type=int)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu tries the script")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if asked.kind == "offloaded":
            backend = "cuda:nccl,cpu:gloo" if asked.device == "cuda" else "gloo"
            torch.distributed.init_process_group(backend, init_method=f"file://{folder}/group", rank=0, world_size=1)
        try:
            common.report(run(asked.kind, asked.sizes, asked.batch, asked.minibatch or asked.batch, asked.steps, asked.device))
        finally:
            if asked.kind == "offloaded":
                torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
