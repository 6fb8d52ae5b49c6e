"""Modules of transformers in a session beside PyTorch itself: seconds of a step, peak resident memory, and the same in a quarter of the memory.

    python benchmarks/torch_sessions.py                      # four models, two rounds; writes benchmarks/results/torch_sessions.json
    python benchmarks/torch_sessions.py --models bert vit    # some of them
    python benchmarks/torch_sessions.py --rounds 1 --output= # a quick look, written nowhere

A side is a process of its own: a model with random weights from a config, dropout off, fp32, the same random batch in every step, AdamW (fused in
PyTorch). Two steps warm up, `--steps` are timed, and the fastest counts, because other processes only add to it. PyTorch computes with all cores
inside an operation, eager or behind torch.compile; a session computes with one thread for each worker, in the budget that the table gives, and once
more in a quarter of the bytes that it used there, above a disk.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common

EAGER: Final = "torch, eager"
COMPILED: Final = "torch, compiled"
CHAINS: Final = "session, compiled"
"""A session with compiled chains."""
WARMUP: Final = 2
QUARTER: Final = 0.25


@dataclass(frozen=True, slots=True)
class Case:
    """A model and its batch.

    Args:
        what: in words.
        ram: budget of the session.
        minibatches: of the session.
    """

    what: str
    ram: str
    minibatches: int


CASES: Final = {
    "bert": Case("BERT-base, 4 x 512", "4GB", 4),
    "t5": Case("T5-small, 8 x 256 and 64", "4GB", 4),
    "vit": Case("ViT-B/16, 8 images", "4GB", 4),
    "neox": Case("GPT-NeoX 160M, 4 x 512", "4GB", 4),
}


def make(name: str) -> tuple[Any, dict[str, Any]]:
    """A module in training mode, and its batch."""
    import torch
    import transformers as hf

    torch.manual_seed(0)
    if name == "bert":
        ids = torch.randint(0, 30522, (4, 512))
        config = hf.BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        return hf.BertForMaskedLM(config).train(), {"input_ids": ids, "labels": ids}
    if name == "t5":
        config = hf.T5Config(dropout_rate=0.0, decoder_start_token_id=0)
        batch = {"input_ids": torch.randint(0, 32128, (8, 256)), "labels": torch.randint(0, 32128, (8, 64)), "use_cache": False}
        return hf.T5ForConditionalGeneration(config).train(), batch
    if name == "vit":
        config = hf.ViTConfig(num_labels=1000, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        return hf.ViTForImageClassification(config).train(), {"pixel_values": torch.randn(8, 3, 224, 224), "labels": torch.randint(0, 1000, (8,))}
    ids = torch.randint(0, 50304, (4, 512))
    config = hf.GPTNeoXConfig(vocab_size=50304, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072)
    return hf.GPTNeoXForCausalLM(config).train(), {"input_ids": ids, "labels": ids, "use_cache": False}


def measure(side: str, name: str, steps: int, ram: str) -> dict[str, float]:
    """Run one side in this process."""
    module, batch = make(name)
    began = perf_counter()
    if side in (EAGER, COMPILED):
        return _timed(_torch_step(module, batch, compiled=side == COMPILED), steps, began)
    from wrappers.torch import Session

    with tempfile.TemporaryDirectory(dir=".") as folder:
        case = CASES[name]
        disk = folder if side == "quarter" else None
        with Session(module, lr=1e-4, minibatches=case.minibatches, ram=ram, disk=disk, compiled=side == CHAINS) as session:
            del module
            found = _timed(lambda: session.step(**batch), steps, began)
            return {**found, "used_bytes": float(session.runtime.stats()["peak_bytes"]["ram"])}


def _torch_step(module: Any, batch: dict[str, Any], *, compiled: bool) -> Callable[[], float]:
    import torch

    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    call = torch.compile(module) if compiled else module

    def step() -> float:
        optimizer.zero_grad()
        loss = call(**batch).loss
        loss.backward()
        optimizer.step()
        return float(loss)

    return step


def _timed(step: Callable[[], float], steps: int, began: float) -> dict[str, float]:
    loss = step()
    first = perf_counter() - began
    for _ in range(WARMUP - 1):
        step()
    seconds = []
    for _ in range(steps):
        start = perf_counter()
        step()
        seconds.append(perf_counter() - start)
    return {"seconds": min(seconds), "first_step_seconds": first, "loss_first": loss, "peak_rss_bytes": common.peak_rss()}


def rows(name: str, found: dict[str, list[common.Measurement]]) -> list[dict[str, Any]]:
    """The rows of a model."""
    case = CASES[name]
    fastest = {side: min(one["seconds"] for one in rounds) for side, rounds in found.items()}
    memory = {side: max(one["peak_rss_bytes"] for one in rounds) for side, rounds in found.items()}
    table = [
        common.compare(f"{case.what}: steps", "steps/s", 1 / fastest["session"], EAGER, 1 / fastest[EAGER], better="more", bar="ratio >= 1.0"),
        common.compare(f"{case.what}: steps", "steps/s", 1 / fastest["session"], COMPILED, 1 / fastest[COMPILED], better="more", bar="ratio >= 0.9"),
        common.compare(f"{case.what}, compiled chains: steps", "steps/s", 1 / fastest[CHAINS], EAGER, 1 / fastest[EAGER], better="more"),
        common.compare(f"{case.what}, compiled chains: steps", "steps/s", 1 / fastest[CHAINS], COMPILED, 1 / fastest[COMPILED], better="more"),
        common.compare(f"{case.what}: peak memory", "bytes", memory["session"], EAGER, memory[EAGER], better="less", bar="ratio <= 0.75"),
        common.compare(f"{case.what}, compiled chains: peak memory", "bytes", memory[CHAINS], EAGER, memory[EAGER], better="less"),
        common.compare(
            f"{case.what}, a quarter of the RAM: steps",
            "steps/s",
            1 / fastest["quarter"],
            "all of it",
            1 / fastest["session"],
            better="more",
            bar="ratio >= 0.85",
        ),
    ]
    table.append(common.compare(f"{case.what}, a quarter of the RAM: peak memory", "bytes", memory["quarter"], EAGER, memory[EAGER], better="less"))
    return table


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--output", default="torch_sessions")
    parser.add_argument("--side", default="", help="run one side in this process: its name, the model and the budget")
    parser.add_argument("--model", default="")
    parser.add_argument("--ram", default="")
    asked = parser.parse_args(argv)
    if asked.side:
        common.report(measure(asked.side, asked.model, asked.steps, asked.ram))
        return
    before, comparisons, kept = common.machine(), [], {}
    for name in asked.models:

        def side(which: str, ram: str = "", model: str = name) -> common.Side:
            return common.Side(which, common.this_script(__file__, f"--side={which}", f"--model={model}", f"--ram={ram}", f"--steps={asked.steps}"))

        found = common.alternate([side(EAGER), side(COMPILED), side("session", CASES[name].ram), side(CHAINS, CASES[name].ram)], asked.rounds)
        used = min(one["used_bytes"] for one in found["session"])
        found |= common.alternate([side("quarter", f"{int(QUARTER * used)}B")], 1)
        kept[name] = found
        comparisons += rows(name, found)
    result = {
        "machine": before,
        "versions": common.versions("nntask", "torch", "transformers", "numpy"),
        "settings": {"rounds": asked.rounds, "steps": asked.steps},
        "comparisons": comparisons,
        "rounds": kept,
    }
    common.finish(asked.output, result)


if __name__ == "__main__":
    main()
