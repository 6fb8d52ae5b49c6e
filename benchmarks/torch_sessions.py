"""Modules of transformers in a session beside PyTorch itself: seconds of a step, peak resident memory, and the same in a quarter of the memory.

    python benchmarks/torch_sessions.py                      # all models, two rounds; writes benchmarks/results/torch_sessions.json
    python benchmarks/torch_sessions.py --models bert vit    # some of them
    python benchmarks/torch_sessions.py --rounds 1 --output= # a quick look, written nowhere

A side is a process of its own: a model with random weights from a config, dropout off, fp32, the same random batch in every step, AdamW (fused in
PyTorch). Two steps warm up, `--steps` are timed, and the fastest counts, because other processes only add to it. PyTorch computes with all cores
inside an operation, eager or behind torch.compile; a session computes with one thread for each worker, in the budget that the table gives, and once
more in a quarter of the bytes that it used there, above a disk. GPT-2 and LLaMA stand beside nntask's own tiles as well, and of a model of 24 layers
only the step is recorded.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Final

import common
from steps import torch_step

EAGER: Final = "torch, eager"
COMPILED: Final = "torch, compiled"
SESSION: Final = "session"
CHAINS: Final = "session, compiled"
"""A session with compiled chains."""
WARMUP: Final = 2
QUARTER: Final = "quarter"
"""A session in a quarter of the bytes that it uses in memory, above a disk."""
SHARE: Final = 0.25
OWN: Final = "own"
"""The same model of nntask's own tiles."""
RECORDING: Final = "recording"
"""A session that records its step and takes none."""
NAMES: Final = {OWN: "nntask's own tiles", SESSION: "all of it"}
MOST_RECORDING: Final = 30.0
"""Seconds of capture and recording."""
BESIDE_NBYTES: Final = 400e6
"""Resident bytes beside a budget."""


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


LLAMA: Final = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 32000}
CASES: Final = {
    "bert": Case("BERT-base, 4 x 512", "3GB", 4),
    "t5": Case("T5-small, 8 x 256 and 64", "4GB", 2),
    "vit": Case("ViT-B/16, 8 images", "4GB", 4),
    "neox": Case("GPT-NeoX 160M, 4 x 512", "4GB", 4),
    "gpt2": Case("GPT-2 small, 4 x 512", "4GB", 4),
    "llama": Case("LLaMA of 12 layers and width 768, 4 x 512", "4GB", 4),
    "bert-large": Case("BERT of 24 layers and width 1024, 4 x 512", "8GB", 4),
}


def make(name: str) -> tuple[Any, dict[str, Any]]:
    """A module in training mode, and its batch."""
    import torch
    import transformers as hf

    torch.manual_seed(0)
    if name in ("bert", "bert-large"):
        ids = torch.randint(0, 30522, (4, 512))
        large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096} if name == "bert-large" else {}
        config = hf.BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **large)
        return hf.BertForMaskedLM(config).train(), {"input_ids": ids, "labels": ids}
    if name == "t5":
        config = hf.T5Config(dropout_rate=0.0, decoder_start_token_id=0)
        batch = {"input_ids": torch.randint(0, 32128, (8, 256)), "labels": torch.randint(0, 32128, (8, 64)), "use_cache": False}
        return hf.T5ForConditionalGeneration(config).train(), batch
    if name == "vit":
        config = hf.ViTConfig(num_labels=1000, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        return hf.ViTForImageClassification(config).train(), {"pixel_values": torch.randn(8, 3, 224, 224), "labels": torch.randint(0, 1000, (8,))}
    if name == "gpt2":
        ids = torch.randint(0, 50257, (4, 512))
        config = hf.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        return hf.GPT2LMHeadModel(config).train(), {"input_ids": ids, "labels": ids, "use_cache": False}
    if name == "llama":
        ids = torch.randint(0, LLAMA["vocab_size"], (4, 512))
        return hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)).train(), {"input_ids": ids, "labels": ids, "use_cache": False}
    ids = torch.randint(0, 50304, (4, 512))
    config = hf.GPTNeoXConfig(vocab_size=50304, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072)
    return hf.GPTNeoXForCausalLM(config).train(), {"input_ids": ids, "labels": ids, "use_cache": False}


def measure(side: str, name: str, steps: int, ram: str) -> dict[str, float]:
    """Run one side in this process."""
    if side == OWN:
        return _measure_own(name, steps)
    module, batch = make(name)
    if side in (EAGER, COMPILED):
        return _timed(torch_step(module, batch, compiled=side == COMPILED), steps)
    from wrappers.torch import Session

    with tempfile.TemporaryDirectory(dir=".") as folder:
        case = CASES[name]
        disk = folder if side == QUARTER else None
        with Session(module, lr=1e-4, minibatches=case.minibatches, ram=ram, disk=disk, compiled=side == CHAINS) as session:
            del module
            began = perf_counter()
            count = case.minibatches
            pieces = {key: value.chunk(count) if hasattr(value, "chunk") else [value] * count for key, value in batch.items()}
            session.training_step([{key: piece[number] for key, piece in pieces.items()} for number in range(count)])
            recording = {"recording_seconds": perf_counter() - began}
            if side == RECORDING:
                return {**recording, "peak_rss_bytes": common.peak_rss()}
            found = _timed(lambda: session.step(**batch), steps)
            stats = session.runtime.stats()
            return {**found, **recording, "used_bytes": float(stats["peak_bytes"]["ram"]), "budget_bytes": float(stats["budget_bytes"]["ram"])}


