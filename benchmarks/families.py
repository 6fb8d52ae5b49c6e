"""Families that GPT-2 is not, beside PyTorch: seconds of a training step and peak memory of Pythia, BERT and T5 at their usual sizes.

    python benchmarks/families.py                         # all, three rounds; writes benchmarks/results/families.json
    python benchmarks/families.py --models bert --rounds 1 --output=    # a quick look, written nowhere

A side is a process of its own: a model with random weights, dropout off, fp32, 4 x 512 random tokens in every step, AdamW (fused in PyTorch), with as
many threads as the machine has cores; nntask takes one sequence at a time (``--minibatch 1``), PyTorch all at once. Two steps warm up, `--steps` are
timed, and the median counts. PyTorch runs transformers' class, eager and behind torch.compile, each with malloc as it is and told to keep freed
buffers; a scouting round finds the fastest of the four, and that one, in turn with nntask, is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, Final

import common
from steps import torch_step

OURS: Final = "nntask"
PEERS: Final = ("torch, eager", "torch, compiled", "torch, eager, kept", "torch, compiled, kept")
KEEP: Final = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(10**12)}
WARMUP: Final = 2
BATCH: Final = 4
LENGTH: Final = 512
MINIBATCH: Final = 1
"""Sequences that nntask computes at once."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model.

    Args:
        what: in words.
        preset: its name here.
    """

    what: str
    preset: str


CASES: Final = {
    "pythia": Case("Pythia 160M, 4 x 512", "pythia-160m"),
    "bert": Case("BERT-base, masked, 4 x 512", "bert-base"),
    "t5": Case("T5-small, 4 x 512 and 512", "t5-small"),
}


def measure(side: str, name: str, steps: int) -> dict[str, float]:
    """Run one side in this process."""
    step = _own_step(name) if side == OURS else _torch_step(name, compiled="compiled" in side)
    loss = 0.0
    for _ in range(WARMUP):
        loss = step()
    seconds = []
    for _ in range(steps):
        start = perf_counter()
        step()
        seconds.append(perf_counter() - start)
    return {"seconds": median(seconds), "loss": loss, "peak_rss_bytes": common.peak_rss()}


def _own_step(name: str) -> Callable[[], float]:
    """A training step as ``nntask train --minibatch`` records it, in default tiles."""
    from nntask import PRESETS, AdamW, default_tiling
    from nntask.data import Objective, random_batch
    from nntask.engine import emit_training_step
    from nntask.models import build
    from scheduler import Runtime

    config = PRESETS[CASES[name].preset].with_dropout(0.0)
    form = "pairs" if config.objective == "seq2seq" else "stream"
    objective = Objective(config.objective, form, length=LENGTH, target_length=LENGTH)
    batch = random_batch(objective, BATCH, config.vocab_size, 0)
    runtime = Runtime().__enter__()
    model = build(config, default_tiling(config, MINIBATCH, LENGTH), runtime)
    optimizer = AdamW(model.parameters(), lr=1e-4)
    inputs = [model.inputs(MINIBATCH, LENGTH, objective.names, LENGTH) for _ in range(BATCH // MINIBATCH)]
    with runtime.record() as recorded:
        losses, _ = emit_training_step(model, optimizer, inputs)
    count = 0

    def step() -> float:
        nonlocal count
        count += 1
        for number, given in enumerate(inputs):
            rows = batch.rows(slice(number * MINIBATCH, (number + 1) * MINIBATCH))
            for key, tensor in given.items():
                tensor.write(rows.arrays[key])
        optimizer.prepare(count)
        ticket = recorded.replay()
        return sum(float(ticket.read(loss)[0]) for loss in losses)

    return step


def _torch_step(name: str, *, compiled: bool) -> Callable[[], float]:
    """The same by transformers."""
    import torch
    import transformers

    from nntask import PRESETS

    torch.manual_seed(0)
    config = PRESETS[CASES[name].preset].with_dropout(0.0)
    values = config.to_dict()
    kind: Any = getattr(transformers, values["architectures"][0])
    module = kind(kind.config_class(**values)).train()
    ids = torch.randint(0, config.vocab_size, (BATCH, LENGTH))
    given: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if config.objective != "masked":
        given["use_cache"] = False
    return torch_step(module, given, compiled=compiled)


def rows(name: str, peer: str, found: dict[str, list[common.Measurement]]) -> list[dict[str, Any]]:
    """The rows of a model: beside the fastest of the peers, and what else was seen."""
    what, ours, theirs = CASES[name].what, common.medians(found[OURS]), common.medians(found[peer])
    return [
        common.compare(f"{what}: steps", "steps/s", 1 / ours["seconds"], peer, 1 / theirs["seconds"], better="more", bar="ratio >= 1.2"),
        common.compare(f"{what}: peak memory", "bytes", ours["peak_rss_bytes"], peer, theirs["peak_rss_bytes"], better="less", bar="ratio <= 0.6"),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and keep."""
    parser = common.parser(__doc__, "families")
    parser.add_argument("--models", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--side", default="", help="run one side in this process: its name and the model")
    parser.add_argument("--model", default="")
    asked = parser.parse_args(argv)
    if asked.side:
        common.report(measure(asked.side, asked.model, asked.steps))
        return
    before, comparisons, kept = common.machine(), [], {}
    for name in asked.models:

        def side(which: str, model: str = name) -> common.Side:
            command = common.this_script(__file__, f"--side={which}", f"--model={model}", f"--steps={asked.steps}")
            return common.Side(which, command, KEEP if "kept" in which else {})

        scouted = common.alternate([side(peer) for peer in PEERS], 1)
        fastest = min(PEERS, key=lambda peer: scouted[peer][0]["seconds"])
        found = common.alternate([side(fastest), side(OURS)], asked.rounds)
        kept[name] = {**scouted, **found}
        comparisons += rows(name, fastest, found)
    common.finish(
        asked.output, before, ("nntask", "torch", "transformers", "numpy"), {"rounds": asked.rounds, "steps": asked.steps}, comparisons, rounds=kept
    )


if __name__ == "__main__":
    main()