def _measure_own(name: str, steps: int) -> dict[str, float]:
    """The model of nntask's own tiles: the same shape, random tokens, whole batches."""
    import numpy as np

    from nntask import PRESETS, AdamW, default_tiling
    from nntask.models import FAMILIES, build
    from scheduler import Runtime

    if name == "gpt2":
        config: Any = replace(PRESETS["gpt2"], resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    else:
        config = FAMILIES["llama"].config.from_dict({**LLAMA, "model_type": "llama", "max_position_embeddings": 2048}, "the benchmark")
    stream = np.random.default_rng(0).integers(0, config.vocab_size, (4, 513))
    with Runtime() as runtime:
        model = build(config, default_tiling(config, 4, 512), runtime)
        optimizer = AdamW(model.parameters(), lr=1e-4)
        tokens, targets = model.input_tensors(batch=4, seq_len=512)
        with runtime.record() as recorded:
            loss = model(tokens, targets)
            loss.backward()
            optimizer.step()
        count = 0

        def step() -> float:
            nonlocal count
            count += 1
            tokens.write(stream[:, :-1])
            targets.write(stream[:, 1:])
            optimizer.prepare(count)
            return float(recorded.replay().read(loss).reshape(()))

        return _timed(step, steps)


def _timed(step: Callable[[], float], steps: int) -> dict[str, float]:
    loss = step()
    for _ in range(WARMUP - 1):
        step()
    seconds = []
    for _ in range(steps):
        start = perf_counter()
        step()
        seconds.append(perf_counter() - start)
    return {"seconds": min(seconds), "loss_first": loss, "peak_rss_bytes": common.peak_rss()}


def rows(name: str, found: dict[str, list[common.Measurement]]) -> list[dict[str, Any]]:
    """The rows of a model."""
    what = CASES[name].what
    fastest = {side: min(one["seconds"] for one in rounds) for side, rounds in found.items() if side != RECORDING}
    memory = {side: max(one["peak_rss_bytes"] for one in rounds) for side, rounds in found.items()}

    def speed(words: str, side: str, peer: str, bar: str = "") -> dict[str, Any]:
        return common.compare(f"{what}{words}: steps", "steps/s", 1 / fastest[side], NAMES.get(peer, peer), 1 / fastest[peer], better="more", bar=bar)

    def size(words: str, side: str, peer: str, nbytes: float, bar: str = "") -> dict[str, Any]:
        return common.compare(f"{what}{words}: peak memory", "bytes", memory[side], peer, nbytes, better="less", bar=bar)

    recording = min(one["recording_seconds"] for one in found.get(SESSION, found.get(RECORDING, [])))
    table = [
        common.compare(f"{what}: capture and recording", "s", recording, "bar", MOST_RECORDING, better="less", bar=f"ours <= {MOST_RECORDING:g}")
    ]
    if OWN in found:
        return [*table, speed("", SESSION, OWN), speed("", SESSION, EAGER), size("", SESSION, NAMES[OWN], memory[OWN])]
    if RECORDING in found:
        return table
    budget = found[QUARTER][0]["budget_bytes"]
    return [
        *table,
        speed("", SESSION, EAGER, "ratio >= 1.0"),
        speed("", SESSION, COMPILED, "ratio >= 0.9"),
        speed(", compiled chains", CHAINS, EAGER),
        size("", SESSION, EAGER, memory[EAGER], "ratio <= 0.75"),
        size(", compiled chains", CHAINS, EAGER, memory[EAGER]),
        speed(", a quarter of the RAM", QUARTER, SESSION, "ratio >= 0.85"),
        size(", a quarter of the RAM", QUARTER, EAGER, memory[EAGER]),
        size(", a quarter of the RAM", QUARTER, "its budget and 400 MB", budget + BESIDE_NBYTES, "ratio <= 1"),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and keep."""
    parser = common.parser(__doc__, "torch_sessions")
    parser.add_argument("--models", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
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

        ram = CASES[name].ram
        if name == "bert-large":
            sides = [side(RECORDING, ram)]
        elif name in ("gpt2", "llama"):
            sides = [side(EAGER), side(SESSION, ram), side(OWN)]
        else:
            sides = [side(EAGER), side(COMPILED), side(SESSION, ram), side(CHAINS, ram)]
        found = common.alternate(sides, asked.rounds)
        if COMPILED in found:
            used = min(one["used_bytes"] for one in found[SESSION])
            found |= common.alternate([side(QUARTER, f"{int(SHARE * used)}B")], asked.rounds)
        kept[name] = found
        comparisons += rows(name, found)
    common.finish(
        asked.output, before, ("nntask", "torch", "transformers", "numpy"), {"rounds": asked.rounds, "steps": asked.steps}, comparisons, rounds=kept
    )


if __name__ == "__main__":
    main()
